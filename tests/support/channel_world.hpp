// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A scheduler and its workers as processes that talk through an unreliable channel: messages are lost, late, doubled and in
// another order; workers die and come back in another life, reconnect unnoticed, or are told of their death late; the scheduler
// dies and comes back from its last snapshot; what a learner published is lost with it. After a while nothing goes wrong
// any more, and the run must end.
//
// The process that drives the scheduler does what docs/sched/drivers.md asks of a driver, and no more:
//   - a worker says that it is there until it has been heard, again and again; it begins a new life when it is told that the
//     present one is over, and when it hears of another life of the scheduler
//   - who speaks in a life that is over is told so
//   - a command that comes twice is carried out once; one of another life not at all
//   - payloads are kept by slot and attempt; a snapshot is written again before the first message after a restore
//   - a publication that is lost before all have it is reported
//
// What is checked, beside the scheduler's own invariants after every event: nothing starts on weights that are older than the
// version or were made by another job; every installed publication exists; a batch has a payload and a score for each
// attempt in it; along the line of weights that made the last ones, every sequence that was consumed was learnt from exactly
// once; the lag that the policy promises.
#pragma once

#include <algorithm>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "support/world.hpp"

namespace opd::test {

struct channel_faults {
    double drop = 0, twice = 0, death = 0, silent_death = 0, scheduler_death = 0, loss = 0, reconnect = 0;
    double delay = 0.1;    ///< mean seconds
    double long_delay = 0; ///< share of messages that take a hundred times as long
    double until = 300;    ///< seconds; then nothing goes wrong any more
};

inline channel_faults faults_of(std::uint64_t seed) {
    dice d{seed ^ 0x6368616e};
    channel_faults f;
    const double much = d.one({0.01, 0.05, 0.2});
    for (double* x : {&f.drop, &f.twice, &f.long_delay})
        if (d(0.6)) *x = much * d();
    for (double* x : {&f.death, &f.silent_death, &f.scheduler_death, &f.reconnect})
        if (d(0.5)) *x = 0.02 * d();
    if (d(0.5)) f.loss = 0.3 * d();
    f.delay = d.one({0.01, 0.3, 1.0});
    return f;
}

/// `Scheduler`: sched::scheduler, or one with a cure taken out.
template <class Scheduler = scheduler>
class channel_world {
public:
    explicit channel_world(std::uint64_t seed)
        : dice_{seed ^ 0x70726f63}, faults_(faults_of(seed)), s_(settings_of(seed)) {
        const world w = world_of(seed, {.schedule = {}, .faults = false, .large = false});
        for (std::int32_t i = 0; i < w.rollout_workers; ++i) workers_.push_back({stage::rollout, i, w.lanes});
        for (std::int32_t i = 0; i < w.teachers; ++i) workers_.push_back({stage::teacher, i, w.teacher_slots});
        workers_.push_back({stage::learner, 0, 1});
        for (std::size_t i = 0; i < workers_.size(); ++i) begin(i);
        save();
        at(dice_.in(1, 20), {.what = message::kind::mishap});
    }
    static settings settings_of(std::uint64_t seed) {
        settings s = world_of(seed, {.schedule = {}, .faults = false, .large = false}).settings;
        s.available = 0;
        s.sequences = std::min<index_t>(s.sequences, s.group * std::max<index_t>(1, 40 / s.group));
        s.rollout_attempts = s.teacher_attempts = s.learner_attempts = 50;
        s.fruitless_steps = 0;
        s.rollout_deadline = 40, s.abort_deadline = 10, s.teacher_deadline = 15, s.learner_deadline = 15;
        s.sync_deadline = 12;
        return s;
    }
    /// Throws `violation`.
    void run(std::uint64_t most = 60000) {
        while (!s_.finished()) {
            if (most-- == 0) throw violation("livelock");
            const double due = s_.next_deadline();
            if (due < box_.top().time) {
                now_ = std::max(now_, due);
                dispatch(event::of(event::kind::tick));
                continue;
            }
            const message m = box_.top();
            box_.pop();
            now_ = m.time;
            switch (m.what) {
            case message::kind::command:
                obey(m);
                break;
            case message::kind::reply:
                hear(m);
                break;
            case message::kind::work:
                work(m);
                break;
            case message::kind::announce:
                announce(m);
                break;
            case message::kind::mishap:
                mishap();
                break;
            }
        }
        // along the line of the last weights each was learnt from once, and all of them
        std::multiset<sample_t> learnt;
        for (std::uint64_t job = s_.weights().job; job != 0; job = made_.at(job).from)
            for (const sample_t n : made_.at(job).samples) learnt.insert(n);
        require(std::set<sample_t>(learnt.begin(), learnt.end()).size() == learnt.size(), "learnt from twice");
        require(learnt == std::multiset<sample_t>(consumed_.begin(), consumed_.end()),
                "consumed is not what was learnt");
    }
    const Scheduler& state() const { return s_; }
    std::uint64_t crashes() const { return epoch_; }
    std::uint64_t messages() const { return number_; }

private:
    struct call {
        std::uint64_t job = 0, from = 0;
        version_t version = 0;
        std::vector<ticket> tickets;
    };
    struct message {
        enum class kind { command, reply, work, announce, mishap } what = kind::command;
        double time = 0;
        std::uint64_t number = 0;
        std::uint64_t epoch = 0; // command: of the scheduler
        std::size_t worker = 0;  // its place in workers_
        incarnation_t life = 0;  // command, work
        action order = {};       // command
        event said = {};         // reply
        std::vector<ticket> tickets = {};
        weights expected = {};      // start: the version's weights when it was sent
        token_versions prefix = {}; // start: of what was parked
        call job = {};              // work: of a teacher or the learner
        ticket who = {};            // work: of a rollout worker
        bool operator<(const message& o) const { return time != o.time ? time > o.time : number > o.number; }
    };
    struct running {
        weights drawn_by;
        version_t oldest = 0;
        std::int64_t had = 0; // tokens
    };
    struct process {
        sched::stage stage;
        std::int32_t number, slots;
        incarnation_t life = 0;
        std::uint64_t epoch = 0; // of the scheduler that it knows
        bool installed = false;
        weights has = {};
        std::map<std::int32_t, std::pair<ticket, running>> lanes = {};
        std::set<std::uint64_t> seen = {}; // calls, and attempts, of this life
    };
    struct payload {
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        bool rolled = false, scored = false;
        token_versions prefix = {}; // parked
    };
    struct publication {
        std::uint64_t from = 0;
        version_t version = 0;
        std::vector<sample_t> samples;
        bool lost = false;
    };
    struct memory { // of the scheduler's process
        std::map<std::uint32_t, payload> payloads;
        std::set<sample_t> consumed;
    };

