// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose teacher knows few ids, by the estimator's concept (entries.hpp), and log p of given ids. The V-sized phases
// (normaliser, pullback) are the engine's; what lies between is in double, the estimator's own row one thread's.
//
//   sampled        sweep (or the given log-sum-exp) · gather · the estimator · pullback       2 reads (1), 1 write
//   support        gather · sweep of v not in S · the estimator · pullback                    2 reads, 1 write
//   renormalised   gather · a dense row over k entries · scatter             k reads, k writes (dense dz: V writes)
//   log p          sweep · gather                                                             1 read
//
// The pullback dz[v] = g (c[v] - p[v] Σ c), g = w_r f_r / T, goes over the row in proportion to p (samples: of -g p Σc; a support:
// of what falls to the tail). An entry's c and its softmax term meet in one double expression before the single store: storing
// -p Σc first and adding c afterwards would round twice, which in bf16 destroys gradients near p = q. Repeated ids are summed.
// Id -1 in a support or a weighted cache is an unused slot.
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/detail/dense_rows.hpp"
#include "opd/detail/rows.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/detail/tiles.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/evaluate.hpp"
#include "opd/row_program.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Engine>
struct entry_state : row_state {
    typename Engine::sweep_type swept = {};
    index_t entries = 0; ///< filled slots
    double sum_c = 0;
    double share = 0; ///< of e^((z - z*)/T), z* the anchor of the sums, in dz of an id that is no entry
};

/// The student's normaliser, over all ids or those that are not `excluded`.
template <class Engine, class Rows, bool Excludes>
struct student_sweep : over_tiles<student_sweep<Engine, Rows, Excludes>, false> {
    using state_type = typename Rows::state_type;
    using sweep_type = typename Engine::sweep_type;
    OPD_HD static bool due(const Rows& k, const state_type& st) { return k.sweeps(st); }
    OPD_HD static sweep_type start(const Rows& k, const state_type&) { return sweep_type::begin(k.inv_s, 1, 1, false); }
    template <class Tile, class At>
    OPD_HD OPD_INLINE static void tile(const Rows&, const state_type& st, sweep_type& p, const Tile& t, At at) {
        using F = typename Engine::template number<typename Rows::Z>;
        if constexpr (Excludes)
            Engine::template sweep<F, false, raw_sums_needed{}>(p, t, at, st.excluded);
        else
            Engine::template sweep<F, false, raw_sums_needed{}>(p, t, at);
    }
    OPD_HD static sweep_type merge(const sweep_type& a, const sweep_type& b) { return sweep_type::merge(a, b); }
    OPD_HD static void finish(const Rows&, state_type& st, const sweep_type& all) {
        st.swept = all;
        st.swept.template close<false, raw_sums_needed{}>(Excludes);
        st.report.bad |= st.swept.contents.bad;
        if (!Excludes && !st.report.bad) st.report.lse = st.swept.sums.lse();
    }
};

/// dz = beta dz + g(c - p Σc), in three phases. Rows have frame, student, vocab, inv_s and, of a row that is live, `filled(st)`:
/// st.entries ids with their c - p Σc.
template <class Engine, class Rows>
struct pullback {
    using state_type = typename Rows::state_type;
    using G = typename Rows::G;

