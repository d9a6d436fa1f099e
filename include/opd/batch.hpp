// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A batch of rows as the caller describes it: which rows count (mask), how much (weights), how they form sequences
// (offsets), which policy drew them (versions), how their losses become one number (reduction), and what happens to bad
// or infinite rows. All of it is optional; `env{}` means every row, weight 1, mean over rows.
//
//   loss = Σ_r w_r f_r L_r over kept rows,   dL/dz_r = w_r f_r dL_r/dz_r,   with f by reduction:
//
//   sum                1
//   token_mean         1 / (number of kept rows)                  or 1/normaliser if one is given
//   sequence_mean      1 / (S · kept rows of the sequence)        S: sequences with a kept row, or normaliser
//   sequence_sum_mean  1 / S
//   constant           1 / normaliser
//
// A micro-batch passes the whole batch's count as `normaliser`; then cutting a batch changes the total by rounding
// only. Weights are never part of a count. Nor are contents: a kept row that turns out bad counts and adds 0, so that
// a factor depends on masks and sizes alone and is the same on every rank; loss · kept / (kept - bad_rows) is
// token_mean over the good rows. No kept row: loss 0, gradient 0, and the diagnostics say so.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/view.hpp"

namespace opd {

namespace detail {

template <class R>
concept iterable = requires(R& r) {
    std::begin(r);
    std::end(r);
};

/// A range of the caller's as a view of its own element type.
template <class R>
constexpr auto whole_range(R& r) {
    constexpr bool contiguous = requires { std::span(r); };
    static_assert(contiguous,
                  "opd: masks, weights and offsets lie in contiguous memory: a vector, span or array, and not of "
                  "std::vector<bool>, which packs its bits");
    if constexpr (contiguous) {
        const std::span all(r);
        return vector_view<typename decltype(all)::element_type>(all.data(), static_cast<index_t>(all.size()));
    } else {
        return vector_view<const bool>(); // one message is enough
    }
}

/// A member that has another name: what is given to it is a compile error that says which.
struct misspelt {
    misspelt() = default;
    template <class T>
    OPD_HD constexpr misspelt(const T&) {
        static_assert(std::is_same_v<T, misspelt>, "opd: the member is spelt env.normaliser");
    }
};

} // namespace detail

/// How the losses of rows become one number: the table at the head. `constant` needs env's `normaliser`.
enum class reduce { sum, token_mean, sequence_mean, sequence_sum_mean, constant };

/// Whether a row counts. From any contiguous run of bool or integers (non-zero: kept), from targets with an ignored
/// value: `row_mask::ignoring(targets, -100)`, or from the numbers of routes: `row_mask::of_route(routes, 2)`.
template <space Space = space::host>
struct row_mask {
    const void* data = nullptr;
    index_t size = 0;
    int bytes = 0;          ///< element width: 1, 2, 4, 8
    bool has_route = false; ///< the rows of `ignore` are those that are kept; of the others, see of_route
    bool clears = true;
    std::int64_t ignore = 0; ///< rows of this number are left out

    row_mask() = default;
    template <class T>
    constexpr row_mask(vector_view<T, Space> v) : data(v.data), size(v.size), bytes(int(sizeof(T))) {
        static_assert(std::integral<std::remove_const_t<T>> && sizeof(T) <= 8,
                      "opd: a mask is of bool or of integers of at most 64 bits");
    }
    template <detail::iterable R>
        requires(Space == space::host)
    constexpr row_mask(R&& r) : row_mask(detail::whole_range(r)) {}

    template <class T>
    static constexpr row_mask ignoring(vector_view<T, Space> targets,
                                       std::type_identity_t<std::remove_const_t<T>> value) {
        row_mask m(targets);
        constexpr int unused = 64 - 8 * int(sizeof(T)); // `kept` reads every type as a signed one
        m.ignore = static_cast<std::int64_t>(value) << unused >> unused;
        return m;
    }
    /// The rows of one route (routes.hpp). Rows of another route, a number of at least 0, are another call's: nothing
    /// of theirs is written or counted. Those of none, below 0, are masked ones; unless `clears`, another call's too.
    template <class T>
    static constexpr row_mask of_route(vector_view<T, Space> routes, index_t route, bool clears = true) {
        static_assert(std::signed_integral<std::remove_const_t<T>>, "opd: routes are signed: -1 is none");
        row_mask m(routes);
        m.has_route = true, m.ignore = route, m.clears = clears;
        return m;
    }

