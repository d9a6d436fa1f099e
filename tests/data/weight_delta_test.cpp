// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
//
// Deltas of weights: whatever changed comes back to the bit, in place or in other memory; a chain holds and a missed
// base is named; no flipped bit, cut or crafted body changes weights unseen, and what is refused in place changes none;
// checksums by their definition; sizes and memory.
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/sanitized.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <opd/data/weight_delta.hpp>
#include <opd/element.hpp>
#include <string>
#include <sys/resource.h>
#include <vector>

using namespace opd;
using namespace opd::test;
using data::weight_type;

namespace {

struct model {
    struct one {
        std::string name;
        weight_type type;
        std::vector<std::byte> bytes;
        bool operator==(const one&) const = default;
    };
    std::vector<one> all;

    std::vector<data::weight_part> parts() const {
        std::vector<data::weight_part> r;
        for (const one& p : all) r.push_back({p.name, p.type, p.bytes});
        return r;
    }
    std::vector<data::weight_target> targets() {
        std::vector<data::weight_target> r;
        for (one& p : all) r.push_back({p.name, p.type, p.bytes});
        return r;
    }
    data::weight_version version(std::int64_t number) const { return data::version_of(parts(), number); }
    bool operator==(const model&) const = default;
};

void set_word(model::one& p, std::size_t i, std::uint32_t bits) {
    std::memcpy(p.bytes.data() + i * size_of(p.type), &bits, size_of(p.type));
}
std::uint32_t word_of(const model::one& p, std::size_t i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, p.bytes.data() + i * size_of(p.type), size_of(p.type));
    return bits;
}
std::size_t elements(const model::one& p) { return p.bytes.size() / size_of(p.type); }

std::uint32_t random_word(numbers& u, weight_type t) {
    const auto any = std::uint32_t(u.below(index_t{1} << 32));
    const bool wide = t == weight_type::f32;
    switch (u.below(6)) {
    case 0: // zeros of either sign, infinities, NaNs with payloads
        return wide ? std::uint32_t(u.below(2)) << 31 | (u.below(2) == 0 ? 0 : 0x7F800000u | any % 4096)
                    : std::uint32_t(u.below(2)) << 15 | (u.below(2) == 0 ? 0 : 0x7F80u | any % 128);
    case 1:
        return any;
    default: {
        const auto x = std::bit_cast<std::uint32_t>(float(0.02 * u.normal()));
        return wide ? x : x >> 16;
    }
    }
}
model random_model(numbers& u, std::size_t parts, std::size_t most) {
    model m;
    for (std::size_t i = 0; i < parts; ++i) {
        const weight_type types[] = {weight_type::bytes, weight_type::bf16, weight_type::f16, weight_type::f32};
        const weight_type t = types[u.below(4)];
        const std::size_t sizes[] = {0, 1, 63, 64, 65, std::size_t(u.below(5000)), std::size_t(u.below(index_t(most)))};
        model::one p{"layers." + std::to_string(i) + ".weight", t, {}};
        p.bytes.resize(sizes[u.below(7)] * size_of(t));
        for (std::size_t e = 0; e < elements(p); ++e) set_word(p, e, random_word(u, t));
        m.all.push_back(std::move(p));
    }
    return m;
}
/// As training, and what is not training, would change them.
void change(numbers& u, model& m) {
    for (model::one& p : m.all) {
        const std::size_t n = elements(p);
        if (n == 0) continue;
        const auto kind = u.below(9);
        const auto move = [&](std::size_t i) {
            const std::uint32_t x = word_of(p, i);
            const std::uint32_t words[] = {x + 1, x - 1, x ^ (p.type == weight_type::f32 ? 0x80000000u : 0x8000u),
                                           random_word(u, p.type)};
            set_word(p, i, words[kind == 8 ? 3 : u.below(4)]);
        };
        if (kind == 1) move(std::size_t(u.below(index_t(n)))); // kind 0: nothing
        if (kind == 2) move(0), move(n - 1);
        if (kind == 3 || kind == 8)
            for (std::size_t i = 0; i < n; ++i) move(i);
        if (kind == 4)
            for (std::size_t i = 0; i < n; i += 2) move(i);
        if (kind == 5) { // runs
            for (std::size_t i = std::size_t(u.below(300)); i < n; i += 1000)
                for (std::size_t j = i; j < std::min(n, i + 90); ++j) move(j);
        }
        if (kind >= 6 && kind < 8)
            for (std::size_t i = 0; i < n; ++i)
                if (u.below(kind == 6 ? 50 : 900) == 0) move(i);
    }
}

