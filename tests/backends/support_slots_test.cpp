// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
// optimise: no
//
// What the slots of a sparse cache may hold, on the CPU backend and on the GPU's kernels run on the host: an id of -1
// is an unused slot, in supports as in weighted entries; another negative id, or no used slot at all, is bad; log-probs
// above 0 are none, for every cache alike; a log mu of 0 is used as it stands and counted. check::contents throws for
// what else is counted.
#include "backends/host_run.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t vocab = 1500;
const float minus_infinity_f = detail::neg_inf<float>();

struct row_of_slots {
    std::vector<float> z, dz = std::vector<float>(vocab);
    std::vector<std::int32_t> ids; // some -1
    std::vector<float> log_q, log_mu, weight;
    std::vector<float> log_tail{std::log(0.4F)};

    row_of_slots(std::vector<std::int32_t> slots, std::uint64_t seed = 4) : ids(std::move(slots)) {
        numbers u(seed);
        for (index_t v = 0; v < vocab; ++v) z.push_back(float(2 * u.normal()));
        const float nan = std::numeric_limits<float>::quiet_NaN();
        for (const auto id : ids) { // what an unused slot holds is nobody's business
            log_q.push_back(id < 0 ? nan : -1.5F - 0.01F * float(id % 7));
            log_mu.push_back(id < 0 ? nan : -2.F), weight.push_back(id < 0 ? nan : 0.3F);
        }
    }
    index_t k() const { return index_t(ids.size()); }
    template <class T>
    auto row(const std::vector<T>& x) const {
        return view(x.data(), 1, k());
    }
    teacher::support<std::int32_t> support() const { return {row(ids), row(log_q), log_tail}; }
    teacher::samples<std::int32_t> samples() const { return {row(ids), row(log_mu), row(log_q)}; }
    teacher::weighted<std::int32_t> weighted() const { return {row(ids), row(weight), row(log_mu), row(log_q)}; }
    student::logits<float> student() { return {view(std::as_const(z).data(), 1, vocab), view(dz.data(), 1, vocab)}; }
};

template <class Visit>
void on_both_backends(Visit visit) {
    cpu_backend cpu;
    host_run_backend blocks{32};
    SUBCASE("CPU") { visit(cpu); }
    SUBCASE("the GPU's kernels") { visit(blocks); }
}

const std::vector<std::int32_t> ragged{-1, 700, -1, 3, 1499, -1}, packed{700, 3, 1499};

} // namespace

TEST_CASE("-1 is an unused slot: the call is that of the used ones") {
    on_both_backends([](auto& backend) {
        const auto same = [&](const char* name, auto cache, const auto& estimator) {
            CAPTURE(std::string(name));
            for (const float beta : {0.F, 0.5F}) {
                row_of_slots a(ragged), b(packed);
                std::fill(a.dz.begin(), a.dz.end(), 0.25F), std::fill(b.dz.begin(), b.dz.end(), 0.25F);
                const result r = evaluate(backend, a.student(), cache(a), estimator, {.beta = beta});
                const result want = evaluate(backend, b.student(), cache(b), estimator, {.beta = beta});
                CHECK(r.diagnostics.bad_rows == 0);
                CHECK(r.loss == doctest::Approx(want.loss).epsilon(1e-6));
                CHECK(r.diagnostics.tokens == want.diagnostics.tokens);
                double worst = 0;
                for (std::size_t v = 0; v < a.dz.size(); ++v)
                    worst = std::max(worst, double(std::abs(a.dz[v] - b.dz[v])));
                CHECK(worst <= 1e-6);
            }
        };
        const auto support = [](const row_of_slots& s) { return s.support(); };
        const auto inferred = [](const row_of_slots& s) {
            auto t = s.support();
            t.log_tail = {};
            return t;
        };
        same("renormalised reverse KL", support, renormalised{reverse_kl{}});
        same("renormalised JSD", support, renormalised{jsd{}});
        same("tail bucket", support, tail_bucket{forward_kl{}});
        same("tail bucket, inferred tail", inferred, tail_bucket{jsd{}});
        same(
            "weighted", [](const row_of_slots& s) { return s.weighted(); }, mc{reverse_kl{}});

        // a sparse gradient has a column for every slot, 0 (or beta times what was there) for an unused one
        row_of_slots a(ragged);
        std::vector<float> sparse(ragged.size(), 3);
        const student::on_support<float> on{view(std::as_const(a.z).data(), 1, vocab), view(sparse.data(), 1, a.k())};
        evaluate(backend, on, a.support(), renormalised{reverse_kl{}});
        for (std::size_t j = 0; j < sparse.size(); ++j) CHECK((sparse[j] == 0) == (ragged[j] < 0));
        std::fill(sparse.begin(), sparse.end(), 3.F);
        evaluate(backend, on, a.support(), renormalised{reverse_kl{}}, {.beta = 0.5F});
        for (std::size_t j = 0; j < sparse.size(); ++j) CHECK((sparse[j] == 1.5F) == (ragged[j] < 0));
    });
}

