// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Penalties of ids that a text has already, and lists of ids: overlaps, repeats.
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "opd/c/rows.h"
#include "opd/checks/shapes.hpp"
#include "opd/id_overlap.hpp"
#include "opd/penalties.hpp"
#include "opd/teacher.hpp"
#include "spans.hpp"

namespace {

using namespace opd_c;
using opd::index_t;

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

int opd_penalise(const opd_penalise_call* penalise) {
    return opd_c::guarded([&] { penalise_rows(opd_c::read("penalise", penalise)); });
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
