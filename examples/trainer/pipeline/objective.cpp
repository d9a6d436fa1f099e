// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the names on the command line to the library's estimators.
#include "pipeline/learner.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "opd/estimators/correction_fit.hpp"
#include "opd/estimators/m2po.hpp"
#include "opd/opd.hpp"
#include "pipeline/whole_rows.hpp"
#include "settings/estimator.hpp"

namespace trainer {

draw_plan draws_for(const config& c) {
    const auto part = part_estimator_of(c);
    if (!part) return {};
    switch (*part) {
    case part_estimator::mc:
        return {draw_plan::kind::iid, c.distill.m};
    case part_estimator::lightning: // rollout's own token
        return {draw_plan::kind::iid, 1};
    case part_estimator::threshold:
        return {draw_plan::kind::threshold, c.distill.budget};
    case part_estimator::topk_rw:
        return {draw_plan::kind::top_k, c.distill.k};
    case part_estimator::topk:
    case part_estimator::tail_bucket:
        if (c.distill.topk_from == "student") return {draw_plan::kind::top_k, c.distill.k};
        break;
    }
    return {};
}

cache_plan cache_for(const config& c) {
    cache_plan plan;
    plan.temperature = c.distill.temperature;
    plan.budget = static_cast<std::size_t>(c.distill.hidden_budget);
    const auto part = part_estimator_of(c);
    if (!part && c.distill.teacher_cache != "dense") plan.what = teacher_cache::kind::hidden;
    if (!part) return plan;
    switch (*part) {
    case part_estimator::mc:
    case part_estimator::lightning:
        plan.what = teacher_cache::kind::samples;
        plan.entries = draws_for(c).count;
        break;
    case part_estimator::threshold:
        plan.what = teacher_cache::kind::weighted;
        plan.entries = c.distill.budget;
        break;
    case part_estimator::topk:
    case part_estimator::topk_rw:
    case part_estimator::tail_bucket:
        plan.what = teacher_cache::kind::support;
        plan.entries = c.distill.k;
        plan.teacher_top_k = draws_for(c).what != draw_plan::kind::top_k;
        break;
    }
    return plan;
}

namespace {

opd::env env_of(const config& c, const row_batch& batch, std::int32_t version) {
    opd::env env;
    env.loss_clamp = c.distill.loss_clamp;
    env.reduction = opd::reduce::token_mean;
    env.normaliser = batch.normaliser;
    env.mask = opd::row_mask(batch.mask);
    env.versions = opd::vector_view<const std::int32_t>(batch.versions);
    env.version = version;
    env.offsets = opd::row_offsets<>(batch.offsets);
    env.on_bad = most_bad;
    return env;
}

} // namespace

namespace {

// f of a cache of drawn tokens, on what rollout's filter kept where it filters.
template <class Cache, class F>
auto on_sets(const row_batch& batch, const Cache& tokens, F&& f) {
    if (batch.kept_offsets.empty()) return f(tokens);
    return f(opd::teacher::on_kept_sets{tokens, opd::view(batch.kept_ids.data(), std::ssize(batch.kept_ids)),
                                        opd::row_offsets<>(batch.kept_offsets)});
}

// f of the entries that rollout recorded, with what the teacher says of them.
template <class F>
auto of_drawn(const config& c, const row_batch& batch, const std::vector<float>& log_q, F&& f) {
    const index_t n = batch.rows, k = batch.entries;
    const auto of_entries = [&](const auto& column) { return opd::view(column.data(), n, k); };
    const auto log_mu = of_entries(batch.entry_log_mu);
    const auto with_proximal = [&](auto tokens) {
        if (!batch.entry_log_prox.empty()) tokens.log_prox = of_entries(batch.entry_log_prox);
        return on_sets(batch, tokens, f);
    };
    if (part_estimator_of(c) != part_estimator::threshold)
        return with_proximal(opd::teacher::samples{of_entries(batch.ids), log_mu, of_entries(log_q)});
    return with_proximal(opd::teacher::weighted{of_entries(batch.ids), of_entries(batch.entry_weight), log_mu,
                                                of_entries(log_q), of_entries(batch.entry_exact)});
}

template <class Cache>
opd::result loss_of_drawn(opd::cpu_backend& backend, const config& c, const opd::student::logits<float>& student,
                          const Cache& tokens, const opd::any_selector& rows, opd::env env) {
    const opd::any_sampled estimator = drawn_estimator(c);
    std::vector<std::uint8_t> keep;
    if (c.distill.m2po > 0) { // an update's batch is whole here: the selection is over all of it
        const index_t n = tokens.ids.rows, k = tokens.ids.cols;
        std::vector<double> log_p(static_cast<std::size_t>(n * k), 0.0);
        keep.assign(log_p.size(), 1);
        opd::token_logp(backend, student.z, tokens, opd::view(log_p.data(), n, k), student.temperature, env.mask);
        const auto table = opd::view(std::as_const(log_p).data(), n, k);
        opd::m2po_fit fit{.tau = c.distill.m2po};
        fit.add(table, tokens, env.mask, estimator.of);
        fit.freeze().keep(table, tokens, env.mask, opd::view(keep.data(), n, k), estimator.of);
        env.frozen.keep = opd::view(std::as_const(keep).data(), n, k);
    }
    std::vector<double> weight;
    index_t uncounted = 0; // tokens that a correction takes out of the count
    if (const opd::correction& correct = estimator.surrogate.correct; correct.needs_pass()) { // likewise
        const index_t n = tokens.ids.rows, sequences = env.offsets.size - 1;
        std::vector<double> log_p(static_cast<std::size_t>(n), 0.0);
        std::vector<index_t> sequence(log_p.size(), 0);
        for (index_t s = 0; s < sequences; ++s)
            std::fill(sequence.begin() + env.offsets[s], sequence.begin() + env.offsets[s + 1], s);
        opd::token_logp(backend, student.z, tokens, opd::view(log_p.data(), n, 1), student.temperature, env.mask);
        const auto table = opd::view(std::as_const(log_p).data(), n, 1);
        keep.assign(log_p.size(), 1), weight.assign(log_p.size(), 1.0);
        opd::correction_fit fit{correct};
        fit.add(table, tokens, sequence, env.mask);
        const opd::correction_selection chosen = fit.freeze();
        chosen.apply(table, tokens, sequence, env.mask, opd::view(keep.data(), n, 1), opd::view(weight.data(), n, 1));
        env.frozen.keep = opd::view(std::as_const(keep).data(), n, 1);
        env.frozen.weight = opd::view(std::as_const(weight).data(), n, 1);
        if (correct.shrinks) env.mask = opd::row_mask(keep), uncounted = chosen.rejected_tokens;
    }
    opd::result r = opd::evaluate(backend, student, tokens, opd::selected{estimator, rows}, env);
    r.diagnostics.dropped += uncounted;
    return r;
}

} // namespace

bool reads_proximal(const config& c) {
    const auto part = part_estimator_of(c);
    return (part == part_estimator::mc || part == part_estimator::threshold) &&
           (drawn_estimator(c).reads_columns() & opd::column::log_prox) != 0;
}

void entry_log_probs(opd::cpu_backend& backend, const config& c, const row_batch& batch, const float* logits, index_t v,
                     std::vector<float>& log_p) {
    log_p.assign(static_cast<std::size_t>(batch.rows * batch.entries), 0.0f);
    of_drawn(c, batch, batch.entry_log_mu, [&](const auto& tokens) { // what the teacher says is not looked at
        opd::token_logp(backend, opd::view(logits, batch.rows, v), tokens,
                        opd::view(log_p.data(), batch.rows, batch.entries), static_cast<float>(c.distill.temperature),
                        opd::row_mask(batch.mask));
    });
}

void kept_next_log_probs(opd::cpu_backend& backend, const config& c, const row_batch& batch, const float* logits,
                         index_t v, std::vector<float>& log_p) {
    log_p.assign(static_cast<std::size_t>(batch.rows), 0.0f);
    const auto log_mu = opd::view(batch.log_mu.data(), batch.rows, 1);
    const opd::teacher::samples next{opd::view(batch.next.data(), batch.rows, 1), log_mu, log_mu};
    on_sets(batch, next, [&](const auto& tokens) {
        opd::token_logp(backend, opd::view(logits, batch.rows, v), tokens, opd::view(log_p.data(), batch.rows, 1),
                        static_cast<float>(c.distill.temperature), opd::row_mask(batch.mask));
    });
}

opd::result objective(opd::cpu_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      const student_rows& student, const model_head& teacher_head, std::int32_t version) {
    const auto divergence = dense_estimator(c);
    if (!divergence || cache.what != teacher_cache::kind::hidden)
        throw failure(exit_usage, fmt::format("--teacher-cache hidden: not with --estimator {}, and a cache of {}",
                                              c.distill.estimator, name_of(cache.what)));
    const auto temperature = static_cast<float>(c.distill.temperature);
    const auto budget = static_cast<std::size_t>(c.distill.hidden_budget);
    return with_heads(
        [&]<class Head>(const Head& own, const Head& its) {
            student_states<Head> mine{
                .x = student.x, .w = own, .dx = student.dx, .dw = student.dw, .temperature = temperature};
            teacher_states<Head> theirs{
                .x = opd::view(cache.states.data(), batch.rows, cache.entries), .w = its, .temperature = temperature};
            mine.budget = budget_of_logits(mine, budget), theirs.budget = budget_of_logits(theirs, budget);
            return of_whole_rows(backend, *divergence, selector_of(c, version), mine, theirs,
                                 env_of(c, batch, version));
        },
        student.w, teacher_head);
}

opd::result objective(opd::cpu_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      float* logits, index_t v, std::int32_t version, std::span<index_t> ratios) {
    const index_t n = batch.rows;
    const auto temperature = static_cast<float>(c.distill.temperature);
    opd::env env = env_of(c, batch, version);
    const row_choice rows = selector_of(c, version);
    const opd::student::logits student{opd::view(logits, n, v), opd::view(logits, n, v), temperature};

    if (const auto dense = dense_estimator(c)) {
        const opd::teacher::dense teacher{opd::view(cache.logits.data(), n, v), temperature};
        return of_whole_rows(backend, *dense, rows, student, teacher, env);
    }
    const auto part = part_estimator_of(c);
    if (!part) throw failure(exit_usage, "--estimator: no objective for '" + c.distill.estimator + "'");
    const index_t k = cache.entries;
    const auto of_entries = [&](const auto& column) { return opd::view(column.data(), n, k); };
    const auto ids = of_entries(cache.ids);
    const auto log_q = of_entries(cache.log_q);
    opd::teacher::support support{ids, log_q, opd::view(cache.log_tail.data(), n)};
    switch (*part) {
    case part_estimator::topk:
        if (rows.eopd)
            return opd::evaluate(
                backend, student, support,
                opd::selected{opd::renormalised{opd::weighted_sum{opd::reverse_kl{}, opd::forward_kl{}}}, *rows.eopd},
                env);
        return opd::evaluate(backend, student, support,
                             opd::selected{opd::renormalised{opd::reverse_kl{}}, rows.weights}, env);
    case part_estimator::topk_rw:
        support.log_mu = of_entries(batch.entry_log_mu);
        support.chosen_by = opd::teacher::chosen_by::stale_student;
        return opd::evaluate(backend, student, support, opd::selected{opd::reweighted{}, rows.weights}, env);
    case part_estimator::tail_bucket:
        return opd::evaluate(backend, student, support,
                             opd::selected{opd::tail_bucket{opd::reverse_kl{}}, rows.weights}, env);
    default:
        if (!ratios.empty()) env.measure.ratios = opd::view(ratios.data(), std::ssize(ratios));
        return of_drawn(c, batch, cache.log_q, [&](const auto& tokens) {
            return loss_of_drawn(backend, c, student, tokens, rows.weights, env);
        });
    }
}

double mean_reverse_kl(opd::cpu_backend& backend, const row_batch& batch, const transformer<float>& student,
                       const std::vector<float>& of_student, const transformer<float>& teacher,
                       const std::vector<float>& of_teacher, std::size_t budget) {
    opd::env env;
    env.mask = opd::row_mask(batch.mask);
    env.on_bad = most_bad;
    const auto states = [&](const std::vector<float>& of, const transformer<float>& model) {
        return opd::view(of.data(), batch.rows, index_t{model.shape.width});
    };
    return with_heads(
        [&]<class Head>(const Head& own, const Head& its) {
            student_states<Head> mine{.x = states(of_student, student), .w = own};
            teacher_states<Head> theirs{.x = states(of_teacher, teacher), .w = its};
            mine.budget = budget_of_logits(mine, budget), theirs.budget = budget_of_logits(theirs, budget);
            return of_whole_rows(backend, {opd::choice::objective::reverse_kl}, {}, mine, theirs, env).loss;
        },
        model_head(student), model_head(teacher));
}

} // namespace trainer
