// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast, sanitize, whole-compiler
// optimise: no
//
// Bad input. Shapes, strides, options, null pointers, overlaps: `invalid_input` naming argument and row, thrown before
// anything is written; numbers and overlaps by tables over every field and every pair. Contents: counted with loss 0
// and gradient 0, or thrown under check::contents. Infinite rows: floored, skipped or raised. Rows beyond the clamp:
// cut.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"

#include <functional>
#include <limits>

#include <opd/backends/cpu.hpp>
#include <opd/draw.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const float nan_f = std::bit_cast<float>(0x7fc00000u), inf_f = std::bit_cast<float>(0x7f800000u);
const float minus_inf = detail::neg_inf<float>();
constexpr index_t rows = 3, vocab = 20, k = 4;

/// A good call of every kind over the same student; cases spoil one thing.
struct call {
    std::vector<float> z = std::vector<float>(rows * 24), y = z, dz = std::vector<float>(rows * 24, 777.F);
    std::vector<std::int32_t> ids = std::vector<std::int32_t>(rows * k);
    std::vector<float> log_mu = std::vector<float>(rows * k, -2.F), log_q = std::vector<float>(rows * k, -1.5F);
    std::vector<float> weight = std::vector<float>(rows * k, 0.25F), log_tail = std::vector<float>(rows, -3.F);
    std::vector<float> losses = std::vector<float>(rows, 777.F), row_weights = std::vector<float>(rows, 1.F);
    std::vector<double> double_weights = std::vector<double>(rows, 1.);
    std::vector<std::int64_t> offsets;
    std::vector<double> row_lse = std::vector<double>(rows, 1.0);
    student::logits<float> s;
    teacher::dense<float> dense;
    teacher::support<std::int32_t> support;
    teacher::samples<std::int32_t> samples;
    teacher::weighted<std::int32_t> weighted;
    opd::env env;

    call() {
        numbers u(11);
        for (float& x : z) x = float(u.normal());
        for (float& x : y) x = float(u.normal());
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(3 * (i % k) + i / k);
        s = student::logits<float>{view(z.data(), rows, vocab, 24), view(dz.data(), rows, vocab, 24)};
        dense = teacher::dense<float>{view(y.data(), rows, vocab, 24)};
        const auto id = view(ids.data(), rows, k);
        const auto f = [](std::vector<float>& x) { return view(x.data(), rows, k); };
        support = {id, f(log_q), log_tail};
        samples = {id, f(log_mu), f(log_q)};
        weighted = {id, f(weight), f(log_mu), f(log_q)};
        env.losses = losses;
    }
    call(const call&) = delete;

    result run_dense() { return evaluate(backend, s, dense, reverse_kl{}, env); }
    result run_support() { return evaluate(backend, s, support, tail_bucket{reverse_kl{}}, env); }
    result run_samples() { return evaluate(backend, s, samples, mc{reverse_kl{}}, env); }
    result run_weighted() { return evaluate(backend, s, weighted, mc{reverse_kl{}}, env); }
    bool untouched() const {
        return std::all_of(dz.begin(), dz.end(), [](float x) { return x == 777; }) &&
               std::all_of(losses.begin(), losses.end(), [](float x) { return x == 777; });
    }
    bool zero_row(index_t r) const {
        for (index_t v = 0; v < vocab; ++v)
            if (dz[std::size_t(r * 24 + v)] != 0) return false;
        return true;
    }
    cpu_backend backend;
};

/// spoil(call) must make `run` throw `text` and leave the outputs alone.
template <class Spoil, class Run>
void refused(const char* text, Spoil spoil, Run run, index_t row = -1) {
    call c;
    spoil(c);
    INFO(std::string(text));
    bool thrown = false;
    try {
        run(c);
    } catch (const invalid_input& e) {
        thrown = true;
        CHECK(std::string(e.what()).find(text) != std::string::npos);
        CHECK_MESSAGE(std::string(e.what()).find(e.argument) != std::string::npos, e.what());
        if (row >= 0) CHECK(e.row == row);
        if (row >= 0) CHECK(std::string(e.what()).find("row " + std::to_string(row)) != std::string::npos);
    }
    CHECK(thrown);
    CHECK(c.untouched());
}
const auto on_dense = [](call& c) { c.run_dense(); };
const auto on_support = [](call& c) { c.run_support(); };
const auto on_samples = [](call& c) { c.run_samples(); };
const auto on_weighted = [](call& c) { c.run_weighted(); };

} // namespace

TEST_CASE("the good calls are good") {
    call c;
    CHECK(c.run_dense().diagnostics.bad_rows == 0);
    CHECK(c.run_support().diagnostics.bad_rows == 0);
    CHECK(c.run_samples().diagnostics.bad_rows == 0);
    CHECK(c.run_weighted().diagnostics.bad_rows == 0);
    c.env.checks = check::contents;
    c.run_dense(), c.run_support(), c.run_samples(), c.run_weighted();
}

