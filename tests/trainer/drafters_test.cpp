// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// Learned drafters: the layer on the target's hidden states, its offsets and its gradients; their files and training;
// drafts through the rollout engine, which change no bit, whatever the weights are.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stop_token>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "app/app.hpp"
#include "model/row_kernels.hpp"
#include "opd/rng.hpp"
#include "opd/sched/archive.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/rollout_engine.hpp"
#include "settings/files.hpp"
#include "speculation/drafter_training.hpp"
#include "speculation/hidden_drafter.hpp"
#include "speculation/learned_drafter.hpp"
#include "speculation/spot_training.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;

template <class T>
std::vector<T> coefficients(index_t size, std::uint64_t seed = 2) {
    const opd::noise_row noise(seed, opd::noise_stream::mc, 0, 0);
    std::vector<T> r(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < r.size(); ++i)
        r[i] = static_cast<T>(opd::uniform_of_bits(noise.bits(0, static_cast<std::uint32_t>(i))) - 0.5);
    return r;
}

std::vector<std::int32_t> random_tokens(int vocabulary, int length, std::uint64_t seed) {
    const opd::noise_row noise(seed, opd::noise_stream::mc, 7, 0);
    std::vector<std::int32_t> r;
    for (int i = 0; i < length; ++i)
        r.push_back(static_cast<std::int32_t>(noise.bits(0, static_cast<std::uint32_t>(i)) %
                                              static_cast<std::uint32_t>(vocabulary)));
    return r;
}

model_shape target_shape() {
    return {.vocabulary = 7,
            .width = 6,
            .layers = 2,
            .heads = 2,
            .kv_heads = 1,
            .head_dim = 4,
            .ffn = 10,
            .max_length = 40};
}
model_shape own_shape(int layers = 1, bool fused = false) {
    const model_shape own{.layers = layers, .heads = 4, .kv_heads = 2, .head_dim = 2, .ffn = 8};
    return fused ? fused_drafter_shape(target_shape(), own) : hidden_drafter_shape(target_shape(), own);
}

template <class T>
transformer<T> jittered(const model_shape& shape, std::uint64_t seed) {
    transformer<T> m(shape);
    m.initialise(seed);
    const auto jitter = coefficients<T>(m.layout.size, seed + 50); // norms start at 1: a missing factor would not show
    for (std::size_t i = 0; i < m.weights.size(); ++i) m.weights[i] += T(0.2) * jitter[i];
    m.weights_changed();
    return m;
}

/// A target's rows over some sequences.
template <class T>
struct seen {
    std::vector<std::vector<std::int32_t>> tokens;
    std::vector<T> logits, hidden;
    std::vector<along<T>> runs; // of hidden states

    seen(const transformer<T>& target, opd::thread_team& threads, std::vector<std::vector<std::int32_t>> t,
         bool tapped = false)
        : tokens(std::move(t)) {
        target_rows(target, threads, std::span<const std::vector<std::int32_t>>(tokens), logits, hidden, tapped);
        std::size_t row = 0;
        const auto d = static_cast<std::size_t>((tapped ? 4 : 1) * target.shape.width);
        for (const auto& s : tokens) {
            runs.push_back({0, static_cast<index_t>(d), std::span<const T>(hidden).subspan(row * d, s.size() * d)});
            row += s.size();
        }
    }
};

// What a row may be made of.
template <class H, class X>
concept makes_inputs = requires(const transformer<float>& m, const H& h, const X& x, float* to) {
    drafter_pairs<float>(m, h, x, to);
};
static_assert(makes_inputs<run_of<0, float>, run_of<1, std::int32_t>>);
static_assert(!makes_inputs<run_of<0, float>, run_of<0, std::int32_t>>); // the shipped mistake
static_assert(!makes_inputs<run_of<1, float>, run_of<1, std::int32_t>>);
static_assert(!makes_inputs<run_of<0, float>, run_of<2, std::int32_t>>);
static_assert(!std::is_constructible_v<run_of<1, std::int32_t>, index_t, index_t, std::span<const std::int32_t>>);

} // namespace

TEST_CASE("a row pairs h[t] with the token after it, and says what comes after that token") {
    const auto target = jittered<double>(target_shape(), 3);
    auto drafter = jittered<double>(own_shape(), 4);
    // layers that add nothing: what leaves them is x0
    for (const tensor* t : {&drafter.layout.layers[0].wo, &drafter.layout.layers[0].wdown})
        std::fill_n(drafter.weights.data() + t->offset, t->size(), 0.0);
    drafter.weights_changed();
    opd::thread_team threads(2);
    const seen<double> s(target, threads, {random_tokens(7, 2, 1), random_tokens(7, 9, 2), random_tokens(7, 5, 3)});
    hidden_training<double> training(drafter, target, threads);
    const index_t rows = training.set_sequences(s.runs, s.tokens);
    CHECK(rows == 1 + 8 + 4);
    std::vector<double> logits(static_cast<std::size_t>(rows * 7));
    training.forward(logits.data());
    const index_t d = 6;
    double worst = 0;
    for (std::size_t q = 0; q < s.tokens.size(); ++q)
        for (index_t t = 0; t + 1 < static_cast<index_t>(s.tokens[q].size()); ++t) {
            const double* h = s.runs[q].values.data() + t * d;
            const double* e = target.at(target.layout.embedding) + s.tokens[q][static_cast<std::size_t>(t + 1)] * d;
            std::vector<double> y(6, 0), n(6);
            for (index_t i = 0; i < d; ++i)
                for (index_t j = 0; j < d; ++j)
                    y[static_cast<std::size_t>(j)] += h[i] * drafter.at(drafter.layout.embedding)[i * d + j] +
                                                      e[i] * drafter.at(drafter.layout.embedding)[(d + i) * d + j];
            rms_norm(y.data(), target.at(target.layout.norm_f), d, target.shape.norm_epsilon, n.data());
            for (index_t v = 0; v < 7; ++v)
                worst =
                    std::max(worst, std::abs(dot(target.at(target.layout.head) + v * d, n.data(), d) -
                                             logits[static_cast<std::size_t>((training.first_row(q) + t) * 7 + v)]));
        }
    CHECK(worst < 1e-12);
    // the target's own: the head of h[t] says what comes after position t, so row t of the drafter is compared with row
    // t + 1
    for (index_t v = 0; v < 7; ++v)
        CHECK(dot(target.at(target.layout.head) + v * d, around<1>(s.runs[1], 3, 1).row(0), d) ==
              doctest::Approx(s.logits[static_cast<std::size_t>((2 + 4) * 7 + v)]));
}

TEST_CASE("what lies around a position") {
    const std::vector<int> x = {10, 11, 12, 13};
    const along<int> from5{5, 1, x}; // positions 5 to 8
    const auto next = around<1>(from5, 4, 4);
    CHECK(next.base() == 4);
    CHECK(*next.row(0) == 10);
    CHECK(*next.row(3) == 13);
    CHECK(*around<0>(from5, 6, 2).row(1) == 12);
    CHECK_THROWS_WITH(around<1>(from5, 5, 4), doctest::Contains("positions 6 to 10 of 5 to 9"));
    CHECK_THROWS_AS(around<0>(from5, 4, 1), std::invalid_argument);
    CHECK_THROWS_AS(around<-1>(from5, 5, 1), std::invalid_argument);
    const auto target = jittered<double>(target_shape(), 3);
    opd::thread_team threads(1);
    const seen<double> s(target, threads, {random_tokens(7, 6, 1)});
    const along<std::int32_t> tokens{0, 1, s.tokens[0]};
    std::vector<double> pairs(100), x0(100);
    const auto h = around<0>(s.runs[0], 1, 2);
    CHECK_NOTHROW(drafter_pairs(target, h, around<1>(tokens, 1, 2), pairs.data()));
    CHECK_THROWS_AS(drafter_pairs(target, h, around<1>(tokens, 2, 2), pairs.data()), std::invalid_argument);
    CHECK_THROWS_AS(drafter_pairs(target, h, around<1>(tokens, 1, 3), pairs.data()), std::invalid_argument);
    CHECK_THROWS_AS(drafter_inputs(target, static_cast<const double*>(pairs.data()), 2, x0.data()),
                    std::invalid_argument);
}

TEST_CASE("the gradient of every weight of the layer equals central differences") {
    for (const int layers : {1, 2}) {
        const auto target = jittered<double>(target_shape(), 3);
        auto drafter = jittered<double>(own_shape(layers), 4);
        opd::thread_team threads(2);
        const seen<double> s(target, threads,
                             {random_tokens(7, 2, 1), random_tokens(7, 27, 2), random_tokens(7, 14, 3)});
        const auto a = coefficients<double>((1 + 26 + 13) * 7), b = coefficients<double>((1 + 26 + 13) * 6, 8);
        const auto loss = [&] {
            hidden_training<double> training(drafter, target, threads);
            training.set_sequences(s.runs, s.tokens);
            std::vector<double> logits(a.size());
            training.forward(logits.data());
            double sum = 0;
            for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * logits[i];
            for (std::size_t i = 0; i < b.size(); ++i) sum += b[i] * training.predicted()[i];
            return sum;
        };
        hidden_training<double> training(drafter, target, threads);
        REQUIRE(training.set_sequences(s.runs, s.tokens) * 7 == static_cast<index_t>(a.size()));
        std::vector<double> logits(a.size()), grad;
        training.forward(logits.data());
        training.backward(a.data(), b.data(), grad);
        double worst = 0;
        const auto check = [&](const tensor& t) {
            for (index_t i = 0; i < t.size(); ++i) {
                double& w = drafter.weights[static_cast<std::size_t>(t.offset + i)];
                const double before = w, step = 1e-5;
                w = before + step;
                drafter.weights_changed();
                const double up = loss();
                w = before - step;
                drafter.weights_changed();
                const double down = loss();
                w = before;
                drafter.weights_changed();
                const double expected = (up - down) / (2 * step), got = grad[static_cast<std::size_t>(t.offset + i)];
                worst = std::max(worst, std::abs(got - expected) / (1e-3 + std::abs(expected)));
            }
        };
        check(drafter.layout.embedding);
        for (const auto& l : drafter.layout.layers)
            for (const tensor* t : {&l.norm1, &l.wqkv, &l.q_norm, &l.k_norm, &l.wo, &l.norm2, &l.wgu, &l.wdown})
                check(*t);
        CHECK(worst < 1e-5);
        for (index_t i = 0; i < drafter.layout.norm_f.size(); ++i) // the target's is used instead
            CHECK(grad[static_cast<std::size_t>(drafter.layout.norm_f.offset + i)] == 0);
    }
}

