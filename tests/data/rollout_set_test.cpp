// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
//
// Data sets: every kind of cache comes back bit for bit, whole shards and single sequences in any order; the same
// whatever the readers and ranks; after a crash, too; what was altered, cut or exchanged is found and named; memory
// stays flat.
#include "data/support.hpp"
#include "support/property.hpp"
#include "support/sanitized.hpp"

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <doctest/doctest.h>
#include <fstream>
#include <map>
#include <numeric>
#include <ranges>
#include <set>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

using namespace opd;
using namespace opd::test;
using namespace std::string_literals;

namespace {

/// Runs f, which must throw invalid_input that names `name`; its text.
template <class F>
std::string refused(const std::string& name, F&& f) {
    try {
        f();
    } catch (const invalid_input& e) {
        CHECK_MESSAGE(e.argument.find(name) != std::string::npos, std::string(e.what()), " does not name ", name);
        return e.what();
    }
    FAIL_CHECK("nothing refused ", name);
    return {};
}

/// Sequences of random lengths over the rows of a cache.
struct layout {
    std::vector<index_t> first, rows, tokens;
    std::vector<std::int32_t> text;
    layout(numbers& u, index_t sequences, index_t longest, index_t vocab) {
        for (index_t s = 0, at = 0; s < sequences; ++s) {
            const index_t n = s == 0 ? 1 : u.below(longest + 1); // some have none
            first.push_back(at), rows.push_back(n), tokens.push_back(n + u.below(4));
            at += n;
        }
        for (index_t i = 0; i < 4 * sequences + total(); ++i) text.push_back(std::int32_t(u.below(vocab)));
    }
    index_t total() const { return first.back() + rows.back(); }
    data::rollout sequence(index_t s) const {
        return {.tokens = view(text.data() + s, tokens[std::size_t(s)]),
                .rows = rows[std::size_t(s)],
                .sample = 1000 + s,
                .reward = float(s) / 3};
    }
};

/// Written and read in several ways; each row's bits are those that were given.
template <class Cache>
void round_trip(const char* prefix, std::uint64_t seed, int id_bits) {
    numbers u(seed);
    const index_t vocab = 500, sequences = 1 + u.below(12), width = 1 + u.below(5);
    const layout where(u, sequences, 6, vocab);
    const random_cache<Cache> given(u, where.total(), width, vocab);
    const folder dir;
    {
        data::rollout_writer out(dir / "set",
                                 {.vocab = vocab, .id_bits = id_bits, .shard_bytes = std::size_t(1 + u.below(3000))});
        for (index_t s = 0; s < sequences; ++s)
            out.add_named(where.sequence(s),
                          std::pair<const char*, Cache>(
                              prefix, given.slice(where.first[std::size_t(s)], where.rows[std::size_t(s)])));
        out.finish();
    }
    const data::rollout_set set(dir / "set", {.most_mapped = std::size_t(1 + u.below(3))});
    RC_ASSERT(set.sequences() == sequences);
    RC_ASSERT(set.rows() == where.total());
    RC_ASSERT(set.ignored().empty());
    set.verify();
    const row_bits wanted(given.whole());
    const auto check = [&](data::rollouts some) {
        const Cache c = some.cache<Cache>(prefix);
        const row_bits got(c);
        const auto tokens = some.tokens();
        const auto answers = some.row_tokens();
        RC_ASSERT(index_t(answers.size()) == some.rows());
        for (std::size_t i = 0; i < some.numbers().size(); ++i) {
            const auto s = std::size_t(some.numbers()[i]);
            const auto row = some.row_offsets()[index_t(i)], token = some.token_offsets()[index_t(i)];
            RC_ASSERT(some.row_offsets()[index_t(i) + 1] - row == where.rows[s]);
            RC_ASSERT(some.token_offsets()[index_t(i) + 1] - token == where.tokens[s]);
            for (index_t t = 0; t < where.tokens[s]; ++t)
                RC_ASSERT(tokens[token + t] == where.text[s + std::size_t(t)]);
            for (index_t r = 0; r < where.rows[s]; ++r) {
                RC_ASSERT(got.of(row + r) == wanted.of(where.first[s] + r));
                RC_ASSERT(answers[std::size_t(row + r)] ==
                          where.text[s + std::size_t(where.tokens[s] - where.rows[s] + r)]);
            }
            RC_ASSERT(some.samples()[index_t(i)] == 1000 + index_t(s));
            RC_ASSERT(some.rewards()[index_t(i)] == float(s) / 3);
        }
    };
    check(set.read(0, sequences));
    for (index_t s = 0; s < sequences; ++s) check(set.read(s, 1));
    for (int i = 0; i < 4; ++i) {
        std::vector<index_t> some(std::size_t(u.below(6)));
        for (index_t& s : some) s = u.below(sequences);
        check(set.read(some));
    }
}

template <class Cache>
void round_trips(const char* name, const char* prefix) {
    property(name,
             [prefix] {
                 const auto seed = *rc::gen::arbitrary<std::uint64_t>();
                 round_trip<Cache>(prefix, seed, seed % 3 == 0 ? 0 : 9 + int(seed % 12));
             },
             {.cases = OPD_TEST_SANITIZED ? 10 : 25, .disable_shrink = true});
}

std::vector<std::int32_t> some_tokens(index_t n) {
    std::vector<std::int32_t> v(static_cast<std::size_t>(n));
    std::iota(v.begin(), v.end(), 0);
    return v;
}

/// A set of `sequences` of 3 rows with a support of 2 ids, whose first log q is the sequence's number.
data::writer_settings small_settings() { return {.vocab = 100, .id_bits = 17, .shard_bytes = 400}; }
void add_small(data::rollout_writer& out, index_t begin, index_t end) {
    const auto tokens = some_tokens(5);
    const std::int32_t ids[] = {4, 3, 9, -1, 7, 8};
    for (index_t s = begin; s < end; ++s) {
        const float x = float(s), log_q[] = {x, -1, -2, -3, -4, -5}, tail[] = {-9, -8, -7};
        out.add({.tokens = tokens, .rows = 3, .sample = s},
                teacher::support<std::int32_t>{view(ids, 3, 2), view(log_q, 3, 2), view(tail, 3)});
    }
}
void write_small(const std::string& path, index_t sequences, data::writer_settings settings = small_settings()) {
    data::rollout_writer out(path, settings);
    const float head[] = {1, 2, 3, 4, 5, 6};
    out.add_constant("head", view(head, 3, 2));
    add_small(out, 0, sequences);
    out.finish();
}
/// Reads all that a set has.
void read_whole(const std::string& path) {
    const data::rollout_set set(path);
    set.verify();
    data::rollout_reader reader(set, {.seed = 5});
    while (data::rollouts some = reader.next(3)) {
        const auto c = some.cache<teacher::support<std::int32_t>>();
        REQUIRE(c.ids.rows == some.rows());
        some.tokens();
    }
}

/// No file grows beyond so many bytes.
class file_limit {
public:
    explicit file_limit(rlim_t bytes) {
        ::getrlimit(RLIMIT_FSIZE, &before_);
        rlimit now = before_;
        now.rlim_cur = bytes;
        ::signal(SIGXFSZ, SIG_IGN);
        ::setrlimit(RLIMIT_FSIZE, &now);
    }
    ~file_limit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

private:
    rlimit before_{};
};

index_t resident_kib() {
    std::ifstream in("/proc/self/statm");
    index_t all = 0, resident = 0;
    in >> all >> resident;
    return resident * ::sysconf(_SC_PAGESIZE) / 1024;
}

} // namespace

