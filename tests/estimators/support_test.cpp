// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Divergences on a support: against the textbook's sums over the support (renormalised) and over support + one bucket,
// with gradients by central differences; k = V is the dense call; the blind part of a tail bucket is what the chain
// rule of KL says; the sparse gradient is the dense one on the ids.
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/textbook.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;
using textbook::real;
using textbook::reals;

namespace {

/// A problem with k distinct ids a row in random order, the teacher's exact log-probs and its exact tail. T_q = 1.
struct supported {
    buffers<double> b;
    index_t k;
    std::vector<std::int64_t> ids; // (N,k)
    std::vector<double> log_q;     // (N,k)
    std::vector<double> log_tail;  // (N)

    supported(const problem& p, index_t k_) : b(p), k(k_) {
        numbers u(p.seed + 5);
        for (index_t r = 0; r < p.rows; ++r) {
            std::vector<std::int64_t> all(std::size_t(p.vocab));
            std::iota(all.begin(), all.end(), 0);
            for (std::size_t v = all.size() - 1; v > 0; --v)
                std::swap(all[v], all[std::size_t(u.below(index_t(v) + 1))]);
            const textbook::row t = row(r);
            real rest = 0;
            for (index_t j = 0; j < p.vocab; ++j) {
                const auto id = all[std::size_t(j)];
                if (j < k)
                    ids.push_back(id), log_q.push_back(double(t.log_q[std::size_t(id)]));
                else
                    rest += std::exp(t.log_q[std::size_t(id)]);
            }
            log_tail.push_back(double(std::log(rest)));
        }
    }
    textbook::row row(index_t r) const {
        return textbook::make_row(b.z_view().row(r), b.y_view().row(r), b.p.vocab, b.p.temperature_p, 1);
    }
    auto cache() const {
        return teacher::support<std::int64_t, double>{view(ids.data(), b.p.rows, k), view(log_q.data(), b.p.rows, k),
                                                      log_tail};
    }
    bool inside(index_t r, index_t v) const {
        return std::count(ids.begin() + r * k, ids.begin() + (r + 1) * k, v) > 0;
    }
};

/// Support and rest as a row of k + 1 entries, from scaled student logits.
textbook::row bucketed(const supported& s, index_t r, const textbook::row& full) {
    textbook::row out;
    real p_rest = 0, q_rest = 0;
    for (index_t j = 0; j < s.k; ++j) {
        const auto id = std::size_t(s.ids[std::size_t(r * s.k + j)]);
        out.log_p.push_back(full.log_p[id]), out.log_q.push_back(full.log_q[id]);
    }
    for (index_t v = 0; v < s.b.p.vocab; ++v)
        if (!s.inside(r, v))
            p_rest += std::exp(full.log_p[std::size_t(v)]), q_rest += std::exp(full.log_q[std::size_t(v)]);
    if (s.k < s.b.p.vocab) out.log_p.push_back(std::log(p_rest)), out.log_q.push_back(std::log(q_rest));
    return out;
}
/// Support alone, renormalised.
textbook::row renormalised_row(const supported& s, index_t r, const textbook::row& full) {
    textbook::row out;
    for (index_t j = 0; j < s.k; ++j) {
        const auto id = std::size_t(s.ids[std::size_t(r * s.k + j)]);
        out.log_p.push_back(full.log_p[id]), out.log_q.push_back(full.log_q[id]);
    }
    out.log_p = textbook::log_softmax(out.log_p), out.log_q = textbook::log_softmax(out.log_q);
    return out;
}

problem random_problem(bool finite_kinds = true) {
    problem p =
        *problems({.largest_vocab = 24,
                   .smallest_rows = 1,
                   .largest_rows = 3,
                   .kinds = finite_kinds ? std::vector<flavour>{flavour::wide, flavour::peaked}
                                         : std::vector<flavour>{flavour::wide, flavour::near_equal, flavour::peaked}});
    p.temperature_q = 1;
    return p;
}

/// A divergence as functions, so that each property is compiled once and not for each divergence.
struct any_divergence {
    using student_type = student::logits<double>;
    using cache_type = teacher::support<std::int64_t, double>;

    std::string name;
    std::function<real(const textbook::row&)> value;
    std::function<double(cpu_backend&, const student_type&, const teacher::dense<double>&)> dense;
    std::function<double(cpu_backend&, const student_type&, const cache_type&, reduce)> renormalised, tail_bucket;

