// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// A vocabulary in shards, of losses that read few ids: renormalised supports and tokens drawn under a filter. Ranks
// tell each other the logits of these ids, so every rank computes what one rank would: the same bits, whatever the
// split.
#include "backends/host_run_shards.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/shards.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const float nan_f = std::bit_cast<float>(0x7fc00000u);

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
/// The call on one rank and in shards.
template <class Cache, class Estimator>
exchanged split_agrees(const buffers<float>& b, const Cache& cache, const Estimator& estimator, env e, auto shards,
                       auto&& one) {
    buffers<float> whole = b, split = b;
    const auto rows = std::size_t(b.p.rows);
    std::vector<float> losses(rows, 7.F), losses_split(rows, 7.F);
    e.losses = losses;
    const result want = evaluate(one, whole.student(), cache, estimator, e);
    e.losses = losses_split;
    const result got = evaluate(shards, split.student(), cache, estimator, e);
    CHECK(equal_bits(got.loss, want.loss));
    CHECK(same_bytes(losses_split, losses));
    diagnostics::fields([&](const char* name, auto field, auto) {
        INFO(name);
        CHECK(std::memcmp(&(got.diagnostics.*field), &(want.diagnostics.*field), sizeof(got.diagnostics.*field)) == 0);
    });
    for (index_t r = 0; r < b.p.rows; ++r)
        for (index_t v = 0; v < b.p.vocab; ++v)
            if (std::memcmp(&split.dz_view()(r, v), &whole.dz_view()(r, v), sizeof(float)) != 0) {
                CAPTURE(r);
                CAPTURE(v);
                CHECK(split.dz_view()(r, v) == whole.dz_view()(r, v));
            }
    return shards.said;
}
template <class Cache, class Estimator>
exchanged split_agrees(const buffers<float>& b, const Cache& cache, const Estimator& estimator, env e,
                       const sharded_backend& shards) {
    return split_agrees(b, cache, estimator, e, shards, cpu_backend{});
}
/// The same by a GPU's kernels.
template <class Cache, class Estimator>
exchanged kernels_agree(const buffers<float>& b, const Cache& cache, const Estimator& estimator, env e,
                        const std::vector<index_t>& cuts) {
    return split_agrees(b, cache, estimator, e, host_run_shards{.cuts = cuts, .threads = 8},
                        host_run_backend{.threads = 8});
}

const std::vector<flavour> kinds = {flavour::wide,     flavour::near_equal,  flavour::peaked,
                                    flavour::filtered, flavour::student_gap, flavour::diffuse};

/// Ascending sets of ids, in which each row's drawn token mostly is.
struct sets {
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> offsets{0};
    sets(const caches<float>& c, index_t vocab, numbers& u) {
        for (index_t r = 0; r < c.rows; ++r) {
            std::vector<std::int32_t> set;
            for (index_t j = 0; j < c.m; ++j)
                if (u.uniform() < 0.9) set.push_back(c.drawn[std::size_t(r * c.m + j)]);
            for (index_t more = 1 + u.below(5); more > 0; --more) set.push_back(std::int32_t(u.below(vocab)));
            std::sort(set.begin(), set.end());
            set.erase(std::unique(set.begin(), set.end()), set.end());
            ids.insert(ids.end(), set.begin(), set.end());
            offsets.push_back(std::int64_t(ids.size()));
        }
    }
};

} // namespace

TEST_CASE("renormalised supports: the bits of one rank, in one round") {
    const auto all = [](const std::string& name, const auto& estimator) {
        property(name,
                 [&] {
                     const problem p = *problems({.smallest_rows = 1, .kinds = kinds});
                     const buffers<float> b(p);
                     numbers u(p.seed);
                     const caches<float> c(b, 1 + u.below(std::min<index_t>(p.vocab, 40)), 1);
                     env e = b.masked_env();
                     e.weights = b.weights;
                     if (p.seed % 2 == 0) e.beta = 0.5F;
                     std::vector<double> lse;
                     if (p.seed % 3 == 0) { // the masses of both sides are counted then
                         lse.assign(std::size_t(p.rows), 3.0);
                         e.given_lse = lse;
                     }
                     const exchanged said =
                         split_agrees(b, c.support(), estimator, e, {.threads = p.seed % 4 == 0, .seed = p.seed});
                     RC_ASSERT(said.rounds <= 1);
                     if constexpr (std::is_same_v<std::remove_cvref_t<decltype(estimator)>, renormalised<reverse_kl>>)
                         RC_ASSERT(
                             kernels_agree(b, c.support(), estimator, e, random_cuts(p.vocab, p.seed + 1)).rounds == 1);
                 },
                 {.cases = 60});
    };
    all("reverse KL", renormalised{reverse_kl{}});
    all("JSD", renormalised{jsd{}});
    all("alpha", renormalised{alpha_divergence{0.3}});
    all("total variation", renormalised{total_variation{}});
}

