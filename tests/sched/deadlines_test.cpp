// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The list of deadlines does what a plain list of pairs does.
#include <algorithm>
#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/deadlines.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::sched;

TEST_CASE("who began first is due first, whoever leaves") {
    opd::test::property("a list of deadlines", [] {
        detail::deadline_list list;
        std::vector<std::pair<std::uint32_t, double>> model; // in the order of their beginning
        double now = 0;
        for (const int what : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 80))) {
            const auto who = static_cast<std::uint32_t>(what % 7);
            std::erase_if(model, [&](const auto& x) { return what < 70 && x.first == who; });
            if (what < 40) {
                list.begin(who, ++now);
                model.emplace_back(who, now);
            } else if (what < 70) {
                list.end(who);
            } else if (what < 75) {
                archive_writer to;
                list.fields(to, 64);
                detail::deadline_list read;
                archive_reader from(to.bytes);
                read.fields(from, 64);
                list = read;
            } else {
                list.clear();
                model.clear();
            }
            RC_ASSERT(list.empty() == model.empty());
            RC_ASSERT(list.next(5) == (model.empty() ? forever : model.front().second + 5));
            RC_ASSERT(list.next(0) == forever);
            if (!model.empty()) RC_ASSERT(list.first() == model.front().first);
        }
    });
}

} // namespace
