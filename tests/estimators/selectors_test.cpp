// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Selectors: a row weighed by what the call finds out is the row with that weight in env.weights, the facts computed in
// float64; a sum of two divergences is the sum of their calls; EOPD row by row; what is left out, what is bad, what is
// refused. On both engines.
#include "backends/both_engines.hpp"
#include "support/distribution.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <utility>
#include <vector>

#include <opd/estimators/any.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/selectors.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// Some number of every fact that it reads.
template <unsigned Reads>
struct probe {
    static constexpr unsigned reads() { return Reads; }
    OPD_HD double operator()(const row_facts& f) const {
        double w = 0.3 + 0.1 * f.value / (1 + std::abs(f.value)) - 0.02 * f.age; // per-row losses are float
        if (Reads & fact::student_entropy) w += 0.05 * f.student_entropy;
        if (Reads & fact::teacher_entropy) w += 0.07 * f.teacher_entropy + 0.5 * f.overlap;
        if (Reads & fact::position) w += 0.11 * f.position;
        if (Reads & fact::drawn) w += 0.13 * f.log_ratio + 0.17 * f.gap;
        return w;
    }
};
/// A number for each row.
struct listed {
    const double* of_row;
    static constexpr unsigned reads() { return 0; }
    OPD_HD double operator()(const row_facts& f) const { return of_row[f.row]; }
};

/// A batch in sequences, with ages, and what a call writes.
template <class T>
struct batch {
    index_t rows, vocab;
    float temperature;
    std::vector<T> z, y;
    std::vector<double> z64, y64;
    std::vector<std::int64_t> offsets{0};
    std::vector<std::int32_t> versions;
    std::vector<std::uint8_t> mask;

    batch(numbers& u, index_t rows_, index_t vocab_)
        : rows(rows_), vocab(vocab_), temperature(float(0.5 + 1.5 * u.uniform())) {
        for (index_t i = 0; i < rows * vocab; ++i) {
            z.push_back(T(2 * u.normal())), z64.push_back(double(z.back()));
            y.push_back(T(double(z.back()) + u.normal())), y64.push_back(double(y.back()));
        }
        for (index_t r = 0; r < rows; ++r) {
            if (r > 0 && u.uniform() < 0.3) offsets.push_back(r);
            versions.push_back(std::int32_t(u.below(5))), mask.push_back(u.uniform() < 0.85);
        }
        offsets.push_back(rows);
    }
    double position(index_t r) const {
        const auto first = *(std::upper_bound(offsets.begin(), offsets.end() - 1, std::int64_t(r)) - 1);
        return double(std::count(mask.begin() + first, mask.begin() + r, std::uint8_t{1}));
    }
    std::vector<double> p(index_t r) const { return softmax(z64.data() + r * vocab, vocab, double(temperature)); }
    std::vector<double> q(index_t r) const { return softmax(y64.data() + r * vocab, vocab, 1); }
    env options() const {
        env e;
        e.reduction = reduce::sum, e.mask = row_mask<>(mask);
        e.offsets = row_offsets<>(offsets), e.versions = view(versions.data(), rows), e.version = 5;
        return e;
    }
};
/// Loss, gradient and per-row losses of a call.
template <class T>
struct outcome {
    std::vector<T> dz;
    std::vector<float> losses;
    result r;

    template <class Backend, class Teacher, class E>
    outcome(Backend& be, const batch<T>& b, const Teacher& t, const E& estimator, env e, T before = 3)
        : dz(std::size_t(b.rows * b.vocab), before), losses(std::size_t(b.rows)) {
        e.losses = view(losses.data(), b.rows);
        r = evaluate(be,
                     student::logits<T>{.z = view(std::as_const(b.z).data(), b.rows, b.vocab),
                                        .dz = view(dz.data(), b.rows, b.vocab),
                                        .temperature = b.temperature},
                     t, estimator, e);
    }
};
template <class T>
void require_same(const outcome<T>& a, const outcome<T>& b, double eps) {
    double size = 0;
    for (const T x : b.dz) size = std::max(size, std::abs(double(x)));
    for (std::size_t i = 0; i < a.dz.size(); ++i)
        RC_ASSERT(std::abs(double(a.dz[i]) - double(b.dz[i])) <= eps * std::max(size, 1e-3));
    RC_ASSERT(std::abs(a.r.loss - b.r.loss) <= eps * std::max(1.0, std::abs(b.r.loss)));
    for (std::size_t i = 0; i < a.losses.size(); ++i)
        RC_ASSERT(std::abs(double(a.losses[i]) - double(b.losses[i])) <=
                  std::max(eps, 1e-6) * std::max(1.0, std::abs(double(b.losses[i]))));
    RC_ASSERT(a.r.diagnostics.bad_rows == b.r.diagnostics.bad_rows);
}

