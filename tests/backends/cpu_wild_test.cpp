// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast, whole-compiler
//
// Wild input: logits in ±1e4, one-hot rows, -inf everywhere but somewhere, denormals, the largest floats, V = 1, N = 0,
// all masked. Nothing may be NaN or infinite, in the loss, the gradient or the log-sum-exp, also under -Ofast; what is
// masked may hold anything. Where the numbers are within ±2e4 or -inf, each row's loss is that of float64 and its
// gradient sums to 0.
#include "backends/host_run.hpp"
#include "support/accuracy.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/compiled/device_text.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <cstring>
#include <limits>
#include <utility>

#include <opd/backends/cpu.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const float nan_f = std::bit_cast<float>(0x7fc00000u), inf_f = std::bit_cast<float>(0x7f800000u);

float wild_number(numbers& u) {
    switch (u.below(9)) {
    case 0:
        return float(1e4 * (2 * u.uniform() - 1));
    case 1:
        return detail::neg_inf<float>();
    case 2:
        return std::bit_cast<float>(std::uint32_t(u.below(1 << 23))); // denormal
    case 3:
        return 0;
    case 4:
        return -3e38F;
    case 5:
        return u.uniform() < 0.1 ? 3e38F : 1e4F;
    case 6:
        return float(100 * u.normal());
    default:
        return float(3 * u.normal());
    }
}
template <class T>
bool all_finite(const std::vector<T>& x) {
    return std::all_of(x.begin(), x.end(), [](T v) { return detail::is_finite(v); });
}

} // namespace

TEST_CASE("no NaN, no overflow; moderate rows are right") {
    cpu_backend backend;
    naive_backend slow;
    for_each_divergence_type([&](const std::string& name, auto d) {
        property(name + " on wild rows", [&] {
            problem p = *problems({.largest_rows = 3});
            buffers<float> b(p);
            numbers u(p.seed + 2);
            const bool moderate = u.uniform() < 0.4; // ±1e4 and -inf alone: values stay within double
            for (auto* x : {&b.z, &b.y})
                for (float& v : *x) {
                    v = wild_number(u);
                    if (moderate && !(v < 2e4F && v > -2e4F)) v = detail::neg_inf<float>();
                }
            std::vector<float> losses(std::size_t(p.rows));
            std::vector<double> lse(losses.size());
            env e = b.masked_env();
            e.losses = losses, e.lse = lse;
            e.reduction = reduce::sum;
            const result r = evaluate(backend, b.student(), b.teacher(), d, e);
            RC_ASSERT(detail::is_finite(r.loss));
            RC_ASSERT(detail::is_finite(r.diagnostics.kept_loss));
            RC_ASSERT(all_finite(b.dz));
            RC_ASSERT(all_finite(lse));
            RC_ASSERT(r.diagnostics.bad_rows == 0 || p.vocab < 40); // a short row may be -inf all over
            if (!moderate) return;
            auto reference = b.as<double, double, double>();
            std::vector<float> want(losses.size());
            e.losses = want, e.lse = {};
            evaluate(slow, reference.value_only(), reference.teacher(), d, e);
            for (index_t row = 0; row < p.rows; ++row) {
                const double loss = want[std::size_t(row)], got = losses[std::size_t(row)];
                if (!(std::abs(loss) < 1e30)) continue; // beyond float: counted as infinite
                const double spread = conditioning_of(d) * (spread_of(b.z_view().row(row), p.vocab, p.temperature_p) +
                                                            spread_of(b.y_view().row(row), p.vocab, p.temperature_q));
                if (!(std::abs(got - loss) <= value_bound<float>(loss, spread)))
                    RC_FAIL("loss of row " + std::to_string(row) + ": " + std::to_string(got) + ", not " +
                            std::to_string(loss));
                double sum = 0, size = 0;
                for (index_t v = 0; v < p.vocab; ++v) {
                    const double g = double(b.dz_view().row(row)[v]);
                    sum += g, size += std::abs(g);
                }
                // a value of 1e20 is the slope of a token that takes it back in float64, not in float
                const double bound = std::max(8 * 0x1p-23, accuracy::bounds_of(d).gradient); // docs/testing.md
                if (!(std::abs(sum) <= bound * (size + 1) + 1e-14 * std::abs(loss)))
                    RC_FAIL("row " + std::to_string(row) + " sums to " + std::to_string(sum) + " of " +
                            std::to_string(size));
            }
        });
    });
}

