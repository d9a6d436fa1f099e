// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What tests of draws have in common: a row's law under a filter in float64, everything that a draw writes, keys,
// random rows.
#pragma once

#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <opd/draw.hpp>

namespace opd::test {

/// A row's law under a filter in float64, in the order in which a filter keeps.
struct row_law {
    std::vector<index_t> ids;  // with mass, best first
    std::vector<double> z, mu; // in that order; mu over all ids
    double lse = 0;

    template <class Z>
    row_law(const Z* row, index_t n, double temperature) {
        std::vector<double> all;
        for (index_t v = 0; v < n; ++v) {
            const double x = detail::logit_within(row[v]);
            all.push_back(x);
            if (x > -1e30) ids.push_back(v);
        }
        std::sort(ids.begin(), ids.end(), [&](index_t a, index_t b) {
            const double x = all[std::size_t(a)], y = all[std::size_t(b)];
            return x > y || (x == y && a < b);
        });
        double sum = 0;
        for (const index_t v : ids) z.push_back(all[std::size_t(v)]), sum += std::exp((z.back() - z[0]) / temperature);
        for (const double x : z) mu.push_back(std::exp((x - z[0]) / temperature) / sum);
        lse = z[0] / temperature + std::log(sum);
    }
    double mass(std::size_t n) const { return std::accumulate(mu.begin(), mu.begin() + std::ptrdiff_t(n), 0.0); }

    /// Whether a filter may keep the first n: exactly, but for sums and quotients within eps of their limits.
    bool keeps(const filter& f, std::size_t n, double eps) const {
        if (n < 1 || n > ids.size()) return false;
        const std::size_t k = f.top_k > 0 ? std::min(std::size_t(f.top_k), ids.size()) : ids.size();
        const auto enough = [&](std::size_t j, double slack) { return mu[j] >= double(f.min_p) * mu[0] * slack; };
        std::size_t least = 0, most = 0; // what top_k and min_p leave
        while (least < k && enough(least, 1 + eps)) ++least;
        while (most < k && enough(most, 1 - eps)) ++most;
        least = std::max<std::size_t>(least, 1);
        if (n > most) return false;
        if (!(f.top_p < 1)) return n >= least;
        const double p = double(f.top_p);
        if (n > 1 && mass(n - 1) > p * mass(most) * (1 + eps)) return false;
        return n >= least || mass(n) >= p * mass(least) * (1 - eps);
    }
};

template <class Z>
constexpr double eps_of() {
    return sizeof(arithmetic_t<Z>) == 8 ? 1e-11 : 1e-5;
}

/// Everything that a draw writes.
template <class L = float, class W = float>
struct outputs {
    index_t n, m;
    std::vector<std::int32_t> ids;
    std::vector<L> log_mu;
    std::vector<W> weight;
    std::vector<std::uint8_t> exact;
    std::vector<double> lse, log_kept;
    std::vector<filter_cut> cut;
    std::vector<index_t> kept;

    outputs(index_t n_, index_t m_)
        : n(n_), m(m_), ids(size(), -9), log_mu(size(), L(9)), weight(size(), W(9)), exact(size(), 9),
          lse(std::size_t(n) + 1, 9), log_kept(std::size_t(n) + 1, 9), cut(std::size_t(n) + 1),
          kept(std::size_t(n) + 1, -9) {}
    std::size_t size() const { return std::size_t(n * m) + 1; }
    drawn<std::int32_t, L, W> to() {
        return {view(ids.data(), n, m), view(log_mu.data(), n, m), view(weight.data(), n, m), view(exact.data(), n, m)};
    }
    draw_options<> options(const filter& f, row_mask<> mask = {}) {
        return {f, mask, view(lse.data(), n), view(log_kept.data(), n), view(cut.data(), n), view(kept.data(), n)};
    }
    friend bool operator==(const outputs& a, const outputs& b) {
        return a.ids == b.ids && a.log_mu == b.log_mu && a.weight == b.weight && a.exact == b.exact && a.lse == b.lse &&
               a.log_kept == b.log_kept && a.kept == b.kept;
    }
};

struct keyed_rows {
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position;
    explicit keyed_rows(index_t n, std::uint64_t first = 0) {
        for (index_t r = 0; r <= n; ++r)
            sample.push_back(first + std::uint64_t(r)), position.push_back(std::uint32_t(3 * r));
    }
    draw_keys<> keys(index_t n, std::uint64_t seed = 7) const {
        return {seed, view(sample.data(), n), view(position.data(), n), {}};
    }
};

inline filter random_filter(numbers& u, index_t vocab, float temperature) {
    filter f{.temperature = temperature};
    if (u.uniform() < 0.4) f.top_k = 1 + u.below(std::min<index_t>(2 * vocab, 300));
    if (u.uniform() < 0.5) f.top_p = float(u.uniform());
    if (u.uniform() < 0.3) f.min_p = float(u.uniform() < 0.2 ? 1 : 0.2 * u.uniform());
    return f;
}

inline const std::vector<flavour> all_kinds = {flavour::wide,    flavour::peaked, flavour::filtered,
                                               flavour::one_hot, flavour::steep,  flavour::diffuse};

/// Logits of a problem in Z, where asked for with many ties.
template <class Z>
buffers<Z> logits_of(const problem& p, bool ties) {
    buffers<Z> b(p);
    if (ties)
        for (auto& x : b.z)
            if (const double v = double(element<Z>::load(x)); v > -1e29 && v < 1e29)
                x = buffers<Z>::template cast<Z>(std::round(v));
    return b;
}

/// Random rows in Z, some with many ties, and a filter for them.
template <class Z>
struct random_rows {
    problem p;
    numbers u;
    buffers<Z> b;
    filter f;

    explicit random_rows(index_t largest)
        : p(*problems(options(largest))), u(p.seed + 5), b(logits_of<Z>(p, u.uniform() < 0.3)),
          f(random_filter(u, p.vocab, p.temperature_p)) {}
    static problem_options options(index_t largest) {
        problem_options o;
        o.kinds = all_kinds, o.far_temperatures = true, o.largest_rows = largest, o.smallest_rows = 1;
        return o;
    }
};

/// Cumulative mu over ids in id order, of what is kept.
inline std::vector<double> cumulative_of(const row_law& l, const std::vector<bool>& kept, index_t vocab, double total,
                                         std::vector<double>* mu_of = nullptr) {
    std::vector<double> mu(std::size_t(vocab), 0), c;
    for (std::size_t j = 0; j < l.ids.size(); ++j)
        if (kept[std::size_t(l.ids[j])]) mu[std::size_t(l.ids[j])] = l.mu[j] / total;
    double sum = 0;
    for (const double m : mu) c.push_back(sum += m);
    if (mu_of) *mu_of = mu;
    return c;
}
inline std::vector<bool> kept_of(const row_law& l, index_t n, index_t vocab) {
    std::vector<bool> kept(std::size_t(vocab), false);
    for (index_t j = 0; j < n; ++j) kept[std::size_t(l.ids[std::size_t(j)])] = true;
    return kept;
}

} // namespace opd::test
