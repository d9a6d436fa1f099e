// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, whole-compiler
//
// Rows with holes: teacher logits of -inf where the student has mass (a padded vocabulary, a filtered teacher), student
// logits of -inf where the teacher has. Value and gradient are those of the naive float64 backend, on the CPU and in
// the device's text, and no such row needs the float64 path. Also rows whose holes come before their anchor, and logits
// beyond 1e30.
#include "backends/host_run.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>

using namespace opd;
using namespace opd::test;

namespace {

enum class hole { pads, filtered, student, both_sides, either, top };

/// Neither forward nor reverse: infinite on both sides, reads q, has no raw sums.
struct jeffreys {
    template <class F>
    F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return (e.p - e.q) * (e.delta + r.d_star);
    }
    template <class F>
    F c(const row_constants<F>&, const dense_entry<F>& e) const {
        return e.p * e.delta - e.q;
    }
    static constexpr bool infinite_where_teacher_zero() { return true; }
    static constexpr bool infinite_where_student_zero() { return true; }
};

template <class T>
struct punched {
    std::vector<T> z, y;
    index_t rows, vocab;

    punched(index_t rows_, index_t vocab_, hole h, std::uint64_t seed, double noise, double offset = 0,
            double spread = 3)
        : z(std::size_t(rows_ * vocab_)), y(z.size()), rows(rows_), vocab(vocab_) {
        numbers u(seed);
        const auto none = element<T>::store(detail::neg_inf<arithmetic_t<T>>());
        for (index_t r = 0; r < rows; ++r) {
            index_t top = 0;
            for (index_t v = 0; v < vocab; ++v) {
                const auto i = std::size_t(r * vocab + v);
                const double x = spread * u.normal();
                z[i] = element<T>::store(arithmetic_t<T>(x + offset));
                y[i] = element<T>::store(arithmetic_t<T>(x + noise * u.normal()));
                if (element<T>::load(z[i]) > element<T>::load(z[std::size_t(r * vocab + top)])) top = v;
            }
            for (index_t v = 0; v < vocab; ++v) {
                const auto i = std::size_t(r * vocab + v);
                const double w = u.uniform();
                const bool pad = v >= vocab - std::max<index_t>(1, vocab / 600);
                if (h == hole::pads && pad) y[i] = none;
                if (h == hole::filtered && w < 0.99 && v != top) y[i] = none;
                if (h == hole::student && w < 0.3 && v != top) z[i] = none;
                if (h == hole::both_sides && pad) z[i] = y[i] = none;
                if (h == hole::either && w < 0.4 && v != top) (w < 0.2 ? z : y)[i] = none;
                if (h == hole::top && (v == top || w < 0.2)) y[i] = none;
            }
        }
    }
};

struct outcome {
    double loss = 0;
    std::vector<double> dz = {};
    diagnostics figures = {};
};

template <class G, class T, class Backend, class D>
outcome run(Backend& backend, const punched<T>& x, const D& d, env e = {}, float t_s = 1, float t_t = 1) {
    std::vector<G> dz(x.z.size());
    e.reduction = reduce::sum;
    const result r = evaluate(
        backend, student::logits<T, G>{view(x.z.data(), x.rows, x.vocab), view(dz.data(), x.rows, x.vocab), t_s},
        teacher::dense{view(x.y.data(), x.rows, x.vocab), t_t}, d, e);
    outcome o{r.loss, {}, r.diagnostics};
    for (const G g : dz) o.dz.push_back(double(element<G>::load(g)));
    return o;
}

