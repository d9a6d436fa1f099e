// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Against looking through all texts: the longest end that occurred before, and what came next there.
#include <algorithm>
#include <doctest/doctest.h>
#include <random>
#include <vector>

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
}
