// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The embedded task: the greatest common divisor by repeated subtraction, written out.
//
//   prompt    048,018=
//   response  030,018;012,018;012,006;006,006;000,006#006$
//
// The larger operand (the first, if they are equal) becomes the difference, until one is zero; then the answer. Every
// step has the same width, so a small model can learn it; the number of steps is a sum of partial quotients, so lengths
// are heavy-tailed. Every response can be checked: each step against the rule, the answer against std::gcd.
//
// Pairs with at most `max_steps` steps are kept. A hash of the unordered pair decides what is held out: training never
// sees (a, b) or (b, a) of a held-out pair as a prompt.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer.hpp"

namespace trainer {

struct operands {
    int a = 0;
    int b = 0;
    bool operator==(const operands&) const = default;
};

/// What a response is worth.
struct verdict {
    bool correct = false; ///< complete, and the answer is the greatest common divisor
    bool valid = false;   ///< and every step follows from the one before
    int steps = 0;        ///< pairs written, up to the first malformed one
    int valid_steps = 0;  ///< of these, that follow from the pair before
};

class gcd_task {
public:
    gcd_task(int max_operand, int max_steps, int held_out_one_in);

    static constexpr tokenizer text{"0123456789,=;#$"};
    static constexpr token end = 14; // '$'

    const std::vector<operands>& training() const { return training_; }
    const std::vector<operands>& held_out() const { return held_out_; } ///< in an order of no meaning

    /// The training pair of a sample: a pure function of (seed, sample).
    operands draw(std::uint64_t seed, std::uint64_t sample) const;

    std::string prompt(operands p) const;
    std::string solve(operands p) const; ///< the response that the rule gives
    verdict judge(operands p, std::string_view response) const;

    int prompt_length() const { return 2 * digits_ + 2; }
    int max_response() const { return max_steps_ * (2 * digits_ + 2) + digits_ + 1; }
    int max_length() const { return prompt_length() + max_response(); }

private:
    std::string pair_text(operands p) const;

    int max_steps_, digits_;
    std::vector<operands> training_, held_out_;
};

} // namespace trainer
