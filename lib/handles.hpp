// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Handles that a caller may have freed, or may never have had: each is looked up before it is touched.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "errors.hpp"

namespace opd_c {

/// The live handles of one kind. Whoever uses one shares it: another thread's destroy waits for nobody, and frees
/// nothing that is in use.
template <class Handle>
class handle_table {
public:
    Handle* add(std::shared_ptr<Handle> handle) {
        Handle* const key = handle.get();
        const std::unique_lock lock(mutex_);
        live_.emplace(key, std::move(handle));
        return key;
    }
    /// Throws invalid_input for what is no live handle of this kind.
    std::shared_ptr<Handle> of(const char* name, const Handle* key) const {
        if (key == nullptr) refuse(name, "is a null pointer");
        const std::shared_lock lock(mutex_);
        const auto found = live_.find(key);
        if (found == live_.end()) refuse(name, "is not a live handle of its kind: it was destroyed, or never made");
        return found->second;
    }
    void remove(const Handle* key) noexcept {
        std::shared_ptr<Handle> last; // freed after the lock
        const std::unique_lock lock(mutex_);
        if (const auto found = live_.find(key); found != live_.end()) {
            last = std::move(found->second);
            live_.erase(found);
        }
    }

private:
    mutable std::shared_mutex mutex_;
    std::unordered_map<const Handle*, std::shared_ptr<Handle>> live_;
};

/// One table a kind, never destroyed: handles may outlive static destructors.
template <class Handle>
handle_table<Handle>& handles() {
    static auto* const table = new handle_table<Handle>;
    return *table;
}

} // namespace opd_c
