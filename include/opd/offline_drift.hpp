// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How far the policy that learns, p, has moved from pi_ref, the policy that drew an offline data set, and what that
// allows the offline gradient to be off by.
//
//   opd::offline_drift drift;                             // add() every batch, merge() threads and ranks
//   drift.add(log_p, log_ref, offsets, mask, log_q);
//   drift.ratio_mean(), drift.chi_squared(), drift.effective_share()        of tokens
//   drift.sequence_chi_squared(), drift.sequence_effective_share()          of whole sequences
//   drift.gradient_gap_bound()                                              theorem 3.5
//
//   token     w = p/pi_ref               mean, standard deviation, chi-squared, K1, K3, effective sample size
//   sequence  W = Π w, in logs           the same, and mean, deviation and extremes of log W
//   chi-squared = E[(w - 1)²]            = E[w²] - 1 as E[w] = 1 under pi_ref. It cannot be negative, and with it the
//                                        bound holds for the gradients of the sample itself; diagnostics: mean w² - 1
//   K1 = -log w, K3 = w - 1 - log w      both KL(pi_ref‖p) of a token, in nats
//   bound     |∇J_on - ∇J_off| ≤ G σ_A √chi²(p‖pi_ref)   of sequences, σ_A² = E[(Σ_t |A_t|)²], A = log q - log p
//
// Means are over tokens or sequences; standard errors are by sequences, as tokens of one sequence are not independent
// (a ratio of sums, linearised). Expectations are those of fresh samples of pi_ref: sums of a sequence's tokens are
// unbiased, means over tokens too where sequences are of one length, else to order 1/sequences. On the set that p was
// trained on, mean w leaves 1: that is drift, or memory, not an error of the data.
//
// Source: Lightning OPD (arXiv 2604.13010), theorem 3.5. As printed, with σ_A² = E[(Σ A_t)²], the bound does not hold:
// advantages of opposite sign cancel in the sum, their gradients at different prefixes do not.
//
// Nothing overflows: log w and log W count in w and W up to 150 nats, those beyond are counted as `saturated`; log W
// itself and K1 are exact. Bad numbers are counted and not summed. On the host, in double.
#pragma once

#include <cmath>
#include <cstdio>
#include <numbers>
#include <string>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/view.hpp"

namespace opd {

/// Mean of x over tokens, Σ_s X_s / Σ_s n_s, with its standard error by clusters (sequences): X_s is the sum over the
/// n_s tokens of cluster s. With n_s = 1 it is the usual mean and error.
struct clustered_mean {
    double clusters = 0, count = 0, sum = 0;
    double squares = 0, cross = 0, count_squares = 0; ///< Σ X², Σ X n, Σ n²

    void add(double x, double n = 1) {
        ++clusters, count += n, sum += x;
        squares += x * x, cross += x * n, count_squares += n * n;
    }
    void merge(const clustered_mean& o) {
        clusters += o.clusters, count += o.count, sum += o.sum;
        squares += o.squares, cross += o.cross, count_squares += o.count_squares;
    }
    /// 0 of no tokens.
    double mean() const { return count > 0 ? sum / count : 0; }
    /// √(S/(S-1) Σ_s (X_s - mean·n_s)²) / Σ n_s; NaN of fewer than two clusters.
    double error() const {
        if (clusters < 2) return detail::quiet_nan<double>();
        const double m = mean(), left = squares - 2 * m * cross + m * m * count_squares;
        return std::sqrt((left > 0 ? left : 0) * clusters / (clusters - 1)) / count;
    }
};

/// G·σ_A·√chi², the bound of Lightning OPD's theorem 3.5 on |∇J_on - ∇J_off| for the gradients
/// Σ_t A_t ∇log p(a_t|s_t), sequences from p or from pi_ref. `sigma_a`: √E[(Σ_t |A_t|)²] under pi_ref; `chi_squared`:
/// of whole sequences; `score_norm`: G ≥ |∇log p(a|s)|. √2 is that of logits at one prefix; with another
/// parametrisation it is another number. Throws invalid_input for a negative number or NaN.
inline double gradient_gap_bound(double sigma_a, double chi_squared, double score_norm = std::numbers::sqrt2) {
    const auto check = [](const char* name, double x) {
        if (detail::is_nan(x) || x < 0) throw invalid_input(name, "must be at least 0");
    };
    check("sigma_a", sigma_a), check("chi_squared", chi_squared), check("score_norm", score_norm);
    return sigma_a == 0 || chi_squared == 0 || score_norm == 0 ? 0 : score_norm * sigma_a * std::sqrt(chi_squared);
}

/// Sums over an offline data set, and what follows from them.
struct offline_drift {
    static constexpr double most_nats = 150; ///< beyond it w and W are e^150: their fourth powers are finite

