// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The grid of cells, contender by k by seed, and what is said of it: cells.csv, tables with error bars, a plot.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cell.hpp"

namespace staleness_study {

/// A mean and its standard error; the error is NaN where nothing tells it.
struct estimate {
    double value = 0, error = 0;
    int freedom = 0;           ///< degrees of freedom of the error
    double half_width() const; ///< of the 95 % interval (Student's t)
};

/// Least squares of y[s][i] over x[i], s the seeds. The error is from the spread within each x, pooled over them.
estimate slope(const std::vector<double>& x, const std::vector<std::vector<double>>& y);
/// The mean of y[s][i] over the seeds, with the same pooled spread.
estimate mean_at(std::size_t i, const std::vector<std::vector<double>>& y);

/// One line of cells.csv, and back; a line of another form is a failure of kind exit_input.
std::string line_of(const cell& c);
cell cell_of(const std::string& line);

struct grid {
    std::vector<contender> contenders;
    std::vector<int> ks;
    std::vector<std::uint64_t> seeds;
};

class study {
public:
    /// Takes the cells that directory/cells.csv has, and makes those that are missing, `threads` at a time; the file
    /// has each as soon as it is done. A failure of kind exit_usage where the directory is of other settings.
    study(const world& w, grid g, const std::string& directory, int threads);

    std::string tables() const;
    /// Writes staleness.svg to the directory; returns what went wrong.
    std::string plot(const std::string& directory) const;

private:
    using place = std::tuple<std::string, int, std::uint64_t>;
    std::string csv() const;
    const cell& at(const contender& c, int k, std::uint64_t seed) const { return cells_.at({c.name, k, seed}); }
    std::vector<std::uint64_t> seeds_of(const contender& c) const;
    /// what(cell) by seed and k
    template <class What>
    std::vector<std::vector<double>> by_seed(const contender& c, What&& what) const;
    std::vector<std::vector<double>> gaps(const contender& c) const;
    const contender* find(const std::string& name) const;
    std::string statements() const;

    const world& w_;
    grid g_;
    std::map<place, cell> cells_;
};

} // namespace staleness_study
