// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense rows on the CPU, with the divergence behind a table of functions. dense_rows.hpp says what a row does; here
// the walk through its phases is compiled once for a pair of sources and every divergence, and what a divergence does
// to a tile, or to a row's state after a phase, once for its number types and every source:
//
//   dense_formula::tile     a phase's share of one tile, at least a leaf of 1,024 entries where a row has them
//   dense_formula::finish   what a row does with a phase's sums
//
// One call through a pointer a phase and tile is all that this costs. Rows of shards and of a GPU name their
// divergence as dense_rows does.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/cpu/lane_engine.hpp"
#include "opd/evaluate.hpp"
#include "opd/row_facts.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/dense_rows.hpp"
#include "opd/rows/renormalised_rows.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/select_rows.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/source.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

enum class dense_phase { sweep, overlap, terms, entrywise_terms, refine, normalisers, careful_overlap, careful_terms };

/// What a formula's functions know of the call.
struct dense_call {
    const env* of;
    const void* program;
    index_t vocab;
    float t_s, t_t; ///< temperatures
    bool gradient;
    alignas(16) std::byte storage[512] = {}; ///< a formula's own rows: dense_rows of the call without sources
};

/// A divergence of rows of these types, as the machine runs it.
template <class Z, class Y, class G>
struct dense_formula {
    using tile_type = row_tile<Z, Y, G>;
    void (*begin)(dense_call&); ///< before the others
    void (*start)(const dense_call&, const dense_state&, row_sweep&);
    void (*tile)(const dense_call&, const dense_state&, dense_phase, void* sums, const tile_type&);
    void (*finish)(const dense_call&, dense_state&, dense_phase, const void* sums);
    void (*write)(const dense_call&, const dense_state&, const tile_type&);
    void (*mix)(const dense_call&, dense_state&);                     ///< null where no selector mixes a sum
    bool (*weigh)(const void* program, const env&, selecting_state&); ///< null without a selector
    unsigned (*facts)(const void* program);                           ///< that its selector reads
    std::size_t (*scratch_bytes)(index_t vocab, bool gradient);
    bool single_sweep, overlaps;
};

/// What dense_rows asks of a frame and of sources, but for the tiles.
struct env_of_call {
    const opd::env& env;
};
template <class T, bool Tiles>
struct source_of_call {
    using logit_type = T;
    using gradient_type = T;
    static constexpr space memory_space = space::host;
    static constexpr bool one_tile = true;
    float temperature;
    bool gradient = false;
    bool has_gradient() const { return gradient; }
};
template <class T>
struct source_of_call<T, true> : source_of_call<T, false> {
    static constexpr bool made_in_tiles = true;
};
template <class Z, class G, bool Tiles>
struct student_of_call : source_of_call<Z, Tiles> {
    using gradient_type = G;
};

/// The functions of one divergence. `Tiles`: logits are made in tiles, and c is formed again for the gradient.
template <class Z, class Y, class G, class Program, bool Tiles>
struct formula_functions {
    using rows = dense_rows<lane_engine, env_of_call, student_of_call<Z, G, Tiles>, source_of_call<Y, Tiles>, Program>;
    using tile_type = row_tile<Z, Y, G>;