// --- parts -----------------------------------------------------------------------------------------------------------

TEST_CASE("CRC-32C is that of RFC 3720, by table, instruction, pieces and blocks") {
    CHECK(data::crc32c("123456789") == 0xE3069283u);
    CHECK(data::crc32c(std::string(32, '\0')) == 0x8A9136AAu);
    CHECK(data::crc32c(std::string(32, '\xff')) == 0x62A8AB43u);
    CHECK(data::crc32c("") == 0);
    property("every way gives the same",
             [] {
                 numbers u(*rc::gen::arbitrary<std::uint64_t>());
                 std::string text(std::size_t(u.below(700000)), '\0');
                 for (std::size_t i = 0; i < text.size(); i += 1 + std::size_t(u.below(50)))
                     text[i] = char(u.below(256));
                 const auto bytes = data::detail::bytes_of(text);
                 const std::uint32_t plain = ~data::detail::crc_by_table(~0u, bytes.data(), bytes.size());
                 RC_ASSERT(data::crc32c(text) == plain);
                 const auto cut = std::size_t(u.below(index_t(text.size()) + 1));
                 RC_ASSERT(data::crc32c(bytes.subspan(cut), data::crc32c(bytes.first(cut))) == plain);
                 std::vector<std::uint32_t> blocks;
                 for (std::size_t at = 0; at < bytes.size(); at += data::checksum_block)
                     blocks.push_back(
                         data::crc32c(bytes.subspan(at, std::min(data::checksum_block, bytes.size() - at))));
                 std::vector<std::uint32_t> at_once(blocks.size());
                 data::crc32c_of_blocks(bytes, at_once.data());
                 RC_ASSERT(at_once == blocks);
                 data::block_checksums stream;
                 for (std::size_t at = 0; at < bytes.size();) {
                     const auto n = std::min(bytes.size() - at, std::size_t(u.below(300000)));
                     stream.add(bytes.subspan(at, n));
                     at += n;
                 }
                 RC_ASSERT(stream.finish() == blocks);
             },
             {.cases = 20});
}

TEST_CASE("a fingerprint is FNV-1a of 128 bits") {
    CHECK(data::fingerprint_of("") == "6c62272e07bb014262b821756295c58d");
    CHECK(data::fingerprint_of("a") == "d228cb696f1a8caf78912b704e4a8964"); // of the specification's test vectors
    CHECK(data::fingerprint_of("b", data::fingerprint_of("a")) != data::fingerprint_of("a", data::fingerprint_of("b")));
}

TEST_CASE("packed ids are bits of a stream, the lowest first") {
    property("as bit by bit, one by one and eight at a time", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const int bits = 8 + int(u.below(24));
        std::vector<std::int32_t> ids(std::size_t(u.below(200)));
        for (auto& id : ids) id = std::int32_t(u.below(data::largest_vocabulary(bits) + 1) - 1);
        const std::vector<std::int64_t> wide(ids.begin(), ids.end());
        std::vector<std::byte> stream;
        data::detail::raw_bytes by_eight;
        for (std::size_t at = 0; at < ids.size();) { // in pieces
            const auto n = std::min(ids.size() - at, std::size_t(u.below(60)));
            data::detail::pack_ids("ids", ids.data() + at, index_t(n), bits, stream, index_t(at), false);
            if (u.below(2) == 0)
                data::detail::pack_ids("ids", ids.data() + at, index_t(n), bits, by_eight, index_t(at));
            else
                data::detail::pack_ids("ids", wide.data() + at, index_t(n), bits, by_eight, index_t(at));
            at += n;
        }
        RC_ASSERT(stream.size() == (ids.size() * std::size_t(bits) + 7) / 8);
        RC_ASSERT(std::equal(by_eight.begin(), by_eight.end(), stream.begin(), stream.end()));
        for (std::size_t b = 0; b < stream.size() * 8; ++b) {
            const bool is = (std::to_integer<unsigned>(stream[b / 8]) >> b % 8 & 1u) != 0;
            const std::size_t id = b / std::size_t(bits);
            RC_ASSERT(is == (id < ids.size() && (std::uint32_t(ids[id]) >> b % std::size_t(bits) & 1u) != 0));
        }
        const index_t first = u.below(index_t(ids.size()) + 1), n = u.below(index_t(ids.size()) - first + 1);
        for (const bool eight : {false, data::detail::has_avx2()}) {
            std::vector<std::int64_t> back(std::size_t(n), 77);
            data::detail::unpack_ids<std::int64_t>(stream, first, n, bits, back.data(), eight);
            RC_ASSERT(std::equal(back.begin(), back.end(), ids.begin() + first));
            std::vector<std::int32_t> narrow(std::size_t(n), 77);
            data::detail::unpack_ids<std::int32_t>(stream, first, n, bits, narrow.data(), eight);
            RC_ASSERT(std::equal(narrow.begin(), narrow.end(), ids.begin() + first));
        }
    });
    std::vector<std::byte> stream;
    const std::int32_t large[] = {1, 255};
    refused("ids", [&] { data::detail::pack_ids("ids", large, 2, 8, stream, 0); });
    CHECK(stream.empty());
}