TEST_CASE("one entry: every divergence of one token is 0, and so is its gradient") {
    cpu_backend backend;
    for_each_divergence_type([&](const std::string& name, auto d) {
        for (const float z : {0.F, 1e4F, -1e4F, 1e-40F, 3e38F}) {
            const float y = 17;
            float dz = 777;
            const double loss =
                evaluate(backend, student::logits{view(&z, 1, 1), view(&dz, 1, 1)}, teacher::dense{view(&y, 1, 1)}, d)
                    .loss;
            CAPTURE(name);
            CAPTURE(z);
            CHECK(std::abs(loss) < 1e-12);
            CHECK(dz == 0);
        }
    });
}

TEST_CASE("a first stretch of ids without the student's mass keeps what the teacher has there") {
    cpu_backend backend;
    numbers u(3);
    std::vector<float> z, y;
    for (int i = 0; i < 2500; ++i) { // the first 1,024 are a leaf
        z.push_back(i < 1200 ? detail::neg_inf<float>() : float(2 * u.normal()));
        y.push_back(float(2 * u.normal()));
    }
    double sum_p = 0, sum_q = 0;
    for (std::size_t i = 0; i < z.size(); ++i)
        sum_p += i < 1200 ? 0 : std::exp(double(z[i])), sum_q += std::exp(double(y[i]));
    for (const double a : {1e-6, 1e-3, 0.1, 0.5}) {
        double powers = 0;
        for (std::size_t i = 1200; i < z.size(); ++i)
            powers += std::exp(a * (double(z[i]) - std::log(sum_p)) + (1 - a) * (double(y[i]) - std::log(sum_q)));
        const double loss = evaluate(backend, student::logits{view(z.data(), 1, 2500)},
                                     teacher::dense{view(y.data(), 1, 2500)}, alpha_divergence{a})
                                .loss;
        CAPTURE(a);
        CHECK(loss == doctest::Approx((powers - 1) / (a * (a - 1))).epsilon(2e-6));
    }
}

TEST_CASE("one-hot rows that disagree have the value they should") {
    cpu_backend backend;
    std::vector<float> z(2000, detail::neg_inf<float>()), y(z), dz(z);
    z[1500] = 3, y[20] = -5;
    const auto loss = [&](auto d) {
        const double l = evaluate(backend, student::logits{view(z.data(), 1, 2000), view(dz.data(), 1, 2000)},
                                  teacher::dense{view(y.data(), 1, 2000)}, d)
                             .loss;
        CHECK(all_finite(dz));
        return l;
    };
    CHECK(loss(total_variation{}) == doctest::Approx(1));
    CHECK(loss(jsd{}) == doctest::Approx(std::log(2.0)).epsilon(1e-5));
    CHECK(loss(alpha_divergence{}) == doctest::Approx(4));
    CHECK(loss(reverse_kl{}) == doctest::Approx(30)); // floored
    CHECK(loss(forward_kl{}) == doctest::Approx(30));
    y = z; // one-hot and equal, beyond the first leaf, at different temperatures
    for_each_divergence_type([&](const std::string& name, auto d) {
        const double l = evaluate(backend, student::logits{view(z.data(), 1, 2000), view(dz.data(), 1, 2000), 2.F},
                                  teacher::dense{view(y.data(), 1, 2000)}, d)
                             .loss;
        CAPTURE(name);
        CHECK(std::abs(l) < 1e-12);
        CHECK(all_finite(dz));
    });
}

