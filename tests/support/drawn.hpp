// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Estimators of drawn tokens by exact enumeration of their rows, without a backend: every m-tuple of i.i.d. draws from
// a law, each through the estimator's own row function and a pullback in double.
#pragma once

#include "support/enumerate.hpp"
#include "support/policies.hpp"

#include <doctest/doctest.h>
#include <functional>
#include <vector>

#include <opd/estimators/sampled.hpp>

namespace opd::test {

struct drawn_mean {
    double loss = 0;
    std::vector<double> dz = {};
    double second_moment = 0; ///< E |dz|²
    diagnostics seen = {};
    bool infinite = false; ///< of one row
};

/// What a test sets of the entries and facts that estimators read beside log p, log mu and log q.
using fill_in = std::function<void(sampled_entry&, entry_facts&)>;

inline const std::vector<double>& log_law(const policies& w, law drawn) {
    return drawn == law::on_policy ? w.log_p : (drawn == law::teacher ? w.log_q : w.log_mu);
}

/// One row of i.i.d. draws `ids` under a law.
template <class Estimator>
drawn_mean drawn_row(const policies& w, law drawn, const std::vector<std::int64_t>& ids, const Estimator& e,
                     const fill_in& fill = {}) {
    const auto& log_mu = log_law(w, drawn);
    std::vector<sampled_entry> entries;
    entry_facts facts;
    for (std::size_t j = 0; j < ids.size(); ++j) {
        const auto v = std::size_t(ids[j]);
        sampled_entry x{};
        x.id = ids[j], x.weight = 1 / double(ids.size());
        x.log_p = w.log_p[v] < -1e29 ? -INFINITY : w.log_p[v], x.log_q = w.log_q[v];
        x.log_mu = x.log_prox = x.log_ref = log_mu[v];
        x.keep = true, x.factor = 1, x.slot = int(j);
        if (fill) fill(x, facts);
        entries.push_back(x);
    }
    drawn_mean out;
    const entry_row r = e.row(entries.data(), int(entries.size()), facts, out.seen);
    CHECK(!r.bad);
    std::vector<double> c(w.z.size(), 0.0);
    for (const sampled_entry& x : entries) c[std::size_t(x.id)] += x.c;
    out.loss = r.loss, out.dz = w.pullback(c), out.infinite = r.infinite;
    return out;
}

/// E over all m-tuples of i.i.d. draws.
template <class Estimator>
drawn_mean drawn_expectation(const policies& w, law drawn, index_t m, const Estimator& e, const fill_in& fill = {}) {
    drawn_mean mean{0, std::vector<double>(w.z.size(), 0.0)};
    for_each_tuple(w.vocab, m, [&](const std::vector<std::int64_t>& ids) {
        double probability = 1;
        for (const auto id : ids) probability *= std::exp(log_law(w, drawn)[std::size_t(id)]);
        const drawn_mean one = drawn_row(w, drawn, ids, e, fill);
        mean.loss += probability * one.loss;
        for (std::size_t v = 0; v < mean.dz.size(); ++v) {
            mean.dz[v] += probability * one.dz[v];
            mean.second_moment += probability * one.dz[v] * one.dz[v];
        }
    });
    return mean;
}

} // namespace opd::test
