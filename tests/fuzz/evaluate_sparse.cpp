// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// evaluate with what a cache holds of the teacher: a support, samples, weighted samples. See evaluate.hpp.
#include "fuzz/evaluate.hpp"

namespace {

using namespace opd;
using namespace opd::fuzz;

/// log softmax of a row. (V)
void log_softmax(const double* x, double* out, index_t n) {
    const double top = *std::max_element(x, x + n);
    double sum = 0;
    for (index_t v = 0; v < n; ++v) sum += std::exp(x[v] - top);
    for (index_t v = 0; v < n; ++v) out[v] = x[v] - top - std::log(sum);
}

/// What the caches list: ids, and their log-probs under the teacher and under a behaviour policy.
template <class Id, class L>
struct lists {
    block<Id> ids;
    block<L> log_q, log_mu, log_tail;
    block<float> weight;
    block<std::uint8_t> exact;
    lists(choices& c, index_t n, index_t k)
        : ids(n, k, c.of<index_t>({0, 2})), log_q(n, k, c.of<index_t>({0, 1})), log_mu(n, k, 0), log_tail(n, 1, 0),
          weight(n, k, 0), exact(n, k, 0) {}
    bool same(const lists& o) const {
        return ids.same(o.ids) && log_q.same(o.log_q) && log_mu.same(o.log_mu) && log_tail.same(o.log_tail) &&
               weight.same(o.weight) && exact.same(o.exact);
    }
};

/// An estimator of drawn tokens, on weighted entries.
template <class E>
struct weighted_entries : E {
    static constexpr cache_kind takes = cache_kind::weighted;
};
template <class E>
weighted_entries(E) -> weighted_entries<E>;

template <class Z, class L, class Id, class Estimator>
void run(choices& c, const Estimator& estimator, bool sparse_gradient = false) {
    constexpr bool support = Estimator::takes == cache_kind::support;
    constexpr bool weighted = Estimator::takes == cache_kind::weighted;
    const sizes of_call = sizes_of(c);
    const index_t n = of_call.n, v = of_call.v;
    const index_t k = !support && c.once_in(6) ? v + 3 : of_call.k; // more draws than ids
    bool plain = true;
    const float temperature = temperature_of(c, plain);
    const bool in_place = !sparse_gradient && c.once_in(4);
    block<Z> z(n, v, c.of<index_t>({0, 3, 16})), dz(n, sparse_gradient ? k : v, c.of<index_t>({0, 1, 16}));
    const index_t free = in_place ? z.stride - v : dz.stride - dz.cols;
    const index_t padding = c.once_in(2) ? c.below(free + 1) : free; // of the gradient's view; the rest is another's
    const bool keep = c.once_in(4);
    lists<Id, L> cache(c, n, k);
    surroundings s(c, n, true);
    plain = plain && s.plain;
    const auto size = static_cast<std::size_t>(v);
    std::vector<double> rz(size), ry(size), log_p(size), log_q(size), scaled(size);
    double slope = 1; // the largest |c| / p that a row has
    for (index_t r = 0; r < n; ++r) {
        const bool wild = c.once_in(6), odd = c.once_in(6);
        plain = plain && !wild && !odd;
        fill_row(c, rz.data(), ry.data(), v, wild);
        numbers u(c.bytes(2));
        for (index_t i = 0; i < v; ++i) z.set(r, i, rz[static_cast<std::size_t>(i)]);
        for (index_t i = 0; i < dz.cols; ++i) dz.set(r, i, in_place ? 0 : 0.125);
        log_softmax(ry.data(), log_q.data(), v);
        for (index_t i = 0; i < v; ++i)
            scaled[static_cast<std::size_t>(i)] = rz[static_cast<std::size_t>(i)] / static_cast<double>(temperature);
        log_softmax(scaled.data(), log_p.data(), v);
        std::vector<Id> order(size);
        for (index_t i = 0; i < v; ++i) order[static_cast<std::size_t>(i)] = static_cast<Id>(i);
        for (index_t i = 0; i + 1 < v; ++i)
            std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(i + u.below(v - i))]);
        if (c.once_in(2)) // a top k
            std::sort(order.begin(), order.end(), [&](Id a, Id b) {
                return log_q[static_cast<std::size_t>(a)] > log_q[static_cast<std::size_t>(b)];
            });
        double inside = 0;
        for (index_t j = 0; j < k; ++j) {
            const index_t pick = support ? j : u.below(v);
            const auto id = static_cast<std::size_t>(order[static_cast<std::size_t>(pick)]);
            *cache.ids.at(r, j) = static_cast<Id>(id);
            cache.log_q.set(r, j, std::max(log_q[id], -1e4));
            cache.log_mu.set(r, j, std::min(-1e-3, std::max(log_p[id], -500.0) + 0.1 * u.normal()));
            *cache.weight.at(r, j) = static_cast<float>(1 / static_cast<double>(k));
            *cache.exact.at(r, j) = u.below(3) == 0;
            inside += std::exp(log_q[id]);
            if (!support && log_p[id] < -500) plain = false; // nobody drew that
            if (!std::isfinite(log_q[id])) plain = plain && support;
            slope = std::max({slope, std::abs(std::max(log_p[id], -1e4) - std::max(log_q[id], -1e4))});
        }
        cache.log_tail.set(r, 0, inside < 1 ? std::log1p(-inside) : -50.0);
        if (odd && k > 0) {
            const index_t j = u.below(k);
            const double some[] = {not_a_number, infinity, -infinity, 0.5, 3e38, -3e38, -1e-45};
            const double x = some[u.below(7)];
            switch (c.below(6)) {
            case 0:
                *cache.ids.at(r, j) = c.of<Id>({-1, std::numeric_limits<Id>::min(), std::numeric_limits<Id>::max(),
                                                static_cast<Id>(v), cache.ids.at(r, 0)[0]});
                break;
            case 1:
                cache.log_q.set(r, j, x);
                break;
            case 2:
                cache.log_mu.set(r, j, x);
                break;
            case 3:
                cache.log_tail.set(r, 0, x);
                break;
            case 4:
                *cache.weight.at(r, j) = static_cast<float>(x);
                break;
            default:
                *cache.exact.at(r, j) = 255;
            }
        }
    }
    const bool tail = c.once_in(2), exact = c.once_in(2);
    const int spoilt = c.once_in(16) ? static_cast<int>(1 + c.below(5)) : 0;
    const choices how = c;

    const lists<Id, L> before = cache;
    const auto go = [&](auto student, eigen_backend& be, block<Z>& my_z, block<Z>& my_dz, surroundings& my) {
        student.z = my_z.view();
        student.dz = in_place ? my_z.view(padding) : my_dz.view(padding);
        student.temperature = temperature;
        if (keep) student.pad = opd::padding::keep;
        choices again = how;
        if (spoilt == 1) spoil(again, student.z);
        if (spoilt == 2) spoil(again, student.dz);
        const auto with = [&](auto teacher) {
            teacher.ids = cache.ids.view();
            teacher.log_q = cache.log_q.view();
            if constexpr (support) {
                if (tail) teacher.log_tail = cache.log_tail.column();
            } else {
                teacher.log_mu = cache.log_mu.view();
            }
            if constexpr (weighted) {
                teacher.weight = cache.weight.view();
                if (exact) teacher.exact = cache.exact.view();
            }
            if (spoilt == 3) spoil(again, teacher.ids);
            if (spoilt == 4) spoil(again, teacher.log_q);
            if constexpr (!support)
                if (spoilt == 5) spoil(again, teacher.log_mu);
            return evaluate(be, student, teacher, estimator, my.e);
        };
        if constexpr (support)
            return with(teacher::support<Id, L>());
        else if constexpr (weighted)
            return with(teacher::weighted<Id, L>());
        else
            return with(teacher::samples<Id, L>());
    };
    const auto [o, out] = checked(z, dz, in_place, keep ? 0 : padding, s,
                                  [&](eigen_backend& be, block<Z>& my_z, block<Z>& my_dz, surroundings& my) {
                                      if constexpr (requires { Estimator::sparse_gradient; })
                                          if (sparse_gradient)
                                              return go(student::on_support<Z, Z>(), be, my_z, my_dz, my);
                                      return go(student::logits<Z, Z>(), be, my_z, my_dz, my);
                                  });
    need(cache.same(before), "the cache was written");
    if (o.threw || !plain || spoilt != 0 || s.e.beta != 0 || n == 0) return;
    need(std::isfinite(o.loss), "the loss of moderate numbers is not finite");
    if constexpr (std::is_base_of_v<any_sampled, Estimator>) return; // its slopes are any power of p/q
    check_rows(out, z, s, temperature, dz.cols, slope);
}

