// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Reverse KL from hidden states, V = 151,936, D = 1,024 and 4,096 (a teacher of 4,096 unless --teacher says otherwise):
// what share of the machine's float multiply-adds its products reach. Operations: 2·N·V·(D_s + D_t) forward, 4·N·V·D_s
// more for dx and dw; in tiles, with budgets of 8 MiB, forward counts twice; a LoRA update of rank R, 6·N·V·R. The peak
// is probed before and after every sample, for 40 ms; the better of the two is that sample's, and `of_peak` is the
// median of the samples' shares. --bfloat16: states and heads are stored so; --amx: products are made by the
// processor's matrix tiles; --dots, with --bfloat16: logits by its dot products of bfloat16.
//
//     scripts/bench.sh bench_hidden -- [--threads=2] [--rows=64,256,1024] [--teacher=4096] [--samples=3] [--bfloat16]
//     [--amx|--dots]
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "harness.hpp"
#include "opd/backends/amx.hpp"
#include "opd/backends/bf16.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/hidden.hpp"
#include "opd/opd.hpp"

namespace {

using opd::index_t;

constexpr index_t vocab = 151936, width = 1024, rank = 16;

template <class E>
void fill(const bench::array<E>& a, index_t n, unsigned seed, float deviation) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> some(1 << 16);
    for (float& x : some) x = normal(random);
    for (index_t i = 0; i < n; ++i)
        a.data()[i] = opd::element<E>::store(some[static_cast<std::size_t>((i * 7 + i / 65536) & 65535)]);
}

double median(std::vector<double> x) {
    std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
    return x[x.size() / 2];
}

#if defined(__AVX512BF16__)
/// Multiply-adds a second of bfloat16 dot products over those of float's multiply-add, in registers.
double dot_product_gain() {
    constexpr int steps = 2000000, chains = 16; // 12 hide the latency, and no step may be late
    const auto rate = [](auto step) {
        __m512 a[chains];
        opd::detail::unroll<chains>([&](auto j) __attribute__((always_inline)) { a[j()] = _mm512_setzero_ps(); });
        double best = 0;
        for (int round = 0; round < 5; ++round) {
            const double start = bench::now();
            for (int i = 0; i < steps; ++i)
                opd::detail::unroll<chains>([&](auto j) __attribute__((always_inline)) {
                    a[j()] = step(a[j()]);
                    asm volatile("" : "+v"(a[j()])); // in a register, and not another step ahead
                });
            best = std::max(best, steps * chains / (bench::now() - start));
        }
        float sum = 0;
        opd::detail::unroll<chains>([&](auto j)
                                        __attribute__((always_inline)) { sum += _mm512_reduce_add_ps(a[j()]); });
        benchmark::DoNotOptimize(sum);
        return best;
    };
    const __m512 m = _mm512_set1_ps(0.999f), c = _mm512_set1_ps(0.01f);
    const auto ones = std::bit_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80)),
               small = std::bit_cast<__m512bh>(_mm512_set1_epi32(0x3a003a00));
    return 32 * rate([=](__m512 x) __attribute__((always_inline)) { return _mm512_dpbf16_ps(x, ones, small); }) /
           (16 * rate([=](__m512 x) __attribute__((always_inline)) { return _mm512_fmadd_ps(x, m, c); }));
}
#endif

