// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Two passes over a batch: a table of log p, a fit over all of it, and `evaluate` with what the fit froze
// (docs/concepts/frozen.md). On the CPU backend and on the GPU's rows.
#include "backends/host_run.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

namespace own {

/// Drops the tokens with the largest (log p - log mu)² until the mean over the others is at most `bound`: the second
/// moment of the whole batch, whatever micro-batches it comes in.
struct second_moment_fit {
    double bound;
    std::vector<double> squares = {};
    double first_dropped = INFINITY;

    void add(opd::matrix_view<const double> log_p, opd::matrix_view<const double> log_mu) {
        for (opd::index_t r = 0; r < log_p.rows; ++r)
            for (opd::index_t j = 0; j < log_p.cols; ++j) squares.push_back(square(log_p(r, j) - log_mu(r, j)));
    }
    void merge(const second_moment_fit& other) { // of another rank
        squares.insert(squares.end(), other.squares.begin(), other.squares.end());
    }
    void freeze() {
        std::sort(squares.begin(), squares.end());
        double sum = 0;
        for (std::size_t i = 0; i < squares.size() && std::isinf(first_dropped); ++i)
            if ((sum += squares[i]) > bound * double(i + 1)) first_dropped = squares[i];
    }
    bool keeps(double log_p, double log_mu) const { return square(log_p - log_mu) < first_dropped; }

private:
    static double square(double x) { return x * x; }
};

/// Shows what it was told: loss 1000 row + slot, c the sequence's log-ratio.
struct told {
    OPD_HD opd::token_out operator()(const opd::token_in& x) const {
        return {1000. * double(x.row) + x.slot, x.sequence_log_ratio};
    }
};

} // namespace own

using namespace opd;
using namespace opd::test;

namespace {

/// n rows of V logits and m drawn tokens, in double so that a table of log p is what the estimator sees.
struct batch {
    index_t n = 6, v = 40, m = 5;
    std::vector<double> z, dz, log_mu, log_q;
    std::vector<std::int32_t> ids;

