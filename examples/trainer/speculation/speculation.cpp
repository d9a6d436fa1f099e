// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/speculation.hpp"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "opd/rng.hpp"
#include "speculation/learned_drafter.hpp"
#include "speculation/spot_training.hpp"

namespace trainer {

namespace spec = opd::spec;

namespace {

// Chains, one child a node, and for a drafter that can, trees.
std::vector<spec::strategy> arms(bool branches) {
    auto r = spec::rate_tuner_options().arms;
    if (!branches) std::erase_if(r, [](const spec::strategy& s) { return s.top_k > 1; });
    return r;
}

constexpr double look_again = 1.0 / 128;  // of the decisions: what all nodes cost and bring
constexpr double look_without = 1.0 / 16; // what a step takes without, over the square of what drafts gain
constexpr std::int32_t patience = 16;     // decisions in a row that no draft pays, then comes a rest
constexpr index_t trial = 48;     // steps that asked for drafts, after which they must have paid, or comes a rest
constexpr std::int32_t rest = 64; // steps of the first; each is twice as long as the one before, to 64 times
constexpr index_t enough = 8;     // steps that asked and did not pay, after which predictions of less are believed
constexpr index_t turn = 8;       // steps of sequences in a turn, which has two decisions at least

// Choices: the arms of each drafter, the fixed strategy, none.
constexpr std::size_t of_fixed = speculation_counts::choices - 2, of_none = speculation_counts::choices - 1;

} // namespace

std::int32_t speculation_options::most() const {
    if (what != kind::automatic) return on() ? fixed.verify : 0;
    std::int32_t r = 0;
    for (const spec::strategy& s : arms(true)) r = std::max(r, s.verify);
    return r;
}

drafters make_drafters(const speculation_options& o) {
    drafters r;
#define TRAINER_MAKE(name, says, type, from)                                                                           \
    if (o.what == drafting::name) r.push_back(std::make_unique<type>(from));
    TRAINER_DRAFTERS(TRAINER_MAKE)
#undef TRAINER_MAKE
    if (o.what == drafting::automatic) {
        r.push_back(std::make_unique<retrieval_drafter>(o.retrieval));
        if (o.learned) r.push_back(std::make_unique<learned_drafter>(o.learned));
    }
    return r;
}

std::string choice_name(const speculation_options& o, std::size_t choice) {
    if (choice == of_none) return "none";
    // of the two among which auto chooses
    const auto chains = arms(false), all = arms(true);
    const auto who = choice == of_fixed ? o.what : choice < chains.size() ? drafting::ngram : drafting::learned;
    const spec::strategy& s = choice == of_fixed       ? o.fixed
                              : choice < chains.size() ? chains[choice]
                                                       : all.at(choice - chains.size());
    return fmt::format("{} {}/{}/{}", draftings[static_cast<std::size_t>(who)].text, s.depth, s.top_k, s.verify);
}

// --- what is learnt -------------------------------------------------------------------------------------------------

void step_fit::heard(const step_work& w, double seconds) {
    if (known()) seconds = std::min(seconds, 3 * of(w));
    fit_.add({w.rows, w.passes, w.drafted}, seconds);
    ++heard_;
    cost_ = fit_.cost();
}

double step_fit::of(const step_work& w) const {
    constexpr double least_seconds = 1e-12;
    return std::max(least_seconds, cost_[0] + cost_[1] * w.rows + cost_[2] * w.passes + cost_[3] * w.drafted);
}

void length_record::add_up() {
    double sequences = 1, tokens = 0; // one that is not known, and may end anywhere
    const std::size_t most = ended_.size() - 1;
    remaining_.resize(ended_.size());
    for (std::size_t drawn = most; drawn + 1 > 0; --drawn) { // those that are longer
        remaining_[drawn] = std::max(1.0, (tokens + static_cast<double>(most - drawn) / 2) / sequences);
        sequences += static_cast<double>(ended_[drawn]);
        tokens += sequences - 1;
    }
}

// --- a step ---------------------------------------------------------------------------------------------------------

speculation::speculation(const speculation_options& o, drafters all, const opd::filter& filter, bool greedy,
                         std::uint64_t seed, index_t lanes, index_t max_response)
    : options_(o), law_{.filter = filter, .greedy = greedy, .seed = seed}, max_response_(max_response),
      plans_(static_cast<std::size_t>(lanes)),
      which_({.drafters = static_cast<index_t>(all.size()), .again = 50}), // turns
      switch_({.on_at = o.running, .off_at = o.running + o.running / 4}), lengths_(max_response) {
    static_assert(speculation_counts::choices == 15); // a drafter of five arms, one of eight, and two
    for (auto& d : all) {
        which_.exists(static_cast<index_t>(sources_.size()), true);
        spec::rate_tuner_options tuned;
        tuned.arms = arms(d->branches());
        sources_.push_back({std::move(d), spec::follow_rates(), spec::rate_tuner(std::move(tuned)), step_fit()});
    }
}

void speculation::begin(index_t lane, const trajectory& t) {
    for (source& s : sources_) s.drafter->begin(lane, t);
    if (recorder_) recorder_->begin(lane);
}

void speculation::end(index_t lane, const trajectory& t, bool finished) {
    if (finished) lengths_.heard(static_cast<index_t>(t.response().size()));
    for (source& s : sources_) s.drafter->end(lane, t, finished);
    if (recorder_) recorder_->end(lane, t, finished);
}

bool speculation::reads_hidden() const {
    return recorder_ ||
           std::any_of(sources_.begin(), sources_.end(), [](const source& s) { return s.drafter->reads_hidden(); });
}

bool speculation::reads_layers() const {
    return std::any_of(sources_.begin(), sources_.end(), [](const source& s) { return s.drafter->reads_layers(); });
}

void speculation::hear(std::span<const lane_news> news, const policy& target) {
    for (source& s : sources_) s.drafter->hear(news, target);
    if (recorder_) recorder_->hear(news, target);
}

speculation::pause& speculation::pause_now() {
    const auto size = static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(batch_))) - 1;
    return pauses_[std::min(size, pauses_.size() - 1)];
}

