// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The drafter's losses: -log Σ min(p, q) against the textbook's sum and its central differences, on both engines, in
// double and float, from equal rows to rows that share e^-10000 and nothing; its sums with a KL, on supports and
// buckets; and the weights of a draft's rows, which are the derivatives of the expected accepted length.
#include "backends/both_engines.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/textbook.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <opd/estimators/draft_weights.hpp>
#include <opd/estimators/selectors.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;
using textbook::real;

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

/// d(-log Σ min(p, q))/dz, at temperature 1/inv; where p = q half of either side. undecided: the mass whose side
/// rounding decides.
struct exact_row {
    real value = 0;
    std::vector<real> dz;
    real undecided = 0;
};
exact_row exact(const textbook::row& r, real kink) {
    exact_row out;
    out.value = textbook::value(acceptance{}, r);
    const auto below = [&](std::size_t v) {
        return r.log_p[v] < r.log_q[v] ? 1.0L : (r.log_p[v] > r.log_q[v] ? 0.0L : 0.5L);
    };
    // relative to the side of the student's first choice, whose mass does not cancel then
    const auto top = std::size_t(std::max_element(r.log_p.begin(), r.log_p.end()) - r.log_p.begin());
    const real side = below(top);
    real sum = 0;
    std::vector<real> c;
    for (std::size_t v = 0; v < r.log_p.size(); ++v) {
        const real share = std::exp(r.log_p[v] + out.value);
        c.push_back(below(v) == side ? 0 : -share * (below(v) - side));
        sum += c.back();
        if (std::abs(r.log_p[v] - r.log_q[v]) < kink) out.undecided += share;
    }
    for (std::size_t v = 0; v < r.log_p.size(); ++v)
        out.dz.push_back((c[v] - std::exp(r.log_p[v]) * sum) / r.temperature);
    return out;
}

/// Value and gradient of every row of a problem.
template <class Backend, class Z>
void matches(Backend& backend, const problem& p, double value_bound, double gradient_bound, real kink,
             real absolute = 1e-30L) {
    buffers<Z> b(p);
    std::vector<float> losses(std::size_t(p.rows));
    env e{.reduction = reduce::sum};
    e.losses = losses;
    const result got = evaluate(backend, b.student(), b.teacher(), acceptance{}, e);
    real total = 0;
    for (index_t r = 0; r < p.rows; ++r) {
        const auto t = textbook::make_row(b.z_view().row(r), b.y_view().row(r), p.vocab, double(p.temperature_p),
                                          double(p.temperature_q));
        if (!std::isfinite(textbook::value(acceptance{}, t))) { // no token on both sides
            total += 30;
            continue;
        }
        const exact_row want = exact(t, kink);
        total += want.value;
        const double off = double(std::abs(real(losses[std::size_t(r)]) - want.value));
        if (!(off <= value_bound * std::max(1.0, double(want.value)) + 6e-8 * double(want.value)))
            RC_FAIL("value " + std::to_string(losses[std::size_t(r)]) + ", not " + std::to_string(double(want.value)));
        real top = 0, sum = 0;
        for (const real g : want.dz) top = std::max(top, std::abs(g));
        for (index_t v = 0; v < p.vocab; ++v) {
            const real g = b.dz_view()(r, v), share = std::exp(t.log_p[std::size_t(v)]);
            const bool at_kink = std::abs(t.log_p[std::size_t(v)] - t.log_q[std::size_t(v)]) < kink;
            const real allowed =
                real(gradient_bound) * top + absolute +
                share / real(p.temperature_p) * (want.undecided + (at_kink ? std::exp(want.value) : 0.0L));
            if (!(std::abs(g - want.dz[std::size_t(v)]) <= allowed))
                RC_FAIL("row " + std::to_string(r) + " entry " + std::to_string(v) + ": " + std::to_string(double(g)) +
                        ", not " + std::to_string(double(want.dz[std::size_t(v)])) + ", value " +
                        std::to_string(double(want.value)));
            sum += g;
        }
        RC_ASSERT(std::abs(sum) <= real(gradient_bound) * 8 * (top + 1));
    }
    if (!(std::abs(real(got.loss) - total) <= real(value_bound) * (real(p.rows) + total)))
        RC_FAIL("loss " + std::to_string(got.loss) + ", not " + std::to_string(double(total)));
}

