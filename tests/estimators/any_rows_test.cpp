// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences chosen at run time, as estimators of dense rows and of supports: the bits of the static form, and its
// sentences. optimise: no
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <opd/backends/cpu.hpp>
#include <opd/estimators/any.hpp>
#include <opd/estimators/support.hpp>
#include <opd/hidden.hpp>
#include <rapidcheck.h>

#include "support/generators.hpp"
#include "support/property.hpp"

using namespace opd;
using namespace opd::test;

namespace {

struct outcome {
    double loss = 0;
    index_t bad = 0, infinite = 0, selected = 0;
    std::vector<float> dz;
    std::string refused;
    bool operator==(const outcome&) const = default;
};
template <class Call>
outcome outcome_of(std::vector<float>& dz, Call&& call) {
    outcome o;
    try {
        const result r = call();
        o = {r.loss, r.diagnostics.bad_rows, r.diagnostics.infinite_rows, r.diagnostics.selector_left_out, {}, {}};
    } catch (const invalid_input& e) {
        o.refused = e.what();
    }
    o.dz = dz;
    return o;
}

any_dense drawn_divergence(numbers& u) {
    const auto& table = choice::divergences;
    any_dense d{table[std::size_t(u.below(index_t(table.size())))].which, .3, .6};
    if (u.below(8) == 0) d.a = -2; // not for all of them
    return d;
}

} // namespace

TEST_CASE("dense rows of any_dense have the bits of the divergence that it names") {
    property("dense", [] {
        const problem p = *problems({.largest_vocab = 1300,
                                     .kinds = {flavour::wide, flavour::near_equal, flavour::student_gap,
                                               flavour::teacher_gap, flavour::steep}});
        numbers u(p.seed);
        const any_dense d = drawn_divergence(u);
        const any_selector tip{choice::selector::tip, 1, .2};
        const bool selects = u.below(2) == 1;
        buffers<float> a(p), b(p);
        cpu_backend be;
        env e = a.masked_env();
        if (u.below(2) == 0) e.on_infinite = infinite::skip();
        const outcome chosen = outcome_of(a.dz, [&] {
            if (selects) return evaluate(be, a.student(), a.teacher(), selected{d, tip}, e);
            return evaluate(be, a.student(), a.teacher(), d, e);
        });
        const outcome named = outcome_of(b.dz, [&] {
            return d.visit([&](const auto& divergence) {
                if (selects) return evaluate(be, b.student(), b.teacher(), selected{divergence, tip}, e);
                return evaluate(be, b.student(), b.teacher(), divergence, e);
            });
        });
        CHECK(chosen == named);
    });
}

TEST_CASE("supports of a divergence chosen at run time have the bits of the static form") {
    property("supports", [] {
        const problem p = *problems({.largest_vocab = 300,
                                     .smallest_rows = 1,
                                     .kinds = {flavour::wide, flavour::near_equal, flavour::teacher_gap}});
        numbers u(p.seed);
        const any_dense d = drawn_divergence(u);
        buffers<float> a(p), b(p);
        const caches<float> cache(a, std::min<index_t>(p.vocab, 1 + u.below(6)), 2);
        const auto t = cache.support();
        cpu_backend be;
        const any_selector agreed{choice::selector::agreed, .3};
        const index_t form = u.below(5);
        const auto compare = [&](auto&& chosen, auto&& named) {
            const outcome x = outcome_of(a.dz, [&] { return evaluate(be, a.student(), t, chosen, a.masked_env()); });
            const outcome y = outcome_of(b.dz, [&] { return evaluate(be, b.student(), t, named, b.masked_env()); });
            CHECK(x == y);
        };
        d.visit([&]<class D>(const D& divergence) {
            if (form == 0) compare(renormalised{d}, renormalised{divergence});
            if (form == 1) compare(selected{renormalised{d}, agreed}, selected{renormalised{divergence}, agreed});
            if (form == 2) compare(any_tail_bucket{d}, tail_bucket{divergence});
            if constexpr (refinable_divergence<D> || std::is_same_v<D, total_variation>)
                if (form == 3) compare(any_partial{choice::partial::generalised, d}, generalised{divergence});
            if constexpr (std::is_same_v<D, reverse_kl> || std::is_same_v<D, forward_kl>)
                if (form == 4) compare(any_partial{choice::partial::truncated_biased, d}, truncated_biased{divergence});
        });
        // a sparse gradient
        std::vector<float> sparse(std::size_t(p.rows * cache.k)), again(sparse.size());
        const auto of = [&](std::vector<float>& dz) {
            return student::on_support<float>{
                .z = a.z_view(), .dz = view(dz.data(), p.rows, cache.k), .temperature = p.temperature_p};
        };
        const outcome x = outcome_of(sparse, [&] { return evaluate(be, of(sparse), t, renormalised{d}); });
        const outcome y = outcome_of(again, [&] {
            return d.visit(
                [&](const auto& divergence) { return evaluate(be, of(again), t, renormalised{divergence}); });
        });
        CHECK(x == y);
    });
}

