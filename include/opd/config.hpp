// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Facts about compiler and instruction set, and the few macros of the library.
//
//   OPD_HD        the function can be called on the host and, under nvcc, on the device
//   OPD_CALLS_EITHER  before an OPD_HD template that calls a function of its caller
//   OPD_INLINE    always inlined in optimised code: the innermost functions of the row kernels. Not at -O0, where g++
//                 takes up to 1.6 times as long for them and speed does not matter
//   OPD_UNROLL OPD_OF_KERNEL OPD_RARELY_CALLED  for device code alone
//   OPD_ISA       the name of an inline namespace for code whose machine code depends on -march (below)
//   detail::pin   the identity function, opaque to the optimiser
//
// Two translation units that were built with different -march flags must not share an inline function. The linker
// would keep either of the two versions: one that crashes on an older machine, or one that is slow. So everything that
// uses SIMD lanes lives in `inline namespace OPD_ISA`, named after the instruction set, and both versions link.
#pragma once

#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) < 202002L
#error "opd needs C++20: compile with -std=c++20 or later"
#endif

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define OPD_HD __host__ __device__
#else
#define OPD_HD
#endif

// Before an OPD_HD template that calls what it is given, be it for the host alone.
#if defined(__CUDACC__)
#define OPD_CALLS_EITHER _Pragma("nv_exec_check_disable")
#else
#define OPD_CALLS_EITHER
#endif

// What kernels are made of. Clang inlines what must be inlined before it simplifies, and takes twice as long to compile
// as where OPD_LET_COMPILER_INLINE leaves the choice to it, which from -O2 on it makes as well (at -O1 it inlines
// nothing by itself); OPD_INLINE_ALWAYS is for what it then misses. Not in a program that links units for several
// instruction sets, unless it hides each set's functions from the others as libopd does: types outside OPD_ISA have
// such functions.
#if (defined(__GNUC__) || defined(__clang__)) && (defined(__OPTIMIZE__) || defined(__CUDACC__))
#define OPD_INLINE_ALWAYS inline __attribute__((always_inline))
#else
#define OPD_INLINE_ALWAYS inline
#endif
#if defined(OPD_LET_COMPILER_INLINE)
#define OPD_INLINE inline
#define OPD_INLINE_LAMBDA
#elif (defined(__GNUC__) || defined(__clang__)) && (defined(__OPTIMIZE__) || defined(__CUDACC__))
#define OPD_INLINE OPD_INLINE_ALWAYS
#define OPD_INLINE_LAMBDA __attribute__((always_inline)) // after a lambda's parameters
#else
#define OPD_INLINE inline
#define OPD_INLINE_LAMBDA
#endif
// Of device code: before a loop of registers, a function that a kernel is made of, one that a kernel rarely calls.
#if defined(__CUDACC__)
#define OPD_OF_KERNEL __forceinline__
#else
#define OPD_OF_KERNEL
#endif
#if defined(__CUDA_ARCH__)
#define OPD_UNROLL _Pragma("unroll")
#define OPD_RARELY_CALLED __noinline__
#else
#define OPD_UNROLL
#define OPD_RARELY_CALLED
#endif
#if defined(__GNUC__) || defined(__clang__)
#define OPD_COLD __attribute__((cold)) // of what an error alone leads to: small, and quickly compiled
#else
#define OPD_COLD
#endif

#if defined(__CUDACC__)
#define OPD_ISA isa_cuda
#elif defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#if defined(__AVX512BF16__)
#define OPD_ISA isa_avx512_bf16
#else
#define OPD_ISA isa_avx512
#endif
#define OPD_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define OPD_ISA isa_avx2
#elif defined(__AVX__)
#define OPD_ISA isa_avx
#else
#define OPD_ISA isa_base
#endif

#if defined(__AVX512F__)
#define OPD_PIN_REGISTER(x) "+v"(x)
#else
#define OPD_PIN_REGISTER(x) "+x"(x)
#endif

namespace opd {

/// Sizes, strides and token ids are 64-bit in arithmetic, whatever the caller stores: N·V exceeds 2^31 in practice.
using index_t = std::int64_t;

} // namespace opd

namespace opd::detail {

/// std::bit_cast, callable on a device.
template <class To, class From>
OPD_HD OPD_INLINE constexpr To bit_cast(const From& x) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, x);
}

/// Returns x; the compiler may neither look inside nor move arithmetic across it. -Ofast and -ffast-math otherwise
/// reassociate (z - z*) - (y - y*) and cancel the anchors that gradients near p = q rest on.
template <class T>
OPD_HD OPD_INLINE T pin(T x) {
#if defined(__CUDA_ARCH__)
    return x; // nvcc does not reassociate
#elif defined(__SSE2__)
    asm("" : OPD_PIN_REGISTER(x));
    return x;
#else
    volatile T y = x;
    return y;
#endif
}

} // namespace opd::detail
