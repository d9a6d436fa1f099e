// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Training of a drafter for a target that stays as it is (--train-drafter, --adapt-drafter).
//
//   lk     loss = mean over response rows of w (a (-log Σ min(p, q)) + b KL(q‖p)) + r smooth_L1(h^ - h)
//   eagle  c (-log p[x]) + r smooth_L1(h^ - h), x what the target drew
//   hass   the mean over the three steps of a training-time test (hidden_drafter.hpp) of eagle's and -Σ q[v] log p[v]
//          over the K ids that the target finds likeliest, --drafter-top-k
//   eagle3 KL(q‖p), which has the gradient of the cross-entropy, over seven steps of such a test, of which the j-th,
//          from 0, counts .8^j; the gradient goes through what a step hands on, and no h is asked for
//   osd    KL(q‖p) + r smooth_L1(h^ - h) of the rows alone whose token the drafter would not have drafted, with the
//          target's noise
//   p      the drafter's law, q the target's, at --temperature
//   h^     of a layer: what it expects of the target, mean over columns. Drafts go on from it, so it had better be near
//   w      by the row's place in its draft (opd/estimators/draft_weights.hpp), scaled to a mean of 1
//
// Rows are those of the target's own responses, teacher-forced: the drafter sees what the target drew. A response is
// cut into drafts of --drafter-depth rows, elsewhere in every step, for the weights alone.
//
// What drafts is a draft_model. Sources: lk is LK's loss (arXiv 2602.23881), a mixture as there;
// eagle that of Li et al. 2024; hass Zhang et al. 2024; eagle3 Li et al. 2025; osd Liu et al. 2023.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "model/teacher.hpp"
#include "opd/backends/cpu.hpp"
#include "settings/config.hpp"
#include "speculation/draft_model.hpp"
#include "speculation/hidden_drafter.hpp"
#include "task/trajectory.hpp"

namespace trainer {

struct drafter_step {
    double loss = 0;
    double acceptance = 0; ///< mean of Σ min(p, q)
    double gradient_norm = 0;
    std::int64_t rows = 0; ///< that count
    bool stopped = false;  ///< on request: there is no gradient
};

/// How likely drafts of the target's own responses are accepted, teacher-forced: draws of their own would be with
/// these.
struct expected_acceptance {
    double mean = 0;              ///< of Σ min(p, q)
    std::vector<double> by_depth; ///< of the d-th token, given that those before it were
    double length = 0;            ///< accepted tokens of a draft of that depth
    double top_3 = 0;             ///< share of the target's tokens that are among the drafter's three likeliest
};

/// What becomes of drafts along the target's own responses: chains as rollout drafts them, on what the drafter expects
/// of the target and with the target's noise, from every `stride`-th position, against the tokens that the target drew.
struct followed_drafts {
    std::vector<double> by_depth; ///< share of the d-th tokens that were followed, given that those before them were
    double length = 0;            ///< mean number of followed tokens
    index_t drafts = 0;
};
followed_drafts follow_drafts(const config& c, const transformer<float>& target, std::shared_ptr<const draft_model> d,
                              opd::thread_team& threads, std::span<const trajectory* const> responses, index_t stride);

/// A text of the target's, and what its head read at all positions but the last, if that is known.
struct drafter_text {
    std::span<const token> tokens; ///< prompt, then response
    std::size_t prompt_length = 0;
    std::span<const float> hidden = {}; ///< (tokens - 1, features()); empty: the target is asked
    std::uint64_t sample = 0;           ///< keys the noise that drew the response
};

class drafter_trainer {
public:
    drafter_trainer(const config& c, const transformer<float>& target, draft_model& d, opd::cpu_backend& backend);

    /// One update on some of the target's responses; `number` says where drafts begin.
    drafter_step step(std::span<const trajectory* const> responses, double rate, std::int64_t number);

    /// The gradient of such a step alone, flat as the drafter's weights; given up between two of its passes where
    /// `stop` asks for it.
    drafter_step gradient(std::span<const drafter_text> texts, std::int64_t number, std::vector<float>& out,
                          const std::stop_token& stop = {});

    expected_acceptance measure(std::span<const trajectory* const> responses);

private:
    void forward(std::span<const drafter_text> texts, index_t steps = 1);
    void forward_step(index_t step);
    token next_of(std::span<const drafter_text> texts, std::size_t text, std::int64_t row) const;
    void keep_rejected(std::span<const drafter_text> texts);
    double loss_of_laws(std::span<const drafter_text> texts, const std::vector<float>& refused, std::int64_t number);
    double distance(index_t step);
    template <class F>
    void each_row_of(index_t step, F&& f) const;
    std::vector<float> losses();

    const config& settings_;
    const transformer<float>& target_;
    draft_model& drafter_;
    opd::cpu_backend& backend_;
    training_pass<float> pass_;        // of a model
    hidden_training<float> on_hidden_; // of a layer
    adamw_state state_;
    // of the last forward pass
    index_t rows_ = 0;
    std::vector<std::vector<token>> inputs_; // (sequences) all tokens but the last
    std::vector<float> target_logits_, hidden_;
    std::vector<float> z_, q_;         // (N,V) the drafter's logits, then their gradient; the target's
    std::vector<std::uint8_t> mask_;   // (N)
    std::vector<std::int64_t> firsts_; // (sequences + 1)
    std::vector<float> expected_;      // (N,D) of a layer: the target's h
    std::vector<float> gradient_, weights_;
    std::vector<index_t> likeliest_;
    // of a layer, by step of the training-time test: gradients of its logits, and towards the target's h
    std::vector<std::vector<float>> d_logits_, apart_;
};

} // namespace trainer
