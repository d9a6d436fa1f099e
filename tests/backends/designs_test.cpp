// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, whole-compiler, whole-sanitize
//
// Head + tail and Gumbel top-m against float64, on the CPU's lanes and on the GPU's rows run by a host loop: which ids,
// with what weight, what is said of the tail and of the threshold; keyed draws against their law; what a cache must not
// leave out.
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
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <opd/draw.hpp>
#include <opd/estimators/sampled.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

/// mu over all ids of what a draw kept, in float64.
template <class Out>
std::vector<double> kept_mu(const row_law& l, const Out& out, index_t row, index_t vocab) {
    const index_t n = out.kept[std::size_t(row)];
    std::vector<double> mu;
    cumulative_of(l, kept_of(l, n, vocab), vocab, l.mass(std::size_t(n)), &mu);
    return mu;
}

/// Weights below the number type's least are none: ids near it may or may not have mass.
template <class Z>
constexpr double none_of() {
    return sizeof(arithmetic_t<Z>) == 8 ? 1e-305 : 1e-33;
}
template <class Z>
bool is_at_the_edge(const std::vector<double>& mu, double top) {
    return std::any_of(mu.begin(), mu.end(), [&](double x) { return x > 0 && x < none_of<Z>() * top; });
}

template <class Z>
void check_head_tail(const std::string& type) {
    property("the head for certain, the tail by its uniforms, " + type, [] {
        random_rows<Z> rr(2);
        auto& [p, u, b, f] = rr;
        const index_t h = u.uniform() < 0.2 ? 0 : 1 + u.below(u.uniform() < 0.3 ? 400 : 20), m = 1 + u.below(20);
        const double eps = eps_of<Z>();
        on_both([&](auto& be, const char*) {
            outputs<double, double> out(p.rows, h + m);
            std::vector<double> uniforms, log_tail(std::size_t(p.rows) + 1, 9);
            for (index_t i = 0; i < p.rows * m; ++i) uniforms.push_back(u.uniform());
            draw_keys<> keys;
            keys.uniforms = view(std::as_const(uniforms).data(), p.rows, m);
            auto options = out.options(f);
            options.log_tail = view(log_tail.data(), p.rows);
            const auto r = draw(be, b.z_view(), design::head_tail{h, m}, keys, out.to(), options);
            RC_ASSERT(r.diagnostics.bad_rows == 0);
            RC_ASSERT(log_tail.back() == 9);
            for (index_t i = 0; i < p.rows; ++i) {
                const row_law l(b.z_view().row(i), p.vocab, double(p.temperature_p));
                const std::vector<double> mu = kept_mu(l, out, i, p.vocab);
                const double top = mu[std::size_t(l.ids[0])];
                if (is_at_the_edge<Z>(mu, top)) continue;
                const auto n = std::size_t(out.kept[std::size_t(i)]);
                std::vector<index_t> head(l.ids.begin(), l.ids.begin() + std::ptrdiff_t(std::min(n, std::size_t(h))));
                std::erase_if(head, [&](index_t v) { return !(mu[std::size_t(v)] > 0); });
                std::sort(head.begin(), head.end());
                std::vector<double> rest = mu, cumulative;
                for (const index_t v : head) rest[std::size_t(v)] = 0;
                double tail = 0;
                for (const double x : rest) cumulative.push_back(tail += x);
                const auto at = [&](index_t j) { return std::size_t(i * (h + m) + j); };
                for (index_t j = 0; j < index_t(head.size()); ++j) {
                    const double weight = mu[std::size_t(head[std::size_t(j)])];
                    RC_ASSERT(index_t(out.ids[at(j)]) == head[std::size_t(j)]);
                    RC_ASSERT(out.exact[at(j)] == 1);
                    RC_ASSERT(std::abs(out.weight[at(j)] / weight - 1) < 10 * eps * std::max(1.0, std::abs(l.lse)));
                }
                const double said = log_tail[std::size_t(i)];
                RC_ASSERT((said == -inf) == !(tail > 0));
                if (tail > 0) RC_ASSERT(std::abs(std::exp(said) / tail - 1) < 10 * eps);
                for (index_t j = 0; j < h + m - index_t(head.size()); ++j) {
                    const auto e = at(index_t(head.size()) + j);
                    RC_ASSERT(out.exact[e] == 0);
                    if (!(tail > 0) || j >= m) {
                        RC_ASSERT(out.ids[e] == -1);
                        RC_ASSERT(out.weight[e] == 0);
                        continue;
                    }
                    const auto id = std::size_t(out.ids[e]);
                    RC_ASSERT(out.ids[e] >= 0);
                    RC_ASSERT(rest[id] > 0); // kept, and not of the head
                    RC_ASSERT(std::abs(out.weight[e] * double(m) / tail - 1) < 10 * eps);
                    const double point = uniforms[std::size_t(i * m + j)] * tail;
                    RC_ASSERT(point < cumulative[id] + eps * tail);
                    RC_ASSERT(point > (id > 0 ? cumulative[id - 1] : 0) - eps * tail);
                    RC_ASSERT(std::abs(out.log_mu[e] - std::log(mu[id])) < eps * std::max(1.0, std::abs(l.lse)));
                }
            }
        });
    });
}