const std::vector<flavour> every_kind = {
    flavour::wide,        flavour::near_equal,  flavour::equal,   flavour::peaked, flavour::filtered,
    flavour::student_gap, flavour::teacher_gap, flavour::one_hot, flavour::steep,  flavour::diffuse};

/// One row; -inf where a logit is `none`.
template <class T>
struct one_row {
    std::vector<T> z, y, dz = std::vector<T>(z.size(), T(7));
    std::vector<float> losses = {0};
    auto student() {
        return student::logits{view(std::as_const(z).data(), 1, index_t(z.size())),
                               view(dz.data(), 1, index_t(z.size()))};
    }
    auto teacher() const { return teacher::dense{view(y.data(), 1, index_t(y.size()))}; }
};

} // namespace

TEST_CASE("in double: the textbook's value, and its central differences away from p = q") {
    naive_backend slow;
    cpu_backend fast;
    property("every kind of row",
             [&] {
                 const problem p = *problems({.largest_vocab = 60, .smallest_rows = 1, .kinds = every_kind});
                 matches<naive_backend, double>(slow, p, 1e-10, 1e-9, 1e-11L, 1e-14L); // which anchors nothing
                 matches<cpu_backend, double>(fast, p, 1e-10, 1e-9, 1e-11L);
             },
             {.cases = 120});
    property("the slopes are those of the value", [&] {
        const problem p = *problems(
            {.largest_vocab = 30, .smallest_rows = 1, .kinds = {flavour::wide, flavour::peaked, flavour::filtered}});
        buffers<double> b(p);
        for (index_t r = 0; r < p.rows; ++r) {
            const auto t = textbook::make_row(b.z_view().row(r), b.y_view().row(r), p.vocab, double(p.temperature_p),
                                              double(p.temperature_q));
            const exact_row want = exact(t, 1e-3L);
            if (want.undecided > 0) continue; // a kink within the step
            const auto slopes = textbook::gradient(acceptance{}, t);
            for (index_t v = 0; v < p.vocab; ++v)
                RC_ASSERT(std::abs(slopes[std::size_t(v)] - want.dz[std::size_t(v)]) <= 1e-8L);
        }
    });
}

TEST_CASE("in float, on both engines") {
    on_both([&](auto& backend, const char* engine) {
        property(std::string(engine).append(": every kind of row"),
                 [&] {
                     const problem p = *problems({.largest_vocab = 2100, .smallest_rows = 1, .kinds = every_kind});
                     matches<std::remove_reference_t<decltype(backend)>, float>(backend, p, 2e-6, 2e-5, 2e-5L);
                 },
                 {.cases = 60});
    });
}

TEST_CASE("near equality the value keeps its digits, and at equality there is neither value nor gradient") {
    on_both([&](auto& backend, const char* engine) {
        for (const double noise : {1e-1, 1e-3, 1e-5}) {
            INFO(engine << ", " << noise);
            numbers u(5);
            one_row<float> b;
            for (int v = 0; v < 3000; ++v) {
                const auto z = float(2 * u.normal());
                b.z.push_back(z), b.y.push_back(float(double(z) + noise * u.normal()));
            }
            b.dz.assign(b.z.size(), 7);
            const auto t = textbook::make_row(b.z.data(), b.y.data(), 3000, 1, 1);
            const double want = double(textbook::value(acceptance{}, t));
            const double got = evaluate(backend, b.student(), b.teacher(), acceptance{}).loss;
            CHECK(std::abs(got - want) < 1e-6 * want + 3e-9);
            b.y = b.z;
            CHECK(evaluate(backend, b.student(), b.teacher(), acceptance{}).loss == 0);
            CHECK(std::all_of(b.dz.begin(), b.dz.end(), [](float g) { return g == 0; }));
        }
    });
}

