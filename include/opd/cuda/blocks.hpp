// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose logits are made for a block of them at a time (hidden.hpp), on a device: how a block lies in memory, and
// the steps of a call, for any launcher of kernels (cuda/jobs.hpp) and any products. No CUDA header: tests run the
// whole of it on the host.
//
// For each block of rows, as many as every side's budget holds:
//
//   decode_head     rows of W, where W is a head of one's own: a stretch of ids at a time
//   product         z = x Wᵀ, of each side in hidden states
//   finish_logits   z = cap tanh((z + b)/cap), where there is a bias or a soft-cap
//   rows            of the loss: dz over z, or beside it under a soft-cap and for bfloat16
//   finish_gradient dz (1 - (z/cap)²), 0 at ids that the teacher lacks; which rows have a gradient at all
//   products        dz W, a stretch of ids at a time, into sums; add_states: dx = beta dx + sums
//   keep_states     x, with 0 for rows without a gradient, else NaN times 0 would reach the head
//   product         dw = beta_head dw + dzᵀ x
//   sum_columns     db = beta_head db + Σ_r dz
//
// Of a head with an update (head.hpp) also: u = scale·x Aᵀ, z += u Bᵀ; t = scale·dz B, sums += t A, dA = beta_head dA
// + tᵀ x, dB = beta_head dB + dzᵀ u. u and t are stored as the head is.
//
// Nothing asks the device about the rows, so masked ones are multiplied with the rest; they are not looked at.
//
// Memory, in bytes: V' 4 a row of the block and side; of a student with a gradient V' 8 under a soft-cap, V' 6 for
// bfloat16; D' 4 and V/8,192 for its way back (V', D': up to the next multiple of 8, so that every row begins where
// vector loads may). Of an update R' 4, and for each of u and t R' numbers of the head's. A head of one's own: D'
// numbers of the states' type for 8,192 ids, beside the budget.
#pragma once

#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/cuda/block_kernels.hpp"
#include "opd/cuda/jobs.hpp"
#include "opd/cuda/products.hpp"
#include "opd/diagnostics.hpp"
#include "opd/draw.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/head.hpp"
#include "opd/hidden.hpp"
#include "opd/logits/block_sides.hpp"
#include "opd/logits/logit_rows.hpp"
#include "opd/logits/planner.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tuning.hpp"
#include "opd/score.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

// --- a block as rows -------------------------------------------------------------------------------------------------

/// What hidden states are stored as.
template <class Hidden>
using states_of = std::remove_const_t<typename decltype(Hidden::x)::element_type>;
/// What dz is stored as: a product's operands are of one type.
template <class Hidden>
using block_gradient = std::conditional_t<brain_float<states_of<Hidden>>, bfloat16, float>;

template <class Side>
struct device_block {
    using type = Side;
};
template <class Side>
    requires(in_blocks<Side>)
struct device_block<Side> : block_rows<Side, block_gradient<Side>> {};
template <class Side>
using block_on_device = typename device_block<Side>::type;

/// Whether there are kernels for a job of which a side's logits are made here.
template <class Job>
inline constexpr bool has_block_kernel = false;
template <class Student, class Teacher, class Estimator, space S>
    requires(in_blocks<Student> || in_blocks<Teacher>)
inline constexpr bool has_block_kernel<row_job<Student, Teacher, Estimator, S>> =
    has_kernel<row_job<block_on_device<Student>, block_on_device<Teacher>, Estimator, S>>;

template <plain_job Job>
    requires requires { typename decltype(Job::z)::source_type; }
inline constexpr bool has_block_kernel<Job> = in_blocks<typename decltype(Job::z)::source_type>;

template <class Job>
index_t rows_of_job(const Job& job) {
    if constexpr (plain_job<Job>)
        return job.row_count();
    else
        return job.rows;
}
template <class Job>
auto env_of(const Job& job) {
    if constexpr (plain_job<Job>)
        return job.as_env();
    else
        return job.env;
}

// --- the plan --------------------------------------------------------------------------------------------------------

/// Where the parts of one side's block lie, in bytes from its beginning.
struct block_layout {
    index_t stride = 0, width = 0, chunks = 0; ///< elements from row to row of logits and of states; chunks of a row
    std::size_t of_row = 0;                    ///< what the budget counts: logits, and a gradient beside them
    std::size_t gradient = 0;                  ///< 0: it goes over the logits
    std::size_t states = 0, flags = 0, bytes = 0;
    index_t rank = 0;                        ///< elements from row to row of u and t
    std::size_t update = 0, u = 0, back = 0; ///< sums in float, u, t
    index_t head_stride = 0;                 ///< elements from row to row of a decoded stretch of the head
    std::size_t head = 0;

