// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How new weights reach the rollout workers: the learner publishes an immutable copy, a worker takes it between two steps
// of its own. No weights are ever written while somebody reads them, and old ones live as long as somebody uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "model.hpp"

namespace trainer {

/// Weights that nobody changes any more, and their version.
struct policy {
    std::shared_ptr<const transformer<float>> model;
    std::int32_t version = 0;
};

/// The two latest published policies: a worker that comes late is still told to install version v while the learner, which
/// waits for every worker after each step, may have published v + 1, but not more. Any thread may call.
class publication {
public:
    void publish(policy next) {
        if (!next.model) throw std::invalid_argument("publication: there are no weights");
        policy gone; // freed outside of the lock
        const std::lock_guard lock(mutex_);
        if (latest_.model && next.version <= latest_.version)
            throw std::invalid_argument("publication: version " + std::to_string(next.version) + " after version " +
                                        std::to_string(latest_.version));
        gone = std::exchange(previous_, std::exchange(latest_, std::move(next)));
    }

    /// Exactly this version: a worker that installed another one would mislabel what it draws.
    policy get(std::int64_t version) const {
        const std::lock_guard lock(mutex_);
        for (const policy* p : {&latest_, &previous_})
            if (p->model && p->version == version) return *p;
        throw std::logic_error("publication: version " + std::to_string(version) + " was asked for, " +
                               (latest_.model ? "version " + std::to_string(latest_.version) : "none") +
                               " is published");
    }

    policy latest() const {
        const std::lock_guard lock(mutex_);
        return latest_;
    }

private:
    mutable std::mutex mutex_;
    policy latest_, previous_;
};

} // namespace trainer
