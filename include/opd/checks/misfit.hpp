// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sentences for arguments that no form of a source takes. OPD_MISFIT gives a source, beside its deduction guides,
// one for arguments that are no views: the guide deduces source<misfit<arguments...>>, which takes anything, says in
// one sentence what is wrong, and is passed over by evaluate.
#pragma once

#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/view.hpp"

namespace opd::detail {

/// `storage` without the compiler's explanation of a concept, which would stand beside the sentence.
template <class... T>
inline constexpr bool stored = (storage<T> && ...);
template <class... T>
constexpr bool known_elements() {
    static_assert(stored<T...>, "opd: unknown element type: specialise opd::element for it, in one line where it holds "
                                "the bits of a known type; see docs/concepts/element.md");
    return true;
}

/// Stands for a source's first type where the arguments `Why` fit no form of it.
template <class... Why>
struct misfit {};

struct weights_not_float {};
struct two_log_types {};

/// 0: no view; else a bit for its memory space.
template <class T>
inline constexpr int view_space = 0;
template <class T, space S>
inline constexpr int view_space<matrix_view<T, S>> = S == space::host ? 1 : 2;
template <class T, space S>
inline constexpr int view_space<vector_view<T, S>> = S == space::host ? 1 : 2;

/// What may stand behind a source's views.
template <class T>
concept option = std::is_arithmetic_v<T> || std::is_enum_v<T>;

/// Whether arguments could be a source's: views of one memory space, and numbers or enumerators behind the first.
template <class First, class... Rest>
constexpr bool are_views() {
    constexpr int spaces = (view_space<First> | ... | view_space<Rest>);
    return view_space<First> != 0 && spaces != 3 && ((view_space<Rest> != 0 || option<Rest>)&&...);
}

template <class... Why>
struct misfit_source {
    static constexpr bool pointer = (std::is_pointer_v<Why> || ...);
    static constexpr bool weights = (std::is_same_v<Why, weights_not_float> || ...);
    static constexpr bool logs = (std::is_same_v<Why, two_log_types> || ...);
    static constexpr bool spaces = (0 | ... | view_space<Why>) == 3;
    static_assert(!pointer, "opd: a pointer alone has no shape: give a view, opd::view(pointer, rows, cols) or "
                            "opd::device_view(pointer, rows, cols)");
    static_assert(!weights, "opd: the weights of a teacher::weighted cache are float or double");
    static_assert(!logs, "opd: the log-probabilities of a cache are of one type: log_mu and log_q differ");
    static_assert(pointer || !spaces, "opd: the views of a source lie in one memory space: all opd::view or all "
                                      "opd::device_view");
    static_assert(
        pointer || weights || logs || spaces,
        "opd: student and teacher sources take views, such as opd::view(pointer, rows, cols), and then options by "
        "name; see docs/concepts/view.md");
    using misfit = void;
};

} // namespace opd::detail

/// For a source whose template parameters behind the first are `parameters`; their names follow.
#define OPD_MISFIT(source, parameters, ...)                                                                            \
    template <class... A>                                                                                              \
        requires(!opd::detail::are_views<A...>())                                                                      \
    source(A...)                                                                                                       \
    ->source<opd::detail::misfit<A...>>;                                                                               \
    template <class... Why, OPD_BARE parameters>                                                                       \
    struct source<opd::detail::misfit<Why...>, __VA_ARGS__> : opd::detail::misfit_source<Why...> {                     \
        template <class... A>                                                                                          \
        constexpr source(A&&...) {}                                                                                    \
    }
#define OPD_BARE(...) __VA_ARGS__
