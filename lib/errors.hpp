// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From exceptions to results: every function of the C interface runs its body in `guarded`.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "opd/c/base.h"
#include "opd/error.hpp"

// Functions and data that the parts of libopd share, which are compiled for several instruction sets: of C linkage,
// since these keep their names when all others are made local (CMakeLists.txt), and hidden, since no caller sees
// them.
#define OPD_C_SHARED extern "C" __attribute__((visibility("hidden")))

/// What opd_last_error() and its likes then say.
OPD_C_SHARED void opd_c_set_error(int code, const char* text, const char* argument, std::int64_t row) noexcept;

namespace opd_c {

/// Of an argument of the C interface, with the library's exception for it.
[[noreturn]] inline void refuse(const std::string& argument, const std::string& text) {
    throw opd::invalid_input(argument, text);
}

/// Thrown where opd_c_set_error was called already.
struct reported {
    int status;
};

/// Runs body(); no exception leaves. `body` may return an opd_status.
template <class Body>
int guarded(Body&& body) noexcept {
    const auto failed = [](int code, const char* text, const char* argument = "", std::int64_t row = -1) {
        opd_c_set_error(code, text, argument, row);
        return code;
    };
    try {
        if constexpr (requires { int{body()}; })
            return body();
        else
            return body(), OPD_OK;
    } catch (const reported& r) {
        return r.status;
    } catch (const opd::invalid_input& e) {
        return failed(OPD_INVALID_INPUT, e.what(), e.argument.c_str(), e.row);
    } catch (const opd::infinite_value& e) {
        return failed(OPD_INFINITE_VALUE, e.what(), "", e.row);
    } catch (const opd::unsupported& e) {
        return failed(OPD_UNSUPPORTED, e.what());
    } catch (const std::bad_alloc&) {
        return failed(OPD_OUT_OF_MEMORY, "opd: not enough memory");
    } catch (const std::exception& e) {
        return failed(OPD_INTERNAL, e.what());
    } catch (...) {
        return failed(OPD_INTERNAL, "opd: an exception of an unknown type");
    }
}

} // namespace opd_c
