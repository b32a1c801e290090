"""Whose turn it is: shares, order, back-off, and that nobody starves whatever comes and goes."""

from __future__ import annotations

import random
import time
from collections import Counter
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rrd.rotation import BACKOFF_MOST, Rotation, Turn

DIES = ("0", "1", "2", "3", "4", "5")
WEIGHTS = st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0, 1.0, 2.0, 3.0, 7.0, 100.0])


def visit(rotation: Rotation, now: float = 0.0) -> Turn:
    turn = rotation.next(now)
    assert turn is not None
    rotation.granted(turn.die)
    rotation.done(turn)
    return turn


def visits(rotation: Rotation, n: int, now: float = 0.0) -> str:
    """The jobs of the next n visits; the tests here name jobs with one letter."""
    return "".join(visit(rotation, now).job for _ in range(n))


def lane(**jobs: str) -> Rotation:
    """Six dies and jobs of weight 1: ``lane(a="0")``."""
    rotation = Rotation(DIES)
    for job, die in jobs.items():
        rotation.add(job, die)
    return rotation


# --- order ---


def test_equal_weights_go_round_the_dies_in_their_order() -> None:
    rotation = lane(f="5", b="1", a="0", d="3", c="2", e="4")
    assert visits(rotation, 13) == "abcdefabcdefa"


def test_a_second_job_on_a_die_has_its_turn_after_the_first_of_every_die() -> None:
    rotation = lane(a="0", x="0", b="1", y="1", c="2")
    assert visits(rotation, 10) == "abcxyabcxy"


@pytest.mark.parametrize("after", range(7))
def test_a_newcomer_falls_in_with_the_order_of_the_dies(after: int) -> None:
    rotation = lane(a="0", b="1", d="3", e="4", f="5")
    visits(rotation, after)
    rotation.add("c", "2")
    visits(rotation, 5 - after % 5)  # to the end of this pass at the latest
    both = visits(rotation, 24)
    assert "abcdef" * 2 in both
    assert "c" in both[:7]


def test_one_job_is_visited_again_and_again() -> None:
    assert visits(lane(a="3"), 5) == "aaaaa"


def test_nothing_to_do() -> None:
    rotation = lane()
    assert rotation.next(0) is None
    assert rotation.wake_at() is None


# --- rounds ---


def rounds(rotation: Rotation, n: int) -> list[int]:
    return [visit(rotation).round for _ in range(n)]


def test_a_round_is_one_pass_over_the_dies_that_have_something_to_visit() -> None:
    rotation = lane(a="0", b="1", c="2")
    assert rounds(rotation, 7) == [1, 1, 1, 2, 2, 2, 3]
    rotation.hold("b")
    assert rounds(rotation, 4) == [3, 4, 4, 5]
    assert rotation.round == 5


def test_a_heavy_job_does_not_make_rounds_shorter() -> None:
    rotation = Rotation(DIES)
    rotation.add("a", "0", 3.0)
    rotation.add("b", "1", 1.0)
    assert [visit(rotation).round for _ in range(9)][-1] == 3


# --- shares ---


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WEIGHTS, st.sampled_from(DIES)), min_size=1, max_size=60))
def test_shares_follow_the_weights_within_two_percent_over_1000_visits(jobs: list[tuple[float, str]]) -> None:
    rotation = Rotation(DIES)
    for n, (weight, die) in enumerate(jobs):
        rotation.add(str(n), die, weight)
    total = sum(weight for weight, _ in jobs)
    had: Counter[str] = Counter()
    for made in range(1, 1001):
        job = visit(rotation).job
        had[job] += 1
        share = made * jobs[int(job)][0] / total
        assert abs(had[job] - share) <= 1.001, "more than one visit ahead of its share"
    for n, (weight, _) in enumerate(jobs):
        share = 1000 * weight / total
        assert abs(had[str(n)] - share) <= max(1.001, 0.02 * share)


def test_many_light_jobs_do_not_push_a_heavy_one_aside_together() -> None:
    rotation = Rotation(DIES)
    rotation.add("H", "0", 1.0)
    for n in range(60):
        rotation.add(f"light{n}", "1", 0.01)
    jobs = [visit(rotation).job for _ in range(1000)]
    longest = max(len(run) for run in "".join("H" if job == "H" else "." for job in jobs).split("H"))
    assert longest <= 2
    assert jobs.count("H") == pytest.approx(625, abs=1)


def test_a_changed_weight_counts_from_now_on() -> None:
    rotation = lane(a="0", b="1")
    visits(rotation, 20)
    rotation.set_weight("a", 3.0)
    assert visits(rotation, 400).count("a") == pytest.approx(300, abs=2)
    rotation.set_weight("a", 0.01)
    visits(rotation, 1)
    rotation.set_weight("a", 1.0)
    assert "a" in visits(rotation, 3), "the long wait of the light weight is over"


# --- hold and free ---


def test_a_held_job_is_passed_over_and_catches_nothing_up() -> None:
    rotation = lane(a="0", b="1", c="2")
    rotation.hold("b")
    assert visits(rotation, 60).count("b") == 0
    rotation.free("b")
    assert visits(rotation, 30).count("b") == 10


