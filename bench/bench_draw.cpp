// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What draws from rows of logits and scores of given ids cost, in passes of one log-sum-exp over the same rows:
// V = 151,936, logits N(0,3), 8 rows (float: 4.9 MB, in the L3 cache), float and bfloat16, CPU backend, one thread.
// Then floors: one read of the rows, and the noise of every token, which Gumbel-max compares. Last, plain code that one
// would write in their place, on one thread and with the same flags; it gives ids, and log mu only where it has the
// normaliser anyway.
//
//   bench_draw [--quick] [--benchmark_filter=substring] [--benchmark_out=file.json]
//
// Rounds are interleaved, and a log-sum-exp stands before every sample. Samples beside a slow multiply-add probe are
// thrown away (harness.hpp). `passes`: median over median; `of min`: smallest time over smallest time. Where all
// samples of a line were disturbed both are of the smallest times, marked ~. Keys change from call to call, so that no
// draw is repeated. Before anything is timed, best ids and Gumbel-max tokens of plain code and library are compared.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <benchmark/benchmark.h>

#include "harness.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/cpu/noise_lanes.hpp"
#include "opd/draw.hpp"
#include "opd/element.hpp"
#include "opd/rng.hpp"
#include "opd/score.hpp"

namespace {

using opd::index_t;
namespace design = opd::design;

constexpr index_t vocab = 151'936, row_count = 8, scored = 64;
constexpr std::uint64_t seed = 7;

/// The rows in storage T, what draws are keyed by, and room for what is written.
template <class T>
struct data {
    bench::array<T> z{row_count * vocab}; // (N,V)
    std::vector<std::uint64_t> sample;    // (N)
    std::vector<std::uint32_t> position;  // (N)
    std::vector<std::int32_t> drawn_ids;  // (N,64) of iid, as a student's rollouts
    std::vector<std::int32_t> ids;        // (N,64)
    std::vector<float> log_p, weight;     // (N,64)
    std::vector<std::uint8_t> exact;      // (N,64)
    std::vector<float> tail;              // (N)
    std::vector<double> lse;              // (N)
    opd::cpu_backend be{.threads = 1};

    data()
        : sample(size_t(row_count)), position(size_t(row_count)), drawn_ids(size_t(row_count * scored)),
          ids(drawn_ids.size()), log_p(ids.size()), weight(ids.size()), exact(ids.size()), tail(size_t(row_count)),
          lse(size_t(row_count)) {
        std::mt19937_64 generator(7);
        std::normal_distribution<float> normal;
        for (index_t i = 0; i < row_count * vocab; ++i) z.data()[i] = opd::element<T>::store(3 * normal(generator));
        std::iota(sample.begin(), sample.end(), std::uint64_t{0});
        draw(design::iid{scored});
        drawn_ids = ids;
    }

    opd::matrix_view<const T> logits() const { return opd::view(static_cast<const T*>(z.data()), row_count, vocab); }

