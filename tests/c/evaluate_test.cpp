// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd_evaluate is opd::evaluate: the same bits of loss, gradient, outputs and diagnostics, of every kind of call; and
// what it refuses.
// optimise: no
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <opd/c/opd.h>
#include <opd/opd.hpp>
#include <rapidcheck.h>

#include "c/tensors.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

using namespace opd;
using namespace opd::test;

namespace {

const bool chosen_kernels = (choose_own_kernels(), true);

/// A call with nothing in it yet.
struct c_call {
    opd_student student = {};
    opd_teacher teacher = {};
    opd_estimator estimator = {};
    opd_env env = {};
    opd_result result = {};
    opd_engine* engine = nullptr;

    c_call() {
        student.struct_size = sizeof student, teacher.struct_size = sizeof teacher;
        estimator.struct_size = sizeof estimator, env.struct_size = sizeof env, result.struct_size = sizeof result;
    }
    int run() {
        const opd_call call{sizeof(opd_call), engine, &student, &teacher, &estimator, &env};
        return opd_evaluate(&call, &result);
    }
    std::uint64_t workspace() {
        const opd_call call{sizeof(opd_call), engine, &student, &teacher, &estimator, &env};
        std::uint64_t bytes = 0;
        REQUIRE(opd_workspace_bytes(&call, &bytes) == OPD_OK);
        return bytes;
    }
};

template <class T>
bool equal_bits(const T& a, const T& b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
}
template <class T>
bool equal_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
/// Whether a C call gave what the C++ call gave.
bool same(const opd_result& c, const result& r) {
    static_assert(sizeof c.diagnostics == sizeof r.diagnostics);
    return equal_bits(c.loss, r.loss) && std::memcmp(&c.diagnostics, &r.diagnostics, sizeof r.diagnostics) == 0;
}

/// The C++ call on one buffer, the C call on a copy: `cpp(buffers)` and `c(buffers, call)` fill in the rest.
template <class Z, class Cpp, class C>
void compare(const problem& p, Cpp&& cpp, C&& c) {
    buffers<Z> mine(p), theirs(p);
    cpu_backend be;
    result want;
    std::string refused;
    try {
        want = cpp(be, mine);
    } catch (const invalid_input& e) {
        refused = e.what();
    }
    c_call call;
    const tensor z(theirs.z_view()), dz(theirs.dz_view());
    call.student.z = &z, call.student.dz = &dz, call.student.padding = p.pad_g, call.student.keep_padding = 1;
    call.student.temperature = p.temperature_p;
    const tensor mask(theirs.kept);
    if (p.masked) call.env.mask = &mask;
    const int status = c(theirs, call);
    INFO(std::string(opd_last_error()));
    CHECK(equal_bits(theirs.dz, mine.dz)); // untouched where it is refused
    if (!refused.empty()) {
        CHECK(status == OPD_INVALID_INPUT);
        CHECK(opd_last_error() == refused);
        return;
    }
    REQUIRE(status == OPD_OK);
    CHECK(same(call.result, want));
}

const char* name_of(choice::objective which) {
    for (const auto& line : choice::divergences)
        if (line.which == which) return line.text.data();
    for (const auto& line : choice::objectives)
        if (line.which == which) return line.text.data();
    return nullptr;
}

} // namespace

TEST_CASE_TEMPLATE("dense rows: every divergence and selector, the bits of the C++ call", Z, float, double, bfloat16,
                   half) {
    property("dense", [] {
        const problem p = *problems(
            {.largest_vocab = 1500,
             .kinds = {flavour::wide, flavour::near_equal, flavour::filtered, flavour::teacher_gap, flavour::steep}});
        numbers u(p.seed);
        const any_dense d{choice::divergences[std::size_t(u.below(index_t(choice::divergences.size())))].which, .3, .6};
        const std::array selectors{any_selector{}, any_selector{choice::selector::tip, 1, .2},
                                   any_selector{choice::selector::agreed, .3}};
        const any_selector s = selectors[std::size_t(u.below(3))];
        compare<Z>(
            p,
            [&](auto& be, auto& b) {
                env e = b.masked_env();
                e.weights = b.weights;
                e.loss_clamp = 20;
                if (s.which == choice::selector::all) return evaluate(be, b.student(), b.teacher(), d, e);
                return evaluate(be, b.student(), b.teacher(), selected{d, s}, e);
            },
            [&](auto& b, c_call& call) {
                const tensor y(b.y_view()), weights(b.weights);
                call.teacher.y = &y, call.teacher.temperature = p.temperature_q;
                call.env.weights = &weights, call.env.loss_clamp = 20;
                call.estimator.of = name_of(d.which), call.estimator.a = .3, call.estimator.b = .6;
                if (s.which == choice::selector::tip) call.estimator.selector = "tip";
                if (s.which == choice::selector::agreed) call.estimator.selector = "agreed";
                call.estimator.selector_a = s.a, call.estimator.selector_b = s.b;
                return call.run();
            });
    });
}

