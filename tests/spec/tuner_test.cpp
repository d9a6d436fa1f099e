// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// Which strategy is chosen: by hand, step by step; and what choosing costs against the best that could have been fixed
// beforehand.
#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/any_tuner.hpp"
#include "opd/spec/drafter_selector.hpp"
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

TEST_CASE("tries: those that had fewest rewards go first, until each has had so many") {
    tuner_options o = two_buckets();
    o.tries = 2;
    beg_mab t(o);
    ucb1 u(o);
    const auto both = [&](const strategy& wanted, double reward) {
        CHECK(t.choose(3, written{{0.9}}) == wanted);
        CHECK(u.choose(3) == wanted);
        t.heard(wanted, 3, 0, 1 / reward), u.heard(wanted, 3, 0, 1 / reward);
    };
    both(a, 1), both(b, 9), both(a, 20), both(b, 8); // after one each, b would be chosen
    both(a, 1);                                      // 10.5 and 8.5
    t.heard(b, 3, 0, 1.0 / 30), u.heard(b, 3, 0, 1.0 / 30);
    CHECK(t.choose(3, written{{0.9}}) == b); // 1 and 9
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

// A world: what a step takes, and how many drafted tokens sequences keep, whose drafter is good or bad by turns.
struct world {
    std::mt19937 random;
    std::uniform_real_distribution<double> uniform{0, 1};
    index_t smallest = 2, batches = 8;
    std::function<double(const strategy&, index_t)> seconds;
    std::function<double(const strategy&, double)> followed; // of a node on the way, by how good the drafter is
};
// Batches 2 to 9 and two arms, of which the deep one is better while the drafter is good.
world two_arms(std::uint32_t seed) {
    world w{std::mt19937(seed), {}, 2, 8, {}, {}};
    w.seconds = [](const strategy& s, index_t batch) { return 1 + 0.15 * s.depth + 0.02 * static_cast<double>(batch); };
    w.followed = [](const strategy&, double good) { return good; };
    return w;
}
// A rollout whose batch shrinks from 40 to 1 again and again, all published arms, a row costs a hundredth of a step.
double target_seconds(index_t rows) { return 1 + 0.01 * static_cast<double>(rows); }
world rollouts(std::uint32_t seed) {
    world w{std::mt19937(seed), {}, 1, 40, {}, {}};
    w.seconds = [](const strategy& s, index_t batch) {
        return 1.3 * target_seconds(batch * (1 + s.verify)) + (s.none() ? 0 : 0.08 * s.depth);
    };
    w.followed = [](const strategy& s, double good) {
        return 1 - std::pow(1 - good, 1 + 0.2 * (std::min(s.top_k, s.verify / s.depth) - 1));
    };
    return w;
}

// Tokens a second of `steps` steps.
template <class Choose>
double speed(world w, int steps, Choose&& choose) {
    double tokens = 0, seconds = 0;
    for (int i = 0; i < steps; ++i) {
        const auto batch =
            w.smallest == 1
                ? 1 + static_cast<index_t>(static_cast<double>(w.batches) * (1 - std::sqrt((i % 50) / 50.0)))
                : w.smallest + static_cast<index_t>(w.random()) % w.batches;
        const double good = 0.7 + 0.2 * std::sin(i / 400.0);
        const double x = w.uniform(w.random), y = w.uniform(w.random);
        bool first = true;
        const auto uniform = [&] { return std::exchange(first, false) ? x : y; };
        const strategy s = choose(batch, uniform);
        double kept = 0;
        for (index_t n = 0; n < batch; ++n)
            for (int depth = 0; depth < s.depth && w.uniform(w.random) < w.followed(s, good); ++depth) ++kept;
        kept /= static_cast<double>(batch);
        const double time = w.seconds(s, batch) * (0.95 + 0.1 * w.uniform(w.random));
        if constexpr (requires { choose.heard(s, batch, kept, time); }) choose.heard(s, batch, kept, time);
        tokens += (kept + 1) * static_cast<double>(batch), seconds += time;
    }
    return tokens / seconds;
}
struct by_tuner {
    any_tuner t;
    template <class U>
    strategy operator()(index_t batch, U&& uniform) {
        return t.choose(batch, uniform);
    }
    void heard(const strategy& s, index_t batch, double kept, double time) {
        t.heard(s, batch, kept, time, [] { return 0.5; });
    }
};
cost_profile_options profile(std::vector<strategy> arms) {
    cost_profile_options o;
    o.arms = std::move(arms);
    o.target = step_cost({{1, target_seconds(1)}, {2000, target_seconds(2000)}});
    o.drafter = step_cost::line(0.06, 1e-6);
    return o;
}

} // namespace

