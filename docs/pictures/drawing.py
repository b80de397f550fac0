"""The shapes of the documents' pictures, as SVG: boxes, arrows, bars and text on a white card.

A picture stands in pages of a light and a dark scheme alike, so it brings its own background. It
needs no font from elsewhere. Coordinates are pixels from the top left corner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
CHARACTER_WIDTH = 0.53
"""The width of an average character, as a share of the size of the font."""

Color = Literal["grey", "blue", "purple", "green", "yellow", "red", "white"]

FILLS: dict[Color, str] = {
    "grey": "#f6f8fa",
    "blue": "#ddf4ff",
    "purple": "#fbefff",
    "green": "#dafbe1",
    "yellow": "#fff8c5",
    "red": "#ffebe9",
    "white": "#ffffff",
}
LINES: dict[Color, str] = {
    "grey": "#818b98",
    "blue": "#0969da",
    "purple": "#8250df",
    "green": "#1a7f37",
    "yellow": "#9a6700",
    "red": "#cf222e",
    "white": "#d1d9e0",
}
INK = "#1f2328"
MUTED = "#59636e"
DASHES = "5 4"


class TextTooWide(ValueError):
    """Raised when a text is wider than the shape that it stands in."""


@dataclass(frozen=True)
class Box:
    """The place of a shape: its top left corner, and its size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The position of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The position of the lower edge."""
        return self.y + self.height

    @property
    def middle_x(self) -> float:
        """The position of the middle between the left and the right edge."""
        return self.x + self.width / 2

    @property
    def middle_y(self) -> float:
        """The position of the middle between the upper and the lower edge."""
        return self.y + self.height / 2


class Picture:
    """An SVG picture of a fixed size. Its title and description are for screen readers."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self.title = title
        self.width = width
        self.height = height
        self.root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width} {height}",
                "width": str(width),
                "height": str(height),
                "role": "img",
                "aria-labelledby": "title text",
                "font-family": FONT,
            },
        )
        self._add("title", title, id="title")
        self._add("desc", description, id="text")
        definitions = self._add("defs")
        for name, line in LINES.items():
            definitions.append(_arrow_head(name, line))
        card = Box(0.5, 0.5, width - 1, height - 1)
        self._rectangle(card, FILLS["white"], LINES["white"], radius=10)

    def _add(self, tag: str, content: str = "", /, **attributes: str | float) -> ET.Element:
        """Add an element. An underscore in an attribute's name stands for a hyphen."""
        element = ET.SubElement(self.root, tag, _to_attributes(attributes))
        element.text = content or None
        return element

    def _rectangle(
        self, place: Box, fill: str, line: str, *, radius: float = 0, thick: float = 1
    ) -> ET.Element:
        return self._add(
            "rect",
            x=place.x,
            y=place.y,
            width=place.width,
            height=place.height,
            rx=radius,
            fill=fill,
            stroke=line,
            stroke_width=thick,
        )

    def box(
        self,
        place: Box,
        *lines: str,
        color: Color = "grey",
        size: float = 14,
        dashed: bool = False,
        radius: float = 6,
    ) -> Box:
        """Draw a box with lines of text in its middle. The first line is bold if there are more.

        Raises:
            TextTooWide: a line does not fit.
        """
        drawn = self._rectangle(place, FILLS[color], LINES[color], radius=radius, thick=1.5)
        if dashed:
            drawn.set("stroke-dasharray", DASHES)
        step = size * 1.35
        top = place.middle_y - step * (len(lines) - 1) / 2 + size * 0.35
        for number, line in enumerate(lines):
            check_fits(line, size, place.width - 8)
            self._add(
                "text",
                line,
                x=place.middle_x,
                y=round(top + number * step, 2),
                font_size=size,
                fill=INK,
                text_anchor="middle",
                font_weight=600 if number == 0 and len(lines) > 1 else 400,
            )
        return place

    def bar(self, place: Box, *, filled: bool) -> None:
        """Draw a bar of a chart: dark if it is filled, otherwise an outline."""
        fill = LINES["blue"] if filled else FILLS["white"]
        self._rectangle(place, fill, LINES["blue"] if filled else INK, thick=1.3)

    def text(
        self,
        x: float,
        y: float,
        line: str,
        *,
        size: float = 13,
        bold: bool = False,
        muted: bool = False,
        anchor: Literal["start", "middle", "end"] = "start",
        color: Color | None = None,
    ) -> None:
        """Write one line of text outside of boxes. `y` is its baseline. Lines behind it are hidden.

        Raises:
            TextTooWide: the text leaves the picture.
        """
        wide = width_of(line, size)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
        if left < 0 or left + wide > self.width:
            raise TextTooWide(f"{line!r} leaves the picture {self.title!r}")
        self._add(
            "text",
            line,
            x=x,
            y=y,
            font_size=size,
            fill=LINES[color] if color else MUTED if muted else INK,
            text_anchor=anchor,
            font_weight=600 if bold else 400,
            stroke="#ffffff",
            stroke_width=5,
            paint_order="stroke",
        )

    def arrow(
        self,
        *points: tuple[float, float],
        color: Color = "grey",
        dashed: bool = False,
        head: bool = True,
    ) -> None:
        """Draw a line through the points, with a head at the last one unless `head` is false."""
        drawn = self._add(
            "path",
            d="M" + " L".join(f"{x:g} {y:g}" for x, y in points),
            fill="none",
            stroke=LINES[color],
            stroke_width=1.8,
        )
        if dashed:
            drawn.set("stroke-dasharray", DASHES)
        if head:
            drawn.set("marker-end", f"url(#head-{color})")

    def step(self, x: float, y: float, number: int) -> None:
        """Draw the number of a step in a filled circle."""
        self._add("circle", cx=x, cy=y, r=10, fill=LINES["blue"])
        self._add(
            "text",
            str(number),
            x=x,
            y=y + 4.5,
            font_size=12.5,
            font_weight=700,
            fill="#ffffff",
            text_anchor="middle",
        )

    def rows(self, x: float, y: float, *colors: Color) -> None:
        """Draw rows that travel, as small squares. A red one is a barrier, drawn as a bar."""
        for number, color in enumerate(colors):
            left = x + number * 13
            if color == "red":
                self._rectangle(Box(left + 2, y - 11, 5, 22), LINES["red"], LINES["red"])
            else:
                square = Box(left, y - 4.5, 9, 9)
                self._rectangle(square, FILLS[color], LINES[color], radius=1.5, thick=1.3)

    def svg(self) -> str:
        """Return the picture as the text of a file."""
        ET.indent(self.root)
        return ET.tostring(self.root, encoding="unicode") + "\n"


def _to_attributes(attributes: Mapping[str, str | float]) -> dict[str, str]:
    return {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:g}"
        for name, value in attributes.items()
    }


def _arrow_head(name: str, line: str) -> ET.Element:
    marker = ET.Element(
        "marker",
        {
            "id": f"head-{name}",
            "viewBox": "0 0 10 10",
            "refX": "9",
            "refY": "5",
            "markerWidth": "7",
            "markerHeight": "7",
            "orient": "auto-start-reverse",
        },
    )
    ET.SubElement(marker, "path", {"d": "M0 0 L10 5 L0 10 z", "fill": line})
    return marker


def width_of(line: str, size: float) -> float:
    """Return the approximate width of a text in pixels."""
    return len(line) * size * CHARACTER_WIDTH


def check_fits(line: str, size: float, width: float) -> None:
    """Refuse a text that is wider than its place.

    Raises:
        TextTooWide: the text does not fit.
    """
    needed = width_of(line, size)
    if needed > width:
        raise TextTooWide(
            f"{line!r} needs {needed:.0f} pixels, and has {width:.0f}: shorten it or widen its box"
        )