TEST_CASE("two tokens, the teacher's top hundreds of nats below the student's") {
    cpu_backend backend;
    const auto sums_to_zero = [&](const std::string& name, auto d, bool kl) {
        const double tolerance = kl ? 1e-6 : 8e-6; // powers: float rounds an exponent of 80 to 4e-6
        for (const float gap : {20.F, 79.F, 81.F, 87.F, 90.F, 105.F, 300.F, 1000.F})
            for (const float y0 : {8.F, 2.F, .9F, 0.F, -.5F, -3.F})
                for (const float temperature : {1.F, .1F}) {
                    const float z[] = {0, gap * temperature}, y[] = {y0, 0};
                    float dz[] = {777, 777};
                    evaluate(backend, student::logits{view(z, 1, 2), view(dz, 1, 2), temperature},
                             teacher::dense{view(y, 1, 2)}, d);
                    CAPTURE(name);
                    CAPTURE(gap);
                    CAPTURE(y0);
                    CHECK(std::abs(dz[0] + dz[1]) <= tolerance * std::abs(dz[1]) + 1e-30);
                    if (kl) // dz = (p - q)/T
                        CHECK(dz[1] ==
                              doctest::Approx(1 / (1 + std::exp(-double(y0))) / double(temperature)).epsilon(1e-6));
                }
    };
    sums_to_zero("forward_kl", forward_kl{}, true);
    sums_to_zero("alpha(0)", alpha_divergence{.a = 0}, false);
    sums_to_zero("alpha(-.5)", alpha_divergence{.a = -.5}, false);
    sums_to_zero("alpha(.3)", alpha_divergence{.a = .3}, false);
}

TEST_CASE("powers where the teacher gives the student's sure token next to nothing") {
    const auto check = [](auto& backend, double a, auto d, double scale) {
        for (const float gap : {5.F, 20.F, 40.F, 80.F})
            for (const float other : {41.F, 50.F, 60.F}) {
                const float z[] = {0, -gap}, y[] = {0, other};
                float dz[] = {777, 777};
                evaluate(backend, student::logits{view(z, 1, 2), view(dz, 1, 2)}, teacher::dense{view(y, 1, 2)}, d);
                // dz = p0 p1 (slope0 - slope1), slope = (p/q)^(a-1)/(a-1)
                const double lp0 = -std::log1p(std::exp(-double(gap))), lp1 = lp0 - double(gap);
                const double lq1 = -std::log1p(std::exp(-double(other))), lq0 = lq1 - double(other);
                const double slopes = std::exp((a - 1) * (lp0 - lq0)) - std::exp((a - 1) * (lp1 - lq1));
                const double want = scale * std::exp(lp0 + lp1) * slopes / (a - 1);
                INFO("a = " << a << ", gap " << gap << ", " << other);
                CHECK(double(dz[0]) == doctest::Approx(want).epsilon(2e-6));
                CHECK(double(dz[1]) == doctest::Approx(-want).epsilon(2e-6));
            }
    };
    cpu_backend fast;
    host_run_backend threads{8};
    const auto both = [&](double a, auto d, double scale) { check(fast, a, d, scale), check(threads, a, d, scale); };
    both(2, chi_squared{}, 2);
    both(2, alpha_divergence{2}, 1);
    both(1.5, alpha_divergence{1.5}, 1);
}

