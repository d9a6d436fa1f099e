// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The grid of cells, engine by treatment by seed, and what is said of it: windows.csv, tables with error bars, the
// plots of VeXact's figures 2 to 6.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cell.hpp"

namespace mismatch_study {

/// A window of a cell as a line of windows.csv, and back; a line of another form is a failure of kind exit_input.
struct told_window {
    std::string engine, treatment;
    std::uint64_t seed = 0;
    window what;
};
std::string header();
std::string line_of(const told_window& w);
told_window window_of(const std::string& line);

/// Mean of y[s] over seeds and its standard error, of a spread that is pooled over several such lists; NaN of one seed.
double pooled_error(const std::vector<std::vector<double>>& lists);

struct grid {
    std::vector<choice> engines, treatments;
    std::vector<std::uint64_t> seeds;
    int windows = 8;
};

class study {
public:
    /// Takes the cells that directory/windows.csv has in full, and makes those that are missing, `threads` at a time;
    /// the file has each as soon as it is done. A failure of kind exit_usage where the directory is of other settings.
    study(const world& w, grid g, const std::string& directory, int threads);

    std::string tables() const;
    /// Writes figure2.svg to figure6.svg to the directory; returns what went wrong.
    std::string plot(const std::string& directory) const;

private:
    using place = std::tuple<std::string, std::string, std::uint64_t>;
    std::string csv() const;
    const std::vector<window>& at(const choice& engine, const choice& treatment, std::uint64_t seed) const {
        return cells_.at({engine.name, treatment.name, seed});
    }
    /// By seed, what(windows).
    template <class What>
    std::vector<double> by_seed(const choice& engine, const choice& treatment, What&& what) const;
    double mean(const choice& engine, const choice& treatment, figure::id of) const; ///< over seeds and windows
    template <class What>
    std::string table(const std::string& corner, What&& what, int digits) const;

    const world& w_;
    grid g_;
    std::map<place, std::vector<window>> cells_;
};

} // namespace mismatch_study
