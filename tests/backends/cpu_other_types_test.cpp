// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
//
// Other libraries' 16-bit types: each gives the bits that opd::bfloat16 or opd::half gives, by the same loads and
// stores. CUDA's and PyTorch's are stand-ins of the same name and layout, one declared before opd is included and one
// after.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"

#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

#include "opd/estimators/any.hpp"

struct alignas(2) __nv_bfloat16 {
    __nv_bfloat16() = default;
    __nv_bfloat16(float) {}
    operator float() const { return 0; } // never asked

protected:
    unsigned short __x;
};
struct alignas(2) __half {
    __half() = default;
    __half(float) {}
    operator float() const { return 0; }

protected:
    unsigned short __x;
};

#include <doctest/doctest.h>
#include <vector>

#include <opd/backends/eigen.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

namespace c10 {
struct alignas(2) BFloat16 {
    std::uint16_t x;
    BFloat16() = default;
    BFloat16(float) {}
    operator float() const { return 0; }
};
struct alignas(2) Half {
    std::uint16_t x;
    Half() = default;
    Half(float) {}
    operator float() const { return 0; }
};
} // namespace c10

namespace mine {
struct brain {
    unsigned char b[2];
};
} // namespace mine
template <>
struct opd::element<mine::brain> : opd::same_bits<mine::brain, opd::bfloat16> {};

using namespace opd;

namespace {

/// A call's gradient and loss on the same bits under the name T.
struct outcome {
    std::vector<std::uint16_t> dz;
    double loss = 0, sampled_loss = 0;
    bool operator==(const outcome&) const = default;
};
template <class T>
outcome run(index_t vocab) {
    using own = stored_as<T>;
    static_assert(sizeof(T) == 2);
    const index_t rows = 2;
    std::vector<T> z(std::size_t(rows * vocab)), y(z.size()), dz(z.size());
    std::uint32_t state = 7;
    for (std::size_t i = 0; i < z.size(); ++i) {
        const auto next = [&] { return own(float(std::int32_t(state = state * 1664525u + 1013904223u)) * 0x1p-29f); };
        z[i] = detail::bit_cast<T>(next()), y[i] = detail::bit_cast<T>(next());
    }
    outcome o;
    cpu_backend backend;
    const auto keep = [&] {
        for (const T& x : dz) o.dz.push_back(detail::bit_cast<own>(x).bits);
    };
    const student::logits s{view(z.data(), rows, vocab), view(dz.data(), rows, vocab)};
    o.loss = evaluate(backend, s, teacher::dense{view(y.data(), rows, vocab)}, reverse_kl{}).loss;
    keep();
    const std::vector<std::int32_t> ids(std::size_t(rows), 1);
    const std::vector<T> logs(std::size_t(rows), detail::bit_cast<T>(own(-2.f)));
    o.sampled_loss =
        evaluate(backend, s,
                 teacher::samples{view(ids.data(), rows, 1), view(logs.data(), rows, 1), view(logs.data(), rows, 1)},
                 mc{reverse_kl{}})
            .loss;
    keep();
    return o;
}

} // namespace

TEST_CASE_TEMPLATE("bfloat16 under another name", T, c10::BFloat16, __nv_bfloat16, Eigen::bfloat16, mine::brain) {
    static_assert(storage<T> && brain_float<T> && brain_float<const T>);
    static_assert(detail::loads_directly<pack, T> && detail::loads_directly<pack, const T>);
    static_assert(detail::streams<twin<lanes>, T>);
    for (const index_t vocab : {5, 3001}) { // staged alone; whole leaves and the rest
        const outcome want = run<bfloat16>(vocab);
        CHECK(run<T>(vocab) == want);
        CHECK(want.loss > 0.1);
    }
}

#if !defined(__FLT16_MANT_DIG__)
using _Float16 = Eigen::half;
#endif
TEST_CASE_TEMPLATE("half under another name", T, c10::Half, __half, Eigen::half, _Float16) {
    static_assert(storage<T> && std::is_same_v<stored_as<T>, half> && !brain_float<T>);
    CHECK(run<T>(3001) == run<half>(3001));
}

