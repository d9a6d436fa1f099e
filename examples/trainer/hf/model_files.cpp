// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/model_files.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hf/strict_json.hpp"
#include "opd/data/json.hpp"
#include "opd/element.hpp"
#include "settings/config.hpp"

namespace trainer::hf {

namespace {

using nlohmann::json;
namespace data = opd::data::detail;

constexpr const char *one_file = "model.safetensors", *index_file = "model.safetensors.index.json";
// What goes along: the ways that transformers stores generation settings, tokenizers and chat templates.
constexpr const char* kept_files[] = {"generation_config.json",
                                      "tokenizer.json",
                                      "tokenizer_config.json",
                                      "special_tokens_map.json",
                                      "added_tokens.json",
                                      "vocab.json",
                                      "merges.txt",
                                      "tokenizer.model",
                                      "chat_template.jinja",
                                      "chat_template.json"};
constexpr std::size_t largest_json = std::size_t{1} << 26, largest_kept = std::size_t{1} << 28;

// What the files' own readers refuse, in the trainer's words.
template <class Work>
auto as_input(Work&& work) {
    try {
        return work();
    } catch (const opd::invalid_input& e) {
        throw failure(exit_input, e.what());
    }
}

std::string text_of_file(const std::string& path, std::size_t most) {
    const data::mapped_file map(path);
    if (map.bytes().size() > most)
        data::refuse(path, fmt::format("has {} bytes; {} are the most", map.bytes().size(), most));
    return std::string(map.text());
}

// f(name, place, shape) of each tensor of the files, in the order of the weights.
template <class F>
void each_part(const model_shape& s, const model_layout& layout, F&& f) {
    const auto matrix = [&](const std::string& name, const tensor& t, index_t first, index_t rows) {
        f(name, tensor{t.offset + first * t.columns, rows, t.columns}, std::vector<index_t>{rows, t.columns});
    };
    const auto vector = [&](const std::string& name, const tensor& t, index_t first, index_t rows) {
        if (rows > 0) f(name, tensor{t.offset + first, rows, 1}, std::vector<index_t>{rows});
    };
    const index_t q = s.q_width(), kv = s.kv_width(), ffn = s.ffn;
    matrix("model.embed_tokens.weight", layout.embedding, 0, s.vocabulary);
    for (std::size_t l = 0; l < layout.layers.size(); ++l) {
        const layer_tensors& t = layout.layers[l];
        const std::string at = fmt::format("model.layers.{}.", l), attention = at + "self_attn.";
        vector(at + "input_layernorm.weight", t.norm1, 0, t.norm1.rows);
        const std::pair<const char*, std::pair<index_t, index_t>> parts[] = {
            {"q_proj", {0, q}}, {"k_proj", {q, kv}}, {"v_proj", {q + kv, kv}}};
        for (const auto& [name, rows] : parts) {
            matrix(attention + name + ".weight", t.wqkv, rows.first, rows.second);
            if (s.attention_bias) vector(attention + name + ".bias", t.bqkv, rows.first, rows.second);
        }
        vector(attention + "q_norm.weight", t.q_norm, 0, t.q_norm.rows);
        vector(attention + "k_norm.weight", t.k_norm, 0, t.k_norm.rows);
        matrix(attention + "o_proj.weight", t.wo, 0, t.wo.rows);
        vector(attention + "o_proj.bias", t.bo, 0, t.bo.rows);
        vector(at + "post_attention_layernorm.weight", t.norm2, 0, t.norm2.rows);
        matrix(at + "mlp.gate_proj.weight", t.wgu, 0, ffn);
        matrix(at + "mlp.up_proj.weight", t.wgu, ffn, ffn);
        matrix(at + "mlp.down_proj.weight", t.wdown, 0, t.wdown.rows);
    }
    vector("model.norm.weight", layout.norm_f, 0, layout.norm_f.rows);
    if (!s.tied) matrix("lm_head.weight", layout.head, 0, s.vocabulary);
}

// Numbers as they lie in a file, which need not be aligned, to T.
template <class Stored, class T, class Convert>
void convert_each(const std::byte* from, std::size_t n, T* to, Convert&& convert) {
    for (std::size_t i = 0; i < n; ++i) {
        Stored x;
        std::memcpy(&x, from + i * sizeof x, sizeof x);
        if constexpr (std::is_same_v<T, opd::bfloat16>)
            to[i] = T(static_cast<float>(convert(x)));
        else
            to[i] = static_cast<T>(convert(x));
    }
}
template <class T>
void convert(std::string_view type, const std::byte* from, std::size_t n, T* to) {
    if (type == "BF16")
        convert_each<std::uint16_t>(from, n, to, opd::detail::bfloat16_to_float);
    else if (type == "F16")
        convert_each<std::uint16_t>(from, n, to, opd::detail::half_to_float);
    else if (type == "F32")
        convert_each<float>(from, n, to, [](float x) { return x; });
    else
        convert_each<double>(from, n, to, [](double x) { return x; });
}
bool is_number_type(std::string_view type) { return type == "BF16" || type == "F16" || type == "F32" || type == "F64"; }

// By its bits: where the compiler takes every number for finite, too.
bool is_finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f800000U) != 0x7f800000U; }
bool is_finite(opd::bfloat16 x) { return (x.bits & 0x7f80U) != 0x7f80U; }
bool is_finite(double x) {
    constexpr std::uint64_t exponent = 0x7ff0000000000000U;
    return (std::bit_cast<std::uint64_t>(x) & exponent) != exponent;
}
template <class T>
index_t first_not_finite(const T* x, index_t n) {
    for (index_t i = 0; i < n; ++i)
        if (!is_finite(x[i])) return i;
    return -1;
}