    template <class Hidden>
    block_layout(const Hidden& h, index_t rows) : block_layout(h, rows, h.vocab()) {}
    template <class Hidden>
    block_layout(const Hidden& h, index_t rows, index_t vocab)
        : stride(padded(vocab)), chunks((vocab + gpu_tuning::chunk_of_ids - 1) / gpu_tuning::chunk_of_ids),
          of_row(sizeof(float) * std::size_t(stride)) {
        const auto of = [rows](std::size_t of_one) { return device_plan::aligned(of_one * std::size_t(rows)); };
        bytes = of(of_row);
        if constexpr (is_lora<decltype(h.w)>) {
            rank = padded(rank_of(h.w));
            const std::size_t of_sums = sizeof(float) * std::size_t(rank),
                              stored = sizeof(h.x.data[0]) * std::size_t(rank);
            update = bytes, bytes += of(of_sums), u = bytes, bytes += of(stored);
            of_row += of_sums + stored;
            if (trains_states<Hidden>) back = bytes, bytes += of(stored), of_row += stored;
        }
        if constexpr (own_head<std::remove_cvref_t<decltype(base_of(h.w))>>) {
            head_stride = padded(h.x.cols);
            const index_t ids = vocab < stretch_of_ids ? vocab : stretch_of_ids;
            head = bytes;
            bytes += device_plan::aligned(sizeof(h.x.data[0]) * std::size_t(head_stride) * std::size_t(ids));
        }
        if constexpr (trains_states<Hidden>) {
            if (!h.has_gradient()) return;
            if (h.soft_cap > 0 || !std::is_same_v<block_gradient<Hidden>, float>) {
                const std::size_t beside = sizeof(block_gradient<Hidden>) * std::size_t(stride);
                gradient = bytes, bytes += of(beside), of_row += beside;
            }
            width = padded(h.x.cols);
            states = bytes;
            bytes += h.dx.empty() && !needs_states(h) ? 0 : of(sizeof(float) * std::size_t(width));
            flags = bytes, bytes += of(std::size_t(chunks));
        }
    }
    static constexpr index_t padded(index_t n) { return (n + 7) / 8 * 8; }
};

/// How a call is cut into blocks of rows, and where in the workspace they lie.
struct block_plan {
    index_t rows = 0;
    index_t block = 1; ///< rows
    device_plan batch; ///< of a block; the sides' blocks follow it
    std::size_t bytes = 0;
};

/// Rows of a block that a side allows, up to `rows`, where each has `vocab` ids.
template <class Side>
index_t most_rows(const Side& side, index_t rows, index_t vocab) {
    constexpr index_t most_blocks = 0x7fffffff; // of one launch
    const block_layout layout(side, 0, vocab);
    if (side.budget < layout.of_row)
        throw invalid_input(std::string(name_of<Side>()) + ".budget",
                            "is " + std::to_string(side.budget) + " bytes; a row takes " +
                                std::to_string(layout.of_row) + " on a device");
    const index_t of_launch = most_blocks / (layout.chunks > 0 ? layout.chunks : 1);
    const auto bytes = [&](index_t n) { return layout.of_row * std::size_t(n); };
    return rows_within(side.budget, of_launch < rows ? of_launch : rows, bytes);
}

/// The job of the block of `rows` rows from `first` on, of which `memory` holds the logits, null while a call is
/// planned.
template <class Job>
auto job_of_block(const Job& job, index_t rows, index_t first, std::byte* memory) {
    return with_made(job, [&]<class Side>(const Side& side) {
        const block_layout layout(side, rows);
        using block = typename block_rows<Side, block_gradient<Side>>::type;
        using G = block_gradient<Side>;
        auto* const logits = reinterpret_cast<float*>(memory);
        G* const gradient =
            memory == nullptr ? nullptr : reinterpret_cast<G*>(memory + layout.gradient); // over the logits at 0
        if (memory != nullptr) memory += layout.bytes;                                    // the student's come first
        return block_of<block>(side, layout.stride, first, logits, gradient);
    });
}

template <space S>
row_frame<S> frame_without_rows(const basic_env<S>&) {
    return {};
}
/// `vocab`: ids of a row by which a block's rows are counted; -1: each side's own.
template <class Job>
    requires(has_block_kernel<Job>)
