// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Hidden states in every call that takes logits: other vocabularies in one bucket, supports and kept sets of which few
// logits are made, scores and draws; what rows may be (float64, infinite, clamped, selected, frozen); the bits of the
// same call on materialised logits.
#include "support/compiled/hidden_sides.hpp"
#include "support/property.hpp"

#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// k distinct ids a row, spread over the vocabulary, the last of row 1 unused; log-probs fall.
struct slots {
    index_t n, k;
    std::vector<std::int32_t> ids;
    floats log_q, log_mu;
    slots(index_t n_, index_t k_, index_t v, unsigned seed) : n(n_), k(k_) {
        std::mt19937 random(seed);
        const index_t each = v / k; // ids of a slot
        for (index_t r = 0; r < n; ++r)
            for (index_t j = 0; j < k; ++j) {
                ids.push_back(std::int32_t(((j * 11) % k) * each + index_t(random() % unsigned(each))));
                log_q.push_back(-2.0f - 0.3f * float(j)), log_mu.push_back(-2.2f - 0.25f * float((j + r) % k));
            }
    }
    auto i() const { return view(ids.data(), n, k); }
    auto q() const { return view(log_q.data(), n, k); }
    auto mu() const { return view(log_mu.data(), n, k); }
    teacher::support<std::int32_t> support() const { return {i(), q()}; }
};

} // namespace

TEST_CASE("vocabularies of different size with the rest in one bucket") {
    for (const auto& [v, v_t] : {std::pair<index_t, index_t>{1100, 1000}, {700, 900}, {40, 37}, {50, 50}}) {
        CAPTURE(v);
        const index_t n = 9;
        for (const bool more : {false, true}) {
            const side s(n, v, 12, unsigned(v), more, more ? 3.0f : 0), t(n, v_t, 9, 2, more);
            const floats y = t.logits();
            const teacher::dense known{view(y.data(), n, v_t)};
            for (const index_t common : {index_t(0), std::min(v, v_t) - 5}) {
                const teacher::lumped hidden{teacher_of(t), common};
                const teacher::lumped plain{known, common};
                compare(s, hidden, plain, reverse_kl{});
                compare(s, plain, plain, jsd{}, {.reduction = reduce::sum, .beta = 0});
                std::vector<std::uint8_t> mask(std::size_t(n), 1);
                mask[2] = mask[8] = 0;
                compare(s, hidden, plain, forward_kl{}, {.mask = mask});
            }
            // logits beside hidden states of the teacher
            const floats z = s.logits();
            floats dz(z.size()), same(z.size());
            cpu_backend be;
            const teacher::lumped hidden{teacher_of(t)};
            const teacher::lumped plain{known};
            evaluate(be, student::logits{view(z.data(), n, v), view(dz.data(), n, v)}, plain, reverse_kl{});
            evaluate(be, student::logits{view(z.data(), n, v), view(same.data(), n, v)}, hidden, reverse_kl{});
            CHECK(equal_bits(same, dz));
        }
    }
}

TEST_CASE("renormalised supports: the logits of k ids are made, and their gradients go back") {
    for (const index_t d : {1, 24, 300})
        for (const bool more : {false, true}) {
            CAPTURE(d);
            const index_t n = 11, v = 700, k = 70; // more than are gathered at once
            const side s(n, v, d, 3, more, more ? 3.0f : 0);
            slots c(n, k, v, 5);
            c.ids[std::size_t(2 * k - 1)] = -1;
            compare(s, c.support(), c.support(), renormalised{reverse_kl{}});
            compare(s, c.support(), c.support(), renormalised{jsd{}}, {.reduction = reduce::sum});
            std::vector<std::uint8_t> mask(std::size_t(n), 1);
            mask[0] = mask[7] = 0;
            c.ids[0] = 1 << 30; // of a masked row: never an id
            const floats z = s.logits();
            std::vector<double> lse(z.size() / std::size_t(v));
            cpu_backend be;
            log_sum_exp(be, view(z.data(), n, v), lse);
            const result r =
                compare(s, c.support(), c.support(), renormalised{forward_kl{}}, {.mask = mask, .given_lse = lse});
            CHECK(r.diagnostics.student_mass_sum > 0);
            // bad rows: an id twice, one out of range
            c.ids[std::size_t(3 * k)] = c.ids[std::size_t(3 * k + 1)], c.ids[std::size_t(5 * k + 9)] = std::int32_t(v);
            CHECK(
                compare(s, c.support(), c.support(), renormalised{reverse_kl{}}, {.mask = mask}).diagnostics.bad_rows ==
                2);
        }
}