TEST_CASE("floats become half and come back as one by one, whatever the processor has") {
    const auto all = std::views::iota(0u, 65536u); // every half, NaNs too
    std::vector<half> halves(65536 + 3);
    for (const unsigned b : all) halves[b + 3] = half::from_bits(std::uint16_t(b));
    std::vector<float> floats(65536);
    data::detail::halves_to_floats(reinterpret_cast<const std::byte*>(halves.data() + 3), 65536, floats.data());
    bool same = true;
    for (const unsigned b : all)
        same = same && std::bit_cast<std::uint32_t>(floats[b]) == std::bit_cast<std::uint32_t>(float(halves[b + 3]));
    CHECK(same);
    property("of any bits, aligned or not", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        std::vector<float> x(std::size_t(u.below(100)));
        for (float& f : x) { // NaNs, subnormals, halfway cases, and what log-probs are
            const auto bits = std::uint32_t(u.below(index_t{1} << 32));
            f = u.below(3) == 0
                    ? std::bit_cast<float>(bits)
                    : std::bit_cast<float>((bits & 0x8fffe000u) | 0x38000000u | std::uint32_t(u.below(3)) << 12);
        }
        std::vector<std::byte> one(2 * x.size() + 1, std::byte{7}), eight = one;
        data::detail::floats_to_halves(x.data(), index_t(x.size()), one.data() + 1, false);
        data::detail::floats_to_halves(x.data(), index_t(x.size()), eight.data() + 1);
        RC_ASSERT(one == eight);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const half h(x[i]);
            RC_ASSERT(std::memcmp(one.data() + 1 + 2 * i, &h, 2) == 0);
        }
    });
}

TEST_CASE("memory for copies is used again, never by two at once, and outlives its set") {
    const folder dir;
    const auto tokens = some_tokens(64);
    const index_t k = 128;
    std::vector<std::int32_t> ids(std::size_t(64 * k));
    const std::vector<float> log_q(ids.size(), -7);
    {
        data::rollout_writer out(dir / "set", {.id_bits = 17});
        for (std::int32_t s = 0; s < 3; ++s) {
            std::iota(ids.begin(), ids.end(), 1000 * s);
            out.add({.tokens = tokens, .rows = 64},
                    teacher::support<std::int32_t>{view(ids.data(), 64, k), view(log_q.data(), 64, k)});
        }
        out.finish();
    }
    auto set = std::make_unique<data::rollout_set>(dir / "set");
    const auto first_of = [](data::rollouts& r) { return r.matrix<std::int32_t>("support.ids"); };
    const std::int32_t* before = nullptr;
    {
        data::rollouts a = set->read(0, 1);
        before = first_of(a).data;
    }
    data::rollouts b = set->read(1, 1), c = set->read(2, 1);
    const auto of_b = first_of(b), of_c = first_of(c);
    CHECK(of_b.data == before);
    CHECK(of_c.data != before);
    set.reset();
    for (index_t i = 0; i < 64 * k; ++i)
        if (of_b.data[i] != 1000 + i || of_c.data[i] != 2000 + i) FAIL("another's memory");
}

TEST_CASE("an order is a bijection, of seed and epoch alone") {
    for (index_t n = 1; n < 200; ++n) {
        std::set<index_t> seen;
        const data::permutation p(n, 3, 4);
        for (index_t i = 0; i < n; ++i) seen.insert(p(i));
        CHECK(index_t(seen.size()) == n);
        CHECK((*seen.begin() == 0 && *seen.rbegin() == n - 1));
    }
    const index_t many = index_t{1} << 40;
    std::set<index_t> seen;
    const data::permutation p(many, 3, 4);
    for (index_t i = 0; i < 10000; ++i) seen.insert(p(many - 1 - i));
    CHECK(seen.size() == 10000);
    CHECK((*seen.begin() >= 0 && *seen.rbegin() < many));
    // each of 5 things comes first about equally often: 2,000 orders, expected 400 each, deviation 18
    std::vector<int> first(5), last(5);
    for (std::uint64_t epoch = 0; epoch < 2000; ++epoch) {
        ++first[std::size_t(data::permutation(5, 1, epoch)(0))];
        ++last[std::size_t(data::permutation(5, epoch, 1)(4))];
    }
    for (const int count : first) CHECK(std::abs(count - 400) < 90);
    for (const int count : last) CHECK(std::abs(count - 400) < 90);
}

// --- round trips -----------------------------------------------------------------------------------------------------

