// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Errors, names and engines of the C interface, and the choice of kernels.
#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "engine.hpp"
#include "handles.hpp"
#include "kernels.hpp"
#include "opd/estimators/any.hpp"
#include "opd/version.hpp"
#include "sched_names.hpp"
#include "spec_names.hpp"
#include "structs.hpp"

namespace {

struct last_error {
    int code = OPD_OK;
    std::string text, argument;
    std::int64_t row = -1;
};
last_error& of_this_thread() {
    thread_local last_error e;
    return e;
}

#if defined(__x86_64__) && defined(__GNUC__)
bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
}
bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#else
bool has_v3() { return false; }
bool has_v4() { return false; }
#endif

/// The kernels `name`, or the best ones at most that; null where the library or the processor has none.
const opd_kernels* kernels_of(std::string_view name) {
#if defined(OPD_HAS_v4)
    if (name == "v4") return has_v4() ? opd_kernels_v4() : nullptr;
#endif
#if defined(OPD_HAS_v3)
    if (name == "v3") return has_v3() ? opd_kernels_v3() : nullptr;
#endif
    return name == "base" ? opd_kernels_base() : nullptr;
}
const opd_kernels& chosen() {
    if (const char* const asked = std::getenv("OPD_ISA"); asked != nullptr && *asked != '\0') {
        if (const opd_kernels* const k = kernels_of(asked)) return *k;
        throw opd::unsupported("opd: the environment's OPD_ISA is '" + std::string(asked).substr(0, 64) +
                               "'; this library has " OPD_LIBRARY_ISAS ", of which the processor must run it");
    }
    for (const char* const name : {"v4", "v3"})
        if (const opd_kernels* const k = kernels_of(name)) return *k;
    return *opd_kernels_base();
}

/// visit(name, says) for each line of a table; false if there is no such table.
template <class Visit>
bool each_name(std::string_view table, Visit&& visit) {
    namespace choice = opd::choice;
    const auto lines = [&](const auto& of) {
        for (const auto& line : of) visit(line.text.data(), line.says.data());
        return true;
    };
    if (table == "divergence") return lines(choice::divergences);
    if (table == "objective") return lines(choice::objectives);
    if (table == "surrogate") return lines(choice::surrogates);
    if (table == "baseline") return lines(choice::baselines);
    if (table == "selector") return lines(choice::selectors);
    if (table == "estimator") return lines(opd_c::estimators);
    if (table == "proposal") return lines(opd_c::proposals);
    if (table == "tuner") return lines(opd_c::tuners);
    if (table == "schedule") return lines(opd_c::schedules);
    if (table == "staleness_policy") return lines(opd_c::staleness_policies);
    if (table == "weight_update") return lines(opd_c::weight_updates);
    if (table == "law") return lines(opd_c::laws);
    return false;
}
/// The name or the description of line i, which are string literals.
const char* line_of(const char* table, int i, bool says) {
    if (table == nullptr || i < 0) return nullptr;
    const char* found = nullptr;
    each_name(table, [&](const char* name, const char* text) {
        if (i-- == 0) found = says ? text : name;
    });
    return found;
}

} // namespace

void opd_c_set_error(int code, const char* text, const char* argument, std::int64_t row) noexcept {
    last_error& e = of_this_thread();
    e.code = code, e.row = row;
    try {
        e.text = text, e.argument = argument;
    } catch (...) { // no memory for the sentence: the code says enough
        e.text.clear(), e.argument.clear();
    }
}

namespace {

std::string reason_of_loader() {
    const char* const text = dlerror();
    return text != nullptr ? text : "no reason given";
}
/// libopd_cuda, which the environment's OPD_CUDA_LIBRARY names, or which lies beside this library, or which the loader
/// finds. It stays loaded.
const opd_kernels* load_cuda() {
    static constexpr const char* file = "libopd_cuda.so.1";
    std::string tried;
    const auto open = [&](const std::string& name) {
        void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) tried += (tried.empty() ? "" : "; ") + reason_of_loader();
        return library;
    };
    void* library = nullptr;
    if (const char* const asked = std::getenv("OPD_CUDA_LIBRARY"); asked != nullptr && *asked != '\0') {
        library = open(asked);
    } else {
        Dl_info own = {};
        if (dladdr(reinterpret_cast<const void*>(&opd_c_set_error), &own) != 0 && own.dli_fname != nullptr)
            if (const std::string path = own.dli_fname; path.find('/') != std::string::npos)
                library = open(path.substr(0, path.rfind('/') + 1) + file);
        if (library == nullptr) library = open(file);
    }
    if (library == nullptr) throw opd::unsupported("opd: calls on a CUDA device need libopd_cuda: " + tried);
    using entry = decltype(&opd_kernels_cuda);
    const auto find = reinterpret_cast<entry>(dlsym(library, "opd_kernels_cuda"));
    if (find == nullptr) throw opd::unsupported("opd: libopd_cuda has no kernels: " + reason_of_loader());
    const opd_kernels* const k = find(&opd_c_set_error);
    if (k->size != sizeof(opd_kernels)) throw opd::unsupported("opd: libopd_cuda is of another version than libopd");
    return k;
}

} // namespace

