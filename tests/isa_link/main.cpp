// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One program with code for three instruction sets. Each variant that this machine can run must agree with the base.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>

std::vector<float> probe_base();
std::vector<float> probe_v3();
std::vector<float> probe_v4();

namespace {

bool agree(const char* name, const std::vector<float>& x, const std::vector<float>& reference) {
    bool same = x.size() == reference.size() && !x.empty();
    for (std::size_t i = 0; same && i < x.size(); ++i)
        same = std::abs(x[i] - reference[i]) <= 1e-5f * (1 + std::abs(reference[i]));
    std::printf("%s: %s\n", name, same ? "agrees with x86-64" : "DIFFERS from x86-64");
    return same;
}

} // namespace

int main() {
    const std::vector<float> reference = probe_base();
    bool ok = agree("x86-64", probe_base(), reference);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        ok = agree("x86-64-v3", probe_v3(), reference) && ok;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        ok = agree("x86-64-v4", probe_v4(), reference) && ok;
    return ok ? 0 : 1;
}
