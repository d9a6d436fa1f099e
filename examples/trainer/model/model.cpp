// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "model/model.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "model/products.hpp"
#include "model/row_kernels.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace {

using opd::product;
using opd::product_nn;
using opd::product_nt;
using opd::serial_executor;

// Products that many bytes of weights go into are worth waking threads for.
constexpr std::size_t shared_bytes = std::size_t{1} << 20;

// Rows that a layer of a small model handles together while they lie in the first-level cache.
constexpr index_t row_tile = 48;
// Numbers that are worth waking threads for.
constexpr index_t shared_numbers = index_t{1} << 16;

index_t round_up(index_t n, index_t to) { return (n + to - 1) / to * to; }

// The same product in another order of its sums: each run of inputs by itself, then the runs' sums in order.
template <class T>
void linear_in_runs(const transformer<T>& model, const tensor& w, const T* x, index_t rows, T* y, bool accumulate) {
    std::vector<T> part(static_cast<std::size_t>(rows * w.rows));
    for (index_t run = 0; run < model.split; ++run) {
        const index_t first = w.columns * run / model.split, end = w.columns * (run + 1) / model.split;
        if (first == end) continue; // fewer inputs than runs
        model.with(w, false, [&](const auto* weights) {
            product(serial_executor{}, product_nt(rows, w.rows, end - first, x + first, w.columns, weights + first,
                                                  w.columns, part.data(), w.rows));
        });
        if (accumulate)
            add_row(part.data(), rows * w.rows, y);
        else
            std::copy(part.begin(), part.end(), y);
        accumulate = true;
    }
}

// What goes through weights `w`, by the caller or by threads.
template <class T, class B>
void weighted(const tensor& w, const opd::product_operands<T, B>& o, opd::thread_team* threads) {
    if (threads != nullptr && static_cast<std::size_t>(w.size()) * sizeof(T) >= shared_bytes)
        return product(opd::team_executor{*threads}, o);
    product(serial_executor{}, o);
}

// f(i, worker) for each i < count: by threads, if there are any and `numbers` are many, else by the caller, who is
// `worker`.
template <class Function>
void share(opd::thread_team* threads, index_t count, index_t numbers, int worker, Function&& f) {
    if (threads != nullptr && numbers >= shared_numbers) return threads->run(count, f);
    for (index_t i = 0; i < count; ++i) f(i, worker);
}

// f(row) for each row of `numbers` numbers.
template <class Function>
void each_row(opd::thread_team* threads, index_t rows, index_t numbers, Function&& f) {
    constexpr index_t piece = 8;
    share(threads, (rows + piece - 1) / piece, rows * numbers, 0, [&](index_t i, int) {
        for (index_t r = i * piece; r < std::min(rows, (i + 1) * piece); ++r) f(r);
    });
}

// y (R,out) (+)= x (R,in) W^T
template <class T>
void linear(const transformer<T>& model, const tensor& w, const T* x, index_t rows, T* y, opd::thread_team* threads,
            bool accumulate = false) {
    if (model.split > 1) return linear_in_runs(model, w, x, rows, y, accumulate);
    model.with(w, !model.large, [&](const auto* weights) {
        const index_t in = w.columns, out = w.rows;
        weighted(w,
                 model.large ? product_nt(rows, out, in, x, in, weights, in, y, out, accumulate)
                             : product_nn(rows, out, in, x, in, weights, out, y, out, accumulate),
                 threads);
    });
}

// dx (R,in) = dy (R,out) W
template <class T>
void linear_backward(const transformer<T>& model, const tensor& w, const T* dy, index_t rows, T* dx,
                     opd::thread_team* threads) {
    model.with(w, false, [&](const auto* weights) {
        weighted(w, product_nn(rows, w.columns, w.rows, dy, w.rows, weights, w.columns, dx, w.columns), threads);
    });
}

} // namespace

// --- parameters ------------------------------------------------------------------------------------------------------

#ifndef TRAINER_NUMBERS // double in opd_trainer_double, for tests: this file again, for what depends on it
#define TRAINER_NUMBERS float
double rope::frequency(index_t i, index_t head_dim) const {
    const double plain = std::pow(base, -static_cast<double>(i) / static_cast<double>(head_dim / 2));
    if (how == scaling::none) return plain;
    if (how == scaling::linear) return plain / factor;
    const double turns = original_length * plain / (2 * 3.14159265358979324); // original_length / wavelength
    if (turns < low) return plain / factor;
    if (turns > high) return plain;
    const double s = (turns - low) / (high - low);
    return (1 - s) * plain / factor + s * plain;
}

model_layout::model_layout(const model_shape& s) {
    const auto place = [this](index_t rows, index_t columns) {
        const tensor t{size, rows, columns};
        size += round_up(t.size(), 16); // tensors start on a register's width
        return t;
    };
    const auto line = [&](index_t n) {
        tensor t = place(n, 1);
        t.vector = vectors;
        vectors += round_up(n, 16);
        return t;
    };
    embedding = place(s.vocabulary, s.width);
    for (int l = 0; l < s.layers; ++l) {
        layer_tensors t;
        t.norm1 = line(s.width);
        t.wqkv = place(s.qkv_width(), s.width);
        t.bqkv = line(s.attention_bias ? s.qkv_width() : 0);
        t.q_norm = line(s.qk_norm ? s.head_dim : 0);
        t.k_norm = line(s.qk_norm ? s.head_dim : 0);
        t.wo = place(s.width, s.q_width());
        t.bo = line(s.output_bias ? s.width : 0);
        t.norm2 = line(s.width);
        t.wgu = place(2 * index_t{s.ffn}, s.width);
        t.wdown = place(s.width, s.ffn);
        layers.push_back(t);
    }
    norm_f = line(s.width);
    head = s.tied ? embedding : place(s.vocabulary, s.width);
}

std::array<index_t, 3> tapped_layers(index_t layers) { return {(layers + 2) / 3, (2 * layers + 2) / 3, layers}; }

void stored_numbers::copy(index_t first, index_t count, float* to) const {
    if (floats)
        std::copy_n(floats + first, count, to);
    else
        each_lane<float>(count, [&](index_t i, auto load, auto store) { store(load(halves + first + i), to + i); });
}
#endif

template <class T>
transformer<T>::transformer(const model_shape& s, storage how)
    : shape(s), layout(s), weights(static_cast<std::size_t>(how == storage::bfloat16_by_itself ? 0 : layout.size)),
      stored(static_cast<std::size_t>(how == storage::numbers ? 0 : layout.size)),
      large(layout.size * index_t(sizeof(T)) > large_bytes) {
    if (!std::is_same_v<T, float> && how != storage::numbers)
        throw std::invalid_argument("transformer: storage in bfloat16 is for float");
    const index_t half = s.head_dim / 2;
    cosines_.resize(static_cast<std::size_t>(index_t{s.max_length} * half));
    sines_.resize(cosines_.size());
    std::vector<double> frequencies;
    for (index_t i = 0; i < half; ++i) frequencies.push_back(s.rope.frequency(i, s.head_dim));
    for (index_t position = 0; position < s.max_length; ++position)
        for (index_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(i)];
            cosines_[static_cast<std::size_t>(position * half + i)] = static_cast<T>(std::cos(angle));
            sines_[static_cast<std::size_t>(position * half + i)] = static_cast<T>(std::sin(angle));
        }
    const auto one = [this](const tensor& t) {
        if (!weights.empty()) std::fill_n(weights.data() + t.offset, t.size(), T(1));
        if (in_bfloat16()) std::fill_n(stored.data() + t.offset, t.size(), opd::bfloat16(1));
    };
    for (const auto& l : layout.layers)
        for (const tensor* t : {&l.norm1, &l.q_norm, &l.k_norm, &l.norm2}) one(*t);
    one(layout.norm_f);
    resize_copies();
}

