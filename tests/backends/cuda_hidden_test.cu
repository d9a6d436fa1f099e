// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses from hidden states on a device, products by cuBLAS: the cases of the host-run test against the same float64
// reference, and capture. SKIPPED without one.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <utility>
#include <vector>

#include "backends/cuda_device.cuh"
#include "backends/hidden_cases.hpp"
#include "opd/backends/cuda_hidden.cuh"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/support.hpp"
#include "opd/score.hpp"

namespace {

using namespace opd;
using namespace opd::test;

constexpr double in_float = 2e-5, in_bfloat16 = 1e-2; // what is promised of gradients; float sums in cuBLAS's order

/// Device memory, with a handle and the arena of each call.
struct hidden_memory : device_memory {
    hidden_memory() {
        REQUIRE(cublasCreate(&backend.cublas) == CUBLAS_STATUS_SUCCESS);
        backend.product_workspace = std::size_t{1} << 20;
    }
    ~hidden_memory() { cublasDestroy(backend.cublas); }
    void make_room(std::size_t bytes) {
        backend.arena = {static_cast<std::byte*>(allocate(bytes)), bytes};
        REQUIRE(cudaMemset(backend.arena.data(), 0xff, bytes) == cudaSuccess); // NaN
    }
};

template <class X>
hidden_case<X> ordinary(index_t n, index_t v, std::uint64_t seed, bool more = false) {
    return {{n, v, 64, seed, more, more ? 3.f : 0.f}, {n, v, 96, seed + 1, more, more ? 5.f : 0.f}};
}

/// The mean of the log-sum-exps, in the arena of the call before.
template <class Source>
double log_sum_exp_of(cuda_backend& be, const Source& rows, index_t n) {
    std::vector<double> lse(static_cast<std::size_t>(n));
    double* out = nullptr;
    REQUIRE(cudaMalloc(&out, lse.size() * sizeof(double)) == cudaSuccess);
    log_sum_exp(be, rows, device_view(out, n)).fetch(be.stream);
    REQUIRE(cudaMemcpy(lse.data(), out, lse.size() * sizeof(double), cudaMemcpyDeviceToHost) == cudaSuccess);
    cudaFree(out);
    double sum = 0;
    for (const double x : lse) sum += x;
    return sum / double(n);
}

TEST_CASE("on the device: hidden states give value and gradients, whatever the block of rows") {
    if (!device_present()) return;
    for (const index_t v : {1, 37, 1000, 20003})
        for (const bool more : {false, true})
            for (const index_t block : {0, 1, 7}) {
                CAPTURE(v);
                CAPTURE(more);
                CAPTURE(block);
                hidden_memory memory;
                hidden_case<float> c = ordinary<float>(v > 2000 ? 9 : 21, v, std::uint64_t(v), more);
                c.block = block;
                const auto first = check_hidden(memory, c, reverse_kl{}, in_float);
                CHECK(same_outputs(first, run_hidden(memory, c, reverse_kl{}))); // run_to_run
            }
}

TEST_CASE("on the device: bfloat16 states and heads, and TF32 where it is asked for") {
    if (!device_present()) return;
    for (const bool more : {false, true})
        for (const index_t block : {0, 7}) {
            hidden_memory memory;
            hidden_case<bfloat16> c = ordinary<bfloat16>(33, 1000, 7, more);
            c.block = block;
            check_hidden(memory, c, reverse_kl{}, in_bfloat16);
            hidden_case<float> f = ordinary<float>(33, 1000, 7, more);
            f.block = block;
            memory.backend.tf32 = true;
            check_hidden(memory, f, reverse_kl{}, in_bfloat16);
        }
}

TEST_CASE("on the device: masks, weights, bad rows, beta, sequences, another vocabulary") {
    if (!device_present()) return;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const index_t block : {0, 1, 4}) {
        hidden_memory memory;
        hidden_case<float> c = ordinary<float>(17, 600, 9, true);
        c.block = block, c.before = 3, c.beta = 2, c.beta_head = 0.5f;
        c.student.temperature = 0.7f, c.teacher.temperature = 1.5f;
        source s(2);
        for (index_t r = 0; r < 17; ++r) c.mask.push_back(r % 4 != 2), c.weights.push_back(float(s.normal()));
        c.student.x(2, 2) = nan; // masked
        c.student.x(1, 3) = nan;
        c.teacher.x(7, 0) = nan;
        const auto got = check_hidden(memory, c, reverse_kl{}, in_float, {1, 7});
        for (index_t r : {1, 2, 7})
            for (index_t i = 0; i < 64; ++i) CHECK(got.dx.at(r, i) == 6);
        hidden_case<float> other{{9, 9001, 32, 1, true, 4}, {9, 8500, 40, 2}};
        other.vocab = vocabulary::drop_and_renormalise, other.block = block;
        check_hidden(memory, other, reverse_kl{}, in_float);
    }
    hidden_memory memory;
    hidden_case<float> none{{0, 300, 6, 1}, {0, 300, 7, 2}};
    none.before = 4, none.beta_head = 0.5f;
    const auto got = run_hidden(memory, none, reverse_kl{});
    CHECK(got.r.loss == 0);
    for (const float x : got.db) CHECK(x == 2);
}

