// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Adding a constant to a row's logits changes nothing, so every row's gradient
// sums to 0. For every estimator, cache and storage type, over rows of every
// kind, temperatures from 0.01 to 100, m > V, N > 256 and N = 0:
//
//   |Σ dz| <= 8 eps (Σ |dz| + g c (1 + |loss| + log V / 4)) + V·tiny       g = 1/(kept T)
//
// with eps and half the smallest step, tiny, of the gradient's own type. The
// second term is the rounding of what dz is the difference of: log-ratios of
// the size of the loss, before p Σc is taken from c; c is 4 for powers of the
// ratio, else 1. log V / 4: each of the two normalisers is a logarithm of up to
// log V, rounded twice, to half an eps of itself each, and every p of its row
// errs by as much: 2 eps g log V in all.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

problem any_problem() {
    return *problems(
        {.largest_vocab = 2100,
         .far_temperatures = true,
         .many_rows = true,
         .kinds = {flavour::wide, flavour::near_equal, flavour::equal, flavour::peaked, flavour::filtered,
                   flavour::student_gap, flavour::teacher_gap, flavour::one_hot, flavour::steep, flavour::diffuse}});
}

/// Runs `call(student, env)` on the problem's buffers and looks at the rows of
/// its gradient. Returns how many were bad.
template <class Buffers, class Call>
index_t sums_to_zero(Buffers& b, double conditioning, Call call) {
    using G = typename decltype(b.dz_view())::element_type;
    const problem& p = b.p;
    std::vector<float> losses(std::size_t(p.rows));
    env e = b.masked_env();
    e.losses = losses;
    const result r = call(b.student(), e);
    RC_ASSERT(detail::is_finite(r.loss));
    const double tiny = storage_rounding<G>(0), eps = 2 * (storage_rounding<G>(1) - tiny);
    const double g = 1 / double(std::max<index_t>(r.diagnostics.kept, 1)) / double(p.temperature_p);
    for (index_t row = 0; row < p.rows; ++row) {
        double sum = 0, size = 0;
        for (index_t v = 0; v < p.vocab; ++v) {
            const double x = double(element<G>::load(b.dz_view()(row, v)));
            if (!detail::is_finite(x)) RC_FAIL("dz is no number in row " + std::to_string(row));
            sum += x, size += std::abs(x);
        }
        const double loss = std::abs(double(losses[std::size_t(row)]));
        const double bound =
            8 * eps * (size + g * conditioning * (1 + loss + std::log(double(p.vocab)) / 4)) + double(p.vocab) * tiny;
        if (!(std::abs(sum) <= bound))
            RC_FAIL("row " + std::to_string(row) + " of loss " + std::to_string(loss) + " sums to " +
                    std::to_string(sum / bound) + " bounds, " + std::to_string(sum / size) + " of its size");
    }
    return r.diagnostics.bad_rows;
}

template <class Z, class G, class Y, class D>
void dense(const std::string& name, const D& d, int cases) {
    property(name,
             [&] {
                 cpu_backend backend;
                 buffers<Z, G, Y> b(any_problem());
                 const index_t bad = sums_to_zero(b, conditioning_of(d), [&](const auto& student, const env& e) {
                     return evaluate(backend, student, b.teacher(), d, e);
                 });
                 RC_ASSERT(bad == 0);
             },
             {.cases = cases});
}
/// Estimators of a sparse cache, which `cache(caches)` picks.
template <class T, class L, class Cache, class Estimator>
void sparse(const std::string& name, Cache cache, const Estimator& estimator, int cases) {
    property(name,
             [&] {
                 cpu_backend backend;
                 buffers<T, T, float> b(any_problem());
                 const index_t few = std::min<index_t>(b.p.vocab, 40);
                 const caches<L> c(b, *rc::gen::inRange<index_t>(1, few + 1),
                                   *rc::gen::element<index_t>(1, 2, 7, 2 * few + 1));
                 const index_t bad = sums_to_zero(b, 1, [&](const auto& student, const env& e) {
                     return evaluate(backend, student, cache(c), estimator, e);
                 });
                 // a support may hold nothing that has mass
                 if constexpr (!requires { estimator.on_support; }) RC_ASSERT(bad == 0);
             },
             {.cases = cases});
}
const auto support = [](const auto& c) { return c.support(); };
const auto samples = [](const auto& c) { return c.samples(); };
const auto weighted = [](const auto& c) { return c.weighted(); };

} // namespace

TEST_CASE("divergences") {
    for_each_divergence_type([](const std::string& name, auto d) { dense<float, float, float>(name, d, 100); });
    dense<bfloat16, bfloat16, bfloat16>("reverse KL, bfloat16", reverse_kl{}, 60);
    dense<half, half, half>("JSD, half", jsd{}, 60);
    dense<double, double, double>("forward KL, double", forward_kl{}, 60);
    dense<double, double, double>("JSD, double", jsd{}, 60);
}

TEST_CASE("tail buckets and renormalised supports") {
    sparse<float, float>("buckets, reverse KL", support, tail_bucket{reverse_kl{}}, 100);
    sparse<float, float>("buckets, forward KL", support, tail_bucket{forward_kl{}}, 100);
    sparse<float, float>("buckets, JSD", support, tail_bucket{jsd{.w = .3, .o = .3}}, 100);
    sparse<double, double>("buckets, forward KL, double", support, tail_bucket{forward_kl{}}, 100);
    sparse<bfloat16, float>("buckets, reverse KL, bfloat16", support, tail_bucket{reverse_kl{}}, 60);
    sparse<float, float>("renormalised forward KL", support, renormalised{forward_kl{}}, 100);
    sparse<half, half>("renormalised JSD, half", support, renormalised{jsd{}}, 60);
}

TEST_CASE("samples and weighted entries") {
    const mc leave_one_out{.baseline = baseline::leave_one_out{}};
    sparse<float, float>("samples", samples, leave_one_out, 100);
    sparse<double, double>("samples, double", samples, leave_one_out, 100);
    sparse<bfloat16, bfloat16>("samples, bfloat16", samples, leave_one_out, 60);
    sparse<float, half>("weighted", weighted, mc{reverse_kl{}}, 100);
    sparse<double, double>("weighted, double", weighted, mc{reverse_kl{}}, 100);
}
