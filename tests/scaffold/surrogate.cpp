// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The surrogate that scripts/new.sh made: by name it is itself, in a row of drawn tokens as well, and c is its loss's
// slope.
#include <cmath>
#include <cstdio>

#include <opd/estimators/any.hpp>

using namespace opd;

int main() {
    const any_surrogate chosen{.which = choice::find(choice::surrogates, "made_up").value()};
    chosen.validate();
    token_in x{};
    x.log_p = -1, x.log_mu = -1.2, x.log_ratio = 0.2, x.log_q = -0.7, x.advantage = 0.3;
    const auto at = [&](double h) {
        token_in moved = x;
        moved.log_p += h, moved.log_ratio += h;
        return made_up{}(moved).loss;
    };
    bool good = chosen(x).loss == made_up{}(x).loss && chosen(x).c == made_up{}(x).c;
    good = good && std::abs(chosen(x).c - (at(1e-5) - at(-1e-5)) / 2e-5) < 1e-8 && chosen(x).c != 0;

    const auto row = [&](const auto& estimator) {
        sampled_entry entry{};
        entry.id = 1, entry.log_p = x.log_p, entry.log_mu = x.log_mu, entry.log_q = x.log_q, entry.weight = 1;
        entry.keep = true, entry.factor = 1;
        diagnostics seen;
        return estimator.row(&entry, 1, {}, seen).loss;
    };
    good = good && row(mc{.surrogate = made_up{}}) != 0 &&
           row(any_sampled{.surrogate = chosen}) == row(mc{.surrogate = made_up{}});
    std::puts(good ? "made_up is a surrogate" : "made_up is no surrogate");
    return good ? 0 : 1;
}
