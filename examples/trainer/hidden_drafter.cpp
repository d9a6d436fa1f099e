// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hidden_drafter.hpp"

#include <algorithm>

#include "opd/product.hpp"

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
    if (drafter.shape.vocabulary != 2 * d) throw std::invalid_argument("drafter_inputs: not of hidden_drafter_shape");
    opd::product(opd::serial_executor{},
                 opd::product_nn(rows, d, 2 * d, pairs, 2 * d, drafter.at(drafter.layout.embedding), d, x0, d));
}

template <class T>
hidden_training<T>::hidden_training(const transformer<T>& drafter, const transformer<T>& target,
                                    opd::thread_team& threads)
    : drafter_(drafter), target_(target), threads_(threads), pass_(drafter, threads) {}

template <class T>
index_t hidden_training<T>::set_sequences(std::span<const along<T>> hidden,
                                          std::span<const std::vector<std::int32_t>> tokens) {
    if (hidden.size() != tokens.size())
        throw std::invalid_argument("hidden_training: hidden states of another number of sequences");
    std::vector<index_t> lengths;
    first_rows_.assign(1, 0);
    for (std::size_t s = 0; s < tokens.size(); ++s) {
        const auto n = static_cast<index_t>(tokens[s].size());
        if (n < 2) throw std::invalid_argument("hidden_training: a sequence needs two tokens");
        lengths.push_back(n - 1);
        first_rows_.push_back(first_rows_.back() + n - 1);
    }
    const index_t rows = pass_.set_lengths(lengths), d = target_.shape.width;
    pairs_.resize(static_cast<std::size_t>(rows * 2 * d));
    x0_.resize(static_cast<std::size_t>(rows * d));
    threads_.run(static_cast<index_t>(tokens.size()), [&](index_t sequence, int) {
        const auto s = static_cast<std::size_t>(sequence);
        T* pairs = pairs_.data() + first_rows_[s] * 2 * d;
        drafter_pairs(target_, around<0>(hidden[s], 0, lengths[s]),
                      around<1>(along<std::int32_t>{0, 1, tokens[s]}, 0, lengths[s]), pairs);
        drafter_inputs(drafter_, static_cast<const T*>(pairs), lengths[s], x0_.data() + first_rows_[s] * d);
    });
    return rows;
}

template <class T>
void hidden_training<T>::forward(T* logits) {
    const index_t rows = first_rows_.back();
    const auto size = static_cast<std::size_t>(rows * target_.shape.width);
    head_.x.resize(size), head_.n.resize(size), head_.inv.resize(static_cast<std::size_t>(rows));
    pass_.forward_layers(x0_.data(), head_.x.data());
    forward_head(target_, head_, rows, logits);
}

template <class T>
void hidden_training<T>::backward(const T* d_logits, const T* d_predicted, std::vector<T>& grad) {
    const index_t rows = first_rows_.back(), d = target_.shape.width;
    dn_.resize(static_cast<std::size_t>(rows * d)), dx_.resize(dn_.size());
    unused_.assign(static_cast<std::size_t>(d), T(0)); // the norm's weight is the target's
    backward_head(target_, head_.x.data(), head_.inv.data(), d_logits, d_predicted, rows, dn_.data(), dx_.data(),
                  unused_.data());
    pass_.backward_layers(dx_.data(), grad, dn_.data()); // dn_: of x0 from here on
    const auto of_e =
        opd::product_tn(2 * d, d, rows, static_cast<const T*>(pairs_.data()), 2 * d, static_cast<const T*>(dn_.data()),
                        d, grad.data() + drafter_.layout.embedding.offset, d);
    threads_.run(opd::product_tiles(of_e), [&](index_t tile, int) { opd::product_tile(of_e, tile); });
}

template <class T>
void target_rows(const transformer<T>& target, opd::thread_team& threads,
                 std::span<const std::vector<std::int32_t>> inputs, std::vector<T>& logits, std::vector<T>& hidden) {
    std::vector<index_t> first(1, 0);
    for (const auto& tokens : inputs) first.push_back(first.back() + static_cast<index_t>(tokens.size()));
    const index_t v = target.shape.vocabulary, d = target.shape.width;
    logits.resize(static_cast<std::size_t>(first.back() * v));
    hidden.resize(static_cast<std::size_t>(first.back() * d));
    struct memory {
        kv_cache<T> cache;
        forward_state<T> state;
    };
    std::vector<memory> own(static_cast<std::size_t>(threads.size()));
    threads.run(static_cast<index_t>(inputs.size()), [&](index_t s, int thread) {
        const auto& tokens = inputs[static_cast<std::size_t>(s)];
        if (tokens.empty()) return;
        auto& [cache, state] = own[static_cast<std::size_t>(thread)];
        const segment whole{0, 0, static_cast<index_t>(tokens.size())};
        const index_t row = first[static_cast<std::size_t>(s)];
        cache.resize(target.shape, 1, whole.count);
        forward_rows(target, std::span(&whole, 1), std::span<const std::int32_t>(tokens), cache, state, false,
                     logits.data() + row * v);
        std::copy_n(state.n.data(), whole.count * d, hidden.data() + row * d);
    });
}

using real = TRAINER_NUMBERS;
template void drafter_pairs(const transformer<real>&, const run_of<0, real>&, const run_of<1, std::int32_t>&, real*);
template void drafter_inputs(const transformer<real>&, const real*, index_t, real*);
template class hidden_training<real>;
template void target_rows(const transformer<real>&, opd::thread_team&, std::span<const std::vector<std::int32_t>>,
                          std::vector<real>&, std::vector<real>&);

} // namespace trainer
