// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is asked of a server of vLLM's, SGLang's or llama.cpp's form, and what its answer says: pure functions, no I/O.
//
//   const serve::request r = serve::request_of(serve::dialect::vllm, sequences, {.top_k = 20});   // path and JSON body
//   std::vector<serve::answer> a = serve::decode(serve::dialect::vllm, body, sequences, {.top_k = 20});
//   a[i].scores.log_q[t]   log q of token from + t, given all before it, whatever the server's own convention is
//
// Conventions, as the servers have them (docs/serve.md); all are undone here:
//   vLLM     one entry a token of the prompt, null for the first; -9999 for -inf; k or k + 1 ids, the token's own among
//            them, which is dropped where it is not one of the k best. /inference/v1/generate: row i is of token
//            prompt_logprob_start + 1 + i
//   SGLang   entries from logprob_start_len on, the first always null, so the start asked for is one before `from`.
//            Candidates: one list for all positions of a sequence, so the union is asked for and each row taken out
//   llama.cpp  only what it generates is scored: the answer is forced by a grammar of token ids, n_probs gives the
//            lists. Tokens within a character are left out, and marked. Without that grammar, or with speculation
//            (log-prob 0 for every token), the answer is refused
//   echo     one entry a token, null for the first; texts in place of ids, so nothing but the count shows a shift
//
// Ids that come with log-probs are held against the tokens that were sent. What a server leaves out is marked: NaN in
// log_q with scored = 0, id -1 in a list. An answer that cannot be right is refused for that sequence, the others
// stand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/serve/answers.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::serve {

/// What is to be scored: tokens from, from + 1, … of (L) ids, T = L - from of them.
struct sequence {
    std::vector<std::int32_t> tokens; ///< (L) prompt and answer, as ids: servers are sent no text
    index_t from = 1; ///< the first token that is scored. Token 0 has no prefix and comes back as missing
    std::vector<std::int32_t> candidates = {};         ///< ids to be scored at each position, distinct; -1: unused slot
    std::vector<std::int64_t> candidate_offsets = {0}; ///< (T+1) of token from + t: [offsets[t], offsets[t+1])

    index_t scored() const { return static_cast<index_t>(tokens.size()) - from; }
};

/// What is wanted beside the tokens' own log-probs: the k best ids at each position, or the sequences' candidates.
struct wanted {
    index_t top_k = 0;
    bool candidates = false;
    index_t vocab = 0;      ///< the server's; ids at or beyond it are refused. 0: unknown
    std::string model = {}; ///< member `model` of the request; empty: left out
};

/// A request, to be posted as application/json.
struct request {
    std::string path, body;
};

/// What a server said of one sequence.
struct scores {
    index_t from = 0;
    std::vector<float> log_q;         ///< (T) of token from + t. NaN: not scored; -inf: no mass
    std::vector<std::uint8_t> scored; ///< (T) 0: not scored
    std::vector<std::int32_t> ids;    ///< (total) lists, best first, or candidates as they were given; -1: not scored
    std::vector<float> list_log_q;    ///< (total)
    std::vector<std::int64_t> offsets = {0}; ///< (T+1)

    index_t missing() const { return static_cast<index_t>(std::count(scored.begin(), scored.end(), 0)); }
    vector_view<const float> log_probs() const { return view(log_q.data(), log_q.size()); }
    /// Which tokens count; a token that is not scored has no list either.
    row_mask<> mask() const { return row_mask<>(scored); }
    /// The lists as a cache, for `tail_bucket`, `renormalised`, `generalised`. Refers to this.
    teacher::ragged_support<std::int32_t> support() const {
        return {view(ids.data(), ids.size()), view(list_log_q.data(), list_log_q.size()), row_offsets<>(offsets)};
    }
};

/// Scores, or why there are none.
struct answer {
    serve::scores scores;
    std::optional<bad_answer> wrong = {};
};

