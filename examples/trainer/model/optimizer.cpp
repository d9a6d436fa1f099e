// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "model/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "model/row_kernels.hpp"

namespace trainer {

double adamw_step(const adamw& o, double rate, const std::vector<float>& gradient, adamw_state& state,
                  std::vector<float>& weights, std::span<const weight_range> ranges) {
    const std::size_t n = weights.size();
    state.m.resize(n);
    state.v.resize(n);
    // in blocks folded into double: the norm of many small gradients keeps its digits
    double square = 0;
    for (std::size_t i = 0; i < n; i += 1024) {
        const auto count = static_cast<index_t>(std::min<std::size_t>(1024, n - i));
        square += dot(gradient.data() + i, gradient.data() + i, count);
    }
    const double norm = std::sqrt(square);
    if (!std::isfinite(norm)) return norm;
    ++state.step;
    const auto shrink = static_cast<float>(o.clip > 0 && norm > o.clip ? o.clip / norm : 1.0);
    const auto b1 = static_cast<float>(o.beta1), b2 = static_cast<float>(o.beta2);
    const auto correct1 = static_cast<float>(1 / (1 - std::pow(o.beta1, static_cast<double>(state.step))));
    const auto correct2 = static_cast<float>(1 / (1 - std::pow(o.beta2, static_cast<double>(state.step))));
    const auto epsilon = static_cast<float>(o.epsilon), step = static_cast<float>(rate);
    for (const weight_range& r : ranges) {
        const auto decay = static_cast<float>(r.decays ? o.decay : 0);
        float* w = weights.data() + r.offset;
        float* m = state.m.data() + r.offset;
        float* v = state.v.data() + r.offset;
        const float* g = gradient.data() + r.offset;
        for (index_t i = 0; i < r.size; ++i) {
            const float gi = g[i] * shrink;
            m[i] = b1 * m[i] + (1 - b1) * gi;
            v[i] = b2 * v[i] + (1 - b2) * gi * gi;
            w[i] -= step * (m[i] * correct1 / (std::sqrt(v[i] * correct2) + epsilon) + decay * w[i]);
        }
    }
    return norm;
}

double adamw_step(const adamw& o, double rate, std::vector<float>& gradient, adamw_state& state,
                  transformer<float>& model) {
    std::vector<weight_range> ranges;
    const auto add = [&](const tensor& t) { ranges.push_back({t.offset, t.size(), t.columns > 1}); };
    add(model.layout.embedding);
    for (const auto& l : model.layout.layers)
        for (const tensor* t : l.all()) add(*t);
    add(model.layout.norm_f);
    if (!model.shape.tied) add(model.layout.head);
    const double norm = adamw_step(o, rate, gradient, state, model.weights, ranges);
    if (std::isfinite(norm)) model.weights_changed();
    return norm;
}

namespace {

// From 1 to 0 as `step` goes from 0 to `steps`.
double half_cosine(std::int64_t step, std::int64_t steps) {
    const double done = static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, steps));
    return 0.5 * (1 + std::cos(3.14159265358979324 * std::min(1.0, done)));
}

} // namespace

double cosine_rate(double rate, double floor, std::int64_t warmup, std::int64_t step, std::int64_t steps) {
    if (step < warmup) return rate * static_cast<double>(step + 1) / static_cast<double>(warmup);
    return rate * (floor + (1 - floor) * half_cosine(step - warmup, steps - warmup));
}

double planned_rate(const rate_change& from, double rate, double floor, std::int64_t warmup, std::int64_t step,
                    std::int64_t steps) {
    if (from.step < 0) return cosine_rate(rate, floor, warmup, step, steps);
    return rate * floor + (from.rate - rate * floor) * half_cosine(step - from.step, steps - from.step);
}

} // namespace trainer
