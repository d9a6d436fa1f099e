// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: no
//
// Several teachers: routed calls against a call for each teacher's rows alone, bit for bit, for every kind of cache and
// hidden heads of different widths; row maps against caches spread out by hand; the mean of divergences against
// float64; refusals, and nothing written.
#include "support/compiled/hidden_sides.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/refusal.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>
#include <opd/routes.hpp>

using namespace opd;
using opd::test::refusal;
using opd::test::says;
using namespace opd::test;

namespace {

floats rows_of(const floats& all, vector_view<const index_t> rows, index_t width) {
    floats some;
    for (index_t i = 0; i < rows.size; ++i)
        some.insert(some.end(), all.begin() + rows[i] * width, all.begin() + (rows[i] + 1) * width);
    return some;
}
bool equal_results(const result& a, const result& b) {
    if (std::memcmp(&a.loss, &b.loss, sizeof a.loss) != 0) return false;
    bool equal = true;
    diagnostics::fields([&](const char* name, auto field, auto) {
        if (std::string(name).find("first_") == 0) return; // rows of another batch
        equal =
            equal && std::memcmp(&(a.diagnostics.*field), &(b.diagnostics.*field), sizeof(a.diagnostics.*field)) == 0;
    });
    return equal;
}

constexpr index_t N = 13, V = 37, K = 3;
const std::vector<std::int32_t> which{0, 2, 1, -1, 2, 0, 0, 1, 2, -1, 0, 2, 0};

struct batch {
    floats z = normals(N * V, 1), dz = normals(N * V, 2), y = normals(N * V, 3), log_q = normals(N * 5, 4),
           log_mu = normals(N * 5, 5);
    std::vector<std::int32_t> ids;
    batch() {
        for (float& x : log_q) x = -1.5f - std::abs(x);
        for (float& x : log_mu) x = -1.5f - std::abs(x);
        for (index_t r = 0; r < N; ++r)
            for (index_t j = 0; j < 5; ++j) ids.push_back(std::int32_t((7 * j + r) % V));
    }
};

/// A call of one teacher's rows alone, which have been copied together.
template <class Teacher, class Estimator>
result alone(const batch& b, const row_routes& routes, index_t i, floats& dz, const Teacher& t, const Estimator& e,
             env with, int threads) {
    const auto rows = routes.rows_of(i);
    const floats z = rows_of(b.z, rows, V);
    floats own = rows_of(dz, rows, V);
    cpu_backend be{.threads = threads};
    const result r =
        evaluate(be, student::logits{view(z.data(), rows.size, V), view(own.data(), rows.size, V)}, t, e, with);
    for (index_t j = 0; j < rows.size; ++j) std::copy_n(own.begin() + j * V, V, dz.begin() + rows[j] * V);
    return r;
}

} // namespace

TEST_CASE("which row has which teacher") {
    const row_routes routes(which, K);
    CHECK(routes.rows() == N);
    CHECK(routes.teachers() == K);
    CHECK(routes.count(0) == 5);
    CHECK(routes.count(1) == 2);
    CHECK(routes.count(2) == 4);
    CHECK(routes.rows_of(1)[1] == 7);
    CHECK(routes.places()[4] == 1);
    CHECK(routes.places()[3] == -1);
    std::vector<std::uint8_t> mask(N, 1);
    mask[2] = 0;
    const row_routes fewer(which, K, mask);
    CHECK(fewer.count(1) == 1);
    CHECK(fewer.places()[7] == 0);
    const row_mask<> of = routes.mask_of(2, true), other = routes.mask_of(2, false);
    for (index_t r = 0; r < N; ++r) {
        CHECK(of.kept(r) == (which[std::size_t(r)] == 2));
        CHECK(of.foreign(r) == (which[std::size_t(r)] == 0 || which[std::size_t(r)] == 1));
        CHECK(other.foreign(r) == (which[std::size_t(r)] != 2));
    }
    CHECK(of.kept_of(0, N) == 4);
    CHECK(says(refusal([] { row_routes(std::vector<int>{0, 3}, 3); }), "is 3 for 3 teachers"));
    CHECK(says(refusal([] { row_routes(std::vector<int>{-2}, 3); }), "row 0"));
}