    template <class Design>
    void draw(Design d, opd::filter f = {}) {
        for (auto& p : position) ++p;
        const index_t m = d.columns();
        opd::drawn<> to{.ids = opd::view(ids.data(), row_count, m), .log_mu = opd::view(log_p.data(), row_count, m)};
        if constexpr (!std::is_same_v<Design, design::greedy> && !std::is_same_v<Design, design::gumbel> &&
                      !std::is_same_v<Design, design::iid>) {
            to.weight = opd::view(weight.data(), row_count, m);
            to.exact = opd::view(exact.data(), row_count, m);
        }
        opd::draw(be, logits(), d,
                  {.seed = seed,
                   .sample = opd::view(sample.data(), row_count),
                   .position = opd::view(position.data(), row_count)},
                  to, {.filter = f});
    }
    void log_sum_exp() { opd::log_sum_exp(be, logits(), opd::view(lse.data(), row_count)); }
    void best(bool with_tail) {
        opd::top_k(be, logits(), opd::view(ids.data(), row_count, scored), opd::view(log_p.data(), row_count, scored),
                   1, {}, with_tail ? opd::view(tail.data(), row_count) : opd::vector_view<float>{});
    }
    /// The bits that a Gumbel-max token of each row compares.
    void noise() {
        using opd::detail::noise_lanes;
        for (index_t r = 0; r < row_count; ++r) {
            const noise_lanes of_row({seed, opd::noise_stream::rollout, sample[size_t(r)], ++position[size_t(r)]}, 0);
            noise_lanes::uvec all{};
            for (index_t i = 0; i < vocab; i += noise_lanes::tokens) {
                noise_lanes::uvec bits[4];
                of_row.block(static_cast<std::uint32_t>(i / 4), bits);
                all ^= (bits[0] ^ bits[1]) ^ (bits[2] ^ bits[3]);
            }
            benchmark::DoNotOptimize(all);
        }
    }
    /// Every byte of the rows, once.
    void read() {
        const auto* floats = reinterpret_cast<const float*>(z.data());
        bench::move(be.team(), bench::traffic::read, floats, nullptr, nullptr,
                    row_count * vocab * index_t(sizeof(T)) / 4);
    }
    void token_logp(bool with_tail) {
        opd::token_logp(be, logits(), opd::view(static_cast<const std::int32_t*>(drawn_ids.data()), row_count, scored),
                        opd::view(log_p.data(), row_count, scored), 1, {}, {},
                        with_tail ? opd::view(tail.data(), row_count) : opd::vector_view<float>{});
    }
};

// --- in their place, without the library --------------------------------------------------------------------------
/// Row by row, with buffers that are kept. A row of another type is made one of floats first.
template <class T>
struct plain {
    data<T>& d;
    std::vector<float> row = std::vector<float>(size_t(vocab));
    std::vector<std::int32_t> order = std::vector<std::int32_t>(size_t(vocab));
    std::vector<double> upto = std::vector<double>(size_t(vocab));
    struct weighted_id {
        float p;
        std::int32_t id;
    };
    std::vector<weighted_id> by_weight = std::vector<weighted_id>(size_t(vocab));
    std::mt19937_64 generator{7};

    const float* floats(index_t r) {
        const T* z = d.z.data() + r * vocab;
        if constexpr (std::is_same_v<T, float>) {
            return z;
        } else {
            for (index_t i = 0; i < vocab; ++i) row[size_t(i)] = static_cast<float>(opd::element<T>::load(z[i]));
            return row.data();
        }
    }
    /// One of the first `kept` of by_weight, whose sum is `mass`.
    std::int32_t one_of(size_t kept, double mass) {
        size_t i = 0;
        double left = uniform() * mass;
        while (i + 1 < kept && (left -= double(by_weight[i].p)) >= 0) ++i;
        return by_weight[i].id;
    }
    double uniform() { return (double(generator() >> 11) + 0.5) * 0x1p-53; }

