// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, whole-compiler, whole-sanitize
//
// What diagnostics report beside the loss, against float64 and by hand, on the CPU's lanes and on the GPU's rows run by
// a host loop: entropies, overlap, quantiles of the ratio, teacher KL, counts by sign, the variance of a draw's loss;
// that asking for them changes no bit of loss and gradient; that the list of fields is whole.
#include "both_engines.hpp"
#include "support/distribution.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/sanitized.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <set>
#include <string>
#include <vector>

#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>
#include <opd/ratio_sketch.hpp>

using namespace opd;
using namespace opd::test;

namespace {

template <class Z, class Y>
void check_rows(const std::string& type) {
    property("entropies and overlap, " + type, [] {
        problem_options o;
        o.kinds = {flavour::wide,        flavour::peaked, flavour::filtered, flavour::student_gap,
                   flavour::teacher_gap, flavour::steep,  flavour::one_hot,  flavour::diffuse};
        o.far_temperatures = true, o.smallest_rows = 1;
        const problem p = *problems(o);
        buffers<Z, float, Y> b(p);
        double hp = 0, hq = 0, both = 0;
        index_t kept = 0;
        for (index_t r = 0; r < p.rows; ++r) {
            if (p.masked && !b.kept[std::size_t(r)]) continue;
            const auto ps = softmax(b.z_view().row(r), p.vocab, double(p.temperature_p));
            const auto qs = softmax(b.y_view().row(r), p.vocab, double(p.temperature_q));
            hp += entropy(ps), hq += entropy(qs), ++kept;
            both += overlap(ps, qs);
        }
        on_both([&](auto& be, const char*) {
            env e = b.masked_env();
            const auto check = [&](const auto& estimator) {
                const result plain = evaluate(be, b.student(), b.teacher(), estimator, e);
                const std::vector<float> dz = b.dz;
                env asked = e;
                asked.measure.entropy = true;
                const result r = evaluate(be, b.student(), b.teacher(), estimator, asked);
                RC_ASSERT(std::memcmp(&r.loss, &plain.loss, sizeof r.loss) == 0);
                RC_ASSERT(std::memcmp(dz.data(), b.dz.data(), dz.size() * sizeof(float)) == 0);
                RC_ASSERT(plain.diagnostics.student_entropy_rows == 0);
                const diagnostics& d = r.diagnostics;
                RC_ASSERT(d.student_entropy_rows == kept);
                RC_ASSERT(d.teacher_entropy_rows == kept);
                RC_ASSERT(d.overlap_rows == kept);
                const double eps = 2e-6 * double(std::max<index_t>(kept, 1)) * std::log(double(p.vocab) + 2);
                RC_ASSERT(std::abs(d.student_entropy_sum - hp) < eps);
                RC_ASSERT(std::abs(d.teacher_entropy_sum - hq) < eps);
                RC_ASSERT(std::abs(d.overlap_sum - both) < eps);
            };
            check(reverse_kl{});
            check(total_variation{});
        });
    });
}

} // namespace

TEST_CASE("entropies and overlap of dense rows agree with float64 and change nothing else") {
    check_rows<float, float>("float");
    check_rows<bfloat16, float>("bfloat16");
#if !OPD_TEST_SANITIZED // what reads memory is the same text
    check_rows<double, double>("double");
#endif
}

