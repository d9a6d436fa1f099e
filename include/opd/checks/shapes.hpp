// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Shapes, strides and ranges of a call's arguments, and what an estimator cannot do without: checked always, before
// anything is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/checks/types.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/filter.hpp"
#include "opd/reduction.hpp"
#include "opd/row_facts.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/traits.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Whether an optional argument was left out: null and without a shape.
template <class T, space S>
constexpr bool left_out(const matrix_view<T, S>& v) {
    return v.data == nullptr && v.rows == 0 && v.cols == 0;
}

// What a matrix's numbers say, whatever its type: compiled once.
struct rectangle {
    std::uintptr_t data;
    index_t rows, cols, stride, padding, bytes, alignment; // the last two of an element
};
inline void check_rectangle(const char* name, const rectangle& v, index_t rows, index_t cols) {
    if (v.rows < 0 || v.cols < 0) throw invalid_input(name, "has a negative shape " + shape(v.rows, v.cols));
    if (v.rows != rows || (cols >= 0 && v.cols != cols))
        throw invalid_input(name, "has shape " + shape(v.rows, v.cols) + ", expected " +
                                      shape(rows, cols >= 0 ? cols : v.cols));
    if (v.stride < v.cols)
        throw invalid_input(name, "has a row stride of " + std::to_string(v.stride) + " for " + std::to_string(v.cols) +
                                      " columns");
    if (v.padding < 0 || v.padding > v.stride - v.cols)
        throw invalid_input(name, "has " + std::to_string(v.padding) + " columns of padding after " +
                                      std::to_string(v.cols) + ", its rows are " + std::to_string(v.stride) + " apart");
    const index_t most = most_bytes / v.bytes;
    if (v.rows > 1 ? v.stride > most / v.rows : v.cols + v.padding > most)
        throw invalid_input(name, "is larger than any memory: " + std::to_string(v.rows) + " rows at a stride of " +
                                      std::to_string(v.stride));
    if (v.data == 0 && v.rows > 0 && v.cols > 0) throw invalid_input(name, "is a null pointer");
    if (v.data % static_cast<std::uintptr_t>(v.alignment) != 0)
        throw invalid_input(name, "is not aligned to its element type");
}
template <class T, space S>
void check_matrix(const char* name, matrix_view<T, S> v, index_t rows, index_t cols) {
    check_rectangle(name,
                    {reinterpret_cast<std::uintptr_t>(v.data), v.rows, v.cols, v.stride, v.padding,
                     static_cast<index_t>(sizeof(T)), static_cast<index_t>(alignof(T))},
                    rows, cols);
}

template <class Student>
void check_logits(const Student& s, index_t gradient_rows, index_t gradient_cols) {
    check_matrix("student.z", s.z, s.z.rows, s.z.cols);
    if (s.z.cols < 1 && s.z.rows > 0) throw invalid_input("student.z", "has no columns");
    check_temperature("student.temperature", s.temperature);
    if (left_out(s.dz)) return;
    if (s.dz.empty() && s.dz.rows > 0 && s.dz.cols > 0)
        throw invalid_input("student.dz", "is a null pointer; leave the gradient out for the value alone");
    check_matrix("student.dz", s.dz, gradient_rows, gradient_cols);
}

template <class Member, class Source>
void check_tiles(const Member& member, const Source& s, index_t rows) {
    if (rows > 0 && s.tile_size() < s.vocab() && (s.tile_size() < 1 || s.tile_size() % 1024 != 0))
        throw invalid_input(member(".tile_size()"),
                            "must be a multiple of 1,024 ids, or hold the whole vocabulary; it is " +
                                std::to_string(s.tile_size()));
    if (Source::one_tile && s.tile_size() < s.vocab())
        throw invalid_input(member(".tile_size()"), "is below the vocabulary, though the source says one_tile");
}
/// Shape and range of a source of rows that holds no view: its own checks first. Names are put together where
/// something is thrown.
template <class Source>
void check_source(const char* name, const Source& s, index_t rows) {
    const auto member = [name](const char* m) { return std::string(name).append(m); };
    if constexpr (requires { s.validate(); }) s.validate();
    if (s.rows() < 0) throw invalid_input(member(".rows()"), "is negative");
    if (s.rows() != rows)
        throw invalid_input(member(".rows()"),
                            "are " + std::to_string(s.rows()) + " for " + std::to_string(rows) + " rows");
    if (s.vocab() < 1 && rows > 0) throw invalid_input(member(".vocab()"), "holds no id");
    if constexpr (row_source<Source>) check_tiles(member, s, rows);
    if (!temperature_in_range(s.temperature)) check_temperature(member(".temperature").c_str(), s.temperature);
}

