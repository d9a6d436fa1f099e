// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: opd: this backend has no rows for this student, cache and estimator
// control: FIXED
#include <opd/backends/cuda.cuh>
#include <opd/opd.hpp>

struct mine { // a sparse gradient of a loss whose normaliser is over the vocabulary
    static constexpr opd::cache_kind takes = opd::cache_kind::support;
    static constexpr bool sparse_gradient = true;
    OPD_HD opd::entry_row row(opd::support_entries& s, opd::entry_facts, opd::diagnostics&) const {
        opd::through_softmax(s);
        return {};
    }
};

using support = opd::teacher::support<int, float, opd::space::device>;
#ifdef FIXED
using student = opd::student::logits<float, float, opd::space::device>;
#else
using student = opd::student::on_support<float, float, opd::space::device>;
#endif

opd::device_result call(opd::cuda_backend& be, const student& s, const support& t) {
    return opd::evaluate(be, s, t, mine{}, opd::device_env{});
}
