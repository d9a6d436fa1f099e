// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Tokens drawn under a filter, with the sets that it kept: by enumeration the gradient is that of the divergence on the
// set, at any staleness; K = V is the plain call; from draw's own columns every ratio has mean 1, and without the sets
// it has not; raw log-probs; what is bad and what is refused; log p on the sets, and the passes over a batch that read
// it. On both engines.
#include "backends/both_engines.hpp"
#include "support/drawn.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <opd/draw.hpp>
#include <opd/estimators/any.hpp>
#include <opd/estimators/m2po.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/sequences.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// p, q, mu renormalised on a set of ids; the teacher also as it is.
struct on_set {
    const policies& w;
    std::vector<std::int32_t> ids; // ascending
    std::vector<double> log_p, log_q, log_mu;
    double log_kept_q = 0;

    on_set(const policies& w_, std::vector<std::int32_t> ids_) : w(w_), ids(std::move(ids_)) {
        const auto renormalised = [&](const std::vector<double>& all, double& log_mass) {
            double mass = 0;
            for (const auto id : ids) mass += std::exp(all[std::size_t(id)]);
            log_mass = std::log(mass);
            std::vector<double> out;
            for (const auto id : ids) out.push_back(all[std::size_t(id)] - log_mass);
            return out;
        };
        double unused = 0;
        log_p = renormalised(w.log_p, unused), log_mu = renormalised(w.log_mu, unused);
        log_q = renormalised(w.log_q, log_kept_q);
    }
    /// The pullback of c on the set, over the vocabulary.
    std::vector<double> pullback(const std::vector<double>& c) const {
        double sum = 0;
        for (const double x : c) sum += x;
        std::vector<double> out(w.z.size(), 0.0);
        for (std::size_t j = 0; j < ids.size(); ++j)
            out[std::size_t(ids[j])] = (c[j] - std::exp(log_p[j]) * sum) / double(w.temperature);
        return out;
    }
};

template <class Backend, class E>
result call(Backend& be, const on_set& s, const std::vector<std::size_t>& places, bool teacher_on_set,
            const E& estimator, std::vector<double>& dz, const env& e = {}) {
    std::vector<std::int32_t> ids;
    std::vector<double> log_mu, log_q;
    for (const std::size_t j : places) {
        ids.push_back(s.ids[j]), log_mu.push_back(s.log_mu[j]);
        log_q.push_back(s.w.log_q[std::size_t(s.ids[j])]);
    }
    const auto m = index_t(places.size());
    const std::vector<std::int64_t> offsets{0, std::int64_t(s.ids.size())};
    teacher::on_kept_sets cache{teacher::samples{view(ids.data(), 1, m), view(std::as_const(log_mu).data(), 1, m),
                                                 view(std::as_const(log_q).data(), 1, m)},
                                view(s.ids.data(), index_t(s.ids.size())), row_offsets<>(offsets)};
    if (teacher_on_set) cache.log_kept_q = view(&s.log_kept_q, 1);
    return evaluate(be,
                    student::logits<double>{.z = view(s.w.z.data(), 1, s.w.vocab),
                                            .dz = view(dz.data(), 1, s.w.vocab),
                                            .temperature = s.w.temperature},
                    cache, estimator, e);
}

/// E over all m-tuples drawn from mu on the set.
template <class Backend, class E>
std::pair<double, std::vector<double>> expectation(Backend& be, const on_set& s, index_t m, bool teacher_on_set,
                                                   const E& estimator) {
    std::pair<double, std::vector<double>> mean{0, std::vector<double>(s.w.z.size(), 0.0)};
    for_each_tuple(index_t(s.ids.size()), m, [&](const std::vector<std::int64_t>& tuple) {
        const std::vector<std::size_t> places(tuple.begin(), tuple.end());
        double probability = 1;
        for (const std::size_t j : places) probability *= std::exp(s.log_mu[j]);
        std::vector<double> dz(s.w.z.size(), 9);
        const result r = call(be, s, places, teacher_on_set, estimator, dz);
        CHECK(r.diagnostics.bad_rows == 0);
        mean.first += probability * r.loss;
        for (std::size_t v = 0; v < dz.size(); ++v) mean.second[v] += probability * dz[v];
    });
    return mean;
}

} // namespace

