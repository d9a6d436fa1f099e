// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "task/grammar_task.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>

#include <fmt/format.h>

#include "opd/rng.hpp"

namespace trainer {

namespace {

constexpr std::uint32_t of_title = 1, of_text = 2, of_held_out = 3; // what noise is for

// A title as a number: a byte each, but the last.
std::uint64_t number_of(const title& t) {
    std::uint64_t r = 0;
    for (const int part : {t.topic, t.adjective, t.noun[0], t.noun[1], t.plural[0] * 2 + t.plural[1]})
        r = r << 8 | static_cast<std::uint64_t>(part);
    return r;
}
title title_of(std::uint64_t number) {
    const auto part = [number](int from_right) { return static_cast<int>(number >> 8 * from_right & 0xff); };
    return {part(4), part(3), {part(2), part(1)}, {part(0) / 2, part(0) % 2}};
}

} // namespace

bool grammar_task::is_held_out(problem p) const {
    const opd::philox_block b = opd::philox4x32(
        {{static_cast<std::uint32_t>(p.prompt), static_cast<std::uint32_t>(p.prompt >> 32), 0, 0}}, 0x67726d00u, 0);
    return b.word[0] % one_in_ == 0;
}

grammar_task::grammar_task(int max_words, int held_out_one_in)
    : words_(grammar::shipped()), max_words_(max_words), one_in_(static_cast<std::uint32_t>(held_out_one_in)) {
    constexpr std::size_t wanted = 4096;
    std::set<std::uint64_t> seen;
    std::size_t trained = 0;
    for (std::uint64_t i = 0; i < 200'000 && held_out_.size() < wanted; ++i) { // the split is the task's, not a run's
        dice d(0, i, of_held_out);
        problem p{number_of(words_.draw_title(d)), 0};
        p.solution = d.bits();
        if (!is_held_out(p))
            ++trained;
        else if (seen.insert(p.prompt).second)
            held_out_.push_back(p);
    }
    if (held_out_.empty() || trained == 0)
        throw std::invalid_argument(
            fmt::format("task: {} training and {} held-out titles; change held_out_one_in", trained, held_out_.size()));
}

problem grammar_task::training_problem(std::uint64_t seed, std::uint64_t sample) const {
    dice d(seed, sample, of_title);
    problem p;
    do p.prompt = number_of(words_.draw_title(d));
    while (is_held_out(p));
    p.solution = d.bits();
    return p;
}

std::vector<token> grammar_task::prompt_tokens(problem p) const { return words_.tokens(title_of(p.prompt)); }

std::vector<token> grammar_task::solution_tokens(problem p) const {
    dice d(p.solution, p.prompt, of_text);
    std::vector<token> r = words_.write(title_of(p.prompt), d, max_words_ - 1);
    r.push_back(grammar::end);
    return r;
}

verdict grammar_task::judged(problem, std::span<const token> response) const {
    verdict v;
    const bool ended = !response.empty() && response.back() == grammar::end;
    const std::span<const token> words = response.first(response.size() - ended);
    const token stop = words_.id(".");
    bool all = ended && !words.empty();
    for (auto at = words.begin(); at != words.end();) {
        const auto found = std::find(at, words.end(), stop);
        const auto behind = found == words.end() ? found : found + 1;
        const bool good = words_.parses("LINE", {at, behind});
        ++v.steps, v.valid_steps += good, all &= good;
        at = behind;
    }
    v.correct = all;
    v.valid = all && words_.parses("TEXT", words);
    return v;
}

} // namespace trainer
