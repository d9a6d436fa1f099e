// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Verification of drafted tokens: which of them the target accepts, and which token comes after them. What is written
// is distributed exactly as if the target had drawn every token itself.
//
// Drafts are a tree below the last token of a prefix (a chain is a tree where every node has one child). p_n: the
// target's distribution after node n, with the temperature, filters and penalties of plain decoding; node -1 is the
// prefix. From the root on, at node n with children x_1, x_2, … in the order in which they were drafted, P = p_n:
//
//   kind                  a child x is followed with   after x was refused                       drafts are
//   one_hot               P(x)                         P(x) = 0, normalised                      any distinct tokens
//   dense                 min(1, p(x)/q(x))            (p - q)₊, normalised                      one a node, from q
//   iid_siblings          min(1, P(x)/q(x))            P = (P - q)₊, normalised                  from q each
//   without_replacement   min(1, P(x)/q(x))            likewise, then q(x) = 0, normalised       from q, without
//                                                                                                those before
//
// Tokens of one_hot are any that P's coins had no part in.
// If no child is accepted, the next token is drawn from P, and that is the end; likewise at a node without children.
// How drafts were drawn is part of their type. Siblings that were drawn in one way and judged in another are biased (by
// up to 0.03 in total variation on four tokens); an argmax that is judged as if drawn from its softmax is off by 0.3.
//
//   follow          the target draws its own token at each node, and goes on while that token is a child: exact for any
//                   drafts. With keyed noise (rng.hpp) the token is that of plain decoding, so the text is the same bit
//                   for bit, not only in distribution
//   verify          the rules above
//   verify_block    chains of `dense`: rho_i = min(1, rho_{i-1} p_i(x_i)/q_i(x_i)), M_i = Σ (rho_i p_{i+1} - q_{i+1})₊,
//                   h_i = M_i/(M_i + 1 - rho_i), the last one rho. Accepted up to the last i that is taken with h_i;
//                   the next token from (rho_i p_{i+1} - q_{i+1})₊. In the mean it accepts no fewer than `verify`
//
// Why it is exact. One token: draw x from q and follow it with probability min(1, P(x)/q(x)); if x is refused, draw
// from R = (P - q)₊ / Σ (P - q)₊. Then v is written with probability min(P(v), q(v)) + (1 - Σ min(P, q)) R(v) = P(v).
// Siblings: after a refusal the next one must write R. It does, by the same statement, if its distribution given the
// earlier siblings is known: q, or q without the earlier tokens. R does not depend on which token was refused. A token
// that was not drawn is followed with P(x), and else the token comes from P without x. Trees: below the followed child
// the same holds with the longer prefix and fresh coins. follow: with keyed noise the token that plain decoding writes
// after a text is a function of the text; `follow` asks each node for it, goes on where it is a child, else writes it
// and stops, so by induction the texts are equal. verify_block: the theorem of its source.
//
// Sources: Leviathan et al. 2023 and Chen et al. 2023 (dense); Miao et al. 2024, SpecInfer (iid_siblings); Chen et
// al. 2024, Sequoia, and Yang et al. 2024 (without_replacement); Li et al. 2024, EAGLE (one_hot); Sun et al. 2024,
// "Block verification accelerates speculative decoding" (verify_block).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/rng.hpp"
#include "opd/view.hpp"

