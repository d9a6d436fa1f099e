// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A user of the CPU backend.
#include <Eigen/Core>
#include <opd/version.hpp>

int main() { return Eigen::Vector2f::Ones().sum() == 2.0F && OPD_VERSION > 0 ? 0 : 1; }
