// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/model_config.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "hf/strict_json.hpp"
#include "opd/data/json.hpp"

namespace trainer::hf {

namespace {

using nlohmann::json;
namespace data = opd::data::detail;

// The largest shape that is read: no product of it leaves 64 bits. Llama 3.1 405B: 16,384 wide, 53,248, 126 layers.
constexpr index_t most_width = 1 << 17, most_inner = 1 << 22, most_vocabulary = 1 << 24, most_layers = 1 << 12,
                  most_heads = 1 << 12, most_head_dim = 1 << 12, most_positions = 1 << 24;

// Keys that change what a model computes, unless they say nothing: null, false, 0, nothing in it, or `neutral`.
struct changing_key {
    const char* name;
    double neutral;
};
constexpr changing_key changing_keys[] = {{"quantization_config", 0},
                                          {"compression_config", 0},
                                          {"text_config", 0},
                                          {"vision_config", 0},
                                          {"audio_config", 0},
                                          {"auto_map", 0},
                                          {"num_experts", 0},
                                          {"num_local_experts", 0},
                                          {"n_routed_experts", 0},
                                          {"num_experts_per_tok", 0},
                                          {"moe_intermediate_size", 0},
                                          {"kv_lora_rank", 0},
                                          {"q_lora_rank", 0},
                                          {"final_logit_softcapping", 0},
                                          {"attn_logit_softcapping", 0},
                                          {"query_pre_attn_scalar", 0},
                                          {"attention_multiplier", 0},
                                          {"clip_qkv", 0},
                                          {"attention_chunk_size", 0},
                                          {"dual_chunk_attention_config", 0},
                                          {"no_rope_layers", 0},
                                          {"attention_dropout", 0},
                                          {"hidden_dropout", 0},
                                          {"mlp_bias", 0},
                                          {"rope_interleaved", 0},
                                          {"use_mrope", 0},
                                          {"is_encoder_decoder", 0},
                                          {"add_cross_attention", 0},
                                          {"pruned_heads", 0},
                                          {"pretraining_tp", 1},
                                          {"partial_rotary_factor", 1},
                                          {"rotary_pct", 1},
                                          {"embedding_multiplier", 1},
                                          {"residual_multiplier", 1},
                                          {"logits_scaling", 1},
                                          {"logit_scale", 1}};

// Keys that this file reads, and those that say nothing of what a model computes.
constexpr std::string_view read_keys[] = {"architectures",       "model_type",          "vocab_size",
                                          "hidden_size",         "intermediate_size",   "num_hidden_layers",
                                          "num_key_value_heads", "num_attention_heads", "head_dim",
                                          "hidden_act",          "rms_norm_eps",        "max_position_embeddings",
                                          "tie_word_embeddings", "attention_bias",      "rope_theta",
                                          "rope_scaling",        "rope_parameters",     "use_sliding_window",
                                          "sliding_window",      "max_window_layers",   "layer_types"};
constexpr std::string_view other_keys[] = {
    "initializer_range",    "use_cache",     "bos_token_id", "eos_token_id",   "pad_token_id", "torch_dtype", "dtype",
    "transformers_version", "_name_or_path", "architecture", "use_return_dict"};

bool says_nothing(const json& j, double neutral) {
    if (j.is_null() || (j.is_structured() && j.empty())) return true;
    if (j.is_boolean()) return !j.get<bool>();
    return j.is_number() && j.get<double>() == neutral;
}

// A key of an object and what it may be. Null is as good as no key, as it is in transformers.
struct keys_of {
    const json& all;
    const std::string& file;

