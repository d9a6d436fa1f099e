// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// Penalties against their formulas in float64; the law that draw takes tokens from, and scores them by; gradients; and
// drafts that are verified under penalties.
#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "opd/backends/cpu.hpp"
#include "opd/draw.hpp"
#include "opd/penalties.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/verify.hpp"

namespace {

using opd::index_t;
using opd::penalties;
using opd::token_history;
using text = std::vector<std::int32_t>;

template <class T>
opd::vector_view<const T> read(const std::vector<T>& x) {
    return {x.data(), static_cast<index_t>(x.size())};
}
template <class T>
opd::vector_view<T> write(std::vector<T>& x) {
    return {x.data(), static_cast<index_t>(x.size())};
}

// As vLLM's documentation words it, over the whole vocabulary.
std::vector<double> by_definition(const std::vector<double>& z, const text& prompt, const text& answer,
                                  const penalties& p) {
    std::vector<double> out = z;
    for (std::size_t v = 0; v < z.size(); ++v) {
        const auto id = static_cast<std::int32_t>(v);
        const auto count = std::count(answer.begin(), answer.end(), id);
        if (count > 0 || std::count(prompt.begin(), prompt.end(), id) > 0)
            out[v] = out[v] > 0 ? out[v] / double(p.repetition) : out[v] * double(p.repetition);
        out[v] -= double(p.frequency) * static_cast<double>(count);
        out[v] -= double(p.presence) * (count > 0 ? 1 : 0);
    }
    return out;
}

penalties random_penalties(std::mt19937& random) {
    const auto one_of = [&](std::vector<float> x) { return x[random() % x.size()]; };
    return {one_of({1, 1.3f, 0.7f}), one_of({0, 0.5f, -1}), one_of({0, 0.25f, -0.1f})};
}
text random_text(std::mt19937& random, std::size_t n, std::uint32_t v) {
    text t;
    for (std::size_t i = 0; i < n; ++i) t.push_back(static_cast<std::int32_t>(random() % v));
    return t;
}
token_history history_of(const text& prompt, const text& answer) {
    token_history h;
    h.add_prompt(prompt);
    for (const std::int32_t t : answer) h.add(t);
    return h;
}

} // namespace

TEST_CASE("any row and history: as defined, rounded once, also in place and in other element types") {
    std::mt19937 random(1);
    for (int trial = 0; trial < 500; ++trial) {
        CAPTURE(trial);
        const std::uint32_t v = 1 + random() % 50;
        const text prompt = random_text(random, random() % 8, v), answer = random_text(random, random() % 30, v);
        const penalties p = random_penalties(random);
        std::vector<double> z;
        for (std::uint32_t i = 0; i < v; ++i)
            z.push_back(random() % 9 == 0
                            ? -std::numeric_limits<double>::infinity()
                            : static_cast<double>(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 64));
        const std::vector<double> expected = by_definition(z, prompt, answer, p);
        const token_history h = history_of(prompt, answer);
        std::vector<double> out(z.size());
        opd::apply_penalties(read(z), h, p, write(out));
        for (std::size_t i = 0; i < z.size(); ++i)
            REQUIRE((out[i] == expected[i] || std::abs(out[i] - expected[i]) < 1e-12));
        std::vector<float> f(z.begin(), z.end()), g(z.size());
        opd::apply_penalties(read(f), h, p, write(g));
        opd::apply_penalties(opd::vector_view<const float>(write(f)), h, p, write(f));
        REQUIRE(f == g);
        for (std::size_t i = 0; i < z.size(); ++i) REQUIRE(g[i] == static_cast<float>(out[i]));
        std::vector<opd::bfloat16> b(z.size());
        opd::apply_penalties(read(z), h, p, write(b));
        for (std::size_t i = 0; i < z.size(); ++i)
            REQUIRE(opd::element<opd::bfloat16>::load(b[i]) ==
                    opd::element<opd::bfloat16>::load(opd::element<opd::bfloat16>::store(static_cast<float>(out[i]))));
    }
}

