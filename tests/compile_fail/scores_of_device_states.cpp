// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Scores of hidden states on a device: nothing makes their logits there.
// expect: opd: scores and draws from hidden states run on the CPU backends
// errors: 1
// control: OPD_CONTROL
#include <opd/hidden.hpp>
#include <opd/score.hpp>

struct device {
    static constexpr opd::space memory_space = opd::space::device;
    template <class Job>
    opd::result for_rows(const Job&) {
        return {};
    }
};

#ifdef OPD_CONTROL
using teacher = opd::teacher::dense<float, opd::space::device>;
#else
using teacher = opd::teacher::hidden<float, opd::space::device>;
#endif

void call(device& be, const teacher& t, opd::vector_view<double, opd::space::device> lse) {
    opd::log_sum_exp(be, t, lse);
}
