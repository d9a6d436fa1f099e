// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Time an element of the CPU kernels at V = 151,936: dense divergences, log-sum-exp, sampled and sparse estimators; N =
// 64 to 2,048 rows, float and bfloat16, one and two threads. Beside each: the memory limit of its traffic, measured in
// the same interleaved rounds; its own time on a row of 32,768 entries that stays in the L2 cache (on two threads: half
// of it); plain Eigen and naive versions. Samples beside a slow multiply-add probe are thrown away (harness.hpp). The
// figures are medians; where all samples were disturbed, the smallest times, marked ~.
//
//   bench_dense [--quick] [--rows=64,512] [--threads=1,2] [--holes=padded|filtered] [--small-pages]
//               [--benchmark_filter=substring] [--benchmark_out=file.json]
//
// `share`: memory limit / time. `passes`: time in L2 over that of log-sum-exp in the same rounds, a unit of one
// exponential, one sum and one read. `floor`: max(memory limit, what the formula needs) / time, where what it needs is
// counted by hand (`counts`) in such units, so that no kernel is measured by its own time. A bar is met by its share,
// or by a floor of 0.85. Data: student logits N(0,3), teacher = student + N(0,0.5); "apart": teacher N(0,3) on its own.
// --quick: N = 64 alone. --small-pages: arrays lie in pages of 4 kB, not in huge ones.
// --holes: the teacher is -inf at the last 267 ids (padded), or at 99 of 100 (filtered).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <benchmark/benchmark.h>

#include "harness.hpp"
#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"
#include "peers.hpp"

namespace {

using bench::peer;
using bench::traffic;
using opd::index_t;

constexpr index_t vocab = 151'936, cached_vocab = 32'768, scored = 64, distinct_rows = 32;

/// What a teacher cache of 64 tokens a row holds, and room for a sparse gradient.
struct cache {
    std::vector<std::int32_t> mc, kept, top, set;    // (N,64) each; set: top, ascending
    std::vector<std::int64_t> set_offsets;           // (N+1)
    std::vector<float> mc_mu, mc_q, kept_mu, kept_q; // (N,64)
    std::vector<float> weight, top_q;                // (N,64)
    std::vector<std::uint8_t> exact;                 // (N,64)
};

/// N rows of storage T.
template <class T>
struct rows {
    const T *z, *y, *apart; // (N,V)
    T* dz;                  // (N,V)
    T* sparse;              // (N,64)
    double* lse;            // (N)
    const cache* tokens;
    index_t n, v;

