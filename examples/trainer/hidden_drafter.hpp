// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A drafter of one layer (or a few) on the target's hidden states, forward and backward by hand. h[t] is what the target's head reads at
// position t, x[t] the token there:
//
//   x0[t]  = [h[t]; embedding[x[t+1]]] E                      (R,2D) (2D,D)     E trained; the embedding is the target's
//   y      = layers(x0), causal                               (R,D)             trained; rotary position t
//   h^[t+1] = rmsnorm(y[t]) * norm_f                          (R,D)             what it expects of the target; norm_f is the target's
//   logits of x[t+2] = h^[t+1] Whead^T                        (R,V)             Whead is the target's
//
// Norm, embedding and head are read from the target as it is at the moment, and never changed. To draft further h^[t+1] stands for h[t+1].
//
// **The offset is a type.** Everything that belongs to positions comes as `along`: what lies at positions first, first + 1, …
// `around<1>(a, base, n)` picks what lies one position after base, base + 1, …; the result is a run_of<1>, and only h of 0 with x of 1 makes
// inputs, only predictions of 1 meet the target's logits of 1. A row that pairs h[t] with x[t], which trainers have shipped, does not
// compile.
//
// Source: Li et al. 2024, EAGLE. Here h is after the last norm, and the layer's output goes through that norm too.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "model.hpp"
#include "tokenizer.hpp"

namespace trainer {

/// Rows of `width` numbers (or ids) that belong to positions first, first + 1, …
template <class X>
struct along {
    index_t first = 0;
    index_t width = 1;
    std::span<const X> values; // (positions, width)
    index_t positions() const { return static_cast<index_t>(values.size()) / width; }
};

template <int Offset, class X>
class run_of;
/// What lies Offset positions after base, base + 1, … base + rows - 1.
template <int Offset, class X>
run_of<Offset, X> around(const along<X>& a, index_t base, index_t rows);

/// Row i belongs to base + i, and holds what lies Offset positions after that.
template <int Offset, class X>
class run_of {
public:
    index_t base() const { return base_; }
    index_t rows() const { return static_cast<index_t>(values_.size()) / width_; }
    index_t width() const { return width_; }
    const X* row(index_t i) const { return values_.data() + i * width_; }
    const X* data() const { return values_.data(); }

private:
    run_of(index_t base, index_t width, std::span<const X> values) : base_(base), width_(width), values_(values) {}
    template <int O, class Y>
    friend run_of<O, Y> around(const along<Y>& a, index_t base, index_t rows);

    index_t base_, width_;
    std::span<const X> values_;
};

template <int Offset, class X>
run_of<Offset, X> around(const along<X>& a, index_t base, index_t rows) {
    const index_t from = base + Offset - a.first;
    if (rows < 0 || from < 0 || from + rows > a.positions())
        throw std::invalid_argument("around: positions " + std::to_string(base + Offset) + " to " +
                                    std::to_string(base + Offset + rows) + " of " + std::to_string(a.first) + " to " +
                                    std::to_string(a.first + a.positions()));
    return {base, a.width,
            a.values.subspan(static_cast<std::size_t>(from * a.width), static_cast<std::size_t>(rows * a.width))};
}

/// The shape of the trained part for a target: `layers`, heads, kv_heads, head_dim and ffn are `own`'s. Its embedding is E.
model_shape hidden_drafter_shape(const model_shape& target, model_shape own);

/// The pairs (R,2D) that E is applied to: [h[t]; embedding[x[t+1]]].
template <class T>
void drafter_pairs(const transformer<T>& target, const run_of<0, T>& h, const run_of<1, std::int32_t>& x, T* pairs);

/// x0 (R,D) of pairs that may be of any sequences.
template <class T>
void drafter_inputs(const transformer<T>& drafter, const T* pairs, index_t rows, T* x0);

/// Training on whole sequences. The gradient is flat, as drafter.weights.
template <class T>
class hidden_training {
public:
    hidden_training(const transformer<T>& drafter, const transformer<T>& target, opd::thread_team& threads);

    /// Takes n hidden states and n tokens of each sequence, positions 0 to n - 1, n >= 2, one after the other: n - 1 rows each. Returns
    /// the number of rows N. What is given is read until backward().
    index_t set_sequences(std::span<const along<T>> hidden, std::span<const std::vector<std::int32_t>> tokens);
    index_t first_row(std::size_t sequence) const { return first_rows_[sequence]; }

    /// Row t of a sequence: the logits of the token after position t + 1, for which the target's are around<1>.
    void forward(T* logits); // (N,V)
    /// From the gradient of the logits and, unless it is null, of what is expected of the target, predicted().
    void backward(const T* d_logits, const T* d_predicted, std::vector<T>& grad); // (N,V), (N,D)

    /// h^ of the last forward pass: row t belongs to position t + 1. (N,D)
    const T* predicted() const { return head_.n.data(); }

private:
    const transformer<T>& drafter_;
    const transformer<T>& target_;
    opd::thread_team& threads_;
    training_pass<T> pass_;
    std::vector<index_t> first_rows_; // (sequences + 1)
    std::vector<T> pairs_, x0_, dn_, dx_, unused_;
    forward_state<T> head_; // x, inv and n of it
};

/// The target over whole sequences: logits (N,V), and what its head reads (N,D), from position 0 on.
template <class T>
void target_rows(const transformer<T>& target, opd::thread_team& threads,
                 std::span<const std::vector<std::int32_t>> inputs, std::vector<T>& logits, std::vector<T>& hidden);

extern template class hidden_training<float>;
extern template class hidden_training<double>;

} // namespace trainer