TEST_CASE("dense rows: reductions, outputs and policies") {
    property("policies", [] {
        const problem p =
            *problems({.largest_vocab = 300, .smallest_rows = 1, .kinds = {flavour::wide, flavour::teacher_gap}});
        numbers u(p.seed);
        const std::vector<std::int64_t> offsets = random_offsets(p.rows, u);
        const auto how = static_cast<int>(u.below(5));
        const std::array reductions{reduce::token_mean, reduce::sum, reduce::sequence_mean, reduce::sequence_sum_mean,
                                    reduce::constant};
        const auto n = static_cast<std::size_t>(p.rows);
        std::vector<float> losses(n, 1), losses_c(n, 1);
        std::vector<double> lse(n), lse_c(n);
        std::vector<std::int32_t> versions(n, 3);
        compare<float>(
            p,
            [&](auto& be, auto& b) {
                env e = b.masked_env();
                e.reduction = reductions[std::size_t(how)], e.offsets = offsets, e.normaliser = 7;
                e.losses = losses, e.lse = lse, e.beta = .5F, e.beta_loss = .25F, e.versions = versions, e.version = 5;
                e.on_infinite = infinite::floor(-20), e.measure.entropy = true;
                return evaluate(be, b.student(), b.teacher(), reverse_kl{}, e);
            },
            [&](auto& b, c_call& call) {
                const tensor y(b.y_view()), first(const_cast<std::vector<std::int64_t>&>(offsets)), l(losses_c),
                    s(lse_c), v(versions);
                call.teacher.y = &y, call.teacher.temperature = p.temperature_q;
                call.env.reduction = how, call.env.offsets = &first, call.env.normaliser = 7;
                call.env.losses = &l, call.env.lse = &s, call.env.beta = .5, call.env.beta_loss = .25;
                call.env.versions = &v, call.env.version = 5, call.env.floor_at = -20, call.env.measure_entropy = 1;
                return call.run();
            });
        CHECK(equal_bits(losses, losses_c));
        CHECK(equal_bits(lse, lse_c));
    });
}

TEST_CASE("vocabularies of different size: one bucket, or the common ids; eopd") {
    const problem p{.rows = 4, .vocab = 700, .pad_z = 2, .pad_y = 1, .kind = flavour::wide, .seed = 5};
    const auto shorter = [](auto& b) { return matrix_view<const float>{b.y.data(), 4, 650, 701}; };
    for (const auto& line : choice::divergences) {
        const any_dense d{line.which, .3, .6};
        compare<float>(
            p,
            [&](auto& be, auto& b) {
                return d.visit([&](const auto& divergence) {
                    return evaluate(be, b.student(), teacher::lumped{teacher::dense{shorter(b)}, 600}, divergence);
                });
            },
            [&](auto& b, c_call& call) {
                const tensor y(shorter(b));
                call.teacher.y = &y, call.teacher.lumped = 1, call.teacher.common = 600;
                call.estimator.of = line.text.data(), call.estimator.a = .3, call.estimator.b = .6;
                return call.run();
            });
    }
    compare<float>(
        p,
        [&](auto& be, auto& b) {
            env e;
            e.vocab = vocabulary::drop_and_renormalise;
            return evaluate(be, b.student(), teacher::dense{shorter(b)}, jsd{.3, .6}, e);
        },
        [&](auto& b, c_call& call) {
            const tensor y(shorter(b));
            call.teacher.y = &y, call.env.drop_and_renormalise = 1;
            call.estimator.of = "jsd", call.estimator.a = .3, call.estimator.b = .6;
            return call.run();
        });
    compare<float>(
        p, [&](auto& be, auto& b) { return evaluate(be, b.student(), b.teacher(), eopd(3, .5)); },
        [&](auto& b, c_call& call) {
            const tensor y(b.y_view());
            call.teacher.y = &y, call.estimator.selector = "eopd";
            call.estimator.selector_a = 3, call.estimator.selector_b = .5;
            return call.run();
        });
}

