// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: no
//
// Sequences to rows and back: offsets, packed columns, kept rows, zipped columns, entries of a cache; the parts of a
// batch add up to it under every reduction, with masks, weights, versions and what is frozen; what is refused.
#include "support/generators.hpp"
#include "support/property.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <numeric>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/ranges.hpp>

using namespace opd;
using namespace opd::test;

namespace {

struct answer {
    std::vector<std::int32_t> tokens;
    std::vector<float> log_mu;
};

} // namespace

TEST_CASE("sequences become rows") {
    const std::vector<answer> answers{{{3, 1, 4}, {-1, -2, -3}}, {{}, {}}, {{1, 5}, {-4, -5}}};
    const auto offsets =
        offsets_of(answers | ::ranges::views::transform([](const answer& a) { return a.tokens.size(); }));
    CHECK(offsets == std::vector<std::int64_t>{0, 3, 3, 5});
    const auto ids = packed(
                         answers, [](const answer& a) -> const auto& { return a.tokens; }) |
                     ::ranges::to<std::vector>();
    const auto log_mu = packed(
                            answers, [](const answer& a) -> const auto& { return a.log_mu; }) |
                        ::ranges::to<std::vector>();
    CHECK(ids == std::vector<std::int32_t>{3, 1, 4, 1, 5});
    CHECK(log_mu == std::vector<float>{-1, -2, -3, -4, -5});
    CHECK(offsets_of(std::vector<int>{}) == std::vector<std::int64_t>{0});

    double sum = 0;
    for (const auto& [id, lp] : columns(view(ids.data(), 5), view(log_mu.data(), 5))) sum += id * double(lp);
    CHECK(sum == -3 - 2 - 12 - 4 - 25);
    std::vector<int> written(5);
    for (auto&& [to, id] : columns(view(written.data(), 5), view(ids.data(), 5))) to = 2 * id;
    CHECK(written == std::vector<int>{6, 2, 8, 2, 10});
    CHECK_THROWS_WITH_AS(columns(view(written.data(), 5), view(ids.data(), 4)), doctest::Contains("columns"),
                         invalid_input);

    const std::vector<std::uint8_t> mask{1, 0, 0, 1, 1};
    CHECK((kept_rows(mask, 5) | ::ranges::to<std::vector>()) == std::vector<index_t>{0, 3, 4});
    CHECK((kept_rows({}, 2) | ::ranges::to<std::vector>()) == std::vector<index_t>{0, 1});
}

TEST_CASE("a response's column goes behind its prompt, and rows become sequences again") {
    struct sampled {
        std::vector<std::int32_t> tokens; // prompt, then response
        std::vector<float> log_mu;        // of the response
    };
    const std::vector<sampled> batch{{{3, 1, 4, 1}, {-1}}, {{5, 9, 2}, {-2, -3}}, {{6, 5}, {-4}}};
    const auto prompt = [](const sampled& s) { return index_t(s.tokens.size() - s.log_mu.size()) - 1; };
    const auto log_mu = packed(batch, [&](const sampled& s) { return behind_prompt(prompt(s), 9, s.log_mu); }) |
                        ::ranges::to<std::vector>();
    CHECK(log_mu == std::vector<float>{9, 9, -1, -2, -3, -4});
    const std::vector<std::int64_t> offsets{0, 3, 5, 5, 6};
    std::vector<std::vector<float>> parts;
    for (const auto part : unpacked(log_mu, offsets)) parts.emplace_back(part.begin(), part.end());
    CHECK(parts == std::vector<std::vector<float>>{{9, 9, -1}, {-2, -3}, {}, {-4}});

    std::vector<int> two{0, 1, 2, 3, 4, 5}; // (3,2), to be written
    const std::vector<std::int32_t> cut{0, 1, 3};
    for (const auto part : unpacked(std::span(two), cut, 2)) part[0] = -int(part.size());
    CHECK(two == std::vector<int>{-2, 1, -4, 3, 4, 5});
    CHECK(::ranges::distance(unpacked(std::vector<float>{}, {})) == 0);
    const auto refused = [&](std::vector<std::int32_t> at, index_t width, const char* what) {
        CHECK_THROWS_WITH_AS(unpacked(std::span(two), at, width), doctest::Contains(what), invalid_input);
    };
    refused({0, 1, 2}, 2, "column: has 6 numbers for 2 rows of 2");
    refused({0, 1, 4}, 2, "column: has 6 numbers for 4 rows of 2");
    refused({0, 1, -3}, -2, "offsets, row 2: must ascend");
    refused({0, 3}, -2, "column");
    refused({0, 4, 3}, 2, "offsets, row 2: must ascend from 0");
    refused({1, 3}, 2, "offsets, row 0: must ascend from 0");
}

TEST_CASE("entries of a cache: the used slots of a row") {
    const std::vector<std::int32_t> ids{4, -1, 2, 7, 8, -1};
    const std::vector<float> log_q{-1, -9, -2, -3, -4, -9};
    const teacher::support cache{view(ids.data(), 2, 3), view(log_q.data(), 2, 3)};
    std::vector<index_t> seen;
    double sum = 0;
    for (const cache_entry& e : entries(cache, 0)) seen.push_back(10 * e.slot + e.id), sum += e.log_q;
    CHECK(seen == std::vector<index_t>{4, 22});
    CHECK(sum == -3);
    CHECK(::ranges::distance(entries(cache, 1)) == 2);
}

