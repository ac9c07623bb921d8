"""Cut the steps of a job into files of about the same size, at the borders of steps."""

from dataclasses import dataclass


def num_files(total_bytes: int, file_bytes: int, steps: int) -> int:
    """How many files hold so many bytes, about `file_bytes` each; none has less than a step."""
    return max(1, min(steps, -(-total_bytes // file_bytes)))


@dataclass(frozen=True)
class FileCut:
    """The steps `0 .. steps - 1` in `files` files: consecutive, and as evenly as possible.

    >>> [FileCut(3, 8).steps_of(number) for number in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """

    files: int
    steps: int

    def steps_of(self, number: int) -> range:
        """The steps of a file."""
        return range(self.steps * number // self.files, self.steps * (number + 1) // self.files)

    def number_of(self, step: int) -> int:
        """The file that holds a step."""
        return ((step + 1) * self.files - 1) // self.steps

    def name(self, number: int) -> str:
        """The name of a file; the names sort as the files do."""
        width = max(5, len(str(self.files)))
        return f"{number:0{width}}-of-{self.files:0{width}}.parquet"

    def most_ahead(self, num_mergers: int) -> int:
        """By how many steps a worker's loop may be ahead of what its worker has merged, of the files that it merges.

        They are those of one file for each merging worker: fewer would leave some without anything to merge.
        """
        return max(1, num_mergers * self.steps // self.files)

    def enough_room(self, num_mergers: int) -> int:
        """How far the merging comes near before a loop that has waited goes on: half a file more."""
        return self.most_ahead(num_mergers) - self.steps // self.files // 2
