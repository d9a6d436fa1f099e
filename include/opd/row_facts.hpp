// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a call knows of a row before its gradient is scaled, and what a selector is, which chooses by it
// (estimators/selectors.hpp has the library's).
#pragma once

#include <concepts>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd {

/// Numbers of a row; NaN: not known here.
struct row_facts {
    index_t row = 0;
    double value; ///< L_r, before any weight: the divergence, or its estimate from draws. NaN while a mixture is chosen
    double student_entropy; ///< H(p), nats, at the student's temperature; on a renormalised support or a kept set: of p
                            ///< there
    double teacher_entropy; ///< H(q), likewise
    double overlap;         ///< Σ min(p, q)
    double position;        ///< among the kept rows of its sequence, from 0: masked prompt rows do not count
    double log_ratio;       ///< of drawn tokens: Σ w (log p - log mu) / Σ w
    double gap;             ///< of drawn tokens: Σ w (log p - log q) / Σ w
    double age;             ///< staleness in versions; 0 if unknown
};

/// Facts that cost something, or need something of the call: a selector says which it reads, `reads()`, joined by |.
namespace fact {
inline constexpr unsigned student_entropy = 1; ///< one more read of the logits
inline constexpr unsigned teacher_entropy = 2; ///< with overlap; dense rows and renormalised supports
inline constexpr unsigned position = 4;        ///< env.offsets
inline constexpr unsigned drawn = 8;           ///< log_ratio, gap: caches of drawn tokens

// what is known of rows
inline constexpr unsigned of_dense = student_entropy | teacher_entropy | position; ///< and of renormalised supports
inline constexpr unsigned of_tokens = student_entropy | drawn | position;          ///< drawn ones
inline constexpr unsigned of_buckets = position; ///< supports that are not renormalised
} // namespace fact

/// Weights of the two parts of a weighted_sum in a row.
struct sum_weights {
    double a = 1, b = 1;
};

// clang-format off
/// What selected{…} takes: which facts it reads, as bits of `fact`, and the row's weight.
template <class S>
concept row_selector = requires(const S s, const row_facts& facts) {
    { s.reads() } -> std::convertible_to<unsigned>;
    { s(facts) } -> std::convertible_to<double>;
};
/// Whether a selector chooses the weights of a weighted_sum.
template <class S>
concept mixing_selector = row_selector<S> && requires(const S s, const row_facts& facts) {
    { s.mix(facts) } -> std::same_as<sum_weights>;
};
// clang-format on

namespace detail {

template <class E>
inline constexpr bool has_selector = requires {
    typename E::selector_type;
};
template <class E>
constexpr bool selector_mixes() {
    if constexpr (has_selector<E>)
        return mixing_selector<typename E::selector_type>;
    else
        return false;
}
/// What an estimator's selector is known at compile time to read: nothing without one, or where it is chosen at run
/// time.
template <class E>
struct selector_facts {
    static constexpr bool known = !has_selector<E>;
    static constexpr unsigned read = 0;
};
template <class E>
    requires requires { typename std::integral_constant<unsigned, E::selector_type::reads()>; }
struct selector_facts<E> {
    static constexpr bool known = true;
    static constexpr unsigned read = E::selector_type::reads();
};
/// What an estimator's selector reads. A constant where it can be, so that `reads` need not be for the device.
template <class E>
OPD_HD constexpr unsigned facts_read(const E& e) {
    if constexpr (selector_facts<E>::known)
        return selector_facts<E>::read;
    else
        return e.selector.reads();
}
inline void refuse_unknown_facts(unsigned reads, unsigned known) {
    if (reads & ~known)
        throw invalid_input("selector", "reads what these rows do not know; see docs/estimators/selectors.md");
}
inline void refuse_selector(bool unfit, const char* why) {
    if (unfit) throw invalid_input("selector", why);
}

} // namespace detail

} // namespace opd
