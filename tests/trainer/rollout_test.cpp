// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "pipeline/learner.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/rollout_engine.hpp"
#include "task/task.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;

using opd::test::small_shape;
using opd::test::small_task;

std::vector<request> requests(int count) {
    std::vector<request> r;
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i)
        r.push_back({1000 + i, small_task().text.encode(small_task().prompt(small_task().draw(1, i)))});
    return r;
}

sampling options() {
    sampling o;
    o.seed = 5;
    o.end = gcd_task::end;
    o.max_response = small_task().max_response();
    return o;
}

bool same(const std::vector<trajectory>& a, const std::vector<trajectory>& b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i)
        if (a[i].sample != b[i].sample || a[i].tokens != b[i].tokens || a[i].log_mu != b[i].log_mu ||
            a[i].draw_ids != b[i].draw_ids || a[i].draw_weight != b[i].draw_weight ||
            a[i].draw_log_mu != b[i].draw_log_mu || a[i].ended != b[i].ended)
            return false;
    return true;
}

} // namespace

TEST_CASE("a trajectory is a pure function of weights, seed and sample") {
    transformer<float> model(small_shape());
    model.initialise(1);
    const auto prompts = requests(33);
    opd::thread_team one(1);
    for (auto kind : {draw_plan::kind::iid, draw_plan::kind::threshold, draw_plan::kind::top_k}) {
        sampling o = options();
        o.plan = {kind, 4};
        o.slots = 1;
        o.prefill_chunk = 1;
        const auto reference = roll_out(model, one, prompts, o);
        for (int threads : {1, 2, 3})
            for (int slots : {2, 7, 64})
                for (int chunk : {3, 8}) {
                    opd::thread_team team(threads);
                    o.slots = slots;
                    o.prefill_chunk = chunk;
                    CHECK(same(roll_out(model, team, prompts, o), reference));
                }
        // and of nothing less
        o.seed = 6;
        CHECK_FALSE(same(roll_out(model, one, prompts, o), reference));
    }
}

TEST_CASE("a large model's trajectories: one engine of all lanes, whose products the team shares") {
    model_shape shape = small_shape();
    shape.tied = true;
    shape.width = 512, shape.vocabulary = 1 << 15; // as many weights as roll_out calls large
    transformer<float> model(shape);
    model.initialise(1);
    REQUIRE(model.weights.size() >= std::size_t{1} << 24);
    const auto prompts = requests(3);
    sampling o = options();
    o.max_response = 3, o.slots = 2;
    opd::thread_team one(1), three(3);
    const auto together = roll_out(model, three, prompts, o);
    CHECK(same(together, roll_out(model, one, prompts, o)));
    for (const trajectory& t : together) {
        const auto alone =
            std::find_if(prompts.begin(), prompts.end(), [&](const request& r) { return r.sample == t.sample; });
        rollout_engine engine({{std::shared_ptr<void>(), &model}, 0}, o, 1, std::ssize(alone->prompt) + o.max_response);
        engine.start(0, *alone);
        std::vector<lane_trajectory> finished;
        while (finished.empty()) engine.step(finished);
        CHECK(same({t}, {finished.front().sequence}));
    }
}

TEST_CASE("at unchanged weights the learner's log-probs are the rollout's, bit for bit") {
    config c;
    c.student_model = small_shape();
    for (double temperature : {1.0, 0.7}) {
        c.distill.temperature = temperature;
        transformer<float> model(small_shape());
        model.initialise(2);
        adamw_state state;
        opd::cpu_backend backend{.threads = 2};
        learner learn(c, model, state, backend);
        sampling o = options();
        o.temperature = temperature;
        const auto prompts = requests(33);
        const auto trajectories = roll_out(model, backend.team(), prompts, o);
        for (std::size_t batch = 1; batch <= 33; ++batch) {
            const row_batch rows = pack(std::span(trajectories).first(batch), 0);
            const auto recomputed = learn.token_log_probs(rows);
            REQUIRE(recomputed.size() == rows.log_mu.size());
            CHECK(std::memcmp(recomputed.data(), rows.log_mu.data(), recomputed.size() * sizeof(float)) == 0);
        }
        // one step later they differ: the comparison can fail
        const row_batch rows = pack(trajectories, 0);
        teacher_cache cache;
        transformer<float> teacher(small_shape());
        teacher.initialise(9);
        cache_plan plan = cache_for(c);
        teacher_scorer(teacher, backend).score(rows, plan, cache);
        const auto step = learn.step(rows, cache, 1e-3, 0);
        CHECK(step.mismatched == 0);
        CHECK(learn.step(rows, cache, 1e-3, 0).mismatched > rows.kept / 2);
    }
}

