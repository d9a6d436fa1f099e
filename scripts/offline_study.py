#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What scripts/offline_study.sh has run, as tables (Markdown on the terminal, CSV in the directory) and plots (SVG, by
gnuplot).

    scripts/offline_study.py runs/offline --tasks gcd grammar --seeds 1
"""
import argparse
import csv
import json
import math
import pathlib
import re
import statistics
import subprocess

CELLS = [("A", "A"), ("B", "B"), ("A", "B"), ("B", "A")]  # SFT teacher, scoring teacher


def mean(values):
    return statistics.fmean(values)


def error(values):  # standard, of the mean
    known = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) / math.sqrt(len(values)) if known else float("nan")


def with_error(values, digits, factor=1):
    text = f"{factor * mean(values):.{digits}f}"
    return text if math.isnan(error(values)) else f"{text} ± {factor * error(values):.{digits}f}"


def mean_and_error(text):  # for gnuplot: no bar where one run has no error
    return (text.split(" ± ") + ["0"])[:2]


class Study:
    def __init__(self, directory, tasks, seeds):
        self.directory, self.tasks, self.seeds = directory, tasks, seeds

    def report(self, name):
        return json.loads((self.directory / name / "report.json").read_text())

    def cell(self, task, pair, kind, estimator="lightning"):
        return [self.report(f"{task}-{''.join(pair)}-{seed}-{estimator}-{kind}") for seed in self.seeds]

    def set_log(self, task, pair):
        return [(self.directory / f"{task}-{''.join(pair)}-{seed}-set.log").read_text() for seed in self.seeds]

    def steps(self, task, pair, seed):
        lines = map(json.loads, (self.directory / f"{task}-{''.join(pair)}-{seed}-lightning-offline" / "log.jsonl").open())
        return [line for line in lines if line.get("stage") == "distill" and "drift" in line]


def kl(report, when):  # grammar: the mean along both kinds of prefixes; gcd: along the student's own
    return report.get("held_out_kl", report["kl_to_teacher"])[when]


def right(report, when):  # share of drawn answers
    return report["sampled_accuracy"][when]


def closed(report, of):
    if of == "KL":
        return 1 - kl(report, "after") / kl(report, "before")
    accuracy = report[of]
    gap = accuracy["teacher"] - accuracy["before"]
    return (accuracy["after"] - accuracy["before"]) / gap if gap > 0 else float("nan")


def share(offline, online):  # of means, and its standard error over pairs
    ratio = mean(offline) / mean(online)
    return ratio, error([a - ratio * b for a, b in zip(offline, online)]) / mean(online)


def twins(study):
    rows = []
    for task in study.tasks:
        for estimator in ("lightning", "tail_bucket"):
            reports = {kind: [r for pair in CELLS[:2] for r in study.cell(task, pair, kind, estimator)]
                       for kind in ("online", "offline")}
            drift = [r["schedule"]["offline"]["drift"] for r in reports["offline"]]
            row = {"task": task, "estimator": estimator, "runs": len(drift)}
            for name, kind, when in (("before", "online", "before"), ("online", "online", "after"),
                                     ("offline", "offline", "after")):
                row[f"KL {name}"] = f"{mean([kl(r, when) for r in reports[kind]]):.4f}"
            for of in ("KL", "sampled_accuracy"):
                gap = {kind: [closed(r, of) for r in reports[kind]] for kind in reports}
                kept, kept_error = share(gap["offline"], gap["online"])
                name = "KL" if of == "KL" else "right answers"
                for kind, values in gap.items():
                    row[f"closed of {name}, {kind}"] = with_error(values, 3)
                row[f"offline / online, {name}"] = f"{kept:.2f} ± {kept_error:.2f}"
            row |= {"mean w": f"{mean([d['ratio_mean'] for d in drift]):.3f}",
                    "deviation of w": f"{mean([d['ratio_deviation'] for d in drift]):.2f}",
                    "chi-squared": f"{mean([d['chi_squared'] for d in drift]):.2f}",
                    "effective share": f"{mean([d['effective_share'] for d in drift]):.2f}",
                    "deviation of log W": f"{mean([d['log_ratio_deviation'] for d in drift]):.1f}"}
            rows.append(row)
    return rows


def consistency(study):
    rows = []
    for task in study.tasks:
        for sft, scorer in sorted(CELLS):
            both = {kind: study.cell(task, (sft, scorer), kind) for kind in ("online", "offline")}
            apart = [re.search(r"differ by ([\d.]+) nats.*sigma_Delta is ([\d.e+]+) nats", log)
                     for log in study.set_log(task, (sft, scorer))]
            row = {"task": task, "SFT teacher": sft, "scoring teacher": scorer,
                   "teacher": f"{100 * right(both['online'][0], 'teacher'):.1f}",
                   "SFT": f"{100 * right(both['online'][0], 'before'):.1f}"}
            for kind, reports in both.items():
                row[kind] = with_error([right(r, "after") for r in reports], 1, 100)
            row["KL before"] = f"{mean([kl(r, 'before') for r in both['online']]):.3f}"
            for kind, reports in both.items():
                row[f"KL {kind}"] = f"{mean([kl(r, 'after') for r in reports]):.3f}"
            row["mean abs(Delta)"] = f"{mean([float(m[1]) for m in apart if m]):.3f}" if any(apart) else "0"
            row["sigma_Delta"] = f"{mean([float(m[2]) for m in apart if m]):.1f}" if any(apart) else "0"
            rows.append(row)
    return rows


def cost(study):
    rows = []
    for task in study.tasks:
        seconds = {}
        sft = [study.report(f"{task}-{pair[0]}")["seconds"]["student_warmup"] for pair in CELLS[:2]]
        logs = [log for pair in CELLS[:2] for log in study.set_log(task, pair)]
        written = [sum(map(float, re.search(r"call: ([\d.]+) s of rollout, ([\d.]+) s of scoring", log).groups()))
                   for log in logs]
        for kind in ("online", "offline"):
            spent = [r["seconds"] for pair in CELLS[:2] for r in study.cell(task, pair, kind)]
            rolled = [s["rollout"] + s["teacher_scoring"] for s in spent] if kind == "online" else written
            seconds[kind] = {"SFT": mean(sft), "rollout and scoring": mean(rolled),
                             "learning": mean([s["learner"] for s in spent])}
        for kind, of in seconds.items():
            total = sum(of.values())
            rows.append({"task": task, "run": kind,
                         **{name: f"{s:.1f} s, {100 * s / total:.0f} %" for name, s in of.items()},
                         "total": f"{total:.1f} s",
                         "after SFT": f"{total - of['SFT']:.1f} s",
                         "with a teacher at hand": f"{total if kind == 'online' else total - of['learning']:.1f} s"})
    return rows


def table(title, rows, path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")


def gnuplot(directory, name, size, script):
    path = directory / f"{name}.gnuplot"
    path.write_text(f"set terminal svg size {size} font 'sans,12' background '#ffffff'\nset output '{name}.svg'\n{script}")
    try:
        subprocess.run(["gnuplot", path.name], cwd=directory, check=True)
    except FileNotFoundError:
        print(f"gnuplot is not installed: no {name}.svg")


def plot_consistency(study, rows):
    panels = []
    for task in study.tasks:
        of = [row for row in rows if row["task"] == task]
        data = directory_data(study, f"consistency-{task}.dat", (
            " ".join([f"\"{row['SFT teacher']}, {row['scoring teacher']}\"", row["SFT"],
                      *mean_and_error(row["online"]), *mean_and_error(row["offline"]), row["teacher"]])
            for row in of))
        panels.append(
            f"set title '{task}'\nset ylabel 'right answers, %'\nset xlabel 'SFT teacher, scoring teacher'\n"
            f"plot '{data}' using 2:(0):xticlabels(1) title 'SFT' linecolor rgb '#bbbbbb', "
            "'' using 3:4 title 'online' linecolor rgb '#4477aa', '' using 5:6 title 'offline' linecolor rgb '#ee6677', "
            "'' using 7:(0) title 'scoring teacher' linecolor rgb '#eeeeee'\n")
    gnuplot(study.directory, "consistency", f"{460 * len(panels)},380",
            "set style data histograms\nset style histogram errorbars gap 1 linewidth 1\nset style fill solid 0.9\n"
            f"set key below\nset yrange [0:*]\nset multiplot layout 1,{len(panels)}\n"
            + "".join(panels))


def directory_data(study, name, lines):
    (study.directory / name).write_text("\n".join(lines) + "\n")
    return name


def plot_drift(study):
    panels = []
    for task in study.tasks:
        data = directory_data(study, f"drift-{task}.dat", (
            f"{line['step']} {line['drift']['ratio_mean']} {line['drift']['ratio_deviation']} "
            f"{line['drift']['log_ratio_deviation']}" for line in study.steps(task, ("A", "A"), study.seeds[0])))
        panels.append(f"set title '{task}: the offline student, on its next batch'\nset xlabel 'step'\n"
                      f"plot '{data}' using 1:2 title 'mean of w = p/pi_{{ref}}' linecolor rgb '#4477aa', "
                      "'' using 1:3 title 'deviation of w' linecolor rgb '#ee6677', "
                      "'' using 1:4 title 'deviation of log W (nats)' linecolor rgb '#228833'\n")
    gnuplot(study.directory, "drift", f"{460 * len(panels)},380",
            "set style data lines\nset key below\nset logscale y\nset yrange [0.05:60]\n"
            f"set multiplot layout 1,{len(panels)}\n" + "".join(panels))


def picture(study):
    """Who draws, who scores, who learns; and where two teachers can come in."""
    boxes = [(1.2, 3.4, "SFT teacher", "#ffeecc"), (1.2, 0.9, "student", "#ffffff"), (3.2, 1.9, "pi_{ref}", "#ddeeff"),
             (5.4, 3.4, "scoring teacher", "#ffeecc"), (5.8, 1.9, "data set", "#eeeeee"),
             (8.4, 1.9, "student p", "#ddeeff")]
    arrows = [((1.5, 3.1), (2.8, 2.2), "its answers", 2.65, 2.8), ((1.9, 1.2), (2.6, 1.6), "SFT", 2.45, 1.2),
              ((4.0, 1.9), (5.0, 1.9), "rollouts", 4.5, 2.1), ((5.5, 3.1), (5.7, 2.2), "log q, once", 6.2, 2.7),
              ((6.6, 1.9), (7.6, 1.9), "batches", 7.1, 2.1)]
    script = "unset border\nunset tics\nunset key\nset xrange [0:9.6]\nset yrange [0.2:4.2]\n"
    for n, (x, y, text, color) in enumerate(boxes, 1):
        script += (f"set object {n} rectangle center {x},{y} size 1.6,0.6 fillcolor rgb '{color}' fillstyle solid border "
                   f"rgb '#555555'\nset label {n} '{text}' at {x},{y} center front\n")
    for n, ((x, y), (to_x, to_y), text, at_x, at_y) in enumerate(arrows, 20):
        script += (f"set arrow {n} from {x},{y} to {to_x},{to_y} filled linecolor rgb '#555555'\n"
                   f"set label {n} '{text}' at {at_x},{at_y} center font 'sans,10'\n")
    script += ("set arrow 40 from 2.05,3.4 to 4.55,3.4 heads linecolor rgb '#cc3311' linewidth 2 dashtype 2\n"
               "set label 40 'one and the same model?' at 3.3,3.62 center textcolor rgb '#cc3311'\n"
               "set label 41 'learns from log q and its own log p:' at 8.0,1.3 center font 'sans,10'\n"
               "set label 42 'no teacher, no rollout' at 8.0,1.05 center font 'sans,10'\nplot NaN notitle\n")
    gnuplot(study.directory, "teacher-consistency", "840,340", script)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--tasks", nargs="+", default=["gcd", "grammar"])
    parser.add_argument("--seeds", nargs="+", default=["1"])
    options = parser.parse_args()
    study = Study(options.directory, options.tasks, options.seeds)
    table("Offline beside online, one teacher for SFT and scores (± standard error over runs)", twins(study),
          study.directory / "twins.csv")
    grid = consistency(study)
    table("SFT teacher x scoring teacher: right answers of the student, % of drawn ones", grid,
          study.directory / "consistency.csv")
    table("Seconds on one core", cost(study), study.directory / "cost.csv")
    plot_consistency(study, grid)
    plot_drift(study)
    picture(study)


if __name__ == "__main__":
    main()
