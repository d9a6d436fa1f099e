// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend: the library's lanes over rows, the library's threads over row blocks; Eigen for adapters and for products
// at determinism::run_to_run or weaker (fixed-order products are in product.hpp).
//
//   opd::eigen_backend be{.threads = 2};
//   auto r = opd::evaluate(be, …);
//
// Owns parked threads and a workspace that grows on the first calls and is kept; give `arena` to own the memory yourself.
// Use one backend from one thread at a time. Eigen::setNbThreads is never touched; Eigen runs single-threaded inside.
// Compile with -march=native or the like: without it the lanes are 128-bit and dense rows cost about seven times as much.
#pragma once

#include <Eigen/Core>

#include <cstddef>
#include <memory>
#include <span>

#include "opd/backends/cpu_rows.hpp"
#include "opd/backends/workspace.hpp"
#include "opd/config.hpp"
#include "opd/evaluate.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd {

/// A row-major Eigen matrix, map or reference as a view; no copy.
template <class Derived>
auto view(Eigen::PlainObjectBase<Derived>& m) {
    static_assert(Derived::IsRowMajor, "opd: rows are contiguous: use a RowMajor Eigen matrix");
    return matrix_view<typename Derived::Scalar>(m.data(), m.rows(), m.cols(), m.outerStride());
}
template <class Derived>
auto view(const Eigen::PlainObjectBase<Derived>& m) {
    static_assert(Derived::IsRowMajor, "opd: rows are contiguous: use a RowMajor Eigen matrix");
    return matrix_view<const typename Derived::Scalar>(m.data(), m.rows(), m.cols(), m.outerStride());
}
template <class Derived>
auto view(Eigen::MapBase<Derived, Eigen::WriteAccessors>& m) {
    static_assert(Derived::IsRowMajor, "opd: rows are contiguous: use a RowMajor Eigen matrix");
    return matrix_view<typename Derived::Scalar>(m.data(), m.rows(), m.cols(), m.outerStride());
}

/// Storage of Eigen's own 16-bit types.
template <>
struct element<Eigen::bfloat16> : same_bits<Eigen::bfloat16, bfloat16> {};
template <>
struct element<Eigen::half> : same_bits<Eigen::half, half> {};

inline namespace OPD_ISA {

struct eigen_backend {
    static constexpr space memory_space = space::host;
    int threads = 1;
    std::span<std::byte> arena = {}; ///< caller's memory; empty: the backend's own

    /// Threads and scratch, made by the first call.
    struct engine {
        std::unique_ptr<thread_team> team;
        workspace scratch;
    };
    std::unique_ptr<engine> state = {};

    /// Loss and gradient of a checked call; called by evaluate. Compiled where it is first called; to compile it once for many
    /// units, instantiate it in one (`template result eigen_backend::for_rows(const row_job<…>&);`) and declare it, with
    /// `extern` before it, in the others.
    template <class Student, class Teacher, class Estimator>
        requires requires(const row_job<Student, Teacher, Estimator, space::host>& job) { detail::batch_of(job); }
    result for_rows(const row_job<Student, Teacher, Estimator, space::host>& job);

    template <class Z, class Id, class L>
    result for_rows(const token_logp_job<Z, Id, L>& job);

    /// Bytes of arena that `for_rows` of this job needs.
    template <class Student, class Teacher, class Estimator>
    std::size_t workspace_bytes(const row_job<Student, Teacher, Estimator, space::host>& job) const {
        return detail::batch_of(job).plan().bytes(threads < 1 ? 1 : threads) + 64;
    }

    thread_team& team() {
        start();
        return *state->team;
    }
    std::span<std::byte> memory(std::size_t bytes) {
        start();
        return state->scratch.get(bytes, arena);
    }

    /// C = alpha·op(A) op(B) + beta·C by Eigen: run_to_run, not row-invariant. (M,K) (K,N) -> (M,N)
    template <class T>
    void gemm(bool trans_a, bool trans_b, T alpha, matrix_view<const T> a, matrix_view<const T> b, T beta,
              matrix_view<T> c) {
        using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
        using map = Eigen::Map<const matrix, 0, Eigen::OuterStride<>>;
        const map ma(a.data, a.rows, a.cols, Eigen::OuterStride<>(a.stride));
        const map mb(b.data, b.rows, b.cols, Eigen::OuterStride<>(b.stride));
        Eigen::Map<matrix, 0, Eigen::OuterStride<>> mc(c.data, c.rows, c.cols, Eigen::OuterStride<>(c.stride));
        const index_t m = trans_a ? a.cols : a.rows, k = trans_a ? a.rows : a.cols;
        const index_t kb = trans_b ? b.cols : b.rows, n = trans_b ? b.rows : b.cols;
        if (k != kb || c.rows != m || c.cols != n)
            throw invalid_input("gemm", "shapes do not fit: op(A) " + detail::shape(m, k) + ", op(B) " +
                                            detail::shape(kb, n) + ", C " + detail::shape(c.rows, c.cols));
        if (beta == T(0))
            mc.setZero();
        else if (beta != T(1))
            mc *= beta;
        if (trans_a && trans_b)
            mc.noalias() += alpha * ma.transpose() * mb.transpose();
        else if (trans_a)
            mc.noalias() += alpha * ma.transpose() * mb;
        else if (trans_b)
            mc.noalias() += alpha * ma * mb.transpose();
        else
            mc.noalias() += alpha * ma * mb;
    }

    void start() {
        if (!state) state = std::make_unique<engine>();
        if (!state->team || state->team->size() != (threads < 1 ? 1 : threads))
            state->team = std::make_unique<thread_team>(threads);
    }
};

template <class Student, class Teacher, class Estimator>
    requires requires(const row_job<Student, Teacher, Estimator, space::host>& job) { detail::batch_of(job); }
result eigen_backend::for_rows(const row_job<Student, Teacher, Estimator, space::host>& job) {
    const auto batch = detail::batch_of(job);
    thread_team& team = this->team();
    return batch.run(team, memory(batch.plan().bytes(team.size())));
}

template <class Z, class Id, class L>
result eigen_backend::for_rows(const token_logp_job<Z, Id, L>& job) {
    const auto batch = detail::batch_of(job);
    thread_team& team = this->team();
    return batch.run(team, memory(batch.plan().bytes(team.size())));
}

} // namespace OPD_ISA

} // namespace opd
