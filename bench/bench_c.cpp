// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The C interface beside the C++ call compiled for this machine, in turns, one thread: rows so short that the call is
// all there is, rows of a real vocabulary, supports, drawn tokens. Each line has both and their ratio, C over C++, by
// the least of many rounds.
//
//     cmake -B build/bench_c -DOPD_BUILD_LIBRARY=ON -DOPD_BUILD_BENCHMARKS=ON -DCMAKE_BUILD_TYPE=Release
//     cmake --build build/bench_c --target bench_c
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "c/tensors.hpp"
#include "harness.hpp"
#include "opd/c/opd.h"
#include "opd/opd.hpp"

namespace {

using namespace opd;
using opd::test::tensor;

struct pair {
    double cpp = std::numeric_limits<double>::infinity(), c = cpp;
};
/// Seconds of one call of either, the least of rounds in turns.
pair in_turns(const std::function<void()>& cpp, const std::function<void()>& c, double seconds) {
    pair least;
    cpp(), c();
    double once = bench::now();
    cpp();
    once = std::max(1e-8, bench::now() - once);
    const int calls = std::max(1, static_cast<int>(2e-4 / once));
    const auto time = [&](const std::function<void()>& f) {
        const double begin = bench::now();
        for (int i = 0; i < calls; ++i) f();
        return (bench::now() - begin) / calls;
    };
    for (const double begin = bench::now(); bench::now() - begin < seconds;) {
        least.cpp = std::min(least.cpp, time(cpp));
        least.c = std::min(least.c, time(c));
    }
    return least;
}

template <class T>
void dense(bench::results& out, const char* type, index_t n, index_t v, const char* name, const any_dense& d) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 3);
    bench::array<T> z(n * v), y(n * v), dz(n * v);
    for (index_t i = 0; i < n * v; ++i) z.data()[i] = T(normal(random)), y.data()[i] = T(normal(random));
    cpu_backend be;
    const tensor tz(view(z.data(), n, v)), ty(view(y.data(), n, v)), tg(view(dz.data(), n, v));
    opd_student s = {};
    opd_teacher t = {};
    opd_estimator e = {};
    opd_result r = {};
    s.struct_size = sizeof s, t.struct_size = sizeof t, e.struct_size = sizeof e, r.struct_size = sizeof r;
    s.z = &tz, s.dz = &tg, t.y = &ty, e.of = name, e.a = d.a, e.b = d.b;
    const opd_call call = {sizeof call, nullptr, &s, &t, &e, nullptr};
    d.visit([&](const auto& divergence) {
        const pair p = in_turns(
            [&] {
                benchmark::DoNotOptimize(evaluate(
                    be, student::logits<T>{.z = view(std::as_const(z).data(), n, v), .dz = view(dz.data(), n, v)},
                    teacher::dense<T>{view(std::as_const(y).data(), n, v)}, divergence));
            },
            [&] {
                if (opd_evaluate(&call, &r) != OPD_OK) std::abort();
            },
            n * v < 1000 ? .3 : 2);
        const std::string row =
            std::string(name) + ", " + type + ", " + std::to_string(n) + " rows of " + std::to_string(v);
        out.add(row + ", C++", p.cpp), out.add(row + ", C", p.c);
        std::printf("%-12s %-9s N %5td V %7td   C++ %11.3f us   C %11.3f us   ratio %.3f   more %.0f ns\n", name, type,
                    n, v, 1e6 * p.cpp, 1e6 * p.c, p.c / p.cpp, 1e9 * (p.c - p.cpp));
    });
}

} // namespace

int main(int argc, char** argv) {
    bench::results out(argc, argv);
    std::printf("%s\n", opd_config());
    for (const index_t v : {index_t{8}, index_t{151936}}) {
        dense<float>(out, "float32", v > 1000 ? 16 : 1, v, "reverse_kl", {choice::objective::reverse_kl});
        dense<float>(out, "float32", v > 1000 ? 16 : 1, v, "forward_kl", {choice::objective::forward_kl});
        dense<float>(out, "float32", v > 1000 ? 16 : 1, v, "jsd", {choice::objective::jsd, .5, .5});
        dense<bfloat16>(out, "bfloat16", v > 1000 ? 16 : 1, v, "reverse_kl", {choice::objective::reverse_kl});
    }
    out.write();
}
