// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How good a model is at the task: it answers prompts, every response is judged.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "rollout.hpp"
#include "task.hpp"

namespace trainer {

struct evaluation_result {
    double accuracy = 0;           ///< share of greedy responses with the right answer
    double valid = 0;              ///< share of greedy responses whose every step is right as well
    double step_validity = 0;      ///< share of the steps written (greedy)
    std::optional<double> sampled; ///< Avg@n: accuracy of n sampled responses a prompt; none if n is 0
    double kl = 0;                 ///< mean KL(model, teacher) along its greedy responses; filled by the caller
    double mean_length = 0;        ///< tokens of a greedy response
    int p50_length = 0, p99_length = 0;
    std::int64_t tokens = 0;           ///< generated
    std::vector<int> lengths;          ///< of the greedy responses
    std::vector<trajectory> responses; ///< the greedy ones, in the order of the pairs
};

/// Everything but the responses.
nlohmann::json to_json(const evaluation_result& r);

/// Greedy responses to `pairs`, and `samples` sampled ones each (keyed by `seed` and `first_sample`).
evaluation_result evaluate_model(const transformer<float>& model, opd::thread_team& threads, const gcd_task& task,
                                 std::span<const operands> pairs, int samples, std::uint64_t seed,
                                 std::uint64_t first_sample, int slots, const speculation_options& speculate = {});

} // namespace trainer
