// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "ratios.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "opd/backends/cpu.hpp"
#include "opd/opd.hpp"

namespace variance_study {

namespace {

constexpr std::array ms{1, 2, 4, 8, 16, 32, 64};
constexpr index_t most = 64, block = 16, groups = 10;
constexpr index_t prefixes = 48;
using losses = std::array<double, ms.size()>; ///< of each m

struct prefix {
    floats p, mu;
    std::vector<float> log_q;    ///< (V)
    double lse = 0;              ///< of p
    double kl = 0, variance = 0; ///< mean and variance of L_1, by enumeration
};

/// A token that is scored: at which prefix, and what its noise is keyed by.
struct place {
    index_t prefix;
    std::uint64_t sample;
    std::uint32_t position;
};

class world {
public:
    world(const shape_of_world& w, const ratio_settings& s) : s_(s), v_(w.vocab) {
        opd::cpu_backend be{.threads = 1};
        for (index_t i = 0; i < prefixes; ++i) {
            constexpr double entropies[] = {0.1, 1, 3, 5};
            const auto family = families[i % 4];
            const policy at =
                make_policy(w, family, entropies[i / 4 % 4], {s.staleness}, s.seed, std::uint64_t(1000 + i));
            prefix x{.p = at.z, .mu = at.stale[0], .log_q = {}};
            opd::vector_view<double> lse = opd::view(&x.lse, 1);
            opd::log_sum_exp(be, opd::view(std::as_const(x.p).data(), 1, v_), lse);
            const reals log_p = log_softmax(x.p), log_q = log_softmax(at.y), log_mu = log_softmax(x.mu);
            x.log_q.assign(log_q.begin(), log_q.end());
            double squares = 0;
            for (std::size_t v = 0; v < log_p.size(); ++v) {
                const double one = std::exp(log_p[v] - log_mu[v]) * (log_p[v] - log_q[v]), mu = std::exp(log_mu[v]);
                x.kl += mu * one, squares += mu * one * one;
            }
            x.variance = squares - x.kl * x.kl;
            all_.push_back(std::move(x));
        }
        std::sort(all_.begin(), all_.end(), [](const prefix& a, const prefix& b) { return a.kl < b.kl; });
    }
    const prefix& operator[](index_t i) const { return all_[static_cast<std::size_t>(i)]; }

    /// L_m of each place, for each m: of the first m of 64 draws, or of threshold(m).
    std::vector<losses> score(std::span<const place> at, bool threshold) const {
        const index_t n = std::ssize(at);
        rows r = rows_of(at);
        std::vector<losses> out(at.size());
        std::vector<float> loss(at.size());
        std::vector<std::int32_t> ids;
        floats log_mu, weight, log_q;
        std::vector<std::uint8_t> exact;
        const auto sized = [&](index_t m) {
            ids.resize(std::size_t(n * m)), exact.resize(ids.size());
            for (floats* x : {&log_mu, &weight, &log_q}) x->resize(ids.size());
        };
        const auto draw = [&](const auto& design) {
            const index_t m = design.columns();
            sized(m);
            opd::draw(r.be, opd::view(std::as_const(r.mu).data(), n, v_), design,
                      {.seed = s_.seed, .sample = r.sample, .position = r.position},
                      opd::drawn<>{opd::view(ids.data(), n, m), opd::view(log_mu.data(), n, m),
                                   opd::view(weight.data(), n, m), opd::view(exact.data(), n, m)});
            for (index_t i = 0; i < n; ++i)
                for (index_t j = i * m; j < (i + 1) * m; ++j) {
                    const auto id = std::size_t(std::max(ids[std::size_t(j)], 0));
                    log_q[std::size_t(j)] = (*this)[at[std::size_t(i)].prefix].log_q[id];
                }
        };
        const opd::student::logits student{opd::view(std::as_const(r.p).data(), n, v_)};
        opd::env e{.reduction = opd::reduce::sum};
        e.losses = opd::view(loss.data(), n);
        e.given_lse = opd::view(std::as_const(r.lse).data(), n);
        if (!threshold) draw(opd::design::iid{most});
        for (std::size_t k = 0; k < ms.size(); ++k) {
            const index_t m = ms[k];
            const auto columns = [&](const auto& x) { return opd::matrix_view(x.data(), n, m, threshold ? m : most); };
            const auto& c = std::as_const(ids);
            opd::any_sampled how;
            if (threshold) {
                draw(opd::design::threshold{m});
                opd::evaluate(r.be, student,
                              opd::teacher::weighted{columns(c), columns(std::as_const(weight)),
                                                     columns(std::as_const(log_mu)), columns(std::as_const(log_q)),
                                                     columns(std::as_const(exact))},
                              how, e);
            } else {
                opd::evaluate(
                    r.be, student,
                    opd::teacher::samples{columns(c), columns(std::as_const(log_mu)), columns(std::as_const(log_q))},
                    how, e);
            }
            for (std::size_t i = 0; i < out.size(); ++i) out[i][k] = double(loss[i]);
        }
        return out;
    }

