/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * A tensor as DLPack's specification describes it (version 1.0, unversioned DLTensor): what NumPy, PyTorch, JAX, CuPy
 * and others hand out and take. Written from the specification; a program that includes DLPack's own header first
 * keeps that one.
 */
#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_

#include <stddef.h>
#include <stdint.h>

/* DLPack's numbers of devices: those that this library takes. */
typedef enum {
    kDLCPU = 1,
    kDLCUDA = 2,
    kDLCUDAHost = 3, /* pinned memory of the host */
    kDLCUDAManaged = 13
} DLDeviceType;

/* Which memory: `device_id` counts devices of one type from 0; of kDLCPU it is 0. */
typedef struct {
    DLDeviceType device_type;
    int32_t device_id;
} DLDevice;

/* DLPack's numbers of element types; half is kDLFloat of 16 bits. */
typedef enum {
    kDLInt = 0U,
    kDLUInt = 1U,
    kDLFloat = 2U,
    kDLOpaqueHandle = 3U,
    kDLBfloat = 4U,
    kDLComplex = 5U,
    kDLBool = 6U
} DLDataTypeCode;

/* An element's type. */
typedef struct {
    uint8_t code;   /* DLDataTypeCode */
    uint8_t bits;   /* of one number */
    uint16_t lanes; /* 1: not a vector type */
} DLDataType;

/* A tensor that somebody else owns. */
typedef struct {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;       /* (ndim) */
    int64_t* strides;     /* (ndim) in elements; NULL: row-major without gaps */
    uint64_t byte_offset; /* from data to the first element */
} DLTensor;

#endif
