// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The first lines of docs/data.md: a set is written, read, evaluated with the bits of the same cache in memory, and
// read by numpy with the page's ten lines. What surogate's files hold is converted to a set.
#include "data/support.hpp"
#include "support/compiled/support.hpp"

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <doctest/doctest.h>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "opd/evaluate.hpp"

namespace {

using namespace opd::test;
using opd::index_t;
using opd::view;

struct scored_answer {
    std::vector<std::int32_t> tokens; // (T)
    index_t n;                        // rows
    std::vector<std::int32_t> ids;    // (n,K)
    std::vector<float> log_q;         // (n,K)
    std::vector<float> log_tail;      // (n)
};
constexpr index_t V = 1000, K = 8;

std::vector<scored_answer> answers_of_a_teacher(numbers& u) {
    std::vector<scored_answer> all;
    for (int i = 0; i < 20; ++i) {
        scored_answer a;
        a.n = 1 + u.below(6);
        for (index_t t = 0; t < a.n + 3; ++t) a.tokens.push_back(std::int32_t(u.below(V)));
        for (index_t r = 0; r < a.n; ++r) {
            for (index_t j = 0; j < K; ++j) {
                a.ids.push_back(std::int32_t(j * 100 + u.below(100)));
                a.log_q.push_back(float(opd::half(float(-3 - u.uniform()))));
            }
            a.log_tail.push_back(float(opd::half(-1.5f)));
        }
        all.push_back(a);
    }
    return all;
}

void write(const std::string& folder, const std::vector<scored_answer>& answers) {
    // [write]
    opd::data::rollout_writer out(folder, {.vocab = V,
                                           .id_bits = 17,
                                           .log_probs = opd::data::dtype::f16,
                                           .fingerprints = {.sft_teacher = "4b1d", .scoring_teacher = "4b1d"}});
    for (auto i = std::size_t(out.sequences()); i < answers.size(); ++i) { // goes on where it was killed
        const scored_answer& a = answers[i];
        out.add({.tokens = a.tokens, .rows = a.n, .sample = std::int64_t(i)},
                opd::teacher::support{view(a.ids.data(), a.n, K), view(a.log_q.data(), a.n, K),
                                      view(a.log_tail.data(), a.n)});
    }
    out.finish();
    // [/write]
}

/// An interpreter that has numpy; none: empty.
std::string python() {
    for (const char* name : {"/usr/bin/python3", "python3"})
        if (std::system((name + std::string(" -c 'import numpy' 2>/dev/null")).c_str()) == 0) return name;
    MESSAGE("no numpy on this machine (Debian: python3-numpy): nothing tested");
    return {};
}

} // namespace

TEST_CASE("written, read, evaluated") {
    numbers u(7);
    const auto answers = answers_of_a_teacher(u);
    const folder dir;
    const std::string folder = dir / "set";
    write(folder, answers);
    std::vector<float> logits(20 * 6 * std::size_t(V));
    for (float& z : logits) z = float(u.normal());
    opd::cpu_backend be{};
    double loss = 0, expected = 0;
    // [read]
    const opd::data::rollout_set set(folder);
    set.check({.scoring_teacher = "4b1d"}); // another teacher than the run's is refused
    opd::data::rollout_reader reader(set, {.seed = 1, .rank = 0, .ranks = 1});
    while (opd::data::rollouts some = reader.next(8)) { // eight sequences; none at the end of the epoch
        const auto cache = some.cache<opd::teacher::support<std::int32_t>>();
        const opd::student::logits student{view(std::as_const(logits).data(), some.rows(), V)};
        loss += opd::evaluate(be, student, cache, opd::tail_bucket<opd::reverse_kl>{}, {.offsets = some.row_offsets()})
                    .loss;
    }
    // [/read]
    opd::data::rollout_reader again(set, {.seed = 1});
    for (auto next = again.next_numbers(8); !next.empty(); next = again.next_numbers(8)) {
        scored_answer all{};
        for (const index_t s : next) {
            const scored_answer& a = answers[std::size_t(s)];
            all.n += a.n;
            all.ids.insert(all.ids.end(), a.ids.begin(), a.ids.end());
            all.log_q.insert(all.log_q.end(), a.log_q.begin(), a.log_q.end());
            all.log_tail.insert(all.log_tail.end(), a.log_tail.begin(), a.log_tail.end());
        }
        const opd::teacher::support<std::int32_t> cache{
            view(all.ids.data(), all.n, K), view(all.log_q.data(), all.n, K), view(all.log_tail.data(), all.n)};
        const opd::student::logits student{view(std::as_const(logits).data(), all.n, V)};
        expected += opd::evaluate(be, student, cache, opd::tail_bucket<opd::reverse_kl>{}).loss;
    }
    CHECK(loss > 0);
    CHECK(loss == expected);
}

