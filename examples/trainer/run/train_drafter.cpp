// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/train_drafter.hpp"

#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "pipeline/rollout.hpp"
#include "pipeline/sampling.hpp"
#include "run/run.hpp"
#include "settings/checkpoint.hpp"
#include "settings/command_line.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"
#include "speculation/drafter_training.hpp"

namespace trainer {

exit_code train_drafter(const command& arguments) {
    const auto own_task = task_of(arguments.settings);
    const any_task& task = *own_task;
    const config c = with_task_shapes(arguments.settings, task);
    const auto& d = c.drafter;
    const std::string directory = c.run.directory, latest = directory + "/checkpoints/latest.ckpt";
    if (!std::filesystem::exists(latest))
        throw failure(exit_input, fmt::format("--train-drafter: there is no checkpoint {}", latest));
    const directory_lock lock(directory);
    if (d.held_out > static_cast<int>(task.held_out_problems()))
        throw failure(exit_usage, fmt::format("--drafter-held-out must be at most the {} held-out prompts, not {}",
                                              task.held_out_problems(), d.held_out));
    std::string saved;
    const run_state state = load_checkpoint(latest, saved);
    const auto theirs = nlohmann::json::parse(saved), mine = nlohmann::json(results_json(c));
    for (const char* group : {"task", "student_model"})
        if (theirs.value(group, nlohmann::json()) != mine[group])
            throw failure(exit_usage, fmt::format("--train-drafter: {} was made with another {}", latest, group));
    transformer<float> target(c.student_model);
    if (state.student_weights.size() != target.weights.size())
        throw failure(exit_input, fmt::format("{}: {} weights for a model of {}", latest, state.student_weights.size(),
                                              target.weights.size()));
    target.weights = state.student_weights;
    target.weights_changed();
    opd::cpu_backend backend;
    backend.threads = threads_of(c);

    const double start = now();
    sampling options;
    options.temperature = c.distill.temperature;
    options.seed = c.run.seed;
    options.end = task.end_token();
    options.max_response = task.max_response();
    options.slots = c.distill.slots;
    options.prefill_chunk = c.distill.prefill_chunk;
    const auto responses = [&](int count, std::uint64_t samples, auto problem_of) {
        std::vector<request> requests;
        for (int i = 0; i < count; ++i)
            requests.push_back({samples + static_cast<std::uint64_t>(i), task.prompt_tokens(problem_of(i))});
        std::vector<trajectory> out = roll_out(target, backend.team(), requests, options);
        return out;
    };
    constexpr std::uint64_t own_samples = std::uint64_t{10} << 56; // apart from those of a run
    const std::vector<trajectory> learnt = responses(d.responses, own_samples, [&](int i) {
        return task.training_problem(c.run.seed, own_samples + static_cast<std::uint64_t>(i));
    });
    const std::vector<trajectory> held_out = responses(d.held_out, own_samples + (std::uint64_t{1} << 55), [&](int i) {
        return task.held_out_problem(static_cast<std::size_t>(i));
    });
    const auto pointers = [](const std::vector<trajectory>& all) {
        std::vector<const trajectory*> r;
        for (const trajectory& t : all) r.push_back(&t);
        return r;
    };
    const std::vector<const trajectory*> pool = pointers(learnt), judged = pointers(held_out);
    spdlog::info("{} responses of the target in {:.1f} s", learnt.size() + held_out.size(), now() - start);

    draft_model drafter(c, c.student_model);
    drafter_trainer train(c, target, drafter, backend);
    line_file log;
    log.open(directory + "/drafter.jsonl", nullptr);
    std::vector<const trajectory*> batch;
    std::size_t next = 0;
    std::int64_t done = 0;
    for (; done < d.steps && !interrupted; ++done) {
        batch.clear();
        for (int i = 0; i < d.batch; ++i) batch.push_back(pool[next++ % pool.size()]);
        const drafter_step r = train.step(batch, cosine_rate(d.rate, 0.1, d.warmup, done, d.steps), done);
        if (!std::isfinite(r.loss) || !std::isfinite(r.gradient_norm) || r.loss > c.run.loss_limit)
            throw failure(exit_numeric,
                          fmt::format("drafter step {}: loss {}, gradient norm {}; a lower --drafter-rate may help",
                                      done, r.loss, r.gradient_norm));
        if ((done + 1) % c.run.log_every != 0 && done + 1 != d.steps) continue;
        nlohmann::ordered_json line;
        line["step"] = done + 1, line["loss"] = r.loss, line["acceptance"] = r.acceptance;
        line["gradient_norm"] = r.gradient_norm, line["seconds"] = now() - start;
        log.write(line.dump());
        if (!arguments.quiet)
            spdlog::info("drafter step {} of {}: loss {:.4f}, accepted {:.3f}", done + 1, d.steps, r.loss,
                         r.acceptance);
    }
    save_drafter(directory + "/checkpoints/drafter.ckpt", drafter);
    if (interrupted) {
        spdlog::warn("stopped at drafter step {} of {}; {}/checkpoints/drafter.ckpt is as it was then", done, d.steps,
                     directory);
        return exit_interrupted;
    }
    const expected_acceptance e = train.measure(judged);
    const auto trained = std::make_shared<const draft_model>(std::move(drafter));
    const followed_drafts f = follow_drafts(c, target, trained, backend.team(), judged, 3);
    nlohmann::ordered_json line;
    line["held_out_prompts"] = d.held_out;
    line["expected"] = {{"mean", e.mean}, {"by_depth", e.by_depth}, {"tokens", e.length}};
    line["followed"] = {{"drafts", f.drafts}, {"by_depth", f.by_depth}, {"tokens", f.length}};
    log.write(line.dump());
    std::string t = fmt::format(
        "\n{}: {} weights, {} steps, {:.1f} s. Accepted of drafts on {} held-out prompts, by depth:\n\n{:<34}", d.kind,
        trained->weights.weights.size(), d.steps, now() - start, d.held_out, "");
    const auto row = [&](const char* name, const std::vector<double>& shares, double tokens) {
        t += fmt::format("{:<34}", name);
        for (std::size_t k = 0; k < static_cast<std::size_t>(d.depth); ++k)
            t += k < shares.size() ? fmt::format("{:>7.3f}", shares[k]) : fmt::format("{:>7}", "-");
        t += fmt::format("{:>9.2f}\n", tokens);
    };
    for (int k = 1; k <= d.depth; ++k) t += fmt::format("{:>7}", k);
    t += fmt::format("{:>9}\n", "tokens");
    row("expected of draws of its own", e.by_depth, e.length);
    row("drafted with the target's noise", f.by_depth, f.length);
    fmt::print("{}", t);
    std::fflush(stdout);
    return exit_ok;
}

} // namespace trainer
