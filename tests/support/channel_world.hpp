// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A scheduler and its workers as processes that talk through an unreliable channel: messages are lost, late, doubled
// and in another order; workers die and come back in another life, reconnect unnoticed, or are told of their death
// late; the scheduler dies and comes back from its last snapshot; what a learner published is lost with it, at once or
// after the version has moved. After a while nothing goes wrong any more, and the run must end: as failed, if no worker
// has the version's weights any more.
//
// The process that drives the scheduler is a dispatcher (opd/sched/dispatcher.hpp), and does what the head of that
// header asks of a driver, and no more:
//   - a worker says that it is there until it has been heard, again and again; it begins a new life when it is told
//     that the present one is over, and when it hears of another life of the scheduler
//   - who speaks in a life that is over is told so
//   - a command that comes twice is carried out once; one of another life not at all
//   - a snapshot, with the payloads, is written again before the first message after a restore
//   - a publication that is lost is reported, and again after a restore, unless it is there again
//   - payloads are evicted, or die with the life of who made them: whoever asks for one says so, and at times their
//     store
//
// What is checked, beside the scheduler's own invariants after every event: nothing starts on weights that are older
// than the version or were made by another job; every installed publication exists; a batch has a payload and a score
// for each attempt in it; along the line of weights that made the last ones, every sequence that was consumed was
// learnt from exactly once; the lag that the policy promises.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "opd/sched/dispatcher.hpp"
#include "support/world.hpp"