TEST_CASE("shapes, strides, pointers") {
    refused(
        "teacher.y: has shape (2,20), expected (3,20)", [](call& c) { c.dense.y.rows = 2; }, on_dense);
    refused(
        "student.dz: has shape (3,19), expected (3,20)", [](call& c) { c.s.dz.cols = 19; }, on_dense);
    refused(
        "student.z: has a row stride of 10 for 20 columns", [](call& c) { c.s.z.stride = 10; }, on_dense);
    refused(
        "student.dz: has a row stride of 19", [](call& c) { c.s.dz.stride = 19; }, on_dense);
    refused(
        "student.z: is a null pointer", [](call& c) { c.s.z.data = nullptr; }, on_dense);
    refused(
        "teacher.y: is a null pointer", [](call& c) { c.dense.y.data = nullptr; }, on_dense);
    refused(
        "student.z: has a negative shape", [](call& c) { c.s.z.rows = -3; }, on_dense);
    refused(
        "student.z: has no columns", [](call& c) { c.s.z.cols = c.s.dz.cols = 0; }, on_dense);
    refused(
        "student.z: is not aligned to its element type",
        [](call& c) { c.s.z.data = reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(c.z.data()) + 2); },
        on_dense);
    refused(
        "teacher.ids: has shape (2,4), expected (3,4)", [](call& c) { c.support.ids.rows = 2; }, on_support);
    refused(
        "teacher.log_q: has shape (3,3), expected (3,4)", [](call& c) { c.support.log_q.cols = 3; }, on_support);
    refused(
        "teacher.log_tail: has 2 entries for 3 rows", [](call& c) { c.support.log_tail.size = 2; }, on_support);
    refused(
        "teacher.ids: has no columns", [](call& c) { c.samples.ids.cols = 0; }, on_samples);
    refused(
        "teacher.log_mu: has shape (3,2), expected (3,4)", [](call& c) { c.samples.log_mu.cols = 2; }, on_samples);
    refused(
        "teacher.log_mu: is a null pointer", [](call& c) { c.samples.log_mu.data = nullptr; }, on_samples);
    refused(
        "teacher.weight: has shape", [](call& c) { c.weighted.weight.cols = 2; }, on_weighted);
    refused(
        "columns for a vocabulary of 3", [](call& c) { c.s.z.cols = c.s.dz.cols = 3; }, on_support);
}

TEST_CASE("vocabularies, determinism, estimator options") {
    refused(
        "teacher.y: has 19 columns, the student 20; set env.vocab", [](call& c) { c.dense.y.cols = 19; }, on_dense);
    refused(
        "jsd.w", [](call&) {}, [](call& d) { evaluate(d.backend, d.s, d.support, tail_bucket{jsd{.w = 2}}, d.env); });
    refused(
        "has no log-sum-exp", [](call& d) { d.env.lse = d.row_lse; },
        [](call& d) { evaluate(d.backend, d.s, d.support, renormalised{reverse_kl{}}, d.env); });
}

TEST_CASE("aliasing") {
    refused(
        "student.dz: overlaps student.z; only the same pointer, type and stride may alias",
        [](call& c) {
            c.s.dz.data = c.z.data() + 4;
            c.s.dz.rows = c.s.z.rows = c.dense.y.rows = 2;
            c.env.losses = {};
        },
        on_dense);
    refused(
        "student.dz: overlaps student.z", [](call& c) { c.s.dz.data = c.z.data(), c.s.dz.stride = 20; }, on_dense);
    refused(
        "student.dz: is student.z, which env.beta = 0 alone allows",
        [](call& c) { c.s.dz.data = c.z.data(), c.env.beta = 1; }, on_dense);
    refused(
        "student.dz: overlaps teacher.y", [](call& c) { c.s.dz.data = c.y.data(); }, on_dense);
    refused(
        "student.dz: overlaps env.losses", [](call& c) { c.env.losses = vector_view<float>(c.dz.data() + 3, 3); },
        on_dense);
    refused(
        "student.dz: overlaps teacher.log_q",
        [](call& c) { c.support.log_q = matrix_view<const float>(c.dz.data(), rows, k, k); }, on_support);
    call c; // another type at the same address
    const student::logits<float, bfloat16> s{c.s.z, view(reinterpret_cast<bfloat16*>(c.z.data()), rows, vocab, 24)};
    CHECK_THROWS_WITH_AS(evaluate(c.backend, s, c.dense, reverse_kl{}), doctest::Contains("overlaps student.z"),
                         invalid_input);
}

TEST_CASE("env") {
    const std::vector<int> short_mask{1, 0};
    const std::vector<std::int64_t> late{1, 3}, falling{0, 2, 1, 3}, early{0, 2};
    const std::vector<float> two{1, 1}, bad_weight{1, nan_f, 1};
    const std::vector<double> two_lse{1, 1};
    refused(
        "env.mask: has 2 entries for 3 rows", [&](call& c) { c.env.mask = row_mask<>(short_mask); }, on_dense);
    refused(
        "env.weights: has 2 entries for 3 rows", [&](call& c) { c.env.weights = two; }, on_dense);
    refused(
        "env.given_lse: has 2 entries", [&](call& c) { c.env.given_lse = two_lse; }, on_dense);
    refused(
        "env.losses: has 2 entries", [](call& c) { c.env.losses.size = 2; }, on_dense);
    refused(
        "env.lse: has 1 entries", [](call& c) { c.env.lse = vector_view<double>(c.row_lse.data(), 1); }, on_dense);
    refused(
        "env.weights, row 1: is not finite", [&](call& c) { c.env.weights = bad_weight; }, on_dense, 1);
    refused(
        "env.normaliser: must be positive under reduce::constant", [](call& c) { c.env.reduction = reduce::constant; },
        on_dense);
    refused(
        "env.offsets: is needed by a reduction over sequences",
        [](call& c) { c.env.reduction = reduce::sequence_mean; }, on_dense);
    refused(
        "env.offsets, row 0: must start at 0", [&](call& c) { c.env.offsets = late; }, on_dense, 0);
    refused(
        "must ascend; entry 2 does not", [&](call& c) { c.env.offsets = falling; }, on_dense, 2);
    refused(
        "env.offsets: ends at 2 for 3 rows", [&](call& c) { c.env.offsets = early; }, on_dense);
}

