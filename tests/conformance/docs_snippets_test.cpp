// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// What the documentation shows is compiled and run. Every `cpp` and `cmake` block of README.md, CHANGELOG.md and docs/
// names the file that it is cut from, in a comment on the line before it: <!-- from examples/01_dense_kl.cpp --> (a
// `python` block may). Its lines stand in that file, in that order and together; a line that is only `…` behind a
// comment sign leaves lines out. Links within the repository lead somewhere. The blocks that no example holds are cut
// from this file.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"
#include "opd/product.hpp"
#include "opd/rng.hpp"

// [own element type]
struct fixed_point { // 1/256 units in 16 bits
    std::int16_t units;
};
template <>
struct opd::element<fixed_point> {
    using arithmetic = float;
    static float load(fixed_point x) { return float(x.units) / 256; }
    static fixed_point store(float x) { return {static_cast<std::int16_t>(std::lround(x * 256))}; }
};
// [/own element type]

namespace {

namespace fs = std::filesystem;

std::string trimmed(const std::string& s) {
    const auto begin = s.find_first_not_of(" \t\r"), end = s.find_last_not_of(" \t\r");
    return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}
std::vector<std::string> lines_of(const fs::path& file) {
    std::ifstream in(file);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

/// Where `part` stands in `whole`, line by line without indentation and empty lines; npos if nowhere.
std::size_t find_lines(const std::vector<std::string>& whole, const std::vector<std::string>& part, std::size_t from) {
    for (std::size_t at = from; at + part.size() <= whole.size(); ++at)
        if (std::equal(part.begin(), part.end(), whole.begin() + std::ptrdiff_t(at))) return at;
    return std::string::npos;
}
bool cut_from(const std::vector<std::string>& block, const std::vector<std::string>& file) {
    std::vector<std::string> whole;
    for (const std::string& l : file)
        if (!trimmed(l).empty()) whole.push_back(trimmed(l));
    std::vector<std::vector<std::string>> pieces{{}};
    for (const std::string& l : block) {
        const std::string t = trimmed(l);
        if (t == "// …" || t == "# …")
            pieces.emplace_back();
        else if (!t.empty())
            pieces.back().push_back(t);
    }
    std::size_t at = 0;
    for (const auto& piece : pieces) {
        const std::size_t found = find_lines(whole, piece, at);
        if (found == std::string::npos) return false;
        at = found + piece.size();
    }
    return true;
}

std::vector<fs::path> pages() {
    const fs::path root = OPD_TEST_SOURCE_DIR;
    std::vector<fs::path> all{root / "README.md", root / "CHANGELOG.md", root / "CONTRIBUTING.md",
                              root / "tests" / "README.md"};
    for (const auto& entry : fs::recursive_directory_iterator(root / "docs"))
        if (entry.path().extension() == ".md") all.push_back(entry.path());
    std::sort(all.begin(), all.end());
    return all;
}

TEST_CASE("blocks of code are cut from files that are compiled") {
    CHECK(cut_from({"  b", "", "c"}, {"a", "b", "c"}));
    CHECK(cut_from({"a", "// …", "c"}, {"a", "b", "c"}));
    CHECK_FALSE(cut_from({"a", "c"}, {"a", "b", "c"}));
    CHECK_FALSE(cut_from({"c", "// …", "a"}, {"a", "b", "c"}));

    int blocks = 0;
    for (const fs::path& page : pages()) {
        const auto lines = lines_of(page);
        for (std::size_t i = 0; i < lines.size(); ++i) {
            const bool python = lines[i] == "```python" && i > 0 && lines[i - 1].starts_with("<!-- from ");
            if (!python && lines[i] != "```cpp" && lines[i] != "```cmake" && lines[i] != "```c" &&
                lines[i] != "```rust")
                continue;
            ++blocks;
            CAPTURE(page.string());
            CAPTURE(i + 1);
            std::smatch source;
            const std::string before = i > 0 ? lines[i - 1] : "";
            REQUIRE_MESSAGE(std::regex_match(before, source, std::regex("<!-- from (\\S+) -->")),
                            "a block of code must say where it is cut from");
            const fs::path file = fs::path(OPD_TEST_SOURCE_DIR) / source[1].str();
            REQUIRE_MESSAGE(fs::exists(file), "no such file: ", file.string());
            std::vector<std::string> block;
            for (++i; i < lines.size() && lines[i] != "```"; ++i) block.push_back(lines[i]);
            CHECK_MESSAGE(cut_from(block, lines_of(file)), "this block is not in ", file.string());
        }
    }
    CHECK(blocks > 10);
}

TEST_CASE("the page of the tests names each header of support and each area") {
    const fs::path tests = fs::path(OPD_TEST_SOURCE_DIR) / "tests";
    std::string page;
    for (const std::string& line : lines_of(tests / "README.md")) page += line + "\n";
    for (const auto& entry : fs::directory_iterator(tests / "support"))
        if (entry.path().extension() == ".hpp")
            CHECK_MESSAGE(page.find("`" + entry.path().filename().string() + "`") != std::string::npos,
                          entry.path().filename().string(), " is not in tests/README.md");
    for (const auto& entry : fs::directory_iterator(tests))
        if (entry.is_directory())
            CHECK_MESSAGE(page.find("`" + entry.path().filename().string() + "/`") != std::string::npos,
                          entry.path().filename().string(), " is not in tests/README.md");
}

TEST_CASE("links within the repository lead somewhere") {
    const std::regex link("\\]\\(([^)#\\s]+)(#[^)]*)?\\)");
    for (const fs::path& page : pages())
        for (const std::string& line : lines_of(page))
            for (std::sregex_iterator i(line.begin(), line.end(), link), end; i != end; ++i) {
                const std::string target = (*i)[1];
                if (target.find("://") != std::string::npos) continue;
                CHECK_MESSAGE(fs::exists(page.parent_path() / target), page.string(), " links to ", target);
            }
}

// --- blocks that no example holds ------------------------------------------------------------------------------------

TEST_CASE("views") {
    constexpr long N = 2, V = 5, P = 8;
    std::vector<float> memory(N * P);
    const float* logits = memory.data();
    // [views]
    auto z = opd::view(logits, N, V);                // (N,V), rows one after the other
    auto strided = opd::view(logits, N, V, P);       // (N,V), the next row P elements on
    auto padded = opd::padded_view(logits, N, V, P); // the same; the P - V columns between belong to the rows
    auto weights = opd::view(logits, N);             // (N)
    opd::vector_view<const float> all(memory);       // any contiguous range: vector, span, array
    auto some = opd::view(logits, N, V, {.stride = P, .padding = 1}); // one column of padding, by name
    // [/views]
    CHECK(&z(1, 0) == logits + V);
    CHECK(&strided(1, 0) == logits + P);
    CHECK(&padded(1, 0) == logits + P);
    CHECK(padded.padding == P - V);
    CHECK(some.padding == 1);
    CHECK(weights.size == N);
    CHECK(all.size == N * P);

    // [eigen]
    Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> matrix(N, V);
    auto m = opd::view(matrix); // no copy; a column-major matrix does not compile
    // [/eigen]
    CHECK(m.data == matrix.data());
}

TEST_CASE("a source by name") {
    float memory[12] = {};
    const auto z = opd::view(memory, 2, 3), dz = opd::view(memory + 6, 2, 3);
    // [source]
    opd::student::logits student{.z = z, .dz = dz, .temperature = 0.7f, .pad = opd::padding::keep};
    // [/source]
    CHECK(student.temperature == 0.7f);
    CHECK(student.pad == opd::padding::keep);
}

TEST_CASE("a padded vocabulary") {
    constexpr long N = 2, V = 3, P = 5;
    float logits[] = {1, 2, 3, 7, 7, 3, 2, 1, 7, 7};
    const float teacher_logits[] = {3, 2, 1, 9, 9, 1, 2, 3, 9, 9};
    opd::eigen_backend backend;
    // [padded]
    auto rows = opd::padded_view(logits, N, V, P); // in, and out over it: the padding's gradient is zero
    opd::student::logits student{rows, rows};
    opd::teacher::dense teacher{opd::view(teacher_logits, N, V, P)};
    auto r = opd::evaluate(backend, student, teacher, opd::reverse_kl{});
    // [/padded]
    CHECK(r.loss > 0);
    for (long i : {3, 4, 8, 9}) CHECK(logits[i] == 0);
}

TEST_CASE("element types") {
    std::vector<fixed_point> z(4), dz(4);
    std::vector<float> y{1, 0, 0, 0};
    opd::eigen_backend backend;
    // [own type]
    auto r = opd::evaluate(backend, opd::student::logits{opd::view(z.data(), 1, 4), opd::view(dz.data(), 1, 4)},
                           opd::teacher::dense{opd::view(y.data(), 1, 4)}, opd::forward_kl{});
    // [/own type]
    CHECK(r.loss > 0);
    CHECK(dz[0].units < 0);
}

TEST_CASE("what an env says") {
    constexpr long N = 4, V = 6;
    std::vector<float> z(N * V), dz(N * V), y(N * V), per_row(N);
    std::vector<double> lse(N);
    for (long i = 0; i < N * V; ++i) y[std::size_t(i)] = float(i % 5);
    opd::eigen_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const opd::teacher::dense teacher{opd::view(y.data(), N, V)};
    // [env]
    const std::vector<std::int32_t> labels{-100, 17, 4, -100};
    const std::vector<float> advantage{0, 1.5f, -0.5f, 0};
    const std::vector<std::int64_t> first{0, 2, 4}; // two sequences: rows 0-1 and rows 2-3
    auto r = opd::evaluate(backend, student, teacher, opd::reverse_kl{},
                           opd::env{.reduction = opd::reduce::sequence_mean,
                                    .mask = opd::row_mask<>::ignoring(opd::view(labels.data(), N), -100),
                                    .weights = advantage,
                                    .offsets = first,
                                    .losses = per_row,
                                    .lse = lse});
    // [/env]
    CHECK(r.diagnostics.kept == 2);
    CHECK(dz[0] == 0);
    CHECK(r.loss == doctest::Approx((per_row[1] + per_row[2]) / 2));
    CHECK(lse[1] == doctest::Approx(std::log(6.0)));

    // [micro]
    const double tokens = 3; // of the whole batch
    double loss = 0;
    for (long begin = 0; begin < N; begin += 2) // two micro-batches of two rows
        loss += opd::evaluate(backend,
                              opd::student::logits{opd::view(&z[begin * V], 2, V), opd::view(&dz[begin * V], 2, V)},
                              opd::teacher::dense{opd::view(&y[begin * V], 2, V)}, opd::reverse_kl{},
                              opd::env{.normaliser = tokens})
                    .loss;
    // [/micro]
    const double whole =
        opd::evaluate(backend, student, teacher, opd::reverse_kl{}, opd::env{.normaliser = tokens}).loss;
    CHECK(loss == doctest::Approx(whole));
}

TEST_CASE("caches") {
    constexpr long N = 1, V = 4, k = 2, m = 2;
    std::vector<float> z(N * V), dz(N * V), sparse(N * k);
    const std::vector<std::int32_t> ids{3, 1};
    const std::vector<float> log_q{-0.3f, -2.f}, log_mu{-0.7f, -1.9f}, tail{-2.1f}, weight{0.5f, 1.f};
    const std::vector<std::uint8_t> exact{1, 0};
    opd::eigen_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    // [caches]
    opd::teacher::support top_k{opd::view(ids.data(), N, k), opd::view(log_q.data(), N, k), opd::view(tail.data(), N)};
    opd::teacher::samples drawn{opd::view(ids.data(), N, m), opd::view(log_mu.data(), N, m),
                                opd::view(log_q.data(), N, m)};
    opd::teacher::weighted entries{opd::view(ids.data(), N, m), opd::view(weight.data(), N, m),
                                   opd::view(log_mu.data(), N, m), opd::view(log_q.data(), N, m),
                                   opd::view(exact.data(), N, m)};
    auto a = opd::evaluate(backend, student, top_k, opd::tail_bucket{opd::reverse_kl{}});
    auto b = opd::evaluate(backend, student, drawn, opd::mc{.baseline = opd::baseline::leave_one_out{}});
    auto c = opd::evaluate(backend, student, entries, opd::mc{opd::reverse_kl{}});
    // [/caches]
    CHECK(a.loss > 0);
    CHECK(std::isfinite(b.loss));
    CHECK(std::isfinite(c.loss));
    // [sparse]
    auto r = opd::evaluate(backend, opd::student::on_support{opd::view(z.data(), N, V), opd::view(sparse.data(), N, k)},
                           top_k, opd::renormalised{opd::forward_kl{}}); // sparse[r,j] belongs to logit ids[r,j]
    // [/sparse]
    CHECK(r.loss > 0);
    CHECK(sparse[0] + sparse[1] == doctest::Approx(0));
}

TEST_CASE("vocabularies of different size") {
    constexpr long N = 1, V_s = 4, V_t = 3;
    const std::vector<float> z{0, 1, 2, 0.5f}, y{1, 1, 0};
    std::vector<float> dz(std::size_t(N * V_s));
    opd::cpu_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V_s), opd::view(dz.data(), N, V_s)};
    // [lumped]
    opd::teacher::lumped wide{
        opd::teacher::dense{opd::view(y.data(), N, V_t)}}; // V_t ids, of which the student may know fewer or more
    auto r = opd::evaluate(backend, student, wide, opd::jsd{});
    // [/lumped]
    CHECK(r.loss > 0);
    CHECK(dz[0] + dz[1] + dz[2] + dz[3] == doctest::Approx(0));
    CHECK(dz[3] > 0); // the teacher gives nothing there
}