TEST_CASE("figures of drawn tokens: entropy, ratios, teacher KL, signs, variance") {
    property("drawn tokens", [] {
        problem_options o;
        o.kinds = {flavour::wide, flavour::peaked, flavour::near_equal};
        o.smallest_rows = 1;
        const problem p = *problems(o);
        buffers<float> b(p);
        numbers u(p.seed + 3);
        const index_t m = 1 + u.below(6);
        const caches<float> c(b, std::min<index_t>(p.vocab, 4), m);
        std::vector<double> log_ratios;
        double hp = 0, kl = 0, variance = 0;
        index_t kept = 0, signs[3] = {0, 0, 0};
        for (index_t r = 0; r < p.rows; ++r) {
            if (p.masked && !b.kept[std::size_t(r)]) continue;
            const auto ps = softmax(b.z_view().row(r), p.vocab, double(p.temperature_p));
            hp += entropy(ps), ++kept;
            std::vector<double> losses;
            for (index_t j = 0; j < m; ++j) {
                const auto at = std::size_t(r * m + j);
                const double lp = std::log(ps[std::size_t(c.drawn[at])]), lm = double(c.log_mu[at]),
                             lq = double(c.drawn_log_q[at]);
                log_ratios.push_back(lp - lm);
                kl += lm - lq;
                losses.push_back(-std::exp(lp - lm) * (lq - lp));
                if (std::abs(lq - lp) > 1e-4) ++signs[lq > lp ? 0 : 1];
            }
            double mean = 0, squares = 0;
            for (const double x : losses) mean += x / double(m);
            for (const double x : losses) squares += (x - mean) * (x - mean);
            if (m > 1) variance += squares / double(m - 1);
        }
        on_both([&](auto& be, const char*) {
            std::vector<index_t> counts(ratio_sketch::bins);
            env e = b.masked_env();
            const result plain = evaluate(be, b.student(), c.samples(), mc{reverse_kl{}}, e);
            const std::vector<float> dz = b.dz;
            e.measure = {.entropy = true, .ratios = view(counts.data(), ratio_sketch::bins)};
            const result r = evaluate(be, b.student(), c.samples(), mc{reverse_kl{}}, e);
            const diagnostics& d = r.diagnostics;
            RC_ASSERT(plain.loss == r.loss);
            RC_ASSERT(dz == b.dz);
            RC_ASSERT(d.tokens == kept * m);
            RC_ASSERT(d.student_entropy_rows == kept);
            RC_ASSERT(d.teacher_entropy_rows == 0);
            RC_ASSERT(std::abs(d.student_entropy_sum - hp) < 2e-6 * double(kept + 1) * std::log(double(p.vocab) + 2));
            RC_ASSERT(std::abs(d.teacher_kl_sum - kl) <= 1e-5 * (std::abs(kl) + double(kept * m)));
            RC_ASSERT(d.positive_advantage >= signs[0]);
            RC_ASSERT(d.negative_advantage >= signs[1]);
            RC_ASSERT(d.positive_advantage + d.negative_advantage + d.zero_advantage == d.tokens);
            RC_ASSERT(d.variance_rows == (m > 1 ? kept : 0));
            RC_ASSERT(std::abs(d.loss_variance_sum - variance) <= 1e-4 * variance + 1e-6);
            // quantiles: between the order statistics beside them, a bin's width off
            index_t all = 0;
            for (const index_t n : counts) all += n;
            RC_ASSERT(all == d.tokens);
            if (all == 0) return;
            std::vector<double> sorted = log_ratios;
            std::sort(sorted.begin(), sorted.end());
            for (const double q : {0.0, 0.1, 0.5, 0.95, 1.0}) {
                const auto i = std::size_t(std::max(std::ceil(q * double(all)) - 1, 0.0));
                const double want = sorted[i], got = std::log(ratio_sketch::quantile(counts, q));
                if (std::abs(want) < 100) RC_ASSERT(std::abs(got - want) <= 0.0625 * std::abs(want) + 0x1p-7 + 1e-3);
            }
            // a second call adds
            evaluate(be, b.student(), c.samples(), mc{reverse_kl{}}, e);
            index_t twice = 0;
            for (const index_t n : counts) twice += n;
            RC_ASSERT(twice == 2 * all);
        });
    });
}

TEST_CASE("overlap on a support") {
    const std::vector<float> z{0, 0, 0, 0};
    const std::vector<std::int32_t> ids{0, 2};
    const std::vector<float> log_q{std::log(0.1F), std::log(0.6F)}, tail{std::log(0.3F)};
    on_both([&](auto& be, const char*) {
        const result r = evaluate(be, student::logits{view(z.data(), 1, 4)},
                                  teacher::support<std::int32_t, float>{
                                      view(ids.data(), 1, 2), view(log_q.data(), 1, 2), vector_view<const float>(tail)},
                                  tail_bucket{reverse_kl{}});
        CHECK(r.diagnostics.overlap_rows == 1);
        CHECK(r.diagnostics.overlap() == doctest::Approx(0.35));
    });
}