TEST_CASE("the gradient of the divergence on the set, and zero outside it, at any staleness") {
    for (const std::uint64_t seed : {3, 4}) {
        const policies w(8, seed, true, 0.7F);
        const on_set s(w, {0, 2, 3, 6});
        std::vector<double> c, c_tv, c_tv_full;
        double kl = 0;
        for (std::size_t j = 0; j < s.ids.size(); ++j) {
            const double p = std::exp(s.log_p[j]), q_full = w.log_q[std::size_t(s.ids[j])];
            c.push_back(p * (s.log_p[j] - s.log_q[j]));
            c_tv.push_back(p * (s.log_p[j] > s.log_q[j] ? 0.5 : -0.5));
            c_tv_full.push_back(p * (s.log_p[j] > q_full ? 0.5 : -0.5));
            kl += c.back();
        }
        on_both([&](auto& be, const char* engine) {
            INFO(engine << ", seed " << seed);
            for (const index_t m : {1, 2}) {
                const auto on = expectation(be, s, m, true, mc{reverse_kl{}});
                CHECK(distance(on.second, s.pullback(c)) < 1e-12);
                CHECK(on.first == doctest::Approx(kl).epsilon(1e-12));
                const auto full = expectation(be, s, m, false, mc{reverse_kl{}});
                CHECK(distance(full.second, s.pullback(c)) < 1e-12);                    // the same gradient …
                CHECK(full.first == doctest::Approx(kl - s.log_kept_q).epsilon(1e-12)); // … of another value
            }
            CHECK(distance(expectation(be, s, 2, true, mc{.baseline = baseline::leave_one_out{}}).second,
                           s.pullback(c)) < 1e-12);
            CHECK(distance(expectation(be, s, 1, true, mc{shape::sign{}}).second, s.pullback(c_tv)) < 1e-12);
            CHECK(distance(expectation(be, s, 1, false, mc{shape::sign{}}).second, s.pullback(c_tv_full)) < 1e-12);
            CHECK(distance(expectation(be, s, 1, true, any_sampled{}).second, s.pullback(c)) < 1e-12);
        });
    }
}

TEST_CASE("K = V: the plain call") {
    property("whole", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t vocab = 2 + u.below(200), m = 1 + u.below(6);
        const policies w(vocab, std::uint64_t(u.below(1000)), true, float(0.5 + u.uniform()));
        std::vector<std::int32_t> all(static_cast<std::size_t>(vocab));
        std::iota(all.begin(), all.end(), 0);
        const on_set s(w, all);
        std::vector<std::size_t> places;
        std::vector<std::int32_t> ids;
        std::vector<double> log_mu, log_q;
        for (index_t j = 0; j < m; ++j) {
            const auto v = std::size_t(u.below(vocab));
            places.push_back(v), ids.push_back(std::int32_t(v));
            log_mu.push_back(w.log_mu[v]), log_q.push_back(w.log_q[v]);
        }
        const teacher::samples plain{view(std::as_const(ids).data(), 1, m), view(std::as_const(log_mu).data(), 1, m),
                                     view(std::as_const(log_q).data(), 1, m)};
        std::vector<double> lse(1), want_lse(1), dz(std::size_t(vocab), 0.5), want(std::size_t(vocab), 0.5);
        on_both([&](auto& be, const char*) {
            env e;
            e.lse = view(lse.data(), 1), e.beta = 2, e.measure.entropy = true;
            std::fill(dz.begin(), dz.end(), 0.5), std::fill(want.begin(), want.end(), 0.5);
            const result got = call(be, s, places, false, mc{.baseline = baseline::leave_one_out{}}, dz, e);
            e.lse = view(want_lse.data(), 1);
            const result r = evaluate(be,
                                      student::logits<double>{.z = view(w.z.data(), 1, vocab),
                                                              .dz = view(want.data(), 1, vocab),
                                                              .temperature = w.temperature},
                                      plain, mc{.baseline = baseline::leave_one_out{}}, e);
            RC_ASSERT(std::abs(got.loss - r.loss) < 1e-12 * (1 + std::abs(r.loss)));
            RC_ASSERT(distance(dz, want) < 1e-12 * (1 + std::abs(r.loss)));
            RC_ASSERT(std::abs(lse[0] - want_lse[0]) < 1e-12 * (1 + std::abs(lse[0])));
            RC_ASSERT(std::abs(got.diagnostics.student_entropy_sum - r.diagnostics.student_entropy_sum) < 1e-10);
            RC_ASSERT(got.diagnostics.ratio_sum == doctest::Approx(r.diagnostics.ratio_sum));
        });
    });
}

