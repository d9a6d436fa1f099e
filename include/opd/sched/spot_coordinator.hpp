// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who trains the drafter while rollout idles: the coordinator of spot training, a state machine without a clock,
// without threads, without sockets. Reports of workers go in, orders for workers come out; time is an argument. Its
// counterpart at each worker is spot_worker.hpp. It stands beside the scheduler (here, not in spec/, since it speaks of
// the scheduler's workers, lives and versions, in its archives) and changes nothing of what the scheduler does.
//
//   spot_coordinator c({.workers = 8, .threshold = 2, .lease = 5, .slice = .2, .resend = 1});
//   c.hear(report, now, out);    of a worker's message         c.policy_is(version, now, out);   after each step
//   c.halt(now, out);            rollout wants everybody back  c.tick(now, out);                 at next_deadline()
//   c.resume(now, out);          idle workers may train again
//   for (const spot_order& o : out.orders) send o to o.worker;      for (const spot_notice& n : out.notices) …
//
//   worker    busy ──── rollout has nothing for it ────► idle ──── order train ────► training
//               ▲                                         ▲                             │
//               └── rollout wants it: at once, or from training after the slice in hand ┘ (to idle: order rest, or its
//                                                           lease runs out)
//
//   session   An *epoch* is one session under one leader. It begins when at least `threshold` workers of one group are
//             idle and one is due: at the first policy version, and then `every` versions after the last that got an
//             update. The leader is the lowest number of those members; a later one of the group joins in the next
//             round, and never leads. The leader leaves (rollout takes it, it dies, its lease runs out): the epoch is
//             over, and the others begin another one if they are enough.
//   round     makes one update: each member trains its part and says `contributed`; when all have that are still there,
//             the leader applies the parts that the order names and publishes under {epoch, round}; the coordinator
//             hears `applied` and *commits*. That is one assignment here: from then on drafter() names the update, and
//             before that nothing does. A round whose leader leaves, or that halt() finds, is dropped: what was or is
//             published under its name nobody ever installs. The part of a member that died is not used; of one that
//             was called back by rollout it is, if it had contributed.
//
// Promises, whatever the channel loses, doubles, delays and reorders, and whoever dies:
//   - from halt() on no worker trains after bound() = lease + slice seconds, and `released` comes by then for each
//   - an epoch has one leader; epochs and orders are never numbered twice
//   - an update is committed whole or dropped; each goes on from the one committed before it
//   - after the faults a session that is due and has its workers begins, and updates are committed
//   - memory and the time of a call are O(workers)
// They hold if clocks run at the same rate (their zeros may differ; where rates differ by a factor of 1 + e at most,
// take a lease (1 + e) shorter at the workers), no slice takes longer than `slice`, and the same order is not sent out
// by two processes: after abandon_workers() a snapshot is written before an order is sent, or a third process that
// begins from the same snapshot numbers its epochs as the second did.
//
// A lease: an order carries when the report that it answers was sent; the worker trains `lease` seconds from *then*,
// the coordinator counts from when it came, which is later. So when the coordinator gives a silent worker up, that
// worker has stopped by itself.
//
// Errors: invalid_input: an option by its name; `worker`, `group`, `life`, `report` where a report is of no worker or
// contradicts itself; `version` where the policy goes back; `now` where time does; `snapshot`.
//
// Source: TLT section 4.2 (worker coordinator: states, threshold, leader election, joiners, halt; a round every few
// steps). What is ours: leases, numbered reports and orders, lives, the commit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/drafter_stream.hpp"
#include "opd/sched/spot_messages.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What happened, for the caller to act on or to log.
struct spot_notice {
    enum class kind : std::uint8_t {
        began,     ///< epoch, worker: its leader
        joined,    ///< epoch, round, worker: a later member's first round
        left,      ///< epoch, round, worker: a member that is none any more
        committed, ///< epoch, round, drafter
        dropped,   ///< epoch, round: its update never will be
        ended,     ///< epoch
        released,  ///< worker: it trained, or may have, when halt() was called, and now surely does not
        clear      ///< no worker trains: after halt(), once
    };
    kind what = kind::clear;
    std::uint64_t epoch = 0, round = 0;
    std::int32_t worker = -1;
    drafter_weights drafter = {};
};

