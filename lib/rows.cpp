// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Draws, scores and penalties up to the kernels; passes over a batch.
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine.hpp"
#include "kernels.hpp"
#include "opd/c/rows.h"
#include "opd/checks/shapes.hpp"
#include "opd/estimators/draft_weights.hpp"
#include "opd/estimators/m2po.hpp"
#include "opd/estimators/sequences.hpp"
#include "opd/id_overlap.hpp"
#include "opd/penalties.hpp"
#include "opd/ratio_sketch.hpp"
#include "structs.hpp"
#include "tensor.hpp"

namespace {

using opd::index_t;
using opd_c::refuse;

/// Refuses a struct of results that has no size, and writes nothing.
template <class Struct>
void check_out(const char* name, const Struct* to) {
    if (to == nullptr) return;
    Struct copy = {};
    copy.struct_size = to->struct_size;
    opd_c::write(name, &copy, Struct{});
}
/// Writes *result where a call has one to give.
template <class Call>
int with_result(opd_result* result, Call&& call) {
    check_out("result", result);
    opd_result r = {};
    const int status = call(r);
    if (status == OPD_OK) opd_c::write("result", result, r);
    return status;
}

int run_draw(const opd_draw_call* of, opd_result* result, std::uint64_t* workspace) {
    return opd_c::guarded([&] {
        const opd_draw_call call = opd_c::read("draw", of);
        return with_result(result, [&](opd_result& r) {
            return opd_c::with_engine("draw.engine", call.engine, [&](void* backend) {
                return opd_c::kernels().draw(backend, call, r, workspace);
            });
        });
    });
}
int run_kept_ids(const opd_kept_ids_call* of, std::int64_t* total, opd_result* result, std::uint64_t* workspace) {
    return opd_c::guarded([&] {
        const opd_kept_ids_call call = opd_c::read("kept", of);
        return with_result(result, [&](opd_result& r) {
            return opd_c::with_engine("kept.engine", call.engine, [&](void* backend) {
                return opd_c::kernels().kept_ids(backend, call, total, r, workspace);
            });
        });
    });
}
int run_score(const opd_score_call* of, opd_result* result, std::uint64_t* workspace) {
    return opd_c::guarded([&] {
        const opd_score_call call = opd_c::read("score", of);
        return with_result(result, [&](opd_result& r) {
            return opd_c::with_engine("score.engine", call.engine, [&](void* backend) {
                return opd_c::kernels().score(backend, call, r, workspace);
            });
        });
    });
}

// --- what passes over a batch read -----------------------------------------------------------------------------------

/// A tensor of doubles that must be there.
template <class T>
opd::matrix_view<T> needed_matrix(const char* name, const DLTensor* t) {
    if (t == nullptr) refuse(name, "is a null pointer");
    return opd_c::matrix<T>(name, t);
}
template <class T>
opd::vector_view<T> needed_vector(const char* name, const DLTensor* t) {
    if (t == nullptr) refuse(name, "is a null pointer");
    return opd_c::vector<T>(name, t);
}
/// body(view) of a matrix or a vector of float or double.
template <class Body>
void of_floats(const char* name, const DLTensor* t, Body&& body) {
    if (t == nullptr) refuse(name, "is a null pointer");
    if (opd_c::type_of(*t) == opd_c::dtype::float32) return body(float{});
    if (opd_c::type_of(*t) == opd_c::dtype::float64) return body(double{});
    opd_c::detail::refuse_type(name, *t, "float32 or float64");
}
/// No output of a pass over anything else of it.
void check_apart(const char* name, const DLTensor* out, const char* other, const DLTensor* in) {
    if (out == nullptr || in == nullptr) return;
    const auto bytes = [](const DLTensor& t) {
        std::uintptr_t first = reinterpret_cast<std::uintptr_t>(opd_c::detail::begin_of(t)), last = 0;
        for (int i = 0; i < t.ndim; ++i) {
            if (t.shape[i] == 0) return std::pair(first, first);
            last += std::uintptr_t(t.shape[i] - 1) * std::uintptr_t(opd_c::detail::step_of(t, i));
        }
        return std::pair(first, first + (last + 1) * t.dtype.bits / 8);
    };
    const auto [a, a_end] = bytes(*out);
    const auto [b, b_end] = bytes(*in);
    if (a < b_end && b < a_end) refuse(name, std::string("overlaps ") + other);
}

/// Drawn tokens as the library's passes see them, with the advantage of each: a cache in double, and what a token is
/// worth in it.
struct token_pass {
    index_t n = 0, m = 0;
    std::vector<std::int64_t> id;
    std::vector<double> log_p, log_mu, log_prox, advantage, place, zero;
    opd::row_mask<> mask;