TEST_CASE("bins of the sketch: in order, mirrored, wide enough") {
    CHECK(ratio_sketch::bin_of(0) == ratio_sketch::side);
    CHECK(ratio_sketch::bin_of(0.0078) == ratio_sketch::side);
    CHECK(ratio_sketch::bin_of(1e9) == ratio_sketch::bins - 1);
    CHECK(ratio_sketch::bin_of(-1e9) == 0);
    int before = -1;
    for (double l = -130; l < 130; l += 0.001) {
        const int bin = ratio_sketch::bin_of(l);
        CHECK(bin >= before);
        if (bin < 0 || bin >= ratio_sketch::bins) FAIL("no bin for " << l);
        before = bin;
        if (std::abs(bin + ratio_sketch::bin_of(-l) - 2 * ratio_sketch::side) > 0) FAIL("not mirrored at " << l);
        if (std::abs(l) < 127 && std::abs(ratio_sketch::middle(bin) - l) > 0.0625 * std::abs(l) + 0x1p-7)
            FAIL("too wide at " << l);
    }
    CHECK(detail::is_nan(ratio_sketch::quantile(std::vector<index_t>(ratio_sketch::bins), 0.5)));
    CHECK_THROWS_AS(ratio_sketch::quantile(std::vector<index_t>(3), 0.5), invalid_input);
    CHECK_THROWS_AS(ratio_sketch::quantile(std::vector<index_t>(ratio_sketch::bins), 1.5), invalid_input);
    std::vector<float> z(4), y(4);
    std::vector<index_t> few(5);
    cpu_backend be;
    CHECK_THROWS_WITH_AS(evaluate(be, student::logits{view(z.data(), 1, 4)}, teacher::dense{view(y.data(), 1, 4)},
                                  reverse_kl{}, {.measure = {.ratios = view(few.data(), 5)}}),
                         doctest::Contains("env.measure.ratios"), invalid_input);
}

namespace {
/// Sets every field to the next number, adds up their bytes and collects their names.
struct filling {
    diagnostics& d;
    std::size_t& bytes;
    std::set<std::string>& names;
    double next = 1;
    template <class T, class Rule>
    void operator()(const char* name, T diagnostics::*field, Rule) {
        bytes += sizeof(T);
        names.insert(name);
        if constexpr (std::is_array_v<T>)
            for (auto& x : d.*field) x = std::remove_reference_t<decltype(x)>(next++);
        else
            d.*field = T(next++);
    }
};
struct comparing {
    const diagnostics &a, &b, &both;
    index_t& wrong;
    template <class T, class Rule>
    void operator()(const char*, T diagnostics::*field, Rule) const {
        T want;
        std::memcpy(&want, &(a.*field), sizeof want);
        Rule::into(want, b.*field);
        wrong += std::memcmp(&want, &(both.*field), sizeof want) != 0;
    }
};
} // namespace

TEST_CASE("the list of fields holds every byte of diagnostics once, and merges by it") {
    diagnostics a, b;
    std::size_t bytes = 0;
    std::set<std::string> names;
    index_t fields = 0;
    diagnostics::fields([&](auto&&...) { ++fields; });
    filling fill{a, bytes, names};
    diagnostics::fields(fill);
    CHECK(bytes == sizeof(diagnostics));
    CHECK(index_t(names.size()) == fields);
    std::size_t again = 0;
    diagnostics::fields(filling{b, again, names, 1000});
    diagnostics both = a;
    both.merge(b);
    index_t wrong = 0;
    diagnostics::fields(comparing{a, b, both, wrong});
    CHECK(wrong == 0);
    CHECK(both.rows == a.rows + b.rows);
    CHECK(both.first_bad_row == std::min(a.first_bad_row, b.first_bad_row));
    CHECK(both.ratio_max == b.ratio_max);
    CHECK(both.student_mass_min == a.student_mass_min);
    CHECK(both.staleness[32] == a.staleness[32] + b.staleness[32]);
}
