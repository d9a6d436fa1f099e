// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The checksum of a data set's files, and the fingerprint that tells models apart.
//
//   crc32c(bytes)            CRC-32C: polynomial 0x1EDC6F41, reflected, begun with and xored by all ones (RFC 3720,
//                            B.4)
//   block_checksums          the same of each block of a stream, the last one shorter
//   fingerprint_of(bytes)    FNV-1a of 128 bits as 32 hexadecimal digits
//   running_fingerprint      the same of bytes in pieces
//
// A CRC of 32 bits finds every flip of one bit, and any damage within 32 bits; of other damage to a block it misses
// one case in 2^32. Neither function is a signature: whoever can write the files can make them fit.
//
// On x86-64 the processor's instruction is used where it has one, asked for at run time, so that a build for the base
// instruction set has it too. Its latency is three times its throughput, so a block goes in quarters, side by side:
//
//   crc(q0 q1 q2 q3) = crc(q0)·x³ⁿ + crc(q1)·x²ⁿ + crc(q2)·xⁿ + crc(q3)   mod the polynomial, n bits in a quarter
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace opd::data {

/// Bytes that one checksum covers.
inline constexpr std::size_t checksum_block = 65536;

namespace detail {

/// Tables of eight bytes at once: table[k][b] is what byte b adds, k bytes before the end.
using crc_tables = std::array<std::array<std::uint32_t, 256>, 8>;
constexpr crc_tables make_crc_tables() {
    crc_tables t{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t x = b;
        for (int i = 0; i < 8; ++i) x = (x >> 1) ^ ((x & 1) != 0 ? 0x82F63B78u : 0u); // the polynomial, reflected
        t[0][b] = x;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 255u];
    return t;
}
inline constexpr crc_tables crc_table = make_crc_tables();

/// The state after `size` more bytes; neither begun nor ended by the xor with all ones.
inline std::uint32_t crc_by_table(std::uint32_t state, const std::byte* p, std::size_t size) {
    for (; size >= 8; size -= 8, p += 8) {
        std::uint64_t word;
        std::memcpy(&word, p, 8);
        word ^= state;
        state = 0;
        for (std::size_t k = 0; k < 8; ++k) state ^= crc_table[7 - k][(word >> 8 * k) & 255u];
    }
    for (; size > 0; --size, ++p)
        state = (state >> 8) ^ crc_table[0][(state ^ std::to_integer<std::uint32_t>(*p)) & 255u];
    return state;
}

/// a·b modulo the polynomial, both reflected: the highest bit is x^0.
constexpr std::uint32_t crc_product(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (int i = 31; i >= 0; --i) {
        product ^= b & (0u - (a >> i & 1u));
        b = b >> 1 ^ (0x82F63B78u & (0u - (b & 1u)));
    }
    return product;
}
/// x^(8 bytes), which a state is multiplied by where so many zeros follow; `bytes`: a power of two.
constexpr std::uint32_t crc_of_zeros(std::size_t bytes) {
    std::uint32_t power = 0x00800000u; // x^8
    for (; bytes > 1; bytes /= 2) power = crc_product(power, power);
    return power;
}

#if defined(__x86_64__)
inline bool has_crc_instruction() {
    static const bool has = __builtin_cpu_supports("sse4.2") != 0;
    return has;
}
__attribute__((target("sse4.2"))) inline std::uint32_t crc_by_instruction(std::uint32_t state, const std::byte* p,
                                                                          std::size_t size) {
    constexpr std::size_t quarter = checksum_block / 4;
    constexpr std::uint32_t one = crc_of_zeros(quarter), two = crc_product(one, one), three = crc_product(two, one);
    std::uint64_t s = state, word;
    for (; size >= checksum_block; size -= checksum_block, p += checksum_block) {
        std::uint64_t q[4] = {s, 0, 0, 0};
        for (std::size_t i = 0; i < quarter; i += 8)
            for (std::size_t k = 0; k < 4; ++k) {
                std::memcpy(&word, p + k * quarter + i, 8);
                q[k] = __builtin_ia32_crc32di(q[k], word);
            }
        s = crc_product(static_cast<std::uint32_t>(q[0]), three) ^ crc_product(static_cast<std::uint32_t>(q[1]), two) ^
            crc_product(static_cast<std::uint32_t>(q[2]), one) ^ q[3];
    }
    for (; size >= 8; size -= 8, p += 8) {
        std::memcpy(&word, p, 8);
        s = __builtin_ia32_crc32di(s, word);
    }
    auto r = static_cast<std::uint32_t>(s);
    for (; size > 0; --size, ++p) r = __builtin_ia32_crc32qi(r, std::to_integer<std::uint8_t>(*p));
    return r;
}
#else
inline bool has_crc_instruction() { return false; }
inline std::uint32_t crc_by_instruction(std::uint32_t state, const std::byte* p, std::size_t size) {
    return crc_by_table(state, p, size);
}
#endif

inline std::uint32_t crc_more(std::uint32_t state, const std::byte* p, std::size_t size) {
    return has_crc_instruction() ? crc_by_instruction(state, p, size) : crc_by_table(state, p, size);
}

inline std::span<const std::byte> bytes_of(std::string_view s) { return std::as_bytes(std::span(s.data(), s.size())); }

/// `n` as digits of base 16, the highest first.
inline std::string hexadecimal(std::uint64_t n, int digits) {
    std::string s(static_cast<std::size_t>(digits), '0');
    for (std::size_t i = s.size(); i-- > 0; n >>= 4) s[i] = "0123456789abcdef"[n & 15u];
    return s;
}
/// The number that `hexadecimal` wrote; false where there is another character, or a capital one.
inline bool from_hexadecimal(std::string_view s, std::uint32_t& n) {
    n = 0;
    for (const char c : s) {
        const auto digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) return false;
        n = n << 4 | static_cast<std::uint32_t>(digit);
    }
    return s.size() == 8;
}

} // namespace detail

