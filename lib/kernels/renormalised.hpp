// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences of a support over which both sides are renormalised, with a dense or a sparse gradient. For the
// processor one form of support is compiled, the ragged one: a support of k ids in each row is one, with the same
// bits. A device's has both, since its offsets would have to be made there.
#pragma once

#include <algorithm>
#include <vector>

#include "formulas.hpp"
#include "support.hpp"

namespace opd_c::kernel {

/// Numbers row by row, without gaps: the caller's, or a copy in memory that the thread keeps.
template <class L>
opd::vector_view<const L, where> in_one_piece(opd::matrix_view<const L, where> m, std::vector<L>& copy) {
    if (m.data == nullptr) return {};
    if (m.stride == m.cols || m.rows <= 1) return {m.data, m.rows * m.cols};
    copy.resize(static_cast<std::size_t>(m.rows * m.cols) + 1);
    for (index_t r = 0; r < m.rows; ++r) std::copy_n(m.data + r * m.stride, m.cols, copy.data() + r * m.cols);
    return {copy.data(), m.rows * m.cols};
}

/// The caller's support as a ragged one.
template <class L>
opd::teacher::ragged_support<std::int64_t, L, where> ragged_of(const opd_teacher& t, index_t rows, index_t vocab) {
    thread_local std::vector<std::int64_t> begins, ids;
    thread_local std::vector<L> log_q, log_mu;
    opd::teacher::ragged_support<std::int64_t, L, where> to;
    to.widest = widest_of(t, vocab);
    to.chosen_by = chosen_by_of(t);
    to.log_tail = vector<const L>("teacher.log_tail", t.log_tail);
    if (t.kind == OPD_RAGGED_SUPPORT) {
        to.ids = id_vector(0, "teacher.ids", t.ids), to.log_q = vector<const L>("teacher.log_q", t.log_q);
        to.log_mu = vector<const L>("teacher.log_mu", t.log_mu);
        to.offsets = offsets("teacher.offsets", t.offsets);
        return to;
    }
    const auto of_ids = id_matrix(0, "teacher.ids", t.ids);
    const auto same = [&](const char* name, const auto& m, index_t n, index_t k) {
        if (m.data != nullptr && (m.rows != n || m.cols != k))
            refuse(name, "is (" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "), not (" +
                             std::to_string(n) + ", " + std::to_string(k) + ")");
    };
    const auto of_q = matrix<const L>("teacher.log_q", t.log_q), of_mu = matrix<const L>("teacher.log_mu", t.log_mu);
    same("teacher.ids", of_ids, rows, of_ids.cols);
    same("teacher.log_q", of_q, rows, of_ids.cols), same("teacher.log_mu", of_mu, rows, of_ids.cols);
    to.ids = in_one_piece(of_ids, ids);
    to.log_q = in_one_piece(of_q, log_q), to.log_mu = in_one_piece(of_mu, log_mu);
    begins.resize(static_cast<std::size_t>(rows) + 1);
    for (index_t r = 0; r <= rows; ++r) begins[static_cast<std::size_t>(r)] = r * of_ids.cols;
    to.offsets = {begins.data(), rows + 1};
    return to;
}

/// body(support), of the form that this place has.
template <class L, class Body>
opd::result with_renormalised_support(const opd_teacher& t, index_t rows, index_t vocab, Body&& body) {
    if constexpr (on_device)
        return with_support<L>(t, vocab, body);
    else
        return body(ragged_of<L>(t, rows, vocab));
}

/// The sparse gradient (N,k), or (total), as the (1,total) that a ragged support has.
template <class G>
opd::matrix_view<G, where> sparse_gradient(index_t numbers, const DLTensor* dz) {
    if (dz == nullptr) return {};
    const opd::vector_view<G, where> all = vector<G>("student.dz", dz);
    if (all.size != numbers)
        refuse("student.dz",
               "has " + std::to_string(all.size) + " numbers for a support of " + std::to_string(numbers));
    return {all.data, 1, all.size, all.size};
}

template <class Z>
opd::result renormalised_of(const call& c) {
    opd::student::logits<Z, Z, where> s{.z = matrix<const Z>("student.z", c.student.z)};
    return with_renormalised_support<log_of<Z>>(c.teacher, s.z.rows, vocab_of(c.student), [&](const auto& t) {
        if (c.student.kind == OPD_LOGITS) s = logits_of<Z, Z>(c.student);
        opd::student::on_support<Z, Z, where> sparse{.z = s.z, .temperature = temperature_of(c.student.temperature)};
        if (c.student.kind == OPD_ON_SUPPORT) {
            if (c.student.padding != 0)
                refuse("student.padding", "is of rows of dz, which a sparse gradient does not have");
            if constexpr (requires { t.is_ragged; })
                sparse.dz = sparse_gradient<Z>(t.ids.size, c.student.dz);
            else
                sparse.dz = matrix<Z>("student.dz", c.student.dz);
        }
        return with_divergence(divergence_of(c.estimator), [&](const auto& of) {
            return with_selector(c.estimator, opd::renormalised{of}, [&](const auto& e) {
                return c.student.kind == OPD_LOGITS ? c.run(s, t, e) : c.run(sparse, t, e);
            });
        });
    });
}

} // namespace opd_c::kernel
