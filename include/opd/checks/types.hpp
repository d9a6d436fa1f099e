// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which student, teacher and estimator belong together; where they do not, one sentence says what does.
#pragma once

#include <concepts>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/row_facts.hpp"
#include "opd/row_program.hpp"
#include "opd/teacher.hpp"
#include "opd/traits.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Which facts a selector may read (row_facts.hpp).
template <class Estimator, cache_kind Kind>
constexpr unsigned facts_known() {
    constexpr bool renormalised = Kind == cache_kind::support && renormalised_estimator<Estimator>;
    if (Kind == cache_kind::dense || renormalised) return fact::of_dense;
    return Kind == cache_kind::support ? fact::of_buckets : fact::of_tokens;
}
template <class Estimator, cache_kind Kind>
constexpr bool selector_is_fed() {
    return (selector_facts<Estimator>::read & ~facts_known<Estimator, Kind>()) == 0;
}
/// Whether a selector that mixes has a weighted_sum to mix.
template <class Estimator>
constexpr bool selector_has_a_sum() {
    if constexpr (!selector_mixes<Estimator>())
        return true;
    else if constexpr (renormalised_estimator<Estimator>)
        return requires(const Estimator& e) { e.on_support.is_weighted_sum; };
    else
        return requires { Estimator::is_weighted_sum; };
}

/// Whether E's gradient may be stored on the support alone.
template <class E>
constexpr bool offers_sparse_gradient() {
    if constexpr (requires { E::sparse_gradient; })
        return E::sparse_gradient;
    else
        return false;
}

/// Sentences for a call whose types do not fit. Each function below says the first thing that is wrong and is then
/// false, so that nothing else is instantiated and one mistake is one error. Classes that have said it themselves are
/// passed over.
template <class...>
inline constexpr bool never = false;

/// Whether T's template arguments are what T asserts of them.
template <class T>
constexpr bool parts_fit() {
    bool fit = !requires { typename T::misfit; };
    if constexpr (requires { typename T::logit_type; }) fit = fit && storage<typename T::logit_type>;
    if constexpr (requires { typename T::gradient_type; }) fit = fit && storage<typename T::gradient_type>;
    if constexpr (requires { typename T::id_type; }) fit = fit && std::integral<typename T::id_type>;
    if constexpr (requires { typename T::log_type; }) fit = fit && storage<typename T::log_type>;
    if constexpr (requires { T::well_formed; }) fit = fit && T::well_formed;
    return fit;
}

/// Whether an estimator's baseline, if it has one, is for this kind of cache.
template <class E, cache_kind K>
constexpr bool baseline_fits() {
    if constexpr (requires { E::baseline_reads(K); })
        return E::baseline_reads(K);
    else
        return true;
}

/// Cache and estimator belong together, or a sentence says what does.
template <class Student, class Teacher, class Estimator>
constexpr bool pairing_fits() {
    constexpr cache_kind kind = Teacher::kind;
    constexpr bool dense = kind == cache_kind::dense, samples = kind == cache_kind::samples;
    if constexpr (dense && reads_cache<Estimator, cache_kind::samples>())
        static_assert(never<Estimator>,
                      "opd: this estimator reads drawn tokens: use teacher::samples{ids, log_mu, log_q}; "
                      "a teacher::dense cache takes a divergence such as reverse_kl{}");
    else if constexpr (dense && reads_cache<Estimator, cache_kind::weighted>())
        static_assert(never<Estimator>,
                      "opd: this estimator reads weighted tokens: use teacher::weighted{ids, weight, "
                      "log_mu, log_q}; a teacher::dense cache takes a divergence such as reverse_kl{}");
    else if constexpr (dense && reads_cache<Estimator, cache_kind::support>())
        static_assert(never<Estimator>, "opd: this estimator reads a support: use teacher::support{ids, log_q}; "
                                        "a teacher::dense cache takes a divergence such as reverse_kl{}");
    else if constexpr (dense && !divergence<Estimator>)
        static_assert(never<Estimator>,
                      "opd: a teacher::dense cache takes a divergence: a struct with `F term(row_constants<F>, "
                      "dense_entry<F>) const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                      "docs/concepts/divergence.md");
    else if constexpr (kind == cache_kind::support && !reads_cache<Estimator, kind>())
        static_assert(
            never<Estimator>,
            "opd: a teacher::support cache takes renormalised{divergence}, tail_bucket{divergence} or another "
            "estimator of a support");
    else if constexpr (!dense && divergence<Estimator>)
        static_assert(never<Estimator>,
                      "opd: a divergence reads every logit of the teacher: use teacher::dense; drawn tokens take "
                      "mc{divergence}");
    else if constexpr ((samples || kind == cache_kind::weighted) && !reads_cache<Estimator, kind>())
        static_assert(never<Estimator>, "opd: a cache of drawn tokens takes mc{divergence, surrogate, baseline}");
    else if constexpr (kind == cache_kind::support && !support_estimator<Estimator> &&
                       !renormalised_estimator<Estimator>)
        static_assert(never<Estimator>,
                      "opd: an estimator of a support has `entry_row row(support_entries&, entry_facts, diagnostics&) "
                      "const`, or a divergence on_support; see docs/concepts/entries.md");
    else if constexpr (!dense && kind != cache_kind::support && !sampled_estimator<Estimator>)
        static_assert(never<Estimator>,
                      "opd: an estimator of drawn tokens has `entry_row row(sampled_entry*, int, entry_facts, "
                      "diagnostics&) const`; see docs/concepts/entries.md");
    else if constexpr (!baseline_fits<Estimator, kind>())
        static_assert(never<Estimator>, "opd: this baseline does not read this cache: leave_one_out, self_normalised "
                                        "and minimum_variance need i.i.d. teacher::samples, value needs "
                                        "teacher::weighted");
    else if constexpr (!selector_is_fed<Estimator, kind>())
        static_assert(never<Estimator>,
                      "opd: this selector reads what these rows do not know: the teacher's entropy and the overlap are "
                      "known of teacher::dense and renormalised supports, the student's entropy of these and of drawn "
                      "tokens, log_ratio and gap of drawn tokens; see docs/estimators/selectors.md");
    else if constexpr (!selector_has_a_sum<Estimator>())
        static_assert(never<Estimator>, "opd: a selector with mix() chooses the weights of a weighted_sum: "
                                        "selected{weighted_sum{reverse_kl{}, forward_kl{}}, selector}, on "
                                        "teacher::dense, or renormalised{weighted_sum{…}}");
    else if constexpr (traits_of<Estimator>(law_of<Teacher>()).descends == descent::none)
        static_assert(never<Estimator>,
                      "opd: this estimator descends nothing: the mean of its gradient over these tokens is 0, as of "
                      "k1 differentiated; see docs/estimators/surrogates.md");
    else if constexpr (traits_of<Estimator>(law_of<Teacher>()).descends == descent::other)
        static_assert(never<Estimator>,
                      "opd: on these tokens this estimator descends something else than its divergence: "
                      "score_function on stale samples, advantage::old, a shape that is not monotone, or the like; "
                      "say teacher::on_policy{cache} if the student drew them, or accept_bias{estimator}; see "
                      "docs/estimators/surrogates.md");
    else if constexpr (Student::sparse_gradient && !offers_sparse_gradient<Estimator>())
        static_assert(
            never<Estimator>,
            "opd: student::on_support takes renormalised{divergence} alone: every other loss moves all logits "
            "through the normaliser and has a dense gradient; use student::logits");
    else
        return true;
    return false;
}

} // namespace OPD_ISA
} // namespace opd::detail
