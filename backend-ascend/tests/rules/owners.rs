//! Drops of owners and callbacks run with the default context of the memory's device current: without one, calls of ACL
//! return 107002.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use device_ipc_core::{Buffer, Descriptor, DeviceOwner, Dtype, Ipc, Region, TensorLayout, close_unused};
use device_ipc_test_process::serve;

use super::memory::{HUGE, ONE, backend};
use super::support::{Raw, scene};

const SOON: Duration = Duration::from_secs(20);

/// The status of `aclrtGetDevice`, and the device.
type Seen = (i32, i32);

/// An owner of memory that reports the device that is current while it is dropped.
struct Witness {
    memory: Buffer,
    seen: Sender<Seen>,
}

impl Drop for Witness {
    fn drop(&mut self) {
        let raw = Raw::open();
        let _ = self.seen.send(raw.get_int("aclrtGetDevice"));
        // Frees of other libraries may set another device and leave it.
        assert_eq!(raw.call_with("aclrtSetDevice", 0), 0);
    }
}

// SAFETY: the buffer is freed after the witness.
unsafe impl DeviceOwner for Witness {
    fn region(&self) -> Region {
        self.memory.region()
    }
}

struct Witnesses {
    ipc: Ipc,
    sender: Sender<Seen>,
    seen: Receiver<Seen>,
}

impl Witnesses {
    fn new() -> Self {
        let (sender, seen) = channel();
        Self { ipc: Ipc::with_backend(backend()), sender, seen }
    }

    fn witness(&self, device: u32) -> Witness {
        Witness { memory: self.ipc.allocate(device, HUGE).expect("memory"), seen: self.sender.clone() }
    }

    #[track_caller]
    fn expect(&self, devices: &[i32]) {
        let mut seen: Vec<_> =
            devices.iter().map(|_| self.seen.recv_timeout(SOON).expect("the owner is dropped")).collect();
        seen.sort_unstable();
        assert_eq!(seen, devices.iter().map(|device| (0, *device)).collect::<Vec<_>>());
        assert!(self.seen.try_recv().is_err(), "each owner is dropped once");
    }
}

fn importer() {
    let ipc = Ipc::with_backend(backend());
    let (mut mappings, mut bundles) = (Vec::new(), Vec::new());
    serve(|command, argument| {
        match command {
            "open" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                mappings.push(ipc.open(&descriptor).at_home().expect("opened"));
            }
            "open-bundle" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                bundles.push(ipc.open(&descriptor).at_home().expect("opened"));
            }
            _ => {
                mappings.clear();
                bundles.clear();
                close_unused(SOON).expect("closed");
            }
        }
        "done"
    });
}

#[test]
fn drops_and_callbacks_run_on_the_memorys_device() {
    scene!("devices=2").play(&[("importer", importer)], |scene| {
        let all = Witnesses::new();
        let mut peer = scene.peer("importer");
        all.ipc.share(all.witness(1)).start().expect("shared").close(SOON).expect("closed");
        all.expect(&[1]);

        let export = all.ipc.share(all.witness(1)).start().expect("shared");
        let (seen, called) = channel();
        export.on_change(move || {
            let _ = seen.send(Raw::open().get_int("aclrtGetDevice"));
        });
        peer.ask(&format!("open {}", export.descriptor()));
        assert_eq!(called.recv_timeout(SOON), Ok((0, 1)), "the device of on_change");
        drop(export);
        peer.ask("release");
        all.expect(&[1]);

        let mut bundle = all.ipc.tensors();
        let layout = TensorLayout::contiguous(Dtype::U8, [HUGE]).expect("a layout");
        for (name, device) in [("a", 0), ("b", 1)] {
            bundle.owned(name, all.witness(device), Some(layout.clone())).expect("it fits");
        }
        let bundle = all.ipc.share_all(bundle).start().expect("shared");
        peer.ask(&format!("open-bundle {}", bundle.descriptor()));
        drop(bundle);
        peer.kill();
        all.expect(&[0, 1]);
    });
}

#[test]
fn failed_share_drops_owner_on_its_device() {
    scene!("devices=2").play(&[], |_| {
        let (all, raw) = (Witnesses::new(), Raw::open());
        let fail = |ipc: &Ipc, witness: Witness| {
            let failed = ipc.share(witness).dtype(Dtype::F32).shape([HUGE]).start();
            drop(failed.expect_err("the shape does not fit"));
        };
        // A thread without a context, and one with another context on the memory's device.
        let (ipc, witness) = (&all.ipc, all.witness(1));
        std::thread::scope(|scope| scope.spawn(move || fail(ipc, witness)).join().expect("dropped"));
        all.expect(&[1]);
        let own = raw.create_context(ONE.get() as i32);
        fail(&all.ipc, all.witness(1));
        all.expect(&[1]);
        assert_eq!(raw.context(), own, "the caller's context");
        drop(all.ipc.share(all.witness(0)));
        all.expect(&[0]);
        assert_eq!(raw.context(), own, "the caller's context");
        // The same context that the owner is dropped in.
        assert_eq!(raw.call_with("aclrtSetDevice", 1), 0);
        fail(&all.ipc, all.witness(1));
        all.expect(&[1]);
        assert_eq!(raw.get_int("aclrtGetDevice"), (0, 1), "the caller's device");
    });
}
