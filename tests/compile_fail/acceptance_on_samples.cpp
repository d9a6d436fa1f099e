// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A token by itself does not say what of the row is accepted.
// expect: acceptance is of the whole row
// control: FIXED
#include "opd/estimators/sampled.hpp"

#ifdef FIXED
constexpr bool fits = opd::mc<opd::total_variation>::well_formed;
#else
constexpr bool fits = opd::mc<opd::acceptance>::well_formed;
#endif
