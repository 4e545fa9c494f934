"""Options of share, open and channels: users, exposure, copies, device maps, notifications."""

import importlib
import inspect
import os
import pickle
import queue
from collections.abc import Callable

import numpy as np
import pytest

import device_ipc
import device_ipc.numpy
from conftest import Start, unique, used, wait_used
from test_share import finish, line, ones, tell

NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process of another user")
def test_memory_is_opened_by_permitted_users_only(start: Start) -> None:
    permitted, refused = device_ipc.share(ones(4), allow_users=[NOBODY]), device_ipc.share(ones(4))
    other = start(
        f"""
        import os
        os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
        for text, users in [(sys.argv[1], [0]), (sys.argv[1], []), (sys.argv[2], [0])]:
            try:
                d.open(text, allow_users=users)
                print("opened", flush=True)
            except d.Error as error:
                print(type(error).__name__, error, flush=True)
        """,
        str(permitted),
        str(refused),
    )
    # The broker permits it. The memory of the mock cannot cross users, except for that of file descriptors, which is the default in a
    # pid namespace other than the initial one.
    assert line(other).startswith(("Error open failed", "opened")) and permitted.opened == 1
    # An exporter that the importer does not trust, and an export that is not for this user.
    assert line(other).startswith("NotPermittedError")
    assert line(other).startswith("StaleError") and refused.opened == 0
    finish(other)


def test_exposure_is_a_policy() -> None:
    memory = np.from_dlpack(device_ipc.empty((1024,), "uint8", "mock:0"))
    memory[:] = 5
    part = memory[100:200]
    device_ipc.share(part).close(timeout=30)
    with pytest.raises(device_ipc.UnsupportedError):
        device_ipc.share(part, exposure="refuse")
    copied = device_ipc.share(part, exposure="copy")
    part[:] = 6
    with device_ipc.open(copied.descriptor) as mapping:
        assert (np.from_dlpack(mapping) == 5).all(), "importers read a copy"
    copied.close(timeout=30)
    with pytest.raises(ValueError, match='expected "allow", "refuse" or "copy"'):
        device_ipc.share(part, exposure="hide")  # type: ignore[arg-type]


def test_staged_memory_is_a_copy(start: Start) -> None:
    tensor = ones(4)
    export = device_ipc.share(tensor)
    other = start(
        """
        for copy, is_copy in [("never", False), ("staged-if-needed", False), ("staged", True)]:
            with d.open(sys.argv[1], device="mock:1", copy=copy) as mapping:
                assert mapping.is_copy is is_copy, (copy, mapping)
                np.from_dlpack(mapping)[:] = 3 if is_copy else 2
        """,
        str(export),
    )
    finish(other)
    assert (np.from_dlpack(tensor) == 2).all(), "a write to the copy stays there"
    with pytest.raises(ValueError, match='copy policy "maybe": expected one of never, if-needed'):
        device_ipc.open(str(export), copy="maybe")  # type: ignore[arg-type]


def test_changes_of_holders_are_reported(start: Start) -> None:
    export = device_ipc.share(ones(4))
    states: queue.Queue[list[str]] = queue.Queue()
    export.on_change(lambda: states.put([holder.state for holder in export.holders()]))
    other = start(
        """
        stream = d.Stream("mock:0")
        mapping = d.open(sys.argv[1], device="mock:0", stream=stream)
        print("open", flush=True)
        sys.stdin.readline()
        mapping.close(stream)
        sys.stdin.readline()
        """,
        str(export),
    )
    assert line(other) == "open"
    assert states.get(timeout=30) == ["in use"]
    tell(other, "close")
    while states.get(timeout=30) != ["idle"]:
        pass
    export.recall()
    while states.get(timeout=30) != []:
        pass
    tell(other, "end")
    finish(other)


def test_export_whose_callback_refers_to_it_ends_when_dropped() -> None:
    before = used()

    def make() -> str:
        export = device_ipc.share(ones(4))
        for _ in range(2):
            export.on_change(lambda: export.holders())
        return str(export)

    text = make()
    wait_used(before)
    with pytest.raises(device_ipc.StaleError):
        device_ipc.open(text)


def test_descriptor_for_changes_is_readable_until_it_is_cleared() -> None:
    import select

    export = device_ipc.share(ones(4))
    changes = export.changes()
    readable: Callable[[float], bool] = lambda seconds: bool(select.select([changes], [], [], seconds)[0])  # noqa: E731
    assert readable(0)
    changes.clear()
    assert not readable(0)
    with device_ipc.open(export.descriptor):
        assert readable(30) and readable(0)
        export.holders()
        assert readable(0)
        changes.clear()
    export.wait_released(timeout=30)
    assert readable(30)