    static void require(bool holds, const char* what) {
        if (!holds) throw violation(what);
    }
    bool calm() const { return now_ > faults_.until; }
    bool happens(double probability) { return !calm() && dice_(probability); }

    // --- the channel

    void at(double time, message m) {
        m.time = time;
        m.number = number_++;
        box_.push(std::move(m));
    }
    void send(const message& m) {
        const auto delay = [&] {
            const double t = -faults_.delay * std::log(1 - dice_());
            return happens(faults_.long_delay) ? 100 * t : t;
        };
        if (!happens(faults_.drop)) at(now_ + delay(), m);
        if (happens(faults_.twice)) at(now_ + delay(), m);
    }
    void say(std::size_t worker, const event& e, std::vector<ticket> tickets = {}) {
        send({.what = message::kind::reply, .worker = worker, .said = e, .tickets = std::move(tickets)});
    }

    // --- the scheduler's process

    void dispatch(const event& e) {
        actions out;
        s_.on(e, now_, out);
        s_.check_invariants();
        for (const action& a : out.items) see(a, out);
        if (happens(saves_often_ ? 0.5 : 0.02)) save();
    }
    void save() {
        saved_ = s_.snapshot();
        kept_ = {payloads_, consumed_};
    }
    void see(const action& a, const actions& out) {
        switch (a.what) {
        case action::kind::start: {
            payload& p = payloads_[a.ticket.slot];
            const bool goes_on = p.sample == a.ticket.sample && p.prefix.tokens > 0 &&
                                 p.prefix.oldest >= s_.start_of(a.ticket); // else it was made to start again since
            p = {a.ticket.sample, a.ticket.attempt, false, false, goes_on ? p.prefix : token_versions{}};
            order(a, {}, p.prefix);
            break;
        }
        case action::kind::abort:
        case action::kind::park:
        case action::kind::lost:
            order(a);
            break;
        case action::kind::train:
            for (const ticket& t : out.of(a)) {
                const payload& p = payloads_[t.slot];
                require(p.sample == t.sample && p.attempt == t.attempt && p.rolled,
                        "a batch with an attempt that is not there");
                require(p.scored, "a batch with a sequence that has no score");
            }
            [[fallthrough]];
        case action::kind::score: {
            const auto tickets = out.of(a);
            order(a, {tickets.begin(), tickets.end()});
            break;
        }
        case action::kind::sync:
            installing_ = a.job;
            require(a.job == 0 || made_.contains(a.job), "weights that nobody published");
            for (std::size_t i = 0; i < workers_.size(); ++i) {
                if (workers_[i].stage != stage::rollout || (a.worker >= 0 && a.worker != workers_[i].number)) continue;
                if (!s_.is_up(stage::rollout, workers_[i].number)) continue;
                action one = a;
                one.worker = workers_[i].number;
                one.incarnation = s_.incarnation_of(stage::rollout, one.worker);
                order(one);
            }
            break;
        case action::kind::step: {
            installing_ = 0;
            const plan p = s_.resolved();
            for (const consumed_sequence& c : out.consumed_by(a)) {
                require(consumed_.insert(c.ticket.sample).second, "consumed twice");
                const auto most = promised_lag(p, p.permits);
                require(!most || a.version - 1 - c.start <= *most, "a sequence was staler than its policy allows");
            }
            if (!calm() || saves_often_) save();
            break;
        }
        case action::kind::fail:
        case action::kind::finished:
            break;
        }
    }
    void order(const action& a, std::vector<ticket> tickets = {}, const token_versions& prefix = {}) {
        for (std::size_t i = 0; i < workers_.size(); ++i) {
            const stage s = a.what == action::kind::lost    ? a.stage
                            : a.what == action::kind::score ? stage::teacher
                            : a.what == action::kind::train ? stage::learner
                                                            : stage::rollout;
            if (workers_[i].stage == s && workers_[i].number == a.worker)
                send({.what = message::kind::command,
                      .epoch = epoch_,
                      .worker = i,
                      .life = a.incarnation,
                      .order = a,
                      .tickets = tickets,
                      .expected = s_.weights(),
                      .prefix = prefix});
        }
    }
    void hear(const message& m) {
        using kind = event::kind;
        event e = m.said;
        e.tickets = m.tickets;
        const bool lives = s_.is_up(e.stage, e.worker) && s_.incarnation_of(e.stage, e.worker) == e.incarnation;
        if (lives && e.what == kind::rolled_out) {
            payload& p = payloads_[e.ticket.slot];
            if (p.sample == e.ticket.sample && p.attempt == e.ticket.attempt) p.rolled = true;
        }
        if (lives && e.what == kind::parked) {
            payload& p = payloads_[e.ticket.slot];
            if (p.sample == e.ticket.sample && p.attempt == e.ticket.attempt && !p.rolled) p.prefix = e.versions;
        }
        if (e.what == kind::scored)
            for (const ticket& t : m.tickets) {
                payload& p = payloads_[t.slot];
                if (p.rolled && p.sample == t.sample && p.attempt == t.attempt) p.scored = true;
            }
        dispatch(e);
        if (e.what == kind::learned && made_.at(e.job).lost) dispatch(event::weights_lost(e.job));
        // who speaks in a life that is over is told so
        if (!s_.is_up(e.stage, e.worker) && s_.incarnation_of(e.stage, e.worker) >= e.incarnation &&
            e.what != kind::worker_down) {
            action a;
            a.what = action::kind::lost;
            a.stage = e.stage, a.worker = e.worker, a.incarnation = e.incarnation;
            order(a);
        }
    }

