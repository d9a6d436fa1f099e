// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: always
//
// Trees of drafts: children against a search through all ids, the token that plain decoding draws, the best tree
// against all trees, and rates that come to what is true of simulated drafts.
#include <algorithm>
#include <array>
#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "opd/backends/cpu.hpp"
#include "opd/draw.hpp"
#include "opd/sched/archive.hpp"
#include "opd/spec/draft_tree.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::spec;
using opd::index_t;
using row = std::vector<float>;
using text = std::vector<std::int32_t>;

constexpr float no_mass = -std::numeric_limits<float>::infinity();

opd::vector_view<const float> view(const row& z) { return {z.data(), static_cast<index_t>(z.size())}; }

// By the words of filter.hpp, ids best first.
std::vector<index_t> kept_by_looking(const row& z, const opd::filter& f) {
    std::vector<index_t> ids;
    for (std::size_t v = 0; v < z.size(); ++v)
        if (z[v] > no_mass) ids.push_back(static_cast<index_t>(v));
    const auto logit = [&](index_t v) { return double(z[static_cast<std::size_t>(v)]) / double(f.temperature); };
    std::stable_sort(ids.begin(), ids.end(), [&](index_t a, index_t b) { return logit(a) > logit(b); });
    if (ids.empty()) return ids;
    const double top = logit(ids[0]);
    if (f.top_k > 0 && ids.size() > static_cast<std::size_t>(f.top_k)) ids.resize(static_cast<std::size_t>(f.top_k));
    while (f.min_p > 0 && ids.size() > 1 && std::exp(logit(ids.back()) - top) < double(f.min_p)) ids.pop_back();
    double all = 0, sum = 0;
    for (const index_t v : ids) all += std::exp(logit(v) - top);
    std::size_t n = 0;
    while (n < ids.size() && sum < double(f.top_p) * (1 - 1e-6) * all) sum += std::exp(logit(ids[n++]) - top);
    if (f.top_p < 1) ids.resize(n);
    return ids;
}

std::vector<index_t> best_by_looking(const row& z, const opd::filter& f, const opd::noise_row* noise, index_t count) {
    std::vector<index_t> ids = kept_by_looking(z, noise != nullptr ? f : opd::filter{});
    if (noise != nullptr) {
        std::sort(ids.begin(), ids.end());
        const auto score = [&](index_t v) {
            return opd::gumbel_score(double(z[static_cast<std::size_t>(v)]) * (1 / double(f.temperature)),
                                     noise->bits(0, static_cast<std::uint32_t>(v)));
        };
        std::stable_sort(ids.begin(), ids.end(), [&](index_t a, index_t b) { return score(a) > score(b); });
    }
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(count)));
    return ids;
}

row random_row(std::mt19937& random, index_t v) {
    const double wide = std::vector<double>{0.1, 1, 4, 30}[random() % 4];
    std::normal_distribution<double> normal(0, wide);
    row z;
    for (index_t i = 0; i < v; ++i) {
        double x = normal(random);
        if (random() % 2 == 0) x = std::round(x); // ties
        z.push_back(random() % 8 == 0 ? no_mass : static_cast<float>(x));
    }
    z[random() % z.size()] = 1;
    return z;
}
opd::filter random_filter(std::mt19937& random) {
    opd::filter f;
    f.temperature = std::vector<float>{1, 0.6f, 2.5f}[random() % 3];
    if (random() % 3 == 0) f.top_k = static_cast<index_t>(1 + random() % 10);
    if (random() % 3 == 0) f.top_p = 0.3f + 0.1f * static_cast<float>(random() % 7);
    if (random() % 3 == 0) f.min_p = 0.02f;
    return f;
}

opd::noise_row noise_of(const draft_law& law, std::int32_t depth) {
    return {law.seed, opd::noise_stream::rollout, law.sample, law.position + static_cast<std::uint32_t>(depth)};
}

text path(const draft_builder& b, index_t n) {
    text t;
    for (; n >= 0; n = b.parent(n)) t.insert(t.begin(), b.token(n));
    return t;
}

} // namespace

