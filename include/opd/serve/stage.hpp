// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An http_teacher as a teacher stage of the schedulers (opd/sched/stages.hpp): one object a worker, any number of them
// over one teacher, whose concurrency they share.
//
//   auto served = std::make_shared<serve::http_teacher>(settings);
//   driver.add_teacher(std::make_shared<serve::http_stage<response>>(served, [](const response& r) {
//       return serve::sequence{r.tokens, r.prompt_size};
//   }));
//
// A sequence that was not scored is a null entry: the scheduler queues it again, up to settings.teacher_attempts. Where
// none was, the call throws what the first of them died of. Once the stop token is triggered it returns what it has.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "opd/error.hpp"
#include "opd/serve/http_teacher.hpp"

namespace opd::serve {

/// None of a call's sequences was scored.
struct not_scored : error {
    failure why;
    not_scored(failure why_, const std::string& text)
        : error(std::string("opd: the served teacher scored none: ").append(to_string(why_)).append(": ").append(text)),
          why(why_) {}
};

/// A worker's stage: `sequence_of` says what of a rolled sequence is scored.
template <class Rolled>
class http_stage {
public:
    using scored_type = scores;
    http_stage(std::shared_ptr<http_teacher> teacher, std::function<sequence(const Rolled&)> sequence_of)
        : teacher_(std::move(teacher)), sequence_of_(std::move(sequence_of)) {}

    std::vector<std::shared_ptr<const scores>> score(std::span<const std::shared_ptr<const Rolled>> rolled,
                                                     std::stop_token stop) {
        std::vector<sequence> sequences;
        for (const auto& r : rolled) sequences.push_back(sequence_of_(*r));
        std::vector<outcome> outcomes = teacher_->score(sequences, std::move(stop));
        std::vector<std::shared_ptr<const scores>> r(outcomes.size());
        bool any = outcomes.empty();
        for (std::size_t i = 0; i < r.size(); ++i)
            if (outcomes[i]) r[i] = std::make_shared<const scores>(std::move(*outcomes[i].scores)), any = true;
        if (!any) throw not_scored(outcomes.front().why, outcomes.front().text);
        return r;
    }

private:
    std::shared_ptr<http_teacher> teacher_;
    std::function<sequence(const Rolled&)> sequence_of_;
};

} // namespace opd::serve
