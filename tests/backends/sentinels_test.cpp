// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
//
// A server's or a trainer's number for "none" in place of a log-prob or a logit, on either side, in every loss of a
// support and of drawn tokens and in every storage type: as written, -inf where it is a mask, a bad row where no token
// can have been drawn. Values and gradients against long double.
#include "backends/host_run.hpp"
#include "backends/peaked_row.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/support.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/any.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

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
/// f(1) of the form that the textbook sums.
template <class D>
real at_equality(const D& d) {
    if constexpr (std::is_same_v<D, alpha_divergence>)
        return d.a == 0 || d.a == 1 ? 0 : 1 / (real(d.a) * (real(d.a) - 1));
    return std::is_same_v<D, chi_squared>;
}
/// The row on its ids alone: the divergence of the renormalised laws, or the sum of its Bregman terms in p and q of the
/// whole.
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
        out.value += at_equality(d) * (1 - z_q) - (at_one + left_out(d)) * (p_raised - z_q);
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

/// Σ_S p log(p/q) or q log(q/p), and its gradient.
template <class D>
peaked_row<double>::outcome truncated(const peaked_row<double>& row, const D&, real floor_q, real floor_p) {
    const textbook::row full = textbook::make_row(row.z.data(), row.z.data(), row.vocab, double(row.temperature), 1);
    peaked_row<double>::outcome out;
    out.dz.assign(full.log_p.size(), 0);
    real mean = 0;
    for (index_t j = 0; j < row.k; ++j) {
        const auto id = std::size_t(row.ids[std::size_t(j)]);
        const real lp = full.log_p[id], lq = real(row.log_q[std::size_t(j)]), p = std::exp(lp), q = std::exp(lq);
        const bool mass = lp > -1e30L;
        real h = 0;
        if constexpr (std::is_same_v<D, forward_kl>) {
            if (q > 0) out.value += q * (lq - std::max(lp, floor_p));
            if (mass) h = -q;
        } else if (mass) {
            const real gap = lp - std::max(lq, floor_q);
            if (p > 0) out.value += p * gap, h = p * (gap + 1);
        }
        out.dz[id] += h, mean += h;
    }
    for (std::size_t v = 0; v < out.dz.size(); ++v)
        out.dz[v] = (out.dz[v] - std::exp(full.log_p[v]) * mean) / real(row.temperature);
    return out;
}
/// Σ_S (p/mu) p̃ log(p̃/q̃), the ratio held constant and within e^±80.
peaked_row<double>::outcome with_ratios(const peaked_row<double>& row, const std::vector<double>& log_mu,
                                        real floor_q) {
    const textbook::row full = textbook::make_row(row.z.data(), row.z.data(), row.vocab, double(row.temperature), 1);
    textbook::reals log_p;
    for (const std::int32_t id : row.ids) log_p.push_back(full.log_p[std::size_t(id)]);
    const textbook::reals of_p = textbook::log_softmax(log_p),
                          of_q = textbook::log_softmax(textbook::reals(row.log_q.begin(), row.log_q.end()));
    peaked_row<double>::outcome out;
    out.dz.assign(full.log_p.size(), 0);
    for (std::size_t j = 0; j < of_p.size(); ++j) {
        if (!(std::exp(of_p[j]) > 0)) continue;
        const real l = std::clamp(log_p[j] - real(log_mu[j]), -80.L, 80.L);
        const real h = std::exp(l + of_p[j]) * (of_p[j] - std::max(of_q[j], floor_q));
        out.value += h, out.dz[std::size_t(row.ids[j])] = h / real(row.temperature);
    }
    for (std::size_t j = 0; j < of_p.size(); ++j)
        out.dz[std::size_t(row.ids[j])] -= std::exp(of_p[j]) * out.value / real(row.temperature);
    return out;
}

any_dense as_any(const reverse_kl&) { return {choice::objective::reverse_kl}; }
any_dense as_any(const forward_kl&) { return {choice::objective::forward_kl}; }
any_dense as_any(const jsd& d) { return {choice::objective::jsd, double(d.w), double(d.o)}; }
any_dense as_any(const skew_forward_kl& d) { return {choice::objective::skew_forward_kl, double(d.a)}; }
any_dense as_any(const skew_reverse_kl& d) { return {choice::objective::skew_reverse_kl, double(d.a)}; }
any_dense as_any(const total_variation&) { return {choice::objective::total_variation}; }
any_dense as_any(const alpha_divergence& d) { return {choice::objective::alpha_divergence, double(d.a)}; }
any_dense as_any(const chi_squared&) { return {choice::objective::chi_squared}; }

