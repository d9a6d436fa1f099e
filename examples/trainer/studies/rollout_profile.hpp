// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rollout alone on one engine, by a clock that follows from --cost-*: how many sequences ran when, and what the steps
// of a full batch brought. Drafts, and what the target makes of them, are real; what they take is
//
//   a + b·rows + c·passes + d·drafted rows seconds a step (--cost-step, -step-row, -draft, -draft-row)
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "opd/spec/tuner.hpp"
#include "pipeline/rollout_engine.hpp"
#include "pipeline/sampling.hpp"

namespace trainer {

/// Some consecutive steps of a full batch, in the mean.
struct observed_turn {
    opd::spec::step_observation of; ///< seconds: of a step
    double tokens = 0;              ///< that a step drew
};

struct rollout_profile {
    struct point {
        double seconds = 0;
        index_t running = 0;
    };
    std::vector<point> running;        ///< at the beginning, and after each step
    std::vector<trajectory> responses; ///< in the order of the prompts
    double seconds = 0;                ///< until the last of them was finished
    std::int64_t tokens = 0;           ///< of them
    /// While every lane was busy and a prompt waited for one: seconds, tokens, steps by choice_name(), turns of 8.
    double full_seconds = 0;
    std::int64_t full_tokens = 0;
    std::array<std::int64_t, speculation_counts::choices> chosen = {};
    std::vector<observed_turn> turns;

    double full_rate() const { return full_seconds > 0 ? static_cast<double>(full_tokens) / full_seconds : 0; }
    /// How many ran then; steps are whole.
    index_t running_at(double when) const {
        index_t r = 0;
        for (const point& p : running)
            if (p.seconds <= when) r = p.running;
        return r;
    }
};

/// An engine, whose tuners go on from one rollout to the next. The model must outlive it.
class profiled_rollout {
public:
    profiled_rollout(const config& c, const any_task& task, const transformer<float>& model, index_t lanes)
        : settings_(c), drafts_(c.speculation.kind != "off"),
          engine_({{std::shared_ptr<void>(), &model}, 0}, sampling_of(c, task), lanes, task.max_length()) {}

    rollout_profile run(std::span<const request> prompts) {
        rollout_profile r;
        r.responses.resize(prompts.size());
        const index_t lanes = engine_.lanes();
        std::vector<std::size_t> place(static_cast<std::size_t>(lanes));
        std::vector<lane_trajectory> done;
        std::size_t next = 0;
        index_t left = std::ssize(prompts);
        sums turn;
        for (;;) {
            for (index_t lane = 0; lane < lanes && next < prompts.size(); ++lane) {
                if (engine_.busy(lane)) continue;
                engine_.start(lane, prompts[next]);
                place[static_cast<std::size_t>(lane)] = next++;
            }
            if (r.running.empty()) r.running.push_back({0, engine_.running()});
            if (left == 0) return r;
            const bool full = next < prompts.size();
            const index_t batch = engine_.running();
            const std::int64_t before = drawn_so_far(r);
            done.clear();
            const index_t rows = engine_.step(done);
            const double seconds = seconds_of(rows);
            engine_.took(seconds);
            r.seconds += seconds;
            for (lane_trajectory& f : done) {
                r.tokens += static_cast<std::int64_t>(f.sequence.response().size());
                r.responses[place[static_cast<std::size_t>(f.lane)]] = std::move(f.sequence);
                --left;
            }
            r.running.push_back({r.seconds, engine_.running()});
            const speculation_counts counts = engine_.take_counts();
            if (!full) continue;
            const std::int64_t tokens = drawn_so_far(r) - before;
            r.full_seconds += seconds, r.full_tokens += tokens;
            for (std::size_t i = 0; i < counts.chosen.size(); ++i) r.chosen[i] += counts.chosen[i];
            turn.add(counts, tokens, seconds);
            if (turn.steps < turn_steps) continue;
            r.turns.push_back(turn.mean(batch));
            turn = {};
        }
    }

private:
    static constexpr int turn_steps = 8; // as auto's turns
    struct sums {
        int steps = 0;
        std::int64_t drew = 0, accepted = 0, tokens = 0;
        double seconds = 0;
        void add(const speculation_counts& c, std::int64_t drawn, double s) {
            ++steps, drew += c.steps, accepted += c.accepted, tokens += drawn, seconds += s;
        }
        observed_turn mean(index_t batch) const {
            const double kept = drew > 0 ? static_cast<double>(accepted) / static_cast<double>(drew) : 0;
            return {{batch, kept, seconds / steps}, static_cast<double>(tokens) / steps};
        }
    };
    std::int64_t drawn_so_far(const rollout_profile& r) const {
        auto all = r.tokens;
        for (index_t lane = 0; lane < engine_.lanes(); ++lane)
            if (engine_.busy(lane)) all += static_cast<std::int64_t>(engine_.drawn(lane).response().size());
        return all;
    }
    double seconds_of(index_t rows) const {
        const auto& s = settings_.schedule;
        const draft_work w = drafts_ ? engine_.drafting() : draft_work{};
        return s.cost_step + s.cost_step_row * static_cast<double>(rows) +
               s.cost_draft * static_cast<double>(w.passes) + s.cost_draft_row * static_cast<double>(w.rows);
    }

    const config settings_;
    const bool drafts_;
    rollout_engine engine_;
};

/// What a tuner comes to of steps that were measured, arm by arm: each turn that it chooses is the arm's next.
struct tuned_rate {
    opd::spec::strategy most;       ///< what it chose most often in the second half
    double share = 0;               ///< of these turns
    double seconds = 0, tokens = 0; ///< of these turns
    double rate() const { return seconds > 0 ? tokens / seconds : 0; }
};
using measured_turns = std::vector<std::pair<opd::spec::strategy, std::vector<observed_turn>>>;

/// opd::invalid_input: the tuner chooses an arm of which no turn was measured.
inline tuned_rate tuned(opd::spec::beg_mab tuner, const measured_turns& of, index_t batch, int turns,
                        std::uint64_t seed) {
    std::vector<std::size_t> next(of.size(), 0), chosen(of.size(), 0);
    tuned_rate r;
    for (int i = 0; i < turns; ++i) {
        const opd::spec::strategy s =
            tuner.choose(batch, opd::spec::keyed_uniforms(seed, static_cast<std::uint64_t>(i)));
        std::size_t arm = 0;
        while (arm < of.size() && of[arm].first != s) ++arm;
        if (arm == of.size() || of[arm].second.empty())
            throw opd::invalid_input("of", "has no turns of an arm that the tuner chose");
        const auto& all = of[arm].second;
        const observed_turn& t = all[next[arm]++ % all.size()];
        tuner.heard(s, batch, t.of.accepted, t.of.seconds);
        if (i < turns / 2) continue;
        ++chosen[arm];
        r.seconds += t.of.seconds, r.tokens += t.tokens;
    }
    const auto most = static_cast<std::size_t>(std::max_element(chosen.begin(), chosen.end()) - chosen.begin());
    r.most = of[most].first, r.share = static_cast<double>(chosen[most]) / (turns - turns / 2);
    return r;
}

} // namespace trainer
