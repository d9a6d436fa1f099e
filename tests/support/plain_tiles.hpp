// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The processor's matrix tiles as its manual says them (TDPBF16PS), in plain arithmetic: for opd::amx_head on any machine.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <opd/backends/amx.hpp>
#include <opd/hidden.hpp>

#include "support/hidden_sides.hpp"

namespace opd::test {

struct plain_tiles {
    static inline std::atomic<long> runs = 0; ///< blocks of all calls
    static float flushed(float x) {
        return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
    }
    static float at(const void* p, index_t bytes, index_t number) {
        const auto bits = reinterpret_cast<const std::uint16_t*>(static_cast<const char*>(p) + bytes)[number];
        return flushed(std::bit_cast<float>(std::uint32_t{bits} << 16));
    }
    void run(const opd::detail::tile_block& t) const {
        ++runs;
        for (index_t i = 0; i < 32; ++i)
            for (index_t r = 0; r < 32; ++r) {
                float& c = *reinterpret_cast<float*>(reinterpret_cast<char*>(t.c + r) + i * t.c_bytes);
                if (!t.goes_on) c = 0;
                c = flushed(c);
                for (index_t s = 0; s < t.steps; ++s) {
                    float even = 0, odd = 0;
                    for (index_t k = 0; k < 16; ++k) {
                        const void* const b = r < 16 ? t.b0 : t.b1;
                        const index_t pair = (s * 16 + k) * 32 + r % 16 * 2, a = i * t.a_bytes, first = s * 32 + 2 * k;
                        even = flushed(std::fma(at(t.a, a, first), at(b, 0, pair), even));
                        odd = flushed(std::fma(at(t.a, a, first + 1), at(b, 0, pair + 1), odd));
                    }
                    c = flushed(c + flushed(even + odd));
                }
            }
    }
};
using plain_amx = amx_head<bfloat16, plain_tiles>;

/// A side as bfloat16 stores it; the side then has the floats that it is.
struct stored_side {
    std::vector<bfloat16> x, w, bias;
    explicit stored_side(side& s) {
        const auto round = [](floats& of) {
            std::vector<bfloat16> r;
            for (float& y : of) r.push_back(element<bfloat16>::store(y)), y = element<bfloat16>::load(r.back());
            return r;
        };
        x = round(s.x), w = round(s.w), bias = round(s.bias);
    }
    auto states(const side& s) const { return view(x.data(), s.n, s.d); }
    auto head(const side& s) const { return view(w.data(), s.v, s.d); }
    vector_view<const bfloat16> biases(const side& s) const {
        return {bias.empty() ? nullptr : bias.data(), bias.empty() ? 0 : s.v};
    }
};

/// Logits of ids [begin, end) and some of a side's rows through tiles; NaN where none are asked for. `w`: where the head lies, if not in `stored`.
template <class Tiles>
floats tile_logits_of(const side& s, const stored_side& stored, const std::vector<index_t>& list, index_t begin,
                      index_t end, int threads, const bfloat16* w = nullptr) {
    namespace d = opd::detail;
    floats z(std::size_t(s.n * s.v), std::numeric_limits<float>::quiet_NaN());
    thread_team team(threads);
    const auto count = index_t(list.size());
    const std::size_t each = (d::tile_scratch(count) + 63) / 64 * 64,
                      packed = sizeof(float) * std::size_t(d::packed_pairs(count, s.d));
    workspace memory;
    std::byte* const at = memory.get(each * std::size_t(threads) + packed, {}).data();
    auto* const pairs = reinterpret_cast<float*>(at + each * std::size_t(threads));
    std::fill_n(at, each * std::size_t(threads) + packed, std::byte{0xff}); // NaN
    const d::row_list rows{list.data(), count};
    d::pack_pairs(stored.x.data(), s.d, rows, s.d, pairs, team);
    d::tile_logits(pairs, rows, amx_head<bfloat16, Tiles>{view(w != nullptr ? w : stored.w.data(), s.v, s.d)}, begin,
                   end, team, {at, each}, [&](index_t r) { return z.data() + r * s.v; });
    return z;
}

} // namespace opd::test
