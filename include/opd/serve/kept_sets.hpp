// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a rollout server kept of each row under top-k, top-p or min-p: its answer as teacher::on_kept_sets has it.
//
//   vLLM    /inference/v1/generate, --return-sampling-mask:  choices[].token_ids, choices[].sampling_mask: a list of
//           ids for each token; as offsets too, {token_ids, offsets}, which is how vLLM holds it within the engine
//   SGLang  /generate, return_sampling_mask:  output_ids, meta_info.output_token_sampling_mask, and of each drawn token
//           the log-prob normalised over its set, output_token_sampling_logprobs
//
// Ids come in any order and leave ascending. A drawn token outside its set, an empty set or an id twice is refused.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/serve/answers.hpp"
#include "opd/view.hpp"

namespace opd::serve {

/// One answer's drawn tokens (N) and what the filter kept where each was drawn.
struct kept_sets {
    std::vector<std::int32_t> tokens;        ///< (N)
    std::vector<std::int32_t> ids;           ///< (total) ascending in each row
    std::vector<std::int64_t> offsets = {0}; ///< (N+1)
    std::vector<float> log_mu = {};          ///< (N) of the tokens, over their sets; empty where the server gives none

    vector_view<const std::int32_t> kept_ids() const { return view(ids.data(), ids.size()); }
    row_offsets<> kept_offsets() const { return row_offsets<>(offsets); }
};

namespace detail {

inline kept_sets read_kept(const json& tokens, const json& masks, answer_reader at) {
    if (!tokens.is_array()) at.fail("has no array of drawn tokens");
    kept_sets k;
    std::vector<std::int32_t> flat;
    const bool by_offsets = masks.is_object();
    if (by_offsets) {
        at.check_size(at.array(masks, "offsets"), "offsets", tokens.size() + 1);
        for (const json& id : at.array(masks, "token_ids")) flat.push_back(at.id(id));
    } else if (!masks.is_array()) {
        at.fail("has a sampling mask that is neither lists nor offsets");
    } else {
        at.check_size(masks, "sampling mask", tokens.size());
    }
    std::size_t begin = 0;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
        at.position = static_cast<index_t>(r);
        const std::size_t first = k.ids.size();
        if (by_offsets) {
            const json& offsets = masks["offsets"];
            const auto from = static_cast<std::size_t>(at.id(offsets[r])), to = std::size_t(at.id(offsets[r + 1]));
            if (from != begin || to < from || to > flat.size())
                at.fail("has offsets that do not ascend within the ids");
            k.ids.insert(k.ids.end(), flat.begin() + std::ptrdiff_t(from), flat.begin() + std::ptrdiff_t(to));
            begin = to;
        } else {
            if (!masks[r].is_array()) at.fail("has a sampling mask that is no list");
            for (const json& id : masks[r]) k.ids.push_back(at.id(id));
        }
        const auto row = k.ids.begin() + std::ptrdiff_t(first);
        std::sort(row, k.ids.end());
        if (std::adjacent_find(row, k.ids.end()) != k.ids.end()) at.fail("keeps an id twice");
        k.tokens.push_back(at.id(tokens[r]));
        if (!std::binary_search(row, k.ids.end(), k.tokens.back()))
            at.fail("drew the token " + std::to_string(k.tokens.back()) + ", which it did not keep");
        k.offsets.push_back(static_cast<std::int64_t>(k.ids.size()));
    }
    at.position = -1;
    if (by_offsets && begin != flat.size()) at.fail("has offsets that leave ids out");
    return k;
}

} // namespace detail

/// The kept sets of a rollout's answer, one entry a choice (vLLM) or a sequence (SGLang). Throws bad_answer, with the
/// choice as its sequence and the drawn token as its position; unsupported for other servers, which send none.
inline std::vector<kept_sets> decode_kept_sets(dialect d, std::string_view body) {
    using detail::json;
    if (d != dialect::vllm && d != dialect::sglang)
        throw unsupported(std::string("opd: a server of the form ") + to_string(d) + " sends no kept sets");
    detail::answer_reader at{d};
    const json all = at.parse(body);
    at.check_error(all);
    std::vector<kept_sets> r;
    if (d == dialect::vllm) {
        for (const json& c : at.array(all, "choices")) {
            at.sequence = static_cast<index_t>(r.size());
            r.push_back(detail::read_kept(at.member(c, "token_ids"), at.member(c, "sampling_mask"), at));
        }
        return r;
    }
    const auto one = [&](const json& answer) {
        at.sequence = static_cast<index_t>(r.size());
        const json& meta = at.member(answer, "meta_info");
        kept_sets k =
            detail::read_kept(at.member(answer, "output_ids"), at.member(meta, "output_token_sampling_mask"), at);
        const auto log_mu = meta.find("output_token_sampling_logprobs");
        if (log_mu != meta.end() && log_mu->is_array()) {
            at.check_size(*log_mu, "output_token_sampling_logprobs", k.tokens.size());
            const bool of_sets = !log_mu->empty() && log_mu->front().is_array(); // of every kept id: not ours to order
            for (std::size_t i = 0; i < log_mu->size() && !of_sets; ++i) k.log_mu.push_back(at.log_prob((*log_mu)[i]));
        }
        r.push_back(std::move(k));
    };
    if (all.is_array())
        for (const json& answer : all) one(answer);
    else
        one(all);
    return r;
}

} // namespace opd::serve
