// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A decoder-only transformer of the Qwen3, Qwen2 and Llama families, forward and backward by hand.
//
//   x   = embedding[token]                                              (R,D)
//   per layer
//       n1  = rmsnorm(x) * norm1                                        (R,D)
//       qkv = n1 Wqkv^T (+ bqkv)                                        (R,Q+2KV)   Q = heads * head_dim, KV = kv_heads
//                                                                                   * head_dim
//       q, k = rotary(rmsnorm per head(q, k) * q_norm, k_norm)                      or of q and k as they are
//       att = softmax(q k^T / sqrt(head_dim), causal) v                 (R,Q)       head h reads kv head h / (heads /
//                                                                                   kv_heads)
//       x2  = x + att Wo^T (+ bo)                                       (R,D)
//       n2  = rmsnorm(x2) * norm2                                       (R,D)
//       gu  = n2 Wgu^T, h = silu(gate) * up                             (R,2F), (R,F)
//       x   = x2 + h Wdown^T                                            (R,D)
//   logits = rmsnorm(x) * norm_f  Whead^T                               (R,V)       Whead = embedding if tied
//
// rmsnorm(x) = x / sqrt(mean(x^2) + norm_epsilon). What stands in brackets, and the norms of q and k, are there where
// the shape says so. rotary turns the pair (x[i], x[i + head_dim/2]) of a row at position p by the angle p *
// rope::frequency(i).
//
// Shapes: R rows (one token each) of one or more segments; D width, F feed-forward width, V vocabulary.
//
// What is promised: the logits of a (sequence, position) are the same bits whether the row is computed in a training
// forward, a prefill, a chunk of a prefill, a decode step or the check of a drafted token, and whatever other rows are
// in the batch. All of them run `forward_rows`; its products are the library's fixed-order ones, attention sums logical
// positions in ascending order, everything else is local to a row. Weight gradients are one chain over the rows of the
// batch in order; threads share out sequences and output tiles, so their number changes no bit either.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/threads.hpp"

namespace trainer {

using opd::index_t;

/// Query rows that attention handles together.
inline constexpr index_t query_tile = 12;

/// By how much a position turns each pair of a head's numbers.
///
///   frequency(i) = base^(-2i / head_dim), then by `how`
///       linear    / factor
///       llama3    / factor where its wavelength, 2 pi / frequency, is above original_length / low; itself where it is
///                 below original_length / high; between the two (1 - s) / factor + s times itself,
///                 s = (original_length / wavelength - low) / (high - low)
///
/// Base: Su et al., RoFormer, 2021 (arXiv 2104.09864), section 3.4. llama3: transformers 5.24, modeling_rope_utils.py.
struct rope {
    enum class scaling : std::int32_t { none = 0, linear = 1, llama3 = 2 };
    friend constexpr scaling last_of(scaling) { return scaling::llama3; } // for archives
    double base = 10000;
    scaling how = scaling::none;
    double factor = 1;             // linear, llama3
    double low = 1, high = 4;      // llama3
    double original_length = 8192; // llama3: positions of the model before it was stretched

    double frequency(index_t i, index_t head_dim) const;
    bool operator==(const rope&) const = default;
};

struct model_shape {
    int vocabulary = 0; // V
    int width = 48;     // D
    int layers = 2;
    int heads = 4;
    int kv_heads = 2;
    int head_dim = 16; // even
    int ffn = 128;     // F
    bool tied = false; // the head is the embedding
    int max_length = 256;
    bool qk_norm = true;         // q and k are normalised per head
    bool attention_bias = false; // of q, k and v
    bool output_bias = false;    // of what attention puts out
    double norm_epsilon = 1e-6;  // of every norm
    trainer::rope rope = {};

