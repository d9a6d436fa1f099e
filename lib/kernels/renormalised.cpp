// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "renormalised.hpp"

opd::result opd_c::kernel::renormalised(const call& c) {
    return with_logits_type(c.student, [&]<class Z>(Z) { return renormalised_of<Z>(c); });
}