    const json* find(const char* key) const {
        const auto at = all.find(key);
        return at == all.end() || at->is_null() ? nullptr : &*at;
    }
    const json& get(const char* key) const {
        const json* const at = find(key);
        if (!at) data::refuse(file, fmt::format("has no '{}'", key));
        return *at;
    }
    int count(const char* key, index_t most) const {
        const index_t n = data::as_count(get(key), key, file, most);
        if (n < 1) data::refuse(file, fmt::format("has '{}' 0", key));
        return static_cast<int>(n);
    }
    int count(const char* key, index_t most, int otherwise) const { return find(key) ? count(key, most) : otherwise; }
    double number(const char* key, double least, double most) const {
        const json& j = get(key);
        const double x = j.is_number() ? j.get<double>() : std::numeric_limits<double>::quiet_NaN();
        if (!(x >= least && x <= most))
            data::refuse(file, fmt::format("has no number from {} to {} as '{}'", least, most, key));
        return x;
    }
    double number(const char* key, double least, double most, double otherwise) const {
        return find(key) ? number(key, least, most) : otherwise;
    }
    bool flag(const char* key, bool otherwise) const {
        const json* const at = find(key);
        if (at && !at->is_boolean()) data::refuse(file, fmt::format("has neither true nor false as '{}'", key));
        return at ? at->get<bool>() : otherwise;
    }
    std::string text(const char* key) const { return data::as_text(get(key), key, file); }
};

constexpr double largest_base = 1e12, largest_factor = 1e6;

rope rope_of(const keys_of& in) {
    rope r;
    const json* const scaling = in.find("rope_scaling");
    const json* const parameters = in.find("rope_parameters");
    const json* const j = parameters ? parameters : scaling;
    const char* const where = parameters ? "rope_parameters" : "rope_scaling";
    if (parameters && scaling && *parameters != *scaling)
        data::refuse(in.file, "has 'rope_parameters' and 'rope_scaling' that differ");
    r.base = in.number("rope_theta", 1, largest_base, r.base);
    if (!j) return r;
    if (!j->is_object()) data::refuse(in.file, fmt::format("has no object as '{}'", where));
    const std::string file = fmt::format("{}, '{}'", in.file, where);
    const keys_of own{*j, file};
    const std::string kind = own.find("rope_type") ? own.text("rope_type")
                             : own.find("type")    ? own.text("type")
                                                   : std::string("default");
    const bool llama3 = kind == "llama3", linear = kind == "linear";
    if (!llama3 && !linear && kind != "default")
        data::refuse(file, fmt::format("has rope_type '{}', which is not supported; default, linear and llama3 are",
                                       kind.substr(0, 40)));
    for (const auto& [key, value] : j->items()) {
        const bool known = key == "rope_type" || key == "type" || key == "rope_theta" ||
                           (key == "partial_rotary_factor" && says_nothing(value, 1)) ||
                           ((llama3 || linear) && key == "factor") || key == "original_max_position_embeddings" ||
                           (llama3 && (key == "low_freq_factor" || key == "high_freq_factor"));
        if (!known && !value.is_null())
            data::refuse(file, fmt::format("has '{}', which is not supported for {}", key.substr(0, 40), kind));
    }
    r.base = own.number("rope_theta", 1, largest_base, r.base);
    if (linear || llama3) r.factor = own.number("factor", 1, largest_factor);
    if (linear) r.how = rope::scaling::linear;
    if (!llama3) return r;
    r.how = rope::scaling::llama3;
    r.low = own.number("low_freq_factor", 1e-6, largest_factor);
    r.high = own.number("high_freq_factor", 1e-6, largest_factor);
    r.original_length = own.count("original_max_position_embeddings", most_positions);
    if (!(r.low < r.high)) data::refuse(file, "has a low_freq_factor that is not below its high_freq_factor");
    return r;
}

const std::pair<const char*, family> families[] = {
    {"llama", family::llama}, {"qwen2", family::qwen2}, {"qwen3", family::qwen3}};
const char* architecture_of(family f) {
    return f == family::llama ? "LlamaForCausalLM" : f == family::qwen2 ? "Qwen2ForCausalLM" : "Qwen3ForCausalLM";
}

void check_attention(const keys_of& in, family f) {
    if (f != family::llama && in.flag("use_sliding_window", false))
        data::refuse(in.file, "has 'use_sliding_window': attention in a window is not supported");
    if (f == family::llama && in.find("sliding_window"))
        data::refuse(in.file, "has 'sliding_window': attention in a window is not supported");
    const json* const types = in.find("layer_types");
    if (!types) return;
    if (!types->is_array()) data::refuse(in.file, "has no list as 'layer_types'");
    for (const json& t : *types)
        if (t != "full_attention")
            data::refuse(in.file, fmt::format("has {} among its 'layer_types': full_attention alone is supported",
                                              t.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 40)));
}

} // namespace

const char* name_of(family f) {
    for (const auto& [name, of] : families)
        if (of == f) return name;
    return "unknown";
}

