// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// What estimators of drawn tokens descend, by exact enumeration: every divergence and every shape of the log-ratio has
// the gradient of the divergence that it says, at any staleness, and its value; every baseline leaves the mean alone;
// each composition does what its traits say, and where they say bias, the bias shows.
#include "support/drawn.hpp"
#include "support/property.hpp"
#include "support/textbook.hpp"
#include "support/traits.hpp"

#include <cmath>
#include <string>
#include <vector>

#include <opd/estimators/sampled.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t vocab = 5;

textbook::row row_of(const policies& w) {
    return textbook::make_row(w.z.data(), w.y.data(), w.vocab, double(w.temperature), 1);
}
std::vector<double> as_doubles(const textbook::reals& x) { return {x.begin(), x.end()}; }
template <class D>
std::vector<double> dense_gradient(const policies& w, const D& d) {
    return as_doubles(textbook::gradient(d, row_of(w)));
}
std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
    for (std::size_t v = 0; v < a.size(); ++v) a[v] -= b[v];
    return a;
}
/// The pullback of c[v] = weight(v).
template <class C>
std::vector<double> pulled(const policies& w, C weight) {
    std::vector<double> c;
    for (std::size_t v = 0; v < w.z.size(); ++v) c.push_back(weight(v));
    return w.pullback(c);
}

} // namespace

/// Divergences that have no struct of their own in the library, from their definitions.
namespace opd::test::textbook {

struct clipped_kl {
    real a;
};
inline real value(const clipped_kl& d, const row& r) { // Σ q f(r), f' = log r within ±a, f(1) = 0
    const auto f = [&](real t) {
        const real high = std::exp(d.a), low = std::exp(-d.a);
        const auto inner = [](real x) { return x * std::log(x) - x + 1; };
        if (t > high) return inner(high) + d.a * (t - high);
        if (t < low) return inner(low) - d.a * (t - low);
        return inner(t);
    };
    real s = 0;
    for (std::size_t v = 0; v < r.log_p.size(); ++v) s += std::exp(r.log_q[v]) * f(std::exp(r.log_p[v] - r.log_q[v]));
    return s;
}
struct mixed_kl {
    real alpha;
};
inline real value(const mixed_kl& d, const row& r) {
    return kl(r.log_p, r.log_q) - kl(mixture(d.alpha, r.log_q, r.log_p), r.log_q) / (1 - d.alpha);
}
struct times_kl {
    real by;
};
inline real value(const times_kl& d, const row& r) { return d.by * kl(r.log_p, r.log_q); }

/// ½ Σ (p - q)²: separable, but no f-divergence.
struct squared_error {
    template <class F>
    F term(const row_constants<F>&, const dense_entry<F>& e) const {
        return F(0.5) * (e.p - e.q) * (e.p - e.q);
    }
    template <class F>
    F c(const row_constants<F>&, const dense_entry<F>& e) const {
        return e.p * (e.p - e.q);
    }
};
inline real value(const squared_error&, const row& r) {
    real s = 0;
    for (std::size_t v = 0; v < r.log_p.size(); ++v) {
        const real gap = std::exp(r.log_p[v]) - std::exp(r.log_q[v]);
        s += gap * gap / 2;
    }
    return s;
}

} // namespace opd::test::textbook

namespace {

/// f(name, what mc is of, the textbook's divergence) for every divergence, shape and one of a user's.
template <class Visit>
void for_each_objective(Visit f) {
    for_each_divergence([&](const std::string& name, auto d) { f(name, d, d); });
    f("clip(.7)", shape::clipped{.7}, textbook::clipped_kl{.7L});
    f("clip(5)", shape::clipped{5}, textbook::clipped_kl{5});
    f("mixed(.3)", shape::mixed{.3}, textbook::mixed_kl{.3L});
    f("mixed(.9)", shape::mixed{.9}, textbook::mixed_kl{.9L});
    f("box-cox(.4)", shape::box_cox{.4}, alpha_divergence{.6});
    f("box-cox(-1)", shape::box_cox{-1}, alpha_divergence{2});
    f("box-cox(0)", shape::box_cox{0}, reverse_kl{});
    f("box-cox(1)", shape::box_cox{1}, forward_kl{});
    f("box-cox(2)", shape::box_cox{2}, alpha_divergence{-1});
    f("sign", shape::sign{}, total_variation{});
    f("log-ratio", shape::log_ratio{}, reverse_kl{});
    f("scaled(3)", shape::scaled{3}, textbook::times_kl{3});
    f("squared error", textbook::squared_error{}, textbook::squared_error{});
}

} // namespace

