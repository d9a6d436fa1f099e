// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend's rows of every divergence over float logits, which many test programs run: compiled once, in dense.cpp.
#pragma once

#include "opd/backends/eigen.hpp"
#include "opd/estimators/divergences.hpp"

#ifndef OPD_TEST_COMPILED
#define OPD_TEST_COMPILED extern
#endif

namespace opd::test::compiled {

template <class D>
using dense_job = row_job<student::logits<float>, teacher::dense<float>, D, space::host>;

} // namespace opd::test::compiled

namespace opd {

OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<reverse_kl>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<forward_kl>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<jsd>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<skew_forward_kl>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<skew_reverse_kl>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<total_variation>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<alpha_divergence>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const test::compiled::dense_job<chi_squared>&);

} // namespace opd
