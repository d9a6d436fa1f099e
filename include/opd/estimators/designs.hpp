// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sampling designs: which actions of a behaviour policy mu to score at one prefix, and the weights that make
// E[Σ w f(a)] = E_mu[f].
//
//   design::iid        m draws from mu with replacement, w = 1/m (implied by teacher::samples)
//   design::threshold  B entries without replacement: inclusion incl = min(1, κ mu) with Σ incl = B. Entries with incl = 1
//                      are taken for certain ("exact", w = mu), the others by systematic sampling with one uniform
//                      (w = mu/incl = 1/κ). Unbiased, and of least variance among designs of that size when f is bounded
//                      by rho (Fearnhead & Clifford 2003).
//
// In: one row of the behaviour policy's logits (V) and its temperature; mu = softmax(z/T). Out: ids, log mu, and for
// threshold the weights and exact marks, ready for teacher::samples and teacher::weighted. Scratch: design::scratch_floats(V),
// or design::scratch_doubles(V) for logits of type double.
// Uniforms are the caller's, so draws can be keyed (rng.hpp) and are a pure function of logits and key.
//
// Probabilities are float (relative error 2e-7), for double logits double; sums are double, over leaves of 1,024. From double
// logits log mu is the logarithm of the very probabilities that threshold draws with, so that its expectations are exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/detail/checks.hpp"
#include "opd/detail/sweep.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/lanes.hpp"

