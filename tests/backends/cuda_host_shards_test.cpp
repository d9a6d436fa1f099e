// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// The GPU's kernels of a vocabulary in 1 to 7 shards, run on the host, a thread for each rank: against float64, beside
// one rank, and in what they exchange.
#include "backends/host_run_shards.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/shard_judges.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace opd;
using namespace opd::test;

const float minus_inf = detail::neg_inf<float>();

TEST_CASE("every divergence, whatever the split, is that of the whole vocabulary") {
    for_each_divergence([](const std::string& name, auto d) {
        property(name,
                 [&] {
                     const problem p = *problems({.kinds = every_kind});
                     host_run_shards shards{.seed = p.seed, .threads = int(1 + p.seed % 40), .tree = p.seed % 2 == 0};
                     env e;
                     if (p.seed % 3 == 1) e.on_infinite = infinite::skip();
                     agrees(d, p, shards, e);
                 },
                 {.cases = 30});
    });
    property("acceptance",
             [&] {
                 const problem p = *problems({.kinds = every_kind});
                 host_run_shards shards{.seed = p.seed};
                 agrees(acceptance{}, p, shards, {});
             },
             {.cases = 30});
}

TEST_CASE("rows on which float loses digits are held to the bounds of one rank") {
    std::vector<accuracy::errors> table;
    for (const index_t n : {96, 3000}) {
        host_run_shards shards{.cuts = {0, n / 3, n}, .threads = 128}; // two: more threads wait longer for each other
        for (const auto& r : accuracy::rows(n, 7)) accuracy::judge_dense(shards, r, table);
    }
}

TEST_CASE("one shard has the bits of a call without shards") {
    for_each_divergence_type([](const std::string& name, auto d) {
        CAPTURE(name);
        for (const flavour kind : {flavour::wide, flavour::near_equal, flavour::peaked, flavour::filtered}) {
            buffers<float> a({.rows = 6, .vocab = 2500, .pad_g = 3, .kind = kind, .masked = true, .seed = 21}), b = a;
            std::vector<float> losses_a(6), losses_b(6);
            std::vector<double> lse_a(6), lse_b(6);
            env e = a.masked_env();
            e.losses = losses_a, e.lse = lse_a;
            host_run_backend whole{.threads = 64};
            const result x = evaluate(whole, a.student(), a.teacher(), d, e);
            e.losses = losses_b, e.lse = lse_b;
            host_run_shards shard{.cuts = {0, 2500}, .threads = 64};
            const result y = evaluate(shard, b.student(), b.teacher(), d, e);
            CHECK(std::memcmp(&x, &y, sizeof x) == 0);
            CHECK(std::memcmp(a.dz.data(), b.dz.data(), a.dz.size() * sizeof(float)) == 0);
            CHECK(losses_a == losses_b);
            CHECK(lse_a == lse_b);
        }
    });
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
                 if (p.seed % 7 < 3) {
                     lse.resize(std::size_t(p.rows));
                     cpu_backend one;
                     env first;
                     first.lse = lse;
                     evaluate(one, b.value_only(), b.teacher(), reverse_kl{}, first);
                     e.given_lse = lse;
                 }
                 check_near(on_both(b, reverse_kl{}, e, host_run_shards{.seed = p.seed}),
                            double(3 * p.rows) / double(p.temperature_p));
             },
             {.cases = 100});
}

TEST_CASE("a second run gives the same bits, and the gradient may lie over the logits") {
    buffers<float> b({.rows = 40, .vocab = 1500, .kind = flavour::diffuse, .seed = 12}), in_place = b;
    const std::vector<index_t> cuts{0, 1, 700, 700, 1025, 1500};
    const both once = on_both(b, jsd{}, {}, host_run_shards{.cuts = cuts}),
               again = on_both(b, jsd{}, {}, host_run_shards{.cuts = cuts});
    CHECK(equal_bits(once.split.loss, again.split.loss));
    CHECK(once.dz_split == again.dz_split);
    CHECK(once.lse_split == again.lse_split);
    auto s = in_place.student();
    s.dz = {in_place.z.data(), 40, 1500, 1500};
    host_run_shards shards{.cuts = cuts};
    evaluate(shards, s, in_place.teacher(), jsd{});
    for (std::size_t i = 0; i < std::size_t{40} * 1500; ++i) CHECK(in_place.z[i] == once.dz_split[i]);
}

