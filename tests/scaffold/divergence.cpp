// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The divergence that scripts/new.sh made: by name it is itself, its value is the formula's that was put among the
// tests', and its c is that value's derivative.
#include "support/naive_backend.hpp"
#include "support/textbook.hpp"
#include "support/traits.hpp"

#include <cmath>
#include <cstdio>

#include <opd/estimators/any.hpp>

using namespace opd;

int main() {
    constexpr index_t n = 4;
    const double z[] = {0.3, -1, 2, 0.1}, y[] = {1, 0.5, 1.5, -2};
    double dz[n] = {};
    test::naive_backend backend;
    const auto loss = [&](const auto& d) {
        return evaluate(backend, student::logits{view(z, 1, n), view(dz, 1, n)}, teacher::dense{view(y, 1, n)}, d).loss;
    };
    const auto row = test::textbook::make_row(z, y, n, 1, 1);
    const any_dense chosen{choice::find(choice::divergences, "made_up").value()};
    chosen.validate();
    bool good = choice::find(choice::objectives, "made_up").has_value();
    good = good && std::abs(chosen.visit(loss) - double(test::textbook::value(made_up{}, row))) < 1e-12;
    const auto slope = test::textbook::gradient(made_up{}, row);
    for (std::size_t v = 0; v < n; ++v) good = good && std::abs(dz[v] - double(slope[v])) < 1e-9;
    int walked = 0;
    test::for_each_divergence([&](const std::string& name, const auto&) { walked += name == "made_up"; });
    good = good && walked == 1;
    std::puts(good ? "made_up is a divergence" : "made_up is no divergence");
    return good ? 0 : 1;
}
