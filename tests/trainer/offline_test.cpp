// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Distillation from a data set: what is written is the same however it was interrupted, and is what rollout and teacher
// say; a run from it begins where the online run begins, is resumed bit for bit, also after SIGKILL, tells how far it
// has drifted, and refuses sets that are damaged or not its own, by name. Students that learn from the teacher's own
// answers first, and teachers that are not the one they learnt from.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/supervised.hpp"
#include "run/offline.hpp"
#include "settings/files.hpp"
#include "trainer/commands.hpp"
#include "trainer/data_sets.hpp"
#include "trainer/scratch.hpp"

using namespace trainer;
using opd::test::exit_of;
using opd::test::flags;
using opd::test::go;
using opd::test::refusal;
using opd::test::scratch;
using opd::test::small_models;
using opd::test::with;
namespace fs = std::filesystem;

namespace {

constexpr int batch = 8;
constexpr std::size_t small_shard = 2000; // bytes: a handful of sequences

flags tiny(const std::string& directory, const flags& more) {
    return with(with({"--run-dir=" + directory, "--quiet", "--prompts=" + std::to_string(batch), "--rate=0.01",
                      "--warmup=0", "--eval-prompts=8", "--eval-samples=0", "--eval-every=0", "--log-every=1",
                      "--checkpoint-every=1000", "--threads=2"},
                     small_models()),
                more);
}

// A run with a teacher of some steps, and a student that has learnt less: pi_ref.
struct warm {
    scratch dir;
    std::string student = dir / "base/checkpoints/student.ckpt";
    warm() {
        run r(parse_command_line(tiny(dir / "base", {"--teacher-steps=60", "--student-max-steps=8", "--steps=0",
                                                     "--student-target-accuracy=1", "--student-check-prompts=4"})));
        REQUIRE(go(r) == exit_ok);
    }
    flags to(const std::string& folder, int sequences) const {
        return {"--run-dir=" + dir / "base", "--quiet", "--write-offline=" + folder,
                "--offline-sequences=" + std::to_string(sequences), "--threads=2"};
    }
    exit_code write(const std::string& folder, int sequences, const flags& more = {},
                    std::size_t shard = small_shard) const {
        interrupted = false;
        return write_offline(parse_command_line(with(to(folder, sequences), more)), shard);
    }
    flags learner(const std::string& directory, const flags& more) const {
        return with(tiny(directory, {"--teacher-steps=60", "--student-max-steps=8", "--student-target-accuracy=1",
                                     "--student-check-prompts=4", "--start-from=" + student, "--estimator=lightning"}),
                    more);
    }
};
const warm& base() {
    static const warm made;
    return made;
}

std::map<std::string, std::string> files_of(const std::string& folder) {
    std::map<std::string, std::string> r;
    for (const auto& entry : fs::directory_iterator(folder))
        r[entry.path().filename().string()] = read_file(entry.path().string());
    return r;
}

std::vector<nlohmann::json> steps_of(const std::string& directory) {
    std::vector<nlohmann::json> r;
    std::istringstream log(read_file(directory + "/log.jsonl"));
    for (std::string line; std::getline(log, line);) {
        auto j = nlohmann::json::parse(line);
        if (j.value("stage", "") == "distill" && j.contains("loss")) r.push_back(std::move(j));
    }
    return r;
}

// Ends, with its lock, after so many steps.
void stopped(const flags& arguments, int steps) {
    run r(parse_command_line(arguments));
    r.stop_after(steps);
    REQUIRE(go(r) == exit_interrupted);
}
void contains(const std::string& text, const std::string& part) {
    CAPTURE(text);
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
}

// A set of 48 sequences, and the same with other fingerprints.
const std::string& shared_set() {
    static const scratch dir;
    static const std::string folder = [] {
        REQUIRE(base().write(dir / "set", 48) == exit_ok);
        return dir / "set";
    }();
    return folder;
}

} // namespace

