// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sampled reverse KL: the gradient of KL(p‖q) at a prefix from a few actions drawn from a behaviour policy mu.
//
// One rule covers every sampling design and every surrogate: entries a carry weights w with E[Σ w f(a)] = E_mu[f]; then
//
//   loss = Σ_a w loss_s(a; A)        c[a] = w c_s(a; A - b)        A = log q - log p (theta) or log q - log mu (old)
//
//   mc_reverse_kl        teacher::samples   m i.i.d. draws, w = 1/m                       AsyncOPD eq. 15
//     baseline: leave_one_out           b_i = mean_{j≠i} rho_j A_j                        Kool et al. 2019
//               self_normalised         b_i = Σ_{j≠i} rho_j A_j / Σ_{j≠i} rho_j
//               a single sample has none: b = 0, counted
//   weighted_reverse_kl  teacher::weighted  any design that states its weights; threshold(B) of draw.hpp is the default
//     baseline: exact_entries           b = Σ_exact p A / Σ_exact p, deterministic        this project
//
// Unbiased for the dense reverse KL gradient with unclipped_is and A_theta, at any staleness of mu. The reported value never
// uses the baseline. Shapes: ids, log mu, log q (N,m); a dense gradient (N,V), since every logit moves the normaliser.
// Repeated ids are legal and summed in sample order. log rho saturates at ±80, counted.
#pragma once

#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/advantages.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/teacher.hpp"
#include "opd/token.hpp"

namespace opd {

namespace detail {
inline namespace OPD_ISA {

inline constexpr double ratio_saturation = 80; ///< log rho stays within ±this

/// Whether the log-probs are numbers, and those of a token that can have been drawn, and what is frozen is finite.
OPD_HD inline bool is_drawn(const sampled_entry& x) {
    if (!is_finite(x.factor) || !is_finite(x.advantage)) return false;
    const bool numbers =
        !(is_nan(x.log_mu) || is_nan(x.log_q) || is_nan(x.log_prox) || is_nan(x.log_ref) || is_nan(x.weight));
    const bool placeholder = is_neg_inf(x.log_mu) || x.log_mu < -9000 || (x.log_q < -9000 && !is_neg_inf(x.log_q));
    return numbers && !(x.log_mu > 1e-3 || x.log_q > 1e-3) && !placeholder;
}

/// log p - log mu within ±ratio_saturation.
struct log_ratio_of {
    double value;
    bool saturated;
    OPD_HD explicit log_ratio_of(const sampled_entry& x) : value(x.log_p - x.log_mu), saturated(false) {
        const double bound = ratio_saturation;
        saturated = !(value >= -bound && value <= bound);
        value = value < -bound ? -bound : (value > bound ? bound : value);
    }
};

/// A token of weight w (1 for i.i.d. samples) into the diagnostics.
OPD_HD inline void count_token(diagnostics& d, const sampled_entry& x, double w, log_ratio_of ratio, double rho,
                               double a, unsigned flags) {
    const double l = ratio.value;
    ++d.tokens;
    d.certain_mu += x.log_mu == 0;
    d.ratio_sum += w * rho, d.ratio_square_sum += w * rho * rho;
    d.ratio_max = d.ratio_max < rho ? rho : d.ratio_max;
    d.k1_sum += -w * l, d.k2_sum += w * 0.5 * l * l, d.k3_sum += w * (rho - 1 - l);
    d.teacher_kl_sum += w * (x.log_mu - x.log_q);
    (a > 0 ? d.positive_advantage : (a < 0 ? d.negative_advantage : d.zero_advantage)) += 1;
    if (flags & token_flag::clipped) (a >= 0 ? d.clipped_positive : d.clipped_negative) += 1;
    d.truncated += (flags & token_flag::truncated) != 0;
    d.masked += (flags & token_flag::masked) != 0;
    d.saturated += ratio.saturated;
}

inline void check_advantage_clip(const char* name, double clip) {
    if (!is_finite(clip) || clip < 0) throw invalid_input(name, "must be positive and finite, or 0 for none");
}

/// Loss and c of m drawn tokens.
template <class Estimator>
OPD_HD entry_row sampled_row(const Estimator& estimator, sampled_entry* e, int m, entry_facts facts, diagnostics& d) {
    const auto& s = estimator.surrogate;
    auto baseline = estimator.baseline; // of this row
    const double clip = estimator.advantage_clip, age = facts.age, floor_at = facts.on_infinite.floor_at;
    entry_row out;
    const auto gain = [&](const sampled_entry& x) {
        if (facts.has_advantage) return x.advantage;
        const double a = estimator.advantage(x);
        return clip > 0 ? (a > clip ? clip : (a < -clip ? -clip : a)) : a;
    };
    for (int j = 0; j < m; ++j) {
        out.bad |= !is_drawn(e[j]);
        if (is_neg_inf(e[j].log_p)) e[j].log_p = -745; // p = 0: log p enters products with rho = e^-80 alone
        out.infinite |= is_neg_inf(e[j].log_q);
    }
    if (out.bad || !is_finite(facts.sequence_log_ratio)) return {.bad = true};
    if (out.infinite && facts.on_infinite.act != infinite::action::floor) {
        for (int j = 0; j < m; ++j) e[j].c = 0;
        return out;
    }
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        if (out.infinite && (is_neg_inf(x.log_q) || x.log_q < floor_at)) x.log_q = floor_at;
        baseline.add(x, ::exp(log_ratio_of(x).value), gain(x));
    }
    d.baseline_missing += decltype(baseline)::pairs && m == 1;
    double mean = 0, squares = 0; // of the draws' losses, Welford
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        const log_ratio_of ratio(x);
        const double rho = ::exp(ratio.value), a = gain(x), b = baseline.of(x, rho, a, m);
        token_in t{x.log_p, x.log_mu, x.log_prox, x.log_ref, x.log_q, ratio.value, a, age};
        if (facts.has_sequence) t.sequence_log_ratio = facts.sequence_log_ratio;
        t.row = facts.row, t.slot = x.slot;
        const token_out plain = s(t);
        t.advantage = a - b;
        const token_out with = b == 0 ? plain : s(t);
        if (x.keep) out.loss += x.weight * x.factor * plain.loss;
        x.c = x.keep ? x.weight * x.factor * with.c : 0;
        const double loss = x.keep ? x.factor * plain.loss : 0, off = loss - mean;
        mean += off / (j + 1);
        squares += off * (loss - mean);
        d.dropped += !x.keep;
        count_token(d, x, x.weight * m, ratio, rho, a, plain.flags);
    }
    if (!is_finite(out.loss)) out.bad = true;
    if (Estimator::takes == cache_kind::samples && m > 1 && !out.bad)
        ++d.variance_rows, d.loss_variance_sum += squares / (m - 1);
    return out;
}

} // namespace OPD_ISA

