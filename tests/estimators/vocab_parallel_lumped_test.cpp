// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// teacher::lumped in shards of the vocabulary against one rank, in double: value, gradient and counts. What lies beyond
// the common ids, of either side, lies in any shards: some have no common id, some have nothing else, some are empty.
#include "backends/host_run_shards.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/refusal.hpp"
#include "support/shards.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

struct answer {
    double loss = 0;
    diagnostics seen;
    std::vector<double> dz, lse;
};

/// Logits of two vocabularies that share their first `common` ids.
struct two_vocabularies {
    index_t n, v_s, v_t, common;
    std::vector<double> z, y, lse;
    std::vector<std::int32_t> kept;

    two_vocabularies(index_t rows, index_t student, index_t teacher, index_t both, std::uint64_t seed)
        : n(rows), v_s(student), v_t(teacher), common(both) {
        numbers u(seed);
        const double lifts[] = {0, -8, 8, 60}; // of the rest: as any, little, most, nearly all of the mass
        for (index_t r = 0; r < n; ++r) {
            const double lift = lifts[u.below(4)], hole = u.below(2) ? 0.1 : 0;
            const auto fill = [&](std::vector<double>& to, index_t size) {
                for (index_t v = 0; v < size; ++v)
                    to.push_back(v > 0 && u.uniform() < hole ? detail::neg_inf<double>()
                                                             : 2 * u.normal() + (v < common ? 0 : lift));
            };
            fill(z, v_s), fill(y, v_t);
            if (u.below(6) == 0) // the student has nobody beyond
                std::fill(z.end() - (v_s - common), z.end(), detail::neg_inf<double>());
            double sum = 0;
            for (index_t v = 0; v < v_s; ++v) sum += std::exp(z[std::size_t(r * v_s + v)] / 0.75);
            lse.push_back(std::log(sum));
            kept.push_back(std::int32_t(u.below(4)));
        }
    }
    index_t total() const { return std::max(v_s, v_t); }

    /// The student's and the teacher's columns of the ids [first, last).
    student::logits<double> student(std::vector<double>& dz, index_t first, index_t last) const {
        const index_t from = std::min(first, v_s), count = std::min(last, v_s) - from;
        return {.z = {z.data() + from, n, count, v_s}, .dz = {dz.data() + from, n, count, v_s}, .temperature = 0.75F};
    }
    auto teacher(index_t first, index_t last) const {
        const index_t from = std::min(first, v_t), count = std::min(last, v_t) - from;
        return teacher::lumped{teacher::dense<double>{{y.data() + from, n, count, v_t}, 1.25F}, common};
    }
    std::vector<double> before() const { return std::vector<double>(z.size(), 0.25); }

    template <class D>
    answer whole(const D& d, env e) const {
        answer out{.loss = 0, .seen = {}, .dz = before(), .lse = std::vector<double>(std::size_t(n), 3.0)};
        e.lse = out.lse;
        cpu_backend be;
        const result r = evaluate(be, student(out.dz, 0, v_s), teacher(0, v_t), d, e);
        out.loss = r.loss, out.seen = r.diagnostics;
        return out;
    }
    template <class D>
    answer split(const D& d, env e, const std::vector<index_t>& cuts, bool threads) const {
        answer out{.loss = 0, .seen = {}, .dz = before(), .lse = std::vector<double>(std::size_t(n), 3.0)};
        const std::size_t ranks = cuts.size() - 1;
        std::vector<cpu_backend> backends(ranks);
        std::vector<std::vector<double>> told(ranks, out.lse);
        const auto make = [&](std::size_t i) {
            env own = e;
            own.lse = told[i];
            return vocab_parallel(backends[i], {.first = cuts[i], .total = total()},
                                  student(out.dz, cuts[i], cuts[i + 1]), teacher(cuts[i], cuts[i + 1]), d, own);
        };
        std::vector<std::unique_ptr<decltype(make(0))>> calls;
        for (std::size_t i = 0; i < ranks; ++i) calls.push_back(std::make_unique<decltype(make(0))>(make(i)));
        run_rounds(calls, threads);
        for (std::size_t i = 0; i < ranks; ++i) {
            const result r = calls[i]->finish();
            if (i == 0) out.loss = r.loss, out.seen = r.diagnostics;
            RC_ASSERT(equal_bits(r.loss, out.loss)); // the same on every rank
            RC_ASSERT(told[i] == told[0]);
        }
        for (auto& c : calls) c->backward();
        out.lse = told[0];
        return out;
    }
    /// The same by a GPU's kernels.
    template <class D>
    answer by_kernels(const D& d, env e, const std::vector<index_t>& cuts) const {
        answer out{.loss = 0, .seen = {}, .dz = before(), .lse = std::vector<double>(std::size_t(n), 3.0)};
        const std::size_t ranks = cuts.size() - 1;
        std::vector<std::vector<double>> told(ranks, out.lse);
        std::vector<of_rank> got(ranks);
        gathering_threads team(ranks);
        {
            std::vector<std::jthread> running;
            for (std::size_t i = 0; i < ranks; ++i) {
                env own = e;
                own.lse = told[i];
                const vocab_shard shard{.first = cuts[i], .total = total()};
                const auto job = detail::checked_shard_job(shard, student(out.dz, cuts[i], cuts[i + 1]),
                                                           teacher(cuts[i], cuts[i + 1]), d, own);
                running.emplace_back([&, i, shard, job] { got[i] = run_rank(job, shard, i, team, 8, true); });
            }
        }
        out.loss = got[0].got.loss, out.seen = got[0].got.diagnostics, out.lse = told[0];
        for (std::size_t i = 0; i < ranks; ++i) {
            RC_ASSERT(equal_bits(got[i].got.loss, out.loss));
            RC_ASSERT(told[i] == told[0]);
        }
        return out;
    }
};