/// What a call has to say. Appended to: clear() it once all is sent.
struct spot_output {
    std::vector<spot_order> orders;
    std::vector<spot_notice> notices;
    void clear() { orders.clear(), notices.clear(); }
};

/// What has happened so far; they only grow.
struct spot_counters {
    std::int64_t epochs = 0, rounds = 0, updates = 0, dropped = 0, joined = 0;
    std::int64_t halts = 0, late = 0; ///< late: reports that were doubled, overtaken or of a life that is over
    std::int64_t expired = 0;         ///< workers that were given up when their lease ran out
    double longest_wait = 0;          ///< seconds from halt() to a worker's release
    bool operator==(const spot_counters&) const = default;
    template <class A>
    void fields(A& a) {
        a(epochs, rounds, updates, dropped, joined, halts, late, expired, longest_wait);
    }
};

/// One for all workers. One thread's; `now` never decreases.
class spot_coordinator {
public:
    explicit spot_coordinator(const spot_options& o) : options_(o) {
        options_.check();
        workers_.resize(static_cast<std::size_t>(o.workers));
    }

    /// A worker's report came. Answers it, unless it is late.
    void hear(const spot_report& r, double now, spot_output& out);
    /// Rollout wants all workers. What is trained is dropped, nothing begins until resume().
    void halt(double now, spot_output& out);
    void resume(double now, spot_output& out);
    /// The policy has come to this version; versions never decrease.
    void policy_is(version_t version, double now, spot_output& out);
    /// Somebody saw this life of a worker end. If it trains all the same, its lease runs out.
    void gone(std::int32_t worker, incarnation_t life, double now, spot_output& out);
    /// Time passes: leases run out.
    void tick(double now, spot_output& out);
    /// When tick() has something to do next; forever: not before something is heard.
    double next_deadline() const;

    bool halted() const { return halted_; }
    /// Whether no worker can be training at this time.
    bool clear(double now) const {
        return std::none_of(workers_.begin(), workers_.end(),
                            [&](const member& w) { return w.may_train() && w.until > now; });
    }
    /// Whether this one cannot.
    bool is_free(std::int32_t worker, double now) const { return !at(worker).may_train() || at(worker).until <= now; }
    const drafter_weights& drafter() const { return streams_.drafter(); }
    const version_streams& streams() const { return streams_; }
    bool in_session() const { return epoch_ != 0; }
    std::uint64_t epoch() const { return epoch_; } ///< 0: no session
    std::uint64_t round() const { return round_; }
    std::int32_t leader() const { return leader_; } ///< -1: no session
    /// Of the present round, those that are still there.
    std::vector<std::int32_t> members() const {
        std::vector<std::int32_t> all;
        for (std::int32_t n = 0; n < count(); ++n)
            if (at(n).in_round) all.push_back(n);
        return all;
    }
    /// Of the weights that this worker drafts with, as it said last.
    drafter_age age_of(std::int32_t worker) const { return streams_.age_of(at(worker).has); }
    spot_state state_of(std::int32_t worker) const { return at(worker).state; }
    const spot_counters& totals() const { return totals_; }
    const spot_options& options() const { return options_; }

    // --- snapshots

    /// All of it. Equal states give equal bytes.
    std::string snapshot() const {
        archive_writer w;
        w(*this);
        return seal(std::move(w.bytes));
    }
    /// With the options that it had. Whoever was there then still is: of a process that died, abandon_workers() is
    /// next.
    static spot_coordinator restore(const spot_options& o, std::string_view snapshot) {
        archive_reader reader(unseal(snapshot));
        spot_coordinator c(o);
        reader(c);
        if (!reader.done()) throw invalid_input("snapshot", "is longer than the state it describes");
        return c;
    }
    /// The process that talked to the workers is no more, and its clock neither. Any worker may be training by its
    /// word, until it has obeyed a word of this one, or bound() seconds from now (with a lease of forever they were of
    /// that process, and are gone with it). Updates that were committed since the snapshot are forgotten; workers go
    /// back to those that this one names.
    void abandon_workers(double now);

