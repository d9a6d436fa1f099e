// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What whole_rows.cpp compiles of logits, and whole_rows_hidden.cpp of hidden states beside a head of floats or as a
// model stores it: the rows of these two are four fifths the same.
#pragma once

#include "pipeline/whole_rows.hpp"

namespace trainer {

template <class Student, class Teacher>
opd::result evaluated(opd::cpu_backend& backend, const opd::any_dense& divergence, const row_choice& rows,
                      const Student& student, const Teacher& teacher, const opd::env& env) {
    if (rows.eopd)
        return opd::evaluate(backend, student, teacher,
                             opd::selected{opd::weighted_sum{opd::reverse_kl{}, opd::forward_kl{}}, *rows.eopd}, env);
    return opd::evaluate(backend, student, teacher, opd::selected{divergence, rows.weights}, env);
}

} // namespace trainer