TEST_CASE("a drafter's rows") {
    constexpr long N = 3, V = 4;
    const std::vector<float> z{0, 1, 2, 0.5f, 1, 0, 0, 1, 2, 0, 0, 1}, y{1, 1, 0, 0, 1, 1, 0, 0, 2, 1, 1, 0};
    const std::vector<std::int64_t> offsets{0, 2, 3};
    std::vector<float> dz(std::size_t(N * V)), losses(N), weights(N);
    opd::cpu_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const opd::teacher::dense target{opd::view(y.data(), N, V)};
    // [drafter]
    opd::env rows{.reduction = opd::reduce::sum}; // N rows of drafts that begin at offsets[0], offsets[1], …
    rows.losses = losses;
    opd::evaluate(backend, student, target, opd::acceptance{}, rows);
    opd::fill_draft_weights(opd::accepted_length{0.5}, std::span<const std::int64_t>(offsets), losses, weights);
    rows.weights = weights;
    auto r = opd::evaluate(backend, student, target, opd::weighted_sum{opd::forward_kl{}, opd::acceptance{}, 0.2, 1.0},
                           rows);
    // [/drafter]
    CHECK(weights[0] > weights[1]);
    CHECK(r.loss > 0);
}

TEST_CASE("supports of different length") {
    constexpr long N = 2, V = 4, k = 2;
    const std::vector<float> z{0, 1, 2, 0, 1, 0, 0, 2};
    const std::vector<std::int32_t> ids{3, 1, 0, 2, 1};
    const std::vector<float> log_q{-0.3f, -2.f, -1, -1, -2};
    std::vector<float> dz(std::size_t(N * V));
    opd::cpu_backend backend;
    // [ragged]
    const std::vector<std::int64_t> offsets{0, 2, 5}; // row 0 has ids[0..2), row 1 has ids[2..5)
    opd::teacher::ragged_support served{opd::view(ids.data(), 5), opd::view(log_q.data(), 5),
                                        opd::row_offsets(offsets)};
    auto a = opd::evaluate(backend, opd::student::logits{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)}, served,
                           opd::tail_bucket{opd::reverse_kl{}});
    std::vector<float> line(5); // line[i] belongs to logit ids[i] of its row
    auto b = opd::evaluate(backend, opd::student::on_support{opd::view(z.data(), N, V), opd::view(line.data(), 1, 5)},
                           served, opd::renormalised{opd::reverse_kl{}});
    // [/ragged]
    CHECK(a.loss > 0);
    CHECK(b.diagnostics.bad_rows == 0);
    CHECK(line[0] + line[1] == doctest::Approx(0));
    CHECK(line[2] + line[3] + line[4] == doctest::Approx(0));
    // [id_overlap]
    std::vector<std::int32_t> best(std::size_t(N * k)); // the student's now
    std::vector<float> log_p(best.size());
    opd::top_k(backend, opd::view(z.data(), N, V), opd::view(best.data(), N, k), opd::view(log_p.data(), N, k));
    std::vector<double> share(N); // of each row's support
    const opd::id_overlaps o = opd::id_overlap(served, opd::view(best.data(), N, k), opd::view(share.data(), N));
    // [/id_overlap]
    // [drop_repeats]
    std::vector<std::int32_t> best_and_drawn{3, 1, 4, 1, 5, 9, 2, 7}; // (2,4): three best, one drawn
    const opd::index_t twice = opd::drop_repeats(opd::view(best_and_drawn.data(), 2, 4)); // 1: row 0 is now 3 1 4 -1
    // [/drop_repeats]
    CHECK(twice == 1);
    CHECK(best_and_drawn[3] == -1);
    CHECK(share[0] == 0.5);                     // 2, 1
    CHECK(share[1] == doctest::Approx(1. / 3)); // 3, 0
    CHECK(o.mean() == doctest::Approx(5. / 12));
}

