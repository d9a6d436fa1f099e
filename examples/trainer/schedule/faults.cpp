// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "schedule/faults.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace trainer {

namespace sched = opd::sched;

namespace {

std::chrono::steady_clock::duration duration(double seconds) {
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

// Until it is told to stop, or so long.
void rest(double seconds, std::stop_token stop) {
    std::mutex mutex;
    std::condition_variable_any any;
    std::unique_lock lock(mutex);
    any.wait_for(lock, stop, duration(std::min(seconds, 1e6)), [] { return false; });
}

[[noreturn]] void never(std::stop_token stop) {
    while (!stop.stop_requested()) rest(1e6, stop);
    throw std::runtime_error("dropped on purpose"); // nobody listens: it was asked to stop
}

} // namespace

reaper::reaper(const fault_plan& p, change kill, change revive)
    : plan(p), kill_(std::move(kill)), revive_(std::move(revive)), clock_([this](std::stop_token s) { wake(s); }) {}

void reaper::kill(sched::stage s, std::int32_t worker) {
    kill_(s, worker);
    const std::lock_guard lock(mutex_);
    dead_.push({std::chrono::steady_clock::now() + duration(plan.seconds), s, worker});
    any_.notify_all();
}

void reaper::stop() {
    clock_.request_stop();
    if (clock_.joinable()) clock_.join();
}

void reaper::wake(std::stop_token stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
        if (dead_.empty()) {
            any_.wait(lock, stop, [&] { return !dead_.empty(); });
            continue;
        }
        const due next = dead_.top();
        if (std::chrono::steady_clock::now() < next.when) {
            any_.wait_until(lock, stop, next.when, [&] { return dead_.top().when < next.when; });
            continue;
        }
        dead_.pop();
        lock.unlock();
        revive_(next.stage, next.worker);
        lock.lock();
    }
}

void unreliable_rollout::start(const sched::ticket& t, std::shared_ptr<const trajectory> prefix) {
    const auto what =
        faults_ ? faults_->plan.of(sched::stage::rollout, t.sample, t.attempt).what : fault_plan::kind::none;
    if (what == fault_plan::kind::drop) return silent_.push_back(t);
    dies_ |= what == fault_plan::kind::kill;
    dawdles_ |= what == fault_plan::kind::delay;
    rollout_stage::start(t, std::move(prefix));
}

void unreliable_rollout::abort(const sched::ticket& t) {
    if (std::erase(silent_, t) == 0) rollout_stage::abort(t);
}

void unreliable_rollout::install(const sched::weights& w) {
    dies_ = dawdles_ = false; // in another life, or under other weights
    rollout_stage::install(w);
}

rollout_work unreliable_rollout::step(std::vector<sched::finished_rollout<trajectory>>& out, std::stop_token stop) {
    if (std::exchange(dies_, false)) faults_->kill(sched::stage::rollout, worker_);
    if (std::exchange(dawdles_, false)) rest(faults_->plan.seconds, stop);
    if (stop.stop_requested() || rollout_stage::running() == 0) { // the dead, and who waits for what will never come
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return {};
    }
    return rollout_stage::step(out, stop);
}

std::vector<std::shared_ptr<const scored_sequence>>
unreliable_teacher::score(std::span<const std::shared_ptr<const trajectory>> trajectories, std::stop_token stop) {
    if (faults_) {
        const auto number = static_cast<std::uint64_t>(worker_) << 32 | calls_++;
        switch (faults_->plan.of(sched::stage::teacher, number, 0).what) {
        case fault_plan::kind::none:
            break;
        case fault_plan::kind::kill:
            faults_->kill(sched::stage::teacher, worker_);
            never(stop); // which it is asked to
        case fault_plan::kind::delay:
            rest(faults_->plan.seconds, stop);
            break;
        case fault_plan::kind::drop:
            never(stop);
        }
    }
    return teacher_stage::score(trajectories, stop);
}

index_t unreliable_learner::train(std::span<const sched::sequence_view<trajectory, scored_sequence>> sequences,
                                  const sched::train_call& call, std::stop_token stop) {
    const auto drawn = faults_ ? faults_->plan.of(sched::stage::learner, call.job, 0) : fault_plan::drawn{};
    const bool before = drawn.part < 0.5; // or after it has learnt and published
    const auto fault = [&] {
        if (drawn.what == fault_plan::kind::kill) {
            faults_->kill(sched::stage::learner, 0);
            never(stop);
        }
        if (drawn.what == fault_plan::kind::drop) never(stop);
        if (drawn.what == fault_plan::kind::delay) rest(faults_->plan.seconds, stop);
    };
    if (before) fault();
    const index_t updates = real_->train(sequences, call, stop);
    if (!before) fault();
    return updates;
}

} // namespace trainer
