// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast
// optimise: always
//
// Accuracy of the CPU backend's float path at V = 151,936 against float64, on the rows where plain float sums go wrong:
//
//   forward and reverse KL   value within 1e-7·max(1, KL)
//   other divergences        value within 1e-6·max(1, value)
//   gradients of all         within 1e-6·max|g| + 1e-9      (total variation: entries at its kink apart)
//
// Two of these are not reached everywhere, and are held to what is: without fused multiply-add the value of a KL comes
// within 1.2e-7; gradients of chi-squared and of the skewed divergences, whose terms are powers and mixtures of ratios
// of e^20 on N(0,3) rows, within 1.6e-6·max|g|.
//
// Also bfloat16 gradients near p = q, whose relative error stays below 1e-2.
#include "support/accuracy.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/traits.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t vocab = 151936;
#ifdef __FMA__
constexpr double kl_bound = 1e-7;
#else
constexpr double kl_bound = 1.2e-7;
#endif
template <class D>
constexpr double gradient_bound =
    std::is_same_v<D, chi_squared> || std::is_same_v<D, skew_forward_kl> || std::is_same_v<D, skew_reverse_kl> ? 1.6e-6
                                                                                                               : 1e-6;
#ifdef OPD_TEST_WHOLE
constexpr std::uint64_t seeds[] = {20250601, 7, 977};
#else
constexpr std::uint64_t seeds[] = {20250601};
#endif

struct pair_of_rows {
    std::string name;
    std::vector<float> z, y; // (V)
};

/// f(u, z, y) fills a row in double.
template <class Fill>
pair_of_rows row(const std::string& name, std::uint64_t seed, Fill f) {
    numbers u(seed);
    std::vector<double> z(vocab), y(vocab);
    f(u, z, y);
    return {name, {z.begin(), z.end()}, {y.begin(), y.end()}};
}

void independent(numbers& u, std::vector<double>& z, std::vector<double>& y) {
    for (std::size_t v = 0; v < z.size(); ++v) z[v] = 3 * u.normal(), y[v] = 3 * u.normal();
}

std::vector<pair_of_rows> rows(std::uint64_t seed) {
    using doubles = std::vector<double>;
    std::vector<pair_of_rows> all;
    all.push_back(row("N(0,3)", seed, independent));
    all.push_back(row("two models with KL 5e-7", seed, [](numbers& u, doubles& z, doubles& y) {
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = 3 * u.normal(), y[v] = z[v] + 1e-3 * u.normal();
    }));
    all.push_back(row("Zipf-peaked", seed, [](numbers& u, doubles& z, doubles& y) {
        std::vector<std::size_t> rank(z.size());
        std::iota(rank.begin(), rank.end(), std::size_t{0});
        for (std::size_t v = rank.size() - 1; v > 0; --v)
            std::swap(rank[v], rank[std::size_t(u.below(index_t(v) + 1))]);
        for (std::size_t v = 0; v < z.size(); ++v) {
            const double zipf = -1.5 * std::log(double(rank[v]) + 1);
            z[v] = zipf + 0.5 * u.normal(), y[v] = zipf + 0.5 * u.normal();
        }
    }));
    all.push_back(row("very peaked, differences of 0.01", seed, [](numbers& u, doubles& z, doubles& y) {
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = u.normal();
        z[std::size_t(u.below(vocab))] += 25;
        z[std::size_t(u.below(vocab))] += 20;
        for (std::size_t v = 0; v < z.size(); ++v) y[v] = z[v] + 0.01 * u.normal();
    }));
    all.push_back(row("disagreeing top tokens", seed, [](numbers& u, doubles& z, doubles& y) {
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = u.normal(), y[v] = z[v] + 0.3 * u.normal();
        const auto a = std::size_t(u.below(vocab)), b = (a + vocab / 2) % vocab;
        z[a] = 16, y[a] = 11;
        z[b] = 12, y[b] = 15;
    }));
    all.push_back(row("two heavy tokens on both sides", seed, [](numbers& u, doubles& z, doubles& y) {
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = u.normal(), y[v] = z[v] + 0.3 * u.normal();
        const auto a = std::size_t(u.below(vocab)), b = (a + vocab / 2) % vocab;
        z[a] = 16, y[a] = 13;
        z[b] = 14, y[b] = 15;
    }));
    const double offsets[][2] = {{60, 60}, {60, 0}, {60, -60}, {1e4, 0}};
    for (const auto& o : offsets)
        all.push_back(row("offsets (" + std::to_string(int(o[0])) + "," + std::to_string(int(o[1])) + ")", seed,
                          [&](numbers& u, doubles& z, doubles& y) {
                              independent(u, z, y);
                              for (std::size_t v = 0; v < z.size(); ++v) z[v] += o[0], y[v] += o[1];
                          }));
    return all;
}

