// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The divergences' formulas: the row programs against the textbook's sums over p and q, and their gradients against
// central differences of those sums, through the naive backend (programs unanchored) and through the CPU backend with
// double as number type (programs anchored).
#include "support/compiled/dense_double.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/textbook.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <opd/backends/cpu.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// Moves y until no entry has p near q: total variation has its kinks there.
void leave_kinks(buffers<double>& b) {
    for (index_t r = 0; r < b.p.rows; ++r) {
        const double* z = b.z.data() + r * (b.p.vocab + b.p.pad_z);
        double* y = b.y.data() + r * (b.p.vocab + b.p.pad_y);
        for (int tries = 0; tries < 200; ++tries) {
            const auto t = textbook::make_row(z, y, b.p.vocab, b.p.temperature_p, b.p.temperature_q);
            index_t close = -1;
            for (index_t v = 0; v < b.p.vocab; ++v)
                if (std::abs(t.log_p[std::size_t(v)] - t.log_q[std::size_t(v)]) < 2e-3L) close = v;
            if (close < 0 || b.p.vocab == 1) break;
            y[close] += 0.05 * double(tries + 1);
        }
    }
}

/// -Inf on one side only that leaves the value finite.
template <class D>
bool finite_on(const D& d, flavour f) {
    return !(f == flavour::teacher_gap && detail::infinite_where_teacher_zero(d)) &&
           !(f == flavour::student_gap && detail::infinite_where_student_zero(d));
}

template <class Backend, class D>
void matches_textbook(Backend& backend, const std::string& name, const D& d) {
    problem_options shapes{.largest_vocab = 40, .smallest_rows = 1, .largest_rows = 3};
    for (const flavour f : {flavour::wide, flavour::near_equal, flavour::peaked, flavour::filtered,
                            flavour::student_gap, flavour::teacher_gap, flavour::one_hot})
        if (finite_on(d, f)) shapes.kinds.push_back(f);
    std::erase(shapes.kinds, flavour::equal); // a kink of total variation; equality has properties of its own
    property(name + " is the textbook's value and its derivative",
             [&] {
                 const problem p = *problems(shapes);
                 if (std::is_same_v<D, total_variation>)
                     RC_PRE(p.kind != flavour::near_equal && p.kind != flavour::one_hot);
                 buffers<double> b(p);
                 if (std::is_same_v<D, total_variation>) leave_kinks(b);
                 std::vector<float> losses(std::size_t(p.rows));
                 env e{.reduction = reduce::sum};
                 const double total = evaluate(backend, b.student(), b.teacher(), d, e).loss;
                 double sum = 0;
                 for (index_t r = 0; r < p.rows; ++r) {
                     const auto t = textbook::make_row(b.z_view().row(r), b.y_view().row(r), p.vocab, p.temperature_p,
                                                       p.temperature_q);
                     const double value = double(textbook::value(d, t));
                     sum += value;
                     const auto want = textbook::gradient(d, t);
                     double top = 0;
                     for (const auto g : want) top = std::max(top, double(std::abs(g)));
                     // c of the size of the value cancels where one token has nearly all mass
                     const double bound = 1e-9 * top + 1e-11 * std::max(1.0, std::abs(value));
                     for (index_t v = 0; v < p.vocab; ++v) {
                         const double got = b.dz_view()(r, v);
                         if (!(std::abs(got - double(want[std::size_t(v)])) <= bound))
                             RC_FAIL("row " + std::to_string(r) + " entry " + std::to_string(v) + ": " +
                                     std::to_string(got) + ", not " + std::to_string(double(want[std::size_t(v)])));
                     }
                 }
                 if (!(std::abs(total - sum) <= 1e-11 * std::max(1.0, std::abs(sum))))
                     RC_FAIL("value " + std::to_string(total) + ", not " + std::to_string(sum));
             },
             {.cases = 60});
}

} // namespace

TEST_CASE("naive backend: value and gradient of every divergence") {
    naive_backend backend;
    for_each_divergence([&](const std::string& name, auto d) { matches_textbook(backend, name, d); });
}

TEST_CASE("CPU backend with double as number type: value and gradient of every divergence") {
    cpu_backend backend;
    for_each_divergence([&](const std::string& name, auto d) { matches_textbook(backend, name, d); });
}