    auto student() const { return opd::student::logits{opd::view(z, n, v), opd::view(dz, n, v)}; }
    auto value_only() const { return opd::student::logits{opd::view(z, n, v)}; }
    auto teacher() const { return opd::teacher::dense{opd::view(y, n, v)}; }
};

/// What a formula needs an entry, of KLs and sampled losses where every pass forms what it asks for, else once:
/// docs/performance.md has the table.
struct counts {
    double exponentials, logarithms, divisions;
    double passes() const { return exponentials + logarithms + divisions; }
};
/// By the operation's name; none: nobody counted. log-sum-exp is the unit itself: only memory bounds it here.
counts counted(const std::string& name) {
    static const std::map<std::string, counts> all = {
        {"reverse KL, value", {2, 0, 0}}, {"forward KL, value", {2, 0, 0}}, {"reverse KL", {3, 0, 0}},
        {"forward KL", {4, 0, 0}},        {"JSD(0.5)", {2, 1, 0}},          {"total variation", {2, 0, 0}},
        {"alpha(0.5)", {3, 0, 0}},        {"chi-squared", {3, 0, 0}},       {"MC-64", {2, 0, 0}},
        {"threshold(64)", {2, 0, 0}},
    };
    const auto found = all.find(name);
    return found != all.end() ? found->second : counts{0, 0, 0};
}

template <class T>
struct operation {
    std::string name;
    traffic limit;
    double bar_one, bar_two; // shares, or us a row where nothing limits; 0: none
    bool gradient;
    std::function<void(opd::eigen_backend&, const rows<T>&)> run;
    int compared; // peer, or -1
};

template <class T>
std::vector<operation<T>> operations() {
    std::vector<operation<T>> all;
    const auto dense = [&](const char* name, auto d, bool gradient, double one, double two, int compared) {
        all.push_back({name, gradient ? traffic::two_reads_write : traffic::two_reads, one, two, gradient,
                       [d, gradient](opd::eigen_backend& be, const rows<T>& x) {
                           benchmark::DoNotOptimize(gradient ? opd::evaluate(be, x.student(), x.teacher(), d).loss
                                                             : opd::evaluate(be, x.value_only(), x.teacher(), d).loss);
                       },
                       compared});
    };
    all.push_back({"log-sum-exp", traffic::read, 0.8, 0.8, false,
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       opd::log_sum_exp(be, opd::view(x.z, x.n, x.v), opd::vector_view<double>(x.lse, x.n));
                   },
                   int(peer::lse)});
    dense("reverse KL, value", opd::reverse_kl{}, false, 0.8, 0.8, int(peer::reverse_value));
    dense("forward KL, value", opd::forward_kl{}, false, 0.8, 0.8, int(peer::forward_value));
    dense("reverse KL", opd::reverse_kl{}, true, 0.6, 0.75, int(peer::reverse));
    dense("forward KL", opd::forward_kl{}, true, 0.5, 0.7, int(peer::forward));
    dense("JSD(0.5)", opd::jsd{}, true, 0.25, 0.35, int(peer::jsd));
    dense("total variation", opd::total_variation{}, true, 0, 0, int(peer::tv));
    dense("alpha(0.5)", opd::alpha_divergence{}, true, 0, 0, -1);
    dense("chi-squared", opd::chi_squared{}, true, 0, 0, -1);
    all.push_back({"MC-64", traffic::copy, 0.6, 0.75, true,
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       const opd::teacher::samples t{opd::view(x.tokens->mc.data(), x.n, scored),
                                                     opd::view(x.tokens->mc_mu.data(), x.n, scored),
                                                     opd::view(x.tokens->mc_q.data(), x.n, scored)};
                       benchmark::DoNotOptimize(opd::evaluate(be, x.student(), t, opd::mc{opd::reverse_kl{}}).loss);
                   },
                   int(peer::gathered)});
    const auto of_samples = [&](const char* name, auto estimator) {
        all.push_back({name, traffic::copy, 0, 0, true,
                       [estimator](opd::eigen_backend& be, const rows<T>& x) {
                           const opd::teacher::samples t{opd::view(x.tokens->mc.data(), x.n, scored),
                                                         opd::view(x.tokens->mc_mu.data(), x.n, scored),
                                                         opd::view(x.tokens->mc_q.data(), x.n, scored)};
                           benchmark::DoNotOptimize(opd::evaluate(be, x.student(), t, estimator).loss);
                       },
                       -1});
    };
    of_samples("MC-64, total variation", opd::mc{opd::total_variation{}});
    of_samples("MC-64, clipped, PPO", opd::mc{opd::shape::clipped{5}, opd::ppo_clip{}});
    of_samples("MC-64, the same at run time", opd::any_sampled{.of = {opd::choice::objective::clipped, 5},
                                                               .surrogate = {opd::choice::surrogate::ppo_clip}});
    dense("reverse KL, rows by TIP", opd::selected{opd::reverse_kl{}, opd::selector::tip{.gap = 1e-3}}, true, 0, 0, -1);
    dense("EOPD", opd::eopd(6), true, 0, 0, -1);
    all.push_back(
        {"reverse KL, lumped beyond 131,072", traffic::two_reads_write, 0, 0, true,
         [](opd::eigen_backend& be, const rows<T>& x) {
             const index_t common = std::min<index_t>(x.v, 131'072);
             benchmark::DoNotOptimize(
                 opd::evaluate(be, x.student(), opd::teacher::lumped{x.teacher(), common}, opd::reverse_kl{}).loss);
         },
         -1});
    all.push_back({"top-64, ragged, sparse gradient", traffic::none, 0, 0, true,
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       const auto& c = *x.tokens;
                       const opd::student::on_support s{opd::view(x.z, x.n, x.v), opd::view(x.sparse, 1, x.n * scored)};
                       const opd::teacher::ragged_support t{opd::view(c.top.data(), x.n * scored),
                                                            opd::view(c.top_q.data(), x.n * scored),
                                                            opd::row_offsets<>(c.set_offsets)};
                       benchmark::DoNotOptimize(opd::evaluate(be, s, t, opd::renormalised{opd::reverse_kl{}}).loss);
                   },
                   -1});
    all.push_back({"top-64, generalised", traffic::copy, 0, 0, true,
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       const opd::teacher::support t{opd::view(x.tokens->top.data(), x.n, scored),
                                                     opd::view(x.tokens->top_q.data(), x.n, scored)};
                       benchmark::DoNotOptimize(
                           opd::evaluate(be, x.student(), t, opd::generalised{opd::reverse_kl{}}).loss);
                   },
                   -1});
    all.push_back({"one token, kept set of 64", traffic::none, 0, 0, true, // V zeros are written
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       const auto& c = *x.tokens;
                       const opd::teacher::on_kept_sets t{
                           opd::teacher::samples{opd::matrix_view<const std::int32_t>(c.set.data(), x.n, 1, scored),
                                                 opd::matrix_view<const float>(c.kept_mu.data(), x.n, 1, scored),
                                                 opd::matrix_view<const float>(c.kept_q.data(), x.n, 1, scored)},
                           opd::view(c.set.data(), x.n * scored), opd::row_offsets<>(c.set_offsets)};
                       benchmark::DoNotOptimize(opd::evaluate(be, x.student(), t, opd::mc{opd::reverse_kl{}}).loss);
                   },
                   -1});
    all.push_back({"top-64, the loads alone", traffic::none, 0, 0,
                   true, // apart from the whole: each finds its lines in memory
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       be.team().run(x.n, [&](index_t r, int) {
                           const T* z = x.z + r * x.v;
                           const std::int32_t* ids = x.tokens->top.data() + r * scored;
                           unsigned bits = 0; // an integer chain, of one cycle a link
                           for (index_t j = 0; j < scored; ++j) {
                               std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t> word;
                               std::memcpy(&word, z + ids[j], sizeof word);
                               bits ^= word;
                           }
                           benchmark::DoNotOptimize(bits);
                       });
                   },
                   -1});
    all.push_back({"threshold(64)", traffic::copy, 0, 0, true,
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       const opd::teacher::weighted t{opd::view(x.tokens->kept.data(), x.n, scored),
                                                      opd::view(x.tokens->weight.data(), x.n, scored),
                                                      opd::view(x.tokens->kept_mu.data(), x.n, scored),
                                                      opd::view(x.tokens->kept_q.data(), x.n, scored),
                                                      opd::view(x.tokens->exact.data(), x.n, scored)};
                       benchmark::DoNotOptimize(opd::evaluate(be, x.student(), t, opd::mc{opd::reverse_kl{}}).loss);
                   },
                   int(peer::gathered)});
    all.push_back({"top-64, sparse gradient", traffic::none, 1, 1, true,
                   [](opd::eigen_backend& be, const rows<T>& x) {
                       const opd::student::on_support s{opd::view(x.z, x.n, x.v), opd::view(x.sparse, x.n, scored)};
                       const opd::teacher::support t{opd::view(x.tokens->top.data(), x.n, scored),
                                                     opd::view(x.tokens->top_q.data(), x.n, scored)};
                       benchmark::DoNotOptimize(opd::evaluate(be, s, t, opd::renormalised{opd::reverse_kl{}}).loss);
                   },
                   -1});
    return all;
}

