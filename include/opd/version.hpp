// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The version of the library. This file is its single source: CMakeLists.txt reads the three numbers below.
// OPD_VERSION is one integer for comparisons, 10000 major + 100 minor + patch.
#pragma once

#define OPD_VERSION_MAJOR 0
#define OPD_VERSION_MINOR 1
#define OPD_VERSION_PATCH 0

#define OPD_VERSION (OPD_VERSION_MAJOR * 10000 + OPD_VERSION_MINOR * 100 + OPD_VERSION_PATCH)
