// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Where the generated tokens of a run ended, and what idle rollout workers would have drawn. An observer
// (observer.hpp) of thread_driver and virtual_driver:
//
//   brought + generated = learnt + discarded + lost + outstanding                    exactly, after every event
//
//   generated    response tokens that attempts have drawn, counted when an attempt ends: rolled out, parked, or said by
//                drawn(). A prefix that an attempt goes on from was counted before
//   learnt       of sequences that an update has consumed
//   discarded    by the rules: too stale (drop, retry), or begun anew because the weights changed (abort, finish-first)
//   lost         by faults: of attempts that failed, missed their deadline, were answered too late or ended with their
//                worker; of sequences whose payloads were lost, or that were given up after too many faults
//   outstanding  complete responses and prefixes that no update has consumed yet, and what a stop gave up
//   brought      what a resumed run began with
//   regenerated  of discarded and lost: those whose sequence was started again
//   unreported   attempts that ended without a word of what they had drawn: in no other figure
//
//   idle tokens = idle worker-seconds · generated / busy worker-seconds
//
// A worker is idle while it is there and runs no sequence; spare work is idle time. Memory: a table by slot, and an
// entry for each attempt that is running or never told of.
//
// Source: the ledger of marin#8936 (generated = consumed + stale + discarded at the end); lost, regenerated and idle
// are ours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/sched/events.hpp"
#include "opd/sched/meters/measures.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What a token_ledger has counted, in tokens.
struct token_totals {
    std::int64_t generated = 0, brought = 0, learnt = 0, discarded = 0, lost = 0, outstanding = 0;
    std::int64_t regenerated = 0; ///< of discarded and lost
    std::int64_t unreported = 0;  ///< attempts
    double busy_seconds = 0, idle_seconds = 0;

    /// Generated in a busy worker-second; none: nobody was busy.
    std::optional<double> rate() const { return detail::ratio(double(generated), busy_seconds); }
    std::optional<double> idle_tokens() const {
        return rate() ? std::optional<double>(idle_seconds * *rate()) : std::nullopt;
    }
    /// Of all that there was to learn from.
    std::optional<double> share(std::int64_t tokens) const {
        return detail::ratio(double(tokens), double(generated + brought));
    }

    /// Those of a run that went on in another process, which begins with what is outstanding: what it did not bring is
    /// lost.
    token_totals then(const token_totals& next) const {
        token_totals r = next;
        r.generated += generated, r.learnt += learnt, r.discarded += discarded;
        r.brought = brought, r.lost += lost + outstanding - next.brought;
        r.regenerated += regenerated, r.unreported += unreported;
        r.busy_seconds += busy_seconds, r.idle_seconds += idle_seconds;
        return r;
    }
    template <class A>
    void fields(A& a) {
        a(generated, brought, learnt, discarded, lost, outstanding, regenerated, unreported, busy_seconds,
          idle_seconds);
    }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("generated", generated), visit("brought", brought), visit("learnt", learnt);
        visit("discarded", discarded), visit("lost", lost), visit("outstanding", outstanding);
        visit("regenerated", regenerated), visit("unreported_attempts", unreported);
        visit("learnt_share", share(learnt)), visit("tokens_per_busy_second", rate());
        visit("busy_seconds", busy_seconds), visit("idle_seconds", idle_seconds), visit("idle_tokens", idle_tokens());
    }
};

/// Not thread-safe; drivers call an observer from one thread at a time.
class token_ledger {
public:
    void up(stage s, std::int32_t worker, double t) {
        if (s == stage::rollout) set(worker, t, true, false);
    }
    void down(stage s, std::int32_t worker, double t) {
        if (s == stage::rollout) set(worker, t, false, false);
    }
    void begin(stage s, std::int32_t worker, double t, activity what) {
        if (s == stage::rollout && what == activity::work) set(worker, t, true, true);
    }
    void end(stage s, std::int32_t worker, double t, activity what) {
        if (s == stage::rollout && what == activity::work) set(worker, t, true, false);
    }
    /// Idle and busy time are as of then.
    void observe(double t) { clock_.advance(t); }

    /// `tokens`: of the attempt's response, its prefix included. Of an attempt that was told of before: nothing.
    void drawn(const ticket& t, std::int64_t tokens, double time) {
        clock_.advance(time);
        const auto at = attempts_.find({t.sample, t.attempt});
        if (at == attempts_.end()) return;
        const attempt a = at->second;
        attempts_.erase(at);
        throw_away(t, a, generate(a, tokens));
    }

