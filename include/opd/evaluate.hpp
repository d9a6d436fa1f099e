// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The one call: the loss of an estimator and its gradient over a batch of rows.
//
//   auto r = opd::evaluate(be, student, teacher, estimator, env);
//
//   be         cpu_backend, cuda_backend, or your own (docs/concepts/backend.md). Keep the backend between calls: a
//              temporary, evaluate(cpu_backend{}, …), starts its threads and allocates its memory in every call
//   student    student::logits{view(z,N,V), view(dz,N,V)}, …
//   teacher    teacher::dense | support | samples | weighted
//   estimator  reverse_kl{}, jsd{.w = .3, .o = .3}, renormalised{reverse_kl{}}, mc{reverse_kl{}}, …
//   env        reduction, mask, weights, beta, policies; basic_env<space>
//
// In: the logits and the teacher cache. Out: r.loss (reduced), r.diagnostics, dz, and the outputs that env names.
// evaluate writes no input. Two equal calls give the same bits. evaluate allocates nothing of size V, and in steady
// state nothing at all.
//
// evaluate throws invalid_input before it writes anything, for shapes, strides, null pointers, numbers outside their
// range, and outputs that overlap another span of the call (dz on z is allowed). Under check::contents it also throws
// for NaN, +inf, rows without mass and bad ids. Otherwise it counts rows with bad contents, whose loss and gradient
// are 0; env.on_bad throws for them after everything is written.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/checks/contents.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/checks/types.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/error.hpp"
#include "opd/reduction.hpp"
#include "opd/row_program.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"

