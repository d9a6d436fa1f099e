// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Random worlds for schedulers, and a witness that does not trust them.
//
//   world_of(seed)   settings, workers, durations, faults and outside events, all a function of the seed
//   witness          watches events and actions alone, keeps its own account of every sequence, lane, call, weight and
//                    permit, and throws `violation` when a promise is broken
//   run_world        lets a world run to its end; throws `violation` for a deadlock or a livelock as well
#pragma once

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/sched/scheduler_checks.hpp"
#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "support/sanitized.hpp"

namespace opd::test {

using namespace opd::sched;

struct violation : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Random numbers of one world.
struct dice {
    std::uint64_t seed = 0;
    std::uint64_t next = 0;
    double operator()() { return keyed_uniform(seed, draw_of::own, next++); }
    bool operator()(double probability) { return (*this)() < probability; }
    index_t of(index_t low, index_t high) { // both included
        return std::min(high, low + static_cast<index_t>((*this)() * static_cast<double>(high - low + 1)));
    }
    double in(double low, double high) { return low * std::pow(high / low, (*this)()); }
    template <class T>
    T one(std::initializer_list<T> list) {
        return list.begin()[of(0, static_cast<index_t>(list.size()) - 1)];
    }
};

/// How often things go wrong.
struct fault_rates {
    double fail = 0, hang = 0, late = 0, twice = 0, partial = 0, death = 0, silence = 0;
    double lost = 0;  ///< of what a learner has published
    double scale = 1; ///< of their times, seconds
    bool any() const { return fail + hang + late + twice + partial + death + silence > 0; }