template <class T>
T stored(double x) {
    return element<T>::store(static_cast<arithmetic_t<T>>(x));
}
/// The numbers that stand for none, as T holds them; half holds -65504 at most.
template <class T>
std::vector<T> numbers_for_none() {
    std::vector<T> out;
    for (const double x : {-endless, -1400.0, -9999.0, -1e9, -1e20}) out.push_back(stored<T>(x));
    out.push_back(stored<T>(-double(detail::largest_stored<T>)));
    return out;
}
/// How far a gradient may be off its largest entry, and by itself.
template <class T>
constexpr double coarse = sizeof(T) == 8            ? 1e-12
                          : sizeof(T) == 4          ? 4e-6
                          : std::is_same_v<T, half> ? 1e-3
                                                    : 8e-3;
template <class T>
constexpr double finest = sizeof(T) == 8            ? 1e-18
                          : std::is_same_v<T, half> ? 6e-8
                                                    : 1e-37;

/// One call on T against what it should give: a bad row, an infinite one (beyond `most`, or what T holds), or these
/// numbers.
struct expected {
    bool bad = false, infinite = false;
    real most = 1e30L;
    double share = 0; ///< by which T's rounding may move the gradient
    bool value = true;
};
template <class T>
void judge_stored(const result& r, const std::vector<T>& dz, const peaked_row<double>::outcome& want, expected e) {
    real top = 0;
    for (const real g : want.dz) top = std::max(top, std::abs(g));
    const bool unfit =
        !e.bad && (!(std::abs(want.value) < e.most && top < e.most) || top > real(detail::largest_stored<T>));
    CHECK(r.diagnostics.bad_rows == e.bad);
    CHECK(r.diagnostics.infinite_rows == (!e.bad && (e.infinite || unfit)));
    if (e.bad || unfit) {
        CHECK(r.loss == 0);
        for (const T g : dz) CHECK(double(element<T>::load(g)) == 0);
        return;
    }
    if (e.value)
        CHECK_MESSAGE(std::abs(r.loss - double(want.value)) <= 2e-6 * std::max(1.0, std::abs(double(want.value))),
                      "value " << r.loss << " for " << double(want.value));
    real worst = 0;
    for (std::size_t v = 0; v < dz.size(); ++v) {
        const real g = real(element<T>::load(dz[v]));
        worst = std::max(worst, std::isnan(g) ? 1e300L : std::abs(g - want.dz[v]));
    }
    CHECK_MESSAGE(worst <= std::max(coarse<T>, e.share) * top + finest<T>,
                  "gradient off by " << double(worst) << " of " << double(top));
}

