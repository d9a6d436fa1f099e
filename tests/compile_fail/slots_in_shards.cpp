// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: a gradient of slots is not a shard
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/backends/vocab_parallel.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/support.hpp>

int main() {
    const float x[4] = {};
    float dz[4];
    const std::int32_t ids[4] = {0, 1, 2, 3};
    opd::eigen_backend backend;
    const opd::teacher::support support{opd::view(ids, 1, 4), opd::view(x, 1, 4)};
#ifdef FIXED
    const opd::student::logits s{opd::view(x, 1, 4), opd::view(dz, 1, 4)};
#else
    const opd::student::on_support s{opd::view(x, 1, 4), opd::view(dz, 1, 4)};
#endif
    auto call = opd::vocab_parallel(backend, {0, 4}, s, support, opd::renormalised{opd::reverse_kl{}});
    while (call.local()) {}
    call.finish();
    call.backward();
}
