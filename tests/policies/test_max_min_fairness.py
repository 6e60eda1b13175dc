"""The order in which waiting pipelines are offered room, by urgency, shares, waiting and rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.model import QUEUED, Account, PipelineId, Urgency
from rlmux.core.queue_order import QueueView, Share, WaitingPipeline
from rlmux.policies.max_min_fairness import AGED_S, AGEING_S, FairShares, dominant_share

CAPACITY = {"rollout": 100.0, "train": 100.0}


def waiting(name: str, user: str = "ann", *, sequence: int = 0, **fields) -> WaitingPipeline:
    values = {
        "account": Account(user, user),
        "urgency": Urgency.NORMAL,
        "rank": 0,
        "waited_s": 0.0,
        "entry_by_pool": {"rollout": 1.0, "train": 1.0},
    }
    return WaitingPipeline(id=PipelineId(name), sequence=sequence, **{**values, **fields})


def order(*pipelines: WaitingPipeline, **fields) -> str:
    numbered = [pipelines[number] for number in range(len(pipelines))]
    return " ".join(FairShares().order(QueueView(waiting=tuple(numbered), capacity_by_pool=CAPACITY, **fields)))


def of(user: str) -> Account:
    return Account(user, user)


def test_within_one_account_rank_decides_and_then_submission():
    assert order(waiting("a", sequence=1), waiting("b", sequence=2, rank=-1), waiting("c", sequence=3)) == "b a c"


def test_a_rank_never_passes_another_account():
    ann = [waiting(f"a{number}", sequence=number, rank=-9) for number in range(3)]
    assert order(*ann, waiting("b0", "bob", sequence=9, rank=99)) == "a0 b0 a1 a2"


def test_accounts_take_turns_from_the_first_grant_on():
    ann = [waiting(f"a{number}", sequence=number) for number in range(100)]
    assert order(*ann, waiting("b0", "bob", sequence=100)).split()[:2] == ["a0", "b0"]


def test_twice_the_weight_gets_twice_the_turns():
    ann = [waiting(f"a{number}", sequence=number) for number in range(6)]
    bob = [waiting(f"b{number}", "bob", sequence=10 + number) for number in range(6)]
    shares = {Account("bob", ""): Share(weight=2.0)}
    assert [name[0] for name in order(*ann, *bob, share_by_account=shares).split()[:9]].count("b") == 6


def test_the_larger_pool_part_counts():
    used = {of("ann"): {"rollout": 0.1, "train": 0.5}, of("bob"): {"rollout": 0.3, "train": 0.3}}
    view = QueueView(waiting=(), usage_by_account=used)
    assert (dominant_share(Account("ann", ""), view), dominant_share(Account("bob", ""), view)) == (0.5, 0.3)
    assert order(waiting("a", sequence=1), waiting("b", "bob", sequence=2), usage_by_account=used) == "b a"


def test_users_of_one_project_take_turns_and_its_share_is_that_of_both():
    used = {
        Account("lab", "ann"): {"rollout": 0.2},
        Account("lab", "eve"): {"rollout": 0.1},
        of("bob"): {"train": 0.25},
    }
    lab = [
        waiting("a", account=Account("lab", "ann"), sequence=1),
        waiting("e", account=Account("lab", "eve"), sequence=2),
    ]
    assert order(*lab, waiting("b", "bob", sequence=3), usage_by_account=used) == "b e a"


def test_an_account_below_its_guarantee_goes_before_one_that_used_less():
    used = {of("ann"): {"rollout": 0.3}, of("bob"): {"rollout": 0.1}}
    pair = (waiting("a", sequence=1), waiting("b", "bob", sequence=2))
    assert order(*pair, usage_by_account=used) == "b a"
    guaranteed = {Account("ann", ""): Share(guarantee=0.4)}
    assert order(*pair, usage_by_account=used, share_by_account=guaranteed) == "a b"


def test_urgency_goes_before_shares():
    used = {of("ann"): {"rollout": 0.9}}
    pipelines = (
        waiting("late", "bob", sequence=1, urgency=Urgency.BACKGROUND),
        waiting("b", "bob", sequence=2),
        waiting("a", sequence=3, urgency=Urgency.URGENT),
    )
    assert order(*pipelines, usage_by_account=used) == "a b late"


def test_a_day_of_waiting_halves_a_share():
    used = {of("ann"): {"rollout": 0.3}, of("bob"): {"rollout": 0.2}}
    bob = waiting("b", "bob", sequence=2)
    for waited_s, expected in ((0.5 * AGEING_S, "b a"), (0.7 * AGEING_S, "a b")):
        assert order(waiting("a", sequence=1, waited_s=waited_s), bob, usage_by_account=used) == expected


@st.composite
def queues(draw) -> QueueView:
    urgencies, ages = st.sampled_from(QUEUED), st.sampled_from([0.0, 1.0, AGEING_S, AGED_S, 2 * AGED_S])
    pipelines = [
        waiting(
            f"p{number}",
            sequence=number,
            account=Account(draw(st.sampled_from("xy")), draw(st.sampled_from("uvw"))),
            urgency=draw(urgencies),
            rank=draw(st.integers(-2, 2)),
            waited_s=draw(ages),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    accounts = {one.account for one in pipelines}
    used = {account: {"rollout": draw(st.floats(0, 1))} for account in sorted(accounts)}
    return QueueView(waiting=tuple(pipelines), usage_by_account=used, capacity_by_pool=CAPACITY)


@given(view=queues())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_every_pipeline_has_one_place_and_the_aged_come_first(view):
    ordered = FairShares().order(view)
    by_id = {one.id: one for one in view.waiting}
    assert sorted(ordered) == sorted(by_id)
    num_aged = sum(one.waited_s >= AGED_S for one in view.waiting)
    aged = [by_id[name] for name in ordered[:num_aged]]
    assert all(one.waited_s >= AGED_S for one in aged)
    assert [one.sequence for one in aged] == sorted(one.sequence for one in aged)
    urgencies = [QUEUED.index(by_id[name].urgency) for name in ordered[num_aged:]]
    assert urgencies == sorted(urgencies)


@given(view=queues())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_ranks_decide_within_an_account_and_urgency(view):
    ordered = [one for name in FairShares().order(view) for one in view.waiting if one.id == name]
    for account in {one.account for one in ordered}:
        for urgency in QUEUED:
            own = [
                (one.rank, one.sequence)
                for one in ordered
                if (one.account, one.urgency) == (account, urgency) and one.waited_s < AGED_S
            ]
            assert own == sorted(own)


@pytest.mark.parametrize("num", [0, 1])
def test_nothing_to_order_is_left_as_it_is(num):
    assert order(*[waiting("a")] * num) == "a" * num
