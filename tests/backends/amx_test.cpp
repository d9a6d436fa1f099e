// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The processor's matrix tiles against the manual's in plain arithmetic, bit for bit.
#include "support/compiled/hidden_sides.hpp"
#include "support/plain_tiles.hpp"

#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>
#include <opd/backends/amx.hpp>
#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

template <class X, class W>
void check_logits() {
    for (const index_t n : {1, 16, 17, 40, 300})
        for (const index_t d : {1, 32, 45, 512, 1056}) {
            if (n == 300 && d > 32) continue;
            side s(n, n == 300 ? 900 : 75, d, unsigned(n * d));
            if (d == 45) // numbers and products below float's normal ones
                for (std::size_t i = 0; i < s.x.size(); ++i) s.x[i] *= i % 3 == 0 ? 1e-38f : i % 3 == 1 ? 1e-30f : 1;
            const stored_side<X, W> stored(s);
            std::vector<index_t> rows(static_cast<std::size_t>(n));
            std::iota(rows.begin(), rows.end(), index_t{0});
            const floats plain = tile_logits_of<plain_tiles>(s, stored, rows, 0, s.v, 1);
            for (const int threads : {1, 3}) {
                const floats z = tile_logits_of<opd::detail::amx_tiles>(s, stored, rows, 0, s.v, threads);
                CAPTURE(n);
                CAPTURE(d);
                CHECK(equal_bits(z, plain));
            }
        }
}

} // namespace

TEST_CASE("the processor's tiles are the manual's") {
    const std::vector<bfloat16> one(1);
    if (!has_amx()) {
        CHECK_THROWS_AS(amx_head{view(one.data(), 1, 1)}, unsupported);
        std::puts("SKIPPED: this machine has no bfloat16 matrix tiles (AMX)");
        return;
    }
    check_logits<bfloat16, bfloat16>();
    check_logits<float, float>();
    check_logits<float, bfloat16>();
    check_logits<bfloat16, float>();
    // calls, from head to gradient
    side s(69, 300, 76, 4), rounded = s;
    opd::cpu_backend backend{.threads = 2};
    const auto call = [&](const auto& stored, const auto& head, gradients& to) {
        const student::hidden mine{stored.states(s), head, view(to.dx.data(), s.n, s.d), view(to.dw.data(), s.v, s.d)};
        return evaluate(backend, mine, teacher::hidden{stored.states(s), head}, jsd{}).loss;
    };
    const stored_side<float> in_float(s);
    gradients a(s), g(s);
    CHECK(call(in_float, amx_head{in_float.head(s)}, g) == call(in_float, plain_amx{in_float.head(s)}, a));
    CHECK(g == a);

    const stored_side<bfloat16> stored(rounded);
    const index_t n = s.n, v = s.v, d = s.d;
    const bfloat16 *const x = stored.x.data(), *const w = stored.w.data();
    float *const dx = g.dx.data(), *const dw = g.dw.data();
    // [amx]
    const amx_head head{view(w, v, d)}; // float or bfloat16
    const student::hidden mine{view(x, n, d), head, view(dx, n, d), view(dw, v, d)};
    const auto r = evaluate(backend, mine, teacher::hidden{view(x, n, d), head}, jsd{});
    // [/amx]
    CHECK(r.loss == call(stored, plain_amx{stored.head(s)}, a));
    CHECK(g == a);
}
