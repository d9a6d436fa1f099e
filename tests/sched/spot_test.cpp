// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// Spot training: the coordinator, its workers and a channel between them that loses, doubles, delays and reorders,
// while workers and the coordinator die and come back. In thousands of worlds no worker trains when rollout was told
// that it does not, everybody is released within the bound, an epoch has one leader, an update is whole, and once the
// faults are over updates are committed again. Machines from which a cure is taken are caught.
//
// A failure names its world's seed; OPD_WORLD=<seed> runs that one alone, OPD_WORLDS=<n> runs n of them, both n from
// that seed on.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <doctest/doctest.h>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "opd/sched/spot_coordinator.hpp"
#include "opd/sched/spot_worker.hpp"
#include "support/dice.hpp"
#include "support/refusal.hpp"

namespace {

using namespace opd::sched;
using opd::test::dice;
using opd::test::number_from;
using opd::test::outcome;
using opd::test::refusal;
using opd::test::violation;
using kind = spot_notice::kind;
using part = spot_part;

struct spot_faults {
    double drop = 0, twice = 0, long_delay = 0, delay = 0.05, failure = 0;
    double death = 0, coordinator_death = 0,
           cut = 0; // a second; cut: a worker hears and is heard of nothing for a while
};

template <class T>
T copied(const T& from, T into) {
    archive_writer w;
    w(from);
    archive_reader r(w.bytes);
    r(into);
    if (!r.done()) throw violation("bytes are left of what was read");
    return into;
}

/// What all worlds together have met.
struct coverage {
    spot_counters totals;
    std::int64_t worker_deaths = 0, coordinator_deaths = 0, messages = 0, lost_publications = 0, clears = 0;
    std::int64_t slices = 0, expired = 0, discarded = 0, wants = 0, copies = 0;
    double used_bound = 0; // the longest wait over the bound
};

template <class Coordinator = spot_coordinator, class Worker = spot_worker>
class spot_world {
public:
    explicit spot_world(std::uint64_t seed)
        : dice_{seed ^ 0x73706f74}, options_(draw_options()), coordinator_(options_) {
        const double much = dice_.one({0.02, 0.1, 0.3});
        for (double* x : {&faults_.drop, &faults_.twice, &faults_.long_delay})
            if (dice_(0.6)) *x = much * dice_();
        for (double* x : {&faults_.death, &faults_.coordinator_death, &faults_.cut})
            if (dice_(0.5)) *x = 0.2 * dice_();
        if (dice_(0.3)) faults_.failure = 0.2 * dice_();
        faults_.delay = dice_.one({0.001, 0.05, 0.3});
        for (std::int32_t n = 0; n < options_.workers; ++n) {
            groups_.push_back(n < options_.threshold ? 0 : static_cast<std::int32_t>(dice_.of(0, 1)));
            processes_.push_back(make(n, 1));
        }
        save();
        begin_tail();
        at(dice_.in(0.5, 5), {.what = event::kind::mishap});
    }
    /// Throws `violation`.
    void run() {
        for (std::uint64_t most = 200000; !done_; --most) {
            if (most == 0) throw violation("livelock");
            step();
            check();
        }
    }
    coverage met;

private:
    struct event {
        enum class kind { report, order, end, idle, want, halt, train, mishap, bury, reborn } what;
        double time = 0;
        std::uint64_t number = 0;
        std::int32_t worker = -1;
        incarnation_t life = 0;
        std::uint64_t phase = 0, slice = 0;
        std::shared_ptr<const spot_report> said = {};
        std::shared_ptr<const spot_order> told = {};
        bool operator<(const event& o) const { return time != o.time ? time > o.time : number > o.number; }
    };
    struct process {
        Worker w;
        incarnation_t life = 1;
        double clock = 0; // by how much its clock is ahead
        double now = -forever;
        spot_task task = {};
        std::uint64_t slice = 0; // which runs
        int left = 0;            // slices of its part
        std::uint64_t part_epoch = 0, part_round = 0;
        double wanted_at = -1; // by rollout, which waits
        double cut_until = -1;
    };
    // where gradients and weights lie, for whoever lives to read them
    struct published {
        drafter_weights base;
        incarnation_t life = 0;
    };
    struct update {
        drafter_weights base;
        std::vector<std::int32_t> members;
    };
    static void require(bool holds, const char* what) {
        if (!holds) throw violation(what);
    }

    spot_options draw_options() {
        spot_options o;
        o.workers = static_cast<std::int32_t>(dice_.of(1, 5));
        o.threshold = static_cast<std::int32_t>(dice_.of(1, o.workers));
        if (dice_(0.3)) o.most_members = static_cast<std::int32_t>(dice_.of(1, o.workers));
        o.lease = dice_.in(2, 8);
        o.slice = dice_.in(0.05, 0.8);
        o.resend = dice_.in(0.25, 0.9);
        o.every = dice_.of(1, 3);
        o.most_updates = dice_.one({0, 0, 1, 3});
        return o;
    }
    process make(std::int32_t n, incarnation_t life) {
        process p{Worker(options_, n, life, groups_[static_cast<std::size_t>(n)])};
        p.life = life;
        p.clock = static_cast<double>(dice_.of(0, 1000));
        return p;
    }
    process& of(std::int32_t n) { return processes_[static_cast<std::size_t>(n)]; }
    bool calm() const { return now_ > until_; }
    bool happens(double probability) { return !calm() && dice_(probability); }
    // Clocks that run behind each other's roundings never go back.
    double clock() { return coordinator_now_ = std::max(coordinator_now_, now_ + clock_); }
    double clock(process& p) { return p.now = std::max(p.now, now_ + p.clock); }

    // --- the channel

