// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-tsan
//
// What an asynchronous trainer rests on beside the engine: sequences scored in any parts are scored the same, weights
// are handed over whole, and the estimators that promise it learn the right thing from stale sequences.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "pipeline/learner.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/rollout_engine.hpp"
#include "task/task.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;

using opd::test::small_shape;
using opd::test::small_task;

std::vector<request> prompts(int count) {
    std::vector<request> r;
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i)
        r.push_back({i, small_task().text.encode(small_task().prompt(small_task().draw(1, i)))});
    return r;
}

transformer<float> model_of(std::uint64_t seed) {
    transformer<float> model(small_shape());
    model.initialise(seed);
    return model;
}

// Weights that have moved a little, as some steps of training move them.
transformer<float> moved(const transformer<float>& model, double share) {
    transformer<float> r = model;
    const transformer<float> other = model_of(77);
    for (std::size_t i = 0; i < r.weights.size(); ++i)
        r.weights[i] += static_cast<float>(share) * (other.weights[i] - r.weights[i]);
    r.weights_changed();
    return r;
}

config settings(const char* estimator, const char* topk_from = "teacher") {
    config c;
    c.student_model = small_shape();
    c.distill.estimator = estimator;
    c.distill.topk_from = topk_from;
    return c;
}

std::vector<trajectory> drawn(const config& c, const transformer<float>& model, std::int32_t version, int count) {
    opd::thread_team team(2);
    sampling o;
    o.temperature = c.distill.temperature;
    o.seed = 5;
    o.end = gcd_task::end;
    o.max_response = small_task().max_response();
    o.plan = draws_for(c);
    return roll_out(model, team, prompts(count), o, version);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

} // namespace

TEST_CASE("a batch scored in any parts and joined has the bits of scoring it at once, for every kind of cache") {
    const transformer<float> student = model_of(1), teacher = model_of(2);
    for (const auto& [estimator, from] :
         {std::pair{"reverse_kl", "teacher"}, std::pair{"topk", "teacher"}, std::pair{"tail_bucket", "student"},
          std::pair{"mc", "teacher"}, std::pair{"threshold", "teacher"}}) {
        CAPTURE(estimator);
        for (double temperature : {1.0, 0.7}) {
            config c = settings(estimator, from);
            c.distill.temperature = temperature;
            const cache_plan plan = cache_for(c);
            const int entries = draws_for(c).count;
            const auto trajectories = drawn(c, student, 0, 20);
            opd::cpu_backend backend{.threads = 2};
            teacher_scorer scorer(teacher, backend);
            const row_batch batch = pack(trajectories, entries);
            teacher_cache whole;
            scorer.score(batch, plan, whole);
            CHECK(whole.rows() == batch.rows);

            for (std::uint32_t world = 0; world < 10; ++world) {
                std::mt19937 random(world);
                std::vector<const trajectory*> order;
                for (const auto& t : trajectories) order.push_back(&t);
                std::shuffle(order.begin(), order.end(), random);
                // scored by two teachers, in parts of any size
                opd::cpu_backend serial{.threads = 1};
                teacher_scorer second(teacher, serial);
                std::vector<scored_sequence> scored;
                for (std::size_t at = 0; at < order.size();) {
                    const std::size_t size = std::min<std::size_t>(1 + random() % 7, order.size() - at);
                    teacher_scorer& whose = random() % 2 == 0 ? scorer : second;
                    for (auto& s : whose.score(std::span(order).subspan(at, size), entries, plan))
                        scored.push_back(std::move(s));
                    at += size;
                }
                std::vector<const scored_sequence*> sorted;
                for (const auto& s : scored) sorted.push_back(&s);
                std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->sample < b->sample; });
                teacher_cache joined;
                join(sorted, joined);
                CHECK(joined.what == whole.what);
                CHECK(joined.entries == whole.entries);
                CHECK(same_bits(joined.logits, whole.logits));
                CHECK(same_bits(joined.ids, whole.ids));
                CHECK(same_bits(joined.log_q, whole.log_q));
                CHECK(same_bits(joined.log_tail, whole.log_tail));
                CHECK(same_bits(joined.next_log_q, whole.next_log_q));
                // in another order they are other rows: the comparison can fail
                std::swap(sorted.front(), sorted.back());
                join(sorted, joined);
                CHECK_FALSE(same_bits(joined.next_log_q, whole.next_log_q));
            }
        }
    }
}

