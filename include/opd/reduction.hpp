// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The reduction: from an env to one factor a row, w_r f_r (formulas: batch.hpp), and the checks of env that need no
// logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/ratio_sketch.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class T, space S>
constexpr std::size_t element_bytes(const vector_view<T, S>&) {
    return sizeof(T);
}
template <class View>
constexpr std::size_t element_bytes(const View& v) {
    return static_cast<std::size_t>(v.bytes);
}

/// No span reaches further: byte counts fit 64 bits.
inline constexpr index_t most_bytes = std::numeric_limits<index_t>::max();

/// A vector that is left out (null and of size 0), or one in its place: size, pointer, alignment. n < 0: of any size.
inline void check_span(const char* name, std::uintptr_t data, index_t size, std::size_t width, index_t n) {
    if (data == 0 && size == 0) return;
    if (n >= 0 && size != n)
        throw invalid_input(name, "has " + std::to_string(size) + " entries for " + std::to_string(n) + " rows");
    if (size < 0) throw invalid_input(name, "has a negative size of " + std::to_string(size));
    if (data == 0)
        throw invalid_input(name,
                            "is a null pointer with " + std::to_string(size) + " entries; leave out what is not given");
    if (size > most_bytes / static_cast<index_t>(width)) throw invalid_input(name, "is larger than any memory");
    if (data % width != 0) throw invalid_input(name, "is not aligned to its element type");
}
template <class View>
void check_vector(const char* name, const View& v, index_t n) {
    check_span(name, reinterpret_cast<std::uintptr_t>(v.data), v.size, element_bytes(v), n);
}

/// The largest |w_r f_r|: beyond it a float gradient overflows.
inline constexpr double largest_factor = 1e30;

OPD_HD constexpr bool reduces_sequences(reduce how) {
    return how == reduce::sequence_mean || how == reduce::sequence_sum_mean;
}

/// Throws unless every span of `e` fits a batch of n rows and every parameter means something.
template <space S>
void check_env(const basic_env<S>& e, index_t n) {
    check_vector("env.mask", e.mask, n);
    check_vector("env.weights", e.weights, n);
    check_vector("env.versions", e.versions, n);
    check_vector("env.losses", e.losses, n);
    check_vector("env.lse", e.lse, n);
    check_vector("env.given_lse", e.given_lse, n);
    check_vector("env.offsets", e.offsets, -1);
    check_vector("env.measure.ratios", e.measure.ratios, -1);
    if (!e.measure.ratios.empty() && e.measure.ratios.size != ratio_sketch::bins)
        throw invalid_input("env.measure.ratios", "has " + std::to_string(e.measure.ratios.size) + " bins, a sketch " +
                                                      std::to_string(ratio_sketch::bins));
    if (!is_finite(e.normaliser) || e.normaliser < 0 || (e.normaliser > 0 && e.normaliser < 1 / largest_factor))
        throw invalid_input("env.normaliser", "must be a positive count of at least 1e-30, or 0 to count this batch");
    if (e.reduction == reduce::constant && e.normaliser == 0)
        throw invalid_input("env.normaliser", "must be positive under reduce::constant");
    if (reduces_sequences(e.reduction) && e.offsets.size < 1)
        throw invalid_input("env.offsets", "is needed by a reduction over sequences");
    if (!is_finite(e.beta)) throw invalid_input("env.beta", "must be finite");
    if (!is_finite(e.beta_loss)) throw invalid_input("env.beta_loss", "must be finite");
    if (const double nats = e.on_infinite.floor_at; !is_finite(nats) || nats > 0 || nats < -1e6)
        throw invalid_input("env.on_infinite", "must floor at a log-probability between -1e6 and 0 nats");
    if (!is_finite(e.loss_clamp) || e.loss_clamp < 0)
        throw invalid_input("env.loss_clamp", "must be positive, or 0 for none");
    if (e.on_bad.act == bad::action::raise_above &&
        !(is_finite(e.on_bad.share) && e.on_bad.share > 0 && e.on_bad.share < 1))
        throw invalid_input("env.on_bad",
                            "raise_above takes a share between 0 and 1, both excluded; raise() allows none");
}

/// Contents of the spans, on the host: offsets ascending from 0 to n, weights of kept rows finite and of a size that a
/// gradient can hold.
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
    if (e.weights.empty()) return;
    const double count = e.reduction != reduce::sum && e.normaliser > 0 && e.normaliser < 1 ? e.normaliser : 1;
    for (index_t r = 0; r < n; ++r) {
        if (!e.mask.kept(r)) continue;
        if (!e.weights.finite(r)) throw invalid_input("env.weights", "is not finite", r);
        const double w = e.weights[r];
        if (w > largest_factor * count || w < -largest_factor * count)
            throw invalid_input("env.weights", "is too large: a weight over the normaliser must not exceed 1e30", r);
    }
}

/// What the reduction of n rows divides by: env.normaliser, or kept rows, or sequences with one; 1 where there are
/// none.
inline double count_of(const env& e, index_t n) {
    if (e.reduction == reduce::sum) return 1;
    if (e.normaliser > 0) return e.normaliser;
    index_t count = 0;
    if (reduces_sequences(e.reduction))
        for (index_t s = 0; s + 1 < e.offsets.size; ++s) count += e.mask.kept_of(e.offsets[s], e.offsets[s + 1]) > 0;
    else
        count = e.mask.kept_of(0, n);
    return count > 0 ? double(count) : 1;
}

/// factor[r] = w_r f_r of kept rows; what it says of a masked row means nothing. Returns kept rows.
inline index_t row_factors(const env& e, index_t n, double* factor) {
    const double count = count_of(e, n);
    for (index_t r = 0; r < n; ++r) factor[r] = e.weights.empty() ? 1.0 : e.weights[r];
    if (e.reduction == reduce::sequence_mean)
        for (index_t s = 0; s + 1 < e.offsets.size; ++s) {
            const index_t begin = e.offsets[s], end = e.offsets[s + 1], kept = e.mask.kept_of(begin, end);
            for (index_t r = begin; kept > 0 && r < end; ++r) factor[r] /= double(kept);
        }
    for (index_t r = 0; r < n; ++r) factor[r] /= count;
    return e.mask.kept_of(0, n);
}

/// The last of `count` sequences that begins at or before row r, the first if none does.
template <space S>
OPD_HD index_t sequence_of(const row_offsets<S>& offsets, index_t count, index_t r) {
    index_t low = 0, high = count;
    while (high - low > 1) {
        const index_t middle = low + (high - low) / 2;
        (offsets[middle] <= r ? low : high) = middle;
    }
    return low;
}

/// Adds row r's staleness, version - versions[r], to the histogram; a version that is yet to come has none, and is
/// counted.
template <class Diagnostics, space S>
OPD_HD void count_staleness(Diagnostics& d, const basic_env<S>& e, index_t r) {
    if (e.versions.empty()) return;
    index_t lag = index_t{e.version} - e.versions[r];
    d.future_versions += lag < 0;
    lag = lag < 0 ? 0 : lag;
    d.staleness[lag < Diagnostics::staleness_bins - 1 ? lag : Diagnostics::staleness_bins - 1] += 1;
    d.staleness_max = d.staleness_max < lag ? lag : d.staleness_max;
}

} // namespace OPD_ISA
} // namespace opd::detail