    index_t q_width() const { return index_t{heads} * head_dim; }
    index_t kv_width() const { return index_t{kv_heads} * head_dim; }
    index_t qkv_width() const { return q_width() + 2 * kv_width(); }
    bool operator==(const model_shape&) const = default;
};

/// Where a tensor lies in the flat parameter vector.
struct tensor {
    index_t offset = 0;
    index_t rows = 0;    // outputs
    index_t columns = 0; // inputs; 1 for a norm's weight
    index_t vector = -1; // of norms and biases: where it lies among them alone
    index_t size() const { return rows * columns; }
};

struct layer_tensors {
    tensor norm1;  // (D)
    tensor wqkv;   // (Q+2KV,D)
    tensor bqkv;   // (Q+2KV); as the next three, of no size where the shape has none
    tensor q_norm; // (head_dim)
    tensor k_norm; // (head_dim)
    tensor wo;     // (D,Q)
    tensor bo;     // (D)
    tensor norm2;  // (D)
    tensor wgu;    // (2F,D)
    tensor wdown;  // (D,F)

    /// All of them, in the order of the weights.
    std::array<const tensor*, 10> all() const {
        return {&norm1, &wqkv, &bqkv, &q_norm, &k_norm, &wo, &bo, &norm2, &wgu, &wdown};
    }
};

struct model_layout {
    tensor embedding; // (V,D)
    std::vector<layer_tensors> layers;
    tensor norm_f;                 // (D)
    tensor head;                   // (V,D); the embedding's place if tied
    index_t size = 0, vectors = 0; // of all; of norms and biases, if they lie together

    explicit model_layout(const model_shape& shape);
};

/// What forward and backward passes read.
enum class storage {
    numbers,            ///< `weights`
    bfloat16,           ///< `stored`, of which `weights`, that an optimiser changes, are the masters
    bfloat16_by_itself, ///< `stored`; there are no masters
};

/// Numbers as they are stored: one of the two.
struct stored_numbers {
    const float* floats = nullptr;
    const opd::bfloat16* halves = nullptr;
    void copy(index_t first, index_t count, float* to) const;
};

/// With storage::bfloat16 every result has the bits of a model in storage::numbers whose weights are rounded to
/// bfloat16: products widen what they read (opd/product.hpp), norms and biases are kept widened. Of floats alone.
template <class T>
class transformer {
public:
    explicit transformer(const model_shape& shape, storage how = storage::numbers);

    /// Normal weights, deterministic in the seed: scaled by 1/sqrt(inputs), residual outputs also by 1/sqrt(2 layers).
    void initialise(std::uint64_t seed);

    /// Call after every change of `weights`, or of `stored` where it has no masters: rounds masters to nearest even,
    /// and refreshes the (in, out) copies that a small model's forward pass reads.
    void weights_changed();

    /// A model that runs as this one, without masters.
    transformer working() const { return transformer(*this, without_masters{}); }

    /// Above so many bytes of weights a model is large.
    static constexpr index_t large_bytes = index_t{64} << 20;

    model_shape shape;
    model_layout layout;
    std::vector<T> weights;            // flat, tensors as (out, in)
    std::vector<opd::bfloat16> stored; // likewise; empty but in bfloat16
    int split = 1; // of the forward pass's products: runs of inputs that are summed apart (injection.hpp)
    /// A large model's weights come from memory: it has no copies of them, and threads share out its products. A small
    /// one's stay in caches: it has copies, and threads share out its sequences. No bit depends on it.
    bool large = false;

