// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is compiled once for each instruction set, and chosen when the library is loaded. kernels/ has it; all of it
// takes the caller's structs as they are, checked for their sizes alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "errors.hpp"
#include "opd/c/opd.h"

/// A table of drawn tokens in double, (N,m) each, as passes over a batch read it.
struct opd_token_table {
    std::int64_t* id; ///< -1: there is none, or none that an estimator takes
    double *log_p, *log_mu, *log_prox;
    double* advantage; ///< 0 where there is no token
};

struct opd_kernels {
    const char* name;                                             ///< "x86-64-v3"
    void* (*make)(int threads, void* arena, std::uint64_t bytes); ///< a backend
    void (*unmake)(void* backend);
    int (*evaluate)(void* backend, const opd_student&, const opd_teacher&, const opd_estimator&, const opd_env&,
                    opd_result&, std::uint64_t* workspace); ///< workspace: only its bytes are asked for
    int (*draw)(void* backend, const opd_draw_call&, opd_result&, std::uint64_t* workspace);
    int (*kept_ids)(void* backend, const opd_kept_ids_call&, std::int64_t* total, opd_result&,
                    std::uint64_t* workspace);
    int (*score)(void* backend, const opd_score_call&, opd_result&, std::uint64_t* workspace);
    int (*tokens)(const opd_tokens&, const opd_teacher& cache, const opd_token_table&);
};

// Of each set that the build has: see CMakeLists.txt, OPD_LIBRARY_ISAS.
OPD_C_SHARED const opd_kernels* opd_kernels_base();
OPD_C_SHARED const opd_kernels* opd_kernels_v3();
OPD_C_SHARED const opd_kernels* opd_kernels_v4();

namespace opd_c {
/// Those that this process uses: the best that it can run, or what the environment's OPD_ISA names (base, v3, v4).
const opd_kernels& kernels();
} // namespace opd_c
