// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A drafter of one layer (or a few) on the target's hidden states, forward and backward by hand. h[t] is what the
// target's head reads at position t, x[t] the token there:
//
//   x0[t]  = [h[t]; embedding[x[t+1]]] E                      (R,2D) (2D,D)     E trained; the embedding is the
//                                                                               target's
//   y      = layers(x0), causal                               (R,D)             trained; rotary position t
//   h^[t+1] = rmsnorm(y[t]) * norm_f                          (R,D)             what it expects of the target; norm_f
//                                                                               is the target's
//   logits of x[t+2] = h^[t+1] Whead^T                        (R,V)             Whead is the target's
//
// Norm, embedding and head are read from the target as it is at the moment, and never changed. To draft further h^[t+1]
// stands for h[t+1].
//
// A *fused* drafter (EAGLE-3) reads three layers of the target instead, low, middle and last, taps u[t] (3D), each
// divided by its root mean square: where h[t] stands above it has u[t] F, F (3D,D) trained. h^ is what it goes on from,
// and nothing that the target has.
//
// **Training-time test** (HASS, EAGLE-3): a draft's second row reads h^ in place of h and sees itself as it is then,
// its third two such rows. So training does the same, in `steps` steps. The row at position t in step j, from 0, is
// that of a draft of depth j + 1 whose first row stands at t - j >= 0: its h is h^[t] of step j - 1, and it attends to
//   positions up to t - j      as they are in step 0, from the target's h
//   t - j + i, i = 1 ... j     as it is in step i
// Bit for bit, that is what drafting computes. HASS takes h^ as a constant, EAGLE-3 does not (`through`).
//
// **The offset is a type.** Everything that belongs to positions comes as `along`: what lies at positions first, first
// + 1, … `around<1>(a, base, n)` picks what lies one position after base, base + 1, …; the result is a run_of<1>, and
// only h of 0 with x of 1 makes inputs, only predictions of 1 meet the target's logits of 1. A row that pairs h[t] with
// x[t], which trainers have shipped, does not compile.
//
// Sources: Li et al. 2024, EAGLE; Zhang et al. 2024, HASS (arXiv 2408.15766), section 3.2; Li et al. 2025, EAGLE-3
// (arXiv 2503.01840), sections 3.1 and 3.2. Here h is after the last norm, and the layer's output goes through that
// norm too; EAGLE-3 has a head and a norm of its own, over fewer words.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "task/tokenizer.hpp"

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

/// The shape of the trained part for a target: `layers`, heads, kv_heads, head_dim and ffn are `own`'s. Its embedding
/// is E.
model_shape hidden_drafter_shape(const model_shape& target, model_shape own);

/// Of a fused one, which has F below E.
model_shape fused_drafter_shape(const model_shape& target, model_shape own);

/// Whether it is one, and how many numbers it reads of a position of the target: h (D), or h and the taps (4D), see
/// append_features().
inline bool is_fused(const model_shape& drafter) { return drafter.vocabulary == 5 * drafter.width; }
inline index_t features_of(const model_shape& drafter) { return (is_fused(drafter) ? 4 : 1) * index_t{drafter.width}; }

/// What stands for h in rows of these features (R,features_of()): h itself, or the taps' fusion. (R,D)
template <class T>
void drafter_states(const transformer<T>& drafter, const T* features, index_t rows, T* states);

/// The pairs (R,2D) that E is applied to: [h[t]; embedding[x[t+1]]].
template <class T>
void drafter_pairs(const transformer<T>& target, const run_of<0, T>& h, const run_of<1, std::int32_t>& x, T* pairs);

/// x0 (R,D) of pairs that may be of any sequences.
template <class T>
void drafter_inputs(const transformer<T>& drafter, const T* pairs, index_t rows, T* x0);

/// Training on whole sequences, in one step or in a training-time test. The gradient is flat, as drafter.weights.
template <class T>
class hidden_training {
public:
    hidden_training(const transformer<T>& drafter, const transformer<T>& target, opd::thread_team& threads);

    /// Takes n rows of features and n tokens of each sequence, positions 0 to n - 1, n >= 2, one after the other: in
    /// step j n - 1 - j rows each, if that is more than 0, those of positions j to n - 2. Returns the number of rows of
    /// step 0.
    index_t set_sequences(std::span<const along<T>> features, std::span<const std::vector<std::int32_t>> tokens,
                          index_t steps = 1, bool through = false);
    index_t first_row(std::size_t sequence) const { return first_rows_[sequence]; } // of step 0
    index_t rows(index_t step) const { return pass_.step_rows(step); }              // N of a step

    /// Steps in order. The row at position t: the logits of the token after position t + 1, for which the target's are
    /// around<1>.
    void forward(index_t step, T* logits); // (N,V)
    /// Steps from the last: from the gradient of the logits and, unless it is null, of what is expected of the target,
    /// predicted().
    void backward(index_t step, const T* d_logits, const T* d_predicted); // (N,V), (N,D)
    /// Then that of the weights, of all steps together.
    void gradient(std::vector<T>& grad);

    /// The same of one step.
    void forward(T* logits) { forward(0, logits); }
    void backward(const T* d_logits, const T* d_predicted, std::vector<T>& grad) {
        backward(0, d_logits, d_predicted);
        gradient(grad);
    }

    /// h^ of a step: the row at position t belongs to position t + 1. (N,D)
    const T* predicted(index_t step = 0) const { return heads_[static_cast<std::size_t>(step)].n.data(); }
    /// After backward(step): the gradient of what stood for h in its rows, if it was wanted (`through`, or a fused
    /// drafter's step 0). (N,D)
    const T* d_states() const { return d_states_.data(); }

private:
    index_t base(index_t step) const { return bases_[static_cast<std::size_t>(step)]; } // rows of the steps before
    void enter(index_t step);                                                           // from pairs_ to x0_

    const transformer<T>& drafter_;
    const transformer<T>& target_;
    opd::thread_team& threads_;
    training_pass<T> pass_;
    std::vector<index_t> first_rows_, bases_; // (sequences + 1), (steps + 1)
    std::vector<std::vector<std::int32_t>> tokens_;
    index_t steps_ = 1;
    bool through_ = false;
    std::vector<T> taps_;         // (N,3D) of step 0, of a fused one
    std::vector<T> pairs_, d_x0_; // (rows of all steps, 2D) and D
    std::vector<T> states_, x0_, dn_, dx_, unused_, d_states_;
    std::vector<forward_state<T>> heads_; // of the steps, x, inv and n of each
};

/// The target over whole sequences, from position 0 on: logits (N,V), and what its head reads (N,D), with the taps if
/// they are asked for (N,4D).
template <class T>
void target_rows(const transformer<T>& target, opd::thread_team& threads,
                 std::span<const std::vector<std::int32_t>> inputs, std::vector<T>& logits, std::vector<T>& hidden,
                 bool tapped = false);

extern template class hidden_training<float>;
extern template class hidden_training<double>;

} // namespace trainer
