// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "app.hpp"

#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "run.hpp"

namespace trainer {

namespace {

extern "C" void on_signal(int) {
    if (interrupted.exchange(true)) ::_exit(exit_interrupted); // asked twice: leave at once
}

} // namespace

int app_main(int argc, const char* const* argv) {
    const auto log =
        std::make_shared<spdlog::logger>("opd-train", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    log->set_pattern("%^%l%$: %v");
    spdlog::set_default_logger(log);
    try {
        const command arguments = parse_command_line(argc, argv);
        if (!arguments.text.empty()) {
            std::fputs(arguments.text.c_str(), stdout);
            return exit_ok;
        }
        if (arguments.quiet) spdlog::set_level(spdlog::level::warn);
        const auto work = std::make_unique<run>(arguments);
        interrupted = false;
        std::signal(SIGINT, on_signal);
        std::signal(SIGTERM, on_signal);
        return work->go();
    } catch (const failure& e) {
        log->error("{}", e.what());
        return e.code;
    } catch (const std::exception& e) {
        log->error("{}", e.what());
        return 1;
    }
}

} // namespace trainer