TEST_CASE("a logit or gradient that half does not hold saturates; -inf stays") {
    const std::vector<float> z{60000, -std::numeric_limits<float>::infinity(), -60000, 1};
    std::vector<opd::half> out(4, opd::half(0.F)), dz(4, opd::half(-40000.F));
    opd::token_history h;
    h.add(0), h.add(1), h.add(2);
    const opd::penalties up{.repetition = 0.25F}, down{.repetition = 4};
    opd::apply_penalties(read(z), h, up, write(out));
    CHECK(float(out[0]) == 65440);
    CHECK(float(out[1]) == -std::numeric_limits<float>::infinity());
    CHECK(float(out[2]) == -15000);
    opd::apply_penalties(read(z), h, down, write(out));
    CHECK(float(out[2]) == -65440); // the least number is a mask
    opd::penalties_pullback(read(z), h, up, write(dz));
    CHECK(float(dz[0]) == -65504);
    CHECK(float(dz[3]) == -40000);
}

TEST_CASE("a history is a set with counts: whatever the order, and what is taken back was never there") {
    std::mt19937 random(2);
    for (int trial = 0; trial < 100; ++trial) {
        token_history h;
        std::map<std::int32_t, int> counts;
        const text prompt = random_text(random, 5, 200);
        h.add_prompt(prompt);
        text answer;
        for (int i = 0; i < 300; ++i) {
            if (!answer.empty() && random() % 3 == 0) {
                const std::size_t at = random() % answer.size();
                h.remove(answer[at]);
                --counts[answer[at]];
                answer.erase(answer.begin() + static_cast<std::ptrdiff_t>(at));
            } else {
                answer.push_back(static_cast<std::int32_t>(random() % 200));
                h.add(answer.back());
                ++counts[answer.back()];
            }
        }
        for (std::int32_t id = 0; id < 200; ++id) REQUIRE(h.count(id) == counts[id]);
        const token_history straight = history_of(prompt, answer);
        std::vector<float> z(200), a(200), b(200);
        for (float& x : z) x = static_cast<float>(random() % 100) - 50;
        const penalties p{1.2f, 0.3f, 0.1f};
        opd::apply_penalties(read(z), h, p, write(a));
        opd::apply_penalties(read(z), straight, p, write(b));
        REQUIRE(a == b);
        h.clear();
        REQUIRE(h.entries().empty());
        REQUIRE(h.count(answer[0]) == 0);
        opd::apply_penalties(read(z), h, p, write(a));
        REQUIRE(a == z);
    }
}

TEST_CASE("draw: tokens come from the penalised law, and log mu and the kept mass are of it") {
    opd::cpu_backend be;
    std::mt19937 random(3);
    constexpr index_t v = 12;
    for (int trial = 0; trial < 30; ++trial) {
        CAPTURE(trial);
        const text prompt = random_text(random, 4, v), answer = random_text(random, 8, v);
        const penalties p = random_penalties(random);
        std::vector<float> z, penalised(v);
        for (index_t i = 0; i < v; ++i) z.push_back(static_cast<float>(random() % 1000) / 200 - 2.5f);
        opd::apply_penalties(read(z), history_of(prompt, answer), p, write(penalised));
        const opd::filter f{.temperature = 0.7f, .top_k = trial % 2 == 0 ? 5 : 0};
        // the law, by the words
        const std::vector<double> exact = by_definition({z.begin(), z.end()}, prompt, answer, p);
        std::vector<std::size_t> order(v);
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t a, std::size_t b) { return penalised[a] > penalised[b]; });
        if (f.top_k > 0) order.resize(static_cast<std::size_t>(f.top_k));
        std::map<std::int32_t, double> law;
        double sum = 0;
        for (const std::size_t i : order) sum += law[static_cast<std::int32_t>(i)] = std::exp(exact[i] / 0.7f);
        for (auto& [id, mass] : law) mass /= sum;
        std::map<std::int32_t, int> drawn;
        constexpr int n = 3000;
        for (std::uint64_t sample = 0; sample < n; ++sample) {
            const std::uint32_t position = 12;
            std::int32_t id = -1;
            float log_mu = 0;
            opd::draw(be, opd::view(std::as_const(penalised).data(), 1, v), opd::design::gumbel{},
                      {.seed = 5, .sample = opd::view(&sample, 1), .position = opd::view(&position, 1)},
                      opd::drawn<>{.ids = opd::view(&id, 1, 1), .log_mu = opd::view(&log_mu, 1, 1)}, {.filter = f});
            REQUIRE(law.count(id) == 1);
            REQUIRE(log_mu == doctest::Approx(std::log(law[id])).epsilon(1e-4));
            ++drawn[id];
        }
        for (const auto& [id, mass] : law)
            REQUIRE(std::abs(drawn[id] - n * mass) < 6 * std::sqrt(n * mass * (1 - mass)) + 1);
    }
}

