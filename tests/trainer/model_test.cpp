// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "opd/element.hpp"
#include "opd/rng.hpp"

namespace {

using namespace trainer;

std::vector<std::vector<std::int32_t>> random_sequences(int vocabulary, std::initializer_list<int> lengths) {
    std::vector<std::vector<std::int32_t>> r;
    for (int length : lengths) {
        const opd::noise_row noise(1, opd::noise_stream::mc, r.size(), 0);
        std::vector<std::int32_t> tokens;
        for (int i = 0; i < length; ++i)
            tokens.push_back(static_cast<std::int32_t>(noise.bits(0, static_cast<std::uint32_t>(i)) %
                                                       static_cast<std::uint32_t>(vocabulary)));
        r.push_back(tokens);
    }
    return r;
}

template <class T>
std::vector<T> coefficients(index_t size) {
    const opd::noise_row noise(2, opd::noise_stream::mc, 0, 0);
    std::vector<T> r(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < r.size(); ++i)
        r[i] = static_cast<T>(opd::uniform_of_bits(noise.bits(0, static_cast<std::uint32_t>(i))) - 0.5);
    return r;
}

model_shape small_shape(bool tied) {
    return {.vocabulary = 7,
            .width = 6,
            .layers = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = 4,
            .ffn = 10,
            .tied = tied,
            .max_length = 64};
}

// Without the norms of q and k, with biases, other angles and another epsilon: the other families.
model_shape other_family(model_shape s, rope::scaling how, bool output_bias) {
    s.qk_norm = false;
    s.attention_bias = true;
    s.output_bias = output_bias;
    s.norm_epsilon = 1e-3;
    // pairs below, between and above the two limits, where there are three
    s.rope = {.base = 100, .how = how, .factor = 4, .low = 1, .high = 4, .original_length = 16};
    return s;
}

// sum of coefficient * logit, a loss whose gradient with respect to the logits is the coefficients
double loss_of(const transformer<double>& model, opd::thread_team& threads,
               const std::vector<std::vector<std::int32_t>>& sequences) {
    training_pass<double> pass(model, threads);
    const index_t rows = pass.set_sequences(sequences);
    std::vector<double> logits(static_cast<std::size_t>(rows * model.shape.vocabulary));
    pass.forward(logits.data());
    const auto a = coefficients<double>(static_cast<index_t>(logits.size()));
    double sum = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) sum += a[i] * logits[i];
    return sum;
}

} // namespace

TEST_CASE("the gradient of every weight equals central differences") {
    const model_shape shapes[] = {small_shape(false), small_shape(true),
                                  other_family(small_shape(true), rope::scaling::linear, false),
                                  other_family(small_shape(false), rope::scaling::llama3, true)};
    for (const model_shape& shape : shapes) {
        const bool tied = shape.tied;
        CAPTURE(tied);
        CAPTURE(shape.qk_norm);
        transformer<double> model(shape);
        model.initialise(3);
        // norms start at 1 and biases at 0: move them, so that a missing factor shows
        const auto jitter = coefficients<double>(model.layout.size);
        for (std::size_t i = 0; i < model.weights.size(); ++i) model.weights[i] += 0.2 * jitter[i];
        model.weights_changed();
        opd::thread_team threads(2);
        const auto sequences = random_sequences(7, {1, 5, 27, 14});

        training_pass<double> pass(model, threads);
        const index_t rows = pass.set_sequences(sequences);
        std::vector<double> logits(static_cast<std::size_t>(rows * 7)), grad;
        pass.forward(logits.data());
        const auto a = coefficients<double>(rows * 7);
        pass.backward(a.data(), grad);

        double worst = 0;
        const auto check = [&](const tensor& t) {
            for (index_t i = 0; i < t.size(); ++i) {
                double& w = model.weights[static_cast<std::size_t>(t.offset + i)];
                const double before = w, step = 1e-5;
                w = before + step;
                model.weights_changed();
                const double up = loss_of(model, threads, sequences);
                w = before - step;
                model.weights_changed();
                const double down = loss_of(model, threads, sequences);
                w = before;
                const double expected = (up - down) / (2 * step), got = grad[static_cast<std::size_t>(t.offset + i)];
                worst = std::max(worst, std::abs(got - expected) / (1e-3 + std::abs(expected)));
            }
        };
        check(model.layout.embedding);
        check(model.layout.norm_f);
        if (!tied) check(model.layout.head);
        for (const auto& l : model.layout.layers)
            for (const tensor* t : l.all()) check(*t);
        CHECK(worst < 1e-5);
    }
}

