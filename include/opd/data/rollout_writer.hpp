// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Writes rollouts with what a teacher said of them (docs/data.md).
//
//   opd::data::rollout_writer out("set", {.vocab = V, .id_bits = 17, .fingerprints = {…}});
//   out.add({.tokens = view(tokens, T), .rows = N}, teacher::samples{…}, teacher::support{…});     // a sequence
//   out.finish();
//
// The first sequence settles which columns there are, how wide and of which types; every other one must have the same.
// Ids are kept in int32, or in `id_bits` bits; log-probs, where `log_probs` says so, in half or bfloat16, rounded to
// nearest even; all else as it is given, bit for bit.
//
// A shard is collected in memory (`shard_bytes`), written under a temporary name by a thread of its own while the next
// one is collected, synced, renamed, and then named in the index, which is synced too: whatever happens, what the index
// names is whole. A folder that has a set already is added to, after a crash or not: sequences() says how many it has,
// and so where to go on; what was half written is removed, and recovered() names it. One writer at a time has the
// folder.
//
// Memory: two shards. Throws invalid_input, before anything is added, for a sequence that does not fit; opd::error
// where the disk does not take it, after which the writer is closed and the folder is as if killed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <future>
#include <map>
#include <span>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/data/halves.hpp"
#include "opd/data/manifest.hpp"
#include "opd/data/packed_ids.hpp"
#include "opd/data/raw_bytes.hpp"

namespace opd::data {

/// A sequence. Its last `rows` tokens are those that the caches speak of, a row each: the response, mostly.
struct rollout {
    vector_view<const std::int32_t> tokens = {}; ///< (T) prompt and response
    index_t rows = 0;
    vector_view<const std::uint8_t> mask = {}; ///< (rows) 0: does not count, as a tool's tokens; empty: none is kept
    vector_view<const std::int32_t> versions = {}; ///< (rows) of the policy that drew them; empty: none are kept
    std::int64_t sample = -1;                      ///< the caller's number of the sequence
    float reward = 0;                              ///< of the whole sequence
};

/// What a set is begun with. A folder that is added to must have the same `vocab` and `fingerprints`.
struct writer_settings {
    index_t vocab = 0;            ///< ids are checked against it; 0: unknown
    int id_bits = 0;              ///< 8 to 31; 0: ids are int32. 17 bits hold a vocabulary of 131,071
    dtype log_probs = dtype::f32; ///< f16 or bf16: columns called log_… that are given in float
    std::size_t shard_bytes = std::size_t{64} << 20;
    data::fingerprints fingerprints = {};
    std::map<std::string, std::string> notes = {}; ///< the caller's own, kept in set.json
};

/// One folder's writer, with a thread of its own for the shard in hand. One thread's.
class rollout_writer {
public:
    explicit rollout_writer(std::string folder, writer_settings settings = {});
    rollout_writer(const rollout_writer&) = delete;
    rollout_writer& operator=(const rollout_writer&) = delete;
    /// A shard that was full is kept; what came after it is not, without flush() or finish().
    ~rollout_writer() {
        try {
            end_writing();
        } catch (...) { // the next writer finds what is there
        }
    }

    /// A matrix of the whole set, as a head: "hidden.w". Before the first sequence.
    template <class T>
    void add_constant(const std::string& name, matrix_view<const T> m) {
        check_constant(name);
        constant& c = constants_[name];
        c = {dtype_of<T>(), {m.rows, m.cols}, {}};
        for (index_t r = 0; r < m.rows; ++r) append(c.bytes, m.row(r), m.cols);
    }
    template <class T>
    void add_constant(const std::string& name, vector_view<const T> v) {
        check_constant(name);
        constant& c = constants_[name];
        c = {dtype_of<T>(), {v.size}, {}};
        append(c.bytes, v.data, v.size);
    }

