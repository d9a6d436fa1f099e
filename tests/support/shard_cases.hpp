// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Cases of divergences over a vocabulary in shards, each written once for every backend that runs such calls: the CPU's
// stages (sharded_backend) and a GPU's kernels on the host (host_run_shards). A backend is made by its at(cuts) and
// of_seed(seed). `count`: how many random calls a property makes.
#pragma once

#include "support/accuracy.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/shard_judges.hpp"
#include "support/traits.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <string>
#include <utility>
#include <vector>

#include <opd/opd.hpp>

namespace opd::test::shard_cases {

inline const float minus_inf = detail::neg_inf<float>();
using cuts_list = std::vector<index_t>;

template <class Shards>
void every_divergence(int count) {
    for_each_divergence([&](const std::string& name, auto d) {
        property(name,
                 [&] {
                     const problem p = *problems({.kinds = every_kind});
                     Shards shards = Shards::of_seed(p.seed);
                     env e;
                     if (p.seed % 3 == 1) e.on_infinite = infinite::skip();
                     agrees(d, p, shards, e);
                 },
                 {.cases = count});
    });
    property("acceptance",
             [] {
                 const problem p = *problems({.kinds = every_kind});
                 Shards shards = Shards::of_seed(p.seed);
                 agrees(acceptance{}, p, shards, {});
             },
             {.cases = count});
}

/// `of_size(ids of a row)`: the shards.
void hard_rows(auto of_size) {
    std::vector<accuracy::errors> table;
    for (const index_t n : {96, 3000}) {
        auto shards = of_size(n);
        for (const auto& r : accuracy::rows(n, 7)) accuracy::judge_dense(shards, r, table);
    }
}

template <class Shards>
void stretch_without_mass() {
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
        for (const cuts_list& cuts : std::vector<cuts_list>{{0, v}, {0, 1200, v}, {0, 600, 700, 2000, v}})
            CHECK(value(Shards::at(cuts)) == doctest::Approx(want).epsilon(2e-6));
    }
}

template <class Shards>
void every_option(int count) {
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
                 check_near(on_both(b, reverse_kl{}, e, Shards::of_seed(p.seed)),
                            double(3 * p.rows) / double(p.temperature_p));
             },
             {.cases = count});
}

/// Runs of one call have the same bits: a second one, and `others`, in another way.
template <class Shards>
void same_bits(const cuts_list& cuts, const std::vector<Shards>& others) {
    const buffers<float> b({.rows = 40, .vocab = 1500, .kind = flavour::diffuse, .seed = 12});
    const both first = on_both(b, jsd{}, {}, Shards::at(cuts));
    for (const Shards& shards : others) {
        const both o = on_both(b, jsd{}, {}, shards);
        CHECK(equal_bits(o.split.loss, first.split.loss));
        CHECK(o.dz_split == first.dz_split);
        CHECK(o.lse_split == first.lse_split);
    }
}

/// The gradient may lie over the logits.
template <class Shards>
void in_place() {
    const auto agree = [](buffers<float> apart, Shards shards) {
        buffers<float> b = apart;
        Shards again = shards;
        const double loss = evaluate(shards, apart.student(), apart.teacher(), jsd{}).loss;
        auto s = b.student();
        s.dz = {b.z.data(), b.p.rows, b.p.vocab, b.p.vocab};
        CHECK(equal_bits(evaluate(again, s, b.teacher(), jsd{}).loss, loss));
        for (std::size_t i = 0; i < std::size_t(b.p.rows * b.p.vocab); ++i) CHECK(b.z[i] == apart.dz[i]);
    };
    for (const index_t v : {1, 9, 1024, 2500})
        agree(buffers<float>({.rows = 3, .vocab = v, .seed = 4}), Shards::of_seed(std::uint64_t(v)));
    agree(buffers<float>({.rows = 40, .vocab = 1500, .kind = flavour::diffuse, .seed = 12}),
          Shards::at({0, 1, 700, 700, 1025, 1500}));
}

/// 5,000 rows, none, and none that is kept.
template <class Shards>
void many_rows_and_none() {
    const Shards shards = Shards::at({0, 4, 11});
    buffers<float> b({.rows = 5000, .vocab = 11, .masked = true, .seed = 9});
    const both o = on_both(b, reverse_kl{}, b.masked_env(), shards);
    CHECK(o.split.diagnostics.rows == 5000);
    CHECK(o.split.loss == doctest::Approx(o.whole.loss).epsilon(1e-6));
    check_near(o, 1);
    buffers<float> few({.rows = 3, .vocab = 11, .masked = true, .seed = 9});
    std::fill(few.kept.begin(), few.kept.end(), std::uint8_t{0});
    const both none = on_both(few, reverse_kl{}, few.masked_env(), shards);
    CHECK(none.split.diagnostics.kept == 0);
    CHECK(none.split.loss == 0);
    CHECK(none.dz_split == none.dz_whole);
    Shards own = shards;
    const result empty = evaluate(own, student::logits{matrix_view<const float>(b.z.data(), 0, 11, 11)},
                                  teacher::dense{matrix_view<const float>(b.y.data(), 0, 11, 11)}, jsd{});
    CHECK(empty.loss == 0);
    CHECK(empty.diagnostics.rows == 0);
    CHECK(own.said.rounds == 0);
}