    fault draw(std::uint64_t seed, stage s, std::uint64_t number, std::uint32_t attempt) const {
        fault f;
        if (!any()) return f;
        const auto what = static_cast<draw_of>(2000 + 10 * static_cast<int>(s));
        double u = keyed_uniform(seed, what, number, attempt);
        const auto more = [&](int i) {
            return keyed_uniform(seed, static_cast<draw_of>(static_cast<int>(what) + i), number, attempt);
        };
        using kind = fault::kind;
        for (const auto& [k, p] :
             {std::pair{kind::fail, fail}, std::pair{kind::hang, hang}, std::pair{kind::late, late},
              std::pair{kind::twice, twice}, std::pair{kind::partial, partial}, std::pair{kind::death, death},
              std::pair{kind::silence, silence}}) {
            if (u < p) {
                f.what = k;
                f.after = more(1) < 0.2 ? 0 : scale * 2 * more(2);
                f.back = more(3) < 0.2 ? 0 : scale * 5 * more(4);
                f.which = static_cast<std::uint64_t>(more(5) * 0x1p52);
                return f;
            }
            u -= p;
        }
        return f;
    }
};

/// simulated_cluster with faults.
struct faulty_cluster : simulated_cluster {
    fault_rates faults;
    fault rollout_fault(const ticket& t) const { return faults.draw(seed, stage::rollout, t.sample, t.attempt); }
    fault teacher_fault(std::uint64_t job, std::int32_t) const { return faults.draw(seed, stage::teacher, job, 0); }
    fault learner_fault(std::uint64_t job) const { return faults.draw(seed, stage::learner, job, 0); }
    fault sync_fault(std::int32_t worker, const weights& w, std::uint32_t life) const {
        return faults.draw(seed, static_cast<stage>(stage_count), static_cast<std::uint64_t>(worker) << 32 | w.job,
                           life);
    }
    double publication(std::uint64_t job) const {
        if (keyed_uniform(seed, static_cast<draw_of>(4000), job) >= faults.lost) return forever;
        return faults.scale * 0.5 * keyed_uniform(seed, static_cast<draw_of>(4001), job);
    }
    double recovery(stage s, std::int32_t worker, std::uint32_t life) const {
        return 5 * faults.scale *
               keyed_uniform(seed, static_cast<draw_of>(3000 + static_cast<int>(s)), static_cast<std::uint64_t>(worker),
                             life);
    }
};

struct outside_event {
    double time = 0;
    sched::event what;
};

struct world {
    std::uint64_t seed = 0;
    sched::settings settings;
    faulty_cluster cluster;
    std::int32_t rollout_workers = 1, lanes = 1, teachers = 1, teacher_slots = 1;
    std::vector<outside_event> outside;
};

/// What kind of schedule a world has; `any` draws it.
struct world_options {
    std::optional<sched::schedule> schedule; ///< its numbers are drawn all the same, but for policy and update
    bool faults = true;
    bool large = false; ///< tens of workers, hundreds of sequences
};

inline distribution any_duration(dice& d, double mean) {
    switch (d.of(0, 4)) {
    case 0:
        return {constant{mean}};
    case 1:
        return {uniform{0, 2 * mean}};
    case 2:
        return {exponential{mean}, 0, 40 * mean};
    case 3:
        return {lognormal{mean, 0.8}, 0, 60 * mean};
    default:
        return {pareto{1.1, mean / 3, 200 * mean}};
    }
}

inline world world_of(std::uint64_t seed, const world_options& options = {}) {
    dice d{seed};
    world w;
    w.seed = seed;
    sched::settings& s = w.settings;
    s.batch = d.of(1, options.large ? 48 : 6);
    s.group = d(0.7) ? 1 : d.of(2, 3);

    // the schedule
    const index_t kind = options.schedule ? static_cast<index_t>(options.schedule->index()) : d.of(0, 11);
    const index_t depth = d.of(0, 4);
    const bool whole = kind < 3;
    if (whole && s.batch % s.group != 0) s.batch = s.group * d.of(1, 2);
    if (kind == 0) {
        s.schedule = sched::sync{};
    } else if (kind == 1) {
        s.schedule = step_off{depth};
    } else if (kind == 2) {
        s.schedule = controlled{depth};
    } else {
        async a;
        a.tau = depth;
        a.policy = static_cast<staleness_policy>(d.of(0, 6));
        a.update = static_cast<weight_update>(d.of(0, 2));
        if (const auto* given = options.schedule ? std::get_if<async>(&*options.schedule) : nullptr) {
            a.policy = given->policy;
            a.update = given->update;
            a.negative_control = given->negative_control;
        }
        const bool gives_up = a.policy == staleness_policy::drop || a.policy == staleness_policy::retry;
        if (a.policy == staleness_policy::areal) {
            if (d(0.5)) a.concurrency = d.of(s.group, 12);
        } else if (d(0.6)) {
            a.outstanding = d.of(s.batch, (a.tau + 1) * s.batch + (gives_up ? s.batch : 0));
        } else if (seed % 2 == 0) { // no further draw: the worlds stay what they were
            a.outstanding = widest;
        }
        s.schedule = a;
        const auto accepted = [&] {
            try {
                plan_of(s);
                return true;
            } catch (const invalid_input&) {
                return false;
            }
        };
        if (!accepted()) { // a group that no permits fit
            s.group = 1;
            plan_of(s);
        }
    }
    s.sequences = s.group * d.of(1, (options.large ? 600 : 60) / s.group);
    s.teacher_batch = d.of(1, 5);
    s.teacher_flush = d.one({0.0, 0.05, 0.5, 5.0});

    // times
    w.rollout_workers = static_cast<std::int32_t>(d.of(1, options.large ? 30 : 4));
    w.lanes = static_cast<std::int32_t>(d.of(1, 4));
    w.teachers = static_cast<std::int32_t>(d.of(1, options.large ? 6 : 2));
    w.teacher_slots = static_cast<std::int32_t>(d.of(1, 2));
    faulty_cluster& c = w.cluster;
    c.seed = seed;
    c.lanes = 6;
    c.lengths.seed = seed;
    c.lengths.group = s.group;
    c.lengths.by_attempt = d(0.5);
    c.lengths.response = any_duration(d, d.one({1.0, 4.0, 20.0}));
    c.lengths.prompt = {constant{d.one({0.0, 3.0})}};
    c.speed.step = d.one({0.05, 0.25, 1.0});
    c.speed.step_per_sequence = d.one({0.0, 0.1});
    c.speed.prefill = d.one({0.0, 0.02});
    c.speed.rebuild = d.one({0.0, 0.01});
    if (d(0.3)) c.factor = {uniform{0.5, 3}};
    if (seed % 3 == 1) c.budget = 1 + static_cast<std::int64_t>(seed / 3 % 7); // parks; no draw, as below
    const auto job = [&](draw_of what, double scale) {
        simulated_job j;
        j.fixed = d(0.1) ? 0 : d.in(0.05, scale);
        j.per_item = d(0.5) ? 0 : 0.1;
        j.noise = any_duration(d, 1);
        j.what = what, j.seed = seed;
        return j;
    };
    c.teacher_time = job(draw_of::teacher_time, 2);
    c.learner_time = job(draw_of::learner_time, 4);
    c.sync_time = job(draw_of::sync_time, 1);

    // what goes wrong
    s.rollout_attempts = static_cast<int>(d.of(1, 4));
    s.teacher_attempts = static_cast<int>(d.of(1, 4));
    s.learner_attempts = static_cast<int>(d.of(1, 3));
    s.fruitless_steps = 0; // they end all the same: what fails, fails now and then
    if (options.faults && d(0.6)) {
        fault_rates& f = c.faults;
        const double much = d.one({0.01, 0.05, 0.15});
        for (double* rate : {&f.fail, &f.hang, &f.late, &f.twice, &f.partial, &f.death, &f.silence})
            if (d(0.4)) *rate = much * d();
        f.scale = d.one({0.3, 2.0, 10.0});
        if (d(0.3)) f.lost = 0.2 * d();
    }
    // Deadlines, wherever somebody may never answer. Above all durations the run ends by itself; tighter ones give up
    // sequences that are merely slow, so the source must be one that ends. A transfer is tried until it succeeds.
    if (c.faults.hang + c.faults.silence > 0 || d(0.2)) {
        const bool tight = d(0.5);
        if (tight) s.available = s.group * d.of(1, 60 / s.group);
        const auto deadline = [&] { return tight ? d.in(1, 100) : 1e5; };
        s.rollout_deadline = deadline();
        s.abort_deadline = deadline();
        s.teacher_deadline = deadline();
        s.learner_deadline = deadline();
        s.sync_deadline = 1e4;
    }
    if (s.available == 0 && d(0.2)) s.available = s.group * d.of(1, 60 / s.group);

    // what comes from outside
    const auto outside = [&](double t, const event& e) { w.outside.push_back({t, e}); };
    if (options.faults) {
        if (d(0.2))
            for (index_t n = d.of(1, 3); n > 0; --n) {
                const double t = d.in(0.5, 200);
                outside(t, event::of(event::kind::pause));
                outside(t + d.in(0.1, 50), event::of(event::kind::resume));
            }
        if (d(0.2))
            for (index_t n = d.of(1, 4); n > 0; --n)
                outside(d.in(0.5, 200), event::up(stage::rollout, static_cast<std::int32_t>(d.of(0, w.rollout_workers)),
                                                  static_cast<std::int32_t>(d.of(1, 6))));
        if (d(0.2)) { // drained, and back
            const auto number = static_cast<std::int32_t>(d.of(0, w.rollout_workers - 1));
            const double t = d.in(0.5, 200);
            outside(t, event::up(stage::rollout, number, 0));
            outside(t + d.in(0.1, 30), event::up(stage::rollout, number, w.lanes));
        }
        if (d(0.2))
            for (index_t n = d.of(1, 4); n > 0; --n) {
                const stage who = static_cast<stage>(d.of(0, 2));
                const auto number = static_cast<std::int32_t>(d.of(0, who == stage::rollout   ? w.rollout_workers - 1
                                                                      : who == stage::teacher ? w.teachers - 1
                                                                                              : 0));
                const double t = d.in(0.5, 200);
                outside(t, event::down(who, number));
                outside(t + d.in(0.1, 30), event::up(who, number, who == stage::rollout ? w.lanes : 1));
            }
        if (auto* a = std::get_if<async>(&s.schedule);
            a && a->policy != staleness_policy::areal && d(0.25) && !plan_of(s).automatic)
            for (index_t n = d.of(1, 4); n > 0; --n) {
                sched::settings changed = s;
                std::get<async>(changed.schedule).outstanding = d.of(s.batch, (a->tau + 1) * s.batch);
                try {
                    plan_of(changed);
                } catch (const invalid_input&) {
                    continue;
                }
                event e = event::of(event::kind::resize, std::get<async>(changed.schedule).outstanding);
                outside(d.in(0.5, 200), e);
            }
        if (s.available == 0 && d(0.1)) { // a run without end, but for this
            s.sequences = 0;
            outside(d.in(5, 100), event::of(event::kind::close));
        } else if (d(0.1)) {
            outside(d.in(0.5, 200), event::of(event::kind::close));
        }
        if (d(0.05)) outside(d.in(0.5, 200), event::of(event::kind::stop));
    }
    return w;
}

/// The largest start lag that the schedule promises; none under capacity and areal.
inline std::optional<version_t> promised_lag(const plan& p, index_t most_permits) {
    if (!p.streaming) return p.depth;
    switch (p.policy) {
    case staleness_policy::capacity:
    case staleness_policy::areal:
        return std::nullopt;
    case staleness_policy::cohort_fifo:
    case staleness_policy::in_order:
        return (most_permits + p.batch - 1) / p.batch - 1;
    default:
        return p.depth;
    }
}

class witness {
public:
    explicit witness(const sched::settings& s)
        : settings_(s), plan_(plan_of(s)), permits_(plan_.permits), most_permits_(plan_.permits) {}

