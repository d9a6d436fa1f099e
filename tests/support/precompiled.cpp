// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Empty: CMake precompiles support/precompiled.hpp for a target with a source.
