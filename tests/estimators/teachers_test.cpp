// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: no
//
// Teachers of several kinds and of other tokenizers, against their definitions in float64 and long double: the mixture,
// two teachers held against each other, ULD by sorting, a sparse projection and its pullback by central differences,
// chunks by brute force and the gradient that their log-ratios give by enumeration.
#include "support/compiled/hidden_sides.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/refusal.hpp"
#include "support/textbook.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/chunks.hpp>
#include <opd/hidden.hpp>
#include <opd/mixture.hpp>
#include <opd/opd.hpp>
#include <opd/uld.hpp>
#include <opd/vocab_projection.hpp>

using namespace opd;
using opd::test::refusal;
using opd::test::says;
using namespace opd::test;

namespace {

using doubles = std::vector<double>;
using textbook::real;
using textbook::reals;

doubles log_softmax(const float* y, index_t n, double temperature) {
    reals x;
    for (index_t v = 0; v < n; ++v) x.push_back(real(y[v]) / real(temperature));
    const reals l = textbook::log_softmax(x);
    return {l.begin(), l.end()};
}
floats logits(numbers& u, index_t n, double scale, double hole = 0) {
    floats x;
    for (index_t i = 0; i < n; ++i)
        x.push_back(u.uniform() < hole ? detail::neg_inf<float>() : float(scale * u.normal()));
    return x;
}
/// dvalue/dx by four-point central differences.
doubles gradient_of(const std::function<real(const reals&)>& f, reals x, real h = 1e-3L) {
    doubles g;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const real at = x[i];
        const auto f_at = [&](real d) {
            x[i] = at + d;
            const real y = f(x);
            x[i] = at;
            return y;
        };
        g.push_back(double((f_at(-2 * h) - 8 * f_at(-h) + 8 * f_at(h) - f_at(2 * h)) / (12 * h)));
    }
    return g;
}
double largest(const auto& x) {
    double most = 0;
    for (const auto y : x) most = std::max(most, std::abs(double(y)));
    return most;
}
double farthest(const auto& a, const auto& b) {
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double(a[i]) - double(b[i])));
    return most;
}

} // namespace

TEST_CASE("the divergence of a mixture is that of log Σ w q") {
    property(
        "against float64, the same bits by any threads and budget",
        [] {
            numbers u(*rc::gen::arbitrary<std::uint64_t>());
            const index_t sizes[] = {1, 2, 37, 1024, 2100};
            const index_t n = 1 + u.below(4), v = sizes[u.below(5)], at = n * v;
            const double scale = u.below(3) == 0 ? 8 : 2, hole = u.below(2) ? 0.1 : 0,
                         near = u.below(3) == 0 ? 1e-2 : 1;
            const floats z = logits(u, at, scale);
            floats y[3], dz(z.size()), again(z.size());
            for (floats& of : y) {
                of = logits(u, at, scale * near, hole);
                for (std::size_t i = 0; near < 1 && i < of.size(); ++i) of[i] += z[i];
                for (index_t r = 0; r < n; ++r) of[std::size_t(r * v)] = z[std::size_t(r * v)];
                if (u.below(4) == 0)
                    for (float& x : of) x += 60;
            }
            const double w[3] = {0.2 + u.uniform(), 0.01 + u.uniform(), 3 * u.uniform() + 1e-3};
            const float t[3] = {1, float(0.5 + u.uniform()), 1};
            const auto part = [&](int i) { return share{teacher::dense<float>{view(y[i].data(), n, v), t[i]}, w[i]}; };
            const int parts = 1 + int(u.below(3));
            doubles m;
            for (index_t r = 0; r < n; ++r) {
                reals sum(std::size_t(v), 0);
                for (int i = 0; i < parts; ++i) {
                    const doubles l = log_softmax(&y[i][std::size_t(r * v)], v, double(t[i]));
                    for (std::size_t j = 0; j < l.size(); ++j) sum[j] += real(w[i]) * std::exp(real(l[j]));
                }
                for (const real s : sum) m.push_back(s > 0 ? double(std::log(s)) : detail::neg_inf<double>());
            }
            const env e{.reduction = reduce::sum, .on_infinite = infinite::floor(-20)};
            const auto call = [&](floats& to, int threads, std::size_t budget, auto mixed) {
                cpu_backend be{.threads = threads};
                mixed.budget = budget;
                return evaluate(be, student::logits{view(z.data(), n, v), view(to.data(), n, v)}, mixed, jsd{}, e);
            };
            const auto both = [&](const auto& mixed) {
                const result r = call(dz, 1, std::size_t{1} << 24, mixed);
                RC_ASSERT(call(again, 2, std::size_t(v) * 4 + 4096, mixed).loss == r.loss);
                RC_ASSERT(equal_bits(dz, again));
                return r;
            };
            const result got = parts == 1   ? both(teacher::mixture{part(0)})
                               : parts == 2 ? both(teacher::mixture{part(0), part(1)})
                                            : both(teacher::mixture{part(0), part(1), part(2)});
            naive_backend exact;
            const doubles z64(z.begin(), z.end());
            doubles expected(z.size());
            const result truth = evaluate(exact, student::logits{view(z64.data(), n, v), view(expected.data(), n, v)},
                                          teacher::dense{view(std::as_const(m).data(), n, v)}, jsd{}, e);
            RC_ASSERT(std::abs(got.loss - truth.loss) <= 4e-6 * std::max(1.0, truth.loss));
            RC_ASSERT(farthest(dz, expected) <= 4e-6 * largest(expected) + 1e-7);
        },
        {.cases = 60});
}

