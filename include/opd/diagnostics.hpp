// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a call reports beside its loss: plain counts and sums that merge across row blocks, micro-batches and ranks without
// keeping raw tensors. Derived figures are member functions.
//
//   effective sample size  (Σ rho)² / Σ rho²               ratio mean   Σ rho / n, 1 in expectation under mu
//   K1 = -log rho   K2 = ½ log² rho   K3 = rho - 1 - log rho   means over sampled tokens; their ratio is rho = p/mu
//   chi-squared     mean rho² - 1
//
// `mu_mismatch()`: the mean of rho lies more than 5 standard errors from 1, so the recorded log mu is not the law that the
// tokens were drawn from (raw log-probs recorded while sampling at another temperature, for one).
// Figures that an estimator does not produce stay zero with their count at zero. `to_string(diagnostics)` says in one line
// what was dropped or mended.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd {

struct diagnostics {
    // rows
    index_t rows = 0;           ///< rows of the call
    index_t kept = 0;           ///< rows that the mask keeps
    index_t bad_rows = 0;       ///< kept rows with bad contents: loss 0, gradient 0
    index_t first_bad_row = -1; ///< -1: none
    index_t infinite_rows = 0;  ///< kept rows whose loss is infinite, treated by policy
    index_t first_infinite_row = -1;
    index_t clamped_rows = 0; ///< rows cut by loss_clamp
    index_t careful_rows = 0; ///< rows that float could not carry and the float64 path did
    double kept_loss = 0;     ///< Σ L_r over kept good rows, unweighted, before any clamp

    // sampled tokens
    index_t tokens = 0;          ///< (row, action) pairs
    double ratio_sum = 0;        ///< Σ rho, weighted by the design (entry weight · entries)
    double ratio_square_sum = 0; ///< Σ rho²
    double ratio_max = 0;
    double k1_sum = 0, k2_sum = 0, k3_sum = 0;
    index_t positive_advantage = 0, negative_advantage = 0;
    index_t clipped_positive = 0, clipped_negative = 0; ///< tokens whose gradient the surrogate cut, by sign of A
    index_t truncated = 0, masked = 0;                  ///< tokens whose ratio it cut, or that it left out
    index_t saturated = 0;                              ///< log rho beyond ±80, saturated
    index_t baseline_missing = 0;                       ///< leave-one-out with a single sample: baseline 0
    index_t dropped = 0;                                ///< tokens that env.frozen.keep leaves out
    index_t certain_mu = 0;                             ///< log mu of exactly 0: certain tokens, or placeholders

    // supports
    index_t support_rows = 0;
    double student_mass_sum = 0, teacher_mass_sum = 0; ///< Σ Z_p, Σ Z_q where known
    double student_mass_min = 1, teacher_mass_min = 1;
    index_t tail_floored = 0; ///< teacher tails that log1p(-Z_q) lost and a floor replaced

    // staleness, in versions, of kept rows that carry one
    static constexpr int staleness_bins = 33; ///< 0..31, then 32 and more
    index_t staleness[staleness_bins] = {};
    index_t staleness_max = 0;

    OPD_HD OPD_INLINE void merge(const diagnostics& o) {
        rows += o.rows, kept += o.kept;
        bad_rows += o.bad_rows, infinite_rows += o.infinite_rows;
        first_bad_row = first(first_bad_row, o.first_bad_row);
        first_infinite_row = first(first_infinite_row, o.first_infinite_row);
        clamped_rows += o.clamped_rows, careful_rows += o.careful_rows, kept_loss += o.kept_loss;
        tokens += o.tokens, ratio_sum += o.ratio_sum, ratio_square_sum += o.ratio_square_sum;
        ratio_max = ratio_max < o.ratio_max ? o.ratio_max : ratio_max;
        k1_sum += o.k1_sum, k2_sum += o.k2_sum, k3_sum += o.k3_sum;
        positive_advantage += o.positive_advantage, negative_advantage += o.negative_advantage;
        clipped_positive += o.clipped_positive, clipped_negative += o.clipped_negative;
        truncated += o.truncated, masked += o.masked;
        saturated += o.saturated, baseline_missing += o.baseline_missing;
        dropped += o.dropped, certain_mu += o.certain_mu;
        support_rows += o.support_rows;
        student_mass_sum += o.student_mass_sum, teacher_mass_sum += o.teacher_mass_sum;
        student_mass_min = o.student_mass_min < student_mass_min ? o.student_mass_min : student_mass_min;
        teacher_mass_min = o.teacher_mass_min < teacher_mass_min ? o.teacher_mass_min : teacher_mass_min;
        tail_floored += o.tail_floored;
        for (int i = 0; i < staleness_bins; ++i) staleness[i] += o.staleness[i];
        staleness_max = staleness_max < o.staleness_max ? o.staleness_max : staleness_max;
    }