TEST_CASE(
    "a set holds what pi_ref drew and what both models say of it, and is the same bytes when it is written again") {
    const scratch dir;
    REQUIRE(base().write(dir / "a", 48, {"--threads=1"}) == exit_ok);
    CHECK(files_of(dir / "a") == files_of(shared_set()));
    REQUIRE(base().write(dir / "a", 48) == exit_ok); // nothing is left to do
    CHECK(files_of(dir / "a") == files_of(shared_set()));
    REQUIRE(base().write(dir / "other", 48, {"--seed=2"}) == exit_ok);
    CHECK(files_of(dir / "other") != files_of(shared_set()));

    const opd::data::rollout_set set(shared_set());
    CHECK(set.sequences() == 48);
    CHECK(set.shards().size() > 3);
    std::string saved;
    const run_state state = load_checkpoint(base().student, saved);
    const auto& prints = set.description().prints;
    CHECK(prints.reference_policy == print_of_policy(state.student_weights, 1));
    CHECK(prints.reference_policy != print_of_policy(state.student_weights, 0.9));
    CHECK(prints.sft_teacher == print_of_teacher(state.teacher_weights));
    CHECK(prints.scoring_teacher == prints.sft_teacher);
    auto all = set.read(0, 48);
    const auto samples = all.cache<opd::teacher::samples<std::int32_t>>();
    CHECK(samples.ids.cols == 1);
    const auto drawn = all.row_tokens();
    double gap = 0;
    for (opd::index_t r = 0; r < all.rows(); ++r) {
        REQUIRE(*samples.ids.row(r) == drawn[static_cast<std::size_t>(r)]);
        REQUIRE(*samples.log_mu.row(r) <= 0);
        REQUIRE(*samples.log_q.row(r) <= 0);
        REQUIRE(all.mask()[r] == 1);
        gap += static_cast<double>(*samples.log_mu.row(r) - *samples.log_q.row(r));
    }
    CHECK(gap / static_cast<double>(all.rows()) > 0.05); // KL(pi_ref, teacher) of a student that has less to say
}

TEST_CASE("a writer that is killed goes on, and ends in the same bytes") {
    const scratch dir;
    constexpr int sequences = 2600; // beyond one call of rollout, to be killed between two
    const auto write = [&](const std::string& folder, const flags& more = {}) {
        return base().write(folder, sequences, more, 20'000);
    };
    const std::string whole = dir / "whole", killed = dir / "killed";
    REQUIRE(write(whole) == exit_ok);
    const auto shards = [&](const std::string& folder) {
        std::size_t n = 0;
        std::error_code none;
        for (const auto& entry : fs::directory_iterator(folder, none))
            n += entry.path().filename().string().starts_with("shard-");
        return n;
    };
    const std::size_t all = shards(whole);
    int kills = 0;
    for (const std::size_t until : {std::size_t{1}, all / 4, all / 2}) {
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) ::_exit(write(killed));
        int status = 0;
        bool over = false;
        while (shards(killed) < until && !(over = ::waitpid(child, &status, WNOHANG) == child))
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (over) continue;
        REQUIRE(::kill(child, SIGKILL) == 0);
        REQUIRE(::waitpid(child, &status, 0) == child);
        kills += WIFSIGNALED(status);
    }
    CHECK(kills > 0);
    contains(
        [&] { // what the rest would be drawn with decides the bytes as well
            try {
                write(killed, {"--seed=2"});
            } catch (const failure& e) {
                return std::string(e.what());
            }
            return std::string();
        }(),
        "was begun with another seed");
    REQUIRE(write(killed) == exit_ok);
    CHECK(files_of(killed) == files_of(whole));
}

TEST_CASE("the first step from a set is the online one's, with drift 0, and then there is drift") {
    const scratch dir;
    REQUIRE(base().write(dir / "set", batch) == exit_ok); // the online run's first batch
    run online(parse_command_line(base().learner(dir / "online", {"--steps=1"})));
    REQUIRE(go(online) == exit_ok);
    run offline(parse_command_line(base().learner(dir / "offline", {"--steps=4", "--offline=" + dir / "set"})));
    REQUIRE(go(offline) == exit_ok);
    const auto a = steps_of(dir / "online"), b = steps_of(dir / "offline");
    REQUIRE(a.size() == 1);
    REQUIRE(b.size() == 4);
    for (const char* key : {"loss", "gradient_norm", "kl"}) // the sum runs over the same sequences in another order
        CHECK(b[0][key].get<double>() == doctest::Approx(a[0][key].get<double>()).epsilon(1e-4));
    CHECK(b[0]["response_tokens"] == a[0]["response_tokens"]);
    CHECK_FALSE(a[0].contains("drift"));
    CHECK(b[0]["mismatched"] == 0); // the learner's log-probs are those of the set, bit for bit
    CHECK(b[0]["drift"]["ratio_mean"] == 1.0);
    CHECK(b[0]["drift"]["ratio_deviation"] == 0.0);
    CHECK(b[0]["drift"]["chi_squared"] == 0.0);
    CHECK(b[0]["drift"]["effective_share"] == 1.0);
    CHECK(b[3]["drift"]["chi_squared"].get<double>() > 1e-6);
    CHECK(b[3]["drift"]["effective_share"].get<double>() < 1);
    const auto report = nlohmann::json::parse(read_file(dir / "offline/report.json"));
    const auto& told = report["schedule"]["offline"];
    CHECK(told["epochs"] == 4.0); // each step the whole set
    CHECK(told["drift"]["chi_squared"].get<double>() > b[3]["drift"]["chi_squared"].get<double>());
    CHECK(report["seconds"]["rollout"] == 0.0);
    CHECK(report["seconds"]["teacher_scoring"] == 0.0);
}

