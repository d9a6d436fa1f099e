// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: no
//
// The cost of a rollout worker's quanta, fitted: exact where it is linear, never negative, and what follows for the
// pace.
#include "support/property.hpp"
#include "support/world.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include "opd/sched/rollout_cost.hpp"

namespace {

using namespace opd::sched;
using opd::test::dice;
using opd::test::property;

double rebuilt(double a, double b, double c, const std::vector<std::array<double, 2>>& quanta, rollout_cost& fit) {
    double seconds = 0, again = 0;
    for (const auto& [drawn, once_more] : quanta) {
        const double s = a + b * drawn + c * once_more;
        fit.add(drawn, once_more, s);
        seconds += s, again += once_more;
    }
    return (a * static_cast<double>(quanta.size()) - c * again) / seconds;
}

} // namespace

TEST_CASE("a linear cost is found, and its elasticity is that of the quanta since it was asked for last") {
    property("linear", [] {
        dice d{*rc::gen::arbitrary<std::uint64_t>()};
        const double unit = d.in(1e-6, 10), a = unit * d.in(0.01, 10), b = unit * d.in(0.01, 1),
                     c = unit * d.in(0.01, 1);
        rollout_cost fit;
        for (int round = 0; round < 3; ++round) {
            std::vector<std::array<double, 2>> quanta;
            for (int i = 0; i < 30; ++i) quanta.push_back({double(d.of(0, 64)), double(d(0.5) ? 0 : d.of(1, 500))});
            const double expected = std::clamp(rebuilt(a, b, c, quanta, fit), -1.0, 1.0);
            archive_writer w;
            w(fit);
            rollout_cost again;
            archive_reader r(w.bytes);
            r(again);
            const double told = fit.elasticity();
            RC_ASSERT(std::abs(told - expected) < 1e-4);
            RC_ASSERT(again.elasticity() == told);
            const auto k = fit.fit().cost();
            RC_ASSERT(std::abs(k[0] - a) < 1e-4 * (a + 64 * b));
            RC_ASSERT(std::abs(k[1] - b) < 1e-4 * (a + b));
            RC_ASSERT(std::abs(k[2] - c) < 1e-4 * (a + c));
            RC_ASSERT(fit.elasticity() == untold);
        }
    });
}

TEST_CASE("what it costs is never negative, and nothing that is seen breaks the fit") {
    property("any", [] {
        dice d{*rc::gen::arbitrary<std::uint64_t>()};
        rollout_cost fit;
        const bool still = d(0.3); // always as many rows
        for (int i = 0; i < 60; ++i) {
            fit.add(still ? 8 : double(d.of(0, 8)), d(0.7) ? 0 : double(d.of(0, 3)), d(0.1) ? 0 : 1e3 * d());
            for (const double k : fit.fit().cost()) RC_ASSERT((k >= 0 && k < 1e9));
            if (d(0.2)) {
                const double e = fit.elasticity();
                RC_ASSERT(((e >= -1 && e <= 1) || e == untold));
            }
        }
    });
    rollout_cost none;
    CHECK(none.elasticity() == untold);
    none.add(0, 0, 0);
    CHECK(none.elasticity() == untold); // no time passed
    CHECK_THROWS_WITH_AS(none.add(-1, 0, 1), doctest::Contains("finite and not negative"), opd::invalid_input);
    CHECK_THROWS_AS(none.add(1, 0, HUGE_VAL), opd::invalid_input);
}

TEST_CASE("what was long ago is forgotten") {
    rollout_cost fit;
    for (int i = 0; i < 5000; ++i) fit.add(i % 9, 0, 1 + (i % 9)); // a worker that becomes twice as fast
    for (int i = 0; i < 5000; ++i) fit.add(i % 9, 0, 0.5 + 0.5 * (i % 9));
    CHECK(fit.fit().cost()[0] == doctest::Approx(0.5).epsilon(0.01));
    CHECK(fit.fit().cost()[1] == doctest::Approx(0.5).epsilon(0.01));
}
