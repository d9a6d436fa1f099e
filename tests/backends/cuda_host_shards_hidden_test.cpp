// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: no
//
// A vocabulary in shards from hidden states as devices compute it, run on the host, a thread for each rank: products
// through the arguments that cuBLAS gets, kernels thread by thread, memory that held NaN; against float64.
#include "backends/hidden_cases.hpp"
#include "backends/host_run_shards.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include <opd/estimators/divergences.hpp>
#include <opd/hidden.hpp>
#include <opd/shards/shard_blocks.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// Takes a call on two heads apart by their rows.
struct host_blocks_shards {
    static constexpr space memory_space = space::device;
    std::vector<index_t> cuts = {};
    int threads = 16;
    exchanged said = {};

    template <class Side>
    Side side_of(Side s, std::size_t i) const {
        const index_t first = cuts[i], count = cuts[i + 1] - first;
        const auto rows = [&](auto& m) {
            if (m.data != nullptr) m = {m.data + first * m.stride, count, m.cols, m.stride, m.padding};
        };
        rows(s.w);
        if (s.bias.data != nullptr) s.bias = {s.bias.data + first, count};
        if constexpr (requires { s.dw; }) {
            rows(s.dw);
            if (s.db.data != nullptr) s.db = {s.db.data + first, count};
        }
        return s;
    }
    template <class Job>
        requires(detail::has_block_kernel<Job>)
    result for_rows(const Job& job) {
        const std::size_t ranks = cuts.size() - 1;
        const auto dx = job.student.dx;
        std::vector<std::vector<float>> parts(ranks), losses(ranks);
        std::vector<std::vector<double>> lse(ranks);
        std::vector<result> got(ranks);
        gathering_threads team(ranks);
        {
            std::vector<std::jthread> running;
            for (std::size_t i = 0; i < ranks; ++i) {
                device_env e = job.env;
                losses[i].assign(e.losses.data, e.losses.data + e.losses.size);
                lse[i].assign(e.lse.data, e.lse.data + e.lse.size);
                e.losses = {losses[i].data(), e.losses.size}, e.lse = {lse[i].data(), e.lse.size};
                auto student = side_of(job.student, i);
                if (i > 0 && dx.data != nullptr) { // the first has what was there
                    parts[i].assign(std::size_t(dx.rows * dx.stride), 0);
                    student.dx = {parts[i].data(), dx.rows, dx.cols, dx.stride};
                }
                const vocab_shard shard{.first = cuts[i], .total = job.student.vocab()};
                const auto mine = detail::checked_shard_job(shard, student, side_of(job.teacher, i), job.estimator, e);
                running.emplace_back([&, i, mine, shard] { got[i] = run(mine, shard, i, team); });
            }
        }
        said = team.said;
        check_equal(got, losses, lse);
        std::copy(losses[0].begin(), losses[0].end(), job.env.losses.data);
        std::copy(lse[0].begin(), lse[0].end(), job.env.lse.data);
        for (std::size_t i = 1; i < ranks && dx.data != nullptr; ++i)
            for (index_t r = 0; r < dx.rows; ++r)
                for (index_t j = 0; j < dx.cols; ++j) dx(r, j) += parts[i][std::size_t(r * dx.stride + j)];
        return got[0];
    }
    template <class Job>
    std::size_t workspace_bytes(const Job&) const {
        return 0;
    }

private:
    template <class Job>
    result run(const Job& job, const vocab_shard& shard, std::size_t rank, gathering_threads& team) const {
        const int ranks = int(cuts.size() - 1);
        const std::size_t bytes = detail::shard_bytes(job, shard, ranks);
        const std::unique_ptr<std::byte[]> memory(new std::byte[bytes + 256]);
        void* p = memory.get();
        std::size_t room = bytes + 256;
        auto* const arena = static_cast<std::byte*>(std::align(256, bytes, p, room));
        std::fill_n(arena, bytes, std::byte{0xff});
        result out;
        detail::run_shard_in_blocks(
            job, shard, ranks, arena, &out,
            [&](const auto& kernel, index_t blocks) {
                static_assert(std::is_trivially_copyable_v<std::remove_cvref_t<decltype(kernel)>>);
                if (blocks < 1) throw std::logic_error("a launch of no blocks, which a device refuses");
                for (index_t b = 0; b < blocks; ++b) {
                    host_team<typename std::remove_cvref_t<decltype(kernel)>::state_type> block{threads, true};
                    kernel.run(b, block);
                }
            },
            [](const auto& product) { naive_product(product); },
            [&](const std::byte* own, std::byte* all, std::size_t size) { team(rank, own, all, size); });
        return out;
    }
};