TEST_CASE("every kind of cache comes back bit for bit") {
    using id = std::int32_t;
    round_trips<teacher::support<id>>("support", "support");
    round_trips<teacher::support<id, half>>("support, half", "s");
    round_trips<teacher::ragged_support<id>>("ragged support", "support");
    round_trips<teacher::samples<id>>("samples", "samples");
    round_trips<teacher::samples<id, bfloat16>>("samples, bfloat16", "samples");
    round_trips<teacher::weighted<id>>("weighted", "weighted");
    round_trips<teacher::weighted<id, double, space::host, double>>("weighted, double", "weighted");
    round_trips<teacher::on_kept_sets<teacher::samples<id>, id>>("kept sets", "samples");
    round_trips<teacher::dense<double>>("dense", "dense");
    round_trips<teacher::hidden<float>>("hidden states or codes", "hidden");
    round_trips<teacher::hidden<bfloat16>>("hidden states or codes, bfloat16", "hidden");
}

TEST_CASE("facts, constants, masks, versions, several caches of a sequence, types that widen") {
    const folder dir;
    const auto tokens = some_tokens(4);
    const std::int64_t ids[] = {1, 5, 2, 6};
    const float logs[] = {-1, -2, -0.3f, -4}, head[] = {1, 2, 3, 4, 5, 6}, bias[] = {7, 8, 9};
    const std::uint8_t mask[] = {1, 0};
    const std::int32_t versions[] = {3, 4};
    teacher::on_policy<teacher::samples<std::int64_t>> drawn{{view(ids, 2, 2), view(logs, 2, 2), view(logs, 2, 2)}};
    drawn.rollout.mode = logprob_mode::raw;
    drawn.rollout.drawn_with = {.temperature = 0.75f, .top_k = 50, .top_p = 0.5f, .min_p = 0.25f};
    teacher::support<std::int64_t> best{view(ids, 2, 2), view(logs, 2, 2)};
    best.chosen_by = teacher::chosen_by::student;
    teacher::hidden<float> states{view(logs, 2, 2), {}, 0.5f};
    states.soft_cap = 30;
    {
        data::rollout_writer out(dir / "set", {.log_probs = data::dtype::f16, .notes = {{"task", "gcd"}}});
        out.add_constant("hidden.w", view(head, 3, 2));
        out.add_constant("hidden.bias", view(bias, 3));
        out.add_named<teacher::on_policy<teacher::samples<std::int64_t>>, teacher::support<std::int64_t>,
                      teacher::support<std::int64_t>, teacher::hidden<float>>(
            {.tokens = tokens, .rows = 2, .mask = mask, .versions = versions}, {"samples", drawn}, {"best", best},
            {"other", best}, {"hidden", states});
        out.finish();
        refused("sequence", [&] { out.add({.tokens = tokens, .rows = 2}); });
    }
    const data::rollout_set set(dir / "set");
    CHECK(set.description().notes.at("task") == "gcd");
    data::rollouts some = set.read(0, 1);
    CHECK(std::equal(mask, mask + 2, some.mask().data));
    CHECK(std::equal(versions, versions + 2, some.versions().data));
    const auto c = some.cache<teacher::samples<std::int64_t, half>>();
    CHECK(c.rollout.mode == logprob_mode::raw);
    CHECK(c.rollout.drawn_with.temperature == 0.75f);
    CHECK(c.rollout.drawn_with.top_k == 50);
    CHECK(c.rollout.drawn_with.top_p == 0.5f);
    CHECK(c.rollout.drawn_with.min_p == 0.25f);
    CHECK(c.log_mu(1, 0) == half(-0.3f));
    CHECK((c.ids(0, 1) == 5 && c.ids(1, 0) == 2));
    CHECK(some.cache<teacher::samples<std::int32_t>>().log_q(1, 0) == float(half(-0.3f)));
    CHECK(some.cache<teacher::samples<std::int32_t, double>>().log_q(1, 0) == double(float(half(-0.3f))));
    const auto b = some.cache<teacher::support<std::int32_t>>("other");
    CHECK(b.chosen_by == teacher::chosen_by::student);
    CHECK(b.log_tail.empty());
    const auto h = some.cache<teacher::hidden<float>>();
    CHECK((h.temperature == 0.5f && h.soft_cap == 30));
    REQUIRE((h.w.rows == 3 && h.w.cols == 2 && h.bias.size == 3));
    CHECK((h.w(2, 1) == 6 && h.bias[2] == 9));
    CHECK(h.x(1, 0) == -0.3f); // no log-prob: kept as it was given
    refused("nothing.ids", [&] { some.cache<teacher::samples<std::int32_t>>("nothing"); });
    refused("samples.log_mu", [&] { some.cache<teacher::samples<std::int32_t, bfloat16>>(); });
    refused("hidden.x", [&] { some.matrix<half>("hidden.x"); });
    refused("support.offsets", [&] { some.cache<teacher::ragged_support<std::int32_t>>(); });
}

TEST_CASE("neighbours in a shard are read where they lie") {
    const folder dir;
    write_small(dir / "set", 40, {.vocab = 100, .shard_bytes = 4000});
    const data::rollout_set set(dir / "set");
    data::rollouts all = set.read(2, 5), one = set.read(3, 1);
    CHECK(all.cache<teacher::support<std::int32_t>>().ids.row(3) ==
          one.cache<teacher::support<std::int32_t>>().ids.data);
    CHECK(all.tokens().data + 5 == one.tokens().data);
}

// --- orders ----------------------------------------------------------------------------------------------------------

