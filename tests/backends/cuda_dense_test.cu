// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The dense kernels on a device: the cases of the host-run test against the same float64 reference. SKIPPED without
// one.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/cuda_cases.hpp"
#include "backends/cuda_device.cuh"
#include "backends/host_run.hpp"
#include "opd/backends/cuda.cuh"

namespace {

using namespace opd;
using namespace opd::test;

struct reference_check {
    device_memory& memory;
    const dense_case<>& c;
    holes h;
    double hard; // gradient tolerance on the hard rows, or 0
    template <class Divergence>
    void operator()(const char* name, const Divergence& d) const {
        if (!finite_with(d, h)) return;
        INFO(std::string(name));
        CAPTURE(int(h));
        check_against_reference(memory, c, d, hard > 0 ? hard : gradient_tolerance(d));
    }
};

TEST_CASE("on the device: value and gradient of every divergence") {
    if (!device_present()) return;
    device_memory memory;
    std::uint64_t seed = 1;
    for (index_t vocab : {1, 2, 7, 255, 256, 257, 1025, 5000})
        for (holes h : every_hole) {
            source s(seed++);
            dense_case<> c{.rows = 2, .vocab_z = vocab, .vocab_y = vocab};
            c.t_s = s.below(2) ? 1.f : float(0.5 + 1.5 * s.uniform());
            c.t_t = s.below(2) ? c.t_s : float(0.5 + 1.5 * s.uniform());
            fill_normal(c, s);
            punch(c, h, s);
            for_every_divergence(reference_check{memory, c, h, 0});
        }
    const dense_case<> hard = hard_rows(151936);
    for_every_divergence(reference_check{memory, hard, holes::none, 1e-6});
}

template <class Z, class Y, class G>
void compare_with_host(device_memory& memory, std::uint64_t seed) {
    source s(seed);
    dense_case<Z, Y, G> c{.rows = 37, .vocab_z = 700, .vocab_y = 650};
    c.plain.vocab = vocabulary::drop_and_renormalise;
    c.stride = 704;
    c.t_s = 1.25f;
    fill_normal(c, s);
    punch(c, holes::teacher_has_more, s);
    c.z[5] = element<Z>::store(std::numeric_limits<arithmetic_t<Z>>::quiet_NaN());
    for (index_t r = 0; r < c.rows; ++r) {
        c.mask.push_back(std::int32_t(s.below(3))), c.weights.push_back(float(s.normal()));
        c.versions.push_back(std::int32_t(s.below(50)));
    }
    c.mask[0] = 1;
    c.offsets = {0, 5, 5, 20, 37};
    want_everything(c);
    for (reduce reduction : {reduce::sum, reduce::token_mean, reduce::sequence_mean, reduce::sequence_sum_mean})
        for (infinite policy : {infinite::floor(), infinite::skip()}) {
            c.plain.reduction = reduction, c.plain.on_infinite = policy;
            c.plain.beta = 0.5f, c.plain.beta_loss = 1, c.plain.loss_clamp = 6, c.plain.version = 45;
            c.pad = padding::zero;
            host_run_backend host{256};
            host_memory hosted{host};
            dense_case<Z, Y, G> a = c, b = c, again = c;
            const result x = run_case(hosted, a, reverse_kl{}), w = run_case(memory, b, reverse_kl{});
            const result twice = run_case(memory, again, reverse_kl{});
            CHECK(std::memcmp(&w, &twice, sizeof w) == 0); // run_to_run
            CHECK(std::memcmp(b.dz.data(), again.dz.data(), b.dz.size() * sizeof(G)) == 0);
            CHECK(x.loss == doctest::Approx(w.loss).epsilon(1e-5));
            CHECK(x.diagnostics.kept == w.diagnostics.kept);
            CHECK(x.diagnostics.bad_rows == w.diagnostics.bad_rows);
            CHECK(x.diagnostics.first_bad_row == w.diagnostics.first_bad_row);
            CHECK(x.diagnostics.infinite_rows == w.diagnostics.infinite_rows);
            CHECK(x.diagnostics.clamped_rows == w.diagnostics.clamped_rows);
            CHECK(x.diagnostics.careful_rows == w.diagnostics.careful_rows);
            CHECK(x.diagnostics.staleness_max == w.diagnostics.staleness_max);
            double top = 0, worst = 0;
            for (std::size_t i = 0; i < a.dz.size(); ++i) {
                const double g = double(element<G>::load(a.dz[i])), h = double(element<G>::load(b.dz[i]));
                top = std::max(top, std::abs(g)), worst = std::max(worst, std::abs(g - h));
            }
            CHECK(worst <= (sizeof(G) == 2 ? 1e-2 : 1e-5) * top);
            for (std::size_t i = 0; i < a.losses.size(); ++i)
                CHECK(a.losses[i] == doctest::Approx(b.losses[i]).epsilon(1e-5));
        }
}

TEST_CASE("on the device: env and element types as on the host") {
    if (!device_present()) return;
    device_memory memory;
    compare_with_host<float, float, float>(memory, 1);
    compare_with_host<bfloat16, bfloat16, bfloat16>(memory, 2);
    compare_with_host<opd::half, double, float>(memory, 3);
    compare_with_host<double, float, double>(memory, 4);
}

TEST_CASE("on the device: a call can be captured and replayed") {
    if (!device_present()) return;
    device_memory memory;
    cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    source s(8);
    dense_case<> c{.rows = 9, .vocab_z = 1500, .vocab_y = 1500};
    fill_normal(c, s);
    want_everything(c);
    memory.backend.stream = stream;
    const auto z = device_view(memory.put(c.z), 9, 1500), dz = device_view(memory.put(c.dz), 9, 1500),
               y = device_view(memory.put(c.y), 9, 1500);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    const device_result r = evaluate(memory.backend, student::logits{z, dz}, teacher::dense{y}, jsd{}, device_env{});
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess);
    REQUIRE(cudaGraphLaunch(replay, stream) == cudaSuccess);
    const result once = r.fetch(stream);
    REQUIRE(cudaGraphLaunch(replay, stream) == cudaSuccess);
    const result twice = r.fetch(stream);
    CHECK(std::memcmp(&once, &twice, sizeof once) == 0);
    CHECK(once.loss > 0);
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

TEST_CASE("on the device: gemm is row-major, transposes, accumulates") {
    if (!device_present()) return;
    device_memory memory;
    REQUIRE(cublasCreate(&memory.backend.cublas) == CUBLAS_STATUS_SUCCESS);
    source s(2);
    const index_t m = 5, k = 7, n = 3;
    for (int form = 0; form < 4; ++form) {
        const bool ta = form & 1, tb = form & 2;
        std::vector<float> a(m * k), b(k * n), c(m * n, 2), want;
        for (float& x : a) x = float(s.normal());
        for (float& x : b) x = float(s.normal());
        for (index_t i = 0; i < m; ++i)
            for (index_t j = 0; j < n; ++j) {
                double sum = 0;
                for (index_t l = 0; l < k; ++l)
                    sum += double(ta ? a[l * m + i] : a[i * k + l]) * double(tb ? b[j * k + l] : b[l * n + j]);
                want.push_back(float(1.5 * sum + 0.5 * 2));
            }
        float* pc = memory.put(c);
        memory.backend.gemm(ta, tb, 1.5f, device_view(memory.put(a), ta ? k : m, ta ? m : k),
                            device_view(memory.put(b), tb ? n : k, tb ? k : n), 0.5f, device_view(pc, m, n));
        memory.get(c, pc);
        for (std::size_t i = 0; i < c.size(); ++i) CHECK(c[i] == doctest::Approx(want[i]).epsilon(1e-5));
    }
    cublasDestroy(memory.backend.cublas);
}

TEST_CASE("on the device: env.on_bad throws from fetch, and the gradient is written") {
    if (!device_present()) return;
    device_memory memory;
    std::vector<float> z(12), y(12), dz(12, 777.f);
    z[5] = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = 0; i < 4; ++i) z[i] = float(i);
    const float* x = memory.put(z);
    float* g = memory.put(dz);
    const auto run = [&](bad policy) {
        return evaluate(memory.backend, student::logits{device_view(x, 3, 4), device_view(g, 3, 4)},
                        teacher::dense{device_view(static_cast<const float*>(memory.put(y)), 3, 4)}, reverse_kl{},
                        device_env{.on_bad = policy});
    };
    CHECK(memory.finish(run(bad::raise_above(.5))).diagnostics.bad_rows == 1);
    const device_result r = run(bad::raise());
    CHECK_THROWS_AS(memory.finish(r), bad_contents);
    memory.get(dz, g);
    CHECK(dz[3] != 777);
    for (std::size_t i = 4; i < 12; ++i) CHECK(dz[i] == 0); // the bad row; and p = q
}

} // namespace
