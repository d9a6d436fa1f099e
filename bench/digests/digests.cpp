// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Digests of what the CPU backend computes: one line an estimator, storage type and shape, with a hash over loss,
// diagnostics, gradient, losses and log-sum-exps; draws, scores, kept sets, rest-of-vocabulary buckets, hidden states
// and shards of the vocabulary likewise. Two builds that print the same lines give the same bits; scripts/digests.sh
// compares a commit with the working tree. No digest is kept: they depend on compiler and machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "opd/backends/cpu.hpp"
#include "opd/backends/vocab_parallel.hpp"
#include "opd/draw.hpp"
#include "opd/hidden.hpp"
#include "opd/opd.hpp"
#include "opd/score.hpp"

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

void print(const char* name, const char* type, index_t v, int variant, const digest& d) {
    std::printf("%-44s %6lld #%d  %016llx\n", (std::string(name) + " " + type).c_str(), static_cast<long long>(v),
                variant, static_cast<unsigned long long>(d.h));
}

/// What a draw wrote, from any rows.
template <class Rows, class Design>
digest drawn_by(const Rows& rows, index_t n, const Design& design, const filter& kept_by) {
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position;
    for (index_t r = 0; r < n; ++r)
        sample.push_back(static_cast<std::uint64_t>(r / 3)), position.push_back(static_cast<std::uint32_t>(r % 3));
    const index_t m = design.columns();
    const auto size = static_cast<std::size_t>(n * m), all = static_cast<std::size_t>(n);
    std::vector<std::int32_t> ids(size);
    std::vector<float> log_mu(size), weight(size);
    std::vector<std::uint8_t> exact(size);
    std::vector<double> lse(all), log_kept(all);
    std::vector<index_t> kept(all);
    cpu_backend backend{.threads = 2};
    drawn<> out{view(ids.data(), n, m), view(log_mu.data(), n, m)};
    if constexpr (!std::is_same_v<Design, design::greedy>)
        out.weight = view(weight.data(), n, m), out.exact = view(exact.data(), n, m);
    draw(backend, rows, design, draw_keys<>{.seed = 11, .sample = sample, .position = position}, out,
         draw_options<>{.filter = kept_by, .lse = lse, .log_kept = log_kept, .kept = kept});
    digest d;
    d.all(ids), d.all(log_mu), d.all(weight), d.all(exact), d.all(lse), d.all(log_kept), d.all(kept);
    return d;
}
template <class Rows>
void draws(const Rows& rows, index_t n, index_t v, const char* type) {
    const filter filters[] = {{}, {.temperature = 0.7f, .top_k = 5}, {.top_p = 0.9f}, {.top_k = 40, .min_p = 0.01f}};
    int variant = 0;
    for (const filter& f : filters) {
        const bool one_source_temperature = !requires { rows.data; }
        &&f.temperature != 1;
        if (one_source_temperature) continue;
        print("draw greedy", type, v, variant, drawn_by(rows, n, design::greedy{}, f));
        print("draw gumbel", type, v, variant, drawn_by(rows, n, design::gumbel{}, f));
        print("draw iid(3)", type, v, variant, drawn_by(rows, n, design::iid{3}, f));
        print("draw threshold(6)", type, v, variant, drawn_by(rows, n, design::threshold{6}, f));
        print("draw head_tail(2, 3)", type, v, variant, drawn_by(rows, n, design::head_tail{2, 3}, f));
        print("draw gumbel_top(4)", type, v, variant, drawn_by(rows, n, design::gumbel_top{4}, f));
        ++variant;
    }
}