    void at(double time, event e) {
        e.time = time, e.number = number_++;
        box_.push(std::move(e));
    }
    void send(const event& e) {
        const auto delay = [&] {
            const double t = -faults_.delay * std::log(1 - dice_());
            return happens(faults_.long_delay) ? 100 * t : t;
        };
        ++met.messages;
        const std::int32_t who = e.said ? e.said->worker : e.worker;
        if (of(who).cut_until > now_) return;
        if (!happens(faults_.drop)) at(now_ + delay(), e);
        if (happens(faults_.twice)) at(now_ + delay(), e);
    }

    // --- time

    void step() {
        double next = coordinator_.next_deadline() - clock_;
        std::int32_t who = -1;
        for (std::int32_t n = 0; n < options_.workers; ++n)
            if (const double due = of(n).w.next_report() - of(n).clock; due < next) next = due, who = n;
        if (!box_.empty() && box_.top().time <= next) {
            const event e = box_.top();
            box_.pop();
            now_ = std::max(now_, e.time);
            return carry_out(e);
        }
        now_ = std::max(now_, next);
        if (who >= 0) {
            of(who).now = std::max(of(who).now, of(who).w.next_report());
            return go_on(who);
        }
        coordinator_now_ = std::max(coordinator_now_, coordinator_.next_deadline());
        coordinator_.tick(clock(), out_);
        handle();
    }
    void carry_out(const event& e) {
        using k = typename event::kind;
        const bool lives = e.worker >= 0 && of(e.worker).life == e.life;
        switch (e.what) {
        case k::report:
            coordinator_.hear(*e.said, clock(), out_);
            handle();
            break;
        case k::order:
            if (!lives) break;
            of(e.worker).w.hear(*e.told, clock(of(e.worker)));
            if (of(e.worker).w.stopping() && dice_(0.5)) end(e.worker, part::none); // in the middle
            go_on(e.worker);
            break;
        case k::end:
            if (lives && of(e.worker).slice == e.slice && of(e.worker).w.in_slice()) {
                end(e.worker, result(e.worker));
                go_on(e.worker);
            }
            break;
        case k::idle: // nothing is left for it in this rollout
            if (!lives || e.phase != phase_ || cleared_ || of(e.worker).w.state() != spot_state::busy) break;
            of(e.worker).w.idle(clock(of(e.worker)));
            go_on(e.worker);
            break;
        case k::want: // a sequence is moved to it
            if (lives && e.phase == phase_ && !cleared_ && of(e.worker).wanted_at < 0) want(e.worker);
            break;
        case k::halt:
            if (e.phase != phase_) break;
            halted_ = true;
            halt();
            break;
        case k::train:
            policy_ += 1;
            coordinator_.policy_is(policy_, clock(), out_);
            halted_ = cleared_ = false;
            coordinator_.resume(clock(), out_);
            begin_tail();
            handle();
            break;
        case k::mishap:
            mishap();
            break;
        case k::bury:
            coordinator_.gone(e.worker, e.life, clock(), out_);
            handle();
            break;
        case k::reborn:
            if (lives) die(e.worker);
            break;
        }
    }

    // --- the coordinator's process

    void halt() {
        halted_at_ = now_;
        coordinator_.halt(clock(), out_);
        handle();
    }
    void handle() {
        spot_output now;
        std::swap(now, out_);
        for (const spot_notice& n : now.notices) switch (n.what) {
            case kind::committed: {
                const auto made = updates_.find({n.epoch, n.round});
                require(made != updates_.end(), "an update was committed that nobody published");
                require(made->second.base == line_, "an update was committed that goes on from another");
                require(n.drafter.version == line_.version + 1, "versions have a gap");
                require(!halted_, "an update was committed after halt");
                line_ = n.drafter;
                committed_.insert({n.epoch, n.round});
                break;
            }
            case kind::released:
            case kind::clear:
                met.used_bound = std::max(met.used_bound, (now_ - halted_at_) / options_.bound());
                require(now_ - halted_at_ <= options_.bound() + 1e-9, "rollout waited longer than the bound");
                break;
            default:
                break;
            }
        for (const spot_order& o : now.orders) {
            if (o.what != spot_order::kind::rest) {
                const auto leader = leaders_.emplace(o.epoch, o.leader).first;
                require(leader->second == o.leader, "an epoch has two leaders");
                require(o.what != spot_order::kind::apply || o.worker == o.leader, "who does not lead applies");
            }
            require(orders_.insert(o.number).second, "two orders of one number");
            spot_order read = copied(o, spot_order{});
            require(read == o, "an order is not what was written");
            send({.what = event::kind::order,
                  .worker = o.worker,
                  .life = o.life,
                  .told = std::make_shared<const spot_order>(std::move(read))});
        }
        const bool clear = halted_ && !cleared_ && coordinator_.clear(clock());
        if (clear) { // rollout and training have all workers, at once
            cleared_ = true;
            ++met.clears;
            for (std::int32_t n = 0; n < options_.workers; ++n) {
                require(of(n).w.busy(clock(of(n))), "rollout was told that a worker is free, and it is not");
                go_on(n);
            }
            at(now_ + dice_.in(0.1, 3), {.what = event::kind::train});
        }
        if (happens(0.05)) save();
        if (happens(0.01)) { // a copy goes on as the original would
            const std::string bytes = coordinator_.snapshot();
            coordinator_ = restored(bytes);
            require(coordinator_.snapshot() == bytes, "a snapshot is not what was restored");
            ++met.copies;
        }
    }
    Coordinator restored(const std::string& bytes) {
        Coordinator c(options_);
        static_cast<spot_coordinator&>(c) = spot_coordinator::restore(options_, bytes);
        return c;
    }
    void save() { saved_ = coordinator_.snapshot(); }

    // --- the workers' processes