TEST_CASE(
    "an overlap that no float holds, and none that a double holds: exact, and pulled apart no more than it must be") {
    on_both([&](auto& backend, const char* engine) {
        for (const double gap : {20., 60., 70., 90., 170., 173., 176., 200., 700., 760., 5000.}) {
            INFO(engine << ", gap " << gap);
            // the student is sure of 0, the teacher of 1; token 2 is where they meet, token 3 the student's alone
            one_row<float> b{.z = {float(gap), 0, float(gap / 2), -1, -2},
                             .y = {0, float(gap), float(gap / 2), none, 1}};
            const auto t = textbook::make_row(b.z.data(), b.y.data(), 5, 1, 1);
            const exact_row want = exact(t, 0);
            const double got = evaluate(backend, b.student(), b.teacher(), acceptance{}).loss;
            CHECK(got == doctest::Approx(double(want.value)).epsilon(1e-6));
            // token 2 is nearly a tie, whose side rounding may decide; not so a nat lower
            b.y[2] -= 1, b.dz.assign(5, 7);
            const auto apart = exact(textbook::make_row(b.z.data(), b.y.data(), 5, 1, 1), 0);
            evaluate(backend, b.student(), b.teacher(), acceptance{});
            for (std::size_t v = 0; v < 5; ++v)
                CHECK(double(b.dz[v]) == doctest::Approx(double(apart.dz[v])).epsilon(1e-4));
        }
        // most of the overlap is of tokens that float takes for 0, one of it is not
        one_row<float> faint{.z = {0, -200, -86}, .y = {-200, 0, -80}};
        for (int v = 0; v < 40; ++v) faint.z.push_back(-89), faint.y.push_back(-80);
        faint.dz.assign(faint.z.size(), 7);
        const exact_row whole =
            exact(textbook::make_row(faint.z.data(), faint.y.data(), index_t(faint.z.size()), 1, 1), 0);
        CHECK(evaluate(backend, faint.student(), faint.teacher(), acceptance{}).loss ==
              doctest::Approx(double(whole.value)).epsilon(1e-6));
        for (std::size_t v = 0; v < faint.z.size(); ++v)
            CHECK(double(faint.dz[v]) == doctest::Approx(double(whole.dz[v])).epsilon(1e-4));
        // the teacher denies the student's first choice by far; the rest of the row is shared all the same
        one_row<float> b{.z = {1, 0.5F, 0, -1}, .y = {-400, 0, 0.5F, 0.7F}};
        const exact_row want = exact(textbook::make_row(b.z.data(), b.y.data(), 4, 1, 1), 0);
        CHECK(evaluate(backend, b.student(), b.teacher(), acceptance{}).loss ==
              doctest::Approx(double(want.value)).epsilon(1e-6));
        for (std::size_t v = 0; v < 4; ++v) CHECK(double(b.dz[v]) == doctest::Approx(double(want.dz[v])).epsilon(1e-5));
        CHECK(std::abs(double(want.dz[0])) > 0.1);
    });
}

