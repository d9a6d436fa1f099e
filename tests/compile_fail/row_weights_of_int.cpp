// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: weights of rows are float or double
// errors: 1
// control: FIXED
#include <opd/batch.hpp>
#include <vector>

int main() {
#ifdef FIXED
    const std::vector<double> w{1};
#else
    const std::vector<int> w{1};
#endif
    const opd::env env{.weights = w};
    (void)env;
}
