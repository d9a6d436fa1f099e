// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A call on materialised logits, taken apart by columns for ranks; and what their answers have in common.
#pragma once

#include <cstddef>
#include <cstring>
#include <doctest/doctest.h>
#include <vector>

#include <opd/diagnostics.hpp>
#include <opd/student.hpp>
#include <opd/teacher.hpp>

namespace opd::test {

inline bool equal_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

/// The same columns of either side, of rank i of the cuts; what a teacher has of few ids every rank has. The padding is
/// the last rank's.
template <class Z, class G>
student::logits<Z, G> student_of(student::logits<Z, G> s, const std::vector<index_t>& cuts, std::size_t i) {
    const index_t first = cuts[i], count = cuts[i + 1] - first;
    s.z = {s.z.data + first, s.z.rows, count, s.z.stride};
    if (s.dz.empty()) return s;
    const bool last = i + 2 == cuts.size();
    s.dz = {s.dz.data + first, s.dz.rows, count, s.dz.stride, last ? s.dz.padding : 0};
    if (!last) s.pad = padding::keep;
    return s;
}
template <class Cache>
Cache teacher_of(const Cache& t, const std::vector<index_t>&, std::size_t) {
    return t; // ids of the whole vocabulary
}
template <class Y>
teacher::dense<Y> teacher_of(const teacher::dense<Y>& t, const std::vector<index_t>& cuts, std::size_t i) {
    return {matrix_view<const Y>(t.y.data + cuts[i], t.y.rows, cuts[i + 1] - cuts[i], t.y.stride), t.temperature};
}

/// What ranks report has the same bits.
inline void check_equal(const std::vector<result>& results, const std::vector<std::vector<float>>& losses,
                        const std::vector<std::vector<double>>& lse) {
    for (std::size_t i = 0; i < results.size(); ++i) {
        CHECK(std::memcmp(&results[i], &results[0], sizeof results[0]) == 0);
        CHECK((losses[i].empty() || std::memcmp(losses[i].data(), losses[0].data(), losses[0].size() * 4) == 0));
        CHECK((lse[i].empty() || std::memcmp(lse[i].data(), lse[0].data(), lse[0].size() * 8) == 0));
    }
}

} // namespace opd::test
