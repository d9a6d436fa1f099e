// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a row counts in the training of a drafter, by its place in the draft: weights for env.weights. Row j of a
// draft matters only if the rows before it are accepted, and carries what comes after it:
//
//   decaying{gamma}          w_j = e^(-j/gamma), j = 0, 1, …                   DFlash (arXiv 2602.06036)
//   accepted_length{s}       w_j = Σ_{m≥j} Π_{i≤m} a~_i,  a~ = (1-s) a + s      D-PACE (arXiv 2605.18810, eq. 7, 8)
//
// a_i = e^(-loss_i): with the losses of `acceptance` the probability that row i is accepted, as of those of
// cross-entropy against the target's token it is the drafter's confidence in it, which is what D-PACE takes. w_j is
// what of the expected accepted length Σ_m Π_{i≤m} a~_i passes through row j: at s = 0, Σ_j w_j ∇loss_j = -∇ of it,
// exactly. s > 0 keeps late rows trained while early ones are still refused; 0.5 is the paper's. Weights are
// constants: no gradient flows through them.
//
// Shapes: offsets (D+1) the first row of each draft and the end of the last, losses (N), weights (N); N = offsets[D].
// Rows outside a draft have none to give: offsets[0] = 0. Two calls of evaluate: one for the losses, without a
// gradient, one with the weights.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <string>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd {

/// Weights by distance alone.
struct decaying {
    double gamma = 4; ///< rows
};
/// Weights by what is accepted.
struct accepted_length {
    double smoothing = 0.5; ///< s, in [0, 1]
};

namespace detail {
template <class Offset>
void check_drafts(std::span<const Offset> offsets, std::size_t rows) {
    if (offsets.empty()) throw invalid_input("offsets", "must have the end of the last draft");
    if (offsets.front() != 0) throw invalid_input("offsets", "must begin at 0");
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d)
        if (offsets[d + 1] < offsets[d])
            throw invalid_input("offsets", "must not fall, as draft " + std::to_string(d) + "'s do");
    if (static_cast<std::size_t>(offsets.back()) != rows)
        throw invalid_input("weights",
                            "has " + std::to_string(rows) + " rows, the drafts have " + std::to_string(offsets.back()));
}
} // namespace detail

/// Weights of every draft's rows: offsets (D+1), weights (offsets[D]). Throws invalid_input for offsets that do not
/// ascend from 0 to the number of rows, and for parameters outside their range.
template <std::integral Offset>
void fill_draft_weights(decaying by, std::span<const Offset> offsets, std::span<float> weights) {
    if (!detail::is_finite(by.gamma) || !(by.gamma > 0))
        throw invalid_input("decaying.gamma", "must be finite and above 0");
    detail::check_drafts(offsets, weights.size());
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d)
        for (Offset r = offsets[d]; r < offsets[d + 1]; ++r)
            weights[static_cast<std::size_t>(r)] =
                static_cast<float>(std::exp(-static_cast<double>(r - offsets[d]) / by.gamma));
}

/// `losses` and `weights` do not share memory.
template <std::integral Offset>
void fill_draft_weights(accepted_length by, std::span<const Offset> offsets, std::span<const float> losses,
                        std::span<float> weights) {
    if (!(by.smoothing >= 0 && by.smoothing <= 1))
        throw invalid_input("accepted_length.smoothing", "must lie in [0, 1]");
    detail::check_drafts(offsets, weights.size());
    if (losses.size() != weights.size())
        throw invalid_input("losses", "has " + std::to_string(losses.size()) + " rows, weights has " +
                                          std::to_string(weights.size()));
    if (!losses.empty() && losses.data() == weights.data())
        throw invalid_input("losses", "must not be the memory of weights");
    for (std::size_t r = 0; r < losses.size(); ++r)
        if (!detail::is_finite(losses[r]) || losses[r] < -1e-3F) // rounding of a sure token
            throw invalid_input("losses", "row " + std::to_string(r) + " is no -log of a probability");
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
        const auto accepted = [&](Offset r) {
            const double loss = static_cast<double>(losses[static_cast<std::size_t>(r)]);
            return (1 - by.smoothing) * std::exp(loss > 0 ? -loss : 0) + by.smoothing;
        };
        double onward = 0; // a_j (1 + what is accepted after it)
        for (Offset r = offsets[d + 1]; r > offsets[d]; --r) {
            onward = accepted(r - 1) * (1 + onward);
            weights[static_cast<std::size_t>(r - 1)] = static_cast<float>(onward);
        }
        double reached = 1;
        for (Offset r = offsets[d]; r < offsets[d + 1]; ++r) {
            float& w = weights[static_cast<std::size_t>(r)];
            w = static_cast<float>(reached * static_cast<double>(w));
            reached *= accepted(r);
        }
    }
}

} // namespace opd
