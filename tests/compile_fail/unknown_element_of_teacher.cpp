// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: unknown element type: specialise opd::element
// errors: 1
// control: FIXED
#include <opd/teacher.hpp>

int main() {
#ifdef FIXED
    const float y[4] = {};
#else
    const long y[4] = {};
#endif
    const opd::teacher::dense teacher{opd::view(y, 1, 4)};
    (void)teacher;
}
