// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A world around a scheduler in which a test says what happens next: everybody who owes it an answer, and what can go
// wrong with them. `choices` lists what may happen, `take` lets it. (support/world.hpp: random worlds in virtual time.)
//
// Workers have lives, and weights are published by the train job that made them: a worker installs exactly those that
// it was told to, and what a former life of its had still to say may come late. Time stands still but for deadlines and
// completed steps, so that histories which differ in nothing else meet again.
//
// Checked after every event: the scheduler's invariants; starts only at the present version, on a worker that has its
// weights, on a free lane, with the gate open; no weights are installed that nobody has published; every deadline is
// due when it should be, and nobody is lost without one; nothing consumed or given up twice; the policy's bound for
// every consumed sequence. A broken rule throws.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "opd/sched/scheduler_checks.hpp"
#include "support/witness.hpp"

namespace opd::test {

using namespace opd::sched;
using opd::index_t;
using policy = staleness_policy;

struct stepwise_options {
    settings s;
    std::vector<std::int32_t> slots = {2}; // of the rollout workers
    int faults = 1;
    bool keep_prefixes = false;   // of the crashes
    bool resizes = false;         // the number of permits changes, and that of slots
    bool several_at_once = false; // deadlines beyond the first pass in one moment
    bool parks = false;           // workers park on their own, and are asked to
    bool payloads = false;        // what was drawn is lost
    // what the explorer must find
    bool loses_replies = false;      // a hung attempt with no deadline
    bool lies_about_weights = false; // answers a synchronisation before it is done
    // late messages of this kind pass for those of the present life; tick: none
    event::kind forgets_lives = event::kind::tick;
    bool installs_by_version = false; // whatever job published it last
    bool hides_lost_weights = false;  // nobody says that they cannot be had
    index_t promised = -1;            // a bound that does not hold
};

struct attempt {
    ticket t;
    double since = 0, aborted_at = 0;
    bool aborted = false, hung = false;
    bool parking = false; // asked to, at aborted_at
    template <class A>
    void fields(A& a) {
        a(t, aborted, hung, parking);
    }
};
struct call {
    std::uint64_t job = 0;
    std::vector<ticket> tickets;
    double since = 0;
};
struct rollout_worker {
    bool up = false, answers = false, awaited = false, drained = false;
    bool asked = false; // for weights that nobody waits for
    incarnation_t life = 0;
    double since = 0;            // when it was
    weights installed = {-1, 0}; // what is
    std::uint64_t says = 0;      // what it said
    std::vector<weights> owed;
};

inline void require(bool holds, const char* what) {
    if (!holds) throw violation(what);
}

/// One thing that may happen next.
struct choice {
    enum kind {
        rolled,
        crossed,
        aborted,
        parked, // as it was asked to
        scored,
        learned,
        installed,
        time_passes, // to a flush, or the deadline of an abort that hangs
        teacher_up,
        learner_up,
        rollout_up,
        refill,
        resume,
        first_fault,
        roll_fails = first_fault,
        parks, // on its own
        asks_to_park,
        roll_vanishes,
        score_fails,
        score_partly,
        learn_fails,
        deadline,     // whoever is due by then has hung
        just_in_time, // an answer at the moment when somebody is due
        rollout_dies,
        teacher_dies,
        learner_dies,
        rollout_reconnects, // unnoticed: a new life while it is up
        teacher_reconnects,
        learner_reconnects,
        weights_lost,
        source_dies, // the learner, and what it has published
        score_loses, // the first of a call
        learn_loses,
        payload_lost, // so its store says
        late,         // a second answer, or one of a life that is over
        crash,
        pause,
        close,
        stop,
        resize,
        drain
    } what;
    std::size_t which = 0;
};
inline const char* name_of(choice::kind k) {
    constexpr const char* names[] = {"rolled",
                                     "crossed",
                                     "aborted",
                                     "parked",
                                     "scored",
                                     "learned",
                                     "installed",
                                     "time_passes",
                                     "teacher_up",
                                     "learner_up",
                                     "rollout_up",
                                     "refill",
                                     "resume",
                                     "roll_fails",
                                     "parks",
                                     "asks_to_park",
                                     "roll_vanishes",
                                     "score_fails",
                                     "score_partly",
                                     "learn_fails",
                                     "deadline",
                                     "just_in_time",
                                     "rollout_dies",
                                     "teacher_dies",
                                     "learner_dies",
                                     "rollout_reconnects",
                                     "teacher_reconnects",
                                     "learner_reconnects",
                                     "weights_lost",
                                     "source_dies",
                                     "score_loses",
                                     "learn_loses",
                                     "payload_lost",
                                     "late",
                                     "crash",
                                     "pause",
                                     "close",
                                     "stop",
                                     "resize",
                                     "drain"};
    return names[k];
}

class stepwise_world {
public:
    explicit stepwise_world(const stepwise_options& o)
        : s(o.s), faults_(o.faults), permits_(s.resolved().permits), rollout_(o.slots.size()) {
        come(o, stage::learner);
        come(o, stage::teacher);
        for (std::size_t w = 0; w < o.slots.size(); ++w) come(o, w);
    }

