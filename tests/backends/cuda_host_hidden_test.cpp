// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
// optimise: no
//
// Losses from hidden states as a device computes them, run on the host (hidden_cases.hpp): every product through the
// arguments that cuBLAS gets, every kernel thread by thread, memory that held NaN; against float64, and against the CPU
// backend where rows know few ids.
#include "backends/hidden_cases.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/cuda/blocks.hpp>
#include <opd/draw.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>
#include <opd/hidden.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr double in_float = 2e-6, in_bfloat16 = 4e-3; // of dz in 8 bits: 2^-9 an entry

/// Student and teacher of different widths.
template <class X>
hidden_case<X> ordinary(index_t n, index_t v, std::uint64_t seed, bool more = false) {
    return {{n, v, 12, seed, more, more ? 3.f : 0.f}, {n, v, 20, seed + 1, more, more ? 5.f : 0.f}};
}

} // namespace

TEST_CASE("a product by rows is the product by columns that cuBLAS is told") {
    property("by_rows", [] {
        const auto size = [] { return index_t(*rc::gen::inRange(1, 9)); };
        const index_t m = size(), n = size(), k = size(), gap_a = size() - 1, gap_b = size() - 1, gap_c = size() - 1;
        const bool ta = *rc::gen::arbitrary<bool>(), tb = *rc::gen::arbitrary<bool>();
        const float beta = *rc::gen::element(0.f, 1.f, -0.5f);
        source s(std::uint64_t(*rc::gen::inRange(0, 1000)));
        gapped<float> a(ta ? k : m, ta ? m : k, gap_a, 9), b(tb ? n : k, tb ? k : n, gap_b, 9), c(m, n, gap_c, 2);
        for (float& x : a.data) x = float(s.normal());
        for (float& x : b.data) x = float(s.normal());
        naive_product(detail::by_rows<float>(m, n, k, {a.data.data(), a.stride, ta}, {b.data.data(), b.stride, tb},
                                             beta, c.data.data(), c.stride));
        for (index_t i = 0; i < m; ++i)
            for (index_t j = 0; j < c.stride; ++j) {
                double want = j < n ? 2 * double(beta) : 2;
                for (index_t l = 0; j < n && l < k; ++l)
                    want += (ta ? a.at(l, i) : a.at(i, l)) * (tb ? b.at(j, l) : b.at(l, j));
                RC_ASSERT(std::abs(double(c(i, j)) - want) < 1e-5);
            }
    });
}

TEST_CASE("values and gradients, whatever the block of rows") {
    blocks_on_host memory;
    for (const index_t v : {1, 5, 37, 700})
        for (const bool more : {false, true})
            for (const index_t block : {0, 1, 4, 13}) {
                CAPTURE(v);
                CAPTURE(more);
                CAPTURE(block);
                hidden_case<float> c = ordinary<float>(13, v, std::uint64_t(v), more);
                c.block = block;
                memory.backend.threads = block == 4 ? 3 : 64;
                const auto first = check_hidden(memory, c, reverse_kl{}, in_float);
                CHECK(same_outputs(first, run_hidden(memory, c, reverse_kl{})));
                if (v == 37) check_hidden(memory, c, jsd{}, 4e-5); // as far as its rows in float are (cuda_cases.hpp)
            }
}

TEST_CASE("a vocabulary of several stretches, chunks and a rest") {
    blocks_on_host memory;
    hidden_case<float> c{{5, 20003, 6, 1, true, 4}, {5, 20003, 9, 2}};
    c.block = 2;
    check_hidden(memory, c, reverse_kl{}, in_float);
    CHECK(memory.backend.products == 3 * (2 + 3 + 1)); // blocks of 2, 2, 1: logits of both, dx in three stretches, dw
}

TEST_CASE("bfloat16 states and heads") {
    blocks_on_host memory;
    for (const bool more : {false, true})
        for (const index_t block : {0, 4}) {
            hidden_case<bfloat16> c = ordinary<bfloat16>(11, 300, 7, more);
            c.block = block;
            const auto got = check_hidden(memory, c, reverse_kl{}, in_bfloat16);
            c.wants_dx = c.wants_dw = c.wants_db = false;
            const auto value = check_hidden(memory, c, reverse_kl{}, in_float); // no gradient is rounded
            CHECK(value.r.loss == got.r.loss);
            CHECK(value.lse == got.lse);
        }
}

TEST_CASE("of a single row, or a single id, any stride is a stride") {
    blocks_on_host memory;
    for (const index_t v : {1, 30}) {
        hidden_case<float> c = ordinary<float>(1, v, 4);
        const auto want = run_hidden(memory, c, reverse_kl{});
        hidden_outputs got(c);
        hidden_call<float, blocks_on_host> call(memory, c, got);
        call.mine.x.stride = call.mine.dx.stride = call.theirs.x.stride = 0;
        if (v == 1) call.mine.w.stride = call.mine.dw.stride = call.theirs.w.stride = 1;
        call.run(call.mine, call.theirs, reverse_kl{});
        CHECK(same_outputs(got, want));
    }
}

TEST_CASE("more rows than blocks of threads: each has some, in every block of rows") {
    blocks_on_host memory;
    memory.backend.threads = 2;
    hidden_case<float> c{{5001, 3, 2, 1}, {5001, 3, 2, 2}};
    for (const index_t block : {0, 2500}) {
        c.block = block;
        CHECK(check_hidden(memory, c, reverse_kl{}, in_float).r.diagnostics.rows == 5001);
        CHECK(memory.backend.products == (block == 0 ? 4 : 3 * 4)); // of 2,432, twice, and 137
    }
}