TEST_CASE("on the device: a support's tail over hidden states, as on the host") {
    if (!device_present()) return;
    const index_t n = 12, v = 1000, k = 4;
    hidden_case<float> c = ordinary<float>(n, v, 5, true);
    c.block = 5;
    std::vector<std::int32_t> ids;
    std::vector<float> log_q;
    for (index_t r = 0; r < n; ++r)
        for (index_t j = 0; j < k; ++j) ids.push_back(std::int32_t(200 * j + 7 * r)), log_q.push_back(-2.f - float(j));
    const auto run = [&](auto& memory) {
        hidden_outputs o(c);
        hidden_call<float, std::remove_cvref_t<decltype(memory)>> call(memory, c, o);
        call.run(call.mine,
                 teacher::support{device_view(static_cast<const std::int32_t*>(memory.put(ids)), n, k),
                                  device_view(static_cast<const float*>(memory.put(log_q)), n, k)},
                 tail_bucket{reverse_kl{}});
        return o;
    };
    hidden_memory device;
    blocks_on_host host;
    const hidden_outputs a = run(device), b = run(host);
    CHECK(a.r.loss == doctest::Approx(b.r.loss).epsilon(1e-5));
    apart dx, dw;
    for (std::size_t i = 0; i < a.dx.data.size(); ++i) dx.add(double(a.dx.data[i]), double(b.dx.data[i]));
    for (std::size_t i = 0; i < a.dw.data.size(); ++i) dw.add(double(a.dw.data[i]), double(b.dw.data[i]));
    CHECK(dx.relative() < in_float);
    CHECK(dw.relative() < in_float);
}

TEST_CASE("on the device: the page's call") {
    if (!device_present()) return;
    hidden_memory memory;
    cuda_backend& be = memory.backend;
    const index_t n = 6, v = 500, d = 16, d_teacher = 24;
    source s(1);
    const auto normal = [&](index_t count) {
        std::vector<float> all;
        for (index_t i = 0; i < count; ++i) all.push_back(float(s.normal()));
        return static_cast<const float*>(memory.put(all));
    };
    const float *x = normal(n * d), *w = normal(v * d), *h = normal(n * d_teacher), *head = normal(v * d_teacher);
    auto* const dx = static_cast<float*>(memory.allocate(std::size_t(n * d) * sizeof(float)));
    auto* const dw = static_cast<float*>(memory.allocate(std::size_t(v * d) * sizeof(float)));
    // clang-format off
    const student::hidden mine{device_view(x, n, d), device_view(w, v, d),    // float, or bfloat16
                               device_view(dx, n, d), device_view(dw, v, d)}; // float
    const teacher::hidden theirs{device_view(h, n, d_teacher), device_view(head, v, d_teacher)};
    const std::size_t bytes = workspace_bytes(be, mine, theirs, reverse_kl{});
    be.arena = {static_cast<std::byte*>(memory.allocate(bytes)), bytes};
    const device_result r = evaluate(be, mine, theirs, reverse_kl{}); // enqueued; fetch waits
    // clang-format on
    CHECK(r.fetch(be.stream).loss > 0);
    CHECK(log_sum_exp_of(be, theirs, n) > 0);
}

