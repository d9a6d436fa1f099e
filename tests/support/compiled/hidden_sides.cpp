// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/compiled/hidden_sides.hpp"

#include <random>

#include "support/normal.hpp"

OPD_TEST_PRODUCTS()

opd::test::floats opd::test::normals(std::size_t n, unsigned seed, float deviation) {
    std::mt19937 random(seed);
    normal_numbers<float> normal(deviation);
    floats r(n);
    for (float& x : r) x = normal(random);
    return r;
}
