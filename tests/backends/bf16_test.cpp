// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The processor's dot products of bfloat16 against the manual's in plain arithmetic, bit for bit: logits of every
// shape, whatever the threads, and calls from head to gradient.
#include "support/compiled/hidden_sides.hpp"
#include "support/plain_tiles.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>
#include <opd/backends/bf16.hpp>
#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

void check_logits(side s) {
    const stored_side<bfloat16> stored(s);
    std::vector<index_t> rows(static_cast<std::size_t>(s.n));
    std::iota(rows.begin(), rows.end(), index_t{0});
    CAPTURE(s.n);
    CAPTURE(s.d);
    const floats plain = tile_logits_of<plain_dots>(s, stored, rows, 0, s.v, 1);
    for (const int threads : {1, 3}) {
        const floats z = tile_logits_of<opd::detail::bf16_dots>(s, stored, rows, 0, s.v, threads);
        bool same = true; // of a NaN the bits are the processor's
        for (std::size_t i = 0; i < z.size(); ++i)
            same = same && (std::isnan(plain[i])
                                ? std::isnan(z[i])
                                : std::bit_cast<std::uint32_t>(z[i]) == std::bit_cast<std::uint32_t>(plain[i]));
        CHECK(same);
    }
}

} // namespace

TEST_CASE("the processor's dot products are the manual's") {
    if (!has_avx512_bf16()) {
        std::puts("SKIPPED: this machine has no dot products of bfloat16 (AVX512-BF16)");
        return;
    }
    for (const index_t n : {1, 16, 17, 40})
        for (const index_t d : {1, 2, 31, 32, 45, 512, 1057}) check_logits(side(n, 75, d, unsigned(n * d)));
    check_logits(side(300, 900, 32, 5));
    side small(20, 40, 45, 6); // numbers, products and sums below float's normal ones
    for (std::size_t i = 0; i < small.x.size(); ++i) small.x[i] *= i % 3 == 0 ? 1e-38f : i % 3 == 1 ? 1e-37f : 1;
    for (std::size_t i = 0; i < small.w.size(); i += 2) small.w[i] *= 1e-38f;
    check_logits(small);
    side bad(20, 40, 45, 7);
    bad.x[3] = std::numeric_limits<float>::infinity(), bad.x[50] = std::numeric_limits<float>::quiet_NaN();
    bad.w[44] = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 45 * 5; i < 45 * 9; ++i) bad.x[i] = bad.w[i] = 3e38f;
    check_logits(bad);
}

TEST_CASE("calls from head to gradient") {
    const std::vector<bfloat16> one(1);
    if (!has_avx512_bf16()) {
        CHECK_THROWS_AS(bf16_head(view(one.data(), 1, 1)), unsupported);
        return;
    }
    side s(69, 300, 77, 4);
    const stored_side<bfloat16> stored(s);
    opd::cpu_backend backend{.threads = 2};
    const index_t n = s.n, v = s.v, d = s.d;
    const bfloat16 *const x = stored.x.data(), *const w = stored.w.data();
    gradients a(s), g(s);
    float *const dx = g.dx.data(), *const dw = g.dw.data();
    // [bf16]
    const auto head = bf16_head(view(w, v, d)); // bfloat16
    const student::hidden mine{view(x, n, d), head, view(dx, n, d), view(dw, v, d)};
    const auto r = evaluate(backend, mine, teacher::hidden{view(x, n, d), head}, jsd{});
    // [/bf16]
    const plain_bf16 plain{stored.head(s)};
    const student::hidden other{view(x, n, d), plain, view(a.dx.data(), n, d), view(a.dw.data(), v, d)};
    CHECK(r.loss == evaluate(backend, other, teacher::hidden{view(x, n, d), plain}, jsd{}).loss);
    CHECK(g == a);
}