TEST_CASE("renormalised supports: unused slots, ids that are none or repeat, logits that are no numbers, rows of any "
          "length") {
    buffers<float> b({.rows = 6, .vocab = 30, .seed = 3});
    b.z[std::size_t(5 * b.z_view().stride + 8)] = nan_f; // in a row's support
    b.z[std::size_t(1 * b.z_view().stride + 9)] = nan_f; // in nobody's
    std::vector<std::int32_t> ids{0, 29, 7, 5, -1, 12, -1, -1, -1, 3, 30, 4, 8, 9, 8, 8, 2, 1};
    std::vector<float> log_q(18, -2.0F);
    log_q[1] = detail::neg_inf<float>();
    const auto known = [&] {
        return teacher::support{view(std::as_const(ids).data(), 6, 3), view(std::as_const(log_q).data(), 6, 3)};
    };
    const std::vector<std::int64_t> offsets{0, 3, 4, 4, 9, 15, 18};
    const auto ragged = [&] {
        return teacher::ragged_support{view(std::as_const(ids).data(), 18), view(std::as_const(log_q).data(), 18),
                                       row_offsets<>(offsets)};
    };
    cpu_backend one;
    for (const bool threads : {false, true}) {
        const sharded_backend shards{.cuts = {0, 1, 8, 8, 20, 30}, .threads = threads};
        split_agrees(b, known(), renormalised{forward_kl{}}, {}, shards);
        split_agrees(b, ragged(), renormalised{forward_kl{}}, {}, shards);
        split_agrees(b, known(), renormalised{reverse_kl{}}, {.on_infinite = infinite::floor(-20)}, shards);
        log_q[0] = 1; // no log-prob
        split_agrees(b, known(), renormalised{forward_kl{}}, {}, shards);
        kernels_agree(b, known(), renormalised{reverse_kl{}}, {}, shards.cuts);
        kernels_agree(b, ragged(), renormalised{reverse_kl{}}, {}, shards.cuts);
        CHECK(evaluate(one, b.student(), known(), renormalised{forward_kl{}}).diagnostics.bad_rows == 5);
        log_q[0] = -2;
    }
    // row 2 has no ids, 3 and 4 have wrong ones, 5 a logit that is none
    CHECK(evaluate(one, b.student(), known(), renormalised{forward_kl{}}).diagnostics.bad_rows == 4);
}

TEST_CASE("drawn tokens on the ids that a filter kept: the bits of one rank, in one round") {
    property("kept sets",
             [] {
                 const problem p = *problems({.smallest_rows = 1, .kinds = kinds});
                 const buffers<float> b(p);
                 numbers u(p.seed);
                 const caches<float> c(b, 1, 1 + u.below(6));
                 const sets kept(c, p.vocab, u);
                 const teacher::on_kept_sets cache{c.samples(), view(kept.ids.data(), index_t(kept.ids.size())),
                                                   row_offsets<>(kept.offsets)};
                 env e = b.masked_env();
                 e.weights = b.weights;
                 e.measure.entropy = p.seed % 2 == 0;
                 if (p.seed % 3 == 0) e.beta = -1;
                 const exchanged said =
                     split_agrees(b, cache, mc{reverse_kl{}}, e, {.threads = p.seed % 4 == 0, .seed = p.seed});
                 RC_ASSERT(said.rounds <= 1);
                 RC_ASSERT(kernels_agree(b, cache, mc{reverse_kl{}}, e, random_cuts(p.vocab, p.seed + 1)).rounds == 1);
             },
             {.cases = 100});
    // sets that do not ascend or hold no ids, and a logit that is none, in a set and outside it
    buffers<float> b({.rows = 5, .vocab = 20, .seed = 9});
    b.z[std::size_t(3 * b.z_view().stride + 4)] = nan_f;
    b.z[std::size_t(4 * b.z_view().stride + 19)] = nan_f;
    const std::vector<std::int32_t> one{2, 3, 5, 4, 5}, ids{2, 3, 3, 2, 5, 20, 1, 4, 5, 6};
    const std::vector<std::int64_t> offsets{0, 2, 4, 6, 8, 10};
    const std::vector<float> log_mu(5, -1), log_q(5, -2);
    const teacher::on_kept_sets cache{
        teacher::samples{view(one.data(), 5, 1), view(log_mu.data(), 5, 1), view(log_q.data(), 5, 1)},
        view(ids.data(), 10), row_offsets<>(offsets)};
    split_agrees(b, cache, mc{reverse_kl{}}, {}, {.cuts = {0, 3, 3, 5, 20}});
    kernels_agree(b, cache, mc{reverse_kl{}}, {}, {0, 3, 3, 5, 20});
    cpu_backend backend;
    CHECK(evaluate(backend, b.student(), cache, mc{reverse_kl{}}).diagnostics.bad_rows == 3);
}
