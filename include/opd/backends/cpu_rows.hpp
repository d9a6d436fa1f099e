// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which batch runs a job on the CPU, by cache and by the estimator's concept (entries.hpp).
#pragma once

#include "opd/backends/cpu_batch.hpp"
#include "opd/backends/cpu_dense.hpp"
#include "opd/backends/cpu_sparse.hpp"
#include "opd/entries.hpp"
#include "opd/evaluate.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Which batch runs a job.
template <class Z, class G, class Y, class Program>
auto batch_of(const row_job<student::logits<Z, G>, teacher::dense<Y>, Program, space::host>& job) {
    return dense_batch<Z, G, Y, Program>{job};
}
template <class Student, class Id, class L, class Estimator>
    requires renormalised_estimator<Estimator>
auto batch_of(const row_job<Student, teacher::support<Id, L>, Estimator, space::host>& job) {
    return renormalised_batch<Student, Id, L, Estimator>{job};
}
template <class Z, class G, class Id, class L, class Estimator>
    requires support_estimator<Estimator>
auto batch_of(const row_job<student::logits<Z, G>, teacher::support<Id, L>, Estimator, space::host>& job) {
    return support_batch<Z, G, Id, L, Estimator>{job};
}
template <class Z, class G, class Teacher, class Estimator>
    requires(sampled_estimator<Estimator>&& Estimator::takes == Teacher::kind)
auto batch_of(const row_job<student::logits<Z, G>, Teacher, Estimator, space::host>& job) {
    return sampled_batch<Z, G, Teacher, Estimator>{job};
}
template <class Z, class Id, class L>
auto batch_of(const token_logp_job<Z, Id, L>& job) {
    return logp_batch<Z, Id, L>{job};
}

} // namespace OPD_ISA
} // namespace opd::detail
