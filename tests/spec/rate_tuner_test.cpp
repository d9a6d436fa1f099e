// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// Arms that learn from each other: worlds in which the best arm is known, where few turns are heard of; what it chooses
// by hand; a state that is saved; what is refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/rate_tuner.hpp"

namespace {

using namespace opd::spec;
using opd::index_t;

constexpr std::int32_t turn = 8; // steps

// What steps cost, and how often the drafter's first, second, … guess is the target's token.
struct world {
    std::string name;
    std::array<double, 4> right;
    double step, row, pass;
    double drafted_row = 0;
    bool told = false; // of these the chooser's prediction knows
    double seconds(index_t rows, double passes, index_t drafted) const {
        return step + row * static_cast<double>(rows) + pass * passes + drafted_row * static_cast<double>(drafted);
    }
};

// Drafts, and what the target makes of them.
class rollout {
public:
    rollout(const world& w, index_t batch, std::uint32_t seed) : world_(w), batch_(batch), random_(seed) {}

    follow_rates rates;
    struct outcome {
        double accepted = 0, seconds = 0;
    };
    /// A turn of the strategy: accepted of a sequence's step, and seconds of a step.
    outcome go(const strategy& s) {
        outcome r;
        for (std::int32_t i = 0; i < turn; ++i) {
            index_t rows = batch_;
            for (index_t n = 0; n < batch_; ++n) {
                tree_.begin(rates);
                tree_.imagine(s.depth, s.top_k);
                rows += tree_.select(worth(s)).size();
                r.accepted += static_cast<double>(followed());
            }
            r.seconds += world_.seconds(rows, s.depth, drafted(s)) * (0.95 + 0.1 * uniform_(random_));
        }
        r.accepted /= static_cast<double>(turn * batch_), r.seconds /= turn;
        return r;
    }
    double predicted(index_t rows, const strategy& s) const {
        return world_.seconds(rows, s.depth, world_.told ? drafted(s) : 0);
    }

private:
    // Rows of the drafter.
    index_t drafted(const strategy& s) const { return batch_ * (1 + (s.depth - 1) * s.top_k); }
    // How many nodes of the tree are worth their rows, if all sequences draft alike.
    index_t worth(const strategy& s) {
        double tokens = 1, most = 0;
        index_t k = 0, best = 1;
        for (const double gain : tree_.gains()) {
            if (++k > s.verify) break;
            tokens += gain;
            if (const double v = tokens / predicted(batch_ * (1 + k), s); v > most) most = v, best = k;
        }
        return best;
    }
    // Of the selected nodes, as deep as the target goes.
    index_t followed() {
        const auto chosen = tree_.chosen();
        verdict v;
        for (bool goes_on = true; goes_on;) {
            double u = uniform_(random_);
            index_t child = -1, rank = 0, above = v.node < 0 ? -1 : chosen[static_cast<std::size_t>(v.node)];
            for (index_t n = 0; n < tree_.size() && child < 0; ++n) {
                if (tree_.parent(n) != above) continue;
                u -= world_.right[static_cast<std::size_t>(std::min<index_t>(rank++, 3))];
                if (u < 0) child = n;
            }
            const auto at = std::find(chosen.begin(), chosen.end(), child);
            goes_on = child >= 0 && at != chosen.end();
            if (goes_on) v.node = at - chosen.begin(), ++v.accepted;
        }
        tree_.learn(rates, v);
        return v.accepted;
    }

    const world world_;
    const index_t batch_;
    std::mt19937 random_;
    std::uniform_real_distribution<double> uniform_{0, 1};
    draft_builder tree_;
};

// Tokens a second of the turns after the first ones.
template <class Choose, class Heard>
double rate(rollout r, int before, int turns, Choose&& choose, Heard&& heard) {
    double tokens = 0, seconds = 0;
    for (int i = 0; i < before + turns; ++i) {
        const strategy s = choose(r);
        const auto x = r.go(s);
        heard(r, s, x);
        if (i >= before) tokens += x.accepted + 1, seconds += x.seconds;
    }
    return tokens / seconds;
}

} // namespace

