// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/lora.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "model/row_kernels.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace trainer::hf {

namespace {

index_t values_of(const tensor& t, int rank) { return rank * (t.rows + t.columns); }

bool is_bfloat16(float x) { return opd::detail::bfloat16_to_float(opd::detail::float_to_bfloat16(x)) == x; }

// y += c x
void add_times(float c, const float* x, index_t n, float* y) {
    using lanes = number<float>;
    each_lane<float>(n, [&](index_t i, auto load, auto store) {
        store(fma(lanes(static_cast<double>(c)), load(x + i), load(y + i)), y + i);
    });
}

} // namespace

lora::lora(const transformer<float>& base, int rank, double alpha, std::uint64_t seed) : rank_(rank), alpha_(alpha) {
    if (!(alpha > 0) || !std::isfinite(alpha))
        throw opd::invalid_input("alpha", fmt::format("must be positive and finite, not {}", alpha));
    index_t most = 1 << 30, size = 0, held = 0;
    for (linear_part& p : linear_parts(base.shape)) {
        const tensor t = p.place;
        most = std::min({most, t.rows, t.columns});
        const tensor a{size, rank, t.columns}, b{size + a.size(), t.rows, rank};
        layers_.push_back({std::move(p), a, b, held});
        size += values_of(t, rank), held += t.size();
    }
    if (rank < 1 || rank > most)
        throw opd::invalid_input("rank",
                                 fmt::format("must lie in [1, {}], the least side of a layer, not {}", most, rank));
    const auto each = [&](auto&& f) {
        for (const layer& l : layers_)
            for (index_t i = 0; i < l.part.place.size(); ++i) f(l.base + i, base.at(l.part.place)[i]);
    };
    bool exact = true;
    each([&](index_t, float x) { exact = exact && is_bfloat16(x); });
    if (exact) {
        base_bfloat16_.resize(static_cast<std::size_t>(held));
        each([&](index_t i, float x) {
            base_bfloat16_[static_cast<std::size_t>(i)] = opd::detail::float_to_bfloat16(x);
        });
    } else {
        base_float_.resize(static_cast<std::size_t>(held));
        each([&](index_t i, float x) { base_float_[static_cast<std::size_t>(i)] = x; });
    }
    values.assign(static_cast<std::size_t>(size), 0.0f);
    std::mt19937_64 random(seed);
    for (const layer& l : layers_) {
        const double bound = 1 / std::sqrt(static_cast<double>(l.a.columns));
        for (index_t i = 0; i < l.a.size(); ++i) {
            const double unit = static_cast<double>(random() >> 11) * 0x1p-53; // [0, 1)
            values[static_cast<std::size_t>(l.a.offset + i)] = static_cast<float>((2 * unit - 1) * bound);
        }
    }
}

float lora::base_at(index_t i) const {
    const auto n = static_cast<std::size_t>(i);
    return base_float_.empty() ? opd::detail::bfloat16_to_float(base_bfloat16_[n]) : base_float_[n];
}

void lora::merge(transformer<float>& model, opd::thread_team& threads) const {
    const auto scale = static_cast<float>(alpha_ / rank_);
    if (model.in_bfloat16()) model.weights = {};
    threads.run(std::ssize(layers_), [&](index_t n, int) {
        const layer& l = layers_[static_cast<std::size_t>(n)];
        const index_t in = l.a.columns;
        std::vector<float> sum(static_cast<std::size_t>(in));
        for (index_t row = 0; row < l.part.place.rows; ++row) {
            const index_t place = l.part.place.offset + row * in;
            float* const w = model.in_bfloat16() ? sum.data() : model.weights.data() + place;
            for (index_t i = 0; i < in; ++i) w[i] = base_at(l.base + row * in + i);
            const float* const b = values.data() + l.b.offset + row * rank_;
            for (int k = 0; k < rank_; ++k) add_times(scale * b[k], values.data() + l.a.offset + k * in, in, w);
            if (model.in_bfloat16()) round_to_bfloat16(w, in, model.stored.data() + place);
        }
    });
    model.weights_changed();
}

void lora::gradient(const std::vector<float>& of_weights, std::vector<float>& of_values,
                    opd::thread_team& threads) const {
    const auto scale = static_cast<float>(alpha_ / rank_);
    of_values.assign(values.size(), 0.0f);
    threads.run(std::ssize(layers_), [&](index_t n, int) {
        const layer& l = layers_[static_cast<std::size_t>(n)];
        const index_t in = l.a.columns;
        for (index_t row = 0; row < l.part.place.rows; ++row) {
            const float* const d = of_weights.data() + l.part.place.offset + row * in;
            const float* const b = values.data() + l.b.offset + row * rank_;
            float* const db = of_values.data() + l.b.offset + row * rank_;
            for (int k = 0; k < rank_; ++k) {
                db[k] = scale * dot(d, values.data() + l.a.offset + k * in, in);
                add_times(scale * b[k], d, in, of_values.data() + l.a.offset + k * in);
            }
        }
    });
}

double lora::step(const adamw& o, double rate, const std::vector<float>& of_weights, adamw_state& state,
                  transformer<float>& model, opd::thread_team& threads) {
    gradient(of_weights, gradient_, threads);
    const weight_range all{0, std::ssize(values)};
    const double norm = adamw_step(o, rate, gradient_, state, values, {&all, 1});
    if (std::isfinite(norm)) merge(model, threads);
    return norm;
}

adapter_files lora::files(const std::string& base) const {
    adapter_files r;
    std::set<std::string> modules;
    for (const layer& l : layers_) {
        modules.insert(l.part.module.substr(l.part.module.rfind('.') + 1));
        r.tensors.emplace_back("base_model.model." + l.part.module + ".lora_A.weight", l.a);
        r.tensors.emplace_back("base_model.model." + l.part.module + ".lora_B.weight", l.b);
    }
    nlohmann::ordered_json j = {{"peft_type", "LORA"},
                                {"task_type", "CAUSAL_LM"},
                                {"base_model_name_or_path", base},
                                {"r", rank_},
                                {"lora_alpha", alpha_},
                                {"lora_dropout", 0.0},
                                {"target_modules", modules},
                                {"bias", "none"},
                                {"fan_in_fan_out", false},
                                {"use_rslora", false},
                                {"use_dora", false},
                                {"inference_mode", true}};
    if (alpha_ == std::floor(alpha_) && alpha_ < 1e9) j["lora_alpha"] = static_cast<std::int64_t>(alpha_);
    r.config = j.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    r.values = values;
    return r;
}

std::int64_t lora::bytes(const model_shape& shape, int rank, bool base_is_bfloat16) {
    std::int64_t base = 0, values = 0;
    for (const linear_part& p : linear_parts(shape)) base += p.place.size(), values += values_of(p.place, rank);
    return base * (base_is_bfloat16 ? 2 : 4) + 4 * values * static_cast<std::int64_t>(sizeof(float));
}

} // namespace trainer::hf
