// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Compiled three times, for three instruction sets, under three names: a program that has its fast files compiled for a
// newer machine. OPD_PROBE is the function's name. Returns a few numbers that use the lanes.
#include <cstddef>
#include <opd/product.hpp>
#include <vector>

#ifdef OPD_PLANTED // what check.cmake must find
namespace opd {
[[gnu::noinline]] inline float planted(float x) { return x + 1; }
} // namespace opd
float planted_caller(float x);
float planted_caller(float x) { return opd::planted(x); }
#endif

std::vector<float> OPD_PROBE();

std::vector<float> OPD_PROBE() {
    constexpr opd::index_t rows = 5, columns = 37, depth = 19;
    std::vector<float> a(rows * depth), b(depth * columns), c(rows * columns); // (M,K), (K,N), (M,N)
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = 0.01f * static_cast<float>(i % 101) - 0.5f;
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = 0.02f * static_cast<float>(i % 53) - 0.4f;
    opd::product(opd::serial_executor{},
                 opd::product_nn<float>(rows, columns, depth, a.data(), depth, b.data(), columns, c.data(), columns));
    return c;
}
