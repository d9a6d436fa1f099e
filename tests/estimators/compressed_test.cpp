// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// compressed.hpp against the definitions in float64, by Jacobi's SVD of the matrices themselves: what each choice of
// directions leaves out, that no other leaves out less by its measure, exactness at full rank; calibration against its
// formulas, however rows come.
#include "support/property.hpp"

#include <Eigen/SVD>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/compressed.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;

namespace {
std::atomic<std::size_t> largest_allocation{0};
}
[[gnu::noinline]] void* operator new(std::size_t n) {
    for (std::size_t seen = largest_allocation; n > seen && !largest_allocation.compare_exchange_weak(seen, n);) {}
    if (void* p = std::malloc(n == 0 ? 1 : n)) return p;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace {

using floats = std::vector<float>;
using matrix = Eigen::MatrixXd;
using numbers = Eigen::VectorXd;

/// A teacher whose states lie in a few directions of falling size, with a mean, and whose head has some rows that are
/// likelier.
struct world {
    index_t n, v, d;
    floats h, w, bias;
    float cap = 0, temperature = 1;
    world(index_t n_, index_t v_, index_t d_, unsigned seed, bool more = false) : n(n_), v(v_), d(d_) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<float> mix(std::size_t(d * d)), mean(static_cast<std::size_t>(d));
        for (float& x : mix) x = normal(random) / std::sqrt(float(d));
        for (float& x : mean) x = normal(random);
        for (index_t r = 0; r < n; ++r) {
            floats y(static_cast<std::size_t>(d));
            for (index_t j = 0; j < d; ++j) y[std::size_t(j)] = normal(random) * 3 / float(1 + j);
            for (index_t i = 0; i < d; ++i) {
                float x = mean[std::size_t(i)];
                for (index_t j = 0; j < d; ++j) x += mix[std::size_t(i * d + j)] * y[std::size_t(j)];
                h.push_back(x);
            }
        }
        for (index_t i = 0; i < v; ++i) {
            const float size = 2 / std::sqrt(float(d)) / (i % 7 == 0 ? 1.0f : 3.0f);
            for (index_t j = 0; j < d; ++j) w.push_back(size * normal(random) + (i % 7 == 0 ? 0.1f : 0));
        }
        if (!more) return;
        for (index_t i = 0; i < v; ++i) bias.push_back(normal(random));
        temperature = 1.5f;
    }
    teacher::hidden<float> source(index_t first, index_t count) const {
        teacher::hidden<float> t{.x = view(h.data() + first * d, count, d), .w = head(), .temperature = temperature};
        if (!bias.empty()) t.bias = bias;
        t.soft_cap = cap;
        return t;
    }
    teacher::hidden<float> source() const { return source(0, n); }
    matrix_view<const float> head() const { return view(w.data(), v, d); }
    matrix states() const { return as_double(h, n, d); }
    matrix heads() const { return as_double(w, v, d); }
    static matrix as_double(const floats& x, index_t rows, index_t cols) {
        matrix m(rows, cols);
        for (index_t r = 0; r < rows; ++r)
            for (index_t c = 0; c < cols; ++c) m(r, c) = double(x[std::size_t(r * cols + c)]);
        return m;
    }
    /// (n,V) in float64, before temperature.
    matrix logits() const {
        matrix z = states() * heads().transpose();
        if (!bias.empty()) z.rowwise() += as_double(bias, 1, v).row(0);
        if (cap > 0) z = double(cap) * (z / double(cap)).array().tanh().matrix();
        return z;
    }
    /// (n,V)
    matrix probabilities() const {
        matrix p = (logits() / double(temperature));
        for (index_t r = 0; r < n; ++r) {
            p.row(r) = (p.row(r).array() - p.row(r).maxCoeff()).exp().matrix();
            p.row(r) /= p.row(r).sum();
        }
        return p;
    }
    numbers mean_probability() const {
        numbers p = probabilities().colwise().mean().transpose().cwiseMax(1e-8);
        return p / p.sum();
    }
    /// With the ridge.
    matrix moment() const {
        matrix c = states().transpose() * states() / double(n);
        c.diagonal().array() += 1e-6 * c.trace() / double(d);
        return c;
    }
};

calibration seen_of(const world& t, thread_team& threads) {
    calibration c(t.v, t.d);
    c.add(threads, t.source());
    return c;
}

/// What a codec makes of the head: (V,D) = decoder times encoder.
matrix remade(const codec& c) {
    return world::as_double(c.decoder, c.vocab, c.rank) * world::as_double(c.encoder, c.rank, c.width);
}
matrix remade(const head_directions& s, const world& t, index_t r) {
    matrix w = t.heads();
    if (s.centre.size() != 0) w.rowwise() -= s.centre.transpose();
    return w * s.decode.leftCols(r) * s.encode.topRows(r);
}
matrix random_matrix(index_t rows, index_t cols, std::mt19937& random) {
    std::normal_distribution<double> normal;
    return matrix::NullaryExpr(rows, cols, [&] { return normal(random); });
}
double relative(const matrix& a, const matrix& b) { return (a - b).norm() / std::max(b.norm(), 1e-300); }
template <class Call>
std::string refused(Call&& call) {
    try {
        call();
    } catch (const invalid_input& e) {
        return e.argument;
    }
    return "nothing";
}

struct choices {
    head_directions truncated, important, reweighted;
    choices(const world& t, thread_team& threads) : choices(t, threads, seen_of(t, threads)) {}
    choices(const world& t, thread_team& threads, const calibration& seen)
        : truncated(truncated_svd(threads, t.head())), important(importance_svd(truncated, seen)),
          reweighted(reweighted_svd(threads, t.head(), seen)) {}
    std::vector<const head_directions*> all() const { return {&truncated, &important, &reweighted}; }
};

} // namespace

