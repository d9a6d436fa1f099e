// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How good a model is at the task: it answers prompts, every response is judged.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "pipeline/rollout.hpp"
#include "task/task.hpp"

namespace trainer {

struct evaluation_result {
    double accuracy = 0;                 ///< share of responses that are right
    double valid = 0;                    ///< share of those whose every step is right as well
    double step_validity = 0;            ///< share of the steps written
    std::optional<double> sampled;       ///< Avg@n: accuracy of n sampled responses a prompt; none if n is 0
    double kl = 0;                       ///< mean KL(model, teacher) along these responses; filled by the caller
    std::optional<double> kl_on_teacher; ///< along the teacher's responses to the same prompts; where that is the judge
    double mean_length = 0;              ///< tokens of a response
    int p50_length = 0, p99_length = 0;
    std::int64_t tokens = 0;           ///< generated
    std::vector<int> lengths;          ///< of the responses
    std::vector<trajectory> responses; ///< the greedy ones, or the first sampled ones, in the order of the problems
};

/// The mean of the KL along both kinds of held-out prefixes: what the gap of a task judged by KL is measured in.
inline double held_out_kl(const nlohmann::json& evaluation) {
    return (evaluation.at("kl_to_teacher").get<double>() + evaluation.at("kl_on_teacher").get<double>()) / 2;
}

/// Everything but the responses.
nlohmann::json to_json(const evaluation_result& r);

/// Responses to `problems`, greedy or, where the task is judged by KL, sampled; and `samples` further sampled ones
/// each (keyed by `seed` and `first_sample`).
evaluation_result evaluate_model(const transformer<float>& model, opd::thread_team& threads, const any_task& task,
                                 std::span<const problem> problems, int samples, std::uint64_t seed,
                                 std::uint64_t first_sample, int slots, const speculation_options& speculate = {});

} // namespace trainer
