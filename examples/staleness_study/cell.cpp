// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "cell.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <span>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/draw.hpp"
#include "opd/opd.hpp"
#include "opd/ratio_sketch.hpp"
#include "pipeline/whole_rows.hpp"
#include "run/run.hpp"
#include "run/scoring.hpp"
#include "schedule/stages.hpp"
#include "settings/checkpoint.hpp"
#include "settings/files.hpp"

namespace staleness_study {

namespace {

using namespace trainer;

// As in opd-train: samples of distillation, and of an evaluation.
constexpr std::uint64_t first_sample = (static_cast<std::uint64_t>(stage::distill) + 1) << 56;
constexpr std::uint64_t evaluation_samples = std::uint64_t{8} << 56;

constexpr double estr_tau = 0.05, estr_epsilon = 0.01;

arguments operator+(arguments a, const arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}
std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

std::vector<float> logits_at(const transformer<float>& model, const row_batch& batch, opd::cpu_backend& backend) {
    std::vector<float> z;
    teacher_scorer(model, backend).logits(batch.inputs, z);
    return z;
}

// H(mu) of every row that counts, nats. (N)
std::vector<double> entropies(const std::vector<float>& z, const row_batch& batch) {
    const std::size_t v = z.size() / size(batch.rows);
    std::vector<double> h(size(batch.rows), 0);
    for (std::size_t r = 0; r < h.size(); ++r) {
        if (batch.mask[r] == 0) continue;
        const std::span row(z.data() + r * v, v);
        const double most = *std::max_element(row.begin(), row.end());
        double sum = 0, moment = 0;
        for (const float x : row) {
            const double e = std::exp(x - most);
            sum += e, moment += e * (x - most);
        }
        h[r] = std::log(sum) - moment / sum;
    }
    return h;
}

// The draws that ESTR masks get weight 0. Returns how many.
index_t mask_by_entropy(row_batch& batch, const std::vector<float>& log_p, const std::vector<double>& h) {
    const opd::estr estr{estr_tau, estr_epsilon};
    index_t masked = 0;
    batch.entry_weight.assign(log_p.size(), 0.0f);
    for (std::size_t i = 0; i < log_p.size(); ++i) {
        const std::size_t row = i / size(batch.entries);
        if (batch.mask[row] == 0) continue;
        opd::token_in x{};
        x.log_p = log_p[i], x.log_mu = batch.entry_log_mu[i], x.mu_entropy = h[row];
        const bool out = (estr(x).flags & opd::token_flag::masked) != 0;
        masked += out;
        if (!out) batch.entry_weight[i] = 1.0f / static_cast<float>(batch.entries);
    }
    return masked;
}

// A step's share: what one update learns from.
struct share {
    row_batch batch;
    teacher_cache cache;
    std::vector<double> mu_entropy = {}; // estr
};

} // namespace

void make_entries(twist what, int count, row_batch& batch, const transformer<float>& mu,
                  const transformer<float>& teacher, std::uint64_t seed, const std::vector<std::uint64_t>& samples,
                  opd::cpu_backend& backend) {
    const index_t n = batch.rows;
    const std::size_t all = size(n * count);
    batch.entries = count;
    batch.ids.resize(all);
    for (std::size_t i = 0; i < all; ++i) batch.ids[i] = static_cast<std::int32_t>(i % size(count)); // of masked rows
    batch.entry_log_mu.assign(all, 0.0f);
    batch.entry_weight.assign(all, 0.0f);
    batch.entry_exact.assign(all, std::uint8_t{0});
    if (what == twist::teacher_forward) { // mu cancels: c = w (p/mu) (-q/p) with w = mu
        teacher_cache best;
        teacher_scorer(teacher, backend)
            .score(batch, {.what = teacher_cache::kind::support, .entries = count, .teacher_top_k = true}, best);
        for (std::size_t i = 0; i < all; ++i) {
            if (batch.mask[i / size(count)] == 0) continue;
            batch.ids[i] = best.ids[i];
            batch.entry_log_mu[i] = best.log_q[i];
            batch.entry_weight[i] = std::exp(best.log_q[i]);
            batch.entry_exact[i] = 1;
        }
        return;
    }
    const std::vector<float> z = logits_at(mu, batch, backend);
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position;
    for (std::size_t s = 0; s < samples.size(); ++s)
        for (std::int64_t r = batch.offsets[s]; r < batch.offsets[s + 1]; ++r) {
            sample.push_back(samples[s]);
            position.push_back(static_cast<std::uint32_t>(r - batch.offsets[s] + 1)); // of the token that follows
        }
    opd::draw(backend, opd::view(z.data(), n, std::ssize(z) / n), opd::design::head_tail{count / 2, count - count / 2},
              opd::draw_keys<>{
                  seed, opd::view(std::as_const(sample).data(), n), opd::view(std::as_const(position).data(), n), {}},
              opd::drawn<std::int32_t, float, float>{
                  opd::view(batch.ids.data(), n, count), opd::view(batch.entry_log_mu.data(), n, count),
                  opd::view(batch.entry_weight.data(), n, count), opd::view(batch.entry_exact.data(), n, count)},
              opd::draw_options<>{.mask = opd::row_mask(batch.mask)});
}

// --- how far from the teacher ---------------------------------------------------------------------------------------

world::world(const std::string& checkpoint, const arguments& base_arguments)
    : base(base_arguments), settings(parse_command_line(base_arguments).settings), task(task_of(settings)),
      teacher(with_task_shapes(settings, *task).teacher_model),
      student(with_task_shapes(settings, *task).student_model) {
    settings = with_task_shapes(settings, *task);
    if (!task->judged_by_kl()) throw failure(exit_usage, "the study is of a task that is judged by KL: --task=grammar");
    std::string ignored;
    run_state state = load_checkpoint(checkpoint, ignored);
    teacher = model_with(settings.teacher_model, std::move(state.teacher_weights), checkpoint);
    student = model_with(settings.student_model, std::move(state.student_weights), checkpoint);
    const auto most = std::min(size(settings.evaluation.prompts), task->held_out_problems());
    for (std::size_t i = 0; i < most; ++i) problems_.push_back(task->held_out_problem(i));
    opd::cpu_backend backend{.threads = threads_of(settings)};
    prefixes_ = pack(evaluate_model(teacher, backend.team(), *task, problems_, 0, settings.run.seed, evaluation_samples,
                                    settings.distill.slots)
                         .responses,
                     0);
    teacher_scorer(teacher, backend).states(prefixes_.inputs, states_);
    before = judge(student, backend);
}

double world::divergence(const transformer<float>& model, const row_batch& batch,
                         const std::vector<float>& teacher_states, opd::choice::objective which,
                         opd::cpu_backend& backend) const {
    std::vector<float> states;
    teacher_scorer(model, backend).states(batch.inputs, states);
    opd::student::hidden<float> mine{opd::view(std::as_const(states).data(), batch.rows, index_t{model.shape.width}),
                                     head_of(model)};
    opd::teacher::hidden<float> theirs{opd::view(teacher_states.data(), batch.rows, index_t{teacher.shape.width}),
                                       head_of(teacher)};
    const auto budget = size(settings.distill.hidden_budget);
    mine.budget = budget_of_logits(mine, budget), theirs.budget = budget_of_logits(theirs, budget);
    opd::env env;
    env.mask = opd::row_mask(batch.mask);
    return of_whole_rows(backend, {which}, {}, mine, theirs, env).loss;
}

distance world::judge(const transformer<float>& model, opd::cpu_backend& backend) const {
    const evaluation_result r = evaluate_model(model, backend.team(), *task, problems_, 0, settings.run.seed,
                                               evaluation_samples, settings.distill.slots);
    const row_batch own = pack(r.responses, 0);
    std::vector<float> states;
    teacher_scorer(teacher, backend).states(own.inputs, states);
    using opd::choice::objective;
    return {.own = divergence(model, own, states, objective::reverse_kl, backend),
            .on_teacher = divergence(model, prefixes_, states_, objective::reverse_kl, backend),
            .forward = divergence(model, prefixes_, states_, objective::forward_kl, backend),
            .grammatical = r.accuracy};
}

// --- a cell ---------------------------------------------------------------------------------------------------------

cell run_cell(const world& w, const contender& c, int k, std::uint64_t seed) {
    const arguments run = {fmt::format("--seed={}", seed), "--schedule=controlled", fmt::format("--schedule-k={}", k)};
    const config settings = with_task_shapes(parse_command_line(w.base + c.options + run).settings, *w.task);
    config learnt = settings; // what the learner is told
    const int count = draws_for(settings).count;
    if (c.what == twist::estr) // draws of weights of their own
        learnt.distill.estimator = "threshold", learnt.distill.budget = count;
    const bool own_entries = c.what == twist::head_tail || c.what == twist::teacher_forward;

    opd::cpu_backend backend{.threads = 1};
    transformer<float> student = w.student;
    adamw_state state;
    learner learn(learnt, student, state, backend, head_of(w.teacher));
    teacher_scorer teacher(w.teacher, backend);
    const cache_plan plan = cache_for(learnt);
    sampling how = sampling_of(settings, *w.task);
    if (own_entries) how.plan = {};

    cell r;
    r.contender = c.name, r.k = k, r.seed = seed;
    std::deque<policy> versions; // from max(0, t - k) on
    versions.push_back(learn.snapshot(0));
    std::vector<index_t> ratios(size(opd::ratio_sketch::bins), 0);
    opd::prefix_staleness prefix;
    double entries = 0, left_out = 0;
    const int steps = settings.distill.steps, sequences = batch_of(settings), parts = settings.distill.mini_batches;
    bool any = false;
    for (int t = 0; t < steps; ++t) {
        const int version = std::max(0, t - k);
        while (versions.front().version < version) versions.pop_front();
        const policy& mu = versions.front();
        std::vector<request> prompts;
        for (int i = 0; i < sequences; ++i)
            prompts.push_back(request_of(*w.task, seed, first_sample + static_cast<std::uint64_t>(t * sequences + i),
                                         settings.distill.answers));
        const std::vector<trajectory> rolled = roll_out(*mu.model, backend.team(), prompts, how, mu.version);

        std::vector<share> shares;
        for (int part = 0; part < parts; ++part) {
            const auto first = size(sequences) * size(part) / size(parts),
                       end = size(sequences) * size(part + 1) / size(parts);
            const std::span these = std::span(rolled).subspan(first, end - first);
            share& s = shares.emplace_back(pack(these, own_entries ? 0 : count), teacher_cache{});
            if (c.what == twist::no_sets) s.batch.kept_offsets.clear(), s.batch.kept_ids.clear();
            if (own_entries) {
                std::vector<std::uint64_t> samples;
                for (const trajectory& one : these) samples.push_back(one.sample);
                make_entries(c.what, count, s.batch, *mu.model, w.teacher, seed, samples, backend);
            }
            teacher.score(s.batch, plan, s.cache);
            if (c.what == twist::constant) // log q - log mu = -1, which --shape old takes for the advantage
                for (std::size_t i = 0; i < s.cache.log_q.size(); ++i) s.cache.log_q[i] = s.batch.entry_log_mu[i] - 1;
            if (c.what == twist::estr) s.mu_entropy = entropies(logits_at(*mu.model, s.batch, backend), s.batch);
            if (reads_proximal(learnt)) s.batch.entry_log_prox = learn.entry_log_probs(s.batch);

            const auto [oldest, newest] = std::minmax_element(s.batch.versions.begin(), s.batch.versions.end());
            if (*oldest != version || *newest != version)
                throw std::logic_error(
                    fmt::format("step {} has responses of versions {} to {}, not of {}", t, *oldest, *newest, version));
            if (part == 0) r.lags.push_back(t - *oldest);
        }
        int updates = 0;
        for (share& s : shares) {
            index_t masked = 0;
            if (c.what == twist::estr) masked = mask_by_entropy(s.batch, learn.entry_log_probs(s.batch), s.mu_entropy);
            const learner_result one = learn.step(s.batch, s.cache, rate_of(learnt, {}, t), t, updates++);
            if (t < k) continue;
            const opd::diagnostics& d = one.diagnostics;
            prefix.merge(one.prefix);
            entries += static_cast<double>(d.tokens);
            left_out += static_cast<double>(d.clipped_positive + d.clipped_negative + d.masked + d.dropped + masked);
            any |= !one.ratios.empty() && c.what != twist::teacher_forward;
            for (std::size_t i = 0; i < one.ratios.size(); ++i) ratios[i] += one.ratios[i];
        }
        versions.push_back(learn.snapshot(t + 1));
    }
    const auto steady = r.lags.begin() + std::min<std::ptrdiff_t>(k, std::ssize(r.lags) - 1);
    r.lag_least = *std::min_element(steady, r.lags.end()), r.lag_most = *std::max_element(steady, r.lags.end());
    r.after = w.judge(student, backend);
    r.gap_closed = 1 - r.after.held_out() / w.before.held_out();
    if (any) r.ratio_p99 = opd::ratio_sketch::quantile(ratios, 0.99);
    if (entries > 0) r.left_out = left_out / entries;
    r.prefix_share = prefix.effective_share();
    r.weights =
        hash128({reinterpret_cast<const char*>(student.weights.data()), student.weights.size() * sizeof(float)});
    return r;
}

} // namespace staleness_study
