// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The V-sized phases of a row on a GPU (rows.hpp): threads that stride over it. No CUDA header: a host loop over
// thread indices runs them in tests.
//
// A thread sums 8 entries at a time in its number type, relative to the anchors it has met, and folds them into
// double (row_program.hpp: raw_sums); threads merge by moving both to the better anchor, exactly; ties go to the
// lower id. So values and gradients keep the anchored accuracy of the CPU, though not its bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/cuda/leaf_threads.hpp"
#include "opd/cuda/thread_sweep.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/rows/tuning.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// dz = beta·dz + g
template <class F, class G>
OPD_HD OPD_INLINE void store_gradient(G* dz, F g, float beta) {
    using value = arithmetic_t<G>;
    const auto x = static_cast<value>(g.v);
    *dz = element<G>::store(beta == 0 ? x : value(beta) * element<G>::load(*dz) + x);
}

/// A thread's share of a swept tile: visit(z, y) of each entry, fold() after a batch of them.
template <class F, int Size, class Tile, class Visit, class Fold>
OPD_HD OPD_INLINE void eights(const Tile& t, one_of at, Visit visit, Fold fold) {
    each_batch<F, true, Size, false>(
        t, at,
        [&](const batch_of_two<F, true, Size>& b, index_t) {
            OPD_UNROLL
            for (int i = 0; i < Size; ++i) visit(b.z.x[i], b.y.x[i]);
            fold();
        },
        [&](index_t i) { visit(load_number<F>(t.z + i), load_number<F>(t.y + i)); });
    fold(); // what fills no batch is one: entries that add nothing could fill it, as unused slots of a support do
}
/// dz = beta·dz + of(z, y), or of(z, z) where there is no y, from the row's end: it is still in the cache. What dz
/// lies over has been read.
template <class F, bool Teacher, int Size, class Tile, class Of>
OPD_HD OPD_INLINE void write_eights(const Tile& t, one_of at, float beta, Of of) {
    const index_t step = at.step;
    each_batch<F, Teacher, Size, true>(
        t, at,
        [&](const batch_of_two<F, Teacher, Size>& b, index_t first) {
            auto* const dz = t.dz + first;
            F g[unsigned(Size)];
            OPD_UNROLL
            for (int i = 0; i < Size; ++i) g[i] = of(b.z.x[i], Teacher ? b.y.x[i] : b.z.x[i]);
            if (beta == 0) {
                OPD_UNROLL
                for (int i = 0; i < Size; ++i) store_gradient(dz + i * step, g[i], 0);
            } else {
                OPD_UNROLL
                for (int i = 0; i < Size; ++i) store_gradient(dz + i * step, g[i], beta);
            }
        },
        [&](index_t i) {
            const F z = load_number<F>(t.z + i), y = Teacher ? load_number<F>(t.y + i) : z;
            store_gradient(t.dz + i, of(z, y), beta);
        });
}
/// Entries at a time of a program: one that takes several logarithms an entry would not fit the instruction cache.
template <class Rows>
inline constexpr int entries_of = Rows::single_sweep ? gpu_tuning::entries_at_a_time : 2;

struct thread_engine : scouts_first {
    using leaves = thread_leaves; ///< rows that are drawn from and searched
    template <class... T>
    using number = thread_number<T...>;
    template <class F>
    using anchors = thread_anchors<F>;

    // --- dense rows --------------------------------------------------------------------------------------------------

    template <class Rows>
    static std::size_t scratch_bytes(index_t, bool) {
        return 0;
    }
    template <class F, bool Teacher, raw_sums_needed Need, class Tile>
    OPD_HD static void sweep(row_sweep& p, const Tile& t, one_of at) {
        sweep_thread<F, Teacher, Need>(p, t, at);
    }
    template <class F, bool Teacher, raw_sums_needed, class Tile>
    OPD_HD static void sweep(row_sweep& p, const Tile& t, scout at) {
        scout_thread<F, Teacher>(p, t, at);
    }

