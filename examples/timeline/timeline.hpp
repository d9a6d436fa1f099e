// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Draws what ran when as an SVG picture: one lane per worker, a colour per stage and one for spare work (a drafter's
// training while rollout idles), sync gates and holds as vertical bands, faults as marks, queue depths as curves below,
// a time axis, each lane's share of busy time. The picture follows the viewer's light or dark scheme, uses the viewer's
// fonts and loads nothing.
//
// Exact: lanes' busy shares (union of the spans over the window, without spare work). Approximate: what is narrower
// than a third of a pixel is joined with its neighbour or drawn a third of a pixel wide, so that a long run stays a
// small file; of more than `max_lanes` workers in a stage, that many are drawn, spread evenly, and the picture says so.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/error.hpp"
#include "opd/sched/trace.hpp"
#include "opd/sched/types.hpp"

namespace examples {

using opd::sched::stage;
using opd::sched::stage_count;

struct timeline_span {
    stage where = stage::rollout;
    std::int64_t worker = 0;
    double begin = 0, end = 0;
    std::string label;  ///< drawn where it fits
    bool spare = false; ///< what a worker does that has nothing to do
};
/// Across all lanes: a closed sync gate, or the learner held back.
struct timeline_band {
    double begin = 0, end = 0;
};
struct timeline_mark {
    stage where = stage::rollout;
    std::int64_t worker = 0;
    double t = 0;
};
/// A level that changes in steps: (time, level), times ascending.
struct timeline_curve {
    std::string name;
    std::vector<std::pair<double, double>> points;
};

struct timeline {
    std::vector<timeline_span> spans;
    std::vector<timeline_band> gates, holds;
    std::vector<timeline_mark> faults;
    std::vector<timeline_curve> curves;
};

struct timeline_options {
    std::string title;
    double from = 0, to = 0; ///< seconds; the same twice: everything
    double width = 960;      ///< pixels of the whole picture
    int max_lanes = 24;      ///< per stage
    bool labels = true;
};

/// What a trace recorded: spans on the stages' rows, gates, holds, faults and counters.
inline timeline timeline_of(const opd::sched::trace& recorded) {
    using namespace opd::sched;
    timeline out;
    recorded.each_span([&](const trace_event& e) {
        const double end = e.begin + e.duration;
        if (e.where == gate_track && e.name == gate_name) out.gates.push_back({e.begin, end});
        if (e.where == wait_track && e.name == hold_name) out.holds.push_back({e.begin, end});
        for (int s = 0; s < stage_count; ++s)
            if (e.where.process == process_of(static_cast<stage>(s)))
                out.spans.push_back(
                    {static_cast<stage>(s), e.where.thread, e.begin, end, e.name, e.name == spare_name});
    });
    std::map<std::string, std::size_t> curves;
    recorded.each_mark([&](const trace_event& e) {
        if (e.what == trace_event::kind::counter) {
            const auto [at, added] = curves.try_emplace(e.name, out.curves.size());
            if (added) out.curves.push_back({e.name, {}});
            out.curves[at->second].points.push_back({e.begin, e.value});
        } else if (e.name == fault_name) {
            for (int s = 0; s < stage_count; ++s)
                if (e.where.process == process_of(static_cast<stage>(s)))
                    out.faults.push_back({static_cast<stage>(s), e.where.thread, e.begin});
        }
    });
    for (timeline_curve& c : out.curves) { // by time, then as recorded
        std::multimap<double, double> sorted;
        for (const auto& p : c.points) sorted.insert(p);
        c.points.assign(sorted.begin(), sorted.end());
    }
    return out;
}

namespace detail {

/// Text for XML: markup escaped; what XML 1.0 forbids (control characters, bytes that are not UTF-8) becomes U+FFFD.
inline void append_xml(std::string& out, std::string_view text) {
    using nlohmann::json; // repairs UTF-8
    const std::string valid =
        json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
    for (std::size_t i = 0; i < valid.size(); ++i) {
        const char c = valid[i];
        const std::string_view character = std::string_view(valid).substr(i, 3);
        const bool control = static_cast<unsigned char>(c) < 0x20u && c != '\t' && c != '\n' && c != '\r';
        const bool none = character == "\xef\xbf\xbe" || character == "\xef\xbf\xbf";
        if (control || none)
            out += "\xef\xbf\xbd";
        else if (c == '<')
            out += "&lt;";
        else if (c == '>')
            out += "&gt;";
        else if (c == '&')
            out += "&amp;";
        else if (c == '"')
            out += "&quot;";
        else
            out += c;
        if (none) i += 2;
    }
}

/// A coordinate: one or two decimals, without zeros at the end.
inline std::string coordinate(double x, int decimals = 2) {
    char text[400]; // the largest double has 309 digits before the point
    std::string s(text, std::to_chars(text, text + sizeof text, x, std::chars_format::fixed, decimals).ptr);
    while (s.find('.') != std::string::npos && (s.back() == '0' || s.back() == '.')) {
        const bool point = s.back() == '.';
        s.pop_back();
        if (point) break;
    }
    return s == "-0" ? "0" : s;
}

using intervals = std::vector<std::pair<double, double>>;

/// Union, ascending.
inline intervals merged(intervals list) {
    std::sort(list.begin(), list.end());
    intervals out;
    for (const auto& [begin, end] : list) {
        if (!out.empty() && begin <= out.back().second)
            out.back().second = std::max(out.back().second, end);
        else
            out.push_back({begin, end});
    }
    return out;
}

/// Draws one timeline; made for one call.
class timeline_painter {
public:
    timeline_painter(const timeline& data, const timeline_options& options) : data_(data), options_(options) {
        if (!std::isfinite(options.width) || options.width < 320 || options.width > 100000)
            throw opd::invalid_input("width", "between 320 and 100000 pixels");
        if (options.max_lanes < 1) throw opd::invalid_input("max_lanes", "at least one");
        if (!std::isfinite(options.from) || !std::isfinite(options.to) || options.to < options.from)
            throw opd::invalid_input("to", "a window begins before it ends");
        find_window();
        collect_lanes();
    }

