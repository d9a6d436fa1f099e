// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// No allocation in steady state: every operator new, aligned ones included, is counted. The first call of a shape may make
// threads and scratch; the second may not ask for a byte.
#include "support/generators.hpp"

#include <atomic>
#include <cstdlib>
#include <doctest/doctest.h>
#include <new>

#include <opd/backends/eigen.hpp>
#include <opd/estimators/designs.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

namespace {
std::atomic<long> allocations{0};

void* counted(std::size_t size, std::size_t alignment) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    void* p = alignment <= alignof(std::max_align_t)
                  ? std::malloc(size)
                  : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (!p) throw std::bad_alloc();
    return p;
}
} // namespace

[[gnu::noinline]] void* operator new(std::size_t n) { return counted(n, 1); }
[[gnu::noinline]] void* operator new[](std::size_t n) { return counted(n, 1); }
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a) { return counted(n, std::size_t(a)); }
[[gnu::noinline]] void* operator new[](std::size_t n, std::align_val_t a) { return counted(n, std::size_t(a)); }
// noinline throughout: g++ otherwise takes free for the wrong partner of new
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

using namespace opd;
using namespace opd::test;

namespace {
/// Allocations of the second and third call of f.
template <class F>
long steady(F f) {
    f();
    const long before = allocations.load();
    f();
    f();
    return allocations.load() - before;
}
} // namespace

TEST_CASE("the counter counts") {
    CHECK(steady([] { ::operator delete(::operator new(4)); }) == 2); // a new-expression may be optimised away
    constexpr std::align_val_t wide{128};
    CHECK(steady([] { ::operator delete(::operator new(256, wide), wide); }) == 2);
}

TEST_CASE("evaluate, token_logp and the designs allocate nothing in steady state") {
    constexpr index_t n = 6, vocab = 5000, k = 16;
    buffers<float> b({.rows = n, .vocab = vocab, .seed = 2});
    buffers<half> h({.rows = n, .vocab = vocab, .seed = 2});
    std::vector<std::int32_t> ids(n * k);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(7 * (i % k));
    std::vector<float> log_mu(n * k, -3.F), log_q(n * k, -4.F), weight(n * k, 0.1F), losses(n), lse(n), sparse(n * k);
    const auto id = view(ids.data(), n, k);
    const auto f = [](std::vector<float>& x) { return view(x.data(), n, k); };
    const std::vector<std::int64_t> offsets{0, 2, 6};
    for (const int threads : {1, 2}) {
        eigen_backend backend{.threads = threads};
        env e{
            .reduction = reduce::sequence_mean, .weights = b.weights, .offsets = offsets, .losses = losses, .lse = lse};
        CAPTURE(threads);
        CHECK(steady([&] { evaluate(backend, b.student(), b.teacher(), reverse_kl{}, e); }) == 0);
        CHECK(steady([&] { evaluate(backend, b.student(), b.teacher(), jsd{}, e); }) == 0);
        CHECK(steady([&] { evaluate(backend, h.student(), h.teacher(), forward_kl{}, e); }) == 0);
        CHECK(steady([&] { evaluate(backend, h.student(), h.teacher(), total_variation{}, e); }) == 0);
        const teacher::support<std::int32_t> support{id, f(log_q)};
        const teacher::samples<std::int32_t> samples{id, f(log_mu), f(log_q)};
        const teacher::weighted<std::int32_t> weighted{id, f(weight), f(log_mu), f(log_q)};
        CHECK(steady([&] { evaluate(backend, b.student(), support, tail_bucket{jsd{}}, e); }) == 0);
        CHECK(steady([&] { evaluate(backend, b.student(), samples, mc_reverse_kl{}, e); }) == 0);
        CHECK(steady([&] { evaluate(backend, b.student(), weighted, weighted_reverse_kl{}, e); }) == 0);
        CHECK(steady([&] { token_logp(backend, b.z_view(), id, f(log_mu)); }) == 0);
        e.lse = {};
        const student::on_support<float> s{b.z_view(), f(sparse)};
        CHECK(steady([&] { evaluate(backend, s, support, renormalised{reverse_kl{}}, e); }) == 0);
    }
    std::vector<float> scratch(design::scratch_floats(vocab));
    std::vector<std::uint8_t> exact(k);
    CHECK(steady([&] {
              design::threshold(b.z_view().row(0), vocab, 1, k, 0.3, ids.data(), weight.data(), log_mu.data(),
                                exact.data(), scratch);
              design::iid(
                  b.z_view().row(0), vocab, 1, k, [](index_t) { return 0.5; }, ids.data(), log_mu.data(), scratch);
          }) == 0);
}

TEST_CASE("all memory may be the caller's: with an arena of the size asked for, not even the first call allocates") {
    buffers<float> b({.rows = 4, .vocab = 3000, .seed = 2});
    eigen_backend backend;
    std::vector<std::byte> arena(workspace_bytes(backend, b.student(), b.teacher(), jsd{}));
    buffers<float> tiny({.rows = 1, .vocab = 1});
    evaluate(backend, tiny.student(), tiny.teacher(), reverse_kl{}); // makes the threads
    backend.arena = arena;
    const long before = allocations.load();
    evaluate(backend, b.student(), b.teacher(), jsd{});
    CHECK(allocations.load() == before);
}
