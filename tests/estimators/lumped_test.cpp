// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Vocabularies of different size with one bucket for what lies beyond: against the tail bucket over all common ids, in
// double, which is the same sum found another way; with equal sizes every bit of the dense divergence; both engines;
// what is bad and what is refused.
#include "backends/both_engines.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/traits.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// Rows of student and teacher logits over vocabularies of their own.
template <class T>
struct two_vocabularies {
    index_t n, v_s, v_t, v_c;
    float t_s, t_t;
    std::vector<T> z, y, dz;
    std::vector<std::int32_t> mask;
    std::vector<double> lse;
    env e;

    index_t common() const { return v_c; }

    explicit two_vocabularies(numbers& u) : n(1 + u.below(3)) {
        const index_t sizes[] = {1, 2, 7, 300, 1030, 2100};
        v_s = v_t = sizes[u.below(6)];
        const index_t more[] = {0, 1, 5, 900, 2100};
        (u.below(2) ? v_s : v_t) += more[u.below(5)];
        v_c = std::min(v_s, v_t); // else both have ids of their own
        if (u.below(2)) v_c -= u.below(std::min<index_t>(v_c, 9));
        t_s = float(0.6 + u.uniform()), t_t = u.below(2) ? t_s : float(0.6 + u.uniform());
        const double scale = u.below(3) == 0 ? 6 : 1.5, noise = u.below(4) == 0 ? 0.01 : 2;
        const double lifts[] = {0, 0, -60, 30, 1000};
        for (index_t r = 0; r < n; ++r) {
            const double lift = lifts[u.below(5)], hole = u.below(2) ? 0.05 : 0;
            std::vector<double> both;
            for (index_t v = 0; v < std::max(v_s, v_t); ++v)
                both.push_back(scale * u.normal() + (v < common() ? 0 : lift));
            const auto fill = [&](std::vector<T>& to, index_t size) {
                for (index_t v = 0; v < size; ++v) {
                    const bool none = v != 0 && u.uniform() < hole; // the first common id has mass
                    to.push_back(none ? T(detail::neg_inf<float>()) : T(both[std::size_t(v)] + noise * u.normal()));
                }
            };
            fill(z, v_s), fill(y, v_t);
            if (u.below(6) == 0) // nobody beyond
                for (index_t v = common(); v < v_s; ++v) z[std::size_t(r * v_s + v)] = T(detail::neg_inf<float>());
            double top = -1e300, sum = 0;
            for (index_t v = 0; v < v_s; ++v) top = std::max(top, double(z[std::size_t(r * v_s + v)]) / double(t_s));
            for (index_t v = 0; v < v_s; ++v) sum += std::exp(double(z[std::size_t(r * v_s + v)]) / double(t_s) - top);
            lse.push_back(top + std::log(sum));
            mask.push_back(std::int32_t(u.below(5)));
        }
        dz.assign(std::size_t(n * v_s), T(0.25));
        if (u.below(2)) e.mask = row_mask<>(mask);
        e.beta = u.below(2) ? 0.F : 0.5F;
        e.on_infinite = u.below(2) ? infinite::floor(-15) : infinite::skip();
        e.loss_clamp = u.below(4) ? 0 : 0.7;
        e.reduction = reduce::sum;
        if (u.below(4) == 0) e.given_lse = lse;
    }
    student::logits<T> student() {
        return {.z = view(std::as_const(z).data(), n, v_s), .dz = view(dz.data(), n, v_s), .temperature = t_s};
    }
    teacher::dense<T> teacher() const { return {view(y.data(), n, v_t), t_t}; }
};

struct found {
    double loss = 0;
    std::vector<double> dz, losses, lse;
    diagnostics seen;
};
template <class Backend, class T, class Teacher, class E>
found call(Backend& be, two_vocabularies<T> b, const Teacher& cache, const E& estimator) {
    std::vector<float> losses(std::size_t(b.n), 3.F);
    std::vector<double> lse(std::size_t(b.n), 3.0);
    b.e.losses = losses, b.e.lse = lse;
    const result r = evaluate(be, b.student(), cache, estimator, b.e);
    return {r.loss, {b.dz.begin(), b.dz.end()}, {losses.begin(), losses.end()}, lse, r.diagnostics};
}

