// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Full-vocabulary reverse KL without logits in memory: both sides are kept as hidden states, and the call makes logits
// for as many rows, or for a tile of the vocabulary, as a budget holds. Below `distil`, the smallest trainer there is:
// its hidden states and its head are what it learns. The teacher is twice as wide.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "opd/backends/cpu.hpp"
#include "opd/hidden.hpp"
#include "opd/opd.hpp"

struct states {
    std::vector<float> x, head; // (N,D), (V,D)
    long D;
};

// [distil]
/// Reverse KL in nats; dx (N,D) and dhead (V,D) are written. Beside these each side takes no more than `budget` bytes.
double distil(opd::cpu_backend& backend, const states& student, const states& teacher, float* dx, float* dhead, long N,
              long V, std::size_t budget) {
    opd::student::hidden mine{opd::view(student.x.data(), N, student.D), opd::view(student.head.data(), V, student.D),
                              opd::view(dx, N, student.D), opd::view(dhead, V, student.D)};
    opd::teacher::hidden known{opd::view(teacher.x.data(), N, teacher.D), opd::view(teacher.head.data(), V, teacher.D)};
    mine.budget = known.budget = budget;
    return opd::evaluate(backend, mine, known, opd::reverse_kl{}).loss;
}
// [/distil]

states waves(long N, long V, long D, double height, double pace) {
    states s{std::vector<float>(static_cast<std::size_t>(N * D)), std::vector<float>(static_cast<std::size_t>(V * D)),
             D};
    for (std::size_t i = 0; i < s.x.size(); ++i)
        s.x[i] = static_cast<float>(height * std::sin(pace * double(i * i % 997)));
    for (std::size_t i = 0; i < s.head.size(); ++i)
        s.head[i] = static_cast<float>(height * std::cos(pace * double(i * 31 % 1009)));
    return s;
}

int main() {
    constexpr long N = 24, V = 5000, D = 48;
    states student = waves(N, V, D, 0.2, 0.37);
    const states teacher = waves(N, V, 2 * D, 0.6, 0.53);
    std::vector<float> dx(student.x.size()), dhead(student.head.size());
    opd::cpu_backend backend{.threads = 2};
    const std::size_t budget = 100'000; // the logits of one side alone would be 480,000
    double first = 0, last = 0;
    for (int step = 0; step <= 200; ++step) {
        last = distil(backend, student, teacher, dx.data(), dhead.data(), N, V, budget);
        if (step == 0) first = last;
        if (step % 50 == 0) std::printf("step %3d   KL(student || teacher) %.6f nats\n", step, last);
        for (std::size_t i = 0; i < dx.size(); ++i) student.x[i] -= 20 * dx[i];
        for (std::size_t i = 0; i < dhead.size(); ++i) student.head[i] -= 20 * dhead[i];
    }
    std::vector<float> dx_at_once(dx.size()), dhead_at_once(dhead.size());
    distil(backend, student, teacher, dx.data(), dhead.data(), N, V, budget);
    distil(backend, student, teacher, dx_at_once.data(), dhead_at_once.data(), N, V, std::size_t{1} << 30);
    const bool same = dx == dx_at_once && dhead == dhead_at_once;
    std::printf("the KL fell by a factor of %.0f; the gradient is %s whatever the budget\n", first / last,
                same ? "the same" : "ANOTHER");
    return same && last < 0.1 * first ? 0 : 1;
}
