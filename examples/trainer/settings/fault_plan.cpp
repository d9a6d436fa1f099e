// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/fault_plan.hpp"

#include <optional>
#include <sstream>
#include <string>

#include <fmt/format.h>

#include "nearest.hpp"
#include "numbers.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace sched = opd::sched;

fault_plan::drawn fault_plan::of(sched::stage s, std::uint64_t call, std::uint32_t again) const {
    if (kill + delay + drop == 0) return {};
    constexpr std::uint32_t streams = 1000; // beyond those of sampling
    const opd::noise_row noise(seed, static_cast<opd::noise_stream>(streams + static_cast<std::uint32_t>(s)), call,
                               again);
    const double u = opd::keyed_uniform(noise, 0);
    const kind what = u < kill                  ? kind::kill
                      : u < kill + delay        ? kind::delay
                      : u < kill + delay + drop ? kind::drop
                                                : kind::none;
    return {what, opd::keyed_uniform(noise, 1)};
}

sched::fault fault_plan::in_virtual_time(sched::stage s, std::uint64_t call, std::uint32_t again) const {
    const drawn d = of(s, call, again);
    sched::fault f;
    switch (d.what) {
    case kind::none:
        break;
    case kind::kill:
        f.what = sched::fault::kind::death, f.after = d.part * seconds, f.back = seconds;
        break;
    case kind::delay:
        f.what = sched::fault::kind::late, f.after = seconds;
        break;
    case kind::drop:
        f.what = sched::fault::kind::hang;
        break;
    }
    return f;
}

fault_plan faults_of(const config& c) {
    fault_plan p;
    p.seconds = c.schedule.inject_seconds;
    p.seed = c.run.seed;
    const auto refuse = [](const std::string& why) { throw failure(exit_usage, "--inject " + why); };
    std::istringstream parts(c.schedule.inject);
    for (std::string part; std::getline(parts, part, ',');) {
        const std::size_t equals = part.find('=');
        const std::string name = part.substr(0, equals);
        double* share = name == "kill" ? &p.kill : name == "delay" ? &p.delay : name == "drop" ? &p.drop : nullptr;
        if (!share) {
            const std::string near = nearest(name, {"kill", "delay", "drop"});
            refuse(fmt::format("names kill, delay and drop, not '{}'{}", name,
                               near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
        }
        const auto value = equals == std::string::npos ? std::nullopt : number_of(part.substr(equals + 1));
        if (!value || !(*value >= 0 && *value <= 1))
            refuse(fmt::format("takes shares of the calls in [0, 1], as in kill=0.01,drop=0.02, not '{}'", part));
        *share = *value;
    }
    if (p.kill + p.delay + p.drop > 1)
        refuse(fmt::format("takes shares that add up to 1 at most, not {}", p.kill + p.delay + p.drop));
    const auto& s = c.schedule;
    if (p.drop > 0 && !(s.rollout_deadline > 0 && s.teacher_deadline > 0 && s.learner_deadline > 0))
        refuse("drop needs --rollout-deadline, --teacher-deadline and --learner-deadline: nothing else finds out that "
               "an answer will never come");
    return p;
}

} // namespace trainer
