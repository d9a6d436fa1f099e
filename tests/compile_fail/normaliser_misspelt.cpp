// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: the member is spelt env.normaliser
// errors: 1
// control: FIXED
#include <opd/batch.hpp>

int main() {
#ifdef FIXED
    const opd::env e{.normaliser = 3};
#else
    const opd::env e{.normalizer = 3};
#endif
    (void)e;
}
