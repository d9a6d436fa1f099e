// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast, sanitize
//
// The ground under the row kernels: 16-bit storage over all its values, floats classified by bits under fast-math, and
// the lanes' elementary functions against double within the accuracy that lanes.hpp states.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <type_traits>

#include <opd/element.hpp>
#include <opd/lanes.hpp>

using namespace opd;

namespace {

/// The nearest T below or above by a search over its neighbours: what `store` must return for finite, not overflowing
/// x.
template <class T>
void nearest(float x) {
    const T got = element<T>::store(x);
    const double here = double(element<T>::load(got)), error = std::abs(here - double(x));
    for (const int step : {-1, 1}) {
        const T next = T::from_bits(static_cast<std::uint16_t>(got.bits + step));
        if ((next.bits & 0x7fff) > (std::is_same_v<T, half> ? 0x7bff : 0x7f7f)) continue;
        if ((next.bits ^ got.bits) & 0x8000) continue;
        const double other = std::abs(double(element<T>::load(next)) - double(x));
        if (other < error || (other == error && (got.bits & 1)))
            FAIL("store(" << x << ") is not the nearest, ties to even");
    }
}

template <class T>
void every_value() {
    for (std::uint32_t b = 0; b < 0x10000; ++b) {
        const T x = T::from_bits(static_cast<std::uint16_t>(b));
        const float f = element<T>::load(x);
        if (detail::is_nan(f))
            CHECK(detail::is_nan(element<T>::load(element<T>::store(f))));
        else if (element<T>::store(f).bits != b)
            FAIL("value " << b << " does not survive");
    }
    std::uint32_t state = 1;
    for (int i = 0; i < 200000; ++i) {
        state = state * 1664525u + 1013904223u;
        const float scale = std::bit_cast<float>(0x30000000u + (state >> 5 & 0x1f000000u)); // 2^-31 .. 2^31
        const float x = (float(std::int32_t(state)) * 0x1p-31f) * scale;
        if (std::abs(x) < (std::is_same_v<T, half> ? 65504.F : 3e38F) && std::abs(x) > 1e-30F) nearest<T>(x);
    }
}

/// Largest relative error of f over [low, high], in units of 2^-24.
template <class F, class G>
double worst(F f, G exact, double low, double high) {
    double e = 0;
    float x[lanes::width], y[lanes::width];
    for (int i = 0; i < 200000; i += lanes::width) {
        for (int j = 0; j < lanes::width; ++j) x[j] = float(low + (high - low) * (i + j + 0.37) / 200000);
        f(lanes::load(x)).store(y);
        for (int j = 0; j < lanes::width; ++j) {
            const double want = exact(double(x[j]));
            if (std::abs(want) > 1e-37) e = std::max(e, std::abs(double(y[j]) - want) / std::abs(want) * 0x1p24);
        }
    }
    return e;
}

} // namespace

TEST_CASE("half and bfloat16 keep every value and round to nearest even") {
    every_value<half>();
    every_value<bfloat16>();
    CHECK(element<half>::load(element<half>::store(1e6F)) == element<half>::load(half::from_bits(0x7c00)));
    CHECK(element<half>::store(65519.F).bits == 0x7bff);
    CHECK(element<half>::store(65520.F).bits == 0x7c00);
    CHECK(element<bfloat16>::store(detail::neg_inf<float>()).bits == 0xff80);
}