TEST_CASE("children: the best ids under the filter and the noise, as by looking at all") {
    child_search search;
    std::mt19937 random(1);
    for (int trial = 0; trial < 3000; ++trial) {
        CAPTURE(trial);
        const row z = random_row(random, static_cast<index_t>(1 + random() % (trial % 20 == 0 ? 3000 : 40)));
        const opd::filter f = random_filter(random);
        const opd::noise_row noise(random(), opd::noise_stream::rollout, random(), random() % 1000);
        const auto count = static_cast<index_t>(1 + random() % 9);
        for (const opd::noise_row* n : {&noise, static_cast<const opd::noise_row*>(nullptr)}) {
            const auto expected = best_by_looking(z, f, n, count);
            const auto got = search.best(view(z), f, n, count);
            REQUIRE(got.size() == expected.size());
            for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(got[i].id == expected[i]);
        }
    }
}

TEST_CASE("what is no logit is nobody's child") {
    child_search search;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const row z = {nan, 1, no_mass, -no_mass, 2};
    const opd::noise_row noise(1, opd::noise_stream::rollout, 2, 3);
    for (const opd::filter& f : {opd::filter{}, opd::filter{.top_p = 0.999999f}})
        for (const opd::noise_row* n : {&noise, static_cast<const opd::noise_row*>(nullptr)}) {
            const auto got = search.best(view(z), f, n, 5);
            CHECK(got.size() == 2);
            for (const scored_id& x : got) CHECK((x.id == 1 || x.id == 4));
        }
    CHECK(search.best(view({no_mass, nan}), {}, &noise, 5).empty());
    CHECK(search.best(view(row{}), {}, nullptr, 5).empty());
}

TEST_CASE("the first child by the target's own logits is the token that plain decoding draws") {
    opd::cpu_backend be;
    child_search search;
    std::mt19937 random(2);
    for (int trial = 0; trial < 60; ++trial) {
        const index_t n = 20, v = static_cast<index_t>(1 + random() % (trial % 10 == 0 ? 2500 : 60));
        const opd::filter f = random_filter(random);
        std::vector<float> z;
        for (index_t r = 0; r < n; ++r) {
            const row one = random_row(random, v);
            z.insert(z.end(), one.begin(), one.end());
        }
        std::vector<std::uint64_t> sample(static_cast<std::size_t>(n));
        std::vector<std::uint32_t> position(static_cast<std::size_t>(n));
        for (auto& s : sample) s = (std::uint64_t{random()} << 32) + random();
        for (auto& p : position) p = random() % 5000;
        std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
        std::vector<float> log_mu(static_cast<std::size_t>(n));
        const auto draw = [&](const auto& design) {
            opd::draw(be, opd::view(z.data(), n, v), design,
                      {.seed = 77,
                       .sample = opd::view(std::as_const(sample).data(), n),
                       .position = opd::view(std::as_const(position).data(), n)},
                      opd::drawn<>{.ids = opd::view(ids.data(), n, 1), .log_mu = opd::view(log_mu.data(), n, 1)},
                      {.filter = f});
        };
        for (const bool greedy : {false, true}) {
            greedy ? draw(opd::design::greedy{}) : draw(opd::design::gumbel{});
            for (index_t r = 0; r < n; ++r) {
                const follow_rates rates;
                draft_builder b;
                b.begin(rates);
                const draft_law law{.filter = f,
                                    .greedy = greedy,
                                    .seed = 77,
                                    .sample = sample[std::size_t(r)],
                                    .position = position[std::size_t(r)]};
                b.grow(-1, opd::vector_view<const float>{z.data() + r * v, v}, law, 3);
                REQUIRE(b.token(0) == ids[std::size_t(r)]);
            }
        }
    }
}

TEST_CASE("keyed drafts are followed as often as they must: sum over v of 1/sum over u of max(p_u/p_v, q_u/q_v)") {
    const std::vector<double> p = {.5, .3, .15, .05}, q = {.2, .4, .1, .3};
    double expected = 0;
    for (std::size_t v = 0; v < p.size(); ++v) {
        double sum = 0;
        for (std::size_t u = 0; u < p.size(); ++u) sum += std::max(p[u] / p[v], q[u] / q[v]);
        expected += 1 / sum;
    }
    row log_p, log_q;
    for (const double x : p) log_p.push_back(static_cast<float>(std::log(x)));
    for (const double x : q) log_q.push_back(static_cast<float>(std::log(x)));
    const follow_rates rates;
    draft_builder b;
    constexpr int n = 40000;
    int same = 0, deeper = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
        const draft_law law{.seed = 5, .sample = 9, .position = 2 * i};
        b.begin(rates);
        b.grow(-1, view(log_q), law, 1);
        b.grow(0, view(log_q), law, 1);
        same += opd::gumbel_max(noise_of(law, 0), 0, log_p.data(), 4) == b.token(0);
        deeper += opd::gumbel_max(noise_of(law, 1), 0, log_p.data(), 4) == b.token(1);
    }
    const double sigma = std::sqrt(n * expected * (1 - expected));
    CHECK(std::abs(same - n * expected) < 5 * sigma);
    CHECK(std::abs(deeper - n * expected) < 5 * sigma);
}