    /// Sequences of prefixes, each of s_.length: where mu's tokens lead, within one of `in_groups` groups of prefixes.
    std::vector<std::vector<index_t>> walk(index_t begin, index_t end, index_t in_groups) const {
        const index_t n = end - begin, many = prefixes / in_groups;
        std::vector<std::vector<index_t>> paths(static_cast<std::size_t>(n));
        std::vector<place> now;
        const auto next = [&](index_t i, std::uint64_t bits) {
            const auto within = index_t(opd::uniform_of_bits(std::uint32_t(bits)) * double(many));
            return (begin + i) % in_groups * many + within;
        };
        for (index_t i = 0; i < n; ++i) {
            const opd::noise_row noise(s_.seed, opd::noise_stream::coin, std::uint64_t(begin + i), 0);
            now.push_back({next(i, noise.bits(0, 0)), std::uint64_t(begin + i), 0});
        }
        std::vector<std::int32_t> ids(now.size());
        floats log_mu(now.size());
        for (index_t t = 0; t < s_.length; ++t) {
            for (std::size_t i = 0; i < now.size(); ++i)
                now[i].position = std::uint32_t(t), paths[i].push_back(now[i].prefix);
            rows r = rows_of(now);
            opd::draw(r.be, opd::view(std::as_const(r.mu).data(), n, v_), opd::design::gumbel{},
                      {.seed = s_.seed, .sample = r.sample, .position = r.position},
                      opd::drawn<>{opd::view(ids.data(), n, 1), opd::view(log_mu.data(), n, 1)});
            for (index_t i = 0; i < n; ++i) {
                place& x = now[std::size_t(i)];
                const auto token = std::uint32_t(ids[std::size_t(i)]);
                const opd::noise_row hash(std::uint64_t(x.prefix), opd::noise_stream::coin, token, std::uint32_t(t));
                x.prefix = next(i, hash.bits(0, 0));
            }
        }
        return paths;
    }

private:
    struct rows {
        opd::cpu_backend be{.threads = 1};
        floats p, mu;
        reals lse;
        std::vector<std::uint64_t> sample;
        std::vector<std::uint32_t> position;
    };
    rows rows_of(std::span<const place> at) const {
        rows r;
        for (const place& x : at) {
            const prefix& here = (*this)[x.prefix];
            r.p.insert(r.p.end(), here.p.begin(), here.p.end());
            r.mu.insert(r.mu.end(), here.mu.begin(), here.mu.end());
            r.lse.push_back(here.lse), r.sample.push_back(x.sample), r.position.push_back(x.position);
        }
        return r;
    }

