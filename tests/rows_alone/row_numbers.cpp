// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An entry as a program sees it, by the anchors of one thread and by others.
#include <opd/rows/row_numbers.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Anchors, class Program>
void numbers_of(const opd::raw_sums& s, const Program& program) {
    const row_numbers<number, Anchors, Program> n(s, program);
    const entrywise_numbers<number, Anchors, Program> each(s, program, raised_logs{true, true, -1}, 1);
    const auto e = n.template entry<false>(number(0.), number(0.));
    (void)each.for_value(each.entry(number(0.), number(0.)));
    (void)each.wide(e), (void)distance_term(n.row, e), (void)entry_in_double<number>(n, number(0.), number(0.), s, 0);
}
void all(const opd::raw_sums& s, opd::row_constants<number>& row, log_sum_of_any sum) {
    numbers_of<thread_anchors<number>>(s, divergence{});
    numbers_of<engine::anchors<number>>(s, whole_divergence{});
    sum.add(0);
    set_overlap(row, sum, -1);
}
} // namespace fake