    bool in_bfloat16() const { return !stored.empty(); }
    stored_numbers numbers() const requires std::is_same_v<T, float> { // that are read, all of them
        return in_bfloat16() ? stored_numbers{nullptr, stored.data()} : stored_numbers{weights.data(), nullptr};
    }
    const T* at(const tensor& t) const { return weights.data() + t.offset; } // masters, where it is in bfloat16
    const T* vector_at(const tensor& t) const {                              // norms and biases, as they are read
        return in_bfloat16() ? vectors_.data() + t.vector : at(t);
    }
    void embed(std::int32_t token, T* to) const; // (D)
    /// f(w) with the weights of a product, as they are read: T or bfloat16; (out,in), or (in,out) of a small model.
    template <class Function>
    void with(const tensor& t, bool turned, Function&& f) const {
        if constexpr (std::is_same_v<T, float>)
            if (in_bfloat16()) return f((turned ? transposed_stored_.data() : stored.data()) + t.offset);
        f((turned ? transposed_.data() : weights.data()) + t.offset);
    }
    const T* cosines(index_t position) const { return cosines_.data() + position * (shape.head_dim / 2); }
    const T* sines(index_t position) const { return sines_.data() + position * (shape.head_dim / 2); }

private:
    void resize_copies();
    struct without_masters {};
    transformer(const transformer& o, without_masters)
        : shape(o.shape), layout(o.layout), weights(o.in_bfloat16() ? std::vector<T>() : o.weights), stored(o.stored),
          split(o.split), large(o.large), transposed_(o.transposed_), transposed_stored_(o.transposed_stored_),
          vectors_(o.vectors_), cosines_(o.cosines_), sines_(o.sines_) {}

    std::vector<T> transposed_;
    std::vector<opd::bfloat16> transposed_stored_;
    std::vector<T> vectors_;
    std::vector<T> cosines_, sines_; // (max_length, head_dim/2)
};

/// Keys (transposed, so that lanes run across positions) and values of `slots` sequences, in pages of columns. Either
/// every slot has a page of its own for all that it may hold, or slots take pages from a common pool as they grow.
template <class T>
class kv_cache {
public:
    /// Each slot has one page.
    void resize(const model_shape& shape, index_t slots, index_t length) { resize(shape, slots, length, 0, 0); }
    /// `pages` pages of `page` columns, a multiple of 16, for all slots: none has one at first. page 0: as above.
    void resize(const model_shape& shape, index_t slots, index_t length, index_t page, index_t pages);

    index_t capacity() const { return capacity_; } // columns that a slot may have, a multiple of 16
    index_t page() const { return page_; }         // columns
    index_t held(index_t slot) const { return std::ssize(table_[static_cast<std::size_t>(slot)]); } // pages
    /// One page more; false: there is none left.
    bool take(index_t slot);
    /// All of its pages.
    void release(index_t slot);

    T* keys(index_t layer, index_t slot, index_t kv_head, index_t n = 0) { // (head_dim, page) of its page n
        return keys_.data() + ((layer * pages_ + at(slot, n)) * kv_heads_ + kv_head) * head_dim_ * page_;
    }
    T* values(index_t layer, index_t slot, index_t n = 0) { // (page, KV)
        return values_.data() + (layer * pages_ + at(slot, n)) * page_ * kv_heads_ * head_dim_;
    }