TEST_CASE("each gradient by itself, and no product for what is not wanted") {
    blocks_on_host memory;
    const index_t n = 9, v = 90;
    hidden_case<float> c = ordinary<float>(n, v, 3, true);
    const auto all = run_hidden(memory, c, reverse_kl{});
    const double logits = double(n * v * (12 + 20)), back = double(n * v * 12);
    CHECK(memory.backend.multiplications == logits + 2 * back);
    for (const int wanted : {0, 1, 2, 4}) {
        c.wants_dx = wanted == 1, c.wants_dw = wanted == 2, c.wants_db = wanted == 4;
        const auto one = check_hidden(memory, c, reverse_kl{}, in_float);
        CHECK(memory.backend.multiplications == logits + (wanted == 1 || wanted == 2 ? back : 0));
        CHECK(one.r.loss == all.r.loss);
        if (wanted == 1) CHECK(one.dx.data == all.dx.data);
        if (wanted == 2) CHECK(one.dw.data == all.dw.data);
        if (wanted == 4) CHECK(one.db == all.db);
    }
}

TEST_CASE("temperatures, masks, weights and a mean over rows") {
    blocks_on_host memory;
    for (const index_t block : {0, 3}) {
        hidden_case<float> c = ordinary<float>(10, 64, 5, true);
        c.student.temperature = 0.7f, c.teacher.temperature = 2.5f;
        c.block = block, c.reduction = reduce::token_mean;
        source s(1);
        for (index_t r = 0; r < 10; ++r) c.mask.push_back(r % 3 != 1), c.weights.push_back(float(s.normal()));
        check_hidden(memory, c, reverse_kl{}, in_float);
        for (const float t : {0.01f, 100.f}) {
            c.student.temperature = c.teacher.temperature = t;
            check_hidden(memory, c, reverse_kl{}, 2e-5); // at 0.01 the logits' last digits are 1e-5 nats
        }
    }
}

TEST_CASE("sequences are counted over the batch, not over the block") {
    blocks_on_host memory;
    hidden_case<float> c = ordinary<float>(10, 40, 6);
    c.reduction = reduce::sequence_mean, c.offsets = {0, 3, 3, 9, 10};
    const auto whole = run_hidden(memory, c, reverse_kl{});
    c.block = 2;
    const auto cut = run_hidden(memory, c, reverse_kl{});
    CHECK(cut.r.loss == doctest::Approx(whole.r.loss).epsilon(1e-14));
    double mean = 0; // the losses are of the rows alone
    for (index_t r = 0; r < 10; ++r) mean += double(whole.losses[std::size_t(r)]) / (r < 3 ? 3 : (r < 9 ? 6 : 1)) / 3;
    CHECK(cut.r.loss == doctest::Approx(mean).epsilon(1e-6));
    CHECK(cut.dx.data == whole.dx.data);
}

TEST_CASE("beta is of dx, beta_head of the head, on the first block alone") {
    blocks_on_host memory;
    for (const index_t block : {0, 1, 4}) {
        hidden_case<float> c = ordinary<float>(9, 50, 8);
        c.block = block, c.before = 2, c.beta = -0.5f, c.beta_head = 0.25f;
        check_hidden(memory, c, reverse_kl{}, in_float);
        c.before = std::numeric_limits<float>::quiet_NaN(); // what is not collected is not read
        c.beta = c.beta_head = 0;
        const auto got = run_hidden(memory, c, reverse_kl{});
        c.before = 0;
        const auto clean = run_hidden(memory, c, reverse_kl{});
        CHECK(got.db == clean.db);
        for (index_t r = 0; r < 9; ++r)
            for (index_t i = 0; i < 12; ++i) CHECK(got.dx.at(r, i) == clean.dx.at(r, i));
        for (index_t r = 0; r < 50; ++r)
            for (index_t i = 0; i < 12; ++i) CHECK(got.dw.at(r, i) == clean.dw.at(r, i));
    }
}

TEST_CASE("bad rows have gradient 0 and keep out of the head; masked ones may hold anything") {
    blocks_on_host memory;
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (const bool more : {false, true})
        for (const index_t block : {0, 1, 4}) {
            hidden_case<float> c = ordinary<float>(11, 60, 9, more);
            c.block = block, c.before = 3, c.beta = 2;
            c.mask.assign(11, 1);
            c.mask[4] = 0, c.student.x(4, 2) = nan, c.teacher.x(4, 2) = nan;
            c.student.x(1, 3) = nan;
            c.teacher.x(6, 0) = inf;
            if (!more) c.student.x(10, 5) = -inf; // a soft-cap makes numbers of it where no weight is 0 or NaN comes
            const auto bad = more ? std::vector<index_t>{1, 6} : std::vector<index_t>{1, 6, 10};
            if (more) c.teacher.soft_cap = 0, c.teacher.bias.clear();
            const auto got = check_hidden(memory, c, reverse_kl{}, in_float, bad);
            CHECK(got.r.diagnostics.first_bad_row == 1);
            for (const index_t r : {1, 4, 6})
                for (index_t i = 0; i < 12; ++i) CHECK(got.dx.at(r, i) == 6);
        }
    // a head with a NaN makes every row bad, and no gradient of it
    hidden_case<float> c = ordinary<float>(5, 30, 2);
    c.student.w(7, 1) = nan;
    const auto got = run_hidden(memory, c, reverse_kl{});
    CHECK(got.r.diagnostics.bad_rows == 5);
    for (index_t r = 0; r < 5; ++r)
        for (index_t i = 0; i < 12; ++i) CHECK(got.dx.at(r, i) == 0);
    for (index_t r = 0; r < 30; ++r)
        for (index_t i = 0; i < 12; ++i) CHECK(got.dw.at(r, i) == 0);
}

TEST_CASE("padding of dx and dW is zeroed") {
    blocks_on_host memory;
    for (const float beta : {0.f, 2.f})
        for (const index_t block : {0, 3}) {
            hidden_case<float> c = ordinary<float>(7, 37, 1);
            c.before = 9, c.block = block, c.beta = c.beta_head = beta;
            c.mask = {1, 1, 0, 1, 1, 1, 1};
            hidden_outputs o(c);
            hidden_call<float, blocks_on_host> call(memory, c, o);
            call.mine.dx.padding = 1, call.mine.dw.padding = 1; // of the two columns behind a row of dW
            call.run(call.mine, call.theirs, reverse_kl{});
            for (index_t r = 0; r < 7; ++r) CHECK(o.dx(r, 12) == 0);
            for (index_t i = 0; i < 37; ++i) {
                CHECK(o.dw(i, 12) == 0);
                CHECK(o.dw(i, 13) == 9);
            }
        }
}