    /// Throws std::logic_error where the state contradicts itself.
    void check_invariants() const;

    template <class A>
    void fields(A& a);

private:
    struct member {
        incarnation_t life = 0; // 0: never heard
        bool over = false;      // that life
        std::int32_t group = 0;
        spot_state state = spot_state::busy;
        bool present = false; // heard within a lease, in this life
        std::uint64_t number = 0;
        double sent = 0;           // the last report, by the worker's clock
        double heard = -forever;   // and by ours
        std::uint64_t granted = 0; // the report that the last order to train answered; 0: none is out
        bool doubted = false;      // a process that died may have let it train
        double until = -forever;   // when it has stopped for certain, granted or doubted
        bool waited = false;       // by halt()
        bool in_round = false, contributed = false, joined = false;
        spot_order::kind told = spot_order::kind::rest; // last, so that it is told what is new
        std::uint64_t told_epoch = 0, told_round = 0;
        drafter_weights told_drafter = {};
        drafter_weights has = {};

        bool may_train() const { return granted != 0 || doubted; }
        bool eligible() const { return present && state != spot_state::busy; }
        template <class A>
        void fields(A& a) {
            a(life, over, group, state, present, number, sent, heard, granted, doubted, until, waited, in_round,
              contributed, joined, told, told_epoch, told_round, told_drafter, has);
        }
    };
    static constexpr std::uint64_t process_span = std::uint64_t{1} << 40; // numbers of one process

    const member& at(std::int32_t worker) const {
        if (worker < 0 || static_cast<std::size_t>(worker) >= workers_.size())
            throw invalid_input("worker", "there is none of number " + std::to_string(worker));
        return workers_[static_cast<std::size_t>(worker)];
    }
    member& at(std::int32_t worker) { return const_cast<member&>(std::as_const(*this).at(worker)); }
    std::int32_t count() const { return static_cast<std::int32_t>(workers_.size()); }
    void pass(double now) {
        if (!(now >= now_)) throw invalid_input("now", "goes back, or is no time");
        now_ = now;
    }

    bool allowed() const {
        const version_t v = streams_.policy();
        return !halted_ &&
               (v >= due_ || (v == window_ && (options_.most_updates == 0 || updates_ < options_.most_updates)));
    }
    void note(spot_output& out, spot_notice::kind what, std::int32_t worker = -1) const {
        out.notices.push_back({what, epoch_, round_, worker, {}});
    }
    void leave(std::int32_t worker, bool keep, spot_output& out); // keep: what it has contributed counts
    void drop_round(spot_output& out);
    void end_epoch(spot_output& out);
    void release(std::int32_t worker, spot_output& out);
    bool begin_epoch(spot_output& out);
    void begin_round(spot_output& out);
    void settle(spot_output& out, std::int32_t answer = -1);
    void order(std::int32_t worker, spot_order::kind what, spot_output& out);
    spot_order::kind due_order(std::int32_t worker) const {
        const member& w = at(worker);
        if (!running_ || !w.in_round) return spot_order::kind::rest;
        return applying_ && worker == leader_ ? spot_order::kind::apply : spot_order::kind::train;
    }

    spot_options options_;
    std::vector<member> workers_;
    version_streams streams_;
    spot_counters totals_;
    std::uint64_t orders_ = 0, epochs_ = 0, first_order_ = 1; // numbers given; the first of this process
    std::uint64_t epoch_ = 0, round_ = 0;                     // 0: no session
    std::int32_t leader_ = -1, group_ = 0;
    bool running_ = false, applying_ = false; // the round
    bool halted_ = false, cleared_ = false;
    double halted_at_ = 0, now_ = -forever;
    version_t window_ = -1, due_ = 0; // the policy version of the last sessions; the next that may have some
    std::int64_t updates_ = 0;        // of that window
};

// --- implementation -------------------------------------------------------------------------------------------------

inline double spot_coordinator::next_deadline() const {
    double next = forever;
    for (const member& w : workers_) {
        if (w.present) next = std::min(next, w.heard + options_.lease);
        if (w.may_train()) next = std::min(next, w.until);
    }
    return next;
}

