// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a rank checks of a call on its shard before anything is written, and what it tells the others so that all see
// whether their shards make up the vocabulary.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/checks/contents.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/teacher.hpp"
#include "opd/vocab_parallel.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Σ of the ids [first, first + count), and of each the number of common ids, which ranks must agree on.
template <class Teacher>
std::uint64_t sum_of_ids(const Teacher& teacher, index_t first_id, index_t ids) {
    auto first = static_cast<std::uint64_t>(first_id);
    const auto count = static_cast<std::uint64_t>(ids);
    if constexpr (is_lumped<Teacher>) first += static_cast<std::uint64_t>(teacher.common);
    return count == 0 ? 0 : first * count + (count % 2 == 0 ? count / 2 * (count - 1) : (count - 1) / 2 * count);
}
template <class Job>
partials_head head_of_shard(const Job& job, index_t first, std::uint64_t round, index_t items, std::size_t stride) {
    index_t ids = job.vocab;
    if constexpr (is_lumped<decltype(Job::teacher)>) ids = std::max(job.student.vocab(), job.teacher.vocab());
    return {round, static_cast<std::uint64_t>(items), stride, static_cast<std::uint64_t>(ids),
            sum_of_ids(job.teacher, first, ids)};
}

/// The checks of `evaluate` that a rank can make by itself. A shard may be empty.
template <class Student, class Teacher, class Estimator, space S>
row_job<Student, Teacher, Estimator, S> checked_shard_job(const vocab_shard& shard, Student student, Teacher teacher,
                                                          const Estimator& estimator, const basic_env<S>& e) {
    const index_t n = student.rows();
    index_t ids = student.vocab(), held = ids; // of the softmax; of the shard
    if (ids > 0) check_student(student);
    if (e.checks == check::contents)
        throw unsupported("opd: check::contents reads whole rows before the call, and a rank has a shard of them: use "
                          "check::count; bad rows are the same on every rank");
    if (e.level == determinism::tiling_invariant)
        throw invalid_input("env.level", "is tiling_invariant: shards of a vocabulary are folded where they begin");
    if constexpr (Teacher::kind == cache_kind::dense) {
        const index_t known = teacher.vocab();
        if (known > 0)
            check_dense_teacher(teacher, n);
        else if (teacher.rows() != n)
            throw invalid_input("teacher",
                                "has " + std::to_string(teacher.rows()) + " rows, the student " + std::to_string(n));
        if (known != ids && e.vocab == vocabulary::must_match && !is_lumped<Teacher>)
            throw invalid_input("teacher.y", "has " + std::to_string(known) + " ids of this shard, the student " +
                                                 std::to_string(ids) +
                                                 "; set env.vocab = vocabulary::drop_and_renormalise to use the "
                                                 "common ids");
        if constexpr (is_lumped<Teacher>) {
            if (e.vocab != vocabulary::must_match)
                throw invalid_input("env.vocab", "drops what teacher::lumped has as one bucket");
            if (teacher.common < 1 || teacher.common > shard.total)
                throw invalid_input("teacher.common", "is " + std::to_string(teacher.common) + " of " +
                                                          std::to_string(shard.total) +
                                                          " ids: a rank does not see both whole vocabularies, so say "
                                                          "how many ids they share");
            held = std::max(ids, known);
            const index_t both = std::clamp<index_t>(teacher.common - shard.first, 0, held);
            if (std::min(ids, known) < both)
                throw invalid_input("teacher.common",
                                    "is " + std::to_string(teacher.common) + ", so " + std::to_string(both) +
                                        " ids of this shard are common; the "
                                        "student has " +
                                        std::to_string(ids) + ", the teacher " + std::to_string(known));
            ids = both;
        } else {
            held = ids = std::min(ids, known);
        }
    } else {
        struct {
            index_t ids;
            index_t vocab() const { return ids; }
        } const whole{shard.total};
        check_slots(teacher, whole, n);
        check_needs(teacher, estimator, e, n);
        check_normalisers(teacher, estimator, e);
        if constexpr (S == space::host && Teacher::kind == cache_kind::weighted) check_tails(teacher, e, n);
    }
    if (shard.total < 1 && n > 0) throw invalid_input("shard.total", "must be at least 1");
    if (shard.first < 0 || shard.first > shard.total - held)
        throw invalid_input("shard.first", "is " + std::to_string(shard.first) + " for " + std::to_string(held) +
                                               " ids of " + std::to_string(shard.total));
    if constexpr (Teacher::kind == cache_kind::dense)
        check_frozen<cache_kind::dense>(e.frozen, n, 0);
    else
        check_frozen<Teacher::kind>(e.frozen, n, most_slots(teacher));
    check_env(e, n);
    if (e.mask.has_route) throw unsupported("opd: a call of several routes (routes.hpp) is not one of shards");
    check_overlaps(student, teacher, e);
    validate_estimator(estimator);
    check_selector<Teacher::kind>(estimator, e, n);
    if constexpr (S == space::host) check_row_map_contents(teacher, e.mask, n), check_env_contents(e, n);
    return {student, teacher, estimator, e, n, ids};
}

} // namespace OPD_ISA
} // namespace opd::detail