def test_hold_and_free_in_flight_change_nothing_else() -> None:
    rotation = lane(a="0", b="1", c="2")
    turn = rotation.next(0)
    assert turn is not None
    rotation.hold("a")
    rotation.free("a")
    rotation.done(turn)
    assert visits(rotation, 6) == "bcabca"


def test_held_in_flight_it_has_no_further_turn() -> None:
    rotation = lane(a="0", b="1")
    turn = rotation.next(0)
    assert turn is not None
    rotation.hold("a")
    rotation.done(turn)
    assert visits(rotation, 3) == "bbb"


def test_a_job_that_toggles_all_the_time_still_has_its_share() -> None:
    rotation = lane(a="0", b="1", c="2")
    had: Counter[str] = Counter()
    for _ in range(90):
        rotation.hold("b")
        rotation.free("b")
        had[visit(rotation).job] += 1
    assert had == {"a": 30, "b": 30, "c": 30}


# --- coming and going ---


def test_a_job_removed_in_flight_is_forgotten() -> None:
    rotation = lane(a="0", b="1")
    turn = rotation.next(0)
    assert turn is not None
    rotation.remove("a")
    rotation.add("a", "3")
    rotation.done(turn)
    assert sorted(visits(rotation, 2)) == ["a", "b"]
    assert rotation.die_of("a") == "3"


def test_nobody_starves_while_another_is_removed_and_put_back_for_ever() -> None:
    for weight in (0.01, 1.0, 100.0):
        rotation = lane(a="0", b="1", c="2")
        rotation.add("x", "3", weight)
        had: Counter[str] = Counter()
        for _ in range(2000):
            rotation.remove("x")
            rotation.add("x", "3", weight)
            had[visit(rotation).job] += 1
        assert min(had[job] for job in "abc") >= 2000 / (3 + weight) / 2


def test_a_slot_is_used_again_in_its_old_place() -> None:
    rotation = lane(a="0", x="0", b="1")
    visits(rotation, 6)
    rotation.remove("a")
    rotation.add("n", "0")
    assert "nbx" in visits(rotation, 9)


# --- back-off ---


def test_a_refused_die_is_left_alone_for_1_s_doubling_to_60() -> None:
    rotation = lane(a="0")
    now, waits = 0.0, []
    for _ in range(9):
        turn = rotation.next(now)
        assert turn is not None
        until = rotation.refused("0", now)
        assert rotation.next(now) is None
        assert rotation.next(until - 0.001) is None
        assert rotation.wake_at() == until == rotation.retry_at("0")
        waits.append(until - now)
        now = until
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    visit(rotation, now)
    assert rotation.retry_at("0") is None
    assert rotation.refused("0", now) == now + 1
    assert waits[-1] == BACKOFF_MOST


def test_others_go_on_meanwhile_and_the_refused_die_catches_nothing_up() -> None:
    rotation = lane(a="0", b="1", y="1", c="2")
    assert visits(rotation, 1) == "a"
    turn = rotation.next(0)
    assert turn == Turn("b", "1", 1)
    rotation.refused("1", 0)
    assert rotation.in_flight is None
    assert visits(rotation, 80, now=0.5).count("a") == 40
    back = visits(rotation, 40, now=1.0)
    assert Counter(back) == pytest.approx({"a": 10, "b": 10, "c": 10, "y": 10}, abs=1)


def test_a_job_may_be_made_to_step_back_behind_its_dies_other_jobs() -> None:
    rotation = lane(a="0", b="0", c="0", x="1")
    turn = rotation.next(0.0)
    assert turn is not None and turn.job == "a"
    rotation.done(turn)
    rotation.refused("0", 0.0)
    rotation.step_back("a")
    assert visits(rotation, 3) == "xxx"
    assert visits(rotation, 8, now=1.0) == "xcbaxcba"
    rotation.add("d", "0")
    assert sorted(visits(rotation, 5, now=1.0)) == ["a", "b", "c", "d", "x"]


def test_only_a_change_wakes_a_lane_whose_backed_off_jobs_are_held() -> None:
    rotation = lane(a="0")
    rotation.refused("0", 5)
    rotation.hold("a")
    assert rotation.wake_at() is None
    rotation.free("a")
    assert rotation.wake_at() == 6
    assert rotation.next(5) is None
    rotation.add("b", "0")
    assert rotation.next(5) is None


# --- misuse is our own mistake ---


def test_one_turn_in_flight() -> None:
    rotation = lane(a="0", b="1")
    turn = rotation.next(0)
    with pytest.raises(AssertionError, match="in flight"):
        rotation.next(0)
    assert turn is not None
    with pytest.raises(AssertionError, match="in flight"):
        rotation.done(Turn("b", "1", 1))
    rotation.done(turn)
    with pytest.raises(AssertionError, match="placed already"):
        rotation.add("a", "1")
    with pytest.raises(AssertionError, match="weight"):
        rotation.add("z", "1", 0.0)


# --- cost ---


