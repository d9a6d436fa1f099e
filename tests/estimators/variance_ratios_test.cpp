// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// What m draws a token leave of the variance of one, by exact enumeration: AsyncOPD's R_local and R_seq (eq. 16, 17) of
// the loss that mc makes of m draws. Both are 1/m while the path of prefixes is fixed, as the paper's text has it. Over
// sequences with paths of their own R_seq is (B + W/m)/(B + W): B, the variance of the paths' mean KL, is out of reach
// of draws. Where the path follows one of the m draws, as a rollout's own token, a covariance of that draw and what
// comes after joins W.
#include "support/drawn.hpp"

#include <cmath>
#include <vector>

#include <doctest/doctest.h>
#include <opd/estimators/sampled.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t vocab = 3;
constexpr std::size_t prefixes = 3;

/// A loss and how probable it is.
struct outcome {
    double probability, loss;
    std::int64_t first; ///< of the draws that made it
};
struct moments_of {
    double mean = 0, square = 0;
    void add(double probability, double x) { mean += probability * x, square += probability * x * x; }
    double variance() const { return square - mean * mean; }
};

std::vector<policies> world() {
    std::vector<policies> all;
    for (std::size_t s = 0; s < prefixes; ++s) all.emplace_back(vocab, 11 + s, true);
    return all;
}
/// All that m draws at a prefix can say.
std::vector<outcome> outcomes(const policies& at, index_t m) {
    std::vector<outcome> all;
    for_each_tuple(vocab, m, [&](const std::vector<std::int64_t>& ids) {
        double probability = 1;
        for (const auto id : ids) probability *= std::exp(at.log_mu[std::size_t(id)]);
        all.push_back({probability, drawn_row(at, law::stale, ids, mc{reverse_kl{}}).loss, ids[0]});
    });
    return all;
}
moments_of local(const policies& at, index_t m) {
    moments_of x;
    for (const outcome& o : outcomes(at, m)) x.add(o.probability, o.loss);
    return x;
}
/// Where a token leads.
std::size_t next(std::size_t s, std::int64_t token) { return (2 * s + std::size_t(token)) % prefixes; }

/// Variance of the mean of two prefixes' losses. The first prefix is any with the same probability, or `start`; the
/// second is where a token of mu's leads: one of its own, or (`own`) the first of the draws; or `then`.
double of_sequences(const std::vector<policies>& w, index_t m, bool own, int start = -1, int then = -1) {
    moments_of x;
    std::vector<std::vector<outcome>> at;
    for (const policies& p : w) at.push_back(outcomes(p, m));
    for (std::size_t s = 0; s < prefixes; ++s) {
        if (start >= 0 && s != std::size_t(start)) continue;
        const double of_start = start >= 0 ? 1 : 1 / double(prefixes);
        for (const outcome& a : at[s])
            for (std::int64_t token = 0; token < vocab; ++token) {
                if (own && token != a.first) continue;
                const double leads = own ? 1 : std::exp(w[s].log_mu[std::size_t(token)]);
                for (const outcome& b : at[then >= 0 ? std::size_t(then) : next(s, token)])
                    x.add(of_start * a.probability * leads * b.probability, (a.loss + b.loss) / 2);
            }
    }
    return x.variance();
}

} // namespace

TEST_CASE("R_local is 1/m, and the gradient's variance falls likewise") {
    const auto w = world();
    double one = 0;
    for (const policies& p : w) one += local(p, 1).variance();
    for (const index_t m : {2, 3, 4}) {
        double all = 0;
        for (const policies& p : w) {
            const moments_of x = local(p, m);
            all += x.variance();
            CHECK(std::abs(x.mean - p.kl(p.log_q)) < 1e-10);
        }
        CHECK(std::abs(all / one - 1 / double(m)) < 1e-10);
    }
    for (const policies& p : w) {
        const auto spread = [&](index_t m) {
            const drawn_mean mean = drawn_expectation(p, law::stale, m, mc{reverse_kl{}});
            double of_mean = 0;
            for (const double g : mean.dz) of_mean += g * g;
            return mean.second_moment - of_mean;
        };
        CHECK(std::abs(spread(3) / spread(1) - 1. / 3) < 1e-10);
    }
}

TEST_CASE("R_seq is 1/m where the path is fixed") {
    const auto w = world();
    for (int s = 0; s < int(prefixes); ++s)
        for (int t = 0; t < int(prefixes); ++t)
            for (const index_t m : {2, 3})
                CHECK(std::abs(of_sequences(w, m, false, s, t) / of_sequences(w, 1, false, s, t) - 1 / double(m)) <
                      1e-10);
}

TEST_CASE("over sequences R_seq has a part that no draw lowers") {
    const auto w = world();
    moments_of path; // mean KL
    double draws = 0, with_next = 0;
    for (std::size_t s = 0; s < prefixes; ++s)
        for (std::int64_t token = 0; token < vocab; ++token) {
            const policies &a = w[s], &b = w[next(s, token)];
            const auto v = std::size_t(token);
            const double mu = std::exp(a.log_mu[v]), probability = mu / double(prefixes);
            path.add(probability, (a.kl(a.log_q) + b.kl(b.log_q)) / 2);
            draws += probability * (local(a, 1).variance() + local(b, 1).variance()) / 4;
            const double one = std::exp(a.log_p[v] - a.log_mu[v]) * (a.log_p[v] - a.log_q[v]); // the draw's loss
            with_next += 2 * probability * (one - a.kl(a.log_q)) * b.kl(b.log_q) / 4;
        }
    const double between = path.variance();
    CHECK(between > 0.01 * draws);
    for (const index_t m : {1, 2, 3}) {
        CHECK(std::abs(of_sequences(w, m, false) - (between + draws / double(m))) < 1e-10);
        CHECK(std::abs(of_sequences(w, m, true) - (between + (draws + with_next) / double(m))) < 1e-10);
    }
    CHECK(of_sequences(w, 3, false) / of_sequences(w, 1, false) > 1. / 3 + 1e-3);
    CHECK(std::abs(with_next) > 1e-3 * draws);
}
