// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Deltas of weights: written of changes that the choices name, damaged, with checksums that do not fit or are made to.
// What is refused leaves the weights as they were; what is taken gives the version whose checksum the delta names. Also
// any bytes at all.
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/damage.hpp"
#include "opd/data/weight_delta.hpp"

namespace {

using namespace opd;
using namespace opd::fuzz;
using bytes_type = std::vector<std::byte>;

bytes_type bytes_of(std::string_view s) {
    const auto* p = reinterpret_cast<const std::byte*>(s.data());
    return {p, p + s.size()};
}

/// Every part's and the end's checksum made to fit, as far as the bytes can be followed; with its body's length too.
void seal_again(choices& c, std::string& s) {
    const auto put = [&](std::size_t at, std::uint64_t x) { std::memcpy(s.data() + at, &x, 8); };
    const auto sum = [&](std::size_t at, std::size_t n) {
        return data::weight_sum(std::as_bytes(std::span(s.data() + at, n)));
    };
    if (s.size() < 48) return;
    put(40, sum(0, 40));
    const bool stretch = c.once_in(2); // to the end's message, if there is one part
    for (std::size_t at = 48; s.size() - at >= 48;) {
        std::uint32_t name = 0;
        std::uint64_t body = 0;
        std::memcpy(&name, s.data() + at, 4), std::memcpy(&body, s.data() + at + 32, 8);
        if (name == ~0u || name > s.size() - at - 48) break;
        if (stretch && s.size() - at >= 48 + name + 24) put(at + 32, body = s.size() - at - 48 - name - 24);
        if (body > s.size() - at - 48 - name) break;
        put(at + 40 + name + std::size_t(body), sum(at, 40 + name + std::size_t(body)));
        at += 48 + name + std::size_t(body);
    }
    if (s.size() >= 24) put(s.size() - 8, sum(s.size() - 24, 16));
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
    choices c(input, size);
    const auto type =
        c.of({data::weight_type::bf16, data::weight_type::f32, data::weight_type::bytes, data::weight_type::f16});
    const std::size_t n = c.once_in(50) ? 66000 : c.of({40u, 70u, 1u, 300u, 0u}); // of two blocks: slow
    const std::size_t wide = size_of(type);
    numbers u(c.bytes(2));
    bytes_type was(n * wide);
    for (std::byte& b : was) b = std::byte(u.below(256));
    bytes_type is = was;
    const auto every = std::size_t(c.of({7, 1, 50, 2, 1000000}));
    const bool small = c.once_in(2);
    for (std::size_t i = 0; i < n; i += every) {
        is[i * wide] ^= std::byte(1 + u.below(small ? 2 : 255));
        if (!small && wide > 1) is[i * wide + 1] = std::byte(u.below(256));
    }
    const bool whole = c.once_in(8);
    const data::weight_part base{"w", type, was}, next{"w", type, is};
    const data::weight_version held = data::version_of(std::span(&base, 1), 1);
    const bytes_type good = whole ? data::whole_weights(std::span(&next, 1), 2)
                                  : data::weight_delta(held, std::span(&base, 1), std::span(&next, 1), 2);
    std::string bad(reinterpret_cast<const char*>(good.data()), good.size());
    bool sealed = false;
    if (c.once_in(8)) {
        bad = c.rest();
    } else {
        const bool body_alone = c.once_in(2);
        std::string part = body_alone ? bad.substr(89, bad.size() - 89 - 32) : bad;
        c.once_in(2) ? damage(c, part) : nudge(c, part);
        bad = body_alone ? bad.substr(0, 89) + part + bad.substr(bad.size() - 32) : part;
        if (!c.once_in(4)) seal_again(c, bad), sealed = true;
    }
    const bytes_type bytes = bytes_of(bad); // of its own size, so that reads beyond it show
    bytes_type to = was;
    const data::weight_target target{"w", type, to};
    try {
        const auto made = data::apply_weight_delta(bytes, held, std::span(&target, 1));
        const data::weight_part now{"w", type, to};
        need(data::version_of(std::span(&now, 1), made.number) == made, "what was made is not what is said");
        need(sealed || bytes == good, "damage was not found");
        need(to == is || sealed, "other weights were made");
    } catch (const invalid_input&) {
        need(!(bytes == good), "a good delta is refused");
        need(to == was, "a refused delta has changed the weights");
    }
    return 0;
}
