// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// Refusals as tables: every number that a call takes, times NaN, the infinities, -1 and what lies outside its range;
// every shape of every cache; rows that infinite::raise stops. A refused call names the argument and writes nothing.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"

#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <functional>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const double nan_v = std::bit_cast<double>(0x7ff8000000000000ull), inf_v = std::bit_cast<double>(0x7ff0000000000000ull);
const float minus_inf = detail::neg_inf<float>();
constexpr index_t rows = 3, vocab = 12, k = 4;

/// A good call of every kind; a case spoils one thing.
struct call {
    std::vector<float> z, y, dz = std::vector<float>(rows * vocab, 777.F), losses = std::vector<float>(rows, 777.F);
    std::vector<std::int32_t> ids;
    std::vector<float> log_q = std::vector<float>(rows * k, -1.75F), log_mu = log_q, prox = log_q, ref = log_q;
    std::vector<float> weight = std::vector<float>(rows * k, 0.25F), weights = std::vector<float>(rows, 1.F);
    std::vector<float> log_tail = std::vector<float>(rows, -1.2F);
    std::vector<std::uint8_t> exact = std::vector<std::uint8_t>(rows * k, 0);
    student::logits<float> s;
    teacher::dense<float> dense;
    teacher::support<std::int32_t> support;
    teacher::samples<std::int32_t> samples;
    teacher::weighted<std::int32_t> weighted;
    opd::env env;
    cpu_backend backend;
    double number = 0; // for the estimator of the case

    call() {
        numbers u(11);
        for (index_t i = 0; i < rows * vocab; ++i) z.push_back(float(u.normal())), y.push_back(float(u.normal()));
        for (index_t i = 0; i < rows * k; ++i) ids.push_back(std::int32_t(3 * (i % k) + i / k));
        s.z = view(std::as_const(z).data(), rows, vocab), s.dz = view(dz.data(), rows, vocab);
        dense.y = view(std::as_const(y).data(), rows, vocab);
        const auto m = [](const auto& x) { return view(x.data(), rows, k); };
        support.ids = samples.ids = weighted.ids = m(std::as_const(ids));
        support.log_q = samples.log_q = weighted.log_q = m(std::as_const(log_q));
        samples.log_mu = weighted.log_mu = m(std::as_const(log_mu));
        samples.log_prox = weighted.log_prox = m(std::as_const(prox));
        samples.log_ref = weighted.log_ref = m(std::as_const(ref));
        weighted.weight = m(std::as_const(weight)), weighted.exact = m(std::as_const(exact));
        support.log_tail = log_tail;
        env.losses = losses, env.weights = weights;
    }
    call(const call&) = delete;
    bool untouched() const {
        const auto as_was = [](float x) { return x == 777; };
        return std::all_of(dz.begin(), dz.end(), as_was) && std::all_of(losses.begin(), losses.end(), as_was);
    }
};

template <class Estimator>
auto on_dense(Estimator make) {
    return [make](call& c) { evaluate(c.backend, c.s, c.dense, make(c.number), c.env); };
}
template <class Estimator>
auto on_support(Estimator make) {
    return [make](call& c) { evaluate(c.backend, c.s, c.support, make(c.number), c.env); };
}
template <class Estimator>
auto on_samples(Estimator make) {
    return [make](call& c) { evaluate(c.backend, c.s, c.samples, make(c.number), c.env); };
}
template <class Estimator>
auto on_weighted(Estimator make) {
    return [make](call& c) { evaluate(c.backend, c.s, c.weighted, make(c.number), c.env); };
}
const auto reverse = on_dense([](double) { return reverse_kl{}; });
const auto bucket = on_support([](double) { return tail_bucket{reverse_kl{}}; });
const auto on_draws = on_samples([](double) { return mc{reverse_kl{}}; });
const auto entries = on_weighted([](double) { return mc{reverse_kl{}}; });

