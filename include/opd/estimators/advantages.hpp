// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a drawn token is worth: A, a function of its log-probs (and of a column of the cache). Small structs that an
// estimator of drawn tokens holds; yours as well as these.
//
//   advantage::theta             log q - log p, with the current student         descends KL(p‖q)
//   advantage::old               log q - log mu, as at rollout time              KL(p‖q) - KL(p‖mu): drifts from mu
//   advantage::shaped{shape}     shape(log q - log p)                            the shape's divergence: shapes.hpp
//   advantage::extrapolated{λ}   λ (log q - log p_ref) - (log p - log p_ref)     KL to the law q^λ p_ref^(1-λ), less
//                                                                                log of its normaliser: G-OPD, ExOPD
//   advantage::contrast{a, b}    a (log q - log p) - b (log q' - log p)          a KL(p‖q) - b KL(p‖q'), for a = b = 1
//                                log q' in the column log_ref: two teachers      RLCSD (arXiv 2606.11709)
//   advantage::of_divergence{D}  -slope of D at (p, q), 0 where p = q            D: any of divergences.hpp, or any
//                                                                                Σ term(p, q)
//   advantage::outside           the cache's column `advantage`                  a task's reward: REINFORCE, GRPO, …
//   advantage::mixed{w_o, w_t}   w_o · the column + w_t (log q - log p)
//   advantage::reward<k>         -k(q/p), k of k_forms.hpp, detached             what k_forms.hpp says
//
// Optional: value(x), what a draw adds to the divergence, over rho (shapes.hpp); else the loss is the surrogate's.
// traits(law); reads_columns(); infinite_where_teacher_zero(), infinite_where_student_zero(); validate().
#pragma once

#include <cmath>
#include <concepts>
#include <string>

#include "opd/config.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/k_forms.hpp"
#include "opd/estimators/shapes.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/teacher.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {

/// log q - log p; ±1e6 stands for an infinite one.
OPD_HD OPD_INLINE double log_q_over(double log_q, double log_p) {
    return is_neg_inf(log_q) ? -1e6 : (is_neg_inf(log_p) ? 1e6 : log_q - log_p);
}

} // namespace detail

namespace advantage {

/// A = log q - log p with the current student. Descends KL(p‖q); a draw's value is log p - log q.
struct theta {
    static constexpr estimator_traits traits(law) { return {.descends = descent::reverse}; }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const { return x.log_q - x.log_p; }
    OPD_HD OPD_INLINE double value(const sampled_entry& x) const { return x.log_p - x.log_q; }
};

/// A = log q - log mu, fixed at rollout time. Equal to theta on policy; of stale tokens it descends KL(p‖q) - KL(p‖mu).
struct old {
    static constexpr estimator_traits traits(law drawn) {
        return drawn == law::on_policy ? estimator_traits{.descends = descent::reverse}
                                       : estimator_traits{bias::biased, meaning::surrogate, false, descent::other};
    }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const { return x.log_q - x.log_mu; }
};

template <class Shape, class Of = theta>
struct shaped {
    static_assert(shape_policy<Shape>,
                  "opd: a shape is a struct with `double operator()(double log_q_minus_log_p) const` "
                  "and `static constexpr bool monotone`; see opd/estimators/shapes.hpp");
    Shape shape = {};
    Of of = {};
    static constexpr estimator_traits traits(law drawn) {
        const estimator_traits from = traits_of<Of>(drawn);
        if (!Shape::monotone || from.descends != descent::reverse)
            return {bias::biased, meaning::surrogate, from.exact_zero_at_equality, descent::other};
        return {.descends = descent::divergence};
    }
    OPD_HD constexpr bool infinite_where_teacher_zero() const {
        if constexpr (requires { shape.infinite_where_teacher_zero(); })
            return shape.infinite_where_teacher_zero();
        else
            return std::same_as<Shape, opd::shape::log_ratio> || std::same_as<Shape, opd::shape::scaled>;
    }
    OPD_HD constexpr bool infinite_where_student_zero() const {
        if constexpr (requires { shape.infinite_where_student_zero(); })
            return shape.infinite_where_student_zero();
        else
            return false;
    }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const {
        return shape(detail::is_neg_inf(x.log_q) ? -1e6 : of(x));
    }
    OPD_HD OPD_INLINE double value(const sampled_entry& x) const requires(Shape::monotone&& std::same_as<Of, theta>) {
        return shape.value(detail::log_q_over(x.log_q, x.log_p));
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { shape.validate(); }) shape.validate();
    }
};
template <class S>
shaped(S) -> shaped<S>;
template <class S, class Of>
shaped(S, Of) -> shaped<S, Of>;

