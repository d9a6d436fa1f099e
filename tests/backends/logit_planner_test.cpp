// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// From budgets to blocks of rows and tiles of ids: no budget is exceeded, no larger block would have fitted, and the
// blocks and tiles of a cut have every row and id once.
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cstddef>
#include <doctest/doctest.h>
#include <vector>

#include <opd/logits/planner.hpp>

using namespace opd;
using namespace opd::test;
using detail::cut_limits;
using detail::cut_logits;
using detail::logit_cut;
using detail::rows_within;

TEST_CASE("rows within a budget: they fit, and one more does not") {
    property("rows", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t most = u.below(5000);
        const auto budget = std::size_t(u.below(200000)), fixed = std::size_t(u.below(300)),
                   row = std::size_t(u.below(60)), step = std::size_t(1 + u.below(64)); // aligned as memory is
        const auto bytes = [&](index_t n) {
            return n == 0 ? 0 : (fixed + row * std::size_t(n) + step - 1) / step * step;
        };
        const index_t rows = rows_within(budget, most, bytes);
        RC_ASSERT(rows >= 0);
        RC_ASSERT(rows <= most);
        RC_ASSERT(bytes(rows) <= budget);
        RC_ASSERT((rows == most || bytes(rows + 1) > budget));
    });
}

TEST_CASE("a cut keeps within every budget, is the cheapest, and has every row and id once") {
    property("cut", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t vocab = 1 + u.below(20000), whole = u.below(2) ? 1 : 32;
        cut_limits limits{.rows = 1 + u.below(700), .whole = whole};
        if (u.below(2)) limits.ids = vocab, limits.tile_rows = 1 + u.below(400), limits.most_ids = 8192;
        struct side {
            std::size_t budget, fixed, number;
            std::size_t bytes(index_t rows, index_t ids) const {
                return rows == 0 ? 0 : fixed + std::size_t(rows * ids) * number;
            }
        };
        std::vector<side> sides;
        for (index_t i = 1 + u.below(2); i > 0; --i)
            sides.push_back(
                {std::size_t(u.below(vocab * 8 * 300)), std::size_t(u.below(500)), std::size_t(4 + 4 * u.below(2))});
        const auto within = [&](index_t ids, index_t most) {
            for (const side& s : sides)
                most = rows_within(s.budget, most, [&](index_t n) { return s.bytes(n, ids == 0 ? vocab : ids); });
            return most;
        };
        const double of_tiles = u.uniform() * 3;
        const auto cost = [&](index_t rows, bool tiled) {
            return double((limits.rows + rows - 1) / rows) + (tiled ? of_tiles : 0);
        };
        const logit_cut cut = cut_logits(limits, within, cost);
        const index_t ids = cut.ids == 0 ? vocab : cut.ids;
        for (const side& s : sides) RC_ASSERT(s.bytes(cut.rows, ids) <= s.budget);
        std::vector<logit_cut> others{{within(0, limits.rows), 0}};
        for (index_t i = limits.most_ids; i >= 1024; i /= 2)
            if (i < vocab) others.push_back({within(i, std::min(limits.rows, limits.tile_rows)), i});
        if (cut.rows == 0) { // nothing fits
            for (const logit_cut& o : others) RC_ASSERT(o.rows == 0);
            return;
        }
        const bool cut_down = cut.rows < limits.rows && cut.rows >= whole;
        if (cut_down) RC_ASSERT(cut.rows % whole == 0);
        double least = 1e300;
        index_t fitted = 0; // rows of the same tiles before they were cut down to whole ones
        for (const logit_cut& o : others) {
            if (o.rows > 0) least = std::min(least, cost(o.rows, o.ids > 0));
            if (o.ids == cut.ids) fitted = o.rows;
        }
        RC_ASSERT(cost(fitted, cut.ids > 0) == least);
        RC_ASSERT(fitted - cut.rows < whole);

        std::vector<int> rows_seen(static_cast<std::size_t>(limits.rows)),
            ids_seen(static_cast<std::size_t>(vocab)); // as the callers walk
        for (index_t begin = 0; begin < limits.rows; begin += cut.rows)
            for (index_t r = begin; r < std::min(begin + cut.rows, limits.rows); ++r) ++rows_seen[std::size_t(r)];
        for (index_t begin = 0; begin < vocab; begin += ids)
            for (index_t v = begin; v < std::min(begin + ids, vocab); ++v) ++ids_seen[std::size_t(v)];
        RC_ASSERT(std::count(rows_seen.begin(), rows_seen.end(), 1) == limits.rows);
        RC_ASSERT(std::count(ids_seen.begin(), ids_seen.end(), 1) == vocab);
    });
}
