// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a server of vLLM's form says of a model of the trainer's: a function of the request, no I/O.
//
//   GET  /v1/models, /health
//   POST /v1/completions          prompt: lists of ids; prompt_logprobs: k. The k best of each position and its own
//                                 token
//   POST /inference/v1/generate   token_ids; prompt_logprob_start, prompt_logprob_token_ids: those ids' log-probs
//
// Log-probs are raw: of the logits at temperature 1, with the bits that the teacher in the trainer's process gives
// (opd::score). Numbers are written so that they come back whole. Nothing is generated: what opd asks for is what it
// sent. /v1/models says more than vLLM does, under "opd": the number of ids, and fingerprints of weights and tokenizer.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/teacher.hpp"
#include "pipeline/http_service.hpp"

namespace trainer {

class any_task;

class teacher_answers {
public:
    /// `most_logprobs`: the largest k, as --max-logprobs of vLLM. `name`: of the model, at /v1/models.
    teacher_answers(const transformer<float>& model, const any_task& task, int threads, int most_logprobs,
                    std::string name);

    /// From any thread; one request at a time is computed, on all threads.
    http_reply operator()(const std::string& method, const std::string& path, const std::string& body);

private:
    http_reply completions(const nlohmann::json& q);
    http_reply generate(const nlohmann::json& q);
    std::vector<token> ids_of(const nlohmann::json& list, const char* name) const;

    const transformer<float>& model_;
    const int most_logprobs_;
    const std::string name_;
    std::string models_;               // the body of /v1/models
    std::vector<std::string> escaped_; // (V) a token's text as JSON
    std::mutex mutex_;                 // of what follows
    opd::cpu_backend backend_;
    teacher_scorer scorer_;
    std::vector<float> logits_;
};

} // namespace trainer
