// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sources of rows that the library does not have, written here alone (docs/concepts/source.md shows them): a vocabulary
// in shards, and a teacher kept as hidden states. Tiles change no bit of the CPU's results.
#include "backends/host_run.hpp"
#include "support/normal.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

namespace own {

/// A teacher kept as hidden states: y[r,v] = Σ_d h[r,d] w[v,d], made a tile at a time in the asking thread's scratch.
struct hidden_teacher {
    using logit_type = float;
    static constexpr opd::cache_kind kind = opd::cache_kind::dense;
    static constexpr opd::space memory_space = opd::space::host;
    static constexpr bool one_tile = false;
    opd::matrix_view<const float> hidden;      // (N,D)
    opd::matrix_view<const float> unembedding; // (V,D)
    float temperature = 1;

    opd::index_t rows() const { return hidden.rows; }
    opd::index_t vocab() const { return unembedding.rows; }
    opd::index_t tile_size() const { return 2048; }
    std::size_t scratch_bytes() const { return sizeof(float) * 2048; }
    float logit(opd::row_place at, opd::index_t id) const {
        float y = 0;
        for (opd::index_t d = 0; d < hidden.cols; ++d) y += hidden(at.row, d) * unembedding(id, d);
        return y;
    }
    const float* tile(opd::row_place at, opd::index_t begin) const {
        auto* y = reinterpret_cast<float*>(at.scratch);
        for (opd::index_t id = begin; id < std::min(begin + 2048, vocab()); ++id) y[id - begin] = logit(at, id);
        return y;
    }
};

/// A student whose vocabulary lies in shards of `width` ids, each in an allocation of its own.
template <class T>
struct sharded_student {
    using logit_type = T;
    using gradient_type = T;
    static constexpr opd::space memory_space = opd::space::host;
    static constexpr bool sparse_gradient = false, one_tile = false;
    opd::index_t n, v, width; // width: a multiple of 1,024, or the whole vocabulary
    T* const* z;              // (shards) -> (N,width)
    T* const* dz = nullptr;   // the same; null: value only
    float temperature = 1;

    opd::index_t rows() const { return n; }
    opd::index_t vocab() const { return v; }
    opd::index_t tile_size() const { return width; }
    const T* tile(opd::row_place at, opd::index_t begin) const {
        return z[begin / width] + at.row * width + begin % width;
    }
    T logit(opd::row_place at, opd::index_t id) const { return *tile(at, id); }
    bool has_gradient() const { return dz != nullptr; }
    T* gradient_tile(opd::row_place at, opd::index_t begin) const {
        return dz[begin / width] + at.row * width + begin % width;
    }
    T& gradient_at(opd::row_place at, opd::index_t id) const { return *gradient_tile(at, id); }
};

} // namespace own

using namespace opd;
using namespace opd::test;

namespace {

struct rolls {
    std::mt19937 engine;
    explicit rolls(unsigned seed) : engine(seed) {}
    double normal() { return normal_numbers<double>()(engine); }
    int between(int a, int b) { return std::uniform_int_distribution<int>(a, b)(engine); }
};

/// A matrix cut into shards, each in memory of its own.
template <class T>
struct shards {
    index_t n, v, width;
    std::vector<std::vector<T>> parts;
    std::vector<T*> at;

    shards(const std::vector<T>& whole, index_t n_, index_t v_, index_t width_) : n(n_), v(v_), width(width_) {
        for (index_t begin = 0; begin < v; begin += width) {
            parts.emplace_back(std::size_t(n * width));
            for (index_t r = 0; r < n; ++r)
                std::copy_n(&whole[std::size_t(r * v + begin)], std::min(width, v - begin),
                            &parts.back()[std::size_t(r * width)]);
        }
        for (auto& p : parts) at.push_back(p.data());
    }
    std::vector<T> joined() const {
        std::vector<T> out(std::size_t(n * v));
        for (index_t r = 0; r < n; ++r)
            for (index_t i = 0; i < v; ++i)
                out[std::size_t(r * v + i)] = parts[std::size_t(i / width)][std::size_t(r * width + i % width)];
        return out;
    }
};

template <class T>
bool equal_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
bool same(const result& a, const result& b) {
    const auto &x = a.diagnostics, &y = b.diagnostics;
    return a.loss == b.loss && x.kept == y.kept && x.bad_rows == y.bad_rows && x.infinite_rows == y.infinite_rows &&
           x.careful_rows == y.careful_rows && x.clamped_rows == y.clamped_rows && x.tokens == y.tokens &&
           x.ratio_sum == y.ratio_sum && x.support_rows == y.support_rows && x.student_mass_sum == y.student_mass_sum;
}

/// Rows of every look, some masked.
template <class T>
struct batch {
    index_t n = 7, v, k = 5;
    std::vector<T> z, y, dz;
    std::vector<std::int32_t> ids;
    std::vector<float> log_q;
    std::vector<std::uint8_t> kept;
    std::vector<float> losses;
    std::vector<double> lse;

