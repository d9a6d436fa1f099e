// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// config.json of transformers, to the trainer's shape and back.
//
//   model_type   q, k norms   biases                                   head_dim, where the file has none
//   qwen3        yes          attention_bias: q, k, v and output       128
//   qwen2        no           always q, k, v                           hidden_size / num_attention_heads
//   llama        no           attention_bias: q, k, v and output       hidden_size / num_attention_heads
//
// Positions: rope_theta with rope_scaling (transformers 4), or rope_parameters (5); of kind default, linear or llama3.
//
// What changes a model's numbers and is not here is refused by its key: sliding windows in use, experts, other
// activations, soft-caps, quantised weights, other kinds of rope, biases of the feed-forward part, code of the model's
// own. Keys that nothing here knows are kept, and named in `unknown`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/model.hpp"

namespace trainer::hf {

enum class family { llama, qwen2, qwen3 };
const char* name_of(family f); ///< its model_type

struct model_config {
    family of = family::llama;
    model_shape shape;                ///< max_length: max_position_embeddings
    nlohmann::json all;               ///< the whole file
    std::vector<std::string> unknown; ///< keys that nothing here knows
};

/// Of a file's text. What is no config.json of these families throws opd::invalid_input, which names `file` and key.
model_config config_of(std::string_view text, const std::string& file);

/// The config.json of a model of this shape, whose weights are written as `type` ("float32", "bfloat16"). With `from`,
/// all that it says and the shape does not stays as it was; else the family is the one that has such norms and biases.
/// A shape that no family has, or not from's, throws opd::invalid_input("shape").
nlohmann::json config_for(const model_shape& shape, const model_config* from, const std::string& type);

} // namespace trainer::hf
