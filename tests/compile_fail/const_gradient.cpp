// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: the gradient is written: its view must not be of const elements
// errors: 1
// control: FIXED
#include <opd/student.hpp>

int main() {
    const float z[4] = {};
    float dz[4];
#ifdef FIXED
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(dz, 1, 4)};
#else
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(z, 1, 4)};
#endif
    (void)student, (void)z, (void)dz;
}
