"""What this process has of memory, as tests of hosts measure it."""

import contextlib
import gc


def used():
    """KiB of this process, and its part of what ranks share; not of files, which others may map or not."""
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@contextlib.contextmanager
def measured():
    """Gives a function for by how much memory has grown at most inside, in MiB."""

    def status(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))

    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, most = status("VmRSS"), []
    yield lambda: most[0]
    most.append(status("VmHWM") - before)
