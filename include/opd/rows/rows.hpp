// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows, as every backend runs them. What happens in a row is written once, as phases over a *team*: one thread of the
// CPU, or a block of GPU threads. A kind of rows (row_kinds.hpp) is a struct of plain members whose `row(team)` walks
// through its phases. A phase is three static functions,
//
//   part(rows, state, at) -> partial     one thread's share; `at` says which: at.id of at.count
//   merge(a, b)                          associative up to rounding, in thread order
//   finish(rows, state, all)             once; writes the team's state
//
// run by team.fold<Phase>(rows), or one, run(rows, state, at), which every thread calls: team.each<Phase>(rows). A
// phase may say whether a row needs it: due(rows, state), as if_good below does; team.repeat<Phase>(rows) folds until
// it does not. Between two phases every thread sees the same state. The few phases that walk over the vocabulary do
// so tile by tile (tiles.hpp) and ask an *engine* (lane_engine.hpp, thread_engine.hpp); all else is the same text on
// every backend. No CUDA header: a host loop over thread indices runs the GPU's rows in tests.
//
// A *frame* knows the batch: env, rows, factor(r) = w_r f_r, and where a group of rows leaves its result.
#pragma once

#include <cstddef>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/reduction.hpp"
#include "opd/row_facts.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Which thread of its team one is: of the CPU's, which has no other, so that loops over `at.count` are plain ones;
/// of a GPU's, where `step` threads lie in a block, and a team is one block or several.
struct alone {
    static constexpr int id = 0, count = 1;
};
struct one_of {
    int id, count, step = count;
};

/// Whether a row in this state needs a phase.
template <class Phase, class Rows, class State>
OPD_HD OPD_INLINE bool is_due(const Rows& k, const State& st) {
    if constexpr (requires { Phase::due(k, st); })
        return Phase::due(k, st);
    else
        return true;
}

/// Whether a frame's rows are a shard of the vocabulary (vocab_parallel.hpp): ids of tiles, anchors and caches are
/// those of the whole; the sources know the shard alone and count from its first.
template <class Frame>
inline constexpr bool in_shards = requires(const Frame& f) {
    f.shard;
};
template <class Frame>
OPD_HD OPD_INLINE index_t first_id(const Frame& f) {
    if constexpr (in_shards<Frame>)
        return f.shard.first;
    else
        return 0;
}
/// Ids of the softmax over all shards; `vocab`: of this one.
template <class Frame>
OPD_HD OPD_INLINE index_t whole_vocab(const Frame& f, index_t vocab) {
    if constexpr (in_shards<Frame>)
        return f.shard.total;
    else
        return vocab;
}
/// What the sources call an id; -1: it lies in another shard.
template <class Frame>
OPD_HD OPD_INLINE index_t own_id(const Frame& f, index_t id, index_t vocab) {
    if constexpr (in_shards<Frame>)
        return id >= f.shard.first && id - f.shard.first < vocab ? id - f.shard.first : -1;
    else
        return id;
}

/// The slots of a row as the sources call their ids; -1: unused, or in another shard.
template <class Slots>
struct slots_of_shard {
    struct own {
        Slots slots;
        index_t first, vocab;
        OPD_HD index_t operator[](index_t j) const {
            const auto id = static_cast<index_t>(slots.ids[j]);
            return id >= first && id - first < vocab ? id - first : -1;
        }
    } ids;
    index_t count;
};
template <class Frame, class Slots>
OPD_HD OPD_INLINE auto own_slots(const Frame& f, const Slots& slots, index_t vocab) {
    if constexpr (in_shards<Frame>)
        return slots_of_shard<Slots>{{slots, f.shard.first, vocab}, slots.count};
    else
        return slots;
}
/// A frame for what rows do with numbers that every shard has.
template <class Frame>
struct whole_frame {
    using type = Frame;
};
template <class Frame>
    requires(in_shards<Frame>)
struct whole_frame<Frame> {
    using type = typename Frame::whole;
};

/// A phase that writes the gradient: the last ones of a row.
template <class Phase>
concept writes_gradient = requires {
    Phase::writes_gradient;
};

