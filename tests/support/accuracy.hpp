// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The rows on which float loses digits, and how far a backend may be off on them: flat students under sure teachers and
// the reverse, temperatures from 0.01 to 100 on either side, models that disagree, -inf. Judged against the textbook's
// terms in float64, anchored where they cancel. `worst` keeps each divergence's largest error; a table of them is
// docs/testing.md's.
//
//   value      1e-6·max(1, value)
//              2e-6·max(1, value)            reverse KL: equal logits share one rounding of every term, which does not
//                                            average out
//   gradient   1e-6·max|g|                   KL, total variation
//              2e-6·max|g|                   JSD with o = w
//              4e-6·max|g|                   other mixtures: their slope follows e^-d, and float rounds a log-ratio d
//                                            of up to 64 nats twice, by 2^-19 each
//              (1e-6 + 2^-18 |a-1|)·max|g|   powers e^((a-1) d), for the same reason; their value too, and another
//                                            3e-6, since it is a sum divided by a(a-1)
//   Σ dz       8·2^-23·Σ (|c| + p |Σ c|), or the gradient's bound instead of 8·2^-23 where that is larger: float rounds
//              c and Σ c, and on flat rows most of the two cancels
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <doctest/doctest.h>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/generators.hpp"

#include <opd/estimators/divergences.hpp>
#include <opd/evaluate.hpp>

