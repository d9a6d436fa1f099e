// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
//
// Tail buckets on rows that are ever more peaked, from a gap of 0 nats between support and tail to 1,000 and to a tail
// without mass, against buckets in long double: values, and gradients within 1e-6 of the largest entry at every gap. On
// the CPU backend and on the GPU's kernels run on the host.
#include "backends/host_run.hpp"
#include "backends/peaked_row.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/support.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

template <class Backend, class Z, class D>
void check_row(Backend& backend, peaked_row<Z>& row, const D& d) {
    const auto want = row.reference(d);
    const result r = evaluate(backend, row.student(), row.cache(), tail_bucket<D>{d});
    CHECK(r.diagnostics.bad_rows == 0);
    CHECK(r.diagnostics.infinite_rows == 0);
    const double bound = sizeof(Z) == 8 ? 1e-10 : 1e-6; // float lanes sum the tail
    CHECK(std::abs(r.loss - double(want.value)) <= bound * std::max(1.0, std::abs(double(want.value))));
    real top = 0, worst = 0, sum = 0, size = 0;
    for (std::size_t v = 0; v < row.dz.size(); ++v) {
        const real g = real(element<Z>::load(row.dz[v]));
        top = std::max(top, std::abs(want.dz[v])), worst = std::max(worst, std::abs(g - want.dz[v]));
        sum += g, size += std::abs(g);
    }
    const real least = sizeof(Z) == 8 ? 1e-300L : 1e-37L; // what the storage type cannot hold in full
    CHECK_MESSAGE(worst <= 1e-6L * top + least,
                  "gradient off by " << double(worst) << " of " << double(top) << ", loss " << r.loss);
    CHECK(std::abs(sum) <= 1e-6L * size + least * real(row.vocab));
}

template <class Z, class Backend>
void every_gap(Backend& backend, const char* name, std::initializer_list<index_t> sizes) {
    std::uint64_t seed = 3;
    for (const index_t vocab : sizes)
        for (const double gap : {0.0, 1.0, 10.0, 25.0, 35.0, 40.0, 60.0, 88.0, 104.0, 200.0, 500.0, 745.0, 1000.0})
            for (const double q_rest : {0.22, 0.9, 1e-6})
                for (const float t : {1.F, 0.7F}) {
                    peaked_row<Z> row(vocab, gap, q_rest, t, ++seed);
                    for_each_divergence([&](const char* what, const auto& d) {
                        // e^((a-1)d) p is formed as a product, and p is 0 beyond 745 nats
                        if (std::string(what) == "alpha(.5)" && gap > 500) return;
                        INFO(std::string(name) << ", " << std::string(what) << ", V " << vocab << ", gap " << gap
                                               << ", teacher's tail " << q_rest << ", T " << t);
                        check_row(backend, row, d);
                    });
                }
}

/// A tail whose every logit is -inf.
template <class Z, class Backend>
void empty_tails(Backend& backend) {
    for (const index_t vocab : {3, 40, 1500}) {
        peaked_row<Z> row(vocab, endless, 0.22, 1, 8);
        row.k = 1, row.ids.resize(1), row.log_q = {std::log(0.78)}; // the id of all mass (V = 3), or of most
        if (vocab > 3) row.z[0] = element<Z>::store(detail::neg_inf<arithmetic_t<Z>>());
        const auto all_of = [&](const char* what, const auto& d) {
            CAPTURE(std::string(what));
            CAPTURE(vocab);
            using D = std::decay_t<decltype(d)>;
            textbook::row b;
            b.log_p = {0, -std::numeric_limits<real>::infinity()};
            b.log_q = {std::log(0.78L), std::log(0.22L)};
            real want = textbook::value(d, b);
            const bool infinite_value = std::is_same_v<D, forward_kl>;
            if (infinite_value) want = 0.78L * std::log(0.78L) + 0.22L * (std::log(0.22L) + 30);
            const result r = evaluate(backend, row.student(), row.cache(), tail_bucket<D>{d});
            CHECK(r.diagnostics.infinite_rows == infinite_value);
            CHECK(r.loss == doctest::Approx(double(want)).epsilon(1e-12));
            for (const Z g : row.dz) CHECK(double(element<Z>::load(g)) == 0); // one logit has mass: it cannot move
            const result skipped =
                evaluate(backend, row.student(), row.cache(), tail_bucket<D>{d}, {.on_infinite = infinite::skip()});
            CHECK((skipped.loss == 0) == infinite_value);
        };
        for_each_divergence(all_of);
    }
    // k = V: no id is outside; a stated tail is the teacher's word, a missing one is none
    const Z z[] = {Z(0), Z(1)};
    const std::int32_t ids[] = {1, 0};
    const double log_q[] = {std::log(0.5), std::log(0.3)}, tail[] = {std::log(0.2)};
    const student::logits<Z> s{view(z, 1, 2)};
    const auto stated =
        teacher::support<std::int32_t, double>{view(ids, 1, 2), view(log_q, 1, 2), vector_view<const double>(tail, 1)};
    CHECK(evaluate(backend, s, stated, tail_bucket{forward_kl{}}).diagnostics.infinite_rows == 1);
    CHECK(evaluate(backend, s, stated, tail_bucket{reverse_kl{}}).diagnostics.infinite_rows == 0);
    const auto missing = teacher::support<std::int32_t, double>{view(ids, 1, 2), view(log_q, 1, 2)};
    const result r = evaluate(backend, s, missing, tail_bucket{forward_kl{}});
    CHECK(r.diagnostics.infinite_rows == 0);
    CHECK(r.diagnostics.tail_floored == 0);
}

} // namespace

TEST_CASE("every gap, CPU, float") {
    cpu_backend backend;
    every_gap<float>(backend, "float", {3, 40, 2600});
}
TEST_CASE("every gap, CPU, double") {
    cpu_backend backend;
    every_gap<double>(backend, "double", {3, 40, 2600});
}
TEST_CASE("every gap, the GPU's kernels, float") {
    host_run_backend backend{32};
    every_gap<float>(backend, "float", {3, 700});
}
TEST_CASE("every gap, the GPU's kernels, double") {
    host_run_backend backend{32};
    every_gap<double>(backend, "double", {3, 700});
}
TEST_CASE("a tail without student mass: each divergence's limit; infinite under forward KL") {
    cpu_backend cpu;
    host_run_backend blocks{32};
    empty_tails<float>(cpu), empty_tails<double>(cpu);
    empty_tails<float>(blocks), empty_tails<double>(blocks);
}
