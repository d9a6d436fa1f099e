// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Teacher states of r numbers a row in place of D. Needs Eigen, so opd.hpp does not include it.
//
//   opd::thread_team threads(2);
//   opd::calibration seen(V, D);                                          // once, over prefixes like those to come
//   seen.add(threads, teacher::hidden{view(h,N,D), view(w,V,D)});         // batch by batch; or seen.merge(another's)
//   const opd::codec c = opd::make_codec(threads, opd::reweighted_svd(threads, view(w,V,D), seen), view(w,V,D), r);
//
//   opd::encode(threads, c, view(h,N,D), view(codes,N,r));                // where the teacher runs
//   const teacher::hidden theirs{view(codes,N,r), c.decoder_view()};      // where the loss is: states and head
//
// So every divergence takes them. Bias, soft-cap and temperature are the teacher's as before: `theirs.bias = …`.
//
//   encode  code = E h,  E (r,D)          decode  W h ≈ G code,  G (V,r)
//
// Three choices of directions, each of which has all D of them, best first; a codec takes the first r. E is nested in
// r, and so is G: encoder_view(s), decoder_view(s) are the codec of rank s <= r.
//
//   truncated_svd    W = U S Vᵀ: E = V_rᵀ, G = W V_r. Energies S_i²; those left out add up to |W - G E|² (Frobenius):
//                    no G E of rank r has less
//   importance_svd   the same directions in the order of S_i² E[(v_i·h)²] = E|z's part along v_i|²; energies left out
//                    add up to E|W h - G E h|²
//   reweighted_svd   diag(√p̄) (W - 1 w̄ᵀ) L = U S Vᵀ, C = L Lᵀ, w̄ = Wᵀ p̄:
//                    E = V_rᵀ L⁻¹, G = diag(√p̄)⁻¹ U_r S_r = (W - 1 w̄ᵀ) L V_r.
//                    Energies S_i²; those left out add up to the variance under p̄ of the logits' error, in the mean
//                    over h: none of rank r has less. Half of it is the mean KL to second order, were p̄ the
//                    probabilities of every row
//
// C = E[h hᵀ] + 1e-6 tr(C)/D I, p̄ the mean probability of a token, at least 1e-8, of sum 1. Any root of C does: L =
// C^(1/2) Q with Q orthogonal, so the right singular vectors are Qᵀ V, and V_rᵀ Q (C^(1/2) Q)⁻¹ = V_rᵀ C^(-1/2): the
// same E, and the same G = (W - 1 w̄ᵀ) C^(1/2) V_r.
//
// At r = D (where V > D; else at r = V) all are exact, but that logits of the third are less the number w̄·h, the
// same for every token of a row: no softmax sees it. A soft-cap would: after calibration with one w̄ is 0 above, and
// they are exact.
//
// Cost: the D x D Gram matrix in double (V D² multiply-adds, half of it by symmetry) and its eigenvectors, rather
// than an SVD of W: singular values below 1e-8 of the first are noise, whose directions still complete the basis,
// since G is made from W itself and not from S. Eigen's symmetric solver runs on one thread: 1, 7 and 78 seconds at D
// = 1,024, 2,048 and 4,096 on the machine of docs/performance.md. A randomised method would find the first r sooner,
// but the second choice needs all D: its best direction may be the smallest of W.
//
// Memory: calibration 8 (D² + V) bytes, and blocks of at most 512 rows of logits in the teacher's `.budget`, one at
// least; directions 16 D². Results do not depend on the number of threads; on how rows come in batches by rounding in
// double.
//
// Source: Nitrobrew (SVD-Nitrobrew, importance SVD, probability-reweighted SVD; appendix G).
#pragma once

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "opd/batch.hpp"
#include "opd/codec.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/hidden.hpp"
#include "opd/products/product_tiles.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd {

namespace detail {
inline namespace OPD_ISA {

/// The lower triangle of `sum` (D,D) += Σ_i row_i row_iᵀ for i < rows; row(i, to) writes D numbers. Blocks of rows,
/// in order, then tiles of the triangle, each by one thread: the bits do not depend on how many there are.
template <class Row>
void add_gram(thread_team& threads, index_t rows, Row&& row, Eigen::MatrixXd& sum) {
    constexpr index_t block = 512, side = 256;
    const index_t d = sum.rows(), tiles = (d + side - 1) / side;
    Eigen::MatrixXd x(d, std::min(block, rows));
    for (index_t begin = 0; begin < rows; begin += block) {
        const index_t n = std::min(block, rows - begin);
        threads.run(n, [&](index_t i, int) { row(begin + i, x.col(i).data()); });
        threads.run(tiles * tiles, [&](index_t tile, int) {
            const index_t i = tile / tiles * side, j = tile % tiles * side;
            if (j > i) return;
            const index_t down = std::min(side, d - i), across = std::min(side, d - j);
            sum.block(i, j, down, across).noalias() += x.block(i, 0, down, n) * x.block(j, 0, across, n).transpose();
        });
    }
}

/// to (V,r) = (from (V,D) - 1 centreᵀ) columns (D,r), in double; rounded once. centre of size 0: none.
inline void project_head(thread_team& threads, matrix_view<const float> head, const Eigen::VectorXd& centre,
                         const Eigen::Ref<const Eigen::MatrixXd>& columns, float* to) {
    using rows_of_double = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    constexpr index_t block = 128;
    const index_t v = head.rows, d = head.cols, r = columns.cols();
    threads.run((v + block - 1) / block, [&](index_t b, int) {
        const index_t begin = b * block, n = std::min(block, v - begin);
        rows_of_double x(n, d);
        for (index_t i = 0; i < n; ++i)
            for (index_t j = 0; j < d; ++j) x(i, j) = double(head(begin + i, j)) - (centre.size() == 0 ? 0 : centre[j]);
        const rows_of_double y = x * columns;
        std::transform(y.data(), y.data() + n * r, to + begin * r, [](double z) { return static_cast<float>(z); });
    });
}

inline void check_head_numbers(matrix_view<const float> head) {
    if (head.rows < 1 || head.cols < 1 || head.data == nullptr) throw invalid_input("head", "is empty");
    if (head.rows > 1 && head.stride < head.cols) throw invalid_input("head", "has a row stride below its columns");
    for (index_t v = 0; v < head.rows; ++v)
        for (index_t j = 0; j < head.cols; ++j)
            if (!is_finite(head(v, j))) throw invalid_input("head", "is not finite in column " + std::to_string(j), v);
}

/// Eigenvectors of a symmetric matrix, of which the lower triangle is read, by falling eigenvalue; what rounding made
/// negative is 0.
struct falling_eigenvectors {
    Eigen::MatrixXd vectors;
    Eigen::VectorXd values;
    explicit falling_eigenvectors(const Eigen::MatrixXd& gram) {
        const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(gram);
        if (solver.info() != Eigen::Success) throw invalid_input("head", "has no singular values that double can hold");
        vectors = solver.eigenvectors().rowwise().reverse();
        values = solver.eigenvalues().reverse().cwiseMax(0.0);
    }
};

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// What is known of a teacher's hidden states and probabilities: sums over prefixes.
class calibration {
public:
    static constexpr double least_probability = 1e-8, ridge = 1e-6;

    calibration(index_t vocab, index_t width) {
        if (vocab < 1) throw invalid_input("vocab", "must be at least 1");
        if (width < 1) throw invalid_input("width", "must be at least 1");
        squares_ = Eigen::MatrixXd::Zero(width, width);
        probabilities_ = Eigen::VectorXd::Zero(vocab);
    }

    index_t vocab() const { return probabilities_.size(); }
    index_t width() const { return squares_.rows(); }
    index_t rows() const { return rows_; }         ///< that count
    index_t bad_rows() const { return bad_rows_; } ///< that are not finite, or have no mass; left out
    bool soft_capped() const { return soft_capped_; }

    /// Adds the rows that the mask keeps. Of the teacher everything counts that makes its probabilities: head, bias,
    /// soft-cap, temperature.
    /// Throws invalid_input, before anything is added, that names `teacher.…` or `mask`.
    void add(thread_team& threads, const teacher::hidden<float>& t, const row_mask<space::host>& mask = {});

    /// Adds another's rows: in any order, but for rounding.
    void merge(const calibration& other) {
        if (other.vocab() != vocab() || other.width() != width())
            throw invalid_input("calibration", "is of a head " + detail::shape(other.vocab(), other.width()) +
                                                   ", not " + detail::shape(vocab(), width()));
        squares_ += other.squares_;
        probabilities_ += other.probabilities_;
        rows_ += other.rows_;
        bad_rows_ += other.bad_rows_;
        soft_capped_ = soft_capped_ || other.soft_capped_;
    }

    /// E[h hᵀ], not centred and without the ridge. E[(v·h)²] is vᵀ times it times v.
    Eigen::MatrixXd second_moment() const {
        check_rows();
        return Eigen::MatrixXd(squares_.selfadjointView<Eigen::Lower>()) / double(rows_);
    }
    /// p̄: mean, floored, of sum 1.
    Eigen::VectorXd mean_probability() const {
        check_rows();
        const Eigen::VectorXd p = (probabilities_ / double(rows_)).cwiseMax(least_probability);
        return p / p.sum();
    }

private:
    void check_rows() const {
        if (rows_ == 0) throw invalid_input("calibration", "has no rows");
    }

    Eigen::MatrixXd squares_; // the lower triangle
    Eigen::VectorXd probabilities_;
    index_t rows_ = 0, bad_rows_ = 0;
    bool soft_capped_ = false;
};

inline void calibration::add(thread_team& threads, const teacher::hidden<float>& t, const row_mask<space::host>& mask) {
    const index_t v = vocab(), d = width(), n = t.rows();
    if (t.x.cols != d)
        throw invalid_input("teacher.x",
                            "has " + std::to_string(t.x.cols) + " columns for a width of " + std::to_string(d));
    if (t.w.rows != v)
        throw invalid_input("teacher.w",
                            "has " + std::to_string(t.w.rows) + " rows for a vocabulary of " + std::to_string(v));
    t.validate();
    if (!detail::is_finite(t.temperature) || t.temperature < 1e-6F || t.temperature > 1e6F)
        throw invalid_input("teacher.temperature", "must lie between 1e-6 and 1e6");
    if (!mask.empty() && mask.size != n)
        throw invalid_input("mask", "has " + std::to_string(mask.size) + " entries for " + std::to_string(n) + " rows");
    if (n == 0) return;

    constexpr index_t most = 512, ids = 2048;
    const auto affordable = static_cast<index_t>(t.budget / (sizeof(float) * static_cast<std::size_t>(v)));
    const index_t block = std::clamp<index_t>(affordable, 1, std::min(most, n));
    const double per_degree = 1 / double(t.temperature);
    const auto size = [](index_t rows, index_t columns) { return static_cast<std::size_t>(rows * columns); };
    std::vector<float> x(size(block, d)), z(size(block, v));
    std::vector<double> lse(size(block, 1)); // not finite: a bad row, for a logit is NaN or +inf, or there is no mass
    std::vector<index_t> good;
    for (index_t next = 0; next < n;) {
        index_t kept = 0;
        for (; next < n && kept < block; ++next) {
            if (!mask.kept(next)) continue;
            const float* h = t.x.row(next);
            if (std::all_of(h, h + d, [](float y) { return detail::is_finite(y); }))
                std::copy_n(h, d, x.data() + kept++ * d);
            else
                ++bad_rows_;
        }
        product(team_executor{threads}, product_nt(kept, v, d, x.data(), d, t.w.data, t.w.stride, z.data(), v));
        threads.run(kept, [&](index_t r, int) {
            float* const y = z.data() + r * v;
            float top = detail::neg_inf<float>();
            for (index_t i = 0; i < v; ++i) {
                if (t.bias.data != nullptr) y[i] += t.bias[i]; // last, or a large one would round every addition
                if (t.soft_cap > 0) y[i] = t.soft_cap * std::tanh(y[i] / t.soft_cap);
                top = std::max(top, y[i]);
            }
            double sum = 0;
            if (detail::is_finite(top))
                for (index_t i = 0; i < v; ++i) sum += std::exp((double(y[i]) - double(top)) * per_degree);
            lse[size(r, 1)] = double(top) * per_degree + std::log(sum);
        });
        good.clear();
        for (index_t r = 0; r < kept; ++r)
            if (detail::is_finite(lse[size(r, 1)]))
                good.push_back(r);
            else
                ++bad_rows_;
        threads.run((v + ids - 1) / ids, [&](index_t slice, int) {
            for (const index_t r : good)
                for (index_t i = slice * ids; i < std::min(v, (slice + 1) * ids); ++i)
                    probabilities_[i] += std::exp(double(z[size(r, v) + size(i, 1)]) * per_degree - lse[size(r, 1)]);
        });
        detail::add_gram(
            threads, std::ssize(good),
            [&](index_t i, double* to) { std::copy_n(x.data() + good[size(i, 1)] * d, d, to); }, squares_);
        rows_ += std::ssize(good);
    }
    soft_capped_ = soft_capped_ || t.soft_cap > 0;
}

/// D directions, best first.
struct head_directions {
    Eigen::MatrixXd encode; ///< (D,D): row i makes the i-th number of a code from h; times `decode` it is the identity
    Eigen::MatrixXd decode; ///< (D,D): column i is what the head sees of that number
    Eigen::VectorXd energy; ///< (D): what leaving a direction out costs, as said above; falling
    Eigen::VectorXd centre; ///< (D): w̄, what is taken from every row of the head first; of size 0: nothing

    /// The cost, in the sense of its energies, of a codec of rank r.
    double energy_left_out(index_t r) const { return energy.tail(energy.size() - r).sum(); }
};

/// Throws invalid_input that names the head and the row of what is not finite; the others below likewise.
inline head_directions truncated_svd(thread_team& threads, matrix_view<const float> head) {
    detail::check_head_numbers(head);
    Eigen::MatrixXd gram = Eigen::MatrixXd::Zero(head.cols, head.cols);
    detail::add_gram(
        threads, head.rows, [&](index_t v, double* to) { std::copy_n(head.row(v), head.cols, to); }, gram);
    detail::falling_eigenvectors found(gram);
    head_directions to;
    to.encode = found.vectors.transpose();
    to.decode = std::move(found.vectors);
    to.energy = std::move(found.values);
    return to;
}

/// The directions of truncated_svd, in the order of what they bring to the logits of the states that were seen.
inline head_directions importance_svd(const head_directions& truncated, const calibration& seen) {
    const index_t d = truncated.energy.size();
    if (seen.width() != d)
        throw invalid_input("calibration",
                            "is of states of width " + std::to_string(seen.width()) + ", not " + std::to_string(d));
    if (truncated.centre.size() != 0) throw invalid_input("truncated", "is not of truncated_svd");
    const Eigen::VectorXd along =
        (truncated.encode * seen.second_moment()).cwiseProduct(truncated.encode).rowwise().sum();
    const Eigen::VectorXd importance = truncated.energy.cwiseProduct(along.cwiseMax(0.0));
    std::vector<index_t> order(static_cast<std::size_t>(d));
    std::iota(order.begin(), order.end(), index_t{0});
    std::sort(order.begin(), order.end(), [&](index_t a, index_t b) {
        return importance[a] != importance[b] ? importance[a] > importance[b] : a < b;
    });
    head_directions to{Eigen::MatrixXd(d, d), Eigen::MatrixXd(d, d), Eigen::VectorXd(d), {}};
    for (index_t i = 0; i < d; ++i) {
        const index_t from = order[static_cast<std::size_t>(i)];
        to.encode.row(i) = truncated.encode.row(from);
        to.decode.col(i) = truncated.decode.col(from);
        to.energy[i] = importance[from];
    }
    return to;
}

/// Directions of least mean squared error of the logits under p̄, from `seen`, which holds C, p̄ and w̄ of this head.
/// Throws invalid_input: `head` with a number that is none, `calibration` of another head.
inline head_directions reweighted_svd(thread_team& threads, matrix_view<const float> head, const calibration& seen) {
    detail::check_head_numbers(head);
    const index_t d = head.cols;
    if (seen.vocab() != head.rows || seen.width() != d)
        throw invalid_input("calibration", "is of a head " + detail::shape(seen.vocab(), seen.width()) + ", not " +
                                               detail::shape(head.rows, d));
    const Eigen::VectorXd p = seen.mean_probability();
    head_directions to;
    if (!seen.soft_capped()) {
        to.centre = Eigen::VectorXd::Zero(d);
        for (index_t v = 0; v < head.rows; ++v)
            for (index_t j = 0; j < d; ++j) to.centre[j] += p[v] * double(head(v, j));
    }
    Eigen::MatrixXd root = seen.second_moment();
    const double trace = root.trace();
    if (!(trace > 0)) throw invalid_input("calibration", "has hidden states of zeros alone");
    root.diagonal().array() += calibration::ridge * trace / double(d);
    const Eigen::LLT<Eigen::MatrixXd> cholesky(root);
    if (cholesky.info() != Eigen::Success) throw invalid_input("calibration", "has a moment that is not positive");
    root = cholesky.matrixL();

    Eigen::MatrixXd gram = Eigen::MatrixXd::Zero(d, d); // of diag(√p̄) (W - 1 w̄ᵀ)
    detail::add_gram(
        threads, head.rows,
        [&](index_t v, double* y) {
            const double weight = std::sqrt(p[v]);
            for (index_t j = 0; j < d; ++j)
                y[j] = weight * (double(head(v, j)) - (to.centre.size() == 0 ? 0 : to.centre[j]));
        },
        gram);
    gram = Eigen::MatrixXd(gram.selfadjointView<Eigen::Lower>()) * root;
    gram = root.transpose() * gram;
    detail::falling_eigenvectors found(gram);
    to.encode = cholesky.matrixU().solve(found.vectors).transpose(); // Vᵀ L⁻¹ = (L⁻ᵀ V)ᵀ
    to.decode = root * found.vectors;
    to.energy = std::move(found.values);
    return to;
}

/// The first `rank` of the directions; `head` is that which they are of.
inline codec make_codec(thread_team& threads, const head_directions& directions, matrix_view<const float> head,
                        index_t rank) {
    const index_t d = directions.energy.size();
    codec::check_rank(rank, d);
    if (head.cols != d)
        throw invalid_input("head",
                            "has " + std::to_string(head.cols) + " columns for directions of " + std::to_string(d));
    detail::check_head_numbers(head);
    codec c{head.rows, d, rank, {}, {}};
    c.encoder.resize(static_cast<std::size_t>(rank * d));
    for (index_t i = 0; i < rank; ++i)
        for (index_t j = 0; j < d; ++j)
            c.encoder[static_cast<std::size_t>(i * d + j)] = static_cast<float>(directions.encode(i, j));
    c.decoder.resize(static_cast<std::size_t>(head.rows * rank));
    detail::project_head(threads, head, directions.centre, directions.decode.leftCols(rank), c.decoder.data());
    return c;
}

} // namespace OPD_ISA

} // namespace opd
