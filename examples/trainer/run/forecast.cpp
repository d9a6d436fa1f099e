// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/forecast.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "pipeline/rollout.hpp"
#include "pipeline/supervised.hpp"
#include "run/progress.hpp"
#include "schedule/stages.hpp"
#include "settings/schedule.hpp"

namespace trainer {

namespace {

// Of as many calls as a moment has room for, after one that warms up.
template <class Work>
double seconds_of(Work&& work) {
    constexpr double moment = 0.3;
    const double first = now();
    work();
    const double begin = now();
    if (begin - first > moment) return begin - first;
    int calls = 0;
    do ++calls, work();
    while (now() - begin < moment);
    return (now() - begin) / calls;
}

} // namespace

double forecast::from(stage s, std::int64_t step) const {
    if (s == stage::finished) return 0;
    double seconds = stages[static_cast<std::size_t>(s)].all(step);
    for (std::size_t i = static_cast<std::size_t>(s) + 1; i < stages.size(); ++i) seconds += stages[i].all();
    return seconds;
}

double forecast::after(stage s) const {
    return s == stage::finished ? 0 : from(s, stages[static_cast<std::size_t>(s)].steps);
}

pace measured(const config& c, const any_task& task, const transformer<float>& teacher,
              const transformer<float>& student, opd::cpu_backend& backend) {
    // seconds of a supervised step of so many prompts
    const auto step = [&](const transformer<float>& like, int batch) {
        transformer<float> model = like;
        adamw_state state;
        supervised teach(task, model, state, backend);
        return seconds_of([&] { teach.step(c.run.seed, 0, batch, 1e-6, c.optimizer); });
    };
    // and of a token of an answer
    const auto token = [&](const transformer<float>& model, int prompts) {
        sampling o = sampling_of(c, task);
        o.greedy = true, o.plan = {}, o.speculate = {}, o.kv_tokens = 0;
        std::vector<request> requests;
        for (int i = 0; i < prompts; ++i)
            requests.push_back(request_of(task, c.run.seed, static_cast<std::uint64_t>(i)));
        std::size_t tokens = 0;
        const double seconds = seconds_of([&] {
            tokens = 0;
            for (const trajectory& t : roll_out(model, backend.team(), requests, o)) tokens += t.response().size();
        });
        return seconds / static_cast<double>(std::max<std::size_t>(1, tokens));
    };
    pace p;
    constexpr int some = 200;
    for (std::uint64_t i = 0; i < some; ++i)
        p.answer += static_cast<double>(task.solution_tokens(task.training_problem(c.run.seed, i)).size()) / some;
    const int answers = std::min(batch_of(c), c.distill.slots);
    p.teacher = {step(teacher, c.teacher.batch), token(teacher, answers)};
    p.student = {step(student, c.student.batch), token(student, answers)};
    return p;
}

forecast forecast_at(const pace& p, const config& c) {
    const double whole = c.evaluation.prompts * (1.0 + c.evaluation.samples) * p.answer; // tokens
    constexpr double forward = 1.0 / 3;                                                  // of a step's time
    forecast f;
    f.stages[0] = {c.teacher.steps, p.teacher.step, whole * p.teacher.token};
    f.stages[1] = {c.student.max_steps,
                   p.student.step + c.student.check_prompts * p.answer * p.student.token / c.student.check_every +
                       (c.student.data == "teacher" ? c.student.batch * p.answer * p.teacher.token : 0),
                   whole * p.student.token};
    // in virtual time rollout has one thread
    const double alone = in_virtual_time(c) ? threads_of(c) : 1;
    const double before = forward * p.teacher.step / c.teacher.batch + alone * p.answer * p.student.token;
    const double looks =
        c.evaluation.every > 0 ? c.evaluation.every_prompts * p.answer * p.student.token / c.evaluation.every : 0;
    f.stages[2] = {c.distill.steps,
                   batch_of(c) * (p.student.step / c.student.batch + (is_offline(c) ? 0 : before)) + looks,
                   whole * p.student.token};
    return f;
}

std::string in_words(double seconds) {
    if (seconds < 90) return fmt::format("about {:.0f} seconds", std::max(1.0, seconds));
    if (seconds < 90 * 60) return fmt::format("about {:.0f} minutes", seconds / 60);
    return fmt::format("about {:.1f} hours", seconds / 3600);
}

} // namespace trainer