TEST_CASE("the gradient through penalties is that of differences") {
    std::mt19937 random(4);
    for (int trial = 0; trial < 50; ++trial) {
        constexpr std::uint32_t v = 9;
        const token_history h = history_of(random_text(random, 3, v), random_text(random, 6, v));
        const penalties p = random_penalties(random);
        std::vector<double> z, weight, out(v);
        for (std::uint32_t i = 0; i < v; ++i) {
            z.push_back(static_cast<double>(random() % 1000) / 100 - 4.995); // no kink nearby
            weight.push_back(static_cast<double>(random() % 100) - 50);
        }
        const auto value = [&](const std::vector<double>& x) {
            opd::apply_penalties(read(x), h, p, write(out));
            double sum = 0;
            for (std::size_t i = 0; i < v; ++i) sum += weight[i] * out[i];
            return sum;
        };
        std::vector<double> dz = weight;
        opd::penalties_pullback(read(z), h, p, write(dz));
        for (std::size_t i = 0; i < v; ++i) {
            std::vector<double> up = z, down = z;
            up[i] += 1e-4, down[i] -= 1e-4;
            REQUIRE(dz[i] == doctest::Approx((value(up) - value(down)) / 2e-4).epsilon(1e-6));
        }
    }
}

TEST_CASE("drafts under penalties: the text of plain decoding, node by node with the history of its path") {
    constexpr index_t v = 10;
    constexpr std::size_t length = 150;
    const penalties p{1.4f, 0.6f, 0.3f};
    const opd::filter f{.temperature = 0.8f, .top_p = 0.9f};
    const text prompt = {1, 2};
    const auto logits = [](std::int32_t last, std::size_t position, double off) {
        std::vector<float> z;
        for (index_t i = 0; i < v; ++i)
            z.push_back(static_cast<float>(3 * std::sin(7.3 * last + 3.1 * double(i)) +
                                           off * std::sin(double(i) * double(position))));
        return z;
    };
    opd::spec::child_search search;
    const auto token = [&](const std::vector<float>& z, std::size_t position) {
        const opd::noise_row noise(6, opd::noise_stream::rollout, 1, static_cast<std::uint32_t>(position));
        return search.best(read(z), f, &noise, 1)[0].id; // what draw takes: tests/spec/draft_tree_test.cpp
    };
    text plain = prompt;
    {
        token_history h;
        h.add_prompt(prompt);
        while (plain.size() < length) {
            std::vector<float> z = logits(plain.back(), plain.size(), 0);
            opd::apply_penalties(read(z), h, p, write(z));
            plain.push_back(token(z, plain.size()));
            h.add(plain.back());
        }
    }
    for (const bool penalised_drafts : {true, false}) {
        opd::spec::follow_rates rates;
        opd::spec::draft_builder tree;
        token_history h;
        h.add_prompt(prompt);
        text t = prompt;
        int passes = 0;
        const auto at = [&](index_t node, double off, bool penalise) { // the row after a node
            text path;
            for (index_t n = node; n >= 0; n = tree.parent(n)) path.push_back(tree.token(n));
            std::vector<float> z = logits(path.empty() ? t.back() : path[0], t.size() + path.size(), off);
            if (penalise) {
                for (const std::int32_t x : path) h.add(x);
                opd::apply_penalties(read(z), h, p, write(z));
                for (const std::int32_t x : path) h.remove(x);
            }
            return z;
        };
        while (t.size() < length) {
            const opd::spec::draft_law law{
                .filter = f, .seed = 6, .sample = 1, .position = static_cast<std::uint32_t>(t.size())};
            tree.begin(rates);
            index_t node = -1;
            for (int depth = 0; depth < 4 && node < tree.size(); ++depth) {
                tree.grow(node, read(at(node, 0.2, penalised_drafts)), law, 2);
                tree.best_of_depth(depth + 1, {&node, 1});
            }
            const auto drafts = tree.select(6);
            const auto r = opd::spec::follow(drafts, [&](index_t row) {
                const index_t n = row == 0 ? -1 : tree.chosen()[static_cast<std::size_t>(row - 1)];
                return token(at(n, 0, true), t.size() + static_cast<std::size_t>(tree.depth(n)));
            });
            tree.learn(rates, r);
            text path;
            for (index_t n = r.node; n >= 0; n = drafts.parents[static_cast<std::size_t>(n)])
                path.insert(path.begin(), drafts.tokens[static_cast<std::size_t>(n)]);
            path.push_back(r.next);
            for (const std::int32_t x : path) t.push_back(x), h.add(x);
            ++passes;
        }
        t.resize(length);
        CHECK(t == plain);
        MESSAGE(std::string(penalised_drafts ? "penalised" : "plain") << " drafts: " << passes << " passes");
        if (penalised_drafts) CHECK(passes < 60);
    }
}

