// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A vocabulary in shards on a device: ranks are host threads, each with a stream of its own, and what they gather goes
// from stream to stream by events. SKIPPED without a device.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda_cases.hpp"
#include "backends/cuda_device.cuh"
#include "opd/backends/cuda_vocab_parallel.cuh"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/support.hpp"
#include "opd/hidden.hpp"
#include "support/meeting.hpp"
#include "support/shard_parts.hpp"

namespace {

using namespace opd;
using namespace opd::test;

/// An all-gather among the streams of one device.
struct gathering_streams {
    meeting all;
    std::vector<const void*> from;
    std::vector<cudaEvent_t> sent, read;

    explicit gathering_streams(std::size_t ranks) : all(ranks), from(ranks), sent(ranks), read(ranks) {
        for (cudaEvent_t& e : sent) REQUIRE(cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess);
        for (cudaEvent_t& e : read) REQUIRE(cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess);
    }
    gathering_streams(const gathering_streams&) = delete;
    gathering_streams& operator=(const gathering_streams&) = delete;
    ~gathering_streams() {
        for (cudaEvent_t e : sent) cudaEventDestroy(e);
        for (cudaEvent_t e : read) cudaEventDestroy(e);
    }
    void operator()(std::size_t rank, const void* own, void* to, std::size_t bytes, cudaStream_t stream) {
        from[rank] = own;
        cudaEventRecord(sent[rank], stream);
        all.arrive_and_wait();
        for (std::size_t i = 0; i < from.size(); ++i) {
            cudaStreamWaitEvent(stream, sent[i], 0);
            cudaMemcpyAsync(static_cast<std::byte*>(to) + i * bytes, from[i], bytes, cudaMemcpyDeviceToDevice, stream);
        }
        cudaEventRecord(read[rank], stream);
        all.arrive_and_wait();
        for (cudaEvent_t e : read) cudaStreamWaitEvent(stream, e, 0); // before `own` is written again
    }
};

/// Every rank's call, in a thread and on a stream of its own: call(rank, backend, ranks, gather) after it has got an
/// arena of bytes(rank, backend, ranks).
template <class Bytes, class Call>
std::vector<result> run_ranks(device_memory& memory, std::size_t ranks, Bytes bytes, Call call) {
    std::vector<cuda_backend> backends(ranks);
    std::vector<result> got(ranks);
    gathering_streams team(ranks);
    for (std::size_t i = 0; i < ranks; ++i) {
        REQUIRE(cudaStreamCreate(&backends[i].stream) == cudaSuccess);
        const std::size_t size = bytes(i, backends[i], int(ranks));
        backends[i].arena = {static_cast<std::byte*>(memory.allocate(size)), size};
    }
    {
        std::vector<std::jthread> running;
        for (std::size_t i = 0; i < ranks; ++i)
            running.emplace_back([&, i] {
                const auto gather = [&](const void* from, void* to, std::size_t size, cudaStream_t stream) {
                    team(i, from, to, size, stream);
                };
                got[i] = call(i, backends[i], int(ranks), gather).fetch(backends[i].stream);
            });
    }
    for (cuda_backend& be : backends) cudaStreamDestroy(be.stream);
    return got;
}

/// Takes host calls, and runs each on the device in the shards of `cuts`.
struct device_shards {
    static constexpr space memory_space = space::host;
    std::vector<index_t> cuts = {};

