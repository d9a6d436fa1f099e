// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Heads that are no view of W: with an update of low rank, which must be the wider head [W, B] on [x, u] bit for bit
// and W + scale·B A in float64; and of a user's own, quantised, which must be what its floats are.
#include "support/compiled/hidden_sides.hpp"
#include "support/property.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/head.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

// [quantised]
/// A head in 8 bits a weight, W[id, d] = step[id]·code[id, d].
struct quantised_head {
    const std::int8_t* code;
    const float* step;
    opd::index_t V, D;
    opd::index_t vocab() const { return V; }
    opd::index_t width() const { return D; }
    void copy(opd::index_t id, opd::index_t d, opd::index_t count, float* to) const {
        for (opd::index_t j = 0; j < count; ++j) to[j] = step[id] * float(code[id * D + d + j]);
    }
};
// [/quantised]

/// The codes of a side's head; the side then has the floats that they are.
struct codes {
    std::vector<std::int8_t> code;
    floats step;
    explicit codes(side& s) : code(s.w.size()), step(std::size_t(s.v)) {
        for (index_t i = 0; i < s.v; ++i) {
            float most = 0;
            for (index_t j = 0; j < s.d; ++j) most = std::max(most, std::abs(s.w[std::size_t(i * s.d + j)]));
            step[std::size_t(i)] = most / 127;
            for (std::size_t j = std::size_t(i * s.d); j < std::size_t((i + 1) * s.d); ++j) {
                code[j] = std::int8_t(std::lround(s.w[j] / step[std::size_t(i)]));
                s.w[j] = step[std::size_t(i)] * float(code[j]);
            }
        }
    }
    quantised_head head(const side& s) const { return {code.data(), step.data(), s.v, s.d}; }
};

/// An update of a side's head, and the side as it is with the wider head: [x, u], [W, B].
struct update {
    index_t rank;
    float scale;
    floats b, a;
    update(const side& s, index_t rank_, float scale_, unsigned seed)
        : rank(rank_), scale(scale_), b(normals(std::size_t(s.v * rank), seed)),
          a(normals(std::size_t(rank * s.d), seed + 1, 1 / std::sqrt(float(s.d)))) {}
    side wide(const side& s) const {
        side r(s.n, s.v, s.d + rank, 0);
        r.bias = s.bias, r.cap = s.cap;
        floats u(std::size_t(s.n * rank));
        product(serial_executor{}, product_nt(s.n, rank, s.d, s.x.data(), s.d, a.data(), s.d, u.data(), rank));
        for (index_t i = 0; i < s.n; ++i) {
            std::copy_n(s.x.data() + i * s.d, s.d, r.x.data() + i * r.d);
            for (index_t j = 0; j < rank; ++j)
                r.x[std::size_t(i * r.d + s.d + j)] = scale * u[std::size_t(i * rank + j)];
        }
        for (index_t i = 0; i < s.v; ++i) {
            std::copy_n(s.w.data() + i * s.d, s.d, r.w.data() + i * r.d);
            std::copy_n(b.data() + i * rank, rank, r.w.data() + i * r.d + s.d);
        }
        return r;
    }
    auto head(const side& s) const {
        lora_head h{s.head(), view(b.data(), s.v, rank), view(a.data(), rank, s.d)};
        h.scale = scale;
        return h;
    }
};

struct update_gradients : gradients {
    floats b, a;
    update_gradients(const side& s, const update& m, float fill = 0)
        : gradients(s, fill), b(m.b.size(), fill), a(m.a.size(), fill) {}
    bool operator==(const update_gradients& o) const {
        return gradients::operator==(o) && equal_bits(b, o.b) && equal_bits(a, o.a);
    }
};

template <class Head>
auto student_with(const side& s, Head head, update_gradients& g, const update& m) {
    head.db = view(g.b.data(), s.v, m.rank), head.da = view(g.a.data(), m.rank, s.d);
    student::hidden z{s.states(), head, view(g.dx.data(), s.n, s.d), view(g.dw.data(), s.v, s.d)};
    z.bias = s.biases(), z.db = view(g.db.data(), s.v), z.soft_cap = s.cap, z.budget = std::size_t{1} << 30;
    return z;
}
auto teacher_with(const side& t, const update& m) {
    teacher::hidden y{t.states(), m.head(t)};
    y.bias = t.biases(), y.soft_cap = t.cap;
    return y;
}

