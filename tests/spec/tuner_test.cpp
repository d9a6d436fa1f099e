// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which strategy is chosen: by hand, step by step; and what choosing costs against the best that could have been fixed beforehand.
#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <random>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/tuner.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::spec;
using opd::index_t;

constexpr strategy a{8, 4, 16}, b{4, 2, 16}, c{4, 4, 8}, d{2, 1, 8};

tuner_options two_buckets() {
    tuner_options o;
    o.arms = {c, a, b, d};
    o.thresholds = {2, 10};
    return o;
}

// Numbers that were written down; asked for more: a failure.
struct written {
    std::vector<double> numbers;
    std::size_t at = 0;
    double operator()() { return numbers.at(at++); }
};

double never() {
    FAIL("a number was drawn");
    return 0.5;
}

} // namespace

TEST_CASE(
    "buckets: many tokens for small batches, none below the first, none above the budget, one arm without a draw") {
    beg_mab t(two_buckets());
    CHECK(t.choose(1, never).none());
    for (const index_t batch : {2, 9}) CHECK(t.choose(batch, written{{0.9}}) == a);
    for (const index_t batch : {10, 11, 1000000}) CHECK(t.choose(batch, written{{0.9}}) == c);
    tuner_options o = two_buckets();
    o.most_tokens = 100;
    beg_mab narrow(o);
    CHECK(narrow.choose(6, written{{0.9}}) == a);  // 96
    CHECK(narrow.choose(7, never).none());         // 112
    CHECK(narrow.choose(12, written{{0.9}}) == c); // 96
    CHECK(narrow.choose(13, never).none());
    beg_mab single({.arms = {a, c}, .thresholds = {1, 4}});
    CHECK(single.choose(3, never) == a);
    CHECK(single.choose(4, never) == c);
    CHECK(single.choose(3, never) == a);
    // the published ones
    beg_mab usual;
    CHECK(usual.choose(1, written{{0.9}}) == strategy{8, 4, 48});
    CHECK(usual.choose(4, written{{0.9}}) == strategy{8, 4, 32});
    CHECK(usual.choose(20, written{{0.9}}) == strategy{6, 4, 16});
    CHECK(usual.choose(21, written{{0.9}}) == strategy{4, 2, 8});
}

TEST_CASE("the untried first, then the largest median of the window; ties to the first as configured") {
    tuner_options o = two_buckets();
    o.window = 4;
    beg_mab t(o);
    const auto now = [&] { return t.choose(3, written{{0.9}}); };
    CHECK(now() == a);
    t.heard(a, 3, 1, 0.5); // 4 a second
    CHECK(now() == b);
    t.heard(b, 3, 2, 1); // 3
    CHECK(now() == a);
    t.heard(a, 3, 0, 0.5); // 2: median 3
    CHECK(now() == a);     // a tie
    t.heard(b, 3, 3, 0.5); // 8: median 5.5
    CHECK(now() == b);
    t.heard(b, 3, 0, 1); // 1: 1, 3, 8
    CHECK(now() == a);   // 3 and 3
    t.heard(b, 3, 4, 1); // 5: 1, 3, 5, 8
    CHECK(now() == b);   // 4
    t.heard(b, 3, 0, 2); // 0.5, and 3 is forgotten: 0.5, 1, 5, 8
    CHECK(now() == a);   // 3 and 3
    t.heard(b, 3, 8, 1); // 9, and 8 is forgotten: 0.5, 1, 5, 9
    CHECK(now() == a);
    t.heard(b, 3, 8, 1); // 9, and 1 is forgotten: 0.5, 5, 9, 9
    CHECK(now() == b);   // 7
    // another bucket's rewards are its own; an unknown strategy's are nobody's
    CHECK(t.choose(50, written{{0.9}}) == c);
    t.heard({1, 1, 1}, 3, 100, 1e-3);
    t.heard({}, 3, 100, 1e-3);
    CHECK(now() == b);
}

TEST_CASE("exploring: with probability epsilon any arm of the bucket, by one number more") {
    beg_mab t(two_buckets());
    t.heard(a, 3, 1, 1);
    t.heard(b, 3, 0, 1);
    CHECK(t.choose(3, written{{0.1}}) == a); // not below epsilon
    CHECK(t.choose(3, written{{0.099, 0.49}}) == a);
    CHECK(t.choose(3, written{{0.099, 0.51}}) == b);
    CHECK(t.choose(3, written{{0.0001, 0.9999999999999999}}) == b);
    std::mt19937 random(1);
    std::uniform_real_distribution<double> uniform(std::numeric_limits<double>::min(), 1);
    int other = 0;
    for (int i = 0; i < 10000; ++i) other += t.choose(3, [&] { return uniform(random); }) == b;
    CHECK(std::abs(other - 500) < 110); // five sigma
}