TEST_CASE("padded heads: ids that the teacher lacks have no gradient") {
    blocks_on_host memory;
    for (const index_t block : {0, 3}) {
        hidden_case<float> c{{7, 9001, 5, 1, true, 4}, {7, 8000, 8, 2}}; // the second chunk has none
        c.vocab = vocabulary::drop_and_renormalise, c.block = block;
        const auto got = check_hidden(memory, c, reverse_kl{}, in_float);
        for (index_t i = 8000; i < 9001; ++i) CHECK(got.db[std::size_t(i)] == 0);
        hidden_case<float> more{{7, 40, 5, 1}, {7, 60, 8, 2}};
        more.vocab = vocabulary::drop_and_renormalise, more.block = block;
        check_hidden(memory, more, reverse_kl{}, in_float);
    }
}

TEST_CASE("logits far from each other, and logits that are all large") {
    blocks_on_host memory;
    for (const double scale : {0.0, 1e-3, 30.0, 1000.0}) { // an untrained head; gaps of thousands of nats
        CAPTURE(scale);
        hidden_case<float> c = ordinary<float>(6, 80, 4);
        for (index_t v = 0; v < 80; ++v)
            for (index_t i = 0; i < 12; ++i) c.student.w(v, i) = float(scale * double(c.student.w(v, i)));
        check_hidden(memory, c, reverse_kl{}, scale > 100 ? 1e-4 : 2e-5); // float logits of 1e3 have 6e-5 nats
    }
}

TEST_CASE("one side alone: the other lies in memory") {
    blocks_on_host memory;
    const index_t n = 10, v = 70;
    hidden_case<float> c = ordinary<float>(n, v, 12, true);
    c.block = 4;
    std::vector<float> z, y, dz(std::size_t(n * v), 5.f);
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i)
            z.push_back(float(c.student.logit(r, i))), y.push_back(float(c.teacher.logit(r, i)));
    const auto both = run_hidden(memory, c, reverse_kl{});
    {
        hidden_outputs o(c);
        hidden_call<float, blocks_on_host> call(memory, c, o);
        call.run(call.mine, teacher::dense{device_view(std::as_const(y).data(), n, v)}, reverse_kl{});
        CHECK(o.r.loss == doctest::Approx(both.r.loss).epsilon(1e-6));
        apart far;
        for (std::size_t i = 0; i < o.dw.data.size(); ++i) far.add(double(o.dw.data[i]), double(both.dw.data[i]));
        CHECK(far.relative() < in_float);
    }
    hidden_outputs o(c);
    hidden_call<float, blocks_on_host> call(memory, c, o);
    call.e.beta = 2;
    call.run(student::logits{device_view(std::as_const(z).data(), n, v), device_view(dz.data(), n, v)}, call.theirs,
             reverse_kl{});
    CHECK(o.r.loss == doctest::Approx(both.r.loss).epsilon(1e-6));
    dense_case<> plain{.rows = n, .vocab_z = v, .vocab_y = v, .z = z, .y = y};
    for (index_t r = 0; r < n; ++r) {
        const reference_row want = reference(plain, reverse_kl{}, r);
        for (index_t i = 0; i < v; ++i)
            CHECK(std::abs(double(dz[std::size_t(r * v + i)]) - 10 - want.dz[std::size_t(i)]) < 2e-6);
    }
}

TEST_CASE("supports and drawn tokens: as the CPU backend has them") {
    blocks_on_host memory;
    const index_t n = 8, v = 600, k = 5;
    hidden_case<float> c = ordinary<float>(n, v, 21, true);
    std::vector<std::int32_t> ids(std::size_t(n * k));
    std::vector<float> log_q, log_mu;
    source s(3);
    for (index_t r = 0; r < n; ++r)
        for (index_t j = 0; j < k; ++j) {
            ids[std::size_t(r * k + j)] = std::int32_t(j * 100 + s.below(100));
            log_q.push_back(-2.5f - float(j)), log_mu.push_back(-3 - float(j) / 2);
        }
    const auto compare = [&](const auto& estimator, auto&& cache) {
        cpu_backend cpu;
        hidden_outputs want(c), got(c);
        auto& side = c.student;
        student::hidden<float> mine;
        mine.x = {side.x.data.data(), n, 12, side.x.stride}, mine.w = {side.w.data.data(), v, 12, side.w.stride};
        mine.dx = {want.dx.data.data(), n, 12, want.dx.stride}, mine.dw = {want.dw.data.data(), v, 12, want.dw.stride};
        mine.bias = view(std::as_const(side.bias).data(), v), mine.db = view(want.db.data(), v);
        mine.soft_cap = side.soft_cap;
        const result r = evaluate(cpu, mine, cache(std::integral_constant<space, space::host>{}), estimator,
                                  {.reduction = reduce::sum, .losses = view(want.losses.data(), n)});
        c.block = 3;
        hidden_call<float, blocks_on_host> call(memory, c, got);
        if constexpr (requires { estimator.on_support; }) call.e.lse = {}; // it forms none over the vocabulary
        call.run(call.mine, cache(std::integral_constant<space, space::device>{}), estimator);
        CHECK(got.r.loss == doctest::Approx(r.loss).epsilon(1e-6));
        CHECK(got.r.diagnostics.tokens == r.diagnostics.tokens);
        apart dx, dw, db;
        for (std::size_t i = 0; i < got.dx.data.size(); ++i) dx.add(double(got.dx.data[i]), double(want.dx.data[i]));
        for (std::size_t i = 0; i < got.dw.data.size(); ++i) dw.add(double(got.dw.data[i]), double(want.dw.data[i]));
        for (std::size_t i = 0; i < got.db.size(); ++i) db.add(double(got.db[i]), double(want.db[i]));
        CHECK(dx.relative() < 5e-6);
        CHECK(dw.relative() < 5e-6);
        CHECK(db.relative() < 5e-6);
        for (std::size_t i = 0; i < got.losses.size(); ++i)
            CHECK(got.losses[i] == doctest::Approx(want.losses[i]).epsilon(1e-5));
    };
    const auto matrix = [&](auto at, const auto& of) {
        using T = std::remove_cvref_t<decltype(of[0])>;
        return matrix_view<const T, decltype(at)::value>(of.data(), n, k, k);
    };
    compare(tail_bucket{reverse_kl{}}, [&](auto at) { return teacher::support{matrix(at, ids), matrix(at, log_q)}; });
    compare(renormalised{reverse_kl{}}, [&](auto at) { return teacher::support{matrix(at, ids), matrix(at, log_q)}; });
    compare(mc{reverse_kl{}}, [&](auto at) {
        return teacher::samples{matrix(at, ids), matrix(at, log_mu), matrix(at, log_q)};
    });
}

