// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize, whole-compiler
//
// The call contract on the CPU backend: reductions, masks of every kind, weights, beta, aliasing, padding, log-sum-exp
// given and returned, unequal vocabularies, threads, micro-batches, 64-bit indices. Bits are compared where bits are
// promised.
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/tolerances.hpp"

#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <opd/backends/eigen.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using floats = buffers<float>;

bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
bool equal_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void close(const char* what, double got, double want, double bound) {
    if (!(std::abs(got - want) <= bound))
        RC_FAIL(std::string(what) + ": " + std::to_string(got) + ", not " + std::to_string(want));
}

} // namespace

TEST_CASE("every reduction, with weights of any sign, masks and beta, as the naive backend") {
    cpu_backend fast;
    naive_backend slow;
    property("reductions", [&] {
        const problem p = *problems({.largest_vocab = 70, .largest_rows = 12, .kinds = {flavour::wide}});
        floats b(p);
        auto ref = b.as<double, double, double>();
        numbers u(p.seed + 1);
        env e = b.masked_env();
        e.reduction = *rc::gen::element(reduce::sum, reduce::token_mean, reduce::sequence_mean,
                                        reduce::sequence_sum_mean, reduce::constant);
        e.normaliser = e.reduction == reduce::constant || u.uniform() < 0.3 ? 17.5 : 0;
        const auto offsets = random_offsets(p.rows, u);
        e.offsets = offsets;
        if (*rc::gen::arbitrary<bool>()) e.weights = b.weights;
        e.beta = *rc::gen::element(0.F, 1.F, -0.5F);
        e.beta_loss = *rc::gen::element(0.F, 1.F, 2.F);
        for (std::size_t i = 0; i < b.dz.size(); ++i) ref.dz[i] = b.dz[i] = float(u.normal());
        std::vector<float> losses(std::size_t(p.rows), 0.25F), losses_ref(losses);
        std::vector<double> lse(losses.size()), lse_ref(lse);
        e.losses = losses, e.lse = lse;
        const auto pad = *rc::gen::element(padding::keep, padding::zero);
        const auto dz_before = b.dz;
        const result got = evaluate(fast, b.student(pad), b.teacher(), reverse_kl{}, e);
        e.losses = losses_ref, e.lse = lse_ref;
        const result want = evaluate(slow, ref.student(pad), ref.teacher(), reverse_kl{}, e);
        close("loss", got.loss, want.loss, 1e-5 * (1 + std::abs(want.loss)) * double(p.rows + 1));
        for (std::size_t r = 0; r < losses.size(); ++r) {
            close("losses", losses[r], losses_ref[r], 2e-5 * (1 + std::abs(losses_ref[r])));
            close("lse", lse[r], lse_ref[r], 2e-7 * (1 + std::abs(lse_ref[r])));
        }
        for (index_t r = 0; r < p.rows; ++r)
            for (index_t v = 0; v < p.vocab + p.pad_g; ++v) {
                const auto i = std::size_t(r * (p.vocab + p.pad_g) + v);
                if (v >= p.vocab && pad == padding::keep) RC_ASSERT(b.dz[i] == dz_before[i]);
                close("dz", b.dz[i], ref.dz[i], 1e-5 * (1 + std::abs(ref.dz[i])));
            }
        RC_ASSERT(got.diagnostics.rows == p.rows);
        RC_ASSERT(got.diagnostics.kept == want.diagnostics.kept);
        close("kept_loss", got.diagnostics.kept_loss, want.diagnostics.kept_loss,
              1e-5 * (1 + std::abs(want.diagnostics.kept_loss)));
    });
}

