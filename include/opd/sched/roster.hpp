// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who is there: the workers of each stage, which life of theirs, what they hold, which weights they have, and who of
// them takes the next sequence or call (the one that is busy to the least share).
//
// Lives: a worker that is up is so in one life, `incarnation`. Of one that is not, all lives up to `incarnation` are
// over.
//
// Weights: a rollout worker is *current* once it has installed weights that counted when it did. From then on it is
// *awaited*: each synchronisation waits for it, so it stays current. Before that it takes nothing, and nobody waits
// for it, unless it has installed something that was superseded meanwhile and is free to take the next: then that
// synchronisation awaits it.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "opd/error.hpp"
#include "opd/sched/indexed_heap.hpp"
#include "opd/sched/ledger.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched::detail {

class roster {
public:
    struct lane {
        bool taken = false; // by the attempt, which may have been given up
        slot_t slot = 0;
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        std::uint32_t number = 0; // among all lanes of all workers
        template <class A>
        void fields(A& a) {
            a(taken, slot, sample, attempt, number);
        }
    };
    struct worker {
        bool up = false;
        bool answers = false; // rollout: has installed something in this life
        bool awaited = false;
        bool current = false;
        incarnation_t incarnation = 0;
        std::int32_t slots = 0, busy = 0;
        float share = 0;                    // 1 / slots
        bool serves = false, rests = false; // rollout: may run something; and runs nothing
        bool runs = false;                  // rollout: serves, and is current
        std::uint64_t has = 0;              // rollout, once it answers: what made the weights that it installed
        version_t came = 0;                 // rollout: of the weights that it was told first
        std::uint64_t told = 0;             // and what made those that it was told last while nobody waits for it
        std::uint64_t again = 0;            // and what made those that it may have been told twice: it may answer twice
        std::vector<lane> lanes;
        std::vector<std::int32_t> vacant;
        template <class A>
        void fields(A& a) {
            a(up, answers, awaited, current, incarnation, slots, busy, has, came, told, again, lanes, vacant);
        }
    };

    const std::vector<worker>& of(stage s) const { return workers_[static_cast<std::size_t>(s)]; }
    const worker* find(stage s, std::int32_t number) const {
        const auto& all = of(s);
        return number >= 0 && static_cast<std::size_t>(number) < all.size() ? &all[static_cast<std::size_t>(number)]
                                                                            : nullptr;
    }
    worker* find(stage s, std::int32_t number) { return const_cast<worker*>(std::as_const(*this).find(s, number)); }
    worker& at(stage s, std::int32_t number) {
        return workers_[static_cast<std::size_t>(s)][static_cast<std::size_t>(number)];
    }
    const worker& at(stage s, std::int32_t number) const {
        return workers_[static_cast<std::size_t>(s)][static_cast<std::size_t>(number)];
    }
    /// One that may be new.
    worker& reach(stage s, std::int32_t number) {
        auto& all = workers_[static_cast<std::size_t>(s)];
        if (static_cast<std::size_t>(number) >= all.size()) all.resize(static_cast<std::size_t>(number) + 1);
        return at(s, number);
    }
    bool is_up(stage s, std::int32_t number) const {
        const worker* w = find(s, number);
        return w && w->up;
    }

    /// A new life begins, with nothing running.
    void come(stage s, std::int32_t number, incarnation_t life) {
        worker& w = at(s, number);
        w.up = true;
        w.incarnation = life;
        w.slots = 0; // until resize()
    }
    /// Another number of slots. What runs on lanes beyond it goes on.
    void resize(stage s, std::int32_t number, std::int32_t slots) {
        worker& w = at(s, number);
        if (s == stage::teacher) teacher_slots_ += slots - w.slots;
        w.slots = slots;
        w.share = share_of(slots);
        if (s == stage::rollout) {
            while (w.lanes.size() < static_cast<std::size_t>(slots)) {
                w.lanes.emplace_back().number = static_cast<std::uint32_t>(lanes_.size());
                lanes_.emplace_back(number, static_cast<std::int32_t>(w.lanes.size() - 1));
            }
            w.vacant.clear();
            for (std::int32_t l = slots; l-- > 0;)
                if (!w.lanes[static_cast<std::size_t>(l)].taken) w.vacant.push_back(l);
        }
        offer(s, number);
    }
    /// Its life is over. f(lane) of each of its lanes, which are free afterwards.
    template <class F>
    void go(stage s, std::int32_t number, F&& f) {
        worker& w = at(s, number);
        joining_ -= w.answers && !w.awaited;
        awaited_ -= w.awaited;
        if (s == stage::teacher && w.up) teacher_slots_ -= w.slots;
        w.up = w.answers = w.awaited = w.current = false;
        w.busy = 0;
        w.has = w.again = 0;
        for (lane& l : w.lanes) {
            f(std::as_const(l));
            l = {.number = l.number};
        }
        offer(s, number);
    }