/// CRC-32C of bytes; `before`: that of what stands before them.
inline std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) {
    return ~detail::crc_more(~before, bytes.data(), bytes.size());
}
inline std::uint32_t crc32c(std::string_view text, std::uint32_t before = 0) {
    return crc32c(detail::bytes_of(text), before);
}

/// CRC-32C of each whole block of `bytes` and of the rest, to `out`: as many as there are blocks, the last one begun.
inline void crc32c_of_blocks(std::span<const std::byte> bytes, std::uint32_t* out, std::size_t block = checksum_block) {
    while (!bytes.empty()) {
        const std::size_t n = std::min(block, bytes.size());
        *out++ = crc32c(bytes.first(n));
        bytes = bytes.subspan(n);
    }
}

/// Of a stream that comes in pieces.
class block_checksums {
public:
    void add(std::span<const std::byte> bytes) {
        if (filled_ > 0) take(bytes);
        const std::size_t whole = bytes.size() / checksum_block;
        sums_.resize(sums_.size() + whole);
        crc32c_of_blocks(bytes.first(whole * checksum_block), sums_.data() + sums_.size() - whole);
        bytes = bytes.subspan(whole * checksum_block);
        take(bytes);
    }
    std::vector<std::uint32_t> finish() {
        if (filled_ > 0) sums_.push_back(open_);
        filled_ = 0;
        return std::move(sums_);
    }

private:
    void take(std::span<const std::byte>& bytes) {
        const auto part = bytes.first(std::min(bytes.size(), checksum_block - filled_));
        open_ = crc32c(part, filled_ > 0 ? open_ : 0);
        filled_ += part.size(), bytes = bytes.subspan(part.size());
        if (filled_ == checksum_block) sums_.push_back(open_), filled_ = 0;
    }
    std::vector<std::uint32_t> sums_;
    std::uint32_t open_ = 0; ///< of the block that is not full yet
    std::size_t filled_ = 0;
};

/// fingerprint_of() bytes that come in pieces.
class running_fingerprint {
public:
    void add(std::span<const std::byte> part) {
        const wide prime = (wide{1} << 88) | 0x13bu;
        wide h = state_;
        for (const std::byte b : part) h = (h ^ std::to_integer<unsigned>(b)) * prime;
        state_ = h;
    }
    std::string text() const {
        return detail::hexadecimal(static_cast<std::uint64_t>(state_ >> 64), 16) +
               detail::hexadecimal(static_cast<std::uint64_t>(state_), 16);
    }

private:
    __extension__ using wide = unsigned __int128;
    wide state_ = (wide{0x6c62272e07bb0142u} << 64) | 0x62b821756295c58du;
};

/// FNV-1a of 128 bits as 32 hexadecimal digits: of weights, a configuration, a tokenizer. Tells different ones apart
/// that nobody made to collide. `before`: the fingerprint of what stands before, so that many files make one.
inline std::string fingerprint_of(std::span<const std::byte> bytes, std::string_view before = {}) {
    running_fingerprint f;
    f.add(detail::bytes_of(before)), f.add(bytes);
    return f.text();
}
inline std::string fingerprint_of(std::string_view text, std::string_view before = {}) {
    return fingerprint_of(detail::bytes_of(text), before);
}

} // namespace opd::data
