// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "pipeline/learner.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/rollout_engine.hpp"
#include "task/task.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;

using opd::test::small_shape;
using opd::test::small_task;

using opd::test::draw_plans;
using opd::test::small_weights;

request prompt_of(std::uint64_t sample) { return opd::test::small_prompt(sample); }

sampling options(draw_plan plan = {draw_plan::kind::iid, 3}) { return opd::test::small_sampling(plan); }

rollout_engine engine_of(const policy& weights, const sampling& o, index_t lanes) {
    return {weights, o, lanes, small_task().max_length()};
}

index_t free_lane(const rollout_engine& engine) {
    index_t lane = 0;
    while (engine.busy(lane)) ++lane;
    return lane;
}

// One sequence alone, from wherever it is to its end.
trajectory alone(const policy& weights, const sampling& o, trajectory from) {
    rollout_engine engine = engine_of(weights, o, 1);
    engine.start(0, std::move(from));
    std::vector<lane_trajectory> done;
    while (engine.running() > 0) engine.step(done);
    REQUIRE(done.size() == 1);
    return done[0].sequence;
}

// The first `count` response tokens of t, with what belongs to them.
trajectory cut(trajectory t, std::size_t count) {
    const std::size_t width = t.log_mu.empty() ? 0 : t.draw_ids.size() / t.log_mu.size();
    t.tokens.resize(t.prompt_length + count);
    t.log_mu.resize(count);
    t.versions.resize(count);
    t.draw_ids.resize(count * width);
    t.draw_log_mu.resize(count * width);
    t.draw_weight.resize(count * width);
    t.draw_exact.resize(count * width);
    t.ended = false;
    return t;
}

} // namespace

TEST_CASE("an engine draws roll_out's bits, whatever runs beside a sequence and whenever it enters") {
    const policy weights = small_weights(1, 7);
    std::vector<request> prompts;
    for (std::uint64_t i = 0; i < 24; ++i) prompts.push_back(prompt_of(1000 + i));
    for (const draw_plan& plan : draw_plans) {
        const sampling o = options(plan);
        opd::thread_team team(2);
        const auto reference = roll_out(*weights.model, team, prompts, o, 7);
        for (std::uint32_t world = 0; world < 12; ++world) {
            std::mt19937 random(world);
            sampling mine = o;
            mine.prefill_chunk = 1 + static_cast<int>(random() % 9);
            const auto lanes = static_cast<index_t>(1 + random() % 9);
            rollout_engine engine = engine_of(weights, mine, lanes);
            std::vector<std::size_t> order(prompts.size());
            for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
            std::shuffle(order.begin(), order.end(), random);
            std::map<std::uint64_t, trajectory> got;
            std::vector<lane_trajectory> done;
            std::size_t next = 0;
            while (got.size() < prompts.size()) {
                while (next < order.size() && engine.running() < lanes && random() % 3 != 0)
                    engine.start(free_lane(engine), prompts[order[next++]]);
                if (random() % 16 == 0 && engine.running() > 0) { // given up, and begun anew
                    const auto running = engine.partials();
                    const auto& victim = running[random() % running.size()];
                    engine.abort(victim.lane);
                    CHECK_FALSE(engine.busy(victim.lane));
                    engine.start(victim.lane, prompt_of(victim.sequence.sample));
                }
                done.clear();
                engine.step(done);
                for (auto& d : done) {
                    CHECK_FALSE(engine.busy(d.lane));
                    REQUIRE(got.emplace(d.sequence.sample, d.sequence).second);
                }
            }
            CHECK(engine.running() == 0);
            int different = 0;
            for (const trajectory& t : reference) different += !(got.at(t.sample) == t);
            CHECK(different == 0);
        }
    }
}

