// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: no
//
// Heads for the processor's matrix tiles, the tiles here being the manual's in plain arithmetic (backends.amx holds the
// processor's against them): logits against float64, the same bits however the work is cut, and calls on them beside
// calls on the same numbers without tiles.
#include "support/compiled/hidden_sides.hpp"
#include "support/compiled/plain_tiles.hpp"
#include "support/hidden_exact.hpp"
#include "support/property.hpp"
#include "support/shards.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <opd/backends/amx.hpp>
#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

std::vector<index_t> all_rows(const side& s) {
    std::vector<index_t> r(std::size_t(s.n));
    std::iota(r.begin(), r.end(), index_t{0});
    return r;
}

template <class E>
auto student_on(const side& s, const stored_side<E>& stored, gradients& g, std::size_t budget = std::size_t{1} << 30) {
    student::hidden z{stored.states(s), plain_amx{stored.head(s)}, view(g.dx.data(), s.n, s.d),
                      view(g.dw.data(), s.v, s.d)};
    z.bias = stored.biases(s), z.db = view(g.db.data(), s.v), z.soft_cap = s.cap, z.budget = budget;
    return z;
}
template <class E>
auto teacher_on(const side& t, const stored_side<E>& stored) {
    teacher::hidden y{stored.states(t), plain_amx{stored.head(t)}};
    y.bias = stored.biases(t), y.soft_cap = t.cap;
    return y;
}

/// As many numbers before a page that must not be touched.
template <class T>
class guarded {
public:
    explicit guarded(const std::vector<T>& from) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), bytes = from.size() * sizeof(T);
        size_ = (bytes + page - 1) / page * page + page;
        pages_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        REQUIRE(pages_ != MAP_FAILED);
        REQUIRE(mprotect(pages_ + size_ - page, page, PROT_NONE) == 0);
        data = reinterpret_cast<T*>(pages_ + size_ - page - bytes);
        std::copy(from.begin(), from.end(), data);
    }
    ~guarded() { munmap(pages_, size_); }
    guarded(const guarded&) = delete;
    guarded& operator=(const guarded&) = delete;
    T* data;

private:
    std::size_t size_;
    char* pages_;
};

template <class X, class W>
void check_logits() {
    constexpr int parts = opd::detail::tile_parts<X> * opd::detail::tile_parts<W>;
    const index_t n = *rc::gen::inRange<index_t>(1, 36), v = *rc::gen::inRange<index_t>(1, 50),
                  d = *rc::gen::element<index_t>(1, 2, 31, 32, 33, 64, 100, 127, 129, 511, 512, 513, 1100);
    side s(n, v, d, *rc::gen::inRange(0u, 1000u));
    const stored_side<X, W> stored(s);
    const floats z = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, v, 1);
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i) {
            double exact = 0, size = 0;
            for (index_t k = 0; k < d; ++k) {
                const double product = double(s.x[std::size_t(r * d + k)]) * double(s.w[std::size_t(i * d + k)]);
                exact += product, size += std::abs(product);
            }
            // a chain of 16 products, two of them added, then a sum for every 32 columns and products of parts (six of
            // three by three): each rounds by half an ulp at most; of three by three parts 2^-21 of a product is left
            // out
            const double sums = double(d) / 32 * (parts == 9 ? 6 : parts) + 20;
            RC_ASSERT(std::abs(double(z[std::size_t(r * v + i)]) - exact) <=
                      size * (0x1p-24 * sums + (parts == 9 ? 0x1p-21 : 0)));
        }
    const index_t begin = *rc::gen::inRange<index_t>(0, v), end = *rc::gen::inRange<index_t>(begin, v + 1);
    const int threads = *rc::gen::inRange(1, 4);
    std::vector<index_t> some;
    for (index_t r = 0; r < n; ++r)
        if (*rc::gen::inRange(0, 3) > 0) some.push_back(r);
    const floats part = tile_logits_of<plain_tiles>(s, stored, some, begin, end, threads);
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i) {
            const auto j = std::size_t(r * v + i);
            if (std::binary_search(some.begin(), some.end(), r) && i >= begin && i < end)
                RC_ASSERT(part[j] == z[j]);
            else
                RC_ASSERT(std::isnan(part[j])); // not written
        }
}

} // namespace

