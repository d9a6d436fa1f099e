// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What m draws a token leave of the variance of one: AsyncOPD's R_local and R_seq (eq. 16, 17; table 6), of the loss
//
//   L_m = -1/m Σ_i rho_i A_i            eq. 15: the loss of opd::mc on m draws
//
//   R_local(m)   E_s[Var(L_m | s)] / E_s[Var(L_1 | s)]            over prefixes s
//   R_seq(m)     Var[1/T Σ_t L_m(s_t)] / Var[1/T Σ_t L_1(s_t)]                      over sequences of T prefixes
//
// The paper's text fixes the paths s_1 … s_T. Then both are 1/m, since draws at different prefixes are independent.
// Where the variance is taken over sequences, each with a path of its own, it has a part that no draw lowers, B:
//
//   B = Var[1/T Σ_t KL(s_t)]     W = E[1/T² Σ_t Var(L_1 | s_t)]     R_seq(m) = (B + W/m) / (B + W)
//
// Both are simulated here by the library's draws and losses. Paths walk over 48 prefixes of all kinds; the token that
// mu draws says where to. `mixed`: to any of them; `prompts`: within one of four groups by KL(p‖q), as the answers to
// easy and hard prompts do.
#pragma once

#include <cstdint>
#include <vector>

#include "opd/threads.hpp"
#include "policies.hpp"

namespace variance_study {

struct ratio_settings {
    index_t length = 64;   ///< T
    index_t repeats = 400; ///< of each prefix, and of each fixed path
    index_t paths = 16;    ///< that stay fixed
    index_t sequences = 600;
    int staleness = 64;
    std::uint64_t seed = 1;
};

struct ratio {
    double value = 0, error = 0;
};
/// One m.
struct ratios {
    int m = 1;
    ratio local, threshold;                          ///< of MC-m, of threshold(m) relative to MC-1
    ratio fixed;                                     ///< R_seq on fixed paths
    ratio mixed, prompts;                            ///< R_seq over sequences
    double mixed_expected = 0, prompts_expected = 0; ///< (B + W/m)/(B + W) with B and W enumerated
};
struct ratio_outcome {
    std::vector<ratios> all;
    double mixed_between = 0, prompts_between = 0;   ///< B/(B + W)
    double local_variance = 0, local_enumerated = 0; ///< E_s Var(L_1 | s): simulated, and by enumeration
};
ratio_outcome measure_ratios(opd::thread_team& team, const shape_of_world& w, const ratio_settings& s);

} // namespace variance_study