template <class T>
void transformer<T>::initialise(std::uint64_t seed) {
    std::uint64_t number = 0;
    const auto fill = [&](const tensor& t, double deviation) {
        const opd::noise_row noise(seed, opd::noise_stream::mc, number++, 0);
        for (index_t i = 0; i < t.size(); ++i) { // Box-Muller
            const auto id = static_cast<std::uint32_t>(i);
            const double u = opd::uniform_of_bits(noise.bits(0, id)), v = opd::uniform_of_bits(noise.bits(1, id));
            weights[static_cast<std::size_t>(t.offset + i)] =
                static_cast<T>(deviation * std::sqrt(-2 * std::log(u)) * std::cos(2 * 3.14159265358979324 * v));
        }
    };
    const double in = 1 / std::sqrt(static_cast<double>(shape.width));
    const double residual = 1 / std::sqrt(2.0 * shape.layers);
    fill(layout.embedding, shape.tied ? in : 1);
    for (const auto& l : layout.layers) {
        fill(l.wqkv, in);
        fill(l.wo, residual / std::sqrt(static_cast<double>(shape.q_width())));
        fill(l.wgu, in);
        fill(l.wdown, residual / std::sqrt(static_cast<double>(shape.ffn)));
    }
    if (!shape.tied) fill(layout.head, in);
    weights_changed();
}

template <class T>
void transformer<T>::resize_copies() {
    const std::size_t n = large ? 0 : static_cast<std::size_t>(layout.size);
    transposed_.resize(in_bfloat16() ? 0 : n);
    transposed_stored_.resize(in_bfloat16() ? n : 0);
    vectors_.resize(in_bfloat16() ? static_cast<std::size_t>(layout.vectors) : 0);
}

template <class T>
void transformer<T>::weights_changed() {
    resize_copies();
    if constexpr (std::is_same_v<T, float>)
        if (in_bfloat16()) {
            if (!weights.empty()) round_to_bfloat16(weights.data(), layout.size, stored.data());
            const auto widen = [this](const tensor& t) {
                numbers().copy(t.offset, t.size(), vectors_.data() + t.vector);
            };
            for (const auto& l : layout.layers)
                for (const tensor* t : l.all())
                    if (t->vector >= 0) widen(*t);
            widen(layout.norm_f);
        }
    if (large) return;
    const auto transpose = [](const tensor& t, const auto* all, auto* turned) {
        const auto* from = all + t.offset;
        auto* to = turned + t.offset;
        for (index_t r = 0; r < t.rows; ++r)
            for (index_t c = 0; c < t.columns; ++c) to[c * t.rows + r] = from[r * t.columns + c];
    };
    const auto each = [&](const auto* from, auto* to) {
        for (const auto& l : layout.layers)
            for (const tensor* t : {&l.wqkv, &l.wo, &l.wgu, &l.wdown}) transpose(*t, from, to);
        transpose(layout.head, from, to);
    };
    in_bfloat16() ? each(stored.data(), transposed_stored_.data()) : each(weights.data(), transposed_.data());
}

template <class T>
void transformer<T>::embed(std::int32_t token, T* to) const {
    const index_t first = layout.embedding.offset + token * index_t{shape.width};
    if constexpr (std::is_same_v<T, float>)
        numbers().copy(first, shape.width, to);
    else
        std::copy_n(weights.data() + first, shape.width, to);
}

// --- memory ----------------------------------------------------------------------------------------------------------

// What was there is lost. A vector that grows by itself keeps it beside the new numbers, and takes up to twice as many.
template <class T>
static void grow(std::vector<T>& v, index_t size) {
    if (v.size() >= static_cast<std::size_t>(size)) return;
    v = {};
    v.resize(static_cast<std::size_t>(size));
}

template <class T>
void kv_cache<T>::resize(const model_shape& s, index_t slots, index_t length, index_t page, index_t pages) {
    layers_ = s.layers;
    kv_heads_ = s.kv_heads;
    head_dim_ = s.head_dim;
    capacity_ = round_up(length, 16);
    page_ = page > 0 ? page : capacity_;
    pages_ = page > 0 ? pages : slots;
    table_.assign(static_cast<std::size_t>(slots), {});
    free_.clear();
    if (page == 0)
        for (index_t i = 0; i < slots; ++i) table_[static_cast<std::size_t>(i)] = {i};
    else
        for (index_t i = pages - 1; i >= 0; --i) free_.push_back(i);
    grow(keys_, s.layers * pages_ * s.kv_width() * page_);
    grow(values_, s.layers * pages_ * s.kv_width() * page_);
}

template <class T>
bool kv_cache<T>::take(index_t slot) {
    if (free_.empty()) return false;
    table_[static_cast<std::size_t>(slot)].push_back(free_.back());
    free_.pop_back();
    return true;
}

template <class T>
void kv_cache<T>::release(index_t slot) {
    std::vector<index_t>& mine = table_[static_cast<std::size_t>(slot)];
    free_.insert(free_.end(), mine.rbegin(), mine.rend());
    mine.clear();
}

template <class T>
void kv_cache<T>::move(index_t slot, index_t from, index_t to) {
    const index_t kv_width = kv_heads_ * head_dim_;
    for (index_t layer = 0; layer < layers_; ++layer) {
        const T* k = keys(layer, slot, 0, from / page_) + from % page_; // the kv heads follow each other
        T* moved_k = keys(layer, slot, 0, to / page_) + to % page_;
        for (index_t i = 0; i < kv_width; ++i) moved_k[i * page_] = k[i * page_];
        std::copy_n(values(layer, slot, from / page_) + from % page_ * kv_width, kv_width,
                    values(layer, slot, to / page_) + to % page_ * kv_width);
    }
}

template <class T>
void layer_rows<T>::resize(const model_shape& s, index_t rows) {
    grow(inv1, rows);
    grow(n1, rows * s.width);
    grow(qkv, rows * s.qkv_width());
    grow(invqk, rows * (s.heads + s.kv_heads));
    grow(qk, rows * (s.q_width() + s.kv_width()));
    grow(peak, rows * s.heads);
    grow(scale, rows * s.heads);
    grow(att, rows * s.q_width());
    grow(x2, rows * s.width);
    grow(inv2, rows);
    grow(n2, rows * s.width);
    grow(gu, rows * 2 * s.ffn);
    grow(h, rows * s.ffn);
}

template <class T>
void forward_state<T>::resize(const model_shape& s, index_t rows, index_t capacity, bool keep) {
    layers.resize(keep ? static_cast<std::size_t>(s.layers) : 1);
    const bool shares = keep && checkpointed;
    for (auto& l : layers) {
        grow(l.x, rows * s.width);
        if (!shares) l.resize(s, rows);
    }
    if (shares) shared.resize(s, rows);
    grow(x, rows * s.width);
    grow(inv, rows);
    grow(n, rows * s.width);
    grow(scores, (threads != nullptr ? threads->size() : 1) * std::max<index_t>(query_tile, s.heads) * capacity);
}

// --- forward ---------------------------------------------------------------------------------------------------------

namespace {

// What the queries of a tile see, whose rows have consecutive columns: row r all columns up to its own, or, in a tree,
// those before `trunk` and the ones on its path.
struct sight {
    index_t first_valid = 0, valid_step = 0; // columns up to a row's own: first_valid + r * valid_step
    index_t trunk = 0;
    const index_t* paths = nullptr; // all of the pass
    const index_t* ends = nullptr;  // of the rows; the one before the first is there, too. Null: no trees
    bool apart = false;

