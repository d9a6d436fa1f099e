// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense reverse KL inside a trainer you already have: raw pointers in, raw pointers out.
//
// The trainer keeps its logits in rows padded from V to P columns and has its output layer's backward pass read the
// gradient from the same memory, all P columns of it: those of the padding are zero after the call. `distil` is all
// that opd adds: it turns a row of logits into the row of their gradient. Below it, the smallest trainer there is,
// whose parameters are the logits themselves.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "opd/opd.hpp"

// [distil]
/// logits (N,V) in rows of P, overwritten by the gradient, padding too; teacher (N,V) in rows of P; keep (N): 1 for
/// response tokens. `tokens` is the count to divide by: the whole batch's, so that micro-batches add up. Returns the
/// mean KL in nats.
double distil(opd::cpu_backend& backend, float* logits, const float* teacher, const std::uint8_t* keep, long N, long V,
              long P, double tokens) {
    const auto rows = opd::padded_view(logits, N, V, P); // P - V columns of padding, whose gradient is zero
    const opd::student::logits student{rows, rows};      // in and out
    const opd::teacher::dense known{opd::view(teacher, N, V, P)};
    const auto r = opd::evaluate(
        backend, student, known, opd::reverse_kl{},
        opd::env{.mask = opd::view(keep, N), .normaliser = tokens, .on_bad = opd::bad::raise_above(0.01)});
    return r.loss;
}
// [/distil]

int main() {
    constexpr long N = 6, V = 1000, P = 1024;
    std::vector<float> weights(N * P), teacher(N * P), work(N * P); // (N,V) each, in rows of P
    for (long r = 0; r < N; ++r)
        for (long v = 0; v < V; ++v) {
            weights[std::size_t(r * P + v)] = float(2 * std::sin(0.37 * double(v + 5 * r)));
            teacher[std::size_t(r * P + v)] = float(3 * std::sin(0.41 * double(v) + double(r)));
        }
    for (std::size_t i = 0; i < weights.size(); ++i)
        if (i % P >= V) weights[i] = 7; // what the output layer makes of rows of its matrix that no token has
    const std::vector<std::uint8_t> keep{0, 1, 1, 1, 1, 1}; // row 0 belongs to the prompt

    opd::cpu_backend backend{.threads = 2}; // keep it: it owns threads and scratch memory
    double first = 0, last = 0;
    for (int step = 0; step <= 300; ++step) {
        work = weights;
        last = distil(backend, work.data(), teacher.data(), keep.data(), N, V, P, 5);
        if (step == 0) first = last;
        if (step % 100 == 0) std::printf("step %3d   KL(student || teacher) %.6f nats\n", step, last);
        for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= 400 * work[i];
    }
    for (std::size_t i = 0; i < weights.size(); ++i)
        if (i % P >= V && (work[i] != 0 || weights[i] != 7)) return std::printf("the padding has a gradient\n"), 1;
    for (std::size_t v = 0; v < V; ++v)
        if (work[v] != 0) return std::printf("the masked row has a gradient\n"), 1;
    std::printf("the KL fell by a factor of %.0f; the gradient of the masked row and of the padding is zero\n",
                first / last);
    return last < 0.05 * first ? 0 : 1;
}