    // --- the workers' processes

    void begin(std::size_t i) {
        process& w = workers_[i];
        w = {w.stage, w.number, w.slots, w.life + 1, w.epoch, false, {}, {}, {}};
        at(now_, {.what = message::kind::announce, .worker = i, .life = w.life});
    }
    void announce(const message& m) {
        process& w = workers_[m.worker];
        if (w.life != m.life) return;
        say(m.worker, event::up(w.stage, w.number, w.slots).of_life(w.life));
        at(now_ + 3 + dice_(), m);
    }
    void obey(const message& m) {
        process& w = workers_[m.worker];
        if (m.epoch < w.epoch) return;
        if (m.epoch > w.epoch) { // another life of the scheduler
            w.epoch = m.epoch;
            return begin(m.worker);
        }
        if (m.life != w.life) return;
        const action& a = m.order;
        switch (a.what) {
        case action::kind::lost:
            begin(m.worker);
            break;
        case action::kind::sync: {
            if (w.installed && a.job < w.has.job) break;
            if (a.job != 0 && made_.at(a.job).lost) break; // its source is dead
            w.installed = true;
            w.has = {a.version, a.job};
            say(m.worker, event::synced(w.number, a.job).of_life(w.life));
            break;
        }
        case action::kind::start: {
            if (!w.seen.insert(a.ticket.sample << 32 | a.ticket.attempt).second) break;
            require(w.installed && (w.has.version > m.expected.version || w.has == m.expected),
                    "started on weights that are not the version's");
            require(!w.lanes.contains(a.ticket.lane), "two attempts on one lane");
            w.lanes[a.ticket.lane] = {a.ticket,
                                      {w.has, m.prefix.tokens > 0 ? m.prefix.oldest : w.has.version, m.prefix.tokens}};
            at(now_ + 5 * dice_(), {.what = message::kind::work, .worker = m.worker, .life = w.life, .who = a.ticket});
            break;
        }
        case action::kind::abort: {
            const auto lane = w.lanes.find(a.ticket.lane);
            if (lane == w.lanes.end() || lane->second.first != a.ticket) break;
            w.lanes.erase(lane);
            say(m.worker, event::aborted(a.ticket));
            break;
        }
        case action::kind::park: {
            const auto lane = w.lanes.find(a.ticket.lane);
            if (lane != w.lanes.end() && lane->second.first == a.ticket) park(m.worker, a.ticket);
            break;
        }
        case action::kind::score:
        case action::kind::train:
            if (!w.seen.insert(a.job).second) break;
            at(now_ + 2 * dice_(), {.what = message::kind::work,
                                    .worker = m.worker,
                                    .life = w.life,
                                    .job = {a.job, a.from, a.version, m.tickets}});
            break;
        default:
            break;
        }
    }
    void park(std::size_t worker, const ticket& t) {
        process& w = workers_[worker];
        const running r = w.lanes.at(t.lane).second;
        w.lanes.erase(t.lane);
        say(worker, event::parked(t, {r.oldest, w.has.version, 0.5 * double(r.oldest + w.has.version), r.had + 2}));
    }
    // Something is done.
    void work(const message& m) {
        process& w = workers_[m.worker];
        const bool zombie = w.life != m.life; // it had no look at its stop token
        if (w.stage == stage::rollout) {
            const auto lane = w.lanes.find(m.who.lane);
            if (zombie || lane == w.lanes.end() || lane->second.first != m.who) return;
            const version_t oldest = lane->second.second.oldest, newest = w.has.version;
            const std::int64_t had = lane->second.second.had;
            if (happens(0.1)) return park(m.worker, m.who);
            w.lanes.erase(lane);
            if (happens(0.02))
                say(m.worker, event::rollout_failed(m.who));
            else
                say(m.worker, event::rolled_out(m.who, {oldest, newest, 0.5 * double(oldest + newest), had + 5}));
        } else if (w.stage == stage::teacher) {
            say(m.worker, event::scored(m.job.job, w.number).of_life(m.life), m.job.tickets);
        } else {
            publication& p = made_[m.job.job];
            p.from = m.job.from;
            p.version = m.job.version + 1;
            p.samples.clear();
            for (const ticket& t : m.job.tickets) p.samples.push_back(t.sample);
            say(m.worker, event::learned(m.job.job).of_life(m.life));
        }
    }

