// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// The GPU's dense kernels, run on the host in a loop over thread indices.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/cuda_cases.hpp"
#include "backends/host_run.hpp"
#include "opd/backends/cpu.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/property.hpp"

namespace {

using namespace opd;
using namespace opd::test;

result run_eigen(auto& c, const auto& d) {
    cpu_backend backend;
    host_memory memory{backend};
    return run_case(memory, c, d);
}
result run_threads(auto& c, const auto& d, int threads, bool tree = true) {
    host_run_backend backend{threads, tree};
    host_memory memory{backend};
    return run_case(memory, c, d);
}

template <class T>
bool equal_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

TEST_CASE("value and gradient of every divergence, for any number of threads") {
    for (int threads : {1, 32, 128, 256}) {
        CAPTURE(threads);
        host_run_backend backend{threads};
        host_memory memory{backend};
        std::uint64_t seed = 1;
        for (index_t vocab : {1, 2, 7, 255, 256, 257, 1025, 2500, 5000})
            for (holes h : every_hole) {
                source s(seed++);
                dense_case<> c{.rows = 2, .vocab_z = vocab, .vocab_y = vocab};
                c.t_s = s.below(2) ? 1.f : float(0.5 + 1.5 * s.uniform());
                c.t_t = s.below(2) ? c.t_s : float(0.5 + 1.5 * s.uniform());
                fill_normal(c, s);
                punch(c, h, s);
                for_every_divergence([&](const char* name, const auto& d) {
                    if (!finite_with(d, h)) return;
                    INFO(std::string(name));
                    CAPTURE(int(h));
                    check_against_reference(memory, c, d, gradient_tolerance(d));
                });
            }
    }
}

TEST_CASE("random shapes, temperatures, holes and thread counts") {
    property("agrees with the reference", [](std::uint64_t seed) {
        source s(seed);
        const int threads = int(s.below(300)) + 1;
        const index_t vocab = s.below(5000) + 1;
        const holes h = every_hole[s.below(4)];
        dense_case<> c{.rows = 1, .vocab_z = vocab, .vocab_y = vocab};
        c.t_s = float(0.5 + 2 * s.uniform()), c.t_t = float(0.5 + 2 * s.uniform());
        fill_normal(c, s, 4 * s.uniform());
        punch(c, h, s);
        c.plain.reduction = reduce::sum;
        for_every_divergence([&](const char* name, const auto& d) {
            if (!finite_with(d, h)) return;
            dense_case<> mine = c;
            want_everything(mine);
            const result got = run_threads(mine, d, threads, s.below(2) == 0);
            const reference_row want = reference(c, d, 0);
            double worst = 0;
            for (index_t v = 0; v < vocab; ++v)
                worst = std::max(worst, std::abs(double(mine.dz[std::size_t(v)]) - want.dz[std::size_t(v)]));
            RC_LOG() << name << " V " << vocab << " threads " << threads << ": " << got.loss << " for " << want.value
                     << ", gradient off by " << worst << " of " << largest(want.dz) << '\n';
            RC_ASSERT(std::abs(got.loss - want.value) <= 2 * value_tolerance(d, want.value));
            RC_ASSERT(worst <= gradient_tolerance(d) * largest(want.dz) + want.kink + 1e-9);
        });
    });
}

TEST_CASE("the rows that plain float gets wrong") {
    const dense_case<> c = hard_rows(151936);
    host_run_backend backend{256};
    host_memory memory{backend};
    for_every_divergence([&](const char* name, const auto& d) {
        INFO(std::string(name));
        check_against_reference(memory, c, d, 1e-6);
    });
}

TEST_CASE("threads that begin with anchors of others' entries add up to the same sums") {
    using detail::row_sweep;
    source s(6);
    const index_t vocab = 3001;
    constexpr int threads = 16;
    std::vector<float> z(vocab), y(vocab);
    for (index_t v = 0; v < vocab; ++v) z[v] = float(3 * s.normal()), y[v] = float(3 * s.normal());
    constexpr raw_sums_needed all{.student_delta = true, .student_power = true, .teacher_delta = true};
    const auto swept = [&](const detail::row_anchors* begin, bool agree) {
        std::vector<row_sweep> parts;
        for (int t = 0; t < threads; ++t) {
            parts.push_back(row_sweep::begin(1, 1 / 1.5, .5, false));
            if (begin) parts.back().begin_at(*begin);
            const detail::row_tile<float, float, float> tile{z.data(), y.data(), nullptr, 0, vocab};
            detail::sweep_thread<scalar<float>, true, all>(parts.back(), tile, detail::one_of{t, threads});
        }
        if (agree) {
            detail::row_anchors best;
            for (const row_sweep& p : parts) best = detail::row_anchors::merge(best, p.proposed());
            for (row_sweep& p : parts) p.agree(best);
            for (int t = 1; t < threads; ++t)
                parts[0].take(row_sweep::addends::merge(parts[0].summed(), parts[t].summed()));
        } else {
            for (int t = 1; t < threads; ++t) parts[0] = row_sweep::merge(parts[0], parts[t]);
        }
        return parts[0];
    };
    const row_sweep plain = swept(nullptr, false);
    CHECK(plain.sums.own_s == 1);
    for (int i = 0; i < 40; ++i) {
        const index_t a = s.below(vocab), b = i == 0 ? plain.sums.t : s.below(vocab);
        const index_t at_s = i == 1 ? plain.sums.s : a;
        const detail::row_anchors begin{at_s, b, z[at_s], y[at_s], z[b], y[b]};
        for (const bool agree : {false, true}) {
            const row_sweep got = swept(&begin, agree);
            CAPTURE(i);
            CAPTURE(agree);
            CHECK(got.sums.s == plain.sums.s);
            CHECK(got.sums.t == plain.sums.t);
            CHECK(got.sums.own_s == 1);
            CHECK(got.sums.own_t == 1);
            CHECK(got.sums.student_mass == doctest::Approx(plain.sums.student_mass).epsilon(1e-6));
            CHECK(got.sums.teacher_mass == doctest::Approx(plain.sums.teacher_mass).epsilon(1e-6));
            CHECK(got.sums.student_delta == doctest::Approx(plain.sums.student_delta).epsilon(1e-5));
            CHECK(got.sums.student_power == doctest::Approx(plain.sums.student_power).epsilon(1e-5));
            CHECK(got.sums.teacher_delta == doctest::Approx(plain.sums.teacher_delta).epsilon(1e-5));
        }
    }
}

TEST_CASE("sums of threads merge associatively, with the same anchors in any order") {
    source s(5);
    const index_t vocab = 4000;
    std::vector<float> z(vocab), y(vocab);
    for (index_t v = 0; v < vocab; ++v) {
        z[v] = float(std::round(6 * s.normal()) / 2), y[v] = float(std::round(6 * s.normal()) / 2); // many ties
        if (v % 5 == 0) z[v] = minus_infinity;
        if (v % 7 == 0) z[v] = y[v] = minus_infinity;
    }
    for (double k : {1., .5, -1.}) {
        std::vector<detail::row_sweep> parts;
        constexpr raw_sums_needed all{.student_delta = true, .student_power = true, .teacher_delta = true};
        for (int t = 0; t < 37; ++t) {
            const detail::row_tile<float, float, float> tile{z.data(), y.data(), nullptr, 0, vocab};
            parts.push_back(detail::row_sweep::begin(1, 1 / 1.5, k, false));
            detail::sweep_thread<scalar<float>, true, all>(parts.back(), tile, detail::one_of{t, 37});
        }
        using detail::row_sweep;
        const auto equal = [](const row_sweep& a, const row_sweep& b) {
            CHECK(a.sums.s == b.sums.s);
            CHECK(a.sums.t == b.sums.t);
            CHECK(a.sums.z_s == b.sums.z_s);
            CHECK(a.sums.y_s == b.sums.y_s);
            CHECK(a.sums.z_t == b.sums.z_t);
            CHECK(a.sums.y_t == b.sums.y_t);
            CHECK(a.sums.student_mass == doctest::Approx(b.sums.student_mass).epsilon(1e-12));
            CHECK(a.sums.teacher_mass == doctest::Approx(b.sums.teacher_mass).epsilon(1e-12));
            CHECK(a.sums.student_delta == doctest::Approx(b.sums.student_delta).epsilon(1e-10));
            CHECK(a.sums.student_power == doctest::Approx(b.sums.student_power).epsilon(1e-10));
            CHECK(a.sums.teacher_delta == doctest::Approx(b.sums.teacher_delta).epsilon(1e-10));
            CHECK(a.reach == doctest::Approx(b.reach).epsilon(1e-10));
            CHECK(a.contents.student_zero == b.contents.student_zero);
            CHECK(a.contents.teacher_zero == b.contents.teacher_zero);
        };
        for (int t = 0; t + 2 < 37; ++t) {
            const row_sweep &a = parts[t], &b = parts[t + 1], &c = parts[t + 2];
            equal(row_sweep::merge(row_sweep::merge(a, b), c), row_sweep::merge(a, row_sweep::merge(b, c)));
            equal(row_sweep::merge(a, b), row_sweep::merge(b, a));
        }
        row_sweep forward = parts[0], backward = parts[36];
        for (int t = 1; t < 37; ++t) forward = row_sweep::merge(forward, parts[t]);
        for (int t = 35; t >= 0; --t) backward = row_sweep::merge(backward, parts[t]);
        equal(forward, backward);
        index_t top = 0, top_y = 0; // the lowest id of the largest, whatever the order of merging
        for (index_t v = 1; v < vocab; ++v) {
            if (z[v] > z[top]) top = v;
            if (y[v] > y[top_y]) top_y = v;
        }
        CHECK(forward.sums.s == top);
        CHECK(forward.sums.t == top_y);
        row_sweep nothing; // a thread beyond the row's end
        nothing.sums.inv_t = 1 / 1.5, nothing.sums.k = k;
        equal(row_sweep::merge(forward, nothing), forward);
        equal(row_sweep::merge(nothing, forward), forward);
    }
}

/// A batch in which every part of the env has something to do.
template <class Z, class Y, class G>
dense_case<Z, Y, G> rich_case(std::uint64_t seed) {
    source s(seed);
    dense_case<Z, Y, G> c{.rows = 1 + s.below(40), .vocab_z = 1 + s.below(600)};
    c.vocab_y = c.vocab_z;
    if (s.below(3) == 0) {
        c.vocab_y = 1 + s.below(2 * c.vocab_z);
        c.plain.vocab = vocabulary::drop_and_renormalise;
    }
    c.stride = c.vocab_z + s.below(5);
    c.t_s = float(0.8 + 1.2 * s.uniform()), c.t_t = float(0.8 + 1.2 * s.uniform());
    c.pad = s.below(2) ? padding::zero : padding::keep;
    fill_normal(c, s, s.below(4) == 0 ? 4 : 3); // chi-squared stays within float
    if (s.below(2)) punch(c, every_hole[s.below(4)], s);
    if (s.below(4) == 0) // a NaN, a row without mass
        c.z[std::size_t(s.below(index_t(c.z.size())))] =
            element<Z>::store(std::numeric_limits<arithmetic_t<Z>>::quiet_NaN());
    if (s.below(4) == 0) {
        const index_t r = s.below(c.rows);
        for (index_t v = 0; v < c.vocab_y; ++v)
            c.y[std::size_t(r * c.vocab_y + v)] = element<Y>::store(arithmetic_t<Y>(minus_infinity));
    }
    if (s.below(2))
        for (index_t r = 0; r < c.rows; ++r) c.mask.push_back(std::int32_t(s.below(3)));
    if (s.below(2))
        for (index_t r = 0; r < c.rows; ++r) c.weights.push_back(float(s.normal()));
    if (s.below(2))
        for (index_t r = 0; r < c.rows; ++r) c.versions.push_back(std::int32_t(s.below(50)));
    c.plain.version = 45;
    const reduce reductions[] = {reduce::sum, reduce::token_mean, reduce::sequence_mean, reduce::sequence_sum_mean,
                                 reduce::constant};
    c.plain.reduction = reductions[s.below(5)];
    for (index_t at = 0; at < c.rows; at += s.below(6)) c.offsets.push_back(at); // empty sequences too
    c.offsets.push_back(c.rows);
    if (c.plain.reduction == reduce::constant || s.below(2)) c.plain.normaliser = 17.5;
    c.plain.beta = s.below(2) ? 0.f : 0.75f, c.plain.beta_loss = s.below(2) ? 0.f : 1.f;
    c.plain.on_infinite = s.below(2) ? infinite::floor(-20) : infinite::skip();
    c.plain.loss_clamp = s.below(2) ? 0 : 2;
    c.dz.resize(std::size_t(c.rows * c.stride));
    for (G& g : c.dz) g = element<G>::store(static_cast<arithmetic_t<G>>(s.normal()));
    c.losses.assign(std::size_t(c.rows), 3), c.lse.assign(std::size_t(c.rows), 0);
    if (s.below(3) == 0) {
        dense_case<Z, Y, G> copy = c; // the student's log-sum-exp, from a call that returns it
        copy.plain.beta = 0;
        run_eigen(copy, reverse_kl{});
        c.given_lse = copy.lse;
    }
    return c;
}

/// The last bit of a gradient's storage, relative to its size.
template <class G>
double storage_step() {
    return std::is_same_v<G, double> ? 1e-15
                                     : (std::is_same_v<G, float> ? 1.2e-7 : (std::is_same_v<G, half> ? 1e-3 : 8e-3));
}

template <class Z, class Y, class G>
void compare_with_eigen(std::uint64_t seed, const auto& d, const char* name) {
    const dense_case<Z, Y, G> c = rich_case<Z, Y, G>(seed);
    dense_case<Z, Y, G> a = c, b = c;
    const result x = run_eigen(a, d), w = run_threads(b, d, 64);
    RC_LOG() << name << ", rows " << c.rows << " V " << c.vocab_z << "/" << c.vocab_y << " reduction "
             << int(c.plain.reduction) << ": loss " << x.loss << " and " << w.loss << '\n';
    double scale = 1; // of the loss: rows may cancel
    for (float l : a.losses) scale += std::abs(double(l)) / (c.plain.reduction == reduce::sum ? 1 : 17.5);
    RC_ASSERT(std::abs(x.loss - w.loss) <= 1e-5 * scale * (1 + std::abs(x.loss)));
    const diagnostics &p = x.diagnostics, &q = w.diagnostics;
    RC_ASSERT(p.rows == q.rows);
    RC_ASSERT(p.kept == q.kept);
    RC_ASSERT(p.bad_rows == q.bad_rows);
    RC_ASSERT(p.first_bad_row == q.first_bad_row);
    RC_ASSERT(p.infinite_rows == q.infinite_rows);
    RC_ASSERT(p.first_infinite_row == q.first_infinite_row);
    RC_ASSERT(p.clamped_rows == q.clamped_rows);
    RC_ASSERT(std::abs(p.kept_loss - q.kept_loss) <= 1e-5 * (1 + std::abs(p.kept_loss)) * double(c.rows));
    RC_ASSERT(p.staleness_max == q.staleness_max);
    for (int i = 0; i < diagnostics::staleness_bins; ++i) RC_ASSERT(p.staleness[i] == q.staleness[i]);
    for (index_t r = 0; r < c.rows; ++r) {
        const auto i = std::size_t(r);
        RC_ASSERT(a.losses[i] == b.losses[i] || // beyond float: infinite
                  std::abs(double(a.losses[i]) - double(b.losses[i])) <= 1e-5 * (1 + std::abs(double(a.losses[i]))));
        RC_ASSERT(std::abs(a.lse[i] - b.lse[i]) <= 1e-6 * (1 + std::abs(a.lse[i])));
        double top = 0, worst = 0;
        for (index_t v = 0; v < c.stride; ++v) {
            const double g = double(element<G>::load(a.dz[std::size_t(r * c.stride + v)])),
                         h = double(element<G>::load(b.dz[std::size_t(r * c.stride + v)]));
            if (v < c.vocab_z && std::isfinite(g)) top = std::max(top, std::abs(g));
            if (g == h) continue; // infinite where the true gradient is beyond the storage type
            RC_ASSERT(std::isfinite(h));
            if (v < c.vocab_z)
                worst = std::max(worst, std::abs(g - h));
            else
                RC_ASSERT(g == h); // padding, and columns beyond it
        }
        RC_LOG() << "row " << r << " gradient off by " << worst << " of " << top << '\n';
        RC_ASSERT(worst <= (1e-3 + storage_step<G>()) * top + 1e-6); // the reference judges digits, this test meanings
    }
}

TEST_CASE("everything an env can say means the same as on the CPU") {
    const auto compare = [](auto storage, std::uint64_t seed) {
        using types = decltype(storage);
        return [seed](const char* name, const auto& d) {
            compare_with_eigen<typename types::z, typename types::y, typename types::g>(seed, d, name);
        };
    };
    // storage is read and written alike for all: a program of each kind, with one sweep, another sum, two sweeps
    const auto some = [&](auto storage, std::uint64_t seed) {
        const auto check = compare(storage, seed);
        check("reverse_kl", reverse_kl{});
        check("forward_kl", forward_kl{});
        check("jsd(.3, .6)", jsd{.3, .6});
    };
    struct floats {
        using z = float;
        using y = float;
        using g = float;
    };
    struct brains {
        using z = bfloat16;
        using y = bfloat16;
        using g = bfloat16;
    };
    struct mixed {
        using z = half;
        using y = double;
        using g = float;
    };
    struct doubles {
        using z = double;
        using y = float;
        using g = double;
    };
    property("float", [&](std::uint64_t seed) { for_every_divergence(compare(floats{}, seed)); });
    property("bfloat16", [&](std::uint64_t seed) { some(brains{}, seed); });
    property("half and double", [&](std::uint64_t seed) { some(mixed{}, seed); }, {.cases = 50});
    property("double", [&](std::uint64_t seed) { some(doubles{}, seed); }, {.cases = 50});
}

TEST_CASE("the same call twice gives the same bits, and the gradient may alias the logits") {
    source s(3);
    dense_case<> c{.rows = 7, .vocab_z = 3001, .vocab_y = 3001};
    fill_normal(c, s);
    want_everything(c);
    for_every_divergence([&](const char* name, const auto& d) {
        INFO(std::string(name));
        dense_case<> a = c, b = c;
        const result x = run_threads(a, d, 128), w = run_threads(b, d, 128);
        CHECK(std::memcmp(&x, &w, sizeof x) == 0);
        CHECK(equal_bits(a.dz, b.dz));
        CHECK(equal_bits(a.losses, b.losses));

        host_run_backend backend{128};
        std::vector<float> z = c.z;
        evaluate(backend, student::logits{view(z.data(), 7, 3001), view(z.data(), 7, 3001)},
                 teacher::dense{view(c.y.data(), 7, 3001)}, d, env{});
        CHECK(equal_bits(z, a.dz));
    });
}

TEST_CASE("more rows than blocks, no rows, no kept row") {
    source s(9);
    dense_case<> c{.rows = 5000, .vocab_z = 11, .vocab_y = 11};
    fill_normal(c, s);
    for (index_t r = 0; r < c.rows; ++r) c.mask.push_back(r % 3 != 0);
    want_everything(c);
    dense_case<> a = c, b = c;
    const result x = run_eigen(a, reverse_kl{}), w = run_threads(b, reverse_kl{}, 32);
    CHECK(x.loss == doctest::Approx(w.loss).epsilon(1e-7));
    CHECK(w.diagnostics.rows == 5000);
    CHECK(w.diagnostics.kept == x.diagnostics.kept);

    std::fill(c.mask.begin(), c.mask.end(), 0);
    b = c;
    const result none = run_threads(b, reverse_kl{}, 32);
    CHECK(none.loss == 0);
    CHECK(none.diagnostics.kept == 0);
    for (float g : b.dz) CHECK(g == 0);

    dense_case<> empty{.rows = 0, .vocab_z = 11, .vocab_y = 11};
    const result nothing = run_threads(empty, jsd{}, 32);
    CHECK(nothing.loss == 0);
    CHECK(nothing.diagnostics.rows == 0);
}

TEST_CASE("offsets of 32 or 64 bits and weights of float or double: the same bits") {
    source s(12);
    dense_case<> c{.rows = 6, .vocab_z = 20, .vocab_y = 20};
    fill_normal(c, s);
    const std::vector<std::int32_t> offsets{0, 2, 2, 6};
    const std::vector<std::int64_t> long_offsets(offsets.begin(), offsets.end());
    const std::vector<float> weights{1, -2, 0.5F, 3, 0, 1.25F};
    const std::vector<double> long_weights(weights.begin(), weights.end());
    host_run_backend backend{64};
    std::vector<float> a(6 * 20), b(a);
    const auto run = [&](std::vector<float>& dz, const env& e) {
        return evaluate(backend, student::logits{view(c.z.data(), 6, 20), view(dz.data(), 6, 20)},
                        teacher::dense{view(c.y.data(), 6, 20)}, jsd{}, e)
            .loss;
    };
    const double x = run(a, {.reduction = reduce::sequence_mean, .weights = weights, .offsets = long_offsets});
    const double y = run(b, {.reduction = reduce::sequence_mean, .weights = long_weights, .offsets = offsets});
    CHECK(x == y);
    CHECK(equal_bits(a, b));
    detail::row_frame<space::host> frame; // a factor that a float gradient cannot hold makes the row bad
    const std::vector<double> large{1e31, -1e31, 1e30, 1e300};
    frame.env.weights = large, frame.env.reduction = reduce::sum, frame.rows = 4;
    for (const index_t r : {0, 1, 3}) CHECK(detail::is_nan(frame.factor(r)));
    CHECK(frame.factor(2) == 1e30);
}

TEST_CASE("weights and offsets that make no sense make their rows bad") {
    source s(10);
    dense_case<> c{.rows = 6, .vocab_z = 20, .vocab_y = 20};
    fill_normal(c, s);
    want_everything(c);
    dense_case<> weights = c;
    weights.weights = {1, 1, std::numeric_limits<float>::quiet_NaN(), 1, 1, 1};
    // the host would refuse them; a device cannot look
    const detail::row_frame<space::host> frame = [&] {
        detail::row_frame<space::host> f;
        f.env.weights = weights.weights;
        f.env.reduction = reduce::sum;
        f.rows = 6;
        return f;
    }();
    CHECK(detail::is_nan(frame.factor(2)));
    CHECK(frame.factor(3) == 1);

    const std::vector<std::int64_t> offsets{0, 3, -5, 2, 100};
    std::vector<index_t> counts(4, 0);
    detail::batch_totals totals{.kept = 6, .sequences = 2};
    detail::row_frame<space::host> bad;
    bad.env.offsets = offsets;
    bad.env.reduction = reduce::sequence_mean;
    bad.rows = 6, bad.counts = counts.data(), bad.totals = &totals;
    for (index_t r = 0; r < 6; ++r) CHECK(detail::is_nan(bad.factor(r))); // no kept row counted: no factor
    counts.assign(4, 2);
    for (index_t r = 0; r < 6; ++r) {
        const index_t q = detail::sequence_of(bad.env.offsets, 4, r);
        CHECK(q >= 0);
        CHECK(q < 4);
    }
}

TEST_CASE("what a device call cannot do is refused in words") {
    dense_case<> c{.rows = 1, .vocab_z = 3, .vocab_y = 3, .z = {1, 2, 3}, .y = {1, 2, 3}};
    host_run_backend backend;
    const auto call = [&](env e) {
        evaluate(backend, student::logits{view(c.z.data(), 1, 3)}, teacher::dense{view(c.y.data(), 1, 3)}, reverse_kl{},
                 e);
    };
    CHECK_THROWS_WITH_AS(
        call({.checks = check::contents}),
        "opd: env.checks = check::contents throws for what rows hold, which a device call would have to "
        "wait for; use check::count and read bad_rows of fetch()",
        unsupported);
    CHECK_THROWS_WITH_AS(
        call({.on_infinite = infinite::raise()}),
        "opd: env.on_infinite = infinite::raise() throws for what rows hold, which a device call would "
        "have to wait for; use floor or skip and read infinite_rows of fetch()",
        unsupported);
}

} // namespace
