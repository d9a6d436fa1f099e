// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Matrix tiles multiply bfloat16 with bfloat16: states in float would be rounded unasked.
// first: opd: states beside an amx_head are bfloat16
// errors: 1
// control: FIXED
#include <opd/backends/amx.hpp>
#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

int main() {
#ifdef FIXED
    const opd::bfloat16 x[2] = {};
#else
    const float x[2] = {};
#endif
    const opd::bfloat16 w[4] = {};
    const opd::amx_head head{opd::view(w, 2, 2)};
    const opd::teacher::hidden y{opd::view(x, 1, 2), head};
    (void)y;
}
