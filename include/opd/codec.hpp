// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Teacher states of r numbers a row in place of D: what makes them and what reads them, for processes that do not
// look for the directions themselves (compressed.hpp does, and says which there are).
//
//   opd::encode(threads, c, view(h,N,D), view(codes,N,r));                // where the teacher runs
//   const teacher::hidden theirs{view(codes,N,r), c.decoder_view()};      // where the loss is
//
//   encode  code = E h,  E (r,D)          decode  W h ≈ G code,  G (V,r)
//
// Source: Nitrobrew, as for compressed.hpp.
#pragma once

#include <concepts>
#include <string>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/products/product_tiles.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd {

inline namespace OPD_ISA {

/// What makes codes of r numbers, and the head that reads them.
struct codec {
    index_t vocab = 0, width = 0, rank = 0;
    std::vector<float> encoder; ///< (r,D)
    std::vector<float> decoder; ///< (V,r)

    matrix_view<const float> encoder_view() const { return view(encoder.data(), rank, width); }
    matrix_view<const float> decoder_view() const { return view(decoder.data(), vocab, rank); }
    /// Of a lower rank: the first of each.
    matrix_view<const float> encoder_view(index_t lower) const {
        check_rank(lower, rank);
        return view(encoder.data(), lower, width);
    }
    matrix_view<const float> decoder_view(index_t lower) const {
        check_rank(lower, rank);
        return view(decoder.data(), vocab, lower, rank);
    }
    static void check_rank(index_t rank, index_t most) {
        if (rank < 1 || rank > most)
            throw invalid_input("rank",
                                "is " + std::to_string(rank) + "; it must lie between 1 and " + std::to_string(most));
    }
};

/// codes (N,r) = x (N,D) encoderᵀ, with r the columns of `codes`: each a chain of its own, so a code of rank s is the
/// first s of a longer one. A state that is not finite has such a code, which makes its row a bad one. Throws
/// invalid_input, before anything is written, that names `x` or `codes`. A template, so that who reads codes alone
/// does not compile the product.
template <std::same_as<thread_team> Team>
void encode(Team& threads, const codec& c, matrix_view<const float> x, matrix_view<float> codes) {
    if (x.cols != c.width)
        throw invalid_input("x",
                            "has " + std::to_string(x.cols) + " columns for a width of " + std::to_string(c.width));
    if (codes.rows != x.rows)
        throw invalid_input("codes", "has " + std::to_string(codes.rows) + " rows for " + std::to_string(x.rows));
    if (codes.cols < 1 || codes.cols > c.rank)
        throw invalid_input("codes", "has " + std::to_string(codes.cols) + " columns for a codec of rank " +
                                         std::to_string(c.rank));
    if (x.rows == 0) return;
    if (x.data == nullptr || (x.rows > 1 && x.stride < x.cols)) throw invalid_input("x", "is no matrix");
    if (codes.data == nullptr || (codes.rows > 1 && codes.stride < codes.cols))
        throw invalid_input("codes", "is no matrix");
    product(team_executor{threads}, product_nt(x.rows, codes.cols, c.width, x.data, x.stride, c.encoder.data(), c.width,
                                               codes.data, codes.stride));
}

} // namespace OPD_ISA

} // namespace opd
