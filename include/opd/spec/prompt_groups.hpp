// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What was written to each prompt, for drafts: a suffix automaton (suffix_automaton.hpp) a prompt, which holds the
// answers of this epoch, those that are being written among them, and those of the last epoch that had any. Older
// ones are forgotten when the first of a new epoch begins.
//
//   begin     finds the prompt's group in O(1), and where an epoch begins learns the last one's answers anew: each
//             token is learnt twice
//   append    amortised O(1)
//   draft     O(1) a token
//   memory    never more than `most_tokens` tokens, prompts included, about 200 bytes each; an answer counts as a token
//             more. Where there is no room, groups that nothing is written to are forgotten, the one that was begun
//             longest ago first; if that is not enough, nothing more is learnt, and drafts go on from what was
//
// Source: this project (retrieval over the prompt and the answers of its group).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/spec/suffix_automaton.hpp"

namespace opd::spec {

/// Groups by the prompt's number; an epoch's first answer to a prompt begins it. One thread's.
class prompt_groups {
public:
    /// An answer, as begin() gave it.
    struct text_id {
        std::uint64_t prompt = 0;
        std::int64_t number = -1; ///< in its group, from the first that ever was
        template <class A>
        void fields(A& a) {
            a(prompt, number);
        }
    };

    explicit prompt_groups(index_t most_tokens = index_t{1} << 22) : most_tokens_(most_tokens) {
        if (most_tokens < 1 || most_tokens > (index_t{1} << 29))
            throw invalid_input("most_tokens", "must lie in [1, 2^29], not " + std::to_string(most_tokens));
    }

    prompt_groups(prompt_groups&&) = default;
    prompt_groups& operator=(prompt_groups&&) = default;

    /// An answer to the prompt of this number, in this epoch; `tokens`: of the prompt, and of the answer so far.
    /// Its number is -1 where there is no room for it: nothing of it is learnt or drafted.
    text_id begin(std::uint64_t prompt, std::int64_t epoch, std::span<const std::int32_t> tokens);
    /// The answer grows by a token. False: nothing of it is learnt any more, for want of room, or since it was
    /// forgotten.
    bool append(const text_id& text, std::int32_t token);
    /// Nothing more will be written to it. Until then its group is not forgotten for want of room.
    void end(const text_id& text);

    /// As of suffix_automaton, of the group's texts; none of an answer that was forgotten.
    suffix_automaton::match longest(const text_id& text) const {
        const group* g = find(text);
        return g == nullptr ? suffix_automaton::match{} : g->texts.longest(place(*g, text));
    }
    index_t draft(const text_id& text, std::span<std::int32_t> out, std::int32_t least = 1) const {
        const group* g = find(text);
        return g == nullptr ? 0 : g->texts.draft(place(*g, text), out, least);
    }

    index_t groups() const { return static_cast<index_t>(groups_.size()); }
    index_t tokens() const { return tokens_; } ///< and answers
    index_t most_tokens() const { return most_tokens_; }
    std::size_t bytes() const {
        std::size_t n = 0;
        for (const group& g : groups_) n += sizeof(group) + g.texts.bytes() + g.running.capacity();
        return n;
    }

    template <class A>
    void fields(A& a);

private:
    struct group {
        std::uint64_t prompt = 0;
        std::int64_t epoch = 0;
        std::int64_t forgotten = 0;     // texts
        std::int32_t of_last_epoch = 0; // the first texts of the automaton
        std::vector<char> running;      // of each text
        suffix_automaton texts;
        template <class A>
        void fields(A& a) {
            a(prompt, epoch, forgotten, of_last_epoch, running, texts);
            if (forgotten < 0 || forgotten > std::int64_t{1} << 60 || of_last_epoch < 0 ||
                of_last_epoch > texts.texts() || running.size() != static_cast<std::size_t>(texts.texts()))
                throw invalid_input("snapshot", "is of no groups");
        }
    };
    using groups_type = std::list<group>; // the one that was begun last in front

