"""The resident memory of this process."""

from pathlib import Path


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident, in bytes.

    ``getrusage`` would not do: what it reports survives ``exec``, so a child of a large process begins with the
    peak of its parent.
    """
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
    )
