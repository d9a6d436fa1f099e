// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher over another vocabulary, by a sparse map: a token of the student's is worth tokens of the teacher's, in
// shares, and the loss is a divergence over the teacher's vocabulary.
//
//   p̃[u] = Σ_v W[v,u] p[v],   D(p̃ ‖ q) or any estimator's loss,   p = softmax(z/T)
//
//   vocab_projection W{offsets, ids, shares, V'};                         CSR, a row for each student token
//   auto r = evaluate_projected(be, student::logits{z, dz}, W, view(zp,N,V'), view(dzp,N,V'), teacher,
//                               forward_kl{}, env);
//
// which is project(), z̃ = log p̃ as logits of a student over V' ids, evaluate() on these, and pull_back(), exact:
//
//   dz[v] = (1/T) (Σ_u W[v,u] p[v]/p̃[u] g[u] - p[v] Σ_u g[u])             g = dL/dz̃
//
// Rows of W sum to 1, or to 0: a token that the teacher has no word for. Its mass is left out and p̃ renormalised over
// the rest (evaluate's softmax does it), exactly in the gradient too.
//
// Shapes: z, dz (N,V); zp, dzp (N,V') the caller's, float or double; W's shares float, positive. Costs, a row, the
// exponentials of V, log of V' and two walks over the shares, in double. p̃ has double's range down to e^-690 of the
// top token and is stored as a float's log. A masked row's zp is not written; its dz is beta dz.
//
// An entry of dz that its type does not hold becomes the type's largest finite number, whatever env.on_overflow says:
// its row's loss has been told by then. pull_back() returns how many rows that befell, and evaluate_projected() adds
// them to infinite_rows: a row whose loss is infinite, too, counts twice.
//
// Throws invalid_input before anything is written: W's parts, zp, dzp, env.lse, env.given_lse (a projected law has no
// log-sum-exp), and what evaluate refuses. On the CPU backends; dz may lie on z.
//
// Source: X-Token's P-KL, KL(q ‖ W p) (arXiv 2605.21699).
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/lanes.hpp"
#include "opd/rows/rows.hpp"
#include "opd/student.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd {

/// W (V,V') of the head of this file.
struct vocab_projection {
    row_offsets<> offsets;               ///< (V+1) int32 or int64, ascending from 0
    vector_view<const std::int32_t> ids; ///< (total) teacher tokens, distinct in a row
    vector_view<const float> shares;     ///< (total) W[v,u], at least 0
    index_t teacher_vocab = 0;           ///< V'

    index_t student_vocab() const { return offsets.size > 0 ? offsets.size - 1 : 0; }
    /// Every number of it; once is enough. Throws invalid_input with the student's token.
    void validate() const {
        if (offsets.empty() || offsets.size < 2) throw invalid_input("projection.offsets", "are left out");
        detail::check_vector("projection.offsets", offsets, offsets.size);
        detail::check_vector("projection.ids", ids, ids.size);
        if (shares.size != ids.size)
            throw invalid_input("projection.shares", "has " + std::to_string(shares.size) + " entries for " +
                                                         std::to_string(ids.size) + " ids");
        detail::check_vector("projection.shares", shares, shares.size);
        if (teacher_vocab < 1) throw invalid_input("projection.teacher_vocab", "must be at least 1");
        if (offsets[0] != 0) throw invalid_input("projection.offsets", "must start at 0", 0);
        for (index_t v = 0; v < student_vocab(); ++v) {
            if (offsets[v + 1] < offsets[v] || offsets[v + 1] > ids.size)
                throw invalid_input("projection.offsets", "must ascend to at most the number of ids", v);
            double sum = 0;
            for (index_t i = offsets[v]; i < offsets[v + 1]; ++i) {
                if (ids[i] < 0 || ids[i] >= teacher_vocab)
                    throw invalid_input(
                        "projection.ids",
                        "id " + std::to_string(ids[i]) + " for " + std::to_string(teacher_vocab) + " tokens", v);
                if (!detail::is_finite(shares[i]) || shares[i] < 0)
                    throw invalid_input("projection.shares", "must be finite and at least 0", v);
                sum += double(shares[i]);
            }
            if (sum != 0 && !(sum > 0.999 && sum < 1.001))
                throw invalid_input("projection.shares",
                                    "sum to " + std::to_string(sum) + ", not to 1, or 0 for a token without any", v);
        }
        if (offsets[student_vocab()] != ids.size)
            throw invalid_input("projection.offsets", "end before the ids do", student_vocab());
    }
};

