// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// An update in double would be rounded unasked.
// first: opd: a head and its update are float or bfloat16
// errors: 1
// control: FIXED
#include <opd/head.hpp>

int main() {
    const float w[4] = {};
#ifdef FIXED
    const float b[2] = {}, a[2] = {};
#else
    const double b[2] = {}, a[2] = {};
#endif
    const opd::lora_head head{opd::view(w, 2, 2), opd::view(b, 2, 1), opd::view(a, 1, 2)};
    (void)head;
}
