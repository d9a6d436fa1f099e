// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, sanitize, whole-compiler
// optimise: always
//
// Draws and filters on the CPU's lanes and on the GPU's rows run by a host loop (draw_types_test.cpp goes through the
// types): inclusion probabilities by enumeration, laws of keyed draws; that log mu has the bits of token_logp; rows
// without a law; what is refused.
#include "both_engines.hpp"
#include "draw_laws.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/sanitized.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <opd/draw.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

// The integral over the uniform, exactly: the designs' choices change at known borders only.
TEST_CASE("inclusion probabilities by enumeration, to 1e-12") {
    const index_t vocab = 7;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
        numbers u(seed);
        std::vector<double> z;
        for (index_t v = 0; v < vocab; ++v) z.push_back(u.uniform() < 0.1 ? -1e308 : 2 * u.normal());
        z[0] = 0; // some id has mass
        const filter f{.temperature = float(0.5 + u.uniform()), .top_k = seed % 3 == 0 ? 5 : 0};
        const index_t budget = 1 + u.below(4);
        on_both([&](auto& be, const char* engine) {
            INFO("seed " << seed << ", " << engine);
            const auto at = [&](double x, auto design) {
                outputs<double, double> out(1, design.columns());
                draw_keys<> keys;
                keys.uniforms = view(static_cast<const double*>(&x), 1, 1);
                draw(be, view(z.data(), 1, vocab), design, keys, out.to(), out.options(f));
                return out;
            };
            // borders by bisection over [lo, hi], where a design's first answer changes
            const auto inclusion = [&](auto design) {
                std::vector<double> p(std::size_t(vocab), 0.0), mean(std::size_t(vocab), 0.0);
                const auto walk = [&](auto& self, double lo, double hi) -> void {
                    const auto a = at(lo, design), b = at(hi, design);
                    if (a.ids == b.ids || hi - lo < 1e-15) {
                        bool same = a.ids == b.ids; // borders may hide between: look at some points
                        for (int i = 1; same && hi - lo > 1e-3 && i < 16; ++i)
                            same = at(lo + (hi - lo) * i / 16, design).ids == a.ids;
                        if (same || hi - lo < 1e-15) {
                            for (index_t j = 0; j < design.columns(); ++j)
                                if (const auto id = a.ids[std::size_t(j)]; id >= 0) {
                                    p[std::size_t(id)] += hi - lo;
                                    mean[std::size_t(id)] += (hi - lo) * a.weight[std::size_t(j)];
                                }
                            return;
                        }
                    }
                    const double middle = lo + (hi - lo) / 2;
                    self(self, lo, middle);
                    self(self, middle, hi);
                };
                walk(walk, 1e-15, 1 - 1e-15);
                return std::pair(p, mean);
            };
            const row_law l(z.data(), vocab, double(f.temperature));
            const auto n = std::size_t(at(0.5, design::iid{1}).kept[0]);
            const auto [p, unused] = inclusion(design::iid{1});
            const auto [q, mean] = inclusion(design::threshold{budget});
            double low = 0, high = 1e15;
            for (int i = 0; i < 200; ++i) {
                const double middle = (low + high) / 2;
                double sum = 0;
                for (std::size_t j = 0; j < n; ++j) sum += std::min(1.0, middle * l.mu[j] / l.mass(n));
                (sum < double(std::min<index_t>(budget, index_t(n))) - 1e-15 ? low : high) = middle;
            }
            for (std::size_t j = 0; j < l.ids.size(); ++j) {
                const auto id = std::size_t(l.ids[j]);
                const double mu = j < n ? l.mu[j] / l.mass(n) : 0;
                CHECK(std::abs(p[id] - mu) < 1e-12);
                CHECK(std::abs(mean[id] - mu) < 1e-12); // E[Σ w f(a)] = E_mu[f] for every f
                CHECK(std::abs(q[id] - (n <= std::size_t(budget) ? double(j < n) : std::min(1.0, high * mu))) < 1e-12);
            }
        });
    }
}

