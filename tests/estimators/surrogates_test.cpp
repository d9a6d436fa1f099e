// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Surrogates one token at a time: c is the derivative of the loss in log p with what is stopped held fixed, kinks kept
// away from by construction; the tables of what each clip cuts; a ratio exactly on a bound; flags; what validate()
// refuses.
#include "support/generators.hpp"
#include "support/property.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>

#include <opd/estimators/sampled.hpp>

using namespace opd;
using namespace opd::test;

namespace {

token_in random_token(numbers& u) {
    token_in x{};
    x.log_p = -3 * u.uniform(), x.log_mu = -3 * u.uniform();
    x.log_prox = x.log_mu + 0.5 * u.normal(), x.log_ref = -1, x.log_q = -3 * u.uniform();
    x.log_ratio = x.log_p - x.log_mu;
    x.advantage = u.normal(), x.age = double(u.below(5));
    x.sequence_log_ratio = 0.01 * u.normal();
    x.mu_entropy = 2 * u.uniform();
    return x;
}

/// The loss as a function of h added to log p, everything that a formula stops held at its value in x.
struct at_step {
    token_in x;
    double h;
    double log_p() const { return x.log_p + h; }
    double rho() const { return std::exp(x.log_ratio + h); }
    double stopped_rho() const { return std::exp(x.log_ratio); }
};

double clip(double r, double low, double high) { return std::min(std::max(r, 1 - low), 1 + high); }
double ppo(double r, double a, double low, double high, double dual = 0) {
    const double plain = std::min(r * a, clip(r, low, high) * a);
    return -(a < 0 && dual > 0 ? std::max(plain, dual * a) : plain);
}

/// `loss(at_step)`: the formula as the header writes it. `near_kink(x)`: such a token is passed over.
template <class S, class Loss, class Kink>
void check_surrogate(const std::string& name, const S& s, Loss loss, Kink near_kink) {
    property(name, [&] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const token_in x = random_token(u);
        RC_PRE(!near_kink(x));
        const token_out got = s(x);
        RC_ASSERT(std::abs(got.loss - loss({x, 0})) < 1e-12 * (1 + std::abs(got.loss)));
        const double h = 1e-5, slope = (loss({x, h}) - loss({x, -h})) / (2 * h);
        RC_ASSERT(std::abs(got.c - slope) < 1e-8 * (1 + std::abs(slope)));
    });
}
bool beside(double r, std::initializer_list<double> bounds) {
    for (const double b : bounds)
        if (std::abs(r - b) < 1e-3) return true;
    return false;
}
const auto nowhere = [](const token_in&) { return false; };

} // namespace

TEST_CASE("a surrogate's c is its loss's derivative in log p, stopped parts held fixed") {
    check_surrogate(
        "unclipped_is", unclipped_is{}, [](at_step t) { return -t.rho() * t.x.advantage; }, nowhere);
    check_surrogate(
        "score_function", score_function{}, [](at_step t) { return -t.x.advantage * t.log_p(); }, nowhere);
    check_surrogate(
        "truncated_is", truncated_is{1.3},
        [](at_step t) { return -std::min(t.stopped_rho(), 1.3) * t.x.advantage * t.log_p(); }, nowhere);
    check_surrogate(
        "cispo", cispo{.1, .3}, [](at_step t) { return -clip(t.stopped_rho(), .1, .3) * t.x.advantage * t.log_p(); },
        nowhere);
    check_surrogate(
        "ppo_clip", ppo_clip{.1, .3}, [](at_step t) { return ppo(t.rho(), t.x.advantage, .1, .3); },
        [](const token_in& x) {
            return beside(std::exp(x.log_ratio), {.9, 1.3});
        });
    check_surrogate(
        "ppo_clip, dual", ppo_clip{.1, .3, 2}, [](at_step t) { return ppo(t.rho(), t.x.advantage, .1, .3, 2); },
        [](const token_in& x) {
            return beside(std::exp(x.log_ratio), {.9, 1.3, 2});
        });
    for (const over_cap over : {over_cap::truncate, over_cap::mask})
        check_surrogate(
            "decoupled_ppo", decoupled_ppo{.1, .3, 1.2, over},
            [over](at_step t) {
                double w = std::exp(t.x.log_prox - t.x.log_mu);
                if (w > 1.2) w = over == over_cap::mask ? 0 : 1.2;
                return w * ppo(std::exp(t.log_p() - t.x.log_prox), t.x.advantage, .1, .3);
            },
            [](const token_in& x) {
                return beside(std::exp(x.log_p - x.log_prox), {.9, 1.3});
            });
    const auto prox_of = [](const token_in& x) { // from the p of now, stopped
        const double s = std::max(x.age, 1.0);
        return x.log_mu / s + (1 - 1 / s) * x.log_p;
    };
    check_surrogate(
        "a3po", a3po{.1, .3, 1.5},
        [&](at_step t) {
            const double prox = prox_of(t.x), w = std::min(std::exp(prox - t.x.log_mu), 1.5);
            return w * ppo(std::exp(t.log_p() - prox), t.x.advantage, .1, .3);
        },
        [&](const token_in& x) {
            return beside(std::exp(x.log_p - prox_of(x)), {.9, 1.3});
        });
    // d log s / d log p_t = 1/length, which is the reduction's: c is per log s
    check_surrogate(
        "gspo", gspo{.01, .02},
        [](at_step t) { return ppo(std::exp(t.x.sequence_log_ratio + t.h), t.x.advantage, .01, .02); },
        [](const token_in& x) {
            return beside(std::exp(x.sequence_log_ratio), {.99, 1.02});
        });
    check_surrogate(
        "estr", estr{.3, .5, ppo_clip{.1, .3}},
        [](at_step t) {
            const double d = t.x.log_p - t.x.log_mu;
            return d * d / (t.x.mu_entropy + .5) > .3 ? 0 : ppo(t.rho(), t.x.advantage, .1, .3);
        },
        [](const token_in& x) {
            return beside(std::exp(x.log_ratio), {.9, 1.3});
        });
    const auto log_r = [](at_step t) { return t.x.log_q - t.log_p(); };
    check_surrogate(
        "k1", differentiated<k1>{}, [&](at_step t) { return -log_r(t); }, nowhere);
    check_surrogate(
        "k2", differentiated<k2>{}, [&](at_step t) { return 0.5 * log_r(t) * log_r(t); }, nowhere);
    check_surrogate(
        "k3", differentiated<k3>{}, [&](at_step t) { return std::exp(log_r(t)) - 1 - log_r(t); }, nowhere);
    check_surrogate(
        "k2, ratio", differentiated<k2, true>{}, [&](at_step t) { return t.stopped_rho() * 0.5 * log_r(t) * log_r(t); },
        nowhere);
}

