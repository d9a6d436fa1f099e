// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a run is about: prompts, right responses, and a judge of what a model writes. Two tasks:
//
//   gcd       15 symbols; responses are right or wrong                                   this file
//   grammar   some 2,300 words; responses are grammatical or not, and what counts is the
//             exact KL to the teacher                                                    grammar_task.hpp
//
// gcd is the greatest common divisor by repeated subtraction, written out.
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

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "task/tokenizer.hpp"

namespace trainer {

/// A prompt, and which of its right responses: numbers that the task reads.
struct problem {
    std::uint64_t prompt = 0, solution = 0;
    bool operator==(const problem&) const = default;
};

struct operands {
    int a = 0;
    int b = 0;
    bool operator==(const operands&) const = default;
};

/// What a response is worth.
struct verdict {
    bool correct = false; ///< complete, and the answer is the greatest common divisor; or every sentence is grammatical
    bool valid = false;   ///< and every step follows from the one before; or the sentences agree in time
    int steps = 0;        ///< pairs written, up to the first malformed one; or sentences
    int valid_steps = 0;  ///< of these, that follow from the pair before; or are grammatical
};

/// What all of the trainer asks of a task.
class any_task {
public:
    virtual ~any_task() = default;
    virtual int vocabulary() const = 0; ///< ids that have text
    virtual token end_token() const = 0;
    virtual int prompt_length() const = 0; ///< of the longest prompt
    virtual int max_response() const = 0;  ///< with its end
    int max_length() const { return prompt_length() + max_response(); }

    /// The training problem of a sample: a pure function of (seed, sample).
    virtual problem training_problem(std::uint64_t seed, std::uint64_t sample) const = 0;
    virtual std::size_t held_out_problems() const = 0;
    virtual problem held_out_problem(std::size_t i) const = 0; ///< in an order of no meaning

    virtual std::vector<token> prompt_tokens(problem p) const = 0;
    virtual std::vector<token> solution_tokens(problem p) const = 0;
    virtual std::string written(std::span<const token> tokens) const = 0;
    virtual verdict judged(problem p, std::span<const token> response) const = 0;

    /// A model is as good as its KL to the teacher is small, and answers are drawn; else as its greedy answers are
    /// right.
    virtual bool judged_by_kl() const = 0;
};

class gcd_task : public any_task {
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

    int vocabulary() const override { return text.vocabulary(); }
    token end_token() const override { return end; }
    int prompt_length() const override { return 2 * digits_ + 2; }
    int max_response() const override { return max_steps_ * (2 * digits_ + 2) + digits_ + 1; }
    problem training_problem(std::uint64_t seed, std::uint64_t sample) const override {
        return problem_of(draw(seed, sample));
    }
    std::size_t held_out_problems() const override { return held_out_.size(); }
    problem held_out_problem(std::size_t i) const override { return problem_of(held_out_[i]); }
    std::vector<token> prompt_tokens(problem p) const override { return text.encode(prompt(operands_of(p))); }
    std::vector<token> solution_tokens(problem p) const override { return text.encode(solve(operands_of(p))); }
    std::string written(std::span<const token> tokens) const override { return text.decode(tokens); }
    verdict judged(problem p, std::span<const token> response) const override {
        return judge(operands_of(p), text.decode(response));
    }
    bool judged_by_kl() const override { return false; }

private:
    static problem problem_of(operands p) {
        return {static_cast<std::uint64_t>(p.a) << 32 | static_cast<std::uint32_t>(p.b), 0};
    }
    static operands operands_of(problem p) {
        return {static_cast<int>(p.prompt >> 32), static_cast<int>(static_cast<std::uint32_t>(p.prompt))};
    }
    std::string pair_text(operands p) const;

    int max_steps_, digits_;
    std::vector<operands> training_, held_out_;
};

} // namespace trainer