    explicit batch(unsigned seed) {
        std::mt19937 u(seed);
        std::normal_distribution<double> normal;
        for (index_t i = 0; i < n * v; ++i) z.push_back(2 * normal(u));
        dz.resize(z.size());
        for (index_t i = 0; i < n * m; ++i) {
            ids.push_back(std::int32_t(u() % unsigned(v)));
            log_mu.push_back(-2.5 + 0.5 * normal(u)), log_q.push_back(-2.5 + 0.5 * normal(u));
        }
    }
    student::logits<double> student(std::vector<double>& to) const {
        return {view(z.data(), n, v), view(to.data(), n, v)};
    }
    auto of(const std::vector<double>& x) const { return view(x.data(), n, m); }
    teacher::samples<std::int32_t, double> samples() const { return {view(ids.data(), n, m), of(log_mu), of(log_q)}; }
    template <class Backend>
    std::vector<double> table(Backend& be) const {
        std::vector<double> log_p(std::size_t(n * m));
        token_logp(be, view(z.data(), n, v), view(ids.data(), n, m), view(log_p.data(), n, m));
        return log_p;
    }
};

void close(const std::vector<double>& a, const std::vector<double>& b) {
    RC_ASSERT(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) RC_ASSERT(std::abs(a[i] - b[i]) <= 1e-13 * (1 + std::abs(a[i])));
}

template <class Backend>
void frozen_on(Backend be, unsigned seed) {
    batch b(seed);
    std::mt19937 u(seed + 1);
    const auto tokens = std::size_t(b.n * b.m);
    std::vector<std::uint8_t> keep(tokens);
    std::vector<double> weight(tokens), both(tokens), dz(b.dz);
    index_t dropped = 0;
    for (std::size_t i = 0; i < tokens; ++i) {
        keep[i] = u() % 3 != 0, weight[i] = double(u() % 7) / 3;
        both[i] = keep[i] ? weight[i] / double(b.m) : 0;
        dropped += !keep[i];
    }
    // the same tokens with the weights in the cache
    const teacher::weighted<std::int32_t, double> by_hand{view(b.ids.data(), b.n, b.m), b.of(both), b.of(b.log_mu),
                                                          b.of(b.log_q)};
    const result expected = evaluate(be, b.student(b.dz), by_hand, mc{.baseline = baseline::none{}}, env{});
    env e;
    e.frozen = {.keep = view(keep.data(), b.n, b.m), .weight = b.of(weight)};
    const result r = evaluate(be, b.student(dz), b.samples(), mc{reverse_kl{}}, e);
    RC_ASSERT(std::abs(r.loss - expected.loss) <= 1e-13 * (1 + std::abs(r.loss)));
    close(b.dz, dz);
    RC_ASSERT(r.diagnostics.dropped == dropped);
    RC_ASSERT(r.diagnostics.tokens == b.n * b.m);

    // the estimator's own advantage, from the table of the pass before
    const std::vector<double> log_p = b.table(be);
    std::vector<double> advantage(tokens);
    for (std::size_t i = 0; i < tokens; ++i) advantage[i] = b.log_q[i] - log_p[i];
    e.frozen = {};
    const result own = evaluate(be, b.student(b.dz), b.samples(), mc{.baseline = baseline::leave_one_out{}}, e);
    e.frozen = {.advantage = b.of(advantage)};
    const result given = evaluate(be, b.student(dz), b.samples(), mc{.baseline = baseline::leave_one_out{}}, e);
    RC_ASSERT(own.loss == given.loss);
    RC_ASSERT(b.dz == dz);

    // what a surrogate is told
    std::vector<double> sequence(std::size_t(b.n));
    for (double& x : sequence) x = double(u() % 100) / 50 - 1;
    std::vector<float> losses(std::size_t(b.n));
    e.frozen = {.sequence_log_ratio = sequence};
    e.losses = losses, e.reduction = reduce::sum;
    evaluate(be, b.student(dz), b.samples(), mc{reverse_kl{}, own::told{}}, e);
    for (index_t r_ = 0; r_ < b.n; ++r_) RC_ASSERT(losses[std::size_t(r_)] == float(1000 * r_ + (b.m - 1) / 2.));
    std::vector<double> c(b.dz.size()); // c = sequence/m at each token: dz = c - p Σ c
    for (index_t row = 0; row < b.n; ++row) {
        double top = -1e300, sum = 0;
        for (index_t i = 0; i < b.v; ++i) top = std::max(top, b.z[std::size_t(row * b.v + i)]);
        for (index_t i = 0; i < b.v; ++i) sum += std::exp(b.z[std::size_t(row * b.v + i)] - top);
        const double s = sequence[std::size_t(row)];
        for (index_t i = 0; i < b.v; ++i)
            c[std::size_t(row * b.v + i)] = -s * std::exp(b.z[std::size_t(row * b.v + i)] - top) / sum;
        for (index_t j = 0; j < b.m; ++j)
            c[std::size_t(row * b.v + b.ids[std::size_t(row * b.m + j)])] += s / double(b.m);
    }
    close(c, dz);
}

} // namespace

TEST_CASE("kept, weighted, with an advantage and a sequence's log-ratio of the pass before") {
    property("on the CPU", [](unsigned seed) { frozen_on(cpu_backend{.threads = 2}, seed); });
    property("on the GPU's rows", [](unsigned seed) { frozen_on(host_run_backend{.threads = 16}, seed); },
             {.cases = 20});
}

TEST_CASE("a fit over micro-batches and ranks is the fit over the batch") {
    property("the same tokens are kept, and their second moment is within the bound", [](unsigned seed) {
        const batch b(seed);
        cpu_backend be{.threads = 1};
        const std::vector<double> log_p = b.table(be);
        own::second_moment_fit whole{0.3}, rank_0{0.3}, rank_1{0.3};
        whole.add(b.of(log_p), b.of(b.log_mu));
        for (index_t r = 0; r < b.n; ++r) { // micro-batches of one row, on two ranks
            const std::size_t first = std::size_t(r * b.m);
            (r % 2 ? rank_1 : rank_0).add(view(&log_p[first], 1, b.m), view(&b.log_mu[first], 1, b.m));
        }
        rank_1.merge(rank_0);
        whole.freeze(), rank_1.freeze();
        double moment = 0;
        index_t kept = 0;
        for (std::size_t i = 0; i < log_p.size(); ++i) {
            RC_ASSERT(whole.keeps(log_p[i], b.log_mu[i]) == rank_1.keeps(log_p[i], b.log_mu[i]));
            if (!whole.keeps(log_p[i], b.log_mu[i])) continue;
            ++kept, moment += (log_p[i] - b.log_mu[i]) * (log_p[i] - b.log_mu[i]);
        }
        RC_ASSERT(moment <= 0.3 * double(kept) + 1e-12);
        RC_CLASSIFY(kept > 0 && kept < b.n * b.m, "some tokens are dropped");
    });
    const std::vector<double> tied{0, 1, 1}, zero(3); // of equal squares all are dropped, or the bound would not hold
    own::second_moment_fit fit{0.5};
    fit.add(view(tied.data(), 1, 3), view(zero.data(), 1, 3));
    fit.freeze();
    CHECK(fit.keeps(0, 0));
    CHECK_FALSE(fit.keeps(1, 0));
}