// --- data ---------------------------------------------------------------------------------------------------------
/// Rows of one vocabulary size in both storages. Rows beyond the first 32 repeat them at other addresses.
struct data {
    index_t n, v;
    bench::array<float> z, y, apart, dz;
    bench::array<opd::bfloat16> z16, y16, dz16;
    std::vector<double> lse;
    std::vector<float> sparse;
    std::vector<opd::bfloat16> sparse16;
    cache tokens;

    data(index_t n_, index_t v_, index_t n_apart, bool top_first)
        : n(n_), v(v_), z(n * v), y(n * v), apart(n_apart * v), dz(n * v), z16(n * v), y16(n * v), dz16(n * v),
          lse(size_t(n)), sparse(size_t(n * scored)), sparse16(size_t(n * scored)) {
        const index_t k = std::min(n, distinct_rows);
        std::mt19937_64 generator(7);
        std::normal_distribution<float> normal;
        for (index_t i = 0; i < k * v; ++i) {
            z.data()[i] = 3 * normal(generator);
            y.data()[i] = z.data()[i] + 0.5f * normal(generator);
            if (i < n_apart * v) apart.data()[i] = 3 * normal(generator);
        }
        if (top_first) // a short row meets its maximum late more often than a long one: here it comes first
            for (index_t r = 0; r < k; ++r) z.data()[r * v] = y.data()[r * v] = 16;
        for (index_t i = 0; i < k * v; ++i) {
            z16.data()[i] = opd::element<opd::bfloat16>::store(z.data()[i]);
            y16.data()[i] = opd::element<opd::bfloat16>::store(y.data()[i]);
        }
        for (index_t r = k; r < n; ++r) {
            std::copy_n(z.data() + r % k * v, v, z.data() + r * v);
            std::copy_n(y.data() + r % k * v, v, y.data() + r * v);
            std::copy_n(z16.data() + r % k * v, v, z16.data() + r * v);
            std::copy_n(y16.data() + r % k * v, v, y16.data() + r * v);
            if (r < n_apart) std::copy_n(apart.data() + r % k * v, v, apart.data() + r * v);
        }
        draw(k);
    }

