// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// check::contents and infinite::raise: one pass over the numbers of a call, by their bits, before anything is written.
#pragma once

#include <cmath>
#include <string>

#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// The pass of check::contents, and of infinite::raise, over rows of logits: by bits, before anything is written.
/// check_logit_row reads n logits, those of the ids from `first` on, and says whether one of them has mass.
template <class T>
bool check_logit_row(const char* name, const T* x, index_t n, index_t r, index_t first = 0) {
    bool mass = false;
    for (index_t i = 0; i < n; ++i) {
        const double v = load_log(x[i]);
        if (is_nan(v) || (is_inf(v) && !is_neg_inf(v)))
            throw invalid_input(name, (is_nan(v) ? "NaN at column " : "+inf at column ") + std::to_string(first + i),
                                r);
        mass |= !is_neg_inf(v);
    }
    return mass;
}
inline void check_mass(const char* name, bool mass, index_t r) {
    if (!mass) throw invalid_input(name, "every logit is -inf", r);
}
template <class Source>
void refuse_unseen_rows() {
    if constexpr (has_scratch<Source> || in_blocks<Source>)
        throw unsupported("opd: check::contents and infinite::raise read rows before the call; a source that makes its "
                          "tiles in scratch has none to show then: use check::count");
}

/// Whether some logit from id `first` on has mass; `contents`: and none is NaN or +inf.
template <class Source>
bool has_mass_beyond(const char* name, const Source& s, index_t first, index_t r, bool contents) {
    const index_t n = s.vocab() - first;
    const auto* x = s.tile({r}, 0) + first;
    if (contents) return check_logit_row(name, x, n, r, first);
    bool mass = false;
    for (index_t i = 0; i < n; ++i) mass |= !is_neg_inf(load_log(x[i]));
    return mass;
}
template <class Student, class Teacher, class Estimator, space S>
void check_dense_contents(const Student& s, const Teacher& t, const Estimator& d, const basic_env<S>& e, index_t vocab,
                          index_t r) {
    refuse_unseen_rows<Student>();
    refuse_unseen_rows<Teacher>();
    bool mass_z = false, mass_y = false, shared = false;
    for (index_t begin = 0, end; begin < vocab; begin = end) {
        end = tile_end(begin, s.tile_size(), t.tile_size(), vocab);
        const auto* z = s.tile({r}, begin);
        const auto* y = t.tile({r}, begin);
        if (e.checks == check::contents) {
            mass_z |= check_logit_row("student.z", z, end - begin, r, begin);
            mass_y |= check_logit_row("teacher.y", y, end - begin, r, begin);
        }
        if (e.on_infinite.act == infinite::action::raise)
            for (index_t i = 0; i < end - begin; ++i) {
                const bool p_zero = is_neg_inf(load_log(z[i]));
                const bool q_zero = is_neg_inf(load_log(y[i]));
                shared |= !p_zero && !q_zero;
                if ((q_zero && !p_zero && infinite_where_teacher_zero(d)) ||
                    (p_zero && !q_zero && infinite_where_student_zero(d)))
                    throw infinite_value(r);
            }
    }
    if constexpr (is_lumped<Teacher>) { // what lies beyond is one id
        const bool contents = e.checks == check::contents;
        const bool p = has_mass_beyond("student.z", s, vocab, r, contents),
                   q = has_mass_beyond("teacher.y", t, vocab, r, contents);
        if (e.on_infinite.act == infinite::action::raise &&
            ((p && !q && infinite_where_teacher_zero(d)) || (q && !p && infinite_where_student_zero(d))))
            throw infinite_value(r);
        shared |= p && q;
    }
    if (e.on_infinite.act == infinite::action::raise && !shared && infinite_where_disjoint(d)) throw infinite_value(r);
    if (e.checks != check::contents) return;
    check_mass("student.z", mass_z, r);
    check_mass("teacher.y", mass_y, r);
}