/// The most sequences that a request can have; 0: any number.
inline index_t most_per_request(dialect d, const wanted& what) {
    return d == dialect::llama_cpp || (d == dialect::vllm && what.candidates) ? 1 : 0;
}

namespace detail {

inline void check_wanted(dialect d, const wanted& what) {
    if (what.top_k < 0 || what.top_k > 1 << 20) throw invalid_input("wanted.top_k", "must lie in [0, 1048576]");
    if (what.vocab < 0) throw invalid_input("wanted.vocab", "is negative");
    if (what.candidates && what.top_k > 0)
        throw invalid_input("wanted", "has both top_k and candidates: there is one list a position");
    if (what.candidates && (d == dialect::llama_cpp || d == dialect::openai_echo))
        throw unsupported(std::string("opd: a server of the form ") + to_string(d) + " scores no candidates");
}
inline void check_sequence(const sequence& s, const wanted& what, index_t row) {
    const auto bad_id = [&](std::int32_t id) { return id < 0 || (what.vocab > 0 && id >= what.vocab); };
    if (s.tokens.empty()) throw invalid_input("tokens", "is empty", row);
    if (s.from < 0 || s.scored() < 0)
        throw invalid_input("from",
                            "is " + std::to_string(s.from) + " of " + std::to_string(s.tokens.size()) + " tokens", row);
    for (const std::int32_t id : s.tokens)
        if (bad_id(id)) throw invalid_input("tokens", "has the id " + std::to_string(id), row);
    if (!what.candidates) return;
    const auto& offsets = s.candidate_offsets;
    if (static_cast<index_t>(offsets.size()) != s.scored() + 1 || offsets.front() != 0 ||
        offsets.back() != static_cast<std::int64_t>(s.candidates.size()) ||
        !std::is_sorted(offsets.begin(), offsets.end()))
        throw invalid_input("candidate_offsets",
                            "must ascend from 0 to the number of candidates, one more than scored tokens", row);
    std::vector<std::int32_t> sorted;
    for (std::size_t t = 0; t + 1 < offsets.size(); ++t) {
        sorted.assign(s.candidates.begin() + offsets[t], s.candidates.begin() + offsets[t + 1]);
        std::sort(sorted.begin(), sorted.end());
        sorted.erase(sorted.begin(), std::find_if(sorted.begin(), sorted.end(), [](auto id) { return id != -1; }));
        for (std::size_t i = 0; i < sorted.size(); ++i)
            if (bad_id(sorted[i]) || (i > 0 && sorted[i] == sorted[i - 1]))
                throw invalid_input("candidates", "has the id " + std::to_string(sorted[i]) + ", or has it twice", row);
    }
}
inline void check_call(dialect d, std::span<const sequence> sequences, const wanted& what) {
    check_wanted(d, what);
    if (const index_t most = most_per_request(d, what); most > 0 && static_cast<index_t>(sequences.size()) > most)
        throw invalid_input("sequences", "are " + std::to_string(sequences.size()) + "; a request to " + to_string(d) +
                                             " takes " + std::to_string(most));
    for (std::size_t i = 0; i < sequences.size(); ++i) check_sequence(sequences[i], what, static_cast<index_t>(i));
}

/// The ids that one position of a sequence asks for: its candidates and the token itself.
inline std::vector<std::int32_t> asked_at(const sequence& s, index_t t) {
    const auto begin = s.candidates.begin();
    std::vector<std::int32_t> ids;
    std::copy_if(begin + s.candidate_offsets[std::size_t(t)], begin + s.candidate_offsets[std::size_t(t) + 1],
                 std::back_inserter(ids), [](auto id) { return id >= 0; });
    if (const auto own = s.tokens[std::size_t(s.from + t)]; std::find(ids.begin(), ids.end(), own) == ids.end())
        ids.push_back(own);
    return ids;
}
/// The first token that a server can score: one with a prefix.
inline index_t first_scored(const sequence& s) { return std::max<index_t>(s.from, 1); }

inline json generate_of(const sequence& s) { // vLLM's tokens in, tokens out
    json rows = json::array();
    for (index_t p = first_scored(s); p < static_cast<index_t>(s.tokens.size()); ++p)
        rows.push_back(asked_at(s, p - s.from));
    return {{"token_ids", s.tokens},
            {"sampling_params",
             {{"max_tokens", 1},
              {"temperature", 1.0},
              {"prompt_logprob_start", first_scored(s) - 1},
              {"prompt_logprob_token_ids", std::move(rows)}}},
            {"stream", false}};
}
inline json forced_of(const sequence& s, index_t k) { // llama-server
    const auto first = s.tokens.begin() + std::min<index_t>(first_scored(s), static_cast<index_t>(s.tokens.size()));
    std::string grammar = "root ::=";
    for (auto i = first; i != s.tokens.end(); ++i) grammar.append(" <[").append(std::to_string(*i)).append("]>");
    return {{"prompt", std::vector<std::int32_t>(s.tokens.begin(), first)},
            {"n_predict", s.tokens.end() - first},
            {"grammar", std::move(grammar)},
            {"n_probs", std::max<index_t>(k, 1)},
            {"post_sampling_probs", false}, // of the logits as they are: no temperature, no filter, no grammar
            {"temperature", 0},
            {"cache_prompt", true},
            {"return_tokens", true},
            {"stream", false}};
}

/// Scores of a sequence, filled position by position.
class score_sheet {
public:
    score_sheet(const sequence& s, const wanted& what, answer_reader& at) : of_(s), what_(what), at_(at) {
        scores_.from = s.from;
        scores_.log_q.reserve(std::size_t(s.scored())), scores_.scored.reserve(std::size_t(s.scored()));
        scores_.offsets.reserve(std::size_t(s.scored()) + 1);
    }
    /// The next position: what is said of its token, NaN: nothing.
    void own(float log_q) {
        scores_.log_q.push_back(log_q);
        scores_.scored.push_back(log_q == log_q ? 1 : 0);
    }
    /// A position's list, in any order: the k best. At most one more may come, the token's own.
    void best(std::vector<std::pair<float, std::int32_t>>& entries, bool own_too) {
        const auto most = static_cast<std::size_t>(what_.top_k);
        if (entries.size() > most + (own_too ? 1 : 0))
            at_.fail("has " + std::to_string(entries.size()) + " ids of the " + std::to_string(most) + " asked for");
        std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
        for (std::size_t i = 1; i < entries.size(); ++i)
            if (entries[i].second == entries[i - 1].second)
                at_.fail("has the id " + std::to_string(entries[i].second) + " twice");
        for (const auto& [log_q, id] : entries) {
            if (log_q != log_q) at_.fail("has no log-prob for the id " + std::to_string(id));
            if (what_.vocab > 0 && id >= what_.vocab) at_.fail("has the id " + std::to_string(id));
        }
        std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        });
        entries.resize(std::min(entries.size(), most));
        for (const auto& [log_q, id] : entries) scores_.ids.push_back(id), scores_.list_log_q.push_back(log_q);
        end_list();
    }
    /// Position t's candidates: log_q_of(id), NaN: nothing.
    template <class F>
    void candidates(index_t t, F&& log_q_of) {
        for (auto i = of_.candidate_offsets[std::size_t(t)]; i < of_.candidate_offsets[std::size_t(t) + 1]; ++i) {
            const std::int32_t id = of_.candidates[std::size_t(i)];
            const float log_q = id < 0 ? no_score : log_q_of(id);
            scores_.ids.push_back(log_q == log_q ? id : -1), scores_.list_log_q.push_back(log_q);
        }
        end_list();
    }
    /// Nothing is known of the next position.
    void nothing() {
        own(no_score);
        if (what_.candidates)
            candidates(static_cast<index_t>(scores_.offsets.size()) - 1, [](std::int32_t) { return no_score; });
        else
            end_list();
    }
    void end_list() { scores_.offsets.push_back(static_cast<std::int64_t>(scores_.ids.size())); }
    serve::scores take() { return std::move(scores_); }