TEST_CASE("routed calls have the bits of a call for each teacher's rows") {
    const batch b;
    const row_routes routes(which, K);
    for (const float beta : {0.0f, 0.5f})
        for (const int threads : {1, 3})
            for (const reduce how : {reduce::token_mean, reduce::sum, reduce::constant}) {
                CAPTURE(beta);
                CAPTURE(threads);
                const env e{.reduction = how, .normaliser = how == reduce::constant ? 7.0 : 0.0, .beta = beta};
                floats dz = b.dz, expected = b.dz;
                cpu_backend be{.threads = threads};
                const student::logits student{view(b.z.data(), N, V), view(dz.data(), N, V)};
                // 0: logits of its rows alone, 1: a support of all rows, 2: drawn tokens
                const floats y0 = rows_of(b.y, routes.rows_of(0), V);
                const auto ids = view(b.ids.data(), N, 5);
                const auto log_q = view(b.log_q.data(), N, 5);
                const auto log_mu = view(b.log_mu.data(), N, 5);
                const auto r =
                    evaluate_routed(be, student, routes, e,
                                    route{teacher::at_rows{teacher::dense{view(y0.data(), routes.count(0), V)},
                                                           row_offsets<>(routes.places())},
                                          jsd{}},
                                    route{teacher::support{ids, log_q}, tail_bucket{reverse_kl{}}},
                                    route{teacher::samples{ids, log_mu, log_q}, mc{reverse_kl{}}});
                result parts[3];
                parts[0] = alone(b, routes, 0, expected, teacher::dense{view(y0.data(), routes.count(0), V)}, jsd{}, e,
                                 threads);
                for (const index_t i : {1, 2}) {
                    std::vector<std::int32_t> own;
                    const auto rows = routes.rows_of(i);
                    for (index_t j = 0; j < rows.size; ++j)
                        own.insert(own.end(), b.ids.begin() + rows[j] * 5, b.ids.begin() + (rows[j] + 1) * 5);
                    const floats q = rows_of(b.log_q, rows, 5), mu = rows_of(b.log_mu, rows, 5);
                    const auto i_v = view(std::as_const(own).data(), rows.size, 5);
                    const auto q_v = view(q.data(), rows.size, 5), mu_v = view(mu.data(), rows.size, 5);
                    parts[i] = i == 1 ? alone(b, routes, 1, expected, teacher::support{i_v, q_v},
                                              tail_bucket{reverse_kl{}}, e, threads)
                                      : alone(b, routes, 2, expected, teacher::samples{i_v, mu_v, q_v},
                                              mc{reverse_kl{}}, e, threads);
                }
                for (index_t i = 0; i < N; ++i) // of no teacher: masked
                    if (which[std::size_t(i)] < 0)
                        for (index_t v = 0; v < V; ++v)
                            expected[std::size_t(i * V + v)] = beta == 0 ? 0 : beta * b.dz[std::size_t(i * V + v)];
                CHECK(equal_bits(dz, expected));
                CHECK(r.of[0].diagnostics.rows == 7); // with those of no teacher
                for (int i = 0; i < 3; ++i) {
                    result mine = r.of[std::size_t(i)];
                    mine.diagnostics.rows = mine.diagnostics.kept;
                    CHECK(equal_results(mine, parts[i]));
                }
                CHECK(r.loss == parts[0].loss + parts[1].loss + parts[2].loss);
                CHECK(r.diagnostics.rows == N);
                CHECK(r.diagnostics.kept == 11);
            }
}

