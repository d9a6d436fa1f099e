// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A drafted token's logits are those of a sequence that went this way: the same bits, whatever tree it is a node of, in
// whatever batch, after a prefix read in whatever chunks; and so are the logits after the way's keys and values were
// moved to their places.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "model/model.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;

std::vector<std::int32_t> tokens_of(std::mt19937& random, std::size_t count) {
    std::vector<std::int32_t> r(count);
    for (auto& t : r) t = static_cast<std::int32_t>(random() % 15);
    return r;
}

struct tree {
    std::vector<std::int32_t> parents, tokens;
    std::vector<std::int32_t> path(std::int32_t node) const { // from the top
        std::vector<std::int32_t> r;
        for (; node >= 0; node = parents[static_cast<std::size_t>(node)]) r.insert(r.begin(), node);
        return r;
    }
};

enum class form { none, chain, star, any, two_chains };
constexpr form forms[] = {form::none, form::chain, form::star, form::any, form::two_chains};

tree tree_of(std::mt19937& random, form f) {
    const auto nodes = f == form::none ? 0 : 1 + static_cast<std::int32_t>(random() % 20);
    tree t;
    for (std::int32_t n = 0; n < nodes; ++n) {
        const auto any = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(n + 1)) - 1;
        t.parents.push_back(f == form::chain  ? n - 1
                            : f == form::star ? -1
                            : f == form::any  ? any
                                              : std::max(n - 2, -1));
        t.tokens.push_back(static_cast<std::int32_t>(random() % 15));
    }
    return t;
}

// The logits after these tokens, read at once in an empty cache.
std::vector<float> alone(const transformer<float>& model, const std::vector<std::int32_t>& tokens) {
    kv_cache<float> cache;
    cache.resize(model.shape, 1, static_cast<index_t>(tokens.size()));
    forward_state<float> state;
    std::vector<float> logits(tokens.size() * 15);
    const segment all{0, 0, static_cast<index_t>(tokens.size())};
    forward_rows(model, std::span(&all, 1), std::span<const std::int32_t>(tokens), cache, state, false, logits.data());
    return {logits.end() - 15, logits.end()};
}

bool same(const std::vector<float>& a, const float* b) { return std::memcmp(a.data(), b, 15 * sizeof(float)) == 0; }

} // namespace