    void want(std::int32_t n) {
        process& p = of(n);
        ++met.wants;
        if (p.w.busy(clock(p))) {
            at(now_ + dice_.in(0.1, 3), {.what = event::kind::idle, .worker = n, .life = p.life, .phase = phase_});
        } else {
            p.wanted_at = now_;
            if (dice_(0.3)) end(n, part::none);
        }
        go_on(n);
    }
    part result(std::int32_t n) {
        process& p = of(n);
        if (happens(faults_.failure)) return part::failed;
        if (p.task.what == spot_task::kind::slice) {
            if (--p.left > 0) return part::none;
            parts_[{p.task.epoch, p.task.round, n}] = {p.task.drafter, p.life};
            return part::contributed;
        }
        for (const std::int32_t m : p.task.members) {
            const auto its = parts_.find({p.task.epoch, p.task.round, m});
            if (its == parts_.end()) { // it died with its maker
                ++met.lost_publications;
                return part::failed;
            }
            require(its->second.base == p.task.drafter, "a part goes on from other weights than the update");
        }
        require(std::find(p.task.members.begin(), p.task.members.end(), n) != p.task.members.end(),
                "the leader's own part is missing");
        const update u{p.task.drafter, p.task.members};
        const auto made = updates_.emplace(std::pair(p.task.epoch, p.task.round), u).first;
        require(made->second.members == u.members && made->second.base == u.base, "one name for two updates");
        require(appliers_.emplace(p.task.epoch, std::pair(n, p.life)).first->second == std::pair(n, p.life),
                "two lead one epoch");
        return part::applied;
    }
    void end(std::int32_t n, part result) {
        process& p = of(n);
        p.w.ended(result, clock(p));
        p.task = {};
        if (p.wanted_at < 0) return;
        require(now_ - p.wanted_at <= options_.slice + 1e-9, "rollout waited for longer than a slice");
        require(p.w.state() == spot_state::busy, "rollout wanted it, and it is not there");
        p.wanted_at = -1;
        at(now_ + dice_.in(0.1, 3), {.what = event::kind::idle, .worker = n, .life = p.life, .phase = phase_});
    }
    /// Reports, and begins what it is to do.
    void go_on(std::int32_t n) {
        process& p = of(n);
        for (bool more = true; more;) {
            more = false;
            const double now = clock(p);
            const spot_task t = p.w.next(now);
            if (t.what == spot_task::kind::install) {
                require(t.drafter.version == 0 || committed_.contains({t.drafter.epoch, t.drafter.round}),
                        "weights are installed that were not committed");
                p.w.installed();
                more = true;
            } else if (t.what != spot_task::kind::none) {
                require(p.w.has() == t.drafter, "a round begins on other weights than it goes on from");
                p.w.begin(now);
                p.task = t;
                if (t.what == spot_task::kind::slice &&
                    (p.part_epoch != t.epoch || p.part_round != t.round || p.left <= 0)) {
                    p.part_epoch = t.epoch, p.part_round = t.round;
                    p.left = calm() ? 2 : dice_.one({1, 2, 3, 40}); // 40: longer than a lease
                }
                ++met.slices;
                at(now_ + options_.slice * dice_(),
                   {.what = event::kind::end, .worker = n, .life = p.life, .slice = ++p.slice});
            }
            if (auto r = p.w.report(now)) {
                const spot_report read = copied(*r, spot_report{});
                require(read == *r, "a report is not what was written");
                send({.what = event::kind::report, .said = std::make_shared<const spot_report>(read)});
            }
        }
        if (happens(0.01)) {
            p.w = copied(p.w, Worker(options_, n, p.life, groups_[static_cast<std::size_t>(n)]));
            ++met.copies;
        }
    }
    void die(std::int32_t n) {
        process& p = of(n);
        std::erase_if(parts_, [&](const auto& x) { return std::get<2>(x.first) == n; });
        ++met.worker_deaths;
        met.expired += p.w.totals().expired, met.discarded += p.w.totals().discarded;
        const std::uint64_t slice = p.slice;
        p = make(n, p.life + 1);
        p.slice = slice;
        if (!cleared_)
            at(now_ + dice_.in(0.1, 5), {.what = event::kind::idle, .worker = n, .life = p.life, .phase = phase_});
        go_on(n);
    }

    // --- the run

    void begin_tail() {
        ++phase_;
        const bool last = calm();
        for (std::int32_t n = 0; n < options_.workers; ++n) {
            const process& p = of(n);
            at(now_ + dice_.in(0.05, 5), {.what = event::kind::idle, .worker = n, .life = p.life, .phase = phase_});
            if (!last && dice_(0.4))
                at(now_ + dice_.in(0.5, 12), {.what = event::kind::want, .worker = n, .life = p.life, .phase = phase_});
        }
        at(now_ + (last ? 16 : dice_.in(2, 15)), {.what = event::kind::halt, .phase = phase_});
        if (!last) return;
        if (calm_tails_++ == 0) commits_ = met_updates();
        last_tail_ = calm_tails_ == 4; // by then a session is due, with `every` at most 3
    }
    std::int64_t met_updates() const { return coordinator_.totals().updates; }
    void check() {
        coordinator_.check_invariants();
        for (std::int32_t n = 0; n < options_.workers; ++n)
            require(!of(n).w.in_slice() || !coordinator_.is_free(n, clock()), "one is taken for free, and trains");
        require(!halted_ || cleared_ || now_ - halted_at_ <= options_.bound() + 1e-9, "halt takes too long");
        if (!halted_ || !last_tail_) return;
        require(met_updates() > commits_, "nothing is trained any more");
        done_ = true;
        met.totals = coordinator_.totals();
        for (const process& p : processes_)
            met.expired += p.w.totals().expired, met.discarded += p.w.totals().discarded;
    }
    void mishap() {
        if (calm()) return;
        const double step = dice_.in(0.2, 2);
        for (std::int32_t n = 0; n < options_.workers; ++n) {
            if (happens(faults_.cut * step)) of(n).cut_until = std::min(until_, now_ + 2 * options_.lease);
            if (!happens(faults_.death * step)) continue;
            const process& p = of(n);
            if (dice_(0.3)) { // taken for dead while it lives
                at(now_ + dice_.in(0.01, 3), {.what = event::kind::bury, .worker = n, .life = p.life});
                at(now_ + dice_.in(0.01, 20), {.what = event::kind::reborn, .worker = n, .life = p.life});
                continue;
            }
            if (dice_(0.5)) at(now_ + dice_.in(0.01, 3), {.what = event::kind::bury, .worker = n, .life = p.life});
            die(n);
        }
        if (happens(faults_.coordinator_death * step)) {
            ++met.coordinator_deaths;
            clock_ = static_cast<double>(dice_.of(0, 1000)), coordinator_now_ = -forever;
            coordinator_ = restored(saved_);
            coordinator_.abandon_workers(clock());
            save();
            line_ = coordinator_.drafter();
            if (coordinator_.streams().policy() < policy_) coordinator_.policy_is(policy_, clock(), out_);
            if (halted_ && !cleared_) {
                halt();
                halted_at_ = now_;
            } else if (halted_) {
                coordinator_.halt(clock(), out_);
                halted_at_ = now_;
            } else {
                coordinator_.resume(clock(), out_);
            }
            handle();
        }
        at(now_ + step, {.what = event::kind::mishap});
    }

