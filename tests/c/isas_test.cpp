// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels that the environment's OPD_ISA names, or the best there are, against formulas in double.
// optimise: no
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <opd/c/opd.h>

#include "c/tensors.hpp"
#include "support/generators.hpp"

using namespace opd;
using namespace opd::test;

TEST_CASE("the chosen kernels compute what the formulas say") {
    const char* const asked = std::getenv("OPD_ISA");
    const std::string config = opd_config();
    MESSAGE(config);
    if (asked != nullptr && config.find("\"chosen\": \"" + std::string(asked) + "\"") == std::string::npos) {
        REQUIRE(config.find("\"" + std::string(asked) + "\": false") != std::string::npos); // of the processor
        std::puts("SKIPPED: this processor does not have the instructions");
        return;
    }
    const index_t n = 7, v = 2500, k = 5;
    const problem p{.rows = n, .vocab = v, .kind = flavour::wide, .seed = 11};
    buffers<float> b(p);
    caches<float> cache(b, k, k);
    const auto log_softmax = [&](const float* x) {
        double top = x[0], sum = 0;
        for (index_t i = 0; i < v; ++i) top = std::max(top, double(x[i]));
        for (index_t i = 0; i < v; ++i) sum += std::exp(double(x[i]) - top);
        std::vector<double> to(static_cast<std::size_t>(v));
        for (index_t i = 0; i < v; ++i) to[std::size_t(i)] = double(x[i]) - top - std::log(sum);
        return to;
    };
    double reverse = 0, jsd = 0, bucket = 0, drawn = 0, worst = 0;
    const double w = .4, o = .3;
    std::vector<double> gradient(std::size_t(n * v));
    for (index_t r = 0; r < n; ++r) {
        const auto lp = log_softmax(b.z.data() + r * v), lq = log_softmax(b.y.data() + r * v);
        double kl = 0;
        for (std::size_t i = 0; i < lp.size(); ++i) kl += std::exp(lp[i]) * (lp[i] - lq[i]);
        for (std::size_t i = 0; i < lp.size(); ++i) {
            const double pi = std::exp(lp[i]), qi = std::exp(lq[i]), m = w * qi + (1 - w) * pi;
            gradient[std::size_t(r * v) + i] = pi * (lp[i] - lq[i] - kl) / double(n);
            jsd += (o * qi * std::log(qi / m) + (1 - o) * pi * std::log(pi / m)) / double(n);
        }
        reverse += kl / double(n);
        double rest_p = 0, of_row = 0;
        std::vector<bool> in(lp.size());
        for (index_t j = 0; j < k; ++j) {
            const auto id = std::size_t(cache.ids[std::size_t(r * k + j)]);
            in[id] = true;
            of_row += std::exp(lp[id]) * (lp[id] - double(cache.log_q[std::size_t(r * k + j)]));
            const auto a = std::size_t(cache.drawn[std::size_t(r * k + j)]);
            const double mu = double(cache.log_mu[std::size_t(r * k + j)]),
                         q = double(cache.drawn_log_q[std::size_t(r * k + j)]);
            drawn += std::exp(lp[a] - mu) * (lp[a] - q) / double(k * n);
        }
        for (std::size_t i = 0; i < lp.size(); ++i) rest_p += in[i] ? 0 : std::exp(lp[i]);
        bucket += (of_row + rest_p * (std::log(rest_p) - double(cache.log_tail[std::size_t(r)]))) / double(n);
    }
    opd_student student = {};
    opd_teacher teacher = {};
    opd_estimator estimator = {};
    opd_result result = {};
    student.struct_size = sizeof student, teacher.struct_size = sizeof teacher;
    estimator.struct_size = sizeof estimator, result.struct_size = sizeof result;
    const tensor z(b.z_view()), dz(b.dz_view()), y(b.y_view());
    student.z = &z, student.dz = &dz, teacher.y = &y;
    const auto loss = [&] {
        const opd_call call{sizeof(opd_call), nullptr, &student, &teacher, &estimator, nullptr};
        REQUIRE(opd_evaluate(&call, &result) == OPD_OK);
        return result.loss;
    };
    CHECK(loss() == doctest::Approx(reverse).epsilon(1e-6));
    for (std::size_t i = 0; i < gradient.size(); ++i) worst = std::max(worst, std::abs(gradient[i] - double(b.dz[i])));
    CHECK(worst < 1e-7);
    estimator.of = "jsd", estimator.a = w, estimator.b = o;
    CHECK(loss() == doctest::Approx(jsd).epsilon(1e-6));
    const tensor ids(view(cache.ids.data(), n, k)), log_q(view(cache.log_q.data(), n, k)), tail(cache.log_tail);
    teacher.kind = OPD_SUPPORT, teacher.ids = &ids, teacher.log_q = &log_q, teacher.log_tail = &tail;
    estimator.estimator = "tail_bucket", estimator.of = nullptr;
    CHECK(loss() == doctest::Approx(bucket).epsilon(1e-6));
    const tensor a(view(cache.drawn.data(), n, k)), mu(view(cache.log_mu.data(), n, k)),
        q(view(cache.drawn_log_q.data(), n, k));
    teacher.kind = OPD_SAMPLES, teacher.ids = &a, teacher.log_mu = &mu, teacher.log_q = &q;
    estimator.estimator = nullptr;
    CHECK(loss() == doctest::Approx(drawn).epsilon(1e-6));
}
