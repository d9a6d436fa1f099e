// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The order in which an epoch reads a set: a function of seed, epoch and the number of sequences, and of nothing else.
//
//   permutation   n things in an order that no memory holds: a Feistel network of eight rounds on the smallest even
//                 number of bits that counts them, walked until it lands below n. Its round function is Philox4x32-10
//   shuffle       stored     as they were written
//                 shards     shards in a random order, and the sequences of each: neighbours on the disk are read close
//                            to each other in time
//                 sequences  all of them
//
// Position j of a rank is position rank + j·ranks of the epoch, and reader k of r takes j = b + k, b + k + r, … from
// where the readers began, b: ranks share an epoch without a rest, and what a rank's readers give, taken in turn, is
// the same for any number of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/rng.hpp"

namespace opd::data {

/// A bijection of [0, n).
class permutation {
public:
    permutation(index_t n, std::uint64_t seed, std::uint64_t epoch, std::uint32_t which = 0)
        : n_(static_cast<std::uint64_t>(n)), seed_(seed), epoch_(epoch), which_(which),
          half_((std::max(2, static_cast<int>(std::bit_width(n_ > 0 ? n_ - 1 : 0))) + 1) / 2) {}

    index_t operator()(index_t i) const {
        auto x = static_cast<std::uint64_t>(i);
        do x = once(x);
        while (x >= n_); // ends: the walk returns to i, which is below n
        return static_cast<index_t>(x);
    }

private:
    std::uint64_t once(std::uint64_t x) const {
        const std::uint64_t mask = (std::uint64_t{1} << half_) - 1;
        std::uint64_t left = x >> half_, right = x & mask;
        for (std::uint32_t round = 0; round < 8; ++round) {
            const philox_block b =
                philox4x32({{static_cast<std::uint32_t>(right), round | which_ << 4, static_cast<std::uint32_t>(epoch_),
                             static_cast<std::uint32_t>(epoch_ >> 32)}},
                           static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32));
            const std::uint64_t next = left ^ (b.word[0] & mask);
            left = right, right = next;
        }
        return left << half_ | right;
    }
    std::uint64_t n_, seed_, epoch_;
    std::uint32_t which_; ///< below 2^28: several permutations of one epoch
    int half_;            ///< bits of either side, at most 32
};

/// How random an epoch's order is: `shards` reads a disk in longer pieces than `sequences`.
enum class shuffle { stored, shards, sequences };

/// Which part of a set a reader has, and in which order.
struct read_order {
    data::shuffle shuffle = data::shuffle::sequences;
    std::uint64_t seed = 0;
    index_t rank = 0, ranks = 1;     ///< positions rank, rank + ranks, … of the epoch
    index_t reader = 0, readers = 1; ///< of this rank
};

/// An epoch's order over shards of these sizes.
class epoch_order {
public:
    /// `begins`: where each shard's sequences begin, and how many there are in all.
    epoch_order(std::vector<index_t> begins, const read_order& how, std::uint64_t epoch)
        : begins_(std::move(begins)), how_(how), epoch_(epoch), all_(begins_.back(), how.seed, epoch) {
        if (how_.shuffle != shuffle::shards) return;
        const auto shards = static_cast<index_t>(begins_.size()) - 1;
        const permutation order(shards, how_.seed, epoch_, 1);
        taken_.push_back(0);
        for (index_t i = 0; i < shards; ++i) {
            shards_.push_back(order(i));
            const auto s = static_cast<std::size_t>(shards_.back());
            taken_.push_back(taken_.back() + begins_[s + 1] - begins_[s]);
        }
    }
    index_t size() const { return begins_.back(); }

    /// The sequence at a position in [0, size()).
    index_t operator[](index_t position) const {
        if (how_.shuffle == shuffle::stored) return position;
        if (how_.shuffle == shuffle::sequences) return all_(position);
        const auto at = std::upper_bound(taken_.begin(), taken_.end(), position) - taken_.begin() - 1;
        const auto s = static_cast<std::size_t>(shards_[static_cast<std::size_t>(at)]);
        const permutation within(begins_[s + 1] - begins_[s], how_.seed, epoch_, static_cast<std::uint32_t>(s) + 2);
        return begins_[s] + within(position - taken_[static_cast<std::size_t>(at)]);
    }

private:
    std::vector<index_t> begins_;
    read_order how_;
    std::uint64_t epoch_;
    permutation all_;
    std::vector<index_t> shards_, taken_; ///< shuffle::shards: which comes when, and how many sequences before it
};

} // namespace opd::data