inline void spot_coordinator::leave(std::int32_t worker, bool keep, spot_output& out) {
    member& w = at(worker);
    if (!keep && !applying_) w.contributed = false; // an order to apply has named it already
    if (!w.in_round) return;
    w.in_round = false;
    note(out, spot_notice::kind::left, worker);
    if (worker == leader_) end_epoch(out);
}
inline void spot_coordinator::drop_round(spot_output& out) {
    if (!running_) return;
    running_ = applying_ = false;
    for (member& w : workers_) w.in_round = w.contributed = false;
    ++totals_.dropped;
    note(out, spot_notice::kind::dropped);
}
inline void spot_coordinator::end_epoch(spot_output& out) {
    if (epoch_ == 0) return;
    drop_round(out);
    note(out, spot_notice::kind::ended);
    for (member& w : workers_) w.joined = false;
    epoch_ = round_ = 0;
    leader_ = -1;
}
inline void spot_coordinator::release(std::int32_t worker, spot_output& out) {
    member& w = at(worker);
    w.until = -forever;
    if (!std::exchange(w.waited, false)) return;
    totals_.longest_wait = std::max(totals_.longest_wait, now_ - halted_at_);
    note(out, spot_notice::kind::released, worker);
}

inline bool spot_coordinator::begin_epoch(spot_output& out) {
    for (std::int32_t n = 0; n < count(); ++n) {
        if (!at(n).eligible()) continue;
        // the lowest of its group, or that has been counted before
        const std::int32_t group = at(n).group;
        std::int32_t members = 0;
        for (std::int32_t m = 0; m < count() && members < options_.threshold; ++m)
            if (at(m).eligible() && at(m).group == group) {
                if (m < n) break;
                ++members;
            }
        if (members < options_.threshold) continue;
        epoch_ = ++epochs_, round_ = 0;
        leader_ = n, group_ = group;
        ++totals_.epochs;
        note(out, spot_notice::kind::began, n);
        return true;
    }
    return false;
}
inline void spot_coordinator::begin_round(spot_output& out) {
    if (streams_.policy() >= due_ && streams_.policy() != window_) window_ = streams_.policy(), updates_ = 0;
    ++round_;
    ++totals_.rounds;
    running_ = true, applying_ = false;
    std::int32_t room = options_.most_members == 0 ? count() : options_.most_members;
    --room; // the leader, whose number may not be among the lowest
    for (std::int32_t n = 0; n < count(); ++n) {
        member& w = at(n);
        w.contributed = false;
        w.in_round = w.eligible() && w.group == group_ && (n == leader_ || room > 0);
        if (!w.in_round) continue;
        if (n != leader_) --room;
        if (!std::exchange(w.joined, true) && round_ > 1) {
            ++totals_.joined;
            note(out, spot_notice::kind::joined, n);
        }
    }
}

inline void spot_coordinator::order(std::int32_t worker, spot_order::kind what, spot_output& out) {
    member& w = at(worker);
    spot_order o;
    o.worker = worker, o.life = w.life, o.number = ++orders_, o.answers = w.number, o.sent = w.sent;
    o.what = what;
    o.drafter = streams_.drafter();
    if (what == spot_order::kind::rest) {
        o.beyond = w.doubted || (w.state == spot_state::training && w.granted == 0) ? w.number : w.granted;
    } else {
        o.epoch = epoch_, o.round = round_, o.leader = leader_;
        for (std::int32_t n = 0; n < count(); ++n)
            if (what == spot_order::kind::train ? at(n).in_round : at(n).contributed) o.members.push_back(n);
        w.granted = w.number;
        w.until = std::max(w.until, w.heard + options_.bound());
    }
    w.told = what, w.told_epoch = o.epoch, w.told_round = o.round, w.told_drafter = o.drafter;
    out.orders.push_back(std::move(o));
}

