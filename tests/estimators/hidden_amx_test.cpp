// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Heads for the processor's matrix tiles, the tiles here being the manual's in plain arithmetic (backends.amx holds the processor's against
// them): logits against float64, the same bits however the work is cut, and calls on them beside calls on the same numbers in float.
#include "support/plain_tiles.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
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

auto student_on(const side& s, const stored_side& stored, gradients& g, std::size_t budget = std::size_t{1} << 30) {
    student::hidden z{stored.states(s), plain_amx{stored.head(s)}, view(g.dx.data(), s.n, s.d),
                      view(g.dw.data(), s.v, s.d)};
    z.bias = stored.biases(s), z.db = view(g.db.data(), s.v), z.soft_cap = s.cap, z.budget = budget;
    return z;
}
auto teacher_on(const side& t, const stored_side& stored) {
    teacher::hidden y{stored.states(t), plain_amx{stored.head(t)}};
    y.bias = stored.biases(t), y.soft_cap = t.cap;
    return y;
}

} // namespace

TEST_CASE("logits are those of float64, and no bit depends on which rows or ids are asked for, or on threads") {
    property("logits through tiles", [] {
        const index_t n = *rc::gen::inRange<index_t>(1, 70), v = *rc::gen::inRange<index_t>(1, 130),
                      d = *rc::gen::element<index_t>(1, 2, 31, 32, 33, 64, 100, 511, 512, 513, 1100);
        side s(n, v, d, *rc::gen::inRange(0u, 1000u));
        const stored_side stored(s);
        const floats z = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, v, 1);
        for (index_t r = 0; r < n; ++r)
            for (index_t i = 0; i < v; ++i) {
                double exact = 0, size = 0;
                for (index_t k = 0; k < d; ++k) {
                    const double product = double(s.x[std::size_t(r * d + k)]) * double(s.w[std::size_t(i * d + k)]);
                    exact += product, size += std::abs(product);
                }
                // a chain of 16 products, two of them added, then one sum for every 32 columns: each rounds by half an ulp at most
                RC_ASSERT(std::abs(double(z[std::size_t(r * v + i)]) - exact) <=
                          0x1p-24 * size * (double(d) / 32 + 20));
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
    });
}

TEST_CASE("many rows and many ids: more than a unit of either") {
    side s(300, 900, 40, 5);
    const stored_side stored(s);
    const floats z = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 2), expected = s.logits();
    for (std::size_t i = 0; i < z.size(); ++i) REQUIRE(std::abs(z[i] - expected[i]) < 1e-5f);
    CHECK(equal_bits(z, tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1)));
}

TEST_CASE("nothing beyond the head is read") {
    side s(3, 41, 40, 8); // neither ids nor columns fill a block
    const stored_side stored(s);
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), bytes = stored.w.size() * sizeof(bfloat16);
    REQUIRE(bytes < page);
    auto* const pages =
        static_cast<char*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(pages != MAP_FAILED);
    REQUIRE(mprotect(pages + page, page, PROT_NONE) == 0);
    char* const w = pages + page - bytes;
    std::memcpy(w, stored.w.data(), bytes);
    CHECK(
        equal_bits(tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1, reinterpret_cast<const bfloat16*>(w)),
                   tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1)));
    munmap(pages, 2 * page);
}

TEST_CASE("numbers that are none stay with their row and their id") {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        side s(5, 40, 33, 9);
        stored_side stored(s);
        const floats before = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1);
        stored.x[std::size_t(2 * s.d + 32)] =
            element<bfloat16>::store(bad); // the last column: beyond it are padding's zeros
        stored.w[std::size_t(39 * s.d + 32)] = element<bfloat16>::store(bad); // the last id
        const floats z = tile_logits_of<plain_tiles>(s, stored, all_rows(s), 0, s.v, 1);
        for (index_t r = 0; r < s.n; ++r)
            for (index_t i = 0; i < s.v; ++i) {
                const auto j = std::size_t(r * s.v + i);
                CHECK((r == 2 || i == 39 ? !std::isfinite(z[j]) : z[j] == before[j]));
            }
    }
}

TEST_CASE(
    "a call on tiles is the call on the floats that the numbers are, to float's roundings; no budget changes a bit") {
    const index_t n = 7;
    side s(n, 1500, 48, 11, true), t(n, 1500, 100, 14, true, 20);
    const stored_side mine(s), theirs(t);
    const std::uint8_t kept[n] = {1, 1, 0, 1, 1, 1, 1};
    env e;
    e.mask = row_mask<space::host>(std::span(kept));
    const auto check = [&](const auto& estimator) {
        cpu_backend be;
        gradients in_float(s, 3), g(s, 5);
        const result expected = evaluate(be, student_of(s, in_float), teacher_of(t), estimator, e);
        const long before = plain_tiles::runs;
        const result got = evaluate(be, student_on(s, mine, g), teacher_on(t, theirs), estimator, e);
        CHECK(plain_tiles::runs - before == 2 * ((s.v + 31) / 32)); // of either side, and 7 rows are one block
        CHECK(got.loss == doctest::Approx(expected.loss).epsilon(1e-5));
        const auto wide = [](const floats& x) { return std::vector<double>(x.begin(), x.end()); };
        CHECK(distance(g.dx, wide(in_float.dx)) < 2e-5);
        CHECK(distance(g.dw, wide(in_float.dw)) < 2e-5);
        CHECK(distance(g.db, wide(in_float.db)) < 2e-5);
        for (const int threads : {1, 2})
            for (const index_t rows : {1, 3, 7})
                for (const index_t ids : {0, 1024}) {
                    gradients again(s, 9);
                    auto small = student_on(s, mine, again);
                    small.budget = budget_of_rows(small, rows, ids);
                    cpu_backend other{.threads = threads};
                    std::vector<std::byte> memory(workspace_bytes(other, small, teacher_on(t, theirs), estimator, e));
                    other.arena = memory;
                    CHECK(evaluate(other, small, teacher_on(t, theirs), estimator, e).loss == got.loss);
                    CHECK(again == g);
                }
    };
    check(reverse_kl{});
    check(forward_kl{});
    check(jsd{});
}

TEST_CASE("a support's ids and a head with an update are computed in float: the bits of a view's") {
    side s(4, 60, 33, 21);
    const stored_side stored(s);
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
    CHECK(refused([&] { plain_amx(matrix_view<const bfloat16>(nullptr, 2, 3, 3)); }));
    CHECK(refused([&] { plain_amx(matrix_view<const bfloat16>(w.data(), -2, 3, 3)); }));
    CHECK(refused([&] { plain_amx(matrix_view<const bfloat16>(w.data(), 2, 3, 2)); }));
    CHECK_NOTHROW(plain_amx(view(w.data(), 2, 3)));
}
