// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LoRA on all linear layers of a model: the base's weights stay, and of each layer two thin matrices are learnt.
//
//   W  = W0 + s B A           (out,in)    A (rank,in), B (out,rank), s = alpha / rank
//   dA = s B^T dW             (rank,in)
//   dB = s dW A^T             (out,rank)
//
// for q, k, v and o of attention and gate, up and down of the feed-forward part, each by itself. Embedding, head, norms
// and biases stay. A starts uniform in [-1/sqrt(in), 1/sqrt(in)], B at 0: the model starts as its base.
//
// The model that runs has W: rollout, scoring and the learner's forward pass are those of full training, bit for bit
// of one set of weights. Each update takes the gradient of all of W, as full training does, and projects it: what LoRA
// saves is AdamW's moments of W. Kept besides are A, B, their moments, and W0: as bfloat16 where it has no other
// numbers, else as float.
//
// Source: Hu et al., LoRA, 2021 (arXiv 2106.09685), section 4.1; start and file format: peft 0.21, tuners/lora.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hf/model_files.hpp"
#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "opd/threads.hpp"

namespace trainer::hf {

class lora {
public:
    /// On a model whose weights, or masters, are the base. rank: from 1 to the least of all layers' inputs and outputs,
    /// else opd::invalid_input("rank"); alpha: positive and finite, else opd::invalid_input("alpha").
    lora(const transformer<float>& base, int rank, double alpha, std::uint64_t seed);

    std::vector<float> values; ///< of each layer in the order of linear_parts(): A, then B

    int rank() const { return rank_; }
    double alpha() const { return alpha_; }

    /// The layers' weights of `model`, from base and values; nothing else of it is written. A weight's bits depend on
    /// neither threads nor on what was there. Of a model in bfloat16 the sum is rounded once, to where it is read: it
    /// has no masters, since base and values are that.
    void merge(transformer<float>& model, opd::thread_team& threads) const;

    /// Of values, from that of all weights.
    void gradient(const std::vector<float>& of_weights, std::vector<float>& of_values, opd::thread_team& threads) const;

    /// One update of values, merged into the model; the norm of their gradient. A norm that is not finite changes
    /// nothing.
    double step(const adamw& o, double rate, const std::vector<float>& of_weights, adamw_state& state,
                transformer<float>& model, opd::thread_team& threads);

    /// As PEFT reads them; `base` is its base_model_name_or_path.
    adapter_files files(const std::string& base) const;

    /// Bytes beside the model: base, values, their gradient and moments.
    static std::int64_t bytes(const model_shape& shape, int rank, bool base_is_bfloat16);

private:
    struct layer {
        linear_part part;
        tensor a, b;      // in values
        index_t base = 0; // where it begins in the base
    };
    float base_at(index_t i) const;

    int rank_;
    double alpha_;
    std::vector<layer> layers_;
    std::vector<std::uint16_t> base_bfloat16_; // one of the two
    std::vector<float> base_float_;
    std::vector<float> gradient_;
};

} // namespace trainer::hf
