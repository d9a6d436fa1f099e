// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three stages as a scheduler's driver runs them. Each is used by one thread at a time; they share nothing but
// immutable values (trajectories, scored sequences, published weights) and a publication.
//
//   rollout   start, abort, install, step: a rollout_engine whose lanes hold tickets     trajectory
//   teacher   score: micro-batches of trajectories                                       scored_sequence
//   learner   train: a batch of both, in the order of the samples; publishes what it makes
//
// The scheduler numbers sequences from 0; `first_sample` + that number is the sample of the trainer, which keys the
// noise; its prompt is prompt_of(sample, answers).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include "model/publication.hpp"
#include "model/teacher.hpp"
#include "opd/sched/rollout_cost.hpp"
#include "opd/sched/stages.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/rollout_engine.hpp"
#include "pipeline/sampling.hpp"
#include "speculation/spot_training.hpp"
#include "task/task.hpp"

namespace trainer {

class served_teacher;

/// What rollout workers count together: added to by their threads.
class shared_counts {
public:
    void add(const speculation_counts& c) {
        const std::lock_guard lock(mutex_);
        since_.add(c);
    }
    /// Since the last time.
    speculation_counts take() {
        const std::lock_guard lock(mutex_);
        return std::exchange(since_, {});
    }

private:
    std::mutex mutex_;
    speculation_counts since_;
};

/// Which versions drew a response.
opd::sched::token_versions versions_of(const trajectory& t);

/// What a quantum of rollout computed.
struct rollout_work {
    index_t rows = 0;    ///< tokens that went through the model
    draft_work drafting; ///< what drafting for it took
};

class rollout_stage {
public:
    using rolled_type = trajectory;

    rollout_stage(const any_task& task, const sampling& options, std::uint64_t first_sample, index_t lanes,
                  const publication& weights, int answers = 1, int park_after = 0,
                  std::shared_ptr<shared_counts> counts = {}, std::shared_ptr<spot_trainer> spot = {},
                  std::int32_t number = 0)
        : task_(task), options_(options), first_sample_(first_sample), answers_(answers), weights_(weights),
          park_after_(static_cast<std::size_t>(park_after)), tickets_(static_cast<std::size_t>(lanes)),
          had_(static_cast<std::size_t>(lanes)), counts_(std::move(counts)), spot_(std::move(spot)), number_(number) {}

    /// Whom a sequence answers: tickets of one group have the same.
    std::uint64_t prompt_of(const opd::sched::ticket& t) const {
        return trainer::prompt_of(first_sample_ + t.sample, answers_);
    }

    /// The first weights must have been installed. With a prefix it goes on from that.
    void start(const opd::sched::ticket& t, std::shared_ptr<const trajectory> prefix);

    /// An attempt that is over already is none of its business.
    void abort(const opd::sched::ticket& t);

    /// Stops it; what it has drawn goes on later, from start().
    opd::sched::finished_rollout<trajectory> park(const opd::sched::ticket& t);

    /// Throws if they are not published.
    void install(const opd::sched::weights& w);

    /// Parks who has drawn `park_after` tokens since its start.
    rollout_work step(std::vector<opd::sched::finished_rollout<trajectory>>& out, std::stop_token);
    /// What the last step took.
    void took(double seconds) {
        if (engine_) {
            engine_->took(seconds);
            if (counts_) count();
        }
        cost_.add(static_cast<double>(rows_ - again_), static_cast<double>(again_), seconds);
    }
    double elasticity() { return cost_.elasticity(); }
    /// A slice of the drafter's training, while there is nothing to roll out.
    std::optional<slice_work> spare(std::stop_token stop);
    index_t running() const { return engine_ ? engine_->running() : 0; }
    /// Tokens of its response; 0: it does not run here.
    std::int64_t drawn(const opd::sched::ticket& t) const;
    void export_partials(std::vector<opd::sched::partial_rollout<trajectory>>& out) const;