TEST_CASE("a run from a set that is interrupted and resumed ends in the bytes of one that was not") {
    const scratch dir;
    // 48 sequences by 8, 20 steps: more than three epochs; two updates a step
    for (const flags& kind : std::vector<flags>{
             {}, {"--mini-batches=2"}, {"--estimator=mc", "--m=1", "--surrogate=ppo_clip", "--prompts=10"}}) {
        const std::string whole = dir / "whole", parts = dir / "parts";
        const flags more = with({"--offline=" + shared_set(), "--steps=20", "--overwrite"}, kind);
        run once(parse_command_line(base().learner(whole, more)));
        REQUIRE(go(once) == exit_ok);
        CHECK(once.state().teacher_weights.empty()); // no teacher was kept
        CHECK(once.state().tokens[static_cast<int>(clock_name::rollout)] == 0);
        CHECK(once.state().tokens[static_cast<int>(clock_name::teacher_scoring)] == 0);
        stopped(base().learner(parts, more), 7);
        for (const int steps : {5, -1}) {
            run next(parse_command_line({"--run-dir=" + parts, "--resume", "--quiet", "--threads=1"}));
            if (steps > 0) next.stop_after(steps);
            REQUIRE(go(next) == (steps > 0 ? exit_interrupted : exit_ok));
        }
        for (const char* name : {"distill.ckpt", "latest.ckpt"})
            CHECK(read_file(whole + "/checkpoints/" + name) == read_file(parts + "/checkpoints/" + name));
        CHECK(read_file(whole + "/consumed.jsonl") == read_file(parts + "/consumed.jsonl"));
        CHECK(read_file(whole + "/schedule.json") == read_file(parts + "/schedule.json"));
    }
    // every sequence once an epoch
    const auto learnt = [&] { // how often from each sequence
        std::map<std::int64_t, int> times;
        std::istringstream lines(read_file(dir / "plain/consumed.jsonl"));
        for (std::string line; std::getline(lines, line);) {
            const auto j = nlohmann::json::parse(line);
            for (const std::int64_t s : j["sequences"]) ++times[s];
        }
        CHECK(times.size() == 48);
        return times;
    };
    {
        run plain(parse_command_line(base().learner(dir / "plain", {"--offline=" + shared_set(), "--steps=12"})));
        REQUIRE(go(plain) == exit_ok);
    }
    for (const auto& [sequence, times] : learnt()) CHECK(times == 2);
    // on with more steps, where the shuffle was
    run longer(parse_command_line({"--run-dir=" + dir / "plain", "--resume", "--quiet", "--steps=18"}));
    REQUIRE(go(longer) == exit_ok);
    for (const auto& [sequence, times] : learnt()) CHECK(times == 3);
}