TEST_CASE("regret after 2,000 steps of drifting acceptance: below 5 % of the best fixed arm") {
    double worst_of[3] = {};
    for (std::uint32_t seed = 1; seed <= 5; ++seed) {
        const auto fixed = [&](const strategy& s) {
            return speed(two_arms(seed), 2000, [&](index_t, auto&&) { return s; });
        };
        const double best = std::max(fixed(a), fixed(b));
        CAPTURE(seed);
        CHECK(std::abs(fixed(a) / fixed(b) - 1) > 0.01); // there is something to choose
        const any_tuner tuners[] = {any_tuner(beg_mab(two_buckets())), any_tuner(ucb1(two_buckets())),
                                    any_tuner(cost_profile(profile({a, b})))};
        for (int i = 0; i < 3; ++i) {
            CAPTURE(i);
            const double regret = 1 - speed(two_arms(seed), 2000, by_tuner{tuners[i]}) / best;
            CHECK(regret < 0.05);
            worst_of[i] = std::max(worst_of[i], regret);
        }
    }
    MESSAGE("regret, largest of five seeds: beg_mab " << worst_of[0] << ", ucb1 " << worst_of[1] << ", cost_profile "
                                                      << worst_of[2]);
}

TEST_CASE("regret over rollouts that shrink from 40 to 1: below 5 % of the best fixed arms, in the mean of ten seeds") {
    struct regrets {
        std::string name;
        double mean = 0, largest = -1;
    } of[] = {{"beg_mab"}, {"ucb1"}, {"as published"}, {"cost_profile"}};
    const tuner_options o;
    for (std::uint32_t seed = 1; seed <= 10; ++seed) {
        const auto at = [&](const any_tuner& t) { return speed(rollouts(seed), 2000, by_tuner{t}); };
        // the best arm of each bucket, one bucket after the other
        std::vector<fixed_table::line> lines;
        for (std::size_t i = 0; i < 4; ++i) lines.push_back({o.thresholds[i], o.arms[2 * i]});
        for (std::size_t i = 0; i < 4; ++i) {
            auto other = lines;
            other[i].strategy = o.arms[2 * i + 1];
            if (at(any_tuner(fixed_table(other))) > at(any_tuner(fixed_table(lines)))) lines = other;
        }
        const double best = at(any_tuner(fixed_table(lines)));
        // the profile may take any arm at any batch: against the best of those that are taken at all batches
        double any = 0;
        for (const strategy& s : o.arms)
            any = std::max(any, speed(rollouts(seed), 2000, [&](index_t, auto&&) { return s; }));
        CHECK(any > best);
        const double regret[] = {1 - at(any_tuner(beg_mab{})) / best, 1 - at(any_tuner(ucb1{})) / best,
                                 1 - at(any_tuner(published_beg_mab{})) / best,
                                 1 - at(any_tuner(cost_profile(profile(o.arms)))) / any};
        for (int i = 0; i < 4; ++i) of[i].mean += regret[i] / 10, of[i].largest = std::max(of[i].largest, regret[i]);
    }
    for (const regrets& r : of) MESSAGE(r.name << ": regret " << r.mean << ", largest " << r.largest);
    for (const int i : {0, 1, 3}) CHECK(of[i].mean < 0.05);
    for (const int i : {1, 3}) CHECK(of[i].largest < 0.05);
    CHECK(of[2].mean > of[0].mean);
}