    explicit batch(rolls& s, index_t v_ = 0) : v(v_ > 0 ? v_ : s.between(1, 6) * 1024 + s.between(-700, 700)) {
        for (index_t r = 0; r < n; ++r) {
            const int look = s.between(0, 5);
            for (index_t i = 0; i < v; ++i) {
                double a = 3 * s.normal(), b = look == 1 ? a + 0.01 * s.normal() : 3 * s.normal();
                if (look == 2 && i == v / 2) a += 40;
                if (look == 3 && i % 3 == 0) b = -INFINITY;
                if (look == 4) a *= 30, b *= 30;
                if (look == 5 && i < 1024) a = -INFINITY;
                z.push_back(element<T>::store(arithmetic_t<T>(a))), y.push_back(element<T>::store(arithmetic_t<T>(b)));
            }
            for (index_t j = 0; j < k; ++j)
                ids.push_back(std::int32_t((j * (v / k) + s.between(0, 100)) % v)), log_q.push_back(-2.5f);
            kept.push_back(s.between(0, 4) != 0);
        }
        dz.assign(z.size(), element<T>::store(0.25f)), losses.resize(std::size_t(n)), lse.resize(std::size_t(n));
    }
    opd::env env(float beta) {
        opd::env e;
        e.mask = row_mask<>(kept), e.beta = beta, e.losses = losses, e.lse = lse;
        return e;
    }
};

/// Shards as logits that are made: of these no pass keeps an exponential for the next.
template <class T>
struct made : own::sharded_student<T> {
    static constexpr bool made_in_tiles = true;
};

/// One estimator on materialised logits, and on shards of every width, in both orders.
template <class T, class Cache, class Estimator>
void tiles_change_nothing(batch<T> b, const Cache& cache, const Estimator& estimator, float beta, int threads) {
    cpu_backend be{.threads = threads};
    batch<T> whole = b;
    auto e = whole.env(beta);
    e.level = determinism::tiling_invariant;
    const student::logits<T> student{view(const_cast<const T*>(whole.z.data()), b.n, b.v),
                                     view(whole.dz.data(), b.n, b.v), 0.8f};
    const result r = evaluate(be, student, cache(whole), estimator, e);
    for (const index_t width : {index_t{1024}, index_t{2048}, index_t{5120}, b.v}) {
        batch<T> cut = b;
        shards<T> z(cut.z, b.n, b.v, width), dz(cut.dz, b.n, b.v, width);
        const auto with = [&](auto source) {
            auto cut_env = cut.env(beta);
            cut_env.level = determinism::tiling_invariant;
            std::fill(cut.losses.begin(), cut.losses.end(), 0.f);
            const result of_cut = evaluate(be, source, cache(cut), estimator, cut_env);
            RC_ASSERT(same(r, of_cut));
            RC_ASSERT(equal_bits(whole.losses, cut.losses));
            RC_ASSERT(equal_bits(whole.lse, cut.lse));
            RC_ASSERT(equal_bits(whole.dz, dz.joined()));
            dz = shards<T>(cut.dz, b.n, b.v, width);
        };
        with(own::sharded_student<T>{b.n, b.v, width, z.at.data(), dz.at.data(), 0.8f});
        if (width == b.v) with(made<T>{{b.n, b.v, width, z.at.data(), dz.at.data(), 0.8f}});
    }
}

const property_options few{.cases = 12, .disable_shrink = true};

template <class T>
auto dense_of() {
    return [](const batch<T>& b) { return teacher::dense<T>{view(b.y.data(), b.n, b.v)}; };
}

/// A source that writes down which (row, tile) it was asked for.
struct watched : own::sharded_student<float> {
    std::vector<std::pair<index_t, index_t>>* asked = nullptr;
    const float* tile(row_place at, index_t begin) const {
        asked->emplace_back(at.row, begin);
        return own::sharded_student<float>::tile(at, begin);
    }
};

} // namespace

TEST_CASE("tiles of whole leaves change no bit: dense rows") {
    property(
        "one tile, or many",
        [](unsigned seed) {
            rolls s(seed);
            const float beta = s.between(0, 1) ? 0.5f : 0;
            const int threads = s.between(1, 3);
            const batch<float> b(s);
            tiles_change_nothing(b, dense_of<float>(), reverse_kl{}, beta, threads);
            tiles_change_nothing(b, dense_of<float>(), forward_kl{}, beta, threads);
            tiles_change_nothing(b, dense_of<float>(), jsd{.w = .3, .o = .6}, beta, threads);
            tiles_change_nothing(b, dense_of<float>(), alpha_divergence{.a = .5}, beta, threads);
            tiles_change_nothing(b, dense_of<float>(), chi_squared{}, beta, threads);
            const batch<bfloat16> half(s);
            tiles_change_nothing(half, dense_of<bfloat16>(), reverse_kl{}, beta, threads);
        },
        few);
}

