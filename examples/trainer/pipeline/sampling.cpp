// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/sampling.hpp"

#include <memory>
#include <string>

#include <fmt/format.h>

#include "pipeline/learner.hpp"
#include "speculation/draft_model.hpp"

namespace trainer {

sampling sampling_of(const config& c, const any_task& task) {
    sampling o;
    o.temperature = c.distill.temperature;
    o.seed = c.run.seed;
    o.end = task.end_token();
    o.max_response = task.max_response();
    o.slots = c.distill.slots;
    o.prefill_chunk = c.distill.prefill_chunk;
    o.plan = draws_for(c);
    o.speculate = speculation_of(c);
    o.kv_tokens = c.distill.kv_tokens;
    o.top_k = c.distill.rollout_top_k, o.top_p = c.distill.rollout_top_p, o.min_p = c.distill.rollout_min_p;
    o.inject = injection_of(c);
    o.keep_sets = filters_rollout(c) && !o.inject.filter;
    o.keep_tops = !c.distill.inject_mismatch.empty();
    return o;
}

speculation_options speculation_of(const config& c, const model_shape* target) {
    const auto& s = c.speculation;
    speculation_options o;
    for (const drafting_name& line : draftings)
        if (s.kind == line.text) o.what = line.what;
    o.fixed = {s.depth, s.kind == "learned" ? s.children : 1, s.verify};
    const std::string path = s.from.empty() ? c.run.directory + "/checkpoints/drafter.ckpt" : s.from;
    const bool learns = o.what == drafting::learned || o.what == drafting::automatic;
    if (learns && (!s.from.empty() || (o.what == drafting::learned && !s.adapt))) {
        o.learned = std::make_shared<const draft_model>(load_drafter(path));
    } else if (learns && s.adapt) {
        o.learned = std::make_shared<const draft_model>(c, c.student_model); // which learns from nothing
    }
    if (o.learned) {
        if (!(o.learned->target == c.student_model))
            throw failure(exit_input, fmt::format("{}: a drafter for a student of another shape", path));
        if (s.adapt && !o.learned->is_layer() && (c.drafter.loss == "hass" || c.drafter.loss == "eagle3"))
            throw failure(exit_usage, fmt::format("--drafter-loss {} is of a drafter on hidden states; {} is none",
                                                  c.drafter.loss, path));
        if (target && !(*target == c.student_model)) o.what = drafting::off, o.learned.reset();
    }
    o.running = s.running;
    o.retrieval = {.tokens = s.history, .answers = static_cast<std::uint64_t>(c.distill.answers)};
    return o;
}

request request_of(const any_task& task, std::uint64_t seed, std::uint64_t sample, int answers) {
    return {sample, task.prompt_tokens(task.training_problem(seed, prompt_of(sample, answers)))};
}

} // namespace trainer