TEST_CASE("all three are exact at full rank") {
    thread_team threads(2);
    cpu_backend be{.threads = 1};
    for (const auto& [v, d, more, cap] :
         {std::tuple{40, 6, false, 0.0f}, {9, 14, true, 0.0f}, {700, 24, true, 0.0f}, {700, 24, true, 4.0f}}) {
        CAPTURE(v);
        CAPTURE(cap);
        world t(61, v, d, unsigned(v), more);
        t.cap = cap;
        const choices made(t, threads);
        const index_t r = std::min(v, d);
        for (const head_directions* s : made.all()) {
            CHECK(relative(s->encode * s->decode, matrix::Identity(d, d)) < 1e-9);
            const codec c = make_codec(threads, *s, t.head(), r);
            floats codes(std::size_t(t.n * r));
            encode(threads, c, t.source().x, view(codes.data(), t.n, r));
            // float32: a logit is a sum of r products whose first factors are sums of D; each number is rounded once,
            // each sum once a term
            const matrix z = t.heads() * t.states().transpose(), again = remade(c) * t.states().transpose();
            const matrix size = world::as_double(c.decoder, v, r).cwiseAbs() *
                                (world::as_double(c.encoder, r, d).cwiseAbs() * t.states().transpose().cwiseAbs());
            const matrix wrong = world::as_double(c.decoder, v, r) * world::as_double(codes, t.n, r).transpose() - z;
            const double bound = (double(d) + 3) * std::ldexp(1.0, -24);
            double worst = 0;
            for (index_t i = 0; i < t.n; ++i) {
                const double level = s->centre.size() == 0 ? 0 : wrong.col(i).mean();
                for (index_t k = 0; k < v; ++k)
                    worst = std::max(worst, std::abs(wrong(k, i) - level) / (bound * (size(k, i) + std::abs(level))));
            }
            CHECK(worst < 1);
            CHECK(relative(again.rowwise() - again.colwise().mean(), z.rowwise() - z.colwise().mean()) < 1e-5);

            teacher::hidden<float> coded = t.source();
            coded.x = view(codes.data(), t.n, r), coded.w = c.decoder_view();
            student::hidden<float> whole{.x = t.source().x, .w = t.head(), .temperature = t.temperature};
            whole.bias = coded.bias, whole.soft_cap = cap;
            CHECK(evaluate(be, whole, coded, reverse_kl{}).loss < 1e-7);
            coded.x = view(codes.data(), t.n, r / 2, r), coded.w = c.decoder_view(r / 2);
            CHECK(evaluate(be, whole, coded, reverse_kl{}).loss > 1e-5); // there is something to lose
        }
    }
}