    // --- rollout

    bool any_lane() const { return !idle_lanes_.empty(); }
    /// The next worker with a vacant lane and weights, and that lane.
    std::pair<std::int32_t, std::int32_t> next_lane() const {
        const std::int32_t number = idle_lanes_.top();
        return {number, at(stage::rollout, number).vacant.back()};
    }
    /// Whether one of its lanes is vacant, and it has weights.
    bool has_lane(std::int32_t number) const { return idle_lanes_.find(number) != nullptr; }
    std::int32_t lane_on(std::int32_t number) const { return at(stage::rollout, number).vacant.back(); }
    /// Whether it may have a lane again.
    bool serves(std::int32_t number) const {
        const worker* w = find(stage::rollout, number);
        return w && w->up && w->slots > 0;
    }
    void take_lane(std::int32_t number, const ticket& t) {
        worker& w = at(stage::rollout, number);
        w.vacant.pop_back();
        ++w.busy;
        lane& l = w.lanes[static_cast<std::size_t>(t.lane)];
        l = {true, t.slot, t.sample, t.attempt, l.number};
        offer(stage::rollout, number);
    }
    /// The lane on which this attempt runs, whether or not anybody still wants it; null: it runs nowhere.
    const lane* lane_of(const ticket& t) const {
        const worker* w = find(stage::rollout, t.worker);
        if (!w || !w->up || w->incarnation != t.incarnation || t.lane < 0 ||
            static_cast<std::size_t>(t.lane) >= w->lanes.size())
            return nullptr;
        const lane& l = w->lanes[static_cast<std::size_t>(t.lane)];
        return l.taken && l.slot == t.slot && l.sample == t.sample && l.attempt == t.attempt ? &l : nullptr;
    }
    void vacate_lane(const ticket& t) {
        worker& w = at(stage::rollout, t.worker);
        lane& l = w.lanes[static_cast<std::size_t>(t.lane)];
        l = {.number = l.number};
        --w.busy;
        if (t.lane < w.slots) w.vacant.push_back(t.lane); // else the worker has shrunk
        offer(stage::rollout, t.worker);
    }
    /// Worker and lane, by the lane's number.
    std::pair<std::int32_t, std::int32_t> lane_at(std::uint32_t number) const { return lanes_[number]; }
    std::size_t lanes() const { return lanes_.size(); }

    /// The share of the rollout workers that have slots and run nothing.
    double rollout_idle() const {
        return serving_ > 0 ? static_cast<double>(resting_) / static_cast<double>(serving_) : 0;
    }

    /// Rollout workers that a synchronisation waits for.
    index_t awaited() const { return awaited_; }
    /// Those that have installed something, and none waits for them.
    index_t joining() const { return joining_; }
    /// Whether one of them all can run something.
    bool any_runs() const { return running_ > 0; }
    void await(std::int32_t number) {
        worker& w = at(stage::rollout, number);
        joining_ -= w.answers && !w.awaited;
        awaited_ += !w.awaited;
        w.awaited = true;
    }
    void installed(std::int32_t number, std::uint64_t job, bool counts) {
        worker& w = at(stage::rollout, number);
        w.has = job;
        if (w.current) return;
        joining_ += !w.answers;
        w.answers = true;
        if (!counts) return;
        await(number);
        w.current = true;
        offer(stage::rollout, number);
    }

    // --- teachers

    bool any_teacher() const { return !idle_teachers_.empty(); }
    std::int32_t next_teacher() const { return idle_teachers_.top(); }
    /// Calls that the teachers who are up can have at once.
    index_t teacher_slots() const { return teacher_slots_; }
    void call(std::int32_t teacher, int calls) {
        at(stage::teacher, teacher).busy += calls;
        offer(stage::teacher, teacher);
    }