    // --- what goes wrong

    void mishap() {
        if (calm()) return;
        at(now_ + dice_.in(0.2, 4), {.what = message::kind::mishap});
        std::vector<ticket> asked;
        s_.for_each([&](const outstanding_sequence& q) {
            if (q.where == place::rollout && happens(0.05)) asked.push_back(q.ticket);
        });
        for (const ticket& t : asked) dispatch(event::park(t));
        for (std::size_t i = 0; i < workers_.size(); ++i) {
            process& w = workers_[i];
            const bool seen = happens(faults_.death);
            if (seen || happens(faults_.silent_death)) {
                if (seen) say(i, event::down(w.stage, w.number).of_life(w.life));
                begin(i); // back at once
            } else if (happens(faults_.reconnect)) {
                begin(i);
            } else if (w.stage == stage::learner && installing_ != 0 && happens(faults_.loss)) {
                lose(); // and with it
                begin(i);
            }
        }
        if (happens(faults_.scheduler_death)) {
            ++epoch_;
            s_ = Scheduler::restore(settings_, saved_);
            s_.abandon_workers();
            s_.check_invariants();
            payloads_ = kept_.payloads;
            consumed_ = kept_.consumed;
            installing_ = 0;
            save(); // before anything is asked
            now_ += dice_() * 5;
            for (std::size_t i = 0; i < workers_.size(); ++i) { // some notice at once, others by their next message
                if (!dice_(0.5)) continue;
                workers_[i].epoch = epoch_;
                begin(i);
            }
        }
    }
    void lose() {
        const auto at_stake = made_.find(installing_);
        if (at_stake == made_.end() || installing_ == s_.weights().job) return; // others have them
        at_stake->second.lost = true;
        dispatch(event::weights_lost(installing_));
        if (dice_(0.3)) dispatch(event::weights_lost(at_stake->first));
    }

    dice dice_;
    channel_faults faults_;
    sched::settings settings_ = settings_of(dice_.seed ^ 0x70726f63);
    Scheduler s_;
    double now_ = 0;
    std::uint64_t number_ = 0, epoch_ = 0;
    std::priority_queue<message> box_;
    std::vector<process> workers_;
    std::map<std::uint32_t, payload> payloads_;
    std::set<sample_t> consumed_;
    std::map<std::uint64_t, publication> made_;
    std::uint64_t installing_ = 0;
    bool saves_often_ = dice_(0.5);
    std::string saved_;
    memory kept_;
};

} // namespace opd::test
