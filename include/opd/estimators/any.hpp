// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Estimators chosen at run time, from a flag or a configuration file. any_sampled is mc whose objective, surrogate,
// baseline and weighting are each one of the library's by a switch an entry. One type, so that a trainer instantiates
// its rows once for each kind of cache; the same text as the static form, and the same bits. any_dense is a
// divergence on teacher::dense, chosen once a call: rows of V entries have no time for a switch. any_tail_bucket and
// any_partial are the estimators of a support.
//
//   any_sampled e{.of = {choice::objective::clipped, 5}, .surrogate = {choice::surrogate::ppo_clip}};
//   e.of.which = *choice::find(choice::objectives, "total_variation");
//   any_dense d{*choice::find(choice::divergences, "jsd"), 0.3, 0.3};
//   auto r = evaluate(be, student, teacher, d, env);
//
// Names and what each is: the tables choice::objectives, choice::surrogates, choice::baselines, choice::divergences,
// choice::selectors. What does not compile in the static form is refused by the call here, with invalid_input and the
// same sentence: no signal, another descent without accept_bias, a baseline that does not read the cache, a missing
// column.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string_view>

#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/correction_rules.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/selectors.hpp"
#include "opd/estimators/support.hpp"
#include "opd/teacher.hpp"
#include "opd/traits.hpp"

// Each choice once: its name, what it is, what a user reads of it. a, b: the parameters that a line names. To add one
// is to add its line.
// clang-format off
#define OPD_DIVERGENCES(X)                                                                \
    X(reverse_kl, (reverse_kl{}), "KL(p||q): A = log q - log p")                          \
    X(forward_kl, (forward_kl{}), "KL(q||p)")                                             \
    X(jsd, (jsd{a, b}), "generalised Jensen-Shannon, weights a, b")                       \
    X(skew_forward_kl, (skew_forward_kl{a}), "KL(q || a q + (1-a) p)")                    \
    X(skew_reverse_kl, (skew_reverse_kl{a}), "KL(p || (1-a) q + a p)")                    \
    X(total_variation, (total_variation{}), "half the sum of |p - q|: A = sign(q - p)/2") \
    X(alpha_divergence, (alpha_divergence{a}), "(sum p^a q^(1-a) - 1)/(a(a-1))")          \
    X(chi_squared, (chi_squared{}), "sum p^2/q - 1")
// of the whole row, which drawn tokens do not say
#define OPD_ROW_DIVERGENCES(X)             \
    X(acceptance, (acceptance{}), "-log sum min(p, q): of a drafter p and its target q (LK)")
// of drawn tokens alone
#define OPD_ADVANTAGES(X)                                                                   \
    X(clipped, (advantage::shaped<shape::clipped>{{a}, {}}), "reverse KL, A within +-a: linear in p/q beyond e^+-a") \
    X(mixed, (advantage::shaped<shape::mixed>{{a}, {}}), "A = log(a q/p + 1-a): TROPD, TOP-D")                       \
    X(box_cox, (advantage::shaped<shape::box_cox>{{a}, {}}), "A = ((q/p)^a - 1)/a: alpha divergence at 1-a")         \
    X(scaled, (advantage::shaped<shape::scaled>{{a}, {}}), "a KL(p||q)")                                             \
    X(band, (advantage::shaped<shape::band>{{a}, {}}), "A = 0 beyond +-a: no divergence, needs accept_bias")         \
    X(old, (advantage::old{}), "A = log q - log mu: rewards drifting from mu, needs accept_bias on stale tokens")    \
    X(extrapolated, (advantage::extrapolated{a}), "KL to the tilted teacher q^a p_ref^(1-a): G-OPD, ExOPD")          \
    X(outside, (advantage::outside{}), "the cache's advantage alone")                                                \
    X(with_outside, (advantage::mixed{a, b}), "a times the cache's advantage + b (log q - log p)")                   \
    X(k1_reward, (advantage::reward<k1>{}), "-k1 as a detached reward: KL(p||q)")                                    \
    X(k2_reward, (advantage::reward<k2>{}), "-k2 as a detached reward: needs accept_bias")                           \
    X(k3_reward, (advantage::reward<k3>{}), "-k3 as a detached reward: KL(p||q) - KL(q||p)")