TEST_CASE("every divergence and every shape from stale samples: the dense gradient and the value in the mean") {
    for (const std::uint64_t seed : {3, 8}) {
        const policies w(vocab, seed, true, 0.8F);
        for_each_objective([&](const std::string& name, const auto& of, const auto& divergence) {
            INFO(name << ", seed " << seed);
            const auto want = dense_gradient(w, divergence);
            const auto value = double(textbook::value(divergence, row_of(w)));
            for (const law drawn : {law::stale, law::on_policy, law::teacher}) {
                const drawn_mean got = drawn_expectation(w, drawn, 2, mc{of});
                CHECK(distance(got.dz, want) < 1e-10);
                CHECK(std::abs(got.loss - value) < 1e-10 * (1 + std::abs(value)));
            }
            CHECK(mc<std::remove_cvref_t<decltype(of)>>::traits(law::stale).mean == bias::unbiased);
        });
    }
}

TEST_CASE("what student and mu never draw adds nothing to a value, where the divergence is finite there") {
    for (const bool of_mu : {false, true}) { // mu still draws it, or does no longer
        policies w(vocab, 5, true);
        const auto drop = [&](std::vector<double>& logits, std::vector<double>& log_p) {
            double lse = 0;
            logits[2] = -INFINITY, log_p.clear();
            naive_backend::log_softmax(logits.data(), vocab, 1, nullptr, &lse, log_p);
        };
        drop(w.z, w.log_p);
        if (of_mu) drop(w.b, w.log_mu);
        for_each_objective([&](const std::string& name, const auto& of, const auto& divergence) {
            if (mc{of}.infinite_where_student_zero()) return;
            if (of_mu && name == "squared error") return; // no f, and so no f(0) to take away
            INFO(name << (of_mu ? ", not in mu" : ""));
            drawn_mean got{0, std::vector<double>(vocab, 0.0)};
            for (std::int64_t id = 0; id < vocab; ++id) {
                const double mu = std::exp(w.log_mu[std::size_t(id)]);
                if (!(mu > 0)) continue;
                const drawn_mean one = drawn_row(w, law::stale, {id}, mc{of});
                CHECK(!one.infinite);
                got.loss += mu * one.loss;
                for (std::size_t v = 0; v < vocab; ++v) got.dz[v] += mu * one.dz[v];
            }
            CHECK(got.loss == doctest::Approx(double(textbook::value(divergence, row_of(w)))).epsilon(1e-9));
            CHECK(distance(got.dz, dense_gradient(w, divergence)) < 1e-9);
        });
    }
}

TEST_CASE("at p = q nothing moves, whatever was drawn") {
    policies w(vocab, 9, true);
    w.log_q = w.log_p;
    for_each_objective([&](const std::string& name, const auto& of, const auto&) {
        INFO(name);
        for (std::int64_t id = 0; id < vocab; ++id) {
            const drawn_mean got = drawn_row(w, law::stale, {id, (id + 1) % vocab}, mc{of});
            CHECK(std::abs(got.loss) < 1e-14);
            for (const double g : got.dz) CHECK(std::abs(g) < 1e-14);
        }
    });
}

TEST_CASE("shapes rise, and their values are what they say near the ends") {
    const auto check = [](const std::string& name, const auto& s) {
        INFO(name);
        double before = s(-1e6);
        CHECK(std::isfinite(before));
        for (double x = -60; x <= 60; x += 0.01) {
            const double a = s(x);
            CHECK(a >= before - 1e-12);
            CHECK(std::isfinite(s.value(x)));
            before = a;
        }
        CHECK(std::isfinite(s(1e6)));
        CHECK(std::isfinite(s.value(1e6)));
        CHECK(std::isfinite(s.value(-1e6)));
        CHECK(std::abs(s.value(0)) < 1e-14);
    };
    check("clipped", shape::clipped{2}), check("mixed", shape::mixed{.3}), check("box-cox", shape::box_cox{.4});
    check("box-cox -2", shape::box_cox{-2}), check("box-cox 1", shape::box_cox{1}), check("sign", shape::sign{});
    check("scaled", shape::scaled{3}), check("log-ratio", shape::log_ratio{});
    CHECK(shape::mixed{.3}(-1e6) == doctest::Approx(std::log(.7)));
    CHECK(shape::mixed{.3}(30) == doctest::Approx(std::log(.3) + 30));
    CHECK(shape::clipped{2}(3) == 2);
    CHECK(shape::clipped{2}(-3) == -2);
    CHECK(shape::band{2}(3) == 0); // it falls
    CHECK(shape::band{2}(1.5) == 1.5);
    static_assert(!shape::band::monotone);
}

