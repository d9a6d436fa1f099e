// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a rollout server is asked to draw, and what its answer says, event by event: pure functions, no I/O.
//
//   vLLM    POST /inference/v1/generate  {request_id, token_ids, sampling_params{max_tokens, temperature, logprobs, …},
//                                         stream, stream_options{include_usage, continuous_usage_stats}}
//           events (SSE, "data: …", the last "[DONE]"): choices[0] of what is new: token_ids, logprobs.content[] with
//           token "token_id:7", logprob, top_logprobs; finish_reason; usage.completion_tokens: all so far. A log-prob
//           of -9999 stands for -inf, and for none. Kept sets come in whole answers alone (sampling_mask,
//           --return-sampling-mask), so with them nothing is streamed
//   SGLang  POST /generate  {rid, input_ids, sampling_params{max_new_tokens, temperature, …}, return_logprob,
//                            top_logprobs_num, return_sampling_mask, stream}
//           events: output_ids, and in meta_info completion_tokens, output_token_logprobs [[log-prob, id, …]],
//           output_top_logprobs, output_token_sampling_mask and _logprobs, finish_reason{type}: all so far, or with
//           --incremental-streaming-output what is new, which is told by the count. weight_version; weight_versions
//           [{version, start, end}], the weights of each token. All so far costs N² bytes for N tokens
//
// Sources: vllm/entrypoints/scale_out/token_in_token_out/{protocol,serving}.py (2026-09), vllm-project/vime#117
// (deltas); docs.sglang.io native API, sglang/srt/managers/io_struct.py, sgl-project/sglang#35926 (weight_versions).
//
// An event is taken whole or refused (bad_answer) before anything of it is kept: another number of tokens than it
// counts, tokens that change or come twice, a drawn token without log-prob or mass, a token outside its kept set, more
// tokens than asked for, words after the end. What came before stands.
//
// log_mu is what the server says of the drawn token. For the distribution that drew it: vLLM with --logprobs-mode
// processed_logprobs; SGLang divides by the temperature by itself, and with kept sets says it over the set. Without
// filters and at temperature 1 all are the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/serve/answers.hpp"
#include "opd/serve/dialects.hpp"
#include "opd/serve/kept_sets.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::serve {

/// How responses are drawn.
struct sampling {
    index_t most_tokens = 512; ///< of a response, over all its requests
    double temperature = 1, top_p = 1, min_p = 0;
    index_t top_k = 0; ///< of the filter; 0: none
    std::vector<std::int32_t> stop_ids = {};
    bool ignore_eos = false;
    index_t list = 0;       ///< ids that are listed at each token, the best first
    bool kept_sets = false; ///< what the filters kept at each token
    index_t vocab = 0;      ///< ids at or beyond it are refused. 0: unknown
};

/// Why a generation ended, as the server says.
enum class ending : std::uint8_t {
    none, ///< it goes on
    stop, ///< an end token
    length
};
constexpr ending last_of(ending) { return ending::length; }

/// Weights that drew tokens from `begin` on, up to the next span's.
struct version_span {
    std::int64_t version = 0;
    std::uint64_t job = 0; ///< that made them: sched::weights
    std::int64_t begin = 0;
    bool operator==(const version_span&) const = default;
    template <class A>
    void fields(A& a) {
        a(version, job, begin);
    }
};

/// A response, or what there is of it: N tokens.
struct drawn {
    std::vector<std::int32_t> prompt = {};
    std::vector<std::int32_t> tokens = {};        ///< (N)
    std::vector<float> log_mu = {};               ///< (N) finite
    std::vector<std::int32_t> list_ids = {};      ///< (list total) best first; empty where none was asked for, as are:
    std::vector<float> list_log_mu = {};          ///< (list total) -inf: no mass
    std::vector<std::int64_t> list_offsets = {0}; ///< (N+1)
    std::vector<std::int32_t> kept_ids = {};      ///< (kept total) ascending in each row
    std::vector<std::int64_t> kept_offsets = {0}; ///< (N+1)
    std::vector<version_span> versions = {};      ///< ascending; the first begins at 0
    ending ended = ending::none;

