// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who guesses a sequence's next tokens. What a drafter says changes no token (speculation.hpp), only how many of them a step brings.
//
// A rollout_engine tells its drafter of everything: a sequence begins on a lane, the target has read and drawn tokens of it, it ends. It
// asks for drafts of several sequences in one call, so that a drafter with a model can batch.
//
//   hear      of every sequence of a step: which tokens were drawn, and, if reads_hidden(), what the target's head reads at the
//             positions that went through it and count (drafts that were not followed do not). Every position of a sequence is heard of
//             in ascending order; after new weights all of them again, from 0, as the prefix is read again
//   propose   fills a tree a sequence; the deepest node has depth `depth` at most
//
// A drafter belongs to one engine and is called by one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/spec/draft_tree.hpp"
#include "opd/spec/suffix_automaton.hpp"
#include "publication.hpp"
#include "trajectory.hpp"

namespace trainer {

using opd::index_t;

/// What a step did to a sequence.
struct lane_news {
    index_t lane = 0;
    index_t first = 0; ///< position of the first row that went through the target
    index_t rows = 0;  ///< that count
    std::span<const token> drawn =
        {}; ///< the tokens after the last of them: none where the prefix is not read to its end
    std::span<const float> hidden = {}; ///< (rows, D) what the target's head reads there; empty unless reads_hidden()
};

/// Whose next tokens are wanted.
struct draft_wish {
    index_t lane = 0;
    const trajectory* sequence = nullptr;
    opd::spec::draft_law law;                 ///< how the target draws its next token
    std::int32_t depth = 1;                   ///< most, of a node
    std::int32_t children = 1;                ///< most, of a node
    opd::spec::draft_builder* tree = nullptr; ///< begun, and empty
};

class drafter {
public:
    virtual ~drafter() = default;

    virtual bool reads_hidden() const { return false; }
    /// A sequence, new or as far as it is, enters a lane.
    virtual void begin(index_t lane, const trajectory& t) = 0;
    virtual void hear(std::span<const lane_news> news, const policy& target) = 0;
    /// It leaves. Finished: it has its last token, of which it was heard.
    virtual void end(index_t lane, const trajectory& t, bool finished) = 0;
    virtual void propose(std::span<const draft_wish> wishes) = 0;

    /// What a checkpoint must hold of it, and how it is read again, by a new drafter of the same kind.
    virtual std::string state() const = 0;
    virtual void restore(std::string_view state) = 0;
};

struct retrieval_options {
    index_t group_tokens =
        index_t{1} << 16; ///< of one prompt's texts, at most; about 200 bytes each while a sequence of it runs
    index_t history_tokens =
        index_t{1} << 20; ///< of finished responses that are kept; the prompts longest unused go first
    int texts = 8;        ///< responses that are kept of a prompt: the last ones
    int least = 2;        ///< tokens at a text's end that must have occurred before
};

/// Drafts what came after the same tokens before: in the text itself, in other answers to the prompt that run or ran on this engine, and
/// in the last ones of earlier epochs. One suffix automaton a prompt, while a sequence of it runs.
class retrieval_drafter final : public drafter {
public:
    explicit retrieval_drafter(const retrieval_options& o = {}) : options_(o) {}

    void begin(index_t lane, const trajectory& t) override;
    void hear(std::span<const lane_news> news, const policy&) override;
    void end(index_t lane, const trajectory& t, bool finished) override;
    void propose(std::span<const draft_wish> wishes) override;
    std::string state() const override;
    void restore(std::string_view state) override;

    index_t history_tokens() const { return kept_tokens_; }
    std::size_t history_prompts() const { return history_.size(); }

private:
    using tokens = std::vector<token>;
    struct group {
        tokens prompt;
        opd::spec::suffix_automaton automaton;
        std::vector<std::pair<std::int32_t, token>> appended; // to which text, in order: what rebuilds the automaton
        std::vector<std::uint64_t> samples;                   // of each text; older ones: no_sample
        std::vector<std::int32_t> finished;                   // texts, in that order
        index_t running = 0;
        template <class A>
        void fields(A& a) {
            a(prompt, appended, samples, finished, running);
        }
    };
    struct place {
        std::int32_t group = -1; // -1: the lane is free
        std::int32_t text = -1;
        template <class A>
        void fields(A& a) {
            a(group, text);
        }
    };
    struct record {
        std::vector<tokens> texts; // prompt and response, the last one first
        std::uint64_t used = 0;
        template <class A>
        void fields(A& a) {
            a(texts, used);
        }
    };
    static constexpr std::uint64_t no_sample = ~std::uint64_t{0};

    std::int32_t group_of(const tokens& prompt);
    std::int32_t new_text(group& g, std::uint64_t sample);
    void append(group& g, std::int32_t text, std::span<const token> more);
    void close(group& g);
    void forget_oldest();
    template <class A>
    void list(A& a);

    retrieval_options options_;
    std::vector<place> lanes_;
    std::vector<group> groups_; // those with running = 0 wait to be used again
    std::map<tokens, record> history_;
    std::map<std::uint64_t, const tokens*> by_use_; // of history_
    std::uint64_t uses_ = 0;
    index_t kept_tokens_ = 0;
    std::vector<token> chain_;
};

} // namespace trainer
