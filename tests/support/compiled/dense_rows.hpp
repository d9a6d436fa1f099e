// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend's rows of every divergence over logits of one type, to be declared (dense.hpp: float;
// dense_double.hpp) and compiled once (dense.cpp, dense_double.cpp).
#pragma once

#include "opd/backends/cpu.hpp"
#include "opd/estimators/divergences.hpp"

namespace opd::test::compiled {

template <class D, class T>
using dense_job = row_job<student::logits<T>, teacher::dense<T>, D, space::host>;
template <class D, class T>
using dense_rows =
    detail::dense_rows<detail::lane_engine, detail::host_frame, student::logits<T>, teacher::dense<T>, D>;
template <class D, class T>
using team = detail::team_of_one<typename dense_rows<D, T>::state_type>;

} // namespace opd::test::compiled

/// `kind`: extern (declared), or nothing (compiled here). The rows by themselves too: what is renormalised on a support
/// is a dense row.
#define OPD_TEST_DENSE_ROW(kind, T, D)                                                                                 \
    kind template void test::compiled::dense_rows<D, T>::row(test::compiled::team<D, T>&) const;                       \
    kind template result cpu_backend::for_rows(const test::compiled::dense_job<D, T>&);
#define OPD_TEST_DENSE_ROWS(kind, T)                                                                                   \
    OPD_TEST_DENSE_ROW(kind, T, reverse_kl)                                                                            \
    OPD_TEST_DENSE_ROW(kind, T, forward_kl)                                                                            \
    OPD_TEST_DENSE_ROW(kind, T, jsd)                                                                                   \
    OPD_TEST_DENSE_ROW(kind, T, skew_forward_kl)                                                                       \
    OPD_TEST_DENSE_ROW(kind, T, skew_reverse_kl)                                                                       \
    OPD_TEST_DENSE_ROW(kind, T, total_variation)                                                                       \
    OPD_TEST_DENSE_ROW(kind, T, alpha_divergence)                                                                      \
    OPD_TEST_DENSE_ROW(kind, T, chi_squared)
