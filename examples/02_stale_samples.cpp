// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A sampled loss under staleness. Responses were drawn from mu, the student of some steps ago; the teacher scored 64
// tokens a position. How near is the sampled gradient to the dense one, and what do the diagnostics say?
//
//   mc            64 i.i.d. draws, importance weights rho = p/mu
//   mc, loo       the same with the leave-one-out baseline
//   threshold     64 tokens by threshold sampling: the likeliest for certain, the rest systematically, one baseline
//   no ratio      64 i.i.d. draws without importance weights: biased, however many draws are averaged
//
// Draws are keyed: a pure function of logits, seed, sample and position.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"

constexpr long N = 8, V = 4000, m = 64; // rows, vocabulary, scored tokens a row
constexpr std::uint64_t seed = 7;

/// What the rollout and the teacher leave for one batch.
struct scored {
    std::vector<std::int32_t> ids = std::vector<std::int32_t>(N * m);   // (N,m)
    std::vector<float> log_mu = std::vector<float>(N * m);              // (N,m)
    std::vector<float> log_q = std::vector<float>(N * m);               // (N,m)
    std::vector<float> weight = std::vector<float>(N * m);              // (N,m)
    std::vector<std::uint8_t> exact = std::vector<std::uint8_t>(N * m); // (N,m)
};

// [draws]
/// Draws for `trial` from the stale policy's logits (N,V); then the teacher scores them.
scored draw(opd::eigen_backend& backend, const std::vector<float>& stale, const std::vector<float>& teacher, int trial,
            bool threshold) {
    std::vector<std::uint64_t> sample(N);         // (N)
    const std::vector<std::uint32_t> position(N); // (N) all 0
    for (long r = 0; r < N; ++r)
        sample[r] = std::uint64_t(trial * N + r); // unique in the run: prompt, epoch, group member
    const opd::draw_keys<> keys{.seed = seed, .sample = sample, .position = position};
    scored s;
    const opd::drawn<> to{.ids = opd::view(s.ids.data(), N, m),
                          .log_mu = opd::view(s.log_mu.data(), N, m),
                          .weight = opd::view(s.weight.data(), N, m),
                          .exact = opd::view(s.exact.data(), N, m)};
    const auto mu = opd::view(stale.data(), N, V);
    if (threshold)
        opd::draw(backend, mu, opd::design::threshold{m}, keys, to);
    else
        opd::draw(backend, mu, opd::design::iid{m}, keys, to);
    opd::token_logp(backend, opd::view(teacher.data(), N, V), opd::view(s.ids.data(), N, m),
                    opd::view(s.log_q.data(), N, m));
    return s;
}
// [/draws]

int main() {
    std::vector<float> z(N * V), stale(N * V), y(N * V), dz(N * V); // (N,V)
    for (long r = 0; r < N; ++r)
        for (long v = 0; v < V; ++v) { // Zipf-like policies
            const double zipf = -1.1 * std::log(double((v * 1237 + 91 * r) % V) + 3);
            const long i = r * V + v;
            stale[i] = float(zipf + 0.6 * std::sin(2.1 * double(i)));
            z[i] = stale[i] + float(0.8 * std::sin(0.9 * double(i)));
            y[i] = float(zipf + 0.6 * std::sin(2.1 * double(i) + 0.8));
        }
    opd::eigen_backend backend{.threads = 2};
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const auto dense =
        opd::evaluate(backend, student, opd::teacher::dense{opd::view(y.data(), N, V)}, opd::reverse_kl{});
    const std::vector<float> exact = dz;

    // One call for samples, one for weighted entries; the gradient lands in dz.
    // [calls]
    const auto mc = [&](const scored& s, const auto& estimator) {
        return opd::evaluate(backend, student,
                             opd::teacher::samples{opd::view(s.ids.data(), N, m), opd::view(s.log_mu.data(), N, m),
                                                   opd::view(s.log_q.data(), N, m)},
                             estimator);
    };
    const auto weighted = [&](const scored& s) {
        return opd::evaluate(backend, student,
                             opd::teacher::weighted{opd::view(s.ids.data(), N, m), opd::view(s.weight.data(), N, m),
                                                    opd::view(s.log_mu.data(), N, m), opd::view(s.log_q.data(), N, m),
                                                    opd::view(s.exact.data(), N, m)},
                             opd::mc{opd::reverse_kl{}});
    };
    // [/calls]

    const auto norm = [](auto at) {
        double sum = 0;
        for (long i = 0; i < N * V; ++i) sum += at(i) * at(i);
        return std::sqrt(sum);
    };
    const double size = norm([&](long i) { return double(exact[i]); });
    constexpr int trials = 400;
    std::printf("dense            %.4f\n", dense.loss);
    std::printf("%-14s %8s   distance from the dense gradient: one batch, mean of %d batches\n", "", "loss", trials);
    const auto study = [&](const char* name, bool threshold, auto loss) {
        std::vector<double> mean(N * V);
        double squared = 0, value = 0;
        for (int trial = 0; trial < trials; ++trial) {
            value += loss(draw(backend, stale, y, trial, threshold)).loss / trials;
            const double off = norm([&](long i) { return double(dz[i] - exact[i]); });
            squared += off * off / trials;
            for (long i = 0; i < N * V; ++i) mean[i] += double(dz[i]) / trials;
        }
        const double one = std::sqrt(squared) / size,
                     all = norm([&](long i) { return mean[i] - double(exact[i]); }) / size;
        std::printf("%-14s %8.4f   %.3f   %.3f\n", name, value, one, all);
        return all / one; // 1/sqrt(trials) if unbiased
    };
    const double a = study("mc", false, [&](const scored& s) { return mc(s, opd::mc{opd::reverse_kl{}}); });
    const double b = study("mc, loo", false, [&](const scored& s) {
        // one baseline a draw: what the row's other draws are worth
        return mc(s, opd::mc{.baseline = opd::baseline::leave_one_out{}});
    });
    const double c = study("threshold", true, weighted);
    const double biased = study("no ratio", false, [&](const scored& s) {
        return mc(s, opd::accept_bias{opd::mc{opd::reverse_kl{}, opd::score_function{}}});
    });

    // [diagnostics]
    scored s = draw(backend, stale, y, 0, false);
    const opd::diagnostics good = mc(s, opd::mc{opd::reverse_kl{}}).diagnostics;
    std::printf("log mu as drawn:   mean ratio %.3f   effective samples %.0f of %lld   mismatch %s\n",
                good.ratio_mean(), good.effective_sample_size(), static_cast<long long>(good.tokens),
                good.mu_mismatch() ? "yes" : "no");
    opd::token_logp(backend, opd::view(stale.data(), N, V), opd::view(s.ids.data(), N, m),
                    opd::view(s.log_mu.data(), N, m), 0.8f); // recorded at another temperature than drawn at
    const opd::diagnostics wrong = mc(s, opd::mc{opd::reverse_kl{}}).diagnostics;
    std::printf("log mu at T = 0.8: mean ratio %.3f   effective samples %.0f of %lld   mismatch %s\n",
                wrong.ratio_mean(), wrong.effective_sample_size(), static_cast<long long>(wrong.tokens),
                wrong.mu_mismatch() ? "yes" : "no");
    // [/diagnostics]

    const double unbiased = 2 / std::sqrt(double(trials));
    return a < unbiased && b < unbiased && c < unbiased && biased > 3 * unbiased && !good.mu_mismatch() &&
                   wrong.mu_mismatch()
               ? 0
               : 1;
}