TEST_CASE("float follows double") {
    const auto shape = other_family(small_shape(false), rope::scaling::llama3, true);
    transformer<double> exact(shape);
    exact.initialise(5);
    transformer<float> model(shape);
    for (std::size_t i = 0; i < model.weights.size(); ++i) model.weights[i] = static_cast<float>(exact.weights[i]);
    model.weights_changed();
    opd::thread_team threads(1);
    const auto sequences = random_sequences(7, {20, 9});
    training_pass<double> pass_exact(exact, threads);
    training_pass<float> pass(model, threads);
    const index_t rows = pass.set_sequences(sequences);
    pass_exact.set_sequences(sequences);
    std::vector<double> logits_exact(static_cast<std::size_t>(rows * 7)), grad_exact;
    std::vector<float> logits(logits_exact.size()), grad;
    pass.forward(logits.data());
    pass_exact.forward(logits_exact.data());
    pass.backward(coefficients<float>(rows * 7).data(), grad);
    pass_exact.backward(coefficients<double>(rows * 7).data(), grad_exact);
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) worst = std::max(worst, std::abs(logits[i] - logits_exact[i]));
    CHECK(worst < 1e-5);
    worst = 0;
    for (std::size_t i = 0; i < grad.size(); ++i) {
        worst = std::max(worst, std::abs(grad[i] - grad_exact[i]));
        largest = std::max(largest, std::abs(grad_exact[i]));
    }
    CHECK(worst < 1e-5 * largest);
}

