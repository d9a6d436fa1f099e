// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Penalties, temperature, top-k, top-p and min-p: what a rollout may draw of a row, under one definition for drawing,
// for the recorded log mu, for kept sets and for verification.
//
//   0. penalties      of ids that the text has already (penalties.hpp writes the row that all else then reads):
//                     repetition r   z = z > 0 ? z/r : z·r      of ids of the prompt or of the answer
//                     frequency f    z = z - f·count            count: how often the answer has the id
//                     presence a     z = z - a                  where it has it at all
//   1. temperature    p = softmax(z / T)
//   2. min_p          keeps ids with p >= min_p · max p
//      top_k          keeps the k most probable ids
//   3. top_p          of what 2 leaves, the fewest most probable ids whose share of its mass is at least top_p
//
// Each keeps a row's best ids, ties going to the lower id; so what a filter keeps is told by its last id: a
// `filter_cut`. Ids of logit -inf are never kept; at least one id is. The order is vLLM's: top_p takes its share of
// what 2 left.
#pragma once

#include <string>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd {

/// What of a row may be drawn. The default keeps all: T = 1, no top-k, no top-p, no min-p.
struct filter {
    float temperature = 1; ///< divides the logits before any of these
    index_t top_k = 0;     ///< 0: all
    float top_p = 1;       ///< in (0, 1]; 1: all
    float min_p = 0;       ///< in [0, 1]; 0: all

    OPD_HD constexpr bool cuts() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

/// Penalties on ids that the text has already, step 0 above. The default has none; presence and frequency are in units
/// of logits.
struct penalties {
    float repetition = 1; ///< above 0; 1: none
    float presence = 0;   ///< taken off the logit of an id that the answer has
    float frequency = 0;  ///< likewise, for each time that it has it

    OPD_HD constexpr bool any() const { return !(repetition == 1 && presence == 0 && frequency == 0); }
    /// A logit of an id that the prompt or the answer has, the answer `count` times. In this order: that of vLLM.
    OPD_HD constexpr double of(double z, index_t count) const {
        z = z > 0 ? z / double(repetition) : z * double(repetition);
        return count > 0 ? z - double(frequency) * double(count) - double(presence) : z;
    }
    /// The derivative of the above. At z = 0 it has two; this is the one from below.
    OPD_HD constexpr double slope(double z) const { return z > 0 ? 1 / double(repetition) : double(repetition); }
};

/// The last id that a filter keeps of a row, and its logit. z is the logit as it is, not divided by T.
struct filter_cut {
    double z = -1e30; ///< every finite logit is above; -inf, which counts as -1e30, is not
    index_t id = -1;

    OPD_HD bool keeps(double z_of, index_t id_of) const { return z_of > z || (z_of == z && id_of <= id); }
    OPD_HD static filter_cut tighter(filter_cut a, filter_cut b) {
        return a.z > b.z || (a.z == b.z && a.id < b.id) ? a : b;
    }
};

namespace detail {
inline namespace OPD_ISA {

/// Temperatures at which float arithmetic still tells logits apart.
OPD_INLINE bool temperature_in_range(const float& t) { return is_finite(t) && t >= 1e-6F && t <= 1e6F; }
OPD_INLINE void check_temperature(const char* name, const float& t) {
    if (!temperature_in_range(t)) throw invalid_input(name, "must lie between 1e-6 and 1e6");
}
/// `name`: of the filter; names are put together where something is thrown, for nothing is allocated otherwise.
inline void check_filter(const filter& f, const char* name = "filter") {
    const auto refuse = [name](const char* member, const char* why) {
        throw invalid_input(std::string(name) + member, why);
    };
    if (!temperature_in_range(f.temperature)) refuse(".temperature", "must lie between 1e-6 and 1e6");
    if (f.top_k < 0) refuse(".top_k", "must be 0, for all ids, or more");
    if (!is_finite(f.top_p) || !(f.top_p > 0 && f.top_p <= 1)) refuse(".top_p", "must lie in (0, 1]; 1 keeps all");
    if (!is_finite(f.min_p) || !(f.min_p >= 0 && f.min_p <= 1)) refuse(".min_p", "must lie in [0, 1]; 0 keeps all");
}

} // namespace OPD_ISA
} // namespace detail

} // namespace opd
