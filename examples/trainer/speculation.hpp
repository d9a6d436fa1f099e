// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Speculative rollout of one engine: which sequences get drafts in a step, how many, and what is learnt from what became of them.
//
//   off      no drafts
//   ngram    retrieval (drafter.hpp): the same strategy for every sequence in every step
//   learned  a drafter that was trained (learned_drafter.hpp), with trees: likewise
//   auto     a drafter that was trained, if there is one, else retrieval. By how many sequences run and what steps took, an
//            elastic_switch says whether to draft at all, beg_mab which of some strategies, and draft_budget how many of the nodes
//            that it allows each sequence gets, none where they cost more than they bring. What a step costs by its rows is fitted to the last steps; now and then all nodes are verified, to know
//            what drafts cost. Where no draft has paid for some steps, a while goes by without any
//
// What is drafted changes no token, no log mu, no version and no draw: the target's own token, drawn with the noise of its sample
// and position, is what is kept at every position, and drafts only say which positions a step looks at (opd/spec/verify.hpp: `follow`).
// On threads `auto` depends on the machine's clock, in virtual time on --cost-*.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "drafter.hpp"
#include "opd/sched/cost_fit.hpp"
#include "opd/spec/draft_budget.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/tuner.hpp"

namespace trainer {

struct draft_model;

struct speculation_options {
    enum class kind { off, ngram, learned, automatic } what = kind::off;
    opd::spec::strategy fixed = {8, 1, 8}; ///< ngram, learned
    index_t running = 32;                  ///< automatic: on at so many sequences or fewer, off above a quarter more
    retrieval_options retrieval = {};
    std::shared_ptr<const draft_model> learned = {}; ///< what drafts; null: retrieval

    bool on() const { return what != kind::off; }
    /// Most drafted tokens of a sequence in a step.
    std::int32_t most() const;
};

/// The drafter that the options name. None of --speculate off.
std::unique_ptr<drafter> make_drafter(const speculation_options& o);

/// What became of drafts.
struct speculation_counts {
    std::int64_t steps = 0;          ///< sequence steps that drew a token
    std::int64_t verified_steps = 0; ///< of these, with drafts
    std::int64_t drafted = 0;        ///< tokens that a drafter proposed
    std::int64_t verified = 0;       ///< of these, that went through the target
    std::int64_t accepted = 0;       ///< of these, that the target drew as well
    std::int64_t tokens = 0;         ///< drawn

    void add(const speculation_counts& o) {
        steps += o.steps, verified_steps += o.verified_steps, drafted += o.drafted, verified += o.verified;
        accepted += o.accepted, tokens += o.tokens;
    }
    speculation_counts since(const speculation_counts& o) const {
        return {steps - o.steps,       verified_steps - o.verified_steps,
                drafted - o.drafted,   verified - o.verified,
                accepted - o.accepted, tokens - o.tokens};
    }
    /// Drafted tokens that a sequence kept of a step that verified some.
    double accepted_per_step() const { return ratio(accepted, verified_steps); }
    /// Tokens that a step brought a sequence.
    double tokens_per_step() const { return ratio(tokens, steps); }
    bool operator==(const speculation_counts&) const = default;
    template <class A>
    void fields(A& a) {
        a(steps, verified_steps, drafted, verified, accepted, tokens);
    }

private:
    static double ratio(std::int64_t a, std::int64_t b) {
        return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 0.0;
    }
};

/// Seconds of a step by its rows without drafts and its drafted ones. Before there were drafts one of theirs is taken to cost as any other.
class step_fit {
public:
    /// A step that took much longer than such steps do says something of the machine, not of its rows, and counts as three times as long.
    void heard(index_t rows, index_t drafted, double seconds);
    bool known() const { return heard_ >= least; }
    double without(index_t rows) const; ///< seconds of a step without drafts; positive
    double of_draft() const;            ///< seconds that a drafted row costs; at least 0
    template <class A>
    void fields(A& a) {
        a(heard_, fit_);
        if constexpr (A::reading) cost_ = fit_.cost();
    }

private:
    static constexpr std::int64_t least = 16; // steps before it is believed
    std::int64_t heard_ = 0;
    opd::sched::cost_fit fit_{200};
    std::array<double, 3> cost_ = {}; // as it is now
};

/// How long finished responses were: how many tokens one that has n may be expected to get yet.
class length_record {
public:
    explicit length_record(index_t most) : ended_(static_cast<std::size_t>(most) + 1, 0) { add_up(); }
    void heard(index_t length) {
        ++ended_[static_cast<std::size_t>(length)];
        add_up();
    }
    double remaining(index_t drawn) const { return remaining_[static_cast<std::size_t>(drawn)]; }
    template <class A>
    void fields(A& a) {
        a(ended_);
        if constexpr (A::reading) {
            if (ended_.size() != remaining_.size())
                throw opd::invalid_input("snapshot", "is of responses of another length");
            add_up();
        }
    }

private:
    void add_up();
    std::vector<std::int64_t> ended_; // by length
    std::vector<double> remaining_;   // by tokens drawn
};

class speculation {
public:
    /// Whose next token a step draws.
    struct due {
        index_t lane = 0;
        const trajectory* sequence = nullptr;
    };