/// As they lie, for the processor's matrix tiles, for its dot products of bfloat16.
enum class heads { views, tiles, dots };
template <class E, heads Heads>
void run(bench::results& out, int threads, int samples, index_t of_teacher, const std::vector<index_t>& all) {
    const index_t most = *std::max_element(all.begin(), all.end());
    const bench::array<E> x(most * width), w(vocab * width), h(most * of_teacher), head(vocab * of_teacher);
    const bench::array<float> dx(most * width), dw(vocab * width);
    const bench::array<float> b(vocab * rank), a(rank * width), db(vocab * rank), da(rank * width);
    fill(x, most * width, 1, 1), fill(w, vocab * width, 2, 0.06f);
    fill(b, vocab * rank, 5, 0.02f), fill(a, rank * width, 6, 0.02f);
    fill(h, most * of_teacher, 3, 1), fill(head, vocab * of_teacher, 4, 0.03f);
    opd::cpu_backend be{.threads = threads};
    std::printf("%6s %-28s %10s %10s %10s %12s\n", "rows", "", "seconds", "GFLOP/s", "of_peak", "workspace MB");
    for (const index_t n : all) {
        const double unit = 2.0 * static_cast<double>(n) * static_cast<double>(vocab);
        const auto head_of = [](const auto& of, index_t d) {
            if constexpr (Heads == heads::tiles)
                return opd::amx_head{opd::view(of.data(), vocab, d)};
            else if constexpr (Heads == heads::dots)
                return opd::bf16_head(opd::view(of.data(), vocab, d));
            else
                return opd::view(of.data(), vocab, d);
        };
        const opd::teacher::hidden known{opd::view(h.data(), n, of_teacher), head_of(head, of_teacher)};
        const opd::student::hidden value{opd::view(x.data(), n, width), head_of(w, width)};
        const opd::student::hidden trained{opd::view(x.data(), n, width), head_of(w, width),
                                           opd::view(dx.data(), n, width), opd::view(dw.data(), vocab, width)};
        const auto row = [&](const char* name, double operations, std::size_t bytes, auto&& call) {
            // A processor's clock changes from second to second: each sample has probes of its own, long enough to run
            // at its clock.
            const auto probe = [&] { return bench::fma_rate(be.team(), 1000000); };
            std::vector<double> seconds, shares;
            call(); // the first has the memory come
            for (int i = 0; i < samples; ++i) {
                const double before = probe(), start = bench::now();
                call();
                seconds.push_back(bench::now() - start);
                shares.push_back(operations * 1e-9 / seconds.back() / std::max(before, probe()));
            }
            const double rate = operations * 1e-9 / median(seconds);
            std::printf("%6ld %-28s %10.3f %10.1f %10.3f %12.0f\n", static_cast<long>(n), name, median(seconds), rate,
                        median(shares), static_cast<double>(bytes) * 1e-6);
            std::fflush(stdout);
            out.add(std::string(name) + ", " + std::to_string(n) + " rows", median(seconds));
        };
        const double forward = unit * static_cast<double>(width + of_teacher);
        row("forward", forward, opd::workspace_bytes(be, value, known, opd::reverse_kl{}),
            [&] { opd::evaluate(be, value, known, opd::reverse_kl{}); });
        const double back = 2 * unit * static_cast<double>(width);
        row("forward, dx, dw", forward + back, opd::workspace_bytes(be, trained, known, opd::reverse_kl{}),
            [&] { opd::evaluate(be, trained, known, opd::reverse_kl{}); });
        if constexpr (std::is_same_v<E, float> && Heads == heads::views) { // the base is frozen: no dw
            opd::lora_head adapted{opd::view(w.data(), vocab, width), opd::view(b.data(), vocab, rank),
                                   opd::view(a.data(), rank, width)};
            adapted.db = opd::view(db.data(), vocab, rank), adapted.da = opd::view(da.data(), rank, width);
            const opd::student::hidden lora{opd::view(x.data(), n, width), adapted, opd::view(dx.data(), n, width)};
            const double update = 3 * unit * rank, of_a = 6.0 * double(n) * rank * width;
            row("forward, dx, LoRA of 16", forward + back / 2 + update + of_a,
                opd::workspace_bytes(be, lora, known, opd::reverse_kl{}),
                [&] { opd::evaluate(be, lora, known, opd::reverse_kl{}); });
        }
        auto small = trained;
        auto small_known = known;
        small.budget = small_known.budget = std::size_t{8} << 20; // tiles, made again for the gradient
        row("forward, dx, dw, in tiles", 2 * forward + back,
            opd::workspace_bytes(be, small, small_known, opd::reverse_kl{}),
            [&] { opd::evaluate(be, small, small_known, opd::reverse_kl{}); });
    }
}

} // namespace

int main(int argc, char** argv) {
    bench::results out(argc, argv);
    int threads = 1, samples = 3;
    bool brain = false, amx = false, dots = false;
    index_t of_teacher = 4096;
    std::vector<index_t> all = {64, 256, 1024};
    for (int i = 1; i < argc; ++i) {
        const std::string a = argv[i];
        const auto value = [&](const char* name) { return a.substr(std::strlen(name)); };
        if (a.starts_with("--threads="))
            threads = std::atoi(value("--threads=").c_str());
        else if (a == "--bfloat16")
            brain = true;
        else if (a == "--amx")
            amx = true;
        else if (a == "--dots")
            dots = true;
        else if (a.starts_with("--samples="))
            samples = std::atoi(value("--samples=").c_str());
        else if (a.starts_with("--teacher="))
            of_teacher = std::atol(value("--teacher=").c_str());
        else if (a.starts_with("--rows=")) {
            all.clear();
            std::istringstream list(value("--rows="));
            for (std::string n; std::getline(list, n, ',');) all.push_back(std::atol(n.c_str()));
        } else if (!a.starts_with("--benchmark_")) {
            return std::fprintf(stderr, "error: %s\n", a.c_str()), 2;
        }
    }
#if defined(__AVX512BF16__)
    if (brain) std::printf("bfloat16 dot products: %.2f times the multiply-adds of float\n", dot_product_gain());
#endif
    if (dots && (amx || !brain)) return std::fprintf(stderr, "error: --dots is with --bfloat16, without --amx\n"), 2;
    if (dots)
        run<opd::bfloat16, heads::dots>(out, threads, samples, of_teacher, all);
    else if (amx)
        brain ? run<opd::bfloat16, heads::tiles>(out, threads, samples, of_teacher, all)
              : run<float, heads::tiles>(out, threads, samples, of_teacher, all);
    else
        brain ? run<opd::bfloat16, heads::views>(out, threads, samples, of_teacher, all)
              : run<float, heads::views>(out, threads, samples, of_teacher, all);
    out.write();
}
