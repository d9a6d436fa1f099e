// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// No allocation in steady state: every call of malloc and its kin is counted, and so every operator new. The first call
// of a shape may make threads and scratch; the second may not ask for a byte.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/counting_malloc.hpp"
#include "support/generators.hpp"

#include <cstdlib>
#include <doctest/doctest.h>
#include <new>

#include <opd/backends/cpu.hpp>
#include <opd/draw.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

TEST_CASE("the counter counts") {
    CHECK(steady([] { ::operator delete(::operator new(4)); }) == 2); // a new-expression may be optimised away
    constexpr std::align_val_t wide{128};
    CHECK(steady([] { ::operator delete(::operator new(256, wide), wide); }) == 2);
    void* volatile p = nullptr; // volatile: else the pair is optimised away
    CHECK(steady([&] { p = std::malloc(7), std::free(p); }) == 2);
    CHECK(steady([&] { p = std::calloc(7, 2), std::free(p); }) == 2);
    CHECK(steady([&] { p = std::aligned_alloc(64, 128), std::free(p); }) == 2);
}

TEST_CASE("evaluate, score and draw allocate nothing in steady state") {
    constexpr index_t n = 6, vocab = 5000, k = 16;
    buffers<float> b({.rows = n, .vocab = vocab, .seed = 2});
    buffers<half> h({.rows = n, .vocab = vocab, .seed = 2});
    std::vector<std::int32_t> ids(n * k);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(7 * (i % k));
    std::vector<float> log_mu(n * k, -3.F), log_q(n * k, -4.F), weight(n * k, 0.1F), losses(n), sparse(n * k);
    std::vector<double> lse(n), log_kept(n);
    const auto id = view(ids.data(), n, k);
    const auto f = [](std::vector<float>& x) { return view(x.data(), n, k); };
    const std::vector<std::int64_t> offsets{0, 2, 6};
    const std::vector<std::uint64_t> sample{0, 1, 2, 3, 4, 5};
    const std::vector<std::uint32_t> position(n, 9);
    const std::vector<double> uniforms(n * k, 0.3);
    const draw_keys<> keyed{.seed = 3, .sample = sample, .position = position};
    std::vector<std::int32_t> out_ids(n * k);
    std::vector<float> out_log(n * k), out_weight(n * k), out_tail(n);
    std::vector<std::uint8_t> out_exact(n * k);
    std::vector<filter_cut> cut(n);
    std::vector<index_t> kept(n);
    for (const int threads : {1, 2}) {
        cpu_backend backend{.threads = threads};
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
        CHECK(steady([&] { evaluate(backend, b.student(), samples, mc{reverse_kl{}}, e); }) == 0);
        CHECK(steady([&] { evaluate(backend, b.student(), weighted, mc{reverse_kl{}}, e); }) == 0);
        CHECK(steady([&] { token_logp(backend, b.z_view(), id, f(log_mu)); }) == 0);
        CHECK(steady([&] { top_k(backend, b.z_view(), view(out_ids.data(), n, k), f(out_log), 1, {}, out_tail); }) ==
              0);
        const auto draws = [&](auto design, const draw_keys<>& keys, const filter& kept_by) {
            const index_t m = design.columns();
            const drawn<> to{view(out_ids.data(), n, m), view(out_log.data(), n, m), view(out_weight.data(), n, m),
                             view(out_exact.data(), n, m)};
            result r;
            const long asked = steady([&] {
                r = draw(backend, b.z_view(), design, keys, to,
                         {.filter = kept_by, .lse = lse, .log_kept = log_kept, .cut = cut, .kept = kept});
            });
            CHECK(r.diagnostics.kept == n);
            CHECK(r.diagnostics.bad_rows == 0);
            return asked;
        };
        for (const filter& kept_by : {filter{}, filter{.top_k = 50}, filter{.temperature = 0.7F, .top_p = 0.9F}}) {
            CHECK(draws(design::threshold{k}, keyed, kept_by) == 0);
            CHECK(draws(design::threshold{k}, {.uniforms = view(uniforms.data(), n, 1)}, kept_by) == 0);
            CHECK(draws(design::iid{k}, keyed, kept_by) == 0);
            CHECK(draws(design::iid{k}, {.uniforms = view(uniforms.data(), n, k)}, kept_by) == 0);
            CHECK(draws(design::gumbel{}, keyed, kept_by) == 0);
            CHECK(draws(design::greedy{}, {}, kept_by) == 0);
        }
        e.lse = {};
        const student::on_support<float> s{b.z_view(), f(sparse)};
        CHECK(steady([&] { evaluate(backend, s, support, renormalised{reverse_kl{}}, e); }) == 0);
    }
}

TEST_CASE("all memory may be the caller's: with an arena of the size asked for, not even the first call allocates") {
    buffers<float> b({.rows = 4, .vocab = 3000, .seed = 2});
    cpu_backend backend;
    std::vector<std::byte> arena(workspace_bytes(backend, b.student(), b.teacher(), jsd{}));
    buffers<float> tiny({.rows = 1, .vocab = 1});
    evaluate(backend, tiny.student(), tiny.teacher(), reverse_kl{}); // makes the threads
    backend.arena = arena;
    const long before = allocations.load();
    evaluate(backend, b.student(), b.teacher(), jsd{});
    CHECK(allocations.load() == before);
}
