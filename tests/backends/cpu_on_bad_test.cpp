// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Rows that are dropped for what they hold: what they do to the loss, when env.on_bad throws and what is written by
// then, on every backend; and the one line that says what was dropped.
#include "backends/host_run.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/naive_backend.hpp"

#include <bit>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const float nan_f = std::bit_cast<float>(0x7fc00000u);
constexpr index_t rows = 8, vocab = 5;

/// Eight rows of which the first is masked and `spoilt` hold a NaN.
struct call {
    std::vector<float> z, y, dz = std::vector<float>(rows * vocab, 777.f), losses = std::vector<float>(rows, 777.f);
    std::vector<std::uint8_t> mask = std::vector<std::uint8_t>(rows, 1);
    const std::vector<std::int64_t> offsets{0, 4, 8};
    opd::env env;

    explicit call(std::vector<index_t> spoilt) {
        for (index_t i = 0; i < rows * vocab; ++i) z.push_back(float(i % 7)), y.push_back(float(i % 4));
        for (const index_t r : spoilt) z[std::size_t(r * vocab + 2)] = nan_f;
        mask[0] = 0;
        env.mask = mask, env.losses = losses, env.offsets = offsets;
    }
    template <class Backend>
    result run(Backend& be) {
        return evaluate(be, student::logits{view(z.data(), rows, vocab), view(dz.data(), rows, vocab)},
                        teacher::dense{view(y.data(), rows, vocab)}, reverse_kl{}, env);
    }
};

template <class Backend>
void policies() {
    Backend be;
    call plain({3, 5});
    const result want = plain.run(be);
    CHECK(want.diagnostics.kept == 7);
    CHECK(want.diagnostics.bad_rows == 2);
    CHECK(want.diagnostics.first_bad_row == 3);

    const auto throws = [&](bad policy, std::vector<index_t> spoilt = {3, 5}) {
        call c(spoilt), counted(spoilt);
        const result r = counted.run(be);
        c.env.on_bad = policy;
        bool thrown = false;
        try {
            const double loss = c.run(be).loss;
            CHECK(loss == r.loss);
        } catch (const bad_contents& e) {
            thrown = true;
            CHECK(e.result.loss == r.loss);
            CHECK(e.result.diagnostics.bad_rows == r.diagnostics.bad_rows);
            CHECK(std::string(e.what()).find(std::to_string(r.diagnostics.bad_rows) + " of 7 kept rows") !=
                  std::string::npos);
            CHECK(std::string(e.what()).find("first is row " + std::to_string(spoilt.at(0))) != std::string::npos);
        }
        CHECK(c.dz == counted.dz); // written either way
        CHECK(c.losses == counted.losses);
        for (const index_t row : spoilt)
            for (index_t v = 0; v < vocab; ++v) CHECK(c.dz[std::size_t(row * vocab + v)] == 0);
        return thrown;
    };
    CHECK_FALSE(throws(bad::count()));
    CHECK(throws(bad::raise()));
    CHECK(throws(bad::raise(), {7}));
    CHECK_FALSE(throws(bad::raise(), {}));
    CHECK_FALSE(throws(bad::raise(), {0})); // masked: never looked at
    CHECK(throws(bad::raise_above(0.28)));
    CHECK_FALSE(throws(bad::raise_above(2. / 7))); // of the 7 kept rows, not of the 8
    CHECK(throws(bad::raise_above(0.99), {1, 2, 3, 4, 5, 6, 7}));

    for (const double share : {0., 1., -0.5, 2., double(nan_f)}) {
        call c({3});
        c.env.on_bad = bad::raise_above(share);
        CHECK_THROWS_WITH_AS(c.run(be), doctest::Contains("env.on_bad: raise_above takes a share between 0 and 1"),
                             invalid_input);
        CHECK(c.dz[0] == 777);
    }
}