    const ratio_settings& s_;
    index_t v_;
    std::vector<prefix> all_;
};

std::vector<losses> scores(opd::thread_team& team, const world& w, const std::vector<place>& at,
                           bool threshold = false) {
    std::vector<losses> out(at.size());
    team.run((std::ssize(at) + block - 1) / block, [&](index_t b, int) {
        const auto first = std::size_t(b * block), count = std::min(std::size_t(block), at.size() - first);
        const auto part = w.score(std::span(at).subspan(first, count), threshold);
        std::copy(part.begin(), part.end(), out.begin() + std::ptrdiff_t(first));
    });
    return out;
}

double variance_of(std::span<const double> x) {
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / double(x.size());
    double squares = 0;
    for (const double y : x) squares += (y - mean) * (y - mean);
    return squares / double(x.size() - 1);
}

/// The ratio of two numbers that are sums over `groups` parts of the data, and its error by leaving out one.
ratio jackknife(const std::array<double, groups>& above, const std::array<double, groups>& below) {
    const double a = std::accumulate(above.begin(), above.end(), 0.0),
                 b = std::accumulate(below.begin(), below.end(), 0.0);
    double squares = 0;
    for (std::size_t g = 0; g < groups; ++g) {
        const double off = (a - above[g]) / (b - below[g]) - a / b;
        squares += off * off;
    }
    return {a / b, std::sqrt(squares * double(groups - 1) / double(groups))};
}

/// Variances of x[row][k] within each run of `repeats` rows, summed over the runs; by group of repeats.
std::array<double, groups> within(const std::vector<losses>& x, std::size_t k, index_t repeats) {
    std::array<double, groups> sums{};
    for (std::size_t first = 0; first < x.size(); first += std::size_t(repeats))
        for (index_t g = 0; g < groups; ++g) {
            std::vector<double> part;
            for (index_t i = g * repeats / groups; i < (g + 1) * repeats / groups; ++i)
                part.push_back(x[first + std::size_t(i)][k]);
            sums[std::size_t(g)] += variance_of(part);
        }
    return sums;
}

/// Means over the `length` rows of each sequence.
std::vector<losses> means(const std::vector<losses>& x, index_t length) {
    std::vector<losses> out;
    for (std::size_t first = 0; first < x.size(); first += std::size_t(length)) {
        losses mean{};
        for (std::size_t t = first; t < first + std::size_t(length); ++t)
            for (std::size_t k = 0; k < ms.size(); ++k) mean[k] += x[t][k] / double(length);
        out.push_back(mean);
    }
    return out;
}

} // namespace

ratio_outcome measure_ratios(opd::thread_team& team, const shape_of_world& shape, const ratio_settings& s) {
    const world w(shape, s);
    ratio_outcome out;
    for (const int m : ms)
        out.all.push_back({.m = m, .local = {}, .threshold = {}, .fixed = {}, .mixed = {}, .prompts = {}});

    std::vector<place> at;
    for (index_t i = 0; i < prefixes; ++i) {
        out.local_enumerated += w[i].variance / double(prefixes);
        for (index_t r = 0; r < s.repeats; ++r) at.push_back({i, std::uint64_t(r), std::uint32_t(i)});
    }
    const std::vector<losses> local = scores(team, w, at), by_threshold = scores(team, w, at, true);
    const auto one = within(local, 0, s.repeats);
    out.local_variance = std::accumulate(one.begin(), one.end(), 0.0) / double(groups * prefixes);
    for (std::size_t k = 0; k < ms.size(); ++k) {
        out.all[k].local = jackknife(within(local, k, s.repeats), one);
        out.all[k].threshold = jackknife(within(by_threshold, k, s.repeats), one);
    }

    // eq. 17 as its text has it: paths fixed
    const index_t repeats = std::max(groups * 2, s.repeats / 4 / groups * groups);
    at.clear();
    const auto paths = w.walk(0, s.paths, 1);
    for (index_t i = 0; i < s.paths; ++i)
        for (index_t r = 0; r < repeats; ++r)
            for (index_t t = 0; t < s.length; ++t)
                at.push_back({paths[std::size_t(i)][std::size_t(t)], std::uint64_t(1000000 + i * repeats + r),
                              std::uint32_t(t)});
    const std::vector<losses> fixed = means(scores(team, w, at), s.length);
    for (std::size_t k = 0; k < ms.size(); ++k)
        out.all[k].fixed = jackknife(within(fixed, k, repeats), within(fixed, 0, repeats));

    // over sequences, each with its path
    for (const bool prompts : {false, true}) {
        const index_t chunks = (s.sequences + block - 1) / block;
        std::vector<std::vector<std::vector<index_t>>> walked(static_cast<std::size_t>(chunks));
        team.run(chunks, [&](index_t c, int) {
            walked[std::size_t(c)] = w.walk(c * block, std::min((c + 1) * block, s.sequences), prompts ? 4 : 1);
        });
        at.clear();
        std::vector<double> kls;
        double of_draws = 0;
        std::uint64_t sample = prompts ? 3000000 : 2000000;
        for (const auto& chunk : walked)
            for (const auto& path : chunk) {
                double kl = 0;
                for (std::size_t t = 0; t < path.size(); ++t) {
                    at.push_back({path[t], sample, std::uint32_t(t)});
                    kl += w[path[t]].kl / double(s.length);
                    of_draws += w[path[t]].variance / double(s.length * s.length) / double(s.sequences);
                }
                kls.push_back(kl), ++sample;
            }
        const std::vector<losses> sequence = means(scores(team, w, at), s.length);
        const double between = variance_of(kls);
        (prompts ? out.prompts_between : out.mixed_between) = between / (between + of_draws);
        for (std::size_t k = 0; k < ms.size(); ++k) {
            // one run of all sequences, in ten groups
            const ratio r = jackknife(within(sequence, k, s.sequences), within(sequence, 0, s.sequences));
            (prompts ? out.all[k].prompts : out.all[k].mixed) = r;
            (prompts ? out.all[k].prompts_expected : out.all[k].mixed_expected) =
                (between + of_draws / double(ms[k])) / (between + of_draws);
        }
    }
    return out;
}

} // namespace variance_study
