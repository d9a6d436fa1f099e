// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One row whose c is non-zero on few ids, on the CPU: the normaliser (unless given), log p of the ids, and the pullback
//
//   dz[v] = g (c[v] - p[v] Σ c),   g = scale/T
//
// as one pass over the row, in proportion to p (samples: of -g p Σc; a tail bucket: of what falls to the tail), and k exact
// entries on top. An entry's c and its softmax term meet in one double expression before the single store: storing -p Σc first
// and adding c afterwards would round twice, which in bf16 destroys gradients near p = q.
#pragma once

#include <algorithm>
#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/detail/sweep.hpp"
#include "opd/lanes.hpp"
#if defined(OPD_AVX512)
#include <immintrin.h>
#endif

namespace opd::detail {

/// An id with its c; `order` keeps equal ids in sample order.
struct sparse_c {
    index_t id;
    index_t order;
    double c;
};

inline namespace OPD_ISA {

/// The student's side of a row.
template <class Z>
struct student_row {
    using F = pack_for<Z>;
    swept sw;
    double lse = 0; ///< log-sum-exp of z/T: the caller's number where it was given

    /// Sweeps z unless the caller gives log-sum-exp and nothing else needs the row.
    static student_row make(const Z* z, index_t n, double inv_t, const double* given_lse, id_range excluded = {}) {
        student_row r;
        if (given_lse && excluded.begin == excluded.end) {
            // a finite lse vouches for the row's contents
            r.sw.found.bad = !is_finite(*given_lse);
            if (!r.sw.found.bad) anchor_at<typename F::value_type>(r.sw.sums, *given_lse, inv_t);
            r.lse = *given_lse;
            return r;
        }
        r.sw = sweep_row<F, false, raw_sums_needed{}>(z, static_cast<const Z*>(nullptr), n, inv_t, 1, 1, excluded);
        r.lse = r.sw.sums.lse();
        return r;
    }
    double log_p(const Z* z, index_t id) const { return log_p_of(z, id, sw.sums.inv_s, lse); }
    double p(const Z* z, index_t id) const { return p_of(z, id, sw.sums); }
};

/// Sorts entries by id and adds up repeated ids in sample order; returns the distinct count.
inline int merge_repeats(sparse_c* e, int m) {
    std::sort(e, e + m,
              [](const sparse_c& a, const sparse_c& b) { return a.id != b.id ? a.id < b.id : a.order < b.order; });
    int k = 0;
    for (int j = 0; j < m; ++j)
        if (k > 0 && e[k - 1].id == e[j].id)
            e[k - 1].c += e[j].c;
        else
            e[k++] = e[j];
    return k;
}

/// dz = beta dz + share·e^((z - z*)/T) over the row, z* the anchor of `s`; then dz[e[j].id] = values[j]. dz may be z: values
/// were made before.
template <class Z, class G>
void pull_back(const Z* z, G* dz, index_t n, const raw_sums& s, double share, const sparse_c* e, int k, float beta,
               const double* values) {
    using F = pack_for<Z, G>;
    using value = typename F::value_type;
    const anchor_lanes<F> a(s);
    const F factor(share), b{double(beta)};
    constexpr bool direct = loads_directly<F, Z> && loads_directly<F, G>;
    const bool stream =
        streams<F, G> && beta == 0 && n >= stream_from && reinterpret_cast<std::uintptr_t>(dz) % F::alignment == 0;
    staged_leaf<F> stage;
    alignas(64) value buffer[leaf_size];
    for (index_t begin = (n - 1) / leaf_size * leaf_size; begin >= 0; begin -= leaf_size) {
        const int count = static_cast<int>(std::min<index_t>(leaf_size, n - begin));
        if constexpr (direct)
            if (count == leaf_size) { // -inf needs no staging: e^-inf is the one thing formed
                const Z* in = z + begin;
                G* out = dz + begin;
                if (stream)
                    for (int i = 0; i < count; i += F::width) {
                        prefetch<F>(in + i - 2 * leaf_size);
                        if constexpr (streams<F, G>) (factor * a.student(F::load(in + i))).stream(out + i);
                    }
                else if (beta == 0)
                    for (int i = 0; i < count; i += F::width) (factor * a.student(F::load(in + i))).store(out + i);
                else
                    for (int i = 0; i < count; i += F::width)
                        fma(b, F::load(out + i), factor * a.student(F::load(in + i))).store(out + i);
                continue;
            }
        const int full = staged_leaf<F>::load(stage.z, z + begin, count);
        for (int i = 0; i < full; i += F::width) (factor * a.student(F::load(stage.z + i))).store(buffer + i);
        for (int i = 0; i < count; ++i) {
            const value old = beta == 0 ? value(0) : value(beta) * static_cast<value>(element<G>::load(dz[begin + i]));
            dz[begin + i] = element<G>::store(static_cast<arithmetic_t<G>>(old + buffer[i]));
        }
    }
#if defined(OPD_AVX512)
    if (stream) _mm_sfence(); // the entries below lie on streamed lines
#endif
    for (int j = 0; j < k; ++j) dz[e[j].id] = element<G>::store(static_cast<arithmetic_t<G>>(values[j]));
}

/// Whether every id lies in [0, n) or is -1, an unused slot, and none repeats. `seen`: 64 Kbit of scratch; an exact search only on a collision.
template <class Id>
bool distinct_in_range(const Id* ids, index_t k, index_t n, std::uint64_t* seen) {
    bool good = true;
    for (index_t j = 0; j < k; ++j)
        good &= static_cast<std::uint64_t>(static_cast<index_t>(ids[j])) + 1 < static_cast<std::uint64_t>(n) + 1;
    if (!good) return false;
    std::fill_n(seen, 1024, std::uint64_t{0});
    for (index_t j = 0; j < k; ++j) {
        if (static_cast<index_t>(ids[j]) == -1) continue;
        const auto h = static_cast<std::uint64_t>(ids[j]) & 0xffff;
        std::uint64_t& word = seen[h >> 6];
        const std::uint64_t bit = std::uint64_t{1} << (h & 63);
        if (word & bit)
            for (index_t i = 0; i < j; ++i)
                if (ids[i] == ids[j]) return false;
        word |= bit;
    }
    return true;
}

} // namespace OPD_ISA
} // namespace opd::detail
