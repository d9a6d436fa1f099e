// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "dense.hpp"

template opd::result opd_c::kernel::dense_of<opd::bfloat16>(const call&);