namespace detail {
inline namespace OPD_ISA {

/// e^((z - top)/T) of a row, in double: by lanes down to what float carries, below by std::exp. The sum; 0 or NaN where
/// the row is bad.
template <class Z>
double masses_of(const Z* z, index_t n, double temperature, double* to) {
    double top = neg_inf<double>();
    for (index_t v = 0; v < n; ++v) {
        const double x = load_log(z[v]);
        if (is_nan(x) || (is_inf(x) && x > 0)) return quiet_nan<double>();
        top = x > top ? x : top;
    }
    if (is_neg_inf(top) || top <= -1e30) return 0;
    const double inv = 1 / temperature, by = 1.44269504088896340736 * inv; // log2 e
    const lanes hi{by}, lo{by - double(float(by))}, floor{-160 / by}, anchor{top};
    constexpr int leaf = 1024;
    constexpr bool in_lanes = !std::is_same_v<arithmetic_t<Z>, double>;
    double sum = 0;
    float x[leaf], e[leaf];
    for (index_t begin = 0; begin < n; begin += leaf) {
        const int count = static_cast<int>(std::min<index_t>(leaf, n - begin));
        if constexpr (in_lanes) {
            for (int i = 0; i < count; ++i) x[i] = std::max(float(element<Z>::load(z[begin + i])), -1e30f);
            for (int i = count; i < leaf; ++i) x[i] = -1e30f;
            for (int i = 0; i < leaf; i += lanes::width)
                exp2_scaled(pin(lanes::load(x + i) - anchor), hi, lo, floor).store(e + i);
        }
        for (int i = 0; i < count; ++i) {
            const double d = (load_log(z[begin + i]) - top) * inv;
            const double m = in_lanes && d > -80 ? double(e[i]) : d > -690 ? std::exp(d) : 0;
            to[begin + i] = m, sum += m;
        }
    }
    return sum;
}
/// Σ_v W[v,u] e[v]
inline void spread(const vocab_projection& w, const double* e, double* to) {
    std::fill_n(to, w.teacher_vocab, 0.0);
    for (index_t v = 0; v < w.student_vocab(); ++v)
        for (index_t i = w.offsets[v]; e[v] > 0 && i < w.offsets[v + 1]; ++i)
            to[w.ids[i]] += double(w.shares[i]) * e[v];
}
/// to[u] = log(x[u] / sum), -inf where x is 0.
template <class T>
void logs_of(const double* x, index_t n, double sum, T* to) {
    constexpr int leaf = 1024;
    float a[leaf];
    for (index_t begin = 0; begin < n; begin += leaf) {
        const int count = static_cast<int>(std::min<index_t>(leaf, n - begin));
        if constexpr (!std::is_same_v<T, double>) {
            for (int i = 0; i < leaf; ++i) {
                const double p = i < count ? x[begin + i] / sum : 1;
                a[i] = p > 1e-37 ? float(p) : 1.0f;
            }
            for (int i = 0; i < leaf; i += lanes::width) log(lanes::load(a + i)).store(a + i);
        }
        for (int i = 0; i < count; ++i) {
            const double p = x[begin + i] / sum;
            const bool tiny = std::is_same_v<T, double> || !(p > 1e-37);
            to[begin + i] = p == 0 ? neg_inf<T>() : tiny ? T(std::log(x[begin + i]) - std::log(sum)) : T(a[i]);
        }
    }
}

/// to = x, or the largest finite number of its type; whether that was needed.
template <class G>
bool store_within(G& to, double x) {
    to = element<G>::store(static_cast<arithmetic_t<G>>(x));
    if (!is_inf(element<G>::load(to))) return false;
    to = store_finite<G>(x);
    return true;
}

/// A worker's memory: masses of the student's tokens, and of the teacher's.
struct projection_memory {
    double *mine, *theirs;
    std::size_t bytes;
    projection_memory(const vocab_projection& w, std::byte* at) {
        carver from{at};
        mine = from.take<double>(w.student_vocab()), theirs = from.take<double>(w.teacher_vocab);
        bytes = from.used;
    }
};
template <class Backend, class Row>
void each_projected(Backend& be, const vocab_projection& w, const row_mask<>& mask, index_t rows, Row&& row) {
    thread_team& team = be.team();
    const std::size_t each = projection_memory(w, nullptr).bytes;
    std::byte* const memory = be.memory(each * std::size_t(team.size())).data();
    team.run(rows, [&](index_t r, int worker) {
        if (!mask.foreign(r)) row(r, projection_memory(w, memory + each * std::size_t(worker)));
    });
}

} // namespace OPD_ISA
} // namespace detail

