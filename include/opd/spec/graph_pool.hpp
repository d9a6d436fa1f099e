// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which graphs of launches a speculative rollout captures, when, and what they cost in memory: a planner, and the books
// of a pool that follows it. No device is needed; captured_graphs.hpp captures, launches and destroys as it says.
//
//   bucket   batches are rounded up to the next of `buckets`; beyond the last there is no graph
//   target   one graph a (bucket, tokens a sequence): tokens = verify + 1, the drafted ones and the one before them;
//            1 for plain decoding
//   draft    one graph a (bucket, top-k, depth); none for plain decoding
//   merged   uses that need the same key share one graph: arms that verify equally much have one target graph, arms
//            that draft alike one draft graph. Captured apart, target and draft graphs add where they would multiply
//
//   graph_plan p = plan_graphs(uses, buckets, bytes_of, budget);      p.graphs[i].at_start, p.bytes_at_start
//   graph_pool pool(p, bytes_of);
//   const graph_step s = pool.use(batch, arm);      drop s.drop, capture s.capture, then launch what is said of each
//
// At start: the graphs of most worth a byte (worth: the shares of the uses that need it), as long as they fit into the
// budget; or the single one of most worth, if that is more. This is at least half of what any choice within the budget
// is worth. The rest is captured on demand, at its `capture_after`-th use, into what the budget leaves; for want of
// room the one that was used longest ago goes, of those that were captured on demand. What does not fit at all runs
// without a graph.
//
// Bytes are integers, of the caller: measured, or `linear_graph_bytes`. Time of plan_graphs: uses · buckets, and n log
// n in its keys; of use(): the number of graphs on demand. Ties go to the lower key.
//
// Errors: invalid_input: `buckets` (none, or not rising from at least 1), `uses` with its number (a range that is none,
// a share below 0, an arm without depth), `budget`, `bytes_of` (less than 1), `batch`, `arm`, `capture_after`.
//
// Source: TLT section 5.1 (bucketed CUDAGraph capture), figure 10, table 5.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/spec/tuner.hpp"

