// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels between the products of a block from hidden states (blocks.hpp), each of one phase.
#pragma once

#include <cmath>
#include <cstddef>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tuning.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Which block of threads one is.
struct block_state {
    index_t row = 0;
    std::byte* scratch = nullptr;
};

/// A kernel of one phase.
template <class Kernel>
struct each_block {
    using state_type = block_state;
    template <class Team>
    OPD_HD void run(index_t block, Team& team) const {
        team.begin(block, nullptr);
        team.template each<typename Kernel::phase>(static_cast<const Kernel&>(*this));
    }
};

/// Which ids of which row a block of threads has.
struct row_chunk {
    index_t row, begin, end;
    OPD_HD row_chunk(index_t block, index_t chunks, index_t ids)
        : row(block / chunks), begin(block % chunks * gpu_tuning::chunk_of_ids),
          end(begin + gpu_tuning::chunk_of_ids < ids ? begin + gpu_tuning::chunk_of_ids : ids) {}
};

/// z = cap tanh((z + b)/cap); without a soft-cap z + b. A block of threads for each chunk of each row.
template <class X>
struct finish_logits_kernel : each_block<finish_logits_kernel<X>> {
    float* logits = nullptr;
    index_t stride = 0, ids = 0, chunks = 0;
    const X* bias = nullptr;
    float soft_cap = 0;

    struct phase {
        template <class At>
        OPD_HD static void run(const finish_logits_kernel& k, const block_state& st, At at) {
            const row_chunk mine(st.row, k.chunks, k.ids);
            float* const z = k.logits + mine.row * k.stride;
            for (index_t i = mine.begin + at.id; i < mine.end; i += at.count) {
                float x = z[i];
                if (k.bias != nullptr) x += float(element<X>::load(k.bias[i]));
                z[i] = k.soft_cap > 0 ? k.soft_cap * ::tanhf(x / k.soft_cap) : x;
            }
        }
    };
};

/// dz of logits before the soft-cap, 0 from id `common` on; flags say whether the chunk has a gradient.
template <class G>
struct finish_gradient_kernel {
    using state_type = block_state;
    const float* logits = nullptr;
    G* gradient = nullptr;
    index_t stride = 0, ids = 0, common = 0, chunks = 0;
    float soft_cap = 0;
    unsigned char* flags = nullptr; ///< (rows, chunks)

    struct phase { // one pass: it writes what it has looked at
        template <class At>
        OPD_HD static int part(const finish_gradient_kernel& k, const block_state& st, At at) {
            const row_chunk mine(st.row, k.chunks, k.ids);
            const float* const z = k.logits + mine.row * k.stride;
            G* const dz = k.gradient + mine.row * k.stride;
            int any = 0;
            for (index_t i = mine.begin + at.id; i < mine.end; i += at.count) {
                if (i >= k.common) {
                    dz[i] = element<G>::store(0);
                    continue;
                }
                const float g = element<G>::load(dz[i]);
                if (g == 0) continue; // of a bad row: its logits may be NaN
                any = 1;
                if (!(k.soft_cap > 0)) continue;
                const float t = z[i] / k.soft_cap;
                dz[i] = element<G>::store(g * (1 - t * t));
            }
            return any;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const finish_gradient_kernel& k, const block_state& st, int any) {
            k.flags[st.row] = static_cast<unsigned char>(any);
        }
    };
    template <class Team>
    OPD_HD void run(index_t block, Team& team) const {
        team.begin(block, nullptr);
        team.template fold<phase>(*this);
    }
};

/// Whether a row of the block has a gradient.
struct row_flags {
    const unsigned char* flags = nullptr;
    index_t chunks = 0;
    OPD_HD bool live(index_t row) const {
        int any = 0;
        for (index_t c = 0; c < chunks; ++c) any |= flags[row * chunks + c];
        return any != 0;
    }
};

/// dx = beta·dx + sums, a block of threads for each row.
template <class Sink>
struct add_states_kernel : each_block<add_states_kernel<Sink>> {
    Sink dx = {};
    index_t first = 0; ///< row of dx
    float beta = 0;
    const float* sums = nullptr;
    index_t width = 0;
    row_flags rows = {};

