// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher that is another process: responses are scored over HTTP (opd/serve/) and kept as the teacher in this
// process would have kept them.
//
//   estimator                                      is asked for                       kept as
//   lightning, mc --m 1                            the tokens' own log-probs          samples
//   mc, threshold, topk_rw, --topk-from student    those of rollout's recorded ids    samples, weighted, support
//   topk, tail_bucket                              the k best ids of each position    support
//
// Where the server sends its floats whole, all of these have the bits of the same teacher in this process, but
// log_tail: a list says 1 - sum of its masses, which float rounds; below 2^-23 it counts as that.
//
// A response that could not be scored within --teacher-patience, or that the server refuses, is a failure of kind
// exit_peer: no response is given up, and the run goes on from its last checkpoint.
#pragma once

#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/teacher.hpp"
#include "opd/teacher_probe.hpp"
#include "settings/config.hpp"

namespace trainer {

class any_task;

/// What a server says of itself at /v1/models; -1 and empty: it does not.
struct server_identity {
    std::string model;
    std::int64_t vocabulary = -1; ///< ids that it knows
    std::int64_t context = -1;    ///< most tokens of a sequence
    std::string teacher;          ///< print_of_teacher of its weights
    std::string tokenizer;        ///< print_of_tokenizer
};

/// What a probe found, before anything was learnt.
struct served_probe {
    server_identity identity;
    opd::teacher_report report; ///< of tokens and lists; its log_p is the student's, its lists' the reference's
    double sequence_sigma = 0;  ///< √E[(Σ_t |Δ_t|)²] of two scorings, nats: sigma_Delta of theorem 3.13
    double reference_sigma = 0; ///< the same between the served teacher and the reference
    bool compared = false;      ///< there was a reference
    index_t sequences = 0;
    std::vector<std::string> accepted; ///< sentences on what is wrong and was accepted

    nlohmann::ordered_json described() const;
    std::string told() const; ///< one line
};

/// The responses that a probe is made with.
struct probe_draws {
    int responses = 64;
    std::vector<token> more_ends = {}; ///< ids that end one beside the task's
};

class served_teacher {
public:
    /// Of the settings' servers. A url that cannot be one is a usage failure.
    explicit served_teacher(const config& c);
    ~served_teacher();
    served_teacher(const served_teacher&) = delete;
    served_teacher& operator=(const served_teacher&) = delete;

    /// What is kept of each, in their order; null where it was told to stop before. Any number of threads may call it.
    std::vector<std::unique_ptr<scored_sequence>> score(std::span<const trajectory* const> trajectories,
                                                        std::stop_token stop = {});

    /// Scores responses of the student to training prompts twice, or once by each replica, and looks at what comes
    /// back (opd/teacher_probe.hpp). What is wrong and not accepted (--accept-teacher) is a failure of kind exit_peer
    /// that names it. `reference`: the teacher as it should be, of which the served one may be another version; null:
    /// nobody has it, and neither the temperature of the lists is judged nor reference_sigma.
    served_probe probe(const any_task& task, const transformer<float>& student, const transformer<float>* reference,
                       opd::cpu_backend& backend, const probe_draws& draws = {}) const;

    /// What the first replica says of itself; asked for within --teacher-patience.
    server_identity identity() const;

    /// Requests, failures by kind, retries, tokens, bytes, seconds: since it was made.
    nlohmann::ordered_json described() const;
    /// The same as lines of a table.
    static std::string told(const nlohmann::ordered_json& described);

private:
    struct client;
    const config settings_;
    cache_plan plan_;
    int entries_;
    const std::unique_ptr<client> client_;
};

} // namespace trainer