    /// A sequence and caches of its rows, of different kinds.
    template <class... Caches>
    void add(const rollout& sequence, Caches... caches) {
        add_named(sequence, std::pair<const char*, Caches>(prefix_of<Caches>(), caches)...);
    }
    /// The same with names of the caller's for the columns: two caches of one kind.
    template <class... Caches>
    void add_named(const rollout& sequence, std::pair<const char*, Caches>... caches) {
        pending_.clear(), pending_facts_.clear(); // views of the caller's, until the end of this call
        check_sequence(sequence);
        describe(sequence);
        (visit_columns(caches.second, caches.first, collector{*this}), ...);
        take(sequence);
    }

    /// Sequences of the set, those of the shard that is not written yet too.
    index_t sequences() const { return all_.sequences + busy_.sequences + open_.sequences; }
    /// Sequences that are on the disk and stay there.
    index_t kept_sequences() const { return all_.sequences; }
    /// Files and pieces of an earlier writer that it had not finished; removed.
    const std::vector<std::string>& recovered() const { return recovered_; }

    /// Writes what there is as a shard, smaller than others. Then it is safe.
    void flush();
    /// flush(), and a line that says that the set is whole: readers refuse one without, unless told not to.
    void finish();

private:
    struct constant {
        dtype type = dtype::f32;
        std::vector<index_t> shape{};
        std::vector<std::byte> bytes{};
    };
    /// A column's numbers in a shard.
    struct buffer {
        detail::raw_bytes bytes{};
        index_t numbers = 0;
    };
    struct collected {
        std::vector<buffer> columns{};
        std::vector<std::int64_t> token_offsets{0}, row_offsets{0};
        index_t sequences = 0;
        std::size_t bytes = 0;
    };
    /// A column of the sequence that is being added, as the caller has it.
    struct part {
        column what;
        const void* data;
        index_t rows, cols, stride;
        void (*write)(const part&, buffer&);
        std::vector<std::int64_t> own{}; ///< of bounds, which are counted anew
        index_t numbers() const { return rows * cols; }
    };

    /// What visit_columns calls.
    struct collector {
        rollout_writer& w;
        template <class Id>
        void ids(const std::string& name, const matrix_view<const Id>& m) const {
            w.add_ids({name, dtype::i32, axis::row, w.width_of(name, m), 0, {}}, m);
        }
        template <class Id>
        void ids(const std::string& name, const vector_view<const Id>& v, const std::string& offsets) const {
            w.add_ids({name, dtype::i32, axis::entry, 0, 0, offsets}, w.line(name, v, offsets));
        }
        template <class T>
        void numbers(const std::string& name, const matrix_view<const T>& m) const {
            if (w.has(name, m.data)) w.add_numbers({name, dtype_of<T>(), axis::row, w.width_of(name, m), 0, {}}, m);
        }
        template <class T>
        void numbers(const std::string& name, const vector_view<const T>& v) const {
            if (w.has(name, v.data)) w.add_numbers({name, dtype_of<T>(), axis::row, 0, 0, {}}, view(v.data, v.size, 1));
        }
        template <class T>
        void numbers(const std::string& name, const vector_view<const T>& v, const std::string& offsets) const {
            const auto& [first, last] = w.lines_.at(offsets);
            if (v.data == nullptr && (last > first || !w.has(name, nullptr))) return;
            w.add_numbers({name, dtype_of<T>(), axis::entry, 0, 0, offsets}, w.line(name, v, offsets));
        }
        void bounds(const std::string& name, const row_offsets<>& offsets) const { w.add_bounds(name, offsets); }
        template <class T>
        void fact(const std::string& name, const T& value) const {
            w.pending_facts_[name] = static_cast<double>(value);
        }
        template <class Matrix>
        void head(const std::string&, const Matrix&) const {} // add_constant
    };

