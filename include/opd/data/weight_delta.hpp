// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lossless deltas of weights: what changed from one version to the next, to the bit, for who holds the one before.
//
//   std::vector<std::byte> bytes = data::weight_delta(held, was, is, 8);                  the learner; was, is: parts
//   held = data::apply_weight_delta(bytes, held, parts);                                  a worker, in place
//
// Parts are named runs of bfloat16, half, float or bytes: tensors, or a rank's own slice of each. What is made is what
// the learner had, bit for bit: an ordinary checkpoint. A delta names the version that it goes from and that one's
// checksum, the version that it makes and that one's: a chain. Who holds another base is refused before anything is
// written (missed_base); any other refusal in place takes back what was written. The steps apart, with memory for one
// part's delta at a time: weight_delta_writer, weight_delta_reader.
//
// Format 1, little-endian. sum: weight_sum (weight_sum.hpp) of all bytes of the message before it.
//
//   begin     "OPDWDELT" · u32 1 · u32 0 · i64 base · u64 checksum of the base · i64 version that is made · u64 sum
//             (base -1: none, and every part is whole)
//   part      u32 bytes of the name · u8 type (1 bytes, 2 bf16, 3 f16, 4 f32) · u8 kind (0 delta, 1 whole) · u16 0 ·
//             u64 elements · u64 checksum of the base · u64 checksum of what is made · u64 bytes of the body · name ·
//             body · u64 sum
//   end       u32 ~0 · u32 parts · u64 checksum of the version that is made · u64 sum
//
//   checksum of a part      weight_sum of: u64 type · u64 elements · weight_sum of each block (65,536 elements)
//   checksum of a version   weight_sum of: for each part weight_sum of its name · checksum of the part
//   body, whole             the elements
//   body, delta             of each block that changed: number of unchanged blocks before it (7 bits a byte, low
//                           first), u32 low half of the block's checksum in the base, u8 form
//     form 0                of each element its step
//     form 1                the changed ones: number - 1 (7 bits a byte), u8 j, u8 k, bytes of U, bytes of S, number of
//                           X (7 bits a byte each); then L of j bits each, M of k bits each, U, S, X
//
// A step is the difference modulo 2^bits of the elements' ranks: their bits, mapped so that floats ascend (sign set:
// all flipped; else the sign alone), of which -0 and every NaN have their own. It is coded as z - 1, z = 2|step| -
// [step<0]. Gaps between changed elements and codes are Golomb-Rice codes (Rice 1979): the low j (k) bits in L (M), the
// rest in unary in U (S): so many zeros, a one. A code that has 8 or more left stands in X, with 8 zeros in S and 0 in
// M. k = bits: no S, all of it in M. A block is never longer than in form 0, so that a delta is never longer than the
// weights by more than 16 bytes a block and 64 a part.
//
// Above 600 lines: writer and reader of one format, whose every field stands in both.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "opd/data/weight_sum.hpp"
#include "opd/error.hpp"

namespace opd::data {

/// Elements of a part; the number is what a message has.
enum class weight_type : std::uint8_t { bytes = 1, bf16 = 2, f16 = 3, f32 = 4 };
/// Bytes of an element.
constexpr std::size_t size_of(weight_type t) { return t == weight_type::f32 ? 4 : t == weight_type::bytes ? 1 : 2; }

/// A named run of elements.
struct weight_part {
    std::string_view name;
    weight_type type = weight_type::f32;
    std::span<const std::byte> bytes = {};
};
/// One that is written.
struct weight_target {
    std::string_view name;
    weight_type type = weight_type::f32;
    std::span<std::byte> bytes = {};
    operator weight_part() const { return {name, type, bytes}; }
};

/// A version of all parts, and their checksum. number < 0: nothing is held.
struct weight_version {
    std::int64_t number = -1;
    std::uint64_t sum = 0;
    friend bool operator==(const weight_version&, const weight_version&) = default;
};

/// A delta from another version than the one that is held, or from one of that number with other bits.
struct missed_base : invalid_input {
    weight_version held, base;
    missed_base(weight_version held_, weight_version base_)
        : invalid_input("delta", text(held_, base_)), held(held_), base(base_) {}

private:
    static std::string text(const weight_version& held, const weight_version& base) {
        std::string s = "goes from version " + std::to_string(base.number) + ", ";
        if (held.number < 0) return s + "none is held: the base was missed";
        if (held.number != base.number)
            return s + "version " + std::to_string(held.number) + " is held: the base was missed";
        return s + "the version of that number that is held has another checksum";
    }
};

/// Elements of a block.
inline constexpr std::size_t weight_block = 65536;

namespace detail {

// The caller's elements as whole numbers, wherever they lie.
template <std::size_t Size>
struct words;
template <>
struct words<1> {
    using type = std::uint8_t;
    typedef std::uint8_t loose __attribute__((may_alias, aligned(1)));
};
template <>
struct words<2> {
    using type = std::uint16_t;
    typedef std::uint16_t loose __attribute__((may_alias, aligned(1)));
};
template <>
struct words<4> {
    using type = std::uint32_t;
    typedef std::uint32_t loose __attribute__((may_alias, aligned(1)));
};

/// Ascends as the floats do; of bytes, themselves.
template <class U>
constexpr U rank_of(U b) {
    if constexpr (sizeof(U) == 1) return b;
    constexpr U top = U(U(1) << (8 * sizeof(U) - 1));
    return U(b ^ U(top | U(U(0) - U(b >> (8 * sizeof(U) - 1)))));
}
template <class U>
constexpr U of_rank(U r) {
    if constexpr (sizeof(U) == 1) return r;
    constexpr U top = U(U(1) << (8 * sizeof(U) - 1));
    return U(r ^ U(top | U(U(r >> (8 * sizeof(U) - 1)) - U(1))));
}
template <class U>
constexpr U code_of(U step) { // of 0 the largest number
    return U(U(U(step << 1) ^ U(U(0) - U(step >> (8 * sizeof(U) - 1)))) - U(1));
}
template <class U>
constexpr U step_of(U code) {
    const U z = U(code + U(1));
    return U(U(z >> 1) ^ U(U(0) - U(z & 1)));
}

inline std::uint64_t load64(const std::byte* p) {
    std::uint64_t x;
    std::memcpy(&x, p, 8);
    return x;
}
template <class T>
void put(std::vector<std::byte>& out, T x) {
    const auto* p = reinterpret_cast<const std::byte*>(&x);
    out.insert(out.end(), p, p + sizeof x);
}

inline constexpr std::uint64_t most_unary = 8;
inline constexpr std::size_t slack = 64; ///< bytes behind a buffer that its readers and writers may touch

/// Memory of one block's coding: its elements, its streams.
class delta_scratch {
public:
    std::unique_ptr<std::uint32_t[]> at, code, low;
    std::unique_ptr<std::byte[]> body;