/// A team of one.
template <class State>
struct team_of_one {
    State state_ = {};

    void begin(index_t row, std::byte* scratch) {
        state_.row = row;
        state_.scratch = scratch;
    }
    void move_to(index_t row) { state_.row = row; }
    template <class Phase, class Rows>
    OPD_INLINE void fold(const Rows& k) {
        if (is_due<Phase>(k, state_)) Phase::finish(k, state_, Phase::part(k, state_, alone{}));
    }
    template <class Phase, class Rows, class... Extra>
    OPD_INLINE void each(const Rows& k, Extra... extra) {
        if (is_due<Phase>(k, state_)) Phase::run(k, state_, alone{}, extra...);
    }
    template <class Phase, class Rows>
    OPD_INLINE void repeat(const Rows& k) {
        while (is_due<Phase>(k, state_)) fold<Phase>(k);
    }
};

/// Hands out arrays from one stretch of memory, each aligned to 64 bytes; from null it counts alone.
struct carver {
    std::byte* base = nullptr;
    std::size_t used = 0;
    template <class T>
    OPD_HD T* take(index_t n) {
        T* p = reinterpret_cast<T*>(base ? base + used : nullptr);
        used += (sizeof(T) * static_cast<std::size_t>(n) + 63) / 64 * 64;
        return p;
    }
};

/// What a row reports.
struct row_report {
    double loss = 0;   ///< L_r, before weight and clamp
    double lse = 0;    ///< the student's log-sum-exp
    double weight = 1; ///< of a selector
    bool bad = false, infinite = false, careful = false, clamped = false;
    bool swept = false; ///< dense rows: once at least
    bool unfit = false; ///< the gradient has entries that its type does not hold
};

/// State of a team: the row in hand, and what its group's rows add up to.
struct row_state {
    index_t row = 0;
    std::byte* scratch = nullptr; ///< the rows' scratch_bytes(), this team's alone
    bool kept = false;
    bool foreign = false; ///< another call's: nothing is written
    bool live = false;    ///< rows of entries: there is a gradient
    double factor = 0;    ///< w_r f_r
    row_report report = {};
    result partial = {};

    /// A row that is kept and, so far, sound.
    OPD_HD bool good() const { return kept && !report.bad; }
};

/// Which rows a phase is for: kept ones, kept and so far sound ones, rows of entries with a gradient.
struct if_kept {
    OPD_HD static bool due(const auto&, const row_state& st) { return st.kept; }
};
struct if_good {
    OPD_HD static bool due(const auto&, const row_state& st) { return st.good(); }
};
struct if_live {
    OPD_HD static bool due(const auto&, const row_state& st) { return st.live; }
};

/// A phase that one thread of a team does: once(rows, state).
template <class Phase>
struct by_one {
    OPD_HD OPD_INLINE static void run(const auto& k, auto& st, auto at) {
        if (at.id == 0) Phase::once(k, st);
    }
};

/// A phase whose parts say whether something is bad.
struct finds_bad : if_good {
    OPD_HD static int merge(int a, int b) { return a | b; }
    OPD_HD static void finish(const auto&, row_state& st, int bad) { st.report.bad |= bad != 0; }
};

/// Row r is taken up: is it kept, and with what factor?
template <class Rows>
struct begin_row : by_one<begin_row<Rows>> {
    OPD_HD static void once(const Rows& k, typename Rows::state_type& st) {
        st.report = {};
        st.live = false;
        st.kept = k.frame.env.mask.kept(st.row);
        st.foreign = k.frame.env.mask.foreign(st.row);
        if (st.foreign) return;
        diagnostics& d = st.partial.diagnostics;
        ++d.rows;
        if (!st.kept) return;
        ++d.kept;
        st.factor = k.frame.factor(st.row);
        st.report.bad = is_nan(st.factor);
    }
};

