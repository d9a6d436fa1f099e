// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A call of opd_evaluate on its way to the C++ call: what all its kinds have in common. dense.cpp, support.cpp and
// the others take it on from here, each for the caches it is named after.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine.hpp"
#include "opd/c/evaluate.h"
#include "opd/estimators/any.hpp"
#include "opd/evaluate.hpp"
#include "place.hpp"
#include "structs.hpp"

namespace opd_c::kernel {

struct call {
    backend& be;
    const opd_student& student;
    const opd_teacher& teacher;
    const opd_estimator& estimator;
    form what;
    opd::basic_env<where> env;
    std::uint64_t* workspace; ///< only its bytes are asked for
    opd::result* totals;      ///< where the caller wants the result, beside `result`; null: nowhere
    bool waits;               ///< of a device: somebody waits for the result

    template <class Student, class Teacher, class Estimator>
    opd::result run(const Student& s, const Teacher& t, const Estimator& e) const {
#if defined(OPD_KERNELS_CUDA)
        const std::size_t bytes = opd::workspace_bytes(be, s, t, e, env);
        if (workspace != nullptr) return *workspace = bytes, opd::result{};
        be.reserve(bytes);
        if constexpr (opd::detail::in_blocks<Student> || opd::detail::in_blocks<Teacher>) be.make_handle();
        be.results = totals;
        const opd::device_result r = opd::evaluate(be, s, t, e, env);
        if constexpr (requires { e.selector.which; }) leave_out_selector(e, r.data);
        return waits ? r.fetch(be.stream) : opd::result{};
#elif defined(OPD_KERNELS_HOST_RUN)
        if (workspace != nullptr) return *workspace = 1, opd::result{};
        return opd::evaluate(be, s, t, e, env);
#else
        if (workspace != nullptr) return *workspace = opd::workspace_bytes(be, s, t, e, env), opd::result{};
        return opd::evaluate(be, s, t, e, env);
#endif
    }

#if defined(OPD_KERNELS_CUDA)
private:
    /// What with_selector does to a result of the selector `all`, where the result lies.
    template <class Estimator>
    void leave_out_selector(const Estimator& e, const opd::result* of) const {
        using d = opd::diagnostics;
        constexpr std::size_t first = offsetof(opd::result, diagnostics) + offsetof(d, selector_rows),
                              after = offsetof(opd::result, diagnostics) + offsetof(d, selector_weight_sum) + 8;
        if (e.selector.which != opd::choice::selector::all) return;
        auto* const at = reinterpret_cast<std::byte*>(const_cast<opd::result*>(of)) + first;
        opd::detail::cuda_check("cudaMemsetAsync", cudaMemsetAsync(at, 0, after - first, be.stream));
    }
#endif
};

int evaluate(void* backend, const opd_student& student, const opd_teacher& teacher, const opd_estimator& estimator,
             const opd_env& env, opd_result* result, std::uint64_t* workspace);

opd::result dense(const call& c);
opd::result renormalised(const call& c);
opd::result support(const call& c);
opd::result sampled(const call& c);
opd::result lumped(const call& c);
opd::result hidden_dense(const call& c);
opd::result hidden_entries(const call& c);
opd::result hidden_renormalised(const call& c);

/// A line of a table by the caller's name for it.
template <class Table>
auto named(const char* member, const Table& table, const char* text, const char* by_default) {
    const std::string_view name = text != nullptr ? text : by_default;
    const auto found = opd::choice::find(table, name);
    if (!found) {
        std::string all;
        for (const auto& line : table) all.append(all.empty() ? "" : ", ").append(line.text);
        refuse(member, "is '" + std::string(name.substr(0, 64)) + "'; it takes " + all);
    }
    return *found;
}
inline opd::any_dense divergence_of(const opd_estimator& e) {
    return {named("estimator.of", opd::choice::divergences, e.of, "reverse_kl"), e.a, e.b};
}
inline opd::any_selector selector_of(const opd_estimator& e) {
    if (e.selector == nullptr) return {};
    return {named("estimator.selector", opd::choice::selectors, e.selector, "all"), e.selector_a, e.selector_b};
}
inline float temperature_of(double t) { return static_cast<float>(or_default(t, 1.0)); }

/// body(estimator) under the caller's selector. One type for all of them: that without a selector is `all`, which
/// weighs every row with 1.
template <class Estimator, class Body>
opd::result with_selector(const opd_estimator& of, const Estimator& e, Body&& body) {
    const opd::any_selector selector = selector_of(of);
    opd::result r = body(opd::selected{e, selector});
    if (selector.which == opd::choice::selector::all)
        r.diagnostics.selector_rows = r.diagnostics.selector_left_out = 0, r.diagnostics.selector_weight_sum = 0;
    return r;
}

/// body(divergence) with the caller's divergence: chosen at run time where rows are the processor's, whose leaves are
/// called through tables; of its own type where they are a device's.
template <class Body>
opd::result with_divergence(const opd::any_dense& d, Body&& body) {
    d.validate();
    if constexpr (on_device)
        return d.visit([&](const auto& divergence) { return body(divergence); });
    else
        return body(d);
}

/// The type of a tensor that must be there.
inline dtype type_of(const char* name, const DLTensor* t) {
    if (t == nullptr) refuse(name, "is a null pointer");
    return opd_c::type_of(*t);
}

template <class Z, class G>
opd::student::logits<Z, G, where> logits_of(const opd_student& s) {
    opd::student::logits<Z, G, where> to;
    to.z = matrix<const Z>("student.z", s.z), to.dz = matrix<G>("student.dz", s.dz);
    to.dz.padding = s.padding;
    if (s.padding > opd::index_t{1} << 40) refuse("student.padding", "is larger than any memory");
    if (to.dz.rows <= 1) // a single row has no step to the next
        to.dz.stride = std::max(to.dz.stride, to.dz.cols + s.padding);
    to.temperature = temperature_of(s.temperature);
    to.pad = s.keep_padding ? opd::padding::keep : opd::padding::zero;
    return to;
}

/// Ids of the student's side; 0 where the tensor that says it is missing, which the call then refuses.
inline opd::index_t vocab_of(const opd_student& s) {
    const DLTensor* const t = s.kind == OPD_HIDDEN ? s.w : s.z;
    if (t == nullptr || t->ndim < 1 || t->shape == nullptr) return 0;
    return s.kind == OPD_HIDDEN ? t->shape[0] : t->shape[t->ndim - 1];
}

/// Of logits and gradient of types that no kernel has together.
[[noreturn]] inline void refuse_types(const opd_student& s) {
    throw opd::unsupported("opd: student.z is of " + name_of(*s.z) + " and student.dz of " +
                           name_of(s.dz == nullptr ? *s.z : *s.dz) + "; this cache takes one type for both: float32, " +
                           (on_device ? "" : "float64, ") + "bfloat16 or float16" + (on_device ? " on a device" : ""));
}

/// body(Z{}) with the one type of logits and gradient.
template <class Body>
opd::result with_logits_type(const opd_student& s, Body&& body) {
    const dtype z = kernel::type_of("student.z", s.z), dz = s.dz == nullptr ? z : opd_c::type_of(*s.dz);
    if (z == dtype::float32 && dz == z) return body(float{});
    if constexpr (!on_device)
        if (z == dtype::float64 && dz == z) return body(double{});
    if (z == dtype::bfloat16 && dz == z) return body(opd::bfloat16{});
    if (z == dtype::half && dz == z) return body(opd::half{});
    refuse_types(s);
}

} // namespace opd_c::kernel
