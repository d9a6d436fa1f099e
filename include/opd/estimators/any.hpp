// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Estimators chosen at run time, from a flag or a configuration file. any_sampled is mc whose objective, surrogate, baseline and weighting
// are each one of the library's by a switch an entry. One type, so that a trainer instantiates its rows once for each kind of cache; the
// same text as the static form, and the same bits. any_dense is a divergence on teacher::dense, by a switch a call: rows of V entries have
// no time for one.
//
//   any_sampled e{.of = {choice::objective::clipped, 5}, .surrogate = {choice::surrogate::ppo_clip}};
//   e.of.which = *choice::find(choice::objectives, "total_variation");
//   any_dense d{*choice::find(choice::divergences, "jsd"), 0.3, 0.3};
//   d.validate();
//   auto r = d.visit([&](const auto& divergence) { return evaluate(be, student, teacher, divergence, env); });
//
// Names and what each is: the tables choice::objectives, choice::surrogates, choice::baselines, choice::divergences, choice::selectors. What does not compile in the static form is
// refused by the call here, with invalid_input and the same sentence: no signal, another descent without accept_bias, a baseline that does
// not read the cache, a missing column.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "opd/config.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/selectors.hpp"
#include "opd/teacher.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace choice {

enum class objective {
    reverse_kl,
    forward_kl,
    jsd,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
    alpha_divergence,
    chi_squared,
    clipped,
    mixed,
    box_cox,
    scaled,
    band,
    old,
    extrapolated,
    outside,
    with_outside,
    k1_reward,
    k2_reward,
    k3_reward,
    acceptance ///< of dense logits alone
};
enum class surrogate {
    unclipped_is,
    score_function,
    truncated_is,
    cispo,
    ppo_clip,
    decoupled_ppo,
    a3po,
    gspo,
    k1,
    k2,
    k3,
    k1_ratio,
    k2_ratio,
    k3_ratio
};
enum class selector { all, tip, prefix, agreed, band, eopd };
enum class baseline { none, exact_entries, leave_one_out, self_normalised, minimum_variance, value, given };

/// A line of a table: what a user types, what it is.
template <class Kind>
struct name {
    std::string_view text;
    Kind which;
    std::string_view says;
};

// clang-format off
inline constexpr name<objective> objectives[] = {
    {"reverse_kl", objective::reverse_kl, "KL(p||q): A = log q - log p"},
    {"forward_kl", objective::forward_kl, "KL(q||p)"},
    {"jsd", objective::jsd, "generalised Jensen-Shannon, weights a, b"},
    {"skew_forward_kl", objective::skew_forward_kl, "KL(q || a q + (1-a) p)"},
    {"skew_reverse_kl", objective::skew_reverse_kl, "KL(p || (1-a) q + a p)"},
    {"total_variation", objective::total_variation, "half the sum of |p - q|: A = sign(q - p)/2"},
    {"alpha_divergence", objective::alpha_divergence, "(sum p^a q^(1-a) - 1)/(a(a-1))"},
    {"chi_squared", objective::chi_squared, "sum p^2/q - 1"},
    {"clipped", objective::clipped, "reverse KL, A within +-a: linear in p/q beyond e^+-a"},
    {"mixed", objective::mixed, "A = log(a q/p + 1-a): TROPD, TOP-D"},
    {"box_cox", objective::box_cox, "A = ((q/p)^a - 1)/a: alpha divergence at 1-a"},
    {"scaled", objective::scaled, "a KL(p||q)"},
    {"band", objective::band, "A = 0 beyond +-a: no divergence, needs accept_bias"},
    {"old", objective::old, "A = log q - log mu: rewards drifting from mu, needs accept_bias on stale tokens"},
    {"extrapolated", objective::extrapolated, "KL to the tilted teacher q^a p_ref^(1-a): G-OPD, ExOPD"},
    {"outside", objective::outside, "the cache's advantage alone"},
    {"with_outside", objective::with_outside, "a times the cache's advantage + b (log q - log p)"},
    {"k1_reward", objective::k1_reward, "-k1 as a detached reward: KL(p||q)"},
    {"k2_reward", objective::k2_reward, "-k2 as a detached reward: needs accept_bias"},
    {"k3_reward", objective::k3_reward, "-k3 as a detached reward: KL(p||q) - KL(q||p)"},
};
inline constexpr name<surrogate> surrogates[] = {
    {"unclipped_is", surrogate::unclipped_is, "-rho A: unbiased at any staleness"},
    {"score_function", surrogate::score_function, "-A log p: for the student's own tokens"},
    {"truncated_is", surrogate::truncated_is, "-min(rho, cap) A log p: CISPO with a raw bound"},
    {"cispo", surrogate::cispo, "-clip(rho) A log p"},
    {"ppo_clip", surrogate::ppo_clip, "-min(rho A, clip(rho) A), dual clip"},
    {"decoupled_ppo", surrogate::decoupled_ppo, "PPO against p_prox, weighted by p_prox/mu; TIS with a cap"},
    {"a3po", surrogate::a3po, "the same, p_prox between mu and p by the token's age"},
    {"gspo", surrogate::gspo, "PPO on the sequence's ratio"},
    {"k1", surrogate::k1, "log(p/q) differentiated: no signal"},
    {"k2", surrogate::k2, "log(q/p)^2/2 differentiated: KL(p||q) on the student's own tokens"},
    {"k3", surrogate::k3, "q/p - 1 - log(q/p) differentiated: KL(q||p) on the student's own tokens"},
    {"k1_ratio", surrogate::k1_ratio, "the same times rho: no signal"},
    {"k2_ratio", surrogate::k2_ratio, "the same times rho: KL(p||q)"},
    {"k3_ratio", surrogate::k3_ratio, "the same times rho: KL(q||p)"},
};
inline constexpr name<baseline> baselines[] = {
    {"none", baseline::none, "0"},
    {"exact_entries", baseline::exact_entries, "mean of A over the certain entries"},
    {"leave_one_out", baseline::leave_one_out, "mean of rho A over the row's other draws"},
    {"self_normalised", baseline::self_normalised, "likewise, over the sum of their rho"},
    {"minimum_variance", baseline::minimum_variance, "likewise, weighted by (rho (1-p))^2"},
    {"value", baseline::value, "sum of p A over the certain entries"},
    {"given", baseline::given, "the cache's"},
};
/// a, b: the parameters that its line names.
inline constexpr name<selector> selectors[] = {
    {"all", selector::all, "every row as it is"},
    {"tip", selector::tip, "rows with H(p) >= a nats, or a loss of at least b (TIP)"},
    {"prefix", selector::prefix, "the first a tokens of each sequence"},
    {"agreed", selector::agreed, "rows whose overlap of p and q is at least a: dense rows, renormalised supports"},
    {"band", selector::band, "rows with |log(p/mu)| <= a: drawn tokens"},
    {"eopd", selector::eopd, "b KL(q||p) beside KL(p||q) where H(q) > a nats (EOPD): dense rows, renormalised supports"},
};
// clang-format on

