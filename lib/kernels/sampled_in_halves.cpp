// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Drawn tokens, of logits of 16 bits.
#include "sampled.hpp"

opd::result opd_c::kernel::sampled_in_halves(const call& c) {
    const dtype z = opd_c::type_of(*c.student.z), dz = c.student.dz == nullptr ? z : opd_c::type_of(*c.student.dz);
    if (z == dtype::bfloat16 && dz == z) return sampled_of<opd::bfloat16>(c);
    if (z == dtype::half && dz == z) return sampled_of<opd::half>(c);
    refuse_types(c.student);
}