/// Columns [from, from + n) of a (rows, width) matrix.
floats columns(const floats& of, index_t width, index_t from, index_t n) {
    floats r;
    for (index_t i = 0; i < index_t(of.size()) / width; ++i)
        r.insert(r.end(), of.data() + i * width + from, of.data() + i * width + from + n);
    return r;
}

/// What dz, of logits before the soft-cap, says of all that made them, in float64.
void check_update(const side& s, const update& m, const floats& z, const floats& dz, const update_gradients& g) {
    std::vector<double> u(std::size_t(s.n * m.rank)), t(u.size()), dx(g.dx.size()), b(g.b.size()), a(g.a.size());
    const auto at = [](auto& of, index_t width, index_t i, index_t j) -> auto& {
        return of[std::size_t(i * width + j)];
    };
    for (index_t r = 0; r < s.n; ++r)
        for (index_t j = 0; j < m.rank; ++j)
            for (index_t k = 0; k < s.d; ++k)
                at(u, m.rank, r, j) += double(m.scale) * double(at(s.x, s.d, r, k)) * double(at(m.a, s.d, j, k));
    for (index_t r = 0; r < s.n; ++r)
        for (index_t i = 0; i < s.v; ++i) {
            double slope = double(at(dz, s.v, r, i));
            if (slope == 0) continue;
            if (s.cap > 0) slope *= 1 - std::pow(double(at(z, s.v, r, i)) / double(s.cap), 2);
            for (index_t k = 0; k < s.d; ++k) at(dx, s.d, r, k) += slope * double(at(s.w, s.d, i, k));
            for (index_t j = 0; j < m.rank; ++j) {
                at(t, m.rank, r, j) += slope * double(m.scale) * double(at(m.b, m.rank, i, j));
                at(b, m.rank, i, j) += slope * at(u, m.rank, r, j);
            }
        }
    for (index_t r = 0; r < s.n; ++r)
        for (index_t j = 0; j < m.rank; ++j)
            for (index_t k = 0; k < s.d; ++k) {
                at(dx, s.d, r, k) += at(t, m.rank, r, j) * double(at(m.a, s.d, j, k));
                at(a, s.d, j, k) += at(t, m.rank, r, j) * double(at(s.x, s.d, r, k));
            }
    CHECK(distance(g.dx, dx) < 2e-6);
    CHECK(distance(g.b, b) < 4e-6); // of two products, one after the other
    CHECK(distance(g.a, a) < 4e-6);
}

/// The call with an update against that on logits and that with the wider head; budgets, tiles and threads change no
/// bit, nor does an arena of just the bytes that are asked for.
template <class Estimator, class Teacher>
void compare_update(const side& s, const update& m, const Teacher& teacher, const Estimator& estimator, env e = {}) {
    const side wide = m.wide(s);
    gradients of_wide(wide);
    update_gradients g(s, m, 7);
    cpu_backend be;
    floats losses(std::size_t(s.n)), same(losses.size());
    env with = e;
    with.losses = view(losses.data(), s.n);
    const result expected = evaluate(be, student_of(wide, of_wide), teacher, estimator, with);
    with.losses = view(same.data(), s.n);
    const auto student = student_with(s, m.head(s), g, m);
    const result got = evaluate(be, student, teacher, estimator, with);
    CHECK(got.loss == expected.loss);
    CHECK(equal_bits(losses, same));
    CHECK(equal_bits(g.dw, columns(of_wide.dw, wide.d, 0, s.d)));
    CHECK(equal_bits(g.b, columns(of_wide.dw, wide.d, s.d, m.rank)));
    CHECK(equal_bits(g.db, of_wide.db));
    const floats z = wide.logits();
    floats dz(z.size());
    evaluate(be, student::logits{view(z.data(), s.n, s.v), view(dz.data(), s.n, s.v)}, teacher, estimator, e);
    check_update(s, m, z, dz, g);
    for (const int threads : {1, 2})
        for (const index_t rows : {1, 3, 7})
            for (const index_t ids : {0, 1024}) {
                if (ids > 0 && !opd::detail::may_tile<decltype(checked_job(be, student, teacher, estimator))>) continue;
                update_gradients again(s, m, 3);
                auto small = student_with(s, m.head(s), again, m);
                small.budget = budget_of_rows(small, rows, ids);
                cpu_backend other{.threads = threads};
                std::vector<std::byte> memory(workspace_bytes(other, small, teacher, estimator, e));
                other.arena = memory;
                CHECK(evaluate(other, small, teacher, estimator, e).loss == got.loss);
                CHECK(again == g);
            }
    // each gradient alone is what it is with the others
    for (int one = 0; one < 3; ++one) {
        update_gradients alone(s, m, 5);
        const update_gradients before = alone;
        auto source = student_with(s, m.head(s), alone, m);
        source.dw = {}, source.db = {};
        if (one != 0) source.dx = {};
        if (one != 1) source.w.db = {};
        if (one != 2) source.w.da = {};
        evaluate(be, source, teacher, estimator, e);
        CHECK(equal_bits(alone.dx, one == 0 ? g.dx : before.dx));
        CHECK(equal_bits(alone.b, one == 1 ? g.b : before.b));
        CHECK(equal_bits(alone.a, one == 2 ? g.a : before.a));
        CHECK(equal_bits(alone.dw, before.dw));
    }
}

} // namespace

