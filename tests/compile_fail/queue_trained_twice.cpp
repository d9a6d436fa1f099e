// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: trained
// expect: rvalue|discards qualifiers
// control: FIXED
#include <opd/sched/staleness_queue.hpp>

int main() {
    opd::sched::staleness_queue<int> queue({.batch = 1});
    auto batch = queue.pop();
#ifdef FIXED
    auto update = std::move(*batch).trained(); // says that the batch is gone
#else
    auto update = batch->trained();
#endif
    std::move(update).synchronised();
}
