// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The workers of a run in virtual time: who is up, in which life, what it is at, what it installs, and when a rollout
// worker is next to be looked at. Tells the observer of what changes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/indexed_heap.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/virtual_agenda.hpp"

namespace opd::sched::detail {

/// `Engine`: what a rollout worker runs on.
template <class Engine, class Observer>
class virtual_workers {
public:
    struct worker {
        bool up = false, silent = false;
        activity doing = activity::none;
        bool spares = false;    // it is woken for spare work alone
        std::uint32_t life = 0; // counts returns
        std::int32_t slots = 0;
        bool asked = false;           // to install weights, and is not done
        bool installing = false;      // has begun to
        bool superseded = false;      // others have come since
        weights told;                 // which they are
        double since = 0;             // its time
        double back = forever;        // silent: seconds from its loss to its return
        std::optional<Engine> engine; // rollout
        std::vector<ticket> hung;
    };

    Observer* observer = nullptr;

    worker& of(stage s, std::int32_t number) {
        auto& all = workers_[static_cast<std::size_t>(s)];
        if (number < 0) throw invalid_input("worker", "must not be negative");
        if (static_cast<std::size_t>(number) >= all.size()) all.resize(static_cast<std::size_t>(number) + 1);
        return all[static_cast<std::size_t>(number)];
    }
    std::int32_t count(stage s) const {
        return static_cast<std::int32_t>(workers_[static_cast<std::size_t>(s)].size());
    }
    static bool alive(const worker& w, std::uint32_t life) { return w.up && !w.silent && w.life == life; }

    // --- its lives

    /// `engine`: makes one, for a rollout worker that is new.
    template <class Make>
    void come(const event& e, double now, Make&& engine) {
        worker& w = of(e.stage, e.worker);
        w.slots = e.slots;
        if (w.up) return;
        w.up = true;
        w.silent = false;
        ++w.life;
        w.asked = w.installing = w.superseded = false;
        w.since = now;
        w.hung.clear();
        if (e.stage == stage::rollout) w.engine.emplace(engine(e.worker));
        tell(worker_change::up, e.stage, e.worker, now);
    }
    void take_down(stage s, std::int32_t number, double now) {
        silence(s, number, now);
        worker& w = of(s, number);
        w.up = w.silent = false;
        w.engine.reset();
        tell(worker_change::down, s, number, now);
    }
    /// It does nothing any more.
    void silence(stage s, std::int32_t number, double now) {
        worker& w = of(s, number);
        if (s == stage::rollout) {
            wakes_.remove(number);
            count_spare(w, false);
            if (w.doing != activity::none) end(s, number, now, w.doing);
        }
        w.silent = true;
        w.doing = activity::none;
        w.hung.clear();
    }

    // --- what it is at

    void begin(stage s, std::int32_t number, double now, activity what = activity::work) {
        tell(what == activity::spare ? worker_change::begin_spare : worker_change::begin, s, number, now);
    }
    void end(stage s, std::int32_t number, double now, activity what = activity::work) {
        tell(what == activity::spare ? worker_change::end_spare : worker_change::end, s, number, now);
    }
    /// Enters when a rollout worker will next report, and whether it is busy.
    void settle(std::int32_t number, double now, std::uint64_t& next_number) {
        worker& w = of(stage::rollout, number);
        if (!w.up || w.silent) return;
        const double wake = w.installing ? forever : static_cast<double>(w.engine->next());
        if (wake < forever)
            wakes_.set(number, {now + wake, next_number++});
        else
            wakes_.remove(number);
        count_spare(w, wake < forever);
        activity doing = !w.installing && w.engine->running() > 0 ? activity::work : activity::none;
        if constexpr (requires { w.engine->sparing(); })
            if (!w.installing && w.engine->sparing()) doing = activity::spare;
        if (doing == w.doing) return;
        if (w.doing != activity::none) end(stage::rollout, number, now, w.doing);
        w.doing = doing;
        if (doing != activity::none) begin(stage::rollout, number, now, doing);
    }
    /// When one is next to be looked at.
    moment first_wake() const { return wakes_.empty() ? moment{} : wakes_.least(); }
    std::int32_t first_to_wake() const { return wakes_.top(); }
    /// None but for spare work, which nobody waits for.
    bool only_spare() const { return wakes_.size() == spare_wakes_; }

    /// Tells the observer who is there, and busy; of calls the agenda knows.
    void introduce(double now, const agenda& a) {
        for (const stage s : {stage::rollout, stage::teacher, stage::learner})
            for (std::int32_t w = 0; w < count(s); ++w) {
                if (!of(s, w).up) continue;
                tell(worker_change::up, s, w, now);
                if (of(s, w).doing != activity::none) begin(s, w, now, of(s, w).doing);
            }
        a.each([&](const agenda::record& r) {
            if (r.is == agenda::record::kind::job_end && alive(of(r.what.stage, r.what.worker), r.life))
                begin(r.what.stage, r.what.worker, now);
        });
    }

    template <class A, class Make>
    void fields(A& a, Make&& engine) {
        for (int s = 0; s < stage_count; ++s) {
            std::int32_t number = 0;
            list_fields(a, workers_[static_cast<std::size_t>(s)], [&](worker& w) {
                const std::int32_t i = number++;
                a(w.up, w.silent, w.doing, w.life, w.slots, w.asked, w.installing, w.superseded, w.told, w.since,
                  w.back);
                a(w.hung);
                needs(w.slots >= 0 && w.slots < most_virtual_workers, "a worker's count is none");
                if (!w.up || static_cast<stage>(s) != stage::rollout) return;
                const moment* known = wakes_.find(i);
                moment wake = known ? *known : moment{};
                a(wake);
                if constexpr (A::reading) {
                    if (!w.silent && wake.time < forever) wakes_.set(i, wake);
                    w.engine.emplace(engine(i));
                }
                if constexpr (requires { w.engine->fields(a); })
                    w.engine->fields(a);
                else
                    throw std::logic_error("opd: this rollout worker has no fields(): its driver has no snapshots");
                if constexpr (A::reading) count_spare(w, wakes_.find(i) != nullptr);
            });
        }
    }

private:
    void tell(worker_change what, stage s, std::int32_t number, double now) {
        if (observer) detail::tell(*observer, what, s, number, now);
    }
    void count_spare(worker& w, bool woken) {
        bool spares = false;
        if constexpr (requires { w.engine->spares(); }) spares = woken && w.engine->spares();
        spare_wakes_ += static_cast<index_t>(spares) - static_cast<index_t>(std::exchange(w.spares, spares));
    }

    std::array<std::vector<worker>, stage_count> workers_;
    indexed_heap<moment> wakes_;
    index_t spare_wakes_ = 0; // of those
};

} // namespace opd::sched::detail