TEST_CASE("a gradient in place of its logits, weights, losses and normalisers of each route") {
    const batch b;
    const row_routes routes(which, K);
    cpu_backend be;
    const teacher::dense t{view(b.y.data(), N, V)};
    floats z = b.z, dz(N * V), losses(N, -1), plain(N);
    std::vector<double> lse(N, -1);
    evaluate(be, student::logits{view(b.z.data(), N, V)}, t, reverse_kl{}, {.losses = plain});
    const env e{.losses = losses, .lse = lse};
    const auto in_place =
        evaluate_routed(be, student::logits{view(z.data(), N, V), view(z.data(), N, V)}, routes, e,
                        route{t, reverse_kl{}}, route{t, reverse_kl{}, 0.25}, route{t, reverse_kl{}, 2.0, 40.0});
    double expected[3] = {};
    for (index_t r = 0; r < N; ++r) {
        const int i = which[std::size_t(r)];
        CHECK(losses[std::size_t(r)] == (i < 0 ? 0 : plain[std::size_t(r)]));
        CHECK((lse[std::size_t(r)] == -1) == (i < 0));
        if (i >= 0) expected[i] += double(plain[std::size_t(r)]);
    }
    CHECK(in_place.of[0].loss == doctest::Approx(expected[0] / 5).epsilon(1e-6));
    CHECK(in_place.of[1].loss == doctest::Approx(0.25 * expected[1] / 2).epsilon(1e-6));
    CHECK(in_place.of[2].loss == doctest::Approx(2 * expected[2] / 40).epsilon(1e-6));
    std::vector<double> weights(N, 0.0); // the same as weights of rows
    const double of[3] = {1 / 5.0, 0.25 / 2, 2 / 40.0};
    for (index_t r = 0; r < N; ++r)
        if (which[std::size_t(r)] >= 0) weights[std::size_t(r)] = of[which[std::size_t(r)]];
    evaluate(be, student::logits{view(b.z.data(), N, V), view(dz.data(), N, V)}, t, reverse_kl{},
             {.reduction = reduce::sum, .weights = weights});
    for (std::size_t i = 0; i < dz.size(); ++i) CHECK(z[i] == doctest::Approx(dz[i]).epsilon(2e-6));
}

TEST_CASE("micro-batches that are given each route's count change no bit of the gradient") {
    const batch b;
    const row_routes routes(which, K);
    floats dz(N * V), cut(N * V);
    cpu_backend be;
    const auto call = [&](const row_routes& own, index_t first, index_t n, floats& to) {
        const teacher::dense t{view(b.y.data() + first * V, n, V)};
        return evaluate_routed(
            be, student::logits{view(b.z.data() + first * V, n, V), view(to.data() + first * V, n, V)}, own, {},
            route{t, reverse_kl{}, 0.3, double(routes.count(0))}, route{t, forward_kl{}, 1.0, double(routes.count(1))},
            route{t, jsd{}, 1.0, double(routes.count(2))});
    };
    call(routes, 0, N, dz);
    for (index_t first = 0; first < N; first += 4) {
        const index_t n = std::min<index_t>(4, N - first);
        call(row_routes(std::vector<int>(which.begin() + first, which.begin() + first + n), K), first, n, cut);
    }
    CHECK(equal_bits(dz, cut));
}

