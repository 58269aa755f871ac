"""Draw the pictures of the README from a run of ``fedleak demo``: its terminal and its report.

::

    python tools/readme_pictures.py   # docs/demo.svg, report.png, report_phone.png; needs Chromium

Takes as long as the demo. The terminal is drawn as text, in the reader's own fixed-width font.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from lightning_fedleak.cli.commands import demo
from lightning_fedleak.cli.commands.options import parse

COMMAND = "fedleak demo"
COLUMNS = 96  # of the terminal, wide enough for the demo's table
PAGE = (1000, 760)  # pixels of the report that are shown: its verdict, and the first pictures
PHONE = (390, 844)  # the same of a phone; a window of Chromium has no fewer than 500, a frame has
MOST_BYTES = 150_000  # of a picture, so that the README loads at once
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def draw_terminal(console: Console) -> str:
    """Return what a console has recorded as SVG, without fonts from other hosts.

    It is printed once more, so that long lines are folded as in a terminal, and programs are named
    without the place where they are installed here.
    """
    text = re.sub(r"\S+/tensorboard ", "tensorboard ", console.export_text(styles=True))
    terminal = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    terminal.print(Text.from_ansi(text), overflow="fold")
    picture = terminal.export_svg(title=COMMAND, theme=DIMMED_MONOKAI, unique_id="demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def draw_page(page: Path, picture: Path, folder: Path, size: tuple[int, int], dark: bool) -> None:
    """Write the first screen of a page of HTML as PNG.

    Args:
        page: the report.
        picture: file that is written.
        folder: for what Chromium keeps.
        size: width and height, in pixels.
        dark: the reader prefers dark pages.

    Raises:
        FileNotFoundError: Chromium is not on the PATH.
    """
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(CHROMIUM)} is on the PATH")
    frame = folder.with_suffix(".html")
    frame.write_text(
        f"<body style='margin:0'><iframe src='{page.resolve().as_uri()}' width={size[0]} "
        f"height={size[1]} style='border:0'></iframe>"
    )
    subprocess.run(
        [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(f"--screenshot={picture.resolve()}", frame.resolve().as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def main() -> None:
    """Run the demo and write its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"), help="default: docs")
    out = parser.parse_args().out.resolve()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the demo names its files as they are seen from here
        demo.run(parse(COMMAND.split()[1:]), console)
        [page] = Path(folder).rglob("report.html")
        (out / "demo.svg").write_text(draw_terminal(console), encoding="utf-8")
        profile = Path(folder) / "chromium"
        draw_page(page, out / "report.png", profile, PAGE, dark=False)
        draw_page(page, out / "report_phone.png", profile, PHONE, dark=True)
    for name in ("demo.svg", "report.png", "report_phone.png"):
        size = (out / name).stat().st_size
        print(f"{name}: {size:,} bytes{' (too large)' if size > MOST_BYTES else ''}")


if __name__ == "__main__":
    main()