    /// c becomes the entry's gradient, before dz overwrites z.
    struct prepare {
        OPD_HD static bool due(const Rows& k, const state_type& st) { return st.live && k.student.has_gradient(); }
        template <class At>
        OPD_HD static void run(const Rows& k, const state_type& st, At at) {
            const double g = st.factor / double(k.student.temperature);
            const float beta = k.frame.env.beta;
            entry_c* c = k.filled(st);
            for (index_t j = at.id; j < st.entries; j += at.count) {
                const G& to = k.student.gradient_at(k.of_student(st), c[j].id);
                const double old = beta == 0 ? 0 : double(beta) * double(element<G>::load(to));
                c[j].c = old + g * c[j].c;
            }
        }
    };
    struct rest : writes_tiles<rest> {
        OPD_HD static bool due(const Rows& k, const state_type& st) { return st.live && k.student.has_gradient(); }
        template <class Tile, class At>
        OPD_HD OPD_INLINE static void tile(const Rows& k, const state_type& st, const Tile& t, At at) {
            const double g = st.factor / double(k.student.temperature);
            Engine::pull_back(t, st.swept.sums, g * st.share, k.frame.env.beta, at);
        }
    };
    struct scatter {
        OPD_HD static bool due(const Rows& k, const state_type& st) { return st.live && k.student.has_gradient(); }
        template <class At>
        OPD_HD static void run(const Rows& k, const state_type& st, At at) {
            const entry_c* c = k.filled(st);
            for (index_t j = at.id; j < st.entries; j += at.count)
                k.student.gradient_at(k.of_student(st), c[j].id) =
                    element<G>::store(static_cast<arithmetic_t<G>>(c[j].c));
        }
    };
    template <class Team>
    OPD_HD OPD_INLINE static void run(const Rows& k, Team& team) {
        team.template each<prepare>(k);
        team.template each<rest>(k);
        team.template each<scatter>(k);
        team.template each<zero_tiles<Rows>>(k);
        team.template each<clear_rest<Rows>>(k);
    }
};

/// A team's scratch in a row of m drawn tokens.
struct sampled_arrays {
    sampled_entry* entries;
    entry_c* c;
    OPD_HD sampled_arrays(carver& scratch, index_t m)
        : entries(scratch.take<sampled_entry>(m)), c(scratch.take<entry_c>(m)) {}
};
/// A team's scratch in a row of a support of k slots.
template <class Engine>
struct support_arrays {
    entry_c* c;
    double *log_p, *log_q, *h; // log_p: at first the logits
    std::byte* set;            // the engine's
    OPD_HD support_arrays(carver& scratch, index_t k)
        : c(scratch.take<entry_c>(k)), log_p(scratch.take<double>(k)), log_q(scratch.take<double>(k)),
          h(scratch.take<double>(k)), set(scratch.take<std::byte>(Engine::id_set::bytes(k))) {}
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
    OPD_HD index_t slots() const { return teacher.ids.cols; }
    OPD_HD index_t tile_size() const { return student.tile_size(); }
    OPD_HD index_t tile_size_t() const { return student.tile_size(); }
    OPD_HD row_place of_student(const row_state& st) const { return {st.row, st.scratch + student_from}; }
    OPD_HD row_tile<Z, Z, G> tile(const row_state& st, index_t begin, index_t count) const {
        return {student.tile(of_student(st), begin), nullptr,
                student.has_gradient() ? student.gradient_tile(of_student(st), begin) : nullptr, begin, count};
    }
    OPD_HD bool live(const row_state& st) const { return st.live; }
    OPD_HD const double* given_lse(index_t row) const {
        return frame.env.given_lse.empty() ? nullptr : &frame.env.given_lse[row];
    }
};

// --- drawn tokens -------------------------------------------------------------------------------------------------------