TEST_CASE(
    "hidden heads of different widths: the bits of each teacher's rows alone, and no logits that no row asks for") {
    for (const std::size_t budget : {std::size_t{1} << 30, std::size_t{40000}}) // all rows; tiles or few rows
        for (const bool cap : {false, true}) {
            const index_t v = 1500;
            CAPTURE(budget);
            const side s(N, v, 12, 7, true, cap ? 3.0f : 0), a(5, v, 9, 20), c(4, v, 21, 30, true);
            const side never(2, v, 5, 40);
            const row_routes routes(which, K);
            gradients g(s, 0.5f), expected(s, 0.5f);
            auto mine = student_of(s, g, budget);
            mine.beta_head = 0.5f;
            cpu_backend be{.threads = 2};
            const auto spread = [&](const side& t) {
                return teacher::at_rows{teacher_of(t, budget), row_offsets<>(routes.places())};
            };
            // teacher 1's head would be NaN
            side bad = never;
            for (float& x : bad.w) x = NAN;
            std::vector<std::int32_t> two = which;
            for (auto& i : two) i = i == 1 ? -1 : i;
            const row_routes without(two, K);
            const auto r = evaluate_routed(be, mine, without, {.beta = 0.25f}, route{spread(a), reverse_kl{}},
                                           route{spread(bad), reverse_kl{}}, route{spread(c), jsd{}});
            CHECK(r.diagnostics.bad_rows == 0);
            CHECK(r.of[1].diagnostics.rows == 0);
            for (const index_t i : {0, 2}) { // the same rows of the same student, masked as ever
                const side& t = i == 0 ? a : c;
                side big(N, v, t.d, 0);
                big.w = t.w, big.bias = t.bias;
                for (index_t j = 0; j < t.n; ++j)
                    std::copy_n(t.x.begin() + j * t.d, t.d, big.x.begin() + routes.rows_of(i)[j] * t.d);
                std::vector<std::uint8_t> mask(N);
                for (index_t j = 0; j < N; ++j) mask[std::size_t(j)] = which[std::size_t(j)] == i;
                auto theirs = student_of(s, expected, budget);
                theirs.beta_head = i == 0 ? 0.5f : 1;
                const env e{.mask = mask, .beta = i == 0 ? 0.25f : 1};
                const result one = i == 0 ? evaluate(be, theirs, teacher_of(big, budget), reverse_kl{}, e)
                                          : evaluate(be, theirs, teacher_of(big, budget), jsd{}, e);
                CHECK(one.loss == r.of[std::size_t(i)].loss);
            }
            CHECK(g == expected);
        }
}

TEST_CASE("routes of supports on hidden states: gathered logits go back to the rows that made them") {
    const index_t v = 300;
    const side s(N, v, 12, 7, true);
    const batch b;
    const row_routes routes(which, K);
    gradients g(s, 0.5f), expected(s, 0.5f);
    const teacher::support t{view(b.ids.data(), N, 5), view(b.log_q.data(), N, 5)};
    cpu_backend be;
    evaluate_routed(be, student_of(s, g), routes, {.reduction = reduce::sum, .beta = 0.5f},
                    route{t, renormalised{reverse_kl{}}}, route{t, renormalised{reverse_kl{}}},
                    route{t, renormalised{reverse_kl{}}});
    for (const int i : {0, 1, 2}) {
        std::vector<std::uint8_t> mask(N);
        for (index_t j = 0; j < N; ++j) mask[std::size_t(j)] = which[std::size_t(j)] == i;
        auto theirs = student_of(s, expected);
        theirs.beta_head = i == 0 ? 0.0f : 1;
        evaluate(be, theirs, t, renormalised{reverse_kl{}},
                 {.reduction = reduce::sum, .mask = mask, .beta = i == 0 ? 0.5f : 1});
    }
    CHECK(g == expected);
}