TEST_CASE("what is frozen is checked like a cache") {
    batch b(1);
    cpu_backend be{.threads = 1};
    std::vector<std::uint8_t> keep(std::size_t(b.n * b.m), 1);
    std::vector<double> weight(keep.size(), 1), sequence(std::size_t(b.n));
    const auto run = [&](const frozen_batch<>& frozen, check checks = check::count) {
        env e;
        e.frozen = frozen, e.checks = checks;
        return evaluate(be, b.student(b.dz), b.samples(), mc{reverse_kl{}}, e);
    };
    CHECK_THROWS_WITH_AS(run({.keep = view(keep.data(), b.n, b.m - 1)}),
                         doctest::Contains("env.frozen.keep: has shape"), invalid_input);
    CHECK_THROWS_WITH_AS(run({.weight = view(weight.data(), b.n - 1, b.m)}),
                         doctest::Contains("env.frozen.weight: has shape"), invalid_input);
    CHECK_THROWS_WITH_AS(run({.sequence_log_ratio = {sequence.data(), b.n - 1}}),
                         doctest::Contains("env.frozen.sequence_log_ratio: has"), invalid_input);
    env dense;
    dense.frozen.keep = view(keep.data(), b.n, b.m);
    CHECK_THROWS_WITH_AS(
        evaluate(be, b.student(b.dz), teacher::dense<double>{view(b.z.data(), b.n, b.v)}, reverse_kl{}, dense),
        doctest::Contains("env.frozen: is about drawn tokens"), invalid_input);
    env over;
    over.frozen.weight = view(b.dz.data(), b.n, b.m);
    CHECK_THROWS_WITH_AS(evaluate(be, b.student(b.dz), b.samples(), mc{reverse_kl{}}, over),
                         doctest::Contains("student.dz: overlaps env.frozen.weight"), invalid_input);
    weight[7] = NAN; // row 1, slot 2
    CHECK_THROWS_WITH_AS(run({.weight = b.of(weight)}, check::contents),
                         doctest::Contains("env.frozen.weight, row 1: is not finite in column 2"), invalid_input);
    CHECK(run({.weight = b.of(weight)}).diagnostics.first_bad_row == 1);
    CHECK(run({.advantage = b.of(weight)}).diagnostics.bad_rows == 1);
    std::vector<std::int32_t> some = b.ids;
    some[7] = -1; // nothing of an unused slot is read, nor the weight of a token that is not kept
    const std::vector<double> in_cache(weight.size(), 1);
    env contents;
    contents.checks = check::contents, contents.frozen.weight = b.of(weight);
    const teacher::weighted<std::int32_t, double> with_unused{view(some.data(), b.n, b.m), b.of(in_cache),
                                                              b.of(b.log_mu), b.of(b.log_q)};
    CHECK(evaluate(be, b.student(b.dz), with_unused, mc{reverse_kl{}}, contents).diagnostics.bad_rows == 0);
    keep[7] = 0;
    CHECK(run({.keep = view(keep.data(), b.n, b.m), .weight = b.of(weight)}, check::contents).diagnostics.dropped == 1);
    keep[7] = 1;
    sequence[4] = INFINITY;
    CHECK(run({.sequence_log_ratio = sequence}).diagnostics.first_bad_row == 4);
    keep[0] = 0;
    CHECK(
        to_string(run({.keep = view(keep.data(), b.n, b.m)}).diagnostics).find("1 tokens dropped by env.frozen.keep") !=
        std::string::npos);
}
