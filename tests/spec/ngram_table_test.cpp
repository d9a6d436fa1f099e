// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// Against a map of keys that forgets nothing; and with so little memory that every key is in every other's place.
#include <algorithm>
#include <array>
#include <doctest/doctest.h>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/ngram_table.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "support/property.hpp"

namespace {

using opd::index_t;
using opd::spec::ngram_options;
using opd::spec::ngram_table;
using words = std::vector<std::int32_t>;

words of(const std::string& s) { return {s.begin(), s.end()}; }

struct forgets_nothing {
    ngram_options o;
    std::map<words, std::pair<std::int32_t, int>> votes; // the token that leads, and by how much
    static words end_of(const words& t, std::int32_t n) { return {t.end() - n, t.end()}; }
    void learn(const words& before, std::int32_t next) {
        for (std::int32_t n = o.shortest; n <= o.longest && n <= static_cast<std::int32_t>(before.size()); ++n) {
            auto [at, fresh] = votes.try_emplace(end_of(before, n), next, 0);
            auto& [token, lead] = at->second;
            if (token == next)
                lead = std::min(lead + 1, 15);
            else if (--lead == 0)
                token = next, lead = 1;
        }
    }
    std::pair<words, std::int32_t> draft(words t, std::size_t most, std::int32_t least) const {
        words out;
        std::int32_t matched = 0;
        while (out.size() < most) {
            std::int32_t n = std::min(o.longest, static_cast<std::int32_t>(t.size()));
            while (n >= std::max(o.shortest, least) && votes.count(end_of(t, n)) == 0) --n;
            if (n < std::max(o.shortest, least)) break;
            if (out.empty()) matched = n;
            out.push_back(votes.at(end_of(t, n)).first);
            t.push_back(out.back());
        }
        return {out, matched};
    }
};

} // namespace

TEST_CASE("with room for all: the longest key that is known, and the token that leads there, again and again") {
    for (std::uint32_t seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        ngram_options o;
        o.longest = static_cast<std::int32_t>(1 + random() % 16);
        o.shortest = static_cast<std::int32_t>(1 + random() % static_cast<std::uint32_t>(o.longest));
        o.bytes = 1 << 22;
        ngram_table table(o);
        forgets_nothing map{o, {}};
        const int letters = 2 + static_cast<int>(random() % 4);
        words text;
        for (int i = 0; i < 400; ++i) {
            words out(i % 7 == 0 ? 60 : 6);
            const auto least = static_cast<std::int32_t>(random() % 4);
            const auto got = table.draft(text, out, least);
            const auto [expected, matched] = map.draft(text, out.size(), least);
            out.resize(static_cast<std::size_t>(got.count));
            REQUIRE(out == expected);
            REQUIRE(got.matched == matched);
            const std::int32_t next =
                random() % 3 == 0 || expected.empty()
                    ? static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(letters)) - 1
                    : expected[0];
            table.learn(text, next);
            map.learn(text, next);
            text.push_back(next);
        }
    }
}

TEST_CASE("never more memory than was said, and all of it at once") {
    for (const std::size_t bytes : {200u, 1000u, 65536u, 1000003u}) {
        for (const std::int32_t longest : {1, 5, 16}) {
            if (bytes == 200 && longest == 16) continue;
            ngram_table t({.bytes = bytes, .shortest = 1, .longest = longest});
            const std::size_t before = t.bytes();
            CHECK(before <= bytes);
            CHECK(before + 4 * (16 + 4 * static_cast<std::size_t>(longest)) > bytes);
            std::mt19937 random(1);
            words text;
            for (int i = 0; i < 3000; ++i) text.push_back(static_cast<std::int32_t>(random() % 50));
            t.learn_text(text);
            CHECK(t.bytes() == before);
        }
    }
}

TEST_CASE("a full table: no key is taken for another, and what was learnt last is known") {
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
        std::mt19937 random(seed);
        ngram_table t({.bytes = 4 * (16 + 4 * 3) * (1 + seed % 3), .shortest = 2, .longest = 3}); // one to three sets
        std::map<words, std::set<std::int32_t>> ever;
        words text;
        int known = 0;
        for (int i = 0; i < 2000; ++i) {
            words out(1);
            if (const auto d = t.draft(text, out); d.count > 0) {
                ++known;
                REQUIRE(d.matched >= 2);
                REQUIRE(ever[{text.end() - d.matched, text.end()}].count(out[0]) == 1);
            }
            const auto next = static_cast<std::int32_t>(random() % 4);
            t.learn(text, next);
            for (const int n : {2, 3})
                if (text.size() >= static_cast<std::size_t>(n)) ever[{text.end() - n, text.end()}].insert(next);
            if (text.size() >= 2) {
                REQUIRE(t.draft(text, out).count == 1);
                REQUIRE(t.draft(text, out, 3).matched == (text.size() >= 3 ? 3 : 0));
            }
            text.push_back(next);
        }
        CHECK(known > 20);
    }
}

