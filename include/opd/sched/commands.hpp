// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a driver tells a worker, and what a worker says, with the payloads; worker_loop.hpp has the table of both.
// Between processes they are messages, in the bytes of an archive: payloads list their fields, too. A stop token
// stays where it is, a hook is for a learner of the driver's own process, and of an exception a message has the text.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stop_token>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/events.hpp"
#include "opd/sched/stages.hpp"

namespace opd::sched {

/// One command for one life of a worker. What a member is for stands behind it; the others keep their defaults.
template <class Rolled, class Scored>
struct worker_command {
    enum class kind : std::uint8_t { begin, start, abort, park, spare, install, score, train, hook, halt };
    friend constexpr kind last_of(kind) { return kind::halt; }
    kind what = kind::halt;
    incarnation_t life = 0;
    std::stop_token stop = {};                                 ///< begin: of all calls of this life; spare: of those
    std::int32_t slots = 1;                                    ///< begin
    sched::ticket ticket = {};                                 ///< start, abort, park
    std::shared_ptr<const Rolled> prefix = {};                 ///< start
    sched::weights weights = {};                               ///< install
    bool exports = false;                                      ///< install
    std::uint64_t job = 0;                                     ///< score
    std::vector<sched::ticket> tickets = {};                   ///< score
    std::vector<std::shared_ptr<const Rolled>> sequences = {}; ///< score, as tickets
    train_call call = {};                                      ///< train
    std::vector<sequence_view<Rolled, Scored>> batch = {};     ///< train
    std::function<void()> hook = {};

    /// All but `stop` and `hook`.
    template <class A>
    void fields(A& a) {
        a(what, life, slots, ticket, weights, exports, job, tickets, call, batch);
        detail::pointer_fields(a, prefix);
        detail::list_fields(a, sequences, [&](auto& p) { detail::pointer_fields(a, p); });
        detail::needs(what != kind::score || sequences.size() == tickets.size(), "a call has one ticket a sequence");
        detail::needs(what != kind::hook, "a hook is no message");
    }
};

/// One answer: the event for the scheduler, and the payloads that go with it.
template <class Rolled, class Scored>
struct worker_reply {
    event what;                                             ///< tick: none, there is but an exception
    std::shared_ptr<const Rolled> sequence = {};            ///< rolled_out, parked
    std::vector<partial_rollout<Rolled>> prefixes = {};     ///< synced
    std::vector<sched::ticket> tickets = {};                ///< scored: those that have a score
    std::vector<std::shared_ptr<const Scored>> scores = {}; ///< as tickets
    std::vector<sched::ticket> lost =
        {}; ///< score_failed, scored, learn_failed, rollout_failed: whose payloads cannot be had
    std::exception_ptr failed = {}; ///< what the stage threw
    bool of_hook = false;           ///< which threw it
    bool spared = false;            ///< it has no spare work left
    /// Tokens of attempts that it let go of: for an observer.
    std::vector<std::pair<sched::ticket, std::int64_t>> drawn = {};

    /// All of it; of `failed` the text.
    template <class A>
    void fields(A& a) {
        a(what, prefixes, tickets, lost, of_hook, spared, drawn);
        detail::pointer_fields(a, sequence);
        detail::list_fields(a, scores, [&](auto& p) { detail::pointer_fields(a, p); });
        detail::exception_fields(a, failed);
        detail::needs(scores.size() == tickets.size(), "an answer has one ticket a score");
    }
};

} // namespace opd::sched
