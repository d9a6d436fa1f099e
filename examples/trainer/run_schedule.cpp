// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Distillation with overlapping stages: rollout workers, a teacher and the learner on threads of their own, under the
// library's scheduler.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "in_flight.hpp"
#include "opd/sched/recorder.hpp"
#include "opd/sched/thread_driver.hpp"
#include "run.hpp"
#include "schedule.hpp"
#include "stages.hpp"

namespace trainer {

namespace sched = opd::sched;

void run::distill_on_schedule() {
    using driver_type = sched::thread_driver<rollout_stage, teacher_stage, learner_stage>;
    const sched::settings schedule = schedule_of(settings_);
    const sampling options = sampling_of(settings_, task_);
    const int workers = rollout_workers_of(settings_);
    const index_t lanes = std::max(1, settings_.distill.slots / workers);

    // The learner's thread owns the student, the optimizer, state_ and the logs from here to the end of run().
    learner learn(settings_, student_, state_.student_optimizer, backend_);
    publication weights;
    weights.publish(learn.snapshot(static_cast<std::int32_t>(state_.step)));
    learner_result last;
    index_t last_kept = 0;
    const auto teacher = std::make_shared<teacher_stage>(teacher_, settings_, 1);
    const auto lesson = std::make_shared<learner_stage>(
        settings_, learn, weights, [&](const learner_result& r, const row_batch& batch, sched::version_t) {
            last = r;
            last_kept = batch.kept;
        });

    // What is measured is handed from the driver's lock to the learner's thread by version.
    struct figures {
        std::string line;
        std::array<double, 3> busy;
    };
    std::mutex figures_mutex;
    std::map<sched::version_t, figures> measured;
    sched::run_metrics metrics(sched::recorded({.version = state_.step}));
    sched::trace trace({.first = 20000, .last = 20000});
    sched::recorder recorder(metrics, &trace);
    recorder.prompt_tokens = [this](sched::sample_t) { return task_.prompt_length(); };
    const auto busy = [&] {
        return std::array{metrics.stages.stage_time(sched::stage::rollout),
                          metrics.stages.stage_time(sched::stage::teacher),
                          metrics.stages.stage_time(sched::stage::learner)};
    };
    recorder.after_step = [&](sched::version_t version, double) {
        const bool due = version % settings_.run.log_every == 0 || version == settings_.distill.steps ||
                         (settings_.evaluation.every > 0 && version % settings_.evaluation.every == 0);
        const std::lock_guard lock(figures_mutex);
        measured[version] = {due ? metrics.step_line() : std::string(), busy()};
    };
    const std::array before = {seconds_[static_cast<std::size_t>(clock_name::rollout)],
                               seconds_[static_cast<std::size_t>(clock_name::teacher_scoring)],
                               seconds_[static_cast<std::size_t>(clock_name::learner)]};

    driver_type* running = nullptr;
    bool stopping = false;
    const double begin = now();
    shown_seconds_ = 0;
    shown_step_ = state_.step;
    driver_type::hooks_type hooks;
    hooks.on_step = [&](const driver_type::report_type& report) {
        if (stopping) return;
        figures f;
        {
            const std::lock_guard lock(figures_mutex);
            f = std::move(measured.at(report.version));
            measured.erase(measured.begin(), measured.upper_bound(report.version));
        }
        seconds_[static_cast<std::size_t>(clock_name::rollout)] = before[0] + f.busy[0];
        seconds_[static_cast<std::size_t>(clock_name::teacher_scoring)] = before[1] + f.busy[1];
        seconds_[static_cast<std::size_t>(clock_name::learner)] = before[2] + f.busy[2];
        std::vector<std::uint64_t> sequences;
        for (const auto& s : report.consumed) sequences.push_back(s.ticket.sample);
        state_.next_sample = sample_base() + static_cast<std::uint64_t>(report.totals.admitted);
        distilled(last, last_kept, sequences, now() - begin, f.line);
    };
    hooks.on_checkpoint = [&](in_flight state) {
        if (stopping || state.version == settings_.distill.steps) return;
        if (steps_left_ > 0 && --steps_left_ == 0) interrupted = true;
        const bool leave = interrupted;
        if (leave || state_.step % settings_.run.checkpoint_every == 0) {
            if (leave) progress_.clear();
            state_.in_flight = to_bytes(state);
            save("latest.ckpt");
        }
        if (!leave) return;
        stopping = true;
        running->stop_now();
    };
    const sched::thread_options how{.shutdown_seconds = 120, .stop_on_error = true};
    std::unique_ptr<driver_type> driver;
    if (state_.step > 0) {
        const in_flight from = in_flight_of(state_.in_flight, [&](auto t) { return teacher->score(t); });
        if (from.version != state_.step)
            throw failure(exit_input, fmt::format("the checkpoint's sequences in flight are those of step {}, not {}",
                                                  from.version, state_.step));
        driver = std::make_unique<driver_type>(schedule, from, how, hooks);
    } else {
        driver = std::make_unique<driver_type>(schedule, how, hooks);
    }
    running = driver.get();
    for (int w = 0; w < workers; ++w)
        driver->add_rollout(std::make_shared<rollout_stage>(task_, options, sample_base(), lanes, weights),
                            static_cast<std::int32_t>(lanes));
    driver->add_teacher(teacher);
    driver->set_learner(lesson);
    driver->observe(recorder);
    metrics.start(sched::steady_seconds());
    const sched::run_report report = driver->run();
    if (!report.left_behind.empty()) { // they use what would be destroyed now
        spdlog::error("{} threads did not return", report.left_behind.size());
        std::_Exit(stopping ? exit_interrupted : 1);
    }
    progress_.clear();
    trace.write(directory_ + "/trace.json");
    if (report.first_exception) std::rethrow_exception(report.first_exception);
    if (stopping) return;
    if (!report.completed || state_.step != settings_.distill.steps)
        throw std::runtime_error(fmt::format("distillation ended at step {} of {}: {} sequences were given up",
                                             state_.step, settings_.distill.steps, report.totals.failed));
    write_file(directory_ + "/schedule.json", metrics.summary_line(sched::steady_seconds()) + "\n");
    state_.in_flight.clear();
    evaluations_["after"] = to_json(evaluate(student_, "after"));
    finish_stage(stage::finished);
}

} // namespace trainer
