// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Gradients of a narrow type, of students in memory, by id, in tiles; sparse ones of even and of ragged rows.
#include <opd/rows/fit_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Student, class Teacher>
struct rows_of {
    using state_type = row_state;
    using G = typename Student::gradient_type;
    static constexpr bool one_tile = false;
    fake::frame frame;
    Student student;
    Teacher teacher;
    index_t vocab = 0;
    index_t tile_size() const;
    index_t tile_size_t() const;
    opd::row_place of_student(const state_type&) const;
};
template <class Student, class Teacher>
void fit() {
    const rows_of<Student, Teacher> k{};
    team<row_state> t;
    fit_gradient(k, t);
    saturate_row(k, t.state);
}
void all() {
    fit<opd::student::logits<opd::half>, dense>();
    fit<logits, dense>();
    fit<on_support, support>(), fit<on_support, ragged>();
    fit<made_in_tiles, dense>();
}
} // namespace fake