    std::span<const index_t> path(index_t r) const {
        return ends ? std::span(paths + ends[r - 1], paths + ends[r]) : std::span<const index_t>();
    }
};

// out[r] = softmax(q[r] k^T) v for `rows` queries of one kv head.
// Rows of a tile see `padded` columns, those that are not theirs with weight 0: a multiply-add of an exact zero changes
// nothing but the sign of a zero, which the last addition removes. A draft may be one that nobody would draw, whose
// values are not finite: then each row sums (`apart`) what it sees and nothing else. A path's scores are brought
// together for the softmax, which sums by position, and back to their columns, which ascend along a path, for the sum
// of values.
template <class T>
void attend(const T* q, index_t q_stride, index_t rows, const sight& seen, kv_cache<T>& cache, index_t layer,
            index_t slot, index_t kv, index_t kv_width, index_t head_dim, T* scores, T* peak, T* scale,
            index_t statistics_stride, T* out, index_t out_stride) {
    using Num = number<T>;
    const index_t padded = seen.first_valid + (rows - 1) * seen.valid_step;
    const T factor = T(1) / std::sqrt(static_cast<T>(head_dim));
    const index_t capacity = cache.capacity(), page = cache.page();
    for (index_t from = 0; from < padded; from += page) // (rows,padded)
        product(serial_executor{}, product_nn(rows, std::min(page, padded - from), head_dim, q, q_stride,
                                              cache.keys(layer, slot, kv, from / page), page, scores + from, capacity));
    for (index_t r = 0; r < rows; ++r) {
        T* row = scores + r * capacity;
        const std::span<const index_t> path = seen.path(r);
        const auto length = static_cast<index_t>(path.size());
        for (index_t i = 0; i < length; ++i) row[seen.trunk + i] = row[path[static_cast<std::size_t>(i)]];
        softmax_scores(row, length > 0 ? seen.trunk + length : seen.first_valid + r * seen.valid_step, padded, factor,
                       peak[r * statistics_stride], scale[r * statistics_stride]);
        for (index_t i = length - 1; i >= 0; --i)
            row[path[static_cast<std::size_t>(i)]] = std::exchange(row[seen.trunk + i], T(0));
    }
    const auto sum = [&](index_t first, index_t count, index_t from, index_t columns, bool more) { // (count,head_dim)
        for (const index_t end = from + columns; from < end; more = true) { // the chain goes on from page to page
            const index_t n = std::min(end, (from / page + 1) * page) - from;
            product(serial_executor{},
                    product_nn(count, head_dim, n, scores + first * capacity + from, capacity,
                               cache.values(layer, slot, from / page) + from % page * kv_width + kv * head_dim,
                               kv_width, out + first * out_stride, out_stride, more));
            from += n;
        }
    };
    if (!seen.apart) {
        sum(0, rows, 0, padded, false);
    } else {
        for (index_t r = 0; r < rows; ++r) {
            const std::span<const index_t> path = seen.path(r);
            sum(r, 1, 0, path.empty() ? seen.first_valid + r * seen.valid_step : seen.trunk, false);
            for (const index_t column : path) sum(r, 1, column, 1, true);
        }
    }
    for (index_t r = 0; r < rows; ++r) {
        const Num inverse(scale[r * statistics_stride]);
        T* o = out + r * out_stride;
        each_lane<T>(head_dim, [&](index_t i, auto load, auto store) { store(load(o + i) * inverse + Num(0), o + i); });
    }
}

// As attend() with the heads of one row, which sees the columns before `trunk` and then those of `path`: in a cache of
// one page. Its sums are those of a row that finds all of these in order.
template <class T>
void attend_along(const T* q, index_t heads, index_t trunk, std::span<const index_t> path, kv_cache<T>& cache,
                  index_t layer, index_t slot, index_t kv, index_t kv_width, index_t head_dim, T* scores, T* peak,
                  T* scale, T* out) {
    using Num = number<T>;
    const index_t stride = cache.capacity(), seen = trunk + std::ssize(path);
    const T* keys = cache.keys(layer, slot, kv);
    const T* values = cache.values(layer, slot) + kv * head_dim;
    const auto score = [&](index_t columns, index_t from, T* to) {
        product(serial_executor{}, product_nn(heads, columns, head_dim, q, head_dim, keys + from, stride, to, stride));
    };
    score(trunk, 0, scores);
    for (index_t i = trunk; i < seen; ++i) score(1, path[static_cast<std::size_t>(i - trunk)], scores + i);
    for (index_t h = 0; h < heads; ++h)
        softmax_scores(scores + h * stride, seen, seen, T(1) / std::sqrt(static_cast<T>(head_dim)), peak[h], scale[h]);
    const auto sum = [&](index_t columns, index_t at, index_t from) {
        product(serial_executor{}, product_nn(heads, head_dim, columns, scores + at, stride, values + from * kv_width,
                                              kv_width, out, head_dim, at > 0));
    };
    sum(trunk, 0, 0);
    for (index_t i = trunk; i < seen; ++i) sum(1, i, path[static_cast<std::size_t>(i - trunk)]);
    for (index_t h = 0; h < heads; ++h)
        each_lane<T>(head_dim, [&](index_t i, auto load, auto store) {
            store(load(out + h * head_dim + i) * Num(scale[h]) + Num(0), out + h * head_dim + i);
        });
}

template <class T>
void attend_segment(const model_shape& s, const segment& g, index_t row, index_t layer, index_t kv, kv_cache<T>& cache,
                    layer_rows<T>& l, const forward_state<T>& state, T* scores) {
    const index_t group = s.heads / s.kv_heads, stride = s.q_width() + s.kv_width();
    const index_t rows = g.rows(), *ends = state.path_ends.data() + 1; // row -1 has an end as well
    const index_t head = kv * group;
    if (g.step > 0) {
        for (index_t r = row; r < row + rows; ++r) {
            const index_t trunk = g.start + r - row - g.step + 1;
            attend_along(l.qk.data() + r * stride + head * s.head_dim, group, trunk,
                         std::span(state.paths.data() + ends[r - 1], state.paths.data() + ends[r]), cache, layer,
                         g.slot, kv, s.kv_width(), s.head_dim, scores, l.peak.data() + r * s.heads + head,
                         l.scale.data() + r * s.heads + head, l.att.data() + r * s.q_width() + head * s.head_dim);
        }
        return;
    }
    if (rows == 1 && ends[row - 1] == ends[row]) // the heads that share these keys are the rows
        return attend(l.qk.data() + row * stride + head * s.head_dim, index_t{s.head_dim}, group,
                      sight{g.start + g.known + 1}, cache, layer, g.slot, kv, s.kv_width(), s.head_dim, scores,
                      l.peak.data() + row * s.heads + head, l.scale.data() + row * s.heads + head, 1,
                      l.att.data() + row * s.q_width() + head * s.head_dim, s.head_dim);
    for (index_t h = head; h < head + group; ++h)
        for (index_t i = 0; i < rows; i += query_tile) {
            const index_t r = row + i;
            const sight seen{g.start + g.known + i + 1,
                             1,
                             g.start + g.count,
                             state.paths.data(),
                             g.parents.empty() ? nullptr : ends + r,
                             state.apart && !g.parents.empty()};
            attend(l.qk.data() + r * stride + h * s.head_dim, stride, std::min(query_tile, rows - i), seen, cache,
                   layer, g.slot, kv, s.kv_width(), s.head_dim, scores, l.peak.data() + r * s.heads + h,
                   l.scale.data() + r * s.heads + h, s.heads, l.att.data() + r * s.q_width() + h * s.head_dim,
                   s.q_width());
        }
}

template <class T>
bool all_finite(const T* x, index_t n) {
    using Num = number<T>;
    Num s(0); // of zeros, or NaN
    each_lane<T>(n, [&](index_t i, auto load, auto) { s = fma(load(x + i), Num(0), s); });
    return sum(s) == T(0);
}

// Where the rows are in their sequences, and which columns those of trees see.
template <class T>
void place_rows(std::span<const segment> segments, forward_state<T>& state) {
    state.firsts.clear();
    state.positions.clear();
    state.paths.clear();
    state.path_ends.assign(1, 0);
    std::vector<index_t>&paths = state.paths, &ends = state.path_ends;
    for (const segment& g : segments) {
        state.firsts.push_back(std::ssize(state.positions));
        for (index_t i = 0; i < g.count; ++i) {
            const index_t trunk = g.start + i - g.step; // last position of step 0 that it sees
            state.positions.push_back(g.start + i);
            for (index_t step = 1; step <= g.step; ++step) paths.push_back(step * g.stride + trunk + step);
            ends.push_back(static_cast<index_t>(paths.size()));
        }
        const index_t trunk = g.start + g.count, nodes = std::ssize(g.parents);
        bool chain = true; // whose columns are its positions
        for (index_t n = 0; n < nodes; ++n) chain = chain && g.parents[static_cast<std::size_t>(n)] == n - 1;
        for (index_t n = g.known; n < nodes; ++n) {
            const auto before = static_cast<std::ptrdiff_t>(paths.size());
            for (index_t m = n; m >= 0 && !chain; m = g.parents[static_cast<std::size_t>(m)])
                paths.push_back(trunk + m);
            std::reverse(paths.begin() + before, paths.end());
            state.positions.push_back(chain ? trunk + n : trunk - 1 + std::ssize(paths) - before);
            ends.push_back(static_cast<index_t>(paths.size()));
        }
    }
}

// One layer, from x (R,D): to l and, if that is not null, to `next` (R,D). In the cache it is layer `cached`.
template <class T>
void forward_layer(const transformer<T>& model, index_t layer, std::span<const segment> segments, index_t rows,
                   kv_cache<T>& cache, index_t cached, const T* x, layer_rows<T>& l, T* next, forward_state<T>& state) {
    const model_shape& s = model.shape;
    const index_t d = s.width, f = s.ffn, qk_width = s.q_width() + s.kv_width(), qk_heads = s.heads + s.kv_heads;
    const index_t page = cache.page();
    opd::thread_team* const threads = state.threads;
    const layer_tensors& w = model.layout.layers[static_cast<std::size_t>(layer)];
    index_t seen = 0; // columns, by all rows
    for (const segment& g : segments) seen += g.rows() * (g.start + g.rows());

    // queries, keys and values; the keys and values of all rows are in the cache before any row attends
    each_row(threads, rows, d, [&](index_t r) {
        l.inv1[static_cast<std::size_t>(r)] =
            rms_norm(x + r * d, model.vector_at(w.norm1), d, s.norm_epsilon, l.n1.data() + r * d);
    });
    linear(model, w.wqkv, l.n1.data(), rows, l.qkv.data(), threads);
    std::atomic<bool> apart = false;
    const auto of_segment = [&](std::size_t n) { return std::pair(segments[n], state.firsts[n]); };
    share(threads, std::ssize(segments), rows * s.qkv_width(), 0, [&](index_t n, int) {
        const auto [g, first] = of_segment(static_cast<std::size_t>(n));
        for (index_t i = 0; i < g.rows(); ++i) {
            const index_t row = first + i, column = g.step * g.stride + g.start + g.known + i,
                          position = state.positions[static_cast<std::size_t>(row)];
            if (s.attention_bias) add_row(model.vector_at(w.bqkv), s.qkv_width(), l.qkv.data() + row * s.qkv_width());
            const T* raw = l.qkv.data() + row * s.qkv_width();
            T* qk = l.qk.data() + row * qk_width;
            for (index_t h = 0; h < qk_heads; ++h) {
                if (s.qk_norm)
                    l.invqk[static_cast<std::size_t>(row * qk_heads + h)] =
                        rms_norm(raw + h * s.head_dim, model.vector_at(h < s.heads ? w.q_norm : w.k_norm), s.head_dim,
                                 s.norm_epsilon, qk + h * s.head_dim);
                else
                    std::copy_n(raw + h * s.head_dim, s.head_dim, qk + h * s.head_dim);
                rotate(qk + h * s.head_dim, model.cosines(position), model.sines(position), T(1), s.head_dim / 2);
            }
            for (index_t kv = 0; kv < s.kv_heads; ++kv) {
                T* keys = cache.keys(cached, g.slot, kv, column / page) + column % page;
                for (index_t i_dim = 0; i_dim < s.head_dim; ++i_dim)
                    keys[i_dim * page] = qk[s.q_width() + kv * s.head_dim + i_dim];
            }
            std::copy_n(raw + qk_width, s.kv_width(),
                        cache.values(cached, g.slot, column / page) + column % page * s.kv_width());
            // what is known may be anything
            if (g.known > 0 || (i >= g.count && !all_finite(raw + qk_width, s.kv_width()))) apart = true;
        }
    });
    state.apart = apart;
    share(threads, std::ssize(segments) * s.kv_heads, s.q_width() * seen, 0, [&](index_t i, int worker) {
        const auto [g, first] = of_segment(static_cast<std::size_t>(i / s.kv_heads));
        attend_segment(s, g, first, cached, i % s.kv_heads, cache, l, state,
                       state.scores.data() + worker * std::max<index_t>(query_tile, s.heads) * cache.capacity());
    });

    // the rest of the layer is local to a row: of a small model tile by tile, so that it stays in the cache
    const index_t tile = model.large ? std::max<index_t>(1, rows) : row_tile;
    for (index_t r0 = 0; r0 < rows; r0 += tile) {
        const index_t n = std::min(tile, rows - r0);
        std::copy_n(x + r0 * d, n * d, l.x2.data() + r0 * d);
        linear(model, w.wo, l.att.data() + r0 * s.q_width(), n, l.x2.data() + r0 * d, threads, true);
        each_row(threads, n, d, [&](index_t i) {
            const index_t r = r0 + i;
            if (s.output_bias) add_row(model.vector_at(w.bo), d, l.x2.data() + r * d);
            l.inv2[static_cast<std::size_t>(r)] =
                rms_norm(l.x2.data() + r * d, model.vector_at(w.norm2), d, s.norm_epsilon, l.n2.data() + r * d);
        });
        linear(model, w.wgu, l.n2.data() + r0 * d, n, l.gu.data() + r0 * 2 * f, threads);
        each_row(threads, n, 2 * f, [&](index_t i) {
            const index_t r = r0 + i;
            swiglu(l.gu.data() + r * 2 * f, l.gu.data() + r * 2 * f + f, f, l.h.data() + r * f);
        });
        if (next == nullptr) continue;
        std::copy_n(l.x2.data() + r0 * d, n * d, next + r0 * d);
        linear(model, w.wdown, l.h.data() + r0 * f, n, next + r0 * d, threads, true);
    }
}

} // namespace

