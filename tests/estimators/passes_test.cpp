// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Passes over a whole batch, against their algorithms as written down: M2PO and its two variants, GSPO's sequence
// ratios, credit, group-relative advantages, whitening; that the gradient is the same however the batch is cut; what is
// refused.
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/m2po.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/sequences.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// n rows of m drawn tokens over V logits, in double.
struct batch {
    index_t n, m, v;
    std::vector<double> z, log_mu, log_q, log_prox, log_p;
    std::vector<std::int32_t> ids;
    std::vector<std::uint8_t> mask;

    batch(numbers& u, index_t n_, index_t m_, index_t v_, double drift) : n(n_), m(m_), v(v_) {
        for (index_t i = 0; i < n * v; ++i) z.push_back(1.5 * u.normal());
        for (index_t i = 0; i < n * m; ++i) ids.push_back(std::int32_t(u.below(v)));
        mask = random_mask(n, u, 0.85);
        log_p.assign(std::size_t(n * m), 0);
        cpu_backend be;
        token_logp(be, view(std::as_const(z).data(), n, v), view(std::as_const(ids).data(), n, m),
                   view(log_p.data(), n, m), 1.F);
        for (const double lp : log_p) {
            log_mu.push_back(std::min(lp + drift * u.normal(), 0.0));
            log_prox.push_back(std::min(lp + 0.5 * drift * u.normal(), 0.0)), log_q.push_back(-3 * u.uniform());
        }
        if (n * m > 3 && u.uniform() < 0.5) // a tie, up to rounding
            log_mu[1] = std::min(log_p[1] + (log_mu[0] - log_p[0]), 0.0);
    }
    matrix_view<const double> table(index_t from = 0, index_t rows = -1) const {
        return view(log_p.data() + from * m, rows < 0 ? n - from : rows, m);
    }
    teacher::samples<std::int32_t, double> cache(index_t from = 0, index_t rows = -1) const {
        if (rows < 0) rows = n - from;
        const auto at = [&](const std::vector<double>& x) { return view(x.data() + from * m, rows, m); };
        return {.ids = view(ids.data() + from * m, rows, m),
                .log_mu = at(log_mu),
                .log_q = at(log_q),
                .log_prox = at(log_prox)};
    }
    row_mask<> kept(index_t from = 0, index_t rows = -1) const {
        return view(mask.data() + from, rows < 0 ? n - from : rows);
    }
    double delta(std::size_t i, m2po form) const { return (form == m2po::all ? log_prox : log_p)[i] - log_mu[i]; }
    bool eligible(std::size_t i, m2po form) const {
        const double a = log_q[i] - log_p[i], d = log_p[i] - log_mu[i];
        return mask[i / std::size_t(m)] && (form == m2po::all || (a > 0 && d > 0) || (a < 0 && d < 0));
    }
};

/// Algorithm 1 as it is written: the tokens to drop.
std::vector<bool> dropped_by_hand(const batch& b, double tau, m2po form) {
    std::vector<std::size_t> left;
    for (std::size_t i = 0; i < b.log_p.size(); ++i)
        if (b.eligible(i, form)) left.push_back(i);
    const auto square = [&](std::size_t i) { return b.delta(i, form) * b.delta(i, form); };
    std::vector<bool> out(b.log_p.size(), false);
    const auto mean = [&] {
        double s = 0;
        for (const std::size_t i : left) s += square(i);
        return left.empty() ? 0 : s / double(left.size());
    };
    while (!left.empty() && (form == m2po::all ? mean() >= tau && left.size() > 1 : mean() > tau)) {
        double top = 0;
        for (const std::size_t i : left) top = std::max(top, square(i));
        std::vector<std::size_t> next;
        for (const std::size_t i : left)
            if (square(i) == top)
                out[i] = true;
            else
                next.push_back(i);
        left = next;
    }
    return out;
}

} // namespace