TEST_CASE("no map of rank r is nearer to the head than the truncated one") {
    thread_team threads(1);
    const world t(30, 90, 12, 5);
    const head_directions s = truncated_svd(threads, t.head());
    const Eigen::JacobiSVD<matrix> svd(t.heads());
    CHECK(relative(s.energy, svd.singularValues().cwiseAbs2()) < 1e-12);
    std::mt19937 random(3);
    for (const index_t r : {1, 3, 7, 11}) {
        const double beyond = svd.singularValues().tail(t.d - r).squaredNorm();
        const double left = (t.heads() - remade(s, t, r)).squaredNorm();
        CHECK(left == doctest::Approx(beyond).epsilon(1e-10).scale(t.heads().squaredNorm()));
        CHECK(s.energy_left_out(r) == doctest::Approx(beyond).epsilon(1e-10));
        for (int i = 0; i < 100; ++i) {
            const Eigen::HouseholderQR<matrix> qr(random_matrix(t.d, r, random));
            const matrix q = qr.householderQ() * matrix::Identity(t.d, r);
            CHECK((t.heads() - t.heads() * q * q.transpose()).squaredNorm() >= left);
            // and around it
            const matrix e = s.encode.topRows(r) + 0.01 * random_matrix(r, t.d, random);
            const matrix g = t.heads() * e.transpose() * (e * e.transpose()).inverse();
            CHECK((t.heads() - g * e).squaredNorm() >= left);
        }
    }
}

TEST_CASE("importance is what a direction brings to the logits of the states that were seen") {
    thread_team threads(2);
    const world t(200, 90, 12, 6);
    const choices made(t, threads);
    const Eigen::JacobiSVD<matrix> svd(t.heads(), Eigen::ComputeThinU | Eigen::ComputeThinV);
    std::vector<std::pair<double, index_t>> by_hand; // -importance, direction
    for (index_t i = 0; i < t.d; ++i) {
        double energy = 0;
        for (index_t r = 0; r < t.n; ++r) energy += std::pow(svd.matrixV().col(i).dot(t.states().row(r)), 2);
        by_hand.emplace_back(-std::pow(svd.singularValues()[i], 2) * energy / double(t.n), i);
    }
    std::sort(by_hand.begin(), by_hand.end());
    bool another_order = false;
    for (index_t i = 0; i < t.d; ++i) {
        const auto [importance, direction] = by_hand[std::size_t(i)];
        CHECK(made.important.energy[i] == doctest::Approx(-importance).epsilon(1e-9));
        CHECK(std::abs(made.important.encode.row(i).dot(svd.matrixV().col(direction))) ==
              doctest::Approx(1).epsilon(1e-9));
        another_order = another_order || direction != i;
    }
    CHECK(another_order);
    const matrix z = t.states() * t.heads().transpose();
    for (const index_t r : {1, 4, 11}) {
        const auto squared = [&](const head_directions& s) {
            return (z - t.states() * remade(s, t, r).transpose()).squaredNorm() / double(t.n);
        };
        CHECK(made.important.energy_left_out(r) == doctest::Approx(squared(made.important)).epsilon(1e-9));
        CHECK(squared(made.important) <= squared(made.truncated) * (1 + 1e-12));
    }
}