    template <class D>
    static any_divergence of(std::string name, D d) {
        return {std::move(name), [d](const textbook::row& r) { return textbook::value(d, r); },
                [d](cpu_backend& backend, const student_type& s, const teacher::dense<double>& t) {
                    return evaluate(backend, s, t, d).loss;
                },
                [d](cpu_backend& backend, const student_type& s, const cache_type& t, reduce how) {
                    return evaluate(backend, s, t, opd::renormalised{d}, {.reduction = how}).loss;
                },
                [d](cpu_backend& backend, const student_type& s, const cache_type& t, reduce how) {
                    return evaluate(backend, s, t, opd::tail_bucket{d}, {.reduction = how}).loss;
                }};
    }
    double on_support(bool bucket, cpu_backend& backend, const student_type& s, const cache_type& t,
                      reduce how = reduce::token_mean) const {
        return (bucket ? tail_bucket : renormalised)(backend, s, t, how);
    }
    std::string named(bool bucket) const { return (bucket ? "tail-bucketed " : "renormalised ") + name; }
};

const std::vector<any_divergence> smooth_divergences = {
    any_divergence::of("reverse KL", reverse_kl{}),
    any_divergence::of("forward KL", forward_kl{}),
    any_divergence::of("JSD(.3,.3)", jsd{.w = .3, .o = .3}),
    any_divergence::of("skew reverse KL", skew_reverse_kl{.a = .3}),
    any_divergence::of("alpha(.5)", alpha_divergence{}),
};

void matches(const any_divergence& d, bool bucket) {
    cpu_backend backend;
    const auto reduced = bucket ? bucketed : renormalised_row;
    property(d.named(bucket),
             [&] {
                 const problem p = random_problem();
                 supported s(p, *rc::gen::inRange<index_t>(1, p.vocab + 1));
                 const double total = d.on_support(bucket, backend, s.b.student(), s.cache(), reduce::sum);
                 real sum = 0;
                 for (index_t r = 0; r < p.rows; ++r) {
                     const textbook::row full = s.row(r);
                     const real here = d.value(reduced(s, r, full));
                     sum += here;
                     real top = 0;
                     std::vector<real> want;
                     textbook::row moved = full;
                     for (std::size_t v = 0; v < full.z.size(); ++v) {
                         const auto at = [&](real h) {
                             moved.z[v] = full.z[v] + h;
                             moved.log_p = textbook::log_softmax(moved.z);
                             return d.value(reduced(s, r, moved));
                         };
                         const real h = 1e-4L;
                         want.push_back((at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h) /
                                        real(p.temperature_p));
                         moved.z[v] = full.z[v];
                         top = std::max(top, std::abs(want.back()));
                     }
                     for (std::size_t v = 0; v < want.size(); ++v)
                         if (!(std::abs(s.b.dz_view()(r, index_t(v)) - double(want[v])) <= 1e-9 * double(top) + 1e-10))
                             RC_FAIL("entry " + std::to_string(v) + ": " +
                                     std::to_string(s.b.dz_view()(r, index_t(v))) + ", not " +
                                     std::to_string(double(want[v])));
                 }
                 if (!(std::abs(total - double(sum)) <= 1e-10 * std::max(1.0, std::abs(double(sum)))))
                     RC_FAIL("value " + std::to_string(total) + ", not " + std::to_string(double(sum)));
             },
             {.cases = 50});
}

} // namespace

TEST_CASE("value and gradient are the textbook's") {
    for (const any_divergence& d : smooth_divergences)
        for (const bool bucket : {false, true}) matches(d, bucket);
}

TEST_CASE("k = V is the dense call, whatever the order of ids") {
    cpu_backend backend;
    for (const any_divergence& d : smooth_divergences)
        property(d.name,
                 [&] {
                     const problem p = random_problem(false);
                     supported s(p, p.vocab);
                     const double dense = d.dense(backend, s.b.student(), s.b.teacher());
                     for (const bool bucket : {false, true}) {
                         buffers<double> c(p);
                         const double got = d.on_support(bucket, backend, c.student(), s.cache());
                         RC_ASSERT(std::abs(got - dense) <= 1e-10 * std::max(1.0, std::abs(dense)));
                         for (index_t r = 0; r < p.rows; ++r)
                             for (index_t v = 0; v < p.vocab; ++v)
                                 RC_ASSERT(std::abs(c.dz_view()(r, v) - s.b.dz_view()(r, v)) <=
                                           1e-10 * std::max(1.0, std::abs(dense)));
                     }
                 },
                 {.cases = 50});
}