    OPD_HD constexpr bool empty() const { return data == nullptr; }
    OPD_HD OPD_INLINE bool kept(index_t r) const { return data == nullptr || keeps(number(r)); }
    /// Whether a row is another call's.
    OPD_HD OPD_INLINE bool foreign(index_t r) const {
        if (!has_route || data == nullptr || kept(r)) return false;
        return !clears || number(r) >= 0;
    }
    /// How many of the rows begin, begin + step, ... below `end` are kept.
    OPD_HD OPD_INLINE index_t kept_of(index_t begin, index_t end, index_t step = 1) const {
        if (begin >= end) return 0;
        if (data == nullptr) return (end - begin + step - 1) / step;
        switch (bytes) { // sign only matters against `ignore`
        case 1:
            return count<std::int8_t>(begin, end, step);
        case 2:
            return count<std::int16_t>(begin, end, step);
        case 4:
            return count<std::int32_t>(begin, end, step);
        default:
            return count<std::int64_t>(begin, end, step);
        }
    }

private:
    template <class T>
    OPD_HD OPD_INLINE index_t count(index_t begin, index_t end, index_t step) const {
        const T* const rows = static_cast<const T*>(data);
        index_t n = 0;
        for (index_t r = begin; r < end; r += step) n += keeps(rows[r]);
        return n;
    }
    OPD_HD OPD_INLINE bool keeps(std::int64_t value) const { return (value == ignore) == has_route; }
    OPD_HD OPD_INLINE std::int64_t number(index_t r) const {
        switch (bytes) {
        case 1:
            return static_cast<const std::int8_t*>(data)[r];
        case 2:
            return static_cast<const std::int16_t*>(data)[r];
        case 4:
            return static_cast<const std::int32_t*>(data)[r];
        default:
            return static_cast<const std::int64_t*>(data)[r];
        }
    }
};

/// A weight for each row, float or double, read as double.
template <space Space = space::host>
struct row_weights {
    const void* data = nullptr;
    index_t size = 0;
    int bytes = 0; ///< element width: 4 float, 8 double

    row_weights() = default;
    template <class T>
    constexpr row_weights(vector_view<T, Space> v) : data(v.data), size(v.size), bytes(int(sizeof(T))) {
        static_assert(std::is_same_v<std::remove_const_t<T>, float> || std::is_same_v<std::remove_const_t<T>, double>,
                      "opd: weights of rows are float or double");
    }
    template <class T>
    constexpr row_weights(T* p, index_t n) : row_weights(vector_view<T, Space>(p, n)) {}
    template <detail::iterable R>
        requires(Space == space::host)
    constexpr row_weights(R&& r) : row_weights(detail::whole_range(r)) {}

    OPD_HD constexpr bool empty() const { return data == nullptr; }
    OPD_HD double operator[](index_t r) const {
        return bytes == 4 ? double(static_cast<const float*>(data)[r]) : static_cast<const double*>(data)[r];
    }
    OPD_HD bool finite(index_t r) const { // by the bits in memory: a result is taken to be finite under -Ofast
        return bytes == 4 ? detail::is_finite(static_cast<const float*>(data)[r])
                          : detail::is_finite(static_cast<const double*>(data)[r]);
    }
};

/// The first row of each sequence, 32 or 64 bits wide, read as 64.
template <space Space = space::host>
struct row_offsets {
    const void* data = nullptr;
    index_t size = 0;
    int bytes = 0; ///< element width: 4, 8

    row_offsets() = default;
    template <class T>
    constexpr row_offsets(vector_view<T, Space> v) : data(v.data), size(v.size), bytes(int(sizeof(T))) {
        static_assert(std::signed_integral<std::remove_const_t<T>> && (sizeof(T) == 4 || sizeof(T) == 8),
                      "opd: offsets of sequences are int32 or int64");
    }
    template <class T>
    constexpr row_offsets(T* p, index_t n) : row_offsets(vector_view<T, Space>(p, n)) {}
    template <detail::iterable R>
        requires(Space == space::host)
    constexpr row_offsets(R&& r) : row_offsets(detail::whole_range(r)) {}

    OPD_HD constexpr bool empty() const { return data == nullptr; }
    OPD_HD index_t operator[](index_t i) const {
        return bytes == 4 ? index_t{static_cast<const std::int32_t*>(data)[i]}
                          : index_t{static_cast<const std::int64_t*>(data)[i]};
    }
};

/// What happens to a row whose loss is infinite: p > 0 = q under reverse KL, q > 0 = p under forward KL, decided by the
/// bits of the logits. Counted in every case.
struct infinite {
    enum class action { floor, skip, raise } act = action::floor;
    double floor_at = -30; ///< nats: the log-prob inside the logarithm is raised to this on every entry of that row

    static constexpr infinite floor(double nats = -30) { return {action::floor, nats}; }
    static constexpr infinite skip() { return {action::skip, -30}; }
    static constexpr infinite raise() { return {action::raise, -30}; }
};

/// What follows when kept rows hold bad contents (NaN, +inf, ids out of range, …). The row itself always gets loss 0
/// and gradient 0 and is counted. The others throw `bad_contents` once the whole batch is done: every output is
/// written by then, and the exception holds the result. On CUDA `fetch` throws. The share is of this call's kept
/// rows.
struct bad {
    enum class action { count, raise_above, raise } act = action::count;
    double share = 0; ///< raise_above: the largest share that passes, between 0 and 1

