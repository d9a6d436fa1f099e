// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher behind a server answers with its 20 best ids and their log-probs at each position, sometimes fewer: rows of
// different width. What can be made of that, beside the dense loss that nobody has: the tail as one bucket, the support
// alone, the biased sum that several trainers ship.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include "opd/opd.hpp"

namespace {

constexpr long N = 64, V = 4000, K = 20;

/// An answer as servers give it: ids and log-probs, best first, as many as there are.
struct answer {
    std::vector<std::int32_t> ids;
    std::vector<float> log_probs;
};

std::vector<answer> ask(opd::cpu_backend& backend, const std::vector<float>& logits) {
    std::vector<std::int32_t> ids(N * K);
    std::vector<float> log_q(N * K);
    opd::top_k(backend, opd::view(logits.data(), N, V), opd::view(ids.data(), N, K), opd::view(log_q.data(), N, K));
    std::vector<answer> out(N);
    for (long r = 0; r < N; ++r) {
        const long width = r % 3 == 0 ? 12 : K; // this server stops at a cumulative mass
        out[r].ids.assign(&ids[r * K], &ids[r * K] + width);
        out[r].log_probs.assign(&log_q[r * K], &log_q[r * K] + width);
    }
    return out;
}

} // namespace

int main() {
    std::vector<float> z(N * V), teacher(N * V), dz(N * V);
    for (long r = 0; r < N; ++r)
        for (long v = 0; v < V; ++v) { // Zipf-like
            const long i = r * V + v;
            const double zipf = -1.3 * std::log(double((v * 1237 + 91 * r) % V) + 2);
            teacher[i] = float(zipf + 0.4 * std::sin(2.1 * double(i)));
            z[i] = float(zipf + 0.7 * std::sin(2.1 * double(i) + 0.6));
        }
    opd::cpu_backend backend{.threads = 2};
    const std::vector<answer> served = ask(backend, teacher);

    // [pack]
    std::vector<std::int32_t> ids(N * K, -1); // -1: an unused slot
    std::vector<float> log_q(N * K, 0.f);
    for (long r = 0; r < N; ++r) {
        std::copy(served[r].ids.begin(), served[r].ids.end(), &ids[r * K]);
        std::copy(served[r].log_probs.begin(), served[r].log_probs.end(), &log_q[r * K]);
    }
    const opd::teacher::support support{opd::view(ids.data(), N, K), opd::view(log_q.data(), N, K)};
    // [/pack]
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const auto dense =
        opd::evaluate(backend, student, opd::teacher::dense{opd::view(teacher.data(), N, V)}, opd::reverse_kl{});
    const std::vector<float> exact = dz;
    std::printf("%-32s %8s  %s\n", "", "loss", "cosine to the dense gradient");
    const auto report = [&](const char* name, const opd::result& r) {
        double ab = 0, aa = 0, bb = 0;
        for (long i = 0; i < N * V; ++i)
            ab += double(dz[i]) * double(exact[i]), aa += double(dz[i]) * double(dz[i]),
                bb += double(exact[i]) * double(exact[i]);
        std::printf("%-32s %8.4f  %.3f\n", name, r.loss, ab / std::sqrt(aa * bb));
        return ab / std::sqrt(aa * bb);
    };
    report("dense", dense);
    // [calls]
    const auto bucket = opd::evaluate(backend, student, support, opd::tail_bucket{opd::reverse_kl{}});
    // [/calls]
    const double by_bucket = report("tail_bucket, tail inferred", bucket);
    const double by_sum =
        report("generalised", opd::evaluate(backend, student, support, opd::generalised{opd::reverse_kl{}}));
    report("renormalised", opd::evaluate(backend, student, support, opd::renormalised{opd::reverse_kl{}}));
    const auto biased = opd::evaluate(backend, student, support, opd::truncated_biased{opd::reverse_kl{}});
    report("truncated_biased", biased);
    std::printf("mass on the support: student %.3f, teacher %.3f\n", bucket.diagnostics.student_mass(),
                bucket.diagnostics.teacher_mass());
    return bucket.diagnostics.bad_rows == 0 && bucket.loss <= dense.loss && by_bucket > 0.8 && by_sum > 0.5 ? 0 : 1;
}
