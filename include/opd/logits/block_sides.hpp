// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Hidden states as rows see them: a block of rows whose logits lie in memory, and a call of which a side has become
// one. CPU and GPU make the logits each in its own way; what the rows read is the same.
#pragma once

#include <type_traits>

#include "opd/config.hpp"
#include "opd/draw.hpp"
#include "opd/evaluate.hpp"
#include "opd/logits/logit_rows.hpp"
#include "opd/score.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// A side whose logits of the rows [first, first + …) are there, by blocks.
template <space Space>
struct side_block {
    using logit_type = float;
    static constexpr space memory_space = Space;
    static constexpr bool one_tile = true, whole_rows = true;
    float* logits = nullptr;
    index_t stride = 0, first = 0, row_count = 0, ids = 0;
    float temperature = 1;

    OPD_HD index_t rows() const { return row_count; }
    OPD_HD index_t vocab() const { return ids; }
    OPD_HD index_t tile_size() const { return ids; }
    OPD_HD const float* tile(row_place at, index_t begin) const { return logits + (at.row - first) * stride + begin; }
    OPD_HD float logit(row_place at, index_t id) const { return *tile(at, id); }
};
template <class G, space Space>
struct student_block : side_block<Space> {
    using gradient_type = G;
    static constexpr bool sparse_gradient = false;
    G* gradient = nullptr;
    bool wanted = false; ///< the gradient

    OPD_HD bool has_gradient() const { return wanted; }
    OPD_HD G* gradient_tile(row_place at, index_t begin) const {
        return gradient + (at.row - this->first) * this->stride + begin;
    }
    OPD_HD G& gradient_at(row_place at, index_t id) const { return *gradient_tile(at, id); }
};
template <space Space>
struct teacher_block : side_block<Space> {
    static constexpr cache_kind kind = cache_kind::dense;
};

/// A student's source, not a teacher's.
template <class Source>
inline constexpr bool trains_states = requires(const Source& s) {
    s.dx;
};
/// What rows read of a side whose logits are made in blocks; G: what dz is stored as.
template <class Source, class G>
struct block_rows {
    using type = teacher_block<Source::memory_space>;
};
template <class Source, class G>
    requires(trains_states<Source>)
struct block_rows<Source, G> {
    using type = student_block<G, Source::memory_space>;
};
template <class Cache, class G>
struct block_rows<teacher::lumped<Cache>, G> {
    using type = teacher::lumped<typename block_rows<Cache, G>::type>;
};
/// A side's block: rows from `first` on, `stride` numbers each.
template <class Block, class Side, class G>
Block block_of(const Side& side, index_t stride, index_t first, float* logits, G* gradient) {
    Block rows;
    rows.logits = logits, rows.stride = stride, rows.first = first;
    rows.row_count = side.rows(), rows.ids = side.vocab(), rows.temperature = side.temperature;
    if constexpr (is_lumped<Side>) rows.common = side.common;
    if constexpr (trains_states<Side>) rows.wanted = side.has_gradient(), rows.gradient = gradient;
    return rows;
}

/// The same call of other rows of logits.
template <class Z, class Id, class L, space S, class Rows, class Source>
auto with_rows(const score_job<Z, Id, L, S, Rows>& job, const rows_of_source<Source>& z) {
    return score_job<Z, Id, L, S, rows_of_source<Source>>{z, job.what, job.temperature, job.mask};
}
template <class Z, class Cache, class L, space S, class Rows, class Source>
auto with_rows(const kept_logp_job<Z, Cache, L, S, Rows>& job, const rows_of_source<Source>& z) {
    return kept_logp_job<Z, Cache, L, S, rows_of_source<Source>>{z,        job.cache, job.log_p, job.temperature,
                                                                 job.mask, job.lse};
}
template <class Z, class Design, class Id, class L, class W, space S, class Rows, class Source>
auto with_rows(const draw_job<Z, Design, Id, L, W, S, Rows>& job, const rows_of_source<Source>& z) {
    return draw_job<Z, Design, Id, L, W, S, rows_of_source<Source>>{z, job.design, job.keys, job.out, job.options};
}
template <class Z, class Id, space S, class Rows, class Source>
auto with_rows(const kept_job<Z, Id, S, Rows>& job, const rows_of_source<Source>& z) {
    return kept_job<Z, Id, S, rows_of_source<Source>>{z, job.cut, job.offsets, job.ids, job.mask};
}
template <class OldStudent, class OldTeacher, class Student, class Teacher, class Estimator, space S>
auto with_sides(const row_job<OldStudent, OldTeacher, Estimator, S>& job, const Student& student,
                const Teacher& teacher) {
    return row_job<Student, Teacher, Estimator, S>{student, teacher, job.estimator, job.env, job.rows, job.vocab};
}
/// f(side) for each side of a call whose logits are made here, the student first.
template <class Job, class Function>
void each_made(const Job& job, Function&& f) {
    const auto visit = [&](const auto& side) {
        if constexpr (in_blocks<std::remove_cvref_t<decltype(side)>>) f(side);
    };
    if constexpr (requires { job.student; })
        visit(job.student), visit(job.teacher);
    else if constexpr (requires { job.z.source; })
        visit(job.z.source);
}
/// The same call with make(side) for each side whose logits are made here, the student first.
template <class Job, class Make>
auto with_made(const Job& job, Make&& make) {
    const auto made = [&](const auto& side) {
        if constexpr (in_blocks<std::remove_cvref_t<decltype(side)>>)
            return make(side);
        else
            return side;
    };
    if constexpr (plain_job<Job>) {
        return with_rows(job, rows_of_source(made(job.z.source)));
    } else {
        const auto student = made(job.student);
        return with_sides(job, student, made(job.teacher));
    }
}

} // namespace OPD_ISA
} // namespace opd::detail
