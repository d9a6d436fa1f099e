// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/generators.hpp"

#include <range/v3/view/generate_n.hpp>

#include <opd/ranges.hpp>

namespace opd::test {

rc::Gen<index_t> vocab_size(index_t largest) {
    return rc::gen::suchThat(
        rc::gen::oneOf(rc::gen::inRange<index_t>(1, 67),
                       rc::gen::element<index_t>(1, 2, 3, 15, 16, 17, 1023, 1024, 1025, 2047, 2049, 3000),
                       rc::gen::inRange<index_t>(1008, 1042)),
        [largest](index_t v) { return v <= largest; });
}

rc::Gen<problem> problems(problem_options o) {
    return rc::gen::exec([o] {
        problem p;
        p.vocab = *vocab_size(o.largest_vocab);
        p.rows = *rc::gen::inRange<index_t>(o.smallest_rows, o.largest_rows + 1);
        p.pad_z = *rc::gen::element<index_t>(0, 0, 1, 5, 16);
        p.pad_y = *rc::gen::element<index_t>(0, 0, 3, 8);
        p.pad_g = *rc::gen::element<index_t>(0, 0, 2, 16);
        if (o.temperatures) {
            p.temperature_p = *rc::gen::element(1.F, 1.F, 0.7F, 0.5F, 2.F, 1.3F);
            p.temperature_q = *rc::gen::element(1.F, 1.F, 0.7F, 2.F);
        }
        if (o.far_temperatures && *rc::gen::inRange(0, 3) == 0) {
            p.temperature_p = *rc::gen::element(0.01F, 0.05F, 10.F, 100.F);
            p.temperature_q = *rc::gen::element(p.temperature_p, p.temperature_p, 0.01F, 1.F, 100.F);
        }
        if (o.many_rows && *rc::gen::inRange(0, 10) == 0) {
            p.rows = *rc::gen::element<index_t>(257, 300, 521);
            p.vocab = p.vocab % 40 + 1;
        }
        p.kind = *rc::gen::elementOf(o.kinds);
        p.masked = *rc::gen::arbitrary<bool>();
        p.seed = *rc::gen::noShrink(rc::gen::arbitrary<std::uint64_t>());
        return p;
    });
}

std::vector<std::int64_t> random_offsets(index_t rows, numbers& u, index_t longest) {
    std::vector<index_t> lengths;
    for (index_t left = rows; left > 0; left -= lengths.back()) lengths.push_back(std::min(left, u.below(longest + 1)));
    if (u.uniform() < 0.5) lengths.push_back(0);
    return offsets_for(lengths);
}
std::vector<std::int64_t> offsets_for(const std::vector<index_t>& lengths) { return offsets_of(lengths); }
std::vector<std::uint8_t> random_mask(index_t rows, numbers& u, double share) {
    const auto drawn = [&u, share] { return static_cast<std::uint8_t>(u.uniform() < share); };
    return ::ranges::views::generate_n(drawn, rows) | ::ranges::to<std::vector>();
}

void fill_row(flavour f, numbers& u, double* z, double* y, index_t n) {
    const double minus_inf = detail::neg_inf<double>();
    for (index_t v = 0; v < n; ++v) {
        z[v] = (f == flavour::peaked ? 1 : 3) * u.normal();
        y[v] = (f == flavour::peaked ? 1 : 3) * u.normal();
        if (f == flavour::near_equal) y[v] = z[v] + 1e-3 * u.normal();
        if (f == flavour::equal || f == flavour::one_hot) y[v] = z[v];
    }
    if (f == flavour::peaked) {
        const index_t top = u.below(n);
        z[top] += 12;
        y[u.uniform() < 0.7 ? top : u.below(n)] += 12;
    }
    if (f == flavour::steep) {
        const auto far = [&u] { return 20 * std::pow(50, u.uniform()); };
        for (index_t v = 0; v < n; ++v) z[v] /= 3, y[v] /= 3;
        const index_t top = u.below(n), other = u.below(n);
        z[top] += far();
        y[u.uniform() < 0.7 ? top : other] += far();
        if (n > 2) z[u.below(n)] -= far(), y[u.below(n)] -= far();
        if (u.uniform() < 0.5) z[other] = z[top] - u.uniform(); // two tokens share the mass
    }
    if (f == flavour::diffuse) {
        double *flat = z, *sure = y;
        if (u.uniform() < 0.3) std::swap(flat, sure);
        for (index_t v = 0; v < n; ++v) flat[v] = 0.04 * u.uniform() - 0.02, sure[v] /= 3;
        const index_t top = u.below(n);
        sure[top] += 20 * u.uniform();
        if (u.uniform() < 0.5) flat[top] = 0.02; // the token that both like best
    }
    const index_t stays = u.below(n); // one id always keeps its mass on both sides
    for (index_t v = 0; v < n; ++v) {
        if (v == stays) continue;
        const bool gap = u.uniform() < 0.3;
        if (f == flavour::one_hot || (f == flavour::filtered && gap)) z[v] = y[v] = minus_inf;
        if (f == flavour::student_gap && (gap || v == 0)) z[v] = minus_inf;
        if (f == flavour::teacher_gap && (gap || v == 0)) y[v] = minus_inf;
    }
}

} // namespace opd::test
