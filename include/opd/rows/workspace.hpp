// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scratch memory of the CPU backend: one block, grown when a call needs more and kept, so that in steady state
// nothing is allocated. Pages are advised huge on Linux: first touch of 4 KB pages costs more than the arithmetic. A
// caller who owns all memory passes an arena instead; a call that needs more than the arena holds throws and says how
// much.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd {
inline namespace OPD_ISA {

class workspace {
public:
    workspace() = default;
    workspace(const workspace&) = delete;
    workspace& operator=(const workspace&) = delete;
    ~workspace() { std::free(owned_); }

    /// At least `bytes`, aligned to 64, contents undefined. From `arena` if it is not empty.
    std::span<std::byte> get(std::size_t bytes, std::span<std::byte> arena) {
        if (!arena.empty()) {
            void* p = arena.data();
            std::size_t room = arena.size();
            if (!std::align(64, bytes, p, room))
                throw invalid_input("workspace", "holds " + std::to_string(arena.size()) + " bytes; this call needs " +
                                                     std::to_string(bytes + 64) + " (see workspace_bytes)");
            return {static_cast<std::byte*>(p), bytes};
        }
        if (bytes > size_) {
            constexpr std::size_t huge = std::size_t{2} << 20;
            const std::size_t unit = bytes >= huge ? huge : 64;
            const std::size_t wanted = (bytes + unit - 1) / unit * unit;
            void* p = std::aligned_alloc(unit, wanted);
            if (!p) throw std::bad_alloc();
#if defined(__linux__)
            if (unit == huge) ::madvise(p, wanted, MADV_HUGEPAGE);
#endif
            std::free(owned_);
            owned_ = p;
            size_ = wanted;
        }
        return {static_cast<std::byte*>(owned_), bytes};
    }

private:
    void* owned_ = nullptr;
    std::size_t size_ = 0;
};

} // namespace OPD_ISA
} // namespace opd
