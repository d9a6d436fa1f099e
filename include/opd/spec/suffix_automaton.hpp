// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A drafter without a model: what came after the same words before. One automaton holds the texts of a prompt group
// (the prompt, the answers that are being written, those of the last epoch), each growing token by token, and knows
// after every token the longest suffix of a text that occurred before, in it or in another; what followed there is
// the draft.
//
//   append    amortised O(1), but for the copies of a state's edges when it is split
//   draft     O(1) a token
//   memory    at most 2 states and 3 edges a token, about 200 bytes (`bytes()`); never more than `most_tokens` tokens:
//             what is beyond is not learnt, and drafts go on from what was. forget() drops the oldest texts (last
//             epoch's but one)
//   fields    texts, and in which order they grew: what is read is learnt again, O(1) a token
//
// Two texts of one group share what they have in common. Earlier texts go first: of several occurrences the draft
// follows the first.
//
// Source: Blumer et al. 1985 (suffix automata), Mohri, Moreno and Weinstein 2009 (of several texts).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::spec {

/// One group's texts. `most_tokens` bounds memory, at about 200 bytes a token. One thread's.
class suffix_automaton {
public:
    /// What a text's end is like, and where that was: `length` tokens, which in text `text` end before `position`.
    struct match {
        std::int32_t length = 0; ///< 0: nothing like it
        std::int32_t text = -1;
        std::int32_t position = 0;
    };

    explicit suffix_automaton(index_t most_tokens = index_t{1} << 20) : most_tokens_(most_tokens) {
        if (most_tokens < 1 || most_tokens > (index_t{1} << 29))
            throw invalid_input("most_tokens", "must lie in [1, 2^29], not " + std::to_string(most_tokens));
        clear();
    }

    /// Forgets all texts, and keeps the memory.
    void clear() { forget(static_cast<std::int32_t>(texts_.size())); }

    /// Forgets the first `count` texts, and keeps the memory; the number of every other text is less by that. Learns
    /// the others anew, one after the other, what was beyond `most_tokens` excepted: O(1) a token of theirs.
    void forget(std::int32_t count);

    /// A new text, empty. Its number: 0, 1, …
    std::int32_t begin() {
        texts_.push_back({});
        if (!spare_.empty()) {
            texts_.back().tokens.swap(spare_.back());
            spare_.pop_back();
        }
        return static_cast<std::int32_t>(texts_.size()) - 1;
    }
    /// The text grows by a token. False: there is no room, and nothing of this text is learnt any more.
    bool append(std::int32_t text, std::int32_t token);
    bool append(std::int32_t text, std::span<const std::int32_t> tokens) {
        bool all = true;
        for (const std::int32_t t : tokens) all = append(text, t);
        return all;
    }

    /// Whether append() may still learn something of it.
    bool open(std::int32_t text) const { return !known(text).full; }
    /// Nothing of this text is learnt any more.
    void close(std::int32_t text) {
        known(text);
        texts_[static_cast<std::size_t>(text)].full = true;
    }

    /// The longest end of the text that occurred before.
    match longest(std::int32_t text) const {
        const text_type& t = known(text);
        const place own{text, static_cast<std::int32_t>(t.tokens.size())};
        for (std::uint32_t s = t.last; s != 0; s = states_[s].link) {
            const place at = states_[s].first != own ? states_[s].first : states_[s].again;
            if (at.text >= 0) return {states_[s].length, at.text, at.end};
        }
        return {};
    }
    /// What came there next, at most out.size() tokens; none where less than `least` tokens match. Returns how many.
    index_t draft(std::int32_t text, std::span<std::int32_t> out, std::int32_t least = 1) const {
        const match m = longest(text);
        if (m.length < std::max(least, 1)) return 0;
        const std::vector<std::int32_t>& from = texts_[static_cast<std::size_t>(m.text)].tokens;
        const auto first = static_cast<std::size_t>(m.position);
        const std::size_t n = std::min(out.size(), from.size() - first);
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(first), n, out.begin());
        return static_cast<index_t>(n);
    }

    index_t tokens() const { return tokens_; }
    std::int32_t texts() const { return static_cast<std::int32_t>(texts_.size()); }
    std::span<const std::int32_t> text(std::int32_t number) const { return known(number).tokens; }
    index_t states() const { return static_cast<index_t>(states_.size()); }
    index_t edges() const { return static_cast<index_t>(edges_.size()); }
    /// Memory that it holds.
    std::size_t bytes() const {
        std::size_t n = states_.capacity() * sizeof(state) + edges_.capacity() * sizeof(edge) +
                        index_.capacity() * sizeof(std::uint32_t) + texts_.capacity() * sizeof(text_type) +
                        order_.capacity() * sizeof(run);
        for (const text_type& t : texts_) n += t.tokens.capacity() * sizeof(std::int32_t);
        for (const std::vector<std::int32_t>& t : spare_) n += t.capacity() * sizeof(std::int32_t);
        return n;
    }

    template <class A>
    void fields(A& a) {
        a(most_tokens_, texts_, order_);
        if constexpr (A::reading) {
            refuse(most_tokens_ < 1 || most_tokens_ > (index_t{1} << 29));
            learn_again();
            for (const text_type& t : texts_) refuse(t.learnt != t.tokens.size());
        }
    }