TEST_CASE("from draw's own columns: ratios of exactly the law that was drawn from; without the sets they are off") {
    constexpr index_t n = 400, vocab = 300;
    numbers u(6);
    std::vector<float> z, moved;
    for (index_t i = 0; i < n * vocab; ++i)
        z.push_back(float(1.5 * u.normal())), moved.push_back(z.back() + float(0.1 * u.normal()));
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position(n, 0);
    for (index_t r = 0; r < n; ++r) sample.push_back(std::uint64_t(r));
    std::vector<std::int32_t> ids(n);
    std::vector<float> log_mu(n), log_q(n, -2.F);
    std::vector<filter_cut> cut(n);
    std::vector<index_t> kept(n);
    const filter f{.temperature = 0.8F, .top_p = 0.8F};
    cpu_backend cpu;
    draw(cpu, view(z.data(), n, vocab), design::gumbel{},
         {.seed = 5, .sample = view(sample.data(), n), .position = view(position.data(), n)},
         drawn<>{.ids = view(ids.data(), n, 1), .log_mu = view(log_mu.data(), n, 1)},
         {.filter = f, .cut = view(cut.data(), n), .kept = view(kept.data(), n)});
    const auto offsets = offsets_for(kept);
    std::vector<std::int32_t> set(std::size_t(offsets.back()));
    kept_ids(cpu, view(z.data(), n, vocab), view(cut.data(), n), row_offsets<>(offsets),
             view(set.data(), offsets.back()));
    teacher::samples samples{view(std::as_const(ids).data(), n, 1), view(std::as_const(log_mu).data(), n, 1),
                             view(std::as_const(log_q).data(), n, 1)};
    on_both([&](auto& be, const char*) {
        const auto run = [&](const std::vector<float>& logits, const auto& cache) {
            return evaluate(be, student::logits<float>{.z = view(logits.data(), n, vocab), .temperature = 0.8F}, cache,
                            mc{reverse_kl{}})
                .diagnostics;
        };
        const teacher::on_kept_sets with{samples, view(std::as_const(set).data(), offsets.back()),
                                         row_offsets<>(offsets)};
        const diagnostics same = run(z, with), other = run(moved, with);
        CHECK(same.bad_rows == 0);
        CHECK(same.ratio_max == doctest::Approx(1).epsilon(1e-6));
        CHECK(same.ratio_mean() == doctest::Approx(1).epsilon(1e-6));
        CHECK(!other.mu_mismatch());
        CHECK(other.ratio_mean() == doctest::Approx(1).epsilon(0.02));
        const diagnostics without = run(z, samples);
        CHECK(without.mu_mismatch());
        CHECK(without.ratio_mean() < 0.87); // the mass that was kept
        CHECK(without.ratio_mean() > 0.78);
    });
}

