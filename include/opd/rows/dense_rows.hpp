// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a dense divergence: value, and gradient dz = g (c - p Σ c) with g = w_r f_r / T. A row is a state machine;
// each phase says which comes next:
//
//   sweep       normalisers and raw sums; programs that have them know value and Σ c now      1 read
//               again, with all sums, of a row that only looked as if p and q were far apart  1 read
//   overlap     Σ min(p, q), of programs that read it                                         1 read
//   terms       Σ term and Σ c of programs that need both normalisers first                   1 read
//   entrywise   the same with differences in double: infinite rows under `floor`, rows whose
//               raw sums lost their digits on the way to their anchor, rows of unequal
//               temperatures that nearly agree                                                1 read
//   refine      a value near 0: a sum of terms of which none is negative                      1 read
//   careful     float64, two plain passes: rows that float cannot carry                       2 reads
//   measure     entropies and overlap, where env.measure or a selector asks                   1 read
//   write       the gradient                                                                  1 read, 1 write
//
// An Engine (lane_engine.hpp, thread_engine.hpp) does what is V-sized but for the careful passes: sweep, terms, refine
// and the gradient of each kind. A Bucket is one entry more, behind those of the tiles, in every sum: rest_bucket.hpp
// has the only one; all other rows have `no_bucket`.
#pragma once

#include <cmath>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/select_rows.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/source.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

enum class row_step {
    write_zero,
    sweep_again,
    terms,
    entrywise,
    refine,
    careful,
    write,
    write_entrywise,
    write_careful
};

struct two_sums {
    double a = 0, b = 0;
    OPD_HD static two_sums merge(two_sums x, two_sums y) { return {x.a + y.a, x.b + y.b}; }
};

/// Σ term and Σ c, and whether some entry was beyond float.
struct entrywise_sums {
    double loss = 0, c = 0;
    bool wide = false;
    OPD_HD static entrywise_sums merge(entrywise_sums x, entrywise_sums y) {
        return {x.loss + y.loss, x.c + y.c, x.wide || y.wide};
    }
};

/// Whether there is no finite number to report or to store.
OPD_HD inline bool beyond_float(const double& x) { return !is_finite(x) || x > 1e30 || x < -1e30; }

struct dense_state : selecting_state {
    row_step next = row_step::write_zero;
    row_sweep swept = {}; ///< of an infinite row under `floor`, the teacher's logit at the anchor is raised
    double sum_c = 0;
    double top_y = 0;       ///< the teacher's logit at the anchor, as it is
    bool entrywise = false; ///< the gradient, too, is taken with differences in double
    raised_logs raised = {};
    double log_z = 0, log_y = 0;                ///< careful: log normalisers relative to the anchors
    row_constants<scalar<double>> careful = {}; ///< kept, for dz may overwrite z
};

/// No entry behind those of the tiles.
struct no_bucket {
    static constexpr bool none = true;
    using state_type = dense_state;
    OPD_HD OPD_INLINE static void sweep(const auto&, auto&) {}
    OPD_HD OPD_INLINE static void add(const auto&, const dense_state&, const auto&) {}
    OPD_HD OPD_INLINE static bool outweighs(const dense_state&) { return false; }
    OPD_HD OPD_INLINE static double lse(const dense_state& st) { return st.swept.sums.lse(); }
    OPD_HD OPD_INLINE static void add_to_normalisers(const auto&, const dense_state&) {}
    OPD_HD OPD_INLINE static void raise_top(const dense_state&, double&, double&) {}
    OPD_HD OPD_INLINE static void settle(const auto&, auto&) {}
    template <class Rows, class Team>
    OPD_HD OPD_INLINE static void pull_back(const Rows& k, Team& team) {
        team.template each<clear_rest<Rows>>(k);
    }
};

