// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A remote_driver and remote_workers as processes over a transport that loses, doubles, delays, reorders, damages and
// replays frames. Processes die without a word, are stopped for a while, are cut off, or are replaced while they still
// live; the scheduler's dies and comes back from what it saved last. After a while nothing goes wrong any more, and the
// run must end. Half of the worlds set no deadline: whatever is lost, the sessions notice.
//
// What is checked, beside the scheduler's own invariants after every event: what a start goes on from is installed; a
// batch has a payload and a score for each attempt in it; nothing asks for a publication that the learner was told is
// of no use; along the line of weights that made the last ones, every sequence was learnt from exactly once, and none
// is missing; the lag that the policy promises; no worker is refused.
//
// fake_worker is a worker loop with stages whose times follow from the seed. direct_world has the same workers in the
// scheduler's process, over a dispatcher and nothing else.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "opd/sched/meters/token_ledger.hpp"
#include "opd/sched/remote_driver.hpp"
#include "opd/sched/remote_worker.hpp"
#include "support/world.hpp"

namespace opd::test {

struct remote_drawn {
    sample_t sample = 0;
    std::uint32_t attempt = 0;
    token_versions versions = {};
    template <class A>
    void fields(A& a) {
        a(sample, attempt, versions);
    }
};
struct remote_score {
    sample_t sample = 0;
    template <class A>
    void fields(A& a) {
        a(sample);
    }
};
using remote_command = worker_command<remote_drawn, remote_score>;
using remote_reply = worker_reply<remote_drawn, remote_score>;
using remote_snapshot = run_snapshot<remote_drawn, remote_score>;

/// What learners have published, which outlives them.
struct publications {
    struct entry {
        std::uint64_t from = 0;
        std::vector<sample_t> samples;
        bool gone = false; ///< the learner was told that nobody needs it
    };
    std::map<std::uint64_t, entry> made;

    static void require(bool holds, const char* what) {
        if (!holds) throw violation(what);
    }
    /// Whether they can be had. Who asks in a life that is over may come too late.
    bool there(std::uint64_t job, bool lives) const {
        if (job == 0) return true;
        require(made.contains(job), "weights that nobody published");
        require(!lives || !made.at(job).gone, "weights are wanted that the learner was told nobody needs");
        return !made.at(job).gone;
    }
    void forget_below(std::uint64_t job) {
        for (auto& [name, p] : made) p.gone = p.gone || name < job;
    }
    /// Along the line of the last weights each was learnt from once, and all of them.
    void check_line(std::uint64_t job, const std::set<sample_t>& consumed) const {
        std::multiset<sample_t> learnt;
        for (; job != 0; job = made.at(job).from)
            for (const sample_t n : made.at(job).samples) learnt.insert(n);
        require(std::set<sample_t>(learnt.begin(), learnt.end()).size() == learnt.size(), "learnt from twice");
        require(learnt == std::multiset<sample_t>(consumed.begin(), consumed.end()), "consumed is not what was learnt");
    }
};

/// One worker with its stage. Times and faults follow from the seed and from what it is asked.
class fake_worker {
public:
    fake_worker(std::uint64_t seed, sched::stage s, std::int32_t number, bool fails, bool hangs, publications& p)
        : seed_(seed), stage_(s), number_(number), fails_(fails), hangs_(hangs), published_(&p) {}

    /// Whether a life is the one that the scheduler has.
    std::function<bool(sched::stage, std::int32_t, incarnation_t)> lives = [](auto...) { return true; };

