// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The programs of this folder, in one unit, since they share their templates; main.cpp is the main() of each.
#include "engine.hpp"

#include "load.hpp"
#include "schedule.hpp"
#include "workers.hpp"

namespace engine {

int schedule(int count, char** words) { return run_schedule(count, words); }
int rollout(int count, char** words) { return run_worker(sched::stage::rollout, count, words); }
int teacher(int count, char** words) { return run_worker(sched::stage::teacher, count, words); }
int learn(int count, char** words) { return run_worker(sched::stage::learner, count, words); }
int load(int count, char** words) { return run_load(count, words); }

} // namespace engine