def test_device_map_of_a_channel_places_messages_and_replies(start: Start) -> None:
    with device_ipc.listen(unique("python-map"), device_map={"mock:0": 1}) as listener:
        other = start(
            """
            channel = d.connect(unique("python-map"))
            message = channel.receive(timeout=30)
            [export] = message.exports
            print(export.device, *export.open().devices, flush=True)
            try:
                export.open(device="mock:0")
            except ValueError as error:
                print(type(error).__name__, flush=True)
            message.check()
            result = d.empty((4,), "float32", "mock:1")
            channel.send(b"reply", result, reply_to=message)
            try:
                channel.send(b"", d.empty((4,), "float32", "mock:0"))
            except d.PlacementError:
                print("refused", flush=True)
            channel.close(timeout=30)
            """
        )
        channel = listener.accept(timeout=30)
    channel.send(b"", ones(4))
    assert line(other) == "mock:1 mock:1"
    assert line(other) == "PlacementError"
    assert line(other) == "refused"
    reply = channel.receive(timeout=30)
    assert reply.data == b"reply" and reply.exports[0].device == "mock:0"
    with reply.open() as mapping:
        assert mapping.devices == ["mock:0"]
    del reply, mapping
    finish(other)


def test_device_map_is_checked() -> None:
    with pytest.raises(ValueError, match="identity of a device"):
        device_ipc.listen(unique("python-map-wrong"), device_map={"tpu": 0})
    with pytest.raises(device_ipc.PlacementError, match="conflicts"):
        device_ipc.listen(unique("python-map-wrong"), device_map={0: 1, 1: 1})
    export = device_ipc.share(ones(4))
    with pytest.raises(device_ipc.PlacementError, match="known only on a channel"):
        device_ipc.open(export.descriptor, device={0: "mock:1"})


def test_key_shorter_than_16_bytes_is_refused() -> None:
    for key in [b"", b"x" * 15]:
        text = f"the key has {len(key)} B; use at least 16 random bytes, the same on both sides"
        with pytest.raises(ValueError, match=text):
            device_ipc.listen("127.0.0.1:0", key=key)
        with pytest.raises(ValueError, match=text):
            device_ipc.connect("127.0.0.1:9", key=key, timeout=0)


@pytest.mark.parametrize("address", ["127.0.0.1", "some-name"])
def test_address_without_port_is_refused_with_the_form(address: str) -> None:
    key = b"a secret of 16 bytes or more"
    text = "expected HOST:PORT, such as 10.0.0.1:29531"
    with pytest.raises(device_ipc.Error, match=text):
        device_ipc.listen(address, key=key)
    with pytest.raises(device_ipc.Error, match=text):
        device_ipc.connect(address, key=key, timeout=0)


