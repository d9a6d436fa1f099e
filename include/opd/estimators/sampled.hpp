// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences from drawn tokens: the gradient of KL(p‖q), or of any other divergence, at a prefix, from a few actions
// that a behaviour policy mu drew.
//
//   opd::evaluate(be, student::logits{z, dz}, teacher::samples{ids, log_mu, log_q}, mc{.surrogate = ppo_clip{}});
//
// One rule covers every sampling design, divergence and surrogate. Entries a carry weights w with
// E[Σ w f(a)] = E_mu[f]; then
//
//   c[a] = w c_s(a; A - b)        A = log q - log p for reverse KL, -f'(p/q) for Σ q f(p/q)        (advantages.hpp)
//
//   mc{D, surrogate, baseline}   D: a divergence, a shape or an advantage; reverse_kl if left out
//     on teacher::samples        m i.i.d. draws, w = 1/m                                  AsyncOPD eq. 15
//     on teacher::weighted       any design that states its weights                       threshold(B) of draw.hpp
//   sampled_forward_kl           c = -w q/mu, loss Σ w (q/mu) log(q/p)   RS-KD (arXiv 2503.16870); y ~ q: c = -1/m
//
// Surrogate c_s: surrogates.hpp. Baseline b: baselines.hpp. Weighting: w as drawn, or self-normalised,
// w_i / Σ_j w_j rho_j, which is consistent and not unbiased.
//
// With unclipped_is the gradient is unbiased for the dense gradient, at any staleness of mu and with any baseline. The
// loss with unclipped_is is Σ w rho f(r)/r, r = p/q, whose mean is the divergence. With another surrogate the loss is
// the surrogate's. The loss never uses the baseline.
//
// Shapes: ids, log mu, log q (N,m). The gradient is dense, (N,V), since every logit moves the normaliser. An id may be
// drawn several times; its entries are summed in sample order. log rho saturates at ±80, counted.
#pragma once

#include <cmath>
#include <concepts>
#include <type_traits>
#include <utility>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/advantages.hpp"
#include "opd/estimators/baselines.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/teacher.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {
inline namespace OPD_ISA {

inline constexpr double ratio_saturation = 80;  ///< log rho stays within ±this
inline constexpr double no_mass = 80 + 0x1p-24; ///< log mu - log p of a token with p = 0: just saturated

/// Whether the log-probs are numbers, and those of a token that can have been drawn, and what is frozen is finite.
OPD_HD inline bool is_drawn(const sampled_entry& x) {
    if (!is_finite(x.factor) || !is_finite(x.advantage) || !is_finite(x.outside)) return false;
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
    d.saturated += ratio.saturated || (flags & token_flag::saturated) != 0;
}

/// Whether a draw's loss is its advantage's: what it adds to the divergence, not what the surrogate says.
template <class Surrogate, class Advantage>
constexpr bool has_divergence_value() {
    if constexpr (requires(const Advantage a, const sampled_entry& x) { a.value(x); })
        return traits_of<Surrogate>().value == meaning::divergence;
    else
        return false;
}

/// Loss and c of m tokens of q, or of a mu that covers it.
OPD_HD inline entry_row forward_row(sampled_entry* e, int m, entry_facts facts, diagnostics& d) {
    entry_row out;
    for (int j = 0; j < m; ++j) {
        out.bad |= !is_drawn(e[j]);
        out.infinite |= is_neg_inf(e[j].log_p) && !is_neg_inf(e[j].log_q);
    }
    if (out.bad) return out;
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        const log_ratio_of ratio(x);
        const bool none = is_neg_inf(x.log_q);
        double log_p = x.log_p; // -inf where the row is infinite, and then floored
        if (out.infinite && log_p < facts.on_infinite.floor_at) log_p = facts.on_infinite.floor_at;
        const double share = none ? 0 : x.weight * x.factor * ::exp(within_80(x.log_q - x.log_mu));
        x.c = x.keep ? -share : 0;
        if (x.keep && !none) out.loss += share * (x.log_q - log_p);
        d.dropped += !x.keep;
        const double a = log_q_over(x.log_q, x.log_p);
        if (is_neg_inf(x.log_p)) x.log_p = x.log_mu - no_mass;
        if (none) x.log_q = facts.on_infinite.floor_at; // for the teacher's KL alone
        count_token(d, x, x.weight * m, ratio, ::exp(ratio.value), a, 0);
    }
    if (out.infinite && facts.on_infinite.act != infinite::action::floor) {
        out.loss = 0;
        for (int j = 0; j < m; ++j) e[j].c = 0;
    }
    return out;
}

