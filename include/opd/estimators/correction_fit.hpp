// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The pass over a whole batch that a correction of sequences needs (correction_rules.hpp): add each micro-batch, merge
// ranks, freeze; selection.apply fills keep and weight for env.frozen.
//
//   correction_fit fit{c};
//   fit.add(log_p, cache, sequence, mask);                  // once a micro-batch; fit.merge(other) over ranks
//   const correction_selection s = fit.freeze();
//   s.apply(log_p, cache, sequence, mask, keep, weight);    // once a micro-batch
//
// Statistics are summed in ascending order of their values, so that no cut into micro-batches or ranks changes a bit.
// Included by name, not by opd/opd.hpp: who has no such correction need not compile the sorting.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/estimators/correction_rules.hpp"
#include "opd/estimators/token_table.hpp"
#include "opd/token.hpp"
#include "opd/view.hpp"

namespace opd {

/// What correction_fit decided about a batch.
struct correction_selection {
    correction by = {};
    struct verdict {
        double weight = 1; ///< of the sequence's tokens
        bool keep = true;
        index_t tokens = 0, kept_tokens = 0; ///< before and after all rejections
    };
    std::vector<verdict> of = {};   ///< by sequence
    index_t kept_tokens = 0;        ///< of the whole batch: a normaliser where the correction shrinks
    index_t kept_sequences = 0;     ///< those with a token left
    index_t rejected_tokens = 0;    ///< by their own statistic or their sequence's
    index_t rejected_sequences = 0; ///< by their sequence's

    /// env.frozen.keep and env.frozen.weight (N,m) of a micro-batch, 0 in rows that the mask leaves out. Where the
    /// correction shrinks, keep (N,1) is env.mask as well. Throws invalid_input for sizes that differ and a sequence
    /// that was not added.
    template <class Cache>
    void apply(matrix_view<const double> log_p, const Cache& cache, std::span<const index_t> sequence, row_mask<> mask,
               matrix_view<std::uint8_t> keep, matrix_view<double> weight) const;
};

/// The pass over a whole batch. See the head of this file.
struct correction_fit {
    correction by = {};
    struct entry {
        index_t sequence;
        double log_p, log_mu, log_prox;
    };
    std::vector<entry> tokens = {}; ///< of what was added: exchange it between ranks, and merge

    /// A micro-batch: log p (N,m) by token_logp of its cache, that cache, each row's sequence (N) counted over the
    /// whole batch, its mask. Throws invalid_input for several draws a row where sequences decide, a negative
    /// sequence, sizes that differ.
    template <class Cache>
    void add(matrix_view<const double> log_p, const Cache& cache, std::span<const index_t> sequence,
             row_mask<> mask = {}) {
        check(log_p, sequence);
        for_each_token(log_p, cache, mask, [&](index_t r, index_t, const sampled_entry& x) {
            tokens.push_back({sequence[static_cast<std::size_t>(r)], x.log_p, x.log_mu, x.log_prox});
        });
    }
    void merge(const correction_fit& other) { tokens.insert(tokens.end(), other.tokens.begin(), other.tokens.end()); }
    correction_selection freeze() const {
        correction checked = by;
        checked.passed = true;
        checked.validate();
        correction_selection out{by};
        std::vector<std::size_t> count;
        for (const entry& t : tokens) {
            const auto s = static_cast<std::size_t>(t.sequence);
            if (s >= count.size()) count.resize(s + 1);
            ++count[s];
        }
        std::vector<std::size_t> begin(count.size() + 1, 0);
        for (std::size_t s = 0; s < count.size(); ++s) begin[s + 1] = begin[s] + count[s];
        std::vector<token_in> sorted(tokens.size(), as_token({}));
        for (const entry& t : tokens) sorted[begin[static_cast<std::size_t>(t.sequence)]++] = as_token(t);
        out.of.resize(count.size());
        std::vector<double> values;
        for (std::size_t s = 0, first = 0; s < count.size(); first += count[s++]) {
            const std::span<const token_in> own(sorted.data() + first, count[s]);
            correction_selection::verdict& v = out.of[s];
            v.tokens = static_cast<index_t>(own.size());
            if (own.empty()) continue;
            const correction_weight& w = by.weight;
            if (w.at == correction_level::sum || w.at == correction_level::mean)
                v.weight = detail::bounded_ratio(of(own, w.at, statistic::ratio, w.of, values), w.low, w.high,
                                                 w.outside == beyond::zero);
            for (const rejection& r : by.reject) {
                if (r.at == correction_level::none || r.at == correction_level::token) continue;
                const double k = of(own, r.at, r.by, r.of, values);
                v.keep = v.keep && k >= r.low && k <= r.high;
            }
            for (const token_in& x : own)
                v.kept_tokens += v.keep && correction::keeps(x, by.reject[0]) && correction::keeps(x, by.reject[1]);
            out.kept_tokens += v.kept_tokens, out.kept_sequences += v.kept_tokens > 0;
            out.rejected_tokens += v.tokens - v.kept_tokens, out.rejected_sequences += !v.keep;
        }
        return out;
    }