TEST_CASE("no token on both sides: infinite, by the policy, without a gradient; other rows keep theirs") {
    on_both([&](auto& backend, const char* engine) {
        INFO(engine);
        const std::vector<float> z = {1, 2, none, none, 0, 1, 2, 3}, y = {none, none, 0, 1, 1, 1, none, 0};
        const auto call = [&](infinite policy, std::vector<float>& dz, std::vector<float>& losses) {
            env e{.reduction = reduce::sum};
            e.on_infinite = policy, e.losses = losses;
            return evaluate(backend, student::logits{view(z.data(), 2, 4), view(dz.data(), 2, 4)},
                            teacher::dense{view(y.data(), 2, 4)}, acceptance{}, e);
        };
        std::vector<float> dz(8, 7), skipped(8, 7), losses(2);
        const result floored = call(infinite::floor(-12), dz, losses);
        CHECK(losses[0] == 12);
        CHECK(losses[1] > 0);
        CHECK(floored.diagnostics.infinite_rows == 1);
        CHECK(floored.diagnostics.first_infinite_row == 0);
        for (int v = 0; v < 4; ++v) CHECK(dz[std::size_t(v)] == 0);
        CHECK(std::abs(dz[4]) > 0);
        // in buckets
        {
            const std::int32_t ids[] = {0, 1, 2};
            const float log_q[] = {none, none, -0.7F}, tail[] = {-0.7F};
            const std::vector<float> zs = {1, 2, none, none};
            for (const infinite policy : {infinite::floor(-12), infinite::skip()}) {
                env e{.reduction = reduce::sum};
                e.on_infinite = policy;
                std::vector<float> to(4, 7);
                const result r =
                    evaluate(backend, student::logits{view(zs.data(), 1, 4), view(to.data(), 1, 4)},
                             teacher::support{view(ids, 1, 3), view(log_q, 1, 3), vector_view<const float>(tail, 1)},
                             tail_bucket{acceptance{}}, e);
                CHECK(r.diagnostics.infinite_rows == 1);
                CHECK(double(r.loss) == doctest::Approx(policy.act == infinite::action::floor ? 12 : 0));
                CHECK(to == std::vector<float>(4, 0));
            }
        }
        // as a part of a sum: only if it counts
        for (const double weight : {0., 1.}) {
            const result sum = evaluate(backend, student::logits{view(z.data(), 2, 4), view(skipped.data(), 2, 4)},
                                        teacher::dense{view(y.data(), 2, 4)},
                                        weighted_sum{jsd{}, acceptance{}, 1, weight}, {.reduction = reduce::sum});
            CHECK(sum.diagnostics.infinite_rows == (weight > 0));
            CHECK(sum.loss > 0.5);
        }
        const result without = call(infinite::skip(), skipped, losses);
        CHECK(losses[0] == 0);
        CHECK(without.diagnostics.infinite_rows == 1);
        CHECK(skipped == dz);
        if constexpr (std::is_same_v<std::remove_reference_t<decltype(backend)>, cpu_backend>) {
            const auto before = dz;
            CHECK_THROWS_WITH_AS(call(infinite::raise(), dz, losses), doctest::Contains("row 0"), infinite_value);
            CHECK(dz == before);
            // on a support and in buckets: where the tail is shared, nothing is infinite
            const std::int32_t ids[] = {0, 2};
            const float log_q[] = {none, 0}, apart[] = {none}, rest[] = {-1};
            const auto supported = [&](auto estimator, vector_view<const float> tail) {
                env e{.reduction = reduce::sum};
                e.on_infinite = infinite::raise();
                return evaluate(backend, student::logits{view(z.data(), 1, 4), view(dz.data(), 1, 4)},
                                teacher::support{view(ids, 1, 2), view(log_q, 1, 2), tail}, estimator, e)
                    .loss;
            };
            CHECK_THROWS_AS(supported(renormalised{acceptance{}}, {}), infinite_value);
            CHECK_THROWS_AS(supported(tail_bucket{acceptance{}}, apart), infinite_value);
            CHECK(supported(tail_bucket{acceptance{}}, rest) > 0);
            // a tail that is not given is never 0: shared where the student has mass outside
            CHECK(supported(tail_bucket{acceptance{}}, {}) > 0);
            const std::int32_t all_of_students[] = {0, 1, 2};
            const float log_q_of_them[] = {none, none, -0.7F};
            env raising{.reduction = reduce::sum};
            raising.on_infinite = infinite::raise();
            CHECK_THROWS_AS(evaluate(backend, student::logits{view(z.data(), 1, 4), view(dz.data(), 1, 4)},
                                     teacher::support{view(all_of_students, 1, 3), view(log_q_of_them, 1, 3)},
                                     tail_bucket{acceptance{}}, raising),
                            infinite_value);
            // what lies beyond the common ids is shared, or not
            const auto beyond = [&](float student, float teacher) {
                const std::vector<float> zs = {1, none, student}, ys = {none, 1, teacher};
                return evaluate(backend, student::logits{view(zs.data(), 1, 3), view(dz.data(), 1, 3)},
                                teacher::lumped{teacher::dense{view(ys.data(), 1, 3)}, 2}, acceptance{}, raising)
                    .loss;
            };
            CHECK(beyond(0, 0) > 0);
            CHECK_THROWS_AS(beyond(0, none), infinite_value);
            CHECK_THROWS_AS(beyond(none, 0), infinite_value);
        }
    });
}