double speculation::uniform() {
    const opd::noise_row noise(law_.seed, opd::noise_stream::coin, decisions_, 0);
    return opd::keyed_uniform(noise, uniforms_++);
}

// Of the step that comes: strategy_.
void speculation::decide() {
    if (options_.what != speculation_options::kind::automatic) {
        strategy_ = options_.fixed;
        return;
    }
    if (!switch_.check(batch_)) return;
    if (pause& p = pause_now(); p.rests > 0) {
        --p.rests;
        return;
    }
    ++decisions_, uniforms_ = 0;
    if (const auto s = std::find_if(sources_.begin(), sources_.end(), [](const source& x) { return !x.tried(); });
        s != sources_.end()) {
        const auto depth = static_cast<std::int32_t>(1 + 2 * s->asked % 3); // small, and not always the same
        using_ = static_cast<std::size_t>(s - sources_.begin()), arm_ = {};
        strategy_ = {depth, 1, depth};
        return;
    }
    // a step without costs as much as drafts gain, and says little where they are far from breaking even
    const auto gain = [&] {
        source& s = sources_[using_];
        return arm_.none() ? 1 : s.tuner.tokens_per_second(arm_, batch_, s.rates, times_plain(s, batch_));
    };
    const double gains = std::max(1.0, gain());
    if (uniform() < look_without / (gains * gains)) return;
    if (held_ == 0) {
        end_turn();
        promised_.clear();
        for (source& s : sources_) promised_.push_back(s.tuner.best_rate(batch_, s.rates, times_plain(s, batch_)));
        using_ = static_cast<std::size_t>(which_.choose(promised_));
        source& s = sources_[using_];
        arm_ = s.tuner.choose(batch_, s.rates, times_plain(s, batch_));
        // what was asked for since the last rest did not pay, and nothing is predicted to
        if (pause& p = pause_now(); p.asked.steps >= enough && !p.asked.pay() && gain() < 1) {
            rest_now(p);
            return;
        }
        held_ = static_cast<std::int32_t>(std::max<index_t>(2, turn / batch_));
    }
    --held_;
    strategy_ = arm_;
}

void speculation::draft(std::span<const due> sequences, bool vacant) {
    for (plan& p : plans_) p.tree = {};
    batch_ = static_cast<index_t>(sequences.size());
    accepted_ = verified_ = drawn_ = 0;
    strategy_ = {}, work_ = {}, asked_ = false;
    if (batch_ == 0) return;
    decide();
    if (strategy_.none()) return;

    source& from = sources_[using_];
    wishes_.clear();
    for (const due& d : sequences) {
        const auto drawn = static_cast<index_t>(d.sequence->response().size());
        const auto room =
            static_cast<std::int32_t>(max_response_ - drawn - 1); // the step draws one more than is followed
        plan& p = plans_[static_cast<std::size_t>(d.lane)];
        p.builder.begin(from.rates);
        if (room < 1) continue;
        spec::draft_law law = law_;
        law.sample = d.sequence->sample;
        law.position = static_cast<std::uint32_t>(d.sequence->tokens.size());
        wishes_.push_back({d.lane, d.sequence, law, std::min(strategy_.depth, room), strategy_.top_k, &p.builder});
    }
    work_ = from.drafter->propose(wishes_);
    ++from.asked;
    from.passes += work_.passes, from.depths += strategy_.depth;
    from.nodes += work_.nodes;
    for (const draft_wish& w : wishes_) from.places += (w.depth - 1) * w.children;
    asked_ = true;
    index_t offered = 0;
    for (const draft_wish& w : wishes_) offered += w.tree->size();
    counts_.drafted += offered;
    if (offered == 0) {
        strategy_ = {};
        return;
    }
    const bool all = options_.what != speculation_options::kind::automatic || !from.tried() ||
                     uniform() < look_again; // nodes of the strategy, whatever they cost
    if (!all) return share_budget(vacant);
    for (const draft_wish& w : wishes_) select(w, strategy_.verify);
}

