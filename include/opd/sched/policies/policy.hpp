// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a staleness policy is: a struct with
//
//   static constexpr policy_traits traits      what settings, scheduler and queue ask of it
//   using order = …                            itself, or an order that it has in common with others
//
// An order lists the outstanding sequences and says which scored ones make the next batch. Each policy has a file in
// this folder, with its theorem and the idea of the proof at its head. To add one: its file, and its lines in
// policies.hpp.
//
//   explicit order(const policy_settings&)
//   admitted(slot)                             it waits for a lane, and has no version yet
//   started(slot, version)                     its first token will be drawn by that version
//   restarted(slot, version)                   it waits again, without its tokens and without that version
//   ready(slot, version)                       it is scored, and may be picked;
//   unready(slot, version)                     and may not any more
//   left(slot, version, was_ready)             it was given up after its start,
//   withdrawn(slot)                            or before
//   bool pick(n, now, out)                     appends the batch of n for the update at version `now`; false: there is
//                                              none
//   put_back(batch)                            a picked batch was not consumed: its sequences are ready again, in front
//   list(out)                                  what it lists, in its order: a snapshot has this, and replays it
//   admissible(const admission_state&)         optional: how many may be admitted now, if not as permits say
//   slack()                                    optional: ledger::slack()
//   fields(archive)                            optional: state that does not follow from the list
//
// Notation of the theorems: v the version; B the batch; M <= (tau + 1)·B the permits. Between two steps at most M
// sequences are outstanding, those in training included, and every full batch consumes B of them. A failed sequence
// leaves and a retried one takes a new version; both only shrink the sets that the bounds count.
//
// Source: AsyncOPD appendix G.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "opd/sched/slots.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What becomes of a sequence that may not be consumed any more, since its start lag would exceed tau.
enum class stale_end : std::uint8_t {
    none, ///< there is none, or it is consumed all the same
    given_up,
    started_again
};

/// What settings, scheduler and snapshots ask of a policy before it has any state.
struct policy_traits {
    const char* name;
    stale_end stale = stale_end::none;
    bool automatic = false;      ///< M may be automatic: permits help one by one, not by whole batches alone
    bool own_admission = false;  ///< admissible() and `concurrency` limit what is outstanding, instead of M
    bool lists_unscored = false; ///< list() names all that are not in training, else those that are ready
    bool table_by_version =
        false; ///< it has a table from the oldest start on, so a snapshot may name none older than tau
    const char* deadlock = nullptr; ///< why it is a negative control, which a run must ask for
};

namespace policies {

/// What an order is made from; B and tau as settings.hpp has them.
struct policy_settings {
    index_t batch = 1;
    index_t tau = 0;
    index_t concurrency = 0; ///< of own_admission
};

/// A sequence of a batch that is put back.
struct listing {
    slot_t slot;
    version_t version; // of its start
};

/// What an order with `own_admission` decides by, in sequences.
struct admission_state {
    version_t version = 0;
    index_t consumed = 0; // over the whole run
    index_t outstanding = 0;
    index_t in_rollout = 0; // of those; or waiting for a lane
};

} // namespace policies
} // namespace opd::sched
