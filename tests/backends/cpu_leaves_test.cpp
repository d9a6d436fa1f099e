// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What happens beyond the first leaf of 1,024 entries, where rows are read in place: temperatures, beta, and a row made
// for each of the guards that send a leaf to be staged or a row to float64. Against the naive backend on the same
// numbers.
#include "support/compiled/dense.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/textbook.hpp"
#include "support/tolerances.hpp"

#include <cmath>
#include <doctest/doctest.h>
#include <functional>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// One row each side, its temperatures.
struct pair_of_rows {
    std::vector<float> z, y; // (V)
    float t_s = 1, t_t = 1;

    explicit pair_of_rows(index_t vocab, std::uint64_t seed = 1, double spread = 3)
        : z(static_cast<std::size_t>(vocab)), y(z) {
        numbers u(seed);
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = float(spread * u.normal()), y[v] = float(spread * u.normal());
    }
    index_t vocab() const { return index_t(z.size()); }
    teacher::dense<float> teacher() const { return {view(y.data(), 1, vocab()), t_t}; }
    double spread() const { return spread_of(z.data(), vocab(), t_s) + spread_of(y.data(), vocab(), t_t); }
};

struct answer {
    double loss = 0, lse = 0;
    std::vector<double> dz = {};
    opd::diagnostics diagnostics = {};
};

template <class G, class Backend, class D>
answer ask(Backend& backend, const pair_of_rows& r, const D& d) {
    std::vector<G> dz(r.z.size());
    std::vector<std::remove_cvref_t<decltype(*env{}.lse.data)>> lse(1);
    env e;
    e.lse = lse;
    const result got = evaluate(
        backend, student::logits<float, G>{view(r.z.data(), 1, r.vocab()), view(dz.data(), 1, r.vocab()), r.t_s},
        r.teacher(), d, e);
    return {got.loss, double(lse[0]), {dz.begin(), dz.end()}, got.diagnostics};
}
template <class D>
double value_of(const pair_of_rows& r, const D& d) {
    cpu_backend backend;
    return evaluate(backend, student::logits<float>{view(r.z.data(), 1, r.vocab()), {}, r.t_s}, r.teacher(), d).loss;
}

/// Value, with the gradient and alone, gradient and log-sum-exp within `bound` (of max(1, value), of the largest
/// entry).
template <class D>
answer agrees(const pair_of_rows& r, const D& d, double bound) {
    cpu_backend fast;
    naive_backend slow;
    const answer got = ask<float>(fast, r, d), want = ask<double>(slow, r, d);
    CAPTURE(want.loss);
    if (want.loss > 1e30) { // beyond float: dropped and counted
        CHECK(got.diagnostics.infinite_rows == 1);
        return got;
    }
    CHECK(std::abs(got.loss - want.loss) <= bound * std::max(1.0, std::abs(want.loss)));
    CHECK(std::abs(value_of(r, d) - want.loss) <= bound * std::max(1.0, std::abs(want.loss)));
    CHECK(std::abs(got.lse - want.lse) <= 3e-7 * std::max(1.0, std::abs(want.lse)));
    double top = 0, worst = 0;
    for (std::size_t v = 0; v < want.dz.size(); ++v) {
        top = std::max(top, std::abs(want.dz[v]));
        worst = std::max(worst, std::abs(got.dz[v] - want.dz[v]));
    }
    CHECK(worst <= bound * top + 1e-9);
    return got;
}

template <class Visit>
void divergences(Visit f) {
    f("reverse KL", reverse_kl{});
    f("forward KL", forward_kl{});
    f("JSD(.3,.3)", jsd{.w = .3, .o = .3});
    f("JSD(.1,.1)", jsd{.w = .1, .o = .1});
    f("JSD(.2,.9)", jsd{.w = .2, .o = .9});
    f("alpha(.5)", alpha_divergence{});
    f("alpha(1.5)", alpha_divergence{.a = 1.5});
}

} // namespace

TEST_CASE("temperatures, equal and not, in leaves that are read in place") {
    for (const index_t vocab : {2048, 3000, 5120})
        for (const float t : {0.5F, 0.7F, 2.F})
            for (const bool equal : {true, false}) {
                pair_of_rows r(vocab, 3, 3 * t);
                r.t_s = t, r.t_t = equal ? t : 1.3F * t;
                divergences([&](const std::string& name, auto d) {
                    INFO(name << ", V " << vocab << ", T " << r.t_s << " and " << r.t_t);
                    agrees(r, d, relative_bound<float>(r.spread()));
                });
            }
}

