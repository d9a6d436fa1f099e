// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trees of drafts below a prefix: which children a node gets, how likely each is to be followed, and which nodes are
// worth verifying.
//
//   children     of a node, from the drafter's row of logits z (V), under the target's filter:
//                  keyed    the ids of the k largest z/T - log E, E the noise that the target draws its token with
//                           there (rng.hpp: stream rollout, draw 0, of the sample and the node's position), so that
//                           drafter and target take the same token wherever their laws are alike
//                  greedy   the k largest z
//                ties go to the lower id. With keyed noise, laws that agree are followed always, and others with
//                Σ_v 1/Σ_u max(p_u/p_v, q_u/q_v), where independent draws would be followed with Σ p q.
//   chains       what retrieval says comes next, a child a node; where the tree has that child already, the chain goes
//                on from it
//   rate         of a node: the estimated probability that it is followed, given that its parent is and that it is
//                verified. Counted by depth, by rank among its siblings and by the gap of its score to the best other;
//                of chains by depth and matched length
//   reach        the product of the rates from the root to a node: what verifying the node adds to the expected number
//                of tokens
//   selection    the n nodes of largest reach; rates are below 1, so a node is never there without its parent
//
// Rates are counts that fade, a cell's own shrunk to that of all depths and this to what is usual:
//
//   rate = (followed + w pool) / (tried + w)      pool likewise, with `prior` for pool
//   tried <- tried (1 - 1/memory) + 1             at each trial; `followed` likewise
//
// Only verified nodes whose parent was followed are trials. Memory is allocated as trees become larger than any
// before, then no more.
//
// Exact: nothing that is written depends on drafts (verify.hpp). The filter's cut is that of filter.hpp up to the
// rounding of a sum.
// Sources: Li et al. 2024, EAGLE-2 (trees by cumulated confidence); Daliri et al. 2025 (drafts with
// the target's noise).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/filter.hpp"
#include "opd/rng.hpp"
#include "opd/spec/verify.hpp"
#include "opd/view.hpp"

namespace opd::spec {

/// How fast follow rates forget, and how slowly they leave the prior.
struct follow_rates_options {
    double memory = 200;     ///< trials of a cell that count; at least 1
    double prior_weight = 4; ///< trials that the prior is worth
};

/// How often nodes of a kind are followed. One a drafter; its fields() belong in a checkpoint.
class follow_rates {
public:
    static constexpr std::int32_t depths = 12; ///< deeper nodes count as of the last
    static constexpr std::int32_t ranks = 8;   ///< likewise
    static constexpr std::int32_t levels = 6;  ///< of gaps, and of matched lengths

    explicit follow_rates(const follow_rates_options& o = {})
        : options_(o), cells_(static_cast<std::size_t>(cell_count)) {
        if (!(o.memory >= 1) || !opd::detail::is_finite(o.memory))
            throw invalid_input("memory", "must be finite and at least 1");
        if (!(o.prior_weight > 0) || !opd::detail::is_finite(o.prior_weight))
            throw invalid_input("prior_weight", "must be finite and positive");
    }

    /// The cell of a child by score: depth from 1, rank from 0, gap >= 0 (of rank 0 to the next, of others to rank 0).
    static std::int32_t by_rank(std::int32_t depth, std::int32_t rank, double gap) {
        const std::int32_t level = gap < 0.25 ? 0 : gap < 0.5 ? 1 : gap < 1 ? 2 : gap < 2 ? 3 : gap < 4 ? 4 : 5;
        return (at_most(depth - 1, depths) * ranks + at_most(rank, ranks)) * levels + level;
    }
    /// The cell of the chain's token number `depth`, from 1, where the prefix's last `matched` tokens were found.
    static std::int32_t by_match(std::int32_t depth, std::int32_t matched) {
        const auto level =
            static_cast<std::int32_t>(std::bit_width(static_cast<std::uint32_t>(std::max(matched, 1) - 1)));
        return first_chain + at_most(depth - 1, depths) * levels + at_most(level, levels);
    }
    /// The cell of all children of that depth and rank, whatever their gap (a chain's tokens have rank 0): what is
    /// known of one that is not drafted yet.
    static std::int32_t any_gap(std::int32_t depth, std::int32_t rank) {
        return first_any + at_most(depth - 1, depths) * ranks + at_most(rank, ranks);
    }
    /// What is estimated; in (0, 1).
    double rate(std::int32_t cell) const { return shrunk(known(cell), shrunk(pool_of(cell), prior_of(cell))); }
    /// A verified node of that kind, below a node that was followed, was followed or not.
    void learn(std::int32_t cell, bool followed) {
        count(known(cell), followed);
        count(pool_of(cell), followed);
        if (cell >= first_any) return;
        const std::int32_t any =
            first_any + (cell < first_chain ? cell / levels : (cell - first_chain) / levels * ranks);
        count(any, followed);
        count(pool_of(any), followed);
    }
    /// Trials of this cell that still count.
    double tried(std::int32_t cell) const { return cells_[static_cast<std::size_t>(known(cell))].tried; }
    const follow_rates_options& options() const { return options_; }

