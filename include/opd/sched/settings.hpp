// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The settings of a schedule, and which settings are refused.
//
//   sync           rollout, score, train, synchronise, one after the other                      lag 0
//   step_off{k}    whole batches; the batch trained at version v was started at version v - k    lag min(v, k), exactly
//   controlled{k}  as step_off{k} without overlap: staleness is the only variable                lag min(v, k), exactly
//                  (less for batches at the end of a run that make up for failures)
//   async{tau}     sequences stream under M permits. The staleness policy chooses which of them make a batch; the
//                  scheduler chooses how many permits there are
//
// Source: AsyncOPD section 7, appendix G (sync, step-off, async) and appendix B (controlled staleness).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "opd/error.hpp"
#include "opd/sched/policies.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What happens to running sequences when the weights change.
enum class weight_update : std::uint8_t {
    keep,        ///< they pause, keep their tokens, rebuild their KV state and go on under the new weights
    abort,       ///< they start again under the new weights
    finish_first ///< the change waits until none is running
};
constexpr weight_update last_of(weight_update) { return weight_update::finish_first; }
constexpr const char* name_of(weight_update u) {
    constexpr const char* names[] = {"keep", "abort", "finish_first"};
    return names[static_cast<int>(u)];
}

/// Rollout, score, train, synchronise: no overlap, lag 0.
struct sync {};

/// Whole batches with overlap; lag min(v, k) at version v, exactly.
struct step_off {
    index_t k = 2; ///< updates between the start of a batch and the update that consumes it; 0: sync
};

/// Lag as of step_off, but without overlap: to measure what staleness alone does.
struct controlled {
    index_t k = 2; ///< as in step_off
};

// Values of async::outstanding that are no numbers.
inline constexpr index_t by_policy = 0;  ///< automatic under capacity, edf, drop and retry; widest under the others
inline constexpr index_t automatic = -1; ///< between B and (tau + 1)·B, as many as the work needs: outstanding.hpp
inline constexpr index_t widest = -2;    ///< (tau + 1)·B, as many as the bound allows

/// Sequences stream; which of them make a batch is the policy's to say, and so is what tau bounds.
struct async {
    index_t tau = 4; ///< in train batches: bounds the mean start lag (capacity, areal) or every sequence's
    index_t outstanding = by_policy; ///< M, permits: a number, automatic or widest
    staleness_policy policy = staleness_policy::capacity;
    weight_update update = weight_update::keep; ///< of what runs when the weights change
    index_t concurrency = 0;                    ///< areal: most sequences in rollout; 0: no limit
    bool negative_control = false;              ///< allows naive_wait
};

/// One of the four, `async` by default in `settings`.
using schedule = std::variant<sync, step_off, controlled, async>;

/// All that a run's schedule is told. `plan_of` resolves and checks them; drivers and queue do so at once.
struct settings {
    index_t batch = 256; ///< B, sequences a train batch
    sched::schedule schedule = async{};
    index_t group = 1;     ///< answers a prompt; their permits are taken all or none
    index_t sequences = 0; ///< to be consumed, then the run ends; 0: no end. Whole groups start, so it may be some more
    index_t available = 0; ///< what the prompt source can give; 0: no end

    // Of a run that kept its weights and nothing of its scheduler: it begins there, with nothing outstanding.
    version_t first_version = 0; ///< of the weights that it begins with
    sample_t first_sample = 0;   ///< of its first sequence. `sequences` counts what is consumed from there on

    index_t teacher_batch = 8;   ///< sequences a scoring call
    double teacher_flush = 0.05; ///< seconds after which a smaller call is made; 0: at once

    int rollout_attempts = 3;  ///< failures of a sequence in rollout before it fails for good
    int teacher_attempts = 3;  ///< likewise in scoring
    int learner_attempts = 1;  ///< failures of a train step before its sequences fail
    int payload_attempts = 10; ///< losses of what was drawn of a sequence before it fails for good
    /// Steps' worth of sequences that fail in a row, nothing being learnt from in between: then the run ends as
    /// failed. 0: it goes on for ever.
    int fruitless_steps = 5;

