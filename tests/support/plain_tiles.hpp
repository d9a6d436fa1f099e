// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The processor's matrix tiles and dot products of bfloat16 as its manual says them (TDPBF16PS, VDPBF16PS), in plain
// arithmetic: for opd::amx_head and opd::bf16_head on any machine.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include <opd/backends/amx.hpp>
#include <opd/hidden.hpp>

#include "support/hidden_sides.hpp"

namespace opd::test {

struct plain_tiles {
    static constexpr const char* argument = "amx_head.w";
    static inline std::atomic<long> runs = 0; ///< blocks of all calls
    static float flushed(float x) {
        return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
    }
    static float at(std::uint16_t bits) { return flushed(std::bit_cast<float>(std::uint32_t{bits} << 16)); }
    /// Σ a[2k] b[2k], k < 16, one after the other, each rounded once. A product that is 0 or a normal number is exact;
    /// these loops are most of the tests' time, in builds that inline nothing.
    static float chain(const float* a, const float* b) {
        constexpr float least = std::numeric_limits<float>::min();
        float sum = 0;
        for (int k = 0; k < 32; k += 2) {
            const float x = a[k], y = b[k], product = x * y;
            if (product >= least || product <= -least || x == 0 || y == 0)
                sum = product + sum;
            else
                sum = std::fma(x, y, sum);
            if (sum < least && sum > -least) sum = flushed(sum);
        }
        return sum;
    }
    template <int A, int B>
    void run(const opd::detail::tile_block& t) const {
        ++runs;
        struct pair {
            int a, b;
        };
        std::vector<pair> parts;
        for (int b = B - 1; b >= 0; --b) parts.push_back({0, b});
        for (int a = A - 1; a >= 1; --a)
            for (int b = 0; b < (a == 1 && B > 1 ? 2 : 1); ++b) parts.push_back({a, b});
        float c[32][32], a[std::size_t(A)][32][32], b[std::size_t(B)][32][32];
        for (index_t i = 0; i < 32; ++i)
            for (index_t r = 0; r < 32; ++r) c[i][r] = t.from == nullptr ? 0 : flushed(t.from[i * t.from_row + r]);
        for (index_t s = 0; s < t.steps; ++s) {
            for (index_t i = 0; i < 32; ++i)
                for (index_t k = 0; k < 32; ++k) {
                    for (int p = 0; p < A; ++p) a[p][i][k] = at(t.a[i * t.a_row + p * t.a_part + s * 32 + k]);
                    for (int p = 0; p < B; ++p)
                        b[p][i][k] =
                            at(t.b[i / 16 * t.b_half + p * t.b_part + s * 512 + k / 2 * 32 + i % 16 * 2 + k % 2]);
                }
            for (index_t i = 0; i < 32; ++i)
                for (index_t r = 0; r < 32; ++r)
                    for (const pair p : parts) {
                        const float *const x = a[p.a][i], *const y = b[p.b][r];
                        c[i][r] = flushed(c[i][r] + flushed(chain(x, y) + chain(x + 1, y + 1)));
                    }
        }
        for (index_t i = 0; i < 32; ++i)
            for (index_t r = 0; r < 32; ++r) t.c[i * t.c_row + r] = c[i][r];
    }
};
template <class E>
using plain_amx = amx_head<E, plain_tiles>;

struct plain_dots {
    static constexpr bool logits_alone = true;
    static constexpr const char* argument = "bf16_head.w";
    static inline std::atomic<long> runs = 0;
    /// x y + sum, rounded once.
    static float add(float sum, float x, float y) { return plain_tiles::flushed(std::fma(x, y, sum)); }
    template <int A, int B>
    void run(const opd::detail::tile_block& t) const {
        static_assert(A == 1 && B == 1);
        ++runs;
        for (index_t i = 0; i < 32; ++i)
            for (index_t r = 0; r < 32; ++r) {
                float sum = t.from == nullptr ? 0 : plain_tiles::flushed(t.from[i * t.from_row + r]);
                for (index_t k = 0; k < 32 * t.steps; k += 2) {
                    const std::uint16_t* const x = t.a + i * t.a_row + k;
                    const std::uint16_t* const y = t.b + r / 16 * t.b_half + k * 16 + r % 16 * 2;
                    sum = add(sum, plain_tiles::at(x[1]), plain_tiles::at(y[1]));
                    sum = add(sum, plain_tiles::at(x[0]), plain_tiles::at(y[0]));
                }
                t.c[i * t.c_row + r] = sum;
            }
    }
};
using plain_bf16 = amx_head<bfloat16, plain_dots>;

/// A side as X stores its states and W its head; the side then has the floats that they are.
template <class X, class W = X>
struct stored_side {
    std::vector<X> x, bias;
    std::vector<W> w;
    explicit stored_side(side& s) : x(stored<X>(s.x)), bias(stored<X>(s.bias)), w(stored<W>(s.w)) {}
    auto states(const side& s) const { return view(x.data(), s.n, s.d); }
    auto head(const side& s) const { return view(w.data(), s.v, s.d); }
    vector_view<const X> biases(const side& s) const {
        return {bias.empty() ? nullptr : bias.data(), bias.empty() ? 0 : s.v};
    }

private:
    template <class E>
    static std::vector<E> stored(floats& of) {
        if constexpr (std::is_same_v<E, float>) {
            return of;
        } else {
            std::vector<E> r;
            for (float& y : of) r.push_back(element<E>::store(y)), y = element<E>::load(r.back());
            return r;
        }
    }
};

/// Logits of ids [begin, end) and some of a side's rows through tiles; NaN where none are asked for. `w`: where the
/// head lies, if not in `stored`.
template <class Tiles, class X, class W>
floats tile_logits_of(const side& s, const stored_side<X, W>& stored, const std::vector<index_t>& list, index_t begin,
                      index_t end, int threads, const W* w = nullptr) {
    namespace d = opd::detail;
    floats z(std::size_t(s.n * s.v), std::numeric_limits<float>::quiet_NaN());
    thread_team team(threads);
    const auto count = index_t(list.size());
    const std::size_t each = (d::logits_scratch(count, d::tile_parts<W>) + 63) / 64 * 64,
                      packed = sizeof(float) * std::size_t(d::tile_floats(d::tile_cuts::padded(count),
                                                                          d::tile_cuts::padded(s.d), d::tile_parts<X>));
    workspace memory;
    std::byte* const at = memory.get(each * std::size_t(threads) + packed, {}).data();
    auto* const pairs = reinterpret_cast<float*>(at + each * std::size_t(threads));
    std::fill_n(at, each * std::size_t(threads) + packed, std::byte{0xff}); // NaN
    const d::row_list rows{list.data(), count};
    d::pack_pairs<d::logits_depth<d::tile_parts<W>, d::tile_parts<X>>>(stored.x.data(), s.d, rows, s.d, pairs, team);
    d::tile_logits<X>(pairs, rows, amx_head<W, Tiles>{view(w != nullptr ? w : stored.w.data(), s.v, s.d)}, begin, end,
                      team, {at, each}, [&](index_t r) { return z.data() + r * s.v; });
    return z;
}

} // namespace opd::test
