// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The matrix product of opd/product.hpp, whose every entry is one chain over the depth, beside Eigen's, one thread: C
// (rows, columns) = A (rows, depth) B (depth, columns), float, all in cache but the last. Counter: GFLOP/s.
//
//     scripts/bench.sh bench_product
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <Eigen/Core>
#include <benchmark/benchmark.h>

#include "opd/product.hpp"

namespace {

using opd::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

matrix numbers(index_t rows, index_t columns) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    matrix m(rows, columns);
    for (index_t i = 0; i < m.size(); ++i) m.data()[i] = normal(random);
    return m;
}

template <bool Ours>
void product(benchmark::State& state, index_t rows, index_t columns, index_t depth) {
    const matrix a = numbers(rows, depth), b = numbers(depth, columns);
    matrix c = matrix::Zero(rows, columns);
    for (auto _ : state) {
        if constexpr (Ours)
            opd::product(opd::serial_executor{},
                         opd::product_nn(rows, columns, depth, a.data(), depth, b.data(), columns, c.data(), columns));
        else
            c.noalias() = a * b;
        benchmark::DoNotOptimize(c.data());
        benchmark::ClobberMemory();
    }
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth);
    state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

} // namespace

int main(int argc, char** argv) {
    struct shape {
        index_t columns, depth;
        std::vector<index_t> rows;
    };
    // a decoding step's few rows, and a batch; the last: a slice of a head
    for (const auto& [columns, depth, all] :
         {shape{512, 256, {1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 32, 96, 256}}, shape{8192, 1024, {1, 8, 64, 256}}})
        for (const index_t rows : all) {
            const std::string name = std::to_string(rows) + "x" + std::to_string(columns) + "x" + std::to_string(depth);
            benchmark::RegisterBenchmark(("opd/" + name).c_str(), product<true>, rows, columns, depth)
                ->Unit(benchmark::kMicrosecond);
            benchmark::RegisterBenchmark(("eigen/" + name).c_str(), product<false>, rows, columns, depth)
                ->Unit(benchmark::kMicrosecond);
        }
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
}