TEST_CASE("parts that do not belong together are refused") {
    const transformer<float> student = model_of(1), teacher = model_of(2);
    opd::cpu_backend backend{.threads = 1};
    teacher_scorer scorer(teacher, backend);
    const config mc = settings("mc"), dense = settings("reverse_kl");
    const auto trajectories = drawn(mc, student, 0, 2);
    const trajectory* one[] = {&trajectories[0]};
    const auto a = scorer.score(one, 4, cache_for(mc)), b = scorer.score(one, 4, cache_for(dense));
    const scored_sequence* both[] = {&a[0], &b[0]};
    teacher_cache cache;
    CHECK_THROWS_WITH(join(both, cache), doctest::Contains("sample 0 was scored for another objective"));
    join(std::span(both).first(1), cache);
    transformer<float> model = student;
    adamw_state state;
    learner learn(mc, model, state, backend);
    CHECK_THROWS_WITH(learn.step(pack(trajectories, 4), cache, 1e-3, 0), doctest::Contains("a teacher cache of"));
    CHECK(model.weights == student.weights);
}

TEST_CASE("a snapshot keeps its weights while the learner goes on") {
    transformer<float> model = model_of(1);
    const transformer<float> teacher = model_of(2);
    adamw_state state;
    opd::cpu_backend backend{.threads = 2};
    const config c = settings("reverse_kl");
    learner learn(c, model, state, backend);
    const policy before = learn.snapshot(4);
    CHECK(before.version == 4);
    const auto weights = model.weights;
    const auto trajectories = drawn(c, *before.model, 4, 6);
    const row_batch batch = pack(trajectories, 0);
    teacher_cache cache;
    teacher_scorer(teacher, backend).score(batch, cache_for(c), cache);
    CHECK(learn.step(batch, cache, 1e-2, 4).mismatched == 0);
    CHECK(model.weights != weights);
    CHECK(before.model->weights == weights);
    CHECK(drawn(c, *before.model, 4, 6) == trajectories);
    const policy after = learn.snapshot(5);
    CHECK(after.model->weights == model.weights);
    CHECK_FALSE(drawn(c, *after.model, 4, 6) == trajectories);
}

TEST_CASE("published weights arrive whole, whoever takes them and when") {
    constexpr std::int32_t last = 400;
    publication board;
    const auto name = [](std::int32_t version) {
        return opd::sched::weights{version, 10 + static_cast<std::uint64_t>(version)};
    };
    CHECK_THROWS_WITH(board.get({}), doctest::Contains("none is published"));
    const auto marked = [](std::int32_t version) {
        transformer<float> model(small_shape());
        std::fill(model.weights.begin(), model.weights.end(), static_cast<float>(version));
        model.weights_changed();
        return policy{std::make_shared<const transformer<float>>(std::move(model)), version};
    };
    board.publish(name(0), marked(0));
    std::atomic<int> torn{0}, changes{0};
    std::vector<std::thread> workers;
    for (int w = 0; w < 3; ++w)
        workers.emplace_back([&] {
            for (std::int32_t seen = -1; seen < last;) {
                const policy p = board.latest();
                torn += p.version < seen;
                changes += p.version > seen;
                seen = p.version;
                const auto expected = static_cast<float>(p.version);
                for (const float x : p.model->weights) torn += x != expected;
                const tensor& head = p.model->layout.head;
                p.model->with(head, true, [&](const auto* w) {
                    for (index_t i = 0; i < head.size(); ++i) torn += static_cast<float>(w[i]) != expected;
                });
                std::this_thread::yield();
            }
        });
    for (std::int32_t version = 1; version < last; ++version) {
        board.publish(name(version), marked(version));
        // not all before anybody has looked
        while (changes < version / 4) std::this_thread::yield();
    }
    board.publish(name(last), marked(last));
    for (auto& w : workers) w.join();
    CHECK(torn == 0);
    CHECK(changes >= last / 4 - 1);
    CHECK(board.get(name(last)).version == last);
    CHECK(board.get(name(last - 1)).version == last - 1); // for a worker that comes late
    CHECK_THROWS_WITH(board.get(name(last - 2)),
                      doctest::Contains("version 398 of job 408 was asked for, version 400 of job 410 is published"));
    board.publish(name(3), marked(3)); // of a learner that was thought dead
    CHECK(board.latest().version == last);
    CHECK_THROWS_WITH(board.publish(name(last + 1), marked(3)), doctest::Contains("no weights of version 401"));
    CHECK_THROWS_WITH(board.publish(name(last + 1), {}), doctest::Contains("no weights of version 401"));
}

namespace {

// The gradient with respect to the logits (N,V) of a stale batch at the weights `now`.
std::vector<float> gradient_of(const config& c, const row_batch& batch, const transformer<float>& now,
                               const transformer<float>& teacher, opd::diagnostics* seen = nullptr) {
    opd::cpu_backend backend{.threads = 2};
    teacher_cache cache;
    teacher_scorer(teacher, backend).score(batch, cache_for(c), cache);
    std::vector<float> z;
    teacher_scorer(now, backend).logits(batch.inputs, z);
    const auto r = objective(backend, c, batch, cache, z.data(), now.shape.vocabulary, 9);
    if (seen) *seen = r.diagnostics;
    return z;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double square = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        square += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
        norm += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(square / norm);
}

} // namespace