template <class F>
std::string refused(F&& f) {
    try {
        f();
    } catch (const invalid_input& e) {
        return e.what();
    }
    return {};
}

/// The messages one after the other, applied one after the other.
data::weight_version in_messages(const data::weight_version& held, const model& was, const model& is, std::int64_t next,
                                 std::vector<std::byte>& all, model& to) {
    data::weight_delta_writer w(held, next);
    const auto keep = [&](std::span<const std::byte> m) {
        all.insert(all.end(), m.begin(), m.end());
        return m;
    };
    data::weight_delta_reader r(held, keep(w.begin()));
    const auto a = was.parts(), b = is.parts();
    const auto c = to.targets();
    for (std::size_t i = 0; i < a.size(); ++i) {
        const auto p = r.look(keep(held.number < 0 ? w.add(b[i]) : w.add(a[i], b[i])));
        r.apply(p, c[i].bytes, c[i]);
    }
    const auto made = r.end(keep(w.end()));
    CHECK(made == w.made());
    return made;
}

} // namespace

TEST_CASE("what changed comes back to the bit, in place, elsewhere, whole and part by part") {
    property("deltas", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const model was = random_model(u, std::size_t(u.below(4)), u.below(8) == 0 ? 150000 : 9000);
        model is = was;
        change(u, is);
        const auto held = was.version(3);
        const auto bytes = data::weight_delta(held, was.parts(), is.parts(), 5);
        model in_place = was, other = was, messages = was;
        for (model::one& p : other.all) std::fill(p.bytes.begin(), p.bytes.end(), std::byte{0xA5});
        const auto made = data::apply_weight_delta(bytes, held, in_place.targets());
        RC_ASSERT(in_place == is);
        RC_ASSERT(made == is.version(5));
        RC_ASSERT(data::apply_weight_delta(bytes, held, was.parts(), other.targets()) == made);
        RC_ASSERT(other == is);
        std::vector<std::byte> written;
        RC_ASSERT(in_messages(held, was, is, 5, written, messages) == made);
        RC_ASSERT(messages == is);
        RC_ASSERT(written == bytes);
        std::size_t most = 72;
        for (const model::one& p : was.all)
            most += p.bytes.size() + p.name.size() + 64 + 16 * (elements(p) / data::weight_block + 1);
        RC_ASSERT(bytes.size() <= most);

        const auto whole = data::whole_weights(is.parts(), 5);
        model late = other;
        for (model::one& p : late.all) std::fill(p.bytes.begin(), p.bytes.end(), std::byte{0});
        RC_ASSERT(data::apply_weight_delta(whole, {}, {}, late.targets()) == made);
        RC_ASSERT(late == is);
    });
}

TEST_CASE("ranks ascend as the floats do, and every step has its code") {
    using namespace data::detail;
    for (std::uint32_t b = 0; b < 65536; ++b) {
        const auto x = std::uint16_t(b);
        REQUIRE(of_rank(rank_of(x)) == x);
        REQUIRE(step_of(code_of(x)) == x);
        const float f = opd::detail::bfloat16_to_float(x),
                    after = opd::detail::bfloat16_to_float(of_rank(std::uint16_t(rank_of(x) + 1)));
        if (!std::isnan(f) && !std::isnan(after)) REQUIRE((f < after || (f == 0 && after == 0)));
    }
    CHECK(rank_of(std::uint16_t{0x8000}) + 1 == rank_of(std::uint16_t{0})); // -0, +0
    CHECK(code_of(std::uint16_t(-1)) == 0);
    CHECK(code_of(std::uint16_t{1}) == 1);
    CHECK(code_of(std::uint16_t(-2)) == 2);
    numbers u(7);
    for (int i = 0; i < 100000; ++i) {
        const auto x = std::uint32_t(u.below(index_t{1} << 32));
        REQUIRE(of_rank(rank_of(x)) == x);
        REQUIRE(step_of(code_of(x)) == x);
    }
}

