// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of logits for calls that read a whole row at a time (score.hpp, draw.hpp): a view of them, or a source
// (docs/concepts/source.md) whose rows are one tile, read as a view is. Of hidden states the backend makes them, in
// blocks.
#pragma once

#include <string>
#include <type_traits>

#include "opd/caches.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// A source as a matrix of logits.
template <class Source>
struct rows_of_source {
    using source_type = Source;
    using logit_type = typename Source::logit_type;
    Source source;
    index_t rows, cols;
    explicit rows_of_source(const Source& s) : source(s), rows(s.rows()), cols(s.vocab()) {
        if constexpr (requires { source.dw; }) { // nothing here has a gradient
            source.dx = source.dw = {}, source.db = {};
            if constexpr (is_lora<decltype(source.w)>) source.w.db = source.w.da = {};
        }
    }
    OPD_HD const logit_type* row(index_t r) const { return source.tile({r}, 0); }
    OPD_HD const logit_type& operator()(index_t r, index_t c) const { return row(r)[c]; }
};

/// A view that is read as a source is; errors call it z.
template <class Z, space S>
struct viewed : teacher::dense<Z, S> {};
template <class Source>
inline constexpr bool is_viewed = false;
template <class Z, space S>
inline constexpr bool is_viewed<viewed<Z, S>> = true;

/// Logits that a call reads, a view at a temperature or a source, as a source.
template <class Z, space S>
viewed<std::remove_const_t<Z>, S> as_source(const matrix_view<Z, S>& z, float temperature = 1) {
    return {{z, temperature}};
}
template <readable_source Source>
const Source& as_source(const Source& s) {
    return s;
}
template <class Logits>
concept readable_logits = requires(const Logits& z) {
    as_source(z);
};

/// A call's logits and what it writes lie where the backend is.
template <class Backend, class Logits, space S>
constexpr void check_spaces() {
    static_assert(S == space_of<std::remove_cvref_t<Backend>>() && S == Logits::memory_space,
                  "opd: the views must lie in the backend's memory space");
}

/// A source's rows as a job has them.
template <class Source>
auto job_rows(const Source& s) {
    if constexpr (is_viewed<Source>)
        return s.y;
    else
        return rows_of_source<Source>(s);
}

/// Whether a source's rows may be read whole. `name_of`: what its members are called in errors.
template <class Source>
constexpr bool reads_whole() {
    constexpr bool whole = [] {
        if constexpr (made_source<Source>)
            return true;
        else
            return row_source<Source> && Source::one_tile && !has_scratch<Source>;
    }();
    static_assert(whole, "opd: scores and draws read whole rows: of a view, student::logits, teacher::dense, "
                         "student::hidden, teacher::hidden, or a source that is one_tile without scratch");
    return whole;
}
template <class Source>
constexpr const char* name_of() {
    return teacher_cache<Source> ? "teacher" : "student";
}

template <class Z, space S>
void check_rows(const matrix_view<Z, S>& z) {
    check_matrix("z", z, z.rows, z.cols);
    if (z.cols < 1 && z.rows > 0) throw invalid_input("z", "has no columns");
}
template <class Source>
void check_rows(const rows_of_source<Source>& z) {
    if constexpr (teacher_cache<Source>)
        check_dense_teacher(z.source, z.rows);
    else
        check_student(z.source);
    if (z.cols < 1 && z.rows > 0) throw invalid_input(name_of<Source>(), "has no columns");
}
template <class Z, space S>
void read_rows(call_spans& spans, const matrix_view<Z, S>& z) {
    spans.reads("z", z);
}
template <class Source>
void read_rows(call_spans& spans, const rows_of_source<Source>& z) {
    const Source& s = z.source;
    if constexpr (in_blocks<Source>)
        read_states(spans, s);
    else if constexpr (requires { s.y; })
        spans.reads("teacher.y", s.y);
    else if constexpr (requires { s.z; })
        spans.reads("student.z", s.z);
}

/// The row of logits that a view's elements, or a source, are.
template <class Rows>
struct logit_of_rows {
    using type = typename Rows::logit_type;
};
template <class Z, space S>
struct logit_of_rows<matrix_view<Z, S>> {
    using type = std::remove_const_t<Z>;
};

} // namespace OPD_ISA
} // namespace opd::detail