TEST_CASE("raw log-probs: brought to the law that was drawn from, or refused") {
    const policies w(6, 2, true);
    const double t = 0.5;
    const on_set s(w, {1, 3, 4});
    std::vector<double> raw, processed; // mu at T over the set, from log-probs at 1 over the vocabulary
    double sum = 0;
    for (const auto id : s.ids) sum += std::exp(w.log_mu[std::size_t(id)] / t);
    const double norm = std::log(sum);
    for (const auto id : s.ids) raw.push_back(w.log_mu[std::size_t(id)]), processed.push_back(raw.back() / t - norm);
    const std::vector<std::int64_t> offsets{0, 3};
    const std::vector<double> log_q{-1, -2, -3};
    const auto cache = [&](const std::vector<double>& log_mu) {
        return teacher::on_kept_sets{
            teacher::samples{view(s.ids.data(), 1, 3), view(log_mu.data(), 1, 3), view(log_q.data(), 1, 3)},
            view(s.ids.data(), 3), row_offsets<>(offsets)};
    };
    on_both([&](auto& be, const char*) {
        const auto run = [&](const auto& on) {
            std::vector<double> dz(6);
            const double loss =
                evaluate(be,
                         student::logits<double>{
                             .z = view(w.z.data(), 1, 6), .dz = view(dz.data(), 1, 6), .temperature = float(t)},
                         on, mc{reverse_kl{}})
                    .loss;
            return std::pair(loss, dz);
        };
        auto on = cache(raw);
        on.rollout = {.drawn_with = {.temperature = float(t), .top_k = 3}, .mode = logprob_mode::raw};
        CHECK_THROWS_WITH_AS(run(on), doctest::Contains("teacher.rollout.log_norm"), invalid_input);
        on.rollout.log_norm = view(&norm, 1);
        const auto got = run(on), want = run(cache(processed));
        CHECK(got.first == doctest::Approx(want.first).epsilon(1e-12));
        CHECK(distance(got.second, want.second) < 1e-12);
        auto bare = static_cast<const teacher::samples<std::int32_t, double>&>(on);
        CHECK_THROWS_WITH_AS(run(bare), doctest::Contains("teacher::on_kept_sets"), invalid_input);
        bare.rollout = {.drawn_with = {.temperature = float(t)}, .mode = logprob_mode::raw};
        CHECK_THROWS_WITH_AS(run(bare), doctest::Contains("teacher.rollout.log_norm"), invalid_input);
        bare.rollout.mode = logprob_mode::processed;
        CHECK(std::isfinite(run(bare).first));
        bare.rollout = {.mode = logprob_mode::raw}; // at T = 1 without a filter they are the same
        CHECK(std::isfinite(run(bare).first));
        bare.rollout.drawn_with.top_p = 2;
        CHECK_THROWS_WITH_AS(run(bare), doctest::Contains("teacher.rollout.drawn_with.top_p"), invalid_input);
    });
}

