// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Speculative rollout of one engine: which sequences get drafts in a step, how many, and what is learnt from what
// became of them.
//
//   off      no drafts
//   one of the drafters (drafters.hpp): the same strategy for every sequence in every step; learned: with trees
//   auto     retrieval, or a drafter that was trained, if there is one. By how many sequences run and what steps took,
//            an elastic_switch says whether to draft at all, rate_tuner which of some strategies, drafter_selector
//            whose, by what their rate_tuners predict, and draft_budget how many of the nodes that it allows each
//            sequence gets, none where they cost more than they bring. What a step costs by its rows, and by what the
//            drafter computes, is fitted to the last steps: a drafter's first steps are small and differ; now and then
//            all nodes are verified, and now and then no drafter is asked, to know what drafts cost. Where no draft was
//            worth its rows for some steps of such a batch, or the steps that asked brought a sequence fewer tokens
//            than break even, a while goes by without any
//
// What is drafted changes no token, no log mu, no version and no draw: the target's own token, drawn with the noise of
// its sample and position, is what is kept at every position, and drafts only say which positions a step looks at
// (opd/spec/verify.hpp: `follow`). On threads `auto` depends on the machine's clock, in virtual time on --cost-*.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "opd/sched/cost_fit.hpp"
#include "opd/spec/draft_budget.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/drafter_selector.hpp"
#include "opd/spec/rate_tuner.hpp"
#include "opd/spec/tuner.hpp"
#include "speculation/drafters.hpp"
#include "speculation/speculation_counts.hpp"

namespace trainer {

class response_recorder;

struct speculation_options {
    using kind = drafting;
    kind what = kind::off;
    opd::spec::strategy fixed = {8, 1, 8}; ///< of one drafter
    index_t running = 128;                 ///< automatic: on at so many sequences or fewer, off above a quarter more
    retrieval_options retrieval = {};
    std::shared_ptr<const draft_model> learned = {}; ///< learned: what drafts; automatic: one that may

    bool on() const { return what != kind::off; }
    /// Most drafted tokens of a sequence in a step.
    std::int32_t most() const;
};

/// One, or two of which auto chooses.
using drafters = std::vector<std::unique_ptr<drafter>>;

/// Those that the options name. None of --speculate off.
drafters make_drafters(const speculation_options& o);

/// "ngram 8/1/8": a drafter and its strategy (depth, children, tokens to verify). "none": no drafts.
std::string choice_name(const speculation_options& o, std::size_t choice);

/// What a step does that takes time.
struct step_work {
    double rows = 0;    ///< of the target, of any kind
    double passes = 0;  ///< of the drafter; asking it counts as one more
    double drafted = 0; ///< rows in them
};

/// Seconds of a step: a + b·rows + c·passes + d·drafted, fitted to the last ones.
class step_fit {
public:
    /// A step that took much longer than such steps do says something of the machine, not of its rows, and counts as
    /// three times as long.
    void heard(const step_work& w, double seconds);
    bool known() const { return heard_ >= least; }
    double of(const step_work& w) const;           ///< seconds; positive
    double of_row() const { return cost_[1]; }     ///< more for one; at least 0
    double of_drafted() const { return cost_[3]; } ///< likewise
    template <class A>
    void fields(A& a) {
        a(heard_, fit_);
        if constexpr (A::reading) cost_ = fit_.cost();
    }

private:
    static constexpr std::int64_t least = 8; // steps before it is believed
    std::int64_t heard_ = 0;
    opd::sched::cost_fit<3> fit_{200};
    std::array<double, 4> cost_ = {}; // as it is now
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

    speculation(const speculation_options& o, drafters all, const opd::filter& filter, bool greedy, std::uint64_t seed,
                index_t lanes, index_t max_response);

    void begin(index_t lane, const trajectory& t);
    void end(index_t lane, const trajectory& t, bool finished);

    /// Before a step: decides, and drafts. `vacant`: lanes are free, so nobody waits for one, and who is to write most
    /// yet decides when all are done: under auto tokens count by what is left of their sequence.
    void draft(std::span<const due> sequences, bool vacant);
    /// What is to be verified for the lane, by the step for which draft() was called.
    const opd::spec::draft_tree& tree(index_t lane) const { return plans_[static_cast<std::size_t>(lane)].tree; }
    /// After it, of each of them: which of those the target drew as well, and how many tokens the step drew for the
    /// sequence.
    void verified(index_t lane, const opd::spec::verdict& v, index_t tokens);
    bool reads_hidden() const;
    bool reads_layers() const;
    /// Who is told of every sequence what a drafter with hidden states is.
    void record_with(std::shared_ptr<response_recorder> r) { recorder_ = std::move(r); }
    /// Another model for the drafter that learnt.
    void adapt(const std::shared_ptr<const draft_model>& d) {
        for (source& s : sources_) s.drafter->adapt(d);
    }
    void hear(std::span<const lane_news> news, const policy& target);
    /// What drafting for the step took.
    const draft_work& work() const { return work_; }
    /// How long the step took, all of it.
    void took(index_t rows, double seconds);

    const speculation_counts& counts() const { return counts_; }
    void forget_counts() { counts_ = {}; }
    /// What the last step was to do.
    const opd::spec::strategy& strategy() const { return strategy_; }

