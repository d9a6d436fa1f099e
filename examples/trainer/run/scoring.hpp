// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who scores a data set, and opd-score, which writes one (opd/data/) of responses that somebody else drew:
//
//   {"prompt": [12, 3, …], "response": [5, 9, 2], "log_mu": [-0.1, -2.5, -0.3], "sample": 7}        a line of JSON each
//
// `log_mu`, log pi_ref of the response's tokens, is computed with --reference's student where that is given, and must
// be in the lines where it is not; where both are there they must agree. The set has `samples` of one draw a row, the
// token itself, with log pi_ref and log q, as opd-train --write-offline writes; with --k also `support`, the teacher's
// k best ids, their log q and the log of the mass outside. opd-train --offline reads it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/teacher.hpp"
#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"
#include "pipeline/served.hpp"
#include "settings/checkpoint.hpp"
#include "settings/config.hpp"

namespace trainer {

class any_task;

struct set_scorer {
    std::function<std::vector<scored_sequence>(std::span<const trajectory* const>)> score;
    std::string print;                           ///< of the teacher, for the set: of its weights where they are known
    std::string weights;                         ///< likewise; empty: not known
    std::shared_ptr<served_teacher> served = {}; ///< null: the teacher in this process
};
/// The settings' served teacher, which is probed with the student's responses where there is one, and beside the
/// teacher where that is there too; or the teacher in this process. Everything that is given must live as long.
set_scorer scorer_for(const config& c, const any_task& task, const transformer<float>* student,
                      const transformer<float>* teacher, opd::cpu_backend& backend, const probe_draws& draws = {});

/// A checkpoint's settings, with its models' shapes, and its weights.
struct loaded_run {
    config settings;
    run_state state;
};
loaded_run load_run(const std::string& path);
/// One of its models. No weights, or others than its shape has, are a failure of kind exit_input.
transformer<float> model_with(const model_shape& shape, std::vector<float> weights, const std::string& path);

/// A set that goes on was begun with the same notes; else a failure of kind exit_usage that names the first other.
void refuse_other_notes(const char* flag, const std::string& folder, const opd::data::rollout_set& set,
                        const std::map<std::string, std::string>& notes);
/// Writes a scored response: its own tokens, and with `lists` the teacher's k best ids. Returns its rows.
opd::index_t add_scored(opd::data::rollout_writer& out, const trajectory& t, const teacher_cache& q, bool lists);

struct score_settings {
    std::string responses; ///< the file of lines
    std::string out;       ///< folder of the set
    std::string reference; ///< a checkpoint, whose student is pi_ref; empty: log_mu is in the lines
    std::string teacher;   ///< a checkpoint, whose teacher scores; empty: --reference's, or a served one
    config settings;       ///< threads, temperature, and the served teacher
    int k = 0;             ///< ids of the support; 0: none is kept
    int vocabulary = 0;    ///< ids, where no checkpoint says it
    std::string tokenizer; ///< print of what they mean, likewise; empty: not known
    int id_bits = 0;       ///< opd::data::writer_settings
    std::string log_probs = "f32";
    std::size_t shard_bytes = std::size_t{64} << 20;
};
/// opd-score. A killed one goes on where it was.
exit_code score_responses(const score_settings& s);

} // namespace trainer