template <class T>
void forward_layers(const transformer<T>& model, std::span<const segment> segments, index_t rows, kv_cache<T>& cache,
                    forward_state<T>& state, bool keep) {
    const model_shape& s = model.shape;
    const index_t d = s.width;
    const auto taps = tapped_layers(s.layers);
    if (state.tapped) grow(state.taps, rows * 3 * d);
    place_rows(segments, state);
    const auto input = [&](index_t i) { return state.layers[keep ? static_cast<std::size_t>(i) : 0].x.data(); };
    for (index_t layer = 0; layer < s.layers; ++layer) {
        T* const next = layer + 1 < s.layers ? input(layer + 1) : state.x.data();
        forward_layer<T>(model, layer, segments, rows, cache, keep ? state.cached_as(layer) : layer, input(layer),
                         keep ? state.rows_of(layer) : state.layers[0], next, state);
        for (index_t tap = 0; state.tapped && tap < std::ssize(taps); ++tap)
            for (index_t r = 0; r < rows && taps[static_cast<std::size_t>(tap)] == layer + 1; ++r) {
                const T* x = next + r * d;
                T* to = state.taps.data() + (r * 3 + tap) * d;
                const number<T> inv(T(1) /
                                    std::sqrt(dot(x, x, d) / static_cast<T>(d) + static_cast<T>(s.norm_epsilon)));
                each_lane<T>(d, [&](index_t i, auto load, auto store) { store(load(x + i) * inv, to + i); });
            }
    }
}

namespace {

template <class T>
void final_norm(const transformer<T>& model, forward_state<T>& state, index_t rows) {
    const index_t d = model.shape.width;
    for (index_t r = 0; r < rows; ++r)
        state.inv[static_cast<std::size_t>(r)] = rms_norm(state.x.data() + r * d, model.vector_at(model.layout.norm_f),
                                                          d, model.shape.norm_epsilon, state.n.data() + r * d);
}

} // namespace

template <class T>
void head_logits(const transformer<T>& model, const T* n, index_t rows, T* logits, opd::thread_team* threads) {
    linear(model, model.layout.head, n, rows, logits, threads);
}

template <class T>
void forward_head(const transformer<T>& model, forward_state<T>& state, index_t rows, T* logits) {
    final_norm(model, state, rows);
    head_logits(model, state.n.data(), rows, logits, state.threads);
}

template <class T>
void forward_states(const transformer<T>& model, std::span<const segment> segments,
                    std::span<const std::int32_t> tokens, kv_cache<T>& cache, forward_state<T>& state, bool keep) {
    const auto rows = static_cast<index_t>(tokens.size());
    const index_t d = model.shape.width;
    state.resize(model.shape, rows, cache.capacity(), keep);
    for (index_t r = 0; r < rows; ++r)
        model.embed(tokens[static_cast<std::size_t>(r)], state.layers[0].x.data() + r * d);
    forward_layers(model, segments, rows, cache, state, keep);
    final_norm(model, state, rows);
}

template <class T>
void forward_rows(const transformer<T>& model, std::span<const segment> segments, std::span<const std::int32_t> tokens,
                  kv_cache<T>& cache, forward_state<T>& state, bool keep, T* logits) {
    forward_states(model, segments, tokens, cache, state, keep);
    head_logits(model, state.n.data(), static_cast<index_t>(tokens.size()), logits, state.threads);
}

// --- backward --------------------------------------------------------------------------------------------------------

template <class T>
void backward_head(const transformer<T>& model, const T* x, const T* inv, const T* d_logits, const T* d_n, index_t rows,
                   T* dn, T* dx, T* norm_f, opd::thread_team* threads) {
    const index_t d = model.shape.width;
    if (d_logits)
        linear_backward(model, model.layout.head, d_logits, rows, dn, threads);
    else
        std::copy_n(d_n, rows * d, dn);
    if (d_logits && d_n) add_row(d_n, rows * d, dn);
    for (index_t r = 0; r < rows; ++r)
        rms_norm_backward(dn + r * d, x + r * d, model.vector_at(model.layout.norm_f), inv[r], d,
                          static_cast<const T*>(nullptr), dx + r * d, norm_f);
}