template <class T>
constexpr double eps_of() {
    return sizeof(T) == 8 ? 1e-10 : 2e-5;
}

/// selected{estimator, probe} beside the estimator with the probe's weights, from facts in float64.
template <unsigned Reads, class T, class Backend, class Teacher, class E, class Facts>
void check_weights(Backend& be, const batch<T>& b, const Teacher& t, const E& estimator, Facts facts) {
    env e = b.options();
    const outcome<T> plain(be, b, t, estimator, e);
    std::vector<double> weights;
    double sum = 0;
    index_t kept = 0;
    for (index_t r = 0; r < b.rows; ++r) {
        row_facts f = facts(r);
        f.row = r, f.value = double(plain.losses[std::size_t(r)]), f.position = b.position(r);
        f.age = 5 - b.versions[std::size_t(r)];
        weights.push_back(probe<Reads>{}(f));
        if (b.mask[std::size_t(r)]) sum += weights.back(), ++kept;
    }
    env weighted = e;
    weighted.weights = row_weights<>(weights);
    const outcome<T> want(be, b, t, estimator, weighted), got(be, b, t, selected{estimator, probe<Reads>{}}, e);
    require_same(got, want, std::max(eps_of<T>(), 3e-7)); // per-row losses are float
    const diagnostics& d = got.r.diagnostics;
    RC_ASSERT(d.selector_rows == kept);
    RC_ASSERT(d.selector_left_out == 0);
    RC_ASSERT(std::abs(d.selector_weight_sum - sum) < 1e-5 * double(b.rows));
    RC_ASSERT(plain.r.diagnostics.mean_selector_weight() == 1);
    // what is asked for the selector's sake is not reported as measured
    RC_ASSERT(d.student_entropy_rows == 0);
}

template <class T>
void check_dense() {
    property("dense rows", [] {
        numbers u(std::uint64_t(*rc::gen::inRange(0, 1000000)));
        const batch<T> b(u, 1 + u.below(12), 1 + u.below(u.uniform() < 0.2 ? 3000 : 40));
        const teacher::dense<T> t{view(b.y.data(), b.rows, b.vocab)};
        const auto facts = [&](index_t r) {
            row_facts f{};
            f.student_entropy = entropy(b.p(r)), f.teacher_entropy = entropy(b.q(r)),
            f.overlap = overlap(b.p(r), b.q(r));
            return f;
        };
        on_both([&](auto& be, const char*) {
            using namespace fact;
            check_weights<student_entropy | teacher_entropy | position, T>(be, b, t, reverse_kl{}, facts);
            check_weights<0, T>(be, b, t, forward_kl{}, facts);
            check_weights<position, T>(be, b, t, jsd{}, facts);
            check_weights<student_entropy, T>(be, b, t, weighted_sum{reverse_kl{}, total_variation{}, .3, .8}, facts);
        });
    });
}

} // namespace

TEST_CASE("a dense row's weight is of its entropies, overlap, position, age and value") {
    check_dense<float>();
    check_dense<double>();
}

