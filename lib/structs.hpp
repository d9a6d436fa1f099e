// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Structs of the C interface as this library knows them, whatever header the caller was compiled with.
#pragma once

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "errors.hpp"

namespace opd_c {

/// The size that the caller's struct says it has.
template <class Struct>
std::size_t size_of(const char* name, const Struct& s) {
    const std::size_t size = s.struct_size;
    if (size < sizeof(std::size_t) || size > 65536)
        refuse(std::string(name) + ".struct_size", "is " + std::to_string(size) + "; set it to sizeof the struct");
    return size;
}

/// A copy of *s, or of defaults where s is null and `optional`: what the caller's struct lacks is 0; what it has
/// beyond ours must be 0.
template <class Struct>
Struct read(const char* name, const Struct* s, bool optional = false) {
    static_assert(std::is_trivially_copyable_v<Struct>);
    Struct copy;
    if (s == nullptr) {
        if (!optional) refuse(name, "is a null pointer");
        copy = {};
        copy.struct_size = sizeof copy;
        return copy;
    }
    const std::size_t size = size_of(name, *s);
    if (size == sizeof copy) {
        std::memcpy(&copy, s, sizeof copy);
        return copy;
    }
    const auto* bytes = reinterpret_cast<const char*>(s);
    for (std::size_t i = sizeof(Struct); i < size; ++i)
        if (bytes[i] != 0)
            throw opd::unsupported(std::string("opd: ") + name +
                                   " has a member that this version of the library does not know");
    copy = {};
    std::memcpy(&copy, bytes, size < sizeof copy ? size : sizeof copy);
    copy.struct_size = sizeof copy;
    return copy;
}

/// What read() returns, without a copy where the caller's struct is of this version's size; the caller's struct stays
/// as it is meanwhile.
template <class Struct>
class given {
public:
    given(const char* name, const Struct* s, bool optional = false) : at_(s) {
        if (s != nullptr && s->struct_size == sizeof copy_) return;
        copy_ = read(name, s, optional);
        at_ = &copy_;
    }
    given(const given&) = delete;
    const Struct& operator*() const { return *at_; }
    const Struct* operator->() const { return at_; }

private:
    const Struct* at_;
    Struct copy_; // set where it is needed
};

/// A member that later versions may give a meaning is 0 in this one.
template <class Struct>
void refuse_reserved(const char* name, const Struct& s) {
    if (s.reserved != 0)
        throw opd::unsupported(std::string("opd: ") + name +
                               ".reserved is not 0: a later version of the interface may know what it is");
}

/// Writes a result into the caller's struct, as far as it has room.
template <class Struct>
void write(const char* name, Struct* to, const Struct& from) {
    if (to == nullptr) return;
    const std::size_t size = size_of(name, *to);
    std::memcpy(to, &from, size < sizeof from ? size : sizeof from);
    to->struct_size = size;
}

/// `value`, or what stands for 0.
template <class Number>
constexpr Number or_default(Number value, Number for_zero) {
    return value == Number(0) ? for_zero : value;
}

/// An enumerator of the caller's, which may be any int.
template <class To>
To one_of(const char* name, int value, std::initializer_list<To> kinds) {
    if (value < 0 || value >= static_cast<int>(kinds.size()))
        refuse(name, "is " + std::to_string(value) + "; it has the values 0 to " + std::to_string(kinds.size() - 1));
    return kinds.begin()[value];
}

} // namespace opd_c