/// Row r is done: its part of the loss, per-row outputs and counts.
template <class Rows>
struct end_row : by_one<end_row<Rows>> {
    OPD_HD static void once(const Rows& k, typename Rows::state_type& st) {
        if (st.foreign) return;
        const auto& e = k.frame.env;
        const index_t r = st.row;
        const float old = e.losses.empty() || e.beta_loss == 0 ? 0 : e.beta_loss * e.losses[r];
        if (!st.kept) {
            if (!e.losses.empty()) e.losses[r] = old;
            return;
        }
        diagnostics& d = st.partial.diagnostics;
        const row_report& o = st.report;
        const double loss = o.bad ? 0 : (o.clamped ? (o.loss < 0 ? -e.loss_clamp : e.loss_clamp) : o.loss);
        if (o.bad) {
            ++d.bad_rows;
            d.first_bad_row = d.first_bad_row < 0 ? r : d.first_bad_row;
        } else {
            count_staleness(d, e, r);
            d.kept_loss += o.loss;
            st.partial.loss += st.factor * loss;
        }
        if (o.infinite) {
            ++d.infinite_rows;
            d.first_infinite_row = d.first_infinite_row < 0 ? r : d.first_infinite_row;
        }
        d.careful_rows += o.careful;
        d.clamped_rows += o.clamped;
        if (!e.losses.empty()) {
            const double w = e.weights.empty() || o.bad ? 1 : e.weights[r];
            e.losses[r] = old + float(w * o.weight * loss);
        }
        if (!e.lse.empty()) e.lse[r] = o.lse;
    }
};

template <class Rows>
struct end_group {
    OPD_HD static void run(const Rows& k, const typename Rows::state_type& st, auto at, index_t group) {
        if (at.id == 0) k.frame.partials[group] = st.partial;
    }
};

template <class Rows, class Team>
OPD_HD void fit_gradient(const Rows& k, Team& team); // fit_rows.hpp

/// A team's work: group g of the rows [begin, end), one after the other.
template <class Rows, class Team>
OPD_HD void run_rows(const Rows& k, index_t begin, index_t end, index_t g, Team& team, std::byte* scratch) {
    const index_t first = begin + g * k.frame.group;
    team.begin(first, scratch);
    for (index_t r = first; r < first + k.frame.group && r < end; ++r) {
        team.move_to(r);
        team.template each<begin_row<Rows>>(k);
        k.row(team);
        fit_gradient(k, team);
        team.template each<end_row<Rows>>(k);
    }
    team.template each<end_group<Rows>>(k, g);
}
OPD_HD void run_rows(const auto& k, index_t g, auto& team, std::byte* scratch) {
    run_rows(k, 0, k.frame.rows, g, team, scratch);
}

/// Whether env.loss_clamp cuts a loss.
template <space S>
OPD_HD bool clamps(const basic_env<S>& e, double loss) {
    return e.loss_clamp > 0 && (loss > e.loss_clamp || loss < -e.loss_clamp);
}

/// dz = beta·dz
template <class G>
OPD_HD OPD_INLINE void scale_gradient(G& dz, float beta) {
    using value = arithmetic_t<G>;
    dz = beta == 0 ? element<G>::store(0) : element<G>::store(value(beta) * element<G>::load(dz));
}

/// One thread's share of: dz = beta·dz over a row of a gradient from column `from` on, then a view's padding by policy.
template <class Student, class At>
OPD_HD void clear_columns(const Student& s, index_t row, index_t from, float beta, At at) {
    using G = typename Student::gradient_type;
    if constexpr (!materialised<Student>) {
        if (!s.has_gradient()) return;
        G* dz = s.gradient_tile({row}, 0);
        for (index_t i = from + at.id; i < s.vocab(); i += at.count) scale_gradient(dz[i], beta);
    } else {
        if (s.dz.empty()) return;
        G* dz = s.dz.row(row);
        for (index_t i = from + at.id; i < s.dz.cols; i += at.count) scale_gradient(dz[i], beta);
        if (s.pad == padding::zero)
            for (index_t i = at.id; i < s.dz.padding; i += at.count) dz[s.dz.cols + i] = element<G>::store(0);
    }
}

} // namespace OPD_ISA
} // namespace opd::detail
