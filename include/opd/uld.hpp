// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ULD, the distance of two distributions over vocabularies that have nothing to do with each other: both sorted,
//
//   L = Σ_i |p_(i) - q_(i)|,   p_(1) ≥ p_(2) ≥ …, the shorter one padded with zeros,
//
// the Wasserstein distance under a cost of 1 between any two tokens.
//
//   evaluate(be, student, teacher::by_rank(student, teacher::dense{y}), uld{}, env)
//
// by_rank gives the student's id of rank i the teacher's i-th probability: Σ_v |p[v] - q'[v]| is ULD, its gradient at
// fixed ranks ULD's, c[v] = p[v] sign(p[v] - q'[v]). Ranks are by logits, of equals the lower id first. What a larger
// teacher's vocabulary has beyond is one bucket without a partner, as in teacher::lumped.
//
// Shapes: z (N,V), y (N,V'). Rows are sorted a block at a time within .budget, V·4 bytes a row; a thread takes 8 bytes
// an id of both; costs two sorts a row, hundreds of times a dense divergence. Exact but for teachers in double, whose
// logits are rounded to float. A row is bad where a divergence of the two would be.
//
// No token of the two need mean the same: near a teacher that is sure, a student that is as sure of another token has
// L = 0. Use chunks.hpp or vocab_projection.hpp where the text can be aligned. Student logits in memory; dz may lie on
// z. On the CPU backends.
//
// Source: Boizard et al. 2024 (arXiv 2402.12030), eq. 6.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/logits/own_rows.hpp"
#include "opd/row_program.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd {

/// Σ |p - q|, twice the total variation.
struct uld {
    static constexpr bool f_divergence = true;
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>&, const dense_entry<F>& e) const {
        return abs(e.p - e.q);
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const { // anchored, as total_variation's
        return e.p * (sign(e.delta + r.d_star) - sign(r.d_anchor()));
    }

private:
    template <class F>
    OPD_HD OPD_INLINE static F sign(F d) {
        return select(d > F(0), F(1), select(d < F(0), F(-1), F(0)));
    }
};

namespace detail {
inline namespace OPD_ISA {

/// The ids of a row of n logits from the largest down, of equals the lower first: behind each key, for who sorts them.
template <class T>
void sorted_ids(const T* x, index_t n, std::uint64_t* keys) {
    for (index_t v = 0; v < n; ++v) {
        const auto bits = bit_cast<std::uint32_t>(static_cast<float>(load_log(x[v])) + 0.0f); // -0 is 0
        const std::uint32_t ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
        keys[v] = std::uint64_t{~ascending} << 32 | static_cast<std::uint32_t>(v);
    }
    std::sort(keys, keys + n);
}
inline index_t id_of_key(std::uint64_t key) { return static_cast<index_t>(key & 0xffffffffu); }

} // namespace OPD_ISA
} // namespace detail

namespace teacher {

/// A teacher's logits in the order of the student's ids; what by_rank makes.
template <class Z, class Teacher>
struct ranked {
    static constexpr cache_kind kind = cache_kind::dense;
    using logit_type = float;
    static constexpr space memory_space = space::host;
    static constexpr bool in_blocks = true, fills_rows = true;
    matrix_view<const Z> z; ///< (N,V)
    Teacher of;             ///< (N,V')
    float temperature = 1;
    std::size_t budget = std::size_t{16} << 20; ///< bytes

    index_t rows() const { return of.rows(); }
    index_t vocab() const { return std::max(z.cols, of.vocab()); }
    void validate() const {
        opd::detail::check_dense_teacher(of, rows());
        if (z.cols >= index_t{1} << 32 || of.vocab() >= index_t{1} << 32)
            throw invalid_input("teacher", "has more ids than are sorted");
    }
    void check_rows(const row_mask<>& mask, index_t n) const { opd::detail::check_row_map_contents(of, mask, n); }
    void reads(opd::detail::call_spans& spans) const {
        if constexpr (requires { of.y; }) spans.reads("teacher.y", of.y);
        if constexpr (has_row_map<Teacher>) spans.reads("teacher.map", of.map);
    }

    struct block {
        float* logits = nullptr;
        std::size_t bytes = 0;
        block(const ranked& s, index_t rows, std::byte* at) {
            opd::detail::carver from{at};
            logits = from.take<float>(rows * s.vocab());
            bytes = from.used;
        }
    };
    std::size_t bytes_of_worker(index_t) const {
        opd::detail::carver from;
        (void)from.take<std::uint64_t>(z.cols), (void)from.take<std::uint64_t>(of.vocab());
        return from.used;
    }
    void ready(const block&, opd::detail::row_list, index_t, thread_team&, opd::detail::worker_floats) const {}
    void fill_rows(const block& memory, opd::detail::row_list rows, index_t begin, thread_team& team,
                   opd::detail::worker_floats workers) const {
        const index_t n = z.cols, m = of.vocab(), v = vocab();
        team.run(rows.count, [&](index_t i, int worker) {
            const index_t r = rows.at[i];
            opd::detail::carver from{reinterpret_cast<std::byte*>(workers.of(worker))};
            auto* const mine = from.take<std::uint64_t>(n);
            auto* const theirs = from.take<std::uint64_t>(m);
            const auto* const y = of.tile({r}, 0);
            opd::detail::sorted_ids(z.row(r), n, mine), opd::detail::sorted_ids(y, m, theirs);
            float* const to = memory.logits + (r - begin) * v;
            for (index_t j = 0; j < n; ++j)
                to[opd::detail::id_of_key(mine[j])] =
                    j < m ? static_cast<float>(opd::detail::load_log(y[opd::detail::id_of_key(theirs[j])]))
                          : opd::detail::neg_inf<float>();
            for (index_t j = n; j < m; ++j)
                to[j] = static_cast<float>(opd::detail::load_log(y[opd::detail::id_of_key(theirs[j])]));
        });
    }
};

/// The teacher's i-th probability at the student's id of rank i; for `uld`, see the head of this file.
template <class Z, class G, class Teacher>
auto by_rank(const student::logits<Z, G>& student, const Teacher& teacher) {
    static_assert(row_source<Teacher> && Teacher::one_tile && Teacher::kind == cache_kind::dense &&
                      !opd::detail::has_scratch<Teacher> && !is_lumped<Teacher>,
                  "opd: teacher::by_rank sorts whole rows of logits: teacher::dense or teacher::at_rows of one");
    ranked<Z, Teacher> rows{student.z, teacher, teacher.temperature};
    return lumped<ranked<Z, Teacher>>{rows, student.z.cols};
}

} // namespace teacher

} // namespace opd
