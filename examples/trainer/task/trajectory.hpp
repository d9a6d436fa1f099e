// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What rollout produces: a prompt's response and, per response token, log mu of the behaviour policy, the version of
// the weights that drew it, and what else the learner's estimator wants recorded of mu.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "opd/error.hpp"
#include "task/tokenizer.hpp"

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

/// A response, finished or not yet: every per-token field has as many entries as tokens were drawn.
struct trajectory {
    std::uint64_t sample = 0;
    std::vector<token> tokens; ///< prompt, then response
    std::size_t prompt_length = 0;
    bool ended = false;                    ///< the end token came before the length limit
    std::vector<float> log_mu;             ///< (response) of the tokens, at the sampling temperature
    std::vector<std::int32_t> versions;    ///< (response) of the policy that drew them
    std::vector<std::int32_t> draw_ids;    ///< (response, count); -1: unused slot
    std::vector<float> draw_log_mu;        ///< (response, count)
    std::vector<float> draw_weight;        ///< (response, count) of a threshold design: mu / inclusion
    std::vector<std::uint8_t> draw_exact;  ///< (response, count) included with certainty
    std::vector<std::int32_t> kept_counts; ///< (response) ids that rollout's filter left, or none
    std::vector<std::int32_t> kept_ids;    ///< (their sum) ascending within a token
    std::vector<std::int32_t> top_ids;     ///< (response) rollout's most probable id at each token, or none

    std::span<const token> response() const { return std::span(tokens).subspan(prompt_length); }
    bool operator==(const trajectory&) const = default;
    template <class A>
    void fields(A& a) {
        // kept sets and top ids are written where there are some: a byte says so that else says only whether it ended
        auto marks = static_cast<std::uint8_t>(ended + 2 * !kept_counts.empty() + 4 * !top_ids.empty());
        a(sample, tokens, prompt_length, marks, log_mu, versions, draw_ids, draw_log_mu, draw_weight, draw_exact);
        if constexpr (A::reading) {
            if (marks > 7) throw opd::invalid_input("snapshot", "is damaged: a value is none of its kind");
            ended = (marks & 1) != 0;
        }
        if ((marks & 2) != 0) a(kept_counts, kept_ids);
        if ((marks & 4) != 0) a(top_ids);
    }
};

/// The empty response to a prompt.
inline trajectory begin_response(const request& r) {
    trajectory t;
    t.sample = r.sample;
    t.tokens = r.prompt;
    t.prompt_length = t.tokens.size();
    return t;
}

} // namespace trainer
