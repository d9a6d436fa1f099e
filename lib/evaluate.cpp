// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd_evaluate and its likes, up to the kernels.
#include <cstddef>
#include <cstdio>
#include <string>

#include "diagnostics.hpp"
#include "engine.hpp"
#include "kernels.hpp"
#include "opd/c/evaluate.h"
#include "structs.hpp"

namespace {

int run(const opd_call* of, opd_result* result, std::uint64_t* workspace) {
    return opd_c::guarded([&] {
        const opd_c::given call("call", of);
        const opd_c::given student("student", call->student);
        const opd_c::given teacher("teacher", call->teacher);
        const opd_c::given estimator("estimator", call->estimator, true);
        const opd_c::given env("env", call->env, true);
        opd_c::refuse_reserved("estimator", *estimator);
        // of another size: as much of it as the caller's struct has room for
        const bool whole = result == nullptr || opd_c::size_of("result", *result) == sizeof(opd_result);
        opd_result part;
        if (!whole) part = {};
        const int status = opd_c::with_engine("engine", call->engine, [&](const opd_kernels& k, void* backend) {
            return k.evaluate(backend, *student, *teacher, *estimator, *env, whole ? result : &part, workspace);
        });
        if (!whole && (status == OPD_OK || status == OPD_BAD_CONTENTS || status == OPD_INFINITE_VALUE))
            opd_c::write("result", result, part);
        return status;
    });
}

} // namespace

extern "C" {

int opd_evaluate(const opd_call* call, opd_result* result) { return run(call, result, nullptr); }

int opd_workspace_bytes(const opd_call* call, uint64_t* bytes) {
    if (bytes == nullptr) return opd_c::guarded([] { opd_c::refuse("bytes", "is a null pointer"); });
    return run(call, nullptr, bytes);
}

int opd_diagnostics_merge(opd_diagnostics* to, const opd_diagnostics* from) {
    return opd_c::guarded([&] {
        if (to == nullptr) opd_c::refuse("to", "is a null pointer");
        if (from == nullptr) opd_c::refuse("from", "is a null pointer");
        opd::diagnostics d = opd_c::of_c(*to);
        d.merge(opd_c::of_c(*from));
        *to = opd_c::to_c(d);
    });
}

size_t opd_diagnostics_text(const opd_diagnostics* diagnostics, char* text, size_t size) {
    std::size_t length = 0;
    opd_c::guarded([&] {
        if (diagnostics == nullptr) opd_c::refuse("diagnostics", "is a null pointer");
        const std::string line = opd::to_string(opd_c::of_c(*diagnostics));
        length = line.size();
        if (text != nullptr && size > 0) std::snprintf(text, size, "%s", line.c_str());
    });
    return length;
}

} // extern "C"
