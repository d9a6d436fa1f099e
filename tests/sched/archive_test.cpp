// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Bytes that are not what was written are refused, and say why.
#include <doctest/doctest.h>
#include <vector>

#include "opd/sched/archive.hpp"

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

TEST_CASE("a length is compared with what follows before anything is read") {
    const std::string bytes = bytes_of({std::uint64_t{1} << 60, 7});
    std::vector<std::uint64_t> words;
    CHECK(refusal([&] { archive_reader{bytes}(words); }) == "opd: snapshot: is damaged: a length exceeds what follows");
    std::string text;
    CHECK(refusal([&] { archive_reader{bytes}(text); }) == "opd: snapshot: ends too early");
}