/// What a draw adds to the divergence, over rho; in a row that is infinite because of p = 0, at p no less than the
/// floor.
template <class Advantage>
OPD_HD double value_of(const Advantage& advantage, const sampled_entry& x, bool floored, double floor_at) {
    if (!floored || x.log_p >= floor_at) return advantage.value(x);
    sampled_entry at = x;
    at.log_p = floor_at;
    return advantage.value(at);
}

/// Loss and c of m drawn tokens. The estimator has a surrogate, a baseline, a weighting, worth(), its advantage, and
/// values_divergence().
template <class Estimator>
OPD_HD entry_row sampled_row(const Estimator& estimator, sampled_entry* e, int m, entry_facts facts, diagnostics& d) {
    const auto& s = estimator.surrogate;
    const auto advantage = estimator.worth();
    auto baseline = estimator.baseline; // of this row
    const bool own_value = estimator.values_divergence() && !facts.has_advantage;
    const double floor_at = facts.on_infinite.floor_at;
    const bool teacher_zero = infinite_where_teacher_zero(advantage),
               student_zero = infinite_where_student_zero(advantage);
    if constexpr (requires { baseline.start(facts); }) baseline.start(facts);
    entry_row out;
    const auto gain = [&](const sampled_entry& x) { return facts.has_advantage ? x.advantage : advantage(x); };
    for (int j = 0; j < m; ++j) {
        out.bad |= !is_drawn(e[j]);
        out.infinite |= (teacher_zero && is_neg_inf(e[j].log_q)) ||
                        (student_zero && is_neg_inf(e[j].log_p) && !is_neg_inf(e[j].log_q));
        if (is_neg_inf(e[j].log_p)) e[j].log_p = e[j].log_mu - no_mass; // so that rho and q/p saturate together
    }
    if (out.bad || !is_finite(facts.sequence_log_ratio) || !is_finite(facts.baseline) || !is_finite(facts.mu_entropy))
        return {.bad = true};
    if (out.infinite && facts.on_infinite.act != infinite::action::floor) {
        for (int j = 0; j < m; ++j) e[j].c = 0;
        return out;
    }
    double mass = 0; // Σ w rho
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        if (out.infinite && teacher_zero && (is_neg_inf(x.log_q) || x.log_q < floor_at)) x.log_q = floor_at;
        const double rho = ::exp(log_ratio_of(x).value);
        mass += x.weight * rho;
        x.c = gain(x); // until c is known
        baseline.add(x, rho, x.c);
    }
    const double scale = estimator.weighting.of(mass);
    d.baseline_missing += decltype(baseline)::pairs && m == 1;
    double mean = 0, squares = 0; // of the draws' losses, Welford
    double largest = 0;           // of |c|
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        const log_ratio_of ratio(x);
        const double rho = ::exp(ratio.value), a = x.c, b = baseline.of(x, rho, a, m);
        token_in t{x.log_p, x.log_mu, x.log_prox, x.log_ref, x.log_q, ratio.value, a, facts.age};
        if (facts.has_sequence) t.sequence_log_ratio = facts.sequence_log_ratio;
        t.row = facts.row, t.slot = x.slot, t.mu_entropy = facts.mu_entropy;
        token_out plain = s(t);
        t.advantage = a - b;
        const token_out with = b == 0 ? plain : s(t);
        if constexpr (requires { advantage.value(x); })
            if (own_value) plain.loss = rho * value_of(advantage, x, out.infinite && student_zero, floor_at);
        const double weight = x.weight * scale * x.factor;
        if (x.keep) out.loss += weight * plain.loss;
        x.c = x.keep ? weight * with.c : 0;
        const double loss = x.keep ? x.factor * plain.loss : 0, off = loss - mean;
        mean += off / (j + 1);
        squares += off * (loss - mean);
        d.dropped += !x.keep;
        if (is_neg_inf(x.log_q)) x.log_q = floor_at; // for the teacher's KL alone: the loss was finite without it
        count_token(d, x, x.weight * m, ratio, rho, a, plain.flags);
        largest = largest < x.c ? x.c : (largest < -x.c ? -x.c : largest);
    }
    if (!is_finite(out.loss) || is_nan(largest)) out.bad = true;
    const double most = 1e37; // beyond float, as powers of p/q may be: no finite number to report or store
    if (out.loss > most || out.loss < -most || largest > most) {
        out.infinite = true, out.bad = false, out.loss = 0;
        for (int j = 0; j < m; ++j) e[j].c = 0;
        return out;
    }
    if (facts.iid && m > 1 && !out.bad) ++d.variance_rows, d.loss_variance_sum += squares / (m - 1);
    return out;
}

} // namespace OPD_ISA