TEST_CASE("baselines leave the mean alone; the best constant, given, saves variance") {
    double plain = 0, best = 0, others = 0;
    for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
        const policies w(vocab, seed, true);
        const auto check = [&](const auto& of, const auto& divergence) {
            const auto want = dense_gradient(w, divergence);
            double given = 0, squares = 0; // Σ p rho |∇log p|² A / Σ p rho |∇log p|²
            for (std::size_t v = 0; v < vocab; ++v) {
                sampled_entry x{};
                x.log_p = w.log_p[v], x.log_q = w.log_q[v], x.log_mu = w.log_mu[v];
                double size = 1 - 2 * std::exp(w.log_p[v]);
                for (const double lp : w.log_p) size += std::exp(2 * lp);
                size *= std::exp(2 * w.log_p[v] - w.log_mu[v]);
                given += size * mc{of}.worth()(x), squares += size;
            }
            const auto with = [&](auto b) {
                const drawn_mean got =
                    drawn_expectation(w, law::stale, 3, mc{.of = of, .baseline = b},
                                      [&](sampled_entry&, entry_facts& facts) { facts.baseline = given / squares; });
                CHECK(distance(got.dz, want) < 1e-10);
                CHECK(std::abs(got.loss - double(textbook::value(divergence, row_of(w)))) < 1e-10); // it has none
                return got.second_moment;
            };
            plain += with(baseline::none{}), best += with(baseline::given{});
            others += with(baseline::leave_one_out{});
            with(baseline::self_normalised{}), with(baseline::minimum_variance{});
            with(baseline::exact_entries{});
        };
        check(reverse_kl{}, reverse_kl{});
        check(shape::clipped{.7}, textbook::clipped_kl{.7L});
        check(total_variation{}, total_variation{});
    }
    CHECK(best < 0.95 * plain);
    CHECK(others > plain); // so few draws of so few tokens tell little of each other
}

/// The minimum-variance form over all draws, the entry's own among them.
struct over_all_draws {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind) { return true; }
    double ga = 0, g = 0;
    void add(const sampled_entry&, double rho, double a) { ga += rho * rho * a, g += rho * rho; }
    double of(const sampled_entry&, double, double, int) const { return ga / g; }
};

TEST_CASE("control: a baseline from the same draws is biased") {
    const policies w(vocab, 4, true);
    const auto want = dense_gradient(w, reverse_kl{});
    CHECK(distance(drawn_expectation(w, law::stale, 2, mc{.baseline = over_all_draws{}}).dz, want) > 1e-2);
}

TEST_CASE("minimum variance by hand: the others' A, weighted by (rho (1 - p))²") {
    const policies w(vocab, 44, true);
    const std::vector<std::int64_t> ids{3, 0, 2};
    const auto rho = [&](std::size_t v) { return std::exp(w.log_p[v] - w.log_mu[v]); };
    const auto a = [&](std::size_t v) { return w.log_q[v] - w.log_p[v]; };
    std::vector<double> c(vocab, 0.0);
    for (std::size_t i = 0; i < 3; ++i) {
        double ga = 0, g = 0;
        for (std::size_t j = 0; j < 3; ++j) {
            const auto v = std::size_t(ids[j]);
            const double size = std::pow(rho(v) * (1 - std::exp(w.log_p[v])), 2);
            if (j != i) ga += size * a(v), g += size;
        }
        const auto v = std::size_t(ids[i]);
        c[v] -= rho(v) * (a(v) - ga / g) / 3;
    }
    CHECK(distance(drawn_row(w, law::stale, ids, mc{.baseline = baseline::minimum_variance{}}).dz, w.pullback(c)) <
          1e-13);
}