TEST_CASE("the target's token is among few children that know its noise, and among more that do not") {
    std::mt19937 random(6);
    std::normal_distribution<float> normal(0, 1);
    child_search search;
    constexpr int n = 4000;
    std::array<double, 4> keyed{}, plain{}; // among 1, 2, 4, 8
    for (std::uint32_t i = 0; i < n; ++i) {
        row p, q;
        for (int v = 0; v < 200; ++v) p.push_back(2 * normal(random)), q.push_back(p.back() + 0.7f * normal(random));
        const opd::noise_row noise(2, opd::noise_stream::rollout, 1, i);
        const auto own = static_cast<std::int32_t>(opd::gumbel_max(noise, 0, p.data(), 200));
        for (const opd::noise_row* with : {&noise, static_cast<const opd::noise_row*>(nullptr)}) {
            const auto children = search.best(view(q), {}, with, 8);
            for (std::size_t k = 0; k < 8; ++k)
                if (children[k].id == own)
                    for (std::size_t among = 0; among < 4; ++among)
                        (with != nullptr ? keyed : plain)[among] += k < (std::size_t{1} << among) ? 1.0 / n : 0;
        }
    }
    for (std::size_t k = 0; k < 4; ++k)
        MESSAGE("among " << (1 << k) << ": " << keyed[k] << ", by probability " << plain[k]);
    CHECK(keyed[0] > 2 * plain[0]);
    CHECK(keyed[1] > plain[3]);
    CHECK(keyed[3] > 0.95);
}

namespace {

// A tree that grew by chance, from logits that are a function of the path.
struct grown {
    follow_rates rates;
    draft_builder tree;
    draft_law law;
    std::uint32_t seed;
    row logits(const text& t) const {
        std::seed_seq s(t.begin(), t.end());
        std::uint32_t words[1];
        s.generate(words, words + 1);
        std::mt19937 random(words[0] ^ seed);
        return random_row(random, 7);
    }
    explicit grown(std::uint32_t seed_, int steps = 3) : seed(seed_) {
        std::mt19937 random(seed);
        for (int i = 0; i < 300; ++i) rates.learn(static_cast<std::int32_t>(random() % 640), random() % 3 == 0);
        law = {.filter = random_filter(random), .greedy = random() % 4 == 0, .seed = seed, .sample = 3, .position = 8};
        tree.begin(rates);
        std::vector<bool> done(100);
        for (int i = 0; i < steps; ++i) {
            const auto n = i == 0 ? -1 : static_cast<index_t>(random() % (tree.size() + 1)) - 1;
            if (random() % 4 == 0) {
                text chain = path(tree, n);
                for (int k = 0; k < 2; ++k) chain.push_back(static_cast<std::int32_t>(random() % 7));
                tree.graft(chain, static_cast<std::int32_t>(1 + random() % 20));
            } else if (!done[static_cast<std::size_t>(n + 1)]) {
                done[static_cast<std::size_t>(n + 1)] = true;
                tree.grow(n, view(logits(path(tree, n))), law, static_cast<index_t>(1 + random() % 3));
            }
        }
    }
};

} // namespace

