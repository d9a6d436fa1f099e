// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: ids are integers, of any type
// errors: 1
// control: FIXED
#include <opd/teacher.hpp>

int main() {
    const float logs[1] = {-1};
#ifdef FIXED
    const std::int64_t ids[1] = {2};
#else
    const float ids[1] = {2};
#endif
    const opd::teacher::support cache{opd::view(ids, 1, 1), opd::view(logs, 1, 1)};
    (void)cache;
}
