// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend: the library's lanes over rows, the library's threads over row blocks. Needs the standard library
// alone, and threads (link Threads::Threads where the C library keeps them apart).
//
//   opd::cpu_backend be{.threads = 2};
//   auto r = opd::evaluate(be, …);
//
// Owns parked threads and a workspace that grows on the first calls and is kept; give `arena` to own the memory
// yourself. Use one backend from one thread at a time. Compile with -march=native or the like: without it the lanes
// are 128-bit and dense rows cost about seven times as much. eigen.hpp beside this file is the same backend with
// Eigen's types and products.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "opd/config.hpp"
#include "opd/cpu/batch.hpp"
#include "opd/evaluate.hpp"
#include "opd/rows/workspace.hpp"
#include "opd/threads.hpp"

namespace opd {
inline namespace OPD_ISA {

/// No products: this backend has no gemm.
struct no_products {};

/// The CPU backend with the products of a linear algebra library: a type with a static gemm, as eigen_products has
/// it. `threads` below 1 means 1.
template <class Products>
struct basic_cpu_backend {
    static constexpr space memory_space = space::host;
    int threads = 1;
    std::span<std::byte> arena = {}; ///< caller's memory; empty: the backend's own

    /// Threads and scratch, made by the first call.
    struct engine {
        std::unique_ptr<thread_team> team;
        workspace scratch;
    };
    std::unique_ptr<engine> state = {};

    /// Runs a checked call: a row_job (evaluate) or a plain_job (score, draw). Throws invalid_input, naming the
    /// workspace, where `arena` is too small. Compiled where it is first called; to compile it once for many units,
    /// instantiate it in one (`template result cpu_backend::for_rows(const row_job<…>&);`) and declare it, with
    /// `extern` before it, in the others.
    template <detail::has_lanes Job>
    result for_rows(const Job& job);

    /// Bytes of arena that `for_rows` of this job needs.
    template <detail::has_lanes Job>
    std::size_t workspace_bytes(const Job& job) const {
        return detail::host_plan_of(detail::as_run(job)).bytes(threads < 1 ? 1 : threads) + 64;
    }

    thread_team& team() {
        start();
        return *state->team;
    }
    std::span<std::byte> memory(std::size_t bytes) {
        start();
        return state->scratch.get(bytes, arena);
    }

    /// C = alpha·op(A) op(B) + beta·C by the products' library: run_to_run, not row-invariant. (M,K) (K,N) -> (M,N);
    /// op is the transpose where said. beta = 0 does not read C. Throws invalid_input where the shapes do not fit.
    template <class T>
    void gemm(bool trans_a, bool trans_b, T alpha, matrix_view<const T> a, matrix_view<const T> b, T beta,
              matrix_view<T> c) requires requires {
        Products::gemm(trans_a, trans_b, alpha, a, b, beta, c);
    }
    {
        const index_t m = trans_a ? a.cols : a.rows, k = trans_a ? a.rows : a.cols;
        const index_t kb = trans_b ? b.cols : b.rows, n = trans_b ? b.rows : b.cols;
        if (k != kb || c.rows != m || c.cols != n)
            throw invalid_input("gemm", "shapes do not fit: op(A) " + detail::shape(m, k) + ", op(B) " +
                                            detail::shape(kb, n) + ", C " + detail::shape(c.rows, c.cols));
        Products::gemm(trans_a, trans_b, alpha, a, b, beta, c);
    }

    void start() {
        if (!state) state = std::make_unique<engine>();
        if (!state->team || state->team->size() != (threads < 1 ? 1 : threads))
            state->team = std::make_unique<thread_team>(threads);
    }
};

template <class Products>
template <detail::has_lanes Job>
result basic_cpu_backend<Products>::for_rows(const Job& job) {
    const auto& run = detail::as_run(job);
    const detail::host_plan plan = detail::host_plan_of(run);
    thread_team& team = this->team();
    return detail::run_on_host(run, plan, team, memory(plan.bytes(team.size())));
}

/// Needs the standard library alone; products of hidden states are product.hpp's.
using cpu_backend = basic_cpu_backend<no_products>;

} // namespace OPD_ISA

} // namespace opd
