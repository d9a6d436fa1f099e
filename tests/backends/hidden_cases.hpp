// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses from hidden states that the CUDA backend must get right, on the host (blocks_on_host) and on a device alike,
// and a plain float64 reference of loss, dx, dw and db. On the host the device's views point into host memory: the
// types, the plan and the kernels are the device's, the kernels run thread by thread, and products are a naive BLAS
// that holds its caller to the contract.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/cuda_cases.hpp"
#include "backends/host_run.hpp"
#include "opd/cuda/blocks.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/evaluate.hpp"
#include "opd/hidden.hpp"

namespace opd::test {

/// C = op(A) op(B) + beta·C by columns, as cublasGemmEx has it, summed in double.
template <class T>
void naive_product(const detail::column_major_product<T>& p) {
    REQUIRE(p.m >= 0);
    REQUIRE(p.n >= 0);
    REQUIRE(p.k >= 0);
    REQUIRE(p.lda >= std::max<index_t>(1, p.transpose_a ? p.k : p.m)); // what cuBLAS refuses
    REQUIRE(p.ldb >= std::max<index_t>(1, p.transpose_b ? p.n : p.k));
    REQUIRE(p.ldc >= std::max<index_t>(1, p.m));
    for (index_t j = 0; j < p.n; ++j)
        for (index_t i = 0; i < p.m; ++i) {
            double sum = 0;
            for (index_t l = 0; l < p.k; ++l)
                sum += double(element<T>::load(p.transpose_a ? p.a[l + i * p.lda] : p.a[i + l * p.lda])) *
                       double(element<T>::load(p.transpose_b ? p.b[j + l * p.ldb] : p.b[l + j * p.ldb]));
            float& c = p.c[i + j * p.ldc];
            c = p.beta == 0 ? float(sum) : float(double(p.beta) * double(c) + sum);
        }
}

/// The device's steps on the host.
struct host_blocks_backend {
    static constexpr space memory_space = space::device;
    int threads = 128;
    double multiplications = 0; ///< of the products of the last call
    int products = 0, kernels = 0;

    template <class Job>
        requires(detail::has_block_kernel<Job>)
    result for_rows(const Job& job) {
        if constexpr (requires { job.env; }) detail::refuse_options(job.env);
        constexpr std::size_t guard = 256;
        const std::size_t bytes = detail::block_plan_of(job).bytes;
        const std::unique_ptr<std::byte[]> memory(new std::byte[bytes + guard + 64]);
        void* p = memory.get();
        std::size_t room = bytes + guard + 64;
        auto* arena = static_cast<std::byte*>(std::align(64, bytes + guard, p, room));
        std::fill_n(arena, bytes + guard, std::byte{0xff}); // NaN: nothing may rest on what the memory held
        auto* out = reinterpret_cast<result*>(arena);
        multiplications = 0, products = kernels = 0;
        detail::run_in_blocks(
            job, arena, out,
            [this](const auto& kernel, index_t blocks) {
                static_assert(std::is_trivially_copyable_v<std::remove_cvref_t<decltype(kernel)>>);
                REQUIRE(blocks > 0);
                ++kernels;
                for (index_t b = 0; b < blocks; ++b) {
                    host_team<typename std::remove_cvref_t<decltype(kernel)>::state_type> team{threads, true};
                    kernel.run(b, team);
                }
            },
            [this](const auto& product) {
                ++products, multiplications += double(product.m) * double(product.n) * double(product.k);
                naive_product(product);
            });
        for (std::size_t i = bytes; i < bytes + guard; ++i) REQUIRE(arena[i] == std::byte{0xff});
        return *out;
    }
    template <class Job>
        requires(detail::has_block_kernel<Job>)
    std::size_t workspace_bytes(const Job& job)
    const { return detail::block_plan_of(job).bytes; }
};

/// Host memory in the place of a device's.
struct blocks_on_host {
    host_blocks_backend backend = {};
    template <class T>
    T* put(std::vector<T>& v) {
        return v.empty() ? nullptr : v.data();
    }
    template <class T>
    void get(std::vector<T>&, T*) {}
    result finish(result r) { return r; }
    void make_room(std::size_t) {}
};

/// Rows of `cols` elements, `gap` elements of which nobody knows after each.
template <class T>
struct gapped {
    index_t rows = 0, cols = 0, stride = 0;
    std::vector<T> data = {};
    gapped() = default;
    gapped(index_t rows_, index_t cols_, index_t gap, T fill)
        : rows(rows_), cols(cols_), stride(cols_ + gap), data(std::size_t(rows * stride), fill) {}
    T& operator()(index_t r, index_t c) { return data[std::size_t(r * stride + c)]; }
    double at(index_t r, index_t c) const { return double(element<T>::load(data[std::size_t(r * stride + c)])); }
};

/// A head in 8 bits with a scale a row, which lies where a device's views do.
struct coarse_head {
    static constexpr space memory_space = space::device;
    const std::int8_t* numbers;
    const float* scales;
    index_t ids, columns;
    index_t vocab() const { return ids; }
    index_t width() const { return columns; }
    OPD_HD void copy(index_t id, index_t d, index_t count, float* to) const {
        for (index_t j = 0; j < count; ++j) to[j] = scales[id] * float(numbers[id * columns + d + j]);
    }
};

template <class X>
struct hidden_side {
    gapped<X> x, w;
    std::vector<X> bias;
    float soft_cap = 0, temperature = 1;

