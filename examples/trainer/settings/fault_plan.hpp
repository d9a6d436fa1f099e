// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What goes wrong on purpose (--inject), to see deadlines, retries and checkpoints at work. Of each call of a stage it
// is drawn, keyed by the run's seed and the call's own number, whether
//
//   kill    its worker dies in it, and is back `seconds` later
//   delay   its answer comes `seconds` late
//   drop    its answer never comes: deadlines find out
#pragma once

#include <cstdint>

#include "opd/sched/virtual_driver.hpp"
#include "settings/config.hpp"

namespace trainer {

struct fault_plan {
    double kill = 0, delay = 0, drop = 0; ///< share of the calls
    double seconds = 0;
    std::uint64_t seed = 0;

    enum class kind { none, kill, delay, drop };
    struct drawn {
        kind what = kind::none;
        double part = 0; ///< in (0, 1): when in the call, or of `seconds`
    };
    drawn of(opd::sched::stage s, std::uint64_t call, std::uint32_t again) const;
    /// The same for the virtual driver.
    opd::sched::fault in_virtual_time(opd::sched::stage s, std::uint64_t call, std::uint32_t again) const;
};

/// "kill=0.01,drop=0.02": shares that add up to 1 at most; nothing: none. Failures are of kind exit_usage.
fault_plan faults_of(const config& c);

} // namespace trainer