    // By default a call that hangs is never noticed: no number fits every rollout, and virtual time has no scale. Ten
    // times the longest call that was seen is a good deadline.
    double rollout_deadline = 0; ///< seconds of one attempt; 0: none. Past it the attempt is aborted
    double abort_deadline =
        0; ///< seconds for a worker to let go of an aborted or parked attempt before it counts as lost; 0:
           ///< none, and an attempt that hangs keeps its lane
    double teacher_deadline = 0; ///< seconds of a scoring call before its worker counts as lost; likewise:
    double learner_deadline = 0;
    double sync_deadline = 0; ///< seconds for a rollout worker to install new weights

    // What a message may name: memory is taken for as many.
    std::int32_t most_workers = 1 << 16; ///< of a stage: their numbers lie below
    std::int32_t most_slots = 1 << 16;   ///< of a worker
};

/// The schedule with its defaults resolved.
struct plan {
    bool streaming = true;       ///< async; else whole batches
    bool overlap = true;         ///< false: controlled
    index_t batch = 1;           ///< B
    index_t depth = 0;           ///< tau or k
    index_t permits = 1;         ///< M; at the start, if it is automatic
    index_t least = 1, most = 1; ///< automatic: between which it lies
    index_t group = 1;
    bool automatic = false;
    staleness_policy policy = staleness_policy::in_order;
    weight_update update = weight_update::finish_first;
    index_t concurrency = 0;
};