/// check::contents over the row of a student whose teacher knows few ids.
template <class Student>
void check_student_row(const Student& s, index_t r) {
    bool mass = false;
    if constexpr (materialised<Student>)
        mass = check_logit_row("student.z", s.z.row(r), s.vocab(), r);
    else
        for (index_t begin = 0, end; begin < s.vocab(); begin = end) {
            end = tile_end(begin, s.tile_size(), s.tile_size(), s.vocab());
            mass |= check_logit_row("student.z", s.tile({r}, begin), end - begin, r, begin);
        }
    check_mass("student.z", mass, r);
}
/// check::contents over slot j of row r, which is used.
template <class Teacher>
void check_slot(const Teacher& t, index_t vocab, index_t r, index_t j, double log_q) {
    using L = typename Teacher::log_type;
    const auto row = slots_of(t, r);
    const auto id = static_cast<index_t>(row.ids[j]);
    const std::string column = " in column " + std::to_string(j);
    if (id < 0 || id >= vocab)
        throw invalid_input("teacher.ids",
                            "id " + std::to_string(id) + column + " for a vocabulary of " + std::to_string(vocab), r);
    const bool placeholder = Teacher::kind != cache_kind::support && log_q < -9000 && !is_neg_inf(log_q);
    if (is_nan(log_q) || log_q > 1e-3 || placeholder)
        throw invalid_input("teacher.log_q", "is not a log-probability" + column, r);
    if constexpr (Teacher::kind == cache_kind::support) {
        for (index_t i = 0; i < j; ++i)
            if (row.ids[i] == row.ids[j])
                throw invalid_input("teacher.ids", "id " + std::to_string(id) + " twice in a support", r);
    } else {
        if (!t.advantage.empty() && !is_finite(double(element<L>::load(t.advantage(r, t.advantage.cols == 1 ? 0 : j)))))
            throw invalid_input("teacher.advantage", "is not finite" + column, r);
        const double log_mu = double(element<L>::load(row.log_mu[j]));
        if ((is_nan(log_mu) && !may_miss_mu<Teacher>) || log_mu > 1e-3 || log_mu < -9000)
            throw invalid_input("teacher.log_mu", "is not the log-probability of a drawn token" + column, r);
    }
}
/// infinite::raise over what lies outside a support; `shared`: some token inside has mass on both sides.
template <class Student, class Teacher, class Estimator>
void check_tail_is_finite(const Student& s, const Teacher& t, const Estimator& est, index_t r, double log_tail,
                          bool shared) {
    index_t outside = 0; // logits with mass that are not in the support
    const auto has_mass = [&](index_t v) { return !is_neg_inf(load_log(s.logit({r}, v))); };
    for (index_t v = 0; v < s.vocab(); ++v) outside += has_mass(v);
    const auto row = slots_of(t, r);
    for (index_t j = 0; j < row.count; ++j) {
        const auto id = static_cast<index_t>(row.ids[j]);
        outside -= id >= 0 && id < s.vocab() && has_mass(id);
    }
    if ((is_neg_inf(log_tail) && outside > 0 && infinite_where_teacher_zero(est)) ||
        (!is_neg_inf(log_tail) && outside == 0 && infinite_where_student_zero(est)))
        throw infinite_value(r);
    if (!shared && (is_neg_inf(log_tail) || outside == 0) && infinite_where_disjoint(est)) throw infinite_value(r);
}

/// check::contents over log mu of slot j of a support, which not every estimator reads.
template <class Student, class Estimator>
void check_support_mu(const Student& s, const Estimator& est, index_t r, index_t j, index_t id, double log_mu) {
    const bool drawn = (columns_of(est) & column::log_mu) != 0 && !is_neg_inf(load_log(s.logit({r}, id)));
    if (is_nan(log_mu) || log_mu > 1e-3 || (drawn && log_mu < -9000))
        throw invalid_input("teacher.log_mu",
                            "is not the log-probability of one of mu's best tokens in column " + std::to_string(j), r);
}
/// check::contents over what is frozen of slot j of row r, which is used.
inline void check_frozen_slot(const frozen_batch<space::host>& f, index_t r, index_t j) {
    const auto finite = [&](const char* name, const auto& v) {
        if (!v.empty() && !is_finite(v(r, j)))
            throw invalid_input(name, "is not finite in column " + std::to_string(j), r);
    };
    if (f.keep.empty() || f.keep(r, j) != 0) finite("env.frozen.weight", f.weight);
    finite("env.frozen.advantage", f.advantage);
}

/// check::contents over the set of row r: ids ascend, and every token's is among them.
template <class Teacher>
void check_kept_row(const Teacher& t, index_t vocab, index_t r) {
    const index_t first = t.kept_offsets[r], last = t.kept_offsets[r + 1];
    const auto at = [&](index_t i) { return static_cast<index_t>(t.kept_ids[i]); };
    for (index_t i = first; i < last; ++i)
        if (at(i) < 0 || at(i) >= vocab || (i > first && at(i - 1) >= at(i)))
            throw invalid_input("teacher.kept_ids",
                                "id " + std::to_string(at(i)) + " at " + std::to_string(i) +
                                    ": ids of a set ascend and are below " + std::to_string(vocab),
                                r);
    for (index_t j = 0; j < t.ids.cols; ++j) {
        const auto id = static_cast<index_t>(t.ids(r, j));
        bool in = id == -1;
        for (index_t i = first; i < last && !in; ++i) in = at(i) == id;
        if (!in) throw invalid_input("teacher.ids", "id " + std::to_string(id) + " lies outside the row's kept set", r);
    }
}

