// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the speculation interface names by strings.
#pragma once

#include <array>

#include "names.hpp"

namespace opd_c {

/// How drafts were drawn.
enum class drawn { one_hot, dense, iid_siblings, without_replacement };
inline constexpr auto proposals = std::to_array<table_line<drawn>>({
    {"one_hot", drawn::one_hot, "distinct tokens that chance had no part in: retrieval, a drafter's favourites"},
    {"dense", drawn::dense, "one a node, drawn from q"},
    {"iid_siblings", drawn::iid_siblings, "siblings, each drawn from q"},
    {"without_replacement", drawn::without_replacement, "siblings drawn from q, none twice"},
});

enum class tuner_kind { beg_mab, published_beg_mab, ucb1, fixed_table, cost_profile };
inline constexpr auto tuners = std::to_array<table_line<tuner_kind>>({
    {"beg_mab", tuner_kind::beg_mab, "bucketed epsilon-greedy by median reward (TLT, algorithm 1)"},
    {"published_beg_mab", tuner_kind::published_beg_mab, "the same as its authors' code has it"},
    {"ucb1", tuner_kind::ucb1, "the same buckets, mean reward plus a bonus for what was tried little"},
    {"fixed_table", tuner_kind::fixed_table, "a strategy for each range of batches"},
    {"cost_profile", tuner_kind::cost_profile, "measured costs, learnt acceptance, no buckets"},
});

} // namespace opd_c