    template <class T>
    static T* upload(device_memory& memory, const T* from, index_t count) {
        std::vector<T> copy(from, from + count);
        return memory.put(copy);
    }
    template <class Z, class G, class Y, class D>
    result for_rows(const row_job<student::logits<Z, G>, teacher::dense<Y>, D, space::host>& job) {
        const std::size_t ranks = cuts.size() - 1;
        const index_t n = job.rows;
        device_memory memory;
        const auto& z = job.student.z;
        const auto& y = job.teacher.y;
        const auto& dz = job.student.dz;
        const Z* const on_z = upload(memory, z.data, n * z.stride);
        const Y* const on_y = upload(memory, y.data, n * y.stride);
        G* const on_dz = upload(memory, static_cast<const G*>(dz.data), n * dz.stride);
        std::vector<std::vector<float>> losses(ranks, std::vector<float>(std::size_t(n)));
        std::vector<std::vector<double>> lse(ranks, std::vector<double>(std::size_t(n)));
        std::vector<float*> on_losses;
        std::vector<double*> on_lse;
        for (std::size_t i = 0; i < ranks; ++i)
            on_losses.push_back(memory.put(losses[i])), on_lse.push_back(memory.put(lse[i]));
        const auto shard = [&](std::size_t i) { return vocab_shard{.first = cuts[i], .total = job.vocab}; };
        const auto student = [&](std::size_t i) {
            const index_t count = cuts[i + 1] - cuts[i];
            return student::logits<Z, G, space::device>{.z = {on_z + cuts[i], n, count, z.stride},
                                                        .dz = {on_dz + cuts[i], n, count, dz.stride},
                                                        .temperature = job.student.temperature,
                                                        .pad = padding::keep};
        };
        const auto teacher = [&](std::size_t i) {
            return teacher::dense<Y, space::device>{{on_y + cuts[i], n, cuts[i + 1] - cuts[i], y.stride},
                                                    job.teacher.temperature};
        };
        const auto env_of_rank = [&](std::size_t i) {
            device_env e;
            e.reduction = job.env.reduction, e.on_infinite = job.env.on_infinite;
            e.losses = {on_losses[i], n}, e.lse = {on_lse[i], n};
            return e;
        };
        const std::vector<result> got = run_ranks(
            memory, ranks,
            [&](std::size_t i, const cuda_backend& be, int count) {
                return vocab_parallel_bytes(be, shard(i), student(i), teacher(i), job.estimator, env_of_rank(i), count);
            },
            [&](std::size_t i, const cuda_backend& be, int count, const auto& gather) {
                return vocab_parallel(be, shard(i), student(i), teacher(i), job.estimator, env_of_rank(i), count,
                                      gather);
            });
        for (std::size_t i = 0; i < ranks; ++i) memory.get(losses[i], on_losses[i]), memory.get(lse[i], on_lse[i]);
        check_equal(got, losses, lse);
        std::vector<G> written(std::size_t(n * dz.stride));
        memory.get(written, on_dz);
        std::copy(written.begin(), written.end(), dz.data);
        std::copy(losses[0].begin(), losses[0].end(), job.env.losses.data);
        std::copy(lse[0].begin(), lse[0].end(), job.env.lse.data);
        return got[0];
    }
};

/// A call on few ids a row, in shards and as one.
template <class Cache, class Estimator>
void compare_with_one(device_memory& memory, const float* z, index_t n, index_t v, const Cache& cache,
                      const Estimator& estimator) {
    std::vector<float> whole(std::size_t(n * v)), split(whole);
    float *on_whole = memory.put(whole), *on_split = memory.put(split);
    const result want =
        memory.finish(evaluate(memory.backend, student::logits{device_view(z, n, v), device_view(on_whole, n, v)},
                               cache, estimator, device_env{}));
    const std::vector<index_t> cuts{0, v / 3, v / 3, v - 1, v};
    const auto shard = [&](std::size_t i) { return vocab_shard{.first = cuts[i], .total = v}; };
    const auto student = [&](std::size_t i) {
        const index_t count = cuts[i + 1] - cuts[i];
        return student::logits<float, float, space::device>{
            .z = {z + cuts[i], n, count, v}, .dz = {on_split + cuts[i], n, count, v}, .pad = padding::keep};
    };
    const std::vector<result> got = run_ranks(
        memory, cuts.size() - 1,
        [&](std::size_t i, const cuda_backend& be, int ranks) {
            return vocab_parallel_bytes(be, shard(i), student(i), cache, estimator, device_env{}, ranks);
        },
        [&](std::size_t i, const cuda_backend& be, int ranks, const auto& gather) {
            return vocab_parallel(be, shard(i), student(i), cache, estimator, device_env{}, ranks, gather);
        });
    for (const result& r : got) CHECK(std::memcmp(&r, &got[0], sizeof r) == 0);
    CHECK(got[0].loss == doctest::Approx(want.loss).epsilon(1e-5));
    memory.get(whole, on_whole), memory.get(split, on_split);
    double top = 0, worst = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
        top = std::max(top, std::abs(double(whole[i])));
        worst = std::max(worst, std::abs(double(whole[i]) - double(split[i])));
    }
    CHECK(worst <= 1e-5 * top);
}

