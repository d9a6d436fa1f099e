// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How new weights reach the rollout workers: the learner publishes an immutable copy, a worker takes it between two
// steps of its own. No weights are ever written while somebody reads them, and old ones live as long as somebody uses
// them.
//
// With --publish deltas workers share no memory with the learner: each has weights of its own, and is sent what changed
// (opd/data/weight_delta.hpp), or all of it where it joins late or missed the base.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "model/model.hpp"
#include "opd/data/weight_delta.hpp"
#include "opd/sched/types.hpp"

namespace trainer {

/// Weights that nobody changes any more, and their version.
struct policy {
    std::shared_ptr<const transformer<float>> model;
    std::int32_t version = 0;
};

/// The tensors of a model in storage::numbers, as deltas name them; its caller calls weights_changed() after it has
/// written them.
std::vector<opd::data::weight_target> parts_of(transformer<float>& model);
std::vector<opd::data::weight_part> parts_of(const transformer<float>& model);

struct publishing {
    bool deltas = false;
    bool check = false; ///< receivers compare what they made with the learner's weights, bit for bit
};

/// What was sent, over all workers.
struct publication_counts {
    std::int64_t deltas = 0, whole = 0;            ///< messages
    std::int64_t delta_bytes = 0, whole_bytes = 0; ///< of them
    std::int64_t missed = 0;                       ///< workers whose base was too old for the deltas that are kept
    std::int64_t checked = 0;                      ///< weights that were compared, and were equal
};

/// What a worker is sent: deltas, each from what the one before it makes, to the weights that it asked for.
struct parcel {
    using bytes = std::vector<std::byte>;
    std::vector<std::shared_ptr<const bytes>> deltas;
    policy weights; ///< the learner's: what a worker that missed the base is sent whole, and what a check compares with
    opd::data::weight_version made;
};

/// What the latest call of the learner made, and what it went on from: a worker that comes back while the learner
/// trains is told to install those. Any thread may call.
class publication {
public:
    using name_type = opd::sched::weights;

    explicit publication(const publishing& how = {}) : how_(how) {}
    const publishing& how() const { return how_; }

    /// What a learner publishes that was thought dead, after another call has published, nobody asks for: it is
    /// dropped.
    void publish(const name_type& name, policy what) {
        if (!what.model || what.version != name.version)
            throw std::invalid_argument(fmt::format("publication: no weights of version {}", name.version));
        entry next{name, std::move(what), {}, {}}; // what it replaces is freed outside of the lock
        const std::lock_guard one_at_a_time(publishing_);
        if (how_.deltas) add_delta(next);
        const std::lock_guard lock(mutex_);
        if (name.job < latest_.name.job) return;
        if (name.version != latest_.name.version) std::swap(previous_, latest_); // else the same update, made again
        std::swap(latest_, next);
    }

    /// Exactly these: a worker that installed others would mislabel what it draws.
    policy get(const name_type& name) const {
        const std::lock_guard lock(mutex_);
        return find(name).what;
    }

    /// The same for who holds another version: the deltas that are kept from there to here. Where there are none from
    /// there, the last one, which the receiver then refuses.
    parcel send(const name_type& name, const opd::data::weight_version& held) const;

    policy latest() const {
        const std::lock_guard lock(mutex_);
        return latest_.what;
    }

    void count(const publication_counts& c) const;
    publication_counts counts() const {
        const std::lock_guard lock(mutex_);
        return counts_;
    }

private:
    static constexpr std::size_t kept_deltas = 8;
    struct delta {
        opd::data::weight_version base;
        parcel::bytes bytes;
    };
    struct entry {
        name_type name;
        policy what;
        opd::data::weight_version made;
        std::vector<std::shared_ptr<const delta>> chain; // the last one makes these weights
    };

    void add_delta(entry& next) const;
    const entry& find(const name_type& name) const {
        for (const entry* e : {&latest_, &previous_})
            if (e->what.model && e->name == name) return *e;
        const auto text = [](const name_type& w) { return fmt::format("version {} of job {}", w.version, w.job); };
        throw std::logic_error(fmt::format("publication: {} was asked for, {} is published", text(name),
                                           latest_.what.model ? text(latest_.name) : "none"));
    }

    const publishing how_;
    std::mutex publishing_;
    mutable std::mutex mutex_; // of all below
    entry latest_, previous_;
    mutable publication_counts counts_;
};

/// A worker's own weights under --publish deltas, and which they are.
class weight_receiver {
public:
    /// Exactly the weights of that name, made of what it holds and what it is sent. Throws std::logic_error where they
    /// are not published, or where a check finds other bits than the learner's.
    policy take(const publication& from, const publication::name_type& name);

private:
    std::shared_ptr<const transformer<float>> model_;
    opd::data::weight_version held_;
};

} // namespace trainer
