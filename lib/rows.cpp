// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Draws, kept sets and scores up to the kernels.
#include <cstdint>
#include <string>

#include "engine.hpp"
#include "kernels.hpp"
#include "opd/c/rows.h"
#include "spans.hpp"

namespace {

using namespace opd_c;

/// A function of the engine's kernels, which a device's may lack.
template <class Function>
Function of_engine(Function f, const char* what) {
    if (f == nullptr)
        throw opd::unsupported(std::string("opd: ") + what + " on a device: this library has opd_evaluate there alone");
    return f;
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
            return opd_c::with_engine("draw.engine", call.engine, [&](const opd_kernels& k, void* backend) {
                return of_engine(k.draw, "draws")(backend, call, r, workspace);
            });
        });
    });
}
int run_kept_ids(const opd_kept_ids_call* of, std::int64_t* total, opd_result* result, std::uint64_t* workspace) {
    return opd_c::guarded([&] {
        const opd_kept_ids_call call = opd_c::read("kept", of);
        return with_result(result, [&](opd_result& r) {
            return opd_c::with_engine("kept.engine", call.engine, [&](const opd_kernels& k, void* backend) {
                return of_engine(k.kept_ids, "kept sets")(backend, call, total, r, workspace);
            });
        });
    });
}
int run_score(const opd_score_call* of, opd_result* result, std::uint64_t* workspace) {
    return opd_c::guarded([&] {
        const opd_score_call call = opd_c::read("score", of);
        return with_result(result, [&](opd_result& r) {
            return opd_c::with_engine("score.engine", call.engine, [&](const opd_kernels& k, void* backend) {
                return of_engine(k.score, "scores")(backend, call, r, workspace);
            });
        });
    });
}

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

} // extern "C"
