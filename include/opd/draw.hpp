// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Drawing from rows of logits: which tokens a rollout takes, and which it scores beside them.
//
//   opd::draw(be, z, design::gumbel{}, {.seed = s, .sample = samples, .position = positions},
//             opd::drawn<>{.ids = view(ids, N, 1), .log_mu = view(log_mu, N, 1)},
//             {.filter = {.temperature = .7f, .top_p = .95f}});
//
//   design::greedy     (N,1)    the most probable token
//   design::gumbel     (N,1)    one token from mu by Gumbel-max: argmax of z/T - log E
//   design::iid        (N,m)    m tokens with replacement, by inverse CDF, weight 1/m
//   design::threshold  (N,B)    B ids without replacement: inclusion incl = min(1, κ mu) with Σ incl = B. Ids with
//                               incl = 1 are taken for certain ("exact", weight mu), the others by systematic sampling
//                               with one uniform (weight mu/incl = 1/κ). Unbiased, and of least variance among designs
//                               of that size when what is averaged is bounded by the ratio (Fearnhead & Clifford 2003)
//   design::head_tail  (N,h+m)  the h most probable ids for certain (weight mu), and m draws with replacement from the
//                               rest, whose mass is M (weight M/m)
//   design::gumbel_top (N,m)    m ids without replacement, in law those of the m largest log mu + Gumbel noise; kappa
//                               the (m+1)-th of these: incl = 1 - exp(-mu e^-kappa), weight mu/incl (Kool et al. 2019).
//                               Drawn one after the other from what is left, with exponential waiting times whose sum
//                               is e^-kappa: the same law, and no noise for ids that are not drawn
//
// Noise: gumbel stream rollout, draw 0; iid stream mc, draws first + j; threshold stream tail, draw 0; head_tail
// likewise, draws 0 to m - 1; gumbel_top likewise, draws 0 to m.
//
// Instead of a view, a source of rows: student::hidden{x, w}, … (hidden.hpp), whose logits are made a block at a
// time, within `.budget`, with the same bits. T is the filter's; a source with another than 1 and that is refused.
//
// mu is the softmax of z/T over what the filter keeps (filter.hpp), renormalised. Noise is keyed (rng.hpp): a row's
// draws are a function of (logits, filter, seed, sample, position) and of nothing else in the batch. log mu is what
// `token_logp` gives for the same logits where nothing is filtered, to the bit; under a filter it is that less
// `log_kept`, up to rounding.
//
// Exact entries come first, then the sampled ones, both by ascending id; draws with replacement stay in their order.
// Slots that stay unused (fewer ids have mass than B), and every slot of a row with NaN, +inf or no mass, have id -1,
// log mu 0, weight 0; such rows are counted as bad. Masked rows are left as they are. Nothing is allocated in steady
// state. docs/concepts/draws.md says what is exact and what it costs.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/filter.hpp"
#include "opd/logits/logit_rows.hpp"
#include "opd/rng.hpp"
#include "opd/source.hpp"
#include "opd/view.hpp"

