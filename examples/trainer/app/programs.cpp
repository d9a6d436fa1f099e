// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "app/programs.hpp"

#include <csignal>
#include <cstdio>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "app/app.hpp"
#include "hf/distil.hpp"
#include "hf/model_files.hpp"
#include "opd/version.hpp"
#include "pipeline/answering.hpp"
#include "run/run.hpp"
#include "run/scoring.hpp"
#include "settings/files.hpp"
#include "settings/options.hpp"
#include "settings/schedule.hpp"

namespace trainer {

namespace {

// Parses; false: there was a text to print, and that is all.
bool parsed(CLI::App& app, int argc, const char* const* argv) {
    app.set_version_flag("--version", fmt::format("{} {}.{}.{}", app.get_name(), OPD_VERSION_MAJOR, OPD_VERSION_MINOR,
                                                  OPD_VERSION_PATCH));
    try {
        app.parse(argc, argv);
        return true;
    } catch (const CLI::CallForHelp&) {
        std::fputs(app.help().c_str(), stdout);
    } catch (const CLI::CallForVersion&) {
        fmt::print("{}\n", app.version());
    } catch (const CLI::ParseError& e) {
        throw failure(exit_usage, fmt::format("{}\n{} --help lists every option", e.what(), app.get_name()));
    }
    return false;
}

std::string told_plainly(const failure& e) { return e.what(); }

} // namespace

int serve_main(int argc, const char* const* argv) {
    return run_program("opd-serve-teacher", told_plainly, [&] {
        CLI::App app("Serves the teacher of a checkpoint of opd-train over HTTP, in the form of a vLLM server\n"
                     "(docs/serve.md): log-probs of given token ids, the best ids, given candidates.",
                     "opd-serve-teacher");
        app.option_defaults()->take_last()->always_capture_default();
        std::string checkpoint, host = "127.0.0.1", name = "teacher", url_file;
        int port = 8000, threads = 0, most = 20;
        bool student = false;
        app.add_option("--checkpoint", checkpoint, "a run's checkpoints/student.ckpt, or another that holds a teacher")
            ->required();
        app.add_flag("--student", student, "serve its student");
        app.add_option("--host", host, "address to listen at; there is no TLS and no key, so keep to this machine");
        app.add_option("--port", port, "0: one that is free")->check(CLI::Range(0, 65535));
        app.add_option("--url-file", url_file, "file that the url is written to once it can be asked");
        app.add_option("--model", name, "name of the model");
        app.add_option("--max-logprobs", most, "most best ids of a position that may be asked for")
            ->check(CLI::Range(1, 65536));
        app.add_option("--threads", threads, "0: one per core")->check(CLI::Range(0, most_threads));
        if (!parsed(app, argc, argv)) return exit_ok;
        const loaded_run run = load_run(checkpoint);
        const auto task = task_of(run.settings);
        const auto model = student ? model_with(run.settings.student_model, run.state.student_weights, checkpoint)
                                   : model_with(run.settings.teacher_model, run.state.teacher_weights, checkpoint);
        config how;
        how.run.threads = threads;
        teacher_answers answers(model, *task, threads_of(how), most, name);
        http_service service(host, port, std::ref(answers));

        sigset_t signals; // waited for, not caught: stopping takes locks
        sigemptyset(&signals);
        for (const int s : {SIGINT, SIGTERM}) sigaddset(&signals, s);
        pthread_sigmask(SIG_BLOCK, &signals, nullptr);
        std::signal(SIGPIPE, SIG_IGN);
        std::exception_ptr error;
        std::thread server([&] {
            try {
                service.serve();
            } catch (...) {
                error = std::current_exception();
            }
            ::kill(::getpid(), SIGTERM); // whoever waits
        });
        spdlog::info("serving {} of {} at {}", student ? "the student" : "the teacher", checkpoint, service.url());
        fmt::print("{}\n", service.url());
        std::fflush(stdout);
        if (!url_file.empty()) write_file(url_file, service.url() + "\n"); // bound: who asks now is answered
        int caught = 0;
        ::sigwait(&signals, &caught);
        service.stop();
        server.join();
        if (error) std::rethrow_exception(error);
        return exit_ok;
    });
}

int score_main(int argc, const char* const* argv) {
    return run_program("opd-score", told_plainly, [&] {
        CLI::App app(
            "Has a teacher score responses that are there already, and writes what it says as a data set that\n"
            "opd-train --offline, or any reader of opd/data/, learns from (docs/data.md). Called again it goes on.",
            "opd-score");
        app.option_defaults()->take_last()->always_capture_default();
        score_settings s;
        auto& served = s.settings.served;
        app.add_option(
               "--responses", s.responses,
               "file of lines {\"prompt\": [ids], \"response\": [ids], \"log_mu\": [log-probs], \"sample\": n}; "
               "the last two may be left out, log_mu with --reference alone")
            ->required();
        app.add_option("--out", s.out, "folder of the data set")->required();
        app.add_option("--reference", s.reference,
                       "a run's checkpoints/student.ckpt, whose student drew the responses: its log-probs are log_mu");
        app.add_option("--teacher", s.teacher, "a checkpoint whose teacher scores, in place of that of --reference");
        app.add_option("--teacher-url", served.url, "servers that score instead, separated by commas (docs/serve.md)");
        app.add_option("--teacher-dialect", served.dialect, "vllm, sglang, llama_cpp, openai_echo");
        app.add_option("--teacher-model", served.model, "its name, where the server has several models");
        app.add_option("--teacher-requests", served.requests, "requests under way at most");
        app.add_option("--teacher-silence", served.silence, "seconds of silence after which it is asked again");
        app.add_option("--teacher-patience", served.patience, "seconds that a response is asked for again");
        app.add_option("--accept-teacher", served.accept, "verdicts of the probe to go on with, separated by commas");
        app.add_option("--k", s.k, "also keep the teacher's k best ids of each row; 0: none")
            ->check(CLI::Range(0, 65536));
        app.add_option("--temperature", s.settings.distill.temperature,
                       "of the reference, and of a teacher in this process");
        CLI::Option* const vocabulary =
            app.add_option("--vocabulary", s.vocabulary, "number of ids, where no checkpoint says it")
                ->check(CLI::Range(0, 1 << 30));
        std::string ids_of;
        app.add_option("--ids-of", ids_of,
                       "a model directory of transformers, which says it: the set then also tells its tokenizer, for "
                       "opd-distil --data-set")
            ->excludes(vocabulary);
        app.add_option("--id-bits", s.id_bits, "bits an id, 8 to 31; 0: int32")->check(CLI::Range(0, 31));
        app.add_option("--log-probs", s.log_probs, "how log-probs are kept: f32, f16, bf16")
            ->check(CLI::IsMember({"f32", "f16", "bf16"}));
        app.add_option("--threads", s.settings.run.threads, "0: one per core")->check(CLI::Range(0, most_threads));
        if (!parsed(app, argc, argv)) return exit_ok;
        if (!ids_of.empty()) {
            const hf::model_directory model(ids_of);
            s.vocabulary = model.shape().vocabulary, s.tokenizer = hf::print_of_tokenizer(model.source());
        }
        listen_to_signals();
        return score_responses(s);
    });
}

int model_main(int argc, const char* const* argv) {
    return run_program("opd-model", told_plainly, [&] {
        CLI::App app(
            "Says what a model directory of transformers (Qwen3, Qwen2, Llama) holds and what memory it takes,\n"
            "once all of it was found to be as its config.json says; with --out writes it anew.",
            "opd-model");
        app.option_defaults()->take_last()->always_capture_default();
        std::string directory, out;
        hf::write_options how;
        int max_length = 0;
        app.add_option("directory", directory, "config.json and model.safetensors, or an index of several")->required();
        app.add_option("--max-length", max_length, "positions to hold, for the memory; 0: all that config.json has");
        app.add_option("--out", out, "directory to write, which may not be there yet; tokenizer files go along");
        app.add_option("--type", how.type, "of the weights in --out")->check(CLI::IsMember({"float32", "bfloat16"}));
        app.add_option("--shard-bytes", how.shard_bytes, "most bytes of a file in --out")
            ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 50));
        if (!parsed(app, argc, argv)) return exit_ok;
        const hf::model_directory found(directory, max_length);
        const hf::model_source& from = found.source();
        const hf::model_bytes bytes = hf::bytes_of(found.shape());
        const auto gigabytes = [](std::int64_t n) { return static_cast<double>(n) / 1e9; };
        fmt::print(
            "{}\nmemory: {:.3g} GB for the model with {} positions; {:.3g} GB more to train all of it, activations "
            "on top\n",
            from.describe(), gigabytes(bytes.model), found.shape().max_length, gigabytes(bytes.training));
        if (!from.config.unknown.empty())
            fmt::print("keys of config.json that are kept and not known here: {}\n",
                       fmt::join(from.config.unknown, ", "));
        if (out.empty()) return exit_ok;
        const hf::read_model model = hf::read_model_directory(directory);
        try {
            hf::write_model_directory(out, model.shape, model.weights, &model.source, how);
        } catch (const opd::invalid_input& e) { // weights that bfloat16 has no number for
            throw failure(exit_input, fmt::format("{}: {}", directory, e.what()));
        }
        fmt::print("written: {} as {}\n", out, how.type);
        return exit_ok;
    });
}