TEST_CASE("value and exact entries on weighted rows: E_p[A] over the certain, whole or normalised") {
    const policies w(vocab, 12, true);
    // three ids for certain, one of the other two with probability mu/(mu + mu'): weights mu and mu/probability
    const auto mu = [&](std::size_t v) { return std::exp(w.log_mu[v]); };
    const auto row = [&](std::size_t last, const auto& e) {
        std::vector<sampled_entry> entries;
        for (std::size_t v : {std::size_t(0), std::size_t(1), std::size_t(2), last}) {
            sampled_entry x{};
            x.id = index_t(v), x.log_p = w.log_p[v], x.log_q = w.log_q[v];
            x.log_mu = x.log_prox = x.log_ref = w.log_mu[v];
            x.exact = v < 3, x.keep = true, x.factor = 1;
            x.weight = v < 3 ? mu(v) : mu(3) + mu(4);
            entries.push_back(x);
        }
        diagnostics d;
        entry_facts facts;
        facts.iid = false;
        CHECK(!e.row(entries.data(), 4, facts, d).bad);
        CHECK(d.variance_rows == 0);
        std::vector<double> c(vocab, 0.0);
        for (const auto& x : entries) c[std::size_t(x.id)] += x.c;
        return w.pullback(c);
    };
    const auto want = dense_gradient(w, reverse_kl{});
    const auto check = [&](auto b) {
        const auto e = mc{.baseline = b};
        const auto with3 = row(3, e), with4 = row(4, e);
        std::vector<double> mean;
        for (std::size_t v = 0; v < vocab; ++v) mean.push_back((mu(3) * with3[v] + mu(4) * with4[v]) / (mu(3) + mu(4)));
        CHECK(distance(mean, want) < 1e-12);
        return with3;
    };
    const auto none = check(baseline::none{}), exact = check(baseline::exact_entries{}),
               value = check(baseline::value{});
    // c moves by w rho b, and Σ w rho is not 1 in a row of four: the baselines differ by their b alone
    double pa = 0, p = 0;
    for (std::size_t v = 0; v < 3; ++v)
        pa += std::exp(w.log_p[v]) * (w.log_q[v] - w.log_p[v]), p += std::exp(w.log_p[v]);
    const auto moved_by = [&](double b) {
        return pulled(w, [&](std::size_t v) {
            return v == 4 ? 0 : b * std::exp(w.log_p[v] - w.log_mu[v]) * (v < 3 ? mu(v) : mu(3) + mu(4));
        });
    };
    CHECK(distance(minus(value, none), moved_by(pa)) < 1e-13);
    CHECK(distance(minus(exact, none), moved_by(pa / p)) < 1e-13);
}