/// Whether a divergence that one sweep serves forms p again for its gradient, and no power of p/q.
template <class Program>
consteval bool keeps_students() {
    if constexpr (single_sweep_divergence<Program> && !power_divergence<Program>)
        return raw_sums_needed(Program::raw).student_delta && !requires { Program::raw_for_value; };
    else
        return false;
}

template <class Engine_, class Frame, class Student, class Teacher, class Program_, class Bucket = no_bucket>
struct dense_rows {
    using Engine = Engine_;
    using Program = Program_;
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using Y = typename Teacher::logit_type;
    using F = typename Engine::template number<Z, Y, G>;
    using D = scalar<double>;
    using anchors = typename Engine::template anchors<F>;
    using numbers = row_numbers<F, anchors, Program>;
    using entry_numbers = entrywise_numbers<F, anchors, Program>;
    using state_type = typename Bucket::state_type;
    using tile_type = row_tile<Z, Y, G>;
    static constexpr bool single_sweep = single_sweep_divergence<Program>;
    static constexpr bool mixes = selector_mixes<Program>(); ///< a selector chooses the weights of a sum
    static constexpr bool overlaps = reads_overlap<Program>;
    static constexpr bool spreads = true; ///< over several blocks of a GPU: no phase asks much of the team's state
    static constexpr bool one_tile = Student::one_tile && Teacher::one_tile;
    /// Exponentials from the sweep until the terms, p and c from there until the gradient's: twice as many numbers as a
    /// row has, so not where rows are made in tiles.
    static constexpr bool parks = !single_sweep && !made_in_tiles<Student> && !made_in_tiles<Teacher>;
    /// The student's exponentials and the powers of its ratio, from the sweep until the gradient's pass.
    static constexpr bool parks_powers =
        power_divergence<Program> && !made_in_tiles<Student> && !made_in_tiles<Teacher>;
    /// The sweep of a row that looks far apart leaves out what only the gradient of near rows needs.
    static constexpr bool looks_first = requires {
        requires Engine::looks_first && Program::gradient_is_difference && Bucket::none && !in_shards<Frame>;
    };
    static constexpr bool sweep_keeps = [] {
        if constexpr (requires { Engine::template keeps<dense_rows>; })
            return Engine::template keeps<dense_rows>;
        else
            return false;
    }();
    /// The student's exponentials of a row's end, from the sweep until the gradient's pass.
    static constexpr bool parks_students =
        keeps_students<Program>() && !made_in_tiles<Student> && !made_in_tiles<Teacher>;
    static constexpr raw_sums_needed need = [] {
        if constexpr (single_sweep)
            return raw_sums_needed(Program::raw);
        else
            return raw_sums_needed{};
    }();
    static constexpr raw_sums_needed need_for_value = [] {
        if constexpr (single_sweep && requires { Program::raw_for_value; })
            return raw_sums_needed(Program::raw_for_value);
        else
            return need;
    }();

    Frame frame;
    Student student;
    Teacher teacher;
    Program program;
    index_t vocab; ///< ids of the softmax
    double inv_s, inv_t;
    std::size_t student_from = 0,
                teacher_from = 0; ///< whose the team's scratch is from there on; the engine's lies first

    dense_rows(const Frame& frame_, const Student& student_, const Teacher& teacher_, const Program& program_,
               index_t vocab_)
        : frame(frame_), student(student_), teacher(teacher_), program(program_), vocab(vocab_),
          inv_s(1 / double(student_.temperature)), inv_t(1 / double(teacher_.temperature)),
          student_from(Engine::template scratch_bytes<dense_rows>(vocab_, student_.has_gradient())),
          teacher_from(student_from + scratch_of_source(student_)) {}

