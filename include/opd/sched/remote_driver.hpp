// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The driver for workers in other processes: what dispatcher.hpp asks of one, but for the connections, which are
// a transport's. A state machine: time is an argument, and the loop around it is yours.
//
//   Transport   void send(const std::string& peer, std::string frame)     may lose, double, delay, reorder, damage it
//
//   for (;;) {
//       what the transport has received, until driver.next_deadline():   driver.hear(peer, bytes, now)
//       driver.tick(now)                                                 what is due, and all that is to be sent
//       if (driver.done(now)) break;
//   }
//
// A peer is a process, by a name that the transport gives it: its own for as long as it lives, and another one for
// the next process. The process says which worker of which stage it is (remote_worker.hpp); the driver gives it a
// life that is higher than all before, so nobody has to count lives over restarts. A new process takes a worker's
// number over from an old one at once, and from a silent one in `options.silence` seconds. Both cost the worker's
// sequences an attempt that is not charged.
//
//   Hooks, each optional; called in the middle of hear(), tick() and tell(), they must not call the driver
//     save(const snapshot_type&)                       at once when the driver is made, then every `save_every` steps:
//                                                      write it down before you return. It holds the payloads
//     step(const action&, std::span<const consumed_sequence>, const conveyor&)    these were consumed
//     failed(const action&)                            this sequence was given up
//     took(const event&, double now, const actions&)   the scheduler has taken an event
//     said(stage, worker, const std::string&)          what a stage threw, why a worker was refused
//     up, down, begin, end, event, drawn               of an observer (observer.hpp). A worker is busy while it was
//                                                      asked for something, for all that is known here
//
// The scheduler's process may die at any time: make a driver from the last snapshot saved, with a higher epoch. Nothing
// is sent before that snapshot is written, and publications are needed as long as it names them, so the learner is told
// that a publication is of no use (remote_worker::keep_from) only after a later snapshot is safe.
//
// Whoever speaks is believed what it says within its session and no more. A ticket that its worker was not given, or
// has answered, is counted and dropped; versions that it cannot have are a failed attempt; a score for a sequence
// that it was not asked about, or its loss, another worker's word, or bytes that are no message end the session. Who
// may speak at all is the transport's to say (keys).
//
// It offers no spare work (stages.hpp), and asks for no prefixes at a snapshot: what was in rollout starts again.
//
// Errors: invalid_input: an option; `epoch` 0; `message` where a command exceeds options.message; what the settings or
// the snapshot are refused for. A hook's exceptions go through. After one the driver is not to be used.
//
// Above 600 lines: one state machine, of peers, and of what was sent to each.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "opd/sched/dispatcher.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/remote_link.hpp"

namespace opd::sched {

/// What came and went, since the driver was made.
struct remote_counts {
    std::int64_t received = 0, sent = 0; ///< frames
    std::int64_t sessions = 0;           ///< that were begun
    std::int64_t silent = 0;             ///< that ended since nothing was heard
    std::int64_t overdue = 0;            ///< that ended since a deadline of the settings passed
    std::int64_t replaced = 0;           ///< that ended since another process, or another session of it, took over
    std::int64_t left = 0;               ///< that ended by their worker's word
    std::int64_t clogged = 0;            ///< that ended since what was sent was not taken
    std::int64_t broken = 0;             ///< frames that were none
    std::int64_t stale = 0;    ///< frames of sessions that are over, of other epochs, of peers that are not known
    std::int64_t repeated = 0; ///< hellos that came again; data frames, of sessions that are over
    std::int64_t late = 0;     ///< replies to what was answered, or never asked
    std::int64_t refused = 0;  ///< messages that ended their session
    std::int64_t unfit = 0;    ///< replies that the scheduler cannot take: the attempt has failed
    std::int64_t crowded = 0;  ///< peers that there is no room for
};

/// The scheduler's process. Not copied, not moved: peers hold sessions with it. One thread's.
template <class Rolled, class Scored, class Transport, class Hooks, class Scheduler = sched::scheduler>
class remote_driver {
public:
    using belt_type = conveyor<Rolled, Scored>;
    using snapshot_type = run_snapshot<Rolled, Scored>;
    using command = worker_command<Rolled, Scored>;
    using reply = worker_reply<Rolled, Scored>;

