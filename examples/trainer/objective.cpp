// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the names on the command line to the library's estimators.
#include "learner.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "opd/opd.hpp"
#include "whole_rows.hpp"

namespace trainer {

draw_plan draws_for(const config& c) {
    const auto part = part_estimator_of(c);
    if (!part) return {};
    switch (*part) {
    case part_estimator::mc:
        return {draw_plan::kind::iid, c.distill.m};
    case part_estimator::threshold:
        return {draw_plan::kind::threshold, c.distill.budget};
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
        plan.what = teacher_cache::kind::samples;
        plan.entries = c.distill.m;
        break;
    case part_estimator::threshold:
        plan.what = teacher_cache::kind::weighted;
        plan.entries = c.distill.budget;
        break;
    case part_estimator::topk:
    case part_estimator::tail_bucket:
        plan.what = teacher_cache::kind::support;
        plan.entries = c.distill.k;
        plan.teacher_top_k = c.distill.topk_from == "teacher";
        break;
    }
    return plan;
}

namespace {

// A model that has gone to NaN is not trained on with a gradient of 0.
constexpr opd::bad most_bad = opd::bad::raise_above(0.01);

opd::env env_of(const row_batch& batch, std::int32_t version) {
    opd::env env;
    env.reduction = opd::reduce::token_mean;
    env.mask = opd::row_mask(batch.mask);
    env.versions = opd::vector_view<const std::int32_t>(batch.versions);
    env.version = version;
    env.offsets = opd::row_offsets<>(batch.offsets);
    env.on_bad = most_bad;
    return env;
}

} // namespace

opd::result objective(opd::eigen_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      opd::student::hidden<float> student, opd::matrix_view<const float> teacher_head,
                      std::int32_t version) {
    const auto divergence = dense_estimator(c);
    if (!divergence || cache.what != teacher_cache::kind::hidden)
        throw failure(exit_usage, fmt::format("--teacher-cache hidden: not with --estimator {}, and a cache of {}",
                                              c.distill.estimator, name_of(cache.what)));
    opd::teacher::hidden<float> teacher{opd::view(cache.states.data(), batch.rows, cache.entries), teacher_head,
                                        static_cast<float>(c.distill.temperature)};
    teacher.budget = budget_of_logits(teacher, static_cast<std::size_t>(c.distill.hidden_budget));
    return of_whole_rows(backend, *divergence, selector_of(c, version), student, teacher, env_of(batch, version));
}

opd::result objective(opd::eigen_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      float* logits, index_t v, std::int32_t version) {
    const index_t n = batch.rows;
    const auto temperature = static_cast<float>(c.distill.temperature);
    const opd::env env = env_of(batch, version);
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
    const opd::teacher::support support{ids, log_q, opd::view(cache.log_tail.data(), n)};
    switch (*part) {
    case part_estimator::topk:
        if (rows.eopd)
            return opd::evaluate(
                backend, student, support,
                opd::selected{opd::renormalised{opd::weighted_sum{opd::reverse_kl{}, opd::forward_kl{}}}, *rows.eopd},
                env);
        return opd::evaluate(backend, student, support,
                             opd::selected{opd::renormalised{opd::reverse_kl{}}, rows.weights}, env);
    case part_estimator::tail_bucket:
        return opd::evaluate(backend, student, support,
                             opd::selected{opd::tail_bucket{opd::reverse_kl{}}, rows.weights}, env);
    case part_estimator::mc:
        return opd::evaluate(backend, student, opd::teacher::samples{ids, of_entries(batch.entry_log_mu), log_q},
                             opd::selected{drawn_estimator(c), rows.weights}, env);
    default:
        return opd::evaluate(backend, student,
                             opd::teacher::weighted{ids, of_entries(batch.entry_weight), of_entries(batch.entry_log_mu),
                                                    log_q, of_entries(batch.entry_exact)},
                             opd::selected{drawn_estimator(c), rows.weights}, env);
    }
}

double mean_reverse_kl(opd::eigen_backend& backend, const row_batch& batch, const transformer<float>& student,
                       const std::vector<float>& student_states, const transformer<float>& teacher,
                       const std::vector<float>& teacher_states, std::size_t budget) {
    opd::env env;
    env.mask = opd::row_mask(batch.mask);
    env.on_bad = most_bad;
    const auto states = [&](const std::vector<float>& of, const transformer<float>& model) {
        return opd::view(of.data(), batch.rows, index_t{model.shape.width});
    };
    opd::student::hidden<float> mine{states(student_states, student), head_of(student)};
    opd::teacher::hidden<float> theirs{states(teacher_states, teacher), head_of(teacher)};
    mine.budget = budget_of_logits(mine, budget), theirs.budget = budget_of_logits(theirs, budget);
    return of_whole_rows(backend, {opd::choice::objective::reverse_kl}, {}, mine, theirs, env).loss;
}

} // namespace trainer