    void obey(const remote_command& c, double now, std::vector<remote_reply>& out) {
        using kind = remote_command::kind;
        if (c.what == kind::begin) {
            life_ = c.life;
            remote_reply up{.what = event::up(stage_, number_, c.slots).of_life(life_)};
            for (const auto& [l, r] : lanes_) up.drawn.emplace_back(r.what, r.had + static_cast<std::int64_t>(l % 3));
            lanes_.clear(), due_.clear();
            installed_ = false;
            out.push_back(std::move(up));
            return;
        }
        if (c.life != life_ || c.what == kind::halt) return;
        const auto lane = lanes_.find(c.ticket.lane);
        const bool runs = lane != lanes_.end() && lane->second.what == c.ticket;
        switch (c.what) {
        case kind::install:
            if (installed_ && c.weights.job < has_.job) break;
            if (!there(c.weights.job)) break;
            installed_ = true, has_ = c.weights;
            out.push_back({.what = event::synced(number_, has_.job).of_life(life_)});
            break;
        case kind::start:
            publications::require(installed_, "started on a worker that has no weights");
            publications::require(lane == lanes_.end(), "two attempts on one lane");
            lanes_[c.ticket.lane] = {c.ticket, c.prefix ? c.prefix->versions.oldest : has_.version,
                                     c.prefix ? c.prefix->versions.tokens : 0};
            finish(now, 5, c.ticket.sample, c.ticket.attempt, c);
            break;
        case kind::abort:
            if (!runs) break;
            out.push_back({.what = event::aborted(c.ticket), .drawn = {{c.ticket, lane->second.had + 1}}});
            lanes_.erase(lane);
            break;
        case kind::park:
            if (runs) tell(event::parked(c.ticket, {}), 2, out);
            break;
        case kind::score:
            finish(now, 2, c.job, 0, c);
            break;
        default:
            if (!there(c.call.from.job)) break;
            finish(now, 2, c.call.job, 0, c);
        }
    }
    double next() const { return due_.empty() ? forever : due_.begin()->first; }
    void work(double now, std::vector<remote_reply>& out) {
        while (next() <= now) {
            const remote_command c = due_.begin()->second;
            due_.erase(due_.begin());
            using kind = remote_command::kind;
            if (c.what == kind::start) {
                const auto lane = lanes_.find(c.ticket.lane);
                if (lane == lanes_.end() || lane->second.what != c.ticket) continue;
                const double luck = draw(1, c.ticket.sample, c.ticket.attempt);
                if (fails_ && luck < 0.03) {
                    lanes_.erase(lane);
                    out.push_back({.what = event::rollout_failed(c.ticket)});
                } else {
                    tell(fails_ && luck < 0.1 ? event::parked(c.ticket, {}) : event::rolled_out(c.ticket, {}), 5, out);
                }
            } else if (c.what == kind::score) {
                if (fails_ && draw(1, c.job, 0) < 0.03) {
                    out.push_back({.what = event::score_failed(c.job, number_).of_life(life_)});
                    continue;
                }
                remote_reply r{.what = event::scored(c.job, number_).of_life(life_)};
                for (std::size_t i = 0; i < c.tickets.size(); ++i) {
                    publications::require(c.sequences[i] && c.sequences[i]->sample == c.tickets[i].sample,
                                          "a call with a sequence that is not there");
                    if (fails_ && draw(3, c.tickets[i].sample, c.tickets[i].attempt) < 0.05) {
                        r.lost.push_back(c.tickets[i]);
                        continue;
                    }
                    r.tickets.push_back(c.tickets[i]);
                    r.scores.push_back(std::make_shared<const remote_score>(remote_score{c.tickets[i].sample}));
                }
                if (r.tickets.empty()) r.what.what = event::kind::score_failed;
                out.push_back(std::move(r));
            } else {
                remote_reply without{.what = event::learn_failed(c.call.job).of_life(life_)};
                for (const auto& v : c.batch)
                    if (fails_ && draw(4, v.ticket.sample, v.ticket.attempt) < 0.02) without.lost.push_back(v.ticket);
                if (!without.lost.empty()) {
                    out.push_back(std::move(without));
                    continue;
                }
                publications::entry& p = published_->made[c.call.job];
                p = {.from = c.call.from.job, .samples = {}, .gone = false};
                for (const auto& v : c.batch) {
                    publications::require(v.rolled && v.rolled->sample == v.ticket.sample &&
                                              v.rolled->attempt == v.ticket.attempt,
                                          "a batch with an attempt that is not there");
                    publications::require(v.scored && v.scored->sample == v.ticket.sample,
                                          "a batch with a sequence that has no score");
                    p.samples.push_back(v.ticket.sample);
                }
                out.push_back({.what = event::learned(c.call.job).of_life(life_)});
            }
        }
    }

private:
    struct running {
        ticket what;
        version_t oldest = 0;
        std::int64_t had = 0; // tokens
    };
    bool there(std::uint64_t job) const { return published_->there(job, lives(stage_, number_, life_)); }
    double draw(int what, std::uint64_t a, std::uint32_t b) const {
        return keyed_uniform(seed_, static_cast<draw_of>(5000 + 10 * static_cast<int>(stage_) + what), a, b);
    }
    void finish(double now, double most, std::uint64_t a, std::uint32_t b, const remote_command& c) {
        if (hangs_ && draw(2, a, b) < 0.01) return;
        due_.emplace(now + most * draw(0, a, b), c);
    }
    void tell(event e, std::int64_t more, std::vector<remote_reply>& out) {
        const auto lane = lanes_.find(e.ticket.lane);
        const running r = lane->second;
        lanes_.erase(lane);
        e.versions = {r.oldest, has_.version, 0.5 * double(r.oldest + has_.version), r.had + more};
        out.push_back({.what = e,
                       .sequence = std::make_shared<const remote_drawn>(
                           remote_drawn{r.what.sample, r.what.attempt, e.versions})});
    }