struct shard_check {
    const dense_case<>& c;
    holes h;
    std::vector<index_t> cuts;
    template <class Divergence>
    void operator()(const char* name, const Divergence& d) const {
        if (!finite_with(d, h)) return;
        INFO(std::string(name));
        CAPTURE(int(h));
        device_shards shards{cuts};
        host_memory memory{shards};
        check_against_reference(memory, c, d, gradient_tolerance(d));
    }
};

TEST_CASE("on the device: value and gradient in shards, the same bits on every rank") {
    if (!device_present()) return;
    std::uint64_t seed = 1;
    for (index_t vocab : {2, 257, 5000, 151936})
        for (holes h : every_hole) {
            source s(seed++);
            dense_case<> c{.rows = 3, .vocab_z = vocab, .vocab_y = vocab};
            c.t_s = float(0.5 + 1.5 * s.uniform());
            fill_normal(c, s);
            punch(c, h, s);
            for (const std::vector<index_t>& cuts :
                 std::vector<std::vector<index_t>>{{0, vocab}, {0, vocab / 3, vocab / 3, vocab - 1, vocab}}) {
                const shard_check check{c, h, cuts};
                check("reverse_kl", reverse_kl{}); // a program of each kind: one sweep, two, powers
                check("jsd(.3, .6)", jsd{.3, .6});
                check("chi_squared", chi_squared{});
            }
        }
}

TEST_CASE("on the device: supports and drawn tokens in shards as in one") {
    if (!device_present()) return;
    device_memory memory;
    const index_t n = 4, v = 700, k = 6;
    source s(3);
    std::vector<float> z(std::size_t(n * v)), log_mu(std::size_t(n * k)), log_q(log_mu);
    std::vector<std::int32_t> ids(std::size_t(n * k));
    for (float& x : z) x = float(2 * s.normal());
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = std::int32_t(index_t(i) % k * 110 + s.below(110));
        log_mu[i] = float(-6 - s.uniform()), log_q[i] = float(-5 - s.uniform());
    }
    const float* const on_z = memory.put(z);
    const auto on_ids = device_view(static_cast<const std::int32_t*>(memory.put(ids)), n, k);
    const auto on_mu = device_view(static_cast<const float*>(memory.put(log_mu)), n, k),
               on_q = device_view(static_cast<const float*>(memory.put(log_q)), n, k);
    compare_with_one(memory, on_z, n, v, teacher::samples{on_ids, on_mu, on_q}, mc{});
    compare_with_one(memory, on_z, n, v, teacher::support{on_ids, on_q}, tail_bucket{reverse_kl{}});
    compare_with_one(memory, on_z, n, v, teacher::support{on_ids, on_q}, renormalised{reverse_kl{}});
}

