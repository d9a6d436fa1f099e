// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A row's distribution in float64, and what is measured of two.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <opd/config.hpp>
#include <opd/element.hpp>

namespace opd::test {

/// Of logits over a temperature; -inf has none. (n)
template <class T>
std::vector<double> softmax(const T* x, index_t n, double temperature) {
    std::vector<double> p;
    double top = -1e300, sum = 0;
    for (index_t v = 0; v < n; ++v) {
        const double s = double(element<T>::load(x[v]));
        p.push_back(detail::is_neg_inf(s) ? -1e300 : s / temperature);
        top = std::max(top, p.back());
    }
    for (double& x_ : p) sum += x_ = x_ <= -1e300 ? 0 : std::exp(x_ - top);
    for (double& x_ : p) x_ /= sum;
    return p;
}
inline double entropy(const std::vector<double>& p) {
    double h = 0;
    for (const double x : p) h -= x > 0 ? x * std::log(x) : 0;
    return h;
}
inline double overlap(const std::vector<double>& p, const std::vector<double>& q) {
    double sum = 0;
    for (std::size_t v = 0; v < p.size(); ++v) sum += std::min(p[v], q[v]);
    return sum;
}

} // namespace opd::test
