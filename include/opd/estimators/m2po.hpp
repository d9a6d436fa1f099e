// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// M2PO (Zheng et al. 2026, algorithm 1): the second moment of the log-ratio bounded over the whole batch, by leaving
// out the few tokens that carry it. δ = log p - log mu, rho = e^δ.
//
//   eligible     kept by the mask, and pushed on by its gradient: A > 0 and rho > 1, or A < 0 and rho < 1
//   drop         while the mean of δ² over the eligible tokens that are left exceeds tau, the largest go; equal ones
//                together; all may go. They add nothing, the others are unclipped (unclipped_is), the denominator stays
//                that of all tokens
//
// Two variants of published codes, each under its own name:
//
//   m2po::clip   eligible tokens clipped at a level t instead, Σ min(δ², t²) = tau·n: the exact water level;
//                Infini-AI-Lab/M2PO takes the largest observed value below it. Then ppo_clip with low = 1 - e^-t, high
//                = e^t - 1, which `clip()` returns
//   m2po::all    every token, whatever its advantage, with δ = log p_prox - log mu, until the mean is below tau; one is
//                kept. AReaL
//
// Four calls: token_logp over each micro-batch; add; merge over ranks and freeze, which returns the selection; its
// keep() fills env.frozen.keep of each micro-batch. Selection is over all that was added, sorted, so that cutting the
// batch into micro-batches or ranks changes no token. With several draws a row it runs over (row, draw) pairs. Within
// the budget nothing changes. Biased as far as it drops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/estimators/token_table.hpp"

namespace opd {

/// What becomes of tokens beyond the budget: left out (the paper), or one of the two forms of published codes above.
enum class m2po { drop, clip, all };

/// What a fit decided about a batch.
struct m2po_selection {
    m2po form = m2po::drop;
    double level = 0; ///< δ² of the first token that goes, or the square of the level to clip at; infinity: none
    double second_moment = 0; ///< mean of δ² over the eligible tokens that are left (drop, all)

    /// Whether a token takes part: its gradient pushes the ratio on, or form is m2po::all.
    bool eligible(const sampled_entry& x, double a) const {
        const double d = x.log_p - x.log_mu;
        return form == m2po::all || (a > 0 && d > 0) || (a < 0 && d < 0);
    }
    double square(const sampled_entry& x) const {
        const double d = detail::within_80((form == m2po::all ? x.log_prox : x.log_p) - x.log_mu); // as ratios saturate
        return d * d;
    }
    bool keeps(const sampled_entry& x, double a) const {
        return form == m2po::clip || !eligible(x, a) || square(x) < level;
    }
    /// env.frozen.keep (N,m) of a micro-batch, 0 in rows that the mask leaves out; returns how many tokens are dropped.
    template <class Cache, class Advantage = advantage::theta>
    index_t keep(matrix_view<const double> log_p, const Cache& cache, row_mask<> mask, matrix_view<std::uint8_t> out,
                 const Advantage& advantage = {}) const {
        detail::check_matrix("out", out, log_p.rows, log_p.cols);
        for (index_t r = 0; r < out.rows; ++r)
            for (index_t j = 0; j < out.cols; ++j) out(r, j) = 0;
        index_t dropped = 0;
        for_each_token(log_p, cache, mask, [&](index_t r, index_t j, const sampled_entry& x) {
            out(r, j) = keeps(x, advantage(x));
            dropped += !out(r, j);
        });
        return dropped;
    }
    /// m2po::clip: the surrogate of the level. Where nothing is to be clipped its bounds are those at which ratios
    /// saturate.
    ppo_clip clip() const {
        const double t = detail::within_80(std::sqrt(level));
        return {.low = -std::expm1(-t), .high = std::expm1(t)};
    }
};

/// A batch's δ², and the selection from them. `tau` bounds the mean of δ², in nats²; 0.04 is the paper's.
struct m2po_fit {
    double tau = 0.04; ///< bound of the mean of δ², nats²
    m2po form = m2po::drop;
    std::vector<double> squares = {}; ///< δ² of what was added: exchange it between ranks, and merge

    /// A micro-batch: log p (N,m) by token_logp of its cache, that cache, its mask. `advantage` as the estimator's.
    template <class Cache, class Advantage = advantage::theta>
    void add(matrix_view<const double> log_p, const Cache& cache, row_mask<> mask = {},
             const Advantage& advantage = {}) {
        const m2po_selection take{form};
        for_each_token(log_p, cache, mask, [&](index_t, index_t, const sampled_entry& x) {
            if (take.eligible(x, advantage(x))) squares.push_back(take.square(x));
        });
    }
    void merge(const m2po_fit& other) { squares.insert(squares.end(), other.squares.begin(), other.squares.end()); }

    m2po_selection freeze() const {
        if (!detail::is_finite(tau) || !(tau > 0)) throw invalid_input("m2po_fit.tau", "must be positive and finite");
        std::vector<double> sorted = squares;
        std::sort(sorted.begin(), sorted.end());
        const std::size_t n = sorted.size();
        m2po_selection out{form, std::numeric_limits<double>::infinity()};
        double sum = 0;
        std::size_t i = 0; // how many are left
        if (form == m2po::clip) {
            // Σ of the i smallest + (n-i) level = tau n: the first i for which the level is at most the next value
            for (; i < n && sum + sorted[i] * double(n - i) <= tau * double(n); ++i) sum += sorted[i];
            if (i < n) out.level = (tau * double(n) - sum) / double(n - i);
            return out;
        }
        while (i < n) { // groups of equal values, while the mean with the group is within tau
            std::size_t end = i;
            double with = sum;
            while (end < n && sorted[end] == sorted[i]) with += sorted[end++];
            const double mean = with / double(end);
            if (form == m2po::all ? !(mean < tau || i == 0) : !(mean <= tau)) break;
            sum = with, i = end;
        }
        if (i < n) out.level = sorted[i];
        out.second_moment = i > 0 ? sum / double(i) : 0;
        return out;
    }
};

} // namespace opd