    std::uint64_t seed_;
    sched::stage stage_;
    std::int32_t number_;
    bool fails_, hangs_;
    publications* published_;
    incarnation_t life_ = 0;
    bool installed_ = false;
    weights has_ = {};
    std::map<std::int32_t, running> lanes_;
    std::multimap<double, remote_command> due_;
};

struct remote_faults {
    double drop = 0, twice = 0, damage = 0, replay = 0, death = 0, zombie = 0, stop = 0, cut = 0, scheduler_death = 0;
    double delay = 0;      ///< mean seconds
    double long_delay = 0; ///< share of frames that take fifty times as long
    double until = 0;      ///< seconds; then nothing goes wrong any more
    bool fails = false;    ///< stages, too
};
inline remote_faults remote_faults_of(std::uint64_t seed) {
    dice d{seed ^ 0x72656d6f};
    remote_faults f;
    f.until = 120;
    const double much = d.one({0.01, 0.05, 0.2});
    for (double* x : {&f.drop, &f.twice, &f.damage, &f.replay, &f.long_delay})
        if (d(0.6)) *x = much * d();
    for (double* x : {&f.death, &f.zombie, &f.stop, &f.cut})
        if (d(0.5)) *x = 0.03 * d();
    if (d(0.5)) f.scheduler_death = 0.05 * d();
    f.delay = d.one({0.0, 0.01, 0.2});
    f.fails = d(0.5);
    return f;
}

/// What a world's settings are: those of channel_world, with deadlines in every other one.
inline settings remote_settings_of(std::uint64_t seed) {
    settings s = world_of(seed, {.schedule = {}, .faults = false, .large = false}).settings;
    s.available = 0;
    s.sequences = std::min<index_t>(s.sequences, s.group * std::max<index_t>(1, 40 / s.group));
    s.rollout_attempts = s.teacher_attempts = s.learner_attempts = s.payload_attempts = 50;
    s.fruitless_steps = 0;
    s.most_workers = 64, s.most_slots = 64;
    s.rollout_deadline = s.abort_deadline = s.teacher_deadline = s.learner_deadline = s.sync_deadline = 0;
    if (seed % 2 == 0) {
        s.rollout_deadline = 40, s.abort_deadline = 20, s.teacher_deadline = 25, s.learner_deadline = 25;
        s.sync_deadline = 25;
    }
    return s;
}
struct remote_staff {
    struct member {
        sched::stage stage;
        std::int32_t number, slots;
    };
    std::vector<member> all;
    explicit remote_staff(std::uint64_t seed) {
        const world w = world_of(seed, {.schedule = {}, .faults = false, .large = false});
        for (std::int32_t i = 0; i < w.rollout_workers; ++i) all.push_back({stage::rollout, i, w.lanes});
        for (std::int32_t i = 0; i < w.teachers; ++i) all.push_back({stage::teacher, i, w.teacher_slots});
        all.push_back({stage::learner, 0, 1});
    }
};

/// An event and what it led to, in bytes.
inline std::string line_of(const event& e, double now, const actions& a) {
    archive_writer out;
    out(now, e, std::vector<ticket>(e.tickets.begin(), e.tickets.end()), a.items, a.tickets);
    return out.bytes;
}
/// What every run of a scheduler must keep.
struct consumption {
    std::set<sample_t> consumed;
    void step(const action& a, std::span<const consumed_sequence> all, const plan& p) {
        for (const consumed_sequence& c : all) {
            publications::require(consumed.insert(c.ticket.sample).second, "consumed twice");
            const auto most = promised_lag(p, p.permits);
            publications::require(!most || a.version - 1 - c.start <= *most,
                                  "a sequence was staler than its policy allows");
        }
    }
};

class remote_world {
public:
    remote_world(std::uint64_t seed, const remote_faults& faults)
        : seed_(seed), dice_{seed ^ 0x77697265}, faults_(faults), settings_(remote_settings_of(seed)), staff_(seed) {
        options_.beat = 2, options_.silence = 10, options_.resend = 1;
        options_.frame = static_cast<std::uint32_t>(dice_.one({256.0, 1000.0, 100000.0})); // parts, and frames of many
        options_.window = static_cast<std::uint32_t>(dice_.one({1.0, 4.0, 64.0}));
        options_.save_every = static_cast<std::int32_t>(dice_.of(1, 3));
        if (faults.until == 0) options_.frame = 100000, options_.window = 64; // what is said at once arrives at once
        transport_.send_to = [this](const std::string& peer, std::string f) { carry(false, peer, std::move(f)); };
        hooks_.world = this;
        driver_ = std::make_unique<driver>(settings_, options_, epoch_, transport_, hooks_);
        for (const auto& m : staff_.all) start(m);
        for (const auto& p : processes_) p->machine->tick(0); // all ask before one is answered
        next_mishap_ = dice_.in(1, 20);
    }
    /// Throws `violation`.
    void run(std::uint64_t most = 400000) {
        while (!driver_ || !driver_->done(now_)) {
            if (most-- == 0) throw violation("livelock");
            step();
        }
        const counters& c = driver_->scheduler().totals();
        publications::require(c.consumed + c.failed == c.admitted, "a sequence is lost");
        publications::require(c.failed_by[static_cast<std::size_t>(failure::rollout)] == 0 &&
                                  c.failed_by[static_cast<std::size_t>(failure::teacher)] == 0 &&
                                  c.failed_by[static_cast<std::size_t>(failure::learner)] == 0,
                              "a sequence was given up, and none had failed so often");
        published_.check_line(driver_->scheduler().weights().job, kept_.consumed);
        take_counts();
        publications::require(totals_.refused == 0 && totals_.unfit == 0 && totals_.clogged == 0,
                              "a worker was refused that said nothing wrong");
        std::set<std::pair<sched::stage, std::int32_t>> over;
        for (const auto& p : processes_)
            if (p->machine->over()) over.insert({p->stage, p->number});
        for (const auto& m : staff_.all)
            publications::require(over.contains({m.stage, m.number}) ||
                                      (faults_.until > 0 && now_ < faults_.until + 60),
                                  "a worker does not know that the run is over");
    }
    const std::vector<std::string>& log() const { return log_; }
    const remote_counts& totals() const { return totals_; }
    token_totals tokens() const { return hooks_.tokens(); }
    std::int64_t told() const { return hooks_.told; } ///< tokens of attempts that were let go of
    const counters& scheduler_totals() const { return driver_->scheduler().totals(); }
    std::uint64_t crashes() const { return epoch_ - 1; }
    std::uint64_t frames() const { return number_; }
    std::uint64_t deaths() const { return processes_.size(); }

private:
    struct to_workers {
        std::function<void(const std::string&, std::string)> send_to;
        void send(const std::string& peer, std::string f) { send_to(peer, std::move(f)); }
    };
    struct to_scheduler {
        std::function<void(std::string)> send_on;
        void send(std::string f) { send_on(std::move(f)); }
    };
    // An observer, too: of where tokens end, and of who is there and busy.
    struct run_hooks : token_ledger {
        remote_world* world = nullptr;
        token_totals before;                                              // of the scheduler's processes that died
        std::map<std::pair<sched::stage, std::int32_t>, bool> there = {}; // busy?
        std::int64_t told = 0; // tokens of attempts that were let go of, as workers say
        token_totals tokens() const { return before.then(totals()); }
        void drawn(const ticket& t, std::int64_t tokens, double time) {
            told += tokens;
            token_ledger::drawn(t, tokens, time);
        }
        void up(sched::stage s, std::int32_t w, double t) {
            publications::require(there.emplace(std::pair(s, w), false).second, "a worker is there twice");
            token_ledger::up(s, w, t);
        }
        void down(sched::stage s, std::int32_t w, double t) {
            publications::require(there.erase({s, w}) == 1, "a worker goes that is not there");
            token_ledger::down(s, w, t);
        }
        void begin(sched::stage s, std::int32_t w, double t, activity a) {
            publications::require(!std::exchange(there.at({s, w}), true), "a worker becomes busy twice");
            token_ledger::begin(s, w, t, a);
        }
        void end(sched::stage s, std::int32_t w, double t, activity a) {
            publications::require(std::exchange(there.at({s, w}), false), "a worker that is idle becomes so");
            token_ledger::end(s, w, t, a);
        }
        void took(const sched::event& e, double now, const actions& a) {
            const token_totals t = tokens();
            publications::require(t.brought + t.generated == t.learnt + t.discarded + t.lost + t.outstanding,
                                  "a token is in no figure, or in two");
            world->log_.push_back(line_of(e, now, a));
            if (world->driver_) world->driver_->scheduler().check_invariants();
        }
        void step(const action& a, std::span<const consumed_sequence> all, const auto&) {
            world->kept_.step(a, all, world->driver_->scheduler().resolved());
        }
        void save(const remote_snapshot& s) {
            archive_writer out;
            out(s);
            world->saved_ = std::move(out.bytes);
            world->saved_consumed_ = world->kept_.consumed;
            world->saved_tokens_ = tokens();
        }
    };
    using driver = remote_driver<remote_drawn, remote_score, to_workers, run_hooks>;
    using machine = remote_worker<remote_drawn, remote_score, to_scheduler>;
    struct process {
        process(std::string n, const remote_staff::member& m, fake_worker w)
            : name(std::move(n)), stage(m.stage), number(m.number), slots(m.slots), loop(std::move(w)) {}
        std::string name;
        sched::stage stage;
        std::int32_t number, slots;
        bool alive = true;
        double stopped_until = 0, cut_until = 0;
        to_scheduler wire = {};
        std::unique_ptr<remote_worker<remote_drawn, remote_score, to_scheduler>> machine = {};
        fake_worker loop;
    };
    struct frame {
        double time = 0;
        std::uint64_t number = 0;
        bool up = false; // to the scheduler
        std::string peer, bytes;
        bool operator<(const frame& o) const { return time != o.time ? time > o.time : number > o.number; }
    };
    bool calm() const { return now_ > faults_.until; }
    bool happens(double probability) { return probability > 0 && !calm() && dice_(probability); }