/// All parts of a score.
template <class Rows>
void scored(const char* name, const Rows& rows, index_t n, index_t v, const std::vector<std::int32_t>& ids, index_t m,
            const char* type) {
    const index_t k = std::min<index_t>(v, 9);
    const auto all = static_cast<std::size_t>(n);
    std::vector<std::int32_t> top(static_cast<std::size_t>(n * k));
    std::vector<float> log_p(ids.size()), top_log_p(top.size()), tail(all), top_tail(all);
    std::vector<double> lse(all), entropy(all);
    cpu_backend backend{.threads = 2};
    score(backend, rows,
          scores<>{.ids = view(ids.data(), n, m),
                   .log_p = view(log_p.data(), n, m),
                   .log_tail = tail,
                   .top_ids = view(top.data(), n, k),
                   .top_log_p = view(top_log_p.data(), n, k),
                   .top_log_tail = top_tail,
                   .lse = lse,
                   .entropy = entropy});
    digest d;
    d.all(log_p), d.all(tail), d.all(top), d.all(top_log_p), d.all(top_tail), d.all(lse), d.all(entropy);
    print(name, type, v, 0, d);
}

/// Tokens drawn under a filter and the ids that it kept: of logits, and of hidden states, which gather.
struct kept_sets {
    index_t n, m = 3;
    std::vector<std::int32_t> ids, sets;
    std::vector<float> log_mu, log_q;
    std::vector<index_t> offsets;

    template <class Rows>
    kept_sets(const Rows& rows, index_t n_) : n(n_) {
        const auto all = static_cast<std::size_t>(n);
        std::vector<filter_cut> cut(all);
        std::vector<index_t> kept(all);
        std::vector<std::uint64_t> sample(all, 3);
        std::vector<std::uint32_t> position;
        for (std::size_t r = 0; r < all; ++r) position.push_back(static_cast<std::uint32_t>(r));
        ids.resize(all * 3), log_mu.resize(all * 3), log_q.assign(all * 3, -2.5f);
        cpu_backend backend{.threads = 2};
        draw(backend, rows, design::iid{m}, draw_keys<>{.seed = 5, .sample = sample, .position = position},
             drawn<>{view(ids.data(), n, m), view(log_mu.data(), n, m)},
             draw_options<>{.filter = {.top_k = 12, .top_p = 0.95f}, .cut = cut, .kept = kept});
        offsets.push_back(0);
        for (const index_t k : kept) offsets.push_back(offsets.back() + k);
        sets.resize(static_cast<std::size_t>(std::max<index_t>(offsets.back(), 1)));
        kept_ids(backend, rows, view(std::as_const(cut).data(), n), row_offsets<>(offsets),
                 view(sets.data(), offsets.back()));
    }
    auto cache() const {
        return teacher::on_kept_sets{
            teacher::samples{view(ids.data(), n, m), view(log_mu.data(), n, m), view(log_q.data(), n, m)},
            view(sets.data(), offsets.back()), row_offsets<>(offsets)};
    }
};

template <class T>
void searches(const char* type) {
    unsigned seed = 900;
    for (const index_t v : {17, 1024, 1500, 5000}) {
        const batch<T> b(v > 1000 ? 24 : 60, v, ++seed);
        const auto z = view(b.z.data(), b.n, b.v);
        draws(z, b.n, v, type);
        scored("score", z, b.n, v, b.ids, b.k, type);
        const kept_sets kept(z, b.n);
        call(
            std::string("kept sets, mc ") + type, b, [&](const batch<T>&) { return kept.cache(); }, mc{reverse_kl{}}, 0,
            1, false);
        std::vector<float> log_p(kept.ids.size());
        cpu_backend backend{.threads = 2};
        token_logp(backend, z, kept.cache(), view(log_p.data(), b.n, kept.m));
        digest d;
        d.all(log_p);
        print("kept sets, token_logp", type, v, 0, d);

        const batch<T> other(b.n, v + 6, ++seed); // a teacher with a few more ids
        const auto lumped = [&](const batch<T>&) {
            return teacher::lumped{teacher::dense<T>{view(other.y.data(), other.n, other.v)}, v - 2};
        };
        const auto rest = [&](const char* name, const auto& divergence) {
            call(std::string("rest bucket ") + name + " " + type, b, lumped, divergence, 0.5f, 0.7f, true);
        };
        rest("reverse_kl", reverse_kl{}), rest("forward_kl", forward_kl{}), rest("jsd(.3)", jsd{.w = .3, .o = .3});
        rest("total_variation", total_variation{}), rest("alpha(.5)", alpha_divergence{.a = .5});
    }
}

