// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A run from its first step to its report: train a teacher, warm a student up, evaluate both, distil on-policy,
// evaluate again. Each stage is a loop over steps around objects with explicit inputs and outputs:
//
//   distill:  prompts -> rollout -> trajectories -> teacher -> cache -> learner -> weights, version + 1
//
// run.cpp has the run directory, the steps and the first two stages, judging.cpp the evaluations, report.cpp what is
// said at the beginning and the end. Distillation's stages take turns or overlap, as --schedule says: distill.cpp. With
// --offline there is a learner alone, whose batches come from a data set, and no teacher is in memory but while a model
// is evaluated: offline.cpp. With --teacher-url another process is the teacher (served.hpp), and likewise none is in
// memory.
//
// The run directory holds config.json, log.jsonl, consumed.jsonl, checkpoints/, samples/, plots/, timing.json and
// report.json.
#pragma once

#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/evaluation.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/supervised.hpp"
#include "run/forecast.hpp"
#include "run/progress.hpp"
#include "settings/checkpoint.hpp"
#include "settings/command_line.hpp"
#include "settings/config.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"
#include "task/task.hpp"

namespace trainer {

class served_teacher;

/// What is timed apart, and the keys of report.json.
enum class clock_name { teacher_training, student_warmup, rollout, teacher_scoring, learner, evaluation, count };
inline constexpr std::array<const char*, 6> clock_names = {"teacher_training", "student_warmup", "rollout",
                                                           "teacher_scoring",  "learner",        "evaluation"};

/// Set by SIGINT and SIGTERM: the run writes a checkpoint after its step and leaves.
extern std::atomic<bool> interrupted;

/// The settings' task, and the settings with what models must know of it.
std::unique_ptr<const any_task> task_of(const config& c);
config with_task_shapes(config c, const any_task& task);
/// The teacher or the student of the settings, before it has weights; and what is in the place of one that is not
/// there.
transformer<float> model_of(const config& c, const any_task& task, bool teacher);
transformer<float> no_model();
/// "0.9.0", the library's.
std::string version_of_opd();

class run {
public:
    explicit run(const command& arguments);

    /// Everything that is left to do. Returns the exit code.
    exit_code go();

    /// For tests: as go(), but as if interrupted after so many further steps (over all stages).
    void stop_after(std::int64_t steps) { steps_left_ = steps; }

    const run_state& state() const { return state_; }

private:
    void open_directory();
    void take_models(const std::string& path);
    void start_from(const std::string& path);
    nlohmann::ordered_json change_steps(const std::string& path, const std::string& saved);
    void open_logs();
    void tell_plan();
    void train_teacher();
    void warm_student_up();
    void distill(); // distill.cpp
    class distillation;
    void distill_offline(); // offline.cpp
    void meet_teacher();
    void distill_on_threads();
    void distill_in_virtual_time();
    void distilled(const learner_result& r, const policy& student, const std::vector<std::uint64_t>& sequences,
                   double seconds, const nlohmann::ordered_json& schedule);
    void report();

    evaluation_result evaluate(const transformer<float>& model, const char* who);
    const row_batch& teacher_prefixes();
    void recall_teacher(bool present);                          // without_teacher(): for an evaluation
    std::vector<float> scoring_teacher(std::vector<float> own); // the weights that --scoring-teacher names, or own
    double kl_to_teacher(const transformer<float>& model, const row_batch& batch, opd::cpu_backend& backend);
    void evaluate_missing(); // what a start from another run has not, or of other prompts
    void look_at(std::int64_t step, const policy& student);
    void hear_of_look(bool wait);
    void finish_stage(stage next, std::string in_flight = {}, std::string drafter = {});
    void save(const std::string& name);
    bool end_of_step(); // checkpoints where due; false: leave
    void check_numbers(const step_result& r) const;
    void show(const step_result& r, std::int64_t steps, double seconds, double staleness, double accuracy,
              const learner_result* more, const nlohmann::ordered_json& schedule);
    std::uint64_t teacher_seed() const { return settings_.teacher.seed ? settings_.teacher.seed : settings_.run.seed; }
    std::vector<example> warmup_texts(); // of the next step of the student's warm-up
    std::uint64_t sample_base() const { return (static_cast<std::uint64_t>(state_.stage) + 1) << 56; }

    template <class Work>
    void timed(clock_name what, Work&& work) {
        const double start = now();
        work();
        seconds_[static_cast<std::size_t>(what)] += now() - start;
    }

    command arguments_;
    config settings_;
    std::string directory_;
    std::unique_ptr<const any_task> task_;
    opd::cpu_backend backend_;
    std::optional<opd::cpu_backend> learner_backend_; // of --learner-threads, where they are others than backend_'s
    opd::cpu_backend look_backend_;
    transformer<float> teacher_, student_;  // without_teacher(): of the teacher nothing is there but while it judges
    std::string sft_print_, scoring_print_; // likewise: of --start-from's teacher, and of the one that judges
    std::shared_ptr<served_teacher> served_;
    nlohmann::ordered_json probed_; // what its probe found
    run_state state_;
    std::optional<directory_lock> lock_;
    progress progress_;
    forecast forecast_; // zeros under --quiet
    line_file log_, consumed_;
    bool mismatch_told_ = false;
    struct look {
        std::int64_t step;
        double seconds;
        evaluation_result student;
    };
    std::future<look> looking_; // at the student as it was after a step, on a thread of its own
    std::array<double, 6> seconds_{};
    nlohmann::json evaluations_ = nlohmann::json::object();
    std::optional<row_batch> teacher_prefixes_; // the teacher's own responses to the held-out prompts, once made
    double shown_seconds_ = 0;                  // of the stage when it was last shown
    std::int64_t shown_step_ = 0;               // likewise
    std::int64_t tokens_since_ = 0;             // since then
    double rate_ = 0;                           // tokens/s, as last measured
    double step_seconds_ = 0;                   // likewise
    std::int64_t steps_left_ = -1;              // negative: no limit
};

} // namespace trainer
