// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: the log-probabilities of a cache are of one type
// errors: 1
// control: FIXED
#include <opd/teacher.hpp>

int main() {
    const std::int32_t ids[1] = {2};
    const float logs[1] = {-1};
#ifdef FIXED
    const float log_q[1] = {-1};
#else
    const double log_q[1] = {-1};
#endif
    const opd::teacher::samples cache{opd::view(ids, 1, 1), opd::view(logs, 1, 1), opd::view(log_q, 1, 1)};
    (void)cache;
}
