// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Renormalised supports of logits of 16 bits.
#include "renormalised.hpp"

opd::result opd_c::kernel::renormalised_in_halves(const call& c) {
    const dtype z = opd_c::type_of(*c.student.z), dz = c.student.dz == nullptr ? z : opd_c::type_of(*c.student.dz);
    if (z == dtype::bfloat16 && dz == z) return renormalised_of<opd::bfloat16>(c);
    if (z == dtype::half && dz == z) return renormalised_of<opd::half>(c);
    refuse_types(c.student);
}
