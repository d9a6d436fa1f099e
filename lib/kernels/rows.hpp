// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What draws, kept sets and scores have in common: logits of any type as rows, ids and log-probs of the caller's
// types beside those that the rows are compiled for (int64 and double), names of the C interface in errors, and where
// the memory for it comes from.
//
// Rows are compiled for float, bfloat16 and double. One of half becomes float as a whole when a thread comes to it:
// what arithmetic reads is the same float either way. Ids and log-probs are kept in int64 and double, and rounded
// once as they are handed over, which is where the C++ call rounds them, too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "diagnostics.hpp"
#include "errors.hpp"
#include "kernels.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/c/rows.h"
#include "opd/checks/spans.hpp"
#include "opd/logits/logit_rows.hpp"
#include "place.hpp"
#include "structs.hpp"
#include "tensor.hpp"

namespace opd_c::kernel {

int draw(void* backend, const opd_draw_call& call, opd_result& result, std::uint64_t* workspace);
int kept_ids(void* backend, const opd_kept_ids_call& call, std::int64_t* total, opd_result& result,
             std::uint64_t* workspace);
int score(void* backend, const opd_score_call& call, opd_result& result, std::uint64_t* workspace);
int tokens(const opd_tokens& tokens, const opd_teacher& cache, const opd_token_table& table);

/// Errors of the C++ call under the caller's names: options.top_p is draw.top_p. `call`: "draw".
[[noreturn]] void rethrow_as(const char* call, const opd::invalid_input& e);
template <class Body>
auto renamed(const char* call, Body&& body) {
    try {
        return body();
    } catch (const opd::invalid_input& e) {
        rethrow_as(call, e);
    }
}

/// The tensors of a call, for overlaps between them.
class tensor_spans {
public:
    void reads_matrix(const char* name, const DLTensor* t) {
        if (t != nullptr) spans_.reads(name, bytes_of(matrix_of(name, *t), *t));
    }
    void reads(const char* name, const DLTensor* t) {
        if (t != nullptr) spans_.reads(name, bytes_of(vector_of(name, *t), *t));
    }
    void writes_matrix(const char* name, const DLTensor* t) {
        if (t != nullptr) spans_.writes(name, bytes_of(matrix_of(name, *t), *t));
    }
    void writes(const char* name, const DLTensor* t) {
        if (t != nullptr) spans_.writes(name, bytes_of(vector_of(name, *t), *t));
    }
    void check() const { spans_.check(); }

private:
    using bytes = opd::matrix_view<const unsigned char>;
    static bytes bytes_of(const any_matrix& m, const DLTensor& t) {
        const index_t size = t.dtype.bits / 8;
        return {static_cast<const unsigned char*>(m.data), m.rows, m.cols * size, m.stride * size};
    }
    static bytes bytes_of(const any_vector& v, const DLTensor& t) {
        const index_t size = v.size * (t.dtype.bits / 8);
        return {static_cast<const unsigned char*>(v.data), 1, size, size};
    }
    opd::detail::call_spans spans_;
};

/// Memory of one call: the end of the caller's arena, or the heap. Of a call whose bytes alone are asked for:
/// addresses that nobody reads.
class call_memory {
public:
    call_memory(opd::cpu_backend& be, bool counts) : be_(be), arena_(be.arena), counts_(counts) {}
    call_memory(const call_memory&) = delete;
    ~call_memory() { be_.arena = arena_; }

    template <class T>
    T* take(index_t n) {
        return static_cast<T*>(bytes(static_cast<std::size_t>(n) * sizeof(T)));
    }
    std::size_t used() const { return used_; }

private:
    opd::cpu_backend& be_;
    std::span<std::byte> arena_;
    bool counts_;
    std::size_t used_ = 0;
    std::vector<std::unique_ptr<std::byte[]>> own_;