TEST_CASE("a row map: the bits of the cache spread out") {
    const batch b;
    const std::vector<std::int64_t> map{3, 3, 0, 99, 1, 4, 4, 2, 0, -7, 1, 2, 4}; // rows 3 and 9 are masked
    std::vector<std::uint8_t> mask(N, 1);
    mask[3] = mask[9] = 0;
    std::vector<index_t> spread;
    for (const auto m : map) spread.push_back(m < 0 || m > 4 ? 0 : m);
    const vector_view<const index_t> rows(spread);
    const floats few = rows_of(b.y, rows, V);
    cpu_backend be{.threads = 2};
    const auto same = [&](const auto& mapped, const auto& plain, const auto& estimator, env e) {
        floats dz(N * V, 1), other(N * V, 1);
        e.mask = mask;
        const result x =
            evaluate(be, student::logits{view(b.z.data(), N, V), view(dz.data(), N, V)}, mapped, estimator, e);
        const result y =
            evaluate(be, student::logits{view(b.z.data(), N, V), view(other.data(), N, V)}, plain, estimator, e);
        CHECK(equal_bits(dz, other));
        CHECK(equal_results(x, y));
        CHECK(x.loss != 0);
    };
    const row_offsets<> by(map);
    const teacher::dense five{view(b.y.data(), 5, V)}, plain{view(few.data(), N, V)};
    same(teacher::at_rows{five, by}, plain, reverse_kl{}, {});
    same(teacher::at_rows{five, by}, plain, total_variation{}, {.checks = check::contents});
    same(teacher::lumped{teacher::at_rows{five, by}, 30}, teacher::lumped{plain, 30}, jsd{}, {});
    std::vector<std::int32_t> ids;
    floats log_q = rows_of(b.log_q, rows, 5), tail, tails;
    for (index_t r = 0; r < N; ++r) tails.push_back(-2 - 0.1f * float(r));
    for (index_t r = 0; r < N; ++r) {
        ids.insert(ids.end(), b.ids.begin() + spread[std::size_t(r)] * 5,
                   b.ids.begin() + spread[std::size_t(r)] * 5 + 5);
        tail.push_back(tails[std::size_t(spread[std::size_t(r)])]);
    }
    const teacher::support<std::int32_t> k5{view(b.ids.data(), 5, 5), view(b.log_q.data(), 5, 5),
                                            view(std::as_const(tails).data(), 5)},
        k13{view(std::as_const(ids).data(), N, 5), view(std::as_const(log_q).data(), N, 5),
            view(std::as_const(tail).data(), N)};
    same(teacher::at_rows{k5, by}, k13, tail_bucket{reverse_kl{}}, {.checks = check::contents});
    same(teacher::at_rows{k5, by}, k13, renormalised{jsd{}}, {});
    const std::vector<std::int32_t> starts{0, 2, 7, 8, 14, 19};
    std::vector<std::int32_t> line, offsets{0};
    floats q_line;
    for (const index_t r : spread) {
        for (auto j = starts[std::size_t(r)]; j < starts[std::size_t(r) + 1]; ++j)
            line.push_back((17 * j) % V), q_line.push_back(b.log_q[std::size_t(j)]);
        offsets.push_back(std::int32_t(line.size()));
    }
    std::vector<std::int32_t> own;
    for (int j = 0; j < 19; ++j) own.push_back((17 * j) % V);
    const teacher::ragged_support some{view(std::as_const(own).data(), 19), view(b.log_q.data(), 19),
                                       row_offsets<>(starts)},
        many{view(std::as_const(line).data(), line.size()), view(std::as_const(q_line).data(), line.size()),
             row_offsets<>(offsets)};
    same(teacher::at_rows{some, by}, many, tail_bucket{forward_kl{}}, {});
    // hidden states of another length, of which a row serves several
    const side t(5, V, 8, 3, true);
    side wide(N, V, 8, 0);
    wide.w = t.w, wide.bias = t.bias;
    wide.x = rows_of(t.x, rows, 8);
    same(teacher::at_rows{teacher_of(t), by}, teacher_of(wide), reverse_kl{}, {});
    same(teacher::at_rows{teacher_of(t, 3000), by}, teacher_of(wide, 3000), jsd{}, {});
}

