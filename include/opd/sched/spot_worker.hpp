// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A worker's side of spot training: what to do with orders, when to report, when to let go. spot_coordinator.hpp has
// the protocol. A state machine as well: it trains nothing, sends nothing, reads no clock; one thread uses it.
//
//   spot_worker w(options, number, life);          // busy: rollout has it. A restarted process has a higher life
//   w.idle(now);                                   // rollout has nothing for it, its memory is free
//   if (w.busy(now)) serve;                        // rollout wants it: at once, or once ended() has been called
//   w.hear(order, now);                            // of the coordinator
//   if (auto r = w.report(now)) send *r;           // after each of the others, and at next_report()
//
//   switch (const spot_task t = w.next(now); t.what) {          whenever nothing of it runs
//   case spot_task::kind::install:  the drafter's weights are those of t.drafter; w.installed();
//   case spot_task::kind::slice:    w.begin(now); train a slice of this part; w.ended(spot_part::…, now);
//   case spot_task::kind::apply:    w.begin(now); one update of the parts of t.members, published under {t.epoch,
//                                   t.round}; w.ended(spot_part::applied, now);
//   case spot_task::kind::none:     wait for a message, for rollout, or until next_report()
//   }
//
// A slice ends with `none` if more of the part is to come, `contributed` when the part is whole and lies where the
// leader finds it, `failed` where it cannot be had. Between slices rollout, an order or the end of the lease takes the
// worker back, and what is half done is forgotten. If stopping() turns true in the middle of one, it may be given up
// there (ended(none)), so that rollout waits for less than a slice.
//
// The leader keeps what it applied apart until `install` names it: weights that were not committed draft nothing, and
// the next round starts from t.drafter, whatever was applied meanwhile.
//
// Promise: no slice begins later than `lease` seconds after the report was sent that the last order answered, so the
// coordinator knows when a worker that it hears nothing of has stopped.
//
// Errors: invalid_input: an option; `worker`, `life`, `order` where it is another's; `part` where there is none to end,
// or an update that nobody asked for. std::logic_error: begin() without a task, idle() or installed() out of turn.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/drafter_stream.hpp"
#include "opd/sched/spot_messages.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What next() says to do, and of which session: `slice` and `apply` name epoch, round and members.
struct spot_task {
    enum class kind : std::uint8_t { none, install, slice, apply };
    kind what = kind::none;
    std::uint64_t epoch = 0, round = 0;
    std::int32_t leader = -1;
    std::vector<std::int32_t> members = {}; ///< slice: of the round; apply: whose parts
    drafter_weights drafter = {};           ///< what to install; what the round goes on from
};

/// One for each life of a worker. One thread's; `now` never decreases.
class spot_worker {
public:
    struct counters {
        std::int64_t slices = 0, parts = 0, applied = 0;
        std::int64_t discarded = 0; ///< parts that were begun and never whole
        std::int64_t expired = 0;   ///< leases that ran out
        std::int64_t late = 0;      ///< orders that were doubled, overtaken or of another life
        template <class A>
        void fields(A& a) {
            a(slices, parts, applied, discarded, expired, late);
        }
    };

    spot_worker(const spot_options& o, std::int32_t number, incarnation_t life, std::int32_t group = 0)
        : options_(o), worker_(number), group_(group), life_(life) {
        options_.check();
        if (number < 0 || number >= o.workers)
            throw invalid_input("worker", "there is none of number " + std::to_string(number));
        if (life < 1) throw invalid_input("life", "must be at least 1");
        if (group < 0) throw invalid_input("group", "must be at least 0");
    }

    spot_state state() const { return state_; }
    /// Rollout has nothing for it any more.
    void idle(double now) {
        if (state_ != spot_state::busy) throw std::logic_error("opd: a spot worker is idle already");
        settle(spot_state::idle, now);
    }
    /// Rollout wants it. Whether it has it now; else once the slice has ended.
    bool busy(double now) {
        if (state_ == spot_state::busy) return true;
        if (in_slice_) {
            stop_ = stop::to_busy;
            return false;
        }
        settle(spot_state::busy, now);
        return true;
    }
    /// Whether the slice that runs is of no use any more, or rollout waits for its end.
    bool stopping() const { return in_slice_ && (stop_ != stop::none || !current()); }
    bool in_slice() const { return in_slice_; }

    void hear(const spot_order& o, double now) {
        if (o.worker != worker_)
            throw invalid_input("order",
                                "is for worker " + std::to_string(o.worker) + ", not for " + std::to_string(worker_));
        if (o.life != life_ || o.number <= order_) {
            ++totals_.late;
            return;
        }
        order_ = o.number;
        drafter_ = o.drafter;
        if (o.what == spot_order::kind::rest) {
            if (state_ != spot_state::training && since_ > o.beyond) return;
            if (!in_slice_)
                settle(state_ == spot_state::busy ? spot_state::busy : spot_state::idle, now);
            else if (stop_ == stop::none)
                stop_ = stop::to_idle;
            return;
        }
        // What was answered before it last let go would have it train against a later word.
        if (state_ == spot_state::busy || stop_ != stop::none || o.answers < since_) return;
        lease_end_ = std::max(lease_end_, o.sent + options_.lease);
        if (o.epoch != epoch_ || o.round != round_) {
            totals_.discarded += begun_;
            epoch_ = o.epoch, round_ = o.round, part_ = spot_part::none, begun_ = false;
        }
        applies_ = o.what == spot_order::kind::apply;
        leader_ = o.leader, members_ = o.members;
        if (state_ == spot_state::idle) {
            state_ = spot_state::training;
            due_ = now;
        }
    }