    static rows rows_of(const dense_call& c) {
        return {env_of_call{*c.of}, student_of_call<Z, G, Tiles>{{c.t_s, c.gradient}}, source_of_call<Y, Tiles>{c.t_t},
                *static_cast<const Program*>(c.program), c.vocab};
    }
    /// visit(phase) with the phase of dense_rows that this is, if the divergence has it.
    static void visit(dense_phase phase, auto&& v) {
        switch (phase) {
        case dense_phase::sweep:
            return v(typename rows::sweep{}, row_sweep{});
        case dense_phase::overlap:
            if constexpr (rows::overlaps) v(typename rows::overlap{}, overlap_sums{});
            return;
        case dense_phase::terms:
            if constexpr (!rows::single_sweep) v(typename rows::terms{}, two_sums{});
            return;
        case dense_phase::entrywise_terms:
            return v(typename rows::entrywise_terms{}, entrywise_sums{});
        case dense_phase::refine:
            if constexpr (refinable_divergence<Program>) v(typename rows::refine{}, double{});
            return;
        case dense_phase::normalisers:
            return v(typename rows::careful_normalisers{}, two_sums{});
        case dense_phase::careful_overlap:
            if constexpr (rows::overlaps) v(typename rows::careful_overlap{}, log_sum_of_any{});
            return;
        case dense_phase::careful_terms:
            return v(typename rows::careful_terms{}, two_sums{});
        }
    }
    static constexpr bool fits = sizeof(rows) <= sizeof(dense_call::storage) && alignof(rows) <= alignof(dense_call) &&
                                 std::is_trivially_destructible_v<rows>;
    static void begin(dense_call& c) {
        if constexpr (fits) new (c.storage) rows(rows_of(c));
    }
    /// body(rows) with the rows that `begin` made, or with new ones where a divergence is larger than their place.
    static auto with(const dense_call& c, auto&& body) {
        if constexpr (fits)
            return body(*std::launder(reinterpret_cast<const rows*>(c.storage)));
        else
            return body(rows_of(c));
    }
    static void start(const dense_call& c, const dense_state& st, row_sweep& sums) {
        with(c, [&](const rows& k) { sums = rows::sweep::start(k, st); });
    }
    static void tile(const dense_call& c, const dense_state& st, dense_phase phase, void* sums, const tile_type& t) {
        with(c, [&](const rows& k) {
            visit(phase, [&]<class Phase, class Sums>(Phase, const Sums&) {
                Phase::tile(k, st, *static_cast<Sums*>(sums), t, alone{});
            });
        });
    }
    static void finish(const dense_call& c, dense_state& st, dense_phase phase, const void* sums) {
        with(c, [&](const rows& k) {
            visit(phase, [&]<class Phase, class Sums>(Phase, const Sums&) {
                Phase::finish(k, st, *static_cast<const Sums*>(sums));
            });
        });
    }
    static void write(const dense_call& c, const dense_state& st, const tile_type& t) {
        with(c, [&](const rows& k) { rows::write::tile(k, st, t, alone{}); });
    }
    static void mix(const dense_call& c, dense_state& st) {
        if constexpr (rows::mixes) with(c, [&](const rows& k) { rows::mix::run(k, st, alone{}); });
    }
    static bool weigh(const void* program, const env& e, selecting_state& st) {
        return detail::weigh(*static_cast<const Program*>(program), e, st);
    }
    static unsigned facts(const void* program) { return facts_read(*static_cast<const Program*>(program)); }
    static std::size_t scratch_bytes(index_t vocab, bool gradient) {
        return lane_engine::scratch_bytes<rows>(vocab, gradient);
    }
    static constexpr auto mixer() -> decltype(&mix) {
        if constexpr (rows::mixes)
            return &mix;
        else
            return nullptr;
    }
    static constexpr auto weigher() -> decltype(&weigh) {
        if constexpr (has_selector<Program>)
            return &weigh;
        else
            return nullptr;
    }
    static constexpr dense_formula<Z, Y, G> table = {
        &begin,        &start, &tile, &finish, &write, mixer(), weigher(), &facts, &scratch_bytes, rows::single_sweep,
        rows::overlaps};
};

/// A divergence as an estimator of a job, whatever it is: its functions, and its parameters, the caller's where they
/// stay, or a copy.
template <class Z, class Y, class G>
struct any_formula {
    const dense_formula<Z, Y, G>* functions = nullptr;
    const void* given = nullptr; ///< the parameters; null: they are in `own`
    alignas(16) std::byte own[96] = {};

    const void* program() const { return given != nullptr ? given : own; }
    template <class Program>
    static constexpr bool holds = sizeof(Program) <= sizeof own &&
                                  alignof(Program) <= 16 && std::is_trivially_copyable_v<Program>;
};
template <class E>
inline constexpr bool is_any_formula = false;
template <class Z, class Y, class G>
inline constexpr bool is_any_formula<any_formula<Z, Y, G>> = true;

