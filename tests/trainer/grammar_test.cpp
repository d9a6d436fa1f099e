// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "settings/config.hpp"
#include "settings/files.hpp"
#include "support/property.hpp"
#include "task/grammar_task.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"

using namespace trainer;
using opd::test::flags;
using opd::test::go;
using opd::test::scratch;
using opd::test::with;

namespace {

std::vector<token> tokens_of(const grammar& g, const std::string& text) {
    std::vector<token> r;
    std::string word;
    for (const char c : text + " ")
        if (c != ' ')
            word += c;
        else if (!word.empty())
            r.push_back(g.id(word)), word.clear();
    return r;
}

// One topic of two words a class.
const char* const few_words = "topic t\nnoun dog cat\nact follow chase\ndo drift rest\nadj old new\nname Ann Bob\n";

} // namespace

TEST_CASE("there are two thousand words, each once, and text is one to one with tokens") {
    const grammar& g = grammar::shipped();
    CHECK(g.vocabulary() >= 2000);
    CHECK(g.topics() == 16);
    std::set<std::string> words;
    for (token t = 0; t < g.vocabulary(); ++t) {
        CHECK(words.insert(g.word(t)).second);
        CHECK(g.id(g.word(t)) == t);
    }
    for (const char* made :
         {"berries", "boats", "lynxes", "follows", "studied", "moored", "quietly", "gently", "royally"})
        CHECK(words.contains(made));
    CHECK(g.text(tokens_of(g, "the boats drifted .")) == "the boats drifted .");
    CHECK(g.text(std::vector<token>{g.id("the"), g.vocabulary()}) == "the ?");
    CHECK_THROWS_WITH(g.id("quark"), "no token for 'quark'");
}

TEST_CASE("sentences agree in number and nest") {
    const grammar& g = grammar::shipped();
    for (const char* good : {
             "the sailor drifts .",
             "the sailors drift .",
             "Nelson followed some rusty boats .",
             "slowly , the boat that the pirates rescued drifted .",
             "the boats near the harbour are old .",
             "the sailor who drifts hopes that many gulls float , and Finn drifts .",
         }) {
        CAPTURE(good);
        CHECK(g.parses("LINE", tokens_of(g, good)));
    }
    for (const char* bad : {
             "the sailor drift .",                     // number of the verb
             "the sailors drifts .",                   //
             "some sailor drifted .",                  // and of the determiner
             "the boats near the harbour is old .",    // across a nested phrase
             "the sailor drifts , and Finn drifted .", // time of the clauses
             "the sailor followed .",                  // a verb with an object, and none
             "the sailor drifts",                      // no end
             "the drifts .",                           // no noun
             ". .",                                    //
         }) {
        CAPTURE(bad);
        CHECK_FALSE(g.parses("LINE", tokens_of(g, bad)));
    }
    CHECK_FALSE(g.parses("TEXT", {}));
    CHECK_THROWS_WITH(g.parses("WORD", tokens_of(g, "the")), "grammar: there is no rule for 'WORD'");
}

TEST_CASE("parsing is exact: as many b as a, of all words of at most ten") {
    const grammar g("TEXT.t = 1 PAIR\nPAIR = ^1 'a' PAIR 'b' | 1 'a' 'b'", few_words);
    int parsed = 0;
    for (int n = 1; n <= 10; ++n)
        for (int bits = 0; bits < 1 << n; ++bits) {
            std::string text;
            for (int i = 0; i < n; ++i) text += bits >> i & 1 ? "b " : "a ";
            const bool pairs = n % 2 == 0 && bits >> n / 2 == (1 << n / 2) - 1 && (bits & ((1 << n / 2) - 1)) == 0;
            const bool found = g.parses("TEXT", tokens_of(g, text));
            REQUIRE(found == pairs);
            parsed += found;
        }
    CHECK(parsed == 5);
}

TEST_CASE("rules and words that do not fit together are refused by name") {
    const auto with_rules = [](const char* rules) { return grammar(rules, few_words); };
    CHECK_THROWS_WITH(with_rules("TEXT.t = 1 LINE"), "grammar: there is no rule for 'LINE'");
    CHECK_THROWS_WITH(with_rules("TEXT.t = 1 nouns.sg"), "grammar: there is no class of words 'nouns.sg'");
    CHECK_THROWS_WITH(with_rules("TEXT.t = noun.sg"), "grammar: 'noun.sg' of 'TEXT.t' is no weight");
    CHECK_THROWS_WITH(with_rules("TEXT.t 1 noun.sg"), "grammar: the rule for 'TEXT.t' has no =");
    CHECK_THROWS_WITH(with_rules("TEXT.t = 1 noun.sg |"), "grammar: the rule for 'TEXT.t' ends too early");
    CHECK_THROWS_WITH(with_rules("TEXT.t = ^1 'a' TEXT.t"), "grammar: the rule for 'TEXT.now' nests without end");
    CHECK_THROWS_WITH(with_rules("NP.n = 1 noun.n"), "grammar: there is no rule for 'TEXT.now'");
    CHECK_THROWS_WITH(grammar("TEXT.t = 1 'a'", "topic t\nverb go"), "grammar: a line of words begins with 'verb'");
    CHECK_THROWS_WITH(grammar("TEXT.t = 1 'a'", "topic t\nnoun dog"),
                      "grammar: a topic has fewer than two words of class noun.sg");
}

