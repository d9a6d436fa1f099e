// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "renormalised.hpp"

opd::result opd_c::kernel::renormalised(const call& c) {
    return with_logits(c.student,
                       [&]<class Z, class G>(const opd::student::logits<Z, G>&) { return renormalised_of<Z>(c); });
}