TEST_CASE("what a sweep keeps of a row's end changes no bit") {
    property("longer than what is kept",
             [](unsigned seed) {
                 rolls s(seed);
                 const index_t v = 32 * 1024 + s.between(1, 5000);
                 batch<float> b(s, v);
                 for (index_t r = 0; r < b.n; ++r) { // the largest logit before, at and behind the first that is kept
                     const index_t top = r % 3 == 0   ? s.between(0, 1000)
                                         : r % 3 == 1 ? v - 32 * 1024
                                                      : s.between(3000, int(v) - 1);
                     b.z[std::size_t(r * v + top)] = 200, b.y[std::size_t(r * v + top)] = 190;
                 }
                 tiles_change_nothing(b, dense_of<float>(), reverse_kl{}, s.between(0, 1) ? 0.5f : 0, 2);
             },
             {.cases = 2, .disable_shrink = true});
}

TEST_CASE("tiles of whole leaves change no bit: rows of entries") {
    property(
        "one tile, or many",
        [](unsigned seed) {
            rolls s(seed);
            const float beta = s.between(0, 1) ? 0.5f : 0;
            const batch<float> b(s);
            const auto samples = [](const batch<float>& x) {
                return teacher::samples<std::int32_t>{view(x.ids.data(), x.n, x.k), view(x.log_q.data(), x.n, x.k),
                                                      view(x.log_q.data(), x.n, x.k)};
            };
            const auto support = [](const batch<float>& x) {
                return teacher::support<std::int32_t>{view(x.ids.data(), x.n, x.k), view(x.log_q.data(), x.n, x.k)};
            };
            tiles_change_nothing(b, samples, mc{reverse_kl{}}, beta, 2);
            tiles_change_nothing(b, support, tail_bucket{reverse_kl{}}, beta, 2);
        },
        few);
}

TEST_CASE("a row is asked for tile after tile") {
    rolls s(3);
    batch<float> b(s, 3000);
    b.n = 6;
    shards<float> z(b.z, b.n, b.v, 1024);
    std::vector<std::pair<index_t, index_t>> asked;
    cpu_backend be{.threads = 1};
    watched student{{b.n, b.v, 1024, z.at.data(), nullptr}};
    student.asked = &asked;
    evaluate(be, student, teacher::dense<float>{view(b.y.data(), b.n, b.v)}, reverse_kl{}, env{});
    using place = std::pair<index_t, index_t>;
    CHECK(std::vector(asked.begin(), asked.begin() + 3) == std::vector<place>{{0, 0}, {0, 1024}, {0, 2048}});
}

TEST_CASE("of a masked row no logit is asked for, and its gradient is scaled") {
    rolls s(4);
    batch<float> b(s, 2500);
    b.kept.assign(std::size_t(b.n), 1);
    b.kept[1] = 0;
    const auto run = [&](auto backend) {
        shards<float> z(b.z, b.n, b.v, 1024), dz(b.dz, b.n, b.v, 1024);
        std::vector<std::pair<index_t, index_t>> asked;
        watched student{{b.n, b.v, 1024, z.at.data(), dz.at.data()}};
        student.asked = &asked;
        evaluate(backend, student, teacher::dense<float>{view(b.y.data(), b.n, b.v)}, reverse_kl{}, b.env(0.5f));
        CHECK(std::none_of(asked.begin(), asked.end(), [](const auto& place) { return place.first == 1; }));
        const std::vector<float> joined = dz.joined();
        CHECK(
            std::all_of(&joined[std::size_t(b.v)], &joined[std::size_t(2 * b.v)], [](float x) { return x == 0.125f; }));
    };
    run(cpu_backend{.threads = 1});
    run(host_run_backend{.threads = 8});
}

// What a source answers, asked beforehand.
struct half_a_source {
    using logit_type = float;
    index_t rows() const { return 0; }
};
static_assert(row_source<own::hidden_teacher> && teacher_cache<own::hidden_teacher>);
static_assert(!student_source<own::hidden_teacher> && !gradient_sink<own::hidden_teacher>);
static_assert(row_source<own::sharded_student<float>> && student_source<own::sharded_student<float>>);
static_assert(gradient_sink<own::sharded_student<float>> && !teacher_cache<own::sharded_student<float>>);
static_assert(!row_source<half_a_source> && !gradient_sink<half_a_source>);

// A block's threads share a row: there is no scratch that each could make a tile in.
using made_in_scratch = row_job<student::logits<float>, own::hidden_teacher, forward_kl, space::host>;
static_assert(detail::has_lanes<made_in_scratch> && !detail::has_kernel<made_in_scratch>);