TEST_CASE_TEMPLATE("supports: every estimator, dense and sparse gradients, even and ragged", Z, float, double, bfloat16,
                   half) {
    using L = std::conditional_t<std::is_same_v<Z, double>, double, float>;
    property("supports", [] {
        problem p = *problems({.largest_vocab = 400,
                               .smallest_rows = 1,
                               .kinds = {flavour::wide, flavour::near_equal, flavour::filtered}});
        numbers u(p.seed);
        const index_t k = std::min<index_t>(p.vocab, 1 + u.below(7));
        const any_dense d{choice::divergences[std::size_t(u.below(index_t(choice::divergences.size())))].which, .3, .6};
        const bool ragged = u.below(2) == 1, wide = u.below(2) == 1, sparse = u.below(2) == 1;
        const buffers<Z> numbers_of(p);
        const caches<L> cache(numbers_of, k, 3);
        std::vector<std::int64_t> begins;
        for (index_t r = 0; r <= p.rows; ++r) begins.push_back(r * k);
        std::vector<std::int64_t> ids64(cache.ids.begin(), cache.ids.end());
        std::vector<std::int32_t> ids32 = cache.ids;
        std::vector<L> log_q = cache.log_q, log_tail = cache.log_tail;
        const auto fill = [&](c_call& call, auto&& then) {
            const tensor i32 = ragged ? tensor(ids32) : tensor(view(ids32.data(), p.rows, k));
            const tensor i64 = ragged ? tensor(ids64) : tensor(view(ids64.data(), p.rows, k));
            const tensor q = ragged ? tensor(log_q) : tensor(view(log_q.data(), p.rows, k));
            const tensor tail(log_tail), offsets(begins);
            call.teacher.kind = ragged ? OPD_RAGGED_SUPPORT : OPD_SUPPORT;
            call.teacher.ids = wide ? &i64 : &i32, call.teacher.log_q = &q, call.teacher.log_tail = &tail;
            if (ragged) call.teacher.offsets = &offsets;
            call.estimator.of = name_of(d.which), call.estimator.a = .3, call.estimator.b = .6;
            return then();
        };
        const auto with = [&](auto&& run) {
            if (!ragged) return run(cache.support());
            return run(teacher::ragged_support<std::int32_t, L>{
                .ids = cache.ids, .log_q = cache.log_q, .offsets = begins, .log_tail = cache.log_tail});
        };
        if (sparse) {
            std::vector<Z> dz(std::size_t(p.rows * k)), dz_c(dz.size());
            cpu_backend be;
            const result want = with([&](const auto& t) {
                student::on_support<Z> s{
                    .z = numbers_of.z_view(), .dz = view(dz.data(), p.rows, k), .temperature = p.temperature_p};
                if constexpr (is_ragged<std::remove_cvref_t<decltype(t)>>) s.dz = view(dz.data(), 1, p.rows * k);
                return evaluate(be, s, t, renormalised{d});
            });
            c_call call;
            const tensor z(numbers_of.z_view());
            const tensor g = ragged ? tensor(dz_c) : tensor(view(dz_c.data(), p.rows, k)); // a line, or (N,k)
            call.student.kind = OPD_ON_SUPPORT, call.student.z = &z, call.student.dz = &g;
            call.student.temperature = p.temperature_p;
            REQUIRE(fill(call, [&] { return call.run(); }) == OPD_OK);
            CHECK(same(call.result, want));
            CHECK(equal_bits(dz, dz_c));
            return;
        }
        const std::array forms{"renormalised", "tail_bucket", "generalised", "truncated_biased"};
        std::size_t form = std::size_t(u.below(4));
        if (form == 2 && d.which == choice::objective::acceptance) form = 1;
        if (form == 3 && d.which != choice::objective::forward_kl && d.which != choice::objective::reverse_kl) form = 0;
        compare<Z>(
            p,
            [&](auto& be, auto& b) {
                const env e = b.masked_env();
                return with([&](const auto& t) {
                    if (form == 0) return evaluate(be, b.student(), t, renormalised{d}, e);
                    if (form == 1) return evaluate(be, b.student(), t, any_tail_bucket{d}, e);
                    const choice::partial which =
                        form == 2 ? choice::partial::generalised : choice::partial::truncated_biased;
                    return evaluate(be, b.student(), t, any_partial{which, d}, e);
                });
            },
            [&](auto&, c_call& call) {
                call.estimator.estimator = forms[form];
                return fill(call, [&] { return call.run(); });
            });
    });
}

