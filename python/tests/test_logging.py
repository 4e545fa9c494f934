"""The log events of the library in Python's ``logging``."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

import device_ipc
from conftest import LIMIT, Start

NAME = "device_ipc"


class Records(logging.Handler):
    """Collects records, and waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.records: "list[logging.LogRecord]" = []
        self.arrived = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()

    def emit(self, record: logging.LogRecord) -> None:
        assert self.gate.wait(LIMIT)
        with self.arrived:
            self.records.append(record)
            self.arrived.notify_all()

    def find(self, is_wanted: "Callable[[logging.LogRecord], bool]") -> logging.LogRecord:
        with self.arrived:
            assert self.arrived.wait_for(lambda: any(map(is_wanted, self.records)), LIMIT), self.records
            return next(filter(is_wanted, self.records))


@pytest.fixture
def handler() -> "Iterator[Records]":
    logger, handler = logging.getLogger(NAME), Records()
    logger.addHandler(handler)
    yield handler
    handler.gate.set()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    device_ipc.empty((1,), "uint8", "mock:0")


def tensor() -> device_ipc.Tensor:
    return device_ipc.empty((4,), "float32", "mock:0")


def test_killed_importer_is_logged(start: Start) -> None:
    # A process of its own: of the importers that are gone within one second, only the first is logged.
    exporter = start("""
        import logging
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(threadName)s %(message)s")
        export = d.share(d.empty((4,), "float32", "mock:0"))
        print(export)
        sys.stdin.read()
    """)
    assert exporter.stdout is not None
    text = exporter.stdout.readline().strip()
    importer = start("mapping = d.open(sys.argv[1])\nprint('open')\nsys.stdin.read()", text)
    assert importer.stdout is not None and importer.stdout.readline() == "open\n"
    importer.kill()
    line = exporter.stdout.readline()
    assert line.startswith("WARNING device_ipc.export device-ipc-poll an importer is gone without notice"), line
    assert f"pid={importer.pid}" in line


def test_level_of_the_logger_selects_events(handler: Records) -> None:
    device_ipc.share(tensor()).close(timeout=LIMIT)
    logging.getLogger(NAME).setLevel(logging.DEBUG)
    export = device_ipc.share(tensor())
    record = handler.find(lambda record: record.levelno == logging.DEBUG and record.name == "device_ipc.export")
    assert record.getMessage().startswith("shared export=") and record.threadName is None
    assert all(one.created >= record.created for one in handler.records if one.levelno == logging.DEBUG)
    export.close(timeout=LIMIT)


def test_slow_handler_delays_no_process_and_events_are_bounded(start: Start, handler: Records) -> None:
    logging.getLogger(NAME).setLevel(logging.DEBUG)
    handler.gate.clear()
    with device_ipc.share(tensor()) as export:
        importer = start("d.open(sys.argv[1])", str(export))
        export.wait_opened(timeout=LIMIT)
        shared = tensor()
        for _ in range(1100):
            device_ipc.share(shared)
        assert importer.wait(LIMIT) == 0
        handler.gate.set()
        handler.find(lambda record: "log events were dropped" in record.getMessage())


@pytest.mark.parametrize("handlers", ["", "logging.getLogger('device_ipc').addHandler(logging.NullHandler())"])
def test_process_without_a_handler_has_no_thread(handlers: str, start: Start) -> None:
    program = f"""
        import logging, threading
        {handlers}
        d.share(d.empty((4,), "float32", "mock:0")).close(timeout=60)
        assert threading.active_count() == 1, threading.enumerate()
        logging.basicConfig(stream=sys.stdout)
        assert threading.active_count() == 1
        d.share(d.empty((4,), "float32", "mock:0")).close(timeout=60)
        assert threading.active_count() == 2
    """
    process = start(program)
    assert process.wait(LIMIT) == 0


def test_exit_passes_the_last_events_on_and_a_forked_child_ends(start: Start) -> None:
    program = """
        import logging, os
        logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(process)d %(name)s %(message)s")
        export = d.share(d.empty((4,), "float32", "mock:0"))
        child = os.fork()
        if child == 0:
            try:
                d.share(d.empty((4,), "float32", "mock:0"))
            except d.ForkedError:
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        d.share(d.empty((4,), "float64", "mock:0"))
    """
    process = start(program)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    lines = [line for line in output.splitlines() if line.startswith(f"{process.pid} device_ipc.export shared")]
    assert len(lines) == 2, output
