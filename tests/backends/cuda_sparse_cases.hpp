// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Supports and samples for the CUDA kernels' tests, with a float64 reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/cuda_cases.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/support.hpp"

namespace opd::test {

/// A batch with everything that the four caches may hold; `k` entries a row.
struct sparse_case {
    index_t rows = 0, vocab = 0, k = 0;
    std::vector<float> z = {}, dz = {};
    float t_s = 1;
    std::vector<std::int64_t> distinct = {}, drawn = {}; // (N,k) support, i.i.d. draws
    std::vector<float> q_distinct = {}, q_drawn = {}, mu_distinct = {}, mu_drawn = {}, weight = {}, log_tail = {};
    std::vector<std::uint8_t> exact = {};
    std::vector<std::int32_t> mask = {}, versions = {};
    std::vector<float> weights = {}, losses = {};
    std::vector<double> lse = {};
    env plain = {};
};

inline sparse_case make_sparse_case(std::uint64_t seed, index_t rows, index_t vocab, index_t k) {
    source s(seed);
    sparse_case c{.rows = rows, .vocab = vocab, .k = k};
    c.t_s = s.below(2) ? 1.f : float(.6 + s.uniform());
    for (index_t r = 0; r < rows; ++r) {
        std::vector<double> z, y, m;
        for (index_t v = 0; v < vocab; ++v) {
            z.push_back(double(float(3 * s.normal())));
            y.push_back(z.back() / double(c.t_s) + s.normal()), m.push_back(z.back() / double(c.t_s) + .3 * s.normal());
            c.z.push_back(float(z.back()));
        }
        const std::vector<double> lq = log_softmax(y), lm = log_softmax(m);
        std::vector<std::int64_t> all;
        for (index_t v = 0; v < vocab; ++v) all.push_back(v);
        double z_q = 0;
        for (index_t j = 0; j < k; ++j) {
            std::swap(all[std::size_t(j)], all[std::size_t(j + s.below(vocab - j))]);
            const std::size_t id = std::size_t(all[std::size_t(j)]);
            c.distinct.push_back(index_t(id));
            c.q_distinct.push_back(std::min(0.f, float(lq[id]))),
                c.mu_distinct.push_back(std::min(-1e-6f, float(lm[id])));
            z_q += std::exp(lq[id]);
            const bool certain = j < k / 2;
            c.exact.push_back(certain);
            c.weight.push_back(float(certain ? std::exp(lm[id]) : .01 + .1 * s.uniform()));
            const std::size_t d = std::size_t(s.below(std::min<index_t>(vocab, 2 * k))); // repeats are likely
            c.drawn.push_back(index_t(d));
            c.q_drawn.push_back(std::min(0.f, float(lq[d]))), c.mu_drawn.push_back(std::min(-1e-6f, float(lm[d])));
        }
        c.log_tail.push_back(k == vocab ? minus_infinity : float(std::log(std::max(1e-9, 1 - z_q))));
    }
    c.losses.assign(std::size_t(rows), 0), c.lse.assign(std::size_t(rows), 0);
    return c;
}

/// Bad rows, masks, weights, betas, policies: what an env may hold.
inline void spoil(sparse_case& c, source& s) {
    const auto any = [&](auto& v) -> auto& { return v[std::size_t(s.below(index_t(v.size())))]; };
    if (s.below(4) == 0) any(c.z) = std::numeric_limits<float>::quiet_NaN();
    if (s.below(3) == 0) any(c.z) = minus_infinity;
    if (s.below(4) == 0) any(c.distinct) = c.vocab;
    if (s.below(4) == 0) any(c.drawn) = -1;
    if (s.below(4) == 0) c.distinct[0] = c.distinct[std::size_t(c.k - 1)]; // twice, or the same where k = 1
    if (s.below(4) == 0) any(c.q_distinct) = minus_infinity;
    if (s.below(4) == 0) any(c.q_drawn) = std::numeric_limits<float>::quiet_NaN();
    if (s.below(4) == 0) c.log_tail.clear();
    for (index_t r = 0; r < c.rows; ++r) {
        c.mask.push_back(std::int32_t(s.below(4)));
        c.weights.push_back(float(s.normal()));
        c.versions.push_back(std::int32_t(s.below(9)));
    }
    c.plain.version = 7;
    c.plain.beta = s.below(2) ? 0.f : 0.5f;
    c.plain.loss_clamp = s.below(2) ? 0 : 1;
    c.plain.on_infinite = s.below(2) ? infinite::floor(-15) : infinite::skip();
}

template <class E>
constexpr cache_kind cache_of() {
    return E::takes;
}
template <class E>
constexpr bool sparse_sink() {
    if constexpr (requires { E::sparse_gradient; })
        return E::sparse_gradient;
    else
        return false;
}

template <class Memory, class Estimator>
result run_sparse(Memory& memory, sparse_case& c, const Estimator& estimator) {
    constexpr space S = Memory::memory_space;
    const auto n = [](const auto& v) { return static_cast<index_t>(v.size()); };
    const auto matrix = [&](auto& v) {
        using T = typename std::remove_cvref_t<decltype(v)>::value_type;
        return matrix_view<const T, S>(memory.put(v), c.rows, c.k, c.k);
    };
    basic_env<S> e;
    e.reduction = reduce::sum, e.version = c.plain.version, e.beta = c.plain.beta, e.loss_clamp = c.plain.loss_clamp;
    e.on_infinite = c.plain.on_infinite;
    e.mask = row_mask<S>(vector_view<const std::int32_t, S>(memory.put(c.mask), n(c.mask)));
    e.weights = vector_view<const float, S>(memory.put(c.weights), n(c.weights));
    e.versions = vector_view<const std::int32_t, S>(memory.put(c.versions), n(c.versions));
    float* losses = memory.put(c.losses);
    double* lse = memory.put(c.lse);
    e.losses = vector_view<float, S>(losses, n(c.losses));
    if (!sparse_sink<Estimator>()) e.lse = vector_view<double, S>(lse, n(c.lse));
    const index_t columns = sparse_sink<Estimator>() ? c.k : c.vocab;
    c.dz.assign(std::size_t(c.rows * columns), 0.25f);
    float* dz = memory.put(c.dz);
    const matrix_view<const float, S> z(memory.put(c.z), c.rows, c.vocab, c.vocab);
    const matrix_view<float, S> sink(dz, c.rows, columns, columns);
    const auto go = [&](const auto& teacher) {
        if constexpr (sparse_sink<Estimator>())
            return memory.finish(
                evaluate(memory.backend, student::on_support<float, float, S>{z, sink, c.t_s}, teacher, estimator, e));
        else
            return memory.finish(
                evaluate(memory.backend, student::logits<float, float, S>{z, sink, c.t_s}, teacher, estimator, e));
    };
    result r;
    if constexpr (cache_of<Estimator>() == cache_kind::support)
        r = go(teacher::support<std::int64_t, float, S>{
            matrix(c.distinct), matrix(c.q_distinct),
            vector_view<const float, S>(memory.put(c.log_tail), n(c.log_tail))});
    else if constexpr (cache_of<Estimator>() == cache_kind::samples)
        r = go(teacher::samples<std::int64_t, float, S>{matrix(c.drawn), matrix(c.mu_drawn), matrix(c.q_drawn)});
    else
        r = go(teacher::weighted<std::int64_t, float, S>{matrix(c.distinct), matrix(c.weight), matrix(c.mu_distinct),
                                                         matrix(c.q_distinct), matrix(c.exact)});
    memory.get(c.dz, dz), memory.get(c.losses, losses), memory.get(c.lse, lse);
    return r;
}

/// An estimator of drawn tokens, on weighted entries.
template <class E>
struct weighted_entries : E {
    static constexpr cache_kind takes = cache_kind::weighted;
};
template <class E>
weighted_entries(E) -> weighted_entries<E>;

template <class Check>
void for_every_sparse_estimator(Check check) {
    check("renormalised reverse_kl", renormalised{reverse_kl{}});
    check("renormalised jsd", renormalised{jsd{.3, .6}});
    check("tail_bucket reverse_kl", tail_bucket{reverse_kl{}});
    check("tail_bucket forward_kl", tail_bucket{forward_kl{}});
    check("mc", mc{reverse_kl{}});
    check("mc leave-one-out", mc{.baseline = baseline::leave_one_out{}});
    check("mc self-normalised", mc{.baseline = baseline::self_normalised{}});
    check("mc, A_old, no ratio", accept_bias{mc{advantage::old{}, score_function{}}});
    check("weighted", weighted_entries{mc{reverse_kl{}}});
}

// --- the float64 reference -------------------------------------------------------------------------------------------

/// c over the vocabulary, or over the support; and the row's value.
struct reference_c {
    double value = 0;
    std::vector<double> dz = {};
};

template <class D>
reference_c reference_row_of(const sparse_case& c, const renormalised<D>& est, index_t r) {
    dense_case<> on{.rows = 1, .vocab_z = c.k, .vocab_y = c.k};
    on.t_s = c.t_s;
    for (index_t j = 0; j < c.k; ++j) {
        on.z.push_back(c.z[std::size_t(r * c.vocab + c.distinct[std::size_t(r * c.k + j)])]);
        on.y.push_back(c.q_distinct[std::size_t(r * c.k + j)]);
    }
    const reference_row row = reference(on, est.on_support, 0);
    return {row.value, row.dz};
}

inline std::vector<double> student_log_p(const sparse_case& c, index_t r) {
    std::vector<double> z = as_doubles(c.z, r * c.vocab, c.vocab);
    for (double& x : z) x /= double(c.t_s);
    return log_softmax(z);
}
inline std::vector<double> pulled_back(const sparse_case& c, const std::vector<double>& lp,
                                       const std::vector<double>& each) {
    double total = 0;
    for (double x : each) total += x;
    std::vector<double> dz;
    for (std::size_t v = 0; v < lp.size(); ++v) dz.push_back((each[v] - std::exp(lp[v]) * total) / double(c.t_s));
    return dz;
}

template <class D>
reference_c reference_row_of(const sparse_case& c, const tail_bucket<D>& est, index_t r) {
    const std::vector<double> lp = student_log_p(c, r);
    std::vector<double> each(lp.size(), 0);
    std::vector<bool> inside(lp.size(), false);
    for (index_t j = 0; j < c.k; ++j) inside[std::size_t(c.distinct[std::size_t(r * c.k + j)])] = true;
    double rest = 0, value = 0, slope_rest = 0;
    for (std::size_t v = 0; v < lp.size(); ++v) rest += inside[v] ? 0 : std::exp(lp[v]);
    if (rest > 0) {
        const reference_of at{std::log(rest), double(c.log_tail[std::size_t(r)])};
        value += at.term(est.on_buckets);
        slope_rest = at.c(est.on_buckets) / rest;
    }
    for (index_t j = 0; j < c.k; ++j) {
        const std::size_t id = std::size_t(c.distinct[std::size_t(r * c.k + j)]);
        const reference_of at{lp[id], double(c.q_distinct[std::size_t(r * c.k + j)])};
        value += at.term(est.on_buckets);
        each[id] = at.c(est.on_buckets) - at.p() * slope_rest;
    }
    return {value, pulled_back(c, lp, each)};
}

/// Both sampled estimators: w, ids, log mu, log q of row r; exact marks.
template <class Estimator>
reference_c sampled_reference(const sparse_case& c, const Estimator& est, index_t r, bool weighted) {
    const std::vector<double> lp = student_log_p(c, r);
    std::vector<double> each(lp.size(), 0);
    const auto at = [&](const auto& v, index_t j) { return double(v[std::size_t(r * c.k + j)]); };
    double value = 0, pa = 0, p_sum = 0, rho_a = 0, rho_sum = 0;
    std::vector<double> rho, a;
    for (index_t j = 0; j < c.k; ++j) {
        const double l = lp[std::size_t(at(weighted ? c.distinct : c.drawn, j))];
        const double lm = at(weighted ? c.mu_distinct : c.mu_drawn, j), lq = at(weighted ? c.q_distinct : c.q_drawn, j);
        rho.push_back(std::exp(l - lm));
        constexpr bool theta = std::is_same_v<typename Estimator::advantage, advantage::theta>;
        a.push_back(lq - (theta ? l : lm));
        rho_a += rho.back() * a.back(), rho_sum += rho.back();
        if (weighted && c.exact[std::size_t(r * c.k + j)]) pa += std::exp(l) * a.back(), p_sum += std::exp(l);
    }
    for (index_t j = 0; j < c.k; ++j) {
        const std::size_t i = std::size_t(j), id = std::size_t(at(weighted ? c.distinct : c.drawn, j));
        double b = 0;
        using kind = std::remove_cvref_t<decltype(est.baseline)>;
        if (std::is_same_v<kind, baseline::leave_one_out> && c.k > 1) b = (rho_a - rho[i] * a[i]) / double(c.k - 1);
        if (std::is_same_v<kind, baseline::self_normalised> && c.k > 1)
            b = (rho_a - rho[i] * a[i]) / (rho_sum - rho[i]);
        if (std::is_same_v<kind, baseline::exact_entries> && p_sum > 0) b = pa / p_sum;
        const double w = weighted ? at(c.weight, j) : 1 / double(c.k);
        constexpr bool ratio = std::is_same_v<decltype(est.surrogate), unclipped_is>;
        value += -w * a[i] * (ratio ? rho[i] : lp[id]);
        each[id] += -w * (a[i] - b) * (ratio ? rho[i] : 1);
    }
    return {value, pulled_back(c, lp, each)};
}
template <class... P>
reference_c reference_row_of(const sparse_case& c, const mc<P...>& est, index_t r) {
    return sampled_reference(c, est, r, false);
}
template <class E>
reference_c reference_row_of(const sparse_case& c, const weighted_entries<E>& est, index_t r) {
    return sampled_reference(c, static_cast<const E&>(est), r, true);
}

template <class Memory, class Estimator>
void check_sparse_against_reference(Memory& memory, sparse_case c, const Estimator& estimator) {
    const result got = run_sparse(memory, c, estimator);
    CHECK(got.diagnostics.bad_rows == 0);
    double sum = 0, size = 1;
    for (index_t r = 0; r < c.rows; ++r) {
        INFO("row " << r << " V " << c.vocab << " k " << c.k);
        const reference_c want = reference_row_of(c, estimator, r);
        sum += want.value, size += std::abs(want.value);
        CHECK(std::abs(double(c.losses[std::size_t(r)]) - want.value) <= 1e-5 * (1 + std::abs(want.value)));
        double worst = 0;
        for (std::size_t v = 0; v < want.dz.size(); ++v)
            worst = std::max(worst, std::abs(double(c.dz[std::size_t(r) * want.dz.size() + v]) - want.dz[v]));
        // log p is rounded to the cache's float before it meets log mu: ratios carry 1e-6
        CHECK_MESSAGE(worst <= 1e-5 * largest(want.dz) + 2e-6,
                      "gradient off by " << worst << " of " << largest(want.dz));
    }
    CHECK(std::abs(got.loss - sum) <= 1e-5 * size);
}

// --- tokens with kept sets -------------------------------------------------------------------------------------------

/// The drawn tokens of a case with a set a row: most of them, and others.
struct kept_case {
    sparse_case c = {};
    std::vector<std::int32_t> set = {};
    std::vector<std::int64_t> offsets = {0};
    std::vector<float> log_kept_q = {}; // (N)
    index_t widest = 0;
};
inline kept_case make_kept_case(std::uint64_t seed, index_t rows, index_t vocab, index_t k) {
    kept_case x{.c = make_sparse_case(seed, rows, vocab, k)};
    source s(seed + 1);
    for (index_t r = 0; r < rows; ++r) {
        std::vector<bool> in(std::size_t(vocab), false);
        for (index_t v = 0; v < vocab; ++v) in[std::size_t(v)] = s.below(4) == 0;
        for (index_t j = 0; j < k; ++j) in[std::size_t(x.c.drawn[std::size_t(r * k + j)])] = s.below(50) > 0;
        in[std::size_t(s.below(vocab))] = true;
        for (index_t v = 0; v < vocab; ++v)
            if (in[std::size_t(v)]) x.set.push_back(std::int32_t(v));
        x.offsets.push_back(index_t(x.set.size()));
        x.widest = std::max(x.widest, index_t(x.offsets.back() - x.offsets[std::size_t(r)]));
        x.log_kept_q.push_back(-float(s.uniform()));
    }
    return x;
}

struct kept_answer {
    result loss = {}, scored = {};
    std::vector<float> dz = {}, losses = {};
    std::vector<double> log_p = {}, lse = {}; // of token_logp
};
template <class Memory>
kept_answer run_kept(Memory& memory, kept_case x) {
    constexpr space S = Memory::memory_space;
    sparse_case& c = x.c;
    const auto matrix = [&](auto& v, index_t cols) {
        using T = typename std::remove_cvref_t<decltype(v)>::value_type;
        return matrix_view<const T, S>(memory.put(v), c.rows, cols, cols);
    };
    const auto vector = [&](auto& v) {
        using T = typename std::remove_cvref_t<decltype(v)>::value_type;
        return vector_view<const T, S>(memory.put(v), index_t(v.size()));
    };
    kept_answer out;
    out.dz.assign(c.z.size(), 0.25f), out.losses.assign(std::size_t(c.rows), 0);
    out.log_p.assign(std::size_t(c.rows * c.k), 9), out.lse.assign(std::size_t(c.rows), 9);
    float *dz = memory.put(out.dz), *losses = memory.put(out.losses);
    double *log_p = memory.put(out.log_p), *lse = memory.put(out.lse);
    teacher::on_kept_sets cache{
        teacher::samples<std::int64_t, float, S>{matrix(c.drawn, c.k), matrix(c.mu_drawn, c.k), matrix(c.q_drawn, c.k)},
        vector(x.set), row_offsets<S>(vector(x.offsets)), vector(x.log_kept_q)};
    cache.widest = x.widest;
    basic_env<S> e;
    e.reduction = reduce::sum;
    e.mask = row_mask<S>(vector(c.mask));
    e.losses = vector_view<float, S>(losses, c.rows);
    const auto z = matrix(c.z, c.vocab);
    const student::logits<float, float, S> student{z, matrix_view<float, S>(dz, c.rows, c.vocab, c.vocab), c.t_s};
    out.loss = memory.finish(evaluate(memory.backend, student, cache, mc{reverse_kl{}}, e));
    out.scored = memory.finish(token_logp(memory.backend, z, cache, matrix_view<double, S>(log_p, c.rows, c.k, c.k),
                                          c.t_s, e.mask, vector_view<double, S>(lse, c.rows)));
    memory.get(out.dz, dz), memory.get(out.losses, losses), memory.get(out.log_p, log_p), memory.get(out.lse, lse);
    return out;
}
inline void check_same(const kept_answer& a, const kept_answer& b) {
    CHECK(a.loss.loss == doctest::Approx(b.loss.loss).epsilon(1e-6));
    for (const auto which : {&kept_answer::loss, &kept_answer::scored}) {
        const diagnostics &x = (a.*which).diagnostics, &y = (b.*which).diagnostics;
        CHECK(x.kept == y.kept);
        CHECK(x.bad_rows == y.bad_rows);
        CHECK(x.first_bad_row == y.first_bad_row);
        CHECK(x.outside_kept == y.outside_kept);
    }
    const auto near = [](const auto& p, const auto& q) {
        double worst = 0;
        for (std::size_t i = 0; i < p.size(); ++i) {
            const double u = double(p[i]), v = double(q[i]);
            if (detail::is_nan(u) != detail::is_nan(v)) return 1e300;
            if (!detail::is_nan(u) && u != v) worst = std::max(worst, std::abs(u - v) / (1 + std::abs(u)));
        }
        return worst;
    };
    CHECK(near(a.dz, b.dz) < 1e-6);
    CHECK(near(a.losses, b.losses) < 1e-6);
    CHECK(near(a.log_p, b.log_p) < 1e-12);
    CHECK(near(a.lse, b.lse) < 1e-12);
}

} // namespace opd::test