TEST_CASE("large parts are copied past the caches to any place, and long gaps are written") {
    numbers u(18);
    const std::size_t n = (data::detail::past_caches::from >> 1) + 33;
    model was{{{"w", weight_type::bf16, std::vector<std::byte>(2 * n)}}};
    for (std::size_t i = 0; i < n; ++i) set_word(was.all[0], i, std::uint32_t(i * 2654435761u >> 16));
    model is = was;
    for (std::size_t i = 5; i < n; i += std::size_t(1 + u.below(i < n / 2 ? 90 : 40000)))
        set_word(is.all[0], i, word_of(was.all[0], i) + 1);
    const auto held = was.version(1);
    const auto bytes = data::weight_delta(held, was.parts(), is.parts(), 2);
    std::vector<std::byte> memory(2 * n + 128);
    const auto place = reinterpret_cast<std::uintptr_t>(memory.data());
    for (const std::size_t off : {0, 16, 2}) {
        const auto to = std::span(memory).subspan((64 - place % 64) % 64 + off, 2 * n);
        const data::weight_target target{"w", weight_type::bf16, to};
        CHECK(data::apply_weight_delta(bytes, held, was.parts(), std::span(&target, 1)) == is.version(2));
        CHECK(std::equal(to.begin(), to.end(), is.all[0].bytes.begin()));
    }
}

TEST_CASE("a chain of versions; a base that was missed is named, and nothing is written") {
    numbers u(11);
    std::vector<model> versions = {random_model(u, 3, 3000)};
    versions[0].all.push_back({"odd", weight_type::bf16, std::vector<std::byte>(2000)});
    std::vector<data::weight_version> made = {versions[0].version(0)};
    std::vector<std::vector<std::byte>> deltas;
    for (std::int64_t v = 1; v < 6; ++v) {
        versions.push_back(versions.back());
        change(u, versions.back());
        set_word(versions.back().all[3], std::size_t(v), 0x3F80); // so that no two are equal
        deltas.push_back(
            data::weight_delta(made.back(), versions[std::size_t(v) - 1].parts(), versions.back().parts(), v));
        made.push_back(versions.back().version(v));
    }
    model worker = versions[0];
    auto held = made[0];
    for (std::size_t v = 0; v < 5; ++v) {
        for (std::size_t wrong = 0; wrong < 5; ++wrong) {
            if (wrong == v) continue;
            CHECK(refused([&] { data::apply_weight_delta(deltas[wrong], held, worker.targets()); }) ==
                  "opd: delta: goes from version " + std::to_string(wrong) + ", version " + std::to_string(v) +
                      " is held: the base was missed");
            REQUIRE(worker == versions[v]);
        }
        held = data::apply_weight_delta(deltas[v], held, worker.targets());
        REQUIRE(held == made[v + 1]);
        REQUIRE(worker == versions[v + 1]);
    }
    CHECK_THROWS_AS(data::apply_weight_delta(deltas[0], {}, worker.targets()), data::missed_base);
    CHECK(refused([&] { data::apply_weight_delta(deltas[0], {}, worker.targets()); }).find("none is held") !=
          std::string::npos);
    // of that number, and other bits: what is said of them, and what is there
    worker = versions[0];
    set_word(worker.all[3], 77, 0x1234);
    CHECK(refused([&] {
              data::apply_weight_delta(deltas[0], worker.version(0), worker.targets());
          }).find("another checksum") != std::string::npos);
    const model before = worker;
    CHECK(refused([&] { data::apply_weight_delta(deltas[0], made[0], worker.targets()); }).find("part 'odd'") !=
          std::string::npos);
    CHECK(worker == before); // the parts before it were written, and are what they were

    // altered where nothing changes
    model two{{{"w", weight_type::bf16, std::vector<std::byte>(2 * 70000)}}}, next = two, altered = two;
    set_word(next.all[0], 5, 1), set_word(altered.all[0], 69999, 1);
    const auto bytes = data::weight_delta(two.version(0), two.parts(), next.parts(), 1);
    const model as_it_was = altered;
    CHECK(refused([&] { data::apply_weight_delta(bytes, two.version(0), altered.targets()); }) ==
          "opd: delta, part 'w': goes from other weights than are held");
    CHECK(altered == as_it_was);
}

