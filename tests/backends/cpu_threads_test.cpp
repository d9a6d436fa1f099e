// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// Threads, row blocks and memory of the CPU backend, for every kind of call: the same bits on 1, 2 and 3 threads,
// several rows a block, the number of threads changed between calls, an arena of exactly the size asked for; and its
// matrix product.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <opd/backends/eigen.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using lse_type = std::remove_cvref_t<decltype(*env{}.lse.data)>;

/// One batch that every cache reads: n rows, some of them masked or bad, over several leaves or over few columns.
struct batch {
    index_t rows, vocab, k = 5;
    std::vector<float> z, y, dz, sparse;
    std::vector<std::int32_t> ids, versions;
    std::vector<float> log_q, log_mu, weight, weights, losses;
    std::vector<lse_type> lse;
    std::vector<std::uint8_t> mask, exact;

    batch(index_t n, index_t v, std::uint64_t seed) : rows(n), vocab(v) {
        numbers u(seed);
        for (index_t i = 0; i < n * v; ++i) z.push_back(float(3 * u.normal())), y.push_back(float(3 * u.normal()));
        for (index_t i = 0; i < n * k; ++i) {
            ids.push_back(std::int32_t((i % k) * (v / k) + u.below(v / k)));
            log_q.push_back(float(-1.7 - 2 * u.uniform())), log_mu.push_back(float(-1.7 - 2 * u.uniform()));
            weight.push_back(float(0.3 * u.uniform())), exact.push_back(i % 3 == 0);
        }
        for (index_t r = 0; r < n; ++r) {
            weights.push_back(float(u.normal())), mask.push_back(u.uniform() < 0.8);
            versions.push_back(std::int32_t(u.below(50)));
        }
        dz.assign(z.size(), 0), sparse.assign(ids.size(), 0), losses.assign(std::size_t(n), 0);
        lse.assign(std::size_t(n), 0);
    }
    template <class T>
    matrix_view<const T> matrix(const std::vector<T>& x) const {
        return {x.data(), rows, k, k};
    }
    student::logits<float> student() { return {view(z.data(), rows, vocab), view(dz.data(), rows, vocab), 0.9F}; }
    teacher::dense<float> dense() const { return {view(y.data(), rows, vocab)}; }
    teacher::support<std::int32_t> support() const { return {matrix(ids), matrix(log_q)}; }
    teacher::samples<std::int32_t> samples() const { return {matrix(ids), matrix(log_mu), matrix(log_q)}; }
    teacher::weighted<std::int32_t> weighted() const {
        return {matrix(ids), matrix(weight), matrix(log_mu), matrix(log_q), matrix(exact)};
    }
    opd::env env() {
        opd::env e;
        e.mask = row_mask<>(mask), e.weights = weights, e.losses = losses, e.lse = lse, e.versions = versions;
        e.version = 49;
        return e;
    }
    /// Everything that a call writes.
    std::vector<std::byte> bits(const result& r) const {
        std::vector<std::byte> out;
        const auto add = [&out](const void* p, std::size_t n) {
            const auto* b = static_cast<const std::byte*>(p);
            out.insert(out.end(), b, b + n);
        };
        const diagnostics& d = r.diagnostics;
        const double sums[] = {
            r.loss,   d.kept_loss, d.ratio_sum,        d.ratio_square_sum, d.ratio_max,       d.k1_sum,
            d.k2_sum, d.k3_sum,    d.student_mass_sum, d.teacher_mass_sum, d.student_mass_min};
        const index_t counts[] = {d.rows,          d.kept,   d.bad_rows,     d.first_bad_row,
                                  d.infinite_rows, d.tokens, d.staleness_max};
        add(sums, sizeof sums), add(counts, sizeof counts), add(d.staleness, sizeof d.staleness);
        add(dz.data(), dz.size() * sizeof(float)), add(sparse.data(), sparse.size() * sizeof(float));
        add(losses.data(), losses.size() * sizeof(float)), add(lse.data(), lse.size() * sizeof(lse_type));
        return out;
    }
};

