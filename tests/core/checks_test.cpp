// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
//
// Shapes whose extent in bytes does not fit into 64 bits are refused before anybody computes it. What overlaps, against
// every byte of small rectangles.
#include <doctest/doctest.h>

#include <limits>
#include <opd/checks/shapes.hpp>
#include <opd/checks/spans.hpp>
#include <set>
#include <vector>

using opd::index_t;

TEST_CASE("a view larger than any memory is refused") {
    float x = 0;
    const auto check = [&](index_t rows, index_t stride) {
        opd::detail::check_matrix("x", opd::view(&x, rows, 1, stride), rows, 1);
    };
    constexpr index_t most = std::numeric_limits<index_t>::max();
    CHECK_NOTHROW(check(1, most)); // of one row, the stride is never taken
    CHECK_NOTHROW(check(2, most / 8));
    for (const index_t stride : {most / 8 + 1, most / 4, most / 2, index_t{1} << 62, most})
        CHECK_THROWS_WITH_AS(check(2, stride), doctest::Contains("x: is larger than any memory"), opd::invalid_input);
    CHECK_THROWS_AS(check(index_t{1} << 40, index_t{1} << 30), opd::invalid_input);
}

TEST_CASE("two spans overlap if they share a byte, or if their rows are too different to tell") {
    struct rectangle {
        index_t rows, cols, padding, stride;
    };
    std::vector<rectangle> shapes;
    for (index_t rows = 1; rows <= 3; ++rows)
        for (index_t cols = 1; cols <= 3; ++cols)
            for (index_t padding = 0; padding <= 1; ++padding)
                for (index_t stride = cols + padding; stride <= 6; ++stride)
                    shapes.push_back({rows, cols, padding, stride});
    shapes.push_back({1, 9, 0, 9}); // longer than any stride: a vector across rows
    static char memory[128];
    const auto bytes = [](const rectangle& x, index_t at) {
        std::set<index_t> all;
        for (index_t r = 0; r < x.rows; ++r)
            for (index_t c = 0; c < x.cols + x.padding; ++c) all.insert(at + r * x.stride + c);
        return all;
    };
    long seen = 0, wrong = 0, disjoint_within = 0;
    for (const auto& a : shapes)
        for (const auto& b : shapes)
            for (index_t shift = -20; shift <= 20; ++shift) {
                opd::detail::call_spans spans;
                const auto at = [&](const rectangle& x, index_t from) {
                    return opd::matrix_view<char>(memory + 64 + from, x.rows, x.cols, x.stride, x.padding);
                };
                spans.writes("a", at(a, 0));
                spans.reads("b", at(b, shift));
                bool refused = false;
                try {
                    spans.check();
                } catch (const opd::invalid_input&) {
                    refused = true;
                }
                const auto x = bytes(a, 0), y = bytes(b, shift);
                bool shared = false;
                for (const index_t i : y) shared |= x.count(i) > 0;
                const bool within = *y.begin() <= *x.rbegin() && *x.begin() <= *y.rbegin();
                const bool told_apart = a.rows == 1 || b.rows == 1 || a.stride == b.stride;
                ++seen, wrong += refused != (told_apart ? shared : within);
                disjoint_within += within && !refused;
            }
    CHECK(wrong == 0);
    CHECK(seen > 100000);
    CHECK(disjoint_within > 1000);
}

TEST_CASE("reads may overlap reads, and nothing without bytes overlaps") {
    float x[8] = {};
    const auto all = opd::view(x, 2, 4);
    opd::detail::call_spans reads;
    reads.reads("a", all), reads.reads("b", all);
    CHECK_NOTHROW(reads.check());
    opd::detail::call_spans none;
    none.writes("a", all), none.reads("b", opd::view(x, 0, 4)), none.reads("c", opd::view(x, 0));
    none.reads("d", opd::matrix_view<float>());
    CHECK_NOTHROW(none.check());
    opd::detail::call_spans outputs;
    outputs.writes("first", all), outputs.writes("second", opd::view(x + 7, 1));
    CHECK_THROWS_WITH_AS(outputs.check(), doctest::Contains("first: overlaps second"), opd::invalid_input);
}