TEST_CASE("reductions by hand: four rows, one masked, two sequences and an empty one") {
    cpu_backend backend;
    const float z[] = {0, 1, 2, 0, 1, 1, 3, 0}, y[] = {0, 0, 0, 1, 0, 2, 0, 0}; // (4,2)
    std::vector<float> each(4);
    env e{.reduction = reduce::sum, .losses = each};
    const auto loss = [&] {
        return evaluate(backend, student::logits{view(z, 4, 2)}, teacher::dense{view(y, 4, 2)}, reverse_kl{}, e).loss;
    };
    const double total = loss();
    const std::vector<double> l(each.begin(), each.end());
    CHECK(total == doctest::Approx(l[0] + l[1] + l[2] + l[3]));
    const std::vector<int> mask{1, 0, 1, 1};
    const std::vector<std::int64_t> offsets{0, 3, 3, 4}; // rows 0-2, none, row 3
    e.mask = row_mask<>(mask), e.offsets = offsets;
    CHECK(loss() == doctest::Approx(l[0] + l[2] + l[3]));
    CHECK(each[1] == 0);
    e.reduction = reduce::token_mean;
    CHECK(loss() == doctest::Approx((l[0] + l[2] + l[3]) / 3));
    e.normaliser = 12;
    CHECK(loss() == doctest::Approx((l[0] + l[2] + l[3]) / 12));
    e.reduction = reduce::constant;
    CHECK(loss() == doctest::Approx((l[0] + l[2] + l[3]) / 12));
    e.normaliser = 0;
    e.reduction = reduce::sequence_mean;
    CHECK(loss() == doctest::Approx(((l[0] + l[2]) / 2 + l[3]) / 2));
    e.reduction = reduce::sequence_sum_mean;
    CHECK(loss() == doctest::Approx((l[0] + l[2] + l[3]) / 2));
    const std::vector<float> weights{2, 5, -1, 0};
    e.weights = weights;
    CHECK(loss() == doctest::Approx((2 * l[0] - l[2]) / 2));
    CHECK(each[2] == doctest::Approx(-l[2]));
}

TEST_CASE("no kept row: loss 0, gradient 0 (or beta·dz), and the report says so") {
    cpu_backend backend;
    for (const auto reduction : {reduce::sum, reduce::token_mean, reduce::sequence_mean, reduce::sequence_sum_mean}) {
        floats b({.rows = 3, .vocab = 20, .seed = 5});
        const std::vector<std::int64_t> offsets{0, 1, 3};
        const std::vector<std::uint8_t> none(3, 0);
        env e{.reduction = reduction, .mask = row_mask<>(none), .offsets = offsets};
        const result r = evaluate(backend, b.student(), b.teacher(), reverse_kl{}, e);
        CHECK(r.loss == 0);
        CHECK(r.diagnostics.kept == 0);
        CHECK(r.diagnostics.rows == 3);
        for (std::size_t i = 0; i < 60; ++i) CHECK(b.dz[i] == 0);
        b.dz[7] = 3;
        e.beta = 0.5F;
        evaluate(backend, b.student(), b.teacher(), reverse_kl{}, e);
        CHECK(b.dz[7] == 1.5F);
    }
    floats none({.rows = 0, .vocab = 20});
    const result r = evaluate(backend, none.student(), none.teacher(), jsd{});
    CHECK(r.loss == 0);
    CHECK(r.diagnostics.rows == 0);
}

TEST_CASE("a row without a gradient of its own keeps beta times what was there: bad, skipped, clamped, masked") {
    cpu_backend backend;
    floats b({.rows = 5, .vocab = 20, .seed = 5});
    const std::vector<float> old = [&] {
        numbers u(6);
        for (float& g : b.dz) g = float(u.normal());
        return b.dz;
    }();
    const std::vector<std::uint8_t> kept{1, 1, 1, 0, 1};
    const std::size_t row = b.dz.size() / 5;
    b.z[3] = std::bit_cast<float>(0x7fc00000U);                        // row 0 is bad
    b.y[b.y.size() / 5 + 4] = -std::numeric_limits<float>::infinity(); // row 1 infinite
    b.y[2 * (b.y.size() / 5) + 7] = -90;                               // row 2 beyond the clamp
    b.z[2 * (b.z.size() / 5) + 7] = 60;
    env e{.mask = row_mask<>(kept)};
    e.on_infinite = infinite::skip(), e.loss_clamp = 30, e.beta = 0.5F;
    const result r = evaluate(backend, b.student(), b.teacher(), reverse_kl{}, e);
    CHECK(r.diagnostics.bad_rows == 1);
    CHECK(r.diagnostics.infinite_rows == 1);
    CHECK(r.diagnostics.clamped_rows == 1);
    for (std::size_t i = 0; i < 4 * row; ++i) CHECK(b.dz[i] == 0.5F * old[i]);
    CHECK(b.dz[4 * row] != 0.5F * old[4 * row]);
}