/// f(name, call(backend, batch, env)) for every cache, with programs of one sweep and of two.
template <class Visit>
void every_call(Visit f) {
    const auto with = [&f](const char* name, auto cache, auto estimator) {
        f(name, [cache, estimator](eigen_backend& be, batch& b, const env& e) {
            return evaluate(be, b.student(), cache(b), estimator, e);
        });
    };
    const auto dense = [](batch& b) { return b.dense(); };
    const auto support = [](batch& b) { return b.support(); };
    with("reverse KL", dense, reverse_kl{});
    with("forward KL", dense, forward_kl{});
    with("JSD", dense, jsd{.w = .3, .o = .3});
    with("tail bucket", support, tail_bucket{reverse_kl{}});
    with("renormalised", support, renormalised{jsd{.w = .3, .o = .3}});
    with(
        "samples", [](batch& b) { return b.samples(); }, mc{.baseline = baseline::leave_one_out{}});
    with(
        "weighted", [](batch& b) { return b.weighted(); }, mc{reverse_kl{}});
    f("renormalised, sparse gradient", [](eigen_backend& be, batch& b, const env& e) {
        const student::on_support<float> s{view(std::as_const(b.z).data(), b.rows, b.vocab),
                                           view(b.sparse.data(), b.rows, b.k)};
        return evaluate(be, s, b.support(), renormalised{jsd{.w = .3, .o = .3}}, e);
    });
    f("token_logp", [](eigen_backend& be, batch& b, const env& e) {
        return token_logp(be, view(std::as_const(b.z).data(), b.rows, b.vocab), b.matrix(b.ids),
                          view(b.sparse.data(), b.rows, b.k), 0.9F, e.mask, e.lse);
    });
}
/// The env of a call: a renormalised support has no log-sum-exp.
env fitting(const std::string& name, batch& b) {
    env e = b.env();
    if (name.rfind("renormalised", 0) == 0) e.lse = {};
    return e;
}

} // namespace

TEST_CASE("the same bits on 1, 2 and 3 threads, for every kind of call") {
    eigen_backend one, two{.threads = 2}, three{.threads = 3};
    for (const auto& [n, vocab] : {std::pair<index_t, index_t>{7, 2500}, {301, 30}, {521, 12}, {1, 1025}, {0, 10}}) {
        batch start(n, vocab, 5);
        if (n > 5) start.z[std::size_t(3 * vocab + 2)] = std::bit_cast<float>(0x7fc00000u), start.mask[3] = 1;
        every_call([&, n = n, vocab = vocab](const std::string& name, auto call) {
            INFO(name << ", " << n << " rows of " << vocab);
            batch a = start;
            const auto want = a.bits(call(one, a, fitting(name, a)));
            for (eigen_backend* backend : {&one, &two, &three}) {
                batch b = start;
                CHECK(b.bits(call(*backend, b, fitting(name, b))) == want);
            }
        });
    }
}

TEST_CASE("the number of threads may change between calls, and the blocks are then shared by that many") {
    std::vector<std::byte> memory(1 << 22);
    eigen_backend backend{.threads = 1};
    batch start(300, 40, 6), a = start;
    const auto want = a.bits(evaluate(backend, a.student(), a.dense(), jsd{}, a.env()));
    for (const int threads : {3, 1, 2, 0, 4}) {
        backend.threads = threads;
        batch b = start;
        CHECK(b.bits(evaluate(backend, b.student(), b.dense(), jsd{}, b.env())) == want);
        CHECK(backend.team().size() == std::max(threads, 1));
    }
}

