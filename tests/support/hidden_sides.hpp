// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Hidden states for tests: one side of a call with the logits that it makes by the library's products, sinks of its
// gradients, and what these must be in float64. A test includes it as support/compiled/hidden_sides.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

namespace opd::test {

using floats = std::vector<float>;

floats normals(std::size_t n, unsigned seed, float deviation = 1);
inline bool equal_bits(const floats& a, const floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// One side: hidden states, head, and the logits they make, by the same products.
struct side {
    index_t n, v, d;
    floats x, w, bias;
    float cap = 0;
    side(index_t n_, index_t v_, index_t d_, unsigned seed, bool biased = false, float cap_ = 0)
        : n(n_), v(v_), d(d_), x(normals(std::size_t(n * d), seed)),
          w(normals(std::size_t(v * d), seed + 1, 2 / std::sqrt(float(d)))), cap(cap_) {
        if (biased) bias = normals(std::size_t(v), seed + 2);
    }
    floats logits() const {
        floats z(std::size_t(n * v));
        product(serial_executor{}, product_nt(n, v, d, x.data(), d, w.data(), d, z.data(), v));
        if (!bias.empty())
            for (std::size_t i = 0; i < z.size(); ++i) z[i] += bias[i % std::size_t(v)];
        if (cap > 0)
            for (float& y : z) y = cap * std::tanh(y / cap);
        return z;
    }
    auto states() const { return view(x.data(), n, d); }
    auto head() const { return view(w.data(), v, d); }
    vector_view<const float> biases() const { return {bias.empty() ? nullptr : bias.data(), bias.empty() ? 0 : v}; }
};

struct gradients {
    floats dx, dw, db;
    gradients(const side& s, float fill = 0)
        : dx(std::size_t(s.n * s.d), fill), dw(std::size_t(s.v * s.d), fill), db(std::size_t(s.v), fill) {}
    bool operator==(const gradients& o) const {
        return equal_bits(dx, o.dx) && equal_bits(dw, o.dw) && equal_bits(db, o.db);
    }
};

inline student::hidden<float> student_of(const side& s, gradients& g, std::size_t budget = std::size_t{1} << 30) {
    return {.x = s.states(),
            .w = s.head(),
            .dx = view(g.dx.data(), s.n, s.d),
            .dw = view(g.dw.data(), s.v, s.d),
            .bias = s.biases(),
            .db = view(g.db.data(), s.v),
            .soft_cap = s.cap,
            .budget = budget};
}
inline teacher::hidden<float> teacher_of(const side& t, std::size_t budget = std::size_t{1} << 30) {
    return {.x = t.states(), .w = t.head(), .bias = t.biases(), .soft_cap = t.cap, .budget = budget};
}

inline double distance(const floats& a, const std::vector<double>& b) {
    double far = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) far += std::pow(double(a[i]) - b[i], 2), size += b[i] * b[i];
    return std::sqrt(far / std::max(size, 1e-300));
}

/// What dz says of hidden states and head, in float64: the gradient of z = cap tanh((x Wᵀ + b)/cap).
inline void check_gradients(const side& s, const floats& z, const floats& dz, const gradients& g) {
    std::vector<double> dx(g.dx.size()), dw(g.dw.size()), db(g.db.size());
    for (index_t r = 0; r < s.n; ++r)
        for (index_t i = 0; i < s.v; ++i) {
            double slope = double(dz[std::size_t(r * s.v + i)]);
            if (s.cap > 0) {
                const double t = double(z[std::size_t(r * s.v + i)]) / double(s.cap);
                slope *= 1 - t * t;
            }
            if (slope == 0) continue;
            db[std::size_t(i)] += slope;
            for (index_t j = 0; j < s.d; ++j) {
                dx[std::size_t(r * s.d + j)] += slope * double(s.w[std::size_t(i * s.d + j)]);
                dw[std::size_t(i * s.d + j)] += slope * double(s.x[std::size_t(r * s.d + j)]);
            }
        }
    CHECK(distance(g.dx, dx) < 2e-6);
    CHECK(distance(g.dw, dw) < 2e-6);
    CHECK(distance(g.db, db) < 2e-6);
}

/// Counts are equal, sums to rounding: groups of rows differ.
inline void check_diagnostics(const diagnostics& got, const diagnostics& expected) {
    diagnostics::fields([&](const char* name, auto field, auto) {
        CAPTURE(name);
        const auto &a = got.*field, &b = expected.*field;
        if constexpr (std::is_array_v<std::remove_cvref_t<decltype(a)>>)
            CHECK(std::equal(std::begin(a), std::end(a), std::begin(b)));
        else if constexpr (std::is_floating_point_v<std::remove_cvref_t<decltype(a)>>)
            CHECK(a == doctest::Approx(b).epsilon(1e-12));
        else
            CHECK(a == b);
    });
}

/// The call on hidden states against that on their logits: losses, log-sum-exps and diagnostics the same, gradients
/// right; whatever the budget and the threads. `teacher` stands beside hidden students, `known` beside logits;
/// `more(source)` sets more members of either student. Returns the result on logits.
struct nothing_more {
    void operator()(auto&) const {}
};
template <class Teacher, class Materialised, class Estimator, class More = nothing_more>
result compare(const side& s, const Teacher& teacher, const Materialised& known, const Estimator& estimator, env e = {},
               const More& more = {}) {
    cpu_backend be{.threads = 1};
    const floats z = s.logits();
    floats dz(z.size()), losses(std::size_t(s.n)), same_losses(losses.size());
    std::vector<double> lse(std::size_t(s.n)), same_lse(lse.size());
    env with = e;
    constexpr bool has_lse = !renormalised_estimator<Estimator>; // over the vocabulary
    with.losses = view(losses.data(), s.n);
    if (has_lse) with.lse = view(lse.data(), s.n);
    student::logits plain{view(z.data(), s.n, s.v), view(dz.data(), s.n, s.v)};
    more(plain);
    const result expected = evaluate(be, plain, known, estimator, with);
    with.losses = view(same_losses.data(), s.n);
    if (has_lse) with.lse = view(same_lse.data(), s.n);
    gradients first(s, 7);
    auto source = student_of(s, first);
    more(source);
    const result got = evaluate(be, source, teacher, estimator, with);
    CHECK(got.loss == doctest::Approx(expected.loss).epsilon(1e-12));
    check_diagnostics(got.diagnostics, expected.diagnostics);
    CHECK(equal_bits(same_losses, losses));
    CHECK(same_lse == lse);
    check_gradients(s, z, dz, first);
    // budgets and threads change no bit
    for (const int threads : {1, 2})
        for (const index_t rows : {1, 3, 7})
            for (const index_t ids : {0, 1024, 4096}) {
                if (ids > 0 && !opd::detail::may_tile<decltype(checked_job(be, source, teacher, estimator))>) continue;
                cpu_backend other{.threads = threads};
                gradients again(s, 3);
                auto small = student_of(s, again);
                more(small);
                small.budget = budget_of_rows(small, rows, ids);
                const result r = evaluate(other, small, teacher, estimator, with);
                CHECK(r.loss == got.loss);
                CHECK(equal_bits(same_losses, losses));
                CHECK(again == first);
            }
    // nor does what is not asked for: the value alone
    auto value = student_of(s, first);
    value.dx = value.dw = {}, value.db = {};
    more(value);
    std::fill(same_losses.begin(), same_losses.end(), 9.f);
    CHECK(evaluate(be, value, teacher, estimator, with).loss == doctest::Approx(got.loss).epsilon(1e-5));
    return expected;
}

} // namespace opd::test
