// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a refused call says.
#pragma once

#include <string>
#include <string_view>

#include "opd/error.hpp"

namespace opd::test {

/// The sentence of the opd::error that call() throws; empty where it throws none.
std::string refusal(auto&& call) {
    try {
        call();
    } catch (const error& e) {
        return e.what();
    }
    return "";
}
inline bool says(std::string_view message, std::string_view what) { return message.find(what) != message.npos; }

} // namespace opd::test
