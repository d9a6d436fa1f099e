// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a call must satisfy before anything is written: shapes, strides, aliasing and the pairing of student, cache and
// estimator always; contents by the bits of the numbers where the caller asks (check::contents, infinite::raise).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/filter.hpp"
#include "opd/head.hpp"
#include "opd/reduction.hpp"
#include "opd/row_facts.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/slots.hpp"
#include "opd/rows/tiles.hpp"
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

/// Temperatures at which float arithmetic still tells logits apart.
OPD_INLINE bool temperature_in_range(const float& t) { return is_finite(t) && t >= 1e-6F && t <= 1e6F; }
OPD_INLINE void check_temperature(const char* name, const float& t) {
    if (!temperature_in_range(t)) throw invalid_input(name, "must lie between 1e-6 and 1e6");
}

/// Every span of a call; no output may overlap another span. Matrices are compared as strided rectangles with their padding:
/// two column ranges of one buffer do not overlap.
class call_spans {
public:
    template <class T, space S>
    void reads(const char* name, const matrix_view<T, S>& v) {
        add(name, v, false);
    }
    template <class T, space S>
    void writes(const char* name, const matrix_view<T, S>& v) {
        add(name, v, true);
    }
    template <class View>
    void reads(const char* name, const View& v) {
        add(name, v, false);
    }
    template <class View>
    void writes(const char* name, const View& v) {
        add(name, v, true);
    }

    /// Throws if an output overlaps another span. `apart`: false where the caller lets the two spans of these names coincide.
    void check(const char* output = nullptr, const char* input = nullptr, bool apart = true) const {
        for (int w = 0; w < size_; ++w)
            for (int i = 0; i < size_; ++i) {
                const bool once = !spans_[i].written || i > w; // of two outputs the first one is named first
                if (!spans_[w].written || i == w || !once || !overlap(spans_[w], spans_[i])) continue;
                const bool named = spans_[w].name == output && spans_[i].name == input;
                if (named && !apart) continue;
                throw invalid_input(spans_[w].name,
                                    std::string("overlaps ") + spans_[i].name +
                                        (named ? "; only the same pointer, type and stride may alias" : ""));
            }
    }

private:
    struct span {
        const char* name;
        std::uintptr_t begin, rows, width, stride; ///< in bytes
        bool written;
    };
    static constexpr int most = 40; // a call has at most 32
    span spans_[most];
    int size_ = 0;

    template <class T, space S>
    void add(const char* name, const matrix_view<T, S>& v, bool written) {
        const auto bytes = [](index_t n) { return static_cast<std::uintptr_t>(n) * sizeof(T); };
        put({name, reinterpret_cast<std::uintptr_t>(v.data), static_cast<std::uintptr_t>(v.rows),
             bytes(v.cols + v.padding), bytes(v.stride), written});
    }
    template <class View>
    void add(const char* name, const View& v, bool written) {
        const std::uintptr_t bytes = static_cast<std::uintptr_t>(v.size) * element_bytes(v);
        put({name, reinterpret_cast<std::uintptr_t>(v.data), 1, bytes, bytes, written});
    }
    void put(const span& s) {
        if (s.begin == 0 || s.rows == 0 || s.width == 0) return;
        if (size_ == most) throw unsupported("opd: a call of more spans than are compared");
        spans_[size_++] = s;
    }
    static bool overlap(const span& a, const span& b) {
        if (b.begin < a.begin) return overlap(b, a);
        const std::uintptr_t apart = b.begin - a.begin;
        if (a.rows == 1) return apart < a.width;
        if (b.rows > 1 && b.stride != a.stride) return apart < (a.rows - 1) * a.stride + a.width;
        const std::uintptr_t row = apart / a.stride, column = apart % a.stride;
        return (row < a.rows && column < a.width) || (row + 1 < a.rows && column + b.width > a.stride);
    }
};