/// One call by the ranks of a vocabulary in three shards, one after the other.
template <class Student, class Teacher, class Estimator>
digest in_shards(index_t v, const Student& student, const Teacher& teacher, const Estimator& estimator) {
    const index_t cuts[] = {0, v / 3, v / 3 + 1024, v};
    std::vector<cpu_backend> backends(3);
    std::vector<double> lse[3];
    using call_type = decltype(vocab_parallel(backends[0], vocab_shard{}, student(index_t{}, index_t{}),
                                              teacher(index_t{}, index_t{}), estimator, env{}));
    std::vector<std::unique_ptr<call_type>> calls;
    for (std::size_t i = 0; i < 3; ++i) {
        const index_t first = cuts[i], count = cuts[i + 1] - first;
        lse[i].resize(24);
        env e;
        e.lse = lse[i];
        calls.push_back(std::make_unique<call_type>(vocab_parallel(
            backends[i], {.first = first, .total = v}, student(first, count), teacher(first, count), estimator, e)));
    }
    for (;;) {
        bool more = false;
        for (auto& c : calls) more = c->local();
        if (!more) break;
        const std::vector<std::byte> own(calls[0]->partials().begin(), calls[0]->partials().end());
        std::vector<std::byte> sum = own;
        for (std::size_t i = 1; i < 3; ++i) merge_partials(sum, calls[i]->partials());
        for (auto& c : calls) std::copy(sum.begin(), sum.end(), c->partials().begin());
    }
    digest d;
    for (auto& c : calls) {
        const result r = c->finish();
        d.bytes(&r.loss, sizeof r.loss);
    }
    for (auto& c : calls) c->backward();
    for (const auto& x : lse) d.all(x);
    return d;
}

template <class T>
void shards(const char* type) {
    const index_t v = 5000;
    const batch<T> b(24, v, 31);
    const auto go = [&](const char* name, const auto& whole, const auto& estimator) {
        std::vector<T> dz = b.dz;
        const auto student = [&](index_t first, index_t count) {
            student::logits<T> s{matrix_view<const T>(b.z.data() + first, b.n, count, v)};
            s.dz = matrix_view<T>(dz.data() + first, b.n, count, v), s.pad = padding::keep;
            return s;
        };
        digest d = in_shards(v, student, whole, estimator);
        d.all(dz);
        print(name, type, v, 0, d);
    };
    const auto dense = [&](index_t first, index_t count) {
        return teacher::dense<T>{matrix_view<const T>(b.y.data() + first, b.n, count, v)};
    };
    const auto at = [&](const auto& x) { return view(x.data(), b.n, b.k); };
    const auto support = [&](index_t, index_t) {
        return teacher::support<std::int32_t>{at(b.ids), at(b.log_q), b.log_tail};
    };
    const auto samples = [&](index_t, index_t) {
        return teacher::samples<std::int32_t>{at(b.ids), at(b.log_mu), at(b.log_q)};
    };
    go("shards reverse_kl", dense, reverse_kl{}), go("shards jsd(.3)", dense, jsd{.w = .3, .o = .3});
    go("shards total_variation", dense, total_variation{}), go("shards alpha(-1)", dense, alpha_divergence{.a = -1});
    go("shards eopd", dense, eopd(1));
    go("shards tail_bucket", support, tail_bucket{reverse_kl{}}), go("shards mc", samples, mc{reverse_kl{}});
}