    explicit token_pass(const opd_tokens* of) {
        const opd_tokens tokens = opd_c::read("tokens", of);
        const opd_teacher cache = opd_c::read("tokens.cache", tokens.cache);
        if (cache.kind != OPD_SAMPLES && cache.kind != OPD_WEIGHTED)
            refuse("cache.kind",
                   "is " + std::to_string(cache.kind) + "; passes are over drawn tokens: OPD_SAMPLES or OPD_WEIGHTED");
        if (tokens.reserved != 0)
            throw opd::unsupported(
                "opd: tokens.reserved is not 0: a later version of the interface may know what it is");
        if (tokens.has_ignore != 0 && tokens.mask == nullptr)
            refuse("tokens.has_ignore", "is set, and there is no mask");
        if (cache.ids == nullptr) refuse("cache.ids", "is a null pointer");
        const opd::matrix_view<const double> table = needed_matrix<const double>("tokens.log_p", tokens.log_p);
        n = table.rows, m = table.cols;
        const auto size = static_cast<std::size_t>(n * m);
        id.resize(size), log_p.resize(size), log_mu.resize(size), log_prox.resize(size), advantage.resize(size);
        place.resize(size), zero.resize(size);
        mask = opd_c::mask("tokens.mask", tokens.mask, tokens.has_ignore != 0, tokens.ignore);
        status = opd_c::kernels().tokens(tokens, cache,
                                         {id.data(), log_p.data(), log_mu.data(), log_prox.data(), advantage.data()});
        for (std::size_t i = 0; i < size; ++i) place[i] = double(i);
    }
    int status; ///< of the kernels, which have said why