    template <class A>
    void fields(A& a) {
        a(cells_);
        if (cells_.size() != static_cast<std::size_t>(cell_count)) throw invalid_input("snapshot", "is of other rates");
        for (const counts& x : cells_)
            if (!(x.followed >= 0 && x.followed <= x.tried && x.tried <= 2 * options_.memory))
                throw invalid_input("snapshot", "is of other rates");
    }

private:
    // cells, and from first_pool on what those of all depths come to
    static constexpr std::int32_t first_chain = depths * ranks * levels, first_any = first_chain + depths * levels,
                                  first_pool = first_any + depths * ranks,
                                  first_chain_pool = first_pool + ranks * levels,
                                  first_any_pool = first_chain_pool + levels, cell_count = first_any_pool + ranks;
    struct counts {
        double tried = 0, followed = 0;
        template <class A>
        void fields(A& a) {
            a(tried, followed);
        }
    };
    static std::int32_t at_most(std::int32_t x, std::int32_t count) { return std::clamp(x, 0, count - 1); }
    static std::int32_t known(std::int32_t cell) {
        if (cell < 0 || cell >= first_pool) throw invalid_input("cell", "there is no cell " + std::to_string(cell));
        return cell;
    }
    static std::int32_t pool_of(std::int32_t cell) {
        return cell < first_chain ? first_pool + cell % (ranks * levels)
               : cell < first_any ? first_chain_pool + (cell - first_chain) % levels
                                  : first_any_pool + (cell - first_any) % ranks;
    }
    // What a drafter that is fairly good comes to, and what a retrieved chain does.
    static double prior_of(std::int32_t cell) {
        constexpr double rank_rates[ranks] = {0.6, 0.15, 0.06, 0.04, 0.02, 0.015, 0.01, 0.01};
        constexpr double match_rates[levels] = {0.3, 0.45, 0.6, 0.75, 0.85, 0.9};
        return cell < first_chain ? rank_rates[cell / levels % ranks]
               : cell < first_any ? match_rates[(cell - first_chain) % levels]
                                  : rank_rates[(cell - first_any) % ranks];
    }
    void count(std::int32_t cell, bool followed) {
        counts& x = cells_[static_cast<std::size_t>(cell)];
        const double kept = 1 - 1 / options_.memory;
        x.tried = x.tried * kept + 1, x.followed = x.followed * kept + (followed ? 1 : 0);
    }
    double shrunk(std::int32_t cell, double to) const {
        const counts& x = cells_[static_cast<std::size_t>(cell)];
        return (x.followed + options_.prior_weight * to) / (x.tried + options_.prior_weight);
    }

