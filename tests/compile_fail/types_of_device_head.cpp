// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A product on a device would read bfloat16 as floats.
// first: opd: on a device hidden states, their head and its update are of one type
// control: FIXED
#include <opd/hidden.hpp>

int main() {
    const float x[4] = {};
#ifdef FIXED
    const float w[4] = {}, b[2] = {}, a[2] = {};
#else
    const opd::bfloat16 w[4] = {}, b[2] = {}, a[2] = {};
#endif
    const opd::lora_head head{opd::device_view(w, 2, 2), opd::device_view(b, 2, 1), opd::device_view(a, 1, 2)};
    const opd::teacher::hidden teacher{opd::device_view(x, 2, 2), head};
    (void)teacher;
}
