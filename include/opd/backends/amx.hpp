// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Logits of a bfloat16 head through the processor's matrix tiles (AMX, in Intel's Xeons since Sapphire Rapids): some fifteen times the
// multiply-adds a second that float's have.
//
//   opd::amx_head head{view(w,V,D)};               throws `unsupported` where processor or system have none; has_amx() asks
//   teacher::hidden{view(x,N,D), head}             in place of view(w,V,D); states are bfloat16 as well
//
// What it computes is z = x Wᵀ: a product of two bfloat16 numbers is exact in float; of 32 columns even and odd ones are summed apart, in
// float, then added to what came before. So logits differ from those of view(w,V,D) by float's roundings alone, and no bit depends on budget,
// threads or the other rows. Products and sums below 2^-126 are 0. dx and dw, logits of few ids (supports, samples, scores) and a head with an
// update are computed in float as they are of view(w,V,D).
//
// The first has_amx() or amx_head asks Linux for the tiles' registers, for the whole process: signal stacks then need 8 kB more.
//
// Throws unsupported, and invalid_input that names amx_head.w. CPU.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#pragma once

#include "opd/config.hpp"
#include "opd/detail/tile_products.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
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

/// Whether bfloat16 matrix tiles are there: asks the system for them.
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
    struct alignas(64) shape {
        unsigned char palette = 1, start = 0, unused[14] = {};
        unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] amx_tiles() {
        if (!has_amx())
            throw unsupported("opd::amx_head: neither processor nor system have bfloat16 matrix tiles (AMX)");
        static constexpr shape
            whole{}; // static: g++ believes the instruction to read 8 bytes, and leaves the rest unwritten
        _tile_loadconfig(&whole);
    }
    [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] ~amx_tiles() { _tile_release(); }
    amx_tiles(const amx_tiles&) = delete;
    amx_tiles& operator=(const amx_tiles&) = delete;

    [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] void run(const tile_block& t) const {
        const auto *a0 = static_cast<const char*>(t.a), *a1 = a0 + 16 * t.a_bytes;
        const auto *b0 = static_cast<const char*>(t.b0), *b1 = static_cast<const char*>(t.b1);
        char *c0 = reinterpret_cast<char*>(t.c), *c1 = c0 + 16 * t.c_bytes;
        if (t.goes_on) {
            _tile_loadd(0, c0, t.c_bytes);
            _tile_loadd(1, c0 + 64, t.c_bytes);
            _tile_loadd(2, c1, t.c_bytes);
            _tile_loadd(3, c1 + 64, t.c_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (index_t s = 0; s < t.steps; ++s) {
            for (index_t i = 0; i < t.fetches; ++i) __builtin_prefetch(t.fetched + i * t.a_bytes + s * 64, 0, 2);
            _tile_loadd(4, a0 + s * 64, t.a_bytes);
            _tile_loadd(6, b0 + s * 1024, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + s * 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1 + s * 64, t.a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c0, t.c_bytes);
        _tile_stored(1, c0 + 64, t.c_bytes);
        _tile_stored(2, c1, t.c_bytes);
        _tile_stored(3, c1 + 64, t.c_bytes);
    }
};
#else
struct amx_tiles {
    amx_tiles() { throw unsupported("opd::amx_head: matrix tiles (AMX) are those of Linux on x86-64"); }
    void run(const tile_block&) const {}
};
#endif

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// A head of bfloat16, or of a type with its bits, for the processor's matrix tiles.
template <class E, class Tiles = detail::amx_tiles>
struct amx_head {
    static_assert(brain_float<E>, "opd: matrix tiles are of bfloat16");
    using tiles = Tiles;
    matrix_view<const E> w; ///< (V,D)

    explicit amx_head(matrix_view<const E> of) : w(of) {
        if (w.rows < 0 || w.cols < 0 || (w.rows > 0 && w.cols > 0 && w.data == nullptr) ||
            (w.rows > 1 && w.stride < w.cols))
            throw invalid_input("amx_head.w",
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