TEST_CASE_TEMPLATE("drawn tokens: objectives, surrogates, baselines, caches and wrappers", Z, float, double, bfloat16,
                   half) {
    using L = std::conditional_t<std::is_same_v<Z, double>, double, float>;
    property("drawn", [] {
        const problem p =
            *problems({.largest_vocab = 300, .smallest_rows = 1, .kinds = {flavour::wide, flavour::near_equal}});
        numbers u(p.seed);
        const buffers<Z> numbers_of(p);
        caches<L> cache(numbers_of, 1, 1 + u.below(5));
        any_sampled e;
        e.of = {choice::objectives[std::size_t(u.below(index_t(choice::objectives.size())))].which, .7, .4};
        e.surrogate = {choice::surrogates[std::size_t(u.below(index_t(choice::surrogates.size())))].which, .1, .3, 3,
                       2};
        e.baseline.which = choice::baselines[std::size_t(u.below(index_t(choice::baselines.size())))].which;
        if (!e.surrogate.has_advantage() && u.below(4) > 0)
            e.of.which = choice::objective::reverse_kl, e.baseline.which = choice::baseline::none;
        if (u.below(3) == 0) e.surrogate.estr_tau = 2, e.surrogate.estr_epsilon = .1;
        e.weighting.self_normalised = u.below(2) == 1, e.accept_bias = u.below(8) > 0;
        const bool columns = u.below(4) > 0; // else who reads one is refused, by both
        const auto more = [&] {
            std::vector<L> all(cache.log_mu.size());
            for (L& x : all) x = static_cast<L>(-u.uniform());
            return all;
        };
        std::vector<L> log_prox = more(), log_ref = more(), advantage = more(), entropy = more();
        entropy.resize(std::size_t(p.rows));
        const bool forward = u.below(5) == 0, weighted = u.below(2) == 1, missing = u.below(3) == 0;
        const auto law_of_call = static_cast<int>(u.below(3));
        const index_t m = cache.m;
        const auto at = [&](auto& v) { return view(v.data(), p.rows, m); };
        if (missing) cache.log_mu[0] = std::numeric_limits<L>::quiet_NaN();
        std::vector<std::int64_t> kept_ids, kept_offsets{0};
        const bool kept = !missing && u.below(3) == 0;
        for (index_t r = 0; r < p.rows; ++r) {
            for (index_t v = 0; v < p.vocab; ++v) kept_ids.push_back(v); // all of them: a filter that cuts nothing
            kept_offsets.push_back(index_t(kept_ids.size()));
        }
        const auto under_law = [&](const auto& t, auto&& run) {
            if (law_of_call == 1) return run(teacher::on_policy{t});
            if (law_of_call == 2) return run(teacher::of_teacher{t});
            return run(t);
        };
        compare<Z>(
            p,
            [&](auto& be, auto& b) {
                const auto run = [&](const auto& t) {
                    return under_law(t, [&](const auto& of_law) {
                        return forward ? evaluate(be, b.student(), of_law, sampled_forward_kl{}, b.masked_env())
                                       : evaluate(be, b.student(), of_law, e, b.masked_env());
                    });
                };
                const auto wrap = [&](const auto& t) {
                    if (missing) return run(teacher::missing_mu{t});
                    if (kept)
                        return run(teacher::on_kept_sets{t, vector_view<const std::int64_t>(kept_ids),
                                                         row_offsets<>(kept_offsets)});
                    return run(t);
                };
                const auto fill = [&](auto t) {
                    if (columns) t.log_prox = at(log_prox), t.log_ref = at(log_ref), t.advantage = at(advantage);
                    if (columns) t.mu_entropy = entropy, t.baseline = entropy;
                    return wrap(t);
                };
                return weighted ? fill(cache.weighted()) : fill(cache.samples());
            },
            [&](auto&, c_call& call) {
                std::vector<std::int32_t>& ids = weighted ? cache.slots : cache.drawn;
                const tensor i(at(ids)), mu(at(cache.log_mu)), q(at(cache.drawn_log_q)), w(at(cache.weight)),
                    x(at(cache.exact)), k(kept_ids), o(kept_offsets);
                opd_teacher& t = call.teacher;
                t.kind = weighted ? OPD_WEIGHTED : OPD_SAMPLES, t.law = law_of_call;
                t.ids = &i, t.log_mu = &mu, t.log_q = &q, t.missing_mu = missing;
                if (weighted) t.weight = &w, t.exact = &x;
                const tensor prox(at(log_prox)), ref(at(log_ref)), gain(at(advantage)), h(entropy);
                if (columns) t.log_prox = &prox, t.log_ref = &ref, t.advantage = &gain;
                if (columns) t.mu_entropy = &h, t.baseline = &h;
                if (kept) t.kept_ids = &k, t.kept_offsets = &o;
                opd_estimator& c = call.estimator;
                if (forward) c.estimator = "sampled_forward_kl";
                c.of = name_of(e.of.which), c.a = .7, c.b = .4;
                for (const auto& line : choice::surrogates)
                    if (line.which == e.surrogate.which) c.surrogate = line.text.data();
                c.low = .1, c.high = .3, c.dual = 3, c.cap = 2;
                for (const auto& line : choice::baselines)
                    if (line.which == e.baseline.which) c.baseline = line.text.data();
                c.estr_tau = e.surrogate.estr_tau, c.estr_epsilon = e.surrogate.estr_epsilon;
                c.self_normalised = e.weighting.self_normalised, c.accept_bias = e.accept_bias;
                return call.run();
            });
    });
}

