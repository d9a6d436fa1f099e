// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: this estimator reads drawn tokens: use teacher::samples
// errors: 1
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>

int main() {
    const float z[4] = {}, y[4] = {};
    float dz[4];
    opd::eigen_backend backend;
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(dz, 1, 4)};
    const opd::teacher::dense teacher{opd::view(y, 1, 4)};
    const std::int32_t ids[1] = {2};
    const float logs[1] = {-1};
    const opd::teacher::samples samples{opd::view(ids, 1, 1), opd::view(logs, 1, 1), opd::view(logs, 1, 1)};
#ifdef FIXED
    opd::evaluate(backend, student, samples, opd::mc{opd::reverse_kl{}});
#else
    opd::evaluate(backend, student, teacher, opd::mc{opd::reverse_kl{}});
#endif
    (void)teacher, (void)samples;
}
