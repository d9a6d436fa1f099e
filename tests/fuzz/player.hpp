// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A scheduler and everybody who owes it an answer, in words that also fit a scheduler which was restored from nonsense:
// whatever is asked for is answered, or not, in any order; workers come and go. After every event the invariants hold.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "fuzz/input.hpp"
#include "opd/sched/scheduler_checks.hpp"

namespace opd::fuzz {

/// Choices that follow from a seed.
class random_choices {
public:
    explicit random_choices(std::uint64_t seed) : numbers_(seed) {}
    std::int64_t below(std::int64_t n) { return numbers_.below(n); }
    bool once_in(std::int64_t n) { return below(n) == n - 1; }
    bool done() const { return false; }

private:
    numbers numbers_;
};

inline void need_invariants(const sched::scheduler& s, const char* when) {
    try {
        s.check_invariants();
    } catch (const std::logic_error& e) {
        fail(std::string(when) + e.what());
    }
}

class player {
public:
    explicit player(const sched::settings& o) : s(o) { staff(); }

    sched::scheduler s;

    /// Everybody is there.
    void staff() {
        using sched::event;
        take(event::up(sched::stage::learner, 0));
        take(event::up(sched::stage::teacher, 0));
        take(event::up(sched::stage::rollout, 0, 3));
        take(event::up(sched::stage::rollout, 1, 1));
    }
    /// Another scheduler in its place. `crash`: of another process, to which nobody owes anything.
    template <class Choices>
    void replace(sched::scheduler other, bool crash, Choices& c) {
        s = std::move(other);
        if (!crash) return;
        owed_.clear();
        s.abandon_workers(c.below(2) != 0, c.below(2) != 0);
        need_invariants(s, "after abandon_workers: ");
        staff();
    }
    /// One event. False: nothing is owed, and nothing else was chosen.
    template <class Choices>
    bool step(Choices& c) {
        using sched::event;
        const auto outside = c.below(16);
        if (outside == 15) {
            from_outside(c);
            return true;
        }
        if (outside == 14 && s.next_deadline() < sched::forever) {
            now_ = std::max(now_, s.next_deadline());
            return take(event::of(event::kind::tick)), true;
        }
        if (owed_.empty()) return false;
        const auto at = static_cast<std::size_t>(outside < 8 ? 0 : c.below(static_cast<std::int64_t>(owed_.size())));
        const promise p = owed_[at];
        const bool well = !c.once_in(8), twice = c.once_in(32);
        if (!twice) owed_.erase(owed_.begin() + static_cast<std::ptrdiff_t>(at));
        using kind = sched::action::kind;
        switch (p.what.what) {
        case kind::start: {
            const auto v = p.what.version, start = std::min(v, start_of(p.what.ticket));
            const auto tokens = static_cast<std::int64_t>(c.below(8)); // it may have had more when it was parked last
            if (!well)
                take(event::rollout_failed(p.what.ticket));
            else if (c.once_in(8))
                take(event::parked(p.what.ticket, {start, v, double(v), tokens}));
            else if (c.below(2) == 0 || !take(event::rolled_out(p.what.ticket, {start, v + 1, double(v), 7})))
                take(event::rolled_out(p.what.ticket, {start, v, double(v), 7}));
            break;
        }
        case kind::abort:
            take(event::aborted(p.what.ticket));
            break;
        case kind::park:
            take(event::parked(p.what.ticket, {p.what.version, p.what.version, 0, 0}));
            break;
        case kind::score:
            if (c.once_in(8)) take(event::payload_lost(std::span(p.tickets).first(1), p.what.job));
            if (well)
                answer(p, event::scored(p.what.job, p.what.worker));
            else if (p.tickets.size() > 1)
                answer(p, event::scored(p.what.job, p.what.worker, std::span(p.tickets).first(1)));
            else
                answer(p, event::score_failed(p.what.job, p.what.worker));
            break;
        case kind::train:
            if (!p.tickets.empty() && c.once_in(8)) take(event::payload_lost(p.tickets, p.what.job));
            answer(p, well ? event::learned(p.what.job) : event::learn_failed(p.what.job));
            break;
        case kind::sync:
            if (p.what.worker >= 0)
                take(event::synced(p.what.worker, p.what.job).of_life(p.what.incarnation));
            else
                for (std::int32_t w = 0; w < 3; ++w) take(event::synced(w, p.what.job));
            if (c.once_in(8)) take(event::weights_lost(p.what.job));
            break;
        default:
            break;
        }
        return true;
    }

private:
    struct promise {
        sched::action what;
        std::vector<sched::ticket> tickets;
    };
    sched::version_t start_of(const sched::ticket& t) const {
        try {
            return s.start_of(t);
        } catch (const invalid_input&) {
            return t.attempt;
        }
    }
    template <class Choices>
    void from_outside(Choices& c) {
        using sched::event;
        const auto which = static_cast<sched::stage>(c.below(3));
        const auto worker = static_cast<std::int32_t>(c.below(3)), slots = static_cast<std::int32_t>(c.below(4));
        switch (c.below(9)) {
        case 8:
            if (!owed_.empty()) take(event::park(owed_[0].what.ticket));
            break;
        case 0:
        case 1:
        case 2:
            take(event::up(which, worker, slots));
            break;
        case 3:
            take(event::down(which, worker));
            break;
        case 4:
            take(event::of(event::kind::pause));
            take(event::of(event::kind::resume));
            break;
        case 5:
            take(event::of(event::kind::resize, 1 + c.below(12)));
            break;
        case 6:
            take(event::of(c.once_in(4) ? event::kind::pause : event::kind::resume));
            break;
        default:
            if (c.once_in(16)) take(event::of(c.below(2) != 0 ? event::kind::stop : event::kind::close));
        }
    }
    void answer(const promise& p, const sched::event& e) { take(e.of_life(p.what.incarnation)); }
    /// An event of no life is one of the present life; a worker that comes begins its next.
    bool take(sched::event e) {
        if (e.from_worker() && e.incarnation == 0) {
            const bool comes = e.what == sched::event::kind::worker_up && !s.is_up(e.stage, e.worker);
            e.incarnation = std::max<sched::incarnation_t>(1, s.incarnation_of(e.stage, e.worker) + comes);
        }
        sched::actions out;
        try {
            s.on(e, now_ += 0.125, out);
        } catch (const invalid_input&) { // an event that nobody could mean
            return false;
        }
        need_invariants(s, "after an event: ");
        for (const sched::action& a : out.items) {
            owed_.push_back({a, {}});
            if (a.what != sched::action::kind::score) continue;
            const auto tickets = out.of(a);
            owed_.back().tickets.assign(tickets.begin(), tickets.end());
        }
        return true;
    }
    double now_ = 0;
    std::vector<promise> owed_;
};

/// Schedules of every kind, every policy and every weight update, of a few sequences each.
inline std::vector<sched::settings> small_schedules() {
    using namespace sched;
    std::vector<settings> all;
    const auto add = [&](const sched::schedule& how, index_t group = 1) {
        settings s;
        s.batch = 2;
        s.schedule = how;
        s.group = group;
        s.sequences = 24;
        s.teacher_batch = 2;
        s.rollout_deadline = s.abort_deadline = s.teacher_deadline = s.learner_deadline = s.sync_deadline = 9;
        all.push_back(s);
    };
    add(sync{}), add(step_off{1}), add(step_off{2}, 2), add(controlled{1});
    for (int p = 0; p <= static_cast<int>(last_of(staleness_policy{})); ++p)
        for (int u = 0; u <= static_cast<int>(last_of(weight_update{})); ++u) {
            async a{.tau = 2, .policy = static_cast<staleness_policy>(p), .update = static_cast<weight_update>(u)};
            a.negative_control = true;
            if (a.policy == staleness_policy::areal && u == 1) a.concurrency = 3;
            add(a, u == 2 ? 2 : 1);
        }
    return all;
}

/// Schedulers in the middle of runs.
struct moment {
    sched::settings how;
    player then;
    std::string bytes; // the snapshot's, without its seal
};
inline const std::vector<moment>& moments() {
    static const std::vector<moment> all = [] {
        std::vector<moment> r;
        std::uint64_t seed = 0;
        for (const sched::settings& how : small_schedules())
            for (int run = 0; run < 3; ++run) {
                player p(how);
                random_choices c(++seed);
                for (int event = 0; event < 60; ++event) {
                    if (event % 12 == 0) r.push_back({how, p, std::string(sched::unseal(p.s.snapshot()))});
                    p.step(c);
                }
            }
        return r;
    }();
    return all;
}

} // namespace opd::fuzz
