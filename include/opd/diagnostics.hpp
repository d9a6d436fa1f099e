// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a call reports beside its loss: plain counts and sums that merge across row blocks, micro-batches and ranks
// without keeping raw tensors. Derived figures are member functions.
//
//   effective sample size  (Σ rho)² / Σ rho²               ratio mean   Σ rho / n, 1 in expectation under mu
//   K1 = -log rho   K2 = ½ log² rho   K3 = rho - 1 - log rho   means over sampled tokens; their ratio is rho = p/mu
//   chi-squared     mean rho² - 1                         teacher KL  mean log mu - log q
//   entropy         H(p) = -Σ p log p, H(q)               overlap     Σ min(p, q), 1 where p = q
//   loss variance   of one draw's loss within a row of m >= 2 i.i.d. draws; a sequence's is the sum over its rows
//
// `mu_mismatch()`: the mean of rho lies more than 5 standard errors from 1, so the recorded log mu is not the law
// that the tokens were drawn from (raw log-probs recorded while sampling at another temperature, for one). Figures
// that an estimator does not produce, or that `env.measure` does not ask for, stay zero with their count at zero.
// `to_string(diagnostics)` says in one line what was dropped or mended. `diagnostics::fields` is the one list of all
// of them, by name, with how two merge: what prints, stores or sends them walks over it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd {

/// How a field of two diagnostics becomes one.
struct merged {
    struct sum {
        template <class T>
        OPD_HD OPD_INLINE static void into(T& a, const T& b) {
            a += b;
        }
        template <class T, std::size_t N>
        OPD_HD OPD_INLINE static void into(T (&a)[N], const T (&b)[N]) {
            for (std::size_t i = 0; i < N; ++i) a[i] += b[i];
        }
    };
    struct most {
        template <class T>
        OPD_HD OPD_INLINE static void into(T& a, const T& b) {
            a = a < b ? b : a;
        }
    };
    struct least {
        template <class T>
        OPD_HD OPD_INLINE static void into(T& a, const T& b) {
            a = b < a ? b : a;
        }
    };
    struct first { ///< row, -1: none
        OPD_HD OPD_INLINE static void into(index_t& a, const index_t& b) { a = a < 0 ? b : (b < 0 || a < b ? a : b); }
    };
};

/// Counts and sums of one call. Those of row blocks, micro-batches and ranks merge; `fields` says how each does.
struct diagnostics {
    // rows
    index_t rows = 0;           ///< rows of the call
    index_t kept = 0;           ///< rows that the mask keeps
    index_t bad_rows = 0;       ///< kept rows with bad contents: loss 0, gradient 0
    index_t first_bad_row = -1; ///< -1: none
    index_t infinite_rows = 0;  ///< kept rows whose loss, or gradient in its type, is infinite: treated by policy
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
    double teacher_kl_sum = 0; ///< Σ log mu - log q, weighted by the design
    index_t positive_advantage = 0, negative_advantage = 0, zero_advantage = 0; ///< tokens by the sign of A
    index_t clipped_positive = 0,
            clipped_negative = 0;      ///< tokens whose gradient the surrogate cut, by sign of A (A = 0: positive)
    index_t truncated = 0, masked = 0; ///< tokens whose ratio it cut, or that it left out
    index_t saturated = 0;             ///< log rho beyond ±80, saturated
    index_t baseline_missing = 0;      ///< leave-one-out with a single sample: baseline 0
    index_t outside_kept = 0;          ///< tokens outside the set that their row's filter kept: the row is bad
    index_t dropped = 0;               ///< tokens that env.frozen.keep leaves out
    index_t certain_mu = 0;            ///< log mu of exactly 0: certain tokens, or placeholders
    index_t missing_mu = 0;            ///< tokens of teacher::missing_mu without a log mu: ratio 1
    index_t variance_rows = 0;         ///< rows of m >= 2 i.i.d. draws
    double loss_variance_sum = 0;      ///< Σ over them of the variance of one draw's loss

    // supports
    index_t support_rows = 0;
    double student_mass_sum = 0, teacher_mass_sum = 0; ///< Σ Z_p, Σ Z_q where known
    double student_mass_min = 1, teacher_mass_min = 1;
    index_t tail_floored = 0; ///< teacher tails that log1p(-Z_q) lost and a floor replaced

