// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Columns: what a set keeps of each sequence, token, row or entry, and how teacher caches are made of them.
//
//   axis       one number, or `width` of them, for each …        shape in a shard of S sequences, T tokens, N rows
//   sequence   sequence                                          (S) or (S,width)
//   token      token of prompt and response                      (T)
//   row        row: a token that caches speak of                 (N) or (N,width)
//   bounds     row, and one more: where its entries begin        (N+1), int64, from 0
//   entry      entry of rows that differ in length               (total)
//
// A cache is a list of columns and of facts, numbers that are the same for all rows; visit_columns says which. One list
// serves the writer, which reads the members, and the reader, which sets them. Names begin with the kind of cache, so
// that a set may hold several: samples.ids, support.ids, hidden.x …
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "opd/data/packed_ids.hpp"
#include "opd/element.hpp"
#include "opd/hidden.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::data {

/// What a column's numbers are. `packed`: ids of `bits` bits (packed_ids.hpp).
enum class dtype { u8, f16, bf16, i32, f32, i64, f64, packed };
/// Along what a column runs: the table at the head.
enum class axis { sequence, token, row, bounds, entry };

/// Bytes of a number; of packed ids 1, the unit of their stream.
constexpr std::size_t size_of(dtype t) {
    constexpr std::size_t sizes[] = {1, 2, 2, 4, 4, 8, 8, 1};
    return sizes[static_cast<std::size_t>(t)];
}
/// As safetensors call it.
constexpr const char* name_of(dtype t) {
    constexpr const char* names[] = {"U8", "F16", "BF16", "I32", "F32", "I64", "F64", "U8"};
    return names[static_cast<std::size_t>(t)];
}
constexpr const char* name_of(axis a) {
    constexpr const char* names[] = {"sequence", "token", "row", "bounds", "entry"};
    return names[static_cast<std::size_t>(a)];
}

/// One column as set.json describes it.
struct column {
    std::string name;
    dtype type = dtype::f32;
    axis per = axis::row;
    index_t width = 0;     ///< numbers of each, side by side; 0: one, and no second dimension
    int bits = 0;          ///< of a packed id
    std::string offsets{}; ///< of entries: the column that says where each row's begin
    friend bool operator==(const column&, const column&) = default;
    index_t numbers() const { return width > 0 ? width : 1; } ///< of one place along the axis
};

/// How a storage type stands in a file.
template <class T>
constexpr dtype dtype_of() {
    using bits = stored_as<T>;
    if constexpr (std::is_same_v<bits, float>)
        return dtype::f32;
    else if constexpr (std::is_same_v<bits, double>)
        return dtype::f64;
    else if constexpr (std::is_same_v<bits, bfloat16>)
        return dtype::bf16;
    else if constexpr (std::is_same_v<bits, half>)
        return dtype::f16;
    else if constexpr (std::is_same_v<bits, std::uint8_t>)
        return dtype::u8;
    else if constexpr (std::is_same_v<bits, std::int32_t>)
        return dtype::i32;
    else {
        static_assert(std::is_same_v<bits, std::int64_t>, "opd: a data set has no column of this type");
        return dtype::i64;
    }
}

/// The columns and facts of a cache, of the names `prefix` + what they are. The visitor has
///
///   ids(name, matrix)            ids(name, line, offsets' name)         required
///   numbers(name, matrix)        numbers(name, vector)    numbers(name, line, offsets' name); an empty one is left out
///   bounds(name, row_offsets)    fact(name, number)       head(name, matrix), of which the set has one
template <class Id, class L, class V>
void visit_columns(teacher::support<Id, L>& c, const std::string& prefix, V&& v) {
    v.ids(prefix + ".ids", c.ids);
    v.numbers(prefix + ".log_q", c.log_q);
    v.numbers(prefix + ".log_tail", c.log_tail);
    v.numbers(prefix + ".log_mu", c.log_mu);
    v.fact(prefix + ".chosen_by", c.chosen_by);
}
template <class Id, class L, class V>
void visit_columns(teacher::ragged_support<Id, L>& c, const std::string& prefix, V&& v) {
    const std::string offsets = prefix + ".offsets";
    v.bounds(offsets, c.offsets);
    v.ids(prefix + ".ids", c.ids, offsets);
    v.numbers(prefix + ".log_q", c.log_q, offsets);
    v.numbers(prefix + ".log_mu", c.log_mu, offsets);
    v.numbers(prefix + ".log_tail", c.log_tail);
    v.fact(prefix + ".chosen_by", c.chosen_by);
}

