// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// Against looking through all texts: the longest end that occurred before, and what came next there.
#include <algorithm>
#include <cstring>
#include <doctest/doctest.h>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "opd/spec/suffix_automaton.hpp"
#include "support/property.hpp"

namespace {

using opd::index_t;
using opd::spec::suffix_automaton;
using words = std::vector<std::int32_t>;

words of(const std::string& s) { return {s.begin(), s.end()}; }

// The longest end of texts[which] that ends anywhere before, or elsewhere.
std::int32_t longest_by_looking(const std::vector<words>& texts, std::size_t which) {
    const words& t = texts[which];
    std::size_t best = 0;
    for (std::size_t i = 0; i < texts.size(); ++i)
        for (std::size_t end = 0; end <= texts[i].size(); ++end) {
            if (i == which && end == t.size()) continue;
            std::size_t n = 0;
            while (n < end && n < t.size() && texts[i][end - 1 - n] == t[t.size() - 1 - n]) ++n;
            best = std::max(best, n);
        }
    return static_cast<std::int32_t>(best);
}

} // namespace

TEST_CASE("one text: the end that was there before, and what followed") {
    suffix_automaton a;
    const auto t = a.begin();
    CHECK(a.longest(t).length == 0);
    a.append(t, of("abcxabc"));
    const auto m = a.longest(t);
    CHECK(m.length == 3);
    CHECK(m.text == t);
    CHECK(m.position == 3);
    words out(10);
    CHECK(a.draft(t, out) == 4);
    CHECK(words(out.begin(), out.begin() + 4) == of("xabc"));
    CHECK(a.draft(t, std::span(out).first(2)) == 2);
    CHECK(a.draft(t, out, 3) == 4);
    CHECK(a.draft(t, out, 4) == 0);
    a.append(t, 'q');
    CHECK(a.longest(t).length == 0);
    CHECK(a.draft(t, out) == 0);
    CHECK(a.text(t).size() == 8);
}

TEST_CASE("answers to one prompt: the second drafts what the first wrote, to its end") {
    suffix_automaton a;
    const auto first = a.begin(), second = a.begin(), third = a.begin();
    a.append(first, of("gcd(12,18): 18-12=6"));
    a.append(second, of("gcd(12,18): 1"));
    words out(100);
    const index_t n = a.draft(second, out);
    CHECK(words(out.begin(), out.begin() + n) == of("8-12=6"));
    CHECK(a.longest(second).length == 13);
    CHECK(a.longest(second).text == first);
    a.append(second, of("2-6=6"));
    a.append(third, of("x2-6"));
    CHECK(a.longest(third).text == second);
    CHECK(a.draft(third, out) == 2);
    CHECK(out[0] == '=');
    a.clear();
    CHECK(a.tokens() == 0);
    const auto again = a.begin();
    CHECK(again == 0);
    a.append(again, of("gcd"));
    CHECK(a.longest(again).length == 0);
}

TEST_CASE("any texts, growing by turns: as by looking; at most two states and three edges a token") {
    for (std::uint32_t seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const std::size_t count = 1 + random() % 4;
        const int letters = 1 + static_cast<int>(random() % 4);
        suffix_automaton a;
        std::vector<words> texts(count);
        for (std::size_t i = 0; i < count; ++i) CHECK(a.begin() == static_cast<std::int32_t>(i));
        for (int step = 0; step < 120; ++step) {
            const std::size_t i = random() % count;
            // what others wrote, or the same again, or anything
            words more;
            const words& from = texts[random() % count];
            if (!from.empty() && random() % 3 == 0) {
                const std::size_t at = random() % from.size();
                more.assign(from.begin() + static_cast<std::ptrdiff_t>(at),
                            from.begin() + static_cast<std::ptrdiff_t>(std::min(from.size(), at + random() % 8)));
            } else {
                more.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(letters)));
            }
            for (const std::int32_t token : more) {
                CHECK(a.append(static_cast<std::int32_t>(i), token));
                texts[i].push_back(token);
            }
            for (std::size_t k = 0; k < count; ++k) {
                if (texts[k].empty()) continue;
                const auto m = a.longest(static_cast<std::int32_t>(k));
                const std::int32_t expected = longest_by_looking(texts, k);
                if (m.length != expected) FAIL("text " << k << ": " << m.length << " tokens, not " << expected);
                if (m.length == 0) continue;
                // it did end there, and not at the text's own end
                const words& there = texts[static_cast<std::size_t>(m.text)];
                const auto n = static_cast<std::ptrdiff_t>(m.length);
                if (!std::equal(there.begin() + m.position - n, there.begin() + m.position, texts[k].end() - n))
                    FAIL("other words");
                if (static_cast<std::size_t>(m.text) == k && static_cast<std::size_t>(m.position) == texts[k].size())
                    FAIL("itself");
            }
        }
        CHECK(a.states() <= 2 * a.tokens() + 1);
        CHECK(a.edges() <= 3 * a.tokens() + 1);
    }
}

