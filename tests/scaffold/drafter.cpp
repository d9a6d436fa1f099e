// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The drafter that scripts/new.sh made: the list knows it, by its name, and what the list makes drafts a tree of at
// most the depth that was asked for, after the same tokens the same, and again from what a checkpoint holds.
#include <cstdio>
#include <memory>

#include "speculation/drafters.hpp"

using namespace trainer;

namespace {

/// What the list's line `which` makes.
template <drafting Which>
std::unique_ptr<drafter> made([[maybe_unused]] const auto& o) {
#define TRAINER_MAKE(name, says, type, from)                                                                           \
    if constexpr (Which == drafting::name) return std::make_unique<type>(from);
    TRAINER_DRAFTERS(TRAINER_MAKE)
#undef TRAINER_MAKE
}

opd::spec::draft_builder drafted(drafter& d, const trajectory& t, const opd::spec::follow_rates& rates) {
    opd::spec::draft_builder tree;
    tree.begin(rates);
    const draft_wish wish{.sequence = &t, .law = {}, .depth = 3, .tree = &tree};
    d.propose({&wish, 1});
    return tree;
}

} // namespace

int main() {
    bool named = false;
    for (const drafting_name& line : draftings)
        named = named || (line.text == "made_up" && line.what == drafting::made_up);
    trajectory t;
    t.tokens = {5, 7, 8, 9, 6, 5}, t.prompt_length = 2;
    const opd::spec::follow_rates rates;
    const auto d = made<drafting::made_up>(0), other = made<drafting::made_up>(0);
    d->begin(0, t);
    const auto tree = drafted(*d, t, rates);
    bool good = named && tree.size() >= 1 && tree.size() <= 3;
    other->restore(d->state());
    const auto again = drafted(*other, t, rates);
    good = good && again.size() == tree.size();
    for (opd::index_t i = 0; good && i < tree.size(); ++i) good = again.token(i) == tree.token(i) && tree.depth(i) <= 3;
    std::puts(good ? "made_up is a drafter" : "made_up is no drafter");
    return good ? 0 : 1;
}
