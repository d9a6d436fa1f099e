// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-timeline: draws a Chrome trace that opd wrote (opd/sched/trace.hpp) as an SVG timeline.
//
//     opd-timeline runs/a/trace.json timeline.svg --title "two-step-off" --from 10 --to 60
//
// Exit codes: 0 drawn, 2 usage, 3 the trace cannot be read or holds nothing to draw, 5 the picture cannot be written.
#include <cstdio>
#include <fstream>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "read_trace.hpp"
#include "timeline.hpp"

namespace {

examples::timeline read_trace(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot be opened");
    return examples::timeline_of(recorded_by(nlohmann::json::parse(in)));
}

} // namespace

int main(int argc, char** argv) {
    std::string trace_file, picture_file;
    examples::timeline_options options;
    options.title = "Timeline";
    bool no_labels = false;

    CLI::App app("Draws a Chrome trace that opd wrote as an SVG timeline.", "opd-timeline");
    app.add_option("trace", trace_file, "the trace, as JSON")->required();
    app.add_option("picture", picture_file, "the SVG file to write")->required();
    app.add_option("--title", options.title, "heading of the picture")->capture_default_str();
    auto* to = app.add_option("--to", options.to, "end of the window, seconds of the trace's clock");
    app.add_option("--from", options.from, "begin of the window")->needs(to);
    app.add_option("--width", options.width, "pixels")->capture_default_str()->check(CLI::Range(320.0, 100000.0));
    app.add_option("--max-lanes", options.max_lanes, "workers drawn per stage")
        ->capture_default_str()
        ->check(CLI::PositiveNumber);
    app.add_flag("--no-labels", no_labels, "no words in the boxes");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    }
    if (options.to < options.from) {
        std::fprintf(stderr, "opd-timeline: --to lies before --from\n");
        return 2;
    }
    options.labels = !no_labels;

    std::string svg;
    try {
        svg = examples::timeline_svg(read_trace(trace_file), options);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "opd-timeline: %s: %s\n", trace_file.c_str(), e.what());
        return 3;
    }
    std::ofstream out(picture_file, std::ios::binary | std::ios::trunc);
    out << svg;
    out.close();
    if (!out) {
        std::fprintf(stderr, "opd-timeline: %s cannot be written\n", picture_file.c_str());
        return 5;
    }
    return 0;
}