namespace {

// Gradients of one kv head's queries, keys and values. P is recomputed from the saved peak and scale.
template <class T>
struct attention_backward {
    const model_shape& s;
    sequence_pass<T>& pass;
    index_t layer;

    // d_att (R,Q) -> d_qk (R,Q+KV) before the rotation is undone, d_v into the last KV columns of d_qkv (R,Q+2KV); of
    // the sequence in `slot`, whose rows are from `first` on
    void run(index_t slot, index_t first, index_t rows, index_t kv, const T* d_att, T* d_qk, T* d_qkv,
             std::vector<T>& scratch) const {
        using Num = number<T>;
        const index_t stride = round_up(rows, 16) + 16, group = s.heads / s.kv_heads;
        const index_t hd = s.head_dim, q_width = s.q_width(), qk_width = q_width + s.kv_width(), qkv = s.qkv_width();
        const layer_rows<T>& l = pass.forward.rows_of(layer);
        const T *const all_q = l.qk.data() + first * qk_width, *const att = l.att.data() + first * q_width;
        d_att += first * q_width, d_qk += first * qk_width, d_qkv += first * qkv;
        grow(scratch, 2 * rows * stride + hd * stride);
        T* p = scratch.data();      // (R,stride) probabilities
        T* ds = p + rows * stride;  // (R,stride) gradient of the scores
        T* vt = ds + rows * stride; // (head_dim,stride) values, transposed
        const T factor = T(1) / std::sqrt(static_cast<T>(hd));
        const Num lane = lane_numbers<T>();
        const index_t cached = pass.forward.cached_as(layer);
        const T* keys = pass.cache.keys(cached, slot, kv);
        const T* values = pass.cache.values(cached, slot) + kv * hd;
        for (index_t r = 0; r < rows; ++r)
            for (index_t i = 0; i < hd; ++i) vt[i * stride + r] = values[r * s.kv_width() + i];
        for (index_t head = kv * group; head < (kv + 1) * group; ++head) {
            const T* q = all_q + head * hd;
            const T* d_out = d_att + head * hd;
            for (index_t i = 0; i < rows; i += query_tile) {
                const index_t n = std::min(query_tile, rows - i), seen = i + n;
                product(serial_executor{}, product_nn(n, seen, hd, q + i * qk_width, qk_width, keys,
                                                      pass.cache.capacity(), p + i * stride, stride));
                product(serial_executor{},
                        product_nn(n, seen, hd, d_out + i * q_width, q_width, vt, stride, ds + i * stride, stride));
                for (index_t r = i; r < seen; ++r) {
                    const auto at = static_cast<std::size_t>((first + r) * s.heads + head);
                    const T mean = dot(d_out + r * q_width, att + r * q_width + head * hd, hd);
                    const Num peak(l.peak[at]), scale(l.scale[at]);
                    each_lane<T>(seen, [&](index_t j, auto load, auto store) {
                        const auto valid = lane < Num(static_cast<double>(r + 1 - j));
                        T* pr = p + r * stride + j;
                        T* dr = ds + r * stride + j;
                        const Num prob = select(valid, exp(load(pr) * Num(factor) - peak) * scale, Num(0));
                        store(prob, pr);
                        store(prob * (load(dr) - Num(mean)) * Num(factor), dr);
                    });
                }
                product(serial_executor{}, product_nn(n, hd, seen, ds + i * stride, stride, all_q + q_width + kv * hd,
                                                      qk_width, d_qk + i * qk_width + head * hd, qk_width));
            }
            // keys and values are seen by every later query, and by every head of the group
            const bool more = head > kv * group;
            for (index_t j = 0; j < rows; j += query_tile) {
                const index_t n = std::min(query_tile, rows - j), below = rows - j;
                product(serial_executor{},
                        opd::product_tn(n, hd, below, ds + j * stride + j, stride, q + j * qk_width, qk_width,
                                        d_qk + j * qk_width + q_width + kv * hd, qk_width, more));
                product(serial_executor{},
                        opd::product_tn(n, hd, below, p + j * stride + j, stride, d_out + j * q_width, q_width,
                                        d_qkv + j * qkv + qk_width + kv * hd, qkv, more));
            }
        }
    }

    // The same of a later step of a training-time test: row by row, since each sees other columns. `steps` are the
    // passes of the sequence up to this one; what is due to keys and values of those before is added to their `seen`.
    void run_ahead(std::span<sequence_pass<T>* const> steps, const T* d_att, T* d_qk, T* d_qkv) const {
        const index_t rows = pass.rows(), group = s.heads / s.kv_heads, hd = s.head_dim, own = pass.start;
        const index_t q_width = s.q_width(), kv_width = s.kv_width(), qk_width = q_width + kv_width,
                      qkv = s.qkv_width();
        const layer_rows<T>& l = pass.forward.layers[static_cast<std::size_t>(layer)];
        const T factor = T(1) / std::sqrt(static_cast<T>(hd));
        const auto add = [hd](T a, const T* x, T* y) {
            using Num = number<T>;
            each_lane<T>(
                hd, [&](index_t i, auto load, auto store) { store(fma(Num(a), load(x + i), load(y + i)), y + i); });
        };
        std::fill_n(d_qk, rows * qk_width, T(0));
        for (index_t r = 0; r < rows; ++r) std::fill_n(d_qkv + r * qkv + qk_width, kv_width, T(0));
        for (index_t r = 0; r < rows; ++r)
            for (index_t head = 0; head < s.heads; ++head) {
                const index_t kv = head / group, trunk = r; // last position of step 0 that it sees
                const T* q = l.qk.data() + r * qk_width + head * hd;
                const T* d_out = d_att + r * q_width + head * hd;
                const auto at = static_cast<std::size_t>(r * s.heads + head);
                const T mean = dot(d_out, l.att.data() + r * q_width + head * hd, hd);
                for (index_t column = 0; column <= trunk + own; ++column) {
                    const index_t step = std::max<index_t>(0, column - trunk), row = column - step;
                    sequence_pass<T>& from = *steps[static_cast<std::size_t>(step)];
                    const layer_rows<T>& its = from.forward.layers[static_cast<std::size_t>(layer)];
                    const T* key = its.qk.data() + row * qk_width + q_width + kv * hd;
                    const T* value = its.qkv.data() + row * qkv + qk_width + kv * hd;
                    const T prob = std::exp(dot(q, key, hd) * factor - l.peak[at]) * l.scale[at];
                    const T score = prob * (dot(d_out, value, hd) - mean) * factor;
                    T* seen = from.layers[static_cast<std::size_t>(layer)].seen.data() + row * 2 * kv_width + kv * hd;
                    T* d_key = step == own ? d_qk + row * qk_width + q_width + kv * hd : seen;
                    T* d_value = step == own ? d_qkv + row * qkv + qk_width + kv * hd : seen + kv_width;
                    add(score, key, d_qk + r * qk_width + head * hd);
                    add(score, q, d_key);
                    add(prob, d_out, d_value);
                }
            }
    }
};

// Where the gradient of h Wdown^T lies, once that of the next layer is done.
template <class T>
T* of_output(sequence_pass<T>& pass, int layer) {
    forward_state<T>& f = pass.forward;
    const auto next = static_cast<std::size_t>(layer + 1);
    return next < f.layers.size() ? f.layers[next].x.data() : f.x.data();
}

// What has no product of its own for its gradient.
std::array<const tensor*, 6> rest(const layer_tensors& w) {
    return {&w.norm1, &w.bqkv, &w.q_norm, &w.k_norm, &w.bo, &w.norm2};
}
index_t rest_of(const layer_tensors& w) {
    index_t r = 0;
    for (const tensor* t : rest(w)) r += t->size();
    return r;
}

// f(n, first, end) for each of the pass's sequences, by its number, and those of its rows that lie in [from, to): in
// order, so that sums over a sequence's rows have theirs.
template <class T, class Function>
void each_sequence(const sequence_pass<T>& pass, index_t from, index_t to, index_t numbers, Function&& f) {
    share(pass.forward.threads, std::ssize(pass.sequences), (to - from) * numbers, 0, [&](index_t n, int) {
        const index_t first = pass.first(n), end = first + pass.sequences[static_cast<std::size_t>(n)].rows();
        f(n, std::max(from, first), std::min(to, end));
    });
}

// Scratch of a pass on its way back: two of each thread, of which this one is `thread`.
template <class T>
struct back_scratch {
    std::span<std::vector<T>> all;
    int thread;
    T *dn, *dh, *d_att, *d_qk; // (R,D) of a norm's output, (R,F), (R,Q), (R,Q+KV)