    /// What is possible; first what is no fault.
    std::vector<choice> choices(const stepwise_options& o) const {
        std::vector<choice> list;
        const auto add = [&](choice::kind k, std::size_t which = 0) { list.push_back({k, which}); };
        for (std::size_t i = 0; i < running_.size(); ++i) {
            if (running_[i].aborted) {
                add(choice::aborted, i);
                if (!running_[i].hung) add(choice::crossed, i);
            } else {
                add(choice::rolled, i);
                if (running_[i].parking) add(choice::parked, i);
            }
        }
        for (std::size_t i = 0; i < calls_.size(); ++i) add(choice::scored, i);
        if (train_ != 0) add(choice::learned);
        for (std::size_t w = 0; w < rollout_.size(); ++w)
            if (rollout_[w].up && !rollout_[w].owed.empty()) add(choice::installed, w);
        const std::size_t answers = list.size();
        for (std::size_t w = 0; w < rollout_.size(); ++w) {
            if (!rollout_[w].up) add(choice::rollout_up, w);
            if (rollout_[w].drained) add(choice::refill, w);
        }
        const std::vector<due> dues = all_due(o);
        const auto hanging = std::find_if(dues.begin(), dues.end(), [](const due& d) { return d.fault; });
        for (auto d = dues.begin(); d != hanging; ++d)
            add(choice::time_passes, static_cast<std::size_t>(d - dues.begin()));
        if (!teacher_.up) add(choice::teacher_up);
        if (!learner_.up) add(choice::learner_up);
        if (paused_) add(choice::resume);
        if (faults_ == 0) return list;
        for (std::size_t i = 0; i < running_.size(); ++i)
            if (!running_[i].aborted) {
                add(choice::roll_fails, i);
                if (o.loses_replies) add(choice::roll_vanishes, i);
                if (o.parks) {
                    add(choice::parks, i);
                    if (!running_[i].parking) add(choice::asks_to_park, i);
                }
            }
        for (std::size_t i = 0; i < calls_.size(); ++i) {
            add(choice::score_fails, i);
            if (calls_[i].tickets.size() > 1) add(choice::score_partly, i);
        }
        if (train_ != 0) add(choice::learn_fails);
        for (auto d = hanging; d != dues.end() && (d == hanging || o.several_at_once); ++d)
            add(choice::deadline, static_cast<std::size_t>(d - dues.begin()));
        if (hanging != dues.end())
            for (std::size_t i = 0; i < answers; ++i) add(choice::just_in_time, i);
        for (std::size_t w = 0; w < rollout_.size(); ++w)
            if (rollout_[w].up) {
                add(choice::rollout_dies, w);
                add(choice::rollout_reconnects, w);
            }
        if (teacher_.up) {
            add(choice::teacher_dies);
            add(choice::teacher_reconnects);
        }
        if (learner_.up) {
            add(choice::learner_dies);
            add(choice::learner_reconnects);
        }
        if (made_ != 0) {
            add(choice::weights_lost);
            if (learner_.up) add(choice::source_dies);
        }
        if (o.payloads) {
            for (std::size_t i = 0; i < calls_.size(); ++i) add(choice::score_loses, i);
            if (train_ != 0 && !trained_.empty()) add(choice::learn_loses);
            std::size_t n = 0;
            s.for_each([&](const outstanding_sequence&) { add(choice::payload_lost, n++); });
        }
        for (std::size_t i = 0; i < past_.size(); ++i)
            if (past_[i].from_worker()) add(choice::late, i);
        if (!paused_) add(choice::pause);
        if (!closed_) add(choice::close);
        if (o.resizes) {
            const plan& p = s.resolved();
            add(choice::resize, static_cast<std::size_t>(p.batch));
            add(choice::resize, static_cast<std::size_t>((p.depth + 1) * p.batch));
            for (std::size_t w = 0; w < rollout_.size(); ++w)
                if (rollout_[w].up && !rollout_[w].drained) add(choice::drain, w);
        }
        add(choice::stop);
        add(choice::crash);
        return list;
    }