namespace opd_c {
const opd_kernels& cuda_kernels() {
    static const opd_kernels& of_this_process = *load_cuda(); // one that throws is tried again
    return of_this_process;
}
const opd_kernels& kernels() {
    static const opd_kernels& of_this_process = chosen();
    return of_this_process;
}
} // namespace opd_c

extern "C" {

int opd_abi_version(void) { return OPD_ABI_VERSION; }
const char* opd_version(void) {
#define OPD_TEXT_OF(x) #x
#define OPD_TEXT(x) OPD_TEXT_OF(x)
    return OPD_TEXT(OPD_VERSION_MAJOR) "." OPD_TEXT(OPD_VERSION_MINOR) "." OPD_TEXT(OPD_VERSION_PATCH);
#undef OPD_TEXT
#undef OPD_TEXT_OF
}

const char* opd_last_error(void) { return of_this_thread().text.c_str(); }
const char* opd_last_error_argument(void) { return of_this_thread().argument.c_str(); }
int64_t opd_last_error_row(void) { return of_this_thread().row; }
int opd_last_error_code(void) { return of_this_thread().code; }

const char* opd_name(const char* table, int i) { return line_of(table, i, false); }
const char* opd_says(const char* table, int i) { return line_of(table, i, true); }

const char* opd_config(void) {
    static const std::string* const text = [] {
        const auto yes = [](bool b) { return b ? "true" : "false"; };
        auto* const s = new std::string("{\"version\": \"");
        s->append(opd_version()).append("\", \"abi\": ").append(std::to_string(OPD_ABI_VERSION));
        s->append(", \"compiler\": \"")
#if defined(__clang__)
            .append("clang " __clang_version__)
#else
            .append("g++ " __VERSION__)
#endif
            .append("\", \"compiled\": \"" OPD_LIBRARY_ISAS "\", \"supported\": {\"v3\": ");
        s->append(yes(has_v3())).append(", \"v4\": ").append(yes(has_v4()));
        s->append("}, \"chosen\": ");
        if (opd_c::guarded([&] { s->append("\"").append(opd_c::kernels().name).append("\""); }) != OPD_OK)
            s->append("null"); // OPD_ISA asks for what there is not
        s->append(", \"processors\": ").append(std::to_string(std::thread::hardware_concurrency())).append("}");
        return s;
    }();
    return text->c_str();
}

int opd_engine_create(const opd_engine_options* options, opd_engine** out) {
    return opd_c::guarded([&] {
        if (out == nullptr) opd_c::refuse("out", "is a null pointer");
        const opd_engine_options o = opd_c::read("options", options, true);
        opd_c::refuse_reserved("options", o);
        if (o.threads < 0 || o.threads > 10000)
            opd_c::refuse("options.threads", "is " + std::to_string(o.threads) + "; it must lie in [0, 10000]");
        if (o.arena == nullptr && o.arena_bytes != 0) opd_c::refuse("options.arena", "is a null pointer");
        if (o.device_type != 0 && o.device_type != kDLCPU && o.device_type != kDLCUDA)
            throw opd::unsupported("opd: options.device_type is " + std::to_string(o.device_type) +
                                   "; engines are of kDLCPU (1) or kDLCUDA (2)");
        if (o.device_type != kDLCUDA && (o.device_id != 0 || o.stream != nullptr || o.cublas != nullptr))
            opd_c::refuse("options.device_type", "is the CPU, which has no device_id, stream or cublas");
        if (o.device_type == kDLCUDA && o.threads != 0)
            opd_c::refuse("options.threads", "is given, and the engine is of a device");
        *out = opd_c::handles<opd_engine>().add(std::make_shared<opd_engine>(o));
    });
}
void opd_engine_destroy(opd_engine* engine) { opd_c::handles<opd_engine>().remove(engine); }

} // extern "C"