    double ratio_mean() const { return tokens ? ratio_sum / double(tokens) : 0; }
    double effective_sample_size() const { return ratio_square_sum > 0 ? ratio_sum * ratio_sum / ratio_square_sum : 0; }
    double chi_squared() const { return tokens ? ratio_square_sum / double(tokens) - 1 : 0; }
    double k1() const { return tokens ? k1_sum / double(tokens) : 0; }
    double k2() const { return tokens ? k2_sum / double(tokens) : 0; }
    double k3() const { return tokens ? k3_sum / double(tokens) : 0; }
    double student_mass() const { return support_rows ? student_mass_sum / double(support_rows) : 0; }
    double teacher_mass() const { return support_rows ? teacher_mass_sum / double(support_rows) : 0; }
    double mean_kept_loss() const { return kept > bad_rows ? kept_loss / double(kept - bad_rows) : 0; }
    bool mu_mismatch() const {
        if (tokens < 2) return false;
        const double n = double(tokens), mean = ratio_sum / n;
        const double variance = (ratio_square_sum - n * mean * mean) / (n - 1);
        return std::abs(mean - 1) > 5 * std::sqrt((variance > 0 ? variance : 0) / n) + 1e-5;
    }

private:
    OPD_HD static index_t first(index_t a, index_t b) { return a < 0 ? b : (b < 0 || a < b ? a : b); }
};

/// "64 rows, 60 kept", and behind it whatever was dropped, cut or mended: "; 2 bad (first: row 5): loss 0, gradient 0".
inline std::string to_string(const diagnostics& d) {
    std::string s = std::to_string(d.rows) + " rows, " + std::to_string(d.kept) + " kept";
    const auto note = [&s](index_t n, const char* what, index_t first = -1, const char* treated = "") {
        if (n == 0) return;
        s.append("; ").append(std::to_string(n)).append(what);
        if (first >= 0) s.append(" (first: row ").append(std::to_string(first)).append(")");
        s.append(treated);
    };
    note(d.bad_rows, " bad", d.first_bad_row, ": loss 0, gradient 0");
    note(d.infinite_rows, " infinite", d.first_infinite_row, ": treated by env.on_infinite");
    note(d.clamped_rows, " cut by env.loss_clamp: gradient 0");
    note(d.careful_rows, " computed in float64");
    note(d.saturated, " ratios saturated at e^80");
    note(d.dropped, " tokens dropped by env.frozen.keep");
    note(d.certain_mu, " log mu of exactly 0");
    note(d.baseline_missing, " samples without a baseline");
    note(d.tail_floored, " teacher tails floored");
    if (d.mu_mismatch()) {
        char mean[32];
        std::snprintf(mean, sizeof mean, "%.3g", d.ratio_mean());
        s.append("; mean ratio ").append(mean).append(": log mu is not the law that the tokens were drawn from");
    }
    return s;
}

/// What `evaluate` returns on the host.
struct result {
    double loss = 0; ///< reduced
    opd::diagnostics diagnostics = {};
};

/// Kept rows with bad contents, more than `env.on_bad` allows. Thrown after the batch: loss, gradient and every other output
/// are written, 0 in the bad rows; `result` is what the call would have returned.
struct bad_contents : error {
    opd::result result;
    OPD_INLINE explicit bad_contents(const opd::result& r) // inlined: its copy of `result` uses the caller's registers
        : error("opd: " + std::to_string(r.diagnostics.bad_rows) + " of " + std::to_string(r.diagnostics.kept) +
                " kept rows have bad contents, the first is row " + std::to_string(r.diagnostics.first_bad_row) +
                "; more than env.on_bad allows. The gradient is written and 0 in those rows"),
          result(r) {}
};

namespace detail {
inline namespace OPD_ISA {
/// Throws if the batch holds more bad rows than the policy allows.
inline void raise_bad(const result& r, const bad& policy) {
    const index_t n = r.diagnostics.bad_rows;
    if (n > 0 && policy.act != bad::action::count && double(n) > policy.share * double(r.diagnostics.kept))
        throw bad_contents(r);
}
} // namespace OPD_ISA
} // namespace detail

} // namespace opd