TEST_CASE("an update of low rank: the bits of the wider head, the numbers of W + scale B A") {
    for (const index_t v : {5, 37, 1500, 9000})
        for (const index_t rank : {1, 16, 70}) {
            if (v == 1500 && rank == 1) continue;
            CAPTURE(v);
            CAPTURE(rank);
            const index_t n = v > 2000 ? 5 : 13;
            const bool more = rank == 16;
            const side s(n, v, 24, unsigned(v), more, more ? 3.0f : 0), t(n, v, 40, unsigned(v) + 10);
            const floats y = t.logits();
            const update m(s, rank, 0.5f, unsigned(v + rank));
            const teacher::dense known{view(y.data(), n, v)};
            compare_update(s, m, known, reverse_kl{});
            if (v == 5) continue;
            std::vector<std::uint8_t> mask(std::size_t(n), 1);
            for (index_t r = 0; r < n; r += 3) mask[std::size_t(r)] = 0;
            compare_update(s, m, known, jsd{}, {.reduction = reduce::sum, .mask = mask});
        }
}

TEST_CASE("the page's call: the base head is frozen, and the teacher is what it was before the update") {
    const index_t n = 4, v = 60, d = 8, rank = 2;
    const side s(n, v, d, 1);
    const update m(s, rank, 1, 2);
    const float *x = s.x.data(), *w = s.w.data(), *b = m.b.data(), *a = m.a.data();
    update_gradients g(s, m), same(s, m);
    float *dx = g.dx.data(), *db = g.b.data(), *da = g.a.data();
    cpu_backend backend;
    // clang-format off
    lora_head head{view(w, v, d), view(b, v, rank), view(a, rank, d)}; // W + scale·B A
    head.scale = 2;                                                    // alpha/R
    head.db = view(db, v, rank), head.da = view(da, rank, d);          // the base is frozen: no dw
    const student::hidden mine{view(x, n, d), head, view(dx, n, d)};
    const auto r = evaluate(backend, mine, teacher::hidden{view(x, n, d), view(w, v, d)}, reverse_kl{});
    // clang-format on
    auto known = student_with(s, m.head(s), same, m);
    known.w.scale = 2;
    CHECK(r.loss == evaluate(backend, known, teacher::hidden{view(x, n, d), view(w, v, d)}, reverse_kl{}).loss);
    CHECK(r.loss > 0);
    CHECK(g.b == same.b);
    CHECK(g.a == same.a);
    CHECK(g.dx == same.dx);
}

TEST_CASE("teachers with an update, beside logits and hidden states") {
    const index_t n = 9, v = 1300;
    const side s(n, v, 20, 1), t(n, v, 28, 2, true, 5.0f);
    const update m(t, 8, 2.0f, 3);
    const floats y = m.wide(t).logits();
    compare(s, teacher_with(t, m), teacher::dense{view(y.data(), n, v)}, reverse_kl{});
    compare_update(s, update(s, 4, 1, 9), teacher_with(t, m), forward_kl{});
}