/// What logits are made of (hidden.hpp); of a head of the caller's own nothing is known.
template <class Hidden>
void read_states(call_spans& spans, const Hidden& h) {
    const auto of = [&spans](const char* of_student, const char* of_teacher, const auto& v) {
        spans.reads(
            requires { Hidden::kind; } ? of_teacher : of_student, v);
    };
    of("student.x", "teacher.x", h.x), of("student.bias", "teacher.bias", h.bias);
    if constexpr (is_matrix<decltype(base_of(h.w))>) of("student.w", "teacher.w", base_of(h.w));
    if constexpr (is_lora<decltype(h.w)>)
        of("student.w.b", "teacher.w.b", h.w.b), of("student.w.a", "teacher.w.a", h.w.a);
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

/// Shape and range of a source of rows that holds no view: its own checks first. Names are put together where something is thrown.
template <class Source>
void check_source(const char* name, const Source& s, index_t rows) {
    const auto member = [name](const char* m) { return std::string(name).append(m); };
    if constexpr (requires { s.validate(); }) s.validate();
    if (s.rows() < 0) throw invalid_input(member(".rows()"), "is negative");
    if (s.rows() != rows)
        throw invalid_input(member(".rows()"),
                            "are " + std::to_string(s.rows()) + " for " + std::to_string(rows) + " rows");
    if (s.vocab() < 1 && rows > 0) throw invalid_input(member(".vocab()"), "holds no id");
    if (rows > 0 && s.tile_size() < s.vocab() && (s.tile_size() < 1 || s.tile_size() % 1024 != 0))
        throw invalid_input(member(".tile_size()"),
                            "must be a multiple of 1,024 ids, or hold the whole vocabulary; it is " +
                                std::to_string(s.tile_size()));
    if (Source::one_tile && s.tile_size() < s.vocab())
        throw invalid_input(member(".tile_size()"), "is below the vocabulary, though the source says one_tile");
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
        check_logits(s, s.rows(), t.ids.cols);
    }
}
template <class Teacher>
void check_dense_teacher(const Teacher& t, index_t rows) {
    if constexpr (!materialised<Teacher>)
        return check_source("teacher", t, rows);
    else {
        check_matrix("teacher.y", t.y, rows, -1);
        check_temperature("teacher.temperature", t.temperature);
    }
}

/// dz on z exactly is allowed; any other overlap is none.
template <class Student>
void check_in_place(const call_spans& spans, const Student& s, float beta) {
    static constexpr const char *z = "student.z", *dz = "student.dz";
    const bool in_place = !Student::sparse_gradient && !s.dz.empty() &&
                          static_cast<const void*>(s.dz.data) == s.z.data && s.dz.stride == s.z.stride &&
                          std::is_same_v<typename Student::logit_type, typename Student::gradient_type>;
    if (!in_place) return spans.check(dz, z);
    if (beta != 0) throw invalid_input(dz, "is student.z, which env.beta = 0 alone allows");
    if (s.dz.stride > s.dz.cols && s.dz.padding == 0 && s.pad == padding::zero)
        throw invalid_input(dz, "is student.z in rows of " + std::to_string(s.dz.stride) + " for " +
                                    std::to_string(s.dz.cols) +
                                    " columns: say .padding = " + std::to_string(s.dz.stride - s.dz.cols) +
                                    " in the gradient's view (opd::padded_view) to have the rest set to zero, or "
                                    ".pad = opd::padding::keep to leave it as it is");
    spans.check(dz, z, false);
}