    back_scratch(const model_shape& s, index_t rows, std::span<std::vector<T>> of_threads, int worker)
        : all(of_threads), thread(worker) {
        std::vector<T>& mine = all[static_cast<std::size_t>(2 * thread)];
        grow(mine, rows * (s.width + s.ffn + 2 * s.q_width() + s.kv_width()));
        dn = mine.data();
        dh = dn + rows * s.width;
        d_att = dh + rows * s.ffn;
        d_qk = d_att + rows * s.q_width();
    }
    std::vector<T>& of_attention(int worker) const { return all[static_cast<std::size_t>(2 * worker + 1)]; }
};

// To pass.d_x0, the gradient of what leaves the last layer (R,D): it is d_last, or comes from the gradient of the
// logits (R,V) or of what the head reads (R,D). The other two are null.
template <class T>
void backward_top(const transformer<T>& model, sequence_pass<T>& pass, const T* d_logits, const T* d_n, const T* d_last,
                  const back_scratch<T>& scratch) {
    const index_t rows = pass.rows(), d = model.shape.width, count = std::ssize(pass.sequences);
    grow(pass.d_x0, rows * d);
    pass.layers.resize(static_cast<std::size_t>(model.shape.layers));
    T *const dx = pass.d_x0.data(), *const dn = scratch.dn;
    if (d_last) {
        std::copy_n(d_last, rows * d, dx);
        return;
    }
    pass.norm_f.assign(static_cast<std::size_t>(count * d), T(0));
    if (d_logits) linear_backward(model, model.layout.head, d_logits, rows, dn, pass.forward.threads);
    each_sequence(pass, 0, rows, d, [&](index_t n, index_t from, index_t to) {
        backward_head(model, pass.forward.x.data() + from * d, pass.forward.inv.data() + from,
                      static_cast<const T*>(nullptr), (d_logits ? dn : d_n) + from * d, to - from, dn + from * d,
                      dx + from * d, pass.norm_f.data() + n * d);
    });
}

// pass.d_x0 goes from the gradient of what leaves the layer to that of what enters it. What the gradients of the
// layer's weights read is then there. The pass is the last of `steps`, which are one but in a training-time test.
template <class T>
void backward_layer(const transformer<T>& model, std::span<sequence_pass<T>* const> steps, index_t layer,
                    const back_scratch<T>& scratch) {
    sequence_pass<T>& pass = *steps.back();
    opd::thread_team* const threads = pass.forward.threads;
    const model_shape& s = model.shape;
    const index_t rows = pass.rows(), d = s.width, f = s.ffn, hd = s.head_dim, count = std::ssize(pass.sequences);
    const index_t q_width = s.q_width(), qk_width = q_width + s.kv_width(), qkv = s.qkv_width();
    T *const dx = pass.d_x0.data(), *const dn = scratch.dn, *const dh = scratch.dh, *const d_att = scratch.d_att,
             *const d_qk = scratch.d_qk;
    const layer_tensors& w = model.layout.layers[static_cast<std::size_t>(layer)];
    const T* const x = pass.forward.layers[static_cast<std::size_t>(layer)].x.data();
    layer_rows<T>& l = pass.forward.rows_of(layer);
    if (pass.forward.checkpointed && layer + 1 < s.layers) // the last one's activations are those of the forward pass
        forward_layer<T>(model, layer, pass.sequences, rows, pass.cache, pass.forward.cached_as(layer), x, l, nullptr,
                         pass.forward);
    layer_gradients<T>& g = pass.layers[static_cast<std::size_t>(layer)];
    std::vector<T>& d_qkv = pass.d_qkv(layer);
    grow(d_qkv, rows * qkv);
    const index_t rest_size = rest_of(w);
    g.rest.assign(static_cast<std::size_t>(count * rest_size), T(0));
    const auto sums_of = [&](index_t n) { // of a sequence: its rest
        struct {
            T *norm1, *bqkv, *q_norm, *k_norm, *bo, *norm2;
        } r;
        r.norm1 = g.rest.data() + n * rest_size;
        r.bqkv = r.norm1 + w.norm1.size();
        r.q_norm = r.bqkv + w.bqkv.size();
        r.k_norm = r.q_norm + w.q_norm.size();
        r.bo = r.k_norm + w.k_norm.size();
        r.norm2 = r.bo + w.bo.size();
        return r;
    };

    // x = x2 + silu(gate) up Wdown^T
    std::copy_n(dx, rows * d, of_output(pass, static_cast<int>(layer)));
    const index_t tile = model.large ? std::max<index_t>(1, rows) : row_tile;
    for (index_t r0 = 0; r0 < rows; r0 += tile) {
        const index_t n = std::min(tile, rows - r0);
        linear_backward(model, w.wdown, dx + r0 * d, n, dh + r0 * f, threads);
        each_row(threads, n, 2 * f, [&](index_t i) {
            const index_t r = r0 + i;
            T* gate = l.gu.data() + r * 2 * f;
            swiglu_backward(dh + r * f, gate, gate + f, f, gate, gate + f);
        });
        linear_backward(model, w.wgu, l.gu.data() + r0 * 2 * f, n, dn + r0 * d, threads);
        each_sequence(pass, r0, r0 + n, d, [&](index_t i, index_t from, index_t to) {
            for (index_t r = from; r < to; ++r)
                rms_norm_backward(dn + r * d, l.x2.data() + r * d, model.vector_at(w.norm2),
                                  l.inv2[static_cast<std::size_t>(r)], d, dx + r * d, dx + r * d, sums_of(i).norm2);
        });
        // x2 = x + att Wo^T
        linear_backward(model, w.wo, dx + r0 * d, n, d_att + r0 * q_width, threads);
    }
    std::copy_n(dx, rows * d, l.x2.data());

    const attention_backward<T> attention{s, pass, layer};
    if (pass.start > 0)
        attention.run_ahead(steps, d_att, d_qk, d_qkv.data());
    else
        share(threads, count * s.kv_heads, shared_numbers, scratch.thread, [&](index_t i, int worker) {
            const segment& its = pass.sequences[static_cast<std::size_t>(i / s.kv_heads)];
            attention.run(its.slot, pass.first(i / s.kv_heads), its.rows(), i % s.kv_heads, d_att, d_qk, d_qkv.data(),
                          scratch.of_attention(worker));
        });
    each_sequence(pass, 0, rows, qkv, [&](index_t n, index_t from, index_t to) {
        const auto sums = sums_of(n);
        for (index_t r = from; r < to; ++r) {
            if (!g.seen.empty()) {
                const T* seen = g.seen.data() + r * 2 * s.kv_width();
                add_row(seen, s.kv_width(), d_qk + r * qk_width + q_width);
                add_row(seen + s.kv_width(), s.kv_width(), d_qkv.data() + r * qkv + qk_width);
            }
            const index_t position = pass.start + r - from;
            for (index_t h = 0; h < s.heads + s.kv_heads; ++h) {
                T* dy = d_qk + r * qk_width + h * hd;
                rotate(dy, model.cosines(position), model.sines(position), T(-1), hd / 2);
                if (!s.qk_norm) {
                    std::copy_n(dy, hd, d_qkv.data() + r * qkv + h * hd);
                    continue;
                }
                rms_norm_backward(dy, l.qkv.data() + r * qkv + h * hd,
                                  model.vector_at(h < s.heads ? w.q_norm : w.k_norm),
                                  l.invqk[static_cast<std::size_t>(r * (s.heads + s.kv_heads) + h)], hd,
                                  static_cast<const T*>(nullptr), d_qkv.data() + r * qkv + h * hd,
                                  h < s.heads ? sums.q_norm : sums.k_norm);
            }
            if (s.attention_bias) add_row(d_qkv.data() + r * qkv, qkv, sums.bqkv);
            if (s.output_bias) add_row(dx + r * d, d, sums.bo);
        }
    });
    linear_backward(model, w.wqkv, d_qkv.data(), rows, dn, threads);
    each_sequence(pass, 0, rows, d, [&](index_t n, index_t from, index_t to) {
        for (index_t r = from; r < to; ++r)
            rms_norm_backward(dn + r * d, x + r * d, model.vector_at(w.norm1), l.inv1[static_cast<std::size_t>(r)], d,
                              dx + r * d, dx + r * d, sums_of(n).norm1);
    });
}

} // namespace

