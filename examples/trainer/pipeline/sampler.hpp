// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From rows of logits to tokens, their log-probabilities and what the draw plan records beside them.
//
// Drawn by the library (opd/draw.hpp) with keyed noise: what is drawn is a function of (logits, seed, sample,
// position), whatever rows are drawn together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model/injection.hpp"
#include "opd/backends/cpu.hpp"
#include "speculation/speculation.hpp"
#include "task/trajectory.hpp"

namespace trainer {

using opd::index_t;

struct sampling {
    bool greedy = false; ///< the most probable token, ties to the lower id
    double temperature = 1;
    int top_k = 0;          ///< 0: all. What a filter leaves is drawn from, and log mu is of it
    double top_p = 1;       ///< 1: all
    double min_p = 0;       ///< 0: all
    bool keep_sets = false; ///< the ids that the filter leaves are recorded
    bool keep_tops = false; ///< the most probable id is recorded
    std::uint64_t seed = 0;
    token end = 0;
    std::vector<token> more_ends = {}; ///< ids that end a response as `end` does
    int max_response = 0;
    int slots = 32;        ///< sequences decoded together, all threads
    int prefill_chunk = 8; ///< prompt tokens a decoding step takes
    int kv_tokens = 0;     ///< keys and values that an engine has memory for, over all sequences; 0: all of each
    draw_plan plan = {};
    speculation_options speculate = {}; ///< changes nothing but the time
    injection inject = {};              ///< of the model and its logits, which engine and sampler are given exact

    bool ends(token id) const {
        return id == end || std::find(more_ends.begin(), more_ends.end(), id) != more_ends.end();
    }
    opd::filter filter() const {
        return {.temperature = static_cast<float>(temperature * inject.temperature),
                .top_k = top_k,
                .top_p = static_cast<float>(top_p),
                .min_p = static_cast<float>(min_p)};
    }
};

class sampler {
public:
    sampler(const sampling& options, index_t vocabulary);

    void clear();

    /// The next token of t is to be drawn from the logits z (V).
    void add(trajectory& t, const float* z);

    /// Appends a token to every trajectory that was added. Logits that are not finite are a failure of kind
    /// exit_numeric.
    void draw(std::int32_t version);

private:
    sampling o_;
    index_t v_, width_;
    opd::cpu_backend backend_{.threads = 1};
    std::vector<trajectory*> rows_;        // (n)
    std::vector<std::uint64_t> samples_;   // (n)
    std::vector<std::uint32_t> positions_; // (n)
    std::vector<float> z_;                 // (n,V)
    std::vector<token> ids_;               // (n,width) the token, then the plan's entries
    std::vector<float> log_mu_;            // (n,width)
    std::vector<float> weight_;            // (n,width)
    std::vector<std::uint8_t> exact_;      // (n,width)
    std::vector<opd::filter_cut> cut_;     // (n)
    std::vector<index_t> kept_;            // (n)
    std::vector<std::int64_t> kept_first_; // (n+1)
    std::vector<std::int32_t> kept_ids_;   // (total)
};

} // namespace trainer