TEST_CASE("ranks share an epoch; any number of readers gives the same; a place goes on") {
    const folder dir;
    write_small(dir / "set", 23);
    const data::rollout_set set(dir / "set");
    REQUIRE(set.shards().size() > 3);
    const auto epoch = [&](data::read_order order, index_t most) {
        data::rollout_reader reader(set, order);
        std::vector<index_t> numbers;
        for (auto next = reader.next_numbers(most); !next.empty(); next = reader.next_numbers(most))
            numbers.insert(numbers.end(), next.begin(), next.end());
        CHECK(reader.epoch() == 1);
        return numbers;
    };
    std::set<std::vector<index_t>> orders;
    for (const auto how : {data::shuffle::stored, data::shuffle::shards, data::shuffle::sequences}) {
        const auto whole = epoch({.shuffle = how, .seed = 9}, 4);
        CHECK(whole == epoch({.shuffle = how, .seed = 9}, 1));
        CHECK(std::is_sorted(whole.begin(), whole.end()) == (how == data::shuffle::stored));
        orders.insert(whole), orders.insert(epoch({.shuffle = how, .seed = 10}, 4));
        auto sorted = whole;
        std::sort(sorted.begin(), sorted.end());
        REQUIRE(sorted.size() == 23);
        for (index_t i = 0; i < 23; ++i) CHECK(sorted[std::size_t(i)] == i);
        if (how == data::shuffle::shards) { // each shard's sequences stand together
            const auto begins = set.begins(23);
            std::vector<std::ptrdiff_t> shard;
            for (const index_t s : whole)
                shard.push_back(std::upper_bound(begins.begin(), begins.end(), s) - begins.begin());
            shard.erase(std::unique(shard.begin(), shard.end()), shard.end());
            CHECK(shard.size() == set.shards().size());
        }
        for (const index_t ranks : {2, 5})
            for (const index_t readers : {1, 3}) {
                std::vector<index_t> merged(23, -1);
                for (index_t rank = 0; rank < ranks; ++rank)
                    for (index_t reader = 0; reader < readers; ++reader) {
                        const auto part = epoch({.shuffle = how,
                                                 .seed = 9,
                                                 .rank = rank,
                                                 .ranks = ranks,
                                                 .reader = reader,
                                                 .readers = readers},
                                                2);
                        for (std::size_t i = 0; i < part.size(); ++i)
                            merged[std::size_t(rank + ranks * (reader + readers * index_t(i)))] = part[i];
                    }
                CHECK(merged == whole);
            }
    }
    CHECK(orders.size() == 5); // stored has one

    data::rollout_reader reader(set, {.seed = 2, .rank = 1, .ranks = 2});
    std::vector<std::vector<index_t>> rest;
    std::vector<data::reader_place> places{reader.place()};
    for (int i = 0; i < 12; ++i) rest.push_back(reader.next_numbers(3)), places.push_back(reader.place());
    for (std::size_t from = 0; from < places.size(); ++from) {
        data::rollout_reader again(set, {.seed = 2, .rank = 1, .ranks = 2}, places[from]);
        for (std::size_t i = from; i < rest.size(); ++i) CHECK(again.next_numbers(3) == rest[i]);
    }
    // two readers take over where one was
    data::rollout_reader even(set, {.seed = 2, .rank = 1, .ranks = 2, .reader = 0, .readers = 2}, places[2]);
    data::rollout_reader odd(set, {.seed = 2, .rank = 1, .ranks = 2, .reader = 1, .readers = 2}, places[2]);
    std::vector<index_t> taken;
    for (int i = 0; i < 2; ++i) taken.push_back(even.next_numbers().at(0)), taken.push_back(odd.next_numbers().at(0));
    CHECK(taken[0] == rest[2][0]);
    CHECK(taken[1] == rest[2][1]);
    CHECK(taken[2] == rest[2][2]);
    CHECK(taken[3] == rest[3].at(0));
    CHECK(even.place() == odd.place());
    CHECK(even.place().next == places[2].next + 4);

    refused("order.rank", [&] { data::rollout_reader(set, {.rank = 2, .ranks = 2}); });
    refused("order.reader", [&] { data::rollout_reader(set, {.reader = -1}); });
    refused("place.next", [&] { data::rollout_reader(set, {}, {.next = 24}); });
    refused("place.sequences", [&] { data::rollout_reader(set, {}, {.sequences = 24}); });
}

TEST_CASE("a set that grows keeps the order of the epoch that is running") {
    const folder dir;
    write_small(dir / "set", 10);
    data::reader_place place;
    std::vector<index_t> rest;
    {
        const data::rollout_set set(dir / "set");
        data::rollout_reader reader(set, {.seed = 4});
        reader.next_numbers(4);
        place = reader.place();
        rest = reader.next_numbers(100);
    }
    {
        data::rollout_writer more(dir / "set", small_settings());
        CHECK(more.sequences() == 10);
        add_small(more, 10, 15);
        CHECK(more.sequences() == 15);
        more.flush(); // whole until then, and from here on until the writer finishes again not
        refused("index.jsonl", [&] { data::rollout_set(dir / "set"); });
        more.finish();
    }
    const data::rollout_set set(dir / "set");
    CHECK(set.sequences() == 15);
    data::rollout_reader reader(set, {.seed = 4}, place);
    CHECK(reader.next_numbers(100) == rest);
    CHECK(reader.next_numbers(100).empty());
    CHECK(reader.next_numbers(100).size() == 15);
}

TEST_CASE("threads read one set at once") {
    const folder dir;
    write_small(dir / "set", 60);
    const data::rollout_set set(dir / "set", {.most_mapped = 2});
    std::vector<std::vector<float>> got(4);
    std::vector<std::thread> team;
    for (index_t t = 0; t < 4; ++t)
        team.emplace_back([&, t] {
            data::rollout_reader reader(set, {.seed = 1, .reader = t, .readers = 4});
            while (data::rollouts one = reader.next())
                got[std::size_t(t)].push_back(one.cache<teacher::support<std::int32_t>>().log_q(0, 0));
        });
    for (auto& t : team) t.join();
    data::rollout_reader reader(set, {.seed = 1});
    for (std::size_t i = 0; i < 60; ++i) CHECK(got[i % 4].at(i / 4) == float(reader.next_numbers().at(0)));
}

// --- crashes and damage ----------------------------------------------------------------------------------------------

