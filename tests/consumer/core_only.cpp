// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A user of the CPU backend, with the standard library alone and the caller's default flags: reverse KL of (1/2, 1/2)
// against (3/4, 1/4) is 0.143841…, its gradient -+ log(3) / 4.
#include <cmath>
#include <cstdio>
#include <opd/opd.hpp>

int main() {
    const float z[] = {0, 0};              // (1,2)
    const float y[] = {std::log(3.0f), 0}; // (1,2)
    float dz[] = {0, 0};                   // (1,2)
    opd::cpu_backend be{};
    const auto r = opd::evaluate(be, opd::student::logits{opd::view(z, 1, 2), opd::view(dz, 1, 2)},
                                 opd::teacher::dense{opd::view(y, 1, 2)}, opd::reverse_kl{});
    std::printf("loss %.6f gradient %.6f %.6f\n", static_cast<double>(r.loss), static_cast<double>(dz[0]),
                static_cast<double>(dz[1]));
    const float slope = std::log(3.0f) / 4;
    const bool right =
        std::abs(r.loss - 0.143841) < 1e-5 && std::abs(dz[0] + slope) < 1e-5f && std::abs(dz[1] - slope) < 1e-5f;
    return right ? 0 : 1;
}

static_assert(__cplusplus >= 202002L, "opd::opd asks for C++20");
static_assert(OPD_VERSION > 0);
