// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: always
//
// Heads for dot products of bfloat16, here the manual's in plain arithmetic (backends.bf16 holds the processor's
// against them): logits within the bound that backends/bf16.hpp states of float64, the same bits however the work is
// cut, and calls on such heads beside calls on the same numbers in float.
#include "support/compiled/hidden_sides.hpp"
#include "support/hidden_exact.hpp"
#include "support/plain_tiles.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <opd/backends/bf16.hpp>
#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// A side's states and head as bfloat16, rows further apart than they are wide; what lies between is NaN.
struct padded_side {
    index_t stride_x, stride_w;
    std::vector<bfloat16> x, w;
    padded_side(const side& s, index_t more)
        : stride_x(s.d + more), stride_w(s.d + 2 * more), x(spread(s.x, s.n, s.d, stride_x)),
          w(spread(s.w, s.v, s.d, stride_w)) {}
    auto states(const side& s) const { return matrix_view<const bfloat16>(x.data(), s.n, s.d, stride_x); }
    auto head(const side& s) const { return matrix_view<const bfloat16>(w.data(), s.v, s.d, stride_w); }

private:
    static std::vector<bfloat16> spread(const floats& from, index_t rows, index_t columns, index_t stride) {
        std::vector<bfloat16> to(std::size_t(rows * stride), element<bfloat16>::store(std::nanf("")));
        for (index_t r = 0; r < rows; ++r)
            for (index_t j = 0; j < columns; ++j)
                to[std::size_t(r * stride + j)] = element<bfloat16>::store(from[std::size_t(r * columns + j)]);
        return to;
    }
};
void check_logits() {
    const index_t n = *rc::gen::inRange<index_t>(1, 36), v = *rc::gen::inRange<index_t>(1, 50),
                  d = *rc::gen::element<index_t>(1, 2, 31, 32, 33, 100, 127, 511, 512, 513, 1101);
    side s(n, v, d, *rc::gen::inRange(0u, 1000u));
    const stored_side<bfloat16> stored(s);
    std::vector<index_t> all, some;
    for (index_t r = 0; r < n; ++r) {
        all.push_back(r);
        if (*rc::gen::inRange(0, 3) > 0) some.push_back(r);
    }
    const floats z = tile_logits_of<plain_dots>(s, stored, all, 0, v, 1);
    const index_t begin = *rc::gen::inRange<index_t>(0, v), end = *rc::gen::inRange<index_t>(begin, v + 1);
    const floats part = tile_logits_of<plain_dots>(s, stored, some, begin, end, *rc::gen::inRange(1, 4));
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i) {
            double exact = 0, size = 0;
            for (index_t k = 0; k < d; ++k) {
                const double product = double(s.x[std::size_t(r * d + k)]) * double(s.w[std::size_t(i * d + k)]);
                exact += product, size += std::abs(product);
            }
            const auto j = std::size_t(r * v + i);
            RC_ASSERT(std::abs(double(z[j]) - exact) <= double(d + 1) * 0x1p-24 * size + double(2 * d) * 0x1p-126);
            if (std::binary_search(some.begin(), some.end(), r) && i >= begin && i < end)
                RC_ASSERT(part[j] == z[j]);
            else
                RC_ASSERT(std::isnan(part[j])); // not written
        }
}

} // namespace

TEST_CASE("logits are those of float64, and no bit depends on which rows or ids are asked for, or on threads") {
    property("bfloat16", check_logits);
}