TEST_CASE("rewards: by sequence, or by token, which favours what was tried on larger batches") {
    tuner_options o = two_buckets();
    for (const reward_kind kind : {reward_kind::per_sequence, reward_kind::tokens_per_second}) {
        o.reward = kind;
        beg_mab t(o);
        t.heard(a, 2, 2, 0.01);
        t.heard(b, 9, 1, 0.01); // fewer tokens a sequence, of more sequences
        CHECK(t.choose(3, written{{0.9}}) == (kind == reward_kind::per_sequence ? a : b));
    }
}

namespace {

// Steps of batches 2 to 9 whose drafter is good or bad by turns: what is kept of a drafted token has probability p, which drifts, and verifying
// costs time. Tokens a second of a policy.
template <class Choose>
double speed(std::uint32_t seed, int steps, Choose&& choose) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(0, 1);
    double tokens = 0, seconds = 0;
    for (int i = 0; i < steps; ++i) {
        const auto batch = static_cast<index_t>(2 + random() % 8);
        const double p = 0.7 + 0.2 * std::sin(i / 400.0);
        const strategy s = choose(batch, uniform(random), uniform(random));
        double kept = 0;
        for (index_t n = 0; n < batch; ++n)
            for (int depth = 0; depth < s.depth && uniform(random) < p; ++depth) ++kept;
        kept /= static_cast<double>(batch);
        const double time = 1 + 0.15 * s.depth + 0.02 * static_cast<double>(batch);
        if constexpr (requires { choose.heard(s, batch, kept, time); }) choose.heard(s, batch, kept, time);
        tokens += (kept + 1) * static_cast<double>(batch), seconds += time;
    }
    return tokens / seconds;
}
struct by_beg_mab {
    beg_mab t{two_buckets()};
    strategy operator()(index_t batch, double x, double y) {
        bool first = true;
        return t.choose(batch, [&] { return std::exchange(first, false) ? x : y; });
    }
    void heard(const strategy& s, index_t batch, double kept, double time) { t.heard(s, batch, kept, time); }
};
struct by_ucb1 {
    ucb1 t{two_buckets()};
    strategy operator()(index_t batch, double, double) { return t.choose(batch); }
    void heard(const strategy& s, index_t batch, double kept, double time) { t.heard(s, batch, kept, time); }
};

} // namespace

TEST_CASE("regret after 2,000 steps of drifting acceptance: below 5 % of the best fixed arm") {
    for (std::uint32_t seed = 1; seed <= 5; ++seed) {
        const auto fixed = [&](const strategy& s) {
            return speed(seed, 2000, [&](index_t, double, double) { return s; });
        };
        const double best = std::max(fixed(a), fixed(b));
        CAPTURE(seed);
        CHECK(std::abs(fixed(a) / fixed(b) - 1) > 0.01); // there is something to choose
        CHECK(speed(seed, 2000, by_beg_mab{}) > 0.95 * best);
        CHECK(speed(seed, 2000, by_ucb1{}) > 0.95 * best);
    }
}

TEST_CASE("ucb1: each once, then what is better, and now and then what was tried little") {
    ucb1 t(two_buckets());
    CHECK(t.choose(1).none());
    CHECK(t.choose(3) == a);
    t.heard(a, 3, 1, 1);
    CHECK(t.choose(3) == b);
    t.heard(b, 3, 3, 1);
    int others = 0;
    for (int i = 0; i < 200; ++i) {
        const strategy s = t.choose(3);
        others += s == a;
        t.heard(s, 3, s == a ? 1 : 3, 1);
    }
    CHECK(others > 1);
    CHECK(others < 60);
}

TEST_CASE("a table: the last line that is not above the batch") {
    const fixed_table t({{2, a}, {10, c}, {64, {}}});
    CHECK(t.choose(1).none());
    CHECK(t.choose(2) == a);
    CHECK(t.choose(9) == a);
    CHECK(t.choose(10) == c);
    CHECK(t.choose(64).none());
    CHECK(fixed_table({}).choose(5).none());
}