private:
    const sequence& of_;
    const wanted& what_;
    answer_reader& at_;
    serve::scores scores_;
};

inline scores read_vllm(const json& choice, const sequence& s, const wanted& what, answer_reader at) {
    const json& entries = at.array(choice, "prompt_logprobs");
    at.check_size(entries, "prompt_logprobs", s.tokens.size());
    score_sheet sheet(s, what, at);
    std::vector<std::pair<float, std::int32_t>> list;
    for (index_t p = s.from; p < static_cast<index_t>(s.tokens.size()); ++p) {
        at.position = p;
        const json& entry = entries[std::size_t(p)];
        if (entry.is_null()) {
            sheet.nothing();
            continue;
        }
        if (!entry.is_object()) at.fail("has an entry that is no object");
        const std::int32_t token = s.tokens[std::size_t(p)];
        const auto own = entry.find(std::to_string(token));
        if (own == entry.end()) at.fail("does not score its own token " + std::to_string(token) + ": off by one?");
        sheet.own(at.log_prob(at.member(*own, "logprob")));
        list.clear();
        if (what.top_k > 0) {
            for (const auto& [key, value] : entry.items())
                list.emplace_back(at.log_prob(at.member(value, "logprob")), at.id(std::string_view(key)));
            sheet.best(list, true);
        } else {
            sheet.end_list();
        }
    }
    return sheet.take();
}