TEST_CASE("tokens drawn under a filter, and a teacher whose vocabulary ends in one bucket") {
    blocks_on_host memory;
    const index_t n = 6, v = 300, m = 2;
    hidden_case<float> c{{n, v, 12, 5, true, 4}, {n, v - 20, 9, 6, true}};
    c.block = 4;
    std::vector<std::int32_t> kept, ids;
    std::vector<std::int64_t> offsets{0};
    std::vector<float> log_mu, log_q;
    for (index_t r = 0; r < n; ++r) {
        for (index_t j = 0; j < 10 + r; ++j) kept.push_back(std::int32_t(7 * j + r));
        offsets.push_back(std::int64_t(kept.size()));
        for (index_t j = 0; j < m; ++j) {
            ids.push_back(std::int32_t(7 * (3 * j + r) + r));
            log_mu.push_back(-2 - 0.5f * float(j)), log_q.push_back(-2.5f - 0.2f * float(r));
        }
    }
    const auto compare = [&](const auto& estimator, auto&& cache) { // with the materialised logits, on the same kernels
        hidden_outputs got(c);
        hidden_call<float, blocks_on_host> call(memory, c, got);
        call.run(call.mine, cache(std::integral_constant<space, space::device>{}, call.theirs), estimator);
        const auto& s = c.student;
        std::vector<float> z, y, dz(std::size_t(n * v)), losses(std::size_t(n), 0.f);
        for (index_t r = 0; r < n; ++r) {
            for (index_t i = 0; i < v; ++i) z.push_back(float(s.logit(r, i)));
            for (index_t i = 0; i < v - 20; ++i) y.push_back(float(c.teacher.logit(r, i)));
        }
        host_run_backend plain;
        const result r = evaluate(plain, student::logits{view(z.data(), n, v), view(dz.data(), n, v)},
                                  cache(std::integral_constant<space, space::host>{},
                                        teacher::dense{view(std::as_const(y).data(), n, v - 20)}),
                                  estimator, {.reduction = reduce::sum, .losses = view(losses.data(), n)});
        CHECK(got.r.loss == doctest::Approx(r.loss).epsilon(1e-6));
        CHECK(got.r.diagnostics.bad_rows == 0);
        CHECK(got.r.diagnostics.tokens == r.diagnostics.tokens);
        apart dx, dw, db;
        for (index_t i = 0; i < v; ++i) {
            std::vector<double> want(std::size_t(12), 0.0);
            double sum = 0;
            for (index_t row = 0; row < n; ++row) {
                const double t = double(z[std::size_t(row * v + i)]) / 4, g = double(dz[std::size_t(row * v + i)]);
                sum += g * (1 - t * t);
                for (index_t j = 0; j < 12; ++j) want[std::size_t(j)] += g * (1 - t * t) * s.x.at(row, j);
            }
            db.add(double(got.db[std::size_t(i)]), sum);
            for (index_t j = 0; j < 12; ++j) dw.add(got.dw.at(i, j), want[std::size_t(j)]);
        }
        for (index_t row = 0; row < n; ++row)
            for (index_t j = 0; j < 12; ++j) {
                double want = 0;
                for (index_t i = 0; i < v; ++i) {
                    const double t = double(z[std::size_t(row * v + i)]) / 4;
                    want += double(dz[std::size_t(row * v + i)]) * (1 - t * t) * s.w.at(i, j);
                }
                dx.add(got.dx.at(row, j), want);
            }
        CHECK(dx.relative() < 5e-6);
        CHECK(dw.relative() < 5e-6);
        CHECK(db.relative() < 5e-6);
        CHECK(dw.size > 1e-6);
    };
    const auto matrix = [&](auto at, const auto& of) {
        using T = std::remove_cvref_t<decltype(of[0])>;
        return matrix_view<const T, decltype(at)::value>(of.data(), n, m, m);
    };
    compare(mc{reverse_kl{}}, [&](auto at, auto&&) {
        constexpr space S = decltype(at)::value;
        auto sets = teacher::on_kept_sets{
            teacher::samples{matrix(at, ids), matrix(at, log_mu), matrix(at, log_q)},
            vector_view<const std::int32_t, S>(kept.data(), index_t(kept.size())),
            row_offsets<S>(vector_view<const std::int64_t, S>(offsets.data(), index_t(offsets.size())))};
        sets.widest = 15;
        return sets;
    });
    for (const index_t common : {0, 200})
        compare(reverse_kl{}, [&](auto, auto&& dense) { return teacher::lumped{dense, common}; });
}

