// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a benchmark needs on a machine that it does not have for itself: memory in huge pages; samples between two
// probes of multiply-add throughput, of which the disturbed do not count while there are others; and the memory limits
// that times are compared with, measured in the same rounds.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "opd/config.hpp"
#include "opd/lanes.hpp"
#include "opd/threads.hpp"

namespace bench {

using opd::index_t;
using opd::lanes;

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds of processor time of all threads.
inline double processor_time() { return double(std::clock()) / CLOCKS_PER_SEC; }

/// Whether arrays lie in huge pages, where the system gives them on request.
inline bool huge_pages = true;

/// n elements, all touched.
template <class T>
class array {
public:
    explicit array(index_t n) {
        constexpr std::size_t huge = std::size_t{2} << 20;
        const std::size_t bytes = (static_cast<std::size_t>(n) * sizeof(T) + huge) / huge * huge;
        void* p = std::aligned_alloc(huge, bytes);
        if (!p) throw std::bad_alloc();
#if defined(__linux__)
        ::madvise(p, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
        std::fill_n(static_cast<unsigned char*>(p), bytes, static_cast<unsigned char>(0));
        data_ = static_cast<T*>(p);
    }
    array(array&& o) noexcept : data_(o.data_) { o.data_ = nullptr; }
    array& operator=(array&&) = delete;
    ~array() { std::free(data_); }
    T* data() const { return data_; }

private:
    T* data_ = nullptr;
};

/// GFLOP/s of dependent multiply-adds in registers, ten chains a thread of so many steps (5,000 take about ten
/// microseconds). The threads start together, and the slowest counts: two threads that share one core show half the
/// rate.
inline double fma_rate(opd::thread_team& team, int steps = 5000) {
    std::atomic<int> arrived{0};
    std::atomic<double> slowest{1e300};
    team.run(team.size(), [&](index_t, int) {
        arrived.fetch_add(1);
        for (const double since = now(); arrived.load() < team.size() && now() - since < 2e-3;) {}
        const double start = now();
        const lanes m(0.999), c(0.01);
        lanes a0(0), a1(1), a2(2), a3(3), a4(4), a5(5), a6(6), a7(7), a8(8), a9(9);
        for (int i = 0; i < steps; ++i) {
            a0 = fma(a0, m, c), a1 = fma(a1, m, c), a2 = fma(a2, m, c), a3 = fma(a3, m, c), a4 = fma(a4, m, c);
            a5 = fma(a5, m, c), a6 = fma(a6, m, c), a7 = fma(a7, m, c), a8 = fma(a8, m, c), a9 = fma(a9, m, c);
        }
        benchmark::DoNotOptimize(sum(((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7)) + (a8 + a9)));
        const double rate = double(steps) * 10 * 2 * lanes::width / (now() - start) * 1e-9;
        for (double seen = slowest.load(); rate < seen && !slowest.compare_exchange_weak(seen, rate);) {}
    });
    return slowest.load() * team.size();
}

/// Seconds of the samples that two good probes enclose, and of the disturbed.
struct samples {
    std::vector<double> seconds = {}, disturbed = {};
    int discarded() const { return int(disturbed.size()); }
    /// The smallest of all: what is left to compare where every sample was disturbed.
    double least() const {
        double t = 1e300;
        for (const auto* x : {&seconds, &disturbed})
            for (const double s : *x) t = std::min(t, s);
        return t < 1e300 ? t : 0;
    }
    /// The median of the undisturbed; where `minima` says so, or there are none, the smallest of all.
    double figure(bool minima = false) const {
        if (minima || seconds.empty()) return least();
        std::vector<double> s = seconds;
        std::nth_element(s.begin(), s.begin() + static_cast<std::ptrdiff_t>(s.size() / 2), s.end());
        return s[s.size() / 2];
    }
};

class gate {
public:
    explicit gate(opd::thread_team& team) : team_(team) {
        for (int i = 0; i < 40; ++i) best_ = std::max(best_, fma_rate(team_));
    }
    /// Takes one sample of f. Disturbed, and tried again up to four times: a slow probe before or after, or less
    /// processor time than the threads would use undisturbed.
    template <class F>
    void sample(samples& to, F&& f) {
        for (int attempt = 0; attempt < 4; ++attempt) {
            const double before = fma_rate(team_), used = processor_time(), start = now();
            f();
            const double took = now() - start, worked = processor_time() - used, after = fma_rate(team_);
            best_ = std::max({best_, before, after});
            if (std::min(before, after) > 0.9 * best_ && worked > 0.9 * took * team_.size()) {
                to.seconds.push_back(took);
                return;
            }
            to.disturbed.push_back(took);
            std::this_thread::sleep_for(std::chrono::milliseconds(attempt));
        }
    }
    double best() const { return best_; }

private:
    opd::thread_team& team_;
    double best_ = 0;
};

/// What --benchmark_out=FILE gets of a program that prints a table: its rows, as Google Benchmark writes them.
class results {
public:
    results(int argc, char** argv) {
        const std::string option = "--benchmark_out=";
        for (int i = 1; i < argc; ++i)
            if (const std::string a = argv[i]; a.starts_with(option)) path_ = a.substr(option.size());
    }
    /// A row: a name without quotes, and seconds.
    void add(const std::string& name, double seconds) {
        char time[32];
        std::snprintf(time, sizeof time, "%.9g", seconds);
        rows_ += (rows_.empty() ? "\n" : ",\n") + ("  {\"name\": \"" + name + "\", \"real_time\": " + time) +
                 ", \"time_unit\": \"s\"}";
    }
    /// Writes the file, if one is asked for; ends the program with 1 where it cannot be written.
    void write() const {
        if (path_.empty()) return;
        std::FILE* const f = std::fopen(path_.c_str(), "w");
        const bool written = f && std::fprintf(f, "{\"benchmarks\": [%s\n]}\n", rows_.c_str()) > 0;
        if ((f && std::fclose(f) != 0) || !written) {
            std::fprintf(stderr, "error: cannot write %s\n", path_.c_str());
            std::exit(1);
        }
    }

private:
    std::string path_, rows_;
};

// --- memory limits ---------------------------------------------------------------------------------------------------
enum class traffic { none, read, two_reads, copy, two_reads_write };

inline const char* name_of(traffic t) {
    switch (t) {
    case traffic::read:
        return "read";
    case traffic::two_reads:
        return "2 reads";
    case traffic::copy:
        return "copy";
    case traffic::two_reads_write:
        return "2 reads + write";
    default:
        return "-";
    }
}

/// Moves n floats of each array as fast as a plain loop can: four registers in flight, prefetch, streaming stores.
inline void move(opd::thread_team& team, traffic kind, const float* a, const float* b, float* to, index_t n) {
    constexpr index_t w = lanes::width, step = 4 * w, ahead = 4096;
    const index_t pieces = team.size() == 1 ? 1 : 64;
    const index_t piece = (n / pieces) / step * step;
    team.run(pieces, [&](index_t k, int) {
        const index_t begin = k * piece, end = k + 1 == pieces ? n / step * step : begin + piece;
        lanes s0(0), s1(0), s2(0), s3(0);
        for (index_t i = begin; i < end; i += step) {
            lanes x0 = lanes::load(a + i), x1 = lanes::load(a + i + w);
            lanes x2 = lanes::load(a + i + 2 * w), x3 = lanes::load(a + i + 3 * w);
            for (index_t line = 0; line < step; line += 16) __builtin_prefetch(a + i + ahead + line);
            if (kind == traffic::two_reads || kind == traffic::two_reads_write) {
                x0 += lanes::load(b + i), x1 += lanes::load(b + i + w);
                x2 += lanes::load(b + i + 2 * w), x3 += lanes::load(b + i + 3 * w);
                for (index_t line = 0; line < step; line += 16) __builtin_prefetch(b + i + ahead + line);
            }
            if (kind == traffic::copy || kind == traffic::two_reads_write) {
                x0.stream(to + i), x1.stream(to + i + w), x2.stream(to + i + 2 * w), x3.stream(to + i + 3 * w);
            } else {
                s0 += x0, s1 += x1, s2 += x2, s3 += x3;
            }
        }
        benchmark::DoNotOptimize(sum((s0 + s1) + (s2 + s3)));
    });
}

} // namespace bench