    hidden_side(index_t n, index_t v, index_t d, std::uint64_t seed, bool biased = false, float cap = 0)
        : x(n, d, 3, element<X>::store(std::numeric_limits<float>::quiet_NaN())),
          w(v, d, 5, element<X>::store(std::numeric_limits<float>::quiet_NaN())), soft_cap(cap) {
        source s(seed);
        const auto number = [&](double deviation) { return element<X>::store(float(deviation * s.normal())); };
        for (index_t r = 0; r < n; ++r)
            for (index_t i = 0; i < d; ++i) x(r, i) = number(1);
        for (index_t r = 0; r < v; ++r)
            for (index_t i = 0; i < d; ++i) w(r, i) = number(2 / std::sqrt(double(d)));
        for (index_t i = 0; biased && i < v; ++i) bias.push_back(number(1));
    }
    index_t vocab() const { return w.rows; }
    double logit(index_t r, index_t v) const {
        double z = bias.empty() ? 0 : double(element<X>::load(bias[std::size_t(v)]));
        for (index_t i = 0; i < x.cols; ++i) z += x.at(r, i) * w.at(v, i);
        return soft_cap > 0 ? double(soft_cap) * std::tanh(z / double(soft_cap)) : z;
    }
};

template <class X>
struct hidden_case {
    hidden_side<X> student, teacher;
    bool wants_dx = true, wants_dw = true, wants_db = true;
    float before = 0; ///< what the gradients hold
    float beta = 0, beta_head = 0;
    index_t block = 0; ///< rows; 0: all
    reduce reduction = reduce::sum;
    vocabulary vocab = vocabulary::must_match;
    std::vector<std::uint8_t> mask = {};
    std::vector<float> weights = {};
    std::vector<std::int64_t> offsets = {};
};

struct hidden_outputs {
    gapped<float> dx, dw;
    std::vector<float> db, losses;
    std::vector<double> lse;
    result r = {};

    template <class X>
    explicit hidden_outputs(const hidden_case<X>& c) {
        const auto& s = c.student;
        if (c.wants_dx) dx = {s.x.rows, s.x.cols, 1, c.before};
        if (c.wants_dw) dw = {s.w.rows, s.w.cols, 2, c.before};
        if (c.wants_db) db.assign(std::size_t(s.vocab()), c.before);
        losses.assign(std::size_t(s.x.rows), 0), lse.assign(std::size_t(s.x.rows), 0);
    }
};

template <class T>
matrix_view<T, space::device> device_matrix(T* p, index_t rows, index_t cols, index_t stride) {
    return {p, rows, cols, stride};
}

/// The sources of a case, as `memory` has it; and the pointers to fetch.
template <class X, class Memory>
struct hidden_call {
    hidden_case<X>& c;
    hidden_outputs& o;
    Memory& memory;
    float *dx, *dw, *db, *losses;
    double* lse;
    student::hidden<X, float, space::device> mine;
    teacher::hidden<X, space::device> theirs;
    device_env e = {};

