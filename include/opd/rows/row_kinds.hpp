// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which rows do a job: by the estimator's concept and what the teacher holds.
#pragma once

#include <type_traits>

#include "opd/config.hpp"
#include "opd/draw.hpp"
#include "opd/entries.hpp"
#include "opd/evaluate.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/dense_rows.hpp"
#include "opd/rows/draw_rows.hpp"
#include "opd/rows/fit_rows.hpp"
#include "opd/rows/kept_rows.hpp"
#include "opd/rows/kept_set_rows.hpp"
#include "opd/rows/renormalised_rows.hpp"
#include "opd/rows/rest_bucket.hpp"
#include "opd/rows/sampled_rows.hpp"
#include "opd/rows/score_rows.hpp"
#include "opd/rows/support_rows.hpp"
#include "opd/score.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Engine, class Student, class Teacher, class Program, space S, class Frame>
    requires(divergence<Program> && !chosen_at_run_time<Program> && Teacher::kind == cache_kind::dense &&
             !Student::sparse_gradient && (!is_lumped<Teacher> || (whole_rows<Student> && whole_rows<Teacher>)))
auto rows_of(const row_job<Student, Teacher, Program, S>& job, const Frame& frame) {
    using bucket = std::conditional_t<is_lumped<Teacher>, rest_bucket, no_bucket>;
    return dense_rows<Engine, Frame, Student, Teacher, Program, bucket>(frame, job.student, job.teacher, job.estimator,
                                                                        job.vocab);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(sampled_estimator<Estimator>&& reads_cache<Estimator, Teacher::kind>() && !Student::sparse_gradient &&
             !has_kept_sets<Teacher>)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return sampled_rows<Engine, Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator,
                                                                    job.vocab);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(sampled_estimator<Estimator>&& reads_cache<Estimator, Teacher::kind>() && whole_rows<Student> &&
             !Student::sparse_gradient && has_kept_sets<Teacher>)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return kept_set_rows<Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator, job.vocab,
                                                             job.rows);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(support_estimator<Estimator>&& Estimator::takes == Teacher::kind && !Student::sparse_gradient)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return support_rows<Engine, Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator,
                                                                    job.vocab);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(renormalised_estimator<Estimator>&& Estimator::takes == Teacher::kind && whole_rows<Student> &&
             !chosen_at_run_time<decltype(Estimator::on_support)>)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return renormalised_rows<Engine, Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator,
                                                                         job.vocab);
}
template <class Engine, class Z, class Id, class L, space S, class Rows, class Frame>
auto rows_of(const score_job<Z, Id, L, S, Rows>& job, const Frame& frame) {
    return score_rows<typename Engine::leaves, Frame, score_job<Z, Id, L, S, Rows>>(frame, job);
}
template <class Engine, class Z, class Cache, class L, space S, class Rows, class Frame>
auto rows_of(const kept_logp_job<Z, Cache, L, S, Rows>& job, const Frame& frame) {
    return kept_logp_rows<Frame, kept_logp_job<Z, Cache, L, S, Rows>>(frame, job);
}
template <class Engine, class Z, class Design, class Id, class L, class W, space S, class Rows, class Frame>
auto rows_of(const draw_job<Z, Design, Id, L, W, S, Rows>& job, const Frame& frame) {
    return draw_rows<typename Engine::leaves, Frame, draw_job<Z, Design, Id, L, W, S, Rows>>(frame, job);
}
template <class Engine, class Z, class Id, space S, class Rows, class Frame>
auto rows_of(const kept_job<Z, Id, S, Rows>& job, const Frame& frame) {
    return kept_rows<typename Engine::leaves, Frame, kept_job<Z, Id, S, Rows>>(frame, job);
}

} // namespace OPD_ISA
} // namespace opd::detail