/// `run` after `spoil` throws, naming `argument`, and has written nothing.
void refused(const std::string& argument, const std::function<void(call&)>& spoil,
             const std::function<void(call&)>& run) {
    call c;
    spoil(c);
    bool thrown = false;
    try {
        run(c);
    } catch (const invalid_input& e) {
        thrown = true;
        CHECK_MESSAGE(std::string(e.what()).find(argument) != std::string::npos, argument, " in: ", e.what());
    }
    CHECK_MESSAGE(thrown, argument, " was accepted");
    CHECK(c.untouched());
}
/// A number, the values it must not have and some that it may.
struct field {
    std::string name;
    std::function<void(call&, double)> set;
    std::function<void(call&)> run;
    std::vector<double> never, fine;
};

} // namespace

TEST_CASE("every number of a call has a range") {
    const std::vector<double> no_temperature{nan_v, inf_v, -inf_v, -1, 0, 1e-45, 1e-38, 9e-7, 1.1e6, 1e30, 3e38};
    const std::vector<double> no_number{nan_v, inf_v, -inf_v};
    const std::vector<double> no_share{nan_v, inf_v, -inf_v, -1, -1e-9, 1 + 1e-9, 2};
    const auto open = [](std::vector<double> v) { return v.push_back(0), v.push_back(1), v; };
    const auto number = [](call& c, double x) { c.number = x; };
    const std::vector<field> fields{
        {"student.temperature", [](call& c, double x) { c.s.temperature = float(x); }, reverse, no_temperature, {.7}},
        {"student.temperature", [](call& c, double x) { c.s.temperature = float(x); }, bucket, no_temperature, {.7}},
        {"student.temperature", [](call& c, double x) { c.s.temperature = float(x); }, on_draws, no_temperature, {.7}},
        {"student.temperature", [](call& c, double x) { c.s.temperature = float(x); }, entries, no_temperature, {.7}},
        {"teacher.temperature",
         [](call& c, double x) { c.dense.temperature = float(x); },
         reverse,
         no_temperature,
         {.7}},
        {"env.normaliser",
         [](call& c, double x) { c.env.normaliser = x; },
         reverse,
         {nan_v, inf_v, -inf_v, -1},
         {0, 3.5}},
        {"env.normaliser",
         [](call& c, double x) { c.env.normaliser = x, c.env.reduction = reduce::constant; },
         on_draws,
         {nan_v, inf_v, -inf_v, -1, 0},
         {3.5}},
        {"env.beta", [](call& c, double x) { c.env.beta = float(x); }, reverse, no_number, {0, -1, 2}},
        {"env.beta_loss", [](call& c, double x) { c.env.beta_loss = float(x); }, bucket, no_number, {0, -1, 2}},
        {"env.loss_clamp",
         [](call& c, double x) { c.env.loss_clamp = x; },
         reverse,
         {nan_v, inf_v, -inf_v, -1},
         {0, 3.5}},
        {"env.weights", [](call& c, double x) { c.weights[1] = float(x); }, reverse, no_number, {0, -1, 2}},
        {"env.weights", [](call& c, double x) { c.weights[2] = float(x); }, entries, no_number, {0, -1, 2}},
        {"env.weights", [](call& c, double x) { c.weights[1] = float(x); }, bucket, {3e38, -3e38}, {1e29}},
        {"env.normaliser", [](call& c, double x) { c.env.normaliser = x; }, entries, {1e-310, 1e-31}, {1e-3}},
        {"env.on_infinite",
         [](call& c, double x) { c.env.on_infinite = infinite::floor(x); },
         reverse,
         {nan_v, inf_v, -inf_v, 1, 1e-3, -2e6},
         {-30, -1, 0}},
        {"env.on_infinite",
         [](call& c, double x) { c.env.on_infinite = infinite::floor(x); },
         on_draws,
         {nan_v, inf_v, -inf_v, 1},
         {-30}},
        {"env.on_bad",
         [](call& c, double x) { c.env.on_bad = bad::raise_above(x); },
         reverse,
         {nan_v, inf_v, -inf_v, -1, 0, 1},
         {.25}},
        {"alpha_divergence.a",
         number,
         on_dense([](double x) { return alpha_divergence{x}; }),
         {nan_v, inf_v, -inf_v, 1e4, -1e4},
         {-.5, 0, .5, 1, 2}},
        {"alpha_divergence.a",
         number,
         on_support([](double x) { return tail_bucket{alpha_divergence{x}}; }),
         {nan_v, inf_v, -inf_v},
         {.5}},
        {"jsd.w", number, on_dense([](double x) { return jsd{.w = x}; }), open(no_share), {.1}},
        {"jsd.o", number, on_dense([](double x) { return jsd{.o = x}; }), no_share, {0, .1, 1}},
        {"jsd.w", number, on_support([](double x) { return tail_bucket{jsd{.w = x}}; }), open(no_share), {.1}},
        {"jsd.o", number, on_support([](double x) { return renormalised{jsd{.o = x}}; }), no_share, {0, .1, 1}},
        {"skew_forward_kl.a", number, on_dense([](double x) { return skew_forward_kl{x}; }), open(no_share), {.1}},
        {"skew_reverse_kl.a", number, on_dense([](double x) { return skew_reverse_kl{x}; }), open(no_share), {.1}},
        {"shape::clipped.a",
         number,
         on_samples([](double x) { return mc{shape::clipped{x}}; }),
         {nan_v, inf_v, -inf_v, -1, 0},
         {.5, 2}},
        {"shape::clipped.a",
         number,
         on_weighted([](double x) { return mc{shape::clipped{x}}; }),
         {nan_v, inf_v, -inf_v, -1, 0},
         {.5, 2}},
    };
    for (const field& f : fields) {
        CAPTURE(f.name);
        for (const double x : f.never) {
            CAPTURE(x);
            refused(
                f.name, [&](call& c) { f.set(c, x); }, f.run);
        }
        for (const double x : f.fine) {
            CAPTURE(x);
            call c;
            f.set(c, x);
            f.run(c);
            CHECK(std::none_of(c.losses.begin(), c.losses.end(), [](float l) { return l == 777; }));
        }
    }
}

