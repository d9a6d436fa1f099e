// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A dense call runs with its divergence behind a table of functions (cpu/dense_machine.hpp); the rows that name theirs
// give the same bits, value and gradient, whatever the row is like.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "opd/backends/cpu.hpp"
#include "opd/opd.hpp"

namespace {

using namespace opd;

struct rows_of_every_look {
    static constexpr index_t n = 18, v = 2200;
    std::vector<float> z, y, dz, losses;
    std::vector<double> lse;
    std::vector<std::uint8_t> kept;

    rows_of_every_look() : dz(n * v, 0.25f), losses(n), lse(n), kept(n, 1) {
        std::mt19937 u(11);
        std::normal_distribution<float> normal;
        const float none = -std::numeric_limits<float>::infinity();
        for (index_t r = 0; r < n; ++r)
            for (index_t i = 0; i < v; ++i) {
                float a = 3 * normal(u), b = r % 6 == 1 ? a + 0.01f * normal(u) : 3 * normal(u);
                if (r % 6 == 2 && i == v / 3) a += 40;
                if (r % 6 == 3 && i % 3 == 0) b = none;
                if (r % 6 == 4) a *= 40, b *= 40;
                if (r % 6 == 5 && i % 5 == 0) a = none;
                if (r == 11 && i == 7) a = std::nanf("");
                z.push_back(a), y.push_back(b);
            }
        kept[3] = 0;
    }
};

template <class Estimator>
void compare(const Estimator& estimator, float beta, infinite policy) {
    rows_of_every_look one, other;
    cpu_backend backend;
    const auto job_of = [&](rows_of_every_look& b) {
        env e;
        e.mask = row_mask<>(b.kept), e.losses = b.losses, e.lse = b.lse, e.beta = beta, e.on_infinite = policy;
        e.measure.entropy = true;
        return checked_job(
            backend, student::logits{view(std::as_const(b.z).data(), b.n, b.v), view(b.dz.data(), b.n, b.v), 0.7f},
            teacher::dense{view(std::as_const(b.y).data(), b.n, b.v)}, estimator, e);
    };
    const result behind_table = backend.for_rows(job_of(one));
    const auto job = job_of(other);
    const detail::host_plan plan = detail::host_plan_of(job);
    const result named = detail::run_on_host(job, plan, backend.team(), backend.memory(plan.bytes(1)));
    CHECK(behind_table.loss == named.loss);
    CHECK(behind_table.diagnostics.kept_loss == named.diagnostics.kept_loss);
    CHECK(behind_table.diagnostics.bad_rows == 1);
    CHECK(named.diagnostics.bad_rows == 1);
    CHECK(behind_table.diagnostics.infinite_rows == named.diagnostics.infinite_rows);
    CHECK(behind_table.diagnostics.careful_rows == named.diagnostics.careful_rows);
    CHECK(behind_table.diagnostics.student_entropy_sum == named.diagnostics.student_entropy_sum);
    CHECK(behind_table.diagnostics.selector_weight_sum == named.diagnostics.selector_weight_sum);
    const auto same = [](const auto& a, const auto& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    CHECK(same(one.dz, other.dz));
    CHECK(same(one.losses, other.losses));
    CHECK(same(one.lse, other.lse));
    double size = 0; // something was written
    for (const float g : one.dz) size += std::abs(double(g));
    CHECK(size > 1e-3);
}

} // namespace

TEST_CASE("a divergence behind a table of functions gives the bits of one that rows name") {
    for (const float beta : {0.0f, 0.5f})
        for (const infinite policy : {infinite::skip(), infinite::floor(-20)}) {
            compare(reverse_kl{}, beta, policy);                                  // one sweep
            compare(jsd{.w = .3, .o = .3}, beta, policy);                         // two normalisers, c parked
            compare(acceptance{}, beta, policy);                                  // a pass for the overlap
            compare(weighted_sum{reverse_kl{}, acceptance{}}, beta, policy);      // that pass for infinite rows
            compare(selected{forward_kl{}, selector::tip{7, 0.5}}, beta, policy); // weights
            compare(eopd(7), beta, policy);                                       // a mixture chosen by the row
        }
}