TEST_CASE("what a mixture hardly gives keeps its logarithm, whenever its parts' best logit comes") {
    numbers u(41);
    for (const index_t v : {40, 1024, 2500}) {
        const floats z = logits(u, v, 2);
        floats y[2];
        for (floats& of : y) {
            of = logits(u, v, 2);
            for (float& x : of)
                if (u.below(3) == 0) x -= float(150 * u.uniform());
            of[std::size_t(u.below(v))] += 20;
        }
        y[0].back() += 60; // all before it is little, in exponentials of another anchor
        doubles m;
        const doubles a = log_softmax(y[0].data(), v, 1), b = log_softmax(y[1].data(), v, 1);
        for (std::size_t i = 0; i < a.size(); ++i)
            m.push_back(double(std::log(0.25L * std::exp(real(a[i])) + 0.75L * std::exp(real(b[i])))));
        const auto seen = [&](const floats& x) { return teacher::dense{view(x.data(), 1, v)}; };
        cpu_backend be{.threads = 1};
        naive_backend exact;
        const doubles z64(z.begin(), z.end());
        const double got = evaluate(be, student::logits{view(z.data(), 1, v)},
                                    teacher::mixture{share{seen(y[0]), 1}, share{seen(y[1]), 3}}, reverse_kl{})
                               .loss;
        const double truth = evaluate(exact, student::logits{view(z64.data(), 1, v)},
                                      teacher::dense{view(std::as_const(m).data(), 1, v)}, reverse_kl{})
                                 .loss;
        CHECK(std::abs(got - truth) <= 1e-6 * std::max(1.0, truth));
    }
}

TEST_CASE("a mixture of hidden heads of two widths and logits has the bits of their logits") {
    const index_t n = 7, v = 1100;
    const side s(n, v, 8, 1, true), a(3, v, 5, 2, true, 2.0f), b(n, v, 13, 3);
    const floats third = normals(std::size_t(n * v), 9), ya = a.logits(), yb = b.logits();
    const std::vector<std::int32_t> map{0, 2, 1, 1, 0, 2, 2};
    floats spread;
    for (const auto r : map) spread.insert(spread.end(), ya.begin() + r * v, ya.begin() + (r + 1) * v);
    const teacher::dense plain{view(third.data(), n, v)};
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[4] = 0;
    cpu_backend be{.threads = 2};
    gradients g(s, 1), same(s, 1);
    teacher::mixture hidden{share{teacher::at_rows{teacher_of(a), row_offsets<>(map)}, 0.5}, share{teacher_of(b), 0.25},
                            share{plain, 0.25}};
    const teacher::mixture known{share{teacher::dense{view(std::as_const(spread).data(), n, v)}, 0.5},
                                 share{teacher::dense{view(yb.data(), n, v)}, 0.25}, share{plain, 0.25}};
    const result x = evaluate(be, student_of(s, g), hidden, reverse_kl{}, {.mask = mask});
    const result y = evaluate(be, student_of(s, same), known, reverse_kl{}, {.mask = mask});
    CHECK(x.loss == y.loss);
    CHECK(g == same);
    hidden.budget = 3 * v * 4 + 8000; // a row or two
    gradients few(s, 1);
    CHECK(evaluate(be, student_of(s, few), hidden, reverse_kl{}, {.mask = mask}).loss == x.loss);
    CHECK(few == same);
    // scores of the mixture, and Jensen
    floats log_q(7);
    const std::vector<std::int32_t> ids{5, 0, 1099, 7, 8, 900, 3};
    token_logp(be, known, view(ids.data(), n, 1), view(log_q.data(), n, 1));
    const doubles first = log_softmax(&spread[0], v, 1), second = log_softmax(&yb[0], v, 1),
                  last = log_softmax(&third[0], v, 1);
    CHECK(double(log_q[0]) ==
          doctest::Approx(std::log(0.5 * std::exp(first[5]) + 0.25 * std::exp(second[5]) + 0.25 * std::exp(last[5])))
              .epsilon(1e-5));
    double mean = 0;
    for (const auto& [row, w] :
         std::vector<std::pair<const floats*, double>>{{&spread, 0.5}, {&yb, 0.25}, {&third, 0.25}})
        mean +=
            w * evaluate(be, student_of(s, few), teacher::dense{view(row->data(), n, v)}, reverse_kl{}, {.mask = mask})
                    .loss;
    CHECK(y.loss < mean);
}

TEST_CASE("bad and unread rows of a mixture, and what is refused") {
    const index_t n = 4, v = 20;
    numbers u(5);
    const floats z = logits(u, n * v, 1);
    floats a = logits(u, n * v, 1), b = a, dz(z.size(), 3);
    a[std::size_t(1 * v + 19)] = NAN, b[std::size_t(2 * v)] = INFINITY;
    for (index_t i = 0; i < v; ++i) b[std::size_t(3 * v + i)] = detail::neg_inf<float>();
    cpu_backend be;
    const student::logits s{view(z.data(), n, v), view(dz.data(), n, v)};
    const teacher::mixture m{share{teacher::dense{view(std::as_const(a).data(), n, v)}},
                             share{teacher::dense{view(std::as_const(b).data(), n, v)}}};
    CHECK(evaluate(be, s, m, reverse_kl{}).diagnostics.bad_rows == 3);
    CHECK(dz[0] != 0);
    CHECK(std::all_of(dz.begin() + v, dz.end(), [](float x) { return x == 0; }));
    const std::vector<int> mask{1, 0, 0, 0};
    CHECK(evaluate(be, s, m, reverse_kl{}, {.mask = mask}).diagnostics.bad_rows == 0);
    std::fill(dz.begin(), dz.end(), 3.0f);
    const teacher::dense ok{view(std::as_const(a).data(), n, v)};
    const auto refused = [&](auto of) { return refusal([&] { evaluate(be, s, of, reverse_kl{}); }); };
    CHECK(says(refused(teacher::mixture{share{ok, 0.0}}), "weights must be above 0"));
    CHECK(says(refused(teacher::mixture{share{ok}, share{teacher::dense{view(std::as_const(a).data(), n, v - 1, v)}}}),
               "parts have 20 and 19 ids"));
    CHECK(says(refused(teacher::mixture{share{ok}, share{teacher::dense{view(std::as_const(a).data(), n - 1, v)}}}),
               "teacher.y"));
    const std::vector<std::int32_t> map{0, 1, 2, 4};
    CHECK(says(refused(teacher::mixture{share{teacher::at_rows{ok, row_offsets<>(map)}}}), "teacher.map"));
    teacher::mixture small = m;
    small.budget = 10;
    CHECK(says(refused(small), "teacher.budget"));
    CHECK(dz[0] == 3);
}

