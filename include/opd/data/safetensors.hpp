// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Files of named tensors, as safetensors defines them, with checksums in its metadata.
//
//   8 bytes        length of the header, little-endian
//   header         JSON: {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, …},
//                  spaces behind it until the data begin at a multiple of 64
//   data           the tensors, without holes, from the widest type to the narrowest: each begins at a multiple of its
//                  type's size, so that a map of the file can be used as it lies
//
// Metadata that this library adds: "crc32c", a CRC-32C of 8 digits of each block of "crc32c_block" bytes of the data.
// The header's own is in the file that names this one. Other libraries read these files as any other.
//
// A header of a hostile file is refused by invalid_input before anything is reserved for what it claims.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/data/checksum.hpp"
#include "opd/data/files.hpp"
#include "opd/data/json.hpp"

namespace opd::data {

static_assert(std::endian::native == std::endian::little, "opd: data sets are little-endian");

/// One tensor of a file: bytes [begin, end) of the data.
struct tensor {
    std::string name, type; ///< "F32", …
    std::vector<index_t> shape;
    std::size_t begin = 0, end = 0;
};

/// What a file holds and where; the data themselves stay in it.
struct safetensors_header {
    std::map<std::string, std::string> metadata;
    std::vector<tensor> tensors; ///< in the order of their data
    std::size_t data_begin = 0;  ///< where in the file

    const tensor* find(std::string_view name) const {
        const auto at = std::find_if(tensors.begin(), tensors.end(), [&](const tensor& t) { return t.name == name; });
        return at == tensors.end() ? nullptr : &*at;
    }
};

namespace detail {

inline constexpr std::size_t longest_header = std::size_t{1} << 24;

/// Bytes of an element; 0: not a type.
inline std::size_t size_of_type(std::string_view type) {
    constexpr std::pair<std::string_view, std::size_t> types[] = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
        {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
    for (const auto& [name, size] : types)
        if (name == type) return size;
    return 0;
}

/// The bytes in front of the data.
inline std::string header_bytes(const safetensors_header& h) {
    json j;
    j["__metadata__"] = h.metadata;
    for (const tensor& t : h.tensors)
        j[t.name] = {{"dtype", t.type}, {"shape", t.shape}, {"data_offsets", {t.begin, t.end}}};
    std::string text = j.dump();
    text.resize((8 + text.size() + 63) / 64 * 64 - 8, ' ');
    const std::uint64_t size = text.size();
    return std::string(reinterpret_cast<const char*>(&size), 8) + text;
}

inline tensor tensor_of(const std::string& name, const json& j, const std::string& file) {
    const std::string in = file + ", tensor '" + name.substr(0, 80) + "'";
    tensor t{name, text_of(j, "dtype", in), {}, 0, 0};
    std::size_t bytes = size_of_type(t.type);
    if (bytes == 0) refuse(in, "is of a type that this library does not know");
    const json &shape = member(j, "shape", in), &range = member(j, "data_offsets", in);
    if (!shape.is_array() || shape.size() > 8) refuse(in, "has no shape of at most 8 dimensions");
    if (!range.is_array() || range.size() != 2) refuse(in, "has no two data_offsets");
    t.begin = static_cast<std::size_t>(as_count(range[0], "data_offsets", in));
    t.end = static_cast<std::size_t>(as_count(range[1], "data_offsets", in));
    for (const json& n : shape) {
        t.shape.push_back(as_count(n, "shape", in));
        if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(t.shape.back()), &bytes))
            refuse(in, "has a shape of more elements than can be counted");
    }
    if (t.end < t.begin || t.end - t.begin != bytes)
        refuse(in, "has data_offsets " + std::to_string(t.begin) + " to " + std::to_string(t.end) + " and a shape of " +
                       std::to_string(bytes) + " bytes");
    return t;
}

} // namespace detail