template <class Student>
void check_student(const Student& s) {
    if constexpr (!materialised<Student>)
        return check_source("student", s, s.rows());
    else
        check_logits(s, s.rows(), s.vocab());
}
/// The student of a teacher that knows few ids; a sparse gradient has the shape of the ids.
template <class Student, class Teacher>
void check_student(const Student& s, const Teacher& t) {
    if constexpr (!Student::sparse_gradient) {
        return check_student(s);
    } else if constexpr (is_ragged<Teacher>) {
        check_logits(s, 1, t.ids.size);
        if (s.dz.padding != 0) throw invalid_input("student.dz", "has padding: a ragged gradient is one line of ids");
    } else {
        check_logits(s, s.rows(), most_slots(t));
    }
}
/// The map of a cache whose rows are others than the student's, and how many it has of its own.
template <class Teacher>
void check_row_map(const Teacher& t, index_t rows) {
    check_vector("teacher.map", t.map, rows);
    if (t.map.empty() && rows > 0) throw invalid_input("teacher.map", "is left out");
}
template <class Teacher>
index_t cache_rows(const Teacher& t, index_t rows) {
    if constexpr (!has_row_map<Teacher>)
        return rows;
    else if constexpr (is_ragged<Teacher>)
        return t.offsets.size > 0 ? t.offsets.size - 1 : 0;
    else if constexpr (requires { t.ids.rows; })
        return t.ids.rows;
    else if constexpr (requires { t.y.rows; })
        return t.y.rows;
    else if constexpr (requires { t.x.rows; })
        return t.x.rows;
    else
        return static_cast<const typename Teacher::cache_type&>(t).rows();
}
/// Its entries, of kept rows.
template <class Teacher>
void check_row_map_contents(const Teacher& t, const row_mask<>& mask, index_t rows) {
    if constexpr (requires { t.check_rows(mask, rows); }) t.check_rows(mask, rows); // of its parts
    if constexpr (has_row_map<Teacher>) {
        const index_t of_cache = cache_rows(t, rows);
        for (index_t r = 0; r < rows; ++r)
            if (mask.kept(r) && (t.map[r] < 0 || t.map[r] >= of_cache))
                throw invalid_input(
                    "teacher.map",
                    "is " + std::to_string(t.map[r]) + " for a cache of " + std::to_string(of_cache) + " rows", r);
    }
}
template <class Teacher>
void check_dense_teacher(const Teacher& t, index_t rows) {
    if constexpr (has_row_map<Teacher>) check_row_map(t, rows);
    if constexpr (has_row_map<Teacher> && requires { t.y; }) {
        check_matrix("teacher.y", t.y, t.y.rows, -1);
        check_temperature("teacher.temperature", t.temperature);
    } else if constexpr (!materialised<Teacher>)
        return check_source("teacher", t, rows);
    else {
        check_matrix("teacher.y", t.y, rows, -1);
        check_temperature("teacher.temperature", t.temperature);
    }
}

template <class Estimator>
void validate_estimator(const Estimator& e) {
    if constexpr (requires { e.validate(); }) e.validate();
}

/// What a selector cannot do without; what one reads that is chosen at run time.
template <cache_kind Kind, class Estimator, space S>
void check_selector(const Estimator& estimator, const basic_env<S>& e, index_t n) {
    const unsigned reads = facts_read(estimator);
    refuse_unknown_facts(reads, facts_known<Estimator, Kind>());
    if ((reads & fact::position) && n > 0 && e.offsets.empty())
        throw invalid_input("env.offsets", "is needed by a selector that reads positions");
}
/// What an estimator cannot do without, of the cache and of env.
template <class Teacher, class Estimator, space S>
void check_needs(const Teacher& t, const Estimator& estimator, const basic_env<S>& e, index_t n) {
    const unsigned needs = n > 0 ? columns_of(estimator) : 0;
    if constexpr (requires { estimator.validate_cache(t); }) estimator.validate_cache(t);
    const auto need = [needs](unsigned which, const char* name, bool missing) {
        if ((needs & which) && missing) throw invalid_input(name, "is left out, and the estimator reads it");
    };
    need(column::sequence_log_ratio, "env.frozen.sequence_log_ratio", e.frozen.sequence_log_ratio.empty());
    bool no_mu = t.log_mu.empty();
    if constexpr (is_ragged<Teacher>) no_mu = no_mu && t.ids.size > 0;
    need(column::log_mu, "teacher.log_mu", no_mu);
    if constexpr (Teacher::kind != cache_kind::support) {
        need(column::log_prox, "teacher.log_prox", t.log_prox.empty());
        need(column::log_ref, "teacher.log_ref", t.log_ref.empty());
        need(column::advantage, "teacher.advantage", t.advantage.empty());
        need(column::baseline, "teacher.baseline", t.baseline.empty());
        need(column::mu_entropy, "teacher.mu_entropy", t.mu_entropy.empty());
    }
}

