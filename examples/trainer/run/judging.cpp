// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A run's looks at its models: evaluations of teacher and student, and those of the student on the way.
#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "pipeline/sampling.hpp"
#include "run/run.hpp"

namespace trainer {

namespace {

constexpr std::uint64_t evaluation_samples = std::uint64_t{8} << 56; // apart from those of a stage

std::vector<problem> held_out(const any_task& task, std::size_t most) {
    std::vector<problem> r;
    for (std::size_t i = 0; i < std::min(most, task.held_out_problems()); ++i) r.push_back(task.held_out_problem(i));
    return r;
}

} // namespace

// How good the student is at a step. Distillation goes on meanwhile; in virtual time, where the log is the same every
// time, it waits.
void run::look_at(std::int64_t step, const policy& student) {
    hear_of_look(true);
    looking_ = std::async(std::launch::async, [this, step, student] {
        const double begin = now();
        const auto problems = held_out(*task_, static_cast<std::size_t>(settings_.evaluation.every_prompts));
        auto e = evaluate_model(*student.model, look_backend_.team(), *task_, problems, 0, settings_.run.seed, 0,
                                settings_.distill.slots, speculation_of(settings_));
        if (task_->judged_by_kl() && !without_teacher(settings_))
            e.kl = kl_to_teacher(*student.model, pack(e.responses, 0), look_backend_);
        return look{step, now() - begin, std::move(e)};
    });
    if (in_virtual_time(settings_)) hear_of_look(true);
}

// Writes down what was seen, if it is over.
void run::hear_of_look(bool wait) {
    if (!looking_.valid()) return;
    if (!wait && looking_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
    const look seen = looking_.get();
    seconds_[static_cast<std::size_t>(clock_name::evaluation)] += seen.seconds;
    state_.tokens[static_cast<std::size_t>(clock_name::evaluation)] += seen.student.tokens;
    nlohmann::ordered_json line;
    line["stage"] = name_of(stage::distill);
    line["step"] = seen.step;
    line["accuracy"] = seen.student.accuracy;
    if (task_->judged_by_kl() && !without_teacher(settings_)) line["kl_to_teacher"] = seen.student.kl;
    log_.write(line.dump());
}

// The teacher of --start-from, which judges what a data set or a served teacher has made of its student; or nothing in
// its place.
void run::recall_teacher(bool present) {
    if (!without_teacher(settings_)) return;
    if (!present) {
        teacher_ = no_model();
        return;
    }
    std::string saved;
    run_state other = load_checkpoint(settings_.run.start_from, saved);
    teacher_ = model_of(settings_, *task_, true);
    std::vector<float> weights = scoring_teacher(std::move(other.teacher_weights));
    if (weights.size() != teacher_.weights.size())
        throw failure(exit_input, fmt::format("{}: {} weights for a model of {}", settings_.run.start_from,
                                              weights.size(), teacher_.weights.size()));
    teacher_.weights = std::move(weights);
    teacher_.weights_changed();
}

// Mean KL to the teacher along responses, over the whole vocabulary at each token.
double run::kl_to_teacher(const transformer<float>& model, const row_batch& batch, opd::cpu_backend& backend) {
    std::vector<float> own, teachers;
    teacher_scorer(model, backend).states(batch.inputs, own);
    teacher_scorer(teacher_, backend).states(batch.inputs, teachers);
    return mean_reverse_kl(backend, batch, model, own, teacher_, teachers,
                           static_cast<std::size_t>(settings_.distill.hidden_budget));
}

// The teacher's own responses to the held-out prompts: those of its evaluation, drawn again.
const row_batch& run::teacher_prefixes() {
    if (teacher_prefixes_) return *teacher_prefixes_;
    const auto problems = held_out(*task_, static_cast<std::size_t>(settings_.evaluation.prompts));
    return teacher_prefixes_.emplace(
        pack(evaluate_model(teacher_, backend_.team(), *task_, problems, 0, settings_.run.seed, evaluation_samples,
                            settings_.distill.slots)
                 .responses,
             0));
}

evaluation_result run::evaluate(const transformer<float>& model, const char* who) {
    evaluation_result r;
    const auto problems = held_out(*task_, static_cast<std::size_t>(settings_.evaluation.prompts));
    recall_teacher(true);
    timed(clock_name::evaluation, [&] {
        r = evaluate_model(model, backend_.team(), *task_, problems, settings_.evaluation.samples, settings_.run.seed,
                           evaluation_samples, settings_.distill.slots, speculation_of(settings_, &model.shape));
        r.kl = kl_to_teacher(model, pack(r.responses, 0), backend_);
        if (task_->judged_by_kl()) r.kl_on_teacher = kl_to_teacher(model, teacher_prefixes(), backend_);
    });
    recall_teacher(false);
    state_.tokens[static_cast<std::size_t>(clock_name::evaluation)] += r.tokens;
    std::string samples;
    for (std::size_t i = 0; i < std::min<std::size_t>(20, problems.size()); ++i) {
        const auto response = r.responses[i].response();
        const verdict v = task_->judged(problems[i], response);
        nlohmann::ordered_json line;
        line["prompt"] = task_->written(task_->prompt_tokens(problems[i]));
        line["response"] = task_->written(response);
        line["correct"] = v.correct;
        line["valid_steps"] = v.valid_steps;
        line["steps"] = v.steps;
        samples += line.dump() + "\n";
    }
    write_file(fmt::format("{}/samples/{}.jsonl", directory_, who), samples);
    return r;
}

void run::evaluate_missing() {
    for (const auto& [model, who] : {std::pair{&teacher_, "teacher"}, std::pair{&student_, "before"}})
        if (!evaluations_.contains(who)) evaluations_[who] = to_json(evaluate(*model, who));
}

} // namespace trainer
