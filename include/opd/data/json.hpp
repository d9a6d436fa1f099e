// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// JSON of files that anybody may have written: what is no JSON, too deep, or of another type than is asked for, is
// invalid_input that names the file and the key. Needs nlohmann-json 3.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "opd/config.hpp"
#include "opd/data/checksum.hpp"
#include "opd/data/files.hpp"

namespace opd::data::detail {

using json = nlohmann::json;

inline json parse_json(std::string_view text, const std::string& file) {
    constexpr int deepest = 8; // of what this library writes: 3
    try {
        return json::parse(text.begin(), text.end(), [&](int depth, json::parse_event_t, json&) {
            if (depth > deepest) refuse(file, "is JSON of more than 8 levels: not of this library");
            return true;
        });
    } catch (const json::exception& e) {
        std::string why = e.what();
        for (char& c : why) // the parser quotes what it read
            if (static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126) c = '?';
        refuse(file, "is no JSON: " + why.substr(0, 200));
    }
}

inline const json& member(const json& j, const char* key, const std::string& file) {
    if (!j.is_object()) refuse(file, std::string("has no object that '") + key + "' would stand in");
    const auto at = j.find(key);
    if (at == j.end()) refuse(file, std::string("has no '") + key + "'");
    return *at;
}
/// A count: an integer in [0, most].
inline index_t as_count(const json& j, const std::string& what, const std::string& file,
                        index_t most = index_t{1} << 53) {
    // the parser keeps what is not negative as unsigned
    if (!j.is_number_unsigned() || j.get<std::uint64_t>() > static_cast<std::uint64_t>(most))
        refuse(file, "has no count from 0 to " + std::to_string(most) + " as '" + what + "'");
    return static_cast<index_t>(j.get<std::uint64_t>());
}
inline index_t count_of(const json& j, const char* key, const std::string& file, index_t most = index_t{1} << 53) {
    return as_count(member(j, key, file), key, file, most);
}
inline std::string as_text(const json& j, const std::string& what, const std::string& file) {
    if (!j.is_string()) refuse(file, "has no text as '" + what + "'");
    return j.get<std::string>();
}
inline std::string text_of(const json& j, const char* key, const std::string& file) {
    return as_text(member(j, key, file), key, file);
}
inline std::uint32_t checksum_of(const json& j, const char* key, const std::string& file) {
    std::uint32_t sum = 0;
    if (!from_hexadecimal(text_of(j, key, file), sum)) refuse(file, std::string("has no checksum as '") + key + "'");
    return sum;
}

/// A JSON object on one line with its own checksum as its last member; `before` goes into it: the checksum of the line
/// before, so that no line can be taken out of a file or moved.
inline std::string sealed(const json& j, std::uint32_t before, std::uint32_t& sum) {
    std::string line = j.dump();
    line.pop_back(); // the brace
    sum = crc32c(line, before);
    return line + ",\"crc32c\":\"" + hexadecimal(sum, 8) + "\"}";
}
/// The same, read; no line feed. `sum`: in, of the line before; out, of this one.
inline json unsealed(std::string_view line, std::uint32_t& sum, const std::string& file) {
    constexpr std::string_view mark = ",\"crc32c\":\"", end = "\"}";
    const std::size_t tail = mark.size() + 8 + end.size();
    std::uint32_t said = 0;
    if (line.size() < tail || line.substr(line.size() - tail, mark.size()) != mark || !line.ends_with(end) ||
        !from_hexadecimal(line.substr(line.size() - 8 - end.size(), 8), said))
        refuse(file, "does not end with its checksum: it was cut or altered, or is not of this library");
    const std::uint32_t is = crc32c(line.substr(0, line.size() - tail), sum);
    if (is != said)
        refuse(file, "was altered, or what stands before it was: its checksum is " + hexadecimal(is, 8) + ", not " +
                         hexadecimal(said, 8));
    sum = is;
    return parse_json(line, file);
}

} // namespace opd::data::detail