    /// For mutations of the witness itself: it then believes in another promise.
    index_t permits_believed_less = 0;
    version_t lag_believed_less = 0;
    index_t room_believed_more = 0; ///< permits, and a scoring call that is smaller by as much

    std::uint64_t hash() const { return hash_; }
    std::int64_t consumed() const { return consumed_; }
    std::int64_t failed() const { return failed_; }
    version_t version() const { return version_; }
    version_t largest_lag() const { return largest_lag_; }
    double mean_lag() const { return consumed_ ? static_cast<double>(lag_sum_) / static_cast<double>(consumed_) : 0; }
    bool finished() const { return finished_; }
    /// Samples of every step, in the order in which the learner got them.
    const std::vector<std::vector<sample_t>>& batches() const { return batches_; }

    template <class Scheduler>
    void event(double t, const sched::event& e, const actions& out, const Scheduler& s) {
        require(t >= now_, "time runs backwards");
        now_ = t;
        mix(std::bit_cast<std::uint64_t>(t));
        mix(static_cast<std::uint64_t>(e.what));
        was_open_ = gate_open();
        const std::int64_t admitted = admitted_;
        hear(e, s);
        if (s.failed() && !stopped_) stop(); // as if it had been told to
        for (const action& a : out.items) see(a, out);
        s.check_invariants();
        if (plan_.automatic) {
            const index_t chosen = s.resolved().permits;
            require(chosen == permits_ || std::any_of(out.items.begin(), out.items.end(), is_step),
                    "automatic permits changed between two steps");
            require(chosen >= plan_.batch && chosen <= (plan_.depth + 1) * plan_.batch,
                    "automatic permits beyond the bound");
            require(chosen % settings_.group == 0 || chosen == (plan_.depth + 1) * plan_.batch,
                    "automatic permits for a part of a group");
            permits_ = chosen;
            most_permits_ = std::max(most_permits_, permits_);
        }
        compare(s);
        admitted_ = s.totals().admitted;
        if (admitted_ != admitted) {
            whole_.emplace_back(static_cast<sample_t>(admitted), static_cast<sample_t>(admitted_));
            require(plan_.streaming || admitted_ - admitted <= plan_.batch, "more than a batch at a time");
            require(was_open_ || gate_open(), "admitted while the gate was closed");
            require(!paused_ && !closed_, "admitted while paused or closed");
            require((admitted_ - admitted) % settings_.group == 0, "half a group was admitted");
            require(s.where().outstanding() <= cap() - permits_believed_less, "more outstanding than permits");
        }
        if (!finished_ && gate_open()) nobody_idles(s);
        if (plan_.policy == staleness_policy::drop && plan_.streaming)
            for (const sequence& q : sequences_)
                require(!started(q) || q.where == training || q.start >= version_ - plan_.depth,
                        "a stale sequence was kept");
    }

