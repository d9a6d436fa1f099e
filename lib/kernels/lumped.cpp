// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense logits of vocabularies of different size, what lies beyond the common ids as one bucket. float32 alone.
#include "dense.hpp"

opd::result opd_c::kernel::lumped(const call& c) {
    const dtype z = kernel::type_of("student.z", c.student.z), y = kernel::type_of("teacher.y", c.teacher.y);
    if (z != dtype::float32 || y != z)
        throw opd::unsupported("opd: teacher.lumped is of float32 logits in this library, not of " +
                               name_of(*c.student.z) + " and " + name_of(*c.teacher.y));
    const opd::teacher::lumped t{dense_teacher<float>(c.teacher), c.teacher.common};
    return divergence_of_sides(c, logits_of<float, float>(c.student), t);
}
