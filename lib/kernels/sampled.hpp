// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Caches of drawn tokens, as C++ has them, and what is chosen at run time of their estimators.
#pragma once

#include "support.hpp"

namespace opd_c::kernel {

opd::result sampled_in_halves(const call& c);

/// any_sampled of tokens whose law is known at run time: the C++ call reads it from the cache's type.
struct sampled_under : opd::any_sampled {
    opd::law drawn_under = opd::law::stale;

    template <class Cache>
    void validate_cache(const Cache& c) const {
        if (drawn_under == opd::law::on_policy)
            opd::any_sampled::validate_cache(opd::teacher::on_policy<Cache>{c});
        else if (drawn_under == opd::law::teacher)
            opd::any_sampled::validate_cache(opd::teacher::of_teacher<Cache>{c});
        else
            opd::any_sampled::validate_cache(c);
    }
};
inline sampled_under sampled_estimator_of(const opd_estimator& e, const opd_teacher& t) {
    namespace choice = opd::choice;
    sampled_under to;
    to.of = {named("estimator.of", choice::objectives, e.of, "reverse_kl"), e.a, e.b};
    opd::any_surrogate& s = to.surrogate;
    s.which = named("estimator.surrogate", choice::surrogates, e.surrogate, "unclipped_is");
    if (e.low != 0 || e.high != 0) s.low = e.low, s.high = e.high;
    s.dual = e.dual, s.cap = e.cap;
    s.over = e.mask_over_cap ? opd::over_cap::mask : opd::over_cap::truncate;
    s.estr_tau = e.estr_tau, s.estr_epsilon = e.estr_epsilon;
    const bool plain = !s.has_advantage(); // a loss of log p and log q alone takes no baseline
    to.baseline.which = named("estimator.baseline", choice::baselines, e.baseline, plain ? "none" : "exact_entries");
    to.weighting.self_normalised = e.self_normalised != 0;
    to.accept_bias = e.accept_bias != 0;
    to.drawn_under = one_of("teacher.law", t.law, {opd::law::stale, opd::law::on_policy, opd::law::teacher});
    return to;
}

/// What both caches of drawn tokens have.
template <class L, class Cache>
void fill(Cache& to, const opd_teacher& t) {
    to.ids = id_matrix(0, "teacher.ids", t.ids);
    to.log_mu = matrix<const L>("teacher.log_mu", t.log_mu), to.log_q = matrix<const L>("teacher.log_q", t.log_q);
    to.log_prox = matrix<const L>("teacher.log_prox", t.log_prox);
    to.log_ref = matrix<const L>("teacher.log_ref", t.log_ref);
    to.advantage = matrix<const L>("teacher.advantage", t.advantage);
    to.baseline = vector<const L>("teacher.baseline", t.baseline);
    to.mu_entropy = vector<const L>("teacher.mu_entropy", t.mu_entropy);
    to.rollout.drawn_with = {temperature_of(t.drawn_temperature), t.drawn_top_k,
                             static_cast<float>(or_default(t.drawn_top_p, 1.0)), static_cast<float>(t.drawn_min_p)};
    to.rollout.mode = t.raw_logprobs ? opd::logprob_mode::raw : opd::logprob_mode::processed;
    to.rollout.log_norm = vector<const L>("teacher.log_norm", t.log_norm);
}

/// body(cache) with the caller's tokens, under the wrappers that it names.
template <class L, class Cache, class Body>
opd::result with_wrappers(const opd_teacher& t, index_t vocab, const Cache& cache, Body&& body) {
    if (t.kept_ids == nullptr) {
        if (t.missing_mu) return body(opd::teacher::missing_mu{cache});
        return body(cache);
    }
    if (t.missing_mu) throw opd::unsupported("opd: teacher.missing_mu: this library has it without kept sets alone");
    opd::teacher::on_kept_sets<Cache, std::int64_t> sets;
    static_cast<Cache&>(sets) = cache;
    sets.kept_ids = id_vector(1, "teacher.kept_ids", t.kept_ids);
    sets.kept_offsets = offsets("teacher.kept_offsets", t.kept_offsets);
    sets.log_kept_q = vector<const L>("teacher.log_kept_q", t.log_kept_q);
    sets.widest = widest_of(t, vocab);
    return body(sets);
}
template <class L, class Body>
opd::result with_drawn(const opd_teacher& t, index_t vocab, Body&& body) {
    if (t.kind == OPD_SAMPLES) {
        opd::teacher::samples<std::int64_t, L, where> to;
        fill<L>(to, t);
        return with_wrappers<L>(t, vocab, to, body);
    }
    opd::teacher::weighted<std::int64_t, L, where> to;
    fill<L>(to, t);
    to.weight = matrix<const L>("teacher.weight", t.weight);
    to.exact = flags("teacher.exact", t.exact);
    to.log_tail_mu = vector<const double>("teacher.log_tail_mu", t.log_tail_mu);
    return with_wrappers<L>(t, vocab, to, body);
}

template <class L, class Student>
opd::result sampled_of_student(const call& c, const Student& s) {
    return with_drawn<L>(c.teacher, vocab_of(c.student), [&](const auto& t) {
        const auto run = [&](const auto& of) {
            return with_selector(c.estimator, of, [&](const auto& e) { return c.run(s, t, e); });
        };
        if (c.what == form::sampled_forward_kl) return run(opd::sampled_forward_kl{});
        return run(sampled_estimator_of(c.estimator, c.teacher));
    });
}
template <class Z>
opd::result sampled_of(const call& c) {
    return sampled_of_student<log_of<Z>>(c, logits_of<Z, Z>(c.student));
}

} // namespace opd_c::kernel