inline void spot_coordinator::settle(spot_output& out, std::int32_t answer) {
    for (std::int32_t n = 0; n < count(); ++n) {
        member& w = at(n);
        if (w.present && w.heard + options_.lease <= now_) { // by now it trains no new slice
            w.present = false;
            leave(n, false, out);
        }
        if (w.may_train() && w.until <= now_) {
            totals_.expired += w.granted != 0;
            w.granted = 0, w.doubted = false;
            release(n, out);
        }
    }
    if (halted_) {
        end_epoch(out);
        if (!cleared_ && std::none_of(workers_.begin(), workers_.end(), [](const member& w) { return w.waited; })) {
            cleared_ = true;
            note(out, spot_notice::kind::clear);
        }
    } else {
        if (epoch_ != 0 && !running_ && (!allowed() || !at(leader_).eligible())) end_epoch(out);
        if (epoch_ == 0 && allowed()) begin_epoch(out);
        if (epoch_ != 0 && !running_) begin_round(out);
        if (running_ && !applying_)
            applying_ = std::none_of(workers_.begin(), workers_.end(),
                                     [](const member& w) { return w.in_round && !w.contributed; });
    }
    for (std::int32_t n = 0; n < count(); ++n) {
        const member& w = at(n);
        const spot_order::kind what = due_order(n);
        const bool trains = what != spot_order::kind::rest;
        const bool fresh = what != w.told || w.told_drafter != streams_.drafter() ||
                           (trains && (w.told_epoch != epoch_ || w.told_round != round_));
        if (n == answer || (fresh && w.life != 0 && !w.over && (w.present || w.may_train()))) order(n, what, out);
    }
}

inline void spot_coordinator::hear(const spot_report& r, double now, spot_output& out) {
    member& w = at(r.worker);
    if (r.life < 1) throw invalid_input("life", "must be at least 1");
    if (r.group < 0) throw invalid_input("group", "must be at least 0");
    if (r.since < 1 || r.since > r.number)
        throw invalid_input("report",
                            "is of number " + std::to_string(r.number) + ", since " + std::to_string(r.since));
    if (r.order > orders_)
        throw invalid_input("report", "obeys order " + std::to_string(r.order) +
                                          ", which another coordinator gave: this one was begun without its snapshot");
    pass(now);
    if (r.life < w.life || (r.life == w.life && (w.over || r.number <= w.number))) {
        ++totals_.late;
        return;
    }
    if (r.life > w.life) { // the process of the last life is no more, and what it would have had to hear neither
        leave(r.worker, false, out);
        w.granted = 0;
        w.life = r.life, w.over = false;
        w.told_drafter = {}, w.told = spot_order::kind::rest;
    }
    if (r.group != w.group) leave(r.worker, false, out);
    w.group = r.group, w.state = r.state, w.number = r.number, w.sent = r.sent, w.has = r.has, w.heard = now,
    w.present = true;
    if (running_ && w.in_round && r.epoch == epoch_ && r.round == round_) {
        if (r.part == spot_part::applied && applying_ && r.worker == leader_) {
            streams_.drafter_is({streams_.drafter().version + 1, epoch_, round_, streams_.policy()});
            running_ = applying_ = false;
            for (member& m : workers_) m.in_round = m.contributed = false;
            due_ = window_ + options_.every;
            ++updates_, ++totals_.updates;
            note(out, spot_notice::kind::committed);
            out.notices.back().drafter = streams_.drafter();
        } else if (r.part == spot_part::failed) {
            if (r.worker == leader_)
                drop_round(out);
            else
                leave(r.worker, false, out);
        } else if (r.part == spot_part::contributed) {
            w.contributed = true;
        }
    }
    // It obeys this process, and the slice that it was in has ended.
    if (w.doubted && r.order >= first_order_ && (r.state != spot_state::training || w.granted != 0)) w.doubted = false;
    if (r.state != spot_state::training && r.since > w.granted) {
        w.granted = 0;
        leave(r.worker, true, out);
    }
    if (!w.may_train()) release(r.worker, out);
    settle(out, r.worker);
}

