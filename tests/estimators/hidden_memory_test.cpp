// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// Memory of losses from hidden states: a first call asks for what workspace_bytes says, within 2 %, and a later one for
// nothing; budgets are kept; what reads few logits of a row has no block as long as the vocabulary.
#include "support/compiled/hidden_sides.hpp"
#include "support/counting_malloc.hpp"
#include "support/property.hpp"

#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/draw.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// The first call of f asks for `bytes`, within 2 %, the next for nothing.
template <class F>
void check_memory(int threads, std::size_t bytes, F&& f) {
    cpu_backend be{.threads = threads};
    (void)be.team(); // the threads themselves
    const long before = asked.load();
    f(be);
    const double taken = double(asked.load() - before);
    CHECK(taken >= 0.98 * double(bytes));
    CHECK(taken <= 1.02 * double(bytes));
    const long calls = allocations.load();
    f(be), f(be);
    CHECK(allocations.load() == calls);
}

} // namespace

TEST_CASE("the counter counts") {
    void* volatile p = nullptr; // volatile: else the pair is optimised away
    CHECK(steady([&] { p = std::malloc(7), std::free(p); }) == 2);
    CHECK(steady([&] { p = std::aligned_alloc(64, 128), std::free(p); }) == 2);
    const long before = asked.load();
    p = std::aligned_alloc(64, 128), std::free(p);
    CHECK(asked.load() == before + 128);
}

TEST_CASE("a call takes the memory that workspace_bytes says") {
    // below 2 MB to the byte; beyond, whole huge pages: so hundreds of them
    struct call {
        index_t n, v, d;
        std::size_t budget;
    };
    const call large{560, 30000, 2, std::size_t{64} << 20}, rows{20, 9000, 6, sizeof(float) * 9000 * 12},
        tiles{300, 9000, 6, sizeof(float) * 9000 * 3};
    for (const call c : {rows, tiles, large})
        for (const bool capped : {false, true}) {
            CAPTURE(c.v);
            CAPTURE(capped);
            const side s(c.n, c.v, c.d, 1, true, capped ? 3.0f : 0), t(c.n, c.v, c.d + 1, 2);
            gradients g(s);
            const auto mine = student_of(s, g, c.budget);
            const auto theirs = teacher_of(t, c.budget);
            for (const int threads : {1, 2}) {
                if (c.n == large.n && (capped || threads == 1)) continue; // takes a second
                const cpu_backend be{.threads = threads};
                const std::size_t bytes = workspace_bytes(be, mine, theirs, reverse_kl{});
                // what is beyond the budgets: the products' own, states of rows in tiles, a result and a factor a row
                const std::size_t beyond =
                    std::size_t(threads) * opd::detail::worker_floats::bytes(256, c.d + 1) + std::size_t(c.n) * 2200;
                CHECK(bytes < 2 * c.budget + beyond);
                if (c.n != large.n) // that one is narrow enough for tiles, which take few pages
                    check_memory(threads, bytes, [&](cpu_backend& b) { evaluate(b, mine, theirs, reverse_kl{}); });
                const std::size_t lumped = // reads whole rows
                    workspace_bytes(be, mine, teacher::lumped{theirs, index_t(100)}, reverse_kl{});
                CHECK(lumped > c.budget);
                check_memory(threads, lumped, [&](cpu_backend& b) {
                    evaluate(b, mine, teacher::lumped{theirs, index_t(100)}, reverse_kl{});
                });
            }
        }
}

TEST_CASE("scores and draws too") {
    const index_t n = 40, v = 6000, m = 4;
    const side s(n, v, 6, 1);
    const auto source = teacher_of(s, sizeof(float) * std::size_t(v * 30));
    std::vector<std::int32_t> ids(std::size_t(n * m), 3);
    floats log_p(ids.size());
    const scores<> what{.ids = view(std::as_const(ids).data(), n, m), .log_p = view(log_p.data(), n, m)};
    std::vector<std::uint64_t> sample(std::size_t(n), 1);
    const std::vector<std::uint32_t> position(std::size_t(n), 2);
    const draw_keys<> keys{.seed = 1, .sample = sample, .position = position};
    const cpu_backend be;
    check_memory(1, score_workspace_bytes(be, source, what), [&](cpu_backend& b) { score(b, source, what); });
    check_memory(1, draw_workspace_bytes(be, source, design::threshold{m}), [&](cpu_backend& b) {
        draw(b, source, design::threshold{m}, keys, drawn<>{view(ids.data(), n, m), view(log_p.data(), n, m)});
    });
}

TEST_CASE("a support of k ids takes k numbers a row, whatever the vocabulary") {
    const index_t n = 300, k = 8;
    std::size_t bytes_of[2] = {};
    for (const int large : {0, 1}) {
        const index_t v = large ? 50000 : 500;
        const side s(n, v, 5, 1);
        gradients g(s);
        std::vector<std::int32_t> ids;
        for (index_t i = 0; i < n * k; ++i) ids.push_back(std::int32_t(i % k * 60 + i / k % 50));
        const floats log_q(ids.size(), -2.0f);
        const teacher::support cache{view(std::as_const(ids).data(), n, k), view(log_q.data(), n, k)};
        const auto mine = student_of(s, g);
        const cpu_backend be{.threads = 2};
        const std::size_t bytes = bytes_of[large] = workspace_bytes(be, mine, cache, renormalised{reverse_kl{}});
        CHECK(bytes >= sizeof(float) * std::size_t(n * k));
        check_memory(2, bytes, [&](cpu_backend& b) { evaluate(b, mine, cache, renormalised{reverse_kl{}}); });
        // kept in blocks of what the budget holds
        auto small = mine;
        small.budget = sizeof(float) * std::size_t(v);
        const std::size_t of_rows =
            std::min<std::size_t>(std::size_t(n), small.budget / (sizeof(float) * std::size_t(k)));
        CHECK(bytes - workspace_bytes(be, small, cache, renormalised{reverse_kl{}}) ==
              (sizeof(float) * std::size_t(n * k) + 63) / 64 * 64 -
                  (sizeof(float) * of_rows * std::size_t(k) + 63) / 64 * 64);
        // the value alone has no gradient to keep
        auto value = mine;
        value.dx = value.dw = {}, value.db = {};
        CHECK(workspace_bytes(be, value, cache, renormalised{reverse_kl{}}) <=
              bytes - sizeof(float) * std::size_t(n * k));
    }
    CHECK(bytes_of[0] == bytes_of[1]);
}
