// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Repetition, presence and frequency penalties (filter.hpp has the formulas): what a text has already, and the row of
// logits that follows from it.
//
//   token_history h;                     // one a sequence
//   h.add_prompt(prompt);
//   …
//   apply_penalties(z, h, p, out);       // (V) to (V), before draw
//   h.add(drawn);
//
// Everything else reads `out`: draw, and so log mu and kept sets; verification, at each node with the history of its
// path (add on the way down, remove on the way back); the drafter's own row likewise, so that it drafts what the
// target may draw.
//
// log mu is that of the penalised law. So a learner that scores the token must penalise its own logits by the history
// that the token was drawn after, or its ratio compares two laws that are different at one and the same weights:
// `apply_penalties` on a copy of its row, the loss on that, and `penalties_pullback` for the gradient with respect to
// the row itself.
//
// Exact: every entry is rounded once, to the element type of `out`, or of dz; a finite one stays finite. The result
// depends on the row and the history as a set with counts, not on the order of additions and removals.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/filter.hpp"
#include "opd/view.hpp"

namespace opd {

/// Which ids a text has, and how often its answer has them. Time O(1) a token, memory by the number of different ids.
class token_history {
public:
    struct entry {
        std::int32_t id = 0;
        std::int32_t of_prompt = 0; ///< times that the prompt has it
        std::int32_t count = 0;     ///< times that the answer has it
    };

    void clear() {
        entries_.clear();
        std::fill(index_.begin(), index_.end(), none);
    }
    void add_prompt(std::span<const std::int32_t> tokens) {
        for (const std::int32_t t : tokens) ++at(t).of_prompt;
    }
    void add(std::int32_t token) { ++at(token).count; }
    /// Takes back one add().
    void remove(std::int32_t token) {
        const std::uint32_t e = find(token);
        if (e == none || entries_[e].count == 0)
            throw invalid_input("token", "the answer does not have " + std::to_string(token));
        --entries_[e].count;
    }
    index_t count(std::int32_t token) const {
        const std::uint32_t e = find(token);
        return e == none ? 0 : entries_[e].count;
    }
    /// Every id that there ever was, in the order in which they came; some may have been taken back: both numbers are
    /// 0.
    std::span<const entry> entries() const { return entries_; }

private:
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
    std::size_t slot(std::int32_t id) const {
        const std::size_t mask = index_.size() - 1;
        std::size_t at = (static_cast<std::uint32_t>(id) * 0x9e3779b1u >> 7) & mask;
        while (index_[at] != none && entries_[index_[at]].id != id) at = (at + 1) & mask;
        return at;
    }
    std::uint32_t find(std::int32_t id) const { return index_.empty() ? none : index_[slot(id)]; }
    entry& at(std::int32_t id) {
        if (const std::uint32_t e = find(id); e != none) return entries_[e];
        if (2 * (entries_.size() + 1) > index_.size()) {
            index_.assign(std::max<std::size_t>(64, 2 * index_.size()), none);
            for (std::uint32_t e = 0; e < entries_.size(); ++e) index_[slot(entries_[e].id)] = e;
        }
        index_[slot(id)] = static_cast<std::uint32_t>(entries_.size());
        entries_.push_back({id, 0, 0});
        return entries_.back();
    }

    std::vector<entry> entries_;
    std::vector<std::uint32_t> index_; // of entries, by id; open addressing
};

namespace detail {

inline void check_penalties(const penalties& p) {
    if (!is_finite(p.repetition) || !(p.repetition > 0))
        throw invalid_input("penalties.repetition", "must be finite and positive; 1: none");
    if (!is_finite(p.presence)) throw invalid_input("penalties.presence", "must be finite; 0: none");
    if (!is_finite(p.frequency)) throw invalid_input("penalties.frequency", "must be finite; 0: none");
}
inline void check_history(const token_history& h, index_t v) {
    for (const token_history::entry& e : h.entries())
        if (e.id < 0 || e.id >= v)
            throw invalid_input("history", "id " + std::to_string(e.id) + " of a row of " + std::to_string(v));
}
/// f(entry) of each id that the text has.
template <class F>
void each_penalised(const token_history& h, F&& f) {
    for (const token_history::entry& e : h.entries())
        if (e.of_prompt > 0 || e.count > 0) f(e);
}

} // namespace detail

/// out: (V), the logits z (V) with the penalties of what the text has. May be z itself.
template <class Z, class Out>
void apply_penalties(vector_view<const Z> z, const token_history& history, const penalties& p, vector_view<Out> out) {
    detail::check_penalties(p);
    if (z.size != out.size)
        throw invalid_input("out", "has " + std::to_string(out.size) + " columns, not " + std::to_string(z.size));
    const auto load = [](const auto& x) {
        return static_cast<double>(element<std::remove_cvref_t<decltype(x)>>::load(x));
    };
    const auto store =
        [](double x) { // a finite logit becomes neither an infinity nor the least number, which is a mask
            constexpr double most = detail::largest_stored<Out>, below = most * (1 - 0x1p-10);
            if (detail::is_finite(x) && (x > most || x < -most)) x = x < 0 ? -below : below;
            return element<Out>::store(static_cast<typename element<Out>::arithmetic>(x));
        };
    detail::check_history(history, z.size);
    if (static_cast<const void*>(z.data) != static_cast<const void*>(out.data))
        for (index_t v = 0; v < z.size; ++v) out[v] = store(load(z[v]));
    if (!p.any()) return;
    detail::each_penalised(history,
                           [&](const token_history::entry& e) { out[e.id] = store(p.of(load(z[e.id]), e.count)); });
}

/// dz: (V), the gradient with respect to what apply_penalties wrote from the logits z (V); becomes that with respect
/// to z.
template <class Z, class G>
void penalties_pullback(vector_view<const Z> z, const token_history& history, const penalties& p, vector_view<G> dz) {
    detail::check_penalties(p);
    if (z.size != dz.size)
        throw invalid_input("dz", "has " + std::to_string(dz.size) + " columns, not " + std::to_string(z.size));
    detail::check_history(history, z.size);
    if (p.repetition == 1) return;
    detail::each_penalised(history, [&](const token_history::entry& e) {
        const double g = static_cast<double>(element<G>::load(dz[e.id]));
        const double slope = p.slope(static_cast<double>(element<Z>::load(z[e.id])));
        dz[e.id] = detail::store_finite<G>(g * slope);
    });
}

} // namespace opd