TEST_CASE("on the device: a head with an update is W + scale B A") {
    if (!device_present()) return;
    hidden_memory memory;
    cuda_backend& be = memory.backend;
    const index_t n = 20, v = 9000, d = 32, rank = 4;
    const float scale = 0.7f;
    source s(3);
    const auto numbers = [&](index_t count, double deviation) {
        std::vector<float> all;
        for (index_t i = 0; i < count; ++i) all.push_back(float(deviation * s.normal()));
        return all;
    };
    std::vector<float> x = numbers(n * d, 1), w = numbers(v * d, 0.4), b = numbers(v * rank, 0.4),
                       a = numbers(rank * d, 0.2), h = numbers(n * d, 1), whole = w;
    for (index_t i = 0; i < v; ++i)
        for (index_t j = 0; j < d; ++j)
            for (index_t k = 0; k < rank; ++k)
                whole[std::size_t(i * d + j)] += scale * b[std::size_t(i * rank + k)] * a[std::size_t(k * d + j)];
    const auto at = [&](std::vector<float>& of) { return static_cast<const float*>(memory.put(of)); };
    std::vector<float> dx(x.size()), dw(w.size()), dx_update(x.size()), db(b.size()), da(a.size());
    float *of_x = memory.put(dx), *of_w = memory.put(dw), *of_x_update = memory.put(dx_update), *of_b = memory.put(db),
          *of_a = memory.put(da);
    const float* states = at(x);
    const teacher::hidden theirs{device_view(at(h), n, d), device_view(at(w), v, d)};
    const auto run = [&](auto student) {
        student.budget = detail::block_layout(student, 0).of_row * 8; // blocks of 8, 8 and 4
        memory.make_room(workspace_bytes(be, student, theirs, reverse_kl{}));
        return evaluate(be, student, theirs, reverse_kl{}).fetch(be.stream).loss;
    };
    const double want = run(student::hidden{device_view(states, n, d), device_view(at(whole), v, d),
                                            device_view(of_x, n, d), device_view(of_w, v, d)});
    lora_head head{device_view(at(w), v, d), device_view(at(b), v, rank), device_view(at(a), rank, d)};
    head.scale = scale, head.db = device_view(of_b, v, rank), head.da = device_view(of_a, rank, d);
    const double got = run(student::hidden{device_view(states, n, d), head, device_view(of_x_update, n, d)});
    CHECK(std::abs(got - want) <= in_float * want);
    memory.get(dx, of_x), memory.get(dw, of_w), memory.get(dx_update, of_x_update), memory.get(db, of_b),
        memory.get(da, of_a);
    apart states_apart, b_apart, a_apart; // dB = scale dW Aᵀ, dA = scale Bᵀ dW
    for (std::size_t i = 0; i < dx.size(); ++i) states_apart.add(double(dx_update[i]), double(dx[i]));
    std::vector<double> of_all_a(a.size());
    for (index_t i = 0; i < v; ++i)
        for (index_t k = 0; k < rank; ++k) {
            double sum = 0;
            for (index_t j = 0; j < d; ++j) {
                const double g = double(scale) * double(dw[std::size_t(i * d + j)]);
                sum += g * double(a[std::size_t(k * d + j)]);
                of_all_a[std::size_t(k * d + j)] += g * double(b[std::size_t(i * rank + k)]);
            }
            b_apart.add(double(db[std::size_t(i * rank + k)]), sum);
        }
    for (std::size_t i = 0; i < da.size(); ++i) a_apart.add(double(da[i]), of_all_a[i]);
    CHECK(states_apart.relative() <= in_float);
    CHECK(b_apart.relative() <= in_float);
    CHECK(a_apart.relative() <= in_float);
}