TEST_CASE("scores and draws from hidden states have the bits that their logits give") {
    // weights of few bits: the products are exact in every order
    const index_t n = 7, v = 9000, d = 3, m = 4, k = 5;
    std::vector<float> x, w, bias, z;
    source s(8);
    for (index_t i = 0; i < n * d; ++i) x.push_back(float(s.below(17) - 8) / 8);
    for (index_t i = 0; i < v * d; ++i) w.push_back(float(s.below(65) - 32) / 8);
    for (index_t i = 0; i < v; ++i) bias.push_back(float(s.below(9)) / 16);
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i) {
            float sum = bias[std::size_t(i)];
            for (index_t j = 0; j < d; ++j) sum += x[std::size_t(r * d + j)] * w[std::size_t(i * d + j)];
            z.push_back(sum);
        }
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[2] = 0;
    std::vector<std::int32_t> ids;
    for (index_t i = 0; i < n * m; ++i) ids.push_back(std::int32_t((i * 997) % v));
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position;
    for (index_t r = 0; r < n; ++r) sample.push_back(std::uint64_t(100 + r)), position.push_back(std::uint32_t(r));
    constexpr space S = space::device;
    const auto of = [](const auto& v_) {
        using T = std::remove_cvref_t<decltype(v_[0])>;
        return vector_view<const T, S>(v_.data(), index_t(v_.size()));
    };
    teacher::hidden<float, S> theirs;
    theirs.x = device_view(std::as_const(x).data(), n, d), theirs.w = device_view(std::as_const(w).data(), v, d);
    theirs.bias = of(bias), theirs.temperature = 0.7f;
    theirs.budget = std::size_t(v) * 4 * 3; // blocks of 3 rows
    student::hidden<float, float, S> mine;
    mine.x = theirs.x, mine.w = theirs.w, mine.bias = theirs.bias, mine.temperature = 0.7f, mine.budget = theirs.budget;
    std::vector<float> dx(x.size(), 3.f);
    mine.dx = device_view(dx.data(), n, d); // no part of it

    struct outputs {
        std::vector<float> log_p = std::vector<float>(28, 7.f), top = std::vector<float>(35, 7.f);
        std::vector<std::int32_t> ids = std::vector<std::int32_t>(35, 7), drawn = std::vector<std::int32_t>(28, 7);
        std::vector<float> log_mu = std::vector<float>(28, 7.f), weight = log_mu;
        std::vector<std::uint8_t> exact = std::vector<std::uint8_t>(28, 7);
        std::vector<double> lse = std::vector<double>(7, 7.), entropy = lse, drawn_lse = lse;
        bool operator==(const outputs& o) const {
            return log_p == o.log_p && top == o.top && ids == o.ids && drawn == o.drawn && log_mu == o.log_mu &&
                   weight == o.weight && exact == o.exact && lse == o.lse && entropy == o.entropy &&
                   drawn_lse == o.drawn_lse;
        }
    };
    const auto run = [&]<space Where>(auto& be, const auto& rows, std::integral_constant<space, Where>, auto... t) {
        outputs o;
        const auto matrix = [&](auto& of_, index_t cols) {
            return matrix_view<std::remove_reference_t<decltype(of_[0])>, Where>(of_.data(), n, cols, cols);
        };
        scores<std::int32_t, float, Where> what;
        what.ids = {ids.data(), n, m, m}, what.log_p = matrix(o.log_p, m);
        what.top_ids = matrix(o.ids, k), what.top_log_p = matrix(o.top, k);
        what.lse = {o.lse.data(), n}, what.entropy = {o.entropy.data(), n};
        const row_mask<Where> kept(vector_view<const std::uint8_t, Where>(mask.data(), n));
        const result r = score(be, rows, what, t..., kept);
        CHECK(r.diagnostics.kept == n - 1);
        const draw_keys<Where> keys{.seed = 7, .sample = {sample.data(), n}, .position = {position.data(), n}};
        draw_options<Where> options;
        options.filter = {.temperature = 0.7f, .top_k = 50}, options.mask = kept, options.lse = {o.drawn_lse.data(), n};
        drawn<std::int32_t, float, float, Where> to{matrix(o.drawn, m), matrix(o.log_mu, m), matrix(o.weight, m),
                                                    matrix(o.exact, m)};
        CHECK(draw(be, rows, design::iid{m}, keys, to, options).diagnostics.bad_rows == 0);
        return o;
    };
    host_run_backend plain{64};
    const outputs want =
        run(plain, view(std::as_const(z).data(), n, v), std::integral_constant<space, space::host>{}, 0.7f);
    host_blocks_backend be{.threads = 64};
    CHECK(run(be, theirs, std::integral_constant<space, S>{}) == want);
    CHECK(be.products == 3); // of 3, 3, 1 rows
    CHECK(run(be, mine, std::integral_constant<space, S>{}) == want);
    CHECK(dx == std::vector<float>(x.size(), 3.f));
    CHECK(want.log_p[0] != 7);
    CHECK(want.drawn[0] != 7);
}

TEST_CASE("without rows a head has no new gradient") {
    blocks_on_host memory;
    hidden_case<float> c{{0, 300, 6, 1}, {0, 300, 7, 2}};
    c.before = 4, c.beta_head = 0.5f;
    const auto got = run_hidden(memory, c, reverse_kl{});
    CHECK(got.r.loss == 0);
    CHECK(got.r.diagnostics.rows == 0);
    for (const float x : got.db) CHECK(x == 2);
    for (index_t r = 0; r < 300; ++r) {
        for (index_t i = 0; i < 6; ++i) CHECK(got.dw.at(r, i) == 2);
        CHECK(got.dw.at(r, 6) == 4); // between rows
    }
    c.before = std::numeric_limits<float>::quiet_NaN(), c.beta_head = 0;
    const auto none = run_hidden(memory, c, reverse_kl{});
    for (const float x : none.db) CHECK(x == 0);
}

// --- the plan, of sizes that no test has memory for ------------------------------------------------------------------

namespace {

/// Where something would lie; nothing looks there.
template <class T>
T* somewhere(std::uintptr_t place) {
    return reinterpret_cast<T*>(place << 46);
}

template <class X>
auto sources(index_t n, index_t v, index_t d, index_t d_t, std::size_t budget, float cap = 0) {
    student::hidden<X, float, space::device> mine;
    mine.x = device_view(somewhere<const X>(1), n, d), mine.w = device_view(somewhere<const X>(2), v, d);
    mine.dx = device_view(somewhere<float>(3), n, d), mine.dw = device_view(somewhere<float>(4), v, d);
    mine.budget = budget, mine.soft_cap = cap;
    teacher::hidden<X, space::device> theirs;
    theirs.x = device_view(somewhere<const X>(5), n, d_t), theirs.w = device_view(somewhere<const X>(6), v, d_t);
    theirs.budget = budget;
    return std::pair{mine, theirs};
}
template <class X>
auto job_of(const std::pair<student::hidden<X, float, space::device>, teacher::hidden<X, space::device>>& s) {
    return checked_job(host_blocks_backend{}, s.first, s.second, reverse_kl{});
}

} // namespace