TEST_CASE("the list of compositions: what each descends") {
    for (const std::uint64_t seed : {21, 22}) {
        const policies w(vocab, seed, true);
        const auto reverse = dense_gradient(w, reverse_kl{}), forward = dense_gradient(w, forward_kl{});
        const auto p = [&](std::size_t v) { return std::exp(w.log_p[v]); };
        const auto q = [&](std::size_t v) { return std::exp(w.log_q[v]); };
        const auto mu = [&](std::size_t v) { return std::exp(w.log_mu[v]); };
        const auto x = [&](std::size_t v) { return w.log_q[v] - w.log_p[v]; };
        const auto descends = [&](law drawn, const auto& e, const std::vector<double>& want) {
            const auto got = drawn_expectation(w, drawn, 2, e);
            CHECK(distance(got.dz, want) < 1e-10);
        };
        const std::vector<double> nothing(vocab, 0.0);
        // reverse KL whatever mu
        descends(law::stale, mc{reverse_kl{}}, reverse);
        // rho sg(A_old): KL(p‖q) - KL(p‖mu)
        const auto drifting = minus(reverse, w.gradient_of_kl(w.log_mu));
        descends(law::stale, accept_bias{mc{advantage::old{}}}, drifting);
        CHECK(distance(drifting, reverse) > 1e-3);
        descends(law::on_policy, mc{advantage::old{}}, reverse);
        // the score function: on policy right, on stale tokens Σ mu A ∇log p
        descends(law::on_policy, mc{reverse_kl{}, score_function{}}, reverse);
        const auto scored = pulled(w, [&](std::size_t v) { return -mu(v) * x(v); });
        descends(law::stale, accept_bias{mc{reverse_kl{}, score_function{}}}, scored);
        CHECK(distance(scored, reverse) > 1e-2);
        // k1, k2, k3 differentiated: nothing, reverse, forward; with the ratio on stale tokens the same
        const auto k = [](auto form, auto with_ratio) {
            return mc{reverse_kl{}, differentiated<decltype(form), decltype(with_ratio)::value>{}, baseline::none{}};
        };
        const std::false_type plain;
        const std::true_type ratio;
        descends(law::on_policy, k(k1{}, plain), nothing);
        descends(law::on_policy, k(k2{}, plain), reverse);
        descends(law::on_policy, k(k3{}, plain), forward);
        descends(law::stale, k(k1{}, ratio), nothing);
        descends(law::stale, k(k2{}, ratio), reverse);
        descends(law::stale, k(k3{}, ratio), forward);
        // stale and without ratio: k1 is -KL(mu‖p), the others no divergence of p and q
        descends(law::stale, k(k1{}, plain), pulled(w, [&](std::size_t v) { return mu(v); }));
        descends(law::stale, k(k2{}, plain), pulled(w, [&](std::size_t v) { return -mu(v) * x(v); }));
        descends(law::stale, k(k3{}, plain), pulled(w, [&](std::size_t v) { return mu(v) * (1 - q(v) / p(v)); }));
        // as detached rewards
        descends(law::on_policy, mc{advantage::reward<k1>{}}, reverse);
        descends(law::on_policy, mc{advantage::reward<k2>{}},
                 pulled(w, [&](std::size_t v) { return p(v) * 0.5 * x(v) * x(v); }));
        descends(law::on_policy, mc{advantage::reward<k3>{}}, minus(reverse, forward));
        descends(law::stale, mc{advantage::reward<k3>{}}, minus(reverse, forward));
        // a reward of the state alone: nothing on policy, c0 (mu - p) on stale tokens without a ratio
        const fill_in same = [](sampled_entry& e, entry_facts&) { e.outside = 0.7; };
        CHECK(distance(drawn_expectation(w, law::stale, 2, mc{advantage::outside{}}, same).dz, nothing) < 1e-12);
        CHECK(distance(drawn_expectation(w, law::stale, 2, mc{advantage::outside{}, score_function{}}, same).dz,
                       pulled(w, [&](std::size_t v) { return -0.7 * mu(v); })) < 1e-12);
        // forward KL from the teacher's draws, and from any that cover it
        descends(law::teacher, sampled_forward_kl{}, forward);
        descends(law::stale, sampled_forward_kl{}, forward);
        CHECK(drawn_expectation(w, law::teacher, 2, sampled_forward_kl{}).loss ==
              doctest::Approx(double(textbook::value(forward_kl{}, row_of(w)))));
        // extrapolation: reverse KL to the tilted teacher q^λ p_ref^(1-λ), normalised
        std::vector<double> reference(w.log_q), tilted;
        for (std::size_t v = 0; v < vocab; ++v) reference[v] = std::log((q((v + 1) % vocab) + 0.1) / 1.5);
        double sum = 0;
        for (const double lambda : {1.5, 0.5}) {
            tilted.clear(), sum = 0;
            for (std::size_t v = 0; v < vocab; ++v)
                tilted.push_back(lambda * w.log_q[v] + (1 - lambda) * reference[v]), sum += std::exp(tilted.back());
            for (double& t : tilted) t -= std::log(sum);
            const fill_in ref = [&](sampled_entry& e, entry_facts&) { e.log_ref = reference[std::size_t(e.id)]; };
            const auto got = drawn_expectation(w, law::stale, 2, mc{advantage::extrapolated{lambda}}, ref);
            CHECK(distance(got.dz, w.gradient_of_kl(tilted)) < 1e-10);
            CHECK(got.loss == doctest::Approx(w.kl(tilted) - std::log(sum)));
        }
        // a shape of A_old is no divergence
        CHECK(distance(drawn_expectation(w, law::stale, 2,
                                         accept_bias{mc{advantage::shaped{shape::clipped{.7}, advantage::old{}}}})
                           .dz,
                       dense_gradient(w, textbook::clipped_kl{.7L})) > 1e-2);
        // a reward and the teacher: the sum of both
        const fill_in task = [](sampled_entry& e, entry_facts&) { e.outside = double(e.id) - 1.5; };
        const auto task_alone = pulled(w, [&](std::size_t v) { return -p(v) * (double(v) - 1.5); });
        std::vector<double> both;
        for (std::size_t v = 0; v < vocab; ++v) both.push_back(0.5 * task_alone[v] + 2 * reverse[v]);
        CHECK(distance(drawn_expectation(w, law::stale, 2, mc{advantage::outside{}}, task).dz, task_alone) < 1e-10);
        CHECK(distance(drawn_expectation(w, law::stale, 2, mc{advantage::mixed{.outside = 0.5, .teacher = 2}}, task).dz,
                       both) < 1e-10);
    }
}