#define OPD_SURROGATES(X)                                                                                                \
    X(unclipped_is, (unclipped_is{}), "-rho A: unbiased at any staleness")                                               \
    X(score_function, (score_function{}), "-A log p: for the student's own tokens")                                      \
    X(truncated_is, (truncated_is{cap}), "-min(rho, cap) A log p: CISPO with a raw bound")                               \
    X(cispo, (cispo{low, high}), "-clip(rho) A log p")                                                                   \
    X(ppo_clip, (ppo_clip{low, high, dual}), "-min(rho A, clip(rho) A), dual clip")                                      \
    X(decoupled_ppo, (decoupled_ppo{low, high, cap, over}), "PPO against p_prox, weighted by p_prox/mu; TIS with a cap") \
    X(a3po, (a3po{low, high, cap, over}), "the same, p_prox between mu and p by the token's age")                        \
    X(gspo, (gspo{low, high}), "PPO on the sequence's ratio")                                                            \
    X(k1, (differentiated<k1>{}), "log(p/q) differentiated: no signal")                                                  \
    X(k2, (differentiated<k2>{}), "log(q/p)^2/2 differentiated: KL(p||q) on the student's own tokens")                   \
    X(k3, (differentiated<k3>{}), "q/p - 1 - log(q/p) differentiated: KL(q||p) on the student's own tokens")             \
    X(k1_ratio, (differentiated<k1, true>{}), "the same times rho: no signal")                                           \
    X(k2_ratio, (differentiated<k2, true>{}), "the same times rho: KL(p||q)")                                            \
    X(k3_ratio, (differentiated<k3, true>{}), "the same times rho: KL(q||p)")
#define OPD_BASELINES(X)                                                           \
    X(none, (baseline::none{}), "0")                                               \
    X(exact_entries, (of_row.exact), "mean of A over the certain entries")         \
    X(leave_one_out, (of_row.others), "mean of rho A over the row's other draws")  \
    X(self_normalised, (of_row.normalised), "likewise, over the sum of their rho") \
    X(minimum_variance, (of_row.least), "likewise, weighted by (rho (1-p))^2")     \
    X(value, (of_row.whole), "sum of p A over the certain entries")                \
    X(given, (of_row.told), "the cache's")
// and eopd, which mixes a weighted_sum
#define OPD_SELECTORS(X)                                                       \
    X(all, (selector::all{}), "every row as it is")                                                                    \
    X(tip, (selector::tip{a, b}), "rows with H(p) >= a nats, or a loss of at least b (TIP)")                           \
    X(prefix, (selector::prefix{a}), "the first a tokens of each sequence")                                            \
    X(agreed, (selector::agreed{a}), "rows whose overlap of p and q is at least a: dense rows, renormalised supports") \
    X(band, (selector::band{a}), "rows with |log(p/mu)| <= a: drawn tokens")
#define OPD_ENUMERATOR(name, value, says) name,
#define OPD_CASE(name, value, says) \
    case kind::name:                \
        return f value;
// clang-format on

