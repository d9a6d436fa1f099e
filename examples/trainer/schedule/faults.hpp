// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Stages that fail as a fault_plan says: on threads these, which do as they are told before or after they call the
// trainer's own; in virtual time a model that answers what opd/sched/virtual_driver.hpp asks it for.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "schedule/stages.hpp"
#include "settings/fault_plan.hpp"

namespace trainer {

/// Ends workers' lives and begins them again, for stages on threads.
class reaper {
public:
    using change = std::function<void(opd::sched::stage, std::int32_t worker)>;
    reaper(const fault_plan& p, change kill, change revive);
    reaper(const reaper&) = delete;
    reaper& operator=(const reaper&) = delete;

    const fault_plan plan;
    /// From the worker's own thread, too. What it answers afterwards counts for nothing.
    void kill(opd::sched::stage s, std::int32_t worker);
    /// Nobody is revived after this.
    void stop();

private:
    struct due {
        std::chrono::steady_clock::time_point when;
        opd::sched::stage stage;
        std::int32_t worker;
        bool operator<(const due& o) const { return o.when < when; } // the first on top
    };
    void wake(std::stop_token stop);

    change kill_, revive_;
    std::mutex mutex_;
    std::condition_variable_any any_;
    std::priority_queue<due> dead_;
    std::jthread clock_; // the last: it uses the others
};

class unreliable_rollout : public rollout_stage {
public:
    template <class... Args>
    unreliable_rollout(std::int32_t worker, const std::shared_ptr<reaper>& faults, Args&&... args)
        : rollout_stage(std::forward<Args>(args)...), worker_(worker), faults_(faults) {}

    void start(const opd::sched::ticket& t, std::shared_ptr<const trajectory> prefix);
    void abort(const opd::sched::ticket& t);
    void install(const opd::sched::weights& w);
    rollout_work step(std::vector<opd::sched::finished_rollout<trajectory>>& out, std::stop_token stop);
    index_t running() const { return rollout_stage::running() + static_cast<index_t>(silent_.size()); }

private:
    std::int32_t worker_;
    std::shared_ptr<reaper> faults_;         // null: nothing goes wrong
    std::vector<opd::sched::ticket> silent_; // of which nothing will be heard
    bool dies_ = false, dawdles_ = false;
};

class unreliable_teacher : public teacher_stage {
public:
    template <class... Args>
    unreliable_teacher(std::int32_t worker, const std::shared_ptr<reaper>& faults, Args&&... args)
        : teacher_stage(std::forward<Args>(args)...), worker_(worker), faults_(faults) {}

    std::vector<std::shared_ptr<const scored_sequence>>
    score(std::span<const std::shared_ptr<const trajectory>> trajectories, std::stop_token stop);

private:
    std::int32_t worker_;
    std::shared_ptr<reaper> faults_;
    std::uint32_t calls_ = 0;
};

class unreliable_learner {
public:
    unreliable_learner(std::shared_ptr<learner_stage> real, const std::shared_ptr<reaper>& faults)
        : real_(std::move(real)), faults_(faults) {}

    index_t train(std::span<const opd::sched::sequence_view<trajectory, scored_sequence>> sequences,
                  const opd::sched::train_call& call, std::stop_token stop);

private:
    std::shared_ptr<learner_stage> real_;
    std::shared_ptr<reaper> faults_;
};

/// A model for the virtual driver.
template <class Stages>
struct unreliable_stages : Stages {
    template <class... Args>
    explicit unreliable_stages(const fault_plan& p, Args&&... args) : Stages(std::forward<Args>(args)...), plan(p) {}
    fault_plan plan;

    opd::sched::fault rollout_fault(const opd::sched::ticket& t) const {
        return plan.in_virtual_time(opd::sched::stage::rollout, t.sample, t.attempt);
    }
    opd::sched::fault teacher_fault(std::uint64_t job, std::int32_t) const {
        return plan.in_virtual_time(opd::sched::stage::teacher, job, 0);
    }
    opd::sched::fault learner_fault(std::uint64_t job) const {
        return plan.in_virtual_time(opd::sched::stage::learner, job, 0);
    }
    /// Who was given up for a deadline is back after that.
    double recovery(opd::sched::stage, std::int32_t, std::uint32_t) const { return plan.seconds; }
};

} // namespace trainer