TEST_CASE("a selector over hidden states whose head has an update") {
    const index_t n = 12, v = 600;
    const side s(n, v, 24, 5), t(n, v, 20, 6);
    const floats y = t.logits();
    const teacher::dense known{view(y.data(), n, v)};
    const update m(s, 4, 1.5f, 7);
    cpu_backend be;
    update_gradients g(s, m);
    const auto student = student_with(s, m.head(s), g, m);
    const double middle =
        evaluate(be, student, known, reverse_kl{}, {.measure = {.entropy = true}}).diagnostics.student_entropy();
    const selected tip{reverse_kl{}, selector::tip{.entropy = middle, .gap = 1e6}};
    const double left = evaluate(be, student, known, tip).diagnostics.selector_left_out;
    CHECK(left > 0);
    CHECK(left < n);
    compare_update(s, m, known, tip);
    compare_update(s, m, known, selected{weighted_sum{reverse_kl{}, forward_kl{}}, selector::eopd{3, 0.5}});
}

TEST_CASE("an update with supports, drawn tokens and few logits a row") {
    const index_t n = 11, v = 700, k = 6;
    const side s(n, v, 150, 3, true, 4.0f);
    std::vector<std::int32_t> ids;
    floats log_q, log_mu;
    for (index_t r = 0; r < n; ++r)
        for (index_t j = 0; j < k; ++j) {
            ids.push_back(std::int32_t(j * 100 + (r * 37) % 100));
            log_q.push_back(-2.5f - float(j)), log_mu.push_back(-3.0f - float(j) / 2);
        }
    const auto i = view(std::as_const(ids).data(), n, k);
    const auto q = view(std::as_const(log_q).data(), n, k), mu = view(std::as_const(log_mu).data(), n, k);
    for (const index_t rank : {5, 130}) {
        const update m(s, rank, 0.7f, 8);
        compare_update(s, m, teacher::support{i, q}, tail_bucket{reverse_kl{}});
        compare_update(s, m, teacher::samples{i, mu, q}, mc{reverse_kl{}});
        compare_update(s, m, teacher::support{i, q}, renormalised{reverse_kl{}}); // gathered
    }
}

TEST_CASE("beta of hidden states, and heads that collect: dW, db and the update's") {
    const index_t n = 6, v = 50;
    const side s(n, v, 8, 1), t(n, v, 8, 2);
    const floats y = t.logits();
    const teacher::dense known{view(y.data(), n, v)};
    const update m(s, 3, 1.5f, 4);
    cpu_backend be;
    const auto check = [&](const auto& cache, const auto& estimator) {
        update_gradients once(s, m), twice(s, m, 2), kept(s, m, 2);
        evaluate(be, student_with(s, m.head(s), once, m), cache, estimator);
        auto more = student_with(s, m.head(s), twice, m);
        more.budget = budget_of_rows(more, 2), more.beta_head = 0.5f;
        evaluate(be, more, cache, estimator, {.beta = 3});
        const auto near = [](const floats& got, const floats& expected, float was) {
            for (std::size_t i = 0; i < got.size(); ++i)
                CHECK(got[i] == doctest::Approx(was + expected[i]).epsilon(1e-6));
        };
        near(twice.dx, once.dx, 6), near(twice.dw, once.dw, 1), near(twice.db, once.db, 1), near(twice.b, once.b, 1),
            near(twice.a, once.a, 1);
        auto one = student_with(s, m.head(s), kept, m);
        one.beta_head = 1;
        evaluate(be, one, cache, estimator);
        near(kept.b, once.b, 2), near(kept.a, once.a, 2);
        // no row: heads have no gradient
        update_gradients none(s, m, 4);
        auto empty = student_with(s, m.head(s), none, m);
        empty.x.rows = empty.dx.rows = 0;
        auto no_rows = cache;
        if constexpr (requires { no_rows.y; })
            no_rows.y.rows = 0;
        else
            no_rows.ids.rows = no_rows.log_q.rows = 0;
        evaluate(be, empty, no_rows, estimator);
        CHECK(none.b == floats(none.b.size()));
        CHECK(none.a == floats(none.a.size()));
    };
    check(known, reverse_kl{});
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t i = 0; i < n * 4; ++i) ids.push_back(std::int32_t(i * 7 % v)), log_q.push_back(-2 - float(i % 4));
    check(teacher::support{view(std::as_const(ids).data(), n, 4), view(std::as_const(log_q).data(), n, 4)},
          renormalised{reverse_kl{}});
}