/// A = λ (log q - log p_ref) - (log p - log p_ref), log p_ref from the column log_ref. λ = 1 is theta; above 1 it goes
/// beyond the teacher. G-OPD, ExOPD.
struct extrapolated {
    double lambda = 1; ///< 1: theta; above: beyond the teacher
    static constexpr estimator_traits traits(law) {
        return {.value = meaning::surrogate, .exact_zero_at_equality = false, .descends = descent::divergence};
    }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    OPD_HD static constexpr unsigned reads_columns() { return column::log_ref; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const {
        return lambda * (x.log_q - x.log_ref) - (x.log_p - x.log_ref);
    }
    OPD_HD OPD_INLINE double value(const sampled_entry& x) const { return -(*this)(x); }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(lambda) || lambda < 0)
            throw invalid_input("advantage::extrapolated.lambda", "must be finite and at least 0");
    }
};

/// A = plus · (log q - log p) - minus · (log q' - log p): towards one teacher and away from another, log q' from the
/// column log_ref. RLCSD, arXiv 2606.11709.
struct contrast {
    double plus = 1, minus = 1;
    static constexpr estimator_traits traits(law) {
        return {.value = meaning::value_estimate, .exact_zero_at_equality = false, .descends = descent::divergence};
    }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    OPD_HD static constexpr unsigned reads_columns() { return column::log_ref; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const {
        return plus * x.log_q - minus * x.log_ref - (plus - minus) * x.log_p;
    }
    OPD_HD OPD_INLINE double value(const sampled_entry& x) const { return -(*this)(x); }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(plus) || !detail::is_finite(minus) || plus < 0 || minus < 0)
            throw invalid_input("advantage::contrast", "the weights must be finite and at least 0");
    }
};

/// A = -slope of D at the token's (p, q), so that E_p[A ∇log p] = -∇D for any D = Σ term(p, q).
template <class D>
struct of_divergence {
    D divergence = {};
    static constexpr estimator_traits traits(law) { return {.descends = descent::divergence}; }
    OPD_HD constexpr bool infinite_where_teacher_zero() const {
        return detail::infinite_where_teacher_zero(divergence);
    }
    OPD_HD constexpr bool infinite_where_student_zero() const {
        return detail::infinite_where_student_zero(divergence);
    }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const {
        const entry at(x.log_p, x.log_q, x.log_mu);
        return -divergence.c(anchor(), at.e).v / at.e.p.v;
    }
    /// term(p, q)/p; for D = Σ q f(p/q) with f(0) = 0, which a multiple of p - q achieves where f(0) is finite.
    OPD_HD OPD_INLINE double value(const sampled_entry& x) const {
        const entry at(x.log_p, x.log_q, x.log_mu);
        double v = divergence.term(anchor(), at.e).v / at.e.p.v;
        if constexpr (requires { D::f_divergence; })
            if (!infinite_where_student_zero()) {
                const double f0 = divergence.term(anchor(), entry::absent().e).v, q_over_p = at.e.q.v / at.e.p.v;
                v += f0 * (1 - q_over_p);
            }
        return v;
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { divergence.validate(); }) divergence.validate();
    }

