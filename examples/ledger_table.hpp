// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Where the tokens of runs ended (opd/sched/meters/token_ledger.hpp), as a table for people.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "opd/sched/meters/token_ledger.hpp"

namespace examples {

struct ledger_row {
    std::string name;
    opd::sched::token_totals tokens;
};

/// Shares of all generated (and brought) tokens; of idle time the tokens it would have made, in the same unit.
inline std::string ledger_table(const std::vector<ledger_row>& rows) {
    std::size_t width = 8;
    for (const ledger_row& r : rows) width = std::max(width, r.name.size());
    std::string out = fmt::format("{:<{}}  {:>13}  {:>7}  {:>9}  {:>7}  {:>11}  {:>11}  {:>7}\n", "tokens", width,
                                  "generated", "learnt", "discarded", "lost", "outstanding", "regenerated", "idle");
    for (const ledger_row& r : rows) {
        const opd::sched::token_totals& t = r.tokens;
        const double all = static_cast<double>(t.generated + t.brought);
        const auto share = [&](std::optional<double> n) {
            return n && all > 0 ? fmt::format("{:.1f}%", 100 * *n / all) : std::string("-");
        };
        const auto of = [&](std::int64_t n) { return share(static_cast<double>(n)); };
        out += fmt::format("{:<{}}  {:>13}  {:>7}  {:>9}  {:>7}  {:>11}  {:>11}  {:>7}\n", r.name, width,
                           t.generated + t.brought, of(t.learnt), of(t.discarded), of(t.lost), of(t.outstanding),
                           of(t.regenerated), share(t.idle_tokens()));
    }
    return out;
}

} // namespace examples
