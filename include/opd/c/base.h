/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Conventions of the C interface: results, errors, tensors, engines. C99 and C++11.
 *
 * Results     Every function that can fail returns an int: OPD_OK or why not. opd_last_error() then has the sentence,
 *             of the calling thread. No exception leaves a function. What could not be done has written nothing, but
 *             where the result says so (OPD_BAD_CONTENTS).
 * Structs     The first member is struct_size, set by the caller to sizeof of what it compiled. A member of 0, 0.0 or
 *             NULL has the default that its comment names, so `{.struct_size = sizeof s}` is a struct of defaults. A
 *             library that is older than the caller's header refuses members that it does not know, unless they are
 *             0; a newer one takes missing members for 0.
 * Tensors     DLTensor (dlpack.h), never owned, read during the call alone. A matrix (N,V) may have more dimensions,
 *             (B,T,V): all but the last are rows, in order. The last has stride 1; rows may be further apart than
 *             they are long.
 * Choices     Estimators, surrogates, policies and the like are named by strings, as docs/ name them; opd_name()
 *             lists them.
 * Threads     Any function from any thread. Calls that share an engine, a scheduler or another handle wait for each
 *             other.
 * Kernels     The first call chooses the best that the processor runs, or what the environment's OPD_ISA names
 *             (base, v3, v4); where that cannot be had, every call that needs kernels is OPD_UNSUPPORTED.
 * Handles     Made by opd_…_create, freed by opd_…_destroy (NULL does nothing). A handle that was freed, or that is
 *             of another kind, is refused as long as its memory is not another's.
 */
#ifndef OPD_C_BASE_H
#define OPD_C_BASE_H

#include <stddef.h>
#include <stdint.h>

#include "opd/c/dlpack.h"

#ifndef OPD_C_API
#if defined(_WIN32)
#define OPD_C_API __declspec(dllimport)
#else
#define OPD_C_API __attribute__((visibility("default")))
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The interface's version. A program that was compiled against N runs with a library whose opd_abi_version() is N. */
#define OPD_ABI_VERSION 1
OPD_C_API int opd_abi_version(void);
/* "0.1.0": of the library. */
OPD_C_API const char* opd_version(void);

/* What every function that can fail returns; opd_last_error() has the sentence. */
typedef enum {
    OPD_OK = 0,
    OPD_INVALID_INPUT = 1,  /* an argument that no call could accept; opd_last_error_argument(), opd_last_error_row() */
    OPD_INFINITE_VALUE = 2, /* a row's loss is infinite, and the call asked to raise; opd_last_error_row() */
    OPD_BAD_CONTENTS = 3,   /* more bad rows than the call allows; everything is written, with 0 in these rows */
    OPD_UNSUPPORTED = 4,    /* a combination or a guarantee that this library does not have */
    OPD_OUT_OF_MEMORY = 5,
    OPD_INTERNAL = 6,       /* a fault of the library's */
    OPD_DEVICE_ERROR = 7    /* a call of CUDA or cuBLAS failed; opd_last_error() names it */
} opd_status;

/* Of the calling thread's last call that failed; "" before there was one. Good until its next call. */
OPD_C_API const char* opd_last_error(void);
OPD_C_API const char* opd_last_error_argument(void); /* the member at fault, "student.dz"; "" if there is none */
OPD_C_API int64_t opd_last_error_row(void);          /* -1 if there is none */
OPD_C_API int opd_last_error_code(void);             /* an opd_status */

/* The names of a table and what each is: the i-th from 0, NULL beyond the last. An unknown table has none.
 * Tables: "divergence",
 * "objective", "surrogate", "baseline", "selector", "estimator"; "proposal", "tuner"; "schedule", "staleness_policy",
 * "weight_update", "law". */
OPD_C_API const char* opd_name(const char* table, int i);
OPD_C_API const char* opd_says(const char* table, int i);

/* What a bug report needs, as JSON: versions, compiler, instruction sets compiled, supported and chosen, threads. */
OPD_C_API const char* opd_config(void);

/* Where calls run. On the CPU, threads and memory; on a device, a stream and its memory. Made by the first call, kept,
 * grown where a call needs more. A device's engine takes opd_evaluate alone; docs/bindings/c-cuda.md. */
typedef struct opd_engine opd_engine;
typedef struct opd_engine_options {
    size_t struct_size;
    int32_t threads;      /* 0: 1 */
    int32_t reserved;     /* 0 */
    void* arena;          /* the caller's memory for all that a call needs; NULL: the engine's own */
    uint64_t arena_bytes; /* a call that needs more is refused: opd_workspace_bytes() */
    int32_t device_type;  /* a DLDeviceType: kDLCPU or kDLCUDA; 0: kDLCPU */
    int32_t device_id;
    void* stream; /* a cudaStream_t: what calls are enqueued on; NULL: the default stream */
    void* cublas; /* a cublasHandle_t for hidden states; NULL: one of the engine's own */
} opd_engine_options;
/* `options` may be NULL. */
OPD_C_API int opd_engine_create(const opd_engine_options* options, opd_engine** out);
OPD_C_API void opd_engine_destroy(opd_engine* engine);

#ifdef __cplusplus
}
#endif
#endif