TEST_CASE("as published: a trace of the published algorithm, choice by choice and reward by reward") {
    // recorded from the algorithm in another language: batch, the arm, the numbers it drew, tokens accepted in all, ms,
    // its reward
    struct step {
        index_t batch;
        strategy chosen;
        std::vector<double> numbers;
        int accepted, ms;
        double reward;
    };
    const std::vector<step> trace = {
        {3, {12, 2, 32}, {0.742, 0.922}, 34, 28, 0},
        {1, {12, 2, 32}, {0.84, 0.649}, 12, 15, 822.22222222222229},
        {3, {4, 4, 32}, {0.113, 0.102}, 7, 25, 0},
        {3, {12, 2, 32}, {0.013, 0.217, 0.16}, 18, 20, 1850},
        {2, {12, 2, 32}, {0.139, 0.132}, 16, 12, 2055.5555555555557},
        {1, {3, 4, 16}, {0.209, 0.872}, 1, 13, 0},
        {6, {3, 4, 16}, {0.314, 0.361}, 9, 8, 1500},
        {3, {8, 4, 32}, {0.936, 0.817}, 10, 17, 0},
        {1, {4, 2, 8}, {0.596, 0.31}, 2, 10, 0},
        {6, {6, 4, 16}, {0.481, 0.256}, 15, 9, 0},
        {1, {4, 4, 32}, {0.949, 0.018}, 2, 20, 166.66666666666666},
        {33, {4, 2, 8}, {0.579}, 33, 20, 4950},
        {1, {6, 4, 16}, {0.453, 0.624}, 5, 13, 269.23076923076923},
        {3, {12, 2, 32}, {0.119, 0.355}, 15, 24, 1541.6666666666667},
        {300, {4, 2, 8}, {0.108}, 300, 22, 40909.090909090912},
        {6, {3, 4, 16}, {0.86, 0.34}, 8, 12, 1000},
        {2, {4, 4, 32}, {0.312, 0.799}, 4, 13, 512.82051282051282},
        {3, {12, 2, 32}, {0.721, 0.081}, 13, 9, 3000},
        {6, {6, 4, 16}, {0.032, 0.741, 0.056}, 21, 12, 2375},
        {1, {8, 4, 32}, {0.802, 0.131}, 5, 14, 309.52380952380958},
        {3, {12, 2, 32}, {0.63, 0.435}, 19, 13, 2076.9230769230771},
        {3, {4, 4, 32}, {0.059, 0.421, 0.976}, 8, 13, 769.23076923076928},
        {39, {4, 2, 8}, {0.73}, 39, 30, 3900},
        {39, {4, 2, 8}, {0.47}, 39, 17, 6882.3529411764703},
        {3, {12, 2, 32}, {0.113, 0.868}, 20, 23, 1173.913043478261},
        {3, {12, 2, 32}, {0.089, 0.272, 0.063}, 28, 19, 1184.2105263157896},
        {6, {3, 4, 16}, {0.695, 0.716}, 11, 30, 400},
        {6, {6, 4, 16}, {0.65, 0.326}, 23, 16, 1781.25},
        {3, {12, 2, 32}, {0.463, 0.348}, 28, 19, 1184.2105263157896},
        {6, {6, 4, 16}, {0.738, 0.45}, 24, 30, 950},
        {6, {6, 4, 16}, {0.957, 0.937}, 17, 19, 1500},
        {39, {4, 2, 8}, {0.079}, 39, 30, 2600},
        {33, {4, 2, 8}, {0.78}, 0, 27, 2444.4444444444443},
        {300, {4, 2, 8}, {0.303}, 600, 21, 28571.428571428569},
        {3, {12, 2, 32}, {0.72, 0.441}, 5, 26, 865.38461538461547},
        {3, {12, 2, 32}, {0.219, 0.042}, 22, 30, 966.66666666666686},
        {39, {4, 2, 8}, {0.054}, 0, 13, 6000},
        {3, {12, 2, 32}, {0.111, 0.036}, 12, 25, 1160},
        {39, {4, 2, 8}, {0.663}, 39, 20, 3900},
        {2, {8, 4, 32}, {0.59, 0.351}, 8, 8, 1083.3333333333335},
        {3, {12, 2, 32}, {0.856, 0.964}, 20, 19, 1526.3157894736844},
        {6, {6, 4, 16}, {0.095, 0.545, 0.409}, 17, 21, 1357.1428571428571},
        {6, {6, 4, 16}, {0.467, 0.609}, 16, 12, 2375},
        {6, {6, 4, 16}, {0.821, 0.539}, 14, 27, 1055.5555555555557},
        {6, {6, 4, 16}, {0.629, 0.48}, 17, 17, 1676.4705882352939},
        {6, {6, 4, 16}, {0.384, 0.496}, 22, 17, 1676.4705882352939},
        {33, {4, 2, 8}, {0.945}, 0, 18, 3666.666666666667},
        {6, {6, 4, 16}, {0.492, 0.961}, 11, 27, 1055.5555555555557},
        {3, {12, 2, 32}, {0.293, 0.48}, 20, 8, 3625.0000000000005},
        {3, {12, 2, 32}, {0.243, 0.49}, 19, 15, 1933.3333333333337},
        {3, {12, 2, 32}, {0.721, 0.992}, 15, 27, 1074.0740740740741},
        {300, {4, 2, 8}, {0.881}, 600, 27, 22222.222222222223},
        {2, {12, 2, 32}, {0.016, 0.126, 0.336}, 12, 30, 644.44444444444457},
        {6, {6, 4, 16}, {0.731, 0.132}, 17, 26, 1096.1538461538462},
        {1, {12, 2, 32}, {0.252, 0.917}, 7, 29, 333.33333333333337},
        {3, {8, 4, 32}, {0.015, 0.778, 0.392}, 19, 23, 565.21739130434787},
        {3, {12, 2, 32}, {0.899, 0.836}, 20, 17, 1705.8823529411766},
        {33, {4, 2, 8}, {0.648}, 66, 17, 3882.3529411764703},
        {39, {4, 2, 8}, {0.165}, 39, 12, 6500},
        {39, {4, 2, 8}, {0.154}, 39, 25, 3120},
        {1, {3, 4, 16}, {0.068, 0.23, 0.664}, 0, 10, 200},
        {1, {12, 2, 32}, {0.333, 0.998}, 6, 10, 966.66666666666674},
        {39, {4, 2, 8}, {0.842}, 0, 11, 7090.909090909091},
        {3, {12, 2, 32}, {0.615, 0.706}, 14, 17, 1705.8823529411766},
        {39, {4, 2, 8}, {0.611}, 0, 13, 6000},
        {33, {4, 2, 8}, {0.622}, 0, 10, 6600},
        {1, {12, 2, 32}, {0.556, 0.746}, 10, 20, 483.33333333333337},
        {3, {4, 4, 32}, {0.058, 0.575, 0.432}, 8, 8, 1250},
        {6, {6, 4, 16}, {0.685, 0.697}, 15, 12, 2375},
        {3, {12, 2, 32}, {0.569, 0.55}, 22, 25, 1160},
        {3, {12, 2, 32}, {0.263, 0.517}, 15, 17, 1705.8823529411766},
        {3, {12, 2, 32}, {0.808, 0.179}, 23, 20, 1450.0000000000002},
        {1, {12, 2, 32}, {0.655, 0.668}, 1, 26, 371.79487179487188},
        {2, {12, 2, 32}, {0.863, 0.239}, 17, 22, 878.78787878787898},
        {39, {4, 2, 8}, {0.108}, 39, 18, 4333.3333333333339},
        {300, {4, 2, 8}, {0.725}, 0, 25, 24000},
        {1, {12, 2, 32}, {0.848, 0.794}, 6, 29, 333.33333333333337},
        {2, {8, 4, 32}, {0.084, 0.911, 0.701}, 10, 12, 722.22222222222229},
        {6, {6, 4, 16}, {0.354, 0.378}, 16, 20, 1425},
        {6, {6, 4, 16}, {0.648, 0.593}, 26, 9, 3166.666666666667},
        {3, {12, 2, 32}, {0.74, 0.033}, 8, 9, 2333.3333333333335},
        {3, {12, 2, 32}, {0.196, 0.001}, 24, 19, 1105.2631578947369},
        {39, {4, 2, 8}, {0.922}, 39, 27, 2888.8888888888891},
        {6, {6, 4, 16}, {0.466, 0.869}, 8, 19, 1500},
        {39, {4, 2, 8}, {0.254}, 0, 25, 3120},
        {3, {12, 2, 32}, {0.818, 0.033}, 26, 15, 1400},
        {1, {12, 2, 32}, {0.344, 0.316}, 12, 19, 368.42105263157896},
        {1, {12, 2, 32}, {0.688, 0.472}, 10, 22, 318.18181818181819},
        {3, {12, 2, 32}, {0.118, 0.674}, 19, 22, 954.54545454545462},
        {3, {8, 4, 32}, {0.034, 0.715, 0.364}, 10, 30, 433.33333333333343},
        {6, {6, 4, 16}, {0.184, 0.776}, 17, 13, 2192.3076923076924},
        {3, {12, 2, 32}, {0.672, 0.726}, 19, 21, 999.99999999999989},
        {3, {12, 2, 32}, {0.006, 0.061, 0.045}, 28, 13, 2076.9230769230771},
        {300, {4, 2, 8}, {0.94}, 600, 19, 31578.947368421053},
        {2, {8, 4, 32}, {0.237, 0.054}, 8, 23, 478.26086956521738},
        {3, {12, 2, 32}, {0.644, 0.048}, 25, 9, 3000},
        {33, {4, 2, 8}, {0.64}, 33, 17, 3882.3529411764703},
        {1, {12, 2, 32}, {0.95, 0.696}, 3, 13, 692.30769230769238},
        {6, {6, 4, 16}, {0.188, 0.985}, 9, 25, 1140},
        {3, {12, 2, 32}, {0.598, 0.441}, 23, 8, 3375},
        {6, {6, 4, 16}, {0.487, 0.913}, 23, 8, 3562.5},
        {6, {6, 4, 16}, {0.689, 0.088}, 14, 23, 1000},
        {3, {12, 2, 32}, {0.819, 0.082}, 9, 25, 1080},
        {3, {12, 2, 32}, {0.697, 0.245}, 27, 29, 931.0344827586207},
        {1, {12, 2, 32}, {0.493, 0.704}, 3, 9, 1000.0000000000001},
        {6, {6, 4, 16}, {0.883, 0.001}, 14, 25, 920},
        {6, {6, 4, 16}, {0.654, 0.655}, 15, 30, 766.66666666666674},
        {1, {12, 2, 32}, {0.728, 0.268}, 11, 21, 428.57142857142856},
        {6, {3, 4, 16}, {0.562, 0.676}, 8, 23, 521.73913043478262},
        {6, {6, 4, 16}, {0.034, 0.542, 0.826}, 9, 12, 1916.6666666666665},
    };
    tuner_options o;
    o.arms = {{8, 4, 32}, {4, 4, 32}, {12, 2, 32}, {6, 4, 16}, {3, 4, 16}, {4, 2, 8}};
    o.thresholds = {2, 5, 21};
    o.window = 4;
    published_beg_mab t(o);
    int nothing = 0, chances = 0;
    for (std::size_t i = 0; i < trace.size(); ++i) {
        CAPTURE(i);
        const step& s = trace[i];
        if (i == 60) { // it can be saved at any time
            opd::sched::archive_writer w;
            w(t);
            t = published_beg_mab(o);
            opd::sched::archive_reader r(w.bytes);
            r(t);
        }
        written w{s.numbers};
        REQUIRE(t.choose(s.batch, w) == s.chosen);
        const double accepted = static_cast<double>(s.accepted) / static_cast<double>(s.batch);
        chances += w.at == 2 && s.batch != 1;
        REQUIRE(t.heard(s.chosen, s.batch, accepted, s.ms / 1000.0, w) == doctest::Approx(s.reward).epsilon(1e-14));
        REQUIRE(w.at == s.numbers.size());
        nothing += s.reward == 0;
    }
    CHECK(nothing == 6); // the first of each arm
    CHECK(chances > 3);
    CHECK(trace.size() == 110);
    // what it does otherwise than the paper: the first reward of an arm is 0, so that it loses against any that was
    // heard of twice
    tuner_options two;
    two.arms = {{8, 4, 16}, {4, 2, 16}}, two.thresholds = {1};
    published_beg_mab p(two);
    beg_mab q(two);
    const auto half = [] { return 0.5; };
    const auto hear = [&](const strategy& s, double accepted) {
        q.heard(s, 1, accepted, 1);
        return p.heard(s, 1, accepted, 1, half);
    };
    CHECK(hear(two.arms[1], 2) == 0); // its name is first
    CHECK(hear(two.arms[1], 2) == 3);
    CHECK(hear(two.arms[0], 9) == 0);
    CHECK(p.choose(1, half) == two.arms[1]);
    CHECK(q.choose(1, half) == two.arms[0]);
    // one arm a bucket: a table; a single arm: its own length
    tuner_options table;
    table.arms.assign(published_arms.begin(), published_arms.end());
    published_beg_mab fixed(table);
    CHECK(fixed.choose(1, never) == strategy{8, 4, 48});
    CHECK(fixed.choose(4, never) == strategy{8, 4, 32});
    CHECK(fixed.choose(20, never) == strategy{8, 4, 16});
    CHECK(fixed.choose(5000, never) == strategy{8, 4, 8});
    tuner_options one;
    one.arms = {{4, 2, 8}}, one.thresholds = {3};
    published_beg_mab alone(one);
    CHECK(alone.choose(1, never) == one.arms[0]);
    CHECK(alone.heard(one.arms[0], 2, 1.5, 0.5, never) == 10);
}