/// No output of the call over anything else of it, but dz on z exactly.
template <class Student, class Teacher, space S>
void check_overlaps(const Student& s, const Teacher& t, const basic_env<S>& e) {
    static constexpr const char *z = "student.z", *dz = "student.dz";
    constexpr bool views = materialised<Student>; // another source has seen to itself
    call_spans spans;
    if constexpr (views) spans.writes(dz, s.dz);
    if constexpr (in_blocks<Student>) {
        spans.writes("student.dx", s.dx), spans.writes("student.dw", s.dw), spans.writes("student.db", s.db);
        if constexpr (is_lora<decltype(s.w)>)
            spans.writes("student.w.db", s.w.db), spans.writes("student.w.da", s.w.da);
        read_states(spans, s);
    }
    if constexpr (in_blocks<Teacher>) read_states(spans, t);
    spans.writes("env.losses", e.losses);
    spans.writes("env.lse", e.lse);
    spans.writes("env.measure.ratios", e.measure.ratios);
    if constexpr (views) spans.reads(z, s.z);
    if constexpr (Teacher::kind == cache_kind::dense) {
        if constexpr (materialised<Teacher>) spans.reads("teacher.y", t.y);
    } else {
        spans.reads("teacher.ids", t.ids);
        spans.reads("teacher.log_q", t.log_q);
        if constexpr (Teacher::kind == cache_kind::support) {
            spans.reads("teacher.log_tail", t.log_tail);
            spans.reads("teacher.log_mu", t.log_mu);
            if constexpr (is_ragged<Teacher>) spans.reads("teacher.offsets", t.offsets);
        } else {
            spans.reads("teacher.log_mu", t.log_mu);
            spans.reads("teacher.log_prox", t.log_prox);
            spans.reads("teacher.log_ref", t.log_ref);
            spans.reads("teacher.advantage", t.advantage);
            spans.reads("teacher.baseline", t.baseline);
            spans.reads("teacher.mu_entropy", t.mu_entropy);
            spans.reads("teacher.rollout.log_norm", t.rollout.log_norm);
            if constexpr (has_kept_sets<Teacher>) {
                spans.reads("teacher.kept_ids", t.kept_ids);
                spans.reads("teacher.kept_offsets", t.kept_offsets);
                spans.reads("teacher.log_kept_q", t.log_kept_q);
            }
            if constexpr (Teacher::kind == cache_kind::weighted) {
                spans.reads("teacher.weight", t.weight);
                spans.reads("teacher.exact", t.exact);
                spans.reads("teacher.log_tail_mu", t.log_tail_mu);
            }
        }
    }
    spans.reads("env.mask", e.mask);
    spans.reads("env.weights", e.weights);
    spans.reads("env.offsets", e.offsets);
    spans.reads("env.versions", e.versions);
    spans.reads("env.given_lse", e.given_lse);
    spans.reads("env.frozen.keep", e.frozen.keep);
    spans.reads("env.frozen.weight", e.frozen.weight);
    spans.reads("env.frozen.sequence_log_ratio", e.frozen.sequence_log_ratio);
    spans.reads("env.frozen.advantage", e.frozen.advantage);

    if constexpr (views)
        check_in_place(spans, s, e.beta);
    else
        spans.check();
}

