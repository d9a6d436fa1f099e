// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/served.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "opd/serve/http_teacher.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/rollout.hpp"
#include "task/task.hpp"

namespace trainer {

namespace serve = opd::serve;

namespace {

std::vector<std::string> urls_in(const std::string& all) {
    std::vector<std::string> urls;
    for (std::size_t at = 0; at < all.size();) {
        const std::size_t end = std::min(all.size(), all.find(',', at));
        urls.push_back(all.substr(at, end - at));
        at = end + 1;
    }
    return urls;
}

serve::http_settings settings_for(const config& c, std::vector<std::string> urls, serve::wanted what) {
    serve::http_settings s;
    s.urls = std::move(urls);
    for (const auto d :
         {serve::dialect::vllm, serve::dialect::sglang, serve::dialect::llama_cpp, serve::dialect::openai_echo})
        if (c.served.dialect == to_string(d)) s.dialect = d;
    s.what = std::move(what);
    s.what.model = c.served.model;
    if (const char* const key = std::getenv("OPD_TEACHER_KEY")) s.api_key = key;
    s.concurrency = c.served.requests;
    s.connect_seconds = std::min(5.0, c.served.silence), s.read_seconds = c.served.silence;
    s.total_seconds = c.served.patience, s.tries = std::numeric_limits<int>::max(); // time alone ends them
    s.backoff_seconds = 0.1, s.most_backoff_seconds = 5, s.quarantine_seconds = 1;
    s.seed = c.run.seed;
    return s;
}

serve::wanted wanted_by(const config& c) {
    serve::wanted what;
    const served_lists lists = lists_for(c);
    what.top_k = lists == served_lists::best ? c.distill.k : 0;
    what.candidates = lists == served_lists::candidates;
    what.vocab = c.student_model.vocabulary;
    return what;
}

[[noreturn]] void not_scored(const serve::outcome& o, const char* what, std::size_t tokens) {
    throw failure(exit_peer, fmt::format("--teacher-url: {} did not score {} of {} tokens: {}: {}", o.url, what, tokens,
                                         to_string(o.why), o.text));
}

// The ids of a row's draws or support, each once.
serve::sequence question_of(const trajectory& t, bool candidates, int entries) {
    serve::sequence s{t.tokens, static_cast<index_t>(t.prompt_length)};
    if (!candidates) return s;
    std::vector<std::int32_t> ids;
    for (auto row = t.draw_ids.begin(); row != t.draw_ids.end(); row += entries) {
        ids.assign(row, row + entries);
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
        ids.erase(ids.begin(), std::find_if(ids.begin(), ids.end(), [](std::int32_t id) { return id >= 0; }));
        s.candidates.insert(s.candidates.end(), ids.begin(), ids.end());
        s.candidate_offsets.push_back(std::ssize(s.candidates));
    }
    return s;
}

// log of the mass that a list leaves. What float has lost of 1 - sum is not there to be found.
float tail_of(double mass) { return static_cast<float>(std::log(std::max(1 - mass, 0x1p-23))); }

scored_sequence kept_of(const trajectory& t, const serve::scores& s, served_lists lists, const cache_plan& plan,
                        const std::string& url) {
    const std::size_t before = t.prompt_length - 1, n = t.response().size(), rows = before + n;
    const auto k = static_cast<std::size_t>(plan.entries);
    scored_sequence r;
    r.sample = t.sample;
    teacher_cache& c = r.cache;
    c.what = plan.what, c.entries = plan.entries;
    c.next_log_q.assign(rows, 0.0f);
    std::copy(s.log_q.begin(), s.log_q.end(), c.next_log_q.begin() + static_cast<std::ptrdiff_t>(before));
    if (lists == served_lists::none) {
        if (!std::ranges::equal(t.draw_ids, t.response()))
            throw std::logic_error(
                fmt::format("served_teacher: sample {} has draws that are not its tokens", t.sample));
        c.ids.assign(rows, 0);
        std::copy(t.draw_ids.begin(), t.draw_ids.end(), c.ids.begin() + static_cast<std::ptrdiff_t>(before));
        c.log_q = c.next_log_q;
        return r;
    }
    const bool best = lists == served_lists::best;
    c.ids.resize(rows * k);
    for (std::size_t i = 0; i < before * k; ++i) c.ids[i] = static_cast<std::int32_t>(i % k); // as pack() has them
    c.log_q.assign(rows * k, 0.0f);
    if (c.what == teacher_cache::kind::support) c.log_tail.assign(rows, 0.0f);
    for (std::size_t i = 0; i < n; ++i) {
        const auto begin = static_cast<std::size_t>(s.offsets[i]), end = static_cast<std::size_t>(s.offsets[i + 1]);
        std::int32_t* const ids = c.ids.data() + (before + i) * k;
        float* const log_q = c.log_q.data() + (before + i) * k;
        if (best) {
            std::fill(std::copy(s.ids.data() + begin, s.ids.data() + end, ids), ids + k, -1);
            std::fill(std::copy(s.list_log_q.data() + begin, s.list_log_q.data() + end, log_q), log_q + k,
                      -std::numeric_limits<float>::infinity());
        } else {
            const std::int32_t *const first = s.ids.data() + begin, *const last = s.ids.data() + end;
            std::copy_n(t.draw_ids.data() + i * k, k, ids);
            for (std::size_t j = 0; j < k; ++j) {
                const std::int32_t* const at = std::find(first, last, ids[j]);
                if (ids[j] >= 0 && at == last)
                    throw failure(exit_peer, fmt::format("--teacher-url: {} did not score the id {} after {} tokens",
                                                         url, ids[j], t.prompt_length + i));
                log_q[j] = ids[j] < 0 ? -std::numeric_limits<float>::infinity()
                                      : s.list_log_q[begin + static_cast<std::size_t>(at - first)];
            }
        }
        if (c.log_tail.empty()) continue;
        double mass = 0;
        for (std::size_t j = 0; j < k; ++j) mass += std::exp(double{log_q[j]});
        c.log_tail[before + i] = tail_of(mass);
    }
    return r;
}

// log softmax of a row, at some of its ids.
struct row_law {
    std::span<const float> z;
    double lse;
    explicit row_law(std::span<const float> logits) : z(logits) {
        const double most = *std::max_element(z.begin(), z.end());
        double sum = 0;
        for (const float x : z) sum += std::exp(double{x} - most);
        lse = most + std::log(sum);
    }
    double operator()(std::int32_t id) const {
        return id >= 0 && id < std::ssize(z) ? double{z[static_cast<std::size_t>(id)]} - lse
                                             : std::numeric_limits<double>::quiet_NaN();
    }
};

server_identity identity_of(const config& c, const std::string& url) {
    const serve::detail::base_url at = serve::detail::parsed_url(url);
    httplib::Client client(at.host, at.port);
    const auto seconds = [](double s) {
        return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::duration<double>(s));
    };
    client.set_connection_timeout(seconds(std::min(5.0, c.served.silence)));
    client.set_read_timeout(seconds(c.served.silence));
    httplib::Headers headers;
    if (const char* const key = std::getenv("OPD_TEACHER_KEY"))
        headers.emplace("Authorization", fmt::format("Bearer {}", key));
    std::string body;
    const auto end = std::chrono::steady_clock::now() + seconds(c.served.patience);
    for (bool told = false;;) {
        const httplib::Result got = client.Get(at.prefix + "/v1/models", headers);
        if (got && got->status < 500) {
            if (got->status == 200) body = got->body;
            break;
        }
        const std::string why = got ? fmt::format("status {}", got->status) : httplib::to_string(got.error());
        if (std::chrono::steady_clock::now() + std::chrono::milliseconds(500) >= end)
            throw failure(exit_peer, fmt::format("--teacher-url: {} cannot be reached: {}", url, why));
        if (!std::exchange(told, true)) spdlog::warn("waiting for the teacher at {}: {}", url, why);
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    server_identity r;
    const auto all = nlohmann::json::parse(body, nullptr, false); // whatever it is: nothing in it is needed
    if (!all.is_object() || !all.contains("data") || !all["data"].is_array()) return r;
    const auto number = [](const nlohmann::json& j, const char* key, std::int64_t& to) {
        if (j.is_object() && j.contains(key) && j[key].is_number_integer()) to = j[key].get<std::int64_t>();
    };
    const auto text = [](const nlohmann::json& j, const char* key, std::string& to) {
        if (j.is_object() && j.contains(key) && j[key].is_string()) to = j[key].get<std::string>();
    };
    for (const auto& m : all["data"]) {
        std::string id;
        text(m, "id", id);
        if (!c.served.model.empty() && id != c.served.model) continue;
        r.model = id;
        number(m, "max_model_len", r.context); // vLLM's and SGLang's
        if (!m.is_object()) break;
        if (const auto meta = m.find("meta"); meta != m.end()) number(*meta, "n_vocab", r.vocabulary); // llama-server's
        if (const auto own = m.find("opd"); own != m.end()) {
            number(*own, "vocabulary", r.vocabulary);
            text(*own, "teacher", r.teacher), text(*own, "tokenizer", r.tokenizer);
        }
        break;
    }
    return r;
}

} // namespace

// --- the teacher ----------------------------------------------------------------------------------------------------

struct served_teacher::client {
    serve::http_teacher teacher;
};

served_teacher::served_teacher(const config& c)
    : settings_(c), plan_(cache_for(c)), entries_(draws_for(c).count), client_([&] {
          try {
              return new client{serve::http_teacher(settings_for(c, urls_in(c.served.url), wanted_by(c)))};
          } catch (const opd::error& e) {
              throw failure(exit_usage, fmt::format("--teacher-url: {}", e.what()));
          }
      }()) {}

served_teacher::~served_teacher() = default;

std::vector<std::unique_ptr<scored_sequence>> served_teacher::score(std::span<const trajectory* const> trajectories,
                                                                    std::stop_token stop) {
    const served_lists lists = lists_for(settings_);
    std::vector<serve::sequence> questions;
    for (const trajectory* t : trajectories)
        questions.push_back(question_of(*t, lists == served_lists::candidates, entries_));
    const std::vector<serve::outcome> outcomes = client_->teacher.score(questions, stop);
    std::vector<std::unique_ptr<scored_sequence>> r(trajectories.size());
    for (std::size_t i = 0; i < r.size(); ++i) {
        const serve::outcome& o = outcomes[i];
        if (o)
            r[i] = std::make_unique<scored_sequence>(kept_of(*trajectories[i], *o.scores, lists, plan_, o.url));
        else if (!stop.stop_requested())
            not_scored(o, "a response", questions[i].tokens.size());
    }
    return r;
}

server_identity served_teacher::identity() const {
    return identity_of(settings_, client_->teacher.settings().urls.front());
}

// --- the probe ------------------------------------------------------------------------------------------------------

served_probe served_teacher::probe(const any_task& task, const transformer<float>& student,
                                   const transformer<float>* reference, opd::cpu_backend& backend,
                                   const probe_draws& draws) const {
    const config& c = settings_;
    const serve::http_settings& how = client_->teacher.settings();
    const index_t v = c.student_model.vocabulary;
    served_probe r;
    const std::vector<std::string> accepted = accepted_verdicts(c);
    std::vector<std::string> wrong;
    const auto say = [&](const char* name, const std::string& text) {
        const bool goes = std::ranges::find(accepted, name) != accepted.end();
        (goes ? r.accepted : wrong).push_back(fmt::format("{}: {}", name, text));
    };
    const auto refuse = [&] {
        if (wrong.empty()) return;
        throw failure(exit_peer, fmt::format("--teacher-url: the probe refuses {}: {}; --accept-teacher goes on with "
                                             "what it names",
                                             c.served.url, fmt::join(wrong, "; ")));
    };
    for (const std::string& url : how.urls) {
        const server_identity is = identity_of(c, url);
        if (is.vocabulary >= 0 && is.vocabulary < v)
            say("vocabulary", fmt::format("{} knows {} ids, the student {}", url, is.vocabulary, v));
        if (!is.tokenizer.empty() && is.vocabulary == v &&
            is.tokenizer != print_of_tokenizer(task, static_cast<int>(v)))
            say("tokenizer", fmt::format("{} says that its ids mean something else", url));
        const bool generates = how.dialect == serve::dialect::vllm || how.dialect == serve::dialect::openai_echo;
        if (const int longest = task.max_length() + generates; is.context >= 0 && is.context < longest)
            say("context", fmt::format("{} takes {} tokens, a sequence of the task and what is generated are {}", url,
                                       is.context, longest));
        if (url == how.urls.front()) r.identity = is;
    }
    refuse(); // before it is asked for what it cannot know

    sampling draw;
    draw.seed = c.run.seed, draw.end = task.end_token(), draw.max_response = task.max_response();
    draw.slots = c.distill.slots, draw.more_ends = draws.more_ends;
    std::vector<request> prompts;
    constexpr std::uint64_t base = std::uint64_t{10} << 56; // samples apart from a run's
    for (std::uint64_t i = base; i < base + static_cast<std::uint64_t>(draws.responses); ++i)
        prompts.push_back({i, task.prompt_tokens(task.training_problem(c.run.seed, i))});
    std::vector<trajectory> drawn = roll_out(student, backend.team(), prompts, draw);
    if (how.dialect == serve::dialect::sglang) // which names its last id only where it is told which that is
        for (trajectory& t : drawn) {
            const std::span<const token> response = t.response();
            const auto n = static_cast<std::size_t>(std::ranges::find(response, v - 1) - response.begin());
            t.tokens.resize(t.prompt_length + n), t.log_mu.resize(n);
        }
    std::erase_if(drawn, [&](const trajectory& t) { return t.log_mu.empty(); });
    r.sequences = std::ssize(drawn);
    std::vector<serve::sequence> questions;
    std::vector<std::vector<token>> inputs;
    std::vector<std::int64_t> offsets{0};
    std::vector<double> log_p, log_q, log_reference;
    for (const trajectory& t : drawn) {
        questions.push_back({t.tokens, static_cast<index_t>(t.prompt_length)});
        inputs.emplace_back(t.tokens.begin(), t.tokens.end() - 1);
        log_p.insert(log_p.end(), t.log_mu.begin(), t.log_mu.end());
        offsets.push_back(std::ssize(log_p));
    }
    const index_t n = std::ssize(log_p);

    serve::wanted what; // of any vocabulary: the probe is to see ids that are not the student's
    if (how.dialect != serve::dialect::openai_echo || lists_for(c) == served_lists::best)
        what.top_k = std::min<index_t>(8, v);
    const index_t k = what.top_k;
    std::vector<index_t> list_ids(static_cast<std::size_t>(n * k), -1);
    std::vector<double> list_log_q(list_ids.size(), 0.0), list_log_p(list_ids.size(), 0.0);
    const std::size_t replicas = std::max<std::size_t>(2, how.urls.size());
    for (std::size_t j = 0; j < replicas; ++j) {
        serve::http_teacher one(settings_for(c, {how.urls[j % how.urls.size()]}, what));
        const std::vector<serve::outcome> outcomes = one.score(questions);
        std::size_t row = 0;
        for (std::size_t s = 0; s < outcomes.size(); ++s) {
            if (!outcomes[s]) not_scored(outcomes[s], "a response of the probe", questions[s].tokens.size());
            const serve::scores& got = *outcomes[s].scores;
            log_q.insert(log_q.end(), got.log_q.begin(), got.log_q.end());
            for (std::size_t t = 0; j == 0 && t < got.log_q.size(); ++t, ++row)
                for (auto i = static_cast<std::size_t>(got.offsets[t]), slot = row * static_cast<std::size_t>(k);
                     i < static_cast<std::size_t>(got.offsets[t + 1]); ++i, ++slot)
                    list_ids[slot] = got.ids[i], list_log_q[slot] = double{got.list_log_q[i]};
        }
    }
    r.compared = reference != nullptr;
    if (r.compared) {
        std::vector<float> logits;
        teacher_scorer(*reference, backend).logits(inputs, logits);
        std::size_t first = 0, row = 0;
        for (const trajectory& t : drawn) {
            for (std::size_t p = t.prompt_length; p < t.tokens.size(); ++p, ++row) {
                const auto width = static_cast<std::size_t>(v);
                const row_law law{std::span(logits).subspan((first + p - 1) * width, width)};
                log_reference.push_back(law(t.tokens[p]));
                for (std::size_t i = row * static_cast<std::size_t>(k); i < (row + 1) * static_cast<std::size_t>(k);
                     ++i)
                    list_log_p[i] = law(static_cast<std::int32_t>(list_ids[i]));
            }
            first += t.tokens.size() - 1;
        }
    }

    opd::teacher_answers a;
    a.log_q = opd::view(std::as_const(log_q).data(), static_cast<index_t>(replicas), n);
    a.log_p = opd::view(std::as_const(log_p).data(), n);
    a.offsets = opd::row_offsets<>(offsets);
    if (k > 0) {
        a.list_ids = opd::view(std::as_const(list_ids).data(), n, k);
        a.list_log_q = opd::view(std::as_const(list_log_q).data(), n, k);
        if (r.compared) a.list_log_p = opd::view(std::as_const(list_log_p).data(), n, k);
    }
    a.vocab = v;
    r.report = opd::probe_teacher(a);

    const auto sigma = [&](const double* x, const double* y) { // √E[(Σ_t |x_t - y_t|)²]
        double squares = 0;
        for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
            double sum = 0;
            for (std::int64_t t = offsets[s]; t < offsets[s + 1]; ++t) sum += std::abs(x[t] - y[t]);
            squares += sum * sum;
        }
        return std::sqrt(squares / static_cast<double>(std::max<std::size_t>(1, offsets.size() - 1)));
    };
    for (std::size_t j = 1; j < replicas; ++j)
        r.sequence_sigma = std::max(r.sequence_sigma, sigma(log_q.data(), log_q.data() + static_cast<index_t>(j) * n));
    if (r.compared) r.reference_sigma = sigma(log_q.data(), log_reference.data());

