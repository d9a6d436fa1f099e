// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The GPU's rows of every divergence over float logits, run on the host: compiled once, in device_text.cpp.
#pragma once

#include "backends/host_run.hpp"
#include "opd/estimators/divergences.hpp"

#ifndef OPD_TEST_COMPILED
#define OPD_TEST_COMPILED extern
#endif

namespace opd::test {

template <class D>
using device_text_job = row_job<student::logits<float>, teacher::dense<float>, D, space::host>;

OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<reverse_kl>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<forward_kl>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<jsd>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<skew_forward_kl>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<skew_reverse_kl>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<total_variation>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<alpha_divergence>&);
OPD_TEST_COMPILED template result host_run_backend::for_rows(const device_text_job<chi_squared>&);

} // namespace opd::test
