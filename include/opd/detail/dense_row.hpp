// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One row of a dense divergence on the CPU: value, and gradient dz = g (c - p Σ c) with g = scale/T.
//
//   single-sweep programs   sweep (normalisers + raw sums) · gradient                          3 reads, 1 write a row
//   others                  sweep (normalisers) · terms and c, c parked · gradient from parked c
//   by entry                sweep (normalisers) · terms and c · c again and gradient: infinite rows under `floor`, rows whose
//                           raw sums lost their digits on the way to their anchor
//   a value near 0          one more read: a sum of terms of which none is negative
//   careful                 float64, two plain passes: rows that float cannot carry
//
// Passes after the first walk backwards: the end of the row is still in L2.
#pragma once

#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/row_outcome.hpp"
#include "opd/detail/sweep.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"

namespace opd::detail {

inline namespace OPD_ISA {

/// Whether there is no finite number to report or to store.
inline bool beyond_float(const double& x) { return !is_finite(x) || std::abs(x) > 1e30; }

/// Everything of a dense row that does not depend on the row.
template <class Program, class Z, class Y, class G>
struct dense_row {
    using F = pack_for<Z, Y, G>;
    using value = typename F::value_type;
    static constexpr bool single_sweep = single_sweep_divergence<Program>;
    static constexpr raw_sums_needed need = [] {
        if constexpr (single_sweep)
            return raw_sums_needed(Program::raw);
        else
            return raw_sums_needed{};
    }();

    static constexpr raw_sums_needed need_for_value = [] {
        if constexpr (requires { Program::raw_for_value; })
            return raw_sums_needed(Program::raw_for_value);
        else
            return need;
    }();

    Program program;
    index_t n = 0; ///< entries of the softmax
    double inv_s = 1, inv_t = 1;
    float beta = 0;
    infinite on_infinite = {};
    double loss_clamp = 0;

    /// `scale`: w_r f_r. dz null: value only. `parked`: n numbers of scratch for programs with two normalisers.
    /// `given_lse`: the student's log-sum-exp, or null. dz may be z.
    row_outcome run(const Z* z, const Y* y, G* dz, double scale, value* parked, const double* given_lse) const {
        double k = 1;
        if constexpr (single_sweep) k = program.exponent();
        swept sw = dz ? sweep_row<F, true, need>(z, y, n, inv_s, inv_t, k)
                      : sweep_row<F, true, need_for_value>(z, y, n, inv_s, inv_t, k);
        row_outcome out;
        raw_sums& s = sw.sums;
        if (sw.found.bad || (given_lse && !is_finite(*given_lse))) {
            out.bad = true;
            zero(dz);
            return out;
        }
        if (given_lse) s.S = std::expm1(*given_lse - s.z_s * inv_s);
        out.lse = given_lse ? *given_lse : s.lse();
        out.infinite = (sw.found.teacher_zero && infinite_where_teacher_zero(program)) ||
                       (sw.found.student_zero && infinite_where_student_zero(program));
        if (out.infinite && on_infinite.act != infinite::action::floor) {
            zero(dz);
            return out;
        }
        const floors raised(program, sw.found, out.infinite, on_infinite.floor_at);
        const raw_sums anchored = raised.anchored(s);
        const double gap = (s.y_t - anchored.y_s) * inv_t;      // how little the teacher gives the student's top token
        constexpr bool tolerant = need.u && !need.w && !need.x; // reverse KL never forms e^-delta
        const bool by_entry = out.infinite || (single_sweep && sw.rough);
        bool careful = (sw.reach > steepest && !by_entry) || gap > (tolerant ? 1e29 : 40);

        double sum_c = 0;
        if (!careful) {
            if (by_entry) {
                const auto t = entry_terms(z, y, {anchored, program, raised, k});
                out.loss = t.loss, sum_c = t.sum_c;
                careful = t.wide;
            } else if constexpr (single_sweep) {
                out.loss = program.value(s);
                sum_c = program.sum_c(s);
            } else {
                const auto t = terms(z, y, s, sw.wild, parked);
                out.loss = t.loss, sum_c = t.sum_c;
            }
            careful |= beyond_float(out.loss) || beyond_float(sum_c);
            if constexpr (refinable_divergence<Program>)
                if (!careful && !out.infinite && loses_digits<F>(program, out.loss, s)) out.loss = refined(z, y, s);
        }
        if (careful) {
            out.careful = true;
            careful_row(z, y, dz, scale, s, given_lse != nullptr, raised, out);
            return out;
        }
        if (loss_clamp > 0 && std::abs(out.loss) > loss_clamp) {
            out.clamped = true;
            zero(dz);
            return out;
        }
        if (dz && by_entry)
            entry_gradient(z, y, dz, {anchored, program, raised, k}, sum_c, scale * inv_s);
        else if (dz)
            gradient(z, y, dz, s, sw.wild, parked, sum_c, scale * inv_s);
        return out;
    }

    /// dz = beta·dz: rows that are masked, bad, skipped or clamped.
    void zero(G* dz) const {
        if (dz)
            for (index_t i = 0; i < n; ++i)
                dz[i] = beta == 0 ? element<G>::store(0) : element<G>::store(value(beta) * element<G>::load(dz[i]));
    }

private:
    struct constants {
        anchor_lanes<F> anchor;
        row_constants<F> row;
        F inv_sum_s, inv_sum_t, log_sum_s, log_sum_t;

        constants(const raw_sums& s, const Program& program)
            : anchor(s), row{F(1 / (1 + s.S)), F(std::exp(-s.d_star()) / (1 + s.S)), F(s.d_star()), F(s.ratio())},
              inv_sum_s(1 / (1 + s.S)), inv_sum_t(1 / (1 + s.T)), log_sum_s(std::log1p(s.S)),
              log_sum_t(std::log1p(s.T)) {
            row.anchored = s.ratio() > 0;
            if constexpr (requires { program.slope_star(row); }) row.slope_star = program.slope_star(row);
        }

        template <bool Near>
        OPD_INLINE dense_entry<F> entry(F z, F y) const {
            dense_entry<F> e;
            e.p = anchor.student(z) * inv_sum_s;
            e.q = anchor.teacher(y) * inv_sum_t;
            e.delta = anchor.template delta<Near>(z, y);
            e.log_p = pin(z - anchor.z_s) * anchor.inv_s - log_sum_s;
            e.log_q = pin(y - anchor.y_t) * anchor.inv_t - log_sum_t;
            return e;
        }
    };

    /// Which log-probs of an infinite row are raised inside the logarithms, and to what.
    struct floors {
        bool q = false, p = false; ///< the teacher's, the student's
        double at = 0;

        floors(const Program& program, const contents& found, bool infinite_row, double floor_at)
            : q(infinite_row && found.teacher_zero && infinite_where_teacher_zero(program)),
              p(infinite_row && found.student_zero && infinite_where_student_zero(program)), at(floor_at) {}

        /// The row with the teacher's logit at the anchor raised to the floor: d* and delta follow.
        raw_sums anchored(raw_sums s) const {
            const double lowest = s.y_t + (at + std::log1p(s.T)) / s.inv_t;
            if (q && s.y_s < lowest) s.y_s = lowest;
            return s;
        }
    };

    /// Constants of a row that is looked at entry by entry, -inf included. Differences are taken in double.
    struct entry_constants : constants {
        static constexpr double none = 3e38; // beyond every log-prob
        double inv_s, inv_t, shift;
        F floor_p, raised_p, floor_q, above_floor, k;
        F d_star;
        bool floored;

        entry_constants(const raw_sums& s, const Program& program, const floors& f, double exponent)
            : constants(s, program), inv_s(s.inv_s), inv_t(s.inv_t), shift(s.shift()), floor_p(f.p ? f.at : -none),
              raised_p(f.p ? std::exp(f.at) : 0), floor_q(f.q ? f.at : -none),
              above_floor(f.q ? f.at + s.d_star() : -none), k(exponent), d_star(s.d_star()), floored(f.q) {}

        /// As c sees it: with the teacher's floor, without the student's (the gradient of forward KL is p - q).
        OPD_INLINE dense_entry<F> entry(F z, F y) const {
            const F most(1e30);
            const bool below_floor = floored && !any(y > -most); // no difference of theirs is below the floor's
            z = min(max(z, -most), most), y = min(max(y, -most), most);
            dense_entry<F> e;
            e.p = this->anchor.student(z) * this->inv_sum_s;
            e.q = this->anchor.teacher(y) * this->inv_sum_t;
            e.log_p = pin(z - this->anchor.z_s) * this->anchor.inv_s - this->log_sum_s;
            e.log_q = max(pin(y - this->anchor.y_t) * this->anchor.inv_t - this->log_sum_t, floor_q);
            e.delta = e.log_p - above_floor;
            if (!below_floor) e.delta = min(in_double(z, inv_s, y, inv_t, shift), e.delta);
            return e;
        }
        /// As the value sees it: p itself raised too, where q > 0, for not every program has a logarithm.
        OPD_INLINE dense_entry<F> for_value(dense_entry<F> e) const {
            if constexpr (requires(const Program& p) { p.infinite_where_student_zero(); }) {
                const auto low = e.log_p < floor_p;
                const typename F::mask lifted = low & (e.q > F(0));
                e.p = select(lifted, raised_p, e.p);
                e.log_p = max(e.log_p, floor_p);
                e.delta = max(e.delta, floor_p - e.log_q - d_star);
            }
            return e;
        }
        /// Whether float cannot carry e^(-k delta), if the program forms it, at this entry.
        OPD_INLINE typename F::mask wide(const dense_entry<F>& e) const {
            const F x = max(-k * e.delta, -k * (e.delta + d_star));
            const typename F::mask alive = e.log_p > F(-1e20), has_mass = (e.p + e.q) > F(0);
            const typename F::mask far = reach_of(x, -e.log_p) > F(steepest), steep = x > F(steepest);
            return (far & alive) | (steep & has_mass);
        }
    };

    struct terms_result {
        double loss, sum_c;
        bool wide = false;
    };

    /// Leaves of the row from its end, as stored, -inf included: visit(z, y, begin, count, full).
    template <class Visit>
    void leaves_backwards(const Z* z, const Y* y, Visit visit) const {
        staged_leaf<F> stage;
        for (index_t begin = (n - 1) / leaf_size * leaf_size; begin >= 0; begin -= leaf_size) {
            const int count = static_cast<int>(std::min<index_t>(leaf_size, n - begin));
            if constexpr (loads_directly<F, Z> && loads_directly<F, Y>)
                if (count == leaf_size) {
                    visit(z + begin, y + begin, begin, count, count);
                    continue;
                }
            const int full = staged_leaf<F>::load(stage.z, z + begin, count);
            staged_leaf<F>::load(stage.y, y + begin, count);
            visit(static_cast<const value*>(stage.z), static_cast<const value*>(stage.y), begin, count, full);
        }
    }

    terms_result entry_terms(const Z* z, const Y* y, const entry_constants k) const {
        terms_result r{0, 0};
        const Program formula = this->program; // a copy that no store can alias
        typename F::mask wide{};
        leaves_backwards(z, y, [&](auto* zl, auto* yl, index_t, int, int full) {
            F loss(0.), c(0.);
            for (int block = 0; block < full; block += sum_chain<F>) {
                F block_loss(0.), block_c(0.);
                for (int i = block, end = std::min(full, block + sum_chain<F>); i < end; i += F::width) {
                    const dense_entry<F> e = k.entry(F::load(zl + i), F::load(yl + i));
                    block_loss += formula.term(k.row, k.for_value(e));
                    block_c += formula.c(k.row, e);
                    if constexpr (need.w && !need.k_is_one) wide = wide | k.wide(e);
                }
                loss += block_loss, c += block_c;
            }
            r.loss += double(sum(loss));
            r.sum_c += double(sum(c));
        });
        r.wide = any(wide);
        return r;
    }

    void entry_gradient(const Z* z, const Y* y, G* dz, const entry_constants k, double sum_c, double scale) const {
        const Program formula = this->program; // a copy that no store can alias
        const F total(sum_c), g(scale);
        alignas(64) value buffer[leaf_size];
        leaves_backwards(z, y, [&](auto* zl, auto* yl, index_t begin, int count, int full) {
            const auto at = [&](int i) {
                const dense_entry<F> e = k.entry(F::load(zl + i), F::load(yl + i));
                return g * (formula.c(k.row, e) - e.p * total);
            };
            if constexpr (loads_directly<F, G>)
                if (count == leaf_size && beta == 0) {
                    for (int i = 0; i < full; i += F::width) at(i).store(dz + begin + i);
                    return;
                }
            for (int i = 0; i < full; i += F::width) at(i).store(buffer + i);
            store_converted(buffer, dz + begin, count);
        });
    }

    /// The value as a sum of terms of which none is negative, log p - log q in double but for the normalisers.
    double refined(const Z* z, const Y* y, const raw_sums& s) const requires refinable_divergence<Program> {
        const constants k(s, program);
        const Program formula = this->program; // a copy that no store can alias
        const double shift = s.shift() + s.d_star();
        const F most(1e30);
        double total = 0;
        leaves_backwards(z, y, [&](auto* zl, auto* yl, index_t, int, int full) {
            F loss(0.);
            for (int i = 0; i < full; i += F::width) {
                const F zi = min(max(F::load(zl + i), -most), most), yi = min(max(F::load(yl + i), -most), most);
                dense_entry<F> e;
                e.p = k.anchor.student(zi) * k.inv_sum_s;
                e.q = k.anchor.teacher(yi) * k.inv_sum_t;
                e.delta = in_double(zi, inv_s, yi, inv_t, shift);
                loss += formula.nonnegative_term(e);
            }
            total += double(sum(loss));
        });
        return total;
    }

    /// Leaves of the row from its end, staged where they cannot be read in place: visit(z, y, begin, count, full).
    template <bool NeedY, class Visit>
    void backwards(const Z* z, const Y* y, bool wild, Visit visit) const {
        constexpr bool direct = loads_directly<F, Z> && (!NeedY || loads_directly<F, Y>);
        staged_leaf<F> stage;
        for (index_t begin = (n - 1) / leaf_size * leaf_size; begin >= 0; begin -= leaf_size) {
            const int count = static_cast<int>(std::min<index_t>(leaf_size, n - begin));
            if constexpr (direct)
                if (!wild && count == leaf_size) {
                    visit(z + begin, y + begin, begin, count, count);
                    continue;
                }
            const int full = staged_leaf<F>::load(stage.z, z + begin, count);
            if constexpr (NeedY) staged_leaf<F>::load(stage.y, y + begin, count);
            if (wild) stage.template tame<NeedY>(count);
            visit(static_cast<const value*>(stage.z), static_cast<const value*>(stage.y), begin, count, full);
        }
    }

    terms_result terms(const Z* z, const Y* y, const raw_sums& s, bool wild, value* parked) const {
        const constants k(s, program);
        if (!parked)
            return k.anchor.near ? terms<true, false>(z, y, k, wild, parked)
                                 : terms<false, false>(z, y, k, wild, parked);
        return k.anchor.near ? terms<true, true>(z, y, k, wild, parked) : terms<false, true>(z, y, k, wild, parked);
    }
    template <bool Near, bool Park>
    terms_result terms(const Z* z, const Y* y, const constants k, bool wild, value* parked) const {
        terms_result r{0, 0};
        const Program formula = this->program; // a copy that no store can alias
        backwards<true>(z, y, wild, [&](auto* zl, auto* yl, index_t begin, int count, int full) {
            F loss(0.), c(0.);
            for (int block = 0; block < full; block += sum_chain<F>) {
                F block_loss(0.), block_c(0.);
                for (int i = block, end = std::min(full, block + sum_chain<F>); i < end; i += F::width) {
                    const dense_entry<F> e = k.template entry<Near>(F::load(zl + i), F::load(yl + i));
                    block_loss += formula.term(k.row, e);
                    const F ci = formula.c(k.row, e);
                    block_c += ci; // also where nobody asks for it: else a*b+c would contract differently in the value
                    if constexpr (Park) ci.store(parked + begin + i); // padded to the lane width by the caller
                }
                loss += block_loss, c += block_c;
            }
            (void)count;
            r.loss += double(sum(loss));
            r.sum_c += double(sum(c));
        });
        return r;
    }

    void gradient(const Z* z, const Y* y, G* dz, const raw_sums& s, bool wild, const value* parked, double sum_c,
                  double scale) const {
        const constants k(s, program);
        if (k.anchor.near)
            gradient<true>(z, y, dz, k, wild, parked, sum_c, scale);
        else
            gradient<false>(z, y, dz, k, wild, parked, sum_c, scale);
    }
    template <bool Near>
    void gradient(const Z* z, const Y* y, G* dz, const constants k, bool wild, const value* parked, double sum_c,
                  double scale) const {
        const Program formula = this->program; // a copy that no store can alias
        const F total(sum_c), g(scale), b{double(beta)};
        constexpr bool lane_store = loads_directly<F, G>;
        const bool stream =
            streams<F, G> && beta == 0 && n >= stream_from && reinterpret_cast<std::uintptr_t>(dz) % F::alignment == 0;
        alignas(64) value buffer[leaf_size];
        backwards<single_sweep>(z, y, wild, [&](auto* zl, auto* yl, index_t begin, int count, int full) {
            const auto at = [&](int i) {
                F p, c;
                if constexpr (single_sweep) {
                    const dense_entry<F> e = k.template entry<Near>(F::load(zl + i), F::load(yl + i));
                    p = e.p, c = formula.c(k.row, e);
                } else {
                    p = k.anchor.student(F::load(zl + i)) * k.inv_sum_s, c = F::load(parked + begin + i);
                }
                return g * (c - p * total);
            };
            if constexpr (lane_store) {
                if (count == leaf_size) {
                    G* out = dz + begin;
                    if (stream)
                        for (int i = 0; i < full; i += F::width) {
                            prefetch<F>(zl + i - 2 * leaf_size);
                            if constexpr (single_sweep) prefetch<F>(yl + i - 2 * leaf_size);
                            if constexpr (streams<F, G>) at(i).stream(out + i);
                        }
                    else if (beta == 0)
                        for (int i = 0; i < full; i += F::width) at(i).store(out + i);
                    else
                        for (int i = 0; i < full; i += F::width) fma(b, F::load(out + i), at(i)).store(out + i);
                    return;
                }
            }
            for (int i = 0; i < full; i += F::width) at(i).store(buffer + i);
            store_converted(buffer, dz + begin, count);
        });
    }

    void store_converted(const value* from, G* to, int count) const {
        if (beta == 0)
            for (int i = 0; i < count; ++i) to[i] = element<G>::store(static_cast<arithmetic_t<G>>(from[i]));
        else
            for (int i = 0; i < count; ++i)
                to[i] = element<G>::store(
                    static_cast<arithmetic_t<G>>(value(beta) * static_cast<value>(element<G>::load(to[i])) + from[i]));
    }

    /// The row in float64, entry by entry.
    void careful_row(const Z* z, const Y* y, G* dz, double scale, const raw_sums& s, bool lse_given,
                     const floors& raised, row_outcome& out) const {
        using D = scalar<double>;
        const auto get = [](const auto* x, index_t i) { // within ±1e30, as the sweep saw it; -inf stays
            constexpr double lowest = double(staged_leaf<F>::lowest);
            const auto v = double(element<std::remove_cvref_t<decltype(*x)>>::load(x[i]));
            return is_neg_inf(v) ? v : std::min(std::max(v, lowest), -lowest);
        };
        double sum_z = 0, sum_y = 0;
        for (index_t i = 0; i < n; ++i) {
            const double zi = get(z, i), yi = get(y, i);
            sum_z += is_neg_inf(zi) ? 0 : std::exp((zi - s.z_s) * inv_s);
            sum_y += is_neg_inf(yi) ? 0 : std::exp((yi - s.y_t) * inv_t);
        }
        const double log_z = lse_given ? std::log1p(s.S) : std::log(sum_z), log_y = std::log(sum_y);
        double d_star = 0;
        const auto entry = [&](index_t i, bool for_value) {
            const double zi = get(z, i), yi = get(y, i);
            double lp = is_neg_inf(zi) ? -1e30 : (zi - s.z_s) * inv_s - log_z;
            double lq = is_neg_inf(yi) ? -1e30 : (yi - s.y_t) * inv_t - log_y;
            dense_entry<D> e;
            e.p = D(lp < -745 ? 0 : std::exp(lp));
            e.q = D(lq < -745 ? 0 : std::exp(lq));
            if (raised.q) lq = std::max(lq, raised.at);
            if (for_value && raised.p && lp < raised.at) { // p itself, too: not every program has a logarithm
                lp = raised.at;
                if (e.q.v > 0) e.p = D(std::exp(lp));
            }
            e.log_p = D(lp), e.log_q = D(lq);
            e.delta = D(lp - lq - d_star);
            return e;
        };
        double k = 1;
        if constexpr (single_sweep) k = program.exponent();
        const row_constants<D> row = careful_constants(program, entry(s.s, false), k);
        d_star = row.d_star.v;
        // The gradient of forward KL is p - q whatever the value: only a floor on the teacher's side reaches c.
        const auto c_of = [&](index_t i) { return program.c(row, entry(i, false)).v; };
        double loss = 0, sum_c = 0;
        for (index_t i = 0; i < n; ++i) {
            loss += pin(program.term(row, entry(i, true)).v);
            sum_c += pin(c_of(i));
        }
        out.loss = loss;
        if (beyond_float(loss) || beyond_float(sum_c)) {
            out.infinite = true;
            out.loss = 0;
            zero(dz);
            return;
        }
        if (loss_clamp > 0 && std::abs(loss) > loss_clamp) {
            out.clamped = true;
            zero(dz);
            return;
        }
        if (dz)
            for (index_t i = 0; i < n; ++i) {
                const dense_entry<D> e = entry(i, false);
                const double g = scale * inv_s * (program.c(row, e).v - e.p.v * sum_c);
                const double old = beta == 0 ? 0 : double(beta) * double(element<G>::load(dz[i]));
                dz[i] = element<G>::store(static_cast<arithmetic_t<G>>(old + g));
            }
    }
};

} // namespace OPD_ISA

} // namespace opd::detail
