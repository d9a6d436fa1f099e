// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
//
// Tail buckets on rows that are ever more peaked, from a gap of 0 nats between support and tail to 1,000 and to a tail without
// mass, against buckets in long double: values, and gradients within 1e-6 of the largest entry at every gap. On the CPU backend
// and on the GPU's kernels run on the host. Then what a support may hold: unused slots, bad ids, log-probs that are none.
#include "backends/host_run.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/textbook.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;
using textbook::real;

namespace {

constexpr double endless = std::numeric_limits<double>::infinity();

/// d(value)/dp as the divergence's page has it, from log p and log q.
real slope(const reverse_kl&, real lp, real lq) { return lp - lq; }
real slope(const forward_kl&, real lp, real lq) { return -std::exp(lq - lp); }
real slope(const jsd& d, real lp, real lq) {
    const real w = d.w, o = d.o, top = std::max(lp, lq), // where both underflow, too
        log_m = top + std::log(w * std::exp(lq - top) + (1 - w) * std::exp(lp - top));
    return -o * (1 - w) * std::exp(lq - log_m) + (1 - o) * (lp - log_m - (1 - w) * std::exp(lp - log_m));
}
real slope(const skew_forward_kl& d, real lp, real lq) { return slope(jsd{d.a, 1}, lp, lq); }
real slope(const skew_reverse_kl& d, real lp, real lq) { return slope(jsd{1 - d.a, 0}, lp, lq); }
real slope(const total_variation&, real lp, real lq) { return lp > lq ? 0.5L : (lp < lq ? -0.5L : 0.0L); }
real slope(const alpha_divergence& d, real lp, real lq) {
    if (d.a == 1) return lp - lq;
    return std::exp((real(d.a) - 1) * (lp - lq)) / (real(d.a) - 1);
}
real slope(const chi_squared&, real lp, real lq) { return 2 * std::exp(lp - lq); }
/// p times it, as a power where p may vanish and the slope be beyond every number.
template <class D>
real p_slope(const D& d, real lp, real lq) {
    if constexpr (std::is_same_v<D, forward_kl>)
        return -std::exp(lq);
    else if constexpr (std::is_same_v<D, alpha_divergence>)
        return d.a == 1 ? std::exp(lp) * (lp - lq) : std::exp(real(d.a) * lp + (1 - real(d.a)) * lq) / (real(d.a) - 1);
    else
        return std::exp(lp) * slope(d, lp, lq);
}

/// One row: k ids that carry the student's mass, some of them tokens of the tail, and a teacher of its own mind.
template <class Z>
struct peaked_row {
    index_t vocab, k = 0;
    std::vector<Z> z, dz;
    std::vector<std::int32_t> ids;
    std::vector<double> log_q, log_tail;
    float temperature;

    peaked_row(index_t v, double gap, double q_rest, float t, std::uint64_t seed) : vocab(v), temperature(t) {
        numbers u(seed);
        std::vector<bool> inside(std::size_t(v), false);
        for (const index_t id : {v / 2, index_t(0), v - 1, v / 3})
            if (!inside[std::size_t(id)] && k < v - 1)
                ids.push_back(std::int32_t(id)), inside[std::size_t(id)] = true, ++k;
        for (index_t i = 0; i < v; ++i) {
            const bool head = i == ids[0] || (k > 2 && i == ids[1]); // ids 2, 3 lie as low as the tail
            const double x = (i == ids[0] ? 0.3 : 0) + u.normal() * (i == ids[0] ? 0 : 0.5) - (head ? 0 : gap);
            z.push_back(element<Z>::store(static_cast<arithmetic_t<Z>>(x * double(t))));
            if (gap == endless && !head) z.back() = element<Z>::store(detail::neg_inf<arithmetic_t<Z>>());
        }
        double sum = 0;
        for (index_t j = 0; j < k; ++j) log_q.push_back(u.uniform()), sum += log_q.back();
        for (double& q : log_q) q = std::log(q / sum * (1 - q_rest));
        log_tail.push_back(std::log(q_rest));
        dz.resize(z.size());
    }
    /// log q of slot `at`, k: of the rest; the others share its mass.
    void mask_teacher(index_t at, double none) {
        double& to = at < k ? log_q[std::size_t(at)] : log_tail[0];
        const double others = std::log1p(-std::exp(to));
        for (double& lq : log_q) lq -= others;
        log_tail[0] -= others;
        to = none;
    }
    student::logits<Z> student() {
        return {view(std::as_const(z).data(), 1, vocab), view(dz.data(), 1, vocab), temperature};
    }
    teacher::support<std::int32_t, double> cache() const {
        return {view(ids.data(), 1, k), view(log_q.data(), 1, k), log_tail};
    }

