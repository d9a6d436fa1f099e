// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/whole_rows.hpp"

#include "settings/estimator.hpp"

namespace trainer {
namespace {

template <class Student, class Teacher>
opd::result evaluated(opd::eigen_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                      const Student& student, const Teacher& teacher, const opd::env& env) {
    if (rows.eopd)
        return opd::evaluate(backend, student, teacher,
                             opd::selected{opd::weighted_sum{opd::reverse_kl{}, opd::forward_kl{}}, *rows.eopd}, env);
    return opd::evaluate(backend, student, teacher, opd::selected{divergence, rows.weights}, env);
}

} // namespace

opd::result of_whole_rows(opd::eigen_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const opd::student::logits<float>& student, const opd::teacher::dense<float>& teacher,
                          const opd::env& env) {
    return evaluated(backend, divergence, rows, student, teacher, env);
}
opd::result of_whole_rows(opd::eigen_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const opd::student::hidden<float>& student, const opd::teacher::hidden<float>& teacher,
                          const opd::env& env) {
    return evaluated(backend, divergence, rows, student, teacher, env);
}
opd::result of_whole_rows(opd::eigen_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                          const student_states<model_head>& student, const teacher_states<model_head>& teacher,
                          const opd::env& env) {
    return evaluated(backend, divergence, rows, student, teacher, env);
}

} // namespace trainer