TEST_CASE("traits are what the enumeration shows") {
    const policies w(vocab, 31, true);
    const auto gradient_of = [&](descent d) {
        const auto reverse = dense_gradient(w, reverse_kl{}), forward = dense_gradient(w, forward_kl{});
        return d == descent::forward ? forward
                                     : (d == descent::reverse_minus_forward ? minus(reverse, forward) : reverse);
    };
    int other = 0, right = 0;
    const auto check = [&](const char* name, const auto& e, law drawn) {
        CAPTURE(name);
        const estimator_traits t = traits_of<std::remove_cvref_t<decltype(e)>>(drawn);
        const auto got = drawn_expectation(w, drawn, 2, e).dz;
        if (t.descends == descent::none) {
            CHECK(distance(got, std::vector<double>(vocab, 0.0)) < 1e-12);
        } else if (t.descends == descent::other) {
            CHECK(distance(got, gradient_of(descent::reverse)) > 1e-3);
            ++other;
        } else if (t.mean == bias::unbiased) {
            CHECK(distance(got, gradient_of(t.descends)) < 1e-10);
            ++right;
        } else {
            CHECK(distance(got, gradient_of(t.descends)) > 1e-4);
        }
    };
    for (const law drawn : {law::stale, law::on_policy}) {
        check("mc", mc{reverse_kl{}}, drawn);
        check("leave-one-out", mc{.baseline = baseline::leave_one_out{}}, drawn);
        check("score function", mc{reverse_kl{}, score_function{}}, drawn);
        check("old", mc{advantage::old{}}, drawn);
        check("k1", mc{reverse_kl{}, differentiated<k1>{}, baseline::none{}}, drawn);
        check("k2", mc{reverse_kl{}, differentiated<k2>{}, baseline::none{}}, drawn);
        check("k3", mc{reverse_kl{}, differentiated<k3>{}, baseline::none{}}, drawn);
        check("k1, ratio", mc{reverse_kl{}, differentiated<k1, true>{}, baseline::none{}}, drawn);
        check("k2, ratio", mc{reverse_kl{}, differentiated<k2, true>{}, baseline::none{}}, drawn);
        check("k3, ratio", mc{reverse_kl{}, differentiated<k3, true>{}, baseline::none{}}, drawn);
        check("k1 reward", mc{advantage::reward<k1>{}}, drawn);
        check("k2 reward", mc{advantage::reward<k2>{}}, drawn);
        check("k3 reward", mc{advantage::reward<k3>{}}, drawn);
        check("band", mc{shape::band{0.5}}, drawn);
        check("forward", sampled_forward_kl{}, drawn);
    }
    check("self-normalised", mc{.weighting = weighting::self_normalised{}}, law::stale);
    check("truncated", mc{reverse_kl{}, truncated_is{1}}, law::stale);
    check("cispo", mc{reverse_kl{}, cispo{}}, law::stale);
    check("ppo", mc{reverse_kl{}, ppo_clip{}}, law::stale);
    check("a3po", mc{reverse_kl{}, a3po{}}, law::stale);
    check("gspo", mc{reverse_kl{}, gspo{}}, law::stale);
    CHECK(other == 9);
    CHECK(right == 18);
    static_assert(traits_of<decltype(mc{.weighting = weighting::self_normalised{}})>().mean == bias::consistent);
    static_assert(traits_of<decltype(lightning(5))>(law::stale).descends == descent::outside);
    static_assert(traits_of<decltype(uncorrected_mc())>(law::stale).mean == bias::biased);
}