/// Largest |error|/bound of the gradient. Where |log p - log q| < `kink` the entry is passed over; where it is below
/// 5e-8, the error of a normaliser, its sign is anybody's, and through Σ c the others move by their share of that
/// entry.
double excess(const std::vector<float>& got, const std::vector<double>& want, const std::vector<double>& log_ratio,
              double kink, double bound) {
    double top = 0, e = 0, undecided = 0;
    for (const double g : want) top = std::max(top, std::abs(g));
    if (kink > 0)
        for (std::size_t v = 0; v < got.size(); ++v) // total variation: |g| = p (1 - Σ c) or p Σ c
            if (std::abs(log_ratio[v]) < 5e-8) undecided += std::max(std::abs(double(got[v])), std::abs(want[v]));
    for (std::size_t v = 0; v < got.size(); ++v) {
        if (!detail::is_finite(got[v])) return 1e300;
        if (std::abs(log_ratio[v]) >= kink)
            e = std::max(e, std::abs(got[v] - want[v]) / ((bound + 4 * undecided) * top + 1e-9));
    }
    return e;
}

std::vector<double> log_ratio_of(const pair_of_rows& r) {
    std::vector<double> lp, lq;
    double lse = 0;
    naive_backend::log_softmax(r.z.data(), vocab, 1, nullptr, &lse, lp);
    naive_backend::log_softmax(r.y.data(), vocab, 1, nullptr, &lse, lq);
    for (std::size_t v = 0; v < lp.size(); ++v) lp[v] -= lq[v];
    return lp;
}

} // namespace

TEST_CASE("value and gradient at V = 151,936") {
    cpu_backend fast;
    naive_backend slow;
    std::vector<float> dz(vocab);
    std::vector<double> want(vocab);
    for (const std::uint64_t seed : seeds)
        for (const pair_of_rows& r : rows(seed)) {
            const std::vector<double> log_ratio = log_ratio_of(r);
            for_each_divergence_type([&](const std::string& name, auto d) {
                using D = decltype(d);
                const teacher::dense t{view(r.y.data(), 1, vocab)};
                const auto got =
                    evaluate(fast, student::logits{view(r.z.data(), 1, vocab), view(dz.data(), 1, vocab)}, t, d);
                const auto ref =
                    evaluate(slow, student::logits{view(r.z.data(), 1, vocab), view(want.data(), 1, vocab)}, t, d);
                const auto value_only = evaluate(fast, student::logits{view(r.z.data(), 1, vocab)}, t, d);
                INFO(name << " on " << r.name << ", seed " << seed);
                const bool kl = std::is_same_v<D, reverse_kl> || std::is_same_v<D, forward_kl>;
                const double error =
                    std::abs(got.loss - ref.loss) / ((kl ? kl_bound : 1e-6) * std::max(1.0, std::abs(ref.loss)));
                const double gradient =
                    excess(dz, want, log_ratio, std::is_same_v<D, total_variation> ? 1e-5 : 0, gradient_bound<D>);
                CAPTURE(ref.loss);
                CHECK(error <= 1);
                CHECK(gradient <= 1);
                CHECK(std::abs(value_only.loss - got.loss) <= 1e-7 * std::max(1.0, std::abs(got.loss)));
            });
        }
}

TEST_CASE("forward KL of a diffuse student under a teacher that is sure of the student's top token") {
    cpu_backend fast;
    std::vector<float> z(vocab), y(vocab), dz(vocab), compact(vocab), ids_log_q;
    std::vector<double> want(vocab);
    for (const double width : {0.0, 0.02, 0.2, 1.0})
        for (const double mass : {0.9, 0.9999})
            for (const index_t n : {index_t{700}, vocab}) { // as a support of 700 ids too
                numbers u(17);
                for (float& x : z) x = float(width * (2 * u.uniform() - 1));
                std::fill(y.begin(), y.end(), 0.F);
                const auto top = std::size_t(std::max_element(z.begin(), z.begin() + n) - z.begin());
                z[top] += 0.01F; // also among equals
                y[top] = float(std::log(mass / (1 - mass) * double(n - 1)));
                double sum_p = 0, sum_q = 0, top_g = 0, worst = 0, square = 0, size = 0, total = 0, absolute = 0;
                const auto lp = [&](std::size_t v) { return double(z[v]) - double(z[top]); };
                const auto lq = [&](std::size_t v) { return double(y[v]) - double(y[top]); };
                for (std::size_t v = 0; v < std::size_t(n); ++v) sum_p += std::exp(lp(v)), sum_q += std::exp(lq(v));
                for (std::size_t v = 0; v < std::size_t(n); ++v)
                    want[v] = std::exp(lp(v)) / sum_p - std::exp(lq(v)) / sum_q,
                    top_g = std::max(top_g, std::abs(want[v]));
                const auto check = [&] {
                    worst = square = size = total = absolute = 0;
                    for (std::size_t v = 0; v < std::size_t(n); ++v) {
                        const double e = double(dz[v]) - want[v];
                        worst = std::max(worst, std::abs(e)), square += e * e, size += want[v] * want[v];
                        total += double(dz[v]), absolute += std::abs(double(dz[v]));
                    }
                    CAPTURE(width);
                    CAPTURE(mass);
                    CAPTURE(n);
                    CHECK(worst <= 1e-6 * top_g);
                    CHECK(std::sqrt(square / size) <= 1e-6);
                    CHECK(std::abs(total) <= 8 * 0x1p-23 * absolute);
                };
                const auto both = [&](auto d) {
                    evaluate(fast, student::logits{view(z.data(), 1, n), view(dz.data(), 1, n)},
                             teacher::dense{view(y.data(), 1, n)}, d);
                    check();
                    if (n == vocab) return;
                    std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
                    std::iota(ids.begin(), ids.end(), 0);
                    std::vector<float> log_q(y.begin(), y.begin() + n);
                    for (float& q : log_q) q -= float(std::log(sum_q)) + y[top];
                    std::fill(dz.begin(), dz.end(), 0.F);
                    evaluate(fast, student::logits{view(z.data(), 1, vocab), view(dz.data(), 1, vocab)},
                             teacher::support{view(ids.data(), 1, n), view(log_q.data(), 1, n)}, renormalised{d});
                    check();
                };
                both(forward_kl{});
                both(alpha_divergence{.a = 0});
            }
}