    dice dice_;
    spot_options options_;
    Coordinator coordinator_;
    spot_faults faults_;
    std::vector<std::int32_t> groups_;
    std::vector<process> processes_;
    std::priority_queue<event> box_;
    std::uint64_t number_ = 0, phase_ = 0;
    double now_ = 0, clock_ = 0, coordinator_now_ = 0, halted_at_ = 0, until_ = 30;
    std::int64_t commits_ = 0;
    version_t policy_ = 0;
    int calm_tails_ = 0;
    bool halted_ = false, cleared_ = false, last_tail_ = false, done_ = false;
    spot_output out_;
    std::string saved_;
    drafter_weights line_;
    std::set<std::uint64_t> orders_;
    std::map<std::uint64_t, std::int32_t> leaders_;
    std::map<std::uint64_t, std::pair<std::int32_t, incarnation_t>> appliers_;
    std::map<std::tuple<std::uint64_t, std::uint64_t, std::int32_t>, published> parts_;
    std::map<std::pair<std::uint64_t, std::uint64_t>, update> updates_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> committed_;
};

// --- machines without a cure -----------------------------------------------------------------------------------------

/// Counts its lease from when the order came, not from when its report was sent.
struct late_lease : spot_worker {
    using spot_worker::spot_worker;
    void hear(spot_order o, double now) {
        o.sent = now;
        spot_worker::hear(o, now);
    }
};
/// Trains by an order that answers what it said before it let go.
struct obeys_the_past : spot_worker {
    using spot_worker::spot_worker;
    void hear(spot_order o, double now) {
        o.answers = std::uint64_t{1} << 50;
        spot_worker::hear(o, now);
    }
};
/// Says that it has let go while its slice still runs.
struct lets_go_in_words : spot_worker {
    using spot_worker::spot_worker;
    std::optional<spot_report> report(double now) {
        auto r = spot_worker::report(now);
        if (r && stopping()) r->state = spot_state::idle, r->since = r->number;
        return r;
    }
};
/// Takes the first word that a worker is idle for the end of its training.
struct believes_in_silence : spot_coordinator {
    using spot_coordinator::spot_coordinator;
    void hear(spot_report r, double now, spot_output& out) {
        if (r.state != spot_state::training) r.since = r.number;
        spot_coordinator::hear(r, now, out);
    }
};
/// After its death numbers go on from the snapshot.
struct counts_anew : spot_coordinator {
    using spot_coordinator::spot_coordinator;
    void abandon_workers(double) {}
};
/// Takes the second time that its leader says that its part is there for the word that the update is made.
struct cannot_wait : spot_coordinator {
    using spot_coordinator::spot_coordinator;
    std::pair<std::uint64_t, std::uint64_t> last;
    void hear(spot_report r, double now, spot_output& out) {
        if (r.part == spot_part::contributed && r.worker == leader() && r.epoch == epoch() && r.round == round())
            if (std::exchange(last, {r.epoch, r.round}) == std::pair(r.epoch, r.round)) r.part = spot_part::applied;
        spot_coordinator::hear(r, now, out);
    }
};
/// In how many worlds until five are caught.
template <class World>
std::uint64_t five_caught() {
    int n = 0;
    for (std::uint64_t seed = 0; seed < 5000; ++seed)
        if (outcome([&] { World(seed).run(); }) != "" && ++n == 5) return seed + 1;
    return 0;
}

spot_report said(std::int32_t worker, std::uint64_t number, spot_state state, std::uint64_t since = 1) {
    spot_report r;
    r.worker = worker, r.number = number, r.since = since, r.state = state;
    return r;
}

// What came out, in words.
std::string words(const spot_output& out) {
    static constexpr const char* notices[] = {"began",   "joined", "left",     "committed",
                                              "dropped", "ended",  "released", "clear"};
    static constexpr const char* orders[] = {"rest", "train", "apply"};
    std::string s;
    for (const spot_notice& n : out.notices) {
        s += std::string(s.empty() ? "" : " | ") + notices[static_cast<int>(n.what)];
        if (n.worker >= 0) s += " " + std::to_string(n.worker);
    }
    for (const spot_order& o : out.orders) {
        s += std::string(s.empty() ? "" : " | ") + orders[static_cast<int>(o.what)] + " " + std::to_string(o.worker);
        if (o.what == spot_order::kind::rest) continue;
        s += " " + std::to_string(o.epoch) + "." + std::to_string(o.round) + ":";
        for (const std::int32_t m : o.members) s += std::to_string(m);
    }
    return s;
}

// Coordinator and workers that hear each other at once, in one process.
struct office {
    spot_coordinator c;
    std::vector<spot_worker> w;
    double now = 0;
    std::string log;

