// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A row of few entries, as an estimator sees it: tokens that were drawn, or a support and the rest of the vocabulary.
// The estimator owns its row: one function, host and device, from entries to a loss and c = dL/dlog p of each. The
// backend does what is V-sized: it finds the student's normaliser, gathers the entries, and pulls c back through the
// softmax,
//
//   dz[v] = g (c[v] - p[v] Σ c),   g = scale/T
//
// What an estimator declares, and the concept that a backend asks for:
//
//   sampled_estimator    takes = cache_kind::samples or cache_kind::weighted, or both by reads(kind);
//                        row(sampled_entry*, m, facts, diagnostics&)
//   support_estimator    takes = cache_kind::support; row(support_entries&, facts, diagnostics&); the student's
//                        normaliser is over the vocabulary; reads_tail = true: log_q_rest is the teacher's
//   renormalised_estimator  takes = cache_kind::support; on_support, a divergence: both normalisers are over the
//                           support
//
// Optional in each: validate() and validate_cache(cache), which throw invalid_input; reads_columns(); traits(law)
// (traits.hpp); infinite_where_teacher_zero(), infinite_where_student_zero() for check::contents and infinite::raise;
// `well_formed`, false where a static_assert of the class has said what is wrong. See docs/concepts/entries.md for
// one of each.
#pragma once

#include <cmath>
#include <concepts>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/row_program.hpp"
#include "opd/teacher.hpp"

namespace opd {

/// What a row knows beside its entries.
struct entry_facts {
    infinite on_infinite = {};
    double age = 0; ///< staleness in versions; 0 if unknown
    index_t row = 0;
    bool has_sequence = false; ///< sequence_log_ratio is given (env.frozen)
    double sequence_log_ratio = 0;
    bool has_advantage = false; ///< the entries' advantage is given (env.frozen)
    bool iid = true;            ///< the entries are i.i.d. draws, of weight 1/m
    double baseline = 0;        ///< the cache's, where the estimator reads_columns it
    double mu_entropy = 0;      ///< likewise
};

/// Columns of a cache that an estimator cannot do without: `unsigned reads_columns() const`, joined by |. A call
/// whose cache lacks one throws before anything is written.
namespace column {
/// Of a cache of drawn tokens; log_mu also of a support.
inline constexpr unsigned log_prox = 1, log_ref = 2, advantage = 4, baseline = 8, mu_entropy = 16, log_mu = 32;
inline constexpr unsigned sequence_log_ratio = 64; ///< of env.frozen
} // namespace column

/// What an estimator says of a row, beside c.
struct entry_row {
    double loss = 0;
    bool bad = false;      ///< the entries make no sense: loss 0, gradient 0, counted
    bool infinite = false; ///< the loss is; by env.on_infinite it was floored, or loss and c are 0
};

/// A token that was drawn. In: everything but c. Out: c, with its weight.
struct sampled_entry {
    index_t id;
    double weight;                           ///< samples: 1/m
    double log_p;                            ///< current student, rounded to the cache's type; -inf: no mass
    double log_mu, log_prox, log_ref, log_q; ///< log_prox and log_ref: log_mu where the cache has none
    bool exact;                              ///< in the design with certainty (weighted alone)
    bool keep;                               ///< false: adds neither loss nor c (env.frozen)
    int slot;                                ///< of the cache
    double factor;                           ///< of loss and c (env.frozen); 1 if none, 0 where not kept
    double advantage;                        ///< with facts.has_advantage
    double outside;                          ///< the cache's advantage; 0 if it has none
    double c;
};

/// A support of k ids and one bucket for the rest of the vocabulary. In: the log-probs. Out: h = c - p Σc of each,
/// which sums to 0; of the rest h_rest belongs to the ids outside in proportion to their p. Set h to c and call
/// `through_softmax`.
struct support_entries {
    int k;
    const double *log_p, *log_q; ///< (k); -inf: no mass
    double log_p_rest;           ///< -inf: no logit outside the support has mass
    double log_q_rest;           ///< with reads_tail: as the cache states it, else inferred from log q; else -inf
    double* h;                   ///< (k)
    double h_rest = 0;
    const double* log_mu = nullptr; ///< (k), where the cache has it
};

namespace detail {
inline namespace OPD_ISA {

OPD_HD OPD_INLINE double mass_of(double log_p) { return log_p < -745 ? 0 : ::exp(log_p); }

/// `through_softmax` where the largest bucket (k: the rest) and Σ c are known.
OPD_HD inline void through_softmax(support_entries& s, int top, double sum_c) {
    // On a peaked row c and p Σc cancel at the top, which has what the others leave: Σ h = 0.
    double others = 0;
    for (int j = 0; j <= s.k; ++j) {
        if (j == top || (j == s.k && is_neg_inf(s.log_p_rest))) continue;
        double& to = j < s.k ? s.h[j] : s.h_rest;
        to -= mass_of(j < s.k ? s.log_p[j] : s.log_p_rest) * sum_c;
        others += to;
    }
    (top < s.k ? s.h[top] : s.h_rest) = -others;
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// h and h_rest from c to c - p Σc. A rest without mass has no logit to move: its c is left out.
OPD_HD inline void through_softmax(support_entries& s) {
    const bool rest = !detail::is_neg_inf(s.log_p_rest);
    int top = rest ? s.k : -1;
    double sum_c = rest ? s.h_rest : 0;
    if (!rest) s.h_rest = 0;
    for (int j = 0; j < s.k; ++j) {
        sum_c += s.h[j];
        if (!detail::is_neg_inf(s.log_p[j]) && (top < 0 || s.log_p[j] > (top < s.k ? s.log_p[top] : s.log_p_rest)))
            top = j;
    }
    if (top >= 0) detail::through_softmax(s, top, sum_c);
}

} // namespace OPD_ISA

// clang-format off
/// An estimator of drawn tokens: from the m entries of a row to its loss, and c = dL/dlog p written into each entry.
template <class E>
concept sampled_estimator = requires(const E e, sampled_entry* x, int m, entry_facts facts, diagnostics& d) {
    requires E::takes == cache_kind::samples || E::takes == cache_kind::weighted;
    { e.row(x, m, facts, d) } -> std::same_as<entry_row>;
};
/// An estimator of k ids a row and the rest of the vocabulary; the student's normaliser is over all V.
template <class E>
concept support_estimator = requires(const E e, support_entries& s, entry_facts facts, diagnostics& d) {
    requires E::takes == cache_kind::support;
    { e.row(s, facts, d) } -> std::same_as<entry_row>;
};
/// An estimator of k ids a row whose normalisers are over these ids: a divergence as its member `on_support`.
template <class E>
concept renormalised_estimator = requires(const E e) {
    requires E::takes == cache_kind::support;
    requires divergence<std::remove_cvref_t<decltype(e.on_support)>>;
};
// clang-format on

namespace detail {

/// Whether estimator E reads a cache of kind K.
template <class E, cache_kind K>
constexpr bool reads_cache() {
    if constexpr (requires { E::reads(K); })
        return E::reads(K);
    else if constexpr (requires { E::takes; })
        return E::takes == K;
    else
        return false;
}

/// The columns that an estimator, or a policy of one, reads.
template <class E>
OPD_HD constexpr unsigned columns_of(const E& e) {
    if constexpr (requires { e.reads_columns(); })
        return e.reads_columns();
    else
        return 0;
}

/// Whether an estimator of a support asks for the teacher's mass outside it.
template <class E>
OPD_HD constexpr bool reads_tail() {
    if constexpr (requires { E::reads_tail; })
        return E::reads_tail;
    else
        return false;
}

} // namespace detail

} // namespace opd
