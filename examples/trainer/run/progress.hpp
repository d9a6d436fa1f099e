// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a person sees while it runs: a bar that redraws itself on a terminal, plain lines elsewhere.
#pragma once

#include <cstdint>
#include <string>

namespace trainer {

struct progress_line {
    std::string stage;
    std::int64_t step = 0, steps = 0;
    double loss = 0;
    double gradient_norm = 0;
    double tokens_per_second = 0;
    double staleness = -1;   ///< mean, in versions; negative: the stage has none
    double seconds_left = 0; ///< of the whole run
};

class progress {
public:
    explicit progress(bool quiet);
    ~progress();

    /// `due`: a line for the log was written as well; without a terminal only these are printed.
    void show(const progress_line& line, bool due);

    /// Ends the line that is being redrawn, so that something else can be printed.
    void clear();

private:
    bool quiet_, terminal_, open_ = false;
    double last_ = 0; // seconds
};

/// Seconds of a clock that never goes back.
double now();

} // namespace trainer