// The one property that plain, batched and later speculative rollout rest on: a (sequence, position) has one set of
// logits, bit for bit.
TEST_CASE("logits are the same bits for every batch size, chunk size and path") {
    model_shape shape{.vocabulary = 15,
                      .width = 40,
                      .layers = 2,
                      .heads = 4,
                      .kv_heads = 2,
                      .head_dim = 12,
                      .ffn = 72,
                      .max_length = 64};
    SUBCASE("with norms of q and k") {}
    SUBCASE("with biases") { shape = other_family(shape, rope::scaling::llama3, true); }
    transformer<float> model(shape);
    model.initialise(7);
    if (shape.attention_bias) { // biases start at 0
        const auto jitter = coefficients<float>(model.layout.size);
        for (std::size_t i = 0; i < model.weights.size(); ++i) model.weights[i] += 0.2F * jitter[i];
        model.weights_changed();
    }
    opd::thread_team one(1), two(2), three(3);
    std::vector<std::vector<std::int32_t>> sequences;
    for (int i = 0; i < 33; ++i) sequences.push_back(random_sequences(15, {i + 3})[0]);
    // reference: the packed training forward of all sequences
    training_pass<float> pass(model, one);
    index_t rows = pass.set_sequences(sequences);
    std::vector<float> reference(static_cast<std::size_t>(rows * 15));
    pass.forward(reference.data());
    const auto same = [&](const float* logits, std::size_t sequence, index_t position, index_t count) {
        return std::memcmp(logits, reference.data() + (pass.first_row(sequence) + position) * 15,
                           static_cast<std::size_t>(count * 15) * sizeof(float)) == 0;
    };

    SUBCASE("packed training batches of 1 to 33 sequences on 1 to 3 threads") {
        for (std::size_t batch = 1; batch <= 33; ++batch) {
            training_pass<float> other(model, batch % 3 == 0 ? one : batch % 3 == 1 ? two : three);
            const std::size_t first = 33 - batch;
            other.set_sequences(std::span(sequences).subspan(first, batch));
            std::vector<float> logits(static_cast<std::size_t>(other.rows() * 15));
            other.forward(logits.data());
            for (std::size_t i = 0; i < batch; ++i)
                CHECK(same(logits.data() + other.first_row(i) * 15, first + i, 0,
                           static_cast<index_t>(sequences[first + i].size())));
        }
    }

    SUBCASE("decoding in chunks, sequences entering and leaving the batch") {
        for (index_t chunk : {1, 2, 3, 5, 12, 13, 40}) {
            for (index_t slots : {1, 2, 7, 16, 33}) {
                CAPTURE(chunk);
                CAPTURE(slots);
                kv_cache<float> cache;
                cache.resize(shape, slots, 64);
                forward_state<float> state;
                struct running {
                    std::size_t sequence;
                    index_t done;
                };
                std::vector<running> slot(static_cast<std::size_t>(slots), {~std::size_t{0}, 0});
                std::size_t next = 0;
                int wrong = 0;
                for (;;) {
                    std::vector<segment> segments;
                    std::vector<std::int32_t> tokens;
                    for (std::size_t i = 0; i < slot.size(); ++i) {
                        if (slot[i].sequence == ~std::size_t{0} && next < sequences.size()) slot[i] = {next++, 0};
                        if (slot[i].sequence == ~std::size_t{0}) continue;
                        const auto& all = sequences[slot[i].sequence];
                        // alternate between the chunk and single steps in half of the slots
                        const index_t want = i % 2 == 1 && slot[i].done % 2 == 1 ? 1 : chunk;
                        const index_t count = std::min(want, static_cast<index_t>(all.size()) - slot[i].done);
                        segments.push_back({static_cast<index_t>(i), slot[i].done, count});
                        tokens.insert(tokens.end(), all.begin() + slot[i].done, all.begin() + slot[i].done + count);
                    }
                    if (segments.empty()) break;
                    std::vector<float> logits(tokens.size() * 15);
                    forward_rows(model, std::span<const segment>(segments), std::span<const std::int32_t>(tokens),
                                 cache, state, false, logits.data());
                    const float* z = logits.data();
                    for (const segment& g : segments) {
                        auto& s = slot[static_cast<std::size_t>(g.slot)];
                        wrong += !same(z, s.sequence, g.start, g.count);
                        z += g.count * 15;
                        s.done += g.count;
                        if (s.done == static_cast<index_t>(sequences[s.sequence].size())) s.sequence = ~std::size_t{0};
                    }
                }
                CHECK(next == 33);
                CHECK(wrong == 0);
            }
        }
    }
}

TEST_CASE("weight gradients do not depend on the number of threads") {
    const model_shape shape{.vocabulary = 15,
                            .width = 48,
                            .layers = 2,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .ffn = 128,
                            .max_length = 64};
    transformer<float> model(shape);
    model.initialise(9);
    const auto sequences = random_sequences(15, {3, 40, 17, 64, 1, 22});
    std::vector<float> first;
    for (int size = 1; size <= 4; ++size) {
        opd::thread_team threads(size);
        training_pass<float> pass(model, threads);
        const index_t rows = pass.set_sequences(sequences);
        std::vector<float> logits(static_cast<std::size_t>(rows * 15)), grad;
        pass.forward(logits.data());
        pass.backward(coefficients<float>(rows * 15).data(), grad);
        if (size == 1) first = grad;
        CHECK(std::memcmp(first.data(), grad.data(), grad.size() * sizeof(float)) == 0);
    }
}

