// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: the weights of a teacher::weighted cache are float
// errors: 1
// control: FIXED
#include <opd/teacher.hpp>

int main() {
    const std::int32_t ids[1] = {2};
    const float logs[1] = {-1};
#ifdef FIXED
    const float w[1] = {1};
#else
    const int w[1] = {1};
#endif
    const auto log = opd::view(logs, 1, 1);
    const opd::teacher::weighted cache{opd::view(ids, 1, 1), opd::view(w, 1, 1), log, log};
    (void)cache;
}