    /// For the blocks of so many elements.
    delta_scratch& with(std::uint64_t elements) {
        const auto n = std::size_t(std::min<std::uint64_t>(elements, weight_block));
        if (body && n <= room_) return *this;
        room_ = n;
        for (auto* x : {&at, &code, &low}) *x = std::make_unique_for_overwrite<std::uint32_t[]>(n + slack);
        body = std::make_unique_for_overwrite<std::byte[]>(16 * n + 8 * slack);
        return *this;
    }

private:
    std::size_t room_ = 0;
};

// --- writing ---------------------------------------------------------------------------------------------------------

/// The low `bits` bits of each number, one behind the other, the lowest first; bits <= 32.
inline std::byte* put_low(const std::uint32_t* x, std::size_t n, unsigned bits, std::byte* p) {
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    std::size_t i = 0;
    if (bits <= 8) // eight of them are `bits` bytes
        for (; i + 8 <= n; i += 8, p += bits) {
            std::uint64_t w = 0;
            for (std::size_t c = 0; c < 8; ++c) w |= (x[i + c] & mask) << bits * c;
            std::memcpy(p, &w, 8);
        }
    std::uint64_t open = 0;
    unsigned filled = 0;
    for (; i < n; ++i) {
        open |= (x[i] & mask) << filled;
        filled += bits;
        std::memcpy(p, &open, 8);
        p += filled >> 3;
        open >>= filled & ~7u;
        filled &= 7;
    }
    std::memcpy(p, &open, 8);
    return p + (filled > 0);
}
/// So many zeros, a one.
struct unary_bits {
    std::byte* p;
    std::uint64_t open = 0, filled = 0; // 7 bits at most

