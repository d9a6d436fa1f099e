// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a drafter is trained on while rollout idles: the responses of this step that are finished already, and of the
// step before the long ones, since whoever finishes early is short and a drafter that saw no long response drafts badly
// where it counts. (TLT's DataBuffer, "one-step offset".) With each response may come what the target computed of it:
// hidden states as bytes, one row a token (the last one may lack its row: no engine computes it before it goes on), or
// a number by which the caller finds them.
//
//   draft_data_buffer b({.most_bytes = 1 << 26});
//   b.begin_step(step);              what was of this step is now of the last one, what was of the last is forgotten
//   b.add({.id = …, .tokens = …});   of this step, once; false: there is no room
//   b.attach(id, hidden);            the hidden states come later
//   for (const auto& who : b.choose(4096)) train on b.at(who);       rows of one packed batch
//
// Memory: bytes of tokens and hidden states, and `item_overhead` an item, never more than most_bytes. Kept are the
// first of a ranking, as long as they fit: the longest first, of equals the lowest id. At begin_step what was of this
// step is cut to `previous_share` of most_bytes; this step has the rest. What has no room even alone keeps nothing else
// out. So what is kept of a step follows from which responses it had, never from the order in which they came.
//
// Choice: by turns of the two steps, so that the previous one has as near as may be `previous_share` of the tokens of a
// batch: of each step what was chosen least often, of those the longest, of those the lowest id; what does not fit is
// passed over. No chance, no clock: equal buffers choose alike, before and after a restart.
//
// fields() are all of it. Reading refuses what contradicts itself. A file is the caller's: to a temporary name, then
// renamed.
//
// Errors: invalid_input: `most_bytes`, `previous_share`; `step` where it goes back; `tokens` (none), `first` (outside
// the tokens), `id` (twice in a step, or at() where nothing is), `hidden` (not the same number of bytes in each row);
// `snapshot`. What is refused changes nothing.
//
// Source: TLT section 4.2 (spot training with DataBuffer).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::spec {

/// One finished response behind its prompt, as the drafter is trained on it.
struct draft_response {
    std::uint64_t id = 0;
    std::vector<std::int32_t> tokens = {}; ///< prompt and response
    index_t first = 0;                     ///< of the response
    std::int64_t policy = 0;               ///< version that drew it
    std::vector<std::uint8_t> hidden = {}; ///< rows of bytes; none: not known
    std::uint64_t reference = 0;           ///< where the caller has more of it
    index_t length() const { return static_cast<index_t>(tokens.size()); }
    template <class A>
    void fields(A& a) {
        a(id, tokens, first, policy, hidden, reference);
    }
    bool operator==(const draft_response&) const = default;
};

/// Bytes in all, 64 MiB by default, and what the step before may have of them.
struct draft_buffer_options {
    index_t most_bytes = index_t{1} << 26; ///< of both steps, items' overhead included
    double previous_share = 0.5;           ///< in [0, 1): of memory and of what is chosen
    template <class A>
    void fields(A& a) {
        a(most_bytes, previous_share);
    }
    bool operator==(const draft_buffer_options&) const = default;
};

/// Responses of this step and of the one before. One thread's.
class draft_data_buffer {
public:
    static constexpr index_t item_overhead = 128; ///< bytes

    struct place {
        bool previous = false; ///< of the last step
        std::uint64_t id = 0;
        bool operator==(const place&) const = default;
    };
    struct counters {
        std::int64_t added = 0;
        std::int64_t refused = 0;   ///< for want of room, when they came
        std::int64_t displaced = 0; ///< by longer ones, or when a step began
        std::int64_t forgotten = 0; ///< with their step
        std::int64_t chosen = 0, chosen_tokens = 0, chosen_previous_tokens = 0;
        template <class A>
        void fields(A& a) {
            a(added, refused, displaced, forgotten, chosen, chosen_tokens, chosen_previous_tokens);
        }
    };

    explicit draft_data_buffer(const draft_buffer_options& o = {}) : options_(o) {
        if (o.most_bytes < 1 || o.most_bytes > (index_t{1} << 50))
            throw invalid_input("most_bytes", "must lie in [1, 2^50], not " + std::to_string(o.most_bytes));
        if (!(o.previous_share >= 0 && o.previous_share < 1))
            throw invalid_input("previous_share", "must lie in [0, 1), not " + std::to_string(o.previous_share));
    }