/// How many of `total` ids in one line are row r's. Throws where its offsets do not lie in the line or descend.
inline index_t ids_of_row(const char* name, const row_offsets<>& offsets, index_t r, index_t total) {
    const index_t first = offsets[r], last = offsets[r + 1];
    if (first < 0 || last < first || last > total)
        throw invalid_input(name,
                            "from " + std::to_string(first) + " to " + std::to_string(last) +
                                ": offsets ascend from 0 to at most " + std::to_string(total) + ", the number of ids",
                            r);
    return last - first;
}
/// Sets of row r lie in the ids, one after the other.
template <class Teacher>
void check_kept_sets(const Teacher& t, index_t n) {
    if (n == 0) return;
    if (t.kept_ids.empty()) throw invalid_input("teacher.kept_ids", "is a null pointer");
    if (t.kept_offsets.empty()) throw invalid_input("teacher.kept_offsets", "is a null pointer");
    check_vector("teacher.kept_offsets", t.kept_offsets, n + 1);
    check_vector("teacher.log_kept_q", t.log_kept_q, n);
    if constexpr (Teacher::memory_space == space::host) {
        for (index_t r = 0; r < n; ++r) ids_of_row("teacher.kept_offsets", t.kept_offsets, r, t.kept_ids.size);
    } else if (t.widest < 1) {
        throw invalid_input("teacher.widest",
                            "must say how many ids a row keeps at most: offsets on a device cannot be "
                            "read before the call");
    }
    if (t.widest < 0) throw invalid_input("teacher.widest", "must be at least 0");
}
/// How the tokens were drawn and recorded: whether ratios can be made of it.
template <class Teacher>
void check_rollout(const Teacher& t, index_t n) {
    const filter& f = t.rollout.drawn_with;
    check_filter(f, "teacher.rollout.drawn_with");
    check_vector("teacher.rollout.log_norm", t.rollout.log_norm, n);
    if constexpr (has_kept_sets<Teacher>)
        check_kept_sets(t, n);
    else if (f.cuts())
        throw invalid_input("teacher.rollout.drawn_with", "cuts the vocabulary: importance ratios need what it kept, "
                                                          "teacher::on_kept_sets{cache, ids, offsets}");
    if (t.rollout.mode == logprob_mode::raw && (f.temperature != 1 || f.cuts()) && t.rollout.log_norm.empty() && n > 0)
        throw invalid_input("teacher.rollout.log_norm",
                            "is needed: raw log-probs are not those of the law that tokens were "
                            "drawn from under a temperature or a filter; give log of the sum of "
                            "mu^(1/T) over what was kept, a number a row, or record processed "
                            "log-probs");
}