/// Gumbel top-m in float64, from uniforms: ids in the order in which they are drawn.
struct one_by_one {
    std::vector<std::size_t> ids;
    double t = 0;      ///< e^-kappa; infinite if no id is left
    bool clear = true; ///< no uniform lies within eps of a border

    one_by_one(std::vector<double> mu, const double* uniforms, index_t m, double eps) {
        for (index_t j = 0; j <= m; ++j) {
            double left = 0;
            std::vector<double> cumulative;
            for (const double x : mu) cumulative.push_back(left += x);
            if (!(left > 0)) {
                t = inf;
                return;
            }
            t += -std::log1p(-uniforms[m + j]) / left;
            if (j == m) return;
            const double point = uniforms[j] * left;
            const auto id =
                std::size_t(std::upper_bound(cumulative.begin(), cumulative.end(), point) - cumulative.begin());
            clear &= id < mu.size() && point < cumulative[id] - eps * left &&
                     point > (id > 0 ? cumulative[id - 1] : -1) + eps * left;
            if (!clear) return;
            ids.push_back(id), mu[id] = 0;
        }
    }
};

template <class Z>
void check_gumbel_top(const std::string& type) {
    property("ids without replacement and their threshold, " + type, [] {
        random_rows<Z> rr(2);
        auto& [p, u, b, f] = rr;
        const index_t m = 1 + u.below(u.uniform() < 0.3 ? 60 : 8);
        const double eps = eps_of<Z>();
        on_both([&](auto& be, const char*) {
            outputs<double, double> out(p.rows, m);
            const index_t per_row = design::gumbel_top{m}.uniforms();
            std::vector<double> uniforms, kappa(std::size_t(p.rows) + 1, 9);
            for (index_t i = 0; i < p.rows * per_row; ++i) uniforms.push_back(u.uniform());
            draw_keys<> keys;
            keys.uniforms = view(std::as_const(uniforms).data(), p.rows, per_row);
            auto options = out.options(f);
            options.kappa = view(kappa.data(), p.rows);
            const auto r = draw(be, b.z_view(), design::gumbel_top{m}, keys, out.to(), options);
            RC_ASSERT(r.diagnostics.bad_rows == 0);
            RC_ASSERT(kappa.back() == 9);
            for (index_t i = 0; i < p.rows; ++i) {
                const row_law l(b.z_view().row(i), p.vocab, double(p.temperature_p));
                const std::vector<double> mu = kept_mu(l, out, i, p.vocab);
                if (is_at_the_edge<Z>(mu, mu[std::size_t(l.ids[0])])) continue;
                const one_by_one want(mu, uniforms.data() + i * per_row, m, 20 * eps);
                if (!want.clear) continue;
                const bool all = want.t == inf;
                RC_ASSERT((kappa[std::size_t(i)] == -inf) == all);
                // what is left after the most probable ids is known as they are: e.g. e^-60, to its own digits
                const double slack = 30 * eps * double(m + 1);
                if (!all) RC_ASSERT(std::abs(std::exp(-kappa[std::size_t(i)]) / want.t - 1) < slack);
                std::vector<std::size_t> ids = want.ids;
                std::sort(ids.begin(), ids.end());
                for (index_t j = 0; j < m; ++j) {
                    const auto e = std::size_t(i * m + j);
                    if (j >= index_t(ids.size())) {
                        RC_ASSERT(out.ids[e] == -1);
                        RC_ASSERT(out.weight[e] == 0);
                        continue;
                    }
                    const double mu_e = mu[ids[std::size_t(j)]];
                    const double weight = all ? mu_e : mu_e / -std::expm1(-mu_e * want.t);
                    RC_ASSERT(std::size_t(out.ids[e]) == ids[std::size_t(j)]);
                    RC_ASSERT((out.exact[e] == 1) == all);
                    RC_ASSERT(std::abs(out.weight[e] / weight - 1) < slack * std::max(1.0, std::abs(l.lse)));
                }
            }
        });
    });
}

} // namespace

