// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Model directories of transformers: config.json, the index and safetensors files of a small model, each damaged as
// JSON or as bytes, a safetensors header so that its length fits again. The reader refuses with a failure of kind
// exit_input, or the model has finite weights, those in bfloat16 are the floats rounded, and it is written and read
// again bit for bit.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <unistd.h>

#include "fuzz/damaged_json.hpp"
#include "opd/element.hpp"
#include "trainer/hf/model_files.hpp"
#include "trainer/settings/failure.hpp"

namespace {

using namespace opd::fuzz;
using trainer::index_t;
using trainer::hf::model_directory;
namespace fs = std::filesystem;

/// A folder in memory where there is one, gone with the process.
struct folder {
    fs::path path = (fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path()) /
                    ("opd-fuzz-models-" + std::to_string(::getpid()));
    folder() { fs::create_directories(path); }
    ~folder() {
        std::error_code none;
        fs::remove_all(path, none);
    }
};
const fs::path& place() {
    static const folder f;
    return f.path;
}

using files = std::map<std::string, std::string>;

/// The files of one model of each family: as one safetensors file, in float, and as several, in bfloat16.
const std::vector<files>& models() {
    static const std::vector<files> all = [] {
        std::vector<files> r;
        for (const int family : {0, 1, 2})
            for (const bool several : {false, true}) {
                trainer::model_shape s{.vocabulary = 5,
                                       .width = 4,
                                       .layers = 1,
                                       .heads = 2,
                                       .kv_heads = 1,
                                       .head_dim = 2,
                                       .ffn = 3,
                                       .tied = several,
                                       .max_length = 16};
                s.qk_norm = family == 0, s.attention_bias = family == 1;
                trainer::transformer<float> model(s);
                model.initialise(3);
                const std::string made = place() / "made";
                trainer::hf::write_model_directory(made, model, nullptr,
                                                   {.type = several ? "bfloat16" : "float32",
                                                    .shard_bytes = several ? std::size_t{80} : std::size_t{1} << 30});
                files& f = r.emplace_back();
                for (const auto& e : fs::directory_iterator(made)) {
                    std::ifstream in(e.path(), std::ios::binary);
                    f[e.path().filename()] = {std::istreambuf_iterator<char>(in), {}};
                }
                fs::remove_all(made);
            }
        return r;
    }();
    return all;
}

/// Its header as JSON, with a length that fits, most often; or its bytes.
void damage_safetensors(choices& c, std::string& bytes) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    std::string header = bytes.substr(8, length), data = bytes.substr(8 + length);
    if (c.once_in(2))
        damage(c, header);
    else
        header = damaged_json(c, nlohmann::json::parse(header));
    if (c.once_in(3)) c.once_in(2) ? damage(c, data) : nudge(c, data);
    if (c.once_in(4)) header.append(static_cast<std::size_t>(c.below(9)), ' ');
    length = header.size();
    std::string front(reinterpret_cast<const char*>(&length), sizeof length);
    if (c.once_in(6)) nudge(c, front);
    bytes = front + header + data;
}

void model(choices& c) {
    files f = models()[static_cast<std::size_t>(c.below(std::ssize(models())))];
    for (auto& [name, bytes] : f) {
        if (!c.once_in(3)) continue;
        if (name.ends_with(".json"))
            bytes = damaged_json(c, nlohmann::json::parse(bytes));
        else
            damage_safetensors(c, bytes);
    }
    if (c.once_in(8)) f.erase(std::next(f.begin(), c.below(std::ssize(f))));
    const fs::path folder = place() / "read", again = place() / "again";
    fs::create_directory(folder);
    for (const auto& [name, bytes] : f)
        std::ofstream(folder / name, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    try {
        const model_directory from(folder);
        const auto size = static_cast<std::size_t>(trainer::model_layout(from.shape()).size);
        std::vector<float> weights(size), written(size);
        std::vector<opd::bfloat16> halves(size);
        from.read(std::span(weights));
        std::size_t rounded = 0;
        for (const float x : weights) {
            need(std::isfinite(x), "a weight is not finite");
            rounded += static_cast<std::size_t>(std::isfinite(static_cast<float>(opd::bfloat16(x))));
        }
        if (rounded == size) { // the largest floats are not
            from.read(std::span(halves));
            for (std::size_t i = 0; i < size; ++i)
                need(halves[i] == opd::bfloat16(weights[i]), "a weight in bfloat16 is not the float rounded");
        }
        trainer::hf::write_model_directory(again, from.shape(), weights, &from.source());
        const model_directory back(again);
        need(back.shape() == from.shape(), "a model is written as one of another shape");
        back.read(std::span(written));
        need(std::memcmp(weights.data(), written.data(), size * sizeof(float)) == 0,
             "weights are written as other numbers");
    } catch (const trainer::failure& e) {
        need(e.code == trainer::exit_input, "a model is refused as something else than a bad input");
    }
    fs::remove_all(folder), fs::remove_all(again);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    model(c);
    return 0;
}
