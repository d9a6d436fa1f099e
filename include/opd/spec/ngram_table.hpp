// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A drafter without a model, in memory that is fixed beforehand: after which words which token came. For n = longest
// … shortest, the last n tokens are a key, under which the token is kept that came next most often of late; a draft
// looks its context up, longest key first, appends what it finds, and looks up again.
//
//   learn     O(longest - shortest + 1)
//   draft     the same a token
//   memory    `bytes` or less, all of it taken at once; nothing is allocated afterwards
//
// Keys are kept as they are, so that another key of the same hash is never taken for it. A key's place is one of
// four; if none is free, the one that was learnt longest ago is given up. The token of a key is the one that leads a
// running vote: each time it comes it has a vote more, another one takes a vote away, or the place where there is
// none left.
//
// Unlike a suffix automaton (suffix_automaton.hpp) it does not grow, forgets by itself and can be shared by all
// prompts; but it matches no more than `longest` tokens.
//
// Source: Boyer and Moore 1981 (the vote).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::spec {

/// Memory, and the lengths of keys in tokens.
struct ngram_options {
    std::size_t bytes = std::size_t{1} << 20; ///< never more
    std::int32_t shortest = 2;                ///< tokens of a key; at least 1
    std::int32_t longest = 5;                 ///< at most 16
};

/// Takes all its memory when it is made. One thread's.
class ngram_table {
public:
    explicit ngram_table(const ngram_options& o = {});

    /// `next` came after `before`, of which the last `longest` tokens are looked at.
    void learn(std::span<const std::int32_t> before, std::int32_t next);
    /// The tokens of a text from number `first` on.
    void learn_text(std::span<const std::int32_t> text, std::size_t first = 0) {
        for (; first < text.size(); ++first) learn(text.first(first), text[first]);
    }

    struct drafted {
        index_t count = 0;        ///< tokens
        std::int32_t matched = 0; ///< tokens of the key that the first of them came from; 0: none
    };
    /// What came after `before`, and after that, …: at most out.size() tokens, as long as keys of at least `least`
    /// tokens are known.
    drafted draft(std::span<const std::int32_t> before, std::span<std::int32_t> out, std::int32_t least = 1) const;

    /// Forgets all, and keeps the memory.
    void clear() {
        std::fill(entries_.begin(), entries_.end(), entry{});
        clock_ = 0;
    }
    index_t capacity() const { return static_cast<index_t>(entries_.size()); } ///< keys
    std::size_t bytes() const { return entries_.capacity() * sizeof(entry) + keys_.capacity() * sizeof(std::int32_t); }
    const ngram_options& options() const { return options_; }

    template <class A>
    void fields(A& a) {
        const std::size_t entries = entries_.size(), keys = keys_.size();
        a(clock_, entries_, keys_);
        bool ours = entries_.size() == entries && keys_.size() == keys;
        for (const entry& e : entries_)
            ours = ours && e.length >= 0 && e.length <= options_.longest && e.votes <= most_votes;
        if (!ours) throw invalid_input("snapshot", "is of another table");
    }

private:
    static constexpr std::size_t ways = 4;
    static constexpr std::int32_t widest = 16;
    static constexpr std::uint32_t most_votes = 15;
    struct entry {
        std::int32_t next = 0;
        std::int32_t length = 0; // of its key; 0: free
        std::uint32_t votes = 0;
        std::uint32_t learnt = 0; // when
        template <class A>
        void fields(A& a) {
            a(next, length, votes, learnt);
        }
    };
    // Of the last 1, 2, … tokens.
    struct hashes {
        std::array<std::uint64_t, widest + 1> of{};
        std::int32_t known = 0;
    };
    hashes hash(const std::int32_t* end, std::size_t size) const {
        hashes h;
        h.known = static_cast<std::int32_t>(std::min(size, static_cast<std::size_t>(options_.longest)));
        for (std::int32_t n = 1; n <= h.known; ++n)
            h.of[static_cast<std::size_t>(n)] =
                (h.of[static_cast<std::size_t>(n - 1)] + static_cast<std::uint32_t>(end[-n]) + 1) * 0x9e3779b97f4a7c15u;
        return h;
    }
    // The first of the places that a key may have.
    std::size_t set_of(std::uint64_t h) const {
        h ^= h >> 32;
        h *= 0xd6e8feb86659fd93u;
        return static_cast<std::size_t>((h >> 32) * (entries_.size() / ways) >> 32) * ways;
    }
    bool is_at(std::size_t place, const std::int32_t* end, std::int32_t n) const {
        return entries_[place].length == n &&
               std::equal(end - n, end, keys_.begin() + static_cast<std::ptrdiff_t>(place * width()));
    }
    const entry* find(const hashes& h, const std::int32_t* end, std::int32_t n) const {
        const std::size_t set = set_of(h.of[static_cast<std::size_t>(n)]);
        for (std::size_t p = set; p < set + ways; ++p)
            if (is_at(p, end, n)) return &entries_[p];
        return nullptr;
    }
    std::size_t width() const { return static_cast<std::size_t>(options_.longest); }