TEST_CASE("after new weights every token is what they draw after that prefix, and says so") {
    const policy versions[] = {small_weights(1, 3), small_weights(2, 4), small_weights(3, 9)};
    int spanning = 0, installs = 0;
    for (const draw_plan& plan : draw_plans)
        for (std::uint32_t world = 0; world < 12; ++world) {
            std::mt19937 random(world);
            const sampling o = options(plan);
            rollout_engine engine = engine_of(versions[0], o, 5);
            std::size_t current = 0;
            std::uint64_t next = 100;
            std::vector<lane_trajectory> done;
            // per sample: response tokens drawn when weights number 1, 2 came
            std::map<std::uint64_t, std::vector<std::size_t>> breaks;
            while (next < 112 || engine.running() > 0) {
                while (next < 112 && engine.running() < 5) {
                    breaks[next] = std::vector<std::size_t>(current, 0);
                    engine.start(free_lane(engine), prompt_of(next++));
                }
                if (current + 1 < std::size(versions) && random() % 20 == 0) {
                    ++current;
                    ++installs;
                    for (const auto& r : engine.partials())
                        breaks[r.sequence.sample].push_back(r.sequence.response().size());
                    engine.install(versions[current]);
                    CHECK(engine.version() == versions[current].version);
                }
                engine.step(done);
            }
            for (const lane_trajectory& d : done) {
                const trajectory& t = d.sequence;
                const auto& at = breaks.at(t.sample);
                // the exact breakpoints
                std::vector<std::int32_t> expected(t.response().size());
                for (std::size_t i = 0; i < expected.size(); ++i) {
                    const auto passed = std::count_if(at.begin(), at.end(), [&](std::size_t b) { return b <= i; });
                    expected[i] = versions[passed].version;
                }
                CHECK(t.versions == expected);
                CHECK(std::is_sorted(t.versions.begin(), t.versions.end()));
                // every stretch, from a fresh engine with its weights
                for (std::size_t w = 0; w <= at.size(); ++w) {
                    const std::size_t from = w == 0 ? 0 : at[w - 1], to = w == at.size() ? t.response().size() : at[w];
                    if (from == to) continue;
                    CHECK(cut(alone(versions[w], o, cut(t, from)), to) == cut(t, to));
                    spanning += w > 0 && from > 0;
                }
            }
        }
    CHECK(installs > 40);
    CHECK(spanning > 40);
}

TEST_CASE("the learner computes the log-probs of the tokens that its weights drew after an older prefix") {
    const policy old = small_weights(1, 0), fresh = small_weights(2, 1);
    const sampling o = options();
    rollout_engine engine = engine_of(old, o, 8);
    for (std::uint64_t i = 0; i < 8; ++i) engine.start(static_cast<index_t>(i), prompt_of(i));
    std::vector<lane_trajectory> done;
    index_t rebuilt = 0, read = 0, known = 0;
    for (int i = 0; i < 9; ++i) {
        read += engine.step(done);
        rebuilt += engine.recomputed();
    }
    CHECK(rebuilt == 0);
    for (index_t lane = 0; lane < 8; ++lane)
        if (engine.busy(lane))
            known += static_cast<index_t>(engine.drawn(lane).tokens.size()) - 1; // the last is not read
    engine.install(fresh);
    while (engine.running() > 0) {
        read += engine.step(done);
        rebuilt += engine.recomputed();
    }
    CHECK(rebuilt == known);
    CHECK(read > known);
    std::vector<trajectory> all;
    for (auto& d : done) all.push_back(d.sequence);

    config c;
    transformer<float> model = *fresh.model;
    adamw_state state;
    opd::cpu_backend backend{.threads = 2};
    learner learn(c, model, state, backend);
    const row_batch rows = pack(all, o.plan.count);
    const auto recomputed = learn.token_log_probs(rows);
    int newer = 0, wrong = 0, older_that_differ = 0;
    for (std::size_t r = 0; r < recomputed.size(); ++r) {
        if (!rows.mask[r]) continue;
        const bool equal = std::memcmp(&recomputed[r], &rows.log_mu[r], sizeof(float)) == 0;
        if (rows.versions[r] == 1) {
            ++newer;
            wrong += !equal;
        } else {
            older_that_differ += !equal;
        }
    }
    CHECK(newer > 20);
    CHECK(wrong == 0);
    CHECK(older_that_differ > 10); // the comparison can fail
}