/// Kept rows of dz that held an entry beyond their type.
struct saturated_rows {
    index_t count = 0, first = -1;
};

inline namespace OPD_ISA {

/// Bytes of arena that project() and pull_back() need; evaluate() beside them needs what workspace_bytes says.
template <class Backend>
std::size_t projection_bytes(const Backend& be, const vocab_projection& w) {
    return detail::projection_memory(w, nullptr).bytes * std::size_t(be.threads < 1 ? 1 : be.threads) + 64;
}

/// z̃ = log W^T softmax(z/T) of kept rows. z (N,V), to (N,V') float or double. A bad row's z̃ is NaN.
template <class Backend, class Z, class P>
void project(Backend& be, const vocab_projection& w, matrix_view<const Z> z, double temperature, matrix_view<P> to,
             row_mask<> mask = {}) {
    detail::each_projected(be, w, mask, z.rows, [&](index_t r, detail::projection_memory memory) {
        if (!mask.kept(r)) return;
        const double sum = detail::masses_of(z.row(r), z.cols, temperature, memory.mine);
        if (!(sum > 0)) {
            std::fill_n(to.row(r), to.cols, detail::quiet_nan<P>());
            return;
        }
        detail::spread(w, memory.mine, memory.theirs);
        detail::logs_of(memory.theirs, w.teacher_vocab, sum, to.row(r));
    });
}

/// dz = beta dz + the gradient of z from that of z̃, `from` (N,V'). Rows that are masked, or have none, get beta dz. An
/// entry that G does not hold becomes its largest finite number; returned are the kept rows where one did.
template <class Backend, class Z, class P, class G>
saturated_rows pull_back(Backend& be, const vocab_projection& w, matrix_view<const Z> z, double temperature,
                         matrix_view<const P> from, float beta, matrix_view<G> dz, row_mask<> mask = {}) {
    std::atomic<index_t> count{0}, first{z.rows};
    detail::each_projected(be, w, mask, z.rows, [&](index_t r, detail::projection_memory memory) {
        const index_t v_s = z.cols;
        const P* const g = from.row(r);
        G* const to = dz.row(r);
        std::fill_n(to + v_s, dz.padding, element<G>::store(0));
        double all = 0;
        const bool some = mask.kept(r) && std::any_of(g, g + w.teacher_vocab, [](P x) { return x != 0; });
        const double sum = some ? detail::masses_of(z.row(r), v_s, temperature, memory.mine) : 0;
        if (!(sum > 0)) {
            for (index_t v = 0; v < v_s; ++v)
                detail::store_within(to[v], beta == 0 ? 0 : double(beta) * double(element<G>::load(to[v])));
            return;
        }
        detail::spread(w, memory.mine, memory.theirs);
        for (index_t u = 0; u < w.teacher_vocab; ++u)
            if (memory.theirs[u] > 0) all += double(g[u]);
        bool unfit = false;
        for (index_t v = 0; v < v_s; ++v) {
            double c = -memory.mine[v] / sum * all;
            for (index_t i = w.offsets[v]; memory.mine[v] > 0 && i < w.offsets[v + 1]; ++i) {
                const index_t u = w.ids[i];
                if (w.shares[i] > 0)
                    c += double(w.shares[i]) * memory.mine[v] / memory.theirs[u] * double(g[u]); // a share of at most 1
            }
            const double old = beta == 0 ? 0 : double(beta) * double(element<G>::load(to[v]));
            unfit |= detail::store_within(to[v], old + c / temperature);
        }
        if (!unfit) return;
        ++count;
        for (index_t least = first; r < least && !first.compare_exchange_weak(least, r);) {}
    });
    return {count, count > 0 ? first.load() : -1};
}

/// Loss and gradient over the teacher's vocabulary. `projected`, `gradient` (N,V'): memory for z̃ and dL/dz̃; the
/// second is not needed where the student has no dz. See the head of this file.
template <class Backend, class Z, class G, class P, class Teacher, class Estimator>
result evaluate_projected(Backend&& be, student::logits<Z, G> student, const vocab_projection& w,
                          matrix_view<P> projected, std::type_identity_t<matrix_view<P>> gradient, Teacher teacher,
                          const Estimator& estimator, env e = {}) {
    static_assert(std::is_same_v<P, float> || std::is_same_v<P, double>, "opd: projected rows are float or double");
    const index_t n = student.z.rows;
    w.validate();
    detail::check_student(student);
    if (student.z.cols != w.student_vocab())
        throw invalid_input("student.z", "has " + std::to_string(student.z.cols) + " columns, the projection " +
                                             std::to_string(w.student_vocab()) + " rows");
    const bool wanted = !student.dz.empty();
    detail::call_spans spans;
    spans.writes("projected", projected, n, w.teacher_vocab);
    if (wanted) spans.writes("gradient", gradient, n, w.teacher_vocab);
    spans.reads("student.z", student.z), spans.reads("projection.offsets", w.offsets);
    spans.reads("projection.ids", w.ids), spans.reads("projection.shares", w.shares);
    spans.writes("student.dz", student.dz);
    detail::check_in_place(spans, student, e.beta);
    if (!e.lse.empty() || !e.given_lse.empty())
        throw invalid_input(e.lse.empty() ? "env.given_lse" : "env.lse",
                            "is over the student's vocabulary, the loss not");
    const opd::student::logits<P> theirs{projected, wanted ? gradient : matrix_view<P>{}};
    env own = e;
    own.beta = 0;
    own.checks = check::count; // what follows has not been made yet
    if (e.on_infinite.act == infinite::action::raise || e.checks == check::contents)
        throw unsupported("opd: check::contents and infinite::raise read rows before the call; projected rows are made "
                          "in it: use check::count");
    (void)checked_job(be, theirs, teacher, estimator, own);
    own.on_bad = bad::count();
    project(be, w, matrix_view<const Z>(student.z), double(student.temperature), projected, e.mask);
    result r = evaluate(be, theirs, teacher, estimator, own);
    if (wanted) {
        const saturated_rows cut = pull_back(be, w, matrix_view<const Z>(student.z), double(student.temperature),
                                             matrix_view<const P>(gradient), e.beta, student.dz, e.mask);
        index_t& first = r.diagnostics.first_infinite_row;
        r.diagnostics.infinite_rows += cut.count;
        if (cut.count > 0 && (first < 0 || cut.first < first)) first = cut.first;
    }
    detail::raise_bad(r, e.on_bad);
    return r;
}

} // namespace OPD_ISA

} // namespace opd