    template <class Bytes, class T>
    static void append(Bytes& to, const T* from, index_t n) {
        const auto* const p = reinterpret_cast<const std::byte*>(from);
        if (n > 0) to.insert(to.end(), p, p + static_cast<std::size_t>(n) * sizeof(T));
    }
    /// A part's numbers behind each other, each as f(number).
    template <class To, class T, class F>
    static void append_each(detail::raw_bytes& to, const part& p, F&& f) {
        std::size_t at = to.size();
        to.resize(at + static_cast<std::size_t>(p.numbers()) * sizeof(To));
        for (index_t r = 0; r < p.rows; ++r) {
            const T* const row = static_cast<const T*>(p.data) + r * p.stride;
            for (index_t j = 0; j < p.cols; ++j, at += sizeof(To)) {
                const To x = f(row[j]);
                std::memcpy(to.data() + at, &x, sizeof x);
            }
        }
    }
    /// f(run of numbers, how many), in one run where they lie so.
    template <class T, class F>
    static void each_run(const part& p, F&& f) {
        const T* const data = static_cast<const T*>(p.data);
        if (p.stride == p.cols || p.rows == 1) return f(data, p.numbers());
        for (index_t r = 0; r < p.rows; ++r) f(data + r * p.stride, p.cols);
    }
    template <class Id>
    static void write_ids(const part& p, buffer& b) {
        if (p.what.type == dtype::packed) {
            index_t have = b.numbers;
            each_run<Id>(p, [&](const Id* ids, index_t n) {
                detail::append_ids(ids, n, p.what.bits, b.bytes, have);
                have += n;
            });
        } else if constexpr (std::is_same_v<Id, std::int32_t>) {
            each_run<Id>(p, [&](const Id* ids, index_t n) { append(b.bytes, ids, n); });
        } else {
            append_each<std::int32_t, Id>(b.bytes, p, [](Id id) { return static_cast<std::int32_t>(id); });
        }
    }
    template <class T>
    static void write_numbers(const part& p, buffer& b) {
        if constexpr (std::is_same_v<stored_as<T>, float>) {
            const auto load = [](T x) { return element<T>::load(x); };
            if (p.what.type == dtype::f16) {
                if constexpr (std::is_same_v<T, float>)
                    return each_run<T>(p, [&](const T* x, index_t n) {
                        const std::size_t at = b.bytes.size();
                        b.bytes.resize(at + static_cast<std::size_t>(n) * 2);
                        detail::floats_to_halves(x, n, b.bytes.data() + at);
                    });
                else
                    return append_each<half, T>(b.bytes, p, [&](T x) { return half(load(x)); });
            }
            if (p.what.type == dtype::bf16)
                return append_each<bfloat16, T>(b.bytes, p, [&](T x) { return bfloat16(load(x)); });
        }
        each_run<T>(p, [&](const T* x, index_t n) { append(b.bytes, x, n); });
    }
    /// Counted on from the sequence before; what both end and begin with stands once.
    static void write_bounds(const part& p, buffer& b) {
        std::int64_t base = 0;
        if (b.numbers > 0) std::memcpy(&base, b.bytes.data() + b.bytes.size() - 8, 8);
        for (std::size_t r = b.numbers > 0 ? 1 : 0; r < p.own.size(); ++r) {
            const std::int64_t at = base + p.own[r];
            append(b.bytes, &at, 1);
        }
        if (b.numbers > 0) --b.numbers;
    }

