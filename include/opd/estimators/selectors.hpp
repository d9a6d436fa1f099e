// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Selectors: a selector gives each row a weight from facts that the call itself computes about the row:
//
//   L = Σ_r f_r w_r g(facts_r) L_r        g a constant: no gradient flows through it
//
//   selected{reverse_kl{}, selector::tip{.entropy = 2, .gap = 0.5}}
//
//   selector::tip      rows with H(p) ≥ entropy, or with less and L_r ≥ gap                   TIP (arXiv 2604.14084)
//   selector::prefix   the first `depth` kept rows of each sequence; depth k0 + floor(step / every)
//                      Prefix-OPD (2602.15260), TCOD
//   selector::agreed   rows whose overlap Σ min(p, q) is at least `least`: beyond, the teacher speaks of another answer
//   selector::band     drawn tokens: rows with |log(p/mu)| ≤ `most`, for what the student has left behind
//   selector::eopd     a mixture by teacher entropy: KL(p‖q) + b KL(q‖p) where H(q) > tau     EOPD (arXiv 2603.07079)
//     as eopd(tau, b): selected{weighted_sum{reverse_kl{}, forward_kl{}}, selector::eopd{tau, b}}
//
// A selector of your own is a struct with
//
//   static constexpr unsigned reads()                    what it needs of row_facts.hpp
//   double operator()(const row_facts&) const            the row's weight: any finite number; 0: no gradient, and no
//                                                        pass for it
//   sum_weights mix(const row_facts&) const              optional: a and b of a weighted_sum, before its value is known
//
// with OPD_HD to run on the device. The caller keeps the normaliser: a batch of which half is kept has half the loss;
// mean_selector_weight() of the diagnostics says how much was kept. A weight that is NaN or infinite makes its row bad.
// Bias: rows that are left out add nothing; the gradient of each other row is its estimator's.
#pragma once

#include <cmath>
#include <concepts>
#include <type_traits>
#include <utility>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/row_facts.hpp"
#include "opd/row_program.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {
/// What two programs need together.
constexpr raw_sums_needed both(raw_sums_needed x, raw_sums_needed y) {
    const bool x_k = !x.student_power || x.k_is_one, y_k = !y.student_power || y.k_is_one;
    return {.student_delta = x.student_delta || y.student_delta,
            .student_power = x.student_power || y.student_power,
            .teacher_delta = x.teacher_delta || y.teacher_delta,
            .k_is_one = x_k && y_k,
            .phi_power = x.phi_power || y.phi_power,
            .entropy = x.entropy || y.entropy};
}
} // namespace detail

