// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From an env to one factor a row, w_r f_r (batch.hpp), and the checks that need no logits.
#pragma once

#include <string>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Throws unless every span of `e` fits a batch of n rows.
template <space S>
void check_env(const basic_env<S>& e, index_t n) {
    const auto length = [n](const char* name, bool empty, index_t size) {
        if (!empty && size != n)
            throw invalid_input(std::string("env.") + name,
                                "has " + std::to_string(size) + " entries for " + std::to_string(n) + " rows");
    };
    length("mask", e.mask.empty(), e.mask.size);
    length("weights", e.weights.empty(), e.weights.size);
    length("versions", e.versions.empty(), e.versions.size);
    length("losses", e.losses.empty(), e.losses.size);
    length("lse", e.lse.empty(), e.lse.size);
    length("given_lse", e.given_lse.empty(), e.given_lse.size);
    if (e.reduction == reduce::constant && !(e.normalizer > 0))
        throw invalid_input("env.normalizer", "must be positive under reduce::constant");
    if (e.normalizer < 0 || !is_finite(e.normalizer))
        throw invalid_input("env.normalizer", "must be positive, or 0 to count this batch");
    const bool by_sequence = e.reduction == reduce::sequence_mean || e.reduction == reduce::sequence_sum_mean;
    if (by_sequence && e.offsets.size < 1)
        throw invalid_input("env.offsets", "is needed by a reduction over sequences");
    if (!is_finite(e.beta) || !is_finite(e.beta_loss)) throw invalid_input("env.beta", "must be finite");
    if (!is_finite(e.loss_clamp) || e.loss_clamp < 0)
        throw invalid_input("env.loss_clamp", "must be positive, or 0 for none");
    if (e.on_bad.act == bad::action::raise_above &&
        !(is_finite(e.on_bad.share) && e.on_bad.share > 0 && e.on_bad.share < 1))
        throw invalid_input("env.on_bad",
                            "raise_above takes a share between 0 and 1, both excluded; raise() allows none");
    if (e.level == determinism::tiling_invariant)
        throw unsupported("opd: env.level tiling_invariant is not offered by this version; use run_to_run");
}

/// Contents of the spans, on the host: offsets ascending from 0 to n, weights finite.
inline void check_env_contents(const env& e, index_t n) {
    if (e.offsets.size > 0) {
        if (e.offsets[0] != 0) throw invalid_input("env.offsets", "must start at 0", 0);
        for (index_t i = 1; i < e.offsets.size; ++i)
            if (e.offsets[i] < e.offsets[i - 1])
                throw invalid_input("env.offsets", "must ascend; entry " + std::to_string(i) + " does not", i);
        if (e.offsets[e.offsets.size - 1] != n)
            throw invalid_input("env.offsets", "ends at " + std::to_string(e.offsets[e.offsets.size - 1]) + " for " +
                                                   std::to_string(n) + " rows");
    }
    for (index_t r = 0; r < e.weights.size; ++r)
        if (!is_finite(e.weights[r])) throw invalid_input("env.weights", "is not finite", r);
}

/// factor[r] = w_r f_r for kept rows; masked rows are left untouched and must be asked of the mask. Returns kept rows.
inline index_t row_factors(const env& e, index_t n, double* factor) {
    const auto weight = [&](index_t r) { return e.weights.empty() ? 1.0 : double(e.weights[r]); };
    index_t kept = 0;
    if (e.reduction == reduce::sequence_mean || e.reduction == reduce::sequence_sum_mean) {
        index_t sequences = 0;
        for (index_t s = 0; s + 1 < e.offsets.size; ++s) {
            index_t in_sequence = 0;
            for (index_t r = e.offsets[s]; r < e.offsets[s + 1]; ++r) in_sequence += e.mask.kept(r);
            kept += in_sequence;
            sequences += in_sequence > 0;
            for (index_t r = e.offsets[s]; r < e.offsets[s + 1]; ++r)
                factor[r] = weight(r) / (e.reduction == reduce::sequence_mean && in_sequence ? double(in_sequence) : 1);
        }
        const double count = e.normalizer > 0 ? e.normalizer : double(sequences);
        for (index_t r = 0; r < n; ++r) factor[r] /= count > 0 ? count : 1;
        return kept;
    }
    for (index_t r = 0; r < n; ++r) kept += e.mask.kept(r);
    double count = 1;
    if (e.reduction == reduce::token_mean)
        count = e.normalizer > 0 ? e.normalizer : double(kept);
    else if (e.reduction == reduce::constant)
        count = e.normalizer;
    for (index_t r = 0; r < n; ++r) factor[r] = weight(r) / (count > 0 ? count : 1);
    return kept;
}

/// Adds row r's staleness, version - versions[r], to the histogram.
template <class Diagnostics, space S>
OPD_HD void count_staleness(Diagnostics& d, const basic_env<S>& e, index_t r) {
    if (e.versions.empty()) return;
    index_t lag = index_t{e.version} - e.versions[r];
    lag = lag < 0 ? 0 : lag;
    d.staleness[lag < Diagnostics::staleness_bins - 1 ? lag : Diagnostics::staleness_bins - 1] += 1;
    d.staleness_max = d.staleness_max < lag ? lag : d.staleness_max;
}

} // namespace OPD_ISA
} // namespace opd::detail
