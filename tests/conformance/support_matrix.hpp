// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the support matrix's tests on the host and on a device share: the page's tables, read and expanded, and one
// small batch for every kind of cache and element type.
#pragma once

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "opd/opd.hpp"

namespace opd::test::matrix {

// --- the page --------------------------------------------------------------------------------------------------------

using cells = std::map<std::string, std::string>; // column -> one value

inline std::string trimmed(const std::string& s) {
    const auto begin = s.find_first_not_of(" \t"), end = s.find_last_not_of(" \t");
    return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}
inline std::vector<std::string> split(const std::string& s, char at) {
    std::vector<std::string> parts;
    std::istringstream in(s);
    for (std::string part; std::getline(in, part, at);) parts.push_back(trimmed(part));
    return parts;
}

/// What the page writes for several values.
inline std::string meant_by(const std::string& value) {
    static const std::map<std::string, std::string> groups = {
        {"every divergence", "reverse_kl, forward_kl, jsd, skew_forward_kl, skew_reverse_kl, total_variation, "
                             "alpha_divergence, chi_squared, acceptance"},
        {"host", "cpu, eigen"},
        {"all", "cpu, eigen, cuda"},
        {"kept sets", "on_kept_sets{samples}, on_kept_sets{weighted}"}};
    const auto group = groups.find(value);
    return group == groups.end() ? value : group->second;
}

/// The rows of the table under heading `## title`, expanded.
inline std::vector<cells> table(const std::string& title) {
    std::ifstream page(std::string(OPD_TEST_SOURCE_DIR) + "/docs/support-matrix.md");
    REQUIRE_MESSAGE(page.good(), "docs/support-matrix.md cannot be read");
    std::vector<std::string> columns;
    std::vector<cells> rows;
    bool here = false;
    for (std::string line; std::getline(page, line);) {
        if (line.rfind("## ", 0) == 0) here = line == "## " + title;
        if (!here || line.rfind("|", 0) != 0 || line.rfind("|---", 0) == 0) continue;
        std::vector<std::string> values = split(line.substr(1), '|');
        if (columns.empty()) {
            columns = values;
            continue;
        }
        REQUIRE_MESSAGE(values.size() == columns.size(), "wrong number of cells: ", line);
        std::vector<cells> expanded{{}};
        for (std::size_t i = 0; i < columns.size(); ++i) {
            std::vector<cells> next;
            for (const cells& row : expanded)
                for (const std::string& written : split(values[i], ','))
                    for (const std::string& value : split(meant_by(written), ',')) {
                        next.push_back(row);
                        next.back()[columns[i]] = value == "=" ? row.at("z") : value;
                    }
            expanded = next;
        }
        rows.insert(rows.end(), expanded.begin(), expanded.end());
    }
    REQUIRE_MESSAGE(!rows.empty(), "no table under ", title);
    return rows;
}
inline std::string described(const cells& row) {
    std::string s;
    for (const auto& [column, value] : row) s += column + " " + value + "; ";
    return s;
}

// --- one call of each kind -------------------------------------------------------------------------------------------

inline constexpr index_t rows = 3, vocab = 40, kept = 6;

/// The page's `ragged support`: a cache of kind support whose rows have 6, 4 and 5 of the line's ids.
inline constexpr auto ragged_support = cache_kind(-1);
inline constexpr std::int32_t ragged_offsets[rows + 1] = {0, 6, 10, 15};
/// `lumped dense`: the teacher has one id less than the student.
inline constexpr auto lumped_dense = cache_kind(-2);
constexpr cache_kind kind_of(cache_kind k) {
    return k == ragged_support ? cache_kind::support : k == lumped_dense ? cache_kind::dense : k;
}

/// A batch in the given types. All logits are multiples of 1/16, exact in 16 bits.
template <class Z, class G, class L>
struct batch {
    static constexpr auto to = []<class T>(std::type_identity<T>, double x) {
        return element<T>::store(static_cast<arithmetic_t<T>>(x));
    };
    std::vector<Z> z;                // (N,V)
    std::vector<G> dz;               // (N,V)
    std::vector<L> y, log_q, log_mu; // (N,V) (N,k) (N,k)
    std::vector<std::int32_t> ids;   // (N,k)
    std::vector<float> weight;       // (N,k)
    std::vector<std::uint8_t> exact; // (N,k)
    std::vector<float> losses;
    std::vector<double> lse, given;

