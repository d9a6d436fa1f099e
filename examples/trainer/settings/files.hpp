// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Files that are either the old or the new one, never half of each: written under a temporary name, synced, renamed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "opd/data/files.hpp"

namespace trainer {

/// The whole file; a failure of kind exit_input names it.
std::string read_file(const std::string& path);

/// Replaces the file; a failure of kind exit_io names it, says why, and leaves the old one and no other.
void write_file(const std::string& path, std::string_view bytes);

/// The same of bytes that come in pieces: `content` hands them to its argument, one after the other.
using piece_sink = std::function<void(std::string_view)>;
void write_pieces(const std::string& path, const std::function<void(const piece_sink&)>& content);

/// A file that another thread writes: who asks for it goes on at once. A request that waits gives way to a newer one;
/// the file is always whole, and what was asked for last is written when this is gone.
class background_file {
public:
    explicit background_file(std::string path) : path_(std::move(path)), writer_([this] { run(); }) {}
    background_file(const background_file&) = delete;
    background_file& operator=(const background_file&) = delete;
    ~background_file();

    /// `bytes` is asked by the other thread. A failure of what was asked for before is thrown here, once.
    void write(std::function<std::string()> bytes);
    /// Waits until all is written; throws likewise.
    void flush();
    /// Files that were written.
    std::int64_t written() const;

private:
    void run();
    void rethrow(std::unique_lock<std::mutex>& lock);

    const std::string path_;
    mutable std::mutex mutex_; // of all below
    std::condition_variable changed_;
    std::function<std::string()> next_;
    std::exception_ptr failed_;
    std::int64_t written_ = 0;
    bool busy_ = false, stops_ = false;
    std::thread writer_; // the last: it uses the others
};

/// A file that grows by lines, each handed to the system at once: a process that is killed loses none.
class line_file {
public:
    line_file() = default;
    line_file(const line_file&) = delete;
    line_file& operator=(const line_file&) = delete;
    ~line_file() {
        if (file_) std::fclose(file_);
    }

    /// Opens the file with those of its lines for which `keep` says so, none if it is null. Returns whether any is
    /// left.
    bool open(const std::string& path, const std::function<bool(const std::string& line)>& keep);
    void write(const std::string& line);

private:
    std::string path_;
    std::FILE* file_ = nullptr;
};

/// A directory that is this process's alone as long as this lives: whoever is second is refused, by a failure of kind
/// exit_usage that names the first. The system lets go of it with the process, however that ends; on a file system
/// without locks it keeps nobody out.
class directory_lock {
public:
    explicit directory_lock(const std::string& directory);
    directory_lock(const directory_lock&) = delete;
    directory_lock& operator=(const directory_lock&) = delete;

private:
    opd::data::detail::descriptor file_;
};

/// Creates a directory and its parents.
void make_directory(const std::string& path);

/// FNV-1a of 128 bits as 32 hexadecimal digits: tells settings and files apart, and damage from neither. Not for
/// adversaries.
std::string hash128(std::string_view bytes);

} // namespace trainer