TEST_CASE("what cannot be is refused by name, before anything is written") {
    const auto refused = [](auto&& call, const char* argument, const char* why) {
        try {
            call();
            FAIL("it was taken");
        } catch (const opd::invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
        }
    };
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> z(4, 1.f), out(4, 7.f), narrow(3);
    token_history h;
    h.add(2);
    refused([&] { h.remove(1); }, "token", "does not have 1");
    h.add_prompt(text{1});
    refused([&] { h.remove(1); }, "token", "does not have 1");
    refused([&] { opd::apply_penalties(read(z), h, {.repetition = 0}, write(out)); }, "penalties.repetition",
            "positive");
    refused([&] { opd::apply_penalties(read(z), h, {.presence = nan}, write(out)); }, "penalties.presence", "finite");
    refused([&] { opd::apply_penalties(read(z), h, {.frequency = nan}, write(out)); }, "penalties.frequency", "finite");
    refused([&] { opd::apply_penalties(read(z), h, {}, write(narrow)); }, "out", "3 columns, not 4");
    refused([&] { opd::penalties_pullback(read(z), h, {}, write(narrow)); }, "dz", "3 columns, not 4");
    h.add(4);
    refused([&] { opd::apply_penalties(read(z), h, {.presence = 1}, write(out)); }, "history", "id 4 of a row of 4");
    refused([&] { opd::penalties_pullback(read(z), h, {.repetition = 2}, write(out)); }, "history",
            "id 4 of a row of 4");
    CHECK(out == std::vector<float>(4, 7.f));
    // penalties that are none change nothing
    token_history none;
    none.add(1);
    opd::apply_penalties(read(z), none, {}, write(out));
    CHECK(out == z);
}

TEST_CASE("the call, as its page shows it") {
    const std::vector<std::int32_t> prompt = {3, 1, 4};
    const std::int32_t drawn = 5;
    const std::vector<float> logits = {1, 2, 3, 4, 5, 6}, gradient(6, 1.f);
    std::vector<float> row(6), dz = gradient;
    const auto z = read(logits);

    opd::token_history history; // one a sequence
    history.add_prompt(prompt);
    history.add(drawn); // each token of the answer
    const opd::penalties penalties{.repetition = 1.1f, .presence = 0.2f, .frequency = 0.1f};
    opd::apply_penalties(z, history, penalties, opd::vector_view<float>(row)); // what draw, or a verifier, reads
    // … the learner: the loss on such a row of its own, and back
    opd::penalties_pullback(z, history, penalties, opd::vector_view<float>(dz));

    CHECK(row[0] == 1);
    CHECK(row[5] == doctest::Approx(6 / 1.1 - 0.3));
    CHECK(dz[4] == doctest::Approx(1 / 1.1));
}