    void* bytes(std::size_t wanted) {
        const std::size_t size = (wanted + 63) / 64 * 64 + 64, before = used_;
        used_ += size;
        if (counts_) return reinterpret_cast<void*>(std::uintptr_t{4096} + before);
        std::byte* from = nullptr;
        if (arena_.empty()) {
            own_.push_back(std::make_unique_for_overwrite<std::byte[]>(size));
            from = own_.back().get();
        } else {
            if (be_.arena.size() <= size)
                throw opd::invalid_input("workspace", "holds " + std::to_string(arena_.size()) +
                                                          " bytes; this call needs more (see workspace_bytes)");
            be_.arena = be_.arena.first(be_.arena.size() - size);
            from = be_.arena.data() + be_.arena.size();
        }
        return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(from) + 63) / 64 * 64);
    }
};

/// Buffers of one row each for the threads of a call, and which row each of them holds.
struct widened_rows {
    float* buffers;
    index_t stride;
    int count;
    std::uint64_t serial; ///< of the call: no two have the same
    std::atomic<int> taken{0};

    widened_rows(opd::cpu_backend& be, call_memory& memory, index_t v);
    /// Row r, which is these numbers, as float.
    const float* row(const opd::half* numbers, index_t r, index_t v);
};

/// Logits of any type, as a source of rows of F.
template <class F>
struct any_rows {
    using logit_type = F;
    static constexpr bool one_tile = true;
    static constexpr opd::space memory_space = opd::space::host;
    const void* data = nullptr;
    index_t n = 0, v = 0, stride = 0;
    float temperature = 1;
    widened_rows* wide = nullptr; ///< the numbers are half

    index_t rows() const { return n; }
    index_t vocab() const { return v; }
    index_t tile_size() const { return v; }
    const F* tile(opd::row_place at, index_t begin) const {
        if constexpr (std::is_same_v<F, float>)
            if (wide != nullptr)
                return wide->row(static_cast<const opd::half*>(data) + at.row * stride, at.row, v) + begin;
        return static_cast<const F*>(data) + at.row * stride + begin;
    }
    const F& logit(opd::row_place at, index_t id) const { return tile(at, id)[0]; }
};

/// The logits of a call: they must be there, and of one of the four types.
dtype logits_type(const char* name, const DLTensor* z);
inline any_matrix logits_matrix(const char* name, const DLTensor* z, dtype type) {
    using enum dtype;
    const auto plain = [](const auto& m) {
        return any_matrix{const_cast<void*>(static_cast<const void*>(m.data)), m.rows, m.cols, m.stride};
    };
    const any_matrix m = type == float32    ? plain(matrix<const float>(name, z))
                         : type == float64  ? plain(matrix<const double>(name, z))
                         : type == bfloat16 ? plain(matrix<const opd::bfloat16>(name, z))
                                            : plain(matrix<const opd::half>(name, z));
    if (m.cols < 1 && m.rows > 0) refuse(name, "has no columns");
    return m;
}
/// body(source) of rows of float, bfloat16 or double.
template <class Body>
auto with_rows(const char* name, const DLTensor* z, opd::cpu_backend& be, call_memory& memory, Body&& body) {
    const dtype type = logits_type(name, z);
    const any_matrix m = logits_matrix(name, z, type);
    if (type == dtype::float64) return body(any_rows<double>{m.data, m.rows, m.cols, m.stride});
    if (type == dtype::bfloat16) return body(any_rows<opd::bfloat16>{m.data, m.rows, m.cols, m.stride});
    any_rows<float> rows{m.data, m.rows, m.cols, m.stride};
    if (type == dtype::float32) return body(rows);
    widened_rows wide(be, memory, m.cols);
    rows.wide = &wide;
    return body(rows);
}
/// body(view) of rows whose logits are read one by one, each where it lies.
template <class Body>
auto with_view(const char* name, const DLTensor* z, Body&& body) {
    const dtype type = logits_type(name, z);
    const any_matrix m = logits_matrix(name, z, type);
    const auto of = [&]<class Z>(const Z*) {
        return body(opd::matrix_view<const Z>(static_cast<const Z*>(m.data), m.rows, m.cols, m.stride));
    };
    if (type == dtype::float32) return of(static_cast<const float*>(nullptr));
    if (type == dtype::float64) return of(static_cast<const double*>(nullptr));
    if (type == dtype::bfloat16) return of(static_cast<const opd::bfloat16*>(nullptr));
    return of(static_cast<const opd::half*>(nullptr));
}