    index_t size() const { return static_cast<index_t>(tokens.size()); }
    bool listed() const { return list_offsets.size() > 1; }
    bool kept() const { return kept_offsets.size() > 1; }
    /// The version that drew token t.
    std::int64_t version_of(index_t t) const {
        auto s = std::upper_bound(versions.begin(), versions.end(), t,
                                  [](index_t x, const version_span& v) { return x < v.begin; });
        return s == versions.begin() ? -1 : std::prev(s)->version;
    }
    /// The lists as a cache of the policy that drew; refers to this.
    teacher::ragged_support<std::int32_t> support() const {
        return {view(list_ids.data(), list_ids.size()), view(list_log_mu.data(), list_log_mu.size()),
                row_offsets<>(list_offsets)};
    }
    /// Of teacher::on_kept_sets.
    vector_view<const std::int32_t> kept_set_ids() const { return view(kept_ids.data(), kept_ids.size()); }
    row_offsets<> kept_set_offsets() const { return row_offsets<>(kept_offsets); }

    /// invalid_input where sizes, offsets or versions contradict each other, as bytes of a stranger may.
    void check() const {
        const auto needs = [](bool holds, const char* what) {
            if (!holds) throw invalid_input("drawn", what);
        };
        const auto rows = [&](const auto& offsets, std::size_t ids) {
            return offsets == std::vector<std::int64_t>{0}
                       ? ids == 0
                       : offsets.size() == tokens.size() + 1 && offsets.front() == 0 &&
                             std::is_sorted(offsets.begin(), offsets.end()) &&
                             offsets.back() == static_cast<std::int64_t>(ids);
        };
        const auto bad_id = [](std::int32_t id) { return id < 0; };
        needs(log_mu.size() == tokens.size(), "has another number of log-probs than tokens");
        needs(list_ids.size() == list_log_mu.size() && rows(list_offsets, list_ids.size()), "has lists of other rows");
        needs(rows(kept_offsets, kept_ids.size()), "has kept sets of other rows");
        for (const auto* ids : {&prompt, &tokens, &list_ids, &kept_ids})
            needs(std::none_of(ids->begin(), ids->end(), bad_id), "has an id below 0");
        needs(std::all_of(log_mu.begin(), log_mu.end(), [](float x) { return x <= 1e-3f && x > detail::no_mass; }),
              "has a log-prob that is none");
        needs(versions.empty() == tokens.empty() && (versions.empty() || versions.front().begin == 0),
              "has tokens of no weights");
        for (std::size_t i = 0; i < versions.size(); ++i)
            needs(versions[i].version >= 0 && versions[i].begin < size() &&
                      (i == 0 ||
                       (versions[i].begin > versions[i - 1].begin && versions[i].version >= versions[i - 1].version)),
                  "has versions that do not ascend");
    }
    template <class A>
    void fields(A& a) {
        a(prompt, tokens, log_mu, list_ids, list_log_mu, list_offsets, kept_ids, kept_offsets, versions, ended);
        if constexpr (A::reading) check();
    }
};