/// Whether the policies are policies, and of this cache; if not, one sentence says why.
template <class Surrogate, class Baseline, class Advantage, cache_kind Kind>
constexpr bool policies_fit() {
    if constexpr (!surrogate<Surrogate>)
        static_assert(surrogate<Surrogate>, "opd: a surrogate is a struct with `token_out operator()(const token_in&) "
                                            "const`; see docs/concepts/surrogate.md");
    else if constexpr (!advantage_policy<Advantage>)
        static_assert(advantage_policy<Advantage>,
                      "opd: an advantage is a struct with `double operator()(const sampled_entry&) const`: "
                      "advantage::theta, advantage::old or your own");
    else if constexpr (!baseline_policy<Baseline>)
        static_assert(baseline_policy<Baseline>, "opd: a baseline is a struct with pairs, reads, add and of: "
                                                 "baseline::none, leave_one_out, self_normalised, exact_entries or "
                                                 "your own; see opd/estimators/advantages.hpp");
    else if constexpr (!Baseline::reads(Kind))
        static_assert(Baseline::reads(Kind), "opd: this baseline does not read this cache: leave_one_out and "
                                             "self_normalised need i.i.d. teacher::samples, exact_entries needs "
                                             "teacher::weighted");
    else
        return true;
    return false;
}

} // namespace detail

/// Reverse KL from m i.i.d. samples of mu. See the head of this file.
template <class Surrogate = unclipped_is, class Baseline = opd::baseline::none, class Advantage = opd::advantage::theta>
struct mc_reverse_kl {
    static constexpr bool well_formed = detail::policies_fit<Surrogate, Baseline, Advantage, cache_kind::samples>();
    static constexpr cache_kind takes = cache_kind::samples;
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    Surrogate surrogate = {};
    Baseline baseline = {};
    Advantage advantage = {};
    double advantage_clip = 0; ///< A clipped to [-a, a]; 0: not

    OPD_HD OPD_INLINE entry_row row(sampled_entry* e, int m, entry_facts facts, diagnostics& d) const {
        return detail::sampled_row(*this, e, m, facts, d);
    }
    OPD_INLINE void validate() const { detail::check_advantage_clip("mc_reverse_kl.advantage_clip", advantage_clip); }
};

/// Reverse KL from weighted entries: threshold(B), head + tail, sampling without replacement, ….
template <class Surrogate = unclipped_is, class Baseline = opd::baseline::exact_entries,
          class Advantage = opd::advantage::theta>
struct weighted_reverse_kl {
    static constexpr bool well_formed = detail::policies_fit<Surrogate, Baseline, Advantage, cache_kind::weighted>();
    static constexpr cache_kind takes = cache_kind::weighted;
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    Surrogate surrogate = {};
    Baseline baseline = {};
    Advantage advantage = {};
    double advantage_clip = 0;

    OPD_HD OPD_INLINE entry_row row(sampled_entry* e, int m, entry_facts facts, diagnostics& d) const {
        return detail::sampled_row(*this, e, m, facts, d);
    }
    OPD_INLINE void validate() const {
        detail::check_advantage_clip("weighted_reverse_kl.advantage_clip", advantage_clip);
    }
};

} // namespace opd