// Keyed draws follow their law: chi-squared over V = 3,000, ids of fewer than 5 expected hits pooled, within 5
// deviations.
TEST_CASE("keyed draws follow their law over 3,000 ids") {
    const index_t vocab = 3000, rows = 20000;
    numbers u(3);
    std::vector<float> z;
    for (index_t v = 0; v < vocab; ++v) z.push_back(float(2 * u.normal()));
    const keyed_rows keyed(rows);
    cpu_backend be{.threads = 2};
    for (const filter& f : {filter{.temperature = 1.3F}, filter{.top_k = 200, .top_p = 0.9F}}) {
        const row_law l(z.data(), vocab, double(f.temperature));
        const auto chi_squared = [&](const std::vector<std::int32_t>& ids, index_t draws, std::size_t kept) {
            std::map<std::int32_t, double> hits;
            for (index_t i = 0; i < draws; ++i) hits[ids[std::size_t(i)]] += 1;
            double chi2 = 0, seen_of_rest = double(draws), rest = double(draws);
            int cells = 0;
            for (std::size_t j = 0; j < kept; ++j) {
                const double want = l.mu[j] / l.mass(kept) * double(draws);
                if (want < 5) continue;
                const double seen = hits[std::int32_t(l.ids[j])];
                chi2 += (seen - want) * (seen - want) / want;
                ++cells;
                rest -= want, seen_of_rest -= seen;
            }
            if (rest > 5) chi2 += (seen_of_rest - rest) * (seen_of_rest - rest) / rest, ++cells;
            CHECK(chi2 < cells - 1 + 5 * std::sqrt(2.0 * (cells - 1)));
            CHECK(cells > 50);
        };
        std::vector<std::int32_t> tokens, samples;
        std::size_t kept = 0;
        const index_t block = 500;
        std::vector<float> many;
        for (index_t r = 0; r < block; ++r) many.insert(many.end(), z.begin(), z.end()); // one row, many keys
        for (index_t first = 0; first < rows; first += block) {
            outputs<> one(block, 1), four(block, 4);
            draw_keys<> keys{
                11, view(keyed.sample.data() + first, block), view(keyed.position.data() + first, block), {}};
            draw(be, view(many.data(), block, vocab), design::gumbel{}, keys, one.to(), one.options(f));
            draw(be, view(many.data(), block, vocab), design::iid{4}, keys, four.to(), four.options(f));
            tokens.insert(tokens.end(), one.ids.begin(), one.ids.end() - 1);
            samples.insert(samples.end(), four.ids.begin(), four.ids.end() - 1);
            kept = std::size_t(one.kept[0]);
        }
        chi_squared(tokens, rows, kept);
        chi_squared(samples, 4 * rows, kept);
    }
}