TEST_CASE("more rows than blocks, no rows, no kept row") {
    buffers<float> b({.rows = 5000, .vocab = 11, .masked = true, .seed = 9});
    const both o = on_both(b, reverse_kl{}, b.masked_env(), host_run_shards{.cuts = {0, 4, 11}, .threads = 4});
    CHECK(o.split.diagnostics.rows == 5000);
    CHECK(o.split.loss == doctest::Approx(o.whole.loss).epsilon(1e-6));
    check_near(o, 1);
    buffers<float> few({.rows = 3, .vocab = 11, .masked = true, .seed = 9});
    std::fill(few.kept.begin(), few.kept.end(), std::uint8_t{0});
    const both none = on_both(few, reverse_kl{}, few.masked_env(), host_run_shards{.cuts = {0, 4, 11}});
    CHECK(none.split.diagnostics.kept == 0);
    CHECK(none.split.loss == 0);
    CHECK(none.dz_split == none.dz_whole);
    host_run_shards shards{.cuts = {0, 4, 11}};
    const result empty = evaluate(shards, student::logits{matrix_view<const float>(b.z.data(), 0, 11, 11)},
                                  teacher::dense{matrix_view<const float>(b.y.data(), 0, 11, 11)}, jsd{});
    CHECK(empty.loss == 0);
    CHECK(empty.diagnostics.rows == 0);
    CHECK(shards.said.rounds == 0);
}

TEST_CASE("a bad number in one shard makes the row bad on every rank") {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -minus_inf})
        for (const bool of_teacher : {false, true})
            for (const index_t at : {0, 17, 29}) {
                buffers<float> b({.rows = 5, .vocab = 30, .seed = 2});
                (of_teacher ? b.y : b.z)[std::size_t(2 * 30 + at)] = bad;
                const both o = on_both(b, reverse_kl{}, {}, host_run_shards{.cuts = {0, 10, 10, 18, 30}});
                CHECK(o.split.diagnostics.bad_rows == 1);
                CHECK(o.split.diagnostics.first_bad_row == 2);
                for (index_t i = 0; i < 30; ++i) CHECK(o.dz_split[std::size_t(2 * 30 + i)] == 0);
                CHECK(o.losses_split[2] == 0);
            }
    buffers<float> b({.rows = 3, .vocab = 30, .seed = 2}); // no mass anywhere
    for (std::size_t i = 30; i < 60; ++i) b.z[i] = minus_inf;
    CHECK(on_both(b, reverse_kl{}, {}, host_run_shards{.cuts = {0, 10, 30}}).split.diagnostics.first_bad_row == 1);
}

TEST_CASE("a padded vocabulary: a shard without mass on either side is as if it were not there") {
    for_each_divergence_type([](const std::string& name, auto d) {
        CAPTURE(name);
        for (const float temperature : {0.7F, 2.F}) {
            buffers<float> b({.rows = 4,
                              .vocab = 3000,
                              .temperature_p = temperature,
                              .temperature_q = temperature > 1 ? 1.F : 2.F,
                              .kind = temperature > 1 ? flavour::near_equal : flavour::wide,
                              .seed = 6});
            for (index_t r = 0; r < 4; ++r)
                for (const auto& [from, to] : {std::pair<index_t, index_t>{0, 1100}, {2000, 3000}})
                    for (index_t i = from; i < to; ++i)
                        b.z[std::size_t(r * 3000 + i)] = b.y[std::size_t(r * 3000 + i)] = minus_inf;
            const both o = on_both(b, d, {}, host_run_shards{.cuts = {0, 1100, 1500, 2000, 3000}});
            check_near(o, 1);
            CHECK(o.split.diagnostics.careful_rows == 0);
        }
    });
}

TEST_CASE("infinite rows under each policy, the zero in a shard of its own; what waits to throw is refused") {
    for (const bool of_teacher : {true, false}) {
        buffers<float> b({.rows = 3, .vocab = 25, .seed = 3});
        (of_teacher ? b.y : b.z)[25 + 7] = minus_inf;
        const auto all = [&](auto d) {
            for (const infinite policy : {infinite::floor(), infinite::floor(-12), infinite::skip()}) {
                env e;
                e.on_infinite = policy;
                const both o = on_both(b, d, e, host_run_shards{.cuts = {0, 7, 8, 25}});
                CHECK(o.split.diagnostics.first_infinite_row == 1);
                check_near(o, 1);
            }
        };
        of_teacher ? all(reverse_kl{}) : all(forward_kl{});
        check_near(on_both(b, jsd{}, {}, host_run_shards{.cuts = {0, 7, 8, 25}}), 1); // finite
    }
}

TEST_CASE("entropies, selectors that choose by them, and rows by position") {
    buffers<float> b({.rows = 6, .vocab = 2100, .seed = 8});
    env e;
    e.measure.entropy = true;
    const both o = on_both(b, reverse_kl{}, e, host_run_shards{.seed = 3});
    CHECK(o.split.diagnostics.student_entropy() ==
          doctest::Approx(o.whole.diagnostics.student_entropy()).epsilon(1e-6));
    CHECK(o.split.diagnostics.teacher_entropy() ==
          doctest::Approx(o.whole.diagnostics.teacher_entropy()).epsilon(1e-6));
    CHECK(o.split.diagnostics.overlap() == doctest::Approx(o.whole.diagnostics.overlap()).epsilon(1e-6));
    check_near(on_both(b, eopd(4), {}, host_run_shards{.seed = 4}), 1); // mixes by the teacher's entropy
}