    follow_rates_options options_;
    std::vector<counts> cells_;
};

/// How the target takes the token after the prefix: what its drafter should take, too.
struct draft_law {
    opd::filter filter = {};
    bool greedy = false;        ///< the most probable token; the filter and the noise play no part
    std::uint64_t seed = 0;     ///< of the noise, with
    std::uint64_t sample = 0;   ///< the sequence's number in the run and
    std::uint32_t position = 0; ///< that of the token after the prefix: the prefix's length
};

/// A child that a drafter proposes; ties in score go to the lower id.
struct scored_id {
    double score = 0; ///< z/T - log E, or z
    std::int32_t id = -1;
};

/// The best ids of a row, and the memory to find them.
class child_search {
public:
    /// z: (V). The ids of the largest scores, at most `count`, best first; nothing that the filter drops, and nothing
    /// of a logit that is infinite or NaN. No noise: greedy. Valid until the next call.
    template <class Z>
    std::span<const scored_id> best(vector_view<const Z> z, const opd::filter& f, const noise_row* noise,
                                    index_t count);

private:
    static bool before(const scored_id& a, const scored_id& b) {
        return a.score > b.score || (a.score == b.score && a.id < b.id);
    }
    /// Takes x in if it is among the best `count`.
    void offer(const scored_id& x, std::size_t count) {
        if (best_.size() == count) {
            if (!before(x, best_.back())) return;
            best_.pop_back();
        }
        best_.insert(std::upper_bound(best_.begin(), best_.end(), x, before), x);
    }
    void keep_best(std::size_t count) {
        if (count >= kept_.size()) return;
        std::nth_element(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(count), kept_.end(), before);
        kept_.resize(count);
    }
    void keep_share(double top_p, double inv_t);

    std::vector<scored_id> best_, first_, kept_; // kept_: logits and ids that the filter keeps
};

/// A tree of drafts that grows, one a sequence: begin, grow and graft, select, and after verification learn. Nodes
/// are numbered as they come, -1 is the prefix.
class draft_builder {
public:
    /// An empty tree; `rates` is read until the next begin().
    void begin(const follow_rates& rates) { rates_ = &rates, nodes_.clear(), chosen_.clear(), order_.clear(); }

    /// Gives `parent`, that has no such children yet, at most `top_k` children from the drafter's logits after it.
    /// Returns how many.
    template <class Z>
    index_t grow(index_t parent, vector_view<const Z> z, const draft_law& law, index_t top_k);

    /// A retrieved chain below the prefix, of which the last `matched` tokens were found. Returns how many nodes are
    /// new.
    index_t graft(std::span<const std::int32_t> chain, std::int32_t matched);

    /// Nodes without tokens, as a drafter's tree of that shape usually is: `top_k` children of the prefix, then of
    /// the best `top_k` nodes of each depth. Their gains() say what drafting would bring before anything is drafted.
    /// By the rates of the nodes that were verified: where those were chosen by their gap, a little too good. begin()
    /// anew before anything is drafted.
    void imagine(std::int32_t depth, index_t top_k);

    index_t size() const { return static_cast<index_t>(nodes_.size()); }
    std::int32_t parent(index_t n) const { return at(n).parent; }
    std::int32_t token(index_t n) const { return at(n).token; }
    std::int32_t depth(index_t n) const { return n == -1 ? 0 : at(n).depth; }
    double reach(index_t n) const { return n == -1 ? 1 : at(n).reach; }

    /// The nodes of a depth by falling reach, ties to the lower number, as many as `out` has room for: those to grow
    /// next. Returns how many.
    index_t best_of_depth(std::int32_t depth, std::span<index_t> out);

    /// Falling: reaches of all nodes, (size()). What the first, second, … node adds to the expected number of tokens
    /// (draft_budget.hpp).
    std::span<const double> gains();

    /// The `verify` nodes of largest reach, in the order of their numbers. Valid until the tree changes.
    draft_tree select(index_t verify);

    /// The numbers of the selected nodes.
    std::span<const index_t> chosen() const { return chosen_; }

    /// What became of the tree that was selected last: counts its nodes whose parent was followed.
    void learn(follow_rates& rates, const verdict& v);

private:
    struct node {
        std::int32_t parent, token, depth;
        std::int32_t by_rank = -1, by_match = -1; // cells; -1: not drafted so
        double reach = 0;
    };
    const node& at(index_t n) const {
        if (n < 0 || n >= size()) throw invalid_input("node", "there is no node " + std::to_string(n));
        return nodes_[static_cast<std::size_t>(n)];
    }
    bool before(index_t a, index_t b) const {
        const double x = nodes_[static_cast<std::size_t>(a)].reach, y = nodes_[static_cast<std::size_t>(b)].reach;
        return x > y || (x == y && a < b);
    }
    std::int32_t find_child(index_t parent, std::int32_t token) const;
    node& child(index_t parent, std::int32_t token);
    void reckon(std::size_t first);
    void sort_by_reach();

