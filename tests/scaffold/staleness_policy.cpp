// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The staleness policy that scripts/new.sh made: users may choose it, and random worlds under it end with their
// promises kept, as a witness sees that knows only events and actions.
#include "support/world.hpp"

#include <cstdio>
#include <string_view>

int main() {
    using namespace opd::test;
    bool named = false;
    for (const staleness_policy p : staleness_policies()) named = named || std::string_view(name_of(p)) == "made_up";
    std::int64_t consumed = 0;
    for (std::uint64_t seed = 1; named && seed <= 40; ++seed) {
        const world w = world_of(seed, {.schedule = async{.policy = staleness_policy::made_up}});
        witness o(w.settings);
        auto d = driver_of(w, &o);
        run_to_end(d); // throws what was broken
        consumed += o.consumed();
    }
    const bool good = named && consumed > 0;
    std::puts(good ? "made_up is a staleness policy" : "made_up is no staleness policy");
    return good ? 0 : 1;
}