def test_open_of_an_object_that_is_no_descriptor_names_its_type() -> None:
    export = device_ipc.share(ones(4))
    with pytest.raises(TypeError, match=r"expected a Descriptor, its text or its bytes, not Export.*str\(export\)"):
        device_ipc.open(export)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not int"):
        device_ipc.open(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not NoneType"):
        device_ipc.pull_into(None, ones(4))  # type: ignore[arg-type]


def test_memory_that_the_framework_makes_read_only_is_not_pulled_into() -> None:
    export, array = device_ipc.share(ones(4)), np.from_dlpack(ones(4))
    array.flags.writeable = False
    with pytest.raises(ValueError, match="the tensor is read-only; pull into a writable one"):
        device_ipc.pull_into(str(export), array)
    with pytest.raises(ValueError, match='"weight" is read-only; pull into writable tensors'):
        device_ipc.pull_into(str(export), {"weight": array})


def test_map_names_a_home_device_that_is_not_visible(start: Start) -> None:
    tensor = device_ipc.empty((4,), "uint8", "mock:1")
    np.from_dlpack(tensor)[:] = 9
    export = device_ipc.share(tensor)
    other = start(
        """
        home = d.Descriptor(sys.argv[1]).homes[0]
        assert home not in [device.uuid for device in d.devices()]
        with d.open(sys.argv[1], device={home: "mock:0"}, copy="staged-if-needed") as mapping:
            print(np.from_dlpack(mapping).tolist(), *mapping.devices)
        """,
        str(export),
        DEVICE_IPC_MOCK="devices=1",
    )
    assert line(other) == "[9, 9, 9, 9] mock:0"
    finish(other)


def test_memory_that_was_opened_without_a_request_can_be_granted(start: Start) -> None:
    exporter = start("export = d.share(d.empty((4,), 'uint8', 'mock:0')); print(export, flush=True); sys.stdin.readline()")
    text = line(exporter)
    with device_ipc.open(text), device_ipc.open(text, timeout=0) as again:
        # A request to the exporter.
        granted = again.grant()
        with device_ipc.open(text, grant=granted):
            pass
    tell(exporter, "end")
    finish(exporter)


def test_grant_opens_a_dropped_export_once(start: Start) -> None:
    memory = ones(4)
    export = device_ipc.share(memory)
    grant = export.grant(60)
    text = str(grant)
    assert text.startswith("dipcg1:") and text[20:] not in repr(grant)
    spellings: list[str | bytes | device_ipc.Grant] = [text, f'"{text[:40]}\n{text[40:]}"', bytes(grant), grant]
    for same in spellings:
        assert device_ipc.Grant(same) == grant and hash(device_ipc.Grant(same)) == hash(grant)
    assert pickle.loads(pickle.dumps(grant)) == grant
    with pytest.raises(device_ipc.DescriptorError, match='not a device-ipc grant: expected the prefix "dipcg1:"'):
        device_ipc.open(export.descriptor, grant=str(export))
    with pytest.raises(device_ipc.DescriptorError, match="belongs to another descriptor"):
        device_ipc.open(device_ipc.share(ones(4)).descriptor, grant=grant)
    descriptor = str(export)
    del export
    other = start(
        """
        import device_ipc.numpy
        with device_ipc.numpy.open(sys.argv[1], grant=sys.argv[2]) as arrays:
            print(float(arrays.tensor.sum()), flush=True)
            del arrays
        d.close_unused(timeout=30)  # a lease that has not ended yet would serve the second open
        try:
            d.open(sys.argv[1], grant=d.Grant(sys.argv[2]))
        except d.StaleError as error:
            print(error, flush=True)
        """,
        descriptor,
        text,
    )
    assert line(other) == "4.0"
    assert "already been used" in line(other)
    finish(other)


def test_grant_that_is_given_back_ends() -> None:
    export = device_ipc.share(ones(4))
    grant = export.grant(None)
    assert len(export.holders()) == 1
    device_ipc.Grant(str(grant)).give_back()
    export.close(timeout=30)


def test_copied_text_of_a_descriptor_is_read() -> None:
    export = device_ipc.share(ones(4))
    text = str(export)
    for copied in [f"\ufeff{text}\r\n", f"'{text}'", f"{text[:60]}\n  {text[60:]}"]:
        assert device_ipc.Descriptor(copied) == export.descriptor
    with pytest.raises(device_ipc.DescriptorError, match='found 2 characters before it: "\\$ "'):
        device_ipc.open(f"$ {text}")


def test_repeated_elements_keep_their_strides(start: Start) -> None:
    memory = np.from_dlpack(device_ipc.empty((4,), "float32", "mock:0"))
    memory[:] = [1, 2, 3, 4]
    rows = np.lib.stride_tricks.as_strided(memory, (3, 4), (0, 4))
    many = np.lib.stride_tricks.as_strided(memory, (1 << 40, 4), (0, 4))
    export = device_ipc.share({"rows": rows, "many": many})
    other = start(
        """
        import device_ipc.numpy
        with device_ipc.numpy.open(sys.argv[1]) as arrays:
            assert arrays["rows"].tolist() == [[1, 2, 3, 4]] * 3 and arrays["rows"].strides == (0, 4)
            assert arrays["many"].shape == (1 << 40, 4) and arrays["many"][1 << 39].tolist() == [1, 2, 3, 4]
            assert arrays.mapping["many"].nbytes == 16
            del arrays
        """,
        str(export),
    )
    finish(other)


def test_counters_count() -> None:
    before = device_ipc.counters()
    export = device_ipc.share(ones(4))
    with device_ipc.open(export.descriptor):
        now = device_ipc.counters()
    assert now["exports_total"] == before["exports_total"] + 1
    assert now["leases_total"] == before["leases_total"] + 1


@pytest.mark.parametrize("framework", ["cupy", "numpy", "torch"])
def test_frameworks_open_with_the_same_options(framework: str) -> None:
    module = importlib.import_module(f"device_ipc.{framework}")
    options = set(inspect.signature(device_ipc.open).parameters) - {"allow_read_only"}
    assert options <= set(inspect.signature(module.open).parameters)


def test_numpy_opens_memory_of_a_permitted_user() -> None:
    export = device_ipc.share({"w": ones(4)}, allow_users=[NOBODY])
    with device_ipc.numpy.open(str(export), allow_users=[NOBODY]) as arrays:
        assert arrays["w"].shape == (4,)


def test_callback_that_the_collector_clears_before_its_export_is_not_called(start: Start) -> None:
    exporter = start(
        """
        import functools, gc
        class Ring: pass
        ring = Ring()
        callback = functools.partial(print, ring)
        ring.export = d.share(d.empty((4,), "uint8", "mock:0"))
        ring.export.on_change(callback)
        print(ring.export, flush=True)
        sys.stdin.readline()
        # The first that it clears is the ring, and the export ends with it; the next is the callback. The lease stays.
        ring.export.on_change(callback)
        del ring, callback
        # Not while a call of the callback, which has references to both, is under way.
        while not d.counters()["importers_lost_total"] or d.counters()["exported_bytes"]:
            gc.collect()
        # The jobs of the library's thread run in their order.
        with d.share(d.empty((4,), "uint8", "mock:0")):
            pass
        print("released", flush=True)
        sys.stdin.readline()
        """
    )
    importer = start("mapping = d.open(sys.argv[1]); print('open', flush=True); sys.stdin.readline()", line(exporter))
    assert line(importer) == "open"
    tell(exporter, "opened")
    importer.kill()
    while (text := line(exporter)) != "released":
        # The notification of the open.
        assert "Ring" in text
    tell(exporter, "end")
    finish(exporter)