namespace {
/// f(number) for each number of a storage type that counts as -inf, as floats; f(-inf) first.
template <class T, class F>
void each_mask(F f) {
    std::vector<T> masks{T(-std::numeric_limits<float>::infinity()), element<T>::store(-detail::largest_stored<T>)};
    if constexpr (std::is_same_v<T, double>) masks.push_back(-1e30);
    for (const T mask : masks) f(mask);
}
/// run(mask) is the same for all masks of T, and another for what is none.
template <class T, class Run>
void masks_are_one(const char* name, Run run) {
    CAPTURE(std::string(name));
    std::vector<doubles> got;
    each_mask<T>([&](T mask) { got.push_back(run(mask)); });
    for (const doubles& x : got) CHECK(x == got[0]);
    CHECK(run(T(-60000.F)) != got[0]);
}
template <class T>
void masked_teachers(const char* name) {
    const index_t v = 5;
    const std::vector<T> z{T(1.F), T(0.F), T(2.F), T(0.5F), T(-1.F)};
    const auto call = [&](const auto& teacher, const auto& estimator) {
        cpu_backend be{.threads = 1};
        floats dz(std::size_t(v), 3.F);
        const result r =
            evaluate(be, student::logits<T, float>{view(z.data(), 1, v), view(dz.data(), 1, v)}, teacher, estimator);
        doubles all(dz.begin(), dz.end());
        all.push_back(r.loss), all.push_back(double(r.diagnostics.infinite_rows));
        return all;
    };
    masks_are_one<T>(name, [&](T mask) {
        const std::vector<T> a{T(0.F), T(1.F), mask, T(0.2F), mask}, b{T(1.F), T(0.F), mask, mask, T(0.5F)};
        const auto seen = [&](const std::vector<T>& y) { return share{teacher::dense<T>{view(y.data(), 1, v)}, 0.5}; };
        return call(teacher::mixture{seen(a), seen(b)}, reverse_kl{});
    });
    masks_are_one<T>(name, [&](T mask) { // at a temperature at which -65504 would have mass
        const std::vector<T> y{T(0.F), T(1.F), mask, T(0.2F), mask};
        const teacher::dense<T> t{view(y.data(), 1, v), 1e5F};
        return call(teacher::by_rank(student::logits<T, float>{view(z.data(), 1, v)}, t), uld{});
    });
}
} // namespace

TEST_CASE("the least number of a type is a mask to a mixture and to ULD") {
    masked_teachers<half>("half");
    masked_teachers<bfloat16>("bfloat16");
    masked_teachers<float>("float");
    masked_teachers<double>("double");
}

TEST_CASE("contrast descends the difference of two divergences, by enumeration") {
    const index_t v = 6;
    numbers u(8);
    for (const auto& [plus, minus] : {std::pair{1.0, 1.0}, {1.0, 0.4}, {2.0, 0.0}}) {
        doubles z, y[2], mu, log_p[3], log_mu;
        for (index_t i = 0; i < v; ++i)
            z.push_back(u.normal()), y[0].push_back(u.normal()), y[1].push_back(u.normal()), mu.push_back(u.normal());
        const auto logs = [](const doubles& x) {
            const reals l = textbook::log_softmax(reals(x.begin(), x.end()));
            return doubles(l.begin(), l.end());
        };
        log_mu = logs(mu);
        const doubles q[2] = {logs(y[0]), logs(y[1])};
        std::vector<std::int32_t> ids;
        doubles weight, dz(z.size()), expected(z.size()), one(z.size());
        for (index_t i = 0; i < v; ++i) // every token with its probability: the mean over all draws
            ids.push_back(std::int32_t(i)), weight.push_back(std::exp(log_mu[std::size_t(i)]));
        const auto i_v = view(std::as_const(ids).data(), 1, v);
        const auto cache = [&](const doubles& log_q) {
            return teacher::weighted<std::int32_t, double>{i_v, view(std::as_const(weight).data(), 1, v),
                                                           view(std::as_const(log_mu).data(), 1, v),
                                                           view(log_q.data(), 1, v)};
        };
        cpu_backend be;
        const result r = evaluate(be, student::logits{view(z.data(), 1, v), view(dz.data(), 1, v)},
                                  contrasted(cache(q[0]), cache(q[1])), mc{advantage::contrast{plus, minus}});
        naive_backend exact;
        double loss = 0;
        for (const int i : {0, 1}) {
            const double w = i == 0 ? plus : -minus;
            loss += w * evaluate(exact, student::logits{view(z.data(), 1, v), view(one.data(), 1, v)},
                                 teacher::dense{view(std::as_const(y[i]).data(), 1, v)}, reverse_kl{})
                            .loss;
            for (std::size_t j = 0; j < one.size(); ++j) expected[j] += w * one[j];
        }
        CHECK(r.loss == doctest::Approx(loss).epsilon(1e-10));
        CHECK(farthest(dz, expected) < 1e-10);
        std::vector<std::int32_t> others = ids;
        others[3] = 0;
        auto wrong = cache(q[1]);
        wrong.ids = view(std::as_const(others).data(), 1, v);
        CHECK(says(refusal([&] { (void)contrasted(cache(q[0]), wrong); }), "column 3"));
    }
}