TEST_CASE("a forward pass whose large products a team shares has the bits of one without") {
    model_shape shape = small_shape(true);
    shape.width = 256, shape.ffn = 520,
    shape.vocabulary = 1100; // gate and up, down and the head: above 1 MB of weights, or not
    transformer<float> model(shape);
    model.initialise(4);
    const auto tokens = random_sequences(shape.vocabulary, {5}).front();
    const segment whole{.slot = 0, .start = 0, .count = 5};
    std::vector<float> want;
    for (const int threads : {0, 1, 2, 3}) {
        opd::thread_team team(std::max(1, threads));
        kv_cache<float> cache;
        cache.resize(shape, 1, 16);
        forward_state<float> state;
        if (threads > 0) state.threads = &team;
        std::vector<float> logits(tokens.size() * static_cast<std::size_t>(shape.vocabulary), -1.0f);
        forward_rows<float>(model, std::span(&whole, 1), tokens, cache, state, false, logits.data());
        if (threads == 0) want = logits;
        CHECK(std::memcmp(logits.data(), want.data(), sizeof(float) * want.size()) == 0);
    }
    CHECK(want.front() != -1.0f);
}

namespace {

struct results {
    std::vector<float> logits, gradient, states, rest, decoded;
};
bool same(const results& a, const results& b) {
    const auto bits = [](const std::vector<float>& x, const std::vector<float>& y) {
        return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
    };
    CHECK(bits(a.logits, b.logits));
    CHECK(bits(a.gradient, b.gradient));
    CHECK(bits(a.states, b.states));
    CHECK(bits(a.rest, b.rest));
    CHECK(bits(a.decoded, b.decoded));
    return bits(a.gradient, b.gradient);
}

/// What a model makes of sequences of 5, 33, 1 and 60 tokens: forward and backward passes, and the last one decoded
/// beside others.
results results_of(const transformer<float>& model, int size, bool checkpointed = false) {
    const model_shape& shape = model.shape;
    const auto sequences = random_sequences(shape.vocabulary, {5, 33, 1, 60});
    opd::thread_team threads(size);
    training_pass<float> pass(model, threads, checkpointed);
    results r;
    const index_t rows = pass.set_sequences(sequences), v = shape.vocabulary, d = shape.width;
    CHECK(pass.first_row(3) == 39);
    r.logits.resize(static_cast<std::size_t>(rows * v));
    pass.forward(r.logits.data());
    pass.backward(coefficients<float>(rows * v).data(), r.gradient);
    r.states.resize(static_cast<std::size_t>(rows * d));
    pass.forward_states(r.states.data());
    r.rest.assign(static_cast<std::size_t>(model.layout.size), 0.5f);
    pass.backward_states(coefficients<float>(rows * d).data(), r.rest);
    kv_cache<float> cache; // 16 of a sequence, then token by token, beside others
    cache.resize(shape, 20, 64);
    forward_state<float> state;
    state.threads = model.large ? &threads : nullptr;
    for (index_t t = 15; t < 24; ++t) {
        std::vector<segment> segments;
        std::vector<std::int32_t> tokens;
        for (index_t slot = 0; slot < 20; ++slot) {
            const index_t from = t == 15 ? 0 : t;
            segments.push_back({.slot = slot, .start = from, .count = t + 1 - from});
            for (index_t i = from; i <= t; ++i)
                tokens.push_back((sequences[3][static_cast<std::size_t>(i)] + static_cast<std::int32_t>(slot)) %
                                 shape.vocabulary);
        }
        r.decoded.resize(tokens.size() * static_cast<std::size_t>(v));
        forward_rows<float>(model, segments, tokens, cache, state, false, r.decoded.data());
    }
    const float* of_last = r.decoded.data(); // the first slot has the sequence itself
    CHECK(std::memcmp(of_last, r.logits.data() + (39 + 23) * v, static_cast<std::size_t>(v) * sizeof(float)) == 0);
    return r;
}

std::vector<float> some_weights(const model_shape& shape) {
    transformer<float> model(shape);
    model.initialise(4);
    const auto jitter = coefficients<float>(model.layout.size); // norms start at 1, biases at 0
    for (std::size_t i = 0; i < model.weights.size(); ++i) model.weights[i] += 0.1f * jitter[i];
    return model.weights;
}

model_shape wide_shape(bool biases) {
    model_shape shape = biases ? other_family(small_shape(true), rope::scaling::llama3, true) : small_shape(false);
    shape.width = 256, shape.ffn = 520, shape.vocabulary = 1100, shape.head_dim = 12;
    return shape;
}

} // namespace