    void take(const stepwise_options& o, const choice& c) {
        const std::array<event, 5> past = past_;
        const std::vector<due> dues = all_due(o);
        if (c.what >= choice::first_fault) {
            if (--faults_ == 0) past_ = {}; // it matters to faults alone
            perfect_ = false;
        }
        switch (c.what) {
        case choice::rolled:
        case choice::crossed:
        case choice::aborted:
        case choice::parked:
        case choice::scored:
        case choice::learned:
        case choice::installed:
            answer(o, c);
            break;
        case choice::time_passes:
        case choice::deadline:
            pass_to(o, dues[c.which].at);
            tell(o, event::of(event::kind::tick));
            break;
        case choice::just_in_time: {
            const choice which = choices(o)[c.which]; // what is no fault comes first
            pass_to(o, std::find_if(dues.begin(), dues.end(), [](const due& d) { return d.fault; })->at);
            answer(o, which);
            break;
        }
        case choice::teacher_up:
            come(o, stage::teacher);
            break;
        case choice::learner_up:
            come(o, stage::learner);
            break;
        case choice::rollout_up:
            come(o, c.which);
            break;
        case choice::resume:
            paused_ = false;
            tell(o, event::of(event::kind::resume));
            break;
        case choice::roll_fails:
            tell(o, event::rollout_failed(remove(running_, c.which).t));
            break;
        case choice::parks:
            park(o, c.which);
            break;
        case choice::asks_to_park:
            tell(o, event::park(running_[c.which].t));
            require(running_[c.which].parking, "nobody was asked to park");
            break;
        case choice::roll_vanishes:
            remove(running_, c.which);
            break;
        case choice::score_fails:
            tell(o, event::score_failed(remove(calls_, c.which).job, 0).of_life(teacher_.life));
            break;
        case choice::score_partly: {
            const call done = remove(calls_, c.which);
            remember(event::scored(done.job, 0).of_life(teacher_.life));
            tell(o, event::scored(done.job, 0, std::span(done.tickets).subspan(1)).of_life(teacher_.life));
            break;
        }
        case choice::learn_fails:
            tell(o, event::learn_failed(std::exchange(train_, 0)).of_life(learner_.life));
            break;
        case choice::rollout_dies:
            go(o, stage::rollout, c.which);
            break;
        case choice::teacher_dies:
            go(o, stage::teacher);
            break;
        case choice::learner_dies:
            go(o, stage::learner);
            break;
        case choice::rollout_reconnects:
            die(stage::rollout, static_cast<std::int32_t>(c.which));
            come(o, c.which);
            break;
        case choice::teacher_reconnects:
            die(stage::teacher, 0);
            come(o, stage::teacher);
            break;
        case choice::learner_reconnects:
            die(stage::learner, 0);
            come(o, stage::learner);
            break;
        case choice::source_dies:
            go(o, stage::learner);
            lose_weights(o);
            break;
        case choice::weights_lost:
            lose_weights(o);
            break;
        case choice::score_loses: {
            const call done = calls_[c.which];
            tell(o, event::payload_lost(done.tickets.front(), done.job));
            remove(calls_, c.which);
            const auto rest = std::span(done.tickets).subspan(1);
            tell(o, (rest.empty() ? event::score_failed(done.job, 0) : event::scored(done.job, 0, rest))
                        .of_life(teacher_.life));
            break;
        }
        case choice::learn_loses:
            tell(o, event::payload_lost(trained_.front(), std::exchange(train_, 0)));
            break;
        case choice::payload_lost: {
            std::vector<ticket> all;
            s.for_each([&](const outstanding_sequence& q) { all.push_back(q.ticket); });
            tell(o, event::payload_lost(all[c.which]));
            break;
        }
        case choice::late: {
            event e = past[c.which];
            if (o.forgets_lives == e.what) e.incarnation = life_of(e.stage, e.worker);
            if (o.installs_by_version && e.what == event::kind::learned) zombie_ = {weights_.version + 1, e.job};
            tell(o, e);
            break;
        }
        case choice::pause:
            paused_ = true;
            tell(o, event::of(event::kind::pause));
            break;
        case choice::close:
            closed_ = true;
            tell(o, event::of(event::kind::close));
            break;
        case choice::stop:
            closed_ = true;
            tell(o, event::of(event::kind::stop));
            require(s.finished(), "stopped, and not finished");
            break;
        case choice::resize:
            permits_ = std::max(permits_, static_cast<index_t>(c.which));
            tell(o, event::of(event::kind::resize, static_cast<index_t>(c.which)));
            break;
        case choice::drain:
        case choice::refill: {
            rollout_worker& w = rollout_[c.which];
            w.drained = c.what == choice::drain;
            tell(o, event::up(stage::rollout, static_cast<std::int32_t>(c.which), w.drained ? 0 : o.slots[c.which])
                        .of_life(w.life));
            break;
        }
        case choice::crash:
            s = scheduler::restore(o.s, s.snapshot());
            s.abandon_workers(o.keep_prefixes);
            s.check_invariants();
            for (std::size_t w = 0; w < rollout_.size(); ++w) die(stage::rollout, static_cast<std::int32_t>(w));
            die(stage::teacher, 0);
            die(stage::learner, 0);
            made_ = 0, syncing_ = false;
            base_ = clock_start, now_ = epoch(); // of another clock
            come(o, stage::learner);
            come(o, stage::teacher);
            for (std::size_t w = 0; w < rollout_.size(); ++w) come(o, w);
            break;
        }
    }

