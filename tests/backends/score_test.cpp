// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, whole-sanitize
//
// Scoring against float64, on the CPU's lanes and on the GPU's rows run by a host loop: log p of given ids, the best
// ids, the mass outside either, lists of different lengths; that what is asked beside changes no bit; rows without a
// law; what is refused.
#include "both_engines.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <set>
#include <string>
#include <vector>

#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// A row in float64: log p of every id, ids best first, and log of the mass outside a set.
struct reference {
    std::vector<double> log_p;
    std::vector<index_t> best; // with mass
    template <class Z>
    reference(const Z* row, index_t n, double temperature) {
        std::vector<double> z;
        for (index_t v = 0; v < n; ++v) z.push_back(detail::logit_within(row[v]));
        for (index_t v = 0; v < n; ++v)
            if (z[std::size_t(v)] > -1e30) best.push_back(v);
        std::stable_sort(best.begin(), best.end(),
                         [&](index_t a, index_t b) { return z[std::size_t(a)] > z[std::size_t(b)]; });
        const double top = z[std::size_t(best[0])];
        double sum = 0;
        for (const index_t v : best) sum += std::exp((z[std::size_t(v)] - top) / temperature);
        for (const double x : z) log_p.push_back(x > -1e30 ? (x - top) / temperature - std::log(sum) : -1e300);
    }
    double log_tail(const std::set<index_t>& without) const {
        double top = -1e300, sum = 0;
        for (const index_t v : best)
            if (!without.count(v)) top = std::max(top, log_p[std::size_t(v)]);
        for (const index_t v : best)
            if (!without.count(v)) sum += std::exp(log_p[std::size_t(v)] - top);
        return sum > 0 ? top + std::log(sum) : -1e300;
    }
};

/// Tails agree as far as L holds them. What lies so far below the row's largest that its number type has no digits
/// there may count in part or not at all.
template <class Z>
bool close(double got, double want) {
    const double eps = sizeof(arithmetic_t<Z>) == 8 ? 1e-11 : 3e-6;
    if (want < -1e200) return detail::is_neg_inf(got);
    if (want < (sizeof(arithmetic_t<Z>) == 8 ? -600 : -70))
        return detail::is_neg_inf(got) || got < want + 1; // a denormal number has few digits
    return std::abs(got - want) < eps * std::max(1.0, std::abs(want));
}
template <class Z>
bool same_log_p(double got, double want, double lse) {
    const double eps = sizeof(arithmetic_t<Z>) == 8 ? 1e-13 : 3e-7;
    if (want < -1e200) return detail::is_neg_inf(got);
    return std::abs(got - want) < eps * std::max(1.0, std::max(std::abs(lse), std::abs(want)));
}