model_config config_of(std::string_view text, const std::string& file) {
    model_config r;
    r.all = strict_json(text, file);
    if (!r.all.is_object()) data::refuse(file, "is no object");
    const keys_of in{r.all, file};

    const std::string type = in.text("model_type");
    const auto at =
        std::find_if(std::begin(families), std::end(families), [&](const auto& f) { return type == f.first; });
    if (at == std::end(families))
        data::refuse(file,
                     fmt::format("has model_type '{}'; llama, qwen2 and qwen3 are supported", type.substr(0, 40)));
    r.of = at->second;
    const std::string architecture = architecture_of(r.of);
    if (const json* const a = in.find("architectures"); a && *a != json::array({architecture}))
        data::refuse(file, fmt::format("has 'architectures' {}; of {} {} alone is supported",
                                       a->dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 80), type,
                                       architecture));
    for (const changing_key& k : changing_keys)
        if (const json* const j = in.find(k.name); j && !says_nothing(*j, k.neutral))
            data::refuse(file, fmt::format("has '{}' {}, which is not supported", k.name,
                                           j->dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 40)));
    check_attention(in, r.of);
    const std::string act = in.text("hidden_act");
    if (act != "silu" && act != "swish")
        data::refuse(file, fmt::format("has hidden_act '{}'; silu alone is supported", act.substr(0, 40)));

    model_shape& s = r.shape;
    s.vocabulary = in.count("vocab_size", most_vocabulary);
    s.width = in.count("hidden_size", most_width);
    s.ffn = in.count("intermediate_size", most_inner);
    s.layers = in.count("num_hidden_layers", most_layers);
    s.heads = in.count("num_attention_heads", most_heads);
    s.kv_heads = r.of == family::llama ? in.count("num_key_value_heads", most_heads, s.heads)
                                       : in.count("num_key_value_heads", most_heads);
    if (in.find("head_dim")) {
        s.head_dim = in.count("head_dim", most_head_dim);
    } else if (r.of == family::qwen3) {
        s.head_dim = 128; // transformers' own
    } else {
        s.head_dim = s.width / s.heads;
        if (s.width % s.heads != 0)
            data::refuse(file, "has no 'head_dim', and a hidden_size that num_attention_heads does not divide");
    }
    if (s.heads % s.kv_heads != 0)
        data::refuse(file, fmt::format("has num_attention_heads {}, which num_key_value_heads {} does not divide",
                                       s.heads, s.kv_heads));
    if (s.head_dim % 2 != 0 || s.q_width() > most_inner)
        data::refuse(file, fmt::format("has heads of {} numbers; an even number is supported, and {} in all",
                                       s.head_dim, most_inner));
    s.tied = in.flag("tie_word_embeddings", false);
    s.max_length = in.count("max_position_embeddings", most_positions);
    s.qk_norm = r.of == family::qwen3;
    s.output_bias = r.of != family::qwen2 && in.flag("attention_bias", false);
    s.attention_bias = r.of == family::qwen2 || s.output_bias;
    s.norm_epsilon = in.number("rms_norm_eps", 0, 1, 1e-6);
    s.rope = rope_of(in);

    const auto known = [](const std::string& key) {
        const auto among = [&](const auto& keys) {
            return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
        };
        return among(read_keys) || among(other_keys) ||
               std::any_of(std::begin(changing_keys), std::end(changing_keys),
                           [&](const changing_key& k) { return key == k.name; });
    };
    for (const auto& [key, value] : r.all.items())
        if (!known(key)) r.unknown.push_back(key);
    return r;
}

json config_for(const model_shape& s, const model_config* from, const std::string& type) {
    const auto refuse = [](const std::string& why) { throw opd::invalid_input("shape", why); };
    const bool fits[] = {!s.qk_norm && s.attention_bias == s.output_bias, // llama, qwen2, qwen3
                         !s.qk_norm && s.attention_bias && !s.output_bias,
                         s.qk_norm && s.attention_bias == s.output_bias};
    family f = s.qk_norm ? family::qwen3 : s.attention_bias && !s.output_bias ? family::qwen2 : family::llama;
    if (from) f = from->of;
    if (!fits[static_cast<int>(f)])
        refuse(fmt::format("{} models have no such norms of q and k, or no such biases", name_of(f)));
    if (f == family::llama && s.width % s.heads != 0)
        refuse(fmt::format("transformers takes no llama model of width {} with {} heads", s.width, s.heads));

    json j = from ? from->all : json::object();
    // what the file says already stays as it stands there
    const model_shape was = from ? from->shape : model_shape{};
    const auto set = [&](const char* key, auto before, auto now) {
        if (!from || before != now) j[key] = now;
    };
    if (!from) {
        j["model_type"] = name_of(f);
        j["architectures"] = json::array({architecture_of(f)});
        j["hidden_act"] = "silu";
        j["max_position_embeddings"] = s.max_length;
    }
    set("vocab_size", was.vocabulary, s.vocabulary);
    set("hidden_size", was.width, s.width);
    set("intermediate_size", was.ffn, s.ffn);
    set("num_hidden_layers", was.layers, s.layers);
    set("num_attention_heads", was.heads, s.heads);
    set("num_key_value_heads", was.kv_heads, s.kv_heads);
    set("head_dim", was.head_dim, s.head_dim);
    set("tie_word_embeddings", was.tied, s.tied);
    set("rms_norm_eps", was.norm_epsilon, s.norm_epsilon);
    if (f != family::qwen2) set("attention_bias", was.attention_bias, s.attention_bias);
    if (from && was.layers != s.layers)
        for (const char* key : {"layer_types", "max_window_layers"}) j.erase(key); // a window is not in use
    if (!from || was.rope != s.rope) {
        for (const char* key : {"rope_parameters", "rope_scaling"}) j.erase(key);
        j["rope_theta"] = s.rope.base;
        json& scaling = j["rope_scaling"] = nullptr;
        if (s.rope.how != rope::scaling::none)
            scaling = {{"rope_type", s.rope.how == rope::scaling::linear ? "linear" : "llama3"},
                       {"factor", s.rope.factor}};
        if (s.rope.how == rope::scaling::llama3) {
            scaling["low_freq_factor"] = s.rope.low;
            scaling["high_freq_factor"] = s.rope.high;
            scaling["original_max_position_embeddings"] = static_cast<std::int64_t>(s.rope.original_length);
        }
    }
    if (j.contains("dtype")) j["dtype"] = type; // transformers 5
    if (j.contains("torch_dtype") || !j.contains("dtype")) j["torch_dtype"] = type;
    return j;
}

} // namespace trainer::hf