TEST_CASE("what is written parses, whatever its title and length") {
    const grammar_task task(40, 8);
    const grammar& g = grammar::shipped();
    property("a solution", [&] {
        const auto seed = *rc::gen::arbitrary<std::uint64_t>(), sample = *rc::gen::arbitrary<std::uint64_t>();
        const problem p = task.training_problem(seed, sample);
        RC_ASSERT(p == task.training_problem(seed, sample));
        RC_ASSERT(!task.is_held_out(p));
        const auto prompt = task.prompt_tokens(p), text = task.solution_tokens(p);
        RC_ASSERT(prompt.size() == static_cast<std::size_t>(task.prompt_length()));
        RC_ASSERT(text.size() <= static_cast<std::size_t>(task.max_response()));
        RC_ASSERT(text.back() == task.end_token());
        const verdict v = task.judged(p, text);
        RC_ASSERT(v.correct && v.valid && v.steps >= 1 && v.steps == v.valid_steps);
        // without its end, or cut, it is neither
        RC_ASSERT(!task.judged(p, std::span(text).first(text.size() - 1)).correct);
        // one word of another class
        auto changed = text;
        const auto at = *rc::gen::inRange<std::size_t>(0, text.size() - 1);
        changed[at] = changed[at] == g.id(":") ? g.id("the") : g.id(":");
        RC_ASSERT(!task.judged(p, changed).correct);
    });
}

TEST_CASE("sentences in two times are each grammatical, and together not valid") {
    const grammar_task task(48, 8);
    const grammar& g = grammar::shipped();
    const problem p = task.held_out_problem(0);
    const auto judged = [&](const std::string& text) { return task.judged(p, tokens_of(g, text)); };
    CHECK(judged("the sailor drifts . the boats float . <end>").valid);
    const verdict two = judged("the sailor drifts . the boats floated . <end>");
    CHECK(two.correct);
    CHECK_FALSE(two.valid);
    const verdict one = judged("the sailor drift . the boats floated . <end>");
    CHECK_FALSE(one.correct);
    CHECK(one.steps == 2);
    CHECK(one.valid_steps == 1);
    CHECK_FALSE(judged("<end>").correct);
    CHECK_FALSE(task.judged(p, {}).correct);
    CHECK_FALSE(task.judged(p, std::vector<token>{g.vocabulary(), g.id("."), grammar::end}).correct); // padding
}

TEST_CASE("held-out titles are distinct, one in eight, and never drawn for training") {
    const grammar_task task(48, 8);
    std::set<std::uint64_t> held_out;
    for (std::size_t i = 0; i < task.held_out_problems(); ++i) {
        CHECK(task.is_held_out(task.held_out_problem(i)));
        held_out.insert(task.held_out_problem(i).prompt);
    }
    CHECK(held_out.size() == task.held_out_problems());
    CHECK(held_out.size() == 4096);
    for (std::uint64_t sample = 0; sample < 3000; ++sample)
        REQUIRE(held_out.count(task.training_problem(1, sample).prompt) == 0);
    CHECK_THROWS_WITH(grammar_task(48, 1), doctest::Contains("held_out_one_in"));
}

TEST_CASE("words are drawn from near certainty to five nats, and depend on the title") {
    const grammar_task task(48, 8);
    const grammar& g = grammar::shipped();
    std::map<token, int> adverbs, behind_adverbs;
    int texts = 0, own = 0, other = 0, adverbs_drawn = 0;
    for (std::uint64_t sample = 0; sample < 6000; ++sample) {
        const problem p = task.training_problem(3, sample), q = task.training_problem(4, sample);
        const auto text = task.solution_tokens(p);
        const token noun = task.prompt_tokens(p)[1], elsewhere = task.prompt_tokens(q)[1];
        ++texts;
        own += std::find(text.begin(), text.end(), noun) != text.end();
        other += std::find(text.begin(), text.end(), elsewhere) != text.end();
        if (text[1] == g.id(",")) ++adverbs[text[0]], ++adverbs_drawn;
    }
    CHECK(own > texts / 10);
    CHECK(other < own / 4);
    double entropy = 0; // of the draws: below that of the distribution
    for (const auto& [word, n] : adverbs) {
        const double share = static_cast<double>(n) / adverbs_drawn;
        entropy -= share * std::log(share);
    }
    CHECK(adverbs_drawn > 300);
    CHECK(entropy > 4.6);
}

