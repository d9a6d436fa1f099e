// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: this backend has no rows for this student, cache and estimator
// errors: 1
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>

struct mine { // a sparse gradient of a loss whose normaliser is over the vocabulary
    static constexpr opd::cache_kind takes = opd::cache_kind::support;
    static constexpr bool sparse_gradient = true;
    opd::entry_row row(opd::support_entries&, opd::entry_facts, opd::diagnostics&) const { return {}; }
};

int main() {
    const float z[4] = {}, y[4] = {};
    float dz[4];
    opd::eigen_backend backend;
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(dz, 1, 4)};
    const opd::teacher::dense teacher{opd::view(y, 1, 4)};
    const std::int32_t ids[1] = {2};
    const float logs[1] = {-1};
    const opd::teacher::samples samples{opd::view(ids, 1, 1), opd::view(logs, 1, 1), opd::view(logs, 1, 1)};
    const opd::teacher::support support{opd::view(ids, 1, 1), opd::view(logs, 1, 1)};
#ifdef FIXED
    opd::evaluate(backend, student, support, mine{});
#else
    opd::evaluate(backend, opd::student::on_support{student.z, opd::view(dz, 1, 1)}, support, mine{});
#endif
    (void)teacher, (void)samples;
}
