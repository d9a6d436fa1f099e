// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Between a scheduler and the workers of its stages: turns the scheduler's actions into commands for workers, and
// what workers reply into events, and moves the payloads of both through the conveyor. It has no threads, no clock
// and no connection: those are the driver's (thread_driver.hpp; virtual_driver.hpp, whose model has the payloads; or
// one of your own).
//
//     worker --- reply ---> hear() ----- event -----> scheduler
//                             | payloads                  | actions
//                             v                           v
//                         conveyor ---- payloads ---> command() ---- command ---> worker
//
//   carrier, the driver's part: what on() and hear() call
//     took(event, now, actions)   the scheduler has taken the event, and nothing is carried out yet
//     carry_out(action)           once for each action, in order. start, abort, park, score, train and sync are for
//                                 workers, who get command(action). The payloads of a step, and of a sequence that
//                                 failed, are there until it returns
//     carried_out()               all of them: scheduler and payloads are one state again, that snapshot() may take
//     refused(exception_ptr)      of hear() alone: the scheduler cannot take what the worker said, or carry_out() threw
//
// What a worker says is kept if its life is the present one; the conveyor drops what is of another attempt.
//
// What a driver owes the scheduler. Messages may get lost, late, doubled and reordered, and workers and the scheduler's
// process may die; remote_driver.hpp does all of this:
//   lives          a worker counts its lives from 1, begins one whenever it starts with nothing, and names it in every
//                  message. It repeats worker_up until it has been heard
//   the dead       a worker that speaks in a past life (is_up() says no, incarnation_of() is as high or higher) is told
//                  so, as by `lost`, and begins another
//   a restart      of the scheduler begins another life of each worker: commands carry a number of its process
//   commands       that come twice are carried out once (a ticket, a job). One of another life is ignored, and so are
//                  weights of a lower job than the installed ones
//   payloads       are keyed by slot, sample and attempt, and kept only if attempt and life are the present ones
//   deadlines      cover what never comes: set all six in `settings` (0, none, by default)
//   payloads that cannot be had any more are said to be so: payload_lost{tickets}
//   publications   have their job's name and outlive their learner: keep them from job needed_from() on. If one is lost
//                  with its source, say weights_lost{job}
//   snapshots      scheduler.snapshot() is saved with the payloads at a `step`. After a restart restore(),
//                  abandon_workers(), save again, and only then ask for anything
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "opd/sched/commands.hpp"
#include "opd/sched/conveyor.hpp"
#include "opd/sched/scheduler.hpp"

namespace opd::sched {

/// Of a driver whose payloads are elsewhere: only on() is of use to it.
struct no_payloads {};

/// `Scheduler`: sched::scheduler, or one that stands in for it in a test.
template <class Payloads, class Scheduler = sched::scheduler>
class dispatcher {
public:
    explicit dispatcher(Scheduler s) : scheduler_(std::move(s)) {}

    const Scheduler& scheduler() const { return scheduler_; }
    Scheduler& scheduler() { return scheduler_; }
    const Payloads& payloads() const { return payloads_; }
    /// What the latest event led to.
    const sched::actions& actions() const { return actions_; }

    /// The scheduler takes an event at the time `now`, and the carrier what it leads to. Throws what either throws.
    template <class Carrier>
    void on(const event& e, double now, Carrier& carrier) {
        actions_.clear();
        scheduler_.on(e, now, actions_);
        carrier.took(e, now, std::as_const(actions_));
        for (const action& a : actions_.items) {
            carrier.carry_out(a);
            if constexpr (requires { payloads_.forget(a.ticket); }) {
                if (a.what == action::kind::fail) payloads_.forget(a.ticket);
                if (a.what == action::kind::step)
                    for (const consumed_sequence& s : actions_.consumed_by(a)) payloads_.forget(s.ticket);
            }
        }
        carrier.carried_out();
    }