/// The same in double.
template <class T>
two_vocabularies<double> in_double(const two_vocabularies<T>& b) {
    numbers any(1);
    two_vocabularies<double> out(any);
    out.n = b.n, out.v_s = b.v_s, out.v_t = b.v_t, out.v_c = b.v_c, out.t_s = b.t_s, out.t_t = b.t_t, out.e = b.e;
    out.z.assign(b.z.begin(), b.z.end()), out.y.assign(b.y.begin(), b.y.end()), out.dz.assign(b.dz.begin(), b.dz.end());
    return out;
}
/// D over the common ids and the rest, as a support of all common ids with its tail.
template <class T, class D>
found by_tail_bucket(const two_vocabularies<T>& b, const D& d) {
    const index_t k = b.common();
    std::vector<std::int32_t> ids;
    std::vector<double> log_q, log_tail;
    for (index_t r = 0; r < b.n; ++r) {
        const auto at = [&](index_t v) { return double(b.y[std::size_t(r * b.v_t + v)]) / double(b.t_t); };
        double top = -1e300, sum = 0, top_rest = -1e300, rest = 0;
        for (index_t v = 0; v < b.v_t; ++v) top = std::max(top, at(v));
        for (index_t v = 0; v < b.v_t; ++v) sum += std::exp(at(v) - top);
        for (index_t v = k; v < b.v_t; ++v) top_rest = std::max(top_rest, at(v));
        for (index_t v = k; v < b.v_t; ++v) rest += top_rest > -1e300 ? std::exp(at(v) - top_rest) : 0;
        for (index_t v = 0; v < k; ++v)
            ids.push_back(std::int32_t(v)), log_q.push_back(std::min(0.0, at(v) - top - std::log(sum)));
        log_tail.push_back(rest > 0 ? std::min(0.0, top_rest + std::log(rest) - top - std::log(sum))
                                    : detail::neg_inf<double>());
    }
    cpu_backend be;
    return call(be, in_double(b),
                teacher::support<std::int32_t, double>{view(std::as_const(ids).data(), b.n, k),
                                                       view(std::as_const(log_q).data(), b.n, k), log_tail},
                tail_bucket{d});
}

template <class T, class D>
void as_tail_bucket(const two_vocabularies<T>& b, const char* name, const D& d, double bound) {
    const found want = by_tail_bucket(b, d);
    on_both([&](auto& be, const char* engine) {
        const found got = call(be, b, teacher::lumped{b.teacher(), b.common()}, d);
        const auto context = std::string(engine) + ", " + name + ", V " + std::to_string(b.v_s) + " and " +
                             std::to_string(b.v_t) + ", seen " + to_string(got.seen);
        RC_LOG(context);
        RC_ASSERT(got.seen.bad_rows == 0);
        RC_ASSERT(got.seen.infinite_rows == want.seen.infinite_rows);
        RC_ASSERT(got.seen.clamped_rows == want.seen.clamped_rows);
        double largest = 1, size = 1;
        for (std::size_t i = 0; i < want.dz.size(); ++i) largest = std::max(largest, std::abs(want.dz[i]));
        for (const double l : want.losses) size = std::max(size, std::abs(l));
        for (std::size_t i = 0; i < want.dz.size(); ++i) {
            if (std::abs(got.dz[i] - want.dz[i]) > bound * largest)
                RC_FAIL(context + ": dz[" + std::to_string(i) + "] " + std::to_string(got.dz[i]) + " for " +
                        std::to_string(want.dz[i]));
        }
        for (std::size_t r = 0; r < want.losses.size(); ++r) {
            if (std::abs(got.losses[r] - want.losses[r]) > (bound + 1e-6) * size)
                RC_FAIL(context + ": loss " + std::to_string(got.losses[r]) + " for " + std::to_string(want.losses[r]));
            RC_ASSERT(std::abs(got.lse[r] - want.lse[r]) <= bound * (1 + std::abs(want.lse[r])));
        }
        RC_ASSERT(std::abs(got.loss - want.loss) <= bound * size * double(b.n));
    });
}

} // namespace