TEST_CASE("the GPU's rows over shards are those over logits") {
    rolls s(5);
    batch<float> b(s, 5000);
    const auto run = [&](auto student) {
        host_run_backend be{.threads = 32};
        return evaluate(be, student, teacher::dense<float>{view(b.y.data(), b.n, b.v)}, reverse_kl{}, env{});
    };
    shards<float> z(b.z, b.n, b.v, 1024), dz(b.dz, b.n, b.v, 1024);
    const result tiled = run(own::sharded_student<float>{b.n, b.v, 1024, z.at.data(), dz.at.data()});
    const result whole =
        run(student::logits<float>{view(const_cast<const float*>(b.z.data()), b.n, b.v), view(b.dz.data(), b.n, b.v)});
    CHECK(tiled.loss == doctest::Approx(whole.loss).epsilon(1e-6));
    const auto joined = dz.joined();
    double apart = 0;
    for (std::size_t i = 0; i < joined.size(); ++i) apart = std::max(apart, double(std::abs(joined[i] - b.dz[i])));
    CHECK(apart < 1e-6);
}

TEST_CASE("a teacher kept as hidden states is the teacher of their logits") {
    rolls s(7);
    const index_t n = 5, d = 8, v = 5000;
    std::vector<float> h, w, y(std::size_t(n * v)), z(y.size()), dz(y.size()), dz_hidden(y.size());
    for (index_t i = 0; i < n * d; ++i) h.push_back(float(s.normal()));
    for (index_t i = 0; i < v * d; ++i) w.push_back(float(s.normal()));
    const own::hidden_teacher hidden{view(const_cast<const float*>(h.data()), n, d),
                                     view(const_cast<const float*>(w.data()), v, d), 0.9f};
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i)
            y[std::size_t(r * v + i)] = hidden.logit({r}, i), z[std::size_t(r * v + i)] = float(2 * s.normal());
    cpu_backend be{.threads = 2};
    const auto student = [&](std::vector<float>& to) {
        return student::logits<float>{view(const_cast<const float*>(z.data()), n, v), view(to.data(), n, v)};
    };
    const teacher::dense<float> logits{view(const_cast<const float*>(y.data()), n, v), 0.9f};
    for (const bool two_normalisers : {false, true}) {
        const auto loss = [&](const auto& teacher, std::vector<float>& to) {
            return two_normalisers ? evaluate(be, student(to), teacher, jsd{}, env{}).loss
                                   : evaluate(be, student(to), teacher, forward_kl{}, env{}).loss;
        };
        CHECK(loss(hidden, dz_hidden) == loss(logits, dz));
        CHECK(equal_bits(dz, dz_hidden));
    }
    CHECK(workspace_bytes(be, student(dz), hidden, reverse_kl{}) >=
          workspace_bytes(be, student(dz), logits, reverse_kl{}) + 2 * hidden.scratch_bytes());
    env e;
    e.checks = check::contents;
    CHECK_THROWS_WITH_AS(evaluate(be, student(dz), hidden, reverse_kl{}, e),
                         doctest::Contains("a source that makes its tiles in scratch has none to show"), unsupported);
}

TEST_CASE("a source that makes no sense is refused before anything is written") {
    rolls s(9);
    batch<float> b(s, 2500);
    shards<float> z(b.z, b.n, b.v, 1024), dz(b.dz, b.n, b.v, 1024);
    cpu_backend be{.threads = 1};
    const auto run = [&](own::sharded_student<float> student, index_t rows, env e = {}) {
        return evaluate(be, student, teacher::dense<float>{view(b.y.data(), rows, b.v)}, reverse_kl{}, e);
    };
    const own::sharded_student<float> good{b.n, b.v, 1024, z.at.data(), dz.at.data()};
    auto bad = good;
    bad.width = 1000;
    CHECK_THROWS_WITH_AS(run(bad, b.n), doctest::Contains("student.tile_size(): must be a multiple of 1,024"),
                         invalid_input);
    bad = good, bad.temperature = 0;
    CHECK_THROWS_WITH_AS(run(bad, b.n), doctest::Contains("student.temperature"), invalid_input);
    bad = good, bad.v = 0;
    CHECK_THROWS_WITH_AS(run(bad, b.n), doctest::Contains("student.vocab(): holds no id"), invalid_input);
    CHECK_THROWS_AS(run(good, b.n - 1), invalid_input);
    z.parts[1][5] = NAN;
    env e;
    e.checks = check::contents;
    CHECK_THROWS_WITH_AS(run(good, b.n, e), doctest::Contains("NaN at column 1029"), invalid_input);
    CHECK(equal_bits(dz.joined(), b.dz));
}
