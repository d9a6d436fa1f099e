// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Keyed noise: random numbers that are a pure function of what they are for, so that a token is a pure function of its
// logits and does not depend on the batch, the slot, the thread, a restart or a speculative draft around it.
//
//   bits(seed, stream, sample, position, draw, token) -> 32 random bits k
//   w = (k + 1/2) 2^-32                                in (0, 1)
//   E = -log(1 - min(w, 1 - 2^-24))                    standard exponential, relative accuracy kept in the tail E -> 0
//   token = argmax over the filtered support of log p - log E, ties to the lower id        (Gumbel-max)
//
// Scores are double, their logarithms one fixed sequence of operations: a near-tie falls the same way on every
// instruction set, compiler and device.
//
// The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
// applied twice: once per (seed, stream, sample, position), whose 128 output bits key the second application, once per
// four tokens of a draw. Host and device give the same bits.
//
// `sample` is unique in a run (prompt, epoch, group member) and never a batch slot. Draw 0 of stream `rollout` is the
// token that rollout takes, and column 0 of an i.i.d. sample.
//
// Exact: the bits. Approximate: w has 32 bits, so a tail token of probability below 2^-33 is never drawn (with 24-bit
// uniforms a tail of 150,000 tokens and total mass 1e-3 would already be drawn 3 to 60 times too rarely).
#pragma once

#include <cstdint>

#include "opd/config.hpp"
#include "opd/products/fixed_log.hpp"

namespace opd {

/// What a random number is for. Two uses of one (sample, position) with different streams are independent.
enum class noise_stream : std::uint32_t {
    rollout = 0,  ///< the behaviour policy's own token
    mc = 1,       ///< further i.i.d. draws of a Monte-Carlo cache
    tail = 2,     ///< tail draws of head + tail and threshold designs
    draft = 3,    ///< a drafter that does not read the target's noise
    coin = 4,     ///< acceptance coins of speculative verification
    residual = 5, ///< draws from a residual distribution
    bonus = 6     ///< the token after a fully accepted draft
};

/// Four 32-bit words.
struct philox_block {
    std::uint32_t word[4];
};

/// One block of Philox4x32-10: ten rounds on `counter` under the 64-bit key (key0, key1).
OPD_HD inline philox_block philox4x32(philox_block counter, std::uint32_t key0, std::uint32_t key1) {
    std::uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
        const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<std::uint32_t>(p1);
        c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<std::uint32_t>(p0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

/// All noise of one (seed, stream, sample, position): build it once per row, then ask for (draw, token).
struct noise_row {
    philox_block root; // key of the second application: two words key, two words counter

    OPD_HD noise_row(std::uint64_t seed, noise_stream stream, std::uint64_t sample, std::uint32_t position)
        : root(philox4x32({{static_cast<std::uint32_t>(sample), static_cast<std::uint32_t>(sample >> 32), position,
                            static_cast<std::uint32_t>(stream)}},
                          static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32))) {}

    /// The random bits of tokens 4·group ... 4·group + 3.
    OPD_HD philox_block block(std::uint32_t draw, std::uint32_t group) const {
        return philox4x32({{draw, group, root.word[2], root.word[3]}}, root.word[0], root.word[1]);
    }
    OPD_HD std::uint32_t bits(std::uint32_t draw, std::uint32_t token) const {
        return block(draw, token / 4).word[token % 4];
    }
};

/// w = (k + 1/2) 2^-32: exact in double, never 0 or 1.
OPD_HD inline double uniform_of_bits(std::uint32_t k) { return (static_cast<double>(k) + 0.5) * 0x1p-32; }

/// Standard exponential from 32 bits, strictly positive. 1 - w is exact, so the relative accuracy stays as w -> 0.
OPD_HD inline double exponential_of_bits(std::uint32_t k) {
    const double w = uniform_of_bits(k);
    return -detail::fixed_log(1 - (w < 1 - 0x1p-24 ? w : 1 - 0x1p-24));
}

/// log p - log E: the token of largest score is a draw from p. The same bits on every backend.
OPD_HD inline double gumbel_score(double log_p, std::uint32_t k) {
    return detail::plus(log_p, -detail::fixed_log(exponential_of_bits(k)));
}

/// The largest value that -log E can take: E >= 2^-33.
inline constexpr double gumbel_maximum = 22.875;

/// The uniform of one (row, draw): inverse-CDF draws and systematic sampling, token 0 of the draw.
OPD_HD inline double keyed_uniform(const noise_row& noise, std::uint32_t draw) {
    return uniform_of_bits(noise.bits(draw, 0));
}

/// Gumbel-max: argmax over v of log p[v] - log E[v], ties to the lower id; entries of -infinity are outside the
/// filtered support and never win. A common constant in log p does not matter. Returns -1 if no entry is finite.
///
/// The most probable token is looked at first; an entry whose best possible score lies below the best so far cannot win
/// and costs no logarithm: the result is that of the exhaustive maximum.
OPD_HD inline index_t gumbel_max(const noise_row& noise, std::uint32_t draw, const float* logp, // (V)
                                 index_t v_count) {
    index_t top = -1;
    for (index_t v = 0; v < v_count; ++v)
        if (logp[v] > -3.0e38f && (top < 0 || logp[v] > logp[top])) top = v;
    if (top < 0) return -1;
    index_t winner = top;
    double best = gumbel_score(double(logp[top]), noise.bits(draw, static_cast<std::uint32_t>(top)));
    std::uint32_t have = 0xffffffffu; // the group held in `group_bits`
    philox_block group_bits{};
    for (index_t v = 0; v < v_count; ++v) {
        if (v == top || !(logp[v] > -3.0e38f) || double(logp[v]) + gumbel_maximum < best) continue;
        const std::uint32_t id = static_cast<std::uint32_t>(v);
        if (have != id / 4) {
            have = id / 4;
            group_bits = noise.block(draw, have);
        }
        const double score = gumbel_score(double(logp[v]), group_bits.word[id % 4]);
        if (score > best || (score == best && v < winner)) {
            best = score;
            winner = v;
        }
    }
    return winner;
}

} // namespace opd