TEST_CASE("the lines of docs/weights.md") {
    numbers u(18);
    const model before = random_model(u, 3, 3000);
    model after = before, mine = before, other = before;
    change(u, after);
    const auto was = before.parts(), is = after.parts();
    const auto parts = mine.targets(), elsewhere = other.targets();
    {
        data::weight_version held = data::version_of(was, 7); // later what the last call returned
        const std::vector<std::byte> bytes = data::weight_delta(held, was, is, 8);
        const auto now = data::apply_weight_delta(bytes, held, parts); // in place
        data::apply_weight_delta(bytes, held, was, elsewhere);         // the same into other memory
        CHECK(mine == after);
        CHECK(other == after);
        held = now;
        mine = before;
        const auto targets = mine.targets();
        // who joins late, or missed a base
        held = data::apply_weight_delta(data::whole_weights(is, 8), {}, {}, targets);
        CHECK(held == now);
        CHECK(mine == after);
    }
    mine = before;
    const auto targets = mine.targets();
    const data::weight_version held = data::version_of(was, 7);
    std::vector<std::vector<std::byte>> sent;
    const auto send = [&](std::span<const std::byte> m) { sent.emplace_back(m.begin(), m.end()); };
    data::weight_delta_writer w(held, 8);
    send(w.begin());
    for (std::size_t i = 0; i < is.size(); ++i) send(w.add(was[i], is[i]));
    send(w.end());
    std::size_t next = 0;
    const auto receive = [&]() -> std::span<const std::byte> { return sent[next++]; };
    data::weight_delta_reader r(held, receive());
    for (const data::weight_target& t : targets) r.apply(r.look(receive()), t.bytes, t); // in place
    const data::weight_version now = r.end(receive());
    CHECK(now == w.made());
    CHECK(mine == after);
}

TEST_CASE("a writer that goes on writes what a new one would, without the base's checksums") {
    numbers u(19);
    model now = random_model(u, 4, 150000), worker = now;
    auto held = now.version(0);
    data::weight_delta_writer goes_on(held, 1);
    const auto all_of = [](data::weight_delta_writer& w, const model& was, const model& is) {
        std::vector<std::byte> all;
        const auto add = [&](std::span<const std::byte> m) { all.insert(all.end(), m.begin(), m.end()); };
        add(w.begin());
        for (std::size_t i = 0; i < is.all.size(); ++i) add(w.add(was.parts()[i], is.parts()[i]));
        add(w.end());
        return all;
    };
    for (std::int64_t v = 1; v < 6; ++v) {
        const model was = now;
        change(u, now);
        const auto bytes = all_of(goes_on, was, now);
        CHECK(bytes == data::weight_delta(held, was.parts(), now.parts(), v));
        CHECK(goes_on.made() == now.version(v));
        held = data::apply_weight_delta(bytes, held, worker.targets());
        CHECK(worker == now);
        goes_on.go_on(v + 1);
    }
    model altered = now, next = now; // since it was made
    for (std::size_t i = 0; i < 4; ++i)
        if (!now.all[i].bytes.empty())
            altered.all[i].bytes[0] ^= std::byte{1}, next.all[i].bytes.back() ^= std::byte{2};
    REQUIRE(altered.all != now.all);
    const auto bytes = all_of(goes_on, altered, next);
    CHECK(refused([&] { data::apply_weight_delta(bytes, held, worker.targets()); }).find("makes other weights") !=
          std::string::npos);
    CHECK(worker == now);
    goes_on.go_on(7);
    CHECK_THROWS_AS(all_of(goes_on, {{now.all[1], now.all[0], now.all[2], now.all[3]}}, now), invalid_input);
}

