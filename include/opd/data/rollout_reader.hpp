// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Reads sets of rollouts that rollout_writer.hpp wrote (docs/data.md).
//
//   const opd::data::rollout_set set("set");                              // every file is there, of its length
//   opd::data::rollout_reader read(set, {.seed = 1, .rank = rank, .ranks = ranks});
//   while (auto some = read.next(8)) {                                    // eight sequences; none: the epoch ends
//       const auto cache = some.cache<teacher::samples<std::int32_t>>();
//       evaluate(be, student, cache, estimator, env{.offsets = some.row_offsets()});
//   }
//
// Views point into the files, as mapped, where what is asked for lies there: sequences that are neighbours in a shard,
// columns of the very type. Else they point at copies that the `rollouts` hold: sequences from several places, packed
// ids, half or bfloat16 read as float. They live as long as the `rollouts`, whose memory the next ones use again.
//
// What is asked for is compared with its checksum, in blocks of 64 KiB, each once while its shard is mapped. Throws
// invalid_input that names the file, and the tensor, for whatever was altered, cut or exchanged, and for what is not
// in the set.
//
// Memory: `most_mapped` shards at most, apart from those that somebody still has rollouts of; 64 MiB for copies at
// most, apart from those of rollouts that live; and per set a line of its index for each shard. One rollout_set serves
// any number of readers and threads; a reader is one thread's.
//
// Above 600 lines: every kind of column is opened, checked and read beside the others.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/data/halves.hpp"
#include "opd/data/manifest.hpp"
#include "opd/data/order.hpp"
#include "opd/data/packed_ids.hpp"
#include "opd/data/safetensors.hpp"
#include "opd/data/spare_memory.hpp"

namespace opd::data {

namespace detail {

/// A shard in memory: which tensor is which column, and where its sequences begin.
class shard {
public:
    shard(const std::string& folder, const shard_line& line, const set_description& what)
        : line_(line), file_(folder + "/" + line.file.name, line.file) {
        token_offsets_ = offsets("token_offsets", line.tokens);
        row_offsets_ = offsets("row_offsets", line.rows);
        for (index_t s = 0; s < line.sequences; ++s)
            if (rows(s + 1) - rows(s) > tokens(s + 1) - tokens(s))
                refuse(file_.path(), "has a sequence of more rows than tokens");
        std::size_t known = 2;
        for (const column& c : what.columns) {
            columns_.push_back(find(c.name));
            known += 1;
        }
        if (file_.header().tensors.size() != known) refuse(file_.path(), "has tensors that set.json does not name");
        for (std::size_t i = 0; i < what.columns.size(); ++i) check_shape(what, what.columns[i], *columns_[i]);
    }
    index_t tokens(index_t s) const { return token_offsets_[static_cast<std::size_t>(s)]; }
    index_t rows(index_t s) const { return row_offsets_[static_cast<std::size_t>(s)]; }

    /// Bytes of a column's numbers [begin, end); of packed ids, the bytes that hold them, behind `skipped` others.
    std::span<const std::byte> numbers(std::size_t c, std::size_t size, index_t begin, index_t end) {
        return file_.bytes(*columns_[c], static_cast<std::size_t>(begin) * size, static_cast<std::size_t>(end) * size);
    }
    std::span<const std::byte> packed(std::size_t c, int bits, index_t begin, index_t end, index_t& skipped) {
        skipped = begin % 8; // every eighth id begins a byte
        return file_.bytes(*columns_[c], packed_bytes(begin - skipped, bits), packed_bytes(end, bits));
    }
    /// Where a row's entries begin; checked.
    std::vector<std::int64_t> bounds(std::size_t c, index_t begin, index_t end) {
        std::vector<std::int64_t> at(static_cast<std::size_t>(end - begin) + 1);
        const auto bytes = numbers(c, 8, begin, end + 1);
        std::memcpy(at.data(), bytes.data(), bytes.size());
        for (std::size_t i = 0; i < at.size(); ++i)
            if (at[i] < (i > 0 ? at[i - 1] : 0) || at[i] > most_entries)
                refuse(file_.path() + ", tensor '" + columns_[c]->name + "'", "does not ascend");
        return at;
    }
    const std::string& path() const { return file_.path(); }

private:
    static constexpr std::int64_t most_entries = std::int64_t{1} << 48;