    /// All workers are gone, and with them what they did; a synchronisation that was not over never happened.
    void crash() {
        for (auto& all : workers_)
            for (auto& w : all) w = {.life = w.life};
        for (sequence& q : sequences_) {
            if (q.where == rollout) q.where = waiting;
            if (q.where == scoring) q.where = rolled;
            if (q.where == training) q.where = ready;
            if (started(q) && q.where != rollout && q.versions.newest > version_) q.where = waiting; // weights are gone
            if (q.where == waiting) q.kept = false;
        }
        jobs_.clear();
        training_.clear();
        training_job_.reset();
        learned_ = syncing_ = remaking_ = false;
    }

private:
    static bool is_step(const action& a) { return a.what == action::kind::step; }
    enum place { unseen, waiting, rollout, rolled, scoring, ready, training, consumed_place, failed_place };
    struct sequence {
        place where = unseen;
        version_t start = -1;
        ticket t;
        token_versions versions;
        std::uint64_t job = 0;
        bool kept = false; // it goes on from what it had when it was parked
    };
    struct worker {
        bool up = false;
        incarnation_t life = 0; // the present one, or the last that is over
        std::int32_t slots = 0, jobs = 0;
        bool answers = false;
        std::uint64_t has = 0; // what made the weights that it installed
        std::map<std::int32_t, ticket> lanes = {};
    };
    struct job {
        std::int32_t worker;
        std::vector<ticket> tickets;
    };

    static void require(bool holds, const char* what) {
        if (!holds) throw violation(what);
    }
    void mix(std::uint64_t x) {
        hash_ = (hash_ ^ x) * 0x9E3779B97F4A7C15ull;
        hash_ ^= hash_ >> 29;
    }
    void mix(const ticket& t) {
        mix(t.sample);
        mix(std::uint64_t{t.attempt} << 32 | t.slot);
        mix(static_cast<std::uint64_t>(t.worker) << 32 | static_cast<std::uint32_t>(t.lane));
    }
    bool gate_open() const { return !learned_ && !syncing_ && !remaking_; }
    static bool started(const sequence& q) { return q.where >= rollout && q.where <= training; }
    sequence& of(const ticket& t) {
        if (t.sample >= sequences_.size()) sequences_.resize(t.sample + 1);
        return sequences_[t.sample];
    }
    worker& of(stage s, std::int32_t number) {
        auto& all = workers_[static_cast<std::size_t>(s)];
        require(number >= 0, "a worker has a number");
        if (static_cast<std::size_t>(number) >= all.size()) all.resize(static_cast<std::size_t>(number) + 1);
        return all[static_cast<std::size_t>(number)];
    }
    bool runs(const ticket& t) { return of(t).where == rollout && of(t).t == t; }