namespace detail {
template <class L, class V>
void visit_rollout(rollout_record<L, space::host>& r, const std::string& prefix, V&& v) {
    v.numbers(prefix + ".log_norm", r.log_norm);
    v.fact(prefix + ".mode", r.mode);
    v.fact(prefix + ".temperature", r.drawn_with.temperature);
    v.fact(prefix + ".top_k", r.drawn_with.top_k);
    v.fact(prefix + ".top_p", r.drawn_with.top_p);
    v.fact(prefix + ".min_p", r.drawn_with.min_p);
}
template <class Cache, class V>
void visit_drawn(Cache& c, const std::string& prefix, V&& v) {
    v.ids(prefix + ".ids", c.ids);
    v.numbers(prefix + ".log_mu", c.log_mu);
    v.numbers(prefix + ".log_q", c.log_q);
    v.numbers(prefix + ".log_prox", c.log_prox);
    v.numbers(prefix + ".log_ref", c.log_ref);
    v.numbers(prefix + ".advantage", c.advantage);
    v.numbers(prefix + ".baseline", c.baseline);
    v.numbers(prefix + ".mu_entropy", c.mu_entropy);
    visit_rollout(c.rollout, prefix, v);
}
} // namespace detail

template <class Id, class L, class V>
void visit_columns(teacher::samples<Id, L>& c, const std::string& prefix, V&& v) {
    detail::visit_drawn(c, prefix, v);
}
template <class Id, class L, class W, class V>
void visit_columns(teacher::weighted<Id, L, space::host, W>& c, const std::string& prefix, V&& v) {
    detail::visit_drawn(c, prefix, v);
    v.numbers(prefix + ".weight", c.weight);
    v.numbers(prefix + ".exact", c.exact);
    v.numbers(prefix + ".log_tail_mu", c.log_tail_mu);
}
template <class Y, class V>
void visit_columns(teacher::dense<Y>& c, const std::string& prefix, V&& v) {
    v.numbers(prefix + ".y", c.y);
    v.fact(prefix + ".temperature", c.temperature);
}
/// States or codes. The head or decoder is one of the whole set, where it was given to the writer; a head that is no
/// matrix is the caller's.
template <class X, class Head, class V>
void visit_columns(teacher::hidden<X, space::host, Head>& c, const std::string& prefix, V&& v) {
    v.numbers(prefix + ".x", c.x);
    if constexpr (std::is_same_v<Head, matrix_view<const X>>) v.head(prefix + ".w", c.w);
    v.head(prefix + ".bias", c.bias);
    v.fact(prefix + ".temperature", c.temperature);
    v.fact(prefix + ".soft_cap", c.soft_cap);
}
template <class Cache, class Id, class V>
void visit_columns(teacher::on_kept_sets<Cache, Id>& c, const std::string& prefix, V&& v) {
    visit_columns(static_cast<Cache&>(c), prefix, v);
    const std::string offsets = prefix + ".kept_offsets";
    v.bounds(offsets, c.kept_offsets);
    v.ids(prefix + ".kept_ids", c.kept_ids, offsets);
    v.numbers(prefix + ".log_kept_q", c.log_kept_q);
}
template <class Cache, class V>
void visit_columns(teacher::lumped<Cache>& c, const std::string& prefix, V&& v) {
    visit_columns(static_cast<Cache&>(c), prefix, v);
    v.fact(prefix + ".common", c.common);
}
template <class Cache, class V>
void visit_columns(teacher::on_policy<Cache>& c, const std::string& prefix, V&& v) {
    visit_columns(static_cast<Cache&>(c), prefix, v);
}
template <class Cache, class V>
void visit_columns(teacher::of_teacher<Cache>& c, const std::string& prefix, V&& v) {
    visit_columns(static_cast<Cache&>(c), prefix, v);
}
template <class Cache, class V>
void visit_columns(teacher::missing_mu<Cache>& c, const std::string& prefix, V&& v) {
    visit_columns(static_cast<Cache&>(c), prefix, v);
}

namespace detail {
/// Whether rows are made of states and a head.
template <class Cache>
inline constexpr bool is_hidden = requires(const Cache& c) {
    c.x;
    c.soft_cap;
};
} // namespace detail

/// What the names of a cache's columns begin with.
template <class Cache>
constexpr const char* prefix_of() {
    if constexpr (detail::is_hidden<Cache>)
        return "hidden";
    else
        return Cache::kind == cache_kind::dense     ? "dense"
               : Cache::kind == cache_kind::support ? "support"
               : Cache::kind == cache_kind::samples ? "samples"
                                                    : "weighted";
}

} // namespace opd::data
