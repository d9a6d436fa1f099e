// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// Divergences over a vocabulary in 1 to 7 shards of any size, empty ones among them: against float64, within the bounds
// that one rank is held to, so that a split differs from the whole by at most twice those. Every rank decides, counts
// and reports the same bits.
#include "support/compiled/dense.hpp"
#include "support/shard_judges.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const float nan_f = std::bit_cast<float>(0x7fc00000u), inf_f = std::bit_cast<float>(0x7f800000u);
const float minus_inf = detail::neg_inf<float>();

/// One of the reader's own: no raw sums, so it is summed when the normalisers are known.
struct half_squared_ratio {
    template <class F>
    F term(const row_constants<F>& row, const dense_entry<F>& e) const {
        const F l = e.delta + row.d_star;
        return F(0.5) * e.p * l * l;
    }
    template <class F>
    F c(const row_constants<F>& row, const dense_entry<F>& e) const {
        const F l = e.delta + row.d_star;
        return e.p * (l + F(0.5) * l * l);
    }
};

} // namespace

TEST_CASE("every divergence, whatever the split, is that of the whole vocabulary") {
    for_each_divergence([](const std::string& name, auto d) {
        property(name,
                 [&] {
                     const problem p = *problems({.kinds = every_kind});
                     sharded_backend shards{.threads = p.seed % 4 == 0, .seed = p.seed};
                     env e;
                     if (p.seed % 3 == 1) e.on_infinite = infinite::skip();
                     agrees(d, p, shards, e);
                 },
                 {.cases = 60});
    });
    property("acceptance",
             [&] {
                 const problem p = *problems({.kinds = every_kind});
                 sharded_backend shards{.seed = p.seed};
                 agrees(acceptance{}, p, shards, {});
             },
             {.cases = 60});
}

TEST_CASE("rows on which float loses digits are held to the bounds of one rank") {
    std::vector<accuracy::errors> table;
    for (const index_t n : {96, 3000}) {
        sharded_backend shards{.seed = std::uint64_t(n)};
        for (const auto& r : accuracy::rows(n, 7)) accuracy::judge_dense(shards, r, table);
    }
}

TEST_CASE("a stretch of ids without the student's mass keeps what the teacher has there") {
    const index_t v = 2500;
    numbers u(3);
    std::vector<float> z, y;
    for (index_t i = 0; i < v; ++i)
        z.push_back(i < 1200 ? minus_inf : float(2 * u.normal())), y.push_back(float(2 * u.normal()));
    double sum_p = 0, sum_q = 0;
    for (const float x : z) sum_p += std::exp(double(x));
    for (const float x : y) sum_q += std::exp(double(x));
    cpu_backend one;
    for (const double a : {1e-6, 1e-3, 0.1, 0.5}) {
        double powers = 0;
        for (std::size_t i = 1200; i < z.size(); ++i)
            powers += std::exp(a * (double(z[i]) - std::log(sum_p)) + (1 - a) * (double(y[i]) - std::log(sum_q)));
        const double want = (powers - 1) / (a * (a - 1));
        const auto value = [&](auto&& backend) {
            return evaluate(backend, student::logits{view(z.data(), 1, v)}, teacher::dense{view(y.data(), 1, v)},
                            alpha_divergence{a})
                .loss;
        };
        CAPTURE(a);
        CHECK(value(one) == doctest::Approx(want).epsilon(2e-6));
        for (const std::vector<index_t>& cuts :
             std::vector<std::vector<index_t>>{{0, v}, {0, 1200, v}, {0, 600, 700, 2000, v}})
            CHECK(value(sharded_backend{.cuts = cuts}) == doctest::Approx(want).epsilon(2e-6));
    }
}