TEST_CASE("powers of probabilities that float has lost") {
    // Token 0 is sure on both sides; a far one has p^a q^(1-a) = e^t. In a later leaf or in the first, and with an
    // earlier top token of the student to which the teacher gives `early` nats less or more.
    using real = long double;
    const auto check = [](const char* name, auto& backend, double a, auto d, double factor, double far_z, double far_y,
                          double early) {
        const bool long_row = early != 0;
        const bool apart = early == 1; // no earlier top, and the far token in a leaf of its own
        const std::size_t vocab = long_row ? 2600 : 3, far = apart ? 1500 : long_row ? 5 : 1;
        const std::size_t sure = apart ? 2 : long_row ? 2000 : 0;
        std::vector<float> z(vocab, -1000.F), y(vocab, -1000.F), dz(vocab, 777.F);
        z[sure] = 0, y[sure] = 0;
        z[far] = static_cast<float>(far_z), y[far] = static_cast<float>(far_y);
        if (long_row && !apart) z[4] = -40, y[4] = static_cast<float>(early);
        const index_t v = static_cast<index_t>(vocab);
        const double loss =
            evaluate(backend, student::logits{view(std::as_const(z).data(), 1, v), view(dz.data(), 1, v)},
                     teacher::dense{view(std::as_const(y).data(), 1, v)}, d)
                .loss;
        real sum_p = 0, sum_q = 0, power = 0, sum_c = 0;
        for (std::size_t i = 0; i < vocab; ++i) sum_p += std::exp(real(z[i])), sum_q += std::exp(real(y[i]));
        std::vector<real> c(vocab), want(vocab);
        for (std::size_t i = 0; i < vocab; ++i) {
            const real lp = real(z[i]) - std::log(sum_p), lq = real(y[i]) - std::log(sum_q);
            const real x = std::exp(real(a) * lp + (1 - real(a)) * lq);
            power += x, c[i] = x * real(factor) / real(a - 1), sum_c += c[i];
        }
        real top = 0;
        for (std::size_t i = 0; i < vocab; ++i) {
            want[i] = c[i] - std::exp(real(z[i])) / sum_p * sum_c;
            top = std::max(top, std::abs(want[i]));
        }
        const double value = double((power - 1) * real(factor) / real(a * (a - 1))), size = 1 + std::abs(value);
        INFO(std::string(name) << ", a = " << a << ", far " << far_z << " " << far_y << ", early " << early);
        CHECK(std::abs(loss - value) <= 1e-5 * size);
        for (const std::size_t i : {sure, far, vocab - 1, std::size_t(long_row ? 4 : 0)})
            CHECK(std::abs(double(dz[i]) - double(want[i])) <= 1e-5 * double(top) + 1e-8 * size);
    };
    cpu_backend fast;
    host_run_backend threads{8};
    const auto both = [&](double a, auto d, double factor) {
        for (const double t : {-12., -5., 0., 6.})
            for (const double smaller : {1., 30., 60., 80., 86., 88., 92., 104., 130., 400.}) {
                // the side with the larger power in absolute terms is `smaller` nats below its top
                const double far_z = a > 0.5 ? -smaller : (t + (1 - a) * smaller) / a;
                const double far_y = a > 0.5 ? (t + a * smaller) / (1 - a) : -smaller;
                if (far_z > -1 || far_y > -1 || far_z < -900 || far_y < -900) continue;
                for (const double early : {0., 1., -30., -90., -110., -190., -300., -900.})
                    if (early >= 0 || a * -40 + (1 - a) * early < 20) // its own power
                        check("lanes", fast, a, d, factor, far_z, far_y, early),
                            check("threads", threads, a, d, factor, far_z, far_y, early);
            }
    };
    both(2, chi_squared{}, 2);
    for (const double a : {2., 1.5, 6., -1., -.5, .02, .05, .1, .3, .7, .9, .98}) both(a, alpha_divergence{a}, 1);
}

TEST_CASE("what a masked row holds changes no bit of anything else, NaN included") {
    cpu_backend backend{.threads = 2};
    for_each_divergence_type([&](const std::string& name, auto d) {
        property(name,
                 [&] {
                     problem p = *problems({.largest_vocab = 1100, .smallest_rows = 2});
                     p.masked = true;
                     buffers<float> a(p), b(p);
                     numbers u(p.seed + 3);
                     for (index_t r = 0; r < p.rows; ++r)
                         if (!b.kept[std::size_t(r)]) {
                             b.weights[std::size_t(r)] = 5;
                             for (index_t v = 0; v < p.vocab; ++v) {
                                 b.z[std::size_t(r * (p.vocab + p.pad_z) + v)] = u.uniform() < 0.5 ? nan_f : inf_f;
                                 b.y[std::size_t(r * (p.vocab + p.pad_y) + v)] = u.uniform() < 0.5 ? nan_f : -inf_f;
                             }
                         }
                     const auto call = [&](buffers<float>& x) {
                         env e = x.masked_env();
                         e.weights = x.weights;
                         return evaluate(backend, x.student(), x.teacher(), d, e);
                     };
                     const result want = call(a), got = call(b);
                     RC_ASSERT(std::memcmp(&want.loss, &got.loss, sizeof(double)) == 0);
                     RC_ASSERT(std::memcmp(a.dz.data(), b.dz.data(), a.dz.size() * sizeof(float)) == 0);
                     RC_ASSERT(got.diagnostics.bad_rows == 0);
                     for (index_t r = 0; r < p.rows; ++r)
                         for (index_t v = 0; v < p.vocab && !a.kept[std::size_t(r)]; ++v)
                             RC_ASSERT(b.dz[std::size_t(r * (p.vocab + p.pad_g) + v)] == 0);
                 },
                 {.cases = 30});
    });
}

