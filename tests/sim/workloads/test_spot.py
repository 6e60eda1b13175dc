"""Files of prices and reclaims: what they give, and each mistake in one line."""

from __future__ import annotations

import math

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, NodeId, Phase, Pool
from rlmux.sim.spot_trace import PriceChange, Reclaim
from rlmux.sim.workloads import spot

HEADER = "at_s,pool,usd_per_gpu_hour,node,notice_s,down_s\n"
CLUSTER = Cluster(
    pools={
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=4),
        "train": Pool(name="train", phase=Phase.TRAIN),
    }
)


def load(tmp_path, rows: str, header: str = HEADER):
    path = tmp_path / "spot.csv"
    path.write_text(header + rows)
    return spot.load(path, CLUSTER)


def test_a_file_has_prices_and_reclaims_in_the_order_of_time(tmp_path):
    trace = load(tmp_path, "0,rollout,0.7,,,\n# a comment\n60,rollout,,3,120,1800\n\n90,rollout,0,,,\n95,train,,9,0,\n")
    assert trace.prices == (
        PriceChange(at_s=0.0, pool="rollout", usd_per_gpu_hour=0.7),
        PriceChange(at_s=90.0, pool="rollout", usd_per_gpu_hour=0.0),
    )
    assert trace.reclaims == (
        Reclaim(at_s=60.0, node=NodeId("rollout", 3), notice_s=120.0, down_s=1800.0),
        Reclaim(at_s=95.0, node=NodeId("train", 9), notice_s=0.0, down_s=math.inf),
    )
    assert trace.pools == ("rollout",)


LEAST = "a number of at least 0"
ALL = "at_s, pool, usd_per_gpu_hour, node, notice_s, down_s"


@pytest.mark.parametrize(
    ("rows", "row", "column", "what"),
    [
        ("0,rollout,-0.5,,,", 2, "usd_per_gpu_hour", f"is -0.5; accepted: {LEAST}"),
        ("0,rollout,cheap,,,", 2, "usd_per_gpu_hour", f"is 'cheap'; accepted: {LEAST}"),
        ("0,rollout,nan,,,", 2, "usd_per_gpu_hour", f"is nan; accepted: {LEAST}"),
        ("0,rollout,,,,", 2, "usd_per_gpu_hour", "is empty, and so is 'node'; accepted: a price, or a node"),
        ("0,rollout,1,2,3,", 2, "node", "is given beside a price; accepted: one of them in a row"),
        ("0,gpu,1,,,", 2, "pool", "is 'gpu': no such pool; accepted: rollout, train"),
        ("5,rollout,1,,,", 2, "at_s", "is 5: the first price of pool 'rollout'; accepted: a first price at 0"),
        ("0,rollout,1,,,\n9,rollout,2,,,\n8,rollout,1,,,", 4, "at_s", "is 8, before row 3; accepted: 9 or later"),
        (
            "0,rollout,1,,,\n0,rollout,2,,,",
            3,
            "usd_per_gpu_hour",
            "is a second price of pool 'rollout' at 0 s, beside row 2; accepted: one",
        ),
        ("0,rollout,,4,10,", 2, "node", "is 4; accepted: a whole number, 0 to 3, the nodes of pool 'rollout'"),
        ("0,train,,1.5,10,", 2, "node", "is 1.5; accepted: a whole number, 0 or more"),
        ("0,rollout,,1,,", 2, "notice_s", f"is empty; accepted: {LEAST}"),
        ("0,rollout,,1,-1,", 2, "notice_s", f"is -1; accepted: {LEAST}"),
        ("0,rollout,,1,5,0", 2, "down_s", "is 0; accepted: a number above 0"),
        ("0,rollout,,1,5,5\n9,rollout,,1,5,5", 3, "node", "is 1, taken in row 2; accepted: from 10 s on"),
        ("0,rollout,,1,5,\n9,rollout,,1,5,", 3, "node", "is 1, taken in row 2; accepted: never: its down_s is empty"),
    ],
)
def test_a_mistake_is_one_line_with_its_row_and_what_is_accepted(tmp_path, rows, row, column, what):
    with pytest.raises(UserError) as error:
        load(tmp_path, f"{rows}\n")
    assert str(error.value) == f"{tmp_path / 'spot.csv'}: row {row}: column {column!r} {what}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_s,pool,price\n1,2,3\n", f"row 1: column 'price'; accepted: {ALL}, each once"),
        ("at_s,pool,pool\n1,2,3\n", f"row 1: column 'pool'; accepted: {ALL}, each once"),
        ("at_s,node\n1,2\n", "row 1: missing column pool; found: at_s, node"),
        (f"{HEADER}0,rollout,1\n", f"row 2: 3 values for 6 columns; accepted: one for each of {ALL}"),
        (HEADER, f"no rows; accepted: a header with {ALL}, then prices and reclaims"),
    ],
)
def test_a_file_that_does_not_fit_is_told(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        load(tmp_path, "", text)
    assert str(error.value) == f"{tmp_path / 'spot.csv'}: {message}"


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        spot.load(tmp_path / "none.csv", CLUSTER)
