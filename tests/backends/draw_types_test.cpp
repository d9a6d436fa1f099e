// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, whole-compiler, whole-sanitize
//
// Draws and filters of every type of logits, against float64, on the CPU's lanes and on the GPU's rows run by a host
// loop: what a filter keeps, which token Gumbel-max takes, where an i.i.d. draw lands, what threshold includes and with
// what weight.
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

namespace {

template <class Z>
void check_kept_sets(const std::string& type) {
    property("what a filter keeps, " + type, [] {
        random_rows<Z> rr(3);
        auto& [p, u, b, f] = rr;
        on_both([&](auto& be, const char*) {
            outputs<double> out(p.rows, 1);
            const auto r = draw(be, b.z_view(), design::greedy{}, {}, out.to(), out.options(f));
            RC_ASSERT(r.diagnostics.bad_rows == 0);
            const auto offsets = offsets_for({out.kept.begin(), out.kept.begin() + p.rows});
            std::vector<std::int64_t> ids(std::size_t(offsets.back()) + 1, -7);
            const auto k = kept_ids(be, b.z_view(), view(out.cut.data(), p.rows), row_offsets<>(offsets),
                                    view(ids.data(), offsets.back()));
            RC_ASSERT(k.diagnostics.bad_rows == 0);
            RC_ASSERT(ids.back() == -7);
            for (index_t i = 0; i < p.rows; ++i) {
                const row_law l(b.z_view().row(i), p.vocab, double(p.temperature_p));
                const auto n = std::size_t(out.kept[std::size_t(i)]);
                RC_ASSERT(l.keeps(f, n, eps_of<Z>()));
                std::vector<std::int64_t> want(l.ids.begin(), l.ids.begin() + std::ptrdiff_t(n));
                std::sort(want.begin(), want.end());
                const auto first = ids.begin() + std::ptrdiff_t(offsets[std::size_t(i)]);
                RC_ASSERT(std::vector<std::int64_t>(first, first + std::ptrdiff_t(n)) == want);
                const double log_kept = std::log(l.mass(n));
                RC_ASSERT(std::abs(out.log_kept[std::size_t(i)] - log_kept) < eps_of<Z>());
                RC_ASSERT(out.ids[std::size_t(i)] == l.ids[0]);
                const double log_mu =
                    std::log(l.mu[0]) - log_kept; // of the most probable: near 0 where it has nearly all
                RC_ASSERT(std::abs(out.log_mu[std::size_t(i)] - log_mu) < eps_of<Z>() * std::max(1.0, std::abs(l.lse)));
            }
        });
    });
}

template <class Z>
void check_gumbel(const std::string& type) {
    property("the Gumbel-max token, " + type, [] {
        random_rows<Z> rr(3);
        auto& [p, u, b, f] = rr;
        const keyed_rows rows(p.rows, std::uint64_t(u.below(1000000)));
        on_both([&](auto& be, const char*) {
            outputs<double> out(p.rows, 1);
            draw(be, b.z_view(), design::gumbel{}, rows.keys(p.rows), out.to(), out.options(f));
            for (index_t i = 0; i < p.rows; ++i) {
                const noise_row noise(7, noise_stream::rollout, rows.sample[std::size_t(i)],
                                      rows.position[std::size_t(i)]);
                const filter_cut cut = out.cut[std::size_t(i)];
                index_t winner = -1;
                double best = 0;
                for (index_t v = 0; v < p.vocab; ++v) {
                    const double z = detail::logit_within(b.z_view()(i, v));
                    if (!cut.keeps(z, v)) continue;
                    const double score =
                        gumbel_score(detail::times(z, 1 / double(p.temperature_p)), noise.bits(0, std::uint32_t(v)));
                    if (winner < 0 || score > best) winner = v, best = score;
                }
                RC_ASSERT(out.ids[std::size_t(i)] == winner);
                RC_ASSERT(out.weight[std::size_t(i)] == 1.0F);
            }
        });
    });
}

template <class Z>
void check_iid(const std::string& type) {
    property("where an i.i.d. draw lands, " + type, [] {
        random_rows<Z> rr(2);
        auto& [p, u, b, f] = rr;
        const index_t m = 1 + u.below(40);
        const double eps = eps_of<Z>();
        on_both([&](auto& be, const char*) {
            outputs<double> out(p.rows, m);
            std::vector<double> uniforms(std::size_t(p.rows * m));
            // half at random, the others just beside borders between ids
            std::vector<row_law> laws;
            draw(be, b.z_view(), design::greedy{}, {}, outputs<double>(p.rows, 1).to(), out.options(f));
            for (index_t i = 0; i < p.rows; ++i) {
                laws.emplace_back(b.z_view().row(i), p.vocab, double(p.temperature_p));
                const index_t n = out.kept[std::size_t(i)];
                const auto c = cumulative_of(laws.back(), kept_of(laws.back(), n, p.vocab), p.vocab,
                                             laws.back().mass(std::size_t(n)));
                for (index_t j = 0; j < m; ++j) {
                    double& x = uniforms[std::size_t(i * m + j)];
                    x = u.uniform();
                    if (j % 2 == 1) x = c[std::size_t(u.below(p.vocab))] + (j % 4 == 1 ? 2 : -2) * eps;
                    x = std::min(std::max(x, 1e-9), 1 - 1e-9);
                }
            }
            draw_keys<> keys;
            keys.uniforms = view(std::as_const(uniforms).data(), p.rows, m);
            draw(be, b.z_view(), design::iid{m}, keys, out.to(), out.options(f));
            for (index_t i = 0; i < p.rows; ++i) {
                const row_law& l = laws[std::size_t(i)];
                const auto n = std::size_t(out.kept[std::size_t(i)]);
                std::vector<double> mu;
                const auto c = cumulative_of(l, kept_of(l, index_t(n), p.vocab), p.vocab, l.mass(n), &mu);
                for (index_t j = 0; j < m; ++j) {
                    const auto e = std::size_t(i * m + j);
                    const auto id = std::size_t(out.ids[e]);
                    RC_ASSERT(out.ids[e] >= 0);
                    RC_ASSERT(mu[id] > 0);
                    RC_ASSERT(uniforms[e] < c[id] + eps);
                    RC_ASSERT(uniforms[e] > (id > 0 ? c[id - 1] : 0) - eps);
                    RC_ASSERT(std::abs(out.log_mu[e] - std::log(mu[id])) < eps * std::max(1.0, std::abs(l.lse)));
                    RC_ASSERT(out.weight[e] == float(1 / double(m)));
                }
            }
        });
    });
}

template <class Z>
void check_threshold(const std::string& type) {
    property("what threshold includes, " + type, [] {
        random_rows<Z> rr(2);
        auto& [p, u, b, f] = rr;
        const index_t budget = 1 + u.below(u.uniform() < 0.3 ? 400 : 20);
        const double eps = eps_of<Z>();
        on_both([&](auto& be, const char*) {
            outputs<double, double> out(p.rows, budget);
            std::vector<double> uniforms;
            for (index_t i = 0; i < p.rows; ++i) uniforms.push_back(u.uniform());
            draw_keys<> keys;
            keys.uniforms = view(std::as_const(uniforms).data(), p.rows, 1);
            draw(be, b.z_view(), design::threshold{budget}, keys, out.to(), out.options(f));
            for (index_t i = 0; i < p.rows; ++i) {
                const row_law l(b.z_view().row(i), p.vocab, double(p.temperature_p));
                const auto n = std::size_t(out.kept[std::size_t(i)]);
                std::vector<double> mu;
                cumulative_of(l, kept_of(l, index_t(n), p.vocab), p.vocab, l.mass(n), &mu);
                // kappa: Σ min(1, kappa mu) = B, by taking certain ids one by one
                std::size_t certain = 0;
                const auto mu_at = [&](std::size_t j) { return mu[std::size_t(l.ids[j])]; };
                std::vector<double> from(n + 1, 0); // mass from the j-th best on
                for (std::size_t j = n; j-- > 0;) from[j] = from[j + 1] + mu_at(j);
                while (certain < n && certain < std::size_t(budget) &&
                       mu_at(certain) * double(budget - index_t(certain)) >= from[certain])
                    ++certain;
                // weights below the number type's least are none: ids near it may or may not have mass
                constexpr double none = sizeof(arithmetic_t<Z>) == 8 ? 1e-305 : 1e-33;
                const auto with_mass = [&](double least) {
                    return std::size_t(
                        std::count_if(mu.begin(), mu.end(), [&](double x) { return x > least * mu_at(0); }));
                };
                const bool all = with_mass(0) <= std::size_t(budget);
                if (with_mass(none) <= std::size_t(budget) && with_mass(none) != n) continue;
                if (!all && from[certain] < 1e6 * none) continue;
                double kappa = all ? 1e300 : double(budget - index_t(certain)) / from[certain];
                if (!all && certain == std::size_t(budget)) kappa = 1 / mu_at(certain - 1); // but for rounding
                std::vector<double> cumulative; // of what is not certain, in id order
                double sum = 0;
                for (const double x : mu) cumulative.push_back(sum += (all || x * kappa >= 1 ? 0 : x) * kappa);
                double before = -1;
                index_t entries = 0, first_sampled = 0;
                for (index_t j = 0; j < budget; ++j) {
                    const auto e = std::size_t(i * budget + j);
                    if (out.ids[e] < 0) {
                        RC_ASSERT(out.weight[e] == 0);
                        RC_ASSERT(out.log_mu[e] == 0);
                        RC_ASSERT(out.exact[e] == 0);
                        continue;
                    }
                    const auto id = std::size_t(out.ids[e]);
                    RC_ASSERT(entries == j); // no hole
                    ++entries;
                    if (out.exact[e]) {
                        RC_ASSERT(j == first_sampled);
                        ++first_sampled;
                        RC_ASSERT(mu[id] * kappa > 1 - 10 * eps);
                        RC_ASSERT(std::abs(out.weight[e] / mu[id] - 1) < 10 * eps * std::max(1.0, std::abs(l.lse)));
                    } else {
                        RC_ASSERT(mu[id] * kappa < 1 + 10 * eps);
                        RC_ASSERT(std::abs(out.weight[e] * kappa - 1) < 10 * eps);
                        const double at = uniforms[std::size_t(i)] + double(j - first_sampled); // systematic
                        RC_ASSERT(at < cumulative[id] + 20 * eps * double(budget));
                        RC_ASSERT(at > (id > 0 ? cumulative[id - 1] : 0) - 20 * eps * double(budget));
                    }
                    if (j == first_sampled) before = -1;
                    RC_ASSERT(double(id) >= before); // ascending among the exact and among the sampled
                    if (out.exact[e]) RC_ASSERT(double(id) > before);
                    before = double(id);
                }
                RC_ASSERT(entries == index_t(std::min(n, std::size_t(budget))));
            }
        });
    });
}

} // namespace

TEST_CASE("filters keep what they say, on every engine and type") {
    check_kept_sets<float>("float");
    check_kept_sets<bfloat16>("bfloat16");
#if !OPD_TEST_SANITIZED // what reads memory is the same text
    check_kept_sets<double>("double");
    check_kept_sets<half>("half");
#endif
}

TEST_CASE("Gumbel-max takes the token of the largest score, to the last bit") {
    check_gumbel<float>("float");
    check_gumbel<bfloat16>("bfloat16");
#if !OPD_TEST_SANITIZED
    check_gumbel<double>("double");
#endif
}

TEST_CASE("i.i.d. draws land where their uniform says") {
    check_iid<float>("float");
    check_iid<bfloat16>("bfloat16");
#if !OPD_TEST_SANITIZED
    check_iid<double>("double");
#endif
}

TEST_CASE("threshold includes each id with min(1, kappa mu)") {
    check_threshold<float>("float");
    check_threshold<bfloat16>("bfloat16");
#if !OPD_TEST_SANITIZED
    check_threshold<double>("double");
#endif
}
