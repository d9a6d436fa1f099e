// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How new weights reach the rollout workers: the learner publishes an immutable copy, a worker takes it between two steps
// of its own. No weights are ever written while somebody reads them, and old ones live as long as somebody uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "model.hpp"
#include "opd/sched/types.hpp"

namespace trainer {

/// Weights that nobody changes any more, and their version.
struct policy {
    std::shared_ptr<const transformer<float>> model;
    std::int32_t version = 0;
};

/// What the latest call of the learner made, and what it went on from: a worker that comes back while the learner trains is
/// told to install those. Any thread may call.
class publication {
public:
    using name_type = opd::sched::weights;

    /// What a learner publishes that was thought dead, after another call has published, nobody asks for: it is dropped.
    void publish(const name_type& name, policy what) {
        if (!what.model || what.version != name.version)
            throw std::invalid_argument(fmt::format("publication: no weights of version {}", name.version));
        entry next{name, std::move(what)}; // what it replaces is freed outside of the lock
        const std::lock_guard lock(mutex_);
        if (name.job < latest_.name.job) return;
        if (name.version != latest_.name.version) std::swap(previous_, latest_); // else the same update, made again
        std::swap(latest_, next);
    }

    /// Exactly these: a worker that installed others would mislabel what it draws.
    policy get(const name_type& name) const {
        const std::lock_guard lock(mutex_);
        for (const entry* e : {&latest_, &previous_})
            if (e->what.model && e->name == name) return e->what;
        const auto text = [](const name_type& w) { return fmt::format("version {} of job {}", w.version, w.job); };
        throw std::logic_error(fmt::format("publication: {} was asked for, {} is published", text(name),
                                           latest_.what.model ? text(latest_.name) : "none"));
    }

    policy latest() const {
        const std::lock_guard lock(mutex_);
        return latest_.what;
    }

private:
    struct entry {
        name_type name;
        policy what;
    };
    mutable std::mutex mutex_;
    entry latest_, previous_;
};

} // namespace trainer