    void gone(stage s, std::int32_t number) {
        worker& w = of(s, number);
        if (!w.up) return;
        w = {.life = w.life};
        if (s == stage::rollout) {
            for (sequence& q : sequences_)
                if (q.where == rollout && q.t.worker == number) q.where = waiting;
        } else if (s == stage::teacher) {
            std::erase_if(jobs_, [&](const auto& j) {
                if (j.second.worker != number) return false;
                for (const ticket& t : j.second.tickets)
                    if (of(t).where == scoring && of(t).job == j.first) of(t).where = rolled;
                return true;
            });
        } else if (!learned_) {
            training_job_.reset(); // the same again
        }
    }
    /// What is said in a life that is over is not heard; a new life ends the one before.
    bool heard(const sched::event& e) {
        worker& w = of(e.stage, e.worker);
        if (w.up && e.incarnation == w.life) return true;
        if (e.incarnation <= w.life) return false;
        gone(e.stage, e.worker);
        if (e.what == sched::event::kind::worker_up) return true;
        w.life = e.incarnation - (e.what != sched::event::kind::worker_down);
        return false;
    }

    template <class Scheduler>
    void hear(const sched::event& e, const Scheduler& s) {
        using kind = sched::event::kind;
        if (e.from_worker() && !heard(e)) return;
        switch (e.what) {
        case kind::worker_up: {
            worker& w = of(e.stage, e.worker);
            if (!w.up) w = {};
            w.up = true;
            w.life = e.incarnation;
            w.slots = e.slots;
            break;
        }
        case kind::worker_down:
            gone(e.stage, e.worker);
            break;
        case kind::rolled_out:
        case kind::rollout_failed:
        case kind::aborted:
        case kind::parked: {
            worker& w = of(stage::rollout, e.ticket.worker);
            const auto lane = w.lanes.find(e.ticket.lane);
            const bool mine = lane != w.lanes.end() && lane->second == e.ticket;
            if (runs(e.ticket)) {
                require(mine, "a running sequence has a lane");
                sequence& q = of(e.ticket);
                q.where = e.what == kind::rolled_out ? rolled : waiting;
                const bool had = q.kept;
                if (e.what == kind::parked) q.kept = e.versions.tokens > 0;
                if (e.what == kind::rolled_out || (e.what == kind::parked && q.kept)) {
                    require(!had || e.versions.tokens >= q.versions.tokens, "tokens were lost");
                    q.versions = e.versions;
                    require(q.versions.oldest >= q.start && q.versions.newest >= q.versions.oldest &&
                                q.versions.newest <= version_ + (syncing_ || remaking_),
                            "versions along a sequence");
                }
            }
            if (mine) w.lanes.erase(lane);
            break;
        }
        case kind::scored:
        case kind::score_failed: {
            const auto at = jobs_.find(e.job);
            if (at == jobs_.end() || at->second.worker != e.worker) break;
            for (const ticket& t : at->second.tickets) {
                if (of(t).where != scoring || of(t).job != e.job) continue; // stale, and gone meanwhile
                const bool named =
                    e.tickets.empty() || std::find(e.tickets.begin(), e.tickets.end(), t) != e.tickets.end();
                of(t).where = e.what == kind::scored && named ? ready : rolled;
            }
            --of(stage::teacher, e.worker).jobs;
            jobs_.erase(at);
            break;
        }
        case kind::learned:
            if (training_job_ == e.job && !learned_) {
                learned_ = true;
                made_.insert(e.job);
                if (!remaking_) cursor_at_gate_ = s.cursor();
            }
            break;
        case kind::learn_failed:
            if (training_job_ == e.job && !learned_) training_job_.reset();
            break;
        case kind::synced: {
            worker& w = of(stage::rollout, e.worker);
            require(made_.contains(e.job), "weights that nobody made");
            w.answers = w.answers || e.job == (syncing_ ? *training_job_ : weights_); // else nobody waits for it yet
            w.has = std::max(w.has, e.job);
            break;
        }
        case kind::weights_lost:
            if (!learned_ || training_job_ != e.job) break;
            remaking_ = true;
            learned_ = syncing_ = false;
            training_job_.reset();
            break;
        case kind::tick:
            break;
        case kind::pause:
            paused_ = true;
            break;
        case kind::resume:
            paused_ = false;
            break;
        case kind::park:
            break;
        case kind::resize:
            permits_ = e.count;
            most_permits_ = std::max(most_permits_, permits_);
            break;
        case kind::close:
            closed_ = true;
            break;
        case kind::stop:
            stop();
            break;
        }
    }
    void stop() {
        closed_ = stopped_ = true;
        if (learned_) return; // the update was made: its step is
        remaking_ = false;
        training_.clear();
        training_job_.reset();
    }

