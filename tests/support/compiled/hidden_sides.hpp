// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The products of a loss from hidden states, of registers with less than 16 lanes, and normal numbers: compiled once,
// in hidden_sides.cpp, and optimised: they are most of what tests from hidden states do.
#pragma once

#include "support/hidden_sides.hpp"

/// `kind`: extern (declared), or nothing (compiled here).
#define OPD_TEST_HEAD_PRODUCTS(kind, rows, vectors)                                                                    \
    kind template void head_micro<rows, vectors, false, fetch_rows>(index_t, const float*, index_t, index_t,           \
                                                                    const float*, const float*, index_t, float*,       \
                                                                    index_t, int, fetch_rows&);
#define OPD_TEST_PRODUCTS(kind)                                                                                        \
    namespace opd {                                                                                                    \
    kind template void product_tile(const product_operands<float>&, index_t);                                          \
    kind template void product_tile(const product_operands<float, bfloat16>&, index_t);                                \
    }                                                                                                                  \
    namespace opd::detail {                                                                                            \
    OPD_TEST_HEAD_PRODUCTS(kind, 8, 1)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 4, 1)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 2, 1)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 1, 1)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 6, 2)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 4, 2)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 2, 2)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 1, 2)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 4, 3)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 2, 3)                                                                                 \
    OPD_TEST_HEAD_PRODUCTS(kind, 1, 3)                                                                                 \
    }

OPD_TEST_PRODUCTS(extern)
