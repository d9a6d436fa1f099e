// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: no member named .+synchronised
// control: FIXED
#include <opd/sched/staleness_queue.hpp>

int main() {
    opd::sched::staleness_queue<int> queue({.batch = 1});
    auto batch = queue.pop();
#ifdef FIXED
    std::move(*batch).trained().synchronised();
#else
    std::move(*batch).synchronised();
#endif
}