namespace opd::test::accuracy {

struct row_pair {
    std::string name;
    std::vector<float> z, y; // (V)
    float temperature_p = 1, temperature_q = 1;
    bool student_zero = false; ///< -inf on the student's side alone
};

using doubles = std::vector<double>;

inline doubles normal_row(numbers& u, index_t n, double width) {
    doubles x(static_cast<std::size_t>(n));
    for (double& v : x) v = width * u.normal();
    return x;
}
inline doubles zipf_row(numbers& u, index_t n) {
    std::vector<std::size_t> rank(static_cast<std::size_t>(n));
    std::iota(rank.begin(), rank.end(), std::size_t{0});
    for (std::size_t v = rank.size() - 1; v > 0; --v) std::swap(rank[v], rank[std::size_t(u.below(index_t(v) + 1))]);
    doubles x;
    for (const std::size_t r : rank) x.push_back(-1.2 * std::log(double(r) + 1) + 0.3 * u.normal());
    return x;
}
/// Token `at` gets this share of the mass.
inline void peak(doubles& x, std::size_t at, double mass) {
    double others = 0;
    for (std::size_t v = 0; v < x.size(); ++v) others += v == at ? 0 : std::exp(x[v]);
    x[at] = std::log(mass / (1 - mass) * others);
}
inline std::size_t top_of(const doubles& x) { return std::size_t(std::max_element(x.begin(), x.end()) - x.begin()); }
inline doubles moved(numbers& u, doubles x, double width) {
    for (double& v : x) v += width * u.normal();
    return x;
}

inline std::vector<row_pair> rows(index_t n, std::uint64_t seed) {
    std::vector<row_pair> all;
    numbers u(seed);
    const auto add = [&](const std::string& name, const doubles& z, const doubles& y, float tp = 1, float tq = 1) {
        all.push_back({name, {z.begin(), z.end()}, {y.begin(), y.end()}, tp, tq});
    };
    doubles equal(static_cast<std::size_t>(n)), uniform(equal);
    equal[equal.size() / 3] = 0.01;
    for (double& v : uniform) v = 0.02 * (2 * u.uniform() - 1);
    const std::pair<const char*, doubles> students[] = {{"equal", equal},
                                                        {"uniform .02", uniform},
                                                        {"N(0,.02)", normal_row(u, n, 0.02)},
                                                        {"N(0,.2)", normal_row(u, n, 0.2)},
                                                        {"N(0,1)", normal_row(u, n, 1)},
                                                        {"N(0,3)", normal_row(u, n, 3)},
                                                        {"Zipf", zipf_row(u, n)}};
    for (const auto& [name, z] : students) {
        const std::string student = name;
        for (const double mass : {0.9, 0.9999})
            for (const bool elsewhere : {false, true}) {
                doubles y = normal_row(u, n, 0.3);
                peak(y, elsewhere ? std::size_t(u.below(n)) : top_of(z), mass);
                add(student + " | " + (mass == 0.9 ? ".9" : ".9999") + (elsewhere ? " elsewhere" : " on its top"), z,
                    y);
            }
        add(student + " | Zipf", z, zipf_row(u, n));
        add(student + " | N(0,3)", z, normal_row(u, n, 3));
        add(student + " | N(0,.02)", z, normal_row(u, n, 0.02));
        add(student + " | itself + N(0,.001)", z, moved(u, z, 1e-3));
        add(student + " | itself + N(0,.5)", z, moved(u, z, 0.5));
        doubles y = z;
        y[top_of(z)] += 1.2;
        add(student + " | itself, top + 1.2", z, y);
    }
    for (const double mass : {0.9, 0.9999})
        for (const double width : {0.02, 1.0}) {
            doubles z = normal_row(u, n, 0.3);
            peak(z, std::size_t(u.below(n)), mass);
            add(std::string(mass == 0.9 ? ".9" : ".9999") + " | N(0," + (width == 1 ? "1)" : ".02)"), z,
                normal_row(u, n, width));
        }
    const float temperatures[][2] = {{100, 1}, {.01F, 1}, {1, 100}, {1, .01F},  {100, .01F}, {.01F, 100},
                                     {.1F, 1}, {10, 1},   {1, 10},  {100, 100}, {.1F, .1F}};
    for (const auto& t : temperatures)
        for (const int kind : {0, 1, 2}) {
            const doubles z = kind == 0 ? normal_row(u, n, 1) : kind == 1 ? normal_row(u, n, 3) : zipf_row(u, n);
            char name[64];
            std::snprintf(name, sizeof name, "%s, T %g/%g",
                          kind == 0   ? "N(0,1)"
                          : kind == 1 ? "N(0,3)"
                                      : "Zipf",
                          double(t[0]), double(t[1]));
            add(std::string(name) + ", near", z, moved(u, z, 0.3), t[0], t[1]);
            if (t[0] != t[1]) add(std::string(name) + ", apart", z, normal_row(u, n, kind == 0 ? 1 : 3), t[0], t[1]);
        }
    doubles z = normal_row(u, n, 3), y = normal_row(u, n, 3);
    for (double& v : z) v = u.uniform() < 0.99 ? detail::neg_inf<double>() : v;
    add("student -inf on 99 %", z, y);
    all.back().student_zero = true;
    for (std::size_t v = 0; v < y.size(); ++v) y[v] = detail::is_neg_inf(z[v]) ? z[v] : y[v];
    add("both -inf on 99 %", z, y);
    z = normal_row(u, n, 1), y = moved(u, z, 0.3);
    const std::size_t a = std::size_t(u.below(n)), b = (a + z.size() / 2) % z.size();
    z[a] = 30, y[a] = 0, z[b] = 10, y[b] = 30;
    add("30 nats apart", z, y);
    // rows that begin unlike their rest, and rows that are apart but agree, or nearly, on their top token
    for (const bool begins_alike : {false, true}) {
        z = normal_row(u, n, 1);
        const std::size_t first = std::min<std::size_t>(256, z.size() / 4);
        for (std::size_t v = 0; v < first; ++v) z[v] -= 8;
        y = moved(u, z, 1);
        for (std::size_t v = 0; v < z.size(); ++v)
            if ((v < first) == begins_alike) y[v] = z[v] + 1e-3 * u.normal();
        add(begins_alike ? "begins alike" : "begins apart", z, y);
    }
    for (const double mass : {0.1, 0.9, 0.99})
        for (const double share : {1e-3, 0.3}) { // of the rest's mass, by which q* is less than p*
            z = normal_row(u, n, 2);
            peak(z, top_of(z), mass);
            y = moved(u, z, 0.5);
            peak(y, top_of(z), mass * (1 - share * (1 - mass)));
            char name[64];
            std::snprintf(name, sizeof name, "apart, its top of %g alike to %g", mass, share);
            add(name, z, y);
        }
    return all;
}

/// A divergence's terms as the textbook has them, from log p and log q, and its slope up to a constant.
struct textbook_entry {
    double lp, lq, p, q;
    static double times(double weight, double x) { return weight == 0 ? 0 : weight * x; }
    double log_m(double w) const {
        const double a = std::log(w) + lq, b = std::log1p(-w) + lp, top = std::max(a, b);
        return top + std::log(std::exp(a - top) + std::exp(b - top));
    }
    double term(reverse_kl) const { return times(p, lp - lq); }
    double c(reverse_kl) const { return times(p, lp - lq); }
    double term(forward_kl) const { return times(q, lq - lp); }
    double c(forward_kl) const { return -q; }
    double term(jsd d) const {
        return p == 0 && q == 0 ? 0 : d.o * times(q, lq - log_m(d.w)) + (1 - d.o) * times(p, lp - log_m(d.w));
    }
    double c(jsd d) const { // p ((1-o) log p/m + (o(1-w)/w - (1-o)) (1-w) (p/m - 1))
        if (p == 0) return 0;
        const double l = lp - log_m(d.w);
        return p * ((1 - d.o) * l + (d.o * (1 - d.w) / d.w - (1 - d.o)) * (1 - d.w) * std::expm1(l));
    }
    double term(skew_forward_kl d) const { return term(jsd{d.a, 1}); }
    double c(skew_forward_kl d) const { return c(jsd{d.a, 1}); }
    double term(skew_reverse_kl d) const { return term(jsd{1 - d.a, 0}); }
    double c(skew_reverse_kl d) const { return c(jsd{1 - d.a, 0}); }
    double term(total_variation) const { return std::abs(p - q) / 2; }
    double c(total_variation) const { return p * (lp > lq ? 0.5 : lp < lq ? -0.5 : 0); }
    double term(alpha_divergence d) const { // Σ p^a q^(1-a) - 1 from the side that does not cancel; Σ p = Σ q = 1
        const double scale = 1 / (d.a * (d.a - 1)), x = lp - lq;
        return scale * (std::abs(d.a) < 0.5 ? times(q, std::expm1(d.a * x)) : times(p, std::expm1((d.a - 1) * x)));
    }
    double c(alpha_divergence d) const {
        const double x = (d.a - 1) * (lp - lq);
        return (std::abs(x) < 1 ? p * std::expm1(x) : std::exp(d.a * lp + (1 - d.a) * lq) - p) / (d.a - 1);
    }
    double term(chi_squared) const { return 2 * term(alpha_divergence{2}); }
    double c(chi_squared) const { return 2 * c(alpha_divergence{2}); }
};

struct bounds {
    double value, gradient;
};
inline bounds bounds_of(reverse_kl) { return {2e-6, 1e-6}; }
inline bounds bounds_of(forward_kl) { return {1e-6, 1e-6}; }
inline bounds bounds_of(total_variation) { return {1e-6, 1e-6}; }
inline bounds bounds_of(jsd d) { return {1e-6, d.o == d.w ? 2e-6 : 4e-6}; }
inline bounds bounds_of(skew_forward_kl) { return {1e-6, 4e-6}; }
inline bounds bounds_of(skew_reverse_kl) { return {1e-6, 4e-6}; }
inline bounds bounds_of(alpha_divergence d) {
    const double g = 1e-6 + 0x1p-18 * std::abs(d.a - 1);
    return {3e-6 + g, g};
}
inline bounds bounds_of(chi_squared) { return bounds_of(alpha_divergence{2}); }

/// f(name, divergence): every divergence at the parameters that take different ways.
template <class Visit>
void for_each_parameter(Visit f) {
    const auto named = [&](const char* format, double x, double y, auto d) {
        char name[64];
        std::snprintf(name, sizeof name, format, x, y);
        f(std::string(name), d);
    };
    f("reverse_kl", reverse_kl{});
    f("forward_kl", forward_kl{});
    for (const double w : {.001, .05, .1, .5, .9, .95, .999})
        for (const double o : {w, 1 - w, .3})
            if (o == w || w != .5 || o == .3) named("jsd{%g, %g}", w, o, jsd{.w = w, .o = o});
    for (const double a : {.1, .5, .99}) named("skew_forward_kl{%g}", a, 0, skew_forward_kl{a});
    for (const double a : {.1, .5, .9, .99}) named("skew_reverse_kl{%g}", a, 0, skew_reverse_kl{a});
    f("total_variation", total_variation{});
    for (const double a : {-1., -.5, 1e-6, 1e-3, .1, .5, .9, 1.5, 3.5, 6.})
        named("alpha_divergence{%g}", a, 0, alpha_divergence{a});
    f("chi_squared", chi_squared{});
}

struct errors {
    std::string name = {};
    double value = 0, gradient = 0, sum = 0;       ///< relative to max(1, value), max|g| and Σ (|c| + p |Σ c|)
    std::string value_row = {}, gradient_row = {}; ///< where
};
inline errors& of(std::vector<errors>& table, const std::string& name) {
    for (errors& e : table)
        if (e.name == name) return e;
    table.push_back({.name = name});
    return table.back();
}
inline void print(const std::vector<errors>& table, const char* title) {
    std::printf("%s\n| divergence | value | on | gradient | on | sum |\n|---|---|---|---|---|---|\n", title);
    for (const errors& e : table) {
        std::string rows[] = {e.value_row, e.gradient_row};
        for (std::string& r : rows) std::replace(r.begin(), r.end(), '|', '/');
        std::printf("| `%s` | %.1e | %s | %.1e | %s | %.1e |\n", e.name.c_str(), e.value, rows[0].c_str(), e.gradient,
                    rows[1].c_str(), e.sum);
    }
}

inline doubles log_softmax(const std::vector<float>& x, double temperature) {
    const double top = double(*std::max_element(x.begin(), x.end()));
    doubles out;
    double sum = 0;
    for (const float v : x) {
        out.push_back(detail::is_neg_inf(v) ? -1e30 : (double(v) - top) / temperature);
        sum += std::exp(out.back());
    }
    for (double& v : out) v -= std::log(sum);
    return out;
}

/// call(row, divergence, dz) -> the row's value; every divergence on this row against its bounds.
template <class Call>
void judge(const row_pair& r, std::vector<errors>& table, Call call) {
    const doubles lp = log_softmax(r.z, double(r.temperature_p)), lq = log_softmax(r.y, double(r.temperature_q));
    const std::size_t n = lp.size(), top = std::size_t(std::max_element(lp.begin(), lp.end()) - lp.begin());
    doubles p, q, c(n), want(n);
    for (std::size_t v = 0; v < n; ++v) p.push_back(std::exp(lp[v])), q.push_back(std::exp(lq[v]));
    std::vector<float> dz(n);
    for_each_parameter([&](const std::string& name, auto d) {
        using D = decltype(d);
        if (r.student_zero && detail::infinite_where_student_zero(d)) return;
        const auto at = [&](std::size_t v) { return textbook_entry{lp[v], lq[v], p[v], q[v]}; };
        constexpr bool forward = std::is_same_v<D, forward_kl>; // p - q needs no anchor
        const double slope_star = forward ? 0 : at(top).c(d) / p[top];
        long double value = 0, sum_c = 0;
        for (std::size_t v = 0; v < n; ++v) {
            value += at(v).term(d);
            c[v] = forward || v != top ? at(v).c(d) - p[v] * slope_star : 0;
            sum_c += c[v];
        }
        if (forward) sum_c = -1;
        if (!detail::is_finite(double(value)) || std::abs(double(value)) > 1e20) return; // by bits: -Ofast
        const double loss = call(r, d, dz), t = double(r.temperature_p);
        double top_g = 0, worst = 0, sum = 0, size = 0, undecided = 0;
        for (std::size_t v = 0; v < n; ++v) {
            want[v] = (c[v] - p[v] * double(sum_c)) / t;
            top_g = std::max(top_g, std::abs(want[v]));
            const bool kink = std::is_same_v<D, total_variation> && std::abs(lp[v] - lq[v]) < 1e-5;
            if (kink) undecided += p[v] / t; // its sign is rounding's, and through Σ c the others move by their share
        }
        for (std::size_t v = 0; v < n; ++v) {
            const double g = double(dz[v]);
            const bool kink = std::is_same_v<D, total_variation> && std::abs(lp[v] - lq[v]) < 1e-5;
            if (!detail::is_finite(g)) worst = 1e300;
            if (!kink) worst = std::max(worst, std::abs(g - want[v]) - 2 * p[v] * undecided);
            sum += g, size += (std::abs(c[v]) + p[v] * std::abs(double(sum_c))) / t;
        }
        // products of float underflow, and rows too steep for it are unanchored in float64: of less than 1e-15 of the
        // value nothing is asked
        const double off_value = std::abs(loss - double(value)) / std::max(1.0, std::abs(double(value)));
        const double least = 1e-9 * std::max(1.0, std::abs(double(value))) / t;
        const double off = worst / (top_g + least), off_sum = std::abs(sum) / (size + least);
        const bounds b = bounds_of(d);
        INFO(name << " on " << r.name << ", V = " << n << ": value " << double(value) << ", largest gradient "
                  << top_g);
        CHECK(off_value <= b.value);
        CHECK(off <= b.gradient);
        CHECK(off_sum <= std::max(8 * 0x1p-23, b.gradient));
        errors& e = of(table, name);
        if (off_value > e.value) e.value = off_value, e.value_row = r.name;
        if (off > e.gradient) e.gradient = off, e.gradient_row = r.name;
        e.sum = std::max(e.sum, off_sum);
    });
}

/// As a dense teacher.
template <class Backend>
void judge_dense(Backend& backend, const row_pair& r, std::vector<errors>& table) {
    judge(r, table, [&](const row_pair& row, const auto& d, std::vector<float>& dz) {
        const auto n = index_t(row.z.size());
        return evaluate(backend, student::logits{view(row.z.data(), 1, n), view(dz.data(), 1, n), row.temperature_p},
                        teacher::dense{view(row.y.data(), 1, n), row.temperature_q}, d)
            .loss;
    });
}

} // namespace opd::test::accuracy