private:
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
    struct place {
        std::int32_t text = -1, end = 0;
        bool operator==(const place&) const = default;
    };
    struct state {
        std::int32_t length; // of its longest word
        std::uint32_t link;
        std::uint32_t edges; // the first of them
        place first;         // where its words ended first
        place again;         // and another time, if they did
    };
    struct edge {
        std::uint32_t from;
        std::int32_t token;
        std::uint32_t to;
        std::uint32_t next; // of the same state
    };
    struct text_type {
        std::vector<std::int32_t> tokens;
        bool full = false;
        std::uint32_t last = 0; // state
        std::size_t learnt = 0; // tokens: all, but for while they are learnt again
        template <class A>
        void fields(A& a) {
            a(tokens, full);
        }
    };
    // Tokens that a text got in a row.
    struct run {
        std::int32_t text;
        std::int32_t count;
        template <class A>
        void fields(A& a) {
            a(text, count);
        }
    };

    const text_type& known(std::int32_t text) const {
        if (text < 0 || static_cast<std::size_t>(text) >= texts_.size())
            throw invalid_input("text", "there is no text " + std::to_string(text));
        return texts_[static_cast<std::size_t>(text)];
    }
    std::uint32_t new_state(std::int32_t length, std::uint32_t link, place at) {
        states_.push_back({length, link, none, at, {}});
        return static_cast<std::uint32_t>(states_.size()) - 1;
    }
    static std::size_t hash(std::uint32_t from, std::int32_t token) {
        std::uint64_t z = (std::uint64_t{from} << 32 | static_cast<std::uint32_t>(token)) * 0x9e3779b97f4a7c15u;
        return static_cast<std::size_t>(z ^ z >> 32);
    }
    /// Where the edge is in the index, or would be.
    std::size_t slot(std::uint32_t from, std::int32_t token) const {
        const std::size_t mask = index_.size() - 1;
        std::size_t at = hash(from, token) & mask;
        while (index_[at] != none && (edges_[index_[at]].from != from || edges_[index_[at]].token != token))
            at = (at + 1) & mask;
        return at;
    }
    /// The edge's number; none: there is none.
    std::uint32_t find(std::uint32_t from, std::int32_t token) const {
        return index_.empty() ? none : index_[slot(from, token)];
    }
    void add_edge(std::uint32_t from, std::int32_t token, std::uint32_t to) {
        if (2 * (edges_.size() + 1) > index_.size()) {
            index_.assign(std::max<std::size_t>(64, 2 * index_.size()), none);
            for (std::uint32_t e = 0; e < edges_.size(); ++e) index_[slot(edges_[e].from, edges_[e].token)] = e;
        }
        const std::size_t at = slot(from, token);
        index_[at] = static_cast<std::uint32_t>(edges_.size());
        edges_.push_back({from, token, to, states_[from].edges});
        states_[from].edges = index_[at];
    }
    /// The state of q's words up to `length`, which p's words and the token are.
    std::uint32_t split(std::uint32_t q, std::int32_t length, std::uint32_t p, std::int32_t token) {
        const std::uint32_t clone = new_state(length, states_[q].link, states_[q].first);
        for (std::uint32_t e = states_[q].edges; e != none; e = edges_[e].next)
            add_edge(clone, edges_[e].token, edges_[e].to);
        states_[q].link = clone;
        for (; p != none; p = states_[p].link) {
            const std::uint32_t e = find(p, token);
            if (e == none || edges_[e].to != q) break;
            edges_[e].to = clone;
        }
        return clone;
    }

    static void refuse(bool wrong) {
        if (wrong) throw invalid_input("snapshot", "is of no automaton");
    }
    /// Everything but the texts anew, from order_.
    void learn_again();
    /// Learns the text's next token.
    void extend(std::int32_t text);

    /// The words of s end here too. Those of states that have been met again have shorter ones that were.
    void meet(std::uint32_t s, const place& here) {
        for (; s != 0 && states_[s].again.text < 0; s = states_[s].link) states_[s].again = here;
    }

    index_t most_tokens_, tokens_ = 0;
    std::vector<state> states_; // 0: the empty word
    std::vector<edge> edges_;
    std::vector<std::uint32_t> index_; // of edges, by state and token; open addressing
    std::vector<text_type> texts_;
    std::vector<run> order_;                       // in which they grew
    std::vector<std::vector<std::int32_t>> spare_; // memory of texts that were forgotten
};