template <class Estimator>
void validate_estimator(const Estimator& e) {
    if constexpr (requires { e.validate(); }) e.validate();
}
/// Which facts a selector may read (row_facts.hpp).
template <class Estimator, cache_kind Kind>
constexpr unsigned facts_known() {
    constexpr bool renormalised = Kind == cache_kind::support && renormalised_estimator<Estimator>;
    if (Kind == cache_kind::dense || renormalised) return fact::of_dense;
    return Kind == cache_kind::support ? fact::of_buckets : fact::of_tokens;
}
template <class Estimator, cache_kind Kind>
constexpr bool selector_is_fed() {
    return (selector_facts<Estimator>::read & ~facts_known<Estimator, Kind>()) == 0;
}
/// Whether a selector that mixes has a weighted_sum to mix.
template <class Estimator>
constexpr bool selector_has_a_sum() {
    if constexpr (!selector_mixes<Estimator>())
        return true;
    else if constexpr (renormalised_estimator<Estimator>)
        return requires(const Estimator& e) { e.on_support.is_weighted_sum; };
    else
        return requires { Estimator::is_weighted_sum; };
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

/// The pass of check::contents, and of infinite::raise, over rows of logits: by bits, before anything is written. check_logit_row
/// reads n logits, those of the ids from `first` on, and says whether one of them has mass.
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

/// Whether E's gradient may be stored on the support alone.
template <class E>
constexpr bool offers_sparse_gradient() {
    if constexpr (requires { E::sparse_gradient; })
        return E::sparse_gradient;
    else
        return false;
}

/// Sentences for a call whose types do not fit. Each function below says the first thing that is wrong and is then false, so
/// that nothing else is instantiated and one mistake is one error. Classes that have said it themselves are passed over.
template <class...>
inline constexpr bool never = false;

template <class S>
concept student_source = requires {
    typename S::logit_type;
    typename S::gradient_type;
    S::sparse_gradient;
};
/// What every source of rows answers (docs/concepts/source.md); a student's also where its gradient goes.
template <class S>
concept row_source = requires(const S s, row_place at, index_t i) {
    { s.rows() } -> std::convertible_to<index_t>;
    { s.vocab() } -> std::convertible_to<index_t>;
    { s.tile_size() } -> std::convertible_to<index_t>;
    { s.tile(at, i) } -> std::convertible_to<const typename S::logit_type*>;
    { s.logit(at, i) } -> std::convertible_to<typename S::logit_type>;
    { S::one_tile } -> std::convertible_to<bool>;
    { s.temperature } -> std::convertible_to<double>;
};
template <class S>
concept gradient_sink = requires(const S s, row_place at, index_t i) {
    { s.has_gradient() } -> std::convertible_to<bool>;
    { s.gradient_tile(at, i) } -> std::convertible_to<typename S::gradient_type*>;
    { s.gradient_at(at, i) } -> std::same_as<typename S::gradient_type&>;
};
template <class T>
concept teacher_cache = requires {
    T::kind;
    T::memory_space;
};

/// Whether T's template arguments are what T asserts of them.
template <class T>
constexpr bool parts_fit() {
    bool fit = !requires { typename T::misfit; };
    if constexpr (requires { typename T::logit_type; }) fit = fit && storage<typename T::logit_type>;
    if constexpr (requires { typename T::gradient_type; }) fit = fit && storage<typename T::gradient_type>;
    if constexpr (requires { typename T::id_type; }) fit = fit && std::integral<typename T::id_type>;
    if constexpr (requires { typename T::log_type; }) fit = fit && storage<typename T::log_type>;
    if constexpr (requires { T::well_formed; }) fit = fit && T::well_formed;
    return fit;
}

/// Whether an estimator's baseline, if it has one, is for this kind of cache.
template <class E, cache_kind K>
constexpr bool baseline_fits() {
    if constexpr (requires { E::baseline_reads(K); })
        return E::baseline_reads(K);
    else
        return true;
}

/// Cache and estimator belong together, or a sentence says what does.
template <class Student, class Teacher, class Estimator>
constexpr bool pairing_fits() {
    constexpr cache_kind kind = Teacher::kind;
    constexpr bool dense = kind == cache_kind::dense, samples = kind == cache_kind::samples;
    if constexpr (dense && reads_cache<Estimator, cache_kind::samples>())
        static_assert(never<Estimator>,
                      "opd: this estimator reads drawn tokens: use teacher::samples{ids, log_mu, log_q}; "
                      "a teacher::dense cache takes a divergence such as reverse_kl{}");
    else if constexpr (dense && reads_cache<Estimator, cache_kind::weighted>())
        static_assert(never<Estimator>,
                      "opd: this estimator reads weighted tokens: use teacher::weighted{ids, weight, "
                      "log_mu, log_q}; a teacher::dense cache takes a divergence such as reverse_kl{}");
    else if constexpr (dense && reads_cache<Estimator, cache_kind::support>())
        static_assert(never<Estimator>, "opd: this estimator reads a support: use teacher::support{ids, log_q}; "
                                        "a teacher::dense cache takes a divergence such as reverse_kl{}");
    else if constexpr (dense && !divergence<Estimator>)
        static_assert(never<Estimator>,
                      "opd: a teacher::dense cache takes a divergence: a struct with `F term(row_constants<F>, "
                      "dense_entry<F>) const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                      "docs/concepts/divergence.md");
    else if constexpr (kind == cache_kind::support && !reads_cache<Estimator, kind>())
        static_assert(
            never<Estimator>,
            "opd: a teacher::support cache takes renormalised{divergence}, tail_bucket{divergence} or another "
            "estimator of a support");
    else if constexpr (!dense && divergence<Estimator>)
        static_assert(never<Estimator>,
                      "opd: a divergence reads every logit of the teacher: use teacher::dense; drawn tokens take "
                      "mc{divergence}");
    else if constexpr ((samples || kind == cache_kind::weighted) && !reads_cache<Estimator, kind>())
        static_assert(never<Estimator>, "opd: a cache of drawn tokens takes mc{divergence, surrogate, baseline}");
    else if constexpr (kind == cache_kind::support && !support_estimator<Estimator> &&
                       !renormalised_estimator<Estimator>)
        static_assert(never<Estimator>,
                      "opd: an estimator of a support has `entry_row row(support_entries&, entry_facts, diagnostics&) "
                      "const`, or a divergence on_support; see docs/concepts/entries.md");
    else if constexpr (!dense && kind != cache_kind::support && !sampled_estimator<Estimator>)
        static_assert(never<Estimator>,
                      "opd: an estimator of drawn tokens has `entry_row row(sampled_entry*, int, entry_facts, "
                      "diagnostics&) const`; see docs/concepts/entries.md");
    else if constexpr (!baseline_fits<Estimator, kind>())
        static_assert(never<Estimator>, "opd: this baseline does not read this cache: leave_one_out, self_normalised "
                                        "and minimum_variance need i.i.d. teacher::samples, value needs "
                                        "teacher::weighted");
    else if constexpr (!selector_is_fed<Estimator, kind>())
        static_assert(never<Estimator>,
                      "opd: this selector reads what these rows do not know: the teacher's entropy and the overlap are "
                      "known of teacher::dense and renormalised supports, the student's entropy of these and of drawn "
                      "tokens, log_ratio and gap of drawn tokens; see docs/estimators/selectors.md");
    else if constexpr (!selector_has_a_sum<Estimator>())
        static_assert(never<Estimator>, "opd: a selector with mix() chooses the weights of a weighted_sum: "
                                        "selected{weighted_sum{reverse_kl{}, forward_kl{}}, selector}, on "
                                        "teacher::dense, or renormalised{weighted_sum{…}}");
    else if constexpr (traits_of<Estimator>(law_of<Teacher>()).descends == descent::none)
        static_assert(never<Estimator>,
                      "opd: this estimator descends nothing: the mean of its gradient over these tokens is 0, as of "
                      "k1 differentiated; see docs/estimators/surrogates.md");
    else if constexpr (traits_of<Estimator>(law_of<Teacher>()).descends == descent::other)
        static_assert(never<Estimator>,
                      "opd: on these tokens this estimator descends something else than its divergence: "
                      "score_function on stale samples, advantage::old, a shape that is not monotone, or the like; "
                      "say teacher::on_policy{cache} if the student drew them, or accept_bias{estimator}; see "
                      "docs/estimators/surrogates.md");
    else if constexpr (Student::sparse_gradient && !offers_sparse_gradient<Estimator>())
        static_assert(
            never<Estimator>,
            "opd: student::on_support takes renormalised{divergence} alone: every other loss moves all logits "
            "through the normaliser and has a dense gradient; use student::logits");
    else
        return true;
    return false;
}

/// `name`: of the filter; names are put together where something is thrown, for nothing is allocated otherwise.
inline void check_filter(const filter& f, const char* name = "filter") {
    const auto refuse = [name](const char* member, const char* why) {
        throw invalid_input(std::string(name) + member, why);
    };
    if (!temperature_in_range(f.temperature)) refuse(".temperature", "must lie between 1e-6 and 1e6");
    if (f.top_k < 0) refuse(".top_k", "must be 0, for all ids, or more");
    if (!is_finite(f.top_p) || !(f.top_p > 0 && f.top_p <= 1)) refuse(".top_p", "must lie in (0, 1]; 1 keeps all");
    if (!is_finite(f.min_p) || !(f.min_p >= 0 && f.min_p <= 1)) refuse(".min_p", "must lie in [0, 1]; 0 keeps all");
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
        const double log_tail = inferred ? -1 : load_log(t.log_tail[r]);
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

/// check::contents over the columns of log mu: one that is 0 in every kept row, of at least 16, was never filled in. Unused
/// slots and entries that are marked as certain say nothing.
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