TEST_CASE("what a tail bucket cannot see: KL = bucketed KL + tail mass · KL of the rests") {
    cpu_backend backend;
    property("both directions", [&] {
        problem p = random_problem();
        RC_PRE(p.vocab >= 3);
        p.rows = 1;
        supported s(p, *rc::gen::inRange<index_t>(1, p.vocab - 1));
        const textbook::row full = s.row(0);
        textbook::row rest;
        real z_p = 0, z_q = 0;
        for (index_t v = 0; v < p.vocab; ++v)
            if (s.inside(0, v))
                z_p += std::exp(full.log_p[std::size_t(v)]), z_q += std::exp(full.log_q[std::size_t(v)]);
            else
                rest.log_p.push_back(full.log_p[std::size_t(v)]), rest.log_q.push_back(full.log_q[std::size_t(v)]);
        rest.log_p = textbook::log_softmax(rest.log_p), rest.log_q = textbook::log_softmax(rest.log_q);
        const result reverse = evaluate(backend, s.b.student(), s.cache(), tail_bucket{reverse_kl{}});
        const double forward = evaluate(backend, s.b.student(), s.cache(), tail_bucket{forward_kl{}}).loss;
        const double want_r =
            double(textbook::value(reverse_kl{}, full) - (1 - z_p) * textbook::value(reverse_kl{}, rest));
        const double want_f =
            double(textbook::value(forward_kl{}, full) - (1 - z_q) * textbook::value(forward_kl{}, rest));
        RC_ASSERT(std::abs(reverse.loss - want_r) <= 1e-11 * std::max(1.0, want_r));
        RC_ASSERT(std::abs(forward - want_f) <= 1e-11 * std::max(1.0, want_f));
        RC_ASSERT(std::abs(reverse.diagnostics.student_mass() - double(z_p)) <= 1e-12);
        RC_ASSERT(std::abs(reverse.diagnostics.teacher_mass() - double(z_q)) <= 1e-12);
    });
}

TEST_CASE("the sparse gradient is the dense one on the ids, which is zero elsewhere") {
    cpu_backend backend;
    property("on_support", [&] {
        const problem p = random_problem(false);
        const index_t k = *rc::gen::inRange<index_t>(1, p.vocab + 1);
        supported s(p, k);
        const float beta = *rc::gen::element(0.F, 0.5F);
        std::vector<double> sparse(std::size_t(p.rows * k), 3.0);
        std::fill(s.b.dz.begin(), s.b.dz.end(), 3.0);
        const student::on_support<double> on{s.b.z_view(), view(sparse.data(), p.rows, k), p.temperature_p};
        const double a = evaluate(backend, on, s.cache(), renormalised{jsd{}}, {.beta = beta}).loss;
        const double b = evaluate(backend, s.b.student(), s.cache(), renormalised{jsd{}}, {.beta = beta}).loss;
        RC_ASSERT(a == b);
        for (index_t r = 0; r < p.rows; ++r) {
            for (index_t v = 0; v < p.vocab; ++v)
                if (!s.inside(r, v)) RC_ASSERT(s.b.dz_view()(r, v) == 3.0 * double(beta));
            for (index_t j = 0; j < k; ++j)
                RC_ASSERT(sparse[std::size_t(r * k + j)] == s.b.dz_view()(r, s.ids[std::size_t(r * k + j)]));
        }
    });
}

TEST_CASE("zero at p = q, invariant to a shift of the row, Σ dz = 0") {
    cpu_backend backend;
    const auto check = [&](const any_divergence& d, bool bucket) {
        property(d.named(bucket),
                 [&] {
                     problem p = random_problem(false);
                     p.temperature_p = 1;
                     p.kind = *rc::gen::element(flavour::equal, flavour::wide);
                     supported s(p, *rc::gen::inRange<index_t>(1, p.vocab + 1));
                     const double plain = d.on_support(bucket, backend, s.b.student(), s.cache());
                     RC_ASSERT(plain >= -1e-13);
                     for (index_t r = 0; r < p.rows; ++r) {
                         double sum = 0;
                         for (index_t v = 0; v < p.vocab; ++v) {
                             sum += s.b.dz_view()(r, v);
                             if (p.kind == flavour::equal) RC_ASSERT(std::abs(s.b.dz_view()(r, v)) < 1e-13);
                         }
                         RC_ASSERT(std::abs(sum) < 1e-13 * (1 + plain));
                     }
                     if (p.kind == flavour::equal) RC_ASSERT(std::abs(plain) < 1e-13);
                     for (double& z : s.b.z) z += 37;
                     RC_ASSERT(std::abs(d.on_support(bucket, backend, s.b.student(), s.cache()) - plain) <
                               1e-11 * (1 + plain));
                 },
                 {.cases = 40});
    };
    for (const any_divergence& d : smooth_divergences)
        for (const bool bucket : {false, true}) check(d, bucket);
}