    void max_element() {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            d.ids[size_t(r)] = static_cast<std::int32_t>(std::max_element(z, z + vocab) - z);
        }
    }
    /// The best ids, by a heap of 64.
    void partial_sort() {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + scored, order.end(),
                              [z](std::int32_t a, std::int32_t b) { return z[a] > z[b]; });
            std::copy_n(order.begin(), scored, d.ids.begin() + r * scored);
        }
    }
    void nth_element() {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            const auto better = [z](std::int32_t a, std::int32_t b) { return z[a] > z[b]; };
            std::iota(order.begin(), order.end(), 0);
            std::nth_element(order.begin(), order.begin() + (scored - 1), order.end(), better);
            std::sort(order.begin(), order.begin() + scored, better);
            std::copy_n(order.begin(), scored, d.ids.begin() + r * scored);
        }
    }
    /// The library's token, by its scalar reference.
    void gumbel_keyed() {
        for (auto& p : d.position) ++p;
        for (index_t r = 0; r < row_count; ++r) {
            const opd::noise_row noise(seed, opd::noise_stream::rollout, d.sample[size_t(r)], d.position[size_t(r)]);
            d.ids[size_t(r)] = static_cast<std::int32_t>(opd::gumbel_max(noise, 0, floats(r), vocab));
        }
    }
    /// With noise of 23 bits that nothing reproduces.
    void gumbel() {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            float best = -std::numeric_limits<float>::infinity();
            index_t winner = -1;
            for (index_t i = 0; i < vocab; ++i) {
                const float u = (static_cast<float>(generator() >> 41) + 0.5f) * 0x1p-23f;
                const float score = z[i] - std::log(-std::log(u));
                if (score > best) best = score, winner = i;
            }
            d.ids[size_t(r)] = static_cast<std::int32_t>(winner);
        }
    }
    void iid() {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            const float top = *std::max_element(z, z + vocab);
            for (index_t i = 0; i < vocab; ++i) upto[size_t(i)] = double(std::exp(z[i] - top));
            std::partial_sum(upto.begin(), upto.end(), upto.begin());
            const double total = upto.back(), lse = double(top) + std::log(total);
            for (index_t j = 0; j < scored; ++j) {
                const auto at = std::upper_bound(upto.begin(), upto.end(), uniform() * total) - upto.begin();
                const index_t id = std::min<index_t>(at, vocab - 1);
                d.ids[size_t(r * scored + j)] = static_cast<std::int32_t>(id);
                d.log_p[size_t(r * scored + j)] = static_cast<float>(double(z[id]) - lse);
            }
        }
    }
    /// One token of the k best.
    void top_k(index_t k) {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + k, order.end(),
                              [z](std::int32_t a, std::int32_t b) { return z[a] > z[b]; });
            double mass = 0;
            for (size_t i = 0; i < size_t(k); ++i) {
                by_weight[i] = {std::exp(z[order[i]] - z[order[0]]), order[i]};
                mass += double(by_weight[i].p);
            }
            d.ids[size_t(r)] = one_of(size_t(k), mass);
        }
    }
    /// One token of what min_p keeps.
    void min_p(float share) {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            const float top = *std::max_element(z, z + vocab), least = top + std::log(share);
            size_t kept = 0;
            double mass = 0;
            for (index_t i = 0; i < vocab; ++i) {
                if (z[i] < least) continue;
                by_weight[kept] = {std::exp(z[i] - top), static_cast<std::int32_t>(i)};
                mass += double(by_weight[kept++].p);
            }
            d.ids[size_t(r)] = one_of(kept, mass);
        }
    }
    /// One token of what top_p keeps.
    void top_p(double share) {
        for (index_t r = 0; r < row_count; ++r) {
            const float* z = floats(r);
            const float top = *std::max_element(z, z + vocab);
            double total = 0;
            for (index_t i = 0; i < vocab; ++i) {
                const float p = std::exp(z[i] - top);
                by_weight[size_t(i)] = {p, static_cast<std::int32_t>(i)};
                total += double(p);
            }
            std::sort(by_weight.begin(), by_weight.end(),
                      [](const weighted_id& a, const weighted_id& b) { return a.p > b.p; });
            size_t kept = 0;
            double mass = 0;
            while (kept < by_weight.size() && mass < share * total) mass += double(by_weight[kept++].p);
            d.ids[size_t(r)] = one_of(kept, mass);
        }
    }
};

// --- running and reporting ----------------------------------------------------------------------------------------
struct operation {
    std::string name;
    double bar;       ///< passes of a log-sum-exp; 0: none
    std::string like; ///< of plain code: what it stands for
    std::function<void()> run;
};

template <class T>
std::vector<operation> operations(data<T>& d, plain<T>& p) {
    return {
        {"greedy", 0, "", [&] { d.draw(design::greedy{}); }},
        {"Gumbel-max token", 6, "", [&] { d.draw(design::gumbel{}); }},
        {"64 iid", 2, "", [&] { d.draw(design::iid{scored}); }},
        {"threshold(64)", 3, "", [&] { d.draw(design::threshold{scored}); }},
        {"head 32 + tail 32", 3, "",
         [&] {
             d.draw(design::head_tail{scored / 2, scored / 2});
         }},
        {"Gumbel top-64", 4, "", [&] { d.draw(design::gumbel_top{scored}); }},
        {"top-64", 3, "", [&] { d.best(false); }},
        {"top-64, tail", 3, "", [&] { d.best(true); }},
        {"token_logp of 64", 0, "", [&] { d.token_logp(false); }},
        {"token_logp of 64, tail", 1.3, "", [&] { d.token_logp(true); }},
        {"Gumbel, top_k 50", 0, "", [&] { d.draw(design::gumbel{}, {.top_k = 50}); }},
        {"Gumbel, min_p .05", 0, "", [&] { d.draw(design::gumbel{}, {.min_p = 0.05f}); }},
        {"Gumbel, top_p .95", 0, "", [&] { d.draw(design::gumbel{}, {.top_p = 0.95f}); }},
        {"Gumbel, top_p .9, T .6", 0, "", [&] { d.draw(design::gumbel{}, {.temperature = 0.6f, .top_p = 0.9f}); }},
        {"a read of the rows", 0, "", [&] { d.read(); }},
        {"the noise's bits alone", 0, "", [&] { d.noise(); }},
        {"std::max_element", 0, "greedy", [&] { p.max_element(); }},
        {"gumbel_max, scalar", 0, "Gumbel-max token", [&] { p.gumbel_keyed(); }},
        {"mt19937, two std::log", 0, "Gumbel-max token", [&] { p.gumbel(); }},
        {"softmax, partial_sum", 0, "64 iid", [&] { p.iid(); }},
        {"std::partial_sort", 0, "top-64", [&] { p.partial_sort(); }},
        {"std::nth_element", 0, "top-64", [&] { p.nth_element(); }},
        {"partial_sort, one draw", 0, "Gumbel, top_k 50", [&] { p.top_k(50); }},
        {"max_element, one draw", 0, "Gumbel, min_p .05", [&] { p.min_p(0.05f); }},
        {"softmax, sort, one draw", 0, "Gumbel, top_p .95", [&] { p.top_p(0.95); }},
    };
}

