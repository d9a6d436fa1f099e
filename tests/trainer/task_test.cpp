// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "task/task.hpp"

using namespace trainer;

TEST_CASE("every solution is judged right, and has the length that it promises") {
    const gcd_task task(99, 40, 5);
    std::size_t longest = 0;
    for (const auto* pairs : {&task.training(), &task.held_out()})
        for (const operands p : *pairs) {
            const std::string response = task.solve(p);
            const verdict v = task.judge(p, response);
            REQUIRE(v.correct);
            REQUIRE(v.valid);
            REQUIRE(v.steps == v.valid_steps);
            REQUIRE(v.steps <= 40);
            REQUIRE(task.prompt(p).size() == static_cast<std::size_t>(task.prompt_length()));
            // the answer by another way
            REQUIRE(std::stoi(response.substr(response.size() - 3, 2)) == std::gcd(p.a, p.b));
            longest = std::max(longest, response.size());
        }
    CHECK(longest == static_cast<std::size_t>(task.max_response()));
}

TEST_CASE("a known pair is written as the documentation shows it") {
    const gcd_task task(199, 24, 8);
    CHECK(task.prompt({48, 18}) == "048,018=");
    CHECK(task.solve({48, 18}) == "030,018;012,018;012,006;006,006;000,006#006$");
    CHECK(task.max_length() == 8 + 24 * 8 + 4);
}

TEST_CASE("wrong responses are told apart") {
    const gcd_task task(199, 24, 8);
    const operands p{48, 18};
    const auto judge = [&](const std::string& r) { return task.judge(p, r); };
    const auto wrong_step = judge("030,018;012,018;012,007;006,006;000,006#006$");
    CHECK(wrong_step.correct); // the answer is right all the same
    CHECK_FALSE(wrong_step.valid);
    CHECK(wrong_step.steps == 5);
    CHECK(wrong_step.valid_steps == 3); // neither the wrong one nor the one that follows from it
    CHECK_FALSE(judge("030,018;012,018;012,006;006,006;000,006#003$").correct);
    CHECK_FALSE(judge("030,018;012,018;012,006;006,006;000,006#006").correct);   // no end
    CHECK_FALSE(judge("030,018;012,018;012,006;006,006;000,006#006$$").correct); // something after it
    CHECK_FALSE(judge("030,018;012,018;012,006;006,006#006$").valid);            // stops early
    CHECK(judge("030,018;012,018;012,006;006,006#006$").correct);
    CHECK_FALSE(judge("").correct);
    CHECK_FALSE(judge("$").correct);
    CHECK_FALSE(judge("030,018").correct);
    CHECK_FALSE(judge("-30,018#006$").correct);
    CHECK_FALSE(judge("030=018#006$").correct);
    CHECK(judge("000,006#006$").valid_steps == 0);
    CHECK_FALSE(judge("030,018;012,018;012,006;006,006;000,006;000,006#006$").valid); // goes on after the end
}

TEST_CASE("held-out pairs are never drawn for training, in either order") {
    const gcd_task task(60, 20, 4);
    std::set<std::pair<int, int>> held_out;
    for (const operands p : task.held_out()) held_out.insert({std::min(p.a, p.b), std::max(p.a, p.b)});
    const double share = static_cast<double>(task.held_out().size()) /
                         static_cast<double>(task.held_out().size() + task.training().size());
    CHECK(share > 0.2);
    CHECK(share < 0.3);
    std::set<std::pair<int, int>> drawn;
    for (std::uint64_t sample = 0; sample < 5000; ++sample) {
        const operands p = task.draw(1, sample);
        CHECK(held_out.count({std::min(p.a, p.b), std::max(p.a, p.b)}) == 0);
        drawn.insert({p.a, p.b});
        CHECK(task.draw(1, sample) == p);
    }
    CHECK(drawn.size() > task.training().size() / 2);
}

TEST_CASE("a split without training or held-out pairs is refused") {
    CHECK_THROWS_WITH(gcd_task(3, 1, 1000000), doctest::Contains("held_out_one_in"));
}

TEST_CASE("text and tokens are one to one") {
    const tokenizer text = gcd_task::text;
    CHECK(text.decode(text.encode("048,018=;#$")) == "048,018=;#$");
    CHECK(text.id('$') == gcd_task::end);
    CHECK(text.vocabulary() == 15);
    CHECK_THROWS_WITH(text.encode("x"), "no token for 'x'");
}
