// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/progress.hpp"

#include <chrono>
#include <cstdio>

#include <fmt/format.h>
#include <unistd.h>

namespace trainer {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

progress::progress(bool quiet) : quiet_(quiet), terminal_(::isatty(STDERR_FILENO) == 1) {}
progress::~progress() { clear(); }

void progress::clear() {
    if (open_) std::fputs("\r\033[K", stderr);
    open_ = false;
}

void progress::show(const progress_line& l, bool due) {
    if (quiet_) return;
    const double time = now();
    if (terminal_ ? time - last_ < 0.1 && l.step < l.steps : !due) return;
    last_ = time;
    std::string text = fmt::format("{:<8} {:>5}/{}", l.stage, l.step, l.steps);
    if (terminal_) {
        const int width = 24, done = l.steps > 0 ? static_cast<int>(width * l.step / l.steps) : width;
        text += " [" + std::string(static_cast<std::size_t>(done), '#') +
                std::string(static_cast<std::size_t>(width - done), '.') + "]";
    }
    text +=
        fmt::format("  loss {:.4f}  norm {:.3f}  {:.0f}k tok/s", l.loss, l.gradient_norm, l.tokens_per_second * 1e-3);
    if (l.staleness >= 0) text += fmt::format("  staleness {:.1f}", l.staleness);
    const auto left = static_cast<long>(l.seconds_left + 0.5);
    text += fmt::format("  ETA {}:{:02}", left / 60, left % 60);
    if (terminal_) {
        fmt::print(stderr, "\r\033[K{}", text);
        open_ = true;
        std::fflush(stderr);
    } else {
        fmt::print(stderr, "{}\n", text);
    }
}

} // namespace trainer