TEST_CASE("work grows with the text: states, edges and bytes a token do not") {
    std::mt19937 random(1);
    double before = 0;
    for (const int n : {20000, 80000}) {
        suffix_automaton a;
        const auto t = a.begin();
        for (int i = 0; i < n; ++i) a.append(t, static_cast<std::int32_t>(random() % 50));
        const double each = static_cast<double>(a.bytes()) / n;
        CHECK(each < 200);
        if (before > 0) CHECK(each < 2.1 * before);
        before = each;
    }
}

TEST_CASE("full: what is beyond is not learnt, and nothing breaks") {
    suffix_automaton a(5);
    const auto t = a.begin(), u = a.begin();
    CHECK(a.append(t, of("abab")));
    CHECK(a.append(u, 'a'));
    CHECK_FALSE(a.append(t, 'a'));
    CHECK_FALSE(a.append(u, 'b'));
    CHECK(a.tokens() == 5);
    CHECK(a.longest(t).length == 2);
    words out(4);
    CHECK(a.draft(u, out) > 0);
    CHECK(out[0] == 'b');
    CHECK_THROWS_WITH_AS(a.append(2, 1), doctest::Contains("there is no text 2"), opd::invalid_input);
    CHECK_THROWS_AS(a.longest(-1), opd::invalid_input);
    CHECK_THROWS_WITH_AS(suffix_automaton(0), doctest::Contains("most_tokens"), opd::invalid_input);
}

TEST_CASE("forgetting the first texts: as if the others had been all") {
    for (std::uint32_t seed = 0; seed < 40; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        suffix_automaton a;
        std::vector<words> texts;
        for (int step = 0; step < 200; ++step) {
            if (texts.empty() || random() % 20 == 0) {
                CHECK(a.begin() == static_cast<std::int32_t>(texts.size()));
                texts.push_back({});
            }
            if (random() % 30 == 0) {
                const std::size_t n = random() % (texts.size() + 1);
                a.forget(static_cast<std::int32_t>(n));
                texts.erase(texts.begin(), texts.begin() + static_cast<std::ptrdiff_t>(n));
                // one text after the other
                suffix_automaton b;
                for (const words& t : texts) b.append(b.begin(), t);
                CHECK(a.texts() == b.texts());
                CHECK(a.tokens() == b.tokens());
                CHECK(a.states() == b.states());
                CHECK(a.edges() == b.edges());
                continue;
            }
            const std::size_t i = random() % texts.size();
            texts[i].push_back(static_cast<std::int32_t>(random() % 2));
            a.append(static_cast<std::int32_t>(i), texts[i].back());
            for (std::size_t k = 0; k < texts.size(); ++k) {
                const auto m = a.longest(static_cast<std::int32_t>(k));
                if (m.length != (texts[k].empty() ? 0 : longest_by_looking(texts, k))) FAIL("text " << k);
            }
        }
    }
    suffix_automaton a;
    a.append(a.begin(), of("ab"));
    CHECK_THROWS_WITH_AS(a.forget(2), doctest::Contains("count"), opd::invalid_input);
    CHECK_THROWS_AS(a.forget(-1), opd::invalid_input);
}

