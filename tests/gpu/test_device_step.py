"""The request table on the GPU, step inputs, and tokens drawn there: those of the CPU engine's sampler."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.attention.tree_masks import ancestor_masks
from headrace.core.plan import Admit, Fork, NewBlocks, StepPlan
from headrace.ops.triton import step
from headrace.ops.triton.trees import TreeSpans, commit_trees, move_paths
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import Sampler
from headrace.sampling.state import SamplingBatch, TreeRows
from headrace.worker.device_batch import DeviceBatchBuilder
from headrace.worker.device_table import DeviceTable
from headrace.worker.graphs import GraphKey, GraphLauncher

MAX_ROWS, MAX_LEN, PAGE, VOCAB = 8, 40, 16, 3000
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, seed=5),
    SamplingParams(temperature=1.3, top_k=7, seed=9),
    SamplingParams(temperature=0.9, top_p=0.8, seed=2**40 + 3),
    SamplingParams(temperature=1.0, min_p=0.1, top_k=50, top_p=0.95, seed=1),
    SamplingParams(temperature=1e-3, seed=3),
]
ROWS, KNOWN = [4, 0, 7, 2, 1, 6], [5, 9, 20, 1, 33, 16]


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def send(table, device):
    taken = table.patches.take()
    if taken is not None:
        segments, words = taken
        step.patch(table.view.words, torch.from_numpy(words).to(device), torch.from_numpy(segments).to(device))


@pytest.fixture
def table(device):
    table = DeviceTable(MAX_ROWS, MAX_LEN, 2, PAGE, device)
    rng = np.random.default_rng(0)
    admits = [
        Admit(
            row,
            str(row),
            rng.integers(0, VOCAB, known).tolist(),
            1,
            known - 1,
            params,
            params.seed or 0,
            row,
            frozenset(),
        )
        for row, known, params in zip(ROWS, KNOWN, PARAMS, strict=True)
    ]
    blocks = [
        NewBlocks(row, group, 0, [10 * row + 100 * group + index for index in range(3)])
        for row in ROWS
        for group in range(2)
    ]
    table.apply(StepPlan(0, admits=tuple(admits), new_blocks=tuple(blocks)))
    send(table, device)
    return table


def spans_of(rows, padded, device):
    zeros = [0] * padded
    return step.StepSpans(
        rows=i32(rows + [0] * (padded - len(rows)), device),
        query_start=i32(list(range(padded + 1)), device),
        num_rows=i32([len(rows)], device),
        token_ids=i32(zeros, device),
        positions=i32(zeros, device),
        seq_lens=i32(zeros, device),
        slots=i32([zeros, zeros], device),
    )


def test_patches_bring_rows_and_blocks(table):
    for row, known in zip(ROWS, KNOWN, strict=True):
        assert table.view.tokens()[row, :known].tolist() == table.host.token_ids[row, :known].tolist()
        assert table.view.block_table(1)[row].tolist() == [10 * row + 100 + index for index in range(3)]


def test_a_row_that_changes_hands_twice_in_a_plan_is_sent_as_it_ends_up(table, device):
    plain = SamplingParams(temperature=0)
    admits = [Admit(4, name, ids, 1, 0, plain, 0, 0, frozenset()) for name, ids in (("a", [1, 2, 3]), ("b", [7, 8]))]
    blocks = [NewBlocks(4, 0, 0, [50, 51]), NewBlocks(4, 0, 0, [60])]
    table.apply(StepPlan(1, admits=tuple(admits), new_blocks=tuple(blocks), forks=(Fork(0, 2, 77),)))
    send(table, device)
    assert table.view.tokens()[4, :2].tolist() == [7, 8] and int(table.view.records()[4, step.KNOWN]) == 2
    assert table.view.block_table(0)[4, :2].tolist() == [60, 51]
    assert table.view.tokens()[2, :9].tolist() == [*table.view.tokens()[0, :8].tolist(), 77]


def test_inputs_of_a_padded_decode_step(table, device):
    spans = spans_of(ROWS, 8, device)
    step.build_inputs(table.view, spans, 1, PAGE)
    assert spans.positions.tolist() == [known - 1 for known in KNOWN] + [0, 0]
    assert spans.seq_lens.tolist() == [*KNOWN, 0, 0]
    tokens = [int(table.host.token_ids[row, known - 1]) for row, known in zip(ROWS, KNOWN, strict=True)]
    assert spans.token_ids.tolist()[:6] == tokens
    slots = [(10 * r + 100 + (k - 1) // PAGE) * PAGE + (k - 1) % PAGE for r, k in zip(ROWS, KNOWN, strict=True)]
    assert spans.slots[1].tolist() == [*slots, -1, -1]


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_those_of_the_sampler(table, device, seed):
    spans, lines = spans_of(ROWS, 8, device), step.Lines(i32(list(range(8)), device), i32(list(range(8)), device))
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(2):
        logits = torch.randn(8, VOCAB, device=device, generator=generator) * 3
        known = table.view.records()[:, step.KNOWN].cpu().numpy().copy()
        batch = SamplingBatch(
            table.host.sampling, np.array(ROWS), known[ROWS].astype(np.int64), np.zeros((8, 1), np.int32)
        )
        want = Sampler().draw(logits[:6].cpu().numpy().copy(), batch)[0]
        drawn = i32([-9] * 8, device)
        step.draw_and_commit(table.view, spans, lines, logits, True, True, drawn)
        assert drawn.tolist()[:6] == want.tolist() and drawn.tolist()[6:] == [-9, -9]
        after = table.view.records()[:, step.KNOWN].cpu().numpy()
        assert (after[ROWS] == known[ROWS] + 1).all()
        for row, token in zip(ROWS, want.tolist(), strict=True):
            assert int(table.view.tokens()[row, known[row]]) == token


def test_a_span_that_yields_nothing_only_advances(table, device):
    spans = spans_of(ROWS[:2], 2, device)
    logits, drawn = torch.randn(1, VOCAB, device=device), i32([-9, -9], device)
    before = table.view.records().clone()
    lines = step.Lines(i32([1], device), i32([-1, 0], device))
    step.draw_and_commit(table.view, spans, lines, logits, False, False, drawn)
    after = table.view.records()
    assert drawn.tolist() == [-9, int(logits[0].argmax())]
    for row, known in ((ROWS[0], 0), (ROWS[1], 1)):
        assert int(after[row, step.KNOWN] - before[row, step.KNOWN]) == known
        assert int(after[row, step.COMPUTED] - before[row, step.COMPUTED]) == 1


@pytest.mark.parametrize("damaged", [None, 0, 1, 2], ids=["sound", "first", "second", "third"])
def test_drafts_are_judged_as_the_sampler_does(table, device, damaged):
    """Spans of 1 + d tokens, at every position drawn with its own noise; the first `right` drafts are what is drawn."""
    counts, right = [0, 3, 2, 1, 3, 2], [0, 3, 1, 0, 2, 2]
    lengths = [1 + count for count in counts]
    starts = np.cumsum([0, *lengths])
    spans = replace(spans_of(ROWS, 6, device), query_start=i32(starts.tolist(), device))
    span_of = np.repeat(np.arange(6, dtype=np.int32), lengths)
    within = np.arange(len(span_of)) - starts[span_of]
    logits = torch.randn(len(span_of), VOCAB, device=device, generator=torch.Generator(device).manual_seed(5)) * 3
    known, rows = np.array(KNOWN), np.array(ROWS)
    positions = known[span_of] + within
    batch = SamplingBatch(table.host.sampling, rows[span_of], positions, np.zeros((8, 1), np.int32))
    would = Sampler().draw(logits.cpu().numpy().copy(), batch)[0]
    drafts = np.full(len(span_of), -1, np.int32)
    for line, (span, place) in enumerate(zip(span_of.tolist(), within.tolist(), strict=True)):
        if place < counts[span]:
            drafts[line] = would[line] if place < right[span] else (would[line] + 1) % VOCAB
            table.view.tokens()[ROWS[span], KNOWN[span] + place] = int(drafts[line])
    if damaged is not None:
        logits[starts[1] + damaged, 9] = float("nan")
    before = table.view.records().cpu().numpy().copy()
    want = Sampler().sample(logits.cpu().numpy().copy(), batch, span_of, 6, drafts)
    lines = step.Lines(i32(span_of.tolist(), device), i32(starts[:-1].tolist(), device), i32(counts, device))
    drawn = i32([[-9] * 4] * 8, device)
    step.draw_and_commit(table.view, spans, lines, logits, True, True, drawn)
    after, told = table.view.records().cpu().numpy(), drawn.tolist()
    assert damaged != 0 or (list(want.errors) == [1] and told[1][0] == -2)
    for span in range(6):
        if span in want.errors:
            continue
        count, row = int(want.counts[span]), ROWS[span]
        got = told[span][: lengths[span]]
        got = got[: got.index(-1)] if -1 in got else got
        assert got == want.tokens[span, :count].tolist()
        assert table.view.tokens()[row, KNOWN[span] : KNOWN[span] + count].tolist() == got
        assert after[row, step.KNOWN] - before[row, step.KNOWN] == count
        assert after[row, step.COMPUTED] - before[row, step.COMPUTED] == count, "what was refused is set back"
    assert damaged is not None or want.counts.tolist() == [r + 1 for r in right]


def test_a_row_that_holds_the_end_of_a_sequence_draws_with_the_noise_of_its_place_there(table, device):
    spans, lines = spans_of(ROWS, 6, device), step.Lines(i32(list(range(6)), device), i32(list(range(6)), device))
    logits = torch.randn(6, VOCAB, device=device, generator=torch.Generator(device).manual_seed(7))
    table.view.records()[:, step.SHIFT] = 11
    batch = SamplingBatch(
        table.host.sampling, np.array(ROWS), np.array(KNOWN, np.int64) + 11, np.zeros((8, 1), np.int32)
    )
    drawn = i32([-9] * 6, device)
    want = Sampler().draw(logits.cpu().numpy().copy(), batch)[0]
    step.draw_and_commit(table.view, spans, lines, logits, True, True, drawn)
    assert drawn.tolist() == want.tolist()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_damaged_logits_are_told(table, device, broken):
    spans, lines = spans_of(ROWS, 6, device), step.Lines(i32(list(range(6)), device), i32(list(range(6)), device))
    logits = torch.randn(6, VOCAB, device=device)
    logits[2, 55] = broken
    drawn = i32([-9] * 6, device)
    step.draw_and_commit(table.view, spans, lines, logits, True, False, drawn)
    assert drawn.tolist()[2] == -2 and drawn.tolist()[0] == int(logits[0].argmax())


def test_long_prompts_are_left_to_the_library_but_for_graphs(device):
    builder = DeviceBatchBuilder(DeviceTable(4, 64, 1, PAGE, device), 4, 64, 8, 20, device)
    plan = StepPlan(0, np.array([[0, 1], [0, 0], [24, 5], [0, 0]], np.int32), yields=np.array([True, True]))
    eager = builder.send(plan, None)
    assert eager.alone == ((0, 24),) and eager.tiles is not None
    assert eager.tiles[0].tolist() == [1], "tiles of the short prompt only"
    padded = builder.send(plan, GraphKey(4, 32, False, False))
    assert padded.alone == () and padded.tiles is not None
    assert padded.tiles[0].tolist() == [0, 0, 0, 1, -1, -1, -1, -1] and padded.tiles[1].tolist()[:4] == [0, 8, 16, 0]


class TestGraphs:
    """Which step runs under which graph; nothing is captured here."""

    def launcher(self, capturing):
        launcher = GraphLauncher(lambda key: None, lambda key: None, 100, 4096, True, capturing)
        captured = []
        launcher._record = lambda key: (captured.append(key), launcher._graphs.__setitem__(key, FakeGraph()))
        return launcher, captured

    def test_a_graph_is_captured_once_its_want_has_cost_as_much(self):
        launcher, captured = self.launcher(True)
        launcher._costs.extend([9.0, 0.1, 0.1])  # the first one compiled kernels
        key, small = launcher.pick(5, 5, False, False), launcher.pick(1, 1, False, False)
        assert key == GraphKey(8, 8, False, False) and key.decodes
        launcher._graphs[small] = FakeGraph()
        launcher.observe(small, True, sent=0.001, ran=0.030)
        launcher.observe(small, True, sent=0.001, ran=0.010)
        for _ in range(4):  # each loses 40 - 10 ms
            assert not launcher.serves(key) and not captured
            launcher.observe(key, False, sent=0.020, ran=0.040)
        assert launcher.serves(key) and captured == [key]
        assert launcher.counts.eager == 4 and launcher.counts.lost_seconds == pytest.approx(0.12)
        launcher.run(key, 5)
        assert launcher.counts.replays == 1 and launcher.counts.padding == 3
        (said,) = launcher.counts.lines()
        assert said.startswith("graphs: 1 of 5 steps (20%) were replayed, 38% of their tokens padding; 1 captured in")

    def test_mixed_steps_only_where_the_host_is_slower(self):
        launcher, captured = self.launcher(True)
        key = launcher.pick(8, 300, True, False)
        assert key == GraphKey(16, 384, True, False) and not key.decodes, "one span more, for the padding"
        for _ in range(100):
            launcher.observe(key, False, sent=0.001, ran=0.010)
        assert not any(launcher.serves(key) for _ in range(5)) and launcher.counts.lost_seconds == 0
        for _ in range(11):
            launcher.observe(key, False, sent=0.009, ran=0.010)
        assert launcher.serves(key) and captured == [key]

    def test_steps_are_not_said_to_become_faster_for_ever(self):
        """Each that is said to has lost a good part of its time, so after a few its graph repays."""
        launcher, _ = self.launcher(True)
        launcher._costs.extend([0.1] * 9)
        key, mixed, small = (launcher.pick(*size, False, False) for size in ((5, 5), (8, 300), (1, 1)))
        assert not launcher.observe(mixed, False, sent=0.001, ran=0.010), "no graph will come of these"
        launcher.observe(small, True, sent=0.001, ran=0.010)
        assert not launcher.observe(small, True, sent=0.001, ran=0.020)
        assert launcher.observe(key, False, sent=0.020, ran=0.015)
        assert not launcher.observe(key, False, sent=0.010, ran=0.010), "nothing was lost"
        for ran in (0.0101, 0.0105, 0.012, 0.02):
            told = 0
            launcher._lost.clear()
            while not launcher._repays(key) and told < 1000:
                told += launcher.observe(key, False, sent=0.001, ran=ran)
            assert told <= 0.1 / (0.1 * ran) + 1
        launcher._capturing_failed = "out of memory"
        assert not launcher.observe(key, False, sent=0.020, ran=0.015)

    def test_idle_moments_take_what_lost_most_one_at_a_time(self):
        launcher, captured = self.launcher(True)
        keys = [launcher.pick(rows, rows, False, False) for rows in (4, 8, 16, 32)]
        assert not launcher.capture_idle(), "nothing was missed yet"
        for key, lost in zip(keys, (0.02, 0.05, 0.009, 0.03), strict=True):
            launcher.observe(key, False, sent=lost, ran=0.0)
        launcher._graphs[keys[3]] = FakeGraph()  # captured since
        assert launcher.capture_idle() and captured == [keys[1]]
        launcher._costs.clear()  # a fake takes no time
        assert launcher.capture_idle() and captured == [keys[1], keys[0]]
        launcher._costs.clear()
        assert not launcher.capture_idle(), "less than a tenth of what a capture takes was lost"
        assert launcher.counts.idle_captures == launcher.counts.captures == 2
        off, _ = self.launcher(False)
        off.observe(keys[0], False, 1.0, 1.0)
        assert not off.capture_idle()

    def test_captures_cost_at_most_what_their_want_has_cost(self):
        """Whatever comes: time lost and spent on captures is at most twice what it is for who knows what will come, and
        one step beside."""
        rng = np.random.default_rng(0)
        for _ in range(20):
            launcher, captured = self.launcher(True)
            cost, loss = 0.1, 0.007
            launcher._costs.append(cost)
            counts = rng.integers(0, 60, 6)
            keys = [launcher.pick(rows, rows, False, False) for rows in (1, 2, 4, 8, 16, 24)]
            for key in rng.permutation(np.repeat(np.arange(6), counts)).tolist():
                launcher._costs.clear()
                launcher._costs.append(cost)
                if not launcher.serves(keys[key]):
                    launcher.observe(keys[key], False, loss, loss)
            best = np.minimum(counts * loss, cost).sum()
            assert launcher.counts.lost_seconds + len(captured) * cost <= 2 * best + 6 * loss

    def test_short_steps_have_a_span_more_for_padding_and_a_line_a_token(self):
        launcher = GraphLauncher(lambda key: None, lambda key: None, 8, 4096, True, False, most_short=45)
        assert launcher.pick_short(3, 13, True, False) == GraphKey(5, 15, True, False, True)
        assert launcher.pick_short(8, 42, False, False) == GraphKey(9, 45, False, False, True)
        assert launcher.pick_short(8, 46, False, False) is None and launcher.pick_short(9, 20, False, False) is None
        key = launcher.pick_short(2, 3, False, False)
        assert key == GraphKey(3, 3, False, False, True) and key.short and not key.decodes

    def test_what_is_too_large_has_no_key(self):
        launcher, _ = self.launcher(True)
        assert launcher.pick(3, 3000, False, False) is None and launcher.pick(101, 102, False, False) is None
        assert launcher.pick(100, 100, False, False) == GraphKey(100, 100, False, False)

    def test_mixed_steps_of_a_full_table_have_a_graph(self):
        launcher, _ = self.launcher(True)
        assert launcher.pick(100, 101, False, False) == launcher.pick(97, 128, False, False)
        assert launcher.pick(100, 101, False, False) == GraphKey(101, 128, False, False)

    def test_a_capture_that_fails_is_said_once_and_never_tried_again(self, capsys):
        launcher, _ = self.launcher(True)

        def fail(key):
            raise RuntimeError("CUDA out of memory\nand more")

        launcher._record = fail
        keys = [launcher.pick(rows, rows, False, False) for rows in (1, 2)]
        for key in keys:
            launcher.observe(key, False, 1.0, 1.0)
        assert not any(launcher.serves(key) for key in keys for _ in range(4))
        assert capsys.readouterr().err == "headrace: goes on without more CUDA graphs: CUDA out of memory\n"


class FakeGraph:
    def replay(self):
        pass


def test_trees_are_judged_as_the_sampler_does(table, device, random):
    """Each node is drawn at with the noise of its depth; the walk, what it leaves in the table, and what moves."""
    rng, rows = np.random.default_rng(3), np.array(ROWS)
    counts = [0, 5, 7, 2, 4, 0]  # of which that of two is a chain
    lengths = [1 + count for count in counts]
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    span_of = np.repeat(np.arange(6, dtype=np.int32), lengths)
    parents = np.full(total, -2, np.int32)
    for span in (1, 2, 4):
        first = starts[span]
        parents[first : first + lengths[span]] = [-1, *(int(rng.integers(0, node)) for node in range(1, lengths[span]))]
    masks, depths = ancestor_masks(parents, starts.astype(np.int32))
    place = np.arange(total) - starts[span_of]
    above = np.where(parents == -2, place - 1, parents)
    positions = np.array(KNOWN)[span_of] + depths
    logits = torch.randn(total, VOCAB, device=device, generator=torch.Generator(device).manual_seed(5)) * 3
    batch = SamplingBatch(table.host.sampling, rows[span_of], positions, np.zeros((8, 1), np.int32))
    would = Sampler().draw(logits.cpu().numpy().copy(), batch)[0]
    tokens, taken = np.full(total, -1, np.int32), set()
    for line in np.flatnonzero(place > 0).tolist():
        span, parent = int(span_of[line]), int(starts[span_of[line]] + above[line])
        right = int(would[parent])
        token = right if (parent, right) not in taken and rng.random() < 0.7 else (right + line) % VOCAB
        taken.add((parent, token))
        tokens[line] = token
        table.view.tokens()[ROWS[span], KNOWN[span] + int(place[line]) - 1] = token
    linked = np.where(parents >= 0, parents + starts[span_of], parents).astype(np.int32)
    drafts = np.where(parents == -2, np.append(tokens[1:], -1), -1).astype(np.int32)
    trees = replace(batch, trees=TreeRows(linked, tokens))
    want = Sampler().sample(logits.cpu().numpy().copy(), trees, span_of, 6, drafts)
    assert max(want.counts) > 2

    zeros = [0] * total
    spans = step.StepSpans(
        i32(ROWS, device), i32(starts.tolist(), device), i32([6], device), i32(zeros, device), i32(zeros, device),
        i32([0] * 6, device), i32([zeros, zeros], device),
    )  # fmt: skip
    step.build_inputs(table.view, spans, 10, PAGE)
    shift = i32((depths - place).tolist(), device)
    lines = step.Lines(i32(span_of.tolist(), device), i32(starts[:-1].tolist(), device), i32(counts, device), shift)
    tree = TreeSpans(torch.from_numpy(masks).to(device), shift, i32(above.tolist(), device))
    drawn, paths = i32([[-9] * 10] * 8, device), i32([[-9] * 10] * 8, device)
    before = table.view.records().cpu().numpy().copy()
    draws = step.draw(table.view, spans, lines, logits, True, True)
    commit_trees(table.view, spans, lines, draws, tree, drawn, paths)
    after, told = table.view.records().cpu().numpy(), drawn.tolist()
    cache = random(180, 2, PAGE, 8), random(180, 2, PAGE, 8)
    old = [pages.clone() for pages in cache]
    move_paths(cache, 1, spans, paths)
    slots, moved = spans.slots[1].tolist(), 0
    for span, row in enumerate(ROWS):
        count = int(want.counts[span])
        got = told[span][: lengths[span]]
        got = got[: got.index(-1)] if -1 in got else got
        assert got == want.tokens[span, :count].tolist()
        assert table.view.tokens()[row, KNOWN[span] : KNOWN[span] + count].tolist() == got
        for word in (step.KNOWN, step.COMPUTED):
            assert after[row, word] - before[row, word] == count
        own = np.flatnonzero(want.taken[starts[span] : starts[span + 1]]).tolist()[1:]
        assert paths[span, :count].tolist() == [count - 1, *own]
        for depth, node in enumerate(own, 1):
            source, target = slots[starts[span] + node], slots[starts[span] + depth]
            moved += node != depth
            for pages, earlier in zip(cache, old, strict=True):
                assert torch.equal(pages[target // PAGE, :, target % PAGE], earlier[source // PAGE, :, source % PAGE])
    assert moved