/// A tensor of ids or log-probs: the caller's memory where it is of Wide (int64, double), else numbers of Wide on
/// their way to or from a Narrow (int32, float).
template <class Wide, class Narrow>
class converted {
public:
    converted() = default;
    /// Rows of a matrix; of `line`, a vector of any shape as (1,size).
    converted(const char* name, const DLTensor* t, call_memory& memory, bool line = false) {
        if (t == nullptr) return;
        wide_ = opd_c::type_of(*t) == type_for<Wide>();
        if (!wide_ && opd_c::type_of(*t) != type_for<Narrow>())
            detail::refuse_type(name, *t, std::is_integral_v<Wide> ? "int32 or int64" : "float32 or float64");
        if (line) {
            const any_vector v = vector_of(name, *t);
            from_ = {v.data, 1, v.size, v.size};
        } else {
            from_ = matrix_of(name, *t);
        }
        if (reinterpret_cast<std::uintptr_t>(from_.data) % (wide_ ? sizeof(Wide) : sizeof(Narrow)) != 0)
            refuse(name, "is not aligned to its element type");
        if (wide_)
            view_ = {static_cast<Wide*>(from_.data), from_.rows, from_.cols, from_.stride};
        else
            view_ = {from_.data == nullptr ? nullptr : memory.take<Wide>(from_.rows * from_.cols), from_.rows,
                     from_.cols, from_.cols};
    }
    opd::matrix_view<Wide> matrix() const { return view_; }
    opd::vector_view<Wide> vector() const { return {view_.data, view_.cols}; }
    /// In: the caller's numbers.
    void load() const {
        for (index_t r = 0; !wide_ && r < view_.rows; ++r)
            for (index_t j = 0; j < view_.cols; ++j) view_(r, j) = static_cast<Wide>(narrow(r)[j]);
    }
    /// Out: rows that the mask keeps.
    void store(const opd::row_mask<>& mask) const {
        for (index_t r = 0; !wide_ && r < view_.rows; ++r)
            if (mask.kept(r)) store(r, 0, view_.cols);
    }
    /// Out: of a line of a number a row.
    void store_line(const opd::row_mask<>& mask) const {
        for (index_t r = 0; !wide_ && r < view_.cols; ++r)
            if (mask.kept(r)) store(0, r, r + 1);
    }
    /// Out: of a line, what the offsets give to rows that the mask keeps.
    void store_lists(const opd::row_mask<>& mask, const opd::row_offsets<>& offsets) const {
        for (index_t r = 0; !wide_ && r + 1 < offsets.size; ++r)
            if (mask.kept(r)) store(0, offsets[r], offsets[r + 1]);
    }

private:
    any_matrix from_;
    opd::matrix_view<Wide> view_;
    bool wide_ = true;
    Narrow* narrow(index_t r) const { return static_cast<Narrow*>(from_.data) + r * from_.stride; }
    void store(index_t r, index_t first, index_t last) const {
        for (index_t j = first; j < last; ++j) narrow(r)[j] = static_cast<Narrow>(view_(r, j));
    }
};
using id_tensor = converted<std::int64_t, std::int32_t>;
using log_tensor = converted<double, float>;

template <class Struct>
void check_reserved(const char* call, const Struct& s) {
    refuse_reserved(call, s);
    if (s.has_ignore != 0 && s.mask == nullptr)
        refuse(std::string(call) + ".has_ignore", "is set, and there is no mask");
}
/// The filter of a draw or of kept sets.
template <class Struct>
opd::filter filter_of(const Struct& s) {
    return {.temperature = static_cast<float>(or_default(s.temperature, 1.0)),
            .top_k = s.top_k,
            .top_p = static_cast<float>(or_default(s.top_p, 1.0)),
            .min_p = static_cast<float>(s.min_p)};
}
/// Runs a checked call, or asks for its bytes.
template <class Job>
opd::result run(opd::cpu_backend& be, const Job& job, std::uint64_t* workspace) {
    if (workspace == nullptr) return be.for_rows(job);
    *workspace = be.workspace_bytes(job);
    return {};
}

} // namespace opd_c::kernel