// --- runs -----------------------------------------------------------------------------------------------------------

namespace {

// A second, not minutes.
flags tiny(const std::string& directory, const flags& more = {}) {
    return with({"--run-dir=" + directory,
                 "--task=grammar",
                 "--max-words=16",
                 "--teacher-width=8",
                 "--teacher-layers=1",
                 "--teacher-heads=2",
                 "--teacher-kv-heads=1",
                 "--teacher-head-dim=4",
                 "--teacher-ffn=12",
                 "--student-width=8",
                 "--student-layers=1",
                 "--student-heads=2",
                 "--student-kv-heads=1",
                 "--student-head-dim=4",
                 "--student-ffn=8",
                 "--teacher-steps=6",
                 "--teacher-batch=4",
                 "--student-max-steps=2",
                 "--student-batch=4",
                 "--student-check-every=2",
                 "--student-check-prompts=4",
                 "--student-target-accuracy=1",
                 "--steps=4",
                 "--prompts=4",
                 "--eval-prompts=6",
                 "--eval-samples=0",
                 "--eval-every=0",
                 "--checkpoint-every=2",
                 "--log-every=1",
                 "--threads=2",
                 "--quiet"},
                more);
}

exit_code trained(const flags& arguments) {
    run r(parse_command_line(arguments));
    return go(r);
}
std::string checkpoint(const std::string& directory) { return read_file(directory + "/checkpoints/distill.ckpt"); }
nlohmann::json report_of(const std::string& directory) {
    return nlohmann::json::parse(read_file(directory + "/report.json"));
}
std::string refused(const flags& arguments) {
    try {
        run(parse_command_line(arguments)).go();
    } catch (const failure& e) {
        CHECK(e.code == exit_usage);
        return e.what();
    }
    FAIL("it was not refused");
    return {};
}

} // namespace

TEST_CASE("every estimator, cache, schedule and drafter takes two thousand words") {
    const scratch dir;
    const std::string first = dir / "first", start = "--start-from=" + first + "/checkpoints/student.ckpt";
    REQUIRE(trained(tiny(first)) == exit_ok);
    {
        const auto report = report_of(first);
        const auto& kl = report["held_out_kl"];
        CHECK(report["gap_closed"].get<double>() ==
              doctest::Approx(1 - kl["after"].get<double>() / kl["before"].get<double>()));
        CHECK(kl["before"].get<double>() == doctest::Approx((report["kl_to_teacher"]["before"].get<double>() +
                                                             report["kl_on_teacher"]["before"].get<double>()) /
                                                            2));
        CHECK(report["kl_to_teacher"]["teacher"].get<double>() == doctest::Approx(0).epsilon(1e-6));
        CHECK(kl["before"].get<double>() > 0);
        CHECK(kl["after"].get<double>() > 0);
        CHECK(kl["after"].get<double>() != kl["before"].get<double>());
    }
    const auto ends_in = [&](const std::string& name, const flags& more) {
        CAPTURE(name);
        const std::string directory = dir / name;
        REQUIRE(trained(tiny(directory, with({start}, more))) == exit_ok);
        CHECK(report_of(directory)["gap_closed"].is_number());
        return checkpoint(directory);
    };
    const auto weights = [&](const std::string& name) {
        std::string settings;
        return load_checkpoint(dir / (name + "/checkpoints/distill.ckpt"), settings).student_weights;
    };
    ends_in("dense", {});
    ends_in("hidden", {"--teacher-cache=hidden", "--hidden-budget=40000"});
    CHECK(weights("dense") == weights("hidden"));
    const flags each[] = {{"--teacher-cache=hidden-lowrank", "--cache-rank=4", "--cache-calibration=8"},
                          {"--estimator=topk", "--k=64"},
                          {"--estimator=topk", "--k=64", "--topk-from=student"},
                          {"--estimator=tail_bucket", "--k=64"},
                          {"--estimator=mc", "--m=64"},
                          {"--estimator=threshold", "--budget=64"}};
    std::set<std::vector<float>> all = {weights("dense")};
    int n = 0;
    for (const flags& settings : each) {
        const std::string name = "cache" + std::to_string(n++);
        ends_in(name, settings);
        CHECK(all.insert(weights(name)).second); // what is kept of the teacher decides what is learnt
    }
    // a drafter that learns reads the target's hidden states, and changes nothing either
    REQUIRE(
        opd::test::exit_of({"opd-train", "--run-dir", first, "--train-drafter", "--drafter-steps=2",
                            "--drafter-batch=2", "--drafter-responses=4", "--drafter-held-out=4", "--drafter-heads=2",
                            "--drafter-kv-heads=1", "--drafter-head-dim=4", "--drafter-ffn=8", "--quiet"}) == exit_ok);
    ends_in("learned", {"--speculate=learned", "--draft-from=" + first + "/checkpoints/drafter.ckpt"});
    CHECK(weights("learned") == weights("dense"));
    // under a schedule, in virtual time: drafts change nothing that is learnt under sync, and it all ends
    ends_in("drafts", {"--speculate=ngram"});
    CHECK(weights("drafts") == weights("dense"));
    ends_in("async", {"--estimator=threshold", "--budget=64", "--schedule=async", "--tau=2", "--driver=virtual",
                      "--speculate=ngram"});
    ends_in("step_off", {"--teacher-cache=hidden", "--schedule=step-off", "--schedule-k=1"});
}

