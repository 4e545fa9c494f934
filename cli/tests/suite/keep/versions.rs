//! A new version beside readers of the former one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use device_ipc::Ipc;
use rustix::process::Signal;

use super::{TIMEOUT, ipc, keep, model, open, release, replace_model, unique, values};
use crate::support::Directory;

/// Opens the weights repeatedly until it is stopped. Each open succeeds, has the values of its version, and no version follows a
/// later one. Returns the number of opens and the last version.
pub(super) fn read_repeatedly(ipc: &Ipc, name: &str, stop: &AtomicBool) -> (u64, u64) {
    let (mut opens, mut last) = (0, 0);
    while !stop.load(Ordering::Acquire) {
        let (version, mapping) = open(ipc, name).expect("the weights are always available");
        assert!(version >= last, "version {version} follows version {last}");
        assert_eq!(values(ipc, &mapping, "version"), [version as f32]);
        release(ipc, mapping);
        (opens, last) = (opens + 1, version);
    }
    (opens, last)
}

/// The values of a model of this version.
pub(super) fn version(version: u64) -> [(&'static str, [f32; 1]); 1] {
    [("version", [version as f32])]
}

#[test]
fn new_version_notifies_readers_that_keep_the_former_one() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("version", &[1.0])]);
    let name = unique("reload");
    let mut keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let mut following = ipc.find(&name, TIMEOUT).unwrap().open().reserved().at_home().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (ipc, name, stop) = (ipc.clone(), name.clone(), Arc::clone(&stop));
            std::thread::spawn(move || read_repeatedly(&ipc, &name, &stop))
        })
        .collect();
    for next in 2..=4 {
        let (before, mapping) = open(&ipc, &name).unwrap();
        assert_eq!(before, next - 1);
        let (sender, dropped) = channel();
        mapping.on_dropped(move || sender.send(()).unwrap());
        for (tensor, values) in version(next) {
            replace_model(&directory, "m.safetensors", &[(tensor, &values)]);
        }
        keeper.signal(Signal::HUP);
        keeper.until(&format!("keeps version {next}"));
        dropped.recv_timeout(TIMEOUT).expect("the reader is notified");
        assert_eq!(values(&ipc, &mapping, "version"), [before as f32], "the former version stays");
        let (now, current) = open(&ipc, &name).unwrap();
        assert_eq!((now, values(&ipc, &current, "version")), (next, vec![next as f32]));
        release(&ipc, current);
        release(&ipc, mapping);
        assert_eq!(following.follow().unwrap(), Some(next));
        assert_eq!(values(&ipc, &following, "version"), [next as f32], "the version at reserved addresses");
        assert_eq!(following.follow().unwrap(), None);
    }
    stop.store(true, Ordering::Release);
    for reader in readers {
        let (opens, last) = reader.join().expect("no open failed");
        assert!(opens > 0 && last <= 4, "{opens} opens, last version {last}");
    }
}

#[test]
fn version_that_cannot_be_loaded_leaves_the_present_one() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("version", &[1.0])]);
    let name = unique("bad-reload");
    let mut keeper = keep(&[&file, "--name", &name]);
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    keeper.signal(Signal::HUP);
    let warning = keeper.until("stays at version 1");
    assert!(warning.contains("truncated"), "{warning}");
    let ipc = ipc();
    let (version, mapping) = open(&ipc, &name).unwrap();
    assert_eq!((version, values(&ipc, &mapping, "version")), (1, vec![1.0]));
}