TEST_CASE("fingerprints that are not the run's are refused by name, and accepted by name") {
    const scratch dir;
    const opd::data::fingerprints mine = opd::data::rollout_set(shared_set()).description().prints;
    const auto attempt = [&](const std::string& folder, const flags& more) {
        return base().learner(dir / "run", with({"--offline=" + folder, "--steps=1", "--overwrite"}, more));
    };
    int n = 0;
    for (const char* name : {"scoring_teacher", "sft_teacher", "tokenizer", "reference_policy"}) {
        CAPTURE(name);
        opd::data::fingerprints other = mine;
        const std::string folder = dir / ("set" + std::to_string(n++)), is = name;
        if (is == "scoring_teacher") other.scoring_teacher = "else";
        if (is == "sft_teacher") other.sft_teacher = other.scoring_teacher = "else"; // a consistent other one
        if (is == "tokenizer") other.tokenizer = "else";
        if (is == "reference_policy") other.reference_policy = "else";
        opd::test::copy_set(shared_set(), folder, other);
        contains(refusal(attempt(folder, {}), exit_usage), "--accept-mismatch " + is);
        const std::string wrong = is == "tokenizer" ? "reference_policy" : "tokenizer";
        contains(refusal(attempt(folder, {"--accept-mismatch=" + wrong}), exit_usage), "--accept-mismatch " + is);
        const std::string right = is == "sft_teacher" ? "sft_teacher,scoring_teacher" : is;
        run r(parse_command_line(attempt(folder, {"--accept-mismatch=" + right})));
        CHECK(go(r) == exit_ok);
    }
    // the student of another temperature is another policy
    contains(refusal(attempt(shared_set(), {"--temperature=0.9"}), exit_usage), "--accept-mismatch reference_policy");
    // no name makes ids fit that the student does not know
    opd::test::copy_set(shared_set(), dir / "wide", mine, 4000);
    contains(refusal(attempt(dir / "wide", {"--accept-mismatch=tokenizer"}), exit_input), "has ids up to 4000");
    // another teacher scores: known when it is written, refused when it is to be learnt from
    const std::string other = dir / "other";
    run second(parse_command_line(tiny(other, {"--teacher-steps=5", "--steps=0", "--seed=9"})));
    REQUIRE(go(second) == exit_ok);
    REQUIRE(base().write(dir / "crossed", 8, {"--scoring-teacher=" + other + "/checkpoints/student.ckpt"}) == exit_ok);
    contains(refusal(attempt(dir / "crossed", {}), exit_usage), "--accept-mismatch scoring_teacher");
    contains(refusal(attempt(shared_set(), {"--accept-mismatch=teacher"}), exit_usage),
             "--accept-mismatch: 'teacher' is not one of scoring_teacher");
}

TEST_CASE("sets that are damaged, unfinished, exchanged or no sets are refused, and settings that do not fit them") {
    const scratch dir;
    const auto attempt = [&](const std::string& folder, const flags& more = {}) {
        return base().learner(dir / "run", with({"--offline=" + folder, "--steps=2", "--overwrite"}, more));
    };
    fs::copy(shared_set(), dir / "bad");
    const std::string shard = dir / "bad/shard-000001.safetensors";
    std::string bytes = read_file(shard);
    bytes[bytes.size() - 20] = static_cast<char>(bytes[bytes.size() - 20] ^ 1);
    std::ofstream(shard, std::ios::binary) << bytes;
    contains(refusal(attempt(dir / "bad"), exit_input), "shard-000001.safetensors");
    bytes.resize(bytes.size() - 3);
    std::ofstream(shard, std::ios::binary) << bytes;
    contains(refusal(attempt(dir / "bad"), exit_input), "it was cut, or is another file");
    fs::copy(shared_set(), dir / "open");
    std::string index = read_file(dir / "open/index.jsonl");
    index.resize(index.find("\"end\"") == std::string::npos ? 0 : index.rfind('\n', index.size() - 2) + 1);
    std::ofstream(dir / "open/index.jsonl", std::ios::binary) << index;
    contains(refusal(attempt(dir / "open"), exit_input), "its writer has not finished");
    contains(refusal(attempt(dir / "none"), exit_input), "none/set.json");

    // a run goes on with its own set alone
    fs::copy(shared_set(), dir / "set");
    stopped(attempt(dir / "set"), 1);
    fs::remove_all(dir / "set");
    REQUIRE(base().write(dir / "set", 40) == exit_ok);
    contains(refusal({"--run-dir=" + dir / "run", "--resume", "--quiet"}, exit_input), "is not the set that");

    const auto usage = [&](const flags& more, const std::string& part) {
        contains(refusal(attempt(shared_set(), more), exit_usage), part);
    };
    usage({"--estimator=reverse_kl"}, "not --estimator reverse_kl");
    usage({"--estimator=mc", "--m=4", "--accept-bias"}, "not --m 4");
    usage({"--schedule=async"}, "--schedule is not used by --offline");
    usage({"--inject=kill=0.1"}, "--inject is not used by --offline");
    contains(refusal(tiny(dir / "run", {"--estimator=lightning", "--offline=" + shared_set()}), exit_usage),
             "needs --start-from");
    contains(refusal(base().learner(dir / "run", {"--accept-mismatch=tokenizer"}), exit_usage),
             "--accept-mismatch is not used by a run without --offline");
    contains(refusal(base().learner(dir / "run", {"--offline-sequences=4"}), exit_usage),
             "--offline-sequences is not used by a run without --write-offline");
    CHECK(exit_of({"opd-train", "--run-dir=" + dir / "nothing", "--write-offline=" + dir / "x"}) == exit_input);
}