    /// Steps rise; one that is left out had no responses.
    void begin_step(std::int64_t step) {
        if (step < step_)
            throw invalid_input("step", "goes from " + std::to_string(step_) + " back to " + std::to_string(step));
        if (step == step_) return;
        totals_.forgotten += static_cast<std::int64_t>(previous_.items.size());
        previous_ = {};
        std::swap(previous_, current_);
        if (step > step_ + 1) {
            totals_.forgotten += static_cast<std::int64_t>(previous_.items.size());
            previous_ = {};
        }
        step_ = step;
        for (item& x : previous_.items) x.uses = 0;
        std::erase_if(previous_.items, [&](const item& x) { // nor may one keep out what is shorter
            const index_t bytes = bytes_of(x.response);
            if (bytes <= previous_room()) return false;
            previous_.bytes -= bytes;
            ++totals_.displaced;
            return true;
        });
        totals_.displaced += trim(previous_, previous_room());
    }
    /// Whether it is kept. It may go when longer ones come.
    bool add(draft_response r) {
        if (r.tokens.empty()) throw invalid_input("tokens", "there is none");
        if (r.first < 0 || r.first > r.length())
            throw invalid_input("first", "is " + std::to_string(r.first) + " of " + std::to_string(r.length()));
        check_hidden(r, r.hidden);
        if (find(current_, r.id) != nullptr)
            throw invalid_input("id", std::to_string(r.id) + " is there already in step " + std::to_string(step_));
        const std::uint64_t id = r.id;
        // One that has no room alone would keep out what is shorter; and what was displaced once is no better now.
        const bool room = bytes_of(r) <= current_room() && !(current_.cut.is && before(current_.cut, rank_of(r)));
        bool kept = false;
        if (room) {
            insert(current_, {std::move(r), 0});
            const index_t gone = trim(current_, current_room());
            kept = find(current_, id) != nullptr;
            totals_.displaced += gone - !kept;
        }
        ++(kept ? totals_.added : totals_.refused);
        return kept;
    }
    /// Hidden states of a response of this step. Whether they are kept, and it; not where it is gone, or was refused.
    bool attach(std::uint64_t id, std::vector<std::uint8_t> hidden) {
        item* x = find(current_, id);
        if (x == nullptr) return false;
        check_hidden(x->response, hidden);
        const index_t more = static_cast<index_t>(hidden.size()) - static_cast<index_t>(x->response.hidden.size());
        if (bytes_of(x->response) + more > current_room()) return false;
        current_.bytes += more;
        x->response.hidden = std::move(hidden);
        totals_.displaced += trim(current_, current_room());
        return find(current_, id) != nullptr;
    }

    /// Rows of a packed batch of at most so many tokens, and marks them as used once more. None: nothing fits.
    std::vector<place> choose(index_t most_tokens) {
        std::vector<place> out;
        index_t tokens = 0, of_previous = 0;
        std::vector<item*> queue[2] = {queue_of(current_), queue_of(previous_)};
        std::size_t at[2] = {0, 0};
        const auto next = [&](int q) -> item* {
            while (at[q] < queue[q].size() && queue[q][at[q]]->response.length() > most_tokens - tokens) ++at[q];
            return at[q] < queue[q].size() ? queue[q][at[q]] : nullptr;
        };
        for (;;) {
            item* const now[2] = {next(0), next(1)};
            if (now[0] == nullptr && now[1] == nullptr) break;
            const bool owed =
                static_cast<double>(of_previous) < options_.previous_share * static_cast<double>(tokens) ||
                (tokens == 0 && options_.previous_share > 0);
            const int q = now[0] == nullptr || (now[1] != nullptr && owed) ? 1 : 0;
            ++at[q];
            const index_t length = now[q]->response.length();
            tokens += length, of_previous += q == 1 ? length : 0;
            ++now[q]->uses;
            ++totals_.chosen, totals_.chosen_tokens += length, totals_.chosen_previous_tokens += q == 1 ? length : 0;
            out.push_back({q == 1, now[q]->response.id});
        }
        return out;
    }
    const draft_response& at(const place& p) const {
        const item* x = find(p.previous ? previous_ : current_, p.id);
        if (x == nullptr) throw invalid_input("id", "there is no " + std::to_string(p.id) + " in that step");
        return x->response;
    }
    bool contains(const place& p) const { return find(p.previous ? previous_ : current_, p.id) != nullptr; }

    std::int64_t step() const { return step_; }
    index_t bytes() const { return current_.bytes + previous_.bytes; }
    index_t size() const { return static_cast<index_t>(current_.items.size() + previous_.items.size()); }
    /// Tokens of the longest response; 0 where there is none.
    index_t longest() const {
        index_t most = 0;
        for (const half* h : {&current_, &previous_})
            if (!h->items.empty()) most = std::max(most, h->items.front().response.length());
        return most;
    }
    /// Ids, the longest first.
    std::vector<std::uint64_t> ids(bool previous) const {
        std::vector<std::uint64_t> all;
        for (const item& x : (previous ? previous_ : current_).items) all.push_back(x.response.id);
        return all;
    }
    static index_t bytes_of(const draft_response& r) {
        return item_overhead + static_cast<index_t>(r.tokens.size() * sizeof(std::int32_t) + r.hidden.size());
    }
    const draft_buffer_options& options() const { return options_; }
    const counters& totals() const { return totals_; }

