// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// "did you mean": the name that was probably meant.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

/// The known name at the least edit distance from `name`, if at most half of its letters (but two of a short one)
/// differ; else empty.
inline std::string nearest(std::string_view name, const std::vector<std::string>& known) {
    std::string best;
    std::size_t distance = std::max<std::size_t>(2, name.size() / 2) + 1;
    for (const std::string& k : known) {
        std::vector<std::size_t> row(k.size() + 1); // distances of the name's beginnings
        std::iota(row.begin(), row.end(), std::size_t{0});
        for (std::size_t i = 1; i <= name.size(); ++i) {
            std::size_t diagonal = row[0];
            row[0] = i;
            for (std::size_t j = 1; j <= k.size(); ++j) {
                const std::size_t above = row[j];
                row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (name[i - 1] != k[j - 1])});
                diagonal = above;
            }
        }
        if (row.back() < distance) {
            distance = row.back();
            best = k;
        }
    }
    return best;
}
