// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a teacher loses when it is sent as few numbers a row, on prefixes of a student's rollouts.
//
//   r codes      truncated, importance, reweighted: opd/compressed.hpp, a head of rank r over r numbers
//   top k        the k most probable ids and log-probs, renormalised among themselves; or with the mass outside, k + 1
//                numbers, spread evenly over the other ids
//   threshold    B ids with inclusion probabilities in proportion to a policy: the teacher's own where KL is asked (the
//                cache is then a distribution, what was drawn over its sum), the student's where the gradient is (as a
//                trainer draws them)
//
// Numbers sent a row: r; k and B counted without ids, as Nitrobrew counts, and with.
//
//   KL(true, cached)   Σ p log(p/p̂), what Nitrobrew prints; infinite where the cache has no mass and the teacher has
//   KL(cached, true)   Σ p̂ log(p̂/p); of a renormalised top k -log of the mass inside
//   logit MSE          mean over the vocabulary of the squared error of logits, less what is the same for a whole row:
//                      that no softmax sees
//   gradient error     of reverse KL of the student, by the estimator that the cache goes with, against the true
//                      teacher's: sqrt(Σ|dz - dz_true|² / Σ|dz_true|²). Of threshold it is noise around the true
//                      gradient, of the others an error that stays
#pragma once

#include <string>
#include <vector>

#include "opd/compressed.hpp"
#include "opd/config.hpp"
#include "opd/threads.hpp"

namespace compression_study {

using opd::index_t;

/// A teacher and where a student has been.
struct world {
    std::string name;  ///< of its files
    std::string title; ///< of its table
    index_t v = 0, d = 0, n = 0;
    std::vector<float> head;      ///< (V,D) the teacher's
    std::vector<float> states;    ///< (N,D) the teacher's, on prefixes of student rollouts
    std::vector<float> student;   ///< (N,V) its logits there
    opd::calibration seen;        ///< on prefixes of another kind
    std::vector<index_t> numbers; ///< r, k and B to try
};

struct figures {
    std::string cache;
    index_t rank = 0;                                  ///< r, k or B
    index_t numbers = 0, with_ids = 0;                 ///< sent a row
    double kl = 0, kl_back = 0, mse = 0, gradient = 0; ///< NaN: not defined
};

struct outcome {
    std::vector<figures> caches;
    double median_entropy = 0, mean_entropy = 0; ///< of the teacher on the rollouts, nats
    double top_mass = 0;                         ///< mean probability of its best token
    double student_kl = 0;                       ///< KL(student, teacher)
};

outcome study(const world& w, int threads, std::uint64_t seed);

std::string table(const world& w, const outcome& o); ///< markdown
std::string tsv(const outcome& o);
/// Writes name.svg to the directory; returns what went wrong.
std::string plot(const std::string& directory, const world& w, const outcome& o);

} // namespace compression_study