    void add(std::uint64_t zeros) {
        for (; zeros > 55; zeros -= 56) append(0, 56);
        append(std::uint64_t{1} << zeros, zeros + 1);
    }
    /// Four numbers: no step waits for one before it but the last.
    void add(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
        const std::uint64_t second = a + b + 1, third = second + c + 1, fourth = third + d + 1;
        if (fourth > 55) return add(a), add(b), add(c), add(d);
        append(std::uint64_t{1} << a | std::uint64_t{1} << second | std::uint64_t{1} << third |
                   std::uint64_t{1} << fourth,
               fourth + 1);
    }
    std::byte* end() const { return p + (filled > 0); }

private:
    void append(std::uint64_t bits, std::uint64_t n) { // n <= 56
        open |= bits << filled, filled += n;
        std::memcpy(p, &open, 8);
        p += filled >> 3, open >>= filled & ~std::uint64_t{7}, filled &= 7;
    }
};
/// Lines of two runs that are read soon: asked for while something is computed, as memory has nothing else to do.
struct soon_lines {
    const std::byte *a, *b;
    std::size_t left; ///< of each
    void ask() {
        if (left == 0) return;
        __builtin_prefetch(a, 0, 2), __builtin_prefetch(b, 0, 2);
        a += 64, b += 64, --left;
    }
};
/// The numbers f(i) in unary; returns their end.
template <class F>
std::byte* put_unary(std::size_t n, std::byte* p, soon_lines& soon, F&& f) {
    unary_bits out{p};
    std::size_t i = 0;
    for (; i + 4 <= n; i += 4) soon.ask(), out.add(f(i), f(i + 1), f(i + 2), f(i + 3));
    for (; i < n; ++i) out.add(f(i));
    return out.end();
}
inline std::byte* put_small(std::byte* p, std::uint64_t n) {
    for (; n >= 128; n >>= 7) *p++ = std::byte(n & 127u) | std::byte{128};
    *p++ = std::byte(n);
    return p;
}

/// Bit i: whether element i of 64 differs.
template <std::size_t Size>
std::uint64_t changes_of_64(const std::byte* a, const std::byte* b) {
#if defined(__AVX512BW__)
    typedef char bytes64 __attribute__((vector_size(64)));
    typedef short shorts32 __attribute__((vector_size(64)));
    typedef int ints16 __attribute__((vector_size(64)));
    std::uint64_t m = 0;
    for (std::size_t i = 0; i < Size; ++i) {
        bytes64 x, y;
        std::memcpy(&x, a + 64 * i, 64), std::memcpy(&y, b + 64 * i, 64);
        std::uint64_t part; // 4: not equal
        if constexpr (Size == 1)
            part = std::uint64_t(__builtin_ia32_cmpb512_mask(x, y, 4, ~0ull));
        else if constexpr (Size == 2)
            part = std::uint32_t(__builtin_ia32_cmpw512_mask((shorts32)x, (shorts32)y, 4, ~0u));
        else
            part = std::uint16_t(__builtin_ia32_cmpd512_mask((ints16)x, (ints16)y, 4, std::uint16_t(~0u)));
        m |= part << 64 / Size * i;
    }
    return m;
#elif defined(__SSE2__)
    typedef char bytes16 __attribute__((vector_size(16)));
    typedef short shorts8 __attribute__((vector_size(16)));
    typedef int ints4 __attribute__((vector_size(16)));
    std::uint64_t same = 0;
    for (std::size_t i = 0; i < 4; ++i) { // 16 elements each
        bytes16 x[Size], y[Size], all;
        std::memcpy(x, a + 16 * Size * i, sizeof x), std::memcpy(y, b + 16 * Size * i, sizeof y);
        if constexpr (Size == 1) {
            all = x[0] == y[0];
        } else if constexpr (Size == 2) {
            all = __builtin_ia32_packsswb128((shorts8)x[0] == (shorts8)y[0], (shorts8)x[1] == (shorts8)y[1]);
        } else {
            const auto low = __builtin_ia32_packssdw128((ints4)x[0] == (ints4)y[0], (ints4)x[1] == (ints4)y[1]);
            const auto high = __builtin_ia32_packssdw128((ints4)x[2] == (ints4)y[2], (ints4)x[3] == (ints4)y[3]);
            all = __builtin_ia32_packsswb128(low, high);
        }
        same |= std::uint64_t(std::uint16_t(__builtin_ia32_pmovmskb128(all))) << 16 * i;
    }
    return ~same;
#else
    using loose = typename words<Size>::loose;
    alignas(64) std::uint8_t differs[64];
    for (std::size_t j = 0; j < 64; ++j)
        differs[j] = reinterpret_cast<const loose*>(a)[j] != reinterpret_cast<const loose*>(b)[j] ? 1 : 0;
    std::uint64_t m = 0;
    for (std::size_t j = 0; j < 8; ++j) { // bit 8 j + c: byte c of word j
        std::uint64_t w;
        std::memcpy(&w, differs + 8 * j, 8);
        m |= (w * 0x0102040810204080u >> 56) << 8 * j;
    }
    return m;
#endif
}

/// Places at which two runs differ, ascending, counted from `first`; returns how many.
template <std::size_t Size>
std::size_t places_of_changes(const std::byte* a, const std::byte* b, std::size_t n, std::uint32_t first,
                              std::uint32_t* at) {
    std::uint32_t* out = at;
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        std::uint64_t left = changes_of_64<Size>(a + Size * i, b + Size * i);
        std::uint32_t* o = out;
        out += std::popcount(left);
        const auto here = first + std::uint32_t(i);
        do { // three at a time, as there mostly are no more; those beyond the last one are written over
            for (std::size_t j = 0; j < 3; ++j, left &= left - 1)
                o[j] = here + std::uint32_t(__builtin_ctzll(left | std::uint64_t{1} << 63));
            o += 3;
        } while (left != 0);
    }
    for (; i < n; ++i)
        if (std::memcmp(a + Size * i, b + Size * i, Size) != 0) *out++ = first + std::uint32_t(i);
    return std::size_t(out - at);
}

/// The parameter of the shortest Golomb-Rice code of `x`, judged by up to 128 of them. `given_up`: from most_unary
/// zeros on a number stands by itself, and none of all may be shorter.
inline unsigned best_rice(const std::uint32_t* x, std::size_t n, unsigned bits, bool given_up) {
    std::uint32_t some[128];
    const std::size_t stride = n / 128 + 1;
    std::size_t m = 0;
    for (std::size_t i = 0; i < n; i += stride) some[m++] = x[i];
    unsigned best = bits;
    std::uint64_t least = given_up ? std::uint64_t{m} * bits : ~std::uint64_t{0};
    for (unsigned k = 0; k < bits; ++k) {
        std::uint64_t cost = std::uint64_t{m} * (k + 1);
        std::uint32_t zeros = 0, over = 0;
        if (given_up) {
            for (std::size_t i = 0; i < m; ++i) {
                const std::uint32_t q = some[i] >> k;
                zeros += q < most_unary ? q : std::uint32_t{most_unary};
                over += q < most_unary ? 0 : 1;
            }
            cost += zeros + std::uint64_t{over} * bits;
        } else {
            for (std::size_t i = 0; i < m; ++i) cost += some[i] >> k;
        }
        if (cost < least) least = cost, best = k;
    }
    return best;
}

/// Share of a block that memory is asked for while the one before it is looked at; the rest while that one is coded.
/// Asked for at an even pace, for memory is the slower of the two.
inline constexpr std::size_t early = 5, early_of = 8;

/// The streams of form 1, from its number of changed elements on; returns their end. What look_at_block found: places,
/// both words.
template <std::size_t Size>
std::byte* put_changes(std::size_t n, delta_scratch& s, std::byte* out, soon_lines soon) {
    using U = typename words<Size>::type;
    constexpr unsigned bits = 8 * Size;
    std::uint32_t *const at = s.at.get(), *const code = s.code.get(), *const gap = s.low.get();
    for (std::size_t i = 0; i < n; ++i) code[i] = code_of(U(rank_of(U(gap[i])) - rank_of(U(code[i]))));
    gap[0] = at[0];
    for (std::size_t i = 1; i < n; ++i) gap[i] = at[i] - at[i - 1] - 1;
    const unsigned j = best_rice(gap, n, 16, false), k = best_rice(code, n, bits, true);
    out = put_small(out, n - 1);
    *out++ = std::byte(j), *out++ = std::byte(k);
    bool k_is_all = false;
    std::byte* const numbers = out; // three of them, of at most three bytes each; the streams are moved up to them
    std::byte* p = put_low(gap, n, j, out + 9);
    if (k == bits) {
        for (std::size_t i = 0; i < n; ++i) {
            const U x = U(code[i]);
            std::memcpy(p + i * Size, &x, Size);
        }
        p += n * Size;
        k_is_all = true;
    } else if (k > 0) {
        for (std::size_t i = 0; i < n; ++i) at[i] = code[i] >> k < most_unary ? code[i] : 0;
        p = put_low(at, n, k, p);
    }
    std::byte* const u = p;
    p = put_unary(n, u, soon, [=](std::size_t i) { return std::uint64_t{gap[i] >> j}; });
    const auto bytes_of_u = std::size_t(p - u);
    std::size_t bytes_of_s = 0, exceptions = 0;
    if (!k_is_all) {
        std::byte* const q = p;
        p = put_unary(n, q, soon, [=](std::size_t i) { return std::min<std::uint64_t>(code[i] >> k, most_unary); });
        bytes_of_s = std::size_t(p - q);
        std::size_t over = 0;
        for (std::size_t i = 0; i < n; ++i) over += code[i] >> k < most_unary ? 0 : 1;
        for (std::size_t i = 0; exceptions < over; ++i)
            if (code[i] >> k >= most_unary) {
                const U x = U(code[i]);
                std::memcpy(p, &x, Size);
                p += Size, ++exceptions;
            }
    }
    std::byte* const after = put_small(put_small(put_small(numbers, bytes_of_u), bytes_of_s), exceptions);
    std::memmove(after, out + 9, std::size_t(p - (out + 9)));
    return after + (p - (out + 9));
}

/// The checksum of a part, from those of its blocks.
class part_sum {
public:
    part_sum(weight_type type, std::uint64_t elements) : of_{std::uint64_t(type), elements} {
        of_.reserve(2 + std::size_t(elements / weight_block) + 1);
    }
    void add(std::uint64_t block) { of_.push_back(block); }
    std::uint64_t get() const { return weight_sum(std::as_bytes(std::span(of_))); }
    std::span<const std::uint64_t> blocks() const { return std::span(of_).subspan(2); }

private:
    std::vector<std::uint64_t> of_;
};
/// That of a version, from those of its parts.
class version_sum {
public:
    void add(std::string_view name, std::uint64_t part) {
        of_.push_back(weight_sum(std::as_bytes(std::span(name.data(), name.size()))));
        of_.push_back(part);
    }
    std::size_t parts() const { return of_.size() / 2; }
    std::uint64_t get() const { return weight_sum(std::as_bytes(std::span(of_))); }

private:
    std::vector<std::uint64_t> of_;
};

/// Calls f with the size of an element as a constant.
template <class F>
decltype(auto) with_size(weight_type t, F&& f) {
    switch (size_of(t)) {
    case 1:
        return f(std::integral_constant<std::size_t, 1>{});
    case 2:
        return f(std::integral_constant<std::size_t, 2>{});
    default:
        return f(std::integral_constant<std::size_t, 4>{});
    }
}

/// Asks for memory that is read soon, while something else is computed.
inline void soon_bytes(const std::byte* p, std::size_t bytes) {
    for (std::size_t l = 0; l < bytes; l += 64) __builtin_prefetch(p + l, 0, 2);
}

/// The checksums of two runs (that of the base where it is not known), where they differ and the words there: to s.at,
/// s.code and s.low. Chunk by chunk, which the first cache holds.
template <std::size_t Size>
std::size_t look_at_block(const std::byte* base, const std::byte* next, std::size_t n, delta_scratch& s, bool known,
                          std::uint64_t& base_sum, std::uint64_t& next_sum) {
    using loose = typename words<Size>::loose;
    const std::size_t bytes = n * Size;
    sum_state of_base, of_next;
    std::size_t found = 0;
    for (std::size_t at = 0; at < bytes; at += sum_chunk) {
        const std::size_t here = std::min(sum_chunk, bytes - at), soon = bytes + at / early_of * early;
        soon_bytes(base + soon, sum_chunk / early_of * early);
        if (!known) of_base.add(base + at, here);
        soon_bytes(next + soon, sum_chunk / early_of * early);
        of_next.add(next + at, here);
        const std::size_t before = found;
        found +=
            places_of_changes<Size>(base + at, next + at, here / Size, std::uint32_t(at / Size), s.at.get() + found);
        for (std::size_t i = before; i < found; ++i) {
            s.code[i] = reinterpret_cast<const loose*>(base)[s.at[i]];
            s.low[i] = reinterpret_cast<const loose*>(next)[s.at[i]];
        }
    }
    if (!known) base_sum = of_base.end(bytes);
    next_sum = of_next.end(bytes);
    return found;
}

template <std::size_t Size>
void put_delta(std::vector<std::byte>& out, const weight_part& base, const weight_part& next, delta_scratch& s,
               part_sum& base_sum, part_sum& next_sum, std::span<const std::uint64_t> known) {
    using U = typename words<Size>::type;
    using loose = typename words<Size>::loose;
    const std::size_t elements = next.bytes.size() / Size;
    std::uint64_t unchanged = 0;
    for (std::size_t first = 0; first < elements; first += weight_block) {
        const std::size_t n = std::min(weight_block, elements - first);
        const std::byte *a = base.bytes.data() + first * Size, *b = next.bytes.data() + first * Size;
        std::uint64_t a_sum = known.empty() ? 0 : known[first / weight_block], b_sum = 0;
        const std::size_t changed = look_at_block<Size>(a, b, n, s, !known.empty(), a_sum, b_sum);
        base_sum.add(a_sum), next_sum.add(b_sum);
        if (changed == 0) {
            ++unchanged;
            continue;
        }
        std::byte* const body = s.body.get();
        std::byte* p = put_small(body, unchanged);
        const auto low = std::uint32_t(a_sum);
        std::memcpy(p, &low, 4);
        p += 4;
        std::byte* const form = p++;
        *form = std::byte{1};
        const std::size_t bytes = n * Size, rest = bytes + bytes / early_of * early; // what is asked for now
        const soon_lines soon{a + rest, b + rest, (2 * bytes - rest) / 64};
        std::byte* end = put_changes<Size>(changed, s, p, soon);
        if (std::size_t(end - p) >= n * Size) {
            *form = std::byte{0};
            for (std::size_t i = 0; i < n; ++i) {
                const U step = U(rank_of(U(reinterpret_cast<const loose*>(b)[i])) -
                                 rank_of(U(reinterpret_cast<const loose*>(a)[i])));
                std::memcpy(p + i * Size, &step, Size);
            }
            end = p + n * Size;
        }
        out.insert(out.end(), body, end);
        unchanged = 0;
    }
}

inline std::uint64_t sum_of_part(const weight_part& p) {
    const std::size_t block = weight_block * size_of(p.type);
    part_sum sum(p.type, p.bytes.size() / size_of(p.type));
    for (std::size_t at = 0; at < p.bytes.size(); at += block)
        sum.add(weight_sum(p.bytes.subspan(at, std::min(block, p.bytes.size() - at))));
    return sum.get();
}

inline std::string quoted(std::string_view name) { return "part '" + std::string(name.substr(0, 80)) + "'"; }
inline void check_part(const weight_part& p) {
    if (p.type < weight_type::bytes || p.type > weight_type::f32) throw invalid_input(quoted(p.name), "has no type");
    if (p.bytes.size() % size_of(p.type) != 0)
        throw invalid_input(quoted(p.name), std::to_string(p.bytes.size()) + " bytes are no whole number of elements");
    if (p.name.size() > 65535) throw invalid_input(quoted(p.name), "has a name of more than 65535 bytes");
}

inline constexpr char delta_magic[8] = {'O', 'P', 'D', 'W', 'D', 'E', 'L', 'T'};
inline constexpr std::uint32_t delta_format = 1;
inline constexpr std::uint32_t end_mark = 0xFFFFFFFFu;
inline constexpr std::size_t begin_bytes = 48, head_bytes = 40, end_bytes = 24;

inline void seal(std::vector<std::byte>& out) { put(out, weight_sum(out)); }

} // namespace detail