TEST_CASE("head + tail takes the most probable ids for certain and draws from the rest") {
    check_head_tail<float>("float");
    check_head_tail<bfloat16>("bfloat16");
#if !OPD_TEST_SANITIZED
    check_head_tail<double>("double");
#endif
}

TEST_CASE("Gumbel top-m takes ids one after the other from what is left") {
    check_gumbel_top<float>("float");
    check_gumbel_top<bfloat16>("bfloat16");
#if !OPD_TEST_SANITIZED
    check_gumbel_top<double>("double");
#endif
}

TEST_CASE("a head of the whole vocabulary leaves no tail; ties go to the lower ids") {
    const std::vector<double> z(2500, 0.5);
    const keyed_rows rows(1);
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        for (const index_t h : {0, 1, 3, 1030, 2500, 4000}) {
            outputs<double, double> out(1, h + 2);
            double log_tail = 9;
            auto options = out.options({});
            options.log_tail = view(&log_tail, 1);
            draw(be, view(z.data(), 1, 2500), design::head_tail{h, 2}, rows.keys(1), out.to(), options);
            const index_t head = std::min<index_t>(h, 2500);
            for (index_t j = 0; j < head; ++j) CHECK(out.ids[std::size_t(j)] == j);
            for (index_t j = head; j < h + 2; ++j)
                CHECK((out.ids[std::size_t(j)] < 0) == (head == 2500 || j >= head + 2));
            if (head < 2500) {
                CHECK(std::abs(std::exp(log_tail) - double(2500 - head) / 2500) < 1e-12);
                CHECK(out.ids[std::size_t(head)] >= head);
            } else {
                CHECK(log_tail == -inf);
            }
        }
    });
}

TEST_CASE("what is left of a row whose top ids hold all but e^-300") {
    // three ids 300 nats apart, and many far below: a difference of masses would leave nothing
    std::vector<double> z(1500, -900.0);
    z[7] = 0, z[1100] = -300, z[1101] = -600;
    const std::vector<double> uniforms(7, 0.5);
    draw_keys<> keys;
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        outputs<double, double> out(1, 3);
        double kappa = 9;
        keys.uniforms = view(uniforms.data(), 1, 7);
        auto options = out.options({.temperature = 1});
        options.kappa = view(&kappa, 1);
        // -900 nats are beneath double's least number: the three are all there is
        draw(be, view(z.data(), 1, 1500), design::gumbel_top{3}, keys, out.to(), options);
        CHECK(out.ids[0] == 7);
        CHECK(out.ids[1] == 1100);
        CHECK(out.ids[2] == 1101);
        CHECK(kappa == -inf);
        CHECK(out.exact[2] == 1);
        CHECK(std::abs(out.weight[1] / std::exp(-300.) - 1) < 1e-9);
        outputs<double, double> two(1, 2);
        options = two.options({.temperature = 1}), options.kappa = view(&kappa, 1);
        keys.uniforms = view(uniforms.data(), 1, 5);
        draw(be, view(z.data(), 1, 1500), design::gumbel_top{2}, keys, two.to(), options);
        const double t = std::log(2.) * std::exp(600.);
        CHECK(std::abs(kappa + std::log(t)) < 1e-9);
        CHECK(two.ids[1] == 1100);
        CHECK(two.exact[1] == 0);
    });
}