namespace opd::spec {

/// Where chance comes from: accept(p) is true with probability p; draw(w) is i with probability w_i / Σ w. Asked anew
/// for every decision.
template <class C>
concept coins = requires(C& c, double p, std::span<const double> w) {
    { c.accept(p) } -> std::same_as<bool>;
    { c.draw(w) } -> std::convertible_to<index_t>;
};

/// Coins that are a function of (seed, sample, position) and of how many were asked for.
class keyed_coins {
public:
    keyed_coins(std::uint64_t seed, std::uint64_t sample, std::uint32_t position)
        : coin_(seed, noise_stream::coin, sample, position), residual_(seed, noise_stream::residual, sample, position) {
    }
    bool accept(double p) { return keyed_uniform(coin_, asked_++) < p; }
    index_t draw(std::span<const double> w) {
        double sum = 0;
        for (const double x : w) sum += x;
        double left = keyed_uniform(residual_, asked_++) * sum;
        index_t last = -1;
        for (std::size_t i = 0; i < w.size(); ++i) {
            if (!(w[i] > 0)) continue;
            last = static_cast<index_t>(i);
            if ((left -= w[i]) < 0) break;
        }
        return last;
    }

private:
    noise_row coin_, residual_;
    std::uint32_t asked_ = 0;
};

/// Drafted tokens below a prefix. `parents`: of each node, an earlier one, or -1 for the prefix. Children of a node
/// are in the order in which they were drafted.
struct draft_tree {
    std::span<const std::int32_t> parents; ///< (n)
    std::span<const std::int32_t> tokens;  ///< (n)
    index_t size() const { return static_cast<index_t>(tokens.size()); }
};

// How they were drawn.
/// Drafts that no law has drawn: retrieval, or an argmax.
struct one_hot {};
/// One child a node, drawn from q (n + 1, V): row n + 1 is of node n's child, row 0 of the prefix's. Rows of nodes
/// without children are not read, here and below.
template <class T = float>
struct dense {
    matrix_view<const T> q;
};
/// Any number of children a node, each drawn from its row of q (n + 1, V), with replacement.
template <class T = float>
struct iid_siblings {
    matrix_view<const T> q;
};
/// Any number of children a node, each drawn from its row of q (n + 1, V) without the siblings before it.
template <class T = float>
struct without_replacement {
    matrix_view<const T> q;
};

namespace detail {
template <class Kind>
inline constexpr bool is_proposal = false;
template <>
inline constexpr bool is_proposal<one_hot> = true;
template <class T>
inline constexpr bool is_proposal<dense<T>> = true;
template <class T>
inline constexpr bool is_proposal<iid_siblings<T>> = true;
template <class T>
inline constexpr bool is_proposal<without_replacement<T>> = true;
} // namespace detail

/// One of the four, exactly: what derives from one, a bare matrix or a number says nothing of how drafts were drawn.
template <class Kind>
concept proposal = detail::is_proposal<Kind>;

/// What is written: the tokens of the nodes on the way to `node`, then `next`.
struct verdict {
    index_t accepted = 0; ///< drafted tokens that are followed
    index_t node = -1;    ///< the last of them; -1: none
    std::int32_t next = -1;
};

/// Memory of verify(): allocates at its first use, and where V grows.
class verification {
public:
    /// p: (n + 1, V), rows as those of q; probabilities, which need not add up to 1 exactly. A row whose residual is
    /// 0 (p = q, up to rounding) is drawn from p. Throws invalid_input for shapes that differ, trees that are none,
    /// and rows on the way that are no law.
    template <class P, proposal Kind, coins Coins>
    verdict verify(const draft_tree& tree, matrix_view<const P> p, const Kind& drafts, Coins& coins);