    /// Column `from` of a slot becomes column `to`, in every layer.
    void move(index_t slot, index_t from, index_t to);

private:
    index_t at(index_t slot, index_t n) const {
        return table_[static_cast<std::size_t>(slot)][static_cast<std::size_t>(n)];
    }
    index_t layers_ = 0, kv_heads_ = 0, head_dim_ = 0, capacity_ = 0, page_ = 0, pages_ = 0;
    std::vector<std::vector<index_t>> table_; // pages by slot
    std::vector<index_t> free_;               // the next one last
    std::vector<T> keys_, values_;
};

/// `count` consecutive positions of the sequence in `slot`, from position `start`; everything before is in the cache.
///
/// Below the last of them may grow a tree of drafts, whose rows follow: `parents` names of each node an earlier one, or
/// -1 for that position. A node of depth d (its parent's plus one) is a token at position start + count - 1 + d, and
/// sees what is before the tree and its ancestors alone: its logits are those of a sequence that went this way. Until
/// it is known which way that is, node n's keys and values are in column start + count + n; kv_cache::move() brings
/// those of the way to their places.
struct segment {
    index_t slot = 0;
    index_t start = 0;
    index_t count = 1;
    std::span<const std::int32_t> parents = {}; // (nodes)
    /// The first so many nodes are in their columns already, and have no rows; then count is 0.
    index_t known = 0;
    /// Step `step` of a training-time test, from 0, of a sequence of `stride` rows a step: the row at position t >=
    /// step is in column step * stride + t. It sees what a draft of that depth sees: of step 0 the positions up to t -
    /// step, then of each later step, up to its own, one position. As each would in a chain, bit for bit.
    index_t step = 0, stride = 0;
    index_t rows() const { return count + static_cast<index_t>(parents.size()) - known; }
};

/// What one layer computes for R rows. Decoding shares one of these between the layers. Training keeps one per layer;
/// with gradient checkpointing it keeps x of each layer, and shares the rest.
template <class T>
struct layer_rows {
    std::vector<T> x;     // (R,D) the residual stream that enters
    std::vector<T> inv1;  // (R) 1 / rms
    std::vector<T> n1;    // (R,D)
    std::vector<T> qkv;   // (R,Q+2KV) before the norms of q and k; with the bias
    std::vector<T> invqk; // (R,heads+kv_heads)
    std::vector<T> qk;    // (R,Q+KV) normalised and rotated
    std::vector<T> peak;  // (R,heads) maximum of the scores
    std::vector<T> scale; // (R,heads) 1 / sum of exp(score - peak)
    std::vector<T> att;   // (R,Q)
    std::vector<T> x2;    // (R,D)
    std::vector<T> inv2;  // (R)
    std::vector<T> n2;    // (R,D)
    std::vector<T> gu;    // (R,2F)
    std::vector<T> h;     // (R,F)

    /// All but x.
    void resize(const model_shape& shape, index_t rows);
};

/// Gradients with respect to what one layer's products put out, which the weight gradients need: those that do not take
/// the place of what the layer computed. In layer_rows, gu becomes the gradient of n2 Wgu^T, x2 of att Wo^T, and the x
/// that follows of h Wdown^T.
template <class T>
struct layer_gradients {
    std::vector<T> qkv;  // (R,Q+2KV)
    std::vector<T> rest; // what each sequence adds to norm1, bqkv, q_norm, k_norm, bo and norm2, one after the other
    std::vector<T> seen; // (R,2KV) of keys and values, from the rows of later steps of a training-time test
};

/// Scratch memory and results of one forward pass over some rows.
template <class T>
struct forward_state {
    std::vector<layer_rows<T>> layers; // one if nothing is kept, else one per layer
    layer_rows<T> shared;              // checkpointed: without x, of the layer that was computed last
    std::vector<T> x;                  // (R,D) the residual stream that leaves the last layer
    std::vector<T> inv;                // (R)
    std::vector<T> n;                  // (R,D)
    std::vector<T> scores;             // (threads, tile, capacity)
    std::vector<index_t> firsts;       // the segments' first rows
    std::vector<index_t> positions;    // (R) of each row in its sequence
    std::vector<index_t> paths;     // columns of the ancestors of trees' nodes and their own, ascending, node by node
    std::vector<index_t> path_ends; // (R) where a row's end; as the row before: it sees all columns up to its own

    /// Whose threads share out large products and what is done to many rows; null: the caller's alone. No bit depends
    /// on it.
    opd::thread_team* threads = nullptr;

    /// Gradient checkpointing, of a pass that keeps: of each layer it keeps what enters, and the backward pass computes
    /// the rest again. The cache then is of one layer. No bit depends on it.
    bool checkpointed = false;
    layer_rows<T>& rows_of(index_t layer) { return checkpointed ? shared : layers[static_cast<std::size_t>(layer)]; }
    index_t cached_as(index_t layer) const { return checkpointed ? 0 : layer; } // the layer's number in the cache

    bool apart = false;  // a draft's values are not finite
    bool tapped = false; // keep what some layers leave:
    std::vector<T> taps; // (R,3D) after tapped_layers(), each divided by its root mean square

