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
//   weighted_reverse_kl  teacher::weighted  any design that states its weights; threshold(B) of designs.hpp is the default
//     baseline: exact_entries           b = Σ_exact p A / Σ_exact p, deterministic        this project
//
// Unbiased for the dense reverse KL gradient with unclipped_is and A_theta, at any staleness of mu. The reported value never
// uses the baseline. Shapes: ids, log mu, log q (N,m); a dense gradient (N,V), since every logit moves the normaliser.
// Repeated ids are legal and summed in sample order. log rho saturates at ±80, counted.
#pragma once

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/teacher.hpp"
#include "opd/token.hpp"

namespace opd {

/// Reverse KL from m i.i.d. samples of mu. See the head of this file.
template <class Surrogate = unclipped_is>
struct mc_reverse_kl {
    static_assert(opd::surrogate<Surrogate>, "opd: a surrogate is a struct with `token_out operator()(const token_in&) "
                                             "const`; see docs/concepts/surrogate.md");
    static constexpr cache_kind takes = cache_kind::samples;
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    Surrogate surrogate = {};
    opd::baseline baseline = opd::baseline::none;
    opd::advantage advantage = opd::advantage::theta;
    double advantage_clip = 0; ///< A clipped to [-a, a]; 0: not

    void validate() const {
        if (baseline == opd::baseline::exact_entries)
            throw invalid_input("mc_reverse_kl.baseline", "exact_entries needs a teacher::weighted cache");
        if (!detail::is_finite(advantage_clip) || advantage_clip < 0)
            throw invalid_input("mc_reverse_kl.advantage_clip", "must be positive and finite, or 0 for none");
    }
};

/// Reverse KL from weighted entries: threshold(B), head + tail, sampling without replacement, ….
template <class Surrogate = unclipped_is>
struct weighted_reverse_kl {
    static_assert(opd::surrogate<Surrogate>, "opd: a surrogate is a struct with `token_out operator()(const token_in&) "
                                             "const`; see docs/concepts/surrogate.md");
    static constexpr cache_kind takes = cache_kind::weighted;
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    Surrogate surrogate = {};
    opd::baseline baseline = opd::baseline::exact_entries;
    opd::advantage advantage = opd::advantage::theta;
    double advantage_clip = 0;

    void validate() const {
        if (baseline == opd::baseline::leave_one_out || baseline == opd::baseline::self_normalised)
            throw invalid_input("weighted_reverse_kl.baseline", "leave-one-out baselines need i.i.d. teacher::samples");
        if (!detail::is_finite(advantage_clip) || advantage_clip < 0)
            throw invalid_input("weighted_reverse_kl.advantage_clip", "must be positive and finite, or 0 for none");
    }
};

} // namespace opd