block_plan block_plan_of(const Job& job, index_t vocab = -1) {
    const index_t all = rows_of_job(job);
    const auto within = [&](index_t, index_t most) {
        if (all > 0)
            each_made(job, [&](const auto& side) { most = most_rows(side, most, vocab < 0 ? side.vocab() : vocab); });
        return most;
    };
    const index_t block = cut_logits({all > 0 ? all : 1, gpu_tuning::tile_rows}, within).rows;
    const index_t rows = block < all ? block : all;
    const auto of_block = job_of_block(job, rows, 0, nullptr);
    const auto frame = frame_without_rows(env_of(job));
    block_plan plan{
        all, block,
        device_plan(rows, sequences_of(env_of(job)), rows_of<thread_engine>(of_block, frame).scratch_bytes())};
    plan.bytes = plan.batch.bytes;
    each_made(job, [&](const auto& side) { plan.bytes += block_layout(side, rows).bytes; });
    return plan;
}

// --- a call ----------------------------------------------------------------------------------------------------------

/// W of ids [from, from + ids) as a product reads it, where it lies or decoded into the block's memory.
template <class Hidden, class Launch>
auto head_rows(const Hidden& h, index_t from, index_t ids, const block_layout& layout, std::byte* memory,
               Launch&& launch) {
    using X = states_of<Hidden>;
    using T = opd::stored_as<X>;
    const auto& w = base_of(h.w);
    if constexpr (is_matrix<decltype(w)>) {
        return row_major<T>{reinterpret_cast<const T*>(w.row(from)), leading(w)};
    } else {
        auto* const rows = reinterpret_cast<X*>(memory + layout.head);
        launch(decode_head_kernel<std::remove_cvref_t<decltype(w)>, X>(w, from, h.x.cols, rows, layout.head_stride),
               ids);
        return row_major<T>{reinterpret_cast<const T*>(rows), layout.head_stride};
    }
}

/// Logits of the rows [begin, end) of a side.
template <class Hidden, class Launch, class Products>
void fill_block(const Hidden& h, index_t begin, index_t end, const block_layout& layout, std::byte* memory,
                Launch&& launch, Products&& products) {
    using X = states_of<Hidden>;
    using T = opd::stored_as<X>;
    const index_t n = end - begin;
    if (n == 0 || h.vocab() == 0) return;
    auto* const logits = reinterpret_cast<float*>(memory);
    const row_major<T> x{reinterpret_cast<const T*>(h.x.row(begin)), leading(h.x)};
    const index_t v = h.vocab(), at_once = is_matrix<decltype(base_of(h.w))> ? v : stretch_of_ids;
    for (index_t from = 0; from < v; from += at_once) {
        const index_t ids = v - from < at_once ? v - from : at_once;
        row_major<T> w = head_rows(h, from, ids, layout, memory, launch);
        w.transposed = true;
        products(by_rows<T>(n, ids, h.x.cols, x, w, 0, logits + from, layout.stride));
    }
    if constexpr (is_lora<decltype(h.w)>) {
        const index_t rank = rank_of(h.w);
        scale_update_kernel<X> scale;
        auto* const sums = reinterpret_cast<float*>(memory + layout.update);
        scale.sums = sums, scale.to = reinterpret_cast<X*>(memory + layout.u), scale.stride = layout.rank;
        scale.rank = rank, scale.scale = h.w.scale;
        products(by_rows<T>(n, rank, h.x.cols, x, {reinterpret_cast<const T*>(h.w.a.data), leading(h.w.a), true}, 0,
                            sums, layout.rank));
        launch(scale, n);
        products(by_rows<T>(n, h.vocab(), rank, {reinterpret_cast<const T*>(scale.to), layout.rank},
                            {reinterpret_cast<const T*>(h.w.b.data), leading(h.w.b), true}, 1, logits, layout.stride));
    }
    if (h.bias.data == nullptr && !(h.soft_cap > 0)) return;
    finish_logits_kernel<X> finish;
    finish.logits = logits, finish.stride = layout.stride, finish.ids = h.vocab(), finish.chunks = layout.chunks;
    finish.bias = h.bias.data, finish.soft_cap = h.soft_cap;
    launch(finish, n * layout.chunks);
}