TEST_CASE("what a clip cuts: strictly beyond a bound, on the side that the advantage would go on to") {
    const ppo_clip clip{.low = 0.25, .high = 0.5, .dual = 3};
    const auto at = [&](double rho, double a) {
        token_in x{};
        x.log_ratio = std::log(rho), x.advantage = a;
        return clip(x);
    };
    struct line {
        double rho, a, loss, c;
    };
    for (const line& l : {line{1.4, 2, -2.8, -2.8},
                          {1.6, 2, -3, 0},
                          {0.5, 2, -1, -1},
                          {0.5, -2, 1.5, 0},
                          {0.8, -2, 1.6, 1.6},
                          {2, -2, 4, 4},
                          {4, -2, 6, 0},
                          {4, 0, 0, 0}}) {
        CAPTURE(l.rho);
        CAPTURE(l.a);
        CHECK(at(l.rho, l.a).loss == doctest::Approx(l.loss));
        CHECK(at(l.rho, l.a).c == doctest::Approx(l.c));
        CHECK((at(l.rho, l.a).flags == token_flag::clipped) == (l.c == 0 && l.a != 0));
    }
    // exactly on a bound, in numbers that e^log hits: gradients flow
    const auto exactly = [](double r, double a) { return detail::clipped_surrogate(r, a, 0.25, 0.5, 3); };
    CHECK(exactly(1.5, 2).c == -3);
    CHECK(exactly(0.75, -2).c == 1.5);
    CHECK(exactly(3, -2).c == 6);
    CHECK(exactly(std::nextafter(1.5, 2), 2).c == 0);
    CHECK(exactly(std::nextafter(0.75, 0), -2).c == 0);
    CHECK(exactly(std::nextafter(3.0, 4), -2).c == 0);
    token_in x{};
    x.log_ratio = 0, x.advantage = 1, x.log_p = -1;
    CHECK(truncated_is{1}(x).flags == 0);
    CHECK(truncated_is{.5}(x).flags == token_flag::truncated);
    CHECK(cispo{.low = 0, .high = 0}(x).flags == 0);
    CHECK(cispo{.low = 1, .high = 0}(x).c == -1);
    // a sequence's ratio cuts all of its tokens, by the sign of each one's advantage
    x.sequence_log_ratio = 0.1;
    CHECK(gspo{}(x).flags == token_flag::clipped);
    x.advantage = -1;
    CHECK(gspo{}(x).c == doctest::Approx(std::exp(0.1)));
}

