// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From memory budgets to blocks of logits: how many rows, and how many of their ids, are made at a time. CPU, GPU and
// shards ask it; what a block takes and what a cut costs is theirs to say.
#pragma once

#include <algorithm>
#include <cstddef>

#include "opd/config.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// The most rows, up to `most`, of which a budget holds bytes(rows); more rows never take fewer bytes.
template <class Bytes>
index_t rows_within(std::size_t budget, index_t most, Bytes&& bytes) {
    index_t low = 0, high = most + 1; // holds `low`, not `high`
    while (high - low > 1) {
        const index_t middle = low + (high - low) / 2;
        (bytes(middle) <= budget ? low : high) = middle;
    }
    return low;
}

/// Blocks of `rows` rows, of which `ids` ids are there at a time; 0: all of them.
struct logit_cut {
    index_t rows = 0, ids = 0;
};
struct cut_limits {
    index_t rows;          ///< of the call, at least 1
    index_t whole = 1;     ///< a block of more rows, but not of all, has a multiple of this
    index_t ids = 0;       ///< of the longest row, if it may be cut into tiles
    index_t tile_rows = 0; ///< rows of tiles, at most
    index_t most_ids = 0;  ///< of a tile: this many, or half, down to `least_ids`
    static constexpr index_t least_ids = 1024;
};
struct no_cost {
    double operator()(index_t, bool) const { return 0; }
};

/// The cheapest cut. within(ids, most): the rows, up to `most`, that all budgets hold; cost(rows, whether in tiles).
/// Without rows where a budget holds none.
template <class Within, class Cost = no_cost>
logit_cut cut_logits(const cut_limits& c, Within&& within, Cost&& cost = {}) {
    logit_cut best{within(index_t{0}, c.rows), 0};
    for (index_t ids = c.most_ids; ids >= c.least_ids; ids /= 2) {
        if (ids >= c.ids) continue; // it is no tile
        const index_t rows = within(ids, std::min(c.rows, c.tile_rows));
        if (rows > 0 && (best.rows == 0 || cost(rows, true) < cost(best.rows, best.ids > 0))) best = {rows, ids};
    }
    if (best.rows < c.rows && best.rows > c.whole) best.rows -= best.rows % c.whole;
    return best;
}

} // namespace OPD_ISA
} // namespace opd::detail
