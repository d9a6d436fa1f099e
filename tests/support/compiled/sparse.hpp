// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend's rows of the supports and samples, with float logits and 32-bit ids, that many test programs run: compiled
// once, in sparse.cpp.
#pragma once

#include "opd/backends/eigen.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/support.hpp"

#ifndef OPD_TEST_COMPILED
#define OPD_TEST_COMPILED extern
#endif

namespace opd::test::compiled {

template <class Teacher, class Estimator>
using sparse_job = row_job<student::logits<float>, Teacher, Estimator, space::host>;
using support = teacher::support<std::int32_t>;
using samples = teacher::samples<std::int32_t>;
using weighted = teacher::weighted<std::int32_t>;

} // namespace opd::test::compiled

namespace opd {

OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::support, tail_bucket<reverse_kl>>&);
OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::support, tail_bucket<forward_kl>>&);
OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::support, tail_bucket<jsd>>&);
OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::support, renormalised<reverse_kl>>&);
OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::support, renormalised<jsd>>&);
OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::samples, mc_reverse_kl<>>&);
OPD_TEST_COMPILED template result
eigen_backend::for_rows(const test::compiled::sparse_job<test::compiled::weighted, weighted_reverse_kl<>>&);
OPD_TEST_COMPILED template result eigen_backend::for_rows(const token_logp_job<float, std::int32_t, float>&);

} // namespace opd
