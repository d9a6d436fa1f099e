// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rules of 2026 for which tokens count how much, as weights that a call takes, and coefficients that move with the
// version. Selectors that a call works out itself, TIP, EOPD, prefixes and TCOD among them, are selectors.hpp's.
//
//   fill_iw_opd(a, offsets, gamma, w)          env.weights (N): w_t = 1 + gamma (1 - Σ_{s<t} |a_s| / Σ_s |a_s|) within
//                                              a sequence, a = log q - log p of the drawn token: IW-OPD
//                                              (arXiv 2606.22600, algorithm 1)
//   fill_ida(log_p, log_q, H, least, w)        env.frozen.weight (N,m): 1 where the token's update raises the entropy
//                                              of p, else max(least, e^-|log q - log p|): IDA-OPD (arXiv 2608.29846)
//   ramp{from, to, begin, end}.at(version)     from up to version `begin`, to from `end` on, a line between
//
// fill_ida: an update along A ∇log p(a) changes H by -A (p(a) (log p(a) + H) - Σ p² (log p + H)) to first order; the
// sum over the vocabulary, which sampled scores do not know, is left out: the sign is that of -A (log p(a) + H), A =
// log q - log p. The paper's abstract was read, not its formula of the shrinkage: e^-|A| is this project's.
//
// Weights depend on the draws: they bias, as the papers' do. Shapes as said, double and float; nats. Throws
// invalid_input: sizes, numbers that are not finite of rows that count, gamma below 0, least outside [0, 1].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/estimators/sequences.hpp"
#include "opd/view.hpp"

namespace opd {

/// IW-OPD's weights of the rows of each sequence, offsets (S+1); of rows that the mask leaves out nothing is read or
/// written. A sequence without any gap has 1 + gamma.
inline void fill_iw_opd(vector_view<const double> advantage, row_offsets<> offsets, double gamma,
                        vector_view<double> weights, row_mask<> mask = {}) {
    const index_t n = advantage.size;
    detail::check_vector("advantage", advantage, n);
    detail::check_vector("weights", weights, n);
    detail::check_vector("mask", mask, n);
    detail::check_sequences(offsets, n);
    if (!detail::is_finite(gamma) || gamma < 0) throw invalid_input("gamma", "must be finite and at least 0");
    for (index_t r = 0; r < n; ++r)
        if (mask.kept(r) && !detail::is_finite(advantage[r])) throw invalid_input("advantage", "is not finite", r);
    for (index_t s = 0; s + 1 < offsets.size; ++s) {
        double all = 0, before = 0;
        for (index_t r = offsets[s]; r < offsets[s + 1]; ++r)
            if (mask.kept(r)) all += std::abs(advantage[r]);
        for (index_t r = offsets[s]; r < offsets[s + 1]; ++r) {
            if (!mask.kept(r)) continue;
            weights[r] = 1 + gamma * (1 - (all > 0 ? before / all : 0));
            before += std::abs(advantage[r]);
        }
    }
}

/// IDA-OPD's weights of drawn tokens: log_p as token_logp gives it, log_q the cache's (N,m), entropy (N) of p or mu.
template <class L>
void fill_ida(matrix_view<const double> log_p, matrix_view<const L> log_q, vector_view<const double> entropy,
              double least, matrix_view<double> weights, row_mask<> mask = {}) {
    const index_t n = log_p.rows, m = log_p.cols;
    detail::check_matrix("log_p", log_p, n, m), detail::check_matrix("log_q", log_q, n, m);
    detail::check_matrix("weights", weights, n, m);
    detail::check_vector("entropy", entropy, n);
    detail::check_vector("mask", mask, n);
    if (!(least >= 0 && least <= 1)) throw invalid_input("least", "must lie in [0, 1]");
    for (index_t r = 0; r < n; ++r)
        if (mask.kept(r) && !detail::is_finite(entropy[r])) throw invalid_input("entropy", "is not finite", r);
    for (index_t r = 0; r < n; ++r)
        for (index_t j = 0; mask.kept(r) && j < m; ++j) {
            const double a = double(element<L>::load(log_q(r, j))) - log_p(r, j);
            weights(r, j) = a * (log_p(r, j) + entropy[r]) <= 0 ? 1 : std::max(least, std::exp(-std::abs(a)));
        }
}

/// A coefficient of a mixture, advantage::mixed or a route's weight, as a function of the student's version.
struct ramp {
    double from = 0, to = 1;
    std::int64_t begin = 0, end = 0;
    double at(std::int64_t version) const {
        if (version >= end) return to;
        if (version <= begin) return from;
        return from + (to - from) * (double(version - begin) / double(end - begin));
    }
};

} // namespace opd