    void resize(const model_shape& shape, index_t rows, index_t capacity, bool keep);
};

/// A low, a middle and the last layer, counted from 1, of which there are so many: a third, two thirds, all of them,
/// rounded up.
std::array<index_t, 3> tapped_layers(index_t layers);

/// What a drafter reads of a row r, at the end of `to`: what the head reads, and if state.tapped, the taps. (D) or (4D)
template <class T>
void append_features(const forward_state<T>& state, index_t d, index_t r, std::vector<T>& to) {
    to.insert(to.end(), state.n.data() + r * d, state.n.data() + (r + 1) * d);
    if (state.tapped) to.insert(to.end(), state.taps.data() + r * 3 * d, state.taps.data() + (r + 1) * 3 * d);
}

/// Logits of all rows of all segments, in order. Writes the rows' keys and values into the cache.
template <class T>
void forward_rows(const transformer<T>& model, std::span<const segment> segments,
                  std::span<const std::int32_t> tokens, // (R)
                  kv_cache<T>& cache, forward_state<T>& state, bool keep,
                  T* logits); // (R,V)

/// Between the embedding and the last norm: the rows of state.layers[0].x, for which state has room, go through the
/// layers to state.x.
template <class T>
void forward_layers(const transformer<T>& model, std::span<const segment> segments, index_t rows, kv_cache<T>& cache,
                    forward_state<T>& state, bool keep);

/// What the head reads of all rows of all segments, in order: state.n (R,D). As forward_rows(), without the head.
template <class T>
void forward_states(const transformer<T>& model, std::span<const segment> segments,
                    std::span<const std::int32_t> tokens, // (R)
                    kv_cache<T>& cache, forward_state<T>& state, bool keep);

/// Logits of what the head reads: the bits of forward_rows(), whatever rows come together.
template <class T>
void head_logits(const transformer<T>& model, const T* n, index_t rows, T* logits, // (R,D), (R,V)
                 opd::thread_team* threads = nullptr);

/// Logits of rows that left the last layer; state.n is what the head reads.
template <class T>
void forward_head(const transformer<T>& model, forward_state<T>& state, index_t rows, T* logits); // (R,V)

/// dx (R,D): the gradient of what leaves the last layer, from that of the logits and of what the head reads, of which
/// either may be null. norm_f (D) is added to.
template <class T>
void backward_head(const transformer<T>& model, const T* x, const T* inv, const T* d_logits, const T* d_n, index_t rows,
                   T* dn, T* dx, T* norm_f, // x, d_n, dn (R,D); inv (R)
                   opd::thread_team* threads = nullptr);

/// One sequence of a training batch, or a step of it, or, of a large model, all sequences: the tokens, the forward pass
/// and the gradients of its products' outputs.
template <class T>
struct sequence_pass {
    std::vector<std::int32_t> tokens; // (R) inputs
    std::vector<segment> sequences;   // their rows, one after the other; each has a slot
    index_t row = 0;                  // its first row in the batch's logits, or in the step's
    index_t start = 0;                // position of the first, which is the number of the step
    kv_cache<T> cache;                // of all steps: the first one's
    forward_state<T> forward;
    std::vector<layer_gradients<T>> layers;
    std::vector<T> d_x0;   // (R,D) of the embedding's rows; on the way back, of the residual stream
    std::vector<T> norm_f; // (sequences,D) their shares
    index_t rows() const { return static_cast<index_t>(tokens.size()); }
    std::vector<T>& d_qkv(index_t layer) { // (R,Q+2KV), the layers' one place if checkpointed
        return layers[static_cast<std::size_t>(forward.cached_as(layer))].qkv;
    }
    index_t first(index_t n) const { // row of the nth sequence
        index_t r = 0;
        for (index_t i = 0; i < n; ++i) r += sequences[static_cast<std::size_t>(i)].rows();
        return r;
    }
};

/// A batch of packed sequences. Memory is kept from step to step.
///
/// With gradient checkpointing (Chen et al., Training deep nets with sublinear memory cost, 2016, arXiv 1604.06174) a
/// forward pass keeps what enters each layer, (R,D), and one layer's activations. The backward pass goes layer by
/// layer: it computes the layer again by the same calls, then the gradients of what the layer read and of its weights.
/// So all gradients have the bits of those without. Of training-time tests, set_steps(), everything is kept.
template <class T>
class training_pass {
public:
    training_pass(const transformer<T>& model, opd::thread_team& threads, bool checkpointed = false);

