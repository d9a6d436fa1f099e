// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast
//
// The CPU backend against the naive float64 one: every divergence on float, bfloat16 and double storage, and the mixes
// of element types on three divergences of different kind; random shapes, strides, temperatures, masks and -inf
// patterns.
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
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

/// Total variation has a kink where p = q: rounding decides the sign of an entry whose |log p - log q| is below float's
/// digits, which moves the entry by up to p and, through Σ c, every other v by its share p[v] of that. Entries at a
/// kink are held to p itself, the others to their bound and that share: an equal row, all of it at the kink, still has
/// a gradient of nearly 0.
template <class B, class R>
void judge_total_variation(B& b, R& reference, index_t r, double scale, double spread) {
    const problem& p = b.p;
    using Z = std::remove_const_t<std::remove_reference_t<decltype(b.z[0])>>;
    using G = std::remove_reference_t<decltype(b.dz[0])>;
    using Y = std::remove_const_t<std::remove_reference_t<decltype(b.y[0])>>;
    std::vector<double> lp, lq;
    double lse = 0, undecided = 0, top = 0;
    naive_backend::log_softmax(b.z_view().row(r), p.vocab, p.temperature_p, nullptr, &lse, lp);
    naive_backend::log_softmax(b.y_view().row(r), p.vocab, p.temperature_q, nullptr, &lse, lq);
    const auto kink = [&](index_t v) {
        const auto i = std::size_t(v);
        return std::abs(lp[i] - lq[i]) < 2e-6 * (1 + std::abs(lp[i]));
    };
    for (index_t v = 0; v < p.vocab; ++v) {
        if (kink(v)) undecided += std::exp(lp[std::size_t(v)]);
        top = std::max(top, std::abs(double(reference.dz_view()(r, v))));
    }
    double sum = 0, size = 0;
    for (index_t v = 0; v < p.vocab; ++v) {
        const double got = double(element<G>::load(b.dz_view()(r, v))), want = reference.dz_view()(r, v);
        const double share = std::exp(lp[std::size_t(v)]) * scale;
        const double bound = relative_bound<Z, G, Y>(spread) * top + (in_double<Z, G, Y> ? 1e-13 : 0x1p-24) * scale +
                             storage_rounding<G>(want) + share * (undecided + (kink(v) ? 1 : 0));
        if (!(std::abs(got - want) <= bound))
            RC_FAIL("gradient " + std::to_string(v) + " of row " + std::to_string(r) + ": " + std::to_string(got) +
                    ", not " + std::to_string(want));
        sum += got, size += std::abs(got) + storage_rounding<G>(got) * 0x1p22;
    }
    if (!(std::abs(sum) <= 8 * 0x1p-23 * (size + scale)))
        RC_FAIL("row " + std::to_string(r) + " sums to " + std::to_string(sum) + " of " + std::to_string(size));
}

template <class Z, class G, class Y, class D>
void agrees(const std::string& name, const D& d, int cases) {
    cpu_backend fast;
    naive_backend slow;
    const double conditioning = conditioning_of(d);
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
                     if constexpr (std::is_same_v<D, total_variation>) {
                         judge_total_variation(b, reference, r, scale, spread);
                         continue;
                     }
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
