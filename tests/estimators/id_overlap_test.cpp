// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// The share of a support's ids that another list holds: against counting by hand, matrices and ragged lines alike; what
// is bad, what is refused.
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <set>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/id_overlap.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// Rows of ids as a line, and as a matrix filled up with -1.
template <class Id>
struct lists {
    index_t n, width = 1;
    std::vector<std::int32_t> offsets{0};
    std::vector<Id> line, filled;
    lists(numbers& u, index_t n_, index_t v) : n(n_) {
        for (index_t r = 0; r < n; ++r) {
            const index_t k = u.below(v + 1);
            for (index_t j = 0; j < k; ++j) line.push_back(Id(u.below(20) == 0 ? -u.below(3) : u.below(4 * v)));
            offsets.push_back(std::int32_t(line.size())), width = std::max(width, k);
        }
        filled.assign(std::size_t(n * width), Id(-1));
        for (index_t r = 0; r < n; ++r)
            for (auto i = offsets[std::size_t(r)]; i < offsets[std::size_t(r + 1)]; ++i)
                filled[std::size_t(r * width + i - offsets[std::size_t(r)])] = line[std::size_t(i)];
    }
    teacher::ragged_support<Id> ragged() const { return {line, {}, row_offsets<>(offsets)}; }
    matrix_view<const Id> matrix() const { return view(filled.data(), n, width); }
    teacher::support<Id> cache() const { return {matrix(), {}}; }
    std::vector<index_t> used(index_t r) const {
        std::vector<index_t> out;
        for (auto i = offsets[std::size_t(r)]; i < offsets[std::size_t(r + 1)]; ++i)
            if (line[std::size_t(i)] != Id(-1)) out.push_back(index_t(line[std::size_t(i)]));
        return out;
    }
};

} // namespace

TEST_CASE("counted by hand") {
    property("counts", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t n = u.below(6);
        const lists<std::int64_t> s(u, n, 1 + u.below(12));
        const lists<std::int16_t> t(u, n, 1 + u.below(30));
        std::vector<std::int32_t> mask;
        for (index_t r = 0; r < n; ++r) mask.push_back(std::int32_t(u.below(4)));
        std::vector<double> want(std::size_t(n), 7.0);
        id_overlaps all;
        for (index_t r = 0; r < n; ++r) {
            if (mask[std::size_t(r)] == 0) continue;
            ++all.rows;
            const auto mine = s.used(r), theirs = t.used(r);
            const std::set<index_t> once(mine.begin(), mine.end()), others(theirs.begin(), theirs.end());
            want[std::size_t(r)] = 0;
            if (once.empty() || once.size() != mine.size() || *once.begin() < 0) {
                if (all.bad_rows++ == 0) all.first_bad_row = r;
                continue;
            }
            for (const index_t id : once) want[std::size_t(r)] += others.count(id) ? 1.0 : 0.0;
            want[std::size_t(r)] /= double(once.size());
            all.sum += want[std::size_t(r)];
        }
        const auto check = [&](const auto& a, const auto& b) {
            std::vector<double> share(std::size_t(n), 7.0);
            const id_overlaps got = id_overlap(a, b, view(share.data(), n), row_mask<>(mask));
            RC_ASSERT(share == want);
            RC_ASSERT(got.rows == all.rows);
            RC_ASSERT(got.bad_rows == all.bad_rows);
            RC_ASSERT(got.first_bad_row == all.first_bad_row);
            RC_ASSERT(got.sum == all.sum);
            RC_ASSERT(id_overlap(a, b, {}, row_mask<>(mask)).mean() == got.mean());
        };
        check(s.ragged(), t.matrix()), check(s.ragged(), t.ragged()), check(s.matrix(), t.cache());
        check(s.cache(), t.ragged());
    });
}