    void start(const remote_staff::member& m) {
        auto p = std::make_unique<process>(
            std::string(name_of(m.stage)) + std::to_string(m.number) + "." + std::to_string(processes_.size()), m,
            fake_worker(seed_, m.stage, m.number, faults_.fails, settings_.rollout_deadline > 0 && faults_.fails,
                        published_));
        process* self = p.get();
        p->wire.send_on = [this, self](std::string f) { carry(true, self->name, std::move(f)); };
        p->machine = std::make_unique<machine>(m.stage, m.number, m.slots, options_, p->wire);
        p->loop.lives = [this, self](sched::stage s, std::int32_t worker, incarnation_t life) {
            return driver_ && self->machine->epoch() == epoch_ && driver_->scheduler().is_up(s, worker) &&
                   driver_->scheduler().incarnation_of(s, worker) == life;
        };
        processes_.push_back(std::move(p));
    }
    process* named(const std::string& name) {
        for (const auto& p : processes_)
            if (p->name == name) return p.get();
        return nullptr;
    }

    void carry(bool up, const std::string& peer, std::string bytes) {
        const process* p = named(peer);
        if (p && p->cut_until > now_) return;
        const auto delay = [&] {
            if (faults_.delay == 0) return 0.0;
            const double t = -faults_.delay * std::log(1 - dice_());
            return happens(faults_.long_delay) ? 50 * t : t;
        };
        const auto put = [&](std::string b) { box_.push({now_ + delay(), number_++, up, peer, std::move(b)}); };
        if (happens(faults_.replay) && !heard_.empty()) {
            const frame& old = heard_[static_cast<std::size_t>(dice_.of(0, static_cast<index_t>(heard_.size()) - 1))];
            box_.push({now_ + delay(), number_++, old.up, old.peer, old.bytes});
        }
        if (faults_.replay > 0 && (heard_.size() < 300 || dice_(0.02))) {
            if (heard_.size() >= 300) heard_.erase(heard_.begin() + dice_.of(0, 299));
            heard_.push_back({0, 0, up, peer, bytes});
        }
        if (happens(faults_.twice)) put(bytes);
        if (happens(faults_.drop)) return;
        if (happens(faults_.damage)) {
            const auto at = static_cast<std::size_t>(dice_.of(0, static_cast<index_t>(bytes.size()) - 1));
            if (dice_(0.3))
                bytes.resize(at);
            else
                bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice_.of(0, 7));
        }
        put(std::move(bytes));
    }
    void step() {
        double t = box_.empty() ? forever : box_.top().time;
        process* next = nullptr;
        bool scheduler_next = false;
        if (driver_)
            if (const double d = driver_->next_deadline(); d <= t) t = d, scheduler_next = true;
        for (const auto& p : processes_) {
            if (!p->alive) continue;
            const double d = std::max(std::min(p->machine->next_deadline(), p->loop.next()), p->stopped_until);
            if (d < t) t = d, next = p.get(), scheduler_next = false;
        }
        if (!calm() && next_mishap_ <= t) {
            now_ = std::max(now_, next_mishap_);
            next_mishap_ = now_ + dice_.in(0.2, 4);
            return mishap();
        }
        if (!driver_ && back_ <= t) {
            now_ = std::max(now_, back_);
            return bring_back();
        }
        if (t == forever) throw violation("deadlock");
        now_ = std::max(now_, t);
        if (scheduler_next) return driver_->tick(now_);
        if (next) return turn(*next);
        const frame f = box_.top();
        box_.pop();
        if (f.up) {
            if (driver_) driver_->hear(f.peer, f.bytes, now_);
            return;
        }
        process* p = named(f.peer);
        if (!p || !p->alive) return;
        if (p->stopped_until > now_) {
            box_.push({p->stopped_until, number_++, false, f.peer, f.bytes});
            return;
        }
        p->machine->hear(f.bytes, now_);
        if (p->stage == stage::learner) published_.forget_below(p->machine->keep_from());
        turn(*p);
    }
    void turn(process& p) {
        std::vector<remote_reply> said;
        std::vector<remote_command> commands;
        p.machine->take(commands);
        for (const remote_command& c : commands) p.loop.obey(c, now_, said);
        p.loop.work(now_, said);
        for (const remote_reply& r : said) p.machine->say(r);
        if (p.machine->over())
            p.machine->leave(now_);
        else
            p.machine->tick(now_);
        if (p.machine->over()) p.loop.obey({.what = remote_command::kind::begin}, now_, said); // it forgets
    }