    explicit office(const spot_options& o, std::vector<std::int32_t> groups = {}) : c(o) {
        for (std::int32_t n = 0; n < o.workers; ++n)
            w.emplace_back(o, n, 1, groups.empty() ? 0 : groups[static_cast<std::size_t>(n)]);
        talk();
    }
    spot_worker& at(std::int32_t n) { return w[static_cast<std::size_t>(n)]; }
    /// Until nobody has anything to say.
    std::string talk() {
        for (bool more = true; std::exchange(more, false);)
            for (spot_worker& x : w) more = pass_on(c, x, w) || more;
        return std::exchange(log, {});
    }
    bool pass_on(spot_coordinator& coordinator, spot_worker& worker, std::vector<spot_worker>& workers) {
        if (const auto said = worker.report(now)) {
            spot_output out;
            coordinator.hear(*said, now, out);
            for (const spot_order& o : out.orders) workers[static_cast<std::size_t>(o.worker)].hear(o, now);
            note(out);
            return true;
        }
        return false;
    }
    void note(const spot_output& out) {
        for (const spot_notice& n : out.notices)
            log += words({{}, {n}}) + (n.what == kind::committed ? " " + std::to_string(n.drafter.version) : "") + ", ";
    }
    std::string idle(std::int32_t n) {
        at(n).idle(now);
        return talk();
    }
    /// One task of this worker.
    std::string work(std::int32_t n, part p = part::contributed) {
        spot_worker& x = at(n);
        spot_task t = x.next(now);
        if (t.what == spot_task::kind::install) x.installed(), t = x.next(now);
        if (t.what == spot_task::kind::none) return "nothing";
        x.begin(now);
        x.ended(t.what == spot_task::kind::apply && p == part::contributed ? part::applied : p, now);
        return talk();
    }
    template <class F>
    std::string tell(F&& f) {
        spot_output out;
        f(out);
        for (const spot_order& o : out.orders) at(o.worker).hear(o, now);
        note(out);
        return talk();
    }
    std::string halt() {
        return tell([&](spot_output& o) { c.halt(now, o); });
    }
    std::string resume() {
        return tell([&](spot_output& o) { c.resume(now, o); });
    }
    std::string policy(version_t v) {
        return tell([&](spot_output& o) { c.policy_is(v, now, o); });
    }
};

} // namespace

TEST_CASE("worlds of idle workers: released within the bound, one leader an epoch, whole updates, and on it goes") {
    const std::uint64_t usual = 2000 / opd::test::worlds_share, first = number_from("OPD_WORLD", 0),
                        count = number_from("OPD_WORLDS", std::getenv("OPD_WORLD") ? 1 : usual);
    coverage all;
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        spot_world<> w(seed);
        const std::string wrong = outcome([&] { w.run(); });
        INFO("OPD_WORLD=" << seed);
        REQUIRE(wrong == "");
        const coverage& m = w.met;
        const spot_counters& c = m.totals;
        all.totals.epochs += c.epochs, all.totals.updates += c.updates, all.totals.dropped += c.dropped;
        all.totals.joined += c.joined, all.totals.halts += c.halts, all.totals.late += c.late;
        all.totals.expired += c.expired;
        all.worker_deaths += m.worker_deaths, all.coordinator_deaths += m.coordinator_deaths;
        all.messages += m.messages, all.lost_publications += m.lost_publications, all.clears += m.clears;
        all.slices += m.slices, all.expired += m.expired, all.discarded += m.discarded, all.wants += m.wants;
        all.copies += m.copies, all.used_bound = std::max(all.used_bound, m.used_bound);
    }
    if (count == 1) return;
    const spot_counters& c = all.totals;
    MESSAGE(count << " worlds: " << all.messages << " messages, " << all.slices << " slices, " << c.epochs
                  << " epochs, " << c.updates << " updates, " << c.dropped << " dropped rounds, " << c.joined
                  << " joined late, " << c.late << " late reports, " << c.expired << " and " << all.expired
                  << " leases that ran out, " << all.clears << " times clear, " << all.worker_deaths
                  << " deaths of workers, " << all.coordinator_deaths << " of the coordinator, " << all.wants
                  << " wanted alone, " << all.copies << " copies; the longest wait took " << all.used_bound
                  << " of the bound");
    CHECK(all.used_bound <= 1 + 1e-9);
    if (count < usual) return;
    for (const std::int64_t n :
         {c.epochs, c.updates, c.dropped, c.joined, c.late, c.expired, all.expired, all.clears, all.worker_deaths,
          all.coordinator_deaths, all.wants, all.copies, all.discarded, all.lost_publications})
        CHECK(n > 30);
    CHECK(all.used_bound > 0.9); // the bound is near what happens
}

TEST_CASE("machines from which a cure is taken are caught") {
    const std::uint64_t lease = five_caught<spot_world<spot_coordinator, late_lease>>();
    const std::uint64_t past = five_caught<spot_world<spot_coordinator, obeys_the_past>>();
    const std::uint64_t words = five_caught<spot_world<spot_coordinator, lets_go_in_words>>();
    const std::uint64_t silence = five_caught<spot_world<believes_in_silence>>();
    const std::uint64_t anew = five_caught<spot_world<counts_anew>>();
    const std::uint64_t waits = five_caught<spot_world<cannot_wait>>();
    MESSAGE("five are caught in worlds: lease " << lease << ", past " << past << ", words " << words << ", silence "
                                                << silence << ", numbers " << anew << ", updates " << waits);
    for (const std::uint64_t n : {lease, past, words, silence, anew, waits}) CHECK(n > 0);
}