template <class Engine, class Frame, class Student, class Teacher, class Estimator>
struct sampled_rows : rows_of_entries<Engine, Frame, Student, Teacher, Estimator, sampled_arrays> {
    using arrays = sampled_arrays;
    using base = rows_of_entries<Engine, Frame, Student, Teacher, Estimator, arrays>;
    using base::base;
    using typename base::G;
    using typename base::Z;
    using state_type = entry_state<Engine>;
    using F = typename Engine::template number<Z>;
    using sweep = student_sweep<Engine, sampled_rows, false>;
    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template each<take_given>(*this);
        team.template fold<sweep>(*this);
        team.template each<gather>(*this);
        team.template each<decide>(*this);
        team.template each<merge_repeats>(*this);
        team.template each<sum>(*this);
        team.template each<with_softmax>(*this);
        pullback<Engine, sampled_rows>::run(*this, team);
    }
    OPD_HD bool sweeps(const state_type& st) const { return st.kept && !st.report.bad && !this->given_lse(st.row); }
    OPD_HD static bool good(const state_type& st) { return st.kept && !st.report.bad; }

    /// A finite log-sum-exp vouches for the row's contents.
    struct take_given {
        OPD_HD static bool due(const sampled_rows& k, const state_type& st) { return good(st) && k.given_lse(st.row); }
        template <class At>
        OPD_HD static void run(const sampled_rows& k, state_type& st, At at) {
            if (at.id != 0) return;
            const double lse = *k.given_lse(st.row);
            st.report.bad = !is_finite(lse);
            if (st.report.bad) return;
            st.swept = {};
            anchor_at<typename F::value_type>(st.swept.sums, lse, k.inv_s);
            st.report.lse = lse;
        }
    };

    /// Slots of the cache into entries; id -1: unused, -2: out of range.
    struct gather {
        OPD_HD static bool due(const sampled_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD static void run(const sampled_rows& k, const state_type& st, At at) {
            sampled_entry* e = k.at(st).entries;
            for (index_t j = at.id; j < k.slots(); j += at.count)
                e[j] = gathered(k.student, k.of_student(st), k.teacher, k.frame.env.frozen, j, k.vocab, k.inv_s,
                                st.report.lse);
        }
    };

    struct decide {
        OPD_HD static bool due(const sampled_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD static void run(const sampled_rows& k, state_type& st, At at) {
            if (at.id != 0) return;
            const arrays a = k.at(st);
            index_t n = 0;
            for (index_t j = 0; j < k.slots(); ++j) {
                if (a.entries[j].id == -1) continue;
                if (a.entries[j].id < 0) {
                    st.report.bad = true;
                    return;
                }
                if (n != j) a.entries[n] = a.entries[j];
                ++n;
            }
            st.report.bad = n == 0;
            if (st.report.bad) return;
            const entry_row o =
                k.estimator.row(a.entries, static_cast<int>(n), facts_of(k.frame.env, st.row), st.partial.diagnostics);
            st.report.bad = o.bad;
            if (o.bad) return;
            st.report.loss = o.loss, st.report.infinite = o.infinite;
            st.report.clamped = clamps(k.frame.env, o.loss);
            if (st.report.clamped) return;
            for (index_t j = 0; j < n; ++j) a.c[j] = {a.entries[j].id, j, a.entries[j].c};
            st.entries = n;
            st.live = true;
        }
    };

    /// The first slot of an id takes the c of those that repeat it.
    struct merge_repeats {
        OPD_HD static bool due(const sampled_rows&, const state_type& st) { return st.live; }
        template <class At>
        OPD_HD OPD_INLINE static void run(const sampled_rows& k, state_type& st, At at) {
            Engine::merge_repeats(k.filled(st), st.entries, at);
        }
    };
    struct sum {
        OPD_HD static bool due(const sampled_rows&, const state_type& st) { return st.live; }
        template <class At>
        OPD_HD static void run(const sampled_rows& k, state_type& st, At at) {
            if (at.id != 0) return;
            entry_c* c = k.filled(st);
            index_t n = 0;
            st.sum_c = 0;
            for (index_t j = 0; j < st.entries; ++j) {
                if (c[j].slot < 0) continue; // merged into another
                if (n != j) c[n] = c[j];
                st.sum_c += c[n++].c;
            }
            st.entries = n;
            st.share = -st.sum_c / (1 + st.swept.sums.student_mass);
        }
    };
    /// c to c - p Σc
    struct with_softmax {
        OPD_HD static bool due(const sampled_rows&, const state_type& st) { return st.live; }
        template <class At>
        OPD_HD static void run(const sampled_rows& k, const state_type& st, At at) {
            entry_c* c = k.filled(st);
            for (index_t j = at.id; j < st.entries; j += at.count)
                c[j].c -= p_of(k.student.logit(k.of_student(st), c[j].id), st.swept.sums) * st.sum_c;
        }
    };
};

// --- supports -----------------------------------------------------------------------------------------------------------

template <class Engine, class Frame, class Student, class Teacher, class Estimator>
struct support_rows : rows_of_entries<Engine, Frame, Student, Teacher, Estimator, support_arrays<Engine>> {
    using arrays = support_arrays<Engine>;
    using base = rows_of_entries<Engine, Frame, Student, Teacher, Estimator, arrays>;
    using base::base;
    using typename base::G;
    using typename base::L;
    using typename base::Z;
    struct state_type : entry_state<Engine> {
        typename Engine::id_set excluded = {};
    };
    using sweep = student_sweep<Engine, support_rows, true>;
    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<gather>(*this);
        team.template fold<exclude>(*this);
        team.template fold<sweep>(*this);
        team.template each<decide>(*this);
        pullback<Engine, support_rows>::run(*this, team);
    }
    OPD_HD static bool good(const state_type& st) { return st.kept && !st.report.bad; }
    OPD_HD bool sweeps(const state_type& st) const { return good(st); }

    /// The cache's slots, and whether one of them is bad.
    struct gather {
        OPD_HD static bool due(const support_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD static int part(const support_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            int bad = 0;
            for (index_t j = at.id; j < k.slots(); j += at.count) {
                const auto id = static_cast<index_t>(k.teacher.ids(st.row, j));
                a.c[j].id = id;
                if (id == -1) continue;
                const bool in = id >= 0 && id < k.vocab;
                const double log_q = double(element<L>::load(k.teacher.log_q(st.row, j)));
                bad |= !in || is_nan(log_q) || log_q > 1e-3;
                a.log_p[j] = in ? double(element<Z>::load(k.student.logit(k.of_student(st), id))) : 0;
                a.log_q[j] = log_q;
            }
            return bad;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const support_rows&, state_type& st, int bad) { st.report.bad |= bad != 0; }
    };
    /// The set of used ids, and whether one of them repeats.
    struct exclude {
        OPD_HD static bool due(const support_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD OPD_INLINE static int part(const support_rows& k, state_type& st, At at) {
            const arrays a = k.at(st);
            return st.excluded.take(a.c, k.slots(), a.set, at);
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const support_rows&, state_type& st, int bad) { st.report.bad |= bad != 0; }
    };

    struct decide {
        OPD_HD static bool due(const support_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD static void run(const support_rows& k, state_type& st, At at) {
            if (at.id != 0) return;
            st.report.bad = true; // until the end
            const arrays a = k.at(st);
            int n = 0; // used slots
            for (index_t j = 0; j < k.slots(); ++j) {
                if (a.c[j].id == -1) continue;
                a.c[n].id = a.c[j].id, a.log_p[n] = a.log_p[j], a.log_q[n] = a.log_q[j];
                ++n;
            }
            if (n == 0) return;
            const L* stated = k.teacher.log_tail.empty() ? nullptr : &k.teacher.log_tail[st.row];
            const raw_sums& tail = st.swept.sums;
            const support_answer all =
                answer_support(k.estimator, tail, a.log_p, a.log_q, a.h, n, k.vocab - n, k.inv_s, k.given_lse(st.row),
                               stated, facts_of(k.frame.env, st.row), st.partial.diagnostics);
            st.report.lse = all.student.lse;
            if (!all.good) return;
            st.report.bad = false;
            st.report.loss = all.row.loss, st.report.infinite = all.row.infinite;
            st.report.clamped = clamps(k.frame.env, all.row.loss);
            if (st.report.clamped) return;
            for (int j = 0; j < n; ++j) a.c[j].c = a.h[j];
            const bool none = is_neg_inf(all.student.log_tail);
            st.share = none ? 0 : all.h_rest / (1 + tail.student_mass);
            if (none) st.swept.sums = all.student.sums; // an anchor with mass
            st.entries = n;
            st.live = true;
        }
    };
};

// --- renormalised support -----------------------------------------------------------------------------------------------

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

template <class Engine, class Frame, class Student, class Teacher, class Estimator>
struct renormalised_rows {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using L = typename Teacher::log_type;
    using value = typename Engine::template number<Z, L, G>::value_type;
    using Program = std::remove_cvref_t<decltype(std::declval<Estimator>().on_support)>;
    static constexpr space memory_space = Student::memory_space;
    using source = gathered_logits<value, memory_space>;
    using inner_rows = dense_rows<Engine, Frame, source, source, Program>;
    using state_type = typename inner_rows::state_type;

    Frame frame;
    Student student;
    Teacher teacher;
    index_t vocab;
    inner_rows inner; // over the team's gathered entries

    renormalised_rows(const Frame& frame_, const Student& student_, const Teacher& teacher_,
                      const Estimator& estimator_, index_t vocab_)
        : frame(frame_), student(student_), teacher(teacher_), vocab(vocab_),
          inner(frame_, source{slots(), student_.temperature}, source{slots(), 1}, estimator_.on_support, slots()) {
        carver scratch;
        const arrays a(scratch, slots());
        inner.frame.env.beta = 0;
        inner.student.from = a.z_at, inner.student.gradient_from = a.dz_at, inner.teacher.from = a.y_at;
        inner.student.gradient = student.has_gradient();
        inner.student_from = inner.teacher_from = 0; // both lie in these rows' scratch
        inner.engine_from = scratch.used;
    }

    struct arrays {
        value *z, *y, *dz;
        std::byte* set; // the engine's
        std::size_t z_at = 0, y_at = 0, dz_at = 0;
        OPD_HD arrays(carver& scratch, index_t k) {
            z_at = scratch.used, z = scratch.take<value>(k);
            y_at = scratch.used, y = scratch.take<value>(k);
            dz_at = scratch.used, dz = scratch.take<value>(k);
            set = scratch.take<std::byte>(Engine::repeats_bytes);
        }
    };
    std::size_t scratch_bytes() const {
        return inner.engine_from + Engine::template scratch_bytes<inner_rows>(slots(), student.has_gradient());
    }
    OPD_HD arrays at(const state_type& st) const {
        carver scratch{st.scratch};
        return {scratch, slots()};
    }
    OPD_HD index_t slots() const { return teacher.ids.cols; }

    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<check_ids>(*this);
        team.template fold<gather>(*this);
        inner.row(team);
        team.template each<clear>(*this);
        team.template each<scatter>(*this);
    }
    OPD_HD static bool good(const state_type& st) { return st.kept && !st.report.bad; }

    struct check_ids {
        OPD_HD static bool due(const renormalised_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD OPD_INLINE static int part(const renormalised_rows& k, const state_type& st, At at) {
            return Engine::repeats(k.teacher.ids.row(st.row), k.slots(), k.vocab, k.at(st).set, at);
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const renormalised_rows&, state_type& st, int bad) { st.report.bad |= bad != 0; }
    };
    /// An unused slot is a token that neither side gives mass. Log-probs above 0 are none.
    struct gather {
        OPD_HD static bool due(const renormalised_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD static int part(const renormalised_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            int bad = 0;
            for (index_t j = at.id; j < k.slots(); j += at.count) {
                const auto id = static_cast<index_t>(k.teacher.ids(st.row, j));
                a.z[j] = a.y[j] = neg_inf<value>();
                if (id == -1) continue;
                a.z[j] = static_cast<value>(element<Z>::load(k.student.logit({st.row}, id)));
                a.y[j] = static_cast<value>(element<L>::load(k.teacher.log_q(st.row, j)));
                bad |= a.y[j] > value(1e-3);
            }
            return bad;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const renormalised_rows&, state_type& st, int bad) { st.report.bad |= bad != 0; }
    };
    struct clear {
        template <class At>
        OPD_HD static void run(const renormalised_rows& k, const state_type& st, At at) {
            clear_columns(k.student, st.row, 0, k.frame.env.beta, at);
        }
    };
    struct scatter {
        OPD_HD static bool due(const renormalised_rows&, const state_type& st) { return good(st); }
        template <class At>
        OPD_HD static void run(const renormalised_rows& k, state_type& st, At at) {
            if (at.id == 0) ++st.partial.diagnostics.support_rows;
            if (!k.student.has_gradient()) return;
            const value* dz = k.at(st).dz;
            for (index_t j = at.id; j < k.slots(); j += at.count) {
                const auto id = static_cast<index_t>(k.teacher.ids(st.row, j));
                if (id == -1) continue;
                G& to = k.student.gradient_at({st.row}, Student::sparse_gradient ? j : id);
                const value old = k.frame.env.beta == 0 ? value(0) : static_cast<value>(element<G>::load(to));
                to = element<G>::store(static_cast<arithmetic_t<G>>(old + dz[j]));
            }
        }
    };
};

// --- log p of tokens ----------------------------------------------------------------------------------------------------

template <class Engine, class Frame, class Job>
struct logp_rows {
    using Z = typename Job::logit_type;
    using L = typename Job::log_type;
    using G = Z;
    using state_type = entry_state<Engine>;
    using sweep = student_sweep<Engine, logp_rows, false>;
    static constexpr bool one_tile = true;

    Frame frame;
    Job job;
    index_t vocab;
    double inv_s;

    logp_rows(const Frame& frame_, const Job& job_)
        : frame(frame_), job(job_), vocab(job_.z.cols), inv_s(1 / double(job_.temperature)) {}

    std::size_t scratch_bytes() const { return 0; }
    OPD_HD row_tile<Z, Z, G> tile(const state_type& st, index_t begin, index_t count) const {
        return {job.z.row(st.row) + begin, nullptr, nullptr, begin, count};
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<sweep>(*this);
        team.template fold<store>(*this);
    }
    OPD_HD static bool sweeps(const state_type& st) { return st.kept; }
    /// Writes its share and says whether an id was out of range; a bad id says nothing of its neighbours.
    struct store {
        OPD_HD static bool due(const logp_rows&, const state_type& st) { return st.kept; }
        template <class At>
        OPD_HD static int part(const logp_rows& k, const state_type& st, At at) {
            int bad = 0;
            for (index_t j = at.id; j < k.job.ids.cols; j += at.count) {
                const auto id = static_cast<index_t>(k.job.ids(st.row, j));
                const bool in = id >= 0 && id < k.vocab;
                bad |= !in;
                const double lp =
                    in && !st.report.bad ? log_p_of(k.job.z(st.row, id), k.inv_s, st.report.lse) : neg_inf<double>();
                k.job.out(st.row, j) = element<L>::store(static_cast<arithmetic_t<L>>(lp));
            }
            return bad;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const logp_rows&, state_type& st, int bad) { st.report.bad |= bad != 0; }
    };
};

// --- which rows do a job ------------------------------------------------------------------------------------------------

template <class Engine, class Student, class Teacher, class Program, space S, class Frame>
    requires(divergence<Program>&& Teacher::kind == cache_kind::dense && !Student::sparse_gradient)
auto rows_of(const row_job<Student, Teacher, Program, S>& job, const Frame& frame) {
    return dense_rows<Engine, Frame, Student, Teacher, Program>(frame, job.student, job.teacher, job.estimator,
                                                                job.vocab);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(sampled_estimator<Estimator>&& Estimator::takes == Teacher::kind && !Student::sparse_gradient)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return sampled_rows<Engine, Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator,
                                                                    job.vocab);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(support_estimator<Estimator>&& Estimator::takes == Teacher::kind && !Student::sparse_gradient)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return support_rows<Engine, Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator,
                                                                    job.vocab);
}
template <class Engine, class Student, class Teacher, class Estimator, space S, class Frame>
    requires(renormalised_estimator<Estimator>&& Estimator::takes == Teacher::kind && materialised<Student>)
auto rows_of(const row_job<Student, Teacher, Estimator, S>& job, const Frame& frame) {
    return renormalised_rows<Engine, Frame, Student, Teacher, Estimator>(frame, job.student, job.teacher, job.estimator,
                                                                         job.vocab);
}
template <class Engine, class Z, class Id, class L, space S, class Frame>
auto rows_of(const token_logp_job<Z, Id, L, S>& job, const Frame& frame) {
    return logp_rows<Engine, Frame, token_logp_job<Z, Id, L, S>>(frame, job);
}

} // namespace OPD_ISA
} // namespace opd::detail
