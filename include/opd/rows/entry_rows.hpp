// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose teacher knows few ids: what they have in common. The V-sized phases (normaliser, pullback) are the
// engine's; what lies between is in double, and the estimator's own row one thread's (sampled_rows.hpp,
// support_rows.hpp).
//
// The pullback dz[v] = g (c[v] - p[v] Σ c), g = w_r f_r / T, goes over the row in proportion to p (samples: of -g p
// Σc; a support: of what falls to the tail). An entry's c and its softmax term meet in one double expression before
// the single store: storing -p Σc first and adding c afterwards would round twice, which in bf16 destroys gradients
// near p = q.
#pragma once

#include <cstddef>

#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/select_rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/source.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct entry_state : selecting_state {
    row_sweep swept = {};
    index_t entries = 0; ///< filled slots
    double sum_c = 0;
    double share = 0; ///< of e^((z - z*)/T), z* the anchor of the sums, in dz of an id that is no entry
};

/// The student's normaliser, over all ids or those that are not `excluded`.
template <class Engine, class Rows, bool Excludes>
struct student_sweep : over_tiles<student_sweep<Engine, Rows, Excludes>, false> {
    using state_type = typename Rows::state_type;
    OPD_HD static bool due(const Rows& k, const state_type& st) { return k.sweeps(st); }
    OPD_HD static row_sweep start(const Rows& k, const state_type& st) {
        return begun_sweep<Engine>(row_sweep::begin(k.inv_s, 1, 1, false), st);
    }
    OPD_HD OPD_INLINE static void tile(const Rows&, const state_type& st, row_sweep& p, const auto& t, auto at) {
        using F = typename Engine::template number<typename Rows::Z>;
        if constexpr (Excludes)
            Engine::template sweep<F, false, raw_sums_needed{}>(p, t, at, st.excluded);
        else
            Engine::template sweep<F, false, raw_sums_needed{}>(p, t, at);
    }
    OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
    OPD_HD static void finish(const Rows&, state_type& st, const row_sweep& all) {
        st.swept = all;
        st.swept.template close<false, raw_sums_needed{}>(Excludes);
        st.report.bad |= st.swept.contents.bad;
        if (!Excludes && !st.report.bad) st.report.lse = st.swept.sums.lse();
    }
};

/// dz = beta dz + g(c - p Σc), in three phases. Rows have frame, student, vocab, inv_s and, of a row that is live,
/// `filled(st)`: st.entries ids with their c - p Σc.
template <class Engine, class Rows>
struct pullback {
    using state_type = typename Rows::state_type;
    using G = typename Rows::G;

    /// c becomes the entry's gradient, before dz overwrites z.
    struct prepare {
        static constexpr bool writes_gradient = true;
        OPD_HD static bool due(const Rows& k, const state_type& st) { return st.live && k.student.has_gradient(); }
        OPD_HD static void run(const Rows& k, const state_type& st, auto at) {
            const double g = st.factor / double(k.student.temperature);
            const float beta = k.frame.env.beta;
            entry_c* c = k.filled(st);
            for (index_t j = at.id; j < st.entries; j += at.count) {
                const index_t id = own_id(k.frame, c[j].id, k.vocab);
                if (id < 0) continue;
                const G& to = k.student.gradient_at(k.of_student(st), id);
                const double old = beta == 0 ? 0 : double(beta) * double(element<G>::load(to));
                c[j].c = old + g * c[j].c;
            }
        }
    };
    struct rest : writes_tiles<rest> {
        OPD_HD static bool due(const Rows& k, const state_type& st) { return st.live && k.student.has_gradient(); }
        OPD_HD OPD_INLINE static void tile(const Rows& k, const state_type& st, const auto& t, auto at) {
            const double g = st.factor / double(k.student.temperature);
            Engine::pull_back(t, st.swept.sums, g * st.share, k.frame.env.beta, at);
        }
    };
    struct scatter {
        static constexpr bool writes_gradient = true;
        OPD_HD static bool due(const Rows& k, const state_type& st) { return st.live && k.student.has_gradient(); }
        OPD_HD static void run(const Rows& k, const state_type& st, auto at) {
            const entry_c* c = k.filled(st);
            for (index_t j = at.id; j < st.entries; j += at.count) {
                const index_t id = own_id(k.frame, c[j].id, k.vocab);
                if (id < 0) continue;
                k.student.gradient_at(k.of_student(st), id) = element<G>::store(static_cast<arithmetic_t<G>>(c[j].c));
            }
        }
    };
    OPD_HD OPD_INLINE static void run(const Rows& k, auto& team) {
        team.template each<prepare>(k);
        team.template each<rest>(k);
        team.template each<scatter>(k);
        team.template each<zero_tiles<Rows>>(k);
        team.template each<clear_rest<Rows>>(k);
    }
};

/// What rows of entries have in common: the frame, the student, where a tile of it lies, the team's scratch.
template <class Engine, class Frame, class Student, class Teacher, class Estimator, class Arrays>
struct rows_of_entries {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using L = typename Teacher::log_type;
    static constexpr bool one_tile = Student::one_tile;

    Frame frame;
    Student student;
    Teacher teacher;
    Estimator estimator;
    index_t vocab;
    double inv_s;
    std::size_t student_from = 0; ///< whose the team's scratch is from there on; before it, the entries'

    rows_of_entries(const Frame& frame_, const Student& student_, const Teacher& teacher_, const Estimator& estimator_,
                    index_t vocab_)
        : frame(frame_), student(student_), teacher(teacher_), estimator(estimator_), vocab(vocab_),
          inv_s(1 / double(student_.temperature)) {
        carver scratch;
        (void)Arrays(scratch, slots());
        student_from = scratch.used;
    }

    std::size_t scratch_bytes() const { return student_from + scratch_of_source(student); }
    OPD_HD Arrays at(const row_state& st) const {
        carver scratch{st.scratch};
        return {scratch, slots()};
    }
    OPD_HD entry_c* filled(const row_state& st) const { return at(st).c; }
    OPD_HD index_t slots() const { return most_slots(teacher); }
    OPD_HD index_t tile_size() const { return student.tile_size(); }
    OPD_HD index_t tile_size_t() const { return student.tile_size(); }
    OPD_HD row_place of_student(const row_state& st) const { return {st.row, st.scratch + student_from}; }
    OPD_HD row_tile<Z, Z, G> tile(const row_state& st, index_t begin, index_t count) const {
        return {student.tile(of_student(st), begin), nullptr,
                student.has_gradient() ? student.gradient_tile(of_student(st), begin) : nullptr,
                first_id(frame) + begin, count};
    }
    /// Whose `logit` a slot of the cache reads: the student's, unless the frame knows the logit from elsewhere. A phase
    /// that asks for it says `reads_slots`.
    OPD_HD OPD_INLINE decltype(auto) student_at(const row_state& st, index_t slot) const {
        if constexpr (requires { frame.student_at(*this, st, slot); })
            return frame.student_at(*this, st, slot);
        else
            return (student);
    }
    OPD_HD bool live(const row_state& st) const { return st.live; }
    OPD_HD const double* given_lse(index_t row) const {
        return frame.env.given_lse.empty() ? nullptr : &frame.env.given_lse[row];
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
