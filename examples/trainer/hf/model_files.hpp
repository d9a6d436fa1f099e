// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A model directory of transformers: read into the trainer's flat weights, and written so that transformers loads it.
//
//   config.json                          see model_config.hpp
//   model.safetensors                    or, with several files, model.safetensors.index.json:
//                                        {"metadata": {"total_size": bytes}, "weight_map": {tensor: file, …}}
//   generation_config.json, tokenizer…   kept byte for byte from the directory that was read to the one that is written
//
//   here                    in the files, under model.layers.N.
//   wqkv (Q+2KV,D), bqkv    self_attn.q_proj, k_proj, v_proj, one below the other: weight (out,in), bias (out)
//   wgu (2F,D)              mlp.gate_proj, up_proj
//   wo, bo, wdown           self_attn.o_proj, mlp.down_proj
//   norm1, norm2            input_layernorm, post_attention_layernorm
//   q_norm, k_norm          self_attn.q_norm, k_norm
//   embedding, norm_f       model.embed_tokens, model.norm
//   head                    lm_head; none where the head is the embedding
//
// Numbers are BF16, F16, F32 or F64, each tensor its own; files are mapped, and each number is converted once, to where
// it belongs. F64 that float cannot hold is refused, as is what is not finite.
//
// A directory is refused by a failure of kind exit_input that names file, tensor or key, before memory is taken for
// what it claims: no shard or header that is cut, overlaps or has holes; no tensor that is missing, of another shape,
// or that the model has no place for. As in transformers, "…rotary_emb.inv_freq" of old files is passed over, and
// model.safetensors is read where both are there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hf/model_config.hpp"
#include "model/model.hpp"
#include "opd/data/safetensors.hpp"
#include "settings/config.hpp"

namespace trainer::hf {

/// Where a model came from, and what goes along with its weights when it is written again.
struct model_source {
    std::string path;
    model_config config;
    std::string types;                       ///< of the weights: "BF16", or "BF16, F32"
    std::size_t files = 0;                   ///< of weights
    std::int64_t numbers = 0;                ///< weights, a tied head's once
    std::map<std::string, std::string> kept; ///< name to bytes: generation_config.json, tokenizer files

    /// One line: family, shape, weights, types.
    std::string describe() const;
};

/// Bytes of a model's weights as transformer<float> reads them, twice if it is not large, with its table of angles; and
/// what a step of training with AdamW adds for gradient, two moments and, in bfloat16, masters, which
/// storage::bfloat16_by_itself has none of. Activations come on top.
struct model_bytes {
    std::int64_t model = 0, training = 0;
};
model_bytes bytes_of(const model_shape& shape, storage how = storage::numbers);

/// A directory whose files were opened and all their tensors found; no weight was read.
class model_directory {
public:
    /// `max_length`: positions that the model is to take, at most those of its config.json; 0: all of them.
    explicit model_directory(const std::string& path, int max_length = 0);

    const model_source& source() const { return source_; }
    const model_shape& shape() const { return shape_; }

    /// The weights, as model_layout(shape()) has them; what lies between tensors becomes 0. T: float, double, or
    /// opd::bfloat16, to which numbers of other types are rounded by way of float.
    template <class T>
    void read(std::span<T> weights) const;

    /// The same in a model that is ready to run.
    template <class T>
    transformer<T> model(storage how = storage::numbers) const {
        return with_memory_for(source_.path, [&] {
            transformer<T> r(shape_, how);
            if (how == storage::bfloat16_by_itself)
                read(std::span(r.stored));
            else
                read(std::span<T>(r.weights));
            r.weights_changed();
            return r;
        });
    }

private:
    struct file {
        std::string path;
        opd::data::detail::mapped_file map;
        opd::data::safetensors_header header;
    };
    struct found {
        const file* in;
        const opd::data::tensor* tensor;
    };
    void open_files();
    void find_tensors();

    model_source source_;
    model_shape shape_;
    std::vector<std::unique_ptr<file>> files_;
    std::map<std::string, found> tensors_;
};

struct read_model {
    model_shape shape;
    std::vector<float> weights; ///< as model_layout(shape)
    model_source source;
};
read_model read_model_directory(const std::string& path, int max_length = 0);

/// A linear layer's weights, by the name of its module: "model.layers.0.self_attn.q_proj".
struct linear_part {
    std::string module;
    tensor place; ///< (out,in)
};
/// All of them but the head, in the order of the weights.
std::vector<linear_part> linear_parts(const model_shape& shape);

/// Tensors in a folder of their own, adapter/, within the directory: where PEFT reads adapter_config.json and
/// adapter_model.safetensors, and transformers, which loads what is beside config.json, does not.
struct adapter_files {
    std::string config;
    std::vector<std::pair<std::string, tensor>> tensors; ///< name, place in `values`
    std::span<const float> values;
};

struct write_options {
    std::string type = "float32";            ///< or "bfloat16", rounded to nearest even
    std::size_t shard_bytes = 5'000'000'000; ///< of a file's tensors, unless one alone is larger
};
/// Writes a directory that transformers loads. `from`: where the model came from, for config.json and the files that go
/// along; null: none, and a config.json of the family that has such a shape.
///
/// All is written under a temporary name beside `path`, which then becomes `path`: that may not be there, or be an
/// empty directory. Weights that are not finite, or not those of the shape, and a type or shape that cannot be written
/// throw opd::invalid_input; what the system refuses is a failure of kind exit_io. Either way nothing is left.
void write_model_directory(const std::string& path, const model_shape& shape, std::span<const float> weights,
                           const model_source* from, const write_options& how = {},
                           const adapter_files* adapter = nullptr);
/// The same of a model: its masters, where it has some, else the numbers that it reads.
void write_model_directory(const std::string& path, const transformer<float>& model, const model_source* from,
                           const write_options& how = {}, const adapter_files* adapter = nullptr);

} // namespace trainer::hf