TEST_CASE("from a set alone the gap to the teacher falls, nearly as far as online") {
    const scratch dir;
    REQUIRE(base().write(dir / "set", 512) == exit_ok);
    const auto closed = [&](const std::string& directory, const flags& more) { // of the KL to the teacher
        run r(parse_command_line(
            base().learner(directory, with({"--steps=120", "--prompts=32", "--eval-prompts=40"}, more))));
        REQUIRE(go(r) == exit_ok);
        const auto kl = nlohmann::json::parse(read_file(directory + "/report.json"))["kl_to_teacher"];
        return 1 - kl["after"].get<double>() / kl["before"].get<double>();
    };
    const double online = closed(dir / "online", {}), offline = closed(dir / "offline", {"--offline=" + dir / "set"});
    MESSAGE("of the KL to the teacher " << online << " is closed online, " << offline << " offline");
    CHECK(online > 0.8);
    CHECK(offline > 0.9 * online);
}

TEST_CASE("a set that was asked for the teacher's best ids has them, and a run learns from them as online") {
    const scratch dir;
    const flags lists = {"--estimator=tail_bucket", "--k=4"};
    REQUIRE(base().write(dir / "set", batch, lists) == exit_ok);
    // the same tokens as without; the ids by hand
    const opd::data::rollout_set set(dir / "set"), plain(shared_set());
    auto with_lists = set.read(0, batch), without = plain.read(0, batch);
    const auto support = with_lists.cache<opd::teacher::support<std::int32_t>>();
    const auto drawn = with_lists.cache<opd::teacher::samples<std::int32_t>>(),
               as_before = without.cache<opd::teacher::samples<std::int32_t>>();
    REQUIRE(support.ids.cols == 4);
    REQUIRE(support.ids.rows == without.rows());
    std::string saved;
    run_state state = load_checkpoint(base().student, saved);
    const config c = with_task_shapes(parse_command_line(base().learner(dir / "none", {})).settings,
                                      *task_of(parse_command_line(base().learner(dir / "none", {})).settings));
    transformer<float> teacher(c.teacher_model);
    teacher.weights = state.teacher_weights;
    teacher.weights_changed();
    opd::cpu_backend backend;
    std::vector<std::vector<token>> inputs;
    for (opd::index_t s = 0; s < batch; ++s) {
        const auto from = with_lists.token_offsets()[s], to = with_lists.token_offsets()[s + 1];
        inputs.emplace_back(with_lists.tokens().data + from, with_lists.tokens().data + to - 1);
    }
    std::vector<float> logits;
    teacher_scorer(teacher, backend).logits(inputs, logits);
    const opd::index_t v = c.teacher_model.vocabulary;
    opd::index_t first = 0; // row of the logits
    for (opd::index_t s = 0; s < batch; ++s) {
        const auto tokens = std::ssize(inputs[static_cast<std::size_t>(s)]);
        const opd::index_t begin = with_lists.row_offsets()[s], n = with_lists.row_offsets()[s + 1] - begin;
        for (opd::index_t r = 0; r < n; ++r) {
            CHECK(*drawn.log_q.row(begin + r) == *as_before.log_q.row(begin + r));
            CHECK(*drawn.log_mu.row(begin + r) == *as_before.log_mu.row(begin + r));
            const float* z = logits.data() + (first + tokens - n + r) * v;
            std::vector<std::pair<double, int>> order; // best first, ties to the lower id
            double sum = 0, tail = 0;
            for (int id = 0; id < v; ++id)
                order.push_back({-static_cast<double>(z[id]), id}), sum += std::exp(double{z[id]});
            std::ranges::sort(order);
            for (int i = 0; i < v; ++i) {
                const double log_q = -order[static_cast<std::size_t>(i)].first - std::log(sum);
                if (i >= 4) tail += std::exp(log_q);
                if (i >= 4) continue;
                CHECK(support.ids.row(begin + r)[i] == order[static_cast<std::size_t>(i)].second);
                CHECK(support.log_q.row(begin + r)[i] == doctest::Approx(log_q).epsilon(1e-4));
            }
            CHECK(std::exp(double{support.log_tail[begin + r]}) == doctest::Approx(tail).epsilon(1e-3));
        }
        first += tokens;
    }

    run online(parse_command_line(base().learner(dir / "online", with(lists, {"--steps=1"}))));
    REQUIRE(go(online) == exit_ok);
    run offline(
        parse_command_line(base().learner(dir / "offline", with(lists, {"--steps=6", "--offline=" + dir / "set"}))));
    REQUIRE(go(offline) == exit_ok);
    const auto a = steps_of(dir / "online"), b = steps_of(dir / "offline");
    for (const char* key : {"loss", "gradient_norm", "kl", "teacher_mass"})
        CHECK(b[0][key].get<double>() == doctest::Approx(a[0][key].get<double>()).epsilon(1e-4));
    CHECK(b[0]["drift"]["ratio_mean"] == 1.0);
    CHECK(b[5]["drift"]["chi_squared"].get<double>() > 1e-6);
    stopped(base().learner(dir / "parts", with(lists, {"--steps=6", "--offline=" + dir / "set"})), 3);
    run rest(parse_command_line({"--run-dir=" + dir / "parts", "--resume", "--quiet"}));
    REQUIRE(go(rest) == exit_ok);
    CHECK(read_file(dir / "parts/checkpoints/latest.ckpt") == read_file(dir / "offline/checkpoints/latest.ckpt"));

    const auto refused = [&](const std::string& folder, const flags& more, exit_code code, const std::string& part) {
        contains(refusal(base().learner(dir / "no",
                                        with(with(lists, {"--steps=1", "--overwrite", "--offline=" + folder}), more)),
                         code),
                 part);
    };
    refused(dir / "set", {"--k=5"}, exit_input, "has 4 of the teacher's best ids a row, not --k 5");
    refused(shared_set(), {}, exit_input, "support");
    refused(dir / "set", {"--topk-from=student"}, exit_usage, "not --topk-from student");
    contains(
        [&] {
            try {
                base().write(dir / "x", 4, with(lists, {"--topk-from=student"}));
            } catch (const failure& e) {
                return std::string(e.what());
            }
            return std::string();
        }(),
        "--topk-from student");
    // lightning reads the drawn tokens of either set
    run same(parse_command_line(base().learner(dir / "same", {"--steps=1", "--offline=" + dir / "set"})));
    CHECK(go(same) == exit_ok);
}