    batch() {
        for (index_t i = 0; i < rows * vocab; ++i) {
            z.push_back(to(std::type_identity<Z>{}, double((i * 37) % 61) / 16 - 2));
            y.push_back(to(std::type_identity<L>{}, double((i * 29) % 53) / 16 - 1.5));
            dz.push_back(to(std::type_identity<G>{}, 0));
        }
        for (index_t r = 0; r < rows; ++r) {
            double sum = 0, sum_z = 0;
            for (index_t v = 0; v < vocab; ++v) {
                sum += std::exp(double(element<L>::load(y[std::size_t(r * vocab + v)])));
                sum_z += std::exp(double(element<Z>::load(z[std::size_t(r * vocab + v)])));
            }
            given.push_back(std::log(sum_z));
            for (index_t j = 0; j < kept; ++j) {
                const index_t id = (7 * j + r) % vocab;
                ids.push_back(std::int32_t(id));
                const double lq = double(element<L>::load(y[std::size_t(r * vocab + id)])) - std::log(sum);
                log_q.push_back(to(std::type_identity<L>{}, lq));
                log_mu.push_back(to(std::type_identity<L>{}, lq - 0.0625));
                exact.push_back(j < 2);
                weight.push_back(float(j < 2 ? std::exp(lq - 0.0625) : 0.2));
            }
        }
        lse.resize(rows), losses.resize(rows);
    }
    template <cache_kind Kind>
    auto teacher() const {
        const auto at = [](const auto& v, index_t cols) { return view(v.data(), rows, cols); };
        if constexpr (Kind == cache_kind::dense)
            return teacher::dense{at(y, vocab)};
        else if constexpr (Kind == lumped_dense)
            return teacher::lumped{teacher::dense{view(y.data(), rows, vocab - 1, vocab)}};
        else if constexpr (Kind == cache_kind::support) {
            auto t = teacher::support{at(ids, kept), at(log_q, kept)};
            t.log_mu = at(log_mu, kept), t.chosen_by = teacher::chosen_by::stale_student;
            return t;
        } else if constexpr (Kind == ragged_support)
            return teacher::ragged_support<std::int32_t, L>{ids, log_q,  row_offsets<>(ragged_offsets, rows + 1),
                                                            {},  log_mu, teacher::chosen_by::stale_student};
        else if constexpr (Kind == cache_kind::samples)
            return teacher::samples{at(ids, kept), at(log_mu, kept), at(log_q, kept)};
        else
            return teacher::weighted{at(ids, kept), at(weight, kept), at(log_mu, kept), at(log_q, kept),
                                     at(exact, kept)};
    }
    template <bool Sparse, cache_kind Kind>
    auto student() {
        if constexpr (Sparse && Kind == ragged_support)
            return student::on_support{view(z.data(), rows, vocab), view(dz.data(), 1, rows * kept)};
        else if constexpr (Sparse)
            return student::on_support{view(z.data(), rows, vocab), view(dz.data(), rows, kept)};
        else
            return student::logits{view(z.data(), rows, vocab), view(dz.data(), rows, vocab)};
    }
    bool has_gradient() const {
        double sum = 0;
        for (const G& g : dz) sum += std::abs(double(element<G>::load(g)));
        return std::isfinite(sum) && sum > 0;
    }
};

/// For each row of such a batch its tokens and every fourth id: what a filter may have kept.
struct kept_sets {
    std::vector<std::int32_t> ids = {};
    std::vector<std::int64_t> offsets = {0};

    explicit kept_sets(const std::vector<std::int32_t>& tokens) {
        for (index_t r = 0; r < rows; ++r) {
            std::vector<bool> in(std::size_t(vocab), false);
            for (index_t j = 0; j < kept; ++j) in[std::size_t(tokens[std::size_t(r * kept + j)])] = true;
            for (index_t v = 0; v < vocab; ++v)
                if (in[std::size_t(v)] || v % 4 == 0) ids.push_back(std::int32_t(v));
            offsets.push_back(index_t(ids.size()));
        }
    }
};

// --- names -----------------------------------------------------------------------------------------------------------

using key = std::string;

template <class T>
inline constexpr const char* name_of = "";
template <>
inline constexpr const char* name_of<float> = "float";
template <>
inline constexpr const char* name_of<bfloat16> = "bfloat16";
template <>
inline constexpr const char* name_of<half> = "half";
template <>
inline constexpr const char* name_of<double> = "double";
constexpr const char* name_of_kind(cache_kind k) {
    return k == cache_kind::dense     ? "dense"
           : k == cache_kind::support ? "support"
           : k == ragged_support      ? "ragged support"
           : k == lumped_dense        ? "lumped dense"
           : k == cache_kind::samples ? "samples"
                                      : "weighted";
}
inline std::string on_sets(cache_kind k) { return std::string("on_kept_sets{") + name_of_kind(k) + "}"; }
inline key key_of(const std::string& estimator, const std::string& cache, const std::string& gradient,
                  const std::string& backend, const std::string& z, const std::string& dz, const std::string& teacher) {
    return estimator + " | " + cache + " | " + gradient + " | " + backend + " | " + z + " | " + dz + " | " + teacher;
}

} // namespace opd::test::matrix