TEST_CASE("log mu has the bits of token_logp, whatever the batch, the threads and the rows beside") {
    const auto check = [](auto number, auto log_type) {
        using Z = decltype(number);
        using L = decltype(log_type);
        property(
            "bits",
            [] {
                const problem p = *problems(random_rows<Z>::options(6));
                const buffers<Z> b(p);
                const filter f{.temperature = p.temperature_p};
                const keyed_rows rows(p.rows);
                on_both([&](auto& be, const char*) {
                    const auto one = [&](auto design) {
                        const index_t m = design.columns();
                        outputs<L> out(p.rows, m);
                        draw(be, b.z_view(), design, rows.keys(p.rows), out.to(), out.options(f));
                        std::vector<L> scored(out.size(), L(9));
                        std::vector<double> lse(std::size_t(p.rows));
                        token_logp(be, b.z_view(), view(std::as_const(out.ids).data(), p.rows, m),
                                   view(scored.data(), p.rows, m), p.temperature_p, {}, view(lse.data(), p.rows));
                        for (std::size_t e = 0; e < std::size_t(p.rows * m); ++e)
                            if (out.ids[e] >= 0) RC_ASSERT(scored[e] == out.log_mu[e]);
                        for (index_t i = 0; i < p.rows; ++i) RC_ASSERT(lse[std::size_t(i)] == out.lse[std::size_t(i)]);
                        // to the sampled estimator, a teacher that says log mu is the student itself: no loss, ratio 1,
                        // gradient 0
                        if constexpr (std::is_same_v<decltype(design), design::iid>) {
                            std::vector<Z> dz(std::size_t(p.rows * p.vocab), buffers<Z>::template cast<Z>(9));
                            const auto ids = view(std::as_const(out.ids).data(), p.rows, m);
                            const auto log_mu = view(std::as_const(out.log_mu).data(), p.rows, m);
                            const auto e =
                                evaluate(be,
                                         student::logits<Z, Z>{.z = b.z_view(),
                                                               .dz = view(dz.data(), p.rows, p.vocab),
                                                               .temperature = p.temperature_p},
                                         teacher::samples<std::int32_t, L>{ids, log_mu, log_mu}, mc{reverse_kl{}});
                            RC_ASSERT(e.diagnostics.bad_rows == 0);
                            RC_ASSERT(e.loss == 0);
                            RC_ASSERT(e.diagnostics.ratio_max == 1);
                            for (const Z& g : dz) RC_ASSERT(double(element<Z>::load(g)) == 0);
                        }
                        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(be)>, cpu_backend>) {
                            cpu_backend alone{.threads = 1};
                            outputs<L> again(p.rows, m);
                            draw(alone, b.z_view(), design, rows.keys(p.rows), again.to(), again.options(f));
                            RC_ASSERT(again == out);
                        }
                        // row by row, in another order
                        for (index_t i = p.rows - 1; i >= 0; --i) {
                            outputs<L> alone(1, m);
                            draw_keys<> keys{7, view(rows.sample.data() + i, 1), view(rows.position.data() + i, 1), {}};
                            draw(be, view(b.z_view().row(i), 1, p.vocab), design, keys, alone.to(), alone.options(f));
                            for (index_t j = 0; j < m; ++j) {
                                RC_ASSERT(alone.ids[std::size_t(j)] == out.ids[std::size_t(i * m + j)]);
                                RC_ASSERT(alone.log_mu[std::size_t(j)] == out.log_mu[std::size_t(i * m + j)]);
                                RC_ASSERT(alone.weight[std::size_t(j)] == out.weight[std::size_t(i * m + j)]);
                            }
                        }
                    };
                    one(design::iid{5});
                    one(design::threshold{9});
                    if constexpr (std::is_same_v<Z, float>) { // of all types: draw_types_test.cpp
                        one(design::greedy{});
                        one(design::gumbel{});
                        one(design::head_tail{3, 4});
                        one(design::gumbel_top{6});
                    }
                });
            },
            {.cases = 30});
    };
    check(float{}, float{});
    check(bfloat16{}, float{});
#if !OPD_TEST_SANITIZED
    check(half{}, float{});
    check(double{}, double{});
#endif
}

TEST_CASE("keyed draws are those of the row's own stream") {
    const index_t n = 3, vocab = 1500;
    numbers u(4);
    std::vector<float> z;
    for (index_t i = 0; i < n * vocab; ++i) z.push_back(float(2 * u.normal()));
    const auto logits = view(std::as_const(z).data(), n, vocab);
    const keyed_rows rows(n, 1000);
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        const auto check = [&](auto design, noise_stream stream, index_t uniforms, index_t first) {
            std::vector<double> given;
            for (std::size_t r = 0; r < std::size_t(n); ++r)
                for (index_t j = 0; j < uniforms; ++j)
                    given.push_back(keyed_uniform(noise_row(7, stream, rows.sample[r], rows.position[r]),
                                                  static_cast<std::uint32_t>(first + j)));
            draw_keys<> keys;
            keys.uniforms = view(std::as_const(given).data(), n, uniforms);
            outputs<> keyed(n, design.columns()), by_hand(n, design.columns());
            draw(be, logits, design, rows.keys(n), keyed.to(), keyed.options({}));
            draw(be, logits, design, keys, by_hand.to(), by_hand.options({}));
            CHECK(keyed == by_hand);
        };
        check(design::iid{20}, noise_stream::mc, 20, 0);
        check(design::iid{.m = 20, .first = 6}, noise_stream::mc, 20, 6);
        check(design::threshold{20}, noise_stream::tail, 1, 0);
        check(design::head_tail{5, 20}, noise_stream::tail, 20, 0);
    });
}