/// The version that parts are, in this order: reads all of them.
inline weight_version version_of(std::span<const weight_part> parts, std::int64_t number) {
    detail::version_sum sum;
    for (const weight_part& p : parts) detail::check_part(p), sum.add(p.name, detail::sum_of_part(p));
    return {number, sum.get()};
}

/// Writes a delta as messages: begin(), add() of each part, end(). What they return holds until the next call.
class weight_delta_writer {
public:
    /// From a version that receivers hold to number `next`; base.number < 0: from nothing, for who holds nothing.
    weight_delta_writer(const weight_version& base, std::int64_t next) : base_(base), next_(next) {
        if (next < 0) throw invalid_input("next", "must not be negative, not " + std::to_string(next));
        if (base.number < 0) base_ = {};
    }

    std::span<const std::byte> begin() {
        out_.clear();
        out_.insert(out_.end(), reinterpret_cast<const std::byte*>(detail::delta_magic),
                    reinterpret_cast<const std::byte*>(detail::delta_magic) + 8);
        detail::put(out_, detail::delta_format), detail::put(out_, std::uint32_t{0});
        detail::put(out_, base_.number), detail::put(out_, base_.sum), detail::put(out_, next_);
        detail::seal(out_);
        return out_;
    }
    /// A part of the base and what becomes of it: the same name, type and size.
    std::span<const std::byte> add(const weight_part& base, const weight_part& next) {
        detail::check_part(base), detail::check_part(next);
        if (base_.number < 0) throw invalid_input(detail::quoted(next.name), "has a base, and the version has none");
        if (base.name != next.name || base.type != next.type || base.bytes.size() != next.bytes.size())
            throw invalid_input(detail::quoted(next.name), "is of another name, type or size than in the base");
        const std::size_t elements = next.bytes.size() / size_of(next.type);
        detail::part_sum base_sum(next.type, elements), next_sum(next.type, elements);
        head(next, 0);
        const std::size_t i = next_sums_.parts(), blocks = (elements + weight_block - 1) / weight_block;
        std::span<const std::uint64_t> known;
        if (i < blocks_.size() && blocks_[i].size() == blocks) known = blocks_[i];
        detail::with_size(next.type, [&](auto size) {
            detail::put_delta<size()>(out_, base, next, scratch_.with(elements), base_sum, next_sum, known);
        });
        made_.emplace_back(next_sum.blocks().begin(), next_sum.blocks().end());
        return part(next, base_sum.get(), next_sum.get());
    }
    /// A part of a version that goes from nothing.
    std::span<const std::byte> add(const weight_part& next) {
        detail::check_part(next);
        if (base_.number >= 0) throw invalid_input(detail::quoted(next.name), "has no base, and the version has one");
        head(next, 1);
        out_.insert(out_.end(), next.bytes.begin(), next.bytes.end());
        made_.emplace_back(); // to be computed
        return part(next, 0, detail::sum_of_part(next));
    }
    /// Throws invalid_input if the parts' base is not what the constructor was told.
    std::span<const std::byte> end() {
        if (base_.number >= 0 && base_sums_.get() != base_.sum)
            throw invalid_input("base", "the parts given are not version " + std::to_string(base_.number) +
                                            ": they have another checksum");
        out_.clear();
        detail::put(out_, detail::end_mark), detail::put(out_, std::uint32_t(next_sums_.parts()));
        detail::put(out_, next_sums_.get());
        detail::seal(out_);
        return out_;
    }
    /// After end(): goes on from what was made to number `next`, as a new writer from made() would, but that the base's
    /// checksums are not computed again. A base that was altered since makes a delta that receivers refuse.
    void go_on(std::int64_t next) {
        weight_delta_writer w(made(), next);
        base_ = w.base_, next_ = next;
        blocks_ = std::move(made_), made_.clear();
        base_sums_ = {}, next_sums_ = {};
    }
    /// After end(): what receivers hold then.
    weight_version made() const { return {next_, next_sums_.get()}; }

private:
    void head(const weight_part& p, std::uint8_t kind) {
        out_.clear();
        detail::put(out_, std::uint32_t(p.name.size()));
        detail::put(out_, std::uint8_t(p.type)), detail::put(out_, kind), detail::put(out_, std::uint16_t{0});
        detail::put(out_, std::uint64_t(p.bytes.size() / size_of(p.type)));
        for (int i = 0; i < 3; ++i) detail::put(out_, std::uint64_t{0}); // known afterwards
        const auto* name = reinterpret_cast<const std::byte*>(p.name.data());
        out_.insert(out_.end(), name, name + p.name.size());
    }
    std::span<const std::byte> part(const weight_part& p, std::uint64_t base, std::uint64_t next) {
        const std::uint64_t known[] = {base, next, out_.size() - detail::head_bytes - p.name.size()};
        std::memcpy(out_.data() + 16, known, sizeof known);
        detail::seal(out_);
        base_sums_.add(p.name, base), next_sums_.add(p.name, next);
        return out_;
    }

