// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// State to bytes and back: a type lists its members once, `template <class A> void fields(A& a) { a(x, y, z); }`, and
// the writer, the reader and with them snapshots, hashes and comparisons of state follow. Integers and doubles are
// stored as they are, little-endian; containers with their length before them. An enumeration runs from 0 to the
// value of a function beside it, `constexpr kind last_of(kind) { return kind::c; }`: a reader refuses what no program
// wrote.
//
// seal() adds a mark in front and a checksum behind, so that damage is found before anything is read. It is no
// signature: whoever can write the bytes can seal them. Of those, readers refuse what contradicts itself, and what
// they take never leaves its bounds, whatever happens next. It may still be nonsense: a run that waits for ever,
// events that throw. What your own types read in fields() is yours to check.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/error.hpp"

namespace opd::sched {

static_assert(std::endian::native == std::endian::little, "opd: snapshots are little-endian");

namespace detail {
template <class T>
concept plain = std::is_arithmetic_v<T> || std::is_enum_v<T>;
template <class T, class A>
concept lists_fields = requires(T& t, A& a) {
    t.fields(a);
};
} // namespace detail

/// Collects bytes.
class archive_writer {
public:
    static constexpr bool reading = false;
    std::string bytes;

    template <class... T>
    void operator()(const T&... values) {
        (one(values), ...);
    }

private:
    template <class T>
    void one(const T& v) {
        if constexpr (detail::plain<T>)
            bytes.append(reinterpret_cast<const char*>(&v), sizeof v);
        else
            const_cast<T&>(v).fields(*this);
    }
    template <class T>
    void range(const T& v) {
        one(static_cast<std::uint64_t>(v.size()));
        for (const auto& x : v) one(x);
    }
    template <class T>
    void one(const std::vector<T>& v) {
        range(v);
    }
    template <class T>
    void one(const std::deque<T>& v) {
        range(v);
    }
    void one(const std::string& v) {
        one(static_cast<std::uint64_t>(v.size()));
        bytes += v;
    }
    template <class A, class B>
    void one(const std::pair<A, B>& v) {
        one(v.first);
        one(v.second);
    }
};

/// Takes bytes apart; throws invalid_input when they end too early.
class archive_reader {
public:
    static constexpr bool reading = true;
    explicit archive_reader(std::string_view bytes) : rest_(bytes) {}

