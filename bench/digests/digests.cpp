// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Digests of what the CPU backend computes: one line an estimator, storage type and shape, with a hash over loss, diagnostics,
// gradient, losses and log-sum-exps. Two builds that print the same lines give the same bits; scripts/digests.sh compares a
// commit with the working tree. No digest is kept: they depend on compiler and machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "opd/backends/cpu.hpp"
#include "opd/hidden.hpp"
#include "opd/opd.hpp"

namespace {

using namespace opd;

struct digest {
    std::uint64_t h = 1469598103934665603ull;
    void bytes(const void* p, std::size_t n) {
        const auto* b = static_cast<const unsigned char*>(p);
        for (std::size_t i = 0; i < n; ++i) h = (h ^ b[i]) * 1099511628211ull;
    }
    template <class T>
    void all(const std::vector<T>& x) {
        bytes(x.data(), x.size() * sizeof(T));
    }
};

/// Rows of every look: wide, near, peaked, with holes, far apart; some masked, weighted, in sequences.
template <class T>
struct batch {
    index_t n, v, k;
    std::vector<T> z, y, dz;
    std::vector<std::int32_t> ids;
    std::vector<float> log_q, log_mu, log_tail, weight, row_weight, losses;
    std::vector<std::uint8_t> exact, kept;
    std::vector<double> lse;