TEST_CASE("a run of the grammar is resumed bit for bit, and by no other task") {
    const scratch dir;
    const std::string whole = dir / "whole", part = dir / "part";
    REQUIRE(trained(tiny(whole)) == exit_ok);
    for (const int stop : {3, 6, 8}) {
        CAPTURE(stop);
        {
            run first(parse_command_line(tiny(part, {"--overwrite"})));
            first.stop_after(stop);
            REQUIRE(go(first) == exit_interrupted);
        }
        // the directory says which task it is
        REQUIRE(trained({"--run-dir=" + part, "--resume", "--quiet"}) == exit_ok);
        CHECK(checkpoint(part) == checkpoint(whole));
    }
    CHECK(refused({"--run-dir=" + part, "--resume", "--task=gcd", "--quiet"}) ==
          "--resume: " + part + " is a run of --task grammar, not gcd");
    // also where a checkpoint lies in another task's directory
    const std::string other = dir / "other";
    REQUIRE(trained(with({"--run-dir=" + other, "--quiet", "--steps=1", "--eval-prompts=4", "--eval-samples=0",
                          "--teacher-batch=2", "--eval-every=0", "--prompts=2"},
                         opd::test::small_models())) == exit_ok);
    CHECK(refused({"--run-dir=" + other, "--resume", "--task=grammar", "--quiet"}) ==
          "--resume: " + other + " is a run of --task gcd, not grammar");
    std::filesystem::copy_file(whole + "/checkpoints/latest.ckpt", other + "/checkpoints/latest.ckpt",
                               std::filesystem::copy_options::overwrite_existing);
    CHECK(refused({"--run-dir=" + other, "--resume", "--quiet"}).find("task.kind") != std::string::npos);
    CHECK(refused(tiny(dir / "third", {"--start-from=" + other + "/checkpoints/student.ckpt"})) ==
          "--start-from: " + other + "/checkpoints/student.ckpt was made with another task");
}

TEST_CASE("a task has its own settings, and refuses another's by name") {
    const auto refusal = [](const flags& f) { return refused(f); };
    CHECK(refusal({"--task=gdc"}) == "--task: 'gdc' is not one of gcd, grammar; did you mean 'gcd'?");
    CHECK(refusal({"--task=grammar", "--max-operand=50"}) == "--max-operand is not used by --task grammar");
    CHECK(refusal({"--max-words=20"}) == "--max-words is not used by --task gcd");
    CHECK(refusal({"--task=grammar", "--max-words=64"}) == "--max-words must lie in [12, 63], not 64");
    CHECK(refusal({"--task=grammar", "--preset=speculative"}).find("not with --task grammar") != std::string::npos);
    CHECK(
        refusal({"--task=grammar", "--hidden-budget=100", "--teacher-cache=hidden"}).find("--hidden-budget must be") !=
        std::string::npos);
    const config c = parse_command_line(flags{"--task=grammar"}).settings, d = parse_command_line(flags{}).settings;
    CHECK(c.run.directory == "runs/grammar");
    CHECK(d.run.directory == "runs/gcd");
    CHECK(c.distill.k == 64);
    CHECK(fingerprint(c) != fingerprint(d));
    // what --print-config prints is read back
    const scratch dir;
    write_file(dir / "c.json", to_json(c).dump());
    CHECK(fingerprint(parse_command_line(flags{"--config=" + (dir / "c.json")}).settings) == fingerprint(c));
    // a gcd run's settings are what they were before there was a choice
    CHECK_FALSE(results_json(d)["task"].contains("kind"));
}