// --- a batch ---------------------------------------------------------------------------------------------------------

template <class T>
training_pass<T>::training_pass(const transformer<T>& model, opd::thread_team& threads, bool checkpointed)
    : model_(model), threads_(threads), checkpointed_(checkpointed),
      scratch_(static_cast<std::size_t>(2 * threads.size())) {}

template <class T>
index_t training_pass<T>::set_sequences(std::span<const std::vector<std::int32_t>> sequences) {
    return set_passes(sequences, model_.large, checkpointed_);
}

template <class T>
index_t training_pass<T>::set_passes(std::span<const std::vector<std::int32_t>> sequences, bool together,
                                     bool checkpointed) {
    for (std::size_t i = 0; i < sequences.size(); ++i)
        if (const auto& tokens = sequences[i];
            tokens.empty() || tokens.size() > static_cast<std::size_t>(model_.shape.max_length))
            throw std::invalid_argument("sequence " + std::to_string(i) + " has " + std::to_string(tokens.size()) +
                                        " tokens; the model takes 1 to " + std::to_string(model_.shape.max_length));
    count_ = together ? std::min<std::size_t>(1, sequences.size()) : sequences.size();
    if (sequences_.size() < count_) sequences_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i) {
        sequence_pass<T>& pass = sequences_[i];
        pass.tokens.clear();
        pass.sequences.clear();
        pass.start = 0;
        pass.forward.threads = together ? &threads_ : nullptr;
        pass.forward.checkpointed = checkpointed;
        for (auto& g : pass.layers) g.seen.clear();
    }
    rows_ = 0;
    first_rows_.clear();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
        sequence_pass<T>& pass = sequences_[together ? 0 : i];
        const auto& tokens = sequences[i];
        if (pass.tokens.empty()) pass.row = rows_;
        pass.sequences.push_back({.slot = std::ssize(pass.sequences), .count = std::ssize(tokens)});
        pass.tokens.insert(pass.tokens.end(), tokens.begin(), tokens.end());
        first_rows_.push_back(rows_);
        rows_ += std::ssize(tokens);
    }
    order_sequences();
    return rows_;
}

// Passes step by step; a sequence that is over has none.
template <class T>
void training_pass<T>::set_steps(std::span<const index_t> lengths, index_t steps) {
    std::vector<std::vector<std::int32_t>> none;
    std::vector<index_t> before(lengths.size(), -1);
    before_.clear(), step_rows_.clear();
    of_step_.assign(static_cast<std::size_t>(steps), {});
    for (index_t step = 0; step < steps; ++step)
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            if (lengths[i] <= step) continue;
            before_.push_back(std::exchange(before[i], std::ssize(none)));
            none.emplace_back(static_cast<std::size_t>(lengths[i] - step), 0);
        }
    set_passes(none, false, false);
    index_t pass = 0;
    for (index_t step = 0; step < steps; ++step) {
        index_t row = 0;
        for (const index_t length : lengths) {
            if (length <= step) continue;
            sequence_pass<T>& p = sequences_[static_cast<std::size_t>(pass)];
            p.row = std::exchange(row, row + p.rows()), p.start = step;
            ++pass;
        }
        step_rows_.push_back(row);
    }
    for (const index_t i : order_)
        of_step_[static_cast<std::size_t>(sequences_[static_cast<std::size_t>(i)].start)].push_back(i);
}

template <class T>
std::vector<sequence_pass<T>*> training_pass<T>::steps_to(index_t pass) {
    std::vector<sequence_pass<T>*> r;
    for (; pass >= 0; pass = before_[static_cast<std::size_t>(pass)])
        r.insert(r.begin(), &sequences_[static_cast<std::size_t>(pass)]);
    return r;
}

template <class T>
void training_pass<T>::order_sequences() {
    order_.resize(count_);
    std::iota(order_.begin(), order_.end(), index_t{0});
    std::sort(order_.begin(), order_.end(), [&](index_t a, index_t b) {
        const index_t x = sequences_[static_cast<std::size_t>(a)].rows();
        const index_t y = sequences_[static_cast<std::size_t>(b)].rows();
        return x != y ? x > y : a < b;
    });
}

template <class T>
void training_pass<T>::resize(sequence_pass<T>& pass) {
    index_t longest = 0;
    for (const segment& g : pass.sequences) longest = std::max(longest, g.count);
    model_shape cached = model_.shape;
    if (checkpointed_) cached.layers = 1;
    pass.cache.resize(cached, std::ssize(pass.sequences), longest);
}

template <class T>
void training_pass<T>::forward(T* logits) {
    threads_.run(static_cast<index_t>(count_), [&](index_t piece, int) {
        sequence_pass<T>& pass = sequences_[static_cast<std::size_t>(order_[static_cast<std::size_t>(piece)])];
        resize(pass);
        forward_rows(model_, std::span<const segment>(pass.sequences), std::span<const std::int32_t>(pass.tokens),
                     pass.cache, pass.forward, true, logits + pass.row * model_.shape.vocabulary);
    });
}

template <class T>
void training_pass<T>::forward_states(T* n) {
    const index_t d = model_.shape.width;
    threads_.run(static_cast<index_t>(count_), [&](index_t piece, int) {
        sequence_pass<T>& pass = sequences_[static_cast<std::size_t>(order_[static_cast<std::size_t>(piece)])];
        resize(pass);
        trainer::forward_states(model_, std::span<const segment>(pass.sequences),
                                std::span<const std::int32_t>(pass.tokens), pass.cache, pass.forward, true);
        std::copy_n(pass.forward.n.data(), pass.rows() * d, n + pass.row * d);
    });
}

template <class T>
void training_pass<T>::forward_layers(index_t step, const T* x0, T* x) {
    const index_t d = model_.shape.width, steps = std::ssize(of_step_);
    const std::vector<index_t>& passes = of_step_[static_cast<std::size_t>(step)];
    threads_.run(std::ssize(passes), [&](index_t piece, int) {
        const auto all = steps_to(passes[static_cast<std::size_t>(piece)]);
        sequence_pass<T>&first = *all.front(), &pass = *all.back();
        const index_t rows = pass.rows();
        if (step == 0) first.cache.resize(model_.shape, 1, steps * rows);
        pass.forward.resize(model_.shape, rows, first.cache.capacity(), true);
        if (steps > 1) {
            pass.layers.resize(static_cast<std::size_t>(model_.shape.layers));
            for (auto& g : pass.layers) g.seen.assign(static_cast<std::size_t>(rows * 2 * model_.shape.kv_width()), 0);
        }
        std::copy_n(x0 + pass.row * d, rows * d, pass.forward.layers[0].x.data());
        const segment whole{.start = step, .count = rows, .step = step, .stride = first.rows()};
        trainer::forward_layers(model_, std::span(&whole, 1), rows, first.cache, pass.forward, true);
        std::copy_n(pass.forward.x.data(), rows * d, x + pass.row * d);
    });
}

// d_out (N,width): of the logits, or of what the head reads.
template <class T>
void training_pass<T>::backward(part what, const T* d_out, index_t width, std::vector<T>& grad) {
    clear_gradient(what, grad);
    const int layers = model_.shape.layers;
    // f(pass, its place in `steps`, scratch) for each sequence
    const auto each_pass = [&](auto&& f) {
        threads_.run(static_cast<index_t>(count_), [&](index_t piece, int thread) {
            sequence_pass<T>* const pass =
                &sequences_[static_cast<std::size_t>(order_[static_cast<std::size_t>(piece)])];
            f(std::span(&pass, 1), back_scratch<T>(model_.shape, pass->rows(), scratch_, thread));
        });
    };
    const auto top = [&](std::span<sequence_pass<T>* const> pass, const back_scratch<T>& scratch) {
        const T* const mine = d_out + pass.back()->row * width;
        backward_top<T>(model_, *pass.back(), what == part::all ? mine : nullptr,
                        what == part::before_head ? mine : nullptr, nullptr, scratch);
    };
    const T* const d_logits = what == part::all ? d_out : nullptr;
    if (checkpointed_) { // the next layer takes the place of what a layer's products read
        each_pass(top);
        for (int layer = layers - 1; layer >= 0; --layer) {
            each_pass([&](auto pass, const auto& scratch) { backward_layer(model_, pass, layer, scratch); });
            layer_products(layer, layer + 1, grad);
        }
        layer_products(0, 0, grad, d_logits);
    } else {
        each_pass([&](auto pass, const auto& scratch) {
            top(pass, scratch);
            for (index_t layer = layers - 1; layer >= 0; --layer) backward_layer(model_, pass, layer, scratch);
        });
        layer_products(0, layers, grad, d_logits);
    }
    small_gradients(what, grad);
}