TEST_CASE(
    "an arena of the size that workspace_bytes says is enough, whatever its alignment, and 64 bytes less is not") {
    batch b(300, 600, 7);
    for (const int threads : {1, 3}) {
        const auto check = [&](const char* name, const auto& teacher, const auto& estimator, auto env) {
            INFO(name << ", " << threads << " threads");
            eigen_backend backend{.threads = threads};
            const std::size_t bytes = workspace_bytes(backend, b.student(), teacher, estimator, env);
            for (const std::size_t at : {0UL, 1UL, 17UL, 63UL}) {
                std::vector<std::byte> memory(bytes + 256, std::byte{0x5a});
                void* p = memory.data();
                std::size_t room = memory.size();
                std::byte* const aligned = static_cast<std::byte*>(std::align(64, bytes, p, room));
                const auto begin = std::size_t(aligned - memory.data()) + at;
                backend.arena = std::span(memory).subspan(begin, bytes);
                evaluate(backend, b.student(), teacher, estimator, env);
                CHECK(std::all_of(memory.begin() + std::ptrdiff_t(begin + bytes), memory.end(),
                                  [](std::byte x) { return x == std::byte{0x5a}; }));
                // aligned, the call needs 64 bytes less than was asked for, and not one less than that
                backend.arena = std::span(memory).subspan(begin - at, bytes - 64);
                evaluate(backend, b.student(), teacher, estimator, env);
                backend.arena = std::span(memory).subspan(begin - at, bytes - 65);
                CHECK_THROWS_WITH_AS(evaluate(backend, b.student(), teacher, estimator, env),
                                     doctest::Contains("this call needs"), invalid_input);
            }
        };
        check("JSD", b.dense(), jsd{}, env{});
        check("tail bucket", b.support(), tail_bucket{reverse_kl{}}, env{});
        check("samples", b.samples(), mc{reverse_kl{}}, env{});
    }
    // scratch is a worker's: more threads need more
    eigen_backend one, three{.threads = 3};
    const std::size_t by_one = workspace_bytes(one, b.student(), b.dense(), jsd{}),
                      by_three = workspace_bytes(three, b.student(), b.dense(), jsd{});
    CHECK(by_three >= by_one + 2 * 600 * sizeof(float));
}

TEST_CASE("reports of several rows a block: the first bad row, staleness, the mean loss of good rows") {
    for (const int threads : {1, 2}) {
        eigen_backend backend{.threads = threads};
        const index_t n = 700, vocab = 9; // three rows a block
        batch b(n, vocab, 8);
        std::fill(b.mask.begin(), b.mask.end(), std::uint8_t{1});
        const auto spoil = [&](index_t r) { b.z[std::size_t(r * vocab + 4)] = std::bit_cast<float>(0x7fc00000u); };
        spoil(404), spoil(403), spoil(402), spoil(650); // 402..404 lie in one block
        b.mask[10] = 0;
        for (index_t r = 0; r < n; ++r) b.versions[std::size_t(r)] = std::int32_t(100 - r % 3);
        b.versions[200] = 60, b.versions[402] = 0, b.versions[10] = 1; // a bad row's and a masked one's do not count
        env e = b.env();
        e.version = 101, e.weights = {};
        const diagnostics d = evaluate(backend, b.student(), b.dense(), reverse_kl{}, e).diagnostics;
        CHECK(d.rows == n);
        CHECK(d.kept == n - 1);
        CHECK(d.bad_rows == 4);
        CHECK(d.first_bad_row == 402);
        CHECK(d.staleness_max == 41);
        CHECK(d.staleness[32] == 1);
        CHECK(d.staleness[0] == 0);
        CHECK(d.staleness[1] + d.staleness[2] + d.staleness[3] == n - 6);
        double sum = 0;
        for (const float l : b.losses) sum += double(l);
        CHECK(d.kept_loss == doctest::Approx(sum).epsilon(1e-6));
        CHECK(d.mean_kept_loss() == doctest::Approx(sum / double(n - 5)).epsilon(1e-6));
        b.y[std::size_t(500 * vocab)] = b.y[std::size_t(499 * vocab)] = detail::neg_inf<float>();
        const diagnostics infinite = evaluate(backend, b.student(), b.dense(), reverse_kl{}, e).diagnostics;
        CHECK(infinite.infinite_rows == 2);
        CHECK(infinite.first_infinite_row == 499);
    }
}