TEST_CASE_TEMPLATE("the least finite number is a mask: in logits, and in log-probs of samples and supports", T, float,
                   bfloat16, half) {
    const T none = element<T>::store(detail::neg_inf<float>());
    const T least = element<T>::store(std::is_same_v<T, half>       ? -65504.F
                                      : std::is_same_v<T, bfloat16> ? -3.3895313892515355e38F
                                                                    : std::numeric_limits<float>::lowest());
    CHECK(detail::is_finite(element<T>::load(least)));
    const index_t vocab = 3001;
    cpu_backend backend;
    std::vector<T> z(static_cast<std::size_t>(vocab)), y(z), dz(z);
    for (std::size_t i = 0; i < z.size(); ++i)
        z[i] = element<T>::store(float(i % 7)), y[i] = element<T>::store(float(i % 5));
    const student::logits s{view(z.data(), 1, vocab), view(dz.data(), 1, vocab), 1e6F}; // 65504 nats are .07 of these
    const auto same = [&](auto& to, const auto& call, std::optional<index_t> infinite = {}) { // none: of both alike
        const T was = to;
        to = none;
        const result want = call();
        const std::vector<T> gradient = dz;
        to = least;
        const result got = call();
        CHECK(got.loss == want.loss);
        CHECK(std::memcmp(gradient.data(), dz.data(), sizeof(T) * dz.size()) == 0);
        for (const result* r : {&want, &got}) {
            CHECK(r->diagnostics.bad_rows == 0);
            CHECK(r->diagnostics.infinite_rows == infinite.value_or(want.diagnostics.infinite_rows));
        }
        to = was;
    };
    const auto dense = [&] {
        return evaluate(backend, s, teacher::dense{view(y.data(), 1, vocab), 1e6F}, reverse_kl{});
    };
    for (const std::size_t at : {4UL, 2000UL, 3000UL}) same(y[at], dense, 1), same(z[at], dense, 0);
    for (const auto& line : choice::divergences)
        for (const double a : {0.5, -1.0}) {
            const any_dense d{line.which, a, 0.3};
            if (a < 0 && d.which != choice::objective::alpha_divergence) continue; // no weight
            INFO(line.text << ", a = " << a);
            const auto chosen = [&] { return evaluate(backend, s, teacher::dense{view(y.data(), 1, vocab), 1e6F}, d); };
            for (const std::size_t at : {4UL, 2000UL, 3000UL}) same(y[at], chosen), same(z[at], chosen);
        }
    const std::int32_t ids[] = {6, 0};
    T log_mu[] = {element<T>::store(-2), element<T>::store(-2)}, log_q[] = {log_mu[0], log_mu[1]};
    const auto samples = [&] {
        return evaluate(backend, s, teacher::samples{view(ids, 1, 2), view(log_mu, 1, 2), view(log_q, 1, 2)},
                        mc{reverse_kl{}});
    };
    same(log_q[0], samples, 1), same(z[6], samples, 0);
    const auto bucket = [&] {
        return evaluate(backend, s, teacher::support{view(ids, 1, 2), view(log_q, 1, 2)}, tail_bucket{reverse_kl{}});
    };
    same(log_q[1], bucket, 1), same(z[0], bucket, 0), same(z[9], bucket, 0);
    const auto renormalised_loss = [&] {
        return evaluate(backend, s, teacher::support{view(ids, 1, 2), view(log_q, 1, 2)}, renormalised{reverse_kl{}});
    };
    same(log_q[0], renormalised_loss, 1), same(z[0], renormalised_loss, 0);
}

#if defined(__BFLT16_MANT_DIG__)
static_assert(brain_float<__bf16>);
#endif
static_assert(!brain_float<half> && !brain_float<float> && brain_float<bfloat16>);
