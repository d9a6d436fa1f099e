// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/schedule.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "nearest.hpp"
#include "numbers.hpp"
#include "settings/estimator.hpp"
#include "settings/fault_plan.hpp"

namespace trainer {

namespace {

namespace sched = opd::sched;

constexpr std::array<const char*, 4> kinds = {"sync", "step-off", "controlled", "async"};
constexpr std::array updates = {sched::weight_update::keep, sched::weight_update::abort,
                                sched::weight_update::finish_first};

// As the library says it.
opd::index_t outstanding_of(const std::string& text) {
    if (text == "by_policy") return sched::by_policy;
    if (text == "automatic") return sched::automatic;
    if (text == "widest") return sched::widest;
    const auto number = integer_of<int>(text);
    if (!number || *number < 1)
        throw failure(
            exit_usage,
            fmt::format("--outstanding must be by_policy, automatic, widest or a number of sequences, not '{}'", text));
    return *number;
}

// The place of `name` among `names`, or a usage failure that lists them.
std::size_t place_of(const char* flag, const std::string& name, const std::vector<std::string>& names) {
    for (std::size_t i = 0; i < names.size(); ++i)
        if (names[i] == name) return i;
    const std::string near = nearest(name, names);
    throw failure(exit_usage, fmt::format("{}: '{}' is not one of {}{}", flag, name, fmt::join(names, ", "),
                                          near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
}

template <class Array>
std::vector<std::string> names_of(const Array& values) {
    std::vector<std::string> r;
    for (const auto v : values) r.push_back(sched::name_of(v));
    return r;
}

} // namespace

int threads_of(const config& c) {
    return c.run.threads > 0 ? c.run.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int rollout_workers_of(const config& c) {
    const int unset = in_virtual_time(c) ? 4 : threads_of(c); // results in virtual time know of no threads
    const int wanted = c.schedule.rollout_workers > 0 ? c.schedule.rollout_workers : unset;
    return std::min(wanted, c.distill.slots);
}

int teachers_of(const config& c) {
    if (c.schedule.teachers > 0) return c.schedule.teachers;
    if (is_served(c) && !in_virtual_time(c)) return 4; // who wait, and do nothing
    const bool in_turn = c.schedule.kind == "sync" || c.schedule.kind == "controlled";
    return in_turn && !in_virtual_time(c) ? threads_of(c) : 1;
}

int learner_threads_of(const config& c) {
    const bool own = !in_virtual_time(c) && c.schedule.learner_threads > 0;
    return own ? c.schedule.learner_threads : threads_of(c);
}

std::string in_options(const opd::invalid_input& e) {
    static constexpr std::pair<std::string_view, const char*> options[] = {{"batch", "--prompts"},
                                                                           {"group", "--answers"},
                                                                           {"sequences", "--steps"},
                                                                           {"teacher_batch", "--score-batch"},
                                                                           {"teacher_flush", "--score-flush"},
                                                                           {"rollout_attempts", "--attempts"},
                                                                           {"rollout_deadline", "--rollout-deadline"},
                                                                           {"teacher_deadline", "--teacher-deadline"},
                                                                           {"learner_deadline", "--learner-deadline"},
                                                                           {"abort_deadline", "--sync-deadline"},
                                                                           {"schedule.k", "--schedule-k"},
                                                                           {"schedule.tau", "--tau"},
                                                                           {"schedule.outstanding", "--outstanding"},
                                                                           {"schedule.concurrency", "--concurrency"},
                                                                           {"schedule.policy", "--staleness-policy"}};
    const std::string text = e.what();
    for (const auto& [setting, option] : options) // "opd: schedule.tau: must be ..." to "--tau must be ..."
        if (e.argument == setting) return option + text.substr(std::string("opd: :").size() + setting.size());
    return text;
}

std::vector<std::string> advice_on(const config& c, int vocabulary) {
    const auto part = part_estimator_of(c);
    if (!part || sched::plan_of(schedule_of(c)).depth == 0) return {}; // dense, or nothing is stale
    constexpr int small = 4096; // dense logits of the teacher are cheaper than what samples of them lose
    const std::string instead = vocabulary <= small
                                    ? "--estimator reverse_kl (V is small enough for dense logits)"
                                    : "--estimator reverse_kl --teacher-cache hidden, or --estimator threshold";
    std::vector<std::string> r;
    if (*part == part_estimator::topk_rw ||
        ((*part == part_estimator::topk || *part == part_estimator::tail_bucket) && c.distill.topk_from == "student"))
        r.push_back(fmt::format(
            "{} under --schedule {}: the ids are those that the weights of then held "
            "likely; what the student has moved to since lies outside. Better: {}, or {}",
            *part == part_estimator::topk_rw ? "--estimator topk_rw" : "--topk-from student", c.schedule.kind,
            *part == part_estimator::topk_rw ? "--estimator topk --topk-from teacher" : "--topk-from teacher",
            instead));
    else if ((*part == part_estimator::mc || *part == part_estimator::threshold) && vocabulary <= small)
        r.push_back(
            fmt::format("--estimator {} samples {} tokens: its gradient is that of the dense estimator with variance "
                        "on top. Better: {}",
                        c.distill.estimator, vocabulary, instead));
    else if (*part == part_estimator::mc)
        r.push_back(
            "--estimator mc under staleness: --estimator threshold has less variance for as many teacher scores");
    return r;
}

sched::settings schedule_of(const config& c) {
    const auto& s = c.schedule;
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, what);
    };
    for (const auto& [flag, value, least] :
         {std::tuple{"--schedule-k", s.k, 0}, std::tuple{"--tau", s.tau, 0},
          std::tuple{"--concurrency", s.concurrency, 0}, std::tuple{"--park-after", s.park_after, 0},
          std::tuple{"--rollout-workers", s.rollout_workers, 0}, std::tuple{"--teachers", s.teachers, 0},
          std::tuple{"--score-batch", s.score_batch, 0}})
        need(value >= least, fmt::format("{} must be at least {}, not {}", flag, least, value));
    need(s.rollout_workers <= most_threads,
         fmt::format("--rollout-workers must be at most {}, not {}", most_threads, s.rollout_workers));
    need(s.teachers <= most_threads, fmt::format("--teachers must be at most {}, not {}", most_threads, s.teachers));
    need(s.learner_threads >= 0 && s.learner_threads <= most_threads,
         fmt::format("--learner-threads must lie in [0, {}], not {}", most_threads, s.learner_threads));
    need(s.publish == "shared" || s.publish == "deltas",
         fmt::format("--publish must be shared or deltas, not '{}'", s.publish));
    need(s.inject_seconds > 0 && s.inject_seconds <= 1e6,
         fmt::format("--inject-seconds must lie in (0, 1e6], not {}", s.inject_seconds));
    faults_of(c); // names what it refuses
    need(std::isfinite(s.score_flush) && s.score_flush >= 0,
         fmt::format("--score-flush must be at least 0 and finite, not {}", s.score_flush));
    place_of("--driver", s.driver, {"threads", "virtual"});
    for (const auto& [flag, value] :
         {std::pair{"--cost-step", s.cost_step}, std::pair{"--cost-step-row", s.cost_step_row},
          std::pair{"--cost-draft", s.cost_draft}, std::pair{"--cost-draft-row", s.cost_draft_row},
          std::pair{"--cost-adapt", s.cost_adapt}, std::pair{"--cost-adapt-row", s.cost_adapt_row},
          std::pair{"--cost-score", s.cost_score}, std::pair{"--cost-score-row", s.cost_score_row},
          std::pair{"--cost-train", s.cost_train}, std::pair{"--cost-train-row", s.cost_train_row},
          std::pair{"--cost-sync", s.cost_sync}})
        need(value >= 0 && value <= 1e6, fmt::format("{} must lie in [0, 1e6], not {}", flag, value));
    need(s.cost_step + s.cost_step_row >= 1e-12, "--cost-step and --cost-step-row must not both be 0");
    need(s.cost_adapt >= 1e-12, "--cost-adapt must be positive"); // else a slice that was stopped takes no time
    need(c.distill.slots >= s.rollout_workers,
         fmt::format("--slots ({}) must be at least --rollout-workers ({})", c.distill.slots, s.rollout_workers));
    const auto policies = sched::staleness_policies();
    const auto policy = policies[place_of("--staleness-policy", s.staleness_policy, names_of(policies))];
    const auto update = updates[place_of("--weight-update", s.weight_update, names_of(updates))];

    sched::settings r;
    r.batch = batch_of(c);
    r.group = c.distill.answers;
    r.sequences = r.batch * c.distill.steps;
    const opd::index_t share = (r.batch + teachers_of(c) - 1) / teachers_of(c); // of a whole batch
    r.most_slots =
        std::max(r.most_slots, static_cast<std::int32_t>(c.distill.slots)); // its own workers: memory is the limit
    r.teacher_batch = s.score_batch > 0 ? s.score_batch : s.kind == "async" ? 8 : std::min<opd::index_t>(8, share);
    r.teacher_flush = s.score_flush;
    r.rollout_attempts = r.teacher_attempts = s.attempts;
    r.learner_attempts = std::numeric_limits<int>::max() / 4; // it may have learnt from the batch: there is no way back
    r.rollout_deadline = s.rollout_deadline;
    r.abort_deadline = r.sync_deadline = s.sync_deadline;
    r.teacher_deadline = s.teacher_deadline;
    r.learner_deadline = s.learner_deadline;
    switch (place_of("--schedule", s.kind, {kinds.begin(), kinds.end()})) {
    case 0:
        r.schedule = sched::sync{};
        break;
    case 1:
        r.schedule = sched::step_off{s.k};
        break;
    case 2:
        r.schedule = sched::controlled{s.k};
        break;
    default:
        r.schedule = sched::async{.tau = s.tau,
                                  .outstanding = outstanding_of(s.outstanding),
                                  .policy = policy,
                                  .update = update,
                                  .concurrency = s.concurrency};
    }
    try {
        sched::plan_of(r);
    } catch (const opd::invalid_input& e) {
        throw failure(exit_usage, in_options(e));
    }
    return r;
}

} // namespace trainer