TEST_CASE("a call on dot products is the call in float, to float's roundings; budgets and threads change no bit") {
    struct cut {
        index_t rows, ids;
        int threads;
    };
    const auto check = [](const auto& estimator, index_t n, float temperature) {
        CAPTURE(n);
        CAPTURE(temperature);
        side s(n, 1100, 49, 11, true), t(n, 1100, 101, 14, true, 20);
        s.cap = 30;
        const stored_side<bfloat16> biases(s), known_biases(t); // and both sides' floats are rounded
        const padded_side mine(s, 3), theirs(t, 4);
        std::vector<std::uint8_t> kept(std::size_t(n), 1);
        kept[2] = 0;
        if (n > 32) std::fill_n(kept.begin(), 32, std::uint8_t{0}), kept[40] = 0;
        env e;
        e.mask = row_mask<space::host>(std::span(std::as_const(kept)));
        cpu_backend be;
        gradients plain(s, 3), g(s, 5);
        auto in_float = student_of(s, plain);
        auto known_in_float = teacher_of(t);
        in_float.temperature = known_in_float.temperature = temperature;
        const auto student = [&](gradients& to) {
            student::hidden z{mine.states(s), plain_bf16{mine.head(s)}, view(to.dx.data(), s.n, s.d),
                              view(to.dw.data(), s.v, s.d)};
            z.bias = biases.biases(s), z.db = view(to.db.data(), s.v), z.soft_cap = s.cap, z.temperature = temperature;
            z.budget = std::size_t{1} << 30;
            return z;
        };
        teacher::hidden known{theirs.states(t), plain_bf16{theirs.head(t)}};
        known.bias = known_biases.biases(t), known.soft_cap = t.cap, known.temperature = temperature;
        const result expected = evaluate(be, in_float, known_in_float, estimator, e);
        const long before = plain_dots::runs, tiles = plain_tiles::runs;
        const result got = evaluate(be, student(g), known, estimator, e);
        if (n == 7)
            CHECK(plain_dots::runs - before == 2 * ((s.v + 31) / 32)); // of logits, of either side, and no other
        CHECK(plain_tiles::runs == tiles);
        const double near = 1e-5 * std::max(1.0, 1 / double(temperature)); // which divides the roundings of logits
        CHECK(got.loss == doctest::Approx(expected.loss).epsilon(near));
        CHECK(apart(g.dx, plain.dx) < near);
        CHECK(apart(g.dw, plain.dw) < near);
        CHECK(apart(g.db, plain.db) < near);
        for (const auto [rows, ids, threads] : {cut{3, 0, 1}, cut{3, 1024, 2}, cut{32, 1024, 1}, cut{50, 0, 2}}) {
            if (rows == 3 && n > 7) continue;
            CAPTURE(rows);
            CAPTURE(ids);
            gradients again(s, 9);
            auto small = student(again);
            small.budget = budget_of_rows(small, std::min(rows, n), ids);
            cpu_backend other{.threads = threads};
            std::vector<std::byte> memory(workspace_bytes(other, small, known, estimator, e));
            other.arena = memory;
            CHECK(evaluate(other, small, known, estimator, e).loss == got.loss);
            CHECK(again == g);
        }
    };
    check(jsd{}, 7, 1);
    check(reverse_kl{}, 7, 0.05f);
    check(reverse_kl{}, 70, 20);
}

TEST_CASE("loss and gradients are those of float64, from the states on") {
    const index_t n = 5, v = 700, d = 161;
    side s = of_size(n, v, d, 1, 3), t = of_size(n, v, 97, 2, 3);
    (void)stored_side<bfloat16>(s), (void)stored_side<bfloat16>(t); // rounds their floats
    const padded_side mine(s, 1), theirs(t, 0);
    const exact e(s, t, true);
    gradients g(s);
    cpu_backend be;
    evaluate(
        be, student::hidden{mine.states(s), plain_bf16{mine.head(s)}, view(g.dx.data(), n, d), view(g.dw.data(), v, d)},
        teacher::hidden{theirs.states(t), plain_bf16{theirs.head(t)}}, reverse_kl{}, env{.reduction = reduce::sum});
    CHECK(distance(g.dx, e.dx(s)) < 2e-5);
    CHECK(distance(g.dw, e.dw(s)) < 2e-5);
}

TEST_CASE("states in float, a support's ids, a head with an update: the bits of a view's") {
    side s(4, 60, 33, 21);
    const stored_side<bfloat16> stored(s);
    const std::vector<std::int32_t> ids = {3, 7, 9, 1, 59, 0, 30, 2, 5, 4, 3, 2};
    const floats logq(12, -2.f), low = normals(60 * 2, 3), down = normals(2 * 33, 4);
    const teacher::support few{view(ids.data(), 4, 3), view(logq.data(), 4, 3)};
    const teacher::hidden known{stored.states(s), stored.head(s)};
    cpu_backend be;
    const long before = plain_dots::runs;
    const auto same = [&](const auto& states, const auto& head, const auto& teacher, const auto& estimator) {
        gradients a(s), b(s);
        const student::hidden plain{states, head, view(a.dx.data(), s.n, s.d)};
        const student::hidden dots{states, plain_bf16{stored.head(s)}, view(b.dx.data(), s.n, s.d)};
        CHECK(evaluate(be, plain, teacher, estimator).loss == evaluate(be, dots, teacher, estimator).loss);
        CHECK(equal_bits(a.dx, b.dx));
    };
    auto warm = known;
    warm.temperature = 2;
    same(s.states(), s.head(), warm, reverse_kl{});
    same(stored.states(s), stored.head(s), few, renormalised{reverse_kl{}});
    const auto loss = [&](const auto& base) {
        const lora_head head{base, view(low.data(), 60, 2), view(down.data(), 2, 33)};
        return evaluate(be, student::hidden{stored.states(s), head}, known, reverse_kl{}).loss;
    };
    CHECK(loss(stored.head(s)) == loss(plain_bf16{stored.head(s)}));
    CHECK(plain_dots::runs == before);
}

TEST_CASE("bad views are refused by name") {
    try {
        plain_bf16(matrix_view<const bfloat16>(nullptr, 2, 3, 3));
        CHECK(false);
    } catch (const invalid_input& e) {
        CHECK(std::string(e.what()).find("bf16_head.w") != std::string::npos);
    }
}
