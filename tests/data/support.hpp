// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the tests of data sets share: a folder that is gone afterwards, files as text, caches of random bits, and a
// list of each cache's members that is not the library's own.
#pragma once

#include "support/generators.hpp"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <opd/data/rollout_reader.hpp>
#include <opd/data/rollout_writer.hpp>
#include <unistd.h>

namespace opd::test {

namespace fs = std::filesystem;

/// An empty folder of this process, removed with its owner.
class folder {
public:
    folder() {
        static int count = 0;
        const fs::path memory = "/dev/shm"; // where a sync costs nothing
        path_ = ((fs::exists(memory) ? memory : fs::temp_directory_path()) /
                 ("opd_data_" + std::to_string(::getpid()) + "_" + std::to_string(count++)))
                    .string();
        fs::remove_all(path_);
        fs::create_directories(path_);
    }
    folder(const folder&) = delete;
    folder& operator=(const folder&) = delete;
    ~folder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    const std::string& path() const { return path_; }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

inline std::string read_all(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
inline void write_all(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}
inline std::vector<std::string> files_of(const std::string& path) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

// --- caches of random bits -------------------------------------------------------------------------------------------

/// The members of a cache: f(view) of those that go by rows, f(view, offsets) of lines of entries.
template <class Id, class L, class F>
void members(teacher::support<Id, L>& c, F&& f) {
    f(c.ids), f(c.log_q), f(c.log_tail), f(c.log_mu);
}
template <class Id, class L, class F>
void members(teacher::ragged_support<Id, L>& c, F&& f) {
    f(c.ids, c.offsets), f(c.log_q, c.offsets), f(c.log_mu, c.offsets), f(c.log_tail);
}
template <class Cache, class F>
void drawn_members(Cache& c, F&& f) {
    f(c.ids), f(c.log_mu), f(c.log_q), f(c.log_prox), f(c.log_ref), f(c.advantage), f(c.baseline), f(c.mu_entropy);
    f(c.rollout.log_norm);
}
template <class Id, class L, class F>
void members(teacher::samples<Id, L>& c, F&& f) {
    drawn_members(c, f);
}
template <class Id, class L, class W, class F>
void members(teacher::weighted<Id, L, space::host, W>& c, F&& f) {
    drawn_members(c, f);
    f(c.weight), f(c.exact), f(c.log_tail_mu);
}
template <class Cache, class Id, class F>
void members(teacher::on_kept_sets<Cache, Id>& c, F&& f) {
    members(static_cast<Cache&>(c), f);
    f(c.kept_ids, c.kept_offsets), f(c.log_kept_q);
}
template <class Y, class F>
void members(teacher::dense<Y>& c, F&& f) {
    f(c.y);
}
template <class X, class F>
void members(teacher::hidden<X>& c, F&& f) {
    f(c.x);
}

/// A cache of N rows whose members point at random bits; ids below V, sometimes -1.
template <class Cache>
class random_cache {
public:
    random_cache(numbers& u, index_t rows, index_t width, index_t vocab)
        : u_(&u), rows_(rows), width_(width), v_(vocab) {
        members(cache_, *this);
    }
    template <class T>
    void operator()(matrix_view<const T>& m) {
        m = view(line<T>(rows_ * width_), rows_, width_);
    }
    template <class T>
    void operator()(vector_view<const T>& v) {
        v = view(line<T>(rows_), rows_);
    }
    template <class T>
    void operator()(vector_view<const T>& v, row_offsets<>& offsets) {
        if (offsets.empty()) {
            auto* const at = const_cast<std::int64_t*>(line<std::int64_t>(rows_ + 1));
            at[0] = u_->below(3); // a line may begin anywhere
            for (index_t r = 0; r < rows_; ++r) at[r + 1] = at[r] + u_->below(2 * width_);
            offsets = row_offsets<>(static_cast<const std::int64_t*>(at), rows_ + 1);
        }
        v = view(line<T>(offsets[rows_] + 2), offsets[rows_] + 2);
    }

    /// Rows [first, first + n).
    Cache slice(index_t first, index_t n) const {
        Cache c = cache_;
        members(c, slicer{first, n});
        return c;
    }
    const Cache& whole() const { return cache_; }
    Cache& whole() { return cache_; }

private:
    struct slicer {
        index_t first, n;
        template <class T>
        void operator()(matrix_view<const T>& m) const {
            m = view(m.row(first), n, m.cols, m.stride);
        }
        template <class T>
        void operator()(vector_view<const T>& v) const {
            v = view(v.data + first, n);
        }
        template <class T>
        void operator()(vector_view<const T>&, row_offsets<>& offsets) const {
            if (offsets.size != n + 1) // the first line of those offsets
                offsets = row_offsets<>(static_cast<const std::int64_t*>(offsets.data) + first, n + 1);
        }
    };
    template <class T>
    const T* line(index_t n) {
        auto& bytes = storage_.emplace_back(static_cast<std::size_t>(n) * sizeof(T) + 8);
        T* const p = reinterpret_cast<T*>(bytes.data());
        for (index_t i = 0; i < n; ++i) {
            if constexpr (std::is_same_v<T, std::int32_t> || std::is_same_v<T, std::int64_t>) {
                p[i] = static_cast<T>(u_->below(v_ + 1) - 1);
            } else {
                const auto bits = static_cast<std::uint64_t>(u_->below(index_t{1} << 32)) << 32 |
                                  static_cast<std::uint64_t>(u_->below(index_t{1} << 32));
                std::memcpy(static_cast<void*>(p + i), &bits, sizeof(T));
            }
        }
        return p;
    }
    numbers* u_;
    index_t rows_, width_, v_;
    std::vector<std::vector<std::byte>> storage_;
    Cache cache_{};
};

/// Where the bits of a cache's rows are.
class row_bits {
public:
    template <class Cache>
    explicit row_bits(Cache c) {
        members(c, *this);
    }
    template <class T>
    void operator()(const matrix_view<const T>& m) {
        parts_.push_back({m.data, sizeof(T) * static_cast<std::size_t>(m.cols), sizeof(T) * std::size_t(m.stride), {}});
    }
    template <class T>
    void operator()(const vector_view<const T>& v) {
        parts_.push_back({v.data, sizeof(T), sizeof(T), {}});
    }
    template <class T>
    void operator()(const vector_view<const T>& v, const row_offsets<>& offsets) {
        parts_.push_back({v.data, sizeof(T), sizeof(T), offsets});
    }
    /// A row's, all members behind each other, each with its length before it.
    std::string of(index_t row) const {
        std::string s;
        for (const part& p : parts_) {
            const auto* const bytes = static_cast<const char*>(p.data);
            const index_t from = p.offsets.empty() ? row : p.offsets[row];
            const index_t n = p.offsets.empty() ? 1 : p.offsets[row + 1] - from;
            const std::size_t size = bytes == nullptr ? 0 : p.bytes * static_cast<std::size_t>(n);
            s += std::to_string(size) + ":";
            if (size > 0) s.append(bytes + static_cast<std::size_t>(from) * p.stride, size);
        }
        return s;
    }

private:
    struct part {
        const void* data;
        std::size_t bytes, stride;
        row_offsets<> offsets;
    };
    std::vector<part> parts_;
};

} // namespace opd::test
