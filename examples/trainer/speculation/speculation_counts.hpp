// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What became of drafts, and whether they paid.
//
//   break-even   tokens that a sequence must get of a step with drafts, so that it gets as many a second as of steps
//                without: seconds of the step / seconds of one without drafts, of the same sequences
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace trainer {

struct speculation_counts {
    static constexpr std::size_t choices = 15;

    std::int64_t steps = 0;          ///< sequence steps that drew a token
    std::int64_t verified_steps = 0; ///< of these, with drafts
    std::int64_t drafted = 0;        ///< tokens that a drafter proposed
    std::int64_t verified = 0;       ///< of these, that went through the target
    std::int64_t accepted = 0;       ///< of these, that the target drew as well
    std::int64_t tokens = 0;         ///< drawn
    /// Steps of the engine that verified drafts, from when it is known what one without takes.
    struct {
        std::int64_t sequences = 0, tokens = 0;
        double seconds = 0;
        double without = 0; ///< that such steps would take without drafts
    } timed;
    std::int64_t
        aged = 0,
        age = 0; ///< sequence steps with drafts of an adapted drafter; policy versions that it was behind in these
    std::array<std::int64_t, choices> chosen = {}; ///< steps of the engine, by what they were to do: choice_name()

    void add(const speculation_counts& o) {
        with(o, [](auto& mine, auto other) { mine += other; });
    }
    /// Drafted tokens that a sequence kept of a step that verified some.
    double accepted_per_step() const { return ratio(accepted, verified_steps); }
    /// Tokens that a step brought a sequence.
    double tokens_per_step() const { return ratio(tokens, steps); }
    /// The same, of steps with drafts, and how many it takes for them to pay; 0: there were none.
    double timed_tokens_per_step() const { return ratio(timed.tokens, timed.sequences); }
    double break_even() const { return ratio(timed.seconds, timed.without); }
    /// Tokens a second of steps with drafts, and of steps without for the same sequences; 0: there were none.
    double tokens_per_second() const { return ratio(timed.tokens, timed.seconds); }
    double tokens_per_second_without() const { return ratio(timed.sequences, timed.without); }
    /// Mean age of the drafter that drafted.
    double mean_age() const { return ratio(age, aged); }

    template <class A>
    void fields(A& a) {
        with(*this, [&](auto& mine, auto) { a(mine); });
    }

private:
    template <class F>
    void with(const speculation_counts& o, F&& f) {
        f(steps, o.steps), f(verified_steps, o.verified_steps), f(drafted, o.drafted), f(verified, o.verified);
        f(accepted, o.accepted), f(tokens, o.tokens);
        f(timed.sequences, o.timed.sequences), f(timed.tokens, o.timed.tokens);
        f(timed.seconds, o.timed.seconds), f(timed.without, o.timed.without);
        f(aged, o.aged), f(age, o.age);
        for (std::size_t i = 0; i < choices; ++i) f(chosen[i], o.chosen[i]);
    }
    template <class T, class U>
    static double ratio(T a, U b) {
        return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 0.0;
    }
};

} // namespace trainer
