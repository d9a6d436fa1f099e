// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "opd/element.hpp"
#include "opd/product.hpp"
#include "opd/rng.hpp"

namespace {

using opd::index_t;

// Runs tiles on `threads` threads, last tile first: no order of tiles may matter.
struct threads_executor {
    int threads = 1;
    template <class Function>
    void parallel_for(index_t count, Function&& f) const {
        std::atomic<index_t> left{count};
        const auto work = [&] {
            for (index_t i; (i = --left) >= 0;) f(i);
        };
        std::vector<std::jthread> team;
        for (int i = 1; i < threads; ++i) team.emplace_back(work);
        work();
    }
};

// The definition: one multiply-add a step, ascending k, fused where the build's lanes are.
template <class T>
T chain(index_t depth, const T* a, index_t a_step, const T* b, index_t b_step, T start) {
    T acc = start;
    for (index_t k = 0; k < depth; ++k) {
#if defined(__FMA__)
        acc = std::fma(a[k * a_step], b[k * b_step], acc);
#else
        if constexpr (std::is_same_v<T, double>)
            acc = std::fma(a[k * a_step], b[k * b_step], acc);
        else {
            const volatile T product = a[k * a_step] * b[k * b_step];
            acc = product + acc;
        }
#endif
    }
    return acc;
}

template <class T>
std::vector<T> noise(std::uint64_t sample, index_t size) {
    std::vector<T> r(static_cast<std::size_t>(size) + 1); // one more: data() of no elements would be a null pointer
    const opd::noise_row row(42, opd::noise_stream::mc, sample, 0);
    for (std::size_t i = 0; i < r.size(); ++i)
        r[i] = static_cast<T>(2 * opd::uniform_of_bits(row.bits(0, static_cast<std::uint32_t>(i))) - 1);
    return r;
}

template <class T>
bool same_bits(T a, T b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
}

// Rows of a matrix with NaN behind each: what is read there shows.
template <class T>
std::vector<T> padded(std::uint64_t sample, index_t rows, index_t columns, index_t pad) {
    std::vector<T> r = noise<T>(sample, rows * (columns + pad));
    for (index_t i = 0; i < rows; ++i)
        std::fill_n(r.begin() + i * (columns + pad) + columns, pad, std::numeric_limits<T>::quiet_NaN());
    return r;
}

// The same numbers, to the nearest that B has, and as T again.
template <class B, class T>
std::vector<B> stored_as(const std::vector<T>& x) {
    std::vector<B> r;
    for (const T v : x) r.push_back(B(v));
    return r;
}

template <class T, class B = T>
void check_shape(index_t rows, index_t columns, index_t depth, bool accumulate, int threads) {
    CAPTURE(rows);
    CAPTURE(columns);
    CAPTURE(depth);
    CAPTURE(accumulate);
    CAPTURE(threads);
    const index_t pad = 3; // row strides differ from the row lengths
    const auto a = padded<T>(1, rows, depth, pad), at = padded<T>(2, depth, rows, pad);
    const auto of_b = stored_as<B>(padded<T>(3, depth, columns, pad)),
               of_bt = stored_as<B>(padded<T>(4, columns, depth, pad));
    const auto b = stored_as<T>(of_b), bt = stored_as<T>(of_bt);
    const auto start = noise<T>(5, rows * (columns + pad));
    const threads_executor executor{threads};
    for (int form = 0; form < 3; ++form) {
        CAPTURE(form);
        auto c = start;
        const index_t ca = columns + pad;
        if (form == 0)
            opd::product(executor, opd::product_nn(rows, columns, depth, a.data(), depth + pad, of_b.data(),
                                                   columns + pad, c.data(), ca, accumulate));
        else if (form == 1)
            opd::product(executor, opd::product_tn(rows, columns, depth, at.data(), rows + pad, of_b.data(),
                                                   columns + pad, c.data(), ca, accumulate));
        else
            opd::product(executor, opd::product_nt(rows, columns, depth, a.data(), depth + pad, of_bt.data(),
                                                   depth + pad, c.data(), ca, accumulate));
        index_t wrong = 0;
        for (index_t i = 0; i < rows; ++i)
            for (index_t j = 0; j < ca; ++j) {
                const T from = start[static_cast<std::size_t>(i * ca + j)];
                T expected = from; // the padding of C stays as it was
                if (j < columns) {
                    const T* x = form == 1 ? at.data() + i : a.data() + i * (depth + pad);
                    const T* y = form == 2 ? bt.data() + j * (depth + pad) : b.data() + j;
                    expected = chain<T>(depth, x, form == 1 ? rows + pad : 1, y, form == 2 ? 1 : columns + pad,
                                        accumulate ? from : T(0));
                }
                wrong += !same_bits(c[static_cast<std::size_t>(i * ca + j)], expected);
            }
        CHECK(wrong == 0);
    }
}

} // namespace