    using opd::probed;
    const auto verdicts = [](opd::teacher_report& report) {
        return std::array<std::pair<const char*, probed*>, 5>{{{"ids", &report.ids},
                                                               {"mass", &report.mass},
                                                               {"shift", &report.shift},
                                                               {"temperature", &report.temperature},
                                                               {"noise", &report.noise}}};
    };
    for (const auto& [name, verdict] : verdicts(r.report)) {
        if (*verdict != probed::bad) continue;
        opd::teacher_report alone = r.report;
        for (const auto& [other, theirs] : verdicts(alone))
            if (std::string_view(other) != name) *theirs = probed::unclear;
        const std::string sentence = alone.reasons(); // "noise: two scores …"
        say(name, sentence.substr(std::min(sentence.size(), sentence.find(": ") + 2)));
    }
    refuse();
    return r;
}

std::string served_probe::told() const {
    std::string t = fmt::format("{} responses, {}; sigma_Delta of a response {:.3g} nats between scorings", sequences,
                                to_string(report), sequence_sigma);
    if (compared) t += fmt::format(", {:.3g} from the teacher of --start-from", reference_sigma);
    if (identity.vocabulary > 0) t += fmt::format("; it knows {} ids", identity.vocabulary);
    return t;
}

nlohmann::ordered_json served_probe::described() const {
    nlohmann::ordered_json j;
    if (!identity.model.empty()) j["model"] = identity.model;
    if (identity.vocabulary >= 0) j["vocabulary"] = identity.vocabulary;
    if (identity.context >= 0) j["context"] = identity.context;
    j["sequences"] = sequences;
    opd::teacher_report::fields([&](const char* name, auto member) {
        const auto& value = report.*member;
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, opd::probed>)
            j[name] = to_string(value);
        else
            j[name] = value;
    });
    j["sequence_sigma_delta"] = sequence_sigma;
    if (compared) j["reference_sigma_delta"] = reference_sigma;
    j["accepted"] = accepted;
    return j;
}

