// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a learner's activations take, counted by malloc, is what opd-distil says before it takes it.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "hf/distil.hpp"
#include "model/model.hpp"
#include "opd/backends/cpu.hpp"
#include "pipeline/learner.hpp"
#include "support/counting_malloc.hpp"

namespace {

using namespace trainer;
using opd::test::asked;

constexpr int sequences = 3, length = 60;

std::vector<std::vector<std::int32_t>> tokens_of(const model_shape& s) {
    std::mt19937 random(1);
    std::vector<std::vector<std::int32_t>> r(sequences);
    for (auto& tokens : r)
        for (int i = 0; i < length; ++i)
            tokens.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(s.vocabulary)));
    return r;
}

/// Bytes that a first forward and backward pass asks for: nothing is asked for twice, and little is given back.
double bytes_of_pass(const transformer<float>& model, int size, bool checkpointed) {
    opd::thread_team threads(size);
    const auto inputs = tokens_of(model.shape);
    std::vector<float> gradient(model.weights.size());
    const long before = asked;
    training_pass<float> pass(model, threads, checkpointed);
    const index_t rows = pass.set_sequences(inputs);
    std::vector<float> states(static_cast<std::size_t>(rows * model.shape.width)), d_states(states.size(), 0.1F);
    pass.forward_states(states.data());
    pass.backward_states(d_states.data(), gradient);
    return static_cast<double>(asked - before);
}

model_shape shape_of(int vocabulary) {
    return {.vocabulary = vocabulary,
            .width = 64,
            .layers = 6,
            .heads = 8,
            .kv_heads = 2,
            .head_dim = 16,
            .ffn = 192,
            .max_length = 64};
}

} // namespace

TEST_CASE("activations take what is said, with and without gradient checkpointing") {
    model_shape biased = shape_of(50);
    biased.qk_norm = false, biased.attention_bias = biased.output_bias = true;
    model_shape large = shape_of(264000); // above 64 MiB of weights
    large.tied = true;
    for (const model_shape& shape : {shape_of(50), biased, large}) {
        const transformer<float> model(shape);
        CAPTURE(model.large);
        CHECK(model.large == (shape == large));
        for (const bool checkpointed : {false, true}) {
            CAPTURE(checkpointed);
            for (const int threads : {1, 2}) {
                CAPTURE(threads);
                const auto said =
                    static_cast<double>(hf::activation_bytes(shape, sequences, length, threads, checkpointed));
                const double took = bytes_of_pass(model, threads, checkpointed);
                CHECK(took <= 1.03 * said); // lists of tokens, rows and tiles
                // one thread may have done all
                CHECK(took >= (threads == 1 ? 0.995 : 0.75) * said);
            }
        }
        const auto said = [&](bool checkpointed) {
            return static_cast<double>(hf::activation_bytes(shape, 8, 320, 1, checkpointed));
        };
        CHECK(said(true) < 0.4 * said(false)); // of six layers
    }
}

TEST_CASE("a model and its optimiser take what is said, in float and in bfloat16") {
    model_shape large = shape_of(264000);
    large.tied = true;
    for (const model_shape& shape : {shape_of(50), large})
        for (const storage how : {storage::numbers, storage::bfloat16, storage::bfloat16_by_itself}) {
            CAPTURE(shape.vocabulary);
            CAPTURE(static_cast<int>(how));
            const hf::model_bytes said = hf::bytes_of(shape, how);
            const long before = asked;
            transformer<float> model(shape, how);
            model.weights_changed();
            const double taken = static_cast<double>(asked - before);
            const double masters = how == storage::bfloat16 ? 4.0 * static_cast<double>(model.layout.size) : 0;
            CHECK(taken - masters == doctest::Approx(static_cast<double>(said.model)).epsilon(0.02)); // and the layout
            if (how == storage::bfloat16_by_itself) continue;
            adamw_state state;
            std::vector<float> gradient(static_cast<std::size_t>(model.layout.size), 0.1F);
            adamw_step({}, 1e-3, gradient, state, model);
            CHECK(static_cast<double>(asked - before) - taken + masters ==
                  doctest::Approx(static_cast<double>(said.training)).epsilon(0.01));
        }
}

TEST_CASE("a learner takes as much less with the option as is said") {
    const model_shape shape = shape_of(50);
    transformer<float> student(shape);
    student.initialise(2);
    opd::cpu_backend backend{.threads = 1};
    row_batch batch;
    batch.inputs = tokens_of(shape);
    batch.rows = batch.kept = sequences * length;
    for (int i = 0; i <= sequences; ++i) batch.offsets.push_back(i * length);
    const auto n = static_cast<std::size_t>(batch.rows);
    batch.mask.assign(n, 1), batch.next.assign(n, 7), batch.log_mu.assign(n, -3.0F), batch.versions.assign(n, 0);
    teacher_cache cache;
    cache.what = teacher_cache::kind::hidden, cache.entries = shape.width;
    cache.states.assign(n * static_cast<std::size_t>(shape.width), 0.1F), cache.next_log_q.assign(n, -3.0F);
    const auto bytes = [&](bool checkpointed) {
        config c;
        c.distill.teacher_cache = "hidden", c.distill.gradient_checkpointing = checkpointed;
        adamw_state state;
        std::vector<float> gradient;
        const long before = asked;
        learner learn(c, student, state, backend, head_of(student));
        learn.update_with([&](double, std::vector<float>& g) {
            gradient = g;
            return 1.0;
        });
        learn.step(batch, cache, 1e-3, 0);
        return std::pair(static_cast<double>(asked - before), gradient);
    };
    bytes(false); // what the backend keeps
    const auto [kept, gradient] = bytes(false);
    const auto [again, same] = bytes(true);
    const auto said = [&](bool checkpointed) {
        return static_cast<double>(hf::activation_bytes(shape, sequences, length, 1, checkpointed));
    };
    CHECK(kept - again == doctest::Approx(said(false) - said(true)).epsilon(0.01));
    CHECK(gradient == same);
    CHECK(gradient.size() == student.weights.size());
}