/// Every loss of a support, with logits, log-probs and gradient in T.
template <class T>
void sentinels_stored() {
    cpu_backend backend;
    enum { of_student, of_teacher, of_both, of_mu, of_teacher_where_mu_is_low };
    for (const T none : numbers_for_none<T>())
        for (const int side : {of_student, of_teacher, of_both, of_mu, of_teacher_where_mu_is_low})
            for (const index_t at : {0, 1, 2, 3, 4, 5}) { // 4: the rest; 5: all ids at once
                peaked_row<double> row(40, 1, 0.22, 0.7F, 5);
                const bool zero = std::isinf(detail::load_log(none)), all = at == 5;
                if (at == row.k && side != of_teacher) continue;
                if (all && (zero || (side != of_teacher && side != of_student))) continue;
                std::vector<T> z, dz, log_q, log_mu, log_tail;
                const auto to = std::size_t(at);
                if (!all && side != of_student && side != of_mu) row.mask_teacher(at, double(element<T>::load(none)));
                for (const double x : row.z) z.push_back(stored<T>(x));
                for (const double x : row.log_q) log_q.push_back(stored<T>(x)), log_mu.push_back(stored<T>(x - .3));
                log_tail.push_back(stored<T>(row.log_tail[0]));
                for (std::size_t j = 0; j < log_q.size() && all; ++j)
                    (side == of_student ? z[std::size_t(row.ids[j])] : log_q[j]) = none;
                if (!all && (side == of_student || side == of_both)) z[std::size_t(row.ids[to])] = none;
                if (at < row.k) // mu drew it all the same
                    log_mu[to] = side == of_mu ? none : stored<T>(side == of_teacher_where_mu_is_low ? -90 : -2);
                // what the rows are told
                for (std::size_t v = 0; v < z.size(); ++v) row.z[v] = detail::load_log(z[v]);
                std::vector<double> mu;
                for (std::size_t j = 0; j < log_q.size(); ++j)
                    row.log_q[j] = detail::load_log(log_q[j]), mu.push_back(detail::load_log(log_mu[j]));
                row.log_tail[0] = detail::load_log(log_tail[0]);
                real mass = std::exp(real(row.log_tail[0])); // not 1: log q is rounded
                for (const double lq : row.log_q) mass += std::exp(real(lq));
                const bool teacher_none = zero && (side == of_teacher || side == of_teacher_where_mu_is_low),
                           student_none = zero && side == of_student;
                INFO("number " << double(element<T>::load(none)) << ", side " << side << ", at " << at << ", "
                               << sizeof(T) << " bytes");
                teacher::support<std::int32_t, T> cache{view(std::as_const(row.ids).data(), 1, row.k),
                                                        view(std::as_const(log_q).data(), 1, row.k), log_tail};
                const auto call = [&](const auto& loss, const env& how = {}) {
                    dz.assign(z.size(), stored<T>(7));
                    return evaluate(backend,
                                    student::logits<T>{view(std::as_const(z).data(), 1, row.vocab),
                                                       view(dz.data(), 1, row.vocab), row.temperature},
                                    cache, loss, how);
                };
                const auto one = [&](const char* name, const auto& d) {
                    using D = std::decay_t<decltype(d)>;
                    INFO(std::string(name));
                    const bool zero_q = teacher_none && infinite_teacher(d),
                               zero_p = student_none && infinite_student(d);
                    const real q = zero_q ? -30 : -real(endless), p = zero_p ? -30 : -real(endless);
                    const auto judge = [&](const result& r, bool infinite, const auto& want) {
                        judge_stored(r, dz, want, {.infinite = infinite});
                    };
                    auto bucketed = row.reference(d, q, p);
                    if constexpr (std::is_same_v<D, alpha_divergence>)
                        if (d.a < 0.25) bucketed.value += at_equality(d) * (1 - mass); // it is summed so
                    judge(call(any_tail_bucket{as_any(d)}), zero_q || zero_p, bucketed);
                    if (at == row.k) return;
                    judge(call(renormalised<any_dense>{as_any(d)}), zero_q || zero_p, on_ids<true>(row, d, q, p));
                    judge(call(any_partial{choice::partial::generalised, as_any(d)}), zero_q || zero_p,
                          on_ids<false>(row, d, q, p));
                    if constexpr (std::is_same_v<D, reverse_kl> || std::is_same_v<D, forward_kl>)
                        judge(call(any_partial{choice::partial::truncated_biased, as_any(d)}), zero_q || zero_p,
                              truncated(row, d, q, p));
                };
                if (side < of_mu && !all) {
                    for_each_divergence(one);
                    for (const double a : {-0.5, 1e-3, 0.25, 0.75, 0.9, 0.999, 1.0, 1.001, 1.5})
                        one(("alpha " + std::to_string(a)).c_str(), alpha_divergence{a});
                }
                if (at == row.k) continue;
                INFO("reweighted");
                cache.chosen_by = teacher::chosen_by::stale_student;
                cache.log_mu = view(std::as_const(log_mu).data(), 1, row.k);
                const bool placeholder = side == of_mu && !(double(element<T>::load(none)) >= -9000);
                if (placeholder)
                    CHECK_THROWS_WITH_AS(
                        call(any_partial{choice::partial::reweighted, {}}, {.checks = check::contents}),
                        doctest::Contains("teacher.log_mu"), invalid_input);
                else
                    CHECK_NOTHROW(call(any_partial{choice::partial::reweighted, {}}, {.checks = check::contents}));
                const result r = call(any_partial{choice::partial::reweighted, {}});
                judge_stored(r, dz, with_ratios(row, mu, teacher_none ? -30 : -real(endless)),
                             {.bad = placeholder, .infinite = teacher_none, .most = 1e37L});
            }
}