    speculation(const speculation_options& o, std::unique_ptr<drafter> d, const opd::filter& filter, bool greedy,
                std::uint64_t seed, index_t lanes, index_t max_response);

    void begin(index_t lane, const trajectory& t) { drafter_->begin(lane, t); }
    void end(index_t lane, const trajectory& t, bool finished);

    /// Before a step: decides, and drafts. `reading`: rows of it that only read a prefix. `vacant`: lanes are free, so nobody waits for one,
    /// and who is to write most yet decides when all are done: under auto tokens count by what is left of their sequence.
    void draft(std::span<const due> sequences, index_t reading, bool vacant);
    /// What is to be verified for the lane, by the step for which draft() was called.
    const opd::spec::draft_tree& tree(index_t lane) const { return plans_[static_cast<std::size_t>(lane)].tree; }
    /// After it, of each of them: which of those the target drew as well, and how many tokens the step drew for the sequence.
    void verified(index_t lane, const opd::spec::verdict& v, index_t tokens);
    bool reads_hidden() const { return drafter_->reads_hidden(); }
    void hear(std::span<const lane_news> news, const policy& target) { drafter_->hear(news, target); }
    /// How long the step took, all of it.
    void took(index_t rows, double seconds);

    const speculation_counts& counts() const { return counts_; }
    /// What the last step was to do.
    const opd::spec::strategy& strategy() const { return strategy_; }

    /// Between two steps.
    template <class A>
    void fields(A& a) {
        std::string drafts;
        if constexpr (!A::reading) drafts = drafter_->state();
        a(drafts, rates_, counts_, tuner_, switch_, cost_, lengths_, decisions_, arm_, held_, fruitless_, rests_,
          strategy_, batch_, accepted_, verified_);
        if constexpr (A::reading) drafter_->restore(drafts);
    }

private:
    struct plan {
        opd::spec::draft_builder builder;
        opd::spec::draft_tree tree;
    };
    double uniform();

    speculation_options options_;
    std::unique_ptr<drafter> drafter_;
    opd::spec::draft_law law_; // but for sample and position
    index_t max_response_;
    std::vector<plan> plans_; // by lane
    opd::spec::follow_rates rates_;
    opd::spec::beg_mab tuner_;
    opd::spec::elastic_switch switch_;
    opd::spec::draft_budget budget_;
    step_fit cost_;
    length_record lengths_;
    speculation_counts counts_;
    std::uint64_t decisions_ = 0;
    std::uint32_t uniforms_ = 0; // of this decision
    opd::spec::strategy arm_;
    std::int32_t held_ = 0;      // decisions that it is kept for yet
    std::int32_t fruitless_ = 0; // decisions in a row that no draft pays
    std::int32_t rests_ = 0;     // steps to come without a decision
    // the step that draft() was called for
    opd::spec::strategy strategy_;
    index_t batch_ = 0;
    std::int64_t accepted_ = 0, verified_ = 0;
    std::vector<draft_wish> wishes_;
    std::vector<opd::spec::draft_candidate> candidates_;
};

} // namespace trainer
