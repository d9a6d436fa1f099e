// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "synthetic.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "opd/hidden.hpp"

namespace compression_study {

namespace {

using floats = std::vector<float>;
using generator = std::mt19937_64;

std::size_t place(index_t i) { return static_cast<std::size_t>(i); }

generator keyed(std::uint64_t seed, std::uint64_t what, index_t row) {
    std::seed_seq s{seed & 0xffffffffu, seed >> 32, what, static_cast<std::uint64_t>(row)};
    return generator(s);
}

enum stream : std::uint64_t { of_clusters, of_tokens, of_order, of_calibration, of_rollouts, of_student };

class maker {
public:
    maker(const synthetic_size& s, int threads, std::uint64_t seed)
        : s_(s), seed_(seed), team_(threads), scale_(place(s.width)), noise_(scale_.size()), shift_(scale_.size()),
          prior_(place(s.vocab)), signs_(scale_.size()) {
        double squares = 0;
        for (index_t j = 0; j < s.width; ++j) {
            scale_[place(j)] = static_cast<float>(std::pow(double(j) + 8, -0.4));
            squares += double(scale_[place(j)]) * double(scale_[place(j)]);
        }
        for (float& x : scale_) x /= static_cast<float>(std::sqrt(squares));
        generator random = keyed(seed, of_order, 0);
        noise_ = scale_;
        std::shuffle(noise_.begin(), noise_.end(), random);
        double of_noise = 0;
        for (std::size_t j = 0; j < noise_.size(); ++j) of_noise += std::pow(double(noise_[j]) * double(scale_[j]), 2);
        std::normal_distribution<float> normal;
        for (std::size_t j = 0; j < noise_.size(); ++j) {
            noise_[j] *= static_cast<float>(0.7 / std::sqrt(of_noise)); // 0.7 nats in a logit
            shift_[j] = noise_[j] * normal(random) / 2;
            signs_[j] = random() % 2 == 0 ? 1.0f : -1.0f;
        }
        double sum = 0;
        for (index_t v = 0; v < s.vocab; ++v) sum += prior_[place(v)] = 1 / (double(v) + 2.7);
        for (double& p : prior_) p /= sum;
        make_head();
    }

    /// κ for a median entropy of 0.3 nats over some rows of calibration.
    void choose_degree() {
        constexpr index_t rows = 33;
        const index_t d = s_.width, v = s_.vocab;
        floats x(place(rows * d)), z(place(rows * v)), rest(place(d)), base(place(rows * v));
        degree_ = 1;
        for (index_t r = 0; r < rows; ++r) state(of_calibration, r, x.data() + r * d, rest.data());
        logits(x, rows, z);
        for (index_t r = 0; r < rows; ++r) { // what κ does not scale
            state(of_calibration, r, rest.data(), x.data() + r * d);
        }
        logits(x, rows, base);
        for (std::size_t i = 0; i < z.size(); ++i) z[i] -= base[i];
        double low = 1, high = 200;
        for (int step = 0; step < 20; ++step) {
            const double middle = (low + high) / 2;
            std::vector<double> entropies(place(rows));
            team_.run(rows, [&](index_t r, int) {
                double top = -1e300, sum = 0, mean = 0;
                const auto logit = [&](index_t i) {
                    return middle * double(z[place(r * v + i)]) + double(base[place(r * v + i)]);
                };
                for (index_t i = 0; i < v; ++i) top = std::max(top, logit(i));
                for (index_t i = 0; i < v; ++i) {
                    const double e = std::exp(logit(i) - top);
                    sum += e, mean += e * (logit(i) - top);
                }
                entropies[place(r)] = std::log(sum) - mean / sum;
            });
            std::nth_element(entropies.begin(), entropies.begin() + rows / 2, entropies.end());
            (entropies[rows / 2] > 0.3 ? low : high) = middle;
        }
        degree_ = static_cast<float>((low + high) / 2);
    }

    /// (rows,D), in the coordinates of the head.
    floats states(stream of, index_t first, index_t rows) {
        const index_t d = s_.width;
        floats x(place(rows * d));
        team_.run(rows, [&](index_t r, int) {
            floats rest(place(d));
            state(of, first + r, x.data() + r * d, rest.data());
        });
        return x;
    }
    void logits(const floats& x, index_t rows, floats& z) {
        opd::product(opd::team_executor{team_}, opd::product_nt(rows, s_.vocab, s_.width, x.data(), s_.width,
                                                                head.data(), s_.width, z.data(), s_.vocab));
    }
    void rotate_all(floats& x) {
        const index_t d = s_.width;
        team_.run(std::ssize(x) / d, [&](index_t r, int) { rotate({x.data() + r * d, place(d)}); });
    }
    opd::thread_team& team() { return team_; }

    floats head; // (V,D)

private:
    index_t clusters() const { return std::max<index_t>(s_.vocab / 76, 1); }
    index_t cluster_of(index_t v) const {
        return static_cast<index_t>(static_cast<std::uint64_t>(v) * 0x9e3779b97f4a7c15u %
                                    static_cast<std::uint64_t>(clusters()));
    }