    static constexpr bad count() { return {action::count, 0}; }
    static constexpr bad raise_above(double share) { return {action::raise_above, share}; }
    static constexpr bad raise() { return {action::raise, 0}; }
};

/// What becomes of a row whose gradient its type does not hold (half ends at 65,504). Counted in infinite_rows in
/// either case. `skip_row`: loss 0, gradient 0; with beta != 0, where what was there cannot be had back, as
/// `saturate`: entries that do not fit become the largest finite number of the type.
enum class overflow { skip_row, saturate };

/// `count`: a row with bad contents gets loss 0 and gradient 0 and is counted. `contents`: a pass of its own validates
/// everything first and throws `invalid_input` naming the argument and the row, before anything is written.
enum class check { count, contents };

/// What a call promises about its bits. Results never depend on the thread count.
enum class determinism {
    not_guaranteed,
    run_to_run,      ///< the same call on the same build gives the same bits (default)
    tiling_invariant ///< also for any tiling of the vocabulary (docs/concepts/source.md); refused on a device
};

/// Student and teacher vocabularies of different size. The softmax runs over the common ids only; nothing is padded.
/// To have what lies beyond as one bucket, say teacher::lumped{cache}.
enum class vocabulary { must_match, drop_and_renormalise };

/// What an earlier pass over the whole batch decided about its drawn tokens: constants here, no gradient flows
/// through them. A pass is `token_logp` over every micro-batch and a fit over its table; see docs/concepts/frozen.md.
/// (N,m) as the cache has them.
template <space Space = space::host>
struct frozen_batch {
    matrix_view<const std::uint8_t, Space> keep =
        {};                                       ///< (N,m) 0: the token adds neither loss nor gradient; empty: all do
    matrix_view<const double, Space> weight = {}; ///< (N,m) factor of a token's loss and gradient; empty: 1
    vector_view<const double, Space> sequence_log_ratio =
        {}; ///< (N) of the row's sequence, for token_in; empty: each token's own
    matrix_view<const double, Space> advantage = {}; ///< (N,m) instead of the estimator's own; empty: that

    OPD_HD constexpr bool empty() const {
        return keep.empty() && weight.empty() && sequence_log_ratio.data == nullptr && advantage.empty();
    }
};

/// Figures that cost something and are taken where they are asked for (docs/concepts/diagnostics.md).
template <space Space = space::host>
struct measures {
    /// Entropies of student and teacher and their overlap Σ min(p, q): one more pass over the logits. Dense rows; of
    /// drawn tokens the student's entropy.
    bool entropy = false;
    vector_view<index_t, Space> ratios =
        {}; ///< (ratio_sketch::bins) importance ratios are added to it: ratio_sketch.hpp
};

/// Everything about a call that is not student, teacher or estimator.
template <space Space = space::host>
struct basic_env {
    reduce reduction = reduce::token_mean;
    row_mask<Space> mask = {};       ///< (N) kept rows; empty: all
    row_weights<Space> weights = {}; ///< (N) float or double, any sign; empty: 1
    row_offsets<Space> offsets = {}; ///< (S+1) int32 or int64: first row of each sequence, ascending, from 0 to N
    vector_view<const std::int32_t, Space> versions = {}; ///< (N) policy version that drew the row; empty: unknown
    std::int32_t version = 0;                        ///< the student's version now; staleness is version - versions[r]
    double normaliser = 0;                           ///< count to divide by; 0: count this batch
    detail::misspelt normalizer = {};                ///< one sentence for who writes it so
    float beta = 0;                                  ///< dz = beta·dz + gradient
    float beta_loss = 0;                             ///< losses = beta_loss·losses + loss
    vector_view<float, Space> losses = {};           ///< (N) out: w_r·L_r before the reduction's factor
    vector_view<double, Space> lse = {};             ///< (N) out: the student's log-sum-exp at its temperature
    vector_view<const double, Space> given_lse = {}; ///< (N) in: the student's log-sum-exp, used instead of a pass
    frozen_batch<Space> frozen = {}; ///< estimators of drawn tokens: what was decided about the whole batch
    infinite on_infinite = {};
    bad on_bad = {};                           ///< rows with bad contents: counted, or above a share raised
    overflow on_overflow = overflow::skip_row; ///< rows whose gradient its type cannot hold
    double loss_clamp = 0; ///< per-row |loss| above this is cut to it with gradient 0, counted; 0: none
    check checks = check::count;
    determinism level = determinism::run_to_run; ///< what bits must not depend on
    vocabulary vocab = vocabulary::must_match;
    measures<Space> measure = {}; ///< what diagnostics cost further passes for
};

/// Of a call on the host. Every member has a default: `{}` is every row, weight 1, mean over rows.
using env = basic_env<space::host>;
/// Of a call on a device: every span of it lies in device memory.
using device_env = basic_env<space::device>;

} // namespace opd
