// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a transformer does to one row apart from products: norms, rotary positions, SwiGLU, softmax, and their
// gradients. Every function reads and writes one row, sums in the order of its elements, and so gives the same bits
// whatever rows surround it. Written once for lanes of floats (training, rollout) and for double (the test of the
// gradients).
#pragma once

#include <cmath>
#include <type_traits>

#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/product.hpp"

namespace trainer {

using opd::index_t;

template <class T>
using number = std::conditional_t<std::is_same_v<T, float>, opd::lanes, opd::scalar<T>>;

// f(offset, load, store) over the lanes of n elements; the last ones may be a part of a register.
template <class T, class Function>
inline void each_lane(index_t n, Function&& f) {
    using Num = number<T>;
    index_t i = 0;
    for (; i + Num::width <= n; i += Num::width)
        f(
            i, [](const auto* p) { return Num::load(p); }, [](Num x, T* p) { x.store(p); });
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        f(
            i, [rest](const auto* p) { return opd::detail::load_part(p, rest); },
            [rest](Num x, T* p) { opd::detail::store_part(x, p, rest); });
    }
}

/// To nearest even.
inline void round_to_bfloat16(const float* x, index_t n, opd::bfloat16* y) {
    for (index_t i = 0; i < n; ++i) y[i] = opd::bfloat16(x[i]);
}

template <class T>
inline T dot(const T* a, const T* b, index_t n) {
    using Num = number<T>;
    Num s(0);
    each_lane<T>(n, [&](index_t i, auto load, auto) { s = fma(load(a + i), load(b + i), s); });
    return sum(s);
}

/// y += x
template <class T>
inline void add_row(const T* x, index_t n, T* y) {
    each_lane<T>(n, [&](index_t i, auto load, auto store) { store(load(y + i) + load(x + i), y + i); });
}

/// y = x / rms(x) * weight; returns 1 / rms.
template <class T>
inline T rms_norm(const T* x, const T* weight, index_t n, double epsilon, T* y) {
    using Num = number<T>;
    const T inv = T(1) / std::sqrt(dot(x, x, n) / static_cast<T>(n) + static_cast<T>(epsilon));
    each_lane<T>(n, [&](index_t i, auto load, auto store) { store(load(x + i) * Num(inv) * load(weight + i), y + i); });
    return inv;
}

/// dx = gradient through y = x inv weight, plus *residual if given; d_weight += dy * x inv.
template <class T>
inline void rms_norm_backward(const T* dy, const T* x, const T* weight, T inv, index_t n, const T* residual, T* dx,
                              T* d_weight) {
    using Num = number<T>;
    Num s(0);
    each_lane<T>(n, [&](index_t i, auto load, auto store) {
        const Num g = load(dy + i), unit = load(x + i) * Num(inv);
        s = fma(g * load(weight + i), unit, s);
        store(fma(g, unit, load(d_weight + i)), d_weight + i);
    });
    const T mean = sum(s) / static_cast<T>(n);
    each_lane<T>(n, [&](index_t i, auto load, auto store) {
        const Num unit = load(x + i) * Num(inv);
        Num r = (load(dy + i) * load(weight + i) - unit * Num(mean)) * Num(inv);
        if (residual) r += load(residual + i);
        store(r, dx + i);
    });
}

/// Rotates the pairs (x[i], x[i + half]) by the position's angles; the gradient rotates back with negated sines.
template <class T>
inline void rotate(T* x, const T* cosine, const T* sine, T sign, index_t half) {
    using Num = number<T>;
    each_lane<T>(half, [&](index_t i, auto load, auto store) {
        const Num a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i) * Num(sign);
        store(a * c - b * s, x + i);
        store(b * c + a * s, x + half + i);
    });
}

/// h = silu(gate) * up, silu(g) = g / (1 + e^-g).
template <class T>
inline void swiglu(const T* gate, const T* up, index_t n, T* h) {
    using Num = number<T>;
    each_lane<T>(n, [&](index_t i, auto load, auto store) {
        const Num g = load(gate + i);
        store(g / (Num(1) + exp(-g)) * load(up + i), h + i);
    });
}

template <class T>
inline void swiglu_backward(const T* dh, const T* gate, const T* up, index_t n, T* d_gate, T* d_up) {
    using Num = number<T>;
    each_lane<T>(n, [&](index_t i, auto load, auto store) {
        const Num g = load(gate + i), d = load(dh + i);
        const Num sigmoid = Num(1) / (Num(1) + exp(-g));
        store(d * load(up + i) * sigmoid * (Num(1) + g * (Num(1) - sigmoid)), d_gate + i);
        store(d * g * sigmoid, d_up + i);
    });
}

// 0, 1, 2, ...: the lane's own number, to compare with a limit
template <class T>
inline number<T> lane_numbers() {
    T t[number<T>::width];
    for (int i = 0; i < number<T>::width; ++i) t[i] = static_cast<T>(i);
    return number<T>::load(t);
}

/// Scores of one query in place: s[j] <- exp(s[j] scale - peak) for j < valid, 0 for valid <= j < padded.
/// Positions beyond `valid` add exact zeros, so the sum does not depend on the padding.
template <class T>
inline void softmax_scores(T* s, index_t valid, index_t padded, T scale, T& peak, T& inverse_sum) {
    using Num = number<T>;
    const Num lane = lane_numbers<T>();
    const Num lowest(-3.0e38);
    Num top = lowest;
    each_lane<T>(padded, [&](index_t i, auto load, auto) {
        top = max(top, select(lane < Num(static_cast<double>(valid - i)), load(s + i) * Num(scale), lowest));
    });
    if constexpr (std::is_same_v<T, float>)
        peak = max_lane(top);
    else
        peak = top.v;
    Num total(0);
    each_lane<T>(padded, [&](index_t i, auto load, auto store) {
        const Num e = exp(load(s + i) * Num(scale) - Num(peak));
        const Num kept = select(lane < Num(static_cast<double>(valid - i)), e, Num(0));
        total += kept;
        store(kept, s + i);
    });
    inverse_sum = T(1) / sum(total);
}

} // namespace trainer