TEST_CASE("mixed with a KL: the sum of both, value and gradient; a selector may choose the weights") {
    on_both([&](auto& backend, const char* engine) {
        property(std::string(engine).append(": a KL(q||p) + b (-log overlap)"), [&] {
            const problem p =
                *problems({.largest_vocab = 1100,
                           .smallest_rows = 1,
                           .kinds = {flavour::wide, flavour::peaked, flavour::teacher_gap, flavour::steep}});
            buffers<float> first(p), second(p), both(p);
            const double a = *rc::gen::inRange(0, 4) / 3.0, w = *rc::gen::inRange(0, 4) / 3.0;
            const env e{.reduction = reduce::sum};
            const double x = evaluate(backend, first.student(), first.teacher(), forward_kl{}, e).loss;
            const double y = evaluate(backend, second.student(), second.teacher(), acceptance{}, e).loss;
            const double sum =
                evaluate(backend, both.student(), both.teacher(), weighted_sum{forward_kl{}, acceptance{}, a, w}, e)
                    .loss;
            RC_ASSERT(std::abs(sum - (a * x + w * y)) <= 4e-6 * (double(p.rows) + std::abs(sum)));
            for (index_t r = 0; r < p.rows; ++r)
                for (index_t v = 0; v < p.vocab; ++v) {
                    const double want = a * double(first.dz_view()(r, v)) + w * double(second.dz_view()(r, v));
                    RC_ASSERT(std::abs(double(both.dz_view()(r, v)) - want) <= 2e-5 / double(p.temperature_p));
                }
        });
        // the weights by row: acceptance beside reverse KL only where the teacher is unsure
        std::vector<float> z = {1, 0, 2, 0, 1, 2}, y = {0, 0, 0.1F, 9, 0, 0}, dz(6), alone(6);
        const auto call = [&](auto divergence, std::vector<float>& to) {
            evaluate(backend, student::logits{view(z.data(), 2, 3), view(to.data(), 2, 3)},
                     teacher::dense{view(y.data(), 2, 3)}, divergence, {.reduction = reduce::sum});
        };
        call(selected<weighted_sum<reverse_kl, acceptance>, selector::eopd>{{}, {0.5, 2}}, dz);
        call(weighted_sum{reverse_kl{}, acceptance{}, 1, 2}, alone);
        for (std::size_t v = 0; v < 3; ++v) CHECK(dz[v] == doctest::Approx(alone[v]));
        call(reverse_kl{}, alone);
        for (std::size_t v = 3; v < 6; ++v) CHECK(dz[v] == doctest::Approx(alone[v]));
    });
}

