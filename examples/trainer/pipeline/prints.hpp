// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Fingerprints (opd/data/manifest.hpp) of who drew and who scored: data sets and servers are told apart by them.
#pragma once

#include <string>
#include <vector>

#include "model/model.hpp"
#include "task/task.hpp"

namespace trainer {

/// A policy is what tokens are drawn from: weights at a temperature.
std::string print_of_teacher(const std::vector<float>& weights);
std::string print_of_policy(const std::vector<float>& weights, double temperature);
/// Of the numbers that a model reads: in bfloat16 those of the floats that they are.
std::string print_of_teacher(const transformer<float>& model);
std::string print_of_policy(const transformer<float>& model, double temperature);
std::string print_of_tokenizer(const any_task& task, int vocabulary);

} // namespace trainer
