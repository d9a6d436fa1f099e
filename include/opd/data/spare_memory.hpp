// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Memory for copies, used again: the system's fresh pages cost more time than what is copied to them. Threads may take
// and return pieces at once; a piece keeps the store alive that it goes back to.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace opd::data::detail {

class spare_memory : public std::enable_shared_from_this<spare_memory> {
public:
    static constexpr std::size_t most = std::size_t{64} << 20, most_pieces = 64; ///< that lie here; the oldest go

    /// Returns a piece to where it came from.
    struct giver {
        std::shared_ptr<spare_memory> store{};
        std::size_t size = 0;
        void operator()(std::byte* p) const { store->give(p, size); }
    };
    using piece = std::unique_ptr<std::byte[], giver>;

    spare_memory() = default;
    spare_memory(const spare_memory&) = delete;
    spare_memory& operator=(const spare_memory&) = delete;
    ~spare_memory() {
        for (const auto& [p, size] : spare_) ::operator delete(p, alignment);
    }

    /// At least so many bytes, of any content: the smallest spare piece that is no more than twice as large, or a new
    /// one.
    piece take(std::size_t size) {
        constexpr std::size_t unit = 4096;
        size = (size + unit) / unit * unit;
        {
            const std::lock_guard lock(mutex_);
            auto best = spare_.end();
            for (auto at = spare_.begin(); at != spare_.end(); ++at)
                if (at->second >= size && at->second / 2 <= size && (best == spare_.end() || at->second < best->second))
                    best = at;
            if (best != spare_.end()) {
                const auto [p, has] = *best;
                spare_.erase(best);
                held_ -= has;
                return {p, {shared_from_this(), has}};
            }
        }
        size += size / 4; // for a longer one
        return {static_cast<std::byte*>(::operator new(size, alignment)), {shared_from_this(), size}};
    }

private:
    static constexpr std::align_val_t alignment{64};

    void give(std::byte* p, std::size_t size) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            spare_.emplace_back(p, size);
            held_ += size;
        } catch (...) { // no memory for the list: none is kept
            ::operator delete(p, alignment);
        }
        for (; held_ > most || spare_.size() > most_pieces; spare_.pop_front()) {
            held_ -= spare_.front().second;
            ::operator delete(spare_.front().first, alignment);
        }
    }

    std::mutex mutex_;
    std::list<std::pair<std::byte*, std::size_t>> spare_; ///< the oldest first
    std::size_t held_ = 0;                                ///< bytes of them
};

} // namespace opd::data::detail
