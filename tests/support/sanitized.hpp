// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Whether this is a build with the address or the thread sanitizer.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OPD_TEST_SANITIZED 1
#elif defined(__has_feature)
#define OPD_TEST_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define OPD_TEST_SANITIZED 0
#endif
