// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The rows of each kind of job are found.
#include <opd/rows/row_kinds.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct whole_engine : engine {
    struct of_leaf {
        using limits = leaf_limits;
        using type = edge_split;
        using best = scored;
    };
    using leaves = leaves_with<of_leaf>;
};
template <class Teacher, class Estimator, class Student = logits>
void find_rows() {
    walk(rows_of<whole_engine>(opd::row_job<Student, Teacher, Estimator, opd::space::host>{}, frame{}));
}
struct of_drawn : of_entries {
    static constexpr auto takes = opd::cache_kind::samples;
};
struct of_support : of_entries {
    static constexpr auto takes = opd::cache_kind::support;
};
struct on_ids {
    static constexpr auto takes = opd::cache_kind::support;
    divergence on_support;
};
void all() {
    find_rows<dense, divergence>();
    find_rows<opd::teacher::lumped<dense>, divergence>();
    walk(rows_of<whole_engine>(opd::score_job<float, int, float>{}, frame{}));
    walk(rows_of<whole_engine>(opd::kept_job<float, int>{}, frame{}));
    walk(rows_of<whole_engine>(opd::draw_job<float, opd::design::iid, int, float, float>{}, frame{}));
}
} // namespace fake
