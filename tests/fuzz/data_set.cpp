// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The reader of data sets: one file of a set that a writer wrote is damaged by a list of edits. As it is, that must be
// found. With its checksums made to fit again, so that what lies behind them is reached, it is refused by
// invalid_input, or all that is read lies within what there is.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <unistd.h>
#include <vector>

#include "fuzz/damage.hpp"
#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"

namespace {

using namespace opd;
using namespace opd::fuzz;
namespace fs = std::filesystem;
using samples = teacher::on_kept_sets<teacher::samples<std::int32_t>, std::int32_t>;
using ragged = teacher::ragged_support<std::int32_t, half>;

void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// The set that all inputs damage, with packed ids, lines of entries, states, constants, in two shards.
struct whole_set {
    std::string folder;
    std::map<std::string, std::string> files;
    std::vector<std::string> names;

    whole_set() {
        const fs::path memory = "/dev/shm";
        folder =
            ((fs::exists(memory) ? memory : fs::temp_directory_path()) / ("opd_fuzz_" + std::to_string(::getpid())))
                .string();
        fs::remove_all(folder);
        data::rollout_writer out(folder, {.vocab = 90, .id_bits = 9, .shard_bytes = 300});
        std::vector<std::int32_t> ids(12);
        std::iota(ids.begin(), ids.end(), 1);
        const std::vector<float> logs(12, -1.5f);
        const std::vector<half> halves(12, half(-2.5f));
        const std::int64_t offsets[] = {0, 2, 5}, kept[] = {0, 4, 6};
        out.add_constant("hidden.w", view(logs.data(), 4, 3));
        for (int s = 0; s < 4; ++s) {
            samples drawn{{view(ids.data(), 2, 1), view(logs.data(), 2, 1), view(logs.data(), 2, 1)},
                          view(ids.data(), 6),
                          view(kept, 3)};
            out.add({.tokens = view(ids.data(), 4), .rows = 2}, drawn,
                    ragged{view(ids.data(), 5), view(halves.data(), 5), view(offsets, 3), view(halves.data(), 2)},
                    teacher::hidden<float>{view(logs.data(), 2, 3), {}});
        }
        out.finish();
        for (const auto& entry : fs::directory_iterator(folder)) {
            std::ifstream in(entry.path(), std::ios::binary);
            names.push_back(entry.path().filename().string());
            files[names.back()] = {std::istreambuf_iterator<char>(in), {}};
        }
        std::sort(names.begin(), names.end());
    }
    ~whole_set() {
        std::error_code ignored;
        fs::remove_all(folder, ignored);
    }
    std::string path(const std::string& name) const { return folder + "/" + name; }
};

constexpr std::string_view mark = ",\"crc32c\":\"";

/// A line with the checksum that it should have.
std::string sealed_again(std::string line, std::uint32_t& sum) {
    const std::size_t end = line.rfind(mark);
    line.resize(end == std::string::npos ? line.size() : end);
    sum = data::crc32c(line, sum);
    return line + std::string(mark) + data::detail::hexadecimal(sum, 8) + "\"}\n";
}
std::uint32_t sum_of_manifest(const std::string& text) {
    std::uint32_t sum = 0;
    sealed_again(text, sum);
    return sum;
}
std::string index_again(const std::string& text, std::uint32_t sum) {
    std::string all;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        all += sealed_again(text.substr(at, end - at), sum);
        at = end + 1;
    }
    return all;
}
/// A shard whose header, edited or not, has the checksums of its data; and the index that says so.
void write_shard(const whole_set& set, const std::string& name, std::string header, const std::string& body) {
    const std::string key = "\"crc32c\":\"";
    if (const std::size_t at = header.find(key); at != std::string::npos) {
        data::block_checksums sums;
        sums.add(data::detail::bytes_of(body));
        std::string digits;
        for (const std::uint32_t sum : sums.finish()) digits += data::detail::hexadecimal(sum, 8);
        const std::size_t end = header.find('"', at + key.size());
        if (end != std::string::npos) header.replace(at + key.size(), end - at - key.size(), digits);
    }
    const std::uint64_t size = header.size();
    const std::string front = std::string(reinterpret_cast<const char*>(&size), 8) + header;
    write_file(set.path(name), front + body);
    auto index = set.files.at("index.jsonl");
    const std::size_t line = index.find(name);
    const auto number = [&](const std::string& what, const std::string& to) {
        const std::size_t from = index.rfind('\n', line) + 1; // the line's first character, 0 of the first line
        const std::size_t at = index.find("\"" + what + "\":", from) + what.size() + 3;
        index.replace(at, index.find_first_of(",}", at) - at, to);
    };
    number("bytes", std::to_string(front.size() + body.size()));
    number("header", std::to_string(front.size()));
    number("header_crc32c", "\"" + data::detail::hexadecimal(data::crc32c(front), 8) + "\"");
    write_file(set.path("index.jsonl"), index_again(index, sum_of_manifest(set.files.at("set.json"))));
}

