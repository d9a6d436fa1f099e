// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Draws, filters and scores on a device, beside the same rows run by a host loop: Gumbel-max tokens, greedy ones and
// best ids are the same; where exponentials decide, the device's may differ in the last bit, and with it a draw beside
// a border. SKIPPED without one.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <vector>

#include "backends/cuda_cases.hpp"
#include "backends/cuda_device.cuh"
#include "backends/host_run.hpp"
#include "opd/backends/cuda.cuh"
#include "opd/backends/cuda_graphs.hpp"
#include "opd/draw.hpp"
#include "opd/score.hpp"
#include "opd/spec/captured_graphs.hpp"

namespace {

using namespace opd;
using namespace opd::test;

constexpr index_t rows = 12, vocab = 3000;

struct batch {
    std::vector<float> z;
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position;
    batch() {
        source u(5);
        for (index_t r = 0; r < rows; ++r) {
            for (index_t v = 0; v < vocab; ++v)
                z.push_back(r % 3 == 2 ? float(std::round(2 * u.normal())) : float(3 * u.normal()));
            sample.push_back(std::uint64_t(1000 + r)), position.push_back(std::uint32_t(7 * r));
        }
        for (index_t v = 0; v < vocab; v += 3) z[std::size_t(4 * vocab + v)] = detail::neg_inf<float>();
        z[std::size_t(5 * vocab + 17)] = bit_nan();
    }
    static float bit_nan() { return detail::bit_cast<float>(0x7fc00000u); }
};

template <class Design>
void check_draws(device_memory& memory, const batch& b, const Design& design, const filter& f, bool exactly) {
    const index_t m = design.columns();
    const auto size = std::size_t(rows * m);
    std::vector<std::int32_t> ids(size, -9), want_ids(size, -9);
    std::vector<float> log_mu(size), want_log_mu(size), weight(size), want_weight(size);
    std::vector<double> log_kept(rows), want_log_kept(rows);
    std::vector<index_t> kept(rows), want_kept(rows);
    std::vector<float> z = b.z;
    auto sample = b.sample;
    auto position = b.position;

    host_run_backend host{256};
    const result w = draw(
        host, view(b.z.data(), rows, vocab), design,
        {7, view(b.sample.data(), rows), view(b.position.data(), rows), {}},
        drawn<>{
            view(want_ids.data(), rows, m), view(want_log_mu.data(), rows, m), view(want_weight.data(), rows, m), {}},
        {f, {}, {}, view(want_log_kept.data(), rows), {}, view(want_kept.data(), rows)});

    auto* d_ids = memory.put(ids);
    auto* d_log_mu = memory.put(log_mu);
    auto* d_weight = memory.put(weight);
    auto* d_log_kept = memory.put(log_kept);
    auto* d_kept = memory.put(kept);
    const drawn<std::int32_t, float, float, space::device> out{
        device_view(d_ids, rows, m), device_view(d_log_mu, rows, m), device_view(d_weight, rows, m), {}};
    const draw_options<space::device> options{f, {}, {}, device_view(d_log_kept, rows), {}, device_view(d_kept, rows)};
    const draw_keys<space::device> keys{
        7, device_view(memory.put(sample), rows), device_view(memory.put(position), rows), {}};
    const result r =
        memory.finish(draw(memory.backend, device_view(memory.put(z), rows, vocab), design, keys, out, options));
    memory.get(ids, d_ids), memory.get(log_mu, d_log_mu), memory.get(weight, d_weight);
    memory.get(log_kept, d_log_kept), memory.get(kept, d_kept);

    CHECK(r.diagnostics.bad_rows == w.diagnostics.bad_rows);
    CHECK(r.diagnostics.first_bad_row == w.diagnostics.first_bad_row);
    index_t beside = 0;
    for (std::size_t e = 0; e < size; ++e) {
        beside += ids[e] != want_ids[e];
        if (ids[e] != want_ids[e]) continue;
        CHECK(std::abs(log_mu[e] - want_log_mu[e]) <= 1e-6F * std::max(1.F, std::abs(want_log_mu[e])));
        CHECK(std::abs(weight[e] - want_weight[e]) <= 1e-5F * std::abs(want_weight[e]));
    }
    CHECK(beside <= (exactly ? 0 : 1 + index_t(size) / 200));
    for (std::size_t i = 0; i < std::size_t(rows); ++i) {
        CHECK(kept[i] == want_kept[i]);
        CHECK(std::abs(log_kept[i] - want_log_kept[i]) < 1e-6);
    }
}

TEST_CASE("on the device: draws under filters as in the host run") {
    if (!device_present()) return;
    device_memory memory;
    const batch b;
    for (const filter& f : {filter{}, filter{.temperature = 0.7F}, filter{.top_k = 50}, filter{.top_p = 0.9F},
                            filter{.temperature = 2, .top_k = 300, .top_p = 0.8F, .min_p = 0.001F}}) {
        check_draws(memory, b, design::greedy{}, f, true);
        check_draws(memory, b, design::gumbel{}, f, true);
        check_draws(memory, b, design::iid{40}, f, false);
        check_draws(memory, b, design::threshold{40}, f, false);
        check_draws(memory, b, design::head_tail{20, 20}, f, false);
        check_draws(memory, b, design::gumbel_top{20}, f, false);
    }
}

TEST_CASE("on the device: scores and best ids as in the host run") {
    if (!device_present()) return;
    device_memory memory;
    const batch b;
    constexpr index_t m = 9, k = 20;
    source u(3);
    std::vector<std::int32_t> ids, top(rows * k), want_top(rows * k);
    for (index_t e = 0; e < rows * m; ++e) ids.push_back(e % 7 == 0 ? -1 : std::int32_t(u.below(vocab)));
    std::vector<float> log_p(rows * m), want_log_p(rows * m), tail(rows), want_tail(rows), top_tail(rows),
        want_top_tail(rows);
    host_run_backend host{256};
    score(host, view(b.z.data(), rows, vocab),
          scores<>{.ids = view(ids.data(), rows, m),
                   .log_p = view(want_log_p.data(), rows, m),
                   .log_tail = view(want_tail.data(), rows),
                   .top_ids = view(want_top.data(), rows, k),
                   .top_log_tail = view(want_top_tail.data(), rows)},
          1.5F);
    std::vector<float> z = b.z;
    auto *d_log_p = memory.put(log_p), *d_tail = memory.put(tail), *d_top_tail = memory.put(top_tail);
    auto* d_top = memory.put(top);
    memory.finish(score(memory.backend, device_view(memory.put(z), rows, vocab),
                        scores<std::int32_t, float, space::device>{.ids = device_view(memory.put(ids), rows, m),
                                                                   .log_p = device_view(d_log_p, rows, m),
                                                                   .log_tail = device_view(d_tail, rows),
                                                                   .top_ids = device_view(d_top, rows, k),
                                                                   .top_log_tail = device_view(d_top_tail, rows)},
                        1.5F));
    memory.get(log_p, d_log_p), memory.get(tail, d_tail), memory.get(top_tail, d_top_tail), memory.get(top, d_top);
    CHECK(top == want_top);
    for (std::size_t e = 0; e < log_p.size(); ++e)
        CHECK((log_p[e] == want_log_p[e] || std::abs(log_p[e] - want_log_p[e]) <= 1e-6F * std::abs(want_log_p[e])));
    for (std::size_t r = 0; r < std::size_t(rows); ++r) {
        CHECK((tail[r] == want_tail[r] || std::abs(tail[r] - want_tail[r]) <= 1e-5F));
        CHECK((top_tail[r] == want_top_tail[r] || std::abs(top_tail[r] - want_top_tail[r]) <= 1e-5F));
    }
}

TEST_CASE("on the device: a captured call, replayed on other logits, is the call") {
    if (!device_present()) return;
    device_memory memory;
    REQUIRE(cudaStreamCreate(&memory.backend.stream) == cudaSuccess);
    batch b;
    constexpr index_t k = 20;
    std::vector<std::int32_t> top(rows * k), want_top(rows * k);
    float* d_z = memory.put(b.z);
    std::int32_t* d_top = memory.put(top);
    const std::vector<index_t> buckets{rows};
    const spec::linear_graph_bytes bytes{1, 1, 1, 1};
    {
        spec::captured_graphs<cuda_graph_api> graphs(
            spec::graph_pool(spec::plan_graphs({}, buckets, bytes, index_t{1} << 20), bytes),
            cuda_graph_api{memory.backend.stream});
        for (int step = 0; step < 3; ++step) {
            for (float& x : b.z) x = -x;
            REQUIRE(cudaMemcpy(d_z, b.z.data(), b.z.size() * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess);
            const auto s = graphs.run(rows, {}, [&](const spec::graph_key&, bool) {
                score(memory.backend, device_view(d_z, rows, vocab),
                      scores<std::int32_t, float, space::device>{.top_ids = device_view(d_top, rows, k)}, 1.5F);
            });
            using launch = spec::graph_step::launch;
            CHECK(s.parts.at(0).how == (step == 0 ? launch::capture : launch::replay));
            REQUIRE(cudaStreamSynchronize(memory.backend.stream) == cudaSuccess);
            memory.get(top, d_top);
            host_run_backend host{256};
            score(host, view(std::as_const(b.z).data(), rows, vocab),
                  scores<>{.top_ids = view(want_top.data(), rows, k)}, 1.5F);
            CHECK(top == want_top);
        }
        CHECK(graphs.captured() == 1);
        CHECK_THROWS_AS(graphs.run(rows, {1, 1, 1}, [](const spec::graph_key&, bool) { throw 1; }), int);
        CHECK(graphs.captured() == 1);
    }
    REQUIRE(cudaStreamDestroy(memory.backend.stream) == cudaSuccess);
    memory.backend.stream = nullptr;
}

TEST_CASE("on the device: kept ids, ascending, in the room that their counts ask for") {
    if (!device_present()) return;
    device_memory memory;
    const batch b;
    host_run_backend host{256};
    const filter f{.top_k = 50, .top_p = 0.9F};
    std::vector<std::int32_t> token(rows);
    std::vector<float> log_mu(rows);
    std::vector<filter_cut> cut(rows);
    std::vector<index_t> kept(rows), offsets{0};
    draw(host, view(b.z.data(), rows, vocab), design::greedy{}, {},
         drawn<>{view(token.data(), rows, 1), view(log_mu.data(), rows, 1), {}, {}},
         {f, {}, {}, {}, view(cut.data(), rows), view(kept.data(), rows)});
    for (const index_t n : kept) offsets.push_back(offsets.back() + n);
    std::vector<std::int32_t> want(std::size_t(offsets.back())), got(want.size(), -9);
    kept_ids(host, view(b.z.data(), rows, vocab), view(cut.data(), rows), row_offsets<>(offsets),
             view(want.data(), offsets.back()));
    std::vector<float> z = b.z;
    auto* d_got = memory.put(got);
    const auto at = device_view(static_cast<const index_t*>(memory.put(offsets)), rows + 1);
    memory.finish(kept_ids(memory.backend, device_view(memory.put(z), rows, vocab),
                           device_view(static_cast<const filter_cut*>(memory.put(cut)), rows),
                           row_offsets<space::device>(at), device_view(d_got, offsets.back())));
    memory.get(got, d_got);
    CHECK(got == want);
}

} // namespace
