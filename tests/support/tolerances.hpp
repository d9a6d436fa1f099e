// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How far a backend may lie from the float64 reference, by element type. `spread` is the largest distance, in nats, of
// a logit to the top one (-inf counts as 80: programs saturate there), of both sides together: float rounds differences
// of logits to spread·2^-24, and an exponential passes that on as a relative error, whatever the algorithm.
//
//   value      (1e-6 + spread·2^-23)·max(1, |value|)       float arithmetic (float, bfloat16, half storage)
//              1e-12·max(1, |value|)                       double on some side
//   gradient   (1e-6 + spread·2^-23)·max|g| + 2^-24·scale (double 1e-13)  likewise, plus half a unit of the gradient's
//                                                                         own storage
//
// `scale` is what multiplies the row's gradient (weight, reduction, 1/T). rows of vocabulary size are held to the 1e-6
// alone by backends/cpu_accuracy_test.cpp.
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

/// Distance of the lowest entry to the top, over T; at least 80 with an entry at -inf.
template <class T>
double spread_of(const T* x, index_t n, double temperature) {
    double low = 1e300, top = -1e300;
    bool gap = false;
    for (index_t v = 0; v < n; ++v) {
        const double s = double(element<T>::load(x[v]));
        gap |= !detail::is_finite(s);
        if (!detail::is_finite(s)) continue;
        low = std::min(low, s), top = std::max(top, s);
    }
    return std::max(top < low ? 0 : (top - low) / temperature, gap ? 80.0 : 0.0);
}

/// Relative bound by arithmetic.
template <class... T>
double relative_bound(double spread) {
    return in_double<T...> ? 1e-12 : 1e-6 + spread * 0x1p-23;
}
template <class... T>
double value_bound(double value, double spread) {
    return relative_bound<T...>(spread) * std::max(1.0, std::abs(value));
}

/// Half a unit in the last place of x in storage G, and of its smallest step.
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
double gradient_excess(const G* got, const double* want, index_t n, double scale, double spread) {
    double top = 0, excess = 0;
    for (index_t v = 0; v < n; ++v) top = std::max(top, std::abs(want[v]));
    const double bound = relative_bound<Z, G, Y>(spread) * top + (in_double<Z, G, Y> ? 1e-13 : 0x1p-24) * scale;
    const double tiny = storage_rounding<G>(0), relative = storage_rounding<G>(1) - tiny;
    for (index_t v = 0; v < n; ++v) {
        const double x = double(element<G>::load(got[v]));
        if (!detail::is_finite(x)) return 1e300;
        excess = std::max(excess, std::abs(x - want[v]) / (bound + relative * std::abs(want[v]) + tiny));
    }
    return excess;
}

} // namespace opd::test