/// Host memory in the place of a device's.
struct shards_on_host {
    host_blocks_shards backend = {};
    template <class T>
    T* put(std::vector<T>& v) {
        return v.empty() ? nullptr : v.data();
    }
    template <class T>
    void get(std::vector<T>&, T*) {}
    result finish(result r) { return r; }
    void make_room(std::size_t) {}
};

constexpr double in_float = 2e-6, in_bfloat16 = 4e-3;

template <class X>
hidden_case<X> ordinary(index_t n, index_t v, std::uint64_t seed, bool more = false) {
    return {{n, v, 12, seed, more, more ? 3.f : 0.f}, {n, v, 20, seed + 1, more, more ? 5.f : 0.f}};
}

} // namespace

TEST_CASE("values and gradients, whatever the split and the block of rows") {
    shards_on_host memory;
    for (const index_t v : {1, 5, 37, 700})
        for (const bool more : {false, true})
            for (const index_t block : {0, 1, 4}) {
                CAPTURE(v);
                CAPTURE(more);
                CAPTURE(block);
                hidden_case<float> c = ordinary<float>(9, v, std::uint64_t(v), more);
                c.block = block;
                memory.backend.cuts = random_cuts(v, std::uint64_t(17 * v + block), 4);
                const auto first = check_hidden(memory, c, reverse_kl{}, in_float);
                CHECK(same_outputs(first, run_hidden(memory, c, reverse_kl{})));
                if (v == 37) check_hidden(memory, c, jsd{}, 4e-5);
            }
}

TEST_CASE("ranks without ids, and what the gradients held") {
    shards_on_host memory;
    memory.backend.cuts = {0, 0, 20, 20, 64, 64};
    for (const index_t block : {0, 3}) {
        hidden_case<float> c = ordinary<float>(10, 64, 5, true);
        c.block = block, c.before = 2, c.beta = 0.5f, c.beta_head = -1;
        c.student.temperature = 1.25f, c.reduction = reduce::token_mean;
        c.mask = {1, 0, 1, 1, 1, 0, 1, 1, 1, 1};
        for (int r = 0; r < 10; ++r) c.weights.push_back(float(r) / 4 - 1);
        check_hidden(memory, c, reverse_kl{}, in_float);
    }
    hidden_case<float> none = ordinary<float>(0, 64, 5);
    CHECK(run_hidden(memory, none, reverse_kl{}).r.loss == 0);
    CHECK(memory.backend.said.rounds == 0);
}

TEST_CASE("bfloat16 states and heads") {
    shards_on_host memory;
    memory.backend.cuts = {0, 100, 190, 300};
    hidden_case<bfloat16> c = ordinary<bfloat16>(11, 300, 7, true);
    c.block = 2;
    check_hidden(memory, c, reverse_kl{}, in_bfloat16);
}

TEST_CASE("ranks of any size have the same blocks of rows") {
    shards_on_host memory;
    hidden_case<float> c = ordinary<float>(10, 64, 5);
    c.block = 1; // a row of 64 ids, or 4 of 16
    for (const std::vector<index_t>& cuts :
         std::vector<std::vector<index_t>>{{0, 16, 32, 48, 64}, {0, 1, 60, 60, 64}}) {
        memory.backend.cuts = cuts;
        check_hidden(memory, c, forward_kl{}, in_float);
        CHECK(memory.backend.said.rounds == 3 * 5); // blocks of 4, 4, 2
    }
}