namespace {

/// A training-time test whose loss is linear in every step's logits and expectations. Sequences of 2, 3, 9 and 14
/// tokens: two are over before the last step.
template <class T>
struct linear_test {
    const transformer<T>& target;
    const transformer<T>& drafter;
    opd::thread_team& threads;
    index_t steps;
    seen<T> s;
    std::vector<std::vector<T>> a, b, logits; // by step
    std::vector<T> grad;

    linear_test(const transformer<T>& t, const transformer<T>& d, opd::thread_team& team, index_t n)
        : target(t), drafter(d), threads(team), steps(n),
          s(t, team, {random_tokens(7, 2, 1), random_tokens(7, 3, 4), random_tokens(7, 9, 2), random_tokens(7, 14, 3)},
            is_fused(d.shape)),
          logits(static_cast<std::size_t>(n)) {
        for (index_t j = 0; j < n; ++j) {
            index_t rows = 0;
            for (const auto& x : s.tokens) rows += std::max<index_t>(0, std::ssize(x) - 1 - j);
            a.push_back(coefficients<T>(rows * 7, 20 + static_cast<std::uint64_t>(j)));
            b.push_back(coefficients<T>(rows * 6, 40 + static_cast<std::uint64_t>(j)));
        }
    }

    /// The loss; and, if it is wanted, its gradient, in which h^ is a constant or not (through).
    T run(bool wanted, bool through) {
        hidden_training<T> training(drafter, target, threads);
        training.set_sequences(s.runs, s.tokens, steps, through);
        T loss = 0;
        for (index_t j = 0; j < steps; ++j) {
            auto& z = logits[static_cast<std::size_t>(j)];
            const auto &of_z = a[static_cast<std::size_t>(j)], &of_h = b[static_cast<std::size_t>(j)];
            REQUIRE(training.rows(j) * 7 == std::ssize(of_z));
            z.resize(of_z.size());
            training.forward(j, z.data());
            for (std::size_t i = 0; i < z.size(); ++i) loss += of_z[i] * z[i];
            for (std::size_t i = 0; i < of_h.size(); ++i) loss += of_h[i] * training.predicted(j)[i];
        }
        if (!wanted) return loss;
        for (index_t j = steps - 1; j >= 0; --j)
            training.backward(j, a[static_cast<std::size_t>(j)].data(), b[static_cast<std::size_t>(j)].data());
        training.gradient(grad);
        return loss;
    }
};

} // namespace

TEST_CASE("the gradient of a training-time test equals central differences") {
    for (const bool fused : {false, true})
        for (const int layers : {1, 2}) {
            const auto target = jittered<double>(target_shape(), 3);
            auto drafter = jittered<double>(own_shape(layers, fused), 4);
            opd::thread_team threads(2);
            linear_test<double> test(target, drafter, threads, layers == 1 ? 7 : 3);
            test.run(true, true);
            const std::vector<double> grad = test.grad;
            double worst = 0, largest = 0;
            const auto check = [&](const tensor& t, index_t apart) {
                for (index_t i = 0; i < t.size(); i += apart) {
                    double& w = drafter.weights[static_cast<std::size_t>(t.offset + i)];
                    const double before = w, step = 1e-5;
                    const auto at = [&](double x) {
                        w = x;
                        drafter.weights_changed();
                        return test.run(false, true);
                    };
                    const double expected = (at(before + step) - at(before - step)) / (2 * step),
                                 got = grad[static_cast<std::size_t>(t.offset + i)];
                    at(before);
                    largest = std::max(largest, std::abs(expected));
                    worst = std::max(worst, std::abs(got - expected) / (1e-3 + std::abs(expected)));
                }
            };
            check(drafter.layout.embedding, 5); // E, and F
            for (const auto& l : drafter.layout.layers)
                for (const tensor* t : {&l.norm1, &l.wqkv, &l.q_norm, &l.k_norm, &l.wo, &l.norm2, &l.wgu, &l.wdown})
                    check(*t, t->columns == 1 ? 1 : 7);
            CHECK(largest > 1);
            CHECK(worst < 1e-5);
        }
}

TEST_CASE("the number of threads changes no bit of a drafter's training") {
    for (const bool fused : {false, true})
        for (const index_t steps : {1, 3}) {
            const auto target = jittered<float>(target_shape(), 3), drafter = jittered<float>(own_shape(1, fused), 4);
            std::vector<std::vector<float>> logits[2];
            std::vector<float> grad[2];
            for (const int n : {1, 3}) {
                opd::thread_team threads(n);
                linear_test<float> test(target, drafter, threads, steps);
                test.run(true, fused);
                logits[n == 3] = test.logits, grad[n == 3] = test.grad;
            }
            CHECK(logits[0] == logits[1]);
            CHECK(grad[0] == grad[1]);
        }
}

TEST_CASE("what a step expects is a constant to the next one, unless the gradient goes through it") {
    // with a last step that alone counts, what differs is what goes into the rows of the step before
    const auto target = jittered<double>(target_shape(), 3), drafter = jittered<double>(own_shape(), 4);
    opd::thread_team threads(1);
    linear_test<double> test(target, drafter, threads, 2);
    test.run(true, true);
    const std::vector<double> whole = test.grad;
    test.run(true, false);
    const std::vector<double> constant = test.grad;
    // by hand: the gradient of the second step's h, row by row, as one of what the first expects
    hidden_training<double> training(drafter, target, threads);
    training.set_sequences(test.s.runs, test.s.tokens, 2, true);
    for (index_t j = 0; j < 2; ++j) training.forward(j, test.logits[static_cast<std::size_t>(j)].data());
    training.backward(1, test.a[1].data(), test.b[1].data());
    std::vector<double> more = test.b[0];
    std::size_t row = 0, next = 0;
    for (const auto& x : test.s.tokens) {
        const std::size_t n = x.size() - 1;
        for (std::size_t r = 0; r + 1 < n; ++r, ++next)
            for (std::size_t i = 0; i < 6; ++i) more[(row + r) * 6 + i] += training.d_states()[next * 6 + i];
        row += n;
    }
    hidden_training<double> apart(drafter, target, threads);
    apart.set_sequences(test.s.runs, test.s.tokens, 2, false);
    for (index_t j = 0; j < 2; ++j) apart.forward(j, test.logits[static_cast<std::size_t>(j)].data());
    apart.backward(1, test.a[1].data(), test.b[1].data());
    apart.backward(0, test.a[0].data(), more.data());
    std::vector<double> sum;
    apart.gradient(sum);
    double worst = 0, differ = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
        worst = std::max(worst, std::abs(sum[i] - whole[i]));
        differ = std::max(differ, std::abs(constant[i] - whole[i]));
    }
    CHECK(worst < 1e-12);
    CHECK(differ > 1e-2);
}

// --- drafts ---------------------------------------------------------------------------------------------------------