TEST_CASE("M2PO drops what algorithm 1 drops, however the batch is cut") {
    property("m2po", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const batch b(u, 1 + u.below(20), 1 + u.below(3), 6, 0.4 * u.uniform());
        const double tau = 0.04 * (u.uniform() < 0.2 ? 100 : u.uniform());
        for (const m2po form : {m2po::drop, m2po::all}) {
            m2po_fit whole{.tau = tau, .form = form};
            whole.add(b.table(), b.cache(), b.kept());
            const m2po_selection chosen = whole.freeze();
            std::vector<std::uint8_t> keep(b.log_p.size(), 9);
            const index_t dropped = chosen.keep(b.table(), b.cache(), b.kept(), view(keep.data(), b.n, b.m));
            const std::vector<bool> want = dropped_by_hand(b, tau, form);
            index_t count = 0;
            for (std::size_t i = 0; i < keep.size(); ++i) {
                const bool in = b.mask[i / std::size_t(b.m)];
                if (form == m2po::all && std::count(want.begin(), want.end(), false) <= 1)
                    continue; // ties of the last one
                RC_ASSERT(bool(keep[i]) == (in && !want[i]));
                count += in && want[i];
            }
            if (form == m2po::drop) RC_ASSERT(dropped == count);
            // in pieces, in another order, over two ranks
            const index_t cut = u.below(b.n + 1);
            m2po_fit left{.tau = tau, .form = form}, right{.tau = tau, .form = form};
            right.add(b.table(0, cut), b.cache(0, cut), b.kept(0, cut));
            left.add(b.table(cut), b.cache(cut), b.kept(cut));
            left.merge(right);
            RC_ASSERT(left.freeze().level == chosen.level);
            RC_ASSERT(left.freeze().second_moment == chosen.second_moment);
        }
    });
}

TEST_CASE("M2PO: within the budget nothing changes; all may go; equal ones go together") {
    numbers u(3);
    const batch b(u, 8, 2, 5, 0.1);
    m2po_fit wide{.tau = 10};
    wide.add(b.table(), b.cache(), b.kept());
    std::vector<std::uint8_t> keep(b.log_p.size());
    CHECK(wide.freeze().keep(b.table(), b.cache(), b.kept(), view(keep.data(), b.n, b.m)) == 0);
    CHECK(std::isinf(wide.freeze().level));
    m2po_fit none{.tau = 1e-300};
    none.add(b.table(), b.cache(), b.kept());
    CHECK(none.freeze().keep(b.table(), b.cache(), b.kept(), view(keep.data(), b.n, b.m)) ==
          index_t(none.squares.size()));
    CHECK(none.freeze().second_moment == 0);
    m2po_fit ties{.tau = 0.5, .squares = {1, 0.25, 1, 0.25}};
    CHECK(ties.freeze().level == 1); // (0.25 + 0.25 + 1)/3 would do, but then one of two equal ones went
    CHECK(ties.freeze().second_moment == 0.25);
    ties = {.tau = 0.1, .form = m2po::all, .squares = {1, 1, 2}};
    CHECK(ties.freeze().level == 2); // never all
    for (const double tau : {0.0, -1.0, double(NAN), double(INFINITY)})
        CHECK_THROWS_WITH_AS(m2po_fit{.tau = tau}.freeze(), doctest::Contains("m2po_fit.tau"), invalid_input);
    CHECK_THROWS_WITH_AS(m2po_fit{}.add(b.table(1), b.cache()), doctest::Contains("log_p"), invalid_input);
}

TEST_CASE("M2PO, clip: the exact water level, and the surrogate of it") {
    property("clip", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const batch b(u, 1 + u.below(20), 1 + u.below(3), 6, 0.6 * u.uniform());
        const double tau = 0.04 * u.uniform() + 1e-6;
        m2po_fit fit{.tau = tau, .form = m2po::clip};
        fit.add(b.table(), b.cache(), b.kept());
        const m2po_selection chosen = fit.freeze();
        double sum = 0;
        for (const double s : fit.squares) sum += std::min(s, chosen.level);
        const double n = double(fit.squares.size());
        if (std::isinf(chosen.level)) {
            RC_ASSERT(sum <= tau * n * (1 + 1e-12));
        } else {
            RC_ASSERT(std::abs(sum - tau * n) < 1e-12 * (1 + tau * n));
        }
        const ppo_clip s = chosen.clip();
        s.validate();
        for (std::size_t i = 0; i < b.log_p.size(); ++i) { // cut are the eligible tokens beyond the level alone
            token_in x{};
            x.log_ratio = b.log_p[i] - b.log_mu[i], x.advantage = b.log_q[i] - b.log_p[i];
            const double beyond = x.log_ratio * x.log_ratio / chosen.level - 1;
            if (!b.mask[i / std::size_t(b.m)] || std::abs(beyond) < 1e-9) continue;
            RC_ASSERT((s(x).c == 0) == (b.eligible(i, m2po::drop) && beyond > 0));
        }
    });
}