TEST_CASE("every matrix of a cache has the shape of its ids, a stride, a pointer") {
    struct matrix {
        std::string name;
        std::function<void(call&)> fewer_rows, fewer_columns, narrow;
        std::function<void(call&)> run;
        std::function<void(call&)> null = {}; // empty: the matrix is optional
    };
#define OPD_SHAPES(field)                                                                                              \
    [](call& c) { c.field.rows = 2; }, [](call& c) { c.field.cols = 3; }, [](call& c) { c.field.stride = 3; }
    const std::vector<matrix> matrices{
        {"teacher.y", OPD_SHAPES(dense.y), reverse, [](call& c) { c.dense.y.data = nullptr; }},
        {"teacher.ids", [](call& c) { c.support.ids.rows = 2; }, [](call& c) { c.support.ids.cols = 3; },
         [](call& c) { c.support.ids.stride = 3; }, bucket, [](call& c) { c.support.ids.data = nullptr; }},
        {"teacher.log_q", OPD_SHAPES(support.log_q), bucket, [](call& c) { c.support.log_q.data = nullptr; }},
        {"teacher.log_q", OPD_SHAPES(samples.log_q), on_draws, [](call& c) { c.samples.log_q.data = nullptr; }},
        {"teacher.log_mu", OPD_SHAPES(samples.log_mu), on_draws, [](call& c) { c.samples.log_mu.data = nullptr; }},
        {"teacher.log_prox", OPD_SHAPES(samples.log_prox), on_draws},
        {"teacher.log_ref", OPD_SHAPES(samples.log_ref), on_draws},
        {"teacher.log_q", OPD_SHAPES(weighted.log_q), entries, [](call& c) { c.weighted.log_q.data = nullptr; }},
        {"teacher.log_mu", OPD_SHAPES(weighted.log_mu), entries, [](call& c) { c.weighted.log_mu.data = nullptr; }},
        {"teacher.weight", OPD_SHAPES(weighted.weight), entries, [](call& c) { c.weighted.weight.data = nullptr; }},
        {"teacher.exact", OPD_SHAPES(weighted.exact), entries},
        {"teacher.log_prox", OPD_SHAPES(weighted.log_prox), entries},
        {"teacher.log_ref", OPD_SHAPES(weighted.log_ref), entries},
    };
#undef OPD_SHAPES
    for (const matrix& m : matrices) {
        CAPTURE(m.name);
        refused(m.name, m.fewer_rows, m.run);
        refused(m.name == "teacher.ids" ? "teacher." : m.name, m.fewer_columns, m.run);
        refused(m.name, m.narrow, m.run);
        if (m.null) refused(m.name, m.null, m.run);
    }
    refused(
        "teacher.log_tail", [](call& c) { c.support.log_tail.size = 2; }, bucket);
}

