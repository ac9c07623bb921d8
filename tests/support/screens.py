"""What a user sees of a stream of text."""


def as_a_notebook_shows(text: str) -> list[str]:
    """Text after a carriage return lies over what was there, as it does in Jupyter's output."""

    def overlaid(line: str) -> str:
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        return shown.rstrip()

    return [overlaid(line) for line in text.split("\n")]