/// Gradients of hidden states and head from that of the block's logits, of which the first `common` ids have one.
template <class Hidden, class Launch, class Products>
void drain_block(const Hidden& h, index_t begin, index_t end, index_t common, float beta, const block_layout& layout,
                 std::byte* memory, Launch&& launch, Products&& products) {
    using X = states_of<Hidden>;
    using T = opd::stored_as<X>;
    using G = block_gradient<Hidden>;
    const index_t n = end - begin, v = h.vocab(), d = h.x.cols;
    const float beta_head = begin == 0 ? h.beta_head : 1;
    const auto scale_head = [&](auto dw, float factor) {
        scale_head_kernel<decltype(dw)> kernel;
        kernel.dw = dw, kernel.beta = factor;
        if (dw.rows > 0) launch(kernel, dw.rows);
    };
    if (begin == 0) {
        const auto clear_padding = [&](auto dw) {
            if (dw.padding > 0) scale_head(decltype(dw)(dw.data + dw.cols, dw.rows, dw.padding, dw.stride), 0);
        };
        clear_padding(h.dw);
        if constexpr (is_lora<decltype(h.w)>) clear_padding(h.w.db), clear_padding(h.w.da);
    }
    if (n == 0) {
        if (!h.dw.empty()) scale_head(h.dw, beta_head);
        if (h.db.data != nullptr) scale_head(decltype(h.dw)(h.db.data, 1, h.db.size, h.db.size), beta_head);
        if constexpr (is_lora<decltype(h.w)>) {
            if (!h.w.db.empty()) scale_head(h.w.db, beta_head);
            if (!h.w.da.empty()) scale_head(h.w.da, beta_head);
        }
        return;
    }
    if (v == 0) { // a shard without ids
        if (h.dx.empty()) return;
        const auto dx = [&](index_t from, index_t cols) {
            return decltype(h.dx)(h.dx.row(begin) + from, n, cols, h.dx.stride);
        };
        scale_head(dx(0, d), beta);
        if (h.dx.padding > 0) scale_head(dx(d, h.dx.padding), 0);
        return;
    }
    auto* const gradient = reinterpret_cast<G*>(memory + layout.gradient);
    finish_gradient_kernel<G> finish;
    finish.logits = reinterpret_cast<const float*>(memory), finish.gradient = gradient, finish.stride = layout.stride;
    finish.ids = v, finish.common = common, finish.chunks = layout.chunks, finish.soft_cap = h.soft_cap;
    finish.flags = reinterpret_cast<unsigned char*>(memory + layout.flags);
    launch(finish, n * layout.chunks);
    const row_flags flags{finish.flags, layout.chunks};
    const auto* const dz = reinterpret_cast<const T*>(gradient); // of one type, or bits of bfloat16
    // to (n, columns) = dz matrix, a stretch of ids at a time: rows_from(first, ids)
    const auto multiply_back = [&](const auto& rows_from, index_t columns, float* to, index_t stride) {
        for (index_t from = 0; from < v; from += stretch_of_ids) {
            const index_t ids = v - from < stretch_of_ids ? v - from : stretch_of_ids;
            products(by_rows<T>(n, columns, ids, {dz + from, layout.stride}, rows_from(from, ids), from > 0 ? 1.f : 0.f,
                                to, stride));
        }
    };
    const T* t = nullptr; // of an update
    if constexpr (is_lora<decltype(h.w)>)
        if (sums_states(h)) {
            scale_update_kernel<X> scale;
            auto* const sums = reinterpret_cast<float*>(memory + layout.update);
            const auto rows_of_b = [&](index_t from, index_t) {
                return row_major<T>{reinterpret_cast<const T*>(h.w.b.row(from)), leading(h.w.b)};
            };
            multiply_back(rows_of_b, rank_of(h.w), sums, layout.rank);
            scale.sums = sums, scale.to = reinterpret_cast<X*>(memory + layout.back), scale.stride = layout.rank;
            scale.rank = rank_of(h.w), scale.scale = h.w.scale, scale.rows = flags;
            launch(scale, n);
            t = reinterpret_cast<const T*>(scale.to);
        }
    if (!h.dx.empty()) {
        auto* const sums = reinterpret_cast<float*>(memory + layout.states);
        multiply_back([&](index_t from, index_t ids) { return head_rows(h, from, ids, layout, memory, launch); }, d,
                      sums, layout.width);
        if constexpr (is_lora<decltype(h.w)>)
            products(by_rows<T>(n, d, rank_of(h.w), {t, layout.rank},
                                {reinterpret_cast<const T*>(h.w.a.data), leading(h.w.a)}, 1, sums, layout.width));
        add_states_kernel<std::remove_const_t<decltype(h.dx)>> add;
        add.dx = h.dx, add.first = begin, add.beta = beta, add.sums = sums, add.width = layout.width, add.rows = flags;
        launch(add, n);
    }
    // what a row without a gradient has is kept out of the head's: 0·NaN would be NaN
    const auto keep = [&](const auto& from, index_t first, X* to, index_t width) {
        keep_states_kernel<std::remove_cvref_t<decltype(from)>, X> kernel;
        kernel.x = from, kernel.first = first, kernel.states = to, kernel.width = width, kernel.rows = flags;
        launch(kernel, n);
    };
    if (needs_states(h)) {
        auto* const states = reinterpret_cast<X*>(memory + layout.states); // the sums have been read
        keep(h.x, begin, states, layout.width);
        const row_major<T> x{reinterpret_cast<const T*>(states), layout.width};
        if (!h.dw.empty())
            products(by_rows<T>(v, d, n, {dz, layout.stride, true}, x, beta_head, h.dw.data, leading(h.dw)));
        if constexpr (is_lora<decltype(h.w)>)
            if (!h.w.da.empty())
                products(
                    by_rows<T>(rank_of(h.w), d, n, {t, layout.rank, true}, x, beta_head, h.w.da.data, leading(h.w.da)));
    }
    if constexpr (is_lora<decltype(h.w)>)
        if (!h.w.db.empty()) {
            auto* const u = reinterpret_cast<X*>(memory + layout.u);
            const matrix_view<const X, std::remove_cvref_t<decltype(h.x)>::memory_space> all(u, n, rank_of(h.w),
                                                                                             layout.rank);
            keep(all, 0, u, layout.rank);
            products(by_rows<T>(v, rank_of(h.w), n, {dz, layout.stride, true},
                                {reinterpret_cast<const T*>(u), layout.rank}, beta_head, h.w.db.data, leading(h.w.db)));
        }
    if (h.db.data != nullptr) {
        sum_columns_kernel<G> sum;
        sum.gradient = gradient, sum.stride = layout.stride, sum.ids = v, sum.count = n, sum.db = h.db.data;
        sum.beta = beta_head;
        launch(sum, (v + sum.ids_at_once - 1) / sum.ids_at_once);
    }
}