TEST_CASE("what is running can be taken out, and goes on elsewhere bit for bit") {
    const policy versions[] = {small_weights(1, 0), small_weights(2, 1)};
    for (const draw_plan& plan : draw_plans)
        for (std::uint32_t world = 0; world < 12; ++world) {
            std::mt19937 random(world);
            const sampling o = options(plan);
            const int install_at = static_cast<int>(random() % 30), cut_at = static_cast<int>(random() % 40);
            const auto run = [&](bool interrupted) {
                rollout_engine engine = engine_of(versions[0], o, 6);
                for (std::uint64_t i = 0; i < 6; ++i) engine.start(static_cast<index_t>(i), prompt_of(i));
                std::vector<lane_trajectory> done;
                std::size_t finished_before = 0;
                for (int i = 0; i < 30 || engine.running() > 0; ++i) {
                    if (interrupted && i == cut_at) {
                        auto partials = engine.partials();
                        CHECK(static_cast<index_t>(partials.size()) == engine.running());
                        finished_before = done.size();
                        sampling other = o;
                        other.prefill_chunk = 8;
                        engine = engine_of(versions[i > install_at], other, 9);
                        // on other lanes
                        for (auto& p : partials) engine.start(8 - p.lane, p.sequence);
                    }
                    if (i == install_at) engine.install(versions[1]);
                    engine.step(done);
                }
                CHECK(done.size() == 6);
                CHECK(finished_before <= 6);
                std::map<std::uint64_t, trajectory> r;
                for (auto& d : done) r[d.sequence.sample] = d.sequence;
                return r;
            };
            const auto whole = run(false);
            const auto resumed = run(true);
            // With chunks of another size a token may be drawn some steps sooner or later, so weights that come in
            // between meet another prefix: compare where that cannot be.
            if (cut_at > install_at) CHECK(whole == resumed);
            for (const auto& [sample, t] : resumed) CHECK(std::is_sorted(t.versions.begin(), t.versions.end()));
        }
}

TEST_CASE("what an engine cannot do is refused, and leaves it as it was") {
    const policy weights = small_weights(1, 5);
    const sampling o = options();
    rollout_engine engine = engine_of(weights, o, 2);
    engine.start(1, prompt_of(40));
    std::vector<lane_trajectory> done;
    for (int i = 0; i < 6; ++i) engine.step(done);
    const auto before = engine.partials();

    CHECK_THROWS_WITH(engine.start(1, prompt_of(41)), doctest::Contains("lane 1 still runs sample 40"));
    CHECK_THROWS_WITH(engine.start(2, prompt_of(41)), doctest::Contains("lane 2 of 2"));
    CHECK_THROWS_WITH(engine.start(-1, prompt_of(41)), doctest::Contains("lane -1 of 2"));
    CHECK_THROWS_WITH(engine.abort(0), doctest::Contains("nothing runs on lane 0"));
    CHECK_THROWS_WITH(engine.start(0, request{41, {}}), doctest::Contains("sample 41 is empty"));
    trajectory longer = begin_response(prompt_of(41));
    longer.tokens.push_back(1);
    longer.prompt_length = longer.tokens.size();
    CHECK_THROWS_WITH(engine.start(0, longer), doctest::Contains("the lane takes"));
    trajectory odd = before[0].sequence;
    odd.log_mu.pop_back();
    CHECK_THROWS_WITH(engine.start(0, odd), doctest::Contains("not one log_mu and one version a token"));
    odd = before[0].sequence;
    odd.draw_ids.pop_back();
    CHECK_THROWS_WITH(engine.start(0, odd), doctest::Contains("draws that do not fit"));
    odd = before[0].sequence;
    odd.tokens.back() = 15;
    CHECK_THROWS_WITH(engine.start(0, odd), doctest::Contains("outside the vocabulary"));
    CHECK_THROWS_WITH(engine.start(0, alone(weights, o, begin_response(prompt_of(41)))),
                      doctest::Contains("a finished response"));
    CHECK_THROWS_WITH(engine.install(small_weights(1, 4)), doctest::Contains("version 4 after version 5"));
    CHECK_THROWS_WITH(engine.install({}), doctest::Contains("no weights"));
    CHECK_THROWS_WITH(engine_of(weights, o, 0), doctest::Contains("lanes must be at least 1"));
    sampling none = o;
    none.prefill_chunk = 0;
    CHECK_THROWS_WITH(engine_of(weights, none, 1), doctest::Contains("prefill_chunk"));
    CHECK(engine.partials() == before);

    // weights that draw nothing finite: the step fails and can be repeated with better ones
    transformer<float> broken = *weights.model;
    broken.weights[static_cast<std::size_t>(broken.layout.norm_f.offset)] = NAN;
    engine.install({std::make_shared<const transformer<float>>(broken), 6});
    CHECK_THROWS_AS(for (int i = 0; i < 99; ++i) engine.step(done), failure);
    CHECK(engine.partials() == before);
    engine.install({weights.model, 7});
    while (engine.running() > 0) engine.step(done);
    REQUIRE(done.size() == 1);
    trajectory expected = alone(weights, o, begin_response(prompt_of(40)));
    CHECK(done[0].sequence.tokens == expected.tokens);
    CHECK(done[0].sequence.log_mu == expected.log_mu);
    CHECK(done[0].sequence.versions.back() == 7);
}
