// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Cases that the CUDA kernels must pass, on the host (host_run.hpp) and on a device alike: batches with everything an
// env can say, and a plain float64 reference of loss and gradient.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "opd/batch.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/evaluate.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "support/normal.hpp"

namespace opd::test {

inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// One dense call in host memory.
template <class Z = float, class Y = float, class G = Z>
struct dense_case {
    index_t rows = 0, vocab_z = 0, vocab_y = 0, stride = 0; // stride of dz; half of what follows the columns is padding
    std::vector<Z> z = {};
    std::vector<Y> y = {};
    std::vector<G> dz = {}; // before the call; empty: value only
    float t_s = 1, t_t = 1;
    padding pad = padding::keep;
    std::vector<std::int32_t> mask = {};
    std::vector<float> weights = {}, losses = {};
    std::vector<double> given_lse = {}, lse = {};
    std::vector<std::int64_t> offsets = {};
    std::vector<std::int32_t> versions = {};
    env plain = {}; // everything of the env that is not a span
};

template <class T, class Vector>
auto span_or_none(T* p, const Vector& v) {
    return p ? static_cast<index_t>(v.size()) : index_t{0};
}

/// Runs a case on a backend whose memory is reached through `memory`: put(vector) -> pointer, get(vector, pointer).
/// Outputs are written back into the case.
template <class Memory, class Z, class Y, class G, class Divergence>
result run_case(Memory& memory, dense_case<Z, Y, G>& c, const Divergence& d) {
    constexpr space S = Memory::memory_space;
    basic_env<S> e;
    e.reduction = c.plain.reduction, e.version = c.plain.version, e.normaliser = c.plain.normaliser;
    e.beta = c.plain.beta, e.beta_loss = c.plain.beta_loss, e.on_infinite = c.plain.on_infinite;
    e.loss_clamp = c.plain.loss_clamp, e.checks = c.plain.checks, e.vocab = c.plain.vocab;
    const auto n = [](const auto& v) { return static_cast<index_t>(v.size()); };
    e.mask = row_mask<S>(vector_view<const std::int32_t, S>(memory.put(c.mask), n(c.mask)));
    e.weights = vector_view<const float, S>(memory.put(c.weights), n(c.weights));
    e.given_lse = vector_view<const double, S>(memory.put(c.given_lse), n(c.given_lse));
    e.offsets = vector_view<const std::int64_t, S>(memory.put(c.offsets), n(c.offsets));
    e.versions = vector_view<const std::int32_t, S>(memory.put(c.versions), n(c.versions));
    float* losses = memory.put(c.losses);
    double* lse = memory.put(c.lse);
    e.losses = vector_view<float, S>(losses, n(c.losses));
    e.lse = vector_view<double, S>(lse, n(c.lse));
    G* dz = memory.put(c.dz);
    const matrix_view<const Z, S> z(memory.put(c.z), c.rows, c.vocab_z, c.vocab_z);
    const matrix_view<const Y, S> y(memory.put(c.y), c.rows, c.vocab_y, c.vocab_y);
    const matrix_view<G, S> sink =
        dz ? matrix_view<G, S>(dz, c.rows, c.vocab_z, c.stride, (c.stride - c.vocab_z + 1) / 2) : matrix_view<G, S>();
    const result r = memory.finish(
        evaluate(memory.backend, student::logits<Z, G, S>{.z = z, .dz = sink, .temperature = c.t_s, .pad = c.pad},
                 teacher::dense<Y, S>{y, c.t_t}, d, e));
    memory.get(c.dz, dz), memory.get(c.losses, losses), memory.get(c.lse, lse);
    return r;
}

/// Host memory: the case's own vectors.
template <class Backend>
struct host_memory {
    static constexpr space memory_space = space::host;
    Backend& backend;
    template <class T>
    T* put(std::vector<T>& v) {
        return v.empty() ? nullptr : v.data();
    }
    template <class T>
    void get(std::vector<T>&, T*) {}
    result finish(result r) { return r; }
};
template <class Backend>
host_memory(Backend&) -> host_memory<Backend>;

// --- the float64 reference -------------------------------------------------------------------------------------------

struct reference_row {
    double value = 0;
    double kink =
        0; ///< what rounding may turn in the gradient: total variation's tokens with p = q to float's last digits
    std::vector<double> dz = {};
};

inline std::vector<double> log_softmax(const std::vector<double>& x) {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (double v : x) top = std::max(top, v);
    for (double v : x) sum += std::exp(v - top);
    std::vector<double> out;
    for (double v : x) out.push_back(v - top - std::log(sum));
    return out;
}

/// term(p, q, log p, log q) and slope (textbook form) of each divergence.
inline double zero_or(double weight, double x) { return weight == 0 ? 0 : weight * x; }
struct reference_of {
    double lp, lq;
    double p() const { return std::exp(lp); }
    double q() const { return std::exp(lq); }
    double log_mix(double w) const { // log(w q + (1-w) p)
        const double a = std::log(w) + lq, b = std::log(1 - w) + lp, top = std::max(a, b);
        return std::isinf(top) ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
    }
    double term(reverse_kl) const { return zero_or(p(), lp - lq); }
    double c(reverse_kl) const { return zero_or(p(), lp - lq); }
    double term(forward_kl) const { return zero_or(q(), lq - lp); }
    double c(forward_kl) const { return -q(); }
    double term(jsd d) const {
        const double m = log_mix(d.w);
        return d.o * zero_or(q(), lq - m) + (1 - d.o) * zero_or(p(), lp - m);
    }
    double c(jsd d) const { // p(-o(1-w) q/m + (1-o)(log p - log m - (1-w) p/m))
        if (p() == 0) return 0;
        const double m = log_mix(d.w);
        return p() * (-d.o * (1 - d.w) * std::exp(lq - m) + (1 - d.o) * (lp - m - (1 - d.w) * std::exp(lp - m)));
    }
    double term(skew_forward_kl d) const { return term(jsd{d.a, 1}); }
    double c(skew_forward_kl d) const { return c(jsd{d.a, 1}); }
    double term(skew_reverse_kl d) const { return term(jsd{1 - d.a, 0}); }
    double c(skew_reverse_kl d) const { return c(jsd{1 - d.a, 0}); }
    double term(total_variation) const { return 0.5 * std::abs(p() - q()); }
    double c(total_variation) const { return p() * (lp > lq ? 0.5 : (lp < lq ? -0.5 : 0)); }
    double term(alpha_divergence d) const { return (mixed(d.a) - p()) / (d.a * (d.a - 1)); }
    double c(alpha_divergence d) const { return mixed(d.a) / (d.a - 1); }
    double term(chi_squared) const { return mixed(2) - p(); }
    double c(chi_squared) const { return 2 * mixed(2); }
    double mixed(double a) const { // p^a q^(1-a)
        return std::isinf(lp) || std::isinf(lq) ? 0 : std::exp(a * lp + (1 - a) * lq);
    }
};

template <class T>
std::vector<double> as_doubles(const std::vector<T>& v, index_t begin, index_t count) {
    std::vector<double> out;
    for (index_t i = begin; i < begin + count; ++i) out.push_back(double(element<T>::load(v[std::size_t(i)])));
    return out;
}

template <class Z, class Y, class G, class Divergence>
reference_row reference(const dense_case<Z, Y, G>& c, const Divergence& d, index_t row) {
    const index_t n = std::min(c.vocab_z, c.vocab_y);
    std::vector<double> z = as_doubles(c.z, row * c.vocab_z, n), y = as_doubles(c.y, row * c.vocab_y, n);
    for (double& v : z) v /= double(c.t_s);
    for (double& v : y) v /= double(c.t_t);
    const std::vector<double> lp = log_softmax(z), lq = log_softmax(y);
    reference_row out;
    std::vector<double> each;
    long double value = 0, total = 0;
    for (std::size_t i = 0; i < lp.size(); ++i) {
        const reference_of at{lp[i], lq[i]};
        value += at.term(d);
        each.push_back(at.c(d));
        total += each.back();
        if (std::is_same_v<Divergence, total_variation> && std::abs(lp[i] - lq[i]) < 1e-5)
            out.kink += at.p() / double(c.t_s);
    }
    out.value = double(value);
    for (std::size_t i = 0; i < lp.size(); ++i)
        out.dz.push_back((each[i] - std::exp(lp[i]) * double(total)) / double(c.t_s));
    return out;
}

/// Values: the accuracy promised on the rows of vocabulary size, and what float's exponentials leave elsewhere.
/// Gradients on random rows of any size, relative to the largest: what float's own steps leave, on the CPU alike (the
/// mixtures' slopes cancel where the student is sure and the temperatures differ).
template <class Divergence>
double value_tolerance(const Divergence&, double value) {
    const bool kl = std::is_same_v<Divergence, reverse_kl> || std::is_same_v<Divergence, forward_kl>;
    if (std::is_same_v<Divergence, chi_squared>)
        return 4e-6 * std::max(1., std::abs(value)); // one e^17 may be all of it
    const bool skew = std::is_same_v<Divergence, skew_forward_kl>;
    return (kl ? 1e-7 : (skew ? 2e-6 : 1e-6)) * std::max(1., std::abs(value));
}
inline double gradient_tolerance(reverse_kl) { return 1e-6; }
inline double gradient_tolerance(forward_kl) { return 1e-6; }
inline double gradient_tolerance(total_variation) { return 1e-6; }
inline double gradient_tolerance(alpha_divergence) { return 3e-6; }
inline double gradient_tolerance(chi_squared) { return 5e-6; }
inline double gradient_tolerance(jsd) { return 4e-5; }
inline double gradient_tolerance(skew_forward_kl) { return 4e-5; }
inline double gradient_tolerance(skew_reverse_kl) { return 1e-5; }

inline double largest(const std::vector<double>& v) {
    double m = 0;
    for (double x : v) m = std::max(m, std::abs(x));
    return m;
}

// --- generators ------------------------------------------------------------------------------------------------------

struct source {
    std::mt19937_64 bits;
    explicit source(std::uint64_t seed) : bits(seed) {}
    double normal() { return normal_numbers<double>()(bits); }
    double uniform() { return uniform_number<double>(bits); }
    index_t below(index_t n) { return std::uniform_int_distribution<index_t>(0, n - 1)(bits); }
};

template <class Z, class Y, class G>
void fill_normal(dense_case<Z, Y, G>& c, source& s, double spread = 3) {
    c.z.resize(std::size_t(c.rows * c.vocab_z)), c.y.resize(std::size_t(c.rows * c.vocab_y));
    for (Z& v : c.z) v = element<Z>::store(static_cast<arithmetic_t<Z>>(spread * s.normal()));
    for (Y& v : c.y) v = element<Y>::store(static_cast<arithmetic_t<Y>>(spread * s.normal()));
}

enum class holes { none, both_sides, teacher_has_more, student_has_more };
inline const holes every_hole[] = {holes::none, holes::both_sides, holes::teacher_has_more, holes::student_has_more};

/// -inf at about a third of the ids; never everywhere.
template <class Z, class Y, class G>
void punch(dense_case<Z, Y, G>& c, holes h, source& s) {
    for (index_t r = 0; h != holes::none && r < c.rows; ++r) {
        const index_t n = std::min(c.vocab_z, c.vocab_y), safe = s.below(n);
        for (index_t v = 0; v < n; ++v) {
            if (v == safe || s.uniform() > 0.33) continue;
            if (h != holes::teacher_has_more || s.uniform() < 0.5)
                c.z[std::size_t(r * c.vocab_z + v)] = element<Z>::store(arithmetic_t<Z>(minus_infinity));
            const bool both = element<Z>::load(c.z[std::size_t(r * c.vocab_z + v)]) == arithmetic_t<Z>(minus_infinity);
            if (h == holes::teacher_has_more || (both && (h == holes::both_sides || s.uniform() < 0.5)))
                c.y[std::size_t(r * c.vocab_y + v)] = element<Y>::store(arithmetic_t<Y>(minus_infinity));
        }
    }
}

template <class Z, class Y, class G>
void want_everything(dense_case<Z, Y, G>& c) {
    if (c.stride == 0) c.stride = c.vocab_z;
    c.dz.assign(std::size_t(c.rows * c.stride), element<G>::store(arithmetic_t<G>(7)));
    c.losses.assign(std::size_t(c.rows), 0), c.lse.assign(std::size_t(c.rows), 0);
}

/// Value and gradient of every row against the reference, reduction sum.
template <class Memory, class Z, class Y, class G, class Divergence>
void check_against_reference(Memory& memory, dense_case<Z, Y, G> c, const Divergence& d, double gradient) {
    c.plain.reduction = reduce::sum;
    want_everything(c);
    const result got = run_case(memory, c, d);
    CHECK(got.diagnostics.bad_rows == 0);
    double sum = 0, tolerance = 0;
    for (index_t r = 0; r < c.rows; ++r) {
        const reference_row want = reference(c, d, r);
        INFO("row " << r << " of V = " << c.vocab_z << ", T = " << c.t_s << ", " << c.t_t);
        sum += want.value;
        tolerance += value_tolerance(d, want.value);
        // losses are floats
        CHECK(std::abs(double(c.losses[std::size_t(r)]) - want.value) <=
              value_tolerance(d, want.value) + std::ldexp(std::abs(want.value), -23));
        double worst = 0;
        for (index_t v = 0; v < index_t(want.dz.size()); ++v)
            worst = std::max(worst, std::abs(double(element<G>::load(c.dz[std::size_t(r * c.stride + v)])) -
                                             want.dz[std::size_t(v)]));
        const bool fits = worst <= gradient * largest(want.dz) + want.kink + 1e-9;
        CHECK_MESSAGE(fits, "gradient off by " << worst << " of " << largest(want.dz));
    }
    CHECK(std::abs(got.loss - sum) <= tolerance);
}

/// All eight, with the parameters that take different paths.
template <class Check>
void for_every_divergence(Check check) {
    check("reverse_kl", reverse_kl{});
    check("forward_kl", forward_kl{});
    check("jsd(.5)", jsd{});
    check("jsd(.3, .6)", jsd{.3, .6});
    check("skew_forward_kl", skew_forward_kl{.2});
    check("skew_reverse_kl", skew_reverse_kl{.2});
    check("total_variation", total_variation{});
    check("alpha(.5)", alpha_divergence{.5});
    check("alpha(1.3)", alpha_divergence{1.3});
    check("chi_squared", chi_squared{});
}

/// Whether a divergence is finite where these holes are.
template <class Divergence>
bool finite_with(const Divergence& d, holes h) {
    if (h == holes::teacher_has_more && detail::infinite_where_teacher_zero(d)) return false;
    if (h == holes::student_has_more && detail::infinite_where_student_zero(d)) return false;
    return true;
}

/// The rows that the accuracy is promised on, at V entries.
inline dense_case<> hard_rows(index_t vocab) {
    source s(17);
    dense_case<> c{.rows = 9, .vocab_z = vocab, .vocab_y = vocab};
    fill_normal(c, s);
    const auto z = [&](index_t r, index_t v) -> float& { return c.z[std::size_t(r * vocab + v)]; };
    const auto y = [&](index_t r, index_t v) -> float& { return c.y[std::size_t(r * vocab + v)]; };
    for (index_t v = 0; v < vocab; ++v) {
        const double zipf = -1.1 * std::log(double((v * 7919) % vocab + 1)), noise = s.normal();
        y(1, v) = float(z(1, v) + 1e-3 * noise);                                            // KL 5e-7
        z(2, v) = float(4 * zipf), y(2, v) = float(4 * zipf + 0.3 * noise);                 // Zipf, peaked
        z(3, v) = float(v == 11 ? 25 : s.normal()), y(3, v) = float(z(3, v) + .01 * noise); // very peaked
        z(4, v) = float(s.normal() + (v == 5 ? 18 : 0)), y(4, v) = float(s.normal() + (v == vocab - 2 ? 18 : 0));
        const float a = float(3 * s.normal()), b = float(a + 0.1 * noise);
        z(5, v) = a + 60, y(5, v) = b + 60;
        z(6, v) = a + 60, y(6, v) = b;
        z(7, v) = a + 60, y(7, v) = b - 60;
        z(8, v) = a + 1e4f, y(8, v) = b;
    }
    return c;
}

} // namespace opd::test