    const group* find(const text_id& text) const {
        const auto at = by_prompt_.find(text.prompt);
        if (at == by_prompt_.end() || text.number < at->second->forgotten ||
            text.number >= at->second->forgotten + at->second->texts.texts())
            return nullptr;
        return &*at->second;
    }
    group* find(const text_id& text) { return const_cast<group*>(std::as_const(*this).find(text)); }
    static std::int32_t place(const group& g, const text_id& text) {
        return static_cast<std::int32_t>(text.number - g.forgotten);
    }
    static index_t size_of(const group& g) { return g.texts.tokens() + g.texts.texts(); }
    /// For one token more, of a text of group `kept`.
    bool make_room(const group* kept = nullptr);

    index_t most_tokens_, tokens_ = 0;
    groups_type groups_;
    std::unordered_map<std::uint64_t, groups_type::iterator> by_prompt_;
};

// --- implementation -------------------------------------------------------------------------------------------------

inline bool prompt_groups::make_room(const group* kept) {
    if (tokens_ < most_tokens_) return true;
    for (auto g = groups_.end(); g != groups_.begin() && tokens_ >= most_tokens_;) {
        --g;
        if (&*g == kept || std::find(g->running.begin(), g->running.end(), char{1}) != g->running.end()) continue;
        tokens_ -= size_of(*g);
        by_prompt_.erase(g->prompt);
        g = groups_.erase(g);
    }
    return tokens_ < most_tokens_;
}

inline prompt_groups::text_id prompt_groups::begin(std::uint64_t prompt, std::int64_t epoch,
                                                   std::span<const std::int32_t> tokens) {
    const auto at = by_prompt_.find(prompt);
    if (at == by_prompt_.end()) {
        if (!make_room()) return {prompt, -1};
        groups_.emplace_front().texts = suffix_automaton(most_tokens_);
        groups_.front().prompt = prompt, groups_.front().epoch = epoch;
        by_prompt_[prompt] = groups_.begin();
    } else {
        groups_.splice(groups_.begin(), groups_, at->second);
    }
    group& g = groups_.front();
    if (epoch > g.epoch) {
        const std::int32_t old = g.of_last_epoch;
        tokens_ -= size_of(g);
        g.texts.forget(old);
        tokens_ += size_of(g);
        g.running.erase(g.running.begin(), g.running.begin() + old);
        g.forgotten += old, g.of_last_epoch = g.texts.texts(), g.epoch = epoch;
    }
    if (!make_room(&g)) return {prompt, -1};
    const text_id id{prompt, g.forgotten + g.texts.begin()};
    g.running.push_back(1);
    ++tokens_;
    for (const std::int32_t t : tokens)
        if (!append(id, t)) break;
    return id;
}

inline bool prompt_groups::append(const text_id& text, std::int32_t token) {
    group* const g = find(text);
    if (g == nullptr || !g->texts.open(place(*g, text))) return false;
    if (!make_room(g)) {                 // which may be one that nothing is written to, but for this
        g->texts.close(place(*g, text)); // it lacks a token, also if there is room again
        return false;
    }
    const bool learnt = g->texts.append(place(*g, text), token);
    tokens_ += learnt;
    return learnt;
}

inline void prompt_groups::end(const text_id& text) {
    if (group* const g = find(text)) g->running[static_cast<std::size_t>(place(*g, text))] = 0;
}

template <class A>
void prompt_groups::fields(A& a) {
    auto count = static_cast<std::uint64_t>(groups_.size());
    a(most_tokens_, tokens_, count);
    if constexpr (A::reading) {
        groups_.clear(), by_prompt_.clear();
        index_t all = 0;
        for (std::uint64_t i = 0; i < count; ++i) {
            a(groups_.emplace_back());
            by_prompt_[groups_.back().prompt] = std::prev(groups_.end());
            all += size_of(groups_.back());
        }
        if (all != tokens_ || by_prompt_.size() != count) throw invalid_input("snapshot", "is of no groups");
    } else {
        for (group& g : groups_) a(g);
    }
}

} // namespace opd::spec