TEST_CASE("parts: a rank's own slice of a shard has deltas of its own") {
    numbers u(12);
    model::one whole{"w", weight_type::bf16, std::vector<std::byte>(2 * 40000)};
    for (std::size_t i = 0; i < 40000; ++i) set_word(whole, i, random_word(u, whole.type));
    model was{{whole}}, is = was;
    for (std::size_t i = 0; i < 40000; i += 37) set_word(is.all[0], i, word_of(was.all[0], i) + 1);
    model got = was;
    for (std::size_t rank = 0; rank < 4; ++rank) {
        const std::size_t at = 20000 * rank;
        const std::string name = "w[" + std::to_string(10000 * rank) + ":]";
        const auto slice = [&](const model& m) {
            return std::vector{
                data::weight_part{name, weight_type::bf16, std::span(m.all[0].bytes).subspan(at, 20000)}};
        };
        const std::vector targets{
            data::weight_target{name, weight_type::bf16, std::span(got.all[0].bytes).subspan(at, 20000)}};
        const auto held = data::version_of(slice(was), 1);
        const auto bytes = data::weight_delta(held, slice(was), slice(is), 2);
        data::apply_weight_delta(bytes, held, targets);
        const std::vector other{data::weight_target{"w[1:]", weight_type::bf16, targets[0].bytes}};
        CHECK(refused([&] { data::apply_weight_delta(bytes, held, other); }).find("part 'w[1:]'") != std::string::npos);
    }
    CHECK(got == is);
}

TEST_CASE("no flipped bit, no cut and no tail is taken, and nothing is written") {
    numbers u(13);
    model was;
    for (const weight_type t : {weight_type::bf16, weight_type::f32, weight_type::bytes}) {
        was.all.push_back({"p" + std::to_string(int(t)), t, std::vector<std::byte>(40 * size_of(t))});
        for (std::size_t i = 0; i < 40; ++i) set_word(was.all.back(), i, random_word(u, t));
    }
    model is = was;
    set_word(is.all[0], 3, 0x8000), set_word(is.all[0], 4, 0x7FC1), set_word(is.all[1], 39, 0x80000000u);
    for (std::size_t i = 0; i < 40; ++i) set_word(is.all[2], i, std::uint32_t(i * 7));
    const auto held = was.version(1);
    for (const bool whole : {false, true}) {
        const auto good =
            whole ? data::whole_weights(is.parts(), 2) : data::weight_delta(held, was.parts(), is.parts(), 2);
        model to = was;
        const auto taken = [&](std::span<const std::byte> bytes) {
            return refused([&] { data::apply_weight_delta(bytes, held, to.targets()); }).empty();
        };
        for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
            auto bad = good;
            bad[bit / 8] ^= std::byte(1 << bit % 8);
            CHECK_MESSAGE(!taken(bad), "bit ", bit);
            REQUIRE(to == was);
        }
        for (std::size_t n = 0; n < good.size(); ++n) {
            const std::vector<std::byte> cut(good.begin(),
                                             good.begin() + std::ptrdiff_t(n)); // so that reads beyond show
            CHECK_MESSAGE(!taken(cut), "length ", n);
            REQUIRE(to == was);
        }
        auto longer = good;
        longer.push_back({});
        CHECK(!taken(longer));
        REQUIRE(to == was);
        CHECK(taken(good));
        CHECK(to == is);
    }
}

TEST_CASE("bodies with checksums that fit: refused and nothing changed, or what the version's checksum says") {
    numbers u(14);
    for (const weight_type t : {weight_type::bf16, weight_type::f32}) {
        model was{{{"w", t, std::vector<std::byte>(70000 * size_of(t))}}};
        for (std::size_t i = 0; i < 70000; ++i) set_word(was.all[0], i, random_word(u, t));
        model is = was;
        for (std::size_t i = 0; i < 70000; i += std::size_t(1 + u.below(9000)))
            set_word(is.all[0], i, u.below(3) == 0 ? random_word(u, t) : word_of(was.all[0], i) + 1);
        const auto held = was.version(1);
        const auto good = data::weight_delta(held, was.parts(), is.parts(), 2);
        const std::size_t body = 48 + 40 + 1, end = good.size() - 24 - 8;
        int refusals = 0, redundant = 0;
        for (std::size_t at = body; at < end; ++at)
            for (int bit = 0; bit < 8; ++bit) {
                auto bad = good;
                bad[at] ^= std::byte(1 << bit);
                const auto sum = data::weight_sum(std::span(bad).subspan(48, end - 48));
                std::memcpy(bad.data() + end, &sum, 8);
                model to = was;
                if (refused([&] { data::apply_weight_delta(bad, held, to.targets()); }).empty()) {
                    REQUIRE(to == is);
                    ++redundant;
                } else {
                    REQUIRE(to == was);
                    ++refusals;
                }
            }
        CHECK(refusals > 20 * redundant); // bits that fill a byte up say nothing
    }
}