/// visit(program, stays) with an estimator's divergence, the selector beside it: of one that is chosen at run time
/// (any_dense) the one it names. `stays`: it lies where it is as long as the estimator.
template <class Estimator, class Visit>
void with_program(const Estimator& e, Visit&& visit) {
    if constexpr (!chosen_at_run_time<Estimator>)
        visit(e, std::true_type{});
    else if constexpr (has_selector<Estimator>)
        e.visit([&]<class D>(const D& d) {
            visit(typename Estimator::template on<D>{d, e.selector}, std::false_type{});
        });
    else
        e.visit([&](const auto& d) { visit(d, std::false_type{}); });
}
/// An estimator's divergence as any. `Tiles`: logits may be made in tiles, where that makes a difference to it.
template <class Z, class Y, class G, bool Tiles, class Estimator>
any_formula<Z, Y, G> formula_of(const Estimator& e) {
    any_formula<Z, Y, G> to;
    with_program(e, [&]<class Program, class Stays>(const Program& program, Stays) {
        constexpr bool parks =
            !single_sweep_divergence<Program> || power_divergence<Program> || keeps_students<Program>();
        to.functions = &formula_functions < Z, Y, G, Program, Tiles && parks > ::table;
        if constexpr (Stays::value) {
            to.given = &program;
        } else {
            static_assert(any_formula<Z, Y, G>::template holds<Program>);
            new (to.own) Program(program);
        }
    });
    return to;
}

/// Rows of a divergence of any kind, from these sources: the phases of dense_rows, in its order.
template <class Frame, class Student, class Teacher>
struct dense_machine {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using Y = typename Teacher::logit_type;
    using F = typename lane_engine::number<Z, Y, G>;
    using state_type = dense_state;
    using tile_type = row_tile<Z, Y, G>;
    static constexpr bool one_tile = Student::one_tile && Teacher::one_tile;

    Frame frame;
    Student student;
    Teacher teacher;
    any_formula<Z, Y, G> formula;
    index_t vocab;
    unsigned facts; ///< that a selector reads
    dense_call call;
    std::size_t student_from, teacher_from; ///< whose the team's scratch is from there on; the engine's lies first

    dense_machine(const Frame& frame_, const Student& student_, const Teacher& teacher_,
                  const any_formula<Z, Y, G>& formula_, index_t vocab_)
        : frame(frame_), student(student_), teacher(teacher_), formula(formula_), vocab(vocab_),
          facts(formula_.functions->facts(formula_.program())), call{&frame.env,
                                                                     formula.program(),
                                                                     vocab_,
                                                                     student_.temperature,
                                                                     teacher_.temperature,
                                                                     student_.has_gradient()},
          student_from(formula_.functions->scratch_bytes(vocab_, student_.has_gradient())),
          teacher_from(student_from + scratch_of_source(student_)) {
        formula.functions->begin(call);
    }
    dense_machine(const dense_machine&) = delete; // `call` knows where `frame` lies

    std::size_t scratch_bytes() const { return teacher_from + scratch_of_source(teacher); }
    index_t tile_size() const { return student.tile_size(); }
    index_t tile_size_t() const { return teacher.tile_size(); }
    row_place of_student(const state_type& st) const { return {st.row, st.scratch + student_from}; }
    row_place of_teacher(const state_type& st) const { return {st.row, st.scratch + teacher_from}; }
    tile_type tile(const state_type& st, index_t begin, index_t count) const {
        return {student.tile(of_student(st), begin), teacher.tile(of_teacher(st), begin),
                student.has_gradient() ? student.gradient_tile(of_student(st), begin) : nullptr, begin, count};
    }
    bool live(const state_type& st) const { return st.kept && !st.report.bad && st.next != row_step::write_zero; }

    void row(auto& team) const {
        value(team);
        gradient(team);
    }
    void value(auto& team) const {
        team.template fold<sweep>(*this);
        team.template fold<sweep>(*this); // of a row that only looked far apart
        team.template fold<find_position>(*this);
        const bool mixes = formula.functions->mix != nullptr;
        if (mixes) team.template fold<measure>(*this);
        team.template each<mix>(*this);
        team.template fold<phase<dense_phase::overlap, overlap_sums, true>>(*this);
        team.template fold<phase<dense_phase::terms, two_sums, true>>(*this);
        team.template fold<phase<dense_phase::entrywise_terms, entrywise_sums, true>>(*this);
        team.template fold<phase<dense_phase::refine, double, true>>(*this);
        team.template fold<phase<dense_phase::normalisers, two_sums, false>>(*this);
        team.template fold<phase<dense_phase::careful_overlap, log_sum_of_any, false>>(*this);
        team.template fold<phase<dense_phase::careful_terms, two_sums, false>>(*this);
        if (!mixes) team.template fold<measure>(*this);
        team.template each<select>(*this);
    }
    void gradient(auto& team) const {
        team.template each<write>(*this);
        team.template each<zero_tiles<dense_machine>>(*this);
        team.template each<clear_rest<dense_machine>>(*this);
    }

