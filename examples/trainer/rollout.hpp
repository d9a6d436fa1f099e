// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rollout: prompts in, trajectories out, by continuous batching over a cache of keys and values.
//
// A token is a pure function of (weights, seed, sample, position): its logits do not depend on the batch (model.hpp) and
// its noise is keyed (opd/rng.hpp). So slots, chunks, threads and the order of prompts change nothing; every thread
// decodes its own slots and takes the next prompt when one is free.
//
// A trajectory carries, per response token, log mu of the behaviour policy and the policy's version, and what else the
// learner's estimator wants recorded of mu: i.i.d. draws, a threshold(B) design, or the policy's own top k.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model.hpp"
#include "opd/threads.hpp"
#include "tokenizer.hpp"

namespace trainer {

/// What is recorded of the behaviour policy at every response position, beside its token.
struct draw_plan {
    enum class kind {
        none,
        iid,       ///< m draws from mu; draw 0 is the rollout's token   MC-m
        threshold, ///< B entries, those with B·mu >= 1 exact, the rest systematic   threshold(B)
        top_k      ///< the k most probable ids, ties to the lower id
    } what = kind::none;
    int count = 0; ///< entries a position: m, B or k
};

struct request {
    std::uint64_t sample = 0; ///< unique in the run
    std::vector<token> prompt;
};

struct trajectory {
    std::uint64_t sample = 0;
    std::vector<token> tokens; ///< prompt, then response
    std::size_t prompt_length = 0;
    bool ended = false;                   ///< the end token came before the length limit
    std::vector<float> log_mu;            ///< (response) of the tokens, at the sampling temperature
    std::vector<std::int32_t> versions;   ///< (response) of the policy that drew them
    std::vector<std::int32_t> draw_ids;   ///< (response, count); -1: unused slot
    std::vector<float> draw_log_mu;       ///< (response, count)
    std::vector<float> draw_weight;       ///< (response, count) of a threshold design: mu / inclusion
    std::vector<std::uint8_t> draw_exact; ///< (response, count) included with certainty

    std::span<const token> response() const { return std::span(tokens).subspan(prompt_length); }
};

struct sampling {
    bool greedy = false; ///< the most probable token, ties to the lower id
    double temperature = 1;
    std::uint64_t seed = 0;
    std::int32_t version = 0; ///< of the weights
    token end = 0;
    int max_response = 0;
    int slots = 32;        ///< sequences decoded together, all threads
    int prefill_chunk = 8; ///< prompt tokens a decoding step takes
    draw_plan plan = {};
};

/// One trajectory per request, in their order. A policy whose logits are not finite is a failure of kind exit_numeric.
std::vector<trajectory> roll_out(const transformer<float>& model, opd::thread_team& threads,
                                 std::span<const request> requests, const sampling& options);

} // namespace trainer