    weight_version base_;
    std::int64_t next_;
    detail::version_sum base_sums_, next_sums_;
    std::vector<std::vector<std::uint64_t>> blocks_, made_; // checksums of blocks: of the base, if known, and of next
    std::vector<std::byte> out_;
    detail::delta_scratch scratch_;
};

/// From `was` to `is`, the same parts in the same order, as one piece: the messages one after the other. `base`: what
/// `was` is (made by the writer before, or version_of). Throws invalid_input if it is not.
inline std::vector<std::byte> weight_delta(const weight_version& base, std::span<const weight_part> was,
                                           std::span<const weight_part> is, std::int64_t next) {
    if (was.size() != is.size())
        throw invalid_input("is", "has " + std::to_string(is.size()) + " parts, and the base has " +
                                      std::to_string(was.size()));
    weight_delta_writer w(base, next);
    std::vector<std::byte> all;
    const auto add = [&all](std::span<const std::byte> m) { all.insert(all.end(), m.begin(), m.end()); };
    add(w.begin());
    for (std::size_t i = 0; i < is.size(); ++i) add(w.add(was[i], is[i]));
    add(w.end());
    return all;
}
/// All of it, for who holds nothing, or missed a base.
inline std::vector<std::byte> whole_weights(std::span<const weight_part> is, std::int64_t number) {
    weight_delta_writer w({}, number);
    std::vector<std::byte> all;
    const auto add = [&all](std::span<const std::byte> m) { all.insert(all.end(), m.begin(), m.end()); };
    add(w.begin());
    for (const weight_part& p : is) add(w.add(p));
    add(w.end());
    return all;
}

// --- reading ---------------------------------------------------------------------------------------------------------

/// What a part's message says of itself.
struct weight_delta_part {
    std::string_view name;
    weight_type type = weight_type::f32;
    bool whole = false;
    std::uint64_t elements = 0, base_sum = 0, next_sum = 0;
    std::span<const std::byte> body = {};
    std::size_t message = 0; ///< bytes of it
};