TEST_CASE("what lies outside its set is bad and counted; sets that are none are refused or bad") {
    const std::vector<float> z{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
    const std::vector<std::int32_t> ids{1, 2, 3}, set{0, 1, 0, 1, 1, 3}, unordered{1, 0, 0, 1, 1, 3},
        beyond{1, 4, 0, 1, 1, 3};
    const std::vector<std::int64_t> offsets{0, 2, 4, 6};
    const std::vector<float> logs(3, -1.F);
    on_both([&](auto& be, const char*) {
        std::vector<float> dz(12, 9);
        env e;
        const auto run = [&](const std::vector<std::int32_t>& sets, const std::vector<std::int64_t>& at) {
            const teacher::on_kept_sets cache{
                teacher::samples{view(ids.data(), 3, 1), view(logs.data(), 3, 1), view(logs.data(), 3, 1)},
                view(sets.data(), 6), row_offsets<>(at)};
            return evaluate(be, student::logits{view(z.data(), 3, 4), view(dz.data(), 3, 4)}, cache, mc{reverse_kl{}},
                            e)
                .diagnostics;
        };
        const diagnostics d = run(set, offsets); // row 1: token 2 is not among {0, 1}
        CHECK(d.bad_rows == 1);
        CHECK(d.first_bad_row == 1);
        CHECK(d.outside_kept == 1);
        CHECK(dz[0] != 0);
        for (std::size_t i = 4; i < 8; ++i) CHECK(dz[i] == 0);
        CHECK(dz[2] == 0); // outside the set
        CHECK(run(unordered, offsets).first_bad_row == 0);
        CHECK(run({1, 1, 0, 2, 1, 3}, offsets).first_bad_row == 0); // an id twice
        CHECK(run(beyond, offsets).bad_rows == 2);
        CHECK(run(set, {0, 2, 4, 4}).bad_rows == 2); // an empty set
        CHECK_THROWS_WITH_AS(run(set, {0, 2, 4, 7}), doctest::Contains("teacher.kept_offsets, row 2"), invalid_input);
        CHECK_THROWS_WITH_AS(run(set, {0, 2, 1, 6}), doctest::Contains("teacher.kept_offsets, row 1"), invalid_input);
        CHECK_THROWS_WITH_AS(run(set, {0, 2, 6}), doctest::Contains("teacher.kept_offsets"), invalid_input);
        const std::vector<double> lse(3, 1.0);
        e.given_lse = view(lse.data(), 3);
        CHECK_THROWS_WITH_AS(run(set, offsets), doctest::Contains("env.given_lse"), invalid_input);
    });
    cpu_backend be;
    const teacher::on_kept_sets cache{
        teacher::samples{view(ids.data(), 3, 1), view(logs.data(), 3, 1), view(logs.data(), 3, 1)}, view(set.data(), 6),
        row_offsets<>(offsets)};
    CHECK_THROWS_WITH_AS(
        evaluate(be, student::logits{view(z.data(), 3, 4)}, cache, mc{reverse_kl{}}, env{.checks = check::contents}),
        doctest::Contains("lies outside"), invalid_input);
    auto other = cache;
    other.kept_ids = view(unordered.data(), 6);
    CHECK_THROWS_WITH_AS(
        evaluate(be, student::logits{view(z.data(), 3, 4)}, other, mc{reverse_kl{}}, env{.checks = check::contents}),
        doctest::Contains("ascend"), invalid_input);
}

namespace {

/// Rows of drawn tokens on sets of k ids each, and the same rows on a vocabulary that is the set.
struct two_worlds {
    index_t n, m, v, k;
    float temperature;
    bool renormalised_q;
    std::vector<float> z, small_z;             // (N,V) (N,k)
    std::vector<std::int32_t> ids, small, set; // (N,m) (N,m) (N,k)
    std::vector<float> log_mu, log_q, small_q; // (N,m)
    std::vector<float> log_kept_q;             // (N)
    std::vector<std::uint8_t> mask;
    std::vector<std::int64_t> offsets;

    explicit two_worlds(numbers& u)
        : n(1 + u.below(8)), m(1 + u.below(3)), v(2 + u.below(60)), k(1 + u.below(v)),
          temperature(float(0.5 + u.uniform())), renormalised_q(u.uniform() < 0.5) {
        for (index_t i = 0; i < n * v; ++i) z.push_back(float(2 * u.normal()));
        for (index_t r = 0; r < n; ++r) {
            std::vector<std::int32_t> all(static_cast<std::size_t>(v));
            std::iota(all.begin(), all.end(), 0);
            for (index_t j = 0; j < k; ++j) std::swap(all[std::size_t(j)], all[std::size_t(j + u.below(v - j))]);
            std::sort(all.begin(), all.begin() + k);
            set.insert(set.end(), all.begin(), all.begin() + k);
            for (index_t j = 0; j < k; ++j) small_z.push_back(z[std::size_t(r * v + all[std::size_t(j)])]);
            log_kept_q.push_back(-float(u.below(8)) / 8);
            for (index_t j = 0; j < m; ++j) {
                small.push_back(std::int32_t(u.below(k))), ids.push_back(all[std::size_t(small.back())]);
                log_mu.push_back(-float(3 * u.uniform())), log_q.push_back(-float(1 + u.below(300)) / 64);
                small_q.push_back(log_q.back() - (renormalised_q ? log_kept_q.back() : 0));
            }
        }
        mask = random_mask(n, u), offsets = offsets_for(std::vector(std::size_t(n), k));
    }
    auto plain() const {
        return teacher::samples{view(small.data(), n, m), view(log_mu.data(), n, m), view(small_q.data(), n, m)};
    }
    auto on_sets() const {
        teacher::on_kept_sets cache{
            teacher::samples{view(ids.data(), n, m), view(log_mu.data(), n, m), view(log_q.data(), n, m)},
            view(set.data(), n * k), row_offsets<>(offsets)};
        if (renormalised_q) cache.log_kept_q = view(log_kept_q.data(), n);
        return cache;
    }
};

/// A row's loss is log p of its first token, as evaluate sees it.
struct told {
    static constexpr cache_kind takes = cache_kind::samples;
    OPD_HD entry_row row(sampled_entry* e, int, entry_facts, diagnostics&) const { return {.loss = e[0].log_p}; }
};

} // namespace

TEST_CASE("token_logp on kept sets: log p of softmax(z[K]/T), with the bits that the estimator sees") {
    property("log p", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const two_worlds w(u);
        on_both([&](auto& be, const char*) {
            const auto size = std::size_t(w.n * w.m);
            std::vector<double> log_p(size, 9), lse(std::size_t(w.n), 9);
            const diagnostics d = token_logp(be, view(w.z.data(), w.n, w.v), w.on_sets(), view(log_p.data(), w.n, w.m),
                                             w.temperature, w.mask, lse)
                                      .diagnostics;
            RC_ASSERT(d.bad_rows == 0);
            RC_ASSERT(d.outside_kept == 0);
            for (index_t r = 0; r < w.n; ++r) {
                std::vector<double> want;
                double want_lse = 0;
                naive_backend::log_softmax(w.small_z.data() + r * w.k, w.k, w.temperature, nullptr, &want_lse, want);
                const bool kept = w.mask[std::size_t(r)] != 0;
                RC_ASSERT(std::abs(lse[std::size_t(r)] - (kept ? want_lse : 9)) < 1e-12);
                for (std::size_t i = std::size_t(r * w.m); i < std::size_t((r + 1) * w.m); ++i)
                    RC_ASSERT(std::abs(log_p[i] - (kept ? want[std::size_t(w.small[i])] : 9)) < 1e-12);
            }
            env e;
            std::vector<float> losses(std::size_t(w.n), 9);
            e.mask = w.mask, e.losses = losses;
            evaluate(be, student::logits<float>{.z = view(w.z.data(), w.n, w.v), .temperature = w.temperature},
                     w.on_sets(), told{}, e);
            for (std::size_t r = 0; r < losses.size(); ++r)
                RC_ASSERT(!w.mask[r] || losses[r] == float(log_p[r * std::size_t(w.m)]));
        });
    });
}

