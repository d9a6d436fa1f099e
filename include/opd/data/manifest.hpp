// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a data set is: a folder of
//
//   set.json                   format and version, vocabulary, columns, facts, fingerprints, notes; one line with a
//                              checksum
//   constants.safetensors      what is the same for all rows, as a head or decoder; only where there is one
//   shard-000000.safetensors   the columns of some sequences, one after the other
//   index.jsonl                a line for each shard, written after it; at last one that says that the writer finished.
//                              Each with a checksum that takes in the line before, the first one set.json's
//
// set.json is written once, a shard once, the index grows. Who teaches is told by fingerprints, 128-bit hashes as
// fingerprint_of makes them, or any text: Lightning OPD's theorems need the teacher that the student was fine-tuned on
// to be the one that scores (arXiv 2604.13010), so a set of two is refused unless that is asked for by name.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/data/columns.hpp"
#include "opd/data/json.hpp"
#include "opd/data/safetensors.hpp"
#include "opd/error.hpp"

namespace opd::data {

/// What set.json says; a reader refuses higher ones.
inline constexpr int format_version = 1;

/// Who made the data: hashes, or other names, of weights and configuration; of a tokenizer. Empty: unknown.
struct fingerprints {
    std::string sft_teacher{};      ///< whose answers the student was fine-tuned on
    std::string scoring_teacher{};  ///< whose log-probs the set has
    std::string tokenizer{};        ///< whose ids
    std::string reference_policy{}; ///< pi_ref, which drew the rollouts
    friend bool operator==(const fingerprints&, const fingerprints&) = default;
};

/// Mismatches that are known and wanted.
struct allowed_mismatches {
    bool teachers = false; ///< the SFT teacher is not the scoring teacher
    bool sft_teacher = false, scoring_teacher = false, tokenizer = false, reference_policy = false;
};

namespace detail {
/// f(name, member of each).
template <class F, class... Prints>
void each_fingerprint(F&& f, Prints&&... of) {
    f("sft_teacher", of.sft_teacher...);
    f("scoring_teacher", of.scoring_teacher...);
    f("tokenizer", of.tokenizer...);
    f("reference_policy", of.reference_policy...);
}
} // namespace detail

/// Compares a set's fingerprints with each other and with the run's. Returns what was let pass, a sentence each:
/// mismatches that are allowed, and what one side does not know. Throws invalid_input that names the fingerprint and
/// what allows it.
inline std::vector<std::string> check_fingerprints(const fingerprints& set, const fingerprints& run,
                                                   const allowed_mismatches& allow = {}) {
    std::vector<std::string> passed;
    const auto differ = [&](const char* name, const std::string& what, bool allowed, const char* by) {
        if (!allowed)
            throw invalid_input(std::string("fingerprints.") + name, what + "; to go on, set allow." + by + " = true");
        passed.push_back(what);
    };
    if (!set.sft_teacher.empty() && !set.scoring_teacher.empty() && set.sft_teacher != set.scoring_teacher)
        differ("scoring_teacher",
               "the student was fine-tuned on answers of teacher " + set.sft_teacher + ", and teacher " +
                   set.scoring_teacher + " scored: no training makes the gradient's error smaller (docs/offline.md)",
               allow.teachers, "teachers");
    detail::each_fingerprint(
        [&](const char* name, const std::string& a, const std::string& b, bool allowed) {
            if (a.empty() || b.empty()) {
                if (a.empty() != b.empty())
                    passed.push_back(std::string(name) + " is unknown to the " + (a.empty() ? "set" : "run"));
            } else if (a != b) {
                differ(name, std::string(name) + " of the set is " + a + ", of the run " + b, allowed, name);
            }
        },
        set, run, allow);
    return passed;
}

/// What all sequences of a set have in common.
struct set_description {
    index_t vocab = 0; ///< of the ids; 0: unknown
    std::vector<column> columns{};
    std::map<std::string, double> facts{}; ///< as "samples.temperature"
    fingerprints prints{};
    std::map<std::string, std::string> notes{}; ///< the caller's own
    detail::written_file constants{};           ///< no name: there are none
    std::uint32_t sum = 0;                      ///< of set.json, which the index goes on from