    void see(const action& a, const actions& out) {
        mix(static_cast<std::uint64_t>(a.what));
        mix(a.ticket);
        mix(static_cast<std::uint64_t>(a.version));
        mix(a.job);
        mix(static_cast<std::uint64_t>(a.worker));
        require(!finished_ || a.what == action::kind::sync || a.what == action::kind::lost, "work after the end");
        mix(a.from);
        switch (a.what) {
        case action::kind::start: {
            sequence& q = of(a.ticket);
            worker& w = of(stage::rollout, a.ticket.worker);
            require(q.where == unseen || q.where == waiting, "started what was not waiting");
            require(a.ticket.attempt > (q.where == unseen ? 0 : q.t.attempt), "attempts count up");
            require(a.version == version_, "started on another version than the present one");
            require(!paused_, "started while paused");
            require(gate_open() || (!plan_.streaming && !syncing_ && a.ticket.sample < cursor_at_gate_),
                    "started between the end of an update and the end of its synchronisation");
            require(w.up && w.answers && w.has == weights_, "started on a worker without the present weights");
            require(a.ticket.incarnation == w.life, "started in another life");
            require(a.ticket.lane >= 0 && a.ticket.lane < w.slots && !w.lanes.contains(a.ticket.lane),
                    "started on a lane that is taken");
            w.lanes[a.ticket.lane] = a.ticket;
            q.where = rollout;
            if (!q.kept) q.start = version_;
            q.t = a.ticket;
            break;
        }
        case action::kind::abort:
            if (runs(a.ticket)) of(a.ticket).where = waiting;
            break;
        case action::kind::park:
            require(runs(a.ticket), "asked to park what does not run");
            break;
        case action::kind::score: {
            worker& w = of(stage::teacher, a.worker);
            require(w.up && w.jobs < w.slots, "a scoring call on a teacher that has no room");
            ++w.jobs;
            require(a.count > 0 && static_cast<index_t>(a.count) <= settings_.teacher_batch, "size of a scoring call");
            job& j = jobs_[a.job];
            require(j.tickets.empty(), "a job's number is used twice");
            j.worker = a.worker;
            for (const ticket& t : out.of(a)) {
                mix(t);
                require(of(t).where == rolled && of(t).t.sample == t.sample, "scored what was not rolled out");
                of(t).where = scoring;
                of(t).job = a.job;
                j.tickets.push_back(t);
            }
            break;
        }
        case action::kind::train: {
            require(!training_job_ && (gate_open() || remaking_), "two updates at a time");
            require(of(stage::learner, 0).up, "an update without a learner");
            require(a.version == version_ && a.from == weights_, "an update of other weights");
            training_job_ = a.job;
            const auto tickets = out.of(a);
            if (remaking_ || !training_.empty()) {
                require(std::equal(tickets.begin(), tickets.end(), training_.begin(), training_.end(),
                                   [](const ticket& x, const ticket& y) { return x.sample == y.sample; }),
                        "another batch than the one that was asked for before");
                break;
            }
            training_.assign(tickets.begin(), tickets.end());
            for (std::size_t i = 0; i < training_.size(); ++i) {
                mix(training_[i]);
                require(i == 0 || training_[i - 1].sample < training_[i].sample, "a batch is not sorted");
                require(of(training_[i]).where == ready, "trained on what is not ready");
                of(training_[i]).where = training;
            }
            check_size();
            break;
        }
        case action::kind::sync: {
            require(a.worker < 0 || of(stage::rollout, a.worker).up, "weights for a worker that is gone");
            require(made_.contains(a.job), "weights that nobody made");
            if (a.worker < 0) {
                require(learned_ && a.version == version_ + 1 && a.job == training_job_,
                        "weights that are not there yet");
                syncing_ = true;
                if (plan_.streaming && plan_.update != weight_update::keep)
                    for (sequence& q : sequences_) q.kept = q.kept && q.where != waiting;
            } else if (syncing_) {
                require(a.version == version_ + 1 && a.job == training_job_, "other weights than are being installed");
            } else {
                require(a.version == version_ && a.job == weights_, "other weights than those of the version");
            }
            break;
        }
        case action::kind::step:
            step(a, out);
            break;
        case action::kind::fail: {
            sequence& q = of(a.ticket);
            require(q.where != consumed_place && q.where != failed_place, "failed what was over");
            require(a.why != failure::stopped || stopped_, "a reason that is none");
            require(a.why != failure::stale ||
                        (plan_.policy == staleness_policy::drop && plan_.streaming && q.start < version_ - plan_.depth),
                    "dropped what was not stale");
            if (q.where == training) // with its update
                std::erase_if(training_, [&](const ticket& t) { return t.sample == a.ticket.sample; });
            q.where = failed_place;
            ++failed_;
            break;
        }
        case action::kind::lost:
            require(of(a.stage, a.worker).up, "lost a worker that was gone");
            require(of(a.stage, a.worker).life == a.incarnation, "lost another life");
            gone(a.stage, a.worker);
            break;
        case action::kind::finished:
            end();
            break;
        }
    }

