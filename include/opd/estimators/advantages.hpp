// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a drawn token is worth, and what of that all tokens of its row have in common. Both are policies: small structs that an
// estimator of drawn tokens holds, and yours as well as these.
//
//   advantage   A = f(entry), before any clip                       theta: log q - log p      old: log q - log mu
//   baseline    b_i, subtracted from A_i in the gradient, never in the value; it may look at the row's other tokens
//
//     none              b = 0
//     leave_one_out     b_i = mean_{j≠i} rho_j A_j                  i.i.d. samples; no bias
//     self_normalised   b_i = Σ_{j≠i} rho_j A_j / Σ_{j≠i} rho_j     i.i.d. samples; a small bias, less variance
//     exact_entries     b = Σ_exact p A / Σ_exact p                 weighted entries, over those in the design with certainty
//
// A baseline adds up a row, add(entry, rho, A) for each entry, and then answers of(entry, rho, A, m) for each. `pairs`: it needs a
// second token, and a row of one is counted (diagnostics::baseline_missing). `reads(kind)`: the caches that it is for.
#pragma once

#include <cmath>
#include <concepts>

#include "opd/config.hpp"
#include "opd/entries.hpp"
#include "opd/teacher.hpp"

namespace opd {

namespace advantage {

/// log q - log p with the current student.
struct theta {
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const { return x.log_q - x.log_p; }
};
/// log q - log mu, as at rollout time.
struct old {
    OPD_HD OPD_INLINE double operator()(const sampled_entry& x) const { return x.log_q - x.log_mu; }
};

} // namespace advantage

namespace baseline {

struct none {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind) { return true; }
    OPD_HD OPD_INLINE void add(const sampled_entry&, double, double) {}
    OPD_HD OPD_INLINE double of(const sampled_entry&, double, double, int) const { return 0; }
};

struct leave_one_out {
    static constexpr bool pairs = true;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples; }
    double rho_a = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry&, double rho, double a) { rho_a += rho * a; }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double rho, double a, int m) const {
        return m > 1 ? (rho_a - rho * a) / (m - 1) : 0;
    }
};

struct self_normalised {
    static constexpr bool pairs = true;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::samples; }
    double rho_a = 0, rho_sum = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry&, double rho, double a) { rho_a += rho * a, rho_sum += rho; }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double rho, double a, int m) const {
        return m > 1 && rho_sum - rho > 0 ? (rho_a - rho * a) / (rho_sum - rho) : 0;
    }
};

struct exact_entries {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind kind) { return kind == cache_kind::weighted; }
    double pa = 0, p_sum = 0;
    OPD_HD OPD_INLINE void add(const sampled_entry& x, double, double a) {
        const double p = ::exp(x.log_p);
        if (x.exact) pa += p * a, p_sum += p;
    }
    OPD_HD OPD_INLINE double of(const sampled_entry&, double, double, int) const { return p_sum > 0 ? pa / p_sum : 0; }
};

} // namespace baseline

// clang-format off
/// A token's worth. See the head of this file.
template <class A>
concept advantage_policy = requires(const A a, const sampled_entry& x) {
    { a(x) } -> std::convertible_to<double>;
};
/// What is subtracted from it in the gradient.
template <class B>
concept baseline_policy = requires(B b, const B c, const sampled_entry& x, double v, int m) {
    { B::pairs } -> std::convertible_to<bool>;
    { B::reads(cache_kind::samples) } -> std::convertible_to<bool>;
    b.add(x, v, v);
    { c.of(x, v, v, m) } -> std::convertible_to<double>;
};
// clang-format on

} // namespace opd