namespace detail {

[[noreturn]] OPD_COLD inline void refuse_delta(std::string_view in, const char* why) {
    throw invalid_input(in.empty() ? std::string("delta") : "delta, " + quoted(in), why);
}
template <class T>
T take(std::span<const std::byte> m, std::size_t at) {
    T x;
    std::memcpy(&x, m.data() + at, sizeof x);
    return x;
}
inline void need_seal(std::span<const std::byte> m, std::string_view in) {
    if (take<std::uint64_t>(m, m.size() - 8) != weight_sum(m.first(m.size() - 8)))
        refuse_delta(in, "was damaged: its bytes have another checksum");
}

/// A body, block by block.
class delta_body {
public:
    delta_body(std::span<const std::byte> bytes, std::string_view name) : rest_(bytes), name_(name) {}
    bool done() const { return rest_.empty(); }
    std::uint64_t small(std::uint64_t most) {
        std::uint64_t n = 0;
        for (unsigned shift = 0; shift < 63; shift += 7) {
            const auto b = std::to_integer<std::uint64_t>(bytes(1)[0]);
            n |= (b & 127u) << shift;
            if (b < 128) {
                if (n > most) refuse_delta(name_, "has a number that is too large");
                return n;
            }
        }
        refuse_delta(name_, "has a number that is too long");
    }
    std::span<const std::byte> bytes(std::size_t n) {
        if (n > rest_.size()) refuse_delta(name_, "ends within a block");
        const auto r = rest_.first(n);
        rest_ = rest_.subspan(n);
        return r;
    }
    std::string_view name() const { return name_; }

private:
    std::span<const std::byte> rest_;
    std::string_view name_;
};

/// Calls f(i, zeros before the i-th one, all zeros so far) of a unary stream of exactly n ones, padded by 8 bytes.
template <class F>
bool each_unary(const std::byte* p, std::size_t bytes, std::size_t n, F&& f) {
    std::size_t i = 0;
    std::uint64_t before = 0;
    for (std::size_t at = 0; at < bytes; at += 8) {
        std::uint64_t w = load64(p + at);
        if (bytes - at < 8) w &= (std::uint64_t{1} << 8 * (bytes - at)) - 1;
        if (std::size_t(std::popcount(w)) > n - i) return false;
        for (; w != 0; w &= w - 1, ++i) {
            const std::uint64_t place = 8 * at + std::uint64_t(__builtin_ctzll(w));
            f(i, place - before, place - i);
            before = place + 1;
        }
    }
    return i == n;
}
inline std::uint64_t bits_at(const std::byte* p, std::uint64_t bit, std::uint64_t mask) {
    return load64(p + (bit >> 3)) >> (bit & 7) & mask;
}

/// Form 1, to places and codes; returns how many. `soon`, half a block, is read next: memory has nothing else to do.
template <std::size_t Size>
std::size_t take_changes(delta_body& in, std::size_t block, delta_scratch& s, const std::byte* soon) {
    using U = typename words<Size>::type;
    constexpr unsigned bits = 8 * Size;
    const std::size_t n = std::size_t(in.small(block - 1)) + 1;
    const auto jk = in.bytes(2);
    const auto j = std::to_integer<unsigned>(jk[0]), k = std::to_integer<unsigned>(jk[1]);
    if (j > 16 || k > bits) refuse_delta(in.name(), "has codes of more bits than an element");
    const auto bytes_of_u = std::size_t(in.small(block / 4 + 8)); // as many bits as elements, twice
    const auto bytes_of_s = std::size_t(in.small(9 * n / 8 + 8));
    const auto exceptions = std::size_t(in.small(n));
    const std::size_t bytes_of_l = (n * j + 7) / 8, bytes_of_m = (n * k + 7) / 8;
    const std::size_t all = bytes_of_u + bytes_of_l + bytes_of_s + bytes_of_m + exceptions * Size;
    std::byte* const l = s.body.get(); // behind it there is room to read on
    const auto streams = in.bytes(all);
    std::memcpy(l, streams.data(), all);
    const std::byte *const m = l + bytes_of_l, *const u = m + bytes_of_m, *const q = u + bytes_of_u;
    const std::byte* const x = q + bytes_of_s;
    std::uint32_t *at = s.at.get(), *code = s.code.get();

    constexpr std::size_t lines = weight_block * Size / 64 / 2; // of half a block
    std::uint64_t lows = 0, last = 0;
    const std::uint64_t mask_j = (std::uint64_t{1} << j) - 1, mask_k = (std::uint64_t{1} << k) - 1;
    if (!each_unary(u, bytes_of_u, n, [&](std::size_t i, std::uint64_t, std::uint64_t zeros) {
            if (i < lines / 2) __builtin_prefetch(soon + 128 * i, 0, 2);
            lows += bits_at(l, i * j, mask_j);
            last = (zeros << j) + lows + i;
            at[i] = std::uint32_t(last);
        }))
        refuse_delta(in.name(), "has another number of gaps than of changes");
    if (last >= block) refuse_delta(in.name(), "changes an element beyond its block"); // places ascend
    std::size_t seen = 0;
    if (k == bits) {
        if (bytes_of_s != 0) refuse_delta(in.name(), "has codes twice");
        for (std::size_t i = 0; i < n; ++i) {
            if (i < lines / 2) __builtin_prefetch(soon + 128 * i + 64, 0, 2);
            U one;
            std::memcpy(&one, m + i * Size, Size);
            code[i] = one;
        }
    } else {
        bool fits = true;
        if (!each_unary(q, bytes_of_s, n, [&](std::size_t i, std::uint64_t zeros, std::uint64_t) {
                if (i < lines / 2) __builtin_prefetch(soon + 128 * i + 64, 0, 2);
                code[i] = std::uint32_t(zeros << k | bits_at(m, i * k, mask_k));
                if (zeros >= most_unary) {
                    fits = fits && zeros == most_unary && seen < exceptions;
                    U one = 0;
                    if (fits) std::memcpy(&one, x + Size * seen++, Size);
                    code[i] = one;
                }
            }))
            refuse_delta(in.name(), "has another number of codes than of changes");
        if (!fits) refuse_delta(in.name(), "has a code that is too long");
    }
    if (seen != exceptions) refuse_delta(in.name(), "has exceptions that no code names");
    return n;
}

/// Stores past the caches what is not read again soon: 1,024 bytes at once, or any number without.
class past_caches {
public:
    static constexpr std::size_t from = std::size_t{4} << 20; ///< bytes of a part; less may be wanted in the cache

    past_caches(const std::byte* to, std::size_t bytes) {
        const auto place = reinterpret_cast<std::uintptr_t>(to);
        if (bytes >= from) width_ = place % sizeof(sum_vector) == 0 ? sizeof(sum_vector) : place % 16 == 0 ? 16 : 0;
    }
    past_caches(const past_caches&) = delete;
    ~past_caches() {
#if defined(__SSE2__)
        if (width_ != 0) __builtin_ia32_sfence(); // before whoever is told of it
#endif
    }
    void store(std::byte* to, const std::byte* p, std::size_t bytes) const {
#if defined(__SSE2__)
        if (width_ != 0 && bytes == sum_chunk) {
#if defined(__clang__)
            if (width_ == sizeof(sum_vector)) return chunk<sum_vector>(to, p);
#endif
            return chunk<pair>(to, p);
        }
#endif
        std::memcpy(to, p, bytes);
    }

private:
    typedef long long pair __attribute__((vector_size(16)));
    template <class V>
    static void chunk(std::byte* to, const std::byte* p) {
        typedef V stored __attribute__((may_alias));
        for (std::size_t at = 0; at < sum_chunk; at += sizeof(V)) {
            V x;
            std::memcpy(&x, p + at, sizeof x);
#if defined(__clang__)
            __builtin_nontemporal_store(x, reinterpret_cast<stored*>(to + at));
#elif defined(__SSE2__)
            __builtin_ia32_movntdq(reinterpret_cast<stored*>(to + at), x);
#endif
        }
    }
    std::size_t width_ = 0; ///< bytes of a store; 0: as any others
};

/// A block that is done and the one behind it, chunk by chunk: the checksum of either (of the former if `sums`, for
/// where it is unchanged it is known), and where a copy is made, what is done goes out and the next comes in its place.
struct two_blocks {
    std::byte* done;
    std::size_t done_bytes;
    bool sums;
    const std::byte* next;
    std::size_t next_bytes;
    std::byte* out; ///< null: in place, without copies