    /// What to do now.
    spot_task next(double now) {
        if (in_slice_) return {};
        if (has_ != drafter_) return {.what = spot_task::kind::install, .drafter = drafter_};
        if (state_ != spot_state::training) return {};
        if (now >= lease_end_) {
            ++totals_.expired;
            settle(spot_state::idle, now);
            return {};
        }
        spot_task t{spot_task::kind::none, epoch_, round_, leader_, members_, drafter_};
        if (part_ == spot_part::none)
            t.what = spot_task::kind::slice;
        else if (part_ == spot_part::contributed && applies_)
            t.what = spot_task::kind::apply;
        return t;
    }
    void installed() {
        if (in_slice_) throw std::logic_error("opd: a drafter was installed under a slice");
        has_ = drafter_;
    }
    /// A slice, or applying the update, begins: next() said so at this time.
    void begin(double now) {
        const auto what = next(now).what;
        if (what != spot_task::kind::slice && what != spot_task::kind::apply)
            throw std::logic_error("opd: a spot worker began what it was not told");
        in_slice_ = true, slice_epoch_ = epoch_, slice_round_ = round_;
        if (what == spot_task::kind::slice) ++totals_.slices, begun_ = true;
        slice_applies_ = what == spot_task::kind::apply;
    }
    /// It has ended, with this of the part.
    void ended(spot_part part, double now) {
        if (!in_slice_) throw invalid_input("part", "no slice runs");
        const bool right = slice_applies_
                               ? part == spot_part::applied || part == spot_part::failed || part == spot_part::none
                               : part != spot_part::applied;
        if (!right) throw invalid_input("part", "an update is applied where the task says so, and nowhere else");
        in_slice_ = false;
        if (current() && part != spot_part::none) {
            part_ = part, begun_ = false;
            totals_.parts += part == spot_part::contributed, totals_.applied += part == spot_part::applied;
            due_ = now;
        }
        const stop s = std::exchange(stop_, stop::none);
        if (s != stop::none) settle(s == stop::to_busy ? spot_state::busy : spot_state::idle, now);
    }

    /// What the coordinator is to hear now, if anything.
    std::optional<spot_report> report(double now) {
        if (now < due_) return std::nullopt;
        due_ = now + options_.resend;
        return spot_report{worker_, life_, group_, ++number_, since_, order_, now, state_, epoch_, round_, part_, has_};
    }
    double next_report() const { return due_; }

    incarnation_t life() const { return life_; }
    const drafter_weights& has() const { return has_; }           ///< what drafts here
    const drafter_weights& committed() const { return drafter_; } ///< as far as it has heard
    double lease_end() const { return lease_end_; }
    const counters& totals() const { return totals_; }

    template <class A>
    void fields(A& a) {
        spot_options then = options_;
        std::int32_t worker = worker_, group = group_;
        a(then, worker, group);
        if (then != options_ || worker != worker_ || group != group_)
            throw invalid_input("snapshot", "is of other options, or of another worker");
        a(life_, state_, number_, since_, order_, epoch_, round_, leader_, members_, part_, applies_, begun_, in_slice_,
          slice_epoch_, slice_round_, slice_applies_, stop_, has_, drafter_, lease_end_, due_, totals_);
        if constexpr (A::reading) {
            detail::count_range sound;
            sound(number_, since_, order_);
            detail::needs(sound.holds && since_ >= 1 && since_ <= number_ + 1 && life_ >= 1,
                          "a worker's numbers are none");
            detail::needs(state_ == spot_state::training || !in_slice_, "a slice runs where nothing trains");
            detail::needs(lease_end_ == lease_end_ && due_ == due_, "a time is none");
        }
    }

private:
    enum class stop : std::uint8_t { none, to_idle, to_busy };
    friend constexpr stop last_of(stop) { return stop::to_busy; }

    bool current() const { return slice_epoch_ == epoch_ && slice_round_ == round_; }
    // From here on nothing trains here by what was said before.
    void settle(spot_state to, double now) {
        totals_.discarded += std::exchange(begun_, false);
        applies_ = false;
        state_ = to;
        since_ = number_ + 1;
        lease_end_ = -forever;
        due_ = now;
    }

    spot_options options_;
    std::int32_t worker_, group_;
    incarnation_t life_;
    spot_state state_ = spot_state::busy;
    std::uint64_t number_ = 0, since_ = 1, order_ = 0;
    std::uint64_t epoch_ = 0, round_ = 0;
    std::int32_t leader_ = -1;
    std::vector<std::int32_t> members_;
    spot_part part_ = spot_part::none;
    bool applies_ = false, begun_ = false; // the order to apply; slices of a part that is not whole
    bool in_slice_ = false, slice_applies_ = false;
    std::uint64_t slice_epoch_ = 0, slice_round_ = 0;
    stop stop_ = stop::none;
    drafter_weights has_, drafter_;
    double lease_end_ = -forever, due_ = -forever;
    counters totals_;
};

} // namespace opd::sched