/// Looks at every number that the set has.
double read_all(const std::string& folder) {
    const data::rollout_set set(folder, {.most_mapped = 1});
    set.verify();
    double sum = 0;
    const auto add = [&sum](const auto& line) {
        for (index_t i = 0; i < line.size; ++i) sum += double(float(line[i]));
    };
    data::rollout_reader reader(set, {.shuffle = data::shuffle::shards, .seed = 1});
    need(set.sequences() < 1 << 20, "more sequences than its bytes can have");
    while (data::rollouts some = reader.next(2)) {
        add(some.tokens()), add(some.samples()), add(some.rewards());
        const auto drawn = some.cache<samples>();
        need(drawn.ids.rows == some.rows() && drawn.kept_offsets.size == some.rows() + 1, "rows of another number");
        for (index_t r = 0; r < some.rows(); ++r) {
            sum += double(drawn.ids(r, 0)) + double(drawn.log_q(r, 0));
            for (index_t i = drawn.kept_offsets[r]; i < drawn.kept_offsets[r + 1]; ++i) {
                need(i >= 0 && i < drawn.kept_ids.size, "an offset leaves its line");
                sum += double(drawn.kept_ids[i]);
            }
        }
        const auto lists = some.cache<ragged>();
        for (index_t r = 0; r < some.rows(); ++r)
            for (index_t i = lists.offsets[r]; i < lists.offsets[r + 1]; ++i) {
                need(i >= 0 && i < lists.ids.size && i < lists.log_q.size, "an offset leaves its line");
                sum += double(lists.ids[i]) + double(float(lists.log_q[i]));
            }
        const auto states = some.cache<teacher::hidden<float>>();
        for (index_t r = 0; r < states.x.rows; ++r)
            for (index_t j = 0; j < states.x.cols; ++j) sum += double(states.x(r, j));
        for (index_t r = 0; r < states.w.rows; ++r)
            for (index_t j = 0; j < states.w.cols; ++j) sum += double(states.w(r, j));
    }
    return sum;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    static const whole_set set;
    choices c(bytes, size);
    const std::string& name = set.names[static_cast<std::size_t>(c.below(static_cast<std::int64_t>(set.names.size())))];
    const std::string& good = set.files.at(name);
    std::string bad = good;
    bool resealed = true;
    if (c.once_in(4)) {
        c.once_in(2) ? damage(c, bad) : nudge(c, bad);
        write_file(set.path(name), bad);
        resealed = false;
    } else if (name == "set.json") {
        damage(c, bad);
        std::uint32_t sum = 0;
        write_file(set.path(name), sealed_again(bad.substr(0, bad.rfind('\n')), sum));
        write_file(set.path("index.jsonl"), index_again(set.files.at("index.jsonl"), sum));
    } else if (name == "index.jsonl") {
        c.once_in(2) ? damage(c, bad) : nudge(c, bad);
        write_file(set.path(name), index_again(bad, sum_of_manifest(set.files.at("set.json"))));
    } else if (name.starts_with("shard-")) {
        std::uint64_t length = 0;
        std::memcpy(&length, good.data(), 8);
        std::string header = good.substr(8, length), body = good.substr(8 + length);
        if (c.once_in(2)) c.once_in(2) ? damage(c, header) : nudge(c, header);
        if (!c.once_in(3)) c.once_in(4) ? damage(c, body) : nudge(c, body);
        write_shard(set, name, header, body);
    }
    try {
        read_all(set.folder);
        need(resealed || bad == good, "damage was not found");
    } catch (const invalid_input& e) {
        need(resealed || e.argument.find(name) != std::string::npos || bad == good, "another file is named");
        need(!(bad == good) || resealed, "a good set is refused");
    }
    write_file(set.path(name), good);
    write_file(set.path("index.jsonl"), set.files.at("index.jsonl"));
    return 0;
}
