// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: masks, weights and offsets lie in contiguous memory
// errors: 1
// control: FIXED
#include <opd/batch.hpp>
#include <vector>

int main() {
#ifdef FIXED
    const std::vector<char> keep{0, 1};
#else
    const std::vector<bool> keep{false, true};
#endif
    const opd::env env{.mask = keep};
    (void)env;
}
