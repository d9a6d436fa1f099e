// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Tokens consumed by updates per second. metrics.hpp has the formula.
#pragma once

#include <cstdint>
#include <optional>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/sched/meters/measures.hpp"

namespace opd::sched {

/// Tokens consumed by updates per second. The first `warmup` updates are discarded (the paper: 5), and the clock
/// starts after the last of them; with J <= warmup updates, or no time between, there is no throughput yet and the
/// answer is empty.
class throughput_meter {
public:
    explicit throughput_meter(std::int64_t warmup = 5) : warmup_(warmup) {
        if (warmup < 1) throw invalid_input("warmup", "the clock starts after an update, so at least one is discarded");
    }

    /// When the first update's work began, if its own time is to be known.
    void start(double t) {
        if (latest_) throw invalid_input("t", "the start comes once, before the first update");
        latest_ = detail::checked_time(t);
    }
    /// After an update that consumed so many tokens.
    void step(double t, std::int64_t response_tokens, std::int64_t prompt_tokens = 0) {
        detail::checked_time(t);
        if (latest_ && t < *latest_) throw invalid_input("t", "an update that ends before the one before it");
        detail::checked_count("response_tokens", response_tokens);
        detail::checked_count("prompt_tokens", prompt_tokens);
        step_seconds_ = latest_ ? std::optional<double>(t - *latest_) : std::nullopt;
        step_tokens_ = response_tokens + prompt_tokens;
        latest_ = t;
        response_ += response_tokens;
        prompt_ += prompt_tokens;
        if (++steps_ == warmup_) origin_ = {t, response_, prompt_};
    }

    std::int64_t steps() const { return steps_; }
    std::int64_t response_tokens() const { return response_; }
    std::int64_t prompt_tokens() const { return prompt_; }
    /// Σ_{j>warmup} response tokens of update j / (t_J - t_warmup).
    std::optional<double> throughput() const { return per_second(response_ - origin_.response); }
    /// The same with the prompts' tokens counted too.
    std::optional<double> total_throughput() const {
        return per_second(response_ - origin_.response + prompt_ - origin_.prompt);
    }
    /// Of the last update: its duration, and (prompt + response tokens) / duration.
    std::optional<double> step_seconds() const { return step_seconds_; }
    std::optional<double> step_rate() const { return detail::ratio(double(step_tokens_), step_seconds_.value_or(0)); }
    /// Mean duration of an update after the warm-up.
    std::optional<double> mean_step_seconds() const {
        return steps_ > warmup_ ? detail::ratio(*latest_ - origin_.time, double(steps_ - warmup_)) : std::nullopt;
    }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("steps", steps()), visit("response_tokens", response_tokens()), visit("prompt_tokens", prompt_tokens()),
            visit("throughput", throughput()), visit("total_throughput", total_throughput()),
            visit("mean_step_seconds", mean_step_seconds());
    }

private:
    std::optional<double> per_second(std::int64_t tokens) const {
        return steps_ > warmup_ ? detail::ratio(double(tokens), *latest_ - origin_.time) : std::nullopt;
    }

    std::int64_t warmup_, steps_ = 0, step_tokens_ = 0, response_ = 0, prompt_ = 0;
    struct {
        double time = 0;
        std::int64_t response = 0, prompt = 0;
    } origin_; // after the warm-up
    std::optional<double> latest_, step_seconds_;
};

} // namespace opd::sched
