// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One cell of the study: a student is distilled on-policy while rollout computes with an engine of its own, and the
// loss does about it what one treatment says. It is opd-train's `--schedule sync` without its directory, threads and
// checkpoints: the same prompts, noise and steps, the same bits.
//
// A cell is told in windows of steps, by the figures of VeXact's plots (arXiv 2605.14220, figures 2 to 6).
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "pipeline/evaluation.hpp"
#include "settings/config.hpp"
#include "task/task.hpp"

namespace mismatch_study {

using arguments = std::vector<std::string>;

/// What rollout computes with, or what the loss does: options of opd-train under a name.
struct choice {
    std::string name;  ///< in CSV
    std::string says;  ///< in tables and plots
    arguments options; ///< of opd-train
};
/// The first is exact.
std::vector<choice> engines();
/// The first is REINFORCE with one update a step, the others PPO's clip with several: VeXact's figure 2, then 3 to 6.
std::vector<choice> treatments();

// What a window is told by; names are those of the CSV's columns. Means over the window's tokens but where it says so.
// clang-format off
#define MISMATCH_STUDY_FIGURES(X)                                                                                      \
    X(reward)               /* share of the rollouts that are right */                                                 \
    X(accuracy)             /* after it: share of the held-out prompts that greedy answers of the exact model get right */ \
    X(kl)                   /* after it: KL(p‖q) along these answers, nats a token */                                  \
    X(loss)                 /* mean over updates; likewise the next */                                                 \
    X(gradient_norm)                                                                                                   \
    X(gradient_norm_max)    /* over updates */                                                                         \
    X(delta_mean)           /* of delta = log p_old - log mu; of its size; its size's largest and 99 % quantile */     \
    X(delta_abs)                                                                                                       \
    X(delta_max)                                                                                                       \
    X(delta_p99)                                                                                                       \
    X(exact)                /* share of tokens with delta == 0 */                                                      \
    X(flips)                /* share whose most probable id is another for the learner */                              \
    X(k1_corr) X(k3_corr) X(k1_train) X(k3_train) X(k1_rollout) X(k3_rollout)                                          \
    X(c_train_positive)     /* C(r) = -(r - 1) A over tokens with A > 0, and with A < 0 */                             \
    X(c_train_negative)                                                                                                \
    X(c_rollout_positive)                                                                                              \
    X(c_rollout_negative)                                                                                              \
    X(rejected)             /* share of tokens that lost their sequence, or were masked */                             \
    X(truncated)            /* share whose weight was cut */                                                           \
    X(clipped)              /* share that PPO's clip cut */
// clang-format on
#define MISMATCH_STUDY_NAME(name) name,
struct figure {
    enum id : std::size_t { MISMATCH_STUDY_FIGURES(MISMATCH_STUDY_NAME) count };
};
#undef MISMATCH_STUDY_NAME
#define MISMATCH_STUDY_NAME(name) #name,
inline constexpr const char* figure_names[] = {MISMATCH_STUDY_FIGURES(MISMATCH_STUDY_NAME)};
#undef MISMATCH_STUDY_NAME
static_assert(std::size(figure_names) == figure::count);

struct window {
    int step = 0; ///< steps made at its end
    std::array<double, figure::count> x = {};
    std::string weights = {}; ///< fingerprint of the student's weights at its end
};

/// What all cells share.
class world {
public:
    /// Teacher and warm student of a checkpoint of opd-train; `base`: its settings, and those of the cells. A failure
    /// of kind exit_input where the checkpoint is of other models, of exit_usage for a task that is judged by KL.
    world(const std::string& checkpoint, const arguments& base);

    struct standing {
        double accuracy = 0, kl = 0;
    };
    standing judge(const trainer::transformer<float>& student, opd::cpu_backend& backend) const;

    const arguments base;
    trainer::config settings;
    std::unique_ptr<const trainer::any_task> task;
    trainer::transformer<float> teacher, student;
    standing before, of_teacher;

private:
    std::vector<trainer::problem> problems_;
};

/// `windows` of them, of steps as equal as can be. Failures: those of opd-train.
std::vector<window> run_cell(const world& w, const choice& engine, const choice& treatment, std::uint64_t seed,
                             int windows);

} // namespace mismatch_study
