// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The GPU's rows of every divergence over float logits, run on the host: compiled once, in device_text.cpp.
#pragma once

#include "backends/host_run.hpp"
#include "opd/estimators/divergences.hpp"

namespace opd::test {

template <class D>
using device_text_job = row_job<student::logits<float>, teacher::dense<float>, D, space::host>;

} // namespace opd::test

/// `kind`: extern (declared), or nothing (compiled here).
#define OPD_TEST_DEVICE_TEXT_ROWS(kind)                                                                                \
    kind template result host_run_backend::for_rows(const device_text_job<reverse_kl>&);                               \
    kind template result host_run_backend::for_rows(const device_text_job<forward_kl>&);                               \
    kind template result host_run_backend::for_rows(const device_text_job<jsd>&);                                      \
    kind template result host_run_backend::for_rows(const device_text_job<skew_forward_kl>&);                          \
    kind template result host_run_backend::for_rows(const device_text_job<skew_reverse_kl>&);                          \
    kind template result host_run_backend::for_rows(const device_text_job<total_variation>&);                          \
    kind template result host_run_backend::for_rows(const device_text_job<alpha_divergence>&);                         \
    kind template result host_run_backend::for_rows(const device_text_job<chi_squared>&);

namespace opd::test {

OPD_TEST_DEVICE_TEXT_ROWS(extern)

} // namespace opd::test