namespace {

using opd::test::small_task;

using opd::test::small_weights;

draft_model fresh(drafter_kind kind, std::uint64_t seed) {
    const model_shape target = opd::test::small_shape();
    const model_shape own{.vocabulary = target.vocabulary,
                          .width = 16,
                          .layers = kind == drafter_kind::model ? 2 : 1,
                          .heads = 2,
                          .kv_heads = 1,
                          .head_dim = 8,
                          .ffn = 24,
                          .max_length = target.max_length};
    draft_model d(kind, target,
                  kind == drafter_kind::hidden   ? hidden_drafter_shape(target, own)
                  : kind == drafter_kind::eagle3 ? fused_drafter_shape(target, own)
                                                 : own);
    d.weights.initialise(seed);
    return d;
}

sampling options(double temperature) { return opd::test::small_sampling({draw_plan::kind::iid, 2}, temperature); }

request prompt_of(std::uint64_t sample) { return opd::test::small_prompt(sample); }

/// A layer of the same weights that is given what stands for h.
draft_model without_fusion(const draft_model& fused) {
    const model_shape& s = fused.weights.shape;
    draft_model d(drafter_kind::hidden, fused.target, hidden_drafter_shape(fused.target, s));
    const auto copy = [&](const tensor& from, const tensor& to) {
        std::copy_n(fused.weights.at(from), to.size(), d.weights.weights.data() + to.offset);
    };
    const model_layout &a = fused.weights.layout, &b = d.weights.layout;
    copy(a.embedding, b.embedding);
    for (std::size_t l = 0; l < a.layers.size(); ++l) {
        const layer_tensors &x = a.layers[l], &y = b.layers[l];
        copy(x.norm1, y.norm1), copy(x.wqkv, y.wqkv), copy(x.q_norm, y.q_norm), copy(x.k_norm, y.k_norm);
        copy(x.wo, y.wo), copy(x.norm2, y.norm2), copy(x.wgu, y.wgu), copy(x.wdown, y.wdown);
    }
    d.weights.weights_changed();
    return d;
}

/// The drafter's logits after a sequence and some drafts, all of it in one causal pass, without a training-time test.
std::vector<float> logits_after(const draft_model& given, const transformer<float>& target,
                                const std::vector<token>& sequence, const std::vector<token>& drafts) {
    opd::thread_team threads(1);
    std::vector<token> all = sequence;
    const index_t v = target.shape.vocabulary, w = target.shape.width;
    std::vector<float> z, hidden;
    const bool fused = given.kind == drafter_kind::eagle3;
    const draft_model d = fused ? without_fusion(given) : given;
    if (d.kind == drafter_kind::model) {
        all.insert(all.end(), drafts.begin(), drafts.end());
        target_rows(d.weights, threads, std::span(&all, 1), z, hidden);
        return {z.end() - v, z.end()};
    }
    // the target's own hidden states of all tokens but the last, then what the drafter expected, one after the other
    std::vector<token> before(all.begin(), all.end() - 1);
    target_rows(target, threads, std::span(&before, 1), z, hidden, fused);
    if (fused) {
        std::vector<float> states(before.size() * static_cast<std::size_t>(w));
        drafter_states(given.weights, static_cast<const float*>(hidden.data()), std::ssize(before), states.data());
        hidden = std::move(states);
    }
    for (std::size_t i = 0;; ++i) {
        std::vector<token> tokens = all;
        tokens.resize(all.size(), 0);
        hidden_training<float> pass(d.weights, target, threads);
        // a sequence of n hidden states and n + 1 tokens: the state after the last token is not read
        std::vector<float> padded = hidden;
        padded.resize(padded.size() + static_cast<std::size_t>(w));
        const along<float> run{0, w, padded};
        const index_t rows = pass.set_sequences(std::span(&run, 1), std::span(&tokens, 1));
        z.resize(static_cast<std::size_t>(rows * v));
        pass.forward(z.data());
        if (i == drafts.size()) return {z.end() - v, z.end()};
        hidden.insert(hidden.end(), pass.predicted() + (rows - 1) * w, pass.predicted() + rows * w);
        all.push_back(drafts[i]);
    }
}

} // namespace

TEST_CASE("what is drafted is what whole passes say, along every branch") {
    const policy target = small_weights(1, 3);
    opd::spec::follow_rates rates;
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model, drafter_kind::eagle3})
        for (const std::int32_t children : {1, 2, 3}) {
            const auto d = std::make_shared<const draft_model>(fresh(kind, 9));
            learned_drafter drafter(d, 0);
            // two sequences at once, told in pieces
            std::vector<trajectory> sequences;
            for (const int length : {11, 24}) {
                trajectory t;
                t.sample = static_cast<std::uint64_t>(length);
                t.tokens = random_tokens(15, length, static_cast<std::uint64_t>(length));
                t.prompt_length = 5;
                sequences.push_back(t);
            }
            for (index_t lane = 0; lane < 2; ++lane) drafter.begin(lane, sequences[static_cast<std::size_t>(lane)]);
            opd::thread_team threads(1);
            const auto tell = [&](index_t lane, index_t first, index_t rows) {
                const auto& all = sequences[static_cast<std::size_t>(lane)].tokens;
                std::vector<token> before(all.begin(), all.begin() + first + rows);
                std::vector<float> z, hidden;
                target_rows(*target.model, threads, std::span(&before, 1), z, hidden, drafter.reads_layers());
                const lane_news n{
                    lane,
                    first,
                    rows,
                    {},
                    std::span<const float>(hidden).subspan(static_cast<std::size_t>(first * d->features()))};
                drafter.hear(std::span(&n, 1), target);
            };
            std::vector<opd::spec::draft_builder> trees(2);
            const auto propose = [&] {
                std::vector<draft_wish> wishes;
                for (index_t lane = 0; lane < 2; ++lane) {
                    const auto& s = sequences[static_cast<std::size_t>(lane)];
                    trees[static_cast<std::size_t>(lane)].begin(rates);
                    wishes.push_back(
                        {lane,
                         &s,
                         {.seed = 5, .sample = s.sample, .position = static_cast<std::uint32_t>(s.tokens.size())},
                         4,
                         children,
                         &trees[static_cast<std::size_t>(lane)]});
                }
                drafter.propose(wishes);
                for (std::size_t lane = 0; lane < 2; ++lane) {
                    const draft_wish& w = wishes[lane];
                    opd::spec::draft_builder want;
                    want.begin(rates);
                    const auto path = [&](index_t n) {
                        std::vector<token> p;
                        for (; n >= 0; n = want.parent(n)) p.insert(p.begin(), want.token(n));
                        return p;
                    };
                    const auto grow = [&](index_t n) {
                        const auto z = logits_after(*d, *target.model, sequences[lane].tokens, path(n));
                        want.grow(n, opd::view(z.data(), index_t(z.size())), w.law, children);
                    };
                    grow(-1);
                    for (std::int32_t depth = 1; depth < w.depth; ++depth) {
                        std::vector<index_t> best(static_cast<std::size_t>(children));
                        best.resize(static_cast<std::size_t>(want.best_of_depth(depth, best)));
                        for (const index_t n : best) grow(n);
                    }
                    REQUIRE(trees[lane].size() == want.size());
                    CHECK(want.size() == children + 3 * children * children);
                    for (index_t n = 0; n < want.size(); ++n) {
                        CHECK(trees[lane].parent(n) == want.parent(n));
                        CHECK(trees[lane].token(n) == want.token(n));
                        CHECK(trees[lane].reach(n) == want.reach(n));
                    }
                }
            };
            tell(0, 0, 7), tell(0, 7, 3), tell(1, 0, 23);
            propose();
            propose(); // nothing new: the same again
            // the target read what it had drawn, and one token more
            for (auto& s : sequences) s.tokens.push_back(static_cast<token>(s.sample % 15)), s.tokens.push_back(3);
            tell(0, 10, 2), tell(1, 23, 2);
            propose();
            drafter.install(std::make_shared<const draft_model>(*d)); // the cache is rebuilt
            propose();
            if (kind == drafter_kind::model) continue;
            tell(0, 0, 12), tell(1, 0, 24); // as after new weights; not all is read yet
            std::vector<draft_wish> wishes;
            trees[1].begin(rates);
            wishes.push_back({1, &sequences[1], {.seed = 5, .sample = 24, .position = 26}, 4, children, &trees[1]});
            drafter.propose(wishes);
            CHECK(trees[1].size() == 0);
            CHECK_THROWS_AS(tell(0, 13, 1), std::logic_error);
        }
}

TEST_CASE("a step of the training-time test has the bits of drafting at that depth, from every position") {
    const policy target = small_weights(1, 3);
    opd::thread_team threads(2);
    constexpr index_t steps = 7;
    const std::vector<std::vector<token>> texts = {random_tokens(15, 13, 1), random_tokens(15, 4, 2)};
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::eagle3}) {
        const draft_model d = fresh(kind, 9);
        const index_t width = d.features();
        std::vector<float> z, hidden;
        target_rows(*target.model, threads, std::span(texts), z, hidden, width > 24);
        std::vector<along<float>> runs;
        std::size_t at = 0;
        for (const auto& t : texts) {
            const std::size_t size = t.size() * static_cast<std::size_t>(width);
            runs.push_back({0, width, std::span<const float>(hidden).subspan(at, size)});
            at += size;
        }
        hidden_training<float> training(d.weights, *target.model, threads);
        training.set_sequences(runs, texts, steps);
        int compared = 0;
        for (index_t step = 0; step < steps; ++step) {
            z.resize(static_cast<std::size_t>(training.rows(step) * 15));
            training.forward(step, z.data());
            auto row = z.begin();
            for (const auto& t : texts)
                for (index_t p = step; p + 1 < std::ssize(t); ++p, row += 15, ++compared) {
                    const auto anchor = t.begin() + (p - step) + 2; // a sequence that ends here, then drafts
                    CHECK(std::vector<float>(row, row + 15) ==
                          logits_after(d, *target.model, {t.begin(), anchor}, {anchor, anchor + step}));
                }
            CHECK(row == z.end());
        }
        CHECK(compared == 12 + 11 + 10 + 9 + 8 + 7 + 6 + 3 + 2 + 1);
    }
}