std::string shape_text(const std::vector<index_t>& shape) { return fmt::format("({})", fmt::join(shape, ",")); }

bool is_plain_shard_name(const std::string& name) {
    return name.size() > 12 && name.size() < 256 && name.front() != '.' && name.ends_with(".safetensors") &&
           name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

} // namespace

// --- reading ---------------------------------------------------------------------------------------------------------

std::string model_source::describe() const {
    const model_shape& s = config.shape;
    return fmt::format(
        "{}: {}, {} layers, {} wide, {} heads of {} over {}, {} in the feed-forward part, {} ids, head {}; "
        "{} weights in {} ({} {})",
        path, name_of(config.of), s.layers, s.width, s.heads, s.head_dim, s.kv_heads, s.ffn, s.vocabulary,
        s.tied ? "tied" : "of its own", numbers, types, files, files == 1 ? "file" : "files");
}

model_bytes bytes_of(const model_shape& s, storage how) {
    const model_layout layout(s);
    const std::int64_t weights = layout.size;
    constexpr std::int64_t number = sizeof(float), half = sizeof(opd::bfloat16);
    const std::int64_t copies = number * weights > transformer<float>::large_bytes ? 1 : 2;
    const std::int64_t angles = number * index_t{s.max_length} * s.head_dim;
    if (how == storage::numbers) return {number * copies * weights + angles, number * 3 * weights};
    return {half * copies * weights + number * layout.vectors + angles,
            number * (how == storage::bfloat16 ? 4 : 3) * weights};
}

model_directory::model_directory(const std::string& path, int max_length) {
    as_input([&] {
        source_.path = path;
        const std::string config = path + "/config.json";
        source_.config = config_of(text_of_file(config, largest_json), config);
        shape_ = source_.config.shape;
        if (max_length < 0 || max_length > shape_.max_length)
            throw failure(exit_usage, fmt::format("max_length must lie in [0, {}], the positions of {}, not be {}",
                                                  shape_.max_length, path, max_length));
        if (max_length > 0) shape_.max_length = max_length;
        open_files();
        find_tensors();
        // now: the directory may be gone when the model is written
        for (const char* name : kept_files)
            if (const std::string file = path + "/" + name; data::size_of_file(file) >= 0)
                source_.kept[name] = text_of_file(file, largest_kept);
    });
}

