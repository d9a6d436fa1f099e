// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "opd/rng.hpp"

namespace {

using opd::noise_row;
using opd::noise_stream;

std::vector<float> log_of(const std::vector<double>& p) {
    std::vector<float> r;
    for (double x : p) r.push_back(x > 0 ? static_cast<float>(std::log(x)) : -std::numeric_limits<float>::infinity());
    return r;
}

// The definition, without any shortcut.
opd::index_t exhaustive(const noise_row& noise, std::uint32_t draw, const std::vector<float>& logp) {
    opd::index_t winner = -1;
    double best = 0;
    for (std::size_t v = 0; v < logp.size(); ++v) {
        if (std::isinf(logp[v])) continue;
        const double score = opd::gumbel_score(double(logp[v]), noise.bits(draw, static_cast<std::uint32_t>(v)));
        if (winner < 0 || score > best) {
            winner = static_cast<opd::index_t>(v);
            best = score;
        }
    }
    return winner;
}

} // namespace

TEST_CASE("philox4x32-10 reproduces the published known answers") {
    struct row {
        opd::philox_block counter;
        std::uint32_t key0, key1;
        opd::philox_block expected;
    };
    const row rows[] = {
        {{{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         0xffffffff,
         0xffffffff,
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         0xa4093822,
         0x299f31d0,
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    for (const row& r : rows) {
        const opd::philox_block got = opd::philox4x32(r.counter, r.key0, r.key1);
        for (int i = 0; i < 4; ++i) CHECK(got.word[i] == r.expected.word[i]);
    }
}

TEST_CASE("every part of the key changes the bits, and nothing else does") {
    const auto bits = [](std::uint64_t seed, noise_stream stream, std::uint64_t sample, std::uint32_t position,
                         std::uint32_t draw,
                         std::uint32_t token) { return noise_row(seed, stream, sample, position).bits(draw, token); };
    std::set<std::uint32_t> seen;
    const auto add = [&](std::uint32_t k) { seen.insert(k); };
    add(bits(1, noise_stream::rollout, 2, 3, 4, 5));
    add(bits(1, noise_stream::rollout, 2, 3, 4, 6));
    add(bits(1, noise_stream::rollout, 2, 3, 5, 5));
    add(bits(1, noise_stream::rollout, 2, 4, 4, 5));
    add(bits(1, noise_stream::rollout, 3, 3, 4, 5));
    add(bits(1, noise_stream::rollout, 2 + (std::uint64_t{1} << 32), 3, 4, 5));
    add(bits(1 + (std::uint64_t{1} << 32), noise_stream::rollout, 2, 3, 4, 5));
    add(bits(2, noise_stream::rollout, 2, 3, 4, 5));
    for (auto s : {noise_stream::mc, noise_stream::tail, noise_stream::draft, noise_stream::coin,
                   noise_stream::residual, noise_stream::bonus})
        add(bits(1, s, 2, 3, 4, 5));
    CHECK(seen.size() == 14);
    CHECK(bits(1, noise_stream::mc, 2, 3, 4, 5) == bits(1, noise_stream::mc, 2, 3, 4, 5));
    // a golden value: the noise of old runs must stay reproducible
    CHECK(bits(1, noise_stream::rollout, 2, 3, 4, 5) == 0x6dea549bu);
}

TEST_CASE("uniforms are uniform and exponentials are positive, finite and ordered") {
    double mean = 0;
    std::vector<int> histogram(64);
    const int n = 1 << 18;
    for (int i = 0; i < n; ++i) {
        const double w =
            opd::keyed_uniform(noise_row(7, noise_stream::mc, static_cast<std::uint64_t>(i / 64), 0), i % 64);
        CHECK_UNARY(w > 0 && w < 1);
        mean += w / n;
        ++histogram[static_cast<std::size_t>(w * 64)];
    }
    CHECK(std::abs(mean - 0.5) < 5 * std::sqrt(1.0 / 12 / n));
    double chi2 = 0;
    for (int count : histogram) chi2 += std::pow(count - n / 64.0, 2) / (n / 64.0);
    CHECK(chi2 < 63 + 5 * std::sqrt(2 * 63.0));

    double previous = 0;
    for (std::uint64_t k = 0; k < (std::uint64_t{1} << 32); k = k * 2 + 1) {
        const double e = opd::exponential_of_bits(static_cast<std::uint32_t>(k));
        CHECK(e > previous);
        previous = e;
    }
    CHECK(-std::log(opd::exponential_of_bits(0)) <= opd::gumbel_maximum);
    CHECK(std::isfinite(opd::exponential_of_bits(0xffffffffu)));
}

// The bits below were computed once, with g++ 12 -O2: whatever builds this must find the same.
TEST_CASE("the library's logarithm is right to a few units and has the same bits in every build") {
    std::uint64_t worst_at = 0, hash = 0;
    double worst = 0;
    for (std::uint64_t i = 0; i < 200000; ++i) {
        const noise_row noise(19, noise_stream::mc, i, 0);
        const std::uint32_t k = noise.bits(0, 0);
        double x = 1 - opd::uniform_of_bits(k);                         // what an exponential is made of
        if (i % 3 == 1) x = std::ldexp(x, int(i % 90) - 60);            // what a score takes the logarithm of
        if (i % 3 == 2) x = 1 + (opd::uniform_of_bits(k) - 0.5) * 1e-6; // near 1
        const double got = opd::detail::fixed_log(x);
        const long double want = std::log(static_cast<long double>(x));
        const double error = static_cast<double>(std::abs((static_cast<long double>(got) - want) / want));
        if (error > worst) worst = error, worst_at = i;
        std::uint64_t bits = 0;
        std::memcpy(&bits, &got, sizeof bits);
        hash = hash * 0x9E3779B97F4A7C15ull + bits;
    }
    INFO("worst at " << worst_at);
    CHECK(worst < 0x1p-51);
    CHECK(opd::detail::fixed_log(1) == 0);
#if defined(__SSE2__)
    CHECK(hash == 0xd96631fcf257ba6dull);
#endif
}

TEST_CASE("gumbel_max draws the distribution it is given") {
    const std::vector<double> p = {0.5, 0, 0.2, 0.15, 0.1, 0.04, 0.01};
    const std::vector<float> logp = log_of(p);
    std::vector<int> count(p.size());
    const int n = 200000;
    for (int i = 0; i < n; ++i)
        ++count[static_cast<std::size_t>(
            opd::gumbel_max(noise_row(11, noise_stream::rollout, static_cast<std::uint64_t>(i), 5), 0, logp.data(),
                            static_cast<opd::index_t>(p.size())))];
    for (std::size_t v = 0; v < p.size(); ++v)
        CHECK(std::abs(count[v] - n * p[v]) <= 5 * std::sqrt(n * p[v] * (1 - p[v])));
}

TEST_CASE("the shortcut of gumbel_max gives the exhaustive maximum, also far down the tail") {
    for (std::uint64_t sample = 0; sample < 3000; ++sample) {
        const noise_row shape(3, noise_stream::coin, sample, 0);
        const std::size_t v_count = 1 + shape.bits(0, 0) % 70;
        const double scale = 1 + shape.bits(0, 1) % 40;
        std::vector<float> logp(v_count);
        for (std::size_t v = 0; v < v_count; ++v) {
            const std::uint32_t k = shape.bits(1, static_cast<std::uint32_t>(v));
            logp[v] = k % 7 == 0 ? -std::numeric_limits<float>::infinity()
                                 : static_cast<float>(scale * (opd::uniform_of_bits(k) - 1));
        }
        const noise_row noise(5, noise_stream::rollout, sample, 9);
        CHECK(opd::gumbel_max(noise, 2, logp.data(), static_cast<opd::index_t>(v_count)) == exhaustive(noise, 2, logp));
    }
}

TEST_CASE("the shortcut of gumbel_max knows how far up the rarest noise reaches") {
    CHECK(-std::log(opd::exponential_of_bits(0)) > opd::gumbel_maximum - 0.01); // and no farther: cheap
    const noise_row noise(1, noise_stream::rollout, 2, 3);
    const std::uint32_t draw = 33617344; // searched for: token 1 has -log E = 20.7
    CHECK(noise.bits(draw, 1) == 4);
    const auto head = static_cast<float>(-std::log(opd::exponential_of_bits(noise.bits(draw, 0))));
    const auto rare = static_cast<float>(-std::log(opd::exponential_of_bits(4)));
    for (const auto& [distance, winner] : {std::pair<float, opd::index_t>{-0.01F, 1}, {0.01F, 0}}) {
        const float logp[] = {0, head - rare - distance};
        CHECK(opd::gumbel_max(noise, draw, logp, 2) == winner);
    }
}

TEST_CASE("ties go to the lower id, and an empty support has no winner") {
    // two tokens can tie exactly only if their scores round to the same double: huge magnitudes absorb the noise
    const std::vector<float> tied(5, -3.0e30f);
    CHECK(opd::gumbel_max(noise_row(1, noise_stream::rollout, 1, 1), 0, tied.data(), 5) == 0);
    const std::vector<float> none(3, -std::numeric_limits<float>::infinity());
    CHECK(opd::gumbel_max(noise_row(1, noise_stream::rollout, 1, 1), 0, none.data(), 3) == -1);
}

// A head token of probability 0.999 against a tail of 151,935 equal tokens of mass 1e-3, computed from the map bits ->
// E itself: P(tail) = mean over the head's E_h of P(some tail token has E_v / p_v < E_h / p_h).
TEST_CASE("32-bit exponentials draw a thin tail with its mass, 24-bit ones do not") {
    const double n = 151935, mass = 1e-3, ratio = (mass / n) / (1 - mass);
    // number of k in [0, 2^bits) with E(k) < x, by bisection over the monotone map
    const auto below = [](auto exponential, std::uint64_t size, double x) {
        std::uint64_t lo = 0, hi = size;
        while (lo < hi) {
            const std::uint64_t mid = (lo + hi) / 2;
            if (exponential(mid) < x)
                lo = mid + 1;
            else
                hi = mid;
        }
        return static_cast<double>(lo) / static_cast<double>(size);
    };
    const auto tail_mass = [&](auto exponential, std::uint64_t size) {
        double total = 0;
        const int steps = 4096;
        for (int i = 0; i < steps; ++i) {
            const double head = -std::log1p(-(i + 0.5) / steps);
            total += -std::expm1(n * std::log1p(-below(exponential, size, ratio * head)));
        }
        return total / steps;
    };
    const double fine =
        tail_mass([](std::uint64_t k) { return opd::exponential_of_bits(static_cast<std::uint32_t>(k)); },
                  std::uint64_t{1} << 32);
    CHECK(fine == doctest::Approx(mass).epsilon(0.02));
    // (k + 1/2) 2^-24, the usual float uniform
    const double coarse = tail_mass(
        [](std::uint64_t k) { return -std::log1p(-(static_cast<double>(k) + 0.5) * 0x1p-24); }, std::uint64_t{1} << 24);
    CHECK(coarse < 3.5e-4);
    CHECK(coarse > 1e-6);
}