TEST_CASE("the reweighted map leaves the least variance under the mean probability") {
    thread_team threads(2);
    std::mt19937 random(8);
    for (const bool more : {false, true}) {
        const world t(150, 60, 10, 7, more);
        const choices made(t, threads);
        const head_directions& s = made.reweighted;
        const numbers p = t.mean_probability();
        const matrix moment = t.moment();
        const Eigen::SelfAdjointEigenSolver<matrix> of_moment(moment); // the square root of the formula
        matrix centred = t.heads();
        const Eigen::RowVectorXd mean_row = p.transpose() * t.heads();
        centred.rowwise() -= mean_row;
        const matrix weighted = p.cwiseSqrt().asDiagonal() * centred * of_moment.operatorSqrt();
        const Eigen::JacobiSVD<matrix> svd(weighted, Eigen::ComputeThinU | Eigen::ComputeThinV);
        CHECK(relative(s.energy, svd.singularValues().cwiseAbs2()) < 1e-5); // p̄ is of float logits
        CHECK(relative(s.centre, mean_row.transpose()) < 1e-5);
        const codec c = make_codec(threads, s, t.head(), t.d);
        CHECK(relative(world::as_double(c.decoder, t.v, t.d), centred * s.decode) < 1e-5);
        const auto cost = [&](const matrix& map) { // E[Σ_v p̄_v (error_v)²], of E[h hᵀ] with the ridge
            const matrix wrong = centred - map;
            return (p.asDiagonal() * (wrong * moment).cwiseProduct(wrong)).sum();
        };
        for (const index_t r : {1, 3, 6, 9}) {
            const matrix by_hand = p.cwiseSqrt().cwiseInverse().asDiagonal() * svd.matrixU().leftCols(r) *
                                   svd.singularValues().head(r).asDiagonal() * svd.matrixV().leftCols(r).transpose() *
                                   of_moment.operatorInverseSqrt();
            CHECK(relative(remade(s, t, r), by_hand) < 1e-4);
            const double left = cost(remade(s, t, r)), beyond = svd.singularValues().tail(t.d - r).squaredNorm();
            CHECK(left == doctest::Approx(beyond).epsilon(1e-5));
            CHECK(s.energy_left_out(r) == doctest::Approx(left).epsilon(1e-5));
            const auto centred_cost = [&](matrix map) { // of others' maps, less the mean row, which no softmax sees
                const Eigen::RowVectorXd mean = p.transpose() * map;
                map.rowwise() -= mean;
                return cost(map);
            };
            CHECK(left < centred_cost(remade(made.truncated, t, r)));
            CHECK(left < centred_cost(remade(made.important, t, r)));
            for (int i = 0; i < 100; ++i) {
                // any encoder, with the decoder that is best for it: least squares under C
                const double far = i % 2 == 0 ? 0.02 : 10;
                const matrix e = s.encode.topRows(r) + far * random_matrix(r, t.d, random);
                const matrix g = centred * moment * e.transpose() * (e * moment * e.transpose()).inverse();
                CHECK(cost(g * e) >= left * (1 - 1e-6));
            }
        }
    }
}

TEST_CASE("calibration is its formulas, however rows come") {
    const world t(700, 50, 9, 9, true);
    thread_team one(1), two(2);
    const calibration whole = seen_of(t, one), again = seen_of(t, two);
    CHECK(whole.rows() == 700);
    CHECK(whole.bad_rows() == 0);
    CHECK(relative(whole.second_moment(), t.states().transpose() * t.states() / 700.0) < 1e-14);
    CHECK(relative(whole.mean_probability(), t.mean_probability()) < 2e-6);
    CHECK(whole.mean_probability().sum() == doctest::Approx(1).epsilon(1e-14));
    CHECK(again.second_moment() == whole.second_moment());
    CHECK(again.mean_probability() == whole.mean_probability());

    test::property("batches, budgets and workers",
                   [&] {
                       const int workers = *rc::gen::inRange(1, 4);
                       std::mt19937 random(*rc::gen::arbitrary<unsigned>());
                       const auto from = [&](index_t least, index_t below) {
                           return least + index_t(random()) % (below - least);
                       };
                       std::vector<calibration> parts(std::size_t(workers), calibration(t.v, t.d));
                       for (index_t at = 0; at < t.n;) {
                           const index_t count = std::min(from(0, 600), t.n - at);
                           auto rows = t.source(at, count);
                           rows.budget = std::size_t(from(0, 40)) * sizeof(float) * std::size_t(t.v);
                           parts[std::size_t(from(0, workers))].add(random() % 2 == 0 ? one : two, rows);
                           at += count;
                       }
                       calibration left(t.v, t.d), right(t.v, t.d);
                       for (const calibration& c : parts) left.merge(c);
                       for (std::size_t i = parts.size(); i-- > 0;) {
                           calibration c = parts[i];
                           c.merge(right);
                           right = c;
                       }
                       for (const calibration* c : {&left, &right}) {
                           RC_ASSERT(c->rows() == t.n);
                           RC_ASSERT(relative(c->second_moment(), whole.second_moment()) < 1e-13);
                           RC_ASSERT(relative(c->mean_probability(), whole.mean_probability()) < 1e-13);
                       }
                   },
                   {.cases = 30});
}