TEST_CASE("any tree: parents are earlier, no path is there twice, children are keyed by their position, reach falls") {
    for (std::uint32_t seed = 0; seed < 300; ++seed) {
        CAPTURE(seed);
        const grown g(seed, 8);
        std::map<text, int> paths;
        for (index_t n = 0; n < g.tree.size(); ++n) {
            REQUIRE(g.tree.parent(n) < n);
            REQUIRE(++paths[path(g.tree, n)] == 1);
            REQUIRE(static_cast<std::size_t>(g.tree.depth(n)) == path(g.tree, n).size());
            REQUIRE(g.tree.reach(n) < g.tree.reach(g.tree.parent(n)));
            REQUIRE(g.tree.reach(n) > 0);
        }
    }
    // a child's noise is that of its own position
    for (std::uint32_t seed = 0; seed < 50; ++seed) {
        grown g(seed, 0);
        g.law.greedy = false;
        const auto expect = [&](index_t parent, index_t first, index_t count) {
            const opd::noise_row noise = noise_of(g.law, g.tree.depth(parent));
            const auto ids = best_by_looking(g.logits(path(g.tree, parent)), g.law.filter, &noise, count);
            for (std::size_t i = 0; i < ids.size(); ++i) {
                REQUIRE(g.tree.token(first + static_cast<index_t>(i)) == ids[i]);
                REQUIRE(g.tree.parent(first + static_cast<index_t>(i)) == parent);
            }
        };
        index_t at = 0;
        for (const index_t parent : {-1, 0, 1}) {
            if (parent >= g.tree.size()) break;
            const index_t n = g.tree.grow(parent, view(g.logits(path(g.tree, parent))), g.law, 3);
            expect(parent, at, 3);
            at += n;
        }
        REQUIRE(at == g.tree.size());
    }
}

TEST_CASE("reach is the product of the rates: by rank and gap, by matched length, and the better one of a node that "
          "both say") {
    follow_rates rates;
    for (std::int32_t depth = 1; depth < 4; ++depth)
        for (const double gap : {0.1, 0.3, 0.7, 1.5, 3.0, 9.0})
            for (std::int32_t rank = 0; rank < 3; ++rank)
                rates.learn(follow_rates::by_rank(depth, rank, gap), (rank == 0) == (gap > 1)); // no two alike
    draft_builder b;
    b.begin(rates);
    const draft_law greedy{.greedy = true};
    b.grow(-1, view({0, 3, 2.7f, 1}), greedy, 2); // 1 before 2, by 0.3
    const double first = rates.rate(follow_rates::by_rank(1, 0, 0.3)),
                 second = rates.rate(follow_rates::by_rank(1, 1, 0.3));
    CHECK(b.reach(0) == first);
    CHECK(b.reach(1) == second);
    b.grow(1, view({5, no_mass}), greedy, 3); // nothing beside it
    CHECK(b.reach(2) == doctest::Approx(second * rates.rate(follow_rates::by_rank(2, 0, 100))));
    CHECK(b.graft(text{2, 0, 6}, 7) == 1);
    CHECK(b.size() == 4);
    const double one = rates.rate(follow_rates::by_match(1, 7)), two = rates.rate(follow_rates::by_match(2, 7)),
                 three = rates.rate(follow_rates::by_match(3, 7));
    REQUIRE(one > second);
    CHECK(b.reach(1) == one);
    CHECK(b.reach(2) == doctest::Approx(one * std::max(two, rates.rate(follow_rates::by_rank(2, 0, 100)))));
    CHECK(b.reach(3) == doctest::Approx(b.reach(2) * three));
    CHECK(b.reach(0) == first);
    CHECK(b.token(3) == 6);
    // a node that a chain had before gets its rank, and those below it their share
    b.begin(rates);
    b.graft(text{2, 5}, 1);
    CHECK(b.grow(-1, view({0, 2, 9, 1}), greedy, 2) == 2);
    CHECK(b.size() == 3);
    CHECK(b.reach(0) == rates.rate(follow_rates::by_rank(1, 0, 7)));
    CHECK(b.reach(1) == doctest::Approx(b.reach(0) * rates.rate(follow_rates::by_match(2, 1))));
}

TEST_CASE("merging: chains and children in any order give the same nodes with the same reach") {
    for (std::uint32_t seed = 0; seed < 100; ++seed) {
        std::mt19937 random(seed);
        const follow_rates rates;
        const grown g(seed, 0);
        std::vector<text> chains;
        for (int i = 0; i < 3; ++i) {
            text t;
            for (int k = 0; k < 4; ++k) t.push_back(static_cast<std::int32_t>(random() % 2));
            chains.push_back(t);
        }
        std::map<text, double> expected;
        for (const bool chains_first : {true, false}) {
            draft_builder b;
            b.begin(rates);
            if (chains_first)
                for (const text& t : chains) b.graft(t, 5);
            b.grow(-1, view(g.logits({})), g.law, 3);
            if (!chains_first)
                for (const text& t : chains) b.graft(t, 5);
            std::map<text, double> got;
            for (index_t n = 0; n < b.size(); ++n) got[path(b, n)] = b.reach(n);
            REQUIRE(got.size() == static_cast<std::size_t>(b.size()));
            if (chains_first) expected = got;
            REQUIRE(got == expected);
        }
        for (const text& t : chains)
            for (std::size_t k = 1; k <= t.size(); ++k)
                REQUIRE(expected.count(text(t.begin(), t.begin() + static_cast<std::ptrdiff_t>(k))) == 1);
    }
}