/// check::contents and infinite::raise over one row of a sparse call.
template <class Student, class Teacher, class Estimator>
void check_sparse_contents(const Student& s, const Teacher& t, const Estimator& est, const env& e, index_t r) {
    using L = typename Teacher::log_type;
    const bool contents = e.checks == check::contents, raises = e.on_infinite.act == infinite::action::raise;
    refuse_unseen_rows<Student>();
    if (contents) {
        check_student_row(s, r);
        if constexpr (Teacher::kind != cache_kind::support) {
            const auto finite = [r](const char* name, const auto& v) {
                if (!v.empty() && !is_finite(double(element<L>::load(v[r]))))
                    throw invalid_input(name, "is not finite", r);
            };
            finite("teacher.baseline", t.baseline), finite("teacher.mu_entropy", t.mu_entropy);
        }
        if (const auto& ratio = e.frozen.sequence_log_ratio; !ratio.empty() && !is_finite(ratio[r]))
            throw invalid_input("env.frozen.sequence_log_ratio", "is not finite", r);
    }
    constexpr bool may_be_unused = Teacher::kind == cache_kind::weighted || Teacher::kind == cache_kind::support;
    const auto row = slots_of(t, r);
    index_t used = 0;
    bool shared = false;
    for (index_t j = 0; j < row.count; ++j) {
        const auto id = static_cast<index_t>(row.ids[j]);
        if (may_be_unused && id == -1) continue;
        ++used;
        const double log_q = load_log(row.log_q[j]);
        if (contents) {
            check_slot(t, s.vocab(), r, j, log_q);
            check_frozen_slot(e.frozen, r, j);
            if constexpr (Teacher::kind == cache_kind::support)
                if (row.log_mu) check_support_mu(s, est, r, j, id, load_log(row.log_mu[j]));
        }
        if (raises && id >= 0 && id < s.vocab()) {
            const bool p_zero = is_neg_inf(load_log(s.logit({r}, id)));
            const bool q_zero = is_neg_inf(log_q);
            shared |= !p_zero && !q_zero;
            if ((q_zero && !p_zero && infinite_where_teacher_zero(est)) ||
                (p_zero && !q_zero && infinite_where_student_zero(est)))
                throw infinite_value(r);
        }
    }
    if constexpr (has_kept_sets<Teacher>)
        if (contents) check_kept_row(t, s.vocab(), r);
    if (contents && used == 0) throw invalid_input("teacher.ids", "has no used slot", r);
    if constexpr (!reads_tail<Estimator>()) {
        if (raises && !shared && infinite_where_disjoint(est)) throw infinite_value(r);
    } else {
        const bool inferred = t.log_tail.empty(); // and never 0
        const double log_tail = inferred ? -1 : load_log(t.log_tail[cache_row(t, r)]);
        if (inferred && (shared || !raises || !infinite_where_disjoint(est))) return;
        if (contents && (is_nan(log_tail) || log_tail > 1e-3))
            throw invalid_input("teacher.log_tail", "is not a log-probability", r);
        if (raises) check_tail_is_finite(s, t, est, r, log_tail, shared);
    }
}

/// A weighted row that says that mu has mass outside its exact entries has drawn some of it.
template <class Teacher>
void check_tails(const Teacher& t, const env& e, index_t rows) {
    for (index_t r = 0; !t.log_tail_mu.empty() && r < rows; ++r) {
        const double tail = t.log_tail_mu[r];
        if (!e.mask.kept(r) || is_neg_inf(tail)) continue;
        if (is_nan(tail) || tail > 1e-3) throw invalid_input("teacher.log_tail_mu", "is not a log-probability", r);
        bool drawn = false;
        for (index_t j = 0; j < t.ids.cols && !drawn; ++j)
            drawn = static_cast<index_t>(t.ids(r, j)) != -1 && (t.exact.empty() || t.exact(r, j) == 0);
        if (!drawn)
            throw invalid_input("teacher.log_tail_mu",
                                "says that mu has mass outside the exact entries, of which none was drawn", r);
    }
}

/// check::contents over the columns of log mu: one that is 0 in every kept row, of at least 16, was never filled in.
/// Unused slots and entries that are marked as certain say nothing.
template <class Teacher>
void check_mu_columns(const Teacher& t, const env& e, index_t rows) {
    for (index_t j = 0; j < t.ids.cols; ++j) {
        index_t zeros = 0;
        for (index_t r = 0; r < rows && zeros >= 0; ++r) {
            if (!e.mask.kept(r)) continue;
            if constexpr (Teacher::kind == cache_kind::weighted)
                if (static_cast<index_t>(t.ids(r, j)) == -1 || (!t.exact.empty() && t.exact(r, j) != 0)) continue;
            zeros = double(element<typename Teacher::log_type>::load(t.log_mu(r, j))) == 0 ? zeros + 1 : -1;
        }
        if (zeros >= 16)
            throw invalid_input("teacher.log_mu", "is 0 in column " + std::to_string(j) + " of all " +
                                                      std::to_string(zeros) +
                                                      " kept rows: a placeholder, not what tokens were drawn with");
    }
}

} // namespace OPD_ISA
} // namespace opd::detail
