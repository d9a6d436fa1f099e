// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How far a backend may lie from the float64 reference, by element type.
//
//   value      1e-6·max(1, |value|)                  float arithmetic (float, bfloat16, half storage)
//              1e-12·max(1, |value|)                 double on some side
//   gradient   1e-6·max|g| + 1e-9·|scale|, plus the rounding of the gradient's own storage: half a unit of the result
//
// `scale` is what multiplies the row's gradient (weight, reduction, 1/T).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <type_traits>

#include <opd/element.hpp>

namespace opd::test {

template <class... T>
constexpr bool in_double = (std::is_same_v<arithmetic_t<T>, double> || ...);

template <class... T>
double value_bound(double value) {
    return (in_double<T...> ? 1e-12 : 1e-6) * std::max(1.0, std::abs(value));
}

/// Bytes of significand tell the storage: half a unit in the last place of x, and of its smallest step.
template <class G>
double storage_rounding(double x) {
    const double one = double(element<G>::load(element<G>::store(arithmetic_t<G>(1))));
    double relative = 0.5, tiny = 1;
    while (double(element<G>::load(element<G>::store(arithmetic_t<G>(one + relative)))) != one) relative /= 2;
    while (tiny > 1e-40 && double(element<G>::load(element<G>::store(arithmetic_t<G>(tiny / 2)))) != 0) tiny /= 2;
    return relative * std::abs(x) + tiny / 2;
}

/// Largest |error| / bound over a row of gradients; at most 1 when all agree.
template <class Z, class G, class Y>
double gradient_excess(const G* got, const double* want, index_t n, double scale) {
    double top = 0, excess = 0;
    for (index_t v = 0; v < n; ++v) top = std::max(top, std::abs(want[v]));
    const double bound = in_double<Z, G, Y> ? 1e-12 * top + 1e-14 * scale : 1e-6 * top + 1e-9 * scale;
    const double one_step = storage_rounding<G>(1) - storage_rounding<G>(0), tiny = storage_rounding<G>(0);
    for (index_t v = 0; v < n; ++v) {
        const double x = double(element<G>::load(got[v]));
        if (!(std::abs(x) <= std::numeric_limits<double>::max())) return 1e300; // NaN or infinite
        excess = std::max(excess, std::abs(x - want[v]) / (bound + one_step * std::abs(want[v]) + tiny));
    }
    return excess;
}

} // namespace opd::test