TEST_CASE("a uniform outside (0, 1) makes its row bad where no check could read it before") {
    const float nan = std::bit_cast<float>(0x7fc00000u);
    const std::vector<float> z(3 * 70, 1.F);
    for (const double x : {double(nan), 0.0, 1.0, -0.5}) {
        std::vector<double> uniforms(9, 0.5);
        uniforms[4] = x; // row 1
        draw_keys<> keys;
        keys.uniforms = view(std::as_const(uniforms).data(), 3, 3);
        on_both([&](auto& be, const char* engine) {
            INFO(engine);
            outputs<> out(3, 3);
            const auto r = be.for_rows(draw_job<float, design::iid, std::int32_t, float, float, space::host>{
                view(z.data(), 3, 70), {3}, keys, out.to(), out.options({})});
            CHECK(r.diagnostics.bad_rows == 1);
            CHECK(r.diagnostics.first_bad_row == 1);
            for (std::size_t j = 0; j < 9; ++j) CHECK(out.ids[j] == (j / 3 == 1 ? -1 : 35));
        });
    }
}

TEST_CASE("columns of one i.i.d. sample may be drawn in several calls") {
    numbers u(1);
    std::vector<float> z(500);
    for (float& x : z) x = float(u.normal());
    const keyed_rows rows(1);
    cpu_backend be;
    outputs<> whole(1, 6), left(1, 2), right(1, 4);
    draw(be, view(z.data(), 1, 500), design::iid{6}, rows.keys(1), whole.to());
    draw(be, view(z.data(), 1, 500), design::iid{.m = 2}, rows.keys(1), left.to());
    draw(be, view(z.data(), 1, 500), design::iid{.m = 4, .first = 2}, rows.keys(1), right.to());
    for (std::size_t j = 0; j < 6; ++j) CHECK(whole.ids[j] == (j < 2 ? left.ids[j] : right.ids[j - 2]));
}

TEST_CASE("every combination of filters on one row") {
    const index_t vocab = 2500;
    numbers u(8);
    std::vector<float> z;
    for (index_t v = 0; v < vocab; ++v) z.push_back(float(2 * u.normal()));
    const keyed_rows rows(1);
    on_both([&](auto& be, const char* engine) {
        for (const index_t k : {0, 3, 50, 500, 2500})
            for (const float p : {1.F, 0.9F, 0.3F})
                for (const float least : {0.F, 0.01F, 0.5F}) {
                    const filter f{.temperature = 1.2F, .top_k = k, .top_p = p, .min_p = least};
                    CAPTURE(engine);
                    CAPTURE(k);
                    CAPTURE(p);
                    CAPTURE(least);
                    const row_law l(z.data(), vocab, double(f.temperature));
                    outputs<> out(1, 40);
                    draw(be, view(z.data(), 1, vocab), design::iid{40}, rows.keys(1), out.to(), out.options(f));
                    const auto n = std::size_t(out.kept[0]);
                    CHECK(l.keeps(f, n, 1e-5));
                    CHECK(std::abs(out.log_kept[0] - std::log(l.mass(n))) < 1e-5);
                    for (std::size_t j = 0; j < 40; ++j) {
                        const auto at = std::size_t(std::find(l.ids.begin(), l.ids.end(), out.ids[j]) - l.ids.begin());
                        CHECK(at < n);
                        CHECK(std::abs(double(out.log_mu[j]) - std::log(l.mu[at] / l.mass(n))) < 1e-5);
                    }
                }
    });
}

TEST_CASE("tokens that tie in their score go to the lower id; of two cuts at a logit the lower id is tighter") {
    std::vector<float> z(3000, 1e25F); // absorbs all noise
    std::fill_n(z.begin(), 4, 0.F);    // so that the lowest of those that tie is not the first thread's
    const keyed_rows rows(1);
    on_both([&](auto& be, const char*) {
        outputs<> out(1, 1);
        draw(be, view(z.data(), 1, 3000), design::gumbel{}, rows.keys(1), out.to());
        CHECK(out.ids[0] == 4);
    });
    CHECK(filter_cut::tighter({1, 2}, {1, 5}).id == 2);
    CHECK(filter_cut::tighter({1, 5}, {1, 2}).id == 2);
    CHECK(filter_cut::tighter({2, 5}, {1, 2}).z == 2);
}