    /// Teacher logits of -inf: at the last 267 ids, or at 99 of 100 that are not the student's top token.
    void punch(bool filtered) {
        for (index_t r = 0; r < n; ++r) {
            const index_t top = std::max_element(z.data() + r * v, z.data() + (r + 1) * v) - (z.data() + r * v);
            for (index_t i = 0; i < v; ++i) {
                if (i == top || (filtered ? (i * 7919 + r) % 100 == 0 : i < v - 267)) continue;
                y.data()[r * v + i] = -std::numeric_limits<float>::infinity();
                y16.data()[r * v + i] = opd::element<opd::bfloat16>::store(y.data()[r * v + i]);
            }
        }
    }

    template <class T>
    rows<T> view(index_t count) {
        if constexpr (std::is_same_v<T, float>)
            return {z.data(), y.data(), apart.data(), dz.data(), sparse.data(), lse.data(), &tokens, count, v};
        else
            return {z16.data(), y16.data(), nullptr, dz16.data(), sparse16.data(), lse.data(), &tokens, count, v};
    }

private:
    /// The student's own draws, scored by the teacher; the teacher's top 64.
    void draw(index_t k) {
        const auto size = size_t(n * scored);
        tokens.mc.resize(size), tokens.kept.resize(size), tokens.top.resize(size);
        for (auto* f : {&tokens.mc_mu, &tokens.mc_q, &tokens.kept_mu, &tokens.kept_q, &tokens.weight, &tokens.top_q})
            f->resize(size);
        tokens.exact.resize(size);
        opd::eigen_backend be;
        const auto to = [k](auto& x) { return opd::view(x.data(), k, scored); };
        const auto zs = opd::view(z.data(), k, v), ys = opd::view(y.data(), k, v);
        std::vector<std::uint64_t> sample(static_cast<std::size_t>(k));
        std::iota(sample.begin(), sample.end(), std::uint64_t{0});
        const std::vector<std::uint32_t> position(static_cast<std::size_t>(k));
        const opd::draw_keys<> keys{.seed = 7, .sample = sample, .position = position};
        opd::draw(be, zs, opd::design::iid{scored}, keys, opd::drawn<>{to(tokens.mc), to(tokens.mc_mu)});
        opd::draw(be, zs, opd::design::threshold{scored}, keys,
                  opd::drawn<>{to(tokens.kept), to(tokens.kept_mu), to(tokens.weight), to(tokens.exact)});
        opd::token_logp(be, ys, to(tokens.mc), to(tokens.mc_q));
        opd::token_logp(be, ys, to(tokens.kept), to(tokens.kept_q));
        opd::top_k(be, ys, to(tokens.top), to(tokens.top_q));
        const auto repeat = [&](auto& x) {
            for (index_t i = k * scored; i < n * scored; ++i) x[size_t(i)] = x[size_t(i % (k * scored))];
        };
        repeat(tokens.mc), repeat(tokens.mc_mu), repeat(tokens.mc_q), repeat(tokens.top), repeat(tokens.top_q);
        tokens.set = tokens.top;
        tokens.set_offsets.resize(size_t(n + 1));
        for (index_t r = 0; r < n; ++r) {
            std::sort(tokens.set.begin() + r * scored, tokens.set.begin() + (r + 1) * scored);
            tokens.set_offsets[size_t(r + 1)] = (r + 1) * scored;
        }
        repeat(tokens.kept), repeat(tokens.kept_mu), repeat(tokens.kept_q), repeat(tokens.weight), repeat(tokens.exact);
    }
};