TEST_CASE("rows of drawn tokens and of supports are weighed by what they know") {
    property("tokens and supports", [] {
        using T = double;
        numbers u(std::uint64_t(*rc::gen::inRange(0, 1000000)));
        const index_t vocab = 3 + u.below(30), m = 1 + u.below(4);
        const batch<T> b(u, 1 + u.below(10), vocab);
        std::vector<std::int32_t> ids, best, kept;
        std::vector<double> log_mu, log_q, weight, log_q_best;
        std::vector<std::uint8_t> exact;
        std::vector<std::int64_t> kept_offsets{0};
        const index_t k = 1 + u.below(vocab);
        for (index_t r = 0; r < b.rows; ++r) {
            const auto q = b.q(r);
            for (index_t j = 0; j < m; ++j) {
                ids.push_back(std::int32_t(u.below(vocab))), log_mu.push_back(-3 * u.uniform());
                log_q.push_back(std::log(q[std::size_t(ids.back())]));
                weight.push_back(u.uniform() / double(m)), exact.push_back(u.uniform() < 0.5);
            }
            const index_t first = u.below(vocab);
            for (index_t j = 0; j < k; ++j) {
                best.push_back(std::int32_t((first + j) % vocab));
                log_q_best.push_back(std::log(q[std::size_t(best.back())]));
            }
            for (index_t v = 0; v < vocab; ++v) kept.push_back(std::int32_t(v));
            kept_offsets.push_back(std::int64_t(kept.size()));
        }
        const index_t n = b.rows;
        const teacher::samples samples{view(std::as_const(ids).data(), n, m), view(std::as_const(log_mu).data(), n, m),
                                       view(std::as_const(log_q).data(), n, m)};
        const teacher::weighted entries{view(std::as_const(ids).data(), n, m), view(std::as_const(weight).data(), n, m),
                                        view(std::as_const(log_mu).data(), n, m),
                                        view(std::as_const(log_q).data(), n, m),
                                        view(std::as_const(exact).data(), n, m)};
        const teacher::support support{view(std::as_const(best).data(), n, k),
                                       view(std::as_const(log_q_best).data(), n, k)};
        const teacher::on_kept_sets sets{samples, view(std::as_const(kept).data(), index_t(kept.size())),
                                         row_offsets<>(kept_offsets)};
        const auto tokens_of = [&](bool weighted) {
            return [&, weighted](index_t r) {
                const auto p = b.p(r);
                row_facts f{};
                f.student_entropy = entropy(p), f.log_ratio = f.gap = 0;
                double all = 0;
                for (index_t j = 0; j < m; ++j) {
                    const auto i = std::size_t(r * m + j);
                    const double w = weighted ? weight[i] : 1, log_p = std::log(p[std::size_t(ids[i])]);
                    all += w, f.log_ratio += w * (log_p - log_mu[i]), f.gap += w * (log_p - log_q[i]);
                }
                f.log_ratio /= all, f.gap /= all;
                return f;
            };
        };
        const auto on_support = [&](index_t r) {
            std::vector<double> z, y;
            for (index_t j = 0; j < k; ++j) {
                const auto i = std::size_t(r * k + j);
                z.push_back(b.z64[std::size_t(r * vocab + best[i])]), y.push_back(log_q_best[i]);
            }
            const auto p = softmax(z.data(), k, double(b.temperature)), q = softmax(y.data(), k, 1);
            row_facts f{};
            f.student_entropy = entropy(p), f.teacher_entropy = entropy(q), f.overlap = overlap(p, q);
            return f;
        };
        on_both([&](auto& be, const char*) {
            using namespace fact;
            check_weights<fact::student_entropy | fact::drawn | fact::position, T>(be, b, samples, mc{},
                                                                                   tokens_of(false));
            check_weights<fact::drawn, T>(be, b, entries, mc{jsd{}}, tokens_of(true));
            check_weights<fact::student_entropy | fact::drawn, T>(be, b, sets, mc{}, tokens_of(false));
            check_weights<position, T>(be, b, support, tail_bucket{reverse_kl{}}, tokens_of(false));
            check_weights<0, T>(be, b, support, generalised{forward_kl{}}, tokens_of(false));
            check_weights<student_entropy | teacher_entropy, T>(be, b, support, renormalised{reverse_kl{}}, on_support);
        });
    });
}