    const tensor* find(const std::string& name) const {
        const tensor* const t = file_.header().find(name);
        if (t == nullptr) refuse(file_.path(), "has no tensor '" + name + "'");
        return t;
    }
    std::vector<std::int64_t> offsets(const char* name, index_t last) {
        const tensor& t = *find(name);
        if (t.type != "I64" || t.shape != std::vector<index_t>{line_.sequences + 1})
            refuse(file_.path() + ", tensor '" + name + "'", "has no offset for each sequence");
        const auto bytes = file_.bytes(t);
        std::vector<std::int64_t> at(bytes.size() / 8);
        std::memcpy(at.data(), bytes.data(), bytes.size());
        bool holds = at.front() == 0 && at.back() == last;
        for (std::size_t i = 1; i < at.size(); ++i) holds = holds && at[i] >= at[i - 1];
        if (!holds) refuse(file_.path() + ", tensor '" + name + "'", "does not ascend from 0 to what the index says");
        return at;
    }
    void check_shape(const set_description& what, const column& c, const tensor& t) const {
        const std::string in = file_.path() + ", tensor '" + c.name + "'";
        if (t.type != name_of(c.type)) refuse(in, "is " + t.type + "; set.json says " + name_of(c.type));
        index_t places = c.per == axis::sequence ? line_.sequences
                         : c.per == axis::token  ? line_.tokens
                         : c.per == axis::bounds ? line_.rows + 1
                                                 : line_.rows;
        if (c.per == axis::entry) { // as many as another column has, or as the bytes of packed ids hold
            if (t.shape.size() != 1) refuse(in, "is no line");
            if (c.type == dtype::packed) return;
            for (std::size_t i = 0; i < what.columns.size(); ++i)
                if (const column& other = what.columns[i]; other.offsets == c.offsets && other.type != dtype::packed)
                    if (columns_[i]->shape != t.shape) refuse(in, "has another number of entries than " + other.name);
            return;
        }
        std::vector<index_t> shape{places};
        if (c.type == dtype::packed)
            shape = {static_cast<index_t>(packed_bytes(places * c.numbers(), c.bits))};
        else if (c.width > 0)
            shape.push_back(c.width);
        if (t.shape != shape) refuse(in, "has another shape than set.json and the index say");
    }

    shard_line line_;
    checked_tensors file_;
    std::vector<std::int64_t> token_offsets_, row_offsets_;
    std::vector<const tensor*> columns_; ///< as set.json has them
};

/// A run of neighbours in a shard.
struct run {
    std::shared_ptr<shard> from;
    index_t first = 0, count = 0;
};

} // namespace detail

class rollout_set;

/// Some sequences, and what is known of them. Their set outlives them.
class rollouts {
public:
    rollouts() = default;

    explicit operator bool() const { return !numbers_.empty(); }
    index_t sequences() const { return static_cast<index_t>(numbers_.size()); }
    index_t rows() const { return row_offsets_.back(); }
    index_t tokens_size() const { return token_offsets_.back(); }
    const std::vector<index_t>& numbers() const { return numbers_; } ///< of the sequences, in the set

    vector_view<const std::int64_t> row_offsets() const { return row_offsets_; }        ///< (S+1), for env.offsets
    vector_view<const std::int64_t> token_offsets() const { return token_offsets_; }    ///< (S+1)
    vector_view<const std::int32_t> tokens() { return vector<std::int32_t>("tokens"); } ///< (T) of all sequences
    /// The tokens of the rows, (N): the last of each sequence. A copy.
    std::vector<std::int32_t> row_tokens() {
        const auto all = tokens();
        std::vector<std::int32_t> some;
        for (std::size_t s = 0; s < numbers_.size(); ++s) {
            const index_t n = row_offsets_[s + 1] - row_offsets_[s], end = token_offsets_[s + 1];
            some.insert(some.end(), all.data + (end - n), all.data + end);
        }
        return some;
    }
    vector_view<const std::uint8_t> mask() { return optional<std::uint8_t>("mask"); }         ///< (N), or empty
    vector_view<const std::int32_t> versions() { return optional<std::int32_t>("versions"); } ///< (N), or empty
    vector_view<const std::int64_t> samples() { return vector<std::int64_t>("sample"); }      ///< (S)
    vector_view<const float> rewards() { return vector<float>("reward"); }                    ///< (S)

