// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-train from its arguments to its exit code.
#pragma once

namespace trainer {

int app_main(int argc, const char* const* argv);

} // namespace trainer