TEST_CASE("bytes and rows of a block") {
    constexpr std::size_t budget = std::size_t{256} << 20;
    const index_t v = 151936;
    // 441 rows of float logits fit, 384 are whole tiles of a product
    const auto plan = detail::block_plan_of(job_of(sources<float>(4096, v, 1024, 4096, budget)));
    CHECK(plan.block == 384);
    CHECK(plan.bytes - plan.batch.bytes ==
          std::size_t(384 * v * 4 * 2 + 384 * 1024 * 4 + (384 * 19 + 255) / 256 * 256));
    const auto capped = detail::block_plan_of(job_of(sources<float>(4096, v, 1024, 4096, budget, 30)));
    CHECK(capped.block == 128); // 220: logits and gradient
    const auto brain = detail::block_plan_of(job_of(sources<bfloat16>(4096, v, 1024, 4096, budget)));
    CHECK(brain.block == 256); // 294 of 6 bytes an id
    CHECK(brain.bytes - brain.batch.bytes ==
          std::size_t(256 * v * (6 + 4) + 256 * 1024 * 4 + (256 * 19 + 255) / 256 * 256));
    const auto few = detail::block_plan_of(job_of(sources<float>(100, v, 1024, 4096, budget)));
    CHECK(few.block == 100); // all there are
    const auto small = detail::block_plan_of(job_of(sources<float>(100, v, 1024, 4096, std::size_t(v * 4 * 90))));
    CHECK(small.block == 90); // below a tile, what fits
    const auto odd = sources<float>(8, 50257, 5, 7, std::size_t(50264 * 4 * 8));
    CHECK(detail::block_layout(odd.first, 0).stride == 50264); // every row begins where vector loads may
    CHECK(detail::block_plan_of(job_of(odd)).block == 8);
    CHECK(workspace_bytes(host_blocks_backend{}, odd.first, odd.second, reverse_kl{}) ==
          detail::block_plan_of(job_of(odd)).bytes);
    // however long the batch, the same bytes
    CHECK(detail::block_plan_of(job_of(sources<float>(index_t{1} << 33, v, 1024, 4096, budget))).bytes == plan.bytes);
}

TEST_CASE("a budget below one row is refused, by the bytes that a row takes here") {
    for (const float cap : {0.f, 2.f}) {
        constexpr std::size_t row = 16 * 6; // 9 ids lie in 16
        auto s = sources<bfloat16>(3, 9, 4, 4, row, cap);
        CHECK(detail::block_plan_of(job_of(s)).block == 1);
        s.first.budget = row - 1;
        CHECK_THROWS_WITH_AS(detail::block_plan_of(job_of(s)),
                             doctest::Contains("student.budget: is 95 bytes; a row takes 96 on a device"),
                             invalid_input);
        s.first.budget = row, s.second.budget = 16 * 4 - 1;
        CHECK_THROWS_WITH_AS(detail::block_plan_of(job_of(s)),
                             doctest::Contains("teacher.budget: is 63 bytes; a row takes 64 on a device"),
                             invalid_input);
    }
}

TEST_CASE("batches of 2^34 rows: launches fit the grid, products lie in their memory") {
    struct region {
        const char* begin;
        std::size_t bytes;
        bool holds(const void* p, index_t elements, std::size_t size) const {
            const auto at = reinterpret_cast<std::uintptr_t>(p), from = reinterpret_cast<std::uintptr_t>(begin);
            return at >= from && at + std::size_t(elements) * size <= from + bytes;
        }
    };
    struct large {
        index_t n, v, d, d_t;
        std::size_t budget;
        index_t blocks;
    };
    for (const large c : {large{index_t{1} << 34, 1, 8, 8, std::size_t{1} << 36, 9}, // the grid ends a block
                          large{index_t{1} << 20, 151936, 64, 128, std::size_t{1} << 38, 3},
                          large{index_t{1} << 28, 151936, 64, 128, std::size_t{1} << 50, 3}, // in chunks of rows
                          large{3000, 151936, 1024, 4096, std::size_t{1} << 40, 1}}) {
        const auto s = sources<float>(c.n, c.v, c.d, c.d_t, c.budget);
        const auto job = job_of(s);
        const auto plan = detail::block_plan_of(job);
        auto* const memory = somewhere<std::byte>(10);
        const auto of = [](const auto& m) {
            return region{reinterpret_cast<const char*>(m.data), std::size_t(m.rows * m.stride) * 4};
        };
        const region all[] = {of(s.first.x),
                              of(s.first.w),
                              of(s.first.dx),
                              of(s.first.dw),
                              of(s.second.x),
                              of(s.second.w),
                              {reinterpret_cast<const char*>(memory), plan.bytes}};
        const auto held = [&](const void* p, index_t elements) {
            return std::any_of(std::begin(all), std::end(all),
                               [&](const region& r) { return r.holds(p, elements, 4); });
        };
        double multiplications = 0;
        index_t blocks_of_rows = 0, last_row = 0;
        detail::run_in_blocks(
            job, memory, reinterpret_cast<result*>(memory),
            [&](const auto& kernel, index_t blocks) {
                CHECK(blocks >= 1);
                CHECK(blocks <= 0x7fffffff);
                if constexpr (requires { kernel.rows.program; }) {
                    CHECK(kernel.begin == last_row);
                    CHECK(blocks * kernel.rows.frame.group >= kernel.end - kernel.begin);
                    CHECK((blocks - 1) * kernel.rows.frame.group < kernel.end - kernel.begin);
                    ++blocks_of_rows, last_row = kernel.end;
                }
            },
            [&](const auto& p) {
                const auto extent = [](index_t rows, index_t cols, index_t ld) { return (cols - 1) * ld + rows; };
                CHECK(held(p.a, extent(p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda)));
                CHECK(held(p.b, extent(p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb)));
                CHECK(held(p.c, extent(p.m, p.n, p.ldc)));
                multiplications += double(p.m) * double(p.n) * double(p.k);
            });
        CHECK(last_row == c.n);
        CHECK(blocks_of_rows == c.blocks);
        CHECK(multiplications == doctest::Approx(double(c.n) * double(c.v) * double(3 * c.d + c.d_t)).epsilon(1e-12));
    }
}