// [own selector]
struct fresh_first {
    static constexpr unsigned reads() { return opd::fact::position; }
    OPD_HD double operator()(const opd::row_facts& f) const { return 1 / (1 + f.age) / (1 + 0.01 * f.position); }
};
// [/own selector]

TEST_CASE("selectors") {
    constexpr long N = 3, V = 4;
    const std::vector<float> z{1, 2, 3, 0, 4, 1, 0, 0, 1, 1, 0, 1}, y{0, 1, 2, 1, 9, 0, 0, 1, 0, 1, 1, 0};
    std::vector<float> dz(N * V);
    opd::cpu_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const opd::teacher::dense teacher{opd::view(y.data(), N, V)};
    // [selectors]
    // rows where the student is unsure, or sure and wrong
    auto tip = opd::evaluate(backend, student, teacher,
                             opd::selected{opd::reverse_kl{}, opd::selector::tip{.entropy = 1, .gap = 0.5}});
    // KL(p‖q), and KL(q‖p) beside it where the teacher is unsure
    auto both = opd::evaluate(backend, student, teacher, opd::eopd(0.8));
    // [/selectors]
    CHECK(tip.diagnostics.selector_rows == N);
    CHECK(tip.diagnostics.selector_left_out == 2); // the last one is unsure
    CHECK(both.loss > opd::evaluate(backend, student, teacher, opd::reverse_kl{}).loss);
    const std::vector<std::int64_t> offsets{0, N};
    const auto early = opd::evaluate(backend, student, teacher, opd::selected{opd::reverse_kl{}, fresh_first{}},
                                     {.offsets = opd::row_offsets(offsets)});
    CHECK(early.diagnostics.mean_selector_weight() == doctest::Approx((1 + 1 / 1.01 + 1 / 1.02) / 3));
}