TEST_CASE("passes over a batch with kept sets: those of the rows whose vocabulary is the set") {
    property("passes", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const two_worlds w(u);
        std::vector<index_t> sequence;
        for (index_t r = 0; r < w.n; ++r) sequence.push_back(r / 3);
        on_both([&](auto& be, const char*) {
            const auto fit = [&](matrix_view<const float> z, const auto& cache) {
                const auto size = std::size_t(w.n * w.m);
                std::vector<double> log_p(size);
                token_logp(be, z, cache, view(log_p.data(), w.n, w.m), w.temperature, w.mask);
                const matrix_view<const double> table = view(std::as_const(log_p).data(), w.n, w.m);
                m2po_fit second{.tau = 0.5};
                second.add(table, cache, w.mask);
                gspo_fit ratios;
                ratios.add(table, cache, sequence, w.mask);
                std::vector<double> out(size), s(std::size_t(w.n));
                advantages(table, cache, w.mask, view(out.data(), w.n, w.m));
                ratios.log_ratios(sequence, view(s.data(), w.n));
                out.insert(out.end(), s.begin(), s.end());
                std::sort(second.squares.begin(), second.squares.end());
                out.insert(out.end(), second.squares.begin(), second.squares.end());
                return out;
            };
            const auto got = fit(view(w.z.data(), w.n, w.v), w.on_sets());
            const auto want = fit(view(w.small_z.data(), w.n, w.k), w.plain());
            RC_ASSERT(got.size() == want.size());
            RC_ASSERT(distance(got, want) < 1e-5);
        });
    });
}