TEST_CASE("rows near each other, in leaves that are read in place, at a temperature and at another offset") {
    for (const float t : {0.5F, 1.F, 2.F})
        for (const float offset : {0.F, 60.F, -1000.F}) { // nothing is lost but what the stored numbers have lost
            pair_of_rows r(4096, 5, 3 * t);
            numbers u(6);
            for (std::size_t v = 0; v < r.z.size(); ++v) r.y[v] = float(r.z[v] + 1e-3 * t * u.normal() + offset);
            r.t_s = r.t_t = t;
            divergences([&](const std::string& name, auto d) {
                INFO(name << ", T " << t << ", teacher moved by " << offset);
                agrees(r, d, 1e-6 + 30 * 0x1p-23);
            });
        }
}

TEST_CASE("beta in full leaves: the old gradient stays under the new one") {
    cpu_backend backend;
    for (const index_t vocab : {1024, 2500})
        for (const float beta : {1.F, -0.5F}) {
            const pair_of_rows r(vocab, 7);
            std::vector<float> old(r.z.size()), plain(old), both;
            numbers u(8);
            for (float& g : old) g = float(u.normal());
            divergences([&](const std::string& name, auto d) {
                INFO(name << ", V " << vocab << ", beta " << beta);
                const auto call = [&](std::vector<float>& dz, float b) {
                    evaluate(backend, student::logits{view(r.z.data(), 1, vocab), view(dz.data(), 1, vocab)},
                             r.teacher(), d, {.beta = b});
                };
                call(plain, 0);
                both = old;
                call(both, beta);
                double worst = 0, top = 1;
                for (std::size_t v = 0; v < old.size(); ++v) {
                    const double want = double(beta) * double(old[v]) + double(plain[v]);
                    worst = std::max(worst, std::abs(double(both[v]) - want)), top = std::max(top, std::abs(want));
                }
                CHECK(worst <= 3e-7 * top);
            });
        }
}

TEST_CASE("the normaliser keeps its digits where the temperature's reciprocal has more than float holds") {
    cpu_backend fast;
    naive_backend slow;
    for (const float t : {0.7F, 1.1F, 1.3F, 1.7F, 1.9F}) { // one top token, and as much mass ten nats below it
        pair_of_rows r(40000, 9, 0.1);
        r.z[2000] = 10.5F * t, r.y[100] = 10.5F * t;
        r.t_s = r.t_t = t;
        CAPTURE(t);
        const answer got = ask<float>(fast, r, reverse_kl{}), want = ask<double>(slow, r, reverse_kl{});
        CHECK(std::abs(got.lse - want.lse) <= 1.2e-7 * want.lse);
        CHECK(std::abs(got.loss - want.loss) <= 1.2e-7 * std::max(1.0, want.loss));
        for (float& x : r.z) x += 0.3F; // the same row at another place
        CHECK(std::abs(value_of(r, reverse_kl{}) - got.loss) <= 3e-6);
    }
}

TEST_CASE("guard: e^(-k delta) beyond float at a token with mass") {
    for (const double gap : {70, 84, 89, 95, 103}) { // nats of log-ratio
        pair_of_rows r(3000, 11, 1);
        r.z[10] = 8, r.y[10] = 8; // both anchors in the first leaf
        r.z[2000] = -22, r.y[2000] = float(-22 - gap);
        INFO("student over teacher by " << gap << " nats");
        agrees(r, chi_squared{}, 2e-6 + gap * 0x1p-23);
        agrees(r, alpha_divergence{.a = 2}, 2e-6 + gap * 0x1p-23);
        std::swap(r.z, r.y);
        INFO("and the other way round");
        agrees(r, alpha_divergence{.a = -1}, 2e-6 + gap * 0x1p-23);
        agrees(r, forward_kl{}, 1e-6 + gap * 0x1p-23);
        agrees(r, reverse_kl{}, 1e-6 + gap * 0x1p-23);
    }
}

