// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses and gradients on one machine's CPU, drawing and scoring: the public headers beside this one and in estimators/
// that need the standard library alone, and the CPU backend (not under nvcc, whose host compiler has no lanes). The one
// call is described in opd/evaluate.hpp:
//
//   opd::cpu_backend be{.threads = 2};
//   opd::evaluate(be, opd::student::logits{opd::view(z, N, V), opd::view(dz, N, V)},
//                 opd::teacher::dense{opd::view(y, N, V)}, opd::reverse_kl{});
//
// Not in here:
//
//   opd/sched.hpp                     schedulers, drivers, metrics of a run
//   opd/spec.hpp                      speculative rollout: verification, drafters, tuners
//   opd/backends/vocab_parallel.hpp   a vocabulary in shards on several ranks
//   opd/backends/{amx,bf16,eigen}.hpp, opd/backends/cuda.hpp   what needs a processor, a library or a compiler of its
//                                                              own
//   opd/product.hpp, opd/codec.hpp    the product in fixed order, which refuses fast-math, and compressed hidden states
//   opd/compressed.hpp, opd/ranges.hpp   what needs Eigen, and range-v3
#pragma once

#if !defined(__CUDACC__)
#include "opd/backends/cpu.hpp"
#endif
#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/draw.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/advantages.hpp"
#include "opd/estimators/any.hpp"
#include "opd/estimators/baselines.hpp"
#include "opd/estimators/correction_presets.hpp"
#include "opd/estimators/correction_rules.hpp"
#include "opd/estimators/corrections.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/draft_weights.hpp"
#include "opd/estimators/m2po.hpp"
#include "opd/estimators/mismatch.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/selectors.hpp"
#include "opd/estimators/sequences.hpp"
#include "opd/estimators/shapes.hpp"
#include "opd/estimators/support.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/evaluate.hpp"
#include "opd/filter.hpp"
#include "opd/hidden.hpp"
#include "opd/id_overlap.hpp"
#include "opd/lanes.hpp"
#include "opd/offline_drift.hpp"
#include "opd/penalties.hpp"
#include "opd/ratio_sketch.hpp"
#include "opd/rng.hpp"
#include "opd/row_program.hpp"
#include "opd/score.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/teacher_probe.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"
#include "opd/version.hpp"
#include "opd/view.hpp"
