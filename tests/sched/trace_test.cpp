// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The trace, read back by a JSON parser that is not ours: every event is there once with its times and words, bounds
// keep the first and the last, a file is complete or absent. The timeline's picture: well-formed whatever the names,
// boxes where the spans are.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <rapidcheck.h>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/trace.hpp"
#include "support/property.hpp"
#include "timeline/timeline.hpp"

using namespace examples;
using namespace opd::sched;
using nlohmann::json;
using opd::test::property;
namespace fs = std::filesystem;

namespace {

std::vector<json> events_of(const trace& t, const std::string& phase) {
    const json whole = json::parse(t.json());
    std::vector<json> out;
    for (const json& e : whole.at("traceEvents"))
        if (e.at("ph") == phase) out.push_back(e);
    return out;
}

std::string contents(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

struct folder {
    fs::path path;
    folder() {
        std::string name = (fs::temp_directory_path() / "opd-trace-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
};

struct element {
    std::string name;
    std::map<std::string, std::string> attributes;
    std::string text;
};

std::string unescaped(std::string s) {
    const std::pair<const char*, const char*> words[] = {
        {"&lt;", "<"}, {"&gt;", ">"}, {"&quot;", "\""}, {"&amp;", "&"}};
    for (const auto& [from, to] : words)
        for (std::size_t at = 0; (at = s.find(from, at)) != std::string::npos; ++at)
            s.replace(at, std::string(from).size(), to);
    return s;
}

// The elements of an XML text without comments, declarations or CDATA. Throws at whatever is not well-formed.
std::vector<element> parse_xml(const std::string& xml) {
    std::vector<element> out;
    std::vector<std::size_t> open;
    std::size_t i = 0;
    const auto need = [&](bool ok, const char* what) {
        if (!ok) throw std::runtime_error(std::string(what) + " at byte " + std::to_string(i));
    };
    const auto name = [&] {
        const std::size_t begin = i;
        while (i < xml.size() && (std::isalnum(static_cast<unsigned char>(xml[i])) || xml[i] == '-' || xml[i] == ':'))
            ++i;
        need(i > begin, "a name");
        return xml.substr(begin, i - begin);
    };
    const auto plain = [&](const std::string& s) { // & only as one of the four entities, no control characters
        for (std::size_t k = 0; k < s.size(); ++k) {
            const auto c = static_cast<unsigned char>(s[k]);
            need(c >= 0x20 || c == '\n' || c == '\t' || c == '\r', "a control character");
            if (c == '&') {
                bool entity = false;
                for (const char* e : {"&lt;", "&gt;", "&amp;", "&quot;"})
                    entity = entity || s.compare(k, std::string(e).size(), e) == 0;
                need(entity, "a bare ampersand");
            }
        }
    };
    while (i < xml.size()) {
        const std::size_t begin = i;
        while (i < xml.size() && xml[i] != '<') ++i;
        const std::string text = xml.substr(begin, i - begin);
        plain(text);
        if (!open.empty())
            out[open.back()].text += unescaped(text);
        else
            need(text.find_first_not_of(" \n") == std::string::npos, "text outside the root");
        if (i == xml.size()) break;
        ++i;
        if (xml.at(i) == '/') {
            ++i;
            need(!open.empty() && name() == out[open.back()].name && xml.at(i) == '>', "a matching end");
            open.pop_back();
            ++i;
            continue;
        }
        need(out.empty() || !open.empty(), "one root");
        out.push_back({name(), {}, {}});
        while (true) {
            while (xml.at(i) == ' ') ++i;
            if (xml.at(i) == '>') {
                open.push_back(out.size() - 1);
                break;
            }
            if (xml.at(i) == '/') {
                need(xml.at(++i) == '>', "the end of an empty element");
                break;
            }
            const std::string key = name();
            need(xml.at(i) == '=' && xml.at(i + 1) == '"', "an attribute's value");
            const std::size_t end = xml.find('"', i + 2);
            need(end != std::string::npos, "a closing quote");
            const std::string value = xml.substr(i + 2, end - i - 2);
            need(value.find('<') == std::string::npos, "no markup in a value");
            plain(value);
            need(out.back().attributes.emplace(key, value).second, "each attribute once");
            i = end + 1;
        }
        ++i;
    }
    need(open.empty() && !out.empty(), "all elements closed");
    return out;
}

std::vector<const element*> of_class(const std::vector<element>& all, const std::string& name, const std::string& cls) {
    std::vector<const element*> out;
    for (const element& e : all)
        if (e.name == name && e.attributes.count("class") && e.attributes.at("class") == cls) out.push_back(&e);
    return out;
}

// "M104 76h84.5M…": (x, width) of each box.
std::vector<std::pair<double, double>> boxes_of(const element& path) {
    std::vector<std::pair<double, double>> out;
    const std::string& d = path.attributes.at("d");
    for (std::size_t at = d.find('M'); at != std::string::npos; at = d.find('M', at + 1))
        out.push_back({std::stod(d.substr(at + 1)), std::stod(d.substr(d.find('h', at) + 1))});
    return out;
}

} // namespace

TEST_CASE("a trace comes back as it was recorded") {
    property("spans, whatever their names, times and workers", [] {
        struct one {
            int s, worker;
            double begin, duration;
            std::string name;
            std::int64_t number;
        };
        const auto list = *rc::gen::container<std::vector<one>>(rc::gen::exec([] {
            return one{*rc::gen::inRange(0, 3),
                       *rc::gen::inRange(0, 2000),
                       *rc::gen::inRange(0, 1 << 30) / 1024.0,
                       *rc::gen::inRange(0, 1 << 20) / 1024.0,
                       *rc::gen::container<std::string>(rc::gen::inRange<char>(1, 127)),
                       *rc::gen::arbitrary<std::int64_t>()};
        }));
        trace t;
        for (const one& x : list)
            t.span(static_cast<stage>(x.s), x.worker, x.name, x.begin, x.begin + x.duration,
                   {{"number", x.number}, {"name", x.name}, {"real", x.begin}, {"yes", true}});
        const auto spans = events_of(t, "X");
        RC_ASSERT(spans.size() == list.size());
        for (std::size_t i = 0; i < list.size(); ++i) {
            const one& x = list[i];
            const json& e = spans[i];
            RC_ASSERT(e.at("name").get<std::string>() == x.name);
            RC_ASSERT(e.at("pid").get<int>() == process_of(static_cast<stage>(x.s)));
            RC_ASSERT(e.at("tid").get<int>() == x.worker);
            RC_ASSERT(std::abs(e.at("ts").get<double>() - x.begin * 1e6) <= 5.1e-4);
            RC_ASSERT(std::abs(e.at("dur").get<double>() - x.duration * 1e6) <= 5.1e-4);
            RC_ASSERT(e.at("args").at("number").get<std::int64_t>() == x.number);
            RC_ASSERT(e.at("args").at("name").get<std::string>() == x.name);
            RC_ASSERT(e.at("args").at("real").get<double>() == x.begin);
            RC_ASSERT(e.at("args").at("yes").get<bool>());
        }
        // every row that is drawn on has its name, once, and so has every group
        std::map<std::pair<int, int>, int> rows;
        std::map<int, int> groups;
        for (const json& e : events_of(t, "M")) {
            if (e.at("name") == "thread_name") ++rows[{e.at("pid").get<int>(), e.at("tid").get<int>()}];
            if (e.at("name") == "process_name") {
                ++groups[e.at("pid").get<int>()];
                RC_ASSERT(e.at("args").at("name") == name_of(static_cast<stage>(e.at("pid").get<int>() - 2)));
            }
        }
        for (const one& x : list) {
            const int process = process_of(static_cast<stage>(x.s));
            RC_ASSERT((rows[{process, x.worker}]) == 1);
            RC_ASSERT(groups[process] == 1);
        }
    });

    trace t;
    t.gate(1, 2, 7);
    t.hold(0.5, 0.75);
    t.counter("depth", 0.25, {{"running", 3}, {"ready", 0.5}});
    t.fault(stage::teacher, 2, 1.5, "timed \"out\"\n\xff");
    t.instant(sequence_track({9, 4, 0, 1, 1}), "dropped", 3);
    t.span(lane_track(stage::rollout, 3, 5, 8), "lane", 0, 1);
    const json whole = json::parse(t.json());
    CHECK(whole["displayTimeUnit"] == "ms");
    CHECK(whole["otherData"]["events_left_out"] == 0);
    const auto spans = events_of(t, "X");
    REQUIRE(spans.size() == 3);
    CHECK(spans[0]["name"] == "sync gate");
    CHECK(spans[0]["args"]["version"] == 7);
    CHECK(spans[0]["ts"] == 1e6);
    CHECK(spans[0]["dur"] == 1e6);
    CHECK(spans[2]["tid"] == 29);
    const auto counters = events_of(t, "C");
    REQUIRE(counters.size() == 1);
    CHECK(counters[0]["args"] == json({{"running", 3}, {"ready", 0.5}}));
    const auto instants = events_of(t, "i");
    REQUIRE(instants.size() == 2);
    CHECK(instants[0]["args"]["reason"] == "timed \"out\"\n\xef\xbf\xbd");
    CHECK(instants[0]["s"] == "t");
    CHECK(instants[1]["tid"] == 4);
    bool named = false;
    for (const json& e : events_of(t, "M")) named = named || e["args"].value("name", "") == "worker 2";
    CHECK(named);
}

TEST_CASE("a trace is valid JSON whatever goes in") {
    const auto args = [](const trace& t) { return events_of(t, "X").at(0).at("args"); };
    property("any bytes become a string that parses; valid UTF-8 comes back as it was", [&] {
        const auto bytes = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
        trace t;
        t.span(stage::rollout, 0, bytes, 0, 1, {{bytes, bytes}});
        const json parsed = args(t);
        RC_ASSERT(parsed.size() == 1u);
        const json reference = json::parse(json(bytes).dump(-1, ' ', false, json::error_handler_t::replace));
        RC_ASSERT((parsed.begin().value().get<std::string>().find('\0') != std::string::npos) ==
                  (bytes.find('\0') != std::string::npos));
        if (reference.get<std::string>() == bytes) {
            RC_ASSERT(parsed.begin().key() == bytes);
            RC_ASSERT(events_of(t, "X").at(0).at("name") == bytes);
        }
    });
    property("doubles come back bit for bit, non-numbers as null", [&](double x) {
        constexpr double infinity = std::numeric_limits<double>::infinity();
        trace t;
        t.span(stage::rollout, 0, "", 0, 1,
               {{"x", x}, {"0", std::numeric_limits<double>::quiet_NaN()}, {"1", infinity}, {"2", -infinity}});
        const json parsed = args(t);
        if (std::isfinite(x))
            RC_ASSERT(parsed["x"].get<double>() == x);
        else
            RC_ASSERT(parsed["x"].is_null());
        for (const char* name : {"0", "1", "2"}) RC_ASSERT(parsed[name].is_null());
    });
    trace t;
    const char* words = "\"\\/\b\f\n\r\t\x01\x7f\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80";
    t.span(stage::rollout, 0, "", 0, 1,
           {{"words", words},
            {"no UTF-8", "\xff\xc0\xaf\xed\xa0\x80"},
            {"cut", "\xe2\x82"},
            {"least", std::numeric_limits<std::int64_t>::min()},
            {"no", false}});
    const json parsed = args(t);
    std::string replaced;
    for (int i = 0; i < 6; ++i) replaced += "\xef\xbf\xbd";
    CHECK(parsed["words"] == words);
    CHECK(parsed["no UTF-8"] == replaced);
    CHECK(parsed["cut"] == replaced.substr(0, 6));
    CHECK(parsed["least"] == std::numeric_limits<std::int64_t>::min());
    CHECK(parsed["no"] == false);
}

TEST_CASE("a trace refuses what cannot be") {
    const double not_a_number = std::numeric_limits<double>::quiet_NaN();
    trace t;
    CHECK_THROWS_AS(t.span(stage::rollout, 0, "x", 2, 1), opd::invalid_input);
    CHECK_THROWS_AS(t.span(stage::rollout, 0, "x", not_a_number, 1), opd::invalid_input);
    CHECK_THROWS_AS(t.counter("x", 0, {}), opd::invalid_input);
    CHECK_THROWS_AS(t.counter("x", 0, {{"a", "text"}}), opd::invalid_input);
    CHECK_THROWS_AS(t.counter("x", 0, {{"a", not_a_number}}), opd::invalid_input);
    CHECK_THROWS_AS(t.instant(gate_track, "x", not_a_number), opd::invalid_input);
    CHECK(t.spans() == 0);
    CHECK(t.marks() == 0);
    CHECK(events_of(t, "M").empty());
}

TEST_CASE("a bounded trace keeps the first and the last") {
    property("of spans and of marks, and counts what it left out", [] {
        const int n = *rc::gen::inRange(0, 40), marks = *rc::gen::inRange(0, 40);
        const auto first = *rc::gen::inRange<std::size_t>(0, 20), last = *rc::gen::inRange<std::size_t>(0, 20);
        trace t({first, last});
        for (int i = 0; i < n; ++i) t.span(stage::learner, 0, std::to_string(i), i, i + 1);
        for (int i = 0; i < marks; ++i) t.counter("c", i, {{"n", i}});
        std::vector<std::string> want, got;
        for (int i = 0; i < n; ++i)
            if (std::size_t(i) < first || std::size_t(n - i) <= last) want.push_back(std::to_string(i));
        for (const json& e : events_of(t, "X")) got.push_back(e.at("name"));
        RC_ASSERT(got == want);
        const auto kept = std::min(std::size_t(marks), first + last);
        RC_ASSERT(t.marks() == kept);
        RC_ASSERT(events_of(t, "C").size() == kept);
        RC_ASSERT(t.left_out() == std::size_t(n) - want.size() + std::size_t(marks) - kept);
        RC_ASSERT(json::parse(t.json())["otherData"]["events_left_out"] == t.left_out());
    });
}

TEST_CASE("a trace's file is complete or not there") {
    const folder dir;
    const std::string path = (dir.path / "trace.json").string();
    trace t;
    for (int i = 0; i < 5000; ++i) t.span(stage::rollout, i % 7, "decode", i, i + 0.5, {{"running", i}});
    t.write(path);
    CHECK(contents(path) == t.json());
    CHECK(json::parse(contents(path))["traceEvents"].size() == 5000 + 2 + 2 * 7);
    t.span(stage::rollout, 0, "more", 5000, 5001);
    t.write(path); // replaces
    CHECK(contents(path) == t.json());
    CHECK(std::distance(fs::directory_iterator(dir.path), fs::directory_iterator()) == 1);

    CHECK_THROWS_AS(t.write((dir.path / "absent" / "trace.json").string()), opd::error);
    const fs::path taken = dir.path / "taken"; // a folder that is not empty cannot be replaced by a file
    fs::create_directories(taken / "inside");
    CHECK_THROWS_AS(t.write(taken.string()), opd::error);
    CHECK(fs::is_directory(taken));
    CHECK(!fs::exists(taken.string() + ".part"));
    if (fs::exists("/dev/full")) { // the disk is full: an error, not half a file
        const fs::path full = dir.path / "full.json";
        fs::create_symlink("/dev/full", full.string() + ".part");
        CHECK_THROWS_AS(t.write(full.string()), opd::error);
        CHECK(!fs::exists(full));
        CHECK(!fs::is_symlink(full.string() + ".part"));
    }
}

TEST_CASE("the timeline puts boxes where the spans are") {
    property("one box per span of a lane as far as they can be told apart", [] {
        const int n = *rc::gen::inRange(1, 12);
        timeline data;
        const double origin = *rc::gen::inRange(0, 100000) / 8.0;
        double t = origin;
        std::vector<std::pair<double, double>> want;
        double busy = 0;
        for (int i = 0; i < n; ++i) {
            const double length = *rc::gen::inRange(2, 10), gap = *rc::gen::inRange(2, 10);
            data.spans.push_back({stage::teacher, 3, t, t + length, "span"});
            want.push_back({t - origin, length});
            busy += length;
            t += length + gap;
        }
        const double end = data.spans.back().end, scale = (960.0 - 104 - 52) / (end - origin);
        const auto elements = parse_xml(timeline_svg(data));
        const auto paths = of_class(elements, "path", "teacher");
        RC_ASSERT(paths.size() == 1u);
        const auto boxes = boxes_of(*paths[0]);
        RC_ASSERT(boxes.size() == want.size());
        for (std::size_t i = 0; i < boxes.size(); ++i) {
            RC_ASSERT(std::abs(boxes[i].first - (104 + want[i].first * scale)) < 0.02);
            RC_ASSERT(std::abs(boxes[i].second - want[i].second * scale) < 0.02);
        }
        bool lane = false, share = false;
        const std::string percent = std::to_string(std::lround(100 * busy / (end - origin)));
        for (const element& e : elements) {
            lane = lane || (e.name == "text" && e.text == "teacher 3");
            share = share || (e.name == "text" && e.text == percent + " %");
        }
        RC_ASSERT(lane);
        // a half rounds to even in the picture, away from zero in lround
        RC_ASSERT(share || std::abs(std::fmod(100 * busy / (end - origin), 1.0) - 0.5) < 1e-9);
    });

    timeline data;
    data.spans = {{stage::rollout, 0, 0, 10, "a"}, {stage::rollout, 0, 10, 20, "b"}, {stage::rollout, 0, 5, 8, ""}};
    data.spans.push_back({stage::learner, 0, 20, 40, "u"});
    data.gates = {{20, 22}};
    data.holds = {{30, 31}};
    data.faults = {{stage::learner, 0, 25}, {stage::learner, 9, 25}};
    data.curves = {{"running", {{0, 4}, {20, 0}}}};
    timeline_options options;
    options.title = "title";
    auto elements = parse_xml(timeline_svg(data, options));
    REQUIRE(of_class(elements, "path", "rollout").size() == 1);
    CHECK(boxes_of(*of_class(elements, "path", "rollout")[0]).size() ==
          2); // touching spans keep a seam, nested ones join
    REQUIRE(of_class(elements, "path", "gate").size() == 1);
    const auto gate = boxes_of(*of_class(elements, "path", "gate")[0]);
    REQUIRE(gate.size() == 1);
    CHECK(std::abs(gate[0].first - (104 + 804 * 0.5)) < 0.02);
    CHECK(std::abs(gate[0].second - 804 * 0.05) < 0.02);
    CHECK(of_class(elements, "path", "hold").size() == 1);
    CHECK(of_class(elements, "path", "fault").size() == 2); // the legend's and one: no lane for the other
    CHECK(of_class(elements, "path", "curve").size() == 1);
    CHECK(of_class(elements, "text", "title").at(0)->text == "title");

    options.from = 30; // a window
    options.to = 50;
    elements = parse_xml(timeline_svg(data, options));
    CHECK(of_class(elements, "path", "rollout").empty()); // the lane stays, with nothing in it
    const auto learner = boxes_of(*of_class(elements, "path", "learner").at(0));
    REQUIRE(learner.size() == 1);
    CHECK(std::abs(learner[0].first - 104) < 0.02);
    CHECK(std::abs(learner[0].second - 402) < 0.02);
    CHECK(of_class(elements, "path", "gate").empty());
}

TEST_CASE("the timeline of a long run of many workers is a small file") {
    timeline data;
    for (int w = 0; w < 1000; ++w)
        for (int i = 0; i < 300; ++i) data.spans.push_back({stage::rollout, w, i * 4.0, i * 4.0 + (w + i) % 4, "x"});
    data.curves = {{"running", {}}};
    for (int i = 0; i < 100000; ++i) data.curves[0].points.push_back({i * 0.012, i % 64});
    timeline_options options;
    options.max_lanes = 10;
    const std::string svg = timeline_svg(data, options);
    CHECK(svg.size() < 100'000);
    const auto elements = parse_xml(svg);
    CHECK(of_class(elements, "path", "rollout").size() == 10);
    bool said = false;
    for (const element& e : elements) said = said || e.text == "rollout (10 of 1000 workers)";
    CHECK(said);
    for (const element* e : of_class(elements, "path", "rollout"))
        for (const auto& [x, w] : boxes_of(*e)) {
            REQUIRE(x >= 104 - 0.01);
            REQUIRE(x + w <= 908 + 0.4);
        }
}

TEST_CASE("the timeline is well-formed whatever the words, and refuses what it cannot draw") {
    property("any bytes in titles, labels and names", [] {
        const auto bytes = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
        timeline data;
        data.spans = {{stage::rollout, 0, 0, 1, bytes}};
        data.curves = {{bytes, {{0, 1}}}};
        timeline_options options;
        options.title = "<" + bytes;
        const auto elements = parse_xml(timeline_svg(data, options));
        RC_ASSERT(of_class(elements, "text", "title").size() == 1u);
    });
    timeline data;
    CHECK_THROWS_AS(timeline_svg(data), opd::invalid_input);
    data.spans = {{stage::rollout, 0, 1, 1, ""}};
    CHECK_THROWS_AS(timeline_svg(data), opd::invalid_input);
    data.spans = {{stage::rollout, 0, 2, 1, ""}};
    CHECK_THROWS_AS(timeline_svg(data), opd::invalid_input);
    data.spans = {{stage::rollout, 0, 0, std::numeric_limits<double>::infinity(), ""}};
    CHECK_THROWS_AS(timeline_svg(data), opd::invalid_input);
    data.spans = {{stage::rollout, 0, 0, 1, ""}};
    CHECK_NOTHROW(timeline_svg(data));
    timeline_options options;
    options.width = 10;
    CHECK_THROWS_AS(timeline_svg(data, options), opd::invalid_input);
    options = {};
    options.max_lanes = 0;
    CHECK_THROWS_AS(timeline_svg(data, options), opd::invalid_input);
    options = {};
    options.from = 1;
    CHECK_THROWS_AS(timeline_svg(data, options), opd::invalid_input);
}

TEST_CASE("a trace's timeline has its spans, gates, holds, faults and counters") {
    trace t;
    t.span(stage::rollout, 1, "decode", 0, 4);
    t.span(stage::learner, 0, "update", 4, 6);
    t.span(stage::rollout, 1, spare_name, 5, 6);
    t.span(sequence_track({1, 2, 0, 0, 0}), "life", 0, 6); // not a worker's
    t.gate(6, 7, 1);
    t.hold(3, 4);
    t.counter("running", 2, {{"n", 5}});
    t.counter("running", 1, {{"n", 2.5}});
    t.fault(stage::rollout, 1, 2, "died");
    t.instant(worker_track(stage::rollout, 1), "else", 2);
    const timeline data = timeline_of(t);
    REQUIRE(data.spans.size() == 3);
    CHECK(std::ranges::count(data.spans, true, &examples::timeline_span::spare) == 1);
    CHECK(data.spans[0].where == stage::rollout);
    CHECK(data.spans[0].worker == 1);
    CHECK(data.spans[0].end == 4.0);
    CHECK(data.spans[1].label == "update");
    REQUIRE(data.gates.size() == 1);
    CHECK(data.gates[0].begin == 6.0);
    REQUIRE(data.holds.size() == 1);
    CHECK(data.holds[0].end == 4.0);
    REQUIRE(data.faults.size() == 1);
    CHECK(data.faults[0].t == 2.0);
    REQUIRE(data.curves.size() == 1);
    CHECK(data.curves[0].points == std::vector<std::pair<double, double>>{{1, 2.5}, {2, 5}});
    // spare work has a colour of its own, and is no busy time: 4 of 6 seconds
    const std::string svg = timeline_svg(data);
    CHECK(of_class(parse_xml(svg), "path", "spare").size() == 1u);
    CHECK(svg.find(">67 %<") != std::string::npos);
}
