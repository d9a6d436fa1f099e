// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Plots of the example programs, by gnuplot if it is installed.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace examples {

// Runs `gnuplot script` in `directory` without a shell; returns what went wrong.
inline std::string run_gnuplot(const std::string& directory, const std::string& script) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, directory.c_str());
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "gnuplot.log", O_WRONLY | O_CREAT | O_TRUNC, 0666);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    std::string program = "gnuplot", file = script;
    char* const arguments[] = {program.data(), file.data(), nullptr};
    pid_t child = 0;
    const int error = ::posix_spawnp(&child, "gnuplot", &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error == ENOENT) return "gnuplot is not installed";
    if (error != 0) return fmt::format("gnuplot cannot be started: {}", std::strerror(error));
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return "gnuplot is not installed";
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return fmt::format("gnuplot failed, see {}/gnuplot.log", directory);
    return {};
}

} // namespace examples
