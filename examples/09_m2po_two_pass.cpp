// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// M2PO in two passes: a batch of stale tokens in micro-batches, as a trainer with gradient accumulation has it. The
// first pass asks for log p alone; the fit then knows, over the whole batch, which few tokens carry the second moment
// of the log-ratio; the second pass leaves them out. Cut into other micro-batches, the gradient is the same.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"
#include "opd/ranges.hpp"

int main() {
    constexpr long N = 96, V = 1000; // rows, vocabulary; one drawn token a row
    std::vector<float> z(N * V), stale(N * V), teacher(N * V), dz(N * V);
    for (long i = 0; i < N * V; ++i) {
        const double base = 2 * std::sin(0.37 * double(i % V)) + std::sin(2.3 * double(i));
        const double drift = (i / V % 8 == 0 ? 1 : 0.1) * std::sin(1.7 * double(i)); // one row in eight has moved far
        stale[i] = float(base);
        z[i] = float(base + drift);
        teacher[i] = float(base + 2.5 * drift + 0.1 * std::sin(0.9 * double(i))); // and is still on its way
    }
    opd::eigen_backend backend{.threads = 2};

    // Rollout and teacher: a token a row from the stale policy, its log mu, the teacher's log q.
    std::vector<std::int32_t> ids(N);
    std::vector<float> log_mu(N), log_q(N);
    std::vector<std::uint64_t> sample(N);
    std::vector<std::uint32_t> position(N);
    for (long r = 0; r < N; ++r) sample[r] = std::uint64_t(r / 12), position[r] = std::uint32_t(r % 12);
    opd::draw(backend, opd::view(stale.data(), N, V), opd::design::gumbel{},
              {.seed = 7, .sample = opd::view(sample.data(), N), .position = opd::view(position.data(), N)},
              opd::drawn<>{.ids = opd::view(ids.data(), N, 1), .log_mu = opd::view(log_mu.data(), N, 1)});
    opd::token_logp(backend, opd::view(teacher.data(), N, V), opd::view(ids.data(), N, 1),
                    opd::view(log_q.data(), N, 1), 1.f);

    const opd::teacher::samples cache{opd::view(ids.data(), N, 1), opd::view(log_mu.data(), N, 1),
                                      opd::view(log_q.data(), N, 1)};
    const auto train = [&](long micro, opd::m2po_selection& chosen) {
        const auto parts = opd::micro_batches(opd::env{}, N, micro);
        const auto part_of = [&](const opd::micro_batch& p) {
            return opd::teacher::samples{p.of(cache.ids), p.of(cache.log_mu), p.of(cache.log_q)};
        };
        // [first pass]
        std::vector<double> log_p(N);
        opd::m2po_fit fit{.tau = 0.04};
        for (const auto& p : parts) {
            const auto table = p.of(opd::view(log_p.data(), N, 1));
            opd::token_logp(backend, p.of(opd::view(z.data(), N, V)), part_of(p), table);
            fit.add(table, part_of(p));
        }
        chosen = fit.freeze(); // with several ranks: fit.merge(theirs) first
        // [/first pass]
        // [second pass]
        double loss = 0;
        std::vector<std::uint8_t> keep(N);
        for (const auto& p : parts) {
            const auto kept = p.of(opd::view(keep.data(), N, 1));
            chosen.keep(p.of(opd::view(log_p.data(), N, 1)), part_of(p), {}, kept);
            opd::env env = p.env; // its normaliser is the whole batch's
            env.frozen.keep = kept;
            const opd::student::logits student{p.of(opd::view(z.data(), N, V)), p.of(opd::view(dz.data(), N, V))};
            loss += opd::evaluate(backend, student, part_of(p), opd::mc{opd::reverse_kl{}}, env).loss;
        }
        // [/second pass]
        return loss;
    };

    opd::m2po_selection whole, cut;
    const double loss = train(N, whole);
    const std::vector<float> gradient = dz;
    const double again = train(7, cut);
    long differ = 0, empty = 0;
    for (long i = 0; i < N * V; ++i) differ += dz[i] != gradient[i];
    for (long r = 0; r < N; ++r) empty += std::all_of(&dz[r * V], &dz[r * V] + V, [](float g) { return g == 0; });
    std::printf("loss %.6f in one piece, %.6f in micro-batches of 7; %ld gradients differ\n", loss, again, differ);
    std::printf("%ld of %ld tokens dropped, those with (log p - log mu)^2 >= %.3f; mean of the eligible others %.4f\n",
                empty, N, whole.level, whole.second_moment);
    return differ == 0 && whole.level == cut.level && empty > 0 && empty < N / 4 && whole.second_moment <= 0.04 &&
                   std::abs(loss - again) < 1e-6
               ? 0
               : 1;
}