TEST_CASE("masks, weights, sequences, clamps, beta, temperatures from 0.01 to 100, a given log-sum-exp") {
    property("reverse KL",
             [] {
                 const problem p = *problems({.smallest_rows = 1, .far_temperatures = true, .many_rows = true});
                 buffers<float> b(p);
                 numbers u(p.seed + 5);
                 const std::vector<std::int64_t> offsets = random_offsets(p.rows, u);
                 env e = b.masked_env();
                 e.weights = b.weights, e.offsets = offsets;
                 e.reduction = p.seed % 2 == 0 ? reduce::sequence_mean : reduce::sum;
                 e.beta = p.seed % 3 == 0 ? 0.5F : 0;
                 e.loss_clamp = p.seed % 5 == 0 ? 0.3 : 0;
                 std::vector<double> lse;
                 if (p.seed % 7 < 3) { // as an earlier call has returned it, give or take
                     lse.resize(std::size_t(p.rows));
                     cpu_backend one;
                     env first;
                     first.lse = lse;
                     evaluate(one, b.value_only(), b.teacher(), reverse_kl{}, first);
                     e.given_lse = lse;
                 }
                 check_near(on_both(b, reverse_kl{}, e, sharded_backend{.threads = p.rows % 2 == 0, .seed = p.seed}),
                            p.rows * 3 / double(p.temperature_p));
             },
             {.cases = 150});
}

TEST_CASE("threads, a loop and a second run give the same bits") {
    buffers<float> b({.rows = 40, .vocab = 1500, .kind = flavour::diffuse, .seed = 12});
    const std::vector<index_t> cuts{0, 1, 700, 700, 1025, 1500};
    const both loop = on_both(b, jsd{}, {}, sharded_backend{.cuts = cuts}),
               threads = on_both(b, jsd{}, {}, sharded_backend{.cuts = cuts, .threads = true}),
               again = on_both(b, jsd{}, {}, sharded_backend{.cuts = cuts, .threads = true});
    for (const both* o : {&threads, &again}) {
        CHECK(equal_bits(o->split.loss, loop.split.loss));
        CHECK(o->dz_split == loop.dz_split);
        CHECK(o->lse_split == loop.lse_split);
    }
}

TEST_CASE("in place, and other storage") {
    for (const index_t v : {1, 9, 1024, 2500}) {
        buffers<float> b({.rows = 3, .vocab = v, .seed = 4}), in_place = b;
        sharded_backend shards{.seed = std::uint64_t(v)};
        const double loss = evaluate(shards, b.student(), b.teacher(), jsd{}).loss;
        shards.seed = std::uint64_t(v);
        auto s = in_place.student();
        s.dz = {in_place.z.data(), 3, v, v};
        CHECK(equal_bits(evaluate(shards, s, in_place.teacher(), jsd{}).loss, loss));
        for (std::size_t i = 0; i < std::size_t(3 * v); ++i) CHECK(in_place.z[i] == b.dz[i]);
        auto exact = b.as<double, double, double>();
        auto stored = b.as<bfloat16, bfloat16, bfloat16>(); // of the same logits, rounded
        auto rounded = stored.as<double, double, double>();
        naive_backend slow;
        const double want = evaluate(slow, exact.value_only(), exact.teacher(), reverse_kl{}).loss;
        const double near_it = evaluate(slow, rounded.value_only(), rounded.teacher(), reverse_kl{}).loss;
        CHECK(evaluate(shards, exact.student(), exact.teacher(), reverse_kl{}).loss ==
              doctest::Approx(want).epsilon(1e-12));
        CHECK(evaluate(shards, stored.student(), stored.teacher(), reverse_kl{}).loss ==
              doctest::Approx(near_it).epsilon(2e-6));
    }
}

TEST_CASE("the largest logits may lie in any shard, and equal ones have one anchor") {
    const index_t v = 40;
    for (const index_t top_z : {0, 13, 39})
        for (const index_t top_y : {0, 20, 39}) {
            buffers<float> b({.rows = 1, .vocab = v, .seed = 9});
            b.z[std::size_t(top_z)] = 12, b.y[std::size_t(top_y)] = 14;
            b.z[25] = b.z[std::size_t(top_z)]; // twice
            check_near(on_both(b, reverse_kl{}, {}, sharded_backend{.cuts = {0, 1, 1, 14, 26, 39, v}}), 1);
            check_near(on_both(b, forward_kl{}, {}, sharded_backend{.cuts = {0, 1, 1, 14, 26, 39, v}}), 1);
        }
}