/// Plain code finds what the library finds. Which of equal logits are listed is its own matter.
template <class T>
void compare(data<T>& d, plain<T>& p) {
    const auto require = [](bool same, const char* what) {
        if (same) return;
        std::fprintf(stderr, "error: %s: plain code and library differ\n", what);
        std::exit(1);
    };
    const auto logits_of = [&](index_t columns) {
        std::vector<float> z;
        for (index_t i = 0; i < row_count * columns; ++i)
            z.push_back(
                static_cast<float>(opd::element<T>::load(d.z.data()[i / columns * vocab + index_t(d.ids[size_t(i)])])));
        return z;
    };
    d.best(false);
    const auto best = logits_of(scored);
    p.partial_sort();
    require(logits_of(scored) == best, "partial_sort");
    p.nth_element();
    require(logits_of(scored) == best, "nth_element");
    const auto before = d.position;
    for (int call = 0; call < 5; ++call) {
        d.position = before;
        d.position[0] += std::uint32_t(call);
        const auto here = d.position;
        d.draw(design::gumbel{});
        const std::vector<std::int32_t> tokens(d.ids.begin(), d.ids.begin() + row_count);
        d.position = here;
        p.gumbel_keyed();
        require(std::equal(tokens.begin(), tokens.end(), d.ids.begin()), "gumbel_max");
    }
}

struct line {
    std::string operation, type, like;
    double us, passes, passes_of_min, bar, faster; ///< faster: of plain code, its time over the library's
    int samples, discarded;
    bool minima; ///< of a sample every round was disturbed: figures are the smallest of interleaved rounds

    std::string verdict() const {
        if (bar == 0) return "";
        return std::string(passes <= bar ? "met" : "MISSED") + (minima ? "~" : "");
    }
};

struct settings {
    bool quick = false;
    std::string filter, out;
};