void speculation::select(const draft_wish& w, index_t nodes) {
    spec::draft_tree& tree = plans_[static_cast<std::size_t>(w.lane)].tree;
    tree = w.tree->select(nodes);
    verified_ += tree.size();
}

// Of what was proposed, what is worth its rows.
void speculation::share_budget(bool vacant) {
    candidates_.clear();
    for (const draft_wish& w : wishes_) {
        const auto gains = w.tree->gains();
        candidates_.push_back({gains.first(std::min(gains.size(), static_cast<std::size_t>(strategy_.verify))),
                               lengths_.remaining(static_cast<index_t>(w.sequence->response().size()))});
    }
    const step_fit& cost = sources_[using_].cost;
    const auto rows = static_cast<index_t>(candidates_.size());
    // the passes are made, and what only reads a prefix is to be read anyway
    const double seconds = cost.of(done(batch_));
    const auto shares =
        budget_.share(candidates_, spec::step_cost({{rows, seconds}, {rows + 1, seconds + cost.of_row()}}),
                      {.tail = vacant ? 1.0 : 0.0});
    for (std::size_t i = 0; i < wishes_.size(); ++i) select(wishes_[i], shares[i]);
    pause& p = pause_now();
    if (verified_ > 0) {
        p.fruitless = 0;
        return;
    }
    strategy_ = {}; // what the step comes to says nothing of it
    if (++p.fruitless == patience) rest_now(p);
}

void speculation::rest_now(pause& p) {
    p.fruitless = 0, p.asked = {}, p.rests = rest << p.rested;
    p.rested = std::min(p.rested + 1, 6);
}

void speculation::verified(index_t lane, const spec::verdict& v, index_t tokens) {
    plan& p = plans_[static_cast<std::size_t>(lane)];
    ++counts_.steps;
    counts_.tokens += tokens;
    drawn_ += tokens;
    if (p.tree.size() == 0) return;
    ++counts_.verified_steps;
    counts_.verified += p.tree.size();
    counts_.accepted += v.accepted;
    accepted_ += v.accepted;
    p.builder.learn(sources_[using_].rates, v);
}

void speculation::took(index_t rows, double seconds) {
    if (batch_ == 0 || rows == 0 || !(seconds > 0)) return;
    ++counts_.chosen[choice()];
    if (const step_fit& plain = sources_.front().cost;
        plain.known()) { // of retrieval, which makes no passes, where there are two
        const double without = plain.of({.rows = static_cast<double>(rows - verified_)});
        // one that the machine held up counts as step_fit counts it
        const step_fit& mine = sources_[using_].cost;
        const double usual = mine.known() ? std::min(seconds, 3 * mine.of(done(rows))) : seconds;
        // rows that only read a prefix are to be computed anyway, in however many steps: drafts spare none of them. The
        // drafter reads what was drawn while it was not asked
        const auto more = [](index_t x) { return static_cast<double>(std::max<index_t>(0, x)); };
        const double read = plain.of_row() * more(rows - verified_ - batch_) +
                            mine.of_drafted() * more(work_.rows - work_.nodes - drawn_);
        const auto add = [&](sums& s) {
            ++s.steps, s.sequences += batch_, s.accepted += accepted_, s.tokens += drawn_;
            s.seconds += std::max(usual - read, usual / 8),
                s.without += plain.of({.rows = static_cast<double>(batch_)});
        };
        if (asked_ && !arm_.none()) {
            add(decided_);
            pause& p = pause_now();
            add(p.asked);
            if (p.asked.steps >= trial && options_.what == speculation_options::kind::automatic) {
                if (p.asked.pay())
                    p.rested = 0, p.asked = {};
                else
                    rest_now(p);
            }
        }
        if (verified_ > 0) {
            counts_.timed.sequences += batch_, counts_.timed.tokens += drawn_;
            counts_.timed.seconds += usual, counts_.timed.without += without;
        }
    }
    for (std::size_t i = 0; i < sources_.size(); ++i)
        if (!asked_ || i == using_) sources_[i].cost.heard(done(rows), seconds);
}

std::size_t speculation::choice() const {
    if (strategy_.none()) return of_none;
    if (options_.what != speculation_options::kind::automatic) return of_fixed;
    const auto& all = sources_[using_].tuner.options().arms;
    const std::size_t before = using_ == 0 ? 0 : sources_.front().tuner.options().arms.size();
    return before + static_cast<std::size_t>(std::find(all.begin(), all.end(), strategy_) - all.begin());
}

void speculation::end_turn() {
    const auto mean = [](const sums& s) {
        return spec::step_observation{s.sequences / s.steps,
                                      static_cast<double>(s.accepted) / static_cast<double>(s.sequences),
                                      s.seconds / s.without};
    };
    if (decided_.steps > 0) {
        const auto x = mean(decided_);
        source& s = sources_[using_];
        s.tuner.heard(arm_, x.batch, x.accepted, x.seconds, s.rates, times_plain(s, x.batch));
    }
    decided_ = {};
}

} // namespace trainer