int distil_main(int argc, const char* const* argv) {
    return run_program("opd-distil", told_plainly, [&] {
        CLI::App app("Distils a model directory of transformers from another, on the student's own answers to\n"
                     "prompts, and writes the student as a third. Qwen3, Qwen2 and Llama; all weights or LoRA, in\n"
                     "float or bfloat16; rollout, teacher and learner take turns or overlap (--schedule).",
                     "opd-distil");
        app.option_defaults()->take_last()->always_capture_default();
        hf::distil_settings s;
        auto& d = s.settings.distill;
        d.rate = 1e-5, d.steps = 100, d.prompts = 8, d.warmup = 5; // of models that know something
        s.settings.run.checkpoint_every = 50;
        app.add_option("--student", s.student, "model directory")->required();
        app.add_option("--teacher", s.teacher,
                       "model directory of the same vocabulary; or http://host:port of a server of the teacher, of "
                       "several separated by commas (docs/serve.md), with --estimator lightning, mc, threshold, topk, "
                       "topk_rw or tail_bucket. OPD_TEACHER_KEY in the environment is sent as bearer token");
        app.add_option("--prompts", s.prompts,
                       "file of lines {\"ids\": […]}, or with the student's tokenizer.json {\"text\": \"…\"}, "
                       "{\"messages\": [{\"role\": …, \"content\": …}]}");
        app.add_option(
            "--data-set", d.offline,
            "in place of --teacher and --prompts: folder of a data set (docs/data.md) to learn from, with no "
            "teacher at hand; with --estimator lightning, mc --m 1, or where it has the teacher's best ids "
            "topk and tail_bucket");
        app.add_option("--accept-mismatch", d.accept_mismatch,
                       "--data-set: fingerprints that may differ, separated by commas: tokenizer, reference_policy, "
                       "scoring_teacher (the set has two teachers)");
        app.add_flag("--accept-tokenizer", s.accept_tokenizer,
                     "go on where the two directories' tokenizer.json have different vocabularies");
        app.add_option("--out", s.out, "directory to write, which may not be there yet")->required();
        app.add_option("--type", s.how.type, "of the weights in --out")->check(CLI::IsMember({"float32", "bfloat16"}));
        app.add_option("--storage", s.stored,
                       "what the student's weights are while it runs: bfloat16 halves what decoding a token reads; "
                       "AdamW keeps float masters beside them, rounded to nearest even after each update")
            ->check(CLI::IsMember({"float32", "bfloat16"}));
        app.add_option("--log", s.log, "file of a line of JSON a step");
        app.add_option("--checkpoint", s.checkpoint,
                       "file that a run which stops or dies can go on from: weights or adapters, AdamW's moments and "
                       "what is in flight, every --checkpoint-every steps and when it is interrupted; removed once "
                       "--out is there");
        app.add_flag("--resume", s.resume, "go on from --checkpoint, with the settings that it was made with");
        app.add_option("--lora", s.lora_rank,
                       "rank of LoRA on all linear layers; --out is merged, and has the adapter in adapter/, as PEFT "
                       "reads it; 0: all weights are trained")
            ->check(CLI::Range(0, 65536));
        CLI::Option* const alpha =
            app.add_option("--lora-alpha", s.lora_alpha, "of LoRA, whose scale is alpha / rank; 0: twice the rank")
                ->check(CLI::NonNegativeNumber);
        app.add_option("--steps", d.steps, "updates");
        app.add_option("--max-response", s.max_response, "tokens of an answer");
        app.add_option("--end", s.ends,
                       "ids that end an answer, separated by commas; none: those of the student's files")
            ->delimiter(',')
            ->take_all();
        app.add_option("--held-out", s.held_out,
                       "prompts, the last of the file, or sequences of --data-set that are measured on alone");
        app.add_option("--say-every", s.say_every,
                       "steps between two lines of progress and answers; 0: first and last alone");
        add_options(app, s.settings, hf::distil_options());
        if (!parsed(app, argc, argv)) return exit_ok;
        const auto unused = [&](const char* flag, const std::string& by) {
            if (app.count(flag) > 0) throw failure(exit_usage, fmt::format("{} is not used by {}", flag, by));
        };
        if (s.lora_rank == 0 && alpha->count() > 0) unused("--lora-alpha", "a run without --lora");
        if (s.checkpoint.empty()) unused("--checkpoint-every", "a run without --checkpoint");
        if (s.settings.schedule.kind == "sync") // all threads take turns
            for (const char* flag : {"--rollout-workers", "--teachers", "--score-batch", "--learner-threads"})
                unused(flag, "--schedule sync");
        if (hf::is_url(s.teacher)) s.settings.served.url = s.teacher;
        s.settings = hf::settled(s.settings);
        refuse_unused(app, s.settings, hf::distil_names());
        if (without_teacher(s.settings)) unused("--accept-tokenizer", "a run without a teacher's directory");
        listen_to_signals();
        const hf::distil_report r = hf::distil(s);
        fmt::print("KL(student, teacher) on held-out prompts: {:.4f} nats a token before, {:.4f} after\n", r.kl_before,
                   r.kl_after);
        if (s.settings.schedule.kind != "sync")
            fmt::print("lag: {:.2f} updates, the mean over the tokens learnt from\n", r.lag);
        return exit_ok;
    });
}

} // namespace trainer
