// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What random worlds have in common, whatever lives in them: numbers that follow from a seed, what a world throws where
// something is wrong, and how many of them a run has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "opd/sched/distributions.hpp"
#include "support/sanitized.hpp"

namespace opd::test {

/// A promise that was broken.
struct violation : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Random numbers of one world.
struct dice {
    std::uint64_t seed = 0;
    std::uint64_t next = 0;
    double operator()() { return sched::keyed_uniform(seed, sched::draw_of::own, next++); }
    bool operator()(double probability) { return (*this)() < probability; }
    index_t of(index_t low, index_t high) { // both included
        return std::min(high, low + static_cast<index_t>((*this)() * static_cast<double>(high - low + 1)));
    }
    double in(double low, double high) { return low * std::pow(high / low, (*this)()); }
    template <class T>
    T one(std::initializer_list<T> list) {
        return list.begin()[of(0, static_cast<index_t>(list.size()) - 1)];
    }
};

/// The message of what went wrong; empty: nothing.
template <class F>
std::string outcome(F&& f) {
    try {
        f();
        return {};
    } catch (const std::exception& e) {
        return e.what();
    }
}

/// What a sanitized build takes a share of, since there each world costs seven times as much: the plain build runs all.
inline constexpr std::uint64_t worlds_share = OPD_TEST_SANITIZED ? 4 : 1;

/// A number in the environment.
inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

} // namespace opd::test
