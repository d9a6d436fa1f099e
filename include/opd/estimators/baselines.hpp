// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the drawn tokens of a row have in common: b_i is subtracted from A_i in the gradient, never in the value.
//
//     none              b = 0
//     leave_one_out     b_i = mean_{j≠i} rho_j A_j                    i.i.d. samples; no bias (Kool et al. 2019)
//     self_normalised   b_i = Σ_{j≠i} rho_j A_j / Σ_{j≠i} rho_j       likewise: b_i does not see draw i
//     minimum_variance  b_i = Σ_{j≠i} g_j A_j / Σ_{j≠i} g_j           likewise; g = (rho (1 - p))², where (1 - p)² is
//                                                                     |∇log p|² but for the other ids
//     given             b = the cache's column `baseline`             e.g. E_p[A] = -KL(p‖q): vOPD (arXiv 2605.07865)
//     exact_entries     b = Σ_exact p A / Σ_exact p                   over the entries in the design with certainty; 0
//                                                                     without any
//     value             b = Σ_exact p A                               likewise; E_p[A] itself where they are the whole
//                                                                     vocabulary
//
// No baseline here biases: what it looks at is independent of the draw that it is subtracted from. (One from the same
// draws does, as the minimum-variance form over all of them: a control in tests/estimators/descent_test.cpp.)
//
// A baseline adds up a row, add(entry, rho, A) for each entry, and then answers of(entry, rho, A, m) for each;
// start(facts) comes first, if it has one. `pairs`: it needs a second token, and a row of one is counted
// (diagnostics::baseline_missing). `reads(kind)`: the caches that it is for. A class of your own is as good as these.
#pragma once

#include <cmath>
#include <concepts>

#include "opd/config.hpp"
#include "opd/entries.hpp"
#include "opd/teacher.hpp"

namespace opd {

namespace baseline {

/// b = 0.
struct none {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind) { return true; }
    OPD_HD OPD_INLINE void add(const sampled_entry&, double, double) {}
    OPD_HD OPD_INLINE double of(const sampled_entry&, double, double, int) const { return 0; }
};

/// b_i = mean of rho_j A_j over the row's other draws; 0 where there is none. For i.i.d. samples. Kool et al. 2019.
struct leave_one_out {
    static constexpr bool pairs = true;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples; }
    double rho_a = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry&, double rho, double a) { rho_a += rho * a; }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double rho, double a, int m) const {
        return m > 1 ? (rho_a - rho * a) / (m - 1) : 0;
    }
};

/// b_i = Σ rho_j A_j / Σ rho_j over the row's other draws; 0 where there is none. For i.i.d. samples.
struct self_normalised {
    static constexpr bool pairs = true;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples; }
    double rho_a = 0, rho_sum = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry&, double rho, double a) { rho_a += rho * a, rho_sum += rho; }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double rho, double a, int m) const {
        return m > 1 && rho_sum - rho > 0 ? (rho_a - rho * a) / (rho_sum - rho) : 0;
    }
};

/// b_i = Σ g_j A_j / Σ g_j over the row's other draws, g = (rho (1 - p))²: of least variance, were |∇log p|² (1 - p)².
/// For i.i.d. samples.
struct minimum_variance {
    static constexpr bool pairs = true;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples; }
    double ga = 0, g_sum = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry& x, double rho, double a) {
        const double g = size(x, rho);
        ga += g * a, g_sum += g;
    }
    OPD_HD OPD_INLINE double of(const sampled_entry& x, double rho, double a, int m) const {
        const double g = size(x, rho), left = g_sum - g;
        return m > 1 && left > 1e-9 * g_sum ? (ga - g * a) / left : 0;
    }

private:
    OPD_HD OPD_INLINE static double size(const sampled_entry& x, double rho) {
        const double rest = rho * -::expm1(x.log_p < 0 ? x.log_p : 0);
        return rest * rest;
    }
};

/// b from the cache's column `baseline` (N): the caller's, which must not depend on the row's own draws.
struct given {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind) { return true; }
    OPD_HD static constexpr unsigned reads_columns() { return column::baseline; }
    double b = 0;
    OPD_HD OPD_INLINE void start(const entry_facts& facts) { b = facts.baseline; }
    OPD_HD OPD_INLINE void add(const sampled_entry&, double, double) {}
    OPD_HD OPD_INLINE double of(const sampled_entry&, double, double, int) const { return b; }
};

/// b = Σ p A / Σ p over the entries taken for certain: the mean advantage of the head. 0 where there are none.
struct exact_entries {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind) { return true; } // of i.i.d. samples none is certain: b = 0
    double pa = 0, p_sum = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry& x, double, double a) {
        if (!x.exact) return;
        const double p = ::exp(x.log_p);
        pa += p * a, p_sum += p;
    }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double, double, int) const { return p_sum > 0 ? pa / p_sum : 0; }
};

/// b = Σ p A over the entries taken for certain: the part of E_p[A] that is known. For weighted caches.
struct value {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::weighted; }
    double pa = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry& x, double, double a) {
        if (x.exact) pa += ::exp(x.log_p) * a;
    }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double, double, int) const { return pa; }
};

} // namespace baseline

// clang-format off
/// What is subtracted from an advantage in the gradient. See the head of this file.
template <class B>
concept baseline_policy = requires(B b, const B c, const sampled_entry& x, double v, int m) {
    { B::pairs } -> std::convertible_to<bool>;
    { B::reads(cache_kind::samples) } -> std::convertible_to<bool>;
    b.add(x, v, v);
    { c.of(x, v, v, m) } -> std::convertible_to<double>;
};
// clang-format on

} // namespace opd