TEST_CASE("padding of dx, dW and the update's gradients is zeroed, and nothing behind it touched") {
    const index_t n = 4, v = 1500, d = 3, rank = 2, gap = 2; // one column of padding, one of somebody else
    const side s(n, v, d, 1), t(n, v, d, 2);
    const update m(s, rank, 1.5f, 4);
    const floats y = t.logits();
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[1] = 0;
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t i = 0; i < n * 4; ++i) ids.push_back(std::int32_t(i * 7 % v)), log_q.push_back(-2 - float(i % 4));
    const auto check = [&](const auto& cache, const auto& estimator, index_t tile, float beta, index_t rows) {
        CAPTURE(tile);
        CAPTURE(beta);
        CAPTURE(rows);
        update_gradients plain(s, m, 9);
        const auto roomy = [](index_t rows, index_t cols) { return floats(std::size_t(rows * (cols + gap)), 9.f); };
        floats dx = roomy(n, d), dw = roomy(v, d), b = roomy(v, rank), a = roomy(rank, d);
        auto source = student_with(s, m.head(s), plain, m);
        const auto padded = [](floats& of, index_t rows, index_t cols) {
            return view(of.data(), rows, cols, {.stride = cols + gap, .padding = 1});
        };
        source.dx = padded(dx, n, d), source.dw = padded(dw, v, d);
        source.w.db = padded(b, v, rank), source.w.da = padded(a, rank, d);
        source.budget = budget_of_rows(source, 3, tile), source.beta_head = beta;
        source.x.rows = source.dx.rows = rows;
        auto known = cache;
        if constexpr (requires { known.y; })
            known.y.rows = rows;
        else
            known.ids.rows = known.log_q.rows = rows;
        cpu_backend be;
        evaluate(be, source, known, estimator, {.mask = std::span(mask).first(std::size_t(rows)), .beta = beta});
        const auto look = [](const char* name, const floats& of, index_t rows, index_t cols) {
            CAPTURE(name);
            for (index_t r = 0; r < rows; ++r) {
                CHECK(of[std::size_t(r * (cols + gap) + cols)] == 0);
                CHECK(of[std::size_t(r * (cols + gap) + cols + 1)] == 9);
            }
        };
        look("dx", dx, rows, d), look("dw", dw, v, d), look("db", b, v, rank), look("da", a, rank, d);
    };
    for (const float beta : {0.f, 1.f, 2.f}) {
        for (const index_t tile : {0, 1024}) check(teacher::dense{view(y.data(), n, v)}, reverse_kl{}, tile, beta, n);
        check(teacher::support{view(std::as_const(ids).data(), n, 4), view(std::as_const(log_q).data(), n, 4)},
              renormalised{reverse_kl{}}, 0, beta, n);
        check(teacher::dense{view(y.data(), n, v)}, reverse_kl{}, 0, beta, 0); // without rows
    }
    update_gradients plain(s, m);
    auto source = student_with(s, m.head(s), plain, m);
    cpu_backend be;
    for (auto set : {+[](decltype(source)& x) { x.dx.padding = 1; }, +[](decltype(source)& x) { x.dw.padding = 1; },
                     +[](decltype(source)& x) { x.w.da.padding = -1; }}) {
        auto wrong = source;
        set(wrong);
        CHECK_THROWS_WITH_AS(evaluate(be, wrong, teacher::dense{view(y.data(), n, v)}, reverse_kl{}),
                             doctest::Contains("columns of padding"), invalid_input);
    }
}

TEST_CASE("a bad row adds nothing to an update, whole or in tiles") {
    const index_t n = 7, v = 1500;
    side s(n, v, 5, 1);
    const side t(n, v, 5, 2);
    const update m(s, 4, 1, 3);
    const floats y = t.logits();
    const teacher::dense known{view(y.data(), n, v)};
    cpu_backend be;
    update_gradients clean(s, m), got(s, m, 9);
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[2] = 0;
    evaluate(be, student_with(s, m.head(s), clean, m), known, reverse_kl{}, {.reduction = reduce::sum, .mask = mask});
    side broken = s;
    broken.x[2 * 5 + 1] = std::numeric_limits<float>::quiet_NaN();
    for (const index_t ids : {0, 1024}) {
        auto source = student_with(broken, m.head(s), got, m);
        source.budget = budget_of_rows(source, 7, ids);
        const result r = evaluate(be, source, known, reverse_kl{}, {.reduction = reduce::sum});
        CHECK(r.diagnostics.bad_rows == 1);
        CHECK(got == clean);
    }
}

