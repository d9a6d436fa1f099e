// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/prints.hpp"

#include <span>

#include <fmt/format.h>

#include "settings/files.hpp"

namespace trainer {

std::string print_of_teacher(const std::vector<float>& weights) {
    return hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)});
}

std::string print_of_policy(const std::vector<float>& weights, double temperature) {
    return hash128(fmt::format("{} at temperature {}", print_of_teacher(weights), temperature));
}

std::string print_of_tokenizer(const any_task& task, int vocabulary) {
    std::string texts;
    for (token t = 0; t < task.vocabulary(); ++t) texts += task.written(std::span(&t, 1)) + "\n";
    return hash128(fmt::format("{}{} ids, {} ends", texts, vocabulary, task.end_token()));
}

} // namespace trainer