TEST_CASE("worlds whose best arm is known: within 3 % of it after 60 turns, where arms that learn apart are not") {
    const world worlds[] = {{"good first guesses", {0.84, 0.02, 0.01, 0.005}, 6.56, 0.033, 0.5, 0.0025},
                            {"good second guesses", {0.7, 0.2, 0.05, 0.02}, 6.56, 0.033, 0.5, 0.0025},
                            {"a poor drafter", {0.45, 0.1, 0.05, 0.03}, 6.56, 0.033, 0.5, 0.0025},
                            {"dear passes", {0.8, 0.1, 0.03, 0.01}, 6.56, 0.033, 3.0, 0.0025},
                            {"dear rows", {0.8, 0.1, 0.03, 0.01}, 6.56, 0.6, 0.5, 0.02},
                            {"a CPU: dear rows of drafts too", {0.8, 0.12, 0.03, 0.01}, 1, 0.1, 0.05, 0.1, true}};
    const rate_tuner_options o;
    tuner_options apart; // the same arms, in one bucket
    apart.arms = o.arms, apart.thresholds = {1}, apart.window = 40, apart.tries = 2;
    for (strategy& s : apart.arms) s.verify = 16;
    double worst = -1, worst_apart = -1;
    for (const world& w : worlds)
        for (const index_t batch : {1, 2, 8}) {
            double mean = 0, mean_apart = 0;
            constexpr int seeds = 4;
            for (std::uint32_t seed = 1; seed <= seeds; ++seed) {
                const rollout r(w, batch, seed);
                double best = 0;
                for (const strategy& s : o.arms)
                    best = std::max(best, rate(
                                              r, 60, 300, [&](auto&) { return s; }, [](auto&&...) {}));
                rate_tuner t(o);
                const double mine = rate(
                    r, 60, 300,
                    [&](rollout& x) {
                        return t.choose(batch, x.rates,
                                        [&](index_t rows, const strategy& y) { return x.predicted(rows, y); });
                    },
                    [&](rollout& x, const strategy& s, const auto& y) {
                        t.heard(s, batch, y.accepted, y.seconds, x.rates,
                                [&](index_t rows, const strategy& y) { return x.predicted(rows, y); });
                    });
                beg_mab b(apart);
                std::uint64_t at = 0;
                const double theirs = rate(
                    r, 60, 300,
                    [&](rollout&) {
                        const strategy s = b.choose(batch, keyed_uniforms(seed, at++));
                        return *std::find_if(o.arms.begin(), o.arms.end(), [&](const strategy& y) {
                            return y.depth == s.depth && y.top_k == s.top_k;
                        });
                    },
                    [&](rollout&, const strategy& s, const auto& y) {
                        b.heard({s.depth, s.top_k, 16}, batch, y.accepted, y.seconds);
                    });
                mean += (1 - mine / best) / seeds, mean_apart += (1 - theirs / best) / seeds;
            }
            MESSAGE(w.name << ", " << batch << ": behind the best arm " << mean << ", arms that learn apart "
                           << mean_apart);
            CHECK(mean < 0.03);
            worst = std::max(worst, mean), worst_apart = std::max(worst_apart, mean_apart);
        }
    MESSAGE("at most " << worst << " and " << worst_apart);
    CHECK(worst_apart > 0.03);
}