    opd::matrix_view<const double> table(const std::vector<double>& of) const { return {of.data(), n, m, m}; }
    opd::teacher::samples<std::int64_t, double> cache() const {
        opd::teacher::samples<std::int64_t, double> c;
        c.ids = {id.data(), n, m, m};
        c.log_mu = table(log_mu), c.log_q = table(zero), c.log_prox = table(log_prox);
        c.log_ref = table(place);
        return c;
    }
    /// A of a token of cache(), by the place that stands where log p_ref would.
    struct worth {
        const double* of;
        double operator()(const opd::sampled_entry& x) const { return of[static_cast<std::size_t>(x.log_ref)]; }
    };
    worth advantages() const { return {advantage.data()}; }
};

opd::m2po m2po_form(const opd_m2po& m) {
    const std::string_view name = m.form != nullptr ? m.form : "drop";
    if (name == "drop") return opd::m2po::drop;
    if (name == "clip") return opd::m2po::clip;
    if (name == "all") return opd::m2po::all;
    refuse("m2po.form", "is '" + std::string(name.substr(0, 64)) + "'; it takes drop, clip, all");
}
void check_shape(const char* name, index_t rows, index_t cols, index_t n, index_t m) {
    if (rows != n || cols != m)
        refuse(name, "has shape " + opd::detail::shape(rows, cols) + ", expected " + opd::detail::shape(n, m));
}

std::span<const index_t> sequence_of(const DLTensor* t) {
    const opd::vector_view<const std::int64_t> v = needed_vector<const std::int64_t>("sequence", t);
    return {v.data, static_cast<std::size_t>(v.size)};
}
opd::gspo_fit gspo_of(const opd::matrix_view<double>& sums) {
    if (sums.cols != 3) refuse("sums", "has " + std::to_string(sums.cols) + " columns, not 3");
    opd::gspo_fit fit;
    fit.of.resize(static_cast<std::size_t>(sums.rows));
    for (index_t s = 0; s < sums.rows; ++s) fit.of[static_cast<std::size_t>(s)] = {sums(s, 0), sums(s, 1), sums(s, 2)};
    return fit;
}
void check_sequence(std::span<const index_t> sequence, index_t rows, index_t sequences) {
    if (static_cast<index_t>(sequence.size()) != rows)
        refuse("sequence", "has " + std::to_string(sequence.size()) + " rows, not " + std::to_string(rows));
    for (index_t r = 0; r < rows; ++r)
        if (const index_t s = sequence[static_cast<std::size_t>(r)]; s < 0 || s >= sequences)
            throw opd::invalid_input("sequence",
                                     "is " + std::to_string(s) + " of " + std::to_string(sequences) + " sequences", r);
}

opd::whitening_fit fit_of(const opd_whitening& w, const char* name) {
    if (!(w.count >= 0) || !opd::detail::is_finite(w.count) || !opd::detail::is_finite(w.mean) || !(w.squares >= 0))
        refuse(name, "holds no sums that opd_whitening_add could have left");
    return {opd_c::or_default(w.epsilon, 1e-8), w.count, w.mean, w.squares};
}
void put(opd_whitening* to, const opd::whitening_fit& fit) {
    opd_whitening w = opd_c::read("whitening", to);
    w.count = fit.count, w.mean = fit.mean, w.squares = fit.squares;
    opd_c::write("whitening", to, w);
}
opd::prefix_staleness sums_of(const opd_prefix_staleness& s) {
    return {s.rows, s.sum, s.least, s.most, s.ratios, s.squares};
}
void put(opd_prefix_staleness* to, const opd::prefix_staleness& s) {
    opd_c::write("staleness", to,
                 opd_prefix_staleness{sizeof(opd_prefix_staleness), s.rows, s.sum, s.least, s.most, s.ratios, s.squares,
                                      s.log_ratio(), s.effective_share()});
}

// --- penalties -------------------------------------------------------------------------------------------------------

/// Lists of ids of each row.
class id_lists {
public:
    id_lists(const char* name, const char* offsets_name, const DLTensor* ids, const DLTensor* offsets, index_t n,
             index_t v, const opd::row_mask<>& mask) {
        if (ids == nullptr && offsets == nullptr) return;
        if (ids == nullptr) refuse(name, "is a null pointer, and it has offsets");
        if (offsets == nullptr) refuse(offsets_name, "is a null pointer");
        wide_ = opd_c::type_of(*ids) == opd_c::dtype::int64;
        if (!wide_ && opd_c::type_of(*ids) != opd_c::dtype::int32)
            opd_c::detail::refuse_type(name, *ids, "int32 or int64");
        const opd_c::any_vector line = opd_c::vector_of(name, *ids);
        data_ = line.data;
        offsets_ = opd_c::offsets(offsets_name, offsets);
        if (offsets_.size != n + 1)
            refuse(offsets_name, "has " + std::to_string(offsets_.size) + " entries; " + std::to_string(n) +
                                     " rows have " + std::to_string(n + 1));
        for (index_t r = 0; r < n; ++r) {
            opd::detail::ids_of_row(offsets_name, offsets_, r, line.size);
            each(r, mask, [&](index_t id) {
                if (id < 0 || id >= v || id > std::numeric_limits<std::int32_t>::max())
                    throw opd::invalid_input(name, "id " + std::to_string(id) + " of a row of " + std::to_string(v), r);
            });
        }
    }
    template <class Visit>
    void each(index_t r, const opd::row_mask<>& mask, Visit visit) const {
        if (offsets_.empty() || !mask.kept(r)) return;
        for (index_t i = offsets_[r]; i < offsets_[r + 1]; ++i)
            visit(wide_ ? index_t{static_cast<const std::int64_t*>(data_)[i]}
                        : index_t{static_cast<const std::int32_t*>(data_)[i]});
    }

private:
    const void* data_ = nullptr;
    opd::row_offsets<> offsets_;
    bool wide_ = false;
};

/// body(Z{}) of the type of a tensor of logits.
template <class Body>
void of_logits(const char* name, const DLTensor* t, Body&& body) {
    using enum opd_c::dtype;
    switch (opd_c::type_of(*t)) {
    case float32:
        return body(float{});
    case float64:
        return body(double{});
    case bfloat16:
        return body(opd::bfloat16::from_bits(0));
    case half:
        return body(opd::half::from_bits(0));
    default:
        opd_c::detail::refuse_type(name, *t, "float32, float64, bfloat16 or float16");
    }
}
/// body(Out{}) of a tensor that has z's type, or float.
template <class Z, class Body>
void of_logits_or_float(const char* name, const DLTensor* t, Body&& body) {
    if (opd_c::type_of(*t) == opd_c::type_for<Z>()) return body(Z{});
    if (opd_c::type_of(*t) == opd_c::dtype::float32) return body(float{});
    opd_c::detail::refuse_type(name, *t, "float32, nor of the type of penalise.z");
}

void penalise_rows(const opd_penalise_call& c) {
    if (c.reserved != 0)
        throw opd::unsupported("opd: penalise.reserved is not 0: a later version of the interface may know what it is");
    if (c.has_ignore != 0 && c.mask == nullptr) refuse("penalise.has_ignore", "is set, and there is no mask");
    if (c.z == nullptr) refuse("penalise.z", "is a null pointer");
    if (c.out == nullptr && c.dz == nullptr) refuse("penalise.out", "is a null pointer, and so is penalise.dz");
    of_logits("penalise.z", c.z, [](auto) {});
    const opd_c::any_matrix shape = opd_c::matrix_of("penalise.z", *c.z);
    const index_t n = shape.rows, v = shape.cols;
    const opd::row_mask<> mask = opd_c::mask("penalise.mask", c.mask, c.has_ignore != 0, c.ignore);
    opd::detail::check_vector("penalise.mask", mask, n);
    const opd::penalties p{static_cast<float>(opd_c::or_default(c.repetition, 1.0)), static_cast<float>(c.presence),
                           static_cast<float>(c.frequency)};
    const auto each_id = [&](const id_lists& lists, index_t r, auto visit) {
        lists.each(r, mask, [&](index_t id) { visit(static_cast<std::int32_t>(id)); });
    };
    const id_lists prompt("penalise.prompt_ids", "penalise.prompt_offsets", c.prompt_ids, c.prompt_offsets, n, v, mask);
    const id_lists answer("penalise.answer_ids", "penalise.answer_offsets", c.answer_ids, c.answer_offsets, n, v, mask);
    try {
        opd::detail::check_penalties(p);
    } catch (const opd::invalid_input& e) { // "penalties.presence"
        const std::string_view name = e.argument, text = e.what();
        refuse("penalise" + std::string(name.substr(name.find('.'))), std::string(text.substr(5 + name.size() + 2)));
    }
    for (const auto& [name, t] : {std::pair("penalise.out", c.out), std::pair("penalise.dz", c.dz)}) {
        if (t == nullptr) continue;
        const opd_c::any_matrix m = opd_c::matrix_of(name, *t);
        check_shape(name, m.rows, m.cols, n, v);
        check_apart(name, t, "penalise.mask", c.mask);
        check_apart(name, t, "penalise.prompt_ids", c.prompt_ids),
            check_apart(name, t, "penalise.answer_ids", c.answer_ids);
        check_apart(name, t, "penalise.prompt_offsets", c.prompt_offsets);
        check_apart(name, t, "penalise.answer_offsets", c.answer_offsets);
        const bool itself = t == c.out && m.data == shape.data && m.stride == shape.stride &&
                            opd_c::type_of(*t) == opd_c::type_of(*c.z);
        if (itself && c.dz != nullptr) refuse("penalise.out", "is penalise.z, which the gradient is to be taken at");
        if (!itself) check_apart(name, t, "penalise.z", c.z);
    }
    check_apart("penalise.dz", c.dz, "penalise.out", c.out);

    of_logits("penalise.z", c.z, [&](auto z_type) {
        using Z = decltype(z_type);
        const opd::matrix_view<const Z> z = opd_c::matrix<const Z>("penalise.z", c.z);
        const auto rows = [&](auto&& of_row) {
            opd::token_history history;
            for (index_t r = 0; r < n; ++r) {
                if (!mask.kept(r)) continue;
                history.clear();
                each_id(prompt, r, [&](std::int32_t id) { history.add_prompt(std::span(&id, 1)); });
                each_id(answer, r, [&](std::int32_t id) { history.add(id); });
                of_row(r, opd::vector_view<const Z>(z.row(r), v), history);
            }
        };
        // both types are checked before either is written
        if (c.dz != nullptr)
            of_logits_or_float<Z>("penalise.dz", c.dz,
                                  [&](auto g) { (void)opd_c::matrix<decltype(g)>("penalise.dz", c.dz); });
        if (c.out != nullptr)
            of_logits_or_float<Z>("penalise.out", c.out, [&](auto o) {
                using Out = decltype(o);
                const opd::matrix_view<Out> out = opd_c::matrix<Out>("penalise.out", c.out);
                rows([&](index_t r, const auto& row, const opd::token_history& h) {
                    opd::apply_penalties(row, h, p, opd::vector_view<Out>(out.row(r), v));
                });
            });
        if (c.dz != nullptr)
            of_logits_or_float<Z>("penalise.dz", c.dz, [&](auto g) {
                using G = decltype(g);
                const opd::matrix_view<G> dz = opd_c::matrix<G>("penalise.dz", c.dz);
                rows([&](index_t r, const auto& row, const opd::token_history& h) {
                    opd::penalties_pullback(row, h, p, opd::vector_view<G>(dz.row(r), v));
                });
            });
    });
}

// --- overlaps --------------------------------------------------------------------------------------------------------

/// Ids of rows, whatever their type and layout, as one line with offsets, or as a matrix: in int64.
struct id_rows {
    std::vector<std::int64_t> ids;
    index_t rows = 0, cols = 0;
    opd::row_offsets<> offsets;

