// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What must hold of losses from hidden states: dense, a support of all ids, kept sets of all ids and head + tail with h
// = V are one gradient; its error against float64 from the states on; micro-batches change rounding, contents of masked
// rows nothing.
#include "support/compiled/hidden_sides.hpp"
#include "support/hidden_exact.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/draw.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

TEST_CASE("dense = a support of every id = kept sets of every id = head + tail with h = V, hidden or not") {
    const index_t n = 5, v = 48;
    for (const bool identity : {true, false}) {
        side s(n, v, identity ? v : 10, 1), t(n, v, 7, 2);
        if (identity) {
            std::fill(s.w.begin(), s.w.end(), 0.0f);
            for (index_t i = 0; i < v; ++i) s.w[std::size_t(i * v + i)] = 1;
        }
        const floats z = s.logits(), y = t.logits();
        cpu_backend be;
        floats dz(z.size());
        const double loss = evaluate(be, student::logits{view(z.data(), n, v), view(dz.data(), n, v)},
                                     teacher::dense{view(y.data(), n, v)}, reverse_kl{})
                                .loss;
        gradients dense(s);
        CHECK(evaluate(be, student_of(s, dense), teacher_of(t), reverse_kl{}).loss ==
              doctest::Approx(loss).epsilon(1e-9));
        if (identity) CHECK(equal_bits(dense.dx, dz));
        const auto check = [&](const char* what, const auto& cache, const auto& estimator) {
            CAPTURE(what);
            gradients g(s);
            const result r = evaluate(be, student_of(s, g), cache, estimator);
            CHECK(r.diagnostics.bad_rows == 0);
            CHECK(r.loss == doctest::Approx(loss).epsilon(1e-6));
            CHECK(apart(g.dx, dense.dx) < 1e-6);
            CHECK(apart(g.dw, dense.dw) < 1e-6);
            CHECK(apart(g.db, dense.db) < 1e-6);
        };
        // every id of the teacher's, best first
        std::vector<std::int32_t> ids(std::size_t(n * v));
        floats log_q(ids.size());
        const auto i = view(std::as_const(ids).data(), n, v);
        const auto q = view(std::as_const(log_q).data(), n, v);
        top_k(be, teacher_of(t), view(ids.data(), n, v), view(log_q.data(), n, v));
        const floats no_tail(std::size_t(n), -std::numeric_limits<float>::infinity());
        check("renormalised", teacher::support{i, q}, renormalised{reverse_kl{}});
        check("tail bucket", teacher::support{i, q, view(no_tail.data(), n)}, tail_bucket{reverse_kl{}});
        // head + tail of the student itself, scored by the teacher
        const index_t m = v + 2;
        std::vector<std::int32_t> drawn_ids(std::size_t(n * m));
        floats log_mu(drawn_ids.size()), weight(log_mu), of_teacher(log_mu);
        std::vector<std::uint8_t> exact_ids(drawn_ids.size());
        const std::vector<std::uint64_t> sample{1, 2, 3, 4, 5};
        const std::vector<std::uint32_t> position(std::size_t(n), 0);
        gradients unused(s);
        draw(be, student_of(s, unused), design::head_tail{v, 2}, {.seed = 1, .sample = sample, .position = position},
             drawn<>{view(drawn_ids.data(), n, m), view(log_mu.data(), n, m), view(weight.data(), n, m),
                     view(exact_ids.data(), n, m)});
        const auto at = [&](const auto& x) { return view(x.data(), n, m); };
        token_logp(be, teacher_of(t), at(std::as_const(drawn_ids)), view(of_teacher.data(), n, m));
        check("head + tail",
              teacher::weighted{at(std::as_const(drawn_ids)), at(std::as_const(weight)), at(std::as_const(log_mu)),
                                at(std::as_const(of_teacher)), at(std::as_const(exact_ids))},
              mc{reverse_kl{}});
        // as weighted tokens on kept sets that hold every id
        std::vector<std::int32_t> kept;
        std::vector<std::int64_t> offsets{0};
        for (index_t r = 0; r < n; ++r) {
            for (index_t id = 0; id < v; ++id) kept.push_back(std::int32_t(id));
            offsets.push_back(std::int64_t(kept.size()));
        }
        check("kept sets",
              teacher::on_kept_sets{teacher::weighted{at(std::as_const(drawn_ids)), at(std::as_const(weight)),
                                                      at(std::as_const(log_mu)), at(std::as_const(of_teacher)),
                                                      at(std::as_const(exact_ids))},
                                    view(std::as_const(kept).data(), index_t(kept.size())), row_offsets<>(offsets)},
              mc{reverse_kl{}});
    }
}