TEST_CASE("drawn tokens") {
    constexpr long N = 4, V = 6, m = 2;
    std::vector<float> z(N * V), dz(N * V), logits;
    for (long i = 0; i < N * V; ++i) z[std::size_t(i)] = float((5 * i) % 7) / 4;
    const std::vector<std::int32_t> ids{3, 1, 0, 5, 2, 2, 4, 1};
    std::vector<float> log_mu(8, -1.5f), log_prox(8, -1.2f), log_q(8, -2.f), weight(8, 0.5f);
    log_q[0] = -8, log_q[3] = -0.5f;
    opd::eigen_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const auto row = [&](const std::vector<float>& x) { return opd::view(x.data(), N, m); };
    opd::teacher::samples<std::int32_t> drawn{opd::view(ids.data(), N, m), row(log_mu), row(log_q)};
    const opd::teacher::weighted<std::int32_t> entries{opd::view(ids.data(), N, m), row(weight), row(log_mu),
                                                       row(log_q)};
    {
        // [mc]
        auto x = opd::evaluate(backend, student, drawn, opd::mc{opd::reverse_kl{}});
        auto y = opd::evaluate(backend, student, drawn, opd::mc{.baseline = opd::baseline::leave_one_out{}});
        auto z = opd::evaluate(backend, student, entries, opd::mc{opd::reverse_kl{}});
        // [/mc]
        CHECK(x.loss == y.loss);
        CHECK(std::isfinite(z.loss));
    }
    {
        // [divergences]
        auto tv = opd::evaluate(backend, student, drawn, opd::mc{opd::total_variation{}});
        auto js = opd::evaluate(backend, student, drawn, opd::mc{opd::jsd{.w = 0.3, .o = 0.3}});
        auto lo = opd::evaluate(backend, student, drawn, opd::mc{opd::shape::clipped{.a = 5}});
        auto tr = opd::evaluate(backend, student, drawn, opd::mc{opd::shape::mixed{.alpha = 0.9}});
        // [/divergences]
        CHECK(tv.loss != js.loss);
        CHECK(lo.loss != tr.loss);
    }
    {
        // [surrogates]
        auto a = opd::evaluate(backend, student, drawn,
                               opd::mc{.surrogate = opd::ppo_clip{.low = 0.2, .high = 0.28, .dual = 3}});
        auto b = opd::evaluate(backend, student, drawn, opd::mc{opd::shape::clipped{5}, opd::truncated_is{.cap = 2}});
        auto c = opd::evaluate(backend, student, opd::teacher::on_policy{drawn},
                               opd::mc{.surrogate = opd::score_function{}});
        drawn.log_prox = opd::view(log_prox.data(), N, m); // log p_prox of the drawn tokens
        auto d = opd::evaluate(backend, student, drawn,
                               opd::mc{.surrogate = opd::decoupled_ppo{.low = 0.2, .high = 0.2, .cap = 2}});
        // [/surrogates]
        CHECK(d.diagnostics.masked == 0);
        CHECK(d.loss != a.loss);
        CHECK(a.diagnostics.tokens == 8);
        CHECK(b.diagnostics.tokens + c.diagnostics.tokens == 16);
        // [accepted]
        auto stale = opd::evaluate(backend, student, drawn, opd::lightning(5)); // -clip(A, ±5) log p, no ratio
        auto own =
            opd::evaluate(backend, student, drawn, opd::accept_bias{opd::mc{opd::advantage::old{}, opd::ppo_clip{}}});
        // [/accepted]
        CHECK(stale.loss != own.loss);
    }
    {
        std::vector<double> log_p(N * m);
        std::vector<std::uint8_t> keep(N * m);
        opd::token_logp(backend, opd::view(z.data(), N, V), drawn, opd::view(log_p.data(), N, m));
        const opd::matrix_view<const double> table = opd::view(log_p.data(), N, m);
        // [m2po]
        opd::m2po_fit fit{.tau = 0.04};
        fit.add(table, drawn); // once a micro-batch; fit.merge(other) over ranks
        const opd::m2po_selection chosen = fit.freeze();
        chosen.keep(table, drawn, {}, opd::view(keep.data(), N, m)); // once a micro-batch
        opd::env two_pass;
        two_pass.frozen.keep = opd::view(keep.data(), N, m);
        auto d = opd::evaluate(backend, student, drawn, opd::mc{opd::reverse_kl{}}, two_pass);
        // [/m2po]
        CHECK(d.diagnostics.dropped == std::count(keep.begin(), keep.end(), 0));
        CHECK(d.diagnostics.dropped > 0);
    }
    {
        constexpr long group = 2;
        std::vector<double> reward{1, 0};
        std::vector<float> advantage(N);
        const std::vector<long> sequence{0, 0, 1, 1};
        // [reward]
        opd::group_relative(reward, group); // (S) one number an answer, `group` answers to a prompt
        for (std::size_t r = 0; r < sequence.size(); ++r) advantage[r] = float(reward[std::size_t(sequence[r])]);
        drawn.advantage = opd::view(std::as_const(advantage).data(), N, 1);
        auto grpo = opd::evaluate(backend, student, drawn, opd::mc{opd::advantage::outside{}, opd::ppo_clip{}});
        auto both =
            opd::evaluate(backend, student, drawn, opd::mc{opd::advantage::mixed{.outside = 1, .teacher = 0.1}});
        // [/reward]
        CHECK(grpo.diagnostics.positive_advantage == grpo.diagnostics.negative_advantage);
        CHECK(std::isfinite(both.loss));
    }
    {
        // [any]
        opd::any_sampled estimator;
        estimator.of = {opd::choice::find(opd::choice::objectives, "clipped").value(), 5};
        estimator.surrogate.which = opd::choice::surrogate::ppo_clip;
        auto e = opd::evaluate(backend, student, drawn, estimator);
        // [/any]
        const double same =
            opd::evaluate(backend, student, drawn, opd::mc{opd::shape::clipped{5}, opd::ppo_clip{}}).loss;
        CHECK(e.loss == same);
    }
}