TEST_CASE("selection: no other tree of as many nodes has a larger sum of reaches") {
    int larger = 0;
    for (std::uint32_t seed = 0; seed < 150; ++seed) {
        CAPTURE(seed);
        grown g(seed, 4);
        const auto n = static_cast<std::size_t>(g.tree.size());
        if (n > 12) continue;
        larger += n > 6;
        const std::vector<double> gains(g.tree.gains().begin(), g.tree.gains().end());
        REQUIRE(gains.size() == n);
        REQUIRE(std::is_sorted(gains.rbegin(), gains.rend()));
        std::vector<double> most(n + 1, 0);
        for (std::uint32_t set = 0; set < 1u << n; ++set) {
            double sum = 0;
            std::size_t count = 0;
            bool closed = true;
            for (std::size_t i = 0; i < n; ++i) {
                if ((set >> i & 1) == 0) continue;
                const std::int32_t p = g.tree.parent(static_cast<index_t>(i));
                closed = closed && (p < 0 || (set >> p & 1) != 0);
                sum += g.tree.reach(static_cast<index_t>(i)), ++count;
            }
            if (closed) most[count] = std::max(most[count], sum);
        }
        for (index_t k = 0; k <= static_cast<index_t>(n) + 2; ++k) {
            const draft_tree t = g.tree.select(k);
            const auto count = static_cast<std::size_t>(t.size());
            REQUIRE(count == std::min(static_cast<std::size_t>(k), n));
            double sum = 0;
            for (std::size_t i = 0; i < count; ++i) {
                const index_t node = g.tree.chosen()[i];
                REQUIRE(t.tokens[i] == g.tree.token(node));
                const std::int32_t p = t.parents[i];
                REQUIRE(p < static_cast<std::int32_t>(i));
                REQUIRE((p < 0 ? -1 : g.tree.chosen()[static_cast<std::size_t>(p)]) == g.tree.parent(node));
                sum += g.tree.reach(node);
            }
            REQUIRE(sum == doctest::Approx(most[count]));
            REQUIRE(sum == doctest::Approx(std::accumulate(gains.begin(),
                                                           gains.begin() + static_cast<std::ptrdiff_t>(count), 0.0)));
        }
    }
    CHECK(larger > 30);
}

TEST_CASE("the best of a depth: those to grow next") {
    const follow_rates rates;
    draft_builder b;
    b.begin(rates);
    const draft_law greedy{.greedy = true};
    b.grow(-1, view({0, 3, 2, 1}), greedy, 3);
    b.grow(0, view({0, 3, 2, 1}), greedy, 2);
    b.grow(1, view({0, 3, 2, 1}), greedy, 2);
    std::vector<index_t> out(3);
    CHECK(b.best_of_depth(1, std::span(out).first(2)) == 2);
    CHECK(out[0] == 0);
    CHECK(out[1] == 1);
    CHECK(b.best_of_depth(2, out) == 3);
    CHECK(out == std::vector<index_t>{3, 4, 5});
    CHECK(b.reach(4) == b.reach(5)); // the second below the first, the first below the second
    CHECK(b.best_of_depth(3, out) == 0);
}