TEST_CASE("logits are those of float64, and no bit depends on which rows or ids are asked for, or on threads") {
    property("bfloat16", check_logits<bfloat16, bfloat16>);
    property("float", check_logits<float, float>);
    property("states in float, head in bfloat16", check_logits<float, bfloat16>);
    property("states in bfloat16, head in float", check_logits<bfloat16, float>);
}

TEST_CASE("a float is the sum of its parts, exactly") {
    property("parts", [] {
        std::vector<float> x(37);
        for (float& y : x) {
            y = std::bit_cast<float>(*rc::gen::arbitrary<std::uint32_t>());
            if (!std::isfinite(y) || std::abs(y) < 0x1p-100f) y = 1.25f; // below 2^-110 a last part is no normal number
        }
        std::uint16_t parts[3][64];
        opd::detail::cut_row(x.data(), 37, 64, parts[0], 64);
        const auto at = [&](int p, std::size_t j) { return std::bit_cast<float>(std::uint32_t{parts[p][j]} << 16); };
        for (std::size_t j = 0; j < 64; ++j)
            RC_ASSERT(double(at(0, j)) + double(at(1, j)) + double(at(2, j)) == (j < 37 ? double(x[j]) : 0));
        for (std::size_t j = 0; j < 37; ++j) RC_ASSERT(std::abs(at(1, j)) <= 0x1p-7f * std::abs(at(0, j)));
    });
}

TEST_CASE("many rows and many ids: more than a unit of either") {
    side s(300, 900, 40, 5);
    const stored_side<bfloat16> stored(s);
    const floats z = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 2), expected = s.logits();
    for (std::size_t i = 0; i < z.size(); ++i) REQUIRE(std::abs(z[i] - expected[i]) < 1e-5f);
    CHECK(equal_bits(z, tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1)));
}

TEST_CASE("nothing beyond the caller's numbers is read or written, nor beyond the sums of dx") {
    const auto check = [](auto number, const auto& estimator, index_t v, index_t d) {
        using E = decltype(number);
        CAPTURE(v);
        CAPTURE(d);
        side s(3, v, d, 8);
        const stored_side<E> stored(s);
        gradients g(s), h(s);
        cpu_backend be;
        const auto student = student_on(s, stored, g);
        auto other = student;
        teacher::hidden teacher{stored.states(s), plain_amx{stored.head(s)}};
        teacher.temperature = 2;
        const guarded<E> x(stored.x), w(stored.w);
        const guarded<float> dx(h.dx), dw(h.dw);
        other.x = view(std::as_const(x.data), s.n, s.d), other.w.w = view(std::as_const(w.data), s.v, s.d);
        other.dx = view(dx.data, s.n, s.d), other.dw = view(dw.data, s.v, s.d), other.db = view(h.db.data(), s.v);
        CHECK(evaluate(be, student, teacher, estimator).loss == evaluate(be, other, teacher, estimator).loss);
        h.dx.assign(dx.data, dx.data + s.n * s.d), h.dw.assign(dw.data, dw.data + s.v * s.d);
        CHECK(g == h);

        thread_team team(1);
        const floats dz = normals(std::size_t(s.n * s.v), 5);
        const guarded<float> sums(floats(std::size_t(opd::detail::sums_of_states(student, s.n))));
        std::vector<std::byte> memory(opd::detail::worker_bytes(student, s.n));
        const std::vector<index_t> rows = all_rows(s);
        opd::detail::tile_to_states([&](index_t r) { return dz.data() + r * s.v; }, {rows.data(), s.n}, student.w, 0,
                                    s.v, false, sums.data, team, {memory.data(), memory.size()});
    };
    // neither fills a block; ids do, columns do
    for (const auto& [v, d] : {std::pair<index_t, index_t>{41, 41}, {64, 41}, {41, 64}}) {
        check(bfloat16{}, jsd{}, v, d);
        check(float{}, reverse_kl{}, v, d);
    }
}

