// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Files that are there whole or not at all, and files mapped into memory (POSIX). What cannot be read is invalid_input
// that names the file; what cannot be written is opd::error.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "opd/error.hpp"

namespace opd::data::detail {

[[noreturn]] OPD_COLD inline void refuse(const std::string& file, const std::string& why) {
    throw invalid_input(file, why);
}
[[noreturn]] OPD_COLD inline void cannot_write(const std::string& file, const char* what) {
    throw error("opd: " + file + ": " + what + ": " + std::strerror(errno));
}

/// An open file, closed with its owner.
class descriptor {
public:
    descriptor() = default;
    explicit descriptor(int fd) : fd_(fd) {}
    descriptor(descriptor&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
    descriptor& operator=(descriptor&& o) noexcept {
        std::swap(fd_, o.fd_);
        return *this;
    }
    ~descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }
    bool is_open() const { return fd_ >= 0; }

private:
    int fd_ = -1;
};

inline void write_all(int fd, std::span<const std::byte> bytes, const std::string& file) {
    constexpr std::size_t most = std::size_t{1} << 30; // what one call of the system takes
    while (!bytes.empty()) {
        const ssize_t n = ::write(fd, bytes.data(), std::min(bytes.size(), most));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) cannot_write(file, "cannot be written");
        bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
}
inline void sync_folder(const std::string& folder) {
    const descriptor d(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!d.is_open() || ::fsync(d.get()) != 0) cannot_write(folder, "cannot be synced");
}

/// A file under a temporary name, `.tmp` behind its own, that gets its name once all of it is on the disk; given up, it
/// is gone.
class new_file {
public:
    new_file(std::string folder, const std::string& name)
        : folder_(std::move(folder)), path_(folder_ + "/" + name), temporary_(path_ + ".tmp"),
          file_(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
        if (!file_.is_open()) cannot_write(temporary_, "cannot be created");
    }
    new_file(const new_file&) = delete;
    new_file& operator=(const new_file&) = delete;
    ~new_file() {
        if (!done_) ::unlink(temporary_.c_str());
    }
    /// Behind what was written before.
    void write(std::span<const std::byte> bytes) {
        write_all(file_.get(), bytes, temporary_);
        written_ += bytes.size();
#if defined(SYNC_FILE_RANGE_WRITE) // a hint: the disk begins while the rest is copied
        constexpr std::size_t least = std::size_t{8} << 20;
        if (written_ - begun_ < least) return;
        ::sync_file_range(file_.get(), static_cast<off_t>(begun_), static_cast<off_t>(written_ - begun_),
                          SYNC_FILE_RANGE_WRITE);
        begun_ = written_;
#endif
    }
    /// Leaves room for so many bytes, before anything is written: write_front().
    void skip(std::size_t bytes) {
        if (::lseek(file_.get(), static_cast<off_t>(bytes), SEEK_SET) < 0)
            cannot_write(temporary_, "cannot be sought in");
        written_ = begun_ = bytes;
    }
    void write_front(std::span<const std::byte> bytes) {
        if (::lseek(file_.get(), 0, SEEK_SET) < 0) cannot_write(temporary_, "cannot be sought in");
        write_all(file_.get(), bytes, temporary_);
    }
    /// Its bytes first, then its name, then the folder that has the name.
    void finish() {
        if (::fsync(file_.get()) != 0) cannot_write(temporary_, "cannot be synced");
        if (std::rename(temporary_.c_str(), path_.c_str()) != 0) cannot_write(path_, "cannot be renamed to");
        done_ = true;
        sync_folder(folder_);
    }

private:
    std::string folder_, path_, temporary_;
    descriptor file_;
    std::size_t written_ = 0, begun_ = 0; ///< begun_: what the disk was told to begin with
    bool done_ = false;
};

/// A file's bytes in memory, as the system pages them in; read only. What happens when somebody cuts a file that is
/// mapped is the system's (SIGBUS): files of a set are never changed, only added.
class mapped_file {
public:
    mapped_file() = default;
    explicit mapped_file(const std::string& path) {
        const descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
        if (!file.is_open())
            refuse(path, errno == ENOENT ? "is missing" : std::string("cannot be opened: ") + std::strerror(errno));
        struct stat s {};
        if (::fstat(file.get(), &s) != 0 || !S_ISREG(s.st_mode)) refuse(path, "is no file");
        size_ = static_cast<std::size_t>(s.st_size);
        if (size_ == 0) return;
        void* const p = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
        if (p == MAP_FAILED) refuse(path, std::string("cannot be mapped: ") + std::strerror(errno));
        data_ = static_cast<const std::byte*>(p);
    }
    mapped_file(mapped_file&& o) noexcept
        : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, std::size_t{0})) {}
    mapped_file& operator=(mapped_file&& o) noexcept {
        std::swap(data_, o.data_), std::swap(size_, o.size_);
        return *this;
    }
    ~mapped_file() {
        if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
    }
    std::span<const std::byte> bytes() const { return {data_, size_}; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

private:
    const std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

/// The size of a regular file; -1: there is none.
inline std::int64_t size_of_file(const std::string& path) {
    struct stat s {};
    return ::stat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode) ? std::int64_t{s.st_size} : -1;
}

} // namespace opd::data::detail