// --- running and reporting -------------------------------------------------------------------------------------------
struct line {
    std::string operation, type, teacher, limit_name;
    int threads;
    index_t rows;
    double ns, limit_ns, l2_ns, plain_ns, naive_ns, bar;
    int samples, discarded;
    bool minima;    ///< of a sample every round was disturbed: figures are the smallest of interleaved rounds
    double pass_ns; ///< of log-sum-exp in L2, in the same rounds

    double needed() const { return counted(operation).passes(); } ///< in passes; 0: nobody counted
    double passes() const { return l2_ns / pass_ns; }
    double share() const { return ns > 0 ? limit_ns / ns : 0; }
    double floor() const { return ns > 0 ? std::max(limit_ns, needed() * pass_ns) / ns : 0; }
    std::string verdict() const {
        if (bar == 0) return "";
        return marked(share() >= bar ? "met" : floor() >= 0.85 ? "met (floor)" : "MISSED");
    }
    std::string marked(std::string text) const { return minima ? text + "~" : text; }
};

struct settings {
    bool quick = false;
    std::vector<index_t> row_counts = {64, 512, 1024, 2048}, threads = {1, 2};
    std::string filter, out, holes;
};

struct peers {
    std::map<std::string, std::pair<double, double>> ns; // operation: plain, naive
};

template <class T>
const char* type_name() {
    return std::is_same_v<T, float> ? "float" : "bf16";
}