    id_rows(const char* name, const char* offsets_name, const DLTensor* t, const DLTensor* of_rows) {
        if (t == nullptr) refuse(name, "is a null pointer");
        const bool wide = opd_c::type_of(*t) == opd_c::dtype::int64;
        if (!wide && opd_c::type_of(*t) != opd_c::dtype::int32) opd_c::detail::refuse_type(name, *t, "int32 or int64");
        opd_c::any_matrix m;
        if (of_rows != nullptr) {
            offsets = opd_c::offsets(offsets_name, of_rows);
            if (offsets.size < 1) refuse(offsets_name, "is empty");
            const opd_c::any_vector line = opd_c::vector_of(name, *t);
            m = {line.data, 1, line.size, line.size};
            rows = offsets.size - 1;
            for (index_t r = 0; r < rows; ++r) opd::detail::ids_of_row(offsets_name, offsets, r, line.size);
        } else {
            m = opd_c::matrix_of(name, *t);
            rows = m.rows;
        }
        cols = m.cols;
        ids.reserve(static_cast<std::size_t>(m.rows * m.cols));
        for (index_t r = 0; r < m.rows; ++r)
            for (index_t j = 0; j < m.cols; ++j)
                ids.push_back(wide ? static_cast<const std::int64_t*>(m.data)[r * m.stride + j]
                                   : static_cast<const std::int32_t*>(m.data)[r * m.stride + j]);
    }
    /// body(ids) of either layout.
    template <class Body>
    void visit(Body&& body) const {
        if (offsets.empty()) return body(opd::matrix_view<const std::int64_t>(ids.data(), rows, cols, cols));
        opd::teacher::ragged_support<std::int64_t> lists;
        lists.ids = {ids.data(), static_cast<index_t>(ids.size())}, lists.offsets = offsets;
        body(lists);
    }
};

} // namespace

