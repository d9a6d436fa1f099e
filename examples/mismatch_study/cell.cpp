// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "cell.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "pipeline/learner.hpp"
#include "run/run.hpp"
#include "run/scoring.hpp"
#include "schedule/stages.hpp"
#include "settings/checkpoint.hpp"
#include "settings/files.hpp"

namespace mismatch_study {

namespace {

using namespace trainer;

// As in opd-train: samples of distillation, and of an evaluation.
constexpr std::uint64_t first_sample = (static_cast<std::uint64_t>(stage::distill) + 1) << 56;
constexpr std::uint64_t evaluation_samples = std::uint64_t{8} << 56;

std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

std::string print_of(const std::vector<float>& weights) {
    return hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)});
}

// What a window adds up.
struct sums {
    double steps = 0, updates = 0, reward = 0, loss = 0, norm = 0, norm_max = 0;
    double tokens = 0, rejected = 0, truncated = 0, clipped = 0;
    opd::mismatch mismatch = {};

    void add(const learner_result& r, index_t kept) {
        const opd::diagnostics& d = r.diagnostics;
        updates += 1, loss += r.loss, norm += r.gradient_norm, norm_max = std::max(norm_max, r.gradient_norm);
        tokens += static_cast<double>(kept);
        rejected += static_cast<double>(d.dropped + d.masked), truncated += static_cast<double>(d.truncated);
        clipped += static_cast<double>(d.clipped_positive + d.clipped_negative);
        mismatch.merge(r.mismatch);
    }
    void write(window& to) const {
        const opd::mismatch& m = mismatch;
        auto& x = to.x;
        x[figure::reward] = reward / steps;
        x[figure::loss] = loss / updates, x[figure::gradient_norm] = norm / updates;
        x[figure::gradient_norm_max] = norm_max;
        x[figure::delta_mean] = m.delta.mean(), x[figure::delta_abs] = m.delta.abs_mean();
        x[figure::delta_max] = m.delta.abs_max, x[figure::delta_p99] = m.quantile(0.99);
        x[figure::exact] = static_cast<double>(m.exact) / tokens, x[figure::flips] = m.flip_share();
        x[figure::k1_corr] = m.corr.k1(), x[figure::k3_corr] = m.corr.k3();
        x[figure::k1_train] = m.train.k1(), x[figure::k3_train] = m.train.k3();
        x[figure::k1_rollout] = m.rollout.k1(), x[figure::k3_rollout] = m.rollout.k3();
        x[figure::c_train_positive] = m.train.contribution(true);
        x[figure::c_train_negative] = m.train.contribution(false);
        x[figure::c_rollout_positive] = m.rollout.contribution(true);
        x[figure::c_rollout_negative] = m.rollout.contribution(false);
        x[figure::rejected] = rejected / tokens, x[figure::truncated] = truncated / tokens;
        x[figure::clipped] = clipped / tokens;
    }
};

} // namespace

std::vector<choice> engines() {
    return {{"exact", "exact", {"--inject-mismatch=noise=0"}}, // nothing, and figures of it
            {"split", "products split in 4", {"--inject-mismatch=split=4"}},
            {"bf16", "bfloat16", {"--inject-mismatch=bf16"}},
            {"temperature", "temperature 1.1 for 1", {"--inject-mismatch=temperature=1.1"}},
            {"noise", "heavy-tailed noise .05", {"--inject-mismatch=noise=0.05"}},
            {"filter", "top-p .95, unreported", {"--rollout-top-p=0.95", "--inject-mismatch=filter"}}};
}

std::vector<choice> treatments() {
    const auto ppo = [](const char* preset) {
        return arguments{"--mini-batches=2", fmt::format("--correction={}", preset), "--accept-bias"};
    };
    return {{"reinforce", "REINFORCE, one update", {"--surrogate=score_function"}},
            {"recompute", "recompute", ppo("recompute")},
            {"bypass", "bypass", ppo("bypass")},
            {"tis", "TIS", ppo("tis")},
            {"icepop", "IcePop [.5, 2]", ppo("slime-icepop")},
            {"srs_k3_corr", "srs-k3-corr", ppo("srs-k3-corr")},
            {"srs_k3_ppo", "srs-k3-ppo", ppo("srs-k3-ppo")},
            {"tis_srs_k1_corr", "tis-srs-k1-corr", ppo("tis-srs-k1-corr")},
            {"tis_srs_k3_corr", "tis-srs-k3-corr", ppo("tis-srs-k3-corr")},
            {"k3_mean_tis", "mean K3 ≤ .01, TIS", ppo("decoupled_k3_rs_token_tis")}};
}

