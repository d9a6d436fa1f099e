// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses and gradients: everything that needs the standard library alone, the CPU backend included (not under nvcc, whose host
// compiler has no lanes). Beside it: opd/sched.hpp, the schedulers; opd/product.hpp, which refuses fast-math; and the backends
// that need more, opd/backends/eigen.hpp and opd/backends/cuda.hpp.
#pragma once

#if !defined(__CUDACC__)
#include "opd/backends/cpu.hpp"
#endif
#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/draw.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/advantages.hpp"
#include "opd/estimators/any.hpp"
#include "opd/estimators/baselines.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/draft_weights.hpp"
#include "opd/estimators/m2po.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/selectors.hpp"
#include "opd/estimators/sequences.hpp"
#include "opd/estimators/shapes.hpp"
#include "opd/estimators/support.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/evaluate.hpp"
#include "opd/filter.hpp"
#include "opd/hidden.hpp"
#include "opd/id_overlap.hpp"
#include "opd/lanes.hpp"
#include "opd/penalties.hpp"
#include "opd/ratio_sketch.hpp"
#include "opd/rng.hpp"
#include "opd/row_program.hpp"
#include "opd/score.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"
#include "opd/version.hpp"
#include "opd/view.hpp"
