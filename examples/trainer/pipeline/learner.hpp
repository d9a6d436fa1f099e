// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The learner: rows and a teacher cache in, one optimizer step out. The objective is the library's: opd::evaluate
// writes the gradient over the student's logits, the model carries it to the weights.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "model/publication.hpp"
#include "model/teacher.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/estimators/mismatch.hpp"
#include "opd/estimators/sequences.hpp"
#include "opd/hidden.hpp"
#include "opd/offline_drift.hpp"
#include "pipeline/supervised.hpp"
#include "settings/config.hpp"

namespace trainer {

/// What an estimator wants of rollout and of the teacher.
draw_plan draws_for(const config& c);
cache_plan cache_for(const config& c);

/// The drift of a student whose log-probs are log_p (N), from the policy that drew the batch.
opd::offline_drift drift_of(const config& c, const row_batch& batch, const teacher_cache& cache,
                            const std::vector<float>& log_p);

/// The rate of a step of distillation.
double rate_of(const config& c, const rate_change& from, std::int64_t step);

/// Loss and gradient of the configured estimator. `logits` (N,V) are overwritten by the gradient.
/// `ratios` (opd::ratio_sketch): those of drawn tokens are counted into it.
opd::result objective(opd::cpu_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      float* logits, index_t vocabulary, std::int32_t version, std::span<index_t> ratios = {});

/// Whether the estimator asks for the student that a step began with.
bool reads_proximal(const config& c);

/// log p of the recorded entries (N, entries), or of the tokens that follow (N): on what rollout's filter kept, where
/// it filters.
void entry_log_probs(opd::cpu_backend& backend, const config& c, const row_batch& batch, const float* logits,
                     index_t vocabulary, std::vector<float>& log_p);
void kept_next_log_probs(opd::cpu_backend& backend, const config& c, const row_batch& batch, const float* logits,
                         index_t vocabulary, std::vector<float>& log_p);

/// What a loss from hidden states reads of the student and where its gradients go; (N,D), (V,D).
struct student_rows {
    opd::matrix_view<const float> x;
    model_head w;
    opd::matrix_view<float> dx, dw;
};

/// The same of a teacher that is kept in hidden states, whose head is `teacher_head` (V, D of the teacher): logits are
/// made for a block of rows at a time. The gradient is that of what the student's head reads, and of that head.
opd::result objective(opd::cpu_backend& backend, const config& c, const row_batch& batch, const teacher_cache& cache,
                      const student_rows& student, const model_head& teacher_head, std::int32_t version);

/// Mean over the rows of KL(student, teacher), from what the heads of both read. `budget`: bytes of logits of each
/// side.
double mean_reverse_kl(opd::cpu_backend& backend, const row_batch& batch, const transformer<float>& student,
                       const std::vector<float>& of_student, const transformer<float>& teacher,
                       const std::vector<float>& of_teacher, std::size_t budget);

struct learner_result : step_result {
    double rate = 0;                   ///< of the step
    double kl = 0;                     ///< mean of log mu - log q over the response tokens: KL(mu, q), sampled
    index_t mismatched = 0;            ///< tokens of the current version whose log p differs from rollout's log mu
    opd::prefix_staleness prefix = {}; ///< of the responses before each token
    opd::diagnostics diagnostics = {}; ///< of the estimator
    std::vector<index_t> ratios = {};  ///< of drawn tokens, counted as opd::ratio_sketch does; else empty
    opd::offline_drift drift = {};     ///< of the student before the step from the policy that drew a data set
    opd::mismatch mismatch = {};       ///< of rollout from the student before the step, where it is measured
    int updates = 0;                   ///< of the weights

    /// Those of another mini-batch: what is a mean stays one, over tokens; of the norms, over updates.
    void add(const learner_result& o);
};

class learner {
public:
    /// `teacher_head` (V, D of the teacher): for a teacher that is kept in hidden states.
    learner(const config& settings, transformer<float>& model, adamw_state& state, opd::cpu_backend& backend,
            const model_head& teacher_head = {})
        : settings_(settings), model_(model), state_(state), backend_(backend),
          pass_(model, backend.team(), settings.distill.gradient_checkpointing), teacher_head_(teacher_head) {}

    /// What changes the weights, from the rate and the gradient of all of them, and returns that gradient's norm or its
    /// own; instead of AdamW on all weights.
    using update = std::function<double(double rate, std::vector<float>& gradient)>;
    void update_with(update f) { update_ = std::move(f); }

    /// One update. The model's weights are those of `version`, after so many `updates` on the way to the next.
    learner_result step(const row_batch& batch, const teacher_cache& cache, double rate, std::int32_t version,
                        int updates = 0);

    /// The same in parts, whose activations are there one after the other: each adds its gradient, and its loss is its
    /// share of the whole where batch.normaliser is the whole's kept rows; then one update by the sum.
    learner_result accumulate(const row_batch& part, const teacher_cache& cache, std::int32_t version, int updates = 0);
    void finish(learner_result& whole, double rate);

    /// A copy of the weights as they are, which no later step changes.
    policy snapshot(std::int32_t version) const;

    /// log p of the tokens that follow, at the current weights. (N) 0 where masked
    std::vector<float> token_log_probs(const row_batch& batch);

    /// log p of the recorded entries, likewise. (N, entries)
    std::vector<float> entry_log_probs(const row_batch& batch);

    /// What the settings ask for of the student as it is, which a step begins with, from one forward pass: the batch's
    /// entry_log_prox, log_old and old_top. For all mini-batches of a step before the first of its updates.
    void look_back(row_batch& batch);

    /// Bytes of rows of V numbers that a step held at once, of student and teacher: the most so far.
    std::size_t logits_at_once() const { return logits_at_once_; }

private:
    void recompute(const row_batch& batch);
    opd::result loss_of_logits(const row_batch& batch, const teacher_cache& cache, std::int32_t version,
                               std::span<index_t> ratios);
    opd::result loss_of_states(const row_batch& batch, const teacher_cache& cache, std::int32_t version);

    const config& settings_;
    transformer<float>& model_;
    adamw_state& state_;
    opd::cpu_backend& backend_;
    training_pass<float> pass_;
    model_head teacher_head_;
    std::vector<float> logits_;            // (N,V), then their gradient
    std::vector<float> states_, d_states_; // (N,D) of a hidden teacher: what the student's head reads, and its gradient
    std::vector<float> log_p_;             // (N)
    std::vector<float> gradient_;
    std::vector<float> sum_; // of the parts before the last, where there are several
    int parts_ = 0;          // since the last update
    update update_;
    std::size_t logits_at_once_ = 0;
};

} // namespace trainer