    /// The token as a correction reads it.
    static token_in as_token(const entry& t) {
        return {.log_p = t.log_p,
                .log_mu = t.log_mu,
                .log_prox = t.log_prox,
                .log_ref = t.log_mu,
                .log_q = 0,
                .log_ratio = detail::within_80(t.log_p - t.log_mu),
                .advantage = 0,
                .age = 0};
    }

private:
    friend struct correction_selection;
    void check(matrix_view<const double> log_p, std::span<const index_t> sequence) const {
        if (by.of_sequences() && log_p.cols != 1)
            throw invalid_input("log_p", "has " + std::to_string(log_p.cols) +
                                             " draws a row: a sequence is of one drawn token a row");
        if (static_cast<index_t>(sequence.size()) != log_p.rows)
            throw invalid_input("sequence",
                                "has " + std::to_string(sequence.size()) + " rows, not " + std::to_string(log_p.rows));
        for (std::size_t r = 0; r < sequence.size(); ++r)
            if (sequence[r] < 0) throw invalid_input("sequence", "is negative", static_cast<index_t>(r));
    }
    /// A statistic over a sequence. Ascending, so that no order of adding shows.
    static double of(std::span<const token_in> own, correction_level at, statistic by, ratio_of ratio,
                     std::vector<double>& values) {
        values.clear();
        for (const token_in& x : own) values.push_back(detail::summand(by, detail::log_ratio_of_token(x, ratio)));
        std::sort(values.begin(), values.end());
        if (at == correction_level::greatest || at == correction_level::least)
            return detail::of_summand(by, at == correction_level::least ? values.front() : values.back());
        double sum = 0;
        for (const double v : values) sum += v;
        return detail::of_summand(by, at == correction_level::mean ? sum / double(values.size()) : sum);
    }
};

template <class Cache>
void correction_selection::apply(matrix_view<const double> log_p, const Cache& cache, std::span<const index_t> sequence,
                                 row_mask<> mask, matrix_view<std::uint8_t> keep, matrix_view<double> weight) const {
    correction_fit{by}.check(log_p, sequence);
    detail::check_matrix("keep", keep, log_p.rows, log_p.cols);
    detail::check_matrix("weight", weight, log_p.rows, log_p.cols);
    for_each_token(log_p, cache, mask, [&](index_t r, index_t, const sampled_entry&) {
        if (sequence[static_cast<std::size_t>(r)] >= static_cast<index_t>(of.size()))
            throw invalid_input("sequence", "was not added", r);
    });
    for (index_t r = 0; r < keep.rows; ++r)
        for (index_t j = 0; j < keep.cols; ++j) keep(r, j) = 0, weight(r, j) = 0;
    for_each_token(log_p, cache, mask, [&](index_t r, index_t j, const sampled_entry& x) {
        const verdict& v = of[static_cast<std::size_t>(sequence[static_cast<std::size_t>(r)])];
        const token_in t = correction_fit::as_token({0, x.log_p, x.log_mu, x.log_prox});
        keep(r, j) = v.keep && correction::keeps(t, by.reject[0]) && correction::keeps(t, by.reject[1]);
        weight(r, j) = v.weight;
    });
}

} // namespace opd