TEST_CASE("the tail bucket over all common ids") {
    property("in double", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const two_vocabularies<double> b(u);
        as_tail_bucket(b, "reverse_kl", reverse_kl{}, 1e-9);
        as_tail_bucket(b, "forward_kl", forward_kl{}, 1e-9);
        as_tail_bucket(b, "jsd", jsd{.w = .3, .o = .3}, 1e-9);
        as_tail_bucket(b, "total_variation", total_variation{}, 1e-9);
        as_tail_bucket(b, "alpha", alpha_divergence{.a = .4}, 1e-9);
        as_tail_bucket(b, "skew_forward_kl", skew_forward_kl{}, 1e-9);
    });
    property("in float", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const two_vocabularies<float> b(u);
        as_tail_bucket(b, "reverse_kl", reverse_kl{}, 1e-6);
        as_tail_bucket(b, "forward_kl", forward_kl{}, 1e-6);
        as_tail_bucket(b, "jsd", jsd{}, 1e-6);
        as_tail_bucket(b, "alpha", alpha_divergence{.a = .4}, 1e-6);
    });
}

TEST_CASE("equal vocabularies: every bit of the dense divergence") {
    property("same", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        two_vocabularies<float> b(u);
        b.v_s = b.v_t = b.v_c;
        b.z.resize(std::size_t(b.n * b.v_s)), b.y.resize(std::size_t(b.n * b.v_s)),
            b.dz.resize(std::size_t(b.n * b.v_s));
        b.e.given_lse = {}, b.e.measure.entropy = u.below(2) == 0;
        const auto same = [&](const auto& d) {
            on_both([&](auto& be, const char*) {
                const found got = call(be, b, teacher::lumped{b.teacher(), b.common()}, d),
                            want = call(be, b, b.teacher(), d);
                RC_ASSERT(got.loss == want.loss);
                RC_ASSERT(got.dz == want.dz);
                RC_ASSERT(got.losses == want.losses);
                RC_ASSERT(got.lse == want.lse);
                RC_ASSERT(got.seen.student_entropy_sum == want.seen.student_entropy_sum);
                RC_ASSERT(got.seen.overlap_sum == want.seen.overlap_sum);
            });
        };
        same(reverse_kl{}), same(forward_kl{}), same(jsd{});
    });
}

TEST_CASE("entropies and overlap are of the common ids and the bucket") {
    property("sums", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        two_vocabularies<double> b(u);
        b.e = {}, b.e.measure.entropy = true;
        double h_p = 0, h_q = 0, both = 0;
        for (index_t r = 0; r < b.n; ++r) {
            const auto law = [&](const std::vector<double>& from, index_t v, float t) {
                std::vector<double> p, out(std::size_t(b.common() + 1));
                double top = -1e300, sum = 0;
                for (index_t i = 0; i < v; ++i) p.push_back(from[std::size_t(r * v + i)] / double(t));
                for (const double x : p) top = std::max(top, x);
                for (double& x : p) sum += x = std::exp(x - top);
                for (index_t i = 0; i < v; ++i) out[std::size_t(std::min(i, b.common()))] += p[std::size_t(i)] / sum;
                return out;
            };
            const auto p = law(b.z, b.v_s, b.t_s), q = law(b.y, b.v_t, b.t_t);
            for (std::size_t i = 0; i < p.size(); ++i) {
                h_p -= p[i] > 0 ? p[i] * std::log(p[i]) : 0, h_q -= q[i] > 0 ? q[i] * std::log(q[i]) : 0;
                both += std::min(p[i], q[i]);
            }
        }
        on_both([&](auto& be, const char*) {
            const diagnostics d = call(be, b, teacher::lumped{b.teacher(), b.common()}, reverse_kl{}).seen;
            RC_ASSERT(std::abs(d.student_entropy_sum - h_p) <= 1e-9 * (1 + h_p));
            RC_ASSERT(std::abs(d.teacher_entropy_sum - h_q) <= 1e-9 * (1 + h_q));
            RC_ASSERT(std::abs(d.overlap_sum - both) <= 1e-9);
        });
    });
}

