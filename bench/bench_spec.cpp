// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What drafting costs beside the model, on one core: retrieval, learning a token and drafting eight, from texts of
// 4,000 tokens in which much comes again; a node's four children, drawn with the target's noise from a row of logits.
//
//     scripts/bench.sh bench_spec
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "opd/spec/draft_tree.hpp"
#include "opd/spec/ngram_table.hpp"
#include "opd/spec/suffix_automaton.hpp"

namespace {

using opd::index_t;

// Phrases of eight tokens, of which there are a hundred.
std::vector<std::int32_t> text(std::size_t tokens) {
    std::mt19937 random(1);
    std::vector<std::int32_t> phrases(800), r;
    for (auto& t : phrases) t = static_cast<std::int32_t>(random() % 5000);
    while (r.size() < tokens) {
        const auto from = phrases.begin() + static_cast<std::ptrdiff_t>(random() % 100 * 8);
        r.insert(r.end(), from, from + 8);
    }
    return r;
}

constexpr std::size_t length = 4000;

void automaton_append(benchmark::State& state) {
    const auto words = text(length);
    opd::spec::suffix_automaton a;
    for (auto _ : state) {
        a.clear();
        const auto t = a.begin();
        for (const std::int32_t w : words) a.append(t, w);
    }
    state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(length));
}
void automaton_draft(benchmark::State& state) {
    opd::spec::suffix_automaton a;
    const auto t = a.begin();
    for (const std::int32_t w : text(length)) a.append(t, w);
    std::vector<std::int32_t> next(8);
    for (auto _ : state) benchmark::DoNotOptimize(a.draft(t, next, 2));
    state.SetItemsProcessed(state.iterations());
}
const opd::spec::ngram_options keys = {.bytes = 1 << 23, .shortest = 2, .longest = 8};
void table_learn(benchmark::State& state) {
    const auto words = text(length);
    opd::spec::ngram_table t(keys);
    for (auto _ : state) t.learn_text(words);
    state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(length));
}
void table_draft(benchmark::State& state) {
    const auto words = text(length);
    opd::spec::ngram_table t(keys);
    t.learn_text(words);
    std::vector<std::int32_t> next(8);
    for (auto _ : state) benchmark::DoNotOptimize(t.draft(words, next));
    state.SetItemsProcessed(state.iterations());
}

void children(benchmark::State& state, float top_p) {
    const index_t v = state.range(0);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> z(static_cast<std::size_t>(v));
    for (float& x : z) x = normal(random);
    opd::spec::follow_rates rates;
    opd::spec::draft_builder b;
    opd::spec::draft_law law{.filter = {.temperature = 0.6f, .top_p = top_p}, .seed = 1};
    for (auto _ : state) {
        b.begin(rates);
        ++law.position;
        b.grow(-1, opd::vector_view<const float>(z.data(), v), law, 4);
        benchmark::DoNotOptimize(b.size());
    }
    state.SetItemsProcessed(state.iterations());
}

BENCHMARK(automaton_append);
BENCHMARK(automaton_draft);
BENCHMARK(table_learn);
BENCHMARK(table_draft);
BENCHMARK_CAPTURE(children, all, 1.0f)->Arg(15)->Arg(2000)->Arg(150000)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(children, top_p, 0.95f)->Arg(15)->Arg(2000)->Arg(150000)->Unit(benchmark::kMicrosecond);

} // namespace

BENCHMARK_MAIN();