TEST_CASE("ULD is the distance of the sorted laws") {
    property(
        "value and gradient by definition, in place, by any thread",
        [] {
            numbers u(*rc::gen::arbitrary<std::uint64_t>());
            const index_t n = 1 + u.below(3), v = 1 + u.below(40), m = 1 + u.below(40);
            const floats z = logits(u, n * v, 2), y = logits(u, n * m, 2, u.below(2) ? 0.2 : 0);
            floats have(y), dz(z), again(z.size());
            for (index_t r = 0; r < n; ++r) have[std::size_t(r * m)] = 1; // some mass
            const float t_p = float(0.6 + u.uniform()), t_q = float(0.6 + u.uniform());
            const env e{.reduction = reduce::sum};
            const auto call = [&](floats& to, const floats& from, int threads, bool in_place) {
                cpu_backend be{.threads = threads};
                const student::logits<float> s{view(in_place ? std::as_const(to).data() : from.data(), n, v),
                                               view(to.data(), n, v), t_p};
                auto ranked = teacher::by_rank(s, teacher::dense<float>{view(std::as_const(have).data(), n, m), t_q});
                if (!in_place) ranked.budget = std::size_t(std::max(v, m)) * 4 + 256;
                return evaluate(be, s, ranked, uld{}, e).loss;
            };
            const double loss = call(dz, z, 1, true);
            RC_ASSERT(call(again, z, 2, false) == loss);
            RC_ASSERT(equal_bits(dz, again));
            real all = 0;
            for (index_t r = 0; r < n; ++r) {
                real nearest = 1; // to a kink: equal masses, neighbours that change places
                const auto value = [&](const reals& x) {
                    reals scaled;
                    for (const real a : x) scaled.push_back(a / real(t_p));
                    reals p = textbook::log_softmax(scaled), q;
                    for (index_t i = 0; i < m; ++i) q.push_back(real(have[std::size_t(r * m + i)]) / real(t_q));
                    q = textbook::log_softmax(q);
                    for (real& a : p) a = std::exp(a);
                    for (real& a : q) a = std::exp(a);
                    p.resize(std::size_t(std::max(v, m)), 0), q.resize(p.size(), 0);
                    std::sort(p.begin(), p.end()), std::sort(q.begin(), q.end());
                    real sum = 0;
                    for (std::size_t i = 0; i < p.size(); ++i) {
                        sum += std::abs(p[i] - q[i]);
                        nearest = std::min(nearest, std::abs(p[i] - q[i]) / (p[i] + q[i] + 1e-30L));
                        if (i > 0 && p[i - 1] > 0) nearest = std::min(nearest, (p[i] - p[i - 1]) / p[i]);
                    }
                    return sum;
                };
                const reals x(z.begin() + r * v, z.begin() + (r + 1) * v);
                all += value(x);
                if (nearest < 1e-4L) continue;
                const doubles g = gradient_of(value, x, 1e-6L);
                RC_ASSERT(farthest(floats(dz.begin() + r * v, dz.begin() + (r + 1) * v), g) < 1e-6);
            }
            RC_ASSERT(std::abs(loss - double(all)) < 3e-6 * double(n));
        },
        {.cases = 60});
    // by hand: ranks, not ids
    const floats z{0, 3}, y{5, 2};
    floats dz(2);
    cpu_backend be;
    const student::logits s{view(z.data(), 1, 2), view(dz.data(), 1, 2)};
    CHECK(evaluate(be, s, teacher::by_rank(s, teacher::dense{view(y.data(), 1, 2)}), uld{}).loss < 1e-6);
}

namespace {
/// Shares of each student token among up to three of the teacher's; some have none.
struct random_projection {
    std::vector<std::int64_t> offsets{0};
    std::vector<std::int32_t> ids;
    floats shares;
    index_t v_t;
    random_projection(numbers& u, index_t v, index_t v_t_, bool holes) : v_t(v_t_) {
        for (index_t i = 0; i < v; ++i) {
            const index_t count = holes && i > 0 && u.below(5) == 0 ? 0 : 1 + u.below(std::min<index_t>(3, v_t));
            std::set<std::int32_t> own;
            while (index_t(own.size()) < count) own.insert(std::int32_t(u.below(v_t)));
            doubles w;
            double sum = 0;
            for (index_t j = 0; j < count; ++j) w.push_back(0.1 + u.uniform()), sum += w.back();
            for (const double x : w) shares.push_back(float(x / sum));
            ids.insert(ids.end(), own.begin(), own.end());
            offsets.push_back(std::int64_t(ids.size()));
        }
    }
    vocab_projection of() const { return {row_offsets<>(offsets), ids, shares, v_t}; }
};
} // namespace