    // of rows: entropies and the overlap of dense rows where env.measure.entropy asks; the overlap on a support where
    // Z_p is known
    index_t student_entropy_rows = 0, teacher_entropy_rows = 0, overlap_rows = 0;
    double student_entropy_sum = 0, teacher_entropy_sum = 0, overlap_sum = 0;

    // rows that a selector (estimators/selectors.hpp) has weighed, how many of them with 0, and the weights
    index_t selector_rows = 0, selector_left_out = 0;
    double selector_weight_sum = 0;

    // staleness, in versions, of kept rows that carry one
    static constexpr int staleness_bins = 33; ///< 0..31, then 32 and more
    index_t staleness[staleness_bins] = {};
    index_t staleness_max = 0;
    index_t future_versions = 0; ///< of a version after env.version: counted as not stale

    /// visit(name, pointer to member, rule of `merged`) for every field.
    template <class Visit>
    OPD_HD OPD_INLINE static constexpr void fields(Visit&& visit) {
        using d = diagnostics;
        constexpr merged::sum sum;
        constexpr merged::most most;
        constexpr merged::least least;
        constexpr merged::first first;
        visit("rows", &d::rows, sum), visit("kept", &d::kept, sum);
        visit("bad_rows", &d::bad_rows, sum), visit("first_bad_row", &d::first_bad_row, first);
        visit("infinite_rows", &d::infinite_rows, sum), visit("first_infinite_row", &d::first_infinite_row, first);
        visit("clamped_rows", &d::clamped_rows, sum), visit("careful_rows", &d::careful_rows, sum);
        visit("kept_loss", &d::kept_loss, sum);
        visit("tokens", &d::tokens, sum), visit("ratio_sum", &d::ratio_sum, sum);
        visit("ratio_square_sum", &d::ratio_square_sum, sum), visit("ratio_max", &d::ratio_max, most);
        visit("k1_sum", &d::k1_sum, sum), visit("k2_sum", &d::k2_sum, sum), visit("k3_sum", &d::k3_sum, sum);
        visit("teacher_kl_sum", &d::teacher_kl_sum, sum);
        visit("positive_advantage", &d::positive_advantage, sum);
        visit("negative_advantage", &d::negative_advantage, sum), visit("zero_advantage", &d::zero_advantage, sum);
        visit("clipped_positive", &d::clipped_positive, sum), visit("clipped_negative", &d::clipped_negative, sum);
        visit("truncated", &d::truncated, sum), visit("masked", &d::masked, sum);
        visit("saturated", &d::saturated, sum), visit("baseline_missing", &d::baseline_missing, sum);
        visit("outside_kept", &d::outside_kept, sum), visit("dropped", &d::dropped, sum),
            visit("certain_mu", &d::certain_mu, sum), visit("missing_mu", &d::missing_mu, sum);
        visit("variance_rows", &d::variance_rows, sum), visit("loss_variance_sum", &d::loss_variance_sum, sum);
        visit("support_rows", &d::support_rows, sum);
        visit("student_mass_sum", &d::student_mass_sum, sum), visit("teacher_mass_sum", &d::teacher_mass_sum, sum);
        visit("student_mass_min", &d::student_mass_min, least), visit("teacher_mass_min", &d::teacher_mass_min, least);
        visit("tail_floored", &d::tail_floored, sum);
        visit("student_entropy_rows", &d::student_entropy_rows, sum);
        visit("teacher_entropy_rows", &d::teacher_entropy_rows, sum), visit("overlap_rows", &d::overlap_rows, sum);
        visit("student_entropy_sum", &d::student_entropy_sum, sum);
        visit("teacher_entropy_sum", &d::teacher_entropy_sum, sum), visit("overlap_sum", &d::overlap_sum, sum);
        visit("selector_rows", &d::selector_rows, sum), visit("selector_left_out", &d::selector_left_out, sum);
        visit("selector_weight_sum", &d::selector_weight_sum, sum);
        visit("staleness", &d::staleness, sum), visit("staleness_max", &d::staleness_max, most);
        visit("future_versions", &d::future_versions, sum);
    }

    OPD_HD OPD_INLINE void merge(const diagnostics& o) { fields(merging{*this, o}); }

