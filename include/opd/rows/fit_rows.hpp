// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Gradients that their storage does not hold. A row that is written is looked at once more, where its type is
// narrower than float or its factor large: an entry that has become infinite makes it an infinite row, counted, with
// loss 0 and gradient 0. Under overflow::saturate, and where dz = beta·dz + g has taken what was there along, such
// entries become the largest finite number.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/source.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Whether an entry is no number that its type holds: infinite; or NaN, an infinite factor times 0, unless that may
/// have been there.
template <class G>
OPD_HD OPD_INLINE bool is_unfit(const G& stored, float beta) {
    const auto x = element<G>::load(stored);
    return beta == 0 ? !is_finite(x) : is_inf(x);
}
/// Whether a thread's share of n entries holds one.
template <class G, class At>
OPD_HD int holds_unfit(const G* dz, index_t n, float beta, At at) {
    if constexpr (std::is_same_v<opd::stored_as<G>, half> && std::is_same_v<At, alone>) { // four at a time
        constexpr std::uint64_t exponent = 0x7c007c007c007c00u, one = 0x0400040004000400u, beyond = 0x8000800080008000u;
        std::uint64_t seen = 0;
        for (index_t i = 0; i < n; i += 4) {
            std::uint64_t four = 0;
            std::memcpy(&four, dz + i, sizeof(G) * static_cast<std::size_t>(n - i < 4 ? n - i : 4));
            seen |= (four & exponent) + one;
        }
        if ((seen & beyond) == 0) return 0;
    }
    int found = 0;
    for (index_t i = at.id; i < n; i += at.count) found |= is_unfit(dz[i], beta);
    return found;
}

/// visit(dz, n) for every stretch of a row's gradient.
template <class Rows, class Visit>
OPD_HD OPD_INLINE void each_stretch(const Rows& k, const typename Rows::state_type& st, Visit visit) {
    using Student = std::remove_cvref_t<decltype(k.student)>;
    if constexpr (materialised<Student>) {
        if constexpr (Student::sparse_gradient && is_ragged<std::remove_cvref_t<decltype(k.teacher)>>) {
            if (const auto row = slots_of(k.teacher, st.row); row.count > 0)
                visit(&k.student.gradient_at({0}, row.first), row.count);
        } else {
            visit(k.student.dz.row(st.row), k.student.dz.cols);
        }
    } else if constexpr (makes_ids<Student>) {
        visit(k.student.gradient_row(st.row), k.slots_at(st.row).count);
    } else if constexpr (requires { k.tile_size_t(); } && !is_lumped<std::remove_cvref_t<decltype(k.teacher)>>) {
        each_tile<true>(
            k, [&](index_t begin, index_t count) { visit(k.student.gradient_tile(k.of_student(st), begin), count); });
    } else {
        visit(k.student.gradient_tile({st.row}, 0), k.student.vocab());
    }
}

/// Rows that write a gradient of a type that may not hold it: a caller's, or that of made logits, which goes back
/// through products in float.
template <class Rows>
concept stores_gradient = requires(const Rows& k) {
    typename Rows::G;
    k.student.has_gradient();
    requires !std::is_same_v<opd::stored_as<typename Rows::G>, double>;
};

/// Whether an entry may have become infinite: always in a narrow type; in one with float's range if the factor is
/// large, since c is within 1e37, or what was there is multiplied.
template <class Rows>
OPD_HD bool may_be_unfit(const Rows& k, const typename Rows::state_type& st) {
    using G = typename Rows::G;
    if (!k.student.has_gradient()) return false;
    const double g = st.factor / double(k.student.temperature);
    if (k.frame.env.beta != 0 && k.frame.env.beta != 1) return true;
    if constexpr (std::is_same_v<opd::stored_as<G>, float> || brain_float<G>)
        return st.good() && (g > 8 || g < -8);
    else
        return st.good();
}
template <class Rows>
OPD_HD bool saturates(const Rows& k) {
    return k.frame.env.on_overflow == overflow::saturate || k.frame.env.beta != 0;
}

/// A thread's share of n entries: the largest finite number for an infinite one.
template <class G, class At>
OPD_HD void saturate_entries(G* dz, index_t n, float beta, At at) {
    for (index_t i = at.id; i < n; i += at.count) {
        if (!is_unfit(dz[i], beta)) continue;
        const auto x = element<G>::load(dz[i]);
        const auto most = double(largest_stored<G>);
        dz[i] = store_finite<G>(is_nan(x) ? 0 : (is_neg_inf(x) ? -most : most));
    }
}
/// Of rows in shards, whose loss has been told by now.
template <class Rows>
void saturate_row(const Rows& k, typename Rows::state_type& st) {
    if (!may_be_unfit(k, st)) return;
    int found = 0;
    each_stretch(k, st, [&](const auto* dz, index_t n) { found |= holds_unfit(dz, n, k.frame.env.beta, alone{}); });
    if (found == 0) return;
    st.report.unfit = true;
    each_stretch(k, st, [&](auto* dz, index_t n) { saturate_entries(dz, n, k.frame.env.beta, alone{}); });
}

template <class Rows>
struct find_unfit {
    static constexpr bool reads_gradient = true;
    OPD_HD static bool due(const Rows& k, const typename Rows::state_type& st) { return may_be_unfit(k, st); }
    OPD_HD static int part(const Rows& k, const typename Rows::state_type& st, auto at) {
        int found = 0;
        each_stretch(k, st, [&](const auto* dz, index_t n) { found |= holds_unfit(dz, n, k.frame.env.beta, at); });
        return found;
    }
    OPD_HD static int merge(int a, int b) { return a | b; }
    OPD_HD static void finish(const Rows& k, typename Rows::state_type& st, int found) {
        st.report.unfit = found != 0;
        if (found == 0 || !st.good()) return;
        st.report.infinite = true;
        if (!saturates(k)) st.report.loss = 0;
    }
};
template <class Rows>
struct mend_unfit {
    static constexpr bool reads_gradient = true;
    OPD_HD static bool due(const Rows&, const typename Rows::state_type& st) { return st.report.unfit; }
    OPD_HD static void run(const Rows& k, const typename Rows::state_type& st, auto at) {
        using G = typename Rows::G;
        const bool saturate = saturates(k);
        each_stretch(k, st, [&](G* dz, index_t n) {
            if (saturate)
                saturate_entries(dz, n, k.frame.env.beta, at);
            else
                for (index_t i = at.id; i < n; i += at.count) dz[i] = element<G>::store(0);
        });
    }
};

/// The last phases of a row, behind its gradient.
template <class Rows, class Team>
OPD_HD void fit_gradient(const Rows& k, Team& team) {
    if constexpr (stores_gradient<Rows>) {
        team.template fold<find_unfit<Rows>>(k);
        team.template each<mend_unfit<Rows>>(k);
    }
}

} // namespace OPD_ISA
} // namespace opd::detail