TEST_CASE("learning: the verified nodes below what was followed, and no other") {
    follow_rates rates;
    draft_builder b;
    const draft_law greedy{.greedy = true};
    b.begin(rates);
    const row z = {0, 30, 20, 10}; // gaps of the last level
    b.grow(-1, view(z), greedy, 3);
    b.grow(0, view(z), greedy, 3);
    b.grow(1, view(z), greedy, 3);
    const auto cell = [](std::int32_t depth, std::int32_t rank) { return follow_rates::by_rank(depth, rank, 9); };
    const auto before = rates;
    const draft_tree t = b.select(5);
    REQUIRE(t.size() == 5);
    // the second child of the prefix is followed, and below it nothing
    std::size_t second = 0;
    while (t.parents[second] != -1 || t.tokens[second] != 2) ++second;
    std::map<std::pair<std::int32_t, std::int32_t>, int> tried;
    for (std::size_t i = 0; i < 5; ++i)
        if (t.parents[i] == -1 || t.parents[i] == static_cast<std::int32_t>(second))
            ++tried[{b.depth(b.chosen()[i]), 3 - (t.tokens[i] == 1 ? 3 : t.tokens[i] == 2 ? 2 : 1)}];
    b.learn(rates, {1, static_cast<index_t>(second), 0});
    for (std::int32_t depth = 1; depth <= 3; ++depth)
        for (std::int32_t rank = 0; rank < 4; ++rank) {
            CAPTURE(depth);
            CAPTURE(rank);
            CHECK(rates.tried(cell(depth, rank)) == tried[{depth, rank}]);
        }
    CHECK(rates.rate(cell(1, 1)) > before.rate(cell(1, 1)));
    CHECK(rates.rate(cell(1, 0)) < before.rate(cell(1, 0)));
    // nothing is followed, of a chain
    b.begin(rates);
    b.graft(text{4, 5, 6}, 3);
    b.select(2);
    b.learn(rates, {0, -1, 9});
    CHECK(rates.tried(follow_rates::by_match(1, 3)) == 1);
    CHECK(rates.tried(follow_rates::by_match(2, 3)) == 0);
    b.select(3);
    b.learn(rates, {2, 1, 9});
    CHECK(rates.tried(follow_rates::by_match(1, 3)) == doctest::Approx(2 - 1.0 / 200));
    CHECK(rates.tried(follow_rates::by_match(2, 3)) == 1);
    CHECK(rates.tried(follow_rates::by_match(3, 3)) == 1);
    CHECK(rates.rate(follow_rates::by_match(2, 3)) > rates.rate(follow_rates::by_match(3, 3)));
    // a chain's tokens count among the first children of any kind
    follow_rates chains;
    for (int i = 0; i < 20; ++i) chains.learn(follow_rates::by_match(2, 3), false);
    CHECK(chains.tried(follow_rates::any_gap(2, 0)) == chains.tried(follow_rates::by_match(2, 3)));
    CHECK(chains.tried(follow_rates::any_gap(1, 0)) == 0);
    CHECK(chains.tried(follow_rates::any_gap(2, 1)) == 0);
    CHECK(chains.rate(follow_rates::any_gap(2, 0)) < 0.2);
    CHECK(chains.rate(follow_rates::any_gap(3, 0)) < 0.3); // by those of other depths
}

TEST_CASE("rates: the formula; a cell leans on all depths, those on what is usual; old trials fade") {
    follow_rates r({.memory = 10, .prior_weight = 2});
    const std::int32_t c = follow_rates::by_rank(3, 1, 0.6), other = follow_rates::by_rank(5, 1, 0.7),
                       far = follow_rates::by_rank(3, 1, 0.4);
    CHECK(c != other);
    const double prior = r.rate(c);
    CHECK(prior == r.rate(far));
    for (const bool x : {true, true, false}) r.learn(c, x);
    const double tried = (1 * 0.9 + 1) * 0.9 + 1, followed = (1 * 0.9 + 1) * 0.9;
    const double pool = (followed + 2 * prior) / (tried + 2);
    CHECK(r.rate(c) == doctest::Approx((followed + 2 * pool) / (tried + 2)));
    CHECK(r.rate(other) == doctest::Approx(pool));
    CHECK(r.rate(far) == prior);
    for (int i = 0; i < 1000; ++i) r.learn(c, true);
    CHECK(r.rate(c) > 0.95);
    CHECK(r.rate(c) < 1);
    for (int i = 0; i < 40; ++i) r.learn(c, false);
    CHECK(r.rate(c) < 0.1);
    // what lies beyond the table counts as its last
    CHECK(follow_rates::by_rank(12, 7, 5) == follow_rates::by_rank(90, 60, 1e300));
    CHECK(follow_rates::by_match(12, 17) == follow_rates::by_match(90, 1000));
    CHECK(follow_rates::by_match(1, 0) == follow_rates::by_match(0, 1));
    for (const auto& [a, b] : std::vector<std::pair<int, int>>{{1, 2}, {2, 3}, {4, 5}, {8, 9}, {16, 17}})
        CHECK(follow_rates::by_match(1, a) != follow_rates::by_match(1, b));
    CHECK(follow_rates::by_match(1, 5) == follow_rates::by_match(1, 8));
    for (const double gap : {0.25, 0.5, 1.0, 2.0, 4.0})
        CHECK(follow_rates::by_rank(1, 0, gap * 0.99) + 1 == follow_rates::by_rank(1, 0, gap));
}