inline void spot_coordinator::halt(double now, spot_output& out) {
    pass(now);
    if (halted_) return settle(out);
    halted_ = true, cleared_ = false, halted_at_ = now;
    ++totals_.halts;
    for (member& w : workers_) w.waited = w.may_train();
    settle(out);
}
inline void spot_coordinator::resume(double now, spot_output& out) {
    pass(now);
    halted_ = false;
    for (member& w : workers_) w.waited = false;
    settle(out);
}
inline void spot_coordinator::policy_is(version_t version, double now, spot_output& out) {
    if (version < streams_.policy())
        throw invalid_input("version",
                            "goes from " + std::to_string(streams_.policy()) + " back to " + std::to_string(version));
    pass(now);
    streams_.policy_is(version);
    settle(out);
}
inline void spot_coordinator::gone(std::int32_t worker, incarnation_t life, double now, spot_output& out) {
    member& w = at(worker);
    pass(now);
    if (life < w.life || (life == w.life && w.over)) return;
    leave(worker, false, out);
    w.life = life, w.over = true, w.present = false;
    if (options_.lease == forever) {
        w.granted = 0;
        release(worker, out);
    }
    settle(out);
}
inline void spot_coordinator::tick(double now, spot_output& out) {
    pass(now);
    settle(out);
}

inline void spot_coordinator::abandon_workers(double now) {
    if (!(now < forever && now > -forever)) throw invalid_input("now", "is no time");
    spot_output nobody;
    end_epoch(nobody);
    orders_ += process_span, epochs_ += process_span;
    first_order_ = orders_ + 1;
    now_ = now;
    if (halted_) halted_at_ = now, cleared_ = false;
    for (member& w : workers_) {
        const member old = std::exchange(w, {});
        w.life = old.life, w.over = old.over, w.group = old.group;
        w.doubted = options_.lease < forever;
        w.until = w.doubted ? now + options_.bound() : -forever;
        w.waited = halted_ && w.doubted;
    }
}

inline void spot_coordinator::check_invariants() const {
    const auto require = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(std::string("opd: a spot coordinator contradicts itself: ") + what);
    };
    require(static_cast<std::int32_t>(workers_.size()) == options_.workers,
            "it has other workers than its options say");
    require((epoch_ != 0) == (leader_ >= 0) && leader_ < count(), "a session has a leader");
    require(epoch_ <= epochs_, "an epoch has a number that was given");
    require(!running_ || (epoch_ != 0 && round_ > 0 && !halted_),
            "a round is of a session, and none while it is halted");
    require(!applying_ || running_, "an update is applied in its round");
    require(window_ <= streams_.policy(), "sessions were at a policy version that there was");
    for (std::int32_t n = 0; n < count(); ++n) {
        const member& w = at(n);
        require(!w.in_round || (running_ && w.eligible() && w.granted != 0 && w.group == group_),
                "who is in a round is there, idle or training, and was told so");
        require(!running_ || n != leader_ || w.in_round, "the leader is in the round");
        require(!w.contributed || running_, "parts are of a round");
        require(!w.present || (w.life > 0 && !w.over && w.number > 0), "who is there was heard");
        require(w.granted <= w.number, "what was answered was heard");
        require(!w.may_train() || w.until > now_, "who may train has time to");
        require(!w.waited || (halted_ && w.may_train()), "nobody is waited for without need");
    }
}

template <class A>
void spot_coordinator::fields(A& a) {
    spot_options then = options_;
    a(then);
    if (then != options_) throw invalid_input("snapshot", "is of other options");
    a(workers_, streams_, totals_, orders_, epochs_, first_order_, epoch_, round_, leader_, group_, running_, applying_,
      halted_, cleared_, halted_at_, now_, window_, due_, updates_);
    if constexpr (A::reading) {
        detail::count_range counted;
        counted(totals_.epochs, totals_.rounds, totals_.updates, totals_.dropped, totals_.joined, totals_.halts,
                totals_.late, totals_.expired, orders_, epochs_, round_, window_ + 1, due_, updates_);
        detail::needs(counted.holds && now_ < forever && halted_at_ < forever && first_order_ <= orders_ + 1,
                      "a count is none");
        for (const member& w : workers_) {
            counted(w.group, w.number, w.granted);
            detail::needs(counted.holds && w.heard <= now_ && w.until == w.until, "a worker's numbers are none");
        }
        try {
            check_invariants();
        } catch (const std::logic_error& e) {
            detail::needs(false, e.what());
        }
    }
}

} // namespace opd::sched
