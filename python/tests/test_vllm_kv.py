"""vLLM's KV connector: a prefill and a decode engine whose scheduler and worker are this file's, with stand-ins of vLLM's classes."""

import dataclasses
import enum
import functools
import json
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT, Start, profiled
from vllm_modules import add

import device_ipc

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

BLOCK_TOKENS = 4
# What a scheduler gives out in a step that computes nothing.
IDLE = types.SimpleNamespace(total_num_scheduled_tokens=0)


class Status(enum.Enum):
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata

    def unregister_kv_caches(self) -> None: ...


class MambaSpec:
    pass


@dataclasses.dataclass
class TransferResults:
    finished_sending: "set[str]"
    finished_recving: "set[str]"
    failed_recving: "set[str]"


def connector_class() -> Any:
    """Returns the connector over stand-ins of vLLM 0.33."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector", "vllm.v1"):
        add(name)
    add("vllm.distributed.kv_transfer.kv_connector.v1")
    add(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        KVConnectorBase_V1=Base,
        KVConnectorMetadata=object,
        KVConnectorRole=Role,
        SupportsHMA=type("SupportsHMA", (), {}),
        KVConnectorTransferResults=TransferResults,
    )
    add("vllm.v1.kv_cache_interface", MambaSpec=MambaSpec)
    add("vllm.v1.request", RequestStatus=Status)
    from device_ipc.vllm.kv import DeviceIpcConnector

    return DeviceIpcConnector


class Request:
    def __init__(self, name: str, tokens: int, params: "dict[str, Any] | None") -> None:
        self.request_id = name
        self.prompt_token_ids = list(range(tokens))
        self.kv_transfer_params = params
        self.status = Status.FINISHED_LENGTH_CAPPED


class Blocks:
    def __init__(self, *groups: "list[int]") -> None:
        self.blocks = tuple([types.SimpleNamespace(block_id=number) for number in numbers] for numbers in groups)


class Engine:
    """A scheduler and one worker with a cache of some layers."""

    def __init__(
        self,
        role: str,
        blocks: int = 16,
        layers: int = 2,
        windows: "Sequence[int | None]" = (None,),
        ranks: int = 1,
        engine: "str | None" = None,
        **extra: Any,
    ) -> None:
        space = types.SimpleNamespace
        transfer = space(
            engine_id=engine or f"{role}-{uuid.uuid4().hex}",
            is_kv_producer=role == "prefill",
            is_kv_consumer=role == "decode",
            get_from_extra_config=lambda name, default: extra.get(name, default),
        )
        config = space(
            kv_transfer_config=transfer,
            model_config=space(model="m", revision=None, enable_sleep_mode=extra.get("sleep", False)),
            cache_config=space(block_size=BLOCK_TOKENS, cache_dtype="auto"),
            parallel_config=space(tensor_parallel_size=ranks, pipeline_parallel_size=1, rank=0),
        )
        names = [f"layer.{i}" for i in range(layers)]
        specs = [space(block_size=BLOCK_TOKENS, sliding_window=window) for window in windows]
        groups = [space(layer_names=names[i :: len(specs)], kv_cache_spec=spec) for i, spec in enumerate(specs)]
        caches = space(num_blocks=blocks, kv_cache_groups=groups)
        connector = connector_class()
        self.scheduler = connector(config, Role.SCHEDULER, caches)
        self.worker = connector(config, Role.WORKER, caches)
        self.caches = {name: self.memory((blocks, 2, BLOCK_TOKENS, 8)) for name in names}
        self.worker.register_kv_caches(self.caches)

    def memory(self, shape: "tuple[int, ...]") -> Any:
        return torch.from_dlpack(device_ipc.empty(shape, "float32", "mock:0")).fill_(-1)

    def step(self, output: Any = IDLE) -> "tuple[set[str], set[str], set[int]]":
        """Runs a step of the engine: requests that were sent, requests that have come, and blocks that have not."""
        self.worker.metadata = self.scheduler.build_connector_meta(output)
        self.worker.start_load_kv(None)
        sent, come = self.worker.get_finished(set())
        return sent or set(), come or set(), self.worker.get_block_ids_with_load_errors()

    def prefill(self, name: str, tokens: int, *groups: "list[int]") -> "dict[str, Any] | None":
        """Computes a prompt: each block gets its own number."""
        request = Request(name, tokens, {"do_remote_decode": True})
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, Blocks(*groups), 0)
        self.step()
        for cache in self.caches.values():
            for block in {block for blocks in groups for block in blocks}:
                cache[block] = block
        kept, params = self.scheduler.request_finished_all_groups(request, groups)
        assert kept
        return params  # type: ignore[no-any-return]

    def until(self, which: int) -> "set[Any]":
        """Steps until one of the three results is not empty."""
        deadline = time.monotonic() + LIMIT
        while True:
            found = self.step()[which]
            if found:
                return found
            assert time.monotonic() < deadline
            time.sleep(0.001)


def serve(arguments: "dict[str, Any]") -> None:
    """The prefill engine's process."""
    engine = Engine("prefill", **arguments)
    print("ready", flush=True)
    for line in sys.stdin:
        what, *values = json.loads(line)
        result: Any = None
        if what == "prefill":
            result = engine.prefill(*values)
        elif what == "sent":
            result = sorted(engine.until(0))
        elif what == "sleep":
            engine.worker.unregister_kv_caches()
        elif what == "wake":
            engine.worker.restore_kv_caches()
        elif what == "step":
            result = sorted(engine.step()[0])
        print(json.dumps(result), flush=True)


