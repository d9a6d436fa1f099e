// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The estimators that are compared, each with 64 ids a row that the teacher scores, and what one of them does at one
// prefix: mean, variance and bias of its gradient with respect to the logits, against the dense gradient in double.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "opd/estimators/any.hpp"
#include "policies.hpp"

namespace variance_study {

/// Which ids the teacher scores. From `top_of_teacher` on nothing is drawn.
enum class scored {
    iid,            ///< B draws from mu, repeats and all
    iid_distinct,   ///< as many draws as have B distinct ids in the mean, at most 16 B
    head_32,        ///< the B/2 best of mu and B/2 draws from the rest
    head_56,        ///< 7/8 B of them and B/8 draws
    gumbel_top,     ///< B without replacement
    threshold,      ///< B, as many of them for certain as it pays
    of_teacher,     ///< B draws from the teacher
    top_of_teacher, ///< its B best ids, and the mass of the rest
    top_of_stale    ///< the B best of mu, likewise
};
inline constexpr scored designs[] = {scored::iid,        scored::iid_distinct,   scored::head_32,
                                     scored::head_56,    scored::gumbel_top,     scored::threshold,
                                     scored::of_teacher, scored::top_of_teacher, scored::top_of_stale};

/// Form of a loss on a support.
enum class on_support { none, tail_bucket, renormalised, generalised, truncated, reweighted };

struct contender {
    std::string name; ///< in the CSV
    std::string says; ///< in tables
    scored ids = scored::iid;
    opd::any_sampled how = {};
    on_support support = on_support::none;
    bool unbiased = true;     ///< at any staleness
    bool unbiased_now = true; ///< at staleness 0
    bool consistent = false;  ///< its bias falls as 1/B
    bool forward = false;     ///< the truth is KL(q‖p)'s gradient, else KL(p‖q)'s
    bool knows_value = false; ///< is given E_p[A], which 64 ids do not say: a bound, not a choice
    bool linear = false;      ///< its mean is a sum over the vocabulary that one call makes
};
std::vector<contender> contenders();

/// Of one contender at one prefix. Squares are relative to the square of the dense gradient's norm.
struct figures {
    double variance = 0, variance_error = 0; ///< E|g - E g|² and its standard error
    double bias2 = 0,
           bias2_error = 0; ///< |E g - dense|² without the bias of its own noise, and its standard error at 0
    double exact_bias2 =
        std::numeric_limits<double>::quiet_NaN(); ///< by enumeration, where `linear` or nothing is drawn
    double along = 0, along_error = 0;            ///< E g along the dense gradient, as a share of it
    double distinct = 0;                          ///< ids scored
};

struct trial_settings {
    index_t budget = 64;
    index_t trials = 96; ///< a multiple of 24
    std::uint64_t seed = 1;
};

/// All contenders at one prefix, in their order. Those of one design have the same draws. `stale`: mu's logits; `k`:
/// its age; `number`: of the policy, which keys its draws.
std::vector<figures> measure(const std::vector<contender>& all, const policy& at, const floats& stale,
                             const trial_settings& s, std::uint64_t number, int k);

} // namespace variance_study