namespace opd {

namespace design {

/// (N,1) the argmax of z; ties go to the lower id. No noise, so no key.
struct greedy {
    OPD_HD static constexpr index_t columns() { return 1; }
};
/// (N,1) one token from mu: argmax of z/T - log E, E exponential and keyed by id.
struct gumbel {
    static constexpr noise_stream stream = noise_stream::rollout;
    OPD_HD static constexpr index_t columns() { return 1; }
};
/// (N,m) m tokens from mu with replacement, by inverse CDF; weight 1/m each, for teacher::samples.
struct iid {
    static constexpr noise_stream stream = noise_stream::mc;
    index_t m = 1;     ///< ids a row, at least 1
    index_t first = 0; ///< number of the first draw: columns of one sample may be drawn in several calls
    OPD_HD constexpr index_t columns() const { return m; }
    OPD_HD constexpr index_t uniforms() const { return m; }
};
/// (N,budget) distinct ids of inclusion min(1, κ mu), whose sum is `budget`; weight mu/incl, for teacher::weighted.
/// Needs one uniform a row. Fearnhead and Clifford 2003.
struct threshold {
    static constexpr noise_stream stream = noise_stream::tail;
    index_t budget = 1; ///< B, ids a row: as many, or all that have mass
    OPD_HD constexpr index_t columns() const { return budget; }
    OPD_HD constexpr index_t uniforms() const { return 1; }
};
/// (N,h+m) the h best ids for certain, weight mu, and m draws with replacement from the rest of mass M, weight M/m.
struct head_tail {
    static constexpr noise_stream stream = noise_stream::tail;
    index_t h = 1, m = 1; ///< ids for certain, draws from the rest
    OPD_HD constexpr index_t columns() const { return h + m; }
    OPD_HD constexpr index_t uniforms() const { return m; }
};
/// (N,m) m distinct ids, in law those of the m largest log mu + Gumbel noise; weight mu/incl, incl = 1 - exp(-mu
/// e^-kappa). Kool et al. 2019.
struct gumbel_top {
    static constexpr noise_stream stream = noise_stream::tail;
    index_t m = 1; ///< ids a row, at least 1
    OPD_HD constexpr index_t columns() const { return m; }
    OPD_HD constexpr index_t uniforms() const { return 2 * m + 1; } ///< m for the ids, then m + 1 for the waiting times
};

} // namespace design

/// What the noise of a row is keyed by. `sample` is unique in a run (prompt, epoch, group member), never a batch slot.
template <space Space = space::host>
struct draw_keys {
    std::uint64_t seed = 0;
    vector_view<const std::uint64_t, Space> sample = {};   ///< (N)
    vector_view<const std::uint32_t, Space> position = {}; ///< (N)
    /// Uniforms of the caller's, in (0, 1), instead of keyed ones: (N, design.uniforms()). One outside throws; on a
    /// device it makes its row bad.
    matrix_view<const double, Space> uniforms = {};
};

/// Where draws go. (N, design.columns())
template <class Id = std::int32_t, class L = float, class W = float, space Space = space::host>
struct drawn {
    using id_type = Id;
    using log_type = L;
    using weight_type = W;
    static constexpr space memory_space = Space;
    matrix_view<Id, Space> ids;
    matrix_view<L, Space> log_mu;
    matrix_view<W, Space> weight = {};           ///< or left out
    matrix_view<std::uint8_t, Space> exact = {}; ///< or left out: 1 where the id was taken for certain
};

/// What a draw may be told beside its keys, and what it may report beside ids and weights. An empty view is not
/// written.
template <space Space = space::host>
struct draw_options {
    opd::filter filter = {};                  ///< what may be drawn; mu is renormalised on it
    row_mask<Space> mask = {};                ///< rows that it leaves out stay as they are
    vector_view<double, Space> lse = {};      ///< (N) out: log-sum-exp of z/T over all ids
    vector_view<double, Space> log_kept = {}; ///< (N) out: log of the mass that the filter keeps
    vector_view<filter_cut, Space> cut = {};  ///< (N) out: the last id kept, for `kept_ids`
    vector_view<index_t, Space> kept = {};    ///< (N) out: how many ids are kept; 0 for bad rows
    /// (N) out, of threshold and head_tail: log of mu's mass outside the ids taken for certain; -inf: none, and in
    /// bad rows.
    vector_view<double, Space> log_tail = {};
    /// (N) out, of gumbel_top: the (m+1)-th largest log mu + Gumbel noise; -inf where no id is left, and in bad rows.
    vector_view<double, Space> kappa = {};
};

/// A checked call of draw.
template <class Z, class Design, class Id, class L, class W, space Space = space::host,
          class Rows = matrix_view<const Z, Space>>
struct draw_job {
    using logit_type = Z;
    using design_type = Design;
    using drawn_type = drawn<Id, L, W, Space>;
    static constexpr space memory_space = Space;
    Rows z;
    Design design;
    draw_keys<Space> keys;
    drawn_type out;
    draw_options<Space> options;

    index_t row_count() const { return z.rows; }
    basic_env<Space> as_env() const { return {.reduction = reduce::sum, .mask = options.mask, .lse = options.lse}; }
};

/// A checked call of kept_ids.
template <class Z, class Id, space Space = space::host, class Rows = matrix_view<const Z, Space>>
struct kept_job {
    using logit_type = Z;
    static constexpr space memory_space = Space;
    Rows z;
    vector_view<const filter_cut, Space> cut;
    row_offsets<Space> offsets;
    vector_view<Id, Space> ids;
    row_mask<Space> mask;

