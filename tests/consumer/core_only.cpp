// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A translation unit of a user without Eigen, with the caller's default flags: the vocabulary of the library, and the
// version.
#include <opd/opd.hpp>
#include <vector>

static_assert(__cplusplus >= 202002L, "opd::opd asks for C++20");

int main() {
    std::vector<float> z(6, 0.0f);
    const auto view = opd::view(z.data(), 2, 3); // (N,V)
    return OPD_VERSION > 0 && view.rows == 2 && view.cols == 3 ? 0 : 1;
}