TEST_CASE("the mean of divergences against float64, by any thread") {
    const batch b;
    const floats second = normals(N * V, 11);
    std::vector<std::uint8_t> mask(N, 1);
    mask[5] = 0;
    for (const int threads : {1, 2}) {
        floats dz(N * V, 1);
        cpu_backend be{.threads = threads};
        const auto r = evaluate_mean(be, student::logits{view(b.z.data(), N, V), view(dz.data(), N, V)},
                                     env{.mask = mask}, route{teacher::dense{view(b.y.data(), N, V)}, jsd{}, 0.7},
                                     route{teacher::dense{view(second.data(), N, V), 1.3f}, jsd{}, 0.3});
        naive_backend exact;
        std::vector<double> sum(N * V), one(N * V);
        double loss = 0;
        const std::vector<double> z(b.z.begin(), b.z.end());
        for (const int i : {0, 1}) {
            const floats& y = i == 0 ? b.y : second;
            const double w = i == 0 ? 0.7 : 0.3;
            const result part =
                evaluate(exact, student::logits{view(z.data(), N, V), view(one.data(), N, V)},
                         teacher::dense<float>{view(y.data(), N, V), i == 0 ? 1.0f : 1.3f}, jsd{}, {.mask = mask});
            loss += w * part.loss;
            CHECK(r.of[std::size_t(i)].loss == doctest::Approx(w * part.loss).epsilon(1e-6));
            for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += w * one[j];
        }
        CHECK(r.loss == doctest::Approx(loss).epsilon(1e-6));
        for (std::size_t j = 0; j < sum.size(); ++j) CHECK(std::abs(double(dz[j]) - sum[j]) < 1e-8);
    }
}

TEST_CASE("what is refused is named, and nothing is written") {
    const batch b;
    const row_routes routes(which, 2 + 1);
    floats dz(N * V, 7), losses(N, 7);
    cpu_backend be;
    const student::logits s{view(b.z.data(), N, V), view(dz.data(), N, V)};
    const teacher::dense t{view(b.y.data(), N, V)};
    const route ok{t, reverse_kl{}};
    const auto call = [&](env e, const auto& x, const auto& y, const auto& z) {
        return refusal([&] { evaluate_routed(be, s, routes, e, x, y, z); });
    };
    std::vector<int> mask(N, 1);
    CHECK(says(call({.mask = mask}, ok, ok, ok), "env.mask"));
    CHECK(says(call({}, ok, ok, route{t, jsd{.w = 2}}), "jsd.w"));
    CHECK(says(call({}, ok, route{t, reverse_kl{}, 0.0}, ok), "route 1.weight"));
    CHECK(says(call({}, ok, ok, route{t, reverse_kl{}, 1.0, -3.0}), "route 2.normaliser"));
    CHECK(says(refusal([&] { evaluate_routed(be, s, routes, {}, ok, ok); }), "are of 3 teachers; the call has 2"));
    CHECK(says(refusal([&] {
                   evaluate_routed(be, s, row_routes(std::vector<int>{0, 1, 2}, 3), {}, ok, ok, ok);
               }),
               "have 3 rows; the student has 13"));
    const std::vector<std::int32_t> map{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13};

    const std::string beyond = call({}, route{teacher::at_rows{t, row_offsets<>(map)}, reverse_kl{}}, ok, ok);
    CHECK(says(beyond, "teacher.map"));
    CHECK(says(beyond, "row 12"));
    CHECK(says(call({}, route{teacher::at_rows{t, row_offsets<>(map.data(), 12)}, reverse_kl{}}, ok, ok),
               "has 12 entries for 13 rows"));
    CHECK(says(refusal([&] {
                   evaluate_mean(be, student::logits{view(dz.data(), N, V), view(dz.data(), N, V)}, {}, ok, ok);
               }),
               "student.dz"));
    CHECK(says(refusal([&] {
                   evaluate_mean(be, s, {.losses = losses}, route{t, reverse_kl{}, 0.5}, ok);
               }),
               "env.losses"));
    CHECK(dz[0] == 7);
    CHECK(losses[0] == 7);
    // bad rows of a later route are thrown for once all is written
    floats y = b.y;
    y[std::size_t(1 * V)] = NAN; // teacher 2's
    const teacher::dense bad_one{view(std::as_const(y).data(), N, V)};
    try {
        evaluate_routed(be, s, routes, {.on_bad = bad::raise()}, ok, ok, route{bad_one, reverse_kl{}});
        FAIL("not thrown");
    } catch (const bad_contents& e) {
        CHECK(e.result.diagnostics.first_bad_row == 1);
        CHECK(dz[std::size_t(12 * V)] != 7);
    }
}