TEST_CASE("a bad number in one shard makes the row bad on every rank, and none is written") {
    for (const float bad : {nan_f, inf_f})
        for (const bool of_teacher : {false, true})
            for (const index_t at : {0, 17, 29}) {
                buffers<float> b({.rows = 5, .vocab = 30, .seed = 2});
                (of_teacher ? b.y : b.z)[std::size_t(2 * 30 + at)] = bad;
                const both o = on_both(b, reverse_kl{}, {}, sharded_backend{.cuts = {0, 10, 10, 18, 30}});
                CHECK(o.split.diagnostics.bad_rows == 1);
                CHECK(o.split.diagnostics.first_bad_row == 2);
                for (index_t i = 0; i < 30; ++i) CHECK(o.dz_split[std::size_t(2 * 30 + i)] == 0);
                CHECK(o.losses_split[2] == 0);
                env raises;
                raises.on_bad = bad::raise();
                sharded_backend shards{.cuts = {0, 10, 30}};
                CHECK_THROWS_AS(evaluate(shards, b.student(), b.teacher(), reverse_kl{}, raises), bad_contents);
            }
    buffers<float> b({.rows = 3, .vocab = 30, .seed = 2}); // no mass anywhere
    for (std::size_t i = 30; i < 60; ++i) b.z[i] = minus_inf;
    CHECK(on_both(b, reverse_kl{}, {}, sharded_backend{.cuts = {0, 10, 30}}).split.diagnostics.first_bad_row == 1);
}

TEST_CASE("a padded vocabulary: a shard without mass on either side is as if it were not there") {
    for_each_divergence_type([](const std::string& name, auto d) {
        CAPTURE(name);
        for (const float temperature : {0.7F, 2.F}) { // of the student: below the teacher's, above it
            buffers<float> b({.rows = 4,
                              .vocab = 3000,
                              .temperature_p = temperature,
                              .temperature_q = temperature > 1 ? 1.F : 2.F,
                              .kind = temperature > 1 ? flavour::near_equal : flavour::wide, // q* above p*, below it
                              .seed = 6});
            for (index_t r = 0; r < 4; ++r)
                for (const auto& [from, to] : {std::pair<index_t, index_t>{0, 1100}, {2000, 3000}})
                    for (index_t i = from; i < to; ++i)
                        b.z[std::size_t(r * 3000 + i)] = b.y[std::size_t(r * 3000 + i)] = minus_inf;
            const both o = on_both(b, d, {}, sharded_backend{.cuts = {0, 1100, 1500, 2000, 3000}});
            check_near(o, 1);
            CHECK(o.split.diagnostics.careful_rows == 0);
            CHECK(o.said.rounds <= 2);
        }
    });
}

TEST_CASE("infinite rows under each policy, the zero in a shard of its own") {
    for (const bool of_teacher : {true, false}) {
        buffers<float> b({.rows = 3, .vocab = 25, .seed = 3});
        (of_teacher ? b.y : b.z)[25 + 7] = minus_inf;
        const auto with = [&](auto d, infinite policy) {
            env e;
            e.on_infinite = policy;
            return on_both(b, d, e, sharded_backend{.cuts = {0, 7, 8, 25}});
        };
        const auto all = [&](auto d) {
            for (const infinite policy : {infinite::floor(), infinite::floor(-12), infinite::skip()}) {
                const both o = with(d, policy);
                CHECK(o.split.diagnostics.first_infinite_row == 1);
                check_near(o, 1);
            }
            env e;
            e.on_infinite = infinite::raise();
            sharded_backend shards{.cuts = {0, 7, 8, 25}};
            std::vector<float> losses(3, 5);
            e.losses = losses;
            try {
                evaluate(shards, b.student(), b.teacher(), d, e);
                CHECK(false);
            } catch (const infinite_value& x) {
                CHECK(x.row == 1);
            }
            CHECK(losses == std::vector<float>(3, 5));
            CHECK(std::count(b.dz.begin(), b.dz.end(), 777.F) == std::ptrdiff_t(b.dz.size()));
        };
        of_teacher ? all(reverse_kl{}) : all(forward_kl{});
        check_near(with(jsd{}, infinite::floor()), 1); // finite
    }
}