    /// Takes the sequences' input tokens; returns the number of rows N.
    index_t set_sequences(std::span<const std::vector<std::int32_t>> sequences);
    index_t rows() const { return rows_; }
    index_t first_row(std::size_t sequence) const { return first_rows_[sequence]; }

    /// Takes sequences of these lengths, whose rows are not the model's tokens, for the layers alone, in a
    /// training-time test of so many steps (1: none). In step j a sequence has the rows of its positions j, j + 1, …,
    /// which see what segment::step says.
    void set_steps(std::span<const index_t> lengths, index_t steps);
    index_t step_rows(index_t step) const { return step_rows_[static_cast<std::size_t>(step)]; } // N of a step
    /// The layers alone, step by step from 0: what leaves the last of them.
    void forward_layers(index_t step, const T* x0, T* x); // (N,D), (N,D)
    /// Then from the last step to 0: the gradient of what entered the first; and of the layers' weights, over all
    /// steps.
    void backward_layers(index_t step, const T* dx, T* d_x0); // (N,D), (N,D)
    void layers_gradient(std::vector<T>& grad);               // flat as the weights

    /// Logits of all rows, kept for backward.
    void forward(T* logits); // (N,V)

    /// Gradient of the loss with respect to the weights, from its gradient with respect to the logits. Once after each
    /// forward pass, whose memory it takes.
    void backward(const T* d_logits,     // (N,V)
                  std::vector<T>& grad); // flat, as the weights; overwritten

    /// Without the head: what it reads of all rows, kept for backward_states, and the gradients of everything before it
    /// from that of what it reads. The gradient of the head's own weights has to be in grad already; a tied head's is
    /// added to.
    void forward_states(T* n);                               // (N,D)
    void backward_states(const T* dn, std::vector<T>& grad); // (N,D), flat as the weights

private:
    enum class part { all, before_head, layers }; // what a gradient is of
    index_t set_passes(std::span<const std::vector<std::int32_t>> sequences, bool together, bool checkpointed);
    void order_sequences();
    void resize(sequence_pass<T>& pass);
    // Those of a sequence up to this one, which is of its last step so far.
    std::vector<sequence_pass<T>*> steps_to(index_t pass);
    void backward(part what, const T* d_out, index_t width, std::vector<T>& grad);
    // Of the weights: 0 where no product writes; the products of a run of layers; what has no product of its own.
    void clear_gradient(part what, std::vector<T>& grad) const;
    void layer_products(int first, int end, std::vector<T>& grad, const T* d_logits = nullptr);
    void small_gradients(part what, std::vector<T>& grad) const;

    const transformer<T>& model_;
    opd::thread_team& threads_;
    const bool checkpointed_;
    std::vector<sequence_pass<T>> sequences_; // the first `count_` are in use
    std::vector<index_t> first_rows_;
    std::vector<index_t> order_; // longest first: threads finish together
    std::size_t count_ = 0;
    index_t rows_ = 0;
    // of a training-time test: passes by step, longest first; of each pass the one of the step before
    std::vector<std::vector<index_t>> of_step_;
    std::vector<index_t> before_, step_rows_;
    std::vector<std::vector<T>> scratch_; // two per thread
};

extern template class transformer<float>;
extern template class transformer<double>;
extern template class training_pass<float>;
extern template class training_pass<double>;

} // namespace trainer