    /// Of all that matters for what can happen from here on.
    std::uint64_t hash(const stepwise_options& o) const {
        archive_writer a;
        a.bytes.reserve(4096);
        a(without_clock(o), steps(epoch() - now_), running_, train_, made_, zombie_, teacher_.up, learner_.up, paused_,
          closed_, perfect_, faults_, done_, lag_sum_);
        for (const event& e : past_) a(e.what, e.worker, e.incarnation, e.job, e.ticket);
        for (const call& c : calls_) a(c.job);
        for (const rollout_worker& w : rollout_) a(w.up, w.drained, w.installed, w.owed);
        return std::hash<std::string>{}(a.bytes); // eight bytes at a time: twelve million events ask for one
    }

    scheduler s;

private:
    struct worker {
        bool up = false;
        incarnation_t life = 0;
    };
    struct due {
        double at = 0;
        bool fault = true; // somebody has hung by then whose fault is not counted yet
    };

    template <class T>
    static T remove(std::vector<T>& list, std::size_t i) {
        T x = std::move(list[i]);
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        return x;
    }
    token_versions tokens_of(const ticket& t) const {
        const version_t newest = rollout_[static_cast<std::size_t>(t.worker)].installed.version;
        version_t oldest = newest;
        s.for_each([&](const outstanding_sequence& q) {
            if (q.ticket == t) oldest = q.start;
        });
        return {oldest, newest, 0.5 * static_cast<double>(oldest + newest), 3};
    }

    // --- time

