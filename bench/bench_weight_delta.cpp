// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Deltas of bfloat16 weights beside memcpy of as many bytes, in turns, on one thread, memory in huge pages:
//
//   bench_weight_delta [million elements] [turns] [share that changes]        prints a table; --benchmark_out=FILE too
//
//   encode     weight_delta: both versions' checksums, what changed, its codes
//   goes on    the same by a writer that made the base, and knows its checksums
//   in place   apply_weight_delta on the base's own memory: both checksums compared
//   to a copy  the same into other memory
//
// Weights are N(0, .02); of what changes, either each is moved by one rank (what an optimizer's step does to bfloat16),
// or gets 16 bits of any kind. Processor time, least and median of
// the turns, and the ratio to memcpy's.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "harness.hpp"
#include "opd/data/weight_delta.hpp"
#include "opd/element.hpp"

namespace {

using namespace opd;

struct random_words {
    std::uint64_t state;
    std::uint64_t next() { return data::detail::sum_mix(state += 0x9E3779B97F4A7C15u); }
    double uniform() { return (double(next() >> 11) + 0.5) * 0x1p-53; }
};

struct times {
    std::vector<double> all;
    double least() const { return *std::min_element(all.begin(), all.end()); }
    double median() const {
        std::vector<double> s = all;
        std::sort(s.begin(), s.end());
        return s[s.size() / 2];
    }
};
template <class F>
void timed(times& to, F&& f) {
    const double begin = bench::processor_time();
    f();
    to.all.push_back(bench::processor_time() - begin);
}

} // namespace

int main(int argc, char** argv) {
    bench::results out(argc, argv);
    std::vector<std::string> given; // but what scripts/bench.sh says to Google Benchmark
    for (int i = 1; i < argc; ++i)
        if (argv[i][0] != '-') given.emplace_back(argv[i]);
    const auto n = index_t((given.size() > 0 ? std::atof(given[0].c_str()) : 600) * 1e6);
    const int turns = given.size() > 1 ? std::atoi(given[1].c_str()) : 9;
    const double share = given.size() > 2 ? std::atof(given[2].c_str()) : 0.02;
    const bench::array<std::uint16_t> was(n), is(n), copy(n);
    const auto bytes = std::size_t(n) * 2;
    random_words random{1};
    std::vector<std::uint16_t> normal(1 << 16); // as many as there are bit patterns
    for (std::uint16_t& x : normal)
        x = detail::float_to_bfloat16(
            float(0.02 * std::sqrt(-2 * std::log(random.uniform())) * std::cos(6.283185307179586 * random.uniform())));
    for (index_t i = 0; i < n; i += 4) {
        const std::uint64_t x = random.next();
        for (index_t j = 0; j < std::min<index_t>(4, n - i); ++j) was.data()[i + j] = normal[x >> 16 * j & 65535u];
    }
    for (const bool any_bits : {false, true}) {
        std::memcpy(is.data(), was.data(), bytes);
        index_t changed = 0;
        for (index_t i = -1;;) {
            const double gap = share < 1 ? std::floor(std::log(random.uniform()) / std::log1p(-share)) : 0;
            if (!(gap < double(n - 1 - i))) break;
            i += 1 + index_t(gap);
            std::uint16_t& x = is.data()[i];
            const auto bits = std::uint16_t(random.next());
            x = any_bits ? std::uint16_t(bits + (bits == x)) : std::uint16_t(x + (bits % 2 == 0 ? 1 : -1));
            ++changed;
        }
        const auto part = [&](const bench::array<std::uint16_t>& a) {
            return data::weight_part{
                "model.weight", data::weight_type::bf16, {reinterpret_cast<std::byte*>(a.data()), bytes}};
        };
        const data::weight_target target{
            "model.weight", data::weight_type::bf16, {reinterpret_cast<std::byte*>(copy.data()), bytes}};
        const data::weight_part base = part(was), next = part(is);
        const data::weight_version held = data::version_of(std::span(&base, 1), 7);
        std::vector<std::byte> delta;
        times memcpys, encode, goes_on, in_place, to_copy;
        const auto need = [&](bool ok, const char* what) {
            if (!ok) std::printf("WRONG: %s\n", what), std::exit(1);
        };
        for (int turn = 0; turn < turns; ++turn) {
            timed(memcpys, [&] { std::memcpy(copy.data(), was.data(), bytes), benchmark::ClobberMemory(); });
            timed(encode, [&] { delta = data::weight_delta(held, std::span(&base, 1), std::span(&next, 1), 8); });
            data::weight_delta_writer w({6, held.sum}, 7); // one that made the base
            w.begin(), w.add(base, base), w.end();
            w.go_on(8);
            timed(goes_on, [&] { w.begin(), w.add(base, next), w.end(); });
            timed(in_place, [&] { data::apply_weight_delta(delta, held, std::span(&target, 1)); });
            need(std::memcmp(copy.data(), is.data(), bytes) == 0, "in place");
            timed(memcpys, [&] { std::memcpy(copy.data(), was.data(), bytes), benchmark::ClobberMemory(); });
            timed(to_copy, [&] { data::apply_weight_delta(delta, held, std::span(&base, 1), std::span(&target, 1)); });
            need(std::memcmp(copy.data(), is.data(), bytes) == 0, "to a copy");
        }
        std::printf("%s: %.0f MB, %.2f %% changed: a delta of %.2f MB, %.2f bits a changed element; equal bits\n",
                    any_bits ? "any bits" : "one rank", double(bytes) / 1e6, 100 * double(changed) / double(n),
                    double(delta.size()) / 1e6, 8 * double(delta.size()) / double(changed));
        const auto line = [&](const char* what, const times& t) {
            std::printf("  %-10s least %6.1f ms %6.2f GB/s  ratio %.2f   median %6.1f ms  ratio %.2f\n", what,
                        1e3 * t.least(), double(bytes) / t.least() / 1e9, memcpys.least() / t.least(), 1e3 * t.median(),
                        memcpys.median() / t.median());
            out.add(std::string(what) + (any_bits ? ", any bits" : ", one rank"), t.median());
        };
        line("memcpy", memcpys), line("encode", encode), line("goes on", goes_on), line("in place", in_place),
            line("to a copy", to_copy);
    }
    out.write();
}