TEST_CASE("packing puts every response token on the row that predicts it") {
    trajectory t;
    t.tokens = {1, 2, 3, 4, 5};
    t.prompt_length = 3;
    t.log_mu = {-1, -2};
    t.versions = {7, 8};
    t.draw_ids = {4, 0, 5, 1};
    t.draw_log_mu = {-1, -3, -2, -4};
    t.draw_weight = {.5f, .25f, .5f, .125f};
    t.draw_exact = {0, 1, 0, 1};
    const row_batch b = pack(std::span(&t, 1), 2);
    CHECK(b.rows == 4);
    CHECK(b.kept == 2);
    CHECK(b.inputs[0] == std::vector<token>{1, 2, 3, 4});
    CHECK(b.mask == std::vector<std::uint8_t>{0, 0, 1, 1});
    CHECK(b.next == std::vector<token>{2, 3, 4, 5});
    CHECK(b.log_mu == std::vector<float>{0, 0, -1, -2});
    CHECK(b.versions[2] == 7);
    CHECK(b.versions[3] == 8);
    CHECK(b.ids == std::vector<std::int32_t>{0, 1, 0, 1, 4, 0, 5, 1});
    CHECK(b.entry_log_mu == std::vector<float>{0, 0, 0, 0, -1, -3, -2, -4});
    CHECK(b.entry_weight == std::vector<float>{0, 0, 0, 0, .5f, .25f, .5f, .125f});
    CHECK(b.entry_exact == std::vector<std::uint8_t>{0, 0, 0, 0, 0, 1, 0, 1});
    CHECK(b.offsets == std::vector<std::int64_t>{0, 4});

    trajectory u;
    u.tokens = {9, 8};
    u.prompt_length = 1;
    u.log_mu = {-3};
    u.versions = {5};
    const std::vector<trajectory> both{u, t};
    const row_batch two = pack(both, 0);
    CHECK(two.offsets == std::vector<std::int64_t>{0, 1, 5});
    CHECK(two.rows == 5);
    CHECK(two.kept == 3);
    CHECK(two.mask == std::vector<std::uint8_t>{1, 0, 0, 1, 1});
    CHECK(two.next == std::vector<token>{8, 2, 3, 4, 5});
    CHECK(two.log_mu == std::vector<float>{-3, 0, 0, -1, -2});
    CHECK(two.versions == std::vector<std::int32_t>{5, 7, 7, 7, 8});
    CHECK(two.ids.empty());
    CHECK_THROWS_WITH(pack(both, 2), doctest::Contains("pack: sample 0 has 0 draws for 1 tokens of 2"));
}

TEST_CASE("recorded draws follow the behaviour policy") {
    transformer<float> model(small_shape());
    model.initialise(3);
    opd::thread_team threads(2);
    std::vector<request> same_prompt(6000, requests(1)[0]);
    for (std::size_t i = 0; i < same_prompt.size(); ++i) same_prompt[i].sample = i;
    sampling o = options();
    o.max_response = 1;
    o.slots = 64;
    o.plan = {draw_plan::kind::top_k, 15};
    std::vector<double> mu(15);
    const auto exact = roll_out(model, threads, std::span(same_prompt).first(1), o)[0];
    for (std::size_t i = 0; i < 15; ++i)
        mu[static_cast<std::size_t>(exact.draw_ids[i])] = std::exp(static_cast<double>(exact.draw_log_mu[i]));
    CHECK(std::accumulate(mu.begin(), mu.end(), 0.0) == doctest::Approx(1));

    for (auto kind : {draw_plan::kind::iid, draw_plan::kind::threshold}) {
        o.plan = {kind, 4};
        const auto drawn = roll_out(model, threads, same_prompt, o);
        std::vector<double> weight(15, 0.0), square(15, 0.0), chosen(15, 0.0);
        for (const trajectory& t : drawn) {
            std::vector<double> here(15, 0.0);
            for (std::size_t e = 0; e < 4; ++e)
                if (t.draw_ids[e] >= 0) {
                    here[static_cast<std::size_t>(t.draw_ids[e])] += static_cast<double>(t.draw_weight[e]);
                    CHECK(std::abs(std::exp(static_cast<double>(t.draw_log_mu[e])) -
                                   mu[static_cast<std::size_t>(t.draw_ids[e])]) < 1e-6);
                }
            for (std::size_t v = 0; v < 15; ++v) {
                weight[v] += here[v];
                square[v] += here[v] * here[v];
            }
            chosen[static_cast<std::size_t>(t.tokens.back())] += 1;
            if (kind == draw_plan::kind::iid) CHECK(t.draw_ids[0] == t.tokens.back());
        }
        const auto n = static_cast<double>(drawn.size());
        for (std::size_t v = 0; v < 15; ++v) {
            const double mean = weight[v] / n, error = std::sqrt((square[v] / n - mean * mean) / n) + 1e-9;
            CHECK(std::abs(mean - mu[v]) < 5 * error + 1e-6);
            CHECK(std::abs(chosen[v] / n - mu[v]) < 5 * std::sqrt(mu[v] / n) + 1e-9);
        }
    }
}

TEST_CASE("what rollout cannot do is refused") {
    transformer<float> model(small_shape());
    model.initialise(4);
    opd::thread_team threads(1);
    sampling o = options();
    std::vector<request> bad(1);
    bad[0].sample = 77;
    CHECK_THROWS_WITH(roll_out(model, threads, bad, o), doctest::Contains("sample 77 is empty"));
    o.max_response = small_task().max_length();
    CHECK_THROWS_WITH(roll_out(model, threads, requests(1), o), doctest::Contains("the model takes"));
    o = options();
    model.weights[static_cast<std::size_t>(model.layout.norm_f.offset)] = NAN;
    try {
        roll_out(model, threads, requests(1), o);
        FAIL("a policy of NaN was sampled");
    } catch (const failure& e) {
        CHECK(e.code == exit_numeric);
        CHECK(std::string(e.what()).find("sample 1000") != std::string::npos);
    }
}