/// Three drawn tokens under mc, with all but the weights in T.
template <class T>
void sentinels_of_draws() {
    cpu_backend backend;
    enum { of_student, of_teacher, of_both, of_mu };
    for (const T none : numbers_for_none<T>())
        for (const int side : {of_student, of_teacher, of_both, of_mu})
            for (std::size_t at = 0; at < 3; ++at) {
                peaked_row<double> row(40, 1, 0.22, 0.7F, 5);
                std::vector<T> z, dz, log_q, log_mu{stored<T>(-.5), stored<T>(-3), stored<T>(-1.75)};
                for (const double x : row.z) z.push_back(stored<T>(x));
                for (std::size_t j = 0; j < 3; ++j) log_q.push_back(stored<T>(row.log_q[j]));
                if (side == of_student || side == of_both) z[std::size_t(row.ids[at])] = none;
                if (side == of_teacher || side == of_both) log_q[at] = none;
                if (side == of_mu) log_mu[at] = none;
                for (std::size_t v = 0; v < z.size(); ++v) row.z[v] = detail::load_log(z[v]);
                const textbook::row full =
                    textbook::make_row(row.z.data(), row.z.data(), row.vocab, double(row.temperature), 1);
                const bool zero = std::isinf(detail::load_log(none));
                const bool placeholder = !zero && double(element<T>::load(none)) < -9000;
                const bool bad = side == of_mu ? zero || placeholder : side != of_student && placeholder;
                const auto one = [&](const char* name, const auto& d) {
                    INFO(std::string(name) << ", number " << double(element<T>::load(none)) << ", side " << side
                                           << ", at " << at << ", " << sizeof(T) << " bytes");
                    const bool infinite = zero && (((side == of_teacher || side == of_both) && infinite_teacher(d)) ||
                                                   (side == of_student && infinite_student(d)));
                    dz.assign(z.size(), stored<T>(7));
                    const any_dense chosen = as_any(d);
                    const result r =
                        evaluate(backend,
                                 student::logits<T>{view(std::as_const(z).data(), 1, row.vocab),
                                                    view(dz.data(), 1, row.vocab), row.temperature},
                                 teacher::samples<std::int32_t, T>{view(std::as_const(row.ids).data(), 1, 3),
                                                                   view(std::as_const(log_mu).data(), 1, 3),
                                                                   view(std::as_const(log_q).data(), 1, 3)},
                                 any_sampled{.of = {chosen.which, chosen.a, chosen.b}});
                    peaked_row<double>::outcome want;
                    want.dz.assign(z.size(), 0);
                    real sum = 0;
                    for (std::size_t j = 0; j < 3 && !bad; ++j) {
                        const auto id = std::size_t(row.ids[j]);
                        const real mu = real(element<T>::load(log_mu[j]));
                        real lp = full.log_p[id], lq = real(detail::load_log(log_q[j]));
                        lp = lp > -1e30L ? real(element<T>::load(stored<T>(double(lp)))) : mu - 80;
                        if (infinite && infinite_teacher(d)) lq = std::max(lq, -30.L);
                        const real rho = std::exp(std::clamp(lp - mu, -80.L, 80.L));
                        lp = std::max(lp, std::is_same_v<std::decay_t<decltype(d)>, reverse_kl> ? lp : mu - 80);
                        const real c = rho / 3 * (slope(d, lp, lq) - slope(d, 0, 0));
                        want.dz[id] += c, sum += c;
                    }
                    for (std::size_t v = 0; v < z.size(); ++v)
                        want.dz[v] = (want.dz[v] - std::exp(full.log_p[v]) * sum) / real(row.temperature);
                    // log p is rounded to T, and a rounding may go the other way here
                    judge_stored(r, dz, want,
                                 {.bad = bad,
                                  .infinite = infinite,
                                  .most = 1e37L,
                                  .share = sizeof(T) == 2   ? .03
                                           : sizeof(T) == 4 ? 2e-5
                                                            : 0,
                                  .value = false});
                    CHECK(std::isfinite(r.loss));
                };
                for_each_divergence(one);
                for (const double a : {-0.5, 0.25, 0.75, 0.9, 1.0, 1.5})
                    one(("alpha " + std::to_string(a)).c_str(), alpha_divergence{a});
            }
}

} // namespace

TEST_CASE("a number that stands for none, on either side") {
    cpu_backend cpu;
    host_run_backend blocks{32};
    sentinels(cpu), sentinels(blocks);
}
TEST_CASE("and without a bucket: renormalised, generalised, in ragged lines") {
    cpu_backend cpu;
    sentinels_on_ids(cpu);
}
TEST_CASE_TEMPLATE("and in every storage type, in every loss of a support", T, double, float, half, bfloat16) {
    sentinels_stored<T>();
}
TEST_CASE_TEMPLATE("and in every storage type, of drawn tokens", T, double, float, half, bfloat16) {
    sentinels_of_draws<T>();
}