    // Full, unless it is the last; whole batches are exactly those that were admitted together and did not fail.
    void check_size() const {
        if (plan_.streaming) {
            if (static_cast<index_t>(training_.size()) == plan_.batch) return;
            require(!training_.empty() && static_cast<index_t>(training_.size()) < plan_.batch, "size of a batch");
            for (const sequence& q : sequences_)
                require(q.where == unseen || q.where >= training, "a short batch, and it was not the last");
            return;
        }
        require(static_cast<std::size_t>(version_) < whole_.size(), "a batch that was never admitted");
        const auto [first, last] = whole_[static_cast<std::size_t>(version_)];
        std::size_t i = 0;
        for (sample_t n = first; n < last && n < sequences_.size(); ++n) {
            const place where = sequences_[n].where;
            if (where == failed_place || where == unseen) continue;
            require(i < training_.size() && training_[i].sample == n, "a batch is not whole");
            ++i;
        }
        require(i == training_.size(), "a batch of strangers");
    }

    // What may be outstanding. AReaL's rule counts updates, so that after a short batch it is more than (tau + 1)·B.
    index_t cap() const {
        if (!plan_.streaming || plan_.policy != staleness_policy::areal) return permits_;
        return (plan_.depth + version_ + 1) * plan_.batch - consumed_;
    }
    // Who could work and may, does.
    template <class Scheduler>
    void nobody_idles(const Scheduler& s) const {
        const census c = s.where();
        const bool lane = std::any_of(workers_[0].begin(), workers_[0].end(), [&](const worker& w) {
            const auto taken =
                std::count_if(w.lanes.begin(), w.lanes.end(), [&](const auto& l) { return l.first < w.slots; });
            return w.up && w.answers && w.has == weights_ && taken < w.slots;
        });
        if (lane && !paused_) {
            require(c.waiting == 0, "a sequence waits while a lane is vacant");
            index_t wanted = std::numeric_limits<index_t>::max();
            if (settings_.sequences > 0) wanted = settings_.sequences - consumed_ - c.outstanding();
            if (settings_.available > 0)
                wanted = std::min(wanted, settings_.available - static_cast<index_t>(s.cursor()));
            if (plan_.streaming && plan_.policy != staleness_policy::areal && !closed_ && wanted > 0)
                require(permits_ - c.outstanding() < settings_.group,
                        "a lane is vacant, permits are free, nothing starts");
        }
        const bool teacher = std::any_of(workers_[1].begin(), workers_[1].end(),
                                         [](const worker& w) { return w.up && w.jobs < w.slots; });
        if (plan_.streaming && teacher)
            require(c.queued < settings_.teacher_batch - room_believed_more,
                    "a full call waits while a teacher is idle");
        const bool learner = !workers_[2].empty() && workers_[2][0].up && !training_job_;
        const bool any_batch = plan_.policy == staleness_policy::capacity || plan_.policy == staleness_policy::areal ||
                               plan_.policy == staleness_policy::drop || plan_.policy == staleness_policy::retry;
        if (plan_.streaming && learner && any_batch)
            require(c.ready < plan_.batch, "a batch waits while the learner is idle");
    }
    void step(const action& a, const actions& out) {
        require(a.version == version_ + 1, "versions count up by one");
        require(learned_ && (syncing_ || stopped_), "a step without an update");
        require(a.job == training_job_, "a step of another update");
        for (const worker& w : workers_[0])
            require(stopped_ || !w.answers || w.has == a.job, "the gate opened before everybody had the weights");
        const auto list = out.consumed_by(a);
        require(list.size() == training_.size(), "consumed is not what was trained on");
        cap_sum_ += plan_.policy == staleness_policy::areal ? cap()
                    : plan_.automatic                       ? admitted_ - consumed_ - failed_ // what is out
                                                            : most_permits_;
        version_t least = std::numeric_limits<version_t>::max();
        for (std::size_t i = 0; i < list.size(); ++i) {
            mix(list[i].ticket);
            sequence& q = of(list[i].ticket);
            require(list[i].ticket.sample == training_[i].sample && q.where == training, "consumed a stranger");
            require(list[i].start == q.start && list[i].versions == q.versions, "versions of a consumed sequence");
            q.where = consumed_place;
            const version_t lag = version_ - q.start;
            require(lag >= 0, "consumed before its start");
            least = std::min(least, lag);
            largest_lag_ = std::max(largest_lag_, lag);
            lag_sum_ += lag;
            ++consumed_;
        }
        ++version_;
        if (const auto most = promised_lag(plan_, most_permits_))
            require(largest_lag_ <= *most - lag_believed_less, "a sequence was staler than its policy allows");
        else // every sequence is outstanding at lag + 1 steps, and at most so many are at each
            require(lag_sum_ + consumed_ <= cap_sum_ - lag_believed_less * version_, "the mean lag exceeds M/B - 1");
        // exactly, but for batches at the end that make up for failed sequences
        if (!plan_.streaming && !list.empty() &&
            whole_[static_cast<std::size_t>(version_ - 1)].second <= static_cast<sample_t>(settings_.sequences))
            require(least == std::min<version_t>(version_ - 1, plan_.depth),
                    "the lag of whole batches is not min(b, k)");
        batches_.emplace_back();
        for (const ticket& t : training_) batches_.back().push_back(t.sample);
        training_.clear();
        training_job_.reset();
        weights_ = a.job;
        learned_ = syncing_ = remaking_ = false;
        was_open_ = true;
        if (plan_.policy == staleness_policy::retry && plan_.streaming)
            for (sequence& q : sequences_) {
                if (q.start < version_ - plan_.depth) q.kept = false;
                if (started(q) && q.start < version_ - plan_.depth && q.where != rollout)
                    q.where = waiting; // rollout: by abort
            }
    }

