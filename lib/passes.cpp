// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Passes over the drawn tokens of a batch: advantages, M2PO, GSPO, credit, whitening, staleness, weights of drafts.
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
#include "opd/ratio_sketch.hpp"
#include "spans.hpp"

namespace {

using namespace opd_c;
using opd::index_t;

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

} // namespace

extern "C" {

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

} // extern "C"