    /// A run from its beginning. `transport` and `hooks` must outlive it.
    remote_driver(const settings& how, const remote_options& options, std::uint64_t epoch, Transport& transport,
                  Hooks& hooks)
        : remote_driver(Scheduler(how), options, epoch, transport, hooks) {
        save();
    }
    /// One that goes on from a snapshot; `epoch` is higher than those before.
    remote_driver(const settings& how, const snapshot_type& from, const remote_options& options, std::uint64_t epoch,
                  Transport& transport, Hooks& hooks)
        : remote_driver(Scheduler::restore(how, from.scheduler), options, epoch, transport, hooks) {
        work_.scheduler().abandon_workers();
        work_.resume(from);
        save();
    }
    remote_driver(const remote_driver&) = delete;
    remote_driver& operator=(const remote_driver&) = delete;

    /// Takes what the transport has received from a peer.
    void hear(const std::string& peer_name, std::string_view bytes, double now) {
        pass(now);
        ++counts_.received;
        remote_frame f;
        try {
            f = read_frame(bytes, options_.frame);
        } catch (const invalid_input&) {
            ++counts_.broken;
            return;
        }
        switch (f.head.what) {
        case remote_kind::hello:
            welcome(peer_name, f);
            break;
        case remote_kind::data:
        case remote_kind::bye: {
            peer* p = of_session(peer_name, f.head);
            if (!p) {
                ++counts_.stale;
                send(peer_name, {.what = remote_kind::gone,
                                 .stage = f.head.stage,
                                 .worker = f.head.worker,
                                 .life = f.head.life,
                                 .epoch = epoch_});
            } else if (f.head.what == remote_kind::bye) {
                end(*p, counts_.left);
            } else {
                p->heard = now_;
                take(*p, f);
            }
            break;
        }
        default: // ours to say
            ++counts_.broken;
        }
        settle();
    }
    /// Does what is due, and sends.
    void tick(double now) {
        pass(now);
        if (work_.scheduler().next_deadline() <= now_) dispatch(event::of(event::kind::tick));
        for (auto& stage : sessions_)
            for (peer* p : stage)
                if (p && p->heard + options_.silence <= now_) end(*p, counts_.silent);
        settle();
        for (auto& stage : sessions_)
            for (peer* p : stage)
                if (p)
                    p->link.flush(now_, [&](std::uint64_t number, std::uint64_t heard, std::string_view body) {
                        ++counts_.sent;
                        transport_.send(p->name, frame_bytes({.what = remote_kind::data,
                                                              .stage = p->stage,
                                                              .worker = p->number,
                                                              .life = p->life,
                                                              .epoch = epoch_,
                                                              .number = number,
                                                              .heard = heard},
                                                             body));
                    });
    }
    /// When tick() must be called at the latest.
    double next_deadline() const {
        double t = work_.scheduler().next_deadline();
        for (const auto& stage : sessions_)
            for (const peer* p : stage)
                if (p) t = std::min({t, p->heard + options_.silence, p->link.due()});
        return t;
    }
    /// Hands in what the user or the driver's owner wants (pause, close, stop, weights_lost).
    void tell(const event& e, double now) {
        pass(now);
        dispatch(e);
        settle();
    }
    /// The run is finished, and everybody knows it, or was given `options.silence` seconds to hear of it.
    bool done(double now) const {
        if (!work_.scheduler().finished()) return false;
        if (finished_at_ > -forever && now >= finished_at_ + options_.silence) return true;
        for (const auto& stage : sessions_)
            for (const peer* p : stage)
                if (p && !p->link.settled()) return false;
        return true;
    }

    const Scheduler& scheduler() const { return work_.scheduler(); }
    const belt_type& payloads() const { return work_.payloads(); }
    std::uint64_t epoch() const { return epoch_; }
    remote_counts counts() const { return counts_; }
    /// Whether this worker has a session.
    bool connected(stage s, std::int32_t worker) const { return session(s, worker) != nullptr; }

private:
    friend class dispatcher<belt_type, Scheduler>;
    struct call {
        std::uint64_t job = 0;
        std::vector<ticket> tickets;
    };
    struct peer {
        explicit peer(const remote_options& o) : link(o) {}
        std::string name;
        sched::stage stage = sched::stage::rollout;
        std::int32_t number = -1;
        incarnation_t life = 0;
        std::uint64_t begun = 0; // the latest of its sessions, as it counts them
        bool alive = false;      // in that session
        double heard = 0, ended = 0;
        remote_link link;
        std::vector<ticket> lanes;       // what was started on each
        index_t running = 0;             // on how many of them something was
        std::vector<call> calls;         // of a teacher or the learner, not answered
        bool seen = false, busy = false; // as an observer was told
    };

