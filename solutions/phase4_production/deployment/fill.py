"""Fills a folder with the images of a tar archive, for the volume of a cluster.

    python fill.py https://storage.example.org/imagenet.tar /data/imagenet

The archive holds train/<class>/ and val/<class>/, and is unpacked while it arrives. A second run
does nothing once the folder is full; after a failure, it begins anew.
"""

import sys
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PARTS = ("train", "val")


def main(arguments: Sequence[str]) -> int:
    """Fill the folder; return 0, or 1 with a message if the archive lacks a part."""
    url, folder = arguments[0], Path(arguments[1])
    full = folder / ".full"
    if full.exists():
        print(f"{folder} is full already", file=sys.stderr)
        return 0
    with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=answer, mode="r|*") as archive:
        archive.extractall(folder, filter="data")  # refuses names outside of the folder
    if missing := [part for part in PARTS if not (folder / part).is_dir()]:
        print(f"{url} has no {' and no '.join(missing)}: pack train/ and val/", file=sys.stderr)
        return 1
    full.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
