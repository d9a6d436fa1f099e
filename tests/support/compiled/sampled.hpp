// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend's rows of samples, and its log-probs of tokens, with float logits and 32-bit ids, that many test
// programs run: compiled once, in sampled.cpp.
#pragma once

#include "opd/backends/cpu.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/score.hpp"

namespace opd::test::compiled {

template <class Estimator>
using samples_job = row_job<student::logits<float>, teacher::samples<std::int32_t>, Estimator, space::host>;
template <class Estimator>
using weighted_job = row_job<student::logits<float>, teacher::weighted<std::int32_t>, Estimator, space::host>;

} // namespace opd::test::compiled

/// `kind`: extern (declared), or nothing (compiled here).
#define OPD_TEST_SAMPLED_ROWS(kind)                                                                                    \
    kind template result cpu_backend::for_rows(const test::compiled::samples_job<mc<>>&);                              \
    kind template result cpu_backend::for_rows(const test::compiled::weighted_job<mc<>>&);                             \
    kind template result cpu_backend::for_rows(const score_job<float, std::int32_t, float>&);

namespace opd {

OPD_TEST_SAMPLED_ROWS(extern)

} // namespace opd