/// a D1 + b D2, a, b ≥ 0.
template <class D1, class D2>
struct weighted_sum {
    static_assert(divergence<D1> && divergence<D2>, "opd: weighted_sum takes two divergences; see "
                                                    "docs/concepts/divergence.md");
    static constexpr bool well_formed = divergence<D1> && divergence<D2>;
    static constexpr bool is_weighted_sum = true;
    static constexpr bool reads_overlap = opd::reads_overlap<D1> || opd::reads_overlap<D2>;
    D1 first = {};
    D2 second = {};
    double a = 1, b = 1;

    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        F sum(0.);
        if (a != 0) sum += F(a) * first.term(of(first, r), e); // parameters: the same way for every entry
        if (b != 0) sum += F(b) * second.term(of(second, r), e);
        return sum;
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        F sum(0.);
        if (a != 0) sum += F(a) * first.c(of(first, r), e);
        if (b != 0) sum += F(b) * second.c(of(second, r), e);
        return sum;
    }
    template <class F>
    OPD_HD OPD_INLINE term_and_c<F> both(const row_constants<F>& r, const dense_entry<F>& e) const {
        term_and_c<F> sum{F(0.), F(0.)};
        const auto add = [&](double by, const auto& d) OPD_INLINE_LAMBDA {
            const term_and_c<F> x = detail::both_of(d, of(d, r), e);
            sum.term += F(by) * x.term, sum.c += F(by) * x.c;
        };
        if (a != 0) add(a, first);
        if (b != 0) add(b, second);
        return sum;
    }
    template <class F>
    OPD_HD OPD_INLINE F nonnegative_term(const dense_entry<F>& e) const
        requires(refinable_divergence<D1>&& refinable_divergence<D2>) {
        F sum(0.);
        if (a != 0) sum += F(a) * first.nonnegative_term(e);
        if (b != 0) sum += F(b) * second.nonnegative_term(e);
        return sum;
    }
    OPD_HD constexpr bool infinite_where_teacher_zero() const {
        return (a != 0 && detail::infinite_where_teacher_zero(first)) ||
               (b != 0 && detail::infinite_where_teacher_zero(second));
    }
    OPD_HD constexpr bool infinite_where_student_zero() const {
        return (a != 0 && detail::infinite_where_student_zero(first)) ||
               (b != 0 && detail::infinite_where_student_zero(second));
    }
    OPD_HD constexpr bool infinite_where_disjoint() const {
        return (a != 0 && detail::infinite_where_disjoint(first)) ||
               (b != 0 && detail::infinite_where_disjoint(second));
    }
    OPD_INLINE void validate() const {
        if (!(detail::is_finite(a) && detail::is_finite(b) && a >= 0 && b >= 0))
            throw invalid_input("weighted_sum", "weights must be finite and at least 0");
        if constexpr (requires { first.validate(); }) first.validate();
        if constexpr (requires { second.validate(); }) second.validate();
    }

    // one sweep for both, where their raw sums are of one exponent
    static constexpr bool one_sweep = [] {
        if constexpr (single_sweep_divergence<D1> && single_sweep_divergence<D2>) {
            constexpr raw_sums_needed x = D1::raw, y = D2::raw;
            constexpr bool x_powers = x.student_power || x.teacher_delta, y_powers = y.student_power || y.teacher_delta;
            constexpr bool plain =
                !x.phi_power && !y.phi_power && (!x.student_power || x.k_is_one) && (!y.student_power || y.k_is_one);
            return plain || !x_powers || !y_powers;
        } else {
            return false;
        }
    }();
    static constexpr raw_sums_needed raw = [] {
        if constexpr (one_sweep)
            return detail::both(D1::raw, D2::raw);
        else
            return raw_sums_needed{};
    }();
    OPD_HD double exponent() const requires one_sweep {
        return raw_sums_needed(D2::raw).student_power || raw_sums_needed(D2::raw).teacher_delta ? second.exponent()
                                                                                                : first.exponent();
    }
    OPD_HD double value(const raw_sums& s) const requires one_sweep {
        return (a != 0 ? a * first.value(s) : 0) + (b != 0 ? b * second.value(s) : 0);
    }
    OPD_HD double sum_c(const raw_sums& s) const requires one_sweep {
        return (a != 0 ? a * first.sum_c(s) : 0) + (b != 0 ? b * second.sum_c(s) : 0);
    }
    OPD_HD double cancellation(const raw_sums& s) const { return larger(enlarged(first, s), enlarged(second, s)); }

private:
    template <class D, class F>
    OPD_HD OPD_INLINE static row_constants<F> of(const D& d, row_constants<F> r) {
        if constexpr (requires { d.slope_star(r); }) r.slope_star = d.slope_star(r);
        return r;
    }
    template <class D>
    OPD_HD static double enlarged(const D& d, const raw_sums& s) {
        if constexpr (requires { d.cancellation(s); })
            return d.cancellation(s);
        else
            return 1;
    }
    OPD_HD static double larger(double x, double y) { return x > y ? x : y; }
};
template <class D1, class D2>
weighted_sum(D1, D2) -> weighted_sum<D1, D2>;
template <class D1, class D2>
weighted_sum(D1, D2, double) -> weighted_sum<D1, D2>;
template <class D1, class D2>
weighted_sum(D1, D2, double, double) -> weighted_sum<D1, D2>;

/// An estimator whose rows a selector weighs. See the head of this file.
template <class Estimator, class Selector>
struct selected : Estimator {
    static_assert(row_selector<Selector>, "opd: a selector is a struct with `unsigned reads() const` and `double "
                                          "operator()(const row_facts&) const`; see docs/estimators/selectors.md");
    static constexpr bool well_formed = row_selector<Selector> && [] {
        if constexpr (requires { Estimator::well_formed; })
            return Estimator::well_formed;
        else
            return true;
    }();
    using selector_type = Selector;
    template <class Other>
    using on = selected<Other, Selector>; ///< the same selector on another estimator
    Selector selector = {};