    remote_driver(Scheduler s, const remote_options& options, std::uint64_t epoch, Transport& transport, Hooks& hooks)
        : options_((options.check(), options)), epoch_(epoch), transport_(transport), hooks_(hooks),
          work_(std::move(s)) {
        if (epoch == 0) throw invalid_input("epoch", "counts from 1");
    }

    void pass(double now) {
        now = std::max(now, now_);
        // A process that was stopped has not listened: nobody was silent meanwhile.
        if (const double gap = now - now_; gap > 2 * options_.beat && now_ > -forever)
            for (auto& stage : sessions_)
                for (peer* p : stage)
                    if (p) p->heard += gap;
        now_ = now;
        if (work_.scheduler().finished() && finished_at_ == -forever) finished_at_ = now;
    }
    void send(const std::string& to, const remote_head& head) {
        ++counts_.sent;
        transport_.send(to, frame_bytes(head));
    }

    // --- sessions

    peer* session(stage s, std::int32_t worker) const {
        const auto& all = sessions_[static_cast<std::size_t>(s)];
        return worker >= 0 && std::cmp_less(worker, all.size()) ? all[static_cast<std::size_t>(worker)] : nullptr;
    }
    peer* of_session(const std::string& name, const remote_head& h) {
        const auto found = peers_.find(name);
        if (found == peers_.end()) return nullptr;
        peer* p = found->second.get();
        return p->alive && h.epoch == epoch_ && h.stage == p->stage && h.worker == p->number && h.life == p->life
                   ? p
                   : nullptr;
    }
    void welcome(const std::string& name, const remote_frame& f) {
        const remote_head& h = f.head;
        std::int32_t slots = 0;
        if (f.body.size() == sizeof slots) std::memcpy(&slots, f.body.data(), sizeof slots);
        const settings& how = work_.scheduler().options();
        if (h.number == 0 || h.worker < 0 || h.worker >= (h.stage == stage::learner ? 1 : how.most_workers) ||
            slots < 1 || slots > how.most_slots) {
            ++counts_.broken;
            return;
        }
        if (work_.scheduler().finished()) return send(name, with(h, remote_kind::over));
        auto found = peers_.find(name);
        const bool newcomer = found == peers_.end();
        if (!newcomer && h.number <= found->second->begun) {
            peer& p = *found->second;
            ++counts_.repeated;
            if (h.number < p.begun || h.stage != p.stage || h.worker != p.number) return;
            if (!p.alive) return send(name, with(h, remote_kind::gone));
            p.heard = now_;
            return notify(p, remote_kind::welcome);
        }
        peer* before = session(h.stage, h.worker);
        if (before && before->name != name) {
            if (!newcomer) return; // it was replaced: the other's life must end first
            end(*before, counts_.replaced);
            settle();
        }
        if (newcomer) {
            if (!room()) {
                ++counts_.crowded;
                return;
            }
            found = peers_.emplace(name, std::make_unique<peer>(options_)).first;
            found->second->name = name;
        }
        peer& p = *found->second;
        if (p.alive) end(p, counts_.replaced);
        settle();
        auto& all = sessions_[static_cast<std::size_t>(h.stage)];
        auto& lives = lives_[static_cast<std::size_t>(h.stage)];
        const auto at = static_cast<std::size_t>(h.worker);
        if (at >= all.size()) all.resize(at + 1), lives.resize(at + 1);
        lives[at] = std::max(lives[at], work_.scheduler().incarnation_of(h.stage, h.worker)) + 1;
        p.stage = h.stage, p.number = h.worker, p.life = lives[at], p.begun = h.number;
        p.alive = true, p.heard = now_;
        p.link = remote_link(options_);
        all[at] = &p;
        ++counts_.sessions;
        notify(p, remote_kind::welcome);
        if (p.stage == stage::learner) tell_kept(p);
    }
    remote_head with(const remote_head& h, remote_kind what) const {
        return {
            .what = what, .stage = h.stage, .worker = h.worker, .life = h.life, .epoch = epoch_, .number = h.number};
    }
    /// What its session has become: welcome, or gone.
    void notify(const peer& p, remote_kind what) {
        send(p.name,
             {.what = what, .stage = p.stage, .worker = p.number, .life = p.life, .epoch = epoch_, .number = p.begun});
    }
    // For one peer more; whoever ended first is forgotten for it.
    bool room() {
        if (std::cmp_less(peers_.size(), options_.peers)) return true;
        auto oldest = peers_.end();
        for (auto i = peers_.begin(); i != peers_.end(); ++i)
            if (!i->second->alive && (oldest == peers_.end() || i->second->ended < oldest->second->ended)) oldest = i;
        if (oldest == peers_.end()) return false;
        peers_.erase(oldest);
        return true;
    }
    /// The session is over; the scheduler hears of it in settle(), since this may be in the middle of an event.
    void end(peer& p, std::int64_t& why, bool told = true) {
        if (!p.alive) return;
        ++why;
        p.alive = false;
        p.ended = now_;
        sessions_[static_cast<std::size_t>(p.stage)][static_cast<std::size_t>(p.number)] = nullptr;
        if (p.seen) detail::tell(hooks_, worker_change::down, p.stage, p.number, now_);
        p.seen = p.busy = false;
        if (told) downs_.push_back(event::down(p.stage, p.number).of_life(p.life));
        emptied_.push_back(&p);
        notify(p, remote_kind::gone);
    }
    void settle() {
        while (!downs_.empty()) {
            const event e = downs_.front();
            downs_.pop_front();
            if (work_.lives(e)) dispatch(e);
        }
        for (peer* p : emptied_) { // whoever is not alive any more
            if (p->alive) continue;
            counts_.repeated += static_cast<std::int64_t>(p->link.repeated());
            p->link = remote_link(options_);
            p->lanes = {};
            p->running = 0;
            p->calls = {};
        }
        emptied_.clear();
        if (failed_) std::rethrow_exception(std::exchange(failed_, {}));
    }

