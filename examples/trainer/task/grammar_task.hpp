// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The second task: texts of the grammar in grammar_text.cpp, a word a token.
//
//   prompt    rusty sailor and boats :
//   response  the sailor boards some boats . slowly , Nelson drifts . <end>
//
// There is no right response, but a distribution over them, of entropies from near 0 (the comma behind a first adverb)
// to 5 nats (adverbs). A model is judged by its exact KL to the teacher behind held-out prompts, after the teacher's
// words and after its own; beside it stands the share of its responses that are grammatical: numbers agree, clauses
// nest, all sentences are in one time.
//
// A hash of the title decides what is held out: training never sees a held-out title.
#pragma once

#include <cstdint>
#include <vector>

#include "task/grammar.hpp"
#include "task/task.hpp"

namespace trainer {

class grammar_task : public any_task {
public:
    /// Responses of at most `max_words` tokens, their end among them.
    grammar_task(int max_words, int held_out_one_in);

    int vocabulary() const override { return words_.vocabulary(); }
    token end_token() const override { return grammar::end; }
    int prompt_length() const override { return 5; }
    int max_response() const override { return max_words_; }
    problem training_problem(std::uint64_t seed, std::uint64_t sample) const override;
    std::size_t held_out_problems() const override { return held_out_.size(); }
    problem held_out_problem(std::size_t i) const override { return held_out_[i]; }
    std::vector<token> prompt_tokens(problem p) const override;
    std::vector<token> solution_tokens(problem p) const override;
    std::string written(std::span<const token> tokens) const override { return words_.text(tokens); }
    verdict judged(problem p, std::span<const token> response) const override;
    bool judged_by_kl() const override { return true; }

    bool is_held_out(problem p) const;

private:
    const grammar& words_;
    int max_words_;
    std::uint32_t one_in_;
    std::vector<problem> held_out_;
};

} // namespace trainer
