// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/whole_rows_parts.hpp"

namespace trainer {

opd::result of_whole_rows(opd::cpu_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const opd::student::hidden<float>& student, const opd::teacher::hidden<float>& teacher,
                          const opd::env& env) {
    return evaluated(backend, divergence, rows, student, teacher, env);
}

opd::result of_whole_rows(opd::cpu_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const student_states<model_head>& student, const teacher_states<model_head>& teacher,
                          const opd::env& env) {
    return evaluated(backend, divergence, rows, student, teacher, env);
}

} // namespace trainer
