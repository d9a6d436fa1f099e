// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A matrix product as BLAS is told of it. No CUDA header: a plain loop stands in for cuBLAS where tests run a call on
// the host.
#pragma once

#include "opd/config.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What BLAS is told: C = op(A) op(B) + beta·C, (m,k) (k,n) -> (m,n), every matrix by columns, ld elements from one
/// to the next. op is the transpose where said. beta = 0: C is not read.
template <class T>
struct column_major_product {
    bool transpose_a, transpose_b;
    index_t m, n, k;
    const T* a;
    index_t lda;
    const T* b;
    index_t ldb;
    float beta;
    float* c;
    index_t ldc;
};

/// A matrix by rows, `stride` elements from one to the next; transposed: it is its transpose that stands in the
/// product.
template <class T>
struct row_major {
    const T* data;
    index_t stride;
    bool transposed = false;
};

/// C = A B + beta·C, (m,k) (k,n) -> (m,n), by rows: the memory of C is that of Cᵀ = Bᵀ Aᵀ by columns.
template <class T>
column_major_product<T> by_rows(index_t m, index_t n, index_t k, row_major<T> a, row_major<T> b, float beta, float* c,
                                index_t stride_c) {
    return {b.transposed, a.transposed, n, m, k, b.data, b.stride, a.data, a.stride, beta, c, stride_c};
}

/// What BLAS takes for the distance of rows: of a single row any stride is allowed in a view.
template <class View>
index_t leading(const View& v) {
    return v.rows > 1 ? v.stride : v.cols;
}

} // namespace OPD_ISA
} // namespace opd::detail