inline void suffix_automaton::forget(std::int32_t count) {
    if (count < 0 || count > texts())
        throw invalid_input("count", "must lie in [0, " + std::to_string(texts()) + "], not " + std::to_string(count));
    if (count == 0 && !states_.empty()) return;
    for (std::int32_t t = 0; t < count; ++t) {
        spare_.push_back(std::move(texts_[static_cast<std::size_t>(t)].tokens));
        spare_.back().clear();
    }
    texts_.erase(texts_.begin(), texts_.begin() + count);
    order_.clear();
    for (std::int32_t t = 0; t < texts(); ++t)
        if (const auto n = static_cast<std::int32_t>(text(t).size()); n > 0) order_.push_back({t, n});
    learn_again();
}

inline void suffix_automaton::learn_again() {
    states_.clear(), edges_.clear(), tokens_ = 0;
    std::fill(index_.begin(), index_.end(), none);
    new_state(0, none, {});
    for (text_type& t : texts_) t.last = 0, t.learnt = 0;
    for (const run& r : order_) {
        refuse(r.text < 0 || r.text >= texts());
        const text_type& t = texts_[static_cast<std::size_t>(r.text)];
        refuse(static_cast<std::size_t>(r.count) > t.tokens.size() - t.learnt || r.count > most_tokens_ - tokens_);
        for (std::int32_t i = 0; i < r.count; ++i) extend(r.text);
    }
}

inline bool suffix_automaton::append(std::int32_t text, std::int32_t token) {
    known(text);
    text_type& t = texts_[static_cast<std::size_t>(text)];
    t.full = t.full || tokens_ == most_tokens_;
    if (t.full) return false;
    t.tokens.push_back(token);
    if (order_.empty() || order_.back().text != text)
        order_.push_back({text, 1});
    else
        ++order_.back().count;
    extend(text);
    return true;
}

inline void suffix_automaton::extend(std::int32_t text) {
    text_type& t = texts_[static_cast<std::size_t>(text)];
    const std::int32_t token = t.tokens[t.learnt++];
    const place here{text, static_cast<std::int32_t>(t.learnt)};
    ++tokens_;
    std::uint32_t p = t.last;
    if (const std::uint32_t e = find(p, token); e != none) { // another text went the same way
        const std::uint32_t q = edges_[e].to;
        const std::int32_t length = states_[p].length + 1;
        t.last = states_[q].length == length ? q : split(q, length, p, token);
        meet(t.last, here);
        return;
    }
    const std::uint32_t now = new_state(states_[p].length + 1, 0, here);
    std::uint32_t e = none;
    for (; p != none && (e = find(p, token)) == none; p = states_[p].link) add_edge(p, token, now);
    if (p != none) {
        const std::uint32_t q = edges_[e].to;
        const std::int32_t length = states_[p].length + 1;
        const std::uint32_t link = states_[q].length == length ? q : split(q, length, p, token);
        states_[now].link = link;
        meet(link, here);
    }
    t.last = now;
}

} // namespace opd::spec