namespace opd::design {

/// Floats of scratch for a vocabulary of n.
constexpr std::size_t scratch_floats(index_t n) {
    constexpr index_t leaf = opd::detail::leaf_size;
    const index_t leaves = (n + leaf - 1) / leaf;
    return static_cast<std::size_t>((leaves + 1) * leaf + 2 * leaves + 2); // e, a stage, sums up to each leaf
}
/// Doubles of scratch for double logits over a vocabulary of n.
constexpr std::size_t scratch_doubles(index_t n) { return scratch_floats(n); }

namespace detail {
inline namespace OPD_ISA {

using opd::detail::leaf_size;

OPD_INLINE void check_uniform(const double& u, index_t draw = -1) {
    if (!opd::detail::is_finite(u) || !(u > 0 && u < 1))
        throw invalid_input(draw < 0 ? "uniform" : "uniform " + std::to_string(draw),
                            "must lie strictly between 0 and 1");
}

/// e[v] = exp((z[v] - z*)/T) and its cumulative sums, in the caller's scratch. F: the number type of the row.
template <class F>
struct row_weights {
    using value = typename F::value_type;
    value* e;           // (V)
    double* cumulative; // (leaves) Σ e up to and including each leaf
    index_t n;
    double z_top = 0, inv_t, total = 0; // total = Σ e
    bool good;

    template <class Z>
    row_weights(const Z* z, index_t n_, float temperature, std::span<value> scratch)
        : n(n_), inv_t(1 / double(temperature)) {
        if (n < 1) throw invalid_input("z", "has no columns");
        opd::detail::check_temperature("temperature", temperature);
        if (scratch.size() < scratch_floats(n))
            throw invalid_input("scratch", "holds " + std::to_string(scratch.size()) +
                                               (sizeof(value) == 4 ? " floats" : " doubles") + "; this row needs " +
                                               std::to_string(scratch_floats(n)));
        const index_t leaves = (n + leaf_size - 1) / leaf_size;
        e = scratch.data();
        value* stage = e + leaves * leaf_size;
        void* after = stage + leaf_size;
        std::size_t room = sizeof(value) * static_cast<std::size_t>(2 * leaves + 2);
        cumulative = static_cast<double*>(
            std::align(alignof(double), sizeof(double) * static_cast<std::size_t>(leaves), after, room));

        const auto sw =
            opd::detail::sweep_row<F, false, raw_sums_needed{}>(z, static_cast<const Z*>(nullptr), n, inv_t, 1, 1);
        good = !sw.contents.bad;
        if (!good) return;
        z_top = sw.sums.z_s;
        const opd::detail::anchor_lanes<F> a(sw.sums);
        for (index_t b = 0; b < n; b += leaf_size) {
            const int count = static_cast<int>(std::min<index_t>(leaf_size, n - b));
            const int full = opd::detail::staged_leaf<F>::load(stage, z + b, count);
            for (int i = 0; i < full; i += F::width) a.student(F::load(stage + i)).store(e + b + i);
        }
        accumulate();
    }
    /// Sums again after entries of e have been cleared.
    void accumulate() {
        total = 0;
        for (index_t b = 0; b < n; b += leaf_size) {
            F s(0.);
            for (index_t i = b; i < std::min(b + leaf_size, n); i += F::width) s += F::load(e + i);
            cumulative[b / leaf_size] = total += double(sum(s));
        }
    }
    /// The first id whose cumulative sum exceeds `at`, in [0, total).
    index_t find(double at) const {
        const index_t leaves = (n + leaf_size - 1) / leaf_size;
        const index_t leaf =
            std::min<index_t>(std::upper_bound(cumulative, cumulative + leaves, at) - cumulative, leaves - 1);
        const index_t begin = leaf * leaf_size, end = std::min(begin + leaf_size, n);
        double c = leaf > 0 ? cumulative[leaf - 1] : 0;
        index_t last = -1;
        for (index_t i = begin; i < end; ++i) {
            if (!(e[i] > 0)) continue;
            c += double(e[i]);
            last = i;
            if (at < c) return i;
        }
        if (last < 0) // rounding at a leaf's end: the nearest entry with mass before it
            for (last = begin - 1; last > 0 && !(e[last] > 0);) --last;
        return last < 0 ? 0 : last;
    }
};

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// The number type that a row of Z is drawn in, and the caller's scratch for it.
template <class Z>
using number_for = std::conditional_t<std::is_same_v<arithmetic_t<Z>, double>, scalar<double>, lanes>;
template <class Z>
using scratch_for = std::span<typename number_for<Z>::value_type>;

/// m draws with replacement. uniform(j) in (0,1) for draw j; draw j takes the first id whose cumulative probability exceeds
/// it. Ids and log mu in draw order. Returns false, writing nothing, if the row holds NaN, +inf or no mass.
/// A uniform outside (0,1) throws invalid_input when draw j comes to it; draws before it have been written.
template <class Z, class Id, class L, class Uniform>
bool iid(const Z* z, index_t n, float temperature, index_t m, Uniform uniform, Id* ids, L* log_mu,
         scratch_for<Z> scratch) {
    const detail::row_weights<number_for<Z>> w(z, n, temperature, scratch);
    if (!w.good) return false;
    const double log_total = std::log(w.total);
    for (index_t j = 0; j < m; ++j) {
        const double u = opd::detail::pin(static_cast<double>(uniform(j))); // -Ofast takes a result to be finite
        detail::check_uniform(u, j);
        ids[j] = static_cast<Id>(w.find(u * w.total));
        const double zj = double(element<Z>::load(z[static_cast<index_t>(ids[j])]));
        log_mu[j] = element<L>::store(static_cast<arithmetic_t<L>>((zj - w.z_top) * w.inv_t - log_total));
    }
    return true;
}

/// B entries by threshold sampling with one uniform u in (0,1). Exact entries come first, then the sampled ones, both by
/// ascending id; where at most B ids have mass, all are exact. Returns the number of entries written, min(B, ids with mass);
/// slots beyond carry id -1. Weights are float or double. Returns 0 if the row holds NaN, +inf or no mass.
template <class Z, class Id, std::floating_point W, class L>
index_t threshold(const Z* z, index_t n, float temperature, index_t budget, double u, Id* ids, W* weight, L* log_mu,
                  std::uint8_t* exact, scratch_for<Z> scratch) {
    using value = typename number_for<Z>::value_type;
    if (budget < 1) throw invalid_input("budget", "must be at least 1");
    detail::check_uniform(u);
    detail::row_weights<number_for<Z>> w(z, n, temperature, scratch);
    for (index_t j = 0; j < budget; ++j) ids[j] = Id(-1), weight[j] = 0, log_mu[j] = element<L>::store(0), exact[j] = 0;
    if (!w.good) return 0;
    const double all = w.total, log_total = std::log(all);
    index_t count = 0;
    const auto put = [&](index_t id, double sampled_weight, bool certain) {
        double lm = (double(element<Z>::load(z[id])) - w.z_top) * w.inv_t - log_total;
        if (std::is_same_v<value, double>) lm = std::log(double(w.e[id])) - log_total; // what is drawn with, to the bit
        ids[count] = static_cast<Id>(id);
        weight[count] = static_cast<W>(certain ? std::exp(lm) : sampled_weight);
        log_mu[count] = element<L>::store(static_cast<arithmetic_t<L>>(lm));
        exact[count++] = certain;
    };
    // An entry is certain if e >= cut, cut = 1/κ in units of e = (mass not certain) / (B - certain). Certain entries lower
    // the cut, which may make more certain: from cut = total/B down to the fixed point.
    auto cut = static_cast<value>(all / double(budget));
    for (;;) {
        index_t certain = 0, with_mass = 0;
        double mass = 0;
        for (index_t i = 0; i < n; ++i) {
            with_mass += w.e[i] > 0;
            if (w.e[i] > 0 && w.e[i] >= cut) ++certain, mass += double(w.e[i]);
        }
        if (with_mass <= budget) {
            cut = 0;
            break;
        }
        if (certain >= budget) break;
        const auto next = static_cast<value>((all - mass) / double(budget - certain));
        if (!(next < cut)) break;
        cut = next;
    }
    for (index_t i = 0; i < n && count < budget; ++i)
        if (w.e[i] > 0 && w.e[i] >= cut) {
            put(i, 0, true);
            w.e[i] = 0; // leaves the systematic part
        }
    const index_t left = budget - count;
    if (left == 0 || cut == 0) return count;
    w.accumulate();
    const double step = w.total / double(left); // 1/κ in units of e
    for (index_t j = 0; j < left; ++j) put(w.find((u + double(j)) * step), step / all, false);
    return count;
}

} // namespace OPD_ISA

} // namespace opd::design
