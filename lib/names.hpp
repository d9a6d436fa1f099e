// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lines of the tables of names that opd_name() lists.
#pragma once

#include <string_view>

namespace opd_c {

/// A line: what a caller types, what it is, what a reader is told of it.
template <class Kind>
struct table_line {
    std::string_view text;
    Kind which;
    std::string_view says;
};

} // namespace opd_c
