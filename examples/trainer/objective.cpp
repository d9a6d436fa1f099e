// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the names on the command line to the library's estimators.
#include "learner.hpp"

#include <algorithm>

#include "opd/opd.hpp"

namespace trainer {

draw_plan draws_for(const config& c) {
    const std::string& e = c.distill.estimator;
    if (e == "mc") return {draw_plan::kind::iid, c.distill.m};
    if (e == "threshold") return {draw_plan::kind::threshold, c.distill.budget};
    if ((e == "topk" || e == "tail_bucket") && c.distill.topk_from == "student")
        return {draw_plan::kind::top_k, c.distill.k};
    return {};
}

cache_plan cache_for(const config& c) {
    const std::string& e = c.distill.estimator;
    cache_plan plan;
    plan.temperature = c.distill.temperature;
    if (e == "mc") {
        plan.what = teacher_cache::kind::samples;
        plan.entries = c.distill.m;
    } else if (e == "threshold") {
        plan.what = teacher_cache::kind::weighted;
        plan.entries = c.distill.budget;
    } else if (e == "topk" || e == "tail_bucket") {
        plan.what = teacher_cache::kind::support;
        plan.entries = c.distill.k;
        plan.teacher_top_k = c.distill.topk_from == "teacher";
    }
    return plan;
}

opd::result objective(opd::eigen_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      float* logits, index_t v, std::int32_t version) {
    const index_t n = batch.rows;
    const auto temperature = static_cast<float>(c.distill.temperature);
    opd::env env;
    env.reduction = opd::reduce::token_mean;
    env.mask = opd::row_mask(batch.mask);
    env.versions = opd::vector_view<const std::int32_t>(batch.versions);
    env.version = version;
    const opd::student::logits student{opd::view(logits, n, v), opd::view(logits, n, v), temperature};

    const auto dense = [&](const auto& divergence) {
        const opd::teacher::dense teacher{opd::view(cache.logits.data(), n, v), temperature};
        return opd::evaluate(backend, student, teacher, divergence, env);
    };
    const std::string& e = c.distill.estimator;
    if (e == "reverse_kl") return dense(opd::reverse_kl{});
    if (e == "forward_kl") return dense(opd::forward_kl{});
    if (e == "jsd") return dense(opd::jsd{.w = c.distill.jsd_w, .o = c.distill.jsd_o});
    if (e == "skew_forward") return dense(opd::skew_forward_kl{.a = c.distill.skew});
    if (e == "skew_reverse") return dense(opd::skew_reverse_kl{.a = c.distill.skew});
    if (e == "total_variation") return dense(opd::total_variation{});
    if (e == "alpha") return dense(opd::alpha_divergence{.a = c.distill.alpha});
    if (e == "chi_squared") return dense(opd::chi_squared{});

    const index_t k = cache.entries;
    const auto ids = opd::view(cache.ids.data(), n, k);
    const auto log_q = opd::view(cache.log_q.data(), n, k);
    if (e == "topk" || e == "tail_bucket") {
        const opd::teacher::support teacher{ids, log_q, opd::view(cache.log_tail.data(), n)};
        if (e == "topk") return opd::evaluate(backend, student, teacher, opd::renormalised{opd::reverse_kl{}}, env);
        return opd::evaluate(backend, student, teacher, opd::tail_bucket{opd::reverse_kl{}}, env);
    }
    const auto log_mu = opd::view(batch.entry_log_mu.data(), n, k);
    if (e == "mc")
        return opd::evaluate(backend, student, opd::teacher::samples{ids, log_mu, log_q}, drawn_estimator(c), env);
    if (e == "threshold")
        return opd::evaluate(backend, student,
                             opd::teacher::weighted{ids, opd::view(batch.entry_weight.data(), n, k), log_mu, log_q,
                                                    opd::view(batch.entry_exact.data(), n, k)},
                             drawn_estimator(c), env);
    throw failure(exit_usage, "--estimator: no objective for '" + e + "'");
}

double mean_reverse_kl(opd::eigen_backend& backend, const row_batch& batch, const std::vector<float>& student,
                       const std::vector<float>& teacher, index_t v) {
    opd::env env;
    env.mask = opd::row_mask(batch.mask);
    return opd::evaluate(backend, opd::student::logits{opd::view(student.data(), batch.rows, v)},
                         opd::teacher::dense{opd::view(teacher.data(), batch.rows, v)}, opd::reverse_kl{}, env)
        .loss;
}

} // namespace trainer