TEST_CASE("numbers: every field, refused and accepted") {
    const double nan_d = double(nan_f), inf_d = double(inf_f);
    struct field {
        const char* name;
        std::vector<double> refused, accepted; ///< refused also: NaN and both infinities
        std::function<void(call&, double)> run;
    };
    const auto dense = [](auto set) {
        return [set](call& c, double x) {
            set(c, x);
            c.run_dense();
        };
    };
    const auto estimator = [](auto make) {
        return [make](call& c, double x) { evaluate(c.backend, c.s, c.dense, make(x), c.env); };
    };
    const auto bucket = [](auto make) {
        return [make](call& c, double x) { evaluate(c.backend, c.s, c.support, tail_bucket{make(x)}, c.env); };
    };
    const auto renormal = [](auto make) {
        return [make](call& c, double x) { evaluate(c.backend, c.s, c.support, renormalised{make(x)}, c.env); };
    };
    const auto token = [](auto& c, float temperature) {
        std::vector<float> out(rows * k);
        token_logp(c.backend, c.s.z, c.support.ids, view(out.data(), rows, k), temperature);
    };
    const auto drawing = [](call& c, auto design, const std::vector<double>& uniforms, float temperature, int odd = 0) {
        const float z[3] = {0, 1, 2};
        std::int32_t ids[2] = {77, 77};
        float log_mu[2] = {77, 77}, weight[2] = {77, 77};
        std::uint8_t exact[2] = {77, 77};
        try {
            draw(c.backend, view(z, 1, 3), design, {.uniforms = view(uniforms.data(), 1, uniforms.size())},
                 drawn<>{view(ids, 1, 2), view(log_mu, 1, 2), view(weight, 1, 2), view(exact, 1, 2)},
                 {.filter = {.temperature = temperature}});
        } catch (const invalid_input& e) {
            for (const int j : {0, 1}) CHECK((ids[j] == 77 && log_mu[j] == 77 && weight[j] == 77 && exact[j] == 77));
            if (e.argument == "keys.uniforms")
                CHECK(std::string(e.what()).find("row 0, draw " + std::to_string(odd)) != std::string::npos);
            throw;
        }
        CHECK((ids[0] >= 0 && ids[0] < 3 && ids[1] < 3)); // colder than 1e-2, threshold finds one id with mass
    };
    const auto iid = [&](call& c, float temperature, double u) { drawing(c, design::iid{2}, {u, .5}, temperature); };
    const auto later = [&](call& c, double u) { drawing(c, design::iid{2}, {.5, u}, 1, 1); };
    const auto threshold = [&](call& c, float temperature, double u) {
        drawing(c, design::threshold{2}, {u}, temperature);
    };
    const auto make_alpha = [](double x) { return alpha_divergence{x}; };
    const auto make_w = [](double x) { return jsd{.w = x}; };
    const std::vector<double> no_temperature{0, -1, 1e-45, 1e-38, 9e-7, 1.1e6, 1e30, 3e38},
        temperature{1e-6F, .01, 1e6};
    const std::vector<double> no_fraction{0, 1, -1, 2, 1e300}, fraction{1e-3, .5, .999};
    const std::vector<double> no_weight{1.1e30, -3e38}, weight{0, -1, 1e-30, 1e29};
    const std::vector<field> fields{
        {"student.temperature", no_temperature, temperature,
         dense([](call& c, double x) { c.s.temperature = float(x); })},
        {"teacher.temperature", no_temperature, temperature,
         dense([](call& c, double x) { c.dense.temperature = float(x); })},
        {"student.temperature", no_temperature, temperature,
         [](call& c, double x) { c.s.temperature = float(x), c.run_support(); }},
        {"student.temperature", no_temperature, temperature,
         [](call& c, double x) { c.s.temperature = float(x), c.run_samples(); }},
        {"temperature", no_temperature, temperature, [&](call& c, double x) { token(c, float(x)); }},
        {"filter.temperature", no_temperature, temperature, [&](call& c, double x) { iid(c, float(x), .5); }},
        {"filter.temperature", no_temperature, temperature, [&](call& c, double x) { threshold(c, float(x), .5); }},
        {"keys.uniforms", no_fraction, fraction, [&](call& c, double x) { iid(c, 1, x); }},
        {"keys.uniforms", no_fraction, fraction, [&](call& c, double x) { later(c, x); }},
        {"keys.uniforms", no_fraction, fraction, [&](call& c, double x) { threshold(c, 1, x); }},
        {"env.normaliser", {-1, 1e-300, 1e-31}, {0, .5, 1e9}, dense([](call& c, double x) { c.env.normaliser = x; })},
        {"env.normaliser", {-1, 0, 1e-300}, {.5, 1e9}, dense([](call& c, double x) {
             c.env.reduction = reduce::constant, c.env.normaliser = x;
         })},
        {"env.beta", {}, {-1, 0, 2}, dense([](call& c, double x) { c.env.beta = float(x); })},
        {"env.beta_loss", {}, {-1, 0, 2}, dense([](call& c, double x) { c.env.beta_loss = float(x); })},
        {"env.on_infinite", {1e-9, 30, -1e7, -1e300}, {0, -1, -30, -1e6}, dense([](call& c, double x) {
             c.env.on_infinite = infinite::floor(x);
         })},
        {"env.on_bad", {0, 1, -1, 2}, {1e-9, .5}, dense([](call& c, double x) { c.env.on_bad = bad::raise_above(x); })},
        {"env.loss_clamp", {-1, -1e-300}, {0, 1e-3, 1e9}, dense([](call& c, double x) { c.env.loss_clamp = x; })},
        {"env.weights", no_weight, weight,
         dense([](call& c, double x) { c.row_weights[1] = float(x), c.env.weights = c.row_weights; })},
        {"env.weights", {1e300, -1e31}, weight, dense([](call& c, double x) {
             c.double_weights[1] = x, c.env.weights = c.double_weights;
         })},
        {"env.weights", {1e15, -1e15}, {1e9}, dense([](call& c, double x) {
             c.double_weights[1] = x, c.env.weights = c.double_weights, c.env.normaliser = 1e-20;
         })},
        {"jsd.w", no_fraction, fraction, estimator(make_w)},
        {"jsd.w", no_fraction, fraction, bucket(make_w)},
        {"jsd.w", no_fraction, fraction, renormal(make_w)},
        {"jsd.o", {-1, 2, 1e300}, {0, .5, 1}, estimator([](double x) { return jsd{.o = x}; })},
        {"skew_forward_kl.a", no_fraction, fraction, estimator([](double x) { return skew_forward_kl{x}; })},
        {"skew_reverse_kl.a", no_fraction, fraction, estimator([](double x) { return skew_reverse_kl{x}; })},
        {"alpha_divergence.a", {-1001, 1e6}, {-1, 0, 1, 2}, estimator(make_alpha)},
        {"alpha_divergence.a", {-1001, 1e6}, {-1, 0, 1, 2}, bucket(make_alpha)},
        {"shape::clipped.a",
         {-1, -1e-300, 0},
         {5, .5},
         [](call& c, double x) { evaluate(c.backend, c.s, c.samples, mc{shape::clipped{x}}, c.env); }},
        {"shape::clipped.a",
         {-1, -1e-300, 0},
         {5, .5},
         [](call& c, double x) { evaluate(c.backend, c.s, c.weighted, mc{shape::clipped{x}}, c.env); }},
    };
    for (const field& f : fields) {
        std::vector<double> bad = f.refused;
        bad.insert(bad.end(), {nan_d, inf_d, -inf_d});
        for (const double x : bad) {
            call c;
            INFO(std::string(f.name) << " = " << x);
            try {
                f.run(c, x);
                FAIL("accepted");
            } catch (const invalid_input& e) {
                CHECK(e.argument == f.name);
                if (std::string(f.name) == "env.weights") CHECK(e.row == 1);
            }
            CHECK(c.untouched());
        }
        for (const double x : f.accepted) {
            call c;
            INFO(std::string(f.name) << " = " << x);
            CHECK_NOTHROW(f.run(c, x));
        }
    }
    call c; // a weight is read only where its row counts
    const std::vector<int> mask{1, 0, 1};
    c.row_weights[1] = nan_f, c.env.weights = c.row_weights, c.env.mask = mask;
    CHECK(detail::is_finite(c.run_dense().loss));
}