    void mishap() {
        const std::size_t count = processes_.size();
        for (std::size_t i = 0; i < count; ++i) {
            process& p = *processes_[i];
            if (!p.alive) continue;
            if (happens(faults_.stop)) p.stopped_until = now_ + dice_.in(0.5, 30);
            if (happens(faults_.cut)) p.cut_until = now_ + dice_.in(0.5, 30);
            const bool dies = happens(faults_.death), doubled = !dies && happens(faults_.zombie);
            if (!dies && !doubled) continue;
            p.alive = doubled;
            bool another = false;
            for (const auto& q : processes_)
                another = another || (q->alive && q->stage == p.stage && q->number == p.number);
            if (doubled || !another || dice_(0.5)) start({p.stage, p.number, p.slots});
        }
        if (driver_ && happens(faults_.scheduler_death)) {
            take_counts();
            hooks_.before = saved_tokens_;
            static_cast<token_ledger&>(hooks_) = {};
            hooks_.there.clear();
            driver_.reset();
            back_ = now_ + dice_.in(0.1, 20);
        }
    }
    void bring_back() {
        remote_snapshot s;
        archive_reader in(saved_);
        in(s);
        kept_.consumed = saved_consumed_;
        driver_ = std::make_unique<driver>(settings_, s, options_, ++epoch_, transport_, hooks_);
        driver_->scheduler().check_invariants();
    }
    void take_counts() {
        const remote_counts c = driver_->counts();
        totals_.sessions += c.sessions, totals_.silent += c.silent, totals_.overdue += c.overdue;
        totals_.replaced += c.replaced, totals_.broken += c.broken, totals_.stale += c.stale;
        totals_.repeated += c.repeated, totals_.late += c.late, totals_.refused += c.refused;
        totals_.unfit += c.unfit, totals_.clogged += c.clogged;
    }

