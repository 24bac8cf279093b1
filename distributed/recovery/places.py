"""Who of the ranks that there are trains, and who waits as a spare."""

from __future__ import annotations

from collections.abc import Callable

from distributed.comm.communicator import Communicator


def deal(world: Communicator, place: int | None, most: int, usable: Callable[[int], int] | None) -> Communicator | None:
    """Choose who trains: whoever did keeps its place, the others fill the gaps. Collective.

    Args:
        place: of this rank among those that trained last; None if it did not.
        most: ranks that may train.
        usable: how many of so many ranks the layout has a place for; None for all.
    Returns:
        The communicator of those that train, in the order of their places; None on a rank that does not.
    """
    if usable is None and most >= world.size:
        return world
    places: list[int | None] = world.gather_objects(place)
    num_places = min(most, world.size)
    if usable is not None:
        num_places = usable(num_places)
    if not 1 <= num_places <= world.size:
        raise ValueError(f"{num_places} of {world.size} ranks would train, it must be at least 1 and at most all")
    free = [number for number in range(num_places) if number not in places]
    dealt = []
    for old in places:
        keeps = old is not None and old < num_places
        dealt.append(old if keeps else free.pop(0) if free else None)
    mine = dealt[world.rank]
    part = world.split(int(mine is None), world.rank if mine is None else mine)
    return None if mine is None else part