TEST_CASE("null pointers with a shape are refused, what is left out is not") {
    const auto null_vector = [](auto& v) { v = {static_cast<decltype(v.data)>(nullptr), rows}; };
    const auto none = [](auto& v) { v.data = nullptr; };
    refused(
        "env.weights: is a null pointer with 3 entries",
        [](call& c) {
            c.env.weights = {static_cast<const float*>(nullptr), rows};
        },
        on_dense);
    refused(
        "env.mask: is a null pointer", [](call& c) { c.env.mask = view(static_cast<const bool*>(nullptr), rows); },
        on_dense);
    refused(
        "env.offsets: is a null pointer with 4 entries",
        [](call& c) {
            c.env.offsets = {static_cast<const std::int64_t*>(nullptr), rows + 1};
        },
        on_dense);
    refused(
        "env.versions: is a null pointer", [&](call& c) { null_vector(c.env.versions); }, on_dense);
    refused(
        "env.losses: is a null pointer", [&](call& c) { null_vector(c.env.losses); }, on_dense);
    refused(
        "env.lse: is a null pointer", [&](call& c) { null_vector(c.env.lse); }, on_dense);
    refused(
        "env.given_lse: is a null pointer", [&](call& c) { null_vector(c.env.given_lse); }, on_dense);
    refused(
        "env.offsets: has a negative size", [](call& c) { c.env.offsets.size = -2; }, on_dense);
    refused(
        "student.dz: is a null pointer; leave the gradient out for the value alone", [&](call& c) { none(c.s.dz); },
        on_dense);
    refused(
        "student.dz: is a null pointer; leave the gradient out", [&](call& c) { none(c.s.dz); }, on_support);
    refused(
        "teacher.log_tail: is a null pointer", [&](call& c) { none(c.support.log_tail); }, on_support);
    refused(
        "teacher.ids: is a null pointer", [&](call& c) { none(c.support.ids); }, on_support);
    refused(
        "teacher.log_q: is a null pointer", [&](call& c) { none(c.support.log_q); }, on_support);
    refused(
        "teacher.log_prox: is a null pointer",
        [](call& c) { c.samples.log_prox = view(static_cast<const float*>(nullptr), rows, k); }, on_samples);
    refused(
        "teacher.log_ref: is a null pointer",
        [](call& c) { c.samples.log_ref = view(static_cast<const float*>(nullptr), rows, k); }, on_samples);
    refused(
        "teacher.exact: is a null pointer",
        [](call& c) { c.weighted.exact = view(static_cast<const std::uint8_t*>(nullptr), rows, k); }, on_weighted);
    refused(
        "teacher.weight: is a null pointer", [&](call& c) { none(c.weighted.weight); }, on_weighted);
    refused(
        "student.dz: has shape (0,20), expected (3,20)", [&](call& c) { none(c.s.dz), c.s.dz.rows = 0; }, on_dense);
    call c;
    c.s.dz = {}, c.env.losses = {}, c.support.log_tail = {};
    c.run_dense(), c.run_support(), c.run_samples(), c.run_weighted();
    CHECK(c.untouched());
}