TEST_CASE("of four places the one that was learnt longest ago is given up") {
    ngram_table t({.bytes = 4 * (16 + 4), .shortest = 1, .longest = 1});
    CHECK(t.capacity() == 4);
    const auto knows = [&](std::int32_t token) {
        words out(1);
        return t.draft(words{token}, out).count == 1;
    };
    for (const std::int32_t token : {1, 2, 3, 4}) t.learn(words{token}, 9);
    for (const std::int32_t token : {1, 2, 3, 4}) CHECK(knows(token));
    t.learn(words{1}, 8); // again, if with another token
    t.learn(words{5}, 9);
    CHECK(knows(1));
    CHECK_FALSE(knows(2));
    t.learn(words{6}, 9);
    CHECK_FALSE(knows(3));
    for (const std::int32_t token : {1, 4, 5, 6}) CHECK(knows(token));
    t.clear();
    for (const std::int32_t token : {1, 4, 5, 6}) CHECK_FALSE(knows(token));
}

TEST_CASE("the vote: what came most often of late") {
    ngram_table t({.shortest = 1, .longest = 1});
    const auto next = [&] {
        words out(1);
        t.draft(words{7}, out);
        return out[0];
    };
    const auto learn = [&](std::int32_t token, int times) {
        for (int i = 0; i < times; ++i) t.learn(words{7}, token);
    };
    learn(1, 3);
    learn(2, 2);
    CHECK(next() == 1);
    learn(2, 1);
    CHECK(next() == 2);
    learn(1, 1);
    CHECK(next() == 1);
    learn(1, 1000); // counts as 15
    learn(2, 14);
    CHECK(next() == 1);
    learn(2, 1);
    CHECK(next() == 2);
}

TEST_CASE("a table that is saved goes on as if it had not been; another's is refused") {
    std::mt19937 random(5);
    words text;
    for (int i = 0; i < 500; ++i) text.push_back(static_cast<std::int32_t>(random() % 6));
    const ngram_options o{.bytes = 8192, .shortest = 1, .longest = 4};
    ngram_table one(o), two(o);
    one.learn_text(text);
    opd::sched::archive_writer w;
    w(one);
    opd::sched::archive_reader r(w.bytes);
    r(two);
    CHECK(r.done());
    for (int i = 0; i < 500; ++i) {
        words a(5), b(5);
        const std::span<const std::int32_t> before(text.data(), 3 + static_cast<std::size_t>(i % 400));
        const auto x = one.draft(before, a), y = two.draft(before, b);
        CHECK(x.count == y.count);
        CHECK(a == b);
        one.learn(before, text[static_cast<std::size_t>(i)]);
        two.learn(before, text[static_cast<std::size_t>(i)]);
    }
    ngram_table other({.bytes = 4096, .shortest = 1, .longest = 4});
    opd::sched::archive_reader again(w.bytes);
    CHECK_THROWS_WITH_AS(again(other), doctest::Contains("another table"), opd::invalid_input);
    ngram_table longer({.bytes = 8192, .shortest = 1, .longest = 3});
    opd::sched::archive_reader third(w.bytes);
    CHECK_THROWS_AS(third(longer), opd::invalid_input);
    std::string damaged = w.bytes;
    damaged[4 + 8 + 4 + 3] = 0x70; // the length of the first key
    opd::sched::archive_reader fourth(damaged);
    CHECK_THROWS_WITH_AS(fourth(two), doctest::Contains("another table"), opd::invalid_input);
}