    const follow_rates* rates_ = nullptr;
    std::vector<node> nodes_;
    child_search search_;
    std::vector<index_t> order_, chosen_, place_; // order_: all nodes, best first; place_: of a node among the chosen
    std::vector<double> gains_;
    std::vector<std::int32_t> parents_, tokens_;
    std::vector<char> followed_;
};

// --- implementation -------------------------------------------------------------------------------------------------

/// Of kept_, the fewest best whose share of its mass is at least top_p: halved until the last of them is found.
inline void child_search::keep_share(double top_p, double inv_t) {
    double most = -std::numeric_limits<double>::infinity();
    for (const scored_id& x : kept_) most = std::max(most, x.score);
    const auto mass = [&](auto from, auto to) {
        double sum = 0;
        for (; from != to; ++from) sum += std::exp((from->score - most) * inv_t);
        return sum;
    };
    double wanted = top_p * (1 - 1e-6) * mass(kept_.begin(), kept_.end()); // as draw has it
    auto first = kept_.begin(), last = kept_.end(); // it is among these; `wanted`: less the mass of those before
    while (last - first > 1) {
        const auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, before);
        if (const double better = mass(first, middle); better >= wanted)
            last = middle;
        else
            wanted -= better, first = middle;
    }
    kept_.erase(last, kept_.end());
}

template <class Z>
std::span<const scored_id> child_search::best(vector_view<const Z> z, const opd::filter& f, const noise_row* noise,
                                              index_t count) {
    if (count < 1) throw invalid_input("count", "must be at least 1, not " + std::to_string(count));
    if (z.size > std::numeric_limits<std::int32_t>::max()) throw invalid_input("z", "has more than 2^31 - 1 columns");
    const auto n = static_cast<std::size_t>(count);
    const auto logit = [&](index_t v) { return static_cast<double>(element<Z>::load(z[v])); };
    const auto sound = [](double x) { return opd::detail::is_finite(x) && x > -1e30; }; // which counts as -inf
    best_.clear();
    for (index_t v = 0; v < z.size; ++v)
        if (const double x = logit(v); sound(x) && (best_.size() < n || x > best_.back().score))
            offer({x, static_cast<std::int32_t>(v)}, n);
    if (noise == nullptr || best_.empty()) return best_;

    opd::detail::check_filter(f);
    const double inv_t = 1 / static_cast<double>(f.temperature);
    if (f.cuts()) {
        const double least = f.min_p > 0 ? best_[0].score * inv_t + std::log(static_cast<double>(f.min_p))
                                         : -std::numeric_limits<double>::infinity();
        kept_.clear();
        for (index_t v = 0; v < z.size; ++v)
            if (const double x = logit(v); sound(x) && (x * inv_t >= least || x == best_[0].score))
                kept_.push_back({x, static_cast<std::int32_t>(v)});
        if (f.top_k > 0) keep_best(static_cast<std::size_t>(f.top_k));
        if (f.top_p < 1) keep_share(f.top_p, inv_t);
        if (best_.size() > kept_.size()) best_.resize(kept_.size());
    }
    // the most probable ones first, so that others are soon known to be no better
    first_.assign(best_.begin(), best_.end());
    best_.clear();
    const auto score = [&](double x, std::uint32_t bits) { return gumbel_score(opd::detail::times(x, inv_t), bits); };
    for (const scored_id& x : first_)
        offer({score(x.score, noise->bits(0, static_cast<std::uint32_t>(x.id))), x.id}, n);
    std::uint32_t have = std::numeric_limits<std::uint32_t>::max();
    philox_block four{};
    const auto look = [&](double x, std::int32_t id) {
        const bool full = best_.size() == n;
        const double scaled = x * inv_t;
        if (full && scaled + gumbel_maximum < best_.back().score) return;
        const auto group = static_cast<std::uint32_t>(id) / 4;
        if (have != group) have = group, four = noise->block(0, group);
        const std::uint32_t bits = four.word[static_cast<std::uint32_t>(id) % 4];
        // E >= w > 2^-(zeros + 1)
        if (full && scaled + (std::countl_zero(bits) + 1) * 0.6931471805599454 < best_.back().score) return;
        for (const scored_id& y : first_)
            if (y.id == id) return;
        offer({score(x, bits), id}, n);
    };
    if (f.cuts()) {
        for (const scored_id& x : kept_) look(x.score, x.id);
    } else {
        for (index_t v = 0; v < z.size; ++v)
            if (const double x = logit(v); sound(x)) look(x, static_cast<std::int32_t>(v));
    }
    return best_;
}