    /// The step at which a row needs a phase.
    bool due(dense_phase p, const state_type& st) const {
        const auto& f = *formula.functions;
        switch (p) {
        case dense_phase::sweep:
            return st.good() && (!st.report.swept || st.next == row_step::sweep_again);
        case dense_phase::overlap:
            return f.overlaps && (st.next == row_step::terms || st.next == row_step::entrywise);
        case dense_phase::terms:
            return st.next == row_step::terms;
        case dense_phase::entrywise_terms:
            return st.next == row_step::entrywise;
        case dense_phase::refine:
            return st.next == row_step::refine;
        case dense_phase::careful_overlap:
            return f.overlaps && st.next == row_step::careful;
        default:
            return st.next == row_step::careful;
        }
    }
    template <dense_phase P, class Sums, bool Backwards>
    struct phase : over_tiles<phase<P, Sums, Backwards>, Backwards> {
        static bool due(const dense_machine& k, const state_type& st) { return k.due(P, st); }
        static Sums start(const dense_machine& k, const state_type& st) {
            Sums sums = {};
            if constexpr (P == dense_phase::sweep) k.formula.functions->start(k.call, st, sums);
            return sums;
        }
        static void tile(const dense_machine& k, const state_type& st, Sums& sums, const tile_type& t, alone) {
            k.formula.functions->tile(k.call, st, P, &sums, t);
        }
        static void finish(const dense_machine& k, state_type& st, const Sums& sums) {
            k.formula.functions->finish(k.call, st, P, &sums);
        }
    };
    using sweep = phase<dense_phase::sweep, row_sweep, false>;
    using measure = measure_entropies<lane_engine, F, true>;

    /// The weights of a sum, before its value.
    struct mix {
        static bool due(const dense_machine& k, const state_type& st) {
            return k.formula.functions->mix != nullptr && st.good();
        }
        static void run(const dense_machine& k, state_type& st, alone) { k.formula.functions->mix(k.call, st); }
    };
    struct select {
        static bool due(const dense_machine& k, const state_type& st) {
            return k.formula.functions->weigh != nullptr && st.good();
        }
        static void run(const dense_machine& k, state_type& st, alone) {
            if (!k.formula.functions->weigh(k.formula.program(), k.frame.env, st)) st.next = row_step::write_zero;
        }
    };
    struct write : writes_tiles<write> {
        static bool due(const dense_machine& k, const state_type& st) { return k.student.has_gradient() && k.live(st); }
        static void tile(const dense_machine& k, const state_type& st, const tile_type& t, alone) {
            k.formula.functions->write(k.call, st, t);
        }
    };
};

/// Rows of a renormalised support with the divergence behind its table.
struct renormalised_formula {
    any_formula<double, double, double> on_support;
};
inline const any_formula<double, double, double>& program_on_support(const renormalised_formula& e) {
    return e.on_support;
}
template <class Frame, class Student, class Teacher, class Z, class Y, class G>
struct rows_on_support<lane_engine, Frame, Student, Teacher, any_formula<Z, Y, G>> {
    using type = dense_machine<Frame, Student, Teacher>;
};
template <class Engine, class Student, class Teacher, space S, class Frame>
auto rows_of(const row_job<Student, Teacher, renormalised_formula, S>& job, const Frame& frame) {
    return renormalised_rows<Engine, Frame, Student, Teacher, renormalised_formula>(frame, job.student, job.teacher,
                                                                                    job.estimator, job.vocab);
}

template <class Engine, class Student, class Teacher, class Z, class Y, class G, space S, class Frame>
auto rows_of(const row_job<Student, Teacher, any_formula<Z, Y, G>, S>& job, const Frame& frame) {
    return dense_machine<Frame, Student, Teacher>(frame, job.student, job.teacher, job.estimator, job.vocab);
}

} // namespace OPD_ISA
} // namespace opd::detail