inline scores read_generate(const json& answer, const sequence& s, const wanted& what, answer_reader at) {
    const char* const name = "prompt_token_id_logprobs";
    const npy_matrix m = read_npy(at, at.member(answer, name), name);
    if (const index_t rows = static_cast<index_t>(s.tokens.size()) - first_scored(s); m.rows != rows)
        at.fail(std::string(name) + " has " + std::to_string(m.rows) + " rows, expected " + std::to_string(rows));
    score_sheet sheet(s, what, at);
    for (index_t p = s.from; p < static_cast<index_t>(s.tokens.size()); ++p) {
        at.position = p;
        if (p < first_scored(s)) {
            sheet.nothing();
            continue;
        }
        const std::vector<std::int32_t> asked = asked_at(s, p - s.from);
        if (m.cols < static_cast<index_t>(asked.size()))
            at.fail(std::string(name) + " has " + std::to_string(m.cols) + " columns, expected " +
                    std::to_string(asked.size()));
        const auto log_q_of = [&](std::int32_t id) {
            const auto column = std::find(asked.begin(), asked.end(), id) - asked.begin();
            return at.log_prob(double{m.at(p - first_scored(s), column)});
        };
        sheet.own(log_q_of(s.tokens[std::size_t(p)]));
        sheet.candidates(p - s.from, log_q_of);
    }
    return sheet.take();
}