TEST_CASE("what it chooses, by hand: the untried that could be best, then the best, and now and then another") {
    rate_tuner_options o;
    o.arms = {{4, 1, 4}, {2, 1, 2}, {1, 1, 1}}, o.again = 4, o.doubt = 1, o.memory = 1e9, o.near = 0.75;
    const auto flat = [](index_t, const strategy&) { return 1.0; };
    const auto by_rows = [](index_t rows, const strategy&) { return static_cast<double>(rows); };
    const follow_rates rates; // 0.6 at any depth
    const double of[] = {1 + 0.6 + 0.36 + 0.216 + 0.1296, 1 + 0.6 + 0.36, 1.6};
    rate_tuner t(o);
    for (std::size_t i = 0; i < 3; ++i)
        CHECK(t.tokens_per_second(o.arms[i], 3, rates, flat) == doctest::Approx(of[i]).epsilon(1e-12));
    CHECK(t.tokens_per_second(o.arms[0], 2, rates, by_rows) == doctest::Approx(1.6 / 4)); // one node is the best share
    CHECK(t.best_rate(3, rates, flat) == doctest::Approx(of[0]).epsilon(1e-12));
    const auto by_arm = [](index_t, const strategy& s) { return s.depth == 4 ? 2.0 : 1.0; };
    CHECK(t.best_rate(3, rates, by_arm) == doctest::Approx(of[1]).epsilon(1e-12));
    CHECK(t.choose(3, rates, flat) == o.arms[0]);
    t.heard(o.arms[0], 3, of[0] - 1, 1, rates, flat); // as predicted
    CHECK(t.choose(3, rates, flat) == o.arms[1]);     // not tried, and not far behind
    t.heard(o.arms[1], 2, 2 * of[1] - 1, 1, rates, flat);
    // the ratios of that arm: 2, and once the mean of 1, 1 and 2
    CHECK(t.tokens_per_second(o.arms[1], 3, rates, flat) == doctest::Approx(of[1] * (2 + 4.0 / 3) / 2));
    CHECK(t.tokens_per_second(o.arms[1], 4, rates, flat) == doctest::Approx(of[1])); // other batches
    CHECK(t.choose(3, rates, flat) == o.arms[1]);                                    // the third is far behind
    t.heard(o.arms[1], 3, 2 * of[1] - 1, 1, rates, flat);
    CHECK(t.choose(3, rates, flat) == o.arms[0]); // the fourth choice: heard of longest ago
    t.heard(o.arms[0], 3, of[0] - 1, 1, rates, flat);
    CHECK(t.choose(3, rates, flat) == o.arms[1]);
    t.heard({9, 9, 9}, 3, 100, 1e-9, rates, flat); // nobody's
    CHECK(t.choose(3, rates, flat) == o.arms[1]);
    // old turns fade
    o.memory = 1;
    rate_tuner u(o);
    u.heard(o.arms[0], 1, 2 * of[0] - 1, 1, rates, flat);
    u.heard(o.arms[1], 1, of[1] - 1, 1, rates, flat);
    CHECK(u.tokens_per_second(o.arms[0], 1, rates, flat) == doctest::Approx(of[0]));
    // no more nodes count than are verified; of two others, the one that was heard of longest ago has its turn
    o.arms = {{4, 1, 4}, {4, 1, 3}, {4, 1, 2}}, o.near = 0.5, o.memory = 1e9;
    rate_tuner w(o);
    CHECK(w.tokens_per_second(o.arms[2], 3, rates, flat) == doctest::Approx(of[1]));
    for (const strategy& arm : o.arms) {
        CHECK(w.choose(3, rates, flat) == arm);
        w.heard(arm, 3, w.tokens_per_second(arm, 3, rates, flat) - 1, 1, rates, flat);
    }
    CHECK(w.choose(3, rates, flat) == o.arms[1]); // the fourth choice
}

TEST_CASE("a state that is saved goes on as if it had not been, and what cannot be is refused by name") {
    const world w{"any", {0.7, 0.1, 0.05, 0.02}, 6.56, 0.033, 0.5};
    rollout r(w, 2, 5);
    const auto seconds = [&](index_t rows, const strategy& s) { return r.predicted(rows, s); };
    rate_tuner t, again;
    for (int i = 0; i < 100; ++i) {
        const strategy s = t.choose(2, r.rates, seconds);
        const auto x = r.go(s);
        t.heard(s, 2, x.accepted, x.seconds, r.rates, seconds);
        opd::sched::archive_writer out;
        out(t);
        opd::sched::archive_reader in(out.bytes);
        in(again);
        CHECK(in.done());
        rate_tuner next = t;
        CHECK(again.choose(2, r.rates, seconds) == next.choose(2, r.rates, seconds));
    }
    opd::sched::archive_writer out;
    out(t);
    rate_tuner_options few;
    few.arms.resize(3);
    rate_tuner other(few);
    opd::sched::archive_reader in(out.bytes);
    CHECK_THROWS_AS(in(other), opd::invalid_input);

    const auto refused = [](auto change, const char* name) {
        rate_tuner_options o;
        change(o);
        try {
            const rate_tuner made(o);
        } catch (const opd::invalid_input& e) {
            return std::string(e.what()).find(name) != std::string::npos;
        }
        return false;
    };
    CHECK(refused([](auto& o) { o.arms.clear(); }, "arms"));
    CHECK(refused([](auto& o) { o.arms.push_back(o.arms[0]); }, "arms"));
    CHECK(refused([](auto& o) { o.memory = 0.5; }, "memory"));
    CHECK(refused([](auto& o) { o.doubt = 0; }, "doubt"));
    CHECK(refused([](auto& o) { o.near = 1.5; }, "near"));
    CHECK(refused([](auto& o) { o.again = 0; }, "again"));
    CHECK_THROWS_AS(t.choose(0, r.rates, seconds), opd::invalid_input);
    CHECK_THROWS_AS(t.heard({8, 1, 8}, 1, -1, 1, r.rates, seconds), opd::invalid_input);
}