inline std::int32_t draft_builder::find_child(index_t parent, std::int32_t token) const {
    for (index_t n = parent + 1; n < size(); ++n) {
        const node& x = nodes_[static_cast<std::size_t>(n)];
        if (x.parent == parent && x.token == token) return static_cast<std::int32_t>(n);
    }
    return -1;
}
inline draft_builder::node& draft_builder::child(index_t parent, std::int32_t token) {
    if (const std::int32_t n = find_child(parent, token); n >= 0) return nodes_[static_cast<std::size_t>(n)];
    nodes_.push_back({static_cast<std::int32_t>(parent), token, depth(parent) + 1});
    return nodes_.back();
}
/// Reaches from node `first` on. Of a node that both say, the better estimate.
inline void draft_builder::reckon(std::size_t first) {
    for (std::size_t n = first; n < nodes_.size(); ++n) {
        node& x = nodes_[n];
        const double a = x.by_rank >= 0 ? rates_->rate(x.by_rank) : 0,
                     b = x.by_match >= 0 ? rates_->rate(x.by_match) : 0;
        x.reach = reach(x.parent) * std::max(a, b);
    }
    order_.clear(), chosen_.clear();
}

template <class Z>
index_t draft_builder::grow(index_t parent, vector_view<const Z> z, const draft_law& law, index_t top_k) {
    if (rates_ == nullptr) throw invalid_input("rates", "are given by begin()");
    if (parent != -1) at(parent);
    if (top_k < 1) throw invalid_input("top_k", "must be at least 1, not " + std::to_string(top_k));
    std::optional<noise_row> noise;
    if (!law.greedy)
        noise.emplace(law.seed, noise_stream::rollout, law.sample,
                      law.position + static_cast<std::uint32_t>(depth(parent)));
    // one more, for the gap of the last
    const std::span<const scored_id> ids = search_.best(z, law.filter, noise ? &*noise : nullptr, top_k + 1);
    const std::size_t count = std::min(ids.size(), static_cast<std::size_t>(top_k));
    std::size_t changed = nodes_.size();
    for (std::size_t r = 0; r < count; ++r) {
        const double gap = r > 0            ? ids[0].score - ids[r].score
                           : ids.size() > 1 ? ids[0].score - ids[1].score
                                            : std::numeric_limits<double>::infinity();
        const std::size_t before = nodes_.size();
        node& x = child(parent, ids[r].id);
        x.by_rank = follow_rates::by_rank(x.depth, static_cast<std::int32_t>(r), gap);
        if (nodes_.size() == before) changed = std::min(changed, static_cast<std::size_t>(&x - nodes_.data()));
    }
    reckon(changed);
    return static_cast<index_t>(count);
}

inline index_t draft_builder::graft(std::span<const std::int32_t> chain, std::int32_t matched) {
    if (rates_ == nullptr) throw invalid_input("rates", "are given by begin()");
    if (matched < 1) throw invalid_input("matched", "must be at least 1, not " + std::to_string(matched));
    const std::size_t before = nodes_.size();
    index_t parent = -1;
    for (const std::int32_t token : chain) {
        node& x = child(parent, token);
        x.by_match = follow_rates::by_match(x.depth, matched);
        parent = static_cast<index_t>(&x - nodes_.data());
    }
    reckon(0);
    return static_cast<index_t>(nodes_.size() - before);
}