TEST_CASE("a quantised head is what its floats are, with an update or without, in every product") {
    const index_t n = 70, v = 2100;
    side s(n, v, 33, 1, true, 4.0f);
    const side t(n, v, 20, 2);
    const codes q(s);
    const floats y = t.logits();
    const teacher::dense known{view(y.data(), n, v)};
    cpu_backend be{.threads = 2};
    const auto same = [&](const auto& cache, const auto& estimator) {
        gradients expected(s, 1), got(s, 2);
        auto plain = student_of(s, expected);
        const result r = evaluate(be, plain, cache, estimator);
        student::hidden mine{s.states(), q.head(s), view(got.dx.data(), n, s.d), view(got.dw.data(), v, s.d)};
        mine.bias = s.biases(), mine.db = view(got.db.data(), v), mine.soft_cap = s.cap;
        CHECK(evaluate(be, mine, cache, estimator).loss == r.loss);
        CHECK(got == expected);
        mine.budget = budget_of_rows(
            mine, 9, opd::detail::may_tile<decltype(checked_job(be, mine, cache, estimator))> ? 1024 : 0);
        CHECK(evaluate(be, mine, cache, estimator).loss == r.loss);
        CHECK(got == expected);
        const update m(s, 6, 0.5f, 5);
        update_gradients of_floats(s, m, 1), of_codes(s, m, 2);
        lora_head adapted{q.head(s), view(m.b.data(), v, m.rank), view(m.a.data(), m.rank, s.d)};
        adapted.scale = m.scale;
        const result with = evaluate(be, student_with(s, m.head(s), of_floats, m), cache, estimator);
        CHECK(evaluate(be, student_with(s, adapted, of_codes, m), cache, estimator).loss == with.loss);
        CHECK(of_codes == of_floats);
    };
    same(known, reverse_kl{});
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t i = 0; i < n * 4; ++i) ids.push_back(std::int32_t(i * 37 % v)), log_q.push_back(-2 - float(i % 4));
    same(teacher::support{view(std::as_const(ids).data(), n, 4), view(std::as_const(log_q).data(), n, 4)},
         renormalised{reverse_kl{}});
    // a teacher's, and its scores
    const teacher::hidden theirs{s.states(), q.head(s)};
    const teacher::hidden known_theirs{s.states(), s.head()};
    floats log_p(ids.size()), expected(ids.size());
    const auto some = view(std::as_const(ids).data(), n, 4);
    token_logp(be, theirs, some, view(log_p.data(), n, 4)),
        token_logp(be, known_theirs, some, view(expected.data(), n, 4));
    CHECK(equal_bits(log_p, expected));
    // a student's with an update: its gradients are left alone
    const update m(s, 6, 0.5f, 5);
    update_gradients g(s, m, 3);
    const update_gradients untouched = g;
    const side wide = m.wide(s);
    auto source = student_with(s, m.head(s), g, m);
    source.bias = {}, source.soft_cap = 0;
    token_logp(be, source, some, view(log_p.data(), n, 4));
    token_logp(be, teacher::hidden{wide.states(), wide.head()}, some, view(expected.data(), n, 4));
    CHECK(equal_bits(log_p, expected));
    CHECK(g == untouched);
    auto value = source;
    value.dx = value.dw = {}, value.db = {}, value.w.db = value.w.da = {};
    const scores<std::int32_t, float> what{.ids = some, .log_p = view(log_p.data(), n, 4)}; // nor do they take memory
    CHECK(score_workspace_bytes(be, source, what) == score_workspace_bytes(be, value, what));
}