TEST_CASE("half and bfloat16 are made from numbers and turn into numbers, and only by name from bits") {
    const auto check = [](auto zero) {
        using T = decltype(zero);
        static_assert(float(T(1.5f)) == 1.5f && float(T(1)) == 1 && float(T(-0.25)) == -0.25f && float(T{2.f}) == 2);
        static_assert(T(1).bits != 1 && T::from_bits(1).bits == 1 && T(1.5f) == T::from_bits(T(1.5f).bits));
        static_assert(!std::is_constructible_v<T, std::uint16_t>, "sixteen bits are a number or a pattern: from_bits");
        static_assert(!std::is_convertible_v<float, T> && !std::is_convertible_v<T, float>);
        static_assert(std::is_trivial_v<T> && std::is_standard_layout_v<T> && sizeof(T) == 2 && alignof(T) == 2);
        for (std::uint32_t b = 0; b < 0x10000; ++b) {
            const T x = T::from_bits(static_cast<std::uint16_t>(b));
            const float f(x);
            if (detail::is_nan(f) ? !detail::is_nan(float(T(f))) : T(f).bits != b) FAIL("bits " << b);
        }
        for (const float f : {0.1f, 3.14159f, -1e-3f, 1.00390625f, 1.01171875f, 2049.f})
            CHECK(T(f) == element<T>::store(f));
    };
    check(half{});
    check(bfloat16{});
    CHECK(float(bfloat16(1.00390625f)) == 1.f); // ties go to even, either way
    CHECK(float(bfloat16(1.01171875f)) == 1.015625f);
    CHECK(float(half(2049.f)) == 2048.f);
    CHECK(float(half(2051.f)) == 2052.f);
}

TEST_CASE("floats are classified by their bits, also under -Ofast") {
    const float nan = std::bit_cast<float>(0x7fc00001u), inf = std::bit_cast<float>(0x7f800000u);
    CHECK(detail::is_nan(nan));
    CHECK(detail::is_nan(std::bit_cast<double>(0x7ff0000000000001ull)));
    CHECK_FALSE(detail::is_nan(inf));
    CHECK(detail::is_inf(inf));
    CHECK_FALSE(detail::is_neg_inf(inf));
    CHECK(detail::is_neg_inf(detail::neg_inf<float>()));
    CHECK(detail::is_neg_inf(detail::neg_inf<double>()));
    CHECK_FALSE(detail::is_finite(nan));
    CHECK_FALSE(detail::is_finite(detail::neg_inf<double>()));
    CHECK(detail::is_finite(3e38F));
    CHECK(detail::is_finite(1e-40F));
}

TEST_CASE("elementary functions of the lanes") {
    CHECK(worst([](lanes x) { return exp2(x); }, [](double x) { return std::exp2(x); }, -125, 126) <= 2);
    CHECK(worst([](lanes x) { return exp(x); }, [](double x) { return std::exp(x); }, -86, 87) <= 2);
    CHECK(worst([](lanes x) { return expm1(x); }, [](double x) { return std::expm1(x); }, -86, 86) <= 3);
    CHECK(worst([](lanes x) { return expm1(x); }, [](double x) { return std::expm1(x); }, -1e-3, 1e-3) <= 3);
    CHECK(worst([](lanes x) { return log1p(x); }, [](double x) { return std::log1p(x); }, -0.999, 10) <=
          2.6); // 2 without fast-math
    CHECK(worst([](lanes x) { return log1p(x); }, [](double x) { return std::log1p(x); }, -1e-4, 1e-4) <= 2.2);
    CHECK(worst([](lanes x) { return log(x); }, [](double x) { return std::log(x); }, 1e-3, 100) <= 2.2);
    alignas(64) float y[lanes::width];
    exp2(lanes(double(-1e30F))).store(y);
    CHECK(y[0] == 0);
    float x[lanes::width];
    std::fill(x, x + lanes::width, detail::neg_inf<float>());
    exp2(lanes::load(x)).store(y);
    CHECK(y[lanes::width - 1] == 0);
    std::fill(x, x + lanes::width, std::bit_cast<float>(0x7fc00000u));
    exp2(lanes::load(x)).store(y);
    CHECK(detail::is_nan(y[0]));
}

TEST_CASE("sums and maxima over lanes") {
    float x[lanes::width];
    for (int i = 0; i < lanes::width; ++i) x[i] = float(i * i) - 7;
    double want = 0;
    for (const float v : x) want += double(v);
    CHECK(double(sum(lanes::load(x))) == want);
    CHECK(max_lane(lanes::load(x)) == x[lanes::width - 1]);
}