TEST_CASE("identities between the divergences") {
    naive_backend backend;
    property("skews, ends and symmetry", [&] {
        const problem p = *problems({.largest_vocab = 40, .smallest_rows = 1});
        buffers<double> b(p);
        const auto loss = [&](auto d) { return evaluate(backend, b.value_only(), b.teacher(), d).loss; };
        const auto swapped = [&](auto d) {
            const student::logits<double> s{b.y_view(), {}, p.temperature_q};
            return evaluate(backend, s, teacher::dense<double>{b.z_view(), p.temperature_p}, d).loss;
        };
        const auto same = [](double x, double y) {
            if (!(std::abs(x - y) <= 1e-11 * std::max(1.0, std::abs(x))))
                RC_FAIL(std::to_string(x) + " and " + std::to_string(y));
        };
        same(loss(forward_kl{}), swapped(reverse_kl{}));
        same(loss(jsd{}), swapped(jsd{}));
        same(loss(skew_forward_kl{.a = .2}), swapped(skew_reverse_kl{.a = .2}));
        same(loss(total_variation{}), swapped(total_variation{}));
        same(loss(alpha_divergence{.a = .3}), swapped(alpha_divergence{.a = .7}));
        same(loss(chi_squared{}), 2 * loss(alpha_divergence{.a = 2}));
        same(loss(jsd{.w = .3, .o = .6}), .6 * loss(skew_forward_kl{.a = .3}) + .4 * loss(skew_reverse_kl{.a = .7}));
    });
}

TEST_CASE("a number by hand: p = (.5,.3,.2), q = (.2,.3,.5)") {
    const double z[] = {std::log(.5), std::log(.3), std::log(.2)}, y[] = {std::log(.2), std::log(.3), std::log(.5)};
    const auto loss = [&](auto d) {
        naive_backend backend;
        return evaluate(backend, student::logits{view(z, 1, 3)}, teacher::dense{view(y, 1, 3)}, d).loss;
    };
    CHECK(loss(reverse_kl{}) == doctest::Approx(.3 * std::log(2.5)));
    CHECK(loss(forward_kl{}) == doctest::Approx(.3 * std::log(2.5)));
    CHECK(loss(total_variation{}) == doctest::Approx(.3));
    CHECK(loss(jsd{}) == doctest::Approx(.5 * std::log(.5 / .35) + .2 * std::log(.2 / .35)));
    CHECK(loss(chi_squared{}) == doctest::Approx(.25 / .2 + .3 + .04 / .5 - 1));
    CHECK(loss(alpha_divergence{.a = .5}) == doctest::Approx(4 * (1 - .3 - 2 * std::sqrt(.1))));
}

// Found by enumeration of draws: the slope's series had float's terms in double, too.
TEST_CASE("the slope of a Jensen-Shannon divergence of two weights has double's digits in double") {
    using F = scalar<double>;
    for (const double w : {.05, .3, .5, .9})
        for (const double o : {.1, .5, .8})
            for (double d = -6; d <= 6; d += 0.013) {
                const jsd divergence{.w = w, .o = o};
                const double q = .1, p = q * std::exp(d);
                const dense_entry<F> e{F(p), F(q), F(d), F(std::log(p)), F(std::log(q))};
                const row_constants<F> row{F(1), F(1), F(0), F(1)};
                const long double x = std::expm1(-static_cast<long double>(d)), wl = w, ol = o; // q/p - 1
                const long double excess = std::log1p(wl * x), rest = wl * x / (1 + wl * x);
                const long double slope =
                    -(1 - ol) * (excess - rest) - ((1 - ol) * wl + ol * (1 - wl) * (1 - wl) / wl) * rest;
                CAPTURE(w);
                CAPTURE(o);
                CAPTURE(d);
                CHECK(std::abs(divergence.c(row, e).v / p - double(slope)) < 4e-15 * (1 + std::abs(double(slope))));
            }
}

TEST_CASE("parameters outside their range are refused by name") {
    const double z[] = {0, 1};
    naive_backend backend;
    const auto refused = [&](auto d, const char* text) {
        CHECK_THROWS_WITH_AS(evaluate(backend, student::logits{view(z, 1, 2)}, teacher::dense{view(z, 1, 2)}, d),
                             doctest::Contains(text), invalid_input);
    };
    refused(jsd{.w = 0, .o = .5}, "jsd.w: must lie strictly between 0 and 1");
    refused(jsd{.w = 1, .o = .5}, "jsd.w");
    refused(jsd{.w = .5, .o = 1.5}, "jsd.o: must lie in [0, 1]");
    refused(skew_forward_kl{.a = 0}, "skew_forward_kl.a");
    refused(skew_reverse_kl{.a = 1}, "skew_reverse_kl.a");
    refused(jsd{.w = std::nan(""), .o = .5}, "jsd.w");
}
