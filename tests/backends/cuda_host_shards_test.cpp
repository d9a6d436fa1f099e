// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// The GPU's kernels of a vocabulary in 1 to 7 shards, run on the host, a thread for each rank: against float64, beside
// one rank, and in what they exchange.
#include "backends/host_run_shards.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/shard_cases.hpp"
#include "support/shard_judges.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace opd;
using namespace opd::test;

TEST_CASE("every divergence, whatever the split, is that of the whole vocabulary") {
    shard_cases::every_divergence<host_run_shards>(30);
}

TEST_CASE("rows on which float loses digits are held to the bounds of one rank") {
    shard_cases::hard_rows([](index_t n) { // two ranks: more threads wait longer for each other
        return host_run_shards{.cuts = {0, n / 3, n}, .threads = 128};
    });
}

TEST_CASE("a stretch of ids without the student's mass keeps what the teacher has there") {
    shard_cases::stretch_without_mass<host_run_shards>();
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
    shard_cases::every_option<host_run_shards>(100);
}

TEST_CASE("a second run gives the same bits, and the gradient may lie over the logits") {
    const std::vector<index_t> cuts{0, 1, 700, 700, 1025, 1500};
    shard_cases::same_bits<host_run_shards>(cuts, {host_run_shards::at(cuts)});
    shard_cases::in_place<host_run_shards>();
}

TEST_CASE("more rows than blocks, no rows, no kept row") { shard_cases::many_rows_and_none<host_run_shards>(); }

TEST_CASE("the largest logits may lie in any shard, and equal ones have one anchor") {
    shard_cases::largest_in_any_shard<host_run_shards>();
}

TEST_CASE("a bad number in one shard makes the row bad on every rank") { shard_cases::bad_number<host_run_shards>(); }

TEST_CASE("a padded vocabulary: a shard without mass on either side is as if it were not there") {
    shard_cases::padded_vocabulary<host_run_shards>(6);
}

TEST_CASE("infinite rows under each policy, the zero in a shard of its own") {
    shard_cases::infinite_rows<host_run_shards>();
}

TEST_CASE("a flat student under a teacher that has its first choice alone: the rest lies at the floor of the whole "
          "vocabulary") {
    shard_cases::floor_of_the_whole<host_run_shards>();
}

TEST_CASE("entropies, and selectors that choose by them") { shard_cases::entropies<host_run_shards>(6); }

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

/// A row of more cuts than the library's have, larger and smaller ones in turn.
struct row_of_many_cuts {
    static constexpr std::size_t count = 20;
    struct state_type {
        bool kept = false;
    };
    detail::shard_row_frame<space::host> frame = {};
    static constexpr std::size_t words(std::size_t cut) { return 1 + cut * 13 % 20; }
    template <std::size_t Cut>
    struct phase {
        static constexpr bool backwards = false; // of a sum over the vocabulary
        struct part {
            double numbers[words(Cut)];
        };
        static part start(const row_of_many_cuts&, const state_type&) { return {}; }
        static bool due(const row_of_many_cuts&, const state_type& st) { return st.kept; }
    };
    template <std::size_t Cut = 0>
    void row(auto& team) const {
        team.template fold<phase<Cut>>(*this);
        if constexpr (Cut + 1 < count) row<Cut + 1>(team);
    }
};

TEST_CASE("a row may have any number of cuts, and an item has room for those that are left") {
    for (std::size_t from = 0; from <= row_of_many_cuts::count; ++from) {
        CAPTURE(from);
        detail::cut_counter cuts{int(from)};
        row_of_many_cuts{}.row(cuts);
        CHECK(cuts.count == int(row_of_many_cuts::count));
        std::size_t largest = 0;
        for (std::size_t i = from; i < row_of_many_cuts::count; ++i)
            largest = std::max(largest, sizeof(double) * row_of_many_cuts::words(i));
        CHECK(cuts.largest == largest);
    }
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
