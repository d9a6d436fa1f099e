// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: student and teacher sources take views
// errors: 1
// control: FIXED
#include <opd/student.hpp>
#include <vector>

int main() {
    const std::vector<float> z(4);
#ifdef FIXED
    const opd::student::logits student{opd::view(z.data(), 1, 4)};
#else
    const opd::student::logits student{z};
#endif
    (void)student;
}