void model_directory::open_files() {
    const auto open = [&](const std::string& name) -> const file& {
        auto f = std::make_unique<file>();
        f->path = source_.path + "/" + name;
        f->map = data::mapped_file(f->path);
        f->header = opd::data::read_safetensors(f->map.bytes(), f->path);
        files_.push_back(std::move(f));
        return *files_.back();
    };
    if (data::size_of_file(source_.path + "/" + one_file) >= 0) {
        const file& f = open(one_file);
        for (const opd::data::tensor& t : f.header.tensors) tensors_[t.name] = {&f, &t};
        return;
    }
    const std::string index = source_.path + "/" + index_file;
    if (data::size_of_file(index) < 0)
        data::refuse(source_.path, fmt::format("has neither {} nor {}", one_file, index_file));
    const json j = strict_json(text_of_file(index, largest_json), index);
    const json& map = data::member(j, "weight_map", index);
    if (!map.is_object()) data::refuse(index, "has no object as 'weight_map'");
    std::map<std::string, std::set<std::string>> names; // of each file
    for (const auto& [tensor, in] : map.items()) {
        const std::string name = data::as_text(in, "weight_map", index);
        if (!is_plain_shard_name(name))
            data::refuse(index, fmt::format("has a weight_map with '{}', which is no name of a safetensors file",
                                            name.substr(0, 80)));
        names[name].insert(tensor);
    }
    for (const auto& [name, of_it] : names) {
        const file& f = open(name);
        for (const opd::data::tensor& t : f.header.tensors) {
            if (!of_it.contains(t.name))
                data::refuse(f.path, fmt::format("has a tensor '{}' that {} does not say is there",
                                                 t.name.substr(0, 80), index_file));
            tensors_[t.name] = {&f, &t};
        }
        for (const std::string& tensor : of_it)
            if (!f.header.find(tensor))
                data::refuse(f.path, fmt::format("has no tensor '{}', which {} says is there", tensor.substr(0, 80),
                                                 index_file));
    }
}

void model_directory::find_tensors() {
    const auto of_layer = [](int l) { return fmt::format("model.layers.{}.input_layernorm.weight", l); };
    const auto missing = [&](const std::string& name) {
        data::refuse(source_.path, fmt::format("has no tensor '{}', which its config.json asks for", name));
    };
    for (int l = 0; l < shape_.layers; ++l) // before a layout is made for as many
        if (!tensors_.contains(of_layer(l))) missing(of_layer(l));
    const model_layout layout(shape_);
    std::set<std::string> types;
    std::set<std::string> expected;
    each_part(shape_, layout, [&](const std::string& name, const tensor& place, const std::vector<index_t>& shape) {
        const auto at = tensors_.find(name);
        if (at == tensors_.end()) missing(name);
        const opd::data::tensor& t = *at->second.tensor;
        const std::string in = fmt::format("{}, tensor '{}'", at->second.in->path, name);
        if (t.shape != shape)
            data::refuse(in, fmt::format("is of the shape {}, not {}", shape_text(t.shape), shape_text(shape)));
        if (!is_number_type(t.type))
            data::refuse(in, fmt::format("is of the type {}; BF16, F16, F32 and F64 are supported", t.type));
        types.insert(t.type);
        expected.insert(name);
        source_.numbers += place.size();
    });
    for (const auto& [name, at] : tensors_) {
        if (expected.contains(name) || name.ends_with(".rotary_emb.inv_freq")) continue;
        const std::string in = fmt::format("{}, tensor '{}'", at.in->path, name.substr(0, 80));
        if (name != "lm_head.weight") data::refuse(in, "has no place in the model that config.json describes");
        const found& e = tensors_.at("model.embed_tokens.weight"); // a tied head that was written all the same
        const auto bytes = [](const found& f) {
            return f.in->map.bytes().subspan(f.in->header.data_begin + f.tensor->begin,
                                             f.tensor->end - f.tensor->begin);
        };
        if (at.tensor->type != e.tensor->type || at.tensor->shape != e.tensor->shape ||
            !std::ranges::equal(bytes(at), bytes(e)))
            data::refuse(in, "is not the embedding, which config.json says it is (tie_word_embeddings)");
    }
    source_.types = fmt::format("{}", fmt::join(types, ", "));
    source_.files = files_.size();
}

template <class T>
void model_directory::read(std::span<T> weights) const {
    const model_layout layout(shape_);
    if (std::ssize(weights) != layout.size)
        throw opd::invalid_input("weights", fmt::format("are {}; the model has {}", weights.size(), layout.size));
    std::fill(weights.begin(), weights.end(), T(0.0F));
    as_input([&] {
        each_part(shape_, layout, [&](const std::string& name, const tensor& place, const std::vector<index_t>&) {
            const found& f = tensors_.at(name);
            T* const to = weights.data() + place.offset;
            convert(f.tensor->type, f.in->map.bytes().data() + f.in->header.data_begin + f.tensor->begin,
                    static_cast<std::size_t>(place.size()), to);
            if (const index_t i = first_not_finite(to, place.size()); i >= 0)
                data::refuse(fmt::format("{}, tensor '{}'", f.in->path, name),
                             fmt::format("has a number at {} that is not finite, or too large", i));
        });
    });
}