TEST_CASE("a gradient beyond its type is cut off in its shard, and the loss stays that of every rank") {
    const index_t v = 40;
    std::vector<half> z, y, dz(2 * v), whole(2 * v);
    numbers u(4);
    for (index_t i = 0; i < 2 * v; ++i)
        z.push_back(element<half>::store(float(u.normal()))), y.push_back(element<half>::store(float(u.normal())));
    z[5] = element<half>::store(4), y[5] = element<half>::store(-9); // row 0 has a large slope at id 5
    const std::vector<float> weights{6e4F, 1};
    env e{.reduction = reduce::sum, .weights = weights};
    const auto run = [&](auto& backend, std::vector<half>& to) {
        return evaluate(backend, student::logits{view(z.data(), 2, v), view(to.data(), 2, v)},
                        teacher::dense{view(y.data(), 2, v)}, reverse_kl{}, e);
    };
    host_run_shards shards{.cuts = {0, 4, 8, v}};
    const result split = run(shards, dz);
    e.on_overflow = overflow::saturate;
    host_run_backend one{.threads = 32};
    CHECK(split.loss == doctest::Approx(run(one, whole).loss).epsilon(1e-5));
    REQUIRE(shards.cut_off.size() == 3);
    CHECK(shards.cut_off[1] == 1);
    CHECK(shards.cut_off[2] == 0);
    CHECK(std::abs(element<half>::load(dz[5])) == 65504);
    for (index_t i = 0; i < 2 * v; ++i)
        CHECK(element<half>::load(dz[std::size_t(i)]) ==
              doctest::Approx(element<half>::load(whole[std::size_t(i)])).epsilon(2e-3));
}

TEST_CASE("how many rounds, and how many bytes") {
    buffers<float> b({.rows = 50, .vocab = 64, .kind = flavour::peaked, .seed = 5});
    const auto said = [&](auto d, env e = {}) { return on_both(b, d, e, host_run_shards{.cuts = {0, 30, 64}}).said; };
    const auto bytes = [](std::size_t stride) {
        return detail::device_plan::aligned(sizeof(detail::partials_head) + 50 * stride);
    };
    const std::size_t item = sizeof(detail::partial_item), large = bytes(item + sizeof(detail::row_sweep)),
                      small = bytes(item + 24), pairs = bytes(item + 16);
    // sweep; entry by entry; refined; in float64 the normalisers, then the terms
    CHECK(said(forward_kl{}).rounds == 5);
    CHECK(said(forward_kl{}).bytes == large + small + 3 * pairs);
    CHECK(said(jsd{}).rounds == 6); // and the terms
    env measured;
    measured.measure.entropy = true;
    CHECK(said(jsd{}, measured).rounds == 7);
}

TEST_CASE("shards that do not hold every id once make every row bad on every rank") {
    const index_t n = 3, v = 20;
    buffers<float> b({.rows = n, .vocab = v, .seed = 3});
    const auto run = [&](vocab_shard one, vocab_shard two, index_t ids_of_two) {
        std::vector<float> dz(std::size_t(n * v), 7);
        gathering_threads team(2);
        of_rank out[2];
        {
            const auto rank = [&](std::size_t i, vocab_shard shard, index_t first, index_t count) {
                const auto job = detail::checked_shard_job(
                    shard,
                    student::logits{matrix_view<const float>(b.z.data() + first, n, count, v),
                                    matrix_view<float>(dz.data() + first, n, count, v)},
                    teacher::dense{matrix_view<const float>(b.y.data() + first, n, count, v)}, reverse_kl{}, env{});
                return std::jthread([&, i, shard, job] { out[i] = run_rank(job, shard, i, team, 8, true); });
            };
            const std::jthread a = rank(0, one, 0, 12), c = rank(1, two, 12, ids_of_two);
        }
        CHECK(out[0].got.diagnostics.bad_rows == out[1].got.diagnostics.bad_rows);
        if (out[0].got.diagnostics.bad_rows == n) {
            CHECK(out[0].got.loss == 0);
            for (index_t r = 0; r < n; ++r)
                for (index_t i = 0; i < 12 + ids_of_two; ++i) CHECK(dz[std::size_t(r * v + i)] == 0);
        }
        return out[0].got.diagnostics.bad_rows;
    };
    CHECK(run({0, v}, {12, v}, 8) == 0);
    CHECK(run({0, v}, {12, v}, 7) == n); // an id is lost
    CHECK(run({0, v}, {11, v}, 8) == n); // one is held twice, another not at all
}

} // namespace