TEST_CASE("M2PO through evaluate: survivors unclipped, the denominator that of all tokens") {
    numbers u(11);
    const batch b(u, 12, 2, 7, 0.4);
    m2po_fit fit{.tau = 0.05};
    fit.add(b.table(), b.cache(), b.kept());
    std::vector<std::uint8_t> keep(b.log_p.size());
    const index_t dropped = fit.freeze().keep(b.table(), b.cache(), b.kept(), view(keep.data(), b.n, b.m));
    REQUIRE(dropped > 0);
    const index_t kept_rows = std::count(b.mask.begin(), b.mask.end(), 1);
    cpu_backend be;
    const auto gradient = [&](index_t from, index_t rows, std::vector<double>& dz) {
        env e;
        e.mask = b.kept(from, rows), e.normaliser = double(kept_rows);
        e.frozen.keep = view(std::as_const(keep).data() + from * b.m, rows, b.m);
        return evaluate(be,
                        student::logits<double>{.z = view(b.z.data() + from * b.v, rows, b.v),
                                                .dz = view(dz.data() + from * b.v, rows, b.v)},
                        b.cache(from, rows), mc{reverse_kl{}}, e);
    };
    std::vector<double> whole(b.z.size()), pieces(b.z.size());
    const result all = gradient(0, b.n, whole);
    CHECK(all.diagnostics.dropped == dropped);
    double loss = 0;
    for (index_t from = 0; from < b.n; from += 5) loss += gradient(from, std::min<index_t>(5, b.n - from), pieces).loss;
    CHECK(loss == doctest::Approx(all.loss).epsilon(1e-14));
    CHECK(pieces == whole); // a kept token's gradient does not know its micro-batch
    for (index_t r = 0; r < b.n; ++r) {
        std::vector<double> c(std::size_t(b.v), 0.0);
        double sum = 0, lse = 0;
        for (index_t j = 0; j < b.m; ++j) {
            const auto i = std::size_t(r * b.m + j);
            if (!keep[i]) continue;
            const double x = -std::exp(b.log_p[i] - b.log_mu[i]) * (b.log_q[i] - b.log_p[i]) / double(b.m * kept_rows);
            c[std::size_t(b.ids[i])] += x, sum += x;
        }
        for (index_t v = 0; v < b.v; ++v) lse += std::exp(b.z[std::size_t(r * b.v + v)]);
        for (index_t v = 0; v < b.v; ++v) {
            const double p = std::exp(b.z[std::size_t(r * b.v + v)]) / lse;
            CHECK(std::abs(whole[std::size_t(r * b.v + v)] - (c[std::size_t(v)] - p * sum)) < 1e-14);
        }
    }
}