TEST_CASE("a support of the student's own best ids is known to it; one of the worst is not") {
    constexpr index_t n = 4, v = 50, k = 6;
    numbers u(3);
    std::vector<float> z, worst, log_p(n * k);
    for (index_t i = 0; i < n * v; ++i) z.push_back(float(u.normal())), worst.push_back(-z.back());
    std::vector<std::int32_t> best(n * k), least(n * k);
    cpu_backend be;
    top_k(be, view(std::as_const(z).data(), n, v), view(best.data(), n, k), view(log_p.data(), n, k));
    top_k(be, view(std::as_const(worst).data(), n, v), view(least.data(), n, k), view(log_p.data(), n, k));
    const auto ids = view(std::as_const(best).data(), n, k);
    CHECK(id_overlap(ids, ids).mean() == 1);
    CHECK(id_overlap(view(std::as_const(least).data(), n, k), ids).mean() == 0);
    CHECK(id_overlap(ids, view(std::as_const(best).data(), n, k / 2, k)).mean() == 0.5); // the best half of them
    best[0] = -2;                                                                        // of four rows one is bad
    CHECK(id_overlap(ids, ids).mean() == 1);
    CHECK(id_overlap(ids, ids).bad_rows == 1);
    CHECK(id_overlaps{}.mean() == 0);
}

TEST_CASE("refused") {
    std::vector<std::int32_t> ids(6), offsets{0, 2, 5};
    std::vector<double> share(2, 7.0);
    const auto rows = view(std::as_const(ids).data(), 2, 3);
    const auto refused = [&](const char* words, const auto& a, const auto& b) {
        CHECK_THROWS_WITH_AS(id_overlap(a, b, share), doctest::Contains(words), invalid_input);
        CHECK(share == std::vector<double>(2, 7.0));
    };
    refused("others: has shape", rows, view(std::as_const(ids).data(), 3, 2));
    refused("share: has 2 entries", view(std::as_const(ids).data(), 3, 2), view(std::as_const(ids).data(), 3, 2));
    refused("support: is a null pointer", matrix_view<const std::int32_t>(nullptr, 2, 3, 3), rows);
    const auto ragged = [&](std::vector<std::int32_t> to) {
        offsets = std::move(to);
        return teacher::ragged_support<std::int32_t>{ids, {}, row_offsets<>(offsets)};
    };
    refused("support, row 1: from 4 to 3", ragged({0, 4, 3}), rows);
    refused("others, row 1: from 2 to 7", rows, ragged({0, 2, 7}));
    refused("others, row 0: from -1 to 2", rows, ragged({-1, 2, 6}));
    refused("others: has 2 entries", rows, ragged({0, 2}));
    refused("others: has no offsets", rows, teacher::ragged_support<std::int32_t>{ids, {}, {}});
    auto* as_ids = reinterpret_cast<std::int64_t*>(share.data());
    refused("share: overlaps others", view(std::as_const(ids).data(), 2, 3), view(as_ids, 2, 1));
    const std::vector<std::int32_t> mask(3, 1);
    CHECK_THROWS_WITH_AS(id_overlap(rows, rows, share, row_mask<>(mask)), doctest::Contains("mask"), invalid_input);
}

TEST_CASE("repeats in a row become unused slots, all but the first") {
    property("repeats", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t n = u.below(6);
        lists<std::int32_t> s(u, n, 1 + u.below(12));
        const std::vector<std::int32_t> before = s.filled;
        index_t repeats = 0;
        std::vector<std::int32_t> want;
        for (index_t r = 0; r < n; ++r) {
            std::set<std::int32_t> seen;
            for (index_t j = 0; j < s.width; ++j) {
                const std::int32_t id = before[std::size_t(r * s.width + j)];
                const bool again = id != -1 && !seen.insert(id).second;
                repeats += again, want.push_back(again ? -1 : id);
            }
        }
        RC_ASSERT(drop_repeats(view(s.filled.data(), n, s.width)) == repeats);
        RC_ASSERT(s.filled == want);
        RC_ASSERT(drop_repeats(vector_view<std::int32_t>(s.line), row_offsets<>(s.offsets)) == repeats);
        for (index_t r = 0; r < n; ++r)
            for (auto i = s.offsets[std::size_t(r)]; i < s.offsets[std::size_t(r + 1)]; ++i)
                RC_ASSERT(s.line[std::size_t(i)] == want[std::size_t(r * s.width + i - s.offsets[std::size_t(r)])]);
    });
    std::vector<std::int32_t> line{1, 1, 2};
    const std::vector<std::int32_t> offsets{0, 2, 4};
    CHECK_THROWS_WITH_AS(drop_repeats(vector_view<std::int32_t>(line), row_offsets<>(offsets)),
                         doctest::Contains("ids, row 1"), invalid_input);
    CHECK(line == std::vector<std::int32_t>{1, 1, 2}); // nothing of it
}
