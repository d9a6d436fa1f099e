// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Policies at one prefix: a student of a given entropy, what it was k versions ago, and a teacher.
//
//   zipf        z_v = -log(rank) + 0.3 n                                           as bench_variance
//   gaussian    z_v = n
//   model_like  z_v = -1.1 log(rank + 2.7) + t/2, and 2 to 12 candidates that are 1 to 5 higher; t: Student's t of 3
//               degrees, within ±8. A Zipf-Mandelbrot marginal, a few tokens that fit, logits with heavy tails
//   spike       one token above a wide tail: the tail is zipf's with 0.8 log(rank), as nearly deterministic as the
//               entropy makes it
//
// n is standard normal, ranks are dealt out at random. The first three are multiplied by one number for the entropy
// asked for, spike's first token gets its mass.
//
//   student now      p = softmax(z)
//   k versions ago   mu = softmax(z + drift (n_1 + ... + n_k)): each version moves each logit by `drift`, so that
//                    KL(p‖mu) grows as k while it is small; what it is, is measured
//   teacher          q = softmax(z + gap n)
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "opd/config.hpp"

namespace variance_study {

using opd::index_t;
using reals = std::vector<double>;
using floats = std::vector<float>;

enum class family { zipf, gaussian, model_like, spike };
inline constexpr family families[] = {family::zipf, family::gaussian, family::model_like, family::spike};
std::string_view name_of(family f);

struct shape_of_world {
    index_t vocab = 4000;
    double drift = 0.075; ///< of a logit by a version
    double gap = 1;       ///< of a logit between student and teacher
};

/// A student, its earlier versions and its teacher, as logits (V).
struct policy {
    floats z, y;
    std::vector<floats> stale; ///< one for each staleness
};
/// A pure function of its arguments. `staleness`: ascending.
policy make_policy(const shape_of_world& w, family f, double entropy, const std::vector<int>& staleness,
                   std::uint64_t seed, std::uint64_t number);

reals log_softmax(const reals& z);
reals log_softmax(const floats& z);
double entropy_of(const reals& log_p);
double kl(const reals& log_p, const reals& log_q);   ///< Σ p log(p/q)
double chi2(const reals& log_p, const reals& log_q); ///< Σ p²/q - 1

} // namespace variance_study
