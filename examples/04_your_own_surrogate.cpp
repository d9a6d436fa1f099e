// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Your own surrogate in five lines: a soft clip. PPO stops a token's gradient at a ratio of 1 ± width; here it fades
// out,
//
//   loss = -A (1 + w tanh((rho - 1)/w))      c = dloss/dlog p = -A rho (1 - tanh²((rho - 1)/w))
//
// At rho = 1 this is the unclipped importance-sampled gradient. It is checked against central differences, then used on
// samples drawn from a stale policy.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include "opd/opd.hpp"

// [soft_clip]
struct soft_clip {
    double width = 0.2;
    OPD_HD opd::token_out operator()(const opd::token_in& x) const {
        const double rho = ::exp(x.log_ratio), t = ::tanh((rho - 1) / width);
        const bool cut = ::fabs(rho - 1) > width;
        return {-x.advantage * (1 + width * t), -x.advantage * rho * (1 - t * t), cut ? opd::token_flag::clipped : 0};
    }
};
static_assert(opd::surrogate<soft_clip>);
// [/soft_clip]

int main() {
    double worst = 0; // central differences in log p
    for (double log_ratio = -2; log_ratio < 2; log_ratio += 0.13) {
        const auto at = [&](double l) {
            return soft_clip{}({.log_p = l - 3,
                                .log_mu = -3,
                                .log_prox = -3,
                                .log_ref = -3,
                                .log_q = -2,
                                .log_ratio = l,
                                .advantage = 0.7,
                                .age = 0});
        };
        const double h = 1e-5, slope = (at(log_ratio + h).loss - at(log_ratio - h).loss) / (2 * h);
        worst = std::max(worst, std::abs(slope - at(log_ratio).c));
    }
    std::printf("c against central differences: %.1e\n", worst);

    // 64 samples a row from mu, a policy that lags behind the student
    constexpr long N = 32, V = 500, m = 64;
    std::vector<float> z(N * V), stale(N * V), y(N * V), dz(N * V); // (N,V)
    for (long i = 0; i < N * V; ++i) {
        stale[i] = float(2 * std::sin(1.3 * double(i)));
        z[i] = stale[i] + float(0.3 * std::sin(0.7 * double(i)));
        y[i] = float(2 * std::sin(1.3 * double(i) + 0.4));
    }
    opd::cpu_backend backend;
    std::vector<std::int32_t> ids(N * m);           // (N,m)
    std::vector<float> log_mu(N * m), log_q(N * m); // (N,m)
    std::vector<std::uint64_t> sample(N);           // (N) unique in a run
    std::iota(sample.begin(), sample.end(), 0);
    const std::vector<std::uint32_t> position(N); // (N) all 0
    opd::draw(backend, opd::view(stale.data(), N, V), opd::design::iid{m},
              {.seed = 1, .sample = sample, .position = position},
              opd::drawn<>{.ids = opd::view(ids.data(), N, m), .log_mu = opd::view(log_mu.data(), N, m)});
    opd::token_logp(backend, opd::view(y.data(), N, V), opd::view(ids.data(), N, m), opd::view(log_q.data(), N, m));
    const opd::teacher::samples cache{opd::view(ids.data(), N, m), opd::view(log_mu.data(), N, m),
                                      opd::view(log_q.data(), N, m)};
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};

    const auto report = [&](const char* name, const opd::result& r) {
        double norm = 0;
        for (const float g : dz) norm += double(g) * double(g);
        const auto& d = r.diagnostics;
        std::printf("%-14s loss %.4f   gradient norm %.4f   tokens clipped %.1f %%\n", name, r.loss, std::sqrt(norm),
                    100 * double(d.clipped_positive + d.clipped_negative) / double(d.tokens));
        return std::sqrt(norm);
    };
    const double unclipped = report("unclipped", opd::evaluate(backend, student, cache, opd::mc{opd::reverse_kl{}}));
    const double wide =
        report("soft, w = 50", opd::evaluate(backend, student, cache, opd::mc{.surrogate = soft_clip{.width = 50}}));
    const double soft =
        report("soft, w = 0.2", opd::evaluate(backend, student, cache, opd::mc{.surrogate = soft_clip{}}));
    return worst < 1e-8 && std::abs(wide / unclipped - 1) < 0.01 && soft < unclipped ? 0 : 1;
}