    /// A cache of the rows: one of teacher.hpp's or hidden.hpp's, as it was added.
    template <class Cache>
    Cache cache(const std::string& prefix = prefix_of<Cache>()) {
        Cache c{};
        visit_columns(c, prefix, setter{*this});
        return c;
    }
    /// A column by its name: a number each, or `width`.
    template <class T>
    vector_view<const T> vector(const std::string& name) {
        index_t n = 0;
        const T* const data = fetch<T>(name, n);
        return {data, n};
    }
    template <class T>
    matrix_view<const T> matrix(const std::string& name) {
        index_t n = 0;
        const T* const data = fetch<T>(name, n);
        const index_t width = what().find(name)->numbers();
        return view(data, width > 0 ? n / width : 0, width);
    }
    bool has(const std::string& name) const { return what().find(name) != nullptr; }

private:
    friend class rollout_set;

    /// What visit_columns calls.
    struct setter {
        rollouts& from;
        template <class Id>
        void ids(const std::string& name, matrix_view<const Id>& m) const {
            m = from.matrix<Id>(name);
        }
        template <class Id>
        void ids(const std::string& name, vector_view<const Id>& v, const std::string& offsets) const {
            from.check_entries(name, offsets);
            v = from.vector<Id>(name);
        }
        template <class T>
        void numbers(const std::string& name, matrix_view<const T>& m) const {
            if (from.has(name)) m = from.matrix<T>(name);
        }
        template <class T>
        void numbers(const std::string& name, vector_view<const T>& v) const {
            if (from.has(name)) v = from.vector<T>(name);
        }
        template <class T>
        void numbers(const std::string& name, vector_view<const T>& v, const std::string& offsets) const {
            if (!from.has(name)) return;
            from.check_entries(name, offsets);
            v = from.vector<T>(name);
        }
        void bounds(const std::string& name, opd::row_offsets<>& offsets) const {
            offsets = opd::row_offsets<>(from.vector<std::int64_t>(name));
        }
        template <class T>
        void fact(const std::string& name, T& value) const {
            value = from.fact<T>(name);
        }
        template <class View>
        void head(const std::string& name, View& v) const {
            from.constant(name, v);
        }
    };

    /// A column as T's, of one piece: from the file, or a copy.
    template <class T>
    const T* fetch(const std::string& name, index_t& n);
    struct copied {
        detail::spare_memory::piece bytes{};
        index_t size = 0; ///< numbers
    };
    template <class T>
    void copy(const column& c, std::size_t at, copied& to);
    template <class T>
    T fact(const std::string& name) const;
    template <class View>
    void constant(const std::string& name, View& v) const;
    template <class T>
    vector_view<const T> optional(const std::string& name) {
        return has(name) ? vector<T>(name) : vector_view<const T>{};
    }
    void check_entries(const std::string& name, const std::string& offsets) const {
        const column* const c = what().find(name);
        if (c == nullptr || c->offsets != offsets)
            throw invalid_input(name, "is no line of entries of " + offsets + " in the set");
    }
    const set_description& what() const;
    std::size_t place_of(const std::string& name) const {
        const column* const c = what().find(name);
        if (c == nullptr) throw invalid_input(name, "is not in the set");
        return static_cast<std::size_t>(c - what().columns.data());
    }
    /// Numbers [begin, end) of a column that a run has.
    std::pair<index_t, index_t> range_of(const column& c, const detail::run& r) const {
        detail::shard& s = *r.from;
        const index_t last = r.first + r.count;
        switch (c.per) {
        case axis::sequence:
            return {r.first * c.numbers(), last * c.numbers()};
        case axis::token:
            return {s.tokens(r.first) * c.numbers(), s.tokens(last) * c.numbers()};
        case axis::row:
            return {s.rows(r.first) * c.numbers(), s.rows(last) * c.numbers()};
        case axis::bounds:
            return {s.rows(r.first), s.rows(last)};
        default: {
            const auto at = s.bounds(place_of(c.offsets), s.rows(r.first), s.rows(last));
            return {at.front(), at.back()};
        }
        }
    }