    double clip = 0; ///< |A| ≤ clip in σ_A, as in `lightning(clip)`; 0: no clip. Set it before add

    index_t tokens = 0;     ///< kept, good
    index_t bad_tokens = 0; ///< NaN, +inf, above 1e-3, below -9000; pi_ref of no mass at its own token: not summed
    index_t first_bad_token = -1;    ///< its row in the first batch that had one
    index_t no_mass = 0;             ///< tokens with p = 0: w = 0; not in K1 and K3, where they are infinite
    index_t saturated = 0;           ///< tokens and sequences with log w or log W above 150
    index_t sequences = 0;           ///< with a kept token and no bad one
    index_t bad_sequences = 0;       ///< with a bad token: their good tokens count, W does not
    index_t no_mass_sequences = 0;   ///< W = 0: not in log W
    index_t infinite_advantages = 0; ///< sequences with an infinite A that no clip bounds

    clustered_mean ratio = {}, ratio_square = {}; ///< of w - 1 and (w - 1)² over tokens
    clustered_mean k1_mean = {}, k3_mean = {};
    clustered_mean sequence_ratio = {}, sequence_ratio_square = {};   ///< of W - 1 and (W - 1)²
    clustered_mean advantage_square = {};                             ///< of (Σ_t |A_t|)²
    double log_ratios = 0, log_ratio_mean = 0, log_ratio_squares = 0; ///< of log W: count, mean, squares about it
    double log_ratio_least = 0, log_ratio_most = 0;

    /// A batch of whole sequences. Log-probs of the data set's tokens (N), of any storage type: under p now, under
    /// pi_ref as drawn, and optionally the teacher's (for σ_A); offsets (S+1), mask (N): tokens that it leaves out, a
    /// prompt's or a tool's, are no step of the policy. The end-of-sequence token is one. Sequences without a kept
    /// token are passed over. Throws invalid_input for sizes that differ, no offsets, and offsets that lead out of the
    /// rows; then nothing is added.
    template <class P, class R, class Q = const double>
    void add(vector_view<P> log_p, vector_view<R> log_ref, row_offsets<> offsets, row_mask<> mask = {},
             vector_view<Q> log_q = {}) {
        const index_t n = log_p.size;
        detail::check_vector("log_p", log_p, -1);
        if (log_ref.size != n || (log_ref.empty() && n > 0))
            throw invalid_input("log_ref",
                                "has " + std::to_string(log_ref.size) + " entries, not " + std::to_string(n));
        detail::check_vector("log_ref", log_ref, n);
        detail::check_vector("mask", mask, n);
        detail::check_vector("log_q", log_q, n);
        if (detail::is_nan(clip) || clip < 0) throw invalid_input("offline_drift.clip", "must be at least 0");
        if (offsets.empty() && n > 0) throw invalid_input("offsets", "are left out");
        for (index_t s = 0; s + 1 < offsets.size; ++s)
            if (offsets[s] < 0 || offsets[s + 1] < offsets[s] || offsets[s + 1] > n)
                throw invalid_input("offsets",
                                    "from " + std::to_string(offsets[s]) + " to " + std::to_string(offsets[s + 1]) +
                                        " of " + std::to_string(n) + " rows",
                                    s);
        for (index_t s = 0; s + 1 < offsets.size; ++s) {
            one_sequence x;
            for (index_t r = offsets[s]; r < offsets[s + 1]; ++r) {
                if (!mask.kept(r)) continue;
                const double p = detail::load_log(log_p[r]), ref = detail::load_log(log_ref[r]);
                const double q = log_q.empty() ? 0 : detail::load_log(log_q[r]);
                if (is_bad(p) || is_bad(ref) || detail::is_neg_inf(ref) || is_bad(q)) {
                    if (bad_tokens++ == 0 && first_bad_token < 0) first_bad_token = r;
                    ++x.bad;
                } else {
                    add_token(x, p, ref, q, !log_q.empty());
                }
            }
            add_sequence(x, !log_q.empty());
        }
    }