TEST_CASE("a model that has gone to NaN is neither learnt from nor judged") {
    const transformer<float> teacher = model_of(2), old = model_of(1);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    opd::cpu_backend backend{.threads = 1};
    for (const char* estimator : {"reverse_kl", "threshold", "mc"}) {
        CAPTURE(estimator);
        const config c = settings(estimator);
        const auto trajectories = drawn(c, old, 5, 4);
        const row_batch batch = pack(trajectories, draws_for(c).count);
        teacher_cache cache;
        teacher_scorer(teacher, backend).score(batch, cache_for(c), cache);
        std::vector<float> z;
        teacher_scorer(old, backend).logits(batch.inputs, z);
        auto lost = z;
        std::fill(lost.begin(), lost.end(), nan);
        CHECK(objective(backend, c, batch, cache, z.data(), old.shape.vocabulary, 9).diagnostics.bad_rows == 0);
        CHECK_THROWS_AS(objective(backend, c, batch, cache, lost.data(), old.shape.vocabulary, 9), opd::bad_contents);

        const std::vector<float> states(static_cast<std::size_t>(batch.rows * old.shape.width), .5f);
        const std::vector<float> nowhere(states.size(), nan);
        const auto judged = [&](const std::vector<float>& mine) {
            return mean_reverse_kl(backend, batch, old, mine, teacher, states, std::size_t(1) << 20);
        };
        CHECK(judged(states) > 0);
        CHECK_THROWS_AS(judged(nowhere), opd::bad_contents);
    }
}

TEST_CASE("threshold with every entry exact gives the dense gradient from stale sequences") {
    const transformer<float> teacher = model_of(2), old = model_of(1), now = moved(old, 0.3);
    const config dense = settings("reverse_kl");
    config c = settings("threshold");
    c.distill.budget = 15; // all of the vocabulary
    const auto trajectories = drawn(c, old, 5, 12);
    opd::diagnostics seen;
    row_batch batch = pack(trajectories, 15);
    const auto reference = gradient_of(dense, batch, now, teacher);
    CHECK(distance(gradient_of(c, batch, now, teacher, &seen), reference) < 1e-4);
    CHECK(seen.staleness[4] == seen.kept); // drawn by version 5, learnt from by 9
    CHECK(std::abs(seen.ratio_mean() - 1) < 0.05);
    // with the new policy's log-probs in place of the recorded log mu (no correction) it does not
    row_batch wrong = batch;
    opd::cpu_backend backend{.threads = 1};
    std::vector<float> z;
    teacher_scorer(now, backend).logits(batch.inputs, z);
    std::vector<std::int32_t> asked = batch.ids;
    for (auto& id : asked) id = std::max(id, 0);
    opd::token_logp(backend, opd::view(static_cast<const float*>(z.data()), batch.rows, 15),
                    opd::view(static_cast<const std::int32_t*>(asked.data()), batch.rows, 15),
                    opd::view(wrong.entry_log_mu.data(), batch.rows, 15), 1.0f);
    CHECK(distance(gradient_of(c, wrong, now, teacher), reference) > 0.05);
}

TEST_CASE("mc's mean gradient over many stale draws is the dense one; without the recorded log mu it is not") {
    const transformer<float> teacher = model_of(2), old = model_of(1), now = moved(old, 0.15);
    const config dense = settings("reverse_kl");
    config c = settings("mc");
    c.distill.m = 3000;
    const auto trajectories = drawn(c, old, 5, 3);
    const row_batch batch = pack(trajectories, c.distill.m);
    const auto reference = gradient_of(dense, batch, now, teacher);
    const double corrected = distance(gradient_of(c, batch, now, teacher), reference);
    CAPTURE(corrected);
    row_batch uncorrected = batch;
    opd::cpu_backend backend{.threads = 1};
    std::vector<float> z;
    teacher_scorer(now, backend).logits(batch.inputs, z);
    opd::token_logp(backend, opd::view(static_cast<const float*>(z.data()), batch.rows, 15),
                    opd::view(batch.ids.data(), batch.rows, c.distill.m),
                    opd::view(uncorrected.entry_log_mu.data(), batch.rows, c.distill.m), 1.0f);
    const double stale = distance(gradient_of(c, uncorrected, now, teacher), reference);
    CAPTURE(stale);
    CHECK(corrected < 0.1);
    CHECK(stale > 2 * corrected);
}
