// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the names of an estimator and of its parts to the library's own.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "opd/estimators/any.hpp"
#include "opd/estimators/correction_presets.hpp"
#include "settings/config.hpp"

namespace trainer {

/// Estimators that read a part of the teacher's row; those of the whole row are opd::choice::divergences.
enum class part_estimator { topk, topk_rw, tail_bucket, mc, threshold, lightning };
// clang-format off
inline constexpr opd::choice::name<part_estimator> part_estimators[] = {
    {"topk", part_estimator::topk, "KL(p||q), both renormalised on the k best ids of teacher or student"},
    {"topk_rw", part_estimator::topk_rw, "topk of the stale student's ids, each times p/mu: does not repair it"},
    {"tail_bucket", part_estimator::tail_bucket, "KL(p||q) on the k best ids, all others lumped"},
    {"mc", part_estimator::mc, "m draws from the student; --shape, --surrogate and --baseline say what of them"},
    {"threshold", part_estimator::threshold, "likewise, of B weighted entries: the likely ones for certain"},
    {"lightning", part_estimator::lightning, "the drawn token, log q - log p within --advantage-clip, no ratio"},
};
// clang-format on

/// What --estimator takes.
inline constexpr auto estimators = [] {
    std::array<std::string_view, opd::choice::divergences.size() + std::size(part_estimators)> names;
    std::size_t n = 0;
    for (const auto& line : opd::choice::divergences) names[n++] = line.text;
    for (const auto& line : part_estimators) names[n++] = line.text;
    return names;
}();
/// The same, in a sentence.
const char* estimator_help();

/// The divergence of dense logits that a configuration names; none: it names another estimator.
std::optional<opd::any_dense> dense_estimator(const config& c);
/// The estimator of a part of the row; none: it names a divergence, or nothing.
inline std::optional<part_estimator> part_estimator_of(const config& c) {
    return opd::choice::find(part_estimators, c.distill.estimator);
}
/// It takes any --shape, --surrogate and --baseline; it reads drawn tokens.
constexpr bool composes(std::optional<part_estimator> e) {
    return e == part_estimator::mc || e == part_estimator::threshold;
}
constexpr bool reads_draws(std::optional<part_estimator> e) { return composes(e) || e == part_estimator::lightning; }
/// What --correction names; null: nothing.
const opd::correction_preset* correction_of(const config& c);
/// The estimator of drawn tokens that a configuration names, checked for the law that its schedule draws under.
opd::any_sampled drawn_estimator(const config& c);
/// What --selector makes of the rows at a version of the student: weights, or EOPD's mixture.
struct row_choice {
    opd::any_selector weights = {};
    std::optional<opd::selector::eopd> eopd = {};
};
row_choice selector_of(const config& c, std::int32_t version);
/// What --list-estimators prints.
std::string list_estimators();

} // namespace trainer