// --- figures --------------------------------------------------------------------------------------------------------

nlohmann::ordered_json served_teacher::described() const {
    const serve::http_metrics m = client_->teacher.metrics();
    nlohmann::ordered_json j;
    j["dialect"] = settings_.served.dialect;
    j["requests"] = m.requests;
    for (int i = 1; i <= static_cast<int>(serve::failure::cancelled); ++i)
        if (m.failures[i] > 0) j["failures"][to_string(static_cast<serve::failure>(i))] = m.failures[i];
    j["retries"] = m.retries;
    j["scored"] = m.scored;
    j["tokens"] = m.tokens;
    j["sent_bytes"] = m.sent_bytes;
    j["received_bytes"] = m.received_bytes;
    j["busy_seconds"] = m.busy_seconds;
    return j;
}

std::string served_teacher::told(const nlohmann::ordered_json& j) {
    std::string faults = "no failure";
    if (j.contains("failures")) {
        faults.clear();
        for (const auto& [name, n] : j["failures"].items())
            faults += fmt::format("{}{} {}", faults.empty() ? "" : ", ", n.get<std::int64_t>(), name);
    }
    const auto requests = static_cast<double>(std::max<std::int64_t>(1, j["requests"].get<std::int64_t>()));
    return fmt::format(
        "\n{:<16}{:>10} requests ({}), {} responses scored, {} of them again; {:.1f} ms a request, {:.1f} "
        "MB received\n",
        "served teacher", j["requests"].get<std::int64_t>(), faults, j["scored"].get<std::int64_t>(),
        j["retries"].get<std::int64_t>(), 1e3 * j["busy_seconds"].get<double>() / requests,
        1e-6 * j["received_bytes"].get<double>());
}

} // namespace trainer
