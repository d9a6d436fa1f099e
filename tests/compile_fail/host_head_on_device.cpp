// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A kernel that asked it would read the host's memory.
// first: opd: a head of your own is asked where the states lie
// control: FIXED
#include <opd/hidden.hpp>

struct coarse_head {
#ifdef FIXED
    static constexpr opd::space memory_space = opd::space::device;
#endif
    opd::index_t vocab() const { return 2; }
    opd::index_t width() const { return 2; }
    void copy(opd::index_t, opd::index_t, opd::index_t, float*) const {}
};

int main() {
    const float x[4] = {};
    const opd::teacher::hidden teacher{opd::device_view(x, 2, 2), coarse_head{}};
    (void)teacher;
}