    struct outcome {
        real value = 0;
        std::vector<real> dz;
    };
    /// Without a floor, or with floors inside the logarithms of q, and of the value's p.
    template <class D>
    outcome reference(const D& d, real floor_q = -real(endless), real floor_p = -real(endless)) const {
        const textbook::row full = textbook::make_row(z.data(), z.data(), vocab, double(temperature), 1);
        textbook::row b;
        const auto rest = std::size_t(k);
        std::vector<std::size_t> bucket_of(z.size(), rest);
        for (index_t j = 0; j < k; ++j) {
            const auto id = std::size_t(ids[std::size_t(j)]);
            bucket_of[id] = std::size_t(j);
            b.log_p.push_back(full.log_p[id]), b.log_q.push_back(real(log_q[std::size_t(j)]));
        }
        real top = -std::numeric_limits<real>::infinity(), sum = 0; // the tail, relative to its own top
        for (std::size_t v = 0; v < full.log_p.size(); ++v)
            if (bucket_of[v] == std::size_t(k)) top = std::max(top, full.log_p[v]);
        for (std::size_t v = 0; v < full.log_p.size(); ++v)
            if (bucket_of[v] == std::size_t(k) && std::isfinite(top)) sum += std::exp(full.log_p[v] - top);
        b.log_p.push_back(std::isfinite(top) ? top + std::log(sum) : top), b.log_q.push_back(real(log_tail[0]));

        outcome out;
        for (real& lq : b.log_q) lq = std::max(lq, floor_q);
        textbook::row raised = b;
        for (real& lp : raised.log_p) lp = std::max(lp, floor_p);
        out.value = textbook::value(d, raised);
        const std::size_t star = std::size_t(std::max_element(b.log_p.begin(), b.log_p.end()) - b.log_p.begin());
        std::vector<real> h(b.log_p.size(), 0);
        real mean = 0, others = 0; // of slopes less the top's, so that nothing cancels
        // a masked id has forward KL's slope, p - q, like any other
        const auto moves = [&](std::size_t j) {
            return b.log_p[j] > -1e30L || (j < rest && std::is_same_v<D, forward_kl>);
        };
        for (std::size_t j = 0; j < h.size(); ++j)
            if (moves(j)) {
                h[j] =
                    p_slope(d, b.log_p[j], b.log_q[j]) - std::exp(b.log_p[j]) * slope(d, b.log_p[star], b.log_q[star]);
                mean += h[j];
            }
        for (std::size_t j = 0; j < h.size(); ++j)
            if (j != star && moves(j)) h[j] -= std::exp(b.log_p[j]) * mean, others += h[j];
        h[star] = -others;
        for (std::size_t v = 0; v < full.log_p.size(); ++v) {
            const std::size_t j = bucket_of[v];
            const real share = j < rest ? 1 : std::isfinite(full.log_p[v]) ? std::exp(full.log_p[v] - b.log_p[j]) : 0;
            out.dz.push_back(h[j] * share / real(temperature));
        }
        return out;
    }
};

template <class Backend, class Z, class D>
void check_row(Backend& backend, peaked_row<Z>& row, const D& d) {
    const auto want = row.reference(d);
    const result r = evaluate(backend, row.student(), row.cache(), tail_bucket<D>{d});
    CHECK(r.diagnostics.bad_rows == 0);
    CHECK(r.diagnostics.infinite_rows == 0);
    const double bound = sizeof(Z) == 8 ? 1e-10 : 1e-6; // float lanes sum the tail
    CHECK(std::abs(r.loss - double(want.value)) <= bound * std::max(1.0, std::abs(double(want.value))));
    real top = 0, worst = 0, sum = 0, size = 0;
    for (std::size_t v = 0; v < row.dz.size(); ++v) {
        const real g = real(element<Z>::load(row.dz[v]));
        top = std::max(top, std::abs(want.dz[v])), worst = std::max(worst, std::abs(g - want.dz[v]));
        sum += g, size += std::abs(g);
    }
    const real least = sizeof(Z) == 8 ? 1e-300L : 1e-37L; // what the storage type cannot hold in full
    CHECK_MESSAGE(worst <= 1e-6L * top + least,
                  "gradient off by " << double(worst) << " of " << double(top) << ", loss " << r.loss);
    CHECK(std::abs(sum) <= 1e-6L * size + least * real(row.vocab));
}

template <class Visit>
void for_each_divergence(Visit f) {
    f("reverse KL", reverse_kl{});
    f("forward KL", forward_kl{});
    f("JSD", jsd{});
    f("JSD(.3,.6)", jsd{.3, .6});
    f("skew forward KL", skew_forward_kl{.1});
    f("skew reverse KL", skew_reverse_kl{.1});
    f("total variation", total_variation{});
    f("alpha(.5)", alpha_divergence{.5});
    f("chi-squared", chi_squared{});
}

template <class Z, class Backend>
void every_gap(Backend& backend, const char* name, std::initializer_list<index_t> sizes) {
    std::uint64_t seed = 3;
    for (const index_t vocab : sizes)
        for (const double gap : {0.0, 1.0, 10.0, 25.0, 35.0, 40.0, 60.0, 88.0, 104.0, 200.0, 500.0, 745.0, 1000.0})
            for (const double q_rest : {0.22, 0.9, 1e-6})
                for (const float t : {1.F, 0.7F}) {
                    peaked_row<Z> row(vocab, gap, q_rest, t, ++seed);
                    for_each_divergence([&](const char* what, const auto& d) {
                        // e^((a-1)d) p is formed as a product, and p is 0 beyond 745 nats
                        if (std::string(what) == "alpha(.5)" && gap > 500) return;
                        INFO(std::string(name) << ", " << std::string(what) << ", V " << vocab << ", gap " << gap
                                               << ", teacher's tail " << q_rest << ", T " << t);
                        check_row(backend, row, d);
                    });
                }
}

template <class D>
bool infinite_teacher(const D& d) {
    return detail::infinite_where_teacher_zero(d);
}
template <class D>
bool infinite_student(const D& d) {
    return detail::infinite_where_student_zero(d);
}

/// A server's or a trainer's number for "none" in place of a log-prob or a logit: as written, and -inf by policy.
template <class Backend>
void sentinels(Backend& backend) {
    const auto check = [&](peaked_row<double>& row, const std::string& what, bool teacher_none, bool student_none) {
        const auto one = [&](const char* name, const auto& d) {
            INFO(std::string(name) << ", " << what);
            const bool zero_q = teacher_none && infinite_teacher(d), zero_p = student_none && infinite_student(d);
            const auto want = row.reference(d, zero_q ? -30 : -real(endless), zero_p ? -30 : -real(endless));
            const result r = evaluate(backend, row.student(), row.cache(), tail_bucket{d});
            CHECK(r.diagnostics.bad_rows == 0);
            if (!(std::abs(want.value) < 1e30L)) { // beyond float
                CHECK(r.diagnostics.infinite_rows == 1);
                CHECK(r.loss == 0);
                for (const double g : row.dz) CHECK(g == 0);
                return;
            }
            CHECK(r.diagnostics.infinite_rows == (zero_q || zero_p));
            CHECK(std::abs(r.loss - double(want.value)) <= 1e-12 * std::max(1.0, std::abs(double(want.value))));
            real top = 0, worst = 0;
            for (const real g : want.dz) REQUIRE(std::isfinite(g));
            for (std::size_t v = 0; v < row.dz.size(); ++v)
                top = std::max(top, std::abs(want.dz[v])), worst = std::max(worst, std::abs(row.dz[v] - want.dz[v]));
            CHECK_MESSAGE(worst <= 1e-12L * top, "gradient off by " << double(worst) << " of " << double(top));
        };
        for_each_divergence(one);
        for (const double a : {-0.5, 1e-3, 0.25, 0.75, 0.9, 0.999, 1.0, 1.001, 1.5})
            one(("alpha " + std::to_string(a)).c_str(), alpha_divergence{a});
    };
    const auto zero = -endless;
    for (const double none : {zero, -1400.0, -9999.0, -1e9, -1e20, std::numeric_limits<double>::lowest()})
        for (const index_t at : {0, 1, 2, 3, 4}) { // an id, or the rest
            const bool is_zero = none <= -1e30;
            const std::string number = std::to_string(none) + " at " + std::to_string(at);
            peaked_row<double> row(40, 1, 0.22, 0.7F, 5);
            row.mask_teacher(at, none);
            check(row, "log q is " + number, is_zero, false);
            if (at == row.k) continue;
            peaked_row<double> masked(40, 1, 0.22, 0.7F, 5);
            masked.z[std::size_t(masked.ids[std::size_t(at)])] = none;
            check(masked, "the logit is " + number, false, is_zero);
            masked.mask_teacher(at, none);
            check(masked, "both are " + number, false, false);
        }
}

/// f'(1) less the slope above at p = q, which leaves out a constant that the laws' sums cancel.
template <class D>
real left_out(const D& d) {
    if constexpr (std::is_same_v<D, jsd>) return 1 - real(d.o);
    if constexpr (std::is_same_v<D, alpha_divergence>) return d.a == 1;
    return std::is_same_v<D, reverse_kl> || std::is_same_v<D, skew_reverse_kl>;
}
/// The row on its ids alone: the divergence of the renormalised laws, or the sum of its Bregman terms in p and q of the whole.
template <bool Renormalised, class D>
peaked_row<double>::outcome on_ids(const peaked_row<double>& row, const D& d, real floor_q, real floor_p) {
    const textbook::row full = textbook::make_row(row.z.data(), row.z.data(), row.vocab, double(row.temperature), 1);
    textbook::row b;
    for (index_t j = 0; j < row.k; ++j)
        b.log_p.push_back(full.log_p[std::size_t(row.ids[std::size_t(j)])]),
            b.log_q.push_back(real(row.log_q[std::size_t(j)]));
    if (Renormalised) b.log_p = textbook::log_softmax(b.log_p), b.log_q = textbook::log_softmax(b.log_q);
    real z_q = 0;
    for (const real lq : b.log_q) z_q += std::exp(lq);
    for (real& lq : b.log_q) lq = std::max(lq, floor_q);
    textbook::row raised = b;
    real p_raised = 0;
    for (real& lp : raised.log_p) lp = std::max(lp, floor_p), p_raised += std::exp(lp);
    peaked_row<double>::outcome out;
    out.value = textbook::value(d, raised);
    const auto star = std::size_t(std::max_element(b.log_p.begin(), b.log_p.end()) - b.log_p.begin());
    const real at_one = Renormalised ? slope(d, b.log_p[star], b.log_q[star]) : slope(d, 0, 0);
    if (!Renormalised) {
        real one = 0; // f(1) of the form that the textbook sums
        if constexpr (std::is_same_v<D, alpha_divergence>) {
            one = d.a == 0 || d.a == 1 ? 0 : 1 / (real(d.a) * (real(d.a) - 1));
        }
        if constexpr (std::is_same_v<D, chi_squared>) one = 1;
        out.value += one * (1 - z_q) - (at_one + left_out(d)) * (p_raised - z_q);
    }
    std::vector<real> h(b.log_p.size(), 0);
    real mean = 0;
    for (std::size_t j = 0; j < h.size(); ++j) {
        if (!(b.log_p[j] > -1e30L) && !(Renormalised && std::is_same_v<D, forward_kl>)) continue; // no mass to move
        h[j] = p_slope(d, b.log_p[j], b.log_q[j]) - std::exp(b.log_p[j]) * at_one;
        mean += h[j];
    }
    out.dz.assign(full.log_p.size(), 0);
    if (!Renormalised)
        for (std::size_t v = 0; v < out.dz.size(); ++v) out.dz[v] = -std::exp(full.log_p[v]) * mean;
    for (std::size_t j = 0; j < h.size(); ++j)
        out.dz[std::size_t(row.ids[j])] += Renormalised ? h[j] - std::exp(b.log_p[j]) * mean : h[j];
    for (real& g : out.dz) g /= real(row.temperature);
    return out;
}

/// The same numbers in other losses of a support, and in ragged lines, which have the rectangle's bits.
template <class Backend>
void sentinels_on_ids(Backend& backend) {
    const auto check = [&](peaked_row<double>& row, const std::string& what, bool teacher_none, bool student_none) {
        const auto judge = [&](const char* name, const auto& loss, auto exact, bool zero_q, bool zero_p) {
            INFO(std::string(name) << ", " << what);
            const auto want = exact(zero_q ? -30 : -real(endless), zero_p ? -30 : -real(endless));
            const result r = evaluate(backend, row.student(), row.cache(), loss);
            CHECK(r.diagnostics.bad_rows == 0);
            if (!(std::abs(want.value) < 1e30L)) {
                CHECK(r.diagnostics.infinite_rows == 1);
                CHECK(r.loss == 0);
                for (const double g : row.dz) CHECK(g == 0);
            } else {
                CHECK(r.diagnostics.infinite_rows == (zero_q || zero_p));
                CHECK_MESSAGE(std::abs(r.loss - double(want.value)) <=
                                  1e-12 * std::max(1.0, std::abs(double(want.value))),
                              "value " << r.loss << " for " << double(want.value));
                real top = 0, worst = 0;
                for (const real g : want.dz) REQUIRE(std::isfinite(g)); // std::max passes over NaN
                for (std::size_t v = 0; v < row.dz.size(); ++v)
                    top = std::max(top, std::abs(want.dz[v])),
                    worst = std::max(worst, std::isnan(row.dz[v]) ? 1e300L : std::abs(row.dz[v] - want.dz[v]));
                CHECK_MESSAGE(worst <= 1e-12L * top + 1e-18L,
                              "gradient off by " << double(worst) << " of " << double(top));
            }
            const std::vector<double> dz = row.dz;
            const std::vector<std::int32_t> offsets{0, std::int32_t(row.k)};
            const teacher::ragged_support<std::int32_t, double> lines{view(std::as_const(row.ids).data(), row.k),
                                                                      view(std::as_const(row.log_q).data(), row.k),
                                                                      row_offsets<>(offsets)};
            CHECK(evaluate(backend, row.student(), lines, loss).loss == r.loss);
            CHECK(row.dz == dz);
        };
        const auto one = [&](const char* name, const auto& d) {
            using D = std::decay_t<decltype(d)>;
            const bool zero_q = teacher_none && infinite_teacher(d), zero_p = student_none && infinite_student(d);
            const std::string of = name;
            judge((of + ", renormalised").c_str(), renormalised<D>{d},
                  [&](real q, real p) { return on_ids<true>(row, d, q, p); }, zero_q, zero_p);
            judge((of + ", generalised").c_str(), generalised<D>{d},
                  [&](real q, real p) { return on_ids<false>(row, d, q, p); }, zero_q, zero_p);
        };
        for_each_divergence(one);
        for (const double a : {-0.5, 1e-3, 0.25, 0.75, 0.9, 0.999, 1.0, 1.001, 1.5})
            one(("alpha " + std::to_string(a)).c_str(), alpha_divergence{a});
    };
    for (const double none : {-endless, -1400.0, -9999.0, -1e9, -1e20, std::numeric_limits<double>::lowest()})
        for (const index_t at : {0, 1, 2, 3}) {
            const bool is_zero = none <= -1e30;
            const std::string number = std::to_string(none) + " at " + std::to_string(at);
            peaked_row<double> row(40, 1, 0.22, 0.7F, 5);
            row.mask_teacher(at, none);
            check(row, "log q is " + number, is_zero, false);
            peaked_row<double> masked(40, 1, 0.22, 0.7F, 5);
            masked.z[std::size_t(masked.ids[std::size_t(at)])] = none;
            check(masked, "the logit is " + number, false, is_zero);
            masked.mask_teacher(at, none);
            check(masked, "both are " + number, false, false);
        }
}

/// A tail whose every logit is -inf.
template <class Z, class Backend>
void empty_tails(Backend& backend) {
    for (const index_t vocab : {3, 40, 1500}) {
        peaked_row<Z> row(vocab, endless, 0.22, 1, 8);
        row.k = 1, row.ids.resize(1), row.log_q = {std::log(0.78)}; // the id of all mass (V = 3), or of most
        if (vocab > 3) row.z[0] = element<Z>::store(detail::neg_inf<arithmetic_t<Z>>());
        const auto all_of = [&](const char* what, const auto& d) {
            CAPTURE(std::string(what));
            CAPTURE(vocab);
            using D = std::decay_t<decltype(d)>;
            textbook::row b;
            b.log_p = {0, -std::numeric_limits<real>::infinity()};
            b.log_q = {std::log(0.78L), std::log(0.22L)};
            real want = textbook::value(d, b);
            const bool infinite_value = std::is_same_v<D, forward_kl>;
            if (infinite_value) want = 0.78L * std::log(0.78L) + 0.22L * (std::log(0.22L) + 30);
            const result r = evaluate(backend, row.student(), row.cache(), tail_bucket<D>{d});
            CHECK(r.diagnostics.infinite_rows == infinite_value);
            CHECK(r.loss == doctest::Approx(double(want)).epsilon(1e-12));
            for (const Z g : row.dz) CHECK(double(element<Z>::load(g)) == 0); // one logit has mass: it cannot move
            const result skipped =
                evaluate(backend, row.student(), row.cache(), tail_bucket<D>{d}, {.on_infinite = infinite::skip()});
            CHECK((skipped.loss == 0) == infinite_value);
        };
        for_each_divergence(all_of);
    }
    // k = V: no id is outside; a stated tail is the teacher's word, a missing one is none
    const Z z[] = {Z(0), Z(1)};
    const std::int32_t ids[] = {1, 0};
    const double log_q[] = {std::log(0.5), std::log(0.3)}, tail[] = {std::log(0.2)};
    const student::logits<Z> s{view(z, 1, 2)};
    const auto stated =
        teacher::support<std::int32_t, double>{view(ids, 1, 2), view(log_q, 1, 2), vector_view<const double>(tail, 1)};
    CHECK(evaluate(backend, s, stated, tail_bucket{forward_kl{}}).diagnostics.infinite_rows == 1);
    CHECK(evaluate(backend, s, stated, tail_bucket{reverse_kl{}}).diagnostics.infinite_rows == 0);
    const auto missing = teacher::support<std::int32_t, double>{view(ids, 1, 2), view(log_q, 1, 2)};
    const result r = evaluate(backend, s, missing, tail_bucket{forward_kl{}});
    CHECK(r.diagnostics.infinite_rows == 0);
    CHECK(r.diagnostics.tail_floored == 0);
}

} // namespace

TEST_CASE("every gap, CPU, float") {
    cpu_backend backend;
    every_gap<float>(backend, "float", {3, 40, 2600});
}
TEST_CASE("every gap, CPU, double") {
    cpu_backend backend;
    every_gap<double>(backend, "double", {3, 40, 2600});
}
TEST_CASE("every gap, the GPU's kernels, float") {
    host_run_backend backend{32};
    every_gap<float>(backend, "float", {3, 700});
}
TEST_CASE("every gap, the GPU's kernels, double") {
    host_run_backend backend{32};
    every_gap<double>(backend, "double", {3, 700});
}
TEST_CASE("a tail without student mass: each divergence's limit; infinite under forward KL") {
    cpu_backend cpu;
    host_run_backend blocks{32};
    empty_tails<float>(cpu), empty_tails<double>(cpu);
    empty_tails<float>(blocks), empty_tails<double>(blocks);
}
TEST_CASE("a number that stands for none, on either side") {
    cpu_backend cpu;
    host_run_backend blocks{32};
    sentinels(cpu), sentinels(blocks);
}
TEST_CASE("and without a bucket: renormalised, generalised, in ragged lines") {
    cpu_backend cpu;
    sentinels_on_ids(cpu);
}