TEST_CASE("guard: how little the teacher gives the student's top token") {
    for (const double gap : {30, 39, 41, 60, 86, 100, 300}) {
        pair_of_rows r(3000, 12, 1);
        r.z[1500] = 9, r.y[1500] = float(9 - gap);
        r.y[2500] = 9, r.z[2500] = 6;
        INFO("gap " << gap);
        divergences([&](const std::string& name, auto d) {
            INFO(name);
            agrees(r, d, 1e-6 + gap * 0x1p-23);
        });
    }
}

TEST_CASE("guard: terms too small to be felt that an anchor makes large") {
    pair_of_rows r(100352, 21, 1); // e^(-k delta) - 1 rounds to -1 on 100,000 entries with nearly all of the mass
    for (std::size_t v = 0; v < r.z.size(); ++v) r.z[v] = -0.3F + 0.04F * r.z[v], r.y[v] -= 25;
    r.z[0] = 0, r.y[0] = 0;
    for (const float far : {-25.F, -30.F, -38.F}) {
        r.z.back() = 0.5F, r.y.back() = far;
        INFO("teacher of the last token " << far);
        agrees(r, alpha_divergence{.a = 0.5}, 5e-7);
    }
}

TEST_CASE("float64 rows keep a gradient whose slopes all but cancel") {
    // p is 1 but for 2e-14, so that dz[v] = p[v] (f[v] - Σ p f) / (a-1), f = (p/q)^(a-1), is what is left of f at the
    // top token
    pair_of_rows r(3000, 12, 1);
    r.z[1500] = 40, r.y[1500] = -20, r.y[2500] = 40;
    const double a = 1.5;
    const textbook::row x = textbook::make_row(r.z.data(), r.y.data(), r.vocab(), 1, 1);
    const auto f = [&](std::size_t v) { return std::exp((a - 1) * (x.log_p[v] - x.log_q[v])); };
    long double rest = 0; // Σ p (f* - f)
    for (std::size_t v = 0; v < r.z.size(); ++v) rest += std::exp(x.log_p[v]) * (f(1500) - f(v));
    cpu_backend fast;
    const answer got = ask<float>(fast, r, alpha_divergence{.a = a});
    CHECK(got.diagnostics.careful_rows == 1);
    const auto exact = [&](std::size_t v) { return double(std::exp(x.log_p[v]) * (f(v) - f(1500) + rest) / (a - 1)); };
    for (std::size_t v = 0; v < r.z.size(); ++v)
        if (std::abs(got.dz[v] - exact(v)) > 1e-6 * exact(1500))
            FAIL_CHECK(v << ": " << got.dz[v] << ", not " << exact(v));
}

TEST_CASE("guard: entries absurdly far below the top have no mass, in any leaf") {
    for (const float far : {-1e4F, -1e11F, -1e13F, -3e16F, -1e25F, -9e29F, -1e31F, -3e38F, detail::neg_inf<float>()}) {
        pair_of_rows r(4096, 13);
        pair_of_rows without = r;
        for (const std::size_t v : {3UL, 1030UL, 2047UL, 2500UL, 4095UL}) {
            r.z[v] = r.y[v] = far * 0.9F;
            without.z[v] = without.y[v] = -1e4F;
        }
        r.z[3000] = without.z[3000] = -200, r.y[3001] = without.y[3001] = -200;
        divergences([&](const std::string& name, auto d) {
            INFO(name << ", entries at " << far);
            // differences of such numbers are all rounding: the float64 of the same row with them at -1e4 is the truth
            cpu_backend fast;
            naive_backend slow;
            const answer got = ask<float>(fast, r, d), want = ask<double>(slow, without, d);
            CHECK(std::abs(got.lse - want.lse) <= 1e-6);
            if (want.loss > 1e30) return;
            CHECK(got.diagnostics.infinite_rows == 0);
            CHECK(std::abs(got.loss - want.loss) <= 3e-5 * std::max(1.0, std::abs(want.loss)));
            double top = 0, worst = 0;
            for (std::size_t v = 0; v < want.dz.size(); ++v)
                top = std::max(top, std::abs(want.dz[v])), worst = std::max(worst, std::abs(got.dz[v] - want.dz[v]));
            CHECK(worst <= 3e-5 * top);
        });
    }
}