template <class Z>
void check_scores(const std::string& type) {
    property("scores, " + type, [] {
        using L = std::conditional_t<sizeof(arithmetic_t<Z>) == 8, double, float>;
        problem_options o;
        o.kinds = {flavour::wide,    flavour::peaked, flavour::filtered,
                   flavour::one_hot, flavour::steep,  flavour::diffuse};
        o.far_temperatures = true, o.largest_rows = 3, o.smallest_rows = 1;
        const problem p = *problems(o);
        buffers<Z> b(p);
        numbers u(p.seed + 5);
        if (u.uniform() < 0.3) // ties
            for (auto& x : b.z)
                if (const double v = double(element<Z>::load(x)); v > -1e29 && v < 1e29)
                    x = buffers<Z>::template cast<Z>(std::round(v));
        const index_t m = u.below(u.uniform() < 0.2 ? 2 * p.vocab + 1 : 20),
                      k = 1 + u.below(std::min<index_t>(p.vocab, 80));
        std::vector<reference> rows;
        std::vector<std::int32_t> ids;
        for (index_t r = 0; r < p.rows; ++r) {
            rows.emplace_back(b.z_view().row(r), p.vocab, double(p.temperature_p));
            const auto& best = rows.back().best;
            for (index_t j = 0; j < m; ++j) { // some unused, some repeated, many of the best: then little is left
                const double what = u.uniform();
                ids.push_back(what < 0.1 ? -1
                                         : std::int32_t(what < 0.5 ? best[std::size_t(u.below(index_t(best.size())))]
                                                                   : u.below(p.vocab)));
                if (what > 0.9) ids.back() = std::int32_t(best[0]);
            }
        }
        ids.push_back(0); // never a null pointer
        on_both([&](auto& be, const char*) {
            const auto n = std::size_t(p.rows);
            std::vector<L> log_p(n * std::size_t(m) + 1, L(9)), log_tail(n, L(9)), top_log_p(n * std::size_t(k)),
                top_tail(n);
            std::vector<std::int32_t> top(n * std::size_t(k));
            std::vector<double> lse(n), entropy(n);
            const auto what = [&] {
                return scores<std::int32_t, L>{.ids = view(std::as_const(ids).data(), p.rows, m),
                                               .log_p = view(log_p.data(), p.rows, m),
                                               .log_tail = view(log_tail.data(), p.rows),
                                               .top_ids = view(top.data(), p.rows, k),
                                               .top_log_p = view(top_log_p.data(), p.rows, k),
                                               .top_log_tail = view(top_tail.data(), p.rows),
                                               .lse = view(lse.data(), p.rows),
                                               .entropy = view(entropy.data(), p.rows)};
            };
            RC_ASSERT(score(be, b.z_view(), what(), p.temperature_p).diagnostics.bad_rows == 0);
            for (std::size_t r = 0; r < n; ++r) {
                const reference& want = rows[r];
                std::set<index_t> listed, tops;
                for (std::size_t j = 0; j < std::size_t(m); ++j) {
                    const std::int32_t id = ids[r * std::size_t(m) + j];
                    const double got = double(log_p[r * std::size_t(m) + j]);
                    if (id < 0)
                        RC_ASSERT(detail::is_neg_inf(got));
                    else
                        RC_ASSERT(same_log_p<Z>(got, want.log_p[std::size_t(id)], lse[r]));
                    if (id >= 0) listed.insert(id);
                }
                RC_ASSERT(close<Z>(double(log_tail[r]), want.log_tail(listed)));
                double h = 0;
                for (const index_t v : want.best) {
                    const double l = want.log_p[std::size_t(v)];
                    h -= l < -700 ? 0 : std::exp(l) * l;
                }
                RC_ASSERT(std::abs(entropy[r] - h) < (sizeof(arithmetic_t<Z>) == 8 ? 1e-12 : 1e-6) * (1 + h));
                RC_ASSERT(entropy[r] >= 0);
                for (std::size_t j = 0; j < std::size_t(k); ++j) {
                    const std::int32_t id = top[r * std::size_t(k) + j];
                    const double got = double(top_log_p[r * std::size_t(k) + j]);
                    if (j >= want.best.size()) {
                        RC_ASSERT(id == -1);
                        RC_ASSERT(detail::is_neg_inf(got));
                        continue;
                    }
                    RC_ASSERT(id == want.best[j]);
                    RC_ASSERT(same_log_p<Z>(got, want.log_p[std::size_t(id)], lse[r]));
                    tops.insert(id);
                }
                RC_ASSERT(close<Z>(double(top_tail[r]), want.log_tail(tops)));
            }
            // each part alone, in ragged lists, and row by row: the same bits
            const std::vector<L> all_log_p = log_p, all_tail = log_tail, all_top = top_log_p, all_top_tail = top_tail;
            const std::vector<std::int32_t> all_ids = top;
            std::fill(log_p.begin(), log_p.end(), L(9)), std::fill(log_tail.begin(), log_tail.end(), L(9));
            token_logp(be, b.z_view(), view(std::as_const(ids).data(), p.rows, m), view(log_p.data(), p.rows, m),
                       p.temperature_p);
            RC_ASSERT(log_p == all_log_p);
            top_k(be, b.z_view(), view(top.data(), p.rows, k), view(top_log_p.data(), p.rows, k), p.temperature_p);
            RC_ASSERT(top == all_ids);
            RC_ASSERT(top_log_p == all_top);
            std::vector<std::int32_t> offsets;
            for (index_t r = 0; r <= p.rows; ++r) offsets.push_back(std::int32_t(r * m));
            std::fill(log_p.begin(), log_p.end(), L(9));
            scores<std::int32_t, L> ragged{.ids = view(std::as_const(ids).data(), 1, p.rows * m),
                                           .log_p = view(log_p.data(), 1, p.rows * m),
                                           .log_tail = view(log_tail.data(), p.rows),
                                           .offsets = row_offsets<>(offsets)};
            if (m <= p.vocab) {
                score(be, b.z_view(), ragged, p.temperature_p);
                RC_ASSERT(log_p == all_log_p);
                RC_ASSERT(log_tail == all_tail);
            }
            for (index_t r = 0; r < p.rows; ++r) {
                L tail(9);
                top_k(be, view(b.z_view().row(r), 1, p.vocab), view(top.data(), 1, k), view(top_log_p.data(), 1, k),
                      p.temperature_p, {}, view(&tail, 1));
                RC_ASSERT(std::equal(top.begin(), top.begin() + k, all_ids.begin() + r * k));
                RC_ASSERT(tail == all_top_tail[std::size_t(r)]);
            }
        });
    });
}

} // namespace

