// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Matrix tiles multiply bfloat16: a float is three of them, and a double would be rounded unasked.
// first: opd: a head is float or bfloat16
// errors: 1
// control: FIXED
#include <opd/backends/amx.hpp>

int main() {
#ifdef FIXED
    const float w[4] = {};
#else
    const double w[4] = {};
#endif
    const opd::amx_head head{opd::view(w, 2, 2)};
    (void)head;
}
