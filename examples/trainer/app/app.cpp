// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "app/app.hpp"

#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "opd/diagnostics.hpp"
#include "opd/error.hpp"
#include "run/offline.hpp"
#include "run/run.hpp"
#include "run/train_drafter.hpp"
#include "settings/command_line.hpp"
#include "settings/options.hpp"

namespace trainer {

namespace {

extern "C" void on_signal(int) {
    if (interrupted.exchange(true)) ::_exit(exit_interrupted); // asked twice: leave at once
}

} // namespace

std::string told(const command& arguments, const failure& e) {
    if (e.code == exit_usage || e.code == exit_resources) return as_given(arguments, e.what());
    const std::string& directory = arguments.settings.run.directory;
    std::error_code none;
    const std::string what = renamed(e.what(), arguments.in_file);
    if ((e.code != exit_io && e.code != exit_peer) ||
        !std::filesystem::exists(directory + "/checkpoints/latest.ckpt", none))
        return what;
    return fmt::format("{}. Once that is mended, --run-dir {} --resume goes on from the last checkpoint", what,
                       directory);
}

void listen_to_signals() {
    interrupted = false;
    std::signal(SIGINT, on_signal);
    std::signal(SIGTERM, on_signal);
}

int run_program(const char* name, const std::function<std::string(const failure&)>& said,
                const std::function<int()>& work) {
    const auto log = std::make_shared<spdlog::logger>(name, std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    log->set_pattern("%^%l%$: %v");
    spdlog::set_default_logger(log);
    try {
        return work();
    } catch (const failure& e) {
        log->error("{}", said(e));
        return e.code;
    } catch (const opd::bad_contents& e) { // too many rows that are not numbers
        log->error("{}; if training took a model there, a lower rate may help", e.what());
        return exit_numeric;
    } catch (const std::bad_alloc&) {
        log->error("not enough memory");
        return exit_resources;
    } catch (const std::length_error& e) { // more than a vector takes
        log->error("not enough memory: {}", e.what());
        return exit_resources;
    } catch (const opd::unsupported& e) { // of a thread team
        log->error("{}", said({exit_resources, e.what() + std::string("; --threads sets how many")}));
        return exit_resources;
    } catch (const std::filesystem::filesystem_error& e) {
        log->error("{}", e.what());
        return exit_io;
    } catch (const std::system_error& e) {
        const bool thread = e.code() == std::errc::resource_unavailable_try_again; // of the scheduler's driver
        const std::string what = thread ? "the system refused a thread; --rollout-workers sets how many: " : "";
        log->error("{}", said({exit_resources, what + e.what()}));
        return thread ? exit_resources : exit_other;
    } catch (const std::exception& e) {
        log->error("{}", e.what());
        return exit_other;
    }
}

int app_main(int argc, const char* const* argv, bool every_flag) {
    command arguments;
    return run_program(
        "opd-train", [&](const failure& e) { return told(arguments, e); },
        [&]() -> int {
            arguments = parse_command_line(argc, argv, every_flag);
            if (!arguments.text.empty()) {
                std::fputs(arguments.text.c_str(), stdout);
                return exit_ok;
            }
            if (arguments.quiet) spdlog::set_level(spdlog::level::warn);
            for (const std::string& warning : arguments.warnings) spdlog::warn("{}", warning);
            interrupted = false;
            if (arguments.train_drafter) {
                listen_to_signals();
                return train_drafter(arguments);
            }
            if (!arguments.write_offline.empty()) {
                listen_to_signals();
                return write_offline(arguments);
            }
            const auto work = std::make_unique<run>(arguments);
            listen_to_signals();
            return work->go();
        });
}

} // namespace trainer
