// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The list of staleness policies: a policy chooses which scored sequences make the next batch. policies/policy.hpp says
// what a policy is; the head of each policy's own file states its theorem. Settings, ledger, scheduler, queue and
// command lines read this list, and there is no other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "opd/sched/policies/areal.hpp"
#include "opd/sched/policies/capacity.hpp"
#include "opd/sched/policies/cohort_fifo.hpp"
#include "opd/sched/policies/drop.hpp"
#include "opd/sched/policies/edf.hpp"
#include "opd/sched/policies/in_order.hpp"
#include "opd/sched/policies/naive_wait.hpp"
#include "opd/sched/policies/retry.hpp"

namespace opd::sched {

namespace policies {

/// A list of types; their places are the numbers of `staleness_policy`.
template <class... Policies>
struct list {};
/// All policies. A new one comes last: snapshots have its number.
using all = list<capacity, cohort_fifo, edf, drop, retry, in_order, areal, naive_wait>;

/// The place of Policy in the list; its length where the list lacks it.
template <class Policy, class... All>
constexpr std::uint8_t number_in(list<All...>) {
    std::uint8_t n = 0;
    (void)((std::is_same_v<Policy, All> || (++n, false)) || ...);
    return n;
}
/// The policy's value of `staleness_policy`.
template <class Policy>
inline constexpr std::uint8_t number = number_in<Policy>(all{});

} // namespace policies

/// By its place in the list above. Snapshots have the number, so a new one comes last.
enum class staleness_policy : std::uint8_t {
    /// order of completion: mean start lag at most M/B - 1, no bound for one sequence (AsyncOPD)
    capacity = policies::number<policies::capacity>,
    /// order of start version: start lag at most ceil(M/B) - 1
    cohort_fifo = policies::number<policies::cohort_fifo>,
    /// lowest versions first, and only if every deadline stays feasible: start lag at most tau
    edf = policies::number<policies::edf>,
    /// order of completion; what would exceed tau is given up: start lag at most tau, data lost
    drop = policies::number<policies::drop>,
    /// order of completion; what would exceed tau starts again: start lag at most tau, work lost
    retry = policies::number<policies::retry>,
    /// order of admission: start lag at most ceil(M/B) - 1, reproducible batches
    in_order = policies::number<policies::in_order>,
    /// order of completion under AReaL's admission rule
    areal = policies::number<policies::areal>,
    /// negative control: waits for whoever would exceed tau, and deadlocks
    naive_wait = policies::number<policies::naive_wait>
};

namespace policies {

/// The traits of a list's policies, in its order.
template <class... All>
constexpr auto traits_in(list<All...>) {
    return std::array{All::traits...};
}
/// Traits by `staleness_policy`.
inline constexpr auto all_traits = traits_in(all{});

/// A variant of the orders, each once: policies that have one order in common differ in their traits alone.
template <class Orders, class... More>
struct distinct {
    using type = Orders;
};
template <class... Orders, class Next, class... More>
struct distinct<std::variant<Orders...>, Next, More...> {
    static constexpr bool known = (std::is_same_v<Orders, Next> || ...);
    using type = typename distinct<std::conditional_t<known, std::variant<Orders...>, std::variant<Orders..., Next>>,
                                   More...>::type;
};
/// A variant of the orders of a list's policies. Never defined: its type is what counts.
template <class... All>
distinct<std::variant<>, typename All::order...> orders_of(list<All...>);
/// The order of one of them.
using any_order = typename decltype(orders_of(all{}))::type;

/// The order of the policy of this number; the first one's where the number is none.
template <class... All>
any_order make(list<All...>, std::uint8_t which, const policy_settings& s) {
    any_order made(std::in_place_index<0>, s);
    (void)((which == number<All> && (made.emplace<typename All::order>(s), true)) || ...);
    return made;
}

} // namespace policies

constexpr staleness_policy last_of(staleness_policy) {
    return static_cast<staleness_policy>(policies::all_traits.size() - 1);
}
/// A policy's name, what it asks of permits and admission, and why it is a negative control if it is one.
constexpr const policy_traits& traits_of(staleness_policy p) {
    return policies::all_traits[static_cast<std::size_t>(p)];
}
constexpr const char* name_of(staleness_policy p) { return traits_of(p).name; }

/// Those that a user may choose from: all but negative controls.
inline std::vector<staleness_policy> staleness_policies() {
    std::vector<staleness_policy> r;
    for (std::size_t i = 0; i < policies::all_traits.size(); ++i)
        if (!policies::all_traits[i].deadlock) r.push_back(static_cast<staleness_policy>(i));
    return r;
}

} // namespace opd::sched
