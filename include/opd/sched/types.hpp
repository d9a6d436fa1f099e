// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The words of the schedulers: sequences, versions, stages, tickets, lags and settings.
//
// A *sequence* is one response to one prompt. It passes rollout, teacher scoring and the learner. The *version* of
// the student counts completed train batches; every staleness figure is in versions. A *permit* is the right of one
// sequence to be outstanding: between its admission and the synchronisation after the update that consumed it.
//
//   lag of a token = version of the update that consumes it - version of the weights that drew it
//   start lag      = the same for the weights at the sequence's start
//
// Source: AsyncOPD section 7 and appendix G (schedules, permits, sync gate), appendix B (controlled staleness).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <variant>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::sched {

/// Completed train batches.
using version_t = std::int64_t;

/// A time that never comes.
inline constexpr double forever = std::numeric_limits<double>::infinity();

/// Number of a sequence, unique in a run: the cursor of the prompt source at its admission. With `group` answers a
/// prompt, sequence i is answer i % group of prompt i / group.
using sample_t = std::uint64_t;

/// The three stages, in the order in which a sequence passes them. Their numbers index arrays of stage_count.
enum class stage : std::uint8_t { rollout, teacher, learner };
/// How many of them there are: sizes of arrays by stage.
inline constexpr int stage_count = 3;
constexpr stage last_of(stage) { return stage::learner; }
constexpr const char* name_of(stage s) {
    return s == stage::rollout ? "rollout" : s == stage::teacher ? "teacher" : "learner";
}

/// What a worker is at.
enum class activity : std::uint8_t {
    none,
    work, ///< of its stage
    spare ///< what a rollout worker does for want of sequences (stages.hpp); no rollout, as far as figures go
};
constexpr activity last_of(activity) { return activity::spare; }

/// Where a sequence is between its admission and the end of the step that consumed it.
enum class place : std::uint8_t { none, waiting, rollout, queued, scoring, ready, training };
constexpr place last_of(place) { return place::training; }

/// Which life of a worker: from 1, and higher each time that it comes (a count of its starts, or a time). A worker
/// that was lost comes back with a higher one.
using incarnation_t = std::uint32_t;

/// One attempt at rolling one sequence out, on one lane of one life of a worker. A reply carries the ticket it
/// answers; an attempt that was given up is known by its number, so late and double replies do no harm.
struct ticket {
    sample_t sample = 0;
    std::uint32_t slot = 0;    ///< of its permit, in [0, M): unique among outstanding sequences
    std::uint32_t attempt = 0; ///< counts starts of this sequence; its upper half, lives of the scheduler
    std::int32_t worker = -1;
    incarnation_t incarnation = 0;
    std::int32_t lane = -1; ///< in [0, slots of the worker): unique among what runs there
    bool operator==(const ticket&) const = default;
    template <class A>
    void fields(A& a) {
        a(sample, slot, attempt, worker, incarnation, lane);
    }
};

/// Weights of the student, by the train job that made them; 0: those that the run began with. A learner that is
/// thought dead may publish late, so the version alone does not say which weights they are.
struct weights {
    version_t version = 0;
    std::uint64_t job = 0;
    bool operator==(const weights&) const = default;
    template <class A>
    void fields(A& a) {
        a(version, job);
    }
};

/// An elasticity (rollout_cost.hpp) of which nothing is known. Those that there are lie in [-1, 1].
inline constexpr double untold = 2;

/// Which versions drew the tokens of one response.
struct token_versions {
    version_t oldest = 0, newest = 0;
    double mean = 0;         ///< weighted by tokens
    std::int64_t tokens = 0; ///< of the response
    bool operator==(const token_versions&) const = default;
    template <class A>
    void fields(A& a) {
        a(oldest, newest, mean, tokens);
    }
};

/// The four lags of a consumed sequence.
enum class lag : std::uint8_t { start, oldest_token, mean_token, newest_token };
/// How many of them there are: sizes of arrays by lag.
inline constexpr int lag_count = 4;
constexpr const char* name_of(lag l) {
    constexpr const char* names[] = {"start", "oldest_token", "mean_token", "newest_token"};
    return names[static_cast<int>(l)];
}

} // namespace opd::sched
