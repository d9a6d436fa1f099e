// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The tiles of a matrix product, for product.hpp, which says what they compute and promises its order, and for losses
// from hidden states. Compiles under -Ofast too, where the order is the compiler's.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"

namespace opd {

/// The executor that runs everything on the calling thread.
struct serial_executor {
    template <class Function>
    void parallel_for(index_t count, Function&& f) const {
        for (index_t i = 0; i < count; ++i) f(i);
    }
};

/// One product: what the entry points below fill in. Element strides; 64-bit throughout. B may be bfloat16 where the
/// rest is float: each of its numbers is widened, which is exact.
template <class T, class B = T>
struct product_operands {
    static_assert(std::is_same_v<T, B> || (std::is_same_v<T, float> && brain_float<B>),
                  "opd: a product's B is of the type of A and C, or bfloat16 where that is float");
    index_t rows = 0;          // M
    index_t columns = 0;       // N
    index_t depth = 0;         // K
    const T* a = nullptr;      // A(i,k) = a[i * a_row + k * a_depth]
    index_t a_row = 0;         //
    index_t a_depth = 1;       //
    const B* b = nullptr;      // B(k,j) = b[k * b_depth + j], or b[j * b_depth + k] if b_transposed
    index_t b_depth = 0;       //
    T* c = nullptr;            // C(i,j) = c[i * c_row + j]
    index_t c_row = 0;         //
    bool accumulate = false;   // the chain starts from C instead of +0
    bool b_transposed = false; //
};

namespace detail {
inline namespace OPD_ISA {

template <int Count, class Function>
OPD_INLINE void unroll(Function&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) OPD_INLINE_LAMBDA { (f(std::integral_constant<int, I>{}), ...); }
    (std::make_integer_sequence<int, Count>{});
}

template <class E>
OPD_INLINE lanes load_part(const E* p, int count) {
#if defined(OPD_AVX512)
    if constexpr (std::is_same_v<E, float>) {
        const __mmask16 m = static_cast<__mmask16>((1u << count) - 1u);
        return lanes::raw(std::bit_cast<lanes::vec>(_mm512_maskz_loadu_ps(m, p)));
    }
#endif
    E t[lanes::width] = {};
    for (int i = 0; i < count; ++i) t[i] = p[i];
    return lanes::load(t);
}
OPD_INLINE void store_part(lanes x, float* p, int count) {
#if defined(OPD_AVX512)
    const __mmask16 m = static_cast<__mmask16>((1u << count) - 1u);
    _mm512_mask_storeu_ps(p, m, std::bit_cast<__m512>(x.v));
#else
    float t[lanes::width];
    x.store(t);
    for (int i = 0; i < count; ++i) p[i] = t[i];
#endif
}
template <class T>
OPD_INLINE scalar<T> load_part(const T* p, int) requires std::is_same_v<T, double> {
    return scalar<T>::load(p);
}
template <class T>
OPD_INLINE void store_part(scalar<T> x, T* p, int) {
    x.store(p);
}

template <class T>
using product_number = std::conditional_t<std::is_same_v<T, float>, lanes, scalar<T>>;

// Registers of a tile, rows by vectors: 24 accumulators of 32 registers with AVX-512, 12 of 16 otherwise.
template <class Num>
struct product_shape {
    static constexpr bool wide = Num::width == 16;
    static constexpr int vectors = wide ? 4 : 3;
    static constexpr int rows(int used) {
        return wide ? (used <= 2 ? 12 : used == 3 ? 8 : 6) : (used == 1 ? 8 : used == 2 ? 6 : 4);
    }
    static constexpr index_t panel = vectors * Num::width; // columns
    static constexpr index_t row_block = 96;
    static constexpr index_t depth_block = 128; // a block's panel stays in the first-level cache
};

struct no_hint {
    OPD_INLINE void operator()(index_t) const {}
};
// Rows x (Vectors * width) outputs; `part` lanes of the last vector are real (0: all). Chains start from `from`, or
// from 0 where it is null. hint(k) is told of every 16th step: what is to be fetched meanwhile. keep(x) sees B's row
// of each step.
struct no_keep {};
template <class Num, int Rows, int Vectors, bool Part, class Hint = no_hint, class Keep = no_keep,
          class T = typename Num::value_type, class B = T>
OPD_INLINE void product_micro(index_t depth, const T* a, index_t a_row, index_t a_depth, const B* b, index_t b_depth,
                              const T* from, index_t from_row, T* c, index_t c_row, int part, Hint&& hint = {},
                              Keep keep = {}) {
    constexpr int width = Num::width;
    constexpr index_t step = std::is_same_v<std::remove_reference_t<Hint>, no_hint> ? index_t{1} << 40 : 16;
    if (depth <= 0) __builtin_unreachable(); // or g++ keeps a second copy of the chains, for their end without a step
    Num acc[std::size_t(Rows)][std::size_t(Vectors)];
    const auto load = [&](const auto* p, auto vector) OPD_INLINE_LAMBDA {
        if constexpr (Part && vector() == Vectors - 1)
            return load_part(p + vector() * width, part);
        else
            return Num::load(p + vector() * width);
    };
    if (from)
        unroll<Rows>([&](auto r) OPD_INLINE_LAMBDA {
            unroll<Vectors>([&](auto v) OPD_INLINE_LAMBDA { acc[r()][v()] = load(from + r() * from_row, v); });
        });
    else
        unroll<Rows>([&](auto r) OPD_INLINE_LAMBDA {
            unroll<Vectors>([&](auto v) OPD_INLINE_LAMBDA { acc[r()][v()] = Num(0); });
        });
    for (index_t k = 0; k < depth; k += step) {
        hint(k);
        for (index_t left = std::min(step, depth - k); left > 0; --left) {
            Num x[std::size_t(Vectors)];
            unroll<Vectors>([&](auto v) OPD_INLINE_LAMBDA { x[v()] = load(b, v); });
            if constexpr (!std::is_same_v<Keep, no_keep>) keep(x);
            unroll<Rows>([&](auto r) OPD_INLINE_LAMBDA {
                const Num y{double(a[r() * a_row])};
                unroll<Vectors>([&](auto v) OPD_INLINE_LAMBDA { acc[r()][v()] = fma(y, x[v()], acc[r()][v()]); });
            });
            a += a_depth;
            b += b_depth;
        }
    }
    unroll<Rows>([&](auto r) OPD_INLINE_LAMBDA {
        unroll<Vectors>([&](auto v) OPD_INLINE_LAMBDA {
            T* p = c + r() * c_row + v() * width;
            if constexpr (Part && v() == Vectors - 1)
                store_part(acc[r()][v()], p, part);
            else
                acc[r()][v()].store(p);
        });
    });
}

template <class Num, int Vectors, bool Part, class B, class T = typename Num::value_type>
void product_columns(index_t rows, index_t depth, const T* a, index_t a_row, index_t a_depth, const B* b,
                     index_t b_depth, T* c, index_t c_row, bool from_c, int part) {
    // As few passes over B as there can be, of rows as equal as they can be: for few rows a pass takes as long as B's
    // panel takes to come.
    constexpr int full = product_shape<Num>::rows(Vectors);
    for (index_t passes = (rows + full - 1) / full; passes > 0; --passes) {
        const auto height = static_cast<int>((rows + passes - 1) / passes);
        unroll<full>([&](auto less) OPD_INLINE_LAMBDA {
            if (height == less() + 1)
                product_micro<Num, less() + 1, Vectors, Part>(depth, a, a_row, a_depth, b, b_depth,
                                                              from_c ? c : nullptr, c_row, c, c_row, part);
        });
        a += height * a_row;
        c += height * c_row;
        rows -= height;
    }
}

template <class Num, class B, class T = typename Num::value_type>
void product_panel(index_t rows, index_t columns, index_t depth, const T* a, index_t a_row, index_t a_depth, const B* b,
                   index_t b_depth, T* c, index_t c_row, bool from_c) {
    const int part = static_cast<int>(columns % Num::width);
    const int vectors = static_cast<int>((columns + Num::width - 1) / Num::width);
    const auto run = [&](auto count) {
        if (part == 0)
            product_columns<Num, count(), false>(rows, depth, a, a_row, a_depth, b, b_depth, c, c_row, from_c, part);
        else
            product_columns<Num, count(), true>(rows, depth, a, a_row, a_depth, b, b_depth, c, c_row, from_c, part);
    };
    switch (vectors) {
    case 1:
        return run(std::integral_constant<int, 1>{});
    case 2:
        return run(std::integral_constant<int, 2>{});
    case 3:
        return run(std::integral_constant<int, 3>{});
    default:
        if constexpr (product_shape<Num>::vectors >= 4) return run(std::integral_constant<int, 4>{});
    }
}

// Of a pair of registers: lanes whose number has the bit `Apart` come from the other, `Apart` lanes before or after.
template <int Apart, int... K>
OPD_INLINE void exchange(lanes& a, lanes& b, std::integer_sequence<int, K...>) {
    constexpr int w = lanes::width;
    const lanes::vec x = a.v, y = b.v;
    a = lanes::raw(__builtin_shufflevector(x, y, ((K & Apart) == 0 ? K : w + K - Apart)...));
    b = lanes::raw(__builtin_shufflevector(x, y, ((K & Apart) == 0 ? K + Apart : w + K)...));
}
// width x width numbers.
template <class L>
OPD_INLINE void transpose(L (&x)[L::width]) {
    constexpr int w = L::width;
    const auto step = [&](auto apart) OPD_INLINE_LAMBDA {
        unroll<w>([&](auto i) OPD_INLINE_LAMBDA {
            if constexpr ((i() & apart()) == 0)
                exchange<apart()>(x[i()], x[i() + apart()], std::make_integer_sequence<int, w>{});
        });
    };
    step(std::integral_constant<int, 1>{}), step(std::integral_constant<int, 2>{});
    if constexpr (w > 4) step(std::integral_constant<int, 4>{});
    if constexpr (w > 8) step(std::integral_constant<int, 8>{});
}

// to[d, v] = from[v, d] for v < rows, d < depth. With Pad also zeros for v up to a multiple of the width.
template <class Num, bool Pad, class T = typename Num::value_type>
[[gnu::noinline]] void turn(const T* from, index_t stride, index_t rows, index_t depth, T* to, index_t to_stride) {
    constexpr int w = Num::width;
    if constexpr (w == 1) {
        for (index_t r = 0; r < rows; ++r)
            for (index_t d = 0; d < depth; ++d) to[d * to_stride + r] = from[r * stride + d];
    } else {
        for (index_t r = 0; r < rows; r += w)
            for (index_t d = 0; d < depth; d += w) {
                const auto down = static_cast<int>(std::min<index_t>(w, rows - r));
                const auto across = static_cast<int>(std::min<index_t>(w, depth - d));
                const T* const block = from + r * stride + d;
                T* const turned = to + d * to_stride + r;
                Num x[std::size_t(w)];
                unroll<w>([&](auto v) OPD_INLINE_LAMBDA {
                    x[v()] = v() >= down   ? Num(0)
                             : across == w ? Num::load(block + v() * stride)
                                           : load_part(block + v() * stride, across);
                });
                transpose(x);
                unroll<w>([&](auto v) OPD_INLINE_LAMBDA {
                    if (v() >= across) return;
                    if (Pad || down == w)
                        x[v()].store(turned + v() * to_stride);
                    else
                        store_part(x[v()], turned + v() * to_stride, down);
                });
            }
    }
}

// What is fetched while a kernel runs: `rows` rows of `lines` cache lines, `some` of them at a time. A stride in bytes.
struct fetch_ahead {
    const char* at = nullptr;
    index_t stride = 0, rows = 0, lines = 0, some = 0, line = 0;
    OPD_INLINE void operator()(index_t) {
        for (index_t i = 0; i < some && rows > 0; ++i) {
            __builtin_prefetch(at + line * 64, 0, 2);
            if (++line == lines) line = 0, --rows, at += rows > 0 ? stride : 0;
        }
    }
};
template <class B>
OPD_INLINE const char* bytes_at(const B* p) {
    return reinterpret_cast<const char*>(p);
}

// to[j] = from[j], widened where it is bfloat16.
template <class T, class B>
OPD_INLINE void widen(const B* from, index_t count, T* to) {
    if constexpr (std::is_same_v<T, B>) {
        std::copy_n(from, count, to);
    } else {
        index_t j = 0;
        for (; j + lanes::width <= count; j += lanes::width) lanes::load(from + j).store(to + j);
        for (; j < count; ++j) to[j] = element<B>::load(from[j]);
    }
}

// product_micro as a function, which its many shapes are compiled as once.
template <class Num, int Rows, int Vectors, class T = typename Num::value_type>
[[gnu::noinline]] void product_block(index_t depth, const T* a, index_t a_row, index_t a_depth, const T* b,
                                     bool goes_on, T* c, index_t c_row, fetch_ahead& ahead) {
    product_micro<Num, Rows, Vectors, false, fetch_ahead&>(depth, a, a_row, a_depth, b, Vectors * Num::width,
                                                           goes_on ? c : nullptr, c_row, c, c_row, 0, ahead);
}
// f(first, rows) for pieces of [0, count): of as many rows as registers hold, then of 4, 2 and 1.
template <int Full, class Function>
OPD_INLINE void each_height(index_t count, Function&& f) {
    index_t i = 0;
    for (; i + Full <= count; i += Full) f(i, std::integral_constant<int, Full>{});
    if constexpr (Full > 4)
        for (; i + 4 <= count; i += 4) f(i, std::integral_constant<int, 4>{});
    for (; i + 2 <= count; i += 2) f(i, std::integral_constant<int, 2>{});
    if (i < count) f(i, std::integral_constant<int, 1>{});
}

// How a product is cut, by its shape alone but for its depth.
//   as it lies   small: C in panels of columns, B's rows across the lanes
//   packed       the same of many rows and a wide B: blocks of A and B are packed, since their rows, far apart, would
//                meet in the same sets of the caches
//   turned       B transposed: rows of A, packed, across the lanes, and B read as it lies, once for each tile's rows
//   of few       the same of a few rows: outputs across the lanes
template <class T>
struct tile_shape {
    using shape = product_shape<product_number<T>>;
    static constexpr index_t most_rows = shape::vectors * shape::panel, most_turned = 192; // of a packed or turned tile
    index_t rows = shape::row_block, columns = shape::panel;
    index_t down = 0, across = 0; // tiles
    bool packed = false;