TEST_CASE_TEMPLATE("hidden states on either side, with gradients of states, head and bias", X, float, bfloat16) {
    const index_t n = 5, v = 300, d = 17;
    numbers u(3);
    const auto draw = [&](index_t count) {
        std::vector<X> all(static_cast<std::size_t>(count));
        for (X& x : all) x = X(static_cast<float>(u.normal()));
        return all;
    };
    std::vector<X> x = draw(n * d), w = draw(v * d), bias = draw(v), x_t = draw(n * d), w_t = draw(v * d);
    std::vector<float> y(std::size_t(n * v));
    for (float& f : y) f = float(u.normal());
    const problem p{.rows = n, .vocab = v, .kind = flavour::wide, .seed = 9};
    const buffers<float> made(p);
    const caches<float> cache(made, 6, 4);
    struct outputs {
        std::vector<float> dx, dw, db;
        explicit outputs(index_t n_, index_t v_, index_t d_)
            : dx(std::size_t(n_ * d_), 9), dw(std::size_t(v_ * d_), 9), db(std::size_t(v_), 9) {}
        bool operator==(const outputs&) const = default;
    };
    const auto check = [&](auto&& cpp, auto&& c) {
        outputs mine(n, v, d), theirs(n, v, d);
        student::hidden<X> s{view(x.data(), n, d), view(w.data(), v, d)};
        s.dx = view(mine.dx.data(), n, d), s.dw = view(mine.dw.data(), v, d), s.db = vector_view<float>(mine.db);
        s.bias = vector_view<const X>(bias), s.temperature = 1.5F, s.soft_cap = 20;
        cpu_backend be;
        const result want = cpp(be, s);
        c_call call;
        const tensor tx(view(x.data(), n, d)), tw(view(w.data(), v, d)), tb(bias);
        const tensor dx(view(theirs.dx.data(), n, d)), dw(view(theirs.dw.data(), v, d)), db(theirs.db);
        opd_student& of = call.student;
        of.kind = OPD_HIDDEN, of.x = &tx, of.w = &tw, of.bias = &tb, of.dx = &dx, of.dw = &dw, of.db = &db;
        of.temperature = 1.5, of.soft_cap = 20;
        const int status = c(call);
        INFO(std::string(opd_last_error()));
        REQUIRE(status == OPD_OK);
        CHECK(same(call.result, want));
        CHECK(mine == theirs);
    };
    const teacher::hidden<X> of_states{view(x_t.data(), n, d), view(w_t.data(), v, d)};
    const tensor tx(view(x_t.data(), n, d)), tw(view(w_t.data(), v, d)), ty(view(y.data(), n, v));
    check(
        [&](auto& be, const auto& s) {
            return evaluate(be, s, teacher::dense{view(std::as_const(y).data(), n, v)}, jsd{.3, .6});
        },
        [&](c_call& call) {
            call.teacher.y = &ty, call.estimator.of = "jsd", call.estimator.a = .3, call.estimator.b = .6;
            return call.run();
        });
    check([&](auto& be, const auto& s) { return evaluate(be, s, of_states, reverse_kl{}); },
          [&](c_call& call) {
              call.teacher.kind = OPD_TEACHER_HIDDEN, call.teacher.x = &tx, call.teacher.w = &tw;
              return call.run();
          });
    for (const bool tail : {false, true})
        check(
            [&](auto& be, const auto& s) {
                if (tail) return evaluate(be, s, cache.support(), any_tail_bucket{{choice::objective::forward_kl}});
                return evaluate(be, s, cache.support(), renormalised{any_dense{choice::objective::forward_kl}});
            },
            [&](c_call& call) {
                std::vector<std::int32_t> ids = cache.ids;
                std::vector<float> log_q = cache.log_q, log_tail = cache.log_tail;
                const tensor i(view(ids.data(), n, 6)), q(view(log_q.data(), n, 6)), t(log_tail);
                call.teacher.kind = OPD_SUPPORT, call.teacher.ids = &i, call.teacher.log_q = &q,
                call.teacher.log_tail = &t;
                call.estimator.estimator = tail ? "tail_bucket" : "renormalised", call.estimator.of = "forward_kl";
                return call.run();
            });
    check([&](auto& be, const auto& s) { return evaluate(be, s, cache.samples(), any_sampled{}); },
          [&](c_call& call) {
              std::vector<std::int32_t> ids = cache.drawn;
              std::vector<float> log_mu = cache.log_mu, log_q = cache.drawn_log_q;
              const tensor i(view(ids.data(), n, 4)), mu(view(log_mu.data(), n, 4)), q(view(log_q.data(), n, 4));
              call.teacher.kind = OPD_SAMPLES, call.teacher.ids = &i, call.teacher.log_mu = &mu,
              call.teacher.log_q = &q;
              return call.run();
          });
}