    std::string draw() {
        lay_out();
        const std::string title = options_.title.empty() ? "Timeline" : options_.title;
        out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"timeline\" role=\"img\" viewBox=\"0 0 " +
               coordinate(options_.width) + " " + coordinate(height_) + "\" width=\"" + coordinate(options_.width) +
               "\" height=\"" + coordinate(height_) + "\">\n<title>";
        append_xml(out_, title);
        out_ += std::string("</title>\n<style>\n") + style() + "</style>\n";
        out_ += "<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n";
        text("title", 14, 24, title);
        draw_legend();
        draw_axis();
        draw_bands(data_.holds, "hold");
        for (lane& l : lanes_) draw_lane(l);
        draw_bands(data_.gates, "gate");
        draw_faults();
        for (std::size_t i = 0; i < data_.curves.size(); ++i) draw_curve(data_.curves[i], curve_top(i));
        out_ += "</svg>\n";
        return std::move(out_);
    }

private:
    static constexpr double left_ = 104, right_ = 52, legend_ = 46, top_ = 66, curve_height_ = 44, curve_gap_ = 22;
    static constexpr double hair_ = 1.0 / 3; // pixels

    struct lane {
        stage where = stage::rollout;
        std::int64_t worker = 0;
        std::vector<const timeline_span*> spans;
        double y = 0;
    };

    // Of this picture alone, also where it stands in a page beside others.
    static const char* style() {
        return ".timeline text{font:12px system-ui,-apple-system,\"Segoe UI\",sans-serif;fill:#59636e}\n"
               ".timeline .title{font-size:15px;font-weight:600;fill:#1f2328}\n"
               ".timeline .small{font-size:10px}.timeline .end{text-anchor:end}.timeline .mid{text-anchor:middle}\n"
               ".timeline .in{font-size:10px;fill:#fff;text-anchor:middle}\n"
               ".timeline rect{stroke-width:0}.timeline .page{fill:#fff}.timeline .lane{fill:#f0f2f5}.timeline "
               ".grid{stroke:#d1d9e0;stroke-width:1}\n"
               ".timeline .rollout{fill:#2f6fca;stroke:#2f6fca}.timeline "
               ".teacher{fill:#b8690b;stroke:#b8690b}.timeline .learner{fill:#22834e;stroke:#22834e}.timeline "
               ".spare{fill:#8250df;stroke:#8250df}\n"
               ".timeline .gate{fill:#57606a;stroke:#57606a;opacity:.38}.timeline "
               ".hold{fill:#cf222e;stroke:#cf222e;opacity:.2}\n"
               ".timeline .fault{stroke:#cf222e;stroke-width:2;fill:none}\n"
               ".timeline .curve{fill:#8250df;fill-opacity:.25;stroke:#8250df;stroke-width:1}\n"
               "@media (prefers-color-scheme:dark){.timeline text{fill:#9198a1}.timeline .title{fill:#e6edf3}.timeline "
               ".in{fill:#0d1117}\n"
               ".timeline .page{fill:#0d1117}.timeline .lane{fill:#1b2129}.timeline .grid{stroke:#30363d}\n"
               ".timeline .rollout{fill:#6ea8ff;stroke:#6ea8ff}.timeline "
               ".teacher{fill:#f0ad4e;stroke:#f0ad4e}.timeline .learner{fill:#56c98a;stroke:#56c98a}.timeline "
               ".spare{fill:#bc8cff;stroke:#bc8cff}\n"
               ".timeline .gate{fill:#c9d1d9;stroke:#c9d1d9;opacity:.33}.timeline "
               ".hold{fill:#ff7b72;stroke:#ff7b72;opacity:.25}.timeline .fault{stroke:#ff7b72}\n"
               ".timeline .curve{fill:#bc8cff;stroke:#bc8cff}}\n";
    }

