"""Makes pictures small enough for a repository: with 256 colours, chosen so that rare ones stay, such as a red word.

python -m tests.service.ui.small_pictures PICTURE...
"""

import sys
from pathlib import Path

from PIL import Image

COLOURS = 256


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True)


if __name__ == "__main__":
    main()
