// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
//
// Shares of a step's rows against all shares that there are, and what long sequences and costs change.
#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/draft_budget.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::spec;
using opd::index_t;
using shares = std::vector<index_t>;

struct sequence {
    std::vector<double> gains;
    double remaining = 1;
};
std::vector<draft_candidate> offered(const std::vector<sequence>& s) {
    std::vector<draft_candidate> c;
    for (const sequence& x : s) c.push_back({x.gains, x.remaining});
    return c;
}
shares shared(draft_budget& b, const std::vector<sequence>& s, const step_cost& cost, const budget_options& o = {}) {
    const auto c = offered(s);
    const auto k = b.share(c, cost, o);
    return {k.begin(), k.end()};
}
double value(const std::vector<sequence>& s, const shares& k, const step_cost& cost, const budget_options& o) {
    double sum = 0, tokens = 0;
    for (const sequence& x : s) sum += std::pow(x.remaining, o.tail);
    index_t nodes = 0;
    for (std::size_t i = 0; i < s.size(); ++i) {
        const double w = std::pow(s[i].remaining, o.tail) * static_cast<double>(s.size()) / sum;
        tokens += w;
        for (index_t j = 0; j < k[i]; ++j) tokens += w * s[i].gains[static_cast<std::size_t>(j)];
        nodes += k[i];
    }
    double seconds = cost.seconds(static_cast<index_t>(s.size()) + nodes);
    if (nodes > 0) seconds += o.draft_seconds + o.seconds_per_node * static_cast<double>(nodes);
    return tokens / seconds;
}

} // namespace

TEST_CASE("no other shares have more weighted tokens a second, whatever rows cost") {
    std::mt19937 random(1);
    std::uniform_real_distribution<double> uniform(0, 1);
    draft_budget budget;
    int none = 0, all = 0;
    for (int trial = 0; trial < 600; ++trial) {
        CAPTURE(trial);
        std::vector<sequence> s(1 + random() % 3);
        for (sequence& x : s) {
            x.remaining = 1 + static_cast<double>(random() % 100);
            double g = uniform(random);
            for (std::size_t k = random() % 5; k > 0; --k)
                x.gains.push_back(g *= uniform(random) < 0.2 ? 1 : uniform(random));
        }
        std::vector<step_cost::point> points; // with steps, and now and then falling
        double seconds = 0.2 + uniform(random);
        for (index_t rows = 0; rows < 16; rows += 1 + static_cast<index_t>(random() % 4))
            points.push_back({rows, seconds = std::max(0.1, seconds + 0.6 * uniform(random) - 0.1)});
        const step_cost cost(points);
        budget_options o;
        o.tail = std::vector<double>{0, 1, 2}[random() % 3];
        if (random() % 3 == 0) o.most_rows = static_cast<index_t>(1 + random() % 10);
        if (random() % 2 == 0) o.draft_seconds = 0.3 * uniform(random), o.seconds_per_node = 0.05 * uniform(random);

        const shares got = shared(budget, s, cost, o);
        double most = 0;
        shares k(s.size(), 0);
        for (bool more = true; more;) {
            index_t rows = static_cast<index_t>(s.size());
            for (const index_t x : k) rows += x;
            if (o.most_rows == 0 || rows <= o.most_rows || rows == static_cast<index_t>(s.size()))
                most = std::max(most, value(s, k, cost, o));
            more = false;
            for (std::size_t i = 0; i < k.size() && !more; ++i) {
                more = ++k[i] <= static_cast<index_t>(s[i].gains.size());
                if (!more) k[i] = 0;
            }
        }
        REQUIRE(value(s, got, cost, o) == doctest::Approx(most).epsilon(1e-12));
        REQUIRE(budget.value() == doctest::Approx(most).epsilon(1e-12));
        const index_t nodes = std::accumulate(got.begin(), got.end(), index_t{0});
        if (o.most_rows > 0) REQUIRE(nodes <= std::max<index_t>(0, o.most_rows - static_cast<index_t>(s.size())));
        none += nodes == 0;
        all += nodes > 0 && nodes < static_cast<index_t>(s.size() * 4);
    }
    CHECK(none > 50);
    CHECK(all > 50);
}

TEST_CASE("nothing pays: no drafts; and what is free is all taken") {
    draft_budget b;
    const std::vector<sequence> s = {{{.9, .8, .7}, 10}, {{.5}, 10}};
    CHECK(shared(b, s, step_cost::line(1e-9, 1)) == shares{0, 0}); // a row a token: at best .9 for the price of 1
    CHECK(shared(b, s, step_cost::line(1, 1e-9)) == shares{3, 1});
    CHECK(shared(b, s, step_cost::line(1, 1e-9), {.draft_seconds = 10}) == shares{0, 0});
    CHECK(shared(b, s, step_cost::line(1, 1e-9), {.seconds_per_node = 10}) == shares{0, 0});
    CHECK(shared(b, s, step_cost({{2, 1}, {3, 1}, {4, 9}})) == shares{1, 0}); // one row more is free
    CHECK(shared(b, s, step_cost::line(1, 1e-9), {.most_rows = 4}) == shares{2, 0});
    CHECK(shared(b, s, step_cost::line(1, 1e-9), {.most_rows = 1}) == shares{0, 0});
    CHECK(shared(b, {}, step_cost::line(1, 1)).empty());
    CHECK(b.value() == 0);
    // a node that is never followed is worth nothing, even for nothing; ties: the earlier sequence
    CHECK(shared(b, {{{0, 0}, 1}}, step_cost({{0, 1}})) == shares{0});
    CHECK(shared(b, {{{.5, .5}, 1}, {{.5, .5}, 1}}, step_cost({{3, 1}, {4, 100}})) == shares{1, 0});
}