TEST_CASE("the gradient may lie over no matrix that a call reads") {
    const auto over = [](auto member) {
        return [member](call& c) {
            using view_type = std::remove_cvref_t<decltype(member(c))>;
            using element = typename view_type::element_type;
            member(c) = view_type(reinterpret_cast<element*>(c.dz.data()), rows, k, k);
        };
    };
    refused("overlaps teacher.ids", over([](call & c) -> auto& { return c.support.ids; }), bucket);
    refused("overlaps teacher.log_q", over([](call & c) -> auto& { return c.support.log_q; }), bucket);
    refused("overlaps teacher.ids", over([](call & c) -> auto& { return c.samples.ids; }), on_draws);
    refused("overlaps teacher.log_mu", over([](call & c) -> auto& { return c.samples.log_mu; }), on_draws);
    refused("overlaps teacher.log_prox", over([](call & c) -> auto& { return c.samples.log_prox; }), on_draws);
    refused("overlaps teacher.log_ref", over([](call & c) -> auto& { return c.samples.log_ref; }), on_draws);
    refused("overlaps teacher.weight", over([](call & c) -> auto& { return c.weighted.weight; }), entries);
    refused("overlaps teacher.exact", over([](call & c) -> auto& { return c.weighted.exact; }), entries);
}

TEST_CASE("infinite::raise stops a call on either side, on every cache, before anything is written") {
    const auto raised = [](const char* name, const std::function<void(call&)>& spoil,
                           const std::function<void(call&)>& run, bool expected) {
        INFO(std::string(name));
        call c;
        c.env.on_infinite = infinite::raise();
        spoil(c);
        if (!expected) {
            run(c);
            return;
        }
        CHECK_THROWS_WITH_AS(run(c), doctest::Contains("row 1"), infinite_value);
        CHECK(c.untouched());
    };
    const auto teacher_zero = [](call& c) { c.y[vocab + 4] = c.log_q[k + 1] = minus_inf; };
    const auto student_zero = [](call& c) { c.z[vocab + 4] = minus_inf; }; // row 1's id 1 is 4
    const auto both = [&](call& c) { teacher_zero(c), student_zero(c); };
    const auto forward = on_dense([](double) { return forward_kl{}; });
    const auto forward_bucket = on_support([](double) { return tail_bucket{forward_kl{}}; });
    const auto forward_support = on_support([](double) { return renormalised{forward_kl{}}; });
    const auto reverse_support = on_support([](double) { return renormalised{reverse_kl{}}; });
    const auto mixture = on_support([](double) { return tail_bucket{jsd{}}; });
    raised("reverse KL", teacher_zero, reverse, true);
    raised("reverse KL", student_zero, reverse, false);
    raised("reverse KL", both, reverse, false);
    raised("forward KL", student_zero, forward, true);
    raised("forward KL", teacher_zero, forward, false);
    raised("forward KL", both, forward, false);
    raised("reverse KL on buckets", teacher_zero, bucket, true);
    raised("reverse KL on buckets", student_zero, bucket, false);
    raised("forward KL on buckets", student_zero, forward_bucket, true);
    raised("forward KL on buckets", teacher_zero, forward_bucket, false);
    raised("forward KL on buckets", both, forward_bucket, false);
    raised("reverse KL on a support", teacher_zero, reverse_support, true);
    raised("forward KL on a support", student_zero, forward_support, true);
    raised("forward KL on a support", teacher_zero, forward_support, false);
    raised("JSD on buckets", both, mixture, false);
    raised("JSD on buckets", student_zero, mixture, false);
    raised("samples", teacher_zero, on_draws, true);
    raised("samples", student_zero, on_draws, false);
    raised("weighted", teacher_zero, entries, true);
}