TEST_CASE("the logits of a drafted token are those of plain decoding: {batch 1..33} x {chunk} x {tree}") {
    transformer<float> model(opd::test::small_shape());
    model.initialise(3);
    const auto longest = static_cast<index_t>(model.shape.max_length);
    int nodes = 0, wrong = 0, moved = 0, wrong_after = 0;
    for (index_t batch = 1; batch <= 33; batch = batch < 6 ? batch + 1 : batch + 9)
        for (const index_t chunk : {1, 3, 8, 40})
            for (const form f : forms) {
                std::mt19937 random(static_cast<std::uint32_t>(batch * 100 + chunk * 10 + static_cast<int>(f)));
                kv_cache<float> cache;
                cache.resize(model.shape, batch, longest);
                forward_state<float> state;
                std::vector<std::vector<std::int32_t>> prefixes;
                std::vector<tree> trees;
                for (index_t i = 0; i < batch; ++i) {
                    // the last token is the tree's root
                    prefixes.push_back(tokens_of(random, 2 + random() % static_cast<std::size_t>(longest - 24)));
                    trees.push_back(tree_of(random, random() % 4 == 0 ? form::none : f));
                    // the deepest is still a position of the model's
                }
                std::vector<index_t> read(prefixes.size(), 0);
                std::vector<segment> segments;
                std::vector<std::int32_t> tokens;
                for (bool all = false; !all;) { // chunk by chunk; those that are done wait
                    all = true;
                    segments.clear(), tokens.clear();
                    for (std::size_t i = 0; i < prefixes.size(); ++i) {
                        const index_t left = static_cast<index_t>(prefixes[i].size()) - 1 - read[i];
                        const index_t n = std::min(left, chunk);
                        if (n == 0) continue;
                        segments.push_back({static_cast<index_t>(i), read[i], n});
                        tokens.insert(tokens.end(), prefixes[i].begin() + read[i], prefixes[i].begin() + read[i] + n);
                        read[i] += n;
                        all = false;
                    }
                    if (segments.empty()) break;
                    std::vector<float> logits(tokens.size() * 15);
                    forward_rows(model, std::span<const segment>(segments), std::span<const std::int32_t>(tokens),
                                 cache, state, false, logits.data());
                }
                segments.clear(), tokens.clear();
                for (std::size_t i = 0; i < prefixes.size(); ++i) {
                    segments.push_back({static_cast<index_t>(i), read[i], 1, trees[i].parents});
                    tokens.push_back(prefixes[i].back());
                    tokens.insert(tokens.end(), trees[i].tokens.begin(), trees[i].tokens.end());
                }
                std::vector<float> logits(tokens.size() * 15);
                forward_rows(model, std::span<const segment>(segments), std::span<const std::int32_t>(tokens), cache,
                             state, false, logits.data());
                std::size_t row = 0;
                std::vector<std::vector<std::int32_t>> went = prefixes;
                for (std::size_t i = 0; i < prefixes.size(); ++i) {
                    wrong += !same(alone(model, prefixes[i]), logits.data() + 15 * row++);
                    for (std::int32_t n = 0; n < static_cast<std::int32_t>(trees[i].tokens.size()); ++n, ++row) {
                        auto way = prefixes[i];
                        for (const std::int32_t a : trees[i].path(n))
                            way.push_back(trees[i].tokens[static_cast<std::size_t>(a)]);
                        ++nodes;
                        wrong += !same(alone(model, way), logits.data() + 15 * row);
                    }
                    if (trees[i].tokens.empty()) continue;
                    // one way is taken, and the next token read after it
                    const auto last = static_cast<std::int32_t>(random() % trees[i].tokens.size());
                    const auto trunk = static_cast<index_t>(prefixes[i].size());
                    index_t to = trunk;
                    for (const std::int32_t a : trees[i].path(last)) {
                        if (trunk + a != to) cache.move(static_cast<index_t>(i), trunk + a, to), ++moved;
                        went[i].push_back(trees[i].tokens[static_cast<std::size_t>(a)]);
                        ++to;
                    }
                }
                segments.clear(), tokens.clear();
                for (std::size_t i = 0; i < went.size(); ++i) {
                    segments.push_back({static_cast<index_t>(i), static_cast<index_t>(went[i].size())});
                    went[i].push_back(static_cast<std::int32_t>(random() % 15));
                    tokens.push_back(went[i].back());
                }
                logits.resize(tokens.size() * 15);
                forward_rows(model, std::span<const segment>(segments), std::span<const std::int32_t>(tokens), cache,
                             state, false, logits.data());
                for (std::size_t i = 0; i < went.size(); ++i)
                    wrong_after += !same(alone(model, went[i]), logits.data() + 15 * i);
            }
    CHECK(nodes > 5000);
    CHECK(wrong == 0);
    CHECK(moved > 500);
    CHECK(wrong_after == 0);
}

TEST_CASE("a draft whose values are not finite changes nobody's logits but its own descendants'") {
    transformer<float> model(opd::test::small_shape());
    model.initialise(3);
    constexpr std::int32_t bad = 14;
    model.weights[static_cast<std::size_t>(model.layout.embedding.offset + bad * model.shape.width)] = NAN;
    std::mt19937 random(1);
    int sound = 0, wrong = 0;
    for (int world = 0; world < 60; ++world) {
        auto prefix = tokens_of(random, 5 + random() % 15);
        for (auto& t : prefix) t %= bad;
        tree t = tree_of(random, forms[1 + world % 4]);
        kv_cache<float> cache;
        cache.resize(model.shape, 1, model.shape.max_length);
        forward_state<float> state;
        const segment all{0, 0, static_cast<index_t>(prefix.size()), t.parents};
        std::vector<std::int32_t> tokens = prefix;
        tokens.insert(tokens.end(), t.tokens.begin(), t.tokens.end());
        std::vector<float> logits(tokens.size() * 15);
        forward_rows(model, std::span(&all, 1), std::span<const std::int32_t>(tokens), cache, state, false,
                     logits.data());
        wrong += !same(alone(model, prefix), logits.data() + 15 * (prefix.size() - 1));
        for (std::int32_t n = 0; n < static_cast<std::int32_t>(t.tokens.size()); ++n) {
            auto way = prefix;
            for (const std::int32_t a : t.path(n)) way.push_back(t.tokens[static_cast<std::size_t>(a)]);
            if (std::find(way.begin(), way.end(), bad) != way.end()) continue;
            ++sound;
            wrong += !same(alone(model, way), logits.data() + 15 * (prefix.size() + static_cast<std::size_t>(n)));
        }
    }
    CHECK(sound > 100);
    CHECK(wrong == 0);
}