class Prefill:
    def __init__(self, start: Start, **arguments: Any) -> None:
        here = str(Path(__file__).parent)
        program = f"sys.path.insert(0, {here!r}); import test_vllm_kv; test_vllm_kv.serve({arguments!r})"
        self.process: "subprocess.Popen[str]" = start(program)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def ask(self, *words: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def arrive(engine: Engine, name: str, tokens: int, params: Any, blocks: "list[int]", computed: int = 0) -> Request:
    """Schedules a request of which the first tokens are in the cache already."""
    request = Request(name, tokens, params)
    engine.scheduler.on_new_request(request)
    count, is_async = engine.scheduler.get_num_new_matched_tokens(request, computed)
    assert (count, is_async) == ((tokens - computed, True) if tokens > computed else (0, False))
    engine.scheduler.update_state_after_alloc(request, Blocks(blocks), count)
    return request


def values(engine: Engine, blocks: "list[int]") -> "list[list[list[float]]]":
    return [[cache[block].unique().tolist() for cache in engine.caches.values()] for block in blocks]


def test_decode_reads_what_prefill_has_computed(start: Start) -> None:
    prefill, decode = Prefill(start), Engine("decode", blocks=32)
    params = prefill.ask("prefill", "p1", 10, [3, 7, 1])
    assert params["do_remote_prefill"]
    request = arrive(decode, "d1", 10, params, [20, 5, 6])
    assert decode.until(1) == {"d1"}
    assert values(decode, [20, 5, 6]) == [[[3.0], [3.0]], [[7.0], [7.0]], [[1.0], [1.0]]]
    assert all((cache == -1).sum() == 29 * cache[0].numel() for cache in decode.caches.values())
    assert prefill.ask("sent") == ["p1"]
    # Nothing is left to do for it.
    assert decode.scheduler.request_finished(request, [20, 5, 6, 8]) == (False, None)
    # The first block is here already, from a request with the same beginning.
    params = prefill.ask("prefill", "p2", 10, [2, 4, 9])
    arrive(decode, "d2", 10, params, [20, 10, 11], computed=4)
    assert decode.until(1) == {"d2"}
    assert values(decode, [10, 11]) == [[[4.0], [4.0]], [[9.0], [9.0]]]
    assert prefill.ask("sent") == ["p2"]
    # All of it is.
    params = prefill.ask("prefill", "p3", 8, [2, 4])
    arrive(decode, "d3", 8, params, [20, 10], computed=8)
    decode.step()
    deadline = time.monotonic() + LIMIT
    while prefill.ask("step") != ["p3"]:
        decode.step()
        assert time.monotonic() < deadline
    decode.worker.shutdown()


def with_calls(function: "Callable[[], Any]") -> "tuple[Any, int]":
    """Returns the result of a function, and the calls of functions in it, Python's and C's."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    return profiled(count, function), calls


def with_steps(function: "Callable[[], Any]") -> "tuple[Any, int]":
    """Returns the result of a function, and the steps of the interpreter in it."""
    steps = 0

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(), steps
    finally:
        sys.settrace(before)


class Block:
    """A block of vLLM. To read its number is a call."""

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def block_id(self) -> int:
        return self._number


def costs_of_a_request(start: Start, blocks: int, layers: int) -> "list[dict[str, int]]":
    """Returns the calls of functions, Python's and C's, in each method of the connectors for a prompt, and the steps of the interpreter."""
    prefill, decode = Prefill(start, blocks=blocks, layers=layers), Engine("decode", blocks=blocks, layers=layers)
    first = Engine("prefill")
    # Block 0 is that of vLLM for no block.
    pool = [Block(number) for number in range(blocks)]
    decode.scheduler.bind_gpu_block_pool(types.SimpleNamespace(blocks=pool))
    allocated = types.SimpleNamespace(blocks=(pool[1:],))
    numbers = list(range(1, blocks))
    tokens = len(numbers) * BLOCK_TOKENS
    costs: "list[dict[str, int]]" = []
    for cost in (with_calls, with_calls, with_steps):
        counts: "dict[str, int]" = {}

        def counted(target: Any, method: str, *arguments: Any) -> Any:
            result, counts[method] = cost(functools.partial(getattr(target, method), *arguments))  # noqa: B023
            return result

        name = f"r{len(costs)}"
        request = Request(name, tokens, prefill.ask("prefill", name, tokens, numbers))
        counted(decode.scheduler, "on_new_request", request)
        count, _ = counted(decode.scheduler, "get_num_new_matched_tokens", request, 0)
        counted(decode.scheduler, "update_state_after_alloc", request, allocated, count)
        decode.worker.metadata = counted(decode.scheduler, "build_connector_meta", IDLE)
        counted(decode.worker, "start_load_kv", None)
        if not costs:
            # The engines connect.
            assert decode.until(1) == {name}
        else:
            assert counted(decode.worker, "get_finished", set()) == (None, {name})
        # The prefill engine's part.
        request = Request(name, tokens, {"do_remote_decode": True})
        first.scheduler.update_state_after_alloc(request, allocated, 0)
        kept, params = counted(first.scheduler, "request_finished_all_groups", request, (numbers,))
        assert kept and len(json.dumps(params)) < 500
        costs.append(counts)
    assert values(decode, [1, blocks - 1]) == [[[1.0]] * layers, [[blocks - 1.0]] * layers]
    decode.worker.shutdown()
    first.worker.shutdown()
    return costs[1:]


def test_costs_do_not_depend_on_blocks_and_layers(start: Start) -> None:
    few, many = costs_of_a_request(start, 4, 1), costs_of_a_request(start, 600, 9)
    assert few == many and sum(few[0].values()) < 68 and sum(few[1].values()) < 950, (few, many)


def test_polls_without_news_look_at_no_connection(start: Start) -> None:
    prefill, decode = Prefill(start), Engine("decode")

    def poll(engine: Engine) -> int:
        found, calls = with_calls(lambda: engine.worker.get_finished(set()))
        assert found == (None, None)
        return calls

    idle = poll(decode)
    arrive(decode, "d1", 8, prefill.ask("prefill", "p1", 8, [3, 7]), [4, 5])
    assert decode.until(1) == {"d1"}
    assert poll(decode) == idle < 10
    # A request that waits has claimed its blocks.
    waiting = Request("d2", 8, prefill.ask("prefill", "p2", 8, [1, 2]))
    decode.scheduler.on_new_request(waiting)
    decode.step()
    assert poll(decode) == idle
    # A copy runs.
    (peer,) = decode.worker._importer._peers.values()
    waited = -1.0

    def query(seconds: float) -> None:
        nonlocal waited
        waited = seconds

    unfinished = types.SimpleNamespace(query=query)
    reader, peer._reader = peer._reader, types.SimpleNamespace(submit=lambda *_: unfinished)
    arrive(decode, "d3", 8, prefill.ask("prefill", "p3", 8, [6, 8]), [6, 7])
    decode.step()
    # Its event is queried, and nothing else.
    assert poll(decode) == idle + 1
    found, calls = with_calls(decode.step)
    assert found == (set(), set(), set()) and calls < 12
    # A step that computes nothing waits for it, as the next one would only look again.
    assert 0 < waited < 0.01
    decode.step(types.SimpleNamespace(total_num_scheduled_tokens=1))
    assert waited == 0
    unfinished.query = lambda seconds: []
    assert decode.until(1) == {"d3"}
    peer._reader = reader
    # The prefill engine has nothing to do before the first time limit.
    lender = Engine("prefill")
    idle = poll(lender)
    lender.prefill("p4", 8, [3, 7])
    lender.step()
    assert poll(lender) == idle < 10
    decode.worker.shutdown()
    lender.worker.shutdown()


def test_aborted_requests_give_their_blocks_back(start: Start) -> None:
    prefill, decode = Prefill(start), Engine("decode")
    params = prefill.ask("prefill", "p1", 8, [3, 7])
    request = Request("d1", 8, params)
    decode.scheduler.on_new_request(request)
    decode.step()
    assert prefill.ask("step") == []
    request.status = Status.FINISHED_ABORTED
    assert decode.scheduler.request_finished(request, []) == (False, None)
    deadline = time.monotonic() + LIMIT
    while prefill.ask("step") != ["p1"]:
        decode.step()
        assert time.monotonic() < deadline
    decode.worker.shutdown()


def test_prefill_that_dies_fails_the_blocks(start: Start) -> None:
    prefill, decode = Prefill(start), Engine("decode")
    params = prefill.ask("prefill", "p1", 8, [3, 7])
    prefill.process.kill()
    prefill.process.wait(LIMIT)
    arrive(decode, "d1", 8, params, [4, 5])
    deadline = time.monotonic() + LIMIT
    while True:
        _, come, failed = decode.step()
        if come:
            break
        assert time.monotonic() < deadline
    assert come == {"d1"} and failed == {4, 5}
    # A new engine is found by its own name.
    prefill = Prefill(start)
    arrive(decode, "d2", 8, prefill.ask("prefill", "p1", 8, [3, 7]), [4, 5])
    assert decode.until(1) == {"d2"} and values(decode, [4, 5]) == [[[3.0], [3.0]], [[7.0], [7.0]]]
    decode.worker.shutdown()


def test_restarted_prefill_of_the_same_name_is_found(start: Start) -> None:
    name = f"engine-{uuid.uuid4().hex}"
    prefill, decode = Prefill(start, engine=name), Engine("decode")
    arrive(decode, "d1", 8, prefill.ask("prefill", "p1", 8, [3, 7]), [4, 5])
    assert decode.until(1) == {"d1"}
    stale = prefill.ask("prefill", "p2", 8, [3, 7])
    prefill.process.kill()
    prefill.process.wait(LIMIT)
    prefill = Prefill(start, engine=name)
    params = prefill.ask("prefill", "p3", 8, [1, 2])
    # The decode engine does not look while it has nothing to do.
    arrive(decode, "d3", 8, params, [4, 5])
    assert decode.until(1) == {"d3"} and values(decode, [4, 5]) == [[[1.0], [1.0]], [[2.0], [2.0]]]
    # A ticket of the former engine is not taken for one of this one.
    arrive(decode, "d2", 8, stale, [6, 8])
    assert decode.until(2) == {6, 8}
    decode.worker.shutdown()


def test_sleep_gives_the_caches_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = Prefill(start, sleep=True), Engine("decode", sleep=True)
    mapped = device_ipc.counters()["mapped_bytes"]
    arrive(decode, "d1", 8, prefill.ask("prefill", "p1", 8, [3, 7]), [4, 5])
    assert decode.until(1) == {"d1"} and prefill.ask("sent") == ["p1"]
    # The decode engine gives back what sleeps, though it makes no step.
    prefill.ask("sleep")
    deadline = time.monotonic() + LIMIT
    while device_ipc.counters()["mapped_bytes"] > mapped:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    prefill.ask("wake")
    for _ in range(2):
        decode.worker.unregister_kv_caches()
    decode.worker.restore_kv_caches()
    arrive(decode, "d2", 8, prefill.ask("prefill", "p2", 8, [1, 2]), [4, 5])
    assert decode.until(1) == {"d2"} and values(decode, [4, 5]) == [[[1.0], [1.0]], [[2.0], [2.0]]]
    decode.worker.shutdown()
    monkeypatch.delattr(Base, "unregister_kv_caches")
    with pytest.raises(ValueError, match="sleep mode since vLLM 0.33"):
        Engine("decode", sleep=True)


def test_blocks_of_all_groups_are_read(start: Start) -> None:
    # The second group has lost the blocks before the window of 8 tokens, here and there.
    windows = [None, 8]
    prefill, decode = Prefill(start, blocks=32, windows=windows), Engine("decode", blocks=32, windows=windows)
    params = prefill.ask("prefill", "p1", 22, [1, 2, 3, 4, 5, 6], [0, 0, 0, 13, 14, 15])
    text = json.dumps(params)
    request = Request("d1", 22, params)
    decode.scheduler.on_new_request(request)
    # The last token is computed here, and so its window begins one token earlier.
    assert decode.scheduler.get_num_new_matched_tokens(request, 4) == (17, True)
    decode.scheduler.update_state_after_alloc(request, Blocks([7, 16, 17, 18, 19, 20], [0, 0, 0, 23, 24, 25]), 17)
    assert decode.until(1) == {"d1"}
    full, window = decode.caches.values()
    assert [full[block].unique().tolist() for block in (16, 17, 18, 19, 20)] == [[2.0], [3.0], [4.0], [5.0], [6.0]]
    assert [window[block].unique().tolist() for block in (23, 24, 25)] == [[13.0], [14.0], [15.0]]
    assert (full == -1).sum() == 27 * full[0].numel() and (window == -1).sum() == 29 * window[0].numel()
    assert prefill.ask("sent") == ["p1"]
    # The window of the last token begins in a block that the prefill engine has given back.
    request = Request("d2", 23, prefill.ask("prefill", "p2", 23, [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 14, 15]))
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    decode.step()
    assert prefill.ask("sent") == ["p2"]
    # vLLM 0.33 takes the requests that have failed; earlier versions cannot be notified of them.
    prefill.process.kill()
    for name in ("d3", "d4"):
        request = Request(name, 22, json.loads(text))
        decode.scheduler.update_state_after_alloc(request, Blocks([7, 8], [9, 10]), 21)
        decode.worker.metadata = decode.scheduler.build_connector_meta(IDLE)
        decode.worker.start_load_kv(None)
        deadline = time.monotonic() + LIMIT
        while name == "d3" and not (results := decode.worker.get_transfer_results(set())).finished_recving:
            assert time.monotonic() < deadline
        assert results.finished_recving == results.failed_recving == {"d3"}
    with pytest.raises(RuntimeError, match="d4 have not come"):
        decode.until(1)
    decode.worker.shutdown()


def test_prefill_in_another_container(start: Start) -> None:
    prefill, decode = Prefill(start), Engine("decode")
    params = prefill.ask("prefill", "p1", 8, [3, 7])
    params["device_ipc"]["host"][1] = "a name of its own"
    arrive(decode, "d1", 8, params, [4, 5])
    assert decode.until(1) == {"d1"} and values(decode, [4, 5]) == [[[3.0], [3.0]], [[7.0], [7.0]]]
    decode.worker.shutdown()


def test_prefill_on_another_host(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prefill = Prefill(start, other_hosts="pass")
    params = prefill.ask("prefill", "p1", 8, [3, 7])
    # Beside the parameters of NIXL's connector, which has the same keys otherwise.
    assert list(params) == ["device_ipc"]
    params["device_ipc"]["host"] = ["another boot", "far away"]
    decode = Engine("decode")
    request = arrive(decode, "d1", 8, dict(params), [4, 5])
    _, come, failed = decode.step()
    assert come == {"d1"} and failed == {4, 5} and "on the host far away" in caplog.text and "other_hosts" in caplog.text
    assert decode.scheduler.request_finished(request, [4, 5]) == (False, None)
    passing = Engine("decode", other_hosts="pass")
    request = Request("d2", 8, {**params, "do_remote_prefill": True})
    passing.scheduler.on_new_request(request)
    assert passing.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    passing.scheduler.update_state_after_alloc(request, Blocks([4, 5]), 0)
    assert passing.step() == (set(), set(), set()) and request.kv_transfer_params == {**params, "do_remote_prefill": True}
    with pytest.raises(ValueError, match="other_hosts is 'no'"):
        Engine("decode", other_hosts="no")


def test_parameters_of_others_are_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    decode = Engine("decode")
    ours: "dict[str, Any]" = {"version": 2, "engine": "p", "host": decode.scheduler._host, "ranks": 1, "ticket": 1, "blocks": [[0, 0, ""]]}
    cases: "list[tuple[dict[str, Any], str]]" = [
        ({"do_remote_prefill": True, "remote_host": "a"}, "not of a DeviceIpcConnector"),
        ({"do_remote_prefill": True, "device_ipc": {**ours, "ranks": 2}}, "tensor parallel size 2 there, 1 here"),
        ({"device_ipc": {**ours, "blocks": ours["blocks"] * 2}}, "2 groups of KV caches there, 1 here"),
        ({"device_ipc": {**ours, "version": 3}}, "version 3, not 2: the engines have different versions of device-ipc"),
    ]
    first = {name: value for name, value in ours.items() if name != "version"}
    cases.append(({"device_ipc": {**first, "blocks": [[0, "01000000"]]}}, "version 1, not 2"))
    wrong: "list[Any]" = [{"ticket": "1"}, {"engine": ["p"]}, {"host": None}, {"blocks": None}, {"blocks": [[0, ""]]}, {"blocks": [[0, 1, 2]]}]
    cases += [({"device_ipc": {**ours, **part}}, "not valid") for part in [*wrong, {"blocks": [[-1, 1, ""]]}]]
    cases.append(({"device_ipc": [1]}, "not valid"))
    for params, text in cases:
        caplog.clear()
        request = Request("d", 8, params)
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert text in caplog.text
    assert decode.scheduler.get_num_new_matched_tokens(Request("e", 8, None), 0) == (0, False)
    decode.worker.shutdown()


def test_schedulers_of_a_real_vllm() -> None:
    # In a process of its own: the stand-ins of this one take vLLM's place.
    program = [sys.executable, str(Path(__file__).with_name("vllm_schedulers.py")), "60"]
    there = subprocess.run([sys.executable, "-c", "import vllm.v1.core.sched.scheduler"], capture_output=True, timeout=LIMIT)
    if there.returncode != 0:
        pytest.skip("vLLM is not installed")
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert "all blocks equal, all returned" in done.stdout, done.stdout[-3000:] + done.stderr[-6000:]
