// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Matrix products whose bits depend on the operands alone: not on the batch around a row, the tiling, or the threads.
//
//   C[i,j] (+)= sum over k of A[i,k] B[k,j]
//
// Each output is one chain of multiply-adds in ascending k whose accumulator starts from C (or from +0):
// acc = fma(A[i,k], B[k,j], acc). Lanes run across outputs only, k is never split, a remainder runs through masked or
// padded lanes of the same chain. Cutting k and continuing from the stored C gives the same bits. A multiply-add is
// fused where the instruction set has FMA and rounds twice where it has not; one or the other in all of a build.
//
//   product_nn   C (M,N) = A (M,K) B (K,N)        forward with the weights stored (in, out); backward dX = dY W
//   product_tn   C (M,N) = A (K,M)^T B (K,N)      dW += dY^T X, rows of the batch in ascending order
//   product_nt   C (M,N) = A (M,K) B (N,K)^T      forward with the weights stored (out, in), read once
//
// All matrices are row-major with a row stride. A and C are float or double; B is of their type, or bfloat16 beside
// float: each of its numbers is widened, so the bits are those of a float B of the same numbers. Threads share out
// output tiles through an executor: `executor.parallel_for(count, f)` calls f(0) ... f(count - 1), in any order, on any
// thread.
//
// Exact: the order of operations, hence the bits within one build. An Eigen or BLAS product changes a row's bits with
// the number of rows, because it picks kernels by shape and splits k; it is the faster choice only where that is
// allowed.
#pragma once

#if defined(__FAST_MATH__)
#error "opd/product.hpp promises a fixed order of operations: compile this file without -ffast-math and -Ofast"
#endif

#include "opd/products/product_tiles.hpp"