namespace opd::test {

struct channel_faults {
    double drop = 0, twice = 0, death = 0, silent_death = 0, scheduler_death = 0, loss = 0, reconnect = 0;
    double late_loss = 0;      ///< of the version's weights, which others have
    double eviction = 0;       ///< of a payload from its store
    bool held_by_life = false; ///< payloads die with the life of the worker that made them
    double delay = 0.1;        ///< mean seconds
    double long_delay = 0;     ///< share of messages that take a hundred times as long
    double until = 300;        ///< seconds; then nothing goes wrong any more
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
    if (d(0.5)) f.eviction = 0.02 * d();
    f.held_by_life = d(0.3);
    if (d(0.3)) f.late_loss = 0.1 * d();
    return f;
}

/// What an attempt has drawn, and which it was.
struct drawn_tokens {
    sample_t sample = 0;
    std::uint32_t attempt = 0;
    token_versions versions = {};
    std::size_t holder = 0; ///< who made it, and keeps it
    incarnation_t life = 0;
};
/// The teacher's word on it.
struct drawn_score {
    sample_t sample = 0;
    std::size_t holder = 0;
    incarnation_t life = 0;
};

/// `Scheduler`: sched::scheduler, or one with a cure taken out.
template <class Scheduler = scheduler>
class channel_world {
public:
    explicit channel_world(std::uint64_t seed)
        : dice_{seed ^ 0x70726f63}, faults_(faults_of(seed)), work_(Scheduler(settings_of(seed))) {
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
        s.rollout_attempts = s.teacher_attempts = s.learner_attempts = s.payload_attempts = 50;
        s.fruitless_steps = 0;
        s.rollout_deadline = 40, s.abort_deadline = 10, s.teacher_deadline = 15, s.learner_deadline = 15;
        s.sync_deadline = 12;
        return s;
    }
    /// Throws `violation`.
    void run(std::uint64_t most = 60000) {
        while (!state().finished()) {
            if (most-- == 0) throw violation("livelock");
            const double due = state().next_deadline();
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
            case message::kind::lost:
                if (hears(m)) begin(m.worker);
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
        if (state().failed()) {
            require(state().failed() == stage::rollout && is_gone(before_.job), "failed for no reason");
            for (const process& w : workers_)
                require(w.stage != stage::rollout || !state().is_up(w.stage, w.number) || !w.installed ||
                            w.life != state().incarnation_of(w.stage, w.number) || w.epoch != epoch_ ||
                            w.has != before_,
                        "failed, though a worker has the weights");
        }
        for (const failure f : {failure::rollout, failure::teacher, failure::learner})
            require(state().totals().failed_by[static_cast<std::size_t>(f)] == 0, "given up for a fault");
        // along the line of the last weights each was learnt from once, and all of them
        std::multiset<sample_t> learnt;
        for (std::uint64_t job = state().weights().job; job != 0; job = made_.at(job).from)
            for (const sample_t n : made_.at(job).samples) learnt.insert(n);
        require(std::set<sample_t>(learnt.begin(), learnt.end()).size() == learnt.size(), "learnt from twice");
        require(learnt == std::multiset<sample_t>(consumed_.begin(), consumed_.end()),
                "consumed is not what was learnt");
    }
    const Scheduler& state() const { return work_.scheduler(); }
    std::uint64_t crashes() const { return epoch_; }
    int moved() const { return moved_; } ///< publications that were lost after their version had come
    std::uint64_t messages() const { return number_; }

private:
    using belt = conveyor<drawn_tokens, drawn_score>;
    using command = worker_command<drawn_tokens, drawn_score>;
    using reply = worker_reply<drawn_tokens, drawn_score>;
    friend class dispatcher<belt, Scheduler>;

    struct message {
        enum class kind { command, lost, reply, work, announce, mishap } what = kind::command;
        double time = 0;
        std::uint64_t number = 0;
        std::uint64_t epoch = 0;                   // command: of the scheduler
        std::size_t worker = 0;                    // its place in workers_
        incarnation_t life = 0;                    // command, lost, work
        std::shared_ptr<const command> order = {}; // command; work: of a teacher or the learner
        std::shared_ptr<const reply> said = {};    // reply
        weights expected = {};                     // start: the version's weights when it was sent
        ticket who = {};                           // work: of a rollout worker
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
    struct publication {
        std::uint64_t from = 0;
        version_t version = 0;
        std::vector<sample_t> samples;
        bool lost = false;
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
    void say(std::size_t worker, reply r) {
        send({.what = message::kind::reply, .worker = worker, .said = std::make_shared<const reply>(std::move(r))});
    }
    void say(std::size_t worker, const event& e) { say(worker, reply{.what = e}); }

    // --- the scheduler's process

    void dispatch(const event& e) {
        before_ = state().weights(); // a run that ends as failed counts an update that was made
        work_.on(e, now_, *this);
    }
    void took(const event&, double, const actions&) { state().check_invariants(); }
    void carry_out(const action& a) {
        switch (a.what) {
        case action::kind::train: {
            command c = work_.command(a);
            for (const auto& v : c.batch) {
                require(v.rolled && v.rolled->sample == v.ticket.sample && v.rolled->attempt == v.ticket.attempt,
                        "a batch with an attempt that is not there");
                require(v.scored && v.scored->sample == v.ticket.sample, "a batch with a sequence that has no score");
            }
            order(stage::learner, a.worker, std::move(c));
            break;
        }
        case action::kind::start:
        case action::kind::abort:
        case action::kind::park:
            order(stage::rollout, a.worker, work_.command(a));
            break;
        case action::kind::score:
            order(stage::teacher, a.worker, work_.command(a));
            break;
        case action::kind::sync:
            installing_ = a.job;
            require(a.job == 0 || made_.contains(a.job), "weights that nobody published");
            for (const process& w : workers_) {
                if (w.stage != stage::rollout || (a.worker >= 0 && a.worker != w.number)) continue;
                if (!state().is_up(stage::rollout, w.number)) continue;
                command c = work_.command(a);
                c.life = state().incarnation_of(stage::rollout, w.number);
                order(stage::rollout, w.number, std::move(c));
            }
            break;
        case action::kind::lost:
            bury(a.stage, a.worker, a.incarnation);
            break;
        case action::kind::step: {
            installing_ = 0;
            const plan p = state().resolved();
            for (const consumed_sequence& c : work_.actions().consumed_by(a)) {
                require(consumed_.insert(c.ticket.sample).second, "consumed twice");
                const auto most = promised_lag(p, p.permits);
                require(!most || a.version - 1 - c.start <= *most, "a sequence was staler than its policy allows");
            }
            saves_ = saves_ || !calm() || saves_often_;
            break;
        }
        case action::kind::fail:
        case action::kind::finished:
            break;
        }
    }
    void carried_out() {
        if (happens(saves_often_ ? 0.5 : 0.02) || std::exchange(saves_, false)) save();
    }
    void refused(std::exception_ptr e) { std::rethrow_exception(e); }
    void save() {
        saved_ = work_.snapshot();
        saved_consumed_ = consumed_;
    }
    void to(stage s, std::int32_t number, message m) {
        m.epoch = epoch_;
        for (std::size_t i = 0; i < workers_.size(); ++i)
            if (workers_[i].stage == s && workers_[i].number == number) {
                m.worker = i;
                send(m);
            }
    }
    void order(stage s, std::int32_t number, command c) {
        const incarnation_t life = c.life;
        to(s, number,
           {.what = message::kind::command,
            .life = life,
            .order = std::make_shared<const command>(std::move(c)),
            .expected = state().weights()});
    }
    void bury(stage s, std::int32_t number, incarnation_t life) {
        to(s, number, {.what = message::kind::lost, .life = life});
    }
    void hear(const message& m) {
        const event& e = m.said->what;
        before_ = state().weights();
        work_.hear(reply(*m.said), now_, *this);
        if (e.what == event::kind::learned && made_.at(e.job).lost) dispatch(event::weights_lost(e.job));
        // who speaks in a life that is over is told so
        if (!state().is_up(e.stage, e.worker) && state().incarnation_of(e.stage, e.worker) >= e.incarnation &&
            e.what != event::kind::worker_down)
            bury(e.stage, e.worker, e.incarnation);
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
    /// Whether it is for the present life.
    bool hears(const message& m) {
        process& w = workers_[m.worker];
        if (m.epoch > w.epoch) { // another life of the scheduler
            w.epoch = m.epoch;
            begin(m.worker);
            return false;
        }
        return m.epoch == w.epoch && m.life == w.life;
    }
    void obey(const message& m) {
        using kind = typename command::kind;
        if (!hears(m)) return;
        process& w = workers_[m.worker];
        const command& c = *m.order;
        const auto lane = w.lanes.find(c.ticket.lane);
        const bool runs = lane != w.lanes.end() && lane->second.first == c.ticket;
        switch (c.what) {
        case kind::install:
            if (w.installed && c.weights.job < w.has.job) break;
            if (is_gone(c.weights.job)) break; // its source is dead
            w.installed = true;
            w.has = c.weights;
            say(m.worker, event::synced(w.number, c.weights.job).of_life(w.life));
            break;
        case kind::start: {
            if (!w.seen.insert(c.ticket.sample << 32 | c.ticket.attempt).second) break;
            require(w.installed && (w.has.version > m.expected.version || w.has == m.expected),
                    "started on weights that are not the version's");
            require(lane == w.lanes.end(), "two attempts on one lane");
            if (c.prefix && is_lost(*c.prefix)) {
                say(m.worker, reply{.what = event::rollout_failed(c.ticket), .lost = {c.ticket}});
                break;
            }
            w.lanes[c.ticket.lane] = {c.ticket,
                                      {w.has, c.prefix ? c.prefix->versions.oldest : w.has.version,
                                       c.prefix ? c.prefix->versions.tokens : 0}};
            at(now_ + 5 * dice_(), {.what = message::kind::work, .worker = m.worker, .life = w.life, .who = c.ticket});
            break;
        }
        case kind::abort:
            if (!runs) break;
            w.lanes.erase(lane);
            say(m.worker, event::aborted(c.ticket));
            break;
        case kind::park:
            if (runs) park(m.worker, c.ticket);
            break;
        case kind::score:
        case kind::train:
            if (!w.seen.insert(c.what == kind::score ? c.job : c.call.job).second) break;
            at(now_ + 2 * dice_(), {.what = message::kind::work, .worker = m.worker, .life = w.life, .order = m.order});
            break;
        default:
            break;
        }
    }
    reply with_tokens(std::size_t worker, event e, const ticket& t, const running& r, version_t newest,
                      std::int64_t more) {
        e.versions = {r.oldest, newest, 0.5 * double(r.oldest + newest), r.had + more};
        return {.what = e,
                .sequence = std::make_shared<const drawn_tokens>(
                    drawn_tokens{t.sample, t.attempt, e.versions, worker, workers_[worker].life})};
    }
    void park(std::size_t worker, const ticket& t) {
        process& w = workers_[worker];
        const running r = w.lanes.at(t.lane).second;
        w.lanes.erase(t.lane);
        say(worker, with_tokens(worker, event::parked(t, {}), t, r, w.has.version, 2));
    }
    // Something is done.
    void work(const message& m) {
        process& w = workers_[m.worker];
        const bool zombie = w.life != m.life; // it had no look at its stop token
        if (w.stage == stage::rollout) {
            const auto lane = w.lanes.find(m.who.lane);
            if (zombie || lane == w.lanes.end() || lane->second.first != m.who) return;
            const running r = lane->second.second;
            if (happens(0.1)) return park(m.worker, m.who);
            w.lanes.erase(lane);
            if (happens(0.02))
                say(m.worker, event::rollout_failed(m.who));
            else
                say(m.worker, with_tokens(m.worker, event::rolled_out(m.who, {}), m.who, r, w.has.version, 5));
        } else if (w.stage == stage::teacher) {
            reply r{.what = event::scored(m.order->job, w.number).of_life(m.life)};
            for (std::size_t i = 0; i < m.order->tickets.size(); ++i) {
                const auto& sequence = m.order->sequences[i];
                if (is_lost(*sequence)) {
                    r.lost.push_back(m.order->tickets[i]);
                    continue;
                }
                r.tickets.push_back(m.order->tickets[i]);
                r.scores.push_back(
                    std::make_shared<const drawn_score>(drawn_score{sequence->sample, m.worker, m.life}));
            }
            if (r.tickets.empty()) r.what.what = event::kind::score_failed;
            say(m.worker, std::move(r));
        } else {
            const train_call& call = m.order->call;
            reply without{.what = event::learn_failed(call.job).of_life(m.life)};
            for (const auto& v : m.order->batch)
                if (is_lost(*v.rolled) || has_gone(v.scored->holder, v.scored->life)) without.lost.push_back(v.ticket);
            if (!without.lost.empty()) return say(m.worker, std::move(without));
            publication& p = made_[call.job];
            p.from = call.from.job;
            p.version = call.makes().version;
            p.samples.clear();
            for (const auto& v : m.order->batch) p.samples.push_back(v.ticket.sample);
            say(m.worker, event::learned(call.job).of_life(m.life));
        }
    }

    // --- what goes wrong

    bool has_gone(std::size_t holder, incarnation_t life) const {
        return faults_.held_by_life && workers_[holder].life != life;
    }
    bool is_lost(const drawn_tokens& p) const {
        return evicted_.contains({p.sample, p.attempt}) || has_gone(p.holder, p.life);
    }
    bool is_gone(std::uint64_t job) const { return job != 0 && made_.at(job).lost; }
    void evict() {
        std::vector<ticket> gone;
        state().for_each([&](const outstanding_sequence& q) {
            if (happens(faults_.eviction)) gone.push_back(q.ticket);
        });
        if (gone.empty()) return;
        for (const ticket& t : gone) evicted_.insert({t.sample, t.attempt});
        if (dice_(0.3)) dispatch(event::payload_lost(gone)); // who keeps it says so, which may be early
        if (dice_(0.1)) dispatch(event::payload_lost(gone.front()));
    }
    void mishap() {
        if (calm()) return;
        at(now_ + dice_.in(0.2, 4), {.what = message::kind::mishap});
        evict();
        std::vector<ticket> asked;
        state().for_each([&](const outstanding_sequence& q) {
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
        if (faults_.late_loss > 0 && happens(faults_.late_loss)) {
            const std::uint64_t job = state().weights().job;
            if (job != 0 && !std::exchange(made_.at(job).lost, true)) {
                ++moved_;
                dispatch(event::weights_lost(job));
            }
        }
        if (!state().finished() && happens(faults_.scheduler_death)) {
            ++epoch_;
            work_ = dispatcher<belt, Scheduler>(Scheduler::restore(settings_, saved_.scheduler));
            work_.scheduler().abandon_workers();
            work_.resume(saved_);
            state().check_invariants();
            consumed_ = saved_consumed_;
            installing_ = 0;
            save(); // before anything is asked
            if (is_gone(state().weights().job)) {
                if (dice_(0.5))
                    made_.at(state().weights().job).lost = false; // from a store
                else
                    dispatch(event::weights_lost(state().weights().job));
            }
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
        if (at_stake == made_.end() || installing_ == state().weights().job) return; // others have them
        at_stake->second.lost = true;
        dispatch(event::weights_lost(installing_));
        if (dice_(0.3)) dispatch(event::weights_lost(at_stake->first));
    }

    dice dice_;
    channel_faults faults_;
    sched::settings settings_ = settings_of(dice_.seed ^ 0x70726f63);
    dispatcher<belt, Scheduler> work_;
    double now_ = 0;
    std::uint64_t number_ = 0, epoch_ = 0;
    std::priority_queue<message> box_;
    std::vector<process> workers_;
    std::set<sample_t> consumed_;
    std::set<std::pair<sample_t, std::uint32_t>> evicted_; // sequence, attempt
    std::map<std::uint64_t, publication> made_;
    std::uint64_t installing_ = 0;
    int moved_ = 0;
    weights before_ = {}; // of the version, when the scheduler heard the last event
    bool saves_often_ = dice_(0.5), saves_ = false;
    typename belt::snapshot_type saved_;
    std::set<sample_t> saved_consumed_;
};

} // namespace opd::test