    void make_head() {
        const index_t d = s_.width;
        floats centres(place(clusters() * d));
        team_.run(clusters(), [&](index_t c, int) {
            generator random = keyed(seed_, of_clusters, c);
            std::normal_distribution<float> normal;
            for (index_t j = 0; j < d; ++j) centres[place(c * d + j)] = normal(random);
        });
        double mean = 0; // what is the same for every token is of no use
        for (const double p : prior_) mean += std::log(p) / double(s_.vocab);
        head.resize(place(s_.vocab * d));
        team_.run(s_.vocab, [&](index_t v, int) {
            generator random = keyed(seed_, of_tokens, v);
            std::normal_distribution<float> normal;
            float* const w = head.data() + v * d;
            const float* const c = centres.data() + cluster_of(v) * d;
            for (index_t j = 0; j < d; ++j) w[j] = scale_[place(j)] * 0.70710678f * (c[j] + normal(random));
            w[0] = static_cast<float>((std::log(prior_[place(v)]) - mean) / 4);
        });
        cumulative_.resize(prior_.size());
        std::partial_sum(prior_.begin(), prior_.end(), cumulative_.begin());
    }

    /// `signal`: all of the state; `rest`: what κ does not scale.
    void state(stream of, index_t row, float* signal, float* rest) const {
        const index_t d = s_.width;
        const bool rollout = of != of_calibration;
        generator random =
            keyed(seed_, rollout ? of_rollouts : of_calibration, row); // a student is where its rollout is
        std::uniform_real_distribution<double> uniform;
        std::normal_distribution<float> normal;
        const auto token = [&] {
            const bool topical = rollout && uniform(random) < 0.6;
            for (;;) {
                const auto at =
                    std::upper_bound(cumulative_.begin(), cumulative_.end(), uniform(random) * cumulative_.back());
                const index_t v = std::min<index_t>(at - cumulative_.begin(), s_.vocab - 1);
                if (!topical || cluster_of(v) % 10 == 0 || clusters() < 10) return v;
            }
        };
        std::vector<std::pair<index_t, float>> parts;
        const bool sure = uniform(random) < (rollout ? 0.45 : 0.65);
        const int candidates = sure ? 1 : 2 + static_cast<int>(uniform(random) * uniform(random) * 15);
        const double ratio = 0.8 + 0.2 * uniform(random);
        double weight = 1;
        for (int k = 0; k < candidates; ++k, weight *= ratio) parts.emplace_back(token(), static_cast<float>(weight));
        float degree = degree_;
        if (of == of_student) {
            random = keyed(seed_, of_student, row);
            degree /= 1.25f;
            parts.emplace_back(token(), static_cast<float>(0.5 + 0.5 * uniform(random)));
        }
        for (index_t j = 0; j < d; ++j) rest[j] = noise_[place(j)] * normal(random) + (rollout ? shift_[place(j)] : 0);
        for (index_t j = std::max<index_t>(d - 8, 1); j < d; ++j) rest[j] += 30 + 3 * normal(random);
        rest[0] = 4;
        std::copy_n(rest, d, signal);
        for (const auto& [v, a] : parts)
            for (index_t j = 1; j < d; ++j) signal[j] += degree * a * head[place(v * d + j)];
    }

    /// Signs, then Hadamard's matrix over √D: orthogonal, so no product of a state with the head changes.
    void rotate(std::span<float> x) const {
        for (std::size_t j = 0; j < x.size(); ++j) x[j] *= signs_[j];
        for (std::size_t half = 1; half < x.size(); half *= 2)
            for (std::size_t i = 0; i < x.size(); i += 2 * half)
                for (std::size_t j = i; j < i + half; ++j) {
                    const float a = x[j], b = x[j + half];
                    x[j] = a + b, x[j + half] = a - b;
                }
        const float size = 1 / std::sqrt(static_cast<float>(x.size()));
        for (float& y : x) y *= size;
    }

    synthetic_size s_;
    std::uint64_t seed_;
    opd::thread_team team_;
    floats scale_, noise_, shift_;           // (D)
    std::vector<double> prior_, cumulative_; // (V)
    floats signs_;                           // (D)
    float degree_ = 1;
};

} // namespace

world synthetic(const synthetic_size& s, int threads, std::uint64_t seed) {
    if (!std::has_single_bit(static_cast<std::uint64_t>(s.width)))
        throw opd::invalid_input("width", fmt::format("is {}; Hadamard's matrix wants a power of two", s.width));
    maker m(s, threads, seed);
    m.choose_degree();
    world w{.name = "synthetic",
            .title = fmt::format("A synthetic head, V = {}, D = {}", s.vocab, s.width),
            .v = s.vocab,
            .d = s.width,
            .n = s.rows,
            .head = {},
            .states = m.states(of_rollouts, 0, s.rows),
            .student = floats(place(s.rows * s.vocab)),
            .seen = opd::calibration(s.vocab, s.width),
            .numbers = {}};
    m.logits(m.states(of_student, 0, s.rows), s.rows, w.student);
    constexpr index_t batch = 512;
    std::vector<floats> calibration; // made while the head is as it was drawn
    for (index_t at = 0; at < s.calibration; at += batch)
        calibration.push_back(m.states(of_calibration, at, std::min(batch, s.calibration - at)));
    m.rotate_all(m.head);
    m.rotate_all(w.states);
    w.head = std::move(m.head);
    for (floats& x : calibration) {
        m.rotate_all(x);
        const index_t rows = std::ssize(x) / s.width;
        opd::teacher::hidden teacher{opd::view(std::as_const(x).data(), rows, s.width),
                                     opd::view(std::as_const(w.head).data(), s.vocab, s.width)};
        teacher.budget = std::size_t{512} << 20;
        w.seen.add(m.team(), teacher);
    }
    for (index_t r = s.width / 128; r <= s.width / 4; r *= 2)
        w.numbers.push_back(r); // half of them are the state in bf16
    return w;
}

} // namespace compression_study