TEST_CASE("bfloat16 states and head under an update in float, and under one in bfloat16") {
    const index_t n = 9, v = 1100;
    side s(n, v, 33, 1);
    const side t(n, v, 20, 2);
    update m(s, 6, 0.5f, 5);
    const auto rounded = [](floats& x) {
        std::vector<bfloat16> stored;
        for (float& y : x) stored.push_back(element<bfloat16>::store(y)), y = element<bfloat16>::load(stored.back());
        return stored;
    };
    const auto x = rounded(s.x), w = rounded(s.w), b = rounded(m.b), a = rounded(m.a);
    const floats y = t.logits();
    const teacher::dense known{view(y.data(), n, v)};
    cpu_backend be;
    update_gradients expected(s, m, 1);
    const double loss = evaluate(be, student_with(s, m.head(s), expected, m), known, reverse_kl{}).loss;
    const auto same = [&](auto head) {
        update_gradients got(s, m, 2);
        head.scale = m.scale, head.db = view(got.b.data(), v, m.rank), head.da = view(got.a.data(), m.rank, s.d);
        student::hidden mine{view(x.data(), n, s.d), head, view(got.dx.data(), n, s.d), view(got.dw.data(), v, s.d)};
        mine.db = view(got.db.data(), v);
        CHECK(evaluate(be, mine, known, reverse_kl{}).loss == loss);
        CHECK(got == expected);
    };
    same(lora_head{view(w.data(), v, s.d), view(std::as_const(m.b).data(), v, m.rank),
                   view(std::as_const(m.a).data(), m.rank, s.d)});
    same(lora_head{view(w.data(), v, s.d), view(b.data(), v, m.rank), view(a.data(), m.rank, s.d)});
}

TEST_CASE("an update's errors name it, before anything is written") {
    const index_t n = 3, v = 10, d = 4, rank = 2;
    const side s(n, v, d, 1), t(n, v, d, 2);
    const update m(s, rank, 1, 3);
    const floats y = t.logits();
    update_gradients g(s, m, 1);
    const update_gradients untouched = g;
    cpu_backend be;
    const auto refused = [&](auto&& change, const char* argument, const char* why) {
        auto source = student_with(s, m.head(s), g, m);
        change(source);
        CAPTURE(argument);
        CHECK_THROWS_WITH_AS(evaluate(be, source, teacher::dense{view(y.data(), n, v)}, reverse_kl{}),
                             doctest::Contains(argument), invalid_input);
        CHECK_THROWS_WITH_AS(evaluate(be, source, teacher::dense{view(y.data(), n, v)}, reverse_kl{}),
                             doctest::Contains(why), invalid_input);
        CHECK(g == untouched);
    };
    refused([](auto& z) { z.w.a.cols = 3; }, "student.w.a", "(2, 3), not (2, 4)");
    refused([](auto& z) { z.w.b.cols = 3; }, "student.w.b", "(10, 3), not (10, 2)");
    refused([](auto& z) { z.w.w.cols = z.w.w.stride = 3; }, "student.w.w", "not (10, 4)");
    refused([](auto& z) { z.w.a.rows = 0, z.w.b.cols = 0, z.w.da = {}, z.w.db = {}; }, "student.w.a", "has no rows");
    refused([](auto& z) { z.w.a.data = nullptr; }, "student.w.a", "null");
    refused([](auto& z) { z.w.da.rows = 1; }, "student.w.da", "(1, 4), not (2, 4)");
    refused([](auto& z) { z.w.db.rows = 1; }, "student.w.db", "(1, 2), not (10, 2)");
    refused([](auto& z) { z.w.scale = std::numeric_limits<float>::quiet_NaN(); }, "student.w.scale", "finite");
    refused([&](auto& z) { z.w.da.data = g.b.data(); }, "student.w.d", "overlaps");
    refused([&](auto& z) { z.w.db.data = const_cast<float*>(m.b.data()); }, "student.w.db", "overlaps student.w.b");
    auto theirs = teacher_with(t, m);
    theirs.w.da = view(g.a.data(), rank, d);
    CHECK_THROWS_WITH_AS(evaluate(be, student_with(s, m.head(s), g, m), theirs, reverse_kl{}),
                         doctest::Contains("teacher.w: has .da"), invalid_input);
    CHECK(g == untouched);
    side other(n, v, d + 1, 4);
    const codes q(other);
    CHECK_THROWS_WITH_AS(
        evaluate(be, student::hidden{s.states(), q.head(other)}, teacher::dense{view(y.data(), n, v)}, reverse_kl{}),
        doctest::Contains("student.w: is (10, 5)"), invalid_input);
}
