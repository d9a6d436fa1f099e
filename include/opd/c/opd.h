/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * The C interface of libopd: everything. C99 and C++11; link with -lopd.
 */
#ifndef OPD_C_OPD_H
#define OPD_C_OPD_H

#include "opd/c/base.h"
#include "opd/c/evaluate.h"
#include "opd/c/rows.h"
#include "opd/c/sched.h"
#include "opd/c/spec.h"

#endif