TEST_CASE("a soft-cap counts in the mean probability, and its head is not centred, whoever saw it") {
    world t(120, 50, 9, 9, true);
    t.cap = 0.7f;
    thread_team threads(2);
    const calibration capped = seen_of(t, threads);
    CHECK(relative(capped.mean_probability(), t.mean_probability()) < 2e-6);
    CHECK(reweighted_svd(threads, t.head(), capped).centre.size() == 0);
    t.cap = 0;
    calibration plain = seen_of(t, threads);
    CHECK(reweighted_svd(threads, t.head(), plain).centre.size() == 9);
    plain.merge(capped);
    CHECK(plain.soft_capped());
}

TEST_CASE("a row with a logit of NaN or infinity is bad, wherever it stands") {
    thread_team threads(1);
    for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
        for (const std::size_t i : {0, 7, 11}) {
            world t(20, 12, 4, 3, true);
            t.bias[i] = wrong;
            const calibration c = seen_of(t, threads);
            CHECK(c.bad_rows() == 20);
            CHECK(c.rows() == 0);
        }
}

TEST_CASE("a bias of 10,000 costs a logit one rounding, not one of each addition") {
    world t(40, 50, 1024, 11, true);
    for (float& b : t.bias) b += 1e4f;
    thread_team threads(2);
    CHECK(relative(seen_of(t, threads).mean_probability(), t.mean_probability()) < 2e-4);
}

TEST_CASE("masked rows and bad rows are left out, and bad ones counted") {
    thread_team threads(2);
    for (const float cap : {0.0f, 3.0f}) {
        world t(90, 40, 6, 10), kept(0, 40, 6, 10);
        t.cap = kept.cap = cap;
        kept.w = t.w;
        std::vector<std::uint8_t> mask(90, 1);
        index_t bad = 0, unlooked = 0;
        for (index_t r = 0; r < 90; ++r) {
            float* h = t.h.data() + r * 6;
            if (r % 11 == 3) h[r % 6] = std::numeric_limits<float>::quiet_NaN();
            if (r % 13 == 5) h[r % 6] = std::numeric_limits<float>::infinity(); // under a cap its logits are finite
            if (r % 17 == 8) std::fill_n(h, 6, 3e38f);                          // finite, but its logits are not
            if (r % 4 == 1) mask[std::size_t(r)] = 0;
            const bool wrong = r % 11 == 3 || r % 13 == 5 || (r % 17 == 8 && cap == 0);
            if (mask[std::size_t(r)] == 0)
                unlooked += wrong;
            else if (wrong)
                ++bad;
            else
                kept.h.insert(kept.h.end(), h, h + 6), ++kept.n;
        }
        REQUIRE(bad > 3);
        REQUIRE(unlooked > 0);
        calibration c(40, 6), good(40, 6);
        auto rows = t.source();
        rows.budget = 7 * sizeof(float) * std::size_t(t.v);
        if (cap > 0) // 3e38 squared is no moment to compare with
            for (index_t r = 8; r < 90; r += 17) mask[std::size_t(r)] = 0;
        if (cap > 0) {
            kept.h.clear(), kept.n = 0, bad = 0;
            for (index_t r = 0; r < 90; ++r) {
                if (mask[std::size_t(r)] == 0) continue;
                if (r % 11 == 3 || r % 13 == 5)
                    ++bad;
                else
                    kept.h.insert(kept.h.end(), t.h.begin() + r * 6, t.h.begin() + (r + 1) * 6), ++kept.n;
            }
        }
        c.add(threads, rows, mask);
        good.add(threads, kept.source());
        CHECK(c.bad_rows() == bad);
        CHECK(c.rows() == kept.n);
        CHECK(good.bad_rows() == 0);
        CHECK(relative(c.second_moment(), good.second_moment()) < 1e-14);
        CHECK(relative(c.mean_probability(), good.mean_probability()) < 1e-13);
        calibration sum(40, 6);
        sum.merge(c), sum.merge(c);
        CHECK(sum.bad_rows() == 2 * bad);
        CHECK(sum.rows() == 2 * kept.n);
    }
    // a vocabulary padded by a bias of -infinity is none of it
    world t(20, 12, 4, 3, true);
    t.bias[5] = -std::numeric_limits<float>::infinity();
    const calibration c = seen_of(t, threads);
    CHECK(c.rows() == 20);
    CHECK(c.mean_probability()[5] == doctest::Approx(1e-8).epsilon(1e-6));
    std::fill(t.bias.begin(), t.bias.end(), -std::numeric_limits<float>::infinity());
    CHECK(seen_of(t, threads).bad_rows() == 20); // no mass
}