TEST_CASE("self-normalised weights: bounded, and right for many draws") {
    const policies w(3, 2, true);
    const auto want = dense_gradient(w, reverse_kl{});
    double before = 1;
    for (const index_t m : {1, 2, 4, 8}) {
        const auto got = drawn_expectation(w, law::stale, m, mc{.weighting = weighting::self_normalised{}});
        const double off = distance(got.dz, want);
        CHECK(off < before);
        before = off;
    }
    CHECK(before <
          0.25 * distance(drawn_expectation(w, law::stale, 1, mc{.weighting = weighting::self_normalised{}}).dz, want));
    // by hand: w rho / Σ w rho of each draw
    const std::vector<std::int64_t> ids{2, 0};
    double sum = 0;
    for (const auto id : ids) sum += std::exp(w.log_p[std::size_t(id)] - w.log_mu[std::size_t(id)]);
    const auto c = pulled(w, [&](std::size_t v) {
        return v == 1 ? 0 : -std::exp(w.log_p[v] - w.log_mu[v]) / sum * (w.log_q[v] - w.log_p[v]);
    });
    CHECK(distance(drawn_row(w, law::stale, ids, mc{.weighting = weighting::self_normalised{}}).dz, c) < 1e-14);
}

TEST_CASE("tokens that the teacher or the student all but forbids: finite numbers, or an infinite row") {
    policies w(vocab, 19, true);
    const auto row = [&](const auto& e) { return drawn_row(w, law::stale, {0, 1, 2}, e); };
    const auto finite = [](const drawn_mean& got) {
        bool all = std::isfinite(got.loss) && std::isfinite(got.seen.teacher_kl_sum) && std::isfinite(got.seen.k3_sum);
        for (const double g : got.dz) all &= std::isfinite(g) && std::abs(g) < 1e38;
        return all;
    };
    for (const double gap : {50.0, 300.0, 800.0, double(INFINITY)})
        for (const int side : {0, 1}) {
            policies at = w;
            (side ? at.log_p : at.log_q)[1] = gap < 1e4 ? -gap : -INFINITY;
            for_each_objective([&](const std::string& name, const auto& of, const auto&) {
                INFO(name << ", gap " << gap << ", side " << side);
                const drawn_mean got = drawn_row(at, law::stale, {0, 1, 2}, mc{of});
                CHECK(finite(got));
                CHECK(finite(drawn_row(at, law::stale, {0, 1, 2}, mc{of, ppo_clip{}})));
            });
            CHECK(finite(drawn_row(at, law::stale, {0, 1, 2}, sampled_forward_kl{})));
        }
    CHECK(finite(row(mc{reverse_kl{}})));
    policies far = w;
    far.log_q[1] = -800; // p/q beyond every float: chi-squared is infinite for what can be stored, and says so
    drawn_mean got = drawn_row(far, law::stale, {0, 1, 2}, mc{chi_squared{}});
    CHECK(got.loss == 0);
    for (const double g : got.dz) CHECK(g == 0);
    CHECK(drawn_row(far, law::stale, {0, 1, 2}, mc{shape::clipped{5}}).loss != 0);
    // a student that has left a token by more than a ratio can say: forward KL's c is still -w q/mu
    policies left = w;
    left.log_p[1] = left.log_mu[1] - 300;
    const double q = std::exp(left.log_q[1] - left.log_mu[1]);
    CHECK(distance(drawn_row(left, law::stale, {1}, mc{forward_kl{}}).dz,
                   pulled(left, [&](std::size_t v) { return v == 1 ? -q : 0; })) < 1e-9);
}

TEST_CASE("presets") {
    const policies w(vocab, 17, true);
    const auto by_hand = pulled(w, [&](std::size_t v) {
        const double a = w.log_q[v] - w.log_p[v];
        return -std::exp(w.log_mu[v]) * std::max(-.5, std::min(.5, a));
    });
    CHECK(distance(drawn_expectation(w, law::stale, 1, lightning(.5)).dz, by_hand) < 1e-12);
    CHECK(distance(drawn_expectation(w, law::stale, 2, uncorrected_mc()).dz,
                   drawn_expectation(w, law::stale, 2, mc{reverse_kl{}, score_function{}}).dz) < 1e-15);
}