namespace opd {

namespace choice {

/// What mc and dense take, by number: divergences, those of a row, advantages. `find` gives the number of a name.
enum class objective {
    OPD_DIVERGENCES(OPD_ENUMERATOR) OPD_ROW_DIVERGENCES(OPD_ENUMERATOR) OPD_ADVANTAGES(OPD_ENUMERATOR)
};
/// By number: how a drawn token's loss is bounded.
enum class surrogate { OPD_SURROGATES(OPD_ENUMERATOR) };
/// By number: which rows count. `eopd` chooses the weights of a weighted_sum as well.
enum class selector { OPD_SELECTORS(OPD_ENUMERATOR) eopd };
/// By number: what is subtracted from an advantage.
enum class baseline { OPD_BASELINES(OPD_ENUMERATOR) };

/// A line of a table: what a user types, what it is.
template <class Kind>
struct name {
    std::string_view text;
    Kind which;
    std::string_view says;
};

#define OPD_LINE(name, value, says) {#name, kind::name, says},
/// What drawn tokens take.
inline constexpr auto objectives = [] {
    using kind = objective;
    return std::to_array<name<kind>>({OPD_DIVERGENCES(OPD_LINE) OPD_ADVANTAGES(OPD_LINE)});
}();
/// What a dense cache takes.
inline constexpr auto divergences = [] {
    using kind = objective;
    return std::to_array<name<kind>>({OPD_DIVERGENCES(OPD_LINE) OPD_ROW_DIVERGENCES(OPD_LINE)});
}();
/// What mc takes as its surrogate.
inline constexpr auto surrogates = [] {
    using kind = surrogate;
    return std::to_array<name<kind>>({OPD_SURROGATES(OPD_LINE)});
}();
/// What mc takes as its baseline; each is for the caches that its `reads` names.
inline constexpr auto baselines = [] {
    using kind = baseline;
    return std::to_array<name<kind>>({OPD_BASELINES(OPD_LINE)});
}();
/// What selected{…} takes.
inline constexpr auto selectors = [] {
    using kind = selector;
    return std::to_array<name<kind>>({OPD_SELECTORS(OPD_LINE){
        "eopd", kind::eopd,
        "b KL(q||p) beside KL(p||q) where H(q) > a nats (EOPD): dense rows, renormalised supports"}});
}();
#undef OPD_LINE
/// Whether any_dense takes it; else it is an advantage, for any_sampled alone.
constexpr bool is_divergence(objective o) {
    return std::ranges::any_of(divergences, [o](const auto& line) { return line.which == o; });
}

/// What a line's text stands for; of any range of lines.
template <class Table>
constexpr auto find(const Table& table, std::string_view text) -> std::optional<decltype(std::begin(table)->which)> {
    for (const auto& line : table)
        if (line.text == text) return line.which;
    return std::nullopt;
}

} // namespace choice

/// A divergence of the table choice::divergences. a, b: the parameters that its line names. On teacher::dense of the
/// CPU an estimator like any other, with the bits of the static form; on other backends by visit, once a call.
struct any_dense {
    static constexpr bool chosen_at_run_time = true;
    choice::objective which = choice::objective::reverse_kl;
    double a = 0.5, b = 0.5;

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::objective;
        switch (which) {
            OPD_DIVERGENCES(OPD_CASE)
            OPD_ROW_DIVERGENCES(OPD_CASE)
        default:
            return f(reverse_kl{}); // not reached: refused by validate
        }
    }
    template <class F>
    F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return visit([&](const auto& d) -> F { return d.term(r, e); });
    }
    template <class F>
    F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return visit([&](const auto& d) -> F { return d.c(r, e); });
    }
    OPD_HD bool infinite_where_teacher_zero() const { return infinite_at().teacher_zero; }
    OPD_HD bool infinite_where_student_zero() const { return infinite_at().student_zero; }
    OPD_HD detail::infinite_zeros infinite_at() const {
        return visit([](const auto& d) -> detail::infinite_zeros {
            return {detail::infinite_where_teacher_zero(d), detail::infinite_where_student_zero(d)};
        });
    }
    OPD_HD bool infinite_where_disjoint() const {
        return visit([](const auto& d) -> bool { return detail::infinite_where_disjoint(d); });
    }
    /// Throws unless it is a divergence with the parameters that it takes.
    void validate() const {
        if (!choice::is_divergence(which)) throw invalid_input("any_dense.which", "is no divergence of dense logits");
        visit([](const auto& d) { detail::validate_all(d); });
    }
};

namespace detail {
/// f of what a divergence makes of a token.
template <class F>
struct of_worth {
    const F& f;
    OPD_CALLS_EITHER
    template <class D>
    OPD_HD constexpr auto operator()(const D& divergence) const {
        if constexpr (reads_overlap<D>)
            return f(advantage::theta{}); // not reached: refused by validate
        else
            return f(worth_of(divergence));
    }
};
} // namespace detail

/// An advantage of the table choice::objectives. a, b: the parameters that its line names.
struct any_objective {
    choice::objective which = choice::objective::reverse_kl;
    double a = 1, b = 1;

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::objective;
        switch (which) {
            OPD_ADVANTAGES(OPD_CASE)
        default:
            return any_dense{which, a, b}.visit(detail::of_worth<F>{f});
        }
    }
    OPD_HD double operator()(const sampled_entry& x) const {
        return visit([&](const auto& p) -> double { return p(x); });
    }
    OPD_HD double value(const sampled_entry& x) const {
        return visit([&](const auto& p) -> double {
            if constexpr (requires { p.value(x); })
                return p.value(x);
            else
                return 0;
        });
    }
    OPD_HD bool has_value() const {
        return visit([](const auto& p) -> bool {
            return requires(const sampled_entry& x) { p.value(x); };
        });
    }
    OPD_HD bool infinite_where_teacher_zero() const { return infinite_at().teacher_zero; }
    OPD_HD bool infinite_where_student_zero() const { return infinite_at().student_zero; }
    OPD_HD detail::infinite_zeros infinite_at() const {
        return visit([](const auto& p) -> detail::infinite_zeros {
            return {detail::infinite_where_teacher_zero(p), detail::infinite_where_student_zero(p)};
        });
    }
    OPD_HD unsigned reads_columns() const {
        return visit([](const auto& p) -> unsigned { return detail::columns_of(p); });
    }
    estimator_traits traits_under(law drawn) const {
        return visit([&](const auto& p) { return traits_of<std::remove_cvref_t<decltype(p)>>(drawn); });
    }
    void validate() const {
        if (which == choice::objective::acceptance)
            throw invalid_input("any_objective.which", "acceptance is of the whole row, not of a token");
        visit([](const auto& p) { detail::validate_all(p); });
    }
};

