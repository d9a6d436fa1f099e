// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a fuzzer's bytes mean: a list of choices, read from the front; past the end every choice is the first one, so
// that short inputs are simple cases. A property that fails says so and aborts, which the fuzzer takes for a crash.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

namespace opd::fuzz {

class choices {
public:
    choices(const std::uint8_t* data, std::size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

    std::uint64_t bytes(std::size_t n) {
        std::uint64_t x = 0;
        for (std::size_t i = 0; i < n && !rest_.empty(); ++i, rest_.remove_prefix(1))
            x |= std::uint64_t{static_cast<std::uint8_t>(rest_.front())} << 8 * i;
        return x;
    }
    /// In [0, n).
    std::int64_t below(std::int64_t n) {
        return static_cast<std::int64_t>(bytes(n <= 256 ? 1 : 2) % static_cast<std::uint64_t>(n));
    }
    /// Once in n times, and never at the end.
    bool once_in(std::int64_t n) { return below(n) == n - 1; }
    template <class T>
    T of(std::initializer_list<T> values) {
        return values.begin()[below(static_cast<std::int64_t>(values.size()))];
    }
    bool done() const { return rest_.empty(); }
    std::string_view rest() const { return rest_; }

private:
    std::string_view rest_;
};

/// Numbers that follow from a seed, the same everywhere (splitmix64).
class numbers {
public:
    explicit numbers(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
        x = (x ^ x >> 27) * 0x94D049BB133111EBu;
        return x ^ x >> 31;
    }
    double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
    std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n)); }

private:
    std::uint64_t state_;
};

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "property violated: %s\n", what.c_str());
    std::abort();
}
inline void need(bool ok, const char* what) {
    if (!ok) fail(what);
}

} // namespace opd::fuzz
