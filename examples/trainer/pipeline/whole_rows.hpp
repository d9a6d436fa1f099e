// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences over the whole vocabulary, chosen at run time, of logits or of hidden states. Compiled once, in
// whole_rows.cpp and whole_rows_hidden.cpp: what else wants a KL of two models calls this.
#pragma once

#include "model/teacher.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/hidden.hpp"
#include "opd/opd.hpp"
#include "settings/config.hpp"
#include "settings/estimator.hpp"

namespace trainer {

/// opd::evaluate of the divergence, or of EOPD's mixture where `rows` says so, with the rows weighed as `rows` says.
opd::result of_whole_rows(opd::cpu_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const opd::student::logits<float>& student, const opd::teacher::dense<float>& teacher,
                          const opd::env& env);
opd::result of_whole_rows(opd::cpu_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const opd::student::hidden<float>& student, const opd::teacher::hidden<float>& teacher,
                          const opd::env& env);
opd::result of_whole_rows(opd::cpu_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const student_states<model_head>& student, const teacher_states<model_head>& teacher,
                          const opd::env& env);

} // namespace trainer
