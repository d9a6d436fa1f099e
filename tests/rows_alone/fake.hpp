// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An engine, a frame and a team for rows that are compiled and never run: what rows ask of them is declared, nothing of
// it is done. They lie in a namespace of their own, so that no argument of a call leads to a helper of opd's that the
// rows' header does not include. Of opd this includes what an engine's numbers and a frame's env need.
#pragma once

#include <cstddef>
#include <span>

#include <opd/batch.hpp>
#include <opd/diagnostics.hpp>
#include <opd/entries.hpp>
#include <opd/lanes.hpp>
#include <opd/row_facts.hpp>
#include <opd/row_program.hpp>
#include <opd/student.hpp>
#include <opd/teacher.hpp>

namespace fake {

using opd::index_t;
using number = opd::scalar<double>;

struct place {
    int id = 0, count = 1;
};

/// Searches of rows that are drawn from: Split and Numbers are what the rows' own headers have for them.
template <class Split>
struct leaves_with {
    static constexpr bool lists_best = true;
    template <class...>
    using number = fake::number;
    template <class Z>
    struct reader {
        template <class... A>
        reader(A&&...);
        template <class Limits = typename Split::limits>
        void load(index_t, const Limits&);
        index_t begin() const;
        int count() const;
        double weight(int) const;
        double mass() const;
        double mass(place) const;
        typename Split::type split(double) const;
        index_t find(double) const;
    };
    template <class... A>
    static void scratch(A&&...);
    template <class... A>
    static void sweep(A&&...);
    template <class... A>
    static void masses(A&&...);
    template <class... A>
    static void top_cut(A&&...);
    template <class... A>
    static void share_cut(A&&...);
    template <class Rows, class... A>
    static void search(A&&...);
    template <class... A>
    static void best(A&&...);
    template <class... A>
    static void ascending(A&&...);
    template <class... A>
    static index_t head_ids(A&&...);
    template <class... A>
    static index_t count_kept(A&&...);
    template <class... A>
    static typename Split::best gumbel(A&&...);
};

struct engine {
    template <class...>
    using number = fake::number;
    template <class F>
    struct anchors {
        F z_s, y_s, y_t, inv_s, inv_t;
        template <class Sums>
        explicit anchors(const Sums&);
        F student(F) const;
        F teacher(F) const;
        template <bool>
        F delta(F, F) const;
    };
    template <class Rows>
    static std::size_t scratch_bytes(index_t, bool);
    template <class F, bool Teacher, auto Need, class... A>
    static void sweep(A&&...);
    template <class F, bool Teacher, class... A>
    static void entropies(A&&...);
    template <class... A>
    static void overlap(A&&...);
    template <class... A>
    static void terms(A&&...);
    template <class... A>
    static void entrywise_terms(A&&...);
    template <class... A>
    static void refine(A&&...);
    template <class... A>
    static void gradient(A&&...);
    template <class... A>
    static void entrywise_gradient(A&&...);
    template <class... A>
    static void pull_back(A&&...);
    template <class... A>
    static void merge_repeats(A&&...);
    template <class... A>
    static void fetch(A&&...);
    template <class... A>
    static int repeats(A&&...);
    static index_t repeats_bytes(index_t);
    struct id_set {
        static index_t bytes(index_t);
        template <class... A>
        int take(A&&...);
        bool operator()(index_t) const;
    };
};

struct frame {
    opd::env env = {};
    index_t rows = 0, group = 1;
    opd::result* partials = nullptr;
    double factor(index_t) const;
};
/// The same for rows in shards of the vocabulary.
struct frame_of_shard : frame {
    using whole = frame;
    struct {
        index_t first = 0, total = 0;
    } shard;
};

/// Has every phase of a row compiled, whatever state it would be due in.
template <class State>
struct team {
    State state = {};
    void begin(index_t, std::byte*) {}
    void move_to(index_t) {}
    template <class Phase, class Rows>
    void fold(const Rows& k) {
        if constexpr (requires { Phase::due(k, state); }) (void)Phase::due(k, state);
        Phase::finish(k, state, Phase::merge(Phase::part(k, state, place{}), Phase::part(k, state, place{})));
    }
    template <class Phase, class Rows, class... Extra>
    void each(const Rows& k, Extra... extra) {
        if constexpr (requires { Phase::due(k, state); }) (void)Phase::due(k, state);
        Phase::run(k, state, place{}, extra...);
    }
    template <class Phase, class Rows>
    void repeat(const Rows& k) {
        fold<Phase>(k);
    }
};
template <class Rows>
void walk(const Rows& k) {
    team<typename Rows::state_type> t;
    (void)k.scratch_bytes();
    k.row(t);
}

// --- sides and estimators --------------------------------------------------------------------------------------------

/// A student that makes the logits of the ids that a row asks for.
struct made_by_id {
    using logit_type = float;
    using gradient_type = float;
    static constexpr opd::space memory_space = opd::space::host;
    static constexpr bool makes_ids = true, whole_rows = true, one_tile = true, sparse_gradient = false;
    float temperature = 1;
    index_t rows() const;
    index_t vocab() const;
    bool has_gradient() const;
    template <class... A>
    void make(A&&...) const;
    template <class... A>
    void clear(A&&...) const;
    template <class... A>
    void take_back(A&&...) const;
    float* gradient_tile(opd::row_place, index_t) const;
};
/// A student whose logits are made a tile at a time.
struct made_in_tiles {
    using logit_type = float;
    using gradient_type = float;
    static constexpr opd::space memory_space = opd::space::host;
    static constexpr bool one_tile = false, sparse_gradient = false;
    float temperature = 1;
    index_t rows() const;
    index_t vocab() const;
    index_t tile_size() const;
    std::size_t scratch_bytes() const;
    const float* tile(opd::row_place, index_t) const;
    float logit(opd::row_place, index_t) const;
    bool has_gradient() const;
    float* gradient_tile(opd::row_place, index_t) const;
    float& gradient_at(opd::row_place, index_t) const;
};
using logits = opd::student::logits<float>;
using on_support = opd::student::on_support<float>;
using dense = opd::teacher::dense<float>;
using samples = opd::teacher::samples<int>;
using weighted = opd::teacher::weighted<int>;
using support = opd::teacher::support<int>;
using ragged = opd::teacher::ragged_support<int>;

/// The least that a divergence is.
struct divergence {
    template <class Row, class Entry>
    auto term(const Row&, const Entry& e) const {
        return e.p;
    }
    template <class Row, class Entry>
    auto c(const Row&, const Entry& e) const {
        return e.p;
    }
};
/// One that has all that a program may have.
struct whole_divergence : divergence {
    static constexpr bool f_divergence = true, reads_overlap = true;
    static constexpr opd::raw_sums_needed raw{.student_delta = true, .student_power = true, .teacher_delta = true};
    double exponent() const;
    double value(const opd::raw_sums&) const;
    double sum_c(const opd::raw_sums&) const;
    double from_mean(const opd::raw_sums&) const;
    double cancellation(const opd::raw_sums&) const;
    bool dwarfed(const opd::raw_sums&, double) const;
    template <class F>
    F nonnegative_term(const opd::dense_entry<F>&) const;
    bool infinite_where_teacher_zero() const;
    bool infinite_where_student_zero() const;
};
/// An estimator of entries, with what it may have beside.
struct of_entries {
    static constexpr bool reads_tail = true;
    template <class Entries, class... A>
    opd::entry_row row(Entries&&, A&&...) const;
};
struct selector {
    unsigned reads() const;
    double operator()(const opd::row_facts&) const;
};
struct selected_entries : of_entries {
    using selector_type = fake::selector;
    selector_type selector;
};
struct selected_divergence : divergence {
    using selector_type = fake::selector;
    selector_type selector;
};
/// A selector that chooses the weights of a sum.
struct mixing_selector : selector {
    opd::sum_weights mix(const opd::row_facts&) const;
};
struct mixed_divergence : divergence {
    using selector_type = fake::mixing_selector;
    selector_type selector;
    double a = 1, b = 1;
};

} // namespace fake
