// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// The GPU's kernels for supports, samples and token_logp, run on the host in a loop over thread indices: against a
// float64 reference from the textbook formulas, and against the CPU backend for everything an env can say.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/cuda_sparse_cases.hpp"
#include "backends/host_run.hpp"
#include "opd/backends/cpu.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/property.hpp"

namespace {

using namespace opd;
using namespace opd::test;

TEST_CASE("every estimator agrees with the reference, for any number of threads") {
    for (int threads : {1, 32, 128, 256}) {
        CAPTURE(threads);
        host_run_backend backend{threads};
        host_memory memory{backend};
        std::uint64_t seed = 100;
        for (index_t vocab : {1, 3, 64, 257, 1500, 4000}) {
            const sparse_case c = make_sparse_case(seed++, 3, vocab, std::min<index_t>(vocab, 16));
            for_every_sparse_estimator([&](const char* name, const auto& estimator) {
                INFO(std::string(name));
                check_sparse_against_reference(memory, c, estimator);
            });
        }
    }
}

TEST_CASE("tokens with kept sets: as on the CPU, for any number of threads, spoilt or not") {
    cpu_backend cpu;
    host_memory on_cpu{cpu};
    index_t outside = 0, bad = 0;
    for (std::uint64_t seed = 1; seed <= 24; ++seed) {
        source s(seed);
        kept_case x = make_kept_case(seed, 6, 1 + s.below(400), 1);
        if (s.below(2)) x = make_kept_case(seed, 6, 40 + s.below(3000), 8);
        if (s.below(2)) spoil(x.c, s);
        const kept_answer want = run_kept(on_cpu, x);
        outside += want.scored.diagnostics.outside_kept, bad += want.scored.diagnostics.bad_rows;
        for (int threads : {1, 32, 256}) {
            CAPTURE(threads);
            host_run_backend backend{threads};
            host_memory memory{backend};
            check_same(want, run_kept(memory, x));
        }
    }
    CHECK(outside > 5);
    CHECK(bad > outside / 4);
}

template <class Estimator>
void compare_with_eigen(const sparse_case& c, const Estimator& estimator, const char* name) {
    cpu_backend eigen;
    host_run_backend blocks{96};
    host_memory on_eigen{eigen};
    host_memory on_blocks{blocks};
    sparse_case a = c, b = c, again = c;
    const result x = run_sparse(on_eigen, a, estimator), w = run_sparse(on_blocks, b, estimator);
    const result twice = run_sparse(on_blocks, again, estimator);
    RC_ASSERT(std::memcmp(&w, &twice, sizeof w) == 0);
    RC_ASSERT(std::memcmp(b.dz.data(), again.dz.data(), b.dz.size() * sizeof(float)) == 0);
    RC_LOG() << name << " rows " << c.rows << " V " << c.vocab << " k " << c.k << ": " << x.loss << " and " << w.loss
             << '\n';
    double scale = 1;
    for (float l : a.losses) scale += std::abs(double(l));
    RC_ASSERT(std::abs(x.loss - w.loss) <= 1e-5 * scale);
    const diagnostics &p = x.diagnostics, &q = w.diagnostics;
    const auto near = [](double u, double v) { return std::abs(u - v) <= 1e-5 * (1 + std::abs(u)); };
    RC_ASSERT(p.rows == q.rows);
    RC_ASSERT(p.kept == q.kept);
    RC_ASSERT(p.bad_rows == q.bad_rows);
    RC_ASSERT(p.first_bad_row == q.first_bad_row);
    RC_ASSERT(p.infinite_rows == q.infinite_rows);
    RC_ASSERT(p.clamped_rows == q.clamped_rows);
    RC_ASSERT(p.tokens == q.tokens);
    RC_ASSERT(near(p.ratio_sum, q.ratio_sum));
    RC_ASSERT(near(p.ratio_square_sum, q.ratio_square_sum));
    RC_ASSERT(near(p.ratio_max, q.ratio_max));
    RC_ASSERT(near(p.k1_sum, q.k1_sum));
    RC_ASSERT(near(p.k2_sum, q.k2_sum));
    RC_ASSERT(near(p.k3_sum, q.k3_sum));
    RC_ASSERT(p.positive_advantage + p.negative_advantage == q.positive_advantage + q.negative_advantage);
    RC_ASSERT(p.baseline_missing == q.baseline_missing);
    RC_ASSERT(p.saturated == q.saturated);
    RC_ASSERT(p.support_rows == q.support_rows);
    RC_ASSERT(near(p.student_mass_sum, q.student_mass_sum));
    RC_ASSERT(near(p.teacher_mass_sum, q.teacher_mass_sum));
    RC_ASSERT(near(p.student_mass_min, q.student_mass_min));
    RC_ASSERT(p.tail_floored == q.tail_floored);
    RC_ASSERT(p.staleness_max == q.staleness_max);
    for (std::size_t r = 0; r < a.losses.size(); ++r) {
        RC_ASSERT(near(double(a.losses[r]), double(b.losses[r])));
        RC_ASSERT(near(a.lse[r], b.lse[r]));
    }
    for (index_t r = 0; r < c.rows; ++r) {
        const index_t stride = index_t(a.dz.size()) / c.rows;
        double top = 0, worst = 0;
        for (index_t v = 0; v < stride; ++v) {
            const double g = double(a.dz[std::size_t(r * stride + v)]), h = double(b.dz[std::size_t(r * stride + v)]);
            RC_ASSERT(std::isfinite(h));
            top = std::max(top, std::abs(g)), worst = std::max(worst, std::abs(g - h));
        }
        RC_LOG() << "row " << r << " gradient off by " << worst << " of " << top << '\n';
        RC_ASSERT(worst <= 1e-4 * top + 1e-6);
    }
}

TEST_CASE("everything an env can say means the same as on the CPU") {
    property("supports and samples", [](std::uint64_t seed) {
        source s(seed);
        const index_t vocab = 1 + s.below(700);
        sparse_case c = make_sparse_case(seed, 1 + s.below(12), vocab, 1 + s.below(std::min<index_t>(vocab, 20)));
        spoil(c, s);
        for_every_sparse_estimator(
            [&](const char* name, const auto& estimator) { compare_with_eigen(c, estimator, name); });
    });
}

TEST_CASE("token_logp and log_sum_exp agree with the reference") {
    source s(4);
    const index_t n = 5, vocab = 2100, m = 7;
    std::vector<float> z(n * vocab), out(n * m);
    std::vector<double> lse(n);
    for (float& x : z) x = float(3 * s.normal());
    z[3] = minus_infinity;
    std::vector<std::int64_t> ids(n * m);
    for (auto& i : ids) i = s.below(vocab);
    ids[1] = 3;
    ids[m * 2] = vocab; // out of range
    for (int threads : {1, 64, 256}) {
        host_run_backend backend{threads};
        const result r = token_logp(backend, view(z.data(), n, vocab), view(ids.data(), n, m), view(out.data(), n, m),
                                    1.5f, row_mask<>{}, vector_view<double>(lse));
        CHECK(r.diagnostics.bad_rows == 1);
        CHECK(r.diagnostics.first_bad_row == 2);
        for (index_t row = 0; row < n; ++row) {
            std::vector<double> x;
            double sum = 0;
            for (index_t v = 0; v < vocab; ++v)
                x.push_back(double(z[row * vocab + v]) / 1.5), sum += std::exp(x.back());
            CHECK(lse[row] == doctest::Approx(std::log(sum)).epsilon(2e-7));
            for (index_t j = 0; j < m; ++j) {
                const index_t id = ids[row * m + j];
                if (id >= vocab || (row == 0 && id == 3))
                    CHECK(out[row * m + j] == minus_infinity);
                else
                    CHECK(double(out[row * m + j]) ==
                          doctest::Approx(x[std::size_t(id)] - std::log(sum)).epsilon(2e-7));
            }
        }
    }
}

} // namespace
