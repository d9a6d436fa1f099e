// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Drawn tokens, of logits in float and double; sampled_in_halves.cpp has the others.
#include "sampled.hpp"

opd::result opd_c::kernel::sampled(const call& c) {
    const dtype z = kernel::type_of("student.z", c.student.z),
                dz = c.student.dz == nullptr ? z : opd_c::type_of(*c.student.dz);
    if (z == dtype::float32 && dz == z) return sampled_of<float>(c);
    if constexpr (!on_device)
        if (z == dtype::float64 && dz == z) return sampled_of<double>(c);
    return sampled_in_halves(c);
}