inline scores read_sglang(const json& one, const sequence& s, const wanted& what, answer_reader at) {
    at.check_error(one);
    const json& meta = at.member(one, "meta_info");
    if (const auto why = meta.find("finish_reason");
        why != meta.end() && why->is_object() && why->value("type", json()) == "abort")
        at.fail("was aborted: " + why->dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 200));
    const index_t start = first_scored(s) - 1;
    const std::size_t size = s.tokens.size() - static_cast<std::size_t>(start);
    const auto entries_of = [&](const char* name) -> const json& {
        const json& a = at.array(meta, name);
        at.check_size(a, name, size);
        return a;
    };
    const json& own = entries_of("input_token_logprobs");
    const json* const lists = what.top_k > 0    ? &entries_of("input_top_logprobs")
                              : what.candidates ? &entries_of("input_token_ids_logprobs")
                                                : nullptr;
    score_sheet sheet(s, what, at);
    std::vector<std::pair<float, std::int32_t>> list;
    for (index_t p = s.from; p < static_cast<index_t>(s.tokens.size()); ++p) {
        at.position = p;
        const std::int32_t token = s.tokens[std::size_t(p)];
        const auto [log_q, id] = at.pair(own[std::size_t(p - start)]);
        // SGLang writes 0 for the last id of the vocabulary
        if (id != token && !(id == 0 && what.vocab > 0 && token >= what.vocab - 1))
            at.fail("scores the token " + std::to_string(id) + ", sent was " + std::to_string(token));
        list.clear();
        if (lists != nullptr && log_q == log_q) {
            const json& row = (*lists)[std::size_t(p - start)];
            if (!row.is_array()) at.fail("has a list that is no array");
            for (const json& entry : row) list.push_back(at.pair(entry));
        }
        sheet.own(log_q);
        if (what.candidates) {
            std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
            sheet.candidates(p - s.from, [&](std::int32_t wanted_id) {
                const auto found = std::lower_bound(list.begin(), list.end(), wanted_id,
                                                    [](const auto& a, std::int32_t x) { return a.second < x; });
                return found != list.end() && found->second == wanted_id ? found->first : no_score;
            });
        } else {
            sheet.best(list, false);
        }
    }
    return sheet.take();
}

/// Which entry of an answer is of which generated token, -1: none, or it cannot be told. llama-server leaves tokens
/// within a character out, so entries are some of the tokens, in order: an entry is certain where the first and the
/// last way to place them agree.
inline std::vector<index_t> placed(const std::vector<std::int32_t>& drawn, const json& entries,
                                   const answer_reader& at) {
    std::vector<std::size_t> first;
    std::vector<std::int32_t> ids;
    std::size_t place = 0;
    for (const json& entry : entries) {
        ids.push_back(at.id(at.member(entry, "id")));
        while (place < drawn.size() && drawn[place] != ids.back()) ++place;
        if (place == drawn.size())
            at.fail("scores the token " + std::to_string(ids.back()) + ", which was not forced there");
        first.push_back(place++);
    }
    std::vector<index_t> entry_of(drawn.size(), -1);
    place = drawn.size();
    for (std::size_t e = ids.size(); e-- > 0;) {
        while (drawn[--place] != ids[e]) {}
        if (place == first[e]) entry_of[place] = static_cast<index_t>(e);
    }
    return entry_of;
}

inline scores read_llama(const json& one, const sequence& s, const wanted& what, answer_reader at) {
    at.check_error(one);
    if (const auto cut = one.find("truncated"); cut != one.end() && *cut == true)
        at.fail("is of a prompt that the server cut");
    const index_t first = first_scored(s), all = static_cast<index_t>(s.tokens.size());
    std::vector<std::int32_t> drawn(s.tokens.begin() + std::min(first, all), s.tokens.end());
    if (const auto tokens = one.find("tokens"); tokens != one.end() && tokens->is_array() && !tokens->empty()) {
        if (tokens->size() > drawn.size()) at.fail("generated more tokens than were forced");
        for (std::size_t i = 0; i < tokens->size(); ++i) {
            at.position = first + static_cast<index_t>(i);
            if (const std::int32_t id = at.id((*tokens)[i]); id != drawn[i])
                at.fail("generated the token " + std::to_string(id) + " where " + std::to_string(drawn[i]) +
                        " was forced: it knows no grammar of token ids");
        }
        drawn.resize(tokens->size()); // it stops at an end token
    }
    at.position = -1;
    const json& entries = at.array(one, "completion_probabilities");
    const std::vector<index_t> entry_of = placed(drawn, entries, at);
    score_sheet sheet(s, what, at);
    std::vector<std::pair<float, std::int32_t>> list;
    index_t sure = 0;
    bool unsure = false;
    for (index_t p = s.from; p < all; ++p) {
        at.position = p;
        const index_t i = p - first;
        if (i < 0 || i >= static_cast<index_t>(drawn.size()) || entry_of[std::size_t(i)] < 0) {
            sheet.nothing();
            continue;
        }
        const json& entry = entries[std::size_t(entry_of[std::size_t(i)])];
        const float log_q = at.log_prob(at.member(entry, "logprob"));
        sure += log_q == 0, unsure = unsure || log_q != 0;
        sheet.own(log_q);
        list.clear();
        if (what.top_k > 0)
            for (const json& x : at.array(entry, "top_logprobs"))
                list.emplace_back(at.log_prob(at.member(x, "logprob")), at.id(at.member(x, "id")));
        sheet.best(list, false);
    }
    at.position = -1;
    if (sure >= 4 && !unsure) at.fail("has a log-prob of 0 for every token: is speculation on?");
    return sheet.take();
}

