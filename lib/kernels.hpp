// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is compiled once for each instruction set, and chosen when the library is loaded. kernels/ has it; all of it takes the caller's
// structs as they are, checked for their sizes alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "errors.hpp"
#include "opd/c/opd.h"

struct opd_kernels {
    const char* name;                                             ///< "x86-64-v3"
    void* (*make)(int threads, void* arena, std::uint64_t bytes); ///< a backend
    void (*unmake)(void* backend);
    int (*evaluate)(void* backend, const opd_student&, const opd_teacher&, const opd_estimator&, const opd_env&,
                    opd_result&, std::uint64_t* workspace); ///< workspace: only its bytes are asked for
};

// Of each set that the build has: see CMakeLists.txt, OPD_LIBRARY_ISAS.
OPD_C_SHARED const opd_kernels* opd_kernels_base();
OPD_C_SHARED const opd_kernels* opd_kernels_v3();
OPD_C_SHARED const opd_kernels* opd_kernels_v4();

namespace opd_c {
/// Those that this process uses: the best that it can run, or what the environment's OPD_ISA names (base, v3, v4).
const opd_kernels& kernels();
} // namespace opd_c