TEST_CASE("another negative id, an id twice, no used slot: bad") {
    on_both_backends([](auto& backend) {
        for (const auto& slots : {std::vector<std::int32_t>{5, -2, 7}, std::vector<std::int32_t>{-1, -1, -1},
                                  std::vector<std::int32_t>{-1, 5, std::numeric_limits<std::int32_t>::min()},
                                  std::vector<std::int32_t>{-1, 5, std::int32_t(vocab)}}) {
            row_of_slots s(slots);
            for (std::size_t j = 0; j < slots.size(); ++j)
                if (slots[j] != -1) s.log_q[j] = -1, s.log_mu[j] = -1, s.weight[j] = 0.3F;
            const auto bad = [&](const auto& t, const auto& estimator) {
                std::fill(s.dz.begin(), s.dz.end(), 7.F);
                const result r = evaluate(backend, s.student(), t, estimator);
                CHECK(r.diagnostics.bad_rows == 1);
                CHECK(r.loss == 0);
                CHECK(s.dz == std::vector<float>(vocab, 0.F));
            };
            bad(s.support(), renormalised{reverse_kl{}});
            bad(s.support(), tail_bucket{reverse_kl{}});
            bad(s.weighted(), mc{reverse_kl{}});
        }
        row_of_slots draws({5, -1, 7}); // i.i.d. draws have no unused slots: -1 is bad too
        draws.log_q[1] = draws.log_mu[1] = -1;
        CHECK(evaluate(backend, draws.student(), draws.samples(), mc{reverse_kl{}}).diagnostics.bad_rows == 1);
        row_of_slots twice({-1, 9, 4, 9});
        CHECK(evaluate(backend, twice.student(), twice.support(), tail_bucket{jsd{}}).diagnostics.bad_rows == 1);
        CHECK(evaluate(backend, twice.student(), twice.support(), renormalised{jsd{}}).diagnostics.bad_rows == 1);
    });
}

TEST_CASE("probabilities passed as log-probs: bad for every cache") {
    on_both_backends([](auto& backend) {
        row_of_slots s(packed);
        s.log_q = {0.5F, 0.2F, 0.1F};
        CHECK(evaluate(backend, s.student(), s.support(), renormalised{reverse_kl{}}).diagnostics.bad_rows == 1);
        CHECK(s.dz == std::vector<float>(vocab, 0.F));
        CHECK(evaluate(backend, s.student(), s.support(), tail_bucket{reverse_kl{}}).diagnostics.bad_rows == 1);
        CHECK(evaluate(backend, s.student(), s.weighted(), mc{reverse_kl{}}).diagnostics.bad_rows == 1);
        s.log_q = {0.0005F, -9, -9}; // rounding above 0 is none
        CHECK(evaluate(backend, s.student(), s.support(), renormalised{reverse_kl{}}).diagnostics.bad_rows == 0);
        CHECK(evaluate(backend, s.student(), s.support(), tail_bucket{reverse_kl{}}).diagnostics.bad_rows == 0);
        s.log_q = {-1, std::numeric_limits<float>::quiet_NaN(), -9};
        CHECK(evaluate(backend, s.student(), s.support(), renormalised{reverse_kl{}}).diagnostics.bad_rows == 1);
    });
}

TEST_CASE("a token without log mu is bad, or has ratio 1 where the cache says so by name") {
    on_both_backends([](auto& backend) {
        row_of_slots s(packed);
        s.log_mu = {-2, std::numeric_limits<float>::quiet_NaN(), -3};
        const teacher::samples<std::int32_t> t{s.row(s.ids), s.row(s.log_mu), s.row(s.log_q)};
        CHECK(evaluate(backend, s.student(), t, mc{reverse_kl{}}).diagnostics.bad_rows == 1);
        const result r = evaluate(backend, s.student(), teacher::missing_mu{t}, mc{reverse_kl{}});
        CHECK(r.diagnostics.bad_rows == 0);
        CHECK(r.diagnostics.missing_mu == 1);
        const std::vector<float> got = s.dz;
        float log_p[3];
        cpu_backend cpu;
        token_logp(cpu, view(std::as_const(s.z).data(), 1, vocab), s.row(s.ids), view(log_p, 1, 3));
        s.log_mu[1] = log_p[1];
        const result known = evaluate(backend, s.student(), t, mc{reverse_kl{}});
        CHECK(r.loss == known.loss);
        CHECK(got == s.dz);
        CHECK(known.diagnostics.missing_mu == 0);
        s.log_mu = {-2, std::numeric_limits<float>::infinity(), -3}; // no number, but not missing
        CHECK(evaluate(backend, s.student(), teacher::missing_mu{t}, mc{reverse_kl{}}).diagnostics.bad_rows == 1);
    });
}