TEST_CASE("scores agree with float64, and parts with the whole to the bit") {
    check_scores<float>("float");
    check_scores<double>("double");
    check_scores<bfloat16>("bfloat16");
    check_scores<half>("half");
}

TEST_CASE("lists of different lengths") {
    std::vector<float> z{0, 1, 2, 3, 4, 5, 6, 7, 8};
    const std::vector<std::int64_t> offsets{0, 0, 2, 5};
    const std::vector<std::int64_t> ids{2, 0, 1, 1, 2};
    on_both([&](auto& be, const char*) {
        std::vector<double> log_p(5), tail(3);
        score(be, view(z.data(), 3, 3),
              scores<std::int64_t, double>{.ids = view(ids.data(), 1, 5),
                                           .log_p = view(log_p.data(), 1, 5),
                                           .log_tail = view(tail.data(), 3),
                                           .offsets = row_offsets<>(offsets)});
        const double lse = 2 + std::log(1 + std::exp(-1.0) + std::exp(-2.0)); // of a row less its first
        CHECK(tail[0] == doctest::Approx(0));
        CHECK(log_p[0] == doctest::Approx(2 - lse));
        CHECK(log_p[1] == doctest::Approx(0 - lse));
        CHECK(tail[1] == doctest::Approx(1 - lse));
        CHECK(log_p[2] == log_p[3]);
        CHECK(tail[2] == doctest::Approx(0 - lse));
    });
}

TEST_CASE("a list longer than the vocabulary has no tail; its row is bad where one is asked for") {
    const std::vector<float> z{0, 1, 2, 3, 4, 5};
    const std::vector<std::int64_t> offsets{0, 4, 6};
    const std::vector<std::int32_t> ids{0, 1, 2, 2, 0, 1};
    on_both([&](auto& be, const char*) {
        std::vector<float> log_p(6), tail(2);
        scores<> what{.ids = view(ids.data(), 1, 6),
                      .log_p = view(log_p.data(), 1, 6),
                      .log_tail = view(tail.data(), 2),
                      .offsets = row_offsets<>(offsets)};
        const auto with_tail = score(be, view(z.data(), 2, 3), what).diagnostics;
        CHECK(with_tail.bad_rows == 1);
        CHECK(with_tail.first_bad_row == 0);
        CHECK(log_p[2] == log_p[3]); // what the row does have stands
        CHECK(detail::is_neg_inf(tail[0]));
        CHECK(!detail::is_neg_inf(tail[1]));
        what.log_tail = {};
        CHECK(score(be, view(z.data(), 2, 3), what).diagnostics.bad_rows == 0);
        CHECK(log_p[2] == log_p[3]);
    });
}