TEST_CASE("engines: threads change no bit, an arena is used, many threads share one") {
    const problem p{.rows = 300, .vocab = 70, .kind = flavour::wide, .seed = 4};
    buffers<float> b(p);
    const auto run = [&](opd_engine* engine, std::vector<float>& dz) {
        c_call call;
        const tensor z(b.z_view()), y(b.y_view()), g(view(dz.data(), 300, 70));
        call.engine = engine, call.student.z = &z, call.student.dz = &g, call.teacher.y = &y;
        REQUIRE(call.run() == OPD_OK);
        return call.result.loss;
    };
    std::vector<float> dz(300 * 70), again(300 * 70);
    const double loss = run(nullptr, dz);
    opd_engine_options o = {};
    o.struct_size = sizeof o, o.threads = 3;
    opd_engine* engine = nullptr;
    REQUIRE(opd_engine_create(&o, &engine) == OPD_OK);
    CHECK(run(engine, again) == loss);
    CHECK(dz == again);
    std::vector<std::thread> threads;
    std::array<std::vector<float>, 4> all;
    for (auto& of : all) of.assign(300 * 70, 0);
    for (auto& of : all) threads.emplace_back([&] { run(engine, of); });
    for (auto& t : threads) t.join();
    for (auto& of : all) CHECK(of == dz);
    opd_engine_destroy(engine);
    opd_engine_destroy(engine); // nothing
    opd_engine_destroy(nullptr);

    c_call call;
    const tensor z(b.z_view()), y(b.y_view()), g(view(again.data(), 300, 70));
    call.student.z = &z, call.student.dz = &g, call.teacher.y = &y;
    std::vector<std::byte> arena(call.workspace());
    o.threads = 1, o.arena = arena.data(), o.arena_bytes = arena.size();
    REQUIRE(opd_engine_create(&o, &engine) == OPD_OK);
    CHECK(run(engine, again) == loss);
    opd_engine_destroy(engine);
    o.arena_bytes = 64;
    REQUIRE(opd_engine_create(&o, &engine) == OPD_OK);
    call.engine = engine;
    CHECK(call.run() == OPD_INVALID_INPUT);
    CHECK(std::string(opd_last_error()).find("workspace") != std::string::npos);
    opd_engine_destroy(engine);
    CHECK(call.run() == OPD_INVALID_INPUT); // freed
    CHECK(std::string(opd_last_error_argument()) == "engine");
}

TEST_CASE("tensors: dimensions, strides and types") {
    const problem p{.rows = 6, .vocab = 40, .kind = flavour::wide, .seed = 4};
    buffers<float> b(p);
    std::vector<float> dz(6 * 40, 7), flat(6 * 40, 7);
    const auto run = [&](const tensor& z, const tensor& y, const tensor& g) {
        c_call call;
        call.student.z = &z, call.student.dz = &g, call.teacher.y = &y;
        const int status = call.run();
        return std::pair(status, call.result.loss);
    };
    const tensor z(b.z_view()), y(b.y_view()), g(view(flat.data(), 6, 40));
    const auto want = run(z, y, g);
    REQUIRE(want.first == OPD_OK);
    // (2,3,V), with steps and without
    const tensor z3(b.z.data(), {2, 3, 40}), y3(b.y.data(), {2, 3, 40}, {120, 40, 1}), g3(dz.data(), {2, 3, 40});
    CHECK(run(z3, y3, g3) == want);
    CHECK(dz == flat);
    // a dimension of 1 may have any step; a byte offset counts
    tensor z1(b.z.data() - 0, {6, 1, 40}, {40, 12345, 1});
    CHECK(run(z1, y, g) == want);
    tensor moved(b.z.data() - 10, {6, 40});
    moved.byte_offset = 40;
    CHECK(run(moved, y, g) == want);

    const auto refuses = [&](const tensor& of_z, const char* text, int code = OPD_INVALID_INPUT) {
        std::fill(flat.begin(), flat.end(), 7.F);
        CHECK(run(of_z, y, g).first == code);
        INFO(std::string(opd_last_error()));
        CHECK(std::string(opd_last_error()).find(text) != std::string::npos);
        CHECK(std::string(opd_last_error()).find("student.z") != std::string::npos);
        CHECK(std::all_of(flat.begin(), flat.end(), [](float f) { return f == 7; }));
    };
    refuses(tensor(b.z.data(), {40}), "dimension");
    refuses(tensor(b.z.data(), {6, 40}, {1, 6}), "stride of 6");
    refuses(tensor(b.z.data(), {6, 40}, {39, 1}), "overlap");
    refuses(tensor(b.z.data(), {6, 40}, {-40, 1}), "overlap");
    refuses(tensor(b.z.data(), {2, 3, 20}, {40, 80, 1}), "leading");
    refuses(tensor(b.z.data(), {-6, 40}), "negative");
    refuses(tensor(static_cast<float*>(nullptr), {6, 40}), "null");
    refuses(tensor(reinterpret_cast<std::int32_t*>(b.z.data()), {6, 40}), "int32", OPD_UNSUPPORTED);
    refuses(tensor(reinterpret_cast<double*>(b.z.data()), {3, 40}), "float64", OPD_UNSUPPORTED);
    refuses(tensor(b.z.data(), {1, std::int64_t{1} << 62, 8}), "larger than any memory");
    refuses(tensor(b.z.data(), {2, 40}, {std::int64_t{1} << 61, 1}), "larger than any memory");
    refuses(tensor(b.z.data(), {std::int64_t{1} << 62, 0}), "rows without a number");
    tensor away(b.z_view());
    away.device = {kDLCUDA, 0};
    refuses(away, "device", OPD_UNSUPPORTED);
    tensor odd(b.z.data(), {5, 40});
    odd.byte_offset = 2;
    refuses(odd, "aligned");
    tensor vectors(b.z_view());
    vectors.dtype.lanes = 4;
    refuses(vectors, "float32x4", OPD_UNSUPPORTED);
    // shapes that do not fit each other are the C++ call's to refuse
    c_call call;
    const tensor five(b.z.data(), {5, 40});
    call.student.z = &five, call.student.dz = &g, call.teacher.y = &y;
    CHECK(call.run() == OPD_INVALID_INPUT);
    CHECK(std::string(opd_last_error_argument()) == "student.dz");
    // a line of ids that no memory holds
    c_call listed;
    std::vector<std::int32_t> ids(4);
    std::vector<std::int64_t> begins{0, 1, 2, 3, 4, 4, 4};
    const tensor endless(ids.data(), {std::int64_t{1} << 62}), log_q(b.y.data(), {4}), offsets(begins);
    listed.student.z = &z, listed.student.dz = &g, listed.teacher.kind = OPD_RAGGED_SUPPORT;
    listed.teacher.ids = &endless, listed.teacher.log_q = &log_q, listed.teacher.offsets = &offsets;
    CHECK(listed.run() == OPD_INVALID_INPUT);
    CHECK(std::string(opd_last_error_argument()) == "teacher.ids");
    // and rows without ids, which nobody goes through
    const tensor empty(ids.data(), {std::int64_t{1} << 62, 0});
    listed.teacher.kind = OPD_SUPPORT, listed.teacher.ids = &empty, listed.teacher.offsets = nullptr;
    CHECK(listed.run() == OPD_INVALID_INPUT);
    CHECK(std::string(opd_last_error_argument()) == "teacher.ids");
}