private:
    using F = scalar<double>;
    /// The anchor at p = q: slopes are relative to the one there, and delta is the whole log-ratio.
    OPD_HD static row_constants<F> anchor() { return {F(1), F(1), F(0), F(1)}; }
    struct entry {
        dense_entry<F> e;
        /// A student without mass is taken at mu e^-80, where its ratio saturates too.
        OPD_HD entry(double log_p, double log_q, double log_mu) {
            const double least = (detail::is_finite(log_mu) ? log_mu : 0) - 80;
            if (!(log_p > least)) log_p = least;
            if (log_p < -600) log_p = -600;
            const double delta = -detail::log_q_over(log_q, log_p);
            e = {F(::exp(log_p)), F(detail::mass_of(log_q)), F(delta), F(log_p),
                 F(detail::is_neg_inf(log_q) ? -1e6 : log_q)};
        }
        /// p = 0, q = 1
        OPD_HD static entry absent() {
            entry x(0, 0, 0);
            x.e = {F(0), F(1), F(-1e6), F(-1e6), F(0)};
            return x;
        }
    };
};
template <class D>
of_divergence(D) -> of_divergence<D>;

/// A from the cache's column `advantage`, as a task's reward: what it descends nobody knows here.
struct outside {
    static constexpr estimator_traits traits(law) {
        return {.value = meaning::surrogate, .exact_zero_at_equality = false, .descends = descent::outside};
    }
    OPD_HD static constexpr unsigned reads_columns() { return column::advantage; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const { return x.outside; }
};

/// A = outside · column `advantage` + teacher · (log q - log p).
struct mixed {
    double outside = 1; ///< times the column `advantage`
    double teacher = 1; ///< times log q - log p
    static constexpr estimator_traits traits(law) { return opd::advantage::outside::traits(law::stale); }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    OPD_HD static constexpr unsigned reads_columns() { return column::advantage; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const {
        return outside * x.outside + teacher * (x.log_q - x.log_p);
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(outside) || !detail::is_finite(teacher))
            throw invalid_input("advantage::mixed", "the weights must be finite");
    }
};

/// A = -k(q/p) held constant, K one of k1, k2, k3: what each descends as a reward stands in k_forms.hpp.
template <class K>
struct reward {
    static constexpr estimator_traits traits(law) {
        const descent d = K::as_reward;
        return {d == descent::other ? bias::biased : bias::unbiased, meaning::surrogate, true, d};
    }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const { return -K::value(x.log_q - x.log_p); }
};

} // namespace advantage

/// Two caches of the same drawn tokens as one of advantage::contrast: `plus` with log_q of `minus` as its log_ref.
/// (N,m) both. Throws invalid_input, with the row, where their ids differ.
template <class Cache>
Cache contrasted(Cache plus, const Cache& minus) {
    static_assert(Cache::memory_space == space::host && Cache::kind != cache_kind::dense &&
                      Cache::kind != cache_kind::support,
                  "opd: contrasted() is of two caches of drawn tokens, in the host's memory");
    if (minus.ids.rows != plus.ids.rows || minus.ids.cols != plus.ids.cols)
        throw invalid_input("minus.ids", "are (" + std::to_string(minus.ids.rows) + ", " +
                                             std::to_string(minus.ids.cols) + "), those of plus (" +
                                             std::to_string(plus.ids.rows) + ", " + std::to_string(plus.ids.cols) +
                                             ")");
    for (index_t r = 0; r < plus.ids.rows; ++r)
        for (index_t j = 0; j < plus.ids.cols; ++j)
            if (plus.ids(r, j) != minus.ids(r, j))
                throw invalid_input("minus.ids", "are others than those of plus in column " + std::to_string(j), r);
    plus.log_ref = minus.log_q;
    return plus;
}

// clang-format off
/// A token's worth. See the head of this file.
template <class A>
concept advantage_policy = requires(const A a, const sampled_entry& x) {
    { a(x) } -> std::convertible_to<double>;
};
// clang-format on

} // namespace opd