TEST_CASE("an arena of one's own") {
    constexpr long N = 3, V = 2000;
    std::vector<float> z(N * V), dz(N * V), y(N * V);
    for (long i = 0; i < N * V; ++i) y[std::size_t(i)] = float(i % 11) / 8;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    const opd::teacher::dense teacher{opd::view(y.data(), N, V)};
    opd::eigen_backend backend;
    // [arena]
    std::vector<std::byte> memory(opd::workspace_bytes(backend, student, teacher, opd::jsd{}));
    opd::eigen_backend own{.arena = memory};
    auto r = opd::evaluate(own, student, teacher, opd::jsd{});
    // [/arena]
    CHECK(r.loss == opd::evaluate(backend, student, teacher, opd::jsd{}).loss);
    memory.resize(memory.size() / 2);
    own.arena = memory;
    CHECK_THROWS_AS(opd::evaluate(own, student, teacher, opd::jsd{}), opd::invalid_input);
}

TEST_CASE("bad input") {
    constexpr long N = 2, V = 3;
    std::vector<float> z(N * V), dz(N * V, 7), y(N * V);
    opd::eigen_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V), opd::view(dz.data(), N, V)};
    std::string said;
    // [bad shape]
    try {
        opd::evaluate(backend, student, opd::teacher::dense{opd::view(y.data(), N, V - 1)}, opd::reverse_kl{});
    } catch (const opd::invalid_input& e) {
        said = e.what(); // opd: teacher.y: has 2 columns, the student 3; set env.vocab = …
    }
    // [/bad shape]
    CHECK(said.rfind("opd: teacher.y: has 2 columns, the student 3; set env.vocab = ", 0) == 0);
    CHECK(dz[0] == 7);

    // [bad row]
    z[4] = std::nanf("");
    auto r = opd::evaluate(backend, student, opd::teacher::dense{opd::view(y.data(), N, V)}, opd::reverse_kl{});
    // r.diagnostics.bad_rows is 1, r.diagnostics.first_bad_row is 1: that row's loss and gradient are 0
    try {
        opd::evaluate(backend, student, opd::teacher::dense{opd::view(y.data(), N, V)}, opd::reverse_kl{},
                      opd::env{.checks = opd::check::contents});
    } catch (const opd::invalid_input& e) {
        said = e.what(); // opd: student.z, row 1: NaN at column 1
    }
    // [/bad row]
    CHECK(said == "opd: student.z, row 1: NaN at column 1");
    CHECK(r.diagnostics.bad_rows == 1);
    CHECK(r.diagnostics.first_bad_row == 1);
    CHECK(dz[4] == 0);
    // [dropped row]
    try {
        opd::evaluate(backend, student, opd::teacher::dense{opd::view(y.data(), N, V)}, opd::reverse_kl{},
                      opd::env{.on_bad = opd::bad::raise_above(0.01)});
    } catch (const opd::bad_contents& e) {      // the gradient is written
        said = to_string(e.result.diagnostics); // 2 rows, 2 kept; 1 bad (first: row 1): loss 0, gradient 0
    }
    // [/dropped row]
    CHECK(said == "2 rows, 2 kept; 1 bad (first: row 1): loss 0, gradient 0");
}