    index_t row_count() const { return z.rows; }
    basic_env<Space> as_env() const { return {.reduction = reduce::sum, .mask = mask}; }
};

namespace detail {

template <class Design>
void check_design(const Design& d) {
    const auto most = 0xffffffffll; // numbers of draws
    if constexpr (std::is_same_v<Design, design::threshold>) {
        if (d.budget < 1) throw invalid_input("design.budget", "must be at least 1");
    } else if constexpr (std::is_same_v<Design, design::iid>) {
        if (d.m < 1) throw invalid_input("design.m", "must be at least 1");
        if (d.first < 0 || d.first > most - d.m)
            throw invalid_input("design.first", "must be at least 0, and the last draw below 2^32");
    } else if constexpr (std::is_same_v<Design, design::gumbel_top>) {
        if (d.m < 1 || d.m > most / 2) throw invalid_input("design.m", "must be at least 1, and below 2^31");
    } else if constexpr (std::is_same_v<Design, design::head_tail>) {
        if (d.h < 0 || d.h > most / 2) throw invalid_input("design.h", "must be at least 0, and below 2^31");
        if (d.m < 1 || d.m > most / 2)
            throw invalid_input("design.m", "must be at least 1: the head alone leaves out what lies beyond");
    }
}

} // namespace detail

namespace detail {
inline namespace OPD_ISA {
/// A checked call of draw from a view or a source.
template <class Rows, class Design, class Id, class L, class W, space Space>
auto checked_draw(const Rows& z, const Design& design, const draw_keys<Space>& keys, const drawn<Id, L, W, Space>& out,
                  const draw_options<Space>& options) {
    static_assert(std::integral<Id>, "opd: token ids are integers");
    static_assert(std::floating_point<W>, "opd: weights of draws are float or double");
    constexpr bool keyed = !std::is_same_v<Design, design::greedy>;
    constexpr bool uniform = requires { design.uniforms(); };
    constexpr bool has_tail = std::is_same_v<Design, design::threshold> || std::is_same_v<Design, design::head_tail>;
    const index_t n = z.rows;
    check_design(design);
    const index_t m = design.columns();
    check_rows(z);
    call_spans spans;
    spans.reads("options.mask", options.mask, n);
    if (z.cols > 0xffffffffll) throw invalid_input("z", "has more columns than noise has tokens (2^32)");
    spans.writes("out.ids", out.ids, n, m);
    spans.writes("out.log_mu", out.log_mu, n, m);
    spans.may_write("out.weight", out.weight, n, m);
    spans.may_write("out.exact", out.exact, n, m);
    if (left_out(keys.uniforms)) {
        if (keyed && n > 0 && keys.sample.empty()) throw invalid_input("keys.sample", "is needed to key the noise");
        if (keyed && n > 0 && keys.position.empty()) throw invalid_input("keys.position", "is needed to key the noise");
    } else {
        if (!uniform)
            throw invalid_input("keys.uniforms",
                                "greedy reads none; a Gumbel-max token has noise of its own, one number an id");
        if constexpr (uniform) spans.reads("keys.uniforms", keys.uniforms, n, design.uniforms());
        if constexpr (Space == space::host)
            for (index_t r = 0; r < n; ++r)
                for (index_t j = 0; options.mask.kept(r) && j < keys.uniforms.cols; ++j)
                    if (const double u = keys.uniforms(r, j); !is_finite(u) || !(u > 0 && u < 1))
                        throw invalid_input("keys.uniforms", "row " + std::to_string(r) + ", draw " +
                                                                 std::to_string(j) +
                                                                 ": must lie strictly between 0 and 1");
    }
    spans.reads("keys.sample", keys.sample, n);
    spans.reads("keys.position", keys.position, n);
    check_filter(options.filter);
    spans.writes("options.lse", options.lse, n);
    spans.writes("options.log_kept", options.log_kept, n);
    spans.writes("options.cut", options.cut, n);
    spans.writes("options.kept", options.kept, n);
    spans.writes("options.log_tail", options.log_tail, n);
    spans.writes("options.kappa", options.kappa, n);
    if (!has_tail && !options.log_tail.empty())
        throw invalid_input("options.log_tail", "is of threshold and head_tail, which take ids for certain");
    if (!std::is_same_v<Design, design::gumbel_top> && !options.kappa.empty())
        throw invalid_input("options.kappa", "is of gumbel_top");
    read_rows(spans, z);
    spans.check();
    return draw_job<typename logit_of_rows<Rows>::type, Design, Id, L, W, Space, Rows>{z, design, keys, out, options};
}
/// Rows to draw from: at 1, or at the filter's temperature, which is the one that counts.
template <class Source>
auto rows_to_draw(const Source& s, const filter& f) {
    if (s.temperature != 1 && s.temperature != f.temperature)
        throw invalid_input(std::string(name_of<Source>()) + ".temperature",
                            "is neither 1 nor options.filter.temperature, at which tokens are drawn");
    return job_rows(s);
}
} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Draws by `design` from every row that is kept. See the head of this file. Returns the backend's result: its
/// diagnostics count rows and bad rows. Throws invalid_input, before anything is written, for shapes and numbers
/// outside their range.
template <class Backend, detail::readable_logits Logits, class Design, class Id, class L, class W, space Space>
auto draw(Backend&& be, const Logits& z, const Design& design, const std::type_identity_t<draw_keys<Space>>& keys,
          const drawn<Id, L, W, Space>& out, const std::type_identity_t<draw_options<Space>>& options = {}) {
    detail::check_spaces<Backend, Logits, Space>();
    const auto& source = detail::as_source(z);
    if constexpr (detail::reads_whole<std::remove_cvref_t<decltype(source)>>())
        return be.for_rows(
            detail::checked_draw(detail::rows_to_draw(source, options.filter), design, keys, out, options));
}

/// Bytes of arena that a draw from rows of z needs, for callers who own all memory.
template <class Backend, detail::readable_logits Logits, class Design>
std::size_t draw_workspace_bytes(const Backend& be, const Logits& z, const Design& design,
                                 const draw_options<Logits::memory_space>& options = {}) {
    const auto rows = detail::rows_to_draw(detail::as_source(z), options.filter);
    using rows_type = std::remove_const_t<decltype(rows)>;
    return be.workspace_bytes(draw_job<typename detail::logit_of_rows<rows_type>::type, Design, std::int32_t, float,
                                       float, Logits::memory_space, rows_type>{rows, design, {}, {}, options});
}

} // namespace OPD_ISA

namespace detail {
inline namespace OPD_ISA {
/// A checked call of kept_ids from a view or a source.
template <class Rows, class Id, space Space>
auto checked_kept_ids(const Rows& z, vector_view<const filter_cut, Space> cut, const row_offsets<Space>& offsets,
                      vector_view<Id, Space> ids, const row_mask<Space>& mask) {
    static_assert(std::integral<Id>, "opd: token ids are integers");
    const index_t n = z.rows;
    check_rows(z);
    call_spans spans;
    if (cut.empty() && n > 0) throw invalid_input("cut", "is a null pointer");
    spans.reads("cut", cut, n);
    if (offsets.empty() && n > 0) throw invalid_input("offsets", "is a null pointer");
    spans.reads("offsets", offsets, n + 1);
    spans.reads("mask", mask, n);
    if constexpr (Space == space::host)
        for (index_t r = 0; r < n; ++r) ids_of_row("offsets", offsets, r, ids.size);
    spans.writes("ids", ids);
    read_rows(spans, z);
    spans.check();
    return kept_job<typename logit_of_rows<Rows>::type, Id, Space, Rows>{z, cut, offsets, ids, mask};
}
} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// The ids that a filter kept, ascending, row after row, as inference servers return them: row r's are
/// ids[offsets[r]] to ids[offsets[r+1]], where offsets are the sums of `options.kept` up to r. `cut`: of the draw. A
/// row whose room is not what it keeps, or whose logits are bad, is counted as bad and gets -1.
template <class Backend, detail::readable_logits Logits, class Id, space Space>
auto kept_ids(Backend&& be, const Logits& z, std::type_identity_t<vector_view<const filter_cut, Space>> cut,
              std::type_identity_t<row_offsets<Space>> offsets, vector_view<Id, Space> ids,
              std::type_identity_t<row_mask<Space>> mask = {}) {
    detail::check_spaces<Backend, Logits, Space>();
    const auto& source = detail::as_source(z);
    if constexpr (detail::reads_whole<std::remove_cvref_t<decltype(source)>>())
        return be.for_rows(detail::checked_kept_ids(detail::job_rows(source), cut, offsets, ids, mask));
}

} // namespace OPD_ISA

} // namespace opd