namespace opd::spec {

/// Whose launches a graph holds: the target's or the drafter's.
enum class graph_kind : std::uint8_t { target, draft };

/// What tells two graphs apart; uses of equal keys share one. Members of the other kind stay 0.
struct graph_key {
    graph_kind kind = graph_kind::target;
    index_t batch = 1;                 ///< the bucket
    std::int32_t tokens = 0;           ///< target: a sequence
    std::int32_t top_k = 0, depth = 0; ///< draft
    auto operator<=>(const graph_key&) const = default;
};

/// Device memory that a graph takes, in bytes, at least 1: measured, or linear_graph_bytes.
using graph_bytes = std::function<index_t(const graph_key&)>;

/// Straight lines: what any graph costs, and what a row of it does (target: batch · tokens rows; draft: batch · top-k
/// at each depth).
struct linear_graph_bytes {
    index_t target = 0, target_row = 0, draft = 0, draft_row = 0;
    index_t operator()(const graph_key& k) const {
        return k.kind == graph_kind::target ? target + target_row * k.batch * k.tokens
                                            : draft + draft_row * k.batch * k.top_k * k.depth;
    }
};

/// An arm, or plain decoding, at batches from `first` to `last`.
struct graph_use {
    strategy arm = {};
    index_t first = 1;
    index_t last = 0; ///< 0: no end
    double share = 1; ///< of the steps at such a batch that are expected to be of it
};

/// One graph of a plan: its memory, and the share of steps that need it.
struct planned_graph {
    graph_key key;
    index_t bytes = 0;
    std::vector<std::int32_t> uses = {}; ///< that share it, rising
    double worth = 0;
    bool at_start = false; ///< else on demand
};

/// All graphs that the uses need, and which of them are captured at start.
struct graph_plan {
    std::vector<planned_graph> graphs; ///< by key
    std::vector<index_t> buckets;
    index_t budget = 0;
    index_t bytes = 0, bytes_at_start = 0; ///< of all; of those
    const planned_graph* find(const graph_key& k) const {
        const auto at = std::lower_bound(graphs.begin(), graphs.end(), k,
                                         [](const planned_graph& g, const graph_key& key) { return g.key < key; });
        return at != graphs.end() && at->key == k ? &*at : nullptr;
    }
};

/// The bucket of a batch; 0: it is beyond the last.
inline index_t bucket_of(std::span<const index_t> buckets, index_t batch) {
    const auto at = std::lower_bound(buckets.begin(), buckets.end(), batch);
    return at == buckets.end() ? 0 : *at;
}
/// What a step of this arm launches at this bucket, the target's first.
inline std::vector<graph_key> graph_keys(const strategy& arm, index_t bucket) {
    std::vector<graph_key> keys{{graph_kind::target, bucket, arm.verify + 1, 0, 0}};
    if (!arm.none()) keys.push_back({graph_kind::draft, bucket, 0, arm.top_k, arm.depth});
    return keys;
}

namespace detail {
inline void check_buckets(std::span<const index_t> buckets) {
    if (buckets.empty()) throw invalid_input("buckets", "there is none");
    for (std::size_t i = 0; i < buckets.size(); ++i)
        if (buckets[i] < 1 || (i > 0 && buckets[i] <= buckets[i - 1]))
            throw invalid_input("buckets", "are at least 1 and rise", static_cast<index_t>(i));
}
inline void check_arm(const char* argument, const strategy& arm, index_t row = -1) {
    if (arm.verify < 0 || arm.depth < 0 || arm.top_k < 0 || (!arm.none() && (arm.depth < 1 || arm.top_k < 1)))
        throw invalid_input(argument, "an arm that verifies has a depth and a top-k of at least 1", row);
}
inline index_t checked_bytes(const graph_bytes& bytes_of, const graph_key& k) {
    const index_t n = bytes_of(k);
    if (n < 1 || n > (index_t{1} << 50)) throw invalid_input("bytes_of", "says " + std::to_string(n));
    return n;
}
} // namespace detail

/// The plan for these uses within `budget` bytes; at start at least half of the worth that any choice could have.
inline graph_plan plan_graphs(std::span<const graph_use> uses, std::span<const index_t> buckets,
                              const graph_bytes& bytes_of, index_t budget) {
    detail::check_buckets(buckets);
    if (budget < 0) throw invalid_input("budget", "must be at least 0");
    std::map<graph_key, planned_graph> keys;
    for (std::size_t u = 0; u < uses.size(); ++u) {
        const graph_use& x = uses[u];
        const auto row = static_cast<index_t>(u);
        detail::check_arm("uses", x.arm, row);
        if (x.first < 1 || (x.last != 0 && x.last < x.first)) throw invalid_input("uses", "a range of no batch", row);
        if (!(x.share >= 0) || !opd::detail::is_finite(x.share))
            throw invalid_input("uses", "a share is finite and at least 0", row);
        index_t below = 0; // the bucket takes batches from below + 1
        for (const index_t b : buckets) {
            const bool needed = x.first <= b && (x.last == 0 || x.last > below);
            below = b;
            if (!needed) continue;
            for (const graph_key& k : graph_keys(x.arm, b)) {
                planned_graph& g = keys[k];
                g.key = k;
                g.uses.push_back(static_cast<std::int32_t>(u));
                g.worth += x.share;
            }
        }
    }
    graph_plan p;
    p.buckets.assign(buckets.begin(), buckets.end());
    p.budget = budget;
    for (auto& [k, g] : keys) {
        g.bytes = detail::checked_bytes(bytes_of, k);
        p.bytes += g.bytes;
        p.graphs.push_back(std::move(g));
    }
    std::vector<planned_graph*> order;
    for (planned_graph& g : p.graphs) order.push_back(&g);
    std::sort(order.begin(), order.end(), [](const planned_graph* a, const planned_graph* b) {
        const double x = a->worth / static_cast<double>(a->bytes), y = b->worth / static_cast<double>(b->bytes);
        return x != y ? x > y : a->key < b->key;
    });
    double worth = 0;
    planned_graph* best = nullptr;
    for (planned_graph* g : order) {
        if (g->bytes > budget || g->worth == 0) continue;
        if (best == nullptr || g->worth > best->worth) best = g;
        if (g->bytes > budget - p.bytes_at_start) continue;
        g->at_start = true;
        p.bytes_at_start += g->bytes, worth += g->worth;
    }
    if (best != nullptr && best->worth > worth) {
        for (planned_graph& g : p.graphs) g.at_start = &g == best;
        p.bytes_at_start = best->bytes;
    }
    return p;
}

/// What becomes of one step.
struct graph_step {
    enum class launch : std::uint8_t { replay, capture, eager };
    struct part {
        graph_key key;
        launch how = launch::eager;
    };
    index_t bucket = 0;               ///< rows of a batch are padded to it; 0: no graph is so large
    std::vector<part> parts = {};     ///< the target's first; capture: it is captured now, and replayed
    std::vector<graph_key> drop = {}; ///< before anything is captured
};

/// The books of the graphs that exist: says per step what to drop, capture and launch. It launches nothing itself.
class graph_pool {
public:
    struct counters {
        std::int64_t replays = 0, captures = 0, drops = 0, eager = 0;
    };
    /// What the plan has at start is captured by the caller before the first step.
    graph_pool(graph_plan plan, graph_bytes bytes_of, std::int32_t capture_after = 1)
        : plan_(std::move(plan)), bytes_of_(std::move(bytes_of)), capture_after_(capture_after) {
        detail::check_buckets(plan_.buckets);
        if (capture_after < 1) throw invalid_input("capture_after", "must be at least 1");
        if (!bytes_of_) throw invalid_input("bytes_of", "there is none");
    }