TEST_CASE("on the device: heads in shards as one head, dx added up over the ranks") {
    if (!device_present()) return;
    device_memory memory;
    const index_t n = 9, v = 900, d = 16;
    source s(4);
    const auto normals = [&](index_t count, double deviation) {
        std::vector<float> x;
        for (index_t i = 0; i < count; ++i) x.push_back(float(deviation * s.normal()));
        return x;
    };
    std::vector<float> x = normals(n * d, 1), w = normals(v * d, 0.5), y = normals(n * d, 1), h = normals(v * d, 0.5);
    const float *on_x = memory.put(x), *on_w = memory.put(w), *on_y = memory.put(y), *on_h = memory.put(h);
    const std::vector<index_t> cuts{0, 300, 300, 650, v};
    const std::size_t ranks = cuts.size() - 1;
    const auto student = [&](index_t first, index_t count, float* dx, float* dw) {
        student::hidden<float, float, space::device> out;
        out.x = device_view(on_x, n, d), out.w = device_view(on_w + first * d, count, d);
        out.dx = device_view(dx, n, d), out.dw = device_view(dw + first * d, count, d);
        out.budget = detail::block_layout(out, 0, v / index_t(ranks)).of_row * 4; // blocks of 4, 4 and 1 in shards
        return out;
    };
    const auto teacher = [&](index_t first, index_t count) {
        return teacher::hidden<float, space::device>{.x = device_view(on_y, n, d),
                                                     .w = device_view(on_h + first * d, count, d)};
    };
    std::vector<float> dx(std::size_t(n * d)), dw(std::size_t(v * d)), split_dw(dw);
    float *on_dx = memory.put(dx), *on_dw = memory.put(dw), *on_split = memory.put(split_dw);
    cuda_backend one;
    REQUIRE(cublasCreate(&one.cublas) == CUBLAS_STATUS_SUCCESS);
    auto whole = student(0, v, on_dx, on_dw);
    whole.budget = std::size_t{1} << 30;
    const std::size_t bytes = workspace_bytes(one, whole, teacher(0, v), reverse_kl{});
    one.arena = {static_cast<std::byte*>(memory.allocate(bytes)), bytes};
    const result want = evaluate(one, whole, teacher(0, v), reverse_kl{}).fetch(one.stream);
    std::vector<std::vector<float>> parts(ranks, std::vector<float>(std::size_t(n * d)));
    std::vector<float*> on_parts;
    std::vector<cublasHandle_t> handles(ranks);
    for (std::size_t i = 0; i < ranks; ++i) {
        on_parts.push_back(memory.put(parts[i]));
        REQUIRE(cublasCreate(&handles[i]) == CUBLAS_STATUS_SUCCESS);
    }
    const auto shard = [&](std::size_t i) { return vocab_shard{.first = cuts[i], .total = v}; };
    const auto mine = [&](std::size_t i) { return student(cuts[i], cuts[i + 1] - cuts[i], on_parts[i], on_split); };
    const auto theirs = [&](std::size_t i) { return teacher(cuts[i], cuts[i + 1] - cuts[i]); };
    const std::vector<result> got = run_ranks(
        memory, ranks,
        [&](std::size_t i, cuda_backend& be, int count) {
            be.cublas = handles[i];
            return vocab_parallel_bytes(be, shard(i), mine(i), theirs(i), reverse_kl{}, device_env{}, count);
        },
        [&](std::size_t i, const cuda_backend& be, int count, const auto& gather) {
            return vocab_parallel(be, shard(i), mine(i), theirs(i), reverse_kl{}, device_env{}, count, gather);
        });
    for (const result& r : got) CHECK(std::memcmp(&r, &got[0], sizeof r) == 0);
    CHECK(got[0].loss == doctest::Approx(want.loss).epsilon(1e-5));
    memory.get(dx, on_dx), memory.get(dw, on_dw), memory.get(split_dw, on_split);
    std::vector<float> sum(std::size_t(n * d));
    for (std::size_t i = 0; i < ranks; ++i) {
        memory.get(parts[i], on_parts[i]);
        for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += parts[i][j];
        cublasDestroy(handles[i]);
    }
    cublasDestroy(one.cublas);
    const auto apart = [](const std::vector<float>& a, const std::vector<float>& b) {
        double far = 0, size = 0;
        for (std::size_t i = 0; i < a.size(); ++i)
            far += std::pow(double(a[i]) - double(b[i]), 2), size += double(b[i]) * double(b[i]);
        return std::sqrt(far / size);
    };
    CHECK(apart(sum, dx) <= 1e-5);
    CHECK(apart(split_dw, dw) <= 1e-5);
}

} // namespace