TEST_CASE("alignment of vectors, and sizes beyond 64 bits of bytes") {
    const auto odd = [](auto& v) {
        v.data = reinterpret_cast<decltype(v.data)>(reinterpret_cast<std::uintptr_t>(v.data) + 1);
    };
    refused(
        "env.losses: is not aligned", [&](call& c) { odd(c.env.losses); }, on_dense);
    refused(
        "teacher.log_tail: is not aligned", [&](call& c) { odd(c.support.log_tail); }, on_support);
    refused(
        "env.weights: is not aligned",
        [](call& c) {
            c.env.weights = c.row_weights;
            c.env.weights.data = static_cast<const char*>(c.env.weights.data) + 2;
        },
        on_dense);
    constexpr index_t huge = index_t{1} << 62;
    for (const index_t stride : {huge, huge / 2, huge / 4, std::numeric_limits<index_t>::max()}) {
        refused(
            "student.z: is larger than any memory", [=](call& c) { c.s.z.stride = stride; }, on_dense);
        refused(
            "teacher.y: is larger than any memory", [=](call& c) { c.dense.y.stride = stride; }, on_dense);
        refused(
            "teacher.log_q: is larger than any memory", [=](call& c) { c.support.log_q.stride = stride; }, on_support);
    }
    refused(
        "student.dz: has 5 columns of padding after 20, its rows are 24 apart", [](call& c) { c.s.dz.padding = 5; },
        on_dense);
    refused(
        "student.dz: has -1 columns of padding", [](call& c) { c.s.dz.padding = -1; }, on_dense);
    refused(
        "student.dz: has 9223372036854775807 columns of padding",
        [](call& c) { c.s.dz.padding = std::numeric_limits<index_t>::max(); }, on_dense);
    refused(
        "env.offsets: is larger than any memory",
        [](call& c) {
            c.offsets = {0, 3};
            c.env.offsets = {c.offsets.data(), huge};
        },
        on_dense);
}

TEST_CASE("no output overlaps another span: every pair") {
    // Each span is put by its own function at an address and says how many bytes it takes there.
    struct place {
        const char* name;
        std::size_t (*put)(call&, std::byte*);
    };
    static constexpr auto matrix = [](auto& v, std::byte* p) {
        v.data = reinterpret_cast<decltype(v.data)>(p);
        return std::size_t((v.rows - 1) * v.stride + v.cols + v.padding) * sizeof(*v.data);
    };
    static constexpr auto vector = [](auto& v, std::byte* p, auto* element, index_t n) {
        v = {reinterpret_cast<decltype(element)>(p), n};
        return std::size_t(n) * sizeof(*element);
    };
    static constexpr float* f = nullptr;
    const std::vector<place> outputs{
        {"student.dz", [](call& c, std::byte* p) { return matrix(c.s.dz, p); }},
        {"env.losses", [](call& c, std::byte* p) { return vector(c.env.losses, p, f, rows); }},
        {"env.lse", [](call& c, std::byte* p) {
             using lse = std::remove_pointer_t<decltype(c.env.lse.data)>;
             return vector(c.env.lse, p, static_cast<lse*>(nullptr), rows);
         }}};
    const std::vector<place> any{
        {"student.z", [](call& c, std::byte* p) { return matrix(c.s.z, p); }},
        {"env.mask",
         [](call& c, std::byte* p) {
             c.env.mask = view(reinterpret_cast<const std::int16_t*>(p), rows);
             return std::size_t(2 * rows);
         }},
        {"env.weights",
         [](call& c, std::byte* p) { return vector(c.env.weights, p, static_cast<const double*>(nullptr), rows); }},
        {"env.offsets",
         [](call& c, std::byte* p) {
             return vector(c.env.offsets, p, static_cast<const std::int32_t*>(nullptr), rows + 1);
         }},
        {"env.versions",
         [](call& c, std::byte* p) {
             return vector(c.env.versions, p, static_cast<const std::int32_t*>(nullptr), rows);
         }},
        {"env.given_lse", [](call& c, std::byte* p) {
             using lse = std::remove_pointer_t<decltype(c.env.given_lse.data)>;
             return vector(c.env.given_lse, p, static_cast<lse*>(nullptr), rows);
         }}};
    const std::vector<place> dense{{"teacher.y", [](call& c, std::byte* p) { return matrix(c.dense.y, p); }}};
    const std::vector<place> support{
        {"teacher.ids", [](call& c, std::byte* p) { return matrix(c.support.ids, p); }},
        {"teacher.log_q", [](call& c, std::byte* p) { return matrix(c.support.log_q, p); }},
        {"teacher.log_tail", [](call& c, std::byte* p) {
             return vector(c.support.log_tail, p, static_cast<const float*>(nullptr), rows);
         }}};
    const std::vector<place> weighted{
        {"teacher.ids", [](call& c, std::byte* p) { return matrix(c.weighted.ids, p); }},
        {"teacher.log_q", [](call& c, std::byte* p) { return matrix(c.weighted.log_q, p); }},
        {"teacher.log_mu", [](call& c, std::byte* p) { return matrix(c.weighted.log_mu, p); }},
        {"teacher.weight", [](call& c, std::byte* p) { return matrix(c.weighted.weight, p); }},
        {"teacher.exact",
         [](call& c, std::byte* p) {
             c.weighted.exact = view(reinterpret_cast<const std::uint8_t*>(p), rows, k);
             return std::size_t(rows * k);
         }},
        {"teacher.log_prox",
         [](call& c, std::byte* p) {
             c.weighted.log_prox = view(reinterpret_cast<const float*>(p), rows, k);
             return std::size_t(4 * rows * k);
         }},
        {"teacher.log_ref", [](call& c, std::byte* p) {
             c.weighted.log_ref = view(reinterpret_cast<const float*>(p), rows, k);
             return std::size_t(4 * rows * k);
         }}};
    const auto try_all = [&](const std::vector<place>& inputs, auto run) {
        for (std::size_t w = 0; w < outputs.size(); ++w)
            for (std::size_t i = 0; i < inputs.size() + any.size() + outputs.size() - w - 1; ++i) {
                const place& out = outputs[w];
                const place& in = i < inputs.size()                ? inputs[i]
                                  : i < inputs.size() + any.size() ? any[i - inputs.size()]
                                                                   : outputs[w + 1 + i - inputs.size() - any.size()];
                const auto says = [&](std::ptrdiff_t shift) { // the other span `shift` bytes from the output's first
                    alignas(64) std::byte memory[4096] = {};
                    call c;
                    std::byte* p = memory + 2048;
                    out.put(c, p);
                    in.put(c, p + shift);
                    try {
                        run(c);
                    } catch (const invalid_input& e) { // zeros need not make sense as contents
                        return std::string(e.what());
                    }
                    return std::string();
                };
                call c;
                alignas(64) std::byte memory[2048] = {};
                const auto out_bytes = std::ptrdiff_t(out.put(c, memory)), in_bytes = std::ptrdiff_t(in.put(c, memory));
                const std::string want = std::string("opd: ") + out.name + ": overlaps " + in.name;
                INFO(std::string(want));
                const auto up = [](std::ptrdiff_t x) { return (x + 7) / 8 * 8; };
                const bool exact = std::string(in.name) == "student.z" && w == 0;
                if (exact)
                    CHECK(says(0).find("student.dz: is student.z in rows of 24 for 20 columns: say .padding = 4") !=
                          std::string::npos);
                else
                    CHECK(says(0).find(want) == 0);
                CHECK(says(up(out_bytes) - 8).find(want) == 0);
                CHECK(says(8 - up(in_bytes)).find(want) == 0);
                CHECK(says(up(out_bytes)).find("overlaps") == std::string::npos);
                CHECK(says(-up(in_bytes)).find("overlaps") == std::string::npos);
            }
    };
    try_all(dense, on_dense);
    try_all(support, on_support);
    try_all(weighted, on_weighted);

    const auto tokens = [](std::size_t which, std::ptrdiff_t shift) { // out 48 bytes, lse 24
        call c;
        alignas(64) std::byte memory[4096] = {};
        std::byte *p = memory + 2048, *other = p + shift;
        const auto out = view(reinterpret_cast<float*>(which == 3 ? other : p), rows, k);
        auto z = c.s.z;
        auto ids = c.support.ids;
        row_mask<> mask;
        vector_view<double> lse;
        if (which == 0) z.data = reinterpret_cast<const float*>(other);
        if (which == 1) ids.data = reinterpret_cast<const std::int32_t*>(other);
        if (which == 2) mask = view(reinterpret_cast<const std::int32_t*>(other), rows);
        if (which >= 3) lse = view(reinterpret_cast<double*>(which == 3 ? p : other), rows);
        if (which >= 4) {
            if (which == 5) z.data = reinterpret_cast<const float*>(p);
            if (which == 6) ids.data = reinterpret_cast<const std::int32_t*>(p);
            if (which == 7) mask = view(reinterpret_cast<const std::int32_t*>(p), rows);
            std::vector<float> elsewhere(rows * k);
            token_logp(c.backend, z, ids, which == 4 ? out : view(elsewhere.data(), rows, k), 1, mask, lse);
            return;
        }
        token_logp(c.backend, z, ids, out, 1, mask, lse);
    };
    const char* said[] = {"log_p: overlaps z",   "log_p: overlaps ids", "log_p: overlaps mask", "log_p: overlaps lse",
                          "log_p: overlaps lse", "lse: overlaps z",     "lse: overlaps ids",    "lse: overlaps mask"};
    for (std::size_t which = 0; which < 8; ++which) {
        CHECK_THROWS_WITH_AS(tokens(which, 0), doctest::Contains(said[which]), invalid_input);
        CHECK_THROWS_WITH_AS(tokens(which, 8), doctest::Contains(said[which]), invalid_input);
        CHECK_NOTHROW(tokens(which, -512));
    }
}