TEST_CASE("a cost profile: what is kept over what it costs, at any batch; what was not tried only where it could be "
          "the best") {
    cost_profile_options o;
    o.arms = {{8, 4, 32}, {4, 2, 8}, {2, 1, 2}};
    o.target = step_cost({{1, 1}, {40, 1}, {80, 2}, {8000, 200}}); // rows are for free up to 40
    o.doubt = 0.01;
    cost_profile t(o);
    CHECK(t.choose(1) == o.arms[0]); // 33 rows: 9 tokens a step, perhaps
    CHECK(t.choose(4) == o.arms[1]); // 36 rows, 5 tokens
    CHECK(t.choose(1000).none());    // even if all were kept: 3 tokens for three times the time
    t.heard(o.arms[0], 1, 3, 1);
    CHECK(t.accepted(o.arms[0]) == doctest::Approx(3.05).epsilon(0.001));
    CHECK(t.choose(1) == o.arms[1]); // not tried: 5 tokens, perhaps
    t.heard(o.arms[1], 4, 2, 1);     // at another batch
    CHECK(t.choose(1) == o.arms[0]);
    CHECK(t.tokens_per_second(o.arms[0], 1) == doctest::Approx(4.05).epsilon(0.01));
    CHECK(t.tokens_per_second(o.arms[0], 4) == doctest::Approx(4.05 / 3.3).epsilon(0.01));
    CHECK(t.tokens_per_second({}, 4) == 1);
    CHECK(t.choose(4) == o.arms[1]);
    // steps of an arm take longer than the profile says
    for (int i = 0; i < 20; ++i)
        t.heard(o.arms[1], 2, 2, 2.5), t.heard(o.arms[0], 1, 3, 1), t.heard(o.arms[2], 2, 1, 1.1);
    CHECK(t.seconds(o.arms[1], 4) == doctest::Approx(2.43).epsilon(0.01));
    CHECK(t.choose(4) == o.arms[2]);
    // and steps without drafts too
    t.heard({}, 4, 0, 0.1);
    CHECK(t.choose(4).none());
    // the others change while one is not looked at: it is tried again
    cost_profile u(o);
    u.heard(o.arms[0], 1, 1, 1);
    u.heard(o.arms[1], 1, 3, 1);
    int steps = 0;
    for (; u.choose(1) != o.arms[0] && steps < 10000; ++steps) u.heard(u.choose(1), 1, 3, 1);
    CHECK(steps > 300);
    CHECK(steps < 3000);
    u.heard({9, 9, 9}, 1, 100, 1e-9); // nobody's
    CHECK(u.choose(1) == o.arms[0]);
    // the drafter's passes cost
    o.drafter = step_cost::line(1, 0.5); // 1.5 s a pass of one row
    o.most_tokens = 20;
    const cost_profile slow(o);
    CHECK(slow.seconds(o.arms[2], 1) == doctest::Approx(1 + 2 * 1.5));
    CHECK(slow.seconds(o.arms[2], 2) == doctest::Approx(1 + 2 * 2));
    CHECK(slow.choose(1).none());
    o.drafter.reset();
    CHECK(cost_profile(o).choose(1) == o.arms[1]); // 32 tokens are more than 20
    CHECK(cost_profile(o).choose(3) == o.arms[2]);
    CHECK(cost_profile(o).choose(11).none());
}

