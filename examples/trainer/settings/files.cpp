// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/files.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <sstream>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "opd/data/checksum.hpp"
#include "opd/error.hpp"
#include "settings/config.hpp"

namespace trainer {

namespace {

[[noreturn]] void fail(exit_code code, const std::string& what, const std::string& path) {
    throw failure(code, fmt::format("{} {}: {}", what, path, std::strerror(errno)));
}

} // namespace

std::string read_file(const std::string& path) {
    const opd::data::detail::descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.is_open()) fail(exit_input, "cannot open", path);
    std::string r;
    char buffer[1 << 16];
    for (;;) {
        const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(exit_input, "cannot read", path);
        if (n == 0) return r;
        r.append(buffer, static_cast<std::size_t>(n));
    }
}

void write_file(const std::string& path, std::string_view bytes) {
    write_pieces(path, [bytes](const piece_sink& write) { write(bytes); });
}

void write_pieces(const std::string& path, const std::function<void(const piece_sink&)>& content) {
    const auto done = [](const auto& step) {
        try {
            step();
        } catch (const opd::error& e) {
            throw failure(exit_io, e.what());
        }
    };
    const std::filesystem::path whole(path);
    const std::string folder = whole.parent_path().string();
    std::optional<opd::data::detail::new_file> file; // whatever goes wrong, half a file takes no room
    done([&] { file.emplace(folder.empty() ? "." : folder, whole.filename().string()); });
    content([&](std::string_view bytes) { done([&] { file->write(std::as_bytes(std::span(bytes))); }); });
    done([&] { file->finish(); });
}

background_file::~background_file() {
    {
        const std::lock_guard lock(mutex_);
        stops_ = true;
    }
    changed_.notify_all();
    writer_.join();
}

void background_file::rethrow(std::unique_lock<std::mutex>& lock) {
    const std::exception_ptr failed = std::exchange(failed_, {});
    if (!failed) return;
    lock.unlock();
    std::rethrow_exception(failed);
}

void background_file::write(std::function<std::string()> bytes) {
    std::unique_lock lock(mutex_);
    rethrow(lock);
    next_ = std::move(bytes);
    changed_.notify_all();
}

void background_file::flush() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !next_ && !busy_; });
    rethrow(lock);
}

std::int64_t background_file::written() const {
    const std::lock_guard lock(mutex_);
    return written_;
}

void background_file::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return next_ || stops_; });
        if (!next_) return;
        const auto bytes = std::exchange(next_, {});
        busy_ = true;
        lock.unlock();
        std::exception_ptr failed;
        try {
            write_file(path_, bytes());
        } catch (...) {
            failed = std::current_exception();
        }
        lock.lock();
        busy_ = false;
        failed ? void(failed_ = failed) : void(++written_);
        changed_.notify_all();
    }
}

bool line_file::open(const std::string& path, const std::function<bool(const std::string&)>& keep) {
    std::string kept;
    if (keep && std::filesystem::exists(path)) {
        std::istringstream lines(read_file(path));
        for (std::string line; std::getline(lines, line);)
            if (keep(line)) kept += line + "\n";
    }
    write_file(path, kept);
    path_ = path;
    if (file_) std::fclose(file_);
    file_ = std::fopen(path.c_str(), "ab");
    if (!file_) throw failure(exit_io, fmt::format("cannot open {}: {}", path, std::strerror(errno)));
    return !kept.empty();
}

void line_file::write(const std::string& line) {
    if (std::fprintf(file_, "%s\n", line.c_str()) < 0 || std::fflush(file_) != 0)
        throw failure(exit_io, fmt::format("cannot write {}: {}", path_, std::strerror(errno)));
}

directory_lock::directory_lock(const std::string& directory) {
    const std::string path = directory + "/lock";
    file_ = opd::data::detail::descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file_.is_open()) fail(exit_io, "cannot open", path);
    char name[300];
    if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        const ssize_t n = ::pread(file_.get(), name, sizeof name, 0);
        throw failure(exit_usage,
                      fmt::format("--run-dir: {} is in use by {}; let it end, or name another directory", directory,
                                  n > 0 ? std::string(name, static_cast<std::size_t>(n)) : "another process"));
    }
    char host[200] = "?";
    ::gethostname(host, sizeof host - 1);
    const std::string mine = fmt::format("process {} on {}", ::getpid(), host);
    // who cannot be named, as on a full disk, has the directory all the same
    if (::ftruncate(file_.get(), 0) != 0 || ::pwrite(file_.get(), mine.data(), mine.size(), 0) < 0) errno = 0;
}

void make_directory(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error) throw failure(exit_io, fmt::format("cannot create directory {}: {}", path, error.message()));
}

std::string hash128(std::string_view bytes) { return opd::data::fingerprint_of(bytes); }

} // namespace trainer