TEST_CASE("ties in top-p are cut at the lower ids, whatever the sums round to") {
    std::vector<float> z(2048, 1.F);
    on_both([&](auto& be, const char*) {
        for (const index_t n : {4, 100, 1024, 2048}) {
            outputs<> out(1, 1);
            draw(be, view(z.data(), 1, n), design::greedy{}, {}, out.to(), out.options({.top_p = 0.5F}));
            CHECK(out.kept[0] == n / 2);
            draw(be, view(z.data(), 1, n), design::greedy{}, {}, out.to(), out.options({.top_k = 3}));
            CHECK(out.kept[0] == 3);
            CHECK(out.cut[0].keeps(1, 2));
            CHECK(!out.cut[0].keeps(1, 3));
            draw(be, view(z.data(), 1, n), design::greedy{}, {}, out.to(), out.options({.min_p = 1}));
            CHECK(out.kept[0] == n);
        }
    });
}

TEST_CASE("rows without a law are counted and blank, masked rows untouched") {
    const index_t vocab = 1500;
    const float nan = std::bit_cast<float>(0x7fc00000u), inf = std::bit_cast<float>(0x7f800000u);
    numbers u(1);
    std::vector<float> z;
    for (index_t i = 0; i < 6 * vocab; ++i) z.push_back(float(u.normal()));
    z[std::size_t(1 * vocab + 1200)] = nan;
    z[std::size_t(2 * vocab + 3)] = inf;
    std::fill_n(z.begin() + 3 * vocab, vocab, -inf);
    std::fill_n(z.begin() + 4 * vocab, vocab, -inf), z[std::size_t(4 * vocab + 1400)] = -5; // one id alone
    const std::vector<std::uint8_t> mask{1, 1, 1, 1, 1, 0};
    const keyed_rows rows(6);
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        const auto check = [&](auto design, const filter& f) {
            const auto m = std::size_t(design.columns());
            outputs<> out(6, index_t(m));
            const auto r = draw(be, view(z.data(), 6, vocab), design, rows.keys(6), out.to(), out.options(f, mask));
            CHECK(r.diagnostics.rows == 6);
            CHECK(r.diagnostics.kept == 5);
            CHECK(r.diagnostics.bad_rows == 3);
            CHECK(r.diagnostics.first_bad_row == 1);
            CHECK(out.ids[0] >= 0);
            for (const std::size_t bad : {1u, 2u, 3u}) {
                for (std::size_t j = 0; j < m; ++j) {
                    CHECK(out.ids[bad * m + j] == -1);
                    CHECK(out.weight[bad * m + j] == 0);
                    CHECK(out.log_mu[bad * m + j] == 0);
                    CHECK(out.exact[bad * m + j] == 0);
                }
                CHECK(out.kept[bad] == 0);
                CHECK(out.log_kept[bad] == 0);
                CHECK(!out.cut[bad].keeps(1e30, 0));
            }
            CHECK(out.ids[4 * m] == 1400);
            CHECK(out.log_mu[4 * m] == 0);
            CHECK(out.kept[4] == 1);
            CHECK(out.ids[5 * m] == -9);
            CHECK(out.log_mu[5 * m] == 9);
            CHECK(out.weight[5 * m] == 9);
            CHECK(out.exact[5 * m] == 9);
            CHECK(out.kept[5] == -9);
        };
        for (const filter& f : {filter{}, filter{.top_k = 7}, filter{.top_p = 0.5F}, filter{.min_p = 0.1F}}) {
            check(design::greedy{}, f);
            check(design::gumbel{}, f);
            check(design::iid{3}, f);
            check(design::threshold{3}, f);
            check(design::head_tail{2, 3}, f);
            check(design::head_tail{0, 2}, f);
            check(design::gumbel_top{3}, f);
        }
    });
}

