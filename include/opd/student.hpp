// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Student sources: where the student's logits come from and where their gradient goes. The gradient's place is part of
// the source, so a forgotten gradient shows at the call.
//
//   student::logits{view(z,N,V), view(dz,N,V)}     (N,V) in, (N,V) out
//   student::logits{view(z,N,V)}                   value only
//   student::on_support{view(z,N,V), view(dz,N,k)} (N,V) in, a sparse gradient out: dz[r,j] belongs to logit ids[r,j]
//                                                  of the support. For losses on a renormalised support, which need no
//                                                  other logit. For a ragged support dz is (1,total), as its ids are
//
// Options are named: student::logits{.z = z, .dz = dz, .temperature = 0.7f, .pad = padding::keep}. The temperature may
// also stand third. nvcc deduces no types from named members: in a .cu file write the types,
// logits<float, float, space::device>{.z = …}, or assign the member afterwards.
//
// z and dz may have different element types. dz may be z itself (same pointer, type and stride; not with beta != 0). No
// other output may overlap another span of the call. The call zeroes the padding that the view dz names (view.hpp), or
// leaves it alone with `padding::keep`; it never touches columns beyond the padding. In place, a view with a stride
// must say whose the columns between the rows are: otherwise logits would stay where a backward pass over whole rows
// expects a gradient, and the call is refused.
#pragma once

#include <type_traits>

#include "opd/checks/misfit.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/source.hpp"
#include "opd/view.hpp"

namespace opd {

/// What a call does with the padding columns of the gradient's view.
enum class padding { zero, keep };

namespace detail {
struct by_name_only {}; ///< what follows it in an aggregate is set by name
} // namespace detail

namespace student {

/// The student's logits in memory, and where dz goes: a dense gradient.
template <class Z, class G = Z, space Space = space::host>
struct logits {
    static_assert(!std::is_const_v<G>, "opd: the gradient is written: its view must not be of const elements");
    static_assert(detail::known_elements<Z, std::remove_const_t<G>>());
    using logit_type = Z;
    using gradient_type = G;
    static constexpr space memory_space = Space;
    static constexpr bool sparse_gradient = false;
    matrix_view<const Z, Space> z; ///< (N,V)
    matrix_view<G, Space> dz = {}; ///< (N,V); empty: value only
    float temperature = 1;         ///< p = softmax(z / temperature), from 1e-6 to 1e6
    detail::by_name_only named = {};
    opd::padding pad = opd::padding::zero;

    // as a source of rows (docs/concepts/source.md)
    static constexpr bool one_tile = true;
    OPD_HD index_t rows() const { return z.rows; }
    OPD_HD index_t vocab() const { return z.cols; }
    OPD_HD index_t tile_size() const { return z.cols; }
    OPD_HD const Z* tile(row_place at, index_t begin) const { return z.row(at.row) + begin; }
    OPD_HD const Z& logit(row_place at, index_t id) const { return z(at.row, id); }
    OPD_HD bool has_gradient() const { return !dz.empty(); }
    OPD_HD G* gradient_tile(row_place at, index_t begin) const { return dz.row(at.row) + begin; }
    OPD_HD G& gradient_at(row_place at, index_t id) const { return dz(at.row, id); }
};
template <class Z, space S, detail::option... Options>
logits(matrix_view<Z, S>, Options...) -> logits<std::remove_const_t<Z>, std::remove_const_t<Z>, S>;
template <class Z, class G, space S, detail::option... Options>
logits(matrix_view<Z, S>, matrix_view<G, S>, Options...) -> logits<std::remove_const_t<Z>, G, S>;
OPD_MISFIT(logits, (class G, space S), G, S);

/// The student's logits in memory with a gradient for the ids of a support alone, O(k) a row. For renormalised losses,
/// whose gradient elsewhere is 0.
template <class Z, class G = Z, space Space = space::host>
struct on_support {
    static_assert(!std::is_const_v<G>, "opd: the gradient is written: its view must not be of const elements");
    static_assert(detail::known_elements<Z, std::remove_const_t<G>>());
    using logit_type = Z;
    using gradient_type = G;
    static constexpr space memory_space = Space;
    static constexpr bool sparse_gradient = true;
    matrix_view<const Z, Space> z; ///< (N,V)
    matrix_view<G, Space> dz = {}; ///< (N,k), column j for the support's id j; ragged: (1,total); empty: value only
    float temperature = 1;
    detail::by_name_only named = {};
    opd::padding pad = opd::padding::zero;

    OPD_HD index_t rows() const { return z.rows; }
    OPD_HD index_t vocab() const { return z.cols; }
    OPD_HD const Z& logit(row_place at, index_t id) const { return z(at.row, id); }
    OPD_HD bool has_gradient() const { return !dz.empty(); }
    OPD_HD G& gradient_at(row_place at, index_t slot) const { return dz(at.row, slot); } ///< slot of the support
};
template <class Z, space S, detail::option... Options>
on_support(matrix_view<Z, S>, Options...) -> on_support<std::remove_const_t<Z>, std::remove_const_t<Z>, S>;
template <class Z, class G, space S, detail::option... Options>
on_support(matrix_view<Z, S>, matrix_view<G, S>, Options...) -> on_support<std::remove_const_t<Z>, G, S>;
OPD_MISFIT(on_support, (class G, space S), G, S);

} // namespace student

namespace detail {

template <class Z, class G, space S>
inline constexpr bool materialised<student::logits<Z, G, S>> = true;
template <class Z, class G, space S>
inline constexpr bool materialised<student::on_support<Z, G, S>> = true;

} // namespace detail

} // namespace opd
