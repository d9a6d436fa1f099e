// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What every dense estimator's traits promise, on the naive backend and on the CPU backend with float, bfloat16 and
// double storage: zero at p = q, never negative, invariant to a constant added to a row, equivariant under a
// permutation of the vocabulary, Σ_v dL/dz = 0. A deliberately wrong program must fail them.
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <algorithm>
#include <numeric>

#include <opd/backends/cpu.hpp>

namespace {

/// Reverse KL with a gradient of the wrong sign and a value shifted by a constant.
struct wrong {
    template <class F>
    F term(const opd::row_constants<F>& r, const opd::dense_entry<F>& e) const {
        return e.p * (e.delta + r.d_star) - e.q * F(0.01);
    }
    template <class F>
    F c(const opd::row_constants<F>&, const opd::dense_entry<F>& e) const {
        return e.q - e.p * F(0.5);
    }
};

} // namespace

using namespace opd;
using namespace opd::test;

namespace {

/// How far below 0 a value may round: 4 eps Σ |term|, in the precision of its terms. The naive backend's log-probs are
/// rounded at the size of the logits, whatever their difference.
template <class Backend, class Z, class Y, class D>
double lowest_value(const Z* z, const Y* y, const D& d, const problem& p) {
    if (std::is_same_v<Backend, naive_backend>) return 0.5e-13;
    using number = scalar<double>;
    std::vector<double> lp, lq;
    double lse = 0, size = 0;
    naive_backend::log_softmax(z, p.vocab, p.temperature_p, nullptr, &lse, lp);
    naive_backend::log_softmax(y, p.vocab, p.temperature_q, nullptr, &lse, lq);
    for (std::size_t v = 0; v < lp.size(); ++v)
        size += std::abs(d.term(row_constants<number>{number(1), number(1), number(0), number(1)},
                                dense_entry<number>{number(std::exp(lp[v])), number(std::exp(lq[v])),
                                                    number(lp[v] - lq[v]), number(lp[v]), number(lq[v])})
                             .v);
    return 4 * (in_double<Z> || in_double<Y> ? 0x1p-52 : 0x1p-23) * size;
}

/// What does not hold of estimator d for one random problem; empty if all does.
template <class T, class Backend, class D>
std::string violation(Backend& backend, const D& d, const problem& p) {
    constexpr estimator_traits traits = traits_of<D>();
    if (traits.value != meaning::divergence || !traits.exact_zero_at_equality) return "";
    const double eps = in_double<T> ? 1e-13 : 1e-6;
    buffers<T, std::conditional_t<in_double<T>, double, float>, T> b(p);
    std::vector<float> losses(std::size_t(p.rows));
    const double total =
        evaluate(backend, b.student(), b.teacher(), d, {.reduction = reduce::sum, .losses = losses}).loss;
    double spread = 0;
    for (index_t r = 0; r < p.rows; ++r) {
        spread = std::max(spread, conditioning_of(d) * (spread_of(b.z_view().row(r), p.vocab, p.temperature_p) +
                                                        spread_of(b.y_view().row(r), p.vocab, p.temperature_q)));
        const double loss = losses[std::size_t(r)];
        double sum = 0, size = 0;
        for (index_t v = 0; v < p.vocab; ++v) {
            const double g = double(b.dz_view()(r, v));
            sum += g, size = std::max(size, std::abs(g));
            if (p.kind == flavour::equal && p.temperature_p == p.temperature_q && std::abs(g) > 1e-3 * eps)
                return "gradient " + std::to_string(g) + " at p = q";
        }
        if (!(loss >= -lowest_value<Backend>(b.z_view().row(r), b.y_view().row(r), d, p)))
            return "negative: " + std::to_string(loss * 1e9) + "e-9";
        // in bfloat16 the student's logits are rounded, the teacher's are not
        const bool exact = !std::is_same_v<Backend, naive_backend> && !std::is_same_v<T, bfloat16>;
        if (p.kind == flavour::equal && p.temperature_p == p.temperature_q && loss > (exact ? 0 : 0.5 * eps))
            return "loss " + std::to_string(loss * 1e9) + "e-9 at p = q";
        if (!(std::abs(sum) <= (eps + spread * eps / 8) * (1 + size + std::abs(loss)) * 4))
            return "the gradient sums to " + std::to_string(sum);
    }
    const auto same = [&](double x) {
        return std::abs(x - total) <=
               2 * (eps + spread * (in_double<T> ? 0x1p-50 : 0x1p-23)) * (double(p.rows) + std::abs(total));
    };
    // a constant on a row, added in double, where it is exact
    buffers<double> shifted = b.template as<double, double, double>();
    for (double& z : shifted.z) z += 37;
    for (double& y : shifted.y) y -= 5;
    const double moved = evaluate(backend, shifted.student(), shifted.teacher(), d, {.reduction = reduce::sum}).loss;
    if (!same(moved)) return "shifted rows: " + std::to_string(moved) + ", not " + std::to_string(total);

    std::vector<std::size_t> order(static_cast<std::size_t>(p.vocab));
    std::iota(order.begin(), order.end(), std::size_t{0});
    numbers u(p.seed + 7);
    for (std::size_t v = order.size() - 1; v > 0; --v) std::swap(order[v], order[std::size_t(u.below(index_t(v) + 1))]);
    auto permuted = b;
    for (index_t r = 0; r < p.rows; ++r)
        for (index_t v = 0; v < p.vocab; ++v) {
            const auto from = index_t(order[std::size_t(v)]);
            permuted.z[std::size_t(r * (p.vocab + p.pad_z) + v)] = b.z_view()(r, from);
            permuted.y[std::size_t(r * (p.vocab + p.pad_y) + v)] = b.y_view()(r, from);
        }
    const double turned = evaluate(backend, permuted.student(), permuted.teacher(), d, {.reduction = reduce::sum}).loss;
    if (!same(turned)) return "permuted: " + std::to_string(turned) + ", not " + std::to_string(total);
    if (std::abs(total) < 1e4)
        for (index_t r = 0; r < p.rows; ++r) {
            double size = 0;
            for (index_t v = 0; v < p.vocab; ++v) size = std::max(size, std::abs(double(b.dz_view()(r, v))));
            for (index_t v = 0; v < p.vocab && !std::is_same_v<D, total_variation>; ++v)
                if (std::abs(double(permuted.dz_view()(r, v)) -
                             double(b.dz_view()(r, index_t(order[std::size_t(v)])))) >
                    (eps + spread * (in_double<T> ? 0x1p-50 : 0x1p-23)) * 2 * conditioning_of(d) *
                        (size + 1 + std::abs(total)))
                    return "the gradient of row " + std::to_string(r) + " does not follow a permutation: " +
                           std::to_string(std::abs(double(permuted.dz_view()(r, v)) -
                                                   double(b.dz_view()(r, index_t(order[std::size_t(v)])))) *
                                          1e9) +
                           "e-9";
        }
    return "";
}

template <class T, class Backend>
void all_divergences(Backend& backend, int cases) {
    for_each_divergence_type([&](const std::string& name, auto d) {
        property(name,
                 [&] {
                     problem p = *problems({.largest_vocab = 1100, .smallest_rows = 1, .largest_rows = 3});
                     const std::string v = violation<T>(backend, d, p);
                     if (!v.empty()) RC_FAIL(v);
                 },
                 {.cases = cases});
    });
}

} // namespace

TEST_CASE("naive backend") {
    naive_backend backend;
    all_divergences<double>(backend, 40);
}
TEST_CASE("CPU backend, double") {
    cpu_backend backend;
    all_divergences<double>(backend, 60);
}
TEST_CASE("CPU backend, float") {
    cpu_backend backend;
    all_divergences<float>(backend, 100);
}
TEST_CASE("CPU backend, bfloat16") {
    cpu_backend backend;
    all_divergences<bfloat16>(backend, 40);
}
TEST_CASE("the suite can fail: a wrong program violates it") {
    cpu_backend backend;
    int violations = 0;
    for (std::uint64_t seed = 0; seed < 20; ++seed)
        violations +=
            !violation<float>(backend, wrong{}, {.rows = 1, .vocab = 30, .kind = flavour::equal, .seed = seed}).empty();
    CHECK(violations == 20);
}