    template <class A>
    void fields(A& a) {
        draft_buffer_options then = options_;
        a(then);
        if (then != options_) throw invalid_input("snapshot", "is of a buffer of other options");
        a(step_, current_, previous_, totals_);
        if constexpr (A::reading) {
            check_read(current_);
            check_read(previous_);
            if (previous_.bytes > previous_room() || current_.bytes > current_room())
                throw invalid_input("snapshot", "holds more than the buffer may");
        }
    }

private:
    struct item {
        draft_response response;
        std::int64_t uses = 0;
        template <class A>
        void fields(A& a) {
            a(response, uses);
        }
    };
    struct rank {
        bool is = false;
        index_t length = 0;
        std::uint64_t id = 0;
        template <class A>
        void fields(A& a) {
            a(is, length, id);
        }
    };
    struct half { // the longest first
        std::vector<item> items;
        index_t bytes = 0;
        rank cut; // the first that was displaced: what comes after it has no room, or the order of arrival would count
        template <class A>
        void fields(A& a) {
            a(items, bytes, cut);
        }
    };
    static rank rank_of(const draft_response& r) { return {true, r.length(), r.id}; }
    static bool before(const rank& a, const rank& b) {
        return a.length != b.length ? a.length > b.length : a.id < b.id;
    }
    static bool before(const draft_response& a, const draft_response& b) { return before(rank_of(a), rank_of(b)); }
    static const item* find(const half& h, std::uint64_t id) {
        const auto at =
            std::find_if(h.items.begin(), h.items.end(), [&](const item& x) { return x.response.id == id; });
        return at == h.items.end() ? nullptr : &*at;
    }
    static item* find(half& h, std::uint64_t id) { return const_cast<item*>(find(std::as_const(h), id)); }
    // A row for each token, or for each but the last.
    static bool in_rows(std::size_t bytes, std::size_t tokens) {
        return bytes % tokens == 0 || (tokens > 1 && bytes % (tokens - 1) == 0);
    }
    static void check_hidden(const draft_response& r, const std::vector<std::uint8_t>& hidden) {
        if (!in_rows(hidden.size(), r.tokens.size()))
            throw invalid_input("hidden", "has " + std::to_string(hidden.size()) + " bytes for " +
                                              std::to_string(r.tokens.size()) + " tokens");
    }
    static void insert(half& h, item x) {
        h.bytes += bytes_of(x.response);
        const auto at = std::upper_bound(h.items.begin(), h.items.end(), x,
                                         [](const item& a, const item& b) { return before(a.response, b.response); });
        h.items.insert(at, std::move(x));
    }
    // Keeps the first that fit together; how many go.
    static index_t trim(half& h, index_t room) {
        index_t gone = 0;
        for (; h.bytes > room; ++gone) {
            const draft_response& last = h.items.back().response;
            h.bytes -= bytes_of(last);
            if (!h.cut.is || before(rank_of(last), h.cut)) h.cut = rank_of(last);
            h.items.pop_back();
        }
        return gone;
    }
    index_t previous_room() const {
        return static_cast<index_t>(options_.previous_share * static_cast<double>(options_.most_bytes));
    }
    index_t current_room() const { return options_.most_bytes - previous_.bytes; }
    static std::vector<item*> queue_of(half& h) {
        std::vector<item*> all;
        for (item& x : h.items) all.push_back(&x);
        std::sort(all.begin(), all.end(), [](const item* a, const item* b) {
            return a->uses != b->uses ? a->uses < b->uses : before(a->response, b->response);
        });
        return all;
    }
    static void check_read(const half& h) {
        index_t bytes = 0;
        for (std::size_t i = 0; i < h.items.size(); ++i) {
            const draft_response& r = h.items[i].response;
            if (r.tokens.empty() || !in_rows(r.hidden.size(), r.tokens.size()) || r.first < 0 || r.first > r.length() ||
                h.items[i].uses < 0 || (i > 0 && !before(h.items[i - 1].response, r)))
                throw invalid_input("snapshot", "is of no buffer");
            bytes += bytes_of(r);
        }
        if (bytes != h.bytes) throw invalid_input("snapshot", "counts other bytes than it has");
    }

    draft_buffer_options options_;
    std::int64_t step_ = 0;
    half current_, previous_;
    counters totals_;
};

} // namespace opd::spec