    void find_window() {
        from_ = options_.from;
        to_ = options_.to;
        const bool all = from_ == to_;
        if (all) {
            from_ = std::numeric_limits<double>::max();
            to_ = std::numeric_limits<double>::lowest();
        }
        for (const timeline_span& s : data_.spans) {
            if (!std::isfinite(s.begin) || !std::isfinite(s.end) || s.end < s.begin)
                throw opd::invalid_input("spans", "a span begins before it ends, at finite times",
                                         opd::index_t(&s - data_.spans.data()));
            if (!all) continue;
            from_ = std::min(from_, s.begin);
            to_ = std::max(to_, s.end);
        }
        if (data_.spans.empty() || !(to_ > from_)) throw opd::invalid_input("spans", "nothing that takes time");
        scale_ = (options_.width - left_ - right_) / (to_ - from_);
    }

    void collect_lanes() {
        std::map<std::pair<stage, std::int64_t>, lane> all;
        for (const timeline_span& s : data_.spans) {
            lane& l = all[{s.where, s.worker}];
            l.where = s.where;
            l.worker = s.worker;
            if (s.end > from_ && s.begin < to_) l.spans.push_back(&s);
        }
        for (int s = 0; s < stage_count; ++s) {
            std::vector<lane*> of_stage;
            for (auto& [key, l] : all)
                if (key.first == static_cast<stage>(s)) of_stage.push_back(&l);
            workers_[s] = of_stage.size();
            const std::size_t drawn = std::min(of_stage.size(), static_cast<std::size_t>(options_.max_lanes));
            drawn_[s] = drawn;
            for (std::size_t i = 0; i < drawn; ++i) lanes_.push_back(std::move(*of_stage[i * of_stage.size() / drawn]));
        }
    }

    void lay_out() {
        lane_height_ = lanes_.size() <= 12 ? 20 : lanes_.size() <= 28 ? 13 : 9;
        double y = top_;
        for (std::size_t i = 0; i < lanes_.size(); ++i) {
            if (i > 0 && lanes_[i].where != lanes_[i - 1].where) y += 8;
            lanes_[i].y = y;
            y += lane_height_ + 3;
        }
        lanes_bottom_ = y;
        axis_ = y + 2 + (curve_height_ + curve_gap_) * double(data_.curves.size());
        height_ = axis_ + 34;
    }
    double curve_top(std::size_t i) const {
        return lanes_bottom_ + curve_gap_ + (curve_height_ + curve_gap_) * double(i) - 2;
    }

    double x(double t) const { return left_ + (std::clamp(t, from_, to_) - from_) * scale_; }

    void text(const char* cls, double at, double y, std::string_view words) {
        out_ += "<text class=\"";
        out_ += cls;
        out_ += "\" x=\"" + coordinate(at) + "\" y=\"" + coordinate(y) + "\">";
        append_xml(out_, words);
        out_ += "</text>\n";
    }
    void rect(const char* cls, double at, double y, double w, double h) {
        out_ += "<rect class=\"";
        out_ += cls;
        out_ += "\" x=\"" + coordinate(at) + "\" y=\"" + coordinate(y) + "\" width=\"" + coordinate(w) +
                "\" height=\"" + coordinate(h) + "\"/>\n";
    }