/// A surrogate of the table choice::surrogates; with estr_tau > 0 on the tokens that ESTR keeps; under a correction of
/// training-inference mismatch, which correct.active says.
struct any_surrogate {
    choice::surrogate which = choice::surrogate::unclipped_is;
    double low = 0.2, high = 0.2, dual = 0;
    double cap = 0;
    over_cap over = over_cap::truncate;
    double estr_tau = 0, estr_epsilon = 0;
    correction correct = {};

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::surrogate;
        switch (which) {
            OPD_SURROGATES(OPD_CASE)
        default:
            return f(unclipped_is{});
        }
    }
    OPD_HD token_out operator()(const token_in& x) const {
        token_in moved{};
        const bool by_old = correct.active && correct.old == old_policy::recompute;
        if (by_old) moved = detail::against_old(x);
        const token_in& seen = by_old ? moved : x;
        const token_out out = visit([&](const auto& s) -> token_out {
            return estr_tau > 0 ? estr<std::remove_cvref_t<decltype(s)>>{estr_tau, estr_epsilon, s}(seen) : s(seen);
        });
        return correct.active ? correct.finish(x, out) : out;
    }
    OPD_HD bool has_advantage() const {
        return visit([](const auto& s) -> bool {
            return !requires { s.has_advantage; };
        });
    }
    OPD_HD unsigned reads_columns() const {
        return visit([](const auto& s) -> unsigned { return detail::columns_of(s); }) |
               (estr_tau > 0 ? column::mu_entropy : 0) | correct.reads_columns();
    }
    estimator_traits traits_under(law drawn) const {
        const estimator_traits t = visit([&](const auto& s) {
            using S = std::remove_cvref_t<decltype(s)>;
            return estr_tau > 0 ? traits_of<estr<S>>(drawn) : traits_of<S>(drawn);
        });
        return correct.traits_under(drawn, t, which != choice::surrogate::score_function);
    }
    void validate() const {
        visit([](const auto& s) { detail::validate_all(s); });
        correct.validate();
        if (correct.active &&
            (!has_advantage() || which == choice::surrogate::decoupled_ppo || which == choice::surrogate::a3po))
            throw invalid_input("any_surrogate.correct", "corrects a surrogate of p/mu with an advantage");
        if (estr_tau != 0 || estr_epsilon != 0) estr<>{estr_tau, estr_epsilon}.validate();
    }
};

/// A baseline of the table choice::baselines.
struct any_baseline {
    static constexpr bool pairs = false; // counted by `starved`
    static constexpr bool reads(cache_kind) { return true; }
    choice::baseline which = choice::baseline::exact_entries;

    struct sums {
        baseline::exact_entries exact = {};
        baseline::leave_one_out others = {};
        baseline::self_normalised normalised = {};
        baseline::minimum_variance least = {};
        baseline::value whole = {};
        baseline::given told = {};
    } of_row = {};

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::baseline;
        switch (which) {
            OPD_BASELINES(OPD_CASE)
        default:
            return f(baseline::none{});
        }
    }
    bool reads_now(cache_kind kind) const {
        return visit([&](const auto& b) -> bool { return std::remove_cvref_t<decltype(b)>::reads(kind); });
    }
    OPD_HD bool pairs_now() const {
        return visit([](const auto& b) -> bool { return std::remove_cvref_t<decltype(b)>::pairs; });
    }
    OPD_HD unsigned reads_columns() const { return which == choice::baseline::given ? column::baseline : 0; }
    OPD_HD void start(const entry_facts& facts) { of_row.told.start(facts); }
    OPD_HD void add(const sampled_entry& x, double rho, double a) {
        switch (which) {
        case choice::baseline::exact_entries:
            return of_row.exact.add(x, rho, a);
        case choice::baseline::leave_one_out:
            return of_row.others.add(x, rho, a);
        case choice::baseline::self_normalised:
            return of_row.normalised.add(x, rho, a);
        case choice::baseline::minimum_variance:
            return of_row.least.add(x, rho, a);
        case choice::baseline::value:
            return of_row.whole.add(x, rho, a);
        default:
            return;
        }
    }
    OPD_HD double of(const sampled_entry& x, double rho, double a, int m) const {
        return visit([&](const auto& b) -> double { return b.of(x, rho, a, m); });
    }
};