TEST_CASE("gradients are within 2e-5 of float64, in Frobenius norm, from untrained heads to logits of 60") {
    for (const index_t d : {64, 1024})
        for (const float size : {0.5f, 3.0f, 13.0f}) {
            const side s = of_size(4, 2000, d, 1, size), t = of_size(4, 2000, d / 2, 2, size);
            const floats z = s.logits();
            CHECK(std::abs(*std::max_element(z.begin(), z.end())) < 60);
            for (const bool reverse : {true, false}) {
                CAPTURE(d);
                CAPTURE(size);
                CAPTURE(reverse);
                const exact e(s, t, reverse);
                CHECK(e.kl >= 0.1);
                gradients g(s);
                cpu_backend be;
                const env sum{.reduction = reduce::sum};
                if (reverse)
                    evaluate(be, student_of(s, g), teacher_of(t), reverse_kl{}, sum);
                else
                    evaluate(be, student_of(s, g), teacher_of(t), forward_kl{}, sum);
                CHECK(distance(g.dx, e.dx(s)) < 2e-5);
                CHECK(distance(g.dw, e.dw(s)) < 2e-5);
                CHECK(distance(g.db, [&] {
                          doubles db(std::size_t(s.v));
                          for (std::size_t i = 0; i < e.dz.size(); ++i) db[i % db.size()] += e.dz[i];
                          return db;
                      }()) < 2e-5);
            }
        }
}

TEST_CASE("near p = q the error of dz is at most 2e-5 of p") {
    for (const index_t d : {64, 1024})
        for (const float size : {0.5f, 3.0f, 13.0f})
            for (const float apart_by : {0.0f, 1e-4f, 1e-3f}) {
                CAPTURE(d);
                CAPTURE(size);
                CAPTURE(apart_by);
                const side s = of_size(4, 2000, d, 1, size);
                side t = s;
                const floats moved = normals(t.x.size(), 9, apart_by);
                for (std::size_t i = 0; i < moved.size(); ++i) t.x[i] += moved[i];
                const exact e(s, t, true);
                const floats dz = row_by_row(s.head(), t.head(), s, t, reverse_kl{});
                double far = 0;
                for (std::size_t i = 0; i < dz.size(); ++i) far += std::pow(double(dz[i]) - e.dz[i], 2);
                CHECK(std::sqrt(far) <= 2e-5 * norm(e.p));
                if (apart_by == 0) CHECK(std::all_of(dz.begin(), dz.end(), [](float x) { return x == 0; }));
            }
}

TEST_CASE("logits offset by 10,000 cost at most 1.5 times what they cost logits that were made in float") {
    for (const index_t d : {64, 1024})
        for (const bool both : {true, false}) {
            CAPTURE(d);
            CAPTURE(both);
            side s = of_size(4, 2000, d, 1, 3), t = of_size(4, 2000, d / 2, 2, 3);
            s.bias.assign(std::size_t(s.v), 1e4f);
            if (both) t.bias.assign(std::size_t(t.v), 1e4f);
            // as a framework makes them: sums of eight lanes, then the bias
            const auto made = [](const side& a) {
                floats z;
                for (index_t r = 0; r < a.n; ++r)
                    for (index_t i = 0; i < a.v; ++i) {
                        float lane[8] = {};
                        for (index_t j = 0; j < a.d; ++j)
                            lane[j % 8] += a.x[std::size_t(r * a.d + j)] * a.w[std::size_t(i * a.d + j)];
                        float sum = 0;
                        for (const float l : lane) sum += l;
                        z.push_back(a.bias.empty() ? sum : sum + a.bias[std::size_t(i)]);
                    }
                return z;
            };
            const floats z = made(s), y = made(t);
            const exact e(s, t, true);
            const env sum{.reduction = reduce::sum};
            cpu_backend be;
            floats of_logits(z.size()), of_states = row_by_row(s.head(), t.head(), s, t, reverse_kl{});
            evaluate(be, student::logits{view(z.data(), s.n, s.v), view(of_logits.data(), s.n, s.v)},
                     teacher::dense{view(y.data(), s.n, s.v)}, reverse_kl{}, sum);
            CHECK(distance(of_states, e.dz) <= 1.5 * distance(of_logits, e.dz));
        }
}

