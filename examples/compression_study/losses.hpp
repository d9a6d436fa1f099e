// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The student's losses against each kind of cache: a unit of their own, since each compiles for seconds.
#pragma once

#include <vector>

#include "opd/backends/cpu.hpp"
#include "study.hpp"

namespace compression_study {

/// Sum over the rows of the student's loss, and its gradient (N,V). losses.cpp has the pairs of teacher and estimator.
template <class Teacher, class Estimator>
double loss_of(opd::cpu_backend& backend, const world& w, const Teacher& teacher, const Estimator& estimator,
               std::vector<float>& gradient);

} // namespace compression_study