TEST_CASE("a sparse projection: the value, and the pullback by central differences") {
    property("against W p in long double",
             [] {
                 numbers u(*rc::gen::arbitrary<std::uint64_t>());
                 const index_t n = 1 + u.below(3), v = 1 + u.below(20), v_t = 1 + u.below(25);
                 const random_projection w(u, v, v_t, u.below(2) == 0);
                 const double t = 0.6 + u.uniform(), lift = u.below(4) == 0 ? 40 : 0;
                 doubles z, y, zp(std::size_t(n * v_t)), dzp(zp.size());
                 for (index_t i = 0; i < n * v; ++i) z.push_back(2 * u.normal() + (i % v == 0 ? lift : 0));
                 for (index_t i = 0; i < n * v_t; ++i) y.push_back(2 * u.normal());
                 doubles dz(z.size(), 0.5);
                 std::vector<int> mask(std::size_t(n), 1);
                 mask[0] = u.below(3) == 0 ? 0 : 1;
                 cpu_backend be{.threads = 2};
                 const float t_f = float(t);
                 const auto call = [&](const auto& d) {
                     return evaluate_projected(
                         be, student::logits<double>{view(z.data(), n, v), view(dz.data(), n, v), t_f}, w.of(),
                         view(zp.data(), n, v_t), view(dzp.data(), n, v_t),
                         teacher::dense{view(std::as_const(y).data(), n, v_t)}, d,
                         {.reduction = reduce::sum, .mask = mask, .beta = 0.5f});
                 };
                 const bool forward = u.below(2) == 0; // where every teacher token is reached, else infinite
                 std::set<std::int32_t> reached(w.ids.begin(), w.ids.end());
                 const bool all_reached = index_t(reached.size()) == v_t;
                 const bool kl = forward && all_reached;
                 const result r = kl ? call(forward_kl{}) : call(jsd{});
                 real loss = 0;
                 for (index_t row = 0; row < n; ++row) {
                     const auto value = [&](const reals& x) {
                         reals scaled;
                         for (const real a : x) scaled.push_back(a / real(t_f));
                         const reals log_p = textbook::log_softmax(scaled);
                         textbook::row both;
                         reals mass(std::size_t(v_t), 0), q;
                         for (index_t i = 0; i < v; ++i)
                             for (auto k = w.offsets[std::size_t(i)]; k < w.offsets[std::size_t(i) + 1]; ++k)
                                 mass[std::size_t(w.ids[std::size_t(k)])] +=
                                     real(w.shares[std::size_t(k)]) * std::exp(log_p[std::size_t(i)]);
                         for (index_t i = 0; i < v_t; ++i) q.push_back(real(y[std::size_t(row * v_t + i)]));
                         for (const real p : mass) both.z.push_back(std::log(p));
                         both.log_p = textbook::log_softmax(both.z), both.log_q = textbook::log_softmax(q);
                         return kl ? textbook::value(forward_kl{}, both) : textbook::value(jsd{}, both);
                     };
                     const auto at = std::size_t(row * v);
                     const doubles mine(dz.begin() + long(at), dz.begin() + long(at) + v);
                     if (mask[std::size_t(row)] == 0) {
                         RC_ASSERT(std::all_of(mine.begin(), mine.end(), [](double x) { return x == 0.25; }));
                         continue;
                     }
                     const reals x(z.begin() + long(at), z.begin() + long(at) + v);
                     loss += value(x);
                     doubles g = gradient_of(value, x);
                     for (double& a : g) a += 0.25;
                     RC_ASSERT(farthest(mine, g) < 2e-8);
                 }
                 RC_ASSERT(std::abs(r.loss - double(loss)) < 1e-9 * std::max(1.0, double(loss)));
             },
             {.cases = 80});
}

TEST_CASE("the pullback of a gradient of one's own, whose rows need not sum to 0") {
    property("against W p in long double",
             [] {
                 numbers u(*rc::gen::arbitrary<std::uint64_t>());
                 const index_t v = 1 + u.below(20), v_t = 1 + u.below(25);
                 const random_projection w(u, v, v_t, u.below(2) == 0);
                 doubles z, g, zp(std::size_t(v_t), 0.0), dz(std::size_t(v), 0.0);
                 for (index_t i = 0; i < v; ++i) z.push_back(2 * u.normal());
                 for (index_t i = 0; i < v_t; ++i) g.push_back(u.normal());
                 const double t = 0.6 + u.uniform();
                 cpu_backend be;
                 project(be, w.of(), view(std::as_const(z).data(), 1, v), t, view(zp.data(), 1, v_t));
                 pull_back(be, w.of(), view(std::as_const(z).data(), 1, v), t, view(std::as_const(g).data(), 1, v_t), 0,
                           view(dz.data(), 1, v));
                 const auto log_mass = [&](const reals& x) {
                     reals scaled, mass(std::size_t(v_t), 0);
                     for (const real a : x) scaled.push_back(a / real(t));
                     const reals log_p = textbook::log_softmax(scaled);
                     for (index_t i = 0; i < v; ++i)
                         for (auto k = w.offsets[std::size_t(i)]; k < w.offsets[std::size_t(i) + 1]; ++k)
                             mass[std::size_t(w.ids[std::size_t(k)])] +=
                                 real(w.shares[std::size_t(k)]) * std::exp(log_p[std::size_t(i)]);
                     for (real& m : mass) m = std::log(m);
                     return mass;
                 };
                 const reals x(z.begin(), z.end()), exact = log_mass(x);
                 for (std::size_t i = 0; i < zp.size(); ++i)
                     RC_ASSERT((std::isinf(exact[i]) ? zp[i] == double(exact[i])
                                                     : std::abs(zp[i] - double(exact[i])) < 1e-12));
                 const doubles wanted = gradient_of(
                     [&](const reals& at) {
                         real sum = 0;
                         const reals of = log_mass(at);
                         for (std::size_t i = 0; i < of.size(); ++i)
                             if (!std::isinf(of[i])) sum += real(g[i]) * of[i];
                         return sum;
                     },
                     x);
                 RC_ASSERT(farthest(dz, wanted) < 2e-8);
             },
             {.cases = 80});
}