TEST_CASE("no token's mean probability is below its floor") {
    thread_team threads(1);
    world t(40, 300, 5, 11);
    t.bias.assign(300, 0.0f);
    for (std::size_t i = 0; i < 250; ++i) t.bias[i] = i < 200 ? -500.0f : -12.0f;
    const numbers p = seen_of(t, threads).mean_probability();
    CHECK(relative(p, t.mean_probability()) < 2e-6);
    CHECK(p.minCoeff() == doctest::Approx(1e-8 / (1 + 200e-8)).epsilon(1e-6));
    CHECK(p[220] > 2e-8);
    CHECK(p.sum() == doctest::Approx(1).epsilon(1e-14));
    const codec c = make_codec(threads, reweighted_svd(threads, t.head(), seen_of(t, threads)), t.head(), 5);
    CHECK(std::all_of(c.decoder.begin(), c.decoder.end(), [](float x) { return std::isfinite(x); }));
}

TEST_CASE("states that span little, an untrained head, few prefixes") {
    thread_team threads(2);
    for (const int kind : {0, 1, 2, 3}) {
        world t(kind == 2 ? 3 : 64, 80, 16, 12); // three prefixes say little of sixteen directions
        if (kind == 0)                           // states of rank one
            for (index_t r = 1; r < t.n; ++r)
                for (index_t j = 0; j < t.d; ++j) t.h[std::size_t(r * t.d + j)] = float(r) * t.h[std::size_t(j)] / 10;
        if (kind == 1) std::fill(t.w.begin(), t.w.end(), 0.0f); // nothing to be seen
        if (kind == 3)                                          // a head of rank one, whose other energies are rounding
            for (index_t i = 1; i < t.v; ++i)
                for (index_t j = 0; j < t.d; ++j) t.w[std::size_t(i * t.d + j)] = float(i % 5) * t.w[std::size_t(j)];
        const choices made(t, threads);
        for (const head_directions* s : made.all()) {
            CHECK(s->energy.minCoeff() >= 0);
            CHECK(relative(s->encode * s->decode, matrix::Identity(16, 16)) < 1e-6);
            const codec c = make_codec(threads, *s, t.head(), 16);
            for (const floats* x : {&c.encoder, &c.decoder})
                CHECK(std::all_of(x->begin(), x->end(), [](float y) { return std::isfinite(y); }));
            const matrix z = t.states() * t.heads().transpose(), again = t.states() * remade(c).transpose();
            const matrix wrong = z - again, less = wrong.colwise() - wrong.rowwise().mean();
            CHECK(less.norm() <= 1e-4 * z.norm());
        }
    }
}

TEST_CASE("a codec is the first part of one of higher rank, whatever the threads") {
    const world t(33, 300, 20, 13);
    thread_team one(1), three(3);
    const choices made(t, one), same(t, three);
    for (std::size_t k = 0; k < 3; ++k) {
        const codec wide = make_codec(three, *same.all()[k], t.head(), 17);
        floats long_codes(33 * 17);
        encode(three, wide, t.source().x, view(long_codes.data(), 33, 17));
        for (const index_t r : {1, 8, 17}) {
            const codec c = make_codec(one, *made.all()[k], t.head(), r);
            floats codes(std::size_t(33 * r)), first(codes.size());
            encode(one, c, t.source().x, view(codes.data(), 33, r));
            encode(one, wide, t.source().x, view(first.data(), 33, r));
            CHECK(codes == first);
            for (index_t i = 0; i < 33; ++i)
                for (index_t j = 0; j < r; ++j)
                    CHECK(codes[std::size_t(i * r + j)] == long_codes[std::size_t(i * 17 + j)]);
            REQUIRE(wide.decoder_view(r).cols == r);
            for (index_t i = 0; i < 300; ++i)
                for (index_t j = 0; j < r; ++j)
                    CHECK(wide.decoder_view(r)(i, j) == doctest::Approx(double(c.decoder_view()(i, j))).epsilon(1e-6));
            for (index_t i = 0; i < r; ++i)
                for (index_t j = 0; j < 20; ++j) CHECK(wide.encoder_view(r)(i, j) == c.encoder_view()(i, j));
        }
    }
}