std::vector<linear_part> linear_parts(const model_shape& shape) {
    constexpr std::string_view tail = "_proj.weight";
    std::vector<linear_part> r;
    each_part(shape, model_layout(shape), [&](const std::string& name, const tensor& place, const auto&) {
        if (name.ends_with(tail)) r.push_back({name.substr(0, name.size() - std::strlen(".weight")), place});
    });
    return r;
}

template void model_directory::read(std::span<float>) const;
template void model_directory::read(std::span<double>) const;
template void model_directory::read(std::span<opd::bfloat16>) const;

read_model read_model_directory(const std::string& path, int max_length) {
    const model_directory directory(path, max_length);
    return with_memory_for(path, [&] {
        read_model r{directory.shape(), {}, directory.source()};
        r.weights.resize(static_cast<std::size_t>(model_layout(r.shape).size));
        directory.read(std::span<float>(r.weights));
        return r;
    });
}

// --- writing ---------------------------------------------------------------------------------------------------------

namespace {

struct written_tensor {
    std::string name;
    tensor place;
    std::vector<index_t> shape;
};

void write_text(const std::string& folder, const std::string& name, std::string_view text) {
    data::new_file file(folder, name);
    file.write(std::as_bytes(std::span(text.data(), text.size())));
    file.finish();
}

// f(at) with numbers [at, at + part.size()) of a tensor in `part`, some at a time.
template <class F>
void each_piece(const stored_numbers& weights, const tensor& place, std::vector<float>& part, F&& f) {
    for (index_t at = 0; at < place.size(); at += std::ssize(part)) {
        part.resize(static_cast<std::size_t>(std::min<index_t>(place.size() - at, 1 << 16)));
        weights.copy(place.offset + at, std::ssize(part), part.data());
        f(at);
    }
}

// Tensors of one file, converted some at a time.
void write_shard(const std::string& folder, const std::string& name, std::span<const written_tensor> tensors,
                 const stored_numbers& weights, bool bfloat16) {
    const std::size_t width = bfloat16 ? 2 : 4;
    opd::data::safetensors_header h{{{"format", "pt"}}, {}, 0}; // transformers asks for the format
    std::size_t at = 0;
    for (const written_tensor& t : tensors) {
        const std::size_t bytes = static_cast<std::size_t>(t.place.size()) * width;
        h.tensors.push_back({t.name, bfloat16 ? "BF16" : "F32", t.shape, at, at + bytes});
        at += bytes;
    }
    data::new_file file(folder, name);
    const std::string front = data::header_bytes(h);
    file.write(std::as_bytes(std::span(front.data(), front.size())));
    std::vector<float> part;
    std::vector<std::uint16_t> rounded;
    for (const written_tensor& t : tensors)
        each_piece(weights, t.place, part, [&](index_t) {
            if (!bfloat16) return file.write(std::as_bytes(std::span(part)));
            rounded.resize(part.size());
            std::transform(part.begin(), part.end(), rounded.begin(), opd::detail::float_to_bfloat16);
            file.write(std::as_bytes(std::span(rounded)));
        });
    file.finish();
}

// A directory under a name of its own, gone with its owner unless it became another.
struct temporary_directory {
    std::string path;