// Gumbel top-m beside the m largest of V noisy log-probs themselves, and E[Σ w f] beside E_mu[f]: means of 20,000 rows,
// within 5 standard errors.
TEST_CASE("keyed draws without replacement have the law of noisy log-probs") {
    const index_t vocab = 40, rows = 20000, m = 6, block = 1000;
    numbers u(9);
    std::vector<float> z, many;
    for (index_t v = 0; v < vocab; ++v) z.push_back(float(1.5 * u.normal()));
    for (index_t r = 0; r < block; ++r) many.insert(many.end(), z.begin(), z.end());
    const row_law l(z.data(), vocab, 1);
    std::vector<double> mu(std::size_t(vocab), 0.), f, inclusion(mu), weight(mu);
    for (std::size_t j = 0; j < l.ids.size(); ++j) mu[std::size_t(l.ids[j])] = l.mu[j];
    for (index_t v = 0; v < vocab; ++v) f.push_back(u.normal());
    const keyed_rows keyed(rows);
    cpu_backend be{.threads = 2};
    double mean_of_f = 0, sum = 0, squares = 0, kappa_sum = 0, kappa_squares = 0, noisy_sum = 0, noisy_squares = 0;
    for (std::size_t v = 0; v < mu.size(); ++v) mean_of_f += mu[v] * f[v];
    std::vector<double> drawn_hits(mu.size()), noisy_hits(mu.size());
    for (index_t first = 0; first < rows; first += block) {
        outputs<double, double> out(block, m);
        std::vector<double> kappa(static_cast<std::size_t>(block));
        auto options = out.options({});
        options.kappa = view(kappa.data(), block);
        draw(be, view(std::as_const(many).data(), block, vocab), design::gumbel_top{m},
             {5, view(keyed.sample.data() + first, block), view(keyed.position.data() + first, block), {}}, out.to(),
             options);
        for (index_t i = 0; i < block; ++i) {
            double of_row = 0;
            for (index_t j = 0; j < m; ++j) {
                const auto e = std::size_t(i * m + j);
                of_row += out.weight[e] * f[std::size_t(out.ids[e])];
                drawn_hits[std::size_t(out.ids[e])] += 1;
            }
            sum += of_row, squares += of_row * of_row;
            const double k = kappa[std::size_t(i)];
            kappa_sum += k, kappa_squares += k * k;
            std::vector<std::pair<double, std::size_t>> noisy;
            for (std::size_t v = 0; v < mu.size(); ++v)
                noisy.emplace_back(std::log(mu[v]) - std::log(-std::log(u.uniform() * (1 - 1e-12) + 5e-13)), v);
            std::sort(noisy.begin(), noisy.end(), std::greater<>{});
            for (index_t j = 0; j < m; ++j) noisy_hits[noisy[std::size_t(j)].second] += 1;
            const double threshold = noisy[std::size_t(m)].first;
            noisy_sum += threshold, noisy_squares += threshold * threshold;
        }
    }
    const auto mean = [&](double s) { return s / double(rows); };
    const auto error = [&](double s, double s2) { return std::sqrt((mean(s2) - mean(s) * mean(s)) / double(rows)); };
    CHECK(std::abs(mean(sum) - mean_of_f) < 5 * error(sum, squares));
    const double both = std::hypot(error(kappa_sum, kappa_squares), error(noisy_sum, noisy_squares));
    CHECK(std::abs(mean(kappa_sum) - mean(noisy_sum)) < 5 * both);
    for (std::size_t v = 0; v < mu.size(); ++v) {
        const double a = mean(drawn_hits[v]), b = mean(noisy_hits[v]), p = (a + b) / 2;
        CHECK(std::abs(a - b) < 5 * std::sqrt(2 * (p * (1 - p) + 1e-6) / double(rows)));
    }
}