TEST_CASE("heads and states may have strides") {
    thread_team threads(2);
    const world t(33, 300, 20, 13);
    floats wide(300 * 23, 1e9f), states(33 * 21, 1e9f);
    for (std::size_t i = 0; i < 300; ++i) std::copy_n(t.w.data() + i * 20, 20, wide.data() + i * 23);
    for (std::size_t i = 0; i < 33; ++i) std::copy_n(t.h.data() + i * 20, 20, states.data() + i * 21);
    const auto head = view(std::as_const(wide).data(), 300, 20, 23);
    const auto h = view(std::as_const(states).data(), 33, 20, 21);
    calibration seen(300, 20);
    seen.add(threads, teacher::hidden{h, head});
    const auto made = reweighted_svd(threads, head, seen);
    const auto expected = reweighted_svd(threads, t.head(), seen_of(t, threads));
    CHECK(made.encode == expected.encode);
    const codec a = make_codec(threads, made, head, 5), b = make_codec(threads, expected, t.head(), 5);
    CHECK(a.decoder == b.decoder);
    floats codes(33 * 5), padded(33 * 7, 4.0f);
    encode(threads, b, t.source().x, view(codes.data(), 33, 5));
    encode(threads, a, h, view(padded.data(), 33, 5, 7));
    for (std::size_t i = 0; i < 33; ++i) {
        for (std::size_t j = 0; j < 5; ++j) CHECK(padded[i * 7 + j] == codes[i * 5 + j]);
        CHECK(padded[i * 7 + 5] == 4.0f);
    }
}

TEST_CASE("calibration takes the memory of a block, not of a batch") {
    thread_team threads(2);
    const world t(1000, 900, 16, 14);
    calibration c(900, 16);
    auto rows = t.source();
    rows.budget = 20 * sizeof(float) * std::size_t(t.v);
    largest_allocation = 0;
    c.add(threads, rows);
    CHECK(largest_allocation == 20 * 900 * sizeof(float));
    CHECK(c.rows() == 1000);
    largest_allocation = 0;
    c.add(threads, t.source()); // a budget for all of them
    CHECK(largest_allocation == 512 * 900 * sizeof(float));
}

TEST_CASE("the page's call") {
    const world known(64, 50, 8, 15), fresh(12, 50, 8, 16);
    const index_t N = 64, M = 12, V = 50, D = 8, r = 3;
    const float *h = known.h.data(), *w = known.w.data(), *new_h = fresh.h.data();
    const world mine(12, 50, 5, 17);
    const student::hidden<float> student = {.x = mine.source().x, .w = mine.head()};
    floats memory(std::size_t(M * r));
    float* codes = memory.data();
    cpu_backend backend;
    // clang-format off
    thread_team threads(2);
    calibration seen(V, D);                                         // once, on prefixes like those to come, batch by batch
    seen.add(threads, teacher::hidden{view(h, N, D), view(w, V, D)});
    const codec c = make_codec(threads, reweighted_svd(threads, view(w, V, D), seen), view(w, V, D), r);

    encode(threads, c, view(new_h, M, D), view(codes, M, r));       // where the teacher runs: r numbers a token are sent

    const teacher::hidden theirs{view(codes, M, r), c.decoder_view()}; // where the student learns
    const auto result = evaluate(backend, student, theirs, reverse_kl{});
    // clang-format on
    const double whole =
        evaluate(backend, student, teacher::hidden{view(new_h, M, D), view(w, V, D)}, reverse_kl{}).loss;
    CHECK(std::abs(result.loss - whole) < 0.5 * whole);
    CHECK(result.loss != whole);
}

