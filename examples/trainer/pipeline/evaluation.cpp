// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/evaluation.hpp"

#include <algorithm>

namespace trainer {

nlohmann::json to_json(const evaluation_result& r) {
    nlohmann::json j = {{"accuracy", r.accuracy},
                        {"valid", r.valid},
                        {"step_validity", r.step_validity},
                        {"sampled_accuracy", r.sampled ? nlohmann::json(*r.sampled) : nlohmann::json()},
                        {"kl_to_teacher", r.kl},
                        {"mean_length", r.mean_length},
                        {"p50_length", r.p50_length},
                        {"p99_length", r.p99_length},
                        {"lengths", r.lengths}};
    if (r.kl_on_teacher) j["kl_on_teacher"] = *r.kl_on_teacher;
    return j;
}

evaluation_result evaluate_model(const transformer<float>& model, opd::thread_team& threads, const any_task& task,
                                 std::span<const problem> problems, int samples, std::uint64_t seed,
                                 std::uint64_t first_sample, int slots, const speculation_options& speculate) {
    evaluation_result r;
    sampling options;
    options.greedy = !task.judged_by_kl();
    options.seed = seed;
    options.end = task.end_token();
    options.max_response = task.max_response();
    options.slots = slots;
    options.prefill_chunk = task.prompt_length();
    options.speculate = speculate;
    std::vector<request> requests;
    for (std::size_t i = 0; i < problems.size(); ++i)
        requests.push_back({first_sample + i, task.prompt_tokens(problems[i])});
    r.responses = roll_out(model, threads, requests, options);
    std::int64_t steps = 0, valid_steps = 0;
    for (std::size_t i = 0; i < problems.size(); ++i) {
        const auto response = r.responses[i].response();
        const verdict v = task.judged(problems[i], response);
        r.accuracy += v.correct;
        r.valid += v.valid;
        steps += v.steps;
        valid_steps += v.valid_steps;
        r.lengths.push_back(static_cast<int>(response.size()));
        r.tokens += static_cast<std::int64_t>(response.size());
    }
    const auto n = static_cast<double>(problems.size());
    r.accuracy /= n;
    r.valid /= n;
    r.step_validity = steps > 0 ? static_cast<double>(valid_steps) / static_cast<double>(steps) : 0;
    r.mean_length = static_cast<double>(r.tokens) / n;
    std::vector<int> sorted = r.lengths;
    std::sort(sorted.begin(), sorted.end());
    r.p50_length = sorted[(sorted.size() - 1) / 2];
    r.p99_length = sorted[(sorted.size() - 1) * 99 / 100];

    if (samples > 0) {
        std::vector<request> repeated;
        for (int s = 0; s < samples; ++s)
            for (std::size_t i = 0; i < problems.size(); ++i)
                repeated.push_back(
                    {first_sample + (static_cast<std::uint64_t>(s) + 1) * problems.size() + i, requests[i].prompt});
        options.greedy = false;
        const auto drawn = roll_out(model, threads, repeated, options);
        double right = 0;
        for (std::size_t i = 0; i < drawn.size(); ++i) {
            right += task.judged(problems[i % problems.size()], drawn[i].response()).correct;
            r.tokens += static_cast<std::int64_t>(drawn[i].response().size());
        }
        r.sampled = right / static_cast<double>(drawn.size());
    }
    return r;
}

} // namespace trainer
