// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the library throws. A shape, stride, type or aliasing mistake is `invalid_input`, thrown on the host before
// anything is launched or written; `what()` names the argument, what was expected and what came. Bad contents (NaN,
// ids out of range, placeholder log-probs) are counted in the diagnostics by default, and thrown as `invalid_input`
// with the row under `check::contents`; `bad_contents` (diagnostics.hpp) is what env.on_bad throws after the batch.
// An infinite row under the policy `raise` is `infinite_value`.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "opd/config.hpp"

namespace opd {

/// Base of everything opd throws.
struct error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// An argument that no call could accept. `argument` is its name in the call, `row` the offending row or -1.
struct invalid_input : error {
    std::string argument;
    index_t row;
    OPD_COLD invalid_input(std::string_view argument_, std::string_view text, index_t row_ = -1)
        : error(std::string("opd: ")
                    .append(argument_)
                    .append(row_ < 0 ? std::string() : ", row " + std::to_string(row_))
                    .append(": ")
                    .append(text)),
          argument(argument_), row(row_) {}
};

/// A row whose loss is infinite (reverse: p > 0 = q; forward: q > 0 = p) under `infinite::raise`: thrown before
/// anything is written.
struct infinite_value : error {
    index_t row;
    OPD_COLD explicit infinite_value(index_t row_)
        : infinite_value(row_, "one side gives a token probability zero where the other does not (policy `raise`)") {}

protected:
    OPD_COLD infinite_value(index_t row_, const char* why)
        : error("opd: the loss is infinite in row " + std::to_string(row_) + ": " + why), row(row_) {}
};

/// A guarantee that this backend, build or estimator cannot give.
struct unsupported : error {
    using error::error;
};

namespace detail {
OPD_COLD inline std::string shape(index_t rows, index_t cols) {
    std::string s = std::to_string(rows); // appended step by step: g++ 12 warns falsely about "(" + …
    s.insert(s.begin(), '(');
    return s.append(",").append(std::to_string(cols)).append(")");
}
} // namespace detail

} // namespace opd
