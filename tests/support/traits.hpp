// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The dense divergences as suites walk over them. What each claims to be is in its own traits (opd/traits.hpp): a suite
// derives from them what must hold, and where an estimator is declared biased or not zero at equality it asserts that
// the property fails, so that a declaration cannot be too modest either.
#pragma once

#include <string>
#include <type_traits>

#include <opd/estimators/divergences.hpp>
#include <opd/traits.hpp>

namespace opd::test {

/// How much a divergence's formula enlarges the rounding of a log-ratio: powers of the ratio do.
template <class E>
constexpr double conditioning_of(const E&) {
    return std::is_same_v<E, alpha_divergence> || std::is_same_v<E, chi_squared> ? 4 : 1;
}

/// f(name, divergence) for every dense divergence, some at several parameters.
template <class Visit>
void for_each_divergence(Visit f) {
    f("reverse_kl", reverse_kl{});
    f("forward_kl", forward_kl{});
    f("jsd(.5,.5)", jsd{});
    f("jsd(.3,.3)", jsd{.w = .3, .o = .3});
    f("jsd(.2,.9)", jsd{.w = .2, .o = .9});
    f("skew_forward_kl(.1)", skew_forward_kl{});
    f("skew_reverse_kl(.3)", skew_reverse_kl{.a = .3});
    f("total_variation", total_variation{});
    f("alpha(.5)", alpha_divergence{});
    f("alpha(0)", alpha_divergence{.a = 0});
    f("alpha(1)", alpha_divergence{.a = 1});
    f("alpha(-.5)", alpha_divergence{.a = -.5});
    f("chi_squared", chi_squared{});
}

/// One of each type: for suites whose cost is compile time or a large vocabulary.
template <class Visit>
void for_each_divergence_type(Visit f) {
    f("reverse_kl", reverse_kl{});
    f("forward_kl", forward_kl{});
    f("jsd(.5,.5)", jsd{});
    f("skew_forward_kl(.1)", skew_forward_kl{});
    f("skew_reverse_kl(.1)", skew_reverse_kl{});
    f("total_variation", total_variation{});
    f("alpha(.5)", alpha_divergence{});
    f("chi_squared", chi_squared{});
}

} // namespace opd::test
