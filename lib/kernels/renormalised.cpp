// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Renormalised supports of logits in float and double; renormalised_in_halves.cpp has the others.
#include "renormalised.hpp"

opd::result opd_c::kernel::renormalised(const call& c) {
    const dtype z = kernel::type_of("student.z", c.student.z),
                dz = c.student.dz == nullptr ? z : opd_c::type_of(*c.student.dz);
    if (z == dtype::float32 && dz == z) return renormalised_of<float>(c);
    if (z == dtype::float64 && dz == z) return renormalised_of<double>(c);
    return renormalised_in_halves(c);
}