TEST_CASE("disjoint column ranges of one buffer are no overlap") {
    call c;
    const double want = c.run_dense().loss;
    const auto dz = c.dz, losses = c.losses;
    constexpr index_t wide = 96; // z | gap | dz and 4 of padding | y, side by side in rows of 96
    std::vector<float> one(rows * wide, 777.F);
    for (index_t r = 0; r < rows; ++r) {
        std::copy_n(c.z.begin() + r * 24, vocab, one.begin() + r * wide);
        std::copy_n(c.y.begin() + r * 24, vocab, one.begin() + r * wide + 52);
    }
    const auto at = [&](index_t column) { return view(one.data() + column, rows, vocab, wide); };
    c.s.z = at(0), c.dense.y = at(52);
    c.s.dz = view(one.data() + 28, rows, vocab, {.stride = wide, .padding = 4});
    CHECK(c.run_dense().loss == want);
    CHECK(c.losses == losses);
    for (index_t r = 0; r < rows; ++r)
        for (index_t v = 0; v < 96; ++v) {
            const float x = one[std::size_t(r * wide + v)];
            if (v < 20) CHECK(x == c.z[std::size_t(r * 24 + v)]);
            if ((v >= 20 && v < 28) || v >= 72) CHECK(x == 777);
            if (v >= 28 && v < 48) CHECK(x == dz[std::size_t(r * 24 + v - 28)]);
            if (v >= 48 && v < 52) CHECK(x == 0);
        }
    refused(
        "student.dz: overlaps teacher.y", // by its padding alone
        [&](call& d) {
            d.s.dz = c.s.dz, d.dense.y = c.dense.y;
            d.s.dz.padding = 25;
        },
        on_dense);
    refused(
        "student.dz: overlaps teacher.y", // y begins before dz and reaches round into its next row
        [&](call& d) {
            d.s.dz = view(one.data() + wide + 4, rows - 1, vocab, wide);
            d.dense.y = view(one.data() + 90, rows - 1, vocab, wide);
            d.s.z.rows = rows - 1, d.env.losses = {};
        },
        on_dense);
    refused(
        "student.dz: overlaps teacher.y", // other strides: not told apart
        [&](call& d) {
            d.s.dz = c.s.dz;
            d.dense.y = view(one.data() + 52, rows, vocab, 48);
        },
        on_dense);
    call d; // a vector in a gap between two rows
    d.s.dz = c.s.dz;
    d.env.losses = view(one.data() + 20, rows);
    CHECK_NOTHROW(d.run_dense());
    d.env.losses = view(one.data() + 26, rows);
    CHECK_THROWS_WITH_AS(d.run_dense(), doctest::Contains("student.dz: overlaps env.losses"), invalid_input);
}