TEST_CASE("micro-batches change rounding only, given the whole batch's count") {
    const index_t n = 12, v = 900, half = 5;
    const side s(n, v, 16, 1, true), t(n, v, 8, 2);
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t i = 0; i < n * 4; ++i) ids.push_back(std::int32_t(i % 4 * 200 + i / 4)), log_q.push_back(-2.0f);
    const auto part_of = [&](gradients& g, index_t first, index_t last) {
        auto x = student_of(s, g);
        x.x = view(s.x.data() + first * s.d, last - first, s.d);
        x.dx = view(g.dx.data() + first * s.d, last - first, s.d);
        x.beta_head = first > 0 ? 1 : 0;
        return x;
    };
    cpu_backend be;
    const auto check = [&](const auto& cache_of, const auto& estimator) {
        gradients whole(s), parts(s, 8);
        const double loss = evaluate(be, part_of(whole, 0, n), cache_of(0, n), estimator).loss;
        const env e{.normaliser = double(n)};
        const double first = evaluate(be, part_of(parts, 0, half), cache_of(0, half), estimator, e).loss;
        const double second = evaluate(be, part_of(parts, half, n), cache_of(half, n), estimator, e).loss;
        CHECK(first + second == doctest::Approx(loss).epsilon(1e-12));
        CHECK(apart(parts.dx, whole.dx) < 1e-6);
        CHECK(apart(parts.dw, whole.dw) < 1e-6);
        CHECK(apart(parts.db, whole.db) < 1e-6);
    };
    check(
        [&](index_t first, index_t last) {
            auto h = teacher_of(t);
            h.x = view(t.x.data() + first * t.d, last - first, t.d);
            return h;
        },
        reverse_kl{});
    check(
        [&](index_t first, index_t last) {
            return teacher::support{view(std::as_const(ids).data() + 4 * first, last - first, 4),
                                    view(std::as_const(log_q).data() + 4 * first, last - first, 4)};
        },
        renormalised{reverse_kl{}});
}

TEST_CASE("what a masked row holds changes no bit") {
    const index_t n = 9, v = 300, k = 5;
    const side clean(n, v, 12, 1), teacher_clean(n, v, 8, 2);
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[0] = mask[4] = mask[8] = 0;
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t i = 0; i < n * k; ++i) ids.push_back(std::int32_t(i % k * 50 + i / k)), log_q.push_back(-2.0f);
    cpu_backend be{.threads = 2};
    const auto run = [&](const side& s, const side& t, const std::vector<std::int32_t>& of) {
        std::vector<gradients> g(3, gradients(s, 2));
        const std::size_t budget = budget_of_rows(student_of(s, g[0]), 4);
        const teacher::support cache{view(of.data(), n, k), view(std::as_const(log_q).data(), n, k)};
        std::vector<double> losses{
            evaluate(be, student_of(s, g[0], budget), teacher_of(t, budget), reverse_kl{}, {.mask = mask}).loss,
            evaluate(be, student_of(s, g[1], budget), cache, renormalised{jsd{}}, {.mask = mask}).loss,
            evaluate(be, student_of(s, g[2], budget), cache, tail_bucket{jsd{}}, {.mask = mask}).loss};
        return std::pair(losses, g);
    };
    const auto expected = run(clean, teacher_clean, ids);
    for (const float x : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30f}) {
        side s = clean, t = teacher_clean;
        auto of = ids;
        for (const index_t r : {0, 4, 8}) {
            for (index_t j = 0; j < s.d; ++j) s.x[std::size_t(r * s.d + j)] = x;
            t.x[std::size_t(r * t.d)] = x;
            of[std::size_t(r * k)] = -7, of[std::size_t(r * k + 1)] = 1 << 30;
        }
        const auto got = run(s, t, of);
        CHECK(got.first == expected.first);
        for (int i = 0; i < 3; ++i) CHECK(got.second[std::size_t(i)] == expected.second[std::size_t(i)]);
    }
    for (const gradients& g : expected.second)
        for (index_t j = 0; j < clean.d; ++j) CHECK(g.dx[std::size_t(4 * clean.d + j)] == 0);
}
