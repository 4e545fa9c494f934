"""The transport for Ray: its contract with a stand-in for Ray's classes, and with Ray itself where that is installed."""

import abc
import dataclasses
import gc
import importlib
import inspect
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import device_ipc
import device_ipc.torch as dt
from conftest import PRELUDE, Gate, used, wait_used

torch: Any = pytest.importorskip("torch", reason="torch cannot be imported", exc_type=ImportError)

GUIDE = Path(__file__).parents[2] / "docs/guide/ray.md"
TIMEOUT = 120


def filled(value: float, shape: "list[int]", dtype: Any = torch.float32) -> Any:
    """Returns a tensor in memory of the mock."""
    return dt.empty(shape, dtype, "mock:0").copy_(torch.full(shape, value).to(dtype))


# --- The contract, with a stand-in for Ray. ---


class Manager54(abc.ABC):
    """The abstract methods of Ray 2.54."""

    @abc.abstractmethod
    def tensor_transport_backend(self) -> str: ...
    @staticmethod
    @abc.abstractmethod
    def is_one_sided() -> bool: ...
    @staticmethod
    @abc.abstractmethod
    def can_abort_transport() -> bool: ...
    @abc.abstractmethod
    def actor_has_tensor_transport(self, actor: Any) -> bool: ...
    @abc.abstractmethod
    def extract_tensor_transport_metadata(self, obj_id: Any, gpu_object: Any) -> Any: ...
    @abc.abstractmethod
    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: Any = None) -> Any: ...
    @abc.abstractmethod
    def recv_multiple_tensors(self, obj_id: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> Any: ...
    @abc.abstractmethod
    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> Any: ...
    @abc.abstractmethod
    def garbage_collect(self, obj_id: Any, tensor_transport_meta: Any) -> Any: ...
    @abc.abstractmethod
    def abort_transport(self, obj_id: Any, communicator_metadata: Any) -> Any: ...


class Manager55(Manager54):
    """The abstract methods of Ray 2.55 and later."""

    @abc.abstractmethod
    def extract_tensor_transport_metadata(self, obj_id: Any, rdt_object: Any) -> Any: ...
    @abc.abstractmethod
    def recv_multiple_tensors(
        self, obj_id: Any, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> Any: ...
    @abc.abstractmethod
    def garbage_collect(self, obj_id: Any, tensor_transport_meta: Any, tensors: Any) -> Any: ...  # type: ignore[override]


@dataclasses.dataclass
class StandInMetadata:
    tensor_meta: "list[Any]"
    tensor_device: Any = None


@dataclasses.dataclass
class StandInCommunicator:
    pass


def module(name: str, **contents: Any) -> Any:
    made = types.ModuleType(name)
    vars(made).update(contents)
    return made


class StandIn:
    """The modules ``ray`` and ``ray.experimental`` of one version, and what was registered with them."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.registered: dict[str, tuple[Any, ...]] = {}
        self.node = "node-1"
        self.manager: type = Manager54 if version == 54 else Manager55
        self.experimental = module(
            "ray.experimental",
            TensorTransportManager=self.manager,
            TensorTransportMetadata=StandInMetadata,
            CommunicatorMetadata=StandInCommunicator,
            register_tensor_transport=self.register54 if version == 54 else self.register55,
        )
        self.ray = module(
            "ray",
            __version__=f"2.{version}.0",
            experimental=self.experimental,
            get_runtime_context=lambda: types.SimpleNamespace(get_node_id=lambda: self.node),
        )

    def register54(self, transport_name: str, devices: "list[str]", transport_manager_class: type) -> None:
        self.add(transport_name, devices, transport_manager_class)

    def register55(self, transport_name: str, devices: "list[str]", transport_manager_class: type, data_type: type) -> None:
        self.add(transport_name, devices, transport_manager_class, data_type)

    def add(self, name: str, *info: Any) -> None:
        if name.upper() in self.registered:
            raise ValueError(f"Transport {name.upper()} already registered.")
        if not issubclass(info[1], self.manager):
            raise ValueError("not a subclass of TensorTransportManager")
        self.registered[name.upper()] = info


@pytest.fixture(params=[54, 55])
def stand_in(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a stand-in, whose ``transport`` is ``device_ipc.ray`` on it."""
    made: Any = StandIn(request.param)
    before = used()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", made.ray)
        patch.setitem(sys.modules, "ray.experimental", made.experimental)
        sys.modules.pop("device_ipc.ray", None)
        made.transport = importlib.import_module("device_ipc.ray")
        yield made
    # The module on Ray itself is imported again.
    del sys.modules["device_ipc.ray"], vars(device_ipc)["ray"]
    wait_used(before)


def receive(manager: Any, metadata: Any, *buffers: Any) -> Any:
    return manager.recv_multiple_tensors("id", metadata, manager.get_communicator_metadata(None, None, "DEVICE_IPC"), *buffers)


def collect(stand_in: Any, manager: Any, metadata: Any, tensors: Any) -> None:
    """Ends an object as the version does."""
    manager.garbage_collect("id", metadata, *([] if stand_in.version == 54 else [tensors]))


def test_registration_by_version(stand_in: Any) -> None:
    stand_in.transport.register()
    stand_in.transport.register()
    [(name, info)] = stand_in.registered.items()
    assert name == "DEVICE_IPC" and info[0] == ["cuda", "npu", "cpu"]
    assert info[2:] == (() if stand_in.version == 54 else (torch.Tensor,))
    manager = info[1]()
    assert info[1].is_one_sided() and info[1].can_abort_transport() and manager.actor_has_tensor_transport(None)
    with pytest.raises(NotImplementedError, match="one-sided"):
        manager.send_multiple_tensors([], None, None)


def test_other_error_of_registration_is_raised(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "manager", int)
    with pytest.raises(ValueError, match="subclass"):
        stand_in.transport.register()


def test_old_ray_is_refused(stand_in: Any) -> None:
    del stand_in.experimental.register_tensor_transport
    sys.modules.pop("device_ipc.ray")
    try:
        with pytest.raises(ImportError, match=r"2\.54 or later"):
            importlib.import_module("device_ipc.ray")
    finally:
        sys.modules["device_ipc.ray"] = stand_in.transport


def test_object_lives_from_extraction_to_collection(stand_in: Any) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    before = used()
    tensors = [filled(1, [4]), filled(2, [2, 3], torch.bfloat16).t(), dt.empty([0, 3], torch.int8, "mock:0")]
    metadata = manager.extract_tensor_transport_metadata("id", tensors)
    assert manager.extract_tensor_transport_metadata("id", tensors) is metadata
    assert used() == (before[0] + 1, before[1])
    assert metadata.tensor_meta == [(tensor.shape, tensor.dtype) for tensor in tensors]
    assert metadata.tensor_device == (torch.device("cpu") if stand_in.version == 54 else "cpu")
    assert device_ipc.Descriptor(metadata.descriptor).names == ["0", "1", "2"]
    for _ in range(2):
        received = receive(manager, metadata)
        assert [(one.shape, one.dtype, one.stride()) for one in received] == [
            (one.shape, one.dtype, one.stride()) for one in tensors
        ]
        assert all(bool((one == other).all()) for one, other in zip(received, tensors, strict=True))
    received[0].add_(1)
    assert bool((tensors[0] == 2).all())
    collect(stand_in, manager, metadata, tensors)
    collect(stand_in, manager, metadata, tensors)
    with pytest.raises(device_ipc.StaleError):
        receive(manager, metadata)
    del received
    wait_used(before)


def test_object_without_tensors(stand_in: Any) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    metadata = manager.extract_tensor_transport_metadata("id", [])
    assert (metadata.tensor_meta, metadata.descriptor) == ([], None)
    assert receive(manager, metadata) == []
    collect(stand_in, manager, metadata, [])


def test_tensors_that_cannot_be_shared_are_refused(stand_in: Any) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    before = used()
    with pytest.raises(ValueError, match="cpu and meta"):
        manager.extract_tensor_transport_metadata("id", [filled(1, [4]), torch.empty(3, device="meta")])
    with pytest.raises(device_ipc.UnsupportedError, match="memory of the mock.*another tensor_transport"):
        manager.extract_tensor_transport_metadata("id", [filled(1, [4]), torch.ones(3)])
    assert used() == before


def test_other_node_is_named(stand_in: Any) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    tensors = [filled(1, [4])]
    metadata = manager.extract_tensor_transport_metadata("id", tensors)
    stand_in.node = "node-2"
    # A second node on the same host, as in Ray's own tests.
    assert len(receive(manager, metadata)) == 1
    collect(stand_in, manager, metadata, tensors)
    with pytest.raises(device_ipc.PlacementError, match="on the node node-1 and this process is on the node node-2") as failed:
        receive(manager, metadata)
    assert isinstance(failed.value.__cause__, device_ipc.StaleError)


def test_aborted_transfer_fails_and_releases(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    before = used()
    metadata = manager.extract_tensor_transport_metadata("id", [filled(1, [4])])
    manager.abort_transport("id", None)  # none is in progress
    assert manager._aborted == {}
    assert len(receive(manager, metadata)) == 1

    def open_aborted(*arguments: Any, **options: Any) -> Any:
        opened = dt.open(*arguments, **options)
        manager.abort_transport("id", None)
        return opened

    monkeypatch.setattr(stand_in.transport, "_tensors", types.SimpleNamespace(open=open_aborted))
    with pytest.raises(device_ipc.GoneError, match="aborted the transfer of the object id"):
        receive(manager, metadata)
    monkeypatch.undo()
    wait_used((before[0] + 1, before[1]))
    collect(stand_in, manager, metadata, [])
    wait_used(before)


def test_receiver_waits_for_the_work_of_the_sender(stand_in: Any) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    stream = device_ipc.Stream("mock:0")
    tensor = filled(1, [4])
    gate = Gate(stream)
    with device_ipc.share({"0": tensor}, ready=stream) as export:
        meta = stand_in.transport.Metadata([(tensor.shape, tensor.dtype)], "cpu", str(export), stand_in.node)
        gate.open_soon()
        assert len(receive(manager, meta)) == 1
        assert gate.is_open


def test_receive_into_buffers_is_a_copy_and_releases(stand_in: Any) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    before = used()
    metadata = manager.extract_tensor_transport_metadata("id", [filled(1, [4]), filled(2, [2])])
    buffers = [torch.zeros(4), torch.zeros(2)]
    received = receive(manager, metadata, buffers)
    assert all(one is other for one, other in zip(received, buffers, strict=True))
    assert [one.tolist() for one in buffers] == [[1] * 4, [2] * 2]
    wait_used((before[0] + 1, before[1]))
    collect(stand_in, manager, metadata, [])


def test_receive_options(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = stand_in.transport.DeviceIpcTransport()
    metadata = manager.extract_tensor_transport_metadata("id", [filled(1, [4])])
    home = device_ipc.Descriptor(metadata.descriptor).homes[0]
    for device in ["mock:1", {home: "mock:1"}]:
        stand_in.transport.receive_options(device=device)
        with pytest.raises(device_ipc.UnsupportedError, match="same process on device 1"):
            receive(manager, metadata)
    stand_in.transport.receive_options(device="mock:1", copy="staged-if-needed")
    opened = []

    def open_recorded(*arguments: Any, **options: Any) -> Any:
        opened.append(options)
        return dt.open(*arguments, **options)

    monkeypatch.setattr(stand_in.transport, "_tensors", types.SimpleNamespace(open=open_recorded))
    copy = receive(manager, metadata)[0]
    # A device would open the memory on its current stream; with a map, the host waits.
    assert copy.tolist() == [1] * 4 and opened[0]["device"] == {home: "mock:1"}
    copy.fill_(2)
    stand_in.transport.receive_options()
    assert receive(manager, metadata)[0].tolist() == [1] * 4


# --- Ray itself. ---


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Starts Ray on this machine, with the transport."""
    ray: Any = pytest.importorskip("ray", minversion="2.54", reason="Ray 2.54 or later is not installed")
    import device_ipc.ray as transport

    transport.register()
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_MODE", "disabled")
    # Otherwise the workers have no share of a machine that is busy.
    patch.setenv("RAY_worker_niceness", "0")
    yield
    patch.undo()


class Actor:
    """A sender and receiver of tensors."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.sent: list[Any] = []

    def make(self, value: float, shape: "list[int]", keep: bool = False) -> Any:
        tensor = dt.empty(shape, torch.float32, "mock:0").fill_(value)
        if keep:
            self.sent.append(tensor)
        return tensor

    def layers(self) -> "dict[str, Any]":
        matrix = dt.empty([4, 8], torch.bfloat16, "mock:0").copy_(torch.arange(32).view(4, 8))
        self.sent = [matrix]
        return {"matrix": matrix, "transposed": matrix.t()[2:], "scale": [dt.empty([1], torch.float64, "mock:0").fill_(3)], "step": 7}

    def read_layers(self, layers: "dict[str, Any]") -> "tuple[bool, int, int]":
        """Returns whether the values are the sender's, the distance of the tensors in elements, and the step."""
        expected = torch.arange(32).view(4, 8).to(torch.bfloat16)
        equal = torch.equal(layers["matrix"], expected) and torch.equal(layers["transposed"], expected.t()[2:])
        distance = layers["transposed"].data_ptr() - layers["matrix"].data_ptr()
        return equal and layers["scale"][0].item() == 3, distance // 2, layers["step"]

    def read(self, tensor: Any, keep: bool = False) -> "tuple[float, bool]":
        """Returns the sum, and whether the tensor lies in memory that the mock has mapped from another process."""
        if keep:
            self.held.append(tensor)
        ranges = [line.split()[0].split("-") for line in open("/proc/self/maps") if "memfd:device-ipc-mock" in line]
        return float(tensor.sum()), any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in ranges)

    def add(self, tensor: Any, value: float) -> None:
        tensor.add_(value)

    def sums(self) -> "list[float]":
        return [float(tensor.sum()) for tensor in self.held + self.sent]

    def drop(self) -> None:
        self.held.clear()
        self.sent.clear()

    def wait_freed(self) -> None:
        """Waits until Ray has freed the objects of the tensors that this actor has sent."""
        from ray.experimental import wait_tensor_freed

        for tensor in self.sent:
            wait_tensor_freed(tensor, TIMEOUT)

    def wait_counters(self, **expected: int) -> "dict[str, int]":
        """Waits until the counters have these values, and returns all."""
        deadline = time.monotonic() + TIMEOUT / 2
        while True:
            counters = device_ipc.counters()
            if all(counters[name] == value for name, value in expected.items()):
                return counters
            assert time.monotonic() < deadline, counters
            time.sleep(0.01)

    def devices(self, tensor: Any) -> "tuple[list[str], float]":
        tensor.add_(1)
        return [f"{device.device} {device.uuid}" for device in device_ipc.devices()], float(tensor.sum())

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def mappings(self) -> int:
        return sum("memfd:device-ipc" in line for line in open("/proc/self/maps"))

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def start_actor(ray: Any) -> Any:
    """Returns a function that starts an actor."""
    methods: dict[str, Any] = {name: method for name, method in vars(Actor).items() if not name.startswith("__")}
    for name in ("make", "layers"):
        methods[name] = ray.method(tensor_transport="device_ipc")(methods[name])
    # Workers cannot import this module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    remote = ray.remote(enable_tensor_transport=True, num_cpus=0)(type("Actor", (), {"__init__": Actor.__init__, **methods}))

    def start(**environment: str) -> Any:
        return remote.options(runtime_env={"env_vars": environment} if environment else None).remote()

    return start


@pytest.fixture(scope="module")
def pair(start_actor: Any) -> Any:
    return start_actor(), start_actor()


@pytest.fixture
def actors(ray: Any, pair: Any) -> Iterator[Any]:
    """Returns a sender and a receiver. After the test, neither has exports or leases."""
    sender, receiver = pair
    yield sender, receiver
    # Tracebacks of expected failures have references to objects.
    gc.collect()
    for actor in pair:
        get(ray, actor.drop.remote())
    for actor in pair:
        get(ray, actor.wait_counters.remote(exports=0, leases=0))


def get(ray: Any, *references: Any) -> Any:
    """Returns the values of references."""
    values = ray.get(list(references), timeout=TIMEOUT)
    return values[0] if len(values) == 1 else values


def test_stand_in_has_the_signatures_of_ray(ray: Any) -> None:
    manager = ray.experimental.TensorTransportManager
    registers = inspect.signature(ray.experimental.register_tensor_transport).parameters
    version = 55 if "data_type" in registers else 54
    expected: Any = Manager54 if version == 54 else Manager55
    assert manager.__abstractmethods__ == expected.__abstractmethods__
    for name in manager.__abstractmethods__:
        real, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (manager, expected))
        assert list(real) == list(ours), name
    assert list(registers) == list(inspect.signature(getattr(StandIn(version), f"register{version}")).parameters)
    names = [field.name for field in dataclasses.fields(ray.experimental.TensorTransportMetadata)]
    assert names == [field.name for field in dataclasses.fields(StandInMetadata)]


def test_receiver_reads_and_writes_the_memory_of_the_sender(ray: Any, actors: Any) -> None:
    sender, receiver = actors
    reference = sender.make.remote(2.0, [1000], True)
    assert get(ray, receiver.read.remote(reference)) == (2000.0, True)
    get(ray, receiver.add.remote(reference, 1.0))
    assert get(ray, sender.sums.remote()) == [3000.0]
    assert get(ray, receiver.read.remote(reference)) == (3000.0, True)


def test_object_of_many_tensors_is_one_export(ray: Any, actors: Any) -> None:
    sender, receiver = actors
    before = get(ray, sender.wait_counters.remote())["exports_total"]
    reference = sender.layers.remote()
    assert get(ray, receiver.read_layers.remote(reference)) == (True, 2, 7)
    assert get(ray, sender.wait_counters.remote(exports=1))["exports_total"] == before + 1


def test_memory_goes_back_when_the_object_is_out_of_scope(ray: Any, actors: Any) -> None:
    sender, receiver = actors
    reference = sender.make.remote(1.0, [1 << 20], True)
    get(ray, receiver.read.remote(reference, True))
    get(ray, sender.wait_counters.remote(exports=1, leases=1))
    del reference
    get(ray, sender.wait_freed.remote())
    # Ray has forgotten the object, and the sender its tensor. The lease of the receiver keeps the memory.
    get(ray, sender.drop.remote())
    assert get(ray, sender.wait_counters.remote(leases=1))["exported_bytes"] == 4 << 20
    assert get(ray, receiver.sums.remote()) == [float(1 << 20)]
    get(ray, receiver.drop.remote())
    assert get(ray, sender.wait_counters.remote(leases=0, exports=0))["exported_bytes"] == 0


def test_killed_actor_releases_and_its_tensors_stay_readable(ray: Any, actors: Any, start_actor: Any) -> None:
    sender, receiver = actors
    other = start_actor()
    reference, of_other = sender.make.remote(1.0, [4]), other.make.remote(2.0, [4])
    get(ray, other.read.remote(reference, True), receiver.read.remote(of_other, True))
    get(ray, sender.wait_counters.remote(exports=1, leases=1))
    ray.kill(other)
    get(ray, sender.wait_counters.remote(exports=1, leases=0))
    assert get(ray, receiver.sums.remote()) == [8.0]
    with pytest.raises((device_ipc.GoneError, device_ipc.StaleError, ray.exceptions.RayError)) as failed:
        get(ray, receiver.read.remote(of_other))
    assert not isinstance(failed.value, ray.exceptions.GetTimeoutError), failed.value
    # Neither actor was killed for the failure of the transfer.
    assert get(ray, receiver.sums.remote()) == [8.0]
    assert get(ray, receiver.read.remote(reference)) == (4.0, True)


def skip_without_put(ray: Any) -> None:
    """Skips a test where only actors can put objects."""
    if not hasattr(sys.modules.get("ray.experimental.rdt.rdt_manager"), "RDTSource"):
        pytest.skip(f"the driver of Ray {ray.__version__} cannot put objects")


def test_driver_puts_and_gets(ray: Any, actors: Any) -> None:
    skip_without_put(ray)
    sender, receiver = actors
    before = used()
    tensor = filled(2, [4])
    reference = ray.put(tensor, _tensor_transport="device_ipc")
    assert get(ray, receiver.read.remote(reference)) == (8.0, True)
    made = sender.make.remote(5.0, [4])
    assert get(ray, made).tolist() == [5.0] * 4
    del reference, made
    wait_used(before)


def test_driver_gets_into_buffers(ray: Any, actors: Any) -> None:
    if not hasattr(ray.experimental, "set_target_for_ref"):
        pytest.skip(f"Ray {ray.__version__} has no target buffers")
    sender, _ = actors
    reference = sender.make.remote(5.0, [4])
    buffer = torch.zeros(4)
    ray.experimental.set_target_for_ref(reference, [buffer])
    assert get(ray, reference) is buffer and buffer.tolist() == [5.0] * 4


def test_actor_that_does_not_see_the_device_opens_on_its_own(ray: Any, actors: Any, start_actor: Any) -> None:
    sender, _ = actors
    other = start_actor(DEVICE_IPC_MOCK="devices=2;visible=1")
    reference = sender.make.remote(1.0, [4], True)
    devices, total = get(ray, other.devices.remote(reference))
    here = [device.uuid for device in device_ipc.devices()]
    assert devices == [f"mock:0 {here[1]}"] and total == 8.0
    assert get(ray, sender.sums.remote()) == [8.0]
    ray.kill(other)


def test_memory_that_the_mock_has_not_allocated_is_refused(ray: Any) -> None:
    skip_without_put(ray)
    with pytest.raises(device_ipc.UnsupportedError, match="memory of the mock"):
        ray.put(torch.ones(4), _tensor_transport="device_ipc")


def test_thousand_objects_leave_nothing(ray: Any, actors: Any) -> None:
    sender, receiver = actors

    def use(count: int) -> None:
        results = [receiver.read.remote(sender.make.remote(float(number), [256])) for number in range(count)]
        assert get(ray, *results) == [(256.0 * number, True) for number in range(count)]
        get(ray, sender.wait_counters.remote(exports=0, leases=0))

    def state() -> "list[int]":
        return get(ray, sender.descriptors.remote(), receiver.descriptors.remote(), receiver.mappings.remote())  # type: ignore[no-any-return]

    for _ in range(2):
        use(50)
    before = state()
    for _ in range(20):
        use(50)
    after = state()
    assert all(later <= earlier + 2 for earlier, later in zip(before, after, strict=True)), (before, after)


def test_programs_of_the_guide_run(ray: Any) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    program = PRELUDE + "\n".join(blocks)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=TIMEOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
