// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How an answer of a server's is read: JSON members that say where they are missing, and what its numbers mean.
//
//   null                 not scored: NaN. Never guessed
//   at most -9000        no mass: -inf. vLLM writes -9999 for -inf, llama.cpp the least float
//   above 1e-3           no log-prob but a logit or an error: the answer is refused
//   anything else        a log-prob, as it stands
//
// Memory is bounded by the answer's own length, some 25 bytes a byte: limit that where it is read.
#pragma once

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::serve {

/// The servers whose answers are read (docs/serve.md has the endpoints and fields).
enum class dialect {
    vllm,       ///< /v1/completions with prompt_logprobs; candidates: /inference/v1/generate
    sglang,     ///< /generate with return_logprob
    llama_cpp,  ///< llama-server's /completion, the answer forced by a grammar of token ids
    openai_echo ///< /v1/completions with echo: log-probs of the tokens; no list unless its keys are token ids
};
inline const char* to_string(dialect d) {
    constexpr const char* names[] = {"vllm", "sglang", "llama_cpp", "openai_echo"};
    return names[static_cast<int>(d)];
}

/// An answer that cannot be what was asked for. `sequence` of the request, `position` in it; -1: the whole.
struct bad_answer : error {
    serve::dialect dialect;
    index_t sequence, position;
    bad_answer(serve::dialect d, index_t sequence_, index_t position_, std::string_view text)
        : error(std::string("opd: answer of ")
                    .append(to_string(d))
                    .append(sequence_ < 0 ? std::string() : ", sequence " + std::to_string(sequence_))
                    .append(position_ < 0 ? std::string() : ", position " + std::to_string(position_))
                    .append(": ")
                    .append(text)),
          dialect(d), sequence(sequence_), position(position_) {}
};

namespace detail {

using json = nlohmann::json;

inline constexpr float no_score = std::numeric_limits<float>::quiet_NaN();
inline constexpr float no_mass = -std::numeric_limits<float>::infinity();

/// Reads an answer and says, where it cannot, whose it is and where.
struct answer_reader {
    serve::dialect dialect;
    index_t sequence = -1, position = -1;

    [[noreturn]] OPD_COLD void fail(std::string_view text) const {
        throw bad_answer(dialect, sequence, position, text);
    }
    json parse(std::string_view body) const {
        try {
            return json::parse(body.begin(), body.end());
        } catch (const json::exception& e) { // NaN and Infinity, which Python writes, are no JSON
            fail(std::string("is not JSON: ").append(e.what()).substr(0, 300));
        }
    }
    /// What a server says in place of an answer.
    void check_error(const json& answer) const {
        if (!answer.is_object()) return;
        const auto e = answer.find("error");
        if (e == answer.end() || e->is_null()) return;
        fail("is an error: " + e->dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 300));
    }
    const json& member(const json& object, const char* name) const {
        if (!object.is_object()) fail(std::string("has no object around ").append(name));
        const auto at = object.find(name);
        if (at == object.end()) fail(std::string("has no ").append(name));
        if (at->is_null()) fail(std::string(name).append(" is null"));
        return *at;
    }
    const json& array(const json& object, const char* name) const {
        const json& a = member(object, name);
        if (!a.is_array()) fail(std::string(name).append(" is no array"));
        return a;
    }
    void check_size(const json& a, const char* name, std::size_t wanted) const {
        if (a.size() != wanted)
            fail(std::string(name)
                     .append(" has ")
                     .append(std::to_string(a.size()))
                     .append(" entries, expected ")
                     .append(std::to_string(wanted)));
    }
    /// A log-prob by the rules above.
    float log_prob(double x) const {
        if (!(x <= 1e-3)) fail("has a log-prob of " + std::to_string(x) + ": above 0, or no number");
        return x <= -9000 ? no_mass : static_cast<float>(x);
    }
    float log_prob(const json& x) const {
        if (x.is_null()) return no_score;
        if (!x.is_number()) fail("has a log-prob that is no number");
        return log_prob(x.get<double>());
    }
    std::int32_t id(const json& x) const {
        if (!x.is_number_integer()) fail("has an id that is no integer");
        const auto n = x.get<std::int64_t>();
        if (n < 0 || n > std::numeric_limits<std::int32_t>::max()) fail("has the id " + x.dump());
        return static_cast<std::int32_t>(n);
    }
    /// An id that is the name of a member, as it is written: no sign, no zero before it.
    std::int32_t id(std::string_view text) const {
        std::int32_t n = -1;
        const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), n);
        if (wrong != std::errc() || end != text.data() + text.size() || n < 0 || (text.size() > 1 && text[0] == '0'))
            fail(std::string("has a key that is no id: ").append(text.substr(0, 40)));
        return n;
    }
    /// [log-prob, id, …], as SGLang writes an entry.
    std::pair<float, std::int32_t> pair(const json& x) const {
        if (!x.is_array() || x.size() < 2) fail("has an entry that is no [log-prob, id]");
        return {log_prob(x[0]), id(x[1])};
    }
};