TEST_CASE("a flat student under a teacher that has its first choice alone: the rest lies at the floor of the whole "
          "vocabulary") {
    buffers<float> b({.rows = 1, .vocab = 3000, .kind = flavour::diffuse, .seed = 4});
    numbers u(2);
    for (float& z : b.z) z = float(0.02 * (2 * u.uniform() - 1));
    const auto top = std::size_t(std::max_element(b.z.begin(), b.z.begin() + 3000) - b.z.begin());
    for (std::size_t i = 0; i < 3000; ++i) b.y[i] = i == top ? 1.0F : minus_inf;
    const auto own = index_t(top);
    check_near(on_both(b, reverse_kl{}, {}, sharded_backend{.cuts = {0, own, own + 1, 3000}}), 0);
}

TEST_CASE("entropies, and selectors that choose by them") {
    buffers<float> b({.rows = 6, .vocab = 2100, .seed = 8});
    env e;
    e.measure.entropy = true;
    const both o = on_both(b, reverse_kl{}, e, sharded_backend{.seed = 3});
    CHECK(o.said.rounds == 2);
    CHECK(o.split.diagnostics.student_entropy() ==
          doctest::Approx(o.whole.diagnostics.student_entropy()).epsilon(1e-6));
    CHECK(o.split.diagnostics.teacher_entropy() ==
          doctest::Approx(o.whole.diagnostics.teacher_entropy()).epsilon(1e-6));
    CHECK(o.split.diagnostics.overlap() == doctest::Approx(o.whole.diagnostics.overlap()).epsilon(1e-6));
    const auto eopd_of = eopd(4); // mixes by the teacher's entropy
    check_near(on_both(b, eopd_of, {}, sharded_backend{.seed = 4}), 1);
}

TEST_CASE("how many rounds, and how many bytes") {
    buffers<float> b({.rows = 50, .vocab = 64, .kind = flavour::peaked, .seed = 5});
    const std::size_t head = sizeof(detail::partials_head), item = sizeof(detail::partial_item);
    const auto said = [&](auto d) { return on_both(b, d, {}, sharded_backend{.cuts = {0, 30, 64}}).said; };
    CHECK(said(forward_kl{}).rounds == 1);
    CHECK(said(forward_kl{}).bytes == head + 50 * (item + sizeof(detail::row_sweep)));
    CHECK(said(jsd{}).rounds == 2);
    CHECK(said(jsd{}).bytes == 2 * head + 50 * (2 * item + sizeof(detail::row_sweep) + 16));
    CHECK(said(acceptance{}).rounds == 3);
    CHECK(said(half_squared_ratio{}).rounds == 2);
    buffers<float> steep({.rows = 50, .vocab = 64, .kind = flavour::steep, .seed = 5});
    const both o = on_both(steep, chi_squared{}, {}, sharded_backend{.cuts = {0, 30, 64}});
    CHECK(o.said.rounds == 4); // sweep; entry by entry; in float64 the normalisers, then the terms
    CHECK(o.split.diagnostics.careful_rows > 0);
    CHECK(o.split.diagnostics.careful_rows == o.whole.diagnostics.careful_rows);
}

TEST_CASE("your own divergence") {
    for (const flavour kind : {flavour::wide, flavour::near_equal, flavour::peaked, flavour::filtered})
        for (const index_t v : {3, 100, 2500}) {
            buffers<float> b({.rows = 3, .vocab = v, .kind = kind, .seed = std::uint64_t(v)});
            check_near(on_both(b, half_squared_ratio{}, {}, sharded_backend{.seed = std::uint64_t(v)}), 1);
        }
}