TEST_CASE("what a writer refuses, by name") {
    model was{{{"a", weight_type::bf16, std::vector<std::byte>(64)}}}, is = was;
    const auto held = was.version(4);
    const auto says = [](const std::string& text, const char* what) {
        CHECK_MESSAGE(text.find(what) != std::string::npos, text);
    };
    says(refused([&] { data::weight_delta({4, 99}, was.parts(), is.parts(), 5); }), "are not version 4");
    says(refused([&] { data::weight_delta(held, was.parts(), {}, 5); }), "is: has 0 parts");
    is.all[0].name = "b";
    says(refused([&] { data::weight_delta(held, was.parts(), is.parts(), 5); }), "part 'b'");
    is.all[0].bytes.resize(63);
    says(refused([&] { data::version_of(is.parts(), 5); }), "no whole number");
    says(refused([&] { data::whole_weights(was.parts(), -1); }), "next");
    data::weight_delta_writer from(held, 5), whole({}, 5);
    says(refused([&] { from.add(was.parts()[0]); }), "has no base");
    says(refused([&] { whole.add(was.parts()[0], was.parts()[0]); }), "has a base");
    const auto bytes = data::weight_delta(held, was.parts(), was.parts(), 5);
    std::vector<std::byte> memory(80);
    const data::weight_target over{"a", weight_type::bf16, std::span(memory).first(64)};
    const data::weight_part base{"a", weight_type::bf16, std::span(memory).subspan(2, 64)};
    says(refused([&] { data::apply_weight_delta(bytes, held, std::span(&base, 1), std::span(&over, 1)); }), "overlaps");
}

TEST_CASE("the checksum is that of its definition, and the same everywhere") {
    const auto reference = [](const std::vector<std::byte>& bytes) {
        using u64 = std::uint64_t;
        const u64 c1 = 0xBF58476D1CE4E5B9u, c2 = 0x94D049BB133111EBu;
        const auto mix = [&](u64 x) {
            x = (x ^ (x >> 30)) * c1;
            x = (x ^ (x >> 27)) * c2;
            return x ^ (x >> 31);
        };
        std::vector<u64> key, s;
        for (u64 j = 1; j <= 128; ++j) key.push_back(mix(j * 0x9E3779B97F4A7C15u));
        s.assign(key.begin(), key.begin() + 8);
        for (std::size_t at = 0; at < bytes.size(); at += 1024) {
            std::vector<u64> n(8), t(8);
            for (std::size_t w = 0; w < 128; ++w) {
                u64 word = 0;
                for (std::size_t b = 0; b < 8; ++b)
                    if (at + 8 * w + b < bytes.size()) word |= std::to_integer<u64>(bytes[at + 8 * w + b]) << 8 * b;
                const u64 x = word + key[w];
                n[w % 8] += (x % (u64{1} << 32)) * (x >> 32), t[w % 8] += word;
            }
            for (std::size_t i = 0; i < 8; ++i) {
                s[i] = (s[i] ^ n[i]) * c1, s[i] ^= s[i] >> 32;
                s[i] = (s[i] + t[i ^ 1]) * c2, s[i] ^= s[i] >> 29;
            }
        }
        u64 r = mix(bytes.size());
        for (std::size_t i = 0; i < 8; ++i) r = mix(r ^ s[i]) + key[i];
        return r;
    };
    numbers u(15);
    for (const std::size_t n : {0, 1, 7, 8, 63, 64, 1023, 1024, 1025, 5000}) {
        std::vector<std::byte> bytes(n);
        for (std::byte& b : bytes) b = std::byte(u.below(256));
        const auto sum = data::weight_sum(bytes);
        CHECK(sum == reference(bytes));
        for (std::size_t bit = 0; bit < 8 * n; bit += 1 + n / 50) {
            bytes[bit / 8] ^= std::byte(1 << bit % 8);
            CHECK(data::weight_sum(bytes) != sum);
            bytes[bit / 8] ^= std::byte(1 << bit % 8);
        }
    }
    CHECK(data::weight_sum(std::vector<std::byte>(3000)) != data::weight_sum(std::vector<std::byte>(3001)));
}