TEST_CASE("a weighted sum is the sum of two calls") {
    property("sums", [] {
        numbers u(std::uint64_t(*rc::gen::inRange(0, 1000000)));
        const batch<double> b(u, 1 + u.below(6), 1 + u.below(50));
        const teacher::dense<double> t{view(b.y.data(), b.rows, b.vocab)};
        const double a = u.uniform() < 0.2 ? 0 : 2 * u.uniform(), c = u.uniform() < 0.2 ? 0 : 2 * u.uniform();
        on_both([&](auto& be, const char*) {
            const auto check = [&](const auto& first, const auto& second) {
                const env e = b.options();
                const outcome<double> x(be, b, t, first, e, 0), y(be, b, t, second, e, 0);
                const outcome<double> sum(be, b, t, weighted_sum{first, second, a, c}, e, 0);
                for (std::size_t i = 0; i < sum.dz.size(); ++i)
                    RC_ASSERT(std::abs(sum.dz[i] - a * x.dz[i] - c * y.dz[i]) < 1e-11);
                RC_ASSERT(std::abs(sum.r.loss - a * x.r.loss - c * y.r.loss) < 1e-11 * (1 + sum.r.loss));
            };
            check(reverse_kl{}, forward_kl{});
            check(forward_kl{}, reverse_kl{});
            check(reverse_kl{}, jsd{.w = .3, .o = .6});      // two sweeps; a slope at the anchor of its own
            check(alpha_divergence{.a = .4}, chi_squared{}); // powers of two exponents
            check(chi_squared{}, reverse_kl{});
            check(skew_forward_kl{.a = .2}, skew_reverse_kl{.a = .3});
        });
    });
    static_assert(single_sweep_divergence<weighted_sum<reverse_kl, forward_kl>>);
    static_assert(!single_sweep_divergence<weighted_sum<reverse_kl, jsd>>);
    static_assert(!single_sweep_divergence<weighted_sum<alpha_divergence, chi_squared>>);
}

TEST_CASE("EOPD: forward KL beside reverse KL where the teacher is unsure") {
    property("eopd", [] {
        numbers u(std::uint64_t(*rc::gen::inRange(0, 1000000)));
        const batch<double> b(u, 2 + u.below(8), 2 + u.below(40));
        const teacher::dense<double> t{view(b.y.data(), b.rows, b.vocab)};
        std::vector<double> entropies;
        for (index_t r = 0; r < b.rows; ++r) entropies.push_back(entropy(b.q(r)));
        std::vector<double> sorted = entropies;
        std::sort(sorted.begin(), sorted.end());
        const double tau = (sorted[sorted.size() / 2 - 1] + sorted[sorted.size() / 2]) / 2, share = 0.7;
        on_both([&](auto& be, const char*) {
            const env e = b.options();
            const outcome<double> reverse(be, b, t, reverse_kl{}, e, 0), forward(be, b, t, forward_kl{}, e, 0);
            const outcome<double> both(be, b, t, eopd(tau, share), e, 0);
            for (index_t r = 0; r < b.rows; ++r) {
                const double w = entropies[std::size_t(r)] > tau ? share : 0;
                for (index_t v = 0; v < b.vocab; ++v) {
                    const auto i = std::size_t(r * b.vocab + v);
                    RC_ASSERT(std::abs(both.dz[i] - reverse.dz[i] - w * forward.dz[i]) < 1e-11);
                }
                const auto i = std::size_t(r);
                RC_ASSERT(std::abs(both.losses[i] - reverse.losses[i] - w * forward.losses[i]) <
                          1e-5 * (1 + both.losses[i]));
            }
            // the same on a support that is the vocabulary
            std::vector<std::int32_t> ids;
            std::vector<double> log_q;
            for (index_t r = 0; r < b.rows; ++r)
                for (index_t v = 0; v < b.vocab; ++v)
                    ids.push_back(std::int32_t(v)), log_q.push_back(std::log(b.q(r)[std::size_t(v)]));
            const teacher::support s{view(std::as_const(ids).data(), b.rows, b.vocab),
                                     view(std::as_const(log_q).data(), b.rows, b.vocab)};
            const outcome<double> on_all(
                be, b, s, selected{renormalised{weighted_sum{reverse_kl{}, forward_kl{}}}, selector::eopd{tau, share}},
                e, 0);
            for (std::size_t i = 0; i < both.dz.size(); ++i) RC_ASSERT(std::abs(on_all.dz[i] - both.dz[i]) < 1e-11);
            // with all but the first id in one bucket
            const teacher::lumped lumped{t, 1};
            const outcome<double> x(be, b, lumped, reverse_kl{}, e, 0), y(be, b, lumped, forward_kl{}, e, 0);
            const double limit = std::log(2.) / 2;
            const outcome<double> of_buckets(be, b, lumped, eopd(limit, share), e, 0);
            for (index_t r = 0; r < b.rows; ++r) {
                const double first = b.q(r)[0], w = entropy({first, 1 - first}) > limit ? share : 0;
                for (index_t v = 0; v < b.vocab; ++v) {
                    const auto i = std::size_t(r * b.vocab + v);
                    RC_ASSERT(std::abs(of_buckets.dz[i] - x.dz[i] - w * y.dz[i]) < 1e-11);
                }
            }
        });
    });
}