TEST_CASE("contents, checked: the argument and the row are named") {
    const auto check_all = [](call& c) { c.env.checks = check::contents; };
    refused(
        "student.z, row 1: NaN at column 7", [&](call& c) { check_all(c), c.z[24 + 7] = nan_f; }, on_dense, 1);
    refused(
        "student.z, row 2: +inf at column 0", [&](call& c) { check_all(c), c.z[48] = inf_f; }, on_dense, 2);
    refused(
        "teacher.y, row 0: NaN at column 19", [&](call& c) { check_all(c), c.y[19] = nan_f; }, on_dense, 0);
    refused(
        "student.z, row 1: every logit is -inf",
        [&](call& c) { check_all(c), std::fill_n(c.z.begin() + 24, vocab, minus_inf); }, on_dense, 1);
    refused(
        "teacher.ids, row 1: id 20 in column 2", [&](call& c) { check_all(c), c.ids[k + 2] = 20; }, on_support, 1);
    refused(
        "teacher.ids, row 1: id -1 in column 2", [&](call& c) { check_all(c), c.ids[k + 2] = -1; }, on_samples, 1);
    refused(
        "teacher.ids, row 2: id 2 twice in a support",
        [&](call& c) { check_all(c), c.ids[2 * k + 1] = c.ids[2 * k] = 2; }, on_support, 2);
    refused(
        "teacher.log_q, row 0: is not a log-probability in column 3", [&](call& c) { check_all(c), c.log_q[3] = 0.5F; },
        on_support, 0);
    refused(
        "teacher.log_mu, row 2: is not the log-probability of a drawn token in column 0",
        [&](call& c) { check_all(c), c.log_mu[2 * k] = -9999; }, on_samples, 2);
    refused(
        "teacher.log_mu, row 2", [&](call& c) { check_all(c), c.log_mu[2 * k] = nan_f; }, on_weighted, 2);
    call c; // masked rows are not looked at
    check_all(c);
    const std::vector<int> mask{1, 0, 1};
    c.env.mask = row_mask<>(mask);
    c.z[24 + 7] = nan_f, c.ids[k + 2] = 99;
    CHECK(c.run_dense().diagnostics.kept == 2);
    CHECK(c.run_samples().diagnostics.kept == 2);
}

TEST_CASE("contents, counted: loss 0 and gradient 0 in the bad row, the others as if it were masked") {
    const auto counted = [](auto run, auto spoil) {
        call c, clean;
        spoil(c);
        const std::vector<int> mask{1, 0, 1};
        clean.env.mask = row_mask<>(mask);
        c.env.reduction = clean.env.reduction = reduce::sum;
        const result got = run(c), want = run(clean);
        CHECK(got.diagnostics.bad_rows == 1);
        CHECK(got.diagnostics.first_bad_row == 1);
        CHECK(got.loss == want.loss);
        CHECK(c.losses == clean.losses);
        CHECK(c.zero_row(1));
        CHECK(c.dz == clean.dz);
    };
    const auto dense = [](call& c) { return c.run_dense(); };
    const auto support = [](call& c) { return c.run_support(); };
    const auto samples = [](call& c) { return c.run_samples(); };
    const auto weighted = [](call& c) { return c.run_weighted(); };
    counted(dense, [](call& c) { c.z[24] = nan_f; });
    counted(dense, [](call& c) { c.z[24 + 19] = inf_f; });
    counted(dense, [](call& c) { c.y[24 + 3] = nan_f; });
    counted(dense, [](call& c) { std::fill_n(c.z.begin() + 24, vocab, minus_inf); });
    counted(dense, [](call& c) { std::fill_n(c.y.begin() + 24, vocab, minus_inf); });
    counted([](call& c) { return evaluate(c.backend, c.s, c.dense, jsd{}, c.env); },
            [](call& c) { c.y[24 + 3] = nan_f; });
    counted(support, [](call& c) { c.ids[k] = 20; });
    counted(support, [](call& c) { c.ids[k] = c.ids[k + 1]; });
    counted(support, [](call& c) { c.log_q[k] = nan_f; });
    counted(support, [](call& c) { c.z[24] = nan_f; });
    counted(support, [](call& c) { c.log_tail[1] = nan_f; });
    counted(samples, [](call& c) { c.ids[k] = -5; });
    counted(samples, [](call& c) { c.ids[k + 3] = 1 << 30; });
    counted(samples, [](call& c) { c.log_mu[k] = nan_f; });
    counted(samples, [](call& c) { c.log_mu[k] = -9999; });
    counted(samples, [](call& c) { c.log_mu[k] = minus_inf; });
    counted(samples, [](call& c) { c.log_q[k] = 0.1F; });
    counted(samples, [](call& c) { c.z[24 + 5] = nan_f; });
    counted(weighted, [](call& c) { std::fill_n(c.ids.begin() + k, k, -1); });
    counted(weighted, [](call& c) { c.weight[k] = nan_f; });
    counted([](call& c) { return evaluate(c.backend, c.s, c.support, renormalised{reverse_kl{}}, c.env); },
            [](call& c) { c.ids[k] = 77; });
}