    double ratio_mean() const { return tokens ? ratio_sum / double(tokens) : 0; }
    double effective_sample_size() const { return ratio_square_sum > 0 ? ratio_sum * ratio_sum / ratio_square_sum : 0; }
    /// Effective samples over samples: a factor for a learning rate that should not follow few large ratios (VCPO,
    /// arXiv 2602.17616). The library never applies it.
    double suggested_scale() const { return tokens ? effective_sample_size() / double(tokens) : 1; }
    double chi_squared() const { return tokens ? ratio_square_sum / double(tokens) - 1 : 0; }
    double k1() const { return tokens ? k1_sum / double(tokens) : 0; }
    double k2() const { return tokens ? k2_sum / double(tokens) : 0; }
    double k3() const { return tokens ? k3_sum / double(tokens) : 0; }
    double teacher_kl() const { return tokens ? teacher_kl_sum / double(tokens) : 0; }
    double loss_variance() const { return variance_rows ? loss_variance_sum / double(variance_rows) : 0; }
    double student_entropy() const { return mean(student_entropy_sum, student_entropy_rows); }
    double teacher_entropy() const { return mean(teacher_entropy_sum, teacher_entropy_rows); }
    double overlap() const { return mean(overlap_sum, overlap_rows); }
    double student_mass() const { return support_rows ? student_mass_sum / double(support_rows) : 0; }
    double teacher_mass() const { return support_rows ? teacher_mass_sum / double(support_rows) : 0; }
    /// 1 without a selector.
    double mean_selector_weight() const { return selector_rows ? selector_weight_sum / double(selector_rows) : 1; }
    double mean_kept_loss() const { return kept > bad_rows ? kept_loss / double(kept - bad_rows) : 0; }
    bool mu_mismatch() const {
        if (tokens < 2) return false;
        const double n = double(tokens), mean = ratio_sum / n;
        const double variance = (ratio_square_sum - n * mean * mean) / (n - 1);
        return std::abs(mean - 1) > 5 * std::sqrt((variance > 0 ? variance : 0) / n) + 1e-5;
    }

private:
    struct merging {
        diagnostics& to;
        const diagnostics& from;
        template <class T, class Rule>
        OPD_HD OPD_INLINE void operator()(const char*, T diagnostics::*field, Rule) const {
            Rule::into(to.*field, from.*field);
        }
    };
    static double mean(double sum, index_t n) { return n ? sum / double(n) : 0; }
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
    note(d.outside_kept, " tokens outside their kept set");
    note(d.selector_left_out, " left out by the selector");
    note(d.dropped, " tokens dropped by env.frozen.keep");
    note(d.certain_mu, " log mu of exactly 0");
    note(d.baseline_missing, " samples without a baseline");
    note(d.tail_floored, " teacher tails floored");
    note(d.missing_mu, " without log mu: ratio 1");
    note(d.future_versions, " of a version after env.version");
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

/// Kept rows with bad contents, more than `env.on_bad` allows. Thrown after the batch: loss, gradient and every other
/// output are written, 0 in the bad rows; `result` is what the call would have returned.
struct bad_contents : error {
    opd::result result;
    OPD_INLINE explicit bad_contents(const opd::result& r) // inlined: its copy of `result` uses the caller's registers
        : error("opd: " + std::to_string(r.diagnostics.bad_rows) + " of " + std::to_string(r.diagnostics.kept) +
                " kept rows have bad contents, the first is row " + std::to_string(r.diagnostics.first_bad_row) +
                "; more than env.on_bad allows. The gradient is written and 0 in those rows"),
          result(r) {}
};

/// The same of a row whose logits do not show it: its value or gradient is beyond what its type holds. Thrown after
/// the batch; `result` is what the call would have returned.
struct infinite_result : infinite_value {
    opd::result result;
    OPD_INLINE explicit infinite_result(const opd::result& r)
        : infinite_value(
              r.diagnostics.first_infinite_row,
              "its value or gradient is beyond what its type holds (policy `raise`). The gradient is written"),
          result(r) {}
};

namespace detail {
inline namespace OPD_ISA {
/// Throws if a row turned out infinite when it was written.
inline void raise_infinite(const result& r, const infinite& policy) {
    if (policy.act == infinite::action::raise && r.diagnostics.infinite_rows > 0) throw infinite_result(r);
}
/// Throws if the batch holds more bad rows than the policy allows.
inline void raise_bad(const result& r, const bad& policy) {
    const index_t n = r.diagnostics.bad_rows;
    if (n > 0 && policy.act != bad::action::count && double(n) > policy.share * double(r.diagnostics.kept))
        throw bad_contents(r);
}
} // namespace OPD_ISA
} // namespace detail

} // namespace opd