/// `carried`: float carries these rows, so none may be careful.
template <class T, class D>
void agrees(const std::string& name, const punched<T>& x, const D& d, const env& e, bool carried, float t_s = 1,
            float t_t = 1) {
    using G = std::conditional_t<std::is_same_v<T, double>, double, float>;
    naive_backend slow;
    const outcome want = run<double>(slow, x, d, e, t_s, t_t);
    const auto check = [&](auto& backend, const char* where) {
        const outcome got = run<G>(backend, x, d, e, t_s, t_t);
        INFO(name << ", V = " << x.vocab << ", " << where);
        // powers of ratios of e^30 are conditioned like the ratios' logarithms
        const bool powers = !std::is_same_v<D, reverse_kl> && !std::is_same_v<D, forward_kl>;
        const double bound = powers ? 1e-5 : 1e-6;
        const double slack = std::is_same_v<D, jeffreys> ? 2e-7 : 1e-9; // c is not anchored: p and q of size 1 cancel
        CAPTURE(got.loss);
        CAPTURE(want.loss);
        CHECK(std::abs(got.loss - want.loss) <=
              (powers ? 1e-5 : 2e-7) * (double(x.rows) + std::abs(want.loss))); // losses of float rows, summed
        CHECK(got.figures.infinite_rows == want.figures.infinite_rows);
        CHECK(got.figures.bad_rows == 0);
        if (carried) CHECK(got.figures.careful_rows == 0);
        for (index_t r = 0; r < x.rows; ++r) {
            double top = 0, worst = 0, sum = 0, size = 0;
            for (index_t v = 0; v < x.vocab; ++v) {
                const auto i = std::size_t(r * x.vocab + v);
                top = std::max(top, std::abs(want.dz[i]));
                worst = std::max(worst, std::abs(want.dz[i] - got.dz[i]));
                sum += got.dz[i], size += std::abs(got.dz[i]);
            }
            CAPTURE(top);
            CAPTURE(worst);
            CHECK(worst <= bound * top + slack);
            CHECK(std::abs(sum) <= 1e-6 * size + 6e-8 * std::abs(want.loss) + slack); // Σ p is 1 to rounding, times Σ c
        }
    };
    cpu_backend fast;
    host_run_backend device{32};
    check(fast, "CPU");
    if (x.vocab < 5000) check(device, "device text");
}

} // namespace

TEST_CASE("rows with holes are the naive backend's, and none is careful") {
    std::uint64_t seed = 20250601;
    for (const index_t vocab : {3, 1000, 1025, 3000, 40000})
        for (const hole h : {hole::pads, hole::filtered, hole::student, hole::both_sides, hole::either, hole::top})
            for (const float t : {1.F, 0.7F}) {
                const punched<float> x(2, vocab, h, ++seed, 0.5);
                CAPTURE(int(h));
                CAPTURE(t);
                for (const double floor : {-30., -5.}) {
                    const env e{.on_infinite = infinite::floor(floor)};
                    agrees("reverse KL", x, reverse_kl{}, e, true, t, 1);
                    agrees("forward KL", x, forward_kl{}, e, h != hole::top, t, 1);
                    agrees("chi-squared", x, chi_squared{}, e, true, t, t);
                    agrees("jeffreys", x, jeffreys{}, e, true, 1, t);
                }
            }
}

TEST_CASE("storage types, near-equal models, offsets, floors out of the way") {
    for (const hole h : {hole::pads, hole::filtered, hole::student, hole::top}) {
        CAPTURE(int(h));
        const punched<bfloat16> brains(2, 3000, h, 5, 0.5);
        const punched<double> doubles(2, 3000, h, 6, 0.5);
        const punched<half> halves(2, 3000, h, 7, 0.5);
        const punched<float> near(2, 3000, h, 8, 1e-3), far(2, 3000, h, 9, 0.5, 1e4);
        agrees("bfloat16", brains, reverse_kl{}, {}, true);
        agrees("double", doubles, reverse_kl{}, {}, true);
        agrees("half", halves, reverse_kl{}, {}, true);
        agrees("near", near, reverse_kl{}, {}, true);
        agrees("offset 1e4", far, reverse_kl{}, {}, true);
        agrees("bfloat16, forward KL", brains, forward_kl{}, {}, h != hole::top);
        agrees("near, forward KL", near, forward_kl{}, {}, h != hole::top);
        agrees("offset 1e4, forward KL", far, forward_kl{}, {}, h != hole::top);
        for (const double floor : {-500., 0.}) { // far below and above every log-prob
            const env e{.on_infinite = infinite::floor(floor)};
            agrees("floor", brains, reverse_kl{}, e, true);
            agrees("floor, forward KL", brains, forward_kl{}, e, h != hole::top);
            if (floor > -500) agrees("floor, chi-squared", brains, chi_squared{}, e, true);
        }
    }
}

