// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The frame of every row: rows that do nothing but begin and end.
#include <opd/rows/rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct plain_rows {
    using state_type = row_state;
    fake::frame frame;
    logits student;
    std::size_t scratch_bytes() const;
    template <class Team>
    void row(Team&) const {
        clear_columns(student, 0, 0, frame.env.beta, place{});
        clear_columns(made_by_id{}, 0, 0, frame.env.beta, place{});
    }
};
struct adds : finds_bad {
    template <class... A>
    static bool due(A&&...);
    template <class... A>
    static int part(A&&...);
    template <class... A>
    static void run(A&&...);
};
void all(const plain_rows& k, team_of_one<row_state>& one, team<row_state>& several) {
    run_rows(k, 0, one, nullptr);
    run_rows(k, 0, 1, 0, several, nullptr);
    one.fold<adds>(k), one.each<adds>(k), one.repeat<adds>(k);
    (void)clamps(k.frame.env, 0);
    (void)own_id(k.frame, 0, 0), (void)own_id(frame_of_shard{}, 0, 0), (void)whole_vocab(frame_of_shard{}, 0);
}
} // namespace fake