TEST_CASE("a large model, without copies and with its sequences together, has the bits of a small one") {
    CHECK(transformer<float>({.vocabulary = 66000, .width = 256, .heads = 1, .kv_heads = 1, .tied = true}).large);
    for (const bool biases : {true, false}) { // a tied head, or norms of q and k and a head of its own
        CAPTURE(biases);
        const model_shape shape = wide_shape(biases);
        const auto model = [&](bool large) {
            transformer<float> r(shape);
            CHECK_FALSE(r.large);
            r.large = large;
            r.weights = some_weights(shape);
            r.weights_changed();
            return r;
        };
        const results small = results_of(model(false), 2);
        for (const int size : {1, 2, 3}) CHECK(same(results_of(model(true), size), small));
    }
}

TEST_CASE("a model in bfloat16 has the bits of a float one of the same numbers") {
    for (const bool biases : {true, false}) {
        CAPTURE(biases);
        const model_shape shape = wide_shape(biases);
        const std::vector<float> masters = some_weights(shape);
        std::vector<float> numbers;
        for (const float x : masters) numbers.push_back(static_cast<float>(opd::bfloat16(x)));
        CHECK(numbers != masters);
        for (const bool large : {false, true}) {
            CAPTURE(large);
            transformer<float> plain(shape), halves(shape, storage::bfloat16);
            plain.large = halves.large = large;
            plain.weights = numbers, halves.weights = masters;
            plain.weights_changed(), halves.weights_changed();
            const results expected = results_of(plain, 2);
            CHECK(same(results_of(halves, 2), expected));
            CHECK(halves.weights == masters);
            const transformer<float> working = halves.working();
            CHECK(working.weights.empty());
            CHECK(same(results_of(working, 3, true), expected)); // gradient checkpointing
            plain.split = halves.split = 3;
            CHECK(same(results_of(halves, 1), results_of(plain, 1)));
        }
    }
    CHECK_THROWS_AS(transformer<double>(small_shape(true), storage::bfloat16), std::invalid_argument);
}

TEST_CASE("masters keep what an update changes below bfloat16's steps") {
    const model_shape shape = small_shape(true);
    transformer<float> plain(shape), halves(shape, storage::bfloat16);
    for (transformer<float>* m : {&plain, &halves}) {
        m->weights = some_weights(shape);
        m->weights_changed();
    }
    std::vector<float> gradient = coefficients<float>(plain.layout.size);
    adamw_state of_plain, of_halves;
    const auto rounded = [&] {
        for (std::size_t i = 0; i < plain.weights.size(); ++i)
            if (!(halves.stored[i] == opd::bfloat16(halves.weights[i]))) return false;
        return true;
    };
    const std::vector<opd::bfloat16> before = halves.stored;
    std::ptrdiff_t moved = 0;
    for (int step = 1; step <= 40; ++step) {
        adamw_step({}, 1e-5, gradient, of_plain, plain);
        adamw_step({}, 1e-5, gradient, of_halves, halves);
        CHECK(halves.weights == plain.weights);
        CHECK(rounded());
        const std::ptrdiff_t now =
            std::ssize(before) - std::inner_product(before.begin(), before.end(), halves.stored.begin(),
                                                    std::ptrdiff_t{0}, std::plus<>(), std::equal_to<>());
        if (step == 1) CHECK(now < std::ssize(before) / 10); // a step is far below most numbers' spacing
        if (step == 40) CHECK(now > 4 * moved);
        if (step == 1) moved = now;
    }
}