TEST_CASE("a writer that was killed leaves what it had indexed, and another goes on to the same files") {
    const folder dir;
    write_small(dir / "whole", 20);
    const auto names = files_of(dir / "whole");
    for (int how = 0; how < 4; ++how) {
        const std::string path = dir / ("killed" + std::to_string(how));
        index_t kept = 0;
        {
            data::rollout_writer out(path, small_settings());
            const float head[] = {1, 2, 3, 4, 5, 6};
            out.add_constant("head", view(head, 3, 2));
            add_small(out, 0, 11);
            CHECK(out.kept_sequences() < 11);
        } // what it had collected is lost
        kept = data::rollout_set(path, {.unfinished = true}).sequences();
        REQUIRE((kept > 0 && kept < 11));
        const std::string shard =
            data::detail::shard_name(data::rollout_set(path, {.unfinished = true}).shards().size());
        const std::string index = path + "/index.jsonl";
        std::string named;
        if (how == 1) write_all(path + "/" + (named = shard + ".tmp"), "half");                   // while it wrote
        if (how == 2) fs::copy(path + "/shard-000000.safetensors", path + "/" + (named = shard)); // before the index
        if (how == 3) write_all(index, read_all(index) + "{\"bytes\":12"), named = "index.jsonl"; // in its line
        refused("index.jsonl", [&] { read_whole(path); });
        const data::rollout_set cut(path, {.unfinished = true});
        CHECK(cut.sequences() == kept);
        CHECK_FALSE(cut.finished());
        cut.verify();
        REQUIRE(cut.ignored().size() == (how > 0 ? 1 : 0));
        if (how > 0) CHECK(cut.ignored()[0].find(named) != std::string::npos);
        data::rollout_writer again(path, small_settings());
        CHECK(again.sequences() == kept);
        REQUIRE(again.recovered().size() == (how > 0 ? 1 : 0));
        if (how > 0) CHECK(again.recovered()[0].find(named) != std::string::npos);
        CHECK_THROWS_WITH_AS(data::rollout_writer(path, small_settings()), doctest::Contains("another writer has it"),
                             error);
        add_small(again, kept, 20);
        again.finish();
        CHECK(files_of(path) == names);
        for (const std::string& name : names)
            CHECK_MESSAGE(read_all(path + "/" + name) == read_all(dir / ("whole/" + name)), name);
    }
}

TEST_CASE("a disk that takes no more ends the writer, and what was indexed stays") {
    const folder dir;
    write_small(dir / "whole", 20);
    const std::string path = dir / "set";
    {
        data::rollout_writer out(path, small_settings());
        const float head[] = {1, 2, 3, 4, 5, 6};
        out.add_constant("head", view(head, 3, 2));
        add_small(out, 0, 6);
        out.flush();
        REQUIRE(out.kept_sequences() == 6);
        const file_limit full(200);
        CHECK_THROWS_AS((add_small(out, 6, 30), out.finish()), error);
        refused("sequence", [&] { add_small(out, 30, 31); });
        CHECK_THROWS_AS(out.finish(), error);
    }
    const data::rollout_set cut(path, {.unfinished = true});
    CHECK(cut.sequences() == 6);
    CHECK(cut.ignored().empty());
    data::rollout_writer again(path, small_settings());
    add_small(again, 6, 20);
    again.finish();
    for (const std::string& name : files_of(dir / "whole"))
        CHECK_MESSAGE(read_all(path + "/" + name) == read_all(dir / ("whole/" + name)), name);
}

TEST_CASE("every flipped bit and every cut is found, and the file named") {
    const folder dir;
    write_small(dir / "set", 20);
    read_whole(dir / "set");
    const auto names = files_of(dir / "set");
    REQUIRE(names.size() > 4);
    numbers u(20261126);
    std::map<std::string, std::string> whole;
    for (const std::string& name : names) whole[name] = read_all(dir / ("set/" + name));
    int found = 0;
    for (int i = 0; i < 400; ++i) {
        const std::string& name = names[std::size_t(i) % names.size()];
        std::string bytes = whole[name];
        if (i < 200)
            bytes[std::size_t(u.below(index_t(bytes.size())))] ^= char(1 << u.below(8));
        else
            bytes.resize(std::size_t(u.below(index_t(bytes.size()))));
        write_all(dir / ("set/" + name), bytes);
        try {
            read_whole(dir / "set");
            FAIL_CHECK(name, ": damage ", i, " was not found");
        } catch (const invalid_input& e) {
            const bool is_named = e.argument.find(name) != std::string::npos;
            CHECK_MESSAGE(is_named, name, " is not named by: ", std::string(e.what()));
            found += is_named;
        }
        write_all(dir / ("set/" + name), whole[name]);
    }
    CHECK(found == 400);
    // cut between two lines, too: the line that says that the set is whole is missing
    const std::string index = whole["index.jsonl"];
    for (std::size_t at = index.find('\n'); at + 1 < index.size(); at = index.find('\n', at + 1)) {
        write_all(dir / "set/index.jsonl", index.substr(0, at + 1));
        CHECK(refused("index.jsonl", [&] { read_whole(dir / "set"); }).find("not finished") != std::string::npos);
    }
    write_all(dir / "set/index.jsonl", index + "{\"bytes\":"); // somebody began to add to it
    refused("index.jsonl", [&] { read_whole(dir / "set"); });
    CHECK(data::rollout_set(dir / "set", {.unfinished = true}).sequences() == 20);
    // a line taken out, two exchanged
    std::vector<std::string> lines;
    for (std::size_t at = 0; at < index.size();) {
        const std::size_t end = index.find('\n', at) + 1;
        lines.push_back(index.substr(at, end - at)), at = end;
    }
    REQUIRE(lines.size() > 3);
    write_all(dir / "set/index.jsonl", index.substr(lines[0].size()));
    refused("index.jsonl, line 1", [&] { read_whole(dir / "set"); });
    write_all(dir / "set/index.jsonl",
              lines[0] + lines[2] + lines[1] + index.substr((lines[0] + lines[1] + lines[2]).size()));
    refused("index.jsonl, line 2", [&] { read_whole(dir / "set"); });
}

