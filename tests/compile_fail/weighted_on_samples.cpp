// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: a teacher::samples cache takes mc_reverse_kl
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

int main() {
    const float x[4] = {};
    float dz[4];
    const std::int32_t ids[4] = {0, 1, 2, 3};
    opd::eigen_backend backend;
    const opd::student::logits s{opd::view(x, 1, 4), opd::view(dz, 1, 4)};
    const opd::student::on_support on{opd::view(x, 1, 4), opd::view(dz, 1, 4)};
    const opd::teacher::dense dense{opd::view(x, 1, 4)};
    const opd::teacher::support support{opd::view(ids, 1, 4), opd::view(x, 1, 4)};
    const opd::teacher::samples samples{opd::view(ids, 1, 4), opd::view(x, 1, 4), opd::view(x, 1, 4)};
#ifdef FIXED
    opd::evaluate(backend, s, samples, opd::mc_reverse_kl{});
#else
    opd::evaluate(backend, s, samples, opd::weighted_reverse_kl{});
#endif
    (void)s, (void)on, (void)dense, (void)support, (void)samples;
}