TEST_CASE("what a device refuses, and what the CPU's types do") {
    host_blocks_backend be;
    const auto s = sources<float>(3, 10, 4, 5, 1 << 20);
    CHECK_THROWS_AS(evaluate(be, s.first, s.second, reverse_kl{}, device_env{.checks = check::contents}), unsupported);
    CHECK_THROWS_AS(evaluate(be, s.first, s.second, reverse_kl{}, device_env{.on_infinite = infinite::raise()}),
                    unsupported);
    auto wrong = s;
    wrong.first.dx.data = const_cast<float*>(wrong.first.x.data);
    CHECK_THROWS_WITH_AS(evaluate(be, wrong.first, wrong.second, reverse_kl{}),
                         doctest::Contains("student.dx: overlaps student.x"), invalid_input);
    using job = row_job<student::hidden<float, float, space::device>, teacher::hidden<float, space::device>, reverse_kl,
                        space::device>;
    static_assert(detail::has_block_kernel<job> && !detail::has_kernel<job>);
    // rows that read a block whole
    using student_source = student::hidden<float, float, space::device>;
    using lumped = teacher::lumped<teacher::hidden<float, space::device>>;
    using support = teacher::support<std::int32_t, float, space::device>;
    static_assert(detail::has_block_kernel<row_job<student_source, lumped, reverse_kl, space::device>>);
    static_assert(detail::has_block_kernel<row_job<student_source, support, renormalised<reverse_kl>, space::device>>);
}

namespace {
enum class wrong { nothing, row, head };
/// A call with an update of the student's head, and of the teacher's, as a device has it and as the CPU has. Under a
/// wrong head every row is bad.
template <class X>
void check_update(index_t n, index_t v, index_t rank, index_t block, double bound, wrong what = wrong::nothing) {
    const index_t d = 10, d_teacher = 7;
    source s(std::uint64_t(n + v + rank));
    const auto numbers = [&s](index_t count, double deviation) {
        std::vector<X> x;
        for (index_t i = 0; i < count; ++i) x.push_back(element<X>::store(float(deviation * s.normal())));
        return x;
    };
    auto x = numbers(n * d, 1);
    auto b = numbers(v * rank, 0.6);
    const auto w = numbers(v * d, 0.6), a = numbers(rank * d, 0.3), bias = numbers(v, 1);
    const auto h = numbers(n * d_teacher, 1), head = numbers(v * d_teacher, 0.6), b_t = numbers(v * rank, 0.6),
               a_t = numbers(rank * d_teacher, 0.3);
    const X nan = element<X>::store(std::numeric_limits<float>::quiet_NaN());
    if (what == wrong::row) x[std::size_t(d)] = nan;
    if (what == wrong::head) b[std::size_t(rank)] = nan;
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    if (n > 3) mask[3] = 0;
    struct gradients {
        std::vector<float> dx, dw, bias, db, da;
    };
    const auto some = [&] {
        const auto of = [](index_t count) { return std::vector<float>(std::size_t(count), 2.f); };
        return gradients{of(n * d), of(v * d), of(v), of(v * rank), of(rank * d)};
    };
    gradients want = some(), got = some();
    const auto with = [&](auto as_view, auto as_vector, gradients& g) {
        lora_head mine{as_view(w.data(), v, d), as_view(b.data(), v, rank), as_view(a.data(), rank, d)};
        mine.scale = 0.7f, mine.db = as_view(g.db.data(), v, rank), mine.da = as_view(g.da.data(), rank, d);
        lora_head theirs{as_view(head.data(), v, d_teacher), as_view(b_t.data(), v, rank),
                         as_view(a_t.data(), rank, d_teacher)};
        student::hidden student{as_view(x.data(), n, d), mine, as_view(g.dx.data(), n, d), as_view(g.dw.data(), v, d)};
        student.bias = as_vector(bias.data(), v), student.db = as_vector(g.bias.data(), v),
        student.soft_cap = rank == 9 ? 0.f : 6.f;
        student.beta_head = 0.5f;
        teacher::hidden teacher{as_view(h.data(), n, d_teacher), theirs};
        teacher.temperature = 0.8f;
        return std::pair(student, teacher);
    };
    const auto on_host = with([](auto* p, index_t r, index_t c) { return view(std::as_const(p), r, c); },
                              [](auto* p, index_t c) { return view(std::as_const(p), c); }, want);
    cpu_backend cpu;
    const result expected =
        evaluate(cpu, on_host.first, on_host.second, reverse_kl{}, {.reduction = reduce::sum, .mask = mask});
    auto on_device = with([](auto* p, index_t r, index_t c) { return device_view(std::as_const(p), r, c); },
                          [](auto* p, index_t c) { return device_view(std::as_const(p), c); }, got);
    if (block > 0) {
        on_device.first.budget = detail::block_layout(on_device.first, 0).of_row * std::size_t(block);
        on_device.second.budget = detail::block_layout(on_device.second, 0).of_row * std::size_t(block);
    }
    blocks_on_host memory;
    device_env e;
    e.reduction = reduce::sum;
    e.mask = row_mask<space::device>(vector_view<const std::uint8_t, space::device>(mask.data(), n));
    const result r = evaluate(memory.backend, on_device.first, on_device.second, reverse_kl{}, e);
    CHECK(std::abs(r.loss - expected.loss) <= bound * std::abs(expected.loss));
    CHECK(r.diagnostics.bad_rows == expected.diagnostics.bad_rows);
    CHECK((r.diagnostics.bad_rows > 0) == (what != wrong::nothing));
    const auto close = [&](const char* name, const std::vector<float>& is, const std::vector<float>& was) {
        INFO(std::string(name));
        apart all;
        for (std::size_t i = 0; i < is.size(); ++i) all.add(double(is[i]), double(was[i]));
        CHECK(all.relative() <= bound);
    };
    close("dx", got.dx, want.dx), close("dw", got.dw, want.dw), close("bias", got.bias, want.bias);
    close("db", got.db, want.db), close("da", got.da, want.da);
}
} // namespace