template <class Shards>
void largest_in_any_shard() {
    const index_t v = 40;
    for (const index_t top_z : {0, 13, 39})
        for (const index_t top_y : {0, 20, 39}) {
            buffers<float> b({.rows = 1, .vocab = v, .seed = 9});
            b.z[std::size_t(top_z)] = 12, b.y[std::size_t(top_y)] = 14;
            b.z[25] = b.z[std::size_t(top_z)]; // twice
            check_near(on_both(b, reverse_kl{}, {}, Shards::at({0, 1, 1, 14, 26, 39, v})), 1);
            check_near(on_both(b, forward_kl{}, {}, Shards::at({0, 1, 1, 14, 26, 39, v})), 1);
        }
}

/// visit(rows of 30 ids, of which row 2 has one bad number)
void each_bad_number(auto visit) {
    for (const float bad : {std::bit_cast<float>(0x7fc00000u), std::bit_cast<float>(0x7f800000u)}) // NaN, infinity
        for (const bool of_teacher : {false, true})
            for (const index_t at : {0, 17, 29}) {
                buffers<float> b({.rows = 5, .vocab = 30, .seed = 2});
                (of_teacher ? b.y : b.z)[std::size_t(2 * 30 + at)] = bad;
                visit(b);
            }
}
template <class Shards>
void bad_number() {
    each_bad_number([](const buffers<float>& b) {
        const both o = on_both(b, reverse_kl{}, {}, Shards::at({0, 10, 10, 18, 30}));
        CHECK(o.split.diagnostics.bad_rows == 1);
        CHECK(o.split.diagnostics.first_bad_row == 2);
        for (index_t i = 0; i < 30; ++i) CHECK(o.dz_split[std::size_t(2 * 30 + i)] == 0);
        CHECK(o.losses_split[2] == 0);
    });
    buffers<float> b({.rows = 3, .vocab = 30, .seed = 2}); // no mass anywhere
    for (std::size_t i = 30; i < 60; ++i) b.z[i] = minus_inf;
    CHECK(on_both(b, reverse_kl{}, {}, Shards::at({0, 10, 30})).split.diagnostics.first_bad_row == 1);
}

/// `rounds`: of the longest way through a row that float carries.
template <class Shards>
void padded_vocabulary(int rounds) {
    for_each_divergence_type([&](const std::string& name, auto d) {
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
            const both o = on_both(b, d, {}, Shards::at({0, 1100, 1500, 2000, 3000}));
            check_near(o, 1);
            CHECK(o.split.diagnostics.careful_rows == 0);
            CHECK(o.said.rounds <= rounds);
        }
    });
}

/// visit(rows, of which row 1 has a zero, whether that is the teacher's); the zero is the id 7.
void each_infinite_row(auto visit) {
    for (const bool of_teacher : {true, false}) {
        buffers<float> b({.rows = 3, .vocab = 25, .seed = 3});
        (of_teacher ? b.y : b.z)[25 + 7] = minus_inf;
        visit(b, of_teacher);
    }
}
template <class Shards>
void infinite_rows() {
    each_infinite_row([](const buffers<float>& b, bool of_teacher) {
        const auto with = [&](auto d, infinite policy) {
            env e;
            e.on_infinite = policy;
            return on_both(b, d, e, Shards::at({0, 7, 8, 25}));
        };
        const auto all = [&](auto d) {
            for (const infinite policy : {infinite::floor(), infinite::floor(-12), infinite::skip()}) {
                const both o = with(d, policy);
                CHECK(o.split.diagnostics.first_infinite_row == 1);
                check_near(o, 1);
            }
        };
        of_teacher ? all(reverse_kl{}) : all(forward_kl{});
        check_near(with(jsd{}, infinite::floor()), 1); // finite
    });
}

template <class Shards>
void floor_of_the_whole() {
    buffers<float> b({.rows = 1, .vocab = 3000, .kind = flavour::diffuse, .seed = 4});
    numbers u(2);
    for (float& z : b.z) z = float(0.02 * (2 * u.uniform() - 1));
    const auto top = std::size_t(std::max_element(b.z.begin(), b.z.begin() + 3000) - b.z.begin());
    for (std::size_t i = 0; i < 3000; ++i) b.y[i] = i == top ? 1.0F : minus_inf;
    const auto own = index_t(top);
    check_near(on_both(b, reverse_kl{}, {}, Shards::at({0, own, own + 1, 3000})), 0);
}

/// `rounds`: of a reverse KL whose entropies are measured.
template <class Shards>
void entropies(int rounds) {
    const buffers<float> b({.rows = 6, .vocab = 2100, .seed = 8});
    env e;
    e.measure.entropy = true;
    const both o = on_both(b, reverse_kl{}, e, Shards::of_seed(3));
    const diagnostics &split = o.split.diagnostics, &whole = o.whole.diagnostics;
    CHECK(o.said.rounds == rounds);
    CHECK(split.student_entropy() == doctest::Approx(whole.student_entropy()).epsilon(1e-6));
    CHECK(split.teacher_entropy() == doctest::Approx(whole.teacher_entropy()).epsilon(1e-6));
    CHECK(split.overlap() == doctest::Approx(whole.overlap()).epsilon(1e-6));
    check_near(on_both(b, eopd(4), {}, Shards::of_seed(4)), 1); // mixes by the teacher's entropy
}

} // namespace opd::test::shard_cases