TEST_CASE("no rows and no kept rows, for every kind of call") {
    eigen_backend backend{.threads = 2};
    for (const index_t n : {0, 3}) {
        batch start(n, 20, 9);
        std::fill(start.mask.begin(), start.mask.end(), std::uint8_t{0});
        every_call([&](const std::string& name, auto call) {
            INFO(name << ", " << n << " rows");
            batch b = start;
            std::fill(b.dz.begin(), b.dz.end(), 3.F), std::fill(b.sparse.begin(), b.sparse.end(), 3.F);
            const result r = call(backend, b, fitting(name, b));
            CHECK(r.loss == 0);
            CHECK(r.diagnostics.rows == n);
            CHECK(r.diagnostics.kept == 0);
            CHECK(r.diagnostics.tokens == 0);
            const bool to_sparse = name == "token_logp" || name == "renormalised, sparse gradient";
            const float left = name == "token_logp" ? 3.F : 0.F; // a masked row's log-probs are not written
            for (const float g : to_sparse ? b.sparse : b.dz) CHECK(g == left);
        });
    }
}

namespace {
template <class Backend>
concept multiplies = requires(Backend& b, matrix_view<const float> in, matrix_view<float> out) {
    b.gemm(false, false, 1.F, in, in, 0.F, out);
};
} // namespace

TEST_CASE("cpu_backend has eigen_backend's rows, without Eigen's products") {
    static_assert(multiplies<eigen_backend> && !multiplies<cpu_backend>);
    std::vector<float> z(3 * 1500), y(z), dz(z), same(z);
    numbers u(19);
    for (float& x : z) x = float(3 * u.normal());
    for (float& x : y) x = float(3 * u.normal());
    const auto of = [&](auto&& backend, std::vector<float>& to) {
        return evaluate(backend, student::logits{view(std::as_const(z).data(), 3, 1500), view(to.data(), 3, 1500)},
                        teacher::dense{view(std::as_const(y).data(), 3, 1500)}, jsd{});
    };
    const result a = of(cpu_backend{.threads = 2}, dz), b = of(eigen_backend{.threads = 2}, same);
    CHECK(a.loss == b.loss);
    CHECK(dz == same);
}

TEST_CASE("gemm: alpha op(A) op(B) + beta C, every transposition, padded rows") {
    eigen_backend backend;
    numbers u(10);
    const index_t m = 4, k = 5, n = 3;
    for (const bool ta : {false, true})
        for (const bool tb : {false, true})
            for (const double beta : {0.0, 1.0, -0.5}) {
                const index_t ar = ta ? k : m, ac = ta ? m : k, br = tb ? n : k, bc = tb ? k : n;
                std::vector<double> a(std::size_t(ar * (ac + 2))), b(std::size_t(br * (bc + 1))),
                    c(std::size_t(m * (n + 3)));
                for (auto* x : {&a, &b, &c})
                    for (double& v : *x) v = u.normal();
                const std::vector<double> old = c;
                if (beta == 0) c[1] = std::bit_cast<double>(0x7ff8000000000000ull); // what is there is not read
                const matrix_view<const double> av(a.data(), ar, ac, ac + 2), bv(b.data(), br, bc, bc + 1);
                backend.gemm(ta, tb, 0.75, av, bv, beta, matrix_view<double>(c.data(), m, n, n + 3));
                for (index_t i = 0; i < m; ++i)
                    for (index_t j = 0; j < n + 3; ++j) {
                        const auto at = std::size_t(i * (n + 3) + j);
                        double want = j < n ? beta * old[at] : old[at];
                        for (index_t l = 0; l < k && j < n; ++l)
                            want += 0.75 * (ta ? av(l, i) : av(i, l)) * (tb ? bv(j, l) : bv(l, j));
                        CHECK(c[at] == doctest::Approx(want).epsilon(1e-13));
                    }
            }
    std::vector<double> x(20);
    const matrix_view<const double> in(x.data(), 4, 5, 5);
    CHECK_THROWS_WITH_AS(backend.gemm(false, false, 1.0, in, in, 0.0, matrix_view<double>(x.data(), 4, 5, 5)),
                         doctest::Contains("shapes do not fit"), invalid_input);
    CHECK_THROWS_AS(backend.gemm(false, true, 1.0, in, in, 0.0, matrix_view<double>(x.data(), 4, 5, 5)), invalid_input);
    CHECK_THROWS_AS(backend.gemm(true, false, 1.0, in, in, 0.0, matrix_view<double>(x.data(), 4, 4, 5)), invalid_input);
}