    /// The run ends while this attempt runs, having drawn so many: they are outstanding.
    void under_way(const ticket& t, std::int64_t tokens, double time) {
        if (const auto at = attempts_.find({t.sample, t.attempt}); at != attempts_.end())
            if (at->second.end == fate::running) at->second.end = fate::stopped;
        drawn(t, tokens, time);
    }

    template <class Scheduler>
    void event(double t, const sched::event& e, const actions& out, const Scheduler& now) {
        clock_.advance(t);
        if (!std::exchange(any_, true)) begin_with(now);
        answer(e, out, now);
        if (e.what == sched::event::kind::payload_lost)
            now.for_each([&](const auto& q) {
                held* h = q.where == place::rollout ? nullptr : find(q.ticket);
                if (h && h->tokens > 0 && now.versions_of(q.ticket).tokens == 0 && names(e, q.ticket.sample))
                    forget(*h, fate::lost);
            });
        if (const std::int64_t n = now.totals().restarts; n != restarts_) {
            restarts_ = n;
            now.for_each([&](const auto& q) {
                if (held* h = find(q.ticket); h && h->tokens > 0 && now.versions_of(q.ticket).tokens == 0)
                    forget(*h, fate::discarded);
            });
        }
        for (const action& a : out.items) switch (a.what) {
            case action::kind::start:
                start(t, a.ticket, out, now);
                break;
            case action::kind::abort: {
                const auto at = attempts_.find({a.ticket.sample, a.ticket.attempt});
                if (at == attempts_.end()) break;
                const double limit = now.options().rollout_deadline;
                at->second.end = limit > 0 && t >= at->second.since + limit ? fate::lost : fate::discarded;
                break;
            }
            case action::kind::fail:
                fail(a);
                break;
            case action::kind::step:
                for (const consumed_sequence& s : out.consumed_by(a)) consume(s);
                break;
            default:
                break;
            }
    }

    token_totals totals() const {
        token_totals r = totals_;
        r.busy_seconds = busy_.upto(clock_.now());
        r.idle_seconds = std::max(0.0, present_.upto(clock_.now()) - r.busy_seconds);
        return r;
    }
    template <class Visit>
    void describe(Visit&& visit) const {
        totals().describe(visit);
    }

private:
    enum class fate : std::uint8_t { running, discarded, lost, stopped };
    struct attempt {
        std::int64_t from = 0; // tokens of its prefix
        double since = 0;
        fate end = fate::running;
        bool again = false; // its sequence was started again
    };
    struct held { // by slot: what is kept of its sequence, and what was thrown away since its latest start
        bool used = false;
        sample_t sample = 0;
        std::int64_t tokens = 0, thrown = 0;
    };

    static bool names(const sched::event& e, sample_t n) {
        return (e.tickets.empty() && e.ticket.sample == n) ||
               std::any_of(e.tickets.begin(), e.tickets.end(), [&](const ticket& t) { return t.sample == n; });
    }
    held* find(const ticket& t) {
        if (t.slot >= held_.size() || !held_[t.slot].used || held_[t.slot].sample != t.sample) return nullptr;
        return &held_[t.slot];
    }
    held& at(const ticket& t) {
        if (t.slot >= held_.size()) held_.resize(t.slot + std::size_t{1});
        held& h = held_[t.slot];
        if (!h.used || h.sample != t.sample) {
            forget(h, fate::lost); // nothing, if the scheduler said what became of it
            h = {true, t.sample, 0, 0};
        }
        return h;
    }
    void keep(held& h, std::int64_t tokens) {
        totals_.outstanding += tokens - h.tokens;
        h.tokens = tokens;
    }
    void count(fate f, std::int64_t tokens) {
        (f == fate::stopped ? totals_.outstanding : f == fate::discarded ? totals_.discarded : totals_.lost) += tokens;
    }
    void forget(held& h, fate f) {
        count(f, h.tokens);
        h.thrown += h.tokens;
        keep(h, 0);
    }
    std::int64_t generate(const attempt& a, std::int64_t tokens) {
        const std::int64_t n = std::max<std::int64_t>(0, tokens - a.from);
        totals_.generated += n;
        return n;
    }
    void throw_away(const ticket& t, const attempt& a, std::int64_t tokens) {
        count(a.end, tokens);
        if (a.again)
            totals_.regenerated += tokens;
        else if (held* h = find(t))
            h->thrown += tokens;
    }