TEST_CASE("projections in float: the identity is the dense call, in place, bad rows, refusals") {
    const index_t n = 5, v = 1500;
    numbers u(3);
    floats z = logits(u, n * v, 3), y = logits(u, n * v, 3), zp(z.size()), dzp(z.size()), dz(z.size()), plain(z.size());
    for (index_t i = 0; i < v; ++i) z[std::size_t(v + i)] -= i == 7 ? 0 : 120; // beyond float's range
    std::vector<std::int32_t> offsets, ids;
    for (index_t i = 0; i < v; ++i) offsets.push_back(std::int32_t(i)), ids.push_back(std::int32_t(i));
    offsets.push_back(std::int32_t(v));
    const floats ones(std::size_t(v), 1);
    const vocab_projection w{row_offsets<>(offsets), ids, ones, v};
    cpu_backend be{.threads = 2}, one;
    const teacher::dense t{view(std::as_const(y).data(), n, v)};
    const auto zp_v = view(zp.data(), n, v), dzp_v = view(dzp.data(), n, v);
    const student::logits s{view(std::as_const(z).data(), n, v), view(dz.data(), n, v)};
    const result r = evaluate_projected(be, s, w, zp_v, dzp_v, t, reverse_kl{});
    const result p = evaluate(be, student::logits{s.z, view(plain.data(), n, v)}, t, reverse_kl{});
    CHECK(r.loss == doctest::Approx(p.loss).epsilon(1e-6));
    CHECK(farthest(dz, plain) < 2e-6 * largest(plain));
    floats in_place = z;
    evaluate_projected(one, student::logits{view(std::as_const(in_place).data(), n, v), view(in_place.data(), n, v)}, w,
                       zp_v, dzp_v, t, reverse_kl{});
    CHECK(equal_bits(in_place, dz));
    z[std::size_t(3 * v + 2)] = NAN;
    const result bad_row = evaluate_projected(be, s, w, zp_v, dzp_v, t, reverse_kl{});
    CHECK(bad_row.diagnostics.first_bad_row == 3);
    CHECK(std::all_of(dz.begin() + 3 * v, dz.begin() + 4 * v, [](float x) { return x == 0; }));
    CHECK(equal_bits(floats(dz.begin(), dz.begin() + 3 * v), floats(in_place.begin(), in_place.begin() + 3 * v)));

    const floats before = dz;
    doubles lse(5);
    const auto refused = [&](const vocab_projection& of, env e = {}) {
        return refusal([&] { evaluate_projected(be, s, of, zp_v, dzp_v, t, reverse_kl{}, e); });
    };
    vocab_projection x = w;
    x.teacher_vocab = v - 1;
    CHECK(says(refused(x), "row 1499"));
    floats half = ones;
    half[9] = 0.5f;
    x = w, x.shares = half;
    CHECK(says(refused(x), "sum to 0.5"));
    std::vector<std::int32_t> down = offsets;
    down[4] = 2;
    x = w, x.offsets = row_offsets<>(down);
    CHECK(says(refused(x), "projection.offsets"));
    x = w, x.offsets = row_offsets<>(offsets.data(), v);
    CHECK(says(refused(x), "projection.offsets"));
    CHECK(says(refused(w, {.lse = lse}), "env.lse"));
    CHECK(says(refusal([&] { evaluate_projected(be, s, w, zp_v, zp_v, t, reverse_kl{}); }), "overlaps"));
    CHECK(says(refusal([&] { evaluate_projected(be, s, w, view(zp.data(), n, v - 1), dzp_v, t, reverse_kl{}); }),
               "projected"));
    CHECK(equal_bits(dz, before));
}

namespace {
/// A weight takes the middle row of three beyond G: its largest number, counted; a masked row is scaled.
template <class G>
void projected_beyond(const char* name, float weight) {
    CAPTURE(std::string(name));
    const index_t n = 4, v = 3;
    const floats z{0.5F, 0, 0, 0, -24, -24, 1, 0, 2, 1, 0, 0}, y{0, 1, 0, -24, 0, -24, 0, 0, 2, 0, 1, 0}, ones(3, 1.F),
        weights{1, weight, 1, 1};
    const std::vector<std::int32_t> offsets{0, 1, 2, 3}, ids{0, 1, 2};
    const vocab_projection w{row_offsets<>(offsets), ids, ones, v};
    const std::vector<std::uint8_t> mask{1, 1, 1, 0};
    const double most = double(detail::largest_stored<G>);
    doubles zp(z.size()), dzp(z.size()), exact(z.size());
    cpu_backend be{.threads = 2};
    const auto call = [&](auto& dz, float beta, overflow policy) {
        using T = typename std::remove_reference_t<decltype(dz)>::value_type;
        return evaluate_projected(
            be, student::logits<float, T>{view(z.data(), n, v), view(dz.data(), n, v)}, w, view(zp.data(), n, v),
            view(dzp.data(), n, v), teacher::dense{view(y.data(), n, v)}, alpha_divergence{-1}, // c about e^24
            {.reduction = reduce::sum, .mask = mask, .weights = weights, .beta = beta, .on_overflow = policy});
    };
    const result whole = call(exact, 0, overflow::skip_row);
    REQUIRE(largest(exact) > 1.1 * most);
    CHECK(whole.diagnostics.infinite_rows == 0);
    for (const float beta : {0.F, 1.F, 2.F})
        for (const overflow policy : {overflow::skip_row, overflow::saturate}) {
            const double was = 0.75 * most;
            std::vector<G> dz(z.size(), element<G>::store(beta == 2 ? static_cast<arithmetic_t<G>>(was) : 2));
            const double before = double(element<G>::load(dz[0]));
            const result r = call(dz, beta, policy);
            CHECK(r.loss == whole.loss);
            CHECK(r.diagnostics.infinite_rows == (beta == 2 ? 3 : 1));
            CHECK(r.diagnostics.first_infinite_row == (beta == 2 ? 0 : 1));
            for (std::size_t i = 0; i < dz.size(); ++i) {
                const double want = double(beta) * before + exact[i], got = double(element<G>::load(dz[i]));
                if (std::abs(want) > most)
                    CHECK(got == std::copysign(most, want));
                else
                    CHECK(got == doctest::Approx(want).epsilon(1e-2));
            }
        }
}
} // namespace