    /// For the worker of an action of the latest event, with the payloads that it needs; once for each.
    auto command(const action& a) {
        using command_type = worker_command<typename Payloads::rolled_type, typename Payloads::scored_type>;
        using kind = typename command_type::kind;
        command_type c;
        c.life = a.incarnation;
        switch (a.what) {
        case action::kind::start:
            c.what = kind::start;
            c.ticket = a.ticket;
            c.prefix =
                payloads_.start(a.ticket, scheduler_.start_of(a.ticket), scheduler_.versions_of(a.ticket).tokens > 0);
            break;
        case action::kind::abort:
        case action::kind::park:
            c.what = a.what == action::kind::abort ? kind::abort : kind::park;
            c.ticket = a.ticket;
            break;
        case action::kind::score:
            c.what = kind::score;
            c.job = a.job;
            for (const ticket& t : actions_.of(a)) {
                c.tickets.push_back(t);
                c.sequences.push_back(payloads_.view(t).rolled);
            }
            break;
        case action::kind::train:
            c.what = kind::train;
            c.call = {a.job, {a.version, a.from}};
            for (const ticket& t : actions_.of(a)) c.batch.push_back(payloads_.view(t));
            break;
        case action::kind::sync:
            c.what = kind::install;
            c.weights = {a.version, a.job};
            break;
        default:
            throw invalid_input("action", "is for no worker");
        }
        return c;
    }

    /// Whether this is the present life of that worker, as the scheduler has it.
    bool lives(const event& e) const {
        return scheduler_.is_up(e.stage, e.worker) && scheduler_.incarnation_of(e.stage, e.worker) == e.incarnation;
    }
    /// Takes a worker's reply. Of one that the scheduler refuses, the attempt has failed.
    template <class Reply, class Carrier>
    void hear(Reply&& r, double now, Carrier& carrier) {
        event e = r.what;
        e.tickets = r.tickets;
        const bool kept = lives(e), parked = e.what == event::kind::parked;
        if (kept && !r.lost.empty()) { // first of all: then the call's failure is nobody else's
            event gone = event::payload_lost(std::span<const ticket>(r.lost), e.job);
            if (!offer(gone, now, carrier)) return;
        }
        auto before = kept ? keep(r) : nullptr;
        if (offer(e, now, carrier) || !kept || !(parked || e.what == event::kind::rolled_out)) return;
        if (parked) payloads_.parked(e.ticket, std::move(before));
        offer(event::rollout_failed(e.ticket), now, carrier); // the next attempt replaces the payload
    }

    /// What is in rollout on a worker, by sample: the oldest first.
    std::vector<ticket> running(std::int32_t worker) const {
        std::vector<ticket> r;
        scheduler_.for_each([&](const outstanding_sequence& q) {
            if (q.where == place::rollout && q.ticket.worker == worker) r.push_back(q.ticket);
        });
        std::sort(r.begin(), r.end(), [](const ticket& a, const ticket& b) { return a.sample < b.sample; });
        return r;
    }

    /// All that a run needs to go on (run_snapshot).
    auto snapshot() const { return payloads_.snapshot(scheduler_); }
    /// After the scheduler was restored from it, and its workers abandoned.
    template <class Snapshot>
    void resume(const Snapshot& from) {
        payloads_.resume(scheduler_, from);
    }

private:
    template <class Carrier>
    bool offer(const event& e, double now, Carrier& carrier) {
        try {
            on(e, now, carrier);
            return true;
        } catch (...) {
            carrier.refused(std::current_exception());
            return false;
        }
    }
    /// Returns what a sequence that is parked would have gone on from before.
    template <class Reply>
    auto keep(Reply& r) {
        const event& e = r.what;
        decltype(r.sequence) before;
        switch (e.what) {
        case event::kind::rolled_out:
            payloads_.rolled(e.ticket, e.versions, std::move(r.sequence));
            break;
        case event::kind::parked:
            before = payloads_.parked(e.ticket, std::move(r.sequence));
            break;
        case event::kind::scored:
            for (std::size_t i = 0; i < r.tickets.size(); ++i) payloads_.scored(r.tickets[i], std::move(r.scores[i]));
            break;
        case event::kind::synced:
            for (auto& p : r.prefixes) payloads_.exported(p.ticket, std::move(p.sequence));
            break;
        default:
            break;
        }
        return before;
    }

    Scheduler scheduler_;
    Payloads payloads_;
    sched::actions actions_;
};

} // namespace opd::sched