    // The snapshot with times as they are from now, in steps: what a flush moved them by does not tell states apart.
    // Those from which nobody is due are of the past. Times are told from all else by their size.
    std::string without_clock(const stepwise_options& o) const {
        std::vector<double> matter{now_};
        for (const attempt& r : running_) {
            if (r.aborted || r.parking) matter.push_back(r.aborted_at);
            if (!r.aborted) matter.push_back(r.since);
        }
        for (const call& c : calls_) matter.push_back(c.since);
        if (train_ != 0) matter.push_back(train_since_);
        if (syncing_) matter.push_back(syncing_since_);
        for (const rollout_worker& w : rollout_)
            if (w.up && w.asked) matter.push_back(w.since);
        matter.push_back(s.next_deadline() - o.s.teacher_flush);
        std::string bytes = s.snapshot();
        bytes.resize(bytes.size() - sizeof(std::uint64_t)); // the checksum
        constexpr std::size_t last = sizeof(double) - 1;    // its last byte is 0x41
        for (std::size_t i = bytes.find('\x41', last); i != std::string::npos; i = bytes.find('\x41', i + 1)) {
            double t = 0;
            std::memcpy(&t, bytes.data() + i - last, sizeof t);
            if (!(t >= clock_start && t < 2 * clock_start)) continue;
            t = std::find(matter.begin(), matter.end(), t) == matter.end() ? -1 : steps(now_ - t);
            std::memcpy(bytes.data() + i - last, &t, sizeof t);
        }
        return bytes;
    }
    static double steps(double seconds) { return std::round(64 * seconds); }
    double epoch() const { return base_ + static_cast<double>(weights_.version) / 64; }
    bool behind(const rollout_worker& w) const { return w.awaited && w.says != made_; }
    static double after(double since, double seconds) { return seconds > 0 ? since + seconds : forever; }
    double due_of(const stepwise_options& o, const attempt& r) const {
        const double lets_go = r.aborted || r.parking ? after(r.aborted_at, o.s.abort_deadline) : forever;
        return r.aborted ? lets_go : std::min(lets_go, after(r.since, o.s.rollout_deadline));
    }
    double due_of(const stepwise_options& o, const rollout_worker& w) const {
        double at = forever;
        if (w.up && w.asked) at = after(w.since, o.s.sync_deadline);
        if (w.up && syncing_ && behind(w)) at = std::min(at, after(syncing_since_, o.s.sync_deadline));
        return at;
    }
    /// When somebody is due, as the world counts it, in order.
    std::vector<due> all_due(const stepwise_options& o) const {
        std::vector<due> list;
        if (s.finished()) return list;
        for (const attempt& r : running_) list.push_back({due_of(o, r), !r.hung});
        for (const call& c : calls_) list.push_back({after(c.since, o.s.teacher_deadline)});
        if (train_ != 0) list.push_back({after(train_since_, o.s.learner_deadline)});
        for (const rollout_worker& w : rollout_) list.push_back({due_of(o, w)});
        std::erase_if(list, [](const due& d) { return d.at == forever; });
        const double next = s.next_deadline(); // when the teacher's queue is flushed the scheduler says
        if (s.where().queued > 0 && next <= now_ + o.s.teacher_flush) list.push_back({next, false});
        std::sort(list.begin(), list.end(),
                  [](const due& a, const due& b) { return a.at != b.at ? a.at < b.at : a.fault > b.fault; });
        list.erase(std::unique(list.begin(), list.end(), [](const due& a, const due& b) { return a.at == b.at; }),
                   list.end());
        return list;
    }
    void pass_to(const stepwise_options& o, double t) {
        for (attempt& r : running_) r.hung = r.hung || due_of(o, r) <= t;
        now_ = t;
        if (t - base_ >= 0.5) base_ += t - epoch(); // else a flush
    }

    // --- who comes, goes and answers

