// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Speculative rollout: verification without loss, trees of drafts, drafters that need no model, and the tuners that
// choose how much to draft. Everything of opd/spec/. It needs the standard library alone, and nothing of the losses or
// the schedulers.
#pragma once

#include "opd/spec/any_tuner.hpp"
#include "opd/spec/captured_graphs.hpp"
#include "opd/spec/cost_profile.hpp"
#include "opd/spec/draft_budget.hpp"
#include "opd/spec/draft_data_buffer.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/drafter_selector.hpp"
#include "opd/spec/graph_pool.hpp"
#include "opd/spec/ngram_table.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "opd/spec/published_tuner.hpp"
#include "opd/spec/rate_tuner.hpp"
#include "opd/spec/suffix_automaton.hpp"
#include "opd/spec/tuner.hpp"
#include "opd/spec/verify.hpp"