    part& new_part(part given) {
        for (const part& p : pending_)
            if (p.what.name == given.what.name)
                throw invalid_input(given.what.name, "is given twice: name one of the caches");
        pending_.push_back(std::move(given));
        return pending_.back();
    }
    void check_constant(const std::string& name) const {
        if (described_) throw invalid_input(name, "is a constant, which is added before any sequence");
        if (constants_.contains(name)) throw invalid_input(name, "is added twice");
    }
    /// Whether a column that may be left out is there: a sequence of no rows has those of the others.
    bool has(const std::string& name, const void* data) const {
        return data != nullptr || (rows_ == 0 && what_.find(name) != nullptr);
    }
    template <class M>
    index_t width_of(const std::string& name, const M& m) const {
        const column* const c = rows_ == 0 ? what_.find(name) : nullptr;
        return c != nullptr ? c->width : m.cols;
    }
    /// The entries that its offsets name.
    template <class T>
    matrix_view<const T> line(const std::string& name, const vector_view<const T>& v,
                              const std::string& offsets) const {
        const auto& [first, last] = lines_.at(offsets);
        if (v.size < last)
            throw invalid_input(name, "has " + std::to_string(v.size) + " entries, its offsets go to " +
                                          std::to_string(last));
        return view(v.data + first, last - first, 1);
    }
    template <class M>
    void check_matrix(const column& c, const M& m) const {
        if (c.per == axis::row && m.rows != rows_)
            throw invalid_input(c.name, "has " + std::to_string(m.rows) + " rows for " + std::to_string(rows_));
        if (m.rows > 0 && m.cols > 0 && m.data == nullptr) throw invalid_input(c.name, "is a null pointer");
        if (m.rows < 0 || (m.rows > 0 && m.cols < 1) || m.cols > detail::most_width ||
            (m.rows > 1 && m.stride < m.cols))
            throw invalid_input(c.name, "is no matrix");
    }

    template <class Id>
    void add_ids(column c, matrix_view<const Id> m) {
        check_matrix(c, m);
        const int bits = settings_.id_bits;
        if (bits > 0) c.type = dtype::packed, c.bits = bits;
        const part& p = new_part({std::move(c), m.data, m.rows, m.cols, m.stride, &write_ids<Id>});
        const index_t end = settings_.vocab > 0 ? settings_.vocab
                            : bits > 0          ? largest_vocabulary(bits)
                                                : index_t{1} << 31;
        each_run<Id>(p, [&](const Id* ids, index_t n) {
            const auto [least, most] = detail::range_of_ids(ids, n);
            if (least < -1 || static_cast<index_t>(most) >= end)
                throw invalid_input(p.what.name, "holds " + std::to_string(least < -1 ? least : most) +
                                                     ": ids are below " + std::to_string(end) + ", an unused slot -1");
        });
    }
    template <class T>
    void add_numbers(column c, matrix_view<const T> m) {
        check_matrix(c, m);
        if (c.type == dtype::f32 && c.name.find(".log_") != std::string::npos) c.type = settings_.log_probs;
        new_part({std::move(c), m.data, m.rows, m.cols, m.stride, &write_numbers<T>});
    }
    void add_bounds(const std::string& name, const row_offsets<>& offsets);

    void check_sequence(const rollout& s);
    void describe(const rollout& s);
    void take(const rollout& s);
    void settle();
    void open_existing();
    void reserve(std::size_t shard);
    void write_index(const std::string& text);
    void begin_writing();
    void end_writing();
    detail::written_file write_shard(std::size_t number) const;

    std::string folder_;
    writer_settings settings_;
    set_description what_;
    bool described_ = false; ///< set.json is there
    bool closed_ = false;
    detail::descriptor index_;
    detail::index_contents all_; ///< on the disk
    std::map<std::string, constant> constants_;
    std::vector<std::string> recovered_;

    // the sequence that is being added
    index_t rows_ = 0;
    std::vector<part> pending_;
    std::map<std::string, double> pending_facts_;
    std::map<std::string, std::pair<index_t, index_t>> lines_; ///< of offsets' columns: first and last