    std::uint64_t seed_;
    dice dice_;
    remote_faults faults_;
    sched::settings settings_;
    remote_options options_;
    remote_staff staff_;
    double now_ = 0, next_mishap_ = 0, back_ = 0;
    std::uint64_t number_ = 0, epoch_ = 1;
    std::priority_queue<frame> box_;
    std::vector<frame> heard_; // some of what was sent
    publications published_;
    consumption kept_;
    std::string saved_;
    std::set<sample_t> saved_consumed_;
    token_totals saved_tokens_;
    std::vector<std::string> log_;
    remote_counts totals_;
    to_workers transport_;
    run_hooks hooks_;
    std::vector<std::unique_ptr<process>> processes_;
    std::unique_ptr<driver> driver_;
};

/// The same workers without a process or a frame between them and the scheduler.
class direct_world {
public:
    explicit direct_world(std::uint64_t seed, bool fails) : work_(scheduler(remote_settings_of(seed))) {
        const remote_staff staff(seed);
        for (const auto& m : staff.all)
            workers_.push_back({m.stage, m.number,
                                fake_worker(seed, m.stage, m.number, fails,
                                            work_.scheduler().options().rollout_deadline > 0 && fails, published_)});
        for (std::size_t i = 0; i < workers_.size(); ++i) {
            workers_[i].told.push_back({.what = remote_command::kind::begin, .life = 1, .slots = staff.all[i].slots});
            turn(workers_[i]);
        }
        hear_all();
    }
    void run(std::uint64_t most = 400000) {
        while (!work_.scheduler().finished()) {
            if (most-- == 0) throw violation("livelock");
            double t = work_.scheduler().next_deadline();
            one* next = nullptr;
            for (one& w : workers_)
                if (w.loop.next() < t) t = w.loop.next(), next = &w;
            now_ = std::max(now_, t);
            if (next)
                turn(*next);
            else
                work_.on(event::of(event::kind::tick), now_, *this);
            hear_all();
        }
    }
    const std::vector<std::string>& log() const { return log_; }

private:
    using belt = conveyor<remote_drawn, remote_score>;
    friend class dispatcher<belt, scheduler>;
    struct one {
        sched::stage stage;
        std::int32_t number;
        fake_worker loop;
        std::vector<remote_command> told = {};
    };
    // It does what it was told, and says something, or nothing.
    void turn(one& w) {
        std::vector<remote_reply> said;
        for (const remote_command& c : std::exchange(w.told, {})) w.loop.obey(c, now_, said);
        w.loop.work(now_, said);
        if (!said.empty()) said_.push_back(std::move(said));
    }
    // What they say is heard in the order in which it is said; then who was told something has his turn.
    void hear_all() {
        for (;;) {
            for (one& w : workers_)
                if (!w.told.empty()) turn(w);
            if (said_.empty()) return;
            const std::vector<remote_reply> now = std::move(said_.front());
            said_.pop_front();
            for (const remote_reply& r : now) work_.hear(remote_reply(r), now_, *this);
        }
    }
    void took(const event& e, double now, const actions& a) { log_.push_back(line_of(e, now, a)); }
    void carry_out(const action& a) {
        const auto to = [&](sched::stage s, std::int32_t number, remote_command c) {
            for (std::size_t i = 0; i < workers_.size(); ++i)
                if (workers_[i].stage == s && (number < 0 || workers_[i].number == number)) {
                    c.life = work_.scheduler().incarnation_of(s, workers_[i].number);
                    if (work_.scheduler().is_up(s, workers_[i].number)) workers_[i].told.push_back(c);
                }
        };
        switch (a.what) {
        case action::kind::train:
            return to(stage::learner, 0, work_.command(a));
        case action::kind::score:
            return to(stage::teacher, a.worker, work_.command(a));
        case action::kind::start:
        case action::kind::abort:
        case action::kind::park:
        case action::kind::sync:
            return to(stage::rollout, a.worker, work_.command(a));
        case action::kind::lost:
            throw violation("a world to compare with lost a worker");
        default:
            return;
        }
    }
    void carried_out() {}
    void refused(std::exception_ptr e) { std::rethrow_exception(e); }

    publications published_;
    dispatcher<belt, scheduler> work_;
    std::vector<one> workers_;
    std::deque<std::vector<remote_reply>> said_;
    std::vector<std::string> log_;
    double now_ = 0;
};

} // namespace opd::test
