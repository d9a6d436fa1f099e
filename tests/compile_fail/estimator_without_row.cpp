// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// An estimator says which cache it takes, but has no row.
// expect: opd: an estimator of drawn tokens has `entry_row row\(sampled_entry\*, int, entry_facts, diagnostics&\)
// errors: 1
// control: OPD_CONTROL
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

struct mine {
    static constexpr opd::cache_kind takes = opd::cache_kind::samples;
#ifdef OPD_CONTROL
    opd::entry_row row(opd::sampled_entry*, int, opd::entry_facts, opd::diagnostics&) const { return {}; }
#endif
};

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::samples<int> t) {
    opd::evaluate(be, s, t, mine{});
}
