"""Makes pictures small enough for a repository: as many colours as their texts and colours need.

python -m tests.service.ui.small_pictures PICTURE...
"""

import sys
from pathlib import Path

from PIL import Image

COLOURS = 96


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        small.save(path, optimize=True)


if __name__ == "__main__":
    main()