TEST_CASE("a number that stands for none: as written, and a mask where it is the least of its type") {
    const float least = std::numeric_limits<float>::lowest(), none = detail::neg_inf<float>();
    cpu_backend fast;
    host_run_backend device{32};
    naive_backend slow;
    enum side { student, teacher, both };
    for (const index_t vocab : {7, 2100})
        for (const int where : {0, 1, 2}) // the top, another, the first third
            for (const side s : {student, teacher, both})
                for (const float number : {-1400.F, -9999.F, -1e9F, -1e20F, -1e30F, -2e38F, least}) {
                    numbers u(11);
                    std::vector<float> z, y;
                    for (index_t v = 0; v < vocab; ++v)
                        z.push_back(float(2 * u.normal())), y.push_back(float(u.normal()));
                    z[std::size_t(vocab / 2)] = 7;
                    const auto with = [&](float x) {
                        auto zy = std::pair{z, y};
                        const index_t first = where == 0 ? vocab / 2 : where == 1 ? vocab - 1 : 0;
                        for (index_t v = first; v < (where == 2 ? vocab / 3 : first + 1); ++v) {
                            if (s != teacher) zy.first[std::size_t(v)] = x;
                            if (s != student) zy.second[std::size_t(v)] = x;
                        }
                        return zy;
                    };
                    const auto run = [&]<class T>(auto& backend, const auto& d, const std::vector<T>& a,
                                                  const std::vector<T>& b, std::vector<T>& dz) {
                        dz.assign(a.size(), T(777));
                        return evaluate(backend, student::logits{view(a.data(), 1, vocab), view(dz.data(), 1, vocab)},
                                        teacher::dense{view(b.data(), 1, vocab)}, d);
                    };
                    const auto [a, b] = with(number);
                    const std::vector<double> a64(a.begin(), a.end()), b64(b.begin(), b.end());
                    for_each_divergence_type([&](const std::string& name, const auto& d) {
                        INFO(name << ", V " << vocab << ", place " << where << ", side " << int(s) << ", " << number);
                        std::vector<double> want;
                        std::vector<float> dz, masked;
                        const result r = run(slow, d, a64, b64, want);
                        const bool beyond = !(r.loss < 1e30); // float cannot hold it
                        double top = 0;
                        for (double& g : want) g = beyond ? 0 : g, top = std::max(top, std::abs(g));
                        const auto check = [&](auto& backend) {
                            const result got = run(backend, d, a, b, dz);
                            CHECK(got.diagnostics.bad_rows == 0);
                            CHECK(got.diagnostics.infinite_rows == (beyond || r.diagnostics.infinite_rows > 0));
                            CHECK(std::abs(got.loss - (beyond ? 0 : r.loss)) <= 2e-6 * std::max(1.0, std::abs(r.loss)));
                            double worst = 0;
                            for (std::size_t v = 0; v < dz.size(); ++v)
                                worst = std::max(worst, std::abs(double(dz[v]) - want[v]));
                            CHECK(worst <= 4e-6 * top);
                            if (number > -1e30F) return;
                            const auto [c, e] = with(none);
                            CHECK(run(backend, d, c, e, masked).loss == got.loss);
                            CHECK(masked == dz);
                        };
                        check(fast), check(device);
                    });
                }
}

TEST_CASE("a row of nothing but masks has no distribution, whatever they are") {
    const auto check = [](auto& backend, auto number, bool bad) {
        using T = decltype(number);
        const std::vector<T> z(40, number), y(40, T(1));
        std::vector<T> dz(40, T(777));
        for (const bool swapped : {false, true}) {
            const result r =
                evaluate(backend, student::logits{view((swapped ? y : z).data(), 1, 40), view(dz.data(), 1, 40)},
                         teacher::dense{view((swapped ? z : y).data(), 1, 40)}, reverse_kl{});
            CHECK(r.diagnostics.bad_rows == bad);
            CHECK(r.loss == 0); // even, as the other side is
            for (const T g : dz) CHECK(g == 0);
        }
    };
    cpu_backend fast;
    host_run_backend device{32};
    for (const float x : {-1e9F, -1e20F, -9e29F}) check(fast, x, false), check(device, x, false);
    for (const float x : {-1e30F, std::numeric_limits<float>::lowest(), detail::neg_inf<float>()})
        check(fast, x, true), check(device, x, true);
    check(fast, std::numeric_limits<double>::lowest(), true);
}