// --- students of the teacher's own answers; other teachers -----------------------------------------------------------

namespace {

// The same teacher, and a student of its answers.
const flags sft = {"--teacher-steps=60",          "--student-max-steps=10",    "--warmup-data=teacher",
                   "--student-target-accuracy=1", "--student-check-prompts=4", "--student-batch=6"};

run_state state_in(const std::string& path) {
    std::string settings;
    return load_checkpoint(path, settings);
}

} // namespace

TEST_CASE("a student's warm-up on the teacher's answers learns from what the teacher draws, whatever interrupts it") {
    const scratch dir;
    const flags warm_up = with(sft, {"--steps=0", "--temperature=0.9"});
    run whole(parse_command_line(tiny(dir / "whole", warm_up)));
    REQUIRE(go(whole) == exit_ok);
    const run_state made = state_in(dir / "whole/checkpoints/student.ckpt");

    // by hand: the teacher answers prompts of the stage's samples, the student learns from them
    const config c = parse_command_line(tiny(dir / "none", warm_up)).settings;
    const auto task = task_of(c);
    const config shaped = with_task_shapes(c, *task);
    transformer<float> teacher(shaped.teacher_model), student(shaped.student_model);
    teacher.weights = state_in(dir / "whole/checkpoints/teacher.ckpt").teacher_weights;
    teacher.weights_changed();
    student.initialise(c.run.seed + 1);
    opd::cpu_backend backend;
    adamw_state optimizer;
    supervised learn(*task, student, optimizer, backend);
    sampling o;
    o.seed = c.run.seed, o.temperature = 0.9, o.end = task->end_token(), o.max_response = task->max_response();
    std::uint64_t sample = std::uint64_t{2} << 56;
    std::size_t unlike = 0;
    for (int step = 0; step < 10; ++step) {
        std::vector<request> requests;
        for (int i = 0; i < 6; ++i, ++sample)
            requests.push_back({sample, task->prompt_tokens(task->training_problem(c.run.seed, sample))});
        std::vector<example> texts;
        for (const trajectory& t : roll_out(teacher, backend.team(), requests, o)) {
            texts.push_back({t.tokens, t.prompt_length});
            const auto solution = task->solution_tokens(task->training_problem(c.run.seed, t.sample));
            unlike += !std::ranges::equal(t.response(), solution);
        }
        const double ramp = std::min(1.0, (step + 1) / static_cast<double>(c.student.warmup));
        learn.step(texts, c.student.rate * ramp, c.optimizer);
    }
    CHECK(unlike > 20); // a teacher of 60 steps errs: its answers are not the solutions
    CHECK(student.weights == made.student_weights);
    run solved(parse_command_line(tiny(dir / "solved", with(warm_up, {"--warmup-data=solutions"}))));
    REQUIRE(go(solved) == exit_ok);
    CHECK(state_in(dir / "solved/checkpoints/student.ckpt").student_weights != made.student_weights);

    stopped(tiny(dir / "parts", with(warm_up, {"--threads=1"})), 60 + 4); // in the warm-up
    run rest(parse_command_line({"--run-dir=" + dir / "parts", "--resume", "--quiet", "--threads=2"}));
    REQUIRE(go(rest) == exit_ok);
    CHECK(read_file(dir / "parts/checkpoints/student.ckpt") == read_file(dir / "whole/checkpoints/student.ckpt"));
    contains(refusal(tiny(dir / "x", {"--warmup-data=both"}), exit_usage), "must be solutions or teacher, not 'both'");

    // the set says so, and who the teacher was
    REQUIRE(write_offline(parse_command_line({"--run-dir=" + dir / "whole", "--quiet", "--write-offline=" + dir / "set",
                                              "--offline-sequences=4"})) == exit_ok);
    const auto description = opd::data::rollout_set(dir / "set").description();
    CHECK(description.notes.at("warmup_data") == "teacher");
    CHECK(description.prints.sft_teacher == print_of_teacher(made.teacher_weights));
}