inline void draft_builder::imagine(std::int32_t depth, index_t top_k) {
    if (rates_ == nullptr) throw invalid_input("rates", "are given by begin()");
    if (top_k < 1) throw invalid_input("top_k", "must be at least 1, not " + std::to_string(top_k));
    const auto width = static_cast<std::size_t>(top_k);
    nodes_.clear();
    chosen_.assign(1, -1); // of the depth above
    for (std::int32_t d = 1; d <= depth; ++d) {
        for (const index_t p : chosen_)
            for (index_t r = 0; r < top_k; ++r)
                nodes_.push_back({static_cast<std::int32_t>(p), -1, d,
                                  follow_rates::any_gap(d, static_cast<std::int32_t>(r)), -1,
                                  reach(p) * rates_->rate(follow_rates::any_gap(d, static_cast<std::int32_t>(r)))});
        chosen_.resize(width);
        chosen_.resize(static_cast<std::size_t>(best_of_depth(d, chosen_)));
    }
    order_.clear(), chosen_.clear();
}

inline index_t draft_builder::best_of_depth(std::int32_t depth, std::span<index_t> out) {
    place_.clear();
    for (index_t n = 0; n < size(); ++n)
        if (nodes_[static_cast<std::size_t>(n)].depth == depth) place_.push_back(n);
    const std::size_t count = std::min(out.size(), place_.size());
    const auto end = place_.begin() + static_cast<std::ptrdiff_t>(count);
    std::partial_sort(place_.begin(), end, place_.end(), [&](index_t a, index_t b) { return before(a, b); });
    std::copy(place_.begin(), end, out.begin());
    return static_cast<index_t>(count);
}

inline void draft_builder::sort_by_reach() {
    if (order_.size() == nodes_.size()) return;
    order_.resize(nodes_.size());
    for (std::size_t n = 0; n < order_.size(); ++n) order_[n] = static_cast<index_t>(n);
    std::sort(order_.begin(), order_.end(), [&](index_t a, index_t b) { return before(a, b); });
}

inline std::span<const double> draft_builder::gains() {
    sort_by_reach();
    gains_.clear();
    for (const index_t n : order_) gains_.push_back(nodes_[static_cast<std::size_t>(n)].reach);
    return gains_;
}

inline draft_tree draft_builder::select(index_t verify) {
    if (verify < 0) throw invalid_input("verify", "must be at least 0, not " + std::to_string(verify));
    sort_by_reach();
    chosen_.assign(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(std::min(verify, size())));
    std::sort(chosen_.begin(), chosen_.end());
    place_.assign(nodes_.size(), -1);
    parents_.clear(), tokens_.clear();
    for (const index_t n : chosen_) {
        const node& x = nodes_[static_cast<std::size_t>(n)];
        place_[static_cast<std::size_t>(n)] = static_cast<index_t>(parents_.size());
        parents_.push_back(x.parent < 0 ? -1 : static_cast<std::int32_t>(place_[static_cast<std::size_t>(x.parent)]));
        tokens_.push_back(x.token);
    }
    return {parents_, tokens_};
}

inline void draft_builder::learn(follow_rates& rates, const verdict& v) {
    if (v.node < -1 || v.node >= static_cast<index_t>(chosen_.size()))
        throw invalid_input("verdict", "is not of the tree that was selected last");
    followed_.assign(chosen_.size(), 0);
    for (index_t n = v.node; n >= 0; n = parents_[static_cast<std::size_t>(n)])
        followed_[static_cast<std::size_t>(n)] = 1;
    for (std::size_t n = 0; n < chosen_.size(); ++n) {
        const std::int32_t p = parents_[n];
        if (p >= 0 && followed_[static_cast<std::size_t>(p)] == 0) continue;
        const node& x = nodes_[static_cast<std::size_t>(chosen_[n])];
        if (x.by_rank >= 0) rates.learn(x.by_rank, followed_[n] != 0);
        if (x.by_match >= 0) rates.learn(x.by_match, followed_[n] != 0);
    }
}

} // namespace opd::spec