TEST_CASE("GSPO: one ratio a sequence, from any cut; 1/length once") {
    numbers u(5);
    const batch b(u, 9, 1, 6, 0.02);
    const std::vector<std::int64_t> offsets{0, 3, 7, 9};
    std::vector<index_t> sequence;
    for (index_t s = 0; s < 3; ++s)
        sequence.insert(sequence.end(), std::size_t(offsets[std::size_t(s) + 1] - offsets[std::size_t(s)]), s);
    gspo_fit whole, left, right;
    whole.add(b.table(), b.cache(), sequence, b.kept());
    right.add(b.table(5), b.cache(5), std::span(sequence).subspan(5), b.kept(5));
    left.add(b.table(0, 5), b.cache(0, 5), std::span(sequence).first(5), b.kept(0, 5));
    left.merge(right);
    std::vector<double> log_s(9), again(9), advantage(9);
    whole.log_ratios(sequence, view(log_s.data(), 9));
    left.log_ratios(sequence, view(again.data(), 9));
    whole.mean_advantages(sequence, view(advantage.data(), 9, 1));
    for (std::size_t r = 0; r < 9; ++r) {
        double d = 0, a = 0, n = 0;
        for (std::size_t i = 0; i < 9; ++i)
            if (sequence[i] == sequence[r] && b.mask[i])
                d += b.log_p[i] - b.log_mu[i], a += b.log_q[i] - b.log_p[i], n += 1;
        CHECK(log_s[r] == doctest::Approx(n > 0 ? d / n : 0));
        CHECK(advantage[r] == doctest::Approx(n > 0 ? a / n : 0));
        CHECK(again[r] == doctest::Approx(log_s[r]).epsilon(1e-13));
    }
    // the gradient of -mean over sequences of min(s Ā, clip(s) Ā), s = exp(mean log rho), by differences in the logits
    const gspo surrogate{.low = 0.01, .high = 0.02};
    const auto loss_at = [&](const std::vector<double>& z) {
        cpu_backend be;
        std::vector<double> lp(9);
        token_logp(be, view(z.data(), 9, b.v), view(b.ids.data(), 9, 1), view(lp.data(), 9, 1), 1.F);
        double loss = 0, sequences = 0;
        for (std::size_t s = 0; s < 3; ++s) {
            double d = 0, n = 0, a = 0;
            for (auto r = std::size_t(offsets[s]); r < std::size_t(offsets[s + 1]); ++r)
                if (b.mask[r]) d += lp[r] - b.log_mu[r], n += 1, a = advantage[r];
            if (n == 0) continue;
            token_in x{};
            x.sequence_log_ratio = d / n, x.advantage = a;
            loss += surrogate(x).loss, sequences += 1;
        }
        return loss / sequences;
    };
    env e;
    e.reduction = reduce::sequence_mean, e.offsets = offsets, e.mask = b.kept();
    e.frozen.sequence_log_ratio = view(std::as_const(log_s).data(), 9);
    e.frozen.advantage = view(std::as_const(advantage).data(), 9, 1);
    std::vector<double> dz(b.z.size());
    cpu_backend be;
    const result r = evaluate(be, student::logits<double>{.z = view(b.z.data(), 9, b.v), .dz = view(dz.data(), 9, b.v)},
                              b.cache(), mc{reverse_kl{}, surrogate}, e);
    CHECK(r.loss == doctest::Approx(loss_at(b.z)));
    for (std::size_t i = 0; i < b.z.size(); i += 5) {
        std::vector<double> up = b.z, down = b.z;
        up[i] += 1e-6, down[i] -= 1e-6;
        CHECK(std::abs(dz[i] - (loss_at(up) - loss_at(down)) / 2e-6) < 1e-8);
    }
    CHECK_THROWS_WITH_AS(whole.log_ratios(std::vector<index_t>{0}, view(log_s.data(), 9)),
                         doctest::Contains("sequence"), invalid_input);
    sequence[4] = -1;
    CHECK_THROWS_WITH_AS(whole.add(b.table(), b.cache(), sequence), doctest::Contains("sequence"), invalid_input);
}

TEST_CASE("prefixes: the product of the ratios before each row, of what the mask keeps") {
    const std::vector<float> log_p{0, -1, -2, -3, -1, -1, -4}, log_mu{0, -2, -1, -1, -1, -3, -4};
    const std::vector<std::int32_t> offsets{0, 4, 7};
    const std::vector<std::uint8_t> mask{0, 1, 1, 1, 1, 1, 1}; // row 0: a prompt
    prefix_staleness s;
    s.add(view(log_p.data(), 7), view(log_mu.data(), 7), offsets, mask);
    const std::vector<double> want{0, 1, 0, 0, 0, 2}; // of rows 1 to 6
    double sum = 0, ratios = 0, squares = 0;
    for (const double x : want) sum += x, ratios += std::exp(x), squares += std::exp(2 * x);
    CHECK(s.rows == 6);
    CHECK(s.log_ratio() == doctest::Approx(sum / 6));
    CHECK(s.effective_share() == doctest::Approx(ratios * ratios / squares / 6));
    CHECK(s.least == 0);
    CHECK(s.most == 2);
    // cut between sequences
    prefix_staleness a, b;
    a.add(view(log_p.data(), 4), view(log_mu.data(), 4), std::vector<std::int64_t>{0, 4},
          std::vector<std::uint8_t>{0, 1, 1, 1});
    b.add(view(log_p.data() + 4, 3), view(log_mu.data() + 4, 3), std::vector<std::int64_t>{0, 3});
    a.merge(b);
    CHECK(a.effective_share() == doctest::Approx(s.effective_share()));
    CHECK(a.log_ratio() == doctest::Approx(s.log_ratio()));
    CHECK(a.most == 2);
    // the student's own tokens
    prefix_staleness own;
    own.add(view(log_p.data(), 7), view(log_p.data(), 7), offsets);
    CHECK(own.effective_share() == doctest::Approx(1));
    CHECK(own.log_ratio() == 0);
    CHECK(prefix_staleness().effective_share() == 0);
    // a token that the student cannot draw any more
    const std::vector<double> gone{-1, -std::numeric_limits<double>::infinity(), -1}, drawn{-1, -1, -1};
    prefix_staleness with_hole;
    with_hole.add(view(gone.data(), 3), view(drawn.data(), 3), std::vector<std::int32_t>{0, 3});
    CHECK(with_hole.least == -80);
    CHECK(with_hole.effective_share() == doctest::Approx(2. / 3));
    prefix_staleness unknown; // neither could draw it
    unknown.add(view(gone.data(), 3), view(gone.data(), 3), std::vector<std::int32_t>{0, 3});
    CHECK(unknown.effective_share() == 1);
    CHECK_THROWS_WITH_AS(own.add(view(log_p.data(), 7), view(log_mu.data(), 6), offsets), doctest::Contains("log_mu"),
                         invalid_input);
    CHECK_THROWS_WITH_AS(own.add(view(log_p.data(), 6), view(log_mu.data(), 6), offsets), doctest::Contains("offsets"),
                         invalid_input);
}