TEST_CASE("on the device: a head of one's own, decoded a stretch of ids at a time") {
    if (!device_present()) return;
    for (const index_t v : {300, 9000}) {
        const index_t n = 5, d = 40;
        hidden_memory memory;
        source s{std::uint64_t(v)};
        std::vector<std::int8_t> numbers;
        std::vector<float> scales, decoded, x, y, dx(std::size_t(n * d)), of_view(dx);
        for (index_t i = 0; i < v; ++i) {
            scales.push_back(float(0.004 + 0.001 * s.normal()));
            for (index_t j = 0; j < d; ++j) {
                numbers.push_back(std::int8_t(std::clamp(40 * s.normal(), -127., 127.)));
                decoded.push_back(scales.back() * float(numbers.back()));
            }
        }
        for (index_t i = 0; i < n * d; ++i) x.push_back(float(s.normal())), y.push_back(float(s.normal()));
        const auto put = [&](auto& from, index_t rows) {
            return device_view(static_cast<const float*>(memory.put(from)), rows, d);
        };
        const auto states = put(x, n), of_teacher = put(y, n), whole = put(decoded, v);
        const coarse_head coarse{memory.put(numbers), memory.put(scales), v, d};
        float* const gradient = memory.put(dx);
        const auto run = [&](const auto& head, std::vector<float>& out) {
            const student::hidden mine{states, head, device_view(gradient, n, d)};
            const teacher::hidden theirs{of_teacher, head};
            memory.make_room(workspace_bytes(memory.backend, mine, theirs, reverse_kl{}));
            const result r = memory.finish(evaluate(memory.backend, mine, theirs, reverse_kl{}));
            memory.get(out, gradient);
            return r;
        };
        const result want = run(whole, of_view), got = run(coarse, dx);
        CHECK(got.diagnostics.bad_rows == 0);
        CHECK(got.loss == doctest::Approx(want.loss).epsilon(1e-5));
        apart all;
        for (std::size_t i = 0; i < dx.size(); ++i) all.add(double(dx[i]), double(of_view[i]));
        CHECK(all.relative() < in_float);
    }
}

TEST_CASE("on the device: a call from hidden states is captured and replayed; the handle's stream is put back") {
    if (!device_present()) return;
    hidden_memory memory;
    cudaStream_t stream, before, after;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    REQUIRE(cublasGetStream(memory.backend.cublas, &before) == CUBLAS_STATUS_SUCCESS);
    memory.backend.stream = stream;
    hidden_case<float> c = ordinary<float>(20, 1000, 8, true);
    c.block = 8;
    hidden_outputs direct(c), replayed(c);
    {
        hidden_call<float, hidden_memory> call(memory, c, direct);
        call.run(call.mine, call.theirs, reverse_kl{});
    }
    hidden_call<float, hidden_memory> call(memory, c, replayed);
    memory.make_room(workspace_bytes(memory.backend, call.mine, call.theirs, reverse_kl{}, call.e));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    const device_result r = evaluate(memory.backend, call.mine, call.theirs, reverse_kl{}, call.e);
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess);
    for (int i = 0; i < 2; ++i) {
        REQUIRE(cudaGraphLaunch(replay, stream) == cudaSuccess);
        replayed.r = r.fetch(stream);
        memory.get(replayed.dx.data, call.dx), memory.get(replayed.dw.data, call.dw);
        memory.get(replayed.db, call.db), memory.get(replayed.losses, call.losses), memory.get(replayed.lse, call.lse);
        CHECK(same_outputs(direct, replayed));
    }
    REQUIRE(cublasGetStream(memory.backend.cublas, &after) == CUBLAS_STATUS_SUCCESS);
    CHECK(before == after);
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

} // namespace
