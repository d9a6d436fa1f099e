// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Training-inference mismatch, measured: how far the trainer's own log-probs of the drawn tokens are from those that
// rollout reported, and what that does to the loss. mu: rollout's policy; p_old: the trainer's at the same weights; p:
// the student now.
//
//   delta_t = log p_old - log mu       its mean, mean and max of |delta|, quantiles, argmax flips (eq. 1, table 1)
//   K1, K2, K3 of r_corr = e^delta and of r_train = p/p_old, apart                                     VeXact figure 4
//   C(r) = -(r - 1) A                  of r_train and of r_rollout = p/mu, by sign of A                VeXact eq. 5
//   parts of delta                     filters, precision, routing, where the caller has the columns:
//
//     filters    unfiltered - log mu       `unfiltered`: rollout's log-prob before its filters and temperature
//     precision  routed - unfiltered       `routed`: the trainer's, with rollout's routing replayed
//     routing    log p_old - routed
//
// A part whose column is missing goes to the next one: with `unfiltered` alone the rest is `precision`, with `routed`
// alone what lies before it is `precision`. The parts of a token add up to delta.
//
//   opd::mismatch m;                     // add() every micro-batch, merge() threads and ranks
//   m.add({.log_mu = …, .log_old = …, .log_p = …, .advantage = …, .mask = mask});
//   m.delta_abs_max, m.quantile(0.99), m.corr.k3(), m.train.contribution(true)
//
// On the host, in double. Counts and extremes are the same for any cut, sums to rounding. K1 and log-ratios are taken
// within ±80. Rows with a number that is none are counted in `bad` and not summed. KL figures alone miss what a
// recomputed log-prob does (VeXact figure 4): compare the contributions of r_train and r_rollout.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/estimators/k_forms.hpp"
#include "opd/view.hpp"

namespace opd {

/// Columns of a micro-batch, one drawn token a row. log_mu and log_old are needed, the others as the caller has them.
template <class T, class Id = std::int32_t>
struct mismatch_columns {
    vector_view<const T> log_mu;                          ///< (N) as rollout reported it
    vector_view<const T> log_old;                         ///< (N) the trainer's at the weights that drew
    vector_view<const T> log_p = {};                      ///< (N) now
    vector_view<const T> advantage = {};                  ///< (N), with log_p: for the contributions
    vector_view<const T> unfiltered = {}, routed = {};    ///< (N) for the parts
    vector_view<const Id> rollout_top = {}, old_top = {}; ///< (N) argmax ids of either side: both, or none
    row_mask<> mask = {};
};

/// Of one ratio, over tokens.
struct ratio_figures {
    index_t tokens = 0;
    double k1_sum = 0, k2_sum = 0, k3_sum = 0;
    index_t positive = 0, negative = 0;                ///< tokens by sign of A
    double positive_sum = 0, negative_sum = 0;         ///< of C(r)
    double positive_abs_sum = 0, negative_abs_sum = 0; ///< of |C(r)|

    double k1() const { return over(k1_sum, tokens); }
    double k2() const { return over(k2_sum, tokens); }
    double k3() const { return over(k3_sum, tokens); }
    /// Mean of C(r) = -(r - 1) A over the tokens with A > 0, or with A < 0; 0 of none.
    double contribution(bool of_positive) const {
        return of_positive ? over(positive_sum, positive) : over(negative_sum, negative);
    }
    /// Mean of |C(r)| likewise.
    double contribution_size(bool of_positive) const {
        return of_positive ? over(positive_abs_sum, positive) : over(negative_abs_sum, negative);
    }
    void add(double log_r) {
        ++tokens, k1_sum += k1::value(log_r), k2_sum += k2::value(log_r), k3_sum += k3::value(log_r);
    }
    void add(double log_r, double a) {
        const double c = -std::expm1(log_r) * a;
        if (a > 0) ++positive, positive_sum += c, positive_abs_sum += std::abs(c);
        if (a < 0) ++negative, negative_sum += c, negative_abs_sum += std::abs(c);
    }
    void merge(const ratio_figures& o) {
        tokens += o.tokens, k1_sum += o.k1_sum, k2_sum += o.k2_sum, k3_sum += o.k3_sum;
        positive += o.positive, negative += o.negative;
        positive_sum += o.positive_sum, negative_sum += o.negative_sum;
        positive_abs_sum += o.positive_abs_sum, negative_abs_sum += o.negative_abs_sum;
    }

private:
    static double over(double sum, index_t n) { return n > 0 ? sum / double(n) : 0; }
};

/// One cause's share of delta, over the tokens of which it is known.
struct mismatch_part {
    index_t tokens = 0;
    double sum = 0, abs_sum = 0, abs_max = 0;
    double mean() const { return tokens > 0 ? sum / double(tokens) : 0; }
    double abs_mean() const { return tokens > 0 ? abs_sum / double(tokens) : 0; }
    void add(double x) {
        const double size = std::abs(x);
        ++tokens, sum += x, abs_sum += size, abs_max = size > abs_max ? size : abs_max;
    }
    void merge(const mismatch_part& o) {
        tokens += o.tokens, sum += o.sum, abs_sum += o.abs_sum;
        abs_max = o.abs_max > abs_max ? o.abs_max : abs_max;
    }
};

/// The sums of all that was added; figures by member functions. Some 300 counters, whatever the number of tokens.
struct mismatch {
    /// |delta| by its float bits, eight bins to an octave from 2^-30 to 2^7; the first holds what is below.
    static constexpr int octaves = 37, bins = 8 * octaves + 1;

