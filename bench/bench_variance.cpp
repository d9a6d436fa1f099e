// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a design is worth: the variance of the sampled gradient of KL(p‖q) at a budget of 64 scored tokens a row,
// relative to 64 i.i.d. draws with importance weights and no baseline.
//
// 20 Zipf-like policies over 4,000 tokens at each of three entropies and three distances of mu from p (normal noise on
// the logits; the teacher is p with noise of 1). A variance is the mean over 300 keyed draws of |g - dense gradient|².
// Each benchmark is one cell: counters geo_mean, least and most are over the policies. Times are those of whole cells
// and say nothing of a design.
//
//     scripts/bench.sh bench_variance
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "opd/backends/cpu.hpp"
#include "opd/opd.hpp"

namespace {

using opd::index_t;
namespace design = opd::design;

constexpr index_t vocab = 4000, budget = 64, trials = 300;
constexpr int policies = 20;

double entropy_of(const std::vector<float>& z) {
    const double top = *std::max_element(z.begin(), z.end());
    double mass = 0, sum = 0;
    for (const double x : z) mass += std::exp(x - top), sum += std::exp(x - top) * (x - top);
    return std::log(mass) - sum / mass;
}

/// Student, stale student and teacher at one prefix.
struct policy {
    std::vector<float> p, mu, q;
    std::vector<double> dense; ///< gradient of KL(p‖q)

    policy(double entropy, double staleness, int number) {
        std::mt19937_64 generator(std::uint64_t(1000 * number) + std::uint64_t(100 * entropy));
        std::normal_distribution<double> normal;
        std::vector<double> shape;
        for (index_t v = 0; v < vocab; ++v) shape.push_back(-std::log(1. + double(v)) + 0.3 * normal(generator));
        std::shuffle(shape.begin(), shape.end(), generator);
        double low = 0.1, high = 20;
        for (int i = 0; i < 60; ++i) {
            const double s = (low + high) / 2;
            p.assign(shape.begin(), shape.end());
            for (float& x : p) x = float(s * x);
            (entropy_of(p) > entropy ? low : high) = s;
        }
        for (const float x : p)
            mu.push_back(float(x + staleness * normal(generator))), q.push_back(float(x + normal(generator)));
        std::vector<float> dz(p.size());
        opd::cpu_backend be{.threads = 1};
        opd::evaluate(be, opd::student::logits{opd::view(p.data(), 1, vocab), opd::view(dz.data(), 1, vocab)},
                      opd::teacher::dense{opd::view(q.data(), 1, vocab)}, opd::reverse_kl{});
        dense.assign(dz.begin(), dz.end());
    }
};

/// Mean |g - dense|² over the trials of one design.
template <class Design, class Estimator>
double variance_of(const policy& at, const Design& d, const Estimator& estimator) {
    const index_t m = d.columns(), block = 50;
    std::vector<float> mu, p, q, dz(size_t(block * vocab)), log_mu(size_t(block * m)), log_q(log_mu), weight(log_mu);
    std::vector<std::int32_t> ids(log_mu.size());
    std::vector<std::uint8_t> exact(log_mu.size());
    for (index_t r = 0; r < block; ++r) {
        mu.insert(mu.end(), at.mu.begin(), at.mu.end());
        p.insert(p.end(), at.p.begin(), at.p.end());
        q.insert(q.end(), at.q.begin(), at.q.end());
    }
    opd::cpu_backend be{.threads = 1};
    double sum = 0;
    for (index_t first = 0; first < trials; first += block) {
        std::vector<std::uint64_t> sample(static_cast<size_t>(block));
        std::iota(sample.begin(), sample.end(), std::uint64_t(first));
        const std::vector<std::uint32_t> position(sample.size());
        opd::draw(be, opd::view(std::as_const(mu).data(), block, vocab), d,
                  {.seed = 7, .sample = sample, .position = position},
                  opd::drawn<>{opd::view(ids.data(), block, m), opd::view(log_mu.data(), block, m),
                               opd::view(weight.data(), block, m), opd::view(exact.data(), block, m)});
        opd::token_logp(be, opd::view(std::as_const(q).data(), block, vocab),
                        opd::view(std::as_const(ids).data(), block, m), opd::view(log_q.data(), block, m));
        const opd::student::logits s{opd::view(p.data(), block, vocab), opd::view(dz.data(), block, vocab)};
        if constexpr (std::is_same_v<Design, design::iid>)
            opd::evaluate(be, s,
                          opd::teacher::samples{opd::view(ids.data(), block, m), opd::view(log_mu.data(), block, m),
                                                opd::view(log_q.data(), block, m)},
                          estimator, {.reduction = opd::reduce::sum});
        else
            opd::evaluate(be, s,
                          opd::teacher::weighted{opd::view(ids.data(), block, m), opd::view(weight.data(), block, m),
                                                 opd::view(log_mu.data(), block, m), opd::view(log_q.data(), block, m),
                                                 opd::view(exact.data(), block, m)},
                          estimator, {.reduction = opd::reduce::sum});
        for (index_t i = 0; i < block * vocab; ++i) {
            const double off = double(dz[size_t(i)]) - at.dense[size_t(i % vocab)];
            sum += off * off;
        }
    }
    return sum / double(trials);
}

double variance_of(const policy& at, int which) {
    using namespace opd;
    switch (which) {
    case 0:
        return variance_of(at, design::iid{budget}, mc{reverse_kl{}});
    case 1:
        return variance_of(at, design::iid{budget}, mc{.baseline = baseline::leave_one_out{}});
    case 2:
        return variance_of(at, design::head_tail{budget / 2, budget / 2}, mc{reverse_kl{}});
    case 3:
        return variance_of(at, design::gumbel_top{budget}, mc{reverse_kl{}});
    default:
        return variance_of(at, design::threshold{budget}, mc{reverse_kl{}});
    }
}

/// That of i.i.d. draws, once for all designs.
double plain(const policy& at, double entropy, double staleness, int number) {
    static std::map<std::tuple<double, double, int>, double> known;
    const auto [place, is_new] = known.try_emplace({entropy, staleness, number});
    if (is_new) place->second = variance_of(at, 0);
    return place->second;
}

void run(benchmark::State& state, double entropy, double staleness, int which) {
    double logs = 0, least = 1e300, most = 0;
    for ([[maybe_unused]] auto _ : state) {
        for (int i = 0; i < policies; ++i) {
            const policy at(entropy, staleness, i);
            const double ratio = variance_of(at, which) / plain(at, entropy, staleness, i);
            logs += std::log(ratio);
            least = std::min(least, ratio), most = std::max(most, ratio);
        }
    }
    state.counters["geo_mean"] = std::exp(logs / policies);
    state.counters["least"] = least;
    state.counters["most"] = most;
}

} // namespace

int main(int argc, char** argv) {
    const std::pair<int, const char*> designs[] = {
        {1, "leave_one_out"}, {2, "head_32_tail_32"}, {3, "gumbel_top_64"}, {4, "threshold_64"}};
    for (const double entropy : {5.8, 2.9, 1.05})
        for (const double staleness : {0.1, 0.3, 0.6})
            for (const auto& [which, name] : designs) {
                const std::string title = "variance/entropy:" + std::to_string(entropy).substr(0, 4) +
                                          "/stale:" + std::to_string(staleness).substr(0, 3) + "/" + name;
                benchmark::RegisterBenchmark(title.c_str(), run, entropy, staleness, which)
                    ->Iterations(1)
                    ->Unit(benchmark::kMillisecond);
            }
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
    return 0;
}