TEST_CASE("a run from a set that is killed ends in the bytes of one that was left alone") {
    const scratch dir;
    const auto settings = [&](const std::string& directory) {
        return base().learner(directory,
                              {"--offline=" + shared_set(), "--steps=400", "--checkpoint-every=7", "--log-every=40"});
    };
    run whole(parse_command_line(settings(dir / "whole")));
    REQUIRE(go(whole) == exit_ok);
    const auto done = [&] {
        std::int64_t n = 0;
        std::ifstream lines(dir / "killed/consumed.jsonl");
        for (std::string line; std::getline(lines, line);) ++n;
        return n;
    };
    int kills = 0;
    for (const std::int64_t until : {20, 90, 200}) {
        const bool resume = fs::exists(dir / "killed/checkpoints/latest.ckpt");
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            try {
                run r(parse_command_line(resume ? flags{"--run-dir=" + dir / "killed", "--resume", "--quiet"}
                                                : with(settings(dir / "killed"), {"--overwrite"})));
                ::_exit(go(r));
            } catch (const std::exception&) {
                ::_exit(99);
            }
        }
        int status = 0;
        bool over = false;
        while (done() < until && !(over = ::waitpid(child, &status, WNOHANG) == child))
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        REQUIRE_FALSE(over);
        REQUIRE(::kill(child, SIGKILL) == 0);
        REQUIRE(::waitpid(child, &status, 0) == child);
        kills += WIFSIGNALED(status);
    }
    CHECK(kills == 3);
    run rest(parse_command_line({"--run-dir=" + dir / "killed", "--resume", "--quiet"}));
    REQUIRE(go(rest) == exit_ok);
    for (const char* name : {"checkpoints/distill.ckpt", "checkpoints/latest.ckpt", "consumed.jsonl", "schedule.json"})
        CHECK(read_file(dir / "killed/" + name) == read_file(dir / "whole/" + name));
}