TEST_CASE("diffuse, peaked and disagreeing rows, T from 0.01 to 100, every divergence") {
    cpu_backend backend;
    std::vector<accuracy::errors> table;
    for (const accuracy::row_pair& r : accuracy::rows(5000, 20250601)) accuracy::judge_dense(backend, r, table);
    const auto large = accuracy::rows(vocab, 7);
    for (std::size_t i = 0; i < large.size(); i += 24) accuracy::judge_dense(backend, large[i], table);
    if (std::getenv("OPD_ACCURACY_TABLE")) accuracy::print(table, "V = 5,000 and 151,936");
}

TEST_CASE("the same rows on a support of 300 ids, renormalised: in double, from log q as it is stored") {
    cpu_backend backend;
    std::vector<accuracy::errors> table;
    constexpr index_t k = 300, wide = 2 * k + 1;
    std::vector<std::int32_t> ids;
    for (index_t j = 0; j < k; ++j) ids.push_back(std::int32_t(2 * j + 1));
    std::vector<float> z(wide), g(wide);
    for (accuracy::row_pair r : accuracy::rows(k, 20250601)) {
        r.temperature_q = 1;
        const std::vector<double> lq = accuracy::log_softmax(r.y, 1);
        for (std::size_t j = 0; j < std::size_t(k); ++j)
            if (!detail::is_neg_inf(r.y[j])) r.y[j] = float(lq[j]);
        accuracy::judge(r, table, [&](const accuracy::row_pair& row, const auto& d, std::vector<float>& dz) {
            for (std::size_t j = 0; j < std::size_t(k); ++j) z[2 * j + 1] = row.z[j];
            const double loss =
                evaluate(backend, student::logits{view(z.data(), 1, wide), view(g.data(), 1, wide), row.temperature_p},
                         teacher::support{view(ids.data(), 1, k), view(row.y.data(), 1, k)}, renormalised{d})
                    .loss;
            for (std::size_t j = 0; j < std::size_t(k); ++j) dz[j] = g[2 * j + 1];
            return loss;
        });
    }
    for (const accuracy::errors& e : table) {
        CAPTURE(e.name);
        CAPTURE(e.gradient_row);
        CHECK(e.gradient <= 2e-7);
        CHECK(e.value <= 1e-7);
    }
}

TEST_CASE("bfloat16 gradients near p = q keep a relative error below 1e-2") {
    cpu_backend fast;
    naive_backend slow;
    std::vector<bfloat16> dz(vocab);
    std::vector<double> want(vocab);
    for (const std::uint64_t seed : seeds) {
        const pair_of_rows r = rows(seed)[1];
        const auto check = [&](const std::string& name, auto d) {
            const teacher::dense t{view(r.y.data(), 1, vocab)};
            const auto z = view(r.z.data(), 1, vocab);
            evaluate(fast, student::logits<float, bfloat16>{z, view(dz.data(), 1, vocab)}, t, d);
            evaluate(slow, student::logits<float, double>{z, view(want.data(), 1, vocab)}, t, d);
            double top = 0, worst = 0;
            for (const double g : want) top = std::max(top, std::abs(g));
            for (std::size_t v = 0; v < dz.size(); ++v)
                if (std::abs(want[v]) > 1e-3 * top)
                    worst = std::max(worst, std::abs(element<bfloat16>::load(dz[v]) / want[v] - 1));
            INFO(name << ", seed " << seed);
            CHECK(worst < 1e-2);
        };
        check("reverse KL", reverse_kl{});
        check("forward KL", forward_kl{});
        check("JSD", jsd{});
    }
}
