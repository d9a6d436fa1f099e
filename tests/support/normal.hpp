// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Normal and uniform numbers, those of libstdc++'s std::normal_distribution and std::generate_canonical bit for bit.
// For each uniform number that library asks for two logarithms in long double, which clang leaves to the run, and which
// took half of some tests' time.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>

namespace opd::test {

/// In [0, 1), of an engine whose numbers are whole words.
template <class T, class Engine>
T uniform_number(Engine& bits) {
    constexpr int word = Engine::word_size, digits = std::numeric_limits<T>::digits;
    static_assert(Engine::min() == 0 && (word == 32 || word == 64) &&
                  Engine::max() == ~std::uint64_t{0} >> (64 - word));
    const T range = std::ldexp(T(1), word);
    T sum = 0, unit = 1;
    for (int have = 0; have < digits; have += word) sum += T(bits()) * unit, unit *= range;
    return sum < unit ? sum / unit : std::nextafter(T(1), T(0));
}

/// Of mean 0; by pairs, as Marsaglia's polar method makes them.
template <class T>
class normal_numbers {
public:
    explicit normal_numbers(T deviation = 1) : deviation_(deviation) {}
    template <class Engine>
    T operator()(Engine& bits) {
        if (kept_) return kept_ = false, other_ * deviation_;
        T x, y, square;
        do {
            x = 2 * uniform_number<T>(bits) - 1;
            y = 2 * uniform_number<T>(bits) - 1;
            square = x * x + y * y;
        } while (square > 1 || square == 0);
        const T factor = std::sqrt(-2 * std::log(square) / square);
        other_ = x * factor, kept_ = true;
        return y * factor * deviation_;
    }

private:
    T deviation_, other_ = 0;
    bool kept_ = false;
};

} // namespace opd::test