TEST_CASE("drafts of any weights change no bit of what rollout draws and records") {
    const policy first = small_weights(1, 7), second = small_weights(2, 8);
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model, drafter_kind::eagle3})
        for (const double temperature : {0.0, 0.7, 1.0}) {
            const auto d = std::make_shared<const draft_model>(fresh(kind, 11));
            std::vector<request> prompts;
            for (std::uint64_t i = 0; i < 20; ++i) prompts.push_back(prompt_of(700 + i));
            std::uint32_t seed = 0;
            for (const opd::spec::strategy strategy : {opd::spec::strategy{5, 1, 5}, opd::spec::strategy{3, 3, 8}})
                for (const bool changed : {false, true}) {
                    const auto run = [&](bool drafts, speculation_counts& counts) {
                        sampling o = options(temperature);
                        o.speculate.what = drafts ? speculation_options::kind::ngram : speculation_options::kind::off;
                        o.speculate.fixed = strategy;
                        const auto make = [&](const policy& p) {
                            auto e = std::make_unique<rollout_engine>(p, o, 3, small_task().max_length());
                            if (drafts) {
                                drafters one;
                                one.push_back(std::make_unique<learned_drafter>(d));
                                e->draft_with(std::move(one), o.speculate);
                            }
                            return e;
                        };
                        auto engine = make(first);
                        std::mt19937 random(drafts ? seed : 0);
                        std::map<std::uint64_t, trajectory> got;
                        std::vector<trajectory> waiting;
                        for (const request& p : prompts) waiting.push_back(begin_response(p));
                        std::vector<lane_trajectory> done;
                        while (!waiting.empty() || engine->running() > 0) {
                            for (index_t lane = 0; lane < 3 && !waiting.empty(); ++lane)
                                if (!engine->busy(lane))
                                    engine->start(lane, std::move(waiting.back())), waiting.pop_back();
                            if (drafts && random() % 6 == 0 &&
                                engine->running() > 0) { // one is taken out, to go on later
                                const auto all = engine->partials();
                                engine->abort(all.front().lane);
                                waiting.insert(waiting.begin(), all.front().sequence);
                            }
                            if (drafts && random() % 6 == 0) { // written and read
                                opd::sched::archive_writer out;
                                out(*engine);
                                auto other = make(first);
                                opd::sched::archive_reader in(out.bytes);
                                in(*other);
                                CHECK(in.done());
                                engine = std::move(other);
                            }
                            engine->step(done);
                            for (auto& x : done) got[x.sequence.sample] = std::move(x.sequence);
                            done.clear();
                        }
                        if (changed) { // new weights while all are in mid-sequence
                            for (index_t lane = 0; lane < 3; ++lane)
                                engine->start(lane, begin_response(prompt_of(900 + std::uint64_t(lane))));
                            const auto tokens = [&] {
                                std::size_t n = 1000;
                                for (const auto& p : engine->partials()) n = std::min(n, p.sequence.response().size());
                                return n;
                            };
                            while (engine->running() == 3 && tokens() < 4) engine->step(done);
                            engine->install(second);
                            while (engine->running() > 0) engine->step(done);
                            for (auto& x : done) got[x.sequence.sample] = std::move(x.sequence);
                        }
                        counts = engine->counts();
                        return got;
                    };
                    ++seed;
                    speculation_counts plain, drafted;
                    const auto want = run(false, plain), got = run(true, drafted);
                    for (const auto& [sample, t] : got) {
                        if (sample < 900) {
                            CHECK(t == want.at(sample));
                            continue;
                        }
                        // where the weights changed depends on how many tokens a step brings; each is that of its
                        // version's weights
                        sampling o = options(temperature);
                        rollout_engine again(first, o, 1, small_task().max_length());
                        again.start(0, prompt_of(sample));
                        std::vector<lane_trajectory> done;
                        const auto old = std::size_t(std::count(t.versions.begin(), t.versions.end(), 7));
                        while (again.running() > 0 && again.drawn(0).response().size() < old) again.step(done);
                        again.install(second);
                        while (again.running() > 0) again.step(done);
                        CHECK(done.at(0).sequence == t);
                    }
                    CHECK(got.size() == want.size());
                    CHECK(drafted.verified > 100);
                }
        }
}

// --- while the student learns ----------------------------------------------------------------------------------------

namespace {

/// Finished responses of an engine that drafts with fresh weights, and what it recorded of them; the target changes on
/// the way.
std::vector<recorded_response> recorded(drafter_kind kind, std::vector<policy> targets, int memory,
                                        std::map<std::uint64_t, trajectory>* got = nullptr, bool adapts = false) {
    std::vector<recorded_response> r;
    sampling o = opd::test::small_sampling(opd::test::draw_plans[0], 1);
    o.kv_tokens = memory;
    o.speculate.what = speculation_options::kind::learned, o.speculate.fixed = {3, 1, 3};
    o.speculate.learned = std::make_shared<const draft_model>(fresh(kind, 11));
    rollout_engine engine(targets[0], o, 3, small_task().max_length());
    engine.record_with(std::make_shared<response_recorder>([&](recorded_response x) { r.push_back(std::move(x)); }));
    std::uint64_t next = 0;
    std::vector<lane_trajectory> done;
    std::mt19937 random(3);
    for (int step = 0; next < 24 || engine.running() > 0; ++step) {
        for (index_t lane = 0; lane < 3; ++lane)
            if (!engine.busy(lane) && next < 24) engine.start(lane, prompt_of(700 + next++));
        if (step % 23 == 11 && engine.running() > 0) { // one is taken out, and goes on at once
            const auto all = engine.partials();
            engine.abort(all.front().lane);
            engine.start(all.front().lane, all.front().sequence);
        }
        if (targets.size() > 1 && step == 20) engine.install(targets[1]);
        if (adapts) engine.adapt(std::make_shared<const draft_model>(fresh(kind, random())));
        engine.step(done);
        for (const auto& d : done)
            if (got) (*got)[d.sequence.sample] = d.sequence;
        done.clear();
    }
    return r;
}

recorded_response response_of(std::uint64_t sample, std::int32_t version, int tokens, index_t width) {
    return {sample, version, random_tokens(15, tokens, sample), 2,
            coefficients<float>((tokens - 1) * width, sample + 1)};
}

} // namespace

TEST_CASE("what is recorded of a response is what the target's head reads of it, bit for bit") {
    const std::vector<policy> targets = {small_weights(1, 7), small_weights(2, 8)};
    opd::thread_team one(1);
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model, drafter_kind::eagle3})
        for (const int memory : {0, 96}) {
            std::map<std::uint64_t, trajectory> got;
            const auto all = recorded(kind, targets, memory, &got);
            REQUIRE(all.size() == 24);
            std::array<int, 2> of{};
            for (const recorded_response& r : all) {
                CHECK(r.tokens == got.at(r.sample).tokens);
                CHECK(r.prompt_length == got.at(r.sample).prompt_length);
                REQUIRE((r.version == 7 || r.version == 8));
                ++of[static_cast<std::size_t>(r.version - 7)];
                const std::vector<token> inputs(r.tokens.begin(), r.tokens.end() - 1);
                std::vector<float> logits, hidden;
                target_rows(*targets[static_cast<std::size_t>(r.version - 7)].model, one, std::span(&inputs, 1), logits,
                            hidden, kind == drafter_kind::eagle3);
                CHECK(hidden == r.hidden);
            }
            CHECK(of[0] > 2);
            CHECK(of[1] > 2);
            // and what is learnt from it has the bits of what is learnt from the target itself
            draft_model d = fresh(kind, 4);
            config c;
            opd::cpu_backend backend{.threads = 1};
            drafter_trainer train(c, *targets[1].model, d, backend);
            std::vector<drafter_text> known, asked;
            for (const recorded_response& r : all)
                if (r.version == 8) {
                    known.push_back({r.tokens, static_cast<std::size_t>(r.prompt_length), r.hidden});
                    asked.push_back({r.tokens, static_cast<std::size_t>(r.prompt_length)});
                }
            std::vector<float> a, b;
            const drafter_step x = train.gradient(known, 5, a), y = train.gradient(asked, 5, b);
            CHECK(a == b);
            CHECK(x.loss == y.loss);
            CHECK(x.acceptance == y.acceptance);
            CHECK(x.rows > 100);
            // whenever it is given up, there is the whole gradient or none, and the next one is as ever
            int stopped = 0;
            for (int microseconds = 0; microseconds < 4000; microseconds += 250) {
                std::stop_source stop;
                std::jthread other([&] {
                    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
                    stop.request_stop();
                });
                if (microseconds == 0) other.join();
                std::vector<float> part;
                const drafter_step some = train.gradient(known, 5, part, stop.get_token());
                stopped += some.stopped;
                CHECK((some.stopped || part == a));
            }
            CHECK(stopped > 0);
            CHECK(train.gradient(known, 5, b).loss == x.loss);
            CHECK(a == b);
        }
}

TEST_CASE("whatever drafter an engine is given between two steps, it draws and records the same") {
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model, drafter_kind::eagle3}) {
        std::map<std::uint64_t, trajectory> plain, adapted;
        recorded(kind, {small_weights(1, 7)}, 0, &plain);
        recorded(kind, {small_weights(1, 7)}, 0, &adapted, true);
        CHECK(plain == adapted);
    }
}

TEST_CASE("a spot trainer: slices are applied whole, when they are over or not at all, and its state is all of it") {
    config c;
    c.student_model = opd::test::small_shape();
    c.schedule.driver = "virtual";
    c.speculation.kind = "learned", c.speculation.adapt = true;
    c.speculation.adapt_rows = 40, c.speculation.adapt_slices = 6, c.drafter.warmup = 0;
    const policy target = small_weights(1, 3);
    const auto first = std::make_shared<const draft_model>(fresh(drafter_kind::hidden, 11));
    const auto make = [&] { return std::make_unique<spot_trainer>(c, first, 3); };
    auto spot = make();
    CHECK_FALSE(spot->slice(0, target, {})); // nothing to learn from
    CHECK_THROWS_AS(spot->slice(3, target, {}), std::invalid_argument);
    CHECK_THROWS_AS(spot->record(response_of(1, 3, 20, 23)), std::logic_error);
    const index_t width = target.model->shape.width;
    for (std::uint64_t i = 0; i < 6; ++i) spot->record(response_of(i, 2 + static_cast<int>(i % 2), 20, width));
    CHECK(spot->counts().recorded == 6);
    CHECK_NOTHROW(spot->record(response_of(5, 3, 20, width))); // finished again, by whom took it over
    spot->record(response_of(7, 1, 60, width));                // of weights that are too old
    // a slice changes nothing until it is over
    CHECK(spot->slice(0, target, {})->rows == 38); // two responses: what --adapt-rows has room for
    CHECK(spot->newest().updates == 0);
    CHECK(spot->newest().model == first);
    spot->settle(1); // another one's
    CHECK(spot->newest().updates == 0);
    spot->settle(0);
    CHECK(spot->newest().updates == 1);
    CHECK(spot->newest().trained_on == 3);
    CHECK(spot->newest().model->weights.weights != first->weights.weights);
    spot->settle(0);
    CHECK(spot->newest().updates == 1);
    CHECK(spot->taken(1).updates == 1); // none was taken yet
    CHECK(spot->take(1).updates == 1);
    // what is stopped is not there at all
    std::stop_source stop;
    CHECK(spot->held_seconds() == 0);
    stop.request_stop();
    CHECK(spot->slice(0, target, stop.get_token())->rows == 0);
    CHECK(spot->held_seconds() > 0);
    CHECK(spot->take(0).updates == 1);
    CHECK(spot->counts().stopped == 1);
    // two at once: each is applied to what the other left
    CHECK(spot->slice(0, target, {}));
    CHECK(spot->slice(2, target, {}));
    // what was written and read goes on as it would have, to the last bit
    auto copy = make();
    copy->restore(spot->state());
    CHECK(copy->state() == spot->state());
    CHECK(copy->taken(1).updates == 1);
    CHECK(copy->taken(1).model->weights.weights == spot->taken(1).model->weights.weights);
    for (spot_trainer* t : {spot.get(), copy.get()}) {
        t->settle(2);
        CHECK(t->slice(1, target, {}));
        CHECK(t->take(0).updates == 3);
        CHECK(t->slice(2, target, {}));
        CHECK_FALSE(t->slice(2, target, {})); // six of this version were begun
        CHECK(t->slice(2, {target.model, 4}, {}));
    }
    CHECK(copy->state() == spot->state());
    CHECK(spot->counts().updates == 4); // the last two are not over
    const std::string bytes = spot->state();
    for (std::size_t n = 0; n < bytes.size(); n += 97)
        CHECK_THROWS_AS(make()->restore(std::string_view(bytes).substr(0, n)), opd::error);
    CHECK_THROWS_AS(make()->restore(bytes + "x"), opd::invalid_input);
    CHECK_THROWS_WITH(spot_trainer(c, first, 2).restore(bytes), doctest::Contains("another drafter"));
}