TEST_CASE("a session begins at the threshold, the lowest leads, later ones join, and a lower one does not lead") {
    office o({.workers = 4, .threshold = 2, .every = 10});
    CHECK(o.idle(2) == "");
    CHECK_FALSE(o.c.in_session());
    CHECK(o.idle(1) == "began 1, ");
    CHECK(o.c.members() == std::vector<std::int32_t>{1, 2});
    CHECK(o.at(1).state() == spot_state::training);
    CHECK(o.idle(0) == "");
    CHECK(o.at(0).state() == spot_state::idle);
    CHECK(o.work(1) == "");
    CHECK(o.work(1) == "nothing"); // it waits for worker 2
    CHECK(o.work(2, part::none) == "");
    CHECK(o.work(2) == "");
    CHECK(o.at(1).next(0).what == spot_task::kind::apply);
    CHECK(o.at(1).next(0).members == std::vector<std::int32_t>{1, 2});
    CHECK(o.work(1) == "committed 1, joined 0, ");
    CHECK(o.c.leader() == 1);
    CHECK(o.c.members() == std::vector<std::int32_t>{0, 1, 2});
    CHECK(o.c.drafter() == drafter_weights{1, 1, 1, 0});
    CHECK(o.at(3).next(0).what == spot_task::kind::install); // also where rollout goes on
    CHECK(o.at(3).next(0).drafter.version == 1);
    CHECK(o.c.age_of(3) == drafter_age{1, 0});
    o.at(3).installed();
    // who is called back by rollout leaves what it has contributed
    CHECK(o.work(0) == "");
    CHECK(o.at(0).busy(0));
    CHECK(o.talk() == "left 0, ");
    CHECK(o.work(1) == "");
    CHECK(o.work(2) == "");
    CHECK(o.at(1).next(0).members == std::vector<std::int32_t>{0, 1, 2});
    // and of one that has not yet the others' count
    CHECK(o.work(1) == "committed 2, ");
    CHECK(o.work(1) == "");
    CHECK(o.at(2).busy(0));
    CHECK(o.talk() == "left 2, ");
    CHECK(o.at(1).next(0).members == std::vector<std::int32_t>{1});
    // the leader leaves: the epoch is over, and the update with it
    o.idle(0), o.idle(2);
    CHECK(o.at(1).busy(0));
    CHECK(o.talk() == "left 1, dropped, ended, began 0, ");
    CHECK(o.c.epoch() == 2);
    CHECK(o.c.drafter().version == 2);
}

TEST_CASE("the slice in hand ends first, and its part is not lost") {
    office o({.workers = 1});
    CHECK(o.idle(0) == "began 0, ");
    o.at(0).begin(0);
    CHECK_FALSE(o.at(0).busy(0));
    CHECK(o.at(0).stopping());
    CHECK(o.at(0).state() == spot_state::training);
    o.at(0).ended(part::none, 0);
    CHECK(o.at(0).state() == spot_state::busy);
    CHECK(o.talk() == "left 0, dropped, ended, ");
    CHECK(o.idle(0) == "began 0, ");
    o.at(0).begin(0);
    CHECK_FALSE(o.c.is_free(0, 0));
    CHECK(o.halt() == "dropped, ended, ");
    CHECK(o.at(0).stopping());
    CHECK(o.c.next_deadline() == o.c.options().lease);
    o.now = 0.5;
    o.at(0).ended(part::contributed, 0.5);
    CHECK(o.talk() == "released 0, clear, ");
    CHECK(o.c.totals().longest_wait == 0.5);
    CHECK(o.c.clear(0.5));
    CHECK(o.halt() == ""); // nothing new
    CHECK(o.at(0).state() == spot_state::idle);
    CHECK(o.resume() == "began 0, ");
}

TEST_CASE("sessions of one group, some versions apart, of so many updates and members at most") {
    office o({.workers = 4, .threshold = 2, .most_members = 2, .every = 3, .most_updates = 2}, {1, 0, 1, 1});
    CHECK(o.idle(0) == "");
    CHECK(o.idle(1) == ""); // two, of two groups
    CHECK(o.idle(3) == "began 0, ");
    CHECK(o.idle(2) == "");
    const auto update = [&] {
        std::string s;
        for (const std::int32_t n : o.c.members()) s += o.work(n);
        return s + o.work(o.c.leader());
    };
    CHECK(o.c.members() == std::vector<std::int32_t>{0, 3});
    CHECK(update() == "committed 1, joined 2, ");
    CHECK(o.c.members() == std::vector<std::int32_t>{0, 2});
    CHECK(update() == "committed 2, ended, ");
    CHECK(o.policy(2) == "");
    CHECK(o.policy(3) == "began 0, ");
    CHECK(o.policy(4) == ""); // the round that runs is finished
    CHECK(update() == "committed 3, ended, ");
    CHECK(o.c.drafter().policy == 4);
    CHECK(o.c.streams().age_of({1, 1, 1, 0}) == drafter_age{2, 4});
    CHECK(o.policy(5) == "");
    CHECK(o.policy(6) == "began 0, ");
}

TEST_CASE("an update that cannot be made is dropped, and made again; who cannot do its part stands back") {
    office o({.workers = 2, .threshold = 2});
    o.idle(0), o.idle(1);
    CHECK(o.work(1, part::failed) == "left 1, ");
    CHECK(o.work(0) == "");
    CHECK(o.at(0).next(0).members == std::vector<std::int32_t>{0});
    CHECK(o.work(0, part::failed) == "dropped, ");
    CHECK(o.c.round() == 2);
    CHECK(o.c.members() == std::vector<std::int32_t>{0, 1});
    CHECK(o.c.drafter().version == 0);
    CHECK(o.work(0, part::failed) == "dropped, ");
}

