// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a drafter that learns is made of, and its file: a small model of the trainer's kind over the same tokens, or a
// layer on the target's hidden states, or one on three of its layers (hidden_drafter.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "settings/config.hpp"
#include "speculation/hidden_drafter.hpp"

namespace trainer {

enum class drafter_kind : std::uint32_t { hidden, model, eagle3 };
constexpr drafter_kind last_of(drafter_kind) { return drafter_kind::eagle3; }

/// What drafts: weights, and of what kind.
struct draft_model {
    drafter_kind kind = drafter_kind::hidden;
    model_shape target;         ///< the shape of the models that it drafts for
    transformer<float> weights; ///< hidden: of hidden_drafter_shape; eagle3: of fused_drafter_shape

    /// As the settings have it, with fresh weights.
    draft_model(const config& c, const model_shape& target);
    draft_model(drafter_kind k, const model_shape& target, const model_shape& own)
        : kind(k), target(target), weights(own) {}

    bool is_layer() const { return kind != drafter_kind::model; }
    /// Numbers that it, or its training, reads of a position of the target (append_features()): D or 4D.
    index_t features() const { return is_layer() ? features_of(weights.shape) : target.width; }
};

/// How far a drafter's training had come that goes on.
struct drafter_progress {
    std::int64_t updates = 0;
    std::int32_t trained_on = 0; ///< newest policy version that it learnt from
    adamw_state optimizer;
};

/// The file's bytes and back; bytes that are damaged, or of no drafter, are a failure of kind exit_input that names
/// `path`. What is trained alone: embedding and head of a layer are the target's. `progress` is written, and read, if
/// it is asked for and there.
std::string drafter_bytes(const draft_model& d, const drafter_progress* progress = nullptr);
draft_model drafter_of(std::string_view bytes, const std::string& path, drafter_progress* progress = nullptr);
void save_drafter(const std::string& path, const draft_model& d);
draft_model load_drafter(const std::string& path, drafter_progress* progress = nullptr);

} // namespace trainer