/// Rounds over every operation with a log-sum-exp before each; one line an operation.
template <class T>
void measure(const settings& set, std::vector<line>& report) {
    const char* type = std::is_same_v<T, float> ? "float" : "bf16";
    data<T> d;
    plain<T> p{d};
    compare(d, p);
    opd::thread_team team(1);
    bench::gate gate(team);
    std::vector<operation> all = operations(d, p);
    if (!set.filter.empty())
        std::erase_if(all, [&](const auto& o) { return o.name.find(set.filter) == std::string::npos; });

    const auto calls_of = [&](const std::function<void()>& f) { // a sample lasts a millisecond at least
        f();
        const double start = bench::now();
        f();
        return std::max(1, int(std::ceil(1e-3 / (bench::now() - start))));
    };
    const std::function<void()> one_pass = [&] { d.log_sum_exp(); };
    const int pass_calls = calls_of(one_pass);
    bench::samples passes;
    std::vector<bench::samples> times(all.size());
    std::vector<int> calls;
    for (const auto& o : all) calls.push_back(calls_of(o.run));
    const int rounds = set.quick ? 5 : 25;
    for (int round = -1; round < rounds; ++round) { // round -1 warms up and is forgotten
        for (std::size_t i = 0; i < all.size(); ++i) {
            one_pass(); // whatever was in the cache before
            gate.sample(passes, [&] {
                for (int call = 0; call < pass_calls; ++call) one_pass();
            });
            all[i].run();
            gate.sample(times[i], [&] {
                for (int call = 0; call < calls[i]; ++call) all[i].run();
            });
        }
        if (round < 0) {
            passes = {};
            for (auto& s : times) s = {};
        }
    }

    const auto us = [](const bench::samples& s, bool minima, int n) {
        return s.figure(minima) / (double(n) * double(row_count)) * 1e6;
    };
    std::printf("\n%s, %lld rows of %lld, 1 thread   (probe %.0f GFLOP/s; a log-sum-exp: %.1f us a row, least %.1f, "
                "%.3f ns an element)\n",
                type, static_cast<long long>(row_count), static_cast<long long>(vocab), gate.best(),
                us(passes, false, pass_calls), us(passes, true, pass_calls),
                us(passes, false, pass_calls) / double(vocab) * 1e3);
    std::printf("%-26s %10s %8s %8s %5s %-8s %s\n", "", "us a row", "passes", "of min", "bar", "", "samples");
    bool any_minima = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const operation& o = all[i];
        const bool minima = times[i].seconds.empty() || passes.seconds.empty();
        line l{o.name,
               type,
               o.like,
               us(times[i], minima, calls[i]),
               us(times[i], minima, calls[i]) / us(passes, minima, pass_calls),
               us(times[i], true, calls[i]) / us(passes, true, pass_calls),
               o.bar,
               0,
               int(times[i].seconds.size()),
               times[i].discarded(),
               minima};
        if (!o.like.empty())
            for (const line& ours : report)
                if (ours.operation == o.like && ours.type == type) l.faster = l.passes / ours.passes;
        std::printf("%-26s %10.1f %8.2f %8.2f", o.name.c_str(), l.us, l.passes, l.passes_of_min);
        if (l.bar > 0)
            std::printf(" %5.1f", l.bar);
        else
            std::printf(" %5s", "");
        std::printf(" %-8s %d/%d", l.bar > 0 ? l.verdict().c_str() : minima ? "~" : "", l.samples, l.discarded);
        if (l.faster > 0) std::printf("   %.2f times %s", l.faster, o.like.c_str());
        std::puts("");
        report.push_back(l);
        any_minima |= minima;
    }
    if (any_minima) std::puts("~ every round of a sample was disturbed: the smallest times of interleaved rounds");
    std::fflush(stdout);
}

void write_json(const std::string& path, const std::vector<line>& report) {
    std::FILE* f = std::fopen(path.c_str(), "w");
    if (!f) {
        std::fprintf(stderr, "error: cannot write %s\n", path.c_str());
        std::exit(1);
    }
    std::fprintf(f, "{\n  \"context\": {\"vocabulary\": %lld, \"rows\": %lld, \"lanes\": %d},\n  \"benchmarks\": [\n",
                 static_cast<long long>(vocab), static_cast<long long>(row_count), opd::lanes::width);
    for (std::size_t i = 0; i < report.size(); ++i) {
        const line& l = report[i];
        std::fprintf(f,
                     "    {\"name\": \"%s\", \"type\": \"%s\", \"like\": \"%s\", \"us_a_row\": %.4f, \"passes\": %.4f, "
                     "\"passes_of_min\": %.4f, \"bar\": %.2f, \"verdict\": \"%s\", \"samples\": %d, \"discarded\": %d, "
                     "\"minima\": %s}%s\n",
                     l.operation.c_str(), l.type.c_str(), l.like.c_str(), l.us, l.passes, l.passes_of_min, l.bar,
                     l.verdict().c_str(), l.samples, l.discarded, l.minima ? "true" : "false",
                     i + 1 < report.size() ? "," : "");
    }
    std::fprintf(f, "  ]\n}\n");
    std::fclose(f);
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

} // namespace

int main(int argc, char** argv) {
    const settings set = parse(argc, argv);
    std::vector<line> report;
    measure<float>(set, report);
    measure<opd::bfloat16>(set, report);
    if (!set.out.empty()) write_json(set.out, report);
    return 0;
}