/// The steps of one call, in stream order; products(column_major_product<T>), and the rows of a block, whose logits are
/// there: run_rows(job of the block, frame, begin, end). `memory` holds the plan's bytes.
template <class Job, class Launch, class Products, class RunRows>
void each_block_of(const Job& job, const block_plan& plan, std::byte* memory, Launch&& launch, Products&& products,
                   RunRows&& run_rows) {
    const index_t rows = plan.batch.rows;
    auto frame = frame_of(plan.batch, env_of(job), memory);
    frame.rows = plan.rows;
    if constexpr (requires { job.student; })
        if constexpr (in_blocks<std::remove_cvref_t<decltype(job.student)>>)
            frame.env.beta = 0; // the block's; dx has the caller's
    std::byte* const sides = memory + plan.batch.bytes;
    launch_counts(plan.batch, frame, launch);
    for (index_t begin = 0; begin == 0 || begin < plan.rows; begin += plan.block) { // without rows a head's is 0
        const index_t end = plan.rows - begin < plan.block ? plan.rows : begin + plan.block;
        std::byte* at = sides;
        each_made(job, [&](const auto& side) {
            const block_layout layout(side, rows);
            fill_block(side, begin, end, layout, at, launch, products);
            at += layout.bytes;
        });
        run_rows(job_of_block(job, rows, begin, sides), frame, begin, end);
        if constexpr (requires { job.student; })
            if constexpr (in_blocks<std::remove_cvref_t<decltype(job.student)>>)
                if (job.student.has_gradient())
                    drain_block(job.student, begin, end,
                                is_lumped<std::remove_cvref_t<decltype(job.teacher)>> ? job.student.vocab() : job.vocab,
                                job.env.beta, block_layout(job.student, rows), sides, launch, products);
    }
}
template <class Job, class Launch, class Products>
void run_in_blocks(const Job& job, std::byte* memory, result* out, Launch&& launch, Products&& products) {
    const block_plan plan = block_plan_of(job);
    each_block_of(job, plan, memory, launch, products,
                  [&](const auto& block, const auto& frame, index_t begin, index_t end) {
                      launch_rows(block, plan.batch, frame, begin, end, memory, out, begin > 0, launch);
                  });
}

} // namespace OPD_ISA
} // namespace opd::detail