namespace opd {

/// A checked call, as a backend receives it. `vocab` is the number of ids that student and teacher share (less than the
/// student's columns only under vocabulary::drop_and_renormalise and for teacher::lumped).
template <class Student, class Teacher, class Estimator, space Space>
struct row_job {
    Student student;
    Teacher teacher;
    Estimator estimator;
    basic_env<Space> env;
    index_t rows = 0;
    index_t vocab = 0;
};

// clang-format off
/// A backend says where its memory lies and runs checked calls: `for_rows(row_job)` and, for those of score.hpp and
/// draw.hpp, `for_rows(plain_job)`. See docs/concepts/backend.md.
template <class B>
concept backend = requires { { B::memory_space } -> std::convertible_to<space>; };
/// Whether a backend runs a job: it has rows for this student, cache and estimator.
template <class B, class Job>
concept runs = backend<std::remove_cvref_t<B>> && requires(B&& b, const Job& job) { b.for_rows(job); };
/// A checked call without an estimator: how many rows, and which of them are kept (an env whose reduction is a sum).
template <class Job>
concept plain_job = requires(const Job& job) {
    { job.row_count() } -> std::convertible_to<index_t>;
    { job.as_env() } -> std::convertible_to<basic_env<Job::memory_space>>;
};
// clang-format on

namespace detail {

/// Where a backend's memory lies; host for what is no backend, so that the sentence in `evaluate` is what shows.
template <class B>
constexpr space space_of() {
    if constexpr (backend<B>)
        return B::memory_space;
    else
        return space::host;
}

} // namespace detail

namespace detail {
inline namespace OPD_ISA {

/// A device sends gradients of hidden states back for whole blocks of rows.
template <class Student, space S>
void check_routes(const basic_env<S>& e) {
    if constexpr (S == space::device && in_blocks<Student>)
        if (e.mask.has_route)
            throw unsupported("opd: rows of several routes with student::hidden are not offered on a device");
}

/// Whether the types of a call fit each other; if not, one sentence says why.
template <class Backend, class Student, class Teacher, class Estimator>
constexpr bool types_fit() {
    if constexpr (!backend<Backend>)
        static_assert(never<Backend>,
                      "opd: not a backend: it needs `static constexpr opd::space memory_space` and a template "
                      "`for_rows(job)` that returns the result; see docs/concepts/backend.md");
    else if constexpr (!parts_fit<Student>() || !parts_fit<Teacher>() || !parts_fit<Estimator>())
        return false; // they have said why
    else if constexpr (teacher_cache<Student> && student_source<Teacher>)
        static_assert(never<Student>, "opd: student and teacher are swapped: evaluate(backend, student, teacher, "
                                      "estimator, env)");
    else if constexpr (!student_source<Student>)
        static_assert(never<Student>,
                      "opd: the second argument is the student: student::logits{view(z, N, V), view(dz, "
                      "N, V)} or student::on_support");
    else if constexpr (!teacher_cache<Teacher>)
        static_assert(never<Teacher>,
                      "opd: the third argument is what is known of the teacher: teacher::dense, support, "
                      "samples or weighted");
    else if constexpr (!(Student::sparse_gradient || (row_source<Student> && gradient_sink<Student>) ||
                         made_source<Student>) ||
                       !(Teacher::kind != cache_kind::dense || row_source<Teacher> || made_source<Teacher>))
        static_assert(
            never<Student>,
            "opd: a source of rows answers rows(), vocab(), tile_size(), tile(place, begin), logit(place, id), has "
            "one_tile and temperature; a student's also has_gradient(), gradient_tile(place, begin) and "
            "gradient_at(place, id); see docs/concepts/source.md");
    else if constexpr (Student::sparse_gradient && is_ragged<Teacher> && has_row_map<Teacher>)
        static_assert(never<Student>, "opd: a gradient on the ids of a ragged_support lies where they do, so rows of "
                                      "teacher::at_rows would share it: use student::logits");
    else if constexpr (Student::memory_space != Backend::memory_space || Teacher::memory_space != Backend::memory_space)
        static_assert(never<Student>,
                      "opd: student and teacher views must lie in the backend's memory space (view for host, "
                      "device_view for device)");
    else
        return pairing_fits<Student, Teacher, Estimator>();
    return false;
}

/// Log-sum-exps over the vocabulary, of a call that is normalised over fewer ids.
template <class Teacher, class Estimator, space S>
void check_normalisers(const Teacher&, const Estimator&, const basic_env<S>& e) {
    if constexpr (has_kept_sets<Teacher>)
        if (!e.given_lse.empty())
            throw invalid_input("env.given_lse",
                                "is over the vocabulary: tokens with kept sets are normalised over those");
    if constexpr (offers_sparse_gradient<Estimator>())
        if (!e.lse.empty())
            throw invalid_input("env.lse", "a renormalised support has no log-sum-exp over the vocabulary");
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// The call as a backend receives it, once every check that needs no arithmetic has passed. Throws as `evaluate` does.
template <class Backend, class Student, class Teacher, class Estimator, space Space = detail::space_of<Backend>()>
auto checked_job(const Backend&, Student student, Teacher teacher, const Estimator& estimator,
                 std::type_identity_t<basic_env<Space>> e = {}) {
    if constexpr (Teacher::kind == cache_kind::dense) {
        const index_t n = student.rows();
        detail::check_student(student);
        detail::check_dense_teacher(teacher, n);
        detail::check_frozen<cache_kind::dense>(e.frozen, n, 0);
        index_t vocab = student.vocab();
        if (const index_t of_teacher = teacher.vocab(); of_teacher != vocab) {
            if (e.vocab == vocabulary::must_match && !is_lumped<Teacher>)
                throw invalid_input("teacher.y", "has " + std::to_string(of_teacher) + " columns, the student " +
                                                     std::to_string(vocab) +
                                                     "; set env.vocab = vocabulary::drop_and_renormalise to use the "
                                                     "common ids, or teacher::lumped{cache} to have the rest as one");
            vocab = of_teacher < vocab ? of_teacher : vocab;
            if (vocab < 1 && n > 0) throw invalid_input("teacher.y", "has no columns");
        }
        if constexpr (is_lumped<Teacher>) {
            if (e.vocab != vocabulary::must_match)
                throw invalid_input("env.vocab", "drops what teacher::lumped has as one bucket");
            if (teacher.common < 0 || teacher.common > vocab)
                throw invalid_input("teacher.common", "is " + std::to_string(teacher.common) +
                                                          "; the smaller vocabulary has " + std::to_string(vocab) +
                                                          " ids");
            if (teacher.common > 0) vocab = teacher.common;
        }
        detail::check_env(e, n);
        detail::check_routes<Student>(e);
        detail::check_overlaps(student, teacher, e);
        detail::validate_estimator(estimator);
        detail::check_selector<cache_kind::dense>(estimator, e, n);
        if constexpr (Space == space::host) {
            detail::check_env_contents(e, n);
            detail::check_row_map_contents(teacher, e.mask, n);
            if (e.checks == check::contents || e.on_infinite.act == infinite::action::raise)
                for (index_t r = 0; r < n; ++r)
                    if (e.mask.kept(r)) {
                        if constexpr (made_source<Student> || made_source<Teacher>)
                            detail::refuse_unseen_rows<Student>(), detail::refuse_unseen_rows<Teacher>();
                        else
                            detail::check_dense_contents(student, teacher, estimator, e, vocab, r);
                    }
        }
        return row_job<Student, Teacher, Estimator, Space>{student, teacher, estimator, e, n, vocab};
    } else {
        const index_t n = student.rows();
        detail::check_student(student, teacher);
        detail::check_slots(teacher, student, n);
        detail::check_frozen<Teacher::kind>(e.frozen, n, detail::most_slots(teacher));
        detail::check_env(e, n);
        detail::check_routes<Student>(e);
        detail::check_overlaps(student, teacher, e);
        detail::validate_estimator(estimator);
        detail::check_needs(teacher, estimator, e, n);
        detail::check_selector<Teacher::kind>(estimator, e, n);
        detail::check_normalisers(teacher, estimator, e);
        if constexpr (Space == space::host) {
            detail::check_env_contents(e, n);
            detail::check_row_map_contents(teacher, e.mask, n);
            if constexpr (Teacher::kind == cache_kind::weighted) detail::check_tails(teacher, e, n);
            if (e.checks == check::contents || e.on_infinite.act == infinite::action::raise)
                for (index_t r = 0; r < n; ++r)
                    if (e.mask.kept(r)) {
                        if constexpr (made_source<Student>)
                            detail::refuse_unseen_rows<Student>();
                        else
                            detail::check_sparse_contents(student, teacher, estimator, e, r);
                    }
            if constexpr (Teacher::kind != cache_kind::support)
                if (e.checks == check::contents) detail::check_mu_columns(teacher, e, n);
        }
        return row_job<Student, Teacher, Estimator, Space>{student, teacher, estimator, e, n, student.vocab()};
    }
}

/// Loss and gradient. See the head of this file; the estimator's own page says what it computes.
template <class Backend, class Student, class Teacher, class Estimator,
          space Space = detail::space_of<std::remove_cvref_t<Backend>>()>
auto evaluate(Backend&& be, Student student, Teacher teacher, const Estimator& estimator,
              std::type_identity_t<basic_env<Space>> e = {}) {
    if constexpr (detail::types_fit<std::remove_cvref_t<Backend>, Student, Teacher, Estimator>()) {
        const auto job = checked_job(be, student, teacher, estimator, e);
        if constexpr (runs<Backend, std::remove_cvref_t<decltype(job)>>) {
            auto r = be.for_rows(job);
            if constexpr (requires { r.on_bad = e.on_bad; })
                r.on_bad = e.on_bad; // thrown by fetch
            else
                detail::raise_infinite(r, e.on_infinite), detail::raise_bad(r, e.on_bad);
            return r;
        } else {
            static_assert(detail::never<Backend>,
                          "opd: this backend has no rows for this student, cache and estimator, or it is const (for "
                          "cuda_backend include opd/backends/cuda.cuh in a .cu file); see docs/support-matrix.md");
            return result{};
        }
    } else {
        return result{};
    }
}

/// Bytes of arena that the same call to `evaluate` needs, for callers who own all memory.
template <class Backend, class Student, class Teacher, class Estimator, space Space = detail::space_of<Backend>()>
std::size_t workspace_bytes(const Backend& be, Student student, Teacher teacher, const Estimator& estimator,
                            std::type_identity_t<basic_env<Space>> e = {}) {
    if constexpr (detail::types_fit<Backend, Student, Teacher, Estimator>())
        return be.workspace_bytes(checked_job(be, student, teacher, estimator, e));
    else
        return 0;
}

} // namespace OPD_ISA

} // namespace opd
