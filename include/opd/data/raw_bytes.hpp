// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Bytes that grow like a std::vector's, but that nobody fills with zeros before they are written. Large ones ask for
// huge pages where the system has them: a page fault for 2 MiB, not for 4 KiB.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace opd::data::detail {

template <class T>
struct raw_allocator {
    using value_type = T;
    static constexpr std::size_t huge = std::size_t{2} << 20;

    raw_allocator() = default;
    template <class U>
    raw_allocator(const raw_allocator<U>&) noexcept {}

    T* allocate(std::size_t n) {
        if (n * sizeof(T) < huge) return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64}));
        void* const p = ::operator new (n * sizeof(T), std::align_val_t{huge});
#if defined(MADV_HUGEPAGE)
        ::madvise(p, n * sizeof(T), MADV_HUGEPAGE); // a hint: what comes of it does not matter
#endif
        return static_cast<T*>(p);
    }
    void deallocate(T* p, std::size_t n) noexcept {
        ::operator delete (static_cast<void*>(p), std::align_val_t{n * sizeof(T) < huge ? 64 : huge});
    }
    template <class U, class... Args>
    void construct(U* p, Args&&... args) {
        if constexpr (sizeof...(Args) == 0)
            ::new (static_cast<void*>(p)) U; // as it lies
        else
            ::new (static_cast<void*>(p)) U(std::forward<Args>(args)...);
    }
    friend bool operator==(const raw_allocator&, const raw_allocator&) = default;
};

using raw_bytes = std::vector<std::byte, raw_allocator<std::byte>>;

} // namespace opd::data::detail