TEST_CASE("in place, over padding, in 16 bits") {
    numbers u(11);
    for (int i = 0; i < 30; ++i) {
        two_vocabularies<float> b(u);
        on_both([&](auto& be, const char* engine) {
            INFO(engine << " V " << b.v_s << " and " << b.v_t);
            const index_t stride = b.v_s + 3;
            std::vector<float> z(std::size_t(b.n * stride), 5.F), apart(b.dz.size(), 9.F);
            for (index_t r = 0; r < b.n; ++r) std::copy_n(b.z.begin() + r * b.v_s, b.v_s, z.begin() + r * stride);
            env e = b.e;
            e.beta = 0;
            const auto run = [&](matrix_view<const float> from, matrix_view<float> to) {
                return evaluate(be, student::logits<float>{.z = from, .dz = to, .temperature = b.t_s},
                                teacher::lumped{b.teacher(), b.common()}, jsd{}, e);
            };
            const double want = run(view(std::as_const(b.z).data(), b.n, b.v_s), view(apart.data(), b.n, b.v_s)).loss;
            CHECK(
                run(padded_view(std::as_const(z).data(), b.n, b.v_s, stride), padded_view(z.data(), b.n, b.v_s, stride))
                    .loss == doctest::Approx(want).epsilon(1e-6)); // leaves lie otherwise
            for (index_t r = 0; r < b.n; ++r) {
                for (index_t v = 0; v < b.v_s; ++v)
                    CHECK(std::abs(z[std::size_t(r * stride + v)] - apart[std::size_t(r * b.v_s + v)]) <= 1e-6F);
                for (index_t v = b.v_s; v < stride; ++v) CHECK(z[std::size_t(r * stride + v)] == 0);
            }
            // bf16 logits, gradient in float: the bucket is not rounded to bf16
            std::vector<bfloat16> short_z, short_y;
            two_vocabularies<float> rounded = b;
            for (float& x : rounded.z)
                short_z.push_back(element<bfloat16>::store(x)), x = element<bfloat16>::load(short_z.back());
            for (float& x : rounded.y)
                short_y.push_back(element<bfloat16>::store(x)), x = element<bfloat16>::load(short_y.back());
            const found in_float = call(be, rounded, teacher::lumped{rounded.teacher(), b.common()}, reverse_kl{});
            rounded.dz.assign(rounded.dz.size(), 0.25F);
            const result r = evaluate(
                be,
                student::logits<bfloat16, float>{.z = view(std::as_const(short_z).data(), b.n, b.v_s),
                                                 .dz = view(rounded.dz.data(), b.n, b.v_s),
                                                 .temperature = b.t_s},
                teacher::lumped{teacher::dense<bfloat16>{view(std::as_const(short_y).data(), b.n, b.v_t), b.t_t},
                                b.common()},
                reverse_kl{}, b.e);
            CHECK(r.loss == doctest::Approx(in_float.loss).epsilon(1e-6));
            for (std::size_t v = 0; v < rounded.dz.size(); ++v)
                CHECK(std::abs(double(rounded.dz[v]) - in_float.dz[v]) <= 2e-6 * (1 + std::abs(in_float.dz[v])));
        });
    }
}

