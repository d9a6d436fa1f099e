// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A selector without reads().
// first: opd: a selector is a struct with `unsigned reads.. const` and
// errors: 1
// control: FIXED
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

struct half {
#ifdef FIXED
    static constexpr unsigned reads() { return 0; }
#endif
    double operator()(const opd::row_facts&) const { return 0.5; }
};

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::dense<float> t) {
    opd::evaluate(be, s, t, opd::selected{opd::reverse_kl{}, half{}});
}