/// Whatever can be chosen at run time, with parameters that are legal or not.
any_sampled any_of(choices& c) {
    const auto number = [&] { return c.of({0.5, 0.2, 1.0, 2.0, 5.0, 1e-3, 0.0, -1.0, 100.0, not_a_number, infinity}); };
    any_sampled e;
    e.of = {choice::objectives[c.below(std::size(choice::objectives))].which, number(), number()};
    e.surrogate = {.which = choice::surrogates[c.below(std::size(choice::surrogates))].which,
                   .low = number(),
                   .high = number(),
                   .dual = c.once_in(3) ? number() : 0,
                   .cap = number()};
    e.baseline = {choice::baselines[c.below(std::size(choice::baselines))].which};
    e.weighting = {c.once_in(4)};
    e.accept_bias = !c.once_in(4);
    return e;
}
/// Sampled rows in float under every policy; other types under the default ones.
template <class L>
void run_samples(choices& c) {
    if constexpr (std::is_same_v<L, float>) {
        switch (c.below(6)) {
        case 4:
            return run<L, L, std::int32_t>(c, any_of(c));
        case 5:
            return run<L, L, std::int32_t>(c, weighted_entries{any_of(c)});
        case 0:
            return run<L, L, std::int32_t>(c, mc{.baseline = baseline::leave_one_out{}});
        case 1:
            return run<L, L, std::int32_t>(c, mc{.baseline = baseline::self_normalised{}});
        case 2:
            return run<L, L, std::int32_t>(c, mc{shape::clipped{c.of({1.0, 1e-3, not_a_number, -1.0, infinity})}});
        default:
            break;
        }
    }
    run<L, L, std::int32_t>(c, mc{reverse_kl{}});
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    switch (c.below(9)) {
    case 0:
        run<float, float, std::int32_t>(c, tail_bucket{forward_kl{}});
        break;
    case 1:
        run<float, float, std::int32_t>(c, tail_bucket{jsd{.w = c.of({0.5, 0.1, 0.9}), .o = c.of({0.5, 0.0, 1.0})}});
        break;
    case 2:
        run<bfloat16, float, std::int64_t>(c, tail_bucket{reverse_kl{}});
        break;
    case 3: {
        const auto renormalised_kl = renormalised{forward_kl{}};
        run<float, float, std::int32_t>(c, renormalised_kl, c.once_in(2));
        break;
    }
    case 4:
        run<double, double, std::int32_t>(c, tail_bucket{forward_kl{}});
        break;
    case 5:
        run_samples<float>(c);
        break;
    case 6:
        run_samples<double>(c);
        break;
    case 7:
        if (c.once_in(2))
            run<float, float, std::int64_t>(c, weighted_entries{mc{.baseline = baseline::none{}}});
        else
            run<float, float, std::int32_t>(c, weighted_entries{mc{reverse_kl{}}});
        break;
    default:
        run<bfloat16, bfloat16, std::int32_t>(c, weighted_entries{mc{reverse_kl{}}});
    }
    return 0;
}