TEST_CASE("on a support, with a tail bucket, and between vocabularies of different size") {
    on_both([&](auto& backend, const char* engine) {
        property(std::string(engine).append(": as a dense row of the same entries"), [&] {
            numbers u(std::uint64_t(*rc::gen::inRange(1, 1 << 20)));
            const index_t common = 1 + u.below(40), beyond_s = u.below(30), beyond_t = u.below(30);
            const double far = u.below(3) == 0 ? 120 : 2;
            std::vector<double> z, y, dz;
            for (index_t v = 0; v < common + beyond_s; ++v) z.push_back(far * u.normal());
            for (index_t v = 0; v < common + beyond_t; ++v) y.push_back(far * u.normal());
            const auto lse = [](auto begin, auto end) {
                double top = -1e300, sum = 0;
                for (auto i = begin; i != end; ++i) top = std::max(top, *i);
                for (auto i = begin; i != end; ++i) sum += std::exp(*i - top);
                return begin == end ? detail::neg_inf<double>() : top + std::log(sum);
            };
            // both rests as one entry each
            one_row<double> merged{.z = {z.begin(), z.begin() + common}, .y = {y.begin(), y.begin() + common}};
            merged.z.push_back(lse(z.begin() + common, z.end())), merged.y.push_back(lse(y.begin() + common, y.end()));
            merged.dz.assign(merged.z.size(), 7);
            naive_backend plain;
            const double want = evaluate(plain, merged.student(), merged.teacher(), acceptance{}).loss;
            const auto same = [&](double got, const std::vector<double>& gradient, const char* what) {
                if (!(std::abs(got - want) <= 1e-9 * (1 + want)))
                    RC_FAIL(std::string(what) + ": " + std::to_string(got) + ", not " + std::to_string(want));
                for (index_t v = 0; v < common; ++v)
                    if (!(std::abs(gradient[std::size_t(v)] - merged.dz[std::size_t(v)]) <= 1e-9))
                        RC_FAIL(std::string(what) + ": entry " + std::to_string(v) + " has " +
                                std::to_string(gradient[std::size_t(v)]) + ", off by 1e-9 times " +
                                std::to_string(1e9 * (gradient[std::size_t(v)] - merged.dz[std::size_t(v)])) + " of " +
                                std::to_string(merged.dz[std::size_t(v)]));
                double rest = 0;
                for (std::size_t v = std::size_t(common); v < gradient.size(); ++v) rest += gradient[v];
                RC_ASSERT(std::abs(rest - (beyond_s > 0 ? merged.dz.back() : 0)) <= 1e-9);
            };
            const auto row = [&](std::vector<double>& to) {
                to.assign(z.size(), 7);
                return student::logits{view(std::as_const(z).data(), 1, index_t(z.size())),
                                       view(to.data(), 1, index_t(z.size()))};
            };
            const teacher::lumped lumped{teacher::dense{view(std::as_const(y).data(), 1, index_t(y.size()))}, common};
            double got = evaluate(backend, row(dz), lumped, acceptance{}).loss;
            same(got, dz, "lumped");

            std::vector<std::int32_t> ids(static_cast<std::size_t>(common));
            std::iota(ids.begin(), ids.end(), 0);
            const double all = lse(y.begin(), y.end());
            std::vector<double> log_q, log_tail = {merged.y.back() - all};
            for (index_t v = 0; v < common; ++v) log_q.push_back(y[std::size_t(v)] - all);
            const teacher::support<std::int32_t, double> cache{view(ids.data(), 1, common),
                                                               view(std::as_const(log_q).data(), 1, common), log_tail};
            got = evaluate(backend, row(dz), cache, tail_bucket{acceptance{}}).loss;
            same(got, dz, "tail bucket");

            merged.z.pop_back(), merged.y.pop_back(), merged.dz.pop_back();
            const double alone = evaluate(plain, merged.student(), merged.teacher(), acceptance{}).loss;
            got = evaluate(backend, row(dz), cache, renormalised{acceptance{}}).loss;
            RC_ASSERT(std::abs(got - alone) <= 1e-9 * (1 + alone));
            for (index_t v = 0; v < common; ++v)
                RC_ASSERT(std::abs(dz[std::size_t(v)] - merged.dz[std::size_t(v)]) <= 1e-9);
        });
    });
}

TEST_CASE("wild rows: finite, and the same bits whatever the threads") {
    property("logits to 1e30, -inf, one entry", [] {
        numbers u(std::uint64_t(*rc::gen::inRange(1, 1 << 20)));
        const index_t rows = 1 + u.below(5), vocab = 1 + u.below(1200);
        std::vector<float> z, y;
        for (auto* to : {&z, &y})
            for (index_t i = 0; i < rows * vocab; ++i) {
                const double sizes[] = {1, 100, 1e4, 1e30, 1e-40};
                to->push_back(i % vocab != 0 && u.below(9) == 0 ? none : float(sizes[u.below(5)] * u.normal()));
            }
        std::vector<float> dz(z.size()), again(z.size());
        double losses[2];
        for (const int threads : {1, 2}) {
            cpu_backend backend{.threads = threads};
            auto& to = threads == 1 ? dz : again;
            losses[threads - 1] =
                evaluate(backend, student::logits{view(z.data(), rows, vocab), view(to.data(), rows, vocab)},
                         teacher::dense{view(y.data(), rows, vocab)}, acceptance{})
                    .loss;
        }
        RC_ASSERT(detail::is_finite(losses[0]) && losses[0] >= -1e-6);
        RC_ASSERT(losses[0] == losses[1]);
        RC_ASSERT(dz == again);
        for (const float g : dz) RC_ASSERT(std::abs(g) <= 1.0001F);
        host_run_backend device{.threads = 32};
        const double there =
            evaluate(device, student::logits{view(z.data(), rows, vocab), view(again.data(), rows, vocab)},
                     teacher::dense{view(y.data(), rows, vocab)}, acceptance{})
                .loss;
        RC_ASSERT(std::abs(there - losses[0]) <= 1e-5 * (1 + losses[0]));
    });
}