    template <class... T>
    void operator()(T&... values) {
        (one(values), ...);
    }
    bool done() const { return rest_.empty(); }

private:
    const char* take(std::size_t n) {
        if (rest_.size() < n) throw invalid_input("snapshot", "ends too early");
        const char* p = rest_.data();
        rest_.remove_prefix(n);
        return p;
    }
    template <class T>
    void one(T& v) {
        if constexpr (std::is_same_v<T, bool>)
            v = number<std::uint8_t>(1) != 0; // a byte of 2 or more is none, and may not even be loaded as one
        else if constexpr (std::is_enum_v<T>)
            v = static_cast<T>(number<std::underlying_type_t<T>>(static_cast<std::underlying_type_t<T>>(last_of(T{}))));
        else if constexpr (detail::plain<T>)
            std::memcpy(&v, take(sizeof v), sizeof v);
        else
            v.fields(*this);
    }
    template <class Int>
    Int number(Int last) {
        Int x;
        std::memcpy(&x, take(sizeof x), sizeof x);
        if (std::cmp_less(x, 0) || x > last) throw invalid_input("snapshot", "is damaged: a value is none of its kind");
        return x;
    }
    template <class T>
    void range(T& v) {
        std::uint64_t n = 0;
        one(n);
        if (n > rest_.size()) throw invalid_input("snapshot", "is damaged: a length exceeds what follows");
        v.clear();
        for (std::uint64_t i = 0; i < n; ++i) {
            typename T::value_type x{};
            one(x);
            v.push_back(std::move(x));
        }
    }
    template <class T>
    void one(std::vector<T>& v) {
        range(v);
    }
    template <class T>
    void one(std::deque<T>& v) {
        range(v);
    }
    void one(std::string& v) {
        std::uint64_t n = 0;
        one(n);
        v.assign(take(n), n);
    }
    template <class A, class B>
    void one(std::pair<A, B>& v) {
        one(v.first);
        one(v.second);
    }
    std::string_view rest_;
};

namespace detail {
/// What a reader requires of what it has read.
inline void needs(bool holds, const char* what) {
    if (!holds) throw invalid_input("snapshot", std::string("contradicts itself: ") + what);
}
/// Takes counts as an archive does: whether all lie in [0, most], where sums of them are far from an overflow.
struct count_range {
    std::int64_t most = std::int64_t{1} << 60;
    bool holds = true;
    template <class... Int>
    void operator()(const Int&... x) {
        holds = holds && ((std::cmp_greater_equal(x, 0) && std::cmp_less_equal(x, most)) && ...);
    }
};
inline constexpr std::int64_t most_at_once = std::int64_t{1} << 40; // tokens of a sequence, updates of a step

inline constexpr std::string_view snapshot_mark = "opdsch10"; // the digits count the formats
// Changes whenever one 8-byte word changes: every step is a bijection of the sum so far.
inline std::uint64_t checksum(std::string_view bytes) {
    std::uint64_t sum = bytes.size();
    for (std::size_t i = 0; i < bytes.size(); i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + i, std::min<std::size_t>(8, bytes.size() - i));
        sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
        sum ^= sum >> 32;
    }
    return sum;
}

/// What is shared with nobody else, null or not.
template <class A, class T>
void pointer_fields(A& a, std::shared_ptr<const T>& p) {
    bool there = p != nullptr;
    a(there);
    if constexpr (A::reading) {
        auto read = there ? std::make_shared<T>() : nullptr;
        if (there) a(*read);
        p = std::move(read);
    } else {
        if (there) a(*p);
    }
}
/// The same of a payload; of one that does not list its fields, whether it is there.
template <class A, class T>
void payload_fields(A& a, std::shared_ptr<const T>& p) {
    if constexpr (lists_fields<T, A>) {
        pointer_fields(a, p);
    } else {
        bool there = p != nullptr;
        a(there);
    }
}
/// What somebody threw, null or not: its text.
template <class A>
void exception_fields(A& a, std::exception_ptr& p) {
    bool there = p != nullptr;
    std::string text;
    if (!A::reading && there) try {
            std::rethrow_exception(p);
        } catch (const std::exception& e) {
            text = e.what();
        } catch (...) {
            text = "opd: what was thrown is no std::exception";
        }
    a(there, text);
    if constexpr (A::reading) p = there ? std::make_exception_ptr(error(text)) : nullptr;
}

/// The length of a list, then f of each entry; a length that is damaged runs out of bytes before it runs out of memory.
template <class A, class List, class F>
void list_fields(A& a, List& list, F&& f) {
    auto count = static_cast<std::uint64_t>(list.size());
    a(count);
    if constexpr (A::reading) {
        list.clear();
        for (std::uint64_t i = 0; i < count; ++i) f(list.emplace_back());
    } else {
        for (auto& x : list) f(x);
    }
}
} // namespace detail

/// The bytes between a mark of the format and a checksum.
inline std::string seal(std::string bytes) {
    bytes.insert(0, detail::snapshot_mark);
    const std::uint64_t sum = detail::checksum(bytes);
    bytes.append(reinterpret_cast<const char*>(&sum), sizeof sum);
    return bytes;
}

/// What was sealed; throws invalid_input where the bytes are not what seal() returned.
inline std::string_view unseal(std::string_view sealed) {
    const std::size_t mark = detail::snapshot_mark.size();
    std::uint64_t sum = 0;
    if (sealed.size() < mark + sizeof sum) throw invalid_input("snapshot", "ends too early");
    if (sealed.substr(0, mark) != detail::snapshot_mark)
        throw invalid_input("snapshot", "is none of this library, or of another version of it");
    const std::string_view body = sealed.substr(0, sealed.size() - sizeof sum);
    std::memcpy(&sum, body.data() + body.size(), sizeof sum);
    if (sum != detail::checksum(body)) throw invalid_input("snapshot", "is damaged: its checksum differs");
    return body.substr(mark);
}

} // namespace opd::sched