/// Rounds over every operation and every limit; one line an operation.
template <class T>
void measure(const settings& set, data& long_rows, data& short_rows, index_t n, int threads, bool apart,
             const peers& compared, std::vector<line>& report) {
    opd::thread_team team(threads);
    bench::gate gate(team);
    opd::thread_team single(1);
    bench::gate single_gate(single);
    opd::eigen_backend backend{.threads = threads}, one{.threads = 1};
    rows<T> big = long_rows.view<T>(n), small = short_rows.view<T>(1);
    if (apart) big.y = big.apart;

    std::vector<operation<T>> all = operations<T>();
    if (!set.filter.empty())
        std::erase_if(all, [&](const auto& o) { // the unit stays
            return o.name != "log-sum-exp" && o.name.find(set.filter) == std::string::npos;
        });
    std::vector<bench::samples> times(all.size()), again(all.size()), cached(all.size());
    std::map<traffic, bench::samples> limits;
    // bytes, whatever the storage: limits move them as floats
    const index_t floats = n * vocab * index_t(sizeof(T)) / 4;
    const auto* a = reinterpret_cast<const float*>(big.z);
    const auto* b = reinterpret_cast<const float*>(big.y);
    auto* to = reinterpret_cast<float*>(big.dz);
    const int rounds = set.quick ? 5 : n <= 64 ? 15 : n <= 512 ? 9 : n <= 1024 ? 5 : 3;
    for (int round = -1; round < rounds; ++round) { // round -1 warms up and is forgotten
        for (const traffic t : {traffic::read, traffic::two_reads, traffic::copy, traffic::two_reads_write})
            gate.sample(limits[t], [&] { bench::move(team, t, a, b, to, floats); });
        for (std::size_t i = 0; i < all.size(); ++i) {
            gate.sample(times[i], [&] { all[i].run(backend, big); });
            if (all[i].limit == traffic::none) gate.sample(again[i], [&] { all[i].run(backend, big); });
            all[i].run(one, small);
            for (int k = 0; k < 3; ++k)
                single_gate.sample(cached[i], [&] {
                    for (int call = 0; call < 5; ++call) all[i].run(one, small);
                });
        }
        if (round < 0) {
            for (auto& s : times) s = {};
            for (auto& s : again) s = {};
            for (auto& s : cached) s = {};
            limits.clear();
        }
    }
    std::printf("\n%s, %lld rows of %lld, %d thread%s, teacher %s   (probe %.0f GFLOP/s; limits, ns an element:",
                type_name<T>(), static_cast<long long>(n), static_cast<long long>(vocab), threads,
                threads == 1 ? "" : "s", apart ? "apart" : "near", gate.best());
    const double elements = double(n) * double(vocab);
    for (const auto& [kind, s] : limits) std::printf(" %s %.3f", name_of(kind), s.figure() / elements * 1e9);
    std::printf(")\n%-26s %9s %9s %9s %6s %6s %6s %6s %5s %-12s %9s %9s %s\n", "", "ns/elem", "limit", "in L2",
                "passes", "needed", "share", "floor", "bar", "", "Eigen", "naive", "samples");
    const std::size_t unit = std::size_t(
        std::find_if(all.begin(), all.end(), [](const auto& o) { return o.name == "log-sum-exp"; }) - all.begin());
    bool any_minima = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const operation<T>& o = all[i];
        const bool minima = times[i].seconds.empty() || cached[i].seconds.empty() ||
                            (o.limit == traffic::none ? again[i] : limits[o.limit]).seconds.empty();
        line l{o.name,
               type_name<T>(),
               apart ? "apart" : "near",
               name_of(o.limit),
               threads,
               n,
               times[i].figure(minima) / elements * 1e9,
               o.limit == traffic::none ? 0 : limits[o.limit].figure(minima) / elements * 1e9,
               cached[i].figure(minima) / (5.0 * double(cached_vocab) * threads) * 1e9,
               0,
               0,
               threads == 1 ? o.bar_one : o.bar_two,
               int(times[i].seconds.size()),
               times[i].discarded(),
               minima,
               cached[unit].figure(minima) / (5.0 * double(cached_vocab) * threads) * 1e9};
        if (o.limit == traffic::none) { // O(k) a row: time a row, no limit. Scattered lines: from memory, and in cache
            const double cold = times[i].figure(minima) / double(n) * 1e6,
                         warm = again[i].figure(minima) / double(n) * 1e6;
            std::printf("%-26s %6.3f us a row from memory, %6.3f just after%7s %-22s %19d/%d\n", o.name.c_str(), cold,
                        warm, "",
                        l.marked(l.bar == 0      ? "a floor"
                                 : cold <= l.bar ? "met"
                                 : warm <= l.bar ? "met just after"
                                                 : "MISSED")
                            .c_str(),
                        l.samples, l.discarded);
        } else {
            if (const auto p = compared.ns.find(o.name);
                p != compared.ns.end() && threads == 1 && std::is_same_v<T, float>)
                l.plain_ns = p->second.first, l.naive_ns = p->second.second;
            std::printf("%-26s %9.3f %9.3f %9.3f %6.2f", o.name.c_str(), l.ns, l.limit_ns, l.l2_ns, l.passes());
            if (l.needed() > 0)
                std::printf(" %6.0f", l.needed());
            else
                std::printf(" %6s", "");
            std::printf(" %6.2f %6.2f", l.share(), l.floor());
            if (l.bar > 0)
                std::printf(" %5.2f", l.bar);
            else
                std::printf(" %5s", "");
            std::printf(" %-12s", l.verdict().c_str());
            if (l.plain_ns > 0)
                std::printf(" %9.3f %9.3f", l.plain_ns, l.naive_ns);
            else
                std::printf(" %9s %9s", "", "");
            std::printf(" %d/%d\n", l.samples, l.discarded);
        }
        report.push_back(l);
        any_minima |= minima;
    }
    if (any_minima) std::puts("~ every round of a sample was disturbed: the smallest times of interleaved rounds");
    std::fflush(stdout);
}