TEST_CASE("token_logp on kept sets: what is bad is NaN and counted, and no pass takes it; what is refused") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    const std::vector<float> z{0, 1, 2, 3, 0, 1, 2, 3, 0, nan, 2, 3, 0, nan, -inf, 3, -inf, 1, 2, -inf, 0, 1, 2, 3};
    std::vector<std::int32_t> ids{1, 0, 2, 0, 1, 2, 0, 2, 0, 3, -1, 4};
    const std::vector<std::int32_t> set{0, 1, 0, 1, 1, 2, 0, 2, 0, 3, 0, 1};
    const std::vector<std::int64_t> offsets{0, 2, 4, 6, 8, 10, 12};
    const std::vector<float> logs(12, -1.F);
    teacher::on_kept_sets cache{
        teacher::samples{view(ids.data(), 6, 2), view(logs.data(), 6, 2), view(logs.data(), 6, 2)},
        view(set.data(), 12), row_offsets<>(offsets)};
    on_both([&](auto& be, const char*) {
        std::vector<double> log_p(12, 9);
        const auto run = [&] {
            return token_logp(be, view(z.data(), 6, 4), cache, view(log_p.data(), 6, 2)).diagnostics;
        };
        const diagnostics d = run();
        const double of_one = 1 - std::log(1 + std::exp(1.0));
        CHECK(log_p[0] == doctest::Approx(of_one).epsilon(1e-12));
        CHECK(log_p[1] == doctest::Approx(of_one - 1).epsilon(1e-12));
        CHECK(detail::is_nan(log_p[2])); // 2 is not of {0, 1}
        CHECK(log_p[3] == doctest::Approx(of_one - 1).epsilon(1e-12));
        for (const std::size_t i : {4, 5}) CHECK(detail::is_nan(log_p[i])); // a NaN in the set
        CHECK(log_p[6] == 0);                                               // one outside does not matter
        CHECK(detail::is_neg_inf(log_p[7]));
        for (const std::size_t i : {8, 9}) CHECK(detail::is_nan(log_p[i]));   // no mass
        for (const std::size_t i : {10, 11}) CHECK(detail::is_nan(log_p[i])); // no token; no id
        CHECK(d.bad_rows == 4);
        CHECK(d.first_bad_row == 1);
        CHECK(d.outside_kept == 1);
        ids[11] = 0;
        CHECK(run().bad_rows == 3); // an unused slot is none of the row's business
        ids[11] = 4;
        run();
        std::vector<index_t> seen;
        for_each_token(view(std::as_const(log_p).data(), 6, 2), cache, {},
                       [&](index_t r, index_t j, const sampled_entry&) { seen.push_back(2 * r + j); });
        CHECK(seen == std::vector<index_t>{0, 1, 3, 6, 7});

        const auto refused = [&](const std::vector<std::int64_t>& at, const char* what) {
            cache.kept_offsets = row_offsets<>(at);
            log_p.assign(12, 9);
            CHECK_THROWS_WITH_AS(run(), doctest::Contains(what), invalid_input);
            CHECK(log_p == std::vector<double>(12, 9));
            CHECK_THROWS_WITH_AS(for_each_token(view(std::as_const(log_p).data(), 6, 2), cache, {},
                                                [](index_t, index_t, const sampled_entry&) {}),
                                 doctest::Contains(what), invalid_input);
        };
        refused({0, 2, 4, 6, 8, 10, 13}, "teacher.kept_offsets, row 5");
        refused({0, 2, 1, 6, 8, 10, 12}, "teacher.kept_offsets, row 1");
        refused({0, 12}, "teacher.kept_offsets");
        cache.kept_offsets = row_offsets<>(offsets);
        std::vector<double> short_one(10, 9);
        CHECK_THROWS_WITH_AS(token_logp(be, view(z.data(), 6, 4), cache, view(short_one.data(), 5, 2)),
                             doctest::Contains("log_p"), invalid_input);
        CHECK_THROWS_WITH_AS(token_logp(be, view(z.data(), 6, 4), cache, view(log_p.data(), 6, 2), 0.F),
                             doctest::Contains("temperature"), invalid_input);
    });
    // a set whose offsets lead out of the ids, which on a device nobody sees before the call, is none
    const std::vector<std::int64_t> astray{0, 13, -1, 4, 3, 8, 12};
    cache.kept_offsets = row_offsets<>(astray);
    for (const index_t r : {0, 1, 2, 3}) CHECK(detail::kept_set_of(cache, r).count == 0);
    CHECK(detail::kept_set_of(cache, 4).count == 5);
    CHECK(detail::kept_set_of(cache, 5).count == 4);
}