    graph_step use(index_t batch, const strategy& arm) {
        if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
        detail::check_arm("arm", arm);
        graph_step s;
        s.bucket = bucket_of(plan_.buckets, batch);
        ++now_;
        const std::vector<graph_key> keys = graph_keys(arm, s.bucket);
        for (const graph_key& k : keys) // one graph of a step does not go for the other
            if (const auto at = others_.find(k); at != others_.end()) at->second.used = now_;
        for (const graph_key& k : keys) s.parts.push_back({k, how(k, s)});
        for (const graph_step::part& p : s.parts)
            ++(p.how == graph_step::launch::replay    ? totals_.replays
               : p.how == graph_step::launch::capture ? totals_.captures
                                                      : totals_.eager);
        return s;
    }

    /// Of the graphs that there are.
    index_t bytes() const { return plan_.bytes_at_start + on_demand_; }
    bool holds(const graph_key& k) const {
        const planned_graph* g = plan_.find(k);
        const auto at = others_.find(k);
        return (g != nullptr && g->at_start) || (at != others_.end() && at->second.bytes > 0);
    }
    const graph_plan& plan() const { return plan_; }
    const counters& totals() const { return totals_; }

private:
    struct entry {
        index_t bytes = 0; // 0: not captured
        std::uint64_t used = 0;
        std::int32_t missed = 0;
    };
    graph_step::launch how(const graph_key& k, graph_step& s) {
        using launch = graph_step::launch;
        if (s.bucket == 0) return launch::eager;
        if (const planned_graph* g = plan_.find(k); g != nullptr && g->at_start) return launch::replay;
        if (const auto at = others_.find(k); at != others_.end() && at->second.bytes > 0) return launch::replay;
        const index_t needs = detail::checked_bytes(bytes_of_, k), room = plan_.budget - plan_.bytes_at_start;
        index_t kept = 0; // by the other graph of this step
        for (const auto& [key, e] : others_)
            if (e.used == now_) kept += e.bytes;
        if (needs > room - kept) return launch::eager;
        entry& e = others_[k];
        if (++e.missed < capture_after_) return launch::eager;
        while (needs > room - on_demand_) { // beside those of this step there is room, and they are the last to go
            auto last = others_.end();
            for (auto i = others_.begin(); i != others_.end(); ++i)
                if (i->second.bytes > 0 && (last == others_.end() || i->second.used < last->second.used)) last = i;
            on_demand_ -= last->second.bytes;
            s.drop.push_back(last->first);
            ++totals_.drops;
            others_.erase(last);
        }
        e = {needs, now_, 0};
        on_demand_ += needs;
        return launch::capture;
    }

    graph_plan plan_;
    graph_bytes bytes_of_;
    std::int32_t capture_after_;
    std::map<graph_key, entry> others_; // on demand, and those that were missed
    index_t on_demand_ = 0;
    std::uint64_t now_ = 0;
    counters totals_;
};

} // namespace opd::spec