TEST_CASE("a pulled-back gradient that its type does not hold is cut, and counted") {
    projected_beyond<half>("half", 1);
    projected_beyond<bfloat16>("bfloat16", 9e29F);
    projected_beyond<float>("float", 9e29F);
}

namespace {
/// Pieces as a vocabulary.
struct pieces {
    std::vector<std::int32_t> offsets{0};
    std::vector<unsigned char> bytes;
    explicit pieces(const std::vector<std::string>& of) {
        for (const std::string& p : of) {
            bytes.insert(bytes.end(), p.begin(), p.end());
            offsets.push_back(std::int32_t(bytes.size()));
        }
    }
    token_bytes table() const { return {row_offsets<>(offsets), bytes}; }
};
std::vector<chunk> aligned(const pieces& a, const std::vector<int>& ids, const pieces& b,
                           const std::vector<int>& theirs) {
    std::vector<chunk> out;
    align_chunks(a.table(), vector_view<const int>(ids), b.table(), vector_view<const int>(theirs), out);
    return out;
}
using chunks = std::vector<chunk>;
} // namespace

TEST_CASE("chunks by hand") {
    const pieces a({"the", " c", "at", "", "x", "\xc3", "\xa9"}), b({"the", " cat", "", "xx", "\xc3\xa9", "th", "e"});
    CHECK(aligned(a, {0, 1, 2}, b, {0, 1}) == chunks{{0, 1, 0, 1}, {1, 3, 1, 2}});
    CHECK(aligned(a, {0}, b, {5, 6}) == chunks{{0, 1, 0, 2}});
    CHECK(aligned(a, {4, 4, 5, 6}, b, {3, 4}) == chunks{{0, 2, 0, 1}, {2, 4, 1, 2}}); // a character of two bytes
    CHECK(aligned(a, {}, b, {}).empty());
    // without bytes: a pair is a chunk, one alone joins what is before it, or the first
    CHECK(aligned(a, {3, 0, 3}, b, {2, 0, 2}) == chunks{{0, 1, 0, 1}, {1, 2, 1, 2}, {2, 3, 2, 3}});
    CHECK(aligned(a, {3, 0, 3}, b, {0}) == chunks{{0, 3, 0, 1}});
    CHECK(aligned(a, {0}, b, {2, 2, 0, 2}) == chunks{{0, 1, 0, 4}});
    CHECK(aligned(a, {3}, b, {}) == chunks{{0, 1, 0, 0}});
    CHECK(says(refusal([&] { aligned(a, {0, 1}, b, {0, 1}); }), "a text of 7 bytes, the student's of 5"));
    CHECK(says(refusal([&] { aligned(a, {0, 7}, b, {0}); }), "id 7 for a table of 7 tokens"));
    CHECK(says(refusal([&] { aligned(a, {4, 4}, b, {5}); }), "are another text"));
    chunks one{{0, 2, 0, 1}};
    const doubles log_p{-1, -2}, log_q{-0.5};
    doubles advantage(2);
    chunk_advantages(one, vector_view<const double>(log_p), vector_view<const double>(log_q),
                     view(advantage.data(), 2, 1));
    CHECK(advantage == doubles{2.5, 2.5});
    const auto refused = [&](const chunks& of, index_t n) {
        return refusal([&] {
            chunk_advantages(of, vector_view<const double>(log_p), vector_view<const double>(log_q),
                             view(advantage.data(), n, 1));
        });
    };
    CHECK(says(refused(one, 1), "advantage"));
    CHECK(says(refused({{0, 1, 0, 1}}, 2), "log_p"));
    CHECK(says(refused({{0, 2, 0, 1}, {3, 4, 1, 1}}, 2), "must follow one another"));
}