    hidden_call(Memory& memory_, hidden_case<X>& c_, hidden_outputs& o_)
        : c(c_), o(o_), memory(memory_), dx(memory.put(o.dx.data)), dw(memory.put(o.dw.data)), db(memory.put(o.db)),
          losses(memory.put(o.losses)), lse(memory.put(o.lse)) {
        const auto n = [](const auto& v) { return static_cast<index_t>(v.size()); };
        const auto fill = [&](auto& h, auto& side) {
            h.x =
                device_matrix(static_cast<const X*>(memory.put(side.x.data)), side.x.rows, side.x.cols, side.x.stride);
            h.w =
                device_matrix(static_cast<const X*>(memory.put(side.w.data)), side.w.rows, side.w.cols, side.w.stride);
            h.bias = {static_cast<const X*>(memory.put(side.bias)), n(side.bias)};
            h.soft_cap = side.soft_cap, h.temperature = side.temperature;
        };
        fill(mine, c.student), fill(theirs, c.teacher);
        if (dx || c.wants_dx) mine.dx = device_matrix(dx, o.dx.rows, o.dx.cols, o.dx.stride);
        if (dw) mine.dw = device_matrix(dw, o.dw.rows, o.dw.cols, o.dw.stride);
        mine.db = {db, n(o.db)};
        mine.beta_head = c.beta_head;
        if (c.block > 0) {
            mine.budget = detail::block_layout(mine, 0).of_row * std::size_t(c.block);
            theirs.budget = detail::block_layout(theirs, 0).of_row * std::size_t(c.block + 1);
        }
        e.reduction = c.reduction, e.beta = c.beta, e.vocab = c.vocab;
        e.mask = row_mask<space::device>(vector_view<const std::uint8_t, space::device>(memory.put(c.mask), n(c.mask)));
        e.weights = vector_view<const float, space::device>(memory.put(c.weights), n(c.weights));
        e.offsets = vector_view<const std::int64_t, space::device>(memory.put(c.offsets), n(c.offsets));
        e.losses = {losses, n(o.losses)}, e.lse = {lse, n(o.lse)};
    }
    template <class Student, class Teacher, class Estimator>
    void run(const Student& s, const Teacher& t, const Estimator& estimator) {
        memory.make_room(workspace_bytes(memory.backend, s, t, estimator, e));
        o.r = memory.finish(evaluate(memory.backend, s, t, estimator, e));
        memory.get(o.dx.data, dx), memory.get(o.dw.data, dw), memory.get(o.db, db);
        memory.get(o.losses, losses), memory.get(o.lse, lse);
    }
};
template <class X, class Memory, class Estimator>
hidden_outputs run_hidden(Memory& memory, hidden_case<X> c, const Estimator& estimator) {
    hidden_outputs o(c);
    hidden_call<X, Memory> call(memory, c, o);
    call.run(call.mine, call.theirs, estimator);
    return o;
}

/// ‖a - b‖ against ‖b‖, of what a gradient holds.
struct apart {
    double far = 0, size = 0;
    void add(double a, double b) { far += (a - b) * (a - b), size += b * b; }
    double relative() const { return std::sqrt(far / std::max(size, 1e-30)); }
};

/// A case against float64. `bad`: rows that must have no loss and no gradient.
template <class X, class Memory, class Divergence>
hidden_outputs check_hidden(Memory& memory, const hidden_case<X>& c, const Divergence& d, double bound,
                            const std::vector<index_t>& bad = {}) {
    const hidden_outputs got = run_hidden(memory, c, d);
    const auto& s = c.student;
    const index_t n = s.x.rows, v = s.vocab(), width = s.x.cols;
    dense_case<double, double> rows{.rows = n, .vocab_z = v, .vocab_y = c.teacher.vocab()};
    rows.t_s = s.temperature, rows.t_t = c.teacher.temperature;
    const auto is_bad = [&](index_t r) { return std::find(bad.begin(), bad.end(), r) != bad.end(); };
    std::vector<double> dx(std::size_t(n * width)), dw(std::size_t(v * width)), db(static_cast<std::size_t>(v));
    for (index_t r = 0; r < n; ++r) {
        for (index_t i = 0; i < v; ++i) rows.z.push_back(is_bad(r) ? 0 : s.logit(r, i));
        for (index_t i = 0; i < rows.vocab_y; ++i) rows.y.push_back(is_bad(r) ? 0 : c.teacher.logit(r, i));
    }
    const auto kept = [&](index_t r) { return c.mask.empty() || c.mask[std::size_t(r)] != 0; };
    index_t count = 0;
    for (index_t r = 0; r < n; ++r) count += kept(r);
    double loss = 0, size = 0;
    for (index_t r = 0; r < n; ++r) {
        if (!kept(r) || is_bad(r)) {
            CHECK(got.losses[std::size_t(r)] == 0);
            continue;
        }
        double f = c.weights.empty() ? 1 : double(c.weights[std::size_t(r)]);
        if (c.reduction == reduce::token_mean) f /= double(count);
        const reference_row want = reference(rows, d, r);
        loss += f * want.value, size += std::abs(f * want.value);
        for (index_t i = 0; i < index_t(want.dz.size()); ++i) {
            double g = f * want.dz[std::size_t(i)];
            if (s.soft_cap > 0) {
                const double t = rows.z[std::size_t(r * v + i)] / double(s.soft_cap);
                g *= 1 - t * t;
            }
            db[std::size_t(i)] += g;
            for (index_t j = 0; j < width; ++j)
                dx[std::size_t(r * width + j)] += g * s.w.at(i, j), dw[std::size_t(i * width + j)] += g * s.x.at(r, j);
        }
    }
    CHECK(std::abs(got.r.loss - loss) <= bound * std::max(size, 1e-3));
    CHECK(got.r.diagnostics.rows == n);
    CHECK(got.r.diagnostics.kept == count);
    CHECK(got.r.diagnostics.bad_rows == index_t(bad.size()));
    const auto close = [&](const char* name, bool wanted, auto&& value, const std::vector<double>& want, index_t cols,
                           double old) {
        if (!wanted) return;
        INFO(std::string(name));
        apart all;
        for (std::size_t i = 0; i < want.size(); ++i)
            all.add(value(index_t(i) / cols, index_t(i) % cols), old * double(c.before) + want[i]);
        CHECK(all.relative() <= bound);
    };
    close(
        "dx", c.wants_dx, [&](index_t r, index_t j) { return got.dx.at(r, j); }, dx, width, double(c.beta));
    close(
        "dw", c.wants_dw, [&](index_t r, index_t j) { return got.dw.at(r, j); }, dw, width, double(c.beta_head));
    close(
        "db", c.wants_db, [&](index_t, index_t j) { return double(got.db[std::size_t(j)]); }, db, v,
        double(c.beta_head));
    const auto gaps = [&](const gapped<float>& m) { // what lies between rows is others'
        for (index_t r = 0; r < m.rows; ++r)
            for (index_t i = m.cols; i < m.stride; ++i)
                if (m.data[std::size_t(r * m.stride + i)] != c.before) FAIL("a gap was written, row " << r);
    };
    gaps(got.dx), gaps(got.dw);
    return got;
}

/// The bits of everything that a call writes.
inline bool same_outputs(const hidden_outputs& a, const hidden_outputs& b) {
    const auto same = [](const auto& x, const auto& y) {
        return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) == 0);
    };
    return same(a.dx.data, b.dx.data) && same(a.dw.data, b.dw.data) && same(a.db, b.db) && same(a.losses, b.losses) &&
           same(a.lse, b.lse) && a.r.loss == b.r.loss;
}

} // namespace opd::test
