"""Which job gets which die, and the sentence for one that waits."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rrd.placement import Candidate, DieFacts, place

GIB = 2**30


def box(n: int = 6, lanes: int = 1, **facts: object) -> list[DieFacts]:
    return [DieFacts(i, f"lane{i % lanes}", str(i), **facts) for i in range(n)]  # type: ignore[arg-type]


def jobs(*names: str) -> list[Candidate]:
    return [Candidate(name) for name in names]


def test_fewest_jobs_then_fewest_on_the_lane_then_lowest_index() -> None:
    dies = [DieFacts(0, "x", "0", jobs=1), DieFacts(1, "x", "1"), DieFacts(2, "y", "2"), DieFacts(3, "y", "3")]
    placed, waits = place(jobs("a", "b", "c", "d"), dies)
    assert placed == [("a", 2), ("b", 1), ("c", 3), ("d", 0)]
    assert not waits


def test_a_die_that_holds_the_same_base_is_preferred_among_equals() -> None:
    dies = [DieFacts(0, "x", "0", jobs=1), DieFacts(1, "x", "1", jobs=1, base_keys=frozenset({"smol"}))]
    assert place([Candidate("a", base_key="smol")], dies)[0] == [("a", 1)]
    placed, _ = place([Candidate("a", base_key="new"), Candidate("b"), Candidate("c", base_key="new")], dies)
    assert placed == [("a", 0), ("b", 1), ("c", 0)]


def test_a_shared_base_needs_its_memory_once() -> None:
    dies = [DieFacts(0, "x", "0", bytes_free=5 * GIB, bytes_total=5 * GIB)]
    same = [Candidate(name, bytes_needed=3 * GIB, base_key="b", base_bytes=2 * GIB) for name in "abcd"]
    placed, waits = place(same, dies)
    assert placed == [("a", 0), ("b", 0), ("c", 0)]
    assert waits == {"d": "it needs 1.0 GiB, and die 0 has 0.0 GiB free now; next in line"}


def test_full_dies_are_said_with_the_place_in_line() -> None:
    placed, waits = place(jobs("a", "b", "c"), box(jobs=4))
    assert placed == []
    assert waits == {
        "a": "all 6 dies are full (4 jobs each); next in line",
        "b": "all 6 dies are full (4 jobs each); next in line behind 1 job",
        "c": "all 6 dies are full (4 jobs each); next in line behind 2 jobs",
    }


def test_a_job_that_waits_for_one_die_holds_up_no_other_wish() -> None:
    dies = [DieFacts(0, "x", "0", jobs=4), DieFacts(1, "x", "1")]
    placed, waits = place([Candidate("a", 0), Candidate("b", 1), Candidate("c"), Candidate("d", "0")], dies)
    assert placed == [("b", 1), ("c", 1)]
    assert waits == {
        "a": "die 0 is full (4 jobs); next in line",
        "d": "die 0 is full (4 jobs); next in line behind 1 job",
    }


def test_wishes_by_index_name_uuid_and_pci_address() -> None:
    dies = [DieFacts(0, "x", "k80-a", uuid="GPU-1A", pci="0000:05:00.0"), DieFacts(1, "x", "k80-b", uuid="GPU-1B")]
    for wish, die in ((1, 1), ("1", 1), ("k80-b", 1), ("gpu-1a", 0), ("0000:05:00.0", 0), ("auto", 0)):
        assert place([Candidate("a", wish)], dies)[0] == [("a", die)]
    assert place([Candidate("a", 7)], dies[::-1]) == ([], {"a": "there is no die 7; the dies are k80-a, k80-b"})
    _, waits = place([Candidate("a", "gpu\x1b0"), Candidate("b", "")], dies)
    assert waits["a"] == "there is no die 'gpu\\x1b0'; the dies are k80-a, k80-b"
    assert waits["b"].startswith("there is no die ''")


def test_a_fenced_die_takes_nobody() -> None:
    dies = [DieFacts(0, "x", "0", fenced=True), DieFacts(1, "x", "1")]
    placed, waits = place([Candidate("a", 0), Candidate("b")], dies)
    assert placed == [("b", 1)]
    assert waits == {"a": "die 0 is fenced off after repeated faults"}
    assert place(jobs("a"), dies[:1])[1] == {"a": "die 0 is fenced off after repeated faults"}


def test_a_large_job_keeps_one_die_from_smaller_ones_behind_it() -> None:
    dies = box(2, jobs=1, bytes_free=4 * GIB, bytes_total=11 * GIB)
    queue = [Candidate("big", bytes_needed=8 * GIB), *(Candidate(n, bytes_needed=GIB) for n in "abcd")]
    placed, waits = place(queue, dies)
    assert placed == [("a", 1), ("b", 1), ("c", 1)]
    assert waits["big"] == "it needs 8.0 GiB, and die 0 has 4.0 GiB free now; next in line"
    assert waits["d"] == "the room on die 0 is kept for big, which came first; next in line behind 1 job"


def test_a_job_that_can_never_fit_keeps_nothing() -> None:
    dies = box(2, bytes_free=11 * GIB, bytes_total=11 * GIB)
    placed, waits = place([Candidate("huge", bytes_needed=20 * GIB), Candidate("a", bytes_needed=GIB)], dies)
    assert placed == [("a", 0)]
    assert waits == {"huge": "it needs 20.0 GiB, and both dies can give a job at most 11.0 GiB"}


WISHES = st.sampled_from(["auto", "auto", 0, 1, "2", 9])


@given(
    st.lists(st.tuples(WISHES, st.integers(0, 12), st.sampled_from(["", "p", "q"])), max_size=40),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11), st.booleans()), max_size=4),
)
def test_everybody_is_placed_where_it_may_be_or_told_why(
    queue: list[tuple[str | int, int, str]], facts: list[tuple[int, int, bool]]
) -> None:
    dies = [
        DieFacts(i, str(i % 2), str(i), jobs=n, bytes_free=free * GIB, bytes_total=11 * GIB, fenced=fenced)
        for i, (n, free, fenced) in enumerate(facts)
    ]
    waiting = [Candidate(f"j{i}", wish, need * GIB, base) for i, (wish, need, base) in enumerate(queue)]
    placed, waits = place(waiting, dies)
    assert sorted([job for job, _ in placed] + list(waits)) == sorted(job.job for job in waiting)
    assert all(why and "\n" not in why for why in waits.values())
    by_name = {job.job: job for job in waiting}
    load, used = Counter(die for _, die in placed), Counter[int]()
    for job, die in placed:
        assert dies[die].answers_to(by_name[job].die_wish)
        assert not dies[die].fenced
        used[die] += by_name[job].bytes_needed
    for die in dies:
        assert load[die.index] == 0 or die.jobs + load[die.index] <= die.slots
        assert used[die.index] <= (die.bytes_free or 0)


def test_a_job_waits_for_a_die_that_may_be_of_its_kind_and_has_not_said_so_yet() -> None:
    def dies(first: str) -> list[DieFacts]:
        return [DieFacts(0, "k80", "0", kind=first), DieFacts(1, "cpu", "1", kind="CPU")]

    job = Candidate("a", kind="Tesla K80")
    assert place([job], dies("")) == ([], {"a": "die 0 may be of the kind that it began on (Tesla K80): to be seen"})
    assert place([job], dies("Tesla K80")) == ([("a", 0)], {})
    assert place([job], dies("Tesla P40"))[0] == [("a", 0)], "the box has none: its worker refuses, and says why"


# --- dies that share one memory ---


def test_what_is_placed_on_one_die_of_a_pool_is_taken_from_all() -> None:
    dies = box(3, pool="the host", bytes_free=10 * GIB, bytes_total=20 * GIB)
    placed, waits = place([Candidate(name, bytes_needed=4 * GIB) for name in "abc"], dies)
    assert placed == [("a", 0), ("b", 1)]
    assert waits == {"c": "it needs 4.0 GiB, and the host has 2.0 GiB free now; next in line"}


def test_a_base_is_held_once_by_a_pool_whoever_loaded_it() -> None:
    dies = box(3, pool="the host", bytes_free=10 * GIB, bytes_total=20 * GIB)
    same = [Candidate(name, bytes_needed=6 * GIB, base_key="b", base_bytes=4 * GIB) for name in "abcd"]
    placed, waits = place(same, dies)
    assert placed == [("a", 0), ("b", 1), ("c", 2)] and list(waits) == ["d"]


def test_a_job_that_waits_for_the_memory_of_a_pool_keeps_all_of_it() -> None:
    dies = [*box(2, pool="the host", bytes_free=4 * GIB, bytes_total=20 * GIB), DieFacts(2, "y", "2")]
    placed, waits = place([Candidate("big", 0, bytes_needed=8 * GIB), Candidate("small", 1, bytes_needed=GIB),
                           Candidate("elsewhere", 2, bytes_needed=GIB)], dies)
    assert placed == [("elsewhere", 2)]
    assert waits["small"].startswith("the room on die 1 is kept for big, which came first")


def test_what_a_pool_can_never_give_is_said_and_keeps_nothing() -> None:
    dies = box(2, pool="the host", bytes_free=4 * GIB, bytes_total=20 * GIB)
    placed, waits = place([Candidate("huge", bytes_needed=30 * GIB), Candidate("small", bytes_needed=GIB)], dies)
    assert waits == {"huge": "it needs 30.0 GiB, and both dies can give a job at most 20.0 GiB"}
    assert placed == [("small", 0)]
