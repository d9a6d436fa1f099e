// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The tiles of a matrix product, for product.hpp, which says what they compute and promises its order, and for losses
// from hidden states. Compiles under -Ofast too, where the order is the compiler's.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "opd/config.hpp"
#include "opd/lanes.hpp"

namespace opd {

/// The executor that runs everything on the calling thread.
struct serial_executor {
    template <class Function>
    void parallel_for(index_t count, Function&& f) const {
        for (index_t i = 0; i < count; ++i) f(i);
    }
};

/// One product: what the entry points below fill in. Element strides; 64-bit throughout.
template <class T>
struct product_operands {
    index_t rows = 0;          // M
    index_t columns = 0;       // N
    index_t depth = 0;         // K
    const T* a = nullptr;      // A(i,k) = a[i * a_row + k * a_depth]
    index_t a_row = 0;         //
    index_t a_depth = 1;       //
    const T* b = nullptr;      // B(k,j) = b[k * b_depth + j], or b[j * b_depth + k] if b_transposed
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
          class T = typename Num::value_type>
OPD_INLINE void product_micro(index_t depth, const T* a, index_t a_row, index_t a_depth, const T* b, index_t b_depth,
                              const T* from, index_t from_row, T* c, index_t c_row, int part, Hint&& hint = {},
                              Keep keep = {}) {
    constexpr int width = Num::width;
    constexpr index_t step = std::is_same_v<std::remove_reference_t<Hint>, no_hint> ? index_t{1} << 40 : 16;
    if (depth <= 0) __builtin_unreachable(); // or g++ keeps a second copy of the chains, for their end without a step
    Num acc[std::size_t(Rows)][std::size_t(Vectors)];
    const auto load = [&](const T* p, auto vector) OPD_INLINE_LAMBDA {
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

template <class Num, int Vectors, bool Part, class T = typename Num::value_type>
void product_columns(index_t rows, index_t depth, const T* a, index_t a_row, index_t a_depth, const T* b,
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

template <class Num, class T = typename Num::value_type>
void product_panel(index_t rows, index_t columns, index_t depth, const T* a, index_t a_row, index_t a_depth, const T* b,
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

// How a product is cut, by its shape alone but for its depth. A large one with a transposed operand has wide tiles,
// for which rows of A are packed: columns of a transposed A lie pages apart, and rows that many panels read would
// meet in the same sets of the cache. Where B lies as it is read, packing costs more than it saves.
template <class T>
struct tile_shape {
    using shape = product_shape<product_number<T>>;
    static constexpr index_t most_packed_rows = 4 * shape::row_block;
    index_t rows = shape::row_block, columns = shape::panel;
    index_t down = 0, across = 0; // tiles
    bool transposed_a = false, pack_a = false;

    explicit tile_shape(const product_operands<T>& o) {
        constexpr index_t wide = 8, many = 32; // panels of a wide tile; such tiles: enough for every thread
        const index_t panels = (o.columns + shape::panel - 1) / shape::panel;
        const index_t wide_tiles = (o.rows + most_packed_rows - 1) / most_packed_rows * (panels / wide);
        transposed_a = o.a_row == 1 && o.a_depth != 1;
        pack_a = (transposed_a || o.b_transposed) && o.rows >= shape::row_block / 2 && wide_tiles >= many;
        if (pack_a) rows = most_packed_rows, columns = wide * shape::panel;
        down = (o.rows + rows - 1) / rows, across = (o.columns + columns - 1) / columns;
    }
};

// Columns of `to` from rows of `from`: to[d, v] = from[v, d].
template <class Num, class T = typename Num::value_type>
void pack_transposed(const T* from, index_t stride, index_t rows, index_t depth, T* to, index_t to_stride) {
    index_t done = 0;
    if constexpr (std::is_same_v<Num, lanes>) {
        constexpr int w = lanes::width;
        for (; done + w <= rows; done += w) {
            index_t d = 0;
            for (; d + w <= depth; d += w) {
                lanes x[w];
                unroll<w>([&](auto v) OPD_INLINE_LAMBDA { x[v()] = lanes::load(from + (done + v()) * stride + d); });
                transpose(x);
                unroll<w>([&](auto v) OPD_INLINE_LAMBDA { x[v()].store(to + (d + v()) * to_stride + done); });
            }
            for (; d < depth; ++d)
                for (int v = 0; v < w; ++v) to[d * to_stride + done + v] = from[(done + v) * stride + d];
        }
    }
    for (; done < rows; ++done)
        for (index_t d = 0; d < depth; ++d) to[d * to_stride + done] = from[done * stride + d];
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Output tiles of a product: the unit that threads share out.
template <class T>
index_t product_tiles(const product_operands<T>& o) {
    const detail::tile_shape<T> t(o);
    return t.down * t.across;
}

/// Computes one output tile.
template <class T>
void product_tile(const product_operands<T>& o, index_t tile) {
    using Num = detail::product_number<T>;
    using shape = detail::product_shape<Num>;
    const detail::tile_shape<T> t(o);
    const index_t i = tile / t.across * t.rows, rows = std::min(t.rows, o.rows - i);
    const index_t left = tile % t.across * t.columns, right = std::min(left + t.columns, o.columns);
    const T* a = o.a + i * o.a_row;
    T* c = o.c + i * o.c_row;
    if (o.depth == 0 && !o.accumulate) {
        for (index_t r = 0; r < rows; ++r) std::fill_n(c + r * o.c_row + left, right - left, T(0));
        return;
    }
    T packed_a[t.most_packed_rows * shape::depth_block]; // (depth, rows), or (rows, depth)
    T packed_b[shape::depth_block * shape::panel];       // (depth, columns)
    for (index_t k = 0; k < o.depth; k += shape::depth_block) {
        const index_t depth = std::min(shape::depth_block, o.depth - k);
        const bool from_c = o.accumulate || k > 0; // the chain goes on where the last block stored it
        const T* block = a + k * o.a_depth;
        index_t a_row = o.a_row, a_depth = o.a_depth;
        if (t.pack_a && t.transposed_a) {
            for (index_t d = 0; d < depth; ++d) std::copy_n(block + d * o.a_depth, rows, packed_a + d * rows);
            block = packed_a, a_row = 1, a_depth = rows;
        } else if (t.pack_a) {
            for (index_t r = 0; r < rows; ++r) std::copy_n(block + r * o.a_row, depth, packed_a + r * depth);
            block = packed_a, a_row = depth;
        }
        for (index_t j = left; j < right; j += shape::panel) {
            const index_t columns = std::min(shape::panel, right - j);
            const T* b = o.b + k * o.b_depth + j;
            index_t b_depth = o.b_depth;
            if (o.b_transposed) {
                detail::pack_transposed<Num>(o.b + j * o.b_depth + k, o.b_depth, columns, depth, packed_b,
                                             shape::panel);
                b = packed_b, b_depth = shape::panel;
            }
            detail::product_panel<Num>(rows, columns, depth, block, a_row, a_depth, b, b_depth, c + j, o.c_row, from_c);
        }
    }
}

/// Runs a product on an executor.
template <class Executor, class T>
void product(const Executor& executor, const product_operands<T>& o) {
    const index_t tiles = product_tiles(o);
    if (tiles == 1) return product_tile(o, 0);
    executor.parallel_for(tiles, [&](index_t tile) { product_tile(o, tile); });
}

} // namespace OPD_ISA

/// C (M,N) = A (M,K) B (K,N), or C += with accumulate.
template <class T>
product_operands<T> product_nn(index_t rows, index_t columns, index_t depth, const T* a, index_t a_stride, const T* b,
                               index_t b_stride, T* c, index_t c_stride, bool accumulate = false) {
    return {rows, columns, depth, a, a_stride, 1, b, b_stride, c, c_stride, accumulate, false};
}

/// C (M,N) = A (K,M)^T B (K,N), or C += with accumulate.
template <class T>
product_operands<T> product_tn(index_t rows, index_t columns, index_t depth, const T* a, index_t a_stride, const T* b,
                               index_t b_stride, T* c, index_t c_stride, bool accumulate = false) {
    return {rows, columns, depth, a, 1, a_stride, b, b_stride, c, c_stride, accumulate, false};
}

/// C (M,N) = A (M,K) B (N,K)^T, or C += with accumulate.
template <class T>
product_operands<T> product_nt(index_t rows, index_t columns, index_t depth, const T* a, index_t a_stride, const T* b,
                               index_t b_stride, T* c, index_t c_stride, bool accumulate = false) {
    return {rows, columns, depth, a, a_stride, 1, b, b_stride, c, c_stride, accumulate, true};
}

} // namespace opd
