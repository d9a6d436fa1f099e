// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/prints.hpp"

#include <algorithm>
#include <span>

#include <fmt/format.h>

#include "opd/data/checksum.hpp"
#include "settings/files.hpp"

namespace trainer {

std::string print_of_teacher(const std::vector<float>& weights) {
    return hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)});
}

std::string print_of_teacher(const transformer<float>& model) {
    opd::data::running_fingerprint print;
    std::vector<float> part;
    for (index_t at = 0; at < model.layout.size; at += std::ssize(part)) {
        part.resize(static_cast<std::size_t>(std::min<index_t>(model.layout.size - at, 1 << 16)));
        model.numbers().copy(at, std::ssize(part), part.data());
        print.add(std::as_bytes(std::span(part)));
    }
    return print.text();
}

namespace {
std::string at_temperature(const std::string& print, double temperature) {
    return hash128(fmt::format("{} at temperature {}", print, temperature));
}
} // namespace

std::string print_of_policy(const std::vector<float>& weights, double temperature) {
    return at_temperature(print_of_teacher(weights), temperature);
}
std::string print_of_policy(const transformer<float>& model, double temperature) {
    return at_temperature(print_of_teacher(model), temperature);
}

std::string print_of_tokenizer(const any_task& task, int vocabulary) {
    std::string texts;
    for (token t = 0; t < task.vocabulary(); ++t) texts += task.written(std::span(&t, 1)) + "\n";
    return hash128(fmt::format("{}{} ids, {} ends", texts, vocabulary, task.end_token()));
}

} // namespace trainer