TEST_CASE("every output is one ascending chain, for any number of rows, columns and threads") {
    for (index_t rows = 1; rows <= 33; ++rows)
        for (index_t columns : {1, 15, 16, 48, 67})
            check_shape<float>(rows, columns, 48, rows % 2 == 0, 1 + static_cast<int>(rows % 3));
    check_shape<float>(200, 150, 70, false, 1);
    check_shape<float>(200, 150, 70, true, 2);
    check_shape<float>(200, 150, 70, true, 5);
}

TEST_CASE("large shapes, which are cut and packed in other ways, give the same chains") {
    check_shape<float>(49, 16500, 130, true, 2); // wide tiles, a second block of depth
    check_shape<float>(390, 16500, 2, false, 2); // and a second row of tiles
    check_shape<float>(1603, 1030, 5, false, 2);
    check_shape<double>(403, 1600, 5, true, 2);
}

TEST_CASE("few rows, odd sizes and every edge of a tile give the same chains") {
    int threads = 0;
    for (index_t rows = 1; rows <= 17; ++rows) {
        check_shape<float>(rows, 1 + 13 * (rows % 3), 17 + rows, rows % 2 == 1, 1 + threads++ % 3);
        check_shape<double>(rows, 1 + 5 * (rows % 3), 17 + rows, rows % 2 == 0, 1 + threads++ % 3);
    }
    for (const bool accumulate : {false, true}) {
        check_shape<float>(1, 101, 530, accumulate, 2);   // two tiles of a transposed B, two blocks of its depth
        check_shape<float>(16, 97, 1025, accumulate, 2);  // three
        check_shape<float>(33, 195, 171, accumulate, 2);  // three registers of rows
        check_shape<float>(270, 30, 129, accumulate, 2);  // two tiles of rows
        check_shape<float>(263, 515, 131, accumulate, 2); // packed
        check_shape<double>(50, 260, 150, accumulate, 2);
        check_shape<double>(7, 200, 400, accumulate, 2);
    }
}

TEST_CASE("a long depth is cut into blocks that continue the same chain") {
    check_shape<float>(7, 20, 256, false, 1);
    check_shape<float>(7, 20, 257, true, 2);
    check_shape<float>(97, 65, 1000, false, 2);
}

TEST_CASE("depth 0 zeroes the output or leaves it alone") {
    check_shape<float>(5, 9, 0, false, 1);
    check_shape<float>(5, 9, 0, true, 1);
}

TEST_CASE("double runs the same chain") {
    for (index_t rows : {1, 2, 5, 13})
        for (index_t columns : {1, 3, 8}) check_shape<double>(rows, columns, 31, rows % 2 == 1, 2);
}

TEST_CASE("bfloat16 weights have the chains of floats of the same numbers") {
    const auto check = check_shape<float, opd::bfloat16>;
    for (index_t rows = 1; rows <= 33; ++rows)
        for (const index_t depth : {1, 15, 31, 48, 67})
            check(rows, rows % 2 == 0 ? 19 : 48, depth, rows % 3 == 0, 1 + static_cast<int>(rows % 3));
    for (const bool accumulate : {false, true}) {
        check(1, 101, 530, accumulate, 2);
        check(16, 97, 1025, accumulate, 2); // five blocks of widened rows
        check(33, 195, 171, accumulate, 2);
        check(270, 30, 129, accumulate, 2);
        check(263, 515, 131, accumulate, 2); // packed
    }
    check(5, 9, 0, true, 1);
}

TEST_CASE("a row's bits do not depend on the rows around it") {
    const index_t columns = 50, depth = 300;
    const auto x = noise<float>(6, 33 * depth), w = noise<float>(7, depth * columns);
    std::vector<float> alone(33 * columns), batch(33 * columns);
    for (index_t r = 0; r < 33; ++r)
        opd::product(opd::serial_executor{}, opd::product_nn(1, columns, depth, x.data() + r * depth, depth, w.data(),
                                                             columns, alone.data() + r * columns, columns));
    for (index_t rows = 1; rows <= 33; ++rows) {
        opd::product(opd::serial_executor{},
                     opd::product_nn(rows, columns, depth, x.data(), depth, w.data(), columns, batch.data(), columns));
        CHECK(std::memcmp(alone.data(), batch.data(), static_cast<std::size_t>(rows * columns) * sizeof(float)) == 0);
    }
    // nor on which way round the weights lie
    std::vector<float> turned(w.size());
    for (index_t k = 0; k < depth; ++k)
        for (index_t j = 0; j < columns; ++j)
            turned[static_cast<std::size_t>(j * depth + k)] = w[static_cast<std::size_t>(k * columns + j)];
    for (const index_t rows : {1, 4, 16, 17, 33}) {
        std::fill(batch.begin(), batch.end(), -1.0f);
        opd::product(opd::serial_executor{}, opd::product_nt(rows, columns, depth, x.data(), depth, turned.data(),
                                                             depth, batch.data(), columns));
        CHECK(std::memcmp(alone.data(), batch.data(), static_cast<std::size_t>(rows * columns) * sizeof(float)) == 0);
    }
}