TEST_CASE("weights of a draft's rows") {
    property("accepted_length without smoothing is what of the expected accepted length passes through a row", [] {
        const auto lengths = *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 9));
        std::vector<std::int64_t> offsets = {0};
        for (const int n : lengths) offsets.push_back(offsets.back() + n);
        numbers u(std::uint64_t(*rc::gen::inRange(1, 1 << 20)));
        std::vector<float> losses, weights(std::size_t(offsets.back()), 7);
        for (std::int64_t r = 0; r < offsets.back(); ++r)
            losses.push_back(u.below(6) == 0 ? 500.F : float(u.uniform() * (u.below(2) ? 3 : 0.1)));
        const double s = *rc::gen::inRange(0, 3) / 4.0;
        fill_draft_weights(accepted_length{s}, std::span<const std::int64_t>(offsets), losses, weights);
        for (std::size_t d = 0; d + 1 < offsets.size(); ++d)
            for (auto j = offsets[d]; j < offsets[d + 1]; ++j) { // the sum as it stands
                double want = 0;
                for (auto m = j; m < offsets[d + 1]; ++m) {
                    double product = 1;
                    for (auto i = offsets[d]; i <= m; ++i)
                        product *= (1 - s) * std::exp(-double(losses[std::size_t(i)])) + s;
                    want += product;
                }
                RC_ASSERT(std::abs(double(weights[std::size_t(j)]) - want) <= 1e-6 * want + 1e-30);
            }
        if (s > 0) return;
        const auto accepted = [&](const std::vector<double>& l) {
            double sum = 0;
            for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
                double product = 1;
                for (auto i = offsets[d]; i < offsets[d + 1]; ++i) sum += product *= std::exp(-l[std::size_t(i)]);
            }
            return sum;
        };
        std::vector<double> l(losses.begin(), losses.end());
        for (std::size_t j = 0; j < l.size(); ++j) {
            auto up = l, down = l;
            up[j] += 1e-5, down[j] -= 1e-5;
            RC_ASSERT(std::abs(double(weights[j]) - (accepted(down) - accepted(up)) / 2e-5) <= 1e-5);
        }
    });
    const std::int32_t offsets[] = {0, 3, 3, 5};
    std::vector<float> weights(5, 7), losses(5, 0.5F);
    fill_draft_weights(decaying{2}, std::span<const std::int32_t>(offsets), weights);
    CHECK(weights[0] == 1);
    CHECK(double(weights[2]) == doctest::Approx(std::exp(-1.)));
    CHECK(double(weights[4]) == doctest::Approx(std::exp(-.5)));
    // all smoothed: as many as come after, whatever the losses
    fill_draft_weights(accepted_length{1}, std::span<const std::int32_t>(offsets), losses, weights);
    CHECK(weights == std::vector<float>{3, 2, 1, 2, 1});

    const std::span<const std::int32_t> good(offsets);
    const auto refused = [&](const char* what, auto call) {
        const auto before = weights;
        CHECK_THROWS_WITH_AS(call(), doctest::Contains(what), opd::invalid_input);
        CHECK(weights == before);
    };
    losses[3] = std::numeric_limits<float>::quiet_NaN();
    refused("row 3", [&] { fill_draft_weights(accepted_length{}, good, losses, weights); });
    losses[3] = -0.5F;
    refused("row 3", [&] { fill_draft_weights(accepted_length{}, good, losses, weights); });
    losses[3] = 0;
    refused("smoothing", [&] { fill_draft_weights(accepted_length{1.5}, good, losses, weights); });
    refused("gamma", [&] { fill_draft_weights(decaying{0}, good, weights); });
    refused("memory", [&] { fill_draft_weights(accepted_length{}, good, weights, weights); });
    const std::int32_t falling[] = {0, 3, 2, 5};
    refused("draft 1", [&] { fill_draft_weights(decaying{}, std::span<const std::int32_t>(falling), weights); });
    refused("rows", [&] { fill_draft_weights(decaying{}, good.first(3), weights); });
    refused("losses",
            [&] { fill_draft_weights(accepted_length{}, good, std::span<const float>(losses).first(4), weights); });
}