TEST_CASE("ragged supports, and log-probs in double") {
    const index_t n = 6, v = 300;
    const side s(n, v, 16, 4);
    slots c(n, 8, v, 9);
    const std::vector<std::int64_t> offsets{0, 8, 9, 20, 20, 33, 40};
    std::vector<std::int32_t> ids(40);
    for (index_t r = 0; r < n; ++r)
        for (std::int64_t j = offsets[std::size_t(r)]; j < offsets[std::size_t(r + 1)]; ++j)
            ids[std::size_t(j)] = std::int32_t((31 * (j - offsets[std::size_t(r)]) + r) % v);
    const floats log_q(c.log_q.begin(), c.log_q.begin() + 40);
    const teacher::ragged_support ragged{view(std::as_const(ids).data(), 40), view(log_q.data(), 40),
                                         row_offsets<>(offsets)};
    CHECK(compare(s, ragged, ragged, renormalised{reverse_kl{}}).diagnostics.bad_rows == 1); // the row without an id
    const std::vector<double> wide(c.log_q.begin(), c.log_q.end());
    const teacher::support in_double{c.i(), view(wide.data(), n, c.k)};
    compare(s, in_double, in_double, renormalised{jsd{}});
}

TEST_CASE("a sparse gradient's head has the bits of a product, in which rows that hit one id meet in their order") {
    const index_t n = 33, v = 40, d = 37, k = 10;
    const side s(n, v, d, 3);
    const slots c(n, k, v, 5);
    const floats z = s.logits();
    floats dz(z.size());
    cpu_backend be{.threads = 2};
    evaluate(be, student::logits{view(z.data(), n, v), view(dz.data(), n, v)}, c.support(), renormalised{reverse_kl{}});
    gradients expected(s), got(s, 2);
    product(serial_executor{}, product_tn(v, d, n, dz.data(), v, s.x.data(), d, expected.dw.data(), d));
    for (const std::size_t budget : {std::size_t{1} << 20, sizeof(float) * std::size_t(v)}) {
        evaluate(be, student_of(s, got, budget), c.support(), renormalised{reverse_kl{}});
        CHECK(equal_bits(got.dw, expected.dw));
    }
    // collected, and one without the other
    auto more = student_of(s, got);
    more.beta_head = 1, more.dx = {}, more.db = {};
    const gradients before = got;
    evaluate(be, more, c.support(), renormalised{reverse_kl{}});
    for (std::size_t i = 0; i < got.dw.size(); ++i)
        CHECK(got.dw[i] == doctest::Approx(2 * double(before.dw[i])).epsilon(1e-5));
    CHECK(got.dx == before.dx);
    CHECK(got.db == before.db);
    auto states = student_of(s, got);
    states.dw = {}, states.db = {};
    evaluate(be, states, c.support(), renormalised{reverse_kl{}}, {.beta = 3});
    for (std::size_t i = 0; i < got.dx.size(); ++i)
        CHECK(got.dx[i] == doctest::Approx(4 * double(before.dx[i])).epsilon(1e-4));
}

TEST_CASE("tokens drawn under a filter: the logits of kept sets are made") {
    const index_t n = 7, v = 500, m = 3;
    for (const bool more : {false, true}) {
        const side s(n, v, 20, 3, more, more ? 4.0f : 0);
        // of row r every third id from r on, up to a third of the vocabulary; the tokens are among them
        std::vector<std::int32_t> kept, ids;
        std::vector<std::int64_t> offsets{0};
        floats log_mu, log_q, log_kept_q;
        for (index_t r = 0; r < n; ++r) {
            const index_t first = index_t(kept.size()), count = r == 4 ? 1 : 40 * r + 3;
            for (index_t j = 0; j < count; ++j) kept.push_back(std::int32_t((r % 3) + j * (r < 4 ? 3 : 1)));
            offsets.push_back(std::int64_t(kept.size()));
            for (index_t j = 0; j < m; ++j) {
                ids.push_back(kept[std::size_t(first + (5 * j + r) % count)]);
                log_mu.push_back(-2.0f - 0.5f * float(j)), log_q.push_back(-2.5f - 0.25f * float(r));
            }
            log_kept_q.push_back(-0.1f * float(r));
        }
        const auto cache = [&] {
            return teacher::on_kept_sets{teacher::samples{view(std::as_const(ids).data(), n, m),
                                                          view(std::as_const(log_mu).data(), n, m),
                                                          view(std::as_const(log_q).data(), n, m)},
                                         view(std::as_const(kept).data(), index_t(kept.size())), row_offsets<>(offsets),
                                         view(std::as_const(log_kept_q).data(), n)};
        };
        compare(s, cache(), cache(), mc{reverse_kl{}}, {.measure = {.entropy = true}});
        std::vector<std::uint8_t> mask(std::size_t(n), 1);
        mask[3] = 0, mask[6] = 0;
        compare(s, cache(), cache(), mc{forward_kl{}}, {.reduction = reduce::sum, .mask = mask});
        // a token outside its set, a set that does not ascend, one with an id that is none
        ids[std::size_t(2 * m + 1)] = std::int32_t(v - 1);
        std::swap(kept[std::size_t(offsets[1])], kept[std::size_t(offsets[1] + 1)]);
        kept[std::size_t(offsets[6] - 1)] = std::int32_t(v);
        const result r = compare(s, cache(), cache(), mc{reverse_kl{}}, {.mask = mask});
        CHECK(r.diagnostics.bad_rows == 3);
        CHECK(r.diagnostics.outside_kept == 1);
    }
}
