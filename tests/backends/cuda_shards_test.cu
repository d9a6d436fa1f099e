// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A vocabulary in shards on a device: ranks are host threads, each with a stream of its own, and what they gather goes
// from stream to stream by events. SKIPPED without a device.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <barrier>
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
#include "support/shard_parts.hpp"

namespace {

using namespace opd;
using namespace opd::test;

/// An all-gather among the streams of one device.
struct gathering_streams {
    std::barrier<> all;
    std::vector<const void*> from;
    std::vector<cudaEvent_t> sent, read;

    explicit gathering_streams(std::size_t ranks)
        : all(static_cast<std::ptrdiff_t>(ranks)), from(ranks), sent(ranks), read(ranks) {
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
        std::vector<cuda_backend> backends(ranks);
        std::vector<result> got(ranks);
        gathering_streams team(ranks);
        device_env e;
        e.reduction = job.env.reduction, e.on_infinite = job.env.on_infinite;
        const auto student_of_rank = [&](std::size_t i) {
            const index_t count = cuts[i + 1] - cuts[i];
            return student::logits<Z, G, space::device>{.z = {on_z + cuts[i], n, count, z.stride},
                                                        .dz = {on_dz + cuts[i], n, count, dz.stride},
                                                        .temperature = job.student.temperature,
                                                        .pad = padding::keep};
        };
        const auto teacher_of_rank = [&](std::size_t i) {
            return teacher::dense<Y, space::device>{{on_y + cuts[i], n, cuts[i + 1] - cuts[i], y.stride},
                                                    job.teacher.temperature};
        };
        for (std::size_t i = 0; i < ranks; ++i) {
            on_losses.push_back(memory.put(losses[i])), on_lse.push_back(memory.put(lse[i]));
            const std::size_t bytes =
                vocab_parallel_bytes(backends[i], {.first = cuts[i], .total = job.vocab}, student_of_rank(i),
                                     teacher_of_rank(i), job.estimator, e, int(ranks));
            backends[i].arena = {static_cast<std::byte*>(memory.allocate(bytes)), bytes};
            REQUIRE(cudaStreamCreate(&backends[i].stream) == cudaSuccess);
        }
        {
            std::vector<std::jthread> running;
            for (std::size_t i = 0; i < ranks; ++i)
                running.emplace_back([&, i] {
                    device_env mine = e;
                    mine.losses = vector_view<float, space::device>(on_losses[i], n);
                    mine.lse = vector_view<double, space::device>(on_lse[i], n);
                    got[i] = vocab_parallel(backends[i], {.first = cuts[i], .total = job.vocab}, student_of_rank(i),
                                            teacher_of_rank(i), job.estimator, mine, int(ranks),
                                            [&](const void* from, void* to, std::size_t bytes, cudaStream_t stream) {
                                                team(i, from, to, bytes, stream);
                                            })
                                 .fetch(backends[i].stream);
                });
        }
        for (std::size_t i = 0; i < ranks; ++i) {
            cudaStreamDestroy(backends[i].stream);
            memory.get(losses[i], on_losses[i]), memory.get(lse[i], on_lse[i]);
        }
        check_equal(got, losses, lse);
        std::vector<G> written(std::size_t(n * dz.stride));
        memory.get(written, on_dz);
        std::copy(written.begin(), written.end(), dz.data);
        std::copy(losses[0].begin(), losses[0].end(), job.env.losses.data);
        std::copy(lse[0].begin(), lse[0].end(), job.env.lse.data);
        return got[0];
    }
};

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

} // namespace