    /// Between two steps.
    template <class A>
    void fields(A& a) {
        for (source& s : sources_) a(s);
        for (pause& p : pauses_) {
            a(p);
            if (p.rested < 0 || p.rested > 6) throw opd::invalid_input("snapshot", "is of no pause");
        }
        a(counts_, which_, switch_, lengths_, decisions_, arm_, held_, decided_, strategy_, asked_, work_, batch_,
          accepted_, verified_, drawn_);
        auto at = static_cast<std::uint64_t>(using_);
        a(at);
        using_ = static_cast<std::size_t>(at);
        if (using_ >= sources_.size()) throw opd::invalid_input("snapshot", "is of other drafters");
    }

private:
    struct plan {
        opd::spec::draft_builder builder;
        opd::spec::draft_tree tree;
    };
    // A drafter, and what is known of it.
    struct source {
        std::unique_ptr<trainer::drafter> drafter;
        opd::spec::follow_rates rates;
        opd::spec::rate_tuner tuner;
        step_fit cost;                       // of steps for which it was asked, and of those for which none was
        std::int64_t passes = 0, depths = 0; // that it made, and was asked for
        std::int64_t nodes = 0, places = 0;  // whose children it sought, and whose it could have
        std::int64_t asked = 0;              // steps
        bool tried() const { return asked >= 6 && cost.known(); } // what it costs is known
        template <class A>
        void fields(A& a) {
            std::string drafts;
            if constexpr (!A::reading) drafts = drafter->state();
            a(drafts, rates, tuner, cost, passes, depths, nodes, places, asked);
            if constexpr (A::reading) {
                if (passes < 0 || depths < 0 || nodes < 0 || places < 0 || asked < 0)
                    throw opd::invalid_input("snapshot", "is of no drafter");
                drafter->restore(drafts);
            }
        }
    };
    // Steps that asked for drafts. They are compared by how many times as long they took as steps without: batches
    // differ.
    struct sums {
        index_t steps = 0, sequences = 0;
        std::int64_t accepted = 0, tokens = 0;
        double seconds = 0, without = 0;
        /// A sequence gets more tokens a second of them.
        bool pay() const { return static_cast<double>(tokens) * without > static_cast<double>(sequences) * seconds; }
        template <class A>
        void fields(A& a) {
            a(steps, sequences, accepted, tokens, seconds, without);
        }
    };
    // Of batches of a size.
    struct pause {
        std::int32_t fruitless = 0; // decisions in a row that no draft pays
        std::int32_t rests = 0;     // steps to come without a decision
        std::int32_t rested = 0;    // rests since drafts paid
        sums asked;                 // since then, or the last rest
        template <class A>
        void fields(A& a) {
            a(fruitless, rests, rested, asked);
        }
    };
    double uniform();
    pause& pause_now();
    static void rest_now(pause& p);
    void decide();
    // What the step did, as far as it is known: of a drafter, what it was asked for.
    step_work done(index_t rows) const {
        return {static_cast<double>(rows), static_cast<double>(work_.passes + (asked_ ? 1 : 0)),
                static_cast<double>(work_.rows)};
    }
    /// How many times as long a step of a batch takes with drafts of a source, as without: by rows of the target, and
    /// by what the drafter computes for a strategy. All of them were tried.
    auto times_plain(const source& s, index_t batch) const {
        const auto share = [](std::int64_t done, std::int64_t most) {
            return most > 0 ? static_cast<double>(done) / static_cast<double>(most) : 1;
        };
        const double sequences = static_cast<double>(batch), plain = sources_.front().cost.of({.rows = sequences}),
                     passes = share(s.passes, s.depths), nodes = share(s.nodes, s.places);
        return [=, &s](index_t rows, const opd::spec::strategy& x) {
            const double places = static_cast<double>(x.top_k) * static_cast<double>(x.depth - 1);
            return s.cost.of({static_cast<double>(rows), passes * static_cast<double>(x.depth) + 1,
                              sequences * (1 + nodes * places)}) /
                   plain;
        };
    }
    void end_turn();
    void select(const draft_wish& w, index_t nodes);
    void share_budget(bool vacant);
    std::size_t choice() const;

    speculation_options options_;
    std::vector<source> sources_;
    std::shared_ptr<response_recorder> recorder_;
    opd::spec::draft_law law_; // but for sample and position
    index_t max_response_;
    std::vector<plan> plans_; // by lane
    opd::spec::drafter_selector which_;
    opd::spec::elastic_switch switch_;
    opd::spec::draft_budget budget_;
    length_record lengths_;
    speculation_counts counts_;
    std::uint64_t decisions_ = 0;
    std::uint32_t uniforms_ = 0; // of this decision
    // a turn: decisions for which a drafter and an arm are kept
    std::size_t using_ = 0;
    opd::spec::strategy arm_;
    std::int32_t held_ = 0;       // decisions that it goes on for yet
    sums decided_;                // its steps
    std::array<pause, 8> pauses_; // of batches of 1, 2 and 3, 4 to 7, …
    // the step that draft() was called for
    opd::spec::strategy strategy_;
    bool asked_ = false; // a drafter was
    draft_work work_;
    index_t batch_ = 0;
    std::int64_t accepted_ = 0, verified_ = 0, drawn_ = 0;
    std::vector<double> promised_; // by drafter
    std::vector<draft_wish> wishes_;
    std::vector<opd::spec::draft_candidate> candidates_;
};

} // namespace trainer
