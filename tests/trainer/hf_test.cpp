// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Model directories of transformers: what it computes with three of them in float64 (scripts/make_hf_golden.py), read
// and written, and whatever else may be in such a directory, refused by name; opd-distil on them. scripts/test_hf.sh
// runs the first two cases on random models (OPD_HF_MODELS), and has transformers load what they write (OPD_HF_WRITE),
// and peft an adapter.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include "app/programs.hpp"
#include "hf/distil.hpp"
#include "hf/lora.hpp"
#include "hf/model_files.hpp"
#include "opd/element.hpp"
#include "pipeline/rollout.hpp"
#include "schedule/stages.hpp"
#include "settings/config.hpp"
#include "trainer/scratch.hpp"

namespace {

using namespace trainer;
using hf::model_directory;
using nlohmann::json;
using opd::test::scratch;
namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
void put(const fs::path& path, std::string_view text) {
    std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

std::string setting(const char* name, const std::string& otherwise) {
    const char* const value = std::getenv(name);
    return value ? value : otherwise;
}
const std::string& models() {
    static const std::string r = setting("OPD_HF_MODELS", OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden");
    return r;
}
std::vector<std::string> names() {
    std::vector<std::string> r;
    const std::string tail = ".expected.safetensors";
    for (const auto& e : fs::directory_iterator(models()))
        if (const std::string n = e.path().filename(); n.ends_with(tail))
            r.push_back(n.substr(0, n.size() - tail.size()));
    std::sort(r.begin(), r.end());
    REQUIRE(r.size() >= 3);
    return r;
}

// What transformers says of a model.
struct expectation {
    std::map<std::string, std::vector<double>> values;
    std::vector<std::vector<std::int32_t>> sequences;

    explicit expectation(const std::string& name) {
        const std::string path = models() + "/" + name + ".expected.safetensors", bytes = text_of(path);
        const auto h = opd::data::read_safetensors(std::as_bytes(std::span(bytes.data(), bytes.size())), path);
        for (const auto& t : h.tensors) {
            const char* const from = bytes.data() + h.data_begin + t.begin;
            if (t.name == "tokens") {
                for (index_t s = 0; s < t.shape[0]; ++s) {
                    std::vector<std::int32_t> row;
                    for (index_t i = 0; i < t.shape[1]; ++i) {
                        std::int64_t x;
                        std::memcpy(&x, from + (s * t.shape[1] + i) * 8, 8);
                        row.push_back(static_cast<std::int32_t>(x));
                    }
                    sequences.push_back(row);
                }
                continue;
            }
            std::vector<double>& v = values[t.name];
            for (std::size_t i = 0; i * (t.type == "F64" ? 8 : 4) < t.end - t.begin; ++i) {
                double x = 0;
                float y = 0;
                if (t.type == "F64")
                    std::memcpy(&x, from + 8 * i, 8);
                else
                    std::memcpy(&y, from + 4 * i, 4), x = static_cast<double>(y);
                v.push_back(x);
            }
        }
    }
};

// Where a tensor of the files lies in the flat weights; the names as transformers has them, written down once more.
tensor place_of(const std::string& name, const model_shape& s) {
    const model_layout l(s);
    if (name == "model.embed_tokens.weight") return l.embedding;
    if (name == "model.norm.weight") return l.norm_f;
    if (name == "lm_head.weight") return l.head;
    std::size_t layer = 0;
    char rest[64] = "";
    REQUIRE(std::sscanf(name.c_str(), "model.layers.%zu.%63s", &layer, rest) == 2);
    const layer_tensors& t = l.layers.at(layer);
    const auto rows = [](tensor all, index_t first, index_t count) {
        return tensor{all.offset + first * all.columns, count, all.columns};
    };
    const index_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    const std::map<std::string, tensor> places = {{"input_layernorm.weight", t.norm1},
                                                  {"post_attention_layernorm.weight", t.norm2},
                                                  {"self_attn.q_proj.weight", rows(t.wqkv, 0, q)},
                                                  {"self_attn.k_proj.weight", rows(t.wqkv, q, kv)},
                                                  {"self_attn.v_proj.weight", rows(t.wqkv, q + kv, kv)},
                                                  {"self_attn.q_proj.bias", rows(t.bqkv, 0, q)},
                                                  {"self_attn.k_proj.bias", rows(t.bqkv, q, kv)},
                                                  {"self_attn.v_proj.bias", rows(t.bqkv, q + kv, kv)},
                                                  {"self_attn.q_norm.weight", t.q_norm},
                                                  {"self_attn.k_norm.weight", t.k_norm},
                                                  {"self_attn.o_proj.weight", t.wo},
                                                  {"self_attn.o_proj.bias", t.bo},
                                                  {"mlp.gate_proj.weight", rows(t.wgu, 0, s.ffn)},
                                                  {"mlp.up_proj.weight", rows(t.wgu, s.ffn, s.ffn)},
                                                  {"mlp.down_proj.weight", t.wdown}};
    return places.at(rest);
}

// The largest difference, over the largest value, of which 1 is the least.
template <class T>
double difference(const T* got, const std::vector<double>& expected, double least = 1) {
    double worst = 0, largest = least;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const double error = std::abs(static_cast<double>(got[i]) - expected[i]);
        worst = error > worst || std::isnan(error) ? error : worst;
        largest = std::max(largest, std::abs(expected[i]));
    }
    return worst / largest;
}

template <class T>
void compare(const std::string& name, double limit) {
    const expectation e(name);
    const model_directory directory(models() + "/" + name);
    const transformer<T> model = directory.model<T>();
    const index_t v = model.shape.vocabulary;
    opd::thread_team threads(1);
    training_pass<T> pass(model, threads);
    const index_t rows = pass.set_sequences(e.sequences);
    std::vector<T> logits(static_cast<std::size_t>(rows * v)), log_p(logits.size()), d(logits.size()), gradient;
    pass.forward(logits.data());
    REQUIRE(e.values.at("logits").size() == logits.size());
    CHECK(difference(logits.data(), e.values.at("logits")) <= limit);

    // dKL(p || q) / dz = p (log p - log q - KL), a mean over the rows
    const auto log_softmax = [v](const T* z, T* out) {
        double top = -1e300, sum = 0;
        for (index_t i = 0; i < v; ++i) top = std::max(top, static_cast<double>(z[i]));
        for (index_t i = 0; i < v; ++i) sum += std::exp(static_cast<double>(z[i]) - top);
        for (index_t i = 0; i < v; ++i) out[i] = static_cast<T>(static_cast<double>(z[i]) - top - std::log(sum));
    };
    std::vector<T> teacher(static_cast<std::size_t>(v)), log_q(teacher.size());
    for (index_t r = 0; r < rows; ++r) {
        T *const p = log_p.data() + r * v, *const g = d.data() + r * v;
        log_softmax(logits.data() + r * v, p);
        for (index_t i = 0; i < v; ++i)
            teacher[static_cast<std::size_t>(i)] =
                static_cast<T>(e.values.at("teacher")[static_cast<std::size_t>(r * v + i)]);
        log_softmax(teacher.data(), log_q.data());
        T kl = 0;
        for (index_t i = 0; i < v; ++i) kl += std::exp(p[i]) * (p[i] - log_q[static_cast<std::size_t>(i)]);
        for (index_t i = 0; i < v; ++i)
            g[i] = std::exp(p[i]) * (p[i] - log_q[static_cast<std::size_t>(i)] - kl) / static_cast<T>(rows);
    }
    CHECK(difference(log_p.data(), e.values.at("log_probs")) <= limit);
    pass.backward(d.data(), gradient);
    std::size_t compared = 0;
    for (const auto& [tensor_name, expected] : e.values) {
        if (tensor_name.find("gradient.") != 0) continue;
        CAPTURE(tensor_name);
        const tensor t = place_of(tensor_name.substr(9), model.shape);
        REQUIRE(static_cast<std::size_t>(t.size()) == expected.size());
        CHECK(difference(gradient.data() + t.offset, expected, 1e-3) <= limit);
        compared += expected.size();
    }
    CHECK(compared == static_cast<std::size_t>(directory.source().numbers));

    training_pass<T> checkpointed(model, threads, true);
    std::vector<T> again;
    checkpointed.set_sequences(e.sequences);
    checkpointed.forward(logits.data());
    checkpointed.backward(d.data(), again);
    REQUIRE(again.size() == gradient.size());
    CHECK(std::memcmp(again.data(), gradient.data(), again.size() * sizeof(T)) == 0);
}

// Every weight's bits.
std::vector<float> weights_of(const std::string& path, model_shape* shape = nullptr) {
    hf::read_model r = hf::read_model_directory(path);
    if (shape) *shape = r.shape;
    return r.weights;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The failure of a call: its text, and that a bad input is what it was.
std::string refused(const std::function<void()>& call, exit_code code = exit_input) {
    try {
        call();
    } catch (const failure& f) {
        CHECK(f.code == code);
        return f.what();
    }
    return "";
}
bool says(const std::string& message, const std::string& what) {
    INFO("says: ", message);
    CHECK(message.find(what) != std::string::npos);
    return true;
}

struct copied : scratch {
    explicit copied(const std::string& name) {
        fs::copy(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/" + name, path / "m");
    }
    std::string directory() const { return (path / "m").string(); }
    fs::path file(const std::string& name = "model.safetensors") const { return path / "m" / name; }
    std::string opens() const {
        return refused([this] { hf::read_model_directory(directory()); });
    }
    void edit_json(const std::string& name, const std::function<void(json&)>& edit) const {
        json j = json::parse(text_of(file(name)));
        edit(j);
        put(file(name), j.dump());
    }
    // the header's JSON and the data behind it, written again
    void edit_weights(const std::function<void(json&, std::string&)>& edit) const {
        const std::string all = text_of(file());
        std::uint64_t size = 0;
        std::memcpy(&size, all.data(), 8);
        json header = json::parse(all.substr(8, size));
        std::string data = all.substr(8 + size);
        edit(header, data);
        const std::string text = header.dump();
        size = text.size();
        put(file(), std::string(reinterpret_cast<const char*>(&size), 8) + text + data);
    }
};

} // namespace

TEST_CASE("logits and gradients are those of transformers") {
    for (const std::string& name : names()) {
        CAPTURE(name);
        compare<double>(name, 1e-9);
        compare<float>(name, 1e-4);
    }
}

TEST_CASE("what is written is read again bit for bit, in one file and in several, with all that goes along") {
    const scratch mine;
    const std::string out = setting("OPD_HF_WRITE", mine.path.string());
    for (const std::string& name : names()) {
        CAPTURE(name);
        const hf::read_model m = hf::read_model_directory(models() + "/" + name);
        const std::string path = out + "/" + name;
        hf::write_model_directory(path + "-float32", m.shape, m.weights, &m.source);
        CHECK(same_bits(weights_of(path + "-float32"), m.weights));
        CHECK(fs::exists(path + "-float32/model.safetensors"));
        const auto half = static_cast<std::size_t>(m.source.numbers); // of its bytes
        hf::write_model_directory(path + "-bfloat16/", m.shape, m.weights, &m.source, {"bfloat16", half});
        std::vector<float> rounded = m.weights;
        for (float& x : rounded) x = static_cast<float>(opd::bfloat16(x));
        model_shape again;
        CHECK(same_bits(weights_of(path + "-bfloat16", &again), rounded));
        CHECK(again == m.shape);
        if (m.source.types == "BF16") CHECK(same_bits(rounded, m.weights));
        const model_directory shards(path + "-bfloat16");
        CHECK(shards.source().types == "BF16");
        CHECK(shards.source().files > 1);
        CHECK(shards.source().numbers == m.source.numbers);
        CHECK(!fs::exists(path + "-bfloat16/model.safetensors"));
        for (const char* kept : {"generation_config.json", "tokenizer_config.json"})
            CHECK(text_of(path + "-bfloat16/" + kept) == text_of(models() + "/" + name + "/" + kept));
        json before = json::parse(text_of(models() + "/" + name + "/config.json"));
        const json after = json::parse(text_of(path + "-bfloat16/config.json"));
        before["dtype"] = "bfloat16";
        CHECK(after == before);

        // with nothing but its shape
        const std::string bare = mine / name + "-bare";
        hf::write_model_directory(bare, m.shape, m.weights, nullptr);
        CHECK(same_bits(weights_of(bare, &again), m.weights));
        CHECK(again == m.shape);
        CHECK(!fs::exists(bare + "/tokenizer_config.json"));
        if (out != mine.path) continue;
        std::size_t there = 0;
        for (const auto& e : fs::directory_iterator(mine.path))
            there += e.path().string().find(".tmp") == std::string::npos;
        CHECK(there == static_cast<std::size_t>(std::distance(fs::directory_iterator(mine.path), {})));
    }
}

TEST_CASE("a model that is decoded token by token has the bits of a training forward") {
    for (const std::string name : {"qwen3", "qwen2", "llama"}) {
        CAPTURE(name);
        const auto model = model_directory(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/" + name, 32).model<float>();
        CHECK(model.shape.max_length == 32);
        const index_t v = model.shape.vocabulary;
        std::vector<std::int32_t> tokens;
        for (int i = 0; i < 32; ++i) tokens.push_back((7 * i * i + 3) % static_cast<int>(v));
        opd::thread_team threads(1);
        training_pass<float> pass(model, threads);
        pass.set_sequences(std::vector<std::vector<std::int32_t>>{tokens});
        std::vector<float> expected(static_cast<std::size_t>(32 * v)), logits(expected.size());
        pass.forward(expected.data());
        kv_cache<float> cache;
        cache.resize(model.shape, 1, 32);
        forward_state<float> state;
        for (index_t i = 0; i < 32; ++i) {
            const segment one{0, i, 1};
            forward_rows(model, std::span(&one, 1),
                         std::span<const std::int32_t>(tokens).subspan(static_cast<std::size_t>(i), 1), cache, state,
                         false, logits.data() + i * v);
        }
        CHECK(same_bits(logits, expected));
    }
}

TEST_CASE("the numbers of each type are those that they stand for") {
    const copied m("qwen2");
    const std::string name = "model.norm.weight";
    const auto write_as = [&](const std::string& type, const std::string& bytes) {
        m.edit_weights([&](json& h, std::string& data) { // at the end, in place of what it was
            json& t = h[name];
            const std::size_t begin = t["data_offsets"][0], end = t["data_offsets"][1];
            data.erase(begin, end - begin);
            for (auto& [other, j] : h.items())
                if (other != "__metadata__" && other != name && j["data_offsets"][0] > begin)
                    for (auto& at : j["data_offsets"]) at = at.get<std::size_t>() - (end - begin);
            t = {{"dtype", type}, {"shape", {16}}, {"data_offsets", {data.size(), data.size() + bytes.size()}}};
            data += bytes;
        });
    };
    const auto bits = [](auto x) {
        std::string r;
        for (int i = 0; i < 16; ++i, ++x) r.append(reinterpret_cast<const char*>(&x), sizeof x);
        return r;
    };
    const auto read = [&] {
        model_shape s;
        const auto w = weights_of(m.directory(), &s);
        const tensor t = model_layout(s).norm_f;
        return std::vector<float>(w.begin() + t.offset, w.begin() + t.offset + t.size());
    };
    write_as("F64", bits(1.5));
    CHECK(read()[3] == 4.5F);
    write_as("BF16", bits(std::uint16_t{0x3f80}));
    CHECK(read()[1] == 1.0078125F);
    write_as("F16", bits(std::uint16_t{0x3c00}));
    CHECK(read()[1] == 1.0009765625F);
    write_as("F16", bits(std::uint16_t{1})); // subnormal
    CHECK(read()[0] == 0x1p-24F);
    write_as("F32", bits(std::uint32_t{0x3f800000}));
    CHECK(read()[1] == 1.00000011920928955F);
    write_as("F64", bits(1e39));
    says(m.opens(), "tensor 'model.norm.weight': has a number at 0 that is not finite, or too large");
    write_as("BF16", bits(std::uint16_t{0x7f7f}));
    says(m.opens(), "tensor 'model.norm.weight': has a number at 1 that is not finite");
    write_as("I32", bits(std::int32_t{0}));
    says(m.opens(), "tensor 'model.norm.weight': is of the type I32; BF16, F16, F32 and F64 are supported");
}

TEST_CASE("a config.json that means another model is refused by its key") {
    struct one {
        const char *model, *patch, *said;
    };
    const one cases[] = {
        {"llama", R"({"model_type": "mistral"})", "model_type 'mistral'; llama, qwen2 and qwen3 are supported"},
        {"llama", R"({"model_type": 3})", "no text as 'model_type'"},
        {"llama", R"({"model_type": null})", "no 'model_type'"},
        {"qwen3", R"({"architectures": ["Qwen3MoeForCausalLM"]})", "'architectures'"},
        {"qwen3", R"({"architectures": "Qwen3ForCausalLM"})", "'architectures'"},
        {"qwen3", R"({"use_sliding_window": true})", "'use_sliding_window'"},
        {"qwen3", R"({"use_sliding_window": 1})", "neither true nor false as 'use_sliding_window'"},
        {"llama", R"({"sliding_window": 4096})", "'sliding_window'"},
        {"qwen3", R"({"layer_types": ["full_attention", "sliding_attention"]})", "\"sliding_attention\""},
        {"qwen3", R"({"layer_types": {}})", "no list as 'layer_types'"},
        {"qwen3", R"({"num_experts": 8})", "'num_experts' 8, which is not supported"},
        {"qwen3", R"({"quantization_config": {"bits": 4}})", "'quantization_config'"},
        {"qwen3", R"({"final_logit_softcapping": 30.0})", "'final_logit_softcapping'"},
        {"qwen3", R"({"attn_logit_softcapping": 50.0})", "'attn_logit_softcapping'"},
        {"llama", R"({"mlp_bias": true})", "'mlp_bias'"},
        {"llama", R"({"pretraining_tp": 2})", "'pretraining_tp'"},
        {"llama", R"({"attention_dropout": 0.1})", "'attention_dropout'"},
        {"llama", R"({"partial_rotary_factor": 0.5})", "'partial_rotary_factor'"},
        {"llama", R"({"auto_map": {"AutoModel": "code.M"}})", "'auto_map'"},
        {"qwen3", R"({"hidden_act": "gelu"})", "hidden_act 'gelu'"},
        {"qwen3", R"({"hidden_act": null})", "no 'hidden_act'"},
        {"qwen3", R"({"vocab_size": 9223372036854775807})", "'vocab_size'"},
        {"qwen3", R"({"vocab_size": -1})", "'vocab_size'"},
        {"qwen3", R"({"vocab_size": 40.0})", "'vocab_size'"},
        {"qwen3", R"({"vocab_size": "40"})", "'vocab_size'"},
        {"qwen3", R"({"vocab_size": 0})", "'vocab_size' 0"},
        {"qwen3", R"({"hidden_size": 18446744073709551615})", "'hidden_size'"},
        {"qwen3", R"({"hidden_size": 131072})", "is of the shape (40,16), not (40,131072)"},
        {"qwen3", R"({"intermediate_size": 29})", "is of the shape (28,16), not (29,16)"},
        {"qwen3", R"({"num_hidden_layers": 1})", "model.layers.1."},
        {"qwen3", R"({"num_hidden_layers": 4096})", "no tensor 'model.layers.2.input_layernorm.weight'"},
        {"qwen3", R"({"num_attention_heads": 3})",
         "num_attention_heads 3, which num_key_value_heads 2 does not divide"},
        {"qwen3", R"({"num_key_value_heads": null})", "no 'num_key_value_heads'"},
        {"llama", R"({"num_key_value_heads": null})", "is of the shape (12,16), not (24,16)"},
        {"llama", R"({"head_dim": null})", "is of the shape (24,16), not (16,16)"},
        {"qwen3", R"({"head_dim": null})", "is of the shape (24,16), not (512,16)"},
        {"qwen3", R"({"head_dim": 7})", "heads of 7 numbers"},
        {"llama", R"({"head_dim": null, "hidden_size": 17})", "no 'head_dim'"},
        {"qwen3", R"({"max_position_embeddings": 4294967296})", "'max_position_embeddings'"},
        {"qwen3", R"({"rms_norm_eps": -1e-6})", "'rms_norm_eps'"},
        {"qwen3", R"({"rms_norm_eps": "1e-6"})", "'rms_norm_eps'"},
        {"qwen3", R"({"tie_word_embeddings": true})", "tensor 'lm_head.weight': is not the embedding"},
        {"qwen2", R"({"tie_word_embeddings": false})", "no tensor 'lm_head.weight'"},
        {"qwen3", R"({"attention_bias": true})", "no tensor 'model.layers.0.self_attn.q_proj.bias'"},
        {"llama", R"({"attention_bias": false})", "_proj.bias': has no place"},
        {"llama", R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})",
         "rope_type 'yarn', which is not supported"},
        {"llama", R"({"rope_parameters": {"factor": null}})", "no 'factor'"},
        {"llama", R"({"rope_parameters": {"rope_type": null, "factor": 2.0}})",
         "'factor', which is not supported for default"},
        {"llama", R"({"rope_parameters": {"low_freq_factor": 4.0}})", "low_freq_factor that is not below"},
        {"llama", R"({"rope_parameters": {"attention_factor": 2.0}})", "'attention_factor', which is not supported"},
        {"llama", R"({"rope_parameters": {"rope_theta": 0}})", "'rope_theta'"},
        {"llama", R"({"rope_parameters": 7})", "no object as 'rope_parameters'"},
        {"llama", R"({"rope_scaling": {"type": "linear", "factor": 2.0}})",
         "'rope_parameters' and 'rope_scaling' that differ"},
    };
    for (const one& c : cases) {
        CAPTURE(c.patch);
        const copied m(c.model);
        m.edit_json("config.json", [&](json& j) { j.merge_patch(json::parse(c.patch)); });
        if (std::string(c.patch).find("null") != std::string::npos) // merge_patch takes null for a key to take out
            m.edit_json("config.json", [&](json& j) { j["unused"] = nullptr; });
        const std::string message = m.opens();
        says(message, m.directory());
        says(message, c.said);
    }
    const copied m("llama");
    for (const char* text : {"", "{", "[]", "7", "{\"model_type\": \"llama\", \"a\": [[[[[[[[[]]]]]]]]]}"}) {
        CAPTURE(text);
        put(m.file("config.json"), text);
        says(m.opens(), m.directory() + "/config.json");
    }
    fs::remove(m.file("config.json"));
    says(m.opens(), "config.json: is missing");
}

TEST_CASE("keys of both versions of transformers, and unknown ones") {
    const auto config = [](const std::string& name, const std::function<void(json&)>& edit) {
        json j =
            json::parse(text_of(std::string(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/") + name + "/config.json"));
        edit(j);
        return hf::config_of(j.dump(), "a");
    };
    const auto old = config("llama", [](json& j) {
        const json p = j["rope_parameters"];
        j.erase("rope_parameters");
        j["rope_theta"] = p["rope_theta"];
        j["rope_scaling"] = p;
        j["rope_scaling"].erase("rope_theta");
        j["torch_dtype"] = j["dtype"];
        j.erase("dtype");
        j["of_tomorrow"] = {{"a", 1}};
    });
    CHECK(old.shape == config("llama", [](json&) {}).shape);
    CHECK(old.shape.rope.how == rope::scaling::llama3);
    CHECK(old.shape.rope.base == 500);
    CHECK(old.unknown == std::vector<std::string>{"of_tomorrow"});
    json expected = old.all;
    expected["torch_dtype"] = "bfloat16";
    CHECK(hf::config_for(old.shape, &old, "bfloat16") == expected);
    // another shape of the same family: what differs, and nothing else
    model_shape s = old.shape;
    s.layers = 1;
    s.rope.how = rope::scaling::linear;
    expected["num_hidden_layers"] = 1;
    expected["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
    CHECK(hf::config_for(s, &old, "bfloat16") == expected);
    s = config("qwen3", [](json&) {}).shape;
    CHECK_THROWS_WITH_AS(hf::config_for(s, &old, "float32"),
                         "opd: shape: llama models have no such norms of q and k, or no such biases",
                         opd::invalid_input);
    s.attention_bias = true; // without the output's
    CHECK_THROWS_AS(hf::config_for(s, nullptr, "float32"), opd::invalid_input);
    CHECK(config("qwen2", [](json& j) {
              j["rope_parameters"] = {{"type", "linear"}, {"factor", 2}, {"rope_theta", 1e6}};
          }).shape.rope == rope{.base = 1e6, .how = rope::scaling::linear, .factor = 2});
}

TEST_CASE("weights that are cut, overlap, or are others than config.json asks for are refused by name") {
    struct one {
        const char* what;
        std::function<void(json&, std::string&)> edit;
        const char* said;
    };
    const char* const norm = "model.norm.weight";
    const one cases[] = {
        {"a tensor is gone", [&](json& h, std::string& d) { d += "abcd", h.erase("model.embed_tokens.weight"); },
         "does not begin where"},
        {"another name", [&](json& h, std::string&) { h["model.norm.weights"] = h[norm], h.erase(norm); },
         "no tensor 'model.norm.weight', which its config.json asks for"},
        {"a tensor too many",
         [](json& h, std::string& d) {
             h["extra"] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {d.size(), d.size() + 4}}}, d += "abcd";
         },
         "tensor 'extra': has no place in the model"},
        {"another shape",
         [&](json& h, std::string&) {
             h[norm]["shape"] = {4, 4};
         },
         "is of the shape (4,4), not (16)"},
        {"a shape that overflows",
         [&](json& h, std::string&) {
             h[norm]["shape"] = {1LL << 40, 1LL << 40};
         },
         "more elements than can be counted"},
        {"a shape of more dimensions", [&](json& h, std::string&) { h[norm]["shape"] = json::array_t(9, 1); }, norm},
        {"a negative size", [&](json& h, std::string&) { h[norm]["shape"] = {-16}; }, norm},
        {"another type", [&](json& h, std::string&) { h[norm]["dtype"] = "F64"; }, "data_offsets"},
        {"no type", [&](json& h, std::string&) { h[norm]["dtype"] = "F7"; }, "is of a type that this library"},
        {"no text", [&](json& h, std::string&) { h[norm]["dtype"] = 7; }, "no text as 'dtype'"},
        {"overlapping offsets",
         [&](json& h, std::string&) {
             h[norm]["data_offsets"] = h["model.layers.0.input_layernorm.weight"]["data_offsets"];
         },
         "does not begin where the one before it ends"},
        {"offsets near 2^63",
         [&](json& h, std::string&) {
             h[norm]["data_offsets"] = {9223372036854775743, 9223372036854775807};
         },
         "no count from 0"},
        {"offsets that turn round",
         [&](json& h, std::string&) {
             h[norm]["data_offsets"] = {64, 0};
         },
         "data_offsets 64 to 0"},
        {"no offsets", [&](json& h, std::string&) { h[norm].erase("data_offsets"); }, "no 'data_offsets'"},
        {"no object", [&](json& h, std::string&) { h[norm] = 3; }, norm},
        {"a tail", [](json&, std::string& d) { d += "x"; }, "was cut, or has a tail"},
        {"cut data", [](json&, std::string& d) { d.resize(d.size() / 2); }, "was cut, or has a tail"},
        {"no metadata's text",
         [](json& h, std::string&) {
             h["__metadata__"] = {{"a", 1}};
         },
         "no text as 'a'"},
        {"not a number", [](json&, std::string& d) { std::memset(d.data(), 0xff, 4); }, "is not finite"},
    };
    for (const one& c : cases) {
        CAPTURE(c.what);
        const copied m("qwen2");
        m.edit_weights(c.edit);
        const std::string message = m.opens();
        says(message, m.directory());
        says(message, c.said);
    }
    const std::string whole = text_of(copied("qwen2").file());
    const auto with_size = [&](std::uint64_t size) {
        return std::string(reinterpret_cast<const char*>(&size), 8) + whole.substr(8);
    };
    for (const std::string& bytes :
         {std::string(), whole.substr(0, 7), whole.substr(0, 100), whole.substr(0, whole.size() - 1),
          with_size(~std::uint64_t{0}), with_size(std::uint64_t{1} << 63), with_size((std::uint64_t{1} << 63) - 1),
          with_size(0), with_size(1 << 20), std::string(64, '\0')}) {
        const copied m("qwen2");
        put(m.file(), bytes);
        says(m.opens(), m.directory() + "/model.safetensors");
    }
    const copied m("qwen2");
    fs::remove(m.file());
    says(m.opens(), "neither model.safetensors nor model.safetensors.index.json");
    fs::create_directory(m.file());
    says(m.opens(), "neither");
    says(refused([] { hf::read_model_directory("/nowhere"); }), "/nowhere/config.json: is missing");
    says(refused([&] { model_directory(copied("qwen2").directory(), 65); }, exit_usage), "max_length");
    says(refused([&] { model_directory(copied("qwen2").directory(), -1); }, exit_usage), "max_length");
}

TEST_CASE("an index that its files are not what it says is refused") {
    const std::string index = "model.safetensors.index.json", norm = "model.norm.weight";
    struct one {
        std::function<void(json&)> edit;
        const char* said;
    };
    const one cases[] = {
        {[](json& j) { j.erase("weight_map"); }, "no 'weight_map'"},
        {[](json& j) { j["weight_map"] = {"a"}; }, "no object as 'weight_map'"},
        {[&](json& j) { j["weight_map"][norm] = 3; }, "no text as 'weight_map'"},
        {[&](json& j) { j["weight_map"][norm] = "../qwen2/model.safetensors"; }, "no name of a safetensors file"},
        {[&](json& j) { j["weight_map"][norm] = "/etc/passwd"; }, "no name of a safetensors file"},
        {[&](json& j) { j["weight_map"][norm] = "a.safetensors"; }, "is missing"},
        {[&](json& j) { j["weight_map"][norm] = "model-00001-of-00004.safetensors"; }, "'model.norm.weight'"},
        {[&](json& j) { j["weight_map"].erase(norm); }, "tensor 'model.norm.weight' that model.safetensors.index.json"},
        {[](json& j) { j["weight_map"]["x"] = "model-00001-of-00004.safetensors"; }, "no tensor 'x', which"},
        {[](json& j) { j["weight_map"] = json::object(); }, "no tensor 'model.layers.0.input_layernorm.weight'"},
    };
    for (const one& c : cases) {
        const copied m("qwen3");
        m.edit_json(index, c.edit);
        says(m.opens(), c.said);
    }
    const copied m("qwen3");
    fs::remove(m.file("model-00002-of-00004.safetensors"));
    says(m.opens(), "model-00002-of-00004.safetensors: is missing");
}

TEST_CASE("what transformers passes over is passed over") {
    const copied m("qwen2");
    const auto before = weights_of(m.directory());
    m.edit_weights([](json& h, std::string& d) {
        const auto add = [&](const std::string& name, const std::string& type, const json& shape,
                             const std::string& bytes) {
            h[name] = {{"dtype", type}, {"shape", shape}, {"data_offsets", {d.size(), d.size() + bytes.size()}}};
            d += bytes;
        };
        const json e = h["model.embed_tokens.weight"];
        const std::size_t begin = e["data_offsets"][0], end = e["data_offsets"][1];
        add("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {3}, std::string(12, '\0'));
        add("lm_head.weight", e["dtype"], e["shape"], d.substr(begin, end - begin)); // a tied head, once more
    });
    CHECK(same_bits(weights_of(m.directory()), before));
}

TEST_CASE("damaged files are refused, or are a model") {
    std::mt19937 dice(7);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(dice()) % n; };
    const copied m("qwen2");
    int taken = 0, refusals = 0;
    for (const char* name : {"config.json", "model.safetensors"}) {
        const std::string whole = text_of(m.file(name));
        std::uint64_t header = whole.size();
        if (name[0] == 'm') std::memcpy(&header, whole.data(), 8);
        for (int round = 0; round < 150; ++round) {
            std::string bytes = whole;
            for (std::size_t edits = 1 + below(3); edits > 0; --edits) {
                const std::size_t at = below(std::min<std::size_t>(bytes.size(), header + 8));
                switch (below(4)) {
                case 0:
                    bytes[at] = static_cast<char>(below(256));
                    break;
                case 1:
                    bytes.insert(at, 1 + below(3), "0123456789,:\"{}[]-e"[below(19)]);
                    break;
                case 2:
                    bytes.erase(at, 1 + below(5));
                    break;
                default:
                    bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
                }
            }
            put(m.file(name), bytes);
            m.opens().empty() ? ++taken : ++refusals;
        }
        put(m.file(name), whole);
    }
    CHECK(refusals > 150);
    CHECK(taken > 0); // an epsilon's digit
}

TEST_CASE("what cannot be written is refused, and leaves nothing") {
    const scratch s;
    hf::read_model m = hf::read_model_directory(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/qwen3");
    const auto left = [&] { return std::distance(fs::directory_iterator(s.path), {}); };
    const auto write = [&](const std::string& path, const hf::write_options& how = {}) {
        hf::write_model_directory(path, m.shape, m.weights, &m.source, how);
    };
    fs::create_directory(s.path / "full");
    put(s.path / "full" / "a", "b");
    says(refused([&] { write(s / "full"); }, exit_io), "is there already");
    CHECK(text_of(s.path / "full" / "a") == "b");
    says(refused([&] { write(s / "none/m"); }, exit_io), "none/m");
    CHECK_THROWS_AS(write(s / "m", {"float16", 100}), opd::invalid_input);
    CHECK_THROWS_AS(write(s / "m", {"float32", 0}), opd::invalid_input);
    float& x = m.weights[static_cast<std::size_t>(place_of("model.layers.1.mlp.up_proj.weight", m.shape).offset)];
    x = 3.4e38F; // bfloat16 has no such number
    CHECK_THROWS_WITH_AS(write(s / "m", {"bfloat16", 100}),
                         "opd: weights: of 'model.layers.1.mlp.up_proj.weight' are not finite as bfloat16 at 0",
                         opd::invalid_input);
    x = NAN;
    CHECK_THROWS_AS(write(s / "m"), opd::invalid_input);
    x = 0;
    m.weights.pop_back();
    CHECK_THROWS_AS(write(s / "m"), opd::invalid_input);
    m.weights.push_back(0);
    CHECK(left() == 1);
    fs::create_directory(s.path / "empty");
    write(s / "empty");
    CHECK(same_bits(weights_of(s / "empty"), m.weights));
    CHECK(left() == 2);
    m.source.kept["a/b"] = "no folder"; // fails after the weights
    says(refused([&] { write(s / "m"); }, exit_io), "cannot be created");
    CHECK(left() == 2);
}

TEST_CASE("the memory of a model is known before it is taken") {
    const model_directory d(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/qwen2");
    const auto model = d.model<float>();
    const hf::model_bytes b = hf::bytes_of(d.shape());
    CHECK(b.model == static_cast<std::int64_t>(2 * model.weights.size() + 64 * 6) * 4);
    CHECK(b.training == static_cast<std::int64_t>(3 * model.weights.size()) * 4);
    const hf::model_bytes halves = hf::bytes_of(d.shape(), storage::bfloat16);
    CHECK(2 * (halves.model - 64 * 6 * 4 - 4 * model.layout.vectors) == b.model - 64 * 6 * 4);
    CHECK(halves.training == static_cast<std::int64_t>(4 * model.weights.size()) * 4); // masters
    CHECK(hf::bytes_of(d.shape(), storage::bfloat16_by_itself).training == b.training);
    const std::string said = d.source().describe();
    says(said, "qwen2, 2 layers, 16 wide, 4 heads of 6 over 2, 28 in the feed-forward part, 40 ids, head tied");
    says(said, std::to_string(d.source().numbers) + " weights in F32 (1 file)");
}

namespace {

/// qwen2 learns from llama, on prompts of three ids: 10 steps of 8 answers.
hf::distil_settings small_run(const scratch& dir, const std::string& out) {
    const std::string golden = OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/";
    hf::distil_settings s;
    s.student = golden + "qwen2", s.teacher = golden + "llama";
    s.prompts = dir / "prompts.jsonl", s.out = dir / out, s.log = dir / (out + ".jsonl");
    s.ends = {5, 9};
    s.max_response = 10, s.held_out = 4, s.say_every = 4;
    auto& d = s.settings.distill;
    d.steps = 10, d.prompts = 4, d.answers = 2, d.warmup = 2, d.rate = 1e-2;
    s.settings.run.threads = 2, s.settings.run.checkpoint_every = 4;
    std::string lines;
    for (int i = 0; i < 20; ++i) lines += fmt::format("{{\"ids\": [{}, {}, 3]}}\n", i, (7 * i) % 40);
    put(s.prompts, lines);
    spdlog::set_level(spdlog::level::warn);
    return s;
}

} // namespace

TEST_CASE("what a run's activations take is told before, checkpointed or not") {
    const scratch dir;
    const model_shape shape = model_directory(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/qwen2", 13).shape();
    for (const bool checkpointed : {false, true}) {
        hf::distil_settings s = small_run(dir, checkpointed ? "again" : "kept");
        s.settings.distill.steps = 1, s.settings.distill.gradient_checkpointing = checkpointed;
        std::ostringstream told;
        {
            const std::shared_ptr<void> back(
                nullptr, [before = spdlog::default_logger()](void*) { spdlog::set_default_logger(before); });
            spdlog::set_default_logger(
                std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(told)));
            hf::distil(s);
        }
        const auto bytes = static_cast<double>(hf::activation_bytes(shape, 8, 13, 2, checkpointed));
        says(told.str(), fmt::format(", {}activations of 8 answers of 13 tokens {:.3g}, ",
                                     checkpointed ? "checkpointed " : "", bytes / 1e9));
    }
    CHECK(same_bits(weights_of(dir / "again"), weights_of(dir / "kept")));
}

TEST_CASE("a student learns from a teacher of another family, in a directory that is read again") {
    const scratch dir;
    const auto golden = [](const std::string& name) { return OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/" + name; };
    std::string lines;
    for (int i = 0; i < 40; ++i) lines += fmt::format("{{\"ids\": [{}, {}, 3]}}\n", i, (7 * i) % 40);
    put(dir / "prompts.jsonl", lines);
    hf::distil_settings s;
    s.student = golden("qwen2"), s.teacher = golden("llama"), s.prompts = dir / "prompts.jsonl", s.out = dir / "out";
    s.log = dir / "log.jsonl";
    s.ends = {5, 9};
    s.max_response = 12, s.held_out = 8, s.say_every = 0;
    auto& d = s.settings.distill;
    d.steps = 30, d.prompts = 8, d.answers = 2, d.warmup = 2, d.rate = 2e-2;
    s.settings.run.threads = 2;
    spdlog::set_level(spdlog::level::warn);
    const hf::distil_report r = hf::distil(s);
    CHECK(r.kl_before > 1);
    CHECK(r.kl_after < 0.6 * r.kl_before);
    CHECK(r.tokens > 30 * 16);
    CHECK(r.sample_before != r.sample_after);
    for (const std::string& answer : {r.sample_before, r.sample_after}) { // ids: there is no tokenizer
        const auto ids = json::parse(answer).get<std::vector<int>>();
        CHECK(ids.size() >= 1);
        CHECK(ids.size() <= 12);
    }

    std::vector<json> log;
    std::istringstream in(text_of(dir / "log.jsonl"));
    for (std::string line; std::getline(in, line);) log.push_back(json::parse(line));
    REQUIRE(log.size() == 30);
    std::int64_t tokens = 0;
    for (const json& line : log) {
        CHECK(line["mismatched"] == 0); // the learner's log p has the bits of rollout's
        tokens += line["tokens"].get<std::int64_t>();
    }
    CHECK(tokens == r.tokens);
    model_shape shape;
    const auto learnt = weights_of(s.out, &shape), start = weights_of(s.student);
    CHECK(shape == model_directory(s.student).shape());
    CHECK(!same_bits(learnt, start));
    CHECK(text_of(s.out + "/tokenizer_config.json") == text_of(s.student + "/tokenizer_config.json"));

    // the same once more, from one thread: the same bits
    s.out = dir / "again", s.settings.run.threads = 1, s.log.clear();
    hf::distil(s);
    CHECK(same_bits(weights_of(s.out), learnt));

    for (const char* estimator : {"jsd", "mc", "topk", "lightning"}) {
        CAPTURE(estimator);
        s.out = dir / estimator, d.estimator = estimator, d.steps = 2;
        hf::distil(s);
        CHECK(!same_bits(weights_of(s.out), start));
    }
    d.estimator = "reverse_kl", d.rollout_top_k = 5, s.out = dir / "filtered";
    hf::distil(s);
    CHECK(!same_bits(weights_of(s.out), start));

    const auto refuses = [&](const std::string& said, exit_code code,
                             const std::function<void(hf::distil_settings&)>& edit) {
        hf::distil_settings other = s;
        other.out = dir / "refused";
        edit(other);
        says(refused([&] { hf::distil(other); }, code), said);
        CHECK(!fs::exists(other.out + "/config.json"));
    };
    refuses("--out", exit_io, [&](auto& o) { o.out = dir / "again", fs::remove(dir / "again/config.json"); });
    refuses("--max-response", exit_usage, [](auto& o) { o.max_response = 64; });
    refuses("--held-out", exit_usage, [](auto& o) { o.held_out = 40; });
    refuses("--estimator", exit_usage, [](auto& o) { o.settings.distill.estimator = "kl"; });
    refuses("--steps", exit_usage, [](auto& o) { o.settings.distill.steps = 0; });
    refuses("--end: id 40", exit_usage, [](auto& o) { o.ends = {40}; });
    refuses("--end: neither", exit_usage, [](auto& o) { o.ends.clear(); });
    refuses("line 41: ids[0]: must be an id from 0 to 39", exit_input,
            [&](auto&) { put(s.prompts, lines + "{\"ids\": [40]}\n"); });
    refuses("line 41: has no tokens", exit_input, [&](auto&) { put(s.prompts, lines + "{\"ids\": []}\n"); });
    refuses("line 1: has 60 tokens; the most is 52", exit_input, [&](auto&) {
        put(s.prompts, json{{"ids", std::vector<int>(60, 1)}}.dump() + "\n");
    });
    refuses("qwen2/tokenizer.json; give ids", exit_input,
            [&](auto&) { put(s.prompts, lines + "{\"text\": \"Hi\"}\n"); });
    refuses("has no prompts", exit_input, [&](auto&) { put(s.prompts, ""); });
    refuses("cannot open", exit_input, [](auto& o) { o.prompts = "/nowhere"; });
    CHECK(hf::end_tokens(model_directory(golden("llama")).source()) == std::vector<token>{2});
    CHECK(hf::end_tokens(model_directory(golden("qwen2")).source()).empty());
}

namespace {

/// A random model of 800 ids that has golden/text/NAME.json as its tokenizer and a chat template of ChatML.
void write_text_model(const std::string& path, const std::string& tokenizer, unsigned seed) {
    const std::string golden = OPD_TEST_SOURCE_DIR "/tests/trainer/golden/text/";
    model_shape shape = model_directory(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/qwen3").shape();
    shape.vocabulary = 800, shape.layers = 1;
    std::mt19937 random(seed);
    std::normal_distribution<float> number(0, 0.3F);
    std::vector<float> weights(static_cast<std::size_t>(model_layout(shape).size));
    for (float& w : weights) w = number(random);
    hf::write_model_directory(path, shape, weights, nullptr);
    put(path + "/tokenizer.json", text_of(golden + tokenizer + ".json"));
    const json chats = json::parse(text_of(golden + "chats.json"));
    put(path + "/tokenizer_config.json", json{{"chat_template", chats["templates"]["chatml"]}}.dump());
}

} // namespace

TEST_CASE("prompts of text are encoded by the student's own tokenizer, and answers are shown as text") {
    const scratch dir;
    write_text_model(dir / "student", "qwen", 1);
    write_text_model(dir / "teacher", "qwen", 2);
    const bpe_tokenizer tokenizer(text_of(dir / "student/tokenizer.json"));
    // the same prompts as text and as ids
    const std::vector<std::string> texts = {"Once upon a time", "Grüße aus Köln", "x = 3;", "the end of it"};
    std::string text, ids;
    for (const std::string& t : texts) {
        text += json{{"text", t}}.dump() + "\n";
        ids += json{{"ids", tokenizer.encode(t)}}.dump() + "\n";
    }
    text += R"({"messages": [{"role": "user", "content": "Hi"}]})"
            "\n";
    ids +=
        json{{"ids", tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", false)}}.dump() + "\n";
    hf::distil_settings s;
    s.student = dir / "student", s.teacher = dir / "teacher", s.prompts = dir / "prompts.jsonl";
    s.ends = {799};
    s.max_response = 8, s.held_out = 2, s.say_every = 1;
    s.settings.distill.steps = 2, s.settings.distill.prompts = 2, s.settings.distill.rate = 5e-2;
    s.settings.run.threads = 1;
    spdlog::set_level(spdlog::level::warn);
    const auto run = [&](const std::string& out, const std::string& lines) {
        put(s.prompts, lines);
        s.out = dir / out;
        return hf::distil(s);
    };
    const hf::distil_report of_text = run("text", text), of_ids = run("ids", ids);
    CHECK(same_bits(weights_of(dir / "text"), weights_of(dir / "ids")));
    CHECK(of_text.sample_before == of_ids.sample_before);
    CHECK(text_of(dir / "text/tokenizer.json") == text_of(dir / "student/tokenizer.json"));

    put(dir / "student/tokenizer_config.json", "{}");
    says(refused([&] { run("refused", text); }, exit_input),
         "line 5: messages: " + (dir / "student/tokenizer_config.json") +
             ": has no chat_template: give prompts as ids");

    // without the files the same answers come as ids, of which the text was
    for (const char* name : {"student", "teacher"}) fs::remove(fs::path(dir / name) / "tokenizer.json");
    const hf::distil_report bare = run("bare", ids);
    CHECK(same_bits(weights_of(dir / "bare"), weights_of(dir / "ids")));
    for (const auto& [shown, answer] :
         {std::pair(of_text.sample_before, bare.sample_before), std::pair(of_text.sample_after, bare.sample_after)}) {
        text_stream stream(tokenizer);
        std::string again;
        for (const token id : json::parse(answer).get<std::vector<token>>()) again += stream.add(id);
        CHECK(shown == again);
    }
    says(refused([&] { run("refused", text); }, exit_input), "student/tokenizer.json; give ids");

    // a file that is not supported is of no matter to ids, and named to text
    put(dir / "student/tokenizer.json", R"({"model": {"type": "Unigram", "vocab": []}})");
    CHECK(run("unigram", ids).sample_before == bare.sample_before);
    says(refused([&] { run("refused", text); }, exit_input), "student/tokenizer.json: has no pre_tokenizer");
    CHECK(!fs::exists(dir / "refused"));
}

TEST_CASE("a teacher of another tokenizer is refused, unless it is accepted") {
    const scratch dir;
    write_text_model(dir / "student", "qwen", 1);
    write_text_model(dir / "teacher", "qwen", 2);
    const auto source = [&](const char* name) { return model_directory(dir / name).source(); };
    const auto edited = [&](const std::function<void(json&)>& edit) {
        json j = json::parse(text_of(dir / "student/tokenizer.json"));
        edit(j);
        put(dir / "teacher/tokenizer.json", j.dump());
    };
    const auto check = [&] { hf::check_same_tokenizer(source("student"), source("teacher")); };
    check(); // the same bytes
    edited([](json& j) { j["normalizer"] = nullptr; });
    check(); // other bytes, the same tokens
    edited([](json& j) { std::swap(j["model"]["vocab"]["a"], j["model"]["vocab"]["b"]); });
    const std::string said = refused(check, exit_input);
    says(said, dir / "teacher/tokenizer.json");
    says(said, dir / "student/tokenizer.json");
    says(said, "2 tokens of the one have no or another id in the other, 2 of the other in the one");
    edited([](json& j) { j["added_tokens"].erase(j["added_tokens"].size() - 1); });
    says(refused(check, exit_input), "0 tokens of the one have no or another id in the other, 1 of the other");
    edited([](json& j) { j["model"].erase("vocab"); });
    says(refused(check, exit_input), "teacher/tokenizer.json: model: has no 'vocab'");
    put(dir / "teacher/tokenizer.json", "{");
    says(refused(check, exit_input), "teacher/tokenizer.json: is no JSON");

    hf::distil_settings s;
    s.student = dir / "student", s.teacher = dir / "teacher", s.prompts = dir / "prompts.jsonl", s.out = dir / "out";
    s.ends = {799};
    s.max_response = 4, s.held_out = 1;
    s.settings.distill.steps = 1, s.settings.distill.prompts = 1, s.settings.run.threads = 1;
    put(s.prompts, "{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
    spdlog::set_level(spdlog::level::warn);
    says(refused([&] { hf::distil(s); }, exit_input), "teacher/tokenizer.json");
    CHECK(!fs::exists(s.out));
    s.accept_tokenizer = true;
    hf::distil(s);
    CHECK(fs::exists(s.out + "/model.safetensors"));
    fs::remove(dir / "teacher/tokenizer.json");
    check(); // one file alone
}

namespace {

std::vector<json> lines_of(const std::string& path) {
    std::vector<json> r;
    std::istringstream in(text_of(path));
    for (std::string line; std::getline(in, line);) r.push_back(json::parse(line));
    return r;
}
/// Without what depends on the clock, and on what is not said where stages take turns.
std::vector<json> timeless(std::vector<json> lines) {
    for (json& line : lines) line.erase("seconds"), line.erase("samples");
    return lines;
}

struct named_run {
    const char* name;
    std::function<void(hf::distil_settings&)> how;
    bool same_bits = true; // timing decides nothing
};
const std::vector<named_run>& run_kinds() {
    static const auto schedule = [](const char* kind, int k) {
        return [=](hf::distil_settings& s) {
            s.settings.schedule.kind = kind, s.settings.schedule.k = s.settings.schedule.tau = k;
            s.settings.schedule.rollout_workers = 2;
        };
    };
    static const std::vector<named_run> kinds = {{"sync", [](auto&) {}},
                                                 {"lora",
                                                  [](auto& s) {
                                                      s.lora_rank = 2, s.settings.distill.mini_batches = 2,
                                                      s.settings.distill.estimator = "mc";
                                                      s.settings.distill.rollout_top_k = 12;
                                                  }},
                                                 {"step-off", schedule("step-off", 2)},
                                                 {"bfloat16", [](auto& s) { s.stored = "bfloat16"; }},
                                                 {"bfloat16-lora",
                                                  [](auto& s) {
                                                      schedule("step-off", 1)(s);
                                                      s.stored = "bfloat16", s.lora_rank = 2;
                                                  }},
                                                 {"controlled", schedule("controlled", 1)},
                                                 {"async-0",
                                                  [](auto& s) {
                                                      schedule("async", 0)(s);
                                                      s.lora_rank = 3, s.lora_alpha = 1;
                                                  }},
                                                 {"async-2", schedule("async", 2), false}};
    return kinds;
}

} // namespace

TEST_CASE("a run that stops, again and again, and goes on ends in the bits of an unbroken one") {
    for (const named_run& kind : run_kinds()) {
        CAPTURE(kind.name);
        const scratch dir;
        hf::distil_settings s = small_run(dir, "whole");
        kind.how(s);
        const hf::distil_report whole = hf::distil(s);
        s.out = dir / "parts", s.log = dir / "parts.jsonl", s.checkpoint = dir / "run.ckpt";
        for (const int threads : {1, 2}) {
            s.stop_after = 3, s.settings.run.threads = threads;
            s.settings.distill.gradient_checkpointing = threads == 1; // of which no bit depends
            says(refused([&] { hf::distil(s); }, exit_interrupted), "--resume goes on from " + s.checkpoint);
            CHECK(!fs::exists(s.out));
            s.resume = true;
        }
        CHECK(lines_of(s.log).size() == 6);
        s.stop_after = -1, s.settings.distill.gradient_checkpointing = true;
        const hf::distil_report parts = hf::distil(s);
        CHECK(!fs::exists(s.checkpoint)); // nothing is left to go on with
        CHECK(parts.kl_before == whole.kl_before);
        CHECK(parts.sample_before == whole.sample_before);
        const auto log = lines_of(s.log);
        std::int64_t tokens = 0;
        REQUIRE(log.size() == 10);
        for (std::size_t i = 0; i < log.size(); ++i) {
            CHECK(log[i]["step"] == i);
            tokens += log[i]["tokens"].get<std::int64_t>();
        }
        CHECK(tokens == parts.tokens);
        std::set<int> samples; // each once
        for (const json& line : log)
            if (line.contains("samples"))
                for (const int n : line["samples"]) CHECK(samples.insert(n).second);
        if (s.settings.schedule.kind != "sync") {
            CHECK(samples.size() == 80);
            CHECK(*samples.rbegin() == 79);
        }
        if (!kind.same_bits) continue;
        CHECK(same_bits(weights_of(dir / "parts"), weights_of(dir / "whole")));
        CHECK(timeless(log) == timeless(lines_of(dir / "whole.jsonl")));
        CHECK(parts.kl_after == whole.kl_after);
        CHECK(parts.sample_after == whole.sample_after);
        CHECK(parts.tokens == whole.tokens);
        if (s.lora_rank > 0)
            CHECK(text_of(dir / "parts/adapter/adapter_model.safetensors") ==
                  text_of(dir / "whole/adapter/adapter_model.safetensors"));
    }
}

TEST_CASE("a run that is killed without warning goes on from its last checkpoint, bit for bit") {
    for (const char* schedule : {"sync", "step-off"}) {
        CAPTURE(schedule);
        const scratch dir;
        hf::distil_settings s = small_run(dir, "whole");
        s.settings.schedule.kind = schedule, s.settings.schedule.k = 1;
        s.settings.distill.steps = 60, s.settings.run.checkpoint_every = 3, s.say_every = 0;
        hf::distil(s);
        s.out = dir / "parts", s.log = dir / "parts.jsonl", s.checkpoint = dir / "run.ckpt";
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            try {
                hf::distil(s);
            } catch (...) {
                ::_exit(1);
            }
            ::_exit(0);
        }
        const auto steps = [&] {
            std::ifstream lines(s.log);
            return std::count(std::istreambuf_iterator<char>(lines), {}, '\n');
        };
        int status = 0;
        bool ended = false;
        while (!ended && steps() < 5) {
            ended = ::waitpid(child, &status, WNOHANG) == child;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        REQUIRE_MESSAGE(!ended, "it ended before the fifth step");
        REQUIRE(::kill(child, SIGKILL) == 0);
        REQUIRE(::waitpid(child, &status, 0) == child);
        REQUIRE(WIFSIGNALED(status)); // else too few steps to be killed in
        CHECK(!fs::exists(s.out));
        s.resume = true, s.settings.run.threads = 1;
        hf::distil(s);
        CHECK(same_bits(weights_of(dir / "parts"), weights_of(dir / "whole")));
        CHECK(timeless(lines_of(s.log)) == timeless(lines_of(dir / "whole.jsonl")));
    }
}

TEST_CASE("a checkpoint of another run, or in a place that is none, is refused and stays") {
    const scratch dir;
    hf::distil_settings s = small_run(dir, "out");
    s.checkpoint = dir / "run.ckpt";
    const auto refuses = [&](const std::string& said, exit_code code,
                             const std::function<void(hf::distil_settings&)>& edit) {
        hf::distil_settings other = s;
        edit(other);
        says(refused([&] { hf::distil(other); }, code), said);
        CHECK(!fs::exists(other.out));
    };
    refuses("--resume: there is no checkpoint", exit_input, [](auto& o) { o.resume = true; });
    refuses("--resume needs --checkpoint", exit_usage, [](auto& o) { o.resume = true, o.checkpoint.clear(); });
    refuses("--checkpoint: there is no directory", exit_io, [](auto& o) { o.checkpoint = "/nowhere/a"; });
    refuses("stopped after 2 steps: nothing is written", exit_interrupted,
            [](auto& o) { o.stop_after = 2, o.checkpoint.clear(); });
    s.stop_after = 2;
    says(refused([&] { hf::distil(s); }, exit_interrupted), "stopped after 2 steps");
    s.stop_after = -1;
    const std::string bytes = text_of(s.checkpoint);
    refuses("is there already; --resume goes on with it", exit_usage, [](auto&) {});
    s.resume = true;
    refuses("distill.rate", exit_usage, [](auto& o) { o.settings.distill.rate = 1; });
    refuses("schedule.kind", exit_usage, [](auto& o) { o.settings.schedule.kind = "async"; });
    refuses("models.teacher", exit_usage,
            [](auto& o) { o.teacher = OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/qwen2"; });
    refuses("answers.max_response", exit_usage, [](auto& o) { o.max_response = 9; });
    refuses("answers.held_out", exit_usage, [](auto& o) { o.held_out = 5; });
    refuses("answers.ends", exit_usage, [](auto& o) { o.ends = {5}; });
    refuses("lora.rank", exit_usage, [](auto& o) { o.lora_rank = 1; });
    refuses("stored", exit_usage, [](auto& o) { o.stored = "bfloat16"; });
    CHECK(text_of(s.checkpoint) == bytes);
    const std::string prompts = text_of(s.prompts);
    put(s.prompts, prompts + prompts);
    refuses("answers.prompts", exit_usage, [](auto&) {});
    put(s.prompts, prompts);
    for (const std::size_t size : {std::size_t{0}, std::size_t{40}, bytes.size() - 1}) {
        put(s.checkpoint, bytes.substr(0, size));
        refuses(s.checkpoint, exit_input, [](auto&) {});
    }
    std::string flipped = bytes;
    flipped[bytes.size() / 2] = static_cast<char>(flipped[bytes.size() / 2] ^ 1);
    put(s.checkpoint, flipped);
    refuses("its checksum does not fit", exit_input, [](auto&) {});
    put(s.checkpoint, bytes);
    hf::distil(s); // and whole it is gone on with
    CHECK(fs::exists(s.out));
}

TEST_CASE("stages that overlap learn from answers as old as the schedule says") {
    const scratch dir;
    const auto run = [&](const std::string& name, const char* kind, int k, int more = 0) {
        hf::distil_settings s = small_run(dir, name);
        s.settings.schedule.kind = kind, s.settings.schedule.k = s.settings.schedule.tau = k;
        s.settings.schedule.rollout_workers = more, s.settings.schedule.teachers = more;
        s.settings.schedule.staleness_policy = "edf";
        return hf::distil(s);
    };
    const hf::distil_report sync = run("sync", "sync", 0);
    CHECK(sync.lag == 0);
    // no lag is no difference
    run("off-0", "step-off", 0), run("async-0", "async", 0, 2);
    for (const char* name : {"off-0", "async-0"}) {
        CHECK(same_bits(weights_of(dir / name), weights_of(dir / "sync")));
        CHECK(timeless(lines_of(dir / (std::string(name) + ".jsonl"))) == timeless(lines_of(dir / "sync.jsonl")));
    }
    // k updates, exactly, whether they overlap or not
    for (const char* kind : {"step-off", "controlled"}) {
        const hf::distil_report r = run(kind, kind, 2, 2);
        CHECK(r.lag == doctest::Approx(2 - 3.0 / 10).epsilon(0.05)); // 0, 1, 2, 2, … over steps of nearly equal size
        for (const json& line : lines_of(dir / (std::string(kind) + ".jsonl"))) {
            const std::int64_t expected = std::min<std::int64_t>(2, line["step"].get<std::int64_t>());
            CHECK(line["lag"] == expected);
            CHECK(line["lag_most"] == expected);
            CHECK((line["effective_share"].get<double>() < 1) == (expected > 0));
        }
        CHECK(r.kl_after < r.kl_before);
    }
    CHECK(same_bits(weights_of(dir / "step-off"), weights_of(dir / "controlled")));
    CHECK(!same_bits(weights_of(dir / "step-off"), weights_of(dir / "sync")));
    const hf::distil_report r = run("async", "async", 2, 2);
    CHECK(r.kl_after < r.kl_before);
    CHECK(r.lag <= 2);
    for (const json& line : lines_of(dir / "async.jsonl")) CHECK(line["lag_most"].get<int>() <= 2);

    // ratios are of the weights that drew to those that learn: 1 where these are the same, else a cap cuts them
    for (const char* kind : {"sync", "step-off"}) {
        CAPTURE(kind);
        for (const double cap : {1.001, 5.0}) {
            const std::string name = fmt::format("{}-{}", kind, cap);
            hf::distil_settings s = small_run(dir, name);
            s.settings.schedule.kind = kind, s.settings.schedule.k = 1;
            auto& d = s.settings.distill;
            d.steps = 4, d.estimator = "mc", d.surrogate = "truncated_is", d.ratio_cap = cap, d.rollout_top_p = 0.9;
            hf::distil(s);
        }
        const std::string at = dir / kind;
        CHECK(same_bits(weights_of(at + "-1.001"), weights_of(at + "-5")) == (std::string(kind) == "sync"));
    }
}

TEST_CASE("LoRA's gradient is that of the weights, projected; merged weights are base and product") {
    const auto model = model_directory(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/qwen3", 16).model<float>();
    opd::thread_team threads(2);
    std::mt19937 random(7);
    std::normal_distribution<float> number(0, 1);
    hf::lora adapters(model, 3, 6, 11);
    transformer<float> merged = model;
    for (const hf::linear_part& p : hf::linear_parts(model.shape))
        std::fill_n(merged.weights.begin() + p.place.offset, p.place.size(), 7.0F);
    adapters.merge(merged, threads);
    CHECK(same_bits(merged.weights, model.weights)); // B is 0
    CHECK(std::ssize(hf::linear_parts(model.shape)) == 7 * model.shape.layers);

    // f = <G, W(A,B)> is bilinear, so that a difference over any distance is the derivative
    std::vector<float> g(model.weights.size()), d;
    for (float& x : g) x = number(random);
    for (float& x : adapters.values) x = number(random) / 4;
    const auto f = [&](const std::vector<float>& values) {
        hf::lora at = adapters;
        at.values = values;
        at.merge(merged, threads);
        double r = 0;
        for (const hf::linear_part& p : hf::linear_parts(model.shape))
            for (index_t i = p.place.offset; i < p.place.offset + p.place.size(); ++i) {
                const auto n = static_cast<std::size_t>(i);
                r += static_cast<double>(g[n]) * (static_cast<double>(merged.weights[n]) - model.weights[n]);
            }
        return r;
    };
    adapters.gradient(g, d, threads);
    REQUIRE(d.size() == adapters.values.size());
    double largest = 0;
    for (const float x : d) largest = std::max(largest, std::abs(static_cast<double>(x)));
    for (std::size_t i = 0; i < d.size(); i += 13) {
        std::vector<float> up = adapters.values, down = up;
        up[i] += 1, down[i] -= 1;
        CHECK(std::abs((f(up) - f(down)) / 2 - static_cast<double>(d[i])) <= 1e-4 * largest);
    }
    // and of all values at once
    std::vector<float> up = adapters.values, down = up;
    double expected = 0;
    for (std::size_t i = 0; i < d.size(); ++i) {
        const float direction = number(random) / 64;
        up[i] += direction, down[i] -= direction;
        expected += static_cast<double>(direction) * static_cast<double>(d[i]);
    }
    CHECK((f(up) - f(down)) / 2 == doctest::Approx(expected).epsilon(1e-3));

    CHECK_THROWS_WITH_AS(hf::lora(model, 0, 1, 1), doctest::Contains("rank: must lie in [1, "), opd::invalid_input);
    CHECK_THROWS_AS(hf::lora(model, 1000, 1, 1), opd::invalid_input);
    CHECK_THROWS_WITH_AS(hf::lora(model, 1, NAN, 1), doctest::Contains("alpha: must be positive"), opd::invalid_input);
}

TEST_CASE("of a model in bfloat16 LoRA's sum is rounded once, and masters are gone") {
    for (const std::string name : {"qwen2", "qwen3"}) { // whose weights are float, and bfloat16
        const model_directory from(OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/" + name, 16);
        auto plain = from.model<float>(), halves = from.model<float>(storage::bfloat16);
        opd::thread_team threads(2);
        hf::lora adapters(halves, 3, 6, 11);
        CHECK(adapters.values == hf::lora(plain, 3, 6, 11).values);
        std::mt19937 random(7);
        for (float& x : adapters.values) x = std::normal_distribution<float>(0, 0.25F)(random);
        adapters.merge(plain, threads), adapters.merge(halves, threads);
        CHECK(halves.weights.empty());
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < plain.weights.size(); ++i)
            wrong += !(halves.stored[i] == opd::bfloat16(plain.weights[i]));
        CHECK(wrong == 0);
    }
}

TEST_CASE("what is trained in bfloat16 is written as it ran, or as its masters, and a BF16 teacher is held as it is") {
    const scratch dir;
    const std::string golden = OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/";
    hf::distil_settings s = small_run(dir, "masters");
    s.stored = "bfloat16", s.settings.distill.rate = 1e-3;
    const hf::distil_report report = hf::distil(s);
    CHECK(report.kl_after < report.kl_before);
    s.out = dir / "ran", s.how.type = "bfloat16";
    hf::distil(s);
    std::vector<float> masters = weights_of(dir / "masters"), ran = weights_of(dir / "ran");
    CHECK(masters != ran);
    for (float& x : masters) x = static_cast<float>(opd::bfloat16(x));
    CHECK(same_bits(masters, ran));
    const model_directory written(dir / "ran");
    CHECK(written.source().types == "BF16");
    const auto again = written.model<float>(storage::bfloat16_by_itself);
    std::vector<float> read(ran.size());
    again.numbers().copy(0, std::ssize(read), read.data());
    CHECK(same_bits(read, ran));

    // a teacher of the same numbers in either type
    const hf::read_model teacher = hf::read_model_directory(s.teacher);
    hf::write_model_directory(dir / "bf16", teacher.shape, teacher.weights, &teacher.source, {.type = "bfloat16"});
    const hf::read_model rounded = hf::read_model_directory(dir / "bf16");
    hf::write_model_directory(dir / "f32", rounded.shape, rounded.weights, &rounded.source);
    for (const std::string stored : {"float32", "bfloat16"}) // of the student
        for (const char* of : {"bf16", "f32"}) {
            s.stored = stored, s.teacher = dir / of, s.out = dir / (stored + of), s.how.type = "float32";
            s.log.clear(), s.settings.distill.steps = 4;
            hf::distil(s);
        }
    CHECK(same_bits(weights_of(dir / "float32bf16"), weights_of(dir / "float32f32")));
    CHECK(same_bits(weights_of(dir / "bfloat16bf16"), weights_of(dir / "bfloat16f32")));
    CHECK_FALSE(same_bits(weights_of(dir / "float32f32"), weights_of(dir / "bfloat16f32")));
    s.stored = "half", s.out = dir / "no";
    says(refused([&] { hf::distil(s); }, exit_usage), "--storage must be float32 or bfloat16, not 'half'");
}

TEST_CASE("LoRA learns, leaves everything else alone, and is written merged and as PEFT reads it") {
    const scratch dir;
    for (const std::string student : {"qwen2", "qwen3"}) { // the one's weights are float, the other's bfloat16
        CAPTURE(student);
        hf::distil_settings s = small_run(dir, student);
        s.out = setting("OPD_HF_WRITE", dir.path.string()) + "/" + student + "-lora";
        s.student = OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/" + student;
        s.lora_rank = 2, s.lora_alpha = 3, s.settings.distill.rate = 5e-2;
        const hf::distil_report r = hf::distil(s);
        CHECK(r.kl_after < 0.95 * r.kl_before);
        model_shape shape;
        std::vector<float> base = weights_of(s.student, &shape), learnt = weights_of(s.out);

        const json config = json::parse(text_of(s.out + "/adapter/adapter_config.json"));
        CHECK(config["peft_type"] == "LORA");
        CHECK(config["r"] == 2);
        CHECK(config["lora_alpha"] == 3);
        CHECK(config["base_model_name_or_path"] == s.student);
        CHECK(config["target_modules"] ==
              json({"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"}));
        const std::string path = s.out + "/adapter/adapter_model.safetensors", bytes = text_of(path);
        const auto h = opd::data::read_safetensors(std::as_bytes(std::span(bytes.data(), bytes.size())), path);
        CHECK(std::ssize(h.tensors) == 2 * 7 * shape.layers);
        const auto matrix = [&](const std::string& name, index_t rows, index_t columns) {
            const auto* t = h.find("base_model.model." + name);
            REQUIRE(t);
            CHECK(t->shape == std::vector<index_t>{rows, columns});
            std::vector<float> v(static_cast<std::size_t>(rows * columns));
            REQUIRE(t->end - t->begin == v.size() * sizeof(float));
            std::memcpy(v.data(), bytes.data() + h.data_begin + t->begin, v.size() * sizeof(float));
            return v;
        };
        double moved = 0;
        for (const hf::linear_part& p : hf::linear_parts(shape)) {
            const index_t in = p.place.columns;
            const auto a = matrix(p.module + ".lora_A.weight", 2, in),
                       b = matrix(p.module + ".lora_B.weight", p.place.rows, 2);
            double worst = 0;
            for (index_t i = 0; i < p.place.rows; ++i)
                for (index_t j = 0; j < in; ++j) {
                    const auto at = static_cast<std::size_t>(p.place.offset + i * in + j);
                    double expected = static_cast<double>(base[at]);
                    for (index_t k = 0; k < 2; ++k)
                        expected += 1.5 * static_cast<double>(b[static_cast<std::size_t>(2 * i + k)]) *
                                    static_cast<double>(a[static_cast<std::size_t>(k * in + j)]);
                    worst = std::max(worst, std::abs(expected - static_cast<double>(learnt[at])));
                    moved = std::max(moved, std::abs(static_cast<double>(learnt[at]) - static_cast<double>(base[at])));
                    learnt[at] = base[at];
                }
            CHECK(worst <= 2e-6);
        }
        CHECK(moved > 1e-4);
        CHECK(same_bits(learnt, base)); // all that is in no linear layer
    }
    hf::distil_settings s = small_run(dir, "no");
    s.lora_rank = 1000;
    says(refused([&] { hf::distil(s); }, exit_usage), "--lora must lie in [1, ");
    s.lora_rank = 2, s.lora_alpha = -1;
    says(refused([&] { hf::distil(s); }, exit_usage), "--lora-alpha must be positive");
    CHECK(!fs::exists(s.out));
}

TEST_CASE("LoRA learns from the rows that a selector keeps") {
    const scratch dir;
    const auto learnt = [&](const std::string& out, const std::string& selector, double a, double b) {
        hf::distil_settings s = small_run(dir, out);
        s.lora_rank = 2, s.settings.distill.rate = 5e-2, s.settings.distill.steps = 4;
        s.settings.distill.selector = selector;
        s.settings.distill.selector_a = a, s.settings.distill.selector_b = b;
        hf::distil(s);
        return weights_of(s.out);
    };
    const std::vector<float> base = weights_of(small_run(dir, "base").student);
    const std::vector<float> all = learnt("all", "all", 0, 0), some = learnt("some", "prefix", 3, 0);
    CHECK(same_bits(learnt("unsure", "tip", 1e6, 1e6), base)); // nobody is so unsure, or so wrong
    CHECK(same_bits(learnt("each", "tip", 0, 1e6), all));
    CHECK(!same_bits(some, all));
    CHECK(!same_bits(some, base));
}

TEST_CASE("an update in parts has the gradient of the whole, each token with its weight in it") {
    const std::string golden = OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/";
    transformer<float> student = model_directory(golden + "qwen2", 24).model<float>();
    const auto teacher = model_directory(golden + "llama", 24).model<float>();
    opd::cpu_backend backend{.threads = 1};
    for (const char* estimator : {"reverse_kl", "mc", "tail_bucket"}) {
        CAPTURE(estimator);
        config c;
        c.distill.estimator = estimator;
        c = hf::settled(c);
        sampling how;
        how.seed = 3, how.end = 5, how.more_ends = {9, 1, 2, 3}, how.max_response = 16, how.plan = draws_for(c);
        std::vector<request> requests;
        for (int i = 0; i < 7; ++i) requests.push_back({static_cast<std::uint64_t>(i), {i, 4, 6}});
        teacher_scorer scorer(teacher, backend);
        std::vector<trajectory> rolled = roll_out(student, backend.team(), requests, how);
        std::vector<const trajectory*> answers;
        for (const trajectory& t : rolled) answers.push_back(&t);
        auto scored = scorer.score(answers, how.plan.count, cache_for(c));
        std::vector<learner_stage::view> views(rolled.size());
        std::set<std::size_t> lengths;
        for (std::size_t i = 0; i < views.size(); ++i) {
            lengths.insert(rolled[i].response().size());
            views[i].rolled = std::make_shared<const trajectory>(rolled[i]);
            views[i].scored = std::make_shared<const scored_sequence>(scored[i]);
        }
        REQUIRE(lengths.size() > 2); // else a mean of means would do
        std::vector<float> gradient;
        const auto learnt = [&](int micro_batch) {
            c.distill.micro_batch = micro_batch;
            adamw_state state;
            learner learn(c, student, state, backend, head_of(teacher));
            learn.update_with([&](double, std::vector<float>& g) {
                gradient = g;
                return 1.0;
            });
            publication none;
            learner_stage lesson(c, learn, none, {});
            lesson.learn(views, 0);
            return lesson.learn(views, 0); // what an update leaves behind is not in the next
        };
        const learner_result whole = learnt(0);
        const std::vector<float> expected = gradient;
        const std::vector<double> as_double(expected.begin(), expected.end());
        for (const int n : {1, 3, 6, 7, 100}) {
            CAPTURE(n);
            const learner_result r = learnt(n);
            CHECK(difference(gradient.data(), as_double, 1e-6) <= 1e-5);
            CHECK(r.loss == doctest::Approx(whole.loss).epsilon(1e-6));
            CHECK(r.kl == doctest::Approx(whole.kl).epsilon(1e-6));
            CHECK(r.tokens == whole.tokens);
            CHECK(r.updates == 1);
            CHECK(r.mismatched == 0);
            if (n >= 7) CHECK(same_bits(gradient, expected));
        }
    }
    const auto refuses = [](const std::string& said, const std::function<void(config&)>& edit) {
        config c;
        c.distill.micro_batch = 2, c.distill.estimator = "mc";
        edit(c);
        says(refused([&] { hf::settled(c); }, exit_usage), said);
    };
    refuses("--micro-batch: not with --m2po", [](config& c) { c.distill.m2po = 0.04; });
    refuses("--micro-batch: not with --correction", [](config& c) { c.distill.correction = "recompute"; });
    refuses("--micro-batch: not with --selector", [](config& c) { c.distill.selector = "entropy"; });
    refuses("--micro-batch must be at least 0", [](config& c) { c.distill.micro_batch = -1; });
    refuses("--batch must lie in", [](config& c) { c.distill.prompts = 0; });
    refuses("--top-p must lie in", [](config& c) { c.distill.rollout_top_p = 0; });
    refuses("opd-distil has no drafter", [](config& c) { c.speculation.kind = "learned"; });
    refuses("opd-distil runs on threads", [](config& c) { c.schedule.driver = "virtual"; });
}

TEST_CASE("the program does what its options say, and refuses those that nothing looks at") {
    const scratch dir;
    hf::distil_settings s = small_run(dir, "api");
    s.lora_rank = 2, s.lora_alpha = 8;
    auto& d = s.settings.distill;
    d.steps = 3, d.micro_batch = 3, d.estimator = "jsd", d.jsd_w = 0.3, d.answers = 2, d.kv_tokens = 64;
    s.settings.schedule.kind = "step-off", s.settings.schedule.k = 1, s.settings.speculation.kind = "ngram";
    s.settings.optimizer.decay = 0.1, s.settings.run.seed = 5;
    hf::distil(s);
    const auto exits = [&](const std::string& out, const std::vector<std::string>& more) {
        std::vector<std::string> words = {"opd-distil", "--student",   s.student,           "--teacher",
                                          s.teacher,    "--prompts",   s.prompts,           "--out",
                                          dir / out,    "--end=5,9",   "--max-response=10", "--held-out=4",
                                          "--batch=4",  "--answers=2", "--threads=2"};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<const char*> argv;
        for (const std::string& w : words) argv.push_back(w.c_str());
        return distil_main(static_cast<int>(argv.size()), argv.data());
    };
    CHECK(exits("main", {"--steps=3",
                         "--rate=1e-2",
                         "--warmup=2",
                         "--lora=2",
                         "--lora-alpha=8",
                         "--micro-batch=3",
                         "--gradient-checkpointing",
                         "--estimator=jsd",
                         "--jsd-w=0.3",
                         "--kv-tokens=64",
                         "--schedule=step-off",
                         "--schedule-k=1",
                         "--speculate=ngram",
                         "--decay=0.1",
                         "--seed=5",
                         "--rollout-workers=1",
                         "--teachers=2",
                         "--learner-threads=1",
                         "--checkpoint=" + dir / "c",
                         "--checkpoint-every=1",
                         "--type=float32",
                         "--storage=float32"}) == exit_ok);
    CHECK(same_bits(weights_of(dir / "main"), weights_of(dir / "api")));
    CHECK(!fs::exists(dir / "c"));
    for (const std::vector<std::string>& more :
         std::vector<std::vector<std::string>>{{"--lora-alpha=2"},
                                               {"--checkpoint-every=2"},
                                               {"--rollout-workers=1"},
                                               {"--teachers=1"},
                                               {"--score-batch=2"},
                                               {"--learner-threads=1"},
                                               {"--schedule=step-off", "--tau=2"},
                                               {"--schedule=async", "--schedule-k=2"},
                                               {"--k=3"},
                                               {"--m=2"},
                                               {"--estimator=mc", "--hidden-budget=100000"},
                                               {"--top-k=3", "--hidden-budget=100000"},
                                               {"--draft-depth=2"},
                                               {"--resume"},
                                               {"--mini-batches=3"},
                                               {"--estimator=topk", "--k=41"},
                                               {"--kv-tokens=8"}}) {
        CAPTURE(more.back());
        CHECK(exits("refused", more) == exit_usage);
    }
    CHECK(!fs::exists(dir / "refused"));
}