    ngram_options options_;
    std::vector<entry> entries_;
    std::vector<std::int32_t> keys_; // `longest` tokens an entry
    std::uint32_t clock_ = 0;
};

// --- implementation -------------------------------------------------------------------------------------------------

inline ngram_table::ngram_table(const ngram_options& o) : options_(o) {
    if (o.longest < 1 || o.longest > widest) throw invalid_input("longest", "must lie in [1, 16]");
    if (o.shortest < 1 || o.shortest > o.longest) throw invalid_input("shortest", "must lie in [1, longest]");
    const std::size_t set = ways * (sizeof(entry) + width() * sizeof(std::int32_t)), sets = o.bytes / set;
    if (sets < 1 || sets > 0xffffffffu)
        throw invalid_input("bytes", "must be at least " + std::to_string(set) + ", and below 2^32 times as many");
    entries_.resize(sets * ways);
    keys_.resize(sets * ways * width());
}

inline void ngram_table::learn(std::span<const std::int32_t> before, std::int32_t next) {
    const std::int32_t* const end = before.data() + before.size();
    const hashes h = hash(end, before.size());
    ++clock_;
    for (std::int32_t n = options_.shortest; n <= h.known; ++n) {
        const std::size_t set = set_of(h.of[static_cast<std::size_t>(n)]);
        std::size_t place = set;
        for (std::size_t p = set; p < set + ways; ++p) {
            if (is_at(p, end, n)) {
                place = p;
                break;
            }
            // free, or the oldest
            const entry &a = entries_[p], &b = entries_[place];
            if (b.length != 0 && (a.length == 0 || clock_ - a.learnt > clock_ - b.learnt)) place = p;
        }
        entry& e = entries_[place];
        if (!is_at(place, end, n)) {
            e = {next, n, 1, clock_};
            std::copy(end - n, end, keys_.begin() + static_cast<std::ptrdiff_t>(place * width()));
            continue;
        }
        e.learnt = clock_;
        if (e.next == next)
            e.votes = std::min(e.votes + 1, most_votes);
        else if (e.votes > 1)
            --e.votes;
        else
            e.next = next, e.votes = 1;
    }
}

inline ngram_table::drafted ngram_table::draft(std::span<const std::int32_t> before, std::span<std::int32_t> out,
                                               std::int32_t least) const {
    drafted r;
    // the context with what is drafted behind it
    std::array<std::int32_t, widest> window{};
    std::size_t size = std::min(before.size(), width());
    std::copy(before.end() - static_cast<std::ptrdiff_t>(size), before.end(), window.begin());
    for (; static_cast<std::size_t>(r.count) < out.size(); ++r.count) {
        const std::int32_t* const end = window.data() + size;
        const hashes h = hash(end, size);
        const entry* found = nullptr;
        std::int32_t n = h.known;
        for (; n >= std::max(options_.shortest, least) && found == nullptr; --n) found = find(h, end, n);
        if (found == nullptr) break;
        if (r.count == 0) r.matched = n + 1;
        out[static_cast<std::size_t>(r.count)] = found->next;
        if (size == width())
            std::copy(window.begin() + 1, window.begin() + static_cast<std::ptrdiff_t>(size), window.begin());
        else
            ++size;
        window[size - 1] = found->next;
    }
    return r;
}

} // namespace opd::spec
