// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One cell of the study: a student is distilled with one estimator from responses that are k versions old.
//
//   controlled staleness (AsyncOPD, appendix B): step t learns from a batch that version max(0, t - k) drew. The lag
//   ramps 0, 1, …, k while the initial student's k first batches last, and is exactly k from then on.
//
// It is opd-train's `--schedule controlled --schedule-k k` without its directory, threads and checkpoints: the same
// prompts, noise and steps, the same bits. What opd-train has no option for is made of its batches (enum twist).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/teacher.hpp"
#include "opd/estimators/any.hpp"
#include "pipeline/evaluation.hpp"
#include "pipeline/learner.hpp"
#include "settings/config.hpp"
#include "task/task.hpp"

namespace staleness_study {

using opd::index_t;
using trainer::row_batch;
using arguments = std::vector<std::string>;

/// What is done to a batch that opd-train's options do not do.
enum class twist {
    none,
    head_tail,       ///< half of the entries are mu's most probable ids, for certain, the others draws from its rest
    teacher_forward, ///< the entries are the teacher's most probable ids S: -Σ_S q log p, a gradient c = -q on S
    estr,            ///< a draw counts where (log p - log mu)²/(H_mu + .01) ≤ .05 (opd::estr)
    constant,        ///< every advantage is -1: the expected gradient is 0, where ratios are right
    no_sets          ///< what rollout's filter kept is forgotten: ratios are p/mu~
};

struct contender {
    std::string name;  ///< in CSV
    std::string says;  ///< in tables and plots
    std::string group; ///< the table
    arguments options; ///< of opd-train
    twist what = twist::none;
    bool full = false; ///< with --full only
    int seeds = 0;     ///< so many only; 0: all
};

/// All of them. `budget`: ids a row that the teacher scores.
std::vector<contender> contenders(int budget);

/// How far a model is from the teacher at held-out prompts.
struct distance {
    double own = 0;         ///< mean KL(p‖q) along its own responses, nats a token
    double on_teacher = 0;  ///< along the teacher's
    double forward = 0;     ///< mean KL(q‖p) along the teacher's
    double grammatical = 0; ///< share of its responses that are
    double held_out() const { return (own + on_teacher) / 2; }
};

/// What all cells share.
class world {
public:
    /// Teacher and warm student of a checkpoint of opd-train; `base`: its settings, and those of the cells. A failure
    /// of kind exit_input where the checkpoint is of other models.
    world(const std::string& checkpoint, const arguments& base);

    distance judge(const trainer::transformer<float>& student, opd::cpu_backend& backend) const;

    const arguments base;
    trainer::config settings;
    std::unique_ptr<const trainer::any_task> task;
    trainer::transformer<float> teacher, student;
    distance before;

private:
    double divergence(const trainer::transformer<float>& student, const row_batch& batch,
                      const std::vector<float>& teacher_states, opd::choice::objective which,
                      opd::cpu_backend& backend) const;
    std::vector<trainer::problem> problems_;
    row_batch prefixes_;        // the teacher's responses to them
    std::vector<float> states_; // what its head reads there
};

struct cell {
    std::string contender = {};
    int k = 0;
    std::uint64_t seed = 0;
    int lag_least = 0, lag_most = 0; ///< over the steps t ≥ k
    distance after = {};
    double gap_closed = 0;      ///< 1 - held-out KL after / before
    double ratio_p99 = 0;       ///< of the learnt entries' p/mu, over the steps t ≥ k; 0: the estimator has none
    double left_out = 0;        ///< share of the entries that a surrogate cut or a selection left out, likewise
    double prefix_share = 0;    ///< effective share of the prefixes, likewise
    std::string weights = {};   ///< fingerprint of the student's weights
    std::vector<int> lags = {}; ///< of all steps
};

/// Failures: those of opd-train. std::logic_error where a batch is not of the version that it is to be.
cell run_cell(const world& w, const contender& c, int k, std::uint64_t seed);

/// The entries of head_tail and teacher_forward, `count` a row, in the place of those that the batch has (none). `mu`:
/// who drew its sequences, which are these samples.
void make_entries(twist what, int count, row_batch& batch, const trainer::transformer<float>& mu,
                  const trainer::transformer<float>& teacher, std::uint64_t seed,
                  const std::vector<std::uint64_t>& samples, opd::cpu_backend& backend);

} // namespace staleness_study