world::world(const std::string& checkpoint, const arguments& base_arguments)
    : base(base_arguments), settings(parse_command_line(base_arguments).settings), task(task_of(settings)),
      teacher(with_task_shapes(settings, *task).teacher_model),
      student(with_task_shapes(settings, *task).student_model) {
    settings = with_task_shapes(settings, *task);
    if (task->judged_by_kl()) throw failure(exit_usage, "the study is of a task with right answers: --task=gcd");
    std::string ignored;
    run_state state = load_checkpoint(checkpoint, ignored);
    teacher = model_with(settings.teacher_model, std::move(state.teacher_weights), checkpoint);
    student = model_with(settings.student_model, std::move(state.student_weights), checkpoint);
    const auto most = std::min(size(settings.evaluation.prompts), task->held_out_problems());
    for (std::size_t i = 0; i < most; ++i) problems_.push_back(task->held_out_problem(i));
    opd::cpu_backend backend{.threads = threads_of(settings)};
    before = judge(student, backend), of_teacher = judge(teacher, backend);
}

world::standing world::judge(const transformer<float>& model, opd::cpu_backend& backend) const {
    const evaluation_result r = evaluate_model(model, backend.team(), *task, problems_, 0, settings.run.seed,
                                               evaluation_samples, settings.distill.slots);
    const row_batch own = pack(r.responses, 0);
    std::vector<float> mine, theirs;
    teacher_scorer(model, backend).states(own.inputs, mine);
    teacher_scorer(teacher, backend).states(own.inputs, theirs);
    return {r.accuracy,
            mean_reverse_kl(backend, own, model, mine, teacher, theirs, size(settings.distill.hidden_budget))};
}

std::vector<window> run_cell(const world& w, const choice& engine, const choice& treatment, std::uint64_t seed,
                             int windows) {
    arguments line = w.base;
    for (const arguments* more : {&engine.options, &treatment.options})
        line.insert(line.end(), more->begin(), more->end());
    line.push_back(fmt::format("--seed={}", seed));
    const config settings = with_task_shapes(parse_command_line(line).settings, *w.task);
    opd::cpu_backend backend{.threads = 1};
    transformer<float> student = w.student;
    adamw_state state;
    learner learn(settings, student, state, backend, head_of(w.teacher));
    teacher_scorer teacher(w.teacher, backend);
    const cache_plan plan = cache_for(settings);
    const sampling how = sampling_of(settings, *w.task);
    const int count = draws_for(settings).count, steps = settings.distill.steps, sequences = batch_of(settings),
              parts = settings.distill.mini_batches;

    std::vector<window> out;
    sums since;
    for (int t = 0; t < steps; ++t) {
        std::vector<request> prompts;
        for (int i = 0; i < sequences; ++i)
            prompts.push_back(request_of(*w.task, seed, first_sample + static_cast<std::uint64_t>(t * sequences + i),
                                         settings.distill.answers));
        const std::vector<trajectory> rolled = roll_out(student, backend.team(), prompts, how, t);
        double right = 0;
        for (const trajectory& r : rolled)
            right += w.task
                         ->judged(w.task->training_problem(seed, prompt_of(r.sample, settings.distill.answers)),
                                  r.response())
                         .correct;
        since.steps += 1, since.reward += right / sequences;
        std::vector<row_batch> batches;
        for (int part = 0; part < parts; ++part) {
            const std::size_t first = size(sequences) * size(part) / size(parts),
                              end = size(sequences) * size(part + 1) / size(parts);
            learn.look_back(batches.emplace_back(pack(std::span(rolled).subspan(first, end - first), count)));
        }
        int updates = 0;
        teacher_cache cache;
        for (const row_batch& batch : batches) {
            teacher.score(batch, plan, cache);
            const learner_result r = learn.step(batch, cache, rate_of(settings, {}, t), t, updates++);
            if (!std::isfinite(r.loss) || !std::isfinite(r.gradient_norm))
                throw failure(exit_numeric, fmt::format("{} with {}, seed {}: step {} has loss {}, gradient norm {}",
                                                        engine.name, treatment.name, seed, t, r.loss, r.gradient_norm));
            since.add(r, batch.kept);
        }
        if (std::int64_t{t + 1} * windows / steps == std::int64_t{t} * windows / steps) continue;
        window& told = out.emplace_back();
        told.step = t + 1;
        since.write(told);
        const world::standing now = w.judge(student, backend);
        told.x[figure::accuracy] = now.accuracy, told.x[figure::kl] = now.kl;
        told.weights = print_of(student.weights);
        since = {};
    }
    return out;
}

} // namespace mismatch_study