def test_a_visit_costs_the_same_with_10_000_jobs() -> None:
    def cost(jobs: int) -> float:
        rotation = Rotation(DIES)
        for n in range(jobs):
            rotation.add(str(n), DIES[n % 6], 1.0 + n % 7)
        took = []
        for _ in range(30):
            start = time.thread_time()
            for _ in range(100):
                visit(rotation)
            took.append(time.thread_time() - start)
        return median(took)

    few, many = min(cost(6) for _ in range(3)), min(cost(10_000) for _ in range(3))
    assert many < 8 * few, f"{few * 1e4:.1f} us a visit with 6 jobs, {many * 1e4:.1f} with 10,000"


# --- any history ---


def test_time_passes_no_deadline_however_jobs_that_ran_ahead_leave() -> None:
    for seed in (511, 1768, 1927):
        chance, rotation, placed = random.Random(seed), Rotation(DIES[:3]), list[str]()
        for step in range(300):
            what = chance.random()
            if what < 0.3:
                placed.append(f"j{step}")
                rotation.add(placed[-1], chance.choice(DIES[:3]), chance.choice([0.01, 0.1, 1, 1, 3, 100]))
            elif what < 0.6 and placed:
                rotation.remove(placed.pop(chance.randrange(len(placed))))
            elif placed:
                visit(rotation)
            assert rotation._due.first >= rotation._now - 1e-6


class Histories(RuleBasedStateMachine):
    """Adds, removals, refusals, holds and visits in any order; what must hold is checked after each."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = Rotation(DIES[:3])
        self.placed: dict[str, str] = {}
        self.held: set[str] = set()
        self.backed_off: dict[str, float] = {}
        self.now = 0.0
        self.turn: Turn | None = None
        self.born = 0
        self.virtual = 0.0

    def some(self, n: int) -> str:
        return sorted(self.placed)[n % len(self.placed)]

    @rule(die=st.sampled_from(DIES[:3]), weight=WEIGHTS)
    def add(self, die: str, weight: float) -> None:
        self.born += 1
        self.rotation.add(f"j{self.born}", die, weight)
        self.placed[f"j{self.born}"] = die

    @precondition(lambda self: self.placed)
    @rule(n=st.integers(0, 99))
    def remove(self, n: int) -> None:
        job = self.some(n)
        self.rotation.remove(job)
        del self.placed[job]
        self.held.discard(job)

    @precondition(lambda self: self.placed)
    @rule(n=st.integers(0, 99), weight=WEIGHTS)
    def reweigh(self, n: int, weight: float) -> None:
        self.rotation.set_weight(self.some(n), weight)

    @precondition(lambda self: self.placed)
    @rule(n=st.integers(0, 99))
    def hold(self, n: int) -> None:
        self.rotation.hold(self.some(n))
        self.held.add(self.some(n))

    @precondition(lambda self: self.placed)
    @rule(n=st.integers(0, 99))
    def free(self, n: int) -> None:
        self.rotation.free(self.some(n))
        self.held.discard(self.some(n))

    @rule(die=st.sampled_from(DIES[:3]))
    def refuse(self, die: str) -> None:
        until = self.rotation.refused(die, self.now)
        assert 1 <= until - self.now <= BACKOFF_MOST
        self.backed_off[die] = until
        if self.turn and self.turn.die == die:
            self.turn = None

    @rule(seconds=st.sampled_from([0.125, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        if self.turn:
            self.rotation.done(self.turn)
            self.turn = None
            return
        self.turn = self.rotation.next(self.now)
        self.backed_off = {die: until for die, until in self.backed_off.items() if until > self.now}
        takers = {job for job, die in self.placed.items() if job not in self.held and die not in self.backed_off}
        assert (self.turn is not None) == bool(takers)
        if self.turn:
            assert self.turn.job in takers
            assert self.turn.die == self.placed[self.turn.job]
            self.rotation.granted(self.turn.die)
        else:
            dies = {die for job, die in self.placed.items() if job not in self.held}
            waiting = [until for die, until in self.backed_off.items() if die in dies]
            assert self.rotation.wake_at() == min(waiting, default=None)

    @invariant()
    def time_goes_on_and_passes_no_deadline(self) -> None:
        rotation = self.rotation
        assert rotation.in_flight == self.turn
        assert rotation._now >= self.virtual - 1e-9
        self.virtual = rotation._now
        assert rotation._due.first >= rotation._now - 1e-6
        ready = [entry for entry in rotation._jobs.values() if entry.ready]
        assert rotation._total == pytest.approx(sum(entry.weight for entry in ready))
        flying = self.turn is not None and rotation._flight is not None and rotation._flight[1].ready
        assert len(rotation._early) + len(rotation._due) == len(ready) - flying

    def teardown(self) -> None:
        """From any state, everybody who can take a visit gets one, soon."""
        if self.turn:
            self.rotation.done(self.turn)
        for job in self.held:
            self.rotation.free(job)
        self.now += 60
        for job in self.placed:
            self.rotation.set_weight(job, 1.0)
        seen = {visit(self.rotation, self.now).job for _ in range(2 * len(self.placed) + 1)} if self.placed else set()
        assert seen == set(self.placed)


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_any_history_keeps_the_invariant = Histories.TestCase
