// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Draws and kept sets.
#include "rows.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "opd/draw.hpp"

namespace opd_c::kernel {

void rethrow_as(const char* call, const opd::invalid_input& e) {
    std::string_view name = e.argument, text = e.what();
    if (name == "workspace" || name.starts_with(std::string(call).append("."))) throw e; // it has its name
    text.remove_prefix(std::min(text.size(), 5 + name.size() + (e.row < 0 ? 0 : 6 + std::to_string(e.row).size()) + 2));
    for (const std::string_view group : {"out.", "options.", "keys.", "design.", "filter.", "teacher.", "student."})
        if (name.starts_with(group)) {
            name.remove_prefix(group.size());
            break;
        }
    if (name == "budget") name = "m";
    throw opd::invalid_input(std::string(call).append(".").append(name), text, e.row);
}

dtype logits_type(const char* name, const DLTensor* z) {
    if (z == nullptr) refuse(name, "is a null pointer");
    const dtype type = opd_c::type_of(*z);
    using enum dtype;
    if (type != float32 && type != float64 && type != bfloat16 && type != half)
        opd_c::detail::refuse_type(name, *z, "float32, float64, bfloat16 or float16");
    return type;
}

namespace {

std::atomic<std::uint64_t> serials{0};

/// A row as arithmetic sees it: the least half is a mask.
void widen(const opd::half* numbers, index_t n, float* to) {
    index_t i = 0;
#if defined(__F16C__)
    const __m256 least = _mm256_set1_ps(-65504.f), mask = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xff800000u)));
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + i)));
        _mm256_storeu_ps(to + i, _mm256_blendv_ps(x, mask, _mm256_cmp_ps(x, least, _CMP_EQ_OQ)));
    }
#endif
    for (; i < n; ++i) to[i] = opd::detail::load_maskable(numbers[i]);
}

} // namespace

widened_rows::widened_rows(opd::cpu_backend& be, call_memory& memory, index_t v)
    : stride((v + 15) / 16 * 16), count(be.threads < 1 ? 1 : be.threads), serial(++serials) {
    buffers = memory.take<float>(stride * count);
}

const float* widened_rows::row(const opd::half* numbers, index_t r, index_t v) {
    struct held {
        std::uint64_t serial = 0;
        index_t row = -1;
        float* at = nullptr;
    };
    thread_local held now;
    if (now.serial != serial) now = {serial, -1, buffers + stride * taken.fetch_add(1)};
    if (now.row != r) {
        widen(numbers, v, now.at);
        now.row = r;
    }
    return now.at;
}

