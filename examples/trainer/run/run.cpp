// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/run.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "describe_json.hpp"
#include "opd/ratio_sketch.hpp"
#include "opd/sched/metrics.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/served.hpp"
#include "run/offline.hpp"
#include "schedule/stages.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"
#include "task/grammar_task.hpp"

namespace trainer {

std::atomic<bool> interrupted{false};

config with_task_shapes(config c, const any_task& task) {
    for (model_shape* m : {&c.teacher_model, &c.student_model}) {
        m->vocabulary = std::max(c.task.vocabulary, task.vocabulary());
        m->max_length = task.max_length();
    }
    return c;
}

transformer<float> model_of(const config& c, const any_task& task, bool teacher) {
    const config shaped = with_task_shapes(c, task);
    return with_memory_for(fmt::format("the {} model: {}_model.width, .layers, .heads, .head_dim and .ffn set its size",
                                       teacher ? "teacher" : "student", teacher ? "teacher" : "student"),
                           [&] { return transformer<float>(teacher ? shaped.teacher_model : shaped.student_model); });
}

transformer<float> no_model() {
    return transformer<float>({.vocabulary = 1,
                               .width = 2,
                               .layers = 1,
                               .heads = 1,
                               .kv_heads = 1,
                               .head_dim = 2,
                               .ffn = 1,
                               .max_length = 1});
}

std::unique_ptr<const any_task> task_of(const config& c) {
    try {
        if (c.task.kind == "grammar") return std::make_unique<grammar_task>(c.task.max_words, c.task.held_out_one_in);
        return std::make_unique<gcd_task>(c.task.max_operand, c.task.max_steps, c.task.held_out_one_in);
    } catch (const std::invalid_argument& e) {
        throw failure(exit_usage, e.what());
    }
}

namespace {

// The figures of docs/estimators/corrections.md; shares and means over the tokens of a step.
nlohmann::ordered_json described(const opd::mismatch& m) {
    const auto ratio = [](const opd::ratio_figures& r) {
        return nlohmann::ordered_json{{"k1", r.k1()},
                                      {"k2", r.k2()},
                                      {"k3", r.k3()},
                                      {"contribution_positive", r.contribution(true)},
                                      {"contribution_negative", r.contribution(false)}};
    };
    nlohmann::ordered_json j;
    j["tokens"] = m.delta.tokens;
    j["delta_mean"] = m.delta.mean();
    j["delta_abs_mean"] = m.delta.abs_mean();
    j["delta_max"] = m.delta.abs_max;
    for (const auto& [key, q] : {std::pair{"delta_p50", 0.5}, {"delta_p90", 0.9}, {"delta_p99", 0.99}})
        j[key] = m.quantile(q);
    j["exact"] = static_cast<double>(m.exact) / static_cast<double>(std::max<index_t>(1, m.delta.tokens));
    if (m.compared > 0) j["argmax_flips"] = m.flip_share();
    if (m.bad > 0) j["bad"] = m.bad;
    j["corr"] = ratio(m.corr), j["train"] = ratio(m.train), j["rollout"] = ratio(m.rollout);
    return j;
}

// The settings that results depend on, as text: a checkpoint's, and the run's that wants to go on from it.
std::string result_settings(const config& c) { return results_json(c).dump(); }

} // namespace

run::run(const command& arguments)
    : arguments_(arguments), settings_(arguments.settings), directory_(settings_.run.directory),
      task_(task_of(settings_)), teacher_(without_teacher(settings_) ? no_model() : model_of(settings_, *task_, true)),
      student_(model_of(settings_, *task_, false)), progress_(arguments.quiet) {
    settings_ = with_task_shapes(settings_, *task_);
    const int v = settings_.student_model.vocabulary;
    for (const auto& [flag, value] :
         {std::pair{"--k", settings_.distill.k}, std::pair{"--budget", settings_.distill.budget}})
        if (value > v)
            throw failure(exit_usage,
                          fmt::format("{} must be at most the vocabulary of {} symbols, not {}", flag, v, value));
    if (settings_.evaluation.prompts > static_cast<int>(task_->held_out_problems()))
        throw failure(exit_usage, fmt::format("--eval-prompts must be at most the {} held-out prompts, not {}",
                                              task_->held_out_problems(), settings_.evaluation.prompts));
    if (settings_.speculation.kind == "learned") {
        if (settings_.speculation.from.empty() && !arguments.resume && !settings_.speculation.adapt)
            throw failure(exit_usage,
                          "--speculate learned: a new run needs --adapt-drafter or --draft-from, the drafter.ckpt that "
                          "--train-drafter wrote in another run of the same student");
    }
    speculation_of(settings_); // a drafter that cannot be read is an error before anything is written
    if (const index_t least = rollout_engine::least_memory(sampling_of(settings_, *task_), task_->max_length());
        settings_.distill.kv_tokens > 0 && settings_.distill.kv_tokens < least)
        throw failure(exit_usage,
                      fmt::format("--kv-tokens must be at least {}, what a sequence and its drafts take, not {}", least,
                                  settings_.distill.kv_tokens));
    for (const std::string& advice : advice_on(settings_, v)) spdlog::warn("{}", advice);
    backend_.threads = threads_of(settings_);
    backend_.team(); // refused threads are an error before anything is written
    look_backend_.threads = backend_.threads;
    if (settings_.evaluation.every > 0) look_backend_.team();
    if (const int n = learner_threads_of(settings_); n != backend_.threads) {
        learner_backend_.emplace().threads = n;
        try {
            learner_backend_->team();
        } catch (const opd::unsupported& e) {
            throw failure(exit_resources, e.what() + std::string("; --learner-threads sets how many"));
        }
    }
    teacher_.initialise(teacher_seed());
    student_.initialise(settings_.run.seed + 1);
    open_directory();
}

// --- the run directory ----------------------------------------------------------------------------------------------

// Teacher, student and their evaluations, from state_. A run from a data set, or with a served teacher, has none.
void run::take_models(const std::string& path) {
    for (auto [model, weights] :
         {std::pair{&teacher_, &state_.teacher_weights}, std::pair{&student_, &state_.student_weights}}) {
        if (model == &teacher_ && without_teacher(settings_)) continue;
        if (weights->size() != model->weights.size())
            throw failure(exit_input, fmt::format("{}: {} weights for a model of {}", path, weights->size(),
                                                  model->weights.size()));
        model->weights = *weights;
        model->weights_changed();
    }
    evaluations_ = nlohmann::json::parse(state_.evaluations);
}

// Another run's teacher and warm student; its optimizers, clocks and counts stay behind.
void run::start_from(const std::string& path) {
    std::string saved;
    run_state other = load_checkpoint(path, saved);
    const auto theirs = nlohmann::json::parse(saved), mine = nlohmann::json::parse(result_settings(settings_));
    for (const char* group : {"task", "teacher_model", "student_model"})
        if (theirs.value(group, nlohmann::json()) != mine[group])
            throw failure(exit_usage, fmt::format("--start-from: {} was made with another {}", path, group));
    // what was measured on other prompts does not stand beside what will be measured on this run's
    const auto evaluation = theirs.value("evaluation", nlohmann::json::object());
    std::vector<float> teacher = scoring_teacher(other.teacher_weights);
    const bool comparable = teacher == other.teacher_weights &&
                            evaluation.value("prompts", -1) == settings_.evaluation.prompts &&
                            evaluation.value("samples", -1) == settings_.evaluation.samples;
    if (other.stage != stage::distill || other.step != 0)
        throw failure(exit_usage, fmt::format("--start-from: {} is of {} step {}, not a warm student; a run writes "
                                              "checkpoints/student.ckpt",
                                              path, name_of(other.stage), other.step));
    state_ = {};
    state_.stage = stage::distill;
    sft_print_ = print_of_teacher(other.teacher_weights);
    scoring_print_ = print_of_teacher(teacher);
    if (!is_offline(settings_)) {
        if (sft_print_ != scoring_print_) { // a data set is asked for its own
            const auto accepted = accepted_mismatches(settings_);
            if (std::ranges::find(accepted, "scoring_teacher") == accepted.end())
                throw failure(exit_usage, fmt::format("--scoring-teacher: {} has another teacher than {}, beside which "
                                                      "the student was warmed up; to go on, --accept-mismatch "
                                                      "scoring_teacher",
                                                      settings_.run.scoring_teacher, path));
            spdlog::warn("the teacher of {} scores, not that of {}", settings_.run.scoring_teacher, path);
        }
    }
    if (!without_teacher(settings_)) state_.teacher_weights = std::move(teacher);
    state_.student_weights = std::move(other.student_weights);
    if (comparable) state_.evaluations = std::move(other.evaluations);
    take_models(path);
    spdlog::info("starting from {}{}", path,
                 comparable ? "" : ", whose models are evaluated again on this run's prompts");
}

// Of another run, whose teacher has the shape of this one's.
std::vector<float> run::scoring_teacher(std::vector<float> own) {
    const std::string& path = settings_.run.scoring_teacher;
    if (path.empty()) return own;
    std::string saved;
    run_state other = load_checkpoint(path, saved);
    const auto theirs = nlohmann::json::parse(saved), mine = nlohmann::json::parse(result_settings(settings_));
    for (const char* group : {"task", "teacher_model"})
        if (theirs.value(group, nlohmann::json()) != mine[group])
            throw failure(exit_usage, fmt::format("--scoring-teacher: {} was made with another {}", path, group));
    return std::move(other.teacher_weights);
}

// A checkpoint of other settings: if --steps is all that differs, and asks for more than was done, the run goes on to
// there; one that had finished distils again. The rate goes on from where it is, down to the same floor; while it warms
// up it goes on as it would. Returns what the log is to say.
nlohmann::ordered_json run::change_steps(const std::string& path, const std::string& saved) {
    const std::string mine = result_settings(settings_);
    auto theirs = nlohmann::ordered_json::parse(saved, nullptr, false);
    config before = settings_;
    if (theirs.contains("distill") && theirs["distill"].contains("steps") &&
        theirs["distill"]["steps"].is_number_integer()) {
        before.distill.steps = theirs["distill"]["steps"].get<int>();
        theirs["distill"]["steps"] = settings_.distill.steps;
    }
    if (theirs.dump() != mine)
        throw failure(exit_usage, fmt::format("--resume: {} was made with other settings: {}", path,
                                              differences(theirs.dump(), mine)));
    const int from = before.distill.steps, to = settings_.distill.steps;
    const bool finished = state_.stage == stage::finished;
    const std::int64_t done = finished ? from : state_.stage == stage::distill ? state_.step : 0;
    if (done > 0 && to <= done)
        throw failure(exit_usage,
                      fmt::format("--steps must be more than the {} that {} has made, not {}", done, directory_, to));
    if (finished) {
        state_.stage = stage::distill;
        state_.step = from;
        state_.next_sample = sample_base() + static_cast<std::uint64_t>(batch_of(settings_)) * state_.step;
        std::error_code none;
        for (const char* name : {"/report.json", "/report.html"}) // they would be those of another run
            std::filesystem::remove(directory_ + name, none);
    }
    if (done > 0 && done >= settings_.distill.warmup) state_.rate = {done, rate_of(before, state_.rate, done)};
    nlohmann::ordered_json line;
    line["stage"] = name_of(state_.stage);
    line["step"] = state_.step;
    line["steps"] = {{"from", from}, {"to", to}};
    if (state_.stage == stage::distill) line["rate"] = rate_of(settings_, state_.rate, state_.step);
    spdlog::info("--steps {} instead of {}", to, from);
    return line;
}

void run::open_directory() {
    namespace fs = std::filesystem;
    const std::string latest = directory_ + "/checkpoints/latest.ckpt";
    if (arguments_.resume && !fs::exists(latest))
        throw failure(exit_input, fmt::format("--resume: there is no checkpoint {}", latest));
    make_directory(directory_);
    lock_.emplace(directory_);
    const bool holds_run = fs::exists(directory_ + "/config.json") || fs::exists(latest);
    nlohmann::ordered_json change;
    if (arguments_.resume) {
        std::string saved;
        state_ = load_checkpoint(latest, saved);
        if (result_settings(settings_) != saved) change = change_steps(latest, saved);
        take_models(latest);
        if (fs::exists(directory_ + "/timing.json")) {
            const auto timing = nlohmann::json::parse(read_file(directory_ + "/timing.json"), nullptr, false);
            for (std::size_t i = 0; i < clock_names.size(); ++i)
                if (timing.is_object()) seconds_[i] = timing.value(clock_names[i], 0.0);
        }
        if (state_.stage == stage::finished)
            spdlog::info("{} is finished; --resume --steps N, beyond the {} that it made, goes on with it", directory_,
                         settings_.distill.steps);
        else
            spdlog::info("resuming {} at {} step {}", directory_, name_of(state_.stage), state_.step);
    } else if (holds_run && !arguments_.overwrite) {
        throw failure(exit_usage,
                      fmt::format("--run-dir: {} holds a run already; --resume goes on with it, --overwrite "
                                  "replaces it",
                                  directory_));
    } else if (holds_run) {
        std::error_code error;
        for (const char* name : {"checkpoints", "samples", "plots", "log.jsonl", "consumed.jsonl", "report.json",
                                 "report.html", "timing.json", "config.json", "schedule.json", "trace.json"})
            if (fs::remove_all(directory_ + "/" + name, error); error)
                throw failure(exit_io, fmt::format("cannot remove {}/{}: {}", directory_, name, error.message()));
    }
    make_directory(directory_ + "/checkpoints");
    make_directory(directory_ + "/samples");
    if (!arguments_.resume && !settings_.run.start_from.empty()) start_from(settings_.run.start_from);
    write_file(directory_ + "/config.json", to_json(settings_).dump(2) + "\n");
    open_logs();
    if (change.is_null()) return;
    log_.write(change.dump());
    save("latest.ckpt"); // the change is made, whatever becomes of this process
}

// A resumed run drops the lines of steps that it is about to repeat.
void run::open_logs() {
    const auto keep = [this](const std::string& line) {
        const auto j = nlohmann::json::parse(line, nullptr, false);
        if (!j.is_object()) return false;
        if (!j.contains("stage") || !j.contains("step")) return true;
        int number = 0;
        while (number < 3 && j["stage"] != name_of(static_cast<stage>(number))) ++number;
        const int mine = static_cast<int>(state_.stage);
        return number < mine || (number == mine && j["step"].get<std::int64_t>() <= state_.step);
    };
    const auto nothing = std::function<bool(const std::string&)>();
    consumed_.open(directory_ + "/consumed.jsonl", arguments_.resume ? keep : nothing);
    if (log_.open(directory_ + "/log.jsonl", arguments_.resume ? keep : nothing)) return;
    nlohmann::ordered_json first;
    first["version"] = version_of_opd();
    first["config"] = to_json(settings_);
    first["fingerprint"] = fingerprint(settings_);
    first["threads"] = threads_of(settings_);
    log_.write(first.dump());
}

void run::save(const std::string& name) {
    hear_of_look(true); // what it counts is in the checkpoint
    if (!without_teacher(settings_)) state_.teacher_weights = teacher_.weights;
    state_.student_weights = student_.weights;
    state_.evaluations = evaluations_.dump();
    nlohmann::ordered_json timing;
    for (std::size_t i = 0; i < clock_names.size(); ++i) timing[clock_names[i]] = seconds_[i];
    write_file(directory_ + "/timing.json", timing.dump(2) + "\n");
    save_checkpoint(directory_ + "/checkpoints/" + name, state_, result_settings(settings_));
}

// --- steps ----------------------------------------------------------------------------------------------------------

void run::check_numbers(const step_result& r) const {
    if (std::isfinite(r.loss) && std::isfinite(r.gradient_norm) && r.loss <= settings_.run.loss_limit) return;
    throw failure(exit_numeric,
                  fmt::format("{} step {}: loss {}, gradient norm {}{}; a lower rate may help. The last checkpoint is "
                              "intact",
                              name_of(state_.stage), state_.step, r.loss, r.gradient_norm,
                              std::isfinite(r.loss) && std::isfinite(r.gradient_norm)
                                  ? fmt::format(" (--loss-limit {})", settings_.run.loss_limit)
                                  : std::string()));
}

bool run::end_of_step() {
    if (steps_left_ > 0 && --steps_left_ == 0) interrupted = true;
    if (interrupted) {
        progress_.clear();
        save("latest.ckpt");
        return false;
    }
    if (state_.step % settings_.run.checkpoint_every == 0) save("latest.ckpt");
    return true;
}

// `in_flight` and `drafter` are for --resume: the stage's own checkpoint is what the stage made.
void run::finish_stage(stage next, std::string in_flight, std::string drafter) {
    progress_.clear();
    const std::string name = name_of(state_.stage);
    state_.stage = next;
    state_.step = 0;
    state_.next_sample = sample_base();
    state_.in_flight.clear(), state_.drafter.clear();
    save(name + ".ckpt");
    state_.in_flight = std::move(in_flight), state_.drafter = std::move(drafter);
    save("latest.ckpt");
    shown_step_ = 0;
    tokens_since_ = 0;
}

void run::show(const step_result& r, std::int64_t steps, double seconds, double staleness, double accuracy,
               const learner_result* more, const nlohmann::ordered_json& schedule) {
    tokens_since_ += r.tokens;
    const bool due = state_.step % settings_.run.log_every == 0 || state_.step == steps || accuracy >= 0;
    if (due || rate_ == 0) {
        if (shown_step_ >= state_.step) shown_step_ = state_.step - 1;
        const double elapsed = std::max(1e-9, seconds - shown_seconds_);
        rate_ = static_cast<double>(tokens_since_) / elapsed;
        step_seconds_ = elapsed / static_cast<double>(state_.step - shown_step_);
    }
    if (due) {
        nlohmann::ordered_json line;
        line["stage"] = name_of(state_.stage);
        line["step"] = state_.step;
        line["loss"] = r.loss;
        line["gradient_norm"] = r.gradient_norm;
        line["tokens_per_second"] = std::round(rate_);
        if (accuracy >= 0) line["accuracy"] = accuracy;
        if (more) {
            line["rate"] = more->rate;
            line["kl"] = more->kl;
            line["response_tokens"] = more->diagnostics.kept;
            line["staleness"] = staleness;
            line["mismatched"] = more->mismatched;
            line["prefix_log_ratio"] = more->prefix.log_ratio();
            line["prefix_effective_share"] = more->prefix.effective_share();
            if (!settings_.distill.correction.empty()) {
                line["dropped"] = more->diagnostics.dropped; // by what was decided over sequences
                line["masked"] = more->diagnostics.masked;
                line["truncated"] = more->diagnostics.truncated;
            }
            if (tells_mismatch(settings_)) line["mismatch"] = described(more->mismatch);
            if (more->diagnostics.tokens > 0) {
                line["ratio_mean"] = more->diagnostics.ratio_mean();
                line["teacher_kl"] = more->diagnostics.teacher_kl();
                for (const auto& [key, q] : {std::pair{"ratio_p50", 0.5}, {"ratio_p90", 0.9}, {"ratio_p99", 0.99}})
                    if (!more->ratios.empty()) line[key] = opd::ratio_sketch::quantile(more->ratios, q);
                line["ratio_max"] = more->diagnostics.ratio_max;
                if (settings_.distill.m2po > 0) line["dropped"] = more->diagnostics.dropped;
                line["effective_sample_share"] =
                    more->diagnostics.effective_sample_size() / static_cast<double>(more->diagnostics.tokens);
            }
            if (more->diagnostics.support_rows > 0) {
                line["student_mass"] = more->diagnostics.student_mass();
                line["teacher_mass"] = more->diagnostics.teacher_mass();
            }
            if (is_offline(settings_)) line["drift"] = described(more->drift);
            if (settings_.distill.loss_clamp > 0) line["clamped_rows"] = more->diagnostics.clamped_rows;
            if (!schedule.is_null()) line["schedule"] = schedule;
        }
        log_.write(line.dump());
    }
    progress_.show({name_of(state_.stage), state_.step, steps, r.loss, r.gradient_norm, rate_, staleness,
                    step_seconds_ * static_cast<double>(steps - state_.step) + forecast_.after(state_.stage)},
                   due);
    if (due) {
        shown_seconds_ = seconds;
        shown_step_ = state_.step;
        tokens_since_ = 0;
    }
}

// --- stages ---------------------------------------------------------------------------------------------------------

void run::train_teacher() {
    supervised teach(*task_, teacher_, state_.teacher_optimizer, backend_);
    double& seconds = seconds_[static_cast<std::size_t>(clock_name::teacher_training)];
    shown_seconds_ = seconds;
    shown_step_ = state_.step;
    while (state_.step < settings_.teacher.steps) {
        step_result r;
        timed(clock_name::teacher_training, [&] {
            r = teach.step(teacher_seed(), state_.next_sample, settings_.teacher.batch,
                           cosine_rate(settings_.teacher.rate, 0.1, settings_.teacher.warmup, state_.step,
                                       settings_.teacher.steps),
                           settings_.optimizer);
        });
        check_numbers(r);
        ++state_.step;
        state_.next_sample += static_cast<std::uint64_t>(settings_.teacher.batch);
        state_.tokens[static_cast<std::size_t>(clock_name::teacher_training)] += r.tokens;
        show(r, settings_.teacher.steps, seconds, -1, -1, nullptr, {});
        if (state_.step < settings_.teacher.steps && !end_of_step()) return;
    }
    evaluations_["teacher"] = to_json(evaluate(teacher_, "teacher"));
    finish_stage(stage::student);
}

// The task's solutions, or the teacher's own answers, each a function of its weights, seed and sample: a resumed run
// draws those that it would have drawn.
std::vector<example> run::warmup_texts() {
    const int batch = settings_.student.batch;
    if (settings_.student.data != "teacher") return solutions(*task_, settings_.run.seed, state_.next_sample, batch);
    sampling o = sampling_of(settings_, *task_); // the teacher's whole policy: no filter, no drafts
    o.top_k = 0, o.top_p = 1, o.min_p = 0, o.keep_sets = o.keep_tops = false;
    o.inject = {}, o.plan = {}, o.speculate = {}, o.kv_tokens = 0;
    std::vector<request> requests;
    for (int i = 0; i < batch; ++i)
        requests.push_back(request_of(*task_, settings_.run.seed, state_.next_sample + static_cast<std::uint64_t>(i)));
    std::vector<example> texts;
    for (trajectory& t : roll_out(teacher_, backend_.team(), requests, o))
        texts.push_back({std::move(t.tokens), t.prompt_length});
    return texts;
}

void run::warm_student_up() {
    supervised teach(*task_, student_, state_.student_optimizer, backend_);
    double& seconds = seconds_[static_cast<std::size_t>(clock_name::student_warmup)];
    shown_seconds_ = seconds;
    shown_step_ = state_.step;
    std::vector<problem> prompts; // training prompts, apart from those of the steps
    for (int i = 0; i < settings_.student.check_prompts; ++i)
        prompts.push_back(
            task_->training_problem(settings_.run.seed, (std::uint64_t{9} << 56) + static_cast<std::uint64_t>(i)));
    bool reached = settings_.student.max_steps == 0;
    while (!reached && state_.step < settings_.student.max_steps) {
        step_result r;
        double accuracy = -1;
        timed(clock_name::student_warmup, [&] {
            const double ramp = std::min(1.0, static_cast<double>(state_.step + 1) /
                                                  std::max(1.0, static_cast<double>(settings_.student.warmup)));
            r = teach.step(warmup_texts(), settings_.student.rate * ramp, settings_.optimizer);
            if ((state_.step + 1) % settings_.student.check_every == 0)
                accuracy = evaluate_model(student_, backend_.team(), *task_, prompts, 0, settings_.run.seed, 0,
                                          settings_.distill.slots)
                               .accuracy;
        });
        check_numbers(r);
        ++state_.step;
        state_.next_sample += static_cast<std::uint64_t>(settings_.student.batch);
        state_.tokens[static_cast<std::size_t>(clock_name::student_warmup)] += r.tokens;
        reached = accuracy >= settings_.student.target_accuracy;
        show(r, reached ? state_.step : settings_.student.max_steps, seconds, -1, accuracy, nullptr, {});
        if (!reached && state_.step < settings_.student.max_steps && !end_of_step()) return;
    }
    progress_.clear();
    if (reached && state_.step > 0)
        spdlog::info("the student's warm-up ends after {} of at most {} steps: its target_accuracy of {} is reached",
                     state_.step, settings_.student.max_steps, settings_.student.target_accuracy);
    if (!reached) // a task judged by KL has steps for its plan, and the accuracy ends it early
        spdlog::log(task_->judged_by_kl() ? spdlog::level::info : spdlog::level::warn,
                    "the student did not reach its target_accuracy of {} in {} steps",
                    settings_.student.target_accuracy, settings_.student.max_steps);
    evaluations_["before"] = to_json(evaluate(student_, "before"));
    state_.student_optimizer = {};
    finish_stage(stage::distill);
}

// A step of distillation is done: looks at its numbers, counts, warns, evaluates, logs.
void run::distilled(const learner_result& r, const policy& student, const std::vector<std::uint64_t>& sequences,
                    double seconds, const nlohmann::ordered_json& schedule) {
    check_numbers(r);
    hear_of_look(false);
    ++state_.step;
    const auto count = [&](clock_name what, std::int64_t tokens) {
        state_.tokens[static_cast<std::size_t>(what)] += tokens;
    };
    if (!is_offline(settings_)) {
        count(clock_name::rollout, r.diagnostics.kept);
        count(clock_name::teacher_scoring, r.tokens);
    }
    count(clock_name::learner, r.tokens);
    if (!is_offline(settings_) && state_.kl.add(r.kl)) { // of a set it is pi_ref's, whatever the student does
        progress_.clear();
        spdlog::warn("step {}: the KL to the teacher has risen for {} steps, to {:.4f}; reverse KL collapses where the "
                     "teacher has never seen the student's prefixes: a lower --rate or a stronger warm-up helps",
                     state_.step, kl_watch::block * kl_watch::limit, state_.kl.last_mean);
    }
    if (r.mismatched > 0 && !mismatch_told_ && settings_.distill.inject_mismatch.empty()) {
        mismatch_told_ = true;
        progress_.clear();
        spdlog::warn("step {}: {} tokens have another log-probability in the learner than in rollout", state_.step,
                     r.mismatched);
    }
    if (r.diagnostics.bad_rows > 0) {
        progress_.clear();
        spdlog::warn("step {}: {} bad rows, the first is {}", state_.step, r.diagnostics.bad_rows,
                     r.diagnostics.first_bad_row);
    }
    double staleness = 0;
    for (int bin = 0; bin < opd::diagnostics::staleness_bins; ++bin)
        staleness += bin * static_cast<double>(r.diagnostics.staleness[bin]);
    staleness /= std::max(1.0, static_cast<double>(r.diagnostics.kept));
    nlohmann::ordered_json line;
    line["stage"] = name_of(state_.stage);
    line["step"] = state_.step;
    line["sequences"] = sequences;
    if (settings_.distill.answers > 1)
        for (const std::uint64_t s : sequences) line["prompts"].push_back(prompt_of(s, settings_.distill.answers));
    consumed_.write(line.dump());
    show(r, settings_.distill.steps, seconds, staleness, -1, &r, schedule);
    if (settings_.evaluation.every > 0 && state_.step % settings_.evaluation.every == 0) look_at(state_.step, student);
}

exit_code run::go() {
    if (!arguments_.resume) state_.next_sample = sample_base();
    tell_plan();
    while (state_.stage != stage::finished) {
        const stage before = state_.stage;
        switch (before) {
        case stage::teacher:
            with_memory_for("the teacher's training: --teacher-batch, --eval-prompts and --eval-samples set how much",
                            [&] { train_teacher(); });
            break;
        case stage::student:
            with_memory_for("the student's warm-up: --student-batch, --student-check-prompts, --eval-prompts and "
                            "--eval-samples set how much",
                            [&] { warm_student_up(); });
            break;
        case stage::distill:
            with_memory_for(
                "distillation: --prompts, --answers, --m, --slots, --eval-prompts and --eval-samples set how much",
                [&] { evaluate_missing(), is_offline(settings_) ? distill_offline() : distill(); });
            break;
        case stage::finished:
            break;
        }
        if (interrupted) {
            if (state_.stage == before) {
                spdlog::warn("stopped at {} step {}; --resume goes on from {}/checkpoints/latest.ckpt", name_of(before),
                             state_.step, directory_);
                return exit_interrupted;
            }
            if (state_.stage != stage::finished) {
                spdlog::warn("stopped after the {} stage; --resume goes on", name_of(before));
                return exit_interrupted;
            }
        }
    }
    report();
    return exit_ok;
}

} // namespace trainer