TEST_CASE(
    "which drafter: the first until another exists, then what has more tokens a second, and each again now and then") {
    drafter_selector s({.memory = 20, .tries = 2, .again = 30});
    for (int i = 0; i < 100; ++i) {
        REQUIRE(s.choose(3) == 0);
        s.heard(0, 3, 1, 1);
    }
    CHECK(s.predicted(1, 3) == 0);
    s.exists(1, true);
    for (int i = 0; i < 2; ++i) { // tried
        REQUIRE(s.choose(2) == 1);
        s.heard(1, 2, 2, 1.1);
    }
    CHECK(s.predicted(1, 3) == doctest::Approx(3 / 1.1));
    int others = 0;
    const auto run = [&](int steps, double first, double second) {
        others = 0;
        for (int i = 0; i < steps; ++i) {
            const index_t d = s.choose(3);
            others += d == 0;
            d == 0 ? s.heard(0, 3, first, 1) : s.heard(1, 3, second, 1.1);
        }
    };
    run(570, 1, 2);
    CHECK(others == 10); // once in 57, for 30·(2.73/2)² = 55.8
    run(6000, 1, 0.5);   // it becomes worse
    run(660, 1, 0.5);
    CHECK(others == 650); // once in 66, for 30·(2/1.36)² = 64.5
    run(700, 1, 3);       // and better, which is noticed
    run(1010, 1, 3);
    CHECK(others == 10);   // once in 101, for 30·(3.64/2)² = 99.2
    s.heard(0, 3, 1, 1e9); // however far behind, after 16 times as many
    run(2 * 481, 1, 3);
    CHECK(others == 2);
    // at other batches it has to show anew
    CHECK(s.choose(64) == 0);
    s.heard(0, 64, 1, 1);
    CHECK(s.choose(127) == 0);
    s.heard(0, 127, 1, 1);
    CHECK(s.choose(64) == 1);
    s.heard(1, 64, 3, 9);
    CHECK(s.choose(64) == 1);
    s.heard(1, 64, 3, 9);
    CHECK(s.choose(64) == 0);
    CHECK(s.predicted(0, 64) == doctest::Approx(2));
    // ties: the first. A new one is not judged by the old one's steps
    s.exists(1, false);
    for (int i = 0; i < 40; ++i) CHECK(s.choose(3) == 0);
    s.exists(1, true);
    CHECK(s.predicted(1, 3) == 0);
    CHECK(s.choose(3) == 1);
    drafter_selector tie({.tries = 1});
    tie.exists(1, true);
    CHECK(tie.choose(1) == 0);
    tie.heard(0, 1, 1, 1);
    CHECK(tie.choose(1) == 1);
    tie.heard(1, 1, 3, 2);
    CHECK(tie.choose(1) == 0);
}

