// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "model/injection.hpp"

#include <cmath>
#include <utility>

#include "opd/element.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace {

constexpr auto noise_of_logits =
    static_cast<opd::noise_stream>(900); // beyond those of sampling, before those of faults

float rounded(float x) { return static_cast<float>(opd::bfloat16(x)); }

} // namespace

std::shared_ptr<const transformer<float>> injected(const injection& what,
                                                   std::shared_ptr<const transformer<float>> model) {
    if (!what.changes_model()) return model;
    auto changed = std::make_shared<transformer<float>>(*model);
    changed->split = what.split;
    if (what.bf16) {
        for (float& w : changed->weights) w = rounded(w);
        changed->weights_changed();
    }
    return changed;
}

void inject(const injection& what, std::uint64_t seed, std::uint64_t sample, std::uint32_t position,
            std::span<float> z) {
    if (what.noise > 0) {
        const opd::noise_row noise(seed, noise_of_logits, sample, position);
        opd::philox_block four{};
        for (std::size_t i = 0; i < z.size(); ++i) {
            if (i % 4 == 0) four = noise.block(0, static_cast<std::uint32_t>(i / 4));
            const double u = opd::uniform_of_bits(four.word[i % 4]);
            z[i] += static_cast<float>(what.noise * (2 * u - 1) / std::sqrt(2 * u * (1 - u))); // its quantile at u
        }
    }
    if (what.bf16)
        for (float& x : z) x = rounded(x);
}

} // namespace trainer