/// Plain Eigen and naive times an element, on a few rows.
peers measure_peers(const settings& set, data& long_rows) {
    peers out;
    opd::thread_team single(1);
    bench::gate gate(single);
    bench::plain plain(vocab);
    bench::naive naive(vocab);
    rows<float> x = long_rows.view<float>(8);
    for (const auto& o : operations<float>()) {
        if (o.compared < 0 || o.name.find(set.filter) == std::string::npos) continue;
        bench::samples with_eigen, by_hand;
        for (int round = 0; round < 5; ++round) {
            gate.sample(with_eigen, [&] {
                for (index_t r = 0; r < 8; ++r)
                    benchmark::DoNotOptimize(
                        plain.run(peer(o.compared), x.z + r * vocab, x.y + r * vocab, x.dz + r * vocab, vocab));
            });
            gate.sample(by_hand, [&] {
                for (index_t r = 0; r < 2; ++r)
                    benchmark::DoNotOptimize(
                        naive.run(peer(o.compared), x.z + r * vocab, x.y + r * vocab, x.dz + r * vocab, vocab));
            });
        }
        const bool minima = with_eigen.seconds.empty() || by_hand.seconds.empty();
        out.ns[o.name] = {with_eigen.figure(minima) / (8.0 * vocab) * 1e9,
                          by_hand.figure(minima) / (2.0 * vocab) * 1e9};
    }
    return out;
}

void write_json(const std::string& path, const std::vector<line>& report) {
    std::FILE* f = std::fopen(path.c_str(), "w");
    if (!f) {
        std::fprintf(stderr, "error: cannot write %s\n", path.c_str());
        std::exit(1);
    }
    std::fprintf(f, "{\n  \"context\": {\"vocabulary\": %lld, \"lanes\": %d, \"l2_row\": %lld},\n  \"benchmarks\": [\n",
                 static_cast<long long>(vocab), opd::lanes::width, static_cast<long long>(cached_vocab));
    for (std::size_t i = 0; i < report.size(); ++i) {
        const line& l = report[i];
        std::fprintf(
            f,
            "    {\"name\": \"%s\", \"type\": \"%s\", \"teacher\": \"%s\", \"threads\": %d, \"rows\": %lld, "
            "\"ns_per_element\": %.5f, \"limit\": \"%s\", \"limit_ns\": %.5f, \"l2_ns\": %.5f, \"passes\": %.3f, "
            "\"needed\": %.0f, \"share\": %.4f, \"floor\": %.4f, \"bar\": %.2f, \"verdict\": \"%s\", \"eigen_ns\": "
            "%.4f, \"naive_ns\": %.4f, "
            "\"samples\": %d, \"discarded\": %d, \"minima\": %s}%s\n",
            l.operation.c_str(), l.type.c_str(), l.teacher.c_str(), l.threads, static_cast<long long>(l.rows), l.ns,
            l.limit_name.c_str(), l.limit_ns, l.l2_ns, l.passes(), l.needed(), l.share(), l.floor(), l.bar,
            l.verdict().c_str(), l.plain_ns, l.naive_ns, l.samples, l.discarded, l.minima ? "true" : "false",
            i + 1 < report.size() ? "," : "");
    }
    std::fprintf(f, "  ]\n}\n");
    std::fclose(f);
}

/// bfloat16 against float, same rows and threads: within 1.15 on one thread, no slower on two.
void compare_types(const std::vector<line>& report) {
    std::printf("\nbf16 / float, time an element (bars: 1.15 on one thread, 1.00 on two)\n");
    for (const line& h : report) {
        if (h.type != "bf16" || h.limit_name == "-") continue;
        for (const line& f : report)
            if (f.type == "float" && f.teacher == h.teacher && f.operation == h.operation && f.rows == h.rows &&
                f.threads == h.threads && f.ns > 0 && h.ns > 0)
                std::printf("%-26s %5lld rows, %d thread%s %5.2f %s%s\n", h.operation.c_str(),
                            static_cast<long long>(h.rows), h.threads, h.threads == 1 ? " " : "s", h.ns / f.ns,
                            h.ns / f.ns <= (h.threads == 1 ? 1.15 : 1.0) ? "met" : "MISSED",
                            h.minima || f.minima ? "~" : "");
    }
}

