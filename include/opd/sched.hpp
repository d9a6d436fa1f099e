// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Schedulers, their drivers, the staleness queue and the metrics of a run: everything of opd/sched/. It needs the standard
// library alone, and nothing of the losses.
#pragma once

#include "opd/sched/archive.hpp"
#include "opd/sched/conveyor.hpp"
#include "opd/sched/cost_fit.hpp"
#include "opd/sched/deadlines.hpp"
#include "opd/sched/distributions.hpp"
#include "opd/sched/events.hpp"
#include "opd/sched/indexed_heap.hpp"
#include "opd/sched/ledger.hpp"
#include "opd/sched/mailbox.hpp"
#include "opd/sched/metrics.hpp"
#include "opd/sched/permit.hpp"
#include "opd/sched/recorder.hpp"
#include "opd/sched/rollout_cost.hpp"
#include "opd/sched/roster.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/scheduler_checks.hpp"
#include "opd/sched/scheduler_events.hpp"
#include "opd/sched/settings.hpp"
#include "opd/sched/simulated.hpp"
#include "opd/sched/stages.hpp"
#include "opd/sched/staleness_queue.hpp"
#include "opd/sched/thread_driver.hpp"
#include "opd/sched/timed_stages.hpp"
#include "opd/sched/trace.hpp"
#include "opd/sched/types.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "opd/sched/worker_loop.hpp"
