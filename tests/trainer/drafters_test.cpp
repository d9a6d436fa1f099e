// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Learned drafters: the layer on the target's hidden states, its offsets and its gradients.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "hidden_drafter.hpp"
#include "opd/rng.hpp"
#include "row_kernels.hpp"

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
model_shape own_shape(int layers = 1) {
    return hidden_drafter_shape(target_shape(), {.layers = layers, .heads = 4, .kv_heads = 2, .head_dim = 2, .ffn = 8});
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

    seen(const transformer<T>& target, opd::thread_team& threads, std::vector<std::vector<std::int32_t>> t)
        : tokens(std::move(t)) {
        target_rows(target, threads, std::span<const std::vector<std::int32_t>>(tokens), logits, hidden);
        std::size_t row = 0;
        const auto d = static_cast<std::size_t>(target.shape.width);
        for (const auto& s : tokens) {
            runs.push_back({0, target.shape.width, std::span<const T>(hidden).subspan(row * d, s.size() * d)});
            row += s.size();
        }
    }
};

// What a row may be made of.
template <class H, class X>
concept makes_inputs = requires(const transformer<float>& m, const H& h, const X& x, float* to) {
    drafter_inputs<float>(m, m, h, x, to, to);
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
            rms_norm(y.data(), target.at(target.layout.norm_f), d, n.data());
            for (index_t v = 0; v < 7; ++v)
                worst =
                    std::max(worst, std::abs(dot(target.at(target.layout.head) + v * d, n.data(), d) -
                                             logits[static_cast<std::size_t>((training.first_row(q) + t) * 7 + v)]));
        }
    CHECK(worst < 1e-12);
    // the target's own: the head of h[t] says what comes after position t, so row t of the drafter is compared with row t + 1
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
    const auto target = jittered<double>(target_shape(), 3), drafter = jittered<double>(own_shape(), 4);
    opd::thread_team threads(1);
    const seen<double> s(target, threads, {random_tokens(7, 6, 1)});
    const along<std::int32_t> tokens{0, 1, s.tokens[0]};
    std::vector<double> pairs(100), x0(100);
    const auto h = around<0>(s.runs[0], 1, 2);
    CHECK_NOTHROW(drafter_inputs(drafter, target, h, around<1>(tokens, 1, 2), pairs.data(), x0.data()));
    CHECK_THROWS_AS(drafter_inputs(drafter, target, h, around<1>(tokens, 2, 2), pairs.data(), x0.data()),
                    std::invalid_argument);
    CHECK_THROWS_AS(drafter_inputs(drafter, target, h, around<1>(tokens, 1, 3), pairs.data(), x0.data()),
                    std::invalid_argument);
    CHECK_THROWS_AS(drafter_inputs(target, target, h, around<1>(tokens, 1, 2), pairs.data(), x0.data()),
                    std::invalid_argument);
}

TEST_CASE("the gradient of every weight of the layer equals central differences") {
    for (const int layers : {1, 2}) {
        const auto target = jittered<double>(target_shape(), 3);
        auto drafter = jittered<double>(own_shape(layers), 4);
        opd::thread_team threads(2);
        const seen<double> s(target, threads,
                             {random_tokens(7, 2, 1), random_tokens(7, 27, 2), random_tokens(7, 14, 3)});
        const auto a = coefficients<double>((1 + 26 + 13) * 7);
        const auto loss = [&] {
            hidden_training<double> training(drafter, target, threads);
            training.set_sequences(s.runs, s.tokens);
            std::vector<double> logits(a.size());
            training.forward(logits.data());
            double sum = 0;
            for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * logits[i];
            return sum;
        };
        hidden_training<double> training(drafter, target, threads);
        REQUIRE(training.set_sequences(s.runs, s.tokens) * 7 == static_cast<index_t>(a.size()));
        std::vector<double> logits(a.size()), grad;
        training.forward(logits.data());
        training.backward(a.data(), grad);
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

TEST_CASE("the number of threads changes no bit of a drafter's training") {
    const auto target = jittered<float>(target_shape(), 3), drafter = jittered<float>(own_shape(), 4);
    std::vector<float> logits[2], grad[2];
    for (const int n : {1, 3}) {
        opd::thread_team threads(n);
        const seen<float> s(target, threads,
                            {random_tokens(7, 30, 1), random_tokens(7, 3, 2), random_tokens(7, 17, 3)});
        hidden_training<float> training(drafter, target, threads);
        auto& z = logits[n == 3];
        z.resize(static_cast<std::size_t>(training.set_sequences(s.runs, s.tokens) * 7));
        training.forward(z.data());
        training.backward(coefficients<float>(static_cast<index_t>(z.size())).data(), grad[n == 3]);
    }
    CHECK(logits[0] == logits[1]);
    CHECK(grad[0] == grad[1]);
}