namespace detail {

inline void check_sampling(dialect d, const sampling& s) {
    const auto finite = [](const char* name, double x, double least, double most) {
        if (!(x >= least && x <= most)) throw invalid_input(name, "lies outside its range");
    };
    if (d != dialect::vllm && d != dialect::sglang)
        throw unsupported(std::string("opd: a server of the form ") + to_string(d) + " is no rollout server here");
    if (s.most_tokens < 1 || s.most_tokens > 1 << 30) throw invalid_input("most_tokens", "must lie in [1, 2^30]");
    finite("temperature", s.temperature, 0, 1e3), finite("top_p", s.top_p, 1e-9, 1), finite("min_p", s.min_p, 0, 1);
    if (s.top_k < 0 || s.top_k > 1 << 30) throw invalid_input("top_k", "must lie in [0, 2^30]");
    if (s.list < 0 || s.list > 1 << 20) throw invalid_input("list", "must lie in [0, 1048576]");
    if (s.vocab < 0) throw invalid_input("vocab", "is negative");
    for (const std::int32_t id : s.stop_ids)
        if (id < 0) throw invalid_input("stop_ids", "has the id " + std::to_string(id));
}

/// With kept sets vLLM's answers come whole.
inline bool streams(dialect d, const sampling& s) { return d == dialect::sglang || !s.kept_sets; }

/// Asks for the rest of a response.
inline request generation_of(dialect d, const drawn& so_far, const sampling& s, const std::string& id,
                             const std::string& model) {
    std::vector<std::int32_t> all = so_far.prompt;
    all.insert(all.end(), so_far.tokens.begin(), so_far.tokens.end());
    json how = {{"temperature", s.temperature}, {"top_p", s.top_p}};
    if (s.top_k > 0) how["top_k"] = s.top_k;
    if (s.min_p > 0) how["min_p"] = s.min_p;
    if (!s.stop_ids.empty()) how["stop_token_ids"] = s.stop_ids;
    if (s.ignore_eos) how["ignore_eos"] = true;
    const index_t left = s.most_tokens - so_far.size();
    request r;
    json body;
    if (d == dialect::vllm) {
        r.path = "/inference/v1/generate";
        how["max_tokens"] = left;
        how["logprobs"] = s.list > 0 ? s.list + 1 : 0; // the drawn token takes a place, where it is not among the best
        body = {{"request_id", id},
                {"token_ids", std::move(all)},
                {"sampling_params", std::move(how)},
                {"stream", streams(d, s)}};
        if (streams(d, s)) body["stream_options"] = {{"include_usage", true}, {"continuous_usage_stats", true}};
    } else {
        r.path = "/generate";
        how["max_new_tokens"] = left;
        body = {{"rid", id},
                {"input_ids", std::move(all)},
                {"sampling_params", std::move(how)},
                {"return_logprob", true},
                {"logprob_start_len", -1},
                {"stream", true}};
        if (s.list > 0) body["top_logprobs_num"] = s.list;
        if (s.kept_sets) body["return_sampling_mask"] = true;
    }
    if (!model.empty()) body["model"] = model;
    r.body = body.dump(-1, ' ', false, json::error_handler_t::replace);
    return r;
}

/// Lines of an event stream. `most` bounds what an event takes.
class event_lines {
public:
    event_lines(dialect d, std::size_t most) : at_{d}, most_(most) {}
    /// Calls data(std::string_view) with what each "data:" line has.
    template <class Data>
    void feed(std::string_view piece, Data&& data) {
        while (!piece.empty()) {
            const std::size_t end = piece.find('\n');
            const std::string_view part = piece.substr(0, end);
            if (part.size() > most_ - line_.size())
                at_.fail("has an event of more than " + std::to_string(most_) + " bytes");
            line_.append(part);
            if (end == std::string_view::npos) return;
            piece.remove_prefix(end + 1);
            std::string_view line = line_;
            if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
            if (line.substr(0, 5) == "data:") {
                line.remove_prefix(5);
                if (!line.empty() && line.front() == ' ') line.remove_prefix(1);
                data(line);
            }
            line_.clear();
        }
    }

private:
    answer_reader at_;
    std::size_t most_;
    std::string line_;
};

/// What one event adds.
struct draw_chunk {
    drawn more; ///< without prompt and versions
    /// From which token of `more` on the server names which weights, as it calls them; empty: it says nothing.
    std::vector<std::pair<std::int64_t, std::string>> labels = {};
    bool aborted = false; ///< by the server
};

/// Reads the events of one request, of which at most `most` tokens were asked for.
class draw_reader {
public:
    draw_reader(dialect d, const sampling& s, index_t most) : at_{d}, how_(s), most_(most) {}