TEST_CASE("check::contents names what is wrong with an entry, on every cache") {
    const auto stops = [](const char* text, const std::function<void(call&)>& spoil,
                          const std::function<void(call&)>& run) {
        INFO(std::string(text));
        refused(
            text,
            [&](call& c) {
                c.env.checks = check::contents;
                spoil(c);
            },
            run);
    };
    for (const double x : {nan_v, 0.5, inf_v}) {
        CAPTURE(x);
        const auto spoil = [x](std::vector<float> call::*where) {
            return [x, where](call& c) { (c.*where)[k + 2] = float(x); };
        };
        stops("teacher.log_q", spoil(&call::log_q), bucket);
        stops("teacher.log_q", spoil(&call::log_q), on_draws);
        stops("teacher.log_q", spoil(&call::log_q), entries);
        stops("teacher.log_mu", spoil(&call::log_mu), on_draws);
        stops("teacher.log_mu", spoil(&call::log_mu), entries);
    }
    for (const double x : {-9999.0, -inf_v}) {
        CAPTURE(x);
        stops(
            "teacher.log_mu", [x](call& c) { c.log_mu[k] = float(x); }, on_draws);
        stops(
            "teacher.log_mu", [x](call& c) { c.log_mu[k] = float(x); }, entries);
    }
    for (const std::int32_t id : {std::int32_t(vocab), 1 << 30, -2}) {
        CAPTURE(id);
        const auto spoil = [id](call& c) { c.ids[k + 3] = id; };
        stops("teacher.ids", spoil, bucket);
        stops("teacher.ids", spoil, on_draws);
        if (id > 0) stops("teacher.ids", spoil, entries);
    }
    const auto spoil_z = [](double x) { return [x](call& c) { c.z[vocab + 5] = float(x); }; };
    for (const double x : {nan_v, inf_v}) {
        CAPTURE(x);
        stops("student.z", spoil_z(x), reverse);
        stops("student.z", spoil_z(x), bucket);
        stops("student.z", spoil_z(x), on_draws);
        stops("student.z", spoil_z(x), entries);
        stops(
            "teacher.y", [x](call& c) { c.y[vocab + 5] = float(x); }, reverse);
    }
}

TEST_CASE("column ranges of one buffer lie apart, unless one runs into the next row of the other") {
    for (const index_t at : {12, 13, 11}) {
        call c;
        std::vector<float> both(rows * 24 + 16, 0.25F);
        c.s.z = matrix_view<const float>(both.data(), rows, vocab, 24);
        c.s.dz = matrix_view<float>(both.data() + at, rows, vocab, 24);
        CAPTURE(at);
        if (at == 12)
            reverse(c);
        else
            CHECK_THROWS_WITH_AS(reverse(c), doctest::Contains("overlaps student.z"), invalid_input);
    }
}
