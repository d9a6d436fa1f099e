// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// libopd_cuda as a file, of one part (tests/CMakeLists.txt): it loads, exports one name, and says through it what it
// cannot do where there is no device. Skipped without nvcc.
// optimise: no
#include <cstdint>
#include <cstdio>
#include <string>

#include <doctest/doctest.h>

#if defined(OPD_TEST_CUDA_LIBRARY)
#include <dlfcn.h>

#include "../lib/kernels.hpp"
#include "opd/version.hpp"

namespace {
struct {
    int code = 0;
    std::string text, argument;
} said;
void listen(int code, const char* text, const char* argument, std::int64_t) noexcept { said = {code, text, argument}; }
} // namespace

TEST_CASE("libopd_cuda: its table, engines and refusals") {
    void* const library = dlopen(OPD_TEST_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    INFO(std::string(library == nullptr ? dlerror() : ""));
    REQUIRE(bool(library != nullptr));
    const auto find = reinterpret_cast<decltype(&opd_kernels_cuda)>(dlsym(library, "opd_kernels_cuda"));
    REQUIRE(bool(find != nullptr));
    for (const char* hidden : {"opd_c_set_error", "_ZN9__gnu_cxx11char_traitsIcE6lengthEPKc"})
        CHECK(bool(dlsym(library, hidden) == nullptr));
    const opd_kernels* const k = find(&listen);
    CHECK(k->size == sizeof(opd_kernels));
    CHECK(std::string(k->name) == "cuda");
    CHECK(bool(k->draw == nullptr));
    opd_engine_options o = {};
    o.struct_size = sizeof o, o.device_type = kDLCUDA, o.device_id = 1000;
    void* engine = nullptr;
    const int status = k->make(o, &engine); // no machine has so many
    CHECK((status == OPD_INVALID_INPUT || status == OPD_DEVICE_ERROR));
    CHECK(said.code == status);
    CHECK(said.text.find(status == OPD_INVALID_INPUT ? "options.device_id" : "cudaGetDeviceCount") !=
          std::string::npos);
    o.device_id = 0;
    if (k->make(o, &engine) != OPD_OK) {
        std::puts("no device: no engine of one is tested");
        return;
    }
    opd_student s = {};
    opd_teacher t = {};
    opd_estimator e = {};
    opd_env env = {};
    CHECK(k->evaluate(engine, s, t, e, env, nullptr, nullptr) == OPD_UNSUPPORTED); // dense rows were left out
    CHECK(said.text.find("'dense'") != std::string::npos);
    k->unmake(engine);
}
#else
TEST_CASE("libopd_cuda") { std::puts("SKIPPED: nvcc was not found"); }
#endif