TEST_CASE("rows without a law and bad ids are counted, masked rows untouched") {
    const index_t vocab = 1500;
    const float nan = std::bit_cast<float>(0x7fc00000u), inf = std::bit_cast<float>(0x7f800000u);
    std::vector<float> z(5 * std::size_t(vocab), 0.5F);
    z[std::size_t(1 * vocab + 1200)] = nan;
    std::fill_n(z.begin() + 2 * vocab, vocab, -inf);
    const std::vector<std::uint8_t> mask{1, 1, 1, 1, 0};
    const std::vector<std::int32_t> ids{0, -1, 3, 4, 5, 6, 1500, 8, 9, 9};
    on_both([&](auto& be, const char*) {
        std::vector<float> log_p(10, 9.F), top_log_p(15, 9.F), tail(5, 9.F), top_tail(5, 9.F);
        std::vector<std::int32_t> top(15, -9);
        const auto r = score(be, view(z.data(), 5, vocab),
                             scores<>{.ids = view(ids.data(), 5, 2),
                                      .log_p = view(log_p.data(), 5, 2),
                                      .log_tail = view(tail.data(), 5),
                                      .top_ids = view(top.data(), 5, 3),
                                      .top_log_p = view(top_log_p.data(), 5, 3),
                                      .top_log_tail = view(top_tail.data(), 5)},
                             1, mask);
        CHECK(r.diagnostics.kept == 4);
        CHECK(r.diagnostics.bad_rows == 3); // NaN, no mass, an id beyond the vocabulary
        CHECK(r.diagnostics.first_bad_row == 1);
        CHECK(top[0] == 0);
        CHECK(top[2] == 2);
        CHECK(double(log_p[0]) == doctest::Approx(-std::log(1500.0)));
        CHECK(detail::is_neg_inf(log_p[1]));
        CHECK(double(tail[0]) == doctest::Approx(std::log(1499.0 / 1500)));
        for (const std::size_t bad : {1u, 2u}) {
            for (std::size_t j = 0; j < 3; ++j) CHECK(top[3 * bad + j] == -1);
            for (std::size_t j = 0; j < 3; ++j) CHECK(detail::is_neg_inf(top_log_p[3 * bad + j]));
            CHECK(detail::is_neg_inf(log_p[2 * bad]));
            CHECK(detail::is_neg_inf(tail[bad]));
            CHECK(detail::is_neg_inf(top_tail[bad]));
        }
        CHECK(detail::is_neg_inf(log_p[6])); // and its neighbour is right
        CHECK(double(log_p[7]) == doctest::Approx(-std::log(1500.0)));
        CHECK(top[4 * 3] == -9);
        CHECK(log_p[8] == 9);
        CHECK(tail[4] == 9);
        CHECK(top_tail[4] == 9);
    });
}

TEST_CASE("what score refuses") {
    std::vector<float> z(20, 1.F), log_p(6, 9.F), tail(2, 9.F);
    std::vector<std::int32_t> ids(6, 1), top(22);
    cpu_backend be;
    const auto rows = view(std::as_const(z).data(), 2, 10);
    const auto refuses = [&](const char* what, const scores<>& s, float temperature = 1) {
        CHECK_THROWS_WITH_AS(score(be, rows, s, temperature), doctest::Contains(what), invalid_input);
        CHECK(log_p == std::vector<float>(6, 9.F));
    };
    const auto listed = view(std::as_const(ids).data(), 2, 3);
    const auto out = view(log_p.data(), 2, 3);
    refuses("temperature", {.ids = listed, .log_p = out}, 0);
    refuses("ids: are left out", {.log_p = out});
    refuses("ids: are left out", {.log_tail = view(tail.data(), 2)});
    refuses("top_ids: are left out", {.top_log_p = out});
    refuses("top_ids: has 11 columns", {.top_ids = view(top.data(), 2, 11)});
    refuses("log_p", {.ids = listed, .log_p = view(log_p.data(), 2, 2)});
    refuses("log_tail", {.ids = listed, .log_p = out, .log_tail = view(tail.data(), 1)});
    refuses("overlaps", {.ids = listed, .log_p = out, .log_tail = view(log_p.data() + 5, 2)});
    const std::vector<std::int32_t> bad{0, 4, 3}, beyond{0, 3, 7};
    const auto flat = view(std::as_const(ids).data(), 1, 6);
    refuses("offsets, row 1", {.ids = flat, .log_p = view(log_p.data(), 1, 6), .offsets = row_offsets<>(bad)});
    refuses("offsets, row 1", {.ids = flat, .log_p = view(log_p.data(), 1, 6), .offsets = row_offsets<>(beyond)});
    refuses("ids", {.ids = listed, .log_p = out, .offsets = row_offsets<>(beyond)});
}