namespace {

// Answers as a model that computes greatest common divisors writes them: every pair, now and then a slip.
words divisor(int a, int b, std::mt19937& random) {
    words t;
    const auto number = [&](int x) {
        for (const int unit : {100, 10, 1}) t.push_back('0' + x / unit % 10);
    };
    for (int i = 0; i < 220 && a > 0 && b > 0; ++i) {
        number(a), t.push_back(','), number(b), t.push_back(';');
        (a >= b ? a : b) -= std::min(a, b);
        if (random() % 60 == 0 && a > 1) --a;
    }
    number(a), t.push_back('.');
    return t;
}

// Four answers a prompt, written by turns, a pass of the target each; the prompts twice. Tokens a pass in each epoch.
template <class Begin, class Draft, class Learn>
std::array<double, 2> tokens_a_pass(Begin&& begin, Draft&& draft, Learn&& learn) {
    std::array<double, 2> r{};
    for (const std::size_t epoch : {0u, 1u}) {
        std::mt19937 prompts(1), random(static_cast<std::uint32_t>(epoch) + 5);
        double tokens = 0, passes = 0;
        for (std::uint64_t p = 0; p < 100; ++p) {
            const int a = 1 + static_cast<int>(prompts() % 999), b = 1 + static_cast<int>(prompts() % 999);
            std::vector<words> answers, so_far(4, of(std::to_string(a) + "," + std::to_string(b) + ":"));
            for (int k = 0; k < 4; ++k) answers.push_back(divisor(a, b, random));
            for (std::size_t k = 0; k < 4; ++k) begin(p, epoch, k, so_far[k]);
            std::vector<std::size_t> at(4, 0);
            words out(8);
            for (bool more = true; more;) {
                more = false;
                for (std::size_t k = 0; k < 4; ++k) {
                    const words& t = answers[k];
                    if (at[k] == t.size()) continue;
                    more = true, ++passes;
                    const auto n = static_cast<std::size_t>(draft(k, so_far[k], out));
                    std::size_t take = 0;
                    while (take < n && at[k] + take + 1 < t.size() && out[take] == t[at[k] + take]) ++take;
                    for (++take; take > 0; --take, ++at[k], ++tokens) {
                        learn(k, so_far[k], t[at[k]]);
                        so_far[k].push_back(t[at[k]]);
                    }
                }
            }
        }
        r[epoch] = tokens / passes;
    }
    return r;
}

} // namespace

TEST_CASE("beside an automaton a prompt: what prompts have in common, and what the last epoch wrote") {
    opd::spec::prompt_groups groups;
    std::array<opd::spec::prompt_groups::text_id, 4> id;
    const auto apart =
        tokens_a_pass([&](std::uint64_t p, std::size_t epoch, std::size_t k,
                          const words& t) { id[k] = groups.begin(p, static_cast<std::int64_t>(epoch), t); },
                      [&](std::size_t k, const words&, words& out) { return groups.draft(id[k], out, 2); },
                      [&](std::size_t k, const words&, std::int32_t next) { groups.append(id[k], next); });
    ngram_table table({.bytes = std::size_t{8} << 20, .shortest = 2, .longest = 8});
    const auto together = tokens_a_pass(
        [](auto&&...) {}, [&](std::size_t, const words& t, words& out) { return table.draft(t, out).count; },
        [&](std::size_t, const words& t, std::int32_t next) { table.learn(t, next); });
    MESSAGE("tokens a pass in the first epoch and the second: an automaton a prompt "
            << apart[0] << ", " << apart[1] << "; one table " << together[0] << ", " << together[1]);
    CHECK(together[0] > 1.5 * apart[0]);
    CHECK(apart[1] > 4);
    CHECK(together[1] > 4);
}

TEST_CASE("what cannot be is refused by name") {
    CHECK_THROWS_WITH_AS(ngram_table({.shortest = 0}), doctest::Contains("shortest"), opd::invalid_input);
    CHECK_THROWS_WITH_AS(ngram_table({.shortest = 6}), doctest::Contains("shortest"), opd::invalid_input);
    CHECK_THROWS_WITH_AS(ngram_table({.longest = 17}), doctest::Contains("longest"), opd::invalid_input);
    CHECK_THROWS_WITH_AS(ngram_table({.bytes = 143}), doctest::Contains("at least 144"), opd::invalid_input);
    words out(3);
    CHECK(ngram_table{}.draft({}, out).count == 0);
}

TEST_CASE("the call, as its page shows it") {
    const words text = of("the cat sat on the mat, the cat"), so_far = of("and the cat");

    opd::spec::ngram_table table({.bytes = 1 << 20, .shortest = 3, .longest = 5}); // of all prompts
    table.learn_text(text);                                                        // or token by token: learn
    std::vector<std::int32_t> next(4);
    const auto d = table.draft(so_far, next); // d.count tokens, by a key of d.matched

    CHECK(d.count == 4);
    CHECK(d.matched == 5);
    CHECK(next == of(" sat"));
}