TEST_CASE("which drafter, by predictions of the caller's own: nobody is tried unheard, each is looked at again") {
    drafter_selector s({.drafters = 3, .again = 4});
    s.exists(1, true);
    const auto choices = [&](const std::vector<double>& rates, int steps) {
        std::string r;
        for (int i = 0; i < steps; ++i) r += std::to_string(s.choose(rates));
        return r;
    };
    CHECK(choices({1, 2, 9}, 20) == "11111111111111110111"); // 4·(2/1)² times passed over; the third does not exist
    s.exists(2, true);
    CHECK(choices({1, 1, 1}, 12) == "000012000120"); // ties: the first; of two that are due, too
    CHECK(s.predicted(1, 3) == 0);
    const auto refused = [&](const std::vector<double>& rates, const char* says) {
        CHECK_THROWS_WITH_AS(s.choose(rates), doctest::Contains(says), opd::invalid_input);
    };
    refused({1, 2}, "one of each drafter");
    refused({1, 0, 1}, "finite and positive");
    refused({1, 1, HUGE_VAL}, "finite and positive");
    s.exists(2, false);
    CHECK(s.choose(std::vector<double>{1, 2, -1}) == 1);
}

TEST_CASE("ranks: told the same, they choose alike, without a word between them; told their own, they do not") {
    std::mt19937 random(8);
    std::uniform_real_distribution<double> uniform(0.001, 0.999);
    const auto choosers = [] {
        tuner_options o;
        o.window = 3;
        return std::vector<any_tuner>{any_tuner(beg_mab(o)), any_tuner(published_beg_mab(o)), any_tuner(ucb1(o)),
                                      any_tuner(cost_profile(profile(o.arms)))};
    };
    std::vector<any_tuner> one = choosers(), two = choosers();
    drafter_selector first({.tries = 2, .again = 5}), second({.tries = 2, .again = 5});
    first.exists(1, true), second.exists(1, true);
    beg_mab mine, other; // that hear their own steps, and draw for themselves
    int apart = 0, drafters[2] = {};
    for (std::uint64_t step = 0; step < 1500; ++step) {
        const step_observation seen[] = {
            {static_cast<index_t>(1 + random() % 10), 4 * uniform(random), uniform(random)},
            {static_cast<index_t>(random() % 10), 4 * uniform(random), uniform(random)},
        };
        const step_observation all = merged(seen);
        for (std::size_t i = 0; i < one.size(); ++i) {
            CAPTURE(i);
            keyed_uniforms x(3, step), y(3, step);
            const strategy s = one[i].choose(all.batch, x);
            REQUIRE(two[i].choose(all.batch, y) == s);
            one[i].heard(s, all.batch, all.accepted, all.seconds, x);
            two[i].heard(s, all.batch, all.accepted, all.seconds, y);
        }
        const index_t d = first.choose(all.batch);
        REQUIRE(second.choose(all.batch) == d);
        ++drafters[d];
        first.heard(d, all.batch, all.accepted, all.seconds), second.heard(d, all.batch, all.accepted, all.seconds);
        keyed_uniforms x(0, step), y(1, step);
        const strategy s = mine.choose(all.batch, x), t = other.choose(all.batch, y);
        apart += s != t;
        mine.heard(s, all.batch, seen[0].accepted, seen[0].seconds);
        other.heard(t, all.batch, seen[1].accepted, seen[1].seconds);
    }
    CHECK(apart > 100);
    CHECK(drafters[0] > 100);
    CHECK(drafters[1] > 100);
}

