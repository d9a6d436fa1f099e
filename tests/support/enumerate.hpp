// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Exact enumeration of what a sampling design may draw.
//
//   for_each_tuple             every m-tuple of ids below V
//   for_each_offset_interval   every interval of the uniform offset on which threshold(B) draws the same entries: its
//                              ends are where (u + j)·step meets a cumulative sum, first estimated, then bisected to
//                              the last bit
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <opd/config.hpp>

namespace opd::test {

template <class Visit>
void for_each_tuple(index_t vocab, index_t m, Visit visit) {
    std::vector<std::int64_t> ids(std::size_t(m), 0);
    for (;;) {
        visit(static_cast<const std::vector<std::int64_t>&>(ids));
        std::size_t j = 0;
        while (j < ids.size() && ++ids[j] == vocab) ids[j++] = 0;
        if (j == ids.size()) return;
    }
}

struct threshold_draw {
    std::vector<std::int64_t> ids;
    std::vector<double> weight;
    std::vector<double> log_mu;
    std::vector<std::uint8_t> exact;
    index_t count = 0;
    explicit threshold_draw(index_t budget)
        : ids(std::size_t(budget)), weight(ids.size()), log_mu(ids.size()), exact(ids.size()) {}
};

/// draw(u) -> threshold_draw for u in (0,1); visit(length, draw) for every interval.
template <class Draw, class Visit>
void for_each_offset_interval(const std::vector<double>& log_mu, index_t budget, Draw draw, Visit visit) {
    const threshold_draw first = draw(0.5);
    double left = 0; // mass of what is not certain
    index_t certain = 0;
    std::vector<bool> sure(log_mu.size(), false);
    for (std::size_t j = 0; j < first.ids.size(); ++j)
        if (first.ids[j] >= 0 && first.exact[j]) sure[std::size_t(first.ids[j])] = true, ++certain;
    for (std::size_t v = 0; v < log_mu.size(); ++v) left += sure[v] ? 0 : std::exp(log_mu[v]);
    std::vector<double> ends{0, 1};
    double sum = 0;
    for (std::size_t v = 0; v < log_mu.size() && certain < budget; ++v) {
        sum += sure[v] ? 0 : std::exp(log_mu[v]);
        const double at = sum / left * double(budget - certain);
        ends.push_back(at - std::floor(at));
    }
    std::sort(ends.begin(), ends.end());
    std::vector<double> inside; // a point of every interval that is wide enough to see
    for (std::size_t i = 0; i + 1 < ends.size(); ++i)
        if (ends[i + 1] - ends[i] > 1e-12) inside.push_back((ends[i] + ends[i + 1]) / 2);
    double begin = 0;
    for (std::size_t i = 0; i < inside.size(); ++i) {
        const threshold_draw here = draw(inside[i]);
        double end = 1;
        if (i + 1 < inside.size()) {
            double low = inside[i], high = inside[i + 1];
            while (high - low > 1e-15) {
                const double middle = (low + high) / 2;
                (draw(middle).ids == here.ids ? low : high) = middle;
            }
            end = high;
        }
        visit(end - begin, here);
        begin = end;
    }
}

} // namespace opd::test