    explicit temporary_directory(const std::string& beside) {
        for (int n = 0; n < 100; ++n) { // what a process of this number left behind stays
            path = fmt::format("{}.tmp-{}-{}", beside, ::getpid(), n);
            if (::mkdir(path.c_str(), 0777) == 0) return;
            if (errno != EEXIST) break;
        }
        data::cannot_write(path, "cannot be created");
    }
    temporary_directory(const temporary_directory&) = delete;
    temporary_directory& operator=(const temporary_directory&) = delete;
    ~temporary_directory() {
        std::error_code none;
        if (!path.empty()) std::filesystem::remove_all(path, none);
    }
    void become(const std::string& name) {
        if (std::rename(path.c_str(), name.c_str()) != 0) data::cannot_write(name, "cannot be renamed to");
        path.clear();
        const std::string parent = std::filesystem::path(name).parent_path().string();
        data::sync_folder(parent.empty() ? "." : parent);
    }
};

void write_adapter(const std::string& folder, const adapter_files& a) {
    if (::mkdir(folder.c_str(), 0777) != 0) data::cannot_write(folder, "cannot be created");
    std::vector<written_tensor> tensors;
    for (const auto& [name, place] : a.tensors) tensors.push_back({name, place, {place.rows, place.columns}});
    write_shard(folder, "adapter_model.safetensors", tensors, {a.values.data()}, false);
    write_text(folder, "adapter_config.json", a.config);
}

void write_all_of(const std::string& path, const model_shape& shape, const model_layout& layout,
                  const stored_numbers& weights, const model_source* from, const write_options& how, const json& config,
                  const adapter_files* adapter) {
    const bool bfloat16 = how.type == "bfloat16";
    std::vector<std::vector<written_tensor>> shards(1);
    std::size_t filled = 0, total = 0;
    each_part(shape, layout, [&](const std::string& name, const tensor& place, const std::vector<index_t>& dimensions) {
        const std::size_t bytes = static_cast<std::size_t>(place.size()) * (bfloat16 ? 2 : 4);
        if (!shards.back().empty() && filled + bytes > how.shard_bytes) shards.emplace_back(), filled = 0;
        shards.back().push_back({name, place, dimensions});
        filled += bytes, total += bytes;
    });

    std::error_code none; // that become() meets again
    if (std::filesystem::exists(path, none) && !std::filesystem::is_empty(path, none))
        throw failure(exit_io, fmt::format("{} is there already, and is no empty directory", path));
    temporary_directory folder(path);
    json map = json::object();
    for (std::size_t i = 0; i < shards.size(); ++i) {
        const std::string name = shards.size() == 1
                                     ? std::string(one_file)
                                     : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
        write_shard(folder.path, name, shards[i], weights, bfloat16);
        for (const written_tensor& t : shards[i]) map[t.name] = name;
    }
    if (shards.size() > 1)
        write_text(folder.path, index_file,
                   json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n");
    write_text(folder.path, "config.json", config.dump(2) + "\n");
    if (from)
        for (const auto& [name, bytes] : from->kept) write_text(folder.path, name, bytes);
    if (adapter) write_adapter(folder.path + "/adapter", *adapter);
    folder.become(path);
}

void write_checked(const std::string& name, const model_shape& shape, const model_layout& layout,
                   const stored_numbers& weights, const model_source* from, const write_options& how,
                   const adapter_files* adapter) {
    std::string path = name;
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    if (how.type != "float32" && how.type != "bfloat16")
        throw opd::invalid_input("type", fmt::format("must be float32 or bfloat16, not '{}'", how.type));
    if (how.shard_bytes == 0) throw opd::invalid_input("shard_bytes", "must be positive");
    const json config = config_for(shape, from ? &from->config : nullptr, how.type);
    const bool rounded = how.type == "bfloat16";
    std::vector<float> part;
    each_part(shape, layout, [&](const std::string& of, const tensor& place, const std::vector<index_t>&) {
        each_piece(weights, place, part, [&](index_t at) {
            for (const float& x : part) {
                // the largest floats are rounded to infinity
                if (is_finite(rounded ? opd::detail::bfloat16_to_float(opd::detail::float_to_bfloat16(x)) : x))
                    continue;
                throw opd::invalid_input("weights", fmt::format("of '{}' are not finite as {} at {}", of, how.type,
                                                                at + (&x - part.data())));
            }
        });
    });
    try {
        write_all_of(path, shape, layout, weights, from, how, config, adapter);
    } catch (const opd::error& e) {
        throw failure(exit_io, e.what());
    }
}

} // namespace

void write_model_directory(const std::string& path, const model_shape& shape, std::span<const float> weights,
                           const model_source* from, const write_options& how, const adapter_files* adapter) {
    const model_layout layout(shape);
    if (std::ssize(weights) != layout.size)
        throw opd::invalid_input("weights", fmt::format("are {}; the shape has {}", weights.size(), layout.size));
    write_checked(path, shape, layout, {weights.data()}, from, how, adapter);
}

void write_model_directory(const std::string& path, const transformer<float>& model, const model_source* from,
                           const write_options& how, const adapter_files* adapter) {
    if (!model.weights.empty()) return write_model_directory(path, model.shape, model.weights, from, how, adapter);
    write_checked(path, model.shape, model.layout, model.numbers(), from, how, adapter);
}

} // namespace trainer::hf