    /// All of its state; when it is read, the weights that it had must be published.
    template <class A>
    void fields(A& a) {
        auto installed = installed_;
        a(installed);
        if constexpr (A::reading)
            if (installed.version >= 0) take_weights(installed);
        for (opd::sched::ticket& t : tickets_) a(t);
        for (std::uint64_t& n : had_) a(n);
        a(rows_, again_, cost_);
        if constexpr (A::reading)
            if (engine_ && spot_) draft_with(spot_->taken(number_));
        if (engine_) a(*engine_);
    }

private:
    void take_weights(const opd::sched::weights& w);
    void count();
    void draft_with(const drafter_version& d);
    const any_task& task_;
    sampling options_;
    std::uint64_t first_sample_;
    int answers_;
    const publication& weights_;
    std::size_t park_after_;                  // tokens; 0: never
    std::vector<opd::sched::ticket> tickets_; // by lane
    std::vector<std::uint64_t> had_;          // by lane: tokens of the response at its start
    opd::sched::weights installed_{.version = -1};
    weight_receiver received_;             // --publish deltas
    std::optional<rollout_engine> engine_; // from the first weights on
    std::vector<lane_trajectory> finished_;
    index_t rows_ = 0, again_ = 0; // of the last step
    opd::sched::rollout_cost cost_;
    std::shared_ptr<shared_counts> counts_;
    std::shared_ptr<spot_trainer> spot_; // null: nothing is trained
    std::int32_t number_;                // of this worker
    std::int32_t trained_on_ = 0;        // policy version that the drafter learnt from last
};

class teacher_stage {
public:
    using scored_type = scored_sequence;

    /// `codec`, if any, makes less of hidden states; `meter` counts what is scored; `served` scores in this one's
    /// place.
    teacher_stage(const transformer<float>& teacher, const config& c, int threads,
                  std::shared_ptr<const teacher_codec> codec = {}, std::shared_ptr<cache_meter> meter = {},
                  std::shared_ptr<served_teacher> served = {})
        : plan_(cache_for(c)), entries_(draws_for(c).count), backend_{.threads = threads}, scorer_(teacher, backend_),
          codec_(std::move(codec)), meter_(std::move(meter)), served_(std::move(served)) {
        plan_.codec = codec_.get();
    }
    teacher_stage(const teacher_stage&) = delete; // the scorer refers to the backend
    teacher_stage& operator=(const teacher_stage&) = delete;

    std::vector<std::shared_ptr<const scored_sequence>>
    score(std::span<const std::shared_ptr<const trajectory>> trajectories, std::stop_token stop = {});

private:
    cache_plan plan_;
    int entries_;
    opd::cpu_backend backend_;
    teacher_scorer scorer_;
    std::shared_ptr<const teacher_codec> codec_;
    std::shared_ptr<cache_meter> meter_;
    std::shared_ptr<served_teacher> served_;
};

class learner_stage {
public:
    using view = opd::sched::sequence_view<trajectory, scored_sequence>;
    /// Called after every step, on the learner's thread, before the weights are published.
    using report = std::function<void(const learner_result&, std::span<const view>, opd::sched::version_t)>;

    learner_stage(const config& c, learner& learn, publication& weights, report after, const rate_change& from = {})
        : settings_(c), learn_(learn), weights_(weights), after_(std::move(after)), rate_(from),
          entries_(draws_for(c).count) {}

    /// One step, of --mini-batches updates; publishes the weights call.makes() and returns how many it made. Of no
    /// sequences, and after the run's last step, the weights stay what they are. Asked again for the step that it made
    /// last, in another call, it publishes what it has in that one's name.
    index_t train(std::span<const view> sequences, const opd::sched::train_call& call, std::stop_token);

    /// The updates of such a step alone: nothing is published or reported.
    learner_result learn(std::span<const view> sequences, opd::sched::version_t version);

private:
    // What the learner's activations are of at once: --micro-batch sequences of an update.
    struct part {
        std::span<const view> sequences;
        row_batch batch;
    };
    row_batch packed(std::span<const view> sequences) const;
    std::vector<part> parts_of(std::span<const view> update);
    learner_result update(std::span<const part> parts, opd::sched::version_t version, int updates);

    const config& settings_;
    learner& learn_;
    publication& weights_;
    report after_;
    rate_change rate_;
    int entries_;
    teacher_cache cache_;
    struct {
        opd::sched::weights from{.version = -1};
        std::vector<std::uint64_t> samples;
        index_t updates = 0;
        policy made;
    } last_;
};

} // namespace trainer
