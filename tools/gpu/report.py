# SPDX-License-Identifier: Apache-2.0
"""Parts of a check: each has a budget of time, ends in one line, and leaves numbers for the table."""
import json
import os
import signal
import subprocess
import time


class Report:
    """What was run and measured. A part that fails does not stop the others."""

    def __init__(self, limit, folder):
        self.start, self.limit, self.folder = time.monotonic(), limit, folder
        self.machine, self.parts, self.numbers = {}, [], []

    def elapsed(self):
        return time.monotonic() - self.start

    def say(self, text):
        print("[%5.1f s] %s" % (self.elapsed(), text), flush=True)

    def add(self, what, value, unit, compared_with=None, reference=None):
        """One number; `reference`, in the same unit, is what it is compared with."""
        self.numbers.append({"what": what, "value": value, "unit": unit, "compared_with": compared_with,
                             "reference": reference, "ratio": value / reference if reference else None})

    def end(self, name, state, seconds, detail=""):
        self.parts.append({"part": name, "state": state, "seconds": seconds, "detail": detail})
        self.say("%-28s %-8s %6.1f s  %s" % (name, state, seconds, detail))
        return state == "passed"

    def skip(self, name, why):
        self.end(name, "skipped", 0.0, why)

    def run(self, name, command, budget, env=None, cwd=None, summary=None, quiet=False):
        """Runs a command for at most `budget` seconds and what is left of all. Its whole output is in a log;
        gives its standard output, or None where it failed. summary(output) is what its line says. A quiet
        failure is no failed part: the caller has another way."""
        budget = min(budget, self.limit - self.elapsed())
        if budget < 1:
            self.skip(name, "no time is left of %d s" % self.limit)
            return None
        os.makedirs(self.folder, exist_ok=True)
        path = os.path.join(self.folder, "".join(c if c.isalnum() else "-" for c in name))
        began, said = time.monotonic(), time.monotonic()
        with open(path + ".out", "w") as out, open(path + ".err", "w") as err:
            try:
                process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env,
                                           cwd=cwd, start_new_session=True)
            except OSError as error:
                self.end(name, "failed", 0.0, str(error))
                return None
            late = False
            try:
                while process.poll() is None:
                    time.sleep(0.05)
                    if time.monotonic() - began > budget:
                        late = True
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                    elif time.monotonic() - said > 15:
                        said = time.monotonic()
                        self.say("  %s: %s" % (name, last_line(path + ".out")[:90]))
            except BaseException:  # interrupted: leave nothing running
                os.killpg(process.pid, signal.SIGKILL)
                raise
        seconds = time.monotonic() - began
        with open(path + ".out", errors="replace") as out:
            text = out.read()
        if late or process.returncode != 0:
            why = "stopped after %.0f s" % budget if late else "exit status %d" % process.returncode
            line = last_line(path + ".err") or last_line(path + ".out")
            if quiet:
                self.say("%s: %s: %s" % (name, why, line[:160]))
            else:
                self.end(name, "failed", seconds, "%s: %s; see %s.out and .err" % (why, line[:160], path))
            return None
        try:
            detail = summary(text) if summary else ""
        except (ValueError, KeyError, IndexError, OSError) as error:
            self.end(name, "failed", seconds, "its output is not what was expected (%r); see %s.out" % (error, path))
            return None
        self.end(name, "passed", seconds, detail)
        return text

    def failed(self):
        return [part["part"] for part in self.parts if part["state"] == "failed"]

    def write(self, path):
        with open(path, "w") as file:
            json.dump({"machine": self.machine, "seconds": self.elapsed(), "parts": self.parts,
                       "numbers": self.numbers}, file, indent=1)
            file.write("\n")

    def table(self):
        lines = ["", "%-58s %12s %-9s %8s  %s" % ("", "measured", "", "ratio", "compared with")]
        for number in self.numbers:
            compared = ""
            if number["reference"]:
                compared = "%s: %s" % (number["compared_with"], shown(number["reference"]))
            ratio = "%.3f" % number["ratio"] if number["ratio"] else ""
            lines.append("%-58s %12s %-9s %8s  %s" % (number["what"], shown(number["value"]), number["unit"],
                                                    ratio, compared))
        failed = self.failed()
        lines += ["", "%d parts passed, %d failed%s, %d skipped, %.0f s" % (
            sum(part["state"] == "passed" for part in self.parts), len(failed),
            " (" + ", ".join(failed) + ")" if failed else "",
            sum(part["state"] == "skipped" for part in self.parts), self.elapsed())]
        return "\n".join(lines)


def shown(value):
    return "%.0f" % value if value >= 1000 else "%.3g" % value


def last_line(path):
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
