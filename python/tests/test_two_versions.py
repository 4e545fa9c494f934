"""Two versions of PyTorch in one pipeline, on the mock: no payload of this library depends on the version.

`DEVICE_IPC_OTHER_TORCH` names a directory with another version than that of this environment, as `.ci/nightly` installs it; without it,
the tests are skipped.
"""

import ast
import os
from pathlib import Path

import pytest

from conftest import Start
from test_share import finish, line, tell

OTHER = os.environ.get("DEVICE_IPC_OTHER_TORCH", "")
pytestmark = pytest.mark.skipif(not OTHER, reason="DEVICE_IPC_OTHER_TORCH names no other version of PyTorch")

BOTH = """
import base64, pickle, sys
sys.path.insert(0, sys.argv[1])
import torch, device_ipc.torch as dt
import torch_over_mock as mock
from multiprocessing.reduction import ForkingPickler
mock.enter(payload_lifetime=600)

def say(value):
    print(value, flush=True)

def told():
    return sys.stdin.readline().strip()

say(torch.__version__)
"""

SENDER = BOTH + """
names = ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"]
state = {name: dt.empty([8], getattr(torch, name), "mock:0") for name in names}
for tensor in state.values():
    tensor.copy_(torch.ones(8).to(tensor.dtype))
export = d.share(state)
say(export)
with d.listen(sys.argv[2], backend="mock") as listener:
    say("listening")
    channel = listener.accept(timeout=60)
channel.send(b"", state["float32"])
with channel.receive(timeout=60).open() as mapping:
    say(torch.from_dlpack(mapping.tensor).sum().item())
parameter = torch.nn.Parameter(mock.filled(2, [4, 4]))
say(base64.b64encode(bytes(ForkingPickler.dumps(parameter))).decode())
told()
"""

RECEIVER = BOTH + """
with dt.open(told()) as state:
    say({name: (str(tensor.dtype), tensor.to(torch.complex64).sum().real.item()) for name, tensor in state.items()})
channel = d.connect(sys.argv[2], backend="mock")
with channel.receive(timeout=60).open() as mapping:
    say(torch.from_dlpack(mapping.tensor).sum().item())
channel.send(b"", dt.empty([4], torch.float32, "mock:0").fill_(3))
parameter = pickle.loads(base64.b64decode(told()))
say((type(parameter).__name__, parameter.requires_grad, parameter.sum().item()))
"""


@pytest.mark.parametrize("other_sends", [False, True])
def test_tensors_pass_between_versions(start: Start, other_sends: bool) -> None:
    arguments = [str(Path(__file__).parent), f"two-versions-{os.getpid()}-{other_sends}"]
    sender = start(SENDER, *arguments, **({"PYTHONPATH": OTHER} if other_sends else {}))
    receiver = start(RECEIVER, *arguments, **({} if other_sends else {"PYTHONPATH": OTHER}))
    versions = {line(sender), line(receiver)}
    assert len(versions) == 2 and "" not in versions, versions
    tell(receiver, line(sender))
    arrived = ast.literal_eval(line(receiver))
    assert arrived == {name: (f"torch.{name}", 8.0) for name in arrived} and len(arrived) == 6
    assert line(sender) == "listening"
    assert (line(receiver), line(sender)) == ("8.0", "12.0")
    tell(receiver, line(sender))
    assert ast.literal_eval(line(receiver)) == ("Parameter", True, 32.0)
    tell(sender, "end")
    finish(receiver)
    finish(sender)
