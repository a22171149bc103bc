"""Prints what TensorBoard reads in a folder of event files, by its own reader; gpt2/tests/events.rs compares it with what was written.

    python read_events.py FOLDER        (needs tensorboard)

One line a point, separated by tabs: tag, step, seconds since 1970, value.
"""

import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    # By default only a sample of the points is kept.
    events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for point in events.Scalars(tag):
            print(tag, point.step, repr(point.wall_time), repr(point.value), sep="\t")


if __name__ == "__main__":
    main()
