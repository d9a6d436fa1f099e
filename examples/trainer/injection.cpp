// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "injection.hpp"

#include <cmath>
#include <sstream>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "config.hpp"
#include "nearest.hpp"
#include "numbers.hpp"
#include "opd/element.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace {

constexpr auto noise_of_logits =
    static_cast<opd::noise_stream>(900); // beyond those of sampling, before those of faults

float rounded(float x) { return static_cast<float>(opd::bfloat16(x)); }

} // namespace

injection injection_of(const config& c) {
    injection out;
    const auto refuse = [](const std::string& why) { throw failure(exit_usage, "--inject-mismatch " + why); };
    std::istringstream parts(c.distill.inject_mismatch);
    for (std::string part; std::getline(parts, part, ',');) {
        const std::size_t equals = part.find('=');
        const std::string name = part.substr(0, equals);
        constexpr double none = -1; // lies in none of the intervals
        const double value = equals == std::string::npos ? none : number_of(part.substr(equals + 1)).value_or(none);
        const auto takes = [&](bool ok, const char* what) {
            if (!ok) refuse(fmt::format("takes {}, not '{}'", what, part));
        };
        if (name == "bf16" || name == "filter") {
            takes(equals == std::string::npos, "bf16 and filter without a number");
            (name == "bf16" ? out.bf16 : out.filter) = true;
        } else if (name == "split") {
            takes(value >= 1 && value <= 64 && value == std::floor(value), "split=n, n an integer from 1 to 64");
            out.split = static_cast<int>(value);
        } else if (name == "temperature") {
            takes(value >= 0.1 && value <= 10, "temperature=f, f in [0.1, 10]");
            out.temperature = value;
        } else if (name == "noise") {
            takes(value >= 0 && value <= 10, "noise=s, s in [0, 10]");
            out.noise = value;
        } else {
            const std::string near = nearest(name, {"bf16", "split", "temperature", "noise", "filter"});
            refuse(fmt::format("names bf16, split, temperature, noise and filter, not '{}'{}", name,
                               near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
        }
    }
    if (out.filter && !filters_rollout(c))
        refuse("filter: rollout has none to keep quiet about; needs --rollout-top-k, --rollout-top-p or "
               "--rollout-min-p");
    return out;
}

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