    /// Sums of other batches, threads or ranks; the clip is this one's.
    void merge(const offline_drift& o) {
        if (first_bad_token < 0) first_bad_token = o.first_bad_token;
        tokens += o.tokens, bad_tokens += o.bad_tokens, no_mass += o.no_mass, saturated += o.saturated;
        sequences += o.sequences, bad_sequences += o.bad_sequences, no_mass_sequences += o.no_mass_sequences;
        infinite_advantages += o.infinite_advantages;
        ratio.merge(o.ratio), ratio_square.merge(o.ratio_square), k1_mean.merge(o.k1_mean), k3_mean.merge(o.k3_mean);
        sequence_ratio.merge(o.sequence_ratio), sequence_ratio_square.merge(o.sequence_ratio_square);
        advantage_square.merge(o.advantage_square);
        if (o.log_ratios == 0) return;
        const double all = log_ratios + o.log_ratios, off = o.log_ratio_mean - log_ratio_mean; // Chan et al. 1979
        log_ratio_least = log_ratios > 0 && log_ratio_least < o.log_ratio_least ? log_ratio_least : o.log_ratio_least;
        log_ratio_most = log_ratios > 0 && log_ratio_most > o.log_ratio_most ? log_ratio_most : o.log_ratio_most;
        log_ratio_squares += o.log_ratio_squares + off * off * log_ratios * o.log_ratios / all;
        log_ratio_mean += off * o.log_ratios / all, log_ratios = all;
    }

    /// Of tokens. Errors are NaN of fewer than two sequences, as everywhere here.
    double ratio_mean() const { return 1 + ratio.mean(); }
    double ratio_mean_error() const { return ratio.error(); }
    double ratio_deviation() const { return deviation(ratio, ratio_square); }
    double chi_squared() const { return ratio_square.mean(); }
    double chi_squared_error() const { return ratio_square.error(); }
    double k1() const { return k1_mean.mean(); }
    double k1_error() const { return k1_mean.error(); }
    double k3() const { return k3_mean.mean(); }
    double k3_error() const { return k3_mean.error(); }
    double effective_sample_size() const { return effective(ratio, ratio_square); } ///< (Σ w)² / Σ w²
    double effective_share() const { return tokens ? effective_sample_size() / double(tokens) : 0; }

    /// Of sequences.
    double sequence_ratio_mean() const { return 1 + sequence_ratio.mean(); }
    double sequence_ratio_mean_error() const { return sequence_ratio.error(); }
    double sequence_ratio_deviation() const { return deviation(sequence_ratio, sequence_ratio_square); }
    double sequence_chi_squared() const { return sequence_ratio_square.mean(); }
    double sequence_chi_squared_error() const { return sequence_ratio_square.error(); }
    double sequence_effective_sample_size() const { return effective(sequence_ratio, sequence_ratio_square); }
    double sequence_effective_share() const {
        return sequences ? sequence_effective_sample_size() / double(sequences) : 0;
    }
    double log_ratio_deviation() const { return log_ratios > 1 ? std::sqrt(log_ratio_squares / (log_ratios - 1)) : 0; }