TEST_CASE(
    "long sequences get more: what they are expected to write yet decides among equals, and against better drafts") {
    draft_budget b;
    const step_cost cost({{2, 1}, {4, 1}, {5, 100}}); // two rows more
    const auto by = [&](double first, double second, double tail) {
        return shared(b, {{{.5, .4}, first}, {{.6, .5}, second}}, cost, {.tail = tail});
    };
    CHECK(by(100, 100, 1) == shares{1, 1}); // .6, then .5, of the earlier one
    CHECK(by(1000, 100, 1) == shares{2, 0});
    CHECK(by(100, 1000, 1) == shares{0, 2});
    CHECK(by(1000, 100, 0) == shares{1, 1});
    // only the ratio counts
    CHECK(by(10, 1, 2) == by(1e6, 1e5, 2));
    // monotone
    index_t before = 0;
    for (double r = 1; r < 1e4; r *= 1.5) {
        const index_t now = by(r, 50, 1)[0];
        CHECK(now >= before);
        before = now;
    }
    CHECK(before == 2);
}

TEST_CASE("costs: straight between points, level before, on beyond; never falling beyond") {
    const step_cost c({{2, 1.0}, {6, 3.0}, {8, 3.5}});
    CHECK(c.seconds(0) == 1);
    CHECK(c.seconds(2) == 1);
    CHECK(c.seconds(3) == 1.5);
    CHECK(c.seconds(6) == 3);
    CHECK(c.seconds(7) == 3.25);
    CHECK(c.seconds(8) == 3.5);
    CHECK(c.seconds(12) == 4.5);
    CHECK(step_cost({{4, 2.0}}).seconds(1) == 2);
    CHECK(step_cost({{4, 2.0}}).seconds(100) == 2);
    CHECK(step_cost({{4, 2.0}, {6, 1.0}}).seconds(60) == 1);
    CHECK(step_cost::line(1, 0.5).seconds(7) == 4.5);
    opd::sched::archive_writer w;
    w(c);
    step_cost other({{1, 1}});
    opd::sched::archive_reader r(w.bytes);
    r(other);
    CHECK(other.seconds(7) == 3.25);
    CHECK(other.points().size() == 3);
}

TEST_CASE("what cannot be is refused by name") {
    const auto refused = [](auto&& call, const char* argument, index_t row, const char* why) {
        try {
            call();
            FAIL("it was taken");
        } catch (const opd::invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK(e.row == row);
            CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
        }
    };
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    draft_budget b;
    const step_cost cost = step_cost::line(1, 1);
    const std::vector<sequence> one = {{{.5}, 1}};
    refused([&] { shared(b, {{{.5}, 1}, {{.5}, 0}}, cost); }, "remaining", 1, "positive");
    refused([&] { shared(b, {{{.5}, nan}}, cost); }, "remaining", 0, "finite");
    refused([&] { shared(b, {{{.5, .6}, 1}}, cost); }, "gains", 0, "fall");
    refused([&] { shared(b, {{{1.5}, 1}}, cost); }, "gains", 0, "[0, 1]");
    refused([&] { shared(b, {{{nan}, 1}}, cost); }, "gains", 0, "[0, 1]");
    refused([&] { shared(b, {{{-.1}, 1}}, cost); }, "gains", 0, "[0, 1]");
    refused([&] { shared(b, one, cost, {.tail = -1}); }, "tail", -1, "at least 0");
    refused([&] { shared(b, one, cost, {.most_rows = -1}); }, "most_rows", -1, "at least 0");
    refused([&] { shared(b, one, cost, {.draft_seconds = nan}); }, "draft_seconds", -1, "finite");
    refused([&] { shared(b, one, cost, {.seconds_per_node = -1}); }, "seconds_per_node", -1, "at least 0");
    refused([] { step_cost({}); }, "points", -1, "none");
    refused([] { step_cost({{1, 1}, {1, 2}}); }, "points", 1, "rise");
    refused([] { step_cost({{-1, 1}}); }, "points", 0, "at least 0");
    refused([] { step_cost({{1, 1}, {2, 0}}); }, "points", 1, "positive");
    refused([] { step_cost({{1, nan}}); }, "points", 0, "finite");
}

TEST_CASE("the call, as its page shows it") {
    const std::vector<double> gains_of_a = {.7, .4, .2}, gains_of_b = {.9, .8, .7};
    const double left_of_a = 900, left_of_b = 30;

    const opd::spec::step_cost cost({{1, 0.010}, {8, 0.011}, {64, 0.030}}); // measured: rows, seconds
    opd::spec::draft_budget budget;
    const std::vector<opd::spec::draft_candidate> running = {{gains_of_a, left_of_a}, {gains_of_b, left_of_b}};
    const auto drafted = budget.share(running, cost, {.most_rows = 64});

    CHECK(drafted[0] == 3);
    CHECK(drafted.size() == 2);
}