TEST_CASE("what is promised is what comes: the sum of reaches is the mean number of tokens that are followed") {
    // the drafter's logits are the target's with noise; by turns better and worse
    std::mt19937 random(4);
    std::normal_distribution<float> normal(0, 1);
    follow_rates rates;
    draft_builder b;
    double promised = 0, came = 0;
    for (std::uint32_t i = 0; i < 9000; ++i) {
        const float off = i < 4000 ? 0.3f : 1.5f;
        const draft_law law{.seed = 1, .sample = i, .position = 50};
        b.begin(rates);
        std::map<text, std::pair<row, row>> laws; // the target's and the drafter's
        const auto at = [&](const text& t) -> const std::pair<row, row>& {
            auto& both = laws[t];
            if (both.first.empty())
                for (int v = 0; v < 12; ++v) {
                    both.first.push_back(2 * normal(random));
                    both.second.push_back(both.first.back() + off * normal(random));
                }
            return both;
        };
        b.grow(-1, view(at({}).second), law, 3);
        for (const index_t n : {0, 1}) b.grow(n, view(at(path(b, n)).second), law, 3);
        b.grow(3, view(at(path(b, 3)).second), law, 2);
        const draft_tree t = b.select(6);
        const auto own = [&](index_t r) {
            const text prefix = r == 0 ? text{} : path(b, b.chosen()[static_cast<std::size_t>(r - 1)]);
            return opd::gumbel_max(noise_of(law, static_cast<std::int32_t>(prefix.size())), 0, at(prefix).first.data(),
                                   12);
        };
        const verdict v = follow(t, own);
        if (i == 4000) promised = came = 0;
        if ((i > 2000 && i < 4000) || i > 7000) {
            for (std::size_t k = 0; k < 6; ++k) promised += b.gains()[k];
            came += static_cast<double>(v.accepted);
        }
        if (i == 3999 || i == 8999) {
            CAPTURE(i);
            MESSAGE("promised " << promised << ", came " << came);
            CHECK(promised == doctest::Approx(came).epsilon(0.04));
        }
        b.learn(rates, v);
    }
}

TEST_CASE("a tree that is not drafted yet: the shape, and the rates of a rank whatever the gap") {
    follow_rates rates;
    for (int i = 0; i < 50; ++i)
        for (const double gap : {0.1, 3.0}) {
            rates.learn(follow_rates::by_rank(1, 0, gap), gap > 1 || i % 2 == 0);
            rates.learn(follow_rates::by_rank(1, 1, gap), gap < 1 && i % 2 == 1);
        }
    const double first = rates.rate(follow_rates::any_gap(1, 0)), second = rates.rate(follow_rates::any_gap(1, 1));
    CHECK(first == doctest::Approx(0.75).epsilon(0.02));
    CHECK(second == doctest::Approx(0.25).epsilon(0.1));
    CHECK(rates.rate(follow_rates::any_gap(2, 0)) == doctest::Approx(0.75).epsilon(0.05)); // as of all depths
    draft_builder b;
    b.begin(rates);
    b.imagine(3, 2);
    CHECK(b.size() == 2 + 4 + 4);
    CHECK(b.gains()[0] == first);
    CHECK(b.reach(1) == second);
    for (index_t n = 0; n < b.size(); ++n)
        CHECK(b.reach(n) ==
              doctest::Approx(b.reach(b.parent(n)) * rates.rate(follow_rates::any_gap(b.depth(n), n % 2))));
    for (const index_t n : {6, 7}) CHECK(b.parent(n) == 2); // the best of depth 2, and the next
    b.imagine(0, 3);
    CHECK(b.size() == 0);
    b.imagine(4, 1);
    CHECK(b.size() == 4);
    CHECK(b.depth(3) == 4);
}