TEST_CASE("masks of every integral width, bool, and an ignored target") {
    cpu_backend backend;
    floats b({.rows = 5, .vocab = 9, .seed = 3});
    const auto loss = [&](const row_mask<>& m) {
        return evaluate(backend, b.value_only(), b.teacher(), reverse_kl{}, {.mask = m}).loss;
    };
    const std::vector<std::uint8_t> u8{1, 0, 7, 0, 255};
    const double want = loss(row_mask<>(u8));
    CHECK(want != loss({}));
    const bool bools[] = {true, false, true, false, true};
    CHECK(loss(row_mask<>(bools)) == want);
    CHECK(loss(row_mask<>(std::vector<std::int8_t>{-1, 0, 1, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<std::int16_t>{256, 0, 1, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<int>{1, 0, -65536, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<std::int64_t>{1, 0, std::int64_t{1} << 40, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<char>{1, 0, -128, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<std::uint16_t>{1, 0, 0x8000, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<std::uint32_t>{1, 0, 0x80000000, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<std::size_t>{1, 0, std::size_t{1} << 63, 0, 1})) == want);
    CHECK(loss(row_mask<>(std::vector<long long>{1, 0, -1, 0, 1})) == want);
    CHECK(loss(std::span<const bool>(bools)) == want);
    const std::vector<std::int64_t> targets{0, -100, 5, -100, 0};
    CHECK(loss(row_mask<>::ignoring(view(targets.data(), 5), -100)) == want);
    const std::vector<std::uint8_t> ids{0, 255, 5, 255, 0}; // unsigned, its ignored value with the top bit set
    CHECK(loss(row_mask<>::ignoring(view(ids.data(), 5), 255)) == want);
}

TEST_CASE("the gradient may be written over the logits") {
    cpu_backend backend;
    const auto check = [&](auto d, auto example) {
        using T = decltype(example);
        property("dz == z gives the same bits",
                 [&] {
                     const problem p = *problems();
                     buffers<T> b(p);
                     const double want = evaluate(backend, b.student(), b.teacher(), d, b.masked_env()).loss;
                     auto z = b.z;
                     const auto stride = p.vocab + p.pad_z;
                     const bool keep = *rc::gen::arbitrary<bool>();
                     const matrix_view<T> both{z.data(), p.rows, p.vocab, stride, p.pad_z};
                     const student::logits<T> s{.z = both,
                                                .dz = both,
                                                .temperature = p.temperature_p,
                                                .pad = keep ? padding::keep : padding::zero};
                     const double got = evaluate(backend, s, b.teacher(), d, b.masked_env()).loss;
                     RC_ASSERT(equal_bits(got, want));
                     for (index_t r = 0; r < p.rows; ++r) {
                         RC_ASSERT(std::memcmp(both.row(r), b.dz_view().row(r), std::size_t(p.vocab) * sizeof(T)) == 0);
                         for (index_t v = p.vocab; v < stride; ++v)
                             RC_ASSERT(both(r, v) == (keep ? b.z[std::size_t(r * stride + v)] : element<T>::store(0)));
                     }
                 },
                 {.cases = 50});
    };
    check(reverse_kl{}, float{});
    check(jsd{}, float{});
    check(forward_kl{}, bfloat16{});
    check(reverse_kl{}, half{});
}

TEST_CASE("padding is kept or zeroed for every width modulo 8, and nothing beyond is touched") {
    cpu_backend backend;
    for (index_t v = 1; v <= 40; ++v)
        for (const index_t pad : {0, 1, 7, 8, 17})
            for (const auto policy : {padding::keep, padding::zero}) {
                floats b({.rows = 2, .vocab = v, .pad_g = pad, .seed = 9});
                evaluate(backend, b.student(policy), b.teacher(), jsd{});
                for (index_t r = 0; r < 2; ++r)
                    for (index_t i = v; i < v + pad; ++i)
                        if (b.dz[std::size_t(r * (v + pad) + i)] != (policy == padding::keep ? 777 : 0))
                            FAIL("V " << v << ", padding " << pad << ", column " << i);
                CHECK(b.dz.back() == 777);
            }
}

TEST_CASE(
    "padding of every gradient: zeroed or kept as said, nothing beyond it, also in place, masked, bad and clamped") {
    constexpr index_t n = 5, v = 20, stride = 32, m = 4;
    cpu_backend backend;
    for (const index_t pad : {0, 1, 7, 12})
        for (const bool in_place : {false, true})
            for (const auto policy : {padding::zero, padding::keep})
                for (int cache = 0; cache < 5; ++cache) {
                    INFO("padding " << pad << ", in place " << in_place << ", cache " << cache);
                    std::vector<float> z((n - 1) * stride + v + pad + 9, 7.F), dz = z, y(n * v),
                                                                               sparse(n * stride, 7.F);
                    std::vector<float> lp(n * m, -2.F), w(n * m, .25F);
                    std::vector<std::int32_t> ids(n * m);
                    numbers u(3);
                    for (index_t r = 0; r < n; ++r)
                        for (index_t i = 0; i < v; ++i)
                            z[std::size_t(r * stride + i)] = float(u.normal()),
                                                       y[std::size_t(r * v + i)] = float(u.normal());
                    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(i % m);
                    z[stride] = std::bit_cast<float>(0x7fc00000U); // row 1 is bad, row 2 masked
                    const std::vector<std::uint8_t> mask{1, 1, 0, 1, 1};
                    env e{.mask = mask, .loss_clamp = 0.3};
                    auto& memory = in_place ? z : dz;
                    const auto before = memory;
                    const auto sink = view(memory.data(), n, v, {.stride = stride, .padding = pad});
                    const student::logits s{.z = view(z.data(), n, v, stride), .dz = sink, .pad = policy};
                    const auto f = [&](std::vector<float>& x) { return view(x.data(), n, m); };
                    const auto id = view(ids.data(), n, m);
                    if (in_place && pad == 0 && policy == padding::zero) {
                        CHECK_THROWS_WITH_AS(evaluate(backend, s, teacher::dense{view(y.data(), n, v)}, jsd{}, e),
                                             doctest::Contains("say .padding = 12"), invalid_input);
                        CHECK(std::memcmp(z.data(), before.data(), z.size() * sizeof(float)) == 0);
                        continue;
                    }
                    if (cache == 0) evaluate(backend, s, teacher::dense{view(y.data(), n, v)}, reverse_kl{}, e);
                    if (cache == 1) evaluate(backend, s, teacher::support{id, f(lp)}, tail_bucket{reverse_kl{}}, e);
                    if (cache == 2) evaluate(backend, s, teacher::support{id, f(lp)}, renormalised{jsd{}}, e);
                    if (cache == 3) evaluate(backend, s, teacher::samples{id, f(lp), f(lp)}, mc{reverse_kl{}}, e);
                    if (cache == 4)
                        evaluate(backend, s, teacher::weighted{id, f(w), f(lp), f(lp)}, mc{reverse_kl{}}, e);
                    bool right = true;
                    for (std::size_t i = 0; i < memory.size(); ++i) {
                        const auto column = index_t(i) % stride;
                        if (column < v) continue;
                        const bool ours = column < v + pad && index_t(i) < (n - 1) * stride + v + pad;
                        right &= memory[i] == (ours && policy == padding::zero ? 0 : 7);
                    }
                    CHECK(right);
                    for (index_t i = 0; i < v; ++i) CHECK(memory[std::size_t(2 * stride + i)] == 0);
                    if (cache == 2) { // and a sparse gradient's
                        const auto on = view(sparse.data(), n, m, {.stride = stride, .padding = pad});
                        std::vector<float> again = before;
                        evaluate(backend,
                                 student::on_support{.z = view(again.data(), n, v, stride), .dz = on, .pad = policy},
                                 teacher::support{id, f(lp)}, renormalised{jsd{}}, e);
                        for (std::size_t i = 0; i < sparse.size(); ++i) {
                            const auto column = index_t(i) % stride;
                            if (column >= m)
                                right &= sparse[i] == (column < m + pad && policy == padding::zero ? 0 : 7);
                        }
                        CHECK(right);
                    }
                }
}

TEST_CASE("views and sources by name") {
    float z[12] = {}, y[12] = {};
    double dz[12] = {};
    const std::size_t n = 2, v = 5, p = 6; // any integer type
    static_assert(std::is_same_v<decltype(padded_view(z, n, v, p)), matrix_view<float>>);
    for (const auto& x : {padded_view(z, n, v, p), view(z, n, v, {.stride = p, .padding = p - v})}) {
        CHECK(x.rows == 2);
        CHECK(x.cols == 5);
        CHECK(x.stride == 6);
        CHECK(x.padding == 1);
        CHECK(matrix_view<const float>(x).padding == 1);
    }
    CHECK(view(z, n, v, {.stride = p}).padding == 0);
    CHECK(device_view(z, n, v, {.stride = p, .padding = p - v}).padding == 1);
    CHECK(padded_device_view(z, n, v, p).padding == 1);
    const matrix_view<const float> in = padded_view(z, n, v, p);
    const auto out = padded_view(dz, n, v, p);
    const auto same = [&](auto s, bool gradient, float temperature, padding pad) {
        CHECK(s.z.data == z);
        CHECK(s.dz.empty() == !gradient);
        CHECK(s.temperature == temperature);
        CHECK(s.pad == pad);
    };
    using both = student::logits<float, double>;
    static_assert(std::is_same_v<decltype(student::logits{.z = in, .dz = out}), both>);
    static_assert(std::is_same_v<decltype(student::logits{.z = in, .dz = out, .pad = padding::keep}), both>);
    static_assert(std::is_same_v<decltype(student::logits{.z = view(z, 2, 6)}), student::logits<float>>);
    same(student::logits{.z = in}, false, 1, padding::zero);
    same(student::logits{.z = in, .temperature = 2}, false, 2, padding::zero);
    same(student::logits{.z = in, .dz = out}, true, 1, padding::zero);
    same(student::logits{.z = in, .dz = out, .temperature = .5F}, true, .5F, padding::zero);
    same(student::logits{.z = in, .dz = out, .pad = padding::keep}, true, 1, padding::keep);
    same(student::logits{.z = in, .dz = out, .temperature = .5F, .pad = padding::keep}, true, .5F, padding::keep);
    same(student::logits{in, out, .5F}, true, .5F, padding::zero);
    same(student::on_support{.z = in, .temperature = 2}, false, 2, padding::zero);
    same(student::on_support{.z = in, .dz = out, .temperature = .5F}, true, .5F, padding::zero);
    same(student::on_support{.z = in, .dz = out, .pad = padding::keep}, true, 1, padding::keep);
    same(student::on_support{.z = in, .dz = out, .temperature = 3, .pad = padding::keep}, true, 3, padding::keep);
    CHECK(teacher::dense{.y = view(y, 2, 6), .temperature = 2}.temperature == 2);
}

TEST_CASE("offsets of 32 or 64 bits and weights of float or double: the same bits") {
    cpu_backend backend;
    floats b({.rows = 6, .vocab = 11, .seed = 21});
    const std::vector<std::int32_t> offsets{0, 2, 2, 6};
    const std::vector<std::int64_t> offsets_64(offsets.begin(), offsets.end());
    const std::vector<long long> offsets_long(offsets.begin(), offsets.end());
    const std::vector<double> weights(b.weights.begin(), b.weights.end());
    std::vector<float> want_dz, losses(6);
    double want = 0;
    const auto check = [&](const env& e) {
        const double loss = evaluate(backend, b.student(), b.teacher(), jsd{}, e).loss;
        if (want_dz.empty()) want = loss, want_dz = b.dz;
        CHECK(equal_bits(loss, want));
        CHECK(equal_bits(b.dz, want_dz));
        std::fill(b.dz.begin(), b.dz.end(), 777.F);
    };
    for (const auto by : {reduce::sequence_mean, reduce::sequence_sum_mean}) {
        want_dz.clear();
        check({.reduction = by, .weights = b.weights, .offsets = offsets_64});
        check({.reduction = by, .weights = weights, .offsets = offsets});
        check({.reduction = by, .weights = view(weights.data(), 6), .offsets = offsets_long});
        check({.reduction = by, .weights = std::span(weights), .offsets = view(offsets.data(), 4)});
        check({.reduction = by, .weights = {weights.data(), 6}, .offsets = {offsets.data(), 4}, .losses = losses});
    }
    std::vector<double> fine(6, 1 + 0x1p-40); // read as double: the batch's loss shows it
    const double one =
        evaluate(backend, b.value_only(), b.teacher(), jsd{}, {.weights = std::vector<float>(6, 1)}).loss;
    CHECK(evaluate(backend, b.value_only(), b.teacher(), jsd{}, {.weights = fine}).loss > one);
    const std::vector<std::int32_t> falling{0, 4, 2, 6};
    CHECK_THROWS_WITH_AS(check({.offsets = falling}), doctest::Contains("env.offsets, row 2: must ascend"),
                         invalid_input);
}

TEST_CASE("a backend may be a temporary") {
    const float z[4] = {0, 1, 2, 3}, y[4] = {3, 0, 1, 2};
    float kept[4], temporary[4];
    cpu_backend backend;
    const teacher::dense t{view(y, 1, 4)};
    const double loss = evaluate(backend, student::logits{view(z, 1, 4), view(kept, 1, 4)}, t, reverse_kl{}).loss;
    CHECK(evaluate(cpu_backend{}, student::logits{view(z, 1, 4), view(temporary, 1, 4)}, t, reverse_kl{}).loss == loss);
    CHECK(std::equal(kept, kept + 4, temporary));
    double lse = 0;
    CHECK(log_sum_exp(cpu_backend{}, view(z, 1, 4), view(&lse, 1)).diagnostics.kept == 1);
    CHECK(lse == doctest::Approx(3.4401897));
}

TEST_CASE("log-sum-exp: what a call returns, another may be given") {
    cpu_backend backend;
    naive_backend slow;
    property("given and returned", [&] {
        const problem p = *problems({.smallest_rows = 1, .kinds = {flavour::wide, flavour::peaked, flavour::filtered}});
        floats b(p);
        std::vector<double> lse(std::size_t(p.rows)), again(lse);
        const double plain = evaluate(backend, b.value_only(), b.teacher(), reverse_kl{}, {.lse = lse}).loss;
        const double given =
            evaluate(backend, b.student(), b.teacher(), reverse_kl{}, {.lse = again, .given_lse = lse}).loss;
        auto ref = b.as<double, double, double>();
        const double want = evaluate(slow, ref.student(), ref.teacher(), reverse_kl{}, {.given_lse = lse}).loss;
        close("loss with lse", given, plain, 1e-12 * (1 + std::abs(plain)));
        close("loss as naive", given, want, 3e-6 * (1 + std::abs(want)));
        RC_ASSERT(again == lse);
        for (index_t r = 0; r < p.rows; ++r)
            for (index_t v = 0; v < p.vocab; ++v) close("dz", b.dz_view()(r, v), ref.dz_view()(r, v), 4e-6);
    });
    floats b({.rows = 2, .vocab = 30, .seed = 4}); // it is really used
    std::vector<double> lse(2);
    evaluate(backend, b.value_only(), b.teacher(), reverse_kl{}, {.lse = lse});
    const double plain = evaluate(backend, b.value_only(), b.teacher(), reverse_kl{}).loss;
    for (double& l : lse) l += 1;
    CHECK(std::abs(evaluate(backend, b.value_only(), b.teacher(), reverse_kl{}, {.given_lse = lse}).loss - plain) >
          0.5);
}

TEST_CASE("unequal vocabularies: softmax over the common ids") {
    cpu_backend backend;
    property("drop and renormalise", [&] {
        problem p = *problems({.smallest_rows = 1});
        const index_t common = *rc::gen::inRange<index_t>(1, p.vocab + 1);
        const bool student_longer = *rc::gen::arbitrary<bool>();
        floats b(p), cut(p);
        env e{.vocab = vocabulary::drop_and_renormalise};
        auto s = b.student();
        auto t = b.teacher();
        if (student_longer)
            t.y.cols = common;
        else
            s.z.cols = s.dz.cols = common;
        const double got = evaluate(backend, s, t, jsd{}, e).loss;
        auto s2 = cut.student();
        auto t2 = cut.teacher();
        t2.y.cols = s2.z.cols = s2.dz.cols = common;
        const double want = evaluate(backend, s2, t2, jsd{}).loss;
        RC_ASSERT(equal_bits(got, want));
        for (index_t r = 0; r < p.rows; ++r)
            for (index_t v = 0; v < p.vocab; ++v) {
                const float g = b.dz_view()(r, v);
                RC_ASSERT(g == (v < common ? cut.dz_view()(r, v) : student_longer ? 0.F : 777.F));
            }
    });
}

TEST_CASE("the same call gives the same bits, on 1, 2 or 3 threads") {
    cpu_backend one, two{.threads = 2}, three{.threads = 3};
    const auto check = [&](const char* name, auto d) {
        property(name,
                 [&] {
                     problem p = *problems({.largest_vocab = 1100, .largest_rows = 9});
                     p.rows = *rc::gen::element(index_t{p.rows}, index_t{p.rows}, index_t{300},
                                                index_t{521}); // several rows a block
                     if (p.rows > 9) p.vocab = p.vocab % 40 + 1;
                     floats a(p);
                     std::vector<float> la(std::size_t(p.rows)), lb(la);
                     const auto call = [&](cpu_backend& backend, floats& x, std::vector<float>& losses) {
                         env e = x.masked_env();
                         e.weights = x.weights, e.losses = losses;
                         return evaluate(backend, x.student(), x.teacher(), d, e).loss;
                     };
                     const double want = call(one, a, la);
                     for (cpu_backend* backend : {&one, &two, &three}) {
                         floats b(p);
                         RC_ASSERT(equal_bits(call(*backend, b, lb), want));
                         RC_ASSERT(equal_bits(a.dz, b.dz));
                         RC_ASSERT(equal_bits(la, lb));
                     }
                 },
                 {.cases = 40});
    };
    check("reverse KL", reverse_kl{});
    check("JSD", jsd{});
}

TEST_CASE("cutting a batch into micro-batches changes the total by rounding only") {
    cpu_backend backend;
    property("token mean with the global count as normaliser", [&] {
        problem p = *problems({.largest_vocab = 60, .smallest_rows = 2, .largest_rows = 12});
        p.masked = true;
        floats whole(p), cut(p);
        env e = whole.masked_env();
        const result all = evaluate(backend, whole.student(), whole.teacher(), reverse_kl{}, e);
        const index_t at = *rc::gen::inRange<index_t>(0, p.rows + 1);
        double total = 0;
        diagnostics merged;
        for (const auto& [begin, end] : {std::pair{index_t{0}, at}, std::pair{at, p.rows}}) {
            auto s = cut.student();
            auto t = cut.teacher();
            s.z.data = cut.z_view().row(begin), s.dz.data = cut.dz_view().row(begin),
            t.y.data = cut.y_view().row(begin);
            s.z.rows = s.dz.rows = t.y.rows = end - begin;
            const std::vector<std::uint8_t> mask(cut.kept.begin() + begin, cut.kept.begin() + end);
            env part{.mask = row_mask<>(mask), .normaliser = double(all.diagnostics.kept)};
            if (mask.empty()) part.mask = {};
            const result r = evaluate(backend, s, t, reverse_kl{}, part);
            total += r.loss;
            merged.merge(r.diagnostics);
        }
        close("loss", total, all.loss, 1e-13 * (1 + std::abs(all.loss)) * double(p.rows));
        if (all.diagnostics.kept > 0) RC_ASSERT(equal_bits(whole.dz, cut.dz));
        RC_ASSERT(merged.rows == all.diagnostics.rows);
        RC_ASSERT(merged.kept == all.diagnostics.kept);
    });
}

TEST_CASE("a row whose every logit is masked is bad, by -inf or the least float; one of -1e9 is the uniform law") {
    cpu_backend backend;
    const std::vector<float> y{0, 0, 0};
    const auto run = [&](float all) {
        const std::vector<float> z(3, all);
        return evaluate(backend, student::logits{view(z.data(), 1, 3)}, teacher::dense{view(y.data(), 1, 3)},
                        reverse_kl{});
    };
    CHECK(run(-std::numeric_limits<float>::infinity()).diagnostics.bad_rows == 1);
    CHECK(run(std::numeric_limits<float>::lowest()).diagnostics.bad_rows == 1);
    const result uniform = run(-1e9F);
    CHECK(uniform.diagnostics.bad_rows == 0);
    CHECK(uniform.loss == 0);
}

TEST_CASE("staleness is counted over kept rows") {
    cpu_backend backend;
    floats b({.rows = 5, .vocab = 9});
    const std::vector<std::int32_t> versions{10, 7, 10, -90, 12};
    const std::vector<int> mask{1, 1, 0, 1, 1};
    const auto d = evaluate(backend, b.value_only(), b.teacher(), reverse_kl{},
                            {.mask = row_mask<>(mask), .versions = versions, .version = 10})
                       .diagnostics;
    CHECK(d.staleness[0] == 2); // version 10, and 12 from the future
    CHECK(d.future_versions == 1);
    CHECK(to_string(d).find("; 1 of a version after env.version") != std::string::npos);
    CHECK(d.staleness[3] == 1);
    CHECK(d.staleness[32] == 1);
    CHECK(d.staleness_max == 100);
}

#if defined(__linux__)
TEST_CASE("offsets beyond 2^31 elements: three rows at a stride of 2^30") {
    const index_t stride = index_t{1} << 30, vocab = 1500;
    const std::size_t bytes = (2 * std::size_t(stride) + std::size_t(vocab)) * sizeof(float);
    const auto map = [&] {
        void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REQUIRE(p != MAP_FAILED);
        return static_cast<float*>(p);
    };
    float *z = map(), *dz = map();
    floats b({.rows = 3, .vocab = vocab, .seed = 8});
    for (index_t r = 0; r < 3; ++r) std::memcpy(z + r * stride, b.z_view().row(r), std::size_t(vocab) * sizeof(float));
    cpu_backend backend{.threads = 2};
    const auto far = student::logits{view(static_cast<const float*>(z), 3, vocab, stride), view(dz, 3, vocab, stride)};
    const auto check = [&](auto d) {
        const double want = evaluate(backend, b.student(), b.teacher(), d).loss;
        CHECK(evaluate(backend, far, b.teacher(), d).loss == want);
        for (index_t r = 0; r < 3; ++r)
            CHECK(std::memcmp(dz + r * stride, b.dz_view().row(r), std::size_t(vocab) * sizeof(float)) == 0);
    };
    check(reverse_kl{});
    check(jsd{});
    ::munmap(z, bytes);
    ::munmap(dz, bytes);
}
#endif

TEST_CASE("Eigen matrices as views") {
    using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    matrix z = matrix::Random(3, 11), dz(3, 11);
    const matrix y = matrix::Random(3, 11);
    cpu_backend backend;
    const double got =
        evaluate(backend, student::logits{view(z), view(dz)}, teacher::dense{view(y)}, reverse_kl{}).loss;
    const double want = evaluate(backend, student::logits{view(static_cast<const float*>(z.data()), 3, 11)},
                                 teacher::dense{view(y.data(), 3, 11)}, reverse_kl{})
                            .loss;
    CHECK(got == want);
    CHECK(std::abs(dz.sum()) < 1e-6);
}