TEST_CASE("on threads no more slices at a time than the learner leaves cores for") {
    config c;
    c.student_model = opd::test::small_shape();
    c.speculation.kind = "learned", c.speculation.adapt = true;
    c.speculation.adapt_rows = 400, c.speculation.adapt_slices = 0;
    const policy target = small_weights(1, 3);
    const auto first = std::make_shared<const draft_model>(fresh(drafter_kind::hidden, 11));
    // whether the second of two workers is ever sent away
    const auto refused = [&](int threads, int of_the_learner) {
        c.run.threads = threads, c.schedule.learner_threads = of_the_learner;
        spot_trainer spot(c, first, 2);
        for (std::uint64_t i = 0; i < 20; ++i) spot.record(response_of(i, 3, 20, first->features()));
        std::jthread other([&](std::stop_token stop) {
            while (!stop.stop_requested()) spot.slice(0, target, {});
        });
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(threads == 2 ? 20 : 1);
        while (std::chrono::steady_clock::now() < end)
            if (!spot.slice(1, target, {})) return true;
        return false;
    };
    CHECK(refused(2, 1));
    CHECK(refused(2, 0)); // which has both
    CHECK_FALSE(refused(3, 1));
}

TEST_CASE("packed sequences: each has the bits that it has alone, and padding would change none of them") {
    const auto target = jittered<double>(target_shape(), 3);
    const auto drafter = jittered<double>(own_shape(2), 4);
    opd::thread_team threads(2);
    const std::vector<std::vector<std::int32_t>> texts = {random_tokens(7, 3, 1), random_tokens(7, 17, 2),
                                                          random_tokens(7, 9, 3), random_tokens(7, 2, 4)};
    struct pass {
        std::vector<double> logits, gradient;
    };
    // the gradient of fixed coefficients of the first `counts` rows of each
    const auto run = [&](const std::vector<std::vector<std::int32_t>>& t, const std::vector<std::size_t>& counts,
                         std::size_t first) {
        const seen<double> s(target, threads, t);
        hidden_training<double> training(drafter, target, threads);
        const index_t rows = training.set_sequences(s.runs, s.tokens);
        pass r;
        std::vector<double> all(static_cast<std::size_t>(rows * 7)), d(all.size(), 0),
            e(static_cast<std::size_t>(rows * 6), 0);
        training.forward(all.data());
        for (std::size_t q = 0; q < t.size(); ++q) {
            const auto own = coefficients<double>(static_cast<index_t>(counts[q]) * 13, 90 + first + q);
            const auto at = static_cast<std::size_t>(training.first_row(q));
            std::copy_n(own.begin(), counts[q] * 7, d.begin() + static_cast<std::ptrdiff_t>(at * 7));
            std::copy_n(own.begin() + static_cast<std::ptrdiff_t>(counts[q] * 7), counts[q] * 6,
                        e.begin() + static_cast<std::ptrdiff_t>(at * 6));
            r.logits.insert(r.logits.end(), all.begin() + static_cast<std::ptrdiff_t>(at * 7),
                            all.begin() + static_cast<std::ptrdiff_t>((at + counts[q]) * 7));
        }
        training.backward(d.data(), e.data(), r.gradient);
        return r;
    };
    std::vector<std::size_t> counts;
    for (const auto& t : texts) counts.push_back(t.size() - 1);
    const pass packed = run(texts, counts, 0);
    // alone: logits are the same bits, gradients add up to one that was summed in another order
    std::vector<double> logits, sum(packed.gradient.size(), 0);
    for (std::size_t q = 0; q < texts.size(); ++q) {
        const pass alone = run({texts[q]}, {counts[q]}, q);
        logits.insert(logits.end(), alone.logits.begin(), alone.logits.end());
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += alone.gradient[i];
    }
    CHECK(logits == packed.logits);
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
        worst = std::max(worst, std::abs(sum[i] - packed.gradient[i]));
        largest = std::max(largest, std::abs(sum[i]));
    }
    CHECK(largest > 0.1);
    CHECK(worst < 1e-13 * largest);
    // padded to the longest: rows that do not count add nothing
    std::vector<std::vector<std::int32_t>> padded = texts;
    for (auto& t : padded)
        for (const std::int32_t x : random_tokens(7, 17, 9))
            if (t.size() < 17) t.push_back(x);
    const pass with_padding = run(padded, counts, 0);
    CHECK(with_padding.logits == packed.logits);
    CHECK(with_padding.gradient == packed.gradient);
}

namespace {

// The responses of a small target, as a drafter learns from them.
struct small_lesson {
    policy target = small_weights(1, 7);
    std::vector<trajectory> responses;
    std::vector<drafter_text> texts;
    small_lesson() {
        opd::thread_team one(1);
        std::vector<request> prompts;
        for (std::uint64_t i = 0; i < 12; ++i) prompts.push_back(prompt_of(300 + i));
        for (trajectory& t :
             roll_out(*target.model, one, prompts, opd::test::small_sampling(opd::test::draw_plans[0]), 7))
            if (t.response().size() > 2) responses.push_back(std::move(t));
        for (const trajectory& t : responses) texts.push_back({t.tokens, t.prompt_length, {}, t.sample});
    }
};

} // namespace

TEST_CASE("the gradient of each loss of a drafter is its slope") {
    const small_lesson lesson;
    opd::cpu_backend backend{.threads = 1};
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model, drafter_kind::eagle3})
        for (const std::string loss : {"lk", "eagle", "osd", "hass", "eagle3"})
            for (const double temperature : {1.0, 0.7}) {
                if (kind == drafter_kind::model && (loss == "hass" || loss == "eagle3")) continue;
                CAPTURE(loss);
                CAPTURE(temperature);
                config c;
                c.run.seed = 5, c.drafter.loss = loss, c.drafter.ce = 0.7, c.drafter.weights = "none";
                if (loss == "hass") c.drafter.test_steps = 1, c.drafter.top_k = 4; // h^ is a constant to later steps
                c.distill.temperature = temperature;
                draft_model d = fresh(kind, 4);
                drafter_trainer train(c, *lesson.target.model, d, backend);
                std::vector<float> g, unused;
                const drafter_step at = train.gradient(lesson.texts, 1, g);
                REQUIRE(at.rows > 50);
                double square = 0;
                for (const float x : g) square += double(x) * x;
                const std::vector<float> w = d.weights.weights;
                const auto loss_at = [&](double step) {
                    for (std::size_t i = 0; i < w.size(); ++i)
                        d.weights.weights[i] = static_cast<float>(w[i] + step * double(g[i]));
                    d.weights.weights_changed();
                    const drafter_step r = train.gradient(lesson.texts, 1, unused);
                    CHECK(r.rows == at.rows); // the same were rejected
                    return r.loss;
                };
                const double apart = loss == "osd" ? 1e-4 : 1e-3; // what is rejected must stay so
                const double step = apart / square;
                CHECK((loss_at(step) - loss_at(-step)) / (2 * apart) == doctest::Approx(1).epsilon(0.03));
            }
}

TEST_CASE("a drafter that has gone to NaN is neither trained nor measured") {
    const small_lesson lesson;
    opd::cpu_backend backend{.threads = 1};
    std::vector<const trajectory*> responses;
    for (const trajectory& t : lesson.responses) responses.push_back(&t);
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model}) {
        config c;
        draft_model d = fresh(kind, 4);
        drafter_trainer train(c, *lesson.target.model, d, backend);
        CHECK(train.measure(responses).mean > 0);
        std::fill(d.weights.weights.begin(), d.weights.weights.end(), std::numeric_limits<float>::quiet_NaN());
        d.weights.weights_changed();
        std::vector<float> g;
        CHECK_THROWS_AS(train.measure(responses), opd::bad_contents);
        CHECK_THROWS_AS(train.gradient(lesson.texts, 1, g), opd::bad_contents);
    }
}

