// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a support over which both sides are renormalised:
//
//   gather · a dense row over k entries, in double · scatter                   k reads, k writes (dense dz: V writes)
//
// k is the cache's, or each row's own. Id -1 is an unused slot. Of a student in hidden states the ids' logits alone
// are made, and the gradient stays one of k numbers (logits/gathered_logits.hpp).
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/rows/dense_rows.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// k logits in a team's scratch, as a source of dense rows.
template <class T, space Space>
struct gathered_logits {
    using logit_type = T;
    using gradient_type = T;
    static constexpr space memory_space = Space;
    static constexpr bool one_tile = true;
    index_t count;
    float temperature;
    bool gradient = false;
    std::size_t from = 0, gradient_from = 0; ///< in the scratch

    OPD_HD index_t tile_size() const { return count; }
    OPD_HD const T* tile(row_place at, index_t begin) const {
        return reinterpret_cast<const T*>(at.scratch + from) + begin;
    }
    OPD_HD const T& logit(row_place at, index_t i) const { return tile(at, 0)[i]; }
    OPD_HD bool has_gradient() const { return gradient; }
    OPD_HD T* gradient_tile(row_place at, index_t begin) const {
        return reinterpret_cast<T*>(at.scratch + gradient_from) + begin;
    }
};

/// The same where every row has its own number of them.
template <class T, class Teacher>
struct ragged_logits : gathered_logits<T, Teacher::memory_space> {
    Teacher cache;
    OPD_HD index_t ids_of(row_place at) const { return slots_of(cache, at.row).count; }
};

/// The divergence on the support, with the selector of the whole.
template <class Estimator>
auto program_on_support(const Estimator& e) {
    using divergence = std::remove_cvref_t<decltype(e.on_support)>;
    if constexpr (has_selector<Estimator>)
        return typename Estimator::template on<divergence>{e.on_support, e.selector};
    else
        return divergence(e.on_support);
}

/// The dense rows that a support's entries are.
template <class Engine, class Frame, class Student, class Teacher, class Program>
struct rows_on_support {
    using type = dense_rows<Engine, Frame, Student, Teacher, Program>;
};

template <class Engine, class Frame, class Student, class Teacher, class Estimator>
struct renormalised_rows {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using L = typename Teacher::log_type;
    using value = double; ///< z and log q lie a log-sum-exp apart: their difference has no digits to lose
    using Program = std::remove_cvref_t<decltype(program_on_support(std::declval<const Estimator&>()))>;
    static constexpr space memory_space = Student::memory_space;
    using source = gathered_logits<value, memory_space>;
    using inner_student = std::conditional_t<is_ragged<Teacher>, ragged_logits<value, Teacher>, source>;
    using inner_rows =
        typename rows_on_support<Engine, typename whole_frame<Frame>::type, inner_student, source, Program>::type;
    using state_type = typename inner_rows::state_type;
    static constexpr bool few_entries = Student::sparse_gradient; ///< a GPU's block need not be large

    Frame frame;
    Student student;
    Teacher teacher;
    index_t vocab;
    inner_rows inner;                            // over the team's gathered entries
    std::size_t engine_bytes = 0, all_bytes = 0; ///< of a team's scratch: the engine's, which lies first, and all

    renormalised_rows(const Frame& frame_, const Student& student_, const Teacher& teacher_,
                      const Estimator& estimator_, index_t vocab_)
        : frame(frame_), student(student_), teacher(teacher_), vocab(vocab_),
          inner(frame_, gathered(), source{slots(), 1}, program_on_support(estimator_), slots()) {
        engine_bytes = inner.student_from;
        carver scratch;
        scratch.used = engine_bytes;
        const arrays a(scratch, slots());
        all_bytes = scratch.used;
        inner.frame.env.beta = 0;
        inner.frame.env.given_lse = {}; // over the vocabulary: for Z_p
        inner.student.from = a.z_at, inner.student.gradient_from = a.dz_at, inner.teacher.from = a.y_at;
        inner.student_from = inner.teacher_from = 0; // both lie in these rows' scratch
    }

    inner_student gathered() const {
        const source even{slots(), student.temperature, student.has_gradient()};
        if constexpr (is_ragged<Teacher>)
            return {even, teacher};
        else
            return even;
    }