    struct checksums {
        std::uint64_t done, next;
    };
    checksums pass(const past_caches& store) const {
        sum_state of_done, of_next;
        for (std::size_t at = 0; at < done_bytes || at < next_bytes; at += sum_chunk) {
            if (at < done_bytes) {
                const std::size_t n = std::min(sum_chunk, done_bytes - at);
                if (sums) of_done.add(done + at, n);
                if (out != nullptr) store.store(out + at, done + at, n);
            }
            if (at < next_bytes) {
                const std::size_t n = std::min(sum_chunk, next_bytes - at);
                soon_bytes(next + next_bytes + at / 2, sum_chunk / 2); // the first half of the block behind that
                of_next.add(next + at, n);
                if (out != nullptr) std::memcpy(done + at, next + at, n);
            }
        }
        return {of_done.end(done_bytes), of_next.end(next_bytes)};
    }
};

/// Adds the steps to `to` (Forward), or takes those of the first `done` blocks away again. Forward it compares the base
/// block by block, before it writes there, and says in `done` how many blocks it has written. Elsewhere than in place a
/// block is made in memory of its own, and stored when its checksum is taken.
template <std::size_t Size, bool Forward>
void add_steps(const weight_delta_part& part, const std::byte* from, std::byte* to, delta_scratch& s, std::size_t& done,
               part_sum* base_sum, part_sum* next_sum) {
    using U = typename words<Size>::type;
    using loose = typename words<Size>::loose;
    const std::size_t elements = std::size_t(part.elements);
    const std::size_t blocks = (elements + weight_block - 1) / weight_block;
    const std::size_t most = Forward ? blocks : done;
    const bool copies = from != to;
    std::unique_ptr<std::byte[]> apart;
    if (copies) apart = std::make_unique_for_overwrite<std::byte[]>(std::min(weight_block, elements) * Size);
    const past_caches store(to, copies ? elements * Size : 0);
    const auto bytes_of = [&](std::size_t b) {
        return b < blocks ? std::min(weight_block, elements - b * weight_block) * Size : 0;
    };
    delta_body in(part.body, part.name);
    std::size_t changed = 0; // the next block that is
    std::uint32_t expected = 0;
    const auto next_changed = [&](std::size_t from_block) {
        if (in.done()) {
            changed = blocks;
            return;
        }
        changed = from_block + std::size_t(in.small(blocks));
        if (changed >= blocks) refuse_delta(part.name, "has a block beyond its end");
        expected = take<std::uint32_t>(in.bytes(4), 0);
    };
    next_changed(0);
    std::uint64_t sum = 0; // of the block in the base
    if constexpr (Forward)
        sum = two_blocks{apart.get(), 0, false, from, bytes_of(0), copies ? to : nullptr}.pass(store).next;
    for (std::size_t b = 0; b < most; ++b) {
        const std::size_t bytes = bytes_of(b), n = bytes / Size;
        std::byte* const out = to + b * weight_block * Size;
        std::byte* const made = copies ? apart.get() : out;
        const std::byte* const behind = from + b * weight_block * Size + bytes;
        if constexpr (Forward) {
            base_sum->add(sum);
            if (b == changed && std::uint32_t(sum) != expected)
                refuse_delta(part.name, "goes from other weights than are held: a block has another checksum");
        }
        if (b == changed) {
            auto* const words_of = reinterpret_cast<loose*>(made);
            const auto go = [](U rank, U step) { return Forward ? U(rank + step) : U(rank - step); };
            const std::byte form = in.bytes(1)[0];
            if (form == std::byte{0}) {
                const auto steps = in.bytes(bytes);
                for (std::size_t i = 0; i < n; ++i) {
                    U step;
                    std::memcpy(&step, steps.data() + i * Size, Size);
                    words_of[i] = of_rank(go(rank_of(U(words_of[i])), step));
                }
            } else if (form == std::byte{1}) {
                const std::size_t changes = take_changes<Size>(in, n, s, behind + bytes / 2);
                const std::uint32_t *at = s.at.get(), *code = s.code.get();
                for (std::size_t i = 0; i < changes; ++i) {
                    const std::uint32_t e = at[i];
                    words_of[e] = of_rank(go(rank_of(U(words_of[e])), step_of(U(code[i]))));
                }
            } else {
                refuse_delta(part.name, "has a block of a form that this version does not know");
            }
        }
        if constexpr (Forward) {
            if (b == changed) done = b + 1;
            const auto sums =
                two_blocks{made, bytes, b == changed, behind, bytes_of(b + 1), copies ? out : nullptr}.pass(store);
            next_sum->add(b == changed ? sums.done : sum);
            sum = sums.next;
        }
        if (b == changed && (Forward || b + 1 < most)) next_changed(b + 1);
    }
}

} // namespace detail

/// Reads what a weight_delta_writer wrote, message after message. Every refusal is invalid_input, of a wrong base
/// missed_base.
class weight_delta_reader {
public:
    /// `held`: what the receiver has. Nothing of it is looked at but this.
    weight_delta_reader(const weight_version& held, std::span<const std::byte> begin) {
        using namespace detail;
        if (begin.size() < begin_bytes || std::memcmp(begin.data(), delta_magic, 8) != 0)
            refuse_delta({}, begin.size() < begin_bytes ? "is cut" : "is no delta of weights");
        if (take<std::uint32_t>(begin, 8) != delta_format)
            refuse_delta({}, "is of another version of the format than 1");
        need_seal(begin.first(begin_bytes), {});
        base_ = {take<std::int64_t>(begin, 16), take<std::uint64_t>(begin, 24)};
        next_ = take<std::int64_t>(begin, 32);
        if (take<std::uint32_t>(begin, 12) != 0 || next_ < 0 || base_.number < -1)
            refuse_delta({}, "begins with numbers that no writer writes");
        if (base_.number >= 0 && !(held == base_)) throw missed_base(held, base_);
    }
    const weight_version& base() const { return base_; }
    std::int64_t number() const { return next_; }

    /// The end's message begins here.
    static bool at_end(std::span<const std::byte> m) {
        return m.size() >= 4 && detail::take<std::uint32_t>(m, 0) == detail::end_mark;
    }

    /// The part that `m` begins with, with its checksum compared.
    weight_delta_part look(std::span<const std::byte> m) const {
        using namespace detail;
        if (m.size() < head_bytes + 8) refuse_delta({}, "is cut in a part");
        const auto name = take<std::uint32_t>(m, 0);
        const auto body = take<std::uint64_t>(m, 32);
        const std::size_t room = m.size() - head_bytes - 8;
        if (name > 65535 || name > room || body > room - name) refuse_delta({}, "is cut in a part, or was damaged");
        weight_delta_part p;
        p.name = {reinterpret_cast<const char*>(m.data()) + head_bytes, name};
        p.message = head_bytes + name + std::size_t(body) + 8;
        need_seal(m.first(p.message), p.name);
        const auto type = take<std::uint8_t>(m, 4), kind = take<std::uint8_t>(m, 5);
        p.elements = take<std::uint64_t>(m, 8);
        p.base_sum = take<std::uint64_t>(m, 16), p.next_sum = take<std::uint64_t>(m, 24);
        p.body = m.subspan(head_bytes + name, std::size_t(body));
        p.type = weight_type{type}, p.whole = kind == 1;
        if (type < 1 || type > 4 || kind > 1 || take<std::uint16_t>(m, 6) != 0)
            refuse_delta(p.name, "is of a type or kind that this version does not know");
        if (p.whole != (base_.number < 0)) refuse_delta(p.name, "is whole in a delta, or a delta in what is whole");
        if (p.elements > ~std::uint64_t{0} / 8 || (p.whole && p.elements * size_of(p.type) != body))
            refuse_delta(p.name, "has another number of elements than it says");
        if (p.whole && sum_of_part({p.name, p.type, p.body}) != p.next_sum)
            refuse_delta(p.name, "makes other weights than its checksum says");
        return p;
    }

