// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a divergence does to a tile of logits (opd/cpu/dense_machine.hpp), compiled in one unit for each set of types,
// formulas_<type>.cpp, and used by every unit whose sources have these types.
// A device has no such tiles.
#pragma once

#include "place.hpp"

#if !defined(OPD_KERNELS_CUDA) && !defined(OPD_KERNELS_HOST_RUN)
#include "opd/cpu/dense_machine.hpp"
#include "opd/estimators/any.hpp"

// The divergences of dense rows, as evaluate gets them: every line of choice::divergences, and eopd. A table of
// any.hpp that grew compiles here as it is, and slowly: the new line's functions are then in every unit.
// clang-format off
#define OPD_C_FORMULAS(X, T) \
    X(T, reverse_kl) X(T, forward_kl) X(T, jsd) X(T, skew_forward_kl) X(T, skew_reverse_kl) X(T, total_variation) \
    X(T, alpha_divergence) X(T, chi_squared) X(T, acceptance)
#define OPD_C_FORMULA(T, D) \
    template struct opd::detail::formula_functions<T, T, T, opd::selected<opd::D, opd::any_selector>, false>;
#define OPD_C_FORMULA_ELSEWHERE(T, D) \
    extern template struct opd::detail::formula_functions<T, T, T, opd::selected<opd::D, opd::any_selector>, false>;
// clang-format on

#if !defined(OPD_C_FORMULAS_HERE)
OPD_C_FORMULAS(OPD_C_FORMULA_ELSEWHERE, float)
OPD_C_FORMULAS(OPD_C_FORMULA_ELSEWHERE, double)
OPD_C_FORMULAS(OPD_C_FORMULA_ELSEWHERE, opd::bfloat16)
OPD_C_FORMULAS(OPD_C_FORMULA_ELSEWHERE, opd::half)
#endif
#endif