TEST_CASE("draws, kept sets and scores") {
    constexpr opd::index_t N = 2, V = 50, m = 8, k = 5;
    std::vector<float> logits(N * V);
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = float(i * 37 % 50) / 10;
    const auto z = opd::view(std::as_const(logits).data(), N, V);
    const auto y = z;
    const float temperature = 1;
    opd::cpu_backend backend;
    const std::vector<std::uint64_t> samples{1, 2};
    const std::vector<std::uint32_t> positions{5, 6};
    std::vector<std::int32_t> token(N), ids(N * m), top(N * k);
    std::vector<float> token_log_mu(N), log_mu(N * m), weight(N * m), log_q(N * m), log_tail(N), top_log_q(N * k),
        top_tail(N);
    std::vector<std::uint8_t> exact(N * m);
    std::vector<double> log_kept(N);
    std::vector<opd::filter_cut> cut(N);
    std::vector<opd::index_t> kept(N);
    // [draws]
    const opd::draw_keys<> keys{
        .seed = 7, .sample = opd::view(samples.data(), N), .position = opd::view(positions.data(), N)};
    const opd::draw_options<> options{.filter = {.temperature = 0.7f, .top_p = 0.95f}};
    // the rollout's token of each row, and its log mu
    opd::draw(backend, z, opd::design::gumbel{}, keys,
              opd::drawn<>{.ids = opd::view(token.data(), N, 1), .log_mu = opd::view(token_log_mu.data(), N, 1)},
              options);
    // m entries to score beside it, with weights and marks of certain inclusion
    opd::draw(backend, z, opd::design::threshold{m}, keys,
              opd::drawn<>{.ids = opd::view(ids.data(), N, m),
                           .log_mu = opd::view(log_mu.data(), N, m),
                           .weight = opd::view(weight.data(), N, m),
                           .exact = opd::view(exact.data(), N, m)},
              options);
    // [/draws]
    CHECK(token[0] >= 0);
    CHECK(token_log_mu[0] < 0);
    CHECK(ids[m - 1] >= 0);
    // [kept]
    opd::draw(backend, z, opd::design::gumbel{}, keys,
              opd::drawn<>{.ids = opd::view(token.data(), N, 1), .log_mu = opd::view(token_log_mu.data(), N, 1)},
              {.filter = {.top_p = 0.9f},
               .log_kept = opd::view(log_kept.data(), N),
               .cut = opd::view(cut.data(), N),
               .kept = opd::view(kept.data(), N)});
    std::vector<opd::index_t> offsets(N + 1);
    std::partial_sum(kept.begin(), kept.end(), offsets.begin() + 1);
    std::vector<std::int32_t> kept_set(offsets.back());
    opd::kept_ids(backend, z, opd::view(std::as_const(cut).data(), N), offsets, opd::view(kept_set.data(), offsets[N]));
    // [/kept]
    CHECK(log_kept[0] >= std::log(0.9) - 1e-6);
    CHECK(std::find(kept_set.begin(), kept_set.begin() + offsets[1], token[0]) != kept_set.begin() + offsets[1]);
    {
        const std::vector<float> teacher_says(N, -2.f);
        std::vector<float> dz(N * V);
        const opd::student::logits student{z, opd::view(dz.data(), N, V)};
        const auto tokens = opd::view(std::as_const(token).data(), N, 1);
        const auto log_mu = opd::view(std::as_const(token_log_mu).data(), N, 1);
        const auto log_q = opd::view(teacher_says.data(), N, 1);
        // [on kept sets]
        const opd::teacher::on_kept_sets cache{opd::teacher::samples{tokens, log_mu, log_q},
                                               opd::view(std::as_const(kept_set).data(), offsets[N]),
                                               opd::row_offsets<>(offsets)};
        auto r = opd::evaluate(backend, student, cache, opd::mc{opd::reverse_kl{}});
        // [/on kept sets]
        CHECK(r.diagnostics.bad_rows == 0);
        CHECK(r.diagnostics.ratio_mean() == doctest::Approx(1).epsilon(1e-6));
    }
    // [scores]
    opd::score(backend, y,
               opd::scores<>{.ids = opd::view(std::as_const(ids).data(), N, m), // asked for
                             .log_p = opd::view(log_q.data(), N, m),
                             .log_tail = opd::view(log_tail.data(), N), // log of the mass outside them
                             .top_ids = opd::view(top.data(), N, k),    // the teacher's own best, best first
                             .top_log_p = opd::view(top_log_q.data(), N, k),
                             .top_log_tail = opd::view(top_tail.data(), N)},
               temperature);
    // [/scores]
    double listed = std::exp(double(log_tail[0]));
    for (std::size_t j = 0; j < std::size_t(m); ++j) listed += std::exp(double(log_q[j]));
    CHECK(listed == doctest::Approx(1));
    CHECK(logits[std::size_t(top[0])] == 4.9F);
}