TEST_CASE("sizes: nothing changed, some, all") {
    numbers u(16);
    const std::size_t n = 1 << 18;
    model was{{{"w", weight_type::bf16, std::vector<std::byte>(2 * n)}}};
    for (std::size_t i = 0; i < n; ++i)
        set_word(was.all[0], i, std::bit_cast<std::uint32_t>(float(0.02 * u.normal())) >> 16);
    const auto held = was.version(1);
    const auto size_with = [&](double share, bool any_bits) {
        model is = was;
        std::size_t changed = 0;
        for (std::size_t i = 0; i < n; ++i) {
            if (u.uniform() >= share) continue;
            const std::uint32_t x = word_of(was.all[0], i), any = std::uint32_t(u.below(65535));
            set_word(is.all[0], i, any_bits ? any + (any >= x ? 1 : 0) : u.below(2) == 0 ? x + 1 : x - 1);
            ++changed;
        }
        const auto bytes = data::weight_delta(held, was.parts(), is.parts(), 2);
        model to = was;
        data::apply_weight_delta(bytes, held, to.targets());
        REQUIRE(to == is);
        return std::pair(bytes.size(), 8 * double(bytes.size()) / double(std::max<std::size_t>(changed, 1)));
    };
    CHECK(size_with(0, true).first < 160);
    CHECK(size_with(0.02, false).second < 9.1);
    CHECK(size_with(0.02, true).second < 23.5); // 7.07 bits of place and 16 of value is what there is to say
    CHECK(size_with(1, false).second < 3);
    CHECK(size_with(1, true).first <= 2 * n + 200);
}

TEST_CASE("the bytes of a delta are the same whoever compiles") { // another number here is another format
    std::uint64_t x = 1;
    const auto next = [&x] { return (x = x * 6364136223846793005u + 1442695040888963407u) >> 33; };
    model was;
    for (const weight_type t : {weight_type::bf16, weight_type::f32, weight_type::bytes}) {
        was.all.push_back({"p" + std::to_string(int(t)), t, std::vector<std::byte>(70000 * size_of(t))});
        for (std::size_t i = 0; i < 70000; ++i) set_word(was.all.back(), i, std::uint32_t(next()));
    }
    model is = was;
    for (model::one& p : is.all)
        for (std::size_t i = std::size_t(next() % 90); i < 70000; i += 1 + std::size_t(next() % 90))
            set_word(p, i, next() % 10 == 0 ? std::uint32_t(next()) : word_of(p, i) + 1);
    const auto bytes = data::weight_delta(was.version(1), was.parts(), is.parts(), 2);
    CHECK(bytes.size() == 6878);
    CHECK(data::weight_sum(bytes) == 8339536022055666779u);
}

TEST_CASE("memory is that of one part's delta") {
    const std::size_t n = std::size_t{1} << 20, parts = 48;
    std::vector<std::byte> was(2 * n), is, to;
    numbers u(17);
    for (std::size_t i = 0; i < n; ++i) {
        const auto x = std::uint16_t(std::bit_cast<std::uint32_t>(float(u.uniform())) >> 16);
        std::memcpy(was.data() + 2 * i, &x, 2);
    }
    is = was;
    for (std::size_t i = 0; i < n; i += 50) is[2 * i] ^= std::byte{1};
    to = was;
    std::vector<std::string> names;
    std::vector<data::weight_part> base;
    for (std::size_t i = 0; i < parts; ++i) names.push_back("w" + std::to_string(i)); // the same memory for each
    for (const std::string& name : names) base.push_back({name, weight_type::bf16, was});
    const auto held = data::version_of(base, 1);
    const auto most = [] {
        rusage r{};
        getrusage(RUSAGE_SELF, &r);
        return r.ru_maxrss; // KiB
    };
    data::weight_delta_writer w(held, 2);
    data::weight_delta_reader r(held, w.begin());
    long after_one = 0;
    for (std::size_t i = 0; i < parts; ++i) {
        to = was;
        const auto message = w.add(base[i], {names[i], weight_type::bf16, is});
        r.apply(r.look(message), to, {names[i], weight_type::bf16, to});
        REQUIRE(to == is);
        if (i == 0) after_one = most();
    }
    CHECK(r.end(w.end()) == w.made());
    if (!OPD_TEST_SANITIZED) CHECK(most() - after_one < 1024); // of a model of 100 MB
}