TEST_CASE("a row whose forward KL is infinite is none where EOPD takes reverse KL alone") {
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> z{0, 1, -inf, 0, 1, -inf}, y{8, 0, 0, 0.1F, 0, 0.2F}; // the second row's teacher is unsure
    std::vector<float> dz(6);
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        const auto r = evaluate(be, student::logits{view(z.data(), 2, 3), view(dz.data(), 2, 3)},
                                teacher::dense{view(y.data(), 2, 3)}, eopd(0.8), {.on_infinite = infinite::skip()});
        CHECK(r.diagnostics.infinite_rows == 1);
        CHECK(r.diagnostics.first_infinite_row == 1);
        CHECK(dz[0] != 0);
        CHECK(dz[3] == 0);
        // a part of weight 0 makes no row infinite
        const auto swapped = [&](double a, double b) {
            return evaluate(be, student::logits{view(y.data(), 2, 3), view(dz.data(), 2, 3)},
                            teacher::dense{view(z.data(), 2, 3)}, weighted_sum{reverse_kl{}, total_variation{}, a, b},
                            {.on_infinite = infinite::skip()})
                .diagnostics.infinite_rows;
        };
        CHECK(swapped(0, 1) == 0);
        CHECK(swapped(0.1, 1) == 2);
    });
}

TEST_CASE("what is left out has no gradient and no loss; a weight that is no number makes its row bad") {
    numbers u(4);
    const batch<float> b(u, 4, 1500);
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    const std::vector<double> weights{0, 1, nan, inf};
    std::vector<std::int32_t> ids(8, 3);
    const std::vector<float> log_mu(8, -1.F), log_q(8, -2.F);
    std::vector<std::int32_t> best;
    for (int i = 0; i < 8; ++i) best.push_back(i % 2 + 4);
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        const auto check = [&](const auto& t, const auto& estimator) {
            env e;
            e.beta = 0.5F, e.reduction = reduce::sum;
            const outcome<float> got(be, b, t, selected{estimator, listed{weights.data()}}, e);
            env of_second = e;
            const std::vector<float> only{0, 1, 0, 0};
            of_second.weights = row_weights<>(only);
            const outcome<float> want(be, b, t, estimator, of_second);
            CHECK(got.r.loss == want.r.loss);
            CHECK(got.dz == want.dz);
            CHECK(got.dz[0] == 1.5F);
            CHECK(got.r.diagnostics.bad_rows == 2);
            CHECK(got.r.diagnostics.first_bad_row == 2);
            CHECK(got.r.diagnostics.selector_rows == 2);
            CHECK(got.r.diagnostics.selector_left_out == 1);
            CHECK(got.r.diagnostics.mean_selector_weight() == 0.5);
            CHECK(to_string(got.r.diagnostics).find("1 left out by the selector") != std::string::npos);
        };
        const auto drawn = view(std::as_const(ids).data(), 4, 2);
        const teacher::samples samples{drawn, view(log_mu.data(), 4, 2), view(log_q.data(), 4, 2)};
        check(teacher::dense<float>{view(b.y.data(), 4, 1500)}, reverse_kl{});
        check(teacher::dense<float>{view(b.y.data(), 4, 1500)}, total_variation{});
        check(teacher::lumped{teacher::dense<float>{view(b.y.data(), 4, 1500)}, 700}, reverse_kl{});
        check(samples, mc{});
        const teacher::support support{view(std::as_const(best).data(), 4, 2), view(log_q.data(), 4, 2)};
        check(support, renormalised{reverse_kl{}});
        check(support, tail_bucket{reverse_kl{}});
        std::vector<std::int32_t> kept;
        std::vector<std::int64_t> offsets{0};
        for (int r = 0; r < 4; ++r) {
            for (int v = 0; v < 6; ++v) kept.push_back(v);
            offsets.push_back(std::int64_t(kept.size()));
        }
        check(teacher::on_kept_sets{samples, view(std::as_const(kept).data(), index_t(kept.size())),
                                    row_offsets<>(offsets)},
              mc{});
    });
}

