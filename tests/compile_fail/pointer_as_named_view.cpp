// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: a pointer alone has no shape
// errors: 3
// control: FIXED
#include <opd/student.hpp>

int main() {
    const float z[4] = {};
    float dz[4];
#ifdef FIXED
    const opd::student::logits student{.z = opd::view(z, 1, 4), .dz = opd::view(dz, 1, 4)};
#else
    const opd::student::logits student{.z = opd::view(z, 1, 4), .dz = dz};
#endif
    (void)student, (void)z, (void)dz;
}
