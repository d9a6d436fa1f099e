// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The tables of include/opd/c/sched.h: schedules, staleness policies, updates of weights, laws of the virtual cluster.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "errors.hpp"
#include "names.hpp"
#include "opd/sched/distributions.hpp"
#include "opd/sched/settings.hpp"

namespace opd_c {

/// As the alternatives of sched::schedule are numbered.
enum class schedule_kind { sync, step_off, controlled, async };
inline constexpr auto schedules = std::to_array<table_line<schedule_kind>>({
    {"sync", schedule_kind::sync, "rollout, score, train, synchronise, in strict sequence: no lag"},
    {"step_off", schedule_kind::step_off, "whole batches, trained k updates after their start: lag min(version, k)"},
    {"controlled", schedule_kind::controlled, "step_off without overlap: the lag as the only variable"},
    {"async", schedule_kind::async, "sequences stream under M permits; the policy says which make a batch"},
});
static_assert(schedules.size() == std::variant_size_v<opd::sched::schedule>);

inline constexpr auto staleness_policies = std::to_array<table_line<opd::sched::staleness_policy>>({
    {"capacity", opd::sched::staleness_policy::capacity, "order of completion: mean start lag at most M/B - 1"},
    {"cohort_fifo", opd::sched::staleness_policy::cohort_fifo,
     "order of start version: start lag at most ceil(M/B) - 1"},
    {"edf", opd::sched::staleness_policy::edf,
     "lowest versions first, if every deadline stays feasible: start lag at most tau"},
    {"drop", opd::sched::staleness_policy::drop,
     "order of completion, what would exceed tau is given up: start lag at most tau"},
    {"retry", opd::sched::staleness_policy::retry,
     "order of completion, what would exceed tau starts again: start lag at most tau"},
    {"in_order", opd::sched::staleness_policy::in_order, "order of admission: start lag at most ceil(M/B) - 1"},
    {"areal", opd::sched::staleness_policy::areal, "order of completion under AReaL's admission rule"},
    {"naive_wait", opd::sched::staleness_policy::naive_wait,
     "negative control: waits for what would exceed tau, and deadlocks"},
});
inline constexpr auto weight_updates = std::to_array<table_line<opd::sched::weight_update>>({
    {"keep", opd::sched::weight_update::keep, "running sequences go on under the new weights with their tokens"},
    {"abort", opd::sched::weight_update::abort, "running sequences start again under the new weights"},
    {"finish_first", opd::sched::weight_update::finish_first, "the change waits until no sequence is running"},
});

/// As the alternatives of sched::distribution are numbered.
enum class law_kind { constant, uniform, exponential, lognormal, pareto, empirical, quantile_table, mixture };
inline constexpr auto laws = std::to_array<table_line<law_kind>>({
    {"constant", law_kind::constant, "a"},
    {"uniform", law_kind::uniform, "between a and b"},
    {"exponential", law_kind::exponential, "of mean a"},
    {"lognormal", law_kind::lognormal, "of median a; its logarithm has the standard deviation b"},
    {"pareto", law_kind::pareto, "of exponent a on [b, c); c 0: no cap"},
    {"empirical", law_kind::empirical, "each of the n values x alike"},
    {"quantile_table", law_kind::quantile_table, "linear between the n quantiles x at u"},
    {"mixture", law_kind::mixture, "of n parts with weights"},
});
static_assert(laws.size() == std::variant_size_v<decltype(opd::sched::distribution::law)>);

// Each table has every enumerator, in order, under the name that the library prints.
template <class Table>
constexpr bool whole_table(const Table& table) {
    using kind = decltype(table[0].which);
    bool same = true;
    if constexpr (requires { last_of(kind{}); }) {
        same = table.size() == static_cast<std::size_t>(last_of(kind{})) + 1;
        for (const auto& line : table) same = same && line.text == name_of(line.which);
    }
    for (std::size_t i = 0; i < table.size(); ++i) same = same && static_cast<std::size_t>(table[i].which) == i;
    return same;
}
static_assert(whole_table(schedules) && whole_table(staleness_policies) && whole_table(weight_updates) &&
              whole_table(laws));

/// The line that `text` names, or for NULL `otherwise`; else a sentence with all of them.
template <class Table, class Kind>
Kind choose(const std::string& argument, const char* text, const Table& table, Kind otherwise) {
    if (text == nullptr) return otherwise;
    std::string all;
    for (const auto& line : table) {
        if (line.text == text) return line.which;
        all.append(all.empty() ? "" : ", ").append(line.text);
    }
    refuse(argument, std::string("is \"").append(text).append("\"; it is one of ").append(all));
}

} // namespace opd_c