    /// √E[(Σ_t |A_t|)²], from sequences added with log_q; infinite if an unclipped A was.
    double sigma_a() const {
        return infinite_advantages > 0 ? -detail::neg_inf<double>() : std::sqrt(advantage_square.mean());
    }
    /// gradient_gap_bound of these numbers. An estimate: chi-squared of few sequences with a heavy tail is too small,
    /// see its error and sequence_effective_share(). Throws invalid_input where no sequence came with log_q.
    double gradient_gap_bound(double score_norm = std::numbers::sqrt2) const {
        if (advantage_square.count == 0 && infinite_advantages == 0)
            throw invalid_input("log_q", "was never given: the bound needs the advantages");
        return opd::gradient_gap_bound(sigma_a(), sequence_chi_squared(), score_norm);
    }
    /// On fresh samples of pi_ref: mean w more than 5 standard errors from 1, so log_ref is not the law that drew them.
    bool reference_mismatch() const { return ratio.clusters >= 2 && std::abs(ratio.mean()) > 5 * ratio.error() + 1e-5; }

private:
    struct one_sequence {
        double good = 0, bad = 0, with_mass = 0;
        double ratio = 0, square = 0, k1 = 0, k3 = 0, advantage = 0; // sums over its good tokens; of |A|
        bool infinite = false;
    };
    static bool is_bad(double x) {
        return detail::is_nan(x) || x > 1e-3 || (x < -9000 && !detail::is_neg_inf(x)); // placeholders of servers
    }
    double cut(double nats) {
        if (!(nats > most_nats)) return nats;
        ++saturated;
        return most_nats;
    }
    void add_token(one_sequence& x, double p, double ref, double q, bool has_q) {
        ++tokens, ++x.good;
        const bool mass = !detail::is_neg_inf(p);
        const double log_w = mass ? p - ref : 0, off = mass ? std::expm1(cut(log_w)) : -1; // w - 1, right near 1
        x.ratio += off, x.square += off * off;
        if (mass)
            ++x.with_mass, x.k1 -= log_w, x.k3 += off - log_w;
        else
            ++no_mass;
        if (!has_q) return;
        const bool taught = !detail::is_neg_inf(q);
        if (mass != taught && !(clip > 0)) {
            x.infinite = true;
        } else if (mass || taught) {
            const double size = mass && taught ? std::abs(q - p) : clip;
            x.advantage += clip > 0 && size > clip ? clip : size;
        }
    }
    void add_sequence(const one_sequence& x, bool has_q) {
        if (x.good > 0) {
            ratio.add(x.ratio, x.good), ratio_square.add(x.square, x.good);
            if (x.with_mass > 0) k1_mean.add(x.k1, x.with_mass), k3_mean.add(x.k3, x.with_mass);
        }
        if (x.bad > 0) {
            ++bad_sequences;
            return;
        }
        if (x.good == 0) return;
        ++sequences;
        const bool mass = x.with_mass == x.good;
        const double log_ratio = -x.k1, off = mass ? std::expm1(cut(log_ratio)) : -1;
        sequence_ratio.add(off), sequence_ratio_square.add(off * off);
        if (mass) {
            log_ratio_least = log_ratios > 0 && log_ratio_least < log_ratio ? log_ratio_least : log_ratio;
            log_ratio_most = log_ratios > 0 && log_ratio_most > log_ratio ? log_ratio_most : log_ratio;
            const double from_mean = log_ratio - log_ratio_mean;
            log_ratio_mean += from_mean / ++log_ratios, log_ratio_squares += from_mean * (log_ratio - log_ratio_mean);
        } else {
            ++no_mass_sequences;
        }
        if (!has_q) return;
        if (x.infinite)
            ++infinite_advantages;
        else
            advantage_square.add(x.advantage * x.advantage);
    }
    static double deviation(const clustered_mean& off, const clustered_mean& square) {
        const double variance = square.mean() - off.mean() * off.mean();
        return variance > 0 && off.count > 1 ? std::sqrt(variance * off.count / (off.count - 1)) : 0;
    }
    static double effective(const clustered_mean& off, const clustered_mean& square) {
        const double sum = off.count + off.sum, squares = off.count + 2 * off.sum + square.sum;
        return squares > 0 ? sum * sum / squares : 0;
    }
};

/// One line, for a log.
inline std::string to_string(const offline_drift& d) {
    char line[320];
    std::snprintf(line, sizeof line,
                  "%lld tokens: mean ratio %.4g ± %.2g, chi-squared %.3g ± %.2g, K3 %.3g nats, effective share %.3g; "
                  "%lld sequences: log ratio %.3g ± %.3g, effective share %.3g",
                  static_cast<long long>(d.tokens), d.ratio_mean(), d.ratio_mean_error(), d.chi_squared(),
                  d.chi_squared_error(), d.k3(), d.effective_share(), static_cast<long long>(d.sequences),
                  d.log_ratio_mean, d.log_ratio_deviation(), d.sequence_effective_share());
    std::string s = line;
    const auto note = [&s](index_t n, const char* what) {
        if (n > 0) s.append("; ").append(std::to_string(n)).append(what);
    };
    note(d.bad_tokens, " bad tokens, left out"), note(d.no_mass, " tokens of which the student has no mass");
    note(d.saturated, " ratios saturated at e^150"), note(d.infinite_advantages, " sequences of infinite advantage");
    return s;
}

} // namespace opd