TEST_CASE("figures that are asked for, and the list of all") {
    constexpr opd::index_t N = 2, V = 6, m = 2;
    const std::vector<float> z(N * V, 0.5F);
    const std::vector<std::int32_t> ids{0, 1, 2, 3};
    const std::vector<float> log_mu(N * m, -1.5F), log_q(N * m, -2.F);
    opd::cpu_backend backend;
    const opd::student::logits student{opd::view(z.data(), N, V)};
    const opd::teacher::samples drawn{opd::view(ids.data(), N, m), opd::view(log_mu.data(), N, m),
                                      opd::view(log_q.data(), N, m)};
    // [measure]
    std::vector<opd::index_t> ratios(opd::ratio_sketch::bins);
    opd::env env;
    env.measure = {.entropy = true, .ratios = opd::view(ratios.data(), opd::ratio_sketch::bins)};
    const opd::diagnostics d = opd::evaluate(backend, student, drawn, opd::mc{opd::reverse_kl{}}, env).diagnostics;
    const double entropy = d.student_entropy(), p99 = opd::ratio_sketch::quantile(ratios, 0.99);
    // [/measure]
    CHECK(entropy == doctest::Approx(std::log(6.0)));
    CHECK(p99 == doctest::Approx(std::exp(1.5) / 6).epsilon(0.03));
    const std::vector<std::int32_t> offsets{0, 2};
    const auto token_log_p = opd::view(log_q.data(), N), token_log_mu = opd::view(log_mu.data(), N);
    // [prefixes]
    opd::prefix_staleness prefixes; // add() every micro-batch, merge() ranks
    prefixes.add(token_log_p, token_log_mu, offsets);
    const double far = prefixes.log_ratio(), effective = prefixes.effective_share(); // 0 nats and 1: its own
    // [/prefixes]
    CHECK(far == doctest::Approx(-0.25));
    CHECK(effective < 1);
    // [fields]
    std::string all;
    opd::diagnostics::fields([&](const char* name, auto field, auto) {
        const auto& value = d.*field;
        if constexpr (!std::is_array_v<std::remove_reference_t<decltype(value)>>)
            if (value != 0) all += std::string(name) + " " + std::to_string(value) + "\n";
    });
    // [/fields]
    CHECK(all.find("tokens 4\n") != std::string::npos);
    CHECK(all.find("teacher_kl_sum 2.000000\n") != std::string::npos);
}

TEST_CASE("noise and products") {
    const std::vector<float> logp{-1.f, -2.f, -0.7f};
    const std::uint64_t seed = 1, sample = 42;
    const std::uint32_t position = 5;
    // [noise]
    const opd::noise_row noise(seed, opd::noise_stream::rollout, sample, position);
    const opd::index_t token = opd::gumbel_max(noise, 0, logp.data(), opd::index_t(logp.size()));
    // [/noise]
    CHECK(token >= 0);
    CHECK(token == opd::gumbel_max(noise, 0, logp.data(), 3));

    constexpr long M = 2, N = 3, K = 4;
    std::vector<float> X(M * K, 1), W(N * K, 2), Y(M * N);
    // [product]
    // Y (M,N) = X (M,K) W (N,K)^T
    opd::product(opd::serial_executor{}, opd::product_nt(M, N, K, X.data(), K, W.data(), K, Y.data(), N));
    // [/product]
    CHECK(Y[5] == 8);
}

} // namespace
