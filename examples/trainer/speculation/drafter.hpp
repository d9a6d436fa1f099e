// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who guesses a sequence's next tokens. What a drafter says changes no token (speculation.hpp), only how many of them a
// step brings.
//
// A rollout_engine tells its drafter of everything: a sequence begins on a lane, the target has read and drawn tokens
// of it, it ends. It asks for drafts of several sequences in one call, so that a drafter with a model can batch.
//
//   hear      of every sequence of a step: which tokens were drawn, and, if reads_hidden(), what the target's head
//             reads at the positions that went through it and count (drafts that were not followed do not). Every
//             position of a sequence is heard of in ascending order; after new weights all of them again, from 0, as
//             the prefix is read again. No rows, from 0: what the target had read is gone
//   propose   fills a tree a sequence; the deepest node has depth `depth` at most
//
// A drafter belongs to one engine and is called by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/publication.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "task/trajectory.hpp"

namespace trainer {

struct draft_model;
using opd::index_t;

/// What a step did to a sequence.
struct lane_news {
    index_t lane = 0;
    index_t first = 0; ///< position of the first row that went through the target
    index_t rows = 0;  ///< that count
    std::span<const token> drawn =
        {}; ///< the tokens after the last of them: none where the prefix is not read to its end
    /// (rows, D) what the target's head reads there, or (rows, 4D) with what three of its layers leave
    /// (append_features()) if anybody reads_layers(); empty unless anybody reads_hidden()
    std::span<const float> hidden = {};
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

/// What a drafter computed: passes through its model, and rows in them, but for those that only a cache had lost.
struct draft_work {
    index_t passes = 0, rows = 0;
    index_t nodes = 0; ///< of the rows, those of drafts
    template <class A>
    void fields(A& a) {
        a(passes, rows, nodes);
    }
};

class drafter {
public:
    virtual ~drafter() = default;

    virtual bool reads_hidden() const { return false; }
    virtual bool reads_layers() const { return false; }
    /// Whether draft_wish::children is of any use to it.
    virtual bool branches() const { return false; }
    /// A sequence, new or as far as it is, enters a lane.
    virtual void begin(index_t lane, const trajectory& t) = 0;
    virtual void hear(std::span<const lane_news> news, const policy& target) = 0;
    /// It leaves. Finished: it has its last token, of which it was heard.
    virtual void end(index_t lane, const trajectory& t, bool finished) = 0;
    virtual draft_work propose(std::span<const draft_wish> wishes) = 0;

    /// Another model to draft with, of the same shape; nothing to a drafter without one.
    virtual void adapt(const std::shared_ptr<const draft_model>&) {}

    /// What a checkpoint must hold of it, and how it is read again, by a new drafter of the same kind.
    virtual std::string state() const = 0;
    virtual void restore(std::string_view state) = 0;
};

struct retrieval_options {
    index_t tokens = index_t{1} << 20; ///< of prompts and responses that are remembered, about 200 bytes each
    std::uint64_t answers = 1;         ///< consecutive samples that answer one prompt
    std::int32_t least = 2;            ///< tokens at a text's end that must have occurred before
};

/// Drafts what came after the same tokens before: in the text itself, in other answers to the prompt that this engine
/// writes or wrote, and in those of the last time that the prompt came. Prompts are told apart by a hash of their
/// tokens.
class retrieval_drafter final : public drafter {
public:
    explicit retrieval_drafter(const retrieval_options& o = {}) : options_(o), memory_(o.tokens) {}

    void begin(index_t lane, const trajectory& t) override;
    void hear(std::span<const lane_news> news, const policy&) override;
    void end(index_t lane, const trajectory& t, bool finished) override;
    draft_work propose(std::span<const draft_wish> wishes) override;
    std::string state() const override;
    void restore(std::string_view state) override;

    const opd::spec::prompt_groups& memory() const { return memory_; }

private:
    struct place {
        opd::spec::prompt_groups::text_id text;
        bool whole = false; // all of it is in memory
        template <class A>
        void fields(A& a) {
            a(text, whole);
        }
    };
    place& of(index_t lane) {
        if (static_cast<std::size_t>(lane) >= lanes_.size()) lanes_.resize(static_cast<std::size_t>(lane) + 1);
        return lanes_[static_cast<std::size_t>(lane)];
    }

    retrieval_options options_;
    opd::spec::prompt_groups memory_;
    std::vector<place> lanes_;
    std::vector<token> chain_;
};

} // namespace trainer
