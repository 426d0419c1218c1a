"""Simulated runs reproduce published tables and formulas."""

from decimal import ROUND_HALF_UP, Decimal
from functools import cache

import pipelines
import pytest
import seven_billion
import zero_states

from distlab.sim import Cluster, Options, simulate

# --- memory of ZeRO's model states ---------------------------------------------------------------

# GB for P_os, P_os+g and P_os+g+p; Rajbhandari et al. 2020, table 1, 7.5 billion parameters.
ZERO_TABLE_1 = {
    1: ("120", "120", "120"),
    4: ("52.5", "41.3", "30"),
    16: ("35.6", "21.6", "7.5"),
    64: ("31.4", "16.6", "1.88"),
}
NAMES = ("parameters", "gradients", "optimizer_state")


@cache
def states(num_ranks: int, stage: int) -> tuple[zero_states.Bytes, zero_states.Bytes]:
    """Return the bytes that every rank holds after training, and rank 0's bytes at its peak."""
    cluster, options = Cluster(1, num_ranks), Options(has_devices=True)
    run = simulate(zero_states.model_states, num_ranks, stage, cluster=cluster, options=options)
    live, peak = run.results[0]
    assert all(result[0] == live for result in run.results)
    return live, peak


def rounded(num_bytes: int, like: str) -> str:
    """Return a size in GB with as many decimals as ``like``, rounding 41.25 up to 41.3."""
    digits = Decimal(10) ** -len(like.partition(".")[2])
    return str((Decimal(num_bytes) / 10**9).quantize(digits, ROUND_HALF_UP))


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("num_ranks", ZERO_TABLE_1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_table_1(num_ranks: int, stage: int) -> None:
    live, _ = states(num_ranks, stage)
    published = ZERO_TABLE_1[num_ranks][stage - 1]
    assert rounded(sum(live[name] for name in NAMES), published) == published
    assert live["activations"] == live["other"] == 0  # no state is counted elsewhere


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_zero_shares_out_one_thing_after_the_other() -> None:
    whole = {"parameters": 2, "gradients": 2, "optimizer_state": 12}  # bytes per parameter
    for stage, shared in enumerate([(), NAMES[2:], NAMES[1:], NAMES]):
        live, _ = states(4, stage)
        for name, per_parameter in whole.items():
            expected = per_parameter * zero_states.PARAMETERS // (4 if name in shared else 1)
            assert live[name] == expected


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("stage", [2, 3])
def test_at_the_peak_of_zero_one_layer_is_whole(stage: int) -> None:
    """Expect one whole layer at the peak: either a gradient not reduced yet, or a weight in use."""
    live, peak = states(16, stage)
    layer = 2 * zero_states.WIDTH**2
    assert sum(live.values()) + layer <= sum(peak.values()) <= 1.001 * sum(live.values()) + layer


# --- idle time in pipelines ----------------------------------------------------------------------

# On the ideal cluster, the schedule alone makes ranks idle, so the formulas hold except for the
# rounding in sums of up to 10,000 spans with 16 digits each.
ROUNDING = 1e-12
# The unit is what a stage keeps of one micro-batch for its backward pass: 576 values per row, in
# nine layers. With 32 micro-batches, a stage may hold up to 0.34 more, because torch keeps all
# their inputs, outputs and losses for the whole step: up to 3 x 2 values per row of each. A stage
# may hold 0.11 less, because gradients need memory too, so that the peak is reached only after the
# backward pass has freed a layer.
SLACK = 0.35

SHAPES = [(p, m) for p in (2, 4, 8) for m in (1, 4, 8)] + [(8, 32)]
FULL = [(p, m) for p, m in SHAPES if m >= p]  # torch requires at least one micro-batch per stage

measured = cache(pipelines.measure)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_gpipe_stands_still_for_p_minus_1_of_m_plus_p_minus_1(p: int, m: int) -> None:
    run = measured("GPipe", p, m)
    assert run.idle_of_total == pytest.approx((p - 1) / (m + p - 1), rel=ROUNDING)


@pytest.mark.parametrize(("p", "m"), FULL)
def test_1f1b_stands_still_as_long_as_gpipe(p: int, m: int) -> None:
    run = measured("1F1B", p, m)
    assert run.idle_of_total == pytest.approx((p - 1) / (m + p - 1), rel=ROUNDING)


@pytest.mark.parametrize(("p", "m"), FULL[:-1])
def test_two_stages_on_each_rank_halve_what_stands_still(p: int, m: int) -> None:
    run = measured("interleaved 1F1B", p, m)
    assert run.idle_of_ideal == pytest.approx((p - 1) / (2 * m), rel=ROUNDING)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_gpipe_keeps_the_activations_of_every_micro_batch(p: int, m: int) -> None:
    assert measured("GPipe", p, m).in_flight == pytest.approx([m] * p, abs=SLACK)


@pytest.mark.parametrize(("p", "m"), FULL)
def test_1f1b_keeps_those_of_as_many_as_there_are_stages_to_come(p: int, m: int) -> None:
    assert measured("1F1B", p, m).in_flight == pytest.approx(range(p, 0, -1), abs=SLACK)


# --- a step of a large transformer ---------------------------------------------------------------

FEW_LAYERS, FEW_RANKS = 4, 8


@cache
def step(way: str) -> seven_billion.Step:
    return seven_billion.measure(way, FEW_RANKS, FEW_LAYERS)


@pytest.mark.parametrize("way", seven_billion.WAYS)
def test_a_step_takes_6_flops_for_each_parameter_and_token_and_attention(way: str) -> None:
    one = step(way)
    idle = seven_billion.WIDTH * seven_billion.TOKENS  # position embeddings, which are only added
    expected = seven_billion.expected_flops(one.parameters - idle, FEW_LAYERS)
    assert one.flops == pytest.approx(expected, rel=0.001)  # norms and biases add little


@pytest.mark.parametrize("way", ["all_reduce", "DDP"])
def test_a_copy_takes_8_bytes_for_each_parameter_in_bfloat16(way: str) -> None:
    one, peak = step(way), step(way).peak_by_category
    counters = 4 * 1000
    assert peak["parameters"] == peak["gradients"] == 2 * one.parameters
    assert 0 <= peak["optimizer_state"] - 4 * one.parameters < counters
    # Adam updates all parameters in one foreach call, for which it needs a temporary copy of them.
    assert 0 <= peak["other"] - 2 * one.parameters < 2**20


def test_shards_take_16_bytes_for_each_parameter_of_all_ranks_together() -> None:
    one = step("FSDP2")
    share = one.parameters // FEW_RANKS
    assert one.held["parameters"] == one.held["gradients"] == 4 * share
    assert 0 <= one.held["optimizer_state"] - 8 * share < 1000  # plus a step count per tensor
    assert one.held["activations"] == 0


@pytest.mark.parametrize("way", seven_billion.WAYS)
def test_utilisation_is_below_what_a_large_product_reaches(way: str) -> None:
    assert 0.15 < step(way).utilisation < 794 / 989