TEST_CASE("what ranks saw together: the largest batch, the slowest, and accepted by sequence; numbers of a step are "
          "its own") {
    const step_observation seen[] = {{0, 100, 0.75}, {12, 3, 0.25}, {4, 1, 0.5}};
    const step_observation all = merged(seen);
    CHECK(all.batch == 12);
    CHECK(all.accepted == 2.5);
    CHECK(all.seconds == 0.75);
    const step_observation idle[] = {{0, 0, 0.5}};
    CHECK(merged(idle).accepted == 0);
    double sum = 0;
    std::vector<double> numbers;
    for (std::uint64_t step = 0; step < 2000; ++step) {
        keyed_uniforms u(7, step), again(7, step);
        for (int i = 0; i < 3; ++i) {
            numbers.push_back(u());
            CHECK(numbers.back() == again());
            CHECK(numbers.back() > 0);
            CHECK(numbers.back() < 1);
            sum += numbers.back();
        }
    }
    CHECK(sum / 6000 == doctest::Approx(0.5).epsilon(0.03));
    std::sort(numbers.begin(), numbers.end());
    CHECK(std::unique(numbers.begin(), numbers.end()) == numbers.end());
    CHECK(keyed_uniforms(1, 2)() != keyed_uniforms(2, 2)());
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
    // a count that no switch of these checks can have reached
    for (const std::int32_t below : {-1, 11, std::numeric_limits<std::int32_t>::max()}) {
        opd::sched::archive_writer w;
        w(false, below);
        opd::sched::archive_reader r(w.bytes);
        CHECK_THROWS_AS(r(s), opd::invalid_input);
    }
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
    // the others, by way of all of them in one type, and the choice of a drafter
    o.window = 5;
    const auto fresh = [&] {
        return std::vector<any_tuner>{any_tuner(beg_mab(o)), any_tuner(published_beg_mab(o)), any_tuner(ucb1(o)),
                                      any_tuner(cost_profile(profile(o.arms))), any_tuner(fixed_table({{2, a}}))};
    };
    std::vector<any_tuner> before = fresh();
    drafter_selector drafter({.tries = 1, .again = 7});
    drafter.exists(1, true);
    for (int i = 0; i < 200; ++i) {
        opd::sched::archive_writer all;
        for (any_tuner& t : before) all(t);
        all(drafter);
        opd::sched::archive_reader reader(all.bytes);
        std::vector<any_tuner> after = fresh();
        for (any_tuner& t : after) reader(t);
        drafter_selector second({.tries = 1, .again = 7});
        reader(second);
        CHECK(reader.done());
        const auto batch = static_cast<index_t>(1 + random() % 15);
        const double x = uniform(random), y = uniform(random), kept = 4 * uniform(random);
        for (std::size_t k = 0; k < before.size(); ++k) {
            const strategy s = before[k].choose(batch, written{{x, y}});
            REQUIRE(s == after[k].choose(batch, written{{x, y}}));
            before[k].heard(s, batch, kept, y, written{{x}});
        }
        const index_t d = drafter.choose(batch);
        REQUIRE(d == second.choose(batch));
        drafter.heard(d, batch, kept, y);
    }
    opd::sched::archive_writer saved;
    saved(drafter);
    drafter_selector three({.drafters = 3});
    opd::sched::archive_reader of_two(saved.bytes);
    CHECK_THROWS_WITH_AS(of_two(three), doctest::Contains("other drafters"), opd::invalid_input);
    opd::sched::archive_writer costs;
    costs(before[3]);
    any_tuner wider(cost_profile(profile({a, b, c, d, {1, 1, 1}})));
    opd::sched::archive_reader of_four(costs.bytes);
    CHECK_THROWS_WITH_AS(of_four(wider), doctest::Contains("another profile"), opd::invalid_input);
    opd::sched::archive_writer published;
    published(before[1]);
    o.window = 2;
    any_tuner narrower((published_beg_mab(o)));
    opd::sched::archive_reader of_five(published.bytes);
    CHECK_THROWS_WITH_AS(of_five(narrower), doctest::Contains("another window"), opd::invalid_input);
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
    refused(with([](auto& o) { o.tries = 0; }), "tries", "[1, window]");
    refused(with([](auto& o) { o.tries = o.window + 1; }), "tries", "[1, window]");
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
    refused([] { merged({}); }, "ranks", "none");
    refused([] { merged(std::vector<step_observation>{{-1, 0, 1}}); }, "batch", "at least 0");
    published_beg_mab published(two_buckets());
    refused([&] { published.choose(0, never); }, "batch", "not 0");
    refused([&] { published.heard(a, 3, 1, 0, never); }, "seconds", "positive");
    refused([] { published_beg_mab({.arms = {a}, .thresholds = {1, 2}}); }, "thresholds", "1, not 2");
    const auto costs = [](auto&& change) {
        return [change] {
            cost_profile_options o;
            change(o);
            cost_profile t(o);
        };
    };
    refused(costs([](auto& o) { o.arms = {a, a}; }), "arms", "is there twice");
    refused(costs([](auto& o) { o.most_tokens = -1; }), "most_tokens", "at least 0");
    refused(costs([](auto& o) { o.memory = 0.5; }), "memory", "at least 1");
    refused(costs([](auto& o) { o.doubt = 0; }), "doubt", "positive");
    cost_profile profiled{cost_profile_options{}};
    refused([&] { profiled.choose(0); }, "batch", "not 0");
    refused([&] { profiled.heard(a, 3, -1, 1); }, "accepted", "at least 0");
    refused([] { drafter_selector({.drafters = 0}); }, "drafters", "at least 1");
    refused([] { drafter_selector({.memory = 0}); }, "memory", "at least 1");
    refused([] { drafter_selector({.tries = 0}); }, "tries", "at least 1");
    refused([] { drafter_selector({.again = 0}); }, "again", "at least 1");
    drafter_selector selector;
    refused([&] { selector.choose(0); }, "batch", "not 0");
    refused([&] { selector.heard(2, 1, 1, 1); }, "drafter", "no drafter 2");
    refused([&] { selector.heard(1, 1, 1, 0); }, "seconds", "positive");
    selector.exists(0, false);
    refused([&] { selector.choose(1); }, "drafters", "none exists");
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

TEST_CASE("one decision for all ranks, as its page shows it") {
    const std::uint64_t seed = 1, step = 17;
    std::vector<opd::spec::step_observation> gathered = {{3, 2.5, 0.02}, {5, 2.0, 0.03}};
    opd::spec::any_tuner tuner(opd::spec::beg_mab{}); // on every rank

    const opd::spec::step_observation last =
        opd::spec::merged(gathered);               // of the step before, of all ranks, in their order
    opd::spec::keyed_uniforms uniform(seed, step); // the same on each
    const opd::spec::strategy s = tuner.choose(last.batch, uniform);
    // … the step; then, gathered anew:
    tuner.heard(s, last.batch, last.accepted, last.seconds, uniform);
    CHECK(!s.none());
}