    worker& of(stage g) { return g == stage::teacher ? teacher_ : learner_; }
    incarnation_t life_of(stage g, std::int32_t w) {
        return g == stage::rollout ? rollout_[static_cast<std::size_t>(w)].life : of(g).life;
    }
    void come(const stepwise_options& o, std::size_t w) {
        rollout_[w] = {.up = true, .life = rollout_[w].life + 1, .owed = {}};
        tell(o, event::up(stage::rollout, static_cast<std::int32_t>(w), o.slots[w]).of_life(rollout_[w].life));
    }
    void come(const stepwise_options& o, stage g) {
        of(g) = {true, of(g).life + 1};
        tell(o, event::up(g, 0).of_life(of(g).life));
    }
    void go(const stepwise_options& o, stage g, std::size_t w = 0) {
        const auto number = static_cast<std::int32_t>(w);
        die(g, number);
        tell(o, event::down(g, number).of_life(life_of(g, number)));
    }
    void die(stage g, std::int32_t number) {
        if (g == stage::rollout) {
            rollout_worker& w = rollout_[static_cast<std::size_t>(number)];
            for (std::size_t i = running_.size(); i-- > 0;)
                if (running_[i].t.worker == number)
                    remember(event::rolled_out(remove(running_, i).t, {0, weights_.version, 0, 1}));
            if (!w.owed.empty()) remember(event::synced(number, w.owed.back().job).of_life(w.life));
            if (w.up) remember(event::down(g, number).of_life(w.life));
            w = {.life = w.life, .owed = {}};
        } else if (g == stage::teacher) {
            if (!calls_.empty()) remember(event::scored(calls_[0].job, 0).of_life(teacher_.life));
            if (teacher_.up) remember(event::down(g, number).of_life(teacher_.life));
            calls_.clear();
            teacher_.up = false;
        } else {
            if (train_ != 0) remember(event::learned(train_).of_life(learner_.life));
            if (learner_.up) remember(event::down(g, number).of_life(learner_.life));
            train_ = 0;
            learner_.up = false;
        }
    }
    /// It may be said again, or late: the latest of each kind, as long as there can be faults.
    void remember(const event& e) {
        if (faults_ == 0) return;
        constexpr event::kind kinds[] = {event::kind::rolled_out, event::kind::scored, event::kind::learned,
                                         event::kind::synced, event::kind::worker_down};
        for (std::size_t i = 0; i < past_.size(); ++i)
            if (e.what == kinds[i]) past_[i] = e;
    }
    void park(const stepwise_options& o, std::size_t which) {
        const ticket t = remove(running_, which).t;
        const version_t start = s.start_of(t);
        tell(o, event::parked(t, tokens_of(t)));
        // whatever has happened to it since, it goes on from its start, or was made to start again
        s.for_each([&](const outstanding_sequence& q) {
            const plan& p = s.resolved(); // an update that waited for it alone, or made it stale, lets it start again
            require(q.ticket.sample != t.sample || q.start == start || p.policy == policy::retry ||
                        p.update == weight_update::finish_first,
                    "parked, and its start is lost");
        });
    }
    void answer(const stepwise_options& o, const choice& c) {
        switch (c.what) {
        case choice::parked:
            park(o, c.which);
            break;
        case choice::rolled:
        case choice::crossed: {
            const ticket t = remove(running_, c.which).t;
            remember(event::rolled_out(t, {0, weights_.version, 0, 1}));
            tell(o, event::rolled_out(t, tokens_of(t)));
            break;
        }
        case choice::aborted:
            tell(o, event::aborted(remove(running_, c.which).t));
            break;
        case choice::scored: {
            const event e = event::scored(remove(calls_, c.which).job, 0).of_life(teacher_.life);
            remember(e);
            tell(o, e);
            break;
        }
        case choice::learned: {
            const event e = event::learned(train_).of_life(learner_.life);
            remember(e);
            made_ = std::exchange(train_, 0);
            tell(o, e);
            break;
        }
        default: {
            rollout_worker& w = rollout_[c.which];
            const weights told = w.owed[0];
            w.owed.clear(); // what came meanwhile it drops
            if (!o.lies_about_weights) w.installed = told;
            if (zombie_.job != 0 && zombie_.version == told.version) w.installed = zombie_;
            w.says = told.job;
            w.answers = true;
            w.awaited = w.awaited || told.job == (syncing_ ? made_ : weights_.job);
            w.asked = false;
            event e = event::synced(static_cast<std::int32_t>(c.which), told.job).of_life(w.life);
            if (told.job % 3 != 0) // some tell
                e.elasticity = static_cast<double>((7 * told.job + static_cast<std::uint64_t>(c.which)) % 21) / 10 - 1;
            remember(e);
            tell(o, e);
            break;
        }
        }
    }
    void lose_weights(const stepwise_options& o) {
        for (rollout_worker& w : rollout_) std::erase_if(w.owed, [&](const weights& x) { return x.job == made_; });
        if (o.hides_lost_weights) return;
        syncing_ = false;
        tell(o, event::weights_lost(std::exchange(made_, 0)));
    }