/// Rows of ids in one line; n rows, over `vocab` ids. The most that one has.
template <class Teacher>
index_t check_ragged(const Teacher& t, index_t n, index_t vocab) {
    const auto line = [&](const char* name, const auto& v, bool optional) {
        if (optional && v.data == nullptr && v.size == 0) return;
        if (v.size != t.ids.size)
            throw invalid_input(name, "has " + std::to_string(v.size) + " entries for " + std::to_string(t.ids.size) +
                                          " ids");
        check_vector(name, v, -1);
    };
    line("teacher.ids", t.ids, false);
    line("teacher.log_q", t.log_q, false);
    line("teacher.log_mu", t.log_mu, true);
    check_vector("teacher.log_tail", t.log_tail, n);
    check_vector("teacher.offsets", t.offsets, n + 1);
    if (t.widest < 0) throw invalid_input("teacher.widest", "must be at least 0");
    if (n == 0) return t.widest;
    if (t.offsets.empty()) throw invalid_input("teacher.offsets", "is a null pointer");
    if constexpr (Teacher::memory_space == space::host) {
        index_t widest = 0;
        for (index_t r = 0; r < n; ++r) {
            const index_t k = ids_of_row("teacher.offsets", t.offsets, r, t.ids.size);
            if (k > vocab)
                throw invalid_input("teacher.offsets",
                                    std::to_string(k) + " ids for a vocabulary of " + std::to_string(vocab), r);
            if (t.widest > 0 && k > t.widest)
                throw invalid_input("teacher.widest",
                                    "is " + std::to_string(t.widest) + " where a row has " + std::to_string(k) + " ids",
                                    r);
            widest = k > widest ? k : widest;
        }
        return widest;
    } else if (t.widest < 1) {
        throw invalid_input("teacher.widest", "must say how many ids a row has at most: offsets on a device cannot be "
                                              "read before the call");
    }
    if (t.widest > vocab)
        throw invalid_input("teacher.widest",
                            "is " + std::to_string(t.widest) + " for a vocabulary of " + std::to_string(vocab));
    return t.widest;
}

template <class Teacher, class Student>
void check_teacher(const Teacher& t, const Student& s, index_t n, index_t k) {
    const auto input = [&](const char* name, auto v, bool optional) {
        if (!optional || !left_out(v)) check_matrix(name, v, n, k);
    };
    if (k < 1 && n > 0) throw invalid_input("teacher.ids", "has no columns");
    input("teacher.ids", t.ids, false);
    input("teacher.log_q", t.log_q, false);
    if constexpr (Teacher::kind == cache_kind::support) {
        if (k > s.vocab())
            throw invalid_input("teacher.ids", "has " + std::to_string(k) + " columns for a vocabulary of " +
                                                   std::to_string(s.vocab()));
        check_vector("teacher.log_tail", t.log_tail, n);
        input("teacher.log_mu", t.log_mu, true);
    } else {
        input("teacher.log_mu", t.log_mu, false);
        input("teacher.log_prox", t.log_prox, true);
        input("teacher.log_ref", t.log_ref, true);
        if (!left_out(t.advantage)) check_matrix("teacher.advantage", t.advantage, n, t.advantage.cols == 1 ? 1 : k);
        check_vector("teacher.baseline", t.baseline, n);
        check_vector("teacher.mu_entropy", t.mu_entropy, n);
        check_rollout(t, n);
        if constexpr (Teacher::kind == cache_kind::weighted) {
            input("teacher.weight", t.weight, false);
            input("teacher.exact", t.exact, true);
            check_vector("teacher.log_tail_mu", t.log_tail_mu, n);
        }
    }
}

/// Shapes of a cache of few ids a row, n rows over the student's vocabulary; of a ragged one the longest row is found.
template <class Teacher, class Student>
void check_slots(Teacher& t, const Student& s, index_t n) {
    if constexpr (has_row_map<Teacher>) {
        check_row_map(t, n);
        n = cache_rows(t, n);
    }
    if constexpr (own_storage<Teacher>)
        t.validate(n, s.vocab());
    else if constexpr (is_ragged<Teacher>)
        t.widest = check_ragged(t, n, s.vocab());
    else
        check_teacher(t, s, n, t.ids.cols);
}

/// Shapes of what is frozen: (N,m) as the cache of drawn tokens; other caches have no tokens that it could speak of.
template <cache_kind Kind, space S>
void check_frozen(const frozen_batch<S>& f, index_t n, index_t m) {
    if (f.empty() && left_out(f.keep) && left_out(f.weight) && left_out(f.advantage)) return;
    if constexpr (Kind != cache_kind::samples && Kind != cache_kind::weighted)
        throw invalid_input("env.frozen", "is about drawn tokens: teacher::samples or teacher::weighted");
    if (!left_out(f.keep)) check_matrix("env.frozen.keep", f.keep, n, m);
    if (!left_out(f.weight)) check_matrix("env.frozen.weight", f.weight, n, m);
    if (!left_out(f.advantage)) check_matrix("env.frozen.advantage", f.advantage, n, m);
    check_vector("env.frozen.sequence_log_ratio", f.sequence_log_ratio, n);
}

} // namespace OPD_ISA
} // namespace opd::detail