    struct phase {
        template <class At>
        OPD_HD static void run(const add_states_kernel& k, const block_state& st, At at) {
            const bool live = k.rows.live(st.row); // else the head's NaN times 0 may be there
            float* const dx = k.dx.row(k.first + st.row);
            const float* const sums = k.sums + st.row * k.width;
            for (index_t i = at.id; i < k.dx.cols; i += at.count) {
                scale_gradient(dx[i], k.beta);
                if (live) dx[i] += sums[i];
            }
            for (index_t i = at.id; i < k.dx.padding; i += at.count) dx[k.dx.cols + i] = 0;
        }
    };
};

/// x, or 0 where the row has no gradient. A block of threads for each row.
template <class Source, class X>
struct keep_states_kernel : each_block<keep_states_kernel<Source, X>> {
    Source x = {};
    index_t first = 0; ///< row of x
    X* states = nullptr;
    index_t width = 0;
    row_flags rows = {};

    struct phase {
        template <class At>
        OPD_HD static void run(const keep_states_kernel& k, const block_state& st, At at) {
            const bool live = k.rows.live(st.row);
            const auto* const x = k.x.row(k.first + st.row);
            X* const states = k.states + st.row * k.width;
            for (index_t i = at.id; i < k.x.cols; i += at.count) states[i] = live ? x[i] : element<X>::store(0);
        }
    };
};

/// scale·sums as the head is stored; 0 where the row has no gradient, if there are flags. A block of threads for each
/// row.
template <class X>
struct scale_update_kernel : each_block<scale_update_kernel<X>> {
    const float* sums = nullptr;
    X* to = nullptr;
    index_t stride = 0, rank = 0;
    float scale = 1;
    row_flags rows = {};

    struct phase {
        template <class At>
        OPD_HD static void run(const scale_update_kernel& k, const block_state& st, At at) {
            const bool live = k.rows.flags == nullptr || k.rows.live(st.row);
            for (index_t i = at.id; i < k.rank; i += at.count)
                k.to[st.row * k.stride + i] = element<X>::store(live ? k.scale * k.sums[st.row * k.stride + i] : 0.0f);
        }
    };
};

/// db = beta·db + Σ_r dz, row after row in double. A block of threads for `ids_at_once` ids.
template <class G>
struct sum_columns_kernel : each_block<sum_columns_kernel<G>> {
    static constexpr index_t ids_at_once = gpu_tuning::block_threads;
    const G* gradient = nullptr;
    index_t stride = 0, ids = 0, count = 0; ///< count: of rows
    float* db = nullptr;
    float beta = 0;

    struct phase {
        template <class At>
        OPD_HD static void run(const sum_columns_kernel& k, const block_state& st, At at) {
            const index_t begin = st.row * ids_at_once, end = begin + ids_at_once < k.ids ? begin + ids_at_once : k.ids;
            for (index_t i = begin + at.id; i < end; i += at.count) {
                double sum = 0;
                for (index_t r = 0; r < k.count; ++r) sum += double(element<G>::load(k.gradient[r * k.stride + i]));
                scale_gradient(k.db[i], k.beta);
                k.db[i] += float(sum);
            }
        }
    };
};

/// A head's gradient where the batch has no row. A block of threads for each row of dw, or of `ids_at_once` entries
/// of db.
template <class Sink>
struct scale_head_kernel : each_block<scale_head_kernel<Sink>> {
    Sink dw = {};
    float beta = 0;

    struct phase {
        template <class At>
        OPD_HD static void run(const scale_head_kernel& k, const block_state& st, At at) {
            float* const dw = k.dw.row(st.row);
            for (index_t i = at.id; i < k.dw.cols; i += at.count) scale_gradient(dw[i], k.beta);
        }
    };
};

/// Rows [first, …) of a head of the caller's own as the products read them. A block of threads for each row.
template <class Head, class X>
struct decode_head_kernel : each_block<decode_head_kernel<Head, X>> {
    static constexpr index_t piece = 32; ///< numbers that a thread asks for at a time
    Head head;
    index_t first, width, stride;
    X* to;
    decode_head_kernel(const Head& h, index_t first_, index_t width_, X* to_, index_t stride_)
        : head(h), first(first_), width(width_), stride(stride_), to(to_) {}

    struct phase {
        OPD_HD static void run(const decode_head_kernel& k, const block_state& st, auto at) {
            float numbers[piece];
            X* const to = k.to + st.row * k.stride;
            for (index_t d = at.id * piece; d < k.width; d += at.count * piece) {
                const index_t count = k.width - d < piece ? k.width - d : piece;
                k.head.copy(k.first + st.row, d, count, numbers);
                for (index_t j = 0; j < count; ++j) to[d + j] = element<X>::store(numbers[j]);
            }
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