template <class T>
void training_pass<T>::backward(const T* d_logits, std::vector<T>& grad) {
    backward(part::all, d_logits, model_.shape.vocabulary, grad);
}

template <class T>
void training_pass<T>::backward_states(const T* dn, std::vector<T>& grad) {
    backward(part::before_head, dn, model_.shape.width, grad);
}

template <class T>
void training_pass<T>::backward_layers(index_t step, const T* dx, T* d_x0) {
    const index_t d = model_.shape.width;
    const std::vector<index_t>& passes = of_step_[static_cast<std::size_t>(step)];
    threads_.run(std::ssize(passes), [&](index_t piece, int thread) {
        const auto all = steps_to(passes[static_cast<std::size_t>(piece)]);
        sequence_pass<T>& pass = *all.back();
        const back_scratch<T> scratch(model_.shape, pass.rows(), scratch_, thread);
        backward_top<T>(model_, pass, nullptr, nullptr, dx + pass.row * d, scratch);
        for (index_t layer = model_.shape.layers - 1; layer >= 0; --layer)
            backward_layer<T>(model_, all, layer, scratch);
        std::copy_n(pass.d_x0.data(), pass.rows() * d, d_x0 + pass.row * d);
    });
}

template <class T>
void training_pass<T>::layers_gradient(std::vector<T>& grad) {
    clear_gradient(part::layers, grad);
    layer_products(0, model_.shape.layers, grad);
    small_gradients(part::layers, grad);
}

// What no product overwrites starts at 0, but for a head's gradient that is there.
template <class T>
void training_pass<T>::clear_gradient(part what, std::vector<T>& grad) const {
    const model_shape& s = model_.shape;
    const bool products = count_ > 0;
    if (what == part::before_head && std::ssize(grad) != model_.layout.size)
        throw std::invalid_argument("backward_states: the head's gradient is not there");
    grad.resize(static_cast<std::size_t>(model_.layout.size));
    index_t from = 0;
    const auto skip = [&](const tensor& t) {
        std::fill(grad.begin() + from, grad.begin() + t.offset, T(0));
        from = t.offset + t.size();
    };
    const bool keeps_head = what == part::before_head || (what == part::all && products);
    if (keeps_head && s.tied) skip(model_.layout.head);
    for (const layer_tensors& w : model_.layout.layers)
        for (const tensor* t : {&w.wqkv, &w.wo, &w.wgu, &w.wdown})
            if (products) skip(*t);
    if (keeps_head && !s.tied) skip(model_.layout.head);
    std::fill(grad.begin() + from, grad.end(), T(0));
}

// Of layers [first, end), and of the head where d_logits (N,V) is not null: dW (out,in) += dY^T X over the rows of all
// sequences in order, shared out by output tiles.
template <class T>
void training_pass<T>::layer_products(int first, int end, std::vector<T>& grad, const T* d_logits) {
    const index_t v = model_.shape.vocabulary;
    struct weight_task {
        const tensor* w;
        int layer; // -1: the head
        const T* (*dy)(sequence_pass<T>&, int, const T*);
        const T* (*x)(sequence_pass<T>&, int);
        index_t tile;
    };
    const auto operands = [&](const weight_task& t, sequence_pass<T>& pass, bool more) {
        const T* dz = d_logits ? d_logits + pass.row * v : nullptr;
        return opd::product_tn(t.w->rows, t.w->columns, pass.rows(), t.dy(pass, t.layer, dz), t.w->rows,
                               t.x(pass, t.layer), t.w->columns, grad.data() + t.w->offset, t.w->columns, more);
    };
    std::vector<weight_task> tasks;
    const auto add = [&](const tensor& w, int layer, auto dy, auto x) {
        weight_task t{&w, layer, dy, x, 0};
        const index_t tiles = opd::product_tiles(operands(t, sequences_[0], false));
        for (; t.tile < tiles; ++t.tile) tasks.push_back(t);
    };
    for (int layer = first; layer < end && count_ > 0; ++layer) {
        const layer_tensors& w = model_.layout.layers[static_cast<std::size_t>(layer)];
        using pass_t = sequence_pass<T>;
        add(
            w.wgu, layer, [](pass_t& p, int l, const T*) -> const T* { return p.forward.rows_of(l).gu.data(); },
            [](pass_t& p, int l) -> const T* { return p.forward.rows_of(l).n2.data(); });
        add(
            w.wqkv, layer, [](pass_t& p, int l, const T*) -> const T* { return p.d_qkv(l).data(); },
            [](pass_t& p, int l) -> const T* { return p.forward.rows_of(l).n1.data(); });
        add(
            w.wdown, layer, [](pass_t& p, int l, const T*) -> const T* { return of_output(p, l); },
            [](pass_t& p, int l) -> const T* { return p.forward.rows_of(l).h.data(); });
        add(
            w.wo, layer, [](pass_t& p, int l, const T*) -> const T* { return p.forward.rows_of(l).x2.data(); },
            [](pass_t& p, int l) -> const T* { return p.forward.rows_of(l).att.data(); });
    }
    if (count_ > 0 && d_logits)
        add(
            model_.layout.head, -1, [](sequence_pass<T>&, int, const T* dz) { return dz; },
            [](sequence_pass<T>& p, int) -> const T* { return p.forward.n.data(); });
    threads_.run(static_cast<index_t>(tasks.size()), [&](index_t piece, int) {
        const weight_task& t = tasks[static_cast<std::size_t>(piece)];
        for (std::size_t i = 0; i < count_; ++i) opd::product_tile(operands(t, sequences_[i], i > 0), t.tile);
    });
}

// Norm weights, biases and embedding rows, in the order of the sequences.
template <class T>
void training_pass<T>::small_gradients(part what, std::vector<T>& grad) const {
    const model_shape& s = model_.shape;
    const index_t d = s.width;
    for (std::size_t i = 0; i < count_; ++i) {
        const sequence_pass<T>& pass = sequences_[i];
        for (int layer = 0; layer < s.layers; ++layer) {
            const layer_tensors& w = model_.layout.layers[static_cast<std::size_t>(layer)];
            const T* part = pass.layers[static_cast<std::size_t>(layer)].rest.data();
            for (std::size_t n = 0; n < pass.sequences.size(); ++n)
                for (const tensor* t : rest(w)) {
                    add_row(part, t->size(), grad.data() + t->offset);
                    part += t->size();
                }
        }
        if (what == part::layers) continue;
        for (index_t n = 0; n < std::ssize(pass.sequences); ++n)
            add_row(pass.norm_f.data() + n * d, d, grad.data() + model_.layout.norm_f.offset);
        for (index_t r = 0; r < pass.rows(); ++r)
            add_row(pass.d_x0.data() + r * d, d,
                    grad.data() + model_.layout.embedding.offset + pass.tokens[static_cast<std::size_t>(r)] * d);
    }
}

using real = TRAINER_NUMBERS;
template class transformer<real>;
template class kv_cache<real>;
template struct layer_rows<real>;
template struct forward_state<real>;
template class training_pass<real>;
template void forward_layers(const transformer<real>&, std::span<const segment>, index_t, kv_cache<real>&,
                             forward_state<real>&, bool);
template void forward_states(const transformer<real>&, std::span<const segment>, std::span<const std::int32_t>,
                             kv_cache<real>&, forward_state<real>&, bool);
template void head_logits(const transformer<real>&, const real*, index_t, real*, opd::thread_team*);
template void forward_head(const transformer<real>&, forward_state<real>&, index_t, real*);
template void backward_head(const transformer<real>&, const real*, const real*, const real*, const real*, index_t,
                            real*, real*, real*, opd::thread_team*);
template void forward_rows(const transformer<real>&, std::span<const segment>, std::span<const std::int32_t>,
                           kv_cache<real>&, forward_state<real>&, bool, real*);

} // namespace trainer

template void opd::product_tile(const opd::product_operands<trainer::real, trainer::real>&, opd::index_t);
