// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A vocabulary in shards: rank i holds the ids [first_i, first_i + count_i), as columns of the logits or as rows of
// the head, and the softmax runs over all of them. What ranks tell each other about a row are its sums over their own
// ids, numbers that do not grow with the vocabulary; the stages between two exchanges are
// backends/vocab_parallel.hpp's, and how the numbers travel is the caller's.
//
//   partials    one stretch of bytes a round, as long on every rank: a head, then an item for each row that is under
//               way. Trivially copyable: send it with MPI, NCCL, a socket, a pointer
//   merge       merge_partials(into, from): the sums over the ids of both. Associative and commutative up to rounding;
//               fold in the order of ranks, and the same bits come out each time
//
// Every rank must go on from the same bits: they are what it decides by. An all-gather whose parts each rank then
// merges in the order of ranks gives them; so does a reduction to one rank and a broadcast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/rows/dense_rows.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/row_sweep.hpp"

namespace opd {

/// The ids that a rank holds: from `first` on, as many as its logits have columns or its head rows; none is fine. Any
/// split is.
struct vocab_shard {
    index_t first = 0;
    index_t total = 0; ///< ids of the softmax, over all ranks
};

namespace detail {
inline namespace OPD_ISA {

/// What is known of a round. `ids` and `sum_of_ids` add up: of shards that hold every id once, total and 0 + 1 + … +
/// total - 1.
struct partials_head {
    std::uint64_t round, items, stride, ids, sum_of_ids;
};
/// What a row's partial is of; its payload follows, and then the logits that go along.
enum class partial_kind : std::int16_t { none, sweep, one_sum, two_sums, three_sums, entrywise, log_sum };
struct partial_item {
    std::int64_t row;
    std::int16_t phase; ///< which of the row's
    partial_kind kind;
    std::int32_t logits;
};

template <class Partial>
OPD_HD constexpr partial_kind kind_of() {
    if constexpr (std::is_same_v<Partial, row_sweep>)
        return partial_kind::sweep;
    else if constexpr (std::is_same_v<Partial, double>)
        return partial_kind::one_sum;
    else if constexpr (std::is_same_v<Partial, two_sums> || std::is_same_v<Partial, overlap_sums>)
        return partial_kind::two_sums;
    else if constexpr (std::is_same_v<Partial, entropy_sums>)
        return partial_kind::three_sums;
    else if constexpr (std::is_same_v<Partial, entrywise_sums>)
        return partial_kind::entrywise;
    else if constexpr (std::is_same_v<Partial, log_sum_of_any>)
        return partial_kind::log_sum;
}
inline std::size_t bytes_of(partial_kind kind) {
    switch (kind) {
    case partial_kind::none:
        return 0;
    case partial_kind::sweep:
        return sizeof(row_sweep);
    case partial_kind::one_sum:
        return sizeof(double);
    case partial_kind::two_sums:
        return sizeof(two_sums);
    case partial_kind::three_sums:
        return sizeof(entropy_sums);
    case partial_kind::entrywise:
        return sizeof(entrywise_sums);
    case partial_kind::log_sum:
        return sizeof(log_sum_of_any);
    }
    return 0;
}
/// Of the largest, which sweeps have.
inline constexpr std::size_t most_partial_bytes = sizeof(row_sweep);
static_assert(sizeof(overlap_sums) == sizeof(two_sums) && most_partial_bytes % 8 == 0 &&
              std::is_trivially_copyable_v<row_sweep> && std::is_trivially_copyable_v<log_sum_of_any>);

template <class T>
T read_as(const std::byte* from) {
    T x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
template <class T>
void write_as(std::byte* to, const T& x) {
    std::memcpy(to, &x, sizeof x);
}

inline void merge_payload(partial_kind kind, std::byte* into, const std::byte* from) {
    const auto with = [&]<class T>(const T& a, auto merge) { write_as(into, merge(a, read_as<T>(from))); };
    switch (kind) {
    case partial_kind::none:
        break;
    case partial_kind::sweep:
        with(read_as<row_sweep>(into), [](const auto& a, const auto& b) { return row_sweep::merge(a, b); });
        break;
    case partial_kind::one_sum:
        with(read_as<double>(into), [](double a, double b) { return a + b; });
        break;
    case partial_kind::two_sums:
        with(read_as<two_sums>(into), [](const auto& a, const auto& b) { return two_sums::merge(a, b); });
        break;
    case partial_kind::three_sums:
        with(read_as<entropy_sums>(into), [](const auto& a, const auto& b) { return entropy_sums::merge(a, b); });
        break;
    case partial_kind::entrywise:
        with(read_as<entrywise_sums>(into), [](const auto& a, const auto& b) {
            return entrywise_sums{a.loss + b.loss, a.c + b.c, a.wide || b.wide};
        });
        break;
    case partial_kind::log_sum:
        with(read_as<log_sum_of_any>(into), [](const auto& a, const auto& b) { return log_sum_of_any::merge(a, b); });
        break;
    }
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// into = the sums over the ids of both. Throws invalid_input where the two are not of the same round of the same call.
inline void merge_partials(std::span<std::byte> into, std::span<const std::byte> from) {
    using namespace detail;
    const auto refuse = [](const char* why) { throw invalid_input("partials", why); };
    if (into.size() != from.size()) refuse("differ in length: the ranks are not in the same round of the same call");
    if (into.size() < sizeof(partials_head)) refuse("are shorter than their head");
    auto head = read_as<partials_head>(into.data());
    const auto other = read_as<partials_head>(from.data());
    if (head.round != other.round || head.items != other.items || head.stride != other.stride ||
        head.stride < sizeof(partial_item) || head.items > (into.size() - sizeof(partials_head)) / head.stride)
        refuse("are not of the same round of the same call on every rank");
    head.ids += other.ids, head.sum_of_ids += other.sum_of_ids;
    std::byte* to = into.data() + sizeof(partials_head);
    const std::byte* at = from.data() + sizeof(partials_head);
    for (std::uint64_t i = 0; i < head.items; ++i, to += head.stride, at += head.stride) {
        const auto item = read_as<partial_item>(to), same = read_as<partial_item>(at);
        if (item.row != same.row || item.phase != same.phase || item.kind != same.kind || item.logits != same.logits)
            refuse("are of other rows on every rank, or of another state of theirs: ranks went on from different bits");
        merge_payload(item.kind, to + sizeof item, at + sizeof item);
        std::byte* const logits = to + sizeof item + bytes_of(item.kind);
        const std::byte* const others = at + sizeof item + bytes_of(item.kind);
        for (std::int32_t j = 0; j < item.logits; ++j) // a logit is its shard's; elsewhere -inf
            if (is_neg_inf(read_as<double>(logits + 8 * j))) std::memcpy(logits + 8 * j, others + 8 * j, 8);
    }
    write_as(into.data(), head);
}

} // namespace OPD_ISA

} // namespace opd