/// Resolves and checks; throws invalid_input that names the setting and says why it cannot work.
inline plan plan_of(const settings& s) {
    const auto refuse = [](const char* name, const std::string& why) { throw invalid_input(name, why); };
    const auto at_least = [&](const char* name, auto value, auto least) {
        if (!(value >= least))
            refuse(name, "must be at least " + std::to_string(least) + ", not " + std::to_string(value));
    };
    at_least("batch", s.batch, index_t{1});
    at_least("group", s.group, index_t{1});
    at_least("sequences", s.sequences, index_t{0});
    at_least("available", s.available, index_t{0});
    at_least("first_version", s.first_version, version_t{0});
    at_least("teacher_batch", s.teacher_batch, index_t{1});
    at_least("rollout_attempts", s.rollout_attempts, 1);
    at_least("teacher_attempts", s.teacher_attempts, 1);
    at_least("learner_attempts", s.learner_attempts, 1);
    at_least("payload_attempts", s.payload_attempts, 1);
    at_least("fruitless_steps", s.fruitless_steps, 0);
    for (const auto& [name, count] : {std::pair{"most_workers", s.most_workers}, {"most_slots", s.most_slots}}) {
        at_least(name, count, 1);
        if (count > 1 << 24) refuse(name, "must be at most 2^24");
    }
    for (const auto& [name, seconds] : {std::pair{"teacher_flush", s.teacher_flush},
                                        {"rollout_deadline", s.rollout_deadline},
                                        {"abort_deadline", s.abort_deadline},
                                        {"teacher_deadline", s.teacher_deadline},
                                        {"learner_deadline", s.learner_deadline},
                                        {"sync_deadline", s.sync_deadline}}) {
        at_least(name, seconds, 0.0);
        if (seconds > 1e9) refuse(name, "must be at most 1e9 seconds (64-bit nanoseconds end there)");
    }
    for (const auto& [name, count] : {std::pair{"sequences", s.sequences}, std::pair{"available", s.available}})
        if (count % s.group != 0) refuse(name, "must be a multiple of group, " + std::to_string(s.group));
    constexpr index_t most = index_t{1} << 31; // slots are 32-bit
    if (s.batch >= most) refuse("batch", "must be below 2^31");
    if (s.group >= most) refuse("group", "must be below 2^31");
    constexpr std::int64_t most_counted = std::int64_t{1} << 59; // as far again to what a snapshot can count
    for (const auto& [name, count] : {std::pair{"sequences", s.sequences}, std::pair{"available", s.available}})
        if (count > most_counted) refuse(name, "must be at most 2^59");
    if (s.first_version > most_counted / s.batch) refuse("first_version", "must be at most 2^59 / batch");
    if (s.first_sample > sample_t{most_counted}) refuse("first_sample", "must be at most 2^59");
    if (s.first_sample % static_cast<sample_t>(s.group) != 0)
        refuse("first_sample", "must be a multiple of group, " + std::to_string(s.group));

    plan p;
    p.batch = s.batch;
    p.group = s.group;
    const auto whole_batches = [&](index_t k, bool overlap) {
        at_least("schedule.k", k, index_t{0});
        if (k >= (most - 1) / s.batch) refuse("schedule.k", "(k + 1) batches must be below 2^31 sequences");
        if (s.batch % s.group != 0)
            refuse("batch", "must be a multiple of group, " + std::to_string(s.group) + ", where batches are whole");
        p.streaming = false;
        p.overlap = overlap;
        p.depth = k;
        p.permits = (k + 1) * s.batch;
    };
    if (std::holds_alternative<sync>(s.schedule)) {
        whole_batches(0, true);
    } else if (const auto* off = std::get_if<step_off>(&s.schedule)) {
        whole_batches(off->k, true);
    } else if (const auto* still = std::get_if<controlled>(&s.schedule)) {
        whole_batches(still->k, false);
    } else {
        const async& a = std::get<async>(s.schedule);
        at_least("schedule.tau", a.tau, index_t{0});
        if (a.outstanding < widest)
            refuse("schedule.outstanding",
                   "must be a number of permits, automatic or widest, not " + std::to_string(a.outstanding));
        at_least("schedule.concurrency", a.concurrency, index_t{0});
        if (a.tau >= (most - 1) / s.batch) refuse("schedule.tau", "(tau + 1) batches must be below 2^31 sequences");
        p.depth = a.tau;
        const policy_traits& policy = traits_of(a.policy);
        p.automatic = a.outstanding == automatic || (a.outstanding == by_policy && policy.automatic);
        p.most = (a.tau + 1) * s.batch;
        p.least = s.batch % s.group == 0 ? s.batch : s.batch + s.group - 1;
        p.permits = a.outstanding > 0 ? a.outstanding
                    : p.automatic ? std::min((std::max(2 * s.batch, p.least) + s.group - 1) / s.group * s.group, p.most)
                                  : p.most;
        p.policy = a.policy;
        p.update = a.update;
        p.concurrency = a.concurrency;
        if (p.permits >= most) refuse("schedule.outstanding", "must be below 2^31");
        if (p.permits < s.batch)
            refuse("schedule.outstanding", "must be at least the batch, " + std::to_string(s.batch) + ", not " +
                                               std::to_string(p.permits) + ": no batch would ever fill");
        if (policy.stale == stale_end::none && p.permits > (a.tau + 1) * s.batch)
            refuse("schedule.outstanding",
                   "must be at most (tau + 1)·batch = " + std::to_string((a.tau + 1) * s.batch) + ", not " +
                       std::to_string(p.permits) + ": with more, no order of consumption keeps the lag within tau");
        if (policy.own_admission && a.outstanding != by_policy && a.outstanding != widest)
            refuse("schedule.outstanding",
                   std::string("must be widest under ") + policy.name + ", whose own rule limits what is outstanding");
        if (p.automatic && !policy.automatic)
            refuse("schedule.outstanding", std::string("cannot be automatic under ") + policy.name +
                                               ", where permits help by whole batches only: say how many, or widest");
        if (!policy.own_admission && a.concurrency > 0) {
            std::string owners;
            for (const policy_traits& t : policies::all_traits)
                if (t.own_admission) owners += (owners.empty() ? "" : " or ") + std::string(t.name);
            refuse("schedule.concurrency", "belongs to the policy " + owners);
        }
        if (a.concurrency > 0 && a.concurrency < s.group)
            refuse("schedule.concurrency", "must be at least group, " + std::to_string(s.group));
        if (policy.deadlock && !a.negative_control)
            refuse("schedule.policy", std::string(policy.name) + " " + policy.deadlock +
                                          "; it is a negative control (negative_control = true)");
        // Otherwise less than a batch could be outstanding with fewer permits free than a group takes.
        if (p.permits < s.batch + s.group - 1 && (s.batch % s.group != 0 || p.permits % s.group != 0))
            refuse("group", "must divide batch and outstanding, or outstanding must be at least batch + group - 1: "
                            "else the permits that are left are too few for a group and too many for a batch");
    }
    return p;
}

} // namespace opd::sched