    /// Of a row whose normalisers are known.
    template <class F, bool Teacher, class Tile>
    OPD_HD static void entropies(const row_sweep& swept, entropy_sums& out, const Tile& t, one_of at) {
        const raw_sums& s = swept.sums;
        const thread_anchors<F> a(s);
        const F inv_sum_s(1 / (1 + s.student_mass)), log_sum_s(::log1p(s.student_mass));
        const F inv_sum_t(1 / (1 + s.teacher_mass)), log_sum_t(::log1p(s.teacher_mass));
        for (index_t i = at.id; i < t.count; i += at.count) {
            const F z = load_number<F>(t.z + i), p = a.student(z) * inv_sum_s;
            out.student += double((p * max(pin(z - a.z_s) * a.inv_s - log_sum_s, F(-1e4))).v); // p is 0 long before
            if constexpr (Teacher) {
                const F y = load_number<F>(t.y + i), q = a.teacher(y) * inv_sum_t;
                out.teacher += double((q * max(pin(y - a.y_t) * a.inv_t - log_sum_t, F(-1e4))).v);
                out.overlap += double(min(p, q).v);
            }
        }
    }
    template <class Rows>
    OPD_HD static void overlap(const Rows& k, const typename Rows::state_type& st, overlap_sums& out,
                               const typename Rows::tile_type& t, one_of at) {
        using F = typename Rows::F;
        const typename Rows::numbers n(st.swept.sums, k.program_of(st));
        F both(0.), apart(0.);
        eights<F, entries_of<Rows>>(
            t, at,
            [&](F z, F y) {
                const dense_entry<F> e = n.template entry<false>(z, y);
                both += min(e.p, e.q);
                apart += distance_term(n.row, e);
            },
            [&] {
                out.min_sum += double(both.v), out.distance += double(apart.v);
                both = apart = F(0.);
            });
    }
    template <class Rows, class Sums>
    OPD_HD static void terms(const Rows& k, const typename Rows::state_type& st, Sums& out,
                             const typename Rows::tile_type& t, one_of at) {
        using F = typename Rows::F;
        const auto formula = k.program_of(st); // a copy: stores to dz could change what lies in memory
        const typename Rows::numbers n(st.swept.sums, formula);
        F loss(0.), c(0.);
        eights<F, entries_of<Rows>>(
            t, at,
            [&](F z, F y) {
                const dense_entry<F> e = n.template entry<false>(z, y);
                loss += formula.term(n.row, e);
                c += formula.c(n.row, e);
            },
            [&] {
                out.a += double(loss.v), out.b += double(c.v);
                loss = c = F(0.);
            });
    }
    template <class Rows, class Sums>
    OPD_HD static void entrywise_terms(const Rows& k, const typename Rows::state_type& st, Sums& out,
                                       const typename Rows::tile_type& t, one_of at) {
        using F = typename Rows::F;
        const auto formula = k.program_of(st); // a copy: stores to dz could change what lies in memory
        const auto n = k.entrywise(st);
        F loss(0.), c(0.);
        eights<F, entries_of<Rows>>(
            t, at,
            [&](F z, F y) {
                const dense_entry<F> e = n.entry(z, y);
                loss += formula.term(n.row, n.for_value(e));
                c += formula.c(n.row, e);
                if constexpr (Rows::need.student_power && !Rows::need.k_is_one) out.wide |= n.wide(e);
            },
            [&] {
                out.loss += double(loss.v), out.c += double(c.v);
                loss = c = F(0.);
            });
    }
    template <class Rows>
    OPD_HD static void refine(const Rows& k, const typename Rows::state_type& st, double& total,
                              const typename Rows::tile_type& t, one_of at) {
        using F = typename Rows::F;
        const raw_sums& s = st.swept.sums;
        const auto formula = k.program_of(st); // a copy: stores to dz could change what lies in memory
        const typename Rows::numbers n(s, formula);
        const double shift = s.shift() + s.d_star();
        F loss(0.);
        eights<F, entries_of<Rows>>(
            t, at, [&](F z, F y) { loss += formula.nonnegative_term(entry_in_double<F>(n, z, y, s, shift)); },
            [&] {
                total += double(loss.v);
                loss = F(0.);
            });
    }

    template <class Rows, class Entry>
    OPD_HD OPD_INLINE static void gradient_of(const Rows& k, const typename Rows::state_type& st,
                                              const typename Rows::tile_type& t, one_of at, Entry entry,
                                              const row_constants<typename Rows::F>& row) {
        using F = typename Rows::F;
        const auto formula = k.program_of(st); // a copy: stores to dz could change what lies in memory
        const F total(st.sum_c), g(st.factor * k.inv_s);
        write_eights<F, true, entries_of<Rows>>(t, at, k.frame.env.beta, [&](F z, F y) {
            const dense_entry<F> e = entry(z, y);
            return g * (formula.c(row, e) - e.p * total);
        });
    }
    template <class Rows>
    OPD_HD static void gradient(const Rows& k, const typename Rows::state_type& st, const typename Rows::tile_type& t,
                                one_of at) {
        using F = typename Rows::F;
        const typename Rows::numbers n(st.swept.sums, k.program_of(st));
        if (n.anchor.near)
            gradient_of(
                k, st, t, at, [&](F z, F y) { return n.template entry<true>(z, y); }, n.row);
        else
            gradient_of(
                k, st, t, at, [&](F z, F y) { return n.template entry<false>(z, y); }, n.row);
    }
    template <class Rows>
    OPD_HD static void entrywise_gradient(const Rows& k, const typename Rows::state_type& st,
                                          const typename Rows::tile_type& t, one_of at) {
        using F = typename Rows::F;
        const auto n = k.entrywise(st);
        gradient_of(
            k, st, t, at, [&](F z, F y) { return n.entry(z, y); }, n.row);
    }

