// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// evaluate with a dense teacher, see evaluate.hpp. Every divergence in float, some of them in bfloat16 and double.
#include "fuzz/evaluate.hpp"

namespace {

using namespace opd;
using namespace opd::fuzz;

/// With parameters as a user might mistake them.
double parameter(choices& c, std::initializer_list<double> usual) {
    return c.once_in(12) ? c.of({not_a_number, infinity, -infinity, -1.0, 2.0}) : c.of(usual);
}

/// Σ p^a q^(1-a)/|a-1| of each row, where float carries it, q no less than the floor where it has holes.
template <class Z, class Y>
std::vector<double> power_slopes(const block<Z>& z, const block<Y>& y, double tp, double tq, double a, double floor) {
    std::vector<double> sums;
    const auto lse = [](const auto& x, index_t r, double t) {
        double top = -infinity, mass = 0;
        for (index_t v = 0; v < x.cols; ++v) top = std::max(top, x.number(r, v) / t);
        for (index_t v = 0; v < x.cols; ++v) mass += std::exp(x.number(r, v) / t - top);
        return top + std::log(mass);
    };
    for (index_t r = 0; r < z.rows; ++r) {
        const double lz = lse(z, r, tp), ly = lse(y, r, tq);
        bool hole = false;
        for (index_t v = 0; v < y.cols; ++v) hole |= std::isinf(y.number(r, v));
        double sum = 0;
        for (index_t v = 0; v < z.cols; ++v) {
            const double log_p = z.number(r, v) / tp - lz, y_v = v < y.cols ? y.number(r, v) : -infinity;
            const double log_q = std::max(y_v / tq - ly, hole ? floor : -infinity), x = a * log_p + (1 - a) * log_q;
            if (std::isfinite(x)) sum += std::exp(std::min(x, 87.0)) / std::abs(a - 1);
        }
        sums.push_back(sum);
    }
    return sums;
}

template <class Z, class G, class Y, class Divergence>
void run(choices& c, const Divergence& d) {
    const sizes shape = sizes_of(c);
    const index_t n = shape.n, v = shape.v;
    const index_t vy = c.once_in(16) ? 1 + c.below(v + 3) : v; // of the teacher
    bool plain = true;
    const float tp = temperature_of(c, plain), tq = c.once_in(3) ? temperature_of(c, plain) : tp;
    const bool in_place = std::is_same_v<Z, G> && c.once_in(4);
    block<Z> z(n, v, c.of<index_t>({0, 3, 16}));
    block<G> dz(n, v, c.of<index_t>({0, 1, 16}));
    block<Y> y(n, vy, c.of<index_t>({0, 5}));
    const index_t free = in_place ? z.stride - v : dz.stride - v;
    const index_t padding = c.once_in(2) ? c.below(free + 1) : free; // of the gradient's view; the rest is another's
    const bool keep = c.once_in(4);
    surroundings s(c, n, true);
    plain = plain && s.plain;
    std::vector<double> rz(static_cast<std::size_t>(std::max(v, vy))), ry(rz.size());
    for (index_t r = 0; r < n; ++r) {
        const bool wild = c.once_in(6);
        plain = plain && !wild;
        fill_row(c, rz.data(), ry.data(), std::max(v, vy), wild);
        for (index_t i = 0; i < v; ++i) z.set(r, i, rz[static_cast<std::size_t>(i)]);
        for (index_t i = 0; i < vy; ++i) y.set(r, i, ry[static_cast<std::size_t>(i)]);
        if (in_place)
            for (index_t i = 0; i < v; ++i) dz.set(r, i, 0);
        else
            for (index_t i = 0; i < v; ++i) dz.set(r, i, 0.125);
    }
    const int spoilt = c.once_in(16) ? static_cast<int>(1 + c.below(3)) : 0;
    const choices how = c;

    const block<Y> y_before = y;
    const auto [o, out] = checked(z, dz, in_place, keep ? 0 : padding, s,
                                  [&](eigen_backend& be, block<Z>& my_z, block<G>& my_dz, surroundings& my) {
                                      student::logits<Z, G> student;
                                      student.z = my_z.view();
                                      student.dz = my_dz.view(padding);
                                      if constexpr (std::is_same_v<Z, G>)
                                          if (in_place) student.dz = my_z.view(padding);
                                      student.temperature = tp;
                                      if (keep) student.pad = opd::padding::keep;
                                      teacher::dense<Y> teacher;
                                      teacher.y = y.view();
                                      teacher.temperature = tq;
                                      choices again = how;
                                      if (spoilt == 1) spoil(again, student.z);
                                      if (spoilt == 2) spoil(again, student.dz);
                                      if (spoilt == 3) spoil(again, teacher.y);
                                      return evaluate(be, student, teacher, d, my.e);
                                  });
    need(y.same(y_before), "the teacher was written");
    if (o.threw || !plain || spoilt != 0 || s.e.beta != 0 || n == 0) return;
    need(std::isfinite(o.loss), "the loss of moderate numbers is not finite");
    // In float e^x with x up to 60 is right to 30 eps, in the sum and in the entry: powers reach that.
    constexpr bool powers = std::is_same_v<Divergence, chi_squared> || std::is_same_v<Divergence, alpha_divergence>;
    double widest = 0; // scaled teacher logits of a row
    for (index_t r = 0; r < n; ++r) {
        double low = infinity, high = -infinity;
        for (index_t i = 0; i < vy; ++i)
            if (const double x = y.number(r, i); std::isfinite(x)) low = std::min(low, x), high = std::max(high, x);
        widest = std::max(widest, (high - low) / static_cast<double>(tq));
    }
    std::vector<double> slopes;
    if constexpr (powers) {
        double a = 2;
        if constexpr (requires { d.a; }) a = d.a;
        if (a != 1)
            slopes = power_slopes(z, y, static_cast<double>(tp), static_cast<double>(tq), a, s.e.on_infinite.floor_at);
    }
    check_rows(out, z, s, tp, v, 1, widest, powers ? 32 : 8, slopes);
}

template <class Z, class G, class Y>
void any_of_all(choices& c) {
    switch (c.below(8)) {
    case 0:
        return run<Z, G, Y>(c, reverse_kl{});
    case 1:
        return run<Z, G, Y>(c, forward_kl{});
    case 2:
        return run<Z, G, Y>(c, jsd{.w = parameter(c, {0.5, 0.1, 0.9, 0.999}), .o = parameter(c, {0.5, 0.0, 1.0, 0.3})});
    case 3:
        return run<Z, G, Y>(c, skew_forward_kl{.a = parameter(c, {0.1, 0.0, 0.9})});
    case 4:
        return run<Z, G, Y>(c, skew_reverse_kl{.a = parameter(c, {0.1, 0.0, 0.9})});
    case 5:
        return run<Z, G, Y>(c, total_variation{});
    case 6:
        return run<Z, G, Y>(c, alpha_divergence{.a = parameter(c, {0.5, 0.0, 1.0, -1.0, 2.0, 1e-8, 0.999})});
    default:
        return run<Z, G, Y>(c, chi_squared{});
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    switch (c.below(8)) {
    default:
        any_of_all<float, float, float>(c);
        break;
    case 5:
        run<bfloat16, bfloat16, bfloat16>(c, forward_kl{});
        break;
    case 6:
        run<double, double, double>(c, reverse_kl{});
        break;
    case 7:
        run<double, float, half>(c, jsd{.w = 0.5, .o = 0.5});
        break;
    }
    return 0;
}