    /// Tokens of what is outstanding already, as of a resumed run.
    template <class Scheduler>
    void begin_with(const Scheduler& now) {
        now.for_each([&](const auto& q) {
            const std::int64_t tokens = now.versions_of(q.ticket).tokens;
            if (tokens == 0) return;
            totals_.brought += tokens;
            keep(at(q.ticket), tokens);
        });
    }
    template <class Scheduler>
    void answer(const sched::event& e, const actions& out, const Scheduler& now) {
        using kind = sched::event::kind;
        if (e.what < kind::rolled_out || e.what > kind::parked) return;
        const auto at = attempts_.find({e.ticket.sample, e.ticket.attempt});
        if (at == attempts_.end()) return; // told before
        attempt a = at->second;
        attempts_.erase(at);
        if (e.what == kind::rollout_failed || e.what == kind::aborted) {
            ++totals_.unreported;
            return;
        }
        const std::int64_t n = generate(a, e.versions.tokens);
        const auto lost_now = [&] { // with something else, by what was due when it was heard
            return std::any_of(out.items.begin(), out.items.end(), [&](const action& x) {
                return x.what == action::kind::lost && x.stage == stage::rollout && x.worker == e.worker &&
                       x.incarnation == e.incarnation;
            });
        };
        const bool lives =
            (now.is_up(stage::rollout, e.worker) && now.incarnation_of(stage::rollout, e.worker) == e.incarnation) ||
            lost_now();
        held* h = find(e.ticket);
        if (h && lives && a.end == fate::running)
            keep(*h, h->tokens + n);
        else
            throw_away(e.ticket, a, n);
    }
    template <class Scheduler>
    void start(double t, const ticket& which, const actions& out, const Scheduler& now) {
        held& h = at(which);
        const auto gone = [&] {
            return std::any_of(out.items.begin(), out.items.end(), [&](const action& x) {
                return x.what == action::kind::fail && x.ticket.sample == which.sample;
            });
        };
        if (h.tokens > 0 && !gone() && now.versions_of(which).tokens == 0) forget(h, fate::lost); // with its scheduler
        totals_.regenerated += std::exchange(h.thrown, 0);
        for (auto a = attempts_.lower_bound({which.sample, 0}); a != attempts_.end() && a->first.first == which.sample;
             ++a)
            a->second.again = true;
        attempts_[{which.sample, which.attempt}] = {h.tokens, t, fate::running, false};
    }
    void fail(const action& a) {
        const fate f = a.why == failure::stale     ? fate::discarded
                       : a.why == failure::stopped ? fate::stopped
                                                   : fate::lost;
        const auto at = attempts_.find({a.ticket.sample, a.ticket.attempt});
        if (at != attempts_.end()) at->second.end = f;
        if (held* h = find(a.ticket)) {
            forget(*h, f);
            *h = {};
        }
    }
    void consume(const consumed_sequence& s) {
        held& h = at(s.ticket);
        const std::int64_t unknown = s.versions.tokens - h.tokens; // of before the first event that we heard
        totals_.brought += unknown;
        totals_.learnt += s.versions.tokens;
        keep(h, 0);
        h = {};
    }

    void set(std::int32_t worker, double t, bool is_there, bool is_busy) {
        const double now = clock_.advance(t);
        const auto at = workers_.find(worker);
        const bool was_there = at != workers_.end(), was_busy = was_there && at->second;
        present_.set(present_.level() + int(is_there) - int(was_there), now);
        busy_.set(busy_.level() + int(is_busy) - int(was_busy), now);
        if (is_there)
            workers_[worker] = is_busy;
        else if (was_there)
            workers_.erase(at);
    }

    token_totals totals_;
    std::vector<held> held_;
    std::map<std::pair<sample_t, std::uint32_t>, attempt> attempts_; // by sample and number
    std::map<std::int32_t, bool> workers_;                           // that are there; whether they are busy
    detail::time_integral present_, busy_;
    detail::meter_clock clock_;
    std::int64_t restarts_ = 0;
    bool any_ = false;
};

} // namespace opd::sched
