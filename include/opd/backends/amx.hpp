// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Products of a loss from hidden states through the processor's matrix tiles (AMX, in Intel's Xeons since Sapphire
// Rapids), which have some fifteen times the multiply-adds a second of float's, in bfloat16.
//
//   opd::amx_head head{view(w,V,D)};               throws `unsupported` where processor or system have none (has_amx)
//   teacher::hidden{view(x,N,D), head}             in place of view(w,V,D); a student's as well: then dx and dw are
//                                                  made so too
//
//   z = x Wᵀ (N,V),   dx = dz W (N,D),   dW = dzᵀ x (V,D)
//
// No number is rounded to bfloat16: what is stored so is taken as it is, and a float, of head, states or dz, as the
// sum of three bfloat16 numbers. A product of two bfloat16 numbers is exact in float; of 32 columns (dx: ids, dw:
// rows) even and odd ones are summed apart, in float, then added to what came before. A product of two floats is six
// of their parts: less than 2^-21 of it is left out, 2^-24 on average. So results differ from those of view(w,V,D) by
// float's roundings. Products, sums and parts below 2^-126 are 0.
//
// No bit of loss, dx and db depends on budget, threads or the other rows. dw is summed over rows in 32s, counted from
// the batch's first: the same bits for every budget that holds 32 rows, or all of them. Logits of few ids (supports,
// samples, scores) and a head with an update are computed as those of view(w,V,D) are.
//
// The first has_amx() or amx_head asks Linux for the tiles' registers, for the whole process: signal stacks then need
// 8 kB more.
//
// Throws unsupported, and invalid_input that names amx_head.w. States and head: float or bfloat16, as each is. CPU.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#pragma once

#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/head.hpp"
#include "opd/products/tile_products.hpp"
#include "opd/view.hpp"

#if defined(__x86_64__) && defined(__linux__) && !defined(__CUDACC__)
#define OPD_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace opd {
inline namespace OPD_ISA {

/// Whether there are matrix tiles of bfloat16: asks the system for them.
inline bool has_amx() {
#if defined(OPD_AMX)
    static const bool has = [] {
        constexpr unsigned tile = 1u << 24, bf16 = 1u << 22; // of CPUID 7.0, EDX
        constexpr long request = 0x1023, tile_data = 18;     // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (tile | bf16)) == (tile | bf16) &&
               syscall(SYS_arch_prctl, request, tile_data) == 0;
    }();
    return has;
#else
    return false;
#endif
}

} // namespace OPD_ISA

namespace detail {
inline namespace OPD_ISA {

#if defined(OPD_AMX)
/// The processor's.
struct amx_tiles {
    static constexpr const char* argument = "amx_head.w"; ///< of refusals
    struct alignas(64) shape {
        unsigned char palette = 1, start = 0, unused[14] = {};
        unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] amx_tiles() {
        if (!has_amx())
            throw unsupported("opd::amx_head: neither processor nor system have bfloat16 matrix tiles (AMX)");
        // static: g++ believes the instruction to read 8 bytes, and leaves the rest unwritten
        static constexpr shape whole{};
        _tile_loadconfig(&whole);
    }
    [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] ~amx_tiles() { _tile_release(); }
    amx_tiles(const amx_tiles&) = delete;
    amx_tiles& operator=(const amx_tiles&) = delete;

    /// Tiles 0 to 3 are sums, 4 and 5 a part of a, 6 and 7 one of b.
    template <int A, int B>
    [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] void run(const tile_block& t) const {
        const index_t a_bytes = 2 * t.a_row;
        if (t.from != nullptr) {
            const index_t bytes = 4 * t.from_row;
            const float* const below = t.from + 16 * t.from_row;
            _tile_loadd(0, t.from, bytes);
            _tile_loadd(1, t.from + 16, bytes);
            _tile_loadd(2, below, bytes);
            _tile_loadd(3, below + 16, bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (index_t s = 0; s < t.steps; ++s) {
            t.next(s);
            const std::uint16_t *const a = t.a + s * 32, *const b = t.b + s * 512;
            const auto part_of_a = [&](int p) { return a + p * t.a_part; };
            const auto part_of_b = [&](int p) { return b + p * t.b_part; };
            load_a(part_of_a(0), t.a_row, a_bytes);
            if constexpr (B == 3) {
                load_b(part_of_b(2), t.b_half);
                multiply();
                load_b(part_of_b(1), t.b_half);
                multiply();
            }
            load_b(b, t.b_half);
            multiply();
            if constexpr (A == 3) {
                load_a(part_of_a(2), t.a_row, a_bytes);
                multiply();
                load_a(part_of_a(1), t.a_row, a_bytes);
                multiply();
                if constexpr (B == 3) {
                    load_b(part_of_b(1), t.b_half);
                    multiply();
                }
            }
        }
        const index_t bytes = 4 * t.c_row;
        float* const below = t.c + 16 * t.c_row;
        _tile_stored(0, t.c, bytes);
        _tile_stored(1, t.c + 16, bytes);
        _tile_stored(2, below, bytes);
        _tile_stored(3, below + 16, bytes);
    }

private:
    [[gnu::target("amx-tile,amx-bf16"), gnu::always_inline]] static inline void load_a(const std::uint16_t* a,
                                                                                       index_t row, index_t bytes) {
        _tile_loadd(4, a, bytes);
        _tile_loadd(5, a + 16 * row, bytes);
    }
    [[gnu::target("amx-tile,amx-bf16"), gnu::always_inline]] static inline void load_b(const std::uint16_t* b,
                                                                                       index_t half) {
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + half, 64);
    }
    [[gnu::target("amx-tile,amx-bf16"), gnu::always_inline]] static inline void multiply() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};
#else
struct amx_tiles {
    static constexpr const char* argument = "amx_head.w";
    amx_tiles() { throw unsupported("opd::amx_head: matrix tiles (AMX) are those of Linux on x86-64"); }
    template <int, int>
    void run(const tile_block&) const {}
};
#endif

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// A head of float or bfloat16, or of a type with its bits, for the processor's matrix tiles. Tiles: what runs in their
/// place (bf16.hpp).
template <class E, class Tiles = detail::amx_tiles>
struct amx_head {
    static_assert(detail::number_of_head<E>, "opd: a head is float or bfloat16");
    using number = E;
    using tiles = Tiles;
    matrix_view<const E> w; ///< (V,D)

    explicit amx_head(matrix_view<const E> of) : w(of) {
        if (w.rows < 0 || w.cols < 0 || (w.rows > 0 && w.cols > 0 && w.data == nullptr) ||
            (w.rows > 1 && w.stride < w.cols))
            throw invalid_input(Tiles::argument,
                                "is a null pointer, or has a negative size or a row stride below its columns");
        (void)Tiles{};
    }
    index_t vocab() const { return w.rows; }
    index_t width() const { return w.cols; }
    void copy(index_t id, index_t d, index_t count, float* to) const {
        for (index_t j = 0; j < count; ++j) to[j] = element<E>::load(w.data[id * w.stride + d + j]);
    }
};
template <class E>
amx_head(matrix_view<E>) -> amx_head<std::remove_const_t<E>>;

} // namespace OPD_ISA

} // namespace opd