TEST_CASE("a step of the training-time test on whose rows the target is NaN is not trained on") {
    // One row of some hundred: too few to matter, until a later step of the test has the rows of one response alone.
    const small_lesson lesson;
    opd::cpu_backend backend{.threads = 1};
    config c;
    c.drafter.loss = "eagle3";
    draft_model d = fresh(drafter_kind::hidden, 4);
    const auto longest = *std::max_element(lesson.texts.begin(), lesson.texts.end(), [](const auto& a, const auto& b) {
        return a.tokens.size() < b.tokens.size();
    });
    std::vector<drafter_text> texts(80, longest);
    for (auto t = texts.begin() + 1; t != texts.end(); ++t) t->tokens = t->tokens.first(4), t->prompt_length = 1;
    std::vector<std::vector<token>> inputs;
    for (const drafter_text& t : texts) inputs.emplace_back(t.tokens.begin(), t.tokens.end() - 1);
    std::vector<float> logits, hidden;
    target_rows(*lesson.target.model, backend.team(), std::span<const std::vector<token>>(inputs), logits, hidden);
    const std::size_t width = 24;
    std::size_t at = 0;
    for (std::size_t i = 0; i < texts.size(); at += inputs[i++].size() * width)
        texts[i].hidden = std::span<const float>(hidden).subspan(at, inputs[i].size() * width);
    drafter_trainer train(c, *lesson.target.model, d, backend);
    std::vector<float> g;
    CHECK(train.gradient(texts, 1, g).rows > 110);
    hidden[inputs[0].size() * width - 1] = std::numeric_limits<float>::quiet_NaN(); // its last: of no row's input
    CHECK_THROWS_AS(train.gradient(texts, 1, g), opd::bad_contents);
    c.drafter.test_steps = 1;
    drafter_trainer once(c, *lesson.target.model, d, backend);
    CHECK(once.gradient(texts, 1, g).rows > 110);
}

TEST_CASE("HASS is the mean of three steps' cross-entropy, of rows whose draft had begun") {
    const small_lesson lesson;
    opd::cpu_backend backend{.threads = 1};
    config c;
    c.drafter.loss = "hass", c.drafter.hidden = 0, c.drafter.ce = 1, c.drafter.top_k = 0;
    draft_model d = fresh(drafter_kind::hidden, 4);
    std::vector<drafter_text> texts = lesson.texts;
    texts[0].prompt_length = 1,
    texts[0].tokens = texts[0].tokens.first(6); // rows at its beginning count, but in no later step
    texts[1].prompt_length = 2, texts[1].tokens = texts[1].tokens.first(3); // over after the first
    std::vector<std::vector<token>> inputs;
    for (const drafter_text& t : texts) inputs.emplace_back(t.tokens.begin(), t.tokens.end() - 1);
    std::vector<float> logits, hidden;
    target_rows(*lesson.target.model, backend.team(), std::span<const std::vector<token>>(inputs), logits, hidden);
    std::vector<along<float>> runs;
    std::size_t at = 0;
    for (const auto& t : inputs) {
        runs.push_back({0, 24, std::span<const float>(hidden).subspan(at, t.size() * 24)});
        at += t.size() * 24;
    }
    hidden_training<float> layer(d.weights, *lesson.target.model, backend.team());
    layer.set_sequences(runs, inputs, 3);
    double loss = 0;
    std::vector<std::vector<float>> steps;
    for (index_t step = 0; step < 3; ++step) {
        std::vector<float>& z = steps.emplace_back(static_cast<std::size_t>(layer.rows(step) * 15));
        layer.forward(step, z.data());
        int count = 0;
        double sum = 0;
        float* row = z.data();
        for (const drafter_text& t : texts)
            for (std::size_t p = static_cast<std::size_t>(step); p + 2 < t.tokens.size(); ++p, row += 15) {
                if (p + 2 < t.prompt_length) {
                    std::fill_n(row, 15, 0.0f);
                    continue;
                }
                double all = 0;
                for (int i = 0; i < 15; ++i) all += std::exp(double(row[i]));
                sum += std::log(all) - double(row[t.tokens[p + 2]]);
                for (int i = 0; i < 15; ++i)
                    row[i] = static_cast<float>(std::exp(double(row[i])) / all - (i == t.tokens[p + 2]));
                ++count;
            }
        REQUIRE(row == z.data() + z.size());
        for (float& x : z) x /= 3 * static_cast<float>(count);
        loss += sum / (3 * count);
    }
    std::vector<float> want, got;
    for (index_t step = 2; step >= 0; --step)
        layer.backward(step, steps[static_cast<std::size_t>(step)].data(), nullptr);
    layer.gradient(want);
    drafter_trainer train(c, *lesson.target.model, d, backend);
    CHECK(train.gradient(texts, 0, got).loss == doctest::Approx(loss).epsilon(1e-6));
    double apart = 0, largest = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        apart = std::max(apart, std::abs(double(got[i]) - want[i]));
        largest = std::max(largest, std::abs(double(want[i])));
    }
    CHECK(largest > 1e-3);
    CHECK(apart < 1e-5 * largest);
}

TEST_CASE("rejected positions are those at which the drafter's draft is not followed") {
    const small_lesson lesson;
    opd::cpu_backend backend{.threads = 1};
    std::vector<const trajectory*> all;
    for (const trajectory& t : lesson.responses) all.push_back(&t);
    for (const drafter_kind kind : {drafter_kind::hidden, drafter_kind::model}) {
        config c;
        c.run.seed = 5, c.drafter.loss = "osd", c.drafter.depth = 1;
        const auto d = std::make_shared<const draft_model>(fresh(kind, 4));
        draft_model own = *d;
        drafter_trainer train(c, *lesson.target.model, own, backend);
        std::vector<float> g;
        const drafter_step r = train.gradient(lesson.texts, 0, g);
        const followed_drafts f = follow_drafts(c, *lesson.target.model, d, backend.team(), all, 1);
        CHECK(r.rows > 20);
        CHECK(r.rows < f.drafts - 20);
        CHECK(r.rows == std::llround(static_cast<double>(f.drafts) * (1 - f.by_depth.at(0))));
    }
}

TEST_CASE("a file in the background is whole at any time, the newest in the end, and says what went wrong") {
    const opd::test::scratch dir;
    {
        background_file file(dir / "x");
        const auto text = [](int i) {
            return std::string(static_cast<std::size_t>(1000 + 100 * i), static_cast<char>('a' + i % 26));
        };
        for (int i = 0; i < 100; ++i) {
            file.write([&, i] { return text(i); });
            if (!std::filesystem::exists(dir / "x")) continue;
            const std::string now = read_file(dir / "x");
            const int which = static_cast<int>(now.size() - 1000) / 100;
            CHECK(now == text(which));
        }
        file.flush();
        CHECK(read_file(dir / "x") == text(99));
        CHECK(file.written() >= 1);
        CHECK(file.written() <= 100);
        file.write([] { return std::string("last"); });
    }
    CHECK(read_file(dir / "x") == "last"); // also of one that is gone
    background_file bad(dir / "none/x");
    bad.write([] { return std::string("x"); });
    CHECK_THROWS_AS(bad.flush(), failure);
    bad.flush();
    CHECK(bad.written() == 0);
}

// --- training and files ---------------------------------------------------------------------------------------------

namespace {

using opd::test::exit_of;
using opd::test::flags;
using opd::test::scratch;
using opd::test::with;

std::vector<std::string> tiny(const std::string& directory, std::initializer_list<std::string> more = {}) {
    std::vector<std::string> r = {"opd-train",
                                  "--run-dir",
                                  directory,
                                  "--quiet",
                                  "--max-operand=20",
                                  "--max-task-steps=5",
                                  "--teacher-width=8",
                                  "--teacher-layers=1",
                                  "--teacher-heads=2",
                                  "--teacher-kv-heads=1",
                                  "--teacher-head-dim=4",
                                  "--teacher-ffn=12",
                                  "--student-width=12",
                                  "--student-layers=2",
                                  "--student-heads=2",
                                  "--student-kv-heads=1",
                                  "--student-head-dim=4",
                                  "--student-ffn=16",
                                  "--teacher-steps=6",
                                  "--teacher-batch=4",
                                  "--student-max-steps=30",
                                  "--student-batch=8",
                                  "--student-check-every=30",
                                  "--student-check-prompts=8",
                                  "--student-target-accuracy=1",
                                  "--steps=4",
                                  "--prompts=4",
                                  "--eval-prompts=12",
                                  "--eval-samples=1",
                                  "--eval-every=2",
                                  "--eval-every-prompts=6",
                                  "--checkpoint-every=2",
                                  "--log-every=2",
                                  "--threads=2"};
    r.insert(r.end(), more.begin(), more.end());
    return r;
}
std::string usage_failure(const std::vector<std::string>& arguments) {
    try {
        parse_command_line(arguments);
    } catch (const failure& e) {
        CHECK(e.code == exit_usage);
        return e.what();
    }
    return "none";
}

} // namespace