/// Entry weights as they are, or divided by Σ w rho of their row (which biases, by O(1/m)).
struct any_weighting {
    bool self_normalised = false;
    OPD_HD double of(double sum_w_rho) const {
        return self_normalised ? weighting::self_normalised{}.of(sum_w_rho) : 1;
    }
};

/// A selector of the table choice::selectors, but eopd, which has a weighted_sum to mix: selected{estimator,
/// any_selector{…}}.
struct any_selector {
    choice::selector which = choice::selector::all;
    double a = 0, b = 0;

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::selector;
        switch (which) {
            OPD_SELECTORS(OPD_CASE)
        default:
            return f(selector::all{});
        }
    }
    OPD_HD unsigned reads() const {
        return visit([](const auto& s) -> unsigned { return s.reads(); });
    }
    OPD_HD double operator()(const row_facts& facts) const {
        return visit([&](const auto& s) -> double { return s(facts); });
    }
    void validate() const {
        detail::refuse_selector(which == choice::selector::eopd,
                                "eopd: mixes a weighted_sum; use opd::eopd(tau, b) or selector::eopd");
        visit([](const auto& s) {
            if constexpr (requires { s.validate(); }) s.validate();
        });
    }
    /// Whether it fits rows of which these facts are known: fact::of_dense, of_tokens, of_buckets.
    void validate_for(unsigned known) const { detail::refuse_unknown_facts(reads(), known); }
};

/// tail_bucket of a divergence that is chosen at run time.
struct any_tail_bucket {
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr bool reads_tail = true;
    static constexpr estimator_traits traits(law) { return {.mean = bias::biased}; }
    any_dense on_buckets = {};

    OPD_HD entry_row row(support_entries& s, entry_facts facts, diagnostics& d) const {
        return on_buckets.visit([&](const auto& divergence) { return tail_bucket{divergence}.row(s, facts, d); });
    }
    OPD_HD bool infinite_where_teacher_zero() const { return on_buckets.infinite_where_teacher_zero(); }
    OPD_HD bool infinite_where_student_zero() const { return on_buckets.infinite_where_student_zero(); }
    OPD_HD bool infinite_where_disjoint() const { return on_buckets.infinite_where_disjoint(); }
    void validate() const { on_buckets.validate(); }
};

namespace choice {
/// Sums over a support without a bucket for the rest.
enum class partial { generalised, truncated_biased, reweighted };
} // namespace choice