    /// What a team needs for a row: the engine's, the student's, the teacher's.
    std::size_t scratch_bytes() const { return teacher_from + scratch_of_source(teacher); }
    OPD_HD index_t tile_size() const { return student.tile_size(); }
    OPD_HD index_t tile_size_t() const { return teacher.tile_size(); }
    OPD_HD row_place of_student(const state_type& st) const { return {st.row, st.scratch + student_from}; }
    OPD_HD row_place of_teacher(const state_type& st) const { return {st.row, st.scratch + teacher_from}; }
    OPD_HD tile_type tile(const state_type& st, index_t begin, index_t count) const {
        return {student.tile(of_student(st), begin), teacher.tile(of_teacher(st), begin),
                student.has_gradient() ? student.gradient_tile(of_student(st), begin) : nullptr,
                first_id(frame) + begin, count};
    }
    /// The program as a row has it.
    OPD_HD OPD_INLINE std::conditional_t<mixes, Program, const Program&> program_of(const state_type& st) const {
        if constexpr (mixes) {
            Program p = program;
            p.a = st.mixed.a, p.b = st.mixed.b;
            return p;
        } else {
            return program;
        }
    }
    OPD_HD double exponent() const { return exponent_of(program); }
    OPD_HD bool infinite_teacher_zero(const state_type& st) const {
        return detail::infinite_where_teacher_zero(program_of(st));
    }
    OPD_HD bool infinite_student_zero(const state_type& st) const {
        return detail::infinite_where_student_zero(program_of(st));
    }
    OPD_HD entry_numbers entrywise(const state_type& st) const {
        return {st.swept.sums, program_of(st), st.raised, exponent()};
    }

    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        value(team);
        gradient(team);
    }
    OPD_HD OPD_INLINE void value(auto& team) const {
        Bucket::sweep(*this, team);
        fold_sweep<Engine, sweep>(*this, team);
        if constexpr (looks_first) team.template fold<sweep>(*this);
        if constexpr (has_selector<Program>) team.template fold<find_position>(*this);
        if constexpr (mixes) {
            team.template fold<measure>(*this);
            team.template each<mix>(*this);
        }
        if constexpr (overlaps) team.template fold<overlap>(*this);
        if constexpr (!single_sweep) team.template fold<terms>(*this);
        team.template fold<entrywise_terms>(*this);
        if constexpr (refinable_divergence<Program>) team.template fold<refine>(*this);
        team.template fold<careful_normalisers>(*this);
        if constexpr (overlaps) team.template fold<careful_overlap>(*this);
        team.template fold<careful_terms>(*this);
        if constexpr (!mixes) team.template fold<measure>(*this);
        if constexpr (has_selector<Program>) team.template each<select>(*this);
        Bucket::settle(*this, team);
    }
    OPD_HD OPD_INLINE void gradient(auto& team) const {
        team.template each<write>(*this);
        team.template each<zero_tiles<dense_rows>>(*this);
        Bucket::pull_back(*this, team);
    }
    /// Whether the row has a gradient.
    OPD_HD bool live(const state_type& st) const {
        return st.kept && !st.report.bad && st.next != row_step::write_zero;
    }

    /// Normalisers and raw sums; decides how the row goes on.
    struct sweep : over_tiles<sweep, false> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) {
            return st.good() && (!st.report.swept || st.next == row_step::sweep_again);
        }
        OPD_HD static row_sweep start(const dense_rows& k, const state_type& st) {
            const bool phi_power = k.student.has_gradient() ? need.phi_power : need_for_value.phi_power;
            return begun_sweep<Engine>(row_sweep::begin(k.inv_s, k.inv_t, k.exponent(), phi_power), st);
        }
        OPD_HD OPD_INLINE static void tile(const dense_rows& k, const state_type& st, row_sweep& p, const tile_type& t,
                                           auto at) {
            if constexpr (sweep_keeps && parks_students) {
                Engine::sweep_and_keep(k, st, p, t, at);
            } else {
                if constexpr (sweep_keeps)
                    if (!single_sweep || k.student.has_gradient()) return Engine::sweep_and_keep(k, st, p, t, at);
                if constexpr (looks_first)
                    if (t.begin == 0) {
                        p.apart = k.student.has_gradient() && st.next != row_step::sweep_again &&
                                  Engine::looks_apart(t, k.vocab, k.inv_s, k.inv_t);
                        p.for_value = p.apart && t.count == k.vocab; // tiles may be dear to make again
                    }
                if (k.student.has_gradient() && !p.for_value)
                    Engine::template sweep<F, true, need>(p, t, at);
                else
                    Engine::template sweep<F, true, need_for_value>(p, t, at);
            }
        }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        OPD_HD static void finish(const dense_rows& k, state_type& st, const row_sweep& all) {
            st.swept = all, st.report.swept = true;
            Bucket::add(k, st, st.swept);
            if (k.student.has_gradient() && !all.apart)
                st.swept.template close<true, need>();
            else
                st.swept.template close<true, need_for_value>();
            if constexpr (mixes)
                st.report.bad |= st.swept.contents.bad;
            else
                k.begin_after_sweep(st);
        }
    };
    /// The weights of the sum, before its value.
    struct mix : if_good, by_one<mix> {
        OPD_HD static void once(const dense_rows& k, state_type& st) {
            st.mixed = mixed_by(k.program, facts_before(k.frame.env, st));
            st.report.bad = !(is_finite(st.mixed.a) && is_finite(st.mixed.b) && st.mixed.a >= 0 && st.mixed.b >= 0);
            if (!st.report.bad) k.begin_after_sweep(st);
        }
    };
    struct select : if_good, by_one<select> {
        OPD_HD static void once(const dense_rows& k, state_type& st) {
            if (!weigh(k.program, k.frame.env, st)) st.next = row_step::write_zero;
        }
    };

    /// From what the sweep found: the row is bad, infinite, beyond float, to be seen entry by entry, or done.
    OPD_HD void begin_after_sweep(state_type& st) const {
        raw_sums& s = st.swept.sums;
        const auto& found = st.swept.contents;
        const auto& e = frame.env;
        row_report& out = st.report;
        const double* given = e.given_lse.empty() ? nullptr : &e.given_lse[st.row];
        st.next = row_step::write_zero;
        st.sum_c = 0;
        out.bad = found.bad || (given && !is_finite(*given));
        if (out.bad) return;
        if (given) s.student_mass = ::expm1(*given - s.z_s * s.inv_s);
        st.top_y = s.y_s;
        out.lse = given ? *given : Bucket::lse(st);
        const bool teacher_zero = found.teacher_zero && infinite_teacher_zero(st);
        const bool student_zero = found.student_zero && infinite_student_zero(st);
        out.infinite = teacher_zero || student_zero;
        if (out.infinite && e.on_infinite.act != infinite::action::floor) return;
        st.raised = {teacher_zero, student_zero, e.on_infinite.floor_at};
        if (teacher_zero) {
            const double lowest = s.y_t + (st.raised.floor + ::log1p(s.teacher_mass)) / s.inv_t;
            if (s.y_s < lowest) s.y_s = lowest; // d* and delta follow
            const double rest = double(whole_vocab(frame, vocab) - 1) * ::exp(st.raised.floor);
            if (s.least_rest < rest) s.least_rest = rest;
        }
        const double gap = (s.y_t - s.y_s) * inv_t; // how little the teacher gives the student's top token
        constexpr bool tolerant =
            need.student_delta && !need.student_power && !need.teacher_delta; // reverse KL never forms e^-delta
        st.entrywise = out.infinite || (single_sweep && st.swept.lost_digits);
        if (Bucket::outweighs(st) || (st.swept.reach > steepest && !st.entrywise) || gap > (tolerant ? 1e29 : 40)) {
            st.next = row_step::careful;
        } else if (st.entrywise) {
            st.next = row_step::entrywise;
        } else if constexpr (single_sweep) {
            const double loss = program_of(st).value(s);
            if (looks_first && st.swept.apart && !far_apart(loss, s)) {
                st.next = row_step::sweep_again;
                if (st.swept.for_value) return;
                st.swept.apart = false; // nothing is missing: as if it had been swept again
                st.swept.template close<true, need>();
                return begin_after_sweep(st);
            }
            if (s.s_may_be_unlike() && hides_rest<F>(program_of(st), loss, s))
                st.entrywise = s.unlike = true, st.next = row_step::entrywise;
            else {
                anchor_at_mean(s, program_of(st));
                refine_or_finish(st, loss, program_of(st).sum_c(s));
            }
        } else {
            st.next = row_step::terms;
        }
    }
    /// Where p* and q* are far apart, if the program knows the mean slope and float carries it.
    OPD_HD static void anchor_at_mean(raw_sums& s, const Program& p) {
        if constexpr (requires { p.from_mean(s); })
            if (s.ratio() == 0) {
                s.from_mean = p.from_mean(s);
                const double power = p.exponent() * (s.d_star() - s.from_mean);
                s.by_mean = power < steepest && power > -steepest;
            }
    }
    /// A value that float carried: summed again if it lost its digits, or if its gradient's differences would, else
    /// final.
    OPD_HD void refine_or_finish(state_type& st, double loss, double sum_c) const {
        st.report.loss = loss, st.sum_c = sum_c;
        if (!st.entrywise && rounds_differences<F>(loss, st.swept.sums)) {
            st.entrywise = true, st.next = row_step::entrywise;
            return;
        }
        if (beyond_float(loss) || beyond_float(sum_c)) {
            st.next = row_step::careful;
            return;
        }
        if constexpr (refinable_divergence<Program>)
            if (!st.report.infinite && loses_digits<F>(program_of(st), loss, st.swept.sums)) {
                st.next = row_step::refine;
                return;
            }
        finish_value(st);
    }
    OPD_HD void finish_value(state_type& st) const {
        st.report.clamped = clamps(frame.env, st.report.loss);
        if (st.report.clamped)
            st.next = row_step::write_zero;
        else
            st.next = st.entrywise ? row_step::write_entrywise : row_step::write;
    }

    /// Of a row that float carries; one whose overlap it does not carry goes on in float64.
    struct overlap : sums_over_tiles<overlap, overlap_sums, true> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) {
            return st.next == row_step::terms || st.next == row_step::entrywise;
        }
        OPD_HD OPD_INLINE static void tile(const dense_rows& k, const state_type& st, overlap_sums& p,
                                           const tile_type& t, auto at) {
            Engine::overlap(k, st, p, t, at);
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, overlap_sums all) {
            Bucket::add(k, st, all);
            if (all.far_apart())
                st.next = row_step::careful;
            else
                st.swept.sums.log_overlap = all.log();
        }
    };

    struct terms : sums_over_tiles<terms, two_sums, true> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) { return st.next == row_step::terms; }
        OPD_HD OPD_INLINE static void tile(const dense_rows& k, const state_type& st, two_sums& p, const tile_type& t,
                                           auto at) {
            Engine::terms(k, st, p, t, at);
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, two_sums all) {
            Bucket::add(k, st, all);
            k.refine_or_finish(st, all.a, all.b);
        }
    };

    struct entrywise_terms : sums_over_tiles<entrywise_terms, entrywise_sums, true> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) { return st.next == row_step::entrywise; }
        OPD_HD OPD_INLINE static void tile(const dense_rows& k, const state_type& st, entrywise_sums& p,
                                           const tile_type& t, auto at) {
            Engine::entrywise_terms(k, st, p, t, at);
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, entrywise_sums all) {
            Bucket::add(k, st, all);
            if (all.wide)
                st.next = row_step::careful;
            else
                k.refine_or_finish(st, all.loss, all.c);
        }
    };

    /// The value as a sum of terms of which none is negative, log p - log q in double but for the normalisers.
    struct refine : sums_over_tiles<refine, double, true> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) { return st.next == row_step::refine; }
        OPD_HD OPD_INLINE static void tile(const dense_rows& k, const state_type& st, double& p, const tile_type& t,
                                           auto at) {
            Engine::refine(k, st, p, t, at);
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, double all) {
            Bucket::add(k, st, all);
            st.report.loss = all;
            k.finish_value(st);
        }
    };

    struct measure : measure_entropies<Engine, F, true> {
        OPD_HD static void finish(const dense_rows& k, state_type& st, entropy_sums all) {
            Bucket::add(k, st, all);
            measure_entropies<Engine, F, true>::finish(k, st, all);
        }
    };

    // --- the row in float64, entry by entry --------------------------------------------------------------------------

    /// Up to 1e30, as the sweep saw it; a mask is -inf.
    OPD_HD static double within(const auto& stored) {
        const double x = load_log(stored);
        constexpr double most = double(typename F::value_type(1e30));
        return x > most ? most : x;
    }

    struct careful_normalisers : sums_over_tiles<careful_normalisers, two_sums, false> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) { return st.next == row_step::careful; }
        OPD_HD static void tile(const dense_rows& k, const state_type& st, two_sums& p, const tile_type& t, auto at) {
            for (index_t i = at.id; i < t.count; i += at.count) {
                const double z = within(t.z[i]), y = within(t.y[i]);
                p.a += is_neg_inf(z) ? 0 : ::exp((z - st.swept.sums.z_s) * k.inv_s);
                p.b += is_neg_inf(y) ? 0 : ::exp((y - st.swept.sums.y_t) * k.inv_t);
            }
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, two_sums all) {
            st.log_z = k.frame.env.given_lse.empty() ? ::log(all.a) : ::log1p(st.swept.sums.student_mass);
            st.log_y = ::log(all.b);
            Bucket::add_to_normalisers(k, st);
            double z = st.swept.sums.z_s, y = st.top_y <= -1e30 ? neg_inf<double>() : st.top_y; // as the sweep has it
            Bucket::raise_top(st, z, y);
            st.careful = careful_constants(k.program_of(st), k.careful_entry(st, z, y, false, 0), k.exponent());
        }
    };

    /// Of logarithms. None: infinite, for no token has mass on both sides. Under `floor` log Σ min(p, q) is the floor
    /// then, and the gradient 0: what either side lacks is a logit of -inf.
    struct careful_overlap : sums_over_tiles<careful_overlap, log_sum_of_any, false> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) { return st.next == row_step::careful; }
        OPD_HD static void tile(const dense_rows& k, const state_type& st, log_sum_of_any& p, const tile_type& t,
                                auto at) {
            for (index_t i = at.id; i < t.count; i += at.count)
                p.add(k.careful_log_min(st, within(t.z[i]), within(t.y[i])));
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, log_sum_of_any all) {
            Bucket::add(k, st, all);
            const infinite& policy = k.frame.env.on_infinite;
            const bool disjoint = all.none() && infinite_where_disjoint(k.program_of(st));
            st.report.infinite |= disjoint;
            if (disjoint && policy.act != infinite::action::floor) {
                st.next = row_step::write_zero;
                return;
            }
            set_overlap(st.careful, all, policy.floor_at);
        }
    };
    /// log min(p, q), of what the logits are.
    OPD_HD double careful_log_min(const state_type& st, double z, double y) const {
        if (is_neg_inf(z) || is_neg_inf(y)) return neg_inf<double>();
        const double lp = (z - st.swept.sums.z_s) * inv_s - st.log_z, lq = (y - st.swept.sums.y_t) * inv_t - st.log_y;
        return lp < lq ? lp : lq;
    }

    struct careful_terms : sums_over_tiles<careful_terms, two_sums, false> {
        OPD_HD static bool due(const dense_rows&, const state_type& st) { return st.next == row_step::careful; }
        OPD_HD static void tile(const dense_rows& k, const state_type& st, two_sums& p, const tile_type& t, auto at) {
            const row_constants<D> row = st.careful;
            const auto& formula = k.program_of(st);
            double loss = p.a, c = p.b;
            for (index_t i = at.id; i < t.count; i += at.count) {
                const double z = within(t.z[i]), y = within(t.y[i]);
                loss += pin(formula.term(row, k.careful_entry(st, z, y, true, row.d_star.v)).v);
                c += pin(formula.c(row, k.careful_entry(st, z, y, false, row.d_star.v)).v);
            }
            p = {loss, c};
        }
        OPD_HD static void finish(const dense_rows& k, state_type& st, two_sums all) {
            Bucket::add(k, st, all);
            st.report.careful = true;
            st.report.loss = all.a, st.sum_c = all.b;
            st.next = row_step::write_zero;
            if (beyond_float(all.a) || beyond_float(all.b)) {
                st.report.infinite = true;
                st.report.loss = 0;
                return;
            }
            st.report.clamped = clamps(k.frame.env, all.a);
            if (!st.report.clamped) st.next = row_step::write_careful;
        }
    };

    /// The gradient of forward KL is p - q whatever the value: only a floor on the teacher's side reaches c.
    OPD_HD dense_entry<D> careful_entry(const state_type& st, double z, double y, bool for_value, double d_star) const {
        double lp = is_neg_inf(z) ? -1e30 : (z - st.swept.sums.z_s) * inv_s - st.log_z;
        double lq = is_neg_inf(y) ? -1e30 : (y - st.swept.sums.y_t) * inv_t - st.log_y;
        dense_entry<D> e;
        e.p = D(lp < -745 ? 0 : ::exp(lp));
        e.q = D(lq < -745 ? 0 : ::exp(lq));
        if (st.raised.q && lq < st.raised.floor) lq = st.raised.floor;
        if (for_value && st.raised.p && lp < st.raised.floor) { // p itself, too: not every program has a logarithm
            lp = st.raised.floor;
            if (e.q.v > 0) e.p = D(::exp(lp));
        }
        e.log_p = D(lp), e.log_q = D(lq);
        e.delta = D(lp - lq - d_star);
        return e;
    }
    OPD_HD void careful_gradient(const state_type& st, const tile_type& t, auto at) const {
        const row_constants<D> row = st.careful;
        const float beta = frame.env.beta;
        const auto& formula = program_of(st);
        for (index_t i = at.id; i < t.count; i += at.count) {
            const dense_entry<D> e = careful_entry(st, within(t.z[i]), within(t.y[i]), false, row.d_star.v);
            const double g = st.factor * inv_s * (formula.c(row, e).v - e.p.v * st.sum_c);
            const double old = beta == 0 ? 0 : double(beta) * double(element<G>::load(t.dz[i]));
            t.dz[i] = element<G>::store(static_cast<arithmetic_t<G>>(old + g));
        }
    }

    struct write : writes_tiles<write> {
        OPD_HD static bool due(const dense_rows& k, const state_type& st) {
            return k.student.has_gradient() && k.live(st);
        }
        OPD_HD OPD_INLINE static void tile(const dense_rows& k, const state_type& st, const tile_type& t, auto at) {
            if (st.next == row_step::write)
                Engine::gradient(k, st, t, at);
            else if (st.next == row_step::write_entrywise)
                Engine::entrywise_gradient(k, st, t, at);
            else
                k.careful_gradient(st, t, at);
        }
        /// Of a team that has lost what its scratch held: that again.
        OPD_HD static void restore(const dense_rows& k, const state_type& st, auto at) {
            if (st.next != row_step::write) return;
            if constexpr (sweep_keeps) (void)sweep::part(k, st, at);
            if constexpr (!single_sweep) (void)terms::part(k, st, at);
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