std::vector<index_t> numbers(const char* option, const char* list) {
    std::vector<index_t> all;
    for (const char* p = list; *p;) {
        char* end = nullptr;
        const long long n = std::strtoll(p, &end, 10);
        if (end == p || n < 1) {
            std::fprintf(stderr, "error: %s takes positive numbers, not '%s'\n", option, p);
            std::exit(2);
        }
        all.push_back(n);
        p = *end == ',' ? end + 1 : end;
    }
    return all;
}

settings parse(int argc, char** argv) {
    settings s;
    const auto value = [](const char* arg, const char* name) -> const char* {
        const std::size_t n = std::strlen(name);
        return std::strncmp(arg, name, n) == 0 ? arg + n : nullptr;
    };
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--quick") == 0) {
            s.quick = true;
            s.row_counts = {64};
        } else if (std::strcmp(argv[i], "--small-pages") == 0) {
            bench::huge_pages = false;
        } else if (const char* rows = value(argv[i], "--rows=")) {
            s.row_counts = numbers("--rows", rows);
        } else if (const char* threads = value(argv[i], "--threads=")) {
            s.threads = numbers("--threads", threads);
        } else if (const char* holes = value(argv[i], "--holes=")) {
            s.holes = holes;
            if (s.holes != "padded" && s.holes != "filtered") {
                std::fprintf(stderr, "error: --holes takes padded or filtered, not '%s'\n", holes);
                std::exit(2);
            }
        } else if (const char* text = value(argv[i], "--benchmark_filter=")) {
            s.filter = text;
        } else if (const char* path = value(argv[i], "--benchmark_out=")) {
            s.out = path;
        } else if (std::strcmp(argv[i], "--benchmark_out_format=json") != 0) {
            std::fprintf(stderr, "error: unknown option '%s'\n", argv[i]);
            std::exit(2);
        }
    }
    return s;
}

/// Bytes the machine can give away.
double available_memory() {
    double kilobytes = 1e9;
    if (std::FILE* f = std::fopen("/proc/meminfo", "r")) {
        char text[256];
        while (std::fgets(text, sizeof text, f))
            if (std::sscanf(text, "MemAvailable: %lf", &kilobytes) == 1) break;
        std::fclose(f);
    }
    return kilobytes * 1024;
}

} // namespace

int main(int argc, char** argv) {
    const settings set = parse(argc, argv);
    std::vector<index_t> counts;
    for (const index_t n : set.row_counts) // 3 arrays of float, 3 of bfloat16
        if (double(n) * double(vocab) * 18 < 0.7 * available_memory())
            counts.push_back(n);
        else
            std::printf("N = %lld is left out: not enough memory\n", static_cast<long long>(n));
    if (counts.empty()) return 1;
    const index_t most = *std::max_element(counts.begin(), counts.end());
    const index_t main_count = std::find(counts.begin(), counts.end(), 512) != counts.end() ? 512 : counts.front();
    data long_rows(std::max<index_t>(most, 8), vocab, std::max<index_t>(main_count, 8), false);
    data short_rows(1, cached_vocab, 1, true);

    std::vector<line> report;
    const peers compared = measure_peers(set, long_rows);
    if (!set.holes.empty()) {
        long_rows.punch(set.holes == "filtered");
        short_rows.punch(set.holes == "filtered");
    }
    const auto cores = index_t(std::thread::hardware_concurrency());
    for (const index_t n : counts)
        for (const index_t wanted : set.threads) {
            if (wanted > cores) continue;
            const int threads = int(wanted);
            measure<float>(set, long_rows, short_rows, n, threads, false, compared, report);
            if (n == main_count) measure<float>(set, long_rows, short_rows, n, threads, true, compared, report);
            measure<opd::bfloat16>(set, long_rows, short_rows, n, threads, false, compared, report);
        }
    compare_types(report);
    if (!set.out.empty()) write_json(set.out, report);
    return 0;
}