    /// Nobody is there any more; their lives are remembered.
    void clear() {
        for (int s = 0; s < stage_count; ++s)
            for (std::size_t w = 0; w < workers_[static_cast<std::size_t>(s)].size(); ++w)
                go(static_cast<stage>(s), static_cast<std::int32_t>(w), [](const auto&) {});
    }
    /// Recounts; throws std::logic_error.
    template <class Require>
    void check(Require&& require) const {
        index_t lanes_kept = 0, awaited = 0, joining = 0, teachers = 0, serving = 0, resting = 0, running = 0;
        for (const worker& w : of(stage::rollout)) {
            index_t taken = 0, within = 0;
            for (std::size_t l = 0; l < w.lanes.size(); ++l) {
                taken += w.lanes[l].taken;
                within += w.lanes[l].taken && l < static_cast<std::size_t>(w.slots);
            }
            require(taken == w.busy && (w.up || taken == 0), "a worker's lanes are counted, and a dead one has none");
            require(!w.up || static_cast<index_t>(w.vacant.size()) + within == w.slots, "a lane is taken or vacant");
            require(w.up || !w.answers, "the dead answer nothing");
            require(w.answers || !w.awaited, "who is awaited has answered");
            require(w.awaited || !w.current, "who is current is awaited");
            lanes_kept += w.current && !w.vacant.empty();
            awaited += w.awaited;
            joining += w.answers && !w.awaited;
            running += w.current && w.slots > 0;
            serving += w.up && w.slots > 0;
            resting += w.up && w.slots > 0 && w.busy == 0;
        }
        require(serving_ == serving && resting_ == resting, "the rollout workers that run nothing are counted");
        index_t slots = 0;
        for (const worker& w : of(stage::teacher)) teachers += w.up && w.busy < w.slots, slots += w.up ? w.slots : 0;
        require(teacher_slots_ == slots, "the teachers' slots are counted");
        require(idle_lanes_.size() == lanes_kept, "the workers with vacant lanes are listed");
        require(idle_teachers_.size() == teachers, "the teachers with vacant slots are listed");
        require(awaited_ == awaited && joining_ == joining && running_ == running,
                "the workers that have weights, and those that join, are counted");
    }
    template <class A>
    void fields(A& a) {
        a(workers_[0], workers_[1], workers_[2]);
        if constexpr (A::reading) rebuild();
    }

private:
    static float share_of(std::int32_t slots) { return slots > 0 ? 1 / static_cast<float>(slots) : 0; }
    // What follows from the workers. (That they are counted right, check() finds out.)
    void rebuild() {
        for (const worker& w : of(stage::rollout)) lanes_.resize(lanes_.size() + w.lanes.size(), {-1, -1});
        for (const stage s : {stage::rollout, stage::teacher, stage::learner})
            for (std::size_t i = 0; i < of(s).size(); ++i) {
                const auto number = static_cast<std::int32_t>(i);
                worker& w = at(s, number);
                needs(w.slots >= 0 && (s == stage::rollout ? w.slots <= static_cast<index_t>(w.lanes.size())
                                                           : w.lanes.empty() && !w.answers && !w.awaited && !w.current),
                      "a worker has no lanes for its slots");
                std::vector<std::int32_t> vacant, listed = w.vacant;
                for (std::size_t l = 0; l < w.lanes.size(); ++l) {
                    const lane& x = w.lanes[l];
                    needs(x.number < lanes_.size() && lanes_[x.number].first < 0, "two lanes have one number");
                    lanes_[x.number] = {number, static_cast<std::int32_t>(l)};
                    if (!x.taken && l < static_cast<std::size_t>(w.slots))
                        vacant.push_back(static_cast<std::int32_t>(l));
                }
                std::sort(listed.begin(), listed.end());
                needs(s != stage::rollout || !w.up || listed == vacant, "a worker's vacant lanes are others");
                w.share = share_of(w.slots);
                awaited_ += w.awaited;
                joining_ += w.answers && !w.awaited;
                if (s == stage::teacher && w.up) teacher_slots_ += w.slots;
                offer(s, number);
            }
    }
    // Lists the worker among those that can take something, or takes it off the list.
    void offer(stage s, std::int32_t number) {
        worker& w = at(s, number);
        if (s == stage::rollout) {
            serving_ -= w.serves, resting_ -= w.rests, running_ -= w.runs;
            w.serves = w.up && w.slots > 0, w.rests = w.serves && w.busy == 0, w.runs = w.serves && w.current;
            serving_ += w.serves, resting_ += w.rests, running_ += w.runs;
            if (w.current && !w.vacant.empty())
                idle_lanes_.set(number, w.share * static_cast<float>(w.busy));
            else
                idle_lanes_.remove(number);
        } else if (s == stage::teacher) {
            if (w.up && w.busy < w.slots)
                idle_teachers_.set(number, w.share * static_cast<float>(w.busy));
            else
                idle_teachers_.remove(number);
        }
    }

    std::array<std::vector<worker>, stage_count> workers_;
    std::vector<std::pair<std::int32_t, std::int32_t>> lanes_; // worker and lane, by the lane's number
    // By how busy they are, as a share of their slots.
    indexed_heap<float> idle_lanes_;    // rollout workers that are current and have a vacant lane
    indexed_heap<float> idle_teachers_; // with a vacant slot
    index_t awaited_ = 0, joining_ = 0;
    index_t teacher_slots_ = 0; // of those that are up
    index_t serving_ = 0, resting_ = 0, running_ = 0;
};

} // namespace opd::sched::detail
