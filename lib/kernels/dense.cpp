// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences of dense logits, student, gradient and teacher of one type.
#include "dense.hpp"

opd::result opd_c::kernel::dense(const call& c) {
    const dtype y = kernel::type_of("teacher.y", c.teacher.y);
    return with_logits_type(c.student, [&]<class Z>(Z) {
        if (y != type_for<Z>())
            throw opd::unsupported("opd: teacher.y is of " + name_of(*c.teacher.y) + " beside logits of " +
                                   name_of(*c.student.z) + "; dense rows are of one type");
        return dense_of<Z>(c);
    });
}