// What a pass leaves is compared by the thread that ran it, after its team has returned.
TEST_CASE("gradients of a pass that computes layers again have the bits of one that keeps them") {
    struct shaped {
        const char* name;
        model_shape shape;
    };
    model_shape llama = small_shape(false), one = small_shape(false), wide = small_shape(true);
    llama.qk_norm = false;
    one.layers = 1;
    wide.width = 256, wide.ffn = 520, wide.vocabulary = 300, wide.head_dim = 12; // products that a team shares
    shaped all[] = {{"qwen3", small_shape(false)},
                    {"qwen3, tied, wide", wide},
                    {"qwen2", other_family(small_shape(true), rope::scaling::none, false)},
                    {"llama", llama},
                    {"llama, biases, stretched", other_family(small_shape(false), rope::scaling::llama3, true)},
                    {"one layer", one}};
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    for (auto& [name, shape] : all) {
        CAPTURE(name);
        if (shape.layers > 1) shape.layers = 4;
        transformer<float> model(shape);
        model.initialise(6);
        const auto jitter = coefficients<float>(model.layout.size); // norms start at 1, biases at 0
        for (std::size_t i = 0; i < model.weights.size(); ++i) model.weights[i] += 0.1f * jitter[i];
        model.weights_changed();
        const index_t v = shape.vocabulary, d = shape.width;
        // packed; then more rows of fewer sequences, and fewer rows, in the same memory
        const std::vector<std::vector<std::vector<std::int32_t>>> batches = {
            random_sequences(shape.vocabulary, {5, 1, 20}), random_sequences(shape.vocabulary, {33, 14}),
            random_sequences(shape.vocabulary, {3, 2})};
        struct results {
            std::vector<float> logits, gradient, states, rest;
        };
        const auto run = [&](bool checkpointed, int size) {
            opd::thread_team threads(size);
            training_pass<float> pass(model, threads, checkpointed);
            std::vector<results> r(batches.size());
            for (std::size_t i = 0; i < r.size(); ++i) {
                const index_t rows = pass.set_sequences(batches[i]);
                r[i].logits.resize(static_cast<std::size_t>(rows * v));
                pass.forward(r[i].logits.data());
                pass.backward(coefficients<float>(rows * v).data(), r[i].gradient);
                r[i].states.resize(static_cast<std::size_t>(rows * d));
                pass.forward_states(r[i].states.data());
                pass.forward_states(r[i].states.data()); // what looks at log-probs alone goes forward and not back
                r[i].rest.assign(model.weights.size(), 0.5f);
                pass.backward_states(coefficients<float>(rows * d).data(), r[i].rest);
            }
            return r;
        };
        for (const bool large : {false, true}) { // each sequence by itself, all together
            CAPTURE(large);
            model.large = large;
            const std::vector<results> kept = run(false, 2);
            for (const int size : {1, 2, 3}) {
                CAPTURE(size);
                const std::vector<results> again = run(true, size);
                for (std::size_t i = 0; i < kept.size(); ++i) {
                    CAPTURE(i);
                    CHECK(same(again[i].logits, kept[i].logits));
                    CHECK(same(again[i].gradient, kept[i].gradient));
                    CHECK(same(again[i].states, kept[i].states));
                    CHECK(same(again[i].rest, kept[i].rest));
                }
            }
        }
    }
}

TEST_CASE("memory that grows with its rows takes what they need") {
    const model_shape shape = small_shape(true);
    transformer<float> model(shape);
    model.initialise(1);
    for (const bool checkpointed : {false, true}) {
        forward_state<float> state;
        state.checkpointed = checkpointed;
        for (const index_t rows : {5, 9, 10, 3}) {
            const auto most = static_cast<std::size_t>(std::max<index_t>(rows, rows == 3 ? 10 : 0));
            const auto tokens = random_sequences(shape.vocabulary, {static_cast<int>(rows)}).front();
            model_shape cached = shape;
            if (checkpointed) cached.layers = 1;
            kv_cache<float> cache;
            cache.resize(cached, 1, rows);
            const segment whole{.slot = 0, .start = 0, .count = rows};
            forward_states<float>(model, std::span(&whole, 1), tokens, cache, state, true);
            CHECK(state.layers.size() == 2);
            for (const auto& l : state.layers) {
                CHECK(l.x.capacity() == most * 6);
                CHECK(l.gu.capacity() == (checkpointed ? 0 : most * 20));
            }
            CHECK(state.shared.gu.capacity() == (checkpointed ? most * 20 : 0));
            CHECK(state.shared.x.empty());
        }
    }
}

