// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast, no-sanitize (numbers of rows that eigen_contract_test runs there)
//
// The CPU backend against the naive float64 one: every divergence on float, bfloat16 and double storage, and the mixes of
// element types on three divergences of different kind; random shapes, strides, temperatures, masks and -inf patterns.
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <opd/backends/eigen.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const std::vector<flavour> every_kind = {flavour::wide,        flavour::near_equal, flavour::equal,
                                         flavour::peaked,      flavour::filtered,   flavour::student_gap,
                                         flavour::teacher_gap, flavour::one_hot};

/// Kinks of total variation: p and q closer than rounding lets float tell apart.
template <class B>
bool near_kink(const B& b, index_t r, index_t v) {
    std::vector<double> lp, lq;
    double lse = 0;
    naive_backend::log_softmax(b.z_view().row(r), b.p.vocab, b.p.temperature_p, nullptr, &lse, lp);
    naive_backend::log_softmax(b.y_view().row(r), b.p.vocab, b.p.temperature_q, nullptr, &lse, lq);
    return std::abs(lp[std::size_t(v)] - lq[std::size_t(v)]) < 2e-6 * (1 + std::abs(lp[std::size_t(v)]));
}

template <class Z, class G, class Y, class D>
void agrees(const std::string& name, const D& d, int cases) {
    eigen_backend fast;
    naive_backend slow;
    const double conditioning = traits_of(d).conditioning;
    property(name,
             [&] {
                 const problem p = *problems({.kinds = every_kind});
                 buffers<Z, G, Y> b(p);
                 auto reference = b.template as<double, double, double>();
                 std::vector<float> losses(std::size_t(p.rows)), losses_slow(losses);
                 env e = b.masked_env();
                 e.weights = b.weights;
                 e.losses = losses;
                 const result got = evaluate(fast, b.student(), b.teacher(), d, e);
                 e.losses = losses_slow;
                 const result want = evaluate(slow, reference.student(), reference.teacher(), d, e);

                 double size = 1, widest = 0; // of the terms, which may cancel in the sum
                 const double kept = double(std::max<index_t>(want.diagnostics.kept, 1));
                 for (index_t r = 0; r < p.rows; ++r) {
                     const auto i = std::size_t(r);
                     if (!b.kept[i]) continue;
                     const double loss = losses_slow[i], w = std::abs(double(b.weights[i]));
                     const double spread = conditioning * (spread_of(b.z_view().row(r), p.vocab, p.temperature_p) +
                                                           spread_of(b.y_view().row(r), p.vocab, p.temperature_q));
                     widest = std::max(widest, spread);
                     size += std::abs(loss) / kept;
                     if (!(std::abs(losses[i] - loss) <=
                           2e-7 * std::abs(loss) + w * value_bound<Z, G, Y>(loss / std::max(w, 1e-6), spread)))
                         RC_FAIL("loss of row " + std::to_string(r) + ": " + std::to_string(losses[i]) + ", not " +
                                 std::to_string(loss));
                     const double scale = w / kept / p.temperature_p;
                     if constexpr (std::is_same_v<D, total_variation>)
                         for (index_t v = 0; v < p.vocab; ++v)
                             if (near_kink(b, r, v)) RC_SUCCEED("at a kink");
                     if (conditioning > 1 && std::abs(loss) > 1e4 * w)
                         continue; // the gradient is what such a value leaves
                     const double excess = gradient_excess<Z, G, Y>(b.dz_view().row(r), reference.dz_view().row(r),
                                                                    p.vocab, scale, spread);
                     if (!(excess <= 1))
                         RC_FAIL("gradient of row " + std::to_string(r) + ": " + std::to_string(excess) + " bounds");
                 }
                 if (!(std::abs(got.loss - want.loss) <= value_bound<Z, G, Y>(size, widest)))
                     RC_FAIL("loss " + std::to_string(got.loss) + ", not " + std::to_string(want.loss));
                 RC_ASSERT(got.diagnostics.kept == want.diagnostics.kept);
                 RC_ASSERT(got.diagnostics.bad_rows == want.diagnostics.bad_rows);
                 RC_ASSERT(got.diagnostics.infinite_rows == want.diagnostics.infinite_rows);
                 RC_ASSERT(got.diagnostics.first_infinite_row == want.diagnostics.first_infinite_row);
             },
             {.cases = cases});
}

/// A program of one sweep and one of two.
template <class Z, class G, class Y>
void mix(const std::string& types) {
    agrees<Z, G, Y>("reverse KL on " + types, reverse_kl{}, 40);
    agrees<Z, G, Y>("JSD on " + types, jsd{.w = .3, .o = .3}, 40);
}

} // namespace

#ifndef OPD_TEST_MIXED_STORAGE
TEST_CASE("float storage") {
    for_each_divergence([](const std::string& name, auto d) { agrees<float, float, float>(name, d, 100); });
}
TEST_CASE("bfloat16 storage") {
    mix<bfloat16, bfloat16, bfloat16>("bfloat16");
    agrees<bfloat16, bfloat16, bfloat16>("forward KL on bfloat16", forward_kl{}, 40);
    agrees<bfloat16, bfloat16, bfloat16>("alpha on bfloat16", alpha_divergence{.a = -.5}, 40);
}
#else
TEST_CASE("mixed storage") {
    mix<bfloat16, bfloat16, float>("bfloat16, gradient bfloat16, teacher float");
    mix<float, float, bfloat16>("float, gradient float, teacher bfloat16");
    mix<bfloat16, float, bfloat16>("bfloat16, gradient float, teacher bfloat16");
    mix<half, half, half>("half");
    mix<float, bfloat16, half>("float, gradient bfloat16, teacher half");
    mix<Eigen::bfloat16, Eigen::half, float>("Eigen::bfloat16, gradient Eigen::half, teacher float");
    mix<double, double, double>("double");
    mix<float, float, double>("float, gradient float, teacher double");
    agrees<half, half, half>("alpha on half", alpha_divergence{}, 40);
    agrees<double, double, double>("alpha on double", alpha_divergence{}, 40);
}
#endif
