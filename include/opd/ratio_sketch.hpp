// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Quantiles of importance ratios without keeping them: counts of log rho in bins, eight to an octave of |log rho|, on
// either side of a bin for |log rho| < 2^-7. Sketches of any batches, threads, ranks and devices add up, count by
// count.
//
//   std::vector<opd::index_t> counts(opd::ratio_sketch::bins);                       // added to; clear it as you like
//   opd::evaluate(be, student, teacher, estimator,
//                 {.measure = {.ratios = opd::view(counts.data(), opd::ratio_sketch::bins)}});
//   const double p99 = opd::ratio_sketch::quantile(counts, 0.99);
//
// A quantile's log is off by at most 1/16 of itself, or 2^-7; it saturates at e^±128.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd {

/// The bins of env.measure.ratios, and quantiles from their counts.
struct ratio_sketch {
    static constexpr int per_octave = 8, octaves = 14;
    static constexpr int side = per_octave * octaves; ///< bins on either side: |log rho| from 2^-7 to 2^7
    static constexpr int bins = 2 * side + 1;

    /// The bin of a log-ratio, from its bits: the same everywhere.
    OPD_HD static int bin_of(double log_ratio) {
        const auto x = static_cast<float>(log_ratio);
        const auto bits = detail::bit_cast<std::uint32_t>(x), size = bits & 0x7fffffffu;
        constexpr std::uint32_t least = 0x3c000000u; // 2^-7
        if (size < least) return side;
        std::uint32_t i = (size - least) >> 20;
        if (i >= side) i = side - 1;
        return (bits >> 31) != 0 ? side - 1 - static_cast<int>(i) : side + 1 + static_cast<int>(i);
    }
    /// The middle of a bin, as a log-ratio.
    static double middle(int bin) {
        if (bin == side) return 0;
        const int i = bin > side ? bin - side - 1 : side - 1 - bin;
        const double size = std::ldexp(1 + (i % per_octave + 0.5) / per_octave, i / per_octave - 7);
        return bin > side ? size : -size;
    }
    /// The ratio below which a share q of the tokens lies; NaN of no tokens. Throws invalid_input for counts of
    /// another size, q not in [0, 1].
    static double quantile(std::span<const index_t> counts, double q) {
        if (counts.size() != std::size_t(bins))
            throw invalid_input("counts",
                                "has " + std::to_string(counts.size()) + " bins, a sketch " + std::to_string(bins));
        if (!(q >= 0 && q <= 1)) throw invalid_input("q", "must lie in [0, 1]");
        index_t all = 0;
        for (const index_t n : counts) all += n;
        if (all == 0) return detail::quiet_nan<double>();
        const double at = q * double(all);
        index_t below = 0;
        int bin = 0, last = 0;
        for (; bin < bins; ++bin) {
            if (counts[std::size_t(bin)] == 0) continue;
            last = bin;
            below += counts[std::size_t(bin)];
            if (double(below) >= at) break;
        }
        return std::exp(middle(last));
    }
};

namespace detail {
/// Adds 1, from whatever thread: whole numbers, so no order shows.
OPD_HD inline void count_one(index_t& n) {
#if defined(__CUDA_ARCH__)
    atomicAdd(reinterpret_cast<unsigned long long*>(&n), 1ull);
#else
    __atomic_fetch_add(&n, index_t{1}, __ATOMIC_RELAXED);
#endif
}
} // namespace detail

} // namespace opd