/// What a token is worth, from a divergence, a shape or an advantage.
template <class Of>
OPD_HD OPD_INLINE constexpr auto worth_of(const Of& of) {
    if constexpr (std::is_same_v<Of, reverse_kl>)
        return opd::advantage::theta{};
    else if constexpr (divergence<Of>)
        return opd::advantage::of_divergence<Of>{of};
    else if constexpr (shape_policy<Of>)
        return opd::advantage::shaped<Of>{of, {}};
    else
        return of;
}
template <class Of>
using advantage_of = decltype(worth_of(std::declval<const Of&>()));

/// Whether the policies are policies; if not, one sentence says why.
template <class Of, class Surrogate, class Baseline>
constexpr bool policies_fit() {
    if constexpr (!surrogate<Surrogate>)
        static_assert(surrogate<Surrogate>, "opd: a surrogate is a struct with `token_out operator()(const token_in&) "
                                            "const`; see docs/concepts/surrogate.md");
    else if constexpr (reads_overlap<Of>)
        static_assert(!reads_overlap<Of>,
                      "opd: mc is of what a token is worth by itself; acceptance is of the whole row");
    else if constexpr (!divergence<Of> && !shape_policy<Of> && !advantage_policy<Of>)
        static_assert(advantage_policy<Of>,
                      "opd: mc is of a divergence such as reverse_kl{}, of a shape such as shape::clipped{}, or of an "
                      "advantage: a struct with `double operator()(const sampled_entry&) const`");
    else if constexpr (!baseline_policy<Baseline>)
        static_assert(baseline_policy<Baseline>, "opd: a baseline is a struct with pairs, reads, add and of: "
                                                 "baseline::none, leave_one_out, self_normalised, exact_entries or "
                                                 "your own; see opd/estimators/baselines.hpp");
    else if constexpr (requires { Surrogate::has_advantage; } &&
                       !(std::is_same_v<Of, reverse_kl> && std::is_same_v<Baseline, opd::baseline::none>))
        static_assert(std::is_same_v<Baseline, void>,
                      "opd: this surrogate is a loss of log p and log q alone: it has no advantage, and so neither "
                      "divergence nor baseline: mc{reverse_kl{}, differentiated<k2>{}, baseline::none{}}");
    else
        return true;
    return false;
}

/// What a surrogate makes of an advantage.
constexpr estimator_traits joined_traits(estimator_traits surrogate, estimator_traits advantage, bias weighting) {
    const bool lost = surrogate.descends == descent::none || surrogate.descends == descent::other;
    const bias mean = surrogate.mean > advantage.mean ? surrogate.mean : advantage.mean;
    const bool value = surrogate.value == meaning::divergence && advantage.value == meaning::divergence;
    return {weighting > mean ? weighting : mean, value ? meaning::value_estimate : meaning::surrogate,
            surrogate.exact_zero_at_equality && advantage.exact_zero_at_equality,
            lost ? surrogate.descends : advantage.descends};
}

template <class... Policies>
OPD_HD constexpr unsigned columns_of_all(const Policies&... p) {
    return (0u | ... | columns_of(p));
}
template <class... Policies>
OPD_INLINE void validate_all(const Policies&... p) {
    const auto one = [](const auto& x) {
        if constexpr (requires { x.validate(); }) x.validate();
    };
    (one(p), ...);
}

} // namespace detail

/// How the entries of a row are weighted.
namespace weighting {

/// w as the design says.
struct as_drawn {
    static constexpr bias own_mean = bias::unbiased;
    OPD_HD OPD_INLINE double of(double) const { return 1; }
};
/// w / Σ w rho: bounded, biased for few draws, right for many.
struct self_normalised {
    static constexpr bias own_mean = bias::consistent;
    OPD_HD OPD_INLINE double of(double sum_w_rho) const { return sum_w_rho > 0 ? 1 / sum_w_rho : 0; }
};

} // namespace weighting

