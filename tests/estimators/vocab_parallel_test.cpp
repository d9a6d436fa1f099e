// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// Divergences over a vocabulary in 1 to 7 shards of any size, empty ones among them: against float64, within the bounds
// that one rank is held to, so that a split differs from the whole by at most twice those. Every rank decides, counts
// and reports the same bits.
#include "support/compiled/dense.hpp"
#include "support/shard_cases.hpp"
#include "support/shard_judges.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

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
    shard_cases::every_divergence<sharded_backend>(60);
}

TEST_CASE("rows on which float loses digits are held to the bounds of one rank") {
    shard_cases::hard_rows([](index_t n) { return sharded_backend{.seed = std::uint64_t(n)}; });
}

TEST_CASE("a stretch of ids without the student's mass keeps what the teacher has there") {
    shard_cases::stretch_without_mass<sharded_backend>();
}

TEST_CASE("masks, weights, sequences, clamps, beta, temperatures from 0.01 to 100, a given log-sum-exp") {
    shard_cases::every_option<sharded_backend>(150);
}

TEST_CASE("threads, a loop and a second run give the same bits") {
    const std::vector<index_t> cuts{0, 1, 700, 700, 1025, 1500};
    const sharded_backend threads{.cuts = cuts, .threads = true};
    shard_cases::same_bits<sharded_backend>(cuts, {sharded_backend::at(cuts), threads, threads});
}

TEST_CASE("the gradient may lie over the logits") { shard_cases::in_place<sharded_backend>(); }

TEST_CASE("other storage") {
    for (const index_t v : {1, 9, 1024, 2500}) {
        const buffers<float> b({.rows = 3, .vocab = v, .seed = 4});
        sharded_backend shards{.seed = std::uint64_t(v)};
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

TEST_CASE("many rows, no rows, no kept row") { shard_cases::many_rows_and_none<sharded_backend>(); }

TEST_CASE("the largest logits may lie in any shard, and equal ones have one anchor") {
    shard_cases::largest_in_any_shard<sharded_backend>();
}

TEST_CASE("a bad number in one shard makes the row bad on every rank, and none is written") {
    shard_cases::bad_number<sharded_backend>();
    shard_cases::each_bad_number([](buffers<float> b) {
        env raises;
        raises.on_bad = bad::raise();
        sharded_backend shards{.cuts = {0, 10, 30}};
        CHECK_THROWS_AS(evaluate(shards, b.student(), b.teacher(), reverse_kl{}, raises), bad_contents);
    });
}

TEST_CASE("a padded vocabulary: a shard without mass on either side is as if it were not there") {
    shard_cases::padded_vocabulary<sharded_backend>(2);
}

TEST_CASE("infinite rows under each policy, the zero in a shard of its own") {
    shard_cases::infinite_rows<sharded_backend>();
    shard_cases::each_infinite_row([](buffers<float> b, bool of_teacher) {
        env e;
        e.on_infinite = infinite::raise();
        sharded_backend shards{.cuts = {0, 7, 8, 25}};
        std::vector<float> losses(3, 5);
        e.losses = losses;
        const auto raises = [&](auto d) {
            try {
                evaluate(shards, b.student(), b.teacher(), d, e);
                CHECK(false);
            } catch (const infinite_value& x) {
                CHECK(x.row == 1);
            }
        };
        of_teacher ? raises(reverse_kl{}) : raises(forward_kl{});
        CHECK(losses == std::vector<float>(3, 5));
        CHECK(std::count(b.dz.begin(), b.dz.end(), 777.F) == std::ptrdiff_t(b.dz.size()));
    });
}

TEST_CASE("a flat student under a teacher that has its first choice alone: the rest lies at the floor of the whole "
          "vocabulary") {
    shard_cases::floor_of_the_whole<sharded_backend>();
}

TEST_CASE("entropies, and selectors that choose by them") { shard_cases::entropies<sharded_backend>(2); }

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