TEST_CASE("read by numpy") {
    const std::string interpreter = python();
    if (interpreter.empty()) return;
    numbers u(8);
    const auto answers = answers_of_a_teacher(u);
    const folder dir;
    write(dir / "set", answers);
    const std::string command = interpreter + " " OPD_TEST_SOURCE_DIR "/tests/data/read_set.py " + (dir / "set");
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
    REQUIRE(pipe != nullptr);
    long long sequences = 0, rows = 0, tokens = 0, ids = 0;
    double log_q = 0, log_tail = 0;
    REQUIRE(std::fscanf(pipe.get(), "%lld %lld %lld %lld %lf %lf", &sequences, &rows, &tokens, &ids, &log_q,
                        &log_tail) == 6);
    long long all_rows = 0, all_tokens = 0, all_ids = 0;
    double all_log_q = 0, all_log_tail = 0;
    for (const scored_answer& a : answers) {
        all_rows += a.n;
        all_tokens = std::accumulate(a.tokens.begin(), a.tokens.end(), all_tokens);
        all_ids = std::accumulate(a.ids.begin(), a.ids.end(), all_ids);
        all_log_q = std::accumulate(a.log_q.begin(), a.log_q.end(), all_log_q);
        all_log_tail = std::accumulate(a.log_tail.begin(), a.log_tail.end(), all_log_tail);
    }
    CHECK(sequences == 20);
    CHECK(rows == all_rows);
    CHECK(tokens == all_tokens);
    CHECK(ids == all_ids);
    CHECK(log_q == doctest::Approx(all_log_q));
    CHECK(log_tail == doctest::Approx(all_log_tail));
}

TEST_CASE("a token shard and its .kd sidecar are converted") {
    const std::string interpreter = python();
    if (interpreter.empty()) return;
    // two sequences, of 5 tokens and of 3, and 4 more tokens that were not captured; 3 ids a row
    const std::int32_t n = 12, k = 3;
    std::vector<std::int32_t> tokens(12), positions{0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3};
    std::iota(tokens.begin(), tokens.end(), 10);
    std::vector<std::uint32_t> ids(std::size_t(n * k));
    std::iota(ids.begin(), ids.end(), 100u);
    std::vector<opd::half> log_q(ids.size(), opd::half(0.f));
    for (std::size_t i = 0; i < std::size_t(8 * k); ++i) log_q[i] = opd::half(-1 - float(i) / 4);
    const auto header = [](std::string magic, std::vector<std::int32_t> fields) {
        magic.append(reinterpret_cast<const char*>(fields.data()), 4 * fields.size());
        magic.resize(1024);
        return magic;
    };
    const auto line = [](const auto& v) {
        return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof v[0]);
    };
    const folder dir;
    write_all(dir / "train-000.bin", header("BIN.TOK\n", {3, 4, n, 500, 0, 0}) + line(tokens) + line(positions));
    write_all(dir / "train-000.bin.kd", header("KD.LOGP\n", {1, k, n, 500, 0, 0}) + line(ids) + line(log_q));
    const std::string command = interpreter + " " OPD_TEST_SOURCE_DIR "/examples/convert/from_kd.py ";
    REQUIRE(std::system((command + (dir / "set ") + (dir / "train-000.bin")).c_str()) == 0);
    const opd::data::rollout_set set(dir / "set");
    set.verify();
    CHECK(set.description().vocab == 500);
    REQUIRE(set.sequences() == 2);
    opd::data::rollouts all = set.read(0, 2);
    const auto c = all.cache<opd::teacher::support<std::int32_t, opd::half>>();
    REQUIRE((all.rows() == 4 + 2 && c.ids.cols == k));
    CHECK(all.row_tokens() == std::vector<std::int32_t>{11, 12, 13, 14, 16, 17});
    const index_t from[] = {0, 1, 2, 3, 5, 6}; // the sidecar's rows
    for (index_t r = 0; r < 6; ++r)
        for (index_t j = 0; j < k; ++j) {
            CHECK(c.ids(r, j) == std::int32_t(ids[std::size_t(from[r] * k + j)]));
            CHECK(c.log_q(r, j) == log_q[std::size_t(from[r] * k + j)]);
        }
    write_all(dir / "train-000.bin.kd", header("KD.LOGP\n", {2, k, n, 500, 0, 0}));
    CHECK(std::system((command + (dir / "other ") + (dir / "train-000.bin") + " 2>/dev/null").c_str()) != 0);
}