TEST_CASE("an arena of the bytes that are asked for is enough, and one of less is refused") {
    const index_t n = 3, vocab = 5000, k = 40;
    numbers u(2);
    std::vector<float> z;
    for (index_t i = 0; i < n * vocab; ++i) z.push_back(float(3 * u.normal()));
    const keyed_rows rows(n);
    const auto logits = view(std::as_const(z).data(), n, vocab);
    const auto check = [](std::size_t bytes, auto call) {
        std::vector<std::byte> memory(bytes);
        cpu_backend be{.threads = 2, .arena = memory};
        call(be);
        cpu_backend less{.threads = 2, .arena = std::span(memory).first(bytes - 128)};
        CHECK_THROWS_WITH_AS(call(less), doctest::Contains("workspace"), invalid_input);
    };
    const cpu_backend plan{.threads = 2};
    for (const filter& f :
         {filter{}, filter{.top_k = 50}, filter{.top_p = 0.9F}, filter{.top_k = 300, .top_p = 0.9F}}) {
        const auto draws = [&](auto design) {
            outputs<> out(n, design.columns());
            check(draw_workspace_bytes(plan, logits, design, {.filter = f}),
                  [&](auto& be) { draw(be, logits, design, rows.keys(n), out.to(), out.options(f)); });
        };
        draws(design::greedy{});
        draws(design::gumbel{});
        draws(design::iid{k});
        draws(design::threshold{k});
        draws(design::head_tail{k, 3});
        draws(design::gumbel_top{k});
    }
    std::vector<std::int32_t> top(std::size_t(n * k));
    std::vector<float> top_log_p(top.size()), tail(3);
    const scores<> what{.ids = view(std::as_const(top).data(), n, k), .log_tail = view(tail.data(), n)};
    check(score_workspace_bytes(plan, logits, what), [&](auto& be) { score(be, logits, what); });
    const scores<> best{.top_ids = view(top.data(), n, k), .top_log_p = view(top_log_p.data(), n, k)};
    check(score_workspace_bytes(plan, logits, best), [&](auto& be) { score(be, logits, best); });
}

TEST_CASE("no rows, or none kept") {
    on_both([&](auto& be, const char*) {
        outputs<> out(0, 1);
        const float z = 0;
        CHECK(draw(be, view(&z, 0, 10), design::greedy{}, {}, out.to()).diagnostics.rows == 0);
        outputs<> one(1, 1);
        const std::vector<std::uint8_t> none{0};
        const std::vector<float> row(10, 1.F);
        CHECK(
            draw(be, view(row.data(), 1, 10), design::greedy{}, {}, one.to(), one.options({}, none)).diagnostics.kept ==
            0);
        CHECK(one.ids[0] == -9);
    });
}

