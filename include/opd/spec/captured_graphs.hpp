// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The graphs that a graph_pool plans: captured, replayed, destroyed.
//
//   captured_graphs graphs(graph_pool(plan, bytes_of), cuda_graph_api{stream});   (opd/backends/cuda_graphs.hpp)
//   graphs.capture_at_start(record);
//   graphs.run(batch, arm, record);                     record(key, captured) enqueues the launches of a graph's key
//
// `run` does what the pool says of the step: it destroys what has to go, captures what is new, and launches, target
// first. record runs where a graph is captured (captured is true: what it enqueues runs when the graph is launched) and
// where the step has none (false: it runs now, with key.batch 0 for a batch beyond the last bucket). Rows of a captured
// step are padded to key.batch, which is the caller's.
//
// An Api has
//
//   void begin()                 what is enqueued from now on is captured
//   graph end()                  and is a graph, ready to be launched
//   void abandon() noexcept      after begin(): nothing is captured after all
//   void launch(const graph&)
//   void destroy(graph) noexcept
//
// Errors: the pool's and the Api's. If record throws while a graph is captured, the capture is abandoned and the
// exception goes on; the pool then still counts the graph: `run` captures it again before it is launched. A capture
// that fails (no memory) likewise. What the step had launched by then stays launched. All graphs are destroyed with the
// object. Not thread-safe; graphs may not be in use on another stream when they go.
//
// Source: TLT section 5.1.
#pragma once

#include <map>
#include <utility>

#include "opd/config.hpp"
#include "opd/spec/graph_pool.hpp"

namespace opd::spec {

/// Owns the graphs that it has captured. Neither copied nor moved.
template <class Api>
class captured_graphs {
public:
    using graph = decltype(std::declval<Api&>().end());

    captured_graphs(graph_pool pool, Api api) : pool_(std::move(pool)), api_(std::move(api)) {}
    captured_graphs(const captured_graphs&) = delete;
    captured_graphs& operator=(const captured_graphs&) = delete;
    ~captured_graphs() {
        for (auto& [key, g] : graphs_) api_.destroy(std::move(g));
    }

    /// What the plan has at start, in the order of its keys. Those that are there are not captured again.
    template <class Record>
    void capture_at_start(Record&& record) {
        for (const planned_graph& g : pool_.plan().graphs)
            if (g.at_start) at(g.key, record);
    }

    template <class Record>
    graph_step run(index_t batch, const strategy& arm, Record&& record) {
        graph_step s = pool_.use(batch, arm);
        for (const graph_key& k : s.drop)
            if (auto node = graphs_.extract(k)) api_.destroy(std::move(node.mapped()));
        for (const graph_step::part& p : s.parts) {
            if (p.how == graph_step::launch::eager)
                record(p.key, false);
            else
                api_.launch(at(p.key, record));
        }
        return s;
    }

    index_t captured() const { return static_cast<index_t>(graphs_.size()); }
    const graph_pool& pool() const { return pool_; }

private:
    template <class Record>
    const graph& at(const graph_key& k, Record&& record) {
        if (const auto found = graphs_.find(k); found != graphs_.end()) return found->second;
        api_.begin();
        try {
            record(k, true);
        } catch (...) {
            api_.abandon();
            throw;
        }
        graph made = api_.end();
        try {
            return graphs_.emplace(k, made).first->second;
        } catch (...) {
            api_.destroy(std::move(made));
            throw;
        }
    }

    graph_pool pool_;
    Api api_;
    std::map<graph_key, graph> graphs_;
};

} // namespace opd::spec