/// The header of a file's bytes; throws invalid_input that names `file` where it does not describe all of them.
inline safetensors_header read_safetensors(std::span<const std::byte> bytes, const std::string& file) {
    using detail::refuse;
    std::uint64_t size = 0;
    if (bytes.size() < 8) refuse(file, "is cut: it has " + std::to_string(bytes.size()) + " bytes");
    std::memcpy(&size, bytes.data(), 8);
    if (size > detail::longest_header) refuse(file, "is no safetensors file: its header would have more than 16 MiB");
    if (size > bytes.size() - 8) refuse(file, "is cut in its header");
    const detail::json j =
        detail::parse_json({reinterpret_cast<const char*>(bytes.data()) + 8, static_cast<std::size_t>(size)}, file);
    if (!j.is_object()) refuse(file, "is no safetensors file: its header is no object");
    safetensors_header h;
    h.data_begin = 8 + static_cast<std::size_t>(size);
    for (const auto& [name, value] : j.items()) {
        if (name != "__metadata__") {
            h.tensors.push_back(detail::tensor_of(name, value, file));
            continue;
        }
        if (!value.is_object()) refuse(file, "has a __metadata__ that is no object");
        for (const auto& [key, text] : value.items()) h.metadata[key] = detail::as_text(text, key, file);
    }
    std::sort(h.tensors.begin(), h.tensors.end(),
              [](const tensor& a, const tensor& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    std::size_t at = 0;
    for (const tensor& t : h.tensors) {
        if (t.begin != at) refuse(file + ", tensor '" + t.name + "'", "does not begin where the one before it ends");
        at = t.end;
    }
    if (at != bytes.size() - h.data_begin)
        refuse(file, "has " + std::to_string(bytes.size() - h.data_begin) + " bytes of data and tensors of " +
                         std::to_string(at) + ": it was cut, or has a tail");
    return h;
}

namespace detail {

/// A tensor to write.
struct piece {
    std::string name, type;
    std::vector<index_t> shape;
    std::size_t alignment = 1;
    std::span<const std::byte> bytes;
};
/// What another file says of one that was written: enough to tell it from every other.
struct written_file {
    std::string name;
    std::size_t bytes = 0, header = 0; ///< header: length with the 8 bytes
    std::uint32_t header_sum = 0;
};

/// Writes a file whole, or not at all.
inline written_file write_safetensors(const std::string& folder, const std::string& name,
                                      const std::vector<piece>& pieces, std::map<std::string, std::string> metadata) {
    std::vector<piece> in_order; // the widest types first
    for (const std::size_t alignment : {8u, 4u, 2u, 1u})
        for (const piece& p : pieces)
            if (p.alignment == alignment) in_order.push_back(p);
    safetensors_header h{std::move(metadata), {}, 0};
    std::size_t at = 0;
    for (const piece& p : in_order) {
        h.tensors.push_back({p.name, p.type, p.shape, at, at + p.bytes.size()});
        at += p.bytes.size();
    }
    h.metadata["crc32c"] = std::string(8 * ((at + checksum_block - 1) / checksum_block), '0'); // so many digits
    h.metadata["crc32c_block"] = std::to_string(checksum_block);
    new_file file(folder, name);
    file.skip(header_bytes(h).size());
    block_checksums sums; // some blocks at a time, summed while they are copied: they come from memory once
    at = 0;
    for (const piece& p : in_order)
        for (auto rest = p.bytes; !rest.empty();) {
            const auto part = rest.first(std::min(rest.size(), 4 * checksum_block - at % checksum_block));
            sums.add(part);
            file.write(part);
            at += part.size(), rest = rest.subspan(part.size());
        }
    std::string& digits = h.metadata["crc32c"];
    digits.clear();
    for (const std::uint32_t sum : sums.finish()) digits += hexadecimal(sum, 8);
    const std::string header = header_bytes(h);
    file.write_front(bytes_of(header));
    file.finish();
    return {name, header.size() + at, header.size(), crc32c(header)};
}

} // namespace detail

/// A file of tensors whose bytes are compared with their checksums as they are asked for, each block once.
class checked_tensors {
public:
    /// The file, with what another one says of it. Throws invalid_input where they differ.
    checked_tensors(const std::string& path, const detail::written_file& said)
        : path_(path), map_(path), file_(map_.bytes()) {
        using detail::refuse;
        if (file_.size() != said.bytes)
            refuse(path_, "has " + std::to_string(file_.size()) + " bytes, not " + std::to_string(said.bytes) +
                              (file_.size() < said.bytes ? ": it was cut" : ": it was altered, or is another file"));
        if (said.header < 8 || said.header > file_.size() || crc32c(file_.first(said.header)) != said.header_sum)
            refuse(path_, "was altered, or is another file: its header has another checksum");
        header_ = read_safetensors(file_, path_);
        if (header_.data_begin != said.header) refuse(path_, "has a header of another length than the index says");
        read_sums();
    }

    const std::string& path() const { return path_; }
    const safetensors_header& header() const { return header_; }

    /// Bytes [begin, end) of a tensor, compared. Threads may ask at once. Throws invalid_input that names the tensor.
    std::span<const std::byte> bytes(const tensor& t, std::size_t begin, std::size_t end) {
        if (begin > end || end > t.end - t.begin) detail::refuse(path_ + ", tensor '" + t.name + "'", "ends too early");
        check(t, t.begin + begin, t.begin + end);
        return data().subspan(t.begin + begin, end - begin);
    }
    std::span<const std::byte> bytes(const tensor& t) { return bytes(t, 0, t.end - t.begin); }

private:
    std::span<const std::byte> data() const { return file_.subspan(header_.data_begin); }

    void read_sums() {
        const auto said = header_.metadata.find("crc32c"), block = header_.metadata.find("crc32c_block");
        if (said == header_.metadata.end() || block == header_.metadata.end() ||
            block->second != std::to_string(checksum_block))
            detail::refuse(path_, "has no checksums of 65536 bytes each");
        const std::size_t blocks = (data().size() + checksum_block - 1) / checksum_block;
        if (said->second.size() != 8 * blocks)
            detail::refuse(path_, "has checksums for another number of blocks than its data have");
        sums_.resize(blocks), seen_ = std::vector<std::uint8_t>(blocks);
        for (std::size_t b = 0; b < blocks; ++b)
            if (!detail::from_hexadecimal(std::string_view(said->second).substr(8 * b, 8), sums_[b]))
                detail::refuse(path_, "has a checksum that is no number");
    }
    bool seen(std::size_t b) { return std::atomic_ref<std::uint8_t>(seen_[b]).load(std::memory_order_relaxed) != 0; }

    /// Blocks that nobody has looked at yet, as many at once as lie together.
    void check(const tensor& t, std::size_t begin, std::size_t end) {
        if (begin == end) return;
        constexpr std::size_t most = 64;
        const std::size_t last = (end + checksum_block - 1) / checksum_block;
        for (std::size_t b = begin / checksum_block; b < last;) {
            std::size_t n = 0;
            while (n < most && b + n < last && !seen(b + n)) ++n;
            if (n == 0) {
                ++b;
                continue;
            }
            std::uint32_t sums[most];
            const std::size_t at = b * checksum_block;
            crc32c_of_blocks(data().subspan(at, std::min(n * checksum_block, data().size() - at)), sums);
            for (std::size_t i = 0; i < n; ++i, ++b) {
                if (sums[i] != sums_[b])
                    detail::refuse(path_ + ", tensor '" + t.name + "'",
                                   "was altered: block " + std::to_string(b) + " (bytes " +
                                       std::to_string(header_.data_begin + b * checksum_block) +
                                       " on) has another checksum");
                std::atomic_ref<std::uint8_t>(seen_[b]).store(1, std::memory_order_relaxed);
            }
        }
    }

    std::string path_;
    detail::mapped_file map_;
    std::span<const std::byte> file_;
    safetensors_header header_;
    std::vector<std::uint32_t> sums_;
    std::vector<std::uint8_t> seen_; ///< of each block, whether it was compared
};

} // namespace opd::data