TEST_CASE("a worker that is silent is given up when its lease has run out, no earlier and no later") {
    const spot_options o{.workers = 2, .threshold = 1, .lease = 4, .slice = 0.5, .resend = 1};
    spot_coordinator c(o);
    spot_output out;
    c.hear(said(0, 1, spot_state::idle), 10, out);
    c.hear(said(1, 1, spot_state::idle), 10, out);
    CHECK(words(out) == "began 0 | train 0 1.1:0 | rest 1");
    out.clear();
    c.hear(said(0, 2, spot_state::training), 12, out); // granted until 16, and a slice more
    CHECK(words(out) == "train 0 1.1:0");
    CHECK(out.orders.at(0).answers == 2);
    CHECK(c.next_deadline() == 14); // of worker 1, which is idle
    out.clear();
    c.halt(13, out);
    CHECK(words(out) == "dropped | ended | rest 0");
    CHECK(out.orders.at(0).beyond == 2);
    out.clear();
    c.hear(said(0, 2, spot_state::idle), 13.5, out); // said twice
    CHECK(words(out) == "");
    CHECK(c.totals().late == 1);
    c.hear(said(0, 3, spot_state::idle), 13.5, out); // an idle one that has not let go may be told to train yet
    CHECK(words(out) == "rest 0");
    CHECK_FALSE(c.clear(16.4));
    c.hear(said(0, 4, spot_state::training), 16, out); // nor one that says it trains, be it late
    out.clear();
    CHECK(c.next_deadline() == 16.5);
    c.tick(16.5, out);
    CHECK(words(out) == "released 0 | clear");
    CHECK(c.totals().expired == 1);
    CHECK(c.totals().longest_wait == 3.5);
    CHECK(c.totals().longest_wait <= o.bound());
    CHECK(c.clear(16.5));
}

TEST_CASE("a worker trains no longer than its lease, and not by an order from before it let go") {
    const spot_options o{.workers = 1, .lease = 4, .slice = 0.5, .resend = 1};
    spot_worker w(o, 0, 3);
    w.idle(100);
    CHECK(w.report(100)->since == 1);
    spot_order train;
    train.worker = 0, train.life = 3, train.number = 5, train.answers = 1, train.sent = 100;
    train.what = spot_order::kind::train, train.epoch = 1, train.round = 1, train.leader = 0, train.members = {0};
    w.hear(train, 101.5);
    CHECK(w.lease_end() == 104);
    CHECK(w.next(103.9).what == spot_task::kind::slice);
    CHECK(w.next(104).what == spot_task::kind::none);
    CHECK(w.state() == spot_state::idle);
    CHECK(w.totals().expired == 1);
    train.number = 6; // on its way since
    w.hear(train, 104);
    CHECK(w.state() == spot_state::idle);
    CHECK(w.report(104)->since == 2);
    train.answers = 2, train.sent = 104;
    w.hear(train, 104); // doubled
    CHECK(w.state() == spot_state::idle);
    train.number = 7;
    spot_order other = train;
    other.life = 2;
    w.hear(other, 104);
    CHECK(w.state() == spot_state::idle);
    CHECK(w.totals().late == 2);
    w.hear(train, 104);
    CHECK(w.state() == spot_state::training);
    w.begin(104);
    w.busy(104);
    spot_order rest = train;
    rest.number = 8, rest.what = spot_order::kind::rest, rest.beyond = 2;
    w.hear(rest, 104); // rollout goes first
    w.ended(part::none, 104.2);
    CHECK(w.state() == spot_state::busy);
    CHECK(w.totals().discarded == 1);
    rest.number = 9;
    w.hear(rest, 105); // it has let go of that
    CHECK(w.report(105)->since == 3);
    CHECK_FALSE(w.report(105.9));
    CHECK(w.next_report() == 106);
}

TEST_CASE("after a death of the coordinator anyone may be training until he has obeyed the new one, or the bound") {
    const spot_options o{.workers = 2, .threshold = 1, .lease = 4, .slice = 0.5, .resend = 1};
    spot_coordinator c(o);
    spot_output out;
    c.hear(said(0, 1, spot_state::idle), 1, out);
    c = spot_coordinator::restore(o, c.snapshot());
    c.abandon_workers(100);
    out.clear();
    c.halt(101, out);
    CHECK(words(out) == "");
    CHECK_FALSE(c.is_free(1, 104.4));
    spot_report r = said(0, 7, spot_state::idle, 7);
    r.order = 1; // of the one that died
    c.hear(r, 102, out);
    CHECK(words(out) == "rest 0");
    CHECK(out.orders.at(0).beyond == 7);
    CHECK(out.orders.at(0).number > std::uint64_t{1} << 40);
    r.number = r.since = 8;
    r.order = out.orders.at(0).number;
    out.clear();
    c.hear(r, 103, out);
    CHECK(words(out) == "released 0 | rest 0");
    out.clear();
    c.tick(104.5, out);
    CHECK(words(out) == "released 1 | clear");
    c.resume(105, out);
    CHECK(c.epoch() == (std::uint64_t{1} << 40) + 2);
    r.number = 9, r.order = std::uint64_t{1} << 50;
    CHECK(refusal([&] { c.hear(r, 106, out); }).find("another coordinator gave") != std::string::npos);
}

TEST_CASE("where nothing is ever lost, a lease has no end, and halt waits for slices alone") {
    office o({.workers = 2, .lease = forever, .resend = forever});
    o.idle(0);
    CHECK(o.c.next_deadline() == forever);
    o.at(0).begin(0);
    o.now = 1e6;
    CHECK(o.halt() == "dropped, ended, ");
    o.at(0).ended(part::contributed, o.now);
    CHECK(o.talk() == "released 0, clear, ");
    o.resume();
    o.at(0).begin(o.now);
    o.halt();
    CHECK(o.tell([&](spot_output& out) { o.c.gone(0, 1, o.now, out); }) == "released 0, clear, ");
}

