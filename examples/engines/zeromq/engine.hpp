// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

namespace engine {

int schedule(int count, char** words); ///< opd-schedule
int rollout(int count, char** words);  ///< opd-rollout
int teacher(int count, char** words);  ///< opd-teacher
int learn(int count, char** words);    ///< opd-learn
int load(int count, char** words);     ///< opd-load

} // namespace engine
