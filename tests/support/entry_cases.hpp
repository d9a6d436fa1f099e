// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Cases of supports and drawn tokens over a vocabulary in shards, each written once for every backend that runs such
// calls, as those of shard_cases.hpp are. `Shards` also has takes(rounds made, rounds of the call).
#pragma once

#include "support/entry_judges.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include <opd/opd.hpp>

namespace opd::test::entry_cases {

inline const std::vector<flavour> kinds = {flavour::wide,     flavour::near_equal,  flavour::peaked,
                                           flavour::filtered, flavour::student_gap, flavour::diffuse};

template <class Shards>
void supports(const std::string& name, const auto& estimator, int count) {
    property(name,
             [&] {
                 const problem p = *problems({.smallest_rows = 1, .kinds = kinds});
                 const buffers<float> b(p);
                 numbers u(p.seed);
                 const caches<float> c(b, 1 + u.below(std::min<index_t>(p.vocab, 40)), 1);
                 env e = b.masked_env();
                 e.weights = b.weights;
                 auto known = c.support();
                 if (p.seed % 3 == 0) known.log_tail = {}; // inferred
                 const exchanged said = agrees_on_entries(b, known, estimator, e, Shards::of_seed(p.seed));
                 RC_ASSERT(Shards::takes(said.rounds, 1));
             },
             {.cases = count});
}

/// Unused slots, ids out of range, ids that repeat, and rows of different length.
template <class Shards>
void odd_supports() {
    const buffers<float> b({.rows = 5, .vocab = 30, .seed = 3});
    const std::vector<std::int32_t> ids{0, 29, 7, 5, -1, 12, -1, -1, -1, 3, 30, 4, 8, 9, 8};
    const std::vector<float> log_q(15, -2.0F);
    const Shards shards = Shards::at({0, 1, 8, 8, 20, 30});
    const teacher::support known{view(ids.data(), 5, 3), view(log_q.data(), 5, 3)};
    agrees_on_entries(b, known, tail_bucket{reverse_kl{}}, {}, shards);
    const std::vector<std::int64_t> offsets{0, 3, 4, 4, 9, 15};
    const teacher::ragged_support ragged{view(ids.data(), 15), view(log_q.data(), 15), row_offsets<>(offsets)};
    agrees_on_entries(b, ragged, tail_bucket{reverse_kl{}}, {}, shards);
}

template <class Shards>
void drawn_tokens(int count) {
    property("samples",
             [] {
                 const problem p = *problems({.smallest_rows = 1, .kinds = kinds});
                 const buffers<float> b(p);
                 numbers u(p.seed);
                 const caches<float> c(b, 1, 1 + u.below(12));
                 env e = b.masked_env();
                 e.weights = b.weights;
                 std::vector<double> lse;
                 if (p.seed % 3 == 0) { // no sweep then: the logits travel alone
                     lse.resize(std::size_t(p.rows));
                     cpu_backend one;
                     auto s = b;
                     env first;
                     first.lse = lse;
                     evaluate(one, s.value_only(), c.samples(), mc{}, first);
                     e.given_lse = lse;
                 }
                 const exchanged said = agrees_on_entries(b, c.samples(), mc{}, e, Shards::of_seed(p.seed));
                 RC_ASSERT(Shards::takes(said.rounds, 1));
             },
             {.cases = count});
}
/// Slots that are unused, and ids that repeat.
template <class Shards>
void weighted_tokens(int count) {
    property("weighted",
             [] {
                 const problem p = *problems({.smallest_rows = 1, .kinds = kinds});
                 const buffers<float> b(p);
                 const caches<float> c(b, 1, 9);
                 env e = b.masked_env();
                 e.measure.entropy = p.seed % 2 == 0;
                 const exchanged said = agrees_on_entries(b, c.weighted(), mc{}, e, Shards::of_seed(p.seed));
                 RC_ASSERT(Shards::takes(said.rounds, e.measure.entropy ? 2 : 1));
             },
             {.cases = count});
}

/// A shard without tokens has the softmax's share alone; what is bad is bad on every rank.
template <class Shards>
void lonely_and_bad_tokens() {
    const index_t v = 12;
    buffers<float> b({.rows = 3, .vocab = v, .seed = 5});
    const std::vector<std::int32_t> ids{4, 4, 11, 4, 4, 12};
    const std::vector<float> log_mu{-2, -2, -3, -2, -1, -2}, log_q{-1, -1, -2, -4, -1, -2};
    const auto m = [](const auto& x) { return view(x.data(), 3, 2); };
    const teacher::samples drawn{m(ids), m(log_mu), m(log_q)};
    Shards shards = Shards::at({0, 4, 5, 11, v});
    agrees_on_entries(b, drawn, mc{}, {}, shards); // row 2: id 12 is out of range
    env e;
    std::vector<double> lse(3);
    e.lse = lse;
    CHECK(evaluate(shards, b.student(), drawn, mc{}, e).diagnostics.bad_rows == 1);
    for (index_t r = 0; r < 2; ++r) { // dz = -g p Σc where no token lies
        const auto p = [&](index_t i) { return std::exp(double(b.z_view()(r, i)) - lse[std::size_t(r)]); };
        const double share = double(b.dz_view()(r, 0)) / p(0);
        for (const index_t i : {1, 2, 3, 5, 6, 7, 8, 9, 10})
            CHECK(double(b.dz_view()(r, i)) == doctest::Approx(share * p(i)).epsilon(1e-5));
    }
    for (const index_t at : {4, 9}) { // NaN at a token, and where none is
        buffers<float> bad = b;
        bad.z[std::size_t(at)] = std::bit_cast<float>(0x7fc00000u);
        agrees_on_entries(bad, drawn, mc{}, {}, shards);
        const std::vector<double> given{1, 2, 3}; // vouches for what is not looked at
        env with;
        with.given_lse = given;
        if (at == 4) agrees_on_entries(bad, drawn, mc{}, with, shards);
        b.z[std::size_t(v + 4)] = detail::neg_inf<float>();
        agrees_on_entries(b, drawn, mc{}, {}, shards);
    }
}

} // namespace opd::test::entry_cases
