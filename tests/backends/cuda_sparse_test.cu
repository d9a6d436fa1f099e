// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Supports, samples, kept sets and token_logp on a device: the cases of the host-run test. SKIPPED without one.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include "backends/cuda_device.cuh"
#include "backends/cuda_sparse_cases.hpp"
#include "backends/host_run.hpp"
#include "opd/backends/cuda.cuh"

namespace {

using namespace opd;
using namespace opd::test;

struct against_reference {
    device_memory& memory;
    const sparse_case& c;
    template <class Estimator>
    void operator()(const char* name, const Estimator& estimator) const {
        INFO(std::string(name));
        check_sparse_against_reference(memory, c, estimator);
    }
};
struct against_host {
    device_memory& memory;
    const sparse_case& c;
    template <class Estimator>
    void operator()(const char* name, const Estimator& estimator) const {
        INFO(std::string(name));
        host_run_backend host{256};
        host_memory hosted{host};
        sparse_case a = c, b = c, again = c;
        const result x = run_sparse(hosted, a, estimator), w = run_sparse(memory, b, estimator);
        const result twice = run_sparse(memory, again, estimator);
        CHECK(std::memcmp(&w, &twice, sizeof w) == 0); // run_to_run
        CHECK(std::memcmp(b.dz.data(), again.dz.data(), b.dz.size() * sizeof(float)) == 0);
        CHECK(x.loss == doctest::Approx(w.loss).epsilon(1e-5));
        CHECK(x.diagnostics.bad_rows == w.diagnostics.bad_rows);
        CHECK(x.diagnostics.first_bad_row == w.diagnostics.first_bad_row);
        CHECK(x.diagnostics.infinite_rows == w.diagnostics.infinite_rows);
        CHECK(x.diagnostics.clamped_rows == w.diagnostics.clamped_rows);
        CHECK(x.diagnostics.tokens == w.diagnostics.tokens);
        CHECK(x.diagnostics.ratio_sum == doctest::Approx(w.diagnostics.ratio_sum).epsilon(1e-5));
        CHECK(x.diagnostics.k3_sum == doctest::Approx(w.diagnostics.k3_sum).epsilon(1e-4));
        CHECK(x.diagnostics.student_mass_sum == doctest::Approx(w.diagnostics.student_mass_sum).epsilon(1e-6));
        double top = 0, worst = 0;
        for (std::size_t i = 0; i < a.dz.size(); ++i) {
            top = std::max(top, std::abs(double(a.dz[i])));
            worst = std::max(worst, std::abs(double(a.dz[i]) - double(b.dz[i])));
        }
        CHECK(worst <= 1e-5 * top + 1e-6);
    }
};

TEST_CASE("on the device: every sparse and sampled estimator agrees with the reference") {
    if (!device_present()) return;
    device_memory memory;
    std::uint64_t seed = 100;
    for (index_t vocab : {1, 3, 64, 257, 4000}) {
        const sparse_case c = make_sparse_case(seed++, 3, vocab, std::min<index_t>(vocab, 16));
        for_every_sparse_estimator(against_reference{memory, c});
    }
}

TEST_CASE("on the device: masks, bad rows, policies as in the host run") {
    if (!device_present()) return;
    device_memory memory;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        source s(seed);
        sparse_case c = make_sparse_case(seed, 9, 500, 11);
        spoil(c, s);
        for_every_sparse_estimator(against_host{memory, c});
    }
}

TEST_CASE("on the device: tokens with kept sets as in the host run; a set that the offsets put out of the ids is bad") {
    if (!device_present()) return;
    device_memory memory;
    host_run_backend host{256};
    host_memory hosted{host};
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        source s(seed);
        kept_case x = make_kept_case(seed, 6, 40 + s.below(3000), 8);
        if (s.below(2)) spoil(x.c, s);
        check_same(run_kept(hosted, x), run_kept(memory, x));
    }
    kept_case x = make_kept_case(1, 6, 300, 1); // offsets that the host cannot read before the call
    const index_t good = run_kept(memory, x).scored.diagnostics.bad_rows;
    x.offsets = {0, x.offsets[1], -5, index_t(x.set.size()) + 1'000'000, 7, 3, index_t(x.set.size())};
    const kept_answer astray = run_kept(memory, x);
    CHECK(astray.loss.diagnostics.bad_rows >= 4);
    CHECK(astray.scored.diagnostics.bad_rows >= 4);
    CHECK(good <= 1);
}

TEST_CASE("on the device: token_logp") {
    if (!device_present()) return;
    device_memory memory;
    source s(4);
    const index_t n = 5, vocab = 2100, m = 7;
    std::vector<float> z(n * vocab), out(n * m), want(n * m);
    for (float& x : z) x = float(3 * s.normal());
    std::vector<std::int64_t> ids(n * m);
    for (auto& i : ids) i = s.below(vocab);
    ids[3] = vocab;
    float* device_out = memory.put(out);
    const result r = token_logp(memory.backend, device_view(memory.put(z), n, vocab),
                                device_view(memory.put(ids), n, m), device_view(device_out, n, m), 1.5f)
                         .fetch(nullptr);
    memory.get(out, device_out);
    host_run_backend host{256};
    const result w = token_logp(host, view(z.data(), n, vocab), view(ids.data(), n, m), view(want.data(), n, m), 1.5f);
    CHECK(r.diagnostics.bad_rows == 1);
    CHECK(w.diagnostics.bad_rows == 1);
    for (std::size_t i = 0; i < out.size(); ++i)
        CHECK((out[i] == want[i] || double(out[i]) == doctest::Approx(double(want[i])).epsilon(1e-6)));
}

} // namespace