inline scores read_echo(const json& choice, const sequence& s, const wanted& what, answer_reader at) {
    const json& log_probs = at.member(choice, "logprobs");
    const json& entries = at.array(log_probs, "token_logprobs");
    const std::size_t size = s.tokens.size();
    if (entries.size() != size + 1) at.check_size(entries, "token_logprobs", size); // one token may be generated
    if (!entries[0].is_null()) at.fail("scores the first token: off by one, or a token was put before it?");
    const json* const lists = what.top_k > 0 ? &at.array(log_probs, "top_logprobs") : nullptr;
    if (lists != nullptr) at.check_size(*lists, "top_logprobs", entries.size());
    score_sheet sheet(s, what, at);
    std::vector<std::pair<float, std::int32_t>> list;
    for (index_t p = s.from; p < static_cast<index_t>(size); ++p) {
        at.position = p;
        const float log_q = at.log_prob(entries[std::size_t(p)]);
        sheet.own(log_q);
        list.clear();
        if (lists != nullptr && log_q == log_q) {
            const json& row = (*lists)[std::size_t(p)];
            if (!row.is_object()) at.fail("has a list that is no object");
            for (const auto& [key, value] : row.items()) {
                if (key.rfind("token_id:", 0) != 0)
                    at.fail("lists texts and no ids: this server's lists cannot be read");
                list.emplace_back(at.log_prob(value), at.id(std::string_view(key).substr(9)));
            }
        }
        sheet.best(list, true);
    }
    return sheet.take();
}

/// Calls read(sequence's part of the answer, i) for each of n sequences; what it throws is that sequence's.
template <class Parts, class Read>
std::vector<answer> each_answer(dialect d, std::size_t n, const Parts& parts, Read&& read) {
    std::vector<answer> all(n);
    for (std::size_t i = 0; i < n; ++i) {
        try {
            if (parts[i] == nullptr) throw bad_answer(d, static_cast<index_t>(i), -1, "leaves it out");
            all[i].scores = read(*parts[i], i);
        } catch (const bad_answer& e) {
            all[i].wrong = e;
        }
    }
    return all;
}

} // namespace detail