TEST_CASE("ratios of other policies saturate and say so; masks add nothing") {
    token_in x{};
    x.log_p = -1, x.log_mu = -1, x.log_prox = -500, x.advantage = 1;
    const token_out far = decoupled_ppo{}(x);
    CHECK(far.flags == (token_flag::saturated | token_flag::clipped));
    CHECK(std::isfinite(far.loss));
    const token_out out = decoupled_ppo{.cap = 0.5, .over = over_cap::mask}({.log_p = -1,
                                                                             .log_mu = -2,
                                                                             .log_prox = -1,
                                                                             .log_ref = 0,
                                                                             .log_q = 0,
                                                                             .log_ratio = 1,
                                                                             .advantage = 1,
                                                                             .age = 0});
    CHECK(out.loss == 0);
    CHECK(out.c == 0);
    CHECK(out.flags == token_flag::masked);
    x.sequence_log_ratio = 300;
    CHECK((gspo{}(x).flags & token_flag::saturated) != 0);
    x.mu_entropy = 0.5, x.log_p = 0;
    CHECK(estr{1, .5}(x).flags == 0); // on the bound: kept
    CHECK(estr{.99, .5}(x).flags == token_flag::masked);
    // an age of 0 or 1 is plain PPO against mu, any other lies between
    x.log_p = -0.9, x.log_mu = -1, x.log_ratio = 0.1, x.advantage = 1;
    for (const double age : {0.0, 1.0}) {
        x.age = age;
        CHECK(a3po{}(x).loss == doctest::Approx(ppo_clip{}(x).loss));
    }
    x.age = 4;
    CHECK(a3po{}(x).c == doctest::Approx(-std::exp(0.1)));
    x.log_p = 0, x.log_ratio = 1; // e > 1.2, but e^¼ is not far beyond: clipped later than PPO
    CHECK(ppo_clip{}(x).c == 0);
    CHECK(a3po{.high = 0.3}(x).c != 0);
}

TEST_CASE("what surrogates, shapes and advantages refuse") {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    const auto refuses = [](const char* name, const auto& policy) {
        CHECK_THROWS_WITH_AS(policy.validate(), doctest::Contains(name), invalid_input);
        CHECK_THROWS_WITH_AS(mc{.surrogate = policy}.validate(), doctest::Contains(name), invalid_input);
    };
    for (const double x : {nan, inf, -inf, -0.1}) {
        refuses("ppo_clip", ppo_clip{.low = x}), refuses("ppo_clip", ppo_clip{.high = x});
        refuses("ppo_clip.dual", ppo_clip{.dual = x});
        refuses("cispo", cispo{.low = x}), refuses("cispo", cispo{.high = x});
        refuses("decoupled_ppo", decoupled_ppo{.low = x}), refuses("decoupled_ppo.cap", decoupled_ppo{.cap = x});
        refuses("decoupled_ppo", a3po{.high = x}), refuses("gspo", gspo{.low = x});
        refuses("truncated_is.cap", truncated_is{x});
        refuses("estr.tau", estr{x, 1}), refuses("estr.epsilon", estr{1, x});
    }
    refuses("ppo_clip", ppo_clip{.low = 1.5}), refuses("ppo_clip.dual", ppo_clip{.dual = 1.2});
    refuses("truncated_is.cap", truncated_is{0}), refuses("estr.tau", estr<>{}),
        refuses("ppo_clip", estr{1, 1, ppo_clip{.low = -1}});
    const auto refuses_of = [](const char* name, const auto& of) {
        CHECK_THROWS_WITH_AS(mc{of}.validate(), doctest::Contains(name), invalid_input);
    };
    for (const double x : {nan, inf, -inf, -0.1, 0.0}) {
        refuses_of("shape::clipped.a", shape::clipped{x}), refuses_of("shape::mixed.alpha", shape::mixed{x});
        refuses_of("shape::scaled.by", shape::scaled{x}), refuses_of("shape::band.a", shape::band{x});
    }
    refuses_of("shape::mixed.alpha", shape::mixed{1}), refuses_of("shape::clipped.a", shape::clipped{1000});
    for (const double x : {nan, inf, 11.0, 1e-9, 1 + 1e-9}) refuses_of("shape::box_cox.alpha", shape::box_cox{x});
    for (const double x : {nan, inf, -1.0}) refuses_of("extrapolated.lambda", advantage::extrapolated{x});
    for (const double x : {nan, inf}) {
        refuses_of("advantage::mixed", advantage::mixed{.outside = x});
        refuses_of("advantage::mixed", advantage::mixed{.teacher = x});
        refuses_of("jsd.w", jsd{.w = x}), refuses_of("shape::clipped.a", advantage::shaped{shape::clipped{x}});
    }
    mc{.surrogate = estr{.05, .1, ppo_clip{}}}.validate();
    mc{shape::box_cox{0}, ppo_clip{.dual = 3}}.validate();
}

TEST_CASE("the columns that policies read are the estimator's") {
    CHECK(mc{reverse_kl{}}.reads_columns() == 0);
    CHECK(mc{reverse_kl{}, decoupled_ppo{}}.reads_columns() == column::log_prox);
    CHECK(mc{reverse_kl{}, gspo{}}.reads_columns() == column::sequence_log_ratio);
    CHECK(mc{advantage::extrapolated{2}, ppo_clip{}, baseline::given{}}.reads_columns() ==
          (column::log_ref | column::baseline));
    CHECK(mc{advantage::mixed{}, estr{1, 1, decoupled_ppo{}}}.reads_columns() ==
          (column::advantage | column::mu_entropy | column::log_prox));
}