TEST_CASE("without a stated tail the teacher's is 1 - Z_q, floored and counted") {
    cpu_backend backend;
    problem p{.rows = 1, .vocab = 12, .seed = 3};
    supported s(p, 5);
    auto cache = s.cache();
    const double stated = evaluate(backend, s.b.value_only(), cache, tail_bucket{reverse_kl{}}).loss;
    cache.log_tail = {};
    const result inferred = evaluate(backend, s.b.value_only(), cache, tail_bucket{reverse_kl{}});
    CHECK(inferred.loss == doctest::Approx(stated).epsilon(1e-12));
    CHECK(inferred.diagnostics.tail_floored == 0);
    double z_q = 0;
    for (const double l : s.log_q) z_q += std::exp(l);
    for (double& l : s.log_q) l -= std::log(z_q); // all mass inside: nothing is left for the tail
    const result floored = evaluate(backend, s.b.value_only(), cache, tail_bucket{reverse_kl{}});
    CHECK(floored.diagnostics.tail_floored == 1);
    CHECK(detail::is_finite(floored.loss));
}

TEST_CASE("a stated tail above 0 is no log-prob: the row is bad") {
    cpu_backend backend;
    problem p{.rows = 1, .vocab = 12, .seed = 3};
    supported s(p, 5);
    s.log_tail[0] = 0.5;
    const result r = evaluate(backend, s.b.student(), s.cache(), tail_bucket{reverse_kl{}});
    CHECK(r.diagnostics.bad_rows == 1);
    CHECK(r.loss == 0);
}

TEST_CASE("float, bfloat16 and half storage agree with double") {
    cpu_backend backend;
    const auto check = [&](const char* name, auto example, double bound) {
        using T = decltype(example);
        property(name,
                 [&] {
                     problem p = *problems(
                         {.largest_vocab = 1100, .smallest_rows = 1, .kinds = {flavour::wide, flavour::near_equal}});
                     p.temperature_q = 1;
                     buffers<T, float, float> narrow(p);
                     auto wide = narrow.template as<double, double, double>();
                     const index_t k = std::min<index_t>(p.vocab, 9);
                     std::vector<std::int32_t> ids;
                     std::vector<float> log_q, tail;
                     numbers u(p.seed + 9);
                     real value = 0; // the textbook's, over buckets of the numbers as they are stored
                     for (index_t r = 0; r < p.rows; ++r) {
                         const textbook::row full = textbook::make_row(wide.z_view().row(r), wide.y_view().row(r),
                                                                       p.vocab, double(p.temperature_p), 1);
                         std::vector<index_t> order(static_cast<std::size_t>(p.vocab));
                         std::iota(order.begin(), order.end(), index_t{0});
                         textbook::row buckets;
                         real rest = 0, p_rest = 0;
                         for (index_t j = 0; j < p.vocab; ++j) {
                             std::swap(order[std::size_t(j)], order[std::size_t(j + u.below(p.vocab - j))]);
                             const auto v = std::size_t(order[std::size_t(j)]);
                             if (j >= k) {
                                 rest += std::exp(full.log_q[v]), p_rest += std::exp(full.log_p[v]);
                                 continue;
                             }
                             ids.push_back(std::int32_t(v)), log_q.push_back(float(full.log_q[v]));
                             buckets.log_p.push_back(full.log_p[v]), buckets.log_q.push_back(real(log_q.back()));
                         }
                         tail.push_back(float(std::log(rest)));
                         if (k < p.vocab)
                             buckets.log_p.push_back(std::log(p_rest)), buckets.log_q.push_back(real(tail.back()));
                         value += textbook::value(jsd{}, buckets) / real(p.rows);
                     }
                     const teacher::support<std::int32_t, float> t{view(ids.data(), p.rows, k),
                                                                   view(log_q.data(), p.rows, k), tail};
                     const double got = evaluate(backend, narrow.student(), t, tail_bucket{jsd{}}).loss;
                     evaluate(backend, wide.student(), t, tail_bucket{jsd{}});
                     RC_ASSERT(std::abs(got - double(value)) <= 2e-6 * std::max(1.0, double(value)));
                     for (index_t r = 0; r < p.rows; ++r)
                         RC_ASSERT((gradient_excess<float, float, float>(narrow.dz_view().row(r), wide.dz_view().row(r),
                                                                         p.vocab, 1, bound) <= 1));
                 },
                 {.cases = 40});
    };
    check("float", float{}, 30);
    check("bfloat16", bfloat16{}, 30);
    check("half", half{}, 30);
}