TEST_CASE("another teacher for one student: seeded by itself, scoring by name, online and from a set") {
    const scratch dir;
    const auto warm_up = [&](const char* name, const flags& more) {
        run r(parse_command_line(tiny(dir / name, with(with(sft, {"--steps=0"}), more))));
        REQUIRE(go(r) == exit_ok);
        return dir / name + "/checkpoints/student.ckpt";
    };
    const std::string first = warm_up("first", {}), second = warm_up("second", {"--teacher-seed=9"}),
                      alone = warm_up("alone", {"--seed=9"});
    const run_state a = state_in(first), b = state_in(second);
    CHECK(b.teacher_weights == state_in(alone).teacher_weights); // its weights, and the prompts that it learnt from
    CHECK(a.teacher_weights != b.teacher_weights);
    const run_state before_a = state_in(dir / "first/checkpoints/teacher.ckpt"),
                    before_b = state_in(dir / "second/checkpoints/teacher.ckpt");
    CHECK(before_a.student_weights == before_b.student_weights); // one student to begin with
    CHECK(a.student_weights != b.student_weights);

    const auto learner = [&](const char* name, const flags& more) {
        return tiny(
            dir / name,
            with(with(sft, {"--start-from=" + first, "--estimator=lightning", "--steps=3", "--overwrite"}), more));
    };
    const std::string scorer = "--scoring-teacher=" + second, accept = "--accept-mismatch=scoring_teacher";
    contains(refusal(learner("no", {scorer}), exit_usage), "to go on, --accept-mismatch scoring_teacher");
    const auto teacher_of = [](const flags& arguments) {
        run r(parse_command_line(arguments));
        CHECK(go(r) == exit_ok);
        return r.state().teacher_weights;
    };
    CHECK(teacher_of(learner("online", {"--scoring-teacher=" + first})) == a.teacher_weights); // the student's own
    CHECK(teacher_of(learner("online", {scorer, accept})) == b.teacher_weights);
    contains(refusal(tiny(dir / "x", {scorer}), exit_usage), "--scoring-teacher is not used by a run without");
    teacher_of(tiny(dir / "wide", {"--steps=0", "--teacher-ffn=16"}));
    contains(refusal(learner("no", {"--scoring-teacher=" + dir / "wide/checkpoints/student.ckpt"}), exit_usage),
             "was made with another teacher_model");

    // from a set: the same tokens, the other teacher's scores; by whose measure the run begins where the online run
    // does
    const auto write = [&](const char* name, const flags& more) {
        REQUIRE(write_offline(parse_command_line(with(
                    {"--run-dir=" + dir / "first", "--quiet", "--offline-sequences=8", "--write-offline=" + dir / name},
                    more))) == exit_ok);
        return dir / name;
    };
    const std::string own = write("own", {}), crossed = write("crossed", {scorer});
    const opd::data::rollout_set x(own), y(crossed);
    CHECK(y.description().prints.sft_teacher == print_of_teacher(a.teacher_weights));
    CHECK(y.description().prints.scoring_teacher == print_of_teacher(b.teacher_weights));
    auto of_x = x.read(0, 8), of_y = y.read(0, 8);
    CHECK(std::ranges::equal(std::span(of_x.tokens().data, static_cast<std::size_t>(of_x.tokens().size)),
                             std::span(of_y.tokens().data, static_cast<std::size_t>(of_y.tokens().size))));
    contains(refusal(learner("offline", {"--offline=" + crossed}), exit_usage), "--accept-mismatch scoring_teacher");
    contains(refusal(learner("offline", {"--offline=" + crossed, scorer}), exit_usage),
             "--accept-mismatch scoring_teacher");
    CHECK(teacher_of(learner("offline", {"--offline=" + crossed, scorer, accept})).empty());
    const auto report = [&](const char* name) { return nlohmann::json::parse(read_file(dir / name + "/report.json")); };
    CHECK(report("offline")["kl_to_teacher"]["before"] == report("online")["kl_to_teacher"]["before"]);
    CHECK(report("offline")["accuracy"]["teacher"] == report("online")["accuracy"]["teacher"]);
    CHECK(report("offline")["kl_to_teacher"]["before"] != report("first")["kl_to_teacher"]["before"]);
    CHECK(steps_of(dir / "offline")[0]["loss"].get<double>() ==
          doctest::Approx(steps_of(dir / "online")[0]["loss"].get<double>()).epsilon(1e-4));
}