TEST_CASE("a value that float cannot hold is dropped and counted, however it was met") {
    // p²/q of the second token is e^92, though no log-ratio lies beyond float
    for (const std::size_t last : {2UL, 2000UL}) {
        pair_of_rows r(index_t(last + 1), 15, 0.01);
        for (std::size_t v = 0; v <= last; ++v) r.z[v] -= 560, r.y[v] -= 110;
        r.z[0] = 105.26F, r.z[1] = -0.69F;
        r.y[0] = -1.07F, r.y[1] = -889.8F, r.y[last] = 245.4F;
        r.t_s = r.t_t = 10;
        const answer got = agrees(r, chi_squared{}, 1e-6);
        CHECK(got.diagnostics.infinite_rows == 1);
        CHECK(got.loss == 0);
        for (const double g : got.dz) CHECK(g == 0);
    }
}

TEST_CASE("tops that rise from leaf to leaf, at a leaf's first entry, by more than float's exponential holds") {
    for (const float rise : {0.5F, 20.F, 200.F})
        for (const bool same : {true, false}) {
            pair_of_rows r(4096, 16, 1);
            for (const std::size_t leaf : {1UL, 2UL, 3UL}) {
                r.z[leaf * 1024] = 4 + rise * float(leaf);
                r.y[leaf * 1024 + (same ? 0 : 512)] = 4 + rise * float(leaf);
            }
            divergences([&](const std::string& name, auto d) {
                INFO(name << ", by " << rise << (same ? ", the same" : ", each its own"));
                const answer got = agrees(r, d, 1e-6 + rise * 0x1p-20);
                if (same) CHECK(got.diagnostics.careful_rows == 0); // both anchors rise with their tops
            });
        }
}

TEST_CASE("what the sweep keeps of a leaf serves where its anchors were the last ones, and nowhere else") {
    for (const std::size_t top_s : {0UL, 1023UL, 1500UL, 4500UL})
        for (const std::size_t top_t : {0UL, 2048UL, 4500UL})
            for (const float t : {1.F, 0.7F}) {
                pair_of_rows r(4700, 31, 1);
                r.z[top_s] = 6, r.y[top_s] = 5.5F;
                r.y[top_t] = 6, r.z[top_t] = top_s == top_t ? 6.F : 5.F;
                r.t_s = t, r.t_t = t * t;
                INFO("tops at " << top_s << " and " << top_t << ", T " << r.t_s << " and " << r.t_t);
                divergences([&](const std::string& name, auto d) {
                    INFO(name);
                    agrees(r, d, 1e-6 + 20 * 0x1p-23);
                });
                INFO("chi-squared");
                agrees(r, chi_squared{}, 2e-6 + 40 * 0x1p-23);
                INFO("skew");
                agrees(r, skew_reverse_kl{.a = 0.2}, 1e-6 + 20 * 0x1p-23);
            }
}

TEST_CASE("guard: a leaf's top on which the sides disagree by hundreds of nats, among entries on which they agree") {
    for (const float far : {-60.F, -190.F, -210.F, -600.F, -3000.F}) {
        pair_of_rows r(3072, 18, 1e-3); // nearly all mass lies in the first leaf, whose anchor is the odd one out
        r.z[0] = 0.01F, r.y[0] = far;
        for (std::size_t v = 1024; v < r.z.size(); ++v) r.z[v] = r.y[v] = -30;
        r.z[1500] = r.y[1500] = 1;
        INFO("by " << far);
        const double bound = 1e-6 + (far > -200 ? -double(far) * 0x1p-23 : 0); // beyond: float64, or entry by entry
        agrees(r, reverse_kl{}, bound);
        agrees(r, forward_kl{}, bound);
    }
}

namespace {
/// Forward KL as a newcomer writes it, from the logarithms.
struct plain_forward_kl {
    template <class F>
    F term(const row_constants<F>&, const dense_entry<F>& e) const {
        return e.q * (e.log_q - e.log_p);
    }
    template <class F>
    F c(const row_constants<F>&, const dense_entry<F>& e) const {
        return -e.q;
    }
};
} // namespace

TEST_CASE("a divergence may read log p and log q") {
    for (const float t : {1.F, 0.7F}) {
        pair_of_rows r(3000, 17);
        r.t_s = t, r.t_t = 1.5F * t;
        agrees(r, plain_forward_kl{}, relative_bound<float>(r.spread()));
        CHECK(value_of(r, plain_forward_kl{}) == doctest::Approx(value_of(r, forward_kl{})).epsilon(1e-5));
    }
}