/// Base64 with padding, RFC 4648; false where the text is none.
inline bool from_base64(std::string_view text, std::vector<std::uint8_t>& bytes) {
    bytes.clear();
    if (text.size() % 4 != 0) return false;
    std::size_t padding = 0;
    while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
    bytes.reserve(text.size() / 4 * 3);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        std::uint32_t x = 0;
        if (c >= 'A' && c <= 'Z')
            x = static_cast<std::uint32_t>(c - 'A');
        else if (c >= 'a' && c <= 'z')
            x = static_cast<std::uint32_t>(c - 'a') + 26;
        else if (c >= '0' && c <= '9')
            x = static_cast<std::uint32_t>(c - '0') + 52;
        else if (c == '+' || c == '/')
            x = c == '+' ? 62 : 63;
        else if (c != '=' || i + padding < text.size())
            return false;
        bits = bits << 6 | x;
        if (i % 4 == 3)
            for (const int shift : {16, 8, 0}) bytes.push_back(static_cast<std::uint8_t>(bits >> shift));
    }
    bytes.resize(bytes.size() - padding);
    return true;
}

/// A matrix of float32 in numpy's .npy format, versions 1 to 3, in C order, as vLLM sends it in base64.
struct npy_matrix {
    index_t rows = 0, cols = 0;
    std::vector<std::uint8_t> bytes;
    std::size_t begin = 0; ///< of the numbers

    float at(index_t r, index_t c) const {
        const std::uint8_t* p = bytes.data() + begin + 4 * static_cast<std::size_t>(r * cols + c);
        return std::bit_cast<float>(std::uint32_t{p[0]} | std::uint32_t{p[1]} << 8 | std::uint32_t{p[2]} << 16 |
                                    std::uint32_t{p[3]} << 24);
    }
};
inline npy_matrix read_npy(const answer_reader& at, const json& text, const char* name) {
    const auto fail = [&](const char* why) { at.fail(std::string(name).append(why)); };
    npy_matrix m;
    if (!text.is_string() || !from_base64(text.get_ref<const std::string&>(), m.bytes)) fail(" is no base64");
    const std::string_view all(reinterpret_cast<const char*>(m.bytes.data()), m.bytes.size());
    if (all.size() < 12 || all.substr(0, 6) != "\x93NUMPY" || m.bytes[6] < 1 || m.bytes[6] > 3) fail(" is no .npy");
    const bool wide = m.bytes[6] > 1;
    std::size_t length = std::size_t{m.bytes[8]} | std::size_t{m.bytes[9]} << 8;
    if (wide) length |= std::size_t{m.bytes[10]} << 16 | std::size_t{m.bytes[11]} << 24;
    m.begin = (wide ? 12 : 10) + length;
    if (m.begin > all.size()) fail(": the .npy header is cut off");
    const std::string_view header = all.substr(wide ? 12 : 10, length);
    if (header.find("'<f4'") == std::string_view::npos) fail(": the .npy is not of little-endian float32");
    if (header.find("'fortran_order': False") == std::string_view::npos) fail(": the .npy is not in C order");
    const std::size_t shape = header.find("'shape': (");
    if (shape == std::string_view::npos) fail(": the .npy has no shape");
    const char *p = header.data() + shape + 10, *const end = header.data() + header.size();
    std::array<index_t, 2> sizes{};
    for (std::size_t i = 0; i < 2; ++i) {
        const auto [next, wrong] = std::from_chars(p, end, sizes[i]);
        if (wrong != std::errc() || sizes[i] < 0) fail(": the .npy is no matrix");
        p = next;
        while (p != end && (*p == ' ' || (i == 0 && *p == ','))) ++p;
    }
    if (p == end || *p != ')') fail(": the .npy is no matrix");
    m.rows = sizes[0], m.cols = sizes[1];
    const auto numbers = static_cast<index_t>((all.size() - m.begin) / 4);
    if ((all.size() - m.begin) % 4 != 0 || (m.cols == 0 ? numbers != 0 : m.rows > numbers / m.cols) ||
        m.rows * m.cols != numbers)
        fail(": the .npy has another length than its shape");
    return m;
}

} // namespace detail
} // namespace opd::serve
