// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: offsets of sequences are int32 or int64
// errors: 1
// control: FIXED
#include <opd/batch.hpp>
#include <vector>

int main() {
#ifdef FIXED
    const std::vector<int> offsets{0, 1};
#else
    const std::vector<float> offsets{0, 1};
#endif
    const opd::env env{.offsets = offsets};
    (void)env;
}