TEST_CASE("cached logits of Megatron-LM are converted, with the tokens of its indexed data set") {
    const std::string interpreter = python();
    if (interpreter.empty()) return;
    if (std::system("zstd --version > /dev/null 2>&1") != 0) {
        MESSAGE("no zstd on this machine (Debian: zstd): nothing tested");
        return;
    }
    const std::string convert = interpreter + " " OPD_TEST_SOURCE_DIR "/examples/convert/from_megatron.py ";
    for (const char* version : {"1", "2"}) {
        CAPTURE(version);
        const folder dir;
        const std::string make = interpreter + " " OPD_TEST_SOURCE_DIR "/tests/data/megatron_files.py ";
        REQUIRE(std::system((make + dir.path() + " " + version).c_str()) == 0);
        const std::string from = " 131072 " + (dir / "tars ") + (dir / "text ") + (dir / "x-GPTDataset-train-");
        REQUIRE(std::system((convert + (dir / "set") + from).c_str()) == 0);
        const opd::data::rollout_set set(dir / "set");
        set.verify();
        constexpr index_t rows = 5, k = 3, sequences = 24;
        REQUIRE(set.sequences() == sequences);
        const std::string truth = read_all(dir / "truth.bin");
        REQUIRE(truth.size() == 4 * sequences * (rows + 1 + 2 * rows * k));
        const char* at = truth.data();
        const auto next = [&]<class T>(T x) {
            std::memcpy(static_cast<void*>(&x), at, sizeof x);
            at += sizeof x;
            return x;
        };
        for (index_t s = 0; s < sequences; ++s) {
            opd::data::rollouts one = set.read(s, 1);
            const auto c = one.cache<opd::teacher::support<std::int32_t, opd::half>>();
            const auto tokens = one.tokens();
            REQUIRE((tokens.size == rows + 1 && c.ids.rows == rows && c.ids.cols == k));
            for (index_t i = 0; i <= rows; ++i) CHECK(tokens[i] == next(std::int32_t{}));
            for (index_t i = 0; i < rows * k; ++i) CHECK(c.ids(i / k, i % k) == next(std::int32_t{}));
            for (index_t i = 0; i < rows * k; ++i) CHECK(float(c.log_q(i / k, i % k)) == next(float{}));
        }
        const std::string second = *version == '1' ? "/cp0_dp1__1.tar" : "/dp1__0-24.tar";
        fs::rename(dir / "tars" + second, dir / "tars/cp1_dp1__1.tar"); // half of each sequence
        CHECK(std::system((convert + (dir / "other") + from + " 2>/dev/null").c_str()) != 0);
    }
}