namespace {

/// body(design) of the caller's name and numbers; `columns`: of ids.
template <class Body>
opd::result with_design(const opd_draw_call& c, index_t columns, Body&& body) {
    namespace design = opd::design;
    const std::string_view name = c.design != nullptr ? c.design : "gumbel";
    const bool one = name == "greedy" || name == "gumbel", has_head = name == "head_tail";
    if (c.h != 0 && !has_head) refuse("draw.h", "is of head_tail, not of " + std::string(name.substr(0, 64)));
    if (c.first != 0 && name != "iid") refuse("draw.first", "is of iid, not of " + std::string(name.substr(0, 64)));
    if (one && c.m != 0 && c.m != 1)
        refuse("draw.m", "is " + std::to_string(c.m) + "; " + std::string(name) + " draws one id a row");
    const index_t m = c.m != 0 ? c.m : columns - c.h;
    if (name == "greedy") return body(design::greedy{});
    if (name == "gumbel") return body(design::gumbel{});
    if (name == "iid") return body(design::iid{m, c.first});
    if (name == "threshold") return body(design::threshold{m});
    if (has_head) return body(design::head_tail{c.h, m});
    if (name == "gumbel_top") return body(design::gumbel_top{m});
    refuse("draw.design", "is '" + std::string(name.substr(0, 64)) +
                              "'; it takes greedy, gumbel, iid, threshold, head_tail, gumbel_top");
}

/// Of an integer type of so many bits, signed or not.
template <class T>
opd::vector_view<const T> keys_of(const char* name, const DLTensor* t) {
    if (t == nullptr) return {};
    if (t->dtype.lanes != 1 || t->dtype.bits != 8 * sizeof(T) || (t->dtype.code != kDLInt && t->dtype.code != kDLUInt))
        opd_c::detail::refuse_type(name, *t, sizeof(T) == 8 ? "uint64 or int64" : "uint32 or int32");
    const any_vector v = vector_of(name, *t);
    if (reinterpret_cast<std::uintptr_t>(v.data) % alignof(T) != 0) refuse(name, "is not aligned to its element type");
    return {static_cast<const T*>(v.data), v.size};
}

void check_draw_spans(const opd_draw_call& c) {
    tensor_spans spans;
    spans.reads_matrix("draw.z", c.z);
    spans.reads("draw.sample", c.sample), spans.reads("draw.position", c.position);
    spans.reads_matrix("draw.uniforms", c.uniforms);
    spans.reads("draw.mask", c.mask);
    spans.writes_matrix("draw.ids", c.ids), spans.writes_matrix("draw.log_mu", c.log_mu);
    spans.writes_matrix("draw.weight", c.weight), spans.writes_matrix("draw.exact", c.exact);
    spans.writes("draw.lse", c.lse), spans.writes("draw.log_kept", c.log_kept);
    spans.writes("draw.cut_logit", c.cut_logit), spans.writes("draw.cut_id", c.cut_id);
    spans.writes("draw.kept", c.kept);
    spans.writes("draw.log_tail", c.log_tail), spans.writes("draw.kappa", c.kappa);
    spans.check();
}

opd::matrix_view<std::uint8_t> flags_out(const char* name, const DLTensor* t) {
    const opd::matrix_view<const std::uint8_t> f = flags(name, t);
    return {const_cast<std::uint8_t*>(f.data), f.rows, f.cols, f.stride};
}

void draw_of(opd::cpu_backend& be, const opd_draw_call& c, opd_result& result, std::uint64_t* workspace) {
    check_reserved("draw", c);
    const dtype type = logits_type("draw.z", c.z);
    const index_t n = logits_matrix("draw.z", c.z, type).rows;
    if (c.ids == nullptr) refuse("draw.ids", "is a null pointer");
    if (c.log_mu == nullptr) refuse("draw.log_mu", "is a null pointer");
    if ((c.cut_logit == nullptr) != (c.cut_id == nullptr))
        refuse(c.cut_id == nullptr ? "draw.cut_id" : "draw.cut_logit", "is a null pointer; a cut is a logit and an id");
    check_draw_spans(c);
    call_memory memory(be, workspace != nullptr);
    const id_tensor ids("draw.ids", c.ids, memory);
    const log_tensor log_mu("draw.log_mu", c.log_mu, memory), weight("draw.weight", c.weight, memory);
    const opd::vector_view<double> cut_logit = vector<double>("draw.cut_logit", c.cut_logit);
    const opd::vector_view<std::int64_t> cut_id = vector<std::int64_t>("draw.cut_id", c.cut_id);
    opd::detail::check_vector("draw.cut_logit", cut_logit, n), opd::detail::check_vector("draw.cut_id", cut_id, n);
    const opd::draw_keys<> keys{.seed = c.seed,
                                .sample = keys_of<std::uint64_t>("draw.sample", c.sample),
                                .position = keys_of<std::uint32_t>("draw.position", c.position),
                                .uniforms = matrix<const double>("draw.uniforms", c.uniforms)};
    opd::draw_options<> options{.filter = filter_of(c), .mask = mask("draw.mask", c.mask, c.has_ignore != 0, c.ignore)};
    options.lse = vector<double>("draw.lse", c.lse), options.log_kept = vector<double>("draw.log_kept", c.log_kept);
    options.kept = vector<index_t>("draw.kept", c.kept);
    options.log_tail = vector<double>("draw.log_tail", c.log_tail),
    options.kappa = vector<double>("draw.kappa", c.kappa);
    if (c.cut_logit != nullptr && n > 0) options.cut = {memory.take<opd::filter_cut>(n), n};
    const opd::drawn<std::int64_t, double, double> out{.ids = ids.matrix(),
                                                       .log_mu = log_mu.matrix(),
                                                       .weight = weight.matrix(),
                                                       .exact = flags_out("draw.exact", c.exact)};

    const opd::result r = renamed("draw", [&] {
        return with_rows("draw.z", c.z, be, memory, [&](const auto& rows) {
            return with_design(c, ids.matrix().cols, [&](const auto& design) {
                return run(be, opd::detail::checked_draw(opd::detail::job_rows(rows), design, keys, out, options),
                           workspace);
            });
        });
    });
    if (workspace != nullptr) return void(*workspace += memory.used());
    ids.store(options.mask), log_mu.store(options.mask), weight.store(options.mask);
    for (index_t i = 0; i < options.cut.size; ++i)
        if (options.mask.kept(i)) cut_logit[i] = options.cut[i].z, cut_id[i] = options.cut[i].id;
    store(r, result);
}

/// Where a row's ids begin, written into the caller's offsets.
struct offsets_out {
    opd::row_offsets<> to;
    void put(index_t r, index_t at) const {
        void* const data = const_cast<void*>(to.data);
        if (to.bytes == 4)
            static_cast<std::int32_t*>(data)[r] = static_cast<std::int32_t>(at);
        else
            static_cast<std::int64_t*>(data)[r] = at;
    }
};

/// The cuts of rows, and how many ids each keeps, by the filter of the call.
opd::result cuts_of(opd::cpu_backend& be, call_memory& memory, const opd_kept_ids_call& c, index_t n,
                    const opd::row_mask<>& mask, opd::vector_view<opd::filter_cut> cut, opd::vector_view<index_t> kept,
                    std::uint64_t* workspace) {
    opd::draw_options<> options{.filter = filter_of(c), .mask = mask};
    options.cut = cut, options.kept = kept;
    const opd::drawn<std::int64_t, double, double> out{.ids = opd::view(memory.take<std::int64_t>(n), n, 1),
                                                       .log_mu = opd::view(memory.take<double>(n), n, 1)};
    return with_rows("kept.z", c.z, be, memory, [&](const auto& rows) {
        return run(be,
                   opd::detail::checked_draw(opd::detail::job_rows(rows), opd::design::greedy{}, opd::draw_keys<>{},
                                             out, options),
                   workspace);
    });
}

void kept_ids_of(opd::cpu_backend& be, const opd_kept_ids_call& c, std::int64_t* total, opd_result& result,
                 std::uint64_t* workspace) {
    check_reserved("kept", c);
    const dtype type = logits_type("kept.z", c.z);
    const index_t n = logits_matrix("kept.z", c.z, type).rows;
    const bool asks = c.ids == nullptr, has_cut = c.cut_logit != nullptr;
    if (asks && total == nullptr) refuse("total", "is a null pointer, and so is kept.ids");
    if (c.offsets == nullptr) refuse("kept.offsets", "is a null pointer");
    if (has_cut != (c.cut_id != nullptr))
        refuse(has_cut ? "kept.cut_id" : "kept.cut_logit", "is a null pointer; a cut is a logit and an id");
    if (has_cut && (c.temperature != 0 || c.top_k != 0 || c.top_p != 0 || c.min_p != 0))
        refuse("kept.cut_logit", "is given, and a filter too: the cut says what was kept");
    if (asks && has_cut && c.kept == nullptr)
        refuse("kept.kept", "is a null pointer: how many ids each row keeps, as opd_draw wrote it");
    if (!has_cut && c.kept != nullptr) refuse("kept.kept", "is given without the cut that belongs to it");
    tensor_spans spans;
    spans.reads_matrix("kept.z", c.z), spans.reads("kept.mask", c.mask);
    spans.reads("kept.cut_logit", c.cut_logit), spans.reads("kept.cut_id", c.cut_id), spans.reads("kept.kept", c.kept);
    if (asks)
        spans.writes("kept.offsets", c.offsets);
    else
        spans.reads("kept.offsets", c.offsets), spans.writes("kept.ids", c.ids);
    spans.check();

    call_memory memory(be, workspace != nullptr);
    const opd::row_mask<> mask = opd_c::mask("kept.mask", c.mask, c.has_ignore != 0, c.ignore);
    const opd::row_offsets<> offsets = opd_c::offsets("kept.offsets", c.offsets);
    const id_tensor ids("kept.ids", c.ids, memory, true);
    opd::detail::check_vector("kept.mask", mask, n);
    if (offsets.size != n + 1)
        refuse("kept.offsets", "has " + std::to_string(offsets.size) + " entries; " + std::to_string(n) +
                                   " rows have " + std::to_string(n + 1));
    if (offsets.data == nullptr) refuse("kept.offsets", "is a null pointer");
    const opd::vector_view<opd::filter_cut> cut(memory.take<opd::filter_cut>(n), n);
    opd::vector_view<index_t> kept;
    opd::result r;
    if (workspace != nullptr) *workspace = 0;
    if (has_cut) {
        const opd::vector_view<const double> logit = vector<const double>("kept.cut_logit", c.cut_logit);
        const opd::vector_view<const std::int64_t> id = vector<const std::int64_t>("kept.cut_id", c.cut_id);
        kept = vector<index_t>("kept.kept", c.kept);
        opd::detail::check_vector("kept.cut_logit", logit, n), opd::detail::check_vector("kept.cut_id", id, n);
        opd::detail::check_vector("kept.kept", kept, n);
        for (index_t i = 0; workspace == nullptr && i < n; ++i) cut[i] = {logit[i], id[i]};
        for (index_t i = 0; asks && i < n; ++i)
            if (mask.kept(i) && kept[i] < 0) throw opd::invalid_input("kept.kept", "is negative", i);
    } else {
        kept = {memory.take<index_t>(n), n};
        r = renamed("kept", [&] { return cuts_of(be, memory, c, n, mask, cut, kept, workspace); });
    }
    if (workspace != nullptr && asks) return void(*workspace += memory.used());
    if (asks) {
        index_t all = 0;
        for (index_t i = 0; i < n; ++i)
            if (__builtin_add_overflow(all, mask.kept(i) ? kept[i] : 0, &all) ||
                (offsets.bytes == 4 && all > std::numeric_limits<std::int32_t>::max()))
                throw opd::invalid_input("kept.offsets", "cannot count that many ids in so many bits", i);
        const offsets_out to{offsets};
        to.put(0, 0);
        all = 0;
        for (index_t i = 0; i < n; ++i) to.put(i + 1, all += mask.kept(i) ? kept[i] : 0);
        *total = all;
    } else {
        r = renamed("kept", [&] {
            return with_view("kept.z", c.z, [&](const auto& z) {
                const auto job = opd::detail::checked_kept_ids(z, opd::vector_view<const opd::filter_cut>(cut), offsets,
                                                               ids.vector(), mask);
                if (workspace == nullptr) return be.for_rows(job);
                *workspace = std::max<std::uint64_t>(*workspace, be.workspace_bytes(job));
                return opd::result{};
            });
        });
        if (workspace != nullptr) return void(*workspace += memory.used());
        ids.store_lists(mask, offsets);
        if (total != nullptr) *total = n > 0 ? offsets[n] : 0;
    }
    store(r, result);
}

} // namespace

int draw(void* backend, const opd_draw_call& call, opd_result& result, std::uint64_t* workspace) {
    return guarded([&] { draw_of(*static_cast<opd::cpu_backend*>(backend), call, result, workspace); });
}
int kept_ids(void* backend, const opd_kept_ids_call& call, std::int64_t* total, opd_result& result,
             std::uint64_t* workspace) {
    return guarded([&] { kept_ids_of(*static_cast<opd::cpu_backend*>(backend), call, total, result, workspace); });
}

} // namespace opd_c::kernel