TEST_CASE("numbers that are none stay with their row and their id") {
    const auto check = [](auto number) {
        using E = decltype(number);
        const auto stored_as = [](float x) {
            if constexpr (std::is_same_v<E, float>)
                return x;
            else
                return element<E>::store(x);
        };
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                std::bit_cast<float>(0x7f800001u)}) { // a NaN whose upper half is that of infinity
            side s(5, 40, 33, 9);
            stored_side<E> stored(s);
            const floats before = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1);
            // the last column: beyond it are padding's zeros; the last id
            stored.x[std::size_t(2 * s.d + 32)] = stored.w[std::size_t(39 * s.d + 32)] = stored_as(bad);
            const floats z = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1);
            for (index_t r = 0; r < s.n; ++r)
                for (index_t i = 0; i < s.v; ++i) {
                    const auto j = std::size_t(r * s.v + i);
                    CHECK((r == 2 || i == 39 ? !std::isfinite(z[j]) : z[j] == before[j]));
                }
        }
    };
    check(bfloat16{});
    check(float{});
}

TEST_CASE(
    "a call on tiles is the call without them, to float's roundings; budgets and threads change no bit but dw's, and "
    "none of that in whole 32s of rows") {
    struct cut {
        index_t rows, ids;
        int threads;
    };
    const auto check = [&](auto number, const auto& estimator, index_t n) {
        side s(n, 1100, 48, 11, true), t(n, 1100, 100, 14, true, 20);
        const stored_side<decltype(number)> mine(s), theirs(t);
        std::vector<std::uint8_t> kept(std::size_t(n), 1);
        kept[2] = 0;
        if (n > 32)
            std::fill_n(kept.begin(), 32, std::uint8_t{0}), kept[40] = 0; // nothing of a 32, and not all of another
        env e;
        e.mask = row_mask<space::host>(std::span(std::as_const(kept)));
        cpu_backend be;
        gradients plain(s, 3), g(s, 5);
        const result expected = evaluate(be, student_of(s, plain), teacher_of(t), estimator, e);
        const long before = plain_tiles::runs;
        const result got = evaluate(be, student_on(s, mine, g), teacher_on(t, theirs), estimator, e);
        if (n == 7) { // one block of rows: 32 ids of either side; 128 ids and, for dw, 32 by 32 columns of two
            const index_t blocks = (s.v + 31) / 32;
            CHECK(plain_tiles::runs - before == 2 * blocks + 2 * ((s.v + 127) / 128) + 2 * blocks);
        }
        CHECK(got.loss == doctest::Approx(expected.loss).epsilon(1e-5));
        CHECK(apart(g.dx, plain.dx) < 5e-6);
        CHECK(apart(g.dw, plain.dw) < 5e-6);
        CHECK(apart(g.db, plain.db) < 5e-6);
        for (const auto [rows, ids, threads] : {cut{3, 0, 1}, cut{3, 1024, 2}, cut{32, 1024, 1}, cut{50, 0, 2}}) {
            if (rows == 3 && n > 7) continue;
            CAPTURE(rows);
            CAPTURE(ids);
            gradients again(s, 9);
            auto small = student_on(s, mine, again);
            small.budget = budget_of_rows(small, std::min(rows, n), ids);
            cpu_backend other{.threads = threads};
            std::vector<std::byte> memory(workspace_bytes(other, small, teacher_on(t, theirs), estimator, e));
            other.arena = memory;
            CHECK(evaluate(other, small, teacher_on(t, theirs), estimator, e).loss == got.loss);
            CHECK(equal_bits(again.dx, g.dx));
            CHECK(equal_bits(again.db, g.db));
            if (rows == 3) // rows of a 32 in several blocks
                CHECK(apart(again.dw, g.dw) < 1e-6);
            else
                CHECK(equal_bits(again.dw, g.dw));
        }
    };
    check(bfloat16{}, jsd{}, 7);
    check(float{}, reverse_kl{}, 7);
    check(float{}, reverse_kl{}, 70);
}