void same(const answer& got, const answer& want, const std::string& what) {
    RC_LOG(what);
    const double size = std::max(1.0, std::abs(want.loss));
    if (!(std::abs(got.loss - want.loss) <= 1e-14 * size))
        RC_FAIL(what + ": loss off by " + std::to_string((got.loss - want.loss) / size * 1e14) + "e-14");
    double largest = 1;
    for (const double g : want.dz) largest = std::max(largest, std::abs(g));
    for (std::size_t i = 0; i < want.dz.size(); ++i)
        if (!(std::abs(got.dz[i] - want.dz[i]) <= 1e-14 * largest))
            RC_FAIL(what + ": dz[" + std::to_string(i) + "] " + std::to_string(got.dz[i]) + " for " +
                    std::to_string(want.dz[i]) + ", off by " +
                    std::to_string((got.dz[i] - want.dz[i]) / largest * 1e14) + "e-14");
    for (std::size_t r = 0; r < want.lse.size(); ++r)
        RC_ASSERT(std::abs(got.lse[r] - want.lse[r]) <= 1e-14 * std::max(1.0, std::abs(want.lse[r])));
    RC_ASSERT(got.seen.kept == want.seen.kept);
    RC_ASSERT(got.seen.bad_rows == want.seen.bad_rows);
    RC_ASSERT(got.seen.infinite_rows == want.seen.infinite_rows);
    RC_ASSERT(std::abs(got.seen.overlap_sum - want.seen.overlap_sum) <= 1e-14 * double(want.lse.size()));
}

} // namespace

TEST_CASE("one, two, four and any shards have the value and the gradient of one rank") {
    const auto all = [](const std::string& name, const auto& d) {
        property(name,
                 [&] {
                     const auto seed = *rc::gen::arbitrary<std::uint64_t>();
                     numbers u(seed);
                     const index_t sizes[] = {1, 2, 7, 300, 1030}, more[] = {0, 1, 5, 300, 1100};
                     index_t v_s = sizes[u.below(5)], v_t = v_s;
                     (u.below(2) ? v_s : v_t) += more[u.below(5)];
                     const index_t least = std::min(v_s, v_t); // else both have ids of their own
                     const two_vocabularies b(1 + u.below(4), v_s, v_t, least - u.below(std::min<index_t>(least, 9)),
                                              seed);
                     env e;
                     if (u.below(2)) e.mask = row_mask<>(b.kept);
                     if (u.below(4) == 0) e.given_lse = b.lse;
                     e.beta = u.below(2) ? 0.F : 0.5F;
                     e.on_infinite = u.below(2) ? infinite::floor(-15) : infinite::skip();
                     e.measure.entropy = u.below(2) == 0;
                     e.reduction = reduce::sum;
                     const answer want = b.whole(d, e);
                     const std::string of = std::to_string(v_s) + " and " + std::to_string(v_t) + " ids, " +
                                            std::to_string(b.common) + " common, ";
                     for (const index_t ranks : {1, 2, 4}) {
                         std::vector<index_t> cuts;
                         for (index_t i = 0; i <= ranks; ++i) cuts.push_back(i * b.total() / ranks);
                         same(b.split(d, e, cuts, false), want, of + std::to_string(ranks) + " shards");
                     }
                     same(b.split(d, e, random_cuts(b.total(), seed), true), want, of + "any shards");
                     same(b.split(d, e, {0, b.common, b.total()}, false), want, of + "the rest on a rank of its own");
                     using D = std::remove_cvref_t<decltype(d)>;
                     if constexpr (std::is_same_v<D, reverse_kl> || std::is_same_v<D, jsd>)
                         same(b.by_kernels(d, e, random_cuts(b.total(), seed + 1, 3)), want, of + "by kernels");
                 },
                 {.cases = 60});
    };
    all("reverse KL", reverse_kl{});
    all("forward KL", forward_kl{});
    all("JSD", jsd{.w = .3, .o = .3});
    all("alpha", alpha_divergence{.a = .4});
    all("acceptance", acceptance{});
}

