// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: a surrogate is a struct with `token_out operator
// errors: 1
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>

struct mine {
#ifdef FIXED
    opd::token_out operator()(const opd::token_in& x) const { return {-x.advantage * x.log_p, -x.advantage}; }
#else
    double operator()(const opd::token_in& x) const { return -x.advantage * x.log_p; }
#endif
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
    opd::evaluate(backend, student, samples, opd::mc{.surrogate = mine{}});
    (void)teacher;
}