    /// tree: a chain.
    template <class P, class T, coins Coins>
    verdict verify_block(const draft_tree& tree, matrix_view<const P> p, const dense<T>& drafts, Coins& coins);

private:
    std::vector<double> target_, draft_; // (V) P and q, as they are now
};

/// `own(row)`: the token that the target draws after that node (row 0: the prefix, row n + 1: node n). Asked only
/// where it matters.
template <class Own>
verdict follow(const draft_tree& tree, Own&& own);

/// The same, told one by one what the target draws; for callers who draw for many sequences at once. The tree's
/// memory stays the caller's.
class follower {
public:
    follower() = default; ///< without drafts
    /// Throws invalid_input for a tree that is none.
    explicit follower(const draft_tree& tree);
    /// The row that the next token is drawn from: 0 the prefix's, n + 1 node n's.
    index_t row() const { return found_.node + 1; }
    /// The target drew `token` there. Whether it was drafted, so that there is a row to draw from after it.
    bool take(std::int32_t token);
    const verdict& found() const { return found_; }

private:
    draft_tree tree_ = {};
    verdict found_ = {};
};

/// Follows the drafts of a batch, with one draw a round for all sequences that go on: as many rounds as the longest
/// way has tokens. Memory is kept from call to call.
class batch_follower {
public:
    struct due {
        index_t sequence;
        index_t row; ///< of this sequence's laws
    };
    /// draw(std::span<const due>, std::span<std::int32_t>) writes the token that the target draws from each of these
    /// rows, ascending by sequence; where it returns false it has drawn nothing, and the call ends where all sequences
    /// are. ends(sequence): whether the token that was drawn is the text's last, whatever was drafted behind it.
    /// Returns one verdict a tree, good until the next call. Throws invalid_input, before it draws, for a tree that is
    /// none.
    template <class Draw, class Ends>
    std::span<const verdict> follow(std::span<const draft_tree> trees, Draw&& draw, Ends&& ends);
    template <class Draw>
    std::span<const verdict> follow(std::span<const draft_tree> trees, Draw&& draw) {
        return follow(trees, std::forward<Draw>(draw), [](index_t) { return false; });
    }

private:
    std::vector<follower> at_;
    std::vector<due> due_;
    std::vector<std::int32_t> drawn_;
    std::vector<verdict> verdicts_;
};

// --- implementation -------------------------------------------------------------------------------------------------

namespace detail {

inline void check(const draft_tree& t) {
    if (t.parents.size() != t.tokens.size())
        throw invalid_input("tree", "has " + std::to_string(t.parents.size()) + " parents of " +
                                        std::to_string(t.tokens.size()) + " tokens");
    for (std::size_t n = 0; n < t.parents.size(); ++n)
        if (t.parents[n] < -1 || t.parents[n] >= static_cast<std::int32_t>(n))
            throw invalid_input("tree",
                                "the parent of a node is an earlier one or -1, not " + std::to_string(t.parents[n]),
                                static_cast<index_t>(n));
}
inline void check_tokens(const draft_tree& t, index_t v) {
    for (std::size_t n = 0; n < t.tokens.size(); ++n)
        if (t.tokens[n] < 0 || t.tokens[n] >= v)
            throw invalid_input("tree",
                                "token " + std::to_string(t.tokens[n]) + " of a vocabulary of " + std::to_string(v),
                                static_cast<index_t>(n));
}
template <class T>
void check_laws(const char* name, matrix_view<const T> x, const draft_tree& t, index_t v) {
    if (x.rows != t.size() + 1 || x.cols != v)
        throw invalid_input(name, "must be (" + std::to_string(t.size() + 1) + ", " + std::to_string(v) + "), not (" +
                                      std::to_string(x.rows) + ", " + std::to_string(x.cols) + ")");
}
/// The next child of `node` after `at`; the tree's size: there is none.
inline index_t next_child(const draft_tree& t, index_t node, index_t at) {
    for (++at; at < t.size(); ++at)
        if (t.parents[static_cast<std::size_t>(at)] == node) break;
    return at;
}
inline double sum_of(std::span<const double> x) {
    double sum = 0;
    for (const double v : x) sum += v;
    return sum;
}
inline void normalise(std::span<double> x, double sum) {
    for (double& v : x) v /= sum;
}
// A row as a law that adds up to 1.
template <class T>
void read(const char* name, matrix_view<const T> from, index_t row, std::vector<double>& to) {
    to.resize(static_cast<std::size_t>(from.cols));
    double sum = 0;
    bool law = true;
    for (index_t v = 0; v < from.cols; ++v) {
        const auto x = static_cast<double>(from(row, v));
        to[static_cast<std::size_t>(v)] = x;
        law = law && x >= 0;
        sum += x;
    }
    if (!law || !opd::detail::is_finite(sum) || !(sum > 0))
        throw invalid_input(name, "is no law: probabilities are at least 0, and not all of them are 0", row);
    normalise(to, sum);
}

template <class Kind>
inline constexpr bool reads_q = requires(const Kind& k) {
    k.q;
};
template <class Kind>
inline constexpr bool one_child = false;
template <class T>
inline constexpr bool one_child<dense<T>> = true;
template <class Kind>
inline constexpr bool replaces = true;
template <class T>
inline constexpr bool replaces<without_replacement<T>> = false;

} // namespace detail

template <class P, proposal Kind, coins Coins>
verdict verification::verify(const draft_tree& tree, matrix_view<const P> p, const Kind& drafts, Coins& coins) {
    constexpr bool drawn = detail::reads_q<Kind>;
    detail::check(tree);
    detail::check_laws("p", p, tree, p.cols);
    detail::check_tokens(tree, p.cols);
    if constexpr (drawn) detail::check_laws("q", drafts.q, tree, p.cols);
    if constexpr (detail::one_child<Kind>)
        for (index_t n = -1; n < tree.size(); ++n) {
            const index_t first = detail::next_child(tree, n, n);
            if (first < tree.size() && detail::next_child(tree, n, first) < tree.size())
                throw invalid_input("tree", "dense drafts are one a node: siblings are iid or without replacement", n);
        }
    verdict r;
    for (;;) {
        detail::read("p", p, r.node + 1, target_);
        index_t child = detail::next_child(tree, r.node, r.node);
        if constexpr (drawn)
            if (child < tree.size()) detail::read("q", drafts.q, r.node + 1, draft_);
        for (; child < tree.size(); child = detail::next_child(tree, r.node, child)) {
            const auto x = static_cast<std::size_t>(tree.tokens[static_cast<std::size_t>(child)]);
            double ratio = target_[x];
            if constexpr (drawn)
                ratio = draft_[x] > 0 ? std::min(1.0, ratio / draft_[x]) : 0; // it cannot have been drawn
            if (coins.accept(ratio)) break;
            if constexpr (drawn) {
                double left = 0;
                for (std::size_t v = 0; v < target_.size(); ++v) left += std::max(target_[v] - draft_[v], 0.0);
                if (left > 0) { // else P = q, and what is refused is so by rounding
                    for (std::size_t v = 0; v < target_.size(); ++v)
                        target_[v] = std::max(target_[v] - draft_[v], 0.0) / left;
                }
                if constexpr (!detail::replaces<Kind>) {
                    draft_[x] = 0;
                    if (const double sum = detail::sum_of(draft_); sum > 0) detail::normalise(draft_, sum);
                }
            } else {
                const double refused = std::exchange(target_[x], 0.0);
                if (const double sum = detail::sum_of(target_); sum > 0)
                    detail::normalise(target_, sum);
                else
                    target_[x] = refused;
            }
        }
        if (child == tree.size()) {
            r.next = static_cast<std::int32_t>(coins.draw(target_));
            return r;
        }
        r.node = child;
        ++r.accepted;
    }
}

template <class P, class T, coins Coins>
verdict verification::verify_block(const draft_tree& tree, matrix_view<const P> p, const dense<T>& drafts,
                                   Coins& coins) {
    detail::check(tree);
    detail::check_laws("p", p, tree, p.cols);
    detail::check_laws("q", drafts.q, tree, p.cols);
    detail::check_tokens(tree, p.cols);
    for (index_t n = 0; n < tree.size(); ++n)
        if (tree.parents[static_cast<std::size_t>(n)] != n - 1) throw invalid_input("tree", "a block is a chain", n);
    // Σ (rho p - q)₊ of the row after i tokens
    const auto residual = [&](index_t i, double rho) {
        detail::read("p", p, i, target_);
        detail::read("q", drafts.q, i, draft_);
        double sum = 0;
        for (std::size_t v = 0; v < target_.size(); ++v)
            sum += target_[v] = std::max(rho * target_[v] - draft_[v], 0.0);
        return sum;
    };
    verdict r;
    double rho = 1, best = 1; // best: rho where it was taken last
    for (index_t i = 1; i <= tree.size(); ++i) {
        const auto x = static_cast<std::size_t>(tree.tokens[static_cast<std::size_t>(i - 1)]);
        detail::read("p", p, i - 1, target_);
        detail::read("q", drafts.q, i - 1, draft_);
        rho = draft_[x] > 0 ? std::min(1.0, rho * target_[x] / draft_[x]) : 0;
        double h = rho;
        if (i < tree.size()) {
            const double m = residual(i, rho), under = m + 1 - rho;
            h = under > 0 ? m / under : 1;
        }
        if (coins.accept(std::min(1.0, h))) r.accepted = i, best = rho;
    }
    r.node = r.accepted - 1;
    if (r.accepted == tree.size() || !(residual(r.accepted, best) > 0)) detail::read("p", p, r.accepted, target_);
    r.next = static_cast<std::int32_t>(coins.draw(target_));
    return r;
}

inline follower::follower(const draft_tree& tree) : tree_(tree) { detail::check(tree); }

inline bool follower::take(std::int32_t token) {
    found_.next = token;
    index_t child = detail::next_child(tree_, found_.node, found_.node);
    while (child < tree_.size() && tree_.tokens[static_cast<std::size_t>(child)] != token)
        child = detail::next_child(tree_, found_.node, child);
    if (child == tree_.size()) return false;
    found_.node = child;
    ++found_.accepted;
    return true;
}

template <class Own>
verdict follow(const draft_tree& tree, Own&& own) {
    follower f(tree);
    while (f.take(static_cast<std::int32_t>(own(f.row())))) {}
    return f.found();
}

template <class Draw, class Ends>
std::span<const verdict> batch_follower::follow(std::span<const draft_tree> trees, Draw&& draw, Ends&& ends) {
    at_.clear(), due_.clear();
    for (const draft_tree& tree : trees) {
        due_.push_back({static_cast<index_t>(at_.size()), 0});
        at_.emplace_back(tree);
    }
    while (!due_.empty()) {
        drawn_.resize(due_.size());
        const std::span<const due> rows(due_);
        if constexpr (std::is_same_v<decltype(draw(rows, std::span(drawn_))), bool>) {
            if (!draw(rows, std::span(drawn_))) break;
        } else {
            draw(rows, std::span(drawn_));
        }
        std::size_t go_on = 0;
        for (std::size_t i = 0; i < due_.size(); ++i) {
            const index_t n = due_[i].sequence;
            follower& f = at_[static_cast<std::size_t>(n)];
            if (f.take(drawn_[i]) && !ends(n)) due_[go_on++] = {n, f.row()};
        }
        due_.resize(go_on);
    }
    verdicts_.clear();
    for (const follower& f : at_) verdicts_.push_back(f.found());
    return verdicts_;
}

} // namespace opd::spec