TEST_CASE("each pair of numbers turns by its own frequency, stretched as the model says") {
    const auto all = [](const rope& r) {
        std::vector<double> f;
        for (index_t i = 0; i < 8; ++i) f.push_back(r.frequency(i, 16));
        return f;
    };
    const auto near = [](double x) { return doctest::Approx(x).epsilon(1e-13); };
    const rope plain{.base = 5e5};
    for (index_t i = 0; i < 8; ++i) CHECK(plain.frequency(i, 16) == near(std::pow(5e5, -static_cast<double>(i) / 8)));
    const auto linear = all({.base = 5e5, .how = rope::scaling::linear, .factor = 3});
    for (std::size_t i = 0; i < 8; ++i) CHECK(linear[i] == near(all(plain)[i] / 3));
    // Llama 3.1's own numbers: transformers 5.24 in float64 (scripts/make_hf_golden.py, rope_frequencies)
    const rope llama{
        .base = 5e5, .how = rope::scaling::llama3, .factor = 8, .low = 1, .high = 4, .original_length = 8192};
    const double expected[] = {1.0,
                               0.19392274474868576,
                               0.03760603093086393,
                               0.0072926647372171085,
                               0.0005248461609929547,
                               3.428102195952591e-05,
                               6.647869871181236e-06,
                               1.2891731721515574e-06};
    for (index_t i = 0; i < 8; ++i) CHECK(llama.frequency(8 * i, 128) == near(expected[i]));
}

TEST_CASE("without the head: the gradient of what it reads gives the others, and adds to a tied head's") {
    for (bool tied : {false, true}) {
        const model_shape shape{.vocabulary = 15,
                                .width = 20,
                                .layers = 2,
                                .heads = 4,
                                .kv_heads = 2,
                                .head_dim = 8,
                                .ffn = 24,
                                .tied = tied,
                                .max_length = 64};
        transformer<double> model(shape);
        model.initialise(9);
        const auto sequences = random_sequences(15, {3, 40, 17, 1});
        opd::thread_team threads(2);
        training_pass<double> pass(model, threads), other(model, threads);
        const index_t rows = pass.set_sequences(sequences), v = shape.vocabulary, d = shape.width;
        std::vector<double> logits(static_cast<std::size_t>(rows * v)), n(static_cast<std::size_t>(rows * d)),
            dn(n.size());
        std::vector<double> expected, grad(model.weights.size(), 7.0);
        pass.forward(logits.data());
        const auto dz = coefficients<double>(rows * v);
        pass.backward(dz.data(), expected);
        REQUIRE(other.set_sequences(sequences) == rows);
        other.forward_states(n.data());
        const double* w = model.at(model.layout.head);
        double* dw = grad.data() + model.layout.head.offset;
        std::fill_n(dw, v * d, 0.0);
        double wrong = 0;
        for (index_t r = 0; r < rows; ++r)
            for (index_t i = 0; i < v; ++i) {
                double z = 0;
                const auto at = static_cast<std::size_t>(r * v + i);
                for (index_t j = 0; j < d; ++j) {
                    const auto state = static_cast<std::size_t>(r * d + j);
                    z += n[state] * w[i * d + j];
                    dn[state] += dz[at] * w[i * d + j];
                    dw[i * d + j] += dz[at] * n[state];
                }
                wrong = std::max(wrong, std::abs(z - logits[at]));
            }
        CHECK(wrong < 1e-12);
        other.backward_states(dn.data(), grad);
        double error = 0, norm = 0;
        for (std::size_t i = 0; i < grad.size(); ++i) {
            error = std::max(error, std::abs(grad[i] - expected[i]));
            norm = std::max(norm, std::abs(expected[i]));
        }
        CHECK(error < 1e-12 * norm);
        CHECK(norm > 0);
        std::vector<double> none;
        CHECK_THROWS_AS(other.backward_states(dn.data(), none), std::invalid_argument);
    }
}