TEST_CASE("what is wrong is named") {
    thread_team threads(1);
    world t(5, 20, 4, 18);
    const calibration seen = seen_of(t, threads);
    calibration c(20, 4);
    const auto add = [&](auto change) {
        return refused([&] {
            auto rows = t.source();
            change(rows);
            c.add(threads, rows);
        });
    };
    CHECK(add([](auto& x) { x.x.cols = 3; }) == "teacher.x");
    CHECK(add([](auto& x) { x.w.rows = 19; }) == "teacher.w");
    CHECK(add([](auto& x) { x.w.cols = 3; }) == "teacher.w");
    CHECK(add([](auto& x) { x.temperature = 0; }) == "teacher.temperature");
    CHECK(add([](auto& x) { x.soft_cap = -1; }) == "teacher.soft_cap");
    const floats three(3);
    CHECK(add([&](auto& x) { x.bias = three; }) == "teacher.bias");
    const std::vector<std::uint8_t> short_mask(4, 1);
    CHECK(refused([&] { c.add(threads, t.source(), short_mask); }) == "mask");
    CHECK(c.rows() == 0);
    CHECK(refused([&] { c.merge(calibration(20, 5)); }) == "calibration");
    CHECK(refused([&] { c.merge(calibration(21, 4)); }) == "calibration");
    CHECK(refused([] { calibration(0, 4); }) == "vocab");
    CHECK(refused([] { calibration(4, 0); }) == "width");
    CHECK(refused([&] { c.second_moment(); }) == "calibration");
    CHECK(refused([&] { c.mean_probability(); }) == "calibration");
    CHECK(refused([&] { reweighted_svd(threads, t.head(), c); }) == "calibration");

    const head_directions s = truncated_svd(threads, t.head());
    CHECK(refused([&] { importance_svd(s, calibration(20, 5)); }) == "calibration");
    CHECK(refused([&] { importance_svd(reweighted_svd(threads, t.head(), seen), seen); }) == "truncated");
    CHECK(refused([&] { reweighted_svd(threads, view(t.w.data(), 19, 4), seen); }) == "calibration");
    world zeros = t;
    std::fill(zeros.h.begin(), zeros.h.end(), 0.0f);
    CHECK(refused([&] { reweighted_svd(threads, t.head(), seen_of(zeros, threads)); }) == "calibration");
    CHECK(refused([&] { truncated_svd(threads, {}); }) == "head");
    CHECK(refused([&] { truncated_svd(threads, matrix_view<const float>(t.w.data(), 20, 4, 3)); }) == "head");
    world broken = t;
    broken.w[4 * 7 + 2] = std::numeric_limits<float>::quiet_NaN();
    try {
        truncated_svd(threads, broken.head());
        FAIL("taken");
    } catch (const invalid_input& e) {
        CHECK(e.row == 7);
        CHECK(std::string(e.what()).find("column 2") != std::string::npos);
    }
    CHECK(refused([&] { reweighted_svd(threads, broken.head(), seen); }) == "head");
    CHECK(refused([&] { make_codec(threads, s, broken.head(), 2); }) == "head");
    CHECK(refused([&] { make_codec(threads, s, view(t.w.data(), 20, 3, 4), 2); }) == "head");
    CHECK(refused([&] { make_codec(threads, s, t.head(), 0); }) == "rank");
    CHECK(refused([&] { make_codec(threads, s, t.head(), 5); }) == "rank");

    const codec k = make_codec(threads, s, t.head(), 2);
    CHECK(refused([&] { k.decoder_view(3); }) == "rank");
    CHECK(refused([&] { k.encoder_view(0); }) == "rank");
    floats codes(10, 7.0f);
    const auto to = view(codes.data(), 5, 2);
    CHECK(refused([&] { encode(threads, k, view(t.h.data(), 5, 3, 4), to); }) == "x");
    CHECK(refused([&] { encode(threads, k, view(t.h.data(), 4, 4), to); }) == "codes");
    CHECK(refused([&] { encode(threads, k, view(t.h.data(), 5, 4), view(codes.data(), 5, 3)); }) == "codes");
    CHECK(codes == floats(10, 7.0f));
    t.h[9] = std::numeric_limits<float>::quiet_NaN();
    encode(threads, k, view(std::as_const(t.h).data(), 5, 4), to);
    CHECK(std::isnan(codes[4]));
    CHECK(!std::isnan(codes[2]));
}
