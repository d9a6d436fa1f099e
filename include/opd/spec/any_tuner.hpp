// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// All choosers of strategies in one type, for programs that take the choice from a configuration:
//
//   opd::spec::any_tuner tuner(opd::spec::beg_mab{});
//   const opd::spec::strategy s = tuner.choose(batch, uniform);
//   tuner.heard(s, batch, accepted, seconds, uniform);
//
// A chooser without chance draws nothing; a table hears nothing.
#pragma once

#include <utility>
#include <variant>

#include "opd/config.hpp"
#include "opd/spec/cost_profile.hpp"
#include "opd/spec/published_tuner.hpp"
#include "opd/spec/tuner.hpp"

namespace opd::spec {

/// One of the choosers below, with one interface. `uniform` is called for numbers in (0, 1), as often as that chooser
/// needs.
class any_tuner {
public:
    using chooser = std::variant<beg_mab, published_beg_mab, ucb1, fixed_table, cost_profile>;
    explicit any_tuner(chooser c) : chooser_(std::move(c)) {}

    template <uniform_source U>
    strategy choose(index_t batch, U&& uniform) {
        return std::visit(
            [&](auto& c) {
                if constexpr (requires { c.choose(batch, uniform); })
                    return c.choose(batch, uniform);
                else
                    return c.choose(batch);
            },
            chooser_);
    }
    template <uniform_source U>
    void heard(const strategy& s, index_t batch, double accepted, double seconds, U&& uniform) {
        std::visit(
            [&](auto& c) {
                if constexpr (requires { c.heard(s, batch, accepted, seconds, uniform); })
                    c.heard(s, batch, accepted, seconds, uniform);
                else if constexpr (requires { c.heard(s, batch, accepted, seconds); })
                    c.heard(s, batch, accepted, seconds);
            },
            chooser_);
    }
    const chooser& get() const { return chooser_; }

    /// Of the chooser that it was made with.
    template <class A>
    void fields(A& a) {
        std::visit(
            [&](auto& c) {
                if constexpr (requires { c.fields(a); }) c.fields(a);
            },
            chooser_);
    }

private:
    chooser chooser_;
};

} // namespace opd::spec