TEST_CASE("forgetting makes room, and takes no more memory; a closed text stays as it is") {
    suffix_automaton a(1000);
    std::size_t bytes = 0;
    std::mt19937 random(3);
    for (int epoch = 0; epoch < 40; ++epoch) {
        const auto t = a.begin();
        for (int i = 0; i < 400; ++i) CHECK(a.append(t, static_cast<std::int32_t>(random() % 5)));
        if (a.texts() == 2) a.forget(1);
        CHECK(a.tokens() == 400);
        if (epoch == 20) bytes = a.bytes();
        if (epoch > 20) CHECK(a.bytes() <= bytes + bytes / 8);
    }
    a.close(0);
    CHECK_FALSE(a.append(0, 1));
    CHECK(a.text(0).size() == 400);
    a.forget(0);
    CHECK_FALSE(a.append(0, 1));
}

TEST_CASE("an automaton that is saved goes on as if it had not been; damage is found, or does no harm") {
    const auto order_at = [](const suffix_automaton& x) { // where its bytes have the number of runs
        std::size_t at = 8 + 8;
        for (std::int32_t t = 0; t < x.texts(); ++t) at += 8 + 4 * x.text(t).size() + 1;
        return at;
    };
    std::mt19937 random(9);
    suffix_automaton a(500);
    for (int t = 0; t < 3; ++t) a.begin();
    for (int i = 0; i < 60; ++i)
        a.append(static_cast<std::int32_t>(random() % 3), static_cast<std::int32_t>(random() % 3));
    opd::sched::archive_writer w;
    w(a);
    const auto put = [&](std::size_t at, std::uint32_t x) {
        std::string bytes = w.bytes;
        std::memcpy(bytes.data() + at, &x, 4);
        suffix_automaton c;
        opd::sched::archive_reader damaged(bytes);
        CHECK_THROWS_WITH_AS(damaged(c), doctest::Contains("of no automaton"), opd::invalid_input);
    };
    // the last run of tokens: of no text, of none, of more than there are, and of all but one; a limit below what there
    // is
    const std::size_t run = w.bytes.size() - 8;
    put(run, 3);
    put(run, 0xffffffffu);
    put(run + 4, 0);
    put(run + 4, 61);
    put(0, 59);
    std::string one_less = w.bytes;
    one_less.resize(run);
    std::uint64_t runs;
    std::memcpy(&runs, w.bytes.data() + order_at(a), 8);
    --runs;
    std::memcpy(one_less.data() + order_at(a), &runs, 8);
    suffix_automaton short_one;
    opd::sched::archive_reader of_one_less(one_less);
    CHECK_THROWS_WITH_AS(of_one_less(short_one), doctest::Contains("of no automaton"), opd::invalid_input);
    suffix_automaton b;
    opd::sched::archive_reader r(w.bytes);
    r(b);
    CHECK(r.done());
    for (int i = 0; i < 100; ++i) {
        const auto t = static_cast<std::int32_t>(random() % 3), token = static_cast<std::int32_t>(random() % 3);
        CHECK(a.append(t, token) == b.append(t, token));
        words x(8), y(8);
        CHECK(a.draft(t, x) == b.draft(t, y));
        CHECK(x == y);
    }
    int refused = 0;
    for (int i = 0; i < 4000; ++i) {
        std::string damaged = w.bytes;
        damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
        suffix_automaton c;
        try {
            opd::sched::archive_reader again(damaged);
            again(c);
            words out(8);
            for (std::int32_t t = 0; t < std::min(c.texts(), 3); ++t)
                for (int k = 0; k < 20; ++k) c.append(t, k % 4), c.draft(t, out);
            c.forget(c.texts() > 0);
        } catch (const opd::invalid_input&) {
            ++refused;
        }
    }
    CHECK(refused > 1000);
}