    // --- what workers say

    void take(peer& p, const remote_frame& f) {
        try {
            p.link.take(f, now_, [&](std::string_view message) {
                reply r;
                archive_reader in(message);
                remote_word word{};
                in(word);
                if (word != remote_word::content) throw invalid_input("message", "is not a worker's to say");
                in(r);
                if (!in.done()) throw invalid_input("message", "has more bytes than it needs");
                check(p, r);
                say(p, r.failed);
                const event::kind what = r.what.what;
                speaker_ = &p;
                for (const auto& [t, tokens] : r.drawn) detail::tell(hooks_, t, tokens, now_);
                if (what != event::kind::tick && asked(p, r)) hear_reply(std::move(r));
                if (what == event::kind::worker_up && p.alive && !std::exchange(p.seen, true))
                    detail::tell(hooks_, worker_change::up, p.stage, p.number, now_);
                watch(p);
                if (what == event::kind::worker_down) end(p, counts_.left, false);
                return p.alive && !failed_;
            });
        } catch (const invalid_input& e) {
            said(p, e.what());
            end(p, counts_.refused);
        }
    }
    /// An observer hears where it becomes busy, or idle.
    void watch(peer& p) {
        const bool busy = p.running > 0 || !p.calls.empty();
        if (!p.seen || busy == p.busy) return;
        p.busy = busy;
        detail::tell(hooks_, busy ? worker_change::begin : worker_change::end, p.stage, p.number, now_);
    }
    // What the scheduler's side throws is not the worker's fault.
    void hear_reply(reply&& r) {
        try {
            work_.hear(std::move(r), now_, *this);
        } catch (...) {
            fail();
        }
    }
    void fail() {
        if (!failed_) failed_ = std::current_exception();
    }
    void said(const peer& p, const std::string& what) {
        if constexpr (requires { hooks_.said(p.stage, p.number, what); }) try {
                hooks_.said(p.stage, p.number, what);
            } catch (...) {
                fail();
            }
    }
    void say(const peer& p, const std::exception_ptr& thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const std::exception& e) {
            said(p, e.what());
        }
    }
    /// Throws invalid_input unless this is what the worker may say.
    static void check(const peer& p, const reply& r) {
        using kind = event::kind;
        const event& e = r.what;
        const auto needs = [](bool holds, const char* why) {
            if (!holds) throw invalid_input("message", why);
        };
        needs(!r.of_hook && r.prefixes.empty(), "answers what was not asked");
        for (const auto& [t, tokens] : r.drawn)
            needs(p.stage == stage::rollout && t.worker == p.number && tokens >= 0 && tokens <= detail::most_at_once,
                  "has drawn what it was not asked for");
        if (e.what == kind::tick) return; // nothing but an exception, or the end of spare work
        needs(e.from_worker(), "is not a worker's to say");
        needs(e.stage == p.stage && e.worker == p.number && e.incarnation == p.life, "is another worker's to say");
        const bool has = r.sequence != nullptr, of_rollout = p.stage == stage::rollout;
        needs(r.tickets.empty() || e.what == kind::scored, "has scores that nobody asked for");
        needs(r.lost.empty() || e.what == kind::scored || e.what == kind::score_failed ||
                  e.what == kind::learn_failed || e.what == kind::rollout_failed,
              "has lost what it was not asked about");
        needs(std::isfinite(e.versions.mean), "has a mean version that is no number");
        switch (e.what) {
        case kind::worker_up:
        case kind::worker_down:
            break;
        case kind::rolled_out:
            needs(of_rollout && has, "is rolled out, and has no sequence");
            break;
        case kind::parked:
            needs(of_rollout && has == (e.versions.tokens > 0), "is parked, and has tokens or a sequence alone");
            break;
        case kind::rollout_failed:
        case kind::aborted:
        case kind::synced:
            needs(of_rollout, "is a rollout worker's to say");
            break;
        case kind::scored:
            needs(p.stage == stage::teacher && !r.tickets.empty(), "is scored, and names nothing");
            for (const auto& s : r.scores) needs(s != nullptr, "is scored, and has no score");
            break;
        case kind::score_failed:
            needs(p.stage == stage::teacher, "is a teacher's to say");
            break;
        default:
            needs(p.stage == stage::learner && e.count >= 0, "is a learner's to say");
        }
    }
    /// Whether it answers what its worker was asked; what was answered before is dropped, as any late word.
    bool asked(peer& p, const reply& r) {
        using kind = event::kind;
        const event& e = r.what;
        switch (e.what) {
        case kind::rolled_out:
        case kind::rollout_failed:
        case kind::aborted:
        case kind::parked: {
            const auto lane = static_cast<std::size_t>(e.ticket.lane);
            if (e.ticket.lane < 0 || lane >= p.lanes.size() || p.lanes[lane] != e.ticket) {
                ++counts_.late;
                return false;
            }
            for (const ticket& t : r.lost)
                if (t != e.ticket) throw invalid_input("message", "has lost a sequence that it was not asked about");
            p.lanes[lane] = {};
            --p.running;
            return true;
        }
        case kind::scored:
        case kind::score_failed:
        case kind::learned:
        case kind::learn_failed: {
            const auto it = std::find_if(p.calls.begin(), p.calls.end(), [&](const call& c) { return c.job == e.job; });
            if (it == p.calls.end()) {
                ++counts_.late;
                return false;
            }
            for (const ticket& t : r.lost)
                if (std::none_of(it->tickets.begin(), it->tickets.end(), [&](const ticket& x) { // the worker is no more
                        return x.sample == t.sample && x.slot == t.slot && x.attempt == t.attempt;
                    }))
                    throw invalid_input("message", "has lost a sequence that it was not asked about");
            auto next = it->tickets.begin();
            for (const ticket& t : r.tickets) {
                next = std::find(next, it->tickets.end(), t);
                if (next == it->tickets.end())
                    throw invalid_input("message", "scores a sequence that it was not asked about");
                ++next;
            }
            p.calls.erase(it);
            return true;
        }
        default:
            return true;
        }
    }

