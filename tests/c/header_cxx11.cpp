// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The C interface is C++11 too.
#include "opd/c/opd.h"

int opd_test_cxx11() {
    opd_call call = {};
    call.struct_size = sizeof call;
    return opd_evaluate(&call, nullptr);
}