/// A divergence from drawn tokens. `of`: a divergence, a shape (shapes.hpp) or an advantage (advantages.hpp). See the
/// head of this file.
template <class Of = reverse_kl, class Surrogate = unclipped_is, class Baseline = opd::baseline::exact_entries,
          class Weighting = opd::weighting::as_drawn>
struct mc {
    static constexpr bool well_formed = detail::policies_fit<Of, Surrogate, Baseline>();
    static constexpr cache_kind takes = cache_kind::samples;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples || kind == cache_kind::weighted; }
    static constexpr bool baseline_reads(cache_kind kind) { return Baseline::reads(kind); }
    Of of = {};
    Surrogate surrogate = {};
    Baseline baseline = {};
    Weighting weighting = {};

    using advantage = detail::advantage_of<Of>;
    OPD_HD OPD_INLINE constexpr advantage worth() const { return detail::worth_of(of); }
    /// Whether the loss is the divergence's: else it is the surrogate's.
    static constexpr bool own_value = detail::has_divergence_value<Surrogate, advantage>();
    OPD_HD static constexpr bool values_divergence() { return own_value; }
    static constexpr estimator_traits traits(law drawn) {
        if constexpr (requires { Surrogate::has_advantage; })
            return traits_of<Surrogate>(drawn);
        else
            return detail::joined_traits(traits_of<Surrogate>(drawn), traits_of<advantage>(drawn), Weighting::own_mean);
    }
    OPD_HD OPD_INLINE entry_row row(sampled_entry* e, int m, entry_facts facts, diagnostics& d) const {
        return detail::sampled_row(*this, e, m, facts, d);
    }
    OPD_HD constexpr bool infinite_where_teacher_zero() const { return detail::infinite_where_teacher_zero(worth()); }
    OPD_HD constexpr bool infinite_where_student_zero() const { return detail::infinite_where_student_zero(worth()); }
    OPD_HD constexpr unsigned reads_columns() const { return detail::columns_of_all(surrogate, baseline, worth()); }
    OPD_INLINE void validate() const { detail::validate_all(surrogate, baseline, worth()); }
};

/// Forward KL from the teacher's own draws, or from those of any mu that covers the teacher: loss Σ w (q/mu)
/// log(q/p), c = -w q/mu. For y ~ q, log_mu is log_q and c = -1/m, the gradient of cross-entropy on the draws.
/// Unbiased. mc{forward_kl{}} has the same mean and c = w (p/mu - q/mu), which vanishes at p = q.
struct sampled_forward_kl {
    static constexpr cache_kind takes = cache_kind::samples;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples || kind == cache_kind::weighted; }
    static constexpr estimator_traits traits(law) {
        return {.value = meaning::value_estimate, .exact_zero_at_equality = false, .descends = descent::forward};
    }
    OPD_HD static constexpr bool infinite_where_student_zero() { return true; }
    OPD_HD OPD_INLINE entry_row row(sampled_entry* e, int m, entry_facts facts, diagnostics& d) const {
        return detail::forward_row(e, m, facts, d);
    }
};

/// An estimator that descends something else than its name says (descent::other), accepted: score_function on stale
/// samples, advantage::old, a shape that is not monotone.
template <class Estimator>
struct accept_bias : Estimator {
    static constexpr estimator_traits traits(law drawn) {
        estimator_traits t = Estimator::traits(drawn);
        if (t.descends == descent::other) t.descends = descent::outside;
        return t;
    }
};
template <class Estimator>
accept_bias(Estimator) -> accept_bias<Estimator>;

/// Lightning OPD (eq. 4, alg. 1): -clip(A, ±a) log p on samples of a fixed reference policy, no ratio. Biased once
/// the student has left that policy; it carries the acceptance.
constexpr auto lightning(double clip) {
    return accept_bias<mc<shape::clipped, score_function>>{{shape::clipped{clip}}};
}
/// AsyncOPD appendix F: Monte Carlo with several draws and no correction for their staleness.
constexpr auto uncorrected_mc() { return accept_bias<mc<reverse_kl, score_function>>{}; }

} // namespace opd