extern "C" {

int opd_draw(const opd_draw_call* draw, opd_result* result) { return run_draw(draw, result, nullptr); }
int opd_draw_workspace_bytes(const opd_draw_call* draw, uint64_t* bytes) {
    if (bytes == nullptr) return opd_c::guarded([] { refuse("bytes", "is a null pointer"); });
    return run_draw(draw, nullptr, bytes);
}

int opd_kept_ids(const opd_kept_ids_call* kept, int64_t* total, opd_result* result) {
    return run_kept_ids(kept, total, result, nullptr);
}
int opd_kept_ids_workspace_bytes(const opd_kept_ids_call* kept, uint64_t* bytes) {
    if (bytes == nullptr) return opd_c::guarded([] { refuse("bytes", "is a null pointer"); });
    std::int64_t total = 0;
    return run_kept_ids(kept, &total, nullptr, bytes);
}

int opd_score(const opd_score_call* score, opd_result* result) { return run_score(score, result, nullptr); }
int opd_score_workspace_bytes(const opd_score_call* score, uint64_t* bytes) {
    if (bytes == nullptr) return opd_c::guarded([] { refuse("bytes", "is a null pointer"); });
    return run_score(score, nullptr, bytes);
}

int opd_token_logp(opd_engine* engine, const DLTensor* z, double temperature, const DLTensor* ids,
                   const DLTensor* kept_ids, const DLTensor* kept_offsets, const DLTensor* log_p) {
    opd_score_call s = {};
    s.struct_size = sizeof s, s.engine = engine, s.z = z, s.temperature = temperature;
    s.ids = ids, s.kept_ids = kept_ids, s.kept_offsets = kept_offsets, s.log_p = log_p;
    if (ids == nullptr) return opd_c::guarded([] { refuse("score.ids", "is a null pointer"); });
    if (log_p == nullptr) return opd_c::guarded([] { refuse("score.log_p", "is a null pointer"); });
    return opd_score(&s, nullptr);
}
int opd_top_k(opd_engine* engine, const DLTensor* z, double temperature, const DLTensor* top_ids,
              const DLTensor* top_log_p) {
    opd_score_call s = {};
    s.struct_size = sizeof s, s.engine = engine, s.z = z, s.temperature = temperature;
    s.top_ids = top_ids, s.top_log_p = top_log_p;
    if (top_ids == nullptr) return opd_c::guarded([] { refuse("score.top_ids", "is a null pointer"); });
    return opd_score(&s, nullptr);
}
int opd_log_sum_exp(opd_engine* engine, const DLTensor* z, double temperature, const DLTensor* lse) {
    opd_score_call s = {};
    s.struct_size = sizeof s, s.engine = engine, s.z = z, s.temperature = temperature, s.lse = lse;
    if (lse == nullptr) return opd_c::guarded([] { refuse("score.lse", "is a null pointer"); });
    return opd_score(&s, nullptr);
}

int opd_penalise(const opd_penalise_call* penalise) {
    return opd_c::guarded([&] { penalise_rows(opd_c::read("penalise", penalise)); });
}

int opd_advantages(const opd_tokens* tokens, const DLTensor* advantage) {
    return opd_c::guarded([&]() -> int {
        const opd::matrix_view<double> out = needed_matrix<double>("advantage", advantage);
        const token_pass pass(tokens);
        if (pass.status != OPD_OK) return pass.status;
        check_shape("advantage", out.rows, out.cols, pass.n, pass.m);
        for (index_t r = 0; r < pass.n; ++r)
            for (index_t j = 0; j < pass.m; ++j) out(r, j) = pass.advantage[static_cast<std::size_t>(r * pass.m + j)];
        return OPD_OK;
    });
}

int opd_m2po_squares(const opd_m2po* m2po, const opd_tokens* tokens, const DLTensor* squares, int64_t* count) {
    return opd_c::guarded([&]() -> int {
        const opd_m2po of = opd_c::read("m2po", m2po);
        const opd::m2po form = m2po_form(of);
        if (count == nullptr) refuse("count", "is a null pointer");
        const opd::vector_view<double> out = needed_vector<double>("squares", squares);
        const token_pass pass(tokens);
        if (pass.status != OPD_OK) return pass.status;
        opd::m2po_fit fit{.form = form};
        fit.add(pass.table(pass.log_p), pass.cache(), pass.mask, pass.advantages());
        const auto found = static_cast<index_t>(fit.squares.size());
        if (found > out.size)
            refuse("squares",
                   "has room for " + std::to_string(out.size) + " numbers; there are " + std::to_string(found));
        if (found > 0) std::memcpy(out.data, fit.squares.data(), fit.squares.size() * sizeof(double));
        *count = found;
        return OPD_OK;
    });
}
int opd_m2po_freeze(opd_m2po* m2po, const DLTensor* squares) {
    return opd_c::guarded([&] {
        opd_m2po of = opd_c::read("m2po", m2po);
        const opd::vector_view<const double> all = needed_vector<const double>("squares", squares);
        opd::m2po_fit fit{.tau = opd_c::or_default(of.tau, 0.04), .form = m2po_form(of)};
        if (!opd::detail::is_finite(fit.tau) || !(fit.tau > 0)) refuse("m2po.tau", "must be positive and finite");
        for (index_t i = 0; i < all.size; ++i)
            if (!opd::detail::is_finite(all[i]) || all[i] < 0)
                throw opd::invalid_input("squares", "is no square of a log-ratio", i);
        if (all.size > 0) fit.squares.assign(all.data, all.data + all.size);
        const opd::m2po_selection selection = fit.freeze();
        const opd::ppo_clip clip = selection.clip();
        of.level = selection.level, of.second_moment = selection.second_moment;
        of.low = fit.form == opd::m2po::clip ? clip.low : 0, of.high = fit.form == opd::m2po::clip ? clip.high : 0;
        opd_c::write("m2po", m2po, of);
    });
}
int opd_m2po_keep(const opd_m2po* m2po, const opd_tokens* tokens, const DLTensor* keep, int64_t* dropped) {
    return opd_c::guarded([&]() -> int {
        const opd_m2po of = opd_c::read("m2po", m2po);
        const opd::m2po_selection selection{m2po_form(of), of.level, of.second_moment};
        if (opd::detail::is_nan(of.level) || of.level < 0) refuse("m2po.level", "is not of opd_m2po_freeze");
        if (keep == nullptr) refuse("keep", "is a null pointer");
        const opd::matrix_view<const std::uint8_t> out = opd_c::flags("keep", keep);
        const token_pass pass(tokens);
        if (pass.status != OPD_OK) return pass.status;
        check_shape("keep", out.rows, out.cols, pass.n, pass.m);
        check_apart("keep", keep, "tokens.mask", opd_c::read("tokens", tokens).mask);
        const opd::index_t gone = selection.keep(
            pass.table(pass.log_p), pass.cache(), pass.mask,
            opd::matrix_view<std::uint8_t>(const_cast<std::uint8_t*>(out.data), out.rows, out.cols, out.stride),
            pass.advantages());
        if (dropped != nullptr) *dropped = gone;
        return OPD_OK;
    });
}

int opd_gspo_add(const opd_tokens* tokens, const DLTensor* sequence, const DLTensor* sums) {
    return opd_c::guarded([&]() -> int {
        const opd::matrix_view<double> to = needed_matrix<double>("sums", sums);
        const std::span<const index_t> rows = sequence_of(sequence);
        opd::gspo_fit fit = gspo_of(to);
        const token_pass pass(tokens);
        if (pass.status != OPD_OK) return pass.status;
        check_sequence(rows, pass.n, to.rows);
        check_apart("sums", sums, "sequence", sequence);
        fit.add(pass.table(pass.log_p), pass.cache(), rows, pass.mask, pass.advantages());
        for (index_t s = 0; s < to.rows; ++s) {
            const opd::gspo_fit::sums& of = fit.of[static_cast<std::size_t>(s)];
            to(s, 0) = of.log_ratio, to(s, 1) = of.advantage, to(s, 2) = of.tokens;
        }
        return OPD_OK;
    });
}
int opd_gspo_fill(const DLTensor* sums, const DLTensor* sequence, const DLTensor* log_ratio,
                  const DLTensor* advantage) {
    return opd_c::guarded([&] {
        const opd::matrix_view<double> of = needed_matrix<double>("sums", sums);
        const std::span<const index_t> rows = sequence_of(sequence);
        const opd::vector_view<double> out = needed_vector<double>("log_ratio", log_ratio);
        const opd::matrix_view<double> means = opd_c::matrix<double>("advantage", advantage);
        const opd::gspo_fit fit = gspo_of(of);
        check_sequence(rows, out.size, of.rows);
        if (advantage != nullptr) check_shape("advantage", means.rows, means.cols, out.size, means.cols);
        check_apart("log_ratio", log_ratio, "sums", sums), check_apart("log_ratio", log_ratio, "sequence", sequence);
        check_apart("advantage", advantage, "sums", sums), check_apart("advantage", advantage, "sequence", sequence);
        check_apart("advantage", advantage, "log_ratio", log_ratio);
        fit.log_ratios(rows, out);
        if (advantage != nullptr) fit.mean_advantages(rows, means);
    });
}

int opd_credit(const DLTensor* advantage, const DLTensor* offsets, double gamma_lambda, const DLTensor* mask) {
    return opd_c::guarded([&] {
        const opd::matrix_view<double> a = needed_matrix<double>("advantage", advantage);
        if (offsets == nullptr) refuse("offsets", "is a null pointer");
        check_apart("advantage", advantage, "offsets", offsets), check_apart("advantage", advantage, "mask", mask);
        opd::credit(a, opd_c::offsets("offsets", offsets), gamma_lambda, opd_c::mask("mask", mask, false, 0));
    });
}
int opd_group_relative(const DLTensor* reward, int64_t group, double epsilon) {
    return opd_c::guarded([&] {
        const opd::vector_view<double> r = needed_vector<double>("reward", reward);
        opd::group_relative(std::span(r.data, static_cast<std::size_t>(r.size)), group, epsilon);
    });
}

int opd_whitening_add(opd_whitening* whitening, const DLTensor* advantage, const DLTensor* mask) {
    return opd_c::guarded([&] {
        opd::whitening_fit fit = fit_of(opd_c::read("whitening", whitening), "whitening");
        if (!opd::detail::is_finite(fit.epsilon) || !(fit.epsilon > 0))
            refuse("whitening.epsilon", "must be positive and finite");
        of_floats("advantage", advantage, [&](auto type) {
            fit.add(opd_c::matrix<const decltype(type)>("advantage", advantage), opd_c::mask("mask", mask, false, 0));
        });
        put(whitening, fit);
    });
}
int opd_whitening_merge(opd_whitening* whitening, const opd_whitening* from) {
    return opd_c::guarded([&] {
        opd::whitening_fit fit = fit_of(opd_c::read("whitening", whitening), "whitening");
        fit.merge(fit_of(opd_c::read("from", from), "from"));
        put(whitening, fit);
    });
}
int opd_whitening_apply(const opd_whitening* whitening, const DLTensor* advantage, const DLTensor* out) {
    return opd_c::guarded([&] {
        const opd::whitening_fit fit = fit_of(opd_c::read("whitening", whitening), "whitening");
        of_floats("advantage", advantage, [&](auto type) {
            const opd::matrix_view<const decltype(type)> from =
                opd_c::matrix<const decltype(type)>("advantage", advantage);
            of_floats("out", out, [&](auto out_type) {
                const opd::matrix_view<decltype(out_type)> to = opd_c::matrix<decltype(out_type)>("out", out);
                const bool itself = std::is_same_v<decltype(type), decltype(out_type)> &&
                                    static_cast<const void*>(to.data) == from.data && to.stride == from.stride;
                check_shape("out", to.rows, to.cols, from.rows, from.cols);
                if (!itself) check_apart("out", out, "advantage", advantage);
                fit.apply(from, to);
            });
        });
    });
}

int opd_prefix_staleness_add(opd_prefix_staleness* staleness, const DLTensor* log_p, const DLTensor* log_mu,
                             const DLTensor* offsets, const DLTensor* mask) {
    return opd_c::guarded([&] {
        opd::prefix_staleness sums = sums_of(opd_c::read("staleness", staleness));
        if (offsets == nullptr) refuse("offsets", "is a null pointer");
        of_floats("log_p", log_p, [&](auto p) {
            of_floats("log_mu", log_mu, [&](auto mu) {
                sums.add(opd_c::vector<const decltype(p)>("log_p", log_p),
                         opd_c::vector<const decltype(mu)>("log_mu", log_mu), opd_c::offsets("offsets", offsets),
                         opd_c::mask("mask", mask, false, 0));
            });
        });
        put(staleness, sums);
    });
}
int opd_prefix_staleness_merge(opd_prefix_staleness* staleness, const opd_prefix_staleness* from) {
    return opd_c::guarded([&] {
        opd::prefix_staleness sums = sums_of(opd_c::read("staleness", staleness));
        sums.merge(sums_of(opd_c::read("from", from)));
        put(staleness, sums);
    });
}

int opd_draft_weights(const char* by, double parameter, const DLTensor* offsets, const DLTensor* losses,
                      const DLTensor* weights) {
    return opd_c::guarded([&] {
        if (by == nullptr) refuse("by", "is a null pointer");
        const std::string_view name = by;
        const opd::vector_view<float> to = needed_vector<float>("weights", weights);
        if (offsets == nullptr) refuse("offsets", "is a null pointer");
        const opd::row_offsets<> rows = opd_c::offsets("offsets", offsets);
        check_apart("weights", weights, "offsets", offsets), check_apart("weights", weights, "losses", losses);
        std::vector<index_t> first(static_cast<std::size_t>(rows.size));
        for (index_t i = 0; i < rows.size; ++i) first[static_cast<std::size_t>(i)] = rows[i];
        const std::span<const index_t> drafts(first);
        const std::span out(to.data, static_cast<std::size_t>(to.size));
        if (name == "decaying") {
            if (losses != nullptr) refuse("losses", "is of accepted_length; decaying reads none");
            opd::fill_draft_weights(opd::decaying{parameter}, drafts, out);
        } else if (name == "accepted_length") {
            const opd::vector_view<const float> from = needed_vector<const float>("losses", losses);
            opd::fill_draft_weights(opd::accepted_length{parameter}, drafts,
                                    std::span(from.data, static_cast<std::size_t>(from.size)), out);
        } else {
            refuse("by", "is '" + std::string(name.substr(0, 64)) + "'; it takes decaying, accepted_length");
        }
    });
}

int opd_ratio_quantile(const DLTensor* counts, double q, double* ratio) {
    static_assert(OPD_RATIO_BINS == opd::ratio_sketch::bins);
    return opd_c::guarded([&] {
        if (ratio == nullptr) refuse("ratio", "is a null pointer");
        const opd::vector_view<const std::int64_t> c = needed_vector<const std::int64_t>("counts", counts);
        for (index_t i = 0; i < c.size; ++i)
            if (c[i] < 0) throw opd::invalid_input("counts", "is negative", i);
        *ratio = opd::ratio_sketch::quantile(std::span(c.data, static_cast<std::size_t>(c.size)), q);
    });
}

int opd_id_overlap(const DLTensor* ids, const DLTensor* offsets, const DLTensor* others, const DLTensor* others_offsets,
                   const DLTensor* share, const DLTensor* mask, opd_overlap* overlap) {
    return opd_c::guarded([&] {
        check_out("overlap", overlap);
        const id_rows mine("ids", "offsets", ids, offsets), theirs("others", "others_offsets", others, others_offsets);
        if (mine.rows != theirs.rows)
            refuse("others", "has " + std::to_string(theirs.rows) + " rows, not " + std::to_string(mine.rows));
        const opd::vector_view<double> out = opd_c::vector<double>("share", share);
        for (const auto& [name, t] : {std::pair("ids", ids), std::pair("offsets", offsets), std::pair("others", others),
                                      std::pair("others_offsets", others_offsets), std::pair("mask", mask)})
            check_apart("share", share, name, t);
        opd::id_overlaps found;
        mine.visit([&](const auto& a) {
            theirs.visit(
                [&](const auto& b) { found = opd::id_overlap(a, b, out, opd_c::mask("mask", mask, false, 0)); });
        });
        opd_c::write(
            "overlap", overlap,
            opd_overlap{sizeof(opd_overlap), found.rows, found.bad_rows, found.first_bad_row, found.sum, found.mean()});
    });
}
int opd_drop_repeats(const DLTensor* ids, const DLTensor* offsets, int64_t* dropped) {
    return opd_c::guarded([&] {
        if (ids == nullptr) refuse("ids", "is a null pointer");
        check_apart("ids", ids, "offsets", offsets);
        index_t gone = 0;
        const auto of = [&](auto type) {
            using Id = decltype(type);
            if (offsets == nullptr) {
                gone = opd::drop_repeats(opd_c::matrix<Id>("ids", ids));
            } else {
                gone = opd::drop_repeats(opd_c::vector<Id>("ids", ids), opd_c::offsets("offsets", offsets));
            }
        };
        if (opd_c::type_of(*ids) == opd_c::dtype::int32)
            of(std::int32_t{});
        else if (opd_c::type_of(*ids) == opd_c::dtype::int64)
            of(std::int64_t{});
        else
            opd_c::detail::refuse_type("ids", *ids, "int32 or int64");
        if (dropped != nullptr) *dropped = gone;
    });
}

} // extern "C"