TEST_CASE("what no coordinator or worker could be told is refused by name") {
    const auto begun = [](spot_options o) { return refusal([&] { spot_coordinator c(o); }); };
    CHECK(begun({.workers = 0}).find("workers") != std::string::npos);
    CHECK(begun({.workers = 2, .threshold = 3}).find("threshold") != std::string::npos);
    CHECK(begun({.most_members = -1}).find("most_members") != std::string::npos);
    CHECK(begun({.lease = 0}).find("lease") != std::string::npos);
    CHECK(begun({.slice = -1}).find("slice") != std::string::npos);
    CHECK(begun({.lease = 1, .resend = 1}).find("resend") != std::string::npos);
    CHECK(begun({.every = 0}).find("every") != std::string::npos);
    CHECK(begun({.most_updates = -1}).find("most_updates") != std::string::npos);
    const spot_options o{.workers = 2};
    spot_coordinator c(o);
    spot_output out;
    const std::string before = c.snapshot();
    CHECK(refusal([&] { c.hear(said(2, 1, spot_state::idle), 0, out); }).find("worker") != std::string::npos);
    CHECK(refusal([&] { c.hear(said(0, 1, spot_state::idle, 2), 0, out); }).find("report") != std::string::npos);
    spot_report r = said(0, 1, spot_state::idle);
    r.life = 0;
    CHECK(refusal([&] { c.hear(r, 0, out); }).find("life") != std::string::npos);
    r.life = 1, r.group = -1;
    CHECK(refusal([&] { c.hear(r, 0, out); }).find("group") != std::string::npos);
    CHECK(refusal([&] { c.tick(std::nan(""), out); }).find("now") != std::string::npos);
    CHECK(c.snapshot() == before);
    c.policy_is(3, 5, out);
    CHECK(refusal([&] { c.policy_is(2, 5, out); }).find("version") != std::string::npos);
    CHECK(refusal([&] { c.tick(4, out); }).find("now") != std::string::npos);
    CHECK(refusal([&] { spot_coordinator::restore({.workers = 3}, c.snapshot()); }).find("other options") !=
          std::string::npos);
    CHECK(refusal([&] {
              spot_coordinator::restore(o, opd::sched::seal(std::string(unseal(c.snapshot())) + "x"));
          }).find("longer") != std::string::npos);
    spot_worker w(o, 1, 1);
    CHECK(refusal([&] { spot_worker(o, 2, 1); }).find("worker") != std::string::npos);
    CHECK(refusal([&] { spot_worker(o, 1, 0); }).find("life") != std::string::npos);
    CHECK(refusal([&] { w.hear(spot_order{}, 0); }).find("order") != std::string::npos);
    CHECK(refusal([&] { w.ended(part::none, 0); }).find("part") != std::string::npos);
    CHECK_THROWS_AS(w.begin(0), std::logic_error);
    w.idle(0);
    CHECK_THROWS_AS(w.idle(0), std::logic_error);
}

TEST_CASE("snapshots whose bytes were changed and sealed again are refused, or sound") {
    office o({.workers = 3, .threshold = 1, .lease = 5, .slice = 1, .resend = 1});
    o.idle(1), o.idle(2), o.work(1), o.work(1);
    o.at(1).installed();
    o.at(1).begin(0);
    o.halt();
    const std::string bytes(unseal(o.c.snapshot()));
    int refused = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i)
        for (const char flip : {char(1), char(0x80)}) {
            std::string damaged = bytes;
            damaged[i] = static_cast<char>(damaged[i] ^ flip);
            try {
                spot_coordinator c = spot_coordinator::restore(o.c.options(), seal(damaged));
                c.check_invariants();
                spot_output out;
                c.resume(1e9, out);
                for (std::int32_t n = 0; n < 3; ++n)
                    c.hear(said(n, std::uint64_t{1} << 60, spot_state::idle), 1e9, out);
                c.check_invariants();
            } catch (const opd::invalid_input&) {
                ++refused;
            }
        }
    MESSAGE(refused << " of " << 2 * bytes.size() << " refused");
    CHECK(refused > 200);
}

TEST_CASE("two streams of versions: neither goes back, and a drafter's age is counted by what it kept") {
    version_streams s;
    s.policy_is(7);
    s.drafter_is({3, 1, 3, 5});
    CHECK(s.age_of({}) == drafter_age{3, 7});
    CHECK(s.age_of({3, 1, 3, 5}) == drafter_age{0, 2});
    CHECK(s.age_of({4, 9, 1, 8}) == drafter_age{0, 0}); // forgotten with a snapshot
    CHECK(refusal([&] { s.policy_is(6); }) == "opd: policy: goes from version 7 back to 6");
    CHECK(refusal([&] { s.drafter_is({2, 1, 2, 5}); }).find("drafter") != std::string::npos);
    drafter_meter a, b;
    a.add({0, 2}, 8, 5), a.add({0, 2}, 8, 6), a.add({20, 40}, 4, 0), b.add({1, 3}, 0, 0);
    a.merge(b);
    CHECK(a.passes() == 4);
    CHECK(a.mean_behind() == 21 / 4.0);
    CHECK(a.mean_since_trained() == 47 / 4.0);
    CHECK(a.oldest() == drafter_age{20, 40});
    CHECK(a.by_behind()[0] == drafter_meter::bin{2, 16, 11});
    CHECK(a.by_behind()[0].share() == 11 / 16.0);
    CHECK(a.by_behind()[1].share() == 0);
    CHECK(a.by_behind()[16] == drafter_meter::bin{1, 4, 0});
    CHECK(a.by_since_trained()[2].passes == 2);
    CHECK(copied(a, drafter_meter{}).by_since_trained() == a.by_since_trained());
    CHECK(refusal([&] { a.add({}, 1, 2); }).find("kept") != std::string::npos);
    CHECK(refusal([&] { a.add({}, -1, 0); }).find("drafted") != std::string::npos);
}
