// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: a pointer alone has no shape
// errors: 1
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>

int main() {
    const float z[4] = {}, y[4] = {};
    float dz[4];
    opd::eigen_backend backend;
    const opd::teacher::dense teacher{opd::view(y, 1, 4)};
#ifdef FIXED
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(dz, 1, 4)};
#else
    const opd::student::logits student{z, dz};
#endif
    opd::evaluate(backend, student, teacher, opd::reverse_kl{});
    (void)z, (void)dz;
}