TEST_CASE("the switch: on after ten checks at or below 32, off above 40, and in between as it was") {
    elastic_switch s;
    for (int i = 0; i < 9; ++i) CHECK_FALSE(s.check(32));
    CHECK_FALSE(s.check(33)); // counts anew
    for (int i = 0; i < 9; ++i) CHECK_FALSE(s.check(1));
    CHECK(s.check(32));
    for (const index_t n : {33, 40, 40, 32, 40}) CHECK(s.check(n));
    CHECK_FALSE(s.check(41));
    CHECK_FALSE(s.check(32));
    CHECK_FALSE(s.on());
    for (int i = 0; i < 8; ++i) CHECK_FALSE(s.check(0));
    CHECK(s.check(0));
}

TEST_CASE("a state that is saved goes on as if it had not been") {
    std::mt19937 random(3);
    std::uniform_real_distribution<double> uniform(0.001, 0.999);
    tuner_options o = two_buckets();
    o.window = 5;
    beg_mab one(o);
    elastic_switch on;
    for (int i = 0; i < 300; ++i) {
        opd::sched::archive_writer w;
        w(one, on);
        opd::sched::archive_reader r(w.bytes);
        beg_mab two(o);
        elastic_switch again;
        r(two, again);
        CHECK(r.done());
        const double x = uniform(random), y = uniform(random);
        const auto batch = static_cast<index_t>(1 + random() % 15), running = static_cast<index_t>(random() % 50);
        const strategy s = one.choose(batch, written{{x, y}});
        CHECK(s == two.choose(batch, written{{x, y}}));
        CHECK(on.check(running) == again.check(running));
        one.heard(s, batch, y * 4, x);
    }
    opd::sched::archive_writer w;
    w(one);
    o.window = 3;
    beg_mab other(o);
    opd::sched::archive_reader r(w.bytes);
    CHECK_THROWS_AS(r(other), opd::invalid_input);
}

TEST_CASE("what cannot be is refused by name") {
    const auto refused = [](auto&& make, const char* argument, const char* why) {
        try {
            make();
            FAIL("it was taken");
        } catch (const opd::invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
        }
    };
    const auto with = [&](auto&& change) {
        return [change] {
            tuner_options o = two_buckets();
            change(o);
            beg_mab t(o);
        };
    };
    refused(with([](auto& o) { o.arms = {}; }), "arms", "there is none");
    refused(with([](auto& o) { o.arms[2].depth = 0; }), "arms", "row 2");
    refused(with([](auto& o) { o.arms[3] = o.arms[0]; }), "arms", "is there twice");
    refused(with([](auto& o) { o.thresholds = {1}; }), "thresholds", "2, not 1");
    refused(with([](auto& o) { o.thresholds = {2, 2}; }), "thresholds", "rise");
    refused(with([](auto& o) { o.thresholds = {0, 2}; }), "thresholds", "positive");
    refused(with([](auto& o) { o.epsilon = 1.5; }), "epsilon", "[0, 1]");
    refused(with([](auto& o) { o.bonus = -1; }), "bonus", "at least 0");
    refused(with([](auto& o) { o.window = 0; }), "window", "at least 1");
    refused(with([](auto& o) { o.most_tokens = -1; }), "most_tokens", "at least 0");
    beg_mab t(two_buckets());
    refused([&] { t.choose(0, never); }, "batch", "not 0");
    refused([&] { t.heard(a, 0, 1, 1); }, "batch", "not 0");
    refused([&] { t.heard(a, 3, -1, 1); }, "accepted", "at least 0");
    refused([&] { t.heard(a, 3, 1, 0); }, "seconds", "positive");
    refused([&] { t.heard(a, 3, 1, std::numeric_limits<double>::infinity()); }, "seconds", "finite");
    refused([] { fixed_table({{2, a}, {2, c}}); }, "lines", "rise");
    refused([] { elastic_switch({.on_at = 5, .off_at = 4}); }, "off_at", "at least on_at");
    refused([] { elastic_switch({.checks = 0}); }, "checks", "at least 1");
}

TEST_CASE("the call, as its page shows it") {
    const index_t batch = 3;
    const double accepted = 2.5, seconds = 0.02;
    const auto uniform = [] { return 0.5; };
    opd::spec::beg_mab tuner;                                   // TLT's arms, buckets, epsilon and window
    const opd::spec::strategy s = tuner.choose(batch, uniform); // uniform(): a number from (0, 1); {}: no speculation
    // … one step, of which each sequence kept `accepted` drafted tokens in the mean …
    tuner.heard(s, batch, accepted, seconds);
    CHECK(s == strategy{8, 4, 32});
}