TEST_CASE("float's gradients are within 2e-5 of float64, near p = q of p; logits offset by 10,000 are no worse than "
          "without tiles") {
    const index_t n = 4, v = 700, d = 160;
    for (const float size : {1.0f, 13.0f}) {
        CAPTURE(size);
        side s = of_size(n, v, d, 1, size), t = of_size(n, v, 96, 2, size);
        const exact e(s, t, true);
        CHECK(e.kl >= 0.1);
        gradients g(s);
        cpu_backend be;
        const stored_side<float> mine(s), theirs(t);
        evaluate(be, student_on(s, mine, g), teacher_on(t, theirs), reverse_kl{}, env{.reduction = reduce::sum});
        CHECK(distance(g.dx, e.dx(s)) < 2e-5);
        CHECK(distance(g.dw, e.dw(s)) < 2e-5);

        side near = s;
        const floats moved = normals(near.x.size(), 9, 1e-4f);
        for (std::size_t i = 0; i < moved.size(); ++i) near.x[i] += moved[i];
        const exact of_near(s, near, true);
        const floats dz = row_by_row(plain_amx{s.head()}, plain_amx{near.head()}, s, near, reverse_kl{});
        double far = 0;
        for (std::size_t i = 0; i < dz.size(); ++i) far += std::pow(double(dz[i]) - of_near.dz[i], 2);
        CHECK(std::sqrt(far) <= 2e-5 * norm(of_near.p));
    }
    side s = of_size(n, v, d, 1, 3), t = of_size(n, v, 96, 2, 3);
    s.bias.assign(std::size_t(v), 1e4f);
    const exact e(s, t, true);
    const floats without = row_by_row(s.head(), t.head(), s, t, reverse_kl{}),
                 with = row_by_row(plain_amx{s.head()}, plain_amx{t.head()}, s, t, reverse_kl{});
    CHECK(distance(with, e.dz) <= 1.5 * distance(without, e.dz));
}

TEST_CASE("gradients add to what is there, row block after row block; of no rows they are 0") {
    side s(300, 70, 40, 31);
    const stored_side<float> stored(s);
    const teacher::hidden<float> teacher{.x = s.states(), .w = s.head(), .temperature = 3};
    cpu_backend be;
    struct what {
        index_t rows;
        float beta;
    };
    for (const auto [rows, beta] : {what{300, 1}, what{300, 0}, what{32, 1}}) {
        gradients plain(s, 2), g(s, 2);
        env e;
        e.beta = 0.5f * beta;
        auto a = student_of(s, plain);
        auto b = student_on(s, stored, g);
        a.beta_head = b.beta_head = beta;
        b.budget = budget_of_rows(b, rows);
        evaluate(be, a, teacher, reverse_kl{}, e), evaluate(be, b, teacher, reverse_kl{}, e);
        CHECK(apart(g.dw, plain.dw) < 1e-6);
        CHECK(apart(g.dx, plain.dx) < 1e-6);
        CHECK(std::count(g.dw.begin(), g.dw.end(), 2.f) < 10);
    }
    gradients g(s, 2);
    env e;
    const std::vector<std::uint8_t> none(300);
    e.mask = row_mask<space::host>(std::span(none));
    evaluate(be, student_on(s, stored, g), teacher, reverse_kl{}, e);
    CHECK(g == gradients(s, 0));
}