TEST_CASE("a weighted row whose tail was not drawn from is refused; on a device it is bad") {
    const std::vector<float> z{0, 1, 2, 0, 1, 2}, log_mu(4, -1.F), log_q(4, -1.F);
    const std::vector<double> tail{-1e9, -2}, all_in{-std::numeric_limits<double>::infinity(), -2};
    std::vector<float> dz(6, 9.F);
    const std::vector<double> weight(4, 0.25);
    std::vector<std::int32_t> ids{1, 2, 2, 0};
    std::vector<std::uint8_t> exact{1, 1, 1, 0};
    teacher::weighted<std::int32_t, float, space::host, double> cache{
        view(std::as_const(ids).data(), 2, 2), view(weight.data(), 2, 2), view(log_mu.data(), 2, 2),
        view(log_q.data(), 2, 2), view(std::as_const(exact).data(), 2, 2)};
    const student::logits<float, float> s{.z = view(z.data(), 2, 3), .dz = view(dz.data(), 2, 3)};
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        cache.log_tail_mu = view(all_in.data(), 2);
        CHECK(evaluate(be, s, cache, mc{}).diagnostics.bad_rows == 0);
        for (const std::int32_t second : {0, -1}) {
            ids[3] = second;
            exact[3] = second == 0; // certain as well, or an unused slot
            dz.assign(6, 9.F);
            CHECK_THROWS_WITH_AS(evaluate(be, s, cache, mc{}), doctest::Contains("teacher.log_tail_mu, row 1"),
                                 invalid_input);
            CHECK(dz == std::vector<float>(6, 9.F));
            // as a device sees it, where nothing could look before
            const auto job =
                row_job<student::logits<float, float>, decltype(cache), mc<>, space::host>{s, cache, mc<>{}, {}, 2, 3};
            const auto r = be.for_rows(job);
            CHECK(r.diagnostics.bad_rows == 1);
            CHECK(r.diagnostics.first_bad_row == 1);
            CHECK(dz[5] == 0);
            const std::vector<std::uint8_t> mask{1, 0};
            CHECK(evaluate(be, s, cache, mc{}, {.mask = mask}).diagnostics.bad_rows == 0);
        }
        ids[3] = 0, exact[3] = 0;
        cache.log_tail_mu = view(tail.data(), 2);
        CHECK(evaluate(be, s, cache, mc{}, {.mask = std::vector<std::uint8_t>{0, 1}}).diagnostics.bad_rows == 0);
        CHECK_THROWS_WITH_AS(evaluate(be, s, cache, mc{}), doctest::Contains("row 0"), invalid_input);
        const std::vector<double> above{0.5, -2};
        cache.log_tail_mu = view(above.data(), 2);
        CHECK_THROWS_WITH_AS(evaluate(be, s, cache, mc{}), doctest::Contains("is not a log-probability"),
                             invalid_input);
        cache.log_tail_mu = view(tail.data(), 1);
        CHECK_THROWS_WITH_AS(evaluate(be, s, cache, mc{}), doctest::Contains("teacher.log_tail_mu"), invalid_input);
    });
}

TEST_CASE("what a draw says of its tail is what the learner reads") {
    const index_t n = 3, vocab = 40, h = 4, m = 2, columns = h + m;
    numbers u(11);
    std::vector<float> z;
    for (index_t i = 0; i < n * vocab; ++i) z.push_back(float(2 * u.normal()));
    for (index_t v = 0; v < vocab; ++v) z[std::size_t(vocab + v)] = v < h ? float(v) : -80;       // next to none
    for (index_t v = h; v < vocab; ++v) z[std::size_t(2 * vocab + v)] = detail::neg_inf<float>(); // none
    on_both([&](auto& be, const char* engine) {
        INFO(engine);
        std::vector<std::int32_t> ids(std::size_t(n * columns));
        std::vector<float> log_mu(ids.size()), log_q(ids.size(), -1.F), weight(ids.size()), dz(z.size());
        std::vector<std::uint8_t> exact(ids.size());
        std::vector<double> log_tail(static_cast<std::size_t>(n));
        const std::vector<std::uint64_t> sample{1, 2, 3};
        const std::vector<std::uint32_t> position{0, 0, 0};
        const auto logits = view(std::as_const(z).data(), n, vocab);
        draw_options<> options;
        options.log_tail = view(log_tail.data(), n);
        draw(be, logits, design::head_tail{h, m},
             {.seed = 5, .sample = view(sample.data(), n), .position = view(position.data(), n)},
             drawn<std::int32_t, float, float>{view(ids.data(), n, columns), view(log_mu.data(), n, columns),
                                               view(weight.data(), n, columns), view(exact.data(), n, columns)},
             options);
        CHECK(log_tail[1] < -60);
        CHECK(log_tail[1] > -100);
        CHECK(detail::is_neg_inf(log_tail[2]));
        teacher::weighted<std::int32_t> cache{
            view(std::as_const(ids).data(), n, columns), view(std::as_const(weight).data(), n, columns),
            view(std::as_const(log_mu).data(), n, columns), view(std::as_const(log_q).data(), n, columns),
            view(std::as_const(exact).data(), n, columns)};
        cache.log_tail_mu = view(std::as_const(log_tail).data(), n);
        const student::logits<float, float> s{.z = logits, .dz = view(dz.data(), n, vocab)};
        CHECK(evaluate(be, s, cache, mc{}).diagnostics.bad_rows == 0);
        for (index_t j = h; j < columns; ++j) ids[std::size_t(2 * columns + j)] = -1; // they were
        CHECK(evaluate(be, s, cache, mc{}).diagnostics.bad_rows == 0);
        for (index_t j = h; j < columns; ++j) ids[std::size_t(columns + j)] = -1; // lost on the way
        CHECK_THROWS_WITH_AS(evaluate(be, s, cache, mc{}), doctest::Contains("teacher.log_tail_mu, row 1"),
                             invalid_input);
    });
}