/// The request that has these sequences scored. Throws invalid_input, as for ids out of range, with the sequence as
/// row, and unsupported for what the server cannot give.
inline request request_of(dialect d, std::span<const sequence> sequences, const wanted& what = {}) {
    using detail::json;
    detail::check_call(d, sequences, what);
    if (sequences.empty()) throw invalid_input("sequences", "are none");
    json all = json::array(), starts = json::array(), unions = json::array();
    for (const sequence& s : sequences) {
        all.push_back(s.tokens), starts.push_back(detail::first_scored(s) - 1);
        std::vector<std::int32_t> ids;
        if (d == dialect::sglang && what.candidates) {
            ids.assign(s.candidates.begin(), s.candidates.end());
            std::sort(ids.begin(), ids.end());
            ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
            if (!ids.empty() && ids.front() < 0) ids.erase(ids.begin());
        }
        unions.push_back(std::move(ids));
    }
    request r;
    json body;
    switch (d) {
    case dialect::vllm:
        r.path = what.candidates ? "/inference/v1/generate" : "/v1/completions";
        if (what.candidates)
            body = detail::generate_of(sequences[0]);
        else
            body = {{"prompt", std::move(all)},
                    {"max_tokens", 1},
                    {"temperature", 1.0},
                    {"prompt_logprobs", std::max<index_t>(what.top_k, 1)},
                    {"stream", false}};
        break;
    case dialect::sglang:
        r.path = "/generate";
        body = {{"input_ids", std::move(all)},
                {"sampling_params", {{"max_new_tokens", 0}, {"temperature", 1.0}}},
                {"return_logprob", true},
                {"logprob_start_len", std::move(starts)},
                {"stream", false}};
        if (what.top_k > 0) body["top_logprobs_num"] = what.top_k;
        if (what.candidates) body["token_ids_logprob"] = std::move(unions);
        break;
    case dialect::llama_cpp:
        r.path = "/completion";
        body = detail::forced_of(sequences[0], what.top_k);
        break;
    case dialect::openai_echo:
        r.path = "/v1/completions";
        body = {{"prompt", std::move(all)}, // 1: older llama-cpp-python takes 0 for no limit
                {"max_tokens", 1},
                {"temperature", 1.0},
                {"echo", true},
                {"logprobs", std::max<index_t>(what.top_k, 1)},
                {"stream", false}};
        if (what.top_k > 0) body["return_tokens_as_token_ids"] = true;
        break;
    }
    if (!what.model.empty()) body["model"] = what.model;
    r.body = body.dump(-1, ' ', false, json::error_handler_t::replace);
    return r;
}

/// What an answer with status 200 says of the sequences that it was asked for, one entry each. Throws bad_answer where
/// nothing of it can be read.
inline std::vector<answer> decode(dialect d, std::string_view body, std::span<const sequence> sequences,
                                  const wanted& what = {}) {
    using detail::json;
    detail::check_call(d, sequences, what);
    const detail::answer_reader at{d};
    const json all = at.parse(body);
    at.check_error(all);
    std::vector<const json*> parts(sequences.size(), nullptr);
    const auto in = [&](std::size_t i) { return detail::answer_reader{d, static_cast<index_t>(i)}; };
    const auto choices = [&] { // vLLM and OpenAI: by index, in any order
        for (const json& c : at.array(all, "choices")) {
            const auto i = static_cast<std::size_t>(at.id(at.member(c, "index")));
            if (i >= parts.size() || parts[i] != nullptr)
                at.fail("has a choice too many, of index " + std::to_string(i));
            parts[i] = &c;
        }
    };
    const auto in_order = [&] { // SGLang and llama.cpp: one alone may come without an array
        if (!all.is_array() && parts.size() == 1)
            parts[0] = &all;
        else if (!all.is_array() || all.size() > parts.size())
            at.fail("is no array of at most " + std::to_string(parts.size()) + " answers");
        else
            for (std::size_t i = 0; i < all.size(); ++i) parts[i] = &all[i];
    };
    switch (d) {
    case dialect::vllm:
        if (what.candidates) {
            parts.assign(parts.size(), &all);
            return detail::each_answer(d, parts.size(), parts, [&](const json& part, std::size_t i) {
                return detail::read_generate(part, sequences[i], what, in(i));
            });
        }
        choices();
        return detail::each_answer(d, parts.size(), parts, [&](const json& part, std::size_t i) {
            return detail::read_vllm(part, sequences[i], what, in(i));
        });
    case dialect::sglang:
        in_order();
        return detail::each_answer(d, parts.size(), parts, [&](const json& part, std::size_t i) {
            return detail::read_sglang(part, sequences[i], what, in(i));
        });
    case dialect::llama_cpp:
        in_order();
        return detail::each_answer(d, parts.size(), parts, [&](const json& part, std::size_t i) {
            return detail::read_llama(part, sequences[i], what, in(i));
        });
    case dialect::openai_echo:
        break;
    }
    choices();
    return detail::each_answer(d, parts.size(), parts, [&](const json& part, std::size_t i) {
        return detail::read_echo(part, sequences[i], what, in(i));
    });
}

} // namespace opd::serve