TEST_CASE("what draw and kept_ids refuse") {
    std::vector<float> z(20, 1.F);
    const auto row = view(std::as_const(z).data(), 2, 10);
    const keyed_rows rows(2);
    outputs<> out(2, 3);
    cpu_backend be;
    const auto refuses = [&](const char* what, auto call) {
        CHECK_THROWS_WITH_AS(call(), doctest::Contains(what), invalid_input);
        CHECK(out.ids == outputs<>(2, 3).ids);
    };
    const float nan = std::bit_cast<float>(0x7fc00000u);
    const auto with = [&](const filter& f) {
        return [&, f] { draw(be, row, design::iid{3}, rows.keys(2), out.to(), out.options(f)); };
    };
    for (const float t : {0.F, -1.F, nan, 1e-38F, 1e30F}) refuses("filter.temperature", with({.temperature = t}));
    for (const float x : {0.F, -1.F, nan, 1.5F}) refuses("filter.top_p", with({.top_p = x}));
    for (const float x : {-0.5F, nan, 1.5F}) refuses("filter.min_p", with({.min_p = x}));
    refuses("filter.top_k", with({.top_k = -1}));
    refuses("design.m", [&] { draw(be, row, design::iid{0}, rows.keys(2), out.to()); });
    refuses("design.budget", [&] { draw(be, row, design::threshold{0}, rows.keys(2), out.to()); });
    refuses("design.m", [&] { draw(be, row, design::gumbel_top{0}, rows.keys(2), out.to()); });
    refuses("design.m", [&] { draw(be, row, design::head_tail{3, 0}, rows.keys(2), out.to()); });
    refuses("design.h", [&] { draw(be, row, design::head_tail{-1, 4}, rows.keys(2), out.to()); });
    refuses("options.log_tail", [&] {
        auto o = out.options({});
        o.log_tail = o.log_kept;
        draw(be, row, design::iid{3}, rows.keys(2), out.to(), o);
    });
    refuses("options.kappa", [&] {
        auto o = out.options({});
        o.kappa = o.log_kept;
        draw(be, row, design::threshold{3}, rows.keys(2), out.to(), o);
    });
    refuses("overlaps", [&] {
        auto o = out.options({});
        o.log_tail = o.log_kept;
        draw(be, row, design::threshold{3}, rows.keys(2), out.to(), o);
    });
    refuses("overlaps", [&] {
        auto o = out.options({});
        o.kappa = o.log_kept;
        draw(be, row, design::gumbel_top{3}, rows.keys(2), out.to(), o);
    });
    refuses("design.first", [&] { draw(be, row, design::iid{3, -1}, rows.keys(2), out.to()); });
    refuses("out.ids", [&] { draw(be, row, design::iid{4}, rows.keys(2), out.to()); });
    refuses("keys.sample", [&] { draw(be, row, design::iid{3}, {}, out.to()); });
    refuses("keys.sample", [&] { draw(be, row, design::iid{3}, rows.keys(1), out.to()); });
    refuses("keys.position",
            [&] { draw(be, row, design::iid{3}, {.seed = 1, .sample = view(rows.sample.data(), 2)}, out.to()); });
    refuses("z: has no columns", [&] { draw(be, view(z.data(), 2, 0), design::iid{3}, rows.keys(2), out.to()); });
    refuses("overlaps", [&] {
        auto o = out.options({});
        o.lse = o.log_kept;
        draw(be, row, design::iid{3}, rows.keys(2), out.to(), o);
    });
    const double inf = std::bit_cast<double>(0x7ff0000000000000ull);
    for (const double x : {double(nan), -1.0, 0.0, 1.0, 2.0, inf, -inf}) {
        std::vector<double> uniforms(6, 0.5);
        uniforms[4] = x;
        draw_keys<> keys;
        keys.uniforms = view(std::as_const(uniforms).data(), 2, 3);
        refuses("keys.uniforms: row 1, draw 1", [&] { draw(be, row, design::iid{3}, keys, out.to()); });
    }
    std::vector<double> uniforms(6, 0.5);
    draw_keys<> keys;
    keys.uniforms = view(std::as_const(uniforms).data(), 2, 3);
    refuses("keys.uniforms", [&] { draw(be, row, design::threshold{3}, keys, out.to()); });
    outputs<> one(2, 1);
    CHECK_THROWS_WITH_AS(draw(be, row, design::gumbel{}, keys, one.to()), doctest::Contains("keys.uniforms"),
                         invalid_input);

    const std::vector<filter_cut> cuts(2);
    std::vector<std::int32_t> ids(20, -9);
    const auto kept = [&](std::vector<index_t> offsets, index_t room) {
        return kept_ids(be, row, view(cuts.data(), 2), row_offsets<>(offsets), view(ids.data(), room));
    };
    CHECK_THROWS_WITH_AS(kept({0, 10, 21}, 20), doctest::Contains("offsets, row 1"), invalid_input);
    CHECK_THROWS_WITH_AS(kept({5, 1, 20}, 20), doctest::Contains("offsets, row 0"), invalid_input);
    CHECK_THROWS_WITH_AS(kept({0, 10}, 20), doctest::Contains("offsets"), invalid_input);
    CHECK(ids[0] == -9);
    CHECK(kept({0, 9, 19}, 20).diagnostics.bad_rows == 1); // one id too many for its room
    CHECK(ids[0] == -1);
    CHECK(ids[9] == 0);
    CHECK(ids[18] == 9);
    CHECK(ids[19] == -9);
}