/// A loss is divided by the rows that the mask keeps, whatever they turn out to hold.
template <class Backend>
void divides_by_kept_rows() {
    Backend be;
    const auto sum_of = [](const call& c) {
        double s = 0;
        for (const float l : c.losses) s += double(l);
        return s;
    };
    call c({3, 5});
    const result mean = c.run(be);
    CHECK(sum_of(c) > 1);
    CHECK(mean.loss == doctest::Approx(sum_of(c) / 7).epsilon(1e-6)); // losses are floats
    CHECK(mean.diagnostics.mean_kept_loss() == doctest::Approx(sum_of(c) / 5).epsilon(1e-6));
    call all({});
    const result whole = all.run(be);
    CHECK(whole.diagnostics.bad_rows == 0);
    for (index_t r : {1, 2, 4, 6, 7}) // a good row's gradient does not depend on the others
        for (index_t v = 0; v < vocab; ++v)
            CHECK(c.dz[std::size_t(r * vocab + v)] == all.dz[std::size_t(r * vocab + v)]);

    call s({3, 5});
    s.env.reduction = reduce::sequence_mean;
    const double by_sequence = s.run(be).loss;
    double want = 0;
    for (index_t r = 0; r < rows; ++r) want += double(s.losses[std::size_t(r)]) / (2 * (r < 4 ? 3 : 4));
    CHECK(by_sequence == doctest::Approx(want).epsilon(1e-6));
}

/// What evaluate makes of a backend whose result comes later.
struct later {
    static constexpr space memory_space = space::device;
    struct promise {
        bad on_bad = {};
    };
    template <class Job>
    promise for_rows(const Job&) {
        return {};
    }
};

} // namespace

TEST_CASE_TEMPLATE("env.on_bad throws once everything is written", B, cpu_backend, naive_backend, host_run_backend) {
    policies<B>();
}

TEST_CASE_TEMPLATE("a loss divides by kept rows, bad ones among them", B, cpu_backend, naive_backend,
                   host_run_backend) {
    divides_by_kept_rows<B>();
}

TEST_CASE("a result that comes later carries the policy to where it is fetched") {
    later be;
    const float x = 0;
    const auto v = device_view(&x, 1, 1);
    const auto r =
        evaluate(be, student::logits{v}, teacher::dense{v}, reverse_kl{}, device_env{.on_bad = bad::raise_above(.25)});
    CHECK(r.on_bad.act == bad::action::raise_above);
    CHECK(r.on_bad.share == .25);
    result bad_one;
    bad_one.diagnostics.kept = 4, bad_one.diagnostics.bad_rows = 1, bad_one.diagnostics.first_bad_row = 2;
    detail::raise_bad(bad_one, r.on_bad);
    bad_one.diagnostics.bad_rows = 2;
    CHECK_THROWS_AS(detail::raise_bad(bad_one, r.on_bad), bad_contents);
}

TEST_CASE("one line says what was dropped, and nothing where nothing was") {
    diagnostics d;
    d.rows = 64, d.kept = 60;
    CHECK(to_string(d) == "64 rows, 60 kept");
    d.tokens = 4, d.ratio_sum = 4, d.ratio_square_sum = 4.1;
    CHECK(to_string(d) == "64 rows, 60 kept");
    d.bad_rows = 2, d.first_bad_row = 0;
    CHECK(to_string(d) == "64 rows, 60 kept; 2 bad (first: row 0): loss 0, gradient 0");
    d = {};
    d.rows = d.kept = 9;
    d.infinite_rows = 1, d.first_infinite_row = 7, d.clamped_rows = 2, d.careful_rows = 3, d.saturated = 4;
    d.baseline_missing = 5, d.tail_floored = 6;
    CHECK(to_string(d) ==
          "9 rows, 9 kept; 1 infinite (first: row 7): treated by env.on_infinite; 2 cut by env.loss_clamp: "
          "gradient 0; 3 computed in float64; 4 ratios saturated at e^80; 5 samples without a baseline; "
          "6 teacher tails floored");
    d = {};
    d.certain_mu = 2;
    CHECK(to_string(d) == "0 rows, 0 kept; 2 log mu of exactly 0");
    d = {};
    d.rows = d.kept = d.tokens = 100, d.ratio_sum = 150, d.ratio_square_sum = 226;
    REQUIRE(d.mu_mismatch());
    CHECK(to_string(d) == "100 rows, 100 kept; mean ratio 1.5: log mu is not the law that the tokens were drawn from");
}