    void end() {
        finished_ = true;
        for (const sequence& q : sequences_)
            require(q.where >= consumed_place || q.where == unseen, "finished with sequences outstanding");
        require(stopped_ || closed_ ||
                    (consumed_ >= settings_.sequences && consumed_ < settings_.sequences + settings_.group) ||
                    consumed_ + failed_ == settings_.available,
                "finished too early");
    }

    // What the scheduler says of itself.
    template <class Scheduler>
    void compare(const Scheduler& s) {
        require(s.version() == version_ && s.gate_open() == gate_open(), "version and gate");
        require(s.totals().consumed == consumed_ && s.totals().failed == failed_, "consumed and failed");
        require(s.finished() == finished_, "finished");
        std::int64_t outstanding = 0, here = 0;
        s.for_each([&](const outstanding_sequence& o) {
            using at = outstanding_sequence::place;
            ++outstanding;
            const place where = o.ticket.sample < sequences_.size() ? sequences_[o.ticket.sample].where : unseen;
            here += where != unseen;
            const place expected = o.where == at::rollout    ? rollout
                                   : o.where == at::queued   ? rolled
                                   : o.where == at::scoring  ? scoring
                                   : o.where == at::ready    ? ready
                                   : o.where == at::training ? training
                                                             : waiting;
            require(where == expected || (where == unseen && expected == waiting), "a sequence is somewhere else");
        });
        require(s.totals().admitted == outstanding + consumed_ + failed_, "a sequence was lost");
        std::int64_t seen = 0;
        for (const sequence& q : sequences_) seen += q.where >= waiting && q.where <= training;
        require(seen == here, "a sequence that was started has no permit");
        if (finished_) {
            require(static_cast<sample_t>(consumed_ + failed_) == s.cursor(), "every sequence has one end");
            for (const sequence& q : sequences_) require(q.where >= consumed_place, "every sequence has an end");
        }
    }

    sched::settings settings_;
    plan plan_;
    index_t permits_, most_permits_;
    double now_ = 0;
    std::uint64_t hash_ = 0;
    version_t version_ = 0, largest_lag_ = 0;
    std::int64_t lag_sum_ = 0, cap_sum_ = 0, consumed_ = 0, failed_ = 0, admitted_ = 0;
    sample_t cursor_at_gate_ = 0;
    std::set<std::uint64_t> made_ = {0}; // weights that were published, by their job
    std::uint64_t weights_ = 0;          // of the version
    bool remaking_ = false;              // weights were lost before all had them
    bool learned_ = false, syncing_ = false, paused_ = false, closed_ = false, stopped_ = false, finished_ = false;
    bool was_open_ = true; // the gate, at some time during the event
    std::vector<sequence> sequences_;
    std::array<std::vector<worker>, stage_count> workers_;
    std::map<std::uint64_t, job> jobs_;
    std::optional<std::uint64_t> training_job_;
    std::vector<ticket> training_;
    std::vector<std::vector<sample_t>> batches_;
    std::vector<std::pair<sample_t, sample_t>> whole_; // admissions: first, last + 1
};

template <class Observer, class Scheduler = scheduler>
virtual_driver<faulty_cluster, Observer, Scheduler> driver_of(const world& w, Observer* o) {
    virtual_driver<faulty_cluster, Observer, Scheduler> d(w.settings, w.cluster, o);
    d.bring_up(stage::rollout, w.rollout_workers, w.lanes);
    d.bring_up(stage::teacher, w.teachers, w.teacher_slots);
    d.bring_up(stage::learner, 1);
    for (const outside_event& e : w.outside) d.at(e.time, e.what);
    return d;
}

/// Lets it run to its end.
template <class Driver>
void run_to_end(Driver& d, std::uint64_t most_events = 200000) {
    if (d.run(most_events)) return;
    throw violation(d.next() == forever ? "deadlock" : "livelock");
}

/// The message of what went wrong; empty: nothing.
template <class F>
std::string outcome(F&& f) {
    try {
        f();
        return {};
    } catch (const std::exception& e) {
        return e.what();
    }
}

/// What a sanitized build takes a share of, since there each world costs seven times as much: the plain build runs all.
inline constexpr std::uint64_t worlds_share = OPD_TEST_SANITIZED ? 4 : 1;

/// A number in the environment.
inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

} // namespace opd::test