TEST_CASE("the selectors of the library") {
    const auto facts = [](double hp, double hq, double value) {
        row_facts f{};
        f.student_entropy = hp, f.teacher_entropy = hq, f.value = value;
        return f;
    };
    const selector::tip tip{.entropy = 2, .gap = 0.5};
    CHECK(tip(facts(2.5, 0, 0)) == 1);
    CHECK(tip(facts(1.5, 0, 0.5)) == 1);
    CHECK(tip(facts(1.5, 0, 0.4)) == 0);
    row_facts f{};
    f.position = 3;
    CHECK(selector::prefix{4}(f) == 1);
    CHECK(selector::prefix{3}(f) == 0);
    CHECK(selector::prefix::at_step(25, 3, 10).depth == 5);
    f.overlap = 0.4;
    CHECK(selector::agreed{0.4}(f) == 1);
    CHECK(selector::agreed{0.5}(f) == 0);
    for (const double l : {-0.3, 0.3}) {
        f.log_ratio = l;
        CHECK(selector::band{0.3}(f) == 1);
        CHECK(selector::band{0.2}(f) == 0);
    }
    CHECK(selector::eopd{1, 0.5}.mix(facts(0, 1.1, 0)).b == 0.5);
    CHECK(selector::eopd{1, 0.5}.mix(facts(0, 1, 0)).b == 0);
    CHECK(selector::eopd{1, 0.5}.mix(facts(0, 1, 0)).a == 1);
}

TEST_CASE("a selector chosen at run time is the one of its name") {
    row_facts f{};
    f.student_entropy = 1, f.teacher_entropy = 2, f.overlap = 0.5, f.position = 3, f.log_ratio = -0.4, f.value = 0.7;
    const auto same = [&](choice::selector which, double a, double b, const auto& s) {
        const any_selector chosen{which, a, b};
        CHECK(chosen.reads() == s.reads());
        chosen.validate();
        for (const double scale : {0.1, 1., 10.}) {
            row_facts g = f;
            g.student_entropy *= scale, g.overlap *= scale, g.position *= scale, g.log_ratio *= scale, g.value *= scale;
            CHECK(chosen(g) == s(g));
        }
    };
    same(choice::selector::all, 0, 0, selector::all{});
    same(choice::selector::tip, 1.5, 0.6, selector::tip{1.5, 0.6});
    same(choice::selector::prefix, 4, 0, selector::prefix{4});
    same(choice::selector::agreed, 0.6, 0, selector::agreed{0.6});
    same(choice::selector::band, 0.3, 0, selector::band{0.3});
    CHECK_THROWS_WITH_AS((any_selector{choice::selector::eopd}.validate()), doctest::Contains("mixes a weighted_sum"),
                         invalid_input);
    CHECK_THROWS_AS((any_selector{choice::selector::prefix, -1}.validate()), invalid_input);
    any_selector{choice::selector::band, 1}.validate_for(fact::of_tokens);
    CHECK_THROWS_AS((any_selector{choice::selector::band, 1}.validate_for(fact::of_dense)), invalid_input);
    for (const auto& line : choice::selectors) CHECK(choice::find(choice::selectors, line.text) == line.which);
}

TEST_CASE("what selectors refuse") {
    const std::vector<float> z{0, 1, 2}, y{2, 1, 0};
    std::vector<float> dz(3, 9.F);
    cpu_backend be;
    const auto refused = [&](const char* what, const auto& estimator) {
        CHECK_THROWS_WITH_AS(evaluate(be, student::logits{view(z.data(), 1, 3), view(dz.data(), 1, 3)},
                                      teacher::dense{view(y.data(), 1, 3)}, estimator),
                             doctest::Contains(what), invalid_input);
        CHECK(dz[0] == 9);
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    refused("env.offsets", selected{reverse_kl{}, selector::prefix{3}});
    refused("selector: prefix", selected{reverse_kl{}, selector::prefix{-1}});
    refused("selector: tip", selected{reverse_kl{}, selector::tip{nan, 0}});
    refused("selector: agreed", selected{reverse_kl{}, selector::agreed{1.5}});
    refused("selector: eopd", eopd(nan));
    refused("selector: eopd", eopd(1, -1));
    refused("weighted_sum", weighted_sum{reverse_kl{}, forward_kl{}, -1, 1});
    refused("jsd.w", selected{jsd{.w = 2}, selector::tip{}});
    struct chosen_late {
        unsigned what;
        unsigned reads() const { return what; }
        double operator()(const row_facts&) const { return 1; }
    };
    refused("selector: reads what these rows do not know", selected{reverse_kl{}, chosen_late{fact::drawn}});
    refused("env.offsets", selected{reverse_kl{}, chosen_late{fact::position}});
}
