// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What an estimator is, as its type says it: whether its mean is the gradient of what it descends, what its loss is,
// and what that descent is under the law that the tokens were drawn from. The call refuses what descends nothing, and
// what descends something else unless the caller accepts it; the tests derive from it what must hold, and what must
// fail.
#pragma once

#include "opd/config.hpp"
#include "opd/row_program.hpp"
#include "opd/teacher.hpp"

namespace opd {

/// What the mean of a gradient descends at a prefix.
enum class descent {
    none,                  ///< 0 in the mean
    reverse,               ///< KL(p‖q)
    forward,               ///< KL(q‖p)
    reverse_minus_forward, ///< KL(p‖q) - KL(q‖p)
    divergence,            ///< another divergence of p and q: the estimator's page names it
    outside,               ///< the advantage of the cache, alone or with the teacher's
    other                  ///< none of these: needs accept_bias{estimator}
};
/// Of the gradient, over the draws, against the gradient of what is descended.
enum class bias { unbiased, consistent, biased };
/// What the reported loss is.
enum class meaning { divergence, value_estimate, surrogate };

/// The defaults are those of a divergence in its own right: unbiased, zero at equality, descending itself.
struct estimator_traits {
    bias mean = bias::unbiased;
    meaning value = meaning::divergence;
    bool exact_zero_at_equality = true; ///< loss and gradient 0 where p = q, whatever was drawn
    descent descends = descent::divergence;
};

/// Of estimator E on tokens drawn under a law. An estimator says it in `static constexpr estimator_traits
/// traits(law)`; of one that does not, nothing is known and nothing is refused.
template <class E>
constexpr estimator_traits traits_of(law drawn = law::stale) {
    if constexpr (requires { E::traits(drawn); })
        return E::traits(drawn);
    else if constexpr (divergence<E>)
        return {};
    else
        return {bias::biased, meaning::surrogate, false, descent::outside};
}

} // namespace opd