    const rollout_set* set_ = nullptr;
    std::shared_ptr<detail::spare_memory> spare_; ///< the set's
    std::vector<detail::run> runs_;
    std::vector<index_t> numbers_;
    std::vector<std::int64_t> token_offsets_{0}, row_offsets_{0};
    std::map<std::pair<std::size_t, dtype>, copied> copies_; ///< by column and type
};

/// What a reader puts up with, and how much address space it takes.
struct open_settings {
    bool unfinished = false;      ///< a set whose writer has not finished, or was killed, will do: what the index names
    std::size_t most_mapped = 16; ///< shards in memory at once
};

/// A set, opened. Checked then: set.json, the index, that each shard is there and as long as it should be. The rest
/// when it is asked for, or by verify().
class rollout_set {
public:
    explicit rollout_set(std::string folder, open_settings settings = {});
    rollout_set(const rollout_set&) = delete;
    rollout_set& operator=(const rollout_set&) = delete;

    index_t sequences() const { return index_.sequences; }
    index_t tokens() const { return index_.tokens; } ///< prompts and responses
    index_t rows() const { return index_.rows; }
    bool finished() const { return index_.finished; }
    const set_description& description() const { return what_; }
    const std::vector<shard_line>& shards() const { return index_.shards; }
    const std::string& folder() const { return folder_; }
    /// What is in the folder and no part of the set, a sentence each: pieces that a crash left.
    const std::vector<std::string>& ignored() const { return ignored_; }

    /// Compares the set's fingerprints with the run's: check_fingerprints (manifest.hpp).
    std::vector<std::string> check(const data::fingerprints& run, const allowed_mismatches& allow = {}) const {
        return check_fingerprints(what_.prints, run, allow);
    }