TEST_CASE("a head in shards: dx is the sum over them, dw each one's") {
    const side s(5, 90, 40, 41), t(5, 90, 24, 42);
    cpu_backend one;
    const auto student = [&](gradients& g, index_t first, index_t count) {
        return student::hidden{s.states(), plain_amx{view(s.w.data() + first * s.d, count, s.d)},
                               view(g.dx.data(), s.n, s.d), view(g.dw.data() + first * s.d, count, s.d)};
    };
    const auto teacher = [&](index_t first, index_t count) {
        return teacher::hidden{t.states(), plain_amx{view(t.w.data() + first * t.d, count, t.d)}};
    };
    gradients whole(s);
    const double loss = evaluate(one, student(whole, 0, s.v), teacher(0, s.v), reverse_kl{}).loss;
    std::vector<cpu_backend> backends(2);
    std::vector<gradients> own(2, gradients(s));
    const index_t cuts[] = {0, 37, s.v};
    const auto make = [&](std::size_t i) {
        const index_t first = cuts[i], count = cuts[i + 1] - first;
        return vocab_parallel(backends[i], {.first = first, .total = s.v}, student(own[i], first, count),
                              teacher(first, count), reverse_kl{});
    };
    std::vector<std::unique_ptr<decltype(make(0))>> calls;
    for (std::size_t i = 0; i < 2; ++i) calls.push_back(std::make_unique<decltype(make(0))>(make(i)));
    run_rounds(calls, false);
    for (auto& c : calls) CHECK(c->finish().loss == doctest::Approx(loss).epsilon(1e-6));
    for (auto& c : calls) c->backward();
    for (std::size_t i = 0; i < own[0].dx.size(); ++i) own[0].dx[i] += own[1].dx[i];
    std::copy_n(own[1].dw.begin() + 37 * s.d, (s.v - 37) * s.d, own[0].dw.begin() + 37 * s.d);
    CHECK(apart(own[0].dx, whole.dx) < 4e-6);
    CHECK(apart(own[0].dw, whole.dw) < 4e-6);
}

TEST_CASE("a support's ids and a head with an update are computed in float: the bits of a view's") {
    side s(4, 60, 33, 21);
    const stored_side<bfloat16> stored(s);
    const std::vector<std::int32_t> ids = {3, 7, 9, 1, 59, 0, 30, 2, 5, 4, 3, 2};
    const floats logq(12, -2.f);
    const teacher::support known{view(ids.data(), 4, 3), view(logq.data(), 4, 3)};
    cpu_backend be;
    gradients a(s), b(s);
    const long before = plain_tiles::runs;
    student::hidden plain{stored.states(s), stored.head(s), view(a.dx.data(), s.n, s.d)};
    student::hidden tiled{stored.states(s), plain_amx{stored.head(s)}, view(b.dx.data(), s.n, s.d)};
    CHECK(evaluate(be, plain, known, renormalised{reverse_kl{}}).loss ==
          evaluate(be, tiled, known, renormalised{reverse_kl{}}).loss);
    CHECK(equal_bits(a.dx, b.dx));

    const floats low = normals(60 * 2, 3), down = normals(2 * 33, 4);
    const lora_head of_view{stored.head(s), view(low.data(), 60, 2), view(down.data(), 2, 33)};
    const lora_head of_tiles{plain_amx{stored.head(s)}, view(low.data(), 60, 2), view(down.data(), 2, 33)};
    const teacher::hidden teacher{stored.states(s), stored.head(s)};
    CHECK(evaluate(be, student::hidden{stored.states(s), of_view}, teacher, reverse_kl{}).loss ==
          evaluate(be, student::hidden{stored.states(s), of_tiles}, teacher, reverse_kl{}).loss);
    CHECK(plain_tiles::runs == before);
}

TEST_CASE("bad views are refused by name") {
    const std::vector<bfloat16> w(6);
    const auto refused = [](auto&& make) {
        try {
            make();
        } catch (const invalid_input& e) {
            return std::string(e.what()).find("amx_head.w") != std::string::npos;
        }
        return false;
    };
    CHECK(refused([&] { plain_amx<bfloat16>(matrix_view<const bfloat16>(nullptr, 2, 3, 3)); }));
    CHECK(refused([&] { plain_amx<bfloat16>(matrix_view<const bfloat16>(w.data(), -2, 3, 3)); }));
    CHECK(refused([&] { plain_amx<bfloat16>(matrix_view<const bfloat16>(w.data(), 2, 3, 2)); }));
    CHECK_NOTHROW(plain_amx<bfloat16>(view(w.data(), 2, 3)));
}
