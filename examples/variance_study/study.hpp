// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// All contenders over entropies, ages and policies, and what is written of them.
#pragma once

#include <string>
#include <vector>

#include "contenders.hpp"
#include "opd/threads.hpp"
#include "policies.hpp"
#include "ratios.hpp"

namespace variance_study {

struct study_settings {
    shape_of_world world = {};
    trial_settings trials = {};
    std::vector<double> entropies = {0.1, 1, 3, 4.5, 5.8};
    std::vector<int> staleness = {0, 4, 16, 64}; ///< ascending
    int policies = 20;                           ///< of each family at each entropy
    ratio_settings ratios = {};
};

/// One contender over some prefixes. A ratio is of variances, to MC-64 with IS of the same objective at the same
/// prefix.
struct cell {
    int prefixes = 0;
    double ratio = 0, least = 0, most = 0; ///< geometric mean and range; ratios below 1e-6 count as that
    double ratio_error = 0; ///< standard error of the mean's logarithm from the trials; policies are what they are
    double variance = 0;    ///< geometric mean, relative to the squared norm of the dense gradient
    double bias = 0; ///< root of the mean of |E g - dense|²/|dense|²: enumerated where that can be, else measured
    double bias_most = 0; ///< the measured one and two standard errors
    bool bias_is_exact = false;
    double bias_z = 0;             ///< the measured one's distance from 0 in standard errors
    double along = 0, along_z = 0; ///< mean of E g along the dense gradient, and its distance from 1 in standard errors
    double distinct = 0;           ///< ids scored
};

class study {
public:
    study(const study_settings& s, opd::thread_team& team);

    const std::vector<contender>& all() const { return all_; }
    /// Over families (none: all), entropies and ages; an index of -1: all of them.
    cell over(std::size_t contender, int family, int entropy, int age) const;

    std::string prefixes_csv() const; ///< a line of each contender at each prefix
    std::string cells_csv() const;    ///< a line of each contender, family, entropy and age
    std::string ratios_csv() const;
    std::string tables() const;
    /// Writes variance-budget.svg and variance-bias.svg; returns what went wrong.
    std::string plots(const std::string& directory) const;

private:
    struct place {
        int family, entropy, age, policy;
        double kl, chi2;
        std::vector<figures> of;
    };
    double kl_of(int family, int entropy, int age) const;
    std::size_t index(const std::string& name) const;

    study_settings s_;
    std::vector<contender> all_;
    std::vector<place> places_;
    ratio_outcome ratios_;
};

void write_file(const std::string& path, const std::string& text);

} // namespace variance_study