    /// Sequences by their numbers, in this order; neighbours together are the quickest.
    rollouts read(std::span<const index_t> numbers) const;
    /// Sequences [first, first + count).
    rollouts read(index_t first, index_t count) const {
        if (first < 0 || count < 0 || count > sequences() - std::min(first, sequences()))
            throw invalid_input("first", "and count leave the set's " + std::to_string(sequences()) + " sequences");
        std::vector<index_t> numbers(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = first + static_cast<index_t>(i);
        return read(numbers);
    }

    /// Reads every byte of it; throws for the first that differs.
    void verify() const {
        for (const shard_line& s : shards()) verify_file(s.file);
        if (!what_.constants.name.empty()) verify_file(what_.constants);
    }

    /// Where each shard's sequences begin, and how many there are: of the first `sequences` of the set.
    std::vector<index_t> begins(index_t sequences) const {
        std::vector<index_t> at;
        for (const index_t b : begins_)
            if (b < sequences) at.push_back(b);
        at.push_back(sequences);
        return at;
    }

private:
    friend class rollouts;

    void verify_file(const detail::written_file& f) const {
        checked_tensors file(folder_ + "/" + f.name, f);
        for (const tensor& t : file.header().tensors) file.bytes(t);
    }
    std::shared_ptr<detail::shard> mapped(std::size_t number) const;
    void look_around();

    std::string folder_;
    open_settings settings_;
    set_description what_;
    detail::index_contents index_;
    std::vector<index_t> begins_; ///< (shards+1)
    std::vector<std::string> ignored_;
    std::unique_ptr<checked_tensors> constants_;
    std::shared_ptr<detail::spare_memory> spare_ = std::make_shared<detail::spare_memory>(); ///< of copies

    mutable std::mutex mutex_;                                                          ///< of what follows
    mutable std::deque<std::pair<std::size_t, std::shared_ptr<detail::shard>>> mapped_; ///< the last used last
};

inline rollout_set::rollout_set(std::string folder, open_settings settings)
    : folder_(std::move(folder)), settings_(settings) {
    using detail::refuse;
    const std::string manifest = folder_ + "/" + detail::manifest_name, index = folder_ + "/" + detail::index_name;
    what_ = detail::description_of(detail::text_of_file(manifest), manifest);
    index_ = detail::index_of(detail::text_of_file(index), index, what_.sum);
    if (!index_.finished && !settings_.unfinished)
        refuse(index, "does not end with the line that says that the set is whole: its writer has not finished, or it "
                      "was cut; to read what there is, open it with .unfinished = true");
    begins_.push_back(0);
    for (const shard_line& s : index_.shards) {
        const std::string file = folder_ + "/" + s.file.name;
        const std::int64_t size = detail::size_of_file(file);
        if (size < 0) refuse(file, "is missing, and the index names it");
        if (size != static_cast<std::int64_t>(s.file.bytes))
            refuse(file, "has " + std::to_string(size) + " bytes, not " + std::to_string(s.file.bytes) +
                             ": it was cut, or is another file");
        begins_.push_back(begins_.back() + s.sequences);
    }
    if (!what_.constants.name.empty())
        constants_ = std::make_unique<checked_tensors>(folder_ + "/" + what_.constants.name, what_.constants);
    if (settings_.most_mapped < 1) settings_.most_mapped = 1;
    look_around();
}

inline void rollout_set::look_around() {
    if (index_.torn) ignored_.push_back(folder_ + "/" + detail::index_name + ": its last line is not whole");
    std::map<std::string, bool> known;
    for (const shard_line& s : index_.shards) known[s.file.name] = true;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        const std::string name = entry.path().filename().string();
        if (name.ends_with(".tmp"))
            ignored_.push_back(folder_ + "/" + name + ": is half written");
        else if (name.starts_with("shard-") && !known.contains(name))
            ignored_.push_back(folder_ + "/" + name + ": is not in the index");
    }
}

inline std::shared_ptr<detail::shard> rollout_set::mapped(std::size_t number) const {
    const std::lock_guard lock(mutex_);
    for (auto at = mapped_.begin(); at != mapped_.end(); ++at)
        if (at->first == number) {
            auto found = std::move(*at);
            mapped_.erase(at);
            mapped_.push_back(found);
            return found.second;
        }
    auto opened = std::make_shared<detail::shard>(folder_, index_.shards[number], what_);
    while (mapped_.size() >= settings_.most_mapped) mapped_.pop_front();
    mapped_.emplace_back(number, opened);
    return opened;
}

inline rollouts rollout_set::read(std::span<const index_t> numbers) const {
    rollouts r;
    r.set_ = this, r.spare_ = spare_;
    std::size_t last = std::numeric_limits<std::size_t>::max(); // the shard of the last run
    for (const index_t number : numbers) {
        if (number < 0 || number >= sequences())
            throw invalid_input("numbers", "has " + std::to_string(number) + "; the set has " +
                                               std::to_string(sequences()) + " sequences");
        const auto s =
            static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), number) - begins_.begin() - 1);
        const index_t within = number - begins_[s];
        if (s == last && r.runs_.back().first + r.runs_.back().count == within)
            ++r.runs_.back().count;
        else
            r.runs_.push_back({s == last ? r.runs_.back().from : mapped(s), within, 1});
        last = s;
        const detail::shard& from = *r.runs_.back().from;
        r.numbers_.push_back(number);
        r.token_offsets_.push_back(r.token_offsets_.back() + from.tokens(within + 1) - from.tokens(within));
        r.row_offsets_.push_back(r.row_offsets_.back() + from.rows(within + 1) - from.rows(within));
    }
    return r;
}

inline const set_description& rollouts::what() const {
    static const set_description none;
    return set_ != nullptr ? set_->what_ : none;
}