/// generalised or truncated_biased of a divergence, or reweighted, chosen at run time. What the static form refuses
/// to compile, the call refuses: a divergence that `which` does not take.
struct any_partial {
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr estimator_traits traits(law) { return {bias::biased, meaning::surrogate, false}; }
    choice::partial which = choice::partial::generalised;
    any_dense of = {};

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::objective;
        if (which == choice::partial::reweighted) return f(opd::reweighted{});
        if (which == choice::partial::truncated_biased)
            return of.which == kind::forward_kl ? f(truncated_biased{forward_kl{}}) : f(truncated_biased{reverse_kl{}});
        return of.visit([&]<class D>(const D& d) {
            if constexpr (refinable_divergence<D> || std::is_same_v<D, total_variation>)
                return f(generalised{d});
            else
                return f(opd::reweighted{}); // not reached: refused by validate
        });
    }
    OPD_HD entry_row row(support_entries& s, entry_facts facts, diagnostics& d) const {
        return visit([&](const auto& e) { return e.row(s, facts, d); });
    }
    OPD_HD bool infinite_where_teacher_zero() const { return infinite_at().teacher_zero; }
    OPD_HD bool infinite_where_student_zero() const { return infinite_at().student_zero; }
    OPD_HD detail::infinite_zeros infinite_at() const {
        return visit([](const auto& e) -> detail::infinite_zeros {
            return {detail::infinite_where_teacher_zero(e), detail::infinite_where_student_zero(e)};
        });
    }
    OPD_HD unsigned reads_columns() const {
        return visit([](const auto& e) -> unsigned { return detail::columns_of(e); });
    }
    void validate() const {
        using kind = choice::objective;
        of.validate();
        const bool kl = of.which == kind::reverse_kl || of.which == kind::forward_kl;
        if (which == choice::partial::truncated_biased && !kl)
            throw invalid_input("any_partial.of", "truncated_biased is of reverse_kl or forward_kl, the two that "
                                                  "trainers ship");
        if (which == choice::partial::reweighted && of.which != kind::reverse_kl)
            throw invalid_input("any_partial.of", "reweighted is of reverse_kl");
        if (which == choice::partial::generalised && of.which == kind::acceptance)
            throw invalid_input("any_partial.of", "acceptance is no sum over the support's ids");
    }
    template <class Teacher>
    void validate_cache(const Teacher& t) const {
        if (which == choice::partial::reweighted) opd::reweighted{}.validate_cache(t);
    }
};

/// mc, chosen at run time. See the head of this file.
struct any_sampled {
    static constexpr cache_kind takes = cache_kind::samples;
    static constexpr bool reads(cache_kind kind) { return mc<>::reads(kind); }
    any_objective of = {};
    any_surrogate surrogate = {};
    any_baseline baseline = {};
    any_weighting weighting = {};
    bool accept_bias = false;

    OPD_HD const any_objective& worth() const { return of; }
    OPD_HD bool values_divergence() const {
        return surrogate.which == choice::surrogate::unclipped_is && surrogate.estr_tau == 0 &&
               !surrogate.correct.active && of.has_value();
    }
    OPD_HD entry_row row(sampled_entry* e, int m, entry_facts facts, diagnostics& d) const {
        d.baseline_missing += m == 1 && baseline.pairs_now();
        return detail::sampled_row(*this, e, m, facts, d);
    }
    OPD_HD bool infinite_where_teacher_zero() const { return of.infinite_where_teacher_zero(); }
    OPD_HD bool infinite_where_student_zero() const { return of.infinite_where_student_zero(); }
    OPD_HD unsigned reads_columns() const { return detail::columns_of_all(of, surrogate, baseline); }
    estimator_traits traits_under(law drawn) const {
        const estimator_traits s = surrogate.traits_under(drawn);
        if (!surrogate.has_advantage()) return s;
        return detail::joined_traits(s, of.traits_under(drawn),
                                     weighting.self_normalised ? bias::consistent : bias::unbiased);
    }
    void validate() const { detail::validate_all(of, surrogate); }

    /// Whether it fits this cache: what the static form refuses to compile.
    template <class Cache>
    void validate_cache(const Cache&) const {
        if (!baseline.reads_now(Cache::kind))
            throw invalid_input("baseline",
                                "this baseline does not read this cache: leave_one_out, self_normalised and "
                                "minimum_variance need i.i.d. teacher::samples, value needs teacher::weighted");
        if (!surrogate.has_advantage() &&
            !(of.which == choice::objective::reverse_kl && baseline.which == choice::baseline::none))
            throw invalid_input("surrogate",
                                "this surrogate is a loss of log p and log q alone: it has no advantage, and so "
                                "neither divergence nor baseline");
        const descent d = traits_under(law_of<Cache>()).descends;
        if (d == descent::none)
            throw invalid_input("surrogate",
                                "this estimator descends nothing: the mean of its gradient over these tokens is "
                                "0, as of k1 differentiated");
        if (d == descent::other && !accept_bias)
            throw invalid_input("accept_bias",
                                "on these tokens this estimator descends something else than its divergence: "
                                "score_function on stale samples, advantage::old, a shape that is not "
                                "monotone, or the like; say teacher::on_policy{cache} if the student drew "
                                "them, or set accept_bias");
    }
};

} // namespace opd

#undef OPD_DIVERGENCES
#undef OPD_ROW_DIVERGENCES
#undef OPD_ADVANTAGES
#undef OPD_SURROGATES
#undef OPD_BASELINES
#undef OPD_SELECTORS
#undef OPD_ENUMERATOR
#undef OPD_CASE