    mismatch_part delta = {};                          ///< of all tokens
    index_t exact = 0;                                 ///< tokens with delta == 0
    index_t bad = 0;                                   ///< kept rows with a log-prob that is none
    index_t compared = 0, flips = 0;                   ///< rows with both argmax ids, and those where they differ
    ratio_figures corr = {}, train = {}, rollout = {}; ///< of p_old/mu, p/p_old, p/mu
    mismatch_part filters = {}, precision = {}, routing = {};
    std::array<index_t, std::size_t(bins)> counts = {}; ///< of |delta|

    /// Throws invalid_input for columns of other sizes, one argmax without the other, an advantage without log p.
    template <class T, class Id>
    void add(const mismatch_columns<T, Id>& b) {
        const index_t n = b.log_mu.size;
        detail::check_vector("log_mu", b.log_mu, -1);
        detail::check_vector("log_old", b.log_old, n);
        detail::check_vector("mask", b.mask, n);
        const auto given = [&](const char* name, const auto& v) {
            if (v.data == nullptr) return false;
            detail::check_vector(name, v, n);
            return true;
        };
        const bool has_p = given("log_p", b.log_p), has_a = given("advantage", b.advantage);
        const bool has_unfiltered = given("unfiltered", b.unfiltered), has_routed = given("routed", b.routed);
        const bool has_tops = given("rollout_top", b.rollout_top);
        if (given("old_top", b.old_top) != has_tops)
            throw invalid_input("old_top", "and rollout_top are given together");
        if (has_a && !has_p) throw invalid_input("advantage", "needs log_p");
        for (index_t r = 0; r < n; ++r) {
            if (!b.mask.kept(r)) continue;
            const double mu = double(b.log_mu[r]), old = double(b.log_old[r]), p = has_p ? double(b.log_p[r]) : 0;
            const double raw = has_unfiltered ? double(b.unfiltered[r]) : 0, on = has_routed ? double(b.routed[r]) : 0;
            const double a = has_a ? double(b.advantage[r]) : 0;
            if (!is_log_prob(mu) || !is_log_prob(old) || !is_log_prob(p) || !is_log_prob(raw) || !is_log_prob(on) ||
                !detail::is_finite(a)) {
                ++bad;
                continue;
            }
            const double d = old - mu;
            delta.add(d), exact += d == 0, ++counts[std::size_t(bin_of(d))];
            corr.add(detail::within_80(d));
            if (has_tops) ++compared, flips += std::int64_t(b.rollout_top[r]) != std::int64_t(b.old_top[r]);
            if (has_p) {
                const double now = detail::within_80(p - old), all = detail::within_80(p - mu);
                train.add(now), rollout.add(all);
                if (has_a) train.add(now, a), rollout.add(all, a), corr.add(detail::within_80(d), a);
            }
            if (has_unfiltered) filters.add(raw - mu);
            if (has_routed) routing.add(old - on);
            if (has_unfiltered || has_routed) precision.add((has_routed ? on : old) - (has_unfiltered ? raw : mu));
        }
    }
    void merge(const mismatch& o) {
        delta.merge(o.delta), corr.merge(o.corr), train.merge(o.train), rollout.merge(o.rollout);
        filters.merge(o.filters), precision.merge(o.precision), routing.merge(o.routing);
        exact += o.exact, bad += o.bad, compared += o.compared, flips += o.flips;
        for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += o.counts[i];
    }
    /// The |delta| below which a share q of the tokens lies, off by at most 1/16 of itself; NaN of no tokens. Throws
    /// invalid_input for q not in [0, 1].
    double quantile(double q) const {
        if (!(q >= 0 && q <= 1)) throw invalid_input("q", "must lie in [0, 1]");
        if (delta.tokens == 0) return detail::quiet_nan<double>();
        index_t below = 0;
        int bin = 0, last = 0;
        for (; bin < bins; ++bin) {
            if (counts[std::size_t(bin)] == 0) continue;
            last = bin, below += counts[std::size_t(bin)];
            if (double(below) >= q * double(delta.tokens)) break;
        }
        return last == 0 ? 0 : std::ldexp(1 + ((last - 1) % 8 + 0.5) / 8, (last - 1) / 8 - 30);
    }
    /// Share of the compared rows whose argmax differs; 0 of none.
    double flip_share() const { return compared > 0 ? double(flips) / double(compared) : 0; }

private:
    static bool is_log_prob(double x) { return detail::is_finite(x) && !(x > 1e-3) && !(x < -9000); }
    static int bin_of(double d) {
        const auto bits = detail::bit_cast<std::uint32_t>(static_cast<float>(d)) & 0x7fffffffu;
        constexpr std::uint32_t least = 0x30800000u; // 2^-30
        if (bits < least) return 0;
        const std::uint32_t i = ((bits - least) >> 20) + 1;
        return i < std::uint32_t(bins) ? static_cast<int>(i) : bins - 1;
    }
};

} // namespace opd
