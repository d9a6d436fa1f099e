// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the CUDA backend refuses before it touches a device, so that it is tested on every machine; and how it reports
// CUDA's own errors.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <span>
#include <string>
#include <vector>

#include "opd/backends/cuda.cuh"
#include "opd/backends/cuda_hidden.cuh"
#include "opd/backends/cuda_vocab_parallel.cuh"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/support.hpp"

namespace {

using namespace opd;

TEST_CASE("what a device call cannot do, and what it lacks, is refused in words") {
    cuda_backend be;
    float x = 0;
    const auto z = device_view(&x, 1, 1);
    CHECK_THROWS_AS(
        evaluate(be, student::logits{z}, teacher::dense{z}, reverse_kl{}, device_env{.on_infinite = infinite::raise()}),
        unsupported);
    CHECK_THROWS_AS(
        evaluate(be, student::logits{z}, teacher::dense{z}, reverse_kl{}, device_env{.checks = check::contents}),
        unsupported);
    try {
        evaluate(be, student::logits{z}, teacher::dense{z}, reverse_kl{}, device_env{});
        FAIL("no arena, no error");
    } catch (const invalid_input& e) {
        CHECK(e.argument == "cuda_backend.arena");
        CHECK(std::string(e.what()).find("this call needs " + std::to_string(cuda_backend::workspace_bytes(1))) !=
              std::string::npos);
    }
    CHECK(cuda_backend::workspace_bytes(1 << 30) < (2u << 20));
    CHECK_THROWS_AS(
        be.gemm(false, false, 1.f, device_view(&x, 1, 2), device_view(&x, 1, 2), 0.f, device_view(&x, 1, 1)),
        invalid_input);
}

TEST_CASE("an arena for the rows alone is too small for a support, in words") {
    cuda_backend be;
    std::vector<std::byte> not_device_memory(cuda_backend::workspace_bytes(1));
    be.arena = not_device_memory; // never touched: the call is refused first
    float x = 0;
    std::int32_t id = 0;
    const auto z = device_view(static_cast<const float*>(&x), 1, 4000);
    const auto ids = device_view(static_cast<const std::int32_t*>(&id), 1, 1000);
    const auto logs = device_view(static_cast<const float*>(&x), 1, 1000);
    const teacher::support cache{ids, logs};
    const std::size_t needed = workspace_bytes(be, student::logits{z}, cache, tail_bucket{reverse_kl{}});
    CHECK(needed > not_device_memory.size());
    CHECK_THROWS_WITH_AS(evaluate(be, student::logits{z}, cache, tail_bucket{reverse_kl{}}),
                         ("opd: cuda_backend.arena: holds " + std::to_string(not_device_memory.size()) +
                          " bytes; this call needs " + std::to_string(needed) + " (see workspace_bytes)")
                             .c_str(),
                         invalid_input);
}

TEST_CASE("losses from hidden states want a handle, its workspace and the arena that workspace_bytes says") {
    cuda_backend be;
    float x[8] = {};
    const float* in = x;
    const student::hidden mine{device_view(in, 1, 2), device_view(in + 2, 1, 2)};
    const teacher::hidden theirs{device_view(in, 1, 2), device_view(in + 2, 1, 2)};
    const auto refused = [&](const char* argument, const std::string& what) {
        try {
            evaluate(be, mine, theirs, reverse_kl{});
            FAIL("was taken");
        } catch (const invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK_MESSAGE(std::string(e.what()).find(what) != std::string::npos, e.what());
        }
    };
    be.product_workspace = 65535;
    refused("cuda_backend.product_workspace", "is 65535 bytes; cuBLAS needs 65536");
    be.product_workspace = 65536;
    const std::size_t needed = workspace_bytes(be, mine, theirs, reverse_kl{});
    CHECK(needed > 65536 + 2 * 32);
    CHECK(needed < 65536 + 8192);
    std::vector<std::byte> memory(needed);
    be.arena = std::span(memory).first(needed - 512);
    refused("cuda_backend.arena", "this call needs " + std::to_string(needed));
    be.arena = memory;
    refused("cuda_backend.cublas", "is null");
}

TEST_CASE("CUDA's errors become cuda_error, with call and code") {
    try {
        detail::cuda_check("cudaMalloc", cudaErrorMemoryAllocation);
        FAIL("no error");
    } catch (const error& e) { // every exception of the library is an opd::error
        CHECK(std::string(e.what()) == "opd: cudaMalloc: out of memory (2)");
        CHECK(dynamic_cast<const cuda_error*>(&e)->code == 2);
    }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return; // a launch would succeed
    std::vector<std::byte> memory(cuda_backend::workspace_bytes(1));
    cuda_backend be{.arena = memory};
    float x = 0;
    const auto z = device_view(&x, 1, 1);
    CHECK_THROWS_AS(evaluate(be, student::logits{z}, teacher::dense{z}, reverse_kl{}), cuda_error);
}

TEST_CASE("a device's shards are refused before anything is enqueued") {
    cuda_backend be;
    float* const z = reinterpret_cast<float*>(std::uintptr_t{4096}); // nobody reads it
    const student::logits student{device_view(static_cast<const float*>(z), 2, 8)};
    const teacher::dense known{device_view(static_cast<const float*>(z), 2, 8)};
    bool asked = false;
    const auto gather = [&](const void*, void*, std::size_t, cudaStream_t) { asked = true; };
    const auto call = [&](vocab_shard shard, const device_env& e, int ranks) {
        return vocab_parallel(be, shard, student, known, reverse_kl{}, e, ranks, gather);
    };
    CHECK_THROWS_AS(call({.first = 0, .total = 16}, {}, 0), invalid_input);                               // ranks
    CHECK_THROWS_AS(call({.first = 9, .total = 16}, {}, 2), invalid_input);                               // first
    CHECK_THROWS_AS(call({.first = 0, .total = 16}, {.checks = check::contents}, 2), unsupported);        // waits
    CHECK_THROWS_AS(call({.first = 0, .total = 16}, {.on_infinite = infinite::raise()}, 2), unsupported); // waits
    CHECK_THROWS_AS(call({.first = 0, .total = 16}, {}, 2), invalid_input);                               // the arena
    CHECK(!asked);
    const std::size_t two = vocab_parallel_bytes(be, {0, 16}, student, known, reverse_kl{}, {}, 2),
                      three = vocab_parallel_bytes(be, {0, 16}, student, known, reverse_kl{}, {}, 3);
    CHECK(three > two);
}

TEST_CASE("a device's shards from hidden states need cuBLAS, and its memory is counted") {
    cuda_backend be;
    const float* const x = reinterpret_cast<const float*>(std::uintptr_t{4096}); // nobody reads it
    float* const g = reinterpret_cast<float*>(std::uintptr_t{1 << 20});
    const student::hidden mine{device_view(x, 2, 4), device_view(x, 8, 4), device_view(g, 2, 4),
                               device_view(g + 64, 8, 4)};
    const teacher::hidden theirs{device_view(x, 2, 4), device_view(x, 8, 4)};
    const std::size_t bytes = vocab_parallel_bytes(be, {0, 16}, mine, theirs, reverse_kl{}, {}, 2);
    CHECK(bytes > be.product_workspace);
    std::vector<std::byte> memory(bytes);
    be.arena = memory;
    try {
        vocab_parallel(be, {0, 16}, mine, theirs, reverse_kl{}, device_env{}, 2,
                       [](const void*, void*, std::size_t, cudaStream_t) { FAIL("nothing is enqueued"); });
        FAIL("no handle, no error");
    } catch (const invalid_input& e) {
        CHECK(e.argument == "cuda_backend.cublas");
    }
}

} // namespace
