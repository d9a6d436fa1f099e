// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A kind that is derived from one of ours would be judged as another.
// expect: is_proposal<
// control: FIXED
#include <opd/spec/verify.hpp>

struct mine : opd::spec::without_replacement<float> {};

int main() {
    const std::int32_t parents[1] = {-1}, tokens[1] = {0};
    const float p[4] = {.5F, .5F, .5F, .5F}, q[4] = {.5F, .5F, .5F, .5F};
    opd::spec::verification memory;
    opd::spec::keyed_coins coins(1, 0, 0);
#ifdef FIXED
    memory.verify({parents, tokens}, opd::view(p, 2, 2), opd::spec::without_replacement<float>{opd::view(q, 2, 2)},
                  coins);
#else
    memory.verify({parents, tokens}, opd::view(p, 2, 2), mine{{opd::view(q, 2, 2)}}, coins);
#endif
    (void)q;
}
