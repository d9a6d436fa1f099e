// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "task/task.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "opd/rng.hpp"

namespace trainer {

namespace {

operands next(operands p) {
    if (p.a >= p.b)
        p.a -= p.b;
    else
        p.b -= p.a;
    return p;
}

int steps_of(operands p) {
    int steps = 0;
    for (; p.a != 0 && p.b != 0; p = next(p)) ++steps;
    return steps;
}

// A fixed hash: the split is a property of the task, not of a run.
std::uint32_t hash(int low, int high) {
    return opd::philox4x32({{static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(high), 0, 0}}, 0x67636400u, 0)
        .word[0];
}

std::string fixed_width(int n, int digits) {
    std::string r = std::to_string(n);
    return std::string(static_cast<std::size_t>(digits) - r.size(), '0') + r;
}

// Reads `digits` digits at `at`; -1 if they are not there.
int read_number(std::string_view s, std::size_t at, int digits) {
    if (at + static_cast<std::size_t>(digits) > s.size()) return -1;
    int value = 0;
    const char* first = s.data() + at;
    const auto [stop, error] = std::from_chars(first, first + digits, value);
    return error == std::errc{} && stop == first + digits && *first != '-' ? value : -1;
}

} // namespace

gcd_task::gcd_task(int max_operand, int max_steps, int held_out_one_in)
    : max_steps_(max_steps), digits_(static_cast<int>(std::to_string(max_operand).size())) {
    std::vector<std::pair<std::uint32_t, operands>> held_out;
    for (int a = 1; a <= max_operand; ++a)
        for (int b = 1; b <= max_operand; ++b) {
            const operands p{a, b};
            if (steps_of(p) > max_steps) continue;
            const std::uint32_t h = hash(std::min(a, b), std::max(a, b));
            if (h % static_cast<std::uint32_t>(held_out_one_in) == 0)
                held_out.push_back({hash(a, b + (1 << 16)), p});
            else
                training_.push_back(p);
        }
    std::sort(held_out.begin(), held_out.end(), [](const auto& x, const auto& y) {
        return std::tuple(x.first, x.second.a, x.second.b) < std::tuple(y.first, y.second.a, y.second.b);
    });
    for (const auto& [key, p] : held_out) held_out_.push_back(p);
    if (training_.empty() || held_out_.empty())
        throw std::invalid_argument("task: " + std::to_string(training_.size()) + " training and " +
                                    std::to_string(held_out_.size()) +
                                    " held-out pairs; raise max_operand or max_steps, or change held_out_one_in");
}

operands gcd_task::draw(std::uint64_t seed, std::uint64_t sample) const {
    // position 2^32 - 1 is no token's: the draw shares no noise with the response
    const double w = opd::keyed_uniform(opd::noise_row(seed, opd::noise_stream::coin, sample, 0xffffffffu), 0);
    return training_[static_cast<std::size_t>(w * static_cast<double>(training_.size()))];
}

std::string gcd_task::pair_text(operands p) const {
    return fixed_width(p.a, digits_) + "," + fixed_width(p.b, digits_);
}

std::string gcd_task::prompt(operands p) const { return pair_text(p) + "="; }

std::string gcd_task::solve(operands p) const {
    std::string r;
    while (p.a != 0 && p.b != 0) {
        p = next(p);
        r += pair_text(p);
        r += p.a != 0 && p.b != 0 ? ';' : '#';
    }
    return r + fixed_width(p.a + p.b, digits_) + "$";
}

verdict gcd_task::judge(operands p, std::string_view response) const {
    verdict v;
    const int answer = std::gcd(p.a, p.b);
    const auto digits = static_cast<std::size_t>(digits_);
    operands before = p;
    std::size_t at = 0;
    for (;;) {
        const operands written{read_number(response, at, digits_), read_number(response, at + digits + 1, digits_)};
        const std::size_t separator = at + 2 * digits + 1;
        if (written.a < 0 || written.b < 0 || response[at + digits] != ',' || separator >= response.size() ||
            (response[separator] != ';' && response[separator] != '#'))
            return v;
        ++v.steps;
        v.valid_steps += before.a != 0 && before.b != 0 && next(before) == written;
        before = written;
        at = separator + 1;
        if (response[separator] == '#') break;
    }
    v.correct = read_number(response, at, digits_) == answer && response.substr(at + digits) == "$";
    v.valid = v.correct && v.valid_steps == v.steps && (before.a == 0 || before.b == 0);
    return v;
}

} // namespace trainer
