// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Files that are either the old or the new one, never half of each: written under a temporary name, synced, renamed.
#pragma once

#include <string>
#include <string_view>

namespace trainer {

/// The whole file; a failure of kind exit_input names it.
std::string read_file(const std::string& path);

/// Replaces the file; a failure of kind exit_io names it and says why.
void write_file(const std::string& path, std::string_view bytes);

/// Creates a directory and its parents.
void make_directory(const std::string& path);

/// FNV-1a of 128 bits as 32 hexadecimal digits: tells settings and files apart, and damage from neither. Not for
/// adversaries.
std::string hash128(std::string_view bytes);

} // namespace trainer
