// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is simulated: a cluster, its stage times, and the schedules that are compared on it. Read from and printed as
// JSON; unknown keys and wrong types are refused with the place and the nearest key that exists.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/sched/settings.hpp"
#include "opd/sched/simulated.hpp"

namespace cluster_sim {

using opd::index_t;

/// Exit codes of opd-cluster-sim.
enum exit_code : int {
    exit_ok = 0,
    exit_other = 1,    ///< any other failure
    exit_usage = 2,    ///< command line or configuration
    exit_input = 3,    ///< a file cannot be read
    exit_stuck = 4,    ///< a simulated run came to a standstill
    exit_io = 5,       ///< an output cannot be written
    exit_resources = 7 ///< not enough memory
};

struct failure : std::runtime_error {
    exit_code code;
    failure(exit_code c, const std::string& what) : std::runtime_error(what), code(c) {}
};

/// Which stages take turns on the same GPUs: only where no two of them ever overlap.
enum class sharing : std::uint8_t {
    none,                ///< each stage has GPUs of its own
    rollout_and_learner, ///< the teacher alone has its own
    all                  ///< each stage has all GPUs in its turn; the teacher is on as many workers as fit
};
constexpr const char* name_of(sharing s) {
    constexpr const char* names[] = {"none", "rollout_and_learner", "all"};
    return names[static_cast<int>(s)];
}

/// One row of the comparison: a schedule, and the GPUs that it has.
struct entry {
    std::string name;
    opd::sched::schedule schedule;
    int rollout_workers = 4;
    int learner_gpus = 3;
    cluster_sim::sharing sharing = cluster_sim::sharing::none;
};

/// Its stages never overlap, and no sequence is stale.
bool is_synchronous(const entry& e);

struct config {
    std::string title;
    std::uint64_t seed = 1;
    index_t batch = 256; ///< B, sequences a train batch
    index_t group = 1;   ///< answers a prompt
    index_t steps = 100; ///< train batches; 0: until `seconds`
    double seconds = 0;  ///< of virtual time; 0: until `steps`
    index_t warmup = 5;  ///< updates that throughput does not count

    struct {
        opd::sched::distribution response, prompt; ///< tokens
        bool redraw = false; ///< a sequence that starts again draws a new length; else it is as long as before
    } lengths;
    struct {
        int lanes = 256; ///< most sequences at once on a worker
        int gpus = 1;    ///< a worker
        opd::sched::engine_speed speed;
        opd::sched::distribution factor = {opd::sched::constant{1}}; ///< of a worker's times, drawn once a worker
        /// The last workers of each schedule come late: the first of them after `after` seconds, the others each
        /// `every` seconds later.
        struct {
            int count = 0;
            double after = 0, every = 0;
            double install = 0; ///< seconds that their first weights take on top of everybody's
        } joiners;
    } rollout;
    struct {
        int workers = 1;
        int gpus = 1;      ///< a worker
        index_t batch = 8; ///< sequences a call
        double flush = 0.05;
        /// Response tokens that it has room for, from rollout to the update that consumes them. While it is full no
        /// rollout starts; what runs is finished, and goes beyond. 0: there is always room.
        double cache = 0;
        opd::sched::simulated_job job;
    } teacher;
    struct {
        opd::sched::simulated_job job; ///< per_item and per_token in GPU-seconds
        double turn = 0;               ///< seconds a step for shared GPUs to change their role and back
        /// Factors on the job's time from a version on, ascending: a load that changes while the run goes on
        /// (choosing_m.hpp; no key of a file).
        std::vector<std::pair<std::int64_t, double>> load;
    } learner;
    opd::sched::simulated_job sync; ///< what installing weights takes once a worker has them
    /// Their way there: whoever shares its GPUs with the learner has them at once.
    struct {
        double bytes = 0;        ///< of one set; 0: they come at once
        double bandwidth = 25e9; ///< bytes a second, of each node's link, which sends one copy at a time
        int fan_out = 0; ///< nodes that one with the weights sends them on to, a tree; 0: the learner sends all copies
        bool meanwhile = false; ///< rollout goes on until they have come
    } weights;

    std::vector<entry> schedules; ///< the first is what the others are compared with

    /// Speed-ups of all `schedules` named here over the first, for tails × learner costs.
    struct tail {
        double sigma = 1;      ///< of a lognormal law with the mean of lengths.response
        double at_most = 8192; ///< tokens
    };
    struct {
        std::vector<tail> tails;
        std::vector<double> learner_scales; ///< factors on the learner's time
        std::vector<std::string> schedules;
    } sensitivity;
};

/// GPUs that a row holds.
int gpus_of(const config& c, const entry& e);
/// Seconds from the learner's first byte until rollout worker `worker` of that row has all of the weights: worker w is
/// node w + 1, the learner node 0; with fan-out f node n sends to nodes f·n + 1 … f·n + f, one after the other, once it
/// has them itself.
double transfer_seconds(const config& c, const entry& e, int worker);
/// Teacher workers of a row: the cluster's, or, where all stages share, as many as the GPUs take.
int teacher_workers_of(const config& c, const entry& e);

/// One 8-GPU node; 1,000 rollout workers for a day.
const std::vector<std::string>& preset_names();
config preset(const std::string& name);

nlohmann::ordered_json to_json(const config& c);
config from_json(const nlohmann::json& j, const std::string& source);
config config_of_text(const std::string& text, const std::string& source);
config load_config(const std::string& path);

/// Throws a usage failure that names the setting.
void validate(const config& c);

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& text);

} // namespace cluster_sim
