// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compare-model DIRECTORY [options]: how fast the transformer runs on a model directory of transformers. Prints
// tokens a second of a training step's forward and backward pass (reverse KL from hidden states to a teacher of random
// states under the same head, without the optimiser), of decoding greedily with a cache, and the process's peak memory.
// scripts/bench_model.sh runs it and PyTorch (bench/peer_torch_model.py) in turns.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>

#include "hf/model_files.hpp"
#include "model/model.hpp"
#include "model/teacher.hpp"
#include "pipeline/whole_rows.hpp"

namespace {

using namespace trainer;

struct options {
    std::string directory;
    int threads = 2, repeats = 3, sequences = 4, length = 128, prompt = 32, tokens = 32;
    bool checkpointed = false, halves = false;
    std::vector<int> batches = {1, 16};
    const char* who() const { return halves ? "opd bfloat16" : "opd"; }
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double peak_gigabytes() {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return static_cast<double>(u.ru_maxrss) * 1024e-9;
}

/// The least seconds of some calls, after one that is not timed.
template <class Call>
double least(int repeats, Call call) {
    call();
    double best = 1e300;
    for (int i = 0; i < repeats; ++i) {
        const double begin = now();
        call();
        best = std::min(best, now() - begin);
    }
    return best;
}

std::vector<std::int32_t> some_tokens(std::mt19937& noise, int count, int vocabulary) {
    std::vector<std::int32_t> r(static_cast<std::size_t>(count));
    for (std::int32_t& id : r) id = static_cast<std::int32_t>(noise() % static_cast<unsigned>(vocabulary));
    return r;
}

void train(const options& o, const transformer<float>& model) {
    opd::thread_team team(o.threads);
    opd::cpu_backend backend{.threads = o.threads};
    training_pass<float> pass(model, team, o.checkpointed);
    std::mt19937 noise(1);
    std::vector<std::vector<std::int32_t>> sequences;
    for (int i = 0; i < o.sequences; ++i) sequences.push_back(some_tokens(noise, o.length, model.shape.vocabulary));
    const index_t n = pass.set_sequences(sequences), v = model.shape.vocabulary, d = model.shape.width;
    const auto states = static_cast<std::size_t>(n * d);
    std::vector<float> x(states), dx(states), teacher(states), gradient(static_cast<std::size_t>(model.layout.size));
    std::normal_distribution<float> normal;
    for (float& t : teacher) t = normal(noise);
    double loss = 0;
    const double forward = least(o.repeats, [&] { pass.forward_states(x.data()); });
    const double whole = least(o.repeats, [&] {
        pass.forward_states(x.data());
        loss = with_heads(
            [&]<class Head>(const Head& own, const Head& its) {
                const student_states<Head> student{.x = opd::view(std::as_const(x).data(), n, d),
                                                   .w = own,
                                                   .dx = opd::view(dx.data(), n, d),
                                                   .dw = opd::view(gradient.data() + model.layout.head.offset, v, d)};
                const teacher_states<Head> of{.x = opd::view(std::as_const(teacher).data(), n, d), .w = its};
                return of_whole_rows(backend, {opd::choice::objective::reverse_kl}, {}, student, of, opd::env{}).loss;
            },
            model_head(model), model_head(model));
        pass.backward_states(dx.data(), gradient);
    });
    const double rows = static_cast<double>(n);
    fmt::print("{} train {} x {} tokens: {:.1f} tokens/s, forward without head {:.1f} (loss {:.4f})\n", o.who(),
               o.sequences, o.length, rows / whole, rows / forward, loss);
}

void decode(const options& o, const transformer<float>& model, int batch) {
    opd::thread_team team(o.threads);
    const index_t v = model.shape.vocabulary;
    kv_cache<float> cache;
    cache.resize(model.shape, batch, o.prompt + o.tokens);
    forward_state<float> state;
    state.threads = &team;
    std::vector<segment> segments;
    std::mt19937 noise(2);
    std::vector<std::int32_t> tokens = some_tokens(noise, batch * o.prompt, model.shape.vocabulary);
    for (int i = 0; i < batch; ++i) segments.push_back({.slot = i, .start = 0, .count = o.prompt});
    std::vector<float> logits;
    const auto step = [&] {
        logits.resize(tokens.size() * static_cast<std::size_t>(v));
        forward_rows<float>(model, segments, tokens, cache, state, false, logits.data());
        index_t row = 0;
        std::vector<std::int32_t> next;
        for (segment& s : segments) {
            row += s.count;
            const float* last = logits.data() + (row - 1) * v;
            next.push_back(static_cast<std::int32_t>(std::max_element(last, last + v) - last));
            s.start += s.count, s.count = 1;
        }
        tokens = std::move(next);
    };
    step(); // the prompts
    double best = 1e300, begin = now();
    for (int i = 1; i < o.tokens; ++i) {
        step();
        const double end = now();
        best = std::min(best, end - begin), begin = end;
    }
    fmt::print("{} decode batch {}: {:.1f} tokens/s in the best step\n", o.who(), batch, batch / best);
}

} // namespace

int main(int argc, char** argv) try {
    options o;
    CLI::App app("Tokens a second of the transformer on a model directory of transformers.", "opd-compare-model");
    app.add_option("directory", o.directory, "config.json and model.safetensors")->required();
    app.add_option("--threads", o.threads)->capture_default_str()->check(CLI::PositiveNumber);
    app.add_option("--repeats", o.repeats, "Of which the best counts")->capture_default_str();
    app.add_option("--sequences", o.sequences, "Of a training step; 0: none")->capture_default_str();
    app.add_option("--length", o.length, "Tokens of each")->capture_default_str();
    app.add_flag("--bfloat16", o.halves, "Weights in bfloat16, without masters");
    app.add_flag("--gradient-checkpointing", o.checkpointed, "Of a training step");
    app.add_option("--batches", o.batches, "Of decoding")->delimiter(',')->capture_default_str();
    app.add_option("--prompt", o.prompt, "Tokens before decoding")->capture_default_str();
    app.add_option("--tokens", o.tokens, "Decoded a sequence")->capture_default_str();
    CLI11_PARSE(app, argc, argv)
    const transformer<float> model = hf::model_directory(o.directory, std::max(o.length, o.prompt + o.tokens))
                                         .model<float>(o.halves ? storage::bfloat16_by_itself : storage::numbers);
    for (const int batch : o.batches) decode(o, model, batch);
    if (o.sequences > 0) train(o, model);
    fmt::print("{} peak memory: {:.2f} GB\n", o.who(), peak_gigabytes());
    return 0;
} catch (const std::exception& e) {
    fmt::print(stderr, "error: {}\n", e.what());
    return 1;
}