TEST_CASE("groups: the answers of this epoch and of the last that had any, prompt by prompt") {
    opd::spec::prompt_groups groups;
    const auto draft = [&](const auto& text) {
        words out(5);
        out.resize(static_cast<std::size_t>(groups.draft(text, out)));
        return std::string(out.begin(), out.end());
    };
    const auto a = groups.begin(7, 0, of("ask: answer one")), other = groups.begin(8, 0, of("else: answer two"));
    const auto b = groups.begin(7, 0, of("ask: answ"));
    CHECK(groups.groups() == 2);
    CHECK(draft(b) == "er on");
    CHECK(groups.longest(b).length == 9);
    CHECK(draft(other) == "");
    for (const char c : std::string("er three")) CHECK(groups.append(b, c));
    // the next epoch drafts from it
    const auto c = groups.begin(7, 1, of("ask: answer t"));
    CHECK(draft(c) == "hree");
    CHECK(groups.longest(a).length > 0);
    // two epochs later, and after a pause, the last that had any
    const auto d = groups.begin(7, 5, of("ask: answer "));
    CHECK(draft(d) == "t");
    CHECK(groups.longest(a).length == 0);
    CHECK_FALSE(groups.append(a, 'x'));
    CHECK(groups.append(c, 'w'));
    const auto e = groups.begin(7, 5, of("ask: answer tw"));
    CHECK(groups.longest(e).length == 14);
    // one that comes late belongs to the present one
    const auto f = groups.begin(7, 4, of("late"));
    CHECK(groups.append(f, '!'));
    CHECK(groups.longest(d).length > 0);
    groups.end(f);
    groups.end(a);
    CHECK(draft(opd::spec::prompt_groups::text_id{}) == "");
    CHECK(draft(opd::spec::prompt_groups::text_id{7, 99}) == "");
    CHECK_FALSE(groups.append({9, 0}, 1));
}

TEST_CASE("groups: memory has a limit, and what was begun longest ago and is not written to goes first") {
    opd::spec::prompt_groups groups(40);
    const auto fill = [&](std::uint64_t prompt, int n) {
        const auto t = groups.begin(prompt, 0, {});
        for (int i = 0; i < n; ++i) groups.append(t, i);
        return t;
    };
    const auto one = fill(1, 9), two = fill(2, 9), three = fill(3, 9), four = fill(4, 9); // a token more each: 40
    CHECK(groups.tokens() == 40);
    CHECK_FALSE(groups.append(one, 5)); // all are written to
    groups.end(two);
    groups.end(three);
    CHECK_FALSE(groups.append(one, 6)); // it lacks a token
    CHECK(groups.groups() == 4);
    CHECK(groups.append(four, 100));
    CHECK(groups.groups() == 3);
    CHECK(groups.tokens() == 31);
    CHECK_FALSE(groups.append(two, 1));
    const auto again = groups.begin(3, 0, {}); // used: not the next to go
    groups.end(four);
    groups.end(one);
    groups.end(again);
    const auto five = fill(5, 9); // 42, but for the first
    CHECK(groups.tokens() == 32);
    CHECK_FALSE(groups.append(one, 1));
    CHECK(groups.append(three, 50));
    CHECK(groups.append(five, 50));
    CHECK_THROWS_WITH_AS(opd::spec::prompt_groups(0), doctest::Contains("most_tokens"), opd::invalid_input);
}