TEST_CASE("heads with an update: what the CPU gives, in blocks of rows, several stretches, with bad and masked rows") {
    for (const index_t block : {0, 1, 4}) {
        check_update<float>(11, 70, 3, block, in_float);
        check_update<float>(11, 70, 9, block, in_float, wrong::row);
        check_update<float>(11, 70, 4, block, in_float, wrong::head);
        check_update<float>(3, 9000, 1, block, in_float);
        check_update<bfloat16>(11, 70, 5, block, 8e-3); // u, t and dz in 8 bits
    }
    check_update<float>(0, 70, 3, 0, in_float); // the heads' gradients are what is left of them
}

namespace {
/// A call from heads in 8 bits, and from the same numbers as views.
template <class X>
void check_coarse(index_t n, index_t v, index_t block, bool update) {
    CAPTURE(v);
    CAPTURE(block);
    CAPTURE(update);
    const index_t d = 40, rank = 3;
    source s(std::uint64_t(n + v));
    struct head {
        std::vector<std::int8_t> numbers;
        std::vector<float> scales;
        std::vector<X> decoded;
        head(index_t v, index_t d, source& s) {
            for (index_t i = 0; i < v; ++i) {
                scales.push_back(float(0.004 + 0.002 * s.normal()));
                for (index_t j = 0; j < d; ++j) {
                    numbers.push_back(std::int8_t(std::clamp(40 * s.normal(), -127., 127.)));
                    decoded.push_back(element<X>::store(scales.back() * float(numbers.back())));
                }
            }
        }
        coarse_head coarse(index_t v, index_t d) const { return {numbers.data(), scales.data(), v, d}; }
        auto whole(index_t v, index_t d) const { return device_view(decoded.data(), v, d); }
    };
    const auto numbers = [&s](index_t count, double deviation) {
        std::vector<X> x;
        for (index_t i = 0; i < count; ++i) x.push_back(element<X>::store(float(deviation * s.normal())));
        return x;
    };
    const head mine(v, d, s), theirs(v, d, s);
    const auto x = numbers(n * d, 1), y = numbers(n * d, 1), bias = numbers(v, 1), a = numbers(rank * d, 0.3),
               b = numbers(v * rank, 0.6);
    struct gradients {
        std::vector<float> dx, dw, bias, db, da;
        bool operator==(const gradients&) const = default;
    };
    blocks_on_host memory;
    const auto run = [&](const auto& w, const auto& w_teacher, gradients& g) {
        const auto of = [](index_t count) { return std::vector<float>(std::size_t(count), 2.f); };
        g = {of(n * d), of(v * d), of(v), of(v * rank), of(rank * d)};
        const auto call = [&](auto head) {
            student::hidden student{device_view(x.data(), n, d), head, device_view(g.dx.data(), n, d),
                                    device_view(g.dw.data(), v, d)};
            student.bias = device_view(bias.data(), v), student.db = device_view(g.bias.data(), v);
            student.soft_cap = 6, student.beta_head = 0.5f;
            teacher::hidden teacher{device_view(y.data(), n, d), w_teacher};
            if (block > 0) {
                student.budget = detail::block_layout(student, 0).of_row * std::size_t(block);
                teacher.budget = detail::block_layout(teacher, 0).of_row * std::size_t(block);
            }
            return evaluate(memory.backend, student, teacher, reverse_kl{}, device_env{.reduction = reduce::sum});
        };
        if (!update) return call(w);
        lora_head with{w, device_view(b.data(), v, rank), device_view(a.data(), rank, d)};
        with.scale = 0.7f, with.db = device_view(g.db.data(), v, rank), with.da = device_view(g.da.data(), rank, d);
        return call(with);
    };
    gradients want, got;
    const result expected = run(mine.whole(v, d), theirs.whole(v, d), want);
    const result r = run(mine.coarse(v, d), theirs.coarse(v, d), got);
    CHECK(r.loss == expected.loss);
    CHECK(r.loss > 0);
    CHECK(got == want);
    const std::vector<float> untouched(std::size_t(n * d), 2.f);
    CHECK(got.dx != untouched);
}
} // namespace

TEST_CASE("heads of one's own: the bits of the same numbers as a view, decoded a stretch at a time") {
    for (const index_t block : {0, 1, 4})
        for (const bool update : {false, true}) {
            check_coarse<float>(7, 70, block, update);
            check_coarse<bfloat16>(7, 70, block, update);
        }
    check_coarse<float>(3, 9000, 2, true);
    check_coarse<bfloat16>(2, 17000, 0, false);
    // a stretch of the head is beside the budget, and is what is more
    const std::vector<float> x(3 * 40);
    const std::vector<std::int8_t> numbers(70 * 40);
    const std::vector<float> scales(70, 1.f), w(70 * 40);
    const teacher::hidden whole{device_view(x.data(), 3, 40), device_view(w.data(), 70, 40)};
    const teacher::hidden coarse{device_view(x.data(), 3, 40), coarse_head{numbers.data(), scales.data(), 70, 40}};
    CHECK(detail::block_layout(coarse, 3).of_row == detail::block_layout(whole, 3).of_row);
    CHECK(detail::block_layout(coarse, 3).bytes - detail::block_layout(whole, 3).bytes ==
          detail::device_plan::aligned(sizeof(float) * 70 * 40));
}