TEST_CASE("opd-train --train-drafter, and rollout with what it wrote: the same bytes as without") {
    const scratch dir;
    const std::string run = dir / "run", plain = dir / "plain";
    REQUIRE(exit_of(tiny(run)) == exit_ok);
    const std::string start = run + "/checkpoints/student.ckpt", made = run + "/checkpoints/drafter.ckpt";
    REQUIRE(exit_of(tiny(plain, {"--start-from", start})) == exit_ok);
    const std::string before = read_file(run + "/checkpoints/latest.ckpt");
    for (const std::string kind : {"hidden", "model"})
        for (const std::string weights : {"accepted_length", "decaying", "none"}) {
            CAPTURE(kind);
            CAPTURE(weights);
            // flags of the run are in its config.json
            REQUIRE(
                exit_of({"opd-train", "--run-dir", run, "--quiet", "--train-drafter", "--drafter", kind,
                         "--drafter-steps=60", "--drafter-batch=8", "--drafter-responses=24", "--drafter-held-out=6",
                         "--drafter-weights", weights, "--drafter-depth=4", "--drafter-rate=5e-3"}) == exit_ok);
            CHECK(read_file(run + "/checkpoints/latest.ckpt") == before);
            const draft_model d = load_drafter(made);
            CHECK(drafter_bytes(d) == read_file(made));
            std::vector<nlohmann::json> log;
            std::istringstream lines(read_file(run + "/drafter.jsonl"));
            for (std::string line; std::getline(lines, line);) log.push_back(nlohmann::json::parse(line));
            REQUIRE(log.size() == 31); // every second step, and what was measured
            CHECK(log[29]["loss"] < log[0]["loss"]);
            CHECK(log[29]["acceptance"].get<double>() > log[0]["acceptance"].get<double>() + 0.05);
            const auto measured = log[30];
            CHECK(measured["expected"]["by_depth"].size() == 4);
            // noise is shared: at least as many are followed as draws of its own would be
            CHECK(measured["followed"]["by_depth"][0].get<double>() >
                  measured["expected"]["by_depth"][0].get<double>() - 0.1);
            CHECK(measured["followed"]["by_depth"][0].get<double>() > 0.5);
            if (weights != "accepted_length") continue;
            const std::string drafted = dir / ("drafted_" + kind);
            REQUIRE(exit_of(tiny(drafted, {"--start-from", start, "--speculate=learned", "--draft-from", made,
                                           "--draft-children=2", "--draft-depth=3"})) == exit_ok);
            CHECK(read_file(drafted + "/checkpoints/latest.ckpt") == read_file(plain + "/checkpoints/latest.ckpt"));
            const auto schedule = nlohmann::json::parse(read_file(drafted + "/schedule.json"));
            CHECK(schedule["speculation"]["accepted_per_step"].get<double>() > 0.5);
            // in virtual time every pass of the drafter takes its time, and every row in it
            const auto seconds = [&](const std::string& pass, const std::string& row) {
                const std::string where = dir / ("timed_" + kind + pass + row);
                REQUIRE(exit_of(tiny(where, {"--start-from", start, "--speculate=learned", "--draft-from", made,
                                             "--draft-children=1", "--draft-depth=3", "--driver=virtual",
                                             "--rollout-workers=1", pass, row})) == exit_ok);
                const auto timed = nlohmann::json::parse(read_file(where + "/schedule.json"));
                return std::pair{timed["busy_seconds"]["rollout"].get<double>(),
                                 timed["speculation"]["choices"]["learned 3/1/8"].get<double>()};
            };
            const auto [free_of, steps] = seconds("--cost-draft=0", "--cost-draft-row=0");
            const double passes = seconds("--cost-draft=1", "--cost-draft-row=0").first - free_of;
            const double rows = seconds("--cost-draft=0", "--cost-draft-row=1").first - free_of;
            CHECK(std::abs(passes - std::round(passes)) < 1e-6);
            CHECK(passes > 2 * steps); // three deep, but for the ends of responses
            CHECK(passes < 4 * steps);
            CHECK(rows > passes); // several sequences go through it together
            // every draft costs, and so does every row that the drafter reads: interrupted or not, it is the same run
            for (const flags& how : {flags{"--speculate=learned", "--draft-depth=3"},
                                     flags{"--speculate=learned", "--draft-children=2"}, flags{"--speculate=auto"}})
                for (const flags& schedule :
                     {flags{"--schedule=step-off", "--schedule-k=2"}, flags{"--schedule=controlled", "--schedule-k=2"},
                      flags{"--schedule=async", "--tau=3"}, flags{"--schedule=async", "--tau=3", "--park-after=4"},
                      flags{"--schedule=async", "--tau=3", "--weight-update=abort", "--outstanding=widest"},
                      flags{"--schedule=async", "--tau=3", "--weight-update=finish_first", "--slots=2"},
                      flags{"--schedule=async", "--tau=3", "--prefill-chunk=64", "--kv-tokens=128"}}) {
                    std::string settings;
                    for (const std::string& flag : with(how, schedule)) settings += flag + " ";
                    CAPTURE(settings);
                    const std::string whole = dir / "whole", parts = dir / "parts";
                    for (const std::string& gone : {whole, parts}) std::filesystem::remove_all(gone);
                    const auto timed = [&](const std::string& directory, const flags& more) {
                        const flags base =
                            tiny(directory, {"--start-from", start, "--driver=virtual", "--rollout-workers=2",
                                             "--draft-from", made, "--steps=9", "--temperature=0.7", "--cost-step=1e-3",
                                             "--cost-step-row=1e-4", "--cost-draft=3e-4", "--cost-draft-row=2e-4",
                                             "--cost-train=1.1e-2", "--cost-score=2e-3"});
                        return with(with(with(base, how), schedule), more);
                    };
                    REQUIRE(exit_of(timed(whole, {})) == exit_ok);
                    for (int part = 0; part < 5; ++part) {
                        flags arguments = timed(parts, part == 0 ? flags{} : flags{"--resume"});
                        arguments.erase(arguments.begin()); // the program's name
                        trainer::run r(parse_command_line(arguments));
                        if (part < 4) r.stop_after(2);
                        REQUIRE(opd::test::go(r) == (part < 4 ? exit_interrupted : exit_ok));
                    }
                    for (const char* file :
                         {"/consumed.jsonl", "/checkpoints/distill.ckpt", "/checkpoints/latest.ckpt"})
                        CHECK_MESSAGE(read_file(parts + file) == read_file(whole + file), file);
                }
            const std::string chosen = dir / ("chosen_" + kind); // as many as pay, if any
            REQUIRE(exit_of(tiny(chosen, {"--start-from", start, "--speculate=auto", "--draft-from", made})) ==
                    exit_ok);
            CHECK(read_file(chosen + "/checkpoints/latest.ckpt") == read_file(plain + "/checkpoints/latest.ckpt"));
        }

    // other losses teach it as well, and so they do one that reads three layers
    for (const std::string loss : {"eagle", "hass", "osd", "eagle3"}) {
        flags learn = {"opd-train",
                       "--run-dir",
                       run,
                       "--quiet",
                       "--train-drafter",
                       "--drafter-loss",
                       loss,
                       "--drafter-steps=60",
                       "--drafter-batch=8",
                       "--drafter-responses=24",
                       "--drafter-held-out=6",
                       "--drafter-depth=4",
                       "--drafter-rate=5e-3"};
        if (loss == "eagle" || loss == "hass") learn.push_back("--drafter-ce=1");
        if (loss == "eagle3") learn.push_back("--drafter=eagle3");
        REQUIRE(exit_of(learn) == exit_ok);
        std::vector<nlohmann::json> log;
        std::istringstream lines(read_file(run + "/drafter.jsonl"));
        for (std::string line; std::getline(lines, line);) log.push_back(nlohmann::json::parse(line));
        CHECK(log[29]["acceptance"].get<double>() > log[0]["acceptance"].get<double>() + 0.05);
    }
    {
        const draft_model fused = load_drafter(made);
        CHECK(fused.kind == drafter_kind::eagle3);
        CHECK(drafter_bytes(fused) == read_file(made));
        REQUIRE(exit_of(tiny(dir / "fused", {"--start-from", start, "--speculate=learned", "--draft-from", made})) ==
                exit_ok);
        CHECK(read_file(dir / "fused/checkpoints/latest.ckpt") == read_file(plain + "/checkpoints/latest.ckpt"));
        // a drafter without hidden states cannot learn by what goes on from them
        const draft_model own(drafter_kind::model, fused.target,
                              {.vocabulary = fused.target.vocabulary,
                               .width = 8,
                               .layers = 1,
                               .heads = 2,
                               .kv_heads = 1,
                               .head_dim = 4,
                               .ffn = 8,
                               .max_length = fused.target.max_length});
        save_drafter(dir / "own.ckpt", own);
        CHECK(exit_of(tiny(dir / "refused", {"--start-from", start, "--speculate=learned", "--draft-from",
                                             dir / "own.ckpt", "--adapt-drafter", "--drafter-loss=hass"})) ==
              exit_usage);
    }
    // one that learns on threads: what it has learnt is in its own file, from which a resumed run goes on, and others
    // begin
    const std::string learning = dir / "learning";
    const auto part = [&](const flags& more, int stop) {
        flags arguments =
            with(tiny(learning, {"--start-from", start, "--speculate=learned", "--adapt-drafter", "--steps=12",
                                 "--adapt-rows=40", "--adapt-checkpoint-every=3", "--drafter-heads=2",
                                 "--drafter-kv-heads=1", "--drafter-head-dim=4", "--drafter-ffn=8"}),
                 more);
        arguments.erase(arguments.begin());
        trainer::run r(parse_command_line(arguments));
        if (stop > 0) r.stop_after(stop);
        return opd::test::go(r);
    };
    REQUIRE(part({}, 6) == exit_interrupted);
    drafter_progress first_half, whole;
    const draft_model half = load_drafter(learning + "/checkpoints/drafter.ckpt", &first_half);
    CHECK(first_half.updates > 0);
    CHECK(first_half.optimizer.step == first_half.updates);
    CHECK(first_half.trained_on <= 6);
    CHECK(drafter_bytes(half, &first_half) == read_file(learning + "/checkpoints/drafter.ckpt"));
    {
        std::string damaged = drafter_bytes(half, &first_half);
        damaged[damaged.size() - 60] = static_cast<char>(damaged[damaged.size() - 60] ^ 1);
        CHECK_THROWS_AS(drafter_of(damaged, "x"), failure);
    }
    REQUIRE(part({"--resume"}, 0) == exit_ok);
    load_drafter(learning + "/checkpoints/drafter.ckpt", &whole);
    CHECK(whole.updates > first_half.updates);
    CHECK(whole.optimizer.step == whole.updates);
    const auto told = nlohmann::json::parse(read_file(learning + "/schedule.json"))["speculation"]["drafter"];
    CHECK(told["updates"] == whole.updates);
    REQUIRE(exit_of(tiny(dir / "begins", {"--start-from", start, "--speculate=learned", "--draft-from",
                                          learning + "/checkpoints/drafter.ckpt"})) == exit_ok);

    // what is refused, and by what code
    CHECK(exit_of({"opd-train", "--run-dir", dir / "none", "--train-drafter"}) == exit_input);
    CHECK(exit_of({"opd-train", "--run-dir", run, "--quiet", "--train-drafter", "--drafter-held-out=6",
                   "--student-layers=3"}) == exit_usage);
    CHECK(exit_of({"opd-train", "--run-dir", run, "--quiet", "--train-drafter", "--drafter-held-out=1000"}) ==
          exit_usage);
    CHECK(exit_of({"opd-train", "--run-dir", run, "--quiet", "--train-drafter", "--drafter-held-out=6",
                   "--drafter-rate=1e30", "--loss-limit=5", "--drafter-steps=40", "--drafter-responses=32"}) ==
          exit_numeric);
    CHECK(exit_of(tiny(dir / "a", {"--start-from", start, "--speculate=learned"})) == exit_usage);
    CHECK(exit_of(tiny(dir / "b", {"--start-from", start, "--speculate=learned", "--draft-from", start})) ==
          exit_input);
    CHECK(exit_of(tiny(dir / "c", {"--student-ffn=20", "--speculate=learned", "--draft-from", made})) == exit_input);
    CHECK_FALSE(std::filesystem::exists(dir / "c"));
    std::string bytes = read_file(made);
    for (const std::size_t at : {std::size_t{3}, std::size_t{20}, bytes.size() / 2, bytes.size() - 1}) {
        std::string damaged = bytes;
        damaged[at] = static_cast<char>(damaged[at] ^ 1);
        CHECK_THROWS_AS(drafter_of(damaged, "x"), failure);
        CHECK_THROWS_AS(drafter_of(bytes.substr(0, at), "x"), failure);
    }
    CHECK_THROWS_WITH(drafter_of("OPDTRAIN", "file"), "file: not a drafter of opd-train");
}

