// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a call with two teachers costs beside the two calls that it stands for, gradient included, on one thread:
//
//   bench_teachers [rows] [ids] [rounds]        prints a table; --benchmark_out=FILE too
//
// Each round times the first teacher's call, the second one's and the mixture's, one after the other; the ratio is the
// median of the rounds'. Processor time. Logits are float, in huge pages.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "harness.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/evaluate.hpp"
#include "opd/mixture.hpp"

namespace {

using namespace opd;

double median(std::vector<double> x) {
    std::nth_element(x.begin(), x.begin() + std::ptrdiff_t(x.size() / 2), x.end());
    return x[x.size() / 2];
}
/// Roughly normal, of deviation `scale`.
void fill(const bench::array<float>& to, index_t n, float scale, std::uint64_t seed) {
    std::uint64_t x = seed;
    for (index_t i = 0; i < n; ++i) {
        float sum = -6;
        for (int k = 0; k < 12; ++k) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            sum += float(x >> 40) * 0x1p-24f;
        }
        to.data()[i] = scale * sum;
    }
}

} // namespace

int main(int argc, char** argv) {
    bench::results out(argc, argv);
    std::vector<index_t> given; // but what scripts/bench.sh says to Google Benchmark
    for (int i = 1; i < argc; ++i)
        if (argv[i][0] != '-') given.push_back(std::atoll(argv[i]));
    const index_t n = given.size() > 0 ? given[0] : 64, v = given.size() > 1 ? given[1] : 151936;
    const index_t rounds = given.size() > 2 ? given[2] : 15;
    const bench::array<float> z(n * v), y0(n * v), y1(n * v), dz(n * v);
    fill(z, n * v, 2.5f, 1), fill(y0, n * v, 2.5f, 2), fill(y1, n * v, 2.5f, 3);
    const auto seen = [&](const bench::array<float>& x) { return view(static_cast<const float*>(x.data()), n, v); };
    const student::logits student{seen(z), view(dz.data(), n, v)};
    const teacher::dense<float> t0{seen(y0)}, t1{seen(y1)};
    const teacher::mixture mixed{share{t0, .7}, share{t1, .3}};
    cpu_backend be{.threads = 1};
    const auto line = [&](const char* name, const auto& divergence) {
        std::vector<double> alone, both, ratio;
        double loss = 0;
        const auto timed = [&](const auto& teacher) {
            const double begin = bench::processor_time();
            loss += evaluate(be, student, teacher, divergence).loss;
            return bench::processor_time() - begin;
        };
        for (index_t round = 0; round < rounds; ++round) {
            const double parts = timed(t0) + timed(t1), one = timed(mixed);
            alone.push_back(parts), both.push_back(one), ratio.push_back(one / parts);
        }
        std::printf("%-12s two calls %7.2f ms   mixture %7.2f ms   ratio %.3f (least over least %.3f)   loss %.6f\n",
                    name, 1e3 * median(alone), 1e3 * median(both), median(ratio),
                    *std::min_element(both.begin(), both.end()) / *std::min_element(alone.begin(), alone.end()),
                    loss / double(3 * rounds));
        out.add(std::string(name) + ", two calls", median(alone)),
            out.add(std::string(name) + ", mixture", median(both));
    };
    std::printf("%lld rows of %lld ids\n", static_cast<long long>(n), static_cast<long long>(v));
    line("reverse_kl", reverse_kl{});
    line("jsd", jsd{});
    out.write();
}