    /// Writes `to`, from `base` or, where that is the same memory, in place. On a refusal in place the part is what it
    /// was; another target holds anything then.
    void apply(const weight_delta_part& p, std::span<const std::byte> base, const weight_target& to) {
        check(p, to);
        if (p.whole) {
            if (!p.body.empty()) std::memcpy(to.bytes.data(), p.body.data(), p.body.size());
        } else {
            if (base.size() != to.bytes.size())
                throw invalid_input("base", "has another number of bytes than the target");
            const bool in_place = base.data() == to.bytes.data();
            if (!in_place && base.data() < to.bytes.data() + to.bytes.size() &&
                to.bytes.data() < base.data() + base.size())
                throw invalid_input("base", "overlaps the target without being it");
            detail::part_sum base_sum(p.type, p.elements), next_sum(p.type, p.elements);
            std::size_t done = 0;
            try {
                step(p, base.data(), to.bytes.data(), done, &base_sum, &next_sum);
                if (base_sum.get() != p.base_sum) detail::refuse_delta(p.name, "goes from other weights than are held");
                if (next_sum.get() != p.next_sum)
                    detail::refuse_delta(p.name, "makes other weights than its checksum says");
            } catch (...) {
                if (in_place) take_back(p, to, done);
                throw;
            }
        }
        base_sums_.add(p.name, p.base_sum), next_sums_.add(p.name, p.next_sum);
    }

    /// Undoes apply() in place.
    void take_back(const weight_delta_part& p, const weight_target& to) {
        take_back(p, to, std::size_t((p.elements + weight_block - 1) / weight_block));
    }

    /// Throws invalid_input that names the part where it is not what `to` is.
    static void check(const weight_delta_part& p, const weight_part& to) {
        detail::check_part(to);
        if (p.name != to.name)
            throw invalid_input(detail::quoted(to.name), "the delta has " + detail::quoted(p.name) + " here");
        if (p.type != to.type || p.elements != to.bytes.size() / size_of(to.type))
            throw invalid_input(detail::quoted(to.name), "is of another type or size in the delta");
    }

    /// What is held now.
    weight_version end(std::span<const std::byte> m) const {
        using namespace detail;
        if (m.size() != end_bytes) refuse_delta({}, "is cut, or has a tail");
        need_seal(m, {});
        if (take<std::uint32_t>(m, 4) != next_sums_.parts()) refuse_delta({}, "has another number of parts");
        if (base_.number >= 0 && base_sums_.get() != base_.sum) refuse_delta({}, "has parts of another base");
        if (take<std::uint64_t>(m, 8) != next_sums_.get()) refuse_delta({}, "has parts of another version");
        return {next_, next_sums_.get()};
    }

private:
    void step(const weight_delta_part& p, const std::byte* from, std::byte* to, std::size_t& done,
              detail::part_sum* base_sum, detail::part_sum* next_sum) {
        detail::with_size(p.type, [&](auto size) {
            detail::add_steps<size(), true>(p, from, to, scratch_.with(p.elements), done, base_sum, next_sum);
        });
    }
    void take_back(const weight_delta_part& p, const weight_target& to, std::size_t done) {
        if (p.whole || done == 0) return;
        detail::with_size(p.type, [&](auto size) {
            detail::add_steps<size(), false>(p, to.bytes.data(), to.bytes.data(), scratch_.with(p.elements), done,
                                             nullptr, nullptr);
        });
    }

    weight_version base_;
    std::int64_t next_ = 0;
    detail::version_sum base_sums_, next_sums_;
    detail::delta_scratch scratch_;
};

/// Applies all of a delta: `to[i]` from `base[i]`; where those are the same memory, in place. Returns what is held
/// then. Refused (invalid_input, missed_base): `to` is what it was where it was in place, else it holds anything.
inline weight_version apply_weight_delta(std::span<const std::byte> delta, const weight_version& held,
                                         std::span<const weight_part> base, std::span<const weight_target> to) {
    using namespace detail;
    weight_delta_reader in(held, delta);
    if (in.base().number >= 0 && base.size() != to.size())
        throw invalid_input("base", "has another number of parts than the target");
    std::vector<weight_delta_part> parts; // all of them are looked at before anything is written
    std::span<const std::byte> rest = delta.subspan(begin_bytes);
    version_sum base_sum, next_sum;
    while (!weight_delta_reader::at_end(rest)) {
        const weight_delta_part p = in.look(rest);
        if (parts.size() == to.size()) refuse_delta(p.name, "is one more part than there is a target for");
        weight_delta_reader::check(p, to[parts.size()]);
        if (!p.whole) weight_delta_reader::check(p, base[parts.size()]);
        base_sum.add(p.name, p.base_sum), next_sum.add(p.name, p.next_sum);
        parts.push_back(p);
        rest = rest.subspan(p.message);
    }
    if (parts.size() != to.size()) refuse_delta({}, "has fewer parts than there are targets");
    if (rest.size() != end_bytes) refuse_delta({}, "is cut, or has a tail");
    need_seal(rest, {});
    if (in.base().number >= 0 && base_sum.get() != in.base().sum) refuse_delta({}, "has parts of another base");
    if (take<std::uint32_t>(rest, 4) != parts.size() || take<std::uint64_t>(rest, 8) != next_sum.get())
        refuse_delta({}, "has parts of another version");
    std::size_t i = 0;
    try {
        for (; i < parts.size(); ++i)
            in.apply(parts[i], parts[i].whole ? std::span<const std::byte>() : base[i].bytes, to[i]);
    } catch (...) {
        while (i-- > 0)
            if (!parts[i].whole && base[i].bytes.data() == to[i].bytes.data()) in.take_back(parts[i], to[i]);
        throw;
    }
    return in.end(rest);
}
/// In place.
inline weight_version apply_weight_delta(std::span<const std::byte> delta, const weight_version& held,
                                         std::span<const weight_target> parts) {
    const std::vector<weight_part> base(parts.begin(), parts.end());
    return apply_weight_delta(delta, held, base, parts);
}

} // namespace opd::data
