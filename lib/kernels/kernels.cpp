// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of one instruction set: OPD_KERNELS is the function that hands them out, OPD_KERNELS_NAME what they are
// called.
#include <cstddef>

#include "call.hpp"
#include "rows.hpp"

namespace opd_c::kernel {
namespace {

int make(const opd_engine_options& o, void** made) {
    return guarded([&] {
        *made =
            new opd::cpu_backend{.threads = o.threads > 1 ? o.threads : 1,
                                 .arena = {static_cast<std::byte*>(o.arena), static_cast<std::size_t>(o.arena_bytes)}};
    });
}
void unmake(void* backend) { delete static_cast<opd::cpu_backend*>(backend); }

} // namespace
} // namespace opd_c::kernel

const opd_kernels* OPD_KERNELS() {
    namespace k = opd_c::kernel;
    static constexpr opd_kernels all = {.size = sizeof(opd_kernels),
                                        .name = OPD_KERNELS_NAME,
                                        .make = &k::make,
                                        .unmake = &k::unmake,
                                        .evaluate = &k::evaluate,
                                        .draw = &k::draw,
                                        .kept_ids = &k::kept_ids,
                                        .score = &k::score,
                                        .tokens = &k::tokens};
    return &all;
}
