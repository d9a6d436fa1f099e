// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the parts of the speculation interface share: checks, tokens in and out, handles, snapshots.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "handles.hpp"
#include "opd/c/spec.h"
#include "opd/sched/archive.hpp"
#include "spec_names.hpp"
#include "structs.hpp"
#include "tensor.hpp"

namespace opd_c {

/// What `text` stands for; refused with the table's names where it is none of them.
template <class Kind, std::size_t N>
Kind named(const char* argument, const char* text, const std::array<table_line<Kind>, N>& table) {
    if (text != nullptr)
        for (const auto& line : table)
            if (line.text == text) return line.which;
    std::string all;
    for (const auto& line : table) all.append(all.empty() ? "" : ", ").append(line.text);
    refuse(argument, (text == nullptr ? "is a null pointer" : std::string("is '").append(text).append("'")) +
                         "; it is one of " + all);
}

/// The same exception of another argument or row: what the C++ call names is named as the caller's struct has it.
[[noreturn]] inline void again(const opd::invalid_input& e, const std::string& argument, index_t row) {
    const std::string row_text = e.row < 0 ? std::string() : ", row " + std::to_string(e.row);
    const std::size_t head = std::string_view("opd: ").size() + e.argument.size() + row_text.size() + 2;
    throw opd::invalid_input(argument, std::string_view(e.what()).substr(head), row);
}
/// body(), whose exceptions name members of `name`.
template <class Body>
auto of_member(const char* name, Body&& body) {
    try {
        return body();
    } catch (const opd::invalid_input& e) {
        again(e, std::string(name) + "." + e.argument, e.row);
    }
}

inline void need(const char* name, const void* p) {
    if (p == nullptr) refuse(name, "is a null pointer");
}
inline void need_zero(const char* name, bool zero, const char* why) {
    if (!zero) refuse(name, std::string("is not 0: ") + why);
}
inline bool flag(const char* name, int value) {
    if (value != 0 && value != 1) refuse(name, "is " + std::to_string(value) + "; it is 0 or 1");
    return value == 1;
}
template <std::integral Int>
Int within(const char* name, Int x, std::type_identity_t<Int> least, std::type_identity_t<Int> most) {
    if (x < least || x > most)
        refuse(name, "is " + std::to_string(x) + "; it must lie in [" + std::to_string(least) + ", " +
                         std::to_string(most) + "]");
    return x;
}
/// The caller's array; empty for a null pointer and a count of 0.
template <class T>
std::span<const T> array(const std::string& name, const T* p, std::int64_t count, const char* count_name) {
    if (count < 0 || (p != nullptr && count == 0) || count > std::int64_t{1} << 40)
        refuse(count_name, "is " + std::to_string(count));
    if (p == nullptr && count > 0) refuse(name, "is a null pointer");
    return {p, static_cast<std::size_t>(count)};
}

/// Integers of a tensor, of 32 or 64 bits.
class integers {
public:
    integers() = default;
    integers(const char* name, const DLTensor* t) : name_(name) {
        need(name, t);
        const dtype d = type_of(*t);
        if (d != dtype::int32 && d != dtype::int64) detail::refuse_type(name, *t, "int32 or int64");
        const any_vector v = vector_of(name, *t);
        data_ = static_cast<char*>(v.data), size_ = v.size, wide_ = d == dtype::int64;
    }
    index_t size() const { return size_; }
    std::int64_t operator[](index_t i) const {
        if (wide_) return at<std::int64_t>(i);
        return at<std::int32_t>(i);
    }
    /// A token, which fits in 32 bits.
    std::int32_t token(index_t i) const {
        const std::int64_t x = (*this)[i];
        if (x < std::numeric_limits<std::int32_t>::min() || x > std::numeric_limits<std::int32_t>::max())
            throw opd::invalid_input(name_, "is " + std::to_string(x) + ", which does not fit in 32 bits", i);
        return static_cast<std::int32_t>(x);
    }
    void set(index_t i, std::int64_t x) const {
        if (wide_)
            put(i, x);
        else
            put(i, static_cast<std::int32_t>(x));
    }

private:
    template <class T>
    T at(index_t i) const {
        T x;
        std::memcpy(&x, data_ + i * static_cast<index_t>(sizeof x), sizeof x);
        return x;
    }
    template <class T>
    void put(index_t i, T x) const {
        std::memcpy(data_ + i * static_cast<index_t>(sizeof x), &x, sizeof x);
    }
    const char* name_ = "";
    char* data_ = nullptr;
    index_t size_ = 0;
    bool wide_ = false;
};

/// A copy of a tensor's tokens.
inline void copy_tokens(const char* name, const DLTensor* t, std::vector<std::int32_t>& to) {
    const integers from(name, t);
    to.resize(static_cast<std::size_t>(from.size()));
    for (index_t i = 0; i < from.size(); ++i) to[static_cast<std::size_t>(i)] = from.token(i);
}
inline std::vector<std::int32_t> tokens_of(const char* name, const DLTensor* t) {
    std::vector<std::int32_t> to;
    copy_tokens(name, t, to);
    return to;
}

/// First entry of each sequence, from 0 to `total`. Returns how many sequences there are.
inline index_t check_offsets(const char* name, const integers& offsets, index_t total) {
    const index_t sequences = offsets.size() - 1;
    if (sequences < 0) refuse(name, "is empty; it has one entry more than there are sequences");
    if (offsets[0] != 0) throw opd::invalid_input(name, "begins with " + std::to_string(offsets[0]) + ", not 0", 0);
    for (index_t s = 0; s < sequences; ++s)
        if (offsets[s + 1] < offsets[s]) throw opd::invalid_input(name, "falls", s + 1);
    if (offsets[sequences] != total)
        throw opd::invalid_input(
            name, "ends with " + std::to_string(offsets[sequences]) + ", not with " + std::to_string(total), sequences);
    return sequences;
}

/// A handle's state, and whose turn it is.
template <class Value>
struct one_at_a_time {
    std::mutex turn;
    Value value;
    template <class... Args>
    explicit one_at_a_time(Args&&... args) : value(std::forward<Args>(args)...) {}
};

/// body(handle) while it is the caller's turn.
template <class Handle, class Body>
auto in_turn(const char* name, Handle* handle, Body&& body) {
    const auto held = handles<Handle>().of(name, handle);
    const std::lock_guard turn(held->turn);
    return body(*held);
}

template <class Handle, class Make>
int create(Handle** out, Make&& make) {
    return guarded([&] {
        need("out", out);
        *out = handles<Handle>().add(make());
    });
}

/// The state's bytes, sealed, behind the word for its kind.
template <class Value>
void write_snapshot(std::string kind, Value& value, void* bytes, std::size_t size, std::size_t* length) {
    need("length", length);
    opd::sched::archive_writer to;
    to(kind, value);
    const std::string sealed = opd::sched::seal(std::move(to.bytes));
    if (bytes != nullptr) {
        if (size < sealed.size())
            refuse("size",
                   "is " + std::to_string(size) + "; the snapshot has " + std::to_string(sealed.size()) + " bytes");
        std::memcpy(bytes, sealed.data(), sealed.size());
    }
    *length = sealed.size();
}
/// `value`, which was made anew with the handle's options, as the bytes say.
template <class Value>
void read_snapshot(const std::string& kind, Value& value, const void* bytes, std::size_t size) {
    need("bytes", bytes);
    opd::sched::archive_reader from(opd::sched::unseal({static_cast<const char*>(bytes), size}));
    std::string found;
    from(found);
    if (found != kind) refuse("snapshot", "is not of " + kind);
    from(value);
    if (!from.done()) refuse("snapshot", "is longer than its state: it was made with other options");
}

} // namespace opd_c