    collected open_;                            ///< the shard that is being collected
    collected busy_;                            ///< the one that is being written
    std::future<detail::written_file> writing_; ///< its file
};

inline rollout_writer::rollout_writer(std::string folder, writer_settings settings)
    : folder_(std::move(folder)), settings_(std::move(settings)) {
    if (settings_.id_bits != 0 && (settings_.id_bits < least_id_bits || settings_.id_bits > most_id_bits))
        throw invalid_input("settings.id_bits", "must be 0, for int32, or from 8 to 31");
    if (settings_.vocab < 0 || settings_.vocab > index_t{1} << 31)
        throw invalid_input("settings.vocab", "must be 0, for unknown, or at most 2^31");
    if (settings_.id_bits > 0 && settings_.vocab > largest_vocabulary(settings_.id_bits))
        throw invalid_input("settings.id_bits", std::to_string(settings_.id_bits) + " bits hold a vocabulary of " +
                                                    std::to_string(largest_vocabulary(settings_.id_bits)) +
                                                    ", not of " + std::to_string(settings_.vocab));
    if (settings_.log_probs != dtype::f32 && settings_.log_probs != dtype::f16 && settings_.log_probs != dtype::bf16)
        throw invalid_input("settings.log_probs", "must be f32, f16 or bf16");
    if (settings_.shard_bytes < 1) throw invalid_input("settings.shard_bytes", "must be at least 1");
    std::error_code failed;
    std::filesystem::create_directories(folder_, failed);
    if (failed) throw error("opd: " + folder_ + ": cannot be created: " + failed.message());
    const std::string index = folder_ + "/" + detail::index_name;
    index_ = detail::descriptor(::open(index.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND, 0666));
    if (!index_.is_open()) detail::cannot_write(index, "cannot be opened");
    if (::flock(index_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        throw error("opd: " + folder_ + ": another writer has it");
    open_existing();
}

/// What an earlier writer left: the set's description, its shards; pieces are named and removed.
inline void rollout_writer::open_existing() {
    const std::string manifest = folder_ + "/" + detail::manifest_name, index = folder_ + "/" + detail::index_name;
    if (detail::size_of_file(manifest) >= 0) {
        what_ = detail::description_of(detail::text_of_file(manifest), manifest);
        described_ = true;
        const auto same = [&](const char* name, bool holds) {
            if (!holds) detail::refuse(manifest, std::string("has another '") + name + "' than the writer was given");
        };
        same("vocab", what_.vocab == settings_.vocab);
        detail::each_fingerprint(
            [&](const char* name, const std::string& a, const std::string& b) { same(name, a == b); }, what_.prints,
            settings_.fingerprints);
        open_.columns.resize(what_.columns.size());
    } else if (detail::size_of_file(index) > 0) {
        detail::refuse(manifest, "is missing, and there is an index");
    }
    all_ = detail::index_of(detail::text_of_file(index), index, what_.sum);
    for (const shard_line& s : all_.shards) {
        const std::string file = folder_ + "/" + s.file.name;
        const std::int64_t size = detail::size_of_file(file);
        if (size < 0) detail::refuse(file, "is missing, and the index names it");
        if (size != static_cast<std::int64_t>(s.file.bytes)) detail::refuse(file, "is not as long as the index says");
    }
    if (all_.torn) {
        recovered_.push_back(index + ": the last line was not finished");
        if (::ftruncate(index_.get(), static_cast<off_t>(all_.good_bytes)) != 0 || ::fsync(index_.get()) != 0)
            detail::cannot_write(index, "cannot be cut to its last whole line");
    }
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        const std::string name = entry.path().filename().string();
        const bool temporary = name.ends_with(".tmp") && (name.starts_with("shard-") || name.starts_with("set.json") ||
                                                          name.starts_with("constants."));
        bool stray = name.starts_with("shard-") && name.ends_with(".safetensors");
        for (const shard_line& s : all_.shards) stray = stray && s.file.name != name;
        if (!temporary && !stray) continue;
        recovered_.push_back(folder_ + "/" + name + (temporary ? ": was not finished" : ": is not in the index"));
        ::unlink(entry.path().c_str());
    }
}

inline void rollout_writer::check_sequence(const rollout& s) {
    if (closed_) throw invalid_input("sequence", "comes after finish(), or after the disk failed");
    if (s.tokens.size < 0 || (s.tokens.size > 0 && s.tokens.data == nullptr))
        throw invalid_input("sequence.tokens", "is a null pointer");
    if (s.rows < 0 || s.rows > s.tokens.size)
        throw invalid_input("sequence.rows",
                            "is " + std::to_string(s.rows) + " of " + std::to_string(s.tokens.size) + " tokens");
    if (!described_ && s.rows == 0)
        throw invalid_input("sequence.rows", "is 0 in the first sequence, which says what columns there are");
    rows_ = s.rows;
    lines_.clear();
}

/// The columns that every sequence has.
inline void rollout_writer::describe(const rollout& s) {
    add_ids({"tokens", dtype::i32, axis::token, 0, 0, {}}, view(s.tokens.data, s.tokens.size, 1));
    const collector each{*this};
    each.numbers("mask", s.mask);
    each.numbers("versions", s.versions);
    add_numbers({"sample", dtype::i64, axis::sequence, 0, 0, {}}, matrix_view<const std::int64_t>(&s.sample, 1, 1, 1));
    add_numbers({"reward", dtype::f32, axis::sequence, 0, 0, {}}, matrix_view<const float>(&s.reward, 1, 1, 1));
}

inline void rollout_writer::add_bounds(const std::string& name, const row_offsets<>& offsets) {
    if (offsets.data == nullptr || offsets.size != rows_ + 1)
        throw invalid_input(name, "has " + std::to_string(offsets.size) + " entries for " + std::to_string(rows_) +
                                      " rows and one more");
    part& p = new_part({{name, dtype::i64, axis::bounds, 0, 0, {}}, nullptr, rows_ + 1, 1, 1, &write_bounds});
    for (index_t r = 0; r <= rows_; ++r) {
        if (offsets[r] < 0 || (r > 0 && offsets[r] < offsets[r - 1])) throw invalid_input(name, "descends", r);
        p.own.push_back(offsets[r] - offsets[0]);
    }
    lines_[name] = {offsets[0], offsets[rows_]};
}

/// The first sequence: which columns there are.
inline void rollout_writer::settle() {
    what_ = {settings_.vocab, {}, pending_facts_, settings_.fingerprints, settings_.notes, {}};
    for (const part& p : pending_) what_.columns.push_back(p.what);
    std::vector<detail::piece> pieces;
    for (const auto& [name, c] : constants_)
        pieces.push_back({name, name_of(c.type), c.shape, size_of(c.type), c.bytes});
    if (!pieces.empty())
        what_.constants =
            detail::write_safetensors(folder_, detail::constants_name, pieces, {{"format", "opd.rollouts.constants"}});
    detail::new_file manifest(folder_, detail::manifest_name);
    manifest.write(detail::bytes_of(detail::manifest_text(what_)));
    manifest.finish();
    all_.sum = what_.sum;
    open_.columns.resize(what_.columns.size());
    described_ = true;
}

inline void rollout_writer::take(const rollout& s) {
    for (const auto& [name, value] : pending_facts_)
        if (!opd::detail::is_finite(value)) throw invalid_input(name, "is not finite");
    if (!described_) settle();
    if (pending_facts_ != what_.facts) {
        for (const auto& [name, value] : pending_facts_)
            if (const auto at = what_.facts.find(name); at == what_.facts.end() || at->second != value)
                throw invalid_input(name, "is another number than that of the set's other sequences");
        throw invalid_input("caches", "are fewer than those of the set's other sequences");
    }
    for (std::size_t i = 0; i < pending_.size() || i < what_.columns.size(); ++i) {
        if (i >= pending_.size()) throw invalid_input(what_.columns[i].name, "is left out, and the set has it");
        if (i >= what_.columns.size() || !(pending_[i].what == what_.columns[i]))
            throw invalid_input(pending_[i].what.name,
                                "is not as in the set's other sequences: there, or left out, or of another type, width "
                                "or order");
    }
    // from here on nothing throws but for want of memory
    for (std::size_t i = 0; i < pending_.size(); ++i) {
        const part& p = pending_[i];
        buffer& b = open_.columns[i];
        const std::size_t before = b.bytes.size();
        p.write(p, b);
        b.numbers += p.numbers();
        open_.bytes += b.bytes.size() - before;
    }
    open_.token_offsets.push_back(open_.token_offsets.back() + s.tokens.size);
    open_.row_offsets.push_back(open_.row_offsets.back() + s.rows);
    ++open_.sequences;
    if (open_.bytes >= settings_.shard_bytes)
        begin_writing();
    else if (open_.sequences == 1)
        reserve(settings_.shard_bytes);
}

/// Room for a whole shard, shared out as the first sequence has it, so that no column moves as it grows; what nobody
/// touches costs nothing.
inline void rollout_writer::reserve(std::size_t shard) {
    constexpr std::size_t most = std::size_t{1} << 30; // larger ones grow
    const double times = double(std::min(shard, most)) / double(open_.bytes) * 1.02;
    for (buffer& b : open_.columns) b.bytes.reserve(static_cast<std::size_t>(double(b.bytes.size()) * times) + 65536);
}

inline void rollout_writer::write_index(const std::string& text) {
    detail::write_all(index_.get(), detail::bytes_of(text), folder_ + "/" + detail::index_name);
    if (::fsync(index_.get()) != 0) detail::cannot_write(folder_ + "/" + detail::index_name, "cannot be synced");
}

inline detail::written_file rollout_writer::write_shard(std::size_t number) const {
    const auto line = [](const char* name, const std::vector<std::int64_t>& v) {
        return detail::piece{name, "I64", {static_cast<index_t>(v.size())}, 8, std::as_bytes(std::span(v))};
    };
    std::vector<detail::piece> pieces{line("token_offsets", busy_.token_offsets),
                                      line("row_offsets", busy_.row_offsets)};
    for (std::size_t i = 0; i < busy_.columns.size(); ++i) {
        const column& c = what_.columns[i];
        const buffer& b = busy_.columns[i];
        std::vector<index_t> shape{b.numbers};
        if (c.type == dtype::packed)
            shape = {static_cast<index_t>(b.bytes.size())};
        else if (c.width > 0)
            shape = {b.numbers / c.width, c.width};
        pieces.push_back({c.name, name_of(c.type), shape, size_of(c.type), b.bytes});
    }
    return detail::write_safetensors(folder_, detail::shard_name(number), pieces,
                                     {{"format", "opd.rollouts.shard"}, {"version", std::to_string(format_version)}});
}

/// Has what was collected written by a thread, once the shard before it is on the disk.
inline void rollout_writer::begin_writing() {
    end_writing();
    all_.finished = false;
    std::swap(open_, busy_);
    open_.columns.resize(busy_.columns.size()); // the memory of the one before, used again
    for (std::size_t i = 0; i < open_.columns.size(); ++i) {
        open_.columns[i].bytes.clear(), open_.columns[i].numbers = 0;
    }
    open_.token_offsets.assign(1, 0), open_.row_offsets.assign(1, 0);
    open_.sequences = 0, open_.bytes = 0;
    writing_ = std::async([this, number = all_.shards.size()] { return write_shard(number); });
}

/// Waits for it, and names it in the index.
inline void rollout_writer::end_writing() {
    if (!writing_.valid()) return;
    closed_ = true; // until all is on the disk
    shard_line s{writing_.get(), busy_.sequences, busy_.token_offsets.back(), busy_.row_offsets.back()};
    write_index(detail::shard_text(s, all_.sum));
    all_.sequences += s.sequences, all_.tokens += s.tokens, all_.rows += s.rows;
    all_.shards.push_back(std::move(s));
    closed_ = false;
    busy_.sequences = 0;
}

inline void rollout_writer::flush() {
    if (closed_ && !all_.finished) throw error("opd: " + folder_ + ": the disk has failed: the set is not finished");
    if (closed_) return;
    if (open_.sequences > 0) begin_writing();
    end_writing();
}

inline void rollout_writer::finish() {
    if (!described_) throw invalid_input("sequences", "were added to " + folder_ + ": none; a set has one at least");
    flush();
    if (closed_) return;
    closed_ = true;
    if (!all_.finished) write_index(detail::end_text(all_, all_.sum));
    all_.finished = true;
    index_ = {};
}

} // namespace opd::data