/// What a dense cache takes: the first of `objectives`, and what is of the whole row, which drawn tokens do not say.
inline constexpr auto dense_table = [] {
    std::array<name<objective>, 9> t{};
    for (std::size_t i = 0; i < 8; ++i) t[i] = objectives[i];
    t[8] = {"acceptance", objective::acceptance, "-log sum min(p, q): of a drafter p and its target q (LK)"};
    return t;
}();
inline constexpr std::span<const name<objective>> divergences(dense_table);
constexpr bool is_divergence(objective o) { return o <= objective::chi_squared || o == objective::acceptance; }

template <class Kind>
constexpr std::optional<Kind> find(std::span<const name<Kind>> table, std::string_view text) {
    for (const auto& line : table)
        if (line.text == text) return line.which;
    return std::nullopt;
}
template <class Kind, std::size_t N>
constexpr std::optional<Kind> find(const name<Kind> (&table)[N], std::string_view text) {
    return find(std::span<const name<Kind>>(table), text);
}

} // namespace choice

/// A divergence of the table choice::divergences. a, b: the parameters that its line names. On teacher::dense by visit, once a call.
struct any_dense {
    choice::objective which = choice::objective::reverse_kl;
    double a = 0.5, b = 0.5;

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::objective;
        switch (which) {
        case kind::forward_kl:
            return f(forward_kl{});
        case kind::jsd:
            return f(jsd{a, b});
        case kind::skew_forward_kl:
            return f(skew_forward_kl{a});
        case kind::skew_reverse_kl:
            return f(skew_reverse_kl{a});
        case kind::total_variation:
            return f(total_variation{});
        case kind::alpha_divergence:
            return f(alpha_divergence{a});
        case kind::chi_squared:
            return f(chi_squared{});
        case kind::acceptance:
            return f(acceptance{});
        default:
            return f(reverse_kl{});
        }
    }
    /// Throws unless it is a divergence.
    void validate() const {
        if (!choice::is_divergence(which)) throw invalid_input("any_dense.which", "is no divergence of dense logits");
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
        case kind::clipped:
            return f(advantage::shaped<shape::clipped>{{a}, {}});
        case kind::mixed:
            return f(advantage::shaped<shape::mixed>{{a}, {}});
        case kind::box_cox:
            return f(advantage::shaped<shape::box_cox>{{a}, {}});
        case kind::scaled:
            return f(advantage::shaped<shape::scaled>{{a}, {}});
        case kind::band:
            return f(advantage::shaped<shape::band>{{a}, {}});
        case kind::old:
            return f(advantage::old{});
        case kind::extrapolated:
            return f(advantage::extrapolated{a});
        case kind::outside:
            return f(advantage::outside{});
        case kind::with_outside:
            return f(advantage::mixed{a, b});
        case kind::k1_reward:
            return f(advantage::reward<k1>{});
        case kind::k2_reward:
            return f(advantage::reward<k2>{});
        case kind::k3_reward:
            return f(advantage::reward<k3>{});
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
    OPD_HD bool infinite_where_teacher_zero() const {
        return visit([](const auto& p) -> bool { return detail::infinite_where_teacher_zero(p); });
    }
    OPD_HD bool infinite_where_student_zero() const {
        return visit([](const auto& p) -> bool { return detail::infinite_where_student_zero(p); });
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

/// A surrogate of the table choice::surrogates; with estr_tau > 0 on the tokens that ESTR keeps.
struct any_surrogate {
    choice::surrogate which = choice::surrogate::unclipped_is;
    double low = 0.2, high = 0.2, dual = 0;
    double cap = 0;
    over_cap over = over_cap::truncate;
    double estr_tau = 0, estr_epsilon = 0;

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::surrogate;
        switch (which) {
        case kind::score_function:
            return f(score_function{});
        case kind::truncated_is:
            return f(truncated_is{cap});
        case kind::cispo:
            return f(cispo{low, high});
        case kind::ppo_clip:
            return f(ppo_clip{low, high, dual});
        case kind::decoupled_ppo:
            return f(decoupled_ppo{low, high, cap, over});
        case kind::a3po:
            return f(a3po{low, high, cap, over});
        case kind::gspo:
            return f(gspo{low, high});
        case kind::k1:
            return f(differentiated<k1>{});
        case kind::k2:
            return f(differentiated<k2>{});
        case kind::k3:
            return f(differentiated<k3>{});
        case kind::k1_ratio:
            return f(differentiated<k1, true>{});
        case kind::k2_ratio:
            return f(differentiated<k2, true>{});
        case kind::k3_ratio:
            return f(differentiated<k3, true>{});
        default:
            return f(unclipped_is{});
        }
    }
    OPD_HD token_out operator()(const token_in& x) const {
        return visit([&](const auto& s) -> token_out {
            return estr_tau > 0 ? estr<std::remove_cvref_t<decltype(s)>>{estr_tau, estr_epsilon, s}(x) : s(x);
        });
    }
    OPD_HD bool has_advantage() const {
        return visit([](const auto& s) -> bool {
            return !requires { s.has_advantage; };
        });
    }
    OPD_HD unsigned reads_columns() const {
        return visit([](const auto& s) -> unsigned { return detail::columns_of(s); }) |
               (estr_tau > 0 ? column::mu_entropy : 0);
    }
    estimator_traits traits_under(law drawn) const {
        return visit([&](const auto& s) {
            using S = std::remove_cvref_t<decltype(s)>;
            return estr_tau > 0 ? traits_of<estr<S>>(drawn) : traits_of<S>(drawn);
        });
    }
    void validate() const {
        visit([](const auto& s) { detail::validate_all(s); });
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
        switch (which) {
        case choice::baseline::exact_entries:
            return f(of_row.exact);
        case choice::baseline::leave_one_out:
            return f(of_row.others);
        case choice::baseline::self_normalised:
            return f(of_row.normalised);
        case choice::baseline::minimum_variance:
            return f(of_row.least);
        case choice::baseline::value:
            return f(of_row.whole);
        case choice::baseline::given:
            return f(of_row.told);
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

struct any_weighting {
    bool self_normalised = false;
    OPD_HD double of(double sum_w_rho) const {
        return self_normalised ? weighting::self_normalised{}.of(sum_w_rho) : 1;
    }
};

/// A selector of the table choice::selectors, but eopd, which has a weighted_sum to mix: selected{estimator, any_selector{…}}.
struct any_selector {
    choice::selector which = choice::selector::all;
    double a = 0, b = 0;

    OPD_CALLS_EITHER
    template <class F>
    OPD_HD constexpr auto visit(F f) const {
        using kind = choice::selector;
        switch (which) {
        case kind::tip:
            return f(selector::tip{a, b});
        case kind::prefix:
            return f(selector::prefix{a});
        case kind::agreed:
            return f(selector::agreed{a});
        case kind::band:
            return f(selector::band{a});
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
        return surrogate.which == choice::surrogate::unclipped_is && surrogate.estr_tau == 0 && of.has_value();
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
