// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/codec.hpp"

#include <utility>

#include "model/products.hpp"
#include "opd/compressed.hpp"
#include "opd/opd.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/sampling.hpp"
#include "pipeline/whole_rows.hpp"

namespace trainer {

void encode_states(const teacher_codec& codec, opd::thread_team& threads, const std::vector<float>& states,
                   std::vector<float>& codes) {
    const index_t rows = std::ssize(states) / codec.codes.width;
    codes.resize(static_cast<std::size_t>(rows * codec.codes.rank));
    opd::encode(threads, codec.codes, opd::view(states.data(), rows, codec.codes.width),
                opd::view(codes.data(), rows, codec.codes.rank));
}

index_t rank_of(const teacher_codec& codec) { return codec.codes.rank; }
opd::matrix_view<const float> head_of(const teacher_codec& codec) { return codec.codes.decoder_view(); }

namespace {

// Responses number [first, first + count) of the teacher.
row_batch own_responses(const config& c, const any_task& task, const transformer<float>& teacher,
                        opd::thread_team& threads, int first, int count) {
    constexpr std::uint64_t own_samples = std::uint64_t{11} << 56; // apart from those of a run and of drafters
    sampling options = sampling_of(c, task);
    options.plan = {};
    options.inject = {};
    options.speculate = {};
    options.kv_tokens = 0;
    std::vector<request> requests;
    for (int i = 0; i < count; ++i)
        requests.push_back(request_of(task, c.run.seed, own_samples + static_cast<std::uint64_t>(first + i)));
    return pack(roll_out(teacher, threads, requests, options), 0);
}

} // namespace

double kl_of_codec(const config& c, const opd::codec& codes, const transformer<float>& teacher,
                   opd::cpu_backend& backend, const row_batch& batch) {
    std::vector<float> states, coded(static_cast<std::size_t>(batch.rows * codes.rank));
    teacher_scorer(teacher, backend).states(batch.inputs, states);
    const auto x = opd::view(std::as_const(states).data(), batch.rows, index_t{teacher.shape.width});
    opd::encode(backend.team(), codes, x, opd::view(coded.data(), batch.rows, codes.rank));
    opd::student::hidden<float> q{opd::view(std::as_const(coded).data(), batch.rows, codes.rank), codes.decoder_view()};
    opd::teacher::hidden<float> true_q{x, head_of(teacher)};
    q.temperature = true_q.temperature = static_cast<float>(c.distill.temperature);
    const auto budget = static_cast<std::size_t>(c.distill.hidden_budget);
    q.budget = budget_of_logits(q, budget), true_q.budget = budget_of_logits(true_q, budget);
    opd::env env;
    env.mask = opd::row_mask(batch.mask);
    return of_whole_rows(backend, {opd::choice::objective::forward_kl}, {}, q, true_q, env).loss;
}

teacher_codec calibrated_codec(const config& c, const any_task& task, const transformer<float>& teacher,
                               opd::cpu_backend& backend) {
    opd::thread_team& threads = backend.team();
    const int responses = c.distill.cache_calibration;
    const auto head = head_of(teacher);
    opd::calibration seen(head.rows, head.cols);
    const row_batch batch = own_responses(c, task, teacher, threads, 0, responses);
    std::vector<float> states;
    teacher_scorer(teacher, backend).states(batch.inputs, states);
    opd::teacher::hidden<float> source{opd::view(std::as_const(states).data(), batch.rows, head.cols), head,
                                       static_cast<float>(c.distill.temperature)};
    // whatever --hidden-budget is: sums of blocks are rounded block by block
    source.budget = 64 * sizeof(float) * static_cast<std::size_t>(head.rows);
    seen.add(threads, source, opd::row_mask(batch.mask));
    teacher_codec r;
    r.codes = opd::make_codec(threads, opd::reweighted_svd(threads, head, seen), head, c.distill.cache_rank);
    r.rows = seen.rows();
    r.kl_teacher = kl_of_codec(c, r.codes, teacher, backend,
                               own_responses(c, task, teacher, threads, responses, (responses + 3) / 4));
    return r;
}

} // namespace trainer
