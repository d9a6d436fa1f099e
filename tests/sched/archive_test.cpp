// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Bytes that are not what was written are refused, and say why.
#include <doctest/doctest.h>
#include <tuple>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/events.hpp"

namespace {

using namespace opd::sched;

std::string bytes_of(const std::vector<std::uint64_t>& words) {
    return {reinterpret_cast<const char*>(words.data()), 8 * words.size()};
}
template <class F>
std::string refusal(F&& f) {
    try {
        f();
    } catch (const opd::invalid_input& e) {
        return e.what();
    }
    return "accepted";
}
std::string unsealed(const std::string& bytes) {
    return refusal([&] { (void)unseal(bytes); });
}

} // namespace

TEST_CASE("what is sealed is what is unsealed, and nothing else is") {
    const std::string good = seal(bytes_of({1, 2, 3}));
    CHECK(unseal(good) == bytes_of({1, 2, 3}));
    CHECK(unsealed(good.substr(0, 15)) == "opd: snapshot: ends too early");
    std::string other = good;
    other[7] ^= 1; // the last of the mark
    CHECK(unsealed(other) == "opd: snapshot: is none of this library, or of another version of it");
    for (std::size_t i = 8; i < good.size(); ++i) {
        other = good;
        other[i] ^= 1;
        CHECK(unsealed(other) == "opd: snapshot: is damaged: its checksum differs");
    }
}

TEST_CASE("words that have changed places are damage") {
    const std::vector<std::uint64_t> words = {0,    1, 2, 5, 1u << 31, std::uint64_t{1} << 32, std::uint64_t{1} << 63,
                                              ~0ull};
    const std::string good = seal(bytes_of(words));
    for (std::size_t i = 0; i < words.size(); ++i)
        for (std::size_t j = 0; j < i; ++j) {
            auto swapped = words;
            std::swap(swapped[i], swapped[j]);
            const std::string other = good.substr(0, 8) + bytes_of(swapped) + good.substr(good.size() - 8);
            CHECK(unsealed(other) == "opd: snapshot: is damaged: its checksum differs");
        }
}

// What a message carries; each value is another, so that a field that is left out or comes twice shows.
TEST_CASE("events and actions are after a journey what they were") {
    const ticket t{.sample = 1, .slot = 2, .attempt = 3, .worker = 4, .incarnation = 5, .lane = 6};
    const auto again = [](auto x) {
        archive_writer out;
        x.fields(out);
        decltype(x) y = {};
        archive_reader in(out.bytes);
        y.fields(in);
        CHECK(in.done());
        return y;
    };
    event e;
    e.what = event::kind::scored, e.stage = stage::teacher;
    e.worker = 7, e.incarnation = 8, e.slots = 9, e.ticket = t, e.job = 10, e.count = 11;
    e.versions = {12, 13, 12.5, 14};
    const event f = again(e);
    CHECK(std::tuple(f.what, f.stage, f.worker, f.incarnation, f.slots, f.job, f.count) ==
          std::tuple(e.what, e.stage, e.worker, e.incarnation, e.slots, e.job, e.count));
    CHECK(f.ticket == t);
    CHECK(std::tuple(f.versions.oldest, f.versions.newest, f.versions.mean, f.versions.tokens) ==
          std::tuple(version_t{12}, version_t{13}, 12.5, std::int64_t{14}));
    const action a{action::kind::train, stage::teacher, failure::stale, place::training, 7, 8, t, 15, 16, 17, 18, 19};
    const action b = again(a);
    CHECK(std::tuple(b.what, b.stage, b.why, b.where, b.worker, b.incarnation, b.version, b.job, b.from, b.first,
                     b.count) == std::tuple(a.what, a.stage, a.why, a.where, a.worker, a.incarnation, a.version, a.job,
                                            a.from, a.first, a.count));
    CHECK(b.ticket == t);
}

TEST_CASE("a length is compared with what follows before anything is read") {
    const std::string bytes = bytes_of({std::uint64_t{1} << 60, 7});
    std::vector<std::uint64_t> words;
    CHECK(refusal([&] { archive_reader{bytes}(words); }) == "opd: snapshot: is damaged: a length exceeds what follows");
    std::string text;
    CHECK(refusal([&] { archive_reader{bytes}(text); }) == "opd: snapshot: ends too early");
}
