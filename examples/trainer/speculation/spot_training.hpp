// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A drafter that learns while the student does: --adapt-drafter. Rollout workers record what the target's head reads
// while it verifies, and train the drafter in slices while they have nothing to run (opd/sched/stages.hpp, spare()).
//
//   recorder   of one engine: hidden states of what runs on its lanes; a response that is finished goes to the buffer
//   buffer     opd/spec/draft_data_buffer.hpp: what finished since a policy version was first heard of, and since the
//              one before. Of the present step only the short ones are there; the long ones are the last step's
//   slice      the gradient of one micro-batch, on the drafter as it is when the slice begins. It is applied (AdamW)
//              when the worker is next heard of: what others have applied meanwhile stays, and it is whole or, where
//              the slice was stopped, not there
//   streams    a drafter's version is how many updates made it, beside the policy's. Workers take the newest drafter
//              when they install weights, or begin to run something: then nothing that it has read is lost. Its age is
//              how many policy versions it is behind: those since the newest response that it learnt from
//
// What a drafter is, and how old, is never a matter of correctness (speculation.hpp). The laws that it learns are those
// of the head of the policy that the worker has, on recorded states: those of the last step are one policy version old.
// In virtual time all of it is a function of the settings; state() is a part of the checkpoint. On threads nobody's
// timing is repeated: a resumed run goes on from the drafter's own file, which is written beside the run and holds what
// is trained and its optimizer. Any thread may call spot_trainer.
//
// Source: Hu et al. 2025, TLT, sections 4.2 and 4.3 (spot trainer, DataBuffer, one-step offset).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "opd/spec/draft_data_buffer.hpp"
#include "settings/files.hpp"
#include "speculation/drafter.hpp"
#include "speculation/drafter_training.hpp"

namespace trainer {

/// A finished response, for a drafter to learn from.
struct recorded_response {
    std::uint64_t sample = 0;
    std::int32_t version = 0; ///< of the policy whose hidden states these are
    std::vector<token> tokens;
    std::uint64_t prompt_length = 0;
    std::vector<float> hidden; ///< (tokens - 1, D), or 4D for a drafter that reads layers
    index_t rows() const { return static_cast<index_t>(tokens.size()) - 1; }
};

/// Keeps the hidden states of what runs on an engine's lanes, which tells it what it tells a drafter.
class response_recorder {
public:
    using sink = std::function<void(recorded_response)>;
    explicit response_recorder(sink to) : to_(std::move(to)) {}

    void begin(index_t lane) { hidden_of(lane).clear(); }
    void hear(std::span<const lane_news> news, const policy& target);
    /// Of one that is finished, all positions but the last have been heard of.
    void end(index_t lane, const trajectory& t, bool finished);

private:
    std::vector<float>& hidden_of(index_t lane) {
        if (static_cast<std::size_t>(lane) >= lanes_.size()) lanes_.resize(static_cast<std::size_t>(lane) + 1);
        return lanes_[static_cast<std::size_t>(lane)];
    }
    sink to_;
    std::int32_t version_ = 0;
    std::vector<std::vector<float>> lanes_;
};

/// What a slice computed; of one that was stopped, nothing.
struct slice_work {
    index_t rows = 0; ///< that went through the drafter
};

struct spot_counts {
    std::int64_t recorded = 0, slices = 0, stopped = 0, rows = 0, updates = 0;
    double loss = 0, acceptance = 0; ///< of the last slice
    template <class A>
    void fields(A& a) {
        a(recorded, slices, stopped, rows, updates, loss, acceptance);
    }
};

/// A drafter and when it was made.
struct drafter_version {
    std::shared_ptr<const draft_model> model;
    std::int64_t updates = 0;    ///< that made it
    std::int32_t trained_on = 0; ///< newest policy version that it learnt from
};

class spot_trainer {
public:
    /// `workers` rollout workers, numbered from 0. `file`: where the drafter is written to, every
    /// --adapt-checkpoint-every updates, by a thread of its own; empty: nowhere.
    spot_trainer(const config& c, std::shared_ptr<const draft_model> first, std::int32_t workers,
                 const std::string& file = {});

    /// A response is finished; its worker is not at a slice.
    void record(recorded_response r);

    /// A slice by a worker that has nothing to run: none where there is nothing to learn from, where it was done often
    /// enough for this policy version (--adapt-slices), or, on threads, where others are at as many as the learner
    /// leaves cores for (at least one): a slice without a core of its own lets go of its worker late, and holds the
    /// learner up.
    std::optional<slice_work> slice(std::int32_t worker, const policy& target, std::stop_token stop);
    /// The worker's last slice is over.
    void settle(std::int32_t worker);

    /// The newest drafter, for the worker to draft with; and the one that it took last.
    drafter_version take(std::int32_t worker);
    drafter_version taken(std::int32_t worker) const;

    spot_counts counts() const;
    /// On threads: for how long in all slices were still at it after rollout had asked for their worker.
    double held_seconds() const;
    drafter_version newest() const;

    /// Writes the drafter as it is, and waits for it.
    void save();
    /// Goes on from such a file, with nothing to learn from.
    void go_on(draft_model d, drafter_progress progress);

    /// What a checkpoint holds of it. Bytes that no trainer of these settings wrote are an opd::invalid_input.
    std::string state() const;
    void restore(std::string_view bytes);

private:
    struct pending {
        bool any = false;
        std::int32_t version = 0; // newest that it learnt from
        drafter_step step;
        std::vector<float> gradient;
    };
    // What a slice is computed with, by the worker that it belongs to.
    struct tools {
        policy target;
        draft_model own;
        opd::cpu_backend backend{.threads = 1};
        drafter_trainer trainer;
        tools(const config& c, const policy& p, const draft_model& shape)
            : target(p), own(shape), trainer(c, *p.model, own, backend) {}
    };
    struct worker_state {
        pending made;
        drafter_version drafts; // that it drafts with
        std::unique_ptr<tools> with;
    };
    class overstay;
    class desk;
    worker_state& of(std::int32_t worker) const;
    opd::spec::draft_data_buffer empty_buffer() const;
    void apply(pending& made);
    void write();

    const config& settings_;
    const index_t width_;      // of what is recorded of a position
    const int desks_;          // most slices at a time
    mutable std::mutex mutex_; // of all below, but for what a worker computes with
    drafter_version newest_;
    adamw_state optimizer_;
    opd::spec::draft_data_buffer buffer_;
    std::int32_t slices_version_ = -1; // policy version that
    std::int64_t slices_made_ = 0;     // so many slices were begun for
    spot_counts counts_;
    int at_work_ = 0;         // slices that are computed now
    double held_seconds_ = 0; // by a clock: no state
    std::optional<background_file> file_;
    mutable std::vector<worker_state> workers_;
};

} // namespace trainer