    batch(index_t n_, index_t v_, unsigned seed) : n(n_), v(v_), k(std::min<index_t>(v_, 7)) {
        std::mt19937 u(seed);
        std::normal_distribution<double> normal;
        const auto store = [](double x) { return element<T>::store(static_cast<arithmetic_t<T>>(x)); };
        const double lost = -std::numeric_limits<double>::infinity();
        for (index_t r = 0; r < n; ++r) {
            const auto look = u() % 6;
            std::vector<double> row_y;
            double sum = 0;
            for (index_t i = 0; i < v; ++i) {
                double a = 3 * normal(u), b = look == 1 ? a + 0.01 * normal(u) : 3 * normal(u);
                if (look == 2 && i == v / 3) a += 30;
                if (look == 3 && u() % 3 == 0) b = lost;
                if (look == 4 && u() % 5 == 0) a = lost;
                if (look == 5) a *= 20, b *= 20;
                z.push_back(store(a)), y.push_back(store(b)), row_y.push_back(b);
                sum += std::exp(b);
            }
            double inside = 0;
            const index_t first = static_cast<index_t>(u() % static_cast<unsigned>(v));
            for (index_t j = 0; j < k; ++j) {
                const index_t id = (first + j * (v / k)) % v;
                const double lq = row_y[static_cast<std::size_t>(id)] - std::log(sum);
                ids.push_back(static_cast<std::int32_t>(id));
                log_q.push_back(static_cast<float>(std::max(lq, -8000.0)));
                log_mu.push_back(static_cast<float>(std::max(lq, -80.0) * 0.9 - 0.01));
                exact.push_back(j < 2), weight.push_back(j < 2 ? 1.0f : 0.3f);
                inside += std::exp(lq);
            }
            log_tail.push_back(static_cast<float>(std::log(std::max(1e-6, 1 - inside))));
            kept.push_back(u() % 7 != 0), row_weight.push_back(static_cast<float>(u() % 5) - 1.0f);
        }
        dz.assign(z.size(), store(0.125)), losses.resize(static_cast<std::size_t>(n)), lse.resize(losses.size());
    }
};

template <class T, class Teacher, class Estimator>
void call(const std::string& name, batch<T> b, const Teacher& teacher, const Estimator& estimator, float beta,
          float t_p, bool writes_lse) {
    cpu_backend backend{.threads = 2};
    env e;
    e.mask = row_mask<>(b.kept), e.weights = b.row_weight, e.losses = b.losses, e.beta = beta;
    if (writes_lse) e.lse = b.lse;
    const auto z = view(static_cast<const T*>(b.z.data()), b.n, b.v);
    digest d;
    for (const bool gradient : {false, true}) {
        student::logits<T> s{z, {}, t_p};
        if (gradient) s.dz = view(b.dz.data(), b.n, b.v);
        const result r = evaluate(backend, s, teacher(b), estimator, e);
        d.bytes(&r.loss, sizeof r.loss);
        const diagnostics& g = r.diagnostics;
        const double figures[] = {g.kept_loss,        g.ratio_sum,        g.ratio_square_sum, g.ratio_max,
                                  g.k1_sum,           g.k2_sum,           g.k3_sum,           g.student_mass_sum,
                                  g.teacher_mass_sum, g.student_mass_min, g.teacher_mass_min};
        const index_t counts[] = {g.kept,   g.bad_rows,  g.infinite_rows, g.clamped_rows, g.careful_rows,
                                  g.tokens, g.saturated, g.tail_floored,  g.support_rows};
        d.bytes(figures, sizeof figures), d.bytes(counts, sizeof counts);
    }
    d.all(b.dz), d.all(b.losses), d.all(b.lse);
    std::printf("%-44s %6lld x %-6lld beta %.1f T %.2f  %016llx\n", name.c_str(), static_cast<long long>(b.n),
                static_cast<long long>(b.v), static_cast<double>(beta), static_cast<double>(t_p),
                static_cast<unsigned long long>(d.h));
}

template <class T>
void all_of(const char* type) {
    unsigned seed = 1;
    for (const index_t v : {1, 2, 17, 1024, 1500, 5000})
        for (const float beta : {0.0f, 0.5f}) {
            const float t_p = v % 2 ? 1.0f : 0.7f;
            const batch<T> b(v > 1000 ? 24 : 60, v, ++seed);
            const auto dense = [](const batch<T>& x) {
                return teacher::dense<T>{view(static_cast<const T*>(x.y.data()), x.n, x.v)};
            };
            const auto at = [](const auto& x, const batch<T>& of) { return view(x.data(), of.n, of.k); };
            const auto stated = [&](const batch<T>& x) {
                return teacher::support<std::int32_t>{at(x.ids, x), at(x.log_q, x), x.log_tail};
            };
            const auto inferred = [&](const batch<T>& x) {
                return teacher::support<std::int32_t>{at(x.ids, x), at(x.log_q, x)};
            };
            const auto samples = [&](const batch<T>& x) {
                return teacher::samples<std::int32_t>{at(x.ids, x), at(x.log_mu, x), at(x.log_q, x)};
            };
            const auto weighted = [&](const batch<T>& x) {
                return teacher::weighted<std::int32_t>{at(x.ids, x), at(x.weight, x), at(x.log_mu, x), at(x.log_q, x),
                                                       at(x.exact, x)};
            };
            const auto go = [&](const char* name, const auto& teacher, const auto& estimator, bool lse = true) {
                call(std::string(name) + " " + type, b, teacher, estimator, beta, t_p, lse);
            };
            const auto every = [&](const char* name, const auto& d) {
                go(name, dense, d);
                go((std::string("renormalised ") + name).c_str(), inferred, renormalised{d}, false);
                go((std::string("tail_bucket ") + name).c_str(), stated, tail_bucket{d});
                go((std::string("tail_bucket, inferred ") + name).c_str(), inferred, tail_bucket{d});
            };
            every("reverse_kl", reverse_kl{}), every("forward_kl", forward_kl{}),
                every("jsd(.3)", jsd{.w = .3, .o = .3});
            every("skew_forward(.1)", skew_forward_kl{.a = .1}), every("skew_reverse(.9)", skew_reverse_kl{.a = .9});
            every("total_variation", total_variation{}), every("chi_squared", chi_squared{});
            every("alpha(.5)", alpha_divergence{.a = .5}), every("alpha(-1)", alpha_divergence{.a = -1});
            go("acceptance", dense, acceptance{});
            go("reverse_kl where the student is unsure", dense, selected{reverse_kl{}, selector::tip{1, 0.5}});
            go("eopd", dense, eopd(1));
            go("mc", samples, mc{reverse_kl{}});
            go("mc leave-one-out", samples, mc{.baseline = baseline::leave_one_out{}});
            go("mc self-normalised, old", samples,
               accept_bias{mc{.of = advantage::shaped{shape::clipped{3}, advantage::old{}},
                              .baseline = baseline::self_normalised{}}});
            go("mc score function", samples, accept_bias{mc{reverse_kl{}, score_function{}}});
            go("weighted", weighted, mc{reverse_kl{}});
            go("weighted, no baseline", weighted, mc{.baseline = baseline::none{}});
        }
}

/// The same from hidden states: blocks of whole rows, and tiles with recomputation where the budget is small.
void from_hidden() {
    const index_t n = 24, v = 5000, d = 20;
    batch<float> b(n, v, 77);
    std::mt19937 u(5);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(n * d)), w(static_cast<std::size_t>(v * d)), xt(x), wt(w), dx(x),
        dw(w);
    for (auto* all : {&x, &w, &xt, &wt})
        for (float& one : *all) one = normal(u) * 0.7f;
    const auto go = [&](const char* name, const auto& estimator, std::size_t budget) {
        cpu_backend backend{.threads = 2};
        env e;
        e.mask = row_mask<>(b.kept), e.weights = b.row_weight, e.losses = b.losses;
        student::hidden<float> s{view(static_cast<const float*>(x.data()), n, d),
                                 view(static_cast<const float*>(w.data()), v, d)};
        s.dx = view(dx.data(), n, d), s.dw = view(dw.data(), v, d), s.budget = budget;
        teacher::hidden<float> t{view(static_cast<const float*>(xt.data()), n, d),
                                 view(static_cast<const float*>(wt.data()), v, d)};
        t.budget = budget;
        digest of;
        const result r = evaluate(backend, s, t, estimator, e);
        of.bytes(&r.loss, sizeof r.loss), of.all(dx), of.all(dw), of.all(b.losses);
        std::printf("hidden %-24s budget %9zu  %016llx\n", name, budget, static_cast<unsigned long long>(of.h));
    };
    for (const std::size_t budget : {std::size_t{1} << 24, std::size_t{1} << 18}) {
        go("reverse_kl", reverse_kl{}, budget), go("forward_kl", forward_kl{}, budget);
        go("jsd(.3)", jsd{.w = .3, .o = .3}, budget), go("total_variation", total_variation{}, budget);
        go("acceptance", acceptance{}, budget), go("eopd", eopd(1), budget);
        go("selected jsd", selected{jsd{.w = .3, .o = .3}, selector::tip{1, 0.5}}, budget);
    }
}

} // namespace

int main() {
    from_hidden();
    all_of<float>("float");
    all_of<double>("double");
    all_of<bfloat16>("bfloat16");
    all_of<opd::half>("half");
}