    void tell(const stepwise_options& o, const event& e) {
        const bool was_finished = s.finished();
        const version_t before = weights_.version;
        actions out;
        s.on(e, now_, out);
        s.check_invariants();
        require(s.where().outstanding() <= permits_, "more is outstanding than there are permits");
        const index_t concurrency = s.resolved().concurrency;
        require(concurrency == 0 || s.where().waiting + s.where().rollout <= concurrency,
                "more in rollout than allowed");
        for (const action& a : out.items) see(o, out, a, was_finished);
        require(s.weights() == weights_ && s.version() == weights_.version,
                "other weights than those of the last step");
        const std::vector<due> dues = all_due(o);
        const double next = s.next_deadline();
        require(o.forgets_lives != event::kind::tick || next == (dues.empty() ? forever : dues.front().at),
                "another deadline than is due");
        require(next > now_, "what is due was not done");
        if (weights_.version > before && epoch() > now_ && epoch() < next) now_ = epoch();
    }

    void see(const stepwise_options& o, const actions& out, const action& a, bool was_finished) {
        switch (a.what) {
        case action::kind::start: {
            const rollout_worker& w = rollout_[static_cast<std::size_t>(a.worker)];
            require(w.up && a.incarnation == w.life && a.ticket.incarnation == w.life,
                    "a start in a life that is over");
            require(a.version == weights_.version && w.installed == weights_, "a start without the weights");
            // whole batches: those of a batch that was admitted before the update run on the weights of before
            require(s.gate_open() || !s.resolved().streaming, "a start while the gate is closed");
            for (const attempt& r : running_)
                require(r.t.worker != a.worker || r.t.lane != a.ticket.lane, "two attempts on one lane");
            require(!is_done(a.ticket.sample), "a start of what is done");
            require(!w.drained && a.ticket.lane < o.slots[static_cast<std::size_t>(a.worker)],
                    "a start on a lane too many");
            running_.push_back({.t = a.ticket, .since = now_});
            break;
        }
        case action::kind::abort:
            require(a.incarnation == life_of(stage::rollout, a.worker), "an abort in a life that is over");
            for (attempt& r : running_)
                if (r.t == a.ticket) r.aborted = true, r.aborted_at = now_;
            break;
        case action::kind::park:
            require(a.incarnation == life_of(stage::rollout, a.worker), "asked to park in a life that is over");
            for (attempt& r : running_)
                if (r.t == a.ticket) {
                    require(!r.parking && !r.aborted, "asked to park twice");
                    r.parking = true, r.aborted_at = now_;
                }
            break;
        case action::kind::score: {
            const auto list = out.of(a);
            require(teacher_.up && calls_.empty() && a.incarnation == teacher_.life,
                    "a call to a teacher that is dead or busy");
            require(static_cast<index_t>(list.size()) <= o.s.teacher_batch && !list.empty(), "a call's size");
            calls_.push_back({a.job, {list.begin(), list.end()}, now_});
            break;
        }
        case action::kind::train:
            require(learner_.up && train_ == 0 && a.incarnation == learner_.life,
                    "a batch for a learner that is dead or busy");
            require(a.version == weights_.version && a.from == weights_.job, "an update of other weights");
            require(made_ == 0, "an update while another is not installed");
            train_ = a.job;
            train_since_ = now_;
            trained_.assign(out.of(a).begin(), out.of(a).end());
            break;
        case action::kind::sync:
            require(a.job == weights_.job ? a.version == weights_.version
                                          : made_ != 0 && a.job == made_ && a.version == weights_.version + 1,
                    "weights that nobody has published");
            if (a.worker < 0) syncing_ = true, syncing_since_ = now_;
            for (std::size_t i = 0; i < rollout_.size(); ++i) {
                rollout_worker& w = rollout_[i];
                if (a.worker >= 0 && static_cast<std::size_t>(a.worker) != i) continue;
                require(a.worker < 0 || (w.up && a.incarnation == w.life), "weights for a dead worker");
                if (w.up) w.owed.push_back({a.version, a.job});
                if (a.worker >= 0 && !w.awaited) w.asked = true, w.since = now_;
                w.awaited = w.awaited || (a.worker < 0 && w.answers && !w.asked); // it rested
            }
            break;
        case action::kind::step: {
            const plan& p = s.resolved();
            require(made_ != 0 && a.job == made_ && a.version == weights_.version + 1, "a step without its update");
            weights_ = {a.version, std::exchange(made_, 0)};
            syncing_ = false;
            for (const consumed_sequence& c : out.consumed_by(a)) {
                finish(c.ticket.sample);
                const auto lags = c.lags(a.version - 1);
                require(lags[3] >= 0 && lags[2] >= lags[3] && lags[1] >= lags[2] && lags[0] >= lags[1],
                        "the lags are not in order");
                const auto start = static_cast<index_t>(lags[0]);
                const auto promised = o.promised >= 0 ? std::optional<index_t>(o.promised) : promised_lag(p, permits_);
                require(!promised || start <= *promised, "the lag exceeds what was promised");
                require(o.promised >= 0 || p.streaming || !perfect_ ||
                            start == std::min<index_t>(a.version - 1, p.depth),
                        "the lag is not min(v, k)");
                if (o.promised < 0 && p.streaming && p.policy == policy::capacity) lag_sum_ += start + 1;
            }
            require(lag_sum_ <= permits_ * a.version, "the mean lag exceeds M/B - 1");
            break;
        }
        case action::kind::fail:
            finish(a.ticket.sample);
            break;
        case action::kind::lost: {
            bool late = false;
            if (a.stage == stage::rollout) {
                late = due_of(o, rollout_[static_cast<std::size_t>(a.worker)]) <= now_;
                for (const attempt& r : running_)
                    late = late || (r.t.worker == a.worker && (r.aborted || r.parking) &&
                                    after(r.aborted_at, o.s.abort_deadline) <= now_);
            }
            if (a.stage == stage::teacher)
                late = !calls_.empty() && after(calls_[0].since, o.s.teacher_deadline) <= now_;
            if (a.stage == stage::learner) late = train_ != 0 && after(train_since_, o.s.learner_deadline) <= now_;
            require(late && a.incarnation == life_of(a.stage, a.worker), "lost without a deadline");
            die(a.stage, a.worker);
            break;
        }
        case action::kind::finished:
            require(!was_finished, "finished twice");
            require(closed_ || s.failed() || s.totals().consumed >= o.s.sequences,
                    "finished before enough was consumed");
            require(s.totals().admitted == s.totals().consumed + s.totals().failed, "something was lost");
            break;
        }
    }
    bool is_done(sample_t n) const { return n < done_.size() && done_[static_cast<std::size_t>(n)] != 0; }
    void finish(sample_t n) {
        require(!is_done(n), "consumed or given up twice");
        if (n >= done_.size()) done_.resize(static_cast<std::size_t>(n) + 1);
        done_[static_cast<std::size_t>(n)] = 1;
    }

    int faults_;
    index_t permits_; // the most that there were
    static constexpr double clock_start = 1 << 20;
    double now_ = clock_start;
    double base_ = clock_start; // of the epochs: each version has its time, so that who started later is due later
    weights weights_;           // of the version
    std::uint64_t made_ = 0;    // the job that published those that are to be installed
    weights zombie_;            // published by a learner that was thought dead
    bool syncing_ = false;
    double syncing_since_ = 0;
    std::vector<rollout_worker> rollout_;
    worker teacher_, learner_;
    std::vector<attempt> running_;
    std::vector<call> calls_;
    std::uint64_t train_ = 0; // job
    double train_since_ = 0;
    std::vector<ticket> trained_; // asked for last
    bool paused_ = false, closed_ = false, perfect_ = true;
    std::vector<std::uint8_t> done_; // by sequence: consumed or given up
    index_t lag_sum_ = 0;
    std::array<event, 5> past_; // what may be said again: none is a tick
};

} // namespace opd::test