    template <class B>
    explicit tile_shape(const product_operands<T, B>& o) {
        constexpr index_t spread = 2048; // bytes between B's rows, were they of T
        constexpr int width = product_number<T>::width;
        packed = !o.b_transposed && o.rows >= shape::row_block / 2 && o.columns >= shape::panel &&
                 o.b_depth * index_t(sizeof(T)) >= spread;
        if (packed || o.b_transposed) { // tiles as equal as they can be
            const index_t tiles = std::max<index_t>(1, (o.rows + most_rows - 1) / most_rows);
            rows = std::max<index_t>(1, ((o.rows + tiles - 1) / tiles + width - 1) / width) * width;
            columns = packed ? 2 * shape::panel : o.rows <= 2 * width ? most_turned / 2 : most_turned;
        }
        down = (o.rows + rows - 1) / rows, across = (o.columns + columns - 1) / columns;
    }
};

template <class T, class B>
void product_as_it_lies(const product_operands<T, B>& o, index_t i, index_t rows, index_t j, index_t columns) {
    using Num = product_number<T>;
    constexpr index_t block = product_shape<Num>::depth_block;
    for (index_t k = 0; k < o.depth; k += block) // the chain goes on where the last block stored it
        product_panel<Num>(rows, columns, std::min(block, o.depth - k), o.a + i * o.a_row + k * o.a_depth, o.a_row,
                           o.a_depth, o.b + k * o.b_depth + j, o.b_depth, o.c + i * o.c_row + j, o.c_row,
                           o.accumulate || k > 0);
}

template <class T, class B>
void product_packed(const product_operands<T, B>& o, index_t i, index_t rows, index_t left, index_t right) {
    using Num = product_number<T>;
    using shape = product_shape<Num>;
    constexpr index_t block = shape::depth_block, panel = shape::panel;
    constexpr index_t lines = (panel * index_t(sizeof(B)) + 63) / 64; // of cache, of a panel's row
    constexpr int full = shape::rows(shape::vectors);
    T packed_a[tile_shape<T>::most_rows * block]; // (rows, depth), or (depth, rows) of a transposed A
    T packed_b[std::size_t(block * panel)];
    const bool transposed = o.a_row == 1 && o.a_depth != 1;
    for (index_t k = 0; k < o.depth; k += block) {
        const index_t depth = std::min(block, o.depth - k);
        const T* const a = o.a + i * o.a_row + k * o.a_depth;
        if (transposed)
            for (index_t d = 0; d < depth; ++d) std::copy_n(a + d * o.a_depth, rows, packed_a + d * rows);
        else
            for (index_t r = 0; r < rows; ++r) std::copy_n(a + r * o.a_row, depth, packed_a + r * depth);
        const index_t a_row = transposed ? 1 : depth, a_depth = transposed ? rows : 1;
        for (index_t j = left; j < right; j += panel) {
            const B* const b = o.b + k * o.b_depth + j;
            T* const c = o.c + i * o.c_row + j;
            const bool goes_on = o.accumulate || k > 0;
            if (right - j < panel) {
                product_panel<Num>(rows, right - j, depth, packed_a, a_row, a_depth, b, o.b_depth, c, o.c_row, goes_on);
                continue;
            }
            for (index_t d = 0; d < depth; ++d) widen(b + d * o.b_depth, panel, packed_b + d * panel);
            fetch_ahead ahead{.stride = o.b_depth * index_t(sizeof(B)), .lines = lines, .some = lines};
            if (right - j >= 2 * panel)
                ahead.at = bytes_at(b + panel), ahead.rows = depth;
            else if (k + depth < o.depth) // the next block's first panel
                ahead.at = bytes_at(o.b + (k + depth) * o.b_depth + left),
                ahead.rows = std::min(block, o.depth - k - depth);
            each_height<full>(rows, [&](index_t r, auto height) {
                product_block<Num, height(), shape::vectors>(depth, packed_a + r * a_row, a_row, a_depth, packed_b,
                                                             goes_on, c + r * o.c_row, o.c_row, ahead);
            });
        }
    }
}

template <class T, class B>
void product_turned(const product_operands<T, B>& o, index_t i, index_t rows, index_t left, index_t right) {
    using Num = product_number<T>;
    using shape = product_shape<Num>;
    constexpr bool widens = !std::is_same_v<T, B>;
    constexpr index_t width = Num::width, panel = shape::panel, line = 64 / sizeof(B);
    constexpr index_t most_rows = tile_shape<T>::most_rows;
    T packed[most_rows * shape::depth_block];       // (panel, depth, rows of the panel)
    T sums[tile_shape<T>::most_turned * most_rows]; // C, transposed
    const index_t all = (rows + width - 1) / width * width, outputs = right - left;
    // what the first-level cache holds of a panel, and of B's rows where they are widened
    constexpr index_t most_widened = 2 * shape::depth_block;
    T widened[widens ? shape::rows(1) * most_widened : 1];
    const index_t in_cache = shape::depth_block * panel / std::min(panel, all);
    const index_t block = widens ? std::min(in_cache, most_widened) : in_cache;
    const auto b = [&](index_t j, index_t k) { return o.b + (left + j) * o.b_depth + k; };
    T* const c = o.c + i * o.c_row + left;
    if (o.accumulate) turn<Num, true>(c, o.c_row, rows, outputs, sums, all);
    for (index_t k = 0; k < o.depth; k += block) {
        const index_t depth = std::min(block, o.depth - k);
        for (index_t p = 0; p < all; p += panel) {
            const index_t lanes_here = std::min(panel, all - p);
            T* const states = packed + p * block;
            turn<Num, true>(o.a + (i + p) * o.a_row + k, o.a_row, std::min(panel, rows - p), depth, states, lanes_here);
            const auto run = [&](auto vectors) {
                constexpr int full = shape::rows(vectors());
                each_height<full>(outputs, [&](index_t j, auto height) {
                    fetch_ahead ahead; // the next outputs' weights, else the first ones' of the next block
                    ahead.stride = o.b_depth * index_t(sizeof(B)), ahead.lines = (depth + line - 1) / line;
                    if (p == 0 && j + 2 * height() <= outputs)
                        ahead.at = bytes_at(b(j + height(), k)), ahead.rows = ahead.some = height();
                    else if (p == 0 && j + height() >= outputs && k + 2 * depth <= o.depth)
                        ahead.at = bytes_at(b(0, k + depth)), ahead.rows = std::min<index_t>(full, outputs),
                        ahead.some = full;
                    T* const to = sums + j * all + p;
                    const auto product = [&](const T* weights, index_t stride) {
                        product_block<Num, height(), vectors()>(depth, weights, stride, 1, states,
                                                                o.accumulate || k > 0, to, all, ahead);
                    };
                    if constexpr (widens) {
                        for (index_t r = 0; r < height(); ++r) widen(b(j + r, k), depth, widened + r * depth);
                        product(widened, depth);
                    } else {
                        product(b(j, k), o.b_depth);
                    }
                });
            };
            unroll<shape::vectors>([&](auto less) OPD_INLINE_LAMBDA {
                if (lanes_here == (less() + 1) * width) run(std::integral_constant<int, less() + 1>{});
            });
        }
    }
    turn<Num, false>(sums, all, outputs, rows, c, o.c_row);
}

template <class T>
inline constexpr index_t few_rows = product_number<T>::width == 16 ? 8
                                    : product_number<T>::width > 1 ? 4
                                                                   : 0;

// A register of numbers of B as they lie: of bfloat16 two a lane, the first of them below. What is not there is 0.
template <class Num, class B>
OPD_INLINE Num load_words(const B* from, int count) {
    if constexpr (std::is_same_v<typename Num::value_type, B>) {
        return count == Num::width ? Num::load(from) : load_part(from, count);
    } else {
        lanes::vec x{};
        if (count == 2 * lanes::width)
            std::memcpy(&x, from, sizeof x);
        else
            std::memcpy(&x, from, sizeof(B) * static_cast<std::size_t>(count));
        return lanes::raw(x);
    }
}
template <int Pair, int Half, class Num>
OPD_INLINE Num half_of_word(Num x) {
    if constexpr (Pair == 1) {
        return x;
    } else {
        typedef std::uint32_t words __attribute__((vector_size(sizeof(lanes::vec))));
        const words w = std::bit_cast<words>(x.v);
        return lanes::raw(std::bit_cast<lanes::vec>(Half == 0 ? w << 16 : w & 0xffff0000u));
    }
}

// Of few rows, whose lanes would be idle: outputs across the lanes. A block of B is turned in registers, and B comes
// once, as fast as memory gives it. bfloat16 is turned in pairs, two inputs a lane, which are then widened to one each.
template <class T, class B>
void product_of_few(const product_operands<T, B>& o, index_t left, index_t right) {
    using Num = product_number<T>;
    constexpr int w = Num::width, pair = std::is_same_v<T, B> ? 1 : 2;
    const auto run = [&](auto rows) {
        for (index_t j = left; j < right; j += w) {
            const auto outputs = static_cast<int>(std::min<index_t>(w, right - j));
            const B* const b = o.b + j * o.b_depth;
            const index_t ahead = j + 2 * w <= right ? w * o.b_depth : 0; // to the next outputs' weights
            T* const c = o.c + j;
            Num acc[std::size_t(rows())];
            unroll<rows()>([&](auto r) OPD_INLINE_LAMBDA {
                acc[r()] = o.accumulate ? load_part(c + r() * o.c_row, outputs) : Num(0);
            });
            for (index_t k = 0; k < o.depth; k += pair * w) {
                const auto across = static_cast<int>(std::min<index_t>(pair * w, o.depth - k));
                Num x[std::size_t(w)];
                unroll<w>([&](auto v) OPD_INLINE_LAMBDA {
                    const B* const from = b + v() * o.b_depth + k;
                    x[v()] = v() >= outputs ? Num(0) : load_words<Num>(from, across);
                    if (ahead > 0) __builtin_prefetch(from + ahead, 0, 2);
                });
                transpose(x);
                const T* const a = o.a + k * o.a_depth;
                unroll<w>([&](auto d) OPD_INLINE_LAMBDA {
                    unroll<pair>([&](auto half) OPD_INLINE_LAMBDA {
                        constexpr int at = pair * d() + half();
                        if (at >= across) return;
                        const Num weights = half_of_word<pair, half()>(x[d()]);
                        unroll<rows()>([&](auto r) OPD_INLINE_LAMBDA {
                            acc[r()] = fma(Num{double(a[r() * o.a_row + at * o.a_depth])}, weights, acc[r()]);
                        });
                    });
                });
            }
            unroll<rows()>([&](auto r) OPD_INLINE_LAMBDA {
                if (outputs == w)
                    acc[r()].store(c + r() * o.c_row);
                else
                    store_part(acc[r()], c + r() * o.c_row, outputs);
            });
        }
    };
    unroll<static_cast<int>(few_rows<T>)>([&](auto less) OPD_INLINE_LAMBDA {
        if (o.rows == less() + 1) run(std::integral_constant<int, less() + 1>{});
    });
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Output tiles of a product: the unit that threads share out.
template <class T, class B>
index_t product_tiles(const product_operands<T, B>& o) {
    const detail::tile_shape<T> t(o);
    return t.down * t.across;
}

/// Computes one output tile.
template <class T, class B>
void product_tile(const product_operands<T, B>& o, index_t tile) {
    const detail::tile_shape<T> t(o);
    const index_t i = tile / t.across * t.rows, rows = std::min(t.rows, o.rows - i);
    const index_t left = tile % t.across * t.columns, right = std::min(left + t.columns, o.columns);
    if (o.depth == 0) {
        for (index_t r = i; r < i + rows && !o.accumulate; ++r)
            std::fill_n(o.c + r * o.c_row + left, right - left, T(0));
        return;
    }
    if (o.b_transposed && o.rows <= detail::few_rows<T>) return detail::product_of_few(o, left, right);
    if (o.b_transposed) return detail::product_turned(o, i, rows, left, right);
    if (t.packed) return detail::product_packed(o, i, rows, left, right);
    detail::product_as_it_lies(o, i, rows, left, right - left);
}

/// Runs a product on an executor.
template <class Executor, class T, class B>
void product(const Executor& executor, const product_operands<T, B>& o) {
    const index_t tiles = product_tiles(o);
    if (tiles == 1) return product_tile(o, 0);
    executor.parallel_for(tiles, [&](index_t tile) { product_tile(o, tile); });
}

} // namespace OPD_ISA

/// C (M,N) = A (M,K) B (K,N), or C += with accumulate.
template <class T, class B>
product_operands<T, B> product_nn(index_t rows, index_t columns, index_t depth, const T* a, index_t a_stride,
                                  const B* b, index_t b_stride, T* c, index_t c_stride, bool accumulate = false) {
    return {rows, columns, depth, a, a_stride, 1, b, b_stride, c, c_stride, accumulate, false};
}

/// C (M,N) = A (K,M)^T B (K,N), or C += with accumulate.
template <class T, class B>
product_operands<T, B> product_tn(index_t rows, index_t columns, index_t depth, const T* a, index_t a_stride,
                                  const B* b, index_t b_stride, T* c, index_t c_stride, bool accumulate = false) {
    return {rows, columns, depth, a, 1, a_stride, b, b_stride, c, c_stride, accumulate, false};
}

/// C (M,N) = A (M,K) B (N,K)^T, or C += with accumulate.
template <class T, class B>
product_operands<T, B> product_nt(index_t rows, index_t columns, index_t depth, const T* a, index_t a_stride,
                                  const B* b, index_t b_stride, T* c, index_t c_stride, bool accumulate = false) {
    return {rows, columns, depth, a, a_stride, 1, b, b_stride, c, c_stride, accumulate, true};
}

} // namespace opd