TEST_CASE("hidden states of two vocabularies in shards") {
    const index_t n = 5, d = 8, v_s = 70, v_t = 90, common = 61;
    numbers u(5);
    const auto draw = [&](index_t count) {
        std::vector<float> out;
        for (index_t i = 0; i < count; ++i) out.push_back(float(u.normal()));
        return out;
    };
    const std::vector<float> x = draw(n * d), w = draw(v_s * d), y = draw(n * d), w_t = draw(v_t * d);
    const auto student = [&](index_t first, index_t last, std::vector<float>& dx, std::vector<float>& dw,
                             index_t rows) {
        const index_t from = std::min(first, v_s), count = std::min(last, v_s) - from;
        student::hidden<float> s{.x = view(x.data(), n, d),
                                 .w = view(w.data() + from * d, count, d),
                                 .dx = view(dx.data(), n, d),
                                 .dw = view(dw.data() + from * d, count, d)};
        if (rows < n) s.budget = budget_of_rows(s, rows);
        return s;
    };
    const auto teacher = [&](index_t first, index_t last) {
        const index_t from = std::min(first, v_t), count = std::min(last, v_t) - from;
        return teacher::lumped{
            teacher::hidden<float>{.x = view(y.data(), n, d), .w = view(w_t.data() + from * d, count, d)}, common};
    };
    std::vector<float> dx(std::size_t(n * d)), dw(std::size_t(v_s * d));
    cpu_backend one;
    const double want = evaluate(one, student(0, v_s, dx, dw, n), teacher(0, v_t), jsd{}).loss;
    for (const index_t rows : {n, index_t{2}}) // once, and again in each round
        for (const std::vector<index_t>& cuts : {std::vector<index_t>{0, 90}, {0, 30, 90}, {0, 20, 61, 75, 90}}) {
            const std::size_t ranks = cuts.size() - 1;
            std::vector<cpu_backend> backends(ranks);
            std::vector<std::vector<float>> parts(ranks, std::vector<float>(dx.size()));
            std::vector<float> own_dw(dw.size());
            const auto make = [&](std::size_t i) {
                return vocab_parallel(backends[i], {.first = cuts[i], .total = 90},
                                      student(cuts[i], cuts[i + 1], parts[i], own_dw, rows),
                                      teacher(cuts[i], cuts[i + 1]), jsd{});
            };
            std::vector<std::unique_ptr<decltype(make(0))>> calls;
            for (std::size_t i = 0; i < ranks; ++i) calls.push_back(std::make_unique<decltype(make(0))>(make(i)));
            run_rounds(calls, false);
            for (auto& c : calls) CHECK(c->finish().loss == doctest::Approx(want).epsilon(1e-6));
            for (auto& c : calls) c->backward();
            for (std::size_t i = 0; i < dx.size(); ++i) {
                double sum = 0;
                for (const auto& part : parts) sum += double(part[i]);
                CHECK(std::abs(sum - double(dx[i])) <= 1e-6);
            }
            for (std::size_t i = 0; i < dw.size(); ++i) CHECK(std::abs(own_dw[i] - dw[i]) <= 1e-6F);
        }
}

TEST_CASE("a rank's part that does not fit is refused") {
    two_vocabularies b(2, 6, 8, 5, 3);
    std::vector<double> dz = b.before();
    cpu_backend be;
    const auto with = [&](index_t common, index_t first, index_t last, index_t of_student, const env& e = {}) {
        b.common = common;
        return refusal([&] {
            vocab_parallel(be, {.first = first, .total = 8}, b.student(dz, first, of_student), b.teacher(first, last),
                           jsd{}, e);
        });
    };
    CHECK(says(with(0, 0, 4, 4), "teacher.common: is 0 of 8 ids"));
    CHECK(says(with(9, 0, 4, 4), "teacher.common: is 9 of 8 ids"));
    CHECK(says(with(5, 0, 4, 3), "so 4 ids of this shard are common; the student has 3, the teacher 4"));
    CHECK(says(with(7, 4, 8, 8), "so 3 ids of this shard are common; the student has 2, the teacher 4"));
    CHECK(says(with(5, 0, 4, 4, {.vocab = vocabulary::drop_and_renormalise}), "env.vocab"));
    CHECK(with(5, 0, 4, 4).empty());
    CHECK(with(5, 4, 8, 8).empty());
    // ranks that disagree on the number of common ids
    const auto part = [&](index_t first, index_t common) {
        b.common = common;
        return vocab_parallel(be, {.first = first, .total = 8}, b.student(dz, first, first + 4),
                              b.teacher(first, first + 4), jsd{});
    };
    auto low = part(0, 5), high = part(4, 6);
    low.local(), high.local();
    merge_partials(low.partials(), high.partials());
    CHECK(says(refusal([&] { low.local(); }), "shard:"));
    CHECK(dz == b.before());
}