TEST_CASE("bad structs, names and pairings are answered by name, and nothing is written") {
    const problem p{.rows = 2, .vocab = 9, .kind = flavour::wide, .seed = 4};
    buffers<float> b(p);
    const tensor z(b.z_view()), y(b.y_view()), g(b.dz_view());
    const std::vector<float> before = b.dz;
    const auto refuses = [&](auto&& spoil, const char* argument, int code = OPD_INVALID_INPUT) {
        c_call call;
        call.student.z = &z, call.student.dz = &g, call.teacher.y = &y;
        spoil(call);
        CHECK(call.run() == code);
        INFO(std::string(opd_last_error()));
        CHECK(opd_last_error_code() == code);
        if (code == OPD_INVALID_INPUT) CHECK(std::string(opd_last_error_argument()) == argument);
        CHECK(std::string(opd_last_error()).find(argument) != std::string::npos);
        CHECK(b.dz == before);
    };
    refuses([](c_call& c) { c.student.struct_size = 0; }, "student.struct_size");
    refuses([](c_call& c) { c.student.struct_size = 1 << 20; }, "student.struct_size");
    refuses([](c_call& c) { c.result.struct_size = 3; }, "result.struct_size");
    refuses([](c_call& c) { c.student.z = nullptr; }, "student.z");
    refuses([](c_call& c) { c.teacher.y = nullptr; }, "teacher.y");
    refuses([](c_call& c) { c.student.kind = 7; }, "student.kind");
    refuses([](c_call& c) { c.teacher.kind = -1; }, "teacher.kind");
    refuses([](c_call& c) { c.student.kind = OPD_ON_SUPPORT; }, "student.kind");
    refuses([](c_call& c) { c.estimator.estimator = "mc"; }, "estimator.estimator");
    refuses([](c_call& c) { c.estimator.of = "reverse"; }, "estimator.of");
    refuses([](c_call& c) { c.estimator.of = "clipped"; }, "estimator.of");
    refuses([](c_call& c) { c.estimator.selector = "some"; }, "estimator.selector");
    refuses([](c_call& c) { c.estimator.of = "jsd", c.estimator.a = 2; }, "jsd.w");
    refuses([](c_call& c) { c.env.reduction = 9; }, "env.reduction");
    refuses([](c_call& c) { c.env.reduction = OPD_SEQUENCE_MEAN; }, "env.offsets");
    refuses([](c_call& c) { c.env.on_infinite = 3; }, "env.on_infinite");
    refuses([](c_call& c) { c.env.determinism = -1; }, "env.determinism");
    refuses([](c_call& c) { c.student.temperature = -1; }, "student.temperature");
    refuses([](c_call& c) { c.estimator.reserved = 1; }, "estimator.reserved", OPD_UNSUPPORTED);
    refuses([](c_call& c) { c.student.padding = -1; }, "student.padding");
    refuses([](c_call& c) { c.student.padding = std::int64_t{1} << 60; }, "student.padding");
    refuses([](c_call& c) { c.teacher.kind = OPD_SAMPLES, c.estimator.surrogate = "ppo"; }, "estimator.surrogate");
    refuses([](c_call& c) { c.teacher.kind = OPD_TEACHER_HIDDEN; }, "teacher.x");
    // "all" is what no name is
    {
        buffers<float> mine(p), theirs(p);
        const tensor gm(mine.dz_view()), gt(theirs.dz_view());
        c_call none, all;
        none.student.z = all.student.z = &z, none.teacher.y = all.teacher.y = &y;
        none.student.dz = &gm, all.student.dz = &gt, all.estimator.selector = "all";
        REQUIRE(none.run() == OPD_OK);
        REQUIRE(all.run() == OPD_OK);
        CHECK(equal_bits(none.result, all.result));
        CHECK(equal_bits(mine.dz, theirs.dz));
    }
    // a newer caller's struct: unknown members are refused unless they are 0
    struct newer {
        opd_env env;
        double unknown;
    } n{};
    c_call call;
    call.student.z = &z, call.student.dz = &g, call.teacher.y = &y;
    n.env.struct_size = sizeof n, n.unknown = 1;
    opd_call c{sizeof c, nullptr, &call.student, &call.teacher, nullptr, &n.env};
    CHECK(opd_evaluate(&c, nullptr) == OPD_UNSUPPORTED);
    n.unknown = 0;
    CHECK(opd_evaluate(&c, nullptr) == OPD_OK);
    // an older one's: what it lacks is 0
    call.env.struct_size = offsetof(opd_env, weights);
    CHECK(call.run() == OPD_OK);
    CHECK(opd_evaluate(nullptr, nullptr) == OPD_INVALID_INPUT);
    c.student = nullptr;
    CHECK(opd_evaluate(&c, nullptr) == OPD_INVALID_INPUT);
}

