// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: this backend has no rows for this student, cache and estimator
// errors: 1
// control: FIXED
#include <opd/opd.hpp>

struct mine {
    static constexpr opd::space memory_space = opd::space::host;
#ifdef FIXED
    template <class Student, class Teacher, class Estimator>
    opd::result for_rows(const opd::row_job<Student, Teacher, Estimator, opd::space::host>&) {
        return {};
    }
#else
    template <class Z, class Id, class L>
    opd::result for_rows(const opd::score_job<Z, Id, L>&) {
        return {};
    }
#endif
};

int main() {
    const float z[4] = {}, y[4] = {};
    float dz[4];
    mine backend;
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(dz, 1, 4)};
    const opd::teacher::dense teacher{opd::view(y, 1, 4)};
    opd::evaluate(backend, student, teacher, opd::reverse_kl{});
}