TEST_CASE("rates that are saved go on as if they had not been; what is no state is refused") {
    follow_rates r, again;
    for (int i = 0; i < 100; ++i) r.learn(i % 640, i % 3 == 0);
    opd::sched::archive_writer w;
    w(r);
    opd::sched::archive_reader reader(w.bytes);
    reader(again);
    CHECK(reader.done());
    for (std::int32_t c = 0; c < 640; ++c) CHECK(again.rate(c) == r.rate(c));
    std::string damaged = w.bytes;
    damaged[8 + 7] = static_cast<char>(0xc0); // the first count is negative
    opd::sched::archive_reader bad(damaged);
    CHECK_THROWS_WITH_AS(bad(again), doctest::Contains("snapshot"), opd::invalid_input);
    opd::sched::archive_writer shorter;
    std::vector<double> few(4);
    shorter(few);
    std::string bytes = shorter.bytes;
    bytes[0] = 2;
    opd::sched::archive_reader few_cells(bytes);
    CHECK_THROWS_WITH_AS(few_cells(again), doctest::Contains("other rates"), opd::invalid_input);
}

TEST_CASE("what cannot be is refused by name") {
    const auto refused = [](auto&& call, const char* argument, const char* why) {
        try {
            call();
            FAIL("it was taken");
        } catch (const opd::invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
        }
    };
    const row z = {1, 2};
    const follow_rates rates;
    draft_builder b;
    refused([&] { b.grow(-1, view(z), {}, 1); }, "rates", "begin()");
    refused([&] { b.graft(text{1}, 1); }, "rates", "begin()");
    b.begin(rates);
    refused([&] { b.grow(0, view(z), {}, 1); }, "node", "no node 0");
    refused([&] { b.grow(-2, view(z), {}, 1); }, "node", "no node -2");
    refused([&] { b.grow(-1, view(z), {}, 0); }, "top_k", "not 0");
    refused([&] { b.grow(-1, view(z), {.filter = {.top_p = 0}}, 1); }, "filter.top_p", "(0, 1]");
    refused([&] { b.graft(text{1}, 0); }, "matched", "not 0");
    refused([&] { b.select(-1); }, "verify", "not -1");
    refused([&] { b.imagine(1, 0); }, "top_k", "not 0");
    refused([&] { rates.rate(-1); }, "cell", "no cell -1");
    refused([&] { rates.tried(744); }, "cell", "no cell 744");
    CHECK(b.size() == 0);
    b.graft(text{1}, 1);
    b.select(1);
    follow_rates r;
    refused([&] { b.learn(r, {2, 1, 0}); }, "verdict", "selected last");
    refused([] { follow_rates({.memory = 0.5}); }, "memory", "at least 1");
    refused([] { follow_rates({.prior_weight = 0}); }, "prior_weight", "positive");
}

TEST_CASE("the call, as its page shows it") {
    const std::uint64_t seed = 1, sample = 42;
    const text prefix = {3, 1, 4, 1, 5}, retrieved = {9, 2, 6};
    const std::vector<float> logits(16, 0.f);
    const auto drafter = [&](const text&) { return view(logits); };
    const auto target = [](index_t) { return 9; };

    opd::spec::follow_rates rates;   // one a drafter
    opd::spec::draft_builder drafts; // one a sequence, used again and again
    const opd::spec::draft_law law{.filter = {.temperature = 0.6f, .top_p = 0.95f},
                                   .seed = seed,
                                   .sample = sample,
                                   .position = static_cast<std::uint32_t>(prefix.size())};
    drafts.begin(rates);
    drafts.graft(retrieved, 2);               // of a drafter without a model, by two tokens that match
    drafts.grow(-1, drafter(prefix), law, 4); // a model's four best next tokens
    std::vector<index_t> widest(2);
    const auto n = drafts.best_of_depth(1, widest); // and the next four after the best two of them
    for (index_t i = 0; i < n; ++i) drafts.grow(widest[i], drafter(prefix), law, 4);
    const auto tree = drafts.select(6); // the six that are likeliest to be followed
    const auto verdict = opd::spec::follow(tree, target);
    drafts.learn(rates, verdict);

    CHECK(tree.size() == 6);
    CHECK(verdict.accepted >= 1);
}