/// The same from hidden states: blocks of whole rows, and tiles with recomputation where the budget is small; supports
/// and drawn tokens in blocks; renormalised supports and kept sets, whose logits are gathered; draws and scores; shards
/// of the head.
void from_hidden() {
    const index_t n = 24, v = 5000, d = 20;
    batch<float> b(n, v, 77);
    std::mt19937 u(5);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(n * d)), w(static_cast<std::size_t>(v * d)), xt(x), wt(w), dx(x),
        dw(w);
    for (auto* all : {&x, &w, &xt, &wt})
        for (float& one : *all) one = normal(u) * 0.7f;
    const auto run = [&](const char* name, const auto& teacher, const auto& estimator, std::size_t budget) {
        cpu_backend backend{.threads = 2};
        env e;
        e.mask = row_mask<>(b.kept), e.weights = b.row_weight, e.losses = b.losses;
        student::hidden<float> s{view(static_cast<const float*>(x.data()), n, d),
                                 view(static_cast<const float*>(w.data()), v, d)};
        s.dx = view(dx.data(), n, d), s.dw = view(dw.data(), v, d), s.budget = budget;
        digest of;
        const result r = evaluate(backend, s, teacher, estimator, e);
        of.bytes(&r.loss, sizeof r.loss), of.all(dx), of.all(dw), of.all(b.losses);
        std::printf("hidden %-24s budget %9zu  %016llx\n", name, budget, static_cast<unsigned long long>(of.h));
    };
    const auto taught = [&](index_t first, index_t count, std::size_t budget) {
        teacher::hidden<float> t{view(static_cast<const float*>(xt.data()), n, d),
                                 view(static_cast<const float*>(wt.data() + first * d), count, d)};
        t.budget = budget;
        return t;
    };
    const auto go = [&](const char* name, const auto& estimator, std::size_t budget) {
        run(name, taught(0, v, budget), estimator, budget);
    };
    const auto at = [&](const auto& of) { return view(of.data(), n, b.k); };
    const auto rows = taught(0, v, 1 << 24);
    const kept_sets kept(rows, n);
    draws(rows, n, v, "hidden"), scored("score", rows, n, v, b.ids, b.k, "hidden");
    for (const std::size_t budget : {std::size_t{1} << 24, std::size_t{1} << 18}) {
        go("reverse_kl", reverse_kl{}, budget), go("forward_kl", forward_kl{}, budget);
        go("jsd(.3)", jsd{.w = .3, .o = .3}, budget), go("total_variation", total_variation{}, budget);
        go("acceptance", acceptance{}, budget), go("eopd", eopd(1), budget);
        go("selected jsd", selected{jsd{.w = .3, .o = .3}, selector::tip{1, 0.5}}, budget);
        run("logits of a teacher", teacher::dense<float>{view(std::as_const(b.y).data(), n, v)}, reverse_kl{}, budget);
        const teacher::support<std::int32_t> stated{at(b.ids), at(b.log_q), b.log_tail},
            inferred{at(b.ids), at(b.log_q)};
        run("tail_bucket", stated, tail_bucket{reverse_kl{}}, budget);
        run("renormalised", inferred, renormalised{forward_kl{}}, budget);
        run("mc", teacher::samples<std::int32_t>{at(b.ids), at(b.log_mu), at(b.log_q)}, mc{reverse_kl{}}, budget);
        run("kept sets", kept.cache(), mc{reverse_kl{}}, budget);
        const auto student = [&](index_t first, index_t count) {
            student::hidden<float> s{view(static_cast<const float*>(x.data()), n, d),
                                     view(static_cast<const float*>(w.data() + first * d), count, d)};
            s.dw = view(dw.data() + first * d, count, d), s.budget = budget;
            return s;
        };
        const auto teacher = [&](index_t first, index_t count) { return taught(first, count, budget); };
        digest of = in_shards(v, student, teacher, reverse_kl{});
        of.all(dw);
        print("shards reverse_kl", "hidden", v, budget > (1 << 20), of);
    }
}

} // namespace

int main() {
    from_hidden();
    searches<float>("float"), searches<bfloat16>("bfloat16"), searches<double>("double");
    shards<float>("float"), shards<opd::half>("half");
    all_of<float>("float");
    all_of<double>("double");
    all_of<bfloat16>("bfloat16");
    all_of<opd::half>("half");
}
