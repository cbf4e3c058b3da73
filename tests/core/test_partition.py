"""How a sequence is cut: is the costliest segment as cheap as any partition on the grid has it?"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq1f1b.partition import ModelShape, check_segment_sizes, partition_sequence

SMALL = ModelShape(hidden=8, layers=1, heads=2, kv_heads=1, ffn=4, vocab=3)
GPT_7B = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=10923, vocab=50304)  # ffn: two matrices of 4 h


def compositions(seq_len: int, num_segments: int, multiple_of: int) -> list[list[int]]:
    """Every list of sizes on the grid: multiples, and one segment with the remainder where there is one."""
    remainder = seq_len % multiple_of
    found = []
    for cuts in combinations(range(1, seq_len), num_segments - 1):
        sizes = [end - begin for begin, end in zip((0, *cuts), (*cuts, seq_len), strict=True)]
        over = sorted(size % multiple_of for size in sizes)
        if over[-1] == remainder and not any(over[:-1]):
            found.append(sizes)
    return found


def segment_costs(sizes: list[int], token_costs: list[float]) -> list[float]:
    starts = [sum(sizes[:s]) for s in range(len(sizes))]
    return [sum(token_costs[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def token_flops(model: ModelShape, t: int) -> int:
    """The formula written out for one token, in integers."""
    head_dim = model.hidden // model.heads
    query_output = 2 * 2 * model.hidden * model.hidden
    key_value = 2 * 2 * model.hidden * model.kv_heads * head_dim
    feed_forward = 3 * 2 * model.hidden * model.ffn
    attention = 2 * 2 * model.heads * head_dim * (t + 1)
    return model.layers * (query_output + key_value + feed_forward + attention) + 2 * model.hidden * model.vocab


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=11).filter(any),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_profiled_and_even_against_every_composition(costs: list[int], data: st.DataObject) -> None:
    multiple_of, seq_len = data.draw(st.integers(1, 4)), len(costs)
    num_segments = data.draw(st.integers(1, math.ceil(seq_len / multiple_of)))
    every = compositions(seq_len, num_segments, multiple_of)
    for strategy, of_token in (("profiled", costs), ("even", [1] * seq_len)):
        given_costs = costs if strategy == "profiled" else None
        sizes = partition_sequence(seq_len, num_segments, strategy=strategy, costs=given_costs, multiple_of=multiple_of)
        assert sizes in every
        assert max(segment_costs(sizes, of_token)) == min(max(segment_costs(other, of_token)) for other in every)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_documents_against_every_composition(data: st.DataObject) -> None:
    """Rows that are cut alike cost their sum, in which a token attends within its own document; one may be the row."""
    seq_len, multiple_of = data.draw(st.integers(1, 11)), data.draw(st.integers(1, 4))
    num_segments = data.draw(st.integers(1, math.ceil(seq_len / multiple_of)))
    rows = data.draw(
        st.lists(st.sets(st.integers(1, seq_len - 1)) if seq_len > 1 else st.just(set()), min_size=1, max_size=4)
    )
    documents, costs = [], [0] * seq_len
    for cuts in rows:
        for begin, end in pairwise((0, *sorted(cuts), seq_len)):
            documents.append(end - begin)
            for t in range(begin, end):
                costs[t] += token_flops(SMALL, t - begin)
    sizes = partition_sequence(seq_len, num_segments, model=SMALL, documents=documents, multiple_of=multiple_of)
    every = compositions(seq_len, num_segments, multiple_of)
    assert sizes in every
    assert max(segment_costs(sizes, costs)) == min(max(segment_costs(other, costs)) for other in every)
    if documents == [seq_len]:
        assert sizes == partition_sequence(seq_len, num_segments, model=SMALL, multiple_of=multiple_of)


def test_one_document_is_the_plain_split_and_short_ones_make_it_even() -> None:
    for seq_len, num_segments in ((65536, 4), (1 << 40, 7), (1000, 3)):
        plain = partition_sequence(seq_len, num_segments, model=GPT_7B)
        for rows in (1, 3):
            assert partition_sequence(seq_len, num_segments, model=GPT_7B, documents=[seq_len] * rows) == plain
    short = partition_sequence(65536, 4, model=GPT_7B, documents=[1024] * 64)
    assert short == [16384] * 4
    assert partition_sequence(65536, 4, model=GPT_7B, documents=[1] * 65536) == [16384] * 4
    # one long document behind short ones: its tokens grow dearer, those before it are cheap
    mixed = partition_sequence(65536, 4, model=GPT_7B, documents=[512] * 32 + [49152])
    assert mixed[0] > 16384 > mixed[3]


@given(
    seq_len=st.integers(1, 1 << 40),
    num_segments=st.integers(1, 40),
    multiple_of=st.sampled_from([1, 8, 128, 1000]),
    mix=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
def test_any_sequence(seq_len: int, num_segments: int, multiple_of: int, mix: float) -> None:
    if num_segments > math.ceil(seq_len / multiple_of):
        with pytest.raises(ValueError, match="num_segments"):
            partition_sequence(seq_len, num_segments, model=GPT_7B, mix=mix, multiple_of=multiple_of)
        return
    sizes = partition_sequence(seq_len, num_segments, model=GPT_7B, mix=mix, multiple_of=multiple_of)
    check_segment_sizes(sizes, seq_len)
    assert len(sizes) == num_segments
    assert sorted(size % multiple_of for size in sizes)[:-1] == [0] * (num_segments - 1)
    assert sizes == partition_sequence(seq_len, num_segments, model=GPT_7B, mix=mix, multiple_of=multiple_of)


@given(costs=st.lists(st.floats(), max_size=24), num_segments=st.integers(1, 12), multiple_of=st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_any_costs(costs: list[float], num_segments: int, multiple_of: int) -> None:
    """Whatever doubles they are; a cost near the largest one once made the search for the bound endless."""
    try:
        sizes = partition_sequence(97, num_segments, strategy="profiled", costs=costs, mix=0.5, multiple_of=multiple_of)
    except ValueError:
        assert not costs or not all(0 <= cost < math.inf for cost in costs) or not 0 < sum(costs) <= 1e300
    else:
        check_segment_sizes(sizes, 97)
        assert len(sizes) == num_segments and sum(size % multiple_of > 0 for size in sizes) <= 1


def test_model_flops_is_the_sum_over_tokens() -> None:
    gqa = ModelShape(hidden=64, layers=3, heads=8, kv_heads=2, ffn=96, vocab=500)
    for begin, end in ((0, 0), (0, 1), (0, 50), (17, 50)):
        assert gqa.flops(begin, end) == sum(token_flops(gqa, t) for t in range(begin, end))
    assert gqa.flops(0, 1 << 40) == pytest.approx(gqa.flops(0, 1 << 39) + gqa.flops(1 << 39, 1 << 40))


# Lengths that the authors' solver gives for a 7B model in four segments (last to first by a real root, rounded down to
# multiples of 8, the remainder in the first). Its cost model counts the embedding as well, so lengths differ a little.
@pytest.mark.parametrize(
    ("seq_len", "theirs"),
    [(32768, [11024, 8416, 7088, 6240]), (65536, [25024, 16272, 13040, 11200]), (131072, [55712, 30872, 24064, 20424])],
)
def test_lengths_of_the_paper(seq_len: int, theirs: list[int]) -> None:
    sizes = partition_sequence(seq_len, 4, model=GPT_7B, multiple_of=8)

    def most(lengths: list[int]) -> float:
        return max(GPT_7B.flops(sum(lengths[:s]), sum(lengths[: s + 1])) for s in range(4))

    assert most(sizes) <= most(theirs) <= 1.005 * most(sizes)
    assert sizes == pytest.approx(theirs, rel=0.006)
    mean = GPT_7B.flops(0, seq_len) / 4
    one_step = GPT_7B.flops(seq_len - 8, seq_len)  # eight tokens where they cost the most
    assert mean <= most(sizes) <= mean + one_step


def test_mix_lies_between_even_and_balanced() -> None:
    firsts = [partition_sequence(65536, 4, model=GPT_7B, mix=mix)[0] for mix in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 5
    assert partition_sequence(10, 4, model=SMALL, mix=0.0) == partition_sequence(10, 4, strategy="even") == [3, 3, 2, 2]


def test_few_costs_stand_for_equal_pieces() -> None:
    # two pieces of 50 tokens, the second three times as dear: 200 in all, 100 in each segment
    assert partition_sequence(100, 2, strategy="profiled", costs=[50.0, 150.0]) == [67, 33]
    assert partition_sequence(100, 4, strategy="profiled", costs=[1.0]) == [25, 25, 25, 25]
    # costs that agree with the formula give the same segments, whatever their unit
    costs = [token_flops(SMALL, t) * 1e-12 for t in range(96)]
    assert partition_sequence(96, 4, strategy="profiled", costs=costs) == partition_sequence(96, 4, model=SMALL)


@pytest.mark.parametrize(
    ("seq_len", "num_segments", "options", "message"),
    [
        (0, 1, {"strategy": "even"}, "seq_len is 0, must be in 1..1099511627776"),
        (-5, 1, {"strategy": "even"}, "seq_len is -5"),
        ((1 << 40) + 1, 1, {"strategy": "even"}, "seq_len is 1099511627777"),
        (1 << 70, 1, {"strategy": "even"}, "1180591620717411303424 does not fit in 64 bits"),
        (8, 0, {"strategy": "even"}, "num_segments is 0, must be at least 1"),
        (8, -1, {"strategy": "even"}, "num_segments is -1"),
        (8, 9, {"strategy": "even"}, "num_segments is 9, more than the 8 tokens"),
        (8, 1 << 40, {"strategy": "even"}, "more than the 8 tokens"),
        (8, 2, {"strategy": "even", "multiple_of": 0}, "multiple_of is 0, must be at least 1"),
        (9, 4, {"strategy": "even", "multiple_of": 4}, "9 tokens hold only 3 segments of multiples of 4"),
        (8, 2, {"strategy": "fast"}, "strategy is 'fast', must be one of 'even', 'flops', 'profiled'"),
        (8, 2, {}, "strategy 'flops' needs model="),
        (8, 2, {"strategy": "profiled"}, "strategy 'profiled' needs costs="),
        (8, 2, {"strategy": "even", "model": SMALL}, "strategy 'even' takes no model="),
        (8, 2, {"model": SMALL, "costs": [1.0]}, "strategy 'flops' takes no costs="),
        (8, 2, {"model": SMALL, "mix": 1.5}, "mix is 1.5, must be in"),
        (8, 2, {"model": SMALL, "mix": math.nan}, "mix is nan"),
        (8, 2, {"model": SMALL._replace(hidden=0)}, "model hidden is 0, must be at least 1"),
        (8, 2, {"model": SMALL._replace(vocab=-1)}, "model vocab is -1, must be at least 0"),
        (8, 2, {"model": SMALL._replace(heads=3)}, "model heads is 3, must divide hidden 8"),
        (8, 2, {"model": SMALL._replace(heads=4, kv_heads=3)}, "model kv_heads is 3, must divide heads 4"),
        (8, 2, {"strategy": "even", "documents": [8]}, "documents= is for strategy 'flops', the strategy is 'even'"),
        (8, 2, {"model": SMALL, "documents": []}, "there are 0 documents"),
        (8, 2, {"model": SMALL, "documents": [5, 0, 3]}, "documents\\[1\\] is 0, must be at least 1 token"),
        (8, 2, {"model": SMALL, "documents": [8, 5, 4]}, "documents\\[2\\] has 4 tokens, its row has 3 left"),
        (8, 2, {"model": SMALL, "documents": [8, 5]}, "the last row of documents holds 5 tokens, must hold 8"),
        (8, 2, {"strategy": "profiled", "costs": []}, "there are 0 costs"),
        (8, 2, {"strategy": "profiled", "costs": [1.0, -2.0]}, "costs\\[1\\] is -2"),
        (8, 2, {"strategy": "profiled", "costs": [math.inf]}, "costs\\[0\\] is inf"),
        (8, 2, {"strategy": "profiled", "costs": [0.0]}, "costs sum to 0"),
        (8, 2, {"strategy": "profiled", "costs": [1.0, 1.7e308]}, "costs sum to 1.7e\\+308, must be above 0"),
    ],
)
def test_bad_arguments(seq_len: int, num_segments: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_sequence(seq_len, num_segments, **options)  # type: ignore[arg-type] # of any kind, by rows


def test_not_a_number() -> None:
    with pytest.raises(TypeError):
        partition_sequence(8.0, 2, strategy="even")  # type: ignore[arg-type] # no number of tokens
    with pytest.raises(TypeError):
        partition_sequence(8, 2, strategy="profiled", costs=["a"])  # type: ignore[list-item] # no number


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 0, 4], "segment 1 has 0 tokens, must have at least 1"),
        ([4, -1, 5], "segment 1 has -1 tokens"),
        ([4, 3], "segment sizes sum to 7, the sequence has 8 tokens"),
        ([4, 3, 2, 1], "segment sizes sum to 10, the sequence has 8 tokens"),
        ([1 << 63, 1], "sizes holds a number that is too large: 9223372036854775808"),
        ([], "there are 0 segment sizes"),
    ],
)
def test_bad_sizes(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_segment_sizes(sizes, 8)