TEST_CASE("settings of drafters are strict, and a preset is a beginning that flags change") {
    const auto with = [](const std::vector<std::string>& more) { return usage_failure(more); };
    CHECK(with({"--drafter=tree"}).find("hidden, eagle3 or model") != std::string::npos);
    CHECK(with({"--drafter-width=64"}) == "--drafter-width is not used by --drafter hidden");
    CHECK(with({"--drafter=model", "--drafter-width=64"}) == "none");
    CHECK(with({"--drafter=model", "--drafter-hidden=1"}) == "--drafter-hidden is not used by --drafter model");
    CHECK(with({"--drafter-gamma=2"}) == "--drafter-gamma is not used by --drafter-weights accepted_length");
    CHECK(with({"--drafter-weights=decaying", "--drafter-smoothing=0.1"}) ==
          "--drafter-smoothing is not used by --drafter-weights decaying");
    CHECK(with({"--drafter-weights=dpace"}).find("accepted_length, decaying or none") != std::string::npos);
    CHECK(with({"--drafter-acceptance=0", "--drafter-kl=0"}).find("must not both be 0") != std::string::npos);
    CHECK(with({"--drafter-smoothing=1.5"}).find("[0, 1]") != std::string::npos);
    CHECK(with({"--drafter-depth=0"}).find("[1, 64]") != std::string::npos);
    CHECK(with({"--drafter-heads=3"}).find("must divide") != std::string::npos);
    CHECK(with({"--train-drafter", "--resume"}).find("exclude each other") != std::string::npos);
    CHECK(with({"--draft-children=2"}) == "--draft-children is not used by --speculate off");
    CHECK(with({"--speculate=learned", "--draft-running=2"}) == "--draft-running is not used by --speculate learned");
    CHECK(with({"--speculate=learned", "--draft-history=9"}) == "--draft-history is not used by --speculate learned");
    CHECK(with({"--cost-draft=1"}) == "--cost-draft is not used by --driver threads --speculate off");
    CHECK(with({"--driver=virtual", "--speculate=ngram", "--cost-draft-row=1"}) ==
          "--cost-draft-row is not used by --driver virtual --speculate ngram");
    CHECK(with({"--speculate=ngram", "--draft-from=x"}) == "--draft-from is not used by --speculate ngram");
    CHECK(with({"--speculate=ngram", "--adapt-drafter"}) == "--adapt-drafter is not used by --speculate ngram");
    CHECK(with({"--adapt-drafter"}) == "--adapt-drafter is not used by --speculate off");
    CHECK(with({"--speculate=auto", "--adapt-rows=8"}) == "--adapt-rows is not used by a run without --adapt-drafter");
    CHECK(with({"--speculate=auto", "--adapt-drafter", "--cost-adapt=1"}) ==
          "--cost-adapt is not used by --driver threads");
    CHECK(with({"--speculate=auto", "--driver=virtual", "--cost-adapt-row=1"}) ==
          "--cost-adapt-row is not used by a run without --adapt-drafter");
    CHECK(with({"--speculate=auto", "--adapt-drafter", "--adapt-rows=0"}).find("--adapt-rows") != std::string::npos);
    CHECK(with({"--speculate=auto", "--adapt-drafter", "--adapt-memory=9"}).find("[--adapt-rows, 500000000], not 9") !=
          std::string::npos);
    CHECK(with({"--speculate=auto", "--adapt-drafter", "--adapt-rate=0"}).find("--adapt-rate") != std::string::npos);
    CHECK(with({"--speculate=auto", "--adapt-drafter", "--adapt-slices=-1"}).find("--adapt-slices") !=
          std::string::npos);
    CHECK(with({"--speculate=learned", "--adapt-drafter", "--driver=virtual", "--cost-adapt=0"}) ==
          "--cost-adapt must be positive");
    CHECK(with({"--drafter-loss=osd", "--drafter-kl=1"}) == "--drafter-kl is not used by --drafter-loss osd");
    CHECK(with({"--drafter-ce=1"}) == "--drafter-ce is not used by --drafter-loss lk");
    CHECK(with({"--drafter-loss=gkd"}) == "--drafter-loss must be lk, eagle, hass, eagle3 or osd, not 'gkd'");
    CHECK(with({"--drafter-loss=eagle3", "--drafter-hidden=1"}) ==
          "--drafter-hidden is not used by --drafter-loss eagle3");
    CHECK(with({"--drafter=eagle3", "--drafter-hidden=1"}) == "--drafter-hidden is not used by --drafter eagle3");
    CHECK(with({"--drafter-test-steps=2"}) == "--drafter-test-steps is not used by --drafter-loss lk");
    CHECK(with({"--drafter-loss=eagle3", "--drafter-test-steps=65"}).find("[0, 64], not 65") != std::string::npos);
    CHECK(with({"--drafter-loss=eagle3", "--drafter-top-k=2"}) ==
          "--drafter-top-k is not used by --drafter-loss eagle3");
    CHECK(with({"--drafter-loss=hass", "--drafter-top-k=-1"}).find("--drafter-top-k") != std::string::npos);
    CHECK(with({"--drafter-loss=eagle3", "--drafter=model"}).find("hidden states, not --drafter model") !=
          std::string::npos);
    CHECK(with({"--drafter-loss=hass", "--drafter=model"}).find("hidden states, not --drafter model") !=
          std::string::npos);
    CHECK(with({"--speculate=auto", "--adapt-drafter", "--adapt-checkpoint-every=0"}).find("checkpoint-every") !=
          std::string::npos);
    CHECK(with({"--preset=speculativ"}).find("did you mean 'speculative'?") != std::string::npos);
    CHECK(with({"--preset=quik"}).find("did you mean 'quick'?") != std::string::npos);
    CHECK(parse_command_line({"--preset", "quick", "--steps=7"}).settings.distill.steps == 7);
    CHECK(parse_command_line({"--preset", "quick"}).settings.task.max_operand == 99);
    const config c = parse_command_line({"--preset", "speculative", "--student-layers=7"}).settings;
    CHECK(c.student_model.layers == 7);
    CHECK(c.student_model.width == 256);
}

TEST_CASE("a drafter's file says which family its target is of, where that is not Qwen3's") {
    const model_shape plain{
        .vocabulary = 7, .width = 6, .layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 4, .ffn = 8};
    model_shape llama = plain;
    llama.qk_norm = false, llama.attention_bias = llama.output_bias = true, llama.norm_epsilon = 1e-5;
    llama.rope = {.base = 5e5, .how = rope::scaling::llama3, .factor = 8, .low = 1, .high = 4, .original_length = 32};
    for (const model_shape& target : {plain, llama}) {
        draft_model d(drafter_kind::model, target, plain);
        d.weights.initialise(1);
        const std::string bytes = drafter_bytes(d);
        CHECK(bytes.starts_with(target.qk_norm ? "OPDDRAFT 1\n" : "OPDDRAFT 2\n"));
        const draft_model again = drafter_of(bytes, "a");
        CHECK(again.target == target);
        CHECK(again.weights.shape == plain);
        CHECK(drafter_bytes(again) == bytes);
        d.target.rope.factor = 0;
        CHECK_THROWS_AS(drafter_of(drafter_bytes(d), "a"), failure);
    }
}
