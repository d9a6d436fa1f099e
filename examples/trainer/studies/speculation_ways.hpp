// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the worlds of opd-compare-speculation share: models and drafters that are trained once, settings, costs.
#pragma once

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "run/train_drafter.hpp"
#include "settings/checkpoint.hpp"
#include "speculation/drafter_training.hpp"
#include "studies/comparisons.hpp"

namespace trainer {

inline const arguments preset = {"--preset=speculative", "--quiet"};

struct way {
    std::string name;
    arguments settings;
};

inline run_state state_in(const std::string& checkpoint) {
    std::string settings;
    return load_checkpoint(checkpoint, settings);
}

inline std::string digest(const std::vector<float>& weights) {
    return hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)});
}

inline std::string drafter_in(const std::string& base, const arguments& settings) {
    const std::string drafter = base + "/checkpoints/drafter.ckpt";
    if (std::filesystem::exists(drafter)) return drafter;
    fmt::print("training a drafter, once\n");
    std::fflush(stdout);
    if (const exit_code code =
            train_drafter(parse_command_line(settings + arguments{"--run-dir=" + base, "--train-drafter"}));
        code != exit_ok)
        throw failure(code, "the training of the drafter was interrupted");
    return drafter;
}

inline std::string range(const std::vector<double>& x) {
    const spread s = of(x);
    return fmt::format("{:.2f} ({:.2f}-{:.2f})", s.median, s.least, s.most);
}

inline config config_of(const arguments& a) {
    const config c = parse_command_line(a).settings;
    return with_task_shapes(c, *task_of(c));
}

inline transformer<float> model_in(const config& c, const std::string& checkpoint) {
    transformer<float> model(c.student_model);
    model.weights = state_in(checkpoint).student_weights;
    model.weights_changed();
    return model;
}

inline nlohmann::json schedule_in(const std::string& where) {
    return nlohmann::json::parse(read_file(where + "/schedule.json"));
}

// A decoding step reads a model of 7 billion weights in 8 ms and computes a row of it in 75 us; a drafter of one layer,
// with the model's head, is a thirteenth of it; a teacher of four times the size scores; and the learner computes three
// times a row.
inline const arguments gpu = {"--cost-step=8e-3", "--cost-step-row=7.5e-5", "--cost-score-row=3e-4",
                              "--cost-train-row=2.25e-4"},
                       gpu_drafter = {"--cost-draft=6e-4", "--cost-draft-row=6e-6"},
                       gpu_spot = {"--cost-adapt=2e-3", "--cost-adapt-row=1.8e-5"};

/// What a model costs: a model of costs, not a measurement.
struct priced {
    std::string name;
    arguments target, drafter, spot;
};
inline const priced node{"7B, 75 us a row", gpu, gpu_drafter, gpu_spot};

/// 10^9 weights of student and teacher, and the H100s of each; the learner has the student's. A step reads all weights
/// once, as bfloat16, at 2.5 TB/s a card: so 7.6·10^9 of them decode the 165 tokens/s of TLT's table 2. A row takes two
/// operations a weight, at half of 990 TFLOP/s a card; a learner's row six, at .4. A drafter is a thirteenth of the
/// student. Keys and values, and what cards say to each other, cost nothing.
inline priced on_h100s(const std::string& name, double student, double cards, double teacher, double its_cards) {
    const double step = 2e9 * student / (2.5e12 * cards), row = 2e9 * student / (495e12 * cards),
                 train = 6e9 * student / (396e12 * cards), score = 2e9 * teacher / (495e12 * its_cards);
    const auto cost = [](const char* what, double seconds) { return fmt::format("--cost-{}={:.4g}", what, seconds); };
    return {name,
            {cost("step", step), cost("step-row", row), cost("score-row", score), cost("train-row", train)},
            {cost("draft", step / 13), cost("draft-row", row / 13)},
            {cost("adapt", step / 4), cost("adapt-row", train / 13)}};
}
inline const priced on_one = on_h100s("7B on an H100", 7.6, 1, 32.8, 4),
                    on_four = on_h100s("32B on four H100s", 32.8, 4, 72.7, 8);

// A small student that moves far in few steps.
inline const arguments moving = {"--preset=quick", "--quiet", "--student-max-steps=40"},
                       small_drafter = {"--drafter-ffn=96", "--drafter-steps=200"};

} // namespace trainer