    /// The end was said.
    bool over() const { return over_; }
    /// The server says which weights drew each token.
    bool spanned() const { return spanned_; }
    draw_chunk read(std::string_view text) {
        draw_chunk c;
        if (text == "[DONE]") {
            done_ = true;
            return c;
        }
        if (done_) at_.fail("goes on after its last event");
        const json all = at_.parse(text);
        at_.check_error(all);
        if (at_.dialect == dialect::vllm)
            read_vllm(all, c);
        else
            read_sglang(all, c);
        mine_.insert(mine_.end(), c.more.tokens.begin(), c.more.tokens.end());
        if (static_cast<index_t>(mine_.size()) > most_)
            at_.fail("draws more than the " + std::to_string(most_) + " tokens asked for");
        over_ = over_ || c.more.ended != ending::none || c.aborted;
        return c;
    }
    /// After the last event.
    void finish() const {
        if (over_ && !counted_) at_.fail("does not count its tokens");
    }

private:
    void token(draw_chunk& c, const json& id) {
        c.more.tokens.push_back(at_.id(id));
        if (how_.vocab > 0 && c.more.tokens.back() >= how_.vocab) at_.fail("draws the id " + id.dump());
    }
    void own(draw_chunk& c, float log_mu) {
        if (!(log_mu > no_mass))
            at_.fail("has no log-prob of the token that it drew, " +
                     std::to_string(c.more.tokens[c.more.log_mu.size()]));
        c.more.log_mu.push_back(log_mu);
    }
    /// A row's list, in any order: the k best.
    void list(draw_chunk& c, std::vector<std::pair<float, std::int32_t>>& entries) {
        std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
        for (std::size_t i = 0; i < entries.size(); ++i) {
            if (entries[i].first != entries[i].first) at_.fail("lists an id without log-prob");
            if (how_.vocab > 0 && entries[i].second >= how_.vocab)
                at_.fail("lists the id " + std::to_string(entries[i].second));
            if (i > 0 && entries[i].second == entries[i - 1].second)
                at_.fail("lists the id " + std::to_string(entries[i].second) + " twice");
        }
        std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        });
        entries.resize(std::min(entries.size(), static_cast<std::size_t>(how_.list)));
        for (const auto& [log_mu, id] : entries) c.more.list_ids.push_back(id), c.more.list_log_mu.push_back(log_mu);
        c.more.list_offsets.push_back(static_cast<std::int64_t>(c.more.list_ids.size()));
    }
    void keep(draw_chunk& c, const json& tokens, const json& masks) {
        kept_sets k = read_kept(tokens, masks, at_);
        for (const std::int32_t id : k.ids)
            if (how_.vocab > 0 && id >= how_.vocab) at_.fail("keeps the id " + std::to_string(id));
        c.more.kept_ids = std::move(k.ids), c.more.kept_offsets = std::move(k.offsets);
    }
    void end(draw_chunk& c, const std::string& reason) {
        if (reason == "stop")
            c.more.ended = ending::stop;
        else if (reason == "length")
            c.more.ended = ending::length;
        else if (reason == "abort")
            c.aborted = true;
        else
            at_.fail("ends by '" + reason.substr(0, 40) + "'");
    }
    /// "token_id:7"
    std::int32_t named(const json& name) const {
        if (!name.is_string() || name.get_ref<const std::string&>().rfind("token_id:", 0) != 0)
            at_.fail("names a token otherwise than token_id:…");
        return at_.id(std::string_view(name.get_ref<const std::string&>()).substr(9));
    }

    void read_vllm(const json& all, draw_chunk& c) {
        const json& choices = at_.array(all, "choices");
        if (choices.size() > 1) at_.fail("has " + std::to_string(choices.size()) + " choices of the one asked for");
        if (!choices.empty()) {
            const json& choice = choices[0];
            if (at_.id(at_.member(choice, "index")) != 0) at_.fail("has a choice that is not the first");
            if (over_) at_.fail("goes on after its end");
            const json& ids = at_.array(choice, "token_ids");
            for (const json& id : ids) token(c, id);
            const json& entries = at_.array(at_.member(choice, "logprobs"), "content");
            at_.check_size(entries, "logprobs", ids.size());
            std::vector<std::pair<float, std::int32_t>> listed;
            for (std::size_t i = 0; i < entries.size(); ++i) {
                at_.position = static_cast<index_t>(mine_.size() + i);
                if (named(at_.member(entries[i], "token")) != c.more.tokens[i])
                    at_.fail("has the log-prob of another token than it drew");
                own(c, at_.log_prob(at_.member(entries[i], "logprob")));
                if (how_.list == 0) continue;
                listed.clear();
                for (const json& x : at_.array(entries[i], "top_logprobs"))
                    listed.emplace_back(at_.log_prob(at_.member(x, "logprob")), named(at_.member(x, "token")));
                list(c, listed);
            }
            at_.position = -1;
            if (how_.kept_sets) keep(c, ids, at_.member(choice, "sampling_mask"));
            if (const auto why = choice.find("finish_reason"); why != choice.end() && why->is_string())
                end(c, why->get_ref<const std::string&>());
        }
        if (const auto usage = all.find("usage"); usage != all.end() && usage->is_object()) {
            counted_ = true;
            if (at_.id(at_.member(*usage, "completion_tokens")) !=
                static_cast<std::int64_t>(mine_.size() + c.more.tokens.size()))
                at_.fail("counts " + (*usage)["completion_tokens"].dump() + " tokens and has sent " +
                         std::to_string(mine_.size() + c.more.tokens.size()));
        }
    }

    void read_sglang(const json& all, draw_chunk& c) {
        const json& meta = at_.member(all, "meta_info");
        const json& ids = at_.array(all, "output_ids");
        const auto count = static_cast<std::size_t>(at_.id(at_.member(meta, "completion_tokens")));
        const std::size_t had = mine_.size();
        counted_ = true;
        if (count < had || (ids.size() != count && ids.size() != count - had))
            at_.fail("counts " + std::to_string(count) + " tokens and sends " + std::to_string(ids.size()) + " after " +
                     std::to_string(had));
        if (over_ && count > had) at_.fail("goes on after its end");
        const auto skip = [&](const json& list) { return list.size() == count ? had : 0; };
        for (std::size_t i = 0; i < skip(ids); ++i)
            if (at_.id(ids[i]) != mine_[i]) at_.fail("has another token " + std::to_string(i) + " than before");
        for (std::size_t i = skip(ids); i < ids.size(); ++i) token(c, ids[i]);
        const std::size_t fresh = count - had;
        const auto rows = [&](const char* name) -> const json& {
            const json& a = at_.array(meta, name);
            if (a.size() != count) at_.check_size(a, name, fresh);
            return a;
        };
        if (fresh > 0) {
            const json& entries = rows("output_token_logprobs");
            const json* lists = how_.list > 0 ? &rows("output_top_logprobs") : nullptr;
            const json* masks = how_.kept_sets ? &rows("output_token_sampling_mask") : nullptr;
            const auto over_sets = meta.find("output_token_sampling_logprobs");
            const bool of_sets = masks != nullptr && over_sets != meta.end() && over_sets->is_array();
            if (of_sets) rows("output_token_sampling_logprobs");
            std::vector<std::pair<float, std::int32_t>> listed;
            json kept = json::array();
            for (std::size_t i = 0; i < fresh; ++i) {
                at_.position = static_cast<index_t>(had + i);
                auto [log_mu, id] = at_.pair(entries[skip(entries) + i]);
                if (id != c.more.tokens[i]) at_.fail("has the log-prob of another token than it drew");
                if (masks != nullptr) kept.push_back((*masks)[skip(*masks) + i]);
                if (of_sets) log_mu = over_set((*over_sets)[skip(*over_sets) + i], kept.back(), id);
                own(c, log_mu);
                if (lists == nullptr) continue;
                const json& row = (*lists)[skip(*lists) + i];
                if (!row.is_array()) at_.fail("has a list that is no array");
                listed.clear();
                for (const json& x : row) listed.push_back(at_.pair(x));
                list(c, listed);
            }
            at_.position = -1;
            if (masks != nullptr) keep(c, json(c.more.tokens), kept);
        }
        label(meta, c, had, count);
        if (const auto why = meta.find("finish_reason"); why != meta.end() && why->is_object()) {
            const json& type = at_.member(*why, "type");
            end(c, type.is_string() ? type.get<std::string>() : type.dump());
        }
    }
    /// Of the drawn token over its set: a number, or one for each id of the set in its order.
    float over_set(const json& said, const json& set, std::int32_t id) const {
        if (!said.is_array()) return at_.log_prob(said);
        at_.check_size(said, "output_token_sampling_logprobs", set.size());
        for (std::size_t i = 0; i < set.size(); ++i)
            if (at_.id(set[i]) == id) return at_.log_prob(said[i]);
        at_.fail("drew the token " + std::to_string(id) + ", which it did not keep");
    }
    void label(const json& meta, draw_chunk& c, std::size_t had, std::size_t count) {
        const auto text = [&](const json& x) {
            if (!x.is_string()) at_.fail("names weights otherwise than by a text");
            return x.get<std::string>();
        };
        const auto spans = meta.find("weight_versions");
        if (spans == meta.end() || !spans->is_array()) {
            const auto one = meta.find("weight_version");
            if (one != meta.end() && !one->is_null() && count > had) c.labels.emplace_back(0, text(*one));
            return;
        }
        std::int64_t end = 0;
        for (const json& span : *spans) {
            const std::int64_t from = at_.id(at_.member(span, "start")), to = at_.id(at_.member(span, "end"));
            if (from != end || to < from) at_.fail("has weight_versions that leave tokens out");
            end = to;
            const auto begin = static_cast<std::int64_t>(had);
            if (to > begin)
                c.labels.emplace_back(std::max<std::int64_t>(from - begin, 0), text(at_.member(span, "version")));
        }
        if (end != static_cast<std::int64_t>(count)) at_.fail("has weight_versions of another number of tokens");
        spanned_ = true;
    }

    answer_reader at_;
    sampling how_;
    index_t most_;
    std::vector<std::int32_t> mine_; // tokens of this request
    bool over_ = false, done_ = false, counted_ = false, spanned_ = false;
};

/// Puts an event's tokens behind those that there are; their weights are the caller's to say.
inline void append(drawn& to, const draw_chunk& c) {
    const auto add = [](auto& all, const auto& more) { all.insert(all.end(), more.begin(), more.end()); };
    const auto add_offsets = [&](auto& all, const auto& more, std::size_t base) {
        for (std::size_t i = 1; i < more.size(); ++i) all.push_back(more[i] + static_cast<std::int64_t>(base));
    };
    add_offsets(to.list_offsets, c.more.list_offsets, to.list_ids.size());
    add_offsets(to.kept_offsets, c.more.kept_offsets, to.kept_ids.size());
    add(to.tokens, c.more.tokens), add(to.log_mu, c.more.log_mu);
    add(to.list_ids, c.more.list_ids), add(to.list_log_mu, c.more.list_log_mu), add(to.kept_ids, c.more.kept_ids);
    if (c.more.ended != ending::none) to.ended = c.more.ended;
}

} // namespace detail
} // namespace opd::serve
