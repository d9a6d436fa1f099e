// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A block is a chain of tokens that were drawn, one a node.
// expect: dense
// control: FIXED
#include <opd/spec/verify.hpp>

int main() {
    const std::int32_t parents[1] = {-1}, tokens[1] = {0};
    const float p[4] = {.5F, .5F, .5F, .5F}, q[4] = {.5F, .5F, .5F, .5F};
    opd::spec::verification memory;
    opd::spec::keyed_coins coins(1, 0, 0);
#ifdef FIXED
    memory.verify_block({parents, tokens}, opd::view(p, 2, 2), opd::spec::dense<float>{opd::view(q, 2, 2)}, coins);
#else
    memory.verify_block({parents, tokens}, opd::view(p, 2, 2), opd::spec::iid_siblings<float>{opd::view(q, 2, 2)},
                        coins);
#endif
    (void)q;
}