    struct arrays {
        value *z, *y, *dz;
        std::byte* set; // the engine's
        std::size_t z_at = 0, y_at = 0, dz_at = 0;
        OPD_HD arrays(carver& scratch, index_t k) {
            z_at = scratch.used, z = scratch.take<value>(k);
            y_at = scratch.used, y = scratch.take<value>(k);
            dz_at = scratch.used, dz = scratch.take<value>(k);
            set = scratch.take<std::byte>(Engine::repeats_bytes(k));
        }
    };
    std::size_t scratch_bytes() const { return all_bytes; }
    OPD_HD arrays at(const state_type& st) const {
        carver scratch{st.scratch};
        scratch.used = engine_bytes;
        return {scratch, slots()};
    }
    OPD_HD index_t slots() const { return most_slots(teacher); }
    /// The ids of a row as the student has them, and the most that one has.
    OPD_HD auto slots_at(index_t row) const { return own_slots(frame, slots_of(teacher, row), vocab); }
    OPD_HD index_t width() const { return slots(); }

    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        team.template fold<check_ids>(*this);
        team.template each<gather>(*this);
        team.template fold<inspect>(*this);
        inner.value(team);
        team.template each<count>(*this);
        inner.gradient(team);
        team.template each<clear>(*this);
        team.template each<scatter>(*this);
    }

    /// The ids' logits lie far apart: all are asked for before the first is waited for.
    struct check_ids : finds_bad {
        OPD_HD OPD_INLINE static int part(const renormalised_rows& k, const state_type& st, auto at) {
            const auto row = slots_of(k.teacher, st.row);
            for (index_t j = at.id; j < row.count; j += at.count) {
                const index_t id = own_id(k.frame, static_cast<index_t>(row.ids[j]), k.vocab);
                if constexpr (requires { &k.student.logit({st.row}, id); }) // else made as it is read
                    if (id >= 0 && id < k.vocab) Engine::fetch(&k.student.logit({st.row}, id));
            }
            return Engine::repeats(row.ids, row.count, whole_vocab(k.frame, k.vocab), k.at(st).set, at);
        }
    };
    /// An unused slot is a token that neither side gives mass.
    struct gather : if_good {
        OPD_HD static void run(const renormalised_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            const auto row = slots_of(k.teacher, st.row);
            const auto own = k.slots_at(st.row);
            if constexpr (makes_ids<Student>) k.student.make(st.row, own, a.z);
            for (index_t j = at.id; j < row.count; j += at.count) {
                const auto id = static_cast<index_t>(own.ids[j]);
                if constexpr (!makes_ids<Student>)
                    a.z[j] = id < 0 ? neg_inf<value>() : static_cast<value>(load_log(k.student.logit({st.row}, id)));
                a.y[j] = row.ids[j] == -1 ? neg_inf<value>() : static_cast<value>(load_log(row.log_q[j]));
            }
        }
    };
    /// Log-probs above 0 are none.
    struct inspect : finds_bad {
        static constexpr bool reads_slots = true;
        OPD_HD static int part(const renormalised_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            const index_t slots = slots_of(k.teacher, st.row).count;
            int bad = !k.frame.env.given_lse.empty() && !is_finite(k.frame.env.given_lse[st.row]);
            for (index_t j = at.id; j < slots; j += at.count) bad |= a.y[j] > value(1e-3);
            return bad;
        }
    };
    /// Z_q, and Z_p where the log-sum-exp over the vocabulary is given: this loss does not need it.
    struct count : if_good, by_one<count> {
        OPD_HD static void once(const renormalised_rows& k, state_type& st) {
            diagnostics& d = st.partial.diagnostics;
            ++d.support_rows;
            if (k.frame.env.given_lse.empty()) return;
            const double lse = k.frame.env.given_lse[st.row], inv_t = 1 / double(k.student.temperature);
            const arrays a = k.at(st);
            detail::count_masses(
                d, slots_of(k.teacher, st.row).count, [&](index_t j) { return a.z[j] * inv_t - lse; },
                [&](index_t j) { return a.y[j]; });
        }
    };
    struct clear {
        static constexpr bool writes_gradient = true;
        OPD_HD static void run(const renormalised_rows& k, const state_type& st, auto at) {
            if constexpr (makes_ids<Student>) {
                k.student.clear(st.row, k.slots_at(st.row));
            } else if constexpr (Student::sparse_gradient && is_ragged<Teacher>) {
                if (!k.student.has_gradient()) return;
                const auto row = slots_of(k.teacher, st.row);
                for (index_t j = at.id; j < row.count; j += at.count)
                    scale_gradient(k.student.gradient_at({0}, row.first + j), k.frame.env.beta);
            } else {
                clear_columns(k.student, st.row, 0, k.frame.env.beta, at);
            }
        }
    };
    struct scatter : if_good {
        static constexpr bool writes_gradient = true;
        OPD_HD static void run(const renormalised_rows& k, state_type& st, auto at) {
            if (!k.student.has_gradient()) return;
            const arrays a = k.at(st);
            const value* dz = a.dz;
            if constexpr (makes_ids<Student>) {
                k.student.take_back(st.row, k.slots_at(st.row), dz, a.z);
            } else {
                const auto row = slots_of(k.teacher, st.row);
                const auto own = k.slots_at(st.row);
                constexpr bool in_line = Student::sparse_gradient && is_ragged<Teacher>;
                for (index_t j = at.id; j < row.count; j += at.count) {
                    const auto id = static_cast<index_t>(own.ids[j]);
                    if (id < 0) continue;
                    G& to =
                        k.student.gradient_at({in_line ? 0 : st.row}, Student::sparse_gradient ? row.first + j : id);
                    const value old = k.frame.env.beta == 0 ? value(0) : static_cast<value>(element<G>::load(to));
                    to = element<G>::store(static_cast<arithmetic_t<G>>(old + dz[j]));
                }
            }
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