template <class T>
void rollouts::copy(const column& c, std::size_t at, copied& to) {
    const auto reserve = [&](std::size_t n) {
        to.bytes = spare_->take(n * sizeof(T));
        to.size = static_cast<index_t>(n);
        return reinterpret_cast<T*>(to.bytes.get());
    };
    if constexpr (std::is_same_v<T, std::int64_t>)
        if (c.per == axis::bounds) { // counted from these rollouts' first entry
            std::vector<std::int64_t> all{0};
            for (const detail::run& r : runs_) {
                const auto [begin, end] = range_of(c, r);
                const auto bounds = r.from->bounds(at, begin, end);
                const std::int64_t base = all.back() - bounds.front();
                for (std::size_t i = 1; i < bounds.size(); ++i) all.push_back(base + bounds[i]);
            }
            std::copy(all.begin(), all.end(), reserve(all.size()));
            return;
        }
    struct source {
        std::span<const std::byte> bytes;
        index_t n = 0, skipped = 0;
    };
    std::vector<source> sources; // all of them looked at before anything is reserved
    std::size_t total = 0;
    for (const detail::run& r : runs_) {
        const auto [begin, end] = range_of(c, r);
        source& s = sources.emplace_back();
        s.n = end - begin;
        s.bytes = c.type == dtype::packed ? r.from->packed(at, c.bits, begin, end, s.skipped)
                                          : r.from->numbers(at, size_of(c.type), begin, end);
        total += static_cast<std::size_t>(s.n);
    }
    T* to_here = reserve(total);
    for (const source& s : sources) {
        const auto convert = [&]<class From>(From x) {
            for (index_t i = 0; i < s.n; ++i) {
                std::memcpy(static_cast<void*>(&x), s.bytes.data() + static_cast<std::size_t>(i) * sizeof x, sizeof x);
                if constexpr (std::integral<From>)
                    to_here[i] = static_cast<T>(x);
                else
                    to_here[i] = static_cast<T>(element<From>::load(x));
            }
        };
        if (c.type == dtype_of<T>()) {
            if (s.n > 0) std::memcpy(static_cast<void*>(to_here), s.bytes.data(), s.bytes.size());
        } else if constexpr (std::integral<T>) {
            if (c.type == dtype::packed)
                detail::unpack_ids(s.bytes, s.skipped, s.n, c.bits, to_here);
            else
                convert(std::int32_t{});
        } else if constexpr (std::floating_point<T>) {
            if (c.type == dtype::f16) {
                if constexpr (std::is_same_v<T, float>)
                    detail::halves_to_floats(s.bytes.data(), s.n, to_here);
                else
                    convert(half{0.f});
            }
            if (c.type == dtype::bf16) convert(bfloat16{0.f});
            if constexpr (std::is_same_v<T, double>)
                if (c.type == dtype::f32) convert(float{});
        }
        to_here += s.n;
    }
}

/// Whether a column can be read as T without losing anything.
template <class T>
constexpr bool readable_as(dtype from) {
    constexpr dtype to = dtype_of<T>();
    if (from == dtype::packed || from == dtype::i32) return to == dtype::i32 || to == dtype::i64;
    if (from == dtype::f16 || from == dtype::bf16) return from == to || to == dtype::f32 || to == dtype::f64;
    return from == to || (from == dtype::f32 && to == dtype::f64);
}

template <class T>
const T* rollouts::fetch(const std::string& name, index_t& n) {
    const std::size_t at = place_of(name);
    const column& c = what().columns[at];
    if (!readable_as<T>(c.type))
        throw invalid_input(name, std::string("is ") + name_of(c.type) + " in the set; it cannot be read as " +
                                      name_of(dtype_of<T>()));
    if (runs_.size() == 1 && c.type == dtype_of<T>() && c.per != axis::bounds) {
        const auto [begin, end] = range_of(c, runs_[0]);
        const auto bytes = runs_[0].from->numbers(at, sizeof(T), begin, end);
        if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(T) == 0) {
            n = end - begin;
            return reinterpret_cast<const T*>(bytes.data());
        }
    }
    const auto [found, made] = copies_.try_emplace({at, dtype_of<T>()});
    if (made) try {
            copy<T>(c, at, found->second);
        } catch (...) {
            copies_.erase(found);
            throw;
        }
    n = found->second.size;
    return reinterpret_cast<const T*>(found->second.bytes.get());
}

template <class T>
T rollouts::fact(const std::string& name) const {
    const auto at = what().facts.find(name);
    if (at == what().facts.end()) throw invalid_input(name, "is not in the set");
    constexpr double most = 1e15;
    const double x = at->second;
    if constexpr (std::is_enum_v<T>) {
        if (x != 0 && x != 1 && x != 2) throw invalid_input(name, "is no choice that this library has");
        return static_cast<T>(static_cast<int>(x));
    } else if constexpr (std::integral<T>) {
        if (!(x >= -most && x <= most)) throw invalid_input(name, "is no count");
        return static_cast<T>(x);
    } else {
        if (!(x >= -1e30 && x <= 1e30)) throw invalid_input(name, "is out of range");
        return static_cast<T>(x);
    }
}