TEST_CASE("chunks of random tokenizations against brute force") {
    property("borders that both have", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        std::string text;
        for (index_t n = 1 + u.below(60); n > 0; --n) text += char('a' + u.below(3));
        const auto cut = [&](std::vector<std::string>& table, std::vector<int>& ids, std::vector<std::size_t>& ends) {
            for (std::size_t at = 0; at < text.size();) {
                const std::size_t n = std::min<std::size_t>(1 + std::size_t(u.below(5)), text.size() - at);
                const std::string piece = text.substr(at, n);
                auto found = std::find(table.begin(), table.end(), piece);
                if (found == table.end()) table.push_back(piece), found = table.end() - 1;
                ids.push_back(int(found - table.begin()));
                ends.push_back(at += n);
            }
        };
        std::vector<std::string> a, b;
        std::vector<int> mine, theirs;
        std::vector<std::size_t> ends, their_ends;
        cut(a, mine, ends), cut(b, theirs, their_ends);
        chunks expected;
        index_t i = 0, j = 0;
        for (std::size_t border = 1; border <= text.size(); ++border) {
            const auto x = std::find(ends.begin(), ends.end(), border);
            const auto y = std::find(their_ends.begin(), their_ends.end(), border);
            if (x == ends.end() || y == their_ends.end()) continue;
            const index_t i_end = x - ends.begin() + 1, j_end = y - their_ends.begin() + 1;
            expected.push_back({i, i_end, j, j_end});
            i = i_end, j = j_end;
        }
        RC_ASSERT(aligned(pieces(a), mine, pieces(b), theirs) == expected);
        pieces other(b); // another text of the same lengths
        other.bytes[std::size_t(other.offsets[std::size_t(theirs.back())])] ^= 1;
        RC_ASSERT(says(refusal([&] { aligned(pieces(a), mine, other, theirs); }), "are another text"));
    });
}

TEST_CASE("chunk log-ratios give the gradient of the sequences' reverse KL, by enumeration") {
    // two steps over {a, b, ab}; the teacher reads ab as one token, and has laws by place of its own
    const pieces mine({"a", "b", "ab"}), theirs({"a", "b", "ab"});
    numbers u(21);
    doubles z; // (1 + 3 states, 3): first step, second step by the first token
    for (int i = 0; i < 12; ++i) z.push_back(u.normal());
    double log_q[4][3];
    for (auto& place : log_q)
        for (double& x : place) x = -0.3 - u.uniform() * 2;
    const auto logs = [](const reals& x, int state) {
        return textbook::log_softmax(reals(x.begin() + 3 * state, x.begin() + 3 * state + 3));
    };
    const auto teacher_ids = [&](int first, int second) {
        const char* const text[] = {"a", "b", "ab"};
        const std::string y = std::string(text[first]) + text[second];
        std::vector<int> ids;
        for (std::size_t at = 0; at < y.size();)
            if (y.compare(at, 2, "ab") == 0)
                ids.push_back(2), at += 2;
            else
                ids.push_back(y[at] == 'a' ? 0 : 1), ++at;
        return ids;
    };
    const auto kl = [&](const reals& x) {
        real sum = 0;
        for (int first = 0; first < 3; ++first)
            for (int second = 0; second < 3; ++second) {
                const real log_p = logs(x, 0)[std::size_t(first)] + logs(x, 1 + first)[std::size_t(second)];
                real q = 0;
                const std::vector<int> ids = teacher_ids(first, second);
                for (std::size_t j = 0; j < ids.size(); ++j) q += real(log_q[j][ids[j]]);
                sum += std::exp(log_p) * (log_p - q);
            }
        return sum;
    };
    const reals at(z.begin(), z.end());
    // a row for each step of each sequence, weighted by the sequence's probability; `column`: the sum over its chunks
    doubles rows, weights, log_mu, column, own_chunk;
    std::vector<std::int32_t> ids;
    bool joined = false;
    for (int first = 0; first < 3; ++first)
        for (int second = 0; second < 3; ++second) {
            const doubles log_p{double(logs(at, 0)[std::size_t(first)]),
                                double(logs(at, 1 + first)[std::size_t(second)])};
            const std::vector<int> own{first, second}, other = teacher_ids(first, second);
            doubles q;
            for (std::size_t j = 0; j < other.size(); ++j) q.push_back(log_q[j][other[j]]);
            const chunks of = aligned(mine, own, theirs, other);
            joined = joined || of.size() == 1;
            doubles advantage(2), text(2);
            const vector_view<const double> log_p_v(log_p), log_q_v(q);
            chunk_advantages(of, log_p_v, log_q_v, view(advantage.data(), 2, 1));
            chunk_advantages(of, log_p_v, log_q_v, view(text.data(), 2, 1), chunk_credit::text);
            for (int step = 0; step < 2; ++step) {
                const int state = step == 0 ? 0 : 1 + first;
                rows.insert(rows.end(), z.begin() + 3 * state, z.begin() + 3 * state + 3);
                weights.push_back(std::exp(log_p[0] + log_p[1]));
                ids.push_back(own[std::size_t(step)]), log_mu.push_back(log_p[std::size_t(step)]);
                column.push_back(text[std::size_t(step)]), own_chunk.push_back(advantage[std::size_t(step)]);
            }
        }
    CHECK(joined); // a and b are one chunk
    const index_t n = index_t(ids.size());
    const auto mean_gradient = [&](const doubles& advantage) {
        doubles dz(rows.size()), sum(z.size());
        teacher::samples<std::int32_t, double> cache{view(std::as_const(ids).data(), n, 1),
                                                     view(std::as_const(log_mu).data(), n, 1),
                                                     view(std::as_const(log_mu).data(), n, 1)};
        cache.advantage = view(advantage.data(), n, 1);
        cpu_backend be;
        evaluate(be, student::logits{view(std::as_const(rows).data(), n, 3), view(dz.data(), n, 3)}, cache,
                 mc{advantage::outside{}}, {.reduction = reduce::sum, .weights = weights});
        for (index_t r = 0; r < n; ++r)
            for (int i = 0; i < 3; ++i)
                sum[std::size_t((r % 2 == 0 ? 0 : 1 + r / 6) * 3 + i)] += dz[std::size_t(r * 3 + i)];
        return sum;
    };
    const doubles exact = gradient_of(kl, at);
    CHECK(farthest(mean_gradient(column), exact) < 1e-9);
    CHECK(farthest(mean_gradient(own_chunk), exact) > 0.01); // a token's own chunk alone is another thing
}
