// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "run.hpp"

namespace {

extern "C" void on_signal(int) {
    if (trainer::interrupted.exchange(true)) ::_exit(trainer::exit_interrupted); // asked twice: leave at once
}

} // namespace

int main(int argc, char** argv) {
    const auto log = spdlog::stderr_color_mt("opd-train");
    log->set_pattern("%^%l%$: %v");
    spdlog::set_default_logger(log);
    try {
        const trainer::command arguments = trainer::parse_command_line(argc, argv);
        if (!arguments.text.empty()) {
            std::fputs(arguments.text.c_str(), stdout);
            return trainer::exit_ok;
        }
        if (arguments.quiet) spdlog::set_level(spdlog::level::warn);
        const auto run = std::make_unique<trainer::run>(arguments);
        std::signal(SIGINT, on_signal);
        std::signal(SIGTERM, on_signal);
        return run->go();
    } catch (const trainer::failure& e) {
        spdlog::error("{}", e.what());
        return e.code;
    } catch (const std::exception& e) {
        spdlog::error("{}", e.what());
        return 1;
    }
}
