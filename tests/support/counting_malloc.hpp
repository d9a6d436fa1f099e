// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every call of malloc and its kin is counted, and so every operator new; and the bytes that they ask for. Replaces
// them in the whole program: include it in one file of it.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace opd::test {
inline std::atomic<long> allocations{0}; ///< calls
inline std::atomic<long> asked{0};       ///< bytes, of all calls

inline void count_allocation(std::size_t n) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    asked.fetch_add(static_cast<long>(n), std::memory_order_relaxed);
}

/// Allocations of the second and third call of f.
template <class F>
long steady(F f) {
    f();
    const long before = allocations.load();
    f();
    f();
    return allocations.load() - before;
}
} // namespace opd::test

// glibc's own names for what the functions below replace.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t n) noexcept {
    opd::test::count_allocation(n);
    return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) noexcept {
    opd::test::count_allocation(n * size);
    return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) noexcept {
    opd::test::count_allocation(n);
    return __libc_realloc(p, n);
}
void* memalign(std::size_t alignment, std::size_t n) noexcept {
    opd::test::count_allocation(n);
    return __libc_memalign(alignment, n);
}
void* aligned_alloc(std::size_t alignment, std::size_t n) noexcept { return memalign(alignment, n); }
int posix_memalign(void** out, std::size_t alignment, std::size_t n) noexcept {
    *out = memalign(alignment, n);
    return *out ? 0 : ENOMEM;
}
}
