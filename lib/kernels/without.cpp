// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Kinds of calls that this build of the kernels leaves out (OPD_LIBRARY_CUDA names those that it has), refused by name.
#include <string>

#include "call.hpp"

namespace opd_c::kernel {
namespace {
[[noreturn, maybe_unused]] opd::result without(const char* part) {
    throw opd::unsupported(std::string("opd: this libopd_cuda was built without its part '") + part +
                           "'; see OPD_LIBRARY_CUDA in docs/bindings/c-cuda.md");
}
} // namespace

#if defined(OPD_WITHOUT_DENSE)
opd::result dense(const call&) { without("dense"); }
#endif
#if defined(OPD_WITHOUT_SUPPORT)
opd::result renormalised(const call&) { without("support"); }
opd::result support(const call&) { without("support"); }
#endif
#if defined(OPD_WITHOUT_SAMPLED)
opd::result sampled(const call&) { without("sampled"); }
#endif
#if defined(OPD_WITHOUT_HIDDEN)
opd::result hidden_dense(const call&) { without("hidden"); }
opd::result hidden_entries(const call&) { without("hidden"); }
opd::result hidden_renormalised(const call&) { without("hidden"); }
#endif
#if defined(OPD_WITHOUT_LUMPED)
opd::result lumped(const call&) { without("lumped"); }
#endif

} // namespace opd_c::kernel
