// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The spans of memory that a call reads and writes: no output may overlap another span, but dz on z exactly.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/head.hpp"
#include "opd/reduction.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Every span of a call; no output may overlap another span. Matrices are compared as strided rectangles with their
/// padding: two column ranges of one buffer do not overlap.
class call_spans {
public:
    void reads(const char* name, const auto& v) { add(name, v, false); }
    void writes(const char* name, const auto& v) { add(name, v, true); }

    // The same of arguments that are to have a shape, which is checked at once.

    void reads(const char* name, const auto& v, index_t n) { check_vector(name, v, n), reads(name, v); }
    void writes(const char* name, const auto& v, index_t n) { check_vector(name, v, n), writes(name, v); }
    void reads(const char* name, const auto& v, index_t rows, index_t cols) {
        check_matrix(name, v, rows, cols), reads(name, v);
    }
    void writes(const char* name, const auto& v, index_t rows, index_t cols) {
        check_matrix(name, v, rows, cols), writes(name, v);
    }
    void may_write(const char* name, const auto& v, index_t rows, index_t cols) {
        if (!left_out(v)) writes(name, v, rows, cols);
    }

    /// Throws if an output overlaps another span. `apart`: false where the caller lets the two spans of these names
    /// coincide.
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
    if constexpr (fills_rows<Hidden>) {
        h.reads(spans);
    } else {
        const auto of = [&spans](const char* of_student, const char* of_teacher, const auto& v) {
            spans.reads(
                requires { Hidden::kind; } ? of_teacher : of_student, v);
        };
        of("student.x", "teacher.x", h.x), of("student.bias", "teacher.bias", h.bias);
        if constexpr (is_matrix<decltype(base_of(h.w))>) of("student.w", "teacher.w", base_of(h.w));
        if constexpr (is_lora<decltype(h.w)>)
            of("student.w.b", "teacher.w.b", h.w.b), of("student.w.a", "teacher.w.a", h.w.a);
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
    if constexpr (has_row_map<Teacher>) spans.reads("teacher.map", t.map);
    if constexpr (Teacher::kind == cache_kind::dense) {
        if constexpr (materialised<Teacher> || (has_row_map<Teacher> && requires { t.y; }))
            spans.reads("teacher.y", t.y);
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

} // namespace OPD_ISA
} // namespace opd::detail
