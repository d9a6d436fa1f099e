// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is compiled once for each instruction set, and chosen when the library is loaded; and once for CUDA, as a
// library of its own. kernels/ has it; all of it takes the caller's structs as they are, checked for their sizes alone.
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
    std::size_t size; ///< of this struct: a library of its own may be of another version
    const char* name; ///< "v3"
    int (*make)(const opd_engine_options&, void** backend);
    void (*unmake)(void* backend);
    int (*evaluate)(void* backend, const opd_student&, const opd_teacher&, const opd_estimator&, const opd_env&,
                    opd_result*, std::uint64_t* workspace); ///< workspace: only its bytes are asked for
    // null where there is none
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

/// libopd_cuda's only name, as dlsym finds it: its kernels, which report errors to `set_error`.
extern "C" __attribute__((visibility("default"))) const opd_kernels*
opd_kernels_cuda(void (*set_error)(int code, const char* text, const char* argument, std::int64_t row) noexcept);

namespace opd_c {
/// Those of libopd_cuda, loaded by the first call that wants them; throws unsupported, with the loader's reason, where
/// there are none.
const opd_kernels& cuda_kernels();

/// Those that this process uses: the best that it can run, or what the environment's OPD_ISA names (base, v3, v4).
const opd_kernels& kernels();
} // namespace opd_c
