// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend's rows of divergences on a support, with float logits and 32-bit ids, that many test programs run:
// compiled once, in support.cpp.
#pragma once

#include "opd/backends/cpu.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/support.hpp"
#include "support/compiled/dense.hpp" // a renormalised row is a dense one

namespace opd::test::compiled {

template <class Estimator>
using support_job = row_job<student::logits<float>, teacher::support<std::int32_t>, Estimator, space::host>;

} // namespace opd::test::compiled

/// `kind`: extern (declared), or nothing (compiled here).
#define OPD_TEST_SUPPORT_ROWS(kind)                                                                                    \
    kind template result cpu_backend::for_rows(const test::compiled::support_job<tail_bucket<reverse_kl>>&);           \
    kind template result cpu_backend::for_rows(const test::compiled::support_job<tail_bucket<forward_kl>>&);           \
    kind template result cpu_backend::for_rows(const test::compiled::support_job<tail_bucket<jsd>>&);                  \
    kind template result cpu_backend::for_rows(const test::compiled::support_job<renormalised<reverse_kl>>&);          \
    kind template result cpu_backend::for_rows(const test::compiled::support_job<renormalised<jsd>>&);

namespace opd {

OPD_TEST_SUPPORT_ROWS(extern)

} // namespace opd