TEST_CASE("sums over a support refuse the divergences that they are not of") {
    const problem p{.rows = 1, .vocab = 9, .seed = 2};
    buffers<float> b(p);
    const caches<float> cache(b, 3, 2);
    cpu_backend be;
    const auto refuses = [&](const any_partial& e, const char* text) {
        CHECK_THROWS_WITH_AS(evaluate(be, b.student(), cache.support(), e), doctest::Contains(text), invalid_input);
        CHECK(b.dz[0] == 777);
    };
    refuses({choice::partial::truncated_biased, {choice::objective::jsd}}, "reverse_kl or forward_kl");
    refuses({choice::partial::reweighted, {choice::objective::forward_kl}}, "reweighted is of reverse_kl");
    refuses({choice::partial::reweighted, {}}, "stale_student");
    refuses({choice::partial::generalised, {choice::objective::acceptance}}, "acceptance");
    refuses({choice::partial::generalised, {choice::objective::clipped}}, "any_dense.which");
    CHECK_THROWS_AS(evaluate(be, b.student(), b.teacher(), any_dense{choice::objective::old}), invalid_input);
    auto with_mu = cache.support();
    with_mu.log_mu = with_mu.log_q, with_mu.chosen_by = teacher::chosen_by::stale_student;
    buffers<float> c(p);
    const result x = evaluate(be, b.student(), with_mu, any_partial{choice::partial::reweighted, {}});
    const result y = evaluate(be, c.student(), with_mu, reweighted{});
    CHECK(x.loss == y.loss);
    CHECK(b.dz == c.dz);
}

TEST_CASE("hidden states with any_dense, in blocks and in tiles") {
    const index_t n = 4, v = 3000, d = 8;
    numbers u(4);
    std::vector<float> x(std::size_t(n * d)), w(std::size_t(v * d)), y(std::size_t(n * v)), dx(x.size()),
        again(x.size());
    for (auto* all : {&x, &w, &y})
        for (float& f : *all) f = float(u.normal());
    cpu_backend be;
    for (const auto& line : choice::divergences)
        for (const std::size_t budget : {std::size_t{1} << 28, std::size_t{60000}}) {
            const any_dense chosen{line.which, .3, .6};
            student::hidden<float> s{view(std::as_const(x).data(), n, d), view(std::as_const(w).data(), v, d)};
            s.budget = budget;
            const teacher::dense<float> t{view(y.data(), n, v)};
            s.dx = view(dx.data(), n, d);
            const double loss = evaluate(be, s, t, chosen).loss;
            s.dx = view(again.data(), n, d);
            CHECK(chosen.visit([&](const auto& divergence) { return evaluate(be, s, t, divergence).loss; }) == loss);
            CHECK(dx == again);
        }
}