    // --- what the scheduler wants (the dispatcher's carrier)

    void dispatch(const event& e) { work_.on(e, now_, *this); }
    void took(const event& e, double now, const actions& a) {
        detail::tell(hooks_, now, e, a, work_.scheduler());
        if constexpr (requires { hooks_.took(e, now, a); }) try {
                hooks_.took(e, now, a);
            } catch (...) {
                fail();
            }
    }
    void carry_out(const action& a) {
        try {
            switch (a.what) {
            case action::kind::start:
                if (peer* p = of_life(stage::rollout, a.worker, a.incarnation)) {
                    const auto lane = static_cast<std::size_t>(a.ticket.lane);
                    if (lane >= p->lanes.size()) p->lanes.resize(lane + 1);
                    p->running += p->lanes[lane] == ticket{};
                    p->lanes[lane] = a.ticket;
                    watch(*p);
                }
                [[fallthrough]];
            case action::kind::abort:
            case action::kind::park:
                post(stage::rollout, a.worker, work_.command(a));
                break;
            case action::kind::score: {
                const command c = work_.command(a);
                if (peer* p = of_life(stage::teacher, a.worker, a.incarnation)) {
                    p->calls.push_back({c.job, c.tickets});
                    watch(*p);
                }
                post(stage::teacher, a.worker, c);
                break;
            }
            case action::kind::train: {
                const command c = work_.command(a);
                if (peer* p = of_life(stage::learner, a.worker, a.incarnation)) {
                    const auto all = work_.actions().of(a);
                    p->calls.push_back({a.job, {all.begin(), all.end()}});
                    watch(*p);
                }
                post(stage::learner, a.worker, c);
                break;
            }
            case action::kind::sync: {
                command c = work_.command(a);
                const auto all = static_cast<std::int32_t>(sessions_[0].size());
                for (std::int32_t w = std::max(a.worker, 0); w < (a.worker < 0 ? all : a.worker + 1); ++w) {
                    if (!work_.scheduler().is_up(stage::rollout, w)) continue;
                    c.life = work_.scheduler().incarnation_of(stage::rollout, w);
                    post(stage::rollout, w, c);
                }
                break;
            }
            case action::kind::lost:
                if (peer* p = of_life(a.stage, a.worker, a.incarnation)) end(*p, counts_.overdue, false);
                break;
            case action::kind::step:
                ++steps_;
                if constexpr (requires { hooks_.step(a, work_.actions().consumed_by(a), work_.payloads()); })
                    hooks_.step(a, work_.actions().consumed_by(a), work_.payloads());
                break;
            case action::kind::fail:
                if constexpr (requires { hooks_.failed(a); }) hooks_.failed(a);
                break;
            case action::kind::finished:
                for (auto& stage : sessions_)
                    for (peer* p : stage)
                        if (p) post(p->stage, p->number, command{.life = p->life}); // halt
                break;
            }
        } catch (...) {
            fail();
        }
    }
    void carried_out() {
        if (steps_ == 0 || (steps_ < options_.save_every && !work_.scheduler().finished())) return;
        steps_ = 0;
        try {
            save();
        } catch (...) {
            fail();
        }
    }
    // Its attempt has failed, as the dispatcher has it.
    void refused(std::exception_ptr e) {
        try {
            std::rethrow_exception(e);
        } catch (const invalid_input& x) {
            ++counts_.unfit;
            said(*speaker_, x.what());
        } catch (...) {
            fail();
        }
    }
    peer* of_life(stage s, std::int32_t worker, incarnation_t life) const {
        peer* p = session(s, worker);
        return p && p->life == life ? p : nullptr;
    }
    void post(stage s, std::int32_t worker, const command& c) {
        peer* p = of_life(s, worker, c.life);
        if (!p) return; // its session has ended, and the scheduler will hear so
        out_.bytes.clear();
        out_(remote_word::content, c);
        p->link.post(out_.bytes);
        if (p->link.clogged()) end(*p, counts_.clogged);
    }
    void save() {
        if constexpr (requires(const snapshot_type& s) { hooks_.save(s); })
            if (options_.save_every > 0) hooks_.save(work_.snapshot());
        const std::uint64_t from = work_.scheduler().needed_from();
        if (from == kept_from_) return;
        kept_from_ = from;
        if (peer* p = session(stage::learner, 0)) tell_kept(*p);
    }
    void tell_kept(peer& p) {
        out_.bytes.clear();
        out_(remote_word::keep_from, kept_from_);
        p.link.post(out_.bytes);
    }

    remote_options options_;
    std::uint64_t epoch_;
    Transport& transport_;
    Hooks& hooks_;
    dispatcher<belt_type, Scheduler> work_;
    double now_ = -forever;
    double finished_at_ = -forever;
    std::unordered_map<std::string, std::unique_ptr<peer>> peers_;
    std::array<std::vector<peer*>, stage_count> sessions_;      // by number; null: none
    std::array<std::vector<incarnation_t>, stage_count> lives_; // the latest that were given out
    std::deque<event> downs_;
    std::vector<peer*> emptied_;
    archive_writer out_;
    std::uint64_t kept_from_ = 0;
    std::int32_t steps_ = 0;    // since the last snapshot
    std::exception_ptr failed_; // in the middle of an event: thrown at its end
    peer* speaker_ = nullptr;   // whose word the scheduler hears
    remote_counts counts_;
};

} // namespace opd::sched