TEST_CASE("shards of elsewhere, missing ones, other formats and versions are named") {
    const folder dir;
    write_small(dir / "set", 20);
    auto other = small_settings();
    other.vocab = 99;
    write_small(dir / "other", 20, other);
    const std::string shard = "set/shard-000001.safetensors", good = read_all(dir / shard);
    const auto expect = [&](const std::string& text) {
        const std::string said = refused("shard-000001.safetensors", [&] { read_whole(dir / "set"); });
        CHECK_MESSAGE(said.find(text) != std::string::npos, said);
    };
    write_all(dir / shard, read_all(dir / "set/shard-000002.safetensors"));
    expect("another file");
    write_all(dir / shard, std::string(good.size(), 'x'));
    expect("another file");
    write_all(dir / shard, good + "x");
    expect("another file");
    fs::remove(dir / shard);
    expect("is missing");
    fs::create_directory(dir / shard);
    expect("is missing");
    fs::remove(dir / shard);
    write_all(dir / shard, good);
    read_whole(dir / "set");
    const std::string manifest = read_all(dir / "set/set.json");
    write_all(dir / "set/set.json", read_all(dir / "other/set.json"));
    refused("index.jsonl, line 1", [&] { read_whole(dir / "set"); }); // the index goes on from set.json's checksum
    const auto resealed = [&](const std::string& from, const std::string& to) {
        std::string text = manifest.substr(0, manifest.rfind(",\"crc32c\":"));
        text.replace(text.find(from), from.size(), to);
        write_all(dir / "set/set.json",
                  text + ",\"crc32c\":\"" + data::detail::hexadecimal(data::crc32c(text), 8) + "\"}\n");
    };
    resealed("\"version\":1", "\"version\":2");
    CHECK(refused("set.json", [&] { read_whole(dir / "set"); }).find("format 2") != std::string::npos);
    resealed("opd.rollouts", "opd.whatever");
    refused("set.json", [&] { read_whole(dir / "set"); });
    resealed("\"support.log_q\"", "\"support.log_p\"");
    refused("index.jsonl, line 1", [&] { read_whole(dir / "set"); });
    fs::remove(dir / "set/set.json");
    refused("set.json", [&] { read_whole(dir / "set"); });
    refused("set.json", [&] { data::rollout_writer(dir / "set", small_settings()); });
    refused("nowhere/set.json", [&] { read_whole(dir / "nowhere"); });
}

TEST_CASE("a header that claims too much is refused before anything is reserved for it") {
    const auto read = [](std::string json, std::size_t data, std::uint64_t size = 0) {
        if (size == 0) size = json.size();
        const std::string file = std::string(reinterpret_cast<const char*>(&size), 8) + json + std::string(data, 'x');
        return data::read_safetensors(data::detail::bytes_of(file), "f.safetensors");
    };
    const std::string good = R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}})";
    const auto h = read(good, 8);
    CHECK(h.metadata.at("k") == "v");
    REQUIRE(h.find("a") != nullptr);
    CHECK(h.find("a")->end == 8);
    const auto bad = [&](std::string json, std::size_t data, const std::string& text, std::uint64_t size = 0) {
        const std::string said = refused("f.safetensors", [&] { read(json, data, size); });
        CHECK_MESSAGE(said.find(text) != std::string::npos, said);
    };
    bad(good, 7, "was cut");
    bad(good, 9, "has a tail");
    bad(good, 8, "in its header", 9999);
    bad(good, 8, "more than 16 MiB", std::uint64_t{1} << 62);
    bad("[1,2]", 0, "no object");
    bad("{\"a\":", 0, "no JSON");
    bad(std::string(100000, '['), 0, "levels");
    bad(R"({"a":{"dtype":"I32","shape":[3],"data_offsets":[0,8]}})", 8, "a shape of 12 bytes");
    bad(R"({"a":{"dtype":"I32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}})", 8, "can be counted");
    bad(R"({"a":{"dtype":"I32","shape":[-2],"data_offsets":[0,8]}})", 8, "no count");
    bad(R"({"a":{"dtype":"I32","shape":[2.0],"data_offsets":[0,8]}})", 8, "no count");
    bad(R"({"a":{"dtype":"I99","shape":[2],"data_offsets":[0,8]}})", 8, "of a type");
    bad(R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[8,0]}})", 8, "data_offsets 8 to 0");
    bad(R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[8,16]}})", 16, "does not begin");
    bad(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}})",
        12, "does not begin");
    bad(R"({"a":7})", 0, "no object");
}

TEST_CASE("fingerprints: one teacher, the run's; or by name") {
    const data::fingerprints set{.sft_teacher = "A", .scoring_teacher = "A", .tokenizer = "T", .reference_policy = "R"};
    CHECK(data::check_fingerprints(set, set).empty());
    CHECK(data::check_fingerprints(set, {.tokenizer = "T"}).size() == 3); // unknown to the run
    data::fingerprints two = set;
    two.scoring_teacher = "B";
    CHECK(refused("fingerprints.scoring_teacher", [&] { data::check_fingerprints(two, two); }).find("allow.teachers") !=
          std::string::npos);
    CHECK(data::check_fingerprints(two, two, {.teachers = true}).size() == 1);
    using member = std::string data::fingerprints::*;
    const std::pair<const char*, member> all[] = {{"sft_teacher", &data::fingerprints::sft_teacher},
                                                  {"scoring_teacher", &data::fingerprints::scoring_teacher},
                                                  {"tokenizer", &data::fingerprints::tokenizer},
                                                  {"reference_policy", &data::fingerprints::reference_policy}};
    for (const auto& [name, which] : all) {
        data::fingerprints run = set;
        run.*which = "X";
        const std::string said = refused("fingerprints."s + name, [&] { data::check_fingerprints(set, run); });
        CHECK(said.find("allow."s + name) != std::string::npos);
        data::allowed_mismatches allow;
        (name == "sft_teacher"s       ? allow.sft_teacher
         : name == "scoring_teacher"s ? allow.scoring_teacher
         : name == "tokenizer"s       ? allow.tokenizer
                                      : allow.reference_policy) = true;
        CHECK(data::check_fingerprints(set, run, allow).size() == 1);
    }
    const folder dir;
    auto settings = small_settings();
    settings.fingerprints = set;
    write_small(dir / "set", 2, settings);
    CHECK(data::rollout_set(dir / "set").check(set).empty());
    CHECK(data::rollout_set(dir / "set").description().prints == set);
    settings.fingerprints.tokenizer = "X";
    refused("set.json", [&] { data::rollout_writer(dir / "set", settings); });
}