TEST_CASE("groups: whatever the order of begin, append and end, no more than the limit is held") {
    using opd::spec::prompt_groups;
    for (std::uint32_t seed = 0; seed < 300; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const auto most = static_cast<opd::index_t>(1 + random() % 12);
        prompt_groups groups(most);
        std::vector<prompt_groups::text_id> all;
        for (int i = 0; i < 200; ++i) {
            const auto any = [&] { return all[random() % all.size()]; }; // also one that was ended or forgotten
            const std::uint32_t what = all.empty() ? 0 : random() % 4;
            if (what == 0) {
                const opd::index_t before = groups.tokens();
                all.push_back(groups.begin(random() % 4, i / 40, words(random() % 3, 1)));
                if (before == 0) REQUIRE(all.back().number >= 0); // there was room
            } else if (what == 3) {
                groups.end(any());
            } else {
                const prompt_groups::text_id id = any();
                const bool learnt = groups.append(id, static_cast<std::int32_t>(random() % 2));
                if (id.number < 0) REQUIRE_FALSE(learnt);
            }
            REQUIRE(groups.tokens() <= most);
            REQUIRE(groups.groups() <= most);
            words out(3);
            if (!all.empty()) CHECK(groups.draft(any(), out) <= 3);
        }
    }
    prompt_groups empty(1000); // answers that end before a token
    for (std::uint64_t i = 0; i < 5000; ++i) empty.end(empty.begin(i, 0, {}));
    CHECK(empty.groups() == 1000);
    prompt_groups full(1); // answers that run: the second finds no room, and nothing is learnt or drafted of it
    const auto first = full.begin(0, 0, {}), second = full.begin(1, 0, {});
    CHECK(full.tokens() == 1);
    CHECK(full.groups() == 1);
    CHECK_FALSE(full.append(second, 1));
    full.end(second);
    full.end(first);
    CHECK(full.begin(1, 0, {}).number == 0);
}

TEST_CASE("groups: any run keeps to the limit, drafts what the automaton of a prompt alone would, and can be saved") {
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        opd::spec::prompt_groups groups(300);
        std::vector<opd::spec::prompt_groups::text_id> running;
        for (int i = 0; i < 2000; ++i) {
            if (running.size() < 4 && random() % 10 == 0)
                running.push_back(groups.begin(random() % 6, i / 300, words{1, 2, 1}));
            if (running.empty()) continue;
            const std::size_t k = random() % running.size();
            const auto token = static_cast<std::int32_t>(random() % 3);
            opd::spec::prompt_groups copy;
            if (i % 50 == 0) {
                opd::sched::archive_writer w;
                w(groups);
                opd::sched::archive_reader r(w.bytes);
                r(copy);
                CHECK(r.done());
            }
            const bool learnt = groups.append(running[k], token);
            if (i % 50 == 0) {
                CHECK(copy.append(running[k], token) == learnt);
                words x(5), y(5);
                CHECK(copy.draft(running[k], x) == groups.draft(running[k], y));
                CHECK(x == y);
                CHECK(copy.tokens() == groups.tokens());
                CHECK(copy.groups() == groups.groups());
            }
            REQUIRE(groups.tokens() <= 300);
            if (random() % 40 == 0) {
                groups.end(running[k]);
                running.erase(running.begin() + static_cast<std::ptrdiff_t>(k));
            }
        }
        CHECK(groups.bytes() < 300 * 500);
    }
}

TEST_CASE("the call, as its page shows it") {
    const words prompt = of("gcd(12,18): "), what_the_first_drew = of("18-12=6"), what_the_second_drew = of("18");

    opd::spec::suffix_automaton group; // of one prompt
    const auto first = group.begin(), second = group.begin();
    group.append(first, prompt);
    group.append(first, what_the_first_drew);
    group.append(second, prompt);
    group.append(second, what_the_second_drew);
    std::vector<std::int32_t> next(8);
    const auto drafted = group.draft(second, next, 2); // at least two tokens must match

    CHECK(words(next.begin(), next.begin() + drafted) == of("-12=6"));
    {
        const std::uint64_t prompt_number = 5;
        const std::int64_t epoch = 2;
        const std::int32_t token = '6';
        opd::spec::prompt_groups memory(1 << 20); // tokens, of all prompts
        const auto answer = memory.begin(prompt_number, epoch, prompt);
        memory.append(answer, token); // each that the target writes
        const auto retrieved = memory.draft(answer, next);
        memory.end(answer);
        CHECK(retrieved == 0);
    }
}