    /// The column of a name; null: there is none.
    const column* find(std::string_view name) const {
        const auto at = std::find_if(columns.begin(), columns.end(), [&](const column& c) { return c.name == name; });
        return at == columns.end() ? nullptr : &*at;
    }
};

/// One shard, as the index has it.
struct shard_line {
    detail::written_file file;
    index_t sequences = 0, tokens = 0, rows = 0;
};

namespace detail {

inline constexpr const char *manifest_name = "set.json", *index_name = "index.jsonl",
                            *constants_name = "constants.safetensors";
inline constexpr index_t most_columns = 1000, most_width = 1 << 24;

inline std::string shard_name(std::size_t number) {
    std::string digits = std::to_string(number);
    if (digits.size() < 6) digits.insert(0, 6 - digits.size(), '0');
    return "shard-" + digits + ".safetensors";
}

inline json json_of(const written_file& f) {
    return {
        {"file", f.name}, {"bytes", f.bytes}, {"header", f.header}, {"header_crc32c", hexadecimal(f.header_sum, 8)}};
}
inline written_file file_of(const json& j, const std::string& in) {
    written_file f{text_of(j, "file", in), static_cast<std::size_t>(count_of(j, "bytes", in)),
                   static_cast<std::size_t>(count_of(j, "header", in)), checksum_of(j, "header_crc32c", in)};
    if (f.name.empty() || f.name.find('/') != std::string::npos || f.name.find('\0') != std::string::npos)
        refuse(in, "names a file that is not in its folder");
    return f;
}

inline std::string manifest_text(set_description& d) {
    json j = {{"format", "opd.rollouts"}, {"version", format_version}, {"vocab", d.vocab},
              {"columns", json::array()}, {"facts", d.facts},          {"notes", d.notes}};
    for (const column& c : d.columns) {
        json one = {{"name", c.name}, {"dtype", name_of(c.type)}, {"per", name_of(c.per)}};
        if (c.width > 0) one["width"] = c.width;
        if (c.type == dtype::packed) one["bits"] = c.bits;
        if (!c.offsets.empty()) one["offsets"] = c.offsets;
        j["columns"].push_back(one);
    }
    each_fingerprint([&](const char* name, const std::string& print) { j["fingerprints"][name] = print; }, d.prints);
    if (!d.constants.name.empty()) j["constants"] = json_of(d.constants);
    return sealed(j, 0, d.sum) + "\n";
}

template <class Enum, class Last>
Enum named_value(const std::string& name, Last last, const std::string& what, const std::string& file) {
    for (int i = 0; i <= static_cast<int>(last); ++i)
        if (name == name_of(static_cast<Enum>(i))) return static_cast<Enum>(i);
    refuse(file, "has '" + name.substr(0, 40) + "' as '" + what + "', which this library does not know");
}

inline column column_of(const json& j, const std::string& file) {
    column c;
    c.name = text_of(j, "name", file);
    const std::string in = file + ", column '" + c.name.substr(0, 80) + "'";
    c.type = named_value<dtype>(text_of(j, "dtype", in), dtype::f64, "dtype", in);
    c.per = named_value<axis>(text_of(j, "per", in), axis::entry, "per", in);
    if (j.contains("width")) c.width = count_of(j, "width", in, most_width);
    if (j.contains("offsets")) c.offsets = text_of(j, "offsets", in);
    if (j.contains("bits")) {
        c.bits = static_cast<int>(count_of(j, "bits", in, most_id_bits));
        if (c.bits < least_id_bits || c.type != dtype::u8) refuse(in, "has ids of a width that this library has not");
        c.type = dtype::packed;
    }
    if (c.name.empty() || (c.per == axis::entry) == c.offsets.empty()) refuse(in, "has no name, or no place");
    if (c.per == axis::bounds && (c.type != dtype::i64 || c.width > 0)) refuse(in, "is no line of int64");
    return c;
}

inline set_description description_of(std::string_view text, const std::string& file) {
    if (text.empty() || text.back() != '\n') refuse(file, "was cut: it does not end with a line feed");
    set_description d;
    const json j = unsealed(text.substr(0, text.size() - 1), d.sum, file);
    if (text_of(j, "format", file) != "opd.rollouts") refuse(file, "describes no set of rollouts of this library");
    if (const index_t version = count_of(j, "version", file); version != format_version)
        refuse(file, "is of format " + std::to_string(version) + "; this library reads format " +
                         std::to_string(format_version));
    d.vocab = count_of(j, "vocab", file);
    const json& columns = member(j, "columns", file);
    if (!columns.is_array() || columns.size() > static_cast<std::size_t>(most_columns))
        refuse(file, "has no list of at most 1,000 columns");
    for (const json& c : columns) {
        column one = column_of(c, file);
        if (d.find(one.name) != nullptr) refuse(file, "has column '" + one.name + "' twice");
        d.columns.push_back(std::move(one));
    }
    for (const column& c : d.columns)
        if (const column* of = d.find(c.offsets);
            c.per == axis::entry && (of == nullptr || of->per != axis::bounds || c.width > 0))
            refuse(file + ", column '" + c.name + "'", "has entries without a column of offsets");
    for (const auto& [name, value] : member(j, "facts", file).items()) {
        if (!value.is_number()) refuse(file, "has a fact '" + name + "' that is no number");
        d.facts[name] = value.get<double>();
    }
    for (const auto& [name, value] : member(j, "notes", file).items()) d.notes[name] = as_text(value, name, file);
    const json& prints = member(j, "fingerprints", file);
    each_fingerprint([&](const char* name, std::string& print) { print = text_of(prints, name, file); }, d.prints);
    if (j.contains("constants")) d.constants = file_of(j["constants"], file);
    return d;
}

/// What the index says.
struct index_contents {
    std::vector<shard_line> shards;
    index_t sequences = 0, tokens = 0, rows = 0;
    bool finished = false;      ///< the last line says so
    std::size_t good_bytes = 0; ///< up to the last whole line
    bool torn = false;          ///< behind them stands a piece of a line, as a crash leaves it
    std::uint32_t sum = 0;      ///< of the last line
};

inline std::string shard_text(const shard_line& s, std::uint32_t& sum) {
    json j = json_of(s.file);
    j["sequences"] = s.sequences, j["tokens"] = s.tokens, j["rows"] = s.rows;
    return sealed(j, sum, sum) + "\n";
}
inline std::string end_text(const index_contents& all, std::uint32_t& sum) {
    return sealed({{"end", true},
                   {"shards", all.shards.size()},
                   {"sequences", all.sequences},
                   {"tokens", all.tokens},
                   {"rows", all.rows}},
                  sum, sum) +
           "\n";
}

/// Lines of an index; `sum`: set.json's. A last line without a line feed is what a crash leaves: it is told, not
/// refused.
inline index_contents index_of(std::string_view text, const std::string& file, std::uint32_t sum) {
    index_contents all;
    all.sum = sum;
    for (std::size_t number = 1; all.good_bytes < text.size(); ++number) {
        const std::size_t end = text.find('\n', all.good_bytes);
        if (end == std::string_view::npos) {
            all.torn = true, all.finished = false; // somebody was adding to it
            break;
        }
        const std::string in = file + ", line " + std::to_string(number);
        const json j = unsealed(text.substr(all.good_bytes, end - all.good_bytes), all.sum, in);
        all.good_bytes = end + 1;
        all.finished = j.contains("end");
        if (all.finished) {
            if (count_of(j, "shards", in) != static_cast<index_t>(all.shards.size()) ||
                count_of(j, "sequences", in) != all.sequences || count_of(j, "tokens", in) != all.tokens ||
                count_of(j, "rows", in) != all.rows)
                refuse(in, "counts other shards than stand before it");
            continue;
        }
        constexpr index_t most = index_t{1} << 48; // sums of these stay far from an overflow
        shard_line s{file_of(j, in), count_of(j, "sequences", in, most), count_of(j, "tokens", in, most),
                     count_of(j, "rows", in, most)};
        if (s.sequences < 1 || s.rows > s.tokens) refuse(in, "has no sequences, or more rows than tokens");
        // a sequence has two offsets, a token at least a byte
        if (s.file.bytes > static_cast<std::size_t>(most) || s.sequences > static_cast<index_t>(s.file.bytes / 16) ||
            s.tokens > static_cast<index_t>(s.file.bytes) || all.tokens > most || all.shards.size() >= 1u << 28)
            refuse(in, "counts more than its shard, or a set, can have");
        all.sequences += s.sequences, all.tokens += s.tokens, all.rows += s.rows;
        all.shards.push_back(std::move(s));
    }
    return all;
}

/// A file of at most 1 GiB, whole.
inline std::string text_of_file(const std::string& path) {
    const mapped_file file(path);
    if (file.bytes().size() > std::size_t{1} << 30) refuse(path, "is larger than any of its kind");
    return std::string(file.text());
}

} // namespace detail

} // namespace opd::data
