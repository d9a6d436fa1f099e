// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Products of matrices, whose kernels several files of the trainer use: model.cpp compiles them for all, those of
// double in opd_trainer_double.
#pragma once

#include "opd/product.hpp"

extern template void opd::product_tile(const opd::product_operands<float, float>&, opd::index_t);
extern template void opd::product_tile(const opd::product_operands<double, double>&, opd::index_t);