TEST_CASE("a log mu of 0 is used as it stands, counted, and changes no other row") {
    on_both_backends([](auto& backend) {
        row_of_slots s(packed);
        s.log_mu = {-2, 0, -3};
        const teacher::samples<std::int32_t> t{s.row(s.ids), s.row(s.log_mu), s.row(s.log_q)};
        const result r = evaluate(backend, s.student(), t, mc{reverse_kl{}});
        CHECK(r.diagnostics.bad_rows == 0);
        CHECK(r.diagnostics.certain_mu == 1);
        float log_p[3];
        cpu_backend cpu;
        token_logp(cpu, view(std::as_const(s.z).data(), 1, vocab), s.row(s.ids), view(log_p, 1, 3));
        double want = 0;
        for (std::size_t j = 0; j < 3; ++j)
            want -= std::exp(double(log_p[j]) - double(s.log_mu[j])) * (double(s.log_q[j]) - double(log_p[j])) / 3;
        CHECK(r.loss == doctest::Approx(want).epsilon(1e-6));
        for (const float mu : {-9001.F, std::numeric_limits<float>::infinity() * -1, 0.01F}) {
            s.log_mu[1] = mu; // below -9000: a placeholder
            CHECK(evaluate(backend, s.student(), t, mc{reverse_kl{}}).diagnostics.bad_rows == 1);
        }
    });
}

TEST_CASE("check::contents throws for slots, log-probs, tails and columns that were never filled in") {
    cpu_backend backend;
    const env e{.checks = check::contents};
    const auto refused = [&](const char* words, auto call) {
        CHECK_THROWS_WITH_AS(call(), doctest::Contains(words), invalid_input);
    };
    row_of_slots good(ragged);
    CHECK(evaluate(backend, good.student(), good.support(), tail_bucket{reverse_kl{}}, e).diagnostics.bad_rows == 0);
    CHECK(evaluate(backend, good.student(), good.weighted(), mc{reverse_kl{}}, e).diagnostics.bad_rows == 0);
    row_of_slots s(packed);
    s.ids[1] = -2;
    refused("teacher.ids, row 0: id -2", [&] { evaluate(backend, s.student(), s.support(), tail_bucket{jsd{}}, e); });
    refused("teacher.ids, row 0: id -2", [&] { evaluate(backend, s.student(), s.weighted(), mc{reverse_kl{}}, e); });
    s.ids = {-1, -1, -1};
    refused("no used slot", [&] { evaluate(backend, s.student(), s.support(), renormalised{jsd{}}, e); });
    s.ids = packed;
    s.log_tail[0] = 0.3F;
    refused("teacher.log_tail", [&] { evaluate(backend, s.student(), s.support(), tail_bucket{jsd{}}, e); });
    s.log_q[1] = 0.2F;
    refused("teacher.log_q", [&] { evaluate(backend, s.student(), s.support(), renormalised{jsd{}}, e); });

    // a tail that only one side has is an infinite row, too
    row_of_slots tail(packed);
    const env raise{.on_infinite = infinite::raise()};
    tail.log_tail[0] = detail::neg_inf<float>();
    CHECK_THROWS_AS(evaluate(backend, tail.student(), tail.support(), tail_bucket{reverse_kl{}}, raise),
                    infinite_value);
    evaluate(backend, tail.student(), tail.support(), tail_bucket{forward_kl{}}, raise);
    tail.log_tail[0] = -1;
    for (index_t v = 0; v < vocab; ++v)
        if (std::find(packed.begin(), packed.end(), v) == packed.end())
            tail.z[std::size_t(v)] = detail::neg_inf<float>();
    CHECK_THROWS_AS(evaluate(backend, tail.student(), tail.support(), tail_bucket{forward_kl{}}, raise),
                    infinite_value);
    evaluate(backend, tail.student(), tail.support(), tail_bucket{reverse_kl{}}, raise);

    // log mu: 0 throughout a column
    const index_t m = 2;
    for (const index_t rows : {15, 16, 17}) {
        std::vector<float> z(std::size_t(rows * 4), 0.F), mu(std::size_t(rows * m), -1.F), q(mu.size(), -1.F);
        std::vector<float> weight(mu.size(), 0.5F);
        std::vector<std::int32_t> ids(mu.size(), 2), mask(std::size_t(rows), 1);
        std::vector<std::uint8_t> exact(mu.size(), 0);
        for (index_t r = 0; r < rows; ++r) mu[std::size_t(r * m + 1)] = 0;
        env checked = e;
        checked.mask = row_mask<>(mask);
        const auto at = [&](const auto& x) { return view(x.data(), rows, m); };
        const auto samples = [&] {
            evaluate(backend, student::logits{view(std::as_const(z).data(), rows, 4)},
                     teacher::samples<std::int32_t>{at(ids), at(mu), at(q)}, mc{reverse_kl{}}, checked);
        };
        const auto weighted = [&] {
            evaluate(backend, student::logits{view(std::as_const(z).data(), rows, 4)},
                     teacher::weighted<std::int32_t>{at(ids), at(weight), at(mu), at(q), at(exact)}, mc{reverse_kl{}},
                     checked);
        };
        if (rows < 16) {
            samples(), weighted();
            continue;
        }
        refused("teacher.log_mu: is 0 in column 1 of all", samples);
        refused("teacher.log_mu: is 0 in column 1 of all", weighted);
        for (index_t r = 0; r < rows; ++r) exact[std::size_t(r * m + 1)] = 1;
        weighted(); // certain by their own word
        for (index_t r = 0; r < rows; ++r) exact[std::size_t(r * m + 1)] = 0, ids[std::size_t(r * m + 1)] = -1;
        weighted(); // unused
        ids.assign(ids.size(), 2);
        for (index_t r = 15; r < rows; ++r) mask[std::size_t(r)] = 0;
        samples(); // too few kept rows
        mask.assign(mask.size(), 1);
        mu[std::size_t(3 * m + 1)] = -0.5F;
        samples(); // somebody filled it in
    }
}