    void draw_legend() {
        double at = 14;
        const auto entry = [&](const char* cls, const std::string& words) {
            rect(cls, at, legend_ - 10, 12, 12);
            text("words", at + 17, legend_, words);
            at += 17 + 6.4 * double(words.size()) + 18;
        };
        for (int s = 0; s < stage_count; ++s) {
            if (workers_[s] == 0) continue;
            std::string words = name_of(static_cast<stage>(s));
            if (drawn_[s] < workers_[s])
                words += " (" + std::to_string(drawn_[s]) + " of " + std::to_string(workers_[s]) + " workers)";
            entry(name_of(static_cast<stage>(s)), words);
        }
        if (std::ranges::any_of(data_.spans, &timeline_span::spare)) entry("spare", "spare work");
        if (!data_.gates.empty()) entry("gate", opd::sched::gate_name);
        if (!data_.holds.empty()) entry("hold", std::string("learner ") + opd::sched::hold_name);
        if (!data_.faults.empty()) {
            cross(at + 6, legend_ - 4, 5);
            text("words", at + 17, legend_, opd::sched::fault_name);
        }
        text("small end", options_.width - 10, top_ - 6, "busy");
    }

    void draw_axis() {
        struct unit {
            double seconds;
            const char* name;
        };
        const double range = to_ - from_;
        const unit u = range < 2e-3       ? unit{1e-6, "\xc2\xb5s"}
                       : range < 2        ? unit{1e-3, "ms"}
                       : range < 600      ? unit{1, "s"}
                       : range < 5 * 3600 ? unit{60, "min"}
                                          : unit{3600, "h"};
        const double wanted = std::max(2.0, (options_.width - left_ - right_) / 95);
        const double rough = range / u.seconds / wanted, magnitude = std::pow(10.0, std::floor(std::log10(rough)));
        const double step = magnitude * (rough <= magnitude       ? 1
                                         : rough <= 2 * magnitude ? 2
                                         : rough <= 5 * magnitude ? 5
                                                                  : 10);
        const int decimals = std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9)));
        // relative to the window's begin: a steady clock's zero means nothing
        for (int i = 0; i * step * u.seconds <= range * (1 + 1e-9); ++i) {
            const double at = x(from_ + i * step * u.seconds);
            out_ += "<line class=\"grid\" x1=\"" + coordinate(at) + "\" x2=\"" + coordinate(at) + "\" y1=\"" +
                    coordinate(top_ - 4) + "\" y2=\"" + coordinate(axis_ + 4) + "\"/>\n";
            text("small mid", at, axis_ + 16, coordinate(i * step, decimals));
        }
        text("small", options_.width - right_ + 10, axis_ + 16, u.name);
    }

    void draw_bands(const std::vector<timeline_band>& bands, const char* cls) {
        intervals list;
        for (const timeline_band& b : bands)
            if (b.end >= from_ && b.begin <= to_) list.push_back({x(b.begin), x(b.end)});
        if (list.empty()) return;
        boxes(cls, joined(std::move(list)), top_ - 4, lanes_bottom_ - top_ + 4);
    }

    /// In pixels, ascending. A gap narrower than a hair is closed, unless both sides are wide enough for a seam to be
    /// seen.
    static intervals joined(intervals list) {
        std::sort(list.begin(), list.end());
        intervals out;
        for (auto [begin, end] : list) {
            end = std::max(end, begin + hair_);
            if (!out.empty() && begin < out.back().second + hair_) {
                auto& last = out.back();
                const bool seam = begin >= last.second - 1e-9 && last.second - last.first > 3 && end - begin > 3;
                if (!seam) {
                    last.second = std::max(last.second, end);
                    continue;
                }
                last.second -= 0.7;
            }
            out.push_back({begin, end});
        }
        return out;
    }
    /// As one stroke of the height's width: half the text of as many rectangles.
    void boxes(const char* cls, const intervals& list, double y, double h) {
        out_ += "<path class=\"";
        out_ += cls;
        out_ += "\" style=\"stroke-width:" + coordinate(h) + "\" d=\"";
        const std::string middle = " " + coordinate(y + h / 2) + "h";
        for (const auto& [begin, end] : list) out_ += "M" + coordinate(begin) + middle + coordinate(end - begin);
        out_ += "\"/>\n";
    }

    void draw_lane(const lane& l) {
        const bool tall = lane_height_ >= 12;
        const std::size_t index = std::size_t(&l - lanes_.data());
        const bool first = index == 0 || lanes_[index - 1].where != l.where;
        rect("lane", left_, l.y, options_.width - left_ - right_, lane_height_);
        const double baseline = l.y + lane_height_ / 2 + (tall ? 4 : 3);
        const std::string name = std::string(name_of(l.where)).append(" ").append(std::to_string(l.worker));
        if (tall || first) text(tall ? "end" : "small end", left_ - 8, baseline, name);

        intervals times, pixels, spare;
        for (const timeline_span* s : l.spans) {
            if (!s->spare) times.push_back({std::max(s->begin, from_), std::min(s->end, to_)});
            (s->spare ? spare : pixels).push_back({x(s->begin), x(s->end)});
        }
        double busy = 0;
        for (const auto& [begin, end] : merged(std::move(times))) busy += end - begin;
        if (tall || first)
            text("small end", options_.width - 10, baseline, coordinate(100 * busy / (to_ - from_), 0) + " %");
        if (!spare.empty()) boxes("spare", joined(std::move(spare)), l.y, lane_height_);
        if (pixels.empty()) return;
        boxes(name_of(l.where), joined(std::move(pixels)), l.y, lane_height_);
        if (!options_.labels || !tall) return;
        for (const timeline_span* s : l.spans) {
            const double w = x(s->end) - x(s->begin);
            if (s->label.empty() || s->spare || labels_ >= 400 || w < 5.8 * double(s->label.size()) + 6) continue;
            ++labels_;
            text("in", (x(s->begin) + x(s->end)) / 2, l.y + lane_height_ / 2 + 3.5, s->label);
        }
    }

    void cross(double at, double y, double r) {
        const std::string a = coordinate(2 * r);
        out_ += "<path class=\"fault\" d=\"M" + coordinate(at - r) + " " + coordinate(y - r) + "l" + a + " " + a +
                "m0 -" + a + "l-" + a + " " + a + "\"/>\n";
    }
    void draw_faults() {
        for (const timeline_mark& f : data_.faults)
            for (const lane& l : lanes_)
                if (l.where == f.where && l.worker == f.worker && f.t >= from_ && f.t <= to_)
                    cross(x(f.t), l.y + lane_height_ / 2, std::min(5.0, lane_height_ / 2 - 1));
    }

    /// Means over two pixels each: a curve of any length is a few hundred points.
    void draw_curve(const timeline_curve& c, double top) {
        const std::size_t bins = static_cast<std::size_t>((options_.width - left_ - right_) / 2);
        std::vector<double> area(bins, 0);
        const double width = (to_ - from_) / double(bins);
        for (std::size_t i = 0; i < c.points.size(); ++i) {
            const auto& [begin, level] = c.points[i];
            if (!std::isfinite(begin) || !std::isfinite(level))
                throw opd::invalid_input("curves", "a point is finite", opd::index_t(i));
            double t = std::max(begin, from_);
            const double end = std::min(i + 1 < c.points.size() ? c.points[i + 1].first : to_, to_);
            if (end <= t) continue;
            const auto at = [&](double s) { return std::min(static_cast<std::size_t>((s - from_) / width), bins - 1); };
            const std::size_t a = at(t), b = at(end);
            for (std::size_t k = a; k <= b; ++k) {
                const double l = k == a ? t : from_ + double(k) * width,
                             r = k == b ? end : from_ + double(k + 1) * width;
                area[k] += level * std::max(0.0, r - l) / width;
            }
        }
        const double top_level = std::max(1e-300, *std::max_element(area.begin(), area.end()));
        rect("lane", left_, top, options_.width - left_ - right_, curve_height_);
        text("end", left_ - 8, top + curve_height_ / 2 + 4, c.name);
        text("small end", options_.width - 10, top + 9, coordinate(top_level, top_level < 10 ? 1 : 0));
        text("small end", options_.width - 10, top + curve_height_, "0");
        const double floor = top + curve_height_, pixel = (options_.width - left_ - right_) / double(bins);
        std::string path = "M" + coordinate(left_) + " " + coordinate(floor);
        double drawn = -1;
        for (std::size_t k = 0; k < bins; ++k) {
            const double y = floor - (curve_height_ - 2) * std::max(0.0, area[k]) / top_level;
            if (std::abs(y - drawn) < 0.05) continue;
            drawn = y;
            path += (k == 0 ? "L" : "H") + coordinate(left_ + double(k) * pixel, 1) + (k == 0 ? " " : "V") +
                    coordinate(y, 1);
        }
        path += "H" + coordinate(options_.width - right_) + "V" + coordinate(floor) + "z";
        out_ += "<path class=\"curve\" d=\"" + path + "\"/>\n";
    }

    const timeline& data_;
    const timeline_options& options_;
    double from_ = 0, to_ = 0, scale_ = 1;
    double lane_height_ = 20, lanes_bottom_ = 0, axis_ = 0, height_ = 0;
    std::size_t workers_[stage_count] = {}, drawn_[stage_count] = {}, labels_ = 0;
    std::vector<lane> lanes_;
    std::string out_;
};

} // namespace detail

/// The picture as SVG text.
inline std::string timeline_svg(const timeline& data, const timeline_options& options = {}) {
    return detail::timeline_painter(data, options).draw();
}

} // namespace examples
