"""A process that runs the stages of one snapshot and kills itself, for good, at a given moment.

`python -m tests.stages.killing SOURCE ROOT LABELS SNAPSHOT [setting=value ...]` runs a snapshot's stages; with
SNAPSHOT,SNAPSHOT,... the corpus of what is embedded, and these snapshots' masks. It reads one order per line: a number
(SIGKILL at that file event under ROOT), or text (SIGKILL at the first rename onto a path that holds it), or nothing
(run to the end). Each order runs in a fork of a process that has only imported, and is answered by its exit code and
the number of file events it saw. Real code and a real signal: nothing of the package is replaced.
"""

import os
import signal
import sys
from pathlib import Path

from tests.project import SNAPSHOT_STAGES, Project, settings_for

# what a process does to files, as the interpreter's audit hook tells it
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def run(order: str, project: Project, snapshot: str, seen: int) -> None:
    root = str(project.store.root)
    events = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal events
        if event not in _EVENTS or not any(isinstance(a, (str, os.PathLike)) and str(a).startswith(root) for a in args):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        events += 1
        onto = str(args[1]) if event == "os.rename" else ""
        if (order.isdigit() and events == int(order)) or (order and not order.isdigit() and order in onto):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if "," in snapshot:
        project.stage("corpus_selection_state", "")
    for one in snapshot.split(","):
        for name in ("datamask_masks",) if "," in snapshot else SNAPSHOT_STAGES:
            project.stage(name, one)
    os.write(seen, str(events).encode())


def main() -> None:
    source, root, labels, snapshot, *overrides = sys.argv[1:]
    project = Project(settings_for(Path(source), Path(root), Path(labels), *overrides))
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(line.strip(), project, snapshot, writer)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), os.read(reader, 20).decode() or "-", flush=True)
        os.close(reader)


if __name__ == "__main__":
    main()