TEST_CASE("an untrained student, and a floor above the log-prob of its first token") {
    std::uint64_t seed = 20251123;
    for (const index_t vocab : {64, 931, 3000})
        for (const hole h : {hole::pads, hole::filtered, hole::either, hole::top})
            for (const double floor : {-30., -4., -2., 0.}) {
                const punched<float> x(2, vocab, h, ++seed, 0.5, 0, 0.5);
                CAPTURE(int(h));
                CAPTURE(floor);
                const env e{.on_infinite = infinite::floor(floor)};
                agrees("reverse KL", x, reverse_kl{}, e, true, 2, 2);
                agrees("chi-squared", x, chi_squared{}, e, true, 2, 2);
                agrees("alpha 1.5", x, alpha_divergence{1.5}, e, true, 2, 2);
                agrees("jeffreys", x, jeffreys{}, e, true, 2, 2);
            }
}

TEST_CASE("a value alone is the value beside a gradient, also where the teacher filtered what the student ranks first "
          "so far") {
    for (const hole h : {hole::pads, hole::filtered, hole::student, hole::either, hole::top}) {
        const punched<float> x(1, 40000, h, 77, 0.5);
        cpu_backend backend;
        const auto check = [&](auto d) {
            const double with = run<float>(backend, x, d).loss;
            const double alone = evaluate(backend, student::logits{view(x.z.data(), 1, 40000)},
                                          teacher::dense{view(x.y.data(), 1, 40000)}, d, {.reduction = reduce::sum})
                                     .loss;
            CHECK(alone == doctest::Approx(with).epsilon(1e-7));
        };
        check(reverse_kl{}), check(forward_kl{}), check(alpha_divergence{.5}), check(alpha_divergence{2}), check(jsd{});
    }
}

TEST_CASE("logits beyond 1e30 count as 1e30, on careful rows too") {
    const float most = 3.4e38F, none = detail::neg_inf<float>();
    for (const float large : {9e29F, 1.1e30F, 3e38F, most}) {
        CAPTURE(large);
        const auto check = [&](auto d) {
            const std::vector<float> z{none, large, none, none, -large}, y{1, none, 0.5F, none, 0};
            for (const bool swapped : {false, true}) {
                punched<float> x(1, 5, hole::pads, 1, 0.5), tame = x;
                x.z = swapped ? y : z, x.y = swapped ? z : y;
                tame = x;
                for (auto* side : {&tame.z, &tame.y})
                    for (float& v : *side)
                        if (v == large) v = 9e29F;
                cpu_backend fast;
                host_run_backend device{4};
                naive_backend slow;
                const outcome want = run<double>(slow, tame, d);
                for (const outcome& got : {run<float>(fast, x, d), run<float>(device, x, d)}) {
                    CHECK(got.loss == doctest::Approx(want.loss).epsilon(1e-6));
                    double sum = 0;
                    for (std::size_t i = 0; i < 5; ++i) {
                        CHECK(got.dz[i] == doctest::Approx(want.dz[i]).epsilon(1e-6));
                        sum += got.dz[i];
                    }
                    CHECK(std::abs(sum) <= 1e-5 * std::max(1.0, std::abs(want.dz[1]))); // of five
                }
            }
        };
        check(forward_kl{}), check(reverse_kl{}), check(jsd{}), check(skew_forward_kl{}), check(total_variation{});
    }
}