TEST_CASE("the parts of a batch add up to it") {
    property("micro-batches", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t n = 1 + u.below(30), v = 7;
        std::vector<double> z, lq, keep_weight;
        std::vector<float> weights, losses(std::size_t(n), 9.F), part_losses(std::size_t(n), 9.F);
        std::vector<std::int32_t> versions, ids;
        std::vector<std::uint8_t> keep;
        for (index_t i = 0; i < n * v; ++i) z.push_back(u.normal());
        for (index_t r = 0; r < n; ++r) {
            ids.push_back(std::int32_t(u.below(v))), lq.push_back(-3 * u.uniform());
            weights.push_back(float(u.normal())), keep.push_back(u.uniform() < 0.8);
            versions.push_back(std::int32_t(u.below(5))), keep_weight.push_back(u.uniform());
        }
        const auto mask = random_mask(n, u, 0.7);
        const auto offsets = random_offsets(n, u, 6);
        const std::vector<double> log_mu(std::size_t(n), -1.5);
        const teacher::samples<std::int32_t, double> cache{
            view(std::as_const(ids).data(), n, 1), view(log_mu.data(), n, 1), view(std::as_const(lq).data(), n, 1)};
        cpu_backend be;
        for (const reduce how :
             {reduce::sum, reduce::token_mean, reduce::sequence_mean, reduce::sequence_sum_mean, reduce::constant}) {
            env whole;
            whole.reduction = how, whole.mask = mask, whole.weights = weights, whole.offsets = offsets;
            whole.versions = view(std::as_const(versions).data(), n), whole.version = 6;
            whole.losses = view(losses.data(), n);
            whole.frozen.keep = view(std::as_const(keep).data(), n, 1);
            whole.frozen.weight = view(std::as_const(keep_weight).data(), n, 1);
            if (how == reduce::constant) whole.normaliser = 11;
            std::vector<double> dz(z.size(), 9), parts(z.size(), 9);
            const auto run = [&](const micro_batch& p, std::vector<double>& to) {
                auto some = cache;
                some.ids = p.of(cache.ids), some.log_mu = p.of(cache.log_mu), some.log_q = p.of(cache.log_q);
                return evaluate(be,
                                student::logits<double>{.z = p.of(view(std::as_const(z).data(), n, v)),
                                                        .dz = p.of(view(to.data(), n, v))},
                                some, mc{reverse_kl{}}, p.env);
            };
            const result all = run({0, n, whole, {}}, dz);
            env in_parts = whole;
            in_parts.losses = view(part_losses.data(), n);
            const index_t most = 1 + u.below(n);
            double loss = 0;
            index_t rows = 0;
            diagnostics seen;
            for (const micro_batch& p : micro_batches(in_parts, n, most)) {
                RC_ASSERT(p.first == rows);
                const bool by_sequence = how == reduce::sequence_mean || how == reduce::sequence_sum_mean;
                RC_ASSERT(p.rows >= 1);
                index_t longest = 0; // more rows than asked for: one sequence that is as long
                for (std::size_t s = 1; s < p.offsets.size(); ++s)
                    longest = std::max<index_t>(longest, p.offsets[s] - p.offsets[s - 1]);
                RC_ASSERT(p.rows <= most || (by_sequence && p.rows == longest));
                const result r = run(p, parts);
                loss += r.loss, rows += p.rows, seen.merge(r.diagnostics);
            }
            RC_ASSERT(rows == n);
            RC_ASSERT(std::abs(loss - all.loss) < 1e-12 * (1 + std::abs(all.loss)));
            for (std::size_t i = 0; i < dz.size(); ++i)
                RC_ASSERT(std::abs(dz[i] - parts[i]) < 1e-13 * (1 + std::abs(dz[i])));
            RC_ASSERT(losses == part_losses);
            RC_ASSERT(seen.kept == all.diagnostics.kept);
            RC_ASSERT(seen.dropped == all.diagnostics.dropped);
            RC_ASSERT(seen.staleness_max == all.diagnostics.staleness_max);
        }
    });
}

TEST_CASE("a part of padded rows is padded") {
    const index_t n = 4, v = 3, stride = 4;
    std::vector<double> z(std::size_t(n * stride)), y(z.size()), dz(z.size(), 9);
    numbers u(3);
    for (std::size_t i = 0; i < z.size(); ++i) z[i] = u.normal(), y[i] = u.normal();
    cpu_backend be;
    for (const bool in_place : {false, true}) {
        const auto to = padded_view(in_place ? z.data() : dz.data(), n, v, stride);
        for (const micro_batch& p : micro_batches({}, n, 3))
            evaluate(be,
                     student::logits<double>{.z = p.of(view(std::as_const(z).data(), n, v, stride)), .dz = p.of(to)},
                     teacher::dense{p.of(view(std::as_const(y).data(), n, v, stride))}, reverse_kl{}, p.env);
        for (index_t r = 0; r < n; ++r) CHECK(to(r, v) == 0);
    }
}

TEST_CASE("no rows, and what is refused") {
    CHECK(micro_batches({}, 0, 5).empty());
    CHECK_THROWS_WITH_AS(micro_batches({}, 3, 0), doctest::Contains("most"), invalid_input);
    const std::vector<std::uint8_t> mask(2, 1);
    env e;
    e.mask = mask;
    CHECK_THROWS_WITH_AS(micro_batches(e, 3, 1), doctest::Contains("env.mask"), invalid_input);
    e = {};
    e.reduction = reduce::sequence_mean;
    CHECK_THROWS_WITH_AS(micro_batches(e, 3, 1), doctest::Contains("env.offsets"), invalid_input);
    const std::vector<std::int32_t> one{0, 3}; // a sequence longer than a part stays whole
    e.offsets = one;
    CHECK(micro_batches(e, 3, 1).size() == 1);
}