TEST_CASE("bad rows, infinite rows, what is refused") {
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> z{0, 1, 2, 3}, y{1, 0}, dz(4, 7.F); // the student is longer
    const auto run = [&](auto& be, const auto& d, const env& e = {}) {
        return evaluate(be, student::logits<float>{view(std::as_const(z).data(), 1, 4), view(dz.data(), 1, 4)},
                        teacher::lumped{teacher::dense{view(std::as_const(y).data(), 1, 2)}}, d, e);
    };
    const auto back = [&](auto& be, const auto& d, const env& e = {}) { // the teacher is
        return evaluate(be, student::logits<float>{view(std::as_const(y).data(), 1, 2), view(dz.data(), 1, 2)},
                        teacher::lumped{teacher::dense{view(std::as_const(z).data(), 1, 4)}}, d, e);
    };
    on_both([&](auto& be, const char*) {
        CHECK(run(be, reverse_kl{}).diagnostics.infinite_rows == 1);
        CHECK(run(be, forward_kl{}).diagnostics.infinite_rows == 0);
        CHECK(back(be, reverse_kl{}).diagnostics.infinite_rows == 0);
        CHECK(back(be, forward_kl{}).diagnostics.infinite_rows == 1);
        CHECK(run(be, reverse_kl{}, {.on_infinite = infinite::skip()}).loss == 0);
        CHECK(dz == std::vector<float>(4, 0.F));
        for (const float wrong : {nan, inf}) {
            z[3] = wrong;
            CHECK(run(be, jsd{}).diagnostics.bad_rows == 1);
            CHECK(back(be, jsd{}).diagnostics.bad_rows == 1);
            CHECK(dz == std::vector<float>(4, 0.F));
        }
        z = {-inf, -inf, 2, 3}; // no mass on the common ids
        CHECK(run(be, jsd{}).diagnostics.bad_rows == 1);
        CHECK(back(be, jsd{}).diagnostics.bad_rows == 1);
        z = {0, 1, -inf, -inf}; // nobody beyond: the plain divergence over the common ids
        const result r = run(be, reverse_kl{});
        CHECK(r.diagnostics.infinite_rows == 0);
        CHECK(r.loss == doctest::Approx(std::tanh(0.5)));
        CHECK(dz[2] == 0);
        CHECK(dz[3] == 0);
        z = {0, 1, 2, 3};
    });
    cpu_backend be;
    const env contents{.checks = check::contents}, raise{.on_infinite = infinite::raise()};
    std::fill(dz.begin(), dz.end(), 7.F);
    CHECK_THROWS_AS(run(be, reverse_kl{}, raise), infinite_value);
    CHECK_THROWS_AS(back(be, forward_kl{}, raise), infinite_value);
    z[3] = nan;
    CHECK_THROWS_WITH_AS(run(be, jsd{}, contents), doctest::Contains("student.z, row 0: NaN at column 3"),
                         invalid_input);
    CHECK_THROWS_WITH_AS(back(be, jsd{}, contents), doctest::Contains("teacher.y, row 0: NaN at column 3"),
                         invalid_input);
    z = {-inf, -inf, 2, 3};
    CHECK_THROWS_WITH_AS(run(be, jsd{}, contents), doctest::Contains("student.z"), invalid_input);
    z = {0, 1, 2, 3};
    CHECK_THROWS_WITH_AS(run(be, jsd{}, {.vocab = vocabulary::drop_and_renormalise}), doctest::Contains("env.vocab"),
                         invalid_input);
    CHECK_THROWS_WITH_AS(evaluate(be, student::logits<float>{view(std::as_const(z).data(), 1, 4)},
                                  teacher::dense{view(std::as_const(y).data(), 1, 2)}, jsd{}),
                         doctest::Contains("teacher::lumped"), invalid_input);
    for (const index_t common : {-1, 3})
        CHECK_THROWS_WITH_AS(
            evaluate(be, student::logits<float>{view(std::as_const(z).data(), 1, 4), view(dz.data(), 1, 4)},
                     teacher::lumped{teacher::dense{view(std::as_const(y).data(), 1, 2)}, common}, jsd{}),
            doctest::Contains("teacher.common"), invalid_input);
    CHECK(dz == std::vector<float>(4, 7.F));
    run(be, jsd{}, raise), back(be, reverse_kl{}, raise), run(be, forward_kl{}, raise), run(be, jsd{}, contents);
}
