// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Student sources: where the student's logits come from and where their gradient goes. The gradient sink is part of the
// source, so that a forgotten one shows at the call.
//
//   student::logits{view(z,N,V), view(dz,N,V)}     (N,V) in, (N,V) out
//   student::logits{view(z,N,V)}                   value only
//   student::on_support{view(z,N,V), view(dz,N,k)} (N,V) in, a sparse gradient out: dz[r,j] belongs to the support's
//                                                  ids[r,j]; for losses on a renormalised support, which need no other
//
// Element types of z and dz are independent. dz may be z itself (same pointer, type and stride; not with beta != 0); any
// other overlap with z, the teacher's matrices or the env's weights and outputs is an error (the env's masks, offsets and
// versions are not looked at). Columns between V and the stride are padding: kept, or zeroed with `padding::zero`.
#pragma once

#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/view.hpp"

namespace opd {

enum class padding { keep, zero };

namespace student {

template <storage Z, storage G = Z, space Space = space::host>
struct logits {
    using logit_type = Z;
    using gradient_type = G;
    static constexpr space memory_space = Space;
    static constexpr bool sparse_gradient = false;
    matrix_view<const Z, Space> z; ///< (N,V)
    matrix_view<G, Space> dz = {}; ///< (N,V); empty: value only
    float temperature = 1;         ///< p = softmax(z / temperature)
    opd::padding pad = opd::padding::keep;
};
template <class Z, space S>
logits(matrix_view<Z, S>) -> logits<std::remove_const_t<Z>, std::remove_const_t<Z>, S>;
template <class Z, space S>
logits(matrix_view<Z, S>, float) -> logits<std::remove_const_t<Z>, std::remove_const_t<Z>, S>;
template <class Z, class G, space S>
logits(matrix_view<Z, S>, matrix_view<G, S>) -> logits<std::remove_const_t<Z>, G, S>;
template <class Z, class G, space S>
logits(matrix_view<Z, S>, matrix_view<G, S>, float) -> logits<std::remove_const_t<Z>, G, S>;
template <class Z, class G, space S>
logits(matrix_view<Z, S>, matrix_view<G, S>, float, opd::padding) -> logits<std::remove_const_t<Z>, G, S>;

template <storage Z, storage G = Z, space Space = space::host>
struct on_support {
    using logit_type = Z;
    using gradient_type = G;
    static constexpr space memory_space = Space;
    static constexpr bool sparse_gradient = true;
    matrix_view<const Z, Space> z; ///< (N,V)
    matrix_view<G, Space> dz = {}; ///< (N,k), column j for the support's id j; empty: value only
    float temperature = 1;
    opd::padding pad = opd::padding::keep;
};
template <class Z, space S>
on_support(matrix_view<Z, S>) -> on_support<std::remove_const_t<Z>, std::remove_const_t<Z>, S>;
template <class Z, class G, space S>
on_support(matrix_view<Z, S>, matrix_view<G, S>) -> on_support<std::remove_const_t<Z>, G, S>;
template <class Z, class G, space S>
on_support(matrix_view<Z, S>, matrix_view<G, S>, float) -> on_support<std::remove_const_t<Z>, G, S>;

} // namespace student

} // namespace opd
