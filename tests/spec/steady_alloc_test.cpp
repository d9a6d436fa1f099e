// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// In steady state drafting, sharing, choosing and verifying allocate nothing.
#include <cstdlib>
#include <doctest/doctest.h>
#include <new>
#include <random>
#include <vector>

#include "opd/spec/any_tuner.hpp"
#include "opd/spec/draft_budget.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/drafter_selector.hpp"
#include "opd/spec/ngram_table.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "opd/spec/verify.hpp"

namespace {
std::size_t allocations = 0;
}
// Not inlined: g++ 12 sees through one half of a pair and warns.
[[gnu::noinline]] void* operator new(std::size_t n) {
    ++allocations;
    if (void* p = std::malloc(n)) return p;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace {
using namespace opd::spec;
using opd::index_t;
constexpr index_t V = 300;

struct rows {
    std::vector<float> values;
    explicit rows(index_t n, bool laws) {
        std::mt19937 random(1);
        for (index_t i = 0; i < n * V; ++i) values.push_back(static_cast<float>(random() % 1000) / (laws ? 1 : 100));
    }
    opd::vector_view<const float> row(index_t r) const { return {values.data() + r * V, V}; }
    opd::matrix_view<const float> all() const { return {values.data(), static_cast<index_t>(values.size()) / V, V, V}; }
};
} // namespace

TEST_CASE("trees, their rates and shares: nothing after the first steps") {
    const rows logits(64, false);
    follow_rates rates;
    draft_builder tree;
    draft_budget budget;
    const step_cost cost({{1, 1}, {100, 2}});
    std::vector<index_t> widest(4);
    const std::vector<std::int32_t> chain = {4, 7, 9, 1, 2, 3};
    std::size_t before = 0;
    for (std::uint32_t step = 0; step < 300; ++step) {
        if (step == 200) before = allocations;
        // all shapes come within the first 200
        const draft_law law{.filter = {.top_k = step % 3 == 0 ? 20 : 0, .top_p = step % 2 == 0 ? 0.9f : 1},
                            .greedy = step % 5 == 0,
                            .seed = 1,
                            .sample = step,
                            .position = 3};
        tree.begin(rates);
        tree.imagine(4, 4);
        tree.begin(rates);
        tree.grow(-1, logits.row(step % 64), law, 4);
        for (std::int32_t depth = 1; depth < 4; ++depth) {
            const index_t n = tree.best_of_depth(depth, widest);
            for (index_t i = 0; i < n; ++i)
                tree.grow(widest[static_cast<std::size_t>(i)], logits.row((step + i) % 64), law, 4);
        }
        tree.graft(chain, 3);
        const draft_candidate running[] = {{tree.gains(), 10}, {tree.gains(), 100}};
        const index_t k = budget.share(running, cost)[1];
        const draft_tree drafts = tree.select(k);
        const verdict v = follow(drafts, [&](index_t r) {
            return drafts.size() > 0 ? drafts.tokens[static_cast<std::size_t>(r) % drafts.tokens.size()] : 0;
        });
        tree.learn(rates, v);
    }
    CHECK(allocations == before);
}

TEST_CASE("verification: nothing after the first call") {
    const rows p(6, true), q(6, true);
    const std::vector<std::int32_t> chain = {-1, 0, 1, 2, 3}, tree = {-1, -1, 0, 0, 1}, tokens = {1, 2, 3, 4, 5};
    verification memory;
    std::size_t before = 0;
    for (std::uint32_t step = 0; step < 50; ++step) {
        if (step == 1) before = allocations;
        keyed_coins coins(1, 2, step);
        memory.verify({tree, tokens}, p.all(), one_hot{}, coins);
        memory.verify({tree, tokens}, p.all(), iid_siblings<float>{q.all()}, coins);
        memory.verify({tree, tokens}, p.all(), without_replacement<float>{q.all()}, coins);
        memory.verify({chain, tokens}, p.all(), dense<float>{q.all()}, coins);
        memory.verify_block({chain, tokens}, p.all(), dense<float>{q.all()}, coins);
    }
    CHECK(allocations == before);
}

TEST_CASE("retrieval: a table never, drafts of an automaton never, and its texts only while they grow") {
    std::mt19937 random(2);
    std::vector<std::int32_t> text(4000), out(8);
    for (auto& t : text) t = static_cast<std::int32_t>(random() % 20);
    ngram_table table({.bytes = 1 << 16});
    suffix_automaton automaton(1 << 12);
    std::size_t before = allocations;
    table.learn_text(text);
    for (std::size_t i = 0; i < text.size(); ++i) table.draft(std::span(text).first(i), out);
    CHECK(allocations == before);

    // epochs of as many tokens: the memory of the one before the last is used again
    std::size_t in_epoch = 0;
    for (int epoch = 0; epoch < 12; ++epoch) {
        before = allocations;
        const std::int32_t t = automaton.begin();
        for (int i = 0; i < 1500; ++i) {
            automaton.append(t, text[static_cast<std::size_t>((i * 7 + epoch * 131) % 4000)]);
            automaton.draft(t, out);
        }
        if (automaton.texts() == 2) automaton.forget(1);
        in_epoch = allocations - before;
    }
    CHECK(in_epoch <= 1); // a list that is longer than any before

    prompt_groups groups;
    const auto answer = groups.begin(1, 0, text);
    before = allocations;
    for (int i = 0; i < 1000; ++i) groups.draft(answer, out), groups.longest(answer);
    CHECK(allocations == before);
}

TEST_CASE("choosers: nothing once their windows are full") {
    tuner_options o;
    o.window = 20;
    std::vector<any_tuner> tuners = {any_tuner(beg_mab(o)), any_tuner(ucb1(o)), any_tuner(published_beg_mab(o)),
                                     any_tuner(cost_profile(cost_profile_options{}))};
    drafter_selector drafter;
    std::size_t before = 0;
    for (std::uint64_t step = 0; step < 6000; ++step) {
        if (step == 5000) before = allocations;
        for (any_tuner& t : tuners) {
            keyed_uniforms u(1, step);
            const auto batch = static_cast<index_t>(1 + step % 4);
            const strategy s = t.choose(batch, u);
            t.heard(s, batch, static_cast<double>(step % 7), 1, u);
        }
        drafter.heard(drafter.choose(3), 3, 1, 1);
    }
    CHECK(allocations == before);
}
