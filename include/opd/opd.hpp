// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Everything that needs the standard library alone, but for product.hpp, which refuses fast-math. Add a backend: opd/backends/eigen.hpp or opd/backends/cuda.hpp.
#pragma once

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#if !defined(__CUDACC__) // draws on the host's lanes
#include "opd/estimators/designs.hpp"
#endif
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/support.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/evaluate.hpp"
#include "opd/lanes.hpp"
#include "opd/rng.hpp"
#include "opd/row_program.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/token.hpp"
#include "opd/version.hpp"
#include "opd/view.hpp"