TEST_CASE("bad and infinite rows: counted, raised with the result, refused before") {
    const problem p{.rows = 4, .vocab = 9, .kind = flavour::wide, .seed = 4};
    buffers<float> b(p);
    b.z[9 * 2] = std::numeric_limits<float>::quiet_NaN();
    const tensor z(b.z_view()), y(b.y_view()), g(b.dz_view());
    c_call call;
    call.student.z = &z, call.student.dz = &g, call.teacher.y = &y;
    CHECK(call.run() == OPD_OK);
    CHECK(call.result.diagnostics.bad_rows == 1);
    call.env.raise_bad = 1;
    call.result.loss = 77;
    CHECK(call.run() == OPD_BAD_CONTENTS);
    CHECK(call.result.loss != 77);
    CHECK(opd_last_error_row() == 2);
    call.env.bad_share = .5;
    CHECK(call.run() == OPD_OK);
    call.env.check_contents = 1;
    CHECK(call.run() == OPD_INVALID_INPUT);
    CHECK(opd_last_error_row() == 2);
    b.z[9 * 2] = 0, b.y[9 + 1] = -std::numeric_limits<float>::infinity();
    call.env = {}, call.env.struct_size = sizeof call.env, call.env.on_infinite = OPD_RAISE;
    CHECK(call.run() == OPD_INFINITE_VALUE);
    CHECK(opd_last_error_row() == 1);
    char line[200];
    call.env.on_infinite = OPD_SKIP;
    CHECK(call.run() == OPD_OK);
    CHECK(opd_diagnostics_text(&call.result.diagnostics, line, sizeof line) == std::strlen(line));
    CHECK(std::string(line) == "4 rows, 4 kept; 1 infinite (first: row 1): treated by env.on_infinite");
    opd_diagnostics sum = call.result.diagnostics;
    CHECK(opd_diagnostics_merge(&sum, &call.result.diagnostics) == OPD_OK);
    CHECK(sum.rows == 8);
    CHECK(sum.first_infinite_row == 1);
    CHECK(opd_diagnostics_merge(nullptr, &sum) == OPD_INVALID_INPUT);
}

TEST_CASE("names") {
    CHECK(std::string(opd_name("divergence", 0)) == "reverse_kl");
    CHECK(std::string(opd_says("divergence", 0)).find("KL(p||q)") == 0);
    int n = 0;
    while (opd_name("surrogate", n) != nullptr) ++n;
    CHECK(n == int(choice::surrogates.size()));
    CHECK(opd_name("surrogate", -1) == nullptr);
    CHECK(opd_name("nothing", 0) == nullptr);
    CHECK(opd_name(nullptr, 0) == nullptr);
    CHECK(opd_abi_version() == OPD_ABI_VERSION);
    CHECK(std::string(opd_config()).find("\"chosen\": \"") != std::string::npos);
}