TEST_CASE("credit, group-relative advantages, whitening") {
    std::vector<double> a{1, 2, 3, 4, 5, 6}, column{1, 2, 3, 4, 5, 6};
    const std::vector<std::int32_t> offsets{0, 2, 3, 3};
    credit(view(a.data(), 3, 2), offsets, 0.5);
    CHECK(a == std::vector<double>{1 + 1.5, 2 + 2, 3, 4, 5, 6});
    credit(view(column.data(), 6, 1), std::vector<std::int32_t>{0, 6}, 1);
    CHECK(column == std::vector<double>{21, 20, 18, 15, 11, 6});
    credit(view(column.data(), 6, 1), std::vector<std::int32_t>{0, 6}, 0);
    CHECK(column[0] == 21);
    // a tool's tokens in between are no steps, whatever they hold
    std::vector<double> turns{1, std::numeric_limits<double>::quiet_NaN(), 7, 2, 4, 9, 8};
    const std::vector<std::uint8_t> own{1, 0, 0, 1, 1, 0, 1};
    credit(view(turns.data(), 7, 1), std::vector<std::int32_t>{0, 6, 7}, 0.5, own);
    CHECK(turns[0] == 1 + 0.5 * (2 + 0.5 * 4));
    CHECK(std::isnan(turns[1]));
    turns[1] = 0;
    CHECK(turns == std::vector<double>{3, 0, 7, 4, 4, 9, 8});
    CHECK_THROWS_WITH_AS(credit(view(turns.data(), 7, 1), std::vector<std::int32_t>{0, 7}, 1, std::span(own).first(6)),
                         doctest::Contains("mask"), invalid_input);
    CHECK_THROWS_WITH_AS(credit(view(a.data(), 3, 2), offsets, 1.5), doctest::Contains("gamma_lambda"), invalid_input);
    const std::vector<double> before = a;
    const std::vector<std::int32_t> beyond{0, 2, 4};
    CHECK_THROWS_WITH_AS(credit(view(a.data(), 3, 2), beyond, 1), doctest::Contains("offsets"), invalid_input);
    CHECK(a == before); // the first sequence neither

    std::vector<double> reward{1, 0, 0, 1, 5, 5, 5, 5}, centred = reward;
    group_relative(reward, 4, 1e-9);
    CHECK(reward[0] == doctest::Approx(0.5 / std::sqrt(1.0 / 3)));
    CHECK(reward[1] == doctest::Approx(-0.5 / std::sqrt(1.0 / 3)));
    for (std::size_t i = 4; i < 8; ++i) CHECK(reward[i] == 0);
    group_relative(centred, 4, 0);
    CHECK(centred == std::vector<double>{.5, -.5, -.5, .5, 0, 0, 0, 0});
    CHECK_THROWS_WITH_AS(group_relative(reward, 3), doctest::Contains("group"), invalid_input);
    for (const double of : {1000000.1, 0.1, -3e300, 1e-310}) { // equal rewards have no advantage, whatever their size
        for (const double epsilon : {0.0, 1e-9, 1e-6}) {
            std::vector<double> equal(7, of);
            group_relative(equal, 7, epsilon);
            CHECK(equal == std::vector<double>(7));
        }
    }
    std::vector<double> near{1000000.1, 1000000.1 + 3e-9};
    group_relative(near, 2, 1e-300);
    CHECK(near[0] == doctest::Approx(-std::sqrt(.5)).epsilon(1e-12));
    reward[5] = std::numeric_limits<double>::quiet_NaN();
    const double first = reward[0];
    CHECK_THROWS_WITH_AS(group_relative(reward, 4), doctest::Contains("reward, row 5"), invalid_input);
    CHECK(reward[0] == first);

    numbers u(2);
    std::vector<double> x, out(40);
    std::vector<std::uint8_t> mask;
    for (int i = 0; i < 40; ++i) x.push_back(3 + 2 * u.normal()), mask.push_back(i % 7 != 0);
    whitening_fit whole, left, right;
    whole.add(view(x.data(), 40, 1), mask);
    right.add(view(x.data() + 13, 27, 1), std::span(mask).subspan(13));
    left.add(view(x.data(), 13, 1), std::span(mask).first(13));
    left.merge(right), left.merge(whitening_fit{});
    CHECK(left.count == whole.count);
    CHECK(left.mean == doctest::Approx(whole.mean).epsilon(1e-14));
    CHECK(left.squares == doctest::Approx(whole.squares).epsilon(1e-13));
    whole.apply(view(x.data(), 40, 1), view(out.data(), 40, 1));
    double sum = 0, squares = 0, n = 0;
    for (std::size_t i = 0; i < 40; ++i)
        if (mask[i]) sum += out[i], squares += out[i] * out[i], n += 1;
    CHECK(std::abs(sum) < 1e-12);
    CHECK(squares / (n - 1) == doctest::Approx(1).epsilon(1e-7));
    x[3] = std::numeric_limits<double>::infinity();
    const double mean = whole.mean;
    CHECK_THROWS_WITH_AS(whole.add(view(x.data(), 40, 1)), doctest::Contains("row 3"), invalid_input);
    CHECK(whole.mean == mean); // nothing of it
    CHECK_THROWS_WITH_AS(whitening_fit{.epsilon = 0}.add(view(x.data(), 2, 1)),
                         doctest::Contains("whitening_fit.epsilon"), invalid_input);
}

