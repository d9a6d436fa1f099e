// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/hidden_drafter.hpp"

#include <algorithm>

#include "model/products.hpp"
#include "model/row_kernels.hpp"

namespace trainer {

#ifndef TRAINER_NUMBERS // as in model.cpp
#define TRAINER_NUMBERS float
model_shape hidden_drafter_shape(const model_shape& target, model_shape own) {
    own.width = target.width;
    own.vocabulary = 2 * target.width; // E
    own.tied = true;
    own.max_length = target.max_length;
    return own;
}

model_shape fused_drafter_shape(const model_shape& target, model_shape own) {
    own = hidden_drafter_shape(target, own);
    own.vocabulary = 5 * target.width; // E, then F
    return own;
}
#endif

template <class T>
void drafter_pairs(const transformer<T>& target, const run_of<0, T>& h, const run_of<1, std::int32_t>& x, T* pairs) {
    const index_t d = target.shape.width, rows = h.rows();
    if (h.base() != x.base() || x.rows() != rows || h.width() != d)
        throw std::invalid_argument("drafter_pairs: rows of other positions, or of a target of another width");
    for (index_t r = 0; r < rows; ++r) {
        std::copy_n(h.row(r), d, pairs + r * 2 * d);
        std::copy_n(target.at(target.layout.embedding) + *x.row(r) * d, d, pairs + r * 2 * d + d);
    }
}

template <class T>
void drafter_inputs(const transformer<T>& drafter, const T* pairs, index_t rows, T* x0) {
    const index_t d = drafter.shape.width;
    if (drafter.shape.vocabulary != 2 * d && !is_fused(drafter.shape))
        throw std::invalid_argument("drafter_inputs: not of hidden_drafter_shape");
    opd::product(opd::serial_executor{},
                 opd::product_nn(rows, d, 2 * d, pairs, 2 * d, drafter.at(drafter.layout.embedding), d, x0, d));
}

template <class T>
void drafter_states(const transformer<T>& drafter, const T* features, index_t rows, T* states) {
    const index_t d = drafter.shape.width;
    if (!is_fused(drafter.shape)) {
        std::copy_n(features, rows * d, states);
        return;
    }
    const T* f = drafter.at(drafter.layout.embedding) + 2 * d * d;
    opd::product(opd::serial_executor{}, opd::product_nn(rows, d, 3 * d, features + d, 4 * d, f, d, states, d));
}

template <class T>
hidden_training<T>::hidden_training(const transformer<T>& drafter, const transformer<T>& target,
                                    opd::thread_team& threads)
    : drafter_(drafter), target_(target), threads_(threads), pass_(drafter, threads) {}

template <class T>
index_t hidden_training<T>::set_sequences(std::span<const along<T>> features,
                                          std::span<const std::vector<std::int32_t>> tokens, index_t steps,
                                          bool through) {
    const index_t d = target_.shape.width, width = features_of(drafter_.shape);
    if (features.size() != tokens.size())
        throw std::invalid_argument("hidden_training: hidden states of another number of sequences");
    if (steps < 1) throw std::invalid_argument("hidden_training: a training-time test needs a step");
    std::vector<index_t> lengths;
    first_rows_.assign(1, 0);
    for (std::size_t s = 0; s < tokens.size(); ++s) {
        const auto n = static_cast<index_t>(tokens[s].size());
        if (n < 2) throw std::invalid_argument("hidden_training: a sequence needs two tokens");
        if (features[s].width != width)
            throw std::invalid_argument("hidden_training: features of another number of columns");
        lengths.push_back(n - 1);
        first_rows_.push_back(first_rows_.back() + n - 1);
    }
    tokens_.assign(tokens.begin(), tokens.end());
    steps_ = steps, through_ = through;
    pass_.set_steps(lengths, steps);
    bases_.assign(1, 0);
    for (index_t step = 0; step < steps; ++step) bases_.push_back(bases_.back() + rows(step));
    heads_.resize(static_cast<std::size_t>(steps));
    pairs_.resize(static_cast<std::size_t>(bases_.back() * 2 * d));
    d_x0_.resize(static_cast<std::size_t>(bases_.back() * d));
    x0_.resize(static_cast<std::size_t>(rows(0) * d)), states_.resize(x0_.size());
    const bool fused = is_fused(drafter_.shape);
    taps_.resize(fused ? 3 * x0_.size() : 0);
    threads_.run(static_cast<index_t>(tokens.size()), [&](index_t sequence, int) {
        const auto s = static_cast<std::size_t>(sequence);
        const index_t first = first_rows_[s], n = lengths[s];
        const auto seen = around<0>(features[s], 0, n);
        T* states = states_.data() + first * d;
        drafter_states(drafter_, seen.data(), n, states);
        for (index_t r = 0; fused && r < n; ++r)
            std::copy_n(seen.row(r) + d, 3 * d, taps_.data() + (first + r) * 3 * d);
        drafter_pairs(target_,
                      around<0>(along<T>{0, d, std::span<const T>(states, static_cast<std::size_t>(n * d))}, 0, n),
                      around<1>(along<std::int32_t>{0, 1, tokens_[s]}, 0, n), pairs_.data() + first * 2 * d);
    });
    enter(0);
    return rows(0);
}

template <class T>
void hidden_training<T>::enter(index_t step) {
    constexpr index_t piece = 64;
    const index_t d = target_.shape.width, n = rows(step);
    threads_.run((n + piece - 1) / piece, [&](index_t i, int) {
        const index_t from = i * piece;
        drafter_inputs(drafter_, static_cast<const T*>(pairs_.data()) + (base(step) + from) * 2 * d,
                       std::min(piece, n - from), x0_.data() + from * d);
    });
}

template <class T>
void hidden_training<T>::forward(index_t step, T* logits) {
    const index_t n = rows(step), d = target_.shape.width;
    if (n == 0) return; // all sequences are over
    if (step > 0) {
        const T* before = predicted(step - 1);
        index_t row = 0, came = 0; // of this step, and of the one before
        for (std::size_t s = 0; s < tokens_.size(); ++s) {
            const index_t length = first_rows_[s + 1] - first_rows_[s], count = std::max<index_t>(0, length - step);
            const along<T> own{step, d, std::span<const T>(before + came * d, static_cast<std::size_t>(count * d))};
            if (count > 0)
                drafter_pairs(target_, around<0>(own, step, count),
                              around<1>(along<std::int32_t>{0, 1, tokens_[s]}, step, count),
                              pairs_.data() + (base(step) + row) * 2 * d);
            row += count, came += std::max<index_t>(0, length - step + 1);
        }
        enter(step);
    }
    forward_state<T>& head = heads_[static_cast<std::size_t>(step)];
    const auto size = static_cast<std::size_t>(n * d);
    head.x.resize(size), head.n.resize(size), head.inv.resize(static_cast<std::size_t>(n));
    pass_.forward_layers(step, x0_.data(), head.x.data());
    forward_head(target_, head, n, logits);
}

template <class T>
void hidden_training<T>::backward(index_t step, const T* d_logits, const T* d_predicted) {
    const index_t n = rows(step), d = target_.shape.width;
    const auto size = static_cast<std::size_t>(n * d);
    d_states_.resize(std::max(size, d_states_.size()));
    if (n == 0) return;
    std::vector<T> all; // of h^: of this step's loss, and of the rows of the next that went on from it
    if (through_ && step + 1 < steps_) {
        d_predicted ? all.assign(d_predicted, d_predicted + n * d) : all.assign(size, T(0));
        index_t row = 0, next = 0;
        for (std::size_t s = 0; s < tokens_.size(); ++s) {
            const index_t length = first_rows_[s + 1] - first_rows_[s], count = std::max<index_t>(0, length - step - 1);
            add_row(d_states_.data() + next * d, count * d, all.data() + row * d);
            next += count, row += std::max<index_t>(0, length - step);
        }
        d_predicted = all.data();
    }
    dn_.resize(size), dx_.resize(size);
    unused_.assign(static_cast<std::size_t>(d), T(0)); // the norm's weight is the target's
    const forward_state<T>& head = heads_[static_cast<std::size_t>(step)];
    backward_head(target_, head.x.data(), head.inv.data(), d_logits, d_predicted, n, dn_.data(), dx_.data(),
                  unused_.data());
    T* d_x0 = d_x0_.data() + base(step) * d;
    pass_.backward_layers(step, dx_.data(), d_x0);
    if (!through_ && !(step == 0 && is_fused(drafter_.shape))) return;
    // by the first D rows of (inputs,D): E and, below it, F
    opd::product(opd::serial_executor{}, opd::product_nt(n, d, d, static_cast<const T*>(d_x0), d,
                                                         drafter_.at(drafter_.layout.head), d, d_states_.data(), d));
}

template <class T>
void hidden_training<T>::gradient(std::vector<T>& grad) {
    const index_t d = target_.shape.width;
    pass_.layers_gradient(grad);
    T* of_inputs = grad.data() + drafter_.layout.embedding.offset;
    const auto add = [&](index_t rows, index_t width, const std::vector<T>& x, const std::vector<T>& dy, T* to) {
        const auto p = opd::product_tn(width, d, rows, x.data(), width, dy.data(), d, to, d);
        threads_.run(opd::product_tiles(p), [&](index_t tile, int) { opd::product_tile(p, tile); });
    };
    add(bases_.back(), 2 * d, pairs_, d_x0_, of_inputs);
    if (is_fused(drafter_.shape)) add(rows(0), 3 * d, taps_, d_states_, of_inputs + 2 * d * d);
}

template <class T>
void target_rows(const transformer<T>& target, opd::thread_team& threads,
                 std::span<const std::vector<std::int32_t>> inputs, std::vector<T>& logits, std::vector<T>& hidden,
                 bool tapped) {
    std::vector<index_t> first(1, 0);
    for (const auto& tokens : inputs) first.push_back(first.back() + static_cast<index_t>(tokens.size()));
    const index_t v = target.shape.vocabulary, d = target.shape.width, width = tapped ? 4 * d : d;
    logits.resize(static_cast<std::size_t>(first.back() * v));
    hidden.resize(static_cast<std::size_t>(first.back() * width));
    struct memory {
        kv_cache<T> cache;
        forward_state<T> state;
        std::vector<T> row;
    };
    std::vector<memory> own(static_cast<std::size_t>(threads.size()));
    threads.run(static_cast<index_t>(inputs.size()), [&](index_t s, int thread) {
        const auto& tokens = inputs[static_cast<std::size_t>(s)];
        if (tokens.empty()) return;
        auto& [cache, state, features] = own[static_cast<std::size_t>(thread)];
        state.tapped = tapped;
        const segment whole{0, 0, static_cast<index_t>(tokens.size())};
        const index_t row = first[static_cast<std::size_t>(s)];
        cache.resize(target.shape, 1, whole.count);
        forward_rows(target, std::span(&whole, 1), std::span<const std::int32_t>(tokens), cache, state, false,
                     logits.data() + row * v);
        features.clear();
        for (index_t r = 0; r < whole.count; ++r) append_features(state, d, r, features);
        std::copy(features.begin(), features.end(), hidden.begin() + static_cast<std::ptrdiff_t>(row * width));
    });
}

using real = TRAINER_NUMBERS;
template void drafter_pairs(const transformer<real>&, const run_of<0, real>&, const run_of<1, std::int32_t>&, real*);
template void drafter_inputs(const transformer<real>&, const real*, index_t, real*);
template void drafter_states(const transformer<real>&, const real*, index_t, real*);
template class hidden_training<real>;
template void target_rows(const transformer<real>&, opd::thread_team&, std::span<const std::vector<std::int32_t>>,
                          std::vector<real>&, std::vector<real>&, bool);

} // namespace trainer
