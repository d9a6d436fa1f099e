// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Phases over tiles, of a row in memory and of one that is made in tiles.
#include <opd/rows/tiles.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Student>
struct rows_of {
    using state_type = row_state;
    using G = float;
    static constexpr bool one_tile = Student::one_tile;
    fake::frame frame;
    Student student;
    index_t vocab = 0;
    index_t tile_size() const;
    index_t tile_size_t() const;
    bool live(const state_type&) const;
    opd::row_place of_student(const state_type&) const;
    row_tile<float, float, float> tile(const state_type&, index_t, index_t) const;
};
struct adds : over_tiles<adds, false> {
    template <class Rows>
    static double start(const Rows&, const row_state&);
    template <class... A>
    static void tile(A&&...);
};
struct writes : writes_tiles<writes> {
    template <class... A>
    static void tile(A&&...);
};
template <class Student>
void walk_tiles() {
    const rows_of<Student> k{};
    team<row_state> t;
    (void)adds::part(k, t.state, place{});
    t.template each<writes>(k);
    t.template each<zero_tiles<rows_of<Student>>>(k);
    t.template each<clear_rest<rows_of<Student>>>(k);
}
void all() { walk_tiles<logits>(), walk_tiles<made_in_tiles>(); }
} // namespace fake