TEST_CASE("what is no token, and one without mass, in a pass") {
    numbers u(21);
    batch b(u, 6, 1, 5, 0.2);
    std::fill(b.mask.begin(), b.mask.end(), std::uint8_t{1});
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    b.log_mu[0] = nan, b.log_q[1] = nan, b.log_p[2] = nan, b.log_mu[3] = -9999; // their rows are bad
    for (const m2po form : {m2po::drop, m2po::all}) {
        m2po_fit fit{.tau = 1e-9, .form = form};
        fit.add(b.table(), b.cache(), b.kept());
        CHECK(fit.squares.size() <= 2);
        for (const double s : fit.squares) CHECK(std::isfinite(s));
    }
    b.log_p[4] = -inf, b.log_q[5] = -inf; // the student's, the teacher's zero
    const std::vector<index_t> one(6, 0);
    gspo_fit fit;
    fit.add(b.table(), b.cache(), one, b.kept());
    CHECK(fit.of[0].tokens == 2);
    CHECK(std::isfinite(fit.of[0].advantage));
    CHECK(fit.of[0].log_ratio == doctest::Approx(-80 + b.log_p[5] - b.log_mu[5]));
    CHECK(fit.of[0].advantage == doctest::Approx(b.log_q[4] - (b.log_mu[4] - 80) - 30 - b.log_p[5]));
}

TEST_CASE("the advantages of a table are the estimator's own") {
    numbers u(8);
    const batch b(u, 6, 3, 9, 0.3);
    std::vector<double> a(b.log_p.size(), 9);
    advantages(b.table(), b.cache(), b.kept(), view(a.data(), b.n, b.m));
    for (std::size_t i = 0; i < a.size(); ++i)
        CHECK(a[i] == (b.mask[i / std::size_t(b.m)] ? b.log_q[i] - b.log_p[i] : 0));
    advantages(b.table(), b.cache(), {}, view(a.data(), b.n, b.m), advantage::shaped{shape::clipped{.1}});
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i]) <= .1);
}