    static constexpr estimator_traits traits(law drawn) {
        estimator_traits t = traits_of<Estimator>(drawn);
        t.value = meaning::surrogate;
        return t;
    }
    OPD_INLINE void validate() const {
        if constexpr (requires(const Estimator& e) { e.validate(); }) Estimator::validate();
        if constexpr (requires { selector.validate(); }) selector.validate();
    }
};
template <class Estimator, class Selector>
selected(Estimator, Selector) -> selected<Estimator, Selector>;

namespace selector {

/// Every row, weight 1.
struct all {
    OPD_HD static constexpr unsigned reads() { return 0; }
    OPD_HD double operator()(const row_facts&) const { return 1; }
};

/// Rows with H(p) ≥ `entropy`, or with a loss of at least `gap`: those where the student is unsure, or sure and wrong.
/// TIP, arXiv 2604.14084.
struct tip {
    double entropy = 0; ///< nats
    double gap = 0;     ///< of the row's loss
    OPD_HD static constexpr unsigned reads() { return fact::student_entropy; }
    OPD_HD double operator()(const row_facts& f) const { return f.student_entropy >= entropy || f.value >= gap; }
    OPD_INLINE void validate() const {
        detail::refuse_selector(!detail::is_finite(entropy) || !detail::is_finite(gap), "tip: limits must be finite");
    }
};

/// The first `depth` kept rows of each sequence; of a fraction the row in which it ends counts. Needs env.offsets.
/// Prefix-OPD, arXiv 2602.15260.
struct prefix {
    double depth = 0; ///< tokens
    OPD_HD static constexpr unsigned reads() { return fact::position; }
    OPD_HD double operator()(const row_facts& f) const { return f.position < depth; }
    /// The prefix of a step: k0 tokens at first, one more every `every` steps.
    static prefix at_step(double step, double k0, double every) { return {k0 + std::floor(step / every)}; }
    OPD_INLINE void validate() const { detail::refuse_selector(!(depth >= 0), "prefix: depth must be at least 0"); }
};

/// Rows with Σ min(p, q) ≥ `least`, in [0, 1]. For dense rows and renormalised supports.
struct agreed {
    double least = 0; ///< in [0, 1]
    OPD_HD static constexpr unsigned reads() { return fact::teacher_entropy; }
    OPD_HD double operator()(const row_facts& f) const { return f.overlap >= least; }
    OPD_INLINE void validate() const {
        detail::refuse_selector(!(least >= 0 && least <= 1), "agreed: least must lie in [0, 1]");
    }
};

/// Rows with |log(p/mu)| ≤ `most`. For drawn tokens.
struct band {
    double most = 0; ///< nats
    OPD_HD static constexpr unsigned reads() { return fact::drawn; }
    OPD_HD double operator()(const row_facts& f) const { return f.log_ratio <= most && f.log_ratio >= -most; }
    OPD_INLINE void validate() const { detail::refuse_selector(!(most >= 0), "band: most must be at least 0"); }
};

/// KL(p‖q), and b KL(q‖p) beside it in rows with H(q) > tau; of a weighted_sum of the two. EOPD, arXiv 2603.07079.
struct eopd {
    double tau = 0; ///< nats
    double b = 1;   ///< weight of the forward KL
    OPD_HD static constexpr unsigned reads() { return fact::teacher_entropy; }
    OPD_HD double operator()(const row_facts&) const { return 1; }
    OPD_HD sum_weights mix(const row_facts& f) const { return {1, f.teacher_entropy > tau ? b : 0}; }
    OPD_INLINE void validate() const {
        detail::refuse_selector(!detail::is_finite(tau) || !detail::is_finite(b) || b < 0,
                                "eopd: tau must be finite, and b finite and at least 0");
    }
};

} // namespace selector

/// KL(p‖q), and b KL(q‖p) beside it where the teacher is unsure: H(q) > tau nats. arXiv 2603.07079.
constexpr auto eopd(double tau, double b = 1) {
    return selected<weighted_sum<reverse_kl, forward_kl>, selector::eopd>{{}, {tau, b}};
}

} // namespace opd
