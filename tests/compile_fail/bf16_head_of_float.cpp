// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Dot products of bfloat16 would round a head in float unasked.
// first: opd: bf16_head is of bfloat16
// errors: 1
// control: FIXED
#include <opd/backends/bf16.hpp>

int main() {
#ifdef FIXED
    const opd::bfloat16 w[4] = {};
#else
    const float w[4] = {};
#endif
    const auto head = opd::bf16_head(opd::view(w, 2, 2));
    (void)head;
}