TEST_CASE("infinite rows: counted; floored at -30 nats, skipped or raised") {
    const auto spoil = [](call& c, bool teacher_side) {
        (teacher_side ? c.y : c.z)[24 + 7] = minus_inf;
        c.env.reduction = reduce::sum;
    };
    {
        call c, skipped;
        spoil(c, true), spoil(skipped, true);
        naive_backend slow;
        std::vector<double> want(rows * vocab);
        const student::logits<float, double> s{c.s.z, view(want.data(), rows, vocab)};
        const result got = c.run_dense(), ref = evaluate(slow, s, c.dense, reverse_kl{}, c.env);
        CHECK(got.diagnostics.infinite_rows == 1);
        CHECK(got.diagnostics.first_infinite_row == 1);
        CHECK(got.loss == doctest::Approx(ref.loss).epsilon(1e-6));
        for (index_t v = 0; v < vocab; ++v)
            CHECK(c.dz[std::size_t(24 + v)] == doctest::Approx(want[std::size_t(vocab + v)]));
        skipped.env.on_infinite = infinite::skip();
        const result left = skipped.run_dense();
        CHECK(left.diagnostics.infinite_rows == 1);
        CHECK(skipped.zero_row(1));
        CHECK(skipped.losses[1] == 0);
        CHECK(left.loss < got.loss);
        CHECK(evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env).diagnostics.infinite_rows == 0);
        CHECK(evaluate(c.backend, c.s, c.dense, jsd{}, c.env).diagnostics.infinite_rows == 0);
    }
    { // forward KL: the value is floored, the gradient p - q stays
        call c;
        spoil(c, false);
        std::vector<double> lp, lq;
        double lse = 0;
        naive_backend::log_softmax(c.s.z.row(1), vocab, 1, nullptr, &lse, lp);
        naive_backend::log_softmax(c.dense.y.row(1), vocab, 1, nullptr, &lse, lq);
        const result got = evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env);
        CHECK(got.diagnostics.infinite_rows == 1);
        double want = 0;
        for (std::size_t v = 0; v < lp.size(); ++v) want += std::exp(lq[v]) * (lq[v] - std::max(lp[v], -30.0));
        CHECK(c.losses[1] == doctest::Approx(want));
        for (std::size_t v = 0; v < lp.size(); ++v)
            CHECK(c.dz[24 + v] == doctest::Approx(std::exp(lp[v]) - std::exp(lq[v])).epsilon(1e-5));
        c.env.on_infinite = infinite::floor(-5);
        evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env);
        CHECK(c.losses[1] < want);
    }
    for (const bool teacher_side : {true, false}) {
        call c;
        spoil(c, teacher_side);
        c.env.on_infinite = infinite::raise();
        const auto run = [&] {
            teacher_side ? evaluate(c.backend, c.s, c.dense, reverse_kl{}, c.env)
                         : evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env);
        };
        CHECK_THROWS_WITH_AS(run(), doctest::Contains("the loss is infinite in row 1"), infinite_value);
        CHECK(c.untouched());
    }
    { // samples: log q = -inf on a drawn token
        call c;
        c.log_q[k + 1] = minus_inf;
        CHECK(c.run_samples().diagnostics.infinite_rows == 1);
        CHECK(detail::is_finite(c.losses[1]));
        c.env.on_infinite = infinite::skip();
        c.run_samples();
        CHECK(c.zero_row(1));
        CHECK(c.losses[1] == 0);
    }
}

TEST_CASE("loss clamp: the loss is cut, the gradient zero, the row counted") {
    call c, open;
    c.env.reduction = open.env.reduction = reduce::sum;
    open.run_dense();
    const double cut = open.losses[0] * 0.5;
    c.env.loss_clamp = cut;
    const result r = c.run_dense();
    CHECK(c.losses[0] == doctest::Approx(cut));
    CHECK(c.zero_row(0));
    index_t above = 0;
    for (const float l : open.losses) above += l > cut;
    CHECK(r.diagnostics.clamped_rows == above);
    double cut_sum = 0; // the reduced loss is that of the cut rows
    for (const float l : c.losses) cut_sum += double(l);
    CHECK(r.loss == doctest::Approx(cut_sum).epsilon(1e-6));
    CHECK(r.loss < open.run_dense().loss);
    double before = 0;
    for (const float l : open.losses) before += l;
    CHECK(r.diagnostics.kept_loss == doctest::Approx(before)); // reported before the clamp
    c.env.loss_clamp = 1e-3;
    const auto all_cut = [&](const result& got) {
        double sum = 0;
        for (const float l : c.losses) sum += double(l);
        CHECK(got.loss == doctest::Approx(sum).epsilon(1e-6));
        CHECK(std::abs(got.loss) <= 3.001e-3);
        CHECK(got.diagnostics.clamped_rows > 0);
    };
    all_cut(c.run_support());
    all_cut(c.run_samples());
    std::fill(c.log_q.begin(), c.log_q.end(), -1e-3F); // the teacher likes every drawn token: negative losses
    all_cut(c.run_samples());
    CHECK(c.losses[0] == -1e-3F);
}

TEST_CASE("an arena too small says how much is needed") {
    call c;
    std::vector<std::byte> arena(64);
    c.backend.arena = arena;
    const auto s = c.s;
    CHECK_THROWS_WITH_AS(evaluate(c.backend, s, c.dense, jsd{}), doctest::Contains("this call needs"), invalid_input);
    CHECK(c.untouched());
    arena.resize(workspace_bytes(c.backend, s, c.dense, jsd{}));
    c.backend.arena = arena;
    evaluate(c.backend, s, c.dense, jsd{});
}