template <class View>
void rollouts::constant(const std::string& name, View& v) const {
    using T = std::remove_const_t<typename View::element_type>;
    checked_tensors* const file = set_ != nullptr ? set_->constants_.get() : nullptr;
    const tensor* const t = file != nullptr ? file->header().find(name) : nullptr;
    if (t == nullptr) return; // the caller's to give
    constexpr bool is_line = std::is_same_v<View, vector_view<const T>>;
    if (t->type != name_of(dtype_of<T>()) || t->shape.size() != (is_line ? 1u : 2u))
        throw invalid_input(name, "is of another type or shape in the set");
    const auto* const data = reinterpret_cast<const T*>(file->bytes(*t).data());
    if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0)
        throw invalid_input(name, "is not aligned in its file");
    if constexpr (is_line)
        v = {data, t->shape[0]};
    else
        v = {data, t->shape[0], t->shape[1], t->shape[1]};
}

/// Where a reader is: enough to go on from there, in another process, with another number of readers.
struct reader_place {
    std::uint64_t epoch = 0;
    index_t next = 0;      ///< of this rank's sequences in the epoch, those of all of its readers
    index_t sequences = 0; ///< that the set had when the epoch began; 0: as many as it has. It may have grown since
    friend bool operator==(const reader_place&, const reader_place&) = default;
    template <class A>
    void fields(A& a) {
        a(epoch, next, sequences);
    }
};

/// Goes through a set, epoch after epoch.
class rollout_reader {
public:
    /// The set outlives the reader. Throws invalid_input for a rank or reader that is none of so many, or a place that
    /// is not in the set.
    rollout_reader(const rollout_set& set, const read_order& order = {}, const reader_place& place = {})
        : set_(&set), how_(order), place_(place) {
        const auto within = [](const char* name, index_t i, index_t n) {
            if (n < 1 || i < 0 || i >= n)
                throw invalid_input(name, "is " + std::to_string(i) + " of " + std::to_string(n));
        };
        within("order.rank", how_.rank, how_.ranks);
        within("order.reader", how_.reader, how_.readers);
        if (how_.shuffle < shuffle::stored || how_.shuffle > shuffle::sequences)
            throw invalid_input("order.shuffle", "is no order that this library has");
        if (place_.sequences < 0 || place_.sequences > set.sequences())
            throw invalid_input("place.sequences", "is more than the set has: it is another set");
        if (place_.sequences == 0) place_.sequences = set.sequences();
        if (place_.next < 0 || place_.next > epoch_size()) throw invalid_input("place.next", "is not in the epoch");
        begin_epoch();
    }

    /// This rank's sequences of an epoch.
    index_t epoch_size() const { return (place_.sequences - how_.rank + how_.ranks - 1) / how_.ranks; }
    std::uint64_t epoch() const { return place_.epoch; }

    /// The numbers of the next sequences of this reader, at most so many; none at the end of an epoch, and the next
    /// call begins another.
    std::vector<index_t> next_numbers(index_t most = 1) {
        std::vector<index_t> numbers;
        for (; static_cast<index_t>(numbers.size()) < most && mine_ < epoch_size(); mine_ += how_.readers)
            numbers.push_back(order_[how_.rank + mine_ * how_.ranks]);
        if (most > 0 && numbers.empty()) {
            place_ = {place_.epoch + 1, 0, set_->sequences()};
            begin_epoch();
        }
        return numbers;
    }
    rollouts next(index_t most = 1) { return set_->read(next_numbers(most)); }

    /// After what was read so far, where all readers of the rank took as many sequences as this one.
    reader_place place() const {
        reader_place p = place_;
        p.next = std::min(mine_ - how_.reader, epoch_size());
        return p;
    }

private:
    void begin_epoch() {
        order_ = epoch_order(set_->begins(place_.sequences), how_, place_.epoch);
        mine_ = place_.next + how_.reader;
    }

    const rollout_set* set_;
    read_order how_;
    reader_place place_; ///< where this reader began; its sequences and epoch
    epoch_order order_{{0}, {}, 0};
    index_t mine_ = 0; ///< this rank's position that comes next here
};

} // namespace opd::data