    // --- rows of entries ---------------------------------------------------------------------------------------------

    /// A set of ids, one bit for ids that share their last bits; what it lets through is looked up.
    struct id_set {
        static constexpr int words = gpu_tuning::id_words;
        std::uint32_t bits[words] = {};
        const entry_c* ids = nullptr;
        index_t count = 0;

        OPD_HD static index_t bytes(index_t) { return 0; }
        OPD_HD OPD_INLINE static unsigned bit_of(index_t id) { return static_cast<unsigned>(id) & (32 * words - 1); }
        /// Takes the used ids of k slots; whether a thread's share of them repeats others. Each thread owns every
        /// at.count-th word.
        OPD_HD int take(const entry_c* c, index_t k, std::byte*, one_of at) {
            if (at.id == 0) ids = c, count = k;
            for (int w = at.id; w < words; w += at.count) bits[w] = 0;
            for (index_t j = 0; j < k; ++j) {
                const unsigned b = bit_of(c[j].id);
                if (static_cast<int>(b >> 5) % at.count == at.id) bits[b >> 5] |= std::uint32_t{1} << (b & 31);
            }
            int repeats = 0;
            for (index_t j = at.id; j < k; j += at.count)
                if (c[j].id != -1)
                    for (index_t i = 0; i < j; ++i) repeats |= c[i].id == c[j].id;
            return repeats;
        }
        OPD_HD OPD_INLINE bool operator()(index_t id) const {
            const unsigned b = bit_of(id);
            if ((bits[b >> 5] >> (b & 31)) & 1)
                for (index_t j = 0; j < count; ++j)
                    if (ids[j].id == id) return true;
            return false;
        }
    };
    template <class F, bool Teacher, raw_sums_needed Need, class Tile>
    OPD_HD static void sweep(row_sweep& p, const Tile& t, one_of at, const id_set& excluded) {
        sweep_thread<F, Teacher, Need>(p, t, at, excluded);
    }
    template <class F, bool Teacher, raw_sums_needed, class Tile>
    OPD_HD static void sweep(row_sweep& p, const Tile& t, scout at, const id_set& excluded) {
        scout_thread<F, Teacher>(p, t, at, excluded);
    }

    /// A thread's share of the slots that are the first of their id.
    OPD_HD static void merge_repeats(entry_c* e, const index_t& n, one_of at) {
        for (index_t j = at.id; j < n; j += at.count) {
            bool leads = true;
            for (index_t i = 0; i < j; ++i) leads &= e[i].id != e[j].id;
            if (!leads) {
                e[j].slot = -1;
                continue;
            }
            double c = e[j].c;
            for (index_t i = j + 1; i < n; ++i) c += e[i].id == e[j].id ? e[i].c : 0;
            e[j].c = c;
        }
    }

    /// A block's threads wait for many lines at once as it is.
    template <class T>
    OPD_HD static void fetch(const T*) {}

    /// Whether some id of a thread's share lies neither in [0, n) nor is -1, an unused slot, or repeats.
    OPD_HD static index_t repeats_bytes(index_t) { return 0; }
    template <class Id>
    OPD_HD static int repeats(const Id* ids, index_t k, index_t n, std::byte*, one_of at) {
        int bad = 0;
        for (index_t j = at.id; j < k; j += at.count) {
            const auto id = static_cast<index_t>(ids[j]);
            if (id == -1) continue;
            bad |= id < 0 || id >= n;
            for (index_t i = 0; i < j; ++i) bad |= ids[i] == ids[j];
        }
        return bad;
    }

    /// dz = beta dz + share·e^((z - z*)/T) over a tile, z* the anchor of `s`.
    OPD_HD static void pull_back(const auto& t, const raw_sums& s, double share, float beta, one_of at) {
        using F = thread_number<std::remove_cvref_t<decltype(*t.z)>, std::remove_cvref_t<decltype(*t.dz)>>;
        const thread_anchors<F> a(s);
        const F factor(share);
        write_eights<F, false, gpu_tuning::entries_at_a_time>(t, at, beta,
                                                              [&](F z, F) { return factor * a.student(z); });
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
