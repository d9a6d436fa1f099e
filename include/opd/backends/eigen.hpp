// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend (cpu.hpp) with Eigen: its matrices as views, its 16-bit types as storage, its products for `gemm`.
//
//   opd::eigen_backend be{.threads = 2};
//   auto r = opd::evaluate(be, …);
//
// Eigen::setNbThreads is never touched; Eigen runs single-threaded inside. Its products are at
// determinism::run_to_run or weaker; fixed-order products are in product.hpp.
#pragma once

#include <Eigen/Core>

#include "opd/backends/cpu.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
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

/// gemm of basic_cpu_backend, which has checked the shapes, by Eigen.
struct eigen_products {
    template <class T>
    static void gemm(bool trans_a, bool trans_b, T alpha, matrix_view<const T> a, matrix_view<const T> b, T beta,
                     matrix_view<T> c) {
        using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
        using map = Eigen::Map<const matrix, 0, Eigen::OuterStride<>>;
        const map ma(a.data, a.rows, a.cols, Eigen::OuterStride<>(a.stride));
        const map mb(b.data, b.rows, b.cols, Eigen::OuterStride<>(b.stride));
        Eigen::Map<matrix, 0, Eigen::OuterStride<>> mc(c.data, c.rows, c.cols, Eigen::OuterStride<>(c.stride));
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
};

/// The same lanes and bits as cpu_backend; `gemm` is Eigen's.
using eigen_backend = basic_cpu_backend<eigen_products>;

} // namespace OPD_ISA

} // namespace opd