TEST_CASE("a floor of a divergence without logarithm: the log-prob inside the power is raised") {
    on_both_backends([](auto& backend) {
        const float low_p[] = {0, minus_infinity_f, minus_infinity_f}, half_q[] = {0, 0, minus_infinity_f};
        const float even_p[] = {0, 0, minus_infinity_f}, low_q[] = {0, minus_infinity_f, minus_infinity_f};
        float dz[3];
        const auto dense = [&](const float* z, const float* y, const auto& d, double floor) {
            return evaluate(backend, student::logits{view(z, 1, 3), view(dz, 1, 3)}, teacher::dense{view(y, 1, 3)}, d,
                            {.on_infinite = infinite::floor(floor)});
        };
        const std::int32_t id[] = {0};
        const float log_q[] = {std::log(0.5F)}, tail[] = {std::log(0.5F)};
        for (const double x : {-30.0, -3.0}) {
            CAPTURE(x);
            const auto near = [](double want) { return doctest::Approx(want).epsilon(1e-6); };
            // alpha = -1: (Σ q²/p - 1)/2 with p = (1, e^x), q = (½, ½)
            const double want = (0.25 + 0.25 * std::exp(-x) - 1) / 2;
            const result r = dense(low_p, half_q, alpha_divergence{-1}, x);
            CHECK(r.diagnostics.infinite_rows == 1);
            CHECK(r.loss == near(want));
            for (const float g : dz) CHECK(detail::is_finite(g));
            CHECK(std::abs(dz[0] + dz[1] + dz[2]) <= 1e-6F);
            const teacher::support<std::int32_t> t{view(id, 1, 1), view(log_q, 1, 1),
                                                   vector_view<const float>(tail, 1)};
            const auto policy = infinite::floor(x);
            CHECK(evaluate(backend, student::logits{view(low_p, 1, 3), view(dz, 1, 3)}, t,
                           tail_bucket{alpha_divergence{-1}}, {.on_infinite = policy})
                      .loss == near(want));
            CHECK(dz[0] == 0); // one logit with mass
            // chi-squared: Σ p²/q - 1 with p = (½, ½), q = (1, e^x)
            CHECK(dense(even_p, low_q, chi_squared{}, x).loss == near(0.25 + 0.25 * std::exp(-x) - 1));
            CHECK(std::abs(dz[0] + dz[1] + dz[2]) <= 1e-6F * std::abs(dz[0]));
        }
    });
}