TEST_CASE("a sequence that does not fit is refused, and the set is as before") {
    const folder dir;
    const auto tokens = some_tokens(5);
    const std::int32_t ids[] = {1, 2, 3, 4, 5, 6};
    const float log_q[] = {-1, -2, -3, -4, -5, -6};
    using support = teacher::support<std::int32_t>;
    refused("settings.id_bits", [&] { data::rollout_writer(dir / "set", {.id_bits = 7}); });
    refused("settings.id_bits", [&] { data::rollout_writer(dir / "set", {.vocab = 131072, .id_bits = 17}); });
    refused("settings.log_probs", [&] { data::rollout_writer(dir / "set", {.log_probs = data::dtype::i32}); });
    data::rollout_writer out(dir / "set", {.vocab = 6});
    refused("sequences", [&] { out.finish(); });
    refused("sequence.rows", [&] { out.add({.tokens = tokens}); });
    refused("support.ids", [&] { // 6 is no id
        out.add({.tokens = tokens, .rows = 3}, support{view(ids, 3, 2), view(log_q, 3, 2)});
    });
    const support good{view(ids, 2, 2), view(log_q, 2, 2)};
    out.add({.tokens = tokens, .rows = 2}, good);
    refused("sequence.rows", [&] { out.add({.tokens = tokens, .rows = 6}, good); });
    refused("support.ids", [&] { out.add({.tokens = tokens, .rows = 1}, good); });
    refused("support.ids", [&] {
        out.add({.tokens = tokens, .rows = 2}, support{view(ids, 2, 1), view(log_q, 2, 1)});
    });
    refused("caches", [&] { out.add({.tokens = tokens, .rows = 2}); });
    refused("support.ids", [&] { out.add({.tokens = tokens, .rows = 2}, good, good); });
    refused("mask", [&] {
        const std::uint8_t mask[] = {1};
        out.add({.tokens = tokens, .rows = 2, .mask = mask}, good);
    });
    support by_student = good;
    by_student.chosen_by = teacher::chosen_by::student;
    refused("support.chosen_by", [&] { out.add({.tokens = tokens, .rows = 2}, by_student); });
    support longer = good;
    longer.log_tail = view(log_q, 2);
    refused("support.log_tail", [&] { out.add({.tokens = tokens, .rows = 2}, longer); });
    const std::int32_t offsets[] = {0, 2, 1};
    refused("support.offsets", [&] {
        data::rollout_writer(dir / "ragged")
            .add({.tokens = tokens, .rows = 2},
                 teacher::ragged_support<std::int32_t>{view(ids, 2), view(log_q, 2), view(offsets, 3)});
    });
    refused("support.log_q", [&] {
        data::rollout_writer(dir / "ragged")
            .add({.tokens = tokens, .rows = 1},
                 teacher::ragged_support<std::int32_t>{view(ids, 2), view(log_q, 1), view(offsets, 2)});
    });
    refused("constant", [&] { out.add_constant("constant", view(log_q, 2, 3)); });
    CHECK(out.sequences() == 1);
    out.add({.tokens = view(tokens.data(), 1)}, support{view(ids, 0, 2), view(log_q, 0, 2)}); // no rows
    out.finish();
    const data::rollout_set set(dir / "set");
    CHECK(set.sequences() == 2);
    CHECK(set.rows() == 2);
    refused("numbers", [&] { set.read(std::vector<index_t>{2}); });
    refused("first", [&] { set.read(1, 2); });
}

TEST_CASE("memory is a shard's, whatever the size of the set" * doctest::skip(OPD_TEST_SANITIZED)) {
    // 64 MiB of a support of 64 in shards of 1 MiB
    const folder dir;
    const index_t rows = 256, k = 64, sequences = 64 * 8;
    const auto tokens = some_tokens(rows);
    std::vector<std::int32_t> ids(std::size_t(rows * k));
    std::vector<float> log_q(ids.size(), -5);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(i * 7 % 100000);
    const index_t before = resident_kib();
    index_t most = before;
    {
        data::rollout_writer out(dir / "set", {.shard_bytes = std::size_t{1} << 20});
        for (index_t s = 0; s < sequences; ++s) {
            out.add({.tokens = tokens, .rows = rows},
                    teacher::support<std::int32_t>{view(ids.data(), rows, k), view(log_q.data(), rows, k)});
            most = std::max(most, resident_kib());
        }
        out.finish();
    }
    const data::rollout_set set(dir / "set", {.most_mapped = 4});
    CHECK(set.tokens() == rows * sequences);
    data::rollout_reader reader(set, {.seed = 1});
    double sum = 0;
    while (data::rollouts some = reader.next(2)) {
        const auto c = some.cache<teacher::support<std::int32_t>>();
        for (index_t r = 0; r < c.ids.rows; ++r) sum += c.log_q(r, 0);
        most = std::max(most, resident_kib());
    }
    CHECK(sum == -5.0 * double(set.rows()));
    CHECK(most - before < 20 * 1024);
}
